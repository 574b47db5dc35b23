//! The content of a disk, which is that of nbdkit's pattern plugin: each word of 64 bits is its own place on the disk.

use anyhow::Result;
use std::ops::Range;

const WORDS: u64 = 512;
/// Number of words checked in each block, the first always among them.
const SAMPLES: u64 = 8;
/// One block in this many is compared as a whole.
const WHOLE_EVERY: u32 = 64;

/// Returns the content of the disk in this range of bytes.
pub fn of(bytes: Range<u64>) -> Vec<u8> {
    (bytes.start / 8..bytes.end / 8).flat_map(|at| (at * 8).to_be_bytes()).collect()
}

/// Returns whether a block has the right content, of which `word_at` returns a word. Blocks from `blocks` on are zero.
pub fn is_right(block: u64, blocks: u64, sequence: u32, word_at: impl Fn(u64) -> Result<u64>) -> Result<bool> {
    let step = if sequence.is_multiple_of(WHOLE_EVERY) { 1 } else { WORDS / SAMPLES };
    let shift = u64::from(sequence) % step;
    for index in (0..WORDS).step_by(usize::try_from(step)?) {
        let index = if index == 0 { 0 } else { index + shift };
        let expected = if block < blocks { (block * WORDS + index) * 8 } else { 0 };
        if word_at(index)? != expected {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(block: u64, blocks: u64, sequence: u32, bytes: &[u8]) -> bool {
        let word = |index: u64| {
            let at = usize::try_from(index)? * 8;
            Ok(u64::from_be_bytes(bytes[at..at + 8].try_into()?))
        };
        is_right(block, blocks, sequence, word).unwrap()
    }

    #[test]
    fn another_block_is_noticed_at_once_and_a_wrong_byte_in_time() {
        let (right, other) = (of(7 * 4096..8 * 4096), of(8 * 4096..9 * 4096));
        let mut poisoned = right.clone();
        poisoned[..8].fill(0xa5);
        for sequence in 0..200 {
            assert!(check(7, 100, sequence, &right));
            assert!(!check(7, 100, sequence, &other));
            assert!(!check(7, 100, sequence, &poisoned));
            assert!(!check(7, 100, sequence, &[0; 4096]));
            assert!(check(100, 100, sequence, &[0; 4096]));
            assert!(!check(100, 100, sequence, &right));
        }
        let mut one_byte = right;
        one_byte[1234] ^= 1;
        assert!((0..64).any(|sequence| !check(7, 100, sequence, &one_byte)));
    }
}
