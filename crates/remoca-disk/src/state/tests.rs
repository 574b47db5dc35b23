//! The file itself: what it keeps, and what it is not believed.

use super::*;
use remoca_core::engine::ServerNumber;
use remoca_core::index::Layout;
use remoca_core::rules::Rules;
use remoca_core::units::PageCount;
use remoca_protocol::Token;
use remoca_store::ImageStamp;
use std::os::unix::fs::PermissionsExt;

fn config() -> EngineConfig {
    EngineConfig {
        disks: 2,
        key: [7; 16],
        seed: 5,
        cache: PageCount(64),
        local: PageCount(0),
        guest_memory: PageCount(64),
        has_port: false,
        frame_sample: 0,
        send_window: 16,
        fetch_limit: 16,
        slots_per_turn: 64,
        pools: 16,
        hedge: true,
        rules: Rules::default(),
    }
}

fn entry(number: u32, endpoint: &str) -> RosterEntry {
    let endpoint = endpoint.parse().unwrap();
    RosterEntry {
        number: ServerNumber(number),
        endpoint,
        token: Token([u8::try_from(number).unwrap(); 16]),
        epoch: u64::from(number) << 33,
        sends: u64::from(number) + 1,
        leaves: false,
    }
}

#[test]
fn what_is_kept_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vm.state");
    let first = StateFile::start(&path, &config(), Before::Another).unwrap();
    assert!(first.cold_reason.unwrap().contains("no state"));
    let state = first.state.unwrap();
    let long = format!("tcp:{}:70", "h".repeat(270));
    let roster = [entry(3, "tcp:[::1]:7070"), entry(9, "unix:/run/x"), entry(4, &long)];
    for (slot, entry) in roster.iter().enumerate() {
        state.header().set_server(slot, Some(entry));
    }
    state.header().set_epoch(1, 77);
    let stamp = ImageStamp { identity: [1, 2, 3, 4], changed_ns: Some(5) };
    state.header().set_disk(DiskIndex(1), &stamp, Clock { real_ns: 100, boot_ns: 40 });
    drop((state, first.engine));

    let second = StateFile::start(&path, &EngineConfig { key: [8; 16], seed: 6, ..config() }, Before::Another).unwrap();
    assert_eq!(second.cold_reason, None);
    let header = second.state.unwrap().header();
    assert_eq!((header.key(), header.seed()), ([7; 16], 5), "the former process's");
    assert_eq!(header.roster(), [roster[0].clone(), RosterEntry { epoch: 77, ..roster[1].clone() }, roster[2].clone()]);
    let record = header.disk(DiskIndex(1));
    assert_eq!(record, DiskRecord { identity: stamp.identity, seen_ns: 5, written_ns: 100, clock_offset: 60 });
    assert_eq!(header.disk(DiskIndex(0)), DiskRecord::default());
}

/// What is stamped for one disk says nothing of another one's clock.
#[test]
fn each_disk_has_its_own_clock() {
    let folder = tempfile::tempdir().unwrap();
    let state = StateFile::start(&folder.path().join("vm.state"), &config(), Before::Another).unwrap().state.unwrap();
    let stamp = ImageStamp { identity: [1, 2, 3, 4], changed_ns: Some(5) };
    let before = Clock { real_ns: 1000, boot_ns: 40 };
    state.header().set_disk(DiskIndex(1), &stamp, before);
    state.header().set_disk(DiskIndex(0), &stamp, Clock { real_ns: 500, boot_ns: 80 });
    assert_eq!(state.header().disk(DiskIndex(1)).clock_offset, before.offset());
}

#[test]
fn a_boot_that_is_not_known_is_another_one() {
    assert!(is_of_this_boot([0; 16], None).is_err());
    assert!(is_of_this_boot([1; 16], Some([2; 16])).is_err());
    assert!(is_of_this_boot([1; 16], Some([1; 16])).is_ok());
    assert_eq!(boot_id(), boot_id());
    assert!(boot_id().is_some_and(|id| id != [0; 16]));
}

