//! Discards and write-zeroes that are long, or have many ranges, on a device that the test drives itself.

#![allow(clippy::unwrap_used, reason = "in a test a surprise is a failure")]

use remoca_frontend::request::{Operation, RANGE_PIECE, ZeroRange};
use remoca_frontend::testing::{Answered, Command, DirectFrontEnd, Options, TestGuest};
use remoca_frontend::vhost::{BlkRequest, DeviceConfig, Status, VhostDevice};
use std::ops::Range;

const OK: u8 = 0;
const IO_ERROR: u8 = 1;
const BLOCK: u64 = 4096;

/// Returns a device with a guest, and what plays the guest's hypervisor.
fn start() -> (VhostDevice, TestGuest, DirectFrontEnd) {
    let mut config = DeviceConfig::disk("test", "serial", 1 << 40);
    config.logical_block_bytes = 512;
    let (mut device, mut front) = DirectFrontEnd::device(config, None);
    let guest = TestGuest::new(Options::default());
    front.connect(&guest, None);
    while front.pump() != Some(Answered::Connected) {
        device.handle_events().unwrap();
    }
    (device, guest, front)
}

/// Returns a range of a command: sector, number of sectors, flags.
fn range(start: u64, bytes: u64, flags: u32) -> (u64, u32, u32) {
    (start / 512, u32::try_from(bytes / 512).unwrap(), flags)
}

fn pop_all(device: &mut VhostDevice) -> Vec<BlkRequest> {
    std::iter::from_fn(|| device.pop()).collect()
}

fn operations(requests: &[BlkRequest]) -> Vec<Operation> {
    requests.iter().map(|request| request.operation().clone()).collect()
}

#[test]
fn ranges_are_handed_out_a_bounded_number_of_bytes_at_a_time() {
    let (mut device, mut guest, _front) = start();
    let half = RANGE_PIECE / 2;
    let starts = [BLOCK, 20 * RANGE_PIECE, 30 * RANGE_PIECE - 512, 40 * RANGE_PIECE];
    let lengths = [2 * RANGE_PIECE, half, half, BLOCK];
    for flags in [0, 1] {
        let ranges = [0, 1, 2, 3].map(|at| range(starts[at], lengths[at], flags));
        let whole = |at: usize| starts[at]..starts[at] + lengths[at];
        let part = |range: Range<u64>| vec![range];
        // The first is cut at multiples, and the others are not cut.
        let pieces = [
            part(BLOCK..RANGE_PIECE),
            part(RANGE_PIECE..2 * RANGE_PIECE),
            vec![2 * RANGE_PIECE..2 * RANGE_PIECE + BLOCK, whole(1)],
            vec![whole(2), whole(3)],
        ];
        let zeroes = |ranges: Vec<_>| {
            let ranges = ranges.into_iter().map(|range| ZeroRange { range, unmap: flags == 1 });
            Operation::WriteZeroes { ranges: ranges.collect() }
        };
        let mut commands = vec![(Command::WriteZeroes(&ranges), pieces.clone().map(zeroes))];
        if flags == 0 {
            commands.push((Command::Discard(&ranges), pieces.map(|ranges| Operation::Discard { ranges })));
        }
        for (command, expected) in commands {
            for failing in [None, Some(2)] {
                let ticket = guest.submit(0, command);
                let mut requests = pop_all(&mut device);
                assert_eq!(operations(&requests), expected);
                let failing = failing.map(|failing: usize| requests[failing].id());
                while let Some(request) = requests.pop() {
                    assert_eq!(guest.result(ticket), None, "a piece is not done");
                    let status = if Some(request.id()) == failing { Status::IoError } else { Status::Ok };
                    device.complete(request, status);
                    device.notify();
                }
                let status = if failing.is_some() { IO_ERROR } else { OK };
                assert_eq!(guest.result(ticket), Some(status));
            }
        }
    }
}

/// Before another program takes over, what was begun is ended, and nothing else is taken.
#[test]
fn the_rest_of_a_discard_counts_as_begun() {
    let (mut device, mut guest, _front) = start();
    let first = guest.submit(0, Command::Discard(&[range(0, 3 * RANGE_PIECE, 0)]));
    let second = guest.submit(0, Command::Discard(&[range(0, BLOCK, 0)]));
    let begun = device.pop().unwrap();
    assert!(device.has_begun());
    device.complete(begun, Status::Ok);
    device.notify();
    assert_eq!((guest.result(first), device.in_flight(0)), (None, 1));
    let mut rest = 0;
    while let Some(request) = device.pop_begun() {
        device.complete(request, Status::Ok);
        rest += 1;
    }
    device.notify();
    assert_eq!((rest, guest.result(first), device.in_flight(0)), (2, Some(OK), 0));
    assert!(!device.has_begun());
    let request = device.pop().unwrap();
    device.complete(request, Status::Ok);
    device.notify();
    assert_eq!(guest.result(second), Some(OK));
}

#[test]
fn zeroes_go_out_again_if_the_disk_may_have_lost_a_part_of_them() {
    let (mut device, mut guest, _front) = start();
    let ranges = [range(0, 2 * RANGE_PIECE, 1), range(9 * RANGE_PIECE, BLOCK, 0)];
    for done_before in 0..3 {
        let ticket = guest.submit(0, Command::WriteZeroes(&ranges));
        let requests = pop_all(&mut device);
        let first = operations(&requests);
        assert_eq!(first.len(), 3);
        for (at, request) in requests.into_iter().enumerate() {
            if at == done_before {
                device.repeat_parts();
            }
            device.complete(request, Status::Ok);
        }
        device.notify();
        if done_before > 0 {
            assert_eq!(guest.result(ticket), None, "after {done_before}");
            assert!(device.has_begun());
            let again = pop_all(&mut device);
            assert_eq!(operations(&again), first);
            again.into_iter().for_each(|request| device.complete(request, Status::Ok));
            device.notify();
        }
        assert_eq!(guest.result(ticket), Some(OK), "after {done_before}");
    }
    // The content of what is discarded means nothing.
    let ticket = guest.submit(0, Command::Discard(&ranges.map(|(sector, count, _)| (sector, count, 0))));
    for request in pop_all(&mut device) {
        device.complete(request, Status::Ok);
        device.repeat_parts();
    }
    device.notify();
    assert_eq!(guest.result(ticket), Some(OK));
}
