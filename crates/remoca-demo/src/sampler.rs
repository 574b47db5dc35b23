//! Samples the status of the VM process twice a second, for curves over time.

use std::{
    path::Path,
    sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    thread::{self, JoinHandle},
    time::Duration,
};

use remoca_io::control;
use remoca_protocol::control::{Command, Reply};

const INTERVAL: Duration = Duration::from_millis(500);

/// State of the cache at one moment.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// Time since the start of the VM process.
    pub at_s: f64,
    pub used_bytes: u64,
}

pub struct Sampler {
    stop: Sender<()>,
    thread: JoinHandle<Vec<Sample>>,
}

impl Sampler {
    pub fn start(control: &Path) -> Sampler {
        let (stop, stopped) = channel();
        let control = control.to_owned();
        Sampler { stop, thread: thread::spawn(move || sample(&control, &stopped)) }
    }

    pub fn stop(self) -> Vec<Sample> {
        drop(self.stop);
        // A thread that panicked has no samples. The curve is then empty.
        self.thread.join().unwrap_or_default()
    }
}

fn sample(control: &Path, stopped: &Receiver<()>) -> Vec<Sample> {
    let mut samples = Vec::new();
    while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(INTERVAL) {
        // A missed sample is only a gap in a curve.
        if let Ok(Reply::Status(status)) = control::call(control, Command::Status) {
            samples.push(Sample { at_s: status.uptime_s, used_bytes: status.cache.used_bytes });
        }
    }
    samples
}
