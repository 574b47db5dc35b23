//! The world of one run: guest, disks, engine, network and server on one thread, and the events that drive them.
//!
//! It is the engine's driver, in place of `remoca-disk`: it executes the engine's actions in order, and drains them
//! after every call. `run` is called once; the first violation ends it. `guest_side`, `actions` and `network` hold the
//! events, `checks` the checks from outside.

mod actions;
mod changes;
mod checks;
mod guest_side;
mod local;
mod moving;
mod network;
mod process;
mod region;
mod vm;

use crate::content::{BLOCK_SECTORS, Block};
use crate::disk::IoId;
use crate::plan::{Plan, Stimulus};
use crate::queue::Queue;
use crate::random::Random;
use crate::server::{Message, Pool, Reply};
use crate::trace::Line;
use crate::violation::{Promise, Violation};
use crate::wire::ConnectionId;
use crate::{HostRule, Options, Tally};
use changes::Change;
use local::LocalEvent;
use moving::Move;
use region::Region;
use remoca_core::engine::{Leaving, PoolOffer, RequestId, ServerNumber};
use remoca_core::index::Layout;
use remoca_core::rules::Rules;
use remoca_core::units::{Nanos, PageCount};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use vm::{Outstanding, Vm};

/// Virtual time after the last step in which everything must come to rest. It is longer than every timer of the
/// engine, including the ten minutes in which a server that broke its promise is not trusted.
const SETTLING_NS: u64 = 800_000_000_000;
/// Maximum number of events; a run that has more never comes to rest.
const EVENTS_MAX: u64 = 200_000;
/// Number of events between two comparisons of the known blocks with the disks.
const AUDIT_EVERY: u64 = 32;

type Outcome = Result<(), Violation>;

/// An event at its time.
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
    /// The oldest waiting message leaves.
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
    /// The client is notified that its connection is gone.
    Notice(ConnectionId),
    /// A HELLO reaches a server; the client began to connect at this time.
    Connect {
        server: ServerNumber,
        connection: ConnectionId,
        since: Nanos,
    },
    /// The client receives the result.
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
    /// A stopped server continues.
    Resume(usize),
    /// The driver's timer for the engine.
    Timer,
    /// The VM process is started.
    Start,
    /// A process that is to be upgraded may have drained its requests.
    Upgrade,
    /// A disk may change by now; number of further attempts.
    Change(u16, Change, u32),
    /// A disk that found no free number may find one by now.
    Attach(u16),
    /// A buffer is available for a disk read that waited for one.
    Feed(RequestId, u64),
    /// An event of the VM's local tier.
    Local(LocalEvent),
    /// An event in this migration.
    Move(u64, Move),
    /// The plan is over: the servers work, and dead connections are noticed.
    Heal,
}

/// The name of a VM's pools at the servers. It is new each time that the process starts cold.
type Owner = (usize, u64);

/// A memory server.
#[derive(Debug)]
struct Donor {
    pools: BTreeMap<Owner, Pool>,
    /// Number of pages that it has for all VMs, including those in pools.
    memory: u32,
    stopped_until: Option<Nanos>,
    /// Messages that arrived while it was stopped.
    backlog: VecDeque<(usize, ConnectionId, u64, Message)>,
    /// Time until which the server does not listen.
    gone_until: Nanos,
}

impl Donor {
    fn new(memory: u32) -> Self {
        Self { pools: BTreeMap::new(), memory, stopped_until: None, backlog: VecDeque::new(), gone_until: Nanos(0) }
    }

    /// Returns the number of pages that are in no pool.
    fn free(&self) -> u32 {
        self.memory.saturating_sub(self.pools.values().map(|pool| pool.size().0).sum())
    }
}

/// One run.
pub(crate) struct World<'a> {
    plan: &'a Plan,
    options: &'a Options,
    now: Nanos,
    event: u64,
    /// Events, each with the VM that it is about.
    queue: Queue<(usize, Event)>,
    /// Random numbers for the present event.
    random: Random,
    /// The VM that the event is about, and the others.
    vm: Vm<'a>,
    others: Vec<Vm<'a>>,
    donors: Vec<Donor>,
    /// Time until which each host is down.
    hosts: Vec<Nanos>,
    /// Owners of the connections so far. Number 0 is not a valid connection.
    connections: Vec<Owner>,
    tally: Tally,
    lines: Option<Vec<Line>>,
}

