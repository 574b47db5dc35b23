//! A VM without a VM: `remoca disk`, a front end for each of its disks and its port, and a model of every disk.
//!
//! Works in rounds: a few requests to each disk at once, their answers compared with the model, then a few evicted pages
//! to the port. What is wrong is counted, so that a test can expect it.

use super::model::{Action, BLOCK, Model, Request};
use super::program::{Nbdkit, Program, REMOCA, ask_raw, command, status};
use super::random::Random;
use super::{PATIENCE, wait_until};
use remoca_frontend::testing::{Command, Options, TestGuest, Ticket};
use remoca_protocol::control::Status;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;
use tempfile::TempDir;

const SECTOR: usize = 512;
const OK: u8 = 0;
const REQUESTS_PER_ROUND: usize = 16;
const PAGES_PER_ROUND: usize = 24;
/// Rounds between two looks at the state of the process, which cost more than a round.
const ROUNDS_BETWEEN_LOOKS: usize = 4;
/// Words of a disk's record in the state file: change time of the image; last write, 0 if that is settled.
pub const DISK_SEEN: usize = 4;
const DISK_WRITTEN: usize = 5;
/// Descriptions of wrong answers that are kept.
const EXAMPLES_MAX: usize = 5;

/// How to start a machine.
pub struct Setup {
    pub binary: PathBuf,
    /// The sector of each disk.
    pub sectors: Vec<usize>,
    pub blocks: usize,
    /// The images are files behind NBD servers.
    pub nbd: bool,
    /// What those take requests in.
    pub nbd_block: usize,
    pub cache: &'static str,
    pub server: Option<String>,
    /// The process has a name, and so leaves something to its successor.
    pub named: bool,
    pub arguments: Vec<String>,
    pub environment: Vec<(&'static str, String)>,
    pub seed: u64,
}

impl Default for Setup {
    /// One disk of 8 MiB, and a cache of half of it.
    fn default() -> Self {
        Self {
            binary: REMOCA.into(),
            sectors: vec![SECTOR],
            blocks: 2048,
            nbd: false,
            nbd_block: BLOCK,
            cache: "4M",
            server: None,
            named: true,
            arguments: Vec::new(),
            environment: Vec::new(),
            seed: 1,
        }
    }
}

/// What the guest writes to its port: relative frequencies.
#[derive(Clone, Copy, Debug)]
pub struct Evictions {
    pub current: usize,
    /// What a block held before it was written.
    pub stale: usize,
    pub garbage: usize,
    /// Pages of another guest, the same ones again and again.
    pub foreign: usize,
    pub zero: usize,
}

impl Evictions {
    /// A guest that does what it should.
    pub const HONEST: Self = Self { current: 30, stale: 0, garbage: 0, foreign: 0, zero: 1 };
    /// One that mostly lies.
    pub const LYING: Self = Self { current: 12, stale: 6, garbage: 6, foreign: 6, zero: 2 };
}

/// One disk of the machine.
pub struct VirtualDisk {
    pub guest: TestGuest,
    pub model: Model,
    pub image: PathBuf,
    pub socket: PathBuf,
    pub nbd: Option<Nbdkit>,
    sector: usize,
}

/// What went wrong so far.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Requests that brought a wrong byte.
    pub wrong: usize,
    /// Requests that failed.
    pub errors: usize,
    pub examples: Vec<String>,
}

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
        let disk = |(number, &sector): (usize, &usize)| {
            let model = Model::new(setup.blocks, sector, &mut random);
            let image = folder.path().join(format!("image{number}"));
            std::fs::write(&image, &model.bytes).unwrap();
            // The process goes around the page cache, and takes what is there for another program's.
            std::fs::File::open(&image).unwrap().sync_all().unwrap();
            let options = Options { queue_count: 2, queue_size: 32, data_bytes: 64 << 10, ..Options::default() };
            let nbd = setup
                .nbd
                .then(|| Nbdkit::start_in_blocks(&folder.path().join(format!("nbd{number}")), &image, setup.nbd_block));
            VirtualDisk {
                guest: TestGuest::new(options),
                model,
                image,
                socket: socket(folder.path(), number),
                nbd,
                sector,
            }
        };
        let disks: Vec<_> = setup.sectors.iter().enumerate().map(disk).collect();
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

    /// Starts `remoca disk` anew, after it was killed.
    pub fn restart(&mut self) {
        for (disk, number) in self.disks.iter_mut().zip(0..) {
            disk.socket = socket(&self.host, number);
        }
        self.program = spawn(&self.setup, &self.host, &self.disks, &[]);
        self.attach();
    }

    /// Starts another VM process for the same disks in the folder `name`, with further arguments. It has its own sockets.
    pub fn start_other(&self, name: &str, arguments: &[String]) -> Other {
        let host = self.folder.path().join(name);
        std::fs::create_dir_all(&host).unwrap();
        let mut program = spawn(&self.setup, &host, &self.disks, arguments);
        wait_until("the other VM process answers", || {
            assert!(program.is_running(), "{}", program.log());
            std::os::unix::net::UnixStream::connect(host.join("control")).is_ok()
        });
        Other { program, host }
    }

    /// Stops all queues, as a hypervisor does that has copied all memory: answered when they are drained.
    pub fn stop_queues(&mut self) {
        for guest in self.guests() {
            for queue in 0..guest.queues.len() {
                guest.stop_queue(queue).unwrap();
            }
        }
    }

    /// Starts them again, at the same VM process.
    pub fn start_queues(&mut self) {
        for guest in self.guests() {
            for queue in 0..guest.queues.len() {
                let base = guest.queues[queue].used_index();
                guest.start_queue(queue, base).unwrap();
            }
        }
    }

    /// The guest, whose queues are stopped, goes on at the other VM process, and what it left becomes the other one.
    pub fn move_to(&mut self, other: Other) -> Other {
        self.guests().for_each(TestGuest::move_away);
        let Other { program, host } = other;
        let left = Other {
            program: std::mem::replace(&mut self.program, program),
            host: std::mem::replace(&mut self.host, host),
        };
        for (disk, number) in self.disks.iter_mut().zip(0..) {
            disk.socket = socket(&self.host, number);
        }
        self.attach();
        // What it counted when the guest was there before.
        self.pages_sent = self.counter("evictions_reported");
        left
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

    /// Does rounds until `done`, or fails the test.
    #[track_caller]
    pub fn run_until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        let give_up_at = Instant::now() + PATIENCE;
        loop {
            self.run(ROUNDS_BETWEEN_LOOKS);
            if done(self) {
                return;
            }
            assert!(Instant::now() < give_up_at, "waited in vain: {what}");
        }
    }

    /// Does rounds until so many more blocks came from the server. May take long, as long as some come.
    #[track_caller]
    pub fn run_until_hits(&mut self, count: u64) {
        let mut hits = self.counter("hit_blocks");
        let wanted = hits + count;
        while hits < wanted {
            self.run_until("blocks come from the memory server", |machine| {
                let before = std::mem::replace(&mut hits, machine.counter("hit_blocks"));
                hits > before
            });
        }
    }

    /// The same with reads alone: what the server holds stays of use, however long it takes. May take long, too.
    #[track_caller]
    pub fn read_until_hits(&mut self, count: u64) {
        let mut hits = self.counter("hit_blocks");
        let wanted = hits + count;
        let mut give_up_at = Instant::now() + PATIENCE;
        while hits < wanted {
            assert!(Instant::now() < give_up_at, "no more blocks come from the memory server");
            self.read_everything();
            let before = std::mem::replace(&mut hits, self.counter("hit_blocks"));
            if hits > before {
                give_up_at = Instant::now() + PATIENCE;
            }
        }
    }

    /// Everything that the disks hold is what the guest gets. It evicts meanwhile: what a guest reads that reports nothing would be
    /// admitted.
    #[track_caller]
    pub fn read_everything(&mut self) {
        for disk in 0..self.disks.len() {
            for number in 0..self.disks[disk].model.bytes.len() / BLOCK {
                if number % 256 == 0 {
                    self.evict();
                }
                let disk = &mut self.disks[disk];
                let got = disk.read(&(number * BLOCK..(number + 1) * BLOCK));
                assert!(got == disk.model.block(number), "block {number}");
            }
        }
    }

    /// Does rounds until `count` has come to `wanted`. May take long, as long as it grows.
    #[track_caller]
    pub fn run_until_count(&mut self, what: &str, wanted: usize, count: impl Fn() -> usize) {
        let mut reached = count();
        while reached < wanted {
            self.run_until(what, |_| {
                let before = std::mem::replace(&mut reached, count());
                reached > before
            });
        }
    }

    /// Waits until the state file says of every image that nothing is being written to it.
    #[track_caller]
    pub fn settle(&self) {
        for disk in 0..self.disks.len() {
            wait_until("the image is settled", || self.word_of_disk(disk, DISK_WRITTEN) == 0);
        }
    }

    /// A word of the record that the state file has of a disk.
    pub fn word_of_disk(&self, disk: usize, word: usize) -> u64 {
        // After 16 words, and 40 for each of 16 servers.
        let at = (16 + 16 * 40 + 16 * disk + word) * 8;
        let mut bytes = [0; 8];
        std::fs::File::open(self.state()).unwrap().read_exact_at(&mut bytes, at as u64).unwrap();
        u64::from_le_bytes(bytes)
    }

    pub fn run(&mut self, rounds: usize) {
        (0..rounds).for_each(|_| self.round());
    }

    /// Requests to every disk, and evicted pages.
    pub fn round(&mut self) {
        for number in 0..self.disks.len() {
            self.requests(number);
        }
        self.evict();
    }

    /// Requests to one disk.
    pub fn requests(&mut self, number: usize) {
        let disk = &mut self.disks[number];
        let requests = disk.model.requests(REQUESTS_PER_ROUND, &mut self.random);
        let submitted: Vec<(Ticket, &Request)> =
            requests.iter().zip(0..).map(|(r, n)| (disk.submit(r, n), r)).collect();
        for queue in &disk.guest.queues {
            queue.kick();
        }
        self.outlive();
        let disk = &mut self.disks[number];
        for (ticket, request) in &submitted {
            if disk.guest.wait(*ticket) != OK {
                self.outcome.error(format!("disk {number}: {request:?} failed"));
            }
        }
        for (ticket, request) in &submitted {
            let range = &request.range;
            if request.action == Action::Read {
                let got = disk.guest.data(*ticket, range.len());
                if let Some(at) = disk.model.first_wrong_byte(range, &got, &requests) {
                    self.outcome.wrong(format!("disk {number}: wrong byte {at} in a read of {range:?}"));
                }
            }
        }
        requests.iter().for_each(|request| disk.model.apply(request));
        for discard in requests.iter().filter(|request| request.action == Action::Discard) {
            let ticket = self.disks[number].submit_read(&discard.range);
            self.outlive();
            let disk = &mut self.disks[number];
            let got = disk.finish_read(ticket, discard.range.len());
            if let Some(at) = disk.model.adopt(&discard.range, &got) {
                self.outcome.wrong(format!("disk {number}: wrong byte {at} after a discard of {:?}", discard.range));
            }
        }
    }

    /// Evicted pages of all kinds; now and then a page comes twice.
    fn evict(&mut self) {
        let mut pages: Vec<Vec<u8>> = Vec::new();
        for _ in 0..PAGES_PER_ROUND {
            let again = self.random.one_in(16);
            let page = match pages.last() {
                Some(last) if again => last.clone(),
                _ => self.evicted_page(),
            };
            pages.push(page);
        }
        let block = 1 + self.random.below(100);
        if self.send_to_port(block, &pages.concat()) != OK {
            self.outcome.error("the port refused a batch".into());
        }
        self.pages_sent += pages.len() as u64;
    }

    fn evicted_page(&mut self) -> Vec<u8> {
        let Evictions { current, stale, garbage, foreign, zero } = self.evictions;
        let disk = self.random.below(self.disks.len());
        let model = &self.disks[disk].model;
        let kind = self.random.below(current + stale + garbage + foreign + zero);
        let page = if kind < current {
            model.held_block(&mut self.random).map(|number| model.block(number).to_vec())
        } else if kind < current + stale {
            model.stale_content(&mut self.random)
        } else if kind < current + stale + garbage {
            None
        } else if kind < current + stale + garbage + foreign {
            Some(self.random.pick(&self.foreign).clone())
        } else {
            Some(vec![0; BLOCK])
        };
        page.unwrap_or_else(|| self.random.bytes(BLOCK))
    }

    /// Writes to the port; the status byte.
    pub fn send_to_port(&mut self, block: usize, data: &[u8]) -> u8 {
        let ticket = self.port.submit(0, Command::Write { sector: (block * BLOCK / SECTOR) as u64, data });
        self.port.queues[0].kick();
        self.outlive();
        self.port.wait(ticket)
    }

    /// Waits until the guest waits for nothing, and brings back what is lost meanwhile: the process, connections to it.
    pub fn outlive(&mut self) {
        let give_up_at = Instant::now() + PATIENCE;
        while self.outlives && self.is_waiting() {
            assert!(Instant::now() < give_up_at, "requests are lost: {}", self.program.log());
            self.come_back();
            std::thread::sleep(std::time::Duration::from_micros(200));
        }
    }

    fn is_waiting(&mut self) -> bool {
        let mut is_waiting = false;
        for guest in self.disks.iter_mut().map(|disk| &mut disk.guest).chain([&mut self.port]) {
            for queue in 0..guest.options.queue_count {
                guest.poll(queue);
            }
            is_waiting |= guest.outstanding() > 0;
        }
        is_waiting
    }

    /// Starts the process again if it has died, and connects again what is not connected.
    pub fn come_back(&mut self) {
        if !self.program.is_running() {
            self.deaths += usize::from(!self.image_was_in_use());
            if let Some(at) = self.setup.arguments.iter().position(|argument| argument == "--kill-at") {
                // What it died of, its successor does not.
                self.setup.arguments.drain(at..at + 2);
            }
            self.program = spawn(&self.setup, &self.host, &self.disks, &[]);
        }
        let port = self.host.join("port");
        let disks = self.disks.iter_mut().map(|disk| (&mut disk.guest, disk.socket.as_path()));
        for (guest, socket) in disks.chain([(&mut self.port, port.as_path())]) {
            // Nobody may listen yet, or die again meanwhile.
            if !guest.is_connected() && guest.connect(socket).is_err() {
                guest.disconnect();
            }
        }
    }

    /// Nothing was wrong, every evicted page is accounted for, and with the process gone the images hold what the model
    /// says.
    #[track_caller]
    pub fn finish(mut self) {
        self.expect_no_harm();
        self.expect_account();
        assert!(!self.server_is_honest || self.counter("fetch_wrong") == 0, "pages went to the wrong slots");
        for disk in &mut self.disks {
            assert_eq!(disk.guest.run(0, Command::Flush), OK);
            disk.guest.disconnect();
        }
        self.port.disconnect();
        self.program.terminate();
        for (disk, number) in self.disks.iter().zip(0..) {
            assert!(!disk.socket.exists(), "a socket is left behind");
            let image = std::fs::read(&disk.image).unwrap();
            assert_eq!(image.len(), disk.model.bytes.len());
            let differs = image.iter().zip(&disk.model.bytes).position(|(a, b)| a != b);
            assert_eq!(differs, None, "image {number} holds something else than was written");
        }
        assert!(!self.control().exists(), "the control socket is left behind");
    }

    #[track_caller]
    pub fn expect_no_harm(&mut self) {
        assert!(self.program.is_running(), "{}", self.program.log());
        assert!(self.outcome.wrong == 0 && self.outcome.errors == 0, "{:#?}", self.outcome);
    }

    /// reported = admitted + duplicate + zero + unmatched + dropped, and reported is what was sent.
    #[track_caller]
    fn expect_account(&self) {
        let counters = self.status().counters;
        let fates = ["admitted", "duplicate", "zero", "unmatched", "dropped"];
        let sum: u64 = fates.iter().map(|fate| counters[&format!("evictions_{fate}")]).sum();
        assert_eq!(counters["evictions_reported"], sum);
        assert_eq!(counters["evictions_reported"], self.pages_sent);
    }
}

