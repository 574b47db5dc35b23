//! Priorities: which blocks are sampled, under a secret key.
//!
//! The sample is every block whose priority is below a threshold. A priority is 56 bits that are drawn byte by byte:
//! ```text
//! byte j from the top = reverse(byte j of the block from the bottom XOR SipHash-1-3(key, j, the block's bytes above j))
//! ```
//! 1. Two blocks never have the same priority, and each priority is equally likely for a block whose key is not known.
//! 2. Of 256^k aligned neighbours exactly one has a priority below 2^(56 - 8k). So the sample of a run of blocks is as large as
//!    its rate says, and not only on average: this is *stratified* sampling, and what lies together is often used together.
//! 3. Which block of a run is sampled depends on the key and on all higher bytes, through a pseudo-random function: a guest
//!    that does not know the key cannot choose or avoid what is sampled.
//!
//! The top byte decides nearly always, so most blocks cost one SipHash of one word.

use crate::units::{BlockId, BlockNumber, DiskIndex};

/// Number of bytes of a priority, and of a block's packed name: 12 bits of the disk, 40 of the block number, 4 unused.
const BYTES: u32 = 7;
const BNO_BITS: u32 = 40;
const BNO_MASK: u64 = (1 << BNO_BITS) - 1;
/// First number above all priorities: the threshold under which every block is sampled.
pub(super) const ALL: u64 = 1 << (8 * BYTES);

/// Function that gives blocks their priority, with one secret key.
#[derive(Clone)]
pub(super) struct Priorities {
    /// State of SipHash after the first half of the first round, which depends on the key alone.
    state: [u64; 4],
}

impl Priorities {
    /// Returns the function for `key`, which must be random and stay secret.
    pub(super) fn new(key: &[u8; 16]) -> Self {
        let word = |from: usize| u64::from_le_bytes(std::array::from_fn(|i| key[from + i]));
        let [k0, k1] = [word(0), word(8)];
        let mut state: [u64; 4] =
            [0x736f_6d65_7073_6575, 0x646f_7261_6e64_6f6d, 0x6c79_6765_6e65_7261, 0x7465_6462_7974_6573];
        state.iter_mut().zip([k0, k1, k0, k1]).for_each(|(word, key)| *word ^= key);
        first_half(&mut state);
        Self { state }
    }

    /// Returns a word that tells keys apart and reveals nothing of them.
    pub(super) fn key_check(&self) -> u64 {
        self.hash(ALL - 1)
    }

    /// Returns the priority of `block`, or `None` if it is not below `threshold`.
    #[inline]
    pub(super) fn below(&self, block: BlockId, threshold: u64) -> Option<u64> {
        let name = name(block);
        let top = self.byte(name, 0);
        // Most blocks end here.
        if top > threshold >> (8 * (BYTES - 1)) {
            return None;
        }
        let priority = self.complete(name, top);
        (priority < threshold).then_some(priority)
    }

    /// Returns the block that has this priority.
    pub(super) fn block(&self, priority: u64) -> BlockId {
        // From the top byte of the name down: each is drawn with those above it.
        let name = (0..BYTES).rev().fold(0, |above: u64, level| {
            let drawn = self.hash(above | u64::from(level) << 48);
            let [byte, ..] = (priority >> (8 * (BYTES - 1 - level))).to_le_bytes();
            let [low, ..] = drawn.to_le_bytes();
            above << 8 | u64::from(byte.reverse_bits() ^ low)
        });
        let [.., high, low] = (name >> BNO_BITS & 0xfff).to_be_bytes();
        BlockId { disk: DiskIndex(u16::from_be_bytes([high, low])), bno: BlockNumber(name & BNO_MASK) }
    }

    /// Returns the priority whose top byte is `top`.
    fn complete(&self, name: u64, top: u64) -> u64 {
        (1..BYTES).fold(top, |above, level| above << 8 | self.byte(name, level))
    }

    /// Returns the byte that `level` bytes of a priority are above.
    #[inline]
    fn byte(&self, name: u64, level: u32) -> u64 {
        let above = name >> (8 * (level + 1));
        let drawn = self.hash(above | u64::from(level) << 48);
        let [low, ..] = (name >> (8 * level) ^ drawn).to_le_bytes();
        low.reverse_bits().into()
    }

    /// Returns the SipHash-1-3 of the lower seven bytes of `message`.
    #[inline]
    fn hash(&self, message: u64) -> u64 {
        let word = message & (ALL - 1) | u64::from(BYTES) << 56;
        let mut state = self.state;
        state[3] ^= word;
        second_half(&mut state);
        state[0] ^= word;
        state[2] ^= 0xff;
        for _ in 0..3 {
            first_half(&mut state);
            second_half(&mut state);
        }
        state.into_iter().fold(0, |all, part| all ^ part)
    }
}

/// Returns the number of a block among those of all disks.
#[inline]
fn name(block: BlockId) -> u64 {
    (u64::from(block.disk.0) << BNO_BITS | block.bno.0 & BNO_MASK) & (ALL - 1)
}

/// Mixes the words of SipHash's state that do not depend on the message at first.
#[inline]
fn first_half([a, b, ..]: &mut [u64; 4]) {
    *a = a.wrapping_add(*b);
    *b = b.rotate_left(13) ^ *a;
    *a = a.rotate_left(32);
}

/// Completes a round of SipHash.
#[inline]
fn second_half([a, b, c, d]: &mut [u64; 4]) {
    *c = c.wrapping_add(*d);
    *d = d.rotate_left(16) ^ *c;
    *a = a.wrapping_add(*d);
    *d = d.rotate_left(21) ^ *a;
    *c = c.wrapping_add(*b);
    *b = b.rotate_left(17) ^ *c;
    *c = c.rotate_left(32);
}