impl<'a> World<'a> {
    /// Makes the world of a plan. Returns `None` if the plan has no VM.
    pub(crate) fn new(plan: &'a Plan, options: &'a Options, trace: bool) -> Option<Self> {
        let scenario = &plan.scenario;
        let rules = options.omit.map_or_else(Rules::default, Rules::without);
        let servers = scenario.memory.len();
        let vm = |(number, machine)| Vm::new(number, machine, servers, options.agentless, rules);
        let mut vms = scenario.machines.iter().enumerate().map(vm);
        let mut world = Self {
            plan,
            options,
            now: Nanos(0),
            event: 0,
            queue: Queue::default(),
            random: Random::new(1),
            vm: vms.next()?,
            others: vms.collect(),
            donors: scenario.memory.iter().map(|memory| Donor::new(*memory)).collect(),
            hosts: vec![Nanos(0); scenario.hosts],
            connections: vec![(0, 0)],
            tally: Tally::default(),
            lines: trace.then(Vec::new),
        };
        world.schedule_plan();
        Some(world)
    }

    /// Switches to this VM.
    fn enter(&mut self, number: usize) {
        if let Some(other) = self.others.iter_mut().find(|vm| vm.number == number) {
            std::mem::swap(&mut self.vm, other);
        }
    }

    /// Runs `body` for each VM, and switches back to the current one at the end.
    fn for_each_vm(&mut self, mut body: impl FnMut(&mut Self) -> Outcome) -> Outcome {
        let before = self.vm.number;
        for number in 0..=self.others.len() {
            self.enter(number);
            body(self)?;
        }
        self.enter(before);
        Ok(())
    }

    /// Returns whether a rule of processes and hosts applies in this run.
    fn holds(&self, rule: HostRule) -> bool {
        self.options.omit_host != Some(rule)
    }

    /// Returns the time on the clock of the VM's process.
    fn clock(&self) -> Nanos {
        self.now.plus_ns(self.vm.ahead_ns)
    }

    fn schedule_plan(&mut self) {
        let mut end = Nanos(0);
        for number in 0..=self.others.len() {
            self.queue.push(Nanos(0), number as u64, (number, Event::Start));
        }
        for (at, step) in self.plan.steps.iter().enumerate() {
            if self.options.includes(step.number) && step.vm <= self.others.len() {
                end = end.max(Nanos(step.at_ns));
                self.queue.push(Nanos(step.at_ns), step.seed, (step.vm, Event::Step(at)));
            }
        }
        self.queue.push(end.plus_ns(1), 2, (0, Event::Heal));
    }

    /// Runs to the end, or to the first violation.
    pub(crate) fn run(&mut self) -> Outcome {
        let mut end = Nanos(u64::MAX);
        while let Some(next) = self.queue.pop() {
            // A server may be asked for its size at this very moment.
            if next.at > end && !self.is_size_owed() {
                break;
            }
            self.now = next.at;
            self.event += 1;
            self.random = Random::new(next.seed);
            let (vm, event) = next.event;
            self.enter(vm);
            if matches!(event, Event::Heal) {
                end = self.now.plus_ns(SETTLING_NS);
            }
            self.handle(event)?;
            if self.vm.up && self.vm.is_dead() {
                self.bury();
            }
            if self.vm.up {
                self.vm.local.count();
                self.arm_timer();
                self.check_always()?;
                if self.event.is_multiple_of(AUDIT_EVERY) {
                    self.check_known_blocks()?;
                }
            }
            if self.event > EVENTS_MAX {
                return self.fail(Violation::new(Promise::Bounded, "the world does not come to rest"));
            }
        }
        self.for_each_vm(Self::check_end)
    }

    fn is_size_owed(&self) -> bool {
        self.vm.is_size_owed() || self.others.iter().any(Vm::is_size_owed)
    }

    fn handle(&mut self, event: Event) -> Outcome {
        match event {
            Event::Step(number) => self.step(number),
            Event::Portion { disk, io, portion } => {
                let model = &mut self.vm.disks[usize::from(disk)];
                model.advance(io, portion, self.event, &mut self.random);
                match model.take_overwritten() {
                    None => Ok(()),
                    Some(sector) => self.fail(overwritten(disk, sector)),
                }
            }
            Event::IoDone { disk, io } => self.io_done(disk, io),
            Event::Evicted(page) => self.evicted(page),
            Event::Feed(id, serial) => self.feed(id, serial),
            Event::Local(event) => self.local_event(event),
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
            Event::Start => self.start(),
            Event::Change(disk, change, attempts) => self.change(disk, change, attempts),
            Event::Attach(disk) => self.attach(disk),
            Event::Upgrade => self.go_on_with_upgrade(),
            Event::Move(id, what) => self.go_on_with_move(id, what),
            Event::Heal => self.heal(),
        }
    }

