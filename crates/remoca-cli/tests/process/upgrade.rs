//! Upgrade in place under load: the process, sockets and locks stay the same, nothing is lost; and upgrades that are
//! refused.

use super::nbd;
use super::support::machine::{Evictions, Machine, Setup};
use super::support::program::{
    PASSED, Program, REMOCA, Serve, Signal, ask_raw, command, install, pass, run, run_command, status,
};
use super::support::{folder, wait_until};
use remoca_frontend::testing::{Command, Options, TestGuest};
use remoca_io::small_file::with_ending;
use remoca_protocol::control::Status;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A client that sends its request more slowly may get no answer from a program that hands over.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(1);

fn machine(setup: Setup) -> (Serve, Machine) {
    let (server, mut machine) = Machine::start_with_server(tempfile::tempdir().unwrap(), setup);
    machine.evictions = Evictions::LYING;
    machine.outlives = true;
    (server, machine)
}

/// Starts `remoca upgrade`, and returns the running command.
pub fn begin(control: &Path, program: Option<&Path>) -> Child {
    let mut command = command(REMOCA);
    command.arg("upgrade").arg(control).stdout(Stdio::piped()).stderr(Stdio::piped());
    if let Some(program) = program {
        command.arg("--program").arg(program);
    }
    command.spawn().unwrap()
}

/// Waits for the command. Returns whether it succeeded, and its output.
pub fn end(child: Child) -> (bool, String) {
    let output = child.wait_with_output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8(said).unwrap())
}

/// Upgrades while the guest works. Returns whether it succeeded, and the command's output.
fn upgrade(machine: &mut Machine, program: Option<&Path>) -> (bool, String) {
    let mut child = begin(&machine.control(), program);
    while child.try_wait().unwrap().is_none() {
        machine.round();
    }
    machine.run(5);
    // The counters start at zero again.
    machine.pages_sent = machine.counter("evictions_reported");
    end(child)
}

/// Upgrades as [`upgrade`] does. Tries again if a disk takes seconds for a flush, as one under load may.
pub fn upgrade_in_time(machine: &mut Machine, program: impl Fn() -> Option<PathBuf>) -> (bool, String) {
    for _ in 0..5 {
        let (done, said) = upgrade(machine, program().as_deref());
        if done || !said.contains("in flight") {
            return (done, said);
        }
    }
    panic!("requests are in flight again and again: {}", machine.program.log());
}

#[track_caller]
fn expect_upgrade(machine: &mut Machine, program: Option<&Path>) {
    let (before, pid) = (machine.status(), machine.program.pid());
    let (done, said) = upgrade_in_time(machine, || program.map(Path::to_owned));
    assert!(done && said.contains(&format!("process {pid} runs version")), "{said}");
    let after = machine.status();
    assert_eq!((after.pid, after.upgrades), (pid, before.upgrades + 1));
    // It was not started with --incoming. If it were one day, after a kill, it would not wait for its disks.
    assert!(!with_ending(&machine.control(), ".here").exists(), "no disks came");
    machine.expect_no_harm();
}

#[track_caller]
fn expect_refused_upgrade(machine: &mut Machine, program: impl Fn() -> Option<PathBuf>, words: &str) {
    let before = machine.status();
    let (done, said) = upgrade_in_time(machine, program);
    assert!(!done && said.contains(words) && said.contains("goes on as before"), "{said}");
    let after = machine.status();
    assert!(after.upgrades == before.upgrades && after.uptime_s > before.uptime_s);
    machine.expect_no_harm();
}

fn descriptors(program: &Program) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", program.pid())).unwrap().count()
}

/// Repeats an action in a thread until dropped, and counts the repetitions.
struct Meanwhile {
    over: Arc<AtomicBool>,
    count: Arc<AtomicUsize>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Meanwhile {
    fn again_and_again(mut action: impl FnMut() + Send + 'static) -> Self {
        let (over, count) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (theirs, counter) = (Arc::clone(&over), Arc::clone(&count));
        let thread = std::thread::spawn(move || {
            while !theirs.load(Ordering::Relaxed) {
                action();
                counter.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(2));
            }
        });
        Self { over, count, thread: Some(thread) }
    }

    fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Stops, and returns the number of repetitions. Fails the test if the action panicked.
    fn end(mut self) -> usize {
        self.over.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
        self.count()
    }
}

/// Returns the status of the process, or `None` if it does not answer.
pub fn try_status(control: &Path) -> Option<Status> {
    let answer = ask_raw(control, b"{\"op\":\"status\"}\n");
    (!answer.is_empty()).then(|| serde_json::from_str(&answer).unwrap_or_else(|error| panic!("{error}: {answer}")))
}

/// Returns whether a process writes to the image and shares it with no other writer. The check takes no lock: a child
/// that another test forks would keep such a lock until its `exec`, and the product would find it.
fn is_locked(image: &File) -> bool {
    [101, 201].into_iter().all(|byte| {
        // SAFETY: flock is a plain C structure, for which all zero is a valid value.
        let mut request: libc::flock = unsafe { std::mem::zeroed() };
        (request.l_type, request.l_start, request.l_len) = (libc::F_WRLCK as i16, byte, 1);
        // SAFETY: F_OFD_GETLK reads and writes the structure, which outlives the call; the descriptor is open.
        let result = unsafe { libc::fcntl(image.as_raw_fd(), libc::F_OFD_GETLK, &raw mut request) };
        assert_eq!(result, 0);
        request.l_type != libc::F_UNLCK as i16
    })
}

/// Upgrades with two disks and a port. The images are locked at every moment, and each request for the status is
/// answered.
#[test]
fn several_upgrades_under_load() {
    let (_server, mut machine) =
        machine(Setup { sectors: vec![512, 4096], hedges: true, seed: 71, ..Setup::default() });
    machine.run_until_hits(100);
    let image = File::open(&machine.disks[0].image).unwrap();
    let locked = Meanwhile::again_and_again(move || {
        assert!(is_locked(&image), "another program could get in between");
    });
    let control = machine.control();
    let before = descriptors(&machine.program);
    let reachable = Meanwhile::again_and_again(move || {
        let asked = Instant::now();
        let status = try_status(&control);
        assert!(status.is_some() || asked.elapsed() > ANSWER_TIME_MAX, "not a word");
    });
    expect_upgrade(&mut machine, None);
    machine.run_until_hits(50);
    // Upgrades to a copy under another name, then to the file that has that name now.
    let copy = machine.folder.path().join("remoca-next");
    install(Path::new(REMOCA), &copy);
    expect_upgrade(&mut machine, Some(&copy));
    assert!(!machine.status().is_replaced);
    // As a package does that has another build of the same version.
    install(Path::new(REMOCA), &copy);
    assert!(machine.status().is_replaced);
    let found = run(&["check", machine.control().to_str().unwrap()]);
    let found = String::from_utf8_lossy(&found.stdout).into_owned();
    assert!(
        found.contains("process: runs a program whose file has been replaced or removed since it was started"),
        "{found}"
    );
    expect_upgrade(&mut machine, None);
    assert!(!machine.status().is_replaced);
    let exe = std::fs::read_link(format!("/proc/{}/exe", machine.program.pid())).unwrap();
    assert_eq!(exe, copy);
    // Nobody may have looked yet where upgrades take no time, or where a thread gets no processor.
    for _ in 0..20 {
        if locked.count() <= 10 || reachable.count() <= 10 {
            expect_upgrade(&mut machine, None);
        }
    }
    assert!(locked.end() > 10 && reachable.end() > 10);
    machine.run_until_hits(50);
    // A thread may have another one open for a moment.
    wait_until("no descriptor is left behind", || descriptors(&machine.program) <= before);
    machine.finish();
}

