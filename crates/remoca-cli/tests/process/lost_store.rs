//! Images at an NBD server that has a cache and loses it, or that fails to make it durable.

use super::support::program::{
    Program, REMOCA, Signal, command, expect_refusal, run, run_command, status, until_answered,
};
use super::support::wait_until;
use super::upgrade::try_status;
use remoca_frontend::testing::{Command, Options, TestGuest};
use remoca_store::testing::{NbdCommand, NbdOffer, NbdRequested, Verdict, VolatileNbd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Child;
use tempfile::TempDir;

const SIZE: u64 = 16 << 20;
const FULL: u32 = 28;

/// An NBD server, and a VM process with a disk on it.
struct Setup {
    server: VolatileNbd,
    program: Program,
    guest: TestGuest,
    folder: TempDir,
}

/// Starts the VM process. `options` are those of the disk, `more` those of the process.
fn disk(folder: &Path, image: &str, options: &str, more: &[&str]) -> Program {
    let path = |name: &str| folder.join(name).display().to_string();
    let mut disk = command(REMOCA);
    disk.args(["disk", "--disk"]).arg(format!("name=root,image={image},socket={}{options}", path("socket")));
    disk.args(["--control", &path("control"), "--nbd-settle", "0"]).args(more);
    let mut program = Program::start(&mut disk, &folder.join("disk.log"));
    wait_until("the VM process answers", || {
        assert!(program.is_running(), "{}", program.log());
        UnixStream::connect(folder.join("control")).is_ok()
    });
    program
}

fn uri(folder: &Path) -> String {
    format!("nbd+unix:///?socket={}", folder.join("nbd").display())
}

fn guest(folder: &Path) -> TestGuest {
    let mut guest = TestGuest::new(Options { queue_size: 16, data_bytes: 10 << 20, ..Options::default() });
    guest.connect(&folder.join("socket")).unwrap();
    guest
}

fn start(offer: NbdOffer, options: &str, more: &[&str]) -> Setup {
    let folder = tempfile::tempdir().unwrap();
    let server = VolatileNbd::start(&folder.path().join("nbd"), NbdOffer { size: SIZE, ..offer });
    server.overwrite(0, &vec![0xEE; SIZE as usize]);
    let program = disk(folder.path(), &uri(folder.path()), options, more);
    Setup { server, program, guest: guest(folder.path()), folder }
}

/// Returns a rule by which the server loses power at the `n`-th request of a kind.
fn loses_at(command: NbdCommand, n: usize) -> impl FnMut(&NbdRequested) -> Verdict + Send + 'static {
    let mut count = 0;
    move |request| {
        count += usize::from(request.command == command);
        if request.command == command && count == n { Verdict::LosePower } else { Verdict::Do }
    }
}

fn fails_once(command: NbdCommand, error: u32) -> impl FnMut(&NbdRequested) -> Verdict + Send + 'static {
    let mut is_first = true;
    move |request| match request.command == command && std::mem::take(&mut is_first) {
        true => Verdict::Fail(error),
        false => Verdict::Do,
    }
}

/// No part of the request was acknowledged before the loss.
#[test]
fn a_request_in_parts_is_there_in_full_after_a_loss_and_a_flush() {
    for (fua, block, payload_max) in [(true, 512, 32 << 20), (false, 4096, 64 << 10)] {
        let mut setup = start(NbdOffer { fua, block, payload_max, ..NbdOffer::default() }, "", &[]);
        let data: Vec<u8> = (0..9_u32 << 20).map(|at| (at >> 9) as u8 ^ at as u8).collect();
        for n in [2, 3] {
            setup.server.overwrite(0, &vec![0xEE; SIZE as usize]);
            setup.server.set_rule(loses_at(NbdCommand::Write, n));
            assert_eq!(setup.guest.run(0, Command::Write { sector: 0, data: &data }), 0);
            assert_eq!(setup.guest.run(0, Command::Flush), 0);
            assert!(setup.server.disk()[..data.len()] == data, "the loss came at write {n}");
        }
        setup.server.set_rule(loses_at(NbdCommand::WriteZeroes, 2));
        let ranges = [(0, 64, 0), (1024, 64, 0)];
        assert_eq!(setup.guest.run(0, Command::WriteZeroes(&ranges)), 0);
        assert_eq!(setup.guest.run(0, Command::Flush), 0);
        for (sector, count, _) in ranges {
            let start = sector as usize * 512;
            assert_eq!(setup.server.disk()[start..start + count as usize * 512], [0; 64 * 512]);
        }
        setup.program.terminate();
    }
}

