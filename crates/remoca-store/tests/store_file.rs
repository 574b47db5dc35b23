//! File stores on real files, each test through io_uring and through threads.

#![allow(clippy::unwrap_used, reason = "a test that meets an error has failed")]

mod store_support;

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use remoca_io::lock::ImageLock;
use remoca_store::{FileOptions, FileStore, HandOver, StoreError, StoreOp, UringUse};
use store_support::{Driver, Random, expect_failed_flush_to_be_inherited, pattern};
use tempfile::TempDir;

const BOTH: [UringUse; 2] = [UringUse::Auto, UringUse::Off];
const MIB: u64 = 1 << 20;
const EIO: StoreError = StoreError { errno: libc::EIO };

fn image(size: u64) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk.img");
    File::create(&path).unwrap().set_len(size).unwrap();
    (folder, path)
}

fn options(uring: UringUse) -> FileOptions {
    FileOptions { uring, ..FileOptions::default() }
}

fn open(path: &Path, uring: UringUse) -> Driver {
    let store = FileStore::open(path, options(uring)).unwrap();
    assert_eq!(store.uses_uring(), uring == UringUse::Auto, "this machine is expected to allow io_uring");
    Driver::new(store)
}

/// A time that is to be changed may have to wait for the file system's journal.
#[test]
fn reads_leave_the_access_time_alone() {
    for uring in BOTH {
        let (_folder, path) = image(MIB);
        let store = FileStore::open(&path, options(uring)).unwrap();
        let flags = rustix::fs::fcntl_getfl(store.hand_over().unwrap().0).unwrap();
        assert!(flags.contains(rustix::fs::OFlags::NOATIME), "{flags:?}");
    }
}

#[test]
fn what_was_written_is_read_and_is_in_the_file() {
    for uring in BOTH {
        let (_folder, path) = image(16 * MIB);
        let mut driver = open(&path, uring);
        for (index, (offset, len)) in
            [(0, 512), (512, 4096), (MIB, 4 << 20), (16 * MIB - 512, 512)].into_iter().enumerate()
        {
            let data = pattern(offset, len, 1);
            driver.write(offset, &data, index % 2 == 0).unwrap();
            assert_eq!(driver.read(offset, len).unwrap(), data);
            let mut on_disk = vec![0; len];
            driver.flush().unwrap();
            File::open(&path).unwrap().read_exact_at(&mut on_disk, offset).unwrap();
            assert_eq!(on_disk, data);
        }
    }
}

/// Whoever starts after a kill takes pages there for the work of another program.
#[test]
fn zeroes_and_discards_of_parts_of_blocks_leave_nothing_in_the_page_cache() {
    for uring in BOTH {
        let (_folder, path) = image(MIB);
        let mut driver = open(&path, uring);
        let before = pattern(0, 1 << 20, 9);
        driver.write(0, &before, true).unwrap();
        // A file system in memory has nothing but its page cache.
        let is_seen = !driver.store.may_be_in_page_cache();
        for (offset, len, may_unmap) in [(4608, 8192, true), (20_992, 16_384, false), (65_024, 1024, true)] {
            driver.run(StoreOp::WriteZeroes { offset, len, may_unmap, durable: may_unmap }, None).unwrap();
        }
        for (offset, len) in [(102_912, 12_288), (200_704 + 512, 1024)] {
            driver.run(StoreOp::Discard { offset, len }, None).unwrap();
        }
        assert!(!is_seen || !driver.store.may_be_in_page_cache());
        let mut expected = before;
        for zeroed in [4608..12_800, 20_992..37_376, 65_024..66_048] {
            expected[zeroed].fill(0);
        }
        let found = driver.read(0, 1 << 20).unwrap();
        // What is discarded may be anything.
        let kept = [0..102_912, 115_200..201_216, 202_240..1 << 20];
        assert!(kept.iter().all(|range| found[range.clone()] == expected[range.clone()]));
    }
}

#[test]
fn many_operations_in_flight_complete_once_each() {
    for uring in BOTH {
        let (_folder, path) = image(16 * MIB);
        let mut driver = open(&path, uring);
        // More than the ring holds, with one kick.
        let writes: Vec<u64> = (0..1000)
            .map(|block| {
                let offset = block * 4096;
                let operation = StoreOp::Write { offset, len: 4096, durable: false };
                driver.queue(operation, Some(&pattern(offset, 4096, 7)))
            })
            .collect();
        driver.store.kick(std::time::Instant::now());
        for token in writes {
            driver.wait(token).result.unwrap();
        }
        assert_eq!(driver.store.in_flight(), 0);
        let mut order: Vec<u64> = (0..1000).collect();
        order.sort_by_key(|block| Random(*block).next());
        let reads: Vec<(u64, u64)> = order
            .into_iter()
            .map(|block| (block * 4096, driver.queue(StoreOp::Read { offset: block * 4096, len: 4096 }, None)))
            .collect();
        driver.store.kick(std::time::Instant::now());
        for (offset, token) in reads {
            assert_eq!(driver.wait(token).buffer.unwrap()[..], pattern(offset, 4096, 7));
        }
    }
}

