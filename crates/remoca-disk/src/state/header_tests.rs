//! A process that is killed between any two stores leaves a header that says what was true before, what is true after, or
//! nothing.

use super::*;
use std::cell::RefCell;
use std::fs;

thread_local! {
    /// The words after each store of the header of this thread's test, while somebody looks.
    static LEFT: RefCell<Option<Vec<Vec<u8>>>> = const { RefCell::new(None) };
}

/// Keeps what a process would leave that is killed now.
pub(super) fn note_store(header: &Header) {
    LEFT.with_borrow_mut(|left| {
        if let Some(left) = left {
            left.push((0..header.words).flat_map(|at| header.get(at).to_ne_bytes()).collect());
        }
    });
}

/// Returns the headers that a successor may find if the process is killed during `change`, the finished one last.
fn left_by(header: &Header, change: impl FnOnce(&Header)) -> Vec<Header> {
    LEFT.set(Some(Vec::new()));
    change(header);
    let left = LEFT.take().unwrap();
    assert!(left.len() > 1, "a single store has nothing in between");
    left.iter().map(|bytes| header_of(bytes)).collect()
}

fn header_of(bytes: &[u8]) -> Header {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), bytes).unwrap();
    Header::map(&file.reopen().unwrap(), 2).unwrap()
}

fn empty() -> Header {
    header_of(&vec![0; usize::try_from(Header::bytes(2)).unwrap()])
}

fn entry(number: u8, endpoint: &str) -> RosterEntry {
    let (endpoint, token) = (endpoint.parse().unwrap(), Token([number; 16]));
    RosterEntry {
        number: ServerNumber(number.into()),
        endpoint,
        token,
        epoch: u64::from(number) << 40,
        sends: 5,
        leaves: number % 2 == 1,
    }
}

#[test]
fn a_server_is_kept_whole_or_not_at_all() {
    let (old, new) = (entry(3, "unix:/run/the-first-one"), entry(200, "tcp:192.168.100.200:7070"));
    let header = empty();
    for (before, after) in [(None, Some(&old)), (Some(&old), Some(&new)), (Some(&new), None)] {
        header.set_server(5, None);
        header.set_server(5, before);
        let other = entry(9, "tcp:[::1]:7");
        header.set_server(4, Some(&other));
        if after.is_none() {
            // One store.
            header.set_server(5, after);
            assert_eq!(header.roster(), [other]);
            continue;
        }
        let left = left_by(&header, |header| header.set_server(5, after));
        for found in left.iter().map(Header::roster) {
            assert_eq!(found[0], other, "nobody else's record is touched");
            let here = found.get(1);
            assert!(here.is_none() || here == before || here == after, "{here:?} is neither {before:?} nor {after:?}");
        }
        assert_eq!(left.last().unwrap().roster().get(1), after);
    }
}

/// Those that stay may get other slots.
#[test]
fn a_list_that_was_being_recorded_is_not_believed_and_has_no_server_twice() {
    let [one, two, three] = [entry(2, "unix:/run/two"), entry(4, "tcp:[::1]:7"), entry(6, "unix:/run/six")];
    let settings = |servers| {
        let (options, cache) = (OptionHashes::default(), PageCount(7));
        Settings { options, cache, local: None, enabled: true, servers }
    };
    for (before, after) in [
        (vec![one.clone(), two.clone()], vec![two.clone(), one.clone()]),
        (vec![one.clone(), two.clone()], vec![three.clone(), two.clone()]),
        (vec![one.clone(), two.clone(), three.clone()], vec![two.clone(), three.clone()]),
        (vec![one.clone()], vec![two, three, one]),
    ] {
        let header = empty();
        header.set_roster(&before);
        header.set_settings(&settings(before.len()));
        for found in left_by(&header, |header| header.set_roster(&after)) {
            let (roster, servers) = (found.roster(), found.settings().servers);
            let is_twice = (1..roster.len()).any(|at| roster[..at].contains(&roster[at]));
            assert!(!is_twice, "{roster:?}");
            assert!(servers != roster.len() || roster == before || roster == after, "{roster:?} is believed");
            assert_eq!(found.settings(), settings(servers), "the sizes are known");
        }
        assert_eq!((header.roster(), header.settings()), (after, settings(before.len())));
    }
    // Slots are written in order, so the first record is the newer one. Its epoch may have been used already.
    let (old, header) = (entry(2, "unix:/run/two"), empty());
    let new = RosterEntry { epoch: old.epoch + 1, ..old.clone() };
    header.set_server(0, Some(&new));
    header.set_server(1, Some(&old));
    assert_eq!(header.roster(), [new]);
}