#[test]
fn a_file_without_enough_numbers_is_of_no_use() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vm.state");
    drop(StateFile::start(&path, &config(), Before::Another).unwrap());
    let other = StateFile::start(&path, &EngineConfig { disks: 1, ..config() }, Before::Another).unwrap();
    assert_eq!(other.cold_reason, None, "the file may have more numbers than are needed");
    drop((other.state, other.engine));
    let more = StateFile::start(&path, &EngineConfig { disks: 600, ..config() }, Before::Another).unwrap();
    assert!(more.cold_reason.is_some());
}

#[test]
fn a_file_of_the_former_version_is_replaced_by_a_cold_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vm.state");
    // An old magic with its version, and each of them alone.
    for (magic, version) in [(b"REMOCAST", 2), (b"REMOCAST", 4), (b"REMOCASF", 2_u64)] {
        let _ = std::fs::remove_file(&path);
        let start = StateFile::start(&path, &config(), Before::Another).unwrap();
        start.state.as_ref().unwrap().header().set_server(0, Some(&entry(3, "unix:/x")));
        drop(start);
        let mut bytes = std::fs::read(&path).unwrap();
        assert_eq!(&bytes[..9], b"REMOCASF\x04");
        bytes[..8].copy_from_slice(magic);
        bytes[8..16].copy_from_slice(&version.to_le_bytes());
        std::fs::write(&path, bytes).unwrap();
        let next = StateFile::start(&path, &config(), Before::Another).unwrap();
        assert!(next.cold_reason.as_ref().unwrap().contains("another version"));
        assert_eq!(next.former.servers, [], "nothing of it is believed");
        assert!(next.state.unwrap().header().is_valid());
        assert_eq!(std::fs::read(&path).unwrap()[..9], *b"REMOCASF\x04");
    }
}

#[test]
fn failed_flushes_and_servers_are_found_by_those_that_cannot_use_the_index() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vm.state");
    let start = StateFile::start(&path, &config(), Before::Another).unwrap();
    let header = start.state.as_ref().unwrap().header();
    header.set_server(0, Some(&entry(3, "unix:/x")));
    header.set_disk(
        DiskIndex(1),
        &ImageStamp { identity: [1, 2, 3, 4], changed_ns: None },
        Clock { real_ns: 1, boot_ns: 1 },
    );
    header.set_flush_failed(DiskIndex(1), Some(5));
    drop((start, header));
    let failed = [FailedFlush { image: [1, 2, 3], errno: 5 }];
    for disks in [2, 1, 700] {
        let config = EngineConfig { disks, ..config() };
        let next = StateFile::start(&path, &config, Before::Another).unwrap();
        assert_eq!(next.former.failed_flushes, failed, "{disks} disks, of any size");
        assert_eq!(next.former.servers, [entry(3, "unix:/x")]);
        // What the driver does next.
        let header = next.state.as_ref().unwrap().header();
        header.set_server(0, Some(&entry(3, "unix:/x")));
        let stamp = ImageStamp { identity: [1, 2, 3, u64::from(disks)], changed_ns: None };
        header.set_disk(DiskIndex(0), &stamp, Clock { real_ns: 1, boot_ns: 1 });
        header.set_flush_failed(DiskIndex(1 % disks), None);
        header.set_flush_failed(DiskIndex(0), Some(5));
    }
    std::fs::write(&path, [0xff; 9000]).unwrap();
    assert_eq!(StateFile::start(&path, &config(), Before::Another).unwrap().former.failed_flushes, []);
}

#[test]
fn a_file_that_was_given_up_is_gone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vm.state");
    let start = StateFile::start(&path, &config(), Before::Another).unwrap();
    start.state.as_ref().unwrap().remove();
    assert!(!path.exists());
    // A file that could not be removed says so itself.
    assert!(!start.state.unwrap().header().is_valid());
}

