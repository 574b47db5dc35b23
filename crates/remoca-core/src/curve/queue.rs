//! Sampled part of the eviction queue: the priorities of sampled blocks, in the order of their evictions.
//!
//! ```text
//! slots:  | priority | (empty) | priority | ... | next   oldest first; an eviction takes the next slot
//! live:   bit 1      | 0       | 1        | ...          a block's rank is the number of bits from its slot to the end
//! groups: live slots of each 512 ...                    so that few bits are counted
//! table:  hash of a priority -> slot + 1, or 0           linear probing; a removal shifts back what follows
//! ```
//! Slots before `boundary` are of an *older sample*, whose blocks stand for another number of blocks ([`Queue::begin_sample`]).
//! 1. A live slot is found by its priority in the table, and the table finds nothing else.
//! 2. Every live slot is before `next`. When the slots end, they are moved together.
//!
//! It allocates only when it is created, and when it is thinned out (see [`Queue::thin`]).

use std::ops::Range;

/// Maximum number of sampled blocks.
pub const SAMPLES_MAX: usize = 4096;
/// Number of slots. More than samples, so that they are moved together only every so many evictions.
const SLOTS: usize = SAMPLES_MAX + SAMPLES_MAX / 4;
/// Number of slots of a group whose live ones are counted.
const GROUP: usize = 8 * WORD;
const TABLE_BITS: u32 = (2 * SAMPLES_MAX).ilog2();
const TABLE_MASK: usize = (1 << TABLE_BITS) - 1;
const WORD: usize = u64::BITS as usize;

#[derive(Clone)]
pub(super) struct Queue {
    slots: Box<[u64]>,
    live: Box<[u64]>,
    groups: [u16; SLOTS / GROUP],
    table: Box<[u16; 1 << TABLE_BITS]>,
    next: usize,
    len: usize,
    boundary: usize,
    /// Live slots before the boundary.
    older: usize,
}

/// Where a block was in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// Blocks of its own sample from the newest to it, itself included.
    pub(super) rank: usize,
    /// `None` if it is of the present sample. Otherwise the number of blocks of the present sample, which are all newer.
    pub(super) newer: Option<usize>,
}

impl Queue {
    pub(super) fn new() -> Self {
        Self {
            slots: vec![0; SLOTS].into(),
            live: vec![0; SLOTS / WORD].into(),
            groups: [0; SLOTS / GROUP],
            table: Box::new([0; 1 << TABLE_BITS]),
            next: 0,
            len: 0,
            boundary: 0,
            older: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the number of blocks of the older sample.
    pub(super) fn older(&self) -> usize {
        self.older
    }

    /// Begins another sample: the blocks that are in the queue now are of the older one. Those of the sample before that are removed.
    pub(super) fn begin_sample(&mut self) {
        self.forget_older();
        (self.boundary, self.older) = (self.next, self.len);
    }

    /// Removes the blocks of the older sample.
    pub(super) fn forget_older(&mut self) {
        let boundary = std::mem::take(&mut self.boundary);
        if std::mem::take(&mut self.older) > 0 {
            self.retain_slots(|slot, _| slot >= boundary);
        }
    }

    /// Makes one sample of both. Of the present one the blocks of a priority below `threshold` stay.
    pub(super) fn join(&mut self, threshold: u64) {
        let boundary = self.boundary;
        self.retain_slots(|slot, priority| slot < boundary || priority < threshold);
        (self.boundary, self.older) = (0, 0);
    }

    /// Returns the bytes that the queue takes.
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.slots) + size_of_val(&*self.live) + size_of_val(&*self.table)
    }

    /// Returns the priorities of the present sample, oldest first.
    pub(super) fn iter(&self) -> impl Iterator<Item = u64> {
        self.live_slots(self.boundary..self.next)
    }

    fn live_slots(&self, slots: Range<usize>) -> impl Iterator<Item = u64> {
        slots.filter(|slot| self.is_live(*slot)).map(|slot| self.slots[slot])
    }

    /// Removes a block. Returns where it was, or `None` if it is not in the queue.
    pub(super) fn take(&mut self, priority: u64) -> Option<Place> {
        let place = self.find(priority).ok()?;
        let slot = usize::from(self.table[place]) - 1;
        let (rank, newer) = (self.live_from(slot), self.len - self.older);
        let is_older = slot < self.boundary;
        self.remove(place, slot);
        Some(if is_older { Place { rank: rank - newer, newer: Some(newer) } } else { Place { rank, newer: None } })
    }

    /// Makes a block of the present sample the newest. Returns its rank before, or `None` if no such block is in the queue: the
    /// order is as before then. In place of [`Self::take`] and [`Self::put`], it looks for the block once.
    pub(super) fn renew(&mut self, priority: u64) -> Option<usize> {
        self.make_room();
        let place = self.find(priority).ok()?;
        let slot = usize::from(self.table[place]) - 1;
        if slot < self.boundary {
            return None;
        }
        let rank = self.live_from(slot);
        self.clear(slot);
        self.append(place, priority);
        Some(rank)
    }

    /// Removes a block, if it is in the queue.
    pub(super) fn forget(&mut self, priority: u64) {
        if let Ok(place) = self.find(priority) {
            self.remove(place, usize::from(self.table[place]) - 1);
        }
    }

