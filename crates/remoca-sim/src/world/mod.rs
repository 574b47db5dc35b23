//! The world of one run: guest, disks, engine, network and server on one thread, and the events that move them.
//!
//! It is the engine's driver, in place of `remoca-disk`: it executes the engine's actions in their order, and drains
//! them after every call. `run` is called once; the first violation ends it.
//! `guest_side`, `actions` and `network` hold the events; `checks` what is looked at from outside.

mod actions;
mod checks;
mod guest_side;
mod network;

use crate::content::{Block, Sector};
use crate::disk::{IoId, ModelDisk};
use crate::guest::Guest;
use crate::plan::{Plan, Stimulus};
use crate::queue::Queue;
use crate::random::Random;
use crate::server::{Message, Reply, Server};
use crate::trace::Line;
use crate::violation::{Promise, Violation};
use crate::wire::{ConnectionId, Wire};
use crate::{Options, Tally};
use remoca_core::engine::{DiskEngine, EngineConfig, FetchId, PoolOffer, ServerNumber, layout};
use remoca_core::fingerprint::Fingerprinter;
use remoca_core::rules::Rules;
use remoca_core::units::{DiskIndex, Nanos, PageCount, SlotIndex};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

/// Virtual time after the last step in which everything has to come to rest: longer than every timer of the engine, the ten
/// minutes included in which a server that broke its promise is not believed.
const SETTLING_NS: u64 = 800_000_000_000;
/// A run that does not come to rest within so many events never does.
const EVENTS_MAX: u64 = 200_000;
/// What is known about blocks is compared with the disk after so many events.
const AUDIT_EVERY: u64 = 32;

type Outcome = Result<(), Violation>;

/// Something that happens at its time.
#[derive(Debug)]
pub(crate) enum Event {
    Step(usize),
    /// A portion of an I/O takes effect.
    Portion {
        disk: u16,
        io: IoId,
        portion: u8,
    },
    IoDone {
        disk: u16,
        io: IoId,
    },
    /// A page that the guest evicted reaches the port.
    Evicted(Block),
    /// The oldest message that waits leaves.
    Leave(ConnectionId),
    ToServer {
        server: usize,
        connection: ConnectionId,
        number: u64,
        message: Message,
    },
    ToClient {
        connection: ConnectionId,
        reply: Reply,
    },
    /// The client notices that its connection is gone.
    Notice(ConnectionId),
    /// A HELLO reaches a server; the client began to connect at this time.
    Connect {
        server: ServerNumber,
        connection: ConnectionId,
        since: Nanos,
    },
    /// The client hears what came of it.
    Answer {
        server: ServerNumber,
        connection: ConnectionId,
        offer: Option<PoolOffer>,
    },
    /// A BYE reaches a server.
    Bye {
        server: usize,
        connection: ConnectionId,
    },
    /// A stopped server goes on.
    Resume(usize),
    /// The driver's timer for the engine.
    Timer,
    /// The plan is over: the servers work, and dead connections are noticed.
    Heal,
}

/// A REQUEST whose reply the engine has not got.
#[derive(Clone, Copy, Debug)]
struct Outstanding {
    slot: SlotIndex,
    /// The event of the guest's request for which it was sent.
    event: u64,
}

/// A memory server, with its newest connection as it sees it.
#[derive(Debug)]
struct Donor {
    server: Server,
    /// How often it was taken out of the operator's list.
    listings: usize,
    /// 0: there is none.
    id: ConnectionId,
    /// Messages from this one on never arrive.
    lost_from: u64,
    stopped_until: Option<Nanos>,
    /// What arrived while the server was stopped.
    backlog: VecDeque<(ConnectionId, u64, Message)>,
    /// When it lost its client.
    abandoned: Option<Nanos>,
    /// Nobody listens until then.
    gone_until: Nanos,
}

