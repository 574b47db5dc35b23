//! Miss-ratio curves of a VM and of its disks, and the contents of sampled blocks while there is no cache. `watch.rs` feeds them.
//!
//! The VM has a curve. As soon as a second disk is read, each disk has one of its own, up to [`DISK_CURVES_MAX`]. Decision 0038.

use super::contents::Contents;
use crate::curve::{EventKind, Forecasts, MissRatioCurve, Priority, REACH_MAX, REACH_MIN, Unreadable, Windows};
use crate::fingerprint::Fingerprinter;
use crate::units::{BlockId, DiskIndex, Nanos, PAGE_SIZE, PageCount};
use std::collections::BTreeMap;
use std::ops::Range;

/// Maximum number of disks with a curve of their own: the first that are read. All curves then take 1.5 MB.
pub const DISK_CURVES_MAX: usize = 15;
/// Number of blocks told after which the curves follow what changes only now and then.
const FOLLOW_EVERY: u64 = 64;

/// A curve, and how good its forecasts were.
#[derive(Clone)]
pub(super) struct Watched {
    pub(super) curve: MissRatioCurve,
    pub(super) windows: Windows,
}

/// What a curve says.
#[derive(Clone, Debug)]
pub struct CurveReport {
    /// Number of blocks read that the curve is made of; old reads count less.
    pub reads: f64,
    /// Share of the blocks that is followed.
    pub rate: f64,
    /// Number of evictions for each one that is seen.
    pub one_of: u32,
    /// Size up to which the curve says something.
    pub reach: PageCount,
    /// Miss ratio at each size, with its standard error by sampling.
    pub miss_ratios: Vec<(f64, f64)>,
    /// Miss ratio of the last window alone at 1 MiB, 2 MiB ... 4 TiB; empty before its end.
    pub last_window: Vec<f64>,
    pub forecasts: Forecasts,
    /// Blocks read each second in the last window, or so far in the first one; `None` in its first second.
    pub reads_per_s: Option<f64>,
}

/// What is looked at for each read of a disk.
#[derive(Clone, Copy)]
struct Ready {
    disk: DiskIndex,
    /// Priority below which its blocks may be followed.
    limit: Priority,
    /// Whether a block that is read may be followed.
    follows: bool,
    /// Number of blocks read since then, which the curves do not count yet.
    reads: u64,
    /// Time of the newest of these reads.
    read_at: Nanos,
}

/// Curves of a VM.
pub(super) struct Curves {
    pub(super) is_on: bool,
    /// What was looked at for the last read; `None` if it may be otherwise now. Its reads are counted in the end ([`Self::look_again`]).
    ready: Option<Ready>,
    pub(super) key: [u8; 16],
    /// Reach of all curves: that of the largest cache that the VM had.
    reach: PageCount,
    pub(super) vm: Watched,
    /// The one disk that was read so far; `None` if there was none or more than one, or it was removed.
    pub(super) only: Option<DiskIndex>,
    pub(super) disks: BTreeMap<DiskIndex, Watched>,
    /// Contents of blocks, while there is no cache but an agent.
    pub(super) contents: Option<Contents>,
    /// Upper bound on the rate of new curves.
    rate_max: f64,
    /// Number of blocks told since the curves followed what changes only now and then, without those of `ready`.
    told: u64,
    /// Time of the newest read of a block that is not zero; `None` before the first one.
    pub(super) read_at: Option<Nanos>,
}

impl Curves {
    /// Returns curves without reads, for a cache of `cache` pages in all tiers.
    pub(super) fn new(prints: &Fingerprinter, cache: PageCount) -> Self {
        let (key, reach) = (key_of(prints), reach_for(cache));
        let (only, disks, contents) = (None, BTreeMap::new(), None);
        let (ready, vm, told, read_at) = (None, Watched::new(&key, reach), 0, None);
        Self { is_on: true, ready, key, reach, vm, only, disks, contents, rate_max: 1., told, read_at }
    }

