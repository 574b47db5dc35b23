//! Ordinary use of a device, by a front end that plays QEMU and a guest.

#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "in a test a surprise is a failure, and sizes are small"
)]

use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use remoca_frontend::testing::{Backend, Command, Options, RamDisk, TestGuest, Ticket};
use remoca_frontend::vhost::{BlkRequest, DeviceConfig, Status, VhostDevice};
use remoca_io::socket::SocketSource;
use vhost::VhostBackend;

const DISK_BYTES: u64 = 8 << 20;
const OK: u8 = 0;
const IO_ERROR: u8 = 1;
const UNSUPPORTED: u8 = 2;
/// Long enough for any machine.
const PATIENCE: Duration = Duration::from_secs(60);

struct Setup {
    guest: TestGuest,
    backend: Backend,
    _folder: tempfile::TempDir,
}

fn config() -> DeviceConfig {
    let mut config = DeviceConfig::disk("test", "serial-0123456789ab", DISK_BYTES);
    config.logical_block_bytes = 512;
    config
}

fn start(config: DeviceConfig, options: Options) -> Setup {
    let folder = tempfile::tempdir().unwrap();
    let disk = Arc::new(Mutex::new(RamDisk::new(DISK_BYTES as usize)));
    let backend = Backend::spawn(config, &folder.path().join("s"), disk);
    let mut guest = TestGuest::new(options);
    guest.connect(&backend.socket).unwrap();
    Setup { guest, backend, _folder: folder }
}

fn pattern(length: usize, seed: u8) -> Vec<u8> {
    (0..length).map(|index| (index as u8).wrapping_mul(31).wrapping_add(seed)).collect()
}

fn read(guest: &mut TestGuest, queue: u16, sector: u64, length: usize) -> (u8, Vec<u8>) {
    let ticket = guest.submit(queue, Command::Read { sector, length: length as u64 });
    guest.queues[usize::from(queue)].kick();
    (guest.wait(ticket), guest.data(ticket, length))
}

#[test]
fn what_is_written_is_read_whatever_the_framing() {
    for (indirect, segment_count) in [(true, 1), (true, 7), (true, 200), (false, 1), (false, 2)] {
        let Setup { mut guest, backend: _backend, .. } =
            start(config(), Options { indirect, segment_count, ..Options::default() });
        for (sector, length) in [(0, 512), (7, 4096), (1000, 131_072), (DISK_BYTES / 512 - 1, 512)] {
            let data = pattern(length, segment_count as u8);
            assert_eq!(guest.run(0, Command::Write { sector, data: &data }), OK);
            assert_eq!(read(&mut guest, 0, sector, length), (OK, data), "{indirect} {segment_count} {length}");
        }
    }
}

#[test]
fn a_request_above_the_transfer_limit_is_one_request_to_the_guest() {
    let mut small = config();
    small.transfer_bytes_max = 8192;
    let Setup { mut guest, backend, .. } = start(small, Options { segment_count: 3, ..Options::default() });
    let data = pattern(100_352, 3);
    assert_eq!(guest.run(0, Command::Write { sector: 5, data: &data }), OK);
    assert_eq!(backend.plan.taken.load(SeqCst), 13, "100,352 bytes in pieces of 8,192");
    assert_eq!(read(&mut guest, 0, 5, data.len()), (OK, data.clone()));
    backend.plan.reverse.store(true, SeqCst);
    assert_eq!(read(&mut guest, 0, 5, data.len()), (OK, data), "pieces completed in any order");
    assert_eq!(guest.outstanding(), 0);
}

#[test]
fn a_chain_of_very_many_pieces_is_handed_out_a_bounded_number_at_a_time() {
    let mut small = config();
    small.transfer_bytes_max = 512;
    let Setup { mut guest, backend, .. } = start(small, Options { data_bytes: 3 << 20, ..Options::default() });
    backend.plan.hold.store(true, SeqCst);
    let data = pattern(3 << 20, 3);
    let ticket = guest.submit(0, Command::Write { sector: 0, data: &data });
    guest.queues[0].kick();
    backend.wait_until("the limit", |plan| plan.held.load(SeqCst) >= 4096);
    backend.wait_for_turn();
    assert_eq!(backend.plan.held.load(SeqCst), 4096, "of 6,144 pieces");
    backend.plan.hold.store(false, SeqCst);
    assert_eq!(guest.wait(ticket), OK, "the rest comes by itself");
    assert_eq!(backend.plan.taken.load(SeqCst), 6144);
    assert_eq!(read(&mut guest, 0, 0, data.len()), (OK, data));
}

