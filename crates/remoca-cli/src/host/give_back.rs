//! `remoca host give-back`: all guests get their memory back. The daemon that runs does it; without one this process does.

use super::here::{Host, asked};
use super::table;
use crate::memory::KnownFiles;
use crate::output::output;
use crate::runtime::KnownSockets;
use anyhow::{Context, Result, anyhow, bail};
use remoca_host::daemon::{Daemon, Extent};
use remoca_host::plan::Policy;
use remoca_host::planner::{GuestTerms, Settings};
use remoca_host::record::{HostLock, Paths};
use remoca_host::request;
use remoca_host::resource::Resource;
use remoca_io::signals::Signals;
use remoca_protocol::host::HostReport;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

/// Time that a daemon has: for what is under way, and for three plans with VMs that do not follow.
const PATIENCE: Duration = Duration::from_secs(300);
/// Time in which a daemon that was just started has its first report.
const START_PATIENCE: Duration = Duration::from_secs(30);
const LOOK_EVERY: Duration = Duration::from_millis(200);
const LATE: &str = "the daemon that runs has not done it in 300 s: `remoca host log` shows how far it is. If it is of an older version, restart it (`systemctl restart remoca-host`), then repeat the command";
const SILENT: &str = "the daemon that runs does not say what it does: restart it (`systemctl restart remoca-host`), then repeat the command";
const STOPPED: &str =
    "stopped: the daemon that runs goes on with what it has begun, and `remoca host status` shows how far it is";

/// Gives all guests their memory back, and shows what each has then. `config` is the folder of the files, `directory` that of the sockets.
///
/// # Errors
/// If a guest does not have all of it, or the daemon that runs does not do it.
pub(super) fn run(config: &Path, directory: &Path) -> Result<()> {
    let paths = Paths::new(directory);
    // Before any thread starts.
    let signals = Signals::take().context("cannot take signals")?;
    let report = loop {
        match HostLock::take(&paths.lock) {
            Ok(_lock) => {
                // Whoever was asked has ended, and this process does it.
                let _ = request::remove(&paths.request);
                break alone(config, directory, &paths, &signals)?;
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                bail!("{} does not exist: no VM process runs here (--sockets)", directory.display())
            }
            Err(error) => return Err(anyhow!(error).context(format!("cannot lock {}", paths.lock.display()))),
        }
        if let Some(report) = by_daemon(&paths, &signals)? {
            break report;
        }
    };
    // One that the operator names no monitor for any longer is not meant to come back.
    let is_meant = |name: &str| KnownFiles::default().monitor_of(name, config) != Ok(None);
    let (text, lacking) = table::given_back(&report, is_meant);
    output().write_all(text.as_bytes())?;
    match lacking {
        0 => Ok(()),
        1 => bail!("a guest does not have all of its memory back: NOTE says why. Fix that, then repeat the command"),
        count => bail!(
            "{count} guests do not have all of their memory back: NOTE says why. Fix that, then repeat the command"
        ),
    }
}

fn alone(config: &Path, directory: &Path, paths: &Paths, signals: &Signals) -> Result<HostReport> {
    let settings = Settings {
        resource: Resource::Local,
        // That of the former daemon, or what is in use now.
        total_bytes: 0,
        policy: Policy::Optimal,
        applies: true,
        interval: Duration::from_secs(10),
        window: Duration::from_secs(60),
        readings_min: 1,
        guests: Some(GuestTerms::NO_ROUNDS),
    };
    let (directory, folder) = (directory.into(), config.into());
    let host = Host {
        directory,
        folder,
        output: None,
        is_first: true,
        known: KnownSockets::default(),
        files: KnownFiles::default(),
    };
    let mut daemon = Daemon::new(settings, host, Some(paths))?;
    daemon.give_back();
    daemon.run(signals.stop.as_fd(), Extent::Once)?;
    Ok(daemon.report())
}

/// Has whoever has the lock do it, and waits for that. Returns `None` if nobody has it any longer.
fn by_daemon(paths: &Paths, signals: &Signals) -> Result<Option<HostReport>> {
    let Some(before) = report_within(START_PATIENCE, paths, signals)? else { return Ok(None) };
    if before.resource != Resource::Local.name() {
        let resource = &before.resource;
        bail!("the daemon that runs divides {resource}s, and moves no memory of guests. {}", stop_first(before.pid));
    }
    if !before.applies {
        bail!("the daemon that runs only watches (no `--apply`). {}", stop_first(before.pid));
    }
    let path = &paths.request;
    request::make(path).with_context(|| format!("cannot ask the daemon by {}", path.display()))?;
    let begun = Instant::now();
    while request::is_there(path) {
        if has_ended(paths) {
            return Ok(None);
        }
        let is_late = begun.elapsed() >= PATIENCE;
        if is_late || is_stopped(signals)? {
            // A later daemon would take it for a new one.
            let _ = request::remove(path);
            bail!(if is_late { LATE } else { STOPPED });
        }
    }
    report_within(Duration::ZERO, paths, signals)
}

/// Returns what to do about a daemon that cannot do it.
fn stop_first(pid: u32) -> String {
    format!(
        "Stop it (`systemctl stop remoca-host`; if it is not that service, end process {pid}), repeat this command, and start it again \
         (`systemctl start remoca-host`)"
    )
}

/// Returns the report of whoever has the lock, for which it has so much time. Returns `None` if nobody has it any longer.
fn report_within(time: Duration, paths: &Paths, signals: &Signals) -> Result<Option<HostReport>> {
    let begun = Instant::now();
    loop {
        match asked(paths) {
            Ok(report) => return Ok(Some(report)),
            Err(_) if has_ended(paths) => return Ok(None),
            Err(error) if begun.elapsed() >= time => return Err(error.context(SILENT)),
            Err(_) if is_stopped(signals)? => bail!("stopped"),
            Err(_) => {}
        }
    }
}

/// Returns whether nobody has the lock.
fn has_ended(paths: &Paths) -> bool {
    HostLock::take(&paths.lock).is_ok()
}

/// Waits for a moment. Returns whether the operator stopped the command in it.
fn is_stopped(signals: &Signals) -> Result<bool> {
    let time = Timespec { tv_sec: 0, tv_nsec: LOOK_EVERY.subsec_nanos().into() };
    match poll(&mut [PollFd::new(&signals.stop, PollFlags::IN)], Some(&time)) {
        Ok(count) => Ok(count > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_that_is_silent_is_to_be_restarted() {
        let folder = tempfile::tempdir().unwrap();
        let (paths, signals) = (Paths::new(folder.path()), Signals::take().unwrap());
        let _lock = HostLock::take(&paths.lock).unwrap();
        let error = format!("{:#}", report_within(Duration::ZERO, &paths, &signals).unwrap_err());
        assert!(error.contains("`systemctl restart remoca-host`), then repeat the command: "), "{error}");
    }
}