/// The guest never connects again, so it would wait in vain after a disconnect.
#[test]
fn no_front_end_notices_an_upgrade() {
    let (_server, mut machine) = machine(Setup { sectors: vec![512, 4096], seed: 81, ..Setup::default() });
    machine.outlives = false;
    machine.run_until_hits(100);
    for _ in 0..10 {
        expect_upgrade(&mut machine, None);
    }
    // All kinds of messages go on over the same connections.
    machine.stop_queues();
    expect_upgrade_at_rest(&machine);
    machine.start_queues();
    machine.run_until_hits(50);
    let log = File::from(rustix::fs::memfd_create("log", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    log.set_len(1 << 20).unwrap();
    let guest = &mut machine.disks[0].guest;
    guest.start_log(&log, |queue| queue.used).unwrap();
    expect_upgrade_at_rest(&machine);
    let marks = || std::fs::read(format!("/proc/self/fd/{}", log.as_raw_fd())).unwrap();
    log.write_all_at(&vec![0; 1 << 20], 0).unwrap();
    machine.run(5);
    assert!(marks().iter().any(|byte| *byte != 0), "what is written after the upgrade is logged");
    let guest = &mut machine.disks[0].guest;
    guest.stop_log().unwrap();
    assert_eq!(guest.read_config(0, 8).unwrap(), (machine.disks[0].model.bytes.len() as u64 / 512).to_le_bytes());
    machine.disks[0].guest.set_writeback(false).unwrap();
    expect_upgrade(&mut machine, None);
    machine.run_until_hits(50);
    machine.finish();
}

/// Upgrades while the guest does nothing.
#[track_caller]
fn expect_upgrade_at_rest(machine: &Machine) {
    let (done, said) = end(begin(&machine.control(), None));
    assert!(done, "{said}");
}

/// Starts the process of one vhost-user disk of 1 MiB, each byte of which is `content`.
fn one_disk(folder: &Path, content: u8) -> Program {
    std::fs::write(folder.join("image"), vec![content; 1 << 20]).unwrap();
    let mut disk = command(REMOCA);
    disk.arg("disk").arg("--image").arg(folder.join("image")).arg("--socket").arg(folder.join("socket"));
    disk.arg("--control").arg(folder.join("control"));
    let program = Program::start(&mut disk, &folder.join("disk.log"));
    wait_until("the VM process answers", || UnixStream::connect(folder.join("control")).is_ok());
    program
}

/// Its ring alone says where it goes on.
#[test]
fn a_front_end_that_keeps_no_record_is_continued_where_its_ring_is() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let mut program = one_disk(folder.path(), 0);
    let options = Options { queue_count: 2, queue_size: 16, data_bytes: 4096, inflight: false, ..Options::default() };
    let mut guest = TestGuest::new(options);
    guest.connect(&path("socket")).unwrap();
    for round in 1..=5_u8 {
        for queue in [0, 1, 1] {
            assert_eq!(guest.run(queue, Command::Write { sector: u64::from(queue), data: &[round; 512] }), 0);
        }
        let (done, said) = end(begin(&path("control"), None));
        assert!(done && guest.is_connected(), "{said}");
    }
    // A queue that is off stays off.
    guest.enable_queue(1, false).unwrap();
    let (done, said) = end(begin(&path("control"), None));
    assert!(done, "{said}");
    let ticket = guest.submit(1, Command::Write { sector: 1, data: &[9; 512] });
    guest.queues[1].kick();
    // Would it be taken, this upgrade would wait for its answer.
    let (done, said) = end(begin(&path("control"), None));
    assert!(done, "{said}");
    guest.poll(1);
    assert_eq!(guest.outstanding(), 1, "nobody takes it");
    guest.enable_queue(1, true).unwrap();
    assert_eq!(guest.wait(ticket), 0);
    guest.disconnect();
    program.terminate();
    let image = std::fs::read(path("image")).unwrap();
    assert!(image[..512] == [5; 512] && image[512..1024] == [9; 512]);
}

/// The features are agreed on in two steps. The second may come when the program is another one.
#[test]
fn a_front_end_that_has_agreed_on_nothing_yet_is_continued() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let mut program = one_disk(folder.path(), 7);
    let mut guest = TestGuest::new(Options { queue_size: 16, data_bytes: 4096, ..Options::default() });
    guest.greet(&path("socket")).unwrap();
    let upgrade = || {
        let (done, said) = end(begin(&path("control"), None));
        assert!(done, "{said}");
    };
    upgrade();
    guest.set_features().unwrap();
    upgrade();
    guest.share_memory().expect("it is acknowledged");
    upgrade();
    guest.share_inflight().unwrap();
    guest.start_queue(0, 0).unwrap();
    let ticket = guest.submit(0, Command::Read { sector: 0, length: 512 });
    guest.queues[0].kick();
    assert_eq!((guest.wait(ticket), guest.data(ticket, 512)), (0, vec![7; 512]));
    guest.disconnect();
    program.terminate();
}

