//! Miss-ratio curves of a VM and of its disks, fed by the engine's events. They only watch: nothing here changes what is cached.
//!
//! | Event | What the curve is told |
//! |---|---|
//! | a read of whole blocks, from whatever source | a read of each block that is not known to be zero |
//! | a read of parts of blocks, or of a part that is being forgotten | a miss at every size |
//! | an evicted page of a known block, whatever became of it: admitted, duplicate, dropped, passed over | its eviction |
//! | a page that no block is known to hold, or of zeroes | nothing |
//! | a write, discard or write-zeroes | the blocks leave the queue |
//! | ... to a swap area | an eviction of the blocks that were written whole |
//! | no evictions are seen ([`Admission::Reads`]) | each block read is evicted at once, except those of swap areas |
//!
//! Without a cache ([`Curves::is_ghost`]) nothing is known of blocks. Then the contents of sampled blocks are noted here
//! (`contents.rs`), and the agent is advised to send one page of [`GHOST_ONE_OF`].
//!
//! The VM has a curve. As soon as a second disk is read, each disk has one of its own, up to [`DISK_CURVES_MAX`]. Decision 0038.

use super::admit::ADVICE_MAX;
use super::contents::Contents;
use super::disks::page_of;
use super::fetches::Source;
use super::{Admission, DiskEngine};
use crate::curve::{Forecasts, MissRatioCurve, Unreadable, Windows};
use crate::fingerprint::{Fingerprint, Fingerprinter};
use crate::units::{BlockId, BlockNumber, ByteRange, DiskIndex, Nanos, PAGE_SIZE, PageCount};
use std::collections::BTreeMap;
use std::ops::{DerefMut, Range};

/// Maximum number of disks with a curve of their own: the first that are read. All curves then take 1.5 MB.
pub const DISK_CURVES_MAX: usize = 15;
/// Size of the largest cache that a curve is asked for: 64 GiB.
const REACH: PageCount = PageCount(1 << 24);
/// Number of pages for each one that the agent is advised to send while there is no cache.
pub(super) const GHOST_ONE_OF: u32 = 8;

/// A curve, and how good its forecasts were.
#[derive(Clone)]
struct Watched {
    curve: MissRatioCurve,
    windows: Windows,
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
    /// Miss ratio at each size, with its standard error by sampling.
    pub miss_ratios: Vec<(f64, f64)>,
    /// Miss ratio of the last window alone at 1 MiB, 2 MiB ... 64 GiB; empty before its end.
    pub last_window: Vec<f64>,
    pub forecasts: Forecasts,
    /// Blocks read each second in the last window, or so far in the first one; `None` in its first second.
    pub reads_per_s: Option<f64>,
}

/// Curves of a VM.
pub(super) struct Curves {
    is_on: bool,
    key: [u8; 16],
    vm: Watched,
    /// The one disk that was read so far; `None` if there was none or more than one.
    only: Option<DiskIndex>,
    disks: BTreeMap<DiskIndex, Watched>,
    /// Contents of blocks, while there is no cache but an agent.
    contents: Option<Contents>,
    /// Upper bound on the rate of new curves.
    rate_max: f64,
}

impl Curves {
    pub(super) fn new(prints: &Fingerprinter) -> Self {
        let key = key_of(prints);
        let (only, disks, contents) = (None, BTreeMap::new(), None);
        Self { is_on: true, key, vm: Watched::new(&key), only, disks, contents, rate_max: 1. }
    }

    /// Counts reads of blocks that no cache answers.
    pub(super) fn bypass(&mut self, disk: DiskIndex, blocks: u64) {
        if self.is_on {
            self.each_of(disk, |watched| watched.curve.missed(blocks));
        }
    }

    /// Takes overwritten blocks out of the queues.
    pub(super) fn overwritten(&mut self, disk: DiskIndex, blocks: Range<u64>) {
        if self.is_on {
            self.each_of(disk, |watched| watched.curve.discarded_range(disk, blocks.clone()));
        }
    }

    /// Forgets a disk that was removed.
    pub(super) fn forget(&mut self, disk: DiskIndex) {
        self.disks.remove(&disk);
        self.vm.curve.discarded_range(disk, 0..u64::MAX);
    }

