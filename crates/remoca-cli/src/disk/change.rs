//! `remoca disk add`, `remove` and `rescan`: change the disks of a running VM process.
//!
//! A disk comes or goes in the VM's file, and then the process reads it again: it becomes its own program anew, as in an
//! upgrade, which no guest notices. What does not work is taken out of the file again.

use crate::look;
use crate::output::{output, say};
use crate::runtime;
use crate::settings::{Folder, edit, fields, vm_path};
use crate::size::show_size;
use anyhow::{Context, Result, anyhow, bail};
use clap::Subcommand;
use remoca_disk::start::{DiskOptions, refuse_other_formats};
use remoca_protocol::control::{Command, DiskStatus, Status, UPGRADE_UNDER_WAY};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Time that a change waits for an upgrade that somebody else has begun. It is refused sooner if it does not succeed.
const OTHERS_TIME_MAX: Duration = Duration::from_secs(30);

/// Command by which a process becomes its own program anew, with the configuration as it is now.
const RELOAD: Command = Command::Upgrade { program: None };

/// Time in which a process that died is started again.
const RETURN_TIME_MAX: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// A change of the disks of a running VM process.
#[derive(Subcommand, Debug)]
pub enum Change {
    /// Add a disk, whose settings are those of --disk, to the VM's file and to its running process. Guests stay connected, and
    /// the cache of the other disks stays. The process continues with the program that is installed now, as after `remoca
    /// upgrade`
    Add {
        /// Name of the VM process, or the path of its control socket
        #[arg(value_name = "NAME")]
        name: String,

        /// The disk: name=NAME,image=IMAGE,socket=PATH and so on, as --disk has it
        #[arg(value_name = "KEY=VALUE,...", value_parser = described)]
        disk: Box<DiskOptions>,

        #[command(flatten)]
        folder: Folder,
    },
    /// Remove a disk from the VM's file and from its running process. No guest may be attached to it, unless --force is given
    Remove {
        /// Name of the VM process, or the path of its control socket
        #[arg(value_name = "NAME")]
        name: String,

        /// Name of the disk
        #[arg(value_name = "DISK")]
        disk: String,

        /// Disconnect the guest that is attached. It does not get the disk back: what it reads and writes there fails or hangs,
        /// until the disk is detached from it or it is shut down
        #[arg(long)]
        force: bool,

        #[command(flatten)]
        folder: Folder,
    },
    /// Look now whether images have become larger or smaller, and say what was found. A VM process looks by itself every two
    /// seconds
    Rescan {
        /// Name of the VM process, or the path of its control socket
        #[arg(value_name = "NAME")]
        name: String,
    },
}

/// Parses the description of a disk.
fn described(words: &str) -> Result<Box<DiskOptions>, String> {
    fields::parse(words).map(Box::new)
}

/// Executes the change, and says what came of it.
///
/// # Errors
/// If the VM process does not answer, or refuses.
pub fn run(change: &Change) -> Result<()> {
    match change {
        Change::Add { name, disk, folder } => add(name, disk, &folder.config),
        Change::Remove { name, disk, force, folder } => remove(name, disk, *force, &folder.config),
        Change::Rescan { name } => rescan(name),
    }
}

fn add(vm: &str, disk: &DiskOptions, folder: &Path) -> Result<()> {
    let mut disk = disk.clone();
    disk.make_absolute(&std::env::current_dir().context("no working directory")?);
    let name = disk.name.as_deref().context("a disk that is added needs a name: name=NAME,...")?;
    let (socket, before) = ask_before(vm)?;
    let vm = &*before.name;
    if before.disks.iter().any(|disk| disk.name == name) {
        bail!("{vm} has a disk {name} already: choose another name");
    }
    if !disk.is_raw {
        // The file will say that it is raw.
        let image = disk.image.clone();
        let begun = vec![((), look::begin(move || refuse_other_formats(&image)))];
        let looked = look::end(begun).find_map(|(_, looked)| looked);
        looked.with_context(|| format!("{}: its file system does not answer", disk.image))??;
    }
    change_file(vm, folder, &socket, RELOAD, |folder| edit::add_disk(folder, vm, &disk), |status| has(status, name))
        .with_context(|| format!("{name} is not added, and nothing has changed"))?;
    Ok(writeln!(output(), "{vm}: {name} is added")?)
}

