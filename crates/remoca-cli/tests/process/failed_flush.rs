//! A flush or durable write that failed stays failed for the guest, even if the process that it failed in is
//! replaced.

use super::support::program::{Program, REMOCA, command, expect_refusal, run, run_command, status};
use super::support::wait_until;
use remoca_frontend::testing::{Command, Options, TestGuest};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Output;
use std::time::{Duration, Instant};

/// How long a process waits for its disks when it is told to end.
const STOP_TIME_MAX: Duration = Duration::from_secs(1);

/// Starts an NBD server whose writes fail while a file `fail` exists.
fn failing_server(folder: &Path) -> Program {
    let mut nbdkit = command("nbdkit");
    nbdkit.arg("-f").arg("-U").arg(folder.join("image")).args(["--filter=error", "memory", "16M"]);
    nbdkit
        .args(["error-pwrite=EIO", "error-pwrite-rate=100%"])
        .arg(format!("error-pwrite-file={}", folder.join("fail").display()));
    let program = Program::start(&mut nbdkit, &folder.join("nbdkit.log"));
    wait_until("nbdkit listens", || UnixStream::connect(folder.join("image")).is_ok());
    program
}

fn start(mut disk: std::process::Command, folder: &Path) -> Program {
    disk.args(["--name", "vm", "--nbd-settle", "0"]).arg("--control").arg(folder.join("control"));
    let mut program = Program::start(&mut disk, &folder.join("disk.log"));
    wait_until("the VM process answers", || {
        assert!(program.is_running(), "{}", program.log());
        UnixStream::connect(folder.join("control")).is_ok()
    });
    program
}

/// Starts the process `vm`, with `more` disks beside the one that fails.
fn disk(folder: &Path, more: &[&str]) -> Program {
    let mut disk = command(REMOCA);
    disk.args(["disk", "--disk"]);
    disk.arg(format!("name=root,image=nbd+unix:///?socket={}", folder.join("image").display()));
    for image in more {
        std::fs::write(folder.join(image), vec![0; 1 << 20]).unwrap();
        disk.arg("--disk").arg(format!("name={image},image={}", folder.join(image).display()));
    }
    disk.arg("--nbd").arg(format!("unix:{}", folder.join("nbd").display()));
    start(disk, folder)
}

