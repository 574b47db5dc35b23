//! The conditions and stimuli of one run of the driver, drawn from the seed before anything runs.

use super::local::Change;
use crate::content::BLOCK_SECTORS;
use crate::plan::Fill;
use crate::random::Random;
use std::ops::Range;

/// Blocks of a disk with long requests, ...
const LONG_BLOCKS: usize = 1400;
/// ... and the sectors of the shortest of these: more than a piece.
const LONG_SECTORS: usize = 3000;

/// Faults that may happen in a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Faults {
    /// Disks fail I/O, and those served by another process come back from crashes.
    pub(super) disk: bool,
    /// Connections to memory servers are lost; servers restart and lose pages.
    pub(super) server: bool,
    /// Servers return pages that were not sent to them.
    pub(super) lies: bool,
    /// Guests disconnect with requests in flight.
    pub(super) guest: bool,
    /// The process is killed and upgraded, and its host loses power.
    pub(super) process: bool,
    /// The operator changes the cache.
    pub(super) operator: bool,
}

/// One disk, and how its guest is attached.
#[derive(Clone, Debug)]
pub(super) struct DiskPlan {
    pub(super) nbd: bool,
    pub(super) sectors: usize,
    /// Whether its store has sectors of 4 KiB.
    pub(super) is_coarse: bool,
    /// Whether some requests have several pieces of the frontend, and more than a buffer holds.
    pub(super) is_long: bool,
    /// Whether its store is a server that may crash and come back.
    pub(super) remote: bool,
    pub(super) swap: bool,
    /// Whether the guest passes zeroed pages to the device to read into.
    pub(super) zeroes_pages: bool,
    pub(super) has_record: bool,
    pub(super) segments: usize,
    /// Number of queues of a vhost-user device.
    pub(super) queues: u16,
    /// Mean time of an I/O.
    pub(super) ns: u64,
    /// Number of blocks at the start of the disk that most requests are for; 0 if all blocks are alike.
    pub(super) working_set: usize,
    /// Number of blocks that its guest keeps in memory.
    pub(super) pages: usize,
    /// Maximum number of requests in flight.
    pub(super) depth: usize,
    /// Longest request, in sectors.
    pub(super) longest: usize,
    /// Whether its image may change its size. No guest of an NBD client follows.
    pub(super) may_resize: bool,
}

/// The conditions of one run.
#[derive(Clone, Debug)]
pub(super) struct Conditions {
    pub(super) faults: Faults,
    /// Whether the working set fits the cache, and the network is quick.
    pub(super) is_cosy: bool,
    /// Whether the VM has an eviction port, and an agent that uses it.
    pub(super) has_port: bool,
    pub(super) key: [u8; 16],
    pub(super) disks: Vec<DiskPlan>,
    pub(super) servers: usize,
    pub(super) slots: u32,
    /// Size of the local tier at the start of a process; `None` if there is none.
    pub(super) local: Option<u32>,
    pub(super) resident: u32,
    pub(super) frame_sample: u32,
    pub(super) send_window: u32,
    pub(super) fetch_limit: u32,
    pub(super) hedge: bool,
    /// Bytes of one piece of a long request.
    pub(super) piece_bytes: u32,
    /// Bytes of all buffers of the driver.
    pub(super) buffer_bytes: usize,
    /// Whether the process has a name, so that its state outlives it.
    pub(super) is_named: bool,
    pub(super) reads: u64,
    pub(super) disk_ns: u64,
    pub(super) network_ns: u64,
    /// Late pages are one in this many; 0 if none are late.
    pub(super) slow_replies: u64,
    pub(super) pace_ns: u64,
}

/// A guest's request to a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Ask {
    Read(Range<usize>),
    Write { range: Range<usize>, fill: Fill, durable: bool },
    Flush,
    Discard(Vec<Range<usize>>),
    WriteZeroes { ranges: Vec<Range<usize>>, unmap: bool, durable: bool },
}

