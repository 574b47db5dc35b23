//! Units as newtypes: a block is not a slot, and a slot is not a byte.
//!
//! Blocks and pages are 4 KiB everywhere; 512-byte sectors exist only in frontends.

/// Bytes in a page and in a block (both are 4 KiB everywhere in remoca).
pub const PAGE_SIZE: usize = 4096;
/// [`PAGE_SIZE`] for arithmetic on disk offsets.
pub const PAGE_SIZE_U64: u64 = 4096;

/// Number of a disk of this VM (0 to 4095).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DiskIndex(pub u16);

/// Number of a 4 KiB block, counted from the start of its disk (below 2^40, that is 4 PiB).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockNumber(pub u64);

/// Block of one of the VM's disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId {
    pub disk: DiskIndex,
    pub bno: BlockNumber,
}

/// Number of a page in the pool that a memory server keeps for this VM, assigned by the client from 0 on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotIndex(pub u32);

/// Maximum number of pools that one cache is made of.
pub const POOLS_MAX: u8 = 16;

/// Number of a pool of this VM's cache (0 to 15).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolIndex(pub u8);

impl PoolIndex {
    /// Returns all pool numbers.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..POOLS_MAX).map(Self)
    }
}

/// Set of pools.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolSet(u16);

impl PoolSet {
    /// Set of all pools.
    pub const ALL: Self = Self(u16::MAX);

    /// Adds a pool.
    pub fn insert(&mut self, pool: PoolIndex) {
        self.0 |= 1 << (pool.0 % POOLS_MAX);
    }

    /// Returns whether the pool is in the set.
    #[must_use]
    pub fn contains(self, pool: PoolIndex) -> bool {
        self.0 >> (pool.0 % POOLS_MAX) & 1 != 0
    }

    /// Returns whether the set has no pool.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns the pool of the set if there is exactly one, otherwise `None`.
    #[must_use]
    pub fn only(self) -> Option<PoolIndex> {
        self.iter().next().filter(|_| self.0.is_power_of_two())
    }

    /// Returns the pools of the set, lowest number first.
    #[inline]
    pub fn iter(self) -> impl Iterator<Item = PoolIndex> {
        let mut left = self.0;
        std::iter::from_fn(move || {
            // Of no pool it would be the number of bits.
            let first = u8::try_from(left.trailing_zeros()).ok().filter(|_| left != 0)?;
            left &= left - 1;
            Some(PoolIndex(first))
        })
    }
}

impl FromIterator<PoolIndex> for PoolSet {
    fn from_iter<I: IntoIterator<Item = PoolIndex>>(pools: I) -> Self {
        let mut set = Self::default();
        pools.into_iter().for_each(|pool| set.insert(pool));
        set
    }
}

/// Number of pages or slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageCount(pub u32);

/// Returns the number of whole blocks in `bytes` bytes.
#[must_use]
pub fn whole_blocks(bytes: u64) -> u64 {
    bytes / PAGE_SIZE_U64
}

/// Point in time, in nanoseconds since an arbitrary origin. The core never reads a clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nanos(pub u64);

impl Nanos {
    /// Returns this time plus `ns` nanoseconds.
    #[must_use]
    pub fn plus_ns(self, ns: u64) -> Self {
        Self(self.0.saturating_add(ns))
    }

    /// Returns the nanoseconds from `earlier` to this time, or 0 if `earlier` is later.
    #[must_use]
    pub fn since_ns(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// Range of bytes of one disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ByteRange {
    pub offset: u64,
    pub length: u64,
}

impl ByteRange {
    /// Returns the first byte after the range.
    #[must_use]
    pub fn end(self) -> u64 {
        self.offset + self.length
    }

    /// Returns the numbers of the blocks that the range touches, completely or in part.
    #[must_use]
    pub fn touched_blocks(self) -> std::ops::Range<u64> {
        if self.length == 0 {
            let b = self.offset / PAGE_SIZE_U64;
            return b..b;
        }
        self.offset / PAGE_SIZE_U64..self.end().div_ceil(PAGE_SIZE_U64)
    }

    /// Returns the numbers of the blocks that the range covers completely.
    #[must_use]
    pub fn covered_blocks(self) -> std::ops::Range<u64> {
        let first = self.offset.div_ceil(PAGE_SIZE_U64);
        first..(self.end() / PAGE_SIZE_U64).max(first)
    }
}
