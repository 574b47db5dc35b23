//! The plan of one run: every stimulus from outside with its time, as plain data, drawn from the seed before anything
//! runs. Omitting steps does not change the others, so a failing run can be reduced.

use crate::content::BLOCK_SECTORS;
use crate::random::Random;
use crate::scenario::{Machine, Scenario};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Range;

/// Content that a guest's write puts into a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fill {
    /// Content that occurs nowhere else.
    Unique,
    /// The same content in all blocks of a class.
    Template(u64),
    Zero,
    /// The current content of the disk there.
    Same,
    /// The header of a swap area with this many more pages.
    SwapHeader(u32),
}

/// A guest's request to a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    Read,
    Write { fill: Fill, durable: bool },
    Flush,
    Discard,
    WriteZeroes { may_unmap: bool, durable: bool },
}

/// A page that a guest reports as evicted, besides those that its page cache actually drops.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Eviction {
    /// One of its pages, which it drops.
    Current,
    /// One of its pages, which it keeps.
    Kept,
    /// A content that one of its pages had some time ago.
    Stale,
    /// A page of another guest.
    Foreign,
    /// The first half of one page and the second of another.
    Torn,
    Zero,
}

/// Moment at which a process dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Point {
    Now,
    /// In the middle of the actions of an event: after this many more.
    Actions(u32),
    /// Between two stores into the words of the index: before the one after this many more.
    Stores(u32),
}

/// Death of a VM process, and its return.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kill {
    pub point: Point,
    /// Time until it is started again.
    pub down_ns: u64,
    /// Whether its state is lost.
    pub cold: bool,
    /// Whether another program writes to an image meanwhile.
    pub changed: bool,
}

/// An event from outside. It concerns one VM if it names no server or host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stimulus {
    /// A request on `sectors` of `disk`.
    Guest {
        disk: u16,
        sectors: Range<usize>,
        kind: Kind,
    },
    Evict(Eviction),
    /// The operator sets the size of the cache (0 turns it off).
    Resize(u32),
    /// The operator sets the guest's memory to this many pages.
    GuestMemory(u32),
    /// The connection breaks; the client notices after this time.
    Cut(u64),
    /// A server cannot be reached for this time.
    Away(usize, u64),
    /// The server never answers on this connection again, and the client is not notified.
    Hang,
    /// A server does not respond for this time.
    Stop(usize, u64),
    /// A server restarts: its pages are gone.
    Restart(usize),
    /// A server is gone for this time, and then restarts.
    Gone(usize, u64),
    /// This many pages are removed from the pool of a server.
    Take(usize, u32),
    /// A server has this many pages for this VM from now on.
    Memory(usize, u32),
    /// The operator lists other servers: those whose bits are set.
    Servers(u32),
    /// The backing store of this disk crashes and comes back; writes that were not flushed may be lost.
    StoreCrash(u16),
    /// This disk is removed and another image comes in its place, as soon as the guest does not use it.
    Replace(u16),
    /// The image of this disk gets this many sectors. If it shrinks, then as soon as the guest does not use it.
    Size(u16, usize),
    /// The VM process is killed, and started again after a while.
    Kill(Kill),
    /// A host fails, with everything that runs on it, and comes back after this time.
    HostFault(usize, u64),
    /// Another program takes over the VM process.
    Upgrade,
    /// The VM migrates to this host; its guest runs at these sides in turn (1: there).
    Migrate(usize, Vec<usize>),
    /// The VM's host is suspended: its clock jumps forward by this time.
    ClockJump(u64),
    /// The agent says that it sends one class of pages from now on, or all. It sends all in truth.
    Classes(bool),
}

/// A stimulus with its time and the seed of its consequences.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Step {
    /// Position in the drawn plan; options and traces refer to the step by it.
    pub number: usize,
    pub at_ns: u64,
    pub vm: usize,
    pub seed: u64,
    pub stimulus: Stimulus,
}

/// Origin of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    Seed(u64),
    File(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Seed(seed) => write!(f, "seed {seed}"),
            Self::File(name) => write!(f, "plan {name}"),
        }
    }
}

/// Everything known about a run before it starts.
#[derive(Clone, Debug)]
pub struct Plan {
    pub origin: Origin,
    pub scenario: Scenario,
    pub steps: Vec<Step>,
}

