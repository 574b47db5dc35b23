//! The guest of a running process: attached, its memory shared, its QEMU patient, its agent heard.

use crate::hypervisor::{self, Version};
use crate::vm::Vm;
use remoca_disk::start::PortOptions;
use remoca_protocol::control::Status;
use remoca_protocol::port::PORT_SERIAL;
use remoca_view::diagnosis;
use remoca_view::finding::{Finding, Level};
use std::io::ErrorKind;
use std::path::Path;

/// First libvirt that is sure to pass `<reconnect>` on for a vhost-user disk attached to a running guest.
const HOT_PLUG: Version = Version(9, 10);

pub(super) fn check(vm: &Vm) -> Vec<Finding> {
    let Some(status) = &vm.running else { return Vec::new() };
    let (sockets, qemus) = (sockets(vm, status), qemus());
    let ours: Vec<_> = qemus.iter().filter(|qemu| sockets.iter().any(|socket| qemu.names(&socket.path))).collect();
    let mut findings = vec![diagnosis::attached(status)];
    findings.extend(diagnosis::memory(status).map(|finding| match finding.level {
        Level::Failed => ours.iter().find_map(|qemu| waiting(qemu, &sockets, &status.name)).unwrap_or(finding),
        _ => finding,
    }));
    let is_seen = !ours.is_empty();
    findings.extend(sockets.iter().filter(|socket| socket.attached).map(|socket| reconnect(socket, &qemus, is_seen)));
    findings.extend(diagnosis::agent(status));
    findings
}

/// A disk or the port, and where its hypervisor connects.
struct Socket {
    name: String,
    path: String,
    is_nbd: bool,
    attached: bool,
    /// Whether the service manager keeps its connection while the process is down.
    is_kept: bool,
}

fn sockets(vm: &Vm, status: &Status) -> Vec<Socket> {
    let nbd = vm.options.nbd.iter().find_map(|address| Some(address.socket()?.display().to_string()));
    let of = |name: &str, socket: Option<&Path>, [attached, is_kept]: [bool; 2]| {
        let (path, is_nbd) = match (socket, &nbd) {
            (Some(path), _) => (path.display().to_string(), false),
            (None, Some(path)) => (path.clone(), true),
            (None, None) => return None,
        };
        Some(Socket { name: name.into(), path, is_nbd, attached, is_kept })
    };
    let state = |name: &str| {
        let disk = status.disks.iter().find(|disk| disk.name == name);
        disk.map_or([false; 2], |disk| [disk.attached, disk.outlives_crash])
    };
    let disks = vm.disks().filter_map(|(name, disk)| of(&name, disk.socket.as_deref(), state(&name)));
    let port_state = status.port.as_ref().map_or([false; 2], |port| [port.attached, port.outlives_crash]);
    let port = match &vm.options.port {
        PortOptions::None => None,
        PortOptions::Socket(path) => of(PORT_SERIAL, Some(path), port_state),
        PortOptions::NbdExport => of(PORT_SERIAL, None, port_state),
    };
    disks.chain(port).collect()
}

/// A process that looks like a QEMU.
struct Qemu {
    pid: u32,
    words: Vec<String>,
}

impl Qemu {
    /// Returns whether an argument names the socket.
    fn names(&self, socket: &str) -> bool {
        self.words.iter().any(|word| names(word, socket))
    }
}

/// Returns the processes that look like QEMUs.
fn qemus() -> Vec<Qemu> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let processes = entries.filter_map(|entry| {
        let entry = entry.ok()?;
        let pid = entry.file_name().to_str()?.parse::<u32>().ok()?;
        let line = std::fs::read(entry.path().join("cmdline")).ok()?;
        Some(Qemu { pid, words: String::from_utf8_lossy(&line).split('\0').map(str::to_owned).collect() })
    });
    let is_qemu = |word: &String| word == "-chardev" || word == "-blockdev" || word == "-drive";
    processes.filter(|process| process.words.iter().any(is_qemu)).collect()
}

/// Returns a finding if a QEMU waits for a socket that is not there, as it does before anything else. Until then it shares no memory. Only
/// sockets beside those of the VM count: a guest that runs may have lost one of another program.
fn waiting(qemu: &Qemu, sockets: &[Socket], vm: &str) -> Option<Finding> {
    let folder = |path: &str| Path::new(path).parent().map(Path::to_path_buf);
    let is_beside = |path: &String| sockets.iter().any(|socket| folder(&socket.path) == folder(path));
    let is_missing = |path: &String| {
        let seen = std::fs::metadata(format!("/proc/{}/root{path}", qemu.pid));
        seen.is_err_and(|error| error.kind() == ErrorKind::NotFound)
    };
    let socket = qemu.words.iter().filter_map(|word| connects_to(word)).filter(is_beside).find(is_missing)?;
    let advice = format!("End it with `kill {}`, and compare its domain with `remoca xml {vm}`", qemu.pid);
    Some(Finding::failed("guest memory", format!("its QEMU waits for {socket}, which no process serves"), advice))
}

