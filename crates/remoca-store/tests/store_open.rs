//! Opening images: every refusal with its kind and words, and the lock against remoca and against QEMU.

#![allow(clippy::unwrap_used, reason = "a test that meets an error has failed")]

mod store_support;

use std::fs::{self, File, Permissions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use remoca_io::lock::ImageLock;
use remoca_store::{DataPath, FileOptions, FileStore, HandOver, OpenError, OpenErrorKind, format};
use store_support::machine::{LoopDevice, Mount, is_root, run};
use store_support::servers::Server;
use store_support::{Driver, pattern};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
const AT_ONCE: ImageLock = ImageLock::Required { wait: Duration::ZERO };

/// One test at a time: a program that another one starts has a copy of each descriptor, lock included, from its fork to its
/// exec.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn folder() -> TempDir {
    tempfile::tempdir().unwrap()
}

fn image(folder: &TempDir, name: &str, size: u64) -> PathBuf {
    let path = folder.path().join(name);
    File::create(&path).unwrap().set_len(size).unwrap();
    path
}

fn open(path: &Path, read_only: bool) -> Result<FileStore, OpenError> {
    FileStore::open(path, FileOptions { read_only, lock: AT_ONCE, ..FileOptions::default() })
}

fn refusal(path: &Path, read_only: bool) -> OpenError {
    open(path, read_only).err().unwrap_or_else(|| panic!("{} was opened", path.display()))
}

#[test]
fn what_is_no_image_is_refused_with_the_reason_and_the_remedy() {
    let _alone = alone();
    let folder = folder();
    let protected = image(&folder, "protected", MIB);
    fs::set_permissions(&protected, Permissions::from_mode(0o444)).unwrap();
    let fifo = folder.path().join("fifo");
    run("mkfifo", &[fifo.to_str().unwrap()]);
    for (path, read_only, kind, words) in [
        (folder.path().join("missing"), false, OpenErrorKind::Missing, "truncate -s 10G"),
        ("http://x/".into(), false, OpenErrorKind::Missing, "known are nbd://host:port/export and nbd+unix://"),
        (image(&folder, "file", 512).join("below"), false, OpenErrorKind::Missing, "does not exist"),
        (folder.path().to_owned(), false, OpenErrorKind::NotAnImage, "is a directory"),
        ("/dev/null".into(), true, OpenErrorKind::NotAnImage, "neither a regular file nor a block device"),
        (fifo.clone(), false, OpenErrorKind::NotAnImage, "neither a regular file nor a block device"),
        (image(&folder, "empty", 0), false, OpenErrorKind::Empty, "give it a size"),
        (image(&folder, "odd", 1000), true, OpenErrorKind::OddSize, "truncate -s %512"),
        (protected.clone(), false, OpenErrorKind::ReadOnly, "Use it read-only, or make it writable"),
    ] {
        let error = refusal(&path, read_only);
        assert_eq!(error.kind, kind, "{error}");
        let message = error.to_string();
        assert!(message.contains(words) && message.contains(path.to_str().unwrap()), "{message}");
    }
    let served_before = FileOptions { lock: AT_ONCE, any_size: true, ..FileOptions::default() };
    let error = FileStore::open(&folder.path().join("missing"), served_before).err().unwrap();
    assert_eq!(error.kind, OpenErrorKind::Missing, "{error}");
    let message = error.to_string();
    assert!(message.contains("is its storage mounted?") && !message.contains("truncate"), "{message}");
    assert!(open(&protected, true).unwrap().geometry().read_only);
    assert!(format::of(&fifo).is_err(), "opening it would wait for its other end");
}

