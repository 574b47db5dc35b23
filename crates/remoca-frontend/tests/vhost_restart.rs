//! Back ends that die or are stopped with requests in flight: each request is completed exactly once.
//!
//! The test guest panics when a request is completed that it does not wait for, so "once" needs no test of its own.

#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "in a test a surprise is a failure, and sizes are small"
)]

use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use remoca_frontend::testing::{Backend, Command, Options, Plan, RamDisk, TestGuest, Ticket};
use remoca_frontend::vhost::{DeviceConfig, Status, VhostDevice};
use remoca_io::socket::SocketSource;
use vhost::VhostBackend;

const DISK_BYTES: usize = 4 << 20;
const OK: u8 = 0;

fn config() -> DeviceConfig {
    DeviceConfig::disk("restart", "restart", DISK_BYTES as u64)
}

fn disk() -> Arc<Mutex<RamDisk>> {
    Arc::new(Mutex::new(RamDisk::new(DISK_BYTES)))
}

/// A back end that takes requests and completes none.
fn holding() -> Plan {
    Plan { hold: AtomicBool::new(true), ..Plan::default() }
}

fn options() -> Options {
    Options { queue_count: 2, queue_size: 32, data_bytes: 4096, ..Options::default() }
}

/// Submits a write of `seed` to each of `count` blocks from `first`.
fn submit_writes(guest: &mut TestGuest, queue: u16, first: u64, count: u64, seed: u8) -> Vec<Ticket> {
    let tickets = (first..first + count)
        .map(|block| guest.submit(queue, Command::Write { sector: block * 8, data: &[seed; 4096] }))
        .collect();
    guest.queues[usize::from(queue)].kick();
    tickets
}

/// Has the guest switch its write cache off. The thread returns whether that succeeded.
fn switch_write_cache_off(guest: &mut TestGuest) -> JoinHandle<bool> {
    let mut frontend = guest.frontend().clone();
    std::thread::spawn(move || {
        let flags = vhost::vhost_user::message::VhostUserConfigFlags::WRITABLE;
        vhost::vhost_user::VhostUserFrontend::set_config(&mut frontend, 32, flags, &[0]).is_ok()
    })
}

fn wait_held(backend: &Backend, count: usize) {
    backend.wait_until("the requests", |plan| plan.held.load(SeqCst) == count);
}

#[test]
fn a_dead_back_end_loses_no_request() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let ram = disk();
    let mut guest = TestGuest::new(options());

    let first = Backend::spawn(config(), &socket, ram.clone());
    guest.connect(&socket).unwrap();
    let done = submit_writes(&mut guest, 0, 0, 5, 1);
    done.into_iter().for_each(|ticket| assert_eq!(guest.wait(ticket), OK));
    first.plan.hold.store(true, SeqCst);
    let mut waiting = submit_writes(&mut guest, 0, 10, 7, 2);
    waiting.extend(submit_writes(&mut guest, 1, 20, 20, 3));
    wait_held(&first, 27);
    drop(first);
    // The guest goes on submitting while there is nobody.
    waiting.extend(submit_writes(&mut guest, 0, 50, 6, 4));
    assert_eq!(guest.poll(0) + guest.poll(1), 0);

    let second = Backend::spawn(config(), &socket, ram.clone());
    guest.connect(&socket).unwrap();
    waiting.into_iter().for_each(|ticket| assert_eq!(guest.wait(ticket), OK));
    assert_eq!(guest.outstanding(), 0);
    assert_eq!(second.plan.taken.load(SeqCst), 33, "what was completed before is not repeated");
    let ram = ram.lock().unwrap();
    let blocks = [(0, 5, 1), (10, 7, 2), (20, 20, 3), (50, 6, 4)];
    for (first, count, seed) in blocks {
        assert!(ram.bytes[first * 4096..(first + count) * 4096].iter().all(|byte| *byte == seed));
    }
}