#[test]
fn a_file_that_is_set_aside_is_worthless_and_what_else_it_said_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vm.state");
    let start = StateFile::start(&path, &config(), Before::Another).unwrap();
    let header = start.state.as_ref().unwrap().header();
    header.set_server(0, Some(&entry(3, "unix:/x")));
    header.set_flush_failed(DiskIndex(1), Some(5));
    let key = header.key();
    assert!(matches!(set_aside(&path), Err(StateError::InUse(_))));
    drop((header, start));
    let former = set_aside(&path).unwrap();
    assert_eq!((former.servers.len(), former.failed_flushes.len()), (1, 1));
    let bad = folder.path().join("vm.state.bad");
    assert!(!path.exists());
    let text = std::fs::read(&bad).unwrap();
    let has = |secret: &[u8]| text.windows(secret.len()).any(|bytes| bytes == secret);
    assert!(!has(&key) && !has(&entry(3, "unix:/x").token.0), "it may be sent to somebody");
    // The first one is the one of interest.
    drop(StateFile::start(&path, &config(), Before::Another).unwrap());
    set_aside(&path).unwrap();
    assert!(!path.exists() && std::fs::read(&bad).unwrap() == text);
    std::fs::rename(bad, &path).unwrap();
    let next = StateFile::start(&path, &config(), Before::Another).unwrap();
    assert!(next.cold_reason.as_ref().unwrap().contains("is damaged") && next.former.servers.is_empty());
    // One that was never there leaves nothing.
    drop(next);
    std::fs::remove_file(&path).unwrap();
    assert_eq!(set_aside(&path).unwrap().failed_flushes, []);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn a_growth_that_was_not_finished_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vm.state");
    let start = StateFile::start(&path, &config(), Before::Another).unwrap();
    let state = start.state.unwrap();
    state.header().set_server(0, Some(&entry(3, "unix:/x")));
    let layout = Layout::new(PageCount(1000), PageCount(1000), 2);
    drop(StateFile::create(&path, 2, layout.words()).unwrap());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "its room is given back");
    drop((state, start.engine));
    let next = StateFile::start(&path, &config(), Before::Another).unwrap();
    assert_eq!(next.cold_reason, None);
    assert_eq!(next.engine.index().layout(), super::layout(&config()));
    assert_eq!(next.state.unwrap().header().roster().len(), 1);
}

#[test]
fn a_file_that_is_not_wanted_any_more_is_not_in_the_way_of_the_next_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vm.state");
    let create = || StateFile::create(&path, 1, 64);
    let (first, _) = create().unwrap();
    assert!(matches!(create(), Err(StateError::InUse(_))), "two at a time");
    first.make_room_beside();
    let (mut second, _) = create().unwrap();
    // It is given back late, which must not hurt the other one.
    drop(first);
    second.put_in_place(&config()).unwrap();
    assert!(path.exists());
}

#[test]
fn no_room_is_no_crash() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vm.state");
    let system = rustix::fs::statvfs(folder.path()).unwrap();
    let words = usize::try_from(system.f_blocks * system.f_frsize / 4).unwrap();
    match StateFile::create(&path, 1, words) {
        Err(error @ StateError::NoRoom { .. }) => assert!(error.to_string().contains("Make room"), "{error}"),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("a file system has room for its size, and a header"),
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left behind");
}

/// Runs `action` in a file system of `bytes` that only its thread sees.
fn in_small_file_system(bytes: usize, action: impl FnOnce(&Path) + Send + 'static) {
    let run = move || {
        let folder = tempfile::tempdir().unwrap();
        let none = c"none".as_ptr();
        let target = std::ffi::CString::new(folder.path().to_str().unwrap()).unwrap();
        let size = std::ffi::CString::new(format!("size={bytes}")).unwrap();
        // SAFETY: the strings live until the calls return; what is mounted is of no concern to other threads.
        let made = unsafe {
            libc::unshare(libc::CLONE_NEWNS)
                | libc::mount(none, c"/".as_ptr(), none, libc::MS_REC | libc::MS_PRIVATE, std::ptr::null())
                | libc::mount(none, target.as_ptr(), c"tmpfs".as_ptr(), 0, size.as_ptr().cast())
        };
        assert_eq!(made, 0, "{}", io::Error::last_os_error());
        action(folder.path());
    };
    std::thread::spawn(run).join().unwrap();
}

