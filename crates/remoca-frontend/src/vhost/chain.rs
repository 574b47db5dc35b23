//! One descriptor chain. It is walked and checked once, and is a list of buffers in guest memory from then on.
//!
//! The guest wrote the chain, so nothing in it is trusted. It may loop, point anywhere, nest indirect tables or change
//! while it is read. The walk reads every descriptor once and ends after a bounded number of them.
//!
//! Invariants:
//! 1. A buffer of a walked chain lies in guest memory, whose mapping lives as long as the chain.
//! 2. Nothing is copied to or from the guest once its front end is gone.

use crate::request::CopyError;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use vm_memory::{GuestAddress, GuestMemoryBackend};

use remoca_core::units::PAGE_SIZE_U64;

use super::config::QUEUE_SIZE_MAX;
use super::layout::DESCRIPTOR_BYTES;
use super::memory::{self, GuestMemory};
use super::ring::{Ring, RingUnreachable, read_descriptor};

/// The most descriptors of a chain. A guest that respects SEG_MAX needs fewer; QEMU has the same limit, and no ring is
/// larger.
pub(crate) const CHAIN_LENGTH_MAX: u16 = QUEUE_SIZE_MAX;
static ZEROES: [u8; 4096] = [0; 4096];

/// Why a chain cannot be answered at all. The queue that it is on is broken from then on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ChainError {
    #[error("descriptor index {index} of a table of {size}")]
    Index { index: u16, size: u16 },
    #[error("a chain of more than 1024 descriptors, or a loop")]
    TooLong,
    #[error(
        "an indirect descriptor that the guest has not negotiated, or inside an indirect table, or with a successor"
    )]
    Indirect,
    #[error("an indirect table of {0} bytes")]
    IndirectTable(u32),
    #[error("a readable descriptor after a writable one")]
    Order,
    #[error("no writable byte for the status")]
    NoStatus,
    #[error("the status is not in guest memory")]
    StatusUnreachable,
    #[error("a descriptor table that is not in guest memory")]
    TableUnreachable,
}

impl From<RingUnreachable> for ChainError {
    fn from(_: RingUnreachable) -> Self {
        ChainError::TableUnreachable
    }
}

/// The buffers of one direction of a chain, as one run of bytes.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    segments: Vec<Segment>,
    total: u64,
}

#[derive(Debug, Clone, Copy)]
struct Segment {
    /// Offset of the first byte in the run.
    start: u64,
    address: GuestAddress,
    length: u32,
}

/// A page of guest memory, aligned, all of which a read will overwrite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame(GuestAddress);

/// A piece of a segment: a range of the caller's buffer, and the guest address of its bytes.
struct Part {
    buffer: std::ops::Range<usize>,
    address: GuestAddress,
}

impl Buffers {
    /// The most segments of a run that is not worth shrinking.
    const SHORT: usize = 8;

    pub fn total(&self) -> u64 {
        self.total
    }

    fn push(&mut self, address: GuestAddress, length: u32) {
        if length > 0 {
            self.segments.push(Segment { start: self.total, address, length });
            self.total += u64::from(length);
        }
    }

    /// Frees the unused capacity of a long run. Shrinking a short one costs more than it saves, because it fragments
    /// the heap.
    fn trim(&mut self) {
        if self.segments.len() > Self::SHORT {
            self.segments.shrink_to_fit();
        }
    }

    /// Returns the parts of the `length` bytes from `offset`. Fails with `OutOfRange` if the run is shorter than that.
    fn parts(&self, offset: u64, length: usize) -> Result<impl Iterator<Item = Part>, CopyError> {
        let end = u64::try_from(length).ok().and_then(|length| offset.checked_add(length));
        let end = end.filter(|end| *end <= self.total).ok_or(CopyError::OutOfRange)?;
        let first = self.segments.partition_point(|segment| segment.start + u64::from(segment.length) <= offset);
        let run = self.segments[first..].iter().take_while(move |segment| segment.start < end);
        Ok(run.filter_map(move |segment| {
            let from = offset.max(segment.start);
            let to = end.min(segment.start + u64::from(segment.length));
            let buffer = usize::try_from(from - offset).ok()?..usize::try_from(to - offset).ok()?;
            Some(Part { buffer, address: GuestAddress(segment.address.0 + (from - segment.start)) })
        }))
    }