#[test]
fn requests_are_resubmitted_in_order_of_arrival() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let ram = disk();
    let mut guest = TestGuest::new(options());
    let first = Backend::spawn(config(), &socket, ram.clone());
    guest.connect(&socket).unwrap();
    // Slots are reused last in, first out: afterwards, the order of heads is not the order of arrival.
    submit_writes(&mut guest, 0, 0, 9, 0).into_iter().for_each(|ticket| assert_eq!(guest.wait(ticket), OK));
    first.plan.hold.store(true, SeqCst);
    for seed in 1..=9 {
        submit_writes(&mut guest, 0, 0, 1, seed);
    }
    wait_held(&first, 9);
    drop(first);
    for _ in 0..3 {
        // Dies again before it has done anything about them.
        let again = Backend::spawn_with(config(), &socket, ram.clone(), holding());
        guest.connect(&socket).unwrap();
        wait_held(&again, 9);
    }
    let _last = Backend::spawn(config(), &socket, ram.clone());
    guest.connect(&socket).unwrap();
    guest.wait_for_all();
    assert_eq!(ram.lock().unwrap().bytes[0], 9, "the write that came last");
}

#[test]
fn many_deaths_under_load() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let ram = disk();
    let mut guest = TestGuest::new(options());
    let mut expected = vec![0u8; DISK_BYTES / 4096];
    let mut resubmitted = 0;
    for round in 0..30u8 {
        let plan = Plan { reverse: AtomicBool::new(round % 2 == 0), ..Plan::default() };
        let backend = Backend::spawn_with(config(), &socket, ram.clone(), plan);
        let before = guest.outstanding();
        guest.connect(&socket).unwrap();
        guest.wait_for_all();
        resubmitted += before;
        for burst in 0..8u8 {
            backend.plan.hold.store(burst == 7, SeqCst);
            for queue in 0..2u16 {
                let first = u64::from(queue) * 100 + u64::from(burst) * 10;
                let seed = round.wrapping_mul(8).wrapping_add(burst);
                submit_writes(&mut guest, queue, first, 10, seed);
                expected[first as usize..first as usize + 10].fill(seed);
            }
            if burst < 7 {
                guest.wait_for_all();
            }
        }
        // Dies with up to twenty requests taken, or seen, or not yet seen.
        if round % 3 == 0 {
            wait_held(&backend, 20);
        }
    }
    assert!(resubmitted >= 200, "{resubmitted}");
    let _last = Backend::spawn(config(), &socket, ram.clone());
    guest.connect(&socket).unwrap();
    guest.wait_for_all();
    let ram = ram.lock().unwrap();
    for (block, seed) in expected.iter().enumerate() {
        assert_eq!(ram.bytes[block * 4096], *seed, "block {block}");
    }
}

#[test]
fn a_queue_is_stopped_when_it_is_drained() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let backend = Backend::spawn_with(config(), &socket, disk(), holding());
    let mut guest = TestGuest::new(options());
    guest.connect(&socket).unwrap();
    submit_writes(&mut guest, 0, 0, 9, 1);
    submit_writes(&mut guest, 1, 20, 4, 1);
    wait_held(&backend, 13);

    let mut frontend = guest.frontend().clone();
    let stopper = std::thread::spawn(move || {
        vhost::vhost_user::VhostUserFrontend::set_vring_enable(&mut frontend, 0, false).unwrap();
        frontend.get_vring_base(0).unwrap()
    });
    backend.wait_for_turn();
    // Not a proof, for lack of time to wait for what must never come; a device that does not drain is caught at once.
    std::thread::sleep(Duration::from_millis(50));
    assert!(!stopper.is_finished(), "nine requests are in flight");
    backend.plan.hold.store(false, SeqCst);
    assert_eq!(stopper.join().unwrap(), 9);
    assert_eq!(guest.poll(0), 9, "all completed before the answer");
    guest.wait_for_all();

    // What comes while the queue is stopped waits until it is started again, where it was stopped.
    let ticket = submit_writes(&mut guest, 0, 0, 1, 2)[0];
    backend.wait_for_turn();
    assert_eq!(guest.result(ticket), None);
    guest.start_queue(0, 9).unwrap();
    assert_eq!(guest.wait(ticket), OK);
    assert_eq!(guest.stop_queue(0).unwrap(), 10);
    assert_eq!(guest.stop_queue(0).unwrap(), 10, "stopping twice changes nothing");
}