#[test]
fn what_is_of_no_use_gives_its_room_up_and_is_never_believed_again() {
    if !remoca_io::left_out::is_root("only root can mount") {
        return;
    }
    let large = EngineConfig { cache: PageCount(1 << 16), ..config() };
    // One and a half, with what is left free.
    in_small_file_system(super::layout(&large).words() * 4 * 3 / 2, move |folder| {
        let path = folder.join("vm.state");
        let first = StateFile::start(&path, &large, Before::Another).unwrap();
        assert!(first.state.is_some());
        first.state.as_ref().unwrap().header().set_flush_failed(DiskIndex(1), Some(5));
        let mut engine = first.engine;
        engine.close();
        drop((engine, first.state));
        let copy = std::fs::read(&path).unwrap();

        let other = EngineConfig { disks: 1, ..large };
        let second = StateFile::start(&path, &other, Before::Another).unwrap();
        assert_eq!(second.former.failed_flushes.len(), 1);
        let state = second.state.expect("there is room for one");
        assert!(state.header().is_valid());
        drop((second.engine, state));

        // As if the one before had been killed when it had made room.
        std::fs::write(&path, &copy).unwrap();
        let file = open_file(&path, &mut OpenOptions::new()).unwrap();
        let (start, flags) = (Header::bytes(2), FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE);
        rustix::fs::fallocate(&file, flags, start, copy.len() as u64 - start).unwrap();
        drop(file);
        let third = StateFile::start(&path, &large, Before::Another).unwrap();
        assert!(third.cold_reason.is_some());
        assert_eq!(third.former.failed_flushes.len(), 1);
    });
}

#[test]
fn a_file_that_was_handed_over_stays_locked_and_is_known_for_sure() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vm.state");
    let first = StateFile::start(&path, &config(), Before::Another).unwrap();
    let passed = first.state.as_ref().unwrap().file().try_clone().unwrap();
    drop(first);
    assert!(matches!(StateFile::start(&path, &config(), Before::Another), Err(StateError::InUse(_))), "no gap");
    // Its mode is of no interest any more.
    passed.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(0o640)).unwrap();
    let second = StateFile::start(&path, &config(), Before::ThisProcess(Some(passed.into()))).unwrap();
    assert!(second.is_handed_over && second.cold_reason.is_none() && second.state.is_some());
}

/// Another program may have had the disks between that file and this process.
#[test]
fn a_file_that_was_not_handed_over_is_not_known_for_sure() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vm.state");
    drop(StateFile::start(&path, &config(), Before::Another).unwrap());
    let found = StateFile::start(&path, &config(), Before::ThisProcess(None)).unwrap();
    assert!(found.cold_reason.is_none() && !found.is_handed_over);
    let passed = found.state.as_ref().unwrap().file().try_clone().unwrap();
    drop(found);
    let copy = folder.path().join("copy");
    std::fs::copy(&path, &copy).unwrap();
    std::fs::rename(&copy, &path).unwrap();
    let other = StateFile::start(&path, &config(), Before::ThisProcess(Some(passed.into()))).unwrap();
    assert!(other.cold_reason.is_none() && !other.is_handed_over, "another file of that name");
}

#[test]
fn a_process_in_the_middle_of_its_life_goes_on_without_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vm.state");
    let other = StateFile::start(&path, &config(), Before::Another).unwrap();
    let start = StateFile::start(&path, &config(), Before::ThisProcess(None)).unwrap();
    assert!(start.state.is_none() && start.cold_reason.unwrap().contains("another process"));
    assert!(path.exists() && other.state.unwrap().header().is_valid(), "it is the other's");
}

#[test]
fn what_cannot_be_opened_is_not_replaced_by_an_index_that_came() {
    let folder = tempfile::tempdir().unwrap();
    let (path, other) = (folder.path().join("vm.state"), folder.path().join("other"));
    std::os::unix::fs::symlink(&other, &path).unwrap();
    assert!(matches!(StateFile::create_late(&path, 1, 1000), Err(StateError::NotOurs(..))));
    assert!(path.is_symlink());
    std::fs::remove_file(&path).unwrap();
    assert!(StateFile::create_late(&path, 1, 1000).is_ok());
}

