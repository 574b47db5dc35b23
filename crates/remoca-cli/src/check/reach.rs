//! Sockets: whether they have a folder, libvirt's QEMU, which runs as a user of its own, could connect, and nobody else has them.

use crate::runtime::{OF_ROOT, directory};
use crate::vm::Vm;
use nix::unistd::{Gid, Uid, User, getgrouplist};
use remoca_disk::start::PortOptions;
use remoca_io::socket::has_listener;
use remoca_protocol::port::PORT_SERIAL;
use remoca_view::finding::Finding;
use std::ffi::CString;
use std::fs::Metadata;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

const QEMU_CONF: &str = "/etc/libvirt/qemu.conf";
/// Users of libvirt's QEMU in Debian and in Red Hat's systems.
const USERS: [&str; 2] = ["libvirt-qemu", "qemu"];
const WRITE: u32 = 2;
const SEARCH: u32 = 1;

/// A user, and the groups that it is in.
struct Account {
    name: String,
    uid: u32,
    gids: Vec<u32>,
}

/// Checks the sockets of a VM. If its process `hangs`, it listens at them.
pub(super) fn check(vm: &Vm, hangs: bool) -> Vec<Finding> {
    let qemu = qemu_user();
    let sockets = sockets(vm);
    if vm.running.is_some() {
        return sockets.iter().map(|(name, path)| of_running(name, path, qemu.as_ref())).collect();
    }
    let taken =
        sockets.iter().filter(|(_, path)| !hangs && has_listener(path)).map(|(name, path)| of_another(name, path));
    let mut findings: Vec<_> = taken.collect();
    findings.extend(sockets.iter().filter_map(|(name, path)| without_folder(name, path)));
    let is_in_group = |user: &Account| vm.options.socket_group.is_some_and(|group| user.gids.contains(&group));
    let stranger = qemu.filter(|user| user.uid != 0 && !is_in_group(user));
    let found = "only root will be able to connect";
    findings.extend(stranger.map(|user| unreachable("sockets".into(), found.into(), &user)));
    findings
}

/// Returns what is wrong with a socket of a VM that does not run, at which a process listens.
fn of_another(name: &str, path: &Path) -> Finding {
    let found = format!("{}: a process listens there that is not this VM's", path.display());
    let advice = "This VM cannot start, and a guest of it may get the disks of another one. `remoca config check` names VMs that share a \
                  socket, `ss -xlp` the process";
    Finding::failed(format!("socket {name}"), found, advice)
}

/// Returns each socket that a hypervisor connects to, with what it is for.
fn sockets(vm: &Vm) -> Vec<(String, PathBuf)> {
    let disks = vm.disks().filter_map(|(name, disk)| Some((name, disk.socket.clone()?)));
    let nbd = vm.options.nbd.iter().filter_map(|address| Some(("NBD".to_owned(), address.socket()?.to_owned())));
    let port = match &vm.options.port {
        PortOptions::Socket(path) => Some((PORT_SERIAL.to_owned(), path.clone())),
        PortOptions::None | PortOptions::NbdExport => None,
    };
    disks.chain(nbd).chain(port).collect()
}

/// Returns a finding if there is no folder for a socket that is to come, and the start of the process makes none.
fn without_folder(name: &str, path: &Path) -> Option<Finding> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty())?;
    let is_made = || folder == Path::new(OF_ROOT) || directory().is_some_and(|default| default == folder);
    (!folder.is_dir() && !is_made()).then(|| {
        let found = format!("{}: there is no folder {}", path.display(), folder.display());
        let advice = format!("Make it, at each boot if it is in /run, or use {OF_ROOT}");
        Finding::failed(format!("socket {name}"), found, advice)
    })
}

fn of_running(name: &str, path: &Path, qemu: Option<&Account>) -> Finding {
    let (what, shown) = (format!("socket {name}"), path.display());
    let metadata = match path.metadata() {
        Ok(metadata) if metadata.file_type().is_socket() => metadata,
        Ok(_) => return Finding::failed(what, format!("{shown} is no socket"), "Restart the process to make it again"),
        Err(error) => {
            let advice = "A hypervisor cannot connect. Restart the process to make it again";
            return Finding::failed(what, format!("{shown}: {error}"), advice);
        }
    };
    let modes = format!("{shown}, mode {:o}, group {}", metadata.permissions().mode() & 0o777, metadata.gid());
    match (qemu, qemu.and_then(|user| closed_folder(path, user))) {
        (Some(user), Some(folder)) => {
            let folder = folder.display();
            let found = format!("{shown}: {} may not enter {folder}", user.name);
            Finding::failed(what, found, format!("`chmod o+x {folder}`, or use /run/remoca"))
        }
        (Some(user), None) if !permits(&metadata, user, WRITE) => unreachable(what, modes, user),
        _ if metadata.mode() & WRITE != 0 => {
            let advice = format!("`chmod o= {shown}`, and set `socket-group` if QEMU runs as a user of its own");
            Finding::warning(what, format!("{modes}: every user may connect in place of the guest"), advice)
        }
        (None, _) => Finding::ok(what, format!("{modes}; there is no user for libvirt's QEMU here")),
        (Some(user), None) => Finding::ok(what, format!("{modes}: {} may connect", user.name)),
    }
}

