//! The world of one run, and the events that move it.

use super::agent::Agent;
use super::disks::DiskSide;
use super::moving::{ModelPeers, Move, PeerLine};
use super::network::Greeting;
use super::plan::{DriverPlan, Fate, Stimulus};
use super::process::Process;
use super::servers::{Attempt, Connection, ConnectionId, Donor, ModelNetwork};
use super::time::VirtualClock;
use super::{DriverOptions, DriverTally, Flaw};
use crate::content::Block;
use crate::disk::IoId;
use crate::queue::Queue;
use crate::random::Random;
use crate::violation::{Promise, Violation};
use remoca_core::units::{Nanos, PageCount};
use remoca_disk::driver::{Ended, Source};
use remoca_disk::handover::{Successor, Verdict};
use remoca_disk::link::{KeptPool, PoolMemory};
use remoca_disk::testing::FarEnd;
use remoca_protocol::handover::{PassedPool, PassedStore, StoreKind};
use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex, PoisonError};
use tempfile::TempDir;

/// Virtual time after the last step in which everything must come to rest.
const SETTLING_NS: u64 = 30_000_000_000;
/// Virtual time that an upgrade may then take.
const UPGRADE_NS: u64 = 20_000_000_000;
const EVENTS_MAX: u64 = 100_000;
/// Maximum number of the driver's turns in one event.
const TURNS_MAX: u64 = 20_000;
const MS: u64 = 1_000_000;

/// Work of another thread for the driver, done in one step.
pub(super) type Job = Box<dyn FnOnce() + Send>;

pub(super) type Outcome = Result<(), Violation>;

/// An event at its time.
pub(super) enum Event {
    Step(usize),
    Portion {
        disk: usize,
        io: IoId,
        portion: u8,
    },
    IoDone {
        disk: usize,
        io: IoId,
    },
    /// A HELLO reaches its server.
    Hello(Attempt),
    /// Its answer reaches the client.
    Welcomed(Attempt, Option<Greeting>),
    ToServer(ConnectionId, Vec<u8>),
    ToClient(ConnectionId, Vec<u8>),
    /// A guest reconnects to its disk.
    GuestBack(usize),
    /// An NBD client continues to send.
    Push(usize),
    /// The process is started.
    Start,
    /// The new program answers the check.
    Verdict(Verdict, Fate),
    /// Work outside the I/O thread of this process is done.
    Aside(u64, Job),
    /// A store of this process has looked at its image.
    Looked(u64, usize),
    /// A store of this process has measured its image.
    Measured(u64, usize),
    /// A page has come through the agent.
    Evicted(Block),
    /// The guest stops for this move, runs again, and the process left behind ends.
    GuestStops(u64),
    GuestSettles(u64),
    GuestRuns(u64),
    OtherEnds(u64),
    LineCut(u64),
    /// A connection between processes arrives, ...
    PeerArrives(Box<FarEnd>),
    /// ... and messages over it.
    ToPeer(usize, usize, Vec<u8>),
    PeerEnds(usize, usize),
    /// The driver's timeout.
    Wake,
    Heal,
    /// Everything has come to rest: it can be checked, and upgraded.
    Rest,
    End,
}