#[test]
fn what_keeps_a_process_from_starting_is_found_before() {
    let folder = tempfile::tempdir().unwrap();
    let [path, link] = ["vm.state", "link"].map(|name| folder.path().join(name));
    check_place(&path).unwrap();
    assert!(!path.exists(), "nothing is made");
    std::fs::write(&path, "").unwrap();
    let set_mode = |mode| std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
    for (mode, shown) in [(0o644, "(mode 644)"), (0o620, "(mode 620)")] {
        set_mode(mode);
        let text = check_place(&path).unwrap_err().to_string();
        assert!(text.contains(shown) && text.contains(&format!("`chmod 600 {}`", path.display())), "{text}");
        let started = StateFile::start(&path, &config(), Before::Another).map(drop).unwrap_err();
        assert_eq!(started.to_string(), text);
    }
    set_mode(0o600);
    check_place(&path).unwrap();
    std::os::unix::fs::symlink(&path, &link).unwrap();
    let text = check_place(&link).unwrap_err().to_string();
    assert!(text.contains("is no regular file of this user") && !text.contains("chmod"), "{text}");
}

#[test]
fn a_file_system_is_not_filled_to_the_last_byte() {
    const GIB: u64 = 1 << 30;
    assert!(file::leaves_reserve(GIB - (32 << 20), GIB, 10 * GIB));
    assert!(!file::leaves_reserve(GIB - (31 << 20), GIB, 10 * GIB));
    assert!(!file::leaves_reserve(u64::MAX, GIB, GIB));
    assert!(file::leaves_reserve(15 << 20, 16 << 20, 16 << 20), "a small one");
    assert!(check_room(Path::new("/nowhere/x"), 1).is_err());
}

/// What a program of another version has written must be found.
#[test]
fn hashes_never_change() {
    assert_eq!(stable_hash(&[]), 0xcbf2_9ce4_8422_2325);
    assert_eq!(stable_hash(&["a"]), fnv(b"a\xff"));
    assert_eq!(stable_hash(&["4096", "unix:/run/x"]), fnv(b"4096\xffunix:/run/x\xff"));
    assert_ne!(stable_hash(&["ab", "c"]), stable_hash(&["a", "bc"]));
    // The published example of FNV-1a.
    assert_eq!(fnv(b"foobar"), 0x8594_4171_f739_67e8);
}

fn fnv(bytes: &[u8]) -> u64 {
    let mut hash: u64 = 14_695_981_039_346_656_037;
    for byte in bytes {
        hash = (hash ^ u64::from(*byte)).wrapping_mul(1_099_511_628_211);
    }
    hash
}

/// A header of the former version, as a process of that version left it, with an index that is of no use by now.
#[test]
fn of_a_file_of_the_former_version_all_but_the_index_is_taken() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vm.state");
    let boot = boot_id().unwrap();
    // Fixed words, 16 servers of 40 words, and the disks.
    let mut words = vec![0_u64; 8192 / 8 + 64];
    words[..9].copy_from_slice(&[u64::from_le_bytes(*b"REMOCASF"), 3, 0, 0, 7, 7, 5, 2, 64]);
    words[2] = u64::from_le_bytes(boot[..8].try_into().unwrap());
    words[3] = u64::from_le_bytes(boot[8..].try_into().unwrap());
    (words[11], words[12]) = (99, 64 << 8 | 1 << 1 | 1);
    words[16..22].copy_from_slice(&[4, 3, 3, 1, 7, u64::from_le_bytes(*b"unix:/x\0")]);
    words[16 + 16 * 40 + 16..][..4].copy_from_slice(&[1, 2, 3, 4]);
    words[16 + 16 * 40 + 16 + 7] = 5;
    let bytes: Vec<_> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    std::fs::write(&path, bytes).unwrap();
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let FormerSettings { listed, cache, local, enabled, .. } = settings_at(&path).unwrap();
    assert_eq!((listed, cache, local, enabled), (vec!["unix:/x".parse().unwrap()], PageCount(64), None, true));
    let mut start = StateFile::start(&path, &config(), Before::Another).unwrap();
    assert!(start.cold_reason.is_some());
    let failed = FailedFlush { image: [1, 2, 3], errno: 5 };
    assert_eq!((start.former.failed_flushes.clone(), start.former.servers.len()), (vec![failed], 1));
    // Its disk is not there, and comes back with the next process.
    start.number_disks(&[disk(1, 8)]);
    drop(start);
    let next = StateFile::start(&path, &config(), Before::Another).unwrap();
    assert_eq!((next.cold_reason, next.former.failed_flushes), (None, vec![failed]));
}

