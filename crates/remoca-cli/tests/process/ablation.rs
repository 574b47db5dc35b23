//! What the two checks are for: without one of them, the lies that the other tests survive reach the guest.
//!
//! The program is built once more with the feature `ablation`, in a target directory of its own.

use super::support::fake_server::{FakeServer, Lie, is_trusted};
use super::support::machine::{Evictions, Machine, Setup};
use super::support::program::Serve;
use super::support::wait_until;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Builds and returns the program that can leave out a rule.
pub fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let built = Command::new(cargo)
            .args(["build", "--quiet", "--locked", "--package", "remoca-cli", "--bin", "remoca-ablation"])
            .args(["--features", "ablation,testing", "--target-dir"])
            .arg(target)
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .status();
        assert!(built.expect("cargo can be run").success(), "the program with ablation does not build");
        target.join("debug/remoca-ablation")
    })
}

fn setup(rule: Option<&str>, server: &str, seed: u64) -> Setup {
    let arguments = rule.iter().flat_map(|rule| ["--omit-rule".into(), (*rule).into()]).collect();
    Setup { binary: binary().into(), server: Some(server.into()), cache: "2M", arguments, seed, ..Setup::default() }
}

/// Starts a machine whose memory server lies. The machine's guest is honest.
fn with_lying_server(rule: Option<&str>, lie: Lie, seed: u64) -> (FakeServer, Machine) {
    let folder = tempfile::tempdir().unwrap();
    let server = FakeServer::start(&folder.path().join("server"), Lie::None);
    let mut machine = Machine::start_in(folder, setup(rule, &server.address, seed));
    machine.server_is_honest = false;
    machine.run_until_hits(100);
    assert_eq!(machine.outcome.wrong, 0, "without a lie there is nothing to check: {:?}", machine.outcome);
    server.begin_again(&machine);
    server.lie(lie);
    (server, machine)
}

fn with_lying_guest(rule: Option<&str>, seed: u64) -> (Serve, Machine) {
    let folder = tempfile::tempdir().unwrap();
    let server = Serve::start(folder.path(), "16M");
    let mut machine = Machine::start_in(folder, setup(rule, &server.address, seed));
    machine.evictions = Evictions::LYING;
    (server, machine)
}

#[track_caller]
fn expect_harm(machine: &mut Machine, server: Option<&FakeServer>) {
    wait_until("wrong bytes reach the guest", || {
        if let Some(server) = server.filter(|_| !is_trusted(machine)) {
            // If the breaker kept reads away from the server, it could lie no more.
            server.begin_again(machine);
        }
        machine.round();
        machine.outcome.wrong > 0
    });
    println!("{:#?}", machine.outcome);
}

#[test]
fn without_the_check_at_fetch_the_guest_reads_what_the_server_likes() {
    for lie in [Lie::WrongByte, Lie::OtherSlot, Lie::OldVersion, Lie::Zeroes, Lie::WrongRequest] {
        let (server, mut machine) = with_lying_server(Some("fetch-check"), lie, 41);
        expect_harm(&mut machine, Some(&server));
    }
}

#[test]
fn without_the_check_at_admission_the_guest_reads_what_it_wrote_to_the_port() {
    for evictions in [
        Evictions { stale: 0, foreign: 0, ..Evictions::LYING },
        Evictions { stale: 0, garbage: 0, ..Evictions::LYING },
        Evictions { garbage: 0, foreign: 0, ..Evictions::LYING },
    ] {
        let (_server, mut machine) = with_lying_guest(Some("admission-check"), 42);
        machine.evictions = evictions;
        expect_harm(&mut machine, None);
    }
}

/// Tests the same program with all rules in force, and each check without the other check's liar. So the harm above
/// comes from the omitted rule.
#[test]
fn with_all_rules_the_same_program_does_no_harm() {
    let (server, mut machine) = with_lying_server(None, Lie::WrongByte, 41);
    machine.run_until_count("the server lies", 200, || server.told());
    machine.finish();
    let (_server, mut machine) = with_lying_guest(None, 42);
    machine.run_until_hits(500);
    machine.finish();
    let (_server, mut machine) = with_lying_guest(Some("fetch-check"), 43);
    machine.run_until_hits(500);
    machine.finish();
}