/// Each range is a disk I/O of its own.
#[test]
fn of_requests_with_many_ranges_fewer_are_handed_out_at_a_time() {
    let options = Options { queue_size: 1024, ..Options::default() };
    let Setup { mut guest, backend, .. } = start(config(), options);
    backend.plan.hold.store(true, SeqCst);
    let ranges: Vec<_> = (0..16).map(|sector| (sector, 1, 0)).collect();
    for at in 0..512 {
        guest.submit(0, if at % 2 == 0 { Command::Discard(&ranges) } else { Command::WriteZeroes(&ranges) });
    }
    guest.queues[0].kick();
    backend.wait_until("the limit", |plan| plan.held.load(SeqCst) >= 256);
    backend.wait_for_turn();
    assert_eq!(backend.plan.held.load(SeqCst), 256, "4,096 ranges");
    backend.plan.hold.store(false, SeqCst);
    guest.wait_for_all();
    assert_eq!(backend.plan.taken.load(SeqCst), 512);
}

/// What a guest can make the device keep of its chains is bounded, however many buffers each of them has.
#[test]
fn requests_of_many_buffers_take_no_more_memory_than_a_few() {
    let bytes = 238 * 512;
    let options =
        Options { queue_count: 2, queue_size: 1024, data_bytes: bytes, segment_count: 238, ..Options::default() };
    let Setup { mut guest, backend, .. } = start(config(), options);
    backend.plan.hold.store(true, SeqCst);
    for queue in 0..2 {
        for _ in 0..1024 {
            guest.submit(queue, Command::Read { sector: 0, length: bytes });
        }
        guest.queues[usize::from(queue)].kick();
    }
    // With header and status each has 240 buffers; of 2,048 requests so many that 2^18 are reached.
    backend.wait_until("the limit", |plan| plan.held.load(SeqCst) >= 1093);
    backend.wait_for_turn();
    assert_eq!(backend.plan.held.load(SeqCst), 1093);
    backend.plan.hold.store(false, SeqCst);
    guest.wait_for_all();
    assert_eq!(backend.plan.taken.load(SeqCst), 2048);
}

#[test]
fn every_queue_works_and_completes_everything_it_is_given() {
    let options = Options { queue_count: 4, data_bytes: 4096, ..Options::default() };
    let Setup { mut guest, backend, .. } = start(config(), options);
    backend.plan.reverse.store(true, SeqCst);
    for round in 0..40u64 {
        let mut tickets: Vec<Ticket> = Vec::new();
        for queue in 0..4 {
            for index in 0..100u64 {
                let sector = (u64::from(queue) * 100 + index) * 8;
                let data = pattern(4096, (round + index) as u8);
                tickets.push(guest.submit(queue, Command::Write { sector, data: &data }));
            }
            guest.queues[usize::from(queue)].kick();
        }
        for ticket in tickets {
            assert_eq!(guest.wait(ticket), OK);
        }
    }
    let (status, data) = read(&mut guest, 3, (2 * 100 + 17) * 8, 4096);
    assert_eq!((status, data), (OK, pattern(4096, 39 + 17)));
}

#[test]
fn serial_flush_discard_and_write_zeroes() {
    let Setup { mut guest, backend, .. } = start(config(), Options::default());
    let ticket = guest.submit(0, Command::GetId);
    guest.queues[0].kick();
    assert_eq!(guest.wait(ticket), OK);
    assert_eq!(guest.data(ticket, 20), b"serial-0123456789ab\0");

    assert_eq!(guest.run(0, Command::Flush), OK);
    assert_eq!(backend.disk.lock().unwrap().flush_count, 1);

    let data = pattern(64 * 512, 1);
    assert_eq!(guest.run(0, Command::Write { sector: 0, data: &data }), OK);
    assert_eq!(guest.run(0, Command::Discard(&[(0, 2, 0), (10, 1, 0)])), OK);
    assert_eq!(guest.run(0, Command::WriteZeroes(&[(20, 4, 0), (40, 4, 1)])), OK);
    let (_, after) = read(&mut guest, 0, 0, 64 * 512);
    for (sector, bytes) in after.chunks(512).enumerate() {
        let zeroed = matches!(sector, 0..2 | 10 | 20..24 | 40..44);
        assert_eq!(bytes.iter().all(|byte| *byte == 0), zeroed, "sector {sector}");
    }
}

