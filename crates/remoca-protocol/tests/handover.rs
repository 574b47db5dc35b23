//! Recorded descriptions of upgrades. This program reads those of all former ones, and writes the last of them byte by byte.
//! If a test fails because a field is new: record a further description, and leave the older ones as they are. A program
//! before it ignores the field, so it must not need to know it.

use remoca_protocol::guests::Offer;
use remoca_protocol::guests::{
    BegunRequest, FrontEnd, Guests, InflightRecord, MemoryRegion, NbdClient, PageLog, Queue, RingAddresses,
};
use remoca_protocol::handover::{
    Description, Listening, PassedDisk, PassedExport, PassedPool, PassedStore, StoreKind, VERSION,
};

/// What the program of a4ff91a wrote: no connections of guests.
const WITHOUT_GUESTS: &str = concat!(
    r#"{"version":2,"name":"vm","upgrades":1,"cache_pages":8,"cache_enabled":true,"servers":["tcp:h:1"],"state":3,"#,
    r#""control":{"fd":4,"path":["/c",5]},"client":6,"disks":[{"name":"root","image":"/a","#,
    r#""socket":{"fd":7,"path":["/s",8]},"store":{"fd":9,"kind":{"file":{"flush_failed":null}}},"write_cache_off":true},"#,
    r#"{"name":"data","image":"nbd://h","socket":null,"store":{"fd":10,"kind":{"nbd":{"addresses":["192.0.2.1:10809"],"#,
    r#""flush_failed":5,"unflushed":1,"size":1048576,"flags":1,"block_min":1,"block_preferred":4096,"#,
    r#""payload_max":33554432}}},"write_cache_off":false}],"port":{"fd":11,"path":null},"nbd":[{"fd":12,"path":null}]}"#,
);

/// What the program of 1fea00a wrote: connections, without what was offered on them.
const WITHOUT_OFFERS: &str = concat!(
    r#"{"version":2,"name":"vm","upgrades":1,"cache_pages":8,"cache_enabled":true,"servers":["tcp:h:1"],"state":3,"#,
    r#""control":{"fd":4,"path":["/c",5]},"client":6,"disks":[{"name":"root","image":"/a","#,
    r#""socket":{"fd":7,"path":["/s",8]},"store":{"fd":9,"kind":{"file":{"flush_failed":null}}},"write_cache_off":true,"#,
    r#""guests":{"front_end":{"socket":20,"features":4294967296,"protocol_features":37387,"#,
    r#""memory":[{"file":21,"file_offset":1,"guest":2,"user":3,"bytes":4}],"#,
    r#""record":{"file":22,"file_offset":0,"bytes":5,"queues":1,"queue_size":8},"#,
    r#""log":{"file":23,"file_offset":0,"bytes":6},"queues":[{"size":8,"#,
    r#""addresses":{"descriptors":1,"available":2,"used":3,"used_log":4},"base":7,"kick":24,"call":25,"error":null,"#,
    r#""enabled":true}]},"nbd":[]}},"#,
    r#"{"name":"data","image":"nbd://h","socket":null,"store":{"fd":10,"kind":{"nbd":{"addresses":["192.0.2.1:10809"],"#,
    r#""flush_failed":5,"unflushed":1,"size":1048576,"flags":1,"block_min":1,"block_preferred":4096,"#,
    r#""payload_max":33554432}}},"write_cache_off":false,"guests":{"front_end":null,"nbd":["#,
    r#"{"socket":30,"structured_replies":true,"bytes":31,"received":1,"to_send":2,"#,
    r#""begun":{"write":{"cookie":1,"durable":true,"start":0,"end":512,"filled":5,"error":null}}}]}}],"#,
    r#""port":{"fd":11,"path":null},"port_guests":{"front_end":null,"nbd":[]},"nbd":[{"fd":12,"path":null}]}"#,
);