impl Plan {
    /// Draws the plan of `seed`.
    #[must_use]
    pub fn draw(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let scenario = Scenario::draw(&mut random);
        let count = random.between(100..=500);
        let mut steps = Vec::new();
        let mut at_ns = 0;
        for _ in 0..count {
            at_ns += pause(&scenario, &mut random);
            let vm = random.index(scenario.machines.len());
            let machine = &scenario.machines[vm];
            let stimulus = stimulus(&scenario, machine, &mut random);
            let follows = aftermath(&scenario, machine, &stimulus, &mut random);
            steps.push(Step { number: steps.len(), at_ns, vm, seed: random.bits(), stimulus });
            if let Some((in_ns, stimulus)) = follows {
                at_ns += in_ns;
                steps.push(Step { number: steps.len(), at_ns, vm, seed: random.bits(), stimulus });
            }
        }
        add_disk_changes(seed, &scenario, &mut steps);
        add_class_reports(seed, &scenario, &mut steps);
        Self { origin: Origin::Seed(seed), scenario, steps }
    }

    /// Checks that a plan that was not drawn refers only to existing VMs, disks, servers and hosts.
    ///
    /// # Errors
    /// A text that describes the fault of the plan.
    pub fn check(&self) -> Result<(), String> {
        let scenario = &self.scenario;
        let machines = &scenario.machines;
        let sizes = machines.iter().all(|m| m.sectors > 0 && m.disks > 0 && m.host < scenario.hosts && m.depth < 256);
        if machines.is_empty() || scenario.memory.is_empty() || !sizes || scenario.disk_ns < 4 {
            return Err("the conditions are not complete".into());
        }
        let servers = scenario.memory.len();
        for Step { number, vm, stimulus, .. } in &self.steps {
            let machine = machines.get(*vm).ok_or_else(|| format!("step {number}: there is no vm {vm}"))?;
            let exists = match stimulus {
                Stimulus::Guest { disk, sectors, .. } => *disk < machine.disks && sectors.end <= machine.sectors,
                Stimulus::StoreCrash(disk) | Stimulus::Replace(disk) => *disk < machine.disks,
                Stimulus::Size(disk, sectors) => *disk < machine.disks && (1..=machine.sectors).contains(sectors),
                Stimulus::Away(server, _)
                | Stimulus::Stop(server, _)
                | Stimulus::Restart(server)
                | Stimulus::Gone(server, _)
                | Stimulus::Take(server, _)
                | Stimulus::Memory(server, _) => *server < servers,
                Stimulus::HostFault(host, _) | Stimulus::Migrate(host, _) => *host < scenario.hosts,
                _ => true,
            };
            if !exists {
                return Err(format!("step {number}: {stimulus:?} speaks of what is not there"));
            }
        }
        Ok(())
    }
}

/// Adds steps in which disks come, go, shrink and grow, to the plans of half the seeds. All other steps stay as they are.
fn add_disk_changes(seed: u64, scenario: &Scenario, steps: &mut Vec<Step>) {
    let mut random = Random::new(seed ^ 0x6469_736b_7321);
    let end = steps.last().map_or(0, |step| step.at_ns);
    if random.one_in(2) {
        return;
    }
    for _ in 0..random.between(1..=8) {
        let vm = random.index(scenario.machines.len());
        let machine = &scenario.machines[vm];
        let (disk, mut at_ns) = (disk(machine, &mut random), random.below(end + 1));
        let changes = match random.below(3) {
            0 => vec![Stimulus::Replace(disk)],
            1 => vec![Stimulus::Replace(disk), Stimulus::Replace(disk)],
            _ => vec![
                Stimulus::Size(disk, random.index(machine.sectors) + 1),
                Stimulus::Size(disk, machine.sectors - random.index(machine.sectors.div_ceil(4))),
                Stimulus::Size(disk, machine.sectors),
            ],
        };
        for stimulus in changes {
            steps.push(Step { number: steps.len(), at_ns, vm, seed: random.bits(), stimulus });
            if scenario.faults.process && random.one_in(2) {
                let stimulus = Stimulus::Kill(Kill { cold: false, changed: false, ..kill(&mut random) });
                steps.push(Step { number: steps.len(), at_ns, vm, seed: random.bits(), stimulus });
            }
            at_ns += random.below(scenario.disk_ns * 4);
        }
    }
}