#[test]
fn requests_that_cannot_be_are_refused() {
    let mut strict = config();
    strict.logical_block_bytes = 4096;
    strict.range_bytes_max = 1 << 20;
    strict.range_count_max = 2;
    let Setup { mut guest, backend, .. } = start(strict, Options::default());
    let end = DISK_BYTES / 512;
    let block = pattern(4096, 9);
    let refused = [
        Command::Read { sector: end, length: 4096 },
        Command::Read { sector: end - 8, length: 8192 },
        Command::Read { sector: u64::MAX, length: 4096 },
        Command::Read { sector: u64::MAX / 512, length: 4096 },
        Command::Read { sector: 1, length: 4096 },
        Command::Read { sector: 0, length: 512 },
        Command::Read { sector: 0, length: 4095 },
        Command::Write { sector: end, data: &block },
        Command::Write { sector: 0, data: &block[..4095] },
        Command::Raw { kind: 0, sector: 0, data: &block, length: 4096 },
        Command::Raw { kind: 1, sector: 0, data: &block, length: 4096 },
        Command::Discard(&[]),
        Command::Discard(&[(0, 7, 0)]),
        Command::Discard(&[(0, 8, 0), (8, 8, 0), (16, 8, 0)]),
        Command::Discard(&[(end - 8, 16, 0)]),
        Command::Discard(&[(u64::MAX - 7, 8, 0)]),
        Command::WriteZeroes(&[(0, 4096, 0)]),
        Command::Raw { kind: 11, sector: 0, data: &block[..17], length: 0 },
        Command::Raw { kind: 11, sector: 0, data: &[], length: 16 },
    ];
    for command in refused {
        assert_eq!(guest.run(0, command), IO_ERROR, "{command:?}");
    }
    let unsupported = [
        Command::Discard(&[(0, 8, 1)]),
        Command::WriteZeroes(&[(0, 8, 2)]),
        Command::Raw { kind: 2, sector: 0, data: &[], length: 96 },
        Command::Raw { kind: 14, sector: 0, data: &[], length: 0 },
        Command::Raw { kind: u32::MAX, sector: 0, data: &[], length: 0 },
    ];
    for command in unsupported {
        assert_eq!(guest.run(0, command), UNSUPPORTED, "{command:?}");
    }
    let nothing = [Command::Read { sector: 0, length: 0 }, Command::Discard(&[(8, 0, 0)])];
    for command in nothing {
        assert_eq!(guest.run(0, command), OK, "{command:?}");
    }
    assert_eq!(backend.plan.taken.load(SeqCst), 0, "none of them reached the driver");
    assert_eq!(guest.run(0, Command::Read { sector: 0, length: 4096 }), OK, "the queue is none the worse for it");
}

#[test]
fn a_read_only_disk_is_not_written() {
    let mut fixed = config();
    fixed.read_only = true;
    let Setup { mut guest, backend, .. } = start(fixed, Options::default());
    let data = pattern(512, 1);
    assert_eq!(guest.run(0, Command::Write { sector: 0, data: &data }), IO_ERROR);
    assert_eq!(guest.run(0, Command::Discard(&[(0, 1, 0)])), IO_ERROR);
    assert_eq!(guest.run(0, Command::WriteZeroes(&[(0, 1, 0)])), IO_ERROR);
    assert_eq!(guest.run(0, Command::Flush), OK);
    assert_eq!(read(&mut guest, 0, 0, 512), (OK, vec![0; 512]));
    assert!(backend.disk.lock().unwrap().bytes.iter().all(|byte| *byte == 0));
}

#[test]
fn the_configuration_space_is_readable_beyond_its_end() {
    let Setup { mut guest, backend: _backend, .. } = start(config(), Options::default());
    let space = guest.read_config(0, 60).unwrap();
    assert_eq!(space[..8], (DISK_BYTES / 512).to_le_bytes());
    assert_eq!(space[34..36], 16u16.to_le_bytes());
    let longer = guest.read_config(0, 96).unwrap();
    assert_eq!(longer[..60], space);
    assert_eq!(longer[60..], [0; 36]);
    assert_eq!(guest.read_config(200, 4).unwrap(), [0; 4]);
}

