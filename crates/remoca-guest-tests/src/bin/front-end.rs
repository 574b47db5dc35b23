//! A front end without a VM, for guests that are hosts: it writes, reads and evicts, and verifies every byte.
//!
//! `front-end DISK PORT UNTIL [reconnect]`: the sockets of a disk and of the eviction port of a VM process, and a file that ends
//! the program when it exists. Prints `connected` once everything is written, and then a line a second. Fails at the first
//! error, at the first wrong byte, and if a connection is lost, unless it may connect again. It writes the number of times
//! that it did into `UNTIL.reconnects` whenever there is no such file. While there is a file `UNTIL.quiet` it only reads and flushes.

use remoca_frontend::testing::{Command, Options, TestGuest, Ticket};
use remoca_guest_tests::Result;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const BLOCK: usize = 4096;
const SECTORS: u64 = 8;
/// Number of requests in flight.
const DEPTH: usize = 12;
const QUEUES: u16 = 2;
/// Pages that go to the port with one request.
const BATCH: usize = 16;
/// How long nothing may complete: longer than any restart.
const PATIENCE: Duration = Duration::from_secs(60);
const INTERRUPT: Duration = Duration::from_millis(20);

/// A request in flight. A write gives its block the version.
enum Flight {
    Read { block: u64 },
    Write { block: u64, version: u64 },
    Flush,
}

struct Load {
    disk: TestGuest,
    port: TestGuest,
    sockets: [PathBuf; 2],
    may_reconnect: bool,
    reconnects: u64,
    /// Version of each block's content.
    versions: Vec<u64>,
    flights: Vec<(Ticket, Flight)>,
    batch: Option<Ticket>,
    evicted: Vec<u8>,
    random: u64,
    requests: u64,
    pages: u64,
    progress: Instant,
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (disk, port, until, may_reconnect) = match arguments.as_slice() {
        [disk, port, until] => (disk, port, until, false),
        [disk, port, until, again] if again == "reconnect" => (disk, port, until, true),
        _ => return Err("usage: front-end DISK PORT UNTIL [reconnect]".into()),
    };
    let mut load = Load::connect([disk.into(), port.into()], may_reconnect)?;
    load.fill()?;
    println!("connected");
    let reconnects = PathBuf::from(format!("{until}.reconnects"));
    let quiet = PathBuf::from(format!("{until}.quiet"));
    let mut told = Instant::now();
    while !Path::new(until).exists() {
        let may_write = !quiet.exists();
        while load.flights.len() < DEPTH {
            load.submit(may_write);
        }
        load.turn()?;
        if !reconnects.exists() {
            std::fs::write(&reconnects, load.reconnects.to_string())?;
        }
        if told.elapsed() > Duration::from_secs(1) {
            println!("{}", load.summary());
            told = Instant::now();
        }
    }
    load.finish()?;
    println!("whole after {}", load.summary());
    Ok(())
}

impl Load {
    fn connect(sockets: [PathBuf; 2], may_reconnect: bool) -> Result<Self> {
        let guest = |queue_count, data_bytes| {
            TestGuest::new(Options { queue_count, queue_size: 32, data_bytes, ..Options::default() })
        };
        let (mut device, mut evictions) = (guest(QUEUES, 64 << 10), guest(1, (BATCH * BLOCK) as u64));
        device.connect(&sockets[0])?;
        evictions.connect(&sockets[1])?;
        let blocks = usize::try_from(device.capacity()?)? / BLOCK;
        Ok(Self {
            disk: device,
            port: evictions,
            sockets,
            may_reconnect,
            reconnects: 0,
            versions: vec![0; blocks],
            flights: Vec::new(),
            batch: None,
            evicted: Vec::new(),
            random: 0x9e37_79b9_7f4a_7c15,
            requests: 0,
            pages: 0,
            progress: Instant::now(),
        })
    }

