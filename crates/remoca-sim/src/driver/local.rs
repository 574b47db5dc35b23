//! The model server of the local tier. Its pools are real memory, which the driver reads and writes by itself: only sizes travel, and
//! what the server takes back it punches out.

use super::Flaw;
use super::servers::Donor;
use super::world::{Event, Outcome, World};
use crate::random::Random;
use crate::violation::{Promise, Violation};
use remoca_core::units::{PAGE_SIZE, PAGE_SIZE_U64, PageCount};
use remoca_io::address::Endpoint;
use remoca_protocol::control::Command;
use remoca_protocol::{ErrorCode, ErrorReply, Frame};
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, SeekFrom, fallocate, fcntl_add_seals, ftruncate, memfd_create, seek,
};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

/// Number of slots for which a pool could have memory.
const PAGES: u32 = 80;

/// Returns the address of the server of the local tier.
pub(super) fn endpoint() -> Endpoint {
    Endpoint::Local("/server".into())
}

/// Memory of a pool.
pub(super) struct Memory {
    file: File,
    granted: PageCount,
    /// Most pages that the operator of the server leaves to the pool.
    limit: PageCount,
}

impl Memory {
    pub(super) fn new() -> Self {
        let file = memfd_create("pool", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("there is memory");
        ftruncate(&file, offset(PAGES)).expect("memory has any size");
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).expect("nobody has sealed it");
        Self { file: file.into(), granted: PageCount(0), limit: PageCount(PAGES) }
    }

    pub(super) fn granted(&self) -> PageCount {
        self.granted
    }

    /// Returns a descriptor for the client.
    pub(super) fn passed(&self) -> OwnedFd {
        self.file.try_clone().expect("the system has descriptors left").into()
    }

    /// Executes a frame of the client. The answer goes to `out`. Returns an error if the client broke the protocol.
    pub(super) fn handle(&mut self, frame: &Frame<'_>, out: &mut Vec<u8>) -> Result<(), String> {
        let Frame::SetSize { request, npages } = *frame else {
            return Err(format!("a client with mapped memory sends {frame:?}"));
        };
        if npages > self.limit.max(self.granted) {
            Frame::Error(ErrorReply { request, code: ErrorCode::Quota, detail: self.limit.0 }).encode(out);
            return Ok(());
        }
        self.granted = npages;
        self.punch(npages.0..PAGES);
        Frame::Sized { request, npages, available: PageCount(self.limit.0.saturating_sub(npages.0)) }.encode(out);
        Ok(())
    }

    /// Limits the pool. Returns what is to be told to its client, if it has more.
    pub(super) fn limit(&mut self, npages: PageCount) -> Option<Vec<u8>> {
        self.limit = npages.min(PageCount(PAGES));
        self.take_back()
    }

    /// Returns what is to be told to a client that has more than the limit, or `None` if it does not.
    pub(super) fn take_back(&self) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        Frame::TakeBack { npages: self.limit }.encode(&mut bytes);
        (self.granted > self.limit).then_some(bytes)
    }

    /// Takes back what is above the limit without a word.
    pub(super) fn shrink(&mut self) {
        self.granted = self.granted.min(self.limit);
        self.punch(self.granted.0..PAGES);
    }

    fn punch(&self, slots: std::ops::Range<u32>) {
        let (start, end) = (offset(slots.start), offset(slots.end));
        if start < end {
            let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(&self.file, how, start, end - start).expect("memory can be punched");
        }
    }

    /// Takes up to `count` pages without a word.
    pub(super) fn lose(&self, count: u32, random: &mut Random) {
        for _ in 0..count {
            let slot = random.count(0..=PAGES - 1);
            self.punch(slot..slot + 1);
        }
    }

    pub(super) fn forget(&self) {
        self.punch(0..PAGES);
    }

    /// Changes a byte of each page that is there.
    fn spoil(&self, random: &mut Random) {
        let mut page = [0; PAGE_SIZE];
        for slot in 0..self.granted.0 {
            self.file.read_exact_at(&mut page, offset(slot)).expect("it is within the memory");
            if page.iter().any(|byte| *byte != 0) {
                page[random.index(PAGE_SIZE)] ^= 1;
                self.file.write_all_at(&page, offset(slot)).expect("it is within the memory");
            }
        }
    }

    /// Returns whether a page is beyond what was granted.
    fn overshoots(&self) -> bool {
        seek(&self.file, SeekFrom::Data(offset(self.granted.0))).is_ok()
    }
}