/// A process may die between its two records: of the list of servers, and of all else that was set.
#[test]
fn sizes_that_were_set_are_known_though_the_list_of_servers_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vm.state");
    let state = StateFile::start(&path, &config(), Before::Another).unwrap().state.unwrap();
    let header = state.header();
    let expect = |expected: &[&str], sizes: [u32; 2]| {
        let FormerSettings { options, listed, cache, local, enabled } = settings_at(&path).unwrap();
        assert_eq!((options, enabled), (Some(OptionHashes { all: 9, sizes: 10 }), false));
        assert_eq!((cache, local), (PageCount(sizes[0]), Some(PageCount(sizes[1]))));
        assert_eq!(listed.iter().map(ToString::to_string).collect::<Vec<_>>(), expected);
    };
    let set = |[cache, local]: [u32; 2], servers| {
        let (options, local) = (OptionHashes { all: 9, sizes: 10 }, Some(PageCount(local)));
        header.set_settings(&Settings { options, cache: PageCount(cache), local, enabled: false, servers });
    };
    assert!(settings_at(&path).is_none(), "nothing was set");
    for (slot, endpoint) in ["unix:/x", "local:/l"].into_iter().enumerate() {
        header.set_server(slot, Some(&entry(3 + u32::try_from(slot).unwrap(), endpoint)));
    }
    set([64, 7], 1);
    expect(&["unix:/x"], [64, 7]);
    header.set_server(2, Some(&entry(5, "tcp:h:1")));
    expect(&[], [64, 7]);
    set([64, 7], 2);
    expect(&["unix:/x", "local:/l"], [64, 7]);
    // Without a list, a tier that was set to nothing.
    header.set_server(0, None);
    header.set_server(1, None);
    set([0, 0], 0);
    expect(&[], [0, 0]);
}

/// Returns a disk with this name and inode.
fn disk(name: u64, inode: u64) -> DiskIdentity {
    DiskIdentity { name, image: [1, 1, inode] }
}

/// Starts a process with these disks, of which it learns one block each that it did not know. Returns their numbers, and
/// whether the block was known.
fn run_with(path: &Path, config: &EngineConfig, disks: &[DiskIdentity]) -> Vec<(u16, bool)> {
    use remoca_core::engine::{GuestOp, RequestId};
    use remoca_core::units::{BlockId, BlockNumber, ByteRange, Nanos};
    let mut start = StateFile::start(path, config, Before::Another).unwrap();
    let numbers = start.number_disks(disks);
    let (engine, header) = (&mut start.engine, start.state.as_ref().unwrap().header());
    let clock = Clock { real_ns: 1, boot_ns: 1 };
    let mut found = Vec::new();
    for (disk, number) in disks.iter().zip(numbers) {
        engine.describe_disk(number, 1 << 20, false);
        found.push((number.0, engine.known(BlockId { disk: number, bno: BlockNumber(0) }).is_some()));
        let [kind, device, inode] = disk.image;
        header.set_disk_name(number, disk.name);
        header.set_disk(number, &ImageStamp { identity: [kind, device, inode, 1 << 20], changed_ns: None }, clock);
        let op = GuestOp::Read(ByteRange { offset: 0, length: 4096 });
        engine.handle_request(Nanos(1), RequestId(0), number, op);
        while engine.poll_action().is_some() {}
        engine.handle_disk_done(Nanos(2), RequestId(0), Ok(()), &[u8::try_from(disk.image[2]).unwrap(); 4096]);
        while engine.poll_action().is_some() {}
    }
    found
}