    fn each_of(&mut self, disk: DiskIndex, note: impl Fn(&mut Watched)) {
        note(&mut self.vm);
        if let Some(watched) = self.disks.get_mut(&disk) {
            note(watched);
        }
    }

    fn all(&mut self) -> impl Iterator<Item = &mut Watched> {
        std::iter::once(&mut self.vm).chain(self.disks.values_mut())
    }

    fn evicted(&mut self, block: BlockId) {
        self.each_of(block.disk, |watched| watched.curve.evicted(block));
    }

    /// Gives the disks curves of their own once there are two.
    fn begin_disk(&mut self, disk: DiskIndex) {
        if self.only == Some(disk) || self.disks.contains_key(&disk) {
            return;
        }
        if self.only.is_none() && self.disks.is_empty() {
            self.only = Some(disk);
            return;
        }
        if let Some(first) = self.only.take() {
            // Until now it was that of the VM.
            self.disks.insert(first, self.vm.clone());
        }
        if self.disks.len() < DISK_CURVES_MAX {
            let mut watched = Watched::new(&self.key);
            watched.curve.limit_rate(self.rate_max);
            watched.curve.see_one_of(self.vm.curve.one_of());
            self.disks.insert(disk, watched);
        }
    }

    /// Begins to note contents, or ends that.
    fn note_contents(&mut self, guest_memory: Option<PageCount>) {
        match (guest_memory, &self.contents) {
            (Some(guest_memory), None) => {
                let (contents, rate_max) = Contents::new(guest_memory);
                (self.contents, self.rate_max) = (Some(contents), rate_max);
                self.all().for_each(|watched| watched.curve.limit_rate(rate_max));
            }
            (None, Some(_)) => (self.contents, self.rate_max) = (None, 1.),
            _ => {}
        }
    }

    fn see_one_of(&mut self, one_of: u32) {
        if self.vm.curve.one_of() != one_of {
            self.all().for_each(|watched| watched.curve.see_one_of(one_of));
        }
    }

    fn is_sampled(&self, block: BlockId) -> bool {
        let own = self.disks.get(&block.disk);
        self.vm.curve.samples(block) || own.is_some_and(|watched| watched.curve.samples(block))
    }

    fn report(&self, now: Nanos, disk: Option<DiskIndex>, sizes: &[PageCount]) -> Option<CurveReport> {
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
            miss_ratios: miss_ratios.into_iter().map(|ratio| (ratio, curve.standard_error(ratio))).collect(),
            last_window: windows.last().unwrap_or_default().to_vec(),
            forecasts: windows.forecasts(),
            reads_per_s: windows.reads_per_s(now, curve),
        })
    }
}

impl Watched {
    fn new(key: &[u8; 16]) -> Self {
        Self { curve: MissRatioCurve::new(key, REACH), windows: Windows::default() }
    }
}

impl<M: DerefMut<Target = [u32]>> DiskEngine<M> {
    /// Sets whether curves are kept, as they are by default.
    pub fn keep_curves(&mut self, is_on: bool) {
        self.curves.is_on = is_on;
    }

    /// Returns what the curve of a disk says at `sizes`, which must not decrease, or that of the VM. Returns `None` if nothing was read,
    /// or the disk has no curve of its own.
    pub fn curve(&self, now: Nanos, disk: Option<DiskIndex>, sizes: &[PageCount]) -> Option<CurveReport> {
        self.curves.report(now, disk, sizes)
    }

    /// Returns whether there is no cache, so that curves are all that the VM's reads and evictions are for.
    pub fn is_ghost(&self) -> bool {
        !self.pool.is_enabled()
    }

    /// Returns the curves as bytes, each with its disk; `None` is that of the VM.
    pub fn curves_to_bytes(&self) -> Vec<(Option<DiskIndex>, Vec<u8>)> {
        let Curves { vm, only, disks, .. } = &self.curves;
        if vm.curve.reads() <= 0. {
            return Vec::new();
        }
        let vm = (None, vm.curve.to_bytes());
        let only = only.map(|disk| (Some(disk), Vec::new()));
        let disks = disks.iter().map(|(disk, watched)| (Some(*disk), watched.curve.to_bytes()));
        std::iter::once(vm).chain(only).chain(disks).collect()
    }