/// Returns a front end in the place of the first disk's, which has sent the start of a message, and no more. The process is within
/// that message.
fn begin_a_message(machine: &mut Machine) -> UnixStream {
    let mut half = UnixStream::connect(&machine.disks[0].socket).unwrap();
    machine.disks[0].guest.disconnect();
    half.write_all(&[1, 0, 0, 0, 1, 0]).unwrap();
    wait_until("the process has read it", || {
        let mut unread: libc::c_int = 0;
        // SAFETY: TIOCOUTQ writes one number, which outlives the call; the descriptor is open.
        let result = unsafe { libc::ioctl(half.as_raw_fd(), libc::TIOCOUTQ, &raw mut unread) };
        assert_eq!(result, 0);
        unread == 0
    });
    half
}

/// A front end that has sent the start of a message, and no more, cannot be continued by a program that has not read it.
#[test]
fn a_front_end_within_a_message_holds_no_upgrade_up() {
    let (_server, mut machine) = machine(Setup { sectors: vec![512, 4096], seed: 82, ..Setup::default() });
    machine.run(10);
    // The first device, so that the others have to be continued after one that cannot be.
    let mut half = begin_a_message(&mut machine);
    let (done, said) = end(begin(&machine.control(), None));
    assert!(!done && said.contains("disconnected the guest from disk0, which"), "{said}");
    assert_eq!(machine.status().upgrades, 1);
    half.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let is_disconnected = match half.read(&mut [0]) {
        Ok(count) => count == 0,
        Err(error) => error.kind() == ErrorKind::ConnectionReset,
    };
    assert!(is_disconnected, "it is told to connect again");
    assert!(machine.disks[1].guest.is_connected() && machine.port.is_connected(), "the others are continued");
    drop(half);
    machine.run(10);
    machine.pages_sent = machine.counter("evictions_reported");
    machine.finish();
}

/// All of its guests are paused then but one, which is within a message.
#[test]
fn a_process_that_is_told_to_end_within_an_upgrade_ends() {
    // It waits for the message for a second only, and goes on without it if this test is slower.
    assert!((0..10).any(|_| is_told_to_end_within_an_upgrade()), "the new program takes over before");
}

/// Returns whether the process was told before the new program took over.
fn is_told_to_end_within_an_upgrade() -> bool {
    let (_server, mut machine) = machine(Setup { sectors: vec![512, 4096], seed: 83, ..Setup::default() });
    machine.run(10);
    let _half = begin_a_message(&mut machine);
    let upgrading = begin(&machine.control(), None);
    wait_until("guests are asked to pause", || machine.program.log().contains("takes over when nothing is in flight"));
    machine.program.terminate();
    let (done, said) = end(upgrading);
    let log = machine.program.log();
    if log.matches("serves the disks of").count() > 1 {
        return false;
    }
    assert!(!done, "{said}");
    assert!(log.contains("told to end with a guest attached to disk0, disk1"), "{log}");
    true
}

