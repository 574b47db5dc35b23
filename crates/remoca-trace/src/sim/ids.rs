//! Dense numbers for the blocks of a trace, in the order in which they appear.

use std::hash::{BuildHasher, RandomState};

/// Key of a block: its disk, above 40 bits of its number.
pub(super) type Key = u64;

/// Number of a block.
pub(super) type Id = u32;

/// Least number of entries of the table.
const TABLE_MIN: usize = 1 << 10;

/// Error of a block that is one more than may be followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// Numbers of blocks. An entry of the table has a part of the key's hash, and the number plus one.
pub(super) struct BlockIds {
    table: Box<[u64]>,
    keys: Vec<Key>,
    /// Secret numbers of the hash, so that no trace can be made to collide.
    seeds: [u64; 2],
    limit: usize,
}

impl BlockIds {
    /// Returns an empty set of at most `limit` blocks.
    pub(super) fn new(limit: u32) -> Self {
        let random = RandomState::new();
        let seeds = [random.hash_one(0), random.hash_one(1) | 1];
        Self { table: vec![0; TABLE_MIN].into(), keys: Vec::new(), seeds, limit: limit as usize }
    }

    /// Returns the number of blocks.
    pub(super) fn len(&self) -> usize {
        self.keys.len()
    }

    /// Returns the block with this number.
    #[inline]
    pub(super) fn key(&self, id: Id) -> Key {
        self.keys[id as usize]
    }

    /// Returns the bytes that the numbers take.
    pub(super) fn bytes(&self) -> usize {
        self.table.len() * 8 + self.keys.capacity() * 8
    }

    #[inline]
    fn hash(&self, key: Key) -> u64 {
        let product = u128::from(key ^ self.seeds[0]).wrapping_mul(u128::from(self.seeds[1]));
        let [low, high] =
            [product, product >> 64].map(|half| (half & u128::from(u64::MAX)).try_into().unwrap_or(0_u64));
        low ^ high
    }

    /// Returns the place of a key in the table: its entry, or the free one where it belongs.
    #[inline]
    fn place(&self, key: Key) -> (usize, u64) {
        let hash = self.hash(key);
        let mask = self.table.len() - 1;
        let tag = hash & !0xffff_ffff;
        let [a, b, c, d, ..] = hash.to_le_bytes();
        let mut at = u32::from_le_bytes([a, b, c, d]) as usize & mask;
        loop {
            let entry = self.table[at];
            if entry == 0 || (entry ^ tag) >> 32 == 0 && self.keys[id_of(entry) as usize] == key {
                return (at, tag);
            }
            at = (at + 1) & mask;
        }
    }

    /// Returns the number of a block, if it has appeared.
    pub(super) fn find(&self, key: Key) -> Option<Id> {
        let (at, _) = self.place(key);
        let entry = self.table[at];
        (entry != 0).then(|| id_of(entry))
    }

    /// Returns the number of a block, which is a new one if it has not appeared.
    ///
    /// # Errors
    /// If there are as many blocks as may be.
    #[inline]
    pub(super) fn id(&mut self, key: Key) -> Result<Id, Full> {
        let (at, tag) = self.place(key);
        let entry = self.table[at];
        if entry != 0 {
            return Ok(id_of(entry));
        }
        self.add(key, at, tag)
    }

    #[cold]
    fn add(&mut self, key: Key, at: usize, tag: u64) -> Result<Id, Full> {
        let id = self.keys.len();
        if id >= self.limit {
            return Err(Full);
        }
        self.table[at] = tag | (id as u64 + 1);
        self.keys.push(key);
        // At most five eighths are taken.
        if self.keys.len() * 8 > self.table.len() * 5 {
            self.grow();
        }
        Ok(id_of(id as u64 + 1))
    }

    fn grow(&mut self) {
        let length = self.table.len() * 2;
        // The old one first: the keys say all that it says.
        self.table = Box::default();
        self.table = vec![0; length].into();
        for (id, key) in (0_u64..).zip(&self.keys) {
            let hash = self.hash(*key);
            let [a, b, c, d, ..] = hash.to_le_bytes();
            let mut at = u32::from_le_bytes([a, b, c, d]) as usize & (length - 1);
            while self.table[at] != 0 {
                at = (at + 1) & (length - 1);
            }
            self.table[at] = hash & !0xffff_ffff | (id + 1);
        }
    }
}

#[inline]
fn id_of(entry: u64) -> Id {
    let [a, b, c, d, ..] = entry.to_le_bytes();
    u32::from_le_bytes([a, b, c, d]) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_block_has_one_number() {
        let mut ids = BlockIds::new(100_000);
        let key = |number: u64| number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 12;
        for round in 0..2 {
            for number in 0..50_000 {
                assert_eq!(ids.id(key(number)).map(u64::from), Ok(number), "{round}");
            }
        }
        assert!((0..50_000).all(|number| ids.find(key(number)).map(u64::from) == Some(number)));
        assert_eq!((ids.find(key(50_001)), ids.len(), ids.key(7)), (None, 50_000, key(7)));
    }

    #[test]
    fn there_are_no_more_than_may_be() {
        let mut ids = BlockIds::new(2);
        assert_eq!([5, 6, 7, 5].map(|key| ids.id(key)), [Ok(0), Ok(1), Err(Full), Ok(0)]);
        assert_eq!((ids.find(7), ids.len()), (None, 2));
    }
}