fn remove(vm: &str, name: &str, force: bool, folder: &Path) -> Result<()> {
    let (socket, before) = ask_before(vm)?;
    let vm = &*before.name;
    let Some(disk) = before.disks.iter().find(|disk| disk.name == name) else {
        bail!("{vm} has no disk {name}");
    };
    if disk.attached && !force {
        bail!(
            "a guest is attached to {name}: detach the disk first (`virsh detach-disk --live --config`), or shut the guest down and \
             take the disk out of its domain. --force takes the disk away from it"
        );
    }
    if before.disks.len() == 1 {
        bail!("{name} is the only disk of {vm}: stop the process instead");
    }
    let reload = match force {
        true => Command::RemoveDisk { disk: name.into() },
        false => RELOAD,
    };
    change_file(vm, folder, &socket, reload, |folder| edit::remove_disk(folder, vm, name), |status| !has(status, name))
        .with_context(|| format!("{name} is not removed, and nothing has changed"))?;
    if disk.attached {
        say(format_args!("the guest that was attached to {name} is disconnected, and its requests there fail or hang"));
    }
    Ok(writeln!(output(), "{vm}: {name} is removed")?)
}

fn has(status: &Status, name: &str) -> bool {
    status.disks.iter().any(|disk| disk.name == name)
}

fn ask_before(vm: &str) -> Result<(PathBuf, Status)> {
    let socket = runtime::socket_named(vm)?;
    let status = runtime::ask(&socket, Command::Status)?;
    // Its file is changed: another VM's is none of its business, whatever it says.
    if !vm.contains('/') && status.name != vm {
        bail!("the process at {} says that it is {}, not {vm}. Nothing was changed", socket.display(), status.name);
    }
    if status.name.contains('/') {
        bail!("the process at {} says that its name is {}, which no file has", socket.display(), status.name);
    }
    Ok((socket, status))
}

/// Changes the file of a VM, and has its process read it by the command `reload`. If the process is not as `wanted` then, the file becomes again
/// what it was.
fn change_file(
    vm: &str,
    folder: &Path,
    socket: &Path,
    reload: Command,
    change: impl FnOnce(&Path) -> Result<()>,
    wanted: impl Fn(&Status) -> bool,
) -> Result<()> {
    let path = vm_path(folder, vm);
    // What another command writes meanwhile would be lost with what is taken back here.
    let _lock = edit::lock(folder)?;
    let before = std::fs::read(&path);
    change(folder)?;
    let after = upgrade(socket, &reload);
    let is_read = after.is_ok();
    // The answer may have been lost, or have come too late.
    let why = match after.or_else(|error| status_again(socket).filter(&wanted).ok_or(error)) {
        Ok(status) if wanted(&status) => return Ok(()),
        Ok(_) => anyhow!(
            "the process does not have it so: its log says why, or it was started with --disk, which the file cannot change"
        ),
        Err(error) => error,
    };
    let shown = path.display();
    before
        .and_then(|text| edit::replace(&path, &text, edit::MODE))
        .with_context(|| format!("{shown} could not be restored"))?;
    if is_read {
        // So that its last good copy is this file as well. It serves its disks in any case.
        let _ = upgrade(socket, &RELOAD);
    }
    Err(why)
}

/// Has the process read its files by the command `reload`. Waits for the end of an upgrade that somebody else has begun: it may
/// have read them before they changed, or after.
fn upgrade(socket: &Path, reload: &Command) -> Result<Status> {
    let give_up_at = Instant::now() + OTHERS_TIME_MAX;
    loop {
        match runtime::ask(socket, reload.clone()) {
            Err(error) if error.to_string().contains(UPGRADE_UNDER_WAY) && Instant::now() < give_up_at => {
                std::thread::sleep(Duration::from_millis(200));
            }
            answer => return answer,
        }
    }
}

