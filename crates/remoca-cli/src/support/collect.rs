//! Collects the entries of the archive. What cannot be had is said in its place.

use crate::settings;
use crate::status::details_of;
use anyhow::Result;
use remoca_protocol::control::Status;
use std::fmt::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Maximum time of a command, in seconds.
const COMMAND_S_MAX: &str = "10";
/// Maximum size of one file or output.
const TEXT_BYTES_MAX: usize = 8 << 20;
const LOG_LINES: &str = "5000";

/// One file of the archive.
pub struct Entry {
    pub name: &'static str,
    /// What it is, for the list.
    pub what: &'static str,
    pub text: String,
}

/// Returns all entries for the VM `name`, whose control socket is at `socket`. `config` is the folder of the configuration.
pub fn all(name: &str, socket: &Path, status: &Result<Status>, config: &Path) -> Vec<Entry> {
    let unit = format!("remoca-disk@{name}");
    let [json, words] = match status {
        Ok(status) => [serde_json::to_string_pretty(status).unwrap_or_default(), details_of(status)],
        Err(error) => [String::new(), format!("{error:#}\n")],
    };
    let pid = status.as_ref().ok().map(|status| status.pid);
    let mut entries = vec![
        Entry {
            name: "version.txt",
            what: "versions of remoca, QEMU, libvirt, kernel and system",
            text: versions(status),
        },
        Entry { name: "status.txt", what: "remoca status -v", text: words },
        Entry { name: "status.json", what: "remoca status -o json", text: json },
        Entry {
            name: "config.txt",
            what: "files in /etc/remoca for this VM, and its unit",
            text: configuration(name, &unit, config),
        },
        Entry { name: "log.txt", what: "the last lines of the VM process's journal", text: log(&unit) },
        Entry { name: "host.txt", what: "memory, load, limits and file systems of this host", text: host() },
        Entry {
            name: "process.txt",
            what: "limits, memory, threads and open files of the process",
            text: process(name, pid, socket),
        },
        Entry { name: "domain.xml", what: "the VM as libvirt knows it, without its secrets", text: domain(name) },
    ];
    let contents = entries.iter().map(|entry| format!("{:<16} {}\n", entry.name, entry.what)).collect();
    entries.insert(0, Entry { name: "contents.txt", what: "this list", text: contents });
    entries
}

fn versions(status: &Result<Status>) -> String {
    let running = status.as_ref().map_or("not known".to_owned(), |status| {
        format!(
            "{}, upgrade {} of process {}, up {:.0} s",
            status.version, status.upgrades, status.pid, status.uptime_s
        )
    });
    let mut text = format!("remoca {}\nrunning: {running}\n", env!("CARGO_PKG_VERSION"));
    for path in ["/proc/version", "/etc/os-release"] {
        add_file(&mut text, Path::new(path));
    }
    for command in [
        &["qemu-system-x86_64", "--version"][..],
        &["qemu-system-aarch64", "--version"],
        &["libvirtd", "--version"],
        &["virtqemud", "--version"],
        &["virsh", "--version"],
        &["systemctl", "--version"],
        &["dpkg-query", "--show", "remoca", "qemu-system-x86", "libvirt-daemon", "libvirt-daemon-system"],
    ] {
        add_command(&mut text, command);
    }
    text
}

fn configuration(name: &str, unit: &str, config: &Path) -> String {
    let mut text = String::new();
    for path in [settings::host_path(config), settings::vm_path(config, name)] {
        add_file(&mut text, &path);
    }
    add_command(&mut text, &["systemctl", "cat", "--no-pager", unit]);
    add_command(&mut text, &["systemctl", "status", "--no-pager", "--lines=0", unit]);
    text
}

fn log(unit: &str) -> String {
    let mut text = String::new();
    add_command(
        &mut text,
        &["journalctl", "--no-pager", "--output=short-iso-precise", "--lines", LOG_LINES, "--unit", unit],
    );
    text
}