/// Returns the outcomes of a flush, a durable write and a plain write to an export.
fn outcomes(folder: &Path, export: &str) -> String {
    let script = format!(
        "
import nbd
h = nbd.NBD()
h.connect_uri('nbd+unix:///{export}?socket={socket}')
def outcome(f):
    try:
        f()
    except nbd.Error as e:
        return e.errno
    return 'ok'
durable = lambda: h.pwrite(bytes(4096), 0, nbd.CMD_FLAG_FUA)
print(outcome(durable), outcome(h.flush), outcome(lambda: h.pwrite(bytes(4096), 0)))
",
        socket = folder.join("nbd").display()
    );
    let output = run_command(command("nbdsh").args(["-c", &script]).env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

const FAILED: &str = "EIO EIO ok";
const SOUND: &str = "ok ok ok";

#[test]
fn a_failed_durable_write_is_remembered_until_the_operator_says_otherwise() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut server = failing_server(folder);
    let mut first = disk(folder, &[]);
    assert_eq!(outcomes(folder, "root"), SOUND);
    std::fs::write(folder.join("fail"), "").unwrap();
    assert_eq!(outcomes(folder, "root"), "EIO EIO EIO");
    std::fs::remove_file(folder.join("fail")).unwrap();
    assert_eq!(outcomes(folder, "root"), FAILED);
    first.kill();

    let mut again = disk(folder, &[]);
    assert_eq!(outcomes(folder, "root"), FAILED, "after a restart");
    again.kill();

    let mut other = disk(folder, &["data"]);
    assert!(other.log().contains("remoca set vm --clear-failed-flush root"), "{}", other.log());
    assert_eq!(outcomes(folder, "root"), FAILED, "with an index of its own");
    assert_eq!(outcomes(folder, "data"), SOUND, "the other disk is another one");
    let failed = || {
        let disks = status(&folder.join("control")).disks;
        disks.into_iter().map(|disk| disk.failed_flush.is_some()).collect::<Vec<_>>()
    };
    assert_eq!(failed(), [true, false]);
    let control = folder.join("control").display().to_string();
    let shown = run(&["status", "-v", &control]).stdout;
    assert!(String::from_utf8_lossy(&shown).contains("a flush failed (Input/output error"));

    // Uses the documented way to clear a failed flush.
    let clear = |disk: &str| run(&["set", &control, "--clear-failed-flush", disk]);
    expect_refusal(&clear("rot"), 1, &["it has no disk rot, but root, data"]);
    let said = |output: Output| String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(said(clear("data")).contains("no flush of data had failed"));
    assert!(said(clear("root")).contains("flushes of root succeed again"));
    assert_eq!(failed(), [false, false]);
    assert_eq!(outcomes(folder, "root"), SOUND);
    other.kill();
    let mut last = disk(folder, &["data"]);
    assert_eq!(outcomes(folder, "root"), SOUND, "it is not remembered");
    last.terminate();
    server.terminate();
}

#[test]
fn a_disk_whose_flush_failed_is_not_handed_over() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut server = server_that_fails_flushes(folder);
    std::fs::write(folder.join("fail"), "").unwrap();
    let mut program = vhost_disk(folder, &[]);
    let control = folder.join("control").display().to_string();
    let to = format!("unix:{}", folder.join("nobody").display());
    let key = super::migration::key(folder).display().to_string();
    expect_refusal(&run(&["migrate", &control, "--to", &to, "--key", &key]), 1, &["nobody"]);

    let mut guest = guest(folder);
    assert_ne!(guest.run(0, Command::Flush), 0);
    expect_refusal(
        &run(&["migrate", &control, "--to", &to, "--key", &key]),
        1,
        &["a flush of this disk has failed", "mend the image"],
    );
    guest.disconnect();
    program.terminate();
    server.terminate();
}

/// Starts an NBD server whose flushes fail while a file `fail` exists. It makes a file `flushing` before it answers.
fn server_that_fails_flushes(folder: &Path) -> Program {
    let mut nbdkit = command("nbdkit");
    nbdkit.arg("-f").arg("-U").arg(folder.join("image")).args(["eval", "get_size=echo 1048576", "can_flush=exit 0"]);
    nbdkit.args(["can_write=exit 0", "pwrite=cat >/dev/null"]);
    nbdkit.arg("pread=dd if=/dev/zero count=$3 iflag=count_bytes status=none");
    let folder_shown = folder.display();
    let flush = format!(
        "touch {folder_shown}/flushing; sleep 0.02; ! test -e {folder_shown}/fail || {{ echo EIO lost >&2; exit 1; }}"
    );
    nbdkit.arg(format!("flush={flush}"));
    let program = Program::start(&mut nbdkit, &folder.join("nbdkit.log"));
    wait_until("nbdkit listens", || UnixStream::connect(folder.join("image")).is_ok());
    program
}

fn vhost_disk(folder: &Path, more: &[&str]) -> Program {
    vhost_disk_at(folder, folder, more)
}

/// Starts a VM process with its sockets in the folder `host`.
fn vhost_disk_at(folder: &Path, host: &Path, more: &[&str]) -> Program {
    let mut disk = command(REMOCA);
    disk.args(["disk", "--image"]).arg(format!("nbd+unix:///?socket={}", folder.join("image").display()));
    disk.arg("--socket").arg(host.join("socket")).args(more);
    start(disk, host)
}

fn guest(folder: &Path) -> TestGuest {
    let mut guest = TestGuest::new(Options { queue_size: 16, data_bytes: 4096, ..Options::default() });
    guest.connect(&folder.join("socket")).unwrap();
    guest
}

