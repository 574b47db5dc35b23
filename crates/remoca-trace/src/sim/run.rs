//! The simulation itself; see [`super`] for what each record does.

use super::counts::{BlockCounts, MayHit, RequestCounts};
use super::curve::{Curve, block};
use super::ids::{BlockIds, Full, Id, Key};
use super::lists::Lists;
use super::policy::Cache;
use super::types::{CurveKind, Found, Pages, Setup, TooManyBlocks};
use crate::formats::Batch;
use crate::limits::BLOCKS_MAX;
use remoca_core::units::DiskIndex;
use remoca_protocol::trace::{TraceRecord, TracedOp};

/// Number of blocks whose numbers are looked up together.
const AHEAD: usize = 2048;

/// A simulation under way.
pub struct Simulation {
    pub(super) setup: Setup,
    /// Pages of guest memory of the simulated share.
    pub(super) guest_pages: u64,
    pub(super) ids: BlockIds,
    guest: Lists<1>,
    pub(super) cache: Cache,
    pub(super) curve: Curve,
    pub(super) blocks: BlockCounts,
    pub(super) requests: RequestCounts,
    pub(super) may_hit: MayHit,
    pub(super) has_evictions: bool,
    /// Whether reads were recorded while evictions were to come, so that they were not admitted.
    pub(super) has_expected: bool,
    pub(super) has_partial: bool,
    /// Whether the sampled curve is all that is wanted, so that no more memory than it needs is taken.
    pub(super) is_curve_alone: bool,
    /// Numbers of the blocks of the records that are handled next.
    ahead: Vec<Id>,
}

/// Returns the keys of a record's blocks.
fn keys(record: &TraceRecord) -> std::ops::Range<Key> {
    let first = u64::from(record.disk) * BLOCKS_MAX + record.block;
    first..first + record.blocks
}

/// Returns whether a record names blocks that may be new, few enough to look at each.
fn names_blocks(record: &TraceRecord) -> bool {
    match record.op {
        TracedOp::Read | TracedOp::Write | TracedOp::Evicted => true,
        TracedOp::Flush | TracedOp::Discard | TracedOp::WriteZeroes => false,
    }
}

impl Simulation {
    /// Returns a simulation of an empty guest and empty tiers.
    #[must_use]
    pub fn new(setup: Setup) -> Self {
        let share = |pages: u64| pages / setup.one_of.max(1);
        let pages = Pages { local: share(setup.tiers.local), remote: share(setup.tiers.remote) };
        Self {
            setup,
            guest_pages: share(setup.guest),
            ids: BlockIds::new(setup.blocks_max),
            guest: Lists::new(),
            cache: Cache::new(setup.policy, pages),
            curve: Curve::new(setup.curve),
            blocks: BlockCounts::default(),
            requests: RequestCounts::default(),
            may_hit: MayHit::default(),
            has_evictions: false,
            has_expected: false,
            has_partial: false,
            is_curve_alone: setup.guest == 0
                && setup.tiers == Pages::default()
                && setup.one_of <= 1
                && setup.curve == CurveKind::Sampled,
            ahead: Vec::new(),
        }
    }