pub(super) struct World<'a> {
    pub(super) plan: &'a DriverPlan,
    pub(super) options: &'a DriverOptions,
    pub(super) now: u64,
    pub(super) event: u64,
    queue: Queue<Event>,
    /// Random numbers for the present event.
    pub(super) random: Random,
    pub(super) clock: VirtualClock,
    pub(super) directory: TempDir,
    pub(super) listener: UnixListener,
    pub(super) disks: Vec<DiskSide>,
    pub(super) agent: Option<Agent>,
    pub(super) network: ModelNetwork,
    /// Memory servers, that of the local tier last.
    pub(super) donors: Vec<Donor>,
    pub(super) connections: Vec<Connection>,
    /// Servers of the operator's list.
    pub(super) listed: Vec<usize>,
    /// Process that the guests are attached to.
    pub(super) process: Option<Process>,
    /// Process that the guests move to, or come from.
    pub(super) other: Option<Process>,
    pub(super) moving: Option<Move>,
    pub(super) moves: u64,
    /// Number of times that the end of a move was postponed.
    pub(super) waits: u64,
    pub(super) peers: ModelPeers,
    pub(super) lines: Vec<PeerLine>,
    /// Number of processes that have ended.
    pub(super) lives: u64,
    /// Checks that have begun and have no verdict yet.
    pub(super) verdicts: Arc<Mutex<Vec<Verdict>>>,
    /// Work to do outside the I/O thread.
    pub(super) jobs: Arc<Mutex<Vec<Job>>>,
    /// Pools of the local tier that a program passes to the next one.
    pub(super) kept_pools: Vec<(String, KeptPool)>,
    /// Outcome of the upgrade in progress.
    fate: Option<Fate>,
    /// Whether faults have ended.
    pub(super) healed: bool,
    /// Whether the last upgrade is done; `None` before it begins.
    last_upgrade: Option<bool>,
    wake_at: Option<u64>,
    pub(super) tally: DriverTally,
}

impl<'a> World<'a> {
    pub(super) fn new(plan: &'a DriverPlan, options: &'a DriverOptions) -> Self {
        let directory = tempfile::tempdir().expect("there is a directory for temporary files");
        let listener = UnixListener::bind(directory.path().join("vhost")).expect("a socket can be made there");
        let disks = &plan.conditions.disks;
        let mut world = Self {
            plan,
            options,
            now: 0,
            event: 0,
            queue: Queue::default(),
            random: Random::new(1),
            clock: VirtualClock::new(),
            directory,
            listener,
            disks: disks.iter().enumerate().map(|(number, disk)| DiskSide::new(number, 0, disk)).collect(),
            agent: plan.conditions.has_port.then(Agent::new),
            network: ModelNetwork::default(),
            donors: (0..plan.conditions.servers).map(|_| Donor::default()).chain([Donor::local()]).collect(),
            connections: Vec::new(),
            listed: (0..plan.conditions.servers).collect(),
            process: None,
            other: None,
            moving: None,
            moves: 0,
            waits: 0,
            peers: ModelPeers::default(),
            lines: Vec::new(),
            lives: 0,
            verdicts: Arc::default(),
            jobs: Arc::default(),
            kept_pools: Vec::new(),
            fate: None,
            healed: false,
            last_upgrade: None,
            wake_at: None,
            tally: DriverTally::default(),
        };
        world.schedule(0, Event::Start);
        let mut end = 0;
        let steps = options.steps.unwrap_or(usize::MAX);
        for (number, step) in plan.steps.iter().enumerate().take(steps) {
            end = step.at_ns;
            world.queue.push(Nanos(end), step.seed, Event::Step(number));
        }
        world.queue.push(Nanos(end + 1), 3, Event::Heal);
        world
    }

    pub(super) fn event(&self) -> u64 {
        self.event
    }

    pub(super) fn tally(&self) -> DriverTally {
        DriverTally { events: self.event, ..self.tally }
    }

    pub(super) fn has(&self, flaw: Flaw) -> bool {
        self.options.flaw == Some(flaw)
    }

    pub(super) fn note(&self, text: impl FnOnce() -> String) {
        if self.options.tell {
            println!("{:>6} {:>10}.{:03} us  {}", self.event, self.now / 1000, self.now % 1000, text());
        }
    }

    pub(super) fn schedule(&mut self, in_ns: u64, event: Event) {
        let seed = self.random.bits();
        self.queue.push(Nanos(self.now + in_ns), seed, event);
    }