#[test]
fn a_flush_that_fails_for_a_process_that_ends_has_failed_for_the_next() {
    // An answer that arrives after the process has stopped waiting is not seen, because the server may happen to be
    // slow.
    assert!((0..10).any(|_| a_failed_flush_is_kept()), "it never hears of the failure");
}

/// Returns whether the process learned of the failure before it ended.
fn a_failed_flush_is_kept() -> bool {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut server = server_that_fails_flushes(folder);
    let mut first = vhost_disk(folder, &[]);
    let mut guest = guest(folder);
    std::fs::write(folder.join("fail"), "").unwrap();
    guest.submit(0, Command::Flush);
    guest.queues[0].kick();
    wait_until("the server flushes", || folder.join("flushing").exists());
    let told_at = Instant::now();
    first.terminate();
    let in_time = told_at.elapsed() < STOP_TIME_MAX;
    std::fs::remove_file(folder.join("fail")).unwrap();
    let mut next = vhost_disk(folder, &[]);
    guest.disconnect();
    guest.connect(&folder.join("socket")).unwrap();
    let status = guest.run(0, Command::Flush);
    assert!(status != 0 || !in_time, "{}", next.log());
    guest.disconnect();
    next.terminate();
    server.terminate();
    in_time
}

#[test]
fn a_process_that_waits_for_its_disks_remembers_what_failed_when_it_had_them() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut server = server_that_fails_flushes(folder);
    let incoming = format!("unix:{}", folder.join("in").display());
    let control = folder.join("control").display().to_string();
    let key = super::migration::key(folder).display().to_string();
    let start = || {
        let process = vhost_disk(folder, &["--incoming", &incoming, "--incoming-key", &key]);
        let said = run(&["migrate", &control, "--take-back"]);
        assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
        process
    };
    let mut first = start();
    let mut guest = guest(folder);
    assert_eq!(guest.run(0, Command::Flush), 0);
    std::fs::write(folder.join("fail"), "").unwrap();
    assert_ne!(guest.run(0, Command::Flush), 0);
    std::fs::remove_file(folder.join("fail")).unwrap();
    first.kill();
    let mut next = start();
    guest.disconnect();
    guest.connect(&folder.join("socket")).unwrap();
    assert_ne!(guest.run(0, Command::Flush), 0, "{}", next.log());
    guest.disconnect();
    next.terminate();
    server.terminate();
}

/// The offered disks are sound. Then a flush fails before the disks move: one of the guest's, or the hand-over's own.
#[test]
fn a_flush_that_fails_before_the_disks_go_has_failed_where_they_come() {
    for (of_the_guest, dies) in [(true, false), (false, false), (true, true)] {
        let folder = tempfile::tempdir().unwrap();
        let (folder, there) = (folder.path(), folder.path().join("there"));
        std::fs::create_dir(&there).unwrap();
        let mut server = server_that_fails_flushes(folder);
        let mut source = vhost_disk(folder, &[]);
        let to = format!("unix:{}", there.join("in").display());
        let key = super::migration::key(folder).display().to_string();
        let start_target = || vhost_disk_at(folder, &there, &["--incoming", &to, "--incoming-key", &key]);
        let mut target = start_target();
        let mut guest = guest(folder);
        let control = folder.join("control").display().to_string();
        let said = run(&["migrate", &control, "--to", &to, "--key", &key]);
        assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));

        std::fs::write(folder.join("fail"), "").unwrap();
        if of_the_guest {
            assert_ne!(guest.run(0, Command::Flush), 0);
            std::fs::remove_file(folder.join("fail")).unwrap();
        }
        guest.stop_queue(0).unwrap();
        wait_until("the disks are there", || super::migration::has_disks(&status(&there.join("control"))));
        let _ = std::fs::remove_file(folder.join("fail"));
        let failed = |control: &Path| status(control).disks[0].failed_flush.is_some();
        assert!(failed(&there.join("control")), "{}", target.log());
        if dies {
            target.kill();
            target = start_target();
            let said = run(&["migrate", there.join("control").to_str().unwrap(), "--take-back"]);
            assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
        }
        guest.move_away();
        guest.connect(&there.join("socket")).unwrap();
        assert_ne!(guest.run(0, Command::Flush), 0, "{}", target.log());
        // The server is sound. But a process whose predecessor was killed does not know whether the guest sends
        // flushes, so it makes each write durable.
        let written = guest.run(0, Command::Write { sector: 0, data: &[1; 512] });
        assert_eq!(written != 0, dies, "{}", target.log());
        guest.set_writeback(true).unwrap();
        assert_eq!(guest.run(0, Command::Write { sector: 0, data: &[1; 512] }), 0);
        guest.disconnect();
        target.terminate();
        source.terminate();
        server.terminate();
    }
}

