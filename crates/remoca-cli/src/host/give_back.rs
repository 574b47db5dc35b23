//! `remoca host give-back`: all guests get their memory back. The daemon that runs does it; without one this process does.

use super::here::{Host, asked};
use super::table;
use anyhow::{Context, Result, anyhow, bail};
use remoca_host::daemon::{Daemon, Extent};
use remoca_host::plan::Policy;
use remoca_host::planner::{GuestTerms, Settings};
use remoca_host::record::{HostLock, Paths};
use remoca_host::resource::Resource;
use remoca_io::signals::Signals;
use remoca_protocol::host::HostReport;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Time that a daemon has: for what is under way, and for three plans with VMs that do not follow.
const PATIENCE: Duration = Duration::from_secs(300);
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Gives all guests their memory back, and shows what each has then. `config` is the folder of the files, `directory` that of the sockets.
///
/// # Errors
/// If a guest does not have all of it, or the daemon that runs does not do it.
pub(super) fn run(config: &Path, directory: &Path) -> Result<()> {
    let paths = Paths::new(directory);
    let report = match HostLock::take(&paths.lock) {
        Ok(_lock) => alone(config, directory, &paths)?,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => by_daemon(&paths)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            bail!("{} does not exist: no VM process runs here (--sockets)", directory.display())
        }
        Err(error) => return Err(anyhow!(error).context(format!("cannot lock {}", paths.lock.display()))),
    };
    let (text, lacking) = table::given_back(&report);
    io::stdout().write_all(text.as_bytes())?;
    match lacking {
        0 => Ok(()),
        1 => bail!("a guest does not have all of its memory back: NOTE says why. Mend that, and repeat the command"),
        count => bail!(
            "{count} guests do not have all of their memory back: NOTE says why. Mend that, and repeat the command"
        ),
    }
}

fn alone(config: &Path, directory: &Path, paths: &Paths) -> Result<HostReport> {
    let settings = Settings {
        resource: Resource::Local,
        // What is in use now.
        total_bytes: 0,
        policy: Policy::Optimal,
        applies: true,
        interval: Duration::from_secs(10),
        window: Duration::from_secs(60),
        readings_min: 1,
        guests: Some(GuestTerms::NO_ROUNDS),
    };
    let host = Host { directory: directory.into(), folder: config.into(), output: None, is_first: true };
    let signals = Signals::take().context("cannot take signals")?;
    let mut daemon = Daemon::new(settings, host, Some(paths))?;
    daemon.give_back();
    daemon.run(signals.stop.as_fd(), Extent::Once)?;
    Ok(daemon.report())
}

/// Has the daemon that runs do it, and waits for that.
fn by_daemon(paths: &Paths) -> Result<HostReport> {
    let before = asked(paths)?;
    if before.resource != Resource::Local.name() {
        bail!(
            "the daemon that runs divides {}s, and moves no memory of guests: stop it (`systemctl stop remoca-host`), and repeat the command",
            before.resource
        );
    }
    if !before.applies {
        bail!("the daemon that runs only watches: stop it (`systemctl stop remoca-host`), and repeat the command");
    }
    let request = &paths.request;
    File::create(request).with_context(|| format!("cannot ask the daemon by {}", request.display()))?;
    let begun = Instant::now();
    while request.exists() {
        if begun.elapsed() >= PATIENCE {
            // A later daemon would take it for a new one.
            let _ = std::fs::remove_file(request);
            bail!(
                "the daemon that runs has not done it in {} s: `remoca host log` shows how far it is. If it is of an older version, restart it",
                PATIENCE.as_secs()
            );
        }
        sleep(LOOK_EVERY);
    }
    asked(paths)
}
