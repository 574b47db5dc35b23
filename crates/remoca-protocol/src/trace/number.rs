//! Numbers of variable length: LEB128, and zigzag for those with a sign.

/// Appends a number.
pub(super) fn put(bytes: &mut Vec<u8>, mut number: u64) {
    loop {
        let [low, ..] = number.to_le_bytes();
        number >>= 7;
        if number == 0 {
            bytes.push(low & 0x7f);
            return;
        }
        bytes.push(low | 0x80);
    }
}

/// Appends the difference of two numbers, modulo 2^64.
pub(super) fn put_difference(bytes: &mut Vec<u8>, to: u64, from: u64) {
    let difference = to.wrapping_sub(from).cast_signed();
    put(bytes, (difference << 1 ^ difference >> 63).cast_unsigned());
}

/// Takes a number from the front. Returns `None` if there is none, or none of 64 bits.
#[inline]
pub(super) fn take(bytes: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = bytes.split_first()?;
        *bytes = rest;
        let low = u64::from(byte & 0x7f);
        number |= low << shift;
        if byte & 0x80 == 0 {
            return (low << shift >> shift == low).then_some(number);
        }
    }
    None
}

/// Takes a difference, and returns the number that it leads to from `from`.
#[inline]
pub(super) fn take_difference(bytes: &mut &[u8], from: u64) -> Option<u64> {
    let zigzag = take(bytes)?;
    Some(from.wrapping_add(zigzag >> 1 ^ (zigzag & 1).wrapping_neg()))
}