#[test]
fn what_was_set_stays_set() {
    let (server, mut machine) = machine(Setup { seed: 72, ..Setup::default() });
    machine.run_until_hits(50);
    machine.set("\"cache_bytes\":2097152");
    expect_upgrade(&mut machine, None);
    machine.run_until_hits(50);
    assert_eq!(machine.status().cache.wanted_bytes, 2 << 20);
    machine.set("\"enabled\":false");
    let folder = tempfile::tempdir().unwrap();
    let other = Serve::start(folder.path(), "16M");
    machine.set(&format!("\"servers\":[\"{}\",\"{}\"]", other.address, server.address));
    expect_upgrade(&mut machine, None);
    assert!(!machine.status().cache.enabled);
    assert_eq!(machine.status().servers.len(), 2);
    machine.set("\"enabled\":true");
    machine.run_until_hits(50);
    assert_eq!(machine.status().cache.wanted_bytes, 2 << 20);
    machine.finish();
}

#[test]
fn a_hangup_upgrades_too() {
    let (_server, mut machine) = machine(Setup { seed: 73, ..Setup::default() });
    machine.run(10);
    let refusals = |machine: &Machine| machine.program.log().matches("still in flight").count();
    let mut refused = 0;
    for upgrades in 1..=2 {
        machine.program.signal(Signal::HUP);
        machine.run_until("the program took over", |machine| {
            if refusals(machine) > refused {
                // A disk took seconds for a flush, as one under load may.
                refused += 1;
                machine.program.signal(Signal::HUP);
            }
            try_status(&machine.control()).is_some_and(|status| status.upgrades == upgrades)
        });
        machine.run(5);
    }
    machine.pages_sent = machine.counter("evictions_reported");
    machine.finish();
}

#[test]
fn without_a_memory_server_an_upgrade_is_none_the_harder() {
    let (mut server, mut machine) = machine(Setup { seed: 74, ..Setup::default() });
    machine.run_until_hits(100);
    server.program.signal(Signal::STOP);
    expect_upgrade(&mut machine, None);
    server.program.signal(Signal::CONT);
    machine.run_until_hits(50);
    server.program.kill();
    expect_upgrade(&mut machine, None);
    server.restart();
    machine.run_until_hits(50);
    machine.finish();
}

/// Writes a program, and returns its path.
pub fn script(folder: &Path, name: &str, text: &str) -> PathBuf {
    let (source, path) = (folder.join("source"), folder.join(name));
    std::fs::write(&source, text).unwrap();
    install(&source, &path);
    path
}

#[test]
fn a_program_that_cannot_take_over_changes_nothing() {
    let (_server, mut machine) = machine(Setup { seed: 75, ..Setup::default() });
    machine.run_until_hits(50);
    let folder = tempfile::tempdir().unwrap();
    let script = |name: &str, text: &str| script(folder.path(), name, text);
    let yes = r#"#!/bin/sh
echo '{"remoca_handover":2,"version":"9"}'
"#;
    for (program, words) in [
        (
            script("old", "#!/bin/sh\necho \"error: unexpected argument '--check-handover'\" >&2\nexit 2\n"),
            "unexpected argument",
        ),
        (script("crash", "#!/bin/sh\nkill -SEGV $$\n"), "signal: 11"),
        (script("newer", &yes.replace(":2,", ":9,")), "description 9"),
        ("/bin/true".into(), "no remoca"),
        ("/no/such/program".into(), "cannot be started"),
        (folder.path().into(), "cannot be started"),
    ] {
        expect_refused_upgrade(&mut machine, || Some(program.clone()), words);
    }
    // The program says that it can take over, and is gone when it is to be started.
    let vanishes = || Some(script("vanishes", &format!("#!/bin/sh\n{REMOCA} \"$@\" && rm $0\n")));
    expect_refused_upgrade(&mut machine, vanishes, "new program cannot be started");
    machine.disks[0].guest.read_config(0, 8).expect("its messages are answered again");
    expect_upgrade(&mut machine, None);
    machine.finish();
}