/// Returns the socket to which a character device of this argument connects.
fn connects_to(word: &str) -> Option<String> {
    let options = word.strip_prefix("socket,")?.replace(",,", "\0");
    let mut path = None;
    for option in options.split(',') {
        match option.split_once('=').unwrap_or((option, "on")) {
            ("path", value) if value.starts_with('/') => path = Some(value.replace('\0', ",")),
            ("server", "on") => return None,
            _ => {}
        }
    }
    path
}

/// Returns whether an argument names the socket: `path=SOCKET`, or JSON's `"path":"SOCKET"`.
fn names(word: &str, socket: &str) -> bool {
    let plain = format!("path={}", socket.replace(',', ",,"));
    let ends = |rest: &str| rest.is_empty() || (rest.starts_with(',') && !rest.starts_with(",,"));
    word.match_indices(&plain).any(|(at, _)| ends(&word[at + plain.len()..]))
        || word.contains(&format!("\"path\":\"{socket}\""))
}

/// Returns whether an argument says that a lost connection is made again.
fn says_reconnect(word: &str) -> bool {
    let words = word.split([',', '{', '}']).filter_map(|field| field.split_once(['=', ':']));
    let mut values = words.filter(|(key, _)| {
        let key = key.trim_matches('"');
        ["reconnect", "reconnect-ms", "reconnect-delay"].contains(&key.rsplit('.').next().unwrap_or(key))
    });
    values.any(|(_, value)| value.trim_matches('"').parse::<f64>().is_ok_and(|value| value > 0.0))
}

fn reconnect(socket: &Socket, qemus: &[Qemu], is_seen: bool) -> Finding {
    let what = format!("reconnect {}", socket.name);
    if socket.is_kept {
        return Finding::ok(what, "not needed: the service manager keeps the connection while this process restarts");
    }
    let (after_kill, remedy) = if socket.is_nbd {
        ("I/O errors", "")
    } else {
        ("hanging reads until `virsh reset`", ". Started by its unit, the process would keep the connection")
    };
    let advice = format!(
        "A kill of this process would give the guest {after_kill}; an upgrade does not{remedy}. See `remoca xml` and docs/guests.md"
    );
    let words: Vec<_> = qemus.iter().flat_map(|qemu| &qemu.words).filter(|word| names(word, &socket.path)).collect();
    if words.is_empty() {
        // Attached to a running guest: only the monitor was told of it.
        return match hypervisor::libvirt() {
            Some(version) if is_seen && !socket.is_nbd && version >= HOT_PLUG => {
                Finding::ok(what, format!("attached while the guest ran; libvirt {version} passes it on"))
            }
            _ if is_seen => Finding::warning(what, "it was attached while the guest ran, and may not be", advice),
            _ => Finding::warning(what, "no QEMU of this host names its socket, so it is not known", advice),
        };
    }
    if words.iter().all(|word| says_reconnect(word)) {
        Finding::ok(what, "QEMU connects again after a restart")
    } else {
        Finding::warning(what, "QEMU was started without it", advice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_qemu_was_told_is_read_from_its_arguments() {
        let line = |words: [&str; 2]| [Qemu { pid: 1, words: words.map(str::to_owned).to_vec() }];
        let nbd = r#"{"driver":"nbd","server":{"type":"unix","path":"/s"},"reconnect-delay":60,"node-name":"a"}"#;
        let without = r#"{"driver":"nbd","server":{"type":"unix","path":"/s"},"node-name":"a"}"#;
        let zero = "socket,id=c,path=/s,reconnect=0";
        for (word, is_nbd, found) in [
            ("socket,id=c,path=/s,reconnect=1", false, "connects again"),
            ("socket,id=c,path=/s,reconnect-ms=100", false, "connects again"),
            (zero, false, "without it"),
            ("socket,id=c,path=/s", false, "without it"),
            ("socket,id=c,path=/s2,reconnect=1", false, "no QEMU"),
            (nbd, true, "connects again"),
            (without, true, "without it"),
            ("driver=nbd,server.path=/s,reconnect-delay=60", true, "connects again"),
        ] {
            let socket = Socket { name: "root".into(), path: "/s".into(), is_nbd, attached: true, is_kept: false };
            let finding = reconnect(&socket, &line(["-chardev", word]), false);
            assert!(finding.found.contains(found), "{word}: {finding}");
        }
        let hot_plugged =
            Socket { name: "root".into(), path: "/s".into(), is_nbd: true, attached: true, is_kept: false };
        assert!(reconnect(&hot_plugged, &[], true).found.contains("while the guest ran"));
        let kept = Socket { is_nbd: false, is_kept: true, ..hot_plugged };
        assert!(reconnect(&kept, &line(["-chardev", zero]), true).found.contains("not needed"));
    }

    #[test]
    fn the_sockets_to_which_qemu_connects_are_read_from_its_arguments() {
        for (word, socket) in [
            ("socket,id=c,path=/a,,b.sock,reconnect=1", Some("/a,b.sock")),
            ("socket,path=/s,id=c", Some("/s")),
            ("socket,id=m,path=/m,server=on,wait=off", None),
            ("socket,id=m,path=/m,server,nowait", None),
            ("socket,id=m,fd=3", None),
            ("socket,id=c,path=s", None),
            ("file,id=c,path=/log", None),
        ] {
            assert_eq!(connects_to(word).as_deref(), socket, "{word}");
        }
    }
}
