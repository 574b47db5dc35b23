//! Blocks by content: files whose blocks all differ, and the set of all blocks of an image.

use std::collections::HashSet;
use std::fs::File;
use std::hash::{DefaultHasher, Hasher};
use std::io::{BufWriter, Read, Write};
use std::path::Path;

pub const BLOCK_BYTES: usize = 4096;
const CHUNK_BYTES: usize = 1 << 20;

/// Fills the file with `mib` MiB of a sequence that does not repeat (splitmix64).
pub fn write_distinct(path: &Path, mib: usize) {
    let mut file = BufWriter::with_capacity(CHUNK_BYTES, File::create(path).unwrap());
    let mut state = 0u64;
    for _ in 0..mib * CHUNK_BYTES / 8 {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = state;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        file.write_all(&(word ^ (word >> 31)).to_le_bytes()).unwrap();
    }
    file.flush().unwrap();
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