#[test]
fn the_guest_decides_about_the_write_cache() {
    let mut without_flush = config();
    without_flush.flush = false;
    let Setup { guest: _guest, backend, .. } = start(without_flush, Options::default());
    backend.wait_until("the connection", |plan| plan.connected.load(SeqCst));
    assert!(!backend.plan.write_cache.load(SeqCst), "a guest that cannot flush");

    let flush_alone = 1 << 9;
    let Setup { guest: _guest, backend, .. } = start(config(), Options { features: flush_alone, ..Options::default() });
    backend.wait_until("write-back", |plan| plan.write_cache.load(SeqCst));

    let Setup { mut guest, backend, .. } = start(config(), Options::default());
    backend.wait_until("write-back", |plan| plan.write_cache.load(SeqCst));
    guest.set_writeback(false).unwrap();
    assert_eq!(guest.read_config(32, 1).unwrap(), [0]);
    backend.wait_until("write-through", |plan| !plan.write_cache.load(SeqCst));
}

#[test]
fn a_guest_that_polls_is_not_interrupted() {
    let Setup { mut guest, backend, .. } = start(config(), Options::default());
    assert_eq!(guest.run(0, Command::Flush), OK);
    // Its result is there before its interrupt.
    backend.wait_for_turn();
    guest.queues[0].suppress_interrupts(true);
    while guest.interrupted(0, Duration::ZERO) {}
    let ticket = guest.submit(0, Command::Flush);
    guest.queues[0].kick();
    while guest.result(ticket).is_none() {
        std::thread::yield_now();
    }
    backend.wait_for_turn();
    assert!(!guest.interrupted(0, Duration::ZERO));
    guest.queues[0].suppress_interrupts(false);
    assert_eq!(guest.run(0, Command::Flush), OK);
}

#[test]
fn memory_can_be_exchanged_under_requests_in_flight() {
    let Setup { mut guest, backend, .. } = start(config(), Options::default());
    let data = pattern(4096, 77);
    backend.plan.hold.store(true, SeqCst);
    let ticket = guest.submit(0, Command::Write { sector: 8, data: &data });
    guest.queues[0].kick();
    backend.wait_until("the request", |plan| plan.held.load(SeqCst) == 1);
    guest.share_memory().unwrap();
    let regions = guest.regions();
    guest.frontend().set_mem_table(&regions[..1]).unwrap();
    backend.plan.hold.store(false, SeqCst);
    assert_eq!(guest.wait(ticket), OK, "its region is gone, its mapping is not");
    guest.submit(0, Command::Flush);
    guest.queues[0].kick();
    assert!(guest.wait_for_error(0), "a request in memory that is not shared");
}

/// A device that the test drives itself, and a guest.
struct Alone {
    device: VhostDevice,
    guest: TestGuest,
    held: Vec<BlkRequest>,
    _folder: tempfile::TempDir,
}

