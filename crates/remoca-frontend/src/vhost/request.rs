//! One request of the guest: parsed from its chain, fully validated, and handed to the driver.
//!
//! Requests that reach the driver are sound: ranges lie within the device and on block boundaries, and buffers of the
//! right direction are present. All other requests are answered here.

use crate::request::{CopyError, Operation, ZeroRange};
use remoca_io::sizes;
use std::ops::Range;
use std::sync::Arc;

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH,
    VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
    VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};

use super::chain::{Chain, Frame};
use super::config::{DeviceConfig, SECTOR_BYTES, SERIAL_BYTES_MAX};

/// struct virtio_blk_outhdr: type, reserved, sector.
const HEADER_BYTES: usize = 16;
/// struct virtio_blk_discard_write_zeroes: sector, number of sectors, flags.
const RANGE_BYTES: usize = 16;

/// The status with which the guest's request is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    Ok,
    IoError,
    Unsupported,
}

impl Status {
    pub(crate) fn byte(self) -> u8 {
        let code = match self {
            Status::Ok => VIRTIO_BLK_S_OK,
            Status::IoError => VIRTIO_BLK_S_IOERR,
            Status::Unsupported => VIRTIO_BLK_S_UNSUPP,
        };
        code.to_le_bytes()[0]
    }

    /// Returns the status of a request whose pieces had these two: the first that is not `Ok`, or `Ok` if both are.
    pub(crate) fn worse(self, other: Status) -> Status {
        if self == Status::Ok { other } else { self }
    }
}

/// ID of a request, unique among all that its device ever hands out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub(crate) u64);

/// A request that the driver executes and then passes to `VhostDevice::complete`.
///
/// Offsets of the copy functions count from the start of this request's data. They fail with
/// [`CopyError::Disconnected`] once the front end is gone; the request is still completed.
#[derive(Debug)]
#[must_use = "a request that is not completed stays in flight for ever"]
pub struct BlkRequest {
    pub(crate) id: RequestId,
    pub(crate) queue: u16,
    pub(crate) operation: Operation,
    /// `None` for a request of the device's own.
    pub(crate) chain: Option<Arc<Chain>>,
    /// Where the data of this request starts in the chain's run of its direction.
    pub(crate) data_start: u64,
    pub(crate) data_length: usize,
}

impl BlkRequest {
    /// Returns the flush that makes the guest's earlier writes durable after it switched its write cache off.
    pub(crate) fn cache_flush(id: RequestId) -> Self {
        BlkRequest { id, queue: 0, operation: Operation::Flush, chain: None, data_start: 0, data_length: 0 }
    }

    pub fn id(&self) -> RequestId {
        self.id
    }

    pub fn queue(&self) -> u16 {
        self.queue
    }

    pub fn operation(&self) -> &Operation {
        &self.operation
    }

    /// Returns the number of bytes to copy to or from the guest. It is zero for anything but a read or write.
    pub fn data_length(&self) -> usize {
        self.data_length
    }

    /// Copies `source` into the guest's buffers of a read request, starting at `offset` in the request's data.
    pub fn copy_to_guest(&self, offset: usize, source: &[u8]) -> Result<(), CopyError> {
        self.chain()?.write(self.locate(offset, source.len())?, source)
    }

    /// Fills `length` bytes at `offset` of a read's data with zeroes.
    pub fn fill_zero(&self, offset: usize, length: usize) -> Result<(), CopyError> {
        self.chain()?.write_zeroes(self.locate(offset, length)?, length)
    }

    /// Copies data of a write, starting at `offset`, from the guest. The guest may change the data at any time, so two
    /// copies need not be equal.
    pub fn copy_from_guest(&self, offset: usize, target: &mut [u8]) -> Result<(), CopyError> {
        self.chain()?.read(self.locate(offset, target.len())?, target)
    }

    /// Returns the whole pages of guest memory that `length` bytes at `offset` of a read's data will overwrite.
    pub fn frames(&self, offset: usize, length: usize) -> impl Iterator<Item = Frame> {
        let chain = self.chain().and_then(|chain| chain.frames(self.locate(offset, length)?, length));
        chain.into_iter().flatten()
    }

    /// Copies the current content of a frame of this request to `target`. The guest may change it at any time.
    pub fn copy_frame(&self, frame: Frame, target: &mut [u8]) -> Result<(), CopyError> {
        self.chain()?.read_frame(frame, target)
    }

    fn chain(&self) -> Result<&Chain, CopyError> {
        self.chain.as_deref().ok_or(CopyError::OutOfRange)
    }

    fn locate(&self, offset: usize, length: usize) -> Result<u64, CopyError> {
        let end = offset.checked_add(length).filter(|end| *end <= self.data_length);
        end.ok_or(CopyError::OutOfRange)?;
        Ok(self.data_start + offset as u64)
    }
}

/// The result of parsing a chain.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Parsed {
    /// The driver executes the operation. The data of a read or write starts at this offset of the chain's run.
    Execute { operation: Operation, data_start: u64 },
    /// Answered without the driver.
    Answer(Status),
}

impl Parsed {
    const IO_ERROR: Parsed = Parsed::Answer(Status::IoError);
    const UNSUPPORTED: Parsed = Parsed::Answer(Status::Unsupported);
}

