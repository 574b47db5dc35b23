//! Content of sectors: a number for each content, which stands for 512 bytes and tells where the content came from.
//!
//! The model keeps numbers; bytes are made only where the engine looks at them.

use crate::random::Random;
use std::fmt;

/// Number of bytes in a sector.
pub const SECTOR_SIZE: usize = 512;
/// Number of sectors in a block.
pub const BLOCK_SECTORS: usize = 8;

const KIND_SHIFT: u32 = 56;
const INITIAL: u64 = 1;
const WRITTEN: u64 = 2;
const TEMPLATE: u64 = 3;
const GARBAGE: u64 = 4;
const UNSET: u64 = 5;
const SWAP_START: u64 = 6;
const SWAP_END: u64 = 7;

/// The content of one sector.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sector(u64);

/// The content of one block, or page.
pub type Block = [Sector; BLOCK_SECTORS];

impl Sector {
    /// All bytes zero.
    pub const ZERO: Self = Self(0);
    /// Content of a buffer that was not filled.
    pub const UNFILLED: Self = Self(UNSET << KIND_SHIFT);

    /// Returns the initial content of a sector of a disk.
    #[must_use]
    pub fn initial(disk: u16, sector: usize) -> Self {
        Self(INITIAL << KIND_SHIFT | u64::from(disk) << 32 | sector as u64)
    }

    /// Returns the content that the write of step `step` puts into the sector at `index` of its range. It occurs
    /// nowhere else.
    #[must_use]
    pub fn written(step: usize, index: usize) -> Self {
        Self(WRITTEN << KIND_SHIFT | (step as u64) << 16 | index as u64)
    }

    /// Returns content that is written to many places; each class has its own.
    #[must_use]
    pub fn template(class: u64) -> Self {
        Self(TEMPLATE << KIND_SHIFT | class)
    }

    /// Returns the first block of a swap area whose last page is `last`.
    #[must_use]
    pub fn swap_header(last: u32) -> Block {
        let mut block = [Self::ZERO; BLOCK_SECTORS];
        block[2] = Self(SWAP_START << KIND_SHIFT | u64::from(last));
        block[BLOCK_SECTORS - 1] = Self(SWAP_END << KIND_SHIFT);
        block
    }

    /// Returns content that no disk ever held.
    pub fn garbage(random: &mut Random) -> Self {
        Self(GARBAGE << KIND_SHIFT | random.bits() >> 16)
    }

    /// Returns whether only one sector of one disk can hold this content.
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
            SWAP_START => write!(f, "swap:{rest}"),
            SWAP_END => write!(f, "swap"),
            _ => write!(f, "zero"),
        }
    }
}

impl fmt::Debug for Sector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Returns the content of 512 bytes, or [`Sector::UNFILLED`] if they are not a valid content.
#[must_use]
pub fn sector_of(bytes: &[u8]) -> Sector {
    let (words, _) = bytes.as_chunks::<8>();
    match words {
        [first, rest @ ..] if rest.iter().all(|word| word == first) => Sector(u64::from_le_bytes(*first)),
        _ => Sector::UNFILLED,
    }
}

/// Returns the contents of `bytes`, sector by sector.
#[must_use]
pub fn sectors_of(bytes: &[u8]) -> Vec<Sector> {
    bytes.chunks(SECTOR_SIZE).map(sector_of).collect()
}

/// Returns the bytes of `sectors`.
#[must_use]
pub fn bytes(sectors: &[Sector]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(sectors.len() * SECTOR_SIZE);
    for sector in sectors {
        let word = sector.0.to_le_bytes();
        let start = bytes.len();
        for _ in 0..SECTOR_SIZE / word.len() {
            bytes.extend_from_slice(&word);
        }
        match sector.0 >> KIND_SHIFT {
            SWAP_START => {
                bytes[start..start + 4].copy_from_slice(&1_u32.to_le_bytes());
                bytes[start + 4..start + 8].copy_from_slice(&word[..4]);
            }
            SWAP_END => bytes[start + SECTOR_SIZE - 10..].copy_from_slice(b"SWAPSPACE2"),
            _ => {}
        }
    }
    bytes
}

/// Returns the block at sector `at` of a buffer.
#[must_use]
pub fn block_at(sectors: &[Sector], at: usize) -> Block {
    std::array::from_fn(|i| sectors[at + i])
}

/// Describes a block briefly: by one content if all sectors have the same.
#[must_use]
pub fn describe(block: &[Sector]) -> String {
    match block {
        [] => "nothing".into(),
        [first, rest @ ..] if rest.iter().all(|s| s == first) => first.to_string(),
        [first, .., last] => format!("{first}..{last}"),
        [only] => only.to_string(),
    }
}