#[test]
fn resubmitted_requests_are_drained_too() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let ram = disk();
    let mut guest = TestGuest::new(options());
    let first = Backend::spawn_with(config(), &socket, ram.clone(), holding());
    guest.connect(&socket).unwrap();
    submit_writes(&mut guest, 0, 0, 6, 1);
    wait_held(&first, 6);
    drop(first);
    let _second = Backend::spawn(config(), &socket, ram);
    guest.connect(&socket).unwrap();
    assert_eq!(guest.stop_queue(0).unwrap(), 6);
    assert_eq!(guest.poll(0), 6);
}

#[test]
fn a_front_end_that_comes_back_waits_for_what_it_left() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let ram = disk();
    let backend = Backend::spawn_with(config(), &socket, ram.clone(), holding());
    let mut guest = TestGuest::new(options());
    guest.connect(&socket).unwrap();
    submit_writes(&mut guest, 0, 0, 5, 7);
    wait_held(&backend, 5);
    guest.disconnect();
    backend.wait_until("the disconnect", |plan| !plan.connected.load(SeqCst));

    // The old requests are still under way: repeated now, they could overtake themselves.
    let waiting = std::thread::spawn(move || {
        guest.connect(&socket).unwrap();
        guest.wait_for_all();
        guest
    });
    backend.wait_for_turn();
    std::thread::sleep(Duration::from_millis(50));
    assert!(!backend.plan.connected.load(SeqCst), "accepted too early");
    assert_eq!(backend.plan.taken.load(SeqCst), 5);
    backend.plan.hold.store(false, SeqCst);
    let mut guest = waiting.join().unwrap();
    assert_eq!(backend.plan.taken.load(SeqCst), 10, "each of the five executed again");
    assert_eq!(guest.outstanding(), 0);
    assert_eq!(guest.run(0, Command::Flush), OK);
}

#[test]
fn nothing_is_written_to_a_guest_that_has_gone() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let ram = disk();
    let backend = Backend::spawn_with(config(), &socket, ram, holding());
    let mut guest = TestGuest::new(options());
    guest.connect(&socket).unwrap();
    let ticket = guest.submit(0, Command::Read { sector: 0, length: 4096 });
    guest.queues[0].kick();
    wait_held(&backend, 1);
    guest.disconnect();
    backend.wait_until("the disconnect", |plan| !plan.connected.load(SeqCst));
    let address = vm_memory::GuestAddress(guest.slot_address(ticket) + 4096);
    vm_memory::Bytes::write_slice(&*guest.memory, &[0x77; 4096], address).unwrap();
    backend.plan.hold.store(false, SeqCst);
    wait_held(&backend, 0);
    backend.wait_for_turn();
    assert_eq!(guest.data(ticket, 4096), [0x77; 4096]);
    assert_eq!((guest.poll(0), guest.queues[0].used_index()), (0, 0));
}

#[test]
fn a_reset_device_starts_with_an_empty_record() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let backend = Backend::spawn(config(), &socket, disk());
    let mut guest = TestGuest::new(options());
    for _ in 0..3 {
        guest.connect(&socket).unwrap();
        for block in 0..40 {
            let data = [9; 4096];
            assert_eq!(guest.run(0, Command::Write { sector: block * 8, data: &data }), OK);
        }
        guest.stop_queue(0).unwrap();
        guest.stop_queue(1).unwrap();
        guest.reset();
        guest.disconnect();
    }
    assert_eq!(backend.plan.taken.load(SeqCst), 120);
}

#[test]
fn switching_the_write_cache_off_makes_earlier_writes_durable() {
    let folder = tempfile::tempdir().unwrap();
    let backend = Backend::spawn_with(config(), &folder.path().join("s"), disk(), holding());
    let mut guest = TestGuest::new(options());
    guest.connect(&backend.socket).unwrap();
    let early = submit_writes(&mut guest, 0, 0, 3, 1);
    wait_held(&backend, 3);
    let switch = switch_write_cache_off(&mut guest);
    backend.wait_until("write-through", |plan| !plan.write_cache.load(SeqCst));
    let late = submit_writes(&mut guest, 0, 10, 3, 2);
    backend.wait_for_turn();
    assert_eq!(backend.plan.taken.load(SeqCst), 3, "a flush now would miss the writes under way");
    assert!(!switch.is_finished());
    backend.plan.hold.store(false, SeqCst);
    assert!(switch.join().unwrap());
    assert_eq!(backend.disk.lock().unwrap().flush_count, 1);
    early.into_iter().chain(late).for_each(|ticket| assert_eq!(guest.wait(ticket), OK));
    assert_eq!(backend.plan.taken.load(SeqCst), 7);
    // Once off, or on again, there is nothing to flush.
    guest.set_writeback(false).unwrap();
    guest.set_writeback(true).unwrap();
    assert_eq!(backend.disk.lock().unwrap().flush_count, 1);
}