#[test]
fn opening_an_image_changes_none_of_its_bytes() {
    let _alone = alone();
    // A file system of which is not known whether it punches holes.
    let file = rustix::fs::memfd_create("image", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let content = vec![0xa5; 3 * 512 + 100];
    fs::write(&path, &content).unwrap();
    let options = FileOptions { lock: AT_ONCE, any_size: true, ..FileOptions::default() };
    let geometry = FileStore::open(&path, options).unwrap().geometry();
    assert!(geometry.can_discard && geometry.size == 3 * 512, "{geometry:?}");
    assert!(fs::read(&path).unwrap() == content);
}

#[test]
fn a_program_goes_on_with_an_image_that_was_protected_meanwhile() {
    let _alone = alone();
    let folder = folder();
    let path = image(&folder, "disk.img", MIB);
    let former = open(&path, false).unwrap();
    let passed = former.hand_over().unwrap().0.try_clone_to_owned().unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o444)).unwrap();
    let options = FileOptions { lock: AT_ONCE, ..FileOptions::default() };
    let mut driver = Driver::new(FileStore::adopt(passed, &path, options, None).unwrap());
    driver.write(0, &pattern(0, 4096, 1), true).unwrap();
}

/// Runs `action` on a thread without root's rights.
fn as_nobody<T: Send>(action: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let nobody = rustix::process::Uid::from_raw(65534);
            rustix::thread::set_thread_uid(nobody).unwrap();
            action()
        });
        thread.join().unwrap()
    })
}

#[test]
fn missing_permissions_are_told_apart_from_a_read_only_image() {
    let _alone = alone();
    if !is_root() {
        return;
    }
    let folder = folder();
    fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
    let (secret, readable) = (image(&folder, "secret", MIB), image(&folder, "readable", MIB));
    fs::set_permissions(&secret, Permissions::from_mode(0o600)).unwrap();
    fs::set_permissions(&readable, Permissions::from_mode(0o644)).unwrap();
    let error = as_nobody(|| refusal(&secret, false));
    assert_eq!(error.kind, OpenErrorKind::PermissionDenied, "{error}");
    let error = as_nobody(|| refusal(&readable, false));
    assert_eq!(error.kind, OpenErrorKind::ReadOnly, "{error}");
    assert!(as_nobody(|| open(&readable, true)).is_ok());
}

#[test]
fn an_image_in_use_is_refused_and_readers_share() {
    let _alone = alone();
    let folder = folder();
    let path = image(&folder, "disk.img", MIB);
    let writer = open(&path, false).unwrap();
    for read_only in [false, true] {
        let error = refusal(&path, read_only);
        assert_eq!(error.kind, OpenErrorKind::InUse, "{error}");
        assert!(error.to_string().contains("in use by another process"), "{error}");
    }
    // A refused attempt leaves no lock behind.
    drop(writer);
    let readers = [open(&path, true).unwrap(), open(&path, true).unwrap()];
    assert_eq!(refusal(&path, false).kind, OpenErrorKind::InUse);
    drop(readers);
    open(&path, false).unwrap();
}

#[test]
fn a_successor_waits_for_its_predecessor() {
    let _alone = alone();
    let folder = folder();
    let path = image(&folder, "disk.img", MIB);
    let predecessor = open(&path, false).unwrap();
    let successor = {
        let path = path.clone();
        let lock = ImageLock::Required { wait: Duration::from_secs(60) };
        std::thread::spawn(move || FileStore::open(&path, FileOptions { lock, ..FileOptions::default() }).map(drop))
    };
    // Another attempt fails meanwhile, so the successor has not got it either.
    assert_eq!(refusal(&path, false).kind, OpenErrorKind::InUse);
    drop(predecessor);
    successor.join().unwrap().unwrap();
}

/// What another program does that tries to get the image, before it sees that it cannot.
fn trying(path: &Path) -> File {
    let file = File::options().read(true).write(true).open(path).unwrap();
    for byte in [100, 101, 201, 203] {
        // SAFETY: flock is a plain C structure, for which all zero is a valid value.
        let mut request: libc::flock = unsafe { std::mem::zeroed() };
        (request.l_type, request.l_start, request.l_len) = (i16::try_from(libc::F_RDLCK).unwrap(), byte, 1);
        // SAFETY: F_OFD_SETLK reads the structure, which outlives the call; the descriptor is open.
        assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw mut request) }, 0);
    }
    file
}