#[test]
fn disks_that_stay_are_warm_whatever_came_and_went() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vm.state");
    let config = EngineConfig { disks: 4, ..config() };
    let run = |disks: &[DiskIdentity]| run_with(&path, &config, disks);
    let (a, b, c) = (disk(1, 10), disk(2, 20), disk(3, 30));
    assert_eq!(run(&[a, b]), [(0, false), (1, false)]);
    assert_eq!(run(&[b, a]), [(1, true), (0, true)], "another order");
    assert_eq!(run(&[c, b, a]), [(2, false), (1, true), (0, true)], "one more");
    assert_eq!(run(&[c, a]), [(2, true), (0, true)], "one less");
    assert_eq!(run(&[c, b, a]), [(2, true), (1, false), (0, true)], "what went is cold");
    let renamed = DiskIdentity { name: 9, ..a };
    assert_eq!(run(&[renamed, b]), [(0, true), (1, true)], "another name");
    let replaced = DiskIdentity { image: [1, 1, 40], ..b };
    assert_eq!(run(&[replaced, renamed]).iter().map(|(_, known)| *known).collect::<Vec<_>>(), [false, true]);
}

#[test]
fn a_failed_flush_stays_with_its_image() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vm.state");
    let config = EngineConfig { disks: 4, ..config() };
    let (a, b, c) = (disk(1, 10), disk(2, 20), disk(3, 30));
    let failed = [FailedFlush { image: b.image, errno: 5 }];
    run_with(&path, &config, &[a, b]);
    let mut start = StateFile::start(&path, &config, Before::Another).unwrap();
    let numbers = start.number_disks(&[a, b]);
    start.engine.set_failed_flush(numbers[1], Some(5));
    start.state.as_ref().unwrap().header().set_flush_failed(numbers[1], Some(5));
    drop(start);
    // It goes, and nothing is left of it but the failure.
    let mut start = StateFile::start(&path, &config, Before::Another).unwrap();
    start.number_disks(&[a]);
    start.engine.forget_removed();
    drop(start);
    assert_ne!(run_with(&path, &config, &[a, c])[1].0, numbers[1].0, "the number is kept for the image");
    // It comes back under another name.
    run_with(&path, &config, &[a, DiskIdentity { name: 7, ..b }]);
    assert_eq!(StateFile::start(&path, &config, Before::Another).unwrap().former.failed_flushes, failed);
    // It goes again. No process has it for a while, one of them with a file of its own.
    run_with(&path, &config, &[a]);
    run_with(&path, &EngineConfig { disks: 8, ..config }, &[a]);
    let mut start = StateFile::start(&path, &config, Before::Another).unwrap();
    assert_eq!(start.former.failed_flushes, failed);
    start.number_disks(&[a]);
    start.state.as_ref().unwrap().clear_failed_flushes(&mut start.engine, b.image);
    drop(start);
    assert_eq!(StateFile::start(&path, &config, Before::Another).unwrap().former.failed_flushes, []);
}

#[test]
fn a_failed_flush_gives_up_its_number_to_a_disk_that_needs_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vm.state");
    let config = EngineConfig { disks: 4, ..config() };
    let (a, b, c) = (disk(1, 10), disk(2, 20), disk(3, 30));
    run_with(&path, &config, &[a, b]);
    let mut start = StateFile::start(&path, &config, Before::Another).unwrap();
    let numbers = start.number_disks(&[a, b]);
    start.engine.set_failed_flush(numbers[1], Some(5));
    start.state.as_ref().unwrap().header().set_flush_failed(numbers[1], Some(5));
    drop(start);
    let failed = [FailedFlush { image: b.image, errno: 5 }];
    // The last one needs all numbers: the one that the failed flush has moves to no other.
    let d = disk(4, 40);
    for (disks, numbers) in
        [(&[a][..], &[0][..]), (&[a, c], &[0, 2]), (&[c, d, a], &[2, 3, 0]), (&[c, d, a, disk(5, 50)], &[2, 3, 0, 1])]
    {
        let mut start = StateFile::start(&path, &config, Before::Another).unwrap();
        assert_eq!(start.former.failed_flushes, failed);
        let found = start.number_disks(disks);
        assert_eq!(found.iter().map(|number| number.0).collect::<Vec<_>>(), numbers, "{disks:?}");
        let header = start.state.as_ref().unwrap().header();
        for (disk, number) in disks.iter().zip(found) {
            assert_eq!(header.flush_failed(number), None, "it is another image's");
            start.engine.describe_disk(number, 1 << 20, false);
            let [kind, device, inode] = disk.image;
            header.set_disk_name(number, disk.name);
            let stamp = ImageStamp { identity: [kind, device, inode, 1 << 20], changed_ns: None };
            header.set_disk(number, &stamp, Clock { real_ns: 1, boot_ns: 1 });
        }
    }
}

