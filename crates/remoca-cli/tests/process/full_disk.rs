//! Thin images whose file system has no room left.

use super::nbd;
use super::support::program::{Program, REMOCA, command, status};
use super::support::wait_until;
use remoca_frontend::testing::{Command, Options, TestGuest};
use remoca_io::left_out::leave_out;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// A file system in memory of some size.
pub struct Small(pub PathBuf);

impl Small {
    /// Returns `None` if this user may not mount.
    pub fn mount(folder: &Path, size: &str) -> Option<Self> {
        std::fs::create_dir(folder).unwrap();
        let options = format!("size={size}");
        let mounted = command("mount").args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(folder).output().unwrap();
        mounted.status.success().then(|| Self(folder.to_owned()))
    }

    pub fn grow(&self, size: &str) {
        let options = format!("remount,size={size}");
        assert!(command("mount").args(["-o", &options]).arg(&self.0).status().unwrap().success());
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = command("umount").arg("--lazy").arg(&self.0).status();
    }
}

const LENGTH: usize = 4 << 20;

#[test]
fn a_guest_gets_an_error_and_goes_on_when_there_is_room() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let Some(small) = Small::mount(&path("small"), "3M") else {
        return leave_out("this user may not mount a file system in memory");
    };
    for image in ["root", "data"] {
        let image = std::fs::File::create(small.0.join(image)).unwrap();
        image.set_len(16 << 20).unwrap();
    }
    let mut disk = command(REMOCA);
    let image = |name: &str| format!("image={},name={name}", small.0.join(name).display());
    disk.arg("disk").arg("--disk").arg(format!("{},socket={}", image("root"), path("socket").display()));
    disk.arg("--disk").arg(image("data")).arg("--nbd").arg(format!("unix:{}", path("nbd").display()));
    disk.arg("--control").arg(path("control"));
    let mut program = Program::start(&mut disk, &path("disk.log"));
    wait_until("the VM process answers", || UnixStream::connect(path("control")).is_ok());
    let mut guest = TestGuest::new(Options { queue_size: 16, data_bytes: 10 << 20, ..Options::default() });
    guest.connect(&path("socket")).unwrap();
    let mut client = nbd::attach(&path("nbd"), "data");
    let mut write_over_nbd = |cookie| {
        let request = nbd::request(1, cookie, 1 << 20, LENGTH as u32);
        client.write_all(&[&request[..], &vec![2; LENGTH]].concat()).unwrap();
        let mut answer = [0; 16];
        client.read_exact(&mut answer).unwrap();
        u32::from_be_bytes(answer[4..8].try_into().unwrap())
    };

    assert_eq!(guest.run(0, Command::Write { sector: 0, data: &[1; 4096] }), 0);
    assert_eq!(guest.run(0, Command::Write { sector: 2048, data: &[2; LENGTH] }), 1, "an I/O error");
    assert_eq!(write_over_nbd(1), 28, "ENOSPC, at which QEMU pauses its guest");
    // Nothing that was acknowledged is in doubt: other requests work, and a flush.
    let read = guest.submit(0, Command::Read { sector: 0, length: 4096 });
    guest.queues[0].kick();
    assert_eq!((guest.wait(read), guest.data(read, 4096)), (0, vec![1; 4096]));
    assert_eq!(guest.run(0, Command::Flush), 0);
    assert!(status(&path("control")).disks.iter().all(|disk| disk.failed_flush.is_none()));
    let log = program.log();
    for name in ["root", "data"] {
        let begin = format!("{name}: {}: writing", small.0.join(name).display());
        let line = log.lines().find(|line| line.contains(&begin)).unwrap_or_else(|| panic!("nothing of {name}: {log}"));
        assert!(line.contains("failed: No space left") && line.contains("Make room"), "{line}");
        // The client's write is served in parts of 1 MiB. They are written at once, and any of them may fail first.
        assert!(name == "data" || line.contains("offset 1048576"), "{line}");
    }
    small.grow("32M");
    assert_eq!(guest.run(0, Command::Write { sector: 2048, data: &[2; LENGTH] }), 0);
    assert_eq!(write_over_nbd(2), 0);
    assert_eq!(guest.run(0, Command::Flush), 0);
    drop(client);
    guest.disconnect();
    program.terminate();
    for name in ["root", "data"] {
        assert!(std::fs::read(small.0.join(name)).unwrap()[1 << 20..(1 << 20) + LENGTH].iter().all(|byte| *byte == 2));
    }
}
