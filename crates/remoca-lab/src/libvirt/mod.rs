//! A real libvirtd next to the tests: Debian's, as root, in mount and process name spaces of its own.
//!
//! Its configuration, state and sockets are in a folder of its own, so that several run on one machine.
//! [`GuestConfig::boot_under`](crate::GuestConfig::boot_under) boots a guest of the laboratory as its domain.
//!
//! 1. The daemon and its guests end when this process ends, however it ends.
//! 2. Nothing of the host's own libvirt is read or changed.

mod domain;
mod plug;

pub(crate) use domain::Domain;
pub use domain::DomainXml;

use std::{
    fs, io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    time::Duration,
};

use tempfile::TempDir;

use crate::{
    error::{Context, Error, Result},
    service::{self, Service},
};

const SCRIPT: &str = include_str!("../../host/libvirtd.sh");
const START_LIMIT: Duration = Duration::from_secs(240);

/// A libvirtd. It and its guests are killed when this is dropped.
#[derive(Debug)]
pub struct Libvirt {
    // In this order: the daemon ends before its folder goes.
    daemon: Service,
    virsh: Virsh,
    folder: TempDir,
}

impl Libvirt {
    /// Starts a libvirtd which sees the folder `run` as `/run/remoca`, and waits until it answers. `files` are further
    /// programs: names below `/etc`, or names without `/`, which it and its hooks find before all others.
    pub fn start(run: &Path, files: &[(&str, &str)]) -> Result<Libvirt> {
        if !rustix::process::geteuid().is_root() {
            return Err(Error::Invalid("a libvirtd of one's own needs root: run the tests as root".into()));
        }
        let folder = TempDir::with_prefix("virt").context("creating a folder for libvirtd")?;
        let [etc, programs] = ["files", "bin"].map(|name| folder.path().join(name));
        for folder in [&etc, &programs] {
            fs::create_dir(folder).context_path("creating", folder)?;
        }
        for (name, content) in files {
            let path = if name.contains('/') { etc.join(name) } else { programs.join(name) };
            write_program(&path, content).context_path("writing", &path)?;
        }
        let uuid = fs::read_to_string("/proc/sys/kernel/random/uuid").context("drawing a UUID")?;
        let mut command = service::tool("unshare");
        command.args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", SCRIPT, "libvirtd.sh"]);
        command.args([folder.path(), run]).arg(uuid.trim()).arg(&programs);
        let mut daemon = Service::start("libvirtd", command, &folder.path().join("daemon.log"))?;
        let socket = folder.path().join("libvirt-sock");
        let virsh = Virsh { uri: format!("qemu+unix:///system?socket={}", socket.display()) };
        daemon.wait_until("answering", START_LIMIT, || virsh.run(&["version"]).is_ok())?;
        Ok(Libvirt { daemon, virsh, folder })
    }

    /// Returns the URI at which clients on this machine reach it.
    pub fn uri(&self) -> &str {
        &self.virsh.uri
    }

    /// Returns the major and minor number of its version.
    pub fn version(&self) -> Result<(u32, u32)> {
        let said = self.virsh(&["version", "--daemon"])?;
        let number = said.lines().find_map(|line| line.strip_prefix("Running against daemon: "));
        let mut numbers = number.unwrap_or_default().split('.').map_while(|number| number.trim().parse().ok());
        match (numbers.next(), numbers.next()) {
            (Some(major), Some(minor)) => Ok((major, minor)),
            _ => Err(Error::Invalid(format!("virsh does not tell the version of its daemon: {said}"))),
        }
    }

    /// Runs `virsh` with these arguments, and returns what it prints.
    pub fn virsh(&self, arguments: &[&str]) -> Result<String> {
        self.virsh.run(arguments)
    }

    /// Runs `virsh` with these arguments, then a file that holds `xml`, then `more`.
    pub fn virsh_with(&self, arguments: &[&str], xml: &str, more: &[&str]) -> Result<String> {
        let mut file = tempfile::Builder::new().suffix(".xml").tempfile().context("creating a file for virsh")?;
        std::io::Write::write_all(&mut file, xml.as_bytes()).context("writing a file for virsh")?;
        let path = file.path().display().to_string();
        self.virsh.run(&[arguments, &[&path], more].concat())
    }

    /// Runs a command as somebody who is logged in at its host, and returns what it prints.
    pub fn shell(&self, command: &str) -> Result<String> {
        // The daemon's shell is the child of `unshare`, which is ours.
        let children = format!("/proc/{0}/task/{0}/children", self.daemon.pid());
        let child = fs::read_to_string(&children).context_path("reading", Path::new(&children))?;
        let mut enter = service::tool("nsenter");
        enter.args(["--mount", "--pid", "--target", child.trim(), "sh", "-c", command]);
        let output = service::run(enter.env("HOME", "/root"))?;
        Ok(String::from_utf8_lossy(&output).into_owned())
    }

    /// Returns what the QEMUs of a domain wrote, with their command lines.
    pub fn qemu_log(&self, domain: &str) -> PathBuf {
        self.folder.path().join("log/qemu").join(format!("{domain}.log"))
    }
}

fn write_program(path: &Path, content: &str) -> io::Result<()> {
    fs::create_dir_all(path.parent().unwrap_or(path))?;
    fs::write(path, content)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))
}

/// How a libvirtd is reached.
#[derive(Clone, Debug)]
pub(crate) struct Virsh {
    uri: String,
}

impl Virsh {
    pub(crate) fn run(&self, arguments: &[&str]) -> Result<String> {
        let output = service::run(service::tool("virsh").args(["--quiet", "--connect", &self.uri]).args(arguments))?;
        Ok(String::from_utf8_lossy(&output).trim_end().to_owned())
    }
}
