//! The content of one 512-byte sector: its identity, and bytes derived from it.
//!
//! ```text
//!  0       8      16      24       32        40         48                512
//!  | magic | seed | file  | offset | version | checksum | bytes made from |
//!  |       |      |       |        |         |          | all of the left |
//! ```
//!
//! Little-endian words. The checksum covers the other 63 words in order, so any changed, moved or old byte is detected.
//! Since the content can be regenerated, a fault can be identified. 512 bytes, where the papers sign every 1 KiB,
//! because that is the smallest write of a disk: a torn or misplaced sector is detected as such.

use std::{fmt, ops::RangeInclusive};

use super::pattern::mix;

pub const SECTOR_SIZE: usize = 512;

const MAGIC: u64 = u64::from_le_bytes(*b"remocaS1");
const WORD_COUNT: usize = SECTOR_SIZE / 8;
const HEADER_WORD_COUNT: usize = 6;
const CHECKSUM_INDEX: usize = 5;

/// A sector of a data set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub seed: u64,
    pub file: u64,
    /// Offset in the file, in bytes.
    pub offset: u64,
}

/// The wrong content of a sector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wrong {
    Zeroes,
    NoSignature { first_bytes: [u8; 16] },
    OtherPlace { found: Place, version: u64 },
    Version { found: u64, expected: RangeInclusive<u64> },
    Damaged { version: u64, first: usize, last: usize, count: usize },
}

/// Writes the sector's content for a version.
pub fn fill(sector: &mut [u8; SECTOR_SIZE], place: Place, version: u64) {
    let header = [MAGIC, place.seed, place.file, place.offset, version];
    let key = header.iter().fold(0, |key, &word| mix(key ^ word));
    let mut words = [0; WORD_COUNT];
    words[..header.len()].copy_from_slice(&header);
    let mut step = key;
    for word in &mut words[HEADER_WORD_COUNT..] {
        step = step.wrapping_add(0x9e37_79b9_7f4a_7c15);
        *word = mix(step);
    }
    words[CHECKSUM_INDEX] = checksum(&words);
    for (bytes, word) in sector.as_chunks_mut::<8>().0.iter_mut().zip(words) {
        *bytes = word.to_le_bytes();
    }
}

/// Checks a sector. Returns its version if it is right, or an error that describes its content.
pub fn check(sector: &[u8; SECTOR_SIZE], place: Place, versions: RangeInclusive<u64>) -> Result<u64, Wrong> {
    let mut words = [0; WORD_COUNT];
    for (word, bytes) in words.iter_mut().zip(sector.as_chunks::<8>().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    let [magic, seed, file, offset, version, sum, ..] = words;
    let found = Place { seed, file, offset };
    if magic == MAGIC && found == place && versions.contains(&version) && sum == checksum(&words) {
        return Ok(version);
    }
    Err(describe(sector, &words, place, versions))
}

fn describe(
    sector: &[u8; SECTOR_SIZE],
    words: &[u64; WORD_COUNT],
    place: Place,
    versions: RangeInclusive<u64>,
) -> Wrong {
    let [magic, seed, file, offset, version, ..] = *words;
    let found = Place { seed, file, offset };
    if sector.iter().all(|&byte| byte == 0) {
        return Wrong::Zeroes;
    }
    if magic != MAGIC {
        let first_bytes = sector.first_chunk().copied().unwrap_or_default();
        return Wrong::NoSignature { first_bytes };
    }
    // With a wrong checksum, the header itself may be damaged. It is trusted if that explains the most.
    let mut expected = [0; SECTOR_SIZE];
    fill(&mut expected, found, version);
    let intact = expected == *sector;
    if intact && found != place {
        return Wrong::OtherPlace { found, version };
    }
    if intact {
        return Wrong::Version { found: version, expected: versions };
    }
    fill(&mut expected, place, version);
    let mut different = (0..SECTOR_SIZE).filter(|&index| expected[index] != sector[index]);
    let first = different.next().unwrap_or_default();
    let (count, last) = different.fold((1, first), |(count, _), index| (count + 1, index));
    Wrong::Damaged { version, first, last, count }
}

fn checksum(words: &[u64; WORD_COUNT]) -> u64 {
    let mut sum: u64 = 0x243f_6a88_85a3_08d3;
    for (index, &word) in words.iter().enumerate() {
        if index != CHECKSUM_INDEX {
            sum = (sum ^ word).wrapping_mul(0x9fb2_1c65_1e98_df25);
            sum ^= sum >> 32;
        }
    }
    sum
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Wrong::Zeroes => write!(f, "zeroes"),
            Wrong::NoSignature { first_bytes } => write!(f, "no signature, starts with {first_bytes:02x?}"),
            Wrong::OtherPlace { found: Place { seed, file, offset }, version } => {
                write!(f, "holds file {file} offset {offset} version {version} of seed {seed}")
            }
            Wrong::Version { found, expected } if found < expected.start() => {
                write!(f, "old version {found}, must be {} at least", expected.start())
            }
            Wrong::Version { found, expected } => {
                write!(f, "version {found} was never written, must be {} at most", expected.end())
            }
            Wrong::Damaged { version, first, last, count } => {
                write!(f, "version {version} with {count} wrong bytes between {first} and {last} of the sector")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PLACE: Place = Place { seed: 1, file: 2, offset: 1024 };

    fn sector(place: Place, version: u64) -> [u8; SECTOR_SIZE] {
        let mut sector = [0; SECTOR_SIZE];
        fill(&mut sector, place, version);
        sector
    }

    #[test]
    fn what_is_wrong_is_told() {
        assert_eq!(check(&sector(PLACE, 3), PLACE, 2..=3), Ok(3));
        assert_eq!(check(&[0; SECTOR_SIZE], PLACE, 0..=0), Err(Wrong::Zeroes));
        let other = Place { offset: 512, ..PLACE };
        assert_eq!(check(&sector(other, 3), PLACE, 3..=3), Err(Wrong::OtherPlace { found: other, version: 3 }));
        assert_eq!(check(&sector(PLACE, 1), PLACE, 2..=3), Err(Wrong::Version { found: 1, expected: 2..=3 }));
        let mut torn = sector(PLACE, 3);
        torn[256..].copy_from_slice(&sector(PLACE, 2)[256..]);
        assert!(matches!(check(&torn, PLACE, 3..=3), Err(Wrong::Damaged { version: 3, first: 256.., .. })));
        let wrong = check(&[0xff; SECTOR_SIZE], PLACE, 0..=0).unwrap_err().to_string();
        assert!(wrong.starts_with("no signature, starts with [ff, ff"), "{wrong}");
    }

    proptest! {
        #[test]
        fn any_changed_byte_is_seen(index in 0..SECTOR_SIZE, flip in 1u8..) {
            let mut sector = sector(PLACE, 7);
            sector[index] ^= flip;
            prop_assert!(check(&sector, PLACE, 0..=u64::MAX).is_err());
        }
    }
}
