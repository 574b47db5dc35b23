//! Takes snapshots at an interval, and publishes the newest. Whoever shows one causes no work of VM processes.

use crate::ask::Asker;
use crate::host::HostAsker;
use crate::snapshot::{Snapshot, Taker};
use rustix::process::{Resource, Rlimit};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

/// Age at which a miss-ratio curve is read again. A curve changes about once a minute.
const CURVE_AGE: Duration = Duration::from_secs(60);

/// Finds the control sockets of the VM processes that run now.
pub type Sockets = Box<dyn Fn() -> Vec<PathBuf> + Send>;

/// Takes snapshots.
pub struct Watch {
    sockets: Sockets,
    interval: Duration,
    asker: Asker,
    host: HostAsker,
    taker: Taker,
}

impl Watch {
    /// Returns what takes a snapshot of the processes at `sockets` every `interval`.
    #[must_use]
    pub fn new(sockets: Sockets, interval: Duration) -> Self {
        Self { sockets, interval, asker: Asker::default(), host: HostAsker::new(None), taker: Taker::new(host_name()) }
    }

    /// Returns the same with the reports of the daemon that has this socket, if it runs.
    #[must_use]
    pub fn with_host(self, socket: Option<PathBuf>) -> Self {
        Self { host: HostAsker::new(socket), ..self }
    }

    /// Returns the same for processes that may take so long to answer.
    #[cfg(test)]
    pub fn with_patience(self, patience: Duration) -> Self {
        Self { asker: Asker::with_patience(patience), ..self }
    }

    /// Takes one snapshot. Returns it after [`crate::ask::PATIENCE`] at most.
    pub async fn take(&mut self) -> Snapshot {
        let mut sockets = (self.sockets)();
        sockets.sort();
        sockets.dedup();
        // All curves are read in turn, a few for each snapshot.
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a small positive number")]
        let share = (sockets.len() as f64 * self.interval.div_duration_f64(CURVE_AGE)).ceil() as usize;
        let is_first = !self.taker.has_taken();
        let share = if is_first { sockets.len() } else { share.max(1) };
        let curves = self.taker.curves_to_ask(&sockets, Instant::now(), CURVE_AGE, share);
        let (answers, heard) = tokio::join!(self.asker.ask(&sockets, &curves), self.host.ask());
        self.taker.next(answers, unix_s(), heard)
    }

    /// Takes snapshots on a thread of its own until nobody listens to `publish` any longer. On a thread that also shows them, many who
    /// look would use up the time in which processes answer, and all of these would look silent.
    ///
    /// # Errors
    /// If the system has no thread left.
    pub fn start(self, publish: watch::Sender<Option<Arc<Snapshot>>>) -> io::Result<JoinHandle<io::Result<()>>> {
        let run = move || runtime().map(|runtime| runtime.block_on(self.run(publish)));
        thread::Builder::new().name("snapshots".into()).spawn(run)
    }

    async fn run(mut self, publish: watch::Sender<Option<Arc<Snapshot>>>) {
        let mut ticks = tokio::time::interval(self.interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while !publish.is_closed() {
            ticks.tick().await;
            let snapshot = self.take().await;
            publish.send_replace(Some(Arc::new(snapshot)));
        }
    }
}

/// Returns one snapshot of the processes at `sockets`, without curves.
///
/// # Errors
/// If the system has no descriptors left.
pub fn take_one(sockets: &[PathBuf], host_socket: Option<PathBuf>) -> io::Result<Snapshot> {
    let (mut asker, mut host) = (Asker::default(), HostAsker::new(host_socket));
    let (answers, heard) = runtime()?.block_on(async { tokio::join!(asker.ask(sockets, &[]), host.ask()) });
    Ok(Taker::new(host_name()).next(answers, unix_s(), heard))
}

/// Returns a runtime for one thread, in a process that may have as many files open as it is allowed.
///
/// # Errors
/// If the system has no descriptors left.
pub fn runtime() -> io::Result<tokio::runtime::Runtime> {
    let Rlimit { maximum, .. } = rustix::process::getrlimit(Resource::Nofile);
    // A VM takes one while it is asked. With few, they are asked in turn.
    let _ = rustix::process::setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}

fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

fn unix_s() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}
