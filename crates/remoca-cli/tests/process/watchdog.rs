//! The service manager's watchdog is notified by the I/O thread only; and what a core dump would contain.

use super::support::machine::{Machine, Setup};
use super::support::wait_until;
use remoca_io::control;
use remoca_protocol::control::{Command, Reply};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::time::Duration;

const SIGN: &str = "WATCHDOG=1\n";
/// Watchdog period that the manager sets in the environment, in microseconds. Signs of life come three times in it.
const PATIENCE_USEC: &str = "300000";

/// Receives and returns the next message to the manager.
#[track_caller]
fn told(manager: &UnixDatagram) -> String {
    let mut text = [0; 500];
    let count = manager.recv(&mut text).expect("the manager is told something");
    String::from_utf8(text[..count].to_vec()).unwrap()
}

/// Returns the next state. Skips signs of life.
#[track_caller]
fn state(manager: &UnixDatagram) -> String {
    std::iter::repeat_with(|| told(manager)).find(|text| text != SIGN).unwrap()
}

#[track_caller]
fn expect_signs(manager: &UnixDatagram, count: usize) {
    (0..count).for_each(|_| assert_eq!(told(manager), SIGN));
}

/// A thread that is stopped while all other threads of its process run.
struct Stopped(i32);

impl Stopped {
    fn new(thread: i32) -> Self {
        let none = std::ptr::null_mut::<libc::c_void>();
        // SAFETY: these requests use no memory of ours.
        let stopped = unsafe {
            libc::ptrace(libc::PTRACE_SEIZE, thread, none, none) == 0
                && libc::ptrace(libc::PTRACE_INTERRUPT, thread, none, none) == 0
                && libc::waitpid(thread, std::ptr::null_mut(), libc::__WALL) == thread
        };
        assert!(stopped, "{}", std::io::Error::last_os_error());
        Self(thread)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let none = std::ptr::null_mut::<libc::c_void>();
        // SAFETY: as above.
        unsafe { libc::ptrace(libc::PTRACE_DETACH, self.0, none, none) };
    }
}

#[test]
fn signs_of_life_come_from_the_turns_of_the_io_thread_and_an_upgrade_has_more_time() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(super::support::PATIENCE)).unwrap();
    let environment = vec![("NOTIFY_SOCKET", path.display().to_string()), ("WATCHDOG_USEC", PATIENCE_USEC.to_owned())];
    let mut machine = Machine::start_in(folder, Setup { environment, ..Setup::default() });
    assert!(state(&manager).starts_with("EXTEND_TIMEOUT_USEC="));
    let ready = format!("READY=1\nWATCHDOG_USEC={PATIENCE_USEC}\n{SIGN}");
    assert_eq!(state(&manager), ready);
    // Idle, and at work.
    expect_signs(&manager, 3);
    let (mut count, mut text) = (0, [0; 500]);
    manager.set_nonblocking(true).unwrap();
    machine.run_until("signs of life under load", |_| {
        while manager.recv(&mut text).is_ok() {
            count += 1;
        }
        count >= 5
    });
    // Stops the I/O thread. Other threads of the process would continue.
    let thread = Stopped::new(i32::try_from(machine.program.pid()).unwrap());
    while manager.recv(&mut text).is_ok() {}
    std::thread::sleep(Duration::from_secs(1));
    assert!(manager.recv(&mut text).is_err(), "a sign of life of a thread that stands still");
    drop(thread);
    manager.set_nonblocking(false).unwrap();
    expect_signs(&manager, 3);

    machine.outlives = true;
    // The manager receives meanwhile, as it always does: there is no room for the signs of a slow upgrade otherwise.
    let socket = machine.control();
    let (upgraded, [giving_way, extended, ready_again]) = std::thread::scope(|scope| {
        let upgrade = scope.spawn(|| control::call(&socket, Command::Upgrade { program: None }).unwrap());
        let states = [(); 3].map(|()| state(&manager));
        (upgrade.join().unwrap(), states)
    });
    assert!(matches!(upgraded, Reply::Status(status) if status.upgrades == 1));
    assert!(giving_way.starts_with("RELOADING=1\nMONOTONIC_USEC="), "{giving_way}");
    assert!(giving_way.contains("\nWATCHDOG_USEC=600000000\n"), "{giving_way}");
    assert!(extended.starts_with("EXTEND_TIMEOUT_USEC="), "{extended}");
    assert_eq!(ready_again, ready);
    expect_signs(&manager, 3);
    machine.run(5);
    machine.pages_sent = machine.counter("evictions_reported");
    machine.finish();
}

