//! The guest of a running process: attached, its memory shared, its QEMU patient, its agent heard.

use crate::hypervisor::{self, Version};
use crate::vm::Vm;
use remoca_disk::start::PortOptions;
use remoca_protocol::control::Status;
use remoca_protocol::port::PORT_SERIAL;
use remoca_view::diagnosis;
use remoca_view::finding::Finding;
use std::path::Path;

/// First libvirt that is sure to pass `<reconnect>` on for a vhost-user disk attached to a running guest.
const HOT_PLUG: Version = Version(9, 10);

pub(super) fn check(vm: &Vm) -> Vec<Finding> {
    let Some(status) = &vm.running else { return Vec::new() };
    let mut findings = vec![diagnosis::attached(status)];
    findings.extend(diagnosis::memory(status));
    let lines = command_lines();
    let sockets = sockets(vm, status);
    let is_seen = sockets.iter().any(|socket| lines.iter().any(|line| is_named(line, &socket.path)));
    findings.extend(sockets.iter().filter(|socket| socket.attached).map(|socket| reconnect(socket, &lines, is_seen)));
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

/// Returns the arguments of each process that looks like a QEMU.
fn command_lines() -> Vec<Vec<String>> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let lines = entries.filter_map(|entry| std::fs::read(entry.ok()?.path().join("cmdline")).ok());
    let lines = lines.map(|line| String::from_utf8_lossy(&line).split('\0').map(str::to_owned).collect::<Vec<_>>());
    lines.filter(|line| line.iter().any(|word| word == "-chardev" || word == "-blockdev" || word == "-drive")).collect()
}

fn is_named(line: &[String], socket: &str) -> bool {
    line.iter().any(|word| names(word, socket))
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

fn reconnect(socket: &Socket, lines: &[Vec<String>], is_seen: bool) -> Finding {
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
    let words: Vec<_> = lines.iter().flatten().filter(|word| names(word, &socket.path)).collect();
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
        let line = |words: &[&str]| vec![words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>()];
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
            let finding = reconnect(&socket, &line(&["-chardev", word]), false);
            assert!(finding.found.contains(found), "{word}: {finding}");
        }
        let hot_plugged =
            Socket { name: "root".into(), path: "/s".into(), is_nbd: true, attached: true, is_kept: false };
        assert!(reconnect(&hot_plugged, &[], true).found.contains("while the guest ran"));
        let kept = Socket { is_nbd: false, is_kept: true, ..hot_plugged };
        assert!(reconnect(&kept, &line(&["-chardev", zero]), true).found.contains("not needed"));
    }
}
