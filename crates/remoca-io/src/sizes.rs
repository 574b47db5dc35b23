//! Conversions of sizes and numbers that cannot fail.

/// Converts a 64-bit number to `usize`, which has 64 bits too.
#[must_use]
#[inline]
pub const fn in_memory(size: u64) -> usize {
    usize::from_ne_bytes(size.to_ne_bytes())
}

/// Converts a length to the 32 bits that formats and system calls have for it. The length must have a limit below 4
/// GiB.
///
/// A length from a guest, a peer or a file must be compared with its limit first.
///
/// # Panics
/// If the length is 4 GiB or more, because its limit was not enforced.
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