/// Returns, for each mapping of a process whose line contains `words`, whether a core dump leaves it out.
fn mappings(pid: u32, words: &str) -> Vec<bool> {
    let smaps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let mut lines = smaps.lines();
    let mut found = Vec::new();
    while let Some(line) = lines.by_ref().find(|line| line.contains(words)) {
        let flags = lines.by_ref().find(|line| line.starts_with("VmFlags:"));
        found.push(flags.unwrap_or_else(|| panic!("{line}")).split(' ').any(|flag| flag == "dd"));
    }
    found
}

#[test]
fn guest_memory_and_the_state_file_are_left_out_of_core_dumps() {
    let mut machine = Machine::start(Setup::default());
    machine.run(5);
    let pid = machine.program.pid();
    let state = machine.state();
    for words in [state.to_str().unwrap(), "/memfd:"] {
        let found = mappings(pid, words);
        assert!(!found.is_empty() && found.iter().all(|left_out| *left_out), "{words}: {found:?}");
    }
    machine.finish();
}

/// Closed at the `exec` of a program that is started. A child that it leaves behind would keep a guest's memory.
#[test]
fn what_front_ends_pass_is_not_left_to_programs_that_are_started() {
    const CLOEXEC: u32 = 0o2_000_000;
    let mut machine = Machine::start(Setup::default());
    machine.run(1);
    let folder = format!("/proc/{}", machine.program.pid());
    let mut guests = 0;
    for entry in std::fs::read_dir(Path::new(&folder).join("fd")).unwrap() {
        let name = entry.unwrap().file_name();
        let number = name.to_str().unwrap();
        let Ok(target) = std::fs::read_link(format!("{folder}/fd/{number}")) else { continue };
        let target = target.to_string_lossy();
        // The test opened it with close-on-exec, so the process can have it only from the socket.
        if !target.starts_with("/memfd:test-guest") {
            continue;
        }
        guests += 1;
        let text = std::fs::read_to_string(format!("{folder}/fdinfo/{number}")).unwrap();
        let flags = text.lines().find_map(|line| line.strip_prefix("flags:")).unwrap().trim();
        let is_closed = u32::from_str_radix(flags, 8).unwrap() & CLOEXEC != 0;
        assert!(is_closed, "{number}: {target}");
    }
    assert!(guests > 0, "the process has a guest's memory");
    machine.finish();
}

/// A stopped journal accepts no lines: they are lost, and counted.
#[test]
fn a_log_that_nobody_reads_holds_up_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("disk.log");
    rustix::fs::mkfifoat(rustix::fs::CWD, &log, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR).unwrap();
    let reader = std::fs::File::options().read(true).write(true).open(&log).unwrap();
    let mut machine = Machine::start_in(folder, Setup::default());
    machine.run(2);
    rustix::io::ioctl_fionbio(&reader, true).unwrap();
    while rustix::io::write(&reader, &[b'x'; 4096]).is_ok() {}
    while rustix::io::write(&reader, b"x").is_ok() {}
    let refuse = || {
        let program = Some("/no/such/program".into());
        let reply = control::call(&machine.control(), Command::Upgrade { program }).unwrap();
        assert!(matches!(reply, Reply::Error { .. }));
    };
    (0..3).for_each(|_| refuse());
    let mut text = vec![0; 1 << 20];
    while rustix::io::read(&reader, &mut text[..]).is_ok() {}
    refuse();
    let mut said = String::new();
    wait_until("what was lost is said", || {
        if let Ok(count) = rustix::io::read(&reader, &mut text[..]) {
            said.push_str(&String::from_utf8_lossy(&text[..count]));
        }
        said.contains("3 lines of this log were dropped")
    });
    machine.run(2);
    machine.finish();
}