    /// Performs one step of the plan.
    fn step(&mut self, at: usize) -> Outcome {
        let plan = self.plan;
        let step = &plan.steps[at];
        match &step.stimulus {
            Stimulus::Guest { disk, sectors, kind } => {
                return self.submit(step.number, *disk, sectors.clone(), *kind);
            }
            Stimulus::Evict(_) if self.options.agentless => {}
            Stimulus::Evict(eviction) => self.evict(*eviction),
            Stimulus::Resize(size) => return self.resize(*size),
            Stimulus::GuestMemory(pages) => {
                self.vm.resident = *pages;
                if self.vm.up {
                    let status = self.vm.engine.status();
                    self.fit_index(PageCount(status.wanted.0 + status.local_wanted.0));
                }
            }
            Stimulus::Cut(notice_ns) => self.cut(*notice_ns),
            Stimulus::Hang => self.hang(),
            Stimulus::Stop(server, ns) => self.stop(*server, *ns),
            Stimulus::Restart(server) => {
                self.local_fault(None, 0);
                self.restart(*server);
            }
            Stimulus::Away(server, ns) => self.away(*server, *ns),
            Stimulus::Gone(server, ns) => {
                self.local_fault(None, *ns);
                self.gone(*server, *ns);
            }
            Stimulus::Take(server, count) => {
                self.local_fault(Some(*count), 0);
                self.take_pages(*server, *count);
            }
            Stimulus::Memory(server, pages) => {
                self.note(None, || format!("server {server} has {pages} pages"));
                self.donors[*server].memory = *pages;
            }
            Stimulus::Servers(bits) => return self.set_servers(*bits),
            Stimulus::StoreCrash(disk) => return self.store_crash(*disk),
            Stimulus::Replace(disk) => return self.begin_change(*disk, Change::Replace),
            Stimulus::Size(disk, sectors) => return self.begin_change(*disk, Change::Size(*sectors)),
            Stimulus::Kill(kill) => self.kill(*kill),
            Stimulus::HostFault(host, down_ns) => return self.host_fault(*host, *down_ns),
            Stimulus::Upgrade => self.upgrade(),
            Stimulus::Migrate(host, hops) => self.migrate(*host, hops),
            Stimulus::ClockJump(ns) => {
                self.note(None, || format!("the clock jumps by {} ms", ns / 1_000_000));
                self.vm.ahead_ns += ns;
            }
            Stimulus::Classes(is_one) => self.say_classes(*is_one),
        }
        Ok(())
    }

    fn resize(&mut self, size: u32) -> Outcome {
        self.note(None, || format!("the operator sets the cache to {size} pages"));
        self.vm.config.cache = PageCount(size);
        self.resize_local();
        if size + self.vm.config.local.0 == 0 {
            self.vm.guest.forget_known();
        }
        if !self.vm.up {
            return Ok(());
        }
        self.set_sizes();
        self.execute()
    }

    /// Sets the sizes of the cache and of its local tier in the engine.
    fn set_sizes(&mut self) {
        let (cache, local) = (self.vm.config.cache, self.vm.config.local);
        self.fit_index(PageCount(cache.0 + local.0));
        self.vm.engine.resize(self.clock(), cache, local);
    }

    /// Sets the operator's list to the servers whose bits are set.
    fn set_servers(&mut self, bits: u32) -> Outcome {
        let leaving = if self.random.one_in(2) { Leaving::Drained } else { Leaving::AtOnce };
        let listed = std::mem::replace(&mut self.vm.listed, bits);
        if !self.vm.up {
            return Ok(());
        }
        let servers = self.listed_servers();
        self.note(None, || format!("the servers are {servers:?}, others are {leaving:?}"));
        self.vm.engine.set_servers(self.clock(), &servers, leaving);
        for server in (0..self.donors.len()).filter(|server| listed & !bits >> server & 1 == 1) {
            // One that is drained keeps its number, because it may be listed again before its pool is given back.
            if !self.vm.engine.has_server(self.vm.server_number(server)) {
                self.vm.listings[server] += 1;
            }
        }
        self.execute()
    }

    fn listed_servers(&self) -> Vec<ServerNumber> {
        let listed = (0..self.donors.len()).filter(|server| self.vm.listed >> server & 1 == 1);
        listed.map(|server| self.vm.server_number(server)).collect()
    }