    /// Writes the first version of all blocks.
    fn fill(&mut self) -> Result<()> {
        for first in (0..self.versions.len() as u64).step_by(BATCH) {
            let blocks = first..(first + BATCH as u64).min(self.versions.len() as u64);
            let data: Vec<u8> = blocks.flat_map(|block| content(block, 0)).collect();
            if self.disk.run(0, Command::Write { sector: first * SECTORS, data: &data }) != 0 {
                return Err(format!("block {first} cannot be written").into());
            }
        }
        Ok(())
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) % limit
    }

    /// Submits a request to a block that no other request is for.
    fn submit(&mut self, may_write: bool) {
        let queue = u16::from(self.below(2) == 0) % QUEUES;
        let block = loop {
            let block = self.below(self.versions.len() as u64);
            let is_busy = |(_, flight): &(Ticket, Flight)| match flight {
                Flight::Read { block: other } | Flight::Write { block: other, .. } => *other == block,
                Flight::Flush => false,
            };
            if !self.flights.iter().any(is_busy) {
                break block;
            }
        };
        let sector = block * SECTORS;
        let (ticket, flight) = match self.below(32) {
            0 => (self.disk.submit(queue, Command::Flush), Flight::Flush),
            1..8 if may_write => {
                let version = self.version(block) + 1;
                let ticket = self.disk.submit(queue, Command::Write { sector, data: &content(block, version) });
                (ticket, Flight::Write { block, version })
            }
            _ => (self.disk.submit(queue, Command::Read { sector, length: BLOCK as u64 }), Flight::Read { block }),
        };
        self.disk.queues[usize::from(queue)].kick();
        self.flights.push((ticket, flight));
    }

    fn summary(&self) -> String {
        let Self { requests, pages, reconnects, .. } = self;
        format!("{requests} requests, {pages} evicted pages, {reconnects} reconnects")
    }

    fn version(&self, block: u64) -> u64 {
        usize::try_from(block).ok().and_then(|block| self.versions.get(block)).copied().unwrap_or(0)
    }

    /// Waits a moment for completions, and checks them.
    fn turn(&mut self) -> Result<()> {
        for queue in 0..QUEUES {
            self.disk.interrupted(queue, INTERRUPT);
            self.disk.poll(queue);
        }
        for (ticket, flight) in std::mem::take(&mut self.flights) {
            match self.disk.polled(ticket) {
                None => self.flights.push((ticket, flight)),
                Some(status) => self.complete(ticket, status, &flight)?,
            }
        }
        self.evict()?;
        for (device, socket) in [&mut self.disk, &mut self.port].into_iter().zip(&self.sockets) {
            if device.is_connected() {
                continue;
            }
            if !self.may_reconnect {
                return Err(format!("the connection to {} is lost", socket.display()).into());
            }
            // The process may not listen yet.
            device.disconnect();
            self.reconnects += u64::from(device.connect(socket).is_ok());
        }
        if self.progress.elapsed() > PATIENCE {
            return Err(format!("nothing completes, {} requests are in flight", self.flights.len()).into());
        }
        Ok(())
    }

    fn complete(&mut self, ticket: Ticket, status: u8, flight: &Flight) -> Result<()> {
        (self.requests, self.progress) = (self.requests + 1, Instant::now());
        if status != 0 {
            return Err(format!("a request failed with status {status}").into());
        }
        match *flight {
            Flight::Read { block } => {
                let data = self.disk.data(ticket, BLOCK);
                if data != content(block, self.version(block)) {
                    return Err(format!("block {block} has wrong content").into());
                }
                if self.evicted.len() < BATCH * BLOCK {
                    self.evicted.extend(data);
                }
            }
            Flight::Write { block, version } => self.versions[usize::try_from(block)?] = version,
            Flight::Flush => {}
        }
        Ok(())
    }

    /// Sends what was read to the port, as if the guest had evicted it.
    fn evict(&mut self) -> Result<()> {
        if let Some(ticket) = self.batch {
            match self.port.result(ticket) {
                None => return Ok(()),
                Some(0) => self.batch = None,
                Some(status) => return Err(format!("the port refused pages with status {status}").into()),
            }
        }
        if self.evicted.len() == BATCH * BLOCK {
            let data = std::mem::take(&mut self.evicted);
            self.batch = Some(self.port.submit(0, Command::Write { sector: SECTORS, data: &data }));
            self.port.queues[0].kick();
            self.pages += BATCH as u64;
        }
        Ok(())
    }

    /// Waits for all requests, and reads the whole disk.
    fn finish(&mut self) -> Result<()> {
        while !self.flights.is_empty() || self.batch.is_some() {
            self.turn()?;
        }
        for block in 0..self.versions.len() as u64 {
            let ticket = self.disk.submit(0, Command::Read { sector: block * SECTORS, length: BLOCK as u64 });
            self.disk.queues[0].kick();
            let status = self.disk.wait(ticket);
            self.complete(ticket, status, &Flight::Read { block })?;
        }
        Ok(())
    }
}

/// Returns a page that no other block and no other version has.
fn content(block: u64, version: u64) -> Vec<u8> {
    let mut word = block.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ version.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mut page = [block.to_le_bytes(), version.to_le_bytes()].concat();
    while page.len() < BLOCK {
        word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        page.extend(word.to_le_bytes());
    }
    page
}