    /// Runs to the end, or to the first violation.
    pub(super) fn run(&mut self) -> Outcome {
        while let Some(next) = self.queue.pop() {
            self.now = self.now.max(next.at.0);
            self.clock.set(self.now);
            self.event += 1;
            self.random = Random::new(next.seed);
            if matches!(next.event, Event::End) {
                return self.check_end(self.last_upgrade);
            }
            if matches!(next.event, Event::Wake) && self.wake_at.take_if(|at| *at == self.now).is_none() {
                continue;
            }
            let first = self.handle(next.event)?;
            self.drive(first)?;
            if self.event > EVENTS_MAX {
                return Err(Violation::new(Promise::Bounded, "the world does not come to rest"));
            }
        }
        Ok(())
    }

    /// Handles an event. Returns the source that must be handled before anything else, or `None` if there is no such
    /// source.
    fn handle(&mut self, event: Event) -> Result<Option<Source>, Violation> {
        match event {
            Event::Step(number) => return self.step(number),
            Event::Portion { disk, io, portion } => self.advance(disk, io, portion)?,
            Event::IoDone { disk, io } => self.io_done(disk, io),
            Event::Hello(attempt) => self.hello(attempt),
            Event::Welcomed(attempt, welcome) => self.welcomed(attempt, welcome),
            Event::ToServer(connection, bytes) => self.arrive(connection, &bytes)?,
            Event::ToClient(connection, bytes) => self.connections[connection].deliver(&bytes),
            Event::GuestBack(disk) => self.guest_back(disk),
            Event::Push(disk) => self.push(disk),
            Event::Start => self.start(None),
            Event::Verdict(verdict, fate) => {
                let refused = fate == Fate::Refused;
                verdict.give(if refused {
                    Err("it does not like it".into())
                } else {
                    Ok(Successor { version: "next".into(), offers: Some(self.offers()) })
                });
            }
            // Threads end with their process.
            Event::Aside(life, job) if life == self.lives => job(),
            Event::Aside(..) => {}
            Event::Looked(life, disk) if life == self.lives => self.disks[disk].store.tell_change(),
            Event::Measured(life, disk) if life == self.lives => {
                self.disks[disk].store.tell(remoca_store::StoreEvent::Measured(Ok(())));
            }
            Event::Looked(..) | Event::Measured(..) => {}
            Event::Evicted(page) => self.evicted(page),
            Event::GuestStops(number) => self.guest_stops(number),
            Event::GuestSettles(number) => self.guest_settles(number),
            Event::GuestRuns(number) => self.guest_runs(number),
            Event::OtherEnds(number) => self.other_ends(number),
            Event::LineCut(number) => self.line_cut(number),
            Event::PeerArrives(far) => self.peer_arrives(*far),
            Event::ToPeer(line, side, frames) => self.reach_peer(line, side, &frames),
            Event::PeerEnds(line, side) => self.peer_ends(line, side),
            Event::Wake | Event::End => {}
            Event::Heal => {
                self.note(|| "nothing goes wrong any more".into());
                self.healed = true;
                self.schedule(SETTLING_NS, Event::Rest);
            }
            Event::Rest => {
                self.check_rest()?;
                self.last_upgrade = Some(false);
                self.upgrade(Fate::TakesOver);
                self.schedule(UPGRADE_NS, Event::End);
            }
        }
        Ok(None)
    }