/// The record of it has the device and inode of an image, which mean nothing on another host.
#[test]
fn a_failed_flush_of_a_disk_that_was_removed_is_not_forgotten_by_a_migration() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut server = failing_server(folder);
    let data = folder.join("data");
    std::fs::write(&data, vec![0; 1 << 20]).unwrap();
    let root = format!("name=root,image=nbd+unix:///?socket={}", folder.join("image").display());
    let rest = format!("name=data,image={}", data.display());
    let start_with = |disks: &[&str], more: &[&str]| {
        let mut process = command(REMOCA);
        process.arg("disk").args(more);
        for (disk, number) in disks.iter().zip(0..) {
            let socket = folder.join(if number == 0 { "socket".into() } else { format!("socket{number}") });
            process.arg("--disk").arg(format!("{disk},socket={}", socket.display()));
        }
        start(process, folder)
    };
    let mut first = start_with(&[&root, &rest], &[]);
    let mut failing = guest(folder);
    assert_eq!(failing.run(0, Command::Write { sector: 0, data: &[1; 512] }), 0);
    std::fs::write(folder.join("fail"), "").unwrap();
    failing.set_writeback(false).unwrap();
    assert_ne!(failing.run(0, Command::Write { sector: 0, data: &[1; 512] }), 0);
    std::fs::remove_file(folder.join("fail")).unwrap();
    failing.disconnect();
    first.terminate();

    let control = folder.join("control").display().to_string();
    let key = super::migration::key(folder).display().to_string();
    let [to, incoming] = ["nobody", "in"].map(|name| format!("unix:{}", folder.join(name).display()));
    let migrate = || run(&["migrate", &control, "--to", &to, "--key", &key]);
    let refused = ["a flush of an image has failed that is no disk any more", "--clear-removed-flushes"];
    let mut without = start_with(&[&rest], &[]);
    expect_refusal(&migrate(), 1, &refused);
    without.terminate();
    // A process that got its disks from another one knows of it too, and so does the next.
    let mut came = start_with(&[&rest], &["--incoming", &incoming, "--incoming-key", &key]);
    let said = run(&["migrate", &control, "--take-back"]);
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    expect_refusal(&migrate(), 1, &refused);
    came.kill();
    let mut back = start_with(&[&root, &rest], &[]);
    failing.connect(&folder.join("socket")).unwrap();
    assert_ne!(failing.run(0, Command::Flush), 0, "{}", back.log());
    failing.disconnect();
    back.terminate();

    let mut last = start_with(&[&rest], &[]);
    let said = run(&["set", &control, "--clear-removed-flushes"]);
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    expect_refusal(&migrate(), 1, &["nobody"]);
    last.kill();
    let mut sound = start_with(&[&root, &rest], &[]);
    failing.connect(&folder.join("socket")).unwrap();
    assert_eq!(failing.run(0, Command::Flush), 0, "{}", sound.log());
    failing.disconnect();
    sound.terminate();
    server.terminate();
}