/// Simulates a program in between that did not know of state files: the state file that exists is an older one.
#[test]
fn a_state_file_of_before_is_not_believed_though_the_image_stayed_open() {
    let folder = folder();
    let server = Serve::start(folder.path(), "16M");
    let setup = Setup { server: Some(server.address.clone()), seed: 79, ..Setup::default() };
    let mut machine = Machine::start_in(folder, setup);
    machine.outlives = true;
    machine.run_until_hits(100);
    machine.settle();
    let (state, old) = (machine.state(), machine.folder.path().join("old"));
    std::fs::copy(&state, &old).unwrap();
    machine.run(100);
    let (state_shown, old_shown) = (state.display(), old.display());
    let text = format!(
        "#!/bin/sh\ncase \"$*\" in *--check-handover*) ;; *) mv {old_shown} {state_shown} ;; esac\nexec {REMOCA} \"$@\"\n"
    );
    let program = script(machine.folder.path(), "between", &text);
    expect_upgrade(&mut machine, Some(&program));
    let reason = machine.status().cold_reason.unwrap_or_else(|| panic!("warm: {}", machine.program.log()));
    assert!(reason.contains("changed") && !old.exists(), "{reason}");
    machine.run_until_hits(50);
    machine.finish();
}

/// The state file is handed over together with its lock. Its mode does not matter in between.
#[test]
fn a_state_file_that_others_may_read_does_not_end_the_process() {
    let (_server, mut machine) = machine(Setup { seed: 80, ..Setup::default() });
    machine.run_until_hits(50);
    let mode = std::fs::Permissions::from_mode(0o640);
    std::fs::set_permissions(machine.state(), mode).unwrap();
    expect_upgrade(&mut machine, None);
    assert_eq!(machine.status().started, "warm", "{}", machine.program.log());
    machine.finish();
}

/// The connection is handed over. With its socket moved away, the NBD server cannot be connected to again.
#[test]
fn an_nbd_server_does_not_notice() {
    let (_server, mut machine) = machine(Setup { nbd: true, sectors: vec![512, 4096], seed: 76, ..Setup::default() });
    machine.run_until_hits(50);
    for number in 0..2 {
        let socket = machine.folder.path().join(format!("nbd{number}"));
        std::fs::rename(&socket, socket.with_extension("moved")).unwrap();
    }
    for _ in 0..2 {
        expect_upgrade(&mut machine, None);
        machine.run_until_hits(50);
    }
    assert!(!machine.program.log().contains("void"), "{}", machine.program.log());
    // While the server does not answer there is no upgrade: requests that it holds must not be abandoned. The cache
    // is off, because it would answer in the server's place.
    machine.set("\"enabled\":false");
    machine.disks[0].nbd.as_ref().unwrap().program.signal(Signal::STOP);
    let disk = &mut machine.disks[0];
    let read = remoca_frontend::testing::Command::Read { sector: 0, length: 1 << 16 };
    let ticket = disk.guest.submit(0, read);
    disk.guest.queues[0].kick();
    let (done, said) = end(begin(&machine.control(), None));
    assert!(!done && said.contains("still in flight"), "{said}");
    machine.disks[0].nbd.as_ref().unwrap().program.signal(Signal::CONT);
    assert_eq!(machine.disks[0].guest.wait(ticket), 0);
    expect_upgrade(&mut machine, None);
    machine.finish();
}