    /// Grows the index if the sizes need it, as a driver must do before a resize. Sometimes there is no memory for it. Otherwise lets it
    /// become as small as it can be, whatever that saves.
    fn fit_index(&mut self, cache: PageCount) {
        if let Some(layout) = self.vm.engine.needs_layout(cache, PageCount(self.vm.resident)) {
            if self.plan.scenario.faults.memory && self.random.one_in(3) {
                self.note(None, || "no memory for a larger index".into());
                self.tally.index_refusals += 1;
                return;
            }
            self.note(None, || format!("a larger index: {layout:?}"));
            self.tally.index_growths += 1;
            if !self.knows_all_blocks() {
                self.vm.guest.forget_known();
            }
            self.move_index(layout);
            return;
        }
        let index = self.vm.engine.index();
        let now = index.layout();
        let slots = cache.max(index.least_slots());
        if slots < now.slot_limit() {
            let layout = now.resized(slots, now.resident_limit());
            self.note(None, || format!("a smaller index: {layout:?}"));
            self.tally.index_shrinks += 1;
            self.vm.guest.forget_known();
            self.move_index(layout);
        }
    }

    fn move_index(&mut self, layout: Layout) {
        let (region, fuse) = Region::new(vec![0; layout.words()]);
        let dead = self.vm.is_dead();
        self.vm.engine.replace_index(layout, region);
        if !dead {
            self.vm.fuse = fuse;
        }
    }

    fn store_crash(&mut self, disk: u16) -> Outcome {
        self.note(None, || format!("the store of disk {disk} crashes and comes back"));
        self.tally.store_crashes += 1;
        let model = &mut self.vm.disks[usize::from(disk)];
        model.spoil();
        model.crash(self.event, &mut self.random);
        self.vm.guest.disturb(disk);
        if !self.vm.up {
            return Ok(());
        }
        self.vm.engine.handle_content_uncertain(self.vm.index_of(disk));
        self.execute()
    }

    fn timer(&mut self) -> Outcome {
        if self.vm.up && self.vm.timer_at == Some(self.now) {
            self.vm.timer_at = None;
            self.vm.engine.handle_timer(self.clock());
            self.execute()?;
        }
        Ok(())
    }

    /// Arms the timer to fire at the engine's next deadline, sometimes later. Keeps a timer that is due earlier.
    fn arm_timer(&mut self) {
        let Some(Nanos(deadline)) = self.vm.engine.next_deadline() else { return };
        let deadline = Nanos(deadline.saturating_sub(self.vm.ahead_ns));
        if self.vm.timer_at.is_none_or(|at| deadline < at) {
            let late = if self.random.one_in(8) { self.random.below(2_000_000) } else { 0 };
            let at = deadline.max(self.now).plus_ns(late);
            if self.vm.timer_at.is_none_or(|armed| at < armed) {
                self.vm.timer_at = Some(at);
                self.schedule_at(at, Event::Timer);
            }
        }
    }

    fn schedule_at(&mut self, at: Nanos, event: Event) {
        let seed = self.random.bits();
        self.queue.push(at, seed, (self.vm.number, event));
    }

    fn schedule(&mut self, in_ns: u64, event: Event) {
        self.schedule_at(self.now.plus_ns(in_ns), event);
    }

    /// Adds a line to the trace, if a trace is kept.
    fn note(&mut self, blocks: Option<(u16, Range<usize>)>, text: impl FnOnce() -> String) {
        if let Some(lines) = &mut self.lines {
            lines.push(Line { event: self.event, at: self.now, vm: self.vm.number, blocks, text: text() });
        }
    }

    /// Ends the run with a violation. If only violations visible to the guest count, ignores others.
    fn fail(&mut self, violation: Violation) -> Outcome {
        if self.options.guest_visible_only && !violation.promise.is_visible_to_guest() {
            return Ok(());
        }
        Err(Violation { vm: self.vm.number, ..violation })
    }

    pub(crate) fn event(&self) -> u64 {
        self.event
    }

    pub(crate) fn tally(&self) -> Tally {
        let mut tally = Tally { events: self.event, ..self.tally };
        for vm in std::iter::once(&self.vm).chain(&self.others) {
            tally.stats.add(&vm.engine.stats());
        }
        tally
    }

    pub(crate) fn into_lines(self) -> Vec<Line> {
        self.lines.unwrap_or_default()
    }
}

fn overwritten(disk: u16, sector: usize) -> Violation {
    let text = format!("sector {sector} was written, and now has what a dead process had asked for before");
    Violation::at(Promise::WriteThrough, (disk, sector / BLOCK_SECTORS), text)
}