    /// Continues a curve of the previous process. No bytes for a disk say that it was the only one that was read.
    ///
    /// # Errors
    /// If the bytes are no curve of a process with the same key. The present curve stays then.
    pub fn restore_curve(&mut self, disk: Option<DiskIndex>, bytes: &[u8]) -> Result<(), Unreadable> {
        let curves = &mut self.curves;
        let Some(disk) = disk else {
            curves.vm.curve = MissRatioCurve::from_bytes(&curves.key, bytes)?;
            return Ok(());
        };
        if bytes.is_empty() {
            curves.only = Some(disk);
        } else if curves.disks.len() < DISK_CURVES_MAX {
            let curve = MissRatioCurve::from_bytes(&curves.key, bytes)?;
            curves.disks.insert(disk, Watched { curve, windows: Windows::default() });
        }
        Ok(())
    }

    /// Notes that the guest reads whole blocks, whose sources were just looked up.
    pub(super) fn note_blocks_read(&mut self, now: Nanos, disk: DiskIndex, blocks: Range<u64>) {
        if !self.curves.is_on {
            return;
        }
        self.curves.begin_disk(disk);
        self.follow_evictions();
        let are_evicted = self.admit.admission() == Admission::Reads;
        let Self { curves, sources, disks, .. } = self;
        for (bno, source) in blocks.zip(&*sources) {
            if matches!(source, Source::Zero) {
                continue;
            }
            let block = BlockId { disk, bno: BlockNumber(bno) };
            let is_evicted = are_evicted && !disks.is_swap(block);
            curves.each_of(disk, |watched| {
                watched.curve.read(block);
                if is_evicted {
                    watched.curve.evicted(block);
                }
            });
        }
        curves.each_of(disk, |watched| {
            watched.windows.advance(now, &mut watched.curve);
        });
    }

    /// Notes that the guest evicted a page of this content, which is not zero.
    pub(super) fn note_evicted_content(&mut self, content: Fingerprint) {
        if self.curves.is_on
            && let Some(block) = self.index.block_of(content)
        {
            self.curves.evicted(block);
        }
    }

    /// Notes that the guest evicted a page, where there is no cache.
    pub(super) fn note_ghost_eviction(&mut self, page: &[u8]) {
        if self.curves.is_on
            && let Some(contents) = &mut self.curves.contents
            && let Some(block) = contents.take(self.prints.page(page))
        {
            self.curves.evicted(block);
        }
    }

    /// Notes what whole blocks of a disk hold that were read, or written by the guest.
    pub(super) fn note_contents(&mut self, disk: DiskIndex, range: ByteRange, data: &[u8], is_written: bool) {
        if !self.curves.is_on || !(is_written || self.curves.contents.is_some()) {
            return;
        }
        for bno in range.covered_blocks() {
            let block = BlockId { disk, bno: BlockNumber(bno) };
            if is_written && self.disks.is_swap(block) {
                self.curves.evicted(block);
            } else if self.curves.contents.is_some() && self.curves.is_sampled(block) {
                let Some((_, page)) = page_of(range, bno, data) else { return };
                let content = self.prints.page(page);
                if let Some(contents) = &mut self.curves.contents
                    && content != self.prints.zero()
                {
                    contents.put(content, block);
                }
            }
        }
    }

    /// Returns the advice to the agent while there is no cache.
    pub(super) fn ghost_advice(&self) -> u32 {
        if self.curves.is_on { GHOST_ONE_OF } else { ADVICE_MAX }
    }

    /// Follows a change of what is seen of evictions.
    fn follow_evictions(&mut self) {
        let has_agent = self.admit.admission() == Admission::Evictions;
        let one_of = if has_agent { self.advice().max(1) } else { 1 };
        self.curves.see_one_of(one_of);
        let guest_memory = (has_agent && self.is_ghost()).then(|| self.index.layout().resident_limit());
        self.curves.note_contents(guest_memory);
    }
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