#[test]
fn so_it_is_where_the_guest_comes_over_nbd() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let server = VolatileNbd::start(&folder.join("nbd"), NbdOffer { size: SIZE, ..NbdOffer::default() });
    let mut disk = command(REMOCA);
    disk.args(["disk", "--disk"]).arg(format!("name=root,image={}", uri(folder)));
    disk.arg("--nbd").arg(format!("unix:{}", folder.join("export").display()));
    disk.arg("--control").arg(folder.join("control"));
    let mut program = Program::start(&mut disk, &folder.join("disk.log"));
    wait_until("the VM process answers", || UnixStream::connect(folder.join("control")).is_ok());
    for mib in [3, 6] {
        server.overwrite(0, &vec![0xEE; SIZE as usize]);
        server.set_rule(loses_at(NbdCommand::Write, mib));
        let script = format!(
            "
import nbd
h = nbd.NBD()
h.connect_uri('nbd+unix:///root?socket={socket}')
h.pwrite(bytes([7]) * ({mib} << 20), 0)
h.flush()
",
            socket = folder.join("export").display()
        );
        let output = run_command(command("nbdsh").args(["-c", &script]).env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(server.disk()[..mib << 20].iter().all(|byte| *byte == 7), "{mib} MiB");
    }
    program.terminate();
}

/// Checks what would be left after a power failure, at the moment of each answer.
#[test]
fn with_the_guests_write_cache_off_what_is_answered_is_durable() {
    for (fua, block) in [(true, 512), (false, 512), (true, 4096), (false, 4096)] {
        let mut setup = start(NbdOffer { fua, block, ..NbdOffer::default() }, "", &[]);
        let expect = |setup: &mut Setup, start: usize, data: &[u8], command: Command| {
            assert_eq!(setup.guest.run(0, command), 0);
            let is_durable = setup.server.disk()[start..start + data.len()] == *data;
            assert!(is_durable, "fua: {fua}, blocks of {block}: {} bytes at {start}", data.len());
        };
        setup.guest.set_writeback(false).unwrap();
        assert_eq!(setup.guest.read_config(32, 1).unwrap(), [0]);
        for (sector, length) in [(0, 4096), (9, 512), (15, 6144), (1024, 9 << 20)] {
            let data: Vec<u8> = (0..length).map(|at: usize| (at >> 9) as u8 ^ sector as u8).collect();
            expect(&mut setup, sector as usize * 512, &data, Command::Write { sector, data: &data });
        }
        for (sector, count) in [(0, 8), (17, 30)] {
            let zeroes = vec![0; count as usize * 512];
            expect(&mut setup, sector as usize * 512, &zeroes, Command::WriteZeroes(&[(sector, count, 0)]));
        }
        if !fua {
            // The write is answered, the flush after it is not.
            setup.server.set_rule(loses_at(NbdCommand::Flush, 1));
            expect(&mut setup, 0, &[9; 4096], Command::Write { sector: 0, data: &[9; 4096] });
        }
        setup.program.terminate();
    }
}

/// The option is the operator's. By default, the cache of a server that comes back is assumed to have survived.
#[test]
fn a_loss_of_unflushed_writes_fails_the_next_flush_if_that_is_wanted() {
    for (options, fails) in
        [("", false), (",on-loss=continue", false), (",write-through,on-loss=fail", false), (",on-loss=fail", true)]
    {
        let mut setup = start(NbdOffer::default(), options, &["--name", "vm"]);
        assert_eq!(setup.guest.run(0, Command::Write { sector: 0, data: &[1; 4096] }), 0);
        setup.server.lose_power();
        assert_eq!(setup.guest.run(0, Command::Flush) != 0, fails, "{options}: {}", setup.program.log());
        assert_eq!(setup.server.disk()[0] == 1, options.contains("write-through"));
        if !fails {
            setup.program.terminate();
            continue;
        }
        let control = setup.folder.path().join("control");
        assert_eq!(status(&control).disks[0].failed_flush.as_deref(), Some("Input/output error (os error 5)"));
        let list = run(&["status", &control.display().to_string()]);
        assert!(String::from_utf8_lossy(&list.stdout).contains("FLUSHES OF root FAIL"), "{list:?}");
        setup.program.kill();
        setup.guest.disconnect();
        let image = uri(setup.folder.path());
        let mut again = disk(setup.folder.path(), &image, options, &["--name", "vm"]);
        setup.guest.connect(&setup.folder.path().join("socket")).unwrap();
        assert_ne!(setup.guest.run(0, Command::Flush), 0, "whoever comes next");
        let clear = run(&["set", &control.display().to_string(), "--clear-failed-flush", "root"]);
        assert!(clear.status.success(), "{}", String::from_utf8_lossy(&clear.stderr));
        assert_eq!(setup.guest.run(0, Command::Flush), 0);
        assert_eq!(status(&control).disks[0].failed_flush, None);
        again.terminate();
    }
}

