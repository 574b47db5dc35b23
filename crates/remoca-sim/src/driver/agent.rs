//! Pages that guests keep in memory and evict, and the agent that writes them to the eviction port.

use super::plan::Eviction;
use super::world::{Event, Outcome, World};
use crate::content::{BLOCK_SECTORS, Block, Sector, bytes};
use crate::random::Random;
use crate::violation::{Promise, Violation};
use remoca_frontend::device::Frontend;
use remoca_frontend::testing::{Command, DirectFrontEnd, Options, Record, TestGuest, Ticket};
use remoca_frontend::vhost::{DeviceConfig, VhostDevice};
use remoca_protocol::port::{PORT_BYTES, PORT_SERIAL};
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::time::Duration;

const QUEUE_SIZE: u16 = 8;
/// Maximum number of pages in one write to the port.
const BATCH: usize = 4;
/// Maximum number of pages that wait for a write. Further pages are dropped, as by a full ring.
const WAITING_MAX: usize = 64;
const PAST_MAX: usize = 32;
const PAGE: usize = 4096;

/// The blocks that a guest keeps in memory, oldest first.
pub(super) struct PageCache {
    room: usize,
    pages: VecDeque<(usize, Block)>,
    past: VecDeque<Block>,
}

impl PageCache {
    pub(super) fn new(room: usize) -> Self {
        Self { room, pages: VecDeque::new(), past: VecDeque::new() }
    }

    /// Keeps the content of `block`. Returns the page dropped for it, or `None` if there was room.
    pub(super) fn hold(&mut self, block: usize, content: Block) -> Option<Block> {
        if let Some((_, kept)) = self.pages.iter_mut().find(|(kept, _)| *kept == block) {
            let before = std::mem::replace(kept, content);
            if before != content {
                self.remember(before);
            }
            return None;
        }
        self.pages.push_back((block, content));
        if self.pages.len() <= self.room {
            return None;
        }
        let (_, dropped) = self.pages.pop_front()?;
        self.remember(dropped);
        Some(dropped)
    }

    fn remember(&mut self, page: Block) {
        self.past.push_back(page);
        if self.past.len() > PAST_MAX {
            self.past.pop_front();
        }
    }

    /// Forgets all pages: the guest's memory is gone.
    pub(super) fn clear(&mut self) {
        self.pages.clear();
    }

    /// Returns a page for the agent to report, or `None` if there is none of that kind.
    pub(super) fn pick(&self, eviction: Eviction, random: &mut Random) -> Option<Block> {
        let kept = |random: &mut Random| self.pages.get(random.index(self.pages.len().max(1))).map(|(_, page)| *page);
        let past = |random: &mut Random| self.past.get(random.index(self.past.len().max(1))).copied();
        match eviction {
            Eviction::Kept => kept(random),
            Eviction::Past => past(random),
            Eviction::Foreign => Some(std::array::from_fn(|_| Sector::garbage(random))),
            Eviction::Torn => {
                let (a, b) = (kept(random)?, past(random)?);
                Some(std::array::from_fn(|at| if at < BLOCK_SECTORS / 2 { a[at] } else { b[at] }))
            }
            Eviction::Zero => Some([Sector::ZERO; BLOCK_SECTORS]),
        }
    }
}

/// A request to the port.
enum Message {
    Pages(u64),
    Identification,
}

/// The guest's side of the port.
pub(super) struct Agent {
    guest: Box<TestGuest>,
    record: Record,
    front: Option<DirectFrontEnd>,
    under_way: Vec<(Ticket, Message)>,
    waiting: VecDeque<Block>,
}

impl Agent {
    pub(super) fn new() -> Self {
        let options = Options {
            queue_size: QUEUE_SIZE,
            data_bytes: (BATCH * PAGE) as u64,
            segment_count: 2,
            ..Options::default()
        };
        let guest = Box::new(TestGuest::new(options));
        let record = Record::new(&guest, true);
        Self { guest, record, front: None, under_way: Vec::new(), waiting: VecDeque::new() }
    }

    pub(super) fn config() -> DeviceConfig {
        let mut config = DeviceConfig::disk("port", PORT_SERIAL, PORT_BYTES);
        (config.discard, config.write_zeroes, config.queue_count_max) = (false, false, 1);
        config
    }

    /// Makes the port of a starting process, and returns its frontend.
    pub(super) fn open(&mut self, listener: OwnedFd) -> Frontend {
        let (device, front): (VhostDevice, _) = DirectFrontEnd::device(Self::config(), Some(listener));
        self.front = Some(front);
        Frontend::Vhost(Box::new(device))
    }

    pub(super) fn attach(&mut self) {
        if let Some(front) = &mut self.front {
            front.connect(&self.guest, Some(&self.record));
            front.pump();
        }
    }