    /// Makes a block the newest of the queue.
    ///
    /// # Panics
    /// If the block is not in the queue, and the queue is full.
    pub(super) fn put(&mut self, priority: u64) {
        self.make_room();
        let place = match self.find(priority) {
            Err(place) => place,
            Ok(place) => {
                self.remove(place, usize::from(self.table[place]) - 1);
                self.find(priority).unwrap_or_else(|place| place)
            }
        };
        assert!(self.len < SAMPLES_MAX);
        self.append(place, priority);
        self.len += 1;
    }

    /// Moves the slots together if none is left.
    fn make_room(&mut self) {
        if self.next == SLOTS {
            self.retain(|_| true);
        }
    }

    /// Gives a block, which the table has or gets at `place`, the next slot.
    fn append(&mut self, place: usize, priority: u64) {
        self.slots[self.next] = priority;
        self.live[self.next / WORD] |= 1 << (self.next % WORD);
        self.groups[self.next / GROUP] += 1;
        self.next += 1;
        self.table[place] = entry(self.next);
    }

    /// Marks a live slot as empty.
    fn clear(&mut self, slot: usize) {
        self.live[slot / WORD] &= !(1 << (slot % WORD));
        self.groups[slot / GROUP] -= 1;
    }

    /// Removes the oldest block.
    pub(super) fn forget_oldest(&mut self) {
        let word = self.live.iter().position(|word| *word != 0);
        let slot = word.map(|word| word * WORD + self.live[word].trailing_zeros() as usize);
        if let Some(slot) = slot {
            self.forget(self.slots[slot]);
        }
    }

    /// Removes the blocks of the highest priorities, one in 64 of those that the queue can hold. Returns the lowest of them.
    pub(super) fn thin(&mut self) -> u64 {
        self.thin_until(self.next)
    }

    /// Removes as many blocks as [`Self::thin`] does, of the older sample alone. Returns the lowest of their priorities.
    pub(super) fn thin_older(&mut self) -> u64 {
        self.thin_until(self.boundary)
    }

    fn thin_until(&mut self, end: usize) -> u64 {
        let mut priorities: Vec<u64> = self.live_slots(0..end).collect();
        let kept = priorities.len().saturating_sub(SAMPLES_MAX / 64).max(1) - 1;
        let (_, last_kept, above) = priorities.select_nth_unstable(kept);
        let threshold = above.iter().copied().min().unwrap_or(*last_kept);
        self.retain_slots(|slot, priority| slot >= end || priority < threshold);
        threshold
    }

    /// Keeps the blocks of which `stays` is true, and moves the slots together.
    pub(super) fn retain(&mut self, stays: impl Fn(u64) -> bool) {
        self.retain_slots(|_, priority| stays(priority));
    }

    fn retain_slots(&mut self, stays: impl Fn(usize, u64) -> bool) {
        let (end, boundary) = (self.next, self.boundary);
        (self.next, self.len, self.boundary, self.older) = (0, 0, 0, 0);
        self.table.fill(0);
        self.groups.fill(0);
        for slot in 0..end {
            if slot == boundary {
                (self.boundary, self.older) = (self.next, self.len);
            }
            let (priority, bit) = (self.slots[slot], 1 << (slot % WORD));
            let was_live = self.live[slot / WORD] & bit != 0;
            self.live[slot / WORD] &= !bit;
            // The slot it moves to is not after its own.
            if was_live && stays(slot, priority) {
                self.put(priority);
            }
        }
        if boundary == end {
            (self.boundary, self.older) = (self.next, self.len);
        }
    }

    fn remove(&mut self, place: usize, slot: usize) {
        self.clear(slot);
        self.len -= 1;
        self.older -= usize::from(slot < self.boundary);
        let mut hole = place;
        let mut at = (place + 1) & TABLE_MASK;
        while self.table[at] != 0 {
            let home = home(self.slots[usize::from(self.table[at]) - 1]);
            // An entry may move to the hole unless its home lies between the two.
            if at.wrapping_sub(home) & TABLE_MASK >= at.wrapping_sub(hole) & TABLE_MASK {
                self.table[hole] = self.table[at];
                hole = at;
            }
            at = (at + 1) & TABLE_MASK;
        }
        self.table[hole] = 0;
    }

    /// Returns where the table has a priority, or as an error where it would be inserted.
    fn find(&self, priority: u64) -> Result<usize, usize> {
        let mut at = home(priority);
        loop {
            match self.table[at] {
                0 => return Err(at),
                slot if self.slots[usize::from(slot) - 1] == priority => return Ok(at),
                _ => at = (at + 1) & TABLE_MASK,
            }
        }
    }

    fn is_live(&self, slot: usize) -> bool {
        self.live[slot / WORD] >> (slot % WORD) & 1 != 0
    }

    /// Returns the number of live slots from `slot` on.
    fn live_from(&self, slot: usize) -> usize {
        let (word, group) = (slot / WORD, slot / GROUP);
        let first = (self.live[word] >> (slot % WORD)).count_ones();
        let end = (group + 1) * (GROUP / WORD);
        let near: u32 = self.live[word + 1..end].iter().map(|word| word.count_ones()).sum();
        let far: u32 = self.groups[group + 1..].iter().map(|live| u32::from(*live)).sum();
        (first + near + far) as usize
    }
}

/// Returns where a priority is in the table if nothing else is there.
fn home(priority: u64) -> usize {
    (priority.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (u64::BITS - TABLE_BITS)) as usize
}

/// Returns the table's entry for a number of slots, which is at most [`SLOTS`].
fn entry(slots: usize) -> u16 {
    const { assert!(SLOTS <= u16::MAX as usize) };
    u16::try_from(slots).unwrap_or(u16::MAX)
}