#[test]
fn who_only_tries_takes_no_image_from_a_program_that_goes_on_with_it() {
    let _alone = alone();
    let folder = folder();
    let path = image(&folder, "disk.img", MIB);
    let former = open(&path, false).unwrap();
    let passed = former.hand_over().unwrap().0.try_clone_to_owned().unwrap();
    drop(former);
    let tries = trying(&path);
    let thread = {
        let (path, lock) = (path.clone(), ImageLock::Required { wait: Duration::from_secs(60) });
        std::thread::spawn(move || {
            FileStore::adopt(passed, &path, FileOptions { lock, ..FileOptions::default() }, None)
        })
    };
    assert_eq!(refusal(&path, false).kind, OpenErrorKind::InUse, "it is locked meanwhile");
    std::thread::sleep(Duration::from_millis(50));
    drop(tries);
    let _successor = thread.join().unwrap().unwrap();
    assert_eq!(refusal(&path, false).kind, OpenErrorKind::InUse);
}

#[test]
fn qemu_and_remoca_respect_each_others_locks() {
    let _alone = alone();
    let folder = folder();
    let path = image(&folder, "disk.img", MIB);
    let text = path.to_str().unwrap();
    let qemu_io = |options: &[&str], command: &str| {
        let output = Command::new("qemu-io").args(options).args(["-f", "raw", "-c", command, text]).output().unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let ours = open(&path, false).unwrap();
    let (succeeded, message) = qemu_io(&[], "write 0 512");
    assert!(!succeeded && message.contains("lock"), "{message}");
    // The same for a whole guest.
    let drive = format!("file={text},format=raw,if=virtio");
    let guest = ["-S", "-accel", "tcg", "-machine", "q35", "-display", "none", "-drive", &drive];
    let guest = Command::new("qemu-system-x86_64").args(guest).output().unwrap();
    let message = String::from_utf8_lossy(&guest.stderr);
    assert!(!guest.status.success() && message.contains("write\" lock"), "{message}");
    drop(ours);

    let ours = open(&path, true).unwrap();
    let (succeeded, message) = qemu_io(&[], "write 0 512");
    assert!(!succeeded && message.contains("lock"), "{message}");
    let (succeeded, message) = qemu_io(&["-r"], "read 0 512");
    assert!(succeeded, "readers share: {message}");
    drop(ours);

    let theirs = Server::qemu_nbd(&folder.path().join("nbd.sock"), &[text]);
    for read_only in [false, true] {
        assert_eq!(refusal(&path, read_only).kind, OpenErrorKind::InUse);
    }
    theirs.kill();
    open(&path, false).unwrap();
}

#[test]
fn without_the_lock_a_second_user_is_let_in() {
    let _alone = alone();
    let folder = folder();
    let path = image(&folder, "disk.img", MIB);
    let _first = open(&path, false).unwrap();
    FileStore::open(&path, FileOptions { lock: ImageLock::Off, ..FileOptions::default() }).unwrap();
}

#[test]
fn block_devices_in_use_or_write_protected_are_refused() {
    let _alone = alone();
    if !is_root() {
        return;
    }
    let folder = folder();
    let path = image(&folder, "disk.img", 16 * MIB);
    let device = LoopDevice::attach(&path, &[]);
    let first = open(&device.0, false).unwrap();
    assert_eq!(refusal(&device.0, false).kind, OpenErrorKind::InUse);
    drop(first);

    // Its helper thread has it for another moment.
    let is_free = || File::options().write(true).custom_flags(libc::O_EXCL).open(&device.0).is_ok();
    while !is_free() {
        std::thread::sleep(Duration::from_millis(1));
    }
    run("mkfs.ext4", &["-q", device.0.to_str().unwrap()]);
    let mount_point = folder.path().join("mounted");
    fs::create_dir(&mount_point).unwrap();
    let mount = Mount::new(&[device.0.to_str().unwrap()], &mount_point);
    let error = refusal(&device.0, false);
    assert_eq!(error.kind, OpenErrorKind::InUse, "{error}");
    assert!(error.to_string().contains("a mount"), "{error}");
    drop(mount);
    drop(device);

    let device = LoopDevice::attach(&path, &["--read-only"]);
    assert_eq!(refusal(&device.0, false).kind, OpenErrorKind::ReadOnly);
    open(&device.0, true).unwrap();
}

#[test]
fn file_systems_without_direct_io_are_used_through_the_page_cache() {
    let _alone = alone();
    if !is_root() {
        return;
    }
    let folder = folder();
    let mount_point = folder.path().join("ram");
    fs::create_dir(&mount_point).unwrap();
    let _mount = Mount::new(&["-t", "ramfs", "ramfs"], &mount_point);
    let path = mount_point.join("disk.img");
    File::create(&path).unwrap().set_len(16 * MIB).unwrap();
    let store = open(&path, false).unwrap();
    assert!(!store.is_direct());
    assert_eq!(store.geometry().logical_sector, 512);
    assert!(!store.geometry().can_discard);
    let mut driver = Driver::new(store);
    let data = pattern(512, 8192, 1);
    driver.write(512, &data, true).unwrap();
    driver.flush().unwrap();
    assert_eq!(driver.read(512, 8192).unwrap(), data);
    // Neither holes nor zeroed ranges: zeroes are written.
    let zeroes = remoca_store::StoreOp::WriteZeroes { offset: 0, len: MIB, may_unmap: true, durable: true };
    driver.run(zeroes, None).unwrap();
    assert_eq!(driver.read(0, 1 << 20).unwrap(), vec![0; 1 << 20]);
}

#[test]
fn an_image_whose_size_does_not_fit_direct_io_is_used_through_the_page_cache() {
    let _alone = alone();
    if !is_root() {
        return;
    }
    let folder = folder();
    let device = LoopDevice::attach(&image(&folder, "fs.img", 64 * MIB), &["-b", "4096"]);
    run("mkfs.ext4", &["-q", device.0.to_str().unwrap()]);
    let mount_point = folder.path().join("mounted");
    fs::create_dir(&mount_point).unwrap();
    let _mount = Mount::new(&[device.0.to_str().unwrap()], &mount_point);
    let create = |name: &str, size| {
        let path = mount_point.join(name);
        File::create(&path).unwrap().set_len(size).unwrap();
        open(&path, false).unwrap()
    };
    let fitting = create("fitting", MIB);
    assert!(fitting.is_direct());
    assert_eq!(fitting.geometry().logical_sector, 4096);
    // Grown under a guest, to whom an upgrade changes nothing.
    let passed = fitting.hand_over().unwrap().0.try_clone_to_owned().unwrap();
    drop(fitting);
    let path = mount_point.join("fitting");
    File::options().write(true).open(&path).unwrap().set_len(2 * MIB + 512).unwrap();
    let options = FileOptions { lock: AT_ONCE, ..FileOptions::default() };
    let grown = FileStore::adopt(passed, &path, options, None).unwrap();
    assert!(grown.is_direct());
    assert_eq!((grown.geometry().logical_sector, grown.geometry().size), (4096, 2 * MIB));
    drop(grown);
    let odd = create("odd", MIB + 512);
    assert!(!odd.is_direct());
    assert_eq!(odd.geometry().logical_sector, 512);
    let mut driver = Driver::new(odd);
    driver.write(MIB, &[7; 512], true).unwrap();
    assert_eq!(driver.read(MIB - 512, 1024).unwrap()[512..], [7; 512]);
}
