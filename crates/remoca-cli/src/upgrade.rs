//! `remoca upgrade`: replaces the program of a running VM process, which keeps its process ID and all of its sockets.

use crate::runtime;
use anyhow::{Context, Result, bail};
use clap::Args;
use remoca_protocol::control::{Command, Status};
use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Time in which guests that have to connect again must be back. QEMU tries once a second.
const RETURN_TIME_MAX: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Upgrade a running VM process in place: guests stay connected, and nothing is restarted.
///
/// First the new program is asked whether it can take over; if it cannot, nothing changes. SIGHUP does the same with the
/// program at the path from which the process was started. The command fails if a guest was attached before and is not
/// attached afterwards.
#[derive(Args, Debug)]
pub struct UpgradeArgs {
    /// Name of the VM process, or the path of its control socket
    #[arg(value_name = "NAME")]
    name: String,

    /// The program to run from now on [default: the one at the path from which the process was started]
    #[arg(long, value_name = "PATH")]
    program: Option<PathBuf>,
}

/// Runs the subcommand.
///
/// # Errors
/// If the VM process does not answer, continues without the upgrade, or has lost a guest by it.
pub fn run(args: &UpgradeArgs) -> Result<()> {
    let program = args.program.as_ref().map(std::path::absolute).transpose().context("no working directory")?;
    let Some(socket) = runtime::sockets(Some(&args.name))?.pop() else { bail!("there is no such VM process") };
    let before = guests(&runtime::ask(&socket, Command::Status)?);
    let mut status = runtime::ask(&socket, Command::Upgrade { program })?;
    let (name, pid, version) = (&status.name, status.pid, &status.version);
    writeln!(std::io::stdout(), "{name}: process {pid} runs version {version}")?;
    let give_up_at = Instant::now() + RETURN_TIME_MAX;
    loop {
        let missing = missing(&before, &guests(&status));
        if missing.is_empty() {
            return Ok(());
        }
        if Instant::now() >= give_up_at {
            bail!(
                "the upgrade is done, but it disconnected the guest from {}, which is not back after {} seconds. If it was not shut \
                 down, its hypervisor does not connect again by itself: restart the guest, and see docs/guests.md for the \
                 setting that reconnects",
                missing.join(", "),
                RETURN_TIME_MAX.as_secs()
            );
        }
        std::thread::sleep(LOOK_EVERY);
        status = runtime::ask(&socket, Command::Status)?;
    }
}

/// Returns each device with the number of guests that are attached to it.
fn guests(status: &Status) -> Vec<(String, usize)> {
    let count = |attached: bool, clients: Option<usize>| clients.unwrap_or(usize::from(attached));
    let disks = status.disks.iter().map(|disk| (disk.name.clone(), count(disk.attached, disk.nbd_clients)));
    let port = status.port.iter().map(|port| ("the port".to_owned(), count(port.attached, port.nbd_clients)));
    disks.chain(port).collect()
}

/// Returns the devices that have fewer guests than before.
fn missing<'a>(before: &'a [(String, usize)], after: &[(String, usize)]) -> Vec<&'a str> {
    let is_missing = |((_, before), (_, after)): &(&(String, usize), &(String, usize))| after < before;
    before.iter().zip(after).filter(is_missing).map(|((name, _), _)| name.as_str()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_is_not_back_is_named() {
        let devices = |counts: [usize; 3]| ["root", "data", "the port"].map(str::to_owned).into_iter().zip(counts);
        let guests = |counts| devices(counts).collect::<Vec<_>>();
        assert_eq!(missing(&guests([1, 2, 0]), &guests([1, 2, 1])), Vec::<&str>::new());
        assert_eq!(missing(&guests([1, 2, 1]), &guests([1, 1, 0])), ["data", "the port"]);
    }
}
