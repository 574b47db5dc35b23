//! Block devices and mounts for tests; these need root.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Whether a test that needs loop devices and mounts can run; it is left out otherwise.
pub fn is_root() -> bool {
    remoca_io::left_out::is_root("needs root for loop devices and mounts")
}

/// Runs a program that has to succeed; its output.
pub fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// A loop device, detached when dropped.
pub struct LoopDevice(pub PathBuf);

impl LoopDevice {
    pub fn attach(image: &Path, options: &[&str]) -> Self {
        let arguments = [&["--find", "--show"], options, &[image.to_str().unwrap()]].concat();
        Self(run("losetup", &arguments).trim().into())
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}

/// A mounted file system, unmounted when dropped.
pub struct Mount(PathBuf);

impl Mount {
    /// `mount arguments FOLDER`
    pub fn new(arguments: &[&str], folder: &Path) -> Self {
        run("mount", &[arguments, &[folder.to_str().unwrap()]].concat());
        Self::existing(folder)
    }

    /// One that somebody else has mounted.
    pub fn existing(folder: &Path) -> Self {
        Self(folder.to_owned())
    }
}

impl Drop for Mount {
    /// The kernel closes the files of a ring only some time after the ring.
    fn drop(&mut self) {
        let umount = || Command::new("umount").arg(&self.0).output();
        let give_up_at = Instant::now() + super::HANG_AFTER;
        while umount().is_ok_and(|output| !output.status.success()) {
            if Instant::now() >= give_up_at {
                // What a failed test left behind.
                let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