/// Returns the operation that a chain asks for, or the status to answer it with. Writes the answer to GET_ID into guest memory.
pub(crate) fn parse(chain: &Chain, config: &DeviceConfig) -> Parsed {
    let mut header = [0; HEADER_BYTES];
    if !chain.reachable || chain.read(0, &mut header).is_err() {
        return Parsed::IO_ERROR;
    }
    let [t0, t1, t2, t3, _, _, _, _, sector @ ..] = header;
    let kind = u32::from_le_bytes([t0, t1, t2, t3]);
    let sector = u64::from_le_bytes(sector);
    // The header is part of the readable run, and the status byte is part of the writable one.
    let readable = chain.readable.total() - HEADER_BYTES as u64;
    let writable = chain.writable.total() - 1;
    match kind {
        VIRTIO_BLK_T_IN if readable == 0 => match data_range(config, sector, writable) {
            Some(range) => transfer(Operation::Read { range }, 0, writable),
            None => Parsed::IO_ERROR,
        },
        VIRTIO_BLK_T_OUT if writable == 0 && !config.read_only => match data_range(config, sector, readable) {
            Some(range) => transfer(Operation::Write { range }, HEADER_BYTES as u64, readable),
            None => Parsed::IO_ERROR,
        },
        VIRTIO_BLK_T_IN | VIRTIO_BLK_T_OUT => Parsed::IO_ERROR,
        VIRTIO_BLK_T_FLUSH if config.read_only => Parsed::Answer(Status::Ok),
        VIRTIO_BLK_T_FLUSH => Parsed::Execute { operation: Operation::Flush, data_start: 0 },
        VIRTIO_BLK_T_GET_ID => answer_serial(chain, config, writable),
        VIRTIO_BLK_T_DISCARD if config.discard => ranges_of(chain, config, readable, false),
        VIRTIO_BLK_T_WRITE_ZEROES if config.write_zeroes => ranges_of(chain, config, readable, true),
        _ => Parsed::UNSUPPORTED,
    }
}

fn transfer(operation: Operation, data_start: u64, length: u64) -> Parsed {
    match length {
        0 => Parsed::Answer(Status::Ok),
        _ => Parsed::Execute { operation, data_start },
    }
}

/// Returns the range of `length` bytes from `sector`, or `None` if it is not whole blocks within the device.
fn data_range(config: &DeviceConfig, sector: u64, length: u64) -> Option<Range<u64>> {
    let start = sector.checked_mul(SECTOR_BYTES)?;
    let end = start.checked_add(length)?;
    let block = u64::from(config.logical_block_bytes);
    let whole = start.is_multiple_of(block) && length.is_multiple_of(block);
    (whole && end <= config.capacity_bytes).then_some(start..end)
}

fn answer_serial(chain: &Chain, config: &DeviceConfig, writable: u64) -> Parsed {
    let mut answer = [0; SERIAL_BYTES_MAX];
    answer[..config.serial.len()].copy_from_slice(config.serial.as_bytes());
    let length = sizes::in_memory(writable).min(answer.len());
    match chain.write(0, &answer[..length]) {
        Ok(()) => Parsed::Answer(Status::Ok),
        Err(_) => Parsed::IO_ERROR,
    }
}

/// Parses a discard or write-zeroes, whose `readable` bytes of data are its ranges.
fn ranges_of(chain: &Chain, config: &DeviceConfig, readable: u64, zeroes: bool) -> Parsed {
    if config.read_only {
        return Parsed::IO_ERROR;
    }
    let length = sizes::in_memory(readable);
    let most = usize::from(config.range_count_max) * RANGE_BYTES;
    if length == 0 || length > most || !length.is_multiple_of(RANGE_BYTES) {
        return Parsed::IO_ERROR;
    }
    let mut data = vec![0; length];
    if chain.read(HEADER_BYTES as u64, &mut data).is_err() {
        return Parsed::IO_ERROR;
    }
    let mut ranges = Vec::with_capacity(length / RANGE_BYTES);
    for entry in data.as_chunks::<RANGE_BYTES>().0 {
        match range_of(entry, config, zeroes) {
            Ok(zero) if zero.range.is_empty() => {}
            Ok(zero) => ranges.push(zero),
            Err(status) => return Parsed::Answer(status),
        }
    }
    if ranges.is_empty() {
        return Parsed::Answer(Status::Ok);
    }
    let operation = match zeroes {
        true => Operation::WriteZeroes { ranges },
        false => Operation::Discard { ranges: ranges.into_iter().map(|zero| zero.range).collect() },
    };
    Parsed::Execute { operation, data_start: 0 }
}

fn range_of(entry: &[u8; RANGE_BYTES], config: &DeviceConfig, zeroes: bool) -> Result<ZeroRange, Status> {
    let [s0, s1, s2, s3, s4, s5, s6, s7, n0, n1, n2, n3, flags @ ..] = *entry;
    let sector = u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]);
    let length = u64::from(u32::from_le_bytes([n0, n1, n2, n3])) * SECTOR_BYTES;
    let flags = u32::from_le_bytes(flags);
    let known = if zeroes { VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP } else { 0 };
    if flags & !known != 0 {
        return Err(Status::Unsupported);
    }
    let range = data_range(config, sector, length).ok_or(Status::IoError)?;
    if length > config.range_bytes_max {
        return Err(Status::IoError);
    }
    Ok(ZeroRange { range, unmap: flags != 0 })
}