/// Returns a folder on the way to `path` that `user` may not enter, or `None` if there is none.
fn closed_folder<'p>(path: &'p Path, user: &Account) -> Option<&'p Path> {
    let is_closed = |metadata: Metadata| !permits(&metadata, user, SEARCH);
    path.ancestors().skip(1).find(|folder| folder.metadata().is_ok_and(is_closed))
}

fn unreachable(what: String, found: String, user: &Account) -> Finding {
    let Account { name, .. } = user;
    let advice = format!("Start `remoca disk` with --socket-group and a group of {name}, or set `socket-group`");
    Finding::failed(what, format!("{found}: libvirt's QEMU, user {name}, may not connect"), advice)
}

/// Returns whether the mode gives `user` a right, as the kernel decides it without access lists.
fn permits(metadata: &Metadata, user: &Account, right: u32) -> bool {
    let mode = metadata.mode();
    if user.uid == 0 {
        true
    } else if metadata.uid() == user.uid {
        mode >> 6 & right != 0
    } else if user.gids.contains(&metadata.gid()) {
        mode >> 3 & right != 0
    } else {
        mode & right != 0
    }
}

/// Returns the user that libvirt's QEMUs run as, or `None` if there is none.
fn qemu_user() -> Option<Account> {
    let conf = std::fs::read_to_string(QEMU_CONF).unwrap_or_default();
    let configured = setting(&conf, "user");
    let found = configured.iter().map(String::as_str).chain(USERS).find_map(|name| {
        let user = User::from_name(name).ok().flatten();
        user.or_else(|| User::from_uid(Uid::from_raw(name.trim_start_matches('+').parse().ok()?)).ok().flatten())
    })?;
    let name = CString::new(found.name.clone()).ok()?;
    let groups = getgrouplist(&name, found.gid).unwrap_or_else(|_| vec![found.gid]);
    Some(Account { uid: found.uid.as_raw(), gids: groups.into_iter().map(Gid::as_raw).collect(), name: found.name })
}

/// Returns the value of a setting in libvirt's configuration.
fn setting(conf: &str, key: &str) -> Option<String> {
    let (_, value) = conf.lines().filter_map(|line| line.split_once('=')).find(|(name, _)| name.trim() == key)?;
    Some(value.trim().trim_matches(['"', '\'']).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use remoca_view::finding::Level;

    fn account(uid: u32, gids: &[u32]) -> Account {
        Account { name: "q".into(), uid, gids: gids.to_vec() }
    }

    #[test]
    fn the_first_class_that_fits_decides() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let _socket = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let (uid, gid) = path.metadata().map(|metadata| (metadata.uid(), metadata.gid())).unwrap();
        let strangers = [account(uid + 1, &[gid]), account(uid + 1, &[gid + 1])];
        let level = || of_running("a", &path, None).level;
        for (mode, group, other) in [(0o600, false, false), (0o660, true, false), (0o606, false, true)] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            let metadata = path.metadata().unwrap();
            assert_eq!(strangers.each_ref().map(|user| permits(&metadata, user, WRITE)), [group, other], "{mode:o}");
            assert!(permits(&metadata, &account(uid, &[]), WRITE) && permits(&metadata, &account(0, &[]), WRITE));
            assert_eq!(level() == Level::Warning, other, "{mode:o}: who may connect that should not");
        }
        assert_eq!(of_running("a", &path, Some(&strangers[0])).level, Level::Failed);
    }

    #[test]
    fn the_user_is_read_from_libvirts_configuration() {
        assert_eq!(setting("#user = \"a\"\n user = \"b\"\nuser_x = 1\n", "user").as_deref(), Some("b"));
        assert_eq!(setting("#user = \"a\"\n", "user"), None);
    }
}