    /// Returns the bytes that the simulation takes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let ahead = self.ahead.capacity() * size_of::<Id>();
        self.ids.bytes() + self.guest.bytes() + self.cache.bytes() + self.curve.bytes() + ahead
    }

    /// Handles the records of a batch.
    ///
    /// # Errors
    /// If the trace has more blocks than may be followed.
    pub fn take(&mut self, batch: &Batch) -> Result<(), TooManyBlocks> {
        self.has_expected |= batch.sees_evictions && batch.records.iter().any(|record| record.op == TracedOp::Read);
        if self.is_curve_alone {
            batch.records.iter().for_each(|record| self.sample(record, batch.sees_evictions));
            return Ok(());
        }
        let blocks_max = self.setup.blocks_max;
        let mut rest = &batch.records[..];
        while !rest.is_empty() {
            let count = self.look_up(rest).map_err(|Full| TooManyBlocks { blocks_max })?;
            let (now, later) = rest.split_at(count);
            let ids = std::mem::take(&mut self.ahead);
            let mut ids_left = &ids[..];
            for record in now {
                let blocks = if names_blocks(record) { self.numbers(record) } else { 0 };
                let (own, others) = ids_left.split_at(blocks);
                self.handle(record, own, batch.sees_evictions);
                ids_left = others;
            }
            self.ahead = ids;
            rest = later;
        }
        Ok(())
    }

    /// Tells the sampled curve of a record, where nothing else is wanted: then no block has a number.
    #[inline]
    fn sample(&mut self, record: &TraceRecord, sees_evictions: bool) {
        let Curve::Sampled(curve) = &mut self.curve else { return };
        let blocks = keys(record).map(block);
        match record.op {
            TracedOp::Read if record.is_partial => {
                self.has_partial = true;
                curve.missed(record.blocks);
            }
            TracedOp::Read if sees_evictions => blocks.for_each(|block| curve.read(block)),
            TracedOp::Read => blocks.for_each(|block| curve.read_and_evicted(block)),
            TracedOp::Evicted => {
                self.has_evictions = true;
                blocks.for_each(|block| curve.evicted(block));
            }
            TracedOp::Write => {
                self.blocks.written += record.blocks;
                blocks.for_each(|block| curve.discarded(block));
            }
            TracedOp::Discard | TracedOp::WriteZeroes => {
                curve.discarded_range(DiskIndex(record.disk), record.block..record.end());
            }
            TracedOp::Flush => {}
        }
        if record.op == TracedOp::Read && record.blocks > 0 {
            self.blocks.note(Found::Nowhere, record.blocks);
            self.requests.note(Found::Nowhere);
        }
    }

    /// Looks up the numbers of the blocks of some records, at least of one. Returns of how many.
    fn look_up(&mut self, records: &[TraceRecord]) -> Result<usize, Full> {
        self.ahead.clear();
        let mut count = 0;
        for record in records {
            if names_blocks(record) {
                for key in keys(record) {
                    if self.is_simulated(key) {
                        self.ahead.push(self.ids.id(key)?);
                    }
                }
            }
            count += 1;
            if self.ahead.len() >= AHEAD {
                break;
            }
        }
        let known = self.ids.len();
        self.guest.reach(if self.guest_pages > 0 { known } else { 0 });
        self.cache.reach(known);
        self.curve.reach(known);
        Ok(count)
    }

    /// Returns whether a block is in the share that is simulated.
    #[inline]
    fn is_simulated(&self, key: Key) -> bool {
        let one_of = self.setup.one_of;
        one_of <= 1 || (key ^ key >> 17).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 24 & 0xff_ffff < (1 << 24) / one_of
    }

    /// Returns how many blocks of a record are simulated.
    #[inline]
    fn numbers(&self, record: &TraceRecord) -> usize {
        if self.setup.one_of <= 1 {
            return usize::try_from(record.blocks).unwrap_or(usize::MAX);
        }
        keys(record).filter(|key| self.is_simulated(*key)).count()
    }

    fn handle(&mut self, record: &TraceRecord, ids: &[Id], sees_evictions: bool) {
        match record.op {
            TracedOp::Read => self.handle_read(record, ids, sees_evictions),
            TracedOp::Write => {
                self.blocks.written += ids.len() as u64;
                ids.iter().for_each(|id| self.write(*id));
            }
            TracedOp::Evicted if self.guest_pages == 0 => {
                self.has_evictions = true;
                for id in ids {
                    let key = self.ids.key(*id);
                    self.cache.evicted(*id, key);
                    self.curve.evicted(*id, key);
                }
            }
            TracedOp::Discard | TracedOp::WriteZeroes => self.discard(record),
            TracedOp::Evicted | TracedOp::Flush => {}
        }
    }

    #[inline]
    fn handle_read(&mut self, record: &TraceRecord, ids: &[Id], sees_evictions: bool) {
        let misses = record.is_partial && self.guest_pages == 0;
        if !misses {
            self.may_hit.all += record.blocks;
            self.may_hit.simulated += ids.len() as u64;
        }
        if ids.is_empty() {
            return;
        }
        let (mut slowest, before) = (Found::Guest, self.blocks);
        if misses {
            self.has_partial = true;
            self.blocks.note(Found::Nowhere, ids.len() as u64);
            self.curve.missed(ids.len() as u64);
            slowest = Found::Nowhere;
        } else {
            if self.guest_pages == 0 && !sees_evictions {
                self.cache.begin_read(ids);
            }
            for id in ids {
                let found = if self.guest_pages > 0 { self.read_by_guest(*id) } else { self.read(*id, sees_evictions) };
                self.blocks.note(found, 1);
                slowest = slowest.max(found);
            }
            // A sample of the blocks does not tell whether all of them are there.
            if slowest == Found::Nowhere && ids.len() > 1 && self.setup.one_of <= 1 {
                self.blocks.cover_since(before);
            }
        }
        self.requests.note(slowest);
    }

    /// Reads a block that the guest has no memory for.
    #[inline]
    fn read(&mut self, id: Id, sees_evictions: bool) -> Found {
        let key = self.ids.key(id);
        self.curve.read(id, key);
        if sees_evictions {
            return self.cache.read(id, key);
        }
        self.curve.evicted(id, key);
        self.cache.read_and_keep(id)
    }

    fn read_by_guest(&mut self, id: Id) -> Found {
        if self.guest.list_of(id).is_some() {
            self.guest.move_to_front(0, id);
            return Found::Guest;
        }
        let key = self.ids.key(id);
        self.curve.read(id, key);
        let found = self.cache.read(id, key);
        self.hold(id);
        found
    }

    /// Makes a block that the guest does not hold the newest of its memory.
    fn hold(&mut self, id: Id) {
        self.guest.push_front(0, id);
        if self.guest.len(0) > self.guest_pages
            && let Some(victim) = self.guest.pop_back(0)
        {
            let key = self.ids.key(victim);
            self.cache.evicted(victim, key);
            self.curve.evicted(victim, key);
        }
    }

    fn write(&mut self, id: Id) {
        self.forget(id);
        if self.guest_pages == 0 {
            return;
        }
        if self.guest.list_of(id).is_some() {
            self.guest.move_to_front(0, id);
        } else {
            self.hold(id);
        }
    }

    fn forget(&mut self, id: Id) {
        self.cache.forget(id);
        self.curve.forget(id, self.ids.key(id));
    }

    /// Forgets the blocks of a discard. If they are many, looks at each block that is known instead.
    fn discard(&mut self, record: &TraceRecord) {
        let range = keys(record);
        let known = self.ids.len();
        if record.blocks <= known as u64 {
            for key in range {
                if let Some(id) = self.ids.find(key) {
                    self.drop_block(id);
                }
            }
            return;
        }
        for id in (0..).take(known) {
            if range.contains(&self.ids.key(id)) {
                self.drop_block(id);
            }
        }
    }

    fn drop_block(&mut self, id: Id) {
        if self.guest_pages > 0 {
            self.guest.remove(id);
        }
        self.forget(id);
    }
}
