//! How a machine is started: its images, and the arguments of `remoca disk`.

use super::disk::{SECTOR, VirtualDisk};
use crate::support::model::BLOCK;
use crate::support::program::{Nbdkit, Program, REMOCA, command, service};
use remoca_io::fake_manager::FakeManager;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How to start a machine.
pub struct Setup {
    pub binary: PathBuf,
    /// Sector size of each disk, in bytes.
    pub sectors: Vec<usize>,
    pub blocks: usize,
    /// Whether the images are files behind NBD servers.
    pub nbd: bool,
    /// Block size that the NBD servers require, in bytes.
    pub nbd_block: usize,
    /// Time that each read of the NBD servers takes at least, such as `70ms`; empty for none.
    pub nbd_delay: &'static str,
    pub cache: &'static str,
    pub server: Option<String>,
    /// Whether a read is left to the disk when the memory server is late. These images are in the page cache, and are read
    /// faster than a memory server answers on a busy machine: tests that need hits would wait for them.
    pub hedges: bool,
    /// Whether the process has a name, so that it leaves its state to its successor.
    pub named: bool,
    pub arguments: Vec<String>,
    pub environment: Vec<(&'static str, String)>,
    /// Service manager that keeps descriptors for the process.
    pub manager: Option<Arc<FakeManager>>,
    pub seed: u64,
}

impl Default for Setup {
    /// Returns a setup with one disk of 8 MiB, and a cache of half that size.
    fn default() -> Self {
        Self {
            binary: REMOCA.into(),
            sectors: vec![SECTOR],
            blocks: 2048,
            nbd: false,
            nbd_block: BLOCK,
            nbd_delay: "",
            cache: "4M",
            server: None,
            hedges: false,
            named: true,
            arguments: Vec::new(),
            environment: Vec::new(),
            manager: None,
            seed: 1,
        }
    }
}

pub fn socket(host: &Path, number: usize) -> PathBuf {
    host.join(format!("socket{number}"))
}

pub fn spawn(setup: &Setup, folder: &Path, disks: &[VirtualDisk], arguments: &[String]) -> Program {
    let mut command = match &setup.manager {
        Some(manager) => service(manager, &setup.binary),
        None => command(&setup.binary),
    };
    command.envs(setup.environment.iter().cloned());
    command.args(["disk", "--cache", setup.cache]).args(setup.named.then_some("--name=test"));
    command.args((!setup.hedges).then_some("--no-hedge"));
    for (name, path) in [("--port", "port"), ("--control", "control")] {
        command.arg(name).arg(folder.join(path));
    }
    for (disk, number) in disks.iter().zip(0..) {
        let image = disk.nbd.as_ref().map_or(disk.image.display().to_string(), Nbdkit::uri);
        let socket = socket(folder, number);
        let socket = socket.display();
        command.arg("--disk").arg(format!("image={image},socket={socket},sector={}", disk.sector));
    }
    if let Some(server) = &setup.server {
        command.args(["--server", server]);
    }
    Program::start(command.args(&setup.arguments).args(arguments), &folder.join("disk.log"))
}