    /// Returns the frames that lie entirely within one segment's part of the `length` bytes from `offset`.
    fn frames(&self, offset: u64, length: usize) -> Result<impl Iterator<Item = Frame>, CopyError> {
        let parts = self.parts(offset, length)?;
        Ok(parts.flat_map(|part| {
            let end = part.address.0.saturating_add(part.buffer.len() as u64);
            let frames = part.address.0.div_ceil(PAGE_SIZE_U64)..end / PAGE_SIZE_U64;
            frames.map(|frame| Frame(GuestAddress(frame * PAGE_SIZE_U64)))
        }))
    }
}

/// The connection that a request came over. Requests may outlive it; guest memory must not be touched once it has
/// ended.
#[derive(Debug)]
pub(crate) struct Session {
    live: AtomicBool,
}

impl Session {
    pub fn new() -> Arc<Self> {
        Arc::new(Session { live: AtomicBool::new(true) })
    }

    pub fn end(&self) {
        self.live.store(false, Ordering::Relaxed);
    }

    pub fn is_live(&self) -> bool {
        self.live.load(Ordering::Relaxed)
    }
}

/// The time for which one front end is connected.
#[derive(Clone, Debug)]
pub struct Attachment(Arc<Session>);

impl Attachment {
    pub(super) fn of(session: &Arc<Session>) -> Self {
        Self(Arc::clone(session))
    }

    /// Returns whether that front end is still connected.
    pub fn lasts(&self) -> bool {
        self.0.is_live()
    }
}

/// The number of segments in all chains that a device has in memory. A segment takes 24 bytes, and a chain has up to
/// 1,024 of them.
#[derive(Debug, Default)]
pub(crate) struct SegmentCount(AtomicUsize);