impl Donor {
    fn new(memory: u32) -> Self {
        Self {
            server: Server::new(memory),
            listings: 0,
            id: 0,
            lost_from: u64::MAX,
            stopped_until: None,
            backlog: VecDeque::new(),
            abandoned: None,
            gone_until: Nanos(0),
        }
    }
}

/// One run.
pub(crate) struct World<'a> {
    plan: &'a Plan,
    options: &'a Options,
    now: Nanos,
    event: u64,
    queue: Queue<Event>,
    /// Draws for the event that is being handled.
    random: Random,
    engine: DiskEngine<Vec<u32>>,
    prints: Fingerprinter,
    resident: u32,
    disks: Vec<ModelDisk>,
    guest: Guest,
    wire: Wire,
    donors: Vec<Donor>,
    /// The servers in the operator's list, a bit for each.
    listed: u32,
    connections: ConnectionId,
    /// Attempts to connect that the engine has not heard of.
    asked: BTreeMap<ServerNumber, ConnectionId>,
    /// Connections that wait to be used or released.
    answered: BTreeMap<ServerNumber, ConnectionId>,
    /// REQUESTs whose reply the engine has not got.
    outstanding: BTreeMap<FetchId, Outstanding>,
    /// What frames held that were overwritten since the actions were drained.
    captured: Vec<Block>,
    size_asked: bool,
    timer_at: Option<Nanos>,
    ios: u64,
    /// Disks for which a flush was reported as failed.
    flush_failed: Vec<bool>,
    tally: Tally,
    lines: Option<Vec<Line>>,
}

impl<'a> World<'a> {
    pub(crate) fn new(plan: &'a Plan, options: &'a Options, trace: bool) -> Self {
        let scenario = &plan.scenario;
        let config = EngineConfig {
            disks: scenario.disks,
            key: scenario.key,
            seed: 1,
            cache: PageCount(scenario.slots),
            guest_memory: PageCount(scenario.resident),
            has_port: scenario.has_port && !options.agentless,
            frame_sample: scenario.frame_sample,
            send_window: scenario.send_window,
            fetch_limit: scenario.fetch_limit,
            rules: options.omit.map_or_else(Rules::default, Rules::without),
        };
        let mut world = Self {
            plan,
            options,
            now: Nanos(0),
            event: 0,
            queue: Queue::default(),
            random: Random::new(u64::from_le_bytes(scenario.key[..8].try_into().unwrap_or_default())),
            engine: DiskEngine::new(&config, vec![0; layout(&config).words()]),
            prints: Fingerprinter::new(&scenario.key),
            resident: scenario.resident,
            disks: (0..scenario.disks).map(|disk| new_disk(disk, scenario.sectors)).collect(),
            guest: Guest::new(scenario.depth, scenario.guest_pages),
            wire: Wire::new(),
            donors: scenario.memory.iter().map(|memory| Donor::new(*memory)).collect(),
            listed: 0,
            connections: 0,
            asked: BTreeMap::new(),
            answered: BTreeMap::new(),
            outstanding: BTreeMap::new(),
            captured: Vec::new(),
            size_asked: false,
            timer_at: None,
            ios: 0,
            flush_failed: vec![false; usize::from(scenario.disks)],
            tally: Tally::default(),
            lines: trace.then(Vec::new),
        };
        for disk in 0..scenario.disks {
            let blocks = (scenario.sectors / crate::content::BLOCK_SECTORS) as u64;
            world.engine.describe_disk(DiskIndex(disk), blocks, scenario.declared_swap && disk == 0);
        }
        world.schedule_plan();
        world
    }

    fn schedule_plan(&mut self) {
        let mut end = Nanos(0);
        for (number, step) in self.plan.steps.iter().enumerate() {
            if self.options.includes(number) {
                self.queue.push(step.at, step.seed, Event::Step(number));
                end = step.at;
            }
        }
        self.queue.push(end.plus_ns(1), 2, Event::Heal);
    }