/// An event from outside.
#[derive(Clone, Debug)]
pub(super) enum Stimulus {
    Ask(usize, Ask),
    /// The guest switches the write cache of a disk.
    WriteCache(usize, bool),
    /// The guest of a disk disconnects, and another one connects after this time.
    GuestGone(usize, u64),
    /// The session is lost.
    Cut,
    /// A server restarts.
    ServerRestart(usize),
    /// A server loses some pages.
    PagesLost(usize, u32),
    /// The store of a disk comes back from a crash.
    StoreCrash(usize),
    /// The operator sets the size of the cache; 0 turns it off.
    SetCache(u32),
    /// The operator switches the cache off or on.
    Enable(bool),
    /// The operator lists these servers.
    Servers(Vec<usize>),
    /// The agent reports a page.
    Evict(Eviction),
    /// The agent looks at the port's identification.
    Identify,
    Status,
    /// The process is killed, and started again after this time.
    Kill(u64),
    /// The host loses power.
    PowerFailure,
    /// Another program takes over.
    Upgrade(Fate),
    /// The VM moves to another host.
    Move(Way),
    /// The operator removes a disk, with its guest. Its image may be another one when it comes back.
    Remove(usize),
    /// The operator adds the disk again.
    Add(usize),
    /// The image of a disk gets this size, in sectors.
    Resize(usize, usize),
    /// Something happens to the local tier.
    Local(Change),
}

/// Outcome of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// The guest continues there, ...
    Goes,
    /// ... or here.
    ComesBack,
    /// The connection is cut meanwhile, and the guest continues here or there.
    Cut,
    /// The other process dies.
    OtherDies,
}

/// A page that the agent reports, besides those that its guest drops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Eviction {
    /// A page that the guest still has.
    Kept,
    /// A page that was dropped, or overwritten, some time ago.
    Past,
    /// Content that no disk ever held.
    Foreign,
    /// Half of one page and half of another.
    Torn,
    Zero,
}

/// Outcome of an upgrade.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    TakesOver,
    /// The other program refuses.
    Refused,
    /// It cannot be started after all.
    CannotStart,
}

/// A stimulus with its time and the seed of its consequences.
#[derive(Clone, Debug)]
pub(super) struct Step {
    pub(super) at_ns: u64,
    pub(super) seed: u64,
    pub(super) stimulus: Stimulus,
}

/// Everything known about a run before it starts.
#[derive(Clone, Debug)]
pub(super) struct DriverPlan {
    pub(super) conditions: Conditions,
    pub(super) steps: Vec<Step>,
}

impl DriverPlan {
    pub(super) fn draw(seed: u64) -> Self {
        let mut random = Random::new(seed ^ 0x6472_6976_6572);
        let mut conditions = Conditions::draw(&mut random);
        // Drawn separately, so that runs without a move stay the same.
        let mut moves = Random::new(seed ^ 0x6d6f_7665);
        let is_moved = moves.one_in(6) && !conditions.disks.iter().any(|disk| disk.is_long);
        if is_moved {
            conditions.make_movable();
        }
        let mut changes = Random::new(seed ^ 0x0064_6973_6b73);
        let is_changed = !is_moved && changes.one_in(4);
        if is_changed {
            conditions.make_changeable(&mut changes);
        }
        let mut locals = Random::new(seed ^ 0x006c_6f63_616c);
        if !is_moved && locals.one_in(3) {
            conditions.local = Some(locals.count(2..=40));
        }
        let count = random.between(60..=260);
        let mut at_ns = 0;
        let mut steps = Vec::new();
        for _ in 0..count {
            at_ns += match random.below(100) {
                0 => random.between(20_000_000..=8_000_000_000),
                1..=40 => 0,
                _ => random.below(conditions.pace_ns * 2),
            };
            let stimulus = conditions.stimulus(&mut random);
            steps.push(Step { at_ns, seed: random.bits(), stimulus });
        }
        for _ in 0..if is_moved { moves.between(1..=3) } else { 0 } {
            let at = moves.index(steps.len());
            steps[at].stimulus = Stimulus::Move(*moves.pick(&[
                Way::Goes,
                Way::Goes,
                Way::Goes,
                Way::ComesBack,
                Way::Cut,
                Way::OtherDies,
            ]));
        }
        for _ in 0..if is_changed { changes.between(3..=9) } else { 0 } {
            let at = changes.index(steps.len());
            steps[at].stimulus = conditions.change(&mut changes);
        }
        let changes = if conditions.local.is_some() { conditions.local_changes(&mut locals) } else { Vec::new() };
        for change in changes {
            let at = locals.index(steps.len());
            steps[at].stimulus = Stimulus::Local(change);
        }
        Self { conditions, steps }
    }
}