    fn step(&mut self, number: usize) -> Result<Option<Source>, Violation> {
        let plan = self.plan;
        match &plan.steps[number].stimulus {
            Stimulus::Ask(disk, ask) => self.ask(number, *disk, ask),
            Stimulus::WriteCache(disk, is_on) => self.switch_cache(*disk, *is_on),
            Stimulus::GuestGone(disk, ns) => self.guest_gone(*disk, *ns),
            Stimulus::Cut => self.cut(),
            Stimulus::ServerRestart(server) => {
                self.note(|| format!("server {server} starts anew"));
                self.donors[*server].restart();
                let of_server = self.connections.iter_mut().filter(|connection| connection.server == *server);
                of_server.for_each(Connection::cut);
            }
            Stimulus::PagesLost(server, count) => self.donors[*server].lose(*count, &mut self.random),
            Stimulus::StoreCrash(disk) => return Ok(self.store_crash(*disk)),
            Stimulus::SetCache(pages) => self.resize(*pages),
            Stimulus::Enable(is_on) => self.enable(*is_on),
            Stimulus::Servers(servers) => self.list_servers(servers),
            Stimulus::Evict(eviction) => self.evict(*eviction),
            Stimulus::Identify => self.identify(),
            Stimulus::Status => self.command(remoca_protocol::control::Command::Status),
            Stimulus::Kill(ns) => {
                if self.process.is_some() {
                    self.tally.kills += 1;
                    self.die(self.plan.conditions.is_named)?;
                    self.schedule(*ns, Event::Start);
                }
            }
            Stimulus::PowerFailure => self.power_failure()?,
            Stimulus::Upgrade(fate) => self.upgrade(*fate),
            Stimulus::Move(way) => self.begin_move(*way),
            Stimulus::Remove(disk) => self.remove_disk(*disk)?,
            Stimulus::Add(disk) => self.add_disk(*disk),
            Stimulus::Resize(disk, sectors) => self.resize_image(*disk, *sectors),
            Stimulus::Local(change) => self.change_local(*change),
        }
        Ok(None)
    }

    pub(super) fn upgrade(&mut self, fate: Fate) {
        if self.process.is_some() {
            self.note(|| format!("an upgrade is asked for: {fate:?}"));
            self.fate = Some(fate);
            self.command(remoca_protocol::control::Command::Upgrade { program: Some("/next".into()) });
        }
    }

    /// Runs the driver until it has no work at this time.
    fn drive(&mut self, mut first: Option<Source>) -> Outcome {
        for _ in 0..TURNS_MAX {
            let other_rests = self.drive_other()?;
            let Some(process) = &mut self.process else { return self.collect() };
            let mut ready = Vec::new();
            process.driver.look(&mut ready).expect("the system says what is ready");
            match first.take() {
                Some(first) => ready.retain(|(source, _)| *source == first),
                None => disorder(&mut ready, &mut self.random),
            }
            self.tally.turns += 1;
            let ended = process.driver.turn(&ready);
            self.collect()?;
            if let Some(ended) = ended {
                self.ended(ended)?;
                continue;
            }
            let Some(process) = &mut self.process else { continue };
            let timeout = process.driver.timeout();
            ready.clear();
            process.driver.look(&mut ready).expect("the system says what is ready");
            if ready.is_empty() && !timeout.is_some_and(|timeout| timeout.is_zero()) && other_rests {
                if let Some(timeout) = timeout {
                    let in_ns = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
                    self.wake_in(in_ns);
                }
                return Ok(());
            }
        }
        Err(Violation::new(Promise::Bounded, "the driver does not come to rest"))
    }

