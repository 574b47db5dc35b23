//! What a disk must hold, and random requests with the answers they may have.

use super::random::Random;
use std::collections::VecDeque;
use std::ops::Range;

pub const BLOCK: usize = 4096;
/// Number of old contents that are remembered, for the guest to lie with.
const STALE_MAX: usize = 512;
/// Number of blocks that the guest is assumed to hold in its page cache.
const HELD_MAX: usize = 1024;
/// The longest read or write.
const LENGTH_MAX: usize = 64 << 10;

/// What a request does to its range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    Read,
    Write(Vec<u8>),
    WriteZeroes { unmap: bool },
    Discard,
    Flush,
}

/// A request to one disk; the range is empty for a flush.
#[derive(Clone, Debug)]
pub struct Request {
    pub action: Action,
    pub range: Range<usize>,
}

/// The bytes of one disk, as its guest knows them.
pub struct Model {
    pub bytes: Vec<u8>,
    sector: usize,
    /// Numbers of blocks that the guest read or wrote as a whole recently.
    held: VecDeque<usize>,
    stale: VecDeque<Vec<u8>>,
}

impl Model {
    /// Returns a model of `blocks` blocks: some empty, some with equal content, most random.
    pub fn new(blocks: usize, sector: usize, random: &mut Random) -> Self {
        let twins: Vec<Vec<u8>> = (0..8).map(|_| random.bytes(BLOCK)).collect();
        let mut bytes = vec![0; blocks * BLOCK];
        for block in bytes.chunks_mut(BLOCK) {
            match random.below(8) {
                0 => {}
                1 => block.copy_from_slice(&twins[random.below(twins.len())]),
                _ => random.fill(block),
            }
        }
        Self { bytes, sector, held: VecDeque::new(), stale: VecDeque::new() }
    }

    /// Gives the disk another size. What is new is zero.
    pub fn resize(&mut self, bytes: usize) {
        self.bytes.resize(bytes, 0);
        self.held.retain(|number| (number + 1) * BLOCK <= bytes);
    }

    pub fn block(&self, number: usize) -> &[u8] {
        &self.bytes[number * BLOCK..(number + 1) * BLOCK]
    }

    /// Returns a block that the guest has in its page cache, or `None` if it has none.
    pub fn held_block(&self, random: &mut Random) -> Option<usize> {
        (!self.held.is_empty()).then(|| self.held[random.below(self.held.len())])
    }

    /// Returns what some block held before it was written, or `None` if no block was written.
    pub fn stale_content(&self, random: &mut Random) -> Option<Vec<u8>> {
        (!self.stale.is_empty()).then(|| self.stale[random.below(self.stale.len())].clone())
    }

    /// Returns requests that may be in flight at once: no two modifications overlap.
    pub fn requests(&self, count: usize, random: &mut Random) -> Vec<Request> {
        let mut requests: Vec<Request> = Vec::new();
        while requests.len() < count {
            let range = self.range(random);
            let action = match random.below(100) {
                0..64 => Action::Read,
                64..90 => Action::Write(self.new_content(range.len(), random)),
                90..93 => Action::WriteZeroes { unmap: random.one_in(2) },
                93..96 => Action::Discard,
                _ => Action::Flush,
            };
            let request = match action {
                Action::Flush => Request { action, range: 0..0 },
                _ => Request { action, range },
            };
            let clashes = |other: &&Request| other.modifies() && request.modifies() && other.overlaps(&request.range);
            if requests.iter().find(clashes).is_none() {
                requests.push(request);
            }
        }
        requests
    }

    /// Returns a range: mostly whole blocks, mostly in the first quarter of the disk, so that blocks are used
    /// repeatedly.
    fn range(&self, random: &mut Random) -> Range<usize> {
        let blocks = self.bytes.len() / BLOCK;
        let first = if random.one_in(4) { random.below(blocks) } else { random.below(blocks / 4) } * BLOCK;
        let (start, length) = match random.below(8) {
            0 => {
                let start = first + random.below(BLOCK / self.sector) * self.sector;
                (start, (1 + random.below(LENGTH_MAX / self.sector).min(24)) * self.sector)
            }
            1 => (first, (1 + random.below(LENGTH_MAX / BLOCK)) * BLOCK),
            _ => (first, BLOCK),
        };
        start..(start + length).min(self.bytes.len())
    }

    /// Returns random bytes, or a copy of other data of the disk.
    fn new_content(&self, length: usize, random: &mut Random) -> Vec<u8> {
        let start = random.below((self.bytes.len() - length) / BLOCK + 1) * BLOCK;
        if random.one_in(5) { self.bytes[start..start + length].to_vec() } else { random.bytes(length) }
    }

    /// Returns the first wrong byte that a read of `range` got, or `None` if all bytes are right. A right byte is the
    /// old one, or what one of the concurrent `requests` makes of it.
    pub fn first_wrong_byte(&self, range: &Range<usize>, got: &[u8], requests: &[Request]) -> Option<usize> {
        if self.bytes[range.clone()] == *got {
            return None;
        }
        range.clone().zip(got).find_map(|(at, &byte)| {
            let right = byte == self.bytes[at] || requests.iter().any(|request| request.may_make(at, byte));
            (!right).then_some(at)
        })
    }

    /// Applies `request`, which has completed and is no longer in flight. For a discard, see [`Self::adopt`].
    pub fn apply(&mut self, request: &Request) {
        let range = request.range.clone();
        let covered = range.start.div_ceil(BLOCK)..range.end / BLOCK;
        if request.modifies() {
            self.stale.extend(covered.clone().map(|number| self.bytes[number * BLOCK..][..BLOCK].to_vec()));
            let excess = self.stale.len().saturating_sub(STALE_MAX);
            self.stale.drain(..excess);
        }
        match &request.action {
            Action::Write(data) => self.bytes[range].copy_from_slice(data),
            Action::WriteZeroes { .. } => self.bytes[range].fill(0),
            Action::Read | Action::Flush | Action::Discard => {}
        }
        if let Action::Read | Action::Write(_) = request.action {
            self.held.extend(covered);
            let excess = self.held.len().saturating_sub(HELD_MAX);
            self.held.drain(..excess);
        }
    }

    /// Adopts what the disk returns for a discarded range: each byte is what it was, or zero, and then stays. Returns
    /// the first byte that is neither, or `None` if there is none.
    pub fn adopt(&mut self, range: &Range<usize>, got: &[u8]) -> Option<usize> {
        let wrong = range.clone().zip(got).find(|&(at, &byte)| byte != 0 && byte != self.bytes[at]);
        self.bytes[range.clone()].copy_from_slice(got);
        wrong.map(|(at, _)| at)
    }
}

impl Request {
    pub fn modifies(&self) -> bool {
        !matches!(self.action, Action::Read | Action::Flush)
    }

    fn overlaps(&self, range: &Range<usize>) -> bool {
        self.range.start < range.end && range.start < self.range.end
    }

    fn may_make(&self, at: usize, byte: u8) -> bool {
        self.range.contains(&at)
            && match &self.action {
                Action::Write(data) => data[at - self.range.start] == byte,
                Action::WriteZeroes { .. } | Action::Discard => byte == 0,
                Action::Read | Action::Flush => false,
            }
    }
}