    /// Runs to the end, or to the first violation.
    pub(crate) fn run(&mut self) -> Outcome {
        let mut end = Nanos(u64::MAX);
        self.set_servers(u32::MAX)?;
        while let Some(next) = self.queue.pop() {
            // A server may be asked for its size at that very moment.
            if next.at > end && !self.size_asked {
                break;
            }
            self.now = next.at;
            self.event += 1;
            self.random = Random::new(next.seed);
            if matches!(next.event, Event::Heal) {
                end = self.now.plus_ns(SETTLING_NS);
            }
            self.handle(next.event)?;
            self.arm_timer();
            self.check_always()?;
            if self.event.is_multiple_of(AUDIT_EVERY) {
                self.check_known_blocks()?;
            }
            if self.event > EVENTS_MAX {
                return self.fail(Violation::new(Promise::Bounded, "the world does not come to rest"));
            }
        }
        self.check_end()
    }

    fn handle(&mut self, event: Event) -> Outcome {
        match event {
            Event::Step(number) => self.step(number),
            Event::Portion { disk, io, portion } => {
                self.disks[usize::from(disk)].advance(io, portion, self.event, &mut self.random);
                Ok(())
            }
            Event::IoDone { disk, io } => self.io_done(disk, io),
            Event::Evicted(page) => self.evicted(page),
            Event::Leave(connection) => self.leave(connection),
            Event::ToServer { server, connection, number, message } => {
                self.arrive_at_server(server, connection, number, message)
            }
            Event::ToClient { connection, reply } => self.arrive_at_client(connection, reply),
            Event::Notice(connection) => self.notice(connection),
            Event::Connect { server, connection, since } => self.connect(server, connection, since),
            Event::Answer { server, connection, offer } => self.answer(server, connection, offer),
            Event::Bye { server, connection } => self.bye(server, connection),
            Event::Resume(server) => self.resume(server),
            Event::Timer => self.timer(),
            Event::Heal => self.heal(),
        }
    }

    /// One step of the plan.
    fn step(&mut self, number: usize) -> Outcome {
        let plan = self.plan;
        match &plan.steps[number].stimulus {
            Stimulus::Guest { disk, sectors, kind } => return self.submit(number, *disk, sectors.clone(), *kind),
            Stimulus::Evict(_) if self.options.agentless => {}
            Stimulus::Evict(eviction) => self.evict(*eviction),
            Stimulus::Resize(size) => return self.resize(*size),
            Stimulus::GuestMemory(pages) => {
                self.resident = *pages;
                self.fit_index(self.engine.status().wanted);
            }
            Stimulus::Cut(notice_ns) => self.cut(*notice_ns),
            Stimulus::Hang => self.hang(),
            Stimulus::Stop(server, ns) => self.stop(*server, *ns),
            Stimulus::Restart(server) => self.restart(*server),
            Stimulus::Away(server, ns) => self.away(*server, *ns),
            Stimulus::Gone(server, ns) => self.gone(*server, *ns),
            Stimulus::Take(server, count) => {
                self.note(None, || format!("server {server} loses up to {count} pages"));
                self.donors[*server].server.take(*count, &mut self.random);
            }
            Stimulus::Memory(server, pages) => {
                self.note(None, || format!("server {server} has {pages} pages for us"));
                self.donors[*server].server.memory = *pages;
            }
            Stimulus::Servers(bits) => return self.set_servers(*bits),
            Stimulus::StoreCrash(disk) => return self.store_crash(*disk),
        }
        Ok(())
    }

    fn resize(&mut self, size: u32) -> Outcome {
        self.note(None, || format!("the operator sets the cache to {size} pages"));
        self.fit_index(PageCount(size));
        if size == 0 {
            self.guest.forget_known();
        }
        self.engine.resize(PageCount(size));
        self.execute()
    }