impl Conditions {
    fn draw(random: &mut Random) -> Self {
        let faults = Faults::draw(random);
        let is_cosy = random.one_in(2);
        let piece_bytes = *random.pick(&[4096, 8192, 16384, 65536]);
        let mut key = [0; 16];
        key[..8].copy_from_slice(&random.bits().to_le_bytes());
        let disk_ns = random.between(50_000..=4_000_000);
        let count = random.between(1..=2);
        let disks: Vec<_> = (0..count).map(|_| DiskPlan::draw(faults, is_cosy, disk_ns, random)).collect();
        let has_long = disks.iter().any(|disk| disk.is_long);
        // There is room for one piece of the longest read, and often for little more.
        let scarce = usize::try_from(piece_bytes).unwrap_or(65536) * *random.pick(&[1, 2, 4]);
        Self {
            faults,
            is_cosy,
            has_port: random.one_in(3),
            key,
            disks,
            servers: random.index(2) + 1,
            slots: random.count(if is_cosy { 24..=64 } else { 4..=64 }),
            local: None,
            resident: random.count(16..=160),
            frame_sample: random.count(1..=2),
            send_window: random.count(1..=16),
            fetch_limit: random.count(1..=16),
            hedge: !random.one_in(4),
            piece_bytes,
            // A hedge needs a driver's buffer for the whole piece of a frontend.
            buffer_bytes: if has_long {
                8 << 20
            } else if random.one_in(2) {
                scarce
            } else {
                1 << 20
            },
            is_named: !random.one_in(4),
            reads: random.between(if is_cosy { 85..=98 } else { 40..=90 }),
            disk_ns,
            network_ns: if is_cosy { disk_ns / 10 } else { random.between(20_000..=1_000_000) },
            slow_replies: if is_cosy && !faults.server { 0 } else { *random.pick(&[0, 1, 2, 10, 50]) },
            pace_ns: random.between(disk_ns / 16..=disk_ns * 2),
        }
    }

    /// Adapts the conditions for a VM that moves: disks only over vhost-user, on storage whose lock reaches both hosts.
    fn make_movable(&mut self) {
        (self.has_port, self.is_named) = (false, false);
        for disk in &mut self.disks {
            (disk.nbd, disk.remote) = (false, false);
        }
    }

    /// Adapts the conditions for disks that come, go, and change their size: there is one more of them.
    fn make_changeable(&mut self, random: &mut Random) {
        self.disks.push(DiskPlan::draw(self.faults, self.is_cosy, self.disk_ns, random));
        for disk in &mut self.disks {
            // Other programs take over, so its guest needs a record.
            (disk.may_resize, disk.has_record) = (!disk.nbd, true);
        }
    }

    fn change(&self, random: &mut Random) -> Stimulus {
        let disk = random.index(self.disks.len());
        let plan = &self.disks[disk];
        match random.below(4) {
            0 => Stimulus::Remove(disk),
            1 | 2 if plan.may_resize => {
                let blocks = random.index(plan.sectors / BLOCK_SECTORS) + 1;
                let sectors = if random.one_in(2) { plan.sectors } else { blocks * BLOCK_SECTORS };
                Stimulus::Resize(disk, sectors)
            }
            _ => Stimulus::Add(disk),
        }
    }

    /// Draws what happens to the local tier.
    fn local_changes(&self, random: &mut Random) -> Vec<Change> {
        let Faults { server, lies, operator, .. } = self.faults;
        let mut changes = Vec::new();
        for _ in 0..random.index(8) {
            match random.below(5) {
                0 if operator => changes.push(Change::Size(random.count(0..=64))),
                1 if server => changes.push(Change::TakeBack(random.count(0..=64))),
                2 if server => changes.push(Change::Restart(random.one_in(2))),
                3 if server => changes.push(Change::Lose(random.count(1..=40))),
                4 if lies => changes.push(Change::Spoil),
                _ => {}
            }
        }
        changes
    }

    fn stimulus(&self, random: &mut Random) -> Stimulus {
        let disk = random.index(self.disks.len());
        let server = random.index(self.servers);
        let Faults { disk: disks, server: servers, guest, process, operator, .. } = self.faults;
        match random.below(1000) {
            0..=7 if servers => Stimulus::Cut,
            8..=11 if servers => Stimulus::ServerRestart(server),
            12..=19 if servers => Stimulus::PagesLost(server, random.count(1..=6)),
            20..=25 if disks && self.disks[disk].remote => Stimulus::StoreCrash(disk),
            26..=33 if guest => Stimulus::GuestGone(disk, random.below(50_000_000)),
            34..=37 if operator => Stimulus::SetCache(random.count(0..=64)),
            38..=39 if operator => Stimulus::Enable(random.one_in(2)),
            40..=41 if operator => {
                let list = (0..self.servers).filter(|_| random.one_in(2)).collect::<Vec<_>>();
                Stimulus::Servers(if list.is_empty() { vec![server] } else { list })
            }
            42..=47 => Stimulus::Status,
            48..=53 if process => {
                let most = *random.pick(&[1_000_000, 1_000_000_000]);
                Stimulus::Kill(random.below(most))
            }
            54..=55 if process => Stimulus::PowerFailure,
            56..=60 if process => {
                Stimulus::Upgrade(*random.pick(&[Fate::TakesOver, Fate::TakesOver, Fate::Refused, Fate::CannotStart]))
            }
            61..=80 if !self.disks[disk].nbd => Stimulus::WriteCache(disk, random.one_in(2)),
            81..=110 if self.has_port && guest => {
                let all = [Eviction::Kept, Eviction::Past, Eviction::Foreign, Eviction::Torn, Eviction::Zero];
                Stimulus::Evict(*random.pick(&all))
            }
            111..=120 if self.has_port => Stimulus::Identify,
            _ => Stimulus::Ask(disk, self.disks[disk].ask(self.reads, random)),
        }
    }
}