    /// Returns whether it is known at once that a block is not followed. [`Self::find`] tells of the others. `limit` is as there.
    #[inline]
    pub(super) fn leave_out(&self, block: BlockId, limit: Priority) -> bool {
        self.vm.curve.leaves_out(block, limit)
    }

    /// Returns whether it is known at once, by the last look, that a block is not followed.
    #[inline]
    pub(super) fn leave_out_now(&self, block: BlockId) -> bool {
        self.ready.is_some_and(|ready| ready.disk == block.disk && self.leave_out(block, ready.limit))
    }

    /// Returns the priority of a block that may be followed. `limit` is what [`Self::limit`] says of its disk, or has said before the last
    /// events: an event only lowers it.
    pub(super) fn find(&mut self, block: BlockId, limit: Priority) -> Option<Priority> {
        self.vm.curve.find(block, limit)
    }

    /// Tells the curves what happened to the block of a disk that has this priority.
    pub(super) fn take(&mut self, kind: EventKind, disk: DiskIndex, priority: Priority) {
        if self.ready.is_some_and(|ready| !ready.follows) {
            // The first block that is followed.
            self.look_again();
        }
        self.each_of(disk, |watched| watched.curve.take(kind, priority));
    }

    /// Returns the priority below which blocks of a disk may be followed.
    pub(super) fn limit(&self, disk: DiskIndex) -> Priority {
        match self.ready {
            Some(ready) if ready.disk == disk => ready.limit,
            _ => self.present_limit(disk),
        }
    }

    fn present_limit(&self, disk: DiskIndex) -> Priority {
        let vm = self.vm.curve.limit();
        self.own(disk).map_or(vm, |own| own.curve.limit().max(vm))
    }

    /// Returns the priority below which blocks of a disk that are read may be followed, if any may be. Returns `None` if it must be
    /// [looked at](Self::look).
    #[inline]
    pub(super) fn ready(&self, disk: DiskIndex) -> Option<Option<Priority>> {
        let ready = self.ready.filter(|ready| ready.disk == disk)?;
        Some(ready.follows.then_some(ready.limit))
    }

    /// Returns what [`Self::ready`] says of a disk from now on, until that may change. `all_evicted` says that each block that is read counts
    /// as evicted at once.
    pub(super) fn look(&mut self, disk: DiskIndex, all_evicted: bool) -> Option<Priority> {
        debug_assert!(self.ready.is_none(), "reads that are not counted yet");
        self.begin_disk(disk);
        let (limit, follows) = (self.present_limit(disk), all_evicted || !self.follow_nothing(disk));
        self.ready = Some(Ready { disk, limit, follows, reads: 0, read_at: Nanos(0) });
        follows.then_some(limit)
    }

    /// Has what is kept for each read looked at again: what is seen of evictions, or a curve, has changed. Counts the reads since the last look.
    pub(super) fn look_again(&mut self) {
        let Some(Ready { disk, follows, reads, read_at, .. }) = self.ready.take() else { return };
        if reads > 0 {
            self.told += reads;
            self.read_at = Some(read_at);
            self.each_of(disk, |watched| match follows {
                true => watched.curve.count_reads(reads),
                false => watched.curve.missed(reads),
            });
        }
    }

    /// Counts `blocks` blocks that are read of the disk that was looked at last, when the curves are looked at again. Returns whether that is due.
    #[inline]
    pub(super) fn note_reads(&mut self, now: Nanos, blocks: u64) -> bool {
        let Some(ready) = &mut self.ready else { return false };
        ready.reads += blocks;
        ready.read_at = now;
        ready.reads >= FOLLOW_EVERY
    }

    /// Returns whether no curve of a disk follows a block, and all would be followed.
    fn follow_nothing(&self, disk: DiskIndex) -> bool {
        self.vm.curve.follows_nothing() && self.own(disk).is_none_or(|own| own.curve.follows_nothing())
    }

