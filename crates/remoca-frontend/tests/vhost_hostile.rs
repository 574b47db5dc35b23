//! Whatever a guest writes into its rings, the device survives, touches nothing it was not given, and works again after
//! the guest has reset it.

#![allow(clippy::unwrap_used, reason = "a test that meets an error has failed")]

use std::sync::{Arc, Mutex};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use remoca_frontend::testing::{
    Backend, Buffer, Command, DESC_INDIRECT, DESC_NEXT, DESC_WRITE, Options, RamDisk, TestGuest, Ticket,
};
use remoca_frontend::vhost::DeviceConfig;
use vm_memory::{Bytes, GuestAddress};

const DISK_BYTES: usize = 1 << 20;
const QUEUE_SIZE: u16 = 16;
const FIRST: Ticket = Ticket { queue: 0, slot: 0 };
/// Beyond both regions of the test guest's memory.
const NOWHERE: u64 = 0xdead_0000_0000;

fn start() -> (TestGuest, Backend, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let mut config = DeviceConfig::disk("hostile", "hostile", DISK_BYTES as u64);
    config.logical_block_bytes = 512;
    let disk = Arc::new(Mutex::new(RamDisk::new(DISK_BYTES)));
    let backend = Backend::spawn(config, &folder.path().join("s"), disk);
    let options = Options { queue_size: QUEUE_SIZE, data_bytes: 65_536, ..Options::default() };
    let mut guest = TestGuest::new(options);
    guest.connect(&backend.socket).unwrap();
    (guest, backend, folder)
}

/// Stops and restarts the device, as a reset by the guest's driver does, and shows that it works.
fn recover(guest: &mut TestGuest) {
    guest.stop_queue(0).unwrap();
    guest.reset();
    guest.start_queue(0, 0).unwrap();
    let data = [0x5a; 1024];
    assert_eq!(guest.run(0, Command::Write { sector: 3, data: &data }), 0);
    let ticket = guest.submit(0, Command::Read { sector: 3, length: 1024 });
    guest.queues[0].kick();
    assert_eq!((guest.wait(ticket), guest.data(ticket, 1024)), (0, data.to_vec()));
}

/// The parts of slot 0: header of a read of sector 0, status, and some data.
struct Parts {
    header: Buffer,
    data: Buffer,
    status: Buffer,
    table: u64,
}

fn parts(guest: &TestGuest) -> Parts {
    let slot = guest.slot_address(FIRST);
    guest.memory.write_slice(&[0; 16], GuestAddress(slot)).unwrap();
    guest.memory.write_obj(0xaau8, GuestAddress(slot + 64)).unwrap();
    Parts {
        header: Buffer { address: slot, length: 16, writable: false },
        data: Buffer { address: slot + 4096, length: 512, writable: true },
        status: Buffer { address: slot + 64, length: 1, writable: true },
        table: slot + 128,
    }
}

/// Offers `head` and returns the status byte of slot 0 once the head is used; nothing if the queue broke instead.
fn outcome(guest: &mut TestGuest, head: u16) -> Option<u8> {
    guest.queues[0].offer(head);
    guest.queues[0].publish();
    guest.queues[0].kick();
    loop {
        if let Some((used, _)) = guest.queues[0].next_used() {
            assert_eq!(used, head);
            let status = guest.slot_address(FIRST) + 64;
            return Some(guest.memory.read_obj(GuestAddress(status)).unwrap());
        }
        if guest.queues[0].error.read().is_ok() {
            return None;
        }
        std::thread::yield_now();
    }
}

/// The outcome of a chain in the ring's own table.
fn direct(guest: &mut TestGuest, buffers: &[Buffer]) -> Option<u8> {
    guest.queues[0].write_chain(guest.queues[0].descriptors, 0, buffers);
    outcome(guest, 0)
}

