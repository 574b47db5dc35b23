//! 512-byte sectors on real stores with 4 KiB sectors: a loop device, and an NBD server that insists on its blocks.

#![allow(clippy::unwrap_used, reason = "a test that meets an error has failed")]

mod store_support;

use std::fs::File;
use std::time::{Duration, Instant};

use remoca_store::{
    AlignedStore, DataPath, Fault, FaultPlan, FaultyStore, FileOptions, FileStore, NbdOptions, NbdStore, Store,
    StoreError, StoreEvent, StoreOp, UringUse,
};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;
use store_support::machine::{LoopDevice, is_root};
use store_support::servers::Server;
use store_support::{Driver, Random, expect_failed_flush_to_be_inherited, pattern};

const MIB: u64 = 1 << 20;
const SECTORS: usize = 4096;
/// For what takes no time unless it hangs.
const PATIENCE: Timespec = Timespec { tv_sec: 60, tv_nsec: 0 };

/// Random operations of all sizes and alignments, many in flight, none overlapping another in flight; then everything is
/// compared.
fn exercise(driver: &mut Driver, seed: u64) {
    let mut random = Random(seed);
    let mut content: Vec<u64> = vec![0; SECTORS];
    driver.run(StoreOp::WriteZeroes { offset: 0, len: 2 * MIB, may_unmap: true, durable: false }, None).unwrap();
    for round in 1..=60 {
        let mut tokens = Vec::new();
        let mut first = 0;
        while first < SECTORS {
            let len_max = if random.below(8) == 0 { 400 } else { 12 };
            let count = usize::try_from(1 + random.below(len_max)).unwrap().min(SECTORS - first);
            let (offset, len) = (first as u64 * 512, count as u64 * 512);
            let version = round * 10_000 + first as u64;
            match random.below(8) {
                0..4 => {
                    let data: Vec<u8> =
                        (first..first + count).flat_map(|s| pattern(s as u64 * 512, 512, version)).collect();
                    let operation =
                        StoreOp::Write { offset, len: u32::try_from(len).unwrap(), durable: random.below(8) == 0 };
                    tokens.push(driver.queue(operation, Some(&data)));
                    content[first..first + count].fill(version);
                }
                4 => {
                    let may_unmap = random.below(2) == 0;
                    tokens.push(driver.queue(StoreOp::WriteZeroes { offset, len, may_unmap, durable: false }, None));
                    content[first..first + count].fill(0);
                }
                5 => {
                    let operation = StoreOp::Read { offset, len: u32::try_from(len).unwrap() };
                    tokens.push(driver.queue(operation, None));
                }
                _ => {}
            }
            first += count;
        }
        driver.store.kick(std::time::Instant::now());
        for token in tokens {
            driver.wait(token).result.unwrap();
        }
        verify(driver, &content, &mut random);
    }
    driver.flush().unwrap();
}

fn verify(driver: &mut Driver, content: &[u64], random: &mut Random) {
    let mut first = 0;
    while first < SECTORS {
        let count = usize::try_from(1 + random.below(700)).unwrap().min(SECTORS - first);
        let data = driver.read(first as u64 * 512, count * 512).unwrap();
        for (sector, bytes) in (first..first + count).zip(data.chunks(512)) {
            let expected = match content[sector] {
                0 => vec![0; 512],
                version => pattern(sector as u64 * 512, 512, version),
            };
            assert_eq!(bytes, expected, "sector {sector}");
        }
        first += count;
    }
}

#[test]
fn a_loop_device_with_4096_byte_sectors_serves_512_byte_ones() {
    if !is_root() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk.img");
    File::create(&path).unwrap().set_len(2 * MIB).unwrap();
    for uring in [UringUse::Auto, UringUse::Off] {
        let device = LoopDevice::attach(&path, &["-b", "4096"]);
        let store = FileStore::open(&device.0, FileOptions { uring, ..FileOptions::default() }).unwrap();
        assert!(store.is_direct());
        assert_eq!((store.geometry().logical_sector, store.geometry().size), (4096, 2 * MIB));
        assert!(store.geometry().can_discard);
        let mut store = AlignedStore::wrap(Box::new(store));
        assert_eq!(store.geometry().logical_sector, 512);
        expect_size_without_requests(&mut *store);
        let mut driver = Driver::boxed(store);
        exercise(&mut driver, 1);
        expect_failed_flush_to_be_inherited(&mut driver);
        discard_frees_space_and_spares_the_neighbours(&mut driver, &path);
    }
}

