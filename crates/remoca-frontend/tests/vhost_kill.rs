//! A back end process that dies at any step, again and again, under a guest that goes on writing.
//!
//! The test runs itself as the back end: a file as the disk, completions out of order. After every death each request is
//! completed exactly once (the test guest panics otherwise), and every block has the content of its last write.

#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "in a test a surprise is a failure, and sizes are small"
)]

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use remoca_frontend::testing::{Command, Options, TestGuest, Ticket, serve_until_death};
use remoca_frontend::vhost::DeviceConfig;

const BLOCKS: u64 = 256;
const BLOCK: usize = 4096;
const QUEUES: u16 = 2;
const KILLS: u32 = 60;
/// A limit for what must not last for ever; never reached by a sound back end.
const PATIENCE: Duration = Duration::from_secs(60);
const FOLDER: &str = "REMOCA_VHOST_KILL_FOLDER";
const STEPS: &str = "REMOCA_VHOST_KILL_STEPS";

/// The back end, when this program is started as one; a test that passes at once otherwise.
#[test]
fn back_end_process() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    let folder = Path::new(&folder);
    let disk = File::options().read(true).write(true).open(folder.join("disk")).unwrap();
    let config = DeviceConfig::disk("kill", "kill", BLOCKS * BLOCK as u64);
    let steps = std::env::var(STEPS).unwrap().parse().unwrap();
    serve_until_death(config, &folder.join("s"), disk, Some(steps));
}

fn spawn(folder: &Path, steps: u64) -> Child {
    std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "back_end_process", "--nocapture"])
        .env(FOLDER, folder)
        .env(STEPS, steps.to_string())
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

fn connect(guest: &mut TestGuest, folder: &Path) {
    let deadline = Instant::now() + PATIENCE;
    while let Err(error) = guest.connect(&folder.join("s")) {
        assert!(Instant::now() < deadline, "{error}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A guest that reads and writes blocks at random, at most one request for each block at a time.
struct Load {
    random: u64,
    version: u64,
    content: Vec<u64>,
    /// What is under way: the block, and the version that it is to have afterwards or had before.
    requests: HashMap<Ticket, (u64, u64, bool)>,
    busy: Vec<bool>,
    completed: u64,
}

impl Load {
    fn new() -> Self {
        let (content, busy) = (vec![0; BLOCKS as usize], vec![false; BLOCKS as usize]);
        Load { random: 0x2545_f491_4f6c_dd1d, version: 0, content, requests: HashMap::new(), busy, completed: 0 }
    }

    fn random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    fn submit(&mut self, guest: &mut TestGuest) {
        let block = self.random() % BLOCKS;
        let queue = (self.random() % u64::from(QUEUES)) as u16;
        if self.busy[block as usize] || !guest.has_free_slot(queue) {
            return;
        }
        self.busy[block as usize] = true;
        let sector = block * 8;
        let request = if self.random().is_multiple_of(3) {
            let command = Command::Read { sector, length: BLOCK as u64 };
            (guest.submit(queue, command), (block, self.content[block as usize], true))
        } else {
            self.version += 1;
            let data = content_of(block, self.version);
            (guest.submit(queue, Command::Write { sector, data: &data }), (block, self.version, false))
        };
        self.requests.insert(request.0, request.1);
        guest.queues[usize::from(queue)].kick();
    }

    fn harvest(&mut self, guest: &mut TestGuest) {
        let tickets: Vec<Ticket> = self.requests.keys().copied().collect();
        for ticket in tickets {
            let Some(status) = guest.result(ticket) else { continue };
            assert_eq!(status, 0);
            let (block, version, read) = self.requests.remove(&ticket).unwrap();
            if read {
                assert!(guest.data(ticket, BLOCK) == content_of(block, version), "block {block} is not {version}");
            }
            self.content[block as usize] = version;
            self.busy[block as usize] = false;
            self.completed += 1;
        }
    }
}

/// Block and version all over; version zero is the empty disk.
fn content_of(block: u64, version: u64) -> Vec<u8> {
    let stamp = if version == 0 { 0 } else { version << 16 | block };
    stamp.to_le_bytes().repeat(BLOCK / 8)
}

#[test]
fn a_killed_back_end_loses_and_repeats_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    File::create(folder.join("disk")).unwrap().set_len(BLOCKS * BLOCK as u64).unwrap();
    let options = Options { queue_count: QUEUES, queue_size: 32, data_bytes: BLOCK as u64, ..Options::default() };
    let mut guest = TestGuest::new(options);
    let mut load = Load::new();
    let mut in_flight_at_kills = 0;
    for _ in 0..KILLS {
        let mut child = spawn(folder, 500 + load.random() % 1000);
        connect(&mut guest, folder);
        let deadline = Instant::now() + PATIENCE;
        while child.try_wait().unwrap().is_none() {
            assert!(Instant::now() < deadline, "{} requests were lost", guest.outstanding());
            (0..16).for_each(|_| load.submit(&mut guest));
            load.harvest(&mut guest);
        }
        load.harvest(&mut guest);
        in_flight_at_kills += guest.outstanding();
        guest.disconnect();
        (0..4).for_each(|_| load.submit(&mut guest));
    }
    assert!(in_flight_at_kills > KILLS as usize, "{in_flight_at_kills} requests in flight at {KILLS} kills");

    let mut child = spawn(folder, u64::MAX);
    connect(&mut guest, folder);
    let deadline = Instant::now() + PATIENCE;
    while guest.outstanding() > 0 {
        assert!(Instant::now() < deadline, "{} requests were lost", guest.outstanding());
        load.harvest(&mut guest);
    }
    load.harvest(&mut guest);
    child.kill().unwrap();
    child.wait().unwrap();
    let disk = std::fs::read(folder.join("disk")).unwrap();
    for (block, version) in load.content.iter().enumerate() {
        let data = &disk[block * BLOCK..(block + 1) * BLOCK];
        assert!(data == content_of(block as u64, *version), "block {block} is not {version}");
    }
    println!("{KILLS} kills, {in_flight_at_kills} requests in flight at them, {} completed", load.completed);
}
