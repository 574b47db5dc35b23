//! What a file store asks of the disk below, seen from below: a file of nbdfuse, whose NBD server logs and can be paused.

#![allow(clippy::unwrap_used, reason = "a test that meets an error has failed")]

mod store_support;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use remoca_io::buffer::BufferPool;
use remoca_io::lock::ImageLock;
use remoca_store::{DataPath, FileOptions, FileStore, OpenErrorKind, StoreOp, UringUse};
use store_support::machine::{LoopDevice, Mount, is_root, run};
use store_support::servers::Server;
use store_support::{Driver, HANG_AFTER, pattern};
use tempfile::TempDir;

const BOTH: [UringUse; 2] = [UringUse::Auto, UringUse::Off];
const CHILD_IMAGE: &str = "REMOCA_TEST_CHILD_IMAGE";
const CHILD_URING: &str = "REMOCA_TEST_CHILD_URING";

/// A disk as a file, with a log of what reaches it.
struct ObservedDisk {
    image: PathBuf,
    log: PathBuf,
    control: PathBuf,
    // Dropped in this order: the file system, the program behind it, its server, the folder.
    _mount: Mount,
    _fuse: Reaped,
    _server: Server,
    _folder: TempDir,
}

struct Reaped(Child);

impl Drop for Reaped {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl ObservedDisk {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let (log, control, mounted) = (path("log"), path("control.sock"), path("mounted"));
        let (log_argument, control_argument) =
            (format!("logfile={}", log.display()), format!("pause-control={}", control.display()));
        let filters = ["--filter=log", "--filter=pause", "memory", "16M", &log_argument, &control_argument];
        let server = Server::nbdkit(&path("nbd.sock"), &filters);
        fs::create_dir(&mounted).unwrap();
        let uri = format!("nbd+unix:///?socket={}", server.socket.display());
        let fuse = Reaped(Command::new("nbdfuse").arg(&mounted).arg(uri).spawn().unwrap());
        let image = mounted.join("nbd");
        wait_until("the disk is mounted", || image.exists());
        let mount = Mount::existing(&mounted);
        Self { image, log, control, _mount: mount, _fuse: fuse, _server: server, _folder: folder }
    }

    /// How many requests with this text have reached the disk.
    fn count(&self, text: &str) -> usize {
        let log = fs::read_to_string(&self.log).unwrap();
        // Each request has a line for its begin, which ends in dots, and one for its end.
        log.lines().filter(|line| line.ends_with("...") && line.contains(text)).count()
    }

    /// 'p' holds back all requests, 'r' lets them through.
    fn control(&self, command: u8) {
        let mut stream = UnixStream::connect(&self.control).unwrap();
        stream.write_all(&[command]).unwrap();
        let mut answer = [0];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(answer[0], command.to_ascii_uppercase());
    }
}

fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let give_up_at = Instant::now() + HANG_AFTER;
    while !condition() {
        assert!(Instant::now() < give_up_at, "waited too long until {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn open(image: &Path, uring: UringUse) -> FileStore {
    let lock = ImageLock::Required { wait: HANG_AFTER };
    FileStore::open(image, FileOptions { uring, lock, ..FileOptions::default() }).unwrap()
}

#[test]
fn durable_operations_are_flushed_before_they_complete_and_others_are_not() {
    if !is_root() {
        return;
    }
    for uring in BOTH {
        let disk = ObservedDisk::new();
        let mut driver = Driver::new(open(&disk.image, uring));
        let data = pattern(0, 8192, 1);
        let zeroes = |durable| StoreOp::WriteZeroes { offset: 0, len: 4096, may_unmap: true, durable };

        driver.write(0, &data, false).unwrap();
        driver.run(zeroes(false), None).unwrap();
        assert_eq!(disk.count("Flush"), 0);
        assert!(disk.count("Write") > 0, "what stays in a page cache shows nothing");

        driver.flush().unwrap();
        assert_eq!(disk.count("Flush"), 1);
        driver.write(0, &data, true).unwrap();
        assert!(disk.count("Flush") >= 2);
        let before = disk.count("Flush");
        driver.run(zeroes(true), None).unwrap();
        assert!(disk.count("Flush") > before);
    }
}

#[test]
fn durable_writes_to_a_block_device_are_flushed_before_they_complete() {
    if !is_root() {
        return;
    }
    for uring in BOTH {
        let disk = ObservedDisk::new();
        let device = LoopDevice::attach(&disk.image, &["--direct-io=off"]);
        let mut driver = Driver::new(open(&device.0, uring));
        let before = disk.count("Flush");
        driver.write(0, &pattern(0, 8192, 1), false).unwrap();
        assert_eq!((disk.count("Write"), disk.count("Flush")), (1, before));
        driver.write(0, &pattern(0, 8192, 2), true).unwrap();
        assert!(disk.count("Flush") > before);
        let before = disk.count("Flush");
        driver.flush().unwrap();
        assert!(disk.count("Flush") > before);
    }
}

#[test]
fn durable_writes_to_a_file_on_ext4_are_flushed_before_they_complete() {
    if !is_root() {
        return;
    }
    for uring in BOTH {
        let disk = ObservedDisk::new();
        let device = LoopDevice::attach(&disk.image, &["--direct-io=off"]);
        run("mkfs.ext4", &["-q", device.0.to_str().unwrap()]);
        let mounted = tempfile::tempdir().unwrap();
        let mount = Mount::new(&[device.0.to_str().unwrap()], mounted.path());
        let image = mounted.path().join("disk.img");
        // Written once, so that no later write allocates and brings the journal's flushes.
        fs::write(&image, vec![1; 1 << 20]).unwrap();
        // Only this file system: all that a build has left in memory would take minutes, in which other tests wait for the disk.
        rustix::fs::syncfs(fs::File::open(&image).unwrap()).unwrap();
        let mut driver = Driver::new(open(&image, uring));
        for round in 0..20 {
            let before = disk.count("Flush");
            driver.write(4096 * round, &pattern(4096 * round, 4096, 2), true).unwrap();
            assert!(disk.count("Flush") > before, "round {round}");
        }
        drop((driver, mount));
    }
}

#[test]
fn memory_that_the_kernel_may_still_fill_is_not_used_again() {
    if !is_root() {
        return;
    }
    // A file of this file system is read by threads, a device by the ring.
    for is_device in [false, true] {
        let disk = ObservedDisk::new();
        let device = is_device.then(|| LoopDevice::attach(&disk.image, &["--direct-io=off"]));
        let mut store = open(device.as_ref().map_or(&disk.image, |device| &device.0), UringUse::Auto);
        let pool = BufferPool::new(4096);
        let before = disk.count("Read");
        disk.control(b'p');
        store.submit(1, StoreOp::Read { offset: 8 << 20, len: 4096 }, pool.take(4096));
        store.kick(Instant::now());
        wait_until("the read is on its way", || disk.count("Read") > before);
        drop(store);
        assert!(pool.take(4096).is_none(), "the only buffer was given out while a read into it is under way");
        disk.control(b'r');
    }
}

#[test]
fn a_call_that_hangs_keeps_no_other_from_the_disk() {
    if !is_root() {
        return;
    }
    for uring in BOTH {
        let disk = ObservedDisk::new();
        let mut driver = Driver::new(open(&disk.image, uring));
        let before = disk.count("Read");
        disk.control(b'p');
        let reads: Vec<_> = (0..2_usize)
            .map(|in_flight| {
                // The second finds the first in the kernel.
                let token = driver.start(StoreOp::Read { offset: (in_flight as u64) << 20, len: 4096 }, None);
                wait_until("the read is on its way", || disk.count("Read") > before + in_flight);
                token
            })
            .collect();
        disk.control(b'r');
        assert!(reads.into_iter().all(|token| driver.wait(token).result.is_ok()));
    }
}

#[test]
fn the_lock_of_a_killed_process_lasts_until_its_last_write_has_landed() {
    if !is_root() {
        return;
    }
    for uring in BOTH {
        let disk = ObservedDisk::new();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "--nocapture", "child_with_a_write_in_flight"])
            .env(CHILD_IMAGE, &disk.image)
            .env(CHILD_URING, if uring == UringUse::Auto { "1" } else { "0" })
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut wait_for = |word: &str| assert!(output.any(|line| line.unwrap().contains(word)), "the child ended");
        wait_for("opened");
        disk.control(b'p');
        child.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
        wait_for("submitted");
        wait_until("the write is on its way", || disk.count("Write") == 1);

        // Not waited for: it ends only with its write.
        child.kill().unwrap();
        let at_once = ImageLock::Required { wait: Duration::ZERO };
        let error =
            FileStore::open(&disk.image, FileOptions { lock: at_once, ..FileOptions::default() }).err().unwrap();
        assert_eq!(error.kind, OpenErrorKind::InUse, "{error}");

        disk.control(b'r');
        let mut driver = Driver::new(open(&disk.image, uring));
        assert_eq!(driver.read(0, 4096).unwrap(), pattern(0, 4096, 2), "the lock was free before the write had landed");
        child.wait().unwrap();
    }
}

#[test]
#[ignore = "run by the_lock_of_a_killed_process_lasts_until_its_last_write_has_landed"]
fn child_with_a_write_in_flight() {
    let Some(image) = std::env::var_os(CHILD_IMAGE) else { return };
    let uring = if std::env::var(CHILD_URING).unwrap() == "1" { UringUse::Auto } else { UringUse::Off };
    let mut driver = Driver::new(open(Path::new(&image), uring));
    println!("opened");
    std::io::stdin().read_exact(&mut [0]).unwrap();
    driver.start(StoreOp::Write { offset: 0, len: 4096, durable: false }, Some(&pattern(0, 4096, 2)));
    println!("submitted");
    loop {
        std::thread::park();
    }
}
