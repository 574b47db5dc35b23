//! Upgrades between programs that do not offer the same, and between versions: what a guest uses stays, or the upgrade is
//! refused before anything changes.

use super::nbd;
use super::support::program::{Program, REMOCA, command, install, run_command, status};
use super::support::wait_until;
use super::upgrade::{begin, end, script};
use remoca_frontend::testing::{Command, Options, TestGuest};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command as Process;

/// A VM process in its own folder.
struct Vm {
    folder: tempfile::TempDir,
    program: Program,
}

impl Vm {
    /// Starts `remoca` with these options. `%` stands for its folder, in which there are `image` and `data` of 1 MiB.
    fn start(remoca: &Path, options: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for image in ["image", "data"] {
            std::fs::write(folder.path().join(image), vec![0; 1 << 20]).unwrap();
        }
        Self::start_in(folder, remoca, options)
    }

    fn start_in(folder: tempfile::TempDir, remoca: &Path, options: &str) -> Self {
        let options = options.replace('%', folder.path().to_str().unwrap());
        let mut disk = command(remoca);
        disk.arg("disk").args(options.split(' ')).arg("--control").arg(folder.path().join("control"));
        let program = Program::start(&mut disk, &folder.path().join("disk.log"));
        let vm = Self { folder, program };
        wait_until("the VM process answers", || UnixStream::connect(vm.path("control")).is_ok());
        vm
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn upgrade(&self, program: &Path) -> (bool, String) {
        end(begin(&self.path("control"), Some(program)))
    }

    #[track_caller]
    fn expect_upgrade(&self, program: &Path) {
        let (done, said) = self.upgrade(program);
        assert!(done, "{said}{}", self.program.log());
    }

    #[track_caller]
    fn expect_refusal(&self, program: &Path, words: &[&str]) {
        let before = status(&self.path("control")).upgrades;
        let (done, said) = self.upgrade(program);
        assert!(!done && words.iter().all(|word| said.contains(word)), "{said}");
        assert!(said.contains("goes on as before"), "{said}");
        assert_eq!(status(&self.path("control")).upgrades, before);
    }

    /// Returns a program that starts remoca with other options: each `old` becomes `new`.
    fn with_options(&self, name: &str, old: &str, new: &str) -> PathBuf {
        let text = format!(
            "#!/bin/bash\nfor option; do shift; set -- \"$@\" \"${{option/{old}/{new}}}\"; done\nexec {REMOCA} \"$@\"\n"
        );
        script(self.folder.path(), name, &text)
    }

    fn guest(&self, options: Options) -> TestGuest {
        let mut guest = TestGuest::new(Options { queue_size: 16, data_bytes: 1 << 16, ..options });
        guest.connect(&self.path("socket")).unwrap();
        guest
    }
}

const DISK: &str = "--disk image=%/image,socket=%/socket,name=root,queues=4";

#[track_caller]
fn expect_service(guest: &mut TestGuest, queue: u16) {
    assert!(guest.is_connected());
    let sector = u64::from(queue) * 8;
    assert_eq!(guest.run(queue, Command::Write { sector, data: &[9; 512] }), 0);
    let ticket = guest.submit(queue, Command::Read { sector, length: 512 });
    guest.queues[usize::from(queue)].kick();
    assert_eq!((guest.wait(ticket), guest.data(ticket, 512)), (0, vec![9; 512]));
}

#[test]
fn a_program_that_offers_less_than_the_guest_uses_is_refused() {
    let vm = Vm::start(REMOCA.as_ref(), DISK);
    let mut guest = vm.guest(Options { queue_count: 4, ..Options::default() });
    let fewer = vm.with_options("fewer", "queues=4", "queues=2");
    vm.expect_refusal(&fewer, &["4 queues (at most 2)", "the guest of root"]);
    expect_service(&mut guest, 3);
    let read_only = vm.with_options("read-only", "queues=4", "queues=4,read-only");
    vm.expect_refusal(&read_only, &["flush", "discard"]);
    let coarse = vm.with_options("coarse", "queues=4", "queues=4,sector=4096");
    vm.expect_refusal(&coarse, &["sectors of 512 bytes"]);
    let renamed = vm.with_options("renamed", "name=root", "name=other");
    vm.expect_refusal(&renamed, &["root", "would have the name other"]);
    expect_service(&mut guest, 2);
    guest.disconnect();
    // Nor may it be less than what firmware uses of it: the system that it boots will use more.
    let mut guest = vm.guest(Options { queue_count: 1, features: !(1 << 12), ..Options::default() });
    vm.expect_refusal(&fewer, &["4 queues (at most 2)", "the guest of root"]);
    expect_service(&mut guest, 0);
    guest.disconnect();
    wait_until("the guest is gone", || !status(&vm.path("control")).disks[0].attached);
    vm.expect_upgrade(&fewer);
    let mut guest = vm.guest(Options { queue_count: 2, ..Options::default() });
    vm.expect_upgrade(REMOCA.as_ref());
    expect_service(&mut guest, 1);
}

/// An older version may not know connections at all.
#[test]
fn a_program_that_does_not_say_what_it_offers_gets_no_guest() {
    let vm = Vm::start(REMOCA.as_ref(), DISK);
    let mut guest = vm.guest(Options::default());
    let text = format!(
        "#!/bin/sh\ncase \"$*\" in *--check-handover*) echo '{}' ;; *) exec {REMOCA} \"$@\" ;; esac\n",
        r#"{"remoca_handover":2,"version":"0"}"#
    );
    let older = script(vm.folder.path(), "older", &text);
    vm.expect_refusal(&older, &["does not say what it offers", "restart this process with it"]);
    expect_service(&mut guest, 0);
    guest.disconnect();
    wait_until("the guest is gone", || !status(&vm.path("control")).disks[0].attached);
    vm.expect_upgrade(&older);
}

#[test]
fn what_is_new_reaches_a_guest_when_it_connects_again() {
    let vm = Vm::start(REMOCA.as_ref(), "--disk image=%/image,socket=%/socket,name=root,queues=1");
    let more = vm.with_options("more", "queues=1", "queues=4");
    let offers_more = || {
        let shown = run_command(command(REMOCA).arg("status").arg("-v").arg(vm.path("control")));
        let is_shown = String::from_utf8(shown.stdout).unwrap().contains("features that its guest does not have yet");
        assert_eq!(is_shown, status(&vm.path("control")).disks[0].offers_more);
        is_shown
    };
    let mut guest = vm.guest(Options::default());
    assert!(!offers_more());
    vm.expect_upgrade(&more);
    assert!(offers_more());
    vm.expect_upgrade(&more);
    assert!(offers_more(), "another upgrade changes nothing");
    expect_service(&mut guest, 0);
    guest.disconnect();
    let mut guest = vm.guest(Options { queue_count: 4, ..Options::default() });
    wait_until("it has all", || !status(&vm.path("control")).disks[0].offers_more);
    assert!(!offers_more());
    expect_service(&mut guest, 3);
}

/// The guest has agreed to use zeroing. The server, which is another one since, cannot do it.
#[test]
fn what_an_nbd_server_no_longer_does_is_offered_to_guests_that_use_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("image"), vec![1; 1 << 20]).unwrap();
    let serve = |folder: &Path, filters: &[&str]| {
        let mut nbdkit = command("nbdkit");
        nbdkit.arg("-f").args(filters).arg("-U").arg(folder.join("nbd")).arg("file").arg(folder.join("image"));
        let server = Program::start(&mut nbdkit, &folder.join("nbd.log"));
        wait_until("nbdkit listens", || UnixStream::connect(folder.join("nbd")).is_ok());
        server
    };
    let mut server = serve(folder.path(), &[]);
    let (socket, client) = (path("nbd"), path("client"));
    let image = format!("nbd+unix:///?socket={}", socket.display());
    let disks =
        format!("--disk image={image},socket=%/socket,name=root --disk image={image},name=data --nbd unix:%/client");
    let vm = Vm::start_in(folder, REMOCA.as_ref(), &disks);
    let mut guest = vm.guest(Options::default());
    let mut ours = nbd::attach(&client, "data");
    let zero = |client: &mut UnixStream, offset: u64| {
        client.write_all(&nbd::request(6, 7, offset, 4096)).unwrap();
        let mut answer = [0; 16];
        client.read_exact(&mut answer).unwrap();
        assert_eq!(answer[4..8], [0; 4], "{answer:?}");
    };
    server.kill();
    std::fs::remove_file(&socket).unwrap();
    let _server = serve(vm.folder.path(), &["--filter=nozero"]);
    wait_until("both disks are back", || status(&vm.path("control")).disks.iter().all(|disk| disk.store == "up"));
    for round in 0..2 {
        assert_eq!(guest.run(0, Command::WriteZeroes(&[(16 * round, 8, 0)])), 0);
        zero(&mut ours, 4096 * (2 * round + 1));
        vm.expect_upgrade(REMOCA.as_ref());
    }
    assert!(guest.is_connected());
    drop(ours);
    guest.disconnect();
    let image = std::fs::read(vm.path("image")).unwrap();
    assert!(image[..4 * 4096].iter().all(|byte| *byte == 0) && image[4 * 4096] == 1);
}

