//! The content of the benchmark's pages, and its check.
//!
//! Each 64-bit word depends on the number of its page and its place in the page. So a page with another number, a
//! shifted page and a torn page differ in every word.

use remoca_protocol::PAGE_SIZE;

const WORDS: u32 = 512;
const _: () = assert!(WORDS as usize * 8 == PAGE_SIZE);
/// Number of words checked in each page.
const SAMPLES: u32 = 8;
/// One page in this many is compared as a whole.
const WHOLE_EVERY: u32 = 64;

fn word(page: u32, index: u32) -> u64 {
    let mut x = (u64::from(page) * u64::from(WORDS) + u64::from(index)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    x ^ (x >> 29)
}

/// Fills `content` with the content of page number `page`.
pub(crate) fn fill(page: u32, content: &mut [u8; PAGE_SIZE]) {
    for (index, bytes) in (0..).zip(content.chunks_exact_mut(8)) {
        bytes.copy_from_slice(&word(page, index).to_le_bytes());
    }
}

/// Returns whether `content` is right for page number `page`. Compares some words of each page, and all words of some
/// pages.
pub(crate) fn check(page: u32, content: &[u8], sequence: u32) -> bool {
    if sequence.is_multiple_of(WHOLE_EVERY) {
        return check_whole(page, content);
    }
    let step = WORDS / SAMPLES;
    content.len() == PAGE_SIZE
        && (0..SAMPLES).all(|sample| {
            let index = sample * step + sequence % step;
            word_at(content, index) == Some(word(page, index))
        })
}

/// Returns whether each byte of `content` is right.
pub(crate) fn check_whole(page: u32, content: &[u8]) -> bool {
    content.len() == PAGE_SIZE && (0..WORDS).all(|index| word_at(content, index) == Some(word(page, index)))
}

fn word_at(content: &[u8], index: u32) -> Option<u64> {
    let start = index as usize * 8;
    content.get(start..start + 8)?.try_into().ok().map(u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_pages_are_noticed_by_every_sample() {
        let mut right = [0; PAGE_SIZE];
        let mut other = [0; PAGE_SIZE];
        fill(7, &mut right);
        fill(8, &mut other);
        let mut shifted = right;
        shifted.rotate_left(8);
        for sequence in 0..200 {
            assert!(check(7, &right, sequence));
            assert!(!check(7, &other, sequence));
            assert!(!check(7, &shifted, sequence));
            assert!(!check(7, &right[..4095], sequence));
            assert!(!check(7, &[0; PAGE_SIZE], sequence));
        }
        let mut one_bit = right;
        one_bit[1234] ^= 1;
        assert!(!check_whole(7, &one_bit));
        assert!((0..64).any(|sequence| !check(7, &one_bit, sequence)));
    }
}