/// The kernel's count of these threads goes wrong under load (seen on Linux 6.18), and then it starts none any more: calls that are
/// left to them wait for ever.
#[test]
fn no_call_is_left_to_the_threads_that_the_kernel_has_for_a_ring() {
    let (_folder, path) = image(64 * MIB);
    let mut driver = open(&path, UringUse::Auto);
    let around = File::options().write(true).open(&path).unwrap();
    for block in 0..200 {
        // Into a hole, where a file system may have to wait, and again where it need not.
        let (offset, data) = (block * 16384, pattern(block * 16384, 8192, 3));
        driver.write(offset, &data, block % 2 == 0).unwrap();
        driver.write(offset, &data, block % 3 == 0).unwrap();
        assert_eq!(driver.read(offset, data.len()).unwrap(), data);
        // A read that has to wait for what somebody else left in the page cache.
        let data = pattern(offset, 8192, 4);
        around.write_all_at(&data, offset).unwrap();
        assert_eq!(driver.read(offset, data.len()).unwrap(), data);
        driver.run(StoreOp::Discard { offset, len: 4096 }, None).unwrap();
        driver.run(StoreOp::WriteZeroes { offset, len: 4096, may_unmap: true, durable: true }, None).unwrap();
        driver.flush().unwrap();
    }
    let names = std::fs::read_dir("/proc/self/task").unwrap().filter_map(|task| {
        // A thread that ends meanwhile is none of them: these stay for seconds.
        std::fs::read_to_string(task.unwrap().path().join("comm")).ok()
    });
    let left: Vec<_> = names.filter(|name| name.starts_with("iou-")).collect();
    assert_eq!(left, Vec::<String>::new());
}

#[test]
fn zeroes_and_discards_read_as_zero_and_give_space_back() {
    for uring in BOTH {
        let (_folder, path) = image(16 * MIB);
        let mut driver = open(&path, uring);
        assert!(driver.store.geometry().can_discard, "the file system of the tests can punch holes");
        driver.write(0, &pattern(0, 4 << 20, 1), true).unwrap();
        let full = path.metadata().unwrap().blocks();

        let zeroes = |offset, may_unmap| StoreOp::WriteZeroes { offset, len: MIB, may_unmap, durable: true };
        driver.run(zeroes(0, false), None).unwrap();
        assert!(path.metadata().unwrap().blocks() >= full, "may_unmap: false keeps the space");
        driver.run(zeroes(MIB, true), None).unwrap();
        driver.run(StoreOp::Discard { offset: 2 * MIB, len: MIB }, None).unwrap();
        // The file system may need some blocks to remember the rest, where free space is in many pieces.
        assert!(path.metadata().unwrap().blocks() <= full - (2 * MIB - (64 << 10)) / 512);

        assert_eq!(driver.read(0, 3 << 20).unwrap(), vec![0; 3 << 20]);
        assert_eq!(driver.read(3 * MIB, 1 << 20).unwrap(), pattern(3 * MIB, 1 << 20, 1));
        assert_eq!(path.metadata().unwrap().len(), 16 * MIB);
    }
}

#[test]
fn an_image_that_was_shortened_gives_errors_not_short_reads() {
    for uring in BOTH {
        let (_folder, path) = image(MIB);
        let mut driver = open(&path, uring);
        File::options().write(true).open(&path).unwrap().set_len(MIB - 8192 - 512).unwrap();
        assert_eq!(driver.read(MIB - 4096, 4096), Err(EIO));
        assert_eq!(driver.read(MIB - 16384, 16384), Err(EIO));
        assert_eq!(driver.read(0, 4096), Ok(vec![0; 4096]));
    }
}

/// As a former process left it, or the one that had the image before.
#[test]
fn a_flush_that_has_failed_elsewhere_has_failed_here() {
    for uring in BOTH {
        let (_folder, path) = image(MIB);
        expect_failed_flush_to_be_inherited(&mut open(&path, uring));
    }
}

#[test]
fn operations_that_do_not_fit_are_refused() {
    let (_folder, path) = image(MIB);
    let mut driver = open(&path, UringUse::Auto);
    let invalid = Err(StoreError::INVALID);
    for operation in [
        StoreOp::Read { offset: 100, len: 512 },
        StoreOp::Read { offset: MIB, len: 512 },
        StoreOp::Read { offset: u64::MAX - 511, len: 512 },
        StoreOp::Discard { offset: 0, len: 0 },
        StoreOp::Discard { offset: 512, len: u64::MAX - 511 },
        StoreOp::WriteZeroes { offset: MIB - 512, len: 1024, may_unmap: true, durable: false },
        // Without its buffer.
        StoreOp::Write { offset: 0, len: 512, durable: false },
    ] {
        assert_eq!(driver.run(operation, None).map(|_| ()), invalid, "{operation:?}");
    }
}

#[test]
fn a_read_only_store_refuses_modifications_and_reads() {
    for uring in BOTH {
        let (_folder, path) = image(MIB);
        let store = FileStore::open(&path, FileOptions { read_only: true, ..options(uring) }).unwrap();
        let mut driver = Driver::new(store);
        let refused = Err(StoreError { errno: libc::EROFS });
        assert_eq!(driver.write(0, &[1; 512], false), refused);
        assert_eq!(driver.run(StoreOp::Discard { offset: 0, len: 512 }, None).map(|_| ()), refused);
        assert_eq!(driver.read(0, 512), Ok(vec![0; 512]));
        driver.flush().unwrap();
    }
}

#[test]
fn a_store_dropped_with_operations_in_flight_leaves_a_sound_process_and_frees_the_image() {
    for uring in BOTH {
        let (_folder, path) = image(16 * MIB);
        let mut driver = open(&path, uring);
        for block in 0..64 {
            let offset = block * 65536;
            driver.start(StoreOp::Write { offset, len: 65536, durable: true }, Some(&pattern(offset, 65536, 1)));
        }
        drop(driver);
        // Locked until the last write has landed, then free.
        let lock = ImageLock::Required { wait: store_support::HANG_AFTER };
        FileStore::open(&path, FileOptions { lock, ..options(uring) }).unwrap();
    }
}
