//! The log of written pages, as a front end uses it that migrates its VM: every page of guest memory that changed is marked,
//! whatever changed it, from the moment logging is on until a queue is stopped.

#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "in a test a surprise is a failure, and sizes are small"
)]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex};

use remoca_frontend::testing::{Backend, Command, Options, RamDisk, TestGuest, Ticket};
use remoca_frontend::vhost::DeviceConfig;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vm_memory::{Address, Bytes, GuestMemoryBackend, GuestMemoryRegion};

const DISK_BYTES: usize = 4 << 20;
const PAGE: u64 = 4096;
/// Bits for 4 GiB, where the test guest's second region begins, and for that region.
const LOG_BYTES: u64 = (1 << 17) + 4096;
const OK: u8 = 0;

struct Setup {
    guest: TestGuest,
    backend: Backend,
    log: File,
    _folder: tempfile::TempDir,
}

fn start(options: Options) -> Setup {
    let folder = tempfile::tempdir().unwrap();
    let mut disk = RamDisk::new(DISK_BYTES);
    disk.bytes.iter_mut().zip(1_u32..).for_each(|(byte, seed)| *byte = (seed / 7) as u8 | 1);
    let backend = Backend::spawn(
        DeviceConfig::disk("log", "log", DISK_BYTES as u64),
        &folder.path().join("s"),
        Arc::new(Mutex::new(disk)),
    );
    let mut guest = TestGuest::new(options);
    guest.connect(&backend.socket).unwrap();
    let log = File::from(memfd_create("log", MemfdFlags::CLOEXEC).unwrap());
    ftruncate(&log, LOG_BYTES).unwrap();
    Setup { guest, backend, log, _folder: folder }
}

fn options() -> Options {
    Options { queue_count: 2, queue_size: 16, data_bytes: 32 << 10, segment_count: 3, ..Options::default() }
}

/// The numbers of all pages of guest memory, with their content.
fn pages(guest: &TestGuest) -> Vec<(u64, Vec<u8>)> {
    let mut pages = Vec::new();
    for region in GuestMemoryBackend::iter(&*guest.memory) {
        for offset in (0..region.len()).step_by(PAGE as usize) {
            let address = region.start_addr().unchecked_add(offset);
            let mut page = vec![0; PAGE as usize];
            guest.memory.read_slice(&mut page, address).unwrap();
            pages.push((address.0 / PAGE, page));
        }
    }
    pages
}

fn changed(guest: &TestGuest, before: &[(u64, Vec<u8>)]) -> Vec<u64> {
    let now = pages(guest);
    now.iter().zip(before).filter(|(now, before)| now.1 != before.1).map(|(now, _)| now.0).collect()
}

/// Takes the marks out of the log, as QEMU does again and again.
fn take_marks(log: &File) -> Vec<u64> {
    let mut bits = vec![0; LOG_BYTES as usize];
    log.read_exact_at(&mut bits, 0).unwrap();
    log.write_all_at(&vec![0; LOG_BYTES as usize], 0).unwrap();
    (0..LOG_BYTES * 8).filter(|page| bits[(page / 8) as usize] & 1 << (page % 8) != 0).collect()
}

/// Submits a request of each kind to a queue, and waits until the back end has taken all of them without executing any: from
/// here on only the device writes to guest memory.
fn submit(guest: &mut TestGuest, backend: &Backend, queue: u16) -> Vec<Ticket> {
    backend.plan.hold.store(true, SeqCst);
    let data = vec![7; 8192];
    let read = Command::Read { sector: 8, length: 24 << 10 };
    let commands = [read, Command::Write { sector: 80, data: &data }, Command::Flush, read];
    let tickets = commands.map(|command| guest.submit(queue, command)).to_vec();
    guest.queues[usize::from(queue)].kick();
    backend.wait_until("the requests", |plan| plan.held.load(SeqCst) == tickets.len());
    tickets
}

fn finish(guest: &mut TestGuest, backend: &Backend, tickets: Vec<Ticket>) {
    backend.plan.hold.store(false, SeqCst);
    for ticket in tickets {
        assert_eq!(guest.wait(ticket), OK);
    }
    // The last mark follows the result, and `held` is counted anew.
    backend.wait_for_turn();
}

/// Every page that the device changed since `before` is marked, and `count` pages at least.
fn assert_marked(guest: &TestGuest, before: &[(u64, Vec<u8>)], marks: &[u64], count: usize) {
    let changed = changed(guest, before);
    let unmarked: Vec<_> = changed.iter().filter(|page| !marks.contains(page)).collect();
    assert!(unmarked.is_empty(), "{unmarked:x?} changed and are not marked");
    assert!(changed.len() >= count, "{changed:x?}");
}