#[test]
fn chains_that_cannot_be_walked_break_the_queue() {
    let (mut guest, _backend, _folder) = start();
    type Case = (&'static str, fn(&mut TestGuest, &Parts) -> Option<u8>);
    let cases: [Case; 15] = [
        ("a loop", |guest, parts| {
            let table = guest.queues[0].descriptors;
            guest.queues[0].write_descriptor(table, 0, parts.header, DESC_NEXT, 1);
            guest.queues[0].write_descriptor(table, 1, parts.header, DESC_NEXT, 0);
            outcome(guest, 0)
        }),
        ("a descriptor that follows itself", |guest, parts| {
            guest.queues[0].write_descriptor(guest.queues[0].descriptors, 5, parts.data, DESC_NEXT, 5);
            outcome(guest, 5)
        }),
        ("a next beyond the table", |guest, parts| {
            guest.queues[0].write_descriptor(guest.queues[0].descriptors, 0, parts.header, DESC_NEXT, QUEUE_SIZE);
            outcome(guest, 0)
        }),
        ("a head beyond the table", |guest, _| outcome(guest, QUEUE_SIZE)),
        ("a head far beyond the table", |guest, _| outcome(guest, u16::MAX)),
        ("an available index that jumps", |guest, _| {
            guest.queues[0].next_available = guest.queues[0].next_available.wrapping_add(QUEUE_SIZE);
            outcome(guest, 0)
        }),
        ("an available index that goes back", |guest, _| {
            guest.queues[0].next_available = guest.queues[0].next_available.wrapping_sub(2);
            outcome(guest, 0)
        }),
        ("an indirect table in an indirect table", |guest, parts| {
            let inner = Buffer { address: parts.table + 160, length: 32, writable: false };
            guest.queues[0].write_descriptor(parts.table, 0, inner, DESC_INDIRECT, 0);
            indirect(guest, parts.table, 16, 0)
        }),
        ("an empty indirect table", |guest, parts| indirect(guest, parts.table, 0, 0)),
        ("an indirect table of a part of a descriptor", |guest, parts| indirect(guest, parts.table, 24, 0)),
        ("an indirect table of 4 GiB", |guest, parts| indirect(guest, parts.table, 0xffff_fff0, 0)),
        ("an indirect table with a successor", |guest, parts| indirect(guest, parts.table, 16, DESC_NEXT)),
        ("an indirect table nowhere", |guest, _| indirect(guest, NOWHERE, 32, 0)),
        ("a next beyond the indirect table", |guest, parts| {
            guest.queues[0].write_chain(parts.table, 0, &[parts.header, parts.data, parts.status]);
            indirect(guest, parts.table, 32, 0)
        }),
        ("a readable buffer after a writable one", |guest, parts| {
            direct(guest, &[parts.header, parts.data, parts.header, parts.status])
        }),
    ];
    for (name, case) in cases {
        let parts = parts(&guest);
        assert_eq!(case(&mut guest, &parts), None, "{name}");
        recover(&mut guest);
    }
}

fn indirect(guest: &mut TestGuest, table: u64, length: u32, flags: u16) -> Option<u8> {
    let table = Buffer { address: table, length, writable: false };
    guest.queues[0].write_descriptor(guest.queues[0].descriptors, 0, table, DESC_INDIRECT | flags, 1);
    outcome(guest, 0)
}

#[test]
fn chains_without_a_status_to_write_break_the_queue() {
    let (mut guest, _backend, _folder) = start();
    type Case = (&'static str, fn(&Parts) -> Vec<Buffer>);
    let cases: [Case; 6] = [
        ("only a header", |parts| vec![parts.header]),
        ("nothing but an empty buffer", |parts| vec![Buffer { length: 0, ..parts.status }]),
        ("a status of no bytes", |parts| vec![parts.header, Buffer { length: 0, ..parts.status }]),
        ("a read-only status", |parts| vec![parts.header, Buffer { writable: false, ..parts.status }]),
        ("a status nowhere", |parts| vec![parts.header, parts.data, Buffer { address: NOWHERE, ..parts.status }]),
        ("a status that wraps around", |parts| {
            vec![parts.header, Buffer { address: u64::MAX, length: 2, ..parts.status }]
        }),
    ];
    for (name, buffers) in cases {
        let buffers = buffers(&parts(&guest));
        assert_eq!(direct(&mut guest, &buffers), None, "{name}");
        recover(&mut guest);
    }
}

#[test]
fn chains_that_make_no_sense_are_answered() {
    const OK: u8 = 0;
    const IO_ERROR: u8 = 1;
    let (mut guest, _backend, _folder) = start();
    type Case = (&'static str, u8, fn(&Parts) -> Vec<Buffer>);
    let cases: [Case; 13] = [
        ("a header to write", IO_ERROR, |parts| {
            vec![Buffer { writable: true, ..parts.header }, parts.data, parts.status]
        }),
        ("no header", IO_ERROR, |parts| vec![parts.data, parts.status]),
        ("a short header", IO_ERROR, |parts| vec![Buffer { length: 15, ..parts.header }, parts.data, parts.status]),
        ("a header nowhere", IO_ERROR, |parts| {
            vec![Buffer { address: NOWHERE, ..parts.header }, parts.data, parts.status]
        }),
        ("data nowhere", IO_ERROR, |parts| vec![parts.header, Buffer { address: NOWHERE, ..parts.data }, parts.status]),
        ("data that wraps around", IO_ERROR, |parts| {
            vec![parts.header, Buffer { address: u64::MAX - 255, ..parts.data }, parts.status]
        }),
        ("data of 4 GiB", IO_ERROR, |parts| {
            vec![parts.header, Buffer { length: u32::MAX, ..parts.data }, parts.status]
        }),
        ("data of many times 4 GiB", IO_ERROR, |parts| {
            let huge = Buffer { length: u32::MAX, ..parts.data };
            vec![parts.header, huge, huge, huge, huge, parts.status]
        }),
        ("data that leaves the memory", IO_ERROR, |parts| {
            // 2 MiB of rings are followed by nothing up to 4 GiB.
            vec![parts.header, Buffer { address: 0x1f_ff00, ..parts.data }, parts.status]
        }),
        ("data of no whole sector", IO_ERROR, |parts| {
            vec![parts.header, Buffer { length: 511, ..parts.data }, parts.status]
        }),
        ("empty buffers", OK, |parts| {
            let empty = |buffer: Buffer| Buffer { length: 0, ..buffer };
            vec![empty(parts.header), parts.header, empty(parts.data), parts.data, parts.status, empty(parts.status)]
        }),
        ("a header in three parts", OK, |parts| {
            let part = |start, length| Buffer { address: parts.header.address + start, length, writable: false };
            vec![part(0, 1), part(1, 9), part(10, 6), parts.data, parts.status]
        }),
        ("data in parts of one byte and more", OK, |parts| {
            let part = |start, length| Buffer { address: parts.data.address + start, length, writable: true };
            vec![parts.header, part(0, 1), part(1, 510), part(511, 1), parts.status]
        }),
    ];
    for (name, status, buffers) in cases {
        let buffers = buffers(&parts(&guest));
        assert_eq!(direct(&mut guest, &buffers), Some(status), "{name}");
        recover(&mut guest);
    }
}

#[test]
fn the_status_may_be_the_last_byte_of_the_data() {
    let (mut guest, _backend, _folder) = start();
    let parts = parts(&guest);
    let (data, status) = (parts.data.address, parts.data.address + 512);
    guest.memory.write_slice(&[0xee; 514], GuestAddress(data)).unwrap();
    direct(&mut guest, &[parts.header, Buffer { length: 513, ..parts.data }]).unwrap();
    let mut bytes = [0; 514];
    guest.memory.read_slice(&mut bytes, GuestAddress(data)).unwrap();
    assert!(bytes[..512].iter().all(|byte| *byte == 0), "the data of an empty disk");
    assert_eq!((status - data, bytes[512], bytes[513]), (512, 0, 0xee));
}

#[test]
fn a_head_that_is_in_flight_cannot_be_offered_again() {
    let (mut guest, backend, _folder) = start();
    backend.plan.hold.store(true, std::sync::atomic::Ordering::SeqCst);
    let ticket = guest.submit(0, Command::Read { sector: 0, length: 512 });
    guest.queues[0].kick();
    backend.wait_until("the request", |plan| plan.held.load(std::sync::atomic::Ordering::SeqCst) == 1);
    guest.queues[0].offer(ticket.slot);
    guest.queues[0].publish();
    guest.queues[0].kick();
    assert!(guest.wait_for_error(0));
    backend.plan.hold.store(false, std::sync::atomic::Ordering::SeqCst);
    assert_eq!(guest.wait(ticket), 0, "what was taken before is completed");
    recover(&mut guest);
}

/// Descriptors with a few things wrong about them.
#[derive(Debug, Clone)]
struct Garbage {
    descriptors: Vec<Entry>,
    indirect: Vec<Entry>,
    heads: Vec<u16>,
    index_jump: u16,
    headers: Vec<(u32, u64)>,
}

/// Target, length, flags, next.
type Entry = (Target, u32, u16, u16);

/// Where a descriptor points. Only writable descriptors may point to the writable memory of the test, only others to the
/// readable: so it can tell whether the device wrote where it must not.
#[derive(Debug, Clone, Copy)]
enum Target {
    Own(u64),
    Table,
    Rings(u64),
    Anywhere(u64),
}

/// Slots 1 to 3 of the test guest: what a readable descriptor may point to and no request may change.
fn readable(guest: &TestGuest) -> u64 {
    guest.slot_address(Ticket { queue: 0, slot: 1 })
}

/// Four sound requests of the kinds given, each with a header, data and a status, in a table of 16.
fn sound_table(headers: &[(u32, u64)]) -> Vec<Entry> {
    let requests = (0u16..4).zip(headers).flat_map(|(number, (kind, _))| {
        let first = 4 * number;
        let (data_flags, data_length) = match kind {
            1 => (DESC_NEXT, 512),
            11 | 13 => (DESC_NEXT, 16),
            _ => (DESC_NEXT | DESC_WRITE, 1024),
        };
        let offset = u64::from(number);
        [
            (Target::Own(offset * 16), 16, DESC_NEXT, first + 1),
            (Target::Own(offset * 2048), data_length, data_flags, first + 2),
            (Target::Own(offset * 2048 + 2000), 1, DESC_WRITE, 0),
            (Target::Table, 64, DESC_INDIRECT, 0),
        ]
    });
    requests.collect()
}

fn garbage() -> impl Strategy<Value = Garbage> {
    let kind = prop_oneof![8 => prop::sample::select(vec![0u32, 1, 4, 8, 11, 13]), 1 => any::<u32>()];
    let sector = prop_oneof![8 => 0u64..2047, 1 => any::<u64>()];
    let headers = prop::collection::vec((kind, sector), 64);
    let target = prop_oneof![
        4 => (0u64..512).prop_map(|offset| Target::Own(offset * 16)),
        2 => Just(Target::Table),
        2 => (0u64..1024).prop_map(Target::Rings),
        2 => any::<u64>().prop_map(Target::Anywhere),
    ];
    let length = prop_oneof![0u32..64, 1u32..4096, (0u32..1000).prop_map(|less| u32::MAX - less), any::<u32>()];
    let flags = prop_oneof![4 => 0u16..8, 1 => any::<u16>()];
    let next = prop_oneof![4 => 0..QUEUE_SIZE, 1 => any::<u16>()];
    // Which of the four fields of which entry are replaced.
    let mutation = (0..usize::from(QUEUE_SIZE), 1u8..16, (target, length, flags, next));
    let mutations = prop::collection::vec(mutation, 0..4);
    let heads = prop::sample::subsequence(vec![0u16, 3, 4, 8, 12], 0..=5).prop_shuffle();
    let extra_head = prop::option::weighted(0.2, prop_oneof![0..QUEUE_SIZE, any::<u16>()]);
    let index_jump = prop_oneof![12 => Just(0u16), 1 => any::<u16>()];
    (headers, mutations.clone(), mutations, heads, extra_head, index_jump).prop_map(
        |(headers, direct, indirect, mut heads, extra_head, index_jump)| {
            heads.extend(extra_head);
            let descriptors = mutated(sound_table(&headers), direct);
            let indirect = mutated(sound_table(&headers[4..]), indirect);
            Garbage { descriptors, indirect, heads, index_jump, headers }
        },
    )
}

fn mutated(mut table: Vec<Entry>, mutations: Vec<(usize, u8, Entry)>) -> Vec<Entry> {
    for (index, fields, (target, length, flags, next)) in mutations {
        let entry = &mut table[index];
        if fields & 1 != 0 {
            entry.0 = target;
        }
        if fields & 2 != 0 {
            entry.1 = length;
        }
        if fields & 4 != 0 {
            entry.2 = flags;
        }
        if fields & 8 != 0 {
            entry.3 = next;
        }
    }
    table
}

/// Puts the garbage where the device looks.
fn plant(guest: &mut TestGuest, garbage: &Garbage) {
    let writable = guest.slot_address(Ticket { queue: 0, slot: 4 });
    let (readable, table) = (readable(guest), guest.slot_address(FIRST) + 128);
    for (index, (kind, sector)) in garbage.headers.iter().enumerate() {
        let header = [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat();
        guest.memory.write_slice(&header, GuestAddress(readable + 16 * index as u64)).unwrap();
    }
    let rings = guest.queues[0].descriptors;
    let write = |at: u64, entries: &[(Target, u32, u16, u16)]| {
        for (index, (target, length, flags, next)) in (0u16..).zip(entries) {
            let is_writable = flags & DESC_WRITE != 0;
            let address = match target {
                Target::Own(offset) if is_writable => writable + offset,
                Target::Own(offset) => readable + offset % 1024,
                Target::Table => table,
                // A device that is told to write into its own rings may.
                Target::Rings(offset) => rings + offset,
                // Not into the memory whose content this test checks.
                Target::Anywhere(address) if is_writable => address | 1 << 40,
                Target::Anywhere(address) => *address,
            };
            let buffer = Buffer { address, length: *length, writable: false };
            guest.queues[0].write_descriptor(at, index, buffer, *flags, *next);
        }
    };
    write(rings, &garbage.descriptors);
    write(table, &garbage.indirect);
    for head in &garbage.heads {
        guest.queues[0].offer(*head);
    }
    guest.queues[0].next_available = guest.queues[0].next_available.wrapping_add(garbage.index_jump);
}

#[test]
fn anything_at_all_is_survived() {
    let (mut guest, backend, _folder) = start();
    let (mut broken, mut answered) = (0, 0);
    let cases = std::env::var("REMOCA_FUZZ_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(2000);
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 200, ..Config::default() };
    let state = std::cell::RefCell::new((&mut guest, &mut broken, &mut answered));
    let result = TestRunner::new(config).run(&garbage(), |garbage| {
        let (guest, broken, answered) = &mut *state.borrow_mut();
        plant(guest, &garbage);
        let mut before = vec![0; 2048];
        let mut after = before.clone();
        guest.memory.read_slice(&mut before, GuestAddress(readable(guest))).unwrap();
        guest.queues[0].publish();
        guest.queues[0].kick();
        backend.wait_for_turn();
        guest.stop_queue(0).unwrap();
        **broken += u32::from(guest.queues[0].error.read().is_ok());
        **answered += u32::from(guest.queues[0].used_index());
        guest.memory.read_slice(&mut after, GuestAddress(readable(guest))).unwrap();
        prop_assert_eq!(before, after, "memory that the device was only to read");
        guest.reset();
        guest.start_queue(0, 0).unwrap();
        prop_assert_eq!(guest.run(0, Command::Flush), 0);
        guest.stop_queue(0).unwrap();
        guest.reset();
        guest.start_queue(0, 0).unwrap();
        Ok(())
    });
    result.unwrap();
    // The garbage is of the kind that reaches every part of the device.
    let executed = backend.plan.taken.load(std::sync::atomic::Ordering::SeqCst);
    println!("{cases} cases: {broken} broken queues, {answered} answers, {executed} requests executed");
    // One flush of each case is the test's own.
    let executed = executed - cases as usize;
    assert!(broken > cases / 10 && executed > cases as usize / 10, "{broken} {executed} of {cases}");
}
