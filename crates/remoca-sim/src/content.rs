//! What sectors hold: a number for each content, which stands for 512 bytes, and says where the content came from.
//!
//! The model keeps numbers; bytes are made only where the engine looks at them.

use crate::random::Random;
use std::fmt;

/// Bytes in a sector.
pub const SECTOR_SIZE: usize = 512;
/// Sectors in a block.
pub const BLOCK_SECTORS: usize = 8;

const KIND_SHIFT: u32 = 56;
const INITIAL: u64 = 1;
const WRITTEN: u64 = 2;
const TEMPLATE: u64 = 3;
const GARBAGE: u64 = 4;
const UNSET: u64 = 5;

/// The content of one sector.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sector(u64);

/// The content of one block, or page.
pub type Block = [Sector; BLOCK_SECTORS];

impl Sector {
    /// All bytes zero.
    pub const ZERO: Self = Self(0);
    /// In a buffer that nobody filled.
    pub const UNFILLED: Self = Self(UNSET << KIND_SHIFT);

    /// What the disk held at the beginning.
    #[must_use]
    pub fn initial(disk: u16, sector: usize) -> Self {
        Self(INITIAL << KIND_SHIFT | u64::from(disk) << 32 | sector as u64)
    }

    /// What the write of step `step` puts into the sector at `index` of its range: found nowhere else.
    #[must_use]
    pub fn written(step: usize, index: usize) -> Self {
        Self(WRITTEN << KIND_SHIFT | (step as u64) << 16 | index as u64)
    }

    /// Content that is written to many places.
    #[must_use]
    pub fn template(class: u64) -> Self {
        Self(TEMPLATE << KIND_SHIFT | class)
    }

    /// Content that no disk ever held.
    pub fn garbage(random: &mut Random) -> Self {
        Self(GARBAGE << KIND_SHIFT | random.bits() >> 16)
    }

    /// Whether only one place of one disk can hold this.
    #[must_use]
    pub fn is_unique(self) -> bool {
        matches!(self.0 >> KIND_SHIFT, INITIAL | WRITTEN)
    }
}

impl fmt::Display for Sector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rest = self.0 & ((1 << KIND_SHIFT) - 1);
        match self.0 >> KIND_SHIFT {
            INITIAL => write!(f, "initial:{}.{}", rest >> 32, rest & 0xffff_ffff),
            WRITTEN => write!(f, "step{}.{}", rest >> 16, rest & 0xffff),
            TEMPLATE => write!(f, "template{rest}"),
            GARBAGE => write!(f, "garbage:{rest:x}"),
            UNSET => write!(f, "unfilled"),
            _ => write!(f, "zero"),
        }
    }
}

impl fmt::Debug for Sector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The bytes of `sectors`.
#[must_use]
pub fn bytes(sectors: &[Sector]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(sectors.len() * SECTOR_SIZE);
    for sector in sectors {
        let word = sector.0.to_le_bytes();
        for _ in 0..SECTOR_SIZE / word.len() {
            bytes.extend_from_slice(&word);
        }
    }
    bytes
}

/// The block at sector `at` of a buffer.
#[must_use]
pub fn block_at(sectors: &[Sector], at: usize) -> Block {
    std::array::from_fn(|i| sectors[at + i])
}

/// A block in short: one content if all sectors have the same.
#[must_use]
pub fn describe(block: &[Sector]) -> String {
    match block {
        [] => "nothing".into(),
        [first, rest @ ..] if rest.iter().all(|s| s == first) => first.to_string(),
        [first, .., last] => format!("{first}..{last}"),
        [only] => only.to_string(),
    }
}