impl SegmentCount {
    pub fn get(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// A walked chain.
#[derive(Debug)]
pub(crate) struct Chain {
    pub head: u16,
    pub session: Arc<Session>,
    memory: Arc<GuestMemory>,
    pub readable: Buffers,
    pub writable: Buffers,
    /// Whether every buffer lies in guest memory.
    pub reachable: bool,
    status: GuestAddress,
    /// The device's count, which includes the segments of this chain once its walk has ended.
    count: Arc<SegmentCount>,
    counted: usize,
}

impl Drop for Chain {
    fn drop(&mut self) {
        self.count.0.fetch_sub(self.counted, Ordering::Relaxed);
    }
}

impl Chain {
    /// Walks the chain that starts at `head`, and counts its segments in `count`. An error means that the chain cannot
    /// be answered.
    pub fn walk(
        ring: &Ring,
        head: u16,
        indirect: bool,
        session: &Arc<Session>,
        count: &Arc<SegmentCount>,
    ) -> Result<Self, ChainError> {
        let mut chain = Chain {
            head,
            session: session.clone(),
            memory: ring.memory().clone(),
            readable: Buffers::default(),
            writable: Buffers::default(),
            reachable: true,
            status: GuestAddress(0),
            count: count.clone(),
            counted: 0,
        };
        let mut table = Table { address: ring.descriptors(), size: ring.size(), indirect: false };
        let mut index = head;
        for _ in 0..CHAIN_LENGTH_MAX {
            if index >= table.size {
                return Err(ChainError::Index { index, size: table.size });
            }
            let descriptor = read_descriptor(&chain.memory, table.address, index)?;
            if descriptor.refers_to_indirect_table() {
                if table.indirect || !indirect || descriptor.has_next() {
                    return Err(ChainError::Indirect);
                }
                table = Table::indirect(descriptor.addr(), descriptor.len())?;
                index = 0;
                continue;
            }
            chain.add(descriptor.addr(), descriptor.len(), descriptor.is_write_only())?;
            if !descriptor.has_next() {
                return chain.locate_status();
            }
            index = descriptor.next();
        }
        Err(ChainError::TooLong)
    }

    fn add(&mut self, address: GuestAddress, length: u32, writable: bool) -> Result<(), ChainError> {
        self.reachable &= memory::contains(&self.memory, address, length as usize);
        match writable {
            true => self.writable.push(address, length),
            false if self.writable.total > 0 => return Err(ChainError::Order),
            false => self.readable.push(address, length),
        }
        Ok(())
    }

    /// Locates the status byte, which is the last writable byte regardless of how the buffers are framed.
    fn locate_status(mut self) -> Result<Self, ChainError> {
        let last = self.writable.segments.last().ok_or(ChainError::NoStatus)?;
        let status = last.address.0.checked_add(u64::from(last.length) - 1);
        self.status = GuestAddress(status.ok_or(ChainError::StatusUnreachable)?);
        self.readable.trim();
        self.writable.trim();
        self.counted = self.readable.segments.len() + self.writable.segments.len();
        self.count.0.fetch_add(self.counted, Ordering::Relaxed);
        match self.memory.address_in_range(self.status) {
            true => Ok(self),
            false => Err(ChainError::StatusUnreachable),
        }
    }

    /// Copies bytes from `offset` of the readable run to `target`.
    pub fn read(&self, offset: u64, target: &mut [u8]) -> Result<(), CopyError> {
        self.check_live()?;
        for part in self.readable.parts(offset, target.len())? {
            let bytes = &mut target[part.buffer];
            memory::read(&self.memory, part.address, bytes).map_err(|_| CopyError::GuestMemory)?;
        }
        Ok(())
    }

    /// Copies `source` to `offset` of the writable run.
    pub fn write(&self, offset: u64, source: &[u8]) -> Result<(), CopyError> {
        self.check_live()?;
        for part in self.writable.parts(offset, source.len())? {
            let bytes = &source[part.buffer];
            memory::write(&self.memory, part.address, bytes).map_err(|_| CopyError::GuestMemory)?;
        }
        Ok(())
    }

    pub fn write_zeroes(&self, offset: u64, length: usize) -> Result<(), CopyError> {
        self.check_live()?;
        for part in self.writable.parts(offset, length)? {
            let mut address = part.address;
            let mut left = part.buffer.len();
            while left > 0 {
                let bytes = &ZEROES[..left.min(ZEROES.len())];
                memory::write(&self.memory, address, bytes).map_err(|_| CopyError::GuestMemory)?;
                address = GuestAddress(address.0 + bytes.len() as u64);
                left -= bytes.len();
            }
        }
        Ok(())
    }

    /// Returns the frames that lie entirely within `length` bytes of the writable run from `offset`.
    pub fn frames(&self, offset: u64, length: usize) -> Result<impl Iterator<Item = Frame>, CopyError> {
        self.writable.frames(offset, length)
    }

    /// Copies the current content of a frame of this chain to `target`.
    pub fn read_frame(&self, frame: Frame, target: &mut [u8]) -> Result<(), CopyError> {
        self.check_live()?;
        memory::read(&self.memory, frame.0, target).map_err(|_| CopyError::GuestMemory)
    }

    pub fn write_status(&self, status: u8) -> Result<(), CopyError> {
        self.check_live()?;
        memory::write(&self.memory, self.status, &[status]).map_err(|_| CopyError::GuestMemory)
    }

    fn check_live(&self) -> Result<(), CopyError> {
        match self.session.is_live() {
            true => Ok(()),
            false => Err(CopyError::Disconnected),
        }
    }
}

/// The table that a walk is in.
struct Table {
    address: GuestAddress,
    size: u16,
    indirect: bool,
}

impl Table {
    fn indirect(address: GuestAddress, bytes: u32) -> Result<Self, ChainError> {
        let entries = u64::from(bytes) / DESCRIPTOR_BYTES;
        let whole = u64::from(bytes).is_multiple_of(DESCRIPTOR_BYTES);
        let size = u16::try_from(entries).ok().filter(|size| *size > 0 && whole);
        let size = size.ok_or(ChainError::IndirectTable(bytes))?;
        Ok(Table { address, size, indirect: true })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_aligned_and_lie_whole_in_what_is_overwritten() {
        let mut buffers = Buffers::default();
        for (address, length) in [(0x1000, 0x3000), (0x8200, 0x2000), (0x1_0000, 0x800), (0x1_0800, 0x800)] {
            buffers.push(GuestAddress(address), length);
        }
        let frames = |offset, length| -> Vec<u64> {
            buffers.frames(offset, length).unwrap().map(|Frame(address)| address.0).collect()
        };
        assert_eq!(frames(0, 0x6000), [0x1000, 0x2000, 0x3000, 0x9000], "none that is in two parts");
        assert_eq!(frames(0x1000, 0x1000), [0x2000]);
        assert_eq!(frames(0xfff, 0x2000), [0x2000]);
        assert_eq!(frames(0x1001, 0x1fff), [0x3000]);
        assert_eq!(frames(0x3000, 0x1dff), [0_u64; 0]);
        assert_eq!(frames(0, 0), [0_u64; 0]);
        assert!(buffers.frames(0x5000, 0x1001).is_err());
    }
}