/// Asks an idle store for its size, which is no request.
fn expect_size_without_requests(store: &mut dyn Store) {
    assert!(store.measure());
    assert!(!store.is_still());
    store.kick(Instant::now());
    let mut measured = None;
    while measured.is_none() {
        let mut watched = [PollFd::from_borrowed_fd(store.event_fd(), PollFlags::IN)];
        assert_eq!(poll(&mut watched, Some(&PATIENCE)).unwrap(), 1, "nobody has begun to measure");
        store.handle_ready(Instant::now());
        while let Some(event) = store.next_event() {
            match event {
                StoreEvent::Measured(result) => measured = Some(result),
                event => panic!("nothing else was asked for: {event:?}"),
            }
        }
    }
    assert_eq!(measured, Some(Ok(())));
    assert!(store.is_still());
}

fn discard_frees_space_and_spares_the_neighbours(driver: &mut Driver, image: &std::path::Path) {
    use std::os::unix::fs::MetadataExt;
    let data = pattern(0, 2 << 20, 9);
    driver.write(0, &data, true).unwrap();
    let before = image.metadata().unwrap().blocks();
    driver.run(StoreOp::Discard { offset: 512, len: MIB }, None).unwrap();
    assert!(image.metadata().unwrap().blocks() < before, "the file below the device has a hole");
    assert_eq!(driver.read(0, 4096).unwrap(), data[..4096]);
    assert_eq!(driver.read(MIB, 1 << 20).unwrap(), data[1 << 20..]);
}

#[test]
fn an_nbd_server_with_4096_byte_blocks_serves_512_byte_sectors() {
    let folder = tempfile::tempdir().unwrap();
    let policy = ["--filter=blocksize-policy", "memory", "2M", "blocksize-minimum=4K", "blocksize-error-policy=error"];
    let server = Server::nbdkit(&folder.path().join("nbd.sock"), &policy);
    let store = NbdStore::open(&server.uri(), NbdOptions::default()).unwrap();
    assert_eq!(store.geometry().logical_sector, 4096);
    exercise(&mut Driver::boxed(AlignedStore::wrap(Box::new(store))), 2);
}

/// A 4 KiB store whose operations take the time that the plan says.
fn faulty() -> (Driver, FaultPlan, Server, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let arguments =
        ["--filter=blocksize-policy", "memory", "2M", "blocksize-minimum=4K", "blocksize-error-policy=error"];
    let server = Server::nbdkit(&folder.path().join("nbd.sock"), &arguments);
    let store = NbdStore::open(&server.uri(), NbdOptions::default()).unwrap();
    let plan = FaultPlan::default();
    let store = FaultyStore::new(Box::new(store), plan.clone());
    (Driver::boxed(AlignedStore::wrap(Box::new(store))), plan, server, folder)
}

#[test]
fn operations_that_overtake_each_other_below_leave_the_right_content() {
    let (mut driver, plan, _server, _folder) = faulty();
    let mut random = Random(3);
    plan.set(move |_| (random.below(3) == 0).then(|| Fault::Delay(Duration::from_micros(random.below(2000)))));
    exercise(&mut driver, 3);
}

#[test]
fn an_error_below_reaches_the_one_who_asked_and_nobody_else() {
    let (mut driver, plan, _server, _folder) = faulty();
    driver.write(0, &pattern(0, 8192, 1), false).unwrap();
    plan.set(|operation| matches!(operation, StoreOp::Write { .. }).then_some(Fault::Fail(libc::ENOSPC)));
    assert_eq!(driver.write(512, &pattern(512, 512, 2), false), Err(StoreError { errno: libc::ENOSPC }));
    plan.set(|operation| matches!(operation, StoreOp::Read { offset: 0, .. }).then_some(Fault::Fail(libc::EIO)));
    // The read of a rewrite fails: the write does, and nothing has changed.
    assert_eq!(driver.write(512, &pattern(512, 512, 3), false), Err(StoreError::IO));
    driver.write(4608, &pattern(4608, 512, 4), true).unwrap();
    plan.clear();
    let expected = [pattern(0, 4608, 1), pattern(4608, 512, 4), pattern(5120, 3072, 1)].concat();
    assert_eq!(driver.read(0, 8192).unwrap(), expected);
    assert_eq!(driver.store.in_flight(), 0);
}