#[test]
fn a_device_ends_while_its_front_end_waits_for_an_answer() {
    let folder = tempfile::tempdir().unwrap();
    let backend = Backend::spawn_with(config(), &folder.path().join("s"), disk(), holding());
    let mut guest = TestGuest::new(options());
    guest.connect(&backend.socket).unwrap();
    submit_writes(&mut guest, 0, 0, 1, 1);
    wait_held(&backend, 1);
    let switch = switch_write_cache_off(&mut guest);
    backend.wait_until("write-through", |plan| !plan.write_cache.load(SeqCst));
    drop(backend);
    assert!(!switch.join().unwrap(), "nobody made the write durable");
}

#[test]
fn a_switched_off_write_cache_stays_off() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let mut guest = TestGuest::new(options());
    let first = Backend::spawn(config(), &socket, disk());
    guest.connect(&socket).unwrap();
    guest.set_writeback(false).unwrap();
    // For the next front end of the same process,
    guest.disconnect();
    guest.connect(&socket).unwrap();
    first.wait_until("write-through", |plan| plan.connected.load(SeqCst) && !plan.write_cache.load(SeqCst));
    assert_eq!(guest.read_config(32, 1).unwrap(), [0]);
    drop(first);
    // and for the next process with the same guest.
    let second = Backend::spawn(config(), &socket, disk());
    guest.connect(&socket).unwrap();
    second.wait_for_turn();
    assert!(!second.plan.write_cache.load(SeqCst), "no write may complete before it is durable");
}

/// Its record says what this process assumed. The hypervisor would wait within its message, perhaps for a disk that hangs.
#[test]
fn a_front_end_that_connects_waits_for_no_flush_that_is_owed() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let mut device = VhostDevice::new(config(), SocketSource::bind(&socket, None).unwrap()).unwrap();
    device.assume_no_write_cache();
    let connecting = std::thread::spawn(move || {
        let mut guest = TestGuest::new(options());
        guest.connect(&socket).unwrap();
        guest.disconnect();
        guest.connect(&socket).unwrap();
        guest
    });
    turn_until(&mut device, "the guest", |_| connecting.is_finished());
    let mut guest = connecting.join().unwrap();
    assert!(device.pop().is_none());
    // It is still owed when the guest itself says that it has no write cache.
    let switch = switch_write_cache_off(&mut guest);
    turn_until(&mut device, "the flush", |device| {
        let Some(flush) = device.pop() else { return false };
        device.complete(flush, Status::Ok);
        true
    });
    turn_until(&mut device, "the answer", |_| switch.is_finished());
    assert!(switch.join().unwrap());
}

#[test]
fn without_a_record_a_queue_starts_at_its_base() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let ram = disk();
    let mut guest = TestGuest::new(Options { inflight: false, ..options() });
    let first = Backend::spawn(config(), &socket, ram.clone());
    guest.connect(&socket).unwrap();
    submit_writes(&mut guest, 0, 0, 4, 1);
    guest.wait_for_all();
    let base = guest.stop_queue(0).unwrap();
    assert_eq!(base, 4);
    drop(first);
    let second = Backend::spawn(config(), &socket, ram);
    submit_writes(&mut guest, 0, 10, 3, 1);
    guest.connect_at(&socket, &[base, 0]).unwrap();
    guest.wait_for_all();
    assert_eq!(second.plan.taken.load(SeqCst), 3);
}