    /// Counts one more block, not read, of which the curves were told.
    #[inline]
    pub(super) fn note_told(&mut self) {
        self.told += 1;
    }

    /// Returns whether the curves are to follow now what changes only now and then.
    #[inline]
    pub(super) fn is_due(&self) -> bool {
        self.told >= FOLLOW_EVERY
    }

    /// Returns whether the curves were told of a block since they followed what changes only now and then, which they do next.
    pub(super) fn begin_to_follow(&mut self) -> bool {
        self.look_again();
        std::mem::take(&mut self.told) > 0
    }

    /// Returns the curve that a disk has beside that of the VM. While one disk was read, the VM's curve is also its own.
    #[inline]
    fn own(&self, disk: DiskIndex) -> Option<&Watched> {
        if self.only.is_some() { None } else { self.of_disk(disk) }
    }

    /// Returns the curve of one of several disks.
    #[inline(never)]
    fn of_disk(&self, disk: DiskIndex) -> Option<&Watched> {
        self.disks.get(&disk)
    }

    /// Ends the windows that are long enough.
    pub(super) fn advance(&mut self) {
        let Some(read_at) = self.read_at else { return };
        for Watched { curve, windows } in self.all() {
            windows.advance(read_at, curve);
        }
    }

    /// Follows a change of the cache's size, in all tiers.
    pub(super) fn resize(&mut self, cache: PageCount) {
        let reach = self.reach.max(reach_for(cache));
        self.reach = reach;
        self.all().for_each(|watched| watched.curve.grow_reach(reach));
    }

    /// Returns the curve of a former process.
    ///
    /// # Errors
    /// If the bytes are no curve of a process with the same key.
    pub(super) fn read(&self, bytes: &[u8]) -> Result<MissRatioCurve, Unreadable> {
        let mut curve = MissRatioCurve::from_bytes(&self.key, bytes)?;
        curve.grow_reach(self.reach);
        curve.limit_rate(self.rate_max);
        Ok(curve)
    }

    /// Takes many overwritten blocks out of the queues.
    pub(super) fn overwritten(&mut self, disk: DiskIndex, blocks: Range<u64>) {
        self.each_of(disk, |watched| watched.curve.discarded_range(disk, blocks.clone()));
    }

    /// Forgets a disk that was removed.
    pub(super) fn forget(&mut self, disk: DiskIndex) {
        self.look_again();
        self.only = self.only.filter(|only| *only != disk);
        self.disks.remove(&disk);
        self.vm.curve.discarded_range(disk, 0..u64::MAX);
    }

    #[inline]
    pub(super) fn each_of(&mut self, disk: DiskIndex, note: impl Fn(&mut Watched)) {
        note(&mut self.vm);
        // While one disk was read, the VM's curve is also its own.
        if self.only.is_none()
            && let Some(watched) = self.disks.get_mut(&disk)
        {
            note(watched);
        }
    }

    fn all(&mut self) -> impl Iterator<Item = &mut Watched> {
        std::iter::once(&mut self.vm).chain(self.disks.values_mut())
    }

    /// Gives the disks curves of their own once there are two.
    #[inline]
    pub(super) fn begin_disk(&mut self, disk: DiskIndex) {
        if self.only != Some(disk) {
            self.begin_another_disk(disk);
        }
    }

    fn begin_another_disk(&mut self, disk: DiskIndex) {
        self.look_again();
        if self.disks.contains_key(&disk) {
            return;
        }
        if self.only.is_none() && self.disks.is_empty() && self.vm.curve.reads() <= 0. {
            // None was read before, not even one that is gone.
            self.only = Some(disk);
            return;
        }
        if let Some(first) = self.only.take() {
            // Until now it was that of the VM.
            self.disks.insert(first, self.vm.clone());
        }
        if self.disks.len() < DISK_CURVES_MAX {
            let mut watched = Watched::new(&self.key, self.reach);
            watched.curve.limit_rate(self.rate_max);
            self.see_as_vm(&mut watched.curve);
            self.disks.insert(disk, watched);
        }
    }