/// What this program writes. It is that of 1fea00a with the offers, the sizes that guests were told and that images had, the hashes of
/// the options, mapped pools, the local tier, and what a trace does not tell.
fn recorded() -> String {
    let hypervisor =
        r#","offered":{"features":4294967296,"protocol_features":37387,"queues":4,"sector":512,"nbd_flags":0}"#;
    let client = r#","offered":{"features":0,"protocol_features":0,"queues":0,"sector":512,"nbd_flags":365}"#;
    WITHOUT_OFFERS
        .replace(
            r#""servers":["tcp:h:1"]"#,
            r#""servers":["tcp:h:1"],"local_pages":0,"local_server":null,"options":9,"option_sizes":18446744073709551615"#,
        )
        .replace(r#""protocol_features":37387"#, &format!(r#""protocol_features":37387{hypervisor}"#))
        .replace(r#""structured_replies":true"#, &format!(r#""structured_replies":true{client}"#))
        .replace(r#""write_cache_off":true"#, r#""write_cache_off":true,"had_bytes":1073741824"#)
        .replace(r#""write_cache_off":false"#, r#""write_cache_off":false,"had_bytes":null"#)
        .replace(r#""bytes":6}"#, r#""bytes":6},"channel":26,"told_bytes":1048576"#)
        .replace(r#""error":null}}}]"#, r#""error":null}},"told_bytes":2097152}]"#)
        .replace(
            r#""nbd":[{"fd":12,"path":null}]}"#,
            r#""nbd":[{"fd":12,"path":null}],"pools":[{"server":"local:/m","memory":19,"generation":7,"granted_pages":8}],"trace_untold":3}"#,
        )
}

fn hypervisor() -> FrontEnd<i32> {
    let addresses = Some(RingAddresses { descriptors: 1, available: 2, used: 3, used_log: Some(4) });
    FrontEnd {
        socket: 20,
        features: Some(1 << 32),
        protocol_features: Some(0x920B),
        offered: Some(Offer { features: 1 << 32, protocol_features: 0x920B, queues: 4, sector: 512, nbd_flags: 0 }),
        memory: vec![MemoryRegion { file: 21, file_offset: 1, guest: 2, user: 3, bytes: 4 }],
        record: Some(InflightRecord { file: 22, file_offset: 0, bytes: 5, queues: 1, queue_size: 8 }),
        log: Some(PageLog { file: 23, file_offset: 0, bytes: 6 }),
        channel: Some(26),
        told_bytes: Some(1 << 20),
        queues: vec![Queue { size: 8, addresses, base: 7, kick: Some(24), call: Some(25), error: None, enabled: true }],
    }
}

fn client() -> NbdClient<i32> {
    NbdClient {
        socket: 30,
        structured_replies: true,
        offered: Some(Offer { sector: 512, nbd_flags: 365, ..Offer::default() }),
        bytes: Some(31),
        received: 1,
        to_send: 2,
        begun: Some(BegunRequest::Write { cookie: 1, durable: true, start: 0, end: 512, filled: 5, error: None }),
        told_bytes: Some(2 << 20),
    }
}

fn description() -> Description {
    let export = PassedExport {
        addresses: vec![([192, 0, 2, 1], 10809).into()],
        flush_failed: Some(5),
        unflushed: 1,
        size: 1 << 20,
        flags: 1,
        block_min: 1,
        block_preferred: 4096,
        payload_max: 32 << 20,
    };
    let root = PassedDisk {
        name: "root".into(),
        image: "/a".into(),
        socket: Some(Listening { fd: 7, path: Some(("/s".into(), 8)) }),
        store: PassedStore { fd: 9, kind: StoreKind::File { flush_failed: None } },
        write_cache_off: true,
        had_bytes: Some(1 << 30),
        guests: Guests { front_end: Some(hypervisor()), nbd: Vec::new() },
    };
    let data = PassedDisk {
        name: "data".into(),
        image: "nbd://h".into(),
        socket: None,
        store: PassedStore { fd: 10, kind: StoreKind::Nbd(export) },
        write_cache_off: false,
        had_bytes: None,
        guests: Guests { front_end: None, nbd: vec![client()] },
    };
    Description {
        version: VERSION,
        name: "vm".into(),
        upgrades: 1,
        cache_pages: 8,
        local_pages: 0,
        local_server: None,
        cache_enabled: true,
        servers: vec!["tcp:h:1".into()],
        options: Some(9),
        option_sizes: u64::MAX,
        state: Some(3),
        control: Some(Listening { fd: 4, path: Some(("/c".into(), 5)) }),
        client: Some(6),
        disks: vec![root, data],
        port: Some(Listening { fd: 11, path: None }),
        port_guests: Guests::default(),
        nbd: vec![Listening { fd: 12, path: None }],
        pools: vec![PassedPool { server: "local:/m".into(), memory: 19, generation: 7, granted_pages: 8 }],
        trace_untold: 3,
    }
}

#[test]
fn what_this_program_writes_is_recorded() {
    assert_eq!(String::from_utf8(description().encode().unwrap()).unwrap(), recorded());
    assert_eq!(Description::parse(recorded().as_bytes()).unwrap(), description());
}

/// A version of its own would make each upgrade from and to former programs disconnect all guests.
#[test]
fn the_version_is_that_of_all_recorded_descriptions() {
    assert_eq!(VERSION, 2);
}

#[test]
fn connections_of_which_less_is_said_are_continued() {
    let mut expected =
        Description { options: None, option_sizes: 0, pools: Vec::new(), trace_untold: 0, ..description() };
    let front_end = expected.disks[0].guests.front_end.as_mut().unwrap();
    (front_end.offered, front_end.channel, front_end.told_bytes) = (None, None, None);
    expected.disks[0].had_bytes = None;
    let client = &mut expected.disks[1].guests.nbd[0];
    (client.offered, client.told_bytes) = (None, None);
    assert_eq!(Description::parse(WITHOUT_OFFERS.as_bytes()).unwrap(), expected);
}

#[test]
fn a_program_that_passed_no_connections_is_understood() {
    let mut expected =
        Description { options: None, option_sizes: 0, pools: Vec::new(), trace_untold: 0, ..description() };
    expected.disks.iter_mut().for_each(|disk| (disk.guests, disk.had_bytes) = (Guests::default(), None));
    assert_eq!(Description::parse(WITHOUT_GUESTS.as_bytes()).unwrap(), expected);
}

/// A former program takes over with a description of a later one. Only what that adds may be lost.
#[test]
fn fields_that_are_not_known_are_ignored() {
    let later = recorded().replace(r#""features":4294967296"#, r#""features":4294967296,"later":{"a":[1]}"#);
    assert_eq!(Description::parse(later.as_bytes()).unwrap(), description());
}