impl Alone {
    fn start(config: DeviceConfig, options: Options) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("s");
        let mut device = VhostDevice::new(config, SocketSource::bind(&socket, None).unwrap()).unwrap();
        let mut guest = TestGuest::new(options);
        std::thread::scope(|threads| {
            let connected = threads.spawn(|| guest.connect(&socket).unwrap());
            while !connected.is_finished() {
                device.handle_events().unwrap();
                device.notify();
                std::thread::yield_now();
            }
            connected.join().unwrap();
        });
        Self { device, guest, held: Vec::new(), _folder: folder }
    }

    fn pop_all(&mut self) {
        self.device.handle_events().unwrap();
        self.held.extend(std::iter::from_fn(|| self.device.pop()));
    }

    fn is_awake(&self) -> bool {
        let event = rustix::event::PollFd::from_borrowed_fd(self.device.event_fd(), rustix::event::PollFlags::IN);
        rustix::event::poll(&mut [event], Some(&rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() > 0
    }
}

#[test]
fn of_the_pieces_of_a_long_request_the_worst_status_is_that_of_the_request() {
    let config = DeviceConfig { transfer_bytes_max: 4096, ..config() };
    let mut alone = Alone::start(config, Options::default());
    for failing in [None, Some(0), Some(1), Some(2)] {
        for order in [[0, 0, 0], [2, 1, 0], [1, 1, 0]] {
            let ticket = alone.guest.submit(0, Command::Read { sector: 0, length: 3 * 4096 });
            alone.pop_all();
            assert_eq!(alone.held.len(), 3);
            let failing = failing.map(|failing| alone.held[failing].id());
            for which in order {
                assert_eq!(alone.guest.result(ticket), None, "a piece is not done");
                let request = alone.held.remove(which);
                let status = if Some(request.id()) == failing { Status::IoError } else { Status::Ok };
                alone.device.complete(request, status);
                alone.device.notify();
            }
            let expected = if failing.is_some() { IO_ERROR } else { OK };
            assert_eq!(alone.guest.result(ticket), Some(expected), "{failing:?} fails");
        }
    }
}

/// A request of more pieces than are handed out at a time: nobody kicks for the rest of it.
#[test]
fn a_throttled_device_says_when_it_has_room() {
    hand_out_a_long_request(VhostDevice::pop);
}

#[test]
fn the_rest_of_a_request_is_handed_out_within_the_same_limit() {
    hand_out_a_long_request(VhostDevice::pop_begun);
}

/// `pop`: for all but the first piece.
fn hand_out_a_long_request(pop: fn(&mut VhostDevice) -> Option<BlkRequest>) {
    let pieces = 5000;
    let mut config = DeviceConfig { transfer_bytes_max: 512, ..config() };
    config.capacity_bytes = 512 * pieces;
    let options = Options { queue_size: 4, data_bytes: 512 * pieces, ..Options::default() };
    let mut alone = Alone::start(config, options);
    let ticket = alone.guest.submit(0, Command::Read { sector: 0, length: 512 * pieces });
    let mut completed = 0;
    alone.device.handle_events().unwrap();
    alone.held.extend(alone.device.pop());
    loop {
        alone.device.handle_events().unwrap();
        alone.held.extend(std::iter::from_fn(|| pop(&mut alone.device)));
        assert!(alone.held.len() <= 4096, "{} are handed out", alone.held.len());
        assert!(!alone.is_awake(), "there is no room");
        if alone.held.is_empty() {
            break;
        }
        completed += alone.held.len();
        for request in alone.held.drain(..) {
            alone.device.complete(request, Status::Ok);
        }
        alone.device.notify();
        if completed < usize::try_from(pieces).unwrap() {
            assert!(alone.is_awake(), "the rest would never be asked for");
            assert!(alone.device.has_begun());
        }
    }
    assert!(!alone.device.has_begun());
    assert_eq!(alone.guest.result(ticket), Some(OK));
}

/// It has no record itself. What the former one left in its own is that one's.
#[test]
fn the_record_of_a_front_end_goes_with_it() {
    let Setup { mut guest, backend, _folder } = start(config(), Options::default());
    backend.plan.hold.store(true, SeqCst);
    guest.submit(0, Command::Read { sector: 0, length: 4096 });
    guest.queues[0].kick();
    backend.wait_until("the request", |plan| plan.held.load(SeqCst) == 1);
    guest.disconnect();
    backend.wait_until("the end of the connection", |plan| !plan.connected.load(SeqCst));
    backend.plan.hold.store(false, SeqCst);
    let mut other = TestGuest::new(Options { inflight: false, ..Options::default() });
    other.connect(&backend.socket).unwrap();
    let taken = backend.plan.taken.load(SeqCst);
    assert_eq!(read(&mut other, 0, 8, 4096).0, OK);
    assert_eq!(backend.plan.taken.load(SeqCst), taken + 1, "its own request, and no other");
}

/// As if the disk were elsewhere: what is to be repeated stays in the record, and nobody waits for it.
#[test]
fn a_device_that_stands_aside_lets_its_queues_be_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let mut alone = Alone::start(config(), Options::default());
    let data = [5; 4096];
    let ticket = alone.guest.submit(0, Command::Write { sector: 0, data: &data });
    alone.pop_all();
    assert_eq!(alone.held.len(), 1);
    let Alone { mut guest, .. } = alone;
    guest.disconnect();
    for round in 0..2 {
        let socket = folder.path().join("next");
        let device = VhostDevice::new(config(), SocketSource::bind(&socket, None).unwrap()).unwrap();
        let give_up_at = Instant::now() + PATIENCE;
        std::thread::scope(|threads| {
            let mut device = Some(device);
            let stopped = threads.spawn(|| {
                guest.connect(&socket).unwrap();
                assert_eq!(guest.stop_queue(0).unwrap(), 1, "what was taken, done or not");
                let base = guest.queues[0].used_index();
                guest.start_queue(0, base).unwrap();
                guest.stop_queue(0).unwrap();
                guest.disconnect();
            });
            while let Some(device) = device.as_mut().filter(|_| !stopped.is_finished() && Instant::now() < give_up_at) {
                device.handle_events().unwrap();
                device.stand_aside(round == 0);
                device.notify();
                std::thread::yield_now();
            }
            // Nobody is kept waiting by a test that fails.
            drop(device.take());
            stopped.join().unwrap();
        });
        assert_eq!(guest.result(ticket), None, "round {round}");
    }
    let disk = Arc::new(Mutex::new(RamDisk::new(DISK_BYTES as usize)));
    let backend = Backend::spawn(config(), &folder.path().join("last"), disk);
    guest.connect(&backend.socket).unwrap();
    assert_eq!(guest.wait(ticket), OK);
    assert_eq!(backend.disk.lock().unwrap().bytes[..4096], data);
}