fn host() -> String {
    let mut text = String::new();
    for path in [
        "/proc/uptime",
        "/proc/loadavg",
        "/proc/meminfo",
        "/proc/pressure/cpu",
        "/proc/pressure/io",
        "/proc/pressure/memory",
        "/proc/filesystems",
        "/proc/sys/fs/aio-max-nr",
        "/proc/sys/fs/file-max",
        "/proc/sys/kernel/io_uring_disabled",
        "/proc/sys/vm/overcommit_memory",
        "/sys/kernel/mm/transparent_hugepage/enabled",
    ] {
        add_file(&mut text, Path::new(path));
    }
    for command in [&["nproc"][..], &["df", "-hT"], &["getenforce"], &["aa-status", "--enabled"]] {
        add_command(&mut text, command);
    }
    text
}

fn process(name: &str, pid: Option<u32>, socket: &Path) -> String {
    let mut text = String::new();
    for path in [socket.to_owned(), socket.with_file_name(format!("{name}.state"))] {
        add_facts(&mut text, &path);
    }
    let Some(pid) = pid else {
        return text + "the process is not known: it did not answer\n";
    };
    let own = PathBuf::from(format!("/proc/{pid}"));
    // Not its environment, and nothing of its memory.
    for file in ["cmdline", "status", "limits", "io", "cgroup", "oom_score_adj", "schedstat"] {
        add_file(&mut text, &own.join(file));
    }
    let _ = writeln!(text, "== threads");
    for thread in sorted(&own.join("task")) {
        let fact = |file: &str| std::fs::read_to_string(thread.join(file)).unwrap_or_default().trim().to_owned();
        let _ = writeln!(text, "{} {} waits in {}", thread.display(), fact("comm"), fact("wchan"));
    }
    let _ = writeln!(text, "== open files");
    for file in sorted(&own.join("fd")) {
        let target = std::fs::read_link(&file).map_or_else(|error| error.to_string(), |to| to.display().to_string());
        let _ = writeln!(text, "{} {target}", file.display());
    }
    text
}

fn domain(name: &str) -> String {
    let mut text = String::new();
    add_command(&mut text, &["virsh", "--readonly", "--connect", "qemu:///system", "dumpxml", name]);
    text
}

fn sorted(folder: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<_> =
        std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

/// Adds the size, mode and owner of a file, and nothing of its content.
fn add_facts(text: &mut String, path: &Path) {
    let _ = match std::fs::symlink_metadata(path) {
        Ok(file) => {
            let (mode, uid, gid, size) = (file.mode(), file.uid(), file.gid(), file.size());
            writeln!(text, "{}: mode {mode:o}, user {uid}, group {gid}, {size} bytes", path.display())
        }
        Err(error) => writeln!(text, "{}: {error}", path.display()),
    };
}

fn add_file(text: &mut String, path: &Path) {
    // A pipe would have to be waited for.
    let is_file = std::fs::metadata(path).is_ok_and(|file| file.is_file());
    let read = if is_file { std::fs::read(path) } else { Err(std::io::Error::other("no such file")) };
    let content = read.map_or_else(|error| format!("{error}\n"), |bytes| readable(&bytes));
    let _ = writeln!(text, "== {}\n{content}", path.display());
}

/// Adds the output of a command, which is ended if it takes too long.
fn add_command(text: &mut String, words: &[&str]) {
    let run = Command::new("timeout").arg(COMMAND_S_MAX).args(words).stdin(Stdio::null()).env("LC_ALL", "C").output();
    let said =
        run.map_or_else(|error| format!("{error}\n"), |output| readable(&output.stdout) + &readable(&output.stderr));
    let _ = writeln!(text, "== {}\n{said}", words.join(" "));
}

/// Returns the end of `bytes` as text. Zero bytes, which separate arguments, become spaces.
fn readable(bytes: &[u8]) -> String {
    let last = &bytes[bytes.len().saturating_sub(TEXT_BYTES_MAX)..];
    String::from_utf8_lossy(last).replace('\0', " ")
}