#[test]
fn settings_mean_nothing_for_new_options_before_they_are_there() {
    let header = empty();
    let options = |all| OptionHashes { all, sizes: all + 10 };
    let old = Settings { options: options(1), cache: PageCount(100), local: None, enabled: true, servers: 2 };
    let new =
        Settings { options: options(2), cache: PageCount(7), local: Some(PageCount(0)), enabled: false, servers: 3 };
    header.set_settings(&old);
    let left = left_by(&header, |header| header.set_settings(&new));
    for found in left.iter().map(Header::settings) {
        let with_all = Settings { options: OptionHashes { all: 2, ..found.options }, ..new };
        assert!(found.options == old.options || found == with_all, "{found:?}");
    }
    assert_eq!(left.last().unwrap().settings(), new);
}

#[test]
fn the_record_of_an_image_is_that_of_one_image() {
    let (disk, header) = (DiskIndex(1), empty());
    let clock = |real_ns, boot_ns| Clock { real_ns, boot_ns };
    header.set_disk(disk, &ImageStamp { identity: [1, 2, 3, 4], changed_ns: Some(50) }, clock(100, 40));
    header.set_settled(disk, 70);
    let old = header.disk(disk);
    let new = ImageStamp { identity: [1, 20, 30, 40], changed_ns: Some(500) };
    let left = left_by(&header, |header| header.set_disk(disk, &new, clock(1000, 100)));
    let expected = DiskRecord { identity: new.identity, seen_ns: 500, written_ns: 1000, clock_offset: 900 };
    for found in left.iter().map(|header| header.disk(disk)) {
        assert!(found.seen_ns == 0 || found == old || found == expected, "{found:?} is believed");
    }
    assert_eq!(header.disk(disk), expected);
    assert_eq!(header.disk(DiskIndex(0)), DiskRecord::default());
}

#[test]
fn an_image_is_settled_only_at_the_time_at_which_it_was_looked_at() {
    let (disk, header) = (DiskIndex(0), empty());
    let clock = Clock { real_ns: 1000, boot_ns: 100 };
    header.set_disk(disk, &ImageStamp { identity: [1, 2, 3, 4], changed_ns: Some(500) }, clock);
    for found in left_by(&header, |header| header.set_settled(disk, 1500)).iter().map(|header| header.disk(disk)) {
        assert!(found.written_ns != 0 || found.seen_ns == 1500, "{found:?} is settled at a time that nobody looked");
    }
    assert_eq!((header.disk(disk).seen_ns, header.disk(disk).written_ns), (1500, 0));
}

#[test]
fn an_old_time_is_not_kept_with_the_offset_of_a_clock_that_was_set_since() {
    let (disk, header) = (DiskIndex(0), empty());
    header.set_written(disk, Clock { real_ns: 1000, boot_ns: 100 });
    let left = left_by(&header, |header| header.set_written(disk, Clock { real_ns: 5000, boot_ns: 200 }));
    for found in left.iter().map(|header| header.disk(disk)) {
        assert!(found.clock_offset == 900 || found.written_ns == 5000, "{found:?}");
    }
    assert_eq!((header.disk(disk).written_ns, header.disk(disk).clock_offset), (5000, 4800));
}

#[test]
fn a_copy_is_worth_nothing_before_it_is_whole() {
    let (old, new) = (empty(), empty());
    old.describe([1; 16], [2; 16], 3, 2, 400);
    old.set_server(0, Some(&entry(7, "unix:/run/seven")));
    old.set_flush_failed(DiskIndex(1), Some(5));
    old.set_valid(true);
    let left = left_by(&new, |new| {
        new.copy_from(&old);
        new.describe(old.boot_id(), old.key(), old.seed(), 2, 800);
    });
    assert!(left.iter().all(|header| !header.is_valid()));
    new.set_valid(true);
    assert!(new.is_valid());
    assert_eq!((new.roster(), new.flush_failed(DiskIndex(1)), new.index_words()), (old.roster(), Some(5), 800));
    assert!(left_by(&new, |new| new.set_valid(false)).last().is_some_and(|header| !header.is_valid()));
}
