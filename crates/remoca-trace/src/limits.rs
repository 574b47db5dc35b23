//! What no request can be: a trace of another format, or a damaged one, is noticed by it.

use remoca_protocol::trace::{TraceRecord, TracedOp};

/// Bytes of the largest disk: 2^40 blocks.
pub const DISK_BYTES_MAX: u64 = 1 << 52;
/// Number of a disk's blocks.
pub const BLOCKS_MAX: u64 = DISK_BYTES_MAX / 4096;
/// Number of disks.
pub const DISKS_MAX: u16 = 4096;
/// Maximum number of blocks of a read or write: 1 GiB.
pub const REQUEST_BLOCKS_MAX: u64 = (1 << 30) / 4096;

/// Returns what the kernel's block trace calls a write of `length` bytes: one that is longer than any with data writes zeroes. The trace
/// has no other sign of these, and shows them before they are split.
#[must_use]
pub fn of_traced_write(length: u64) -> TracedOp {
    if length > REQUEST_BLOCKS_MAX * 4096 { TracedOp::WriteZeroes } else { TracedOp::Write }
}

/// Returns the record of a request for a number of 512-byte sectors.
///
/// # Errors
/// If there is no such request.
pub fn of_sectors(op: TracedOp, sector: u64, sectors: u64) -> Result<TraceRecord, String> {
    match sectors.checked_mul(512) {
        Some(length) => of_bytes_at(op, sector, length),
        None => Err(format!("a request for {sectors} sectors: no disk is larger than 4 PiB")),
    }
}

/// Returns the record of a request for `length` bytes from a 512-byte sector on.
///
/// # Errors
/// If there is no such request.
pub fn of_bytes_at(op: TracedOp, sector: u64, length: u64) -> Result<TraceRecord, String> {
    match sector.checked_mul(512) {
        Some(offset) => of_bytes(op, offset, length),
        None => Err(format!("a request at sector {sector}: no disk is larger than 4 PiB")),
    }
}

/// Returns the record of a request for `length` bytes.
///
/// # Errors
/// If there is no such request.
pub fn of_bytes(op: TracedOp, offset: u64, length: u64) -> Result<TraceRecord, String> {
    if offset > DISK_BYTES_MAX || length > DISK_BYTES_MAX {
        return Err(format!("a request of {length} bytes at offset {offset}: no disk is larger than 4 PiB"));
    }
    check(TraceRecord { is_partial: false, ..TraceRecord::of_bytes(op, offset, length) })
}

/// Returns the record if there can be such a request.
///
/// # Errors
/// What cannot be.
pub fn check(record: TraceRecord) -> Result<TraceRecord, String> {
    let TraceRecord { block, blocks, disk, op, .. } = record;
    if disk >= DISKS_MAX {
        return Err(format!("disk {disk}: there are at most {DISKS_MAX}"));
    }
    if record.end() > BLOCKS_MAX {
        return Err(format!("a request for {blocks} blocks from block {block} on: no disk is larger than 4 PiB"));
    }
    let is_bounded = matches!(op, TracedOp::Read | TracedOp::Write | TracedOp::Evicted);
    if is_bounded && blocks > REQUEST_BLOCKS_MAX {
        return Err(format!("a request for {blocks} blocks: none is longer than 1 GiB"));
    }
    Ok(record)
}
