//! The plan of one run: every stimulus from outside with its time, as plain data, drawn from the seed before anything
//! runs. Leaving steps out leaves the others as they are; that is how a failing run is cut down.

use crate::content::BLOCK_SECTORS;
use crate::random::Random;
use crate::scenario::Scenario;
use remoca_core::units::Nanos;
use std::ops::Range;

/// What a guest's write puts into a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// Content that is nowhere else.
    Unique,
    /// The same content in all blocks of a class.
    Template(u64),
    Zero,
    /// What the disk holds there already.
    Same,
    /// The header of a swap area with so many more pages.
    SwapHeader(u32),
}

/// What a guest asks of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Read,
    Write { fill: Fill, durable: bool },
    Flush,
    Discard,
    WriteZeroes { may_unmap: bool, durable: bool },
}

/// Which page a guest reports as evicted, besides those that its page cache really pushes out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Eviction {
    /// One of its pages, which it drops.
    Current,
    /// One of its pages, which it keeps.
    Kept,
    /// What one of its pages held some time ago.
    Stale,
    /// A page of somebody else.
    Foreign,
    /// The first half of one page and the second of another.
    Torn,
    Zero,
}

/// One thing that happens to the system from outside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stimulus {
    /// A request on `sectors` of `disk`.
    Guest {
        disk: u16,
        sectors: Range<usize>,
        kind: Kind,
    },
    Evict(Eviction),
    /// The operator sets the size of the cache (0: off).
    Resize(u32),
    /// The operator gives the guest so much memory.
    GuestMemory(u32),
    /// The connection breaks; the client notices after this time.
    Cut(u64),
    /// A server cannot be reached for this time.
    Away(usize, u64),
    /// The server never answers on this connection again, and nothing tells the client.
    Hang,
    /// A server does nothing for this time.
    Stop(usize, u64),
    /// A server starts anew: its pages are gone.
    Restart(usize),
    /// A server is gone for this time, and then starts anew.
    Gone(usize, u64),
    /// So many pages are taken from the pool of a server.
    Take(usize, u32),
    /// A server has so many pages for this VM from now on.
    Memory(usize, u32),
    /// The operator lists other servers: those whose bits are set.
    Servers(u32),
    /// The backing store of this disk crashes and comes back; writes that were not flushed may be lost.
    StoreCrash(u16),
}

/// A stimulus with its time and the seed of what follows from it.
#[derive(Clone, Debug)]
pub struct Step {
    pub at: Nanos,
    pub seed: u64,
    pub stimulus: Stimulus,
}

/// All there is to know about a run before it starts.
#[derive(Clone, Debug)]
pub struct Plan {
    pub scenario: Scenario,
    pub steps: Vec<Step>,
}

impl Plan {
    /// The plan of `seed`.
    #[must_use]
    pub fn draw(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let scenario = Scenario::draw(&mut random);
        let count = random.between(100..=500);
        let mut steps = Vec::new();
        let mut at = Nanos(0);
        for _ in 0..count {
            at = at.plus_ns(pause(&scenario, &mut random));
            let stimulus = stimulus(&scenario, &mut random);
            let follows = aftermath(&scenario, &stimulus, &mut random);
            steps.push(Step { at, seed: random.bits(), stimulus });
            if let Some((in_ns, stimulus)) = follows {
                at = at.plus_ns(in_ns);
                steps.push(Step { at, seed: random.bits(), stimulus });
            }
        }
        Self { scenario, steps }
    }
}

/// Mostly a moment; now and then long enough for every timer to run out.
fn pause(scenario: &Scenario, random: &mut Random) -> u64 {
    match random.below(100) {
        0 => random.between(20_000_000..=15_000_000_000),
        1..=30 => 0,
        _ => random.below(scenario.pace_ns * 2),
    }
}

fn stimulus(scenario: &Scenario, random: &mut Random) -> Stimulus {
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
        30..=45 if faults.operator => Stimulus::Resize(size(scenario, random)),
        46..=48 if faults.operator => Stimulus::GuestMemory(random.count(8..=256)),
        49 if faults.operator && scenario.memory.len() > 1 => Stimulus::Servers(random.count(1..=every(scenario))),
        50..=52 if faults.disk => Stimulus::StoreCrash(disk(scenario, random)),
        53..=199 if scenario.has_port => Stimulus::Evict(eviction(random)),
        _ => guest(scenario, random),
    }
}

/// What is worst while a size changes: the connection breaks before all of it has arrived.
fn aftermath(scenario: &Scenario, stimulus: &Stimulus, random: &mut Random) -> Option<(u64, Stimulus)> {
    let resized = matches!(stimulus, Stimulus::Resize(_));
    (resized && scenario.faults.network && random.one_in(2))
        .then(|| (random.below(scenario.network_ns * 2), Stimulus::Cut(random.below(2_000_000_000))))
}

/// Often less than is in use, so that pages have to move.
fn size(scenario: &Scenario, random: &mut Random) -> u32 {
    match random.below(8) {
        0 => 0,
        1..=2 => scenario.slots,
        3..=5 => random.count(1..=scenario.slots / 2),
        _ => random.count(1..=scenario.slots * 2),
    }
}

fn server(scenario: &Scenario, random: &mut Random) -> usize {
    random.index(scenario.memory.len())
}

/// A bit for every server.
fn every(scenario: &Scenario) -> u32 {
    (1 << scenario.memory.len()) - 1
}

fn disk(scenario: &Scenario, random: &mut Random) -> u16 {
    u16::try_from(random.below(u64::from(scenario.disks))).unwrap_or(0)
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

fn guest(scenario: &Scenario, random: &mut Random) -> Stimulus {
    let kind = match random.below(100) {
        dice if dice < scenario.reads => Kind::Read,
        _ => modification(scenario, random),
    };
    let sectors = if kind == Kind::Flush { 0..0 } else { sectors(scenario.sectors, random) };
    Stimulus::Guest { disk: disk(scenario, random), sectors, kind }
}

fn modification(scenario: &Scenario, random: &mut Random) -> Kind {
    match random.below(10) {
        0 => Kind::Flush,
        1 => Kind::Discard,
        2 => Kind::WriteZeroes { may_unmap: random.one_in(2), durable: random.one_in(4) },
        _ => Kind::Write { fill: fill(scenario, random), durable: random.one_in(4) },
    }
}

fn fill(scenario: &Scenario, random: &mut Random) -> Fill {
    match random.below(8) {
        0 => Fill::Template(random.below(3)),
        1 => Fill::Zero,
        2 => Fill::Same,
        3 if scenario.swap && random.one_in(4) => Fill::SwapHeader(random.count(1..=40)),
        _ => Fill::Unique,
    }
}

/// Mostly single blocks, half of them in the first quarter of the disk; also runs of blocks, and any sectors at all.
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
                    assert!(sectors.end <= plan.scenario.sectors);
                    assert_eq!(sectors.is_empty(), *kind == Kind::Flush);
                }
            }
        }
    }
}