/// The front end keeps no record of the guest's choice.
#[test]
fn a_write_cache_that_is_off_stays_off() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("image"), vec![0; 1 << 20]).unwrap();
    let mut nbdkit = command("nbdkit");
    nbdkit.args(["-f", "--filter=log", "-U"]).arg(path("nbd")).arg("file").arg(path("image"));
    nbdkit.arg(format!("logfile={}", path("requests").display()));
    let mut server = Program::start(&mut nbdkit, &path("nbd.log"));
    wait_until("nbdkit listens", || UnixStream::connect(path("nbd")).is_ok());
    let mut disk = command(REMOCA);
    disk.arg("disk").arg("--image").arg(format!("nbd+unix:///?socket={}", path("nbd").display()));
    disk.arg("--socket").arg(path("socket")).arg("--control").arg(path("control"));
    let mut program = Program::start(&mut disk, &path("disk.log"));
    wait_until("the VM process answers", || UnixStream::connect(path("control")).is_ok());
    let mut guest = TestGuest::new(Options { inflight: false, queue_size: 16, ..Options::default() });
    // Whether the last write was durable, as the server received it.
    let is_durable = |guest: &mut TestGuest, sector: u64| {
        assert_eq!(guest.run(0, Command::Write { sector, data: &[1; 4096] }), 0);
        let requests = std::fs::read_to_string(path("requests")).unwrap();
        let write = requests.lines().rfind(|line| line.contains(" Write ") && line.contains("offset=")).unwrap();
        assert!(write.contains(&format!("offset={:#x}", sector * 512)), "{write}");
        write.contains("fua=1")
    };
    guest.connect(&path("socket")).unwrap();
    assert!(!is_durable(&mut guest, 8));
    guest.set_writeback(false).unwrap();
    assert!(is_durable(&mut guest, 16));
    let flushes = || status(&path("control")).counters["flushes"];
    for upgrades in 1..=2 {
        let (done, said) = end(begin(&path("control"), None));
        assert!(done, "{said}");
        // The guest has its answer, and nobody says whether the former program had made the flush that goes with it.
        wait_until("the new program makes it, without a request", || flushes() == 1);
        guest.disconnect();
        guest.connect(&path("socket")).unwrap();
        assert_eq!(guest.read_config(32, 1).unwrap(), [0], "after {upgrades} upgrades");
        assert!(is_durable(&mut guest, 24 * upgrades), "the guest sends no flushes");
    }
    // For all that this program knows, the former ones only assumed that the cache is off, and owe a flush.
    let before = flushes();
    for _ in 0..2 {
        guest.set_writeback(false).unwrap();
        assert_eq!(flushes(), before + 1);
    }
    guest.set_writeback(true).unwrap();
    assert!(!is_durable(&mut guest, 8));
    guest.disconnect();
    program.terminate();
    server.terminate();
}