/// Adds reports of agents that lie about the pages that they send, to the plans of an eighth of the seeds. All other steps stay as they are.
fn add_class_reports(seed: u64, scenario: &Scenario, steps: &mut Vec<Step>) {
    let mut random = Random::new(seed ^ 0x636c_6173_7365);
    let end = steps.iter().map(|step| step.at_ns).max().unwrap_or(0);
    if !random.one_in(8) {
        return;
    }
    for _ in 0..random.between(1..=8) {
        let (vm, at_ns) = (random.index(scenario.machines.len()), random.below(end + 1));
        let stimulus = Stimulus::Classes(!random.one_in(3));
        if scenario.machines[vm].agent {
            steps.push(Step { number: steps.len(), at_ns, vm, seed: random.bits(), stimulus });
        }
    }
}

/// Draws a pause: mostly short, sometimes long enough for every timer to expire.
fn pause(scenario: &Scenario, random: &mut Random) -> u64 {
    match random.below(100) {
        0 => random.between(20_000_000..=15_000_000_000),
        1..=30 => 0,
        _ => random.below(scenario.pace_ns * 2),
    }
}

fn stimulus(scenario: &Scenario, machine: &Machine, random: &mut Random) -> Stimulus {
    let faults = scenario.faults;
    match random.below(1000) {
        0..=4 if faults.network => Stimulus::Cut(random.below(2_000_000_000)),
        5..=9 if faults.network => Stimulus::Away(server(scenario, random), random.below(1_000_000_000)),
        10..=11 if faults.server => Stimulus::Hang,
        12..=13 if faults.server => {
            Stimulus::Stop(server(scenario, random), random.between(1_000_000..=14_000_000_000))
        }
        14..=16 if faults.server => Stimulus::Restart(server(scenario, random)),
        17..=18 if faults.server => Stimulus::Gone(server(scenario, random), random.below(8_000_000_000)),
        19..=24 if faults.memory => Stimulus::Take(server(scenario, random), random.count(1..=6)),
        25..=29 if faults.memory => Stimulus::Memory(server(scenario, random), random.count(0..=48)),
        30..=45 if faults.operator => Stimulus::Resize(size(machine, random)),
        46..=48 if faults.operator => Stimulus::GuestMemory(random.count(8..=256)),
        49 if faults.operator && scenario.memory.len() > 1 => Stimulus::Servers(random.count(1..=every(scenario))),
        50..=52 if faults.disk && machine.remote_store => Stimulus::StoreCrash(disk(machine, random)),
        53..=60 if faults.process => Stimulus::Kill(kill(random)),
        61 if faults.process => Stimulus::HostFault(random.index(scenario.hosts), down(random)),
        62 if faults.process => Stimulus::ClockJump(random.between(1_000_000..=100_000_000_000)),
        63 if faults.process => Stimulus::Upgrade,
        64..=68 if faults.process => Stimulus::Migrate(random.index(scenario.hosts), hops(random)),
        69..=199 if machine.has_port => Stimulus::Evict(eviction(random)),
        _ => guest(machine, random),
    }
}

/// Returns the worst event after a step, or `None`. After a change of size, the connection breaks before all of it has
/// arrived. After the death of a process, its store comes back from a crash.
fn aftermath(
    scenario: &Scenario,
    machine: &Machine,
    stimulus: &Stimulus,
    random: &mut Random,
) -> Option<(u64, Stimulus)> {
    let faults = scenario.faults;
    match stimulus {
        Stimulus::Resize(_) if faults.network && random.one_in(2) => {
            Some((random.below(scenario.network_ns * 2), Stimulus::Cut(random.below(2_000_000_000))))
        }
        Stimulus::Kill(kill) if faults.disk && machine.remote_store && kill.down_ns > 0 && random.one_in(2) => {
            Some((random.below(kill.down_ns.min(1_000_000_000)), Stimulus::StoreCrash(disk(machine, random))))
        }
        _ => None,
    }
}

/// Draws a size, often smaller than the pages in use, so that pages must move.
fn size(machine: &Machine, random: &mut Random) -> u32 {
    match random.below(8) {
        0 => 0,
        1..=2 => machine.slots,
        3..=5 => random.count(1..=machine.slots / 2),
        _ => random.count(1..=machine.slots * 2),
    }
}

fn server(scenario: &Scenario, random: &mut Random) -> usize {
    random.index(scenario.memory.len())
}