    pub(super) fn lose_process(&mut self) {
        self.front = None;
    }

    /// Resets the agent for a new guest.
    pub(super) fn reboot(&mut self) {
        self.guest.reset();
        self.record = Record::new(&self.guest, true);
        self.under_way.clear();
        self.waiting.clear();
    }

    fn submit(&mut self, command: Command<'_>, message: Message) {
        let ticket = self.guest.submit(0, command);
        self.guest.queues[0].kick();
        self.under_way.push((ticket, message));
    }

    /// Writes waiting pages, as far as the ring has room.
    fn write(&mut self) {
        while !self.waiting.is_empty() && self.guest.has_free_slot(0) {
            let count = self.waiting.len().min(BATCH);
            let data: Vec<u8> = self.waiting.drain(..count).flat_map(|page| bytes(&page)).collect();
            self.submit(Command::Write { sector: BLOCK_SECTORS as u64, data: &data }, Message::Pages(count as u64));
        }
    }

    /// Returns one answer with its status and the page that was read, or `None` if there is no answer.
    fn take(&mut self) -> Option<(Message, u8, Vec<u8>)> {
        if let Some(front) = &mut self.front {
            front.pump();
        }
        self.guest.interrupted(0, Duration::ZERO).then(|| self.guest.poll(0));
        for at in 0..self.under_way.len() {
            let ticket = self.under_way[at].0;
            let data = self.guest.data(ticket, PAGE);
            if let Some(status) = self.guest.polled(ticket) {
                return Some((self.under_way.remove(at).1, status, data));
            }
        }
        None
    }

    pub(super) fn is_idle(&self) -> bool {
        self.under_way.is_empty() && self.waiting.is_empty()
    }
}

impl World<'_> {
    /// Keeps the blocks that the guest has read or written as a whole in its memory, and drops others for them.
    pub(super) fn keep_pages(&mut self, number: usize, start: usize, data: &[Sector]) {
        if self.agent.is_none() {
            return;
        }
        let first = start.next_multiple_of(BLOCK_SECTORS);
        let whole = data.get(first - start..).unwrap_or_default();
        for (page, block) in whole.as_chunks::<BLOCK_SECTORS>().0.iter().zip(first / BLOCK_SECTORS..) {
            if let Some(dropped) = self.disks[number].guest.memory.hold(block, *page) {
                self.report(dropped);
            }
        }
    }

    /// Reports a page to the agent, if there is one of that kind.
    pub(super) fn evict(&mut self, eviction: Eviction) {
        let disk = self.random.index(self.disks.len());
        if let Some(page) = self.disks[disk].guest.memory.pick(eviction, &mut self.random) {
            self.report(page);
        }
    }

    /// Sends a page through the agent, which sometimes takes long.
    fn report(&mut self, page: Block) {
        let lag = if self.random.one_in(16) { 50_000_000 } else { 300_000 };
        let in_ns = self.random.below(lag);
        self.schedule(in_ns, Event::Evicted(page));
    }

    pub(super) fn evicted(&mut self, page: Block) {
        let Some(agent) = &mut self.agent else { return };
        if agent.waiting.len() < WAITING_MAX {
            agent.waiting.push_back(page);
        }
        agent.write();
    }

    pub(super) fn identify(&mut self) {
        if let Some(agent) = self.agent.as_mut().filter(|agent| agent.guest.has_free_slot(0)) {
            agent.submit(Command::Read { sector: 0, length: PAGE as u64 }, Message::Identification);
        }
    }

    /// Receives the port's answers. Checks that it refuses no request and that its counters add up.
    pub(super) fn hear_port(&mut self) -> Outcome {
        while let Some((message, status, page)) = self.agent.as_mut().and_then(Agent::take) {
            if status != 0 {
                return Err(Violation::new(Promise::DiskErrorsOnly, "a message to the port fails"));
            }
            match message {
                Message::Pages(count) => self.tally.evictions += count,
                Message::Identification => self.check_identification(&page)?,
            }
            if let Some(agent) = &mut self.agent {
                agent.write();
            }
        }
        Ok(())
    }

    fn check_identification(&mut self, page: &[u8]) -> Outcome {
        self.tally.identifications += 1;
        let word = |at: usize| page[at..].first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
        let adds_up = word(16) == word(24) + word(32) + word(40);
        if &page[..8] == b"REMOCAEP" && adds_up && word(48) == self.cookie() {
            return Ok(());
        }
        let text = format!("the port says {:?}", [16, 24, 32, 40, 48].map(word));
        Err(Violation::new(Promise::CountersAddUp, text))
    }

    /// Returns the number that distinguishes this process from others.
    pub(super) fn cookie(&self) -> u64 {
        self.lives + 1
    }
}