/// Builds the program of a former commit. Returns `None` if this repository does not have it.
fn former(commit: &str) -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("remoca-{commit}"));
    let git = |arguments: &[&str]| Process::new("git").arg("-C").arg(&root).args(arguments).output();
    if !git(&["cat-file", "-e", &format!("{commit}^{{commit}}")]).is_ok_and(|output| output.status.success()) {
        eprintln!("SKIPPED: this repository has no commit {commit}, so its program cannot be built (a shallow clone?)");
        return None;
    }
    std::fs::create_dir_all(&folder).unwrap();
    let unpack = format!("git -C {} archive {commit} | tar -x -C {}", root.display(), folder.display());
    assert!(Process::new("sh").args(["-c", &unpack]).status().unwrap().success());
    let mut cargo = Process::new(env!("CARGO"));
    cargo.args(["build", "--locked", "-p", "remoca-cli"]).current_dir(&folder);
    cargo.env("CARGO_TARGET_DIR", folder.join("target")).env_remove("RUSTFLAGS");
    assert!(cargo.status().unwrap().success(), "the program of {commit} cannot be built");
    Some(folder.join("target/debug/remoca"))
}

/// From each former program to this one: the guest stays connected if that program passes connections on. Back to one of
/// them only without a guest.
#[test]
#[ignore = "long: cargo xtask test-long"]
fn each_version_hands_over_to_this_one_and_takes_over_from_it() {
    // The last program that passed no connections on, and the last one that passed them on without offers.
    for (commit, keeps_guests) in [("a4ff91a", false), ("1fea00a", true)] {
        let Some(former) = former(commit) else { continue };
        for (inflight, queue_count) in [(true, 1), (false, 4)] {
            let vm = Vm::start(&former, &format!("{DISK} --disk image=%/data,name=data --nbd unix:%/nbd"));
            let mut guest = vm.guest(Options { inflight, queue_count, ..Options::default() });
            expect_service(&mut guest, queue_count - 1);
            let mut client = nbd::attach(&vm.path("nbd"), "data");
            let mut say = command(REMOCA);
            say.arg("upgrade").arg(vm.path("control")).arg("--program").arg(REMOCA);
            let child = say.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap();
            if !keeps_guests {
                wait_until("it is disconnected", || !guest.is_connected());
                guest.disconnect();
                guest.connect(&vm.path("socket")).unwrap();
                client = nbd::attach(&vm.path("nbd"), "data");
            }
            let (done, said) = end(child);
            assert!(done, "{commit}: {said}{}", vm.program.log());
            expect_service(&mut guest, queue_count - 1);
            client.write_all(&nbd::request(3, 100, 0, 0)).unwrap();
            let mut answer = [0; 16];
            client.read_exact(&mut answer).unwrap();
            assert_eq!(answer[4..8], [0; 4]);
            vm.expect_upgrade(REMOCA.as_ref());
            vm.expect_refusal(&former, &["does not say what it offers"]);
            expect_service(&mut guest, 0);
            guest.disconnect();
            drop(client);
            wait_until("both are gone", || status(&vm.path("control")).disks.iter().all(|disk| !disk.attached));
            vm.expect_upgrade(&former);
            let mut guest = vm.guest(Options { inflight, queue_count, ..Options::default() });
            expect_service(&mut guest, queue_count - 1);
        }
    }
}

/// A program is replaced under its name, as a package does.
#[test]
fn a_newer_program_under_the_same_name_is_asked_with_the_options_of_the_process() {
    let folder = tempfile::tempdir().unwrap();
    let own = folder.path().join("remoca");
    install(REMOCA.as_ref(), &own);
    let vm = Vm::start(&own, DISK);
    let mut guest = vm.guest(Options { queue_count: 4, ..Options::default() });
    let fewer = vm.with_options("fewer", "queues=4", "queues=2");
    install(&fewer, &own);
    let (done, said) = end(begin(&vm.path("control"), None));
    assert!(!done && said.contains("4 queues"), "{said}");
    expect_service(&mut guest, 3);
}