impl Faults {
    /// Returns whether there are no faults and no interference by the operator.
    pub(super) fn none(&self) -> bool {
        *self == Self::default()
    }

    fn draw(random: &mut Random) -> Self {
        if random.one_in(5) {
            return Self::default();
        }
        let mut coin = || random.one_in(2);
        Self { disk: coin(), server: coin(), lies: coin() && coin(), guest: coin(), process: coin(), operator: coin() }
    }
}

impl DiskPlan {
    fn draw(faults: Faults, is_cosy: bool, disk_ns: u64, random: &mut Random) -> Self {
        let most = *random.pick(&[8, 20, 40]);
        let is_long = random.one_in(100);
        let blocks = if is_long { LONG_BLOCKS } else { random.index(most) + 8 };
        let is_coarse = random.one_in(5);
        let working_set = if is_cosy { random.index(4) + 5 } else { 0 };
        let tail = if !is_coarse && random.one_in(2) { random.index(BLOCK_SECTORS) } else { 0 };
        let nbd = is_long || random.one_in(3);
        Self {
            nbd,
            sectors: blocks * BLOCK_SECTORS + tail,
            is_coarse,
            is_long,
            remote: random.one_in(2),
            swap: random.one_in(6),
            zeroes_pages: random.one_in(3),
            // Without a record, a guest does not survive the death of the process.
            has_record: faults.process || !random.one_in(4),
            segments: random.index(3) + 1,
            queues: *random.pick(&[1, 1, 2, 3]),
            ns: disk_ns * random.pick(&[1, 1, 1, 10]),
            working_set,
            pages: if is_cosy { working_set / 2 } else { random.index(most) + 1 },
            depth: random.index(12) + 1,
            longest: *random.pick(&[16, 32, 40]),
            may_resize: false,
        }
    }

    fn range(&self, random: &mut Random) -> Range<usize> {
        if self.working_set > 0 && !random.one_in(16) {
            let start = random.index(self.working_set) * BLOCK_SECTORS;
            return start..start + BLOCK_SECTORS;
        }
        if self.is_long && random.one_in(8) {
            let length = random.index(self.sectors - LONG_SECTORS) + LONG_SECTORS;
            let start = random.index(self.sectors - length + 1);
            return start..start + length;
        }
        let whole = !random.one_in(3);
        let unit = if whole { BLOCK_SECTORS } else { 1 };
        let length = ((random.index(self.longest / unit) + 1) * unit).min(self.sectors);
        let length = if random.one_in(2) { length.min(BLOCK_SECTORS) } else { length };
        let start = random.index(self.sectors - length + 1) / unit * unit;
        start..start + length
    }

    fn ranges(&self, random: &mut Random) -> Vec<Range<usize>> {
        let count = if self.nbd { 1 } else { random.index(3) + 1 };
        (0..count).map(|_| self.range(random)).collect()
    }

    fn ask(&self, reads: u64, random: &mut Random) -> Ask {
        if random.below(100) < reads {
            return Ask::Read(self.range(random));
        }
        let durable = self.nbd && random.one_in(4);
        match random.below(12) {
            0..=5 => {
                let range = self.range(random);
                let fill = match random.below(8) {
                    0 => Fill::Template(random.below(2)),
                    1 => Fill::Zero,
                    2 => Fill::Same,
                    _ => Fill::Unique,
                };
                Ask::Write { range, fill, durable }
            }
            6..=7 => Ask::Flush,
            8..=9 => Ask::Discard(self.ranges(random)),
            _ => Ask::WriteZeroes { ranges: self.ranges(random), unmap: random.one_in(2), durable },
        }
    }
}
