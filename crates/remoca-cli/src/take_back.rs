//! `remoca take-back`: has the memory server of this host take memory back from a VM process that has it mapped.

use crate::output::output;
use crate::runtime::explain_unreachable;
use crate::settings::Folder;
use crate::size::{parse_size, show_size};
use crate::status::server::{answer, control};
use anyhow::{Context, Result, bail};
use clap::Args;
use remoca_protocol::shown;
use remoca_server::command::{Command, Reply, command_path};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Longer than the server takes for its answer.
const PATIENCE: Duration = Duration::from_secs(20);
const PAGE_BYTES: u64 = 4096;

/// Limit a mapped pool of this host's memory server (`remoca serve`), and take back what is above the limit.
///
/// Its VM process forgets the pages above it. One that does not answer within 100 ms loses the whole pool, and gets another one.
#[derive(Args, Debug)]
pub struct TakeBackArgs {
    /// The pool, as `remoca status --server` shows it
    #[arg(value_name = "POOL")]
    pool: String,

    /// What the VM process may keep, such as 512M, or 0
    #[arg(value_name = "SIZE", value_parser = parse_size)]
    size: u64,

    /// Control socket of the memory server [default: `control` of [serve] in remoca.toml, else that of the unit,
    /// /run/remoca-serve/control]
    #[arg(long, value_name = "PATH")]
    server: Option<PathBuf>,

    #[command(flatten)]
    folder: Folder,
}

/// Runs the subcommand.
///
/// # Errors
/// If the server does not answer, or refuses.
pub fn run(args: &TakeBackArgs) -> Result<()> {
    let socket = command_path(&control(args.server.as_deref(), &args.folder.config)?);
    let mut line = serde_json::to_vec(&Command::TakeBack { pool: args.pool.clone(), bytes: args.size })?;
    line.push(b'\n');
    let answer = answer(&socket, &line, PATIENCE).map_err(|error| explain_silence(&socket, error))?;
    let reply = shown::from_json(&answer)
        .with_context(|| format!("this is no memory server that takes commands: {}", socket.display()))?;
    let pool = &args.pool;
    match reply {
        Reply::Error(error) => bail!(error),
        Reply::Done(done) if done.ended => {
            Ok(writeln!(output(), "{pool}: ended, its client did not answer or is gone; all memory is back")?)
        }
        Reply::Done(done) => {
            let (has, limit) = (show_size(u64::from(done.pages) * PAGE_BYTES), show_size(args.size));
            Ok(writeln!(output(), "{pool}: has {has}, at most {limit}")?)
        }
    }
}

/// Returns the error of a memory server that does not answer, with what the operator can do.
fn explain_silence(socket: &Path, error: io::Error) -> anyhow::Error {
    if error.kind() == io::ErrorKind::WouldBlock {
        // It was connected, so the server has the command, and carries it out when it can.
        return anyhow::Error::new(error).context(format!(
            "no memory server answers at {} in time. It may still do what it was told: see `remoca status --server` later",
            socket.display()
        ));
    }
    let hint = "is `remoca serve` running with this --control, and are you its user or root?";
    explain_unreachable(socket, error, "no memory server answers", hint)
}

#[cfg(test)]
mod tests {
    use super::*;
    use remoca_io::socket::listen_as_hung;
    use std::os::unix::net::UnixListener;

    /// A server that was sent the command reads it when it goes on. One to which nobody could connect never hears of it.
    #[test]
    fn a_server_that_was_told_may_still_do_it() {
        let folder = tempfile::tempdir().unwrap();
        let [told, full] = ["told", "full"].map(|name| folder.path().join(name));
        let _told = UnixListener::bind(&told).unwrap();
        let _full = listen_as_hung(&full).unwrap();
        for (socket, may_do) in [(told, true), (full, false)] {
            let silent = answer(&socket, b"x\n", Duration::from_millis(20)).unwrap_err();
            let text = explain_silence(&socket, silent).to_string();
            assert!(text.contains("in time") && text.contains("may still do") == may_do, "{text}");
        }
    }
}
