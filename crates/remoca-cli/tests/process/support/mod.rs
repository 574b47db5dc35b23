//! Shared parts of the tests: programs, a machine with a model of its disks, and a memory server that lies.

pub mod fake_qemu;
pub mod fake_server;
pub mod fake_vm;
pub mod hanging_fs;
pub mod machine;
pub mod model;
pub mod page;
pub mod program;
pub mod random;
pub mod syscalls;

use std::time::{Duration, Instant};

/// Long enough for any machine, however busy. A test that waits this long has failed.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Returns a folder that is not in /tmp, which may be a file system that shows no changes.
pub fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Waits until `done` returns true. Fails the test after [`PATIENCE`].
#[track_caller]
pub fn wait_until(what: &str, done: impl FnMut() -> bool) {
    wait_at_most(PATIENCE, what, done);
}

#[track_caller]
pub fn wait_at_most(patience: Duration, what: &str, mut done: impl FnMut() -> bool) {
    let give_up_at = Instant::now() + patience;
    while !done() {
        assert!(Instant::now() < give_up_at, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Expects that `remoca disk rescan` said the size of a disk, and `more`. The process also looks by itself, and may have been first.
#[track_caller]
pub fn expect_rescanned(said: &str, disk: &str, bytes: usize, before: usize, more: &str) {
    let told = format!("{disk}: {bytes} bytes now, {before} before{more}");
    let known = format!("{disk}: {bytes} bytes, as before{more}");
    assert!(said.lines().any(|line| line == told || line == known), "neither `{told}` nor `{known}`: {said}");
}