/// The next process must know of the loss, although this one never sees the server again.
#[test]
fn a_loss_is_remembered_by_a_process_that_ends_before_the_server_is_back() {
    for is_killed in [true, false] {
        let mut setup = start(NbdOffer::default(), ",on-loss=fail", &["--name", "vm"]);
        assert_eq!(setup.guest.run(0, Command::Write { sector: 0, data: &[1; 4096] }), 0);
        let (socket, away) = (setup.folder.path().join("nbd"), setup.folder.path().join("away"));
        std::fs::rename(&socket, &away).unwrap();
        setup.server.lose_power();
        wait_until("the loss is said", || setup.program.log().contains("--clear-failed-flush root"));
        if is_killed {
            setup.program.kill();
        } else {
            setup.program.terminate();
        }
        setup.guest.disconnect();
        std::fs::rename(&away, &socket).unwrap();
        let mut again = disk(setup.folder.path(), &uri(setup.folder.path()), ",on-loss=fail", &["--name", "vm"]);
        setup.guest.connect(&setup.folder.path().join("socket")).unwrap();
        assert_ne!(setup.guest.run(0, Command::Flush), 0, "killed: {is_killed}");
        again.terminate();
    }
}

/// The next process has another connection, and cannot know whether the server was away in between.
#[test]
fn what_was_not_flushed_is_flushed_at_a_clean_end_or_the_next_process_knows_of_it() {
    for ending in [Verdict::Do, Verdict::Fail(FULL), Verdict::LosePower] {
        let mut setup = start(NbdOffer::default(), ",on-loss=fail", &["--name", "vm"]);
        assert_eq!(setup.guest.run(0, Command::Write { sector: 0, data: &[1; 4096] }), 0);
        setup.server.set_rule(move |request| match request.command {
            NbdCommand::Flush => ending,
            _ => Verdict::Do,
        });
        setup.program.terminate();
        setup.guest.disconnect();
        let is_flushed = ending == Verdict::Do;
        setup.server.set_rule(|_| Verdict::Do);
        setup.server.lose_power();
        assert_eq!(setup.server.disk()[0] == 1, is_flushed, "{ending:?}");
        let mut again = disk(setup.folder.path(), &uri(setup.folder.path()), ",on-loss=fail", &["--name", "vm"]);
        setup.guest.connect(&setup.folder.path().join("socket")).unwrap();
        assert_eq!(setup.guest.run(0, Command::Flush) == 0, is_flushed, "{ending:?}: {}", again.log());
        again.terminate();
    }
}

/// Its writes count as safe, and a server that is slow to flush is not left in the middle of it.
#[test]
fn a_clean_end_does_not_flush_where_a_loss_is_none() {
    let mut setup = start(NbdOffer::default(), "", &[]);
    assert_eq!(setup.guest.run(0, Command::Write { sector: 0, data: &[1; 4096] }), 0);
    setup.server.take_log();
    setup.program.terminate();
    assert_eq!(setup.server.take_log(), []);
}

#[test]
fn a_server_that_is_refused_is_told_from_one_that_is_away() {
    let mut setup = start(NbdOffer::default(), "", &[]);
    let control = setup.folder.path().join("control");
    let error = || status(&control).disks[0].store_error.clone().unwrap_or_default();
    assert_eq!(error(), "");
    let (socket, away) = (setup.folder.path().join("nbd"), setup.folder.path().join("away"));
    std::fs::rename(&socket, &away).unwrap();
    setup.server.lose_power();
    wait_until("it is away", || error().starts_with("the NBD server cannot be reached: No such file"));
    setup.server.set_offer(NbdOffer { size: SIZE / 2, ..NbdOffer::default() });
    std::fs::rename(&away, &socket).unwrap();
    wait_until("it is another one", || error().contains("came back with another disk"));
    let why = error();
    assert!(why.starts_with("the NBD server cannot be used: "), "{why}");
    assert!(setup.program.log().contains(&why), "{}", setup.program.log());
    let control = control.to_str().unwrap();
    for command in [&["status", "-v", control][..], &["check", "-o", "json", "--config", "/nonexistent", control]] {
        let shown = until_answered(|| run(command)).stdout;
        assert!(String::from_utf8_lossy(&shown).contains(&why), "{command:?}: {}", String::from_utf8_lossy(&shown));
    }
    setup.server.set_offer(NbdOffer { size: SIZE, ..NbdOffer::default() });
    wait_until("it is as before", || error().is_empty());
    setup.program.terminate();
}

