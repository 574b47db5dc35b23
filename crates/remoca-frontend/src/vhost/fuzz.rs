//! Fuzzing of one queue: guest memory is the input, with the rings at fixed places in it.
//!
//! Compiled only with the feature `testing`; never part of the program.

#![allow(clippy::unwrap_used, reason = "in a test a surprise is a failure")]

use std::sync::Arc;

use vm_memory::{Bytes, GuestAddress};

use super::chain::Session;
use super::config::DeviceConfig;
use super::flights::Taken;
use super::layout::RingLayout;
use super::memory::GuestMemory;
use super::queue::{Context, Queue, Start};
use super::request::{BlkRequest, RequestId, Status};
use crate::request::CopyError;
use crate::request::Operation;

const CAPACITY: u64 = 1 << 20;
const TRANSFER_BYTES_MAX: u32 = 8192;
const RANGE_BYTES_MAX: u64 = 1 << 16;
const RANGE_COUNT_MAX: u16 = 4;
const RANGE_PIECE_BYTES: u64 = 1 << 14;
const RING_SIZE: u16 = 8;
const AVAILABLE: u64 = 128;
const USED: u64 = 160;
/// Memory, then a hole, then memory again.
const MEMORY: [(GuestAddress, usize); 2] = [(GuestAddress(0), 0x3000), (GuestAddress(0x8000), 0x1000)];
/// Number of times that the rings are processed. A read may have changed the rings themselves.
const ROUNDS: u8 = 3;

/// Fuzzes a queue with `data`: one byte of options, then guest memory.
pub fn run(data: &[u8]) {
    let Some((&options, image)) = data.split_first() else { return };
    let memory = Arc::new(GuestMemory::from_ranges(&MEMORY).unwrap());
    let length = image.len().min(MEMORY[0].1);
    memory.write_slice(&image[..length], GuestAddress(0)).unwrap();
    let config = DeviceConfig {
        logical_block_bytes: if options & 1 == 0 { 512 } else { 4096 },
        read_only: options & 2 != 0,
        discard: options & 4 == 0,
        write_zeroes: options & 4 == 0,
        range_bytes_max: RANGE_BYTES_MAX,
        range_count_max: RANGE_COUNT_MAX,
        range_piece_bytes: RANGE_PIECE_BYTES,
        transfer_bytes_max: TRANSFER_BYTES_MAX,
        ..DeviceConfig::disk("fuzz", "fuzz", CAPACITY)
    };
    let session = Session::new();
    let segments = Arc::default();
    let context = Context { config: &config, session: &session, indirect: options & 8 == 0, segments: &segments };
    let layout = RingLayout {
        size: RING_SIZE,
        descriptors: GuestAddress(0),
        available: GuestAddress(AVAILABLE),
        used: GuestAddress(USED),
        used_log: None,
    };
    let mut queue = Queue::new(0, Arc::default());
    queue.start(Start { layout, memory, base: 0, record: None }).unwrap();
    queue.enabled = true;
    for _ in 0..ROUNDS {
        let taken: Vec<_> = std::iter::from_fn(|| queue.take(&context)).map(|taken| check(taken, &config)).collect();
        assert!(queue.in_flight() <= RING_SIZE, "a head is taken once until it is published");
        assert!(!queue.has_available(), "a driver that looks for chains until there are none would not sleep");
        for request in taken.iter().rev() {
            queue.complete(request.chain.as_ref().unwrap(), Status::Ok);
        }
        assert_eq!(queue.in_flight(), 0, "every chain is completed, and once");
        queue.publish();
        queue.listen();
    }
    assert!(queue.is_drained());
    session.end();
}

/// Checks that a request for the driver is sound, and that its data can be copied. Returns the request.
fn check(taken: Taken, config: &DeviceConfig) -> BlkRequest {
    let Taken { chain, operation, data_start, data_length } = taken;
    let request = BlkRequest { id: RequestId(0), queue: 0, operation, chain: Some(chain), data_start, data_length };
    let sound = |range: &std::ops::Range<u64>| {
        let block = u64::from(config.logical_block_bytes);
        range.start < range.end
            && range.end <= CAPACITY
            && range.start.is_multiple_of(block)
            && range.end.is_multiple_of(block)
    };
    match &request.operation {
        Operation::Read { range } | Operation::Write { range } => {
            assert!(sound(range), "{range:?}");
            assert_eq!(range.end - range.start, data_length as u64);
            copy(&request, data_length);
        }
        Operation::Flush => {}
        Operation::Discard { ranges } => assert!(ranges.iter().all(sound) && ranges.len() <= 4, "{ranges:?}"),
        Operation::WriteZeroes { ranges } => {
            assert!(ranges.iter().all(|zero| sound(&zero.range)) && ranges.len() <= 4, "{ranges:?}");
        }
    }
    let modifies = !matches!(request.operation, Operation::Read { .. } | Operation::Flush);
    assert!(!(modifies && config.read_only), "a disk that is read-only is not written");
    request
}

fn copy(request: &BlkRequest, length: usize) {
    assert!(length <= TRANSFER_BYTES_MAX as usize);
    let mut buffer = vec![0x5a; length];
    let beyond = match request.operation {
        Operation::Read { .. } => {
            request.copy_to_guest(0, &buffer).unwrap();
            request.fill_zero(length / 2, length - length / 2).unwrap();
            request.copy_to_guest(1, &buffer)
        }
        _ => {
            request.copy_from_guest(0, &mut buffer).unwrap();
            request.copy_from_guest(1, &mut buffer)
        }
    };
    assert_eq!(beyond, Err(CopyError::OutOfRange));
}

/// Returns inputs with one request of each kind: header at 0x200, status at 0x230, range at 0x240, indirect table at
/// 0x300, data after the end of the input.
pub fn seeds() -> Vec<Vec<u8>> {
    const NEXT: u16 = 1;
    const WRITE: u16 = 2;
    const INDIRECT: u16 = 4;
    let descriptor = |address: u64, length: u32, flags: u16, next: u16| {
        [&address.to_le_bytes()[..], &length.to_le_bytes(), &flags.to_le_bytes(), &next.to_le_bytes()].concat()
    };
    // Read, write, flush, serial number, discard, write-zeroes.
    let kinds: [(u32, u32, u16); 6] =
        [(0, 4096, WRITE), (1, 4096, 0), (4, 0, 0), (8, 20, WRITE), (11, 16, 0), (13, 16, 0)];
    let mut seeds = Vec::new();
    for (kind, length, direction) in kinds {
        for indirect in [false, true] {
            let mut memory = vec![0; 0x330];
            let header = [&kind.to_le_bytes()[..], &[0; 4], &2_u64.to_le_bytes()].concat();
            memory[0x200..0x210].copy_from_slice(&header);
            // One range of four sectors.
            memory[0x240..0x24c].copy_from_slice(&[8, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0]);
            let table = [
                descriptor(0x200, 16, NEXT, 1),
                descriptor(if kind < 11 { 0x1000 } else { 0x240 }, length, NEXT | direction, 2),
                descriptor(0x230, 1, WRITE, 0),
            ]
            .concat();
            match indirect {
                false => memory[..48].copy_from_slice(&table),
                true => {
                    memory[..16].copy_from_slice(&descriptor(0x300, 48, INDIRECT, 0));
                    memory[0x300..0x330].copy_from_slice(&table);
                }
            }
            // One chain, whose head is 0.
            memory[130] = 1;
            seeds.push([&[0], &memory[..]].concat());
        }
    }
    seeds
}
