//! Memory servers that lie: no wrong byte reaches the guest, no request fails or hangs, memory stays bounded, and the
//! cache recovers with an honest answer.

use super::support::fake_server::{FakeServer, Lie};
use super::support::machine::{Machine, Setup};
use super::support::wait_until;
use std::time::Duration;

/// More than the process needs at any time, and far less than a server could send during a test.
const MEMORY_BYTES_MAX: u64 = 192 << 20;

fn machine(lie: Lie, seed: u64) -> (FakeServer, Machine) {
    let folder = tempfile::tempdir().unwrap();
    let server = FakeServer::start(&folder.path().join("server"), lie);
    // A small cache makes slots be reused, so that they have an old version.
    let setup = Setup { server: Some(server.address.clone()), cache: "2M", hedges: true, seed, ..Setup::default() };
    let mut machine = Machine::start_in(folder, setup);
    machine.server_is_honest = false;
    (server, machine)
}

/// Runs with an honest server, then lets it lie until it has told `lies` lies, then makes it honest again.
#[track_caller]
fn survive(lie: Lie, lies: usize, noticed_by: Option<&str>) {
    let (server, mut machine) = machine(Lie::None, lie as u64);
    machine.run_until_hits(100);
    server.begin_again(&machine);
    let noticed = |machine: &Machine| noticed_by.map_or(1, |counter| machine.counter(counter));
    let before = noticed(&machine);
    server.lie(lie);
    machine.run_until_count("the server lies", lies, || server.told());
    machine.run_until("its lies are noticed", |machine| noticed_by.is_none() || noticed(machine) > before);
    machine.expect_no_harm();
    server.lie(Lie::None);
    // Requests sent before would otherwise wait seconds for an answer.
    server.hang_up();
    machine.run_until_hits(100);
    assert!(machine.program.memory("VmHWM:") < MEMORY_BYTES_MAX);
    machine.finish();
}

#[test]
fn wrong_bytes() {
    survive(Lie::WrongByte, 200, Some("fetch_wrong"));
}

#[test]
fn the_page_of_another_slot() {
    survive(Lie::OtherSlot, 200, Some("fetch_wrong"));
}

#[test]
fn an_old_version_of_the_slot() {
    survive(Lie::OldVersion, 100, Some("fetch_wrong"));
}

#[test]
fn zeroes() {
    // Zeroes are what a page is whose memory was taken back: it is not there.
    survive(Lie::Zeroes, 200, Some("fetch_missing"));
}

#[test]
fn nothing() {
    survive(Lie::Silence, 1, Some("hedges_won"));
}

#[test]
fn it_has_lost_everything() {
    survive(Lie::NotFound, 200, Some("fetch_missing"));
}

#[test]
fn replies_to_the_wrong_request() {
    survive(Lie::WrongRequest, 1, Some("hedges_won"));
}

#[test]
fn every_reply_twice() {
    survive(Lie::Twice, 500, Some("fetch_unexpected"));
}

#[test]
fn replies_that_nobody_asked_for() {
    survive(Lie::Unasked, 500, Some("fetch_unexpected"));
}

#[test]
fn garbage() {
    survive(Lie::Garbage, 3, Some("disconnections"));
}

#[test]
fn a_frame_that_is_too_long() {
    survive(Lie::Oversize, 3, Some("disconnections"));
}

#[test]
fn the_connection_ends_inside_a_frame() {
    survive(Lie::MidFrame, 3, Some("disconnections"));
}

#[test]
fn frames_without_end() {
    survive(Lie::Flood, 500, None);
}

#[test]
fn errors_without_end() {
    let (server, mut machine) = machine(Lie::None, 1);
    machine.run_until_hits(100);
    server.lie(Lie::ErrorFlood);
    machine.run_until("the server floods", |_| server.told() >= 500);
    machine.run_until_hits(100);
    assert!(machine.program.log().len() < 1 << 16, "a server must not be able to fill the log");
    machine.finish();
}

#[test]
fn sizes_that_nobody_asked_for() {
    let (server, mut machine) = machine(Lie::OddSizes, 2);
    machine.run_until("the server lies", |_| server.told() >= 2);
    machine.run_until_hits(100);
    server.lie(Lie::None);
    machine.run_until("the size is right", |machine| machine.status().cache.granted_bytes == 2 << 20);
    machine.finish();
}

#[test]
fn impossible_figures_in_the_greeting() {
    let (server, mut machine) = machine(Lie::Boast, 3);
    machine.run_until_hits(100);
    for _ in 0..3 {
        let before = server.hang_up();
        machine.run_until("the VM process comes back", |_| server.connections() > before);
        machine.run_until_hits(100);
    }
    machine.finish();
}

#[test]
fn a_server_that_greets_and_hangs_up_is_not_stormed() {
    let (server, mut machine) = machine(Lie::HangUp, 4);
    machine.run_until("some more tries", |_| server.connections() >= 4);
    // The first pause is 0.1 s, and each later pause is twice the previous one.
    wait_until("its pauses are long", || machine.program.sleeps_for() > Duration::from_secs(1));
    server.lie(Lie::None);
    machine.run_until_hits(100);
    machine.finish();
}

#[test]
fn greetings_that_are_none() {
    for (lie, words) in [
        (Lie::OtherVersion, "speaks protocol versions 7 to 9, this program 1 to 1: upgrade the older one"),
        (Lie::UnaskedVersion, "is no memory server"),
        (Lie::GarbageGreeting, "is no memory server"),
        (Lie::NoGreeting, "closed the connection at once. Is `remoca serve` running there, or is it behind a tunnel"),
        (Lie::Mute, "does not answer"),
    ] {
        let (server, mut machine) = machine(lie, lie as u64);
        let error = |machine: &Machine| machine.status().server.unwrap().error.unwrap_or_default();
        machine.run_until("the error is known", |machine| !error(machine).is_empty());
        let said = error(&machine);
        assert!(said.contains(words) && said.contains(&server.address), "{said}");
        assert!(!machine.status().server.unwrap().connected);
        server.lie(Lie::None);
        server.hang_up();
        machine.run_until_hits(100);
        assert_eq!(machine.status().server.unwrap().error, None);
        machine.finish();
    }
}