    /// The operator lists the servers whose bits are set.
    fn set_servers(&mut self, bits: u32) -> Outcome {
        for server in 0..self.donors.len() {
            if self.listed >> server & 1 == 1 && bits >> server & 1 == 0 {
                self.donors[server].listings += 1;
            }
        }
        self.listed = bits;
        let listed = (0..self.donors.len()).filter(|server| bits >> server & 1 == 1);
        let listed: Vec<_> = listed.map(|server| self.number(server)).collect();
        self.note(None, || format!("the servers are {listed:?}"));
        self.engine.set_servers(self.now, &listed);
        self.execute()
    }

    /// The number that the engine knows a server by: another one each time that it comes into the list.
    fn number(&self, server: usize) -> ServerNumber {
        let number = self.donors[server].listings * self.donors.len() + server;
        ServerNumber(u32::try_from(number).unwrap_or(u32::MAX))
    }

    fn server(&self, number: ServerNumber) -> usize {
        number.0 as usize % self.donors.len()
    }

    /// Grows the index where the sizes ask for it, as a driver has to before a resize.
    fn fit_index(&mut self, cache: PageCount) {
        if let Some(layout) = self.engine.needs_layout(cache, PageCount(self.resident)) {
            self.note(None, || format!("a larger index: {layout:?}"));
            self.tally.index_growths += 1;
            if !self.knows_all_blocks() {
                self.guest.forget_known();
            }
            self.engine.replace_index(layout, vec![0; layout.words()]);
        }
    }

    fn store_crash(&mut self, disk: u16) -> Outcome {
        self.note(None, || format!("the store of disk {disk} crashes and comes back"));
        self.tally.store_crashes += 1;
        self.disks[usize::from(disk)].crash(self.event, &mut self.random);
        self.guest.disturb(disk);
        self.engine.handle_content_uncertain(DiskIndex(disk));
        self.execute()
    }

    fn timer(&mut self) -> Outcome {
        if self.timer_at == Some(self.now) {
            self.timer_at = None;
            self.engine.handle_timer(self.now);
            self.execute()?;
        }
        Ok(())
    }

    /// Drivers are never early, and sometimes late.
    fn arm_timer(&mut self) {
        let Some(deadline) = self.engine.next_deadline() else { return };
        if self.timer_at.is_none_or(|at| deadline < at) {
            let late = if self.random.one_in(8) { self.random.below(2_000_000) } else { 0 };
            let at = deadline.max(self.now).plus_ns(late);
            if self.timer_at.is_none_or(|armed| at < armed) {
                self.timer_at = Some(at);
                self.schedule_at(at, Event::Timer);
            }
        }
    }

    fn schedule_at(&mut self, at: Nanos, event: Event) {
        let seed = self.random.bits();
        self.queue.push(at, seed, event);
    }

    fn schedule(&mut self, in_ns: u64, event: Event) {
        self.schedule_at(self.now.plus_ns(in_ns), event);
    }

    /// Adds a line to the trace, if there is one.
    fn note(&mut self, blocks: Option<(u16, Range<usize>)>, text: impl FnOnce() -> String) {
        if let Some(lines) = &mut self.lines {
            lines.push(Line { event: self.event, at: self.now, blocks, text: text() });
        }
    }

    /// Ends the run, unless only what the guest can see counts and it cannot see this.
    fn fail(&mut self, violation: Violation) -> Outcome {
        if self.options.guest_visible_only && !violation.promise.is_visible_to_guest() {
            return Ok(());
        }
        Err(violation)
    }

    pub(crate) fn event(&self) -> u64 {
        self.event
    }

    pub(crate) fn tally(&self) -> Tally {
        Tally { events: self.event, stats: self.engine.stats(), ..self.tally }
    }

    pub(crate) fn into_lines(self) -> Vec<Line> {
        self.lines.unwrap_or_default()
    }
}

/// A disk with content of its own in most blocks, shared content and zeroes in some.
fn new_disk(disk: u16, sectors: usize) -> ModelDisk {
    ModelDisk::new((0..sectors).map(|sector| match sector / crate::content::BLOCK_SECTORS % 8 {
        6 => Sector::template(0),
        7 => Sector::ZERO,
        _ => Sector::initial(disk, sector),
    }))
}
