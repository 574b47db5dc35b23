//! Fuzzing of an upgrade's description, and what is shown of it. The descriptors in it are numbers here, and are not taken.
//!
//! Behind the feature `testing`; never part of the program.

#![allow(clippy::unwrap_used, reason = "in a test a surprise is a failure")]

use super::receive::parse;
use super::{Description, Listening, PassedDisk, PassedStore, VERSION};
use remoca_store::{PassedExport, StoreKind};

/// Reads it, and keeps nothing.
pub fn read(data: &[u8]) {
    let _ = parse(data);
}

/// What is read is the same when it is written and read again.
pub fn run(data: &[u8]) {
    let Ok(description) = parse(data) else { return };
    assert_eq!(description.version, VERSION);
    let again = serde_json::to_vec(&description).unwrap();
    assert_eq!(parse(&again).unwrap(), description);
    assert_eq!(serde_json::to_vec(&parse(&again).unwrap()).unwrap(), again, "there is one way to write it");
}

pub fn seeds() -> Vec<Vec<u8>> {
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
        PassedDisk { name: "a".into(), image: "/a".into(), socket, store, write_cache_off }
    };
    let description = Description {
        version: VERSION,
        name: "vm".into(),
        upgrades: 1,
        cache_pages: 8,
        cache_enabled: true,
        servers: vec!["unix:/s".into()],
        state: Some(3),
        control: Some(listening(5)),
        client: Some(6),
        disks: vec![disk(file, Some(listening(7))), disk(PassedStore { fd: 8, kind: StoreKind::Nbd(export) }, None)],
        port: Some(listening(9)),
        nbd: vec![Listening { fd: 10, path: None }],
    };
    let empty = Description { version: VERSION, ..Description::default() };
    let other = Description { version: VERSION + 1, ..Description::default() };
    [description, empty, other].map(|description| serde_json::to_vec(&description).unwrap()).into()
}
