//! A VM without a VM: `remoca disk`, a front end for each of its disks and its port, and a model of every disk.
//!
//! Works in rounds: a few requests to each disk at once, their answers compared with the model, then a few evicted pages
//! to the port. What is wrong is counted, so that a test can expect it.

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
use super::program::{Program, ask_raw, status};
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
    /// Evicted pages that the port took.
    pub pages_sent: u64,
    /// Whether the process and connections to it are brought back when they are lost under load.
    pub outlives: bool,
    /// How often the process was brought back.
    pub deaths: usize,
    /// Its memory server gives what it was given: nothing of that is ever found to be wrong.
    pub server_is_honest: bool,
    pub setup: Setup,
    /// Where the sockets of its VM process are.
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
            server_is_honest: true,
            setup,
            foreign,
        };
        machine.attach();
        machine
    }

    fn guests(&mut self) -> impl Iterator<Item = &mut TestGuest> {
        self.disks.iter_mut().map(|disk| &mut disk.guest).chain([&mut self.port])
    }

    /// Connects all front ends, as soon as there is somebody to connect to.
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

    /// Whether the process has ended because a predecessor's write had not: killed, it holds its locks until the disk is done
    /// with it.
    fn image_was_in_use(&self) -> bool {
        self.program.log().lines().next_back().is_some_and(|line| line.contains("is in use by another process"))
    }

    /// The state file of the process.
    pub fn state(&self) -> PathBuf {
        self.folder.path().join("test.state")
    }

    /// What the process is started with, from the next time on.
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