#[test]
fn what_is_for_nbd_images_is_refused_for_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    std::fs::write(path("image"), [0; 4096]).unwrap();
    for option in ["on-loss=fail", "write-through"] {
        let disk = format!("image={},socket={},{option}", path("image"), path("socket"));
        expect_refusal(&run(&["disk", "--disk", &disk, "--control", &path("control")]), 78, &["are for NBD images"]);
    }
}

/// The failed sync may be the report of a write that was acknowledged before.
#[test]
fn a_sync_behind_a_durable_write_that_finds_no_space_fails_all_later_flushes() {
    let mut setup = start(NbdOffer { fua: false, ..NbdOffer::default() }, "", &[]);
    setup.guest.set_writeback(false).unwrap();
    assert_eq!(setup.guest.read_config(32, 1).unwrap(), [0]);
    let write = |setup: &mut Setup| setup.guest.run(0, Command::Write { sector: 0, data: &[1; 4096] });
    assert_eq!(write(&mut setup), 0);
    setup.server.set_rule(fails_once(NbdCommand::Flush, FULL));
    assert_ne!(write(&mut setup), 0);
    assert_ne!(setup.guest.run(0, Command::Flush), 0);
    assert_ne!(write(&mut setup), 0);
    setup.program.terminate();
}

/// The server's export, mounted as a file; needs root.
struct Fuse {
    child: Child,
    folder: std::path::PathBuf,
}

impl Fuse {
    fn mount(folder: &Path) -> Self {
        let mounted = folder.join("mounted");
        std::fs::create_dir(&mounted).unwrap();
        let child = command("nbdfuse").arg(&mounted).arg(uri(folder)).spawn().unwrap();
        wait_until("the export is mounted", || mounted.join("nbd").exists());
        Self { child, folder: mounted }
    }

    fn image(&self) -> String {
        self.folder.join("nbd").display().to_string()
    }
}

impl Drop for Fuse {
    fn drop(&mut self) {
        // A failed test may have left it mounted.
        let _ = command("umount").arg("--lazy").arg(&self.folder).status();
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Expects that a failed flush stays failed over an upgrade. Only the process itself remembers the failure: it has no
/// name.
fn stays_failed_over_an_upgrade(setup: &mut Setup) {
    setup.server.set_rule(fails_once(NbdCommand::Flush, 5));
    assert_ne!(setup.guest.run(0, Command::Flush), 0);
    setup.program.signal(Signal::HUP);
    let control = setup.folder.path().join("control");
    // A program that hands over need not answer.
    wait_until("the program is replaced", || {
        UnixStream::connect(&control).is_ok() && try_status(&control).is_some_and(|status| status.upgrades == 1)
    });
    setup.guest.disconnect();
    setup.guest.connect(&setup.folder.path().join("socket")).unwrap();
    assert_ne!(setup.guest.run(0, Command::Flush), 0, "{}", setup.program.log());
    assert!(status(&control).disks[0].failed_flush.is_some());
}

#[test]
fn a_failed_flush_stays_failed_over_an_upgrade_of_a_process_without_a_name() {
    let mut setup = start(NbdOffer::default(), "", &[]);
    stays_failed_over_an_upgrade(&mut setup);
    setup.program.terminate();
}

#[test]
fn so_it_does_with_a_file() {
    let mut setup = start(NbdOffer::default(), "", &[]);
    setup.program.terminate();
    setup.guest.disconnect();
    let fuse = Fuse::mount(setup.folder.path());
    setup.program = disk(setup.folder.path(), &fuse.image(), "", &[]);
    setup.guest.connect(&setup.folder.path().join("socket")).unwrap();
    stays_failed_over_an_upgrade(&mut setup);
    setup.program.terminate();
}