    /// Runs the other process. Returns whether it had no work.
    fn drive_other(&mut self) -> Result<bool, Violation> {
        let Some(mut other) = self.other.take() else { return Ok(true) };
        let mut ready = Vec::new();
        other.driver.look(&mut ready).expect("the system says what is ready");
        let is_due = other.driver.timeout().is_some_and(|timeout| timeout.is_zero());
        if ready.is_empty() && !is_due {
            if let Some(timeout) = other.driver.timeout() {
                self.wake_in(u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX));
            }
            self.other = Some(other);
            return Ok(true);
        }
        disorder(&mut ready, &mut self.random);
        let ended = other.driver.turn(&ready);
        for front in &mut other.fronts {
            front.pump();
        }
        // The guest left while an upgrade was under way. Nothing is to be seen here of a process that has no guest any more.
        if let Some(Ended::HandOver(_)) = ended {
            other.driver.refuse_upgrade("its guest has left");
        }
        self.other = Some(other);
        self.collect()?;
        match ended {
            None | Some(Ended::HandOver(_)) => Ok(false),
            Some(_) => Err(Violation::new(Promise::NothingLeft, "the other process ends by itself")),
        }
    }

    /// Arms the timer to fire after `in_ns`, sometimes later. Keeps a timer that is due earlier.
    fn wake_in(&mut self, in_ns: u64) {
        let late = if self.random.one_in(8) { self.random.below(2 * MS) } else { 0 };
        let at = self.now.saturating_add(in_ns).saturating_add(late);
        if self.wake_at.is_none_or(|armed| at < armed) {
            self.wake_at = Some(at);
            self.schedule(at - self.now, Event::Wake);
        }
    }

    /// Passes the driver's messages on to the world.
    fn collect(&mut self) -> Outcome {
        for disk in 0..self.disks.len() {
            self.begin_ios(disk)?;
        }
        let attempts = std::mem::take(&mut self.network.lock().attempts);
        for attempt in attempts {
            let in_ns = self.latency();
            self.schedule(in_ns, Event::Hello(attempt));
        }
        for connection in 0..self.connections.len() {
            self.take_sent(connection);
        }
        let verdicts = std::mem::take(&mut *self.verdicts.lock().unwrap_or_else(PoisonError::into_inner));
        for verdict in verdicts {
            let in_ns = self.random.below(50 * MS);
            let fate = self.fate.unwrap_or(Fate::TakesOver);
            self.schedule(in_ns, Event::Verdict(verdict, fate));
        }
        let jobs = std::mem::take(&mut *self.jobs.lock().unwrap_or_else(PoisonError::into_inner));
        for job in jobs {
            let in_ns = self.random.below(20 * MS);
            self.schedule(in_ns, Event::Aside(self.lives, job));
        }
        for disk in 0..self.disks.len() {
            self.hear(disk)?;
        }
        self.collect_peers()?;
        self.check_local()?;
        self.hear_port()
    }

    fn ended(&mut self, ended: Ended) -> Outcome {
        let Ended::HandOver(handover) = ended else {
            return Err(Violation::new(Promise::NothingLeft, "the process ends by itself"));
        };
        if self.fate == Some(Fate::CannotStart)
            && let Some(process) = &mut self.process
        {
            self.tally.upgrades_refused += 1;
            process.driver.refuse_upgrade("there is no such program");
            return Ok(());
        }
        self.note(|| "the next program takes over".into());
        self.tally.upgrades += 1;
        self.last_upgrade = self.last_upgrade.map(|_| true);
        let failed = |store: &PassedStore| match store.kind {
            StoreKind::File { flush_failed } => flush_failed,
            StoreKind::Nbd(_) => unreachable!("the model passes itself on as a file"),
        };
        let mut failures = vec![None; self.disks.len()];
        let present = self.disks.iter().filter(|disk| disk.position.is_some());
        for (disk, passed) in present.zip(&handover.description.disks) {
            failures[disk.number] = failed(&passed.store);
        }
        let adopt = |pool: &PassedPool| {
            let memory = PoolMemory::adopt(handover.copy_of(pool.memory)?).ok()?;
            Some((pool.server.clone(), KeptPool::new(memory, pool.generation, PageCount(pool.granted_pages))))
        };
        self.kept_pools = handover.description.pools.iter().filter_map(adopt).collect();
        self.die(true)?;
        drop(handover);
        self.start(Some(&failures));
        self.kept_pools.clear();
        Ok(())
    }
}

/// Shuffles the ready events, and sometimes leaves some for a later turn.
fn disorder(ready: &mut Vec<(Source, bool)>, random: &mut Random) {
    for at in (1..ready.len()).rev() {
        ready.swap(at, random.index(at + 1));
    }
    if ready.len() > 1 && random.one_in(3) {
        ready.truncate(random.index(ready.len() - 1) + 1);
    }
}