    /// Has the curve of a disk see as much of evictions as that of the VM.
    pub(super) fn see_as_vm(&self, curve: &mut MissRatioCurve) {
        let vm = &self.vm.curve;
        curve.see_class_of(vm.classes());
        if vm.classes() == 1 {
            curve.see_one_of(vm.one_of());
        }
    }

    /// Begins to note contents for a guest of this many pages, or ends that.
    #[inline]
    pub(super) fn note_contents(&mut self, guest_memory: Option<PageCount>) {
        if guest_memory != self.contents.as_ref().map(Contents::guest_memory) {
            self.change_contents(guest_memory);
        }
    }

    fn change_contents(&mut self, guest_memory: Option<PageCount>) {
        match (guest_memory, &mut self.contents) {
            (Some(guest_memory), Some(contents)) => contents.resize(guest_memory),
            (guest_memory, contents) => *contents = guest_memory.map(Contents::new),
        }
        let rate_max = self.contents.as_ref().map_or(1., Contents::rate);
        self.rate_max = rate_max;
        self.all().for_each(|watched| watched.curve.limit_rate(rate_max));
    }

    #[inline]
    pub(super) fn see_one_of(&mut self, one_of: u32) {
        if self.vm.curve.one_of() != one_of {
            self.all().for_each(|watched| watched.curve.see_one_of(one_of));
        }
    }

    #[inline]
    pub(super) fn see_class_of(&mut self, classes: u32) {
        if self.vm.curve.classes() != classes {
            self.all().for_each(|watched| watched.curve.see_class_of(classes));
        }
    }

    pub(super) fn is_sampled(&mut self, block: BlockId) -> bool {
        let own = self.disks.get_mut(&block.disk);
        self.vm.curve.samples(block) || own.is_some_and(|watched| watched.curve.samples(block))
    }

    pub(super) fn report(&self, now: Nanos, disk: Option<DiskIndex>, sizes: &[PageCount]) -> Option<CurveReport> {
        let watched = match disk {
            None => &self.vm,
            Some(disk) if self.only == Some(disk) => &self.vm,
            Some(disk) => self.disks.get(&disk)?,
        };
        let Watched { curve, windows } = watched;
        let miss_ratios = curve.miss_ratios(sizes.iter().copied())?;
        Some(CurveReport {
            reads: curve.reads(),
            rate: curve.rate(),
            one_of: curve.one_of(),
            reach: curve.reach(),
            miss_ratios: miss_ratios.into_iter().map(|ratio| (ratio, curve.standard_error(ratio))).collect(),
            last_window: windows.last().unwrap_or_default().to_vec(),
            forecasts: windows.forecasts(),
            reads_per_s: windows.reads_per_s(now, curve),
        })
    }
}

impl Watched {
    fn new(key: &[u8; 16], reach: PageCount) -> Self {
        Self { curve: MissRatioCurve::new(key, reach), windows: Windows::default() }
    }
}

/// Returns how deep blocks are followed for a cache of `cache` pages: a large one can be seen to be worth twice its size.
fn reach_for(cache: PageCount) -> PageCount {
    if cache < REACH_MIN { REACH_MIN } else { PageCount(cache.0.saturating_mul(2)).min(REACH_MAX) }
}

/// Returns the key of the curves. It follows from the key of the fingerprints, and reveals nothing of it.
fn key_of(prints: &Fingerprinter) -> [u8; 16] {
    let mut page = [0; PAGE_SIZE];
    let mut words = [1, 2].into_iter().flat_map(|number| {
        page[..6].copy_from_slice(b"curves");
        page[6] = number;
        prints.page(&page).0
    });
    std::array::from_fn::<_, 4, _>(|_| words.next().unwrap_or_default().to_le_bytes())
        .concat()
        .try_into()
        .unwrap_or_default()
}
