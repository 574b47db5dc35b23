//! A qcow2 image behind remoca, served by qemu-nbd as the unit of the package starts it.

use super::support::program::{Program, REMOCA, command, run_command};
use super::support::wait_until;
use remoca_frontend::testing::{Command, Options, TestGuest};
use std::os::unix::net::UnixStream;
use std::path::Path;

const UNIT: &str = include_str!("../../../../packaging/remoca-qcow2@.service");
const IMAGE_BYTES: usize = 16 << 20;

/// Starts the unit's program, with its socket `vm.qcow2.sock` in `folder`, which has the configuration.
fn serve(folder: &Path) -> Program {
    let start = UNIT.lines().find_map(|line| line.strip_prefix("ExecStart=/usr/bin/remoca ")).unwrap();
    let mut server = command(REMOCA);
    server.args(start.replace("%i", "vm").split(' ')).arg("--config").arg(folder);
    let socket = folder.join("vm.qcow2.sock");
    server.arg("--socket").arg(&socket);
    // A killed one leaves its socket, where nobody listens.
    let program = Program::start(&mut server, &folder.join("qemu-nbd.log"));
    wait_until("qemu-nbd listens", || UnixStream::connect(&socket).is_ok());
    program
}

fn qemu_img(arguments: &[&str], files: &[&Path]) {
    let output = run_command(command("qemu-img").args(arguments).args(files));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Writes `value` to each block of `blocks`.
fn write(guest: &mut TestGuest, blocks: std::ops::Range<u64>, value: u8) {
    for block in blocks {
        assert_eq!(guest.run(0, Command::Write { sector: block * 128, data: &[value; 1 << 16] }), 0);
    }
}

/// The server has a cache of the image's tables, which dies with it. That is told to the guest.
#[test]
fn a_qcow2_image_is_served_by_the_unit_and_whole_afterwards() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    qemu_img(&["create", "-q", "-f", "qcow2"], &[&path("image.qcow2"), Path::new("16M")]);
    let configuration = format!(
        "version = 1\nnbd-settle = 0\n[[disk]]\nname = 'root'\nformat = 'qcow2'\nimage = '{}'\nsocket = '{}'\n",
        path("image.qcow2").display(),
        path("socket").display()
    );
    std::fs::create_dir(path("vms")).unwrap();
    std::fs::write(path("vms/vm.toml"), configuration).unwrap();
    let mut server = serve(folder.path());
    let mut disk = command(REMOCA);
    disk.args(["disk", "--name", "vm", "--config"]).arg(folder.path()).arg("--control").arg(path("vm.ctl"));
    let mut program = Program::start(&mut disk, &path("disk.log"));
    wait_until("the VM process answers", || UnixStream::connect(path("vm.ctl")).is_ok());
    let mut guest = TestGuest::new(Options { queue_size: 16, data_bytes: 1 << 20, ..Options::default() });
    guest.connect(&path("socket")).unwrap();

    write(&mut guest, 0..100, 7);
    assert_eq!(guest.run(0, Command::Discard(&[(0, 1280, 0)])), 0);
    assert_eq!(guest.run(0, Command::WriteZeroes(&[(0, 1280, 1)])), 0);
    assert_eq!(guest.run(0, Command::Flush), 0);
    // Killed with nothing that is not flushed, it loses nothing. The guest's next read waits for it.
    server.kill();
    let read = guest.submit(0, Command::Read { sector: 99 * 128, length: 1 << 16 });
    guest.queues[0].kick();
    // With the image that the process began with, whatever becomes of the file.
    let good = std::fs::read_to_string(path("vms/vm.toml")).unwrap();
    std::fs::write(path("vms/vm.toml"), good.replace("image.qcow2", "other.qcow2")).unwrap();
    let upgrade = run_command(command(REMOCA).arg("upgrade").arg(path("vm.ctl")));
    assert!(String::from_utf8_lossy(&upgrade.stderr).contains("other.qcow2 in place of"), "{upgrade:?}");
    std::fs::write(path("vms/vm.toml"), "version = 1\n[[disk\n").unwrap();
    let mut server = serve(folder.path());
    std::fs::write(path("vms/vm.toml"), good).unwrap();
    assert_eq!((guest.wait(read), guest.data(read, 1 << 16)), (0, vec![7; 1 << 16]));
    assert_eq!(guest.run(0, Command::Flush), 0);
    write(&mut guest, 100..101, 8);
    server.kill();
    let mut server = serve(folder.path());
    assert_eq!(guest.run(0, Command::Flush), 1, "a write that was not flushed may be lost: {}", program.log());
    let clear = run_command(command(REMOCA).arg("set").arg(path("vm.ctl")).args(["--clear-failed-flush", "root"]));
    assert!(clear.status.success());
    write(&mut guest, 100..101, 9);
    assert_eq!(guest.run(0, Command::Flush), 0);
    guest.disconnect();
    program.terminate();
    server.terminate();

    qemu_img(&["check", "-q"], &[&path("image.qcow2")]);
    qemu_img(&["convert", "-f", "qcow2", "-O", "raw"], &[&path("image.qcow2"), &path("raw")]);
    let mut expected = vec![0; IMAGE_BYTES];
    expected[10 << 16..100 << 16].fill(7);
    expected[100 << 16..101 << 16].fill(9);
    assert!(std::fs::read(path("raw")).unwrap() == expected);
}
