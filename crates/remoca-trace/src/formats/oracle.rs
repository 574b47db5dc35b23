//! oracleGeneral of libCacheSim: records of 24 bytes, little-endian.
//!
//! ```text
//! time u32 in s | object u64 | bytes u32 | number of the request that reads it next i64, -1 for none
//! ```
//! Each object is one block, whatever its size, as with libCacheSim's `--ignore-obj-size`. Objects that are too large for block
//! numbers are hashed to 40 bits: of ten million objects about 50 then share one with another. Source: the comment in
//! libCacheSim's `oracleGeneralBin.h`.

use super::batch::{BATCH_RECORDS, Batch, Parser, number};
use crate::error::TraceError;
use crate::input::Input;
use crate::limits::BLOCKS_MAX;
use remoca_protocol::trace::{TraceRecord, TracedOp, TracedSource};

pub(super) const RECORD_BYTES: usize = 24;

pub(super) struct OracleGeneral;

impl Parser for OracleGeneral {
    fn parse(&mut self, input: &mut Input, batch: &mut Batch) -> Result<bool, TraceError> {
        let Some(records) = input.take_records(RECORD_BYTES, BATCH_RECORDS)? else { return Ok(false) };
        batch.records.extend(records.as_chunks::<RECORD_BYTES>().0.iter().map(|bytes| TraceRecord {
            issued_ns: number::<4>(bytes, 0) * 1_000_000_000,
            latency_ns: 0,
            block: block_of(number::<8>(bytes, 4)),
            blocks: 1,
            disk: 0,
            op: TracedOp::Read,
            source: TracedSource::Disk,
            is_partial: false,
        }));
        Ok(true)
    }
}

fn block_of(object: u64) -> u64 {
    if object < BLOCKS_MAX {
        return object;
    }
    // The finalizer of SplitMix64.
    let mixed = (object ^ object >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    (mixed ^ mixed >> 31) % BLOCKS_MAX
}