#[test]
fn a_guest_need_not_kick_while_the_driver_looks_by_itself() {
    let options = Options { queue_count: 2, data_bytes: 4096, ..Options::default() };
    let mut alone = Alone::start(config(), options);
    let submit = |alone: &mut Alone, queue| alone.guest.submit(queue, Command::Read { sector: 0, length: 4096 });
    let wants_kicks = |alone: &Alone| [0, 1].map(|queue: usize| alone.guest.queues[queue].wants_kicks());
    alone.pop_all();
    assert!(wants_kicks(&alone) == [true; 2] && alone.device.listen().is_none());
    submit(&mut alone, 1);
    assert!(!alone.device.has_requests(), "the guest has to kick for it");
    alone.pop_all();
    assert_eq!(wants_kicks(&alone), [true, false], "of the other queue nobody looks");
    assert!(!alone.device.has_requests());
    for _ in 0..3 {
        submit(&mut alone, 1);
        assert!(alone.device.has_requests());
        alone.pop_all();
        assert!(!alone.device.has_requests(), "it is taken");
    }
    submit(&mut alone, 1);
    assert_eq!(alone.device.listen(), Some(true), "the driver has to look before it waits");
    assert!(wants_kicks(&alone) == [true; 2] && !alone.device.has_requests() && alone.device.listen().is_none());
    alone.pop_all();
    assert_eq!((alone.held.len(), alone.device.listen()), (5, Some(false)));
    assert!(!alone.is_awake());
    submit(&mut alone, 1);
    alone.guest.queues[1].kick();
    assert!(alone.is_awake());
}

/// Else it would look for ever at what it cannot take.
#[test]
fn a_device_does_not_look_for_what_it_cannot_take() {
    let mut config = DeviceConfig { transfer_bytes_max: 512, ..config() };
    config.capacity_bytes = 512 * 5000;
    let options = Options { queue_size: 4, data_bytes: 512 * 5000, ..Options::default() };
    let mut alone = Alone::start(config, options);
    alone.guest.submit(0, Command::Read { sector: 0, length: 512 * 4096 });
    alone.pop_all();
    assert_eq!(alone.held.len(), 4096);
    let ticket = alone.guest.submit(0, Command::Read { sector: 0, length: 512 });
    assert!(!alone.device.has_requests() && alone.device.listen() == Some(false), "there is no room");
    assert!(alone.guest.queues[0].wants_kicks());
    for request in alone.held.drain(..) {
        alone.device.complete(request, Status::Ok);
    }
    alone.device.notify();
    assert!(alone.is_awake(), "nobody kicks for it again");
    alone.pop_all();
    alone.device.complete(alone.held.remove(0), Status::Ok);
    alone.device.notify();
    assert_eq!(alone.guest.result(ticket), Some(OK));
}

/// A guest that was told not to kick by a back end that died then would never be heard again.
#[test]
fn a_back_end_that_starts_a_queue_tells_its_guest_to_kick() {
    let mut alone = Alone::start(config(), Options::default());
    let first = alone.guest.submit(0, Command::Read { sector: 0, length: 4096 });
    alone.pop_all();
    let Alone { device, mut guest, held, _folder: _ } = alone;
    // Killed: nothing is completed, nobody listens.
    std::mem::forget(held);
    guest.disconnect();
    drop(device);
    assert!(!guest.queues[0].wants_kicks());
    let second = guest.submit(0, Command::Read { sector: 0, length: 4096 });
    let folder = tempfile::tempdir().unwrap();
    let disk = Arc::new(Mutex::new(RamDisk::new(DISK_BYTES as usize)));
    let backend = Backend::spawn(config(), &folder.path().join("next"), disk);
    // It is not to be told by the look at the first request.
    backend.plan.deaf.store(true, SeqCst);
    guest.connect(&backend.socket).unwrap();
    assert!(guest.queues[0].wants_kicks());
    backend.plan.deaf.store(false, SeqCst);
    assert_eq!((guest.wait(first), guest.wait(second)), (OK, OK));
}

