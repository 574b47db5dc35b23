//! Record of a mapped pool that outlives its memory server, in a file in memory beside the pool's own.
//!
//! ```text
//!   0  magic: u64       "RMPOOL\0\0"
//!   8  version: u32     1
//!  12  descriptor: u32  number under which the service manager keeps the pool's memory
//!  16  token: [u8; 16]
//!  32  server: [u8; 16] server that made the pool
//!  48  generation: u64
//!  56  epoch: u64       latest epoch of its client
//!  64  npages: u32      size that the client was granted
//!  68  limit: u32       maximum size, after memory was taken back
//!  72  check: u64       of the 72 bytes above
//! ```
//! Little-endian. The server writes it as a whole, with one system call. Whoever reads it believes nothing that does not check.

use crate::{PageCount, PoolGeneration, ServerId, Token};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Version of the record. One of another version is not understood.
pub const VERSION: u32 = 1;
/// Bytes of the record.
pub const RECORD_BYTES: usize = 80;
const MAGIC: [u8; 8] = *b"RMPOOL\0\0";

/// What a successor needs to go on with a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeptPool {
    pub descriptor: u32,
    pub token: Token,
    pub server_id: ServerId,
    pub generation: PoolGeneration,
    pub epoch: u64,
    pub npages: PageCount,
    pub limit: PageCount,
}

/// Reason why a record is not believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    #[error("it is no record of a pool")]
    Other,
    #[error("the record has version {0}, this program knows {VERSION}")]
    Version(u32),
    #[error("the record does not check: it was written in part")]
    Check,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Record {
    magic: [u8; 8],
    version: U32,
    descriptor: U32,
    token: [u8; 16],
    server_id: [u8; 16],
    generation: U64,
    epoch: U64,
    npages: U32,
    limit: U32,
    check: U64,
}

const _: () = assert!(size_of::<Record>() == RECORD_BYTES);

impl KeptPool {
    /// Returns the bytes of the record.
    #[must_use]
    pub fn encode(&self) -> [u8; RECORD_BYTES] {
        let mut record = Record {
            magic: MAGIC,
            version: VERSION.into(),
            descriptor: self.descriptor.into(),
            token: self.token.0,
            server_id: self.server_id.0,
            generation: self.generation.0.into(),
            epoch: self.epoch.into(),
            npages: self.npages.0.into(),
            limit: self.limit.0.into(),
            check: 0.into(),
        };
        record.check = check(&record).into();
        zerocopy::transmute!(record)
    }

    /// Parses a record.
    ///
    /// # Errors
    /// [`RecordError`]. Then no field of it can be believed.
    pub fn decode(bytes: &[u8]) -> Result<Self, RecordError> {
        let record = Record::ref_from_bytes(bytes).map_err(|_| RecordError::Other)?;
        if record.magic != MAGIC {
            return Err(RecordError::Other);
        }
        if record.version.get() != VERSION {
            return Err(RecordError::Version(record.version.get()));
        }
        if record.check.get() != check(record) {
            return Err(RecordError::Check);
        }
        Ok(Self {
            descriptor: record.descriptor.get(),
            token: Token(record.token),
            server_id: ServerId(record.server_id),
            generation: PoolGeneration(record.generation.get()),
            epoch: record.epoch.get(),
            npages: PageCount(record.npages.get()),
            limit: PageCount(record.limit.get()),
        })
    }
}

/// Returns a checksum of the record's words but the last, in which each word and its place count.
fn check(record: &Record) -> u64 {
    let (words, _) = record.as_bytes().as_chunks::<8>();
    let words = words.iter().take(RECORD_BYTES / 8 - 1);
    words.fold(0xcbf2_9ce4_8422_2325, |sum, word| {
        (sum ^ u64::from_le_bytes(*word)).wrapping_mul(0x0100_0000_01b3).rotate_left(23)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const POOL: KeptPool = KeptPool {
        descriptor: 7,
        token: Token([0xaa; 16]),
        server_id: ServerId([0xbb; 16]),
        generation: PoolGeneration(0x0102_0304_0506_0708),
        epoch: 9,
        npages: PageCount(512),
        limit: PageCount(u32::MAX),
    };

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The bytes of the first version. They are read for good.
    #[test]
    fn golden() {
        let expected = "524d504f4f4c0000 01000000 07000000 aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa \
                        bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb 0807060504030201 0900000000000000 00020000 ffffffff aff7006b719b7377";
        let expected: String = expected.split_whitespace().collect();
        assert_eq!(hex(&POOL.encode()), expected);
        assert_eq!(KeptPool::decode(&POOL.encode()), Ok(POOL));
    }

    #[test]
    fn other_versions_and_files_are_told_apart() {
        let mut later = POOL.encode();
        later[8] = 2;
        assert_eq!(KeptPool::decode(&later), Err(RecordError::Version(2)));
        assert_eq!(KeptPool::decode(&[0; RECORD_BYTES]), Err(RecordError::Other));
        assert_eq!(KeptPool::decode(&later[..79]), Err(RecordError::Other));
        assert_eq!(KeptPool::decode(&[]), Err(RecordError::Other));
    }

    proptest! {
        /// Tests that a record that was half overwritten by another one is not believed.
        #[test]
        fn a_record_written_in_part_is_not_believed(
            epoch in any::<u64>(), npages in any::<u32>(), descriptor in any::<u32>(), cut in 1..RECORD_BYTES,
        ) {
            let newer = KeptPool { epoch, npages: PageCount(npages), descriptor, ..POOL };
            let (old, new) = (POOL.encode(), newer.encode());
            let mut torn = old;
            torn[..cut].copy_from_slice(&new[..cut]);
            if torn != old && torn != new {
                prop_assert_eq!(KeptPool::decode(&torn), Err(RecordError::Check));
            }
            prop_assert_eq!(KeptPool::decode(&new), Ok(newer));
        }
    }
}
