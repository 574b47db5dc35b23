//! Fuzzing of the state file's header: words of the input in the place of some that a process wrote, and what a successor
//! makes of them.
//!
//! Behind the feature `testing`; never part of the program.

#![allow(clippy::unwrap_used, reason = "in a test a surprise is a failure")]

use super::header::NUMBER_MAX;
use super::{Clock, Former, Header, OptionHashes, RosterEntry, Settings, StateFile, judge};
use crate::endpoints::SERVERS_MAX;
use remoca_core::engine::ServerNumber;
use remoca_core::units::{DiskIndex, PageCount};
use remoca_protocol::Token;
use remoca_store::ImageStamp;
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::os::unix::fs::FileExt;

const DISKS: u16 = 2;
const INDEX_WORDS: u64 = 8;
/// Where words are changed: the fixed ones, two servers, and the disks. The rest is more of the same.
const SHOWN: [std::ops::Range<u64>; 2] = [0..96, 656..688];
const CLOCK: Clock = Clock { real_ns: 1_700_000_000_123_456_789, boot_ns: 5_000_000_000 };

/// A sequence of changes: a byte that says where, one for the length, and so many bytes.
pub fn run(mut data: &[u8]) {
    let file = written();
    while let Some(([place, length], rest)) = data.split_first_chunk() {
        let (bytes, rest) = rest.split_at(rest.len().min(usize::from(*length)));
        let place = SHOWN.into_iter().flatten().cycle().nth((*place).into()).unwrap();
        // None reaches beyond the file.
        file.write_all_at(&bytes[..bytes.len().min(64)], place * 8).unwrap();
        data = rest;
    }
    read_former(&file);
    let Ok((header, words)) = StateFile::map(&file, DISKS) else { return };
    assert_eq!((words.len() as u64, header.index_words()), (INDEX_WORDS, INDEX_WORDS));
    judge_images(&header);
}

/// As a process leaves it.
fn written() -> File {
    let file = File::from(memfd_create("remoca-state", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(Header::bytes(DISKS) + INDEX_WORDS * 4).unwrap();
    let header = Header::map(&file, DISKS).unwrap();
    header.describe(super::boot_id().unwrap_or_default(), [7; 16], 1, DISKS, INDEX_WORDS);
    for disk in (0..DISKS).map(DiskIndex) {
        let stamp = ImageStamp { identity: [1, 2050, 77, 1 << 30], changed_ns: Some(CLOCK.real_ns - 1_000_000) };
        header.set_disk(disk, &stamp, CLOCK);
        header.set_flush_failed(disk, Some(5));
    }
    for (slot, endpoint) in ["unix:/s", "tcp:192.0.2.1:7070"].into_iter().enumerate() {
        header.set_server(slot, Some(&entry(u32::try_from(slot).unwrap(), endpoint)));
    }
    header.set_server_numbers(2);
    header.set_settings(&Settings {
        options: OptionHashes { all: 1, sizes: 2 },
        cache: PageCount(8),
        local: Some(PageCount(2)),
        enabled: true,
        servers: 2,
    });
    header.set_valid(true);
    file
}

fn entry(number: u32, endpoint: &str) -> RosterEntry {
    RosterEntry {
        number: ServerNumber(number),
        endpoint: endpoint.parse().unwrap(),
        token: Token([9; 16]),
        epoch: 3,
        sends: 4,
        leaves: true,
    }
}

/// What outlives an index of no use: bounded, and the same when it is kept again.
fn read_former(file: &File) {
    let Former { servers, failed_flushes, .. } = Former::of(file);
    assert!(servers.len() <= SERVERS_MAX && servers.iter().all(|server| server.number.0 <= NUMBER_MAX));
    assert!(failed_flushes.iter().all(|failed| failed.errno > 0));
    let header = Header::map(file, DISKS).unwrap();
    assert!(header.server_numbers() <= NUMBER_MAX);
    let settings = header.settings();
    header.set_settings(&settings);
    assert_eq!(header.settings(), settings);
    for slot in 0..SERVERS_MAX {
        header.set_server(slot, servers.get(slot));
    }
    assert_eq!(header.roster(), servers, "what is kept again is the same");
}

/// An image is believed to be the same only if its change time says so.
fn judge_images(header: &Header) {
    for disk in (0..DISKS).map(DiskIndex) {
        let kept = header.disk(disk);
        for later_ns in [0, 1, 2_000_000, 1 << 40] {
            let changed_ns = kept.seen_ns.saturating_add(later_ns);
            let found = ImageStamp { identity: kept.identity, changed_ns: Some(changed_ns) };
            if judge(&kept, &found, CLOCK, || false).is_ok() {
                let in_our_time = kept.written_ns != 0 && changed_ns <= kept.written_ns.saturating_add(10_000_000);
                assert!(changed_ns == kept.seen_ns || in_our_time, "somebody has written since");
            }
        }
    }
}

/// The first byte of an input is 0: it is no text.
pub fn seeds() -> Vec<Vec<u8>> {
    let change = |place: u8, value: u64| [&[place, 8], &value.to_le_bytes()[..]].concat();
    vec![
        vec![],
        [change(16, 3), change(17, 4), change(20, 6), [&[21, 6], &b"unix:/"[..]].concat()].concat(),
        [change(9, u64::from(u32::MAX)), change(12, u64::MAX), change(7, 3)].concat(),
        [change(101, 0), change(100, CLOCK.real_ns), change(103, 1 << 40)].concat(),
        [change(8, 1 << 60), change(0, 0)].concat(),
    ]
}