#[test]
fn every_page_that_changes_is_marked_while_logging_is_on() {
    let Setup { mut guest, backend, log, .. } = start(options());
    // Taken while nothing was logged, completed when something is.
    let tickets = submit(&mut guest, &backend, 0);
    guest.start_log(&log, |queue| queue.used).unwrap();
    let before = pages(&guest);
    finish(&mut guest, &backend, tickets);
    assert_marked(&guest, &before, &take_marks(&log), 2 * 6 + 2 + 1);
    for queue in [1, 0, 1] {
        let tickets = submit(&mut guest, &backend, queue);
        let before = pages(&guest);
        finish(&mut guest, &backend, tickets);
        let marks = take_marks(&log);
        assert_marked(&guest, &before, &marks, 2);
        let other = guest.queues[usize::from(1 - queue)].used / PAGE;
        assert!(!marks.contains(&other), "nothing happened on the other queue");
    }
    guest.stop_log().unwrap();
    let tickets = submit(&mut guest, &backend, 0);
    finish(&mut guest, &backend, tickets);
    assert_eq!(take_marks(&log), [0_u64; 0], "switched off");
    guest.start_log(&log, |queue| queue.used).unwrap();
    let (tickets, before) = (submit(&mut guest, &backend, 0), pages(&guest));
    finish(&mut guest, &backend, tickets);
    assert_marked(&guest, &before, &take_marks(&log), 2);
}

#[test]
fn what_is_completed_while_a_queue_is_stopped_is_marked_when_the_answer_comes() {
    let Setup { mut guest, backend, log, _folder } = start(options());
    guest.start_log(&log, |queue| queue.used).unwrap();
    let tickets = submit(&mut guest, &backend, 0);
    take_marks(&log);
    let before = pages(&guest);
    std::thread::scope(|scope| {
        let plan = &backend.plan;
        let stop = scope.spawn(|| guest.stop_queue(0).unwrap());
        std::thread::sleep(std::time::Duration::from_millis(20));
        plan.hold.store(false, SeqCst);
        assert_eq!(stop.join().unwrap(), 4);
    });
    let marks = take_marks(&log);
    assert_marked(&guest, &before, &marks, 2 * 6 + 2 + 1);
    finish(&mut guest, &backend, tickets);
    // The next back end, of the same or another host, goes on there.
    guest.disconnect();
    guest.connect(&backend.socket).unwrap();
    let tickets = submit(&mut guest, &backend, 0);
    finish(&mut guest, &backend, tickets);
    assert_eq!(take_marks(&log), [0_u64; 0], "the log went with its connection");
}

/// A back end that was killed may have published an index that it did not mark any more.
#[test]
fn a_new_log_has_the_used_index_of_each_queue() {
    let Setup { mut guest, backend: _backend, log, .. } = start(options());
    guest.start_log(&log, |queue| queue.used).unwrap();
    // Answered after what was said before.
    guest.read_config(32, 1).unwrap();
    let marks = take_marks(&log);
    assert!(guest.queues.iter().all(|queue| marks.contains(&(queue.used / PAGE))), "{marks:x?}");
}

#[test]
fn a_used_ring_is_logged_where_the_front_end_says_and_nowhere_outside_the_log() {
    let Setup { mut guest, backend, log, .. } = start(options());
    let far = 3 << 20;
    guest.start_log(&log, |_| far).unwrap();
    let tickets = submit(&mut guest, &backend, 0);
    finish(&mut guest, &backend, tickets);
    let marks = take_marks(&log);
    assert!(marks.contains(&(far / PAGE)) && marks.contains(&(guest.queues[0].used / PAGE)), "{marks:x?}");

    for hostile in [LOG_BYTES * 8 * PAGE, u64::MAX] {
        guest.start_log(&log, |_| hostile).unwrap();
        let tickets = submit(&mut guest, &backend, 1);
        finish(&mut guest, &backend, tickets);
        take_marks(&log);
    }
    // A log that ends before the memory: what it has no bits for is not marked.
    ftruncate(&log, LOG_BYTES + 4096).unwrap();
    let short = File::from(memfd_create("short", MemfdFlags::CLOEXEC).unwrap());
    ftruncate(&short, 64).unwrap();
    guest.start_log(&short, |queue| queue.used).unwrap();
    let tickets = submit(&mut guest, &backend, 0);
    finish(&mut guest, &backend, tickets);
    assert_eq!(guest.run(0, Command::Flush), OK);
}