/// Returns a number with the bit of every server set.
fn every(scenario: &Scenario) -> u32 {
    (1 << scenario.memory.len()) - 1
}

fn disk(machine: &Machine, random: &mut Random) -> u16 {
    u16::try_from(random.below(u64::from(machine.disks))).unwrap_or(0)
}

fn eviction(random: &mut Random) -> Eviction {
    *random.pick(&[
        Eviction::Current,
        Eviction::Current,
        Eviction::Kept,
        Eviction::Stale,
        Eviction::Stale,
        Eviction::Stale,
        Eviction::Foreign,
        Eviction::Torn,
        Eviction::Zero,
    ])
}

/// Draws a downtime, often short, sometimes so long that servers free the pool.
fn down(random: &mut Random) -> u64 {
    match random.below(6) {
        0..=2 => 0,
        3..=4 => random.below(1_000_000_000),
        _ => random.below(80_000_000_000),
    }
}

fn kill(random: &mut Random) -> Kill {
    let point = match random.below(3) {
        0 => Point::Now,
        1 => Point::Actions(random.count(0..=12)),
        _ => Point::Stores(random.count(0..=200)),
    };
    Kill { point, down_ns: down(random), cold: random.one_in(6), changed: random.one_in(6) }
}

/// Draws a migration: to the host; or not there after all; or there and back.
fn hops(random: &mut Random) -> Vec<usize> {
    (0..random.between(1..=3)).map(|_| random.index(3).min(1)).collect()
}

fn guest(machine: &Machine, random: &mut Random) -> Stimulus {
    let kind = match random.below(100) {
        dice if dice < machine.reads => Kind::Read,
        _ => modification(machine, random),
    };
    let sectors = match kind {
        Kind::Flush => 0..0,
        Kind::Read if machine.working_set > 0 && !random.one_in(8) => {
            let first = random.index(machine.working_set) * BLOCK_SECTORS;
            first..first + BLOCK_SECTORS
        }
        _ => sectors(machine.sectors, random),
    };
    Stimulus::Guest { disk: disk(machine, random), sectors, kind }
}

fn modification(machine: &Machine, random: &mut Random) -> Kind {
    match random.below(10) {
        0 => Kind::Flush,
        1 => Kind::Discard,
        2 => Kind::WriteZeroes { may_unmap: random.one_in(2), durable: random.one_in(4) },
        _ => Kind::Write { fill: fill(machine, random), durable: random.one_in(4) },
    }
}

fn fill(machine: &Machine, random: &mut Random) -> Fill {
    match random.below(8) {
        0 => Fill::Template(random.below(3)),
        1 => Fill::Zero,
        2 => Fill::Same,
        3 if machine.swap && random.one_in(4) => Fill::SwapHeader(random.count(1..=40)),
        _ => Fill::Unique,
    }
}

/// Draws sectors: mostly single blocks, half of them in the first quarter of the disk; also runs of blocks, and
/// arbitrary sectors.
fn sectors(total: usize, random: &mut Random) -> Range<usize> {
    let blocks = total / BLOCK_SECTORS;
    let reach = if random.one_in(2) { blocks.div_ceil(4) } else { blocks };
    let first = random.index(reach.max(1));
    let range = match random.below(20) {
        0..=13 => first * BLOCK_SECTORS..(first + 1) * BLOCK_SECTORS,
        14..=15 => first * BLOCK_SECTORS..(first + 1 + random.index(8)) * BLOCK_SECTORS,
        16 => first * BLOCK_SECTORS..total,
        _ => {
            let from = first * BLOCK_SECTORS + random.index(BLOCK_SECTORS);
            from..from + 1 + random.index(3 * BLOCK_SECTORS)
        }
    };
    range.start.min(total - 1)..range.end.min(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_is_a_plan() {
        let text = |seed| format!("{:?}", Plan::draw(seed));
        assert_eq!(text(3), text(3));
        assert_ne!(text(3), text(4));
    }

    #[test]
    fn ranges_lie_inside_the_disk() {
        for seed in 0..200 {
            let plan = Plan::draw(seed);
            for step in &plan.steps {
                if let Stimulus::Guest { sectors, kind, .. } = &step.stimulus {
                    assert!(sectors.end <= plan.scenario.machines[step.vm].sectors);
                    assert_eq!(sectors.is_empty(), *kind == Kind::Flush);
                }
            }
        }
    }
}
