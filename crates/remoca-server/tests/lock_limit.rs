//! Memory that may not be locked. This is a separate program because it starts a process. Between fork and exec, that
//! process holds copies of other tests' open files, including listening sockets.

mod common;

use std::process::Command;

use common::{Client, config, start, token};
use remoca_server::{Config, PageLocking, Server};
use rustix::process::{Resource, Rlimit, setrlimit};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

/// Runs the test below in a process of its own, because the limit and the capability belong to a whole process.
#[test]
fn memory_that_cannot_be_locked_is_refused() {
    let child = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "under_a_lock_limit", "--ignored", "--nocapture"])
        .output()
        .expect("this program runs");
    let output = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success(), "{output}{}", String::from_utf8_lossy(&child.stderr));
    assert!(output.contains("1 passed"), "{output}");
}

#[test]
#[ignore = "changes its process; run by memory_that_cannot_be_locked_is_refused"]
fn under_a_lock_limit() {
    let limit = Some(1 << 20);
    setrlimit(Resource::Memlock, Rlimit { current: limit, maximum: limit }).expect("a lower limit is always possible");
    // Otherwise root may lock any amount.
    let all = capabilities(None).expect("what may this thread do");
    let fewer = CapabilitySets { effective: all.effective.difference(CapabilitySet::IPC_LOCK), ..all };
    set_capabilities(None, fewer).expect("a capability can be given up");

    let locked = Config { locking: PageLocking::Locked, ..config() };
    let refusal = Server::start(locked).expect_err("this must be refused").to_string();
    for word in ["8 MiB", "RLIMIT_MEMLOCK", "is 1 MiB", "ulimit -l", "LimitMEMLOCK", "--no-lock"] {
        assert!(refusal.contains(word), "`{word}` is missing in: {refusal}");
    }
    // Without locking, the server starts.
    let server = start(Config { locking: PageLocking::Unlocked, ..config() });
    Client::with_pages(&server, token(1), 2048).barrier();
    assert!(!server.status().locked);
}
