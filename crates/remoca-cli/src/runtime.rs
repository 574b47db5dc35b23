//! Finds running VM processes by their control sockets, and sends them commands.

use anyhow::{Context, Result, bail};
use remoca_io::control;
use remoca_protocol::control::{Command, Reply, Status};
use std::path::{Path, PathBuf};

const SUFFIX: &str = "ctl";

/// Returns the directory of control sockets: `/run/remoca` for root, else below `$XDG_RUNTIME_DIR`.
///
/// # Errors
/// If a user has no `$XDG_RUNTIME_DIR`.
pub fn directory() -> Result<PathBuf> {
    if rustix::process::geteuid().is_root() {
        return Ok("/run/remoca".into());
    }
    match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(runtime) => Ok(PathBuf::from(runtime).join("remoca")),
        None => bail!(
            "$XDG_RUNTIME_DIR is not set, so there is no directory for the control socket: set it, or give --control PATH"
        ),
    }
}

/// Returns the control socket of the VM process `name`.
///
/// # Errors
/// As [`directory`].
pub fn socket_of(name: &str) -> Result<PathBuf> {
    Ok(directory()?.join(format!("{name}.{SUFFIX}")))
}

/// Returns the control socket that `name` denotes: the path itself if it contains `/`, else the socket of the VM with
/// that name. Without a name, returns all control sockets of the directory.
///
/// # Errors
/// If there is no directory for control sockets.
pub fn sockets(name: Option<&str>) -> Result<Vec<PathBuf>> {
    match name {
        Some(path) if path.contains('/') => Ok(vec![path.into()]),
        Some(name) => Ok(vec![socket_of(name)?]),
        None => {
            let directory = directory()?;
            let Ok(entries) = std::fs::read_dir(&directory) else { return Ok(Vec::new()) };
            let mut found: Vec<_> = entries
                .filter_map(|entry| Some(entry.ok()?.path()))
                .filter(|path| path.extension().is_some_and(|extension| extension == SUFFIX))
                .collect();
            found.sort();
            Ok(found)
        }
    }
}

/// Sends a command to the VM process behind `socket`, and returns the status that the process reports afterwards.
///
/// # Errors
/// If the process does not answer, or refuses the command.
pub fn ask(socket: &Path, command: Command) -> Result<Status> {
    let shown = socket.display();
    let reply = control::call(socket, command)
        .with_context(|| format!("no VM process answers at {shown}: is `remoca disk` running with this name?"))?;
    match reply {
        Reply::Status(status) => Ok(*status),
        Reply::Error { error } => bail!("{error}"),
    }
}