fn offset(slot: u32) -> u64 {
    u64::from(slot) * PAGE_SIZE_U64
}

/// Event of the local tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// The operator sets its size.
    Size(u32),
    /// The server leaves at most so many pages to each client.
    TakeBack(u32),
    /// The server restarts, with its pools or without.
    Restart(bool),
    /// It loses some pages.
    Lose(u32),
    /// All its pages are spoiled.
    Spoil,
}

impl World<'_> {
    /// Returns the number of the server at an address.
    pub(super) fn server_at(&self, to: &Endpoint) -> usize {
        let listed = (0..self.plan.conditions.servers).find(|server| super::servers::endpoint(*server) == *to);
        listed.unwrap_or(self.plan.conditions.servers)
    }

    fn local(&mut self) -> &mut Donor {
        self.donors.last_mut().expect("the last server is that of the local tier")
    }

    pub(super) fn change_local(&mut self, change: Change) {
        self.note(|| format!("the local tier: {change:?}"));
        self.tally.local_changes += 1;
        let mut random = Random::new(self.random.bits());
        let number = self.plan.conditions.servers;
        match change {
            Change::Size(pages) => {
                let local_bytes = Some(u64::from(pages) * PAGE_SIZE_U64);
                self.command(Command::Set {
                    cache_bytes: None,
                    local_bytes,
                    enabled: None,
                    servers: None,
                    at_once: false,
                });
            }
            Change::TakeBack(pages) => {
                for connection in 0..self.connections.len() {
                    let client = &self.connections[connection];
                    if client.server == number && client.is_open() {
                        let told = self.donors[number].limit(client, PageCount(pages));
                        match self.has(Flaw::TakeBackIgnored) {
                            true => self.local().shrink(),
                            false => told.into_iter().for_each(|frame| self.send_take_back(connection, frame)),
                        }
                    }
                }
            }
            Change::Restart(keeps) => {
                if !keeps {
                    self.local().restart();
                }
                let of_server = self.connections.iter_mut().filter(|connection| connection.server == number);
                of_server.for_each(super::servers::Connection::cut);
            }
            Change::Lose(count) => self.local().lose(count, &mut random),
            Change::Spoil => self.local().memories().for_each(|memory| memory.spoil(&mut random)),
        }
    }

    /// Sends a TAKEBACK to a client.
    pub(super) fn send_take_back(&mut self, connection: usize, frame: Vec<u8>) {
        self.tally.taken_back += 1;
        let at = (self.now + self.latency()).max(self.connections[connection].to_client_ns);
        self.connections[connection].to_client_ns = at;
        self.schedule(at - self.now, Event::ToClient(connection, frame));
    }

    /// Checks, with nothing under way, that the driver knows of all memory that it was granted.
    pub(super) fn check_local_size(&mut self) -> Outcome {
        let Some(process) = &mut self.process else { return Ok(()) };
        let known = process.driver.snapshot().cache.local_granted_bytes / PAGE_SIZE_U64;
        let number = self.plan.conditions.servers;
        let newest = self.connections.iter().rfind(|connection| connection.server == number && connection.is_open());
        match newest.and_then(|client| self.donors[number].granted(client)) {
            Some(granted) if u64::from(granted.0) != known => {
                let text = format!("the local tier has {} pages, and the driver knows of {known}", granted.0);
                Err(Violation::new(Promise::Useful, text))
            }
            _ => Ok(()),
        }
    }

    /// Checks that the driver uses no memory that it was not granted.
    pub(super) fn check_local(&mut self) -> Outcome {
        if self.has(Flaw::PagesForgotten) {
            self.local().forget();
        }
        if self.local().memories().any(|memory| memory.overshoots()) {
            return Err(Violation::new(Promise::ProtocolKept, "a page is written beyond what was granted"));
        }
        Ok(())
    }
}
