//! Input of a process's successor: the description of an upgrade (text), or the header of a state file (any input that
//! does not begin like text). The target of the latter is in `remoca-disk`.

use crate::memory;
use remoca_disk::testing::{fuzz_state_header, fuzz_state_header_seeds};
use remoca_protocol::guests::Offer;
use remoca_protocol::guests::{
    BegunRequest, FrontEnd, Guests, InflightRecord, MemoryRegion, NbdClient, PageLog, Queue, RingAddresses,
};
use remoca_protocol::handover::{
    Description, Listening, PassedDisk, PassedExport, PassedPool, PassedStore, StoreKind, VERSION,
};

/// Maximum number of bytes that a JSON list allocates per byte of input. An error allocates some more.
const BYTES_FOR_ONE: usize = 64;
const SOME_MORE: usize = 16 << 10;

pub fn run(data: &[u8]) {
    if data.first().is_some_and(|first| *first != 0) {
        memory::bounded(data.len() * BYTES_FOR_ONE + SOME_MORE, || drop(Description::parse(data)));
        understand(data);
    } else {
        fuzz_state_header(data.get(1..).unwrap_or_default());
    }
}

/// Checks that parsing, writing and parsing again changes nothing.
fn understand(data: &[u8]) {
    let Ok(description) = Description::parse(data) else { return };
    assert_eq!(description.version, VERSION);
    let again = description.encode().unwrap();
    assert_eq!(Description::parse(&again).unwrap(), description);
    assert_eq!(Description::parse(&again).unwrap().encode().unwrap(), again, "there is one way to write it");
}

pub fn seeds() -> Vec<Vec<u8>> {
    let headers = fuzz_state_header_seeds().into_iter().map(|changes| [&[0], &changes[..]].concat());
    descriptions().into_iter().chain(headers).collect()
}

/// Connections of each kind, with all that may be agreed on one.
fn guests() -> Guests<i32> {
    let memory = vec![MemoryRegion { file: 12, file_offset: 1, guest: 2, user: 3, bytes: 4 }];
    let record = Some(InflightRecord { file: 13, file_offset: 0, bytes: 5, queues: 1, queue_size: 8 });
    let log = Some(PageLog { file: 14, file_offset: 0, bytes: 6 });
    let addresses = Some(RingAddresses { descriptors: 1, available: 2, used: 3, used_log: Some(4) });
    let running = Queue { size: 8, addresses, base: 7, kick: Some(15), call: Some(16), error: Some(17), enabled: true };
    let idle = Queue { size: 0, addresses: None, base: 0, kick: None, call: None, error: None, enabled: false };
    let (features, protocol_features) = (Some(1 << 32), Some(1));
    let queues = vec![running, idle];
    let offered = Some(Offer { features: 1 << 32, protocol_features: 1, queues: 2, sector: 512, nbd_flags: 1 });
    let front_end = Some(FrontEnd {
        socket: 11,
        features,
        protocol_features,
        offered,
        memory,
        record,
        log,
        channel: Some(18),
        told_bytes: Some(1 << 30),
        queues,
    });
    let begun = [
        None,
        Some(BegunRequest::Refused { cookie: 1, error: 22, bytes: 512 }),
        Some(BegunRequest::Write { cookie: 1, durable: true, start: 0, end: 512, filled: 5, error: Some(5) }),
        Some(BegunRequest::Read { cookie: 1, start: 0, end: 512, in_one: true, error: None }),
    ];
    let client = |(begun, socket): (_, i32)| {
        let bytes = (socket % 2 == 0).then_some(socket + 10);
        NbdClient {
            socket,
            structured_replies: true,
            offered,
            bytes,
            received: 1,
            to_send: 2,
            begun,
            told_bytes: Some(1 << 30),
        }
    };
    Guests { front_end, nbd: begun.into_iter().zip(20..).map(client).collect() }
}

fn descriptions() -> Vec<Vec<u8>> {
    let listening = |fd| Listening { fd, path: Some(("/run/x".into(), 7)) };
    let file = PassedStore { fd: 4, kind: StoreKind::File { flush_failed: Some(5) } };
    let export = PassedExport {
        addresses: vec!["192.0.2.1:10809".parse().unwrap(), "[fe80::1%2]:10809".parse().unwrap()],
        flush_failed: None,
        unflushed: 1,
        size: 1 << 30,
        flags: 1,
        block_min: 1,
        block_preferred: 4096,
        payload_max: 1 << 20,
    };
    let disk = |store: PassedStore, socket| {
        let write_cache_off = matches!(store.kind, StoreKind::File { .. });
        let guests = if write_cache_off { guests() } else { Guests::default() };
        PassedDisk {
            name: "a".into(),
            image: "/a".into(),
            socket,
            store,
            write_cache_off,
            had_bytes: Some(2 << 20),
            guests,
        }
    };
    let description = Description {
        version: VERSION,
        name: "vm".into(),
        upgrades: 1,
        cache_pages: 8,
        local_pages: 2,
        local_server: Some("local:/l".into()),
        cache_enabled: true,
        options: Some(7),
        option_sizes: 8,
        servers: vec!["unix:/s".into()],
        state: Some(3),
        control: Some(listening(5)),
        client: Some(6),
        disks: vec![disk(file, Some(listening(7))), disk(PassedStore { fd: 8, kind: StoreKind::Nbd(export) }, None)],
        port: Some(listening(9)),
        port_guests: Guests::default(),
        nbd: vec![Listening { fd: 10, path: None }],
        pools: vec![PassedPool { server: "local:/s".into(), memory: 11, generation: 12, granted_pages: 8 }],
        trace_untold: 3,
    };
    let empty = Description { version: VERSION, ..Description::default() };
    let other = Description { version: VERSION + 1, ..Description::default() };
    [description, empty, other].map(|description| description.encode().unwrap()).into()
}
