//! Conversions of sizes and numbers that cannot fail.

/// Returns a number of 64 bits as one of the machine word, which has as many.
#[must_use]
#[inline]
pub const fn in_memory(size: u64) -> usize {
    usize::from_ne_bytes(size.to_ne_bytes())
}

/// Returns a length of ours, whose limit is below 4 GiB, as the 32 bits that formats and system calls have for it.
///
/// What a guest, a peer or a file says is compared with its limit first.
///
/// # Panics
/// If the length is 4 GiB or more: its limit was not kept.
#[must_use]
#[inline]
pub fn short(length: impl TryInto<u32>) -> u32 {
    match length.try_into() {
        Ok(length) => length,
        Err(_) => panic!("a length of 4 GiB or more, whose limit is below"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_kept() {
        for size in [0, 1, 0x0102_0304_0506_0708, u64::MAX] {
            assert_eq!(in_memory(size) as u64, size);
        }
        assert_eq!(short(u32::MAX as usize), u32::MAX);
    }

    #[test]
    #[should_panic(expected = "4 GiB or more")]
    fn what_is_too_long_is_not_made_shorter() {
        let _ = short(1_u64 << 32);
    }
}
