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
//! The top byte decides nearly always, and 256 neighbours share its SipHash; 65,536 neighbours share all others. What was drawn last
//! for a group is kept, so blocks of a group that was asked for lately cost no SipHash at all. That changes no priority.

use crate::units::{BlockId, BlockNumber, DiskIndex};

/// Number of bytes of a priority, and of a block's packed name: 12 bits of the disk, 40 of the block number, 4 unused.
const BYTES: u32 = 7;
const BNO_BITS: u32 = 40;
const BNO_MASK: u64 = (1 << BNO_BITS) - 1;
/// First number above all priorities: the threshold under which every block is sampled.
pub(super) const ALL: u64 = 1 << (8 * BYTES);

/// Bits of the number of groups of 256 blocks of which the drawn byte is kept: as many as 512 MiB have.
pub(super) const NEAR_BITS: u32 = 9;
/// Bits of the number of groups of 65,536 blocks of which all other drawn bytes are kept: as many as 4 GiB have.
pub(super) const FAR_BITS: u32 = 4;
/// Mark of a place for a group that is empty. No group has this number.
const EMPTY: u64 = u64::MAX;

/// Each byte with its bits in reverse order: processors without an instruction for that take ten.
const REVERSED: [u8; 256] = {
    let mut bytes = [0; 256];
    let mut byte = 0_u8;
    while byte < u8::MAX {
        byte += 1;
        bytes[byte as usize] = byte.reverse_bits();
    }
    bytes
};

/// Function that gives blocks their priority, with one secret key.
#[derive(Clone)]
pub(super) struct Priorities {
    /// State of SipHash after the first half of the first round, which depends on the key alone.
    state: [u64; 4],
    /// Groups of 256 blocks, each with the byte that was drawn for its blocks: `group << 8 | byte`.
    near: Box<[u64; 1 << NEAR_BITS]>,
    /// Groups of 65,536 blocks, each with the other bytes that were drawn, at their places in a block's packed name.
    far: Box<[(u64, u64); 1 << FAR_BITS]>,
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
        let (near, far) = (Box::new([EMPTY; 1 << NEAR_BITS]), Box::new([(EMPTY, 0); 1 << FAR_BITS]));
        Self { state, near, far }
    }

    /// Returns a word that tells keys apart and reveals nothing of them.
    pub(super) fn key_check(&self) -> u64 {
        self.hash(ALL - 1)
    }

    /// Returns the bytes that the function takes beside itself.
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.near) + size_of_val(&*self.far)
    }

    /// Returns whether what is kept tells that the block of this name has no priority below `threshold`, as it does of most. [`Self::find`] tells
    /// of the others.
    #[inline]
    pub(super) fn leaves_out(&self, name: u64, threshold: u64) -> bool {
        let group = name >> 8;
        let kept = self.near[place(group, NEAR_BITS)];
        kept >> 8 == group && top(name, kept) > threshold >> (8 * (BYTES - 1))
    }

    /// Returns the priority of the block of this name, or `None` if it is not below `threshold`. Keeps what was drawn.
    pub(super) fn find(&mut self, name: u64, threshold: u64) -> Option<u64> {
        let near = self.drawn_near(name >> 8);
        if top(name, near) > threshold >> (8 * (BYTES - 1)) {
            return None;
        }
        let drawn = self.drawn_far(name >> 16) | near;
        // The lowest byte of the name is the top one of the priority, and so on.
        let priority = (name ^ drawn).reverse_bits() >> (u64::BITS - 8 * BYTES);
        (priority < threshold).then_some(priority)
    }

    /// Returns the byte that is drawn for the top byte of the priorities of a group of 256 blocks.
    fn drawn_near(&mut self, group: u64) -> u64 {
        let at = place(group, NEAR_BITS);
        let kept = self.near[at];
        if kept >> 8 == group {
            return kept & 0xff;
        }
        let drawn = self.hash(group) & 0xff;
        self.near[at] = group << 8 | drawn;
        drawn
    }

    /// Returns what is drawn for all other bytes of the priorities of a group of 65,536 blocks.
    fn drawn_far(&mut self, group: u64) -> u64 {
        let at = place(group, FAR_BITS);
        let (kept, drawn) = self.far[at];
        if kept == group {
            return drawn;
        }
        let byte = |level: u32| (self.hash(group >> (8 * (level - 1)) | u64::from(level) << 48) & 0xff) << (8 * level);
        let drawn = (1..BYTES).map(byte).sum();
        self.far[at] = (group, drawn);
        drawn
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
        BlockId { disk: disk_of(name), bno: BlockNumber(name & BNO_MASK) }
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

/// Returns the top byte of the priority of the block of this name, of which the lowest byte of `drawn` is drawn.
#[inline]
fn top(name: u64, drawn: u64) -> u64 {
    let [top, ..] = (name ^ drawn).to_le_bytes();
    REVERSED[usize::from(top)].into()
}

/// Returns the only place of a group among 2 to the power of `bits`: another one for each of as many neighbours.
#[inline]
pub(super) fn place(group: u64, bits: u32) -> usize {
    // The disk is in bits far above those of the place: the product brings it down.
    let place = group.wrapping_add((group >> 20).wrapping_mul(0x9e37_79b9) >> 12) & ((1 << bits) - 1);
    #[expect(clippy::cast_possible_truncation, reason = "the mask leaves few bits")]
    let place = place as usize;
    place
}

/// Returns the number of a block among those of all disks, which has 52 bits.
#[inline]
pub(super) fn name(block: BlockId) -> u64 {
    (u64::from(block.disk.0) << BNO_BITS | block.bno.0 & BNO_MASK) & (ALL - 1)
}

/// Returns the disk of the block of this name.
#[inline]
pub(super) fn disk_of(name: u64) -> DiskIndex {
    let [.., high, low] = (name >> BNO_BITS & 0xfff).to_be_bytes();
    DiskIndex(u16::from_be_bytes([high, low]))
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