/// QEMU's NBD client reconnects by itself.
/// Neither client would connect again: QEMU's as it is told to, and ours, which is in the middle of everything.
#[test]
fn no_nbd_client_notices_an_upgrade() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("image"), vec![0; 16 << 20]).unwrap();
    let mut disk = command(REMOCA);
    disk.arg("disk").arg("--disk").arg(format!("image={},name=root", path("image").display()));
    disk.arg("--nbd").arg(format!("unix:{}", path("nbd").display())).arg("--control").arg(path("control"));
    disk.arg("--nbd-port");
    let mut program = Program::start(&mut disk, &path("disk.log"));
    wait_until("the VM process answers", || UnixStream::connect(path("control")).is_ok());
    let target = "driver=nbd,server.type=unix,server.path=".to_owned() + path("nbd").to_str().unwrap() + ",export=root";
    let output = File::create(path("out")).unwrap();
    let mut client =
        command("qemu-io").args(["--image-opts", &target]).stdin(Stdio::piped()).stdout(output).spawn().unwrap();
    let mut say = |line: &str| client.stdin.as_mut().unwrap().write_all(line.as_bytes()).unwrap();
    let heard =
        |count: usize| std::fs::read_to_string(path("out")).unwrap().matches(" bytes at offset ").count() == count;
    say("write -P 7 0 1M\n");
    wait_until("it has written", || heard(1));

    let mut ours = nbd::attach(&path("nbd"), "root");
    let upgrade = || {
        let (done, said) = end(begin(&path("control"), None));
        assert!(done, "{said}");
    };
    let mut port = nbd::attach(&path("nbd"), "remoca-port");
    let shown = run_command(command(REMOCA).arg("status").arg("-v").arg(path("control")));
    for said in [program.log(), String::from_utf8(shown.stdout).unwrap()] {
        assert!(said.contains("does not connect again by itself"), "{said}");
    }
    let report = nbd::request(0, 5, 0, 4096);
    port.write_all(&report[..9]).unwrap();
    // Answers of 12 MiB that it does not take, the payload of a write in three parts, and half a header.
    let reads: Vec<u8> = (0..12).flat_map(|cookie| nbd::request(0, cookie, 0, 1 << 20)).collect();
    let write = [nbd::request(1, 99, 4 << 20, 3 << 20), vec![8; 3 << 20]].concat();
    let flush = nbd::request(3, 100, 0, 0);
    ours.write_all(&reads).unwrap();
    upgrade();
    say("read -P 7 0 1M\n");
    wait_until("it goes on", || heard(2));
    let mut answer = vec![0; 16 + (1 << 20)];
    let mut cookies: Vec<u8> = Vec::new();
    for _ in 0..12 {
        ours.read_exact(&mut answer).unwrap();
        assert!(answer[4..15] == [0; 11] && answer[16..].iter().all(|byte| *byte == 7));
        cookies.push(answer[15]);
    }
    cookies.sort_unstable();
    assert!(cookies.into_iter().eq(0..12));
    for part in [&write[..10], &write[10..1 << 20], &write[1 << 20..5 << 19], &write[5 << 19..]] {
        ours.write_all(part).unwrap();
        upgrade();
    }
    ours.read_exact(&mut answer[..16]).unwrap();
    assert!(answer[4..8] == [0; 4] && answer[8..16] == 99_u64.to_be_bytes());
    ours.write_all(&flush[..5]).unwrap();
    upgrade();
    ours.write_all(&flush[5..]).unwrap();
    ours.read_exact(&mut answer[..16]).unwrap();
    assert!(answer[4..8] == [0; 4] && answer[8..16] == 100_u64.to_be_bytes());
    port.write_all(&report[9..]).unwrap();
    port.read_exact(&mut answer[..16 + 4096]).unwrap();
    assert!(answer[4..8] == [0; 4] && answer[8..16] == 5_u64.to_be_bytes());
    say("read -P 8 4M 3M\n");
    wait_until("it sees what was written", || heard(3));
    say("quit\n");
    assert!(client.wait().unwrap().success());
    let said = std::fs::read_to_string(path("out")).unwrap();
    assert!(!said.contains("verification failed"), "{said}");
    assert_eq!(status(&path("control")).upgrades, 6);
    program.terminate();
    assert!(!path("nbd").exists() && !path("control").exists(), "sockets are left behind");
}

/// A hand-over from an unknown source is no reason to fail, and no reason to trust.
#[test]
fn an_odd_handover_is_a_start_as_after_a_crash() {
    for odd in ["x", "0", "77", "1000000"] {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::write(path("image"), vec![0; 1 << 20]).unwrap();
        let mut disk = command(REMOCA);
        disk.env("REMOCA_HANDOVER", odd).arg("disk").arg("--image").arg(path("image"));
        disk.arg("--socket").arg(path("socket")).arg("--control").arg(path("control"));
        let mut program = Program::start(&mut disk, &path("disk.log"));
        wait_until("the VM process answers", || UnixStream::connect(path("control")).is_ok());
        assert!(program.log().contains("starts as after a crash"), "{}", program.log());
        // Its own upgrade works.
        let (done, said) = end(begin(&path("control"), None));
        assert!(done, "{said}");
        program.terminate();
    }
}

/// A connection that was passed cannot be made again, so it is not thrown away.
#[test]
fn a_connection_that_was_passed_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("image"), vec![0; 1 << 20]).unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut disk = command(REMOCA);
    disk.arg("disk").arg("--image").arg(path("image")).args(["--fd", PASSED]).arg("--control").arg(path("control"));
    pass(&mut disk, &theirs);
    let program = Program::start(&mut disk, &path("disk.log"));
    wait_until("the VM process answers", || UnixStream::connect(path("control")).is_ok());
    let (done, said) = end(begin(&path("control"), None));
    assert!(!done && said.contains("passed by --fd"), "{said}");
    assert_eq!(status(&path("control")).upgrades, 0);
    drop((program, ours));
}
