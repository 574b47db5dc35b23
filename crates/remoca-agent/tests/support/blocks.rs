//! Blocks by content: files whose blocks all differ, and the set of all blocks of an image.

use std::collections::HashSet;
use std::fs::File;
use std::hash::{DefaultHasher, Hasher};
use std::io::{BufWriter, Read, Write};
use std::path::Path;

pub const BLOCK_BYTES: usize = 4096;
const CHUNK_BYTES: usize = 1 << 20;

/// Returns word `number` of a sequence that does not repeat (splitmix64).
fn distinct_word(number: u64) -> u64 {
    let mut word = (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// Fills the file with `mib` MiB of blocks that all differ.
pub fn write_distinct(path: &Path, mib: usize) {
    let mut file = BufWriter::with_capacity(CHUNK_BYTES, File::create(path).unwrap());
    for number in 0..(mib * CHUNK_BYTES / 8) as u64 {
        file.write_all(&distinct_word(number).to_le_bytes()).unwrap();
    }
    file.flush().unwrap();
}

/// Returns the first word of block `number` of such a file.
pub fn first_word(number: usize) -> u64 {
    distinct_word((number * BLOCK_BYTES / 8) as u64)
}

/// Returns a hash that suffices to distinguish the blocks of a test.
fn fingerprint(block: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(block);
    hasher.finish()
}

#[derive(Default)]
pub struct BlockSet(HashSet<u64>);

impl BlockSet {
    pub fn add_image(&mut self, path: &Path) {
        let mut file = File::open(path).unwrap();
        let mut chunk = vec![0; CHUNK_BYTES];
        loop {
            let mut filled = 0;
            while filled < chunk.len() {
                match file.read(&mut chunk[filled..]).unwrap() {
                    0 => break,
                    count => filled += count,
                }
            }
            self.0.extend(chunk[..filled].chunks_exact(BLOCK_BYTES).map(fingerprint));
            if filled < chunk.len() {
                return;
            }
        }
    }

    pub fn contains(&self, block: &[u8]) -> bool {
        self.0.contains(&fingerprint(block))
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