impl VirtualDisk {
    fn submit(&mut self, request: &Request, number: u16) -> Ticket {
        let sector = (request.range.start / SECTOR) as u64;
        let sectors = (request.range.len() / SECTOR) as u32;
        let queue = number % self.guest.options.queue_count;
        match &request.action {
            Action::Read => self.guest.submit(queue, Command::Read { sector, length: request.range.len() as u64 }),
            Action::Write(data) => self.guest.submit(queue, Command::Write { sector, data }),
            Action::WriteZeroes { unmap } => {
                self.guest.submit(queue, Command::WriteZeroes(&[(sector, sectors, u32::from(*unmap))]))
            }
            Action::Discard => self.guest.submit(queue, Command::Discard(&[(sector, sectors, 0)])),
            Action::Flush => self.guest.submit(queue, Command::Flush),
        }
    }

    fn submit_read(&mut self, range: &Range<usize>) -> Ticket {
        assert!(range.start.is_multiple_of(self.sector) && range.len().is_multiple_of(self.sector));
        let sector = (range.start / SECTOR) as u64;
        let ticket = self.guest.submit(0, Command::Read { sector, length: range.len() as u64 });
        self.guest.queues[0].kick();
        ticket
    }

    /// Reads and waits.
    pub fn read(&mut self, range: &Range<usize>) -> Vec<u8> {
        let ticket = self.submit_read(range);
        self.finish_read(ticket, range.len())
    }

    fn finish_read(&mut self, ticket: Ticket, length: usize) -> Vec<u8> {
        assert_eq!(self.guest.wait(ticket), OK);
        self.guest.data(ticket, length)
    }
}

impl Outcome {
    fn wrong(&mut self, example: String) {
        self.wrong += 1;
        self.note(example);
    }

    fn error(&mut self, example: String) {
        self.errors += 1;
        self.note(example);
    }

    fn note(&mut self, example: String) {
        if self.examples.len() < EXAMPLES_MAX {
            self.examples.push(example.chars().take(300).collect());
        }
    }
}

/// A VM process beside the one that the guest is attached to.
pub struct Other {
    pub program: Program,
    pub host: PathBuf,
}

impl Other {
    #[track_caller]
    pub fn status(&self) -> Status {
        status(&self.host.join("control"))
    }
}

fn socket(host: &Path, number: usize) -> PathBuf {
    host.join(format!("socket{number}"))
}

fn spawn(setup: &Setup, folder: &Path, disks: &[VirtualDisk], arguments: &[String]) -> Program {
    let mut command = command(&setup.binary);
    command.envs(setup.environment.iter().cloned());
    command.args(["disk", "--cache", setup.cache]).args(setup.named.then_some("--name=test"));
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