#[test]
fn two_front_ends_take_turns() {
    let folder = tempfile::tempdir().unwrap();
    let socket: &Path = &folder.path().join("s");
    let _backend = Backend::spawn(config(), socket, disk());
    let mut first = TestGuest::new(options());
    first.connect(socket).unwrap();
    assert_eq!(first.run(0, Command::Flush), OK);
    let path = socket.to_path_buf();
    let second = std::thread::spawn(move || {
        let mut second = TestGuest::new(options());
        second.connect(&path).unwrap();
        second.run(1, Command::Flush)
    });
    assert_eq!(first.run(0, Command::Flush), OK);
    first.disconnect();
    assert_eq!(second.join().unwrap(), OK);
}

/// Turns the device's loop until `done`. Requests are not taken by it.
fn turn_until(device: &mut VhostDevice, what: &str, mut done: impl FnMut(&mut VhostDevice) -> bool) {
    for _ in 0..600_000 {
        device.handle_events().unwrap();
        if done(device) {
            return;
        }
        device.notify();
        std::thread::sleep(Duration::from_micros(100));
    }
    panic!("{what} did not come");
}

/// Returns a guest whose back end has ended with three of its writes in flight, and these writes.
fn guest_of_a_dead_back_end(socket: &Path) -> (TestGuest, Vec<Ticket>) {
    let mut guest = TestGuest::new(options());
    let backend = Backend::spawn_with(config(), socket, disk(), holding());
    guest.connect(socket).unwrap();
    let waiting = submit_writes(&mut guest, 0, 0, 3, 1);
    wait_held(&backend, 3);
    (guest, waiting)
}

/// Connects the guest to a new device at `socket`.
fn connected(mut guest: TestGuest, socket: &Path) -> (VhostDevice, TestGuest) {
    let mut device = VhostDevice::new(config(), SocketSource::bind(socket, None).unwrap()).unwrap();
    let socket = socket.to_owned();
    let connecting = std::thread::spawn(move || {
        guest.connect(&socket).unwrap();
        guest
    });
    turn_until(&mut device, "the guest", |_| connecting.is_finished());
    (device, connecting.join().unwrap())
}

/// Before another program takes over, nothing new is taken. The front end waits for an answer all the same.
#[test]
fn what_a_queue_repeats_before_it_stops_counts_as_begun() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let (guest, waiting) = guest_of_a_dead_back_end(&socket);
    let (mut device, mut guest) = connected(guest, &socket);
    assert!(device.repeats() && !device.has_begun() && device.pop_begun().is_none());
    // New, so it stays where it is.
    submit_writes(&mut guest, 0, 8, 1, 2);
    let stopping = std::thread::spawn(move || {
        let base = guest.stop_queue(0).unwrap();
        (guest, base)
    });
    let mut repeated = 0;
    turn_until(&mut device, "the answer", |device| {
        while let Some(request) = device.pop_begun() {
            repeated += 1;
            device.complete(request, Status::Ok);
        }
        stopping.is_finished()
    });
    let (mut guest, base) = stopping.join().unwrap();
    assert_eq!((repeated, base), (3, 3));
    assert!(!device.has_begun() && !device.repeats());
    waiting.into_iter().for_each(|ticket| assert_eq!(guest.wait(ticket), OK));
    assert_eq!(guest.outstanding(), 1);
}

/// What a server still has of the back end before could land on what such a guest writes.
#[test]
fn a_guest_that_begins_anew_does_not_tell_what_was_in_flight() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let (mut guest, _) = guest_of_a_dead_back_end(&socket);
    guest.reset();
    for tells in [false, true] {
        let (device, again) = connected(guest, &socket);
        assert_eq!(device.repeats(), !tells);
        guest = again;
    }
}

/// The control thread waits for the end of the pause. Nobody else ends it.
#[test]
fn a_device_ends_within_a_pause() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let mut device = VhostDevice::new(config(), SocketSource::bind(&socket, None).unwrap()).unwrap();
    let connecting = std::thread::spawn(move || {
        let mut guest = TestGuest::new(options());
        guest.connect(&socket).unwrap();
        guest
    });
    turn_until(&mut device, "the guest", |_| connecting.is_finished());
    turn_until(&mut device, "the pause", |device| device.pause());
    let (ended, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        drop(device);
        ended.send(()).unwrap();
    });
    told.recv_timeout(Duration::from_secs(60)).expect("it ends");
    assert!(!connecting.join().unwrap().is_connected());
}
