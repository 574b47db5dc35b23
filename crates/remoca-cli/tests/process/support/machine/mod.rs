//! A machine without a VM: `remoca disk`, a front end for each of its disks and its port, and a model of every disk.
//!
//! Works in rounds. Each round submits a few requests to each disk at once, compares their answers with the model,
//! and then writes a few evicted pages to the port. Errors are counted, so that a test can expect them.

mod disk;
mod expect;
mod life;
mod load;
mod setup;

pub use disk::VirtualDisk;
pub use life::Other;
pub use load::{Evictions, Outcome};
pub use setup::Setup;

use super::model::BLOCK;
use super::program::{Program, Serve, ask_raw, status};
use super::random::Random;
use super::wait_until;
use remoca_frontend::testing::{Options, TestGuest};
use remoca_protocol::control::Status;
use setup::spawn;
use std::path::PathBuf;
use tempfile::TempDir;

/// A running machine. Everything ends with it.
pub struct Machine {
    pub folder: TempDir,
    pub program: Program,
    pub disks: Vec<VirtualDisk>,
    pub port: TestGuest,
    pub random: Random,
    pub evictions: Evictions,
    pub outcome: Outcome,
    /// Number of evicted pages that the port accepted.
    pub pages_sent: u64,
    /// Whether the process and connections to it are restored when they are lost under load.
    pub outlives: bool,
    /// Number of times that the process was restarted.
    pub deaths: usize,
    /// Number of times that a front end connected again.
    pub reconnects: usize,
    /// Whether its memory server returns what it was given, so that no page may ever be found to be wrong.
    pub server_is_honest: bool,
    pub setup: Setup,
    /// Folder of the sockets of its VM process.
    host: PathBuf,
    foreign: Vec<Vec<u8>>,
}

impl Machine {
    /// Makes the images, starts `remoca disk`, and attaches the guest.
    pub fn start(setup: Setup) -> Self {
        Self::start_in(tempfile::tempdir().unwrap(), setup)
    }

    pub fn start_in(folder: TempDir, setup: Setup) -> Self {
        let mut random = Random::new(setup.seed);
        let disks: Vec<_> = (0..setup.sectors.len())
            .map(|number| VirtualDisk::new(folder.path(), &setup, number, &mut random))
            .collect();
        let foreign = (0..16).map(|_| random.bytes(BLOCK)).collect();
        let options = Options { queue_size: 16, data_bytes: 128 << 10, ..Options::default() };
        let host = folder.path().to_owned();
        let program = spawn(&setup, &host, &disks, &[]);
        let mut machine = Self {
            folder,
            host,
            program,
            disks,
            port: TestGuest::new(options),
            random,
            evictions: Evictions::HONEST,
            outcome: Outcome::default(),
            pages_sent: 0,
            outlives: false,
            deaths: 0,
            reconnects: 0,
            server_is_honest: true,
            setup,
            foreign,
        };
        machine.attach();
        machine
    }

    /// Starts a memory server of 16 MiB, and a machine in the same folder that uses it.
    pub fn start_with_server(folder: TempDir, setup: Setup) -> (Serve, Self) {
        let server = Serve::start(folder.path(), "16M");
        let setup = Setup { server: Some(server.address.clone()), ..setup };
        (server, Self::start_in(folder, setup))
    }

    fn guests(&mut self) -> impl Iterator<Item = &mut TestGuest> {
        self.disks.iter_mut().map(|disk| &mut disk.guest).chain([&mut self.port])
    }

    /// Connects all front ends, as soon as the VM process answers.
    fn attach(&mut self) {
        wait_until("the VM process answers", || {
            if !self.program.is_running() && self.image_was_in_use() {
                self.program = spawn(&self.setup, &self.host, &self.disks, &[]);
            }
            assert!(self.program.is_running(), "{}", self.program.log());
            std::os::unix::net::UnixStream::connect(self.control()).is_ok()
        });
        for disk in &mut self.disks {
            disk.guest.connect(&disk.socket).unwrap();
        }
        self.port.connect(&self.host.join("port")).unwrap();
    }

    /// Returns whether the process ended because a write of its killed predecessor was still in flight. The
    /// predecessor holds its locks until the disk is done with that write.
    fn image_was_in_use(&self) -> bool {
        self.program.log().lines().next_back().is_some_and(|line| line.contains("is in use by another process"))
    }

    /// Returns the path of the process's state file.
    pub fn state(&self) -> PathBuf {
        self.folder.path().join("test.state")
    }

    /// Returns the setup, to change how the process is started from the next time on.
    pub fn setup(&mut self) -> &mut Setup {
        &mut self.setup
    }

    pub fn control(&self) -> PathBuf {
        self.host.join("control")
    }

    #[track_caller]
    pub fn status(&self) -> Status {
        status(&self.control())
    }

    pub fn counter(&self, name: &str) -> u64 {
        self.status().counters[name]
    }

    /// Changes the cache as `remoca set` does.
    pub fn set(&self, change: &str) -> Status {
        let answer = ask_raw(&self.control(), format!("{{\"op\":\"set\",{change}}}\n").as_bytes());
        serde_json::from_str(&answer).unwrap_or_else(|error| panic!("{error}: {answer}"))
    }
}
