//! `remoca upgrade`: replaces the program of a running VM process, which keeps its process ID and all of its sockets.

use crate::config::show::words_of;
use crate::disk;
use crate::output::{output, say};
use crate::runtime;
use crate::settings::kept::Kept;
use anyhow::{Context, Result, bail};
use clap::Args;
use remoca_protocol::control::{Command, Status};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Time in which guests that have to connect again must be back. QEMU tries once a second.
const RETURN_TIME_MAX: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// The eviction port among the devices of [`guests`].
pub const PORT: &str = "the port";

/// Upgrade a running VM process in place: guests stay connected, and nothing is restarted.
///
/// The configuration is read again, and what changed in it is shown: an upgrade to the same program is a reload.
///
/// First the new program is asked whether it can take over; if it cannot, nothing changes. SIGHUP does the same with the
/// program at the path from which the process was started. The command fails if a guest was attached before and is not
/// attached afterwards. With --all, one VM after the other is upgraded, and the first failure stops the rest. A process whose disks
/// are elsewhere is left out; without any VM there is nothing to do, which is no failure.
#[derive(Args, Debug)]
pub struct UpgradeArgs {
    /// Name of the VM process, or the path of its control socket
    #[arg(value_name = "NAME", required_unless_present = "all")]
    name: Option<String>,

    /// Upgrade all VM processes of this host, one at a time: each waits for its guests. Stops at the first failure
    #[arg(long, conflicts_with = "name")]
    all: bool,

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
    match &args.name {
        Some(name) => {
            let socket = runtime::socket_named(name)?;
            upgrade(&socket, &runtime::ask(&socket, Command::Status)?, program)
        }
        None => upgrade_all(&runtime::sockets(None)?, program.as_ref()),
    }
}

/// Upgrades one VM process after the other, and prints which are done. Leaves out sockets that no process listens on, and processes whose
/// disks are elsewhere.
///
/// # Errors
/// If an upgrade fails. Those after it are not begun, and the text names them. If no process answers, or some may run where this user
/// cannot look.
fn upgrade_all(sockets: &[PathBuf], program: Option<&PathBuf>) -> Result<()> {
    let (mut done, mut dead, mut away) = (Vec::new(), Vec::new(), Vec::new());
    for (number, socket) in sockets.iter().enumerate() {
        let name = name_of(socket);
        let upgraded = runtime::ask(socket, Command::Status).and_then(|before| match before.has_disks() {
            true => upgrade(socket, &before, program.cloned()).map(|()| &mut done),
            false => Ok(&mut away),
        });
        let error = match upgraded {
            Ok(names) => {
                names.push(name);
                continue;
            }
            Err(error) => error,
        };
        if runtime::is_absent(&error) {
            dead.push(name);
            continue;
        }
        let rest: Vec<_> = sockets[number + 1..].iter().map(|socket| name_of(socket)).collect();
        let (done, rest) = (list(&done), list(&rest));
        return Err(error.context(format!("the upgrade of {name} failed. Done before it: {done}. Not begun: {rest}")));
    }
    let dead = if dead.is_empty() { String::new() } else { format!(". No process answers for {}", list(&dead)) };
    let away = match &away[..] {
        [] => String::new(),
        away => format!(
            ". Not upgraded, as their disks are not here: {} (a restart upgrades one that waits for them)",
            list(away)
        ),
    };
    if done.is_empty() && away.is_empty() && dead.is_empty() && runtime::of_others("upgrade").is_empty() {
        return Ok(writeln!(output(), "there is no VM on this host to upgrade")?);
    }
    if done.is_empty() && away.is_empty() {
        bail!("no VM process runs here{dead}{}", runtime::elsewhere());
    }
    Ok(writeln!(output(), "{} of {} upgraded: {}{away}{dead}", done.len(), sockets.len(), list(&done))?)
}

fn name_of(socket: &Path) -> String {
    socket.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

fn list(names: &[String]) -> String {
    if names.is_empty() { "none".into() } else { names.join(", ") }
}

/// Upgrades the VM process behind `socket`, and waits for the guests that it had `before`.
fn upgrade(socket: &Path, before: &Status, program: Option<PathBuf>) -> Result<()> {
    let before = guests(before);
    let former = Kept::read(&Kept::beside(socket));
    let mut status = runtime::ask(socket, Command::Upgrade { program }).map_err(not_dead)?;
    let (name, pid, version) = (&status.name, status.pid, &status.version);
    writeln!(output(), "{name}: process {pid} runs version {version}")?;
    status.notice.iter().for_each(|notice| say(format_args!("{name}: {notice}")));
    if let (Some(former), Some(now)) = (former, Kept::read(&Kept::beside(socket))) {
        let folder = now.files.vm.as_ref().and_then(|file| file.path.ancestors().nth(2)).unwrap_or(Path::new(""));
        let changes = now.since(&former, disk::schema, &words_of(&status, name, folder));
        changes.iter().try_for_each(|change| writeln!(output(), "{name}: {change}"))?;
    }
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
        status = runtime::ask(socket, Command::Status).map_err(not_dead)?;
    }
}

/// Returns an error that says the same, for a process that answered before: it has died meanwhile.
fn not_dead(error: anyhow::Error) -> anyhow::Error {
    anyhow::anyhow!("{error:#}")
}

/// Returns each device with the number of guests that are attached to it.
pub fn guests(status: &Status) -> Vec<(String, usize)> {
    let count = |attached: bool, clients: Option<usize>| clients.unwrap_or(usize::from(attached));
    let disks = status.disks.iter().map(|disk| (disk.name.clone(), count(disk.attached, disk.nbd_clients)));
    let port = status.port.iter().map(|port| (PORT.to_owned(), count(port.attached, port.nbd_clients)));
    disks.chain(port).collect()
}

/// Returns the devices that have fewer guests than before.
fn missing<'a>(before: &'a [(String, usize)], after: &[(String, usize)]) -> Vec<&'a str> {
    let count = |name| after.iter().find(|(after, _)| after == name).map_or(0, |(_, count)| *count);
    before.iter().filter(|(name, before)| count(name) < *before).map(|(name, _)| name.as_str()).collect()
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