/// Returns the status of a process. One that has just died is given time to be started again, because it reads the file then.
fn status_again(socket: &Path) -> Option<Status> {
    let give_up_at = Instant::now() + RETURN_TIME_MAX;
    loop {
        match runtime::ask(socket, Command::Status) {
            Ok(status) => return Some(status),
            Err(_) if Instant::now() < give_up_at => std::thread::sleep(LOOK_EVERY),
            Err(_) => return None,
        }
    }
}

fn rescan(name: &str) -> Result<()> {
    let socket = runtime::socket_named(name)?;
    let before = runtime::ask(&socket, Command::Status)?;
    let after = runtime::ask(&socket, Command::Rescan)?;
    for disk in &after.disks {
        let former = before.disks.iter().find(|former| former.name == disk.name);
        writeln!(output(), "{}: {}", disk.name, found(former.map(|former| former.bytes), disk))?;
    }
    Ok(())
}

/// Returns what was found of a disk that had `before` bytes.
fn found(before: Option<u64>, disk: &DiskStatus) -> String {
    let bytes = disk.bytes;
    let change = match before {
        Some(before) if before != bytes => format!("{bytes} bytes now, {before} before"),
        _ => format!("{bytes} bytes, as before"),
    };
    let shrunk = disk.shrunk_from_bytes.map_or(String::new(), |from| {
        format!("; the image had {} once: reads and writes beyond its end fail", show_size(from))
    });
    let seen = match (disk.guest_sees_size, disk.nbd_clients) {
        (true, _) => "",
        (false, Some(_)) => "; its NBD clients see it when they connect again",
        (false, None) => "; its guest sees it when its hypervisor connects again",
    };
    let waits = if disk.store == "waiting" { "; its server does not answer" } else { "" };
    format!("{change}{shrunk}{seen}{waits}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::FromArgMatches;
    use serde_json::json;

    #[test]
    fn a_change_is_told_the_folder_of_the_configuration() {
        for words in [&["add", "web1", "name=a,image=/a"][..], &["remove", "web1", "a"]] {
            let words = [&["disk"][..], words, &["--config", "/etc/other"]].concat();
            let matches = Change::augment_subcommands(clap::Command::new("disk")).try_get_matches_from(words).unwrap();
            match Change::from_arg_matches(&matches).unwrap() {
                Change::Add { folder, .. } | Change::Remove { folder, .. } => {
                    assert_eq!(folder.config, Path::new("/etc/other"));
                }
                Change::Rescan { .. } => panic!("it needs no folder"),
            }
        }
    }

    #[test]
    fn a_rescan_tells_the_size_and_who_does_not_have_it_yet() {
        let disk = |shrunk_from: Option<u64>, sees, clients: Option<usize>, store: &str| -> DiskStatus {
            let disk = json!({
                "name": "data", "image": "data.img", "socket": "data.sock", "bytes": 8192, "read_only": false, "attached": true,
                "guest_sees_size": sees, "nbd_clients": clients, "store": store, "shrunk_from_bytes": shrunk_from,
            });
            serde_json::from_value(disk).unwrap()
        };
        let well = disk(None, true, None, "up");
        assert_eq!(found(Some(4096), &well), "8192 bytes now, 4096 before");
        assert_eq!(found(Some(8192), &well), "8192 bytes, as before");
        assert_eq!(found(None, &well), "8192 bytes, as before");
        let shrunk = disk(Some(1 << 20), true, None, "up");
        assert_eq!(
            found(Some(1 << 20), &shrunk),
            "8192 bytes now, 1048576 before; the image had 1M once: reads and writes beyond its end fail"
        );
        let told = "8192 bytes now, 4096 before; its guest sees it when its hypervisor connects again";
        assert_eq!(found(Some(4096), &disk(None, false, None, "up")), told);
        let told = "8192 bytes now, 4096 before; its NBD clients see it when they connect again";
        assert_eq!(found(Some(4096), &disk(None, false, Some(2), "up")), told);
        let told = "8192 bytes, as before; its server does not answer";
        assert_eq!(found(Some(8192), &disk(None, true, None, "waiting")), told);
    }
}