#[test]
fn a_queue_that_stops_within_a_turn_leaves_a_guest_that_kicks() {
    let mut alone = Alone::start(config(), Options::default());
    alone.guest.submit(0, Command::Read { sector: 0, length: 4096 });
    alone.pop_all();
    assert!(!alone.guest.queues[0].wants_kicks());
    let Alone { device, guest, held, .. } = &mut alone;
    std::thread::scope(|threads| {
        let stopped = threads.spawn(|| guest.stop_queue(0).unwrap());
        while !stopped.is_finished() {
            device.handle_events().unwrap();
            held.drain(..).for_each(|request| device.complete(request, Status::Ok));
            device.notify();
            std::thread::yield_now();
        }
        assert_eq!(stopped.join().unwrap(), 1);
    });
    assert!(alone.guest.queues[0].wants_kicks());
}

/// A driver would look for ever at what a queue does not hand out.
#[test]
fn a_device_does_not_look_at_queues_that_hand_out_nothing() {
    for ends in [false, true] {
        let mut alone = Alone::start(config(), Options::default());
        for _ in 0..2 {
            alone.pop_all();
            alone.guest.submit(0, Command::Read { sector: 0, length: 4096 });
        }
        assert!(alone.device.has_requests());
        let Alone { device, guest, held, .. } = &mut alone;
        std::thread::scope(|threads| {
            let done = threads.spawn(|| {
                // Stopped while it is enabled, as by a front end that does not disable it first.
                if ends { guest.frontend().get_vring_base(0).map(drop) } else { guest.enable_queue(0, false) }
            });
            let give_up_at = Instant::now() + PATIENCE;
            while device.has_requests() && Instant::now() < give_up_at {
                device.handle_events().unwrap();
                device.notify();
            }
            let looks = device.has_requests();
            held.drain(..).for_each(|request| device.complete(request, Status::Ok));
            while !done.is_finished() {
                device.handle_events().unwrap();
                device.notify();
            }
            done.join().unwrap().unwrap();
            assert!(!looks, "the queue ends: {ends}");
        });
    }
}

#[test]
fn a_device_does_not_look_while_its_chains_have_too_many_buffers() {
    let bytes = 238 * 512;
    let options =
        Options { queue_count: 2, queue_size: 1024, data_bytes: bytes, segment_count: 238, ..Options::default() };
    let mut alone = Alone::start(config(), options);
    for queue in [0, 1] {
        for _ in 0..1024 {
            alone.guest.submit(queue, Command::Read { sector: 0, length: bytes });
        }
    }
    alone.pop_all();
    assert_eq!(alone.held.len(), 1093);
    assert!(!alone.device.has_requests() && alone.device.listen() == Some(false));
}

#[test]
fn a_device_does_not_look_before_the_flush_that_it_has_to_hand_out_first() {
    let mut alone = Alone::start(config(), Options::default());
    alone.guest.submit(0, Command::Read { sector: 0, length: 4096 });
    alone.pop_all();
    let mut frontend = alone.guest.frontend().clone();
    std::thread::scope(|threads| {
        let switched = threads.spawn(move || {
            let flags = vhost::vhost_user::message::VhostUserConfigFlags::WRITABLE;
            vhost::vhost_user::VhostUserFrontend::set_config(&mut frontend, 32, flags, &[0]).unwrap();
        });
        let give_up_at = Instant::now() + PATIENCE;
        while alone.device.write_cache_enabled() && Instant::now() < give_up_at {
            alone.device.handle_events().unwrap();
        }
        alone.guest.submit(0, Command::Read { sector: 8, length: 4096 });
        let looks = alone.device.has_requests();
        alone.device.complete(alone.held.remove(0), Status::Ok);
        alone.pop_all();
        let count = alone.held.len();
        alone.held.drain(..).for_each(|request| alone.device.complete(request, Status::Ok));
        alone.device.notify();
        switched.join().unwrap();
        assert_eq!((looks, count), (false, 2), "the flush, then the request");
    });
}