/// What a file of another process said comes to a new file, whose numbers may all be taken.
#[test]
fn a_failed_flush_that_is_taken_along_is_under_no_disks_number() {
    let config = EngineConfig { disks: 4, ..config() };
    let disks = [1, 2, 3, 4].map(|name| disk(name, name * 10));
    let failed = FailedFlush { image: [1, 1, 99], errno: 5 };
    for (count, expected) in [(4, None), (3, Some(3)), (1, Some(3))] {
        let folder = tempfile::tempdir().unwrap();
        let mut start = StateFile::start(&folder.path().join("vm.state"), &config, Before::Another).unwrap();
        start.former.failed_flushes = vec![failed];
        let numbers = start.number_disks(&disks[..count]);
        let header = start.state.as_ref().unwrap().header();
        let found: Vec<_> = (0..4).filter(|number| header.flush_failed(DiskIndex(*number)).is_some()).collect();
        assert_eq!(found, Vec::from_iter(expected), "{count} disks at {numbers:?}");
        for number in numbers {
            assert_eq!(start.engine.index().flush_failed(number), None);
        }
    }
}

#[test]
fn the_operator_clears_what_no_disk_has_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let config = EngineConfig { disks: 4, ..config() };
    let mut start = StateFile::start(&folder.path().join("vm.state"), &config, Before::Another).unwrap();
    let a = disk(1, 10);
    let gone = FailedFlush { image: [1, 1, 99], errno: 5 };
    start.former.failed_flushes = vec![gone];
    let numbers = start.number_disks(&[a]);
    let (state, engine) = (start.state.as_ref().unwrap(), &mut start.engine);
    let header = state.header();
    header.set_flush_failed(numbers[0], Some(28));
    engine.set_failed_flush(numbers[0], Some(28));
    // Told twice, and of one that a disk has: it is recorded once, and the disk's own stays.
    state.keep_failed_flushes(engine, &[gone, FailedFlush { image: a.image, errno: 7 }], &[(numbers[0], a.image)]);
    let failed = || (0..4).filter_map(|number| header.flush_failed(DiskIndex(number))).collect::<Vec<_>>();
    assert_eq!(failed(), [28, 5]);
    state.clear_removed_failures(engine, &numbers);
    assert_eq!(failed(), [28]);
    let in_index = |number| engine.index().flush_failed(DiskIndex(number));
    assert_eq!((0..4).filter_map(in_index).collect::<Vec<_>>(), [28]);
}

#[test]
fn the_largest_size_is_known_of_the_same_image_alone() {
    let folder = tempfile::tempdir().unwrap();
    let start = StateFile::start(&folder.path().join("vm.state"), &config(), Before::Another).unwrap();
    let (header, number) = (start.state.as_ref().unwrap().header(), DiskIndex(0));
    let stamp = |size| ImageStamp { identity: [1, 1, 10, size], changed_ns: None };
    let clock = Clock { real_ns: 1, boot_ns: 1 };
    header.set_disk_name(number, 1);
    header.set_disk(number, &stamp(8192 + 100), clock);
    assert_eq!(header.largest_bytes(number, [1, 1, 10]), Some(8192), "what is no whole block is not used");
    header.set_had_bytes(number, Some(16384));
    header.set_disk(number, &stamp(4096), clock);
    assert_eq!(header.largest_bytes(number, [1, 1, 10]), Some(16384));
    assert_eq!(header.largest_bytes(number, [1, 1, 11]), None);
    header.set_disk_name(number, 2);
    header.set_disk(number, &stamp(4096), clock);
    assert_eq!(header.largest_bytes(number, [1, 1, 10]), Some(4096), "another disk");
}
