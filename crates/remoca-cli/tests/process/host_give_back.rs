//! `remoca host give-back` beside a daemon that shows its report and does nothing else: it is of another kind, ends, or has no end.

use super::support::program::{Program, REMOCA, Signal, command, expect_refusal, run};
use super::support::{folder, wait_until};
use remoca_host::record::{HostLock, Paths};
use remoca_host::request;
use remoca_host::socket::ReportSocket;
use remoca_protocol::host::HostReport;
use std::os::unix::fs::symlink;
use tempfile::TempDir;

const FAILURE: i32 = 1;

struct Idle {
    folder: TempDir,
    paths: Paths,
    socket: Option<ReportSocket>,
    lock: Option<HostLock>,
}

impl Idle {
    /// Starts one that divides this resource, or only watches.
    fn start(resource: &str, applies: bool) -> Self {
        let folder = folder();
        let paths = Paths::new(folder.path());
        let (lock, socket) = (HostLock::take(&paths.lock).unwrap(), ReportSocket::start(&paths.socket).unwrap());
        socket.show(&HostReport { resource: resource.into(), applies, ..HostReport::default() });
        Self { folder, paths, socket: Some(socket), lock: Some(lock) }
    }

    fn arguments(&self) -> [&str; 4] {
        ["host", "give-back", "--sockets", self.folder.path().to_str().unwrap()]
    }

    /// Begins the command, and returns when the daemon is asked.
    fn begin(&self) -> Program {
        let program = Program::start(command(REMOCA).args(self.arguments()), &self.folder.path().join("give-back.log"));
        wait_until("the daemon is asked", || request::is_there(&self.paths.request));
        program
    }
}

/// Returns what the program said when it has ended.
fn said(mut program: Program) -> String {
    wait_until("the command ends", || !program.is_running());
    program.log()
}

#[test]
fn a_daemon_that_moves_no_memory_of_guests_is_not_asked() {
    for (resource, applies, words) in [("cache", true, "divides caches"), ("local tier", false, "only watches")] {
        let daemon = Idle::start(resource, applies);
        let said = [words, "`systemctl stop remoca-host`", "repeat this command", "`systemctl start remoca-host`"];
        expect_refusal(&run(&daemon.arguments()), FAILURE, &said);
        assert!(!request::is_there(&daemon.paths.request));
    }
}

/// Whoever gives back has the same lock as a daemon.
#[test]
fn a_daemon_that_starts_meanwhile_is_told_who_may_have_the_lock() {
    let giving = Idle::start("local tier", true);
    let [_, _, sockets, folder] = giving.arguments();
    let refused = run(&["host", "--total", "16M", "--apply", sockets, folder]);
    expect_refusal(&refused, FAILURE, &["or a `remoca host give-back`, works here", "try again"]);
}

#[test]
fn a_daemon_that_ends_leaves_it_to_the_command() {
    let mut daemon = Idle::start("local tier", true);
    let program = daemon.begin();
    (daemon.socket, daemon.lock) = (None, None);
    let said = said(program);
    assert!(said.ends_with("\nNo guest is known to have lent memory.\n"), "{said}");
    assert!(!request::is_there(&daemon.paths.request));
    // One that was asked by somebody who is gone, and ended before it had a report.
    request::make(&daemon.paths.request).unwrap();
    assert!(run(&daemon.arguments()).status.success());
    assert!(!request::is_there(&daemon.paths.request));
}

#[test]
fn a_command_that_is_stopped_leaves_no_request_and_none_follows_a_link() {
    let daemon = Idle::start("local tier", true);
    let other = daemon.folder.path().join("other");
    std::fs::write(&other, "of somebody else").unwrap();
    symlink(&other, &daemon.paths.request).unwrap();
    for signal in [Signal::INT, Signal::TERM] {
        let program = daemon.begin();
        program.signal(signal);
        assert!(said(program).contains("stopped: the daemon that runs goes on with what it has begun"));
        assert!(!daemon.paths.request.exists());
    }
    assert_eq!(std::fs::read_to_string(other).unwrap(), "of somebody else");
}
