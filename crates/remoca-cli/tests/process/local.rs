//! A pool in memory of this host, which the VM process reads and writes by itself: it goes on while its server is stopped,
//! killed or restarted, and is there for a successor of the VM process. The guest reads, writes and evicts meanwhile; every
//! answer is checked.

use super::support::machine::{Evictions, Machine, Setup};
use super::support::program::{REMOCA, Serve, Signal, command, run};
use super::support::{folder, wait_until};
use super::upgrade;
use remoca_io::fake_manager::FakeManager;
use remoca_protocol::TAKE_BACK_MS;
use remoca_protocol::control::PoolStatus;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

fn machine(folder: tempfile::TempDir, server: &Serve, seed: u64) -> Machine {
    let mut machine =
        Machine::start_in(folder, Setup { server: Some(server.local_address()), seed, ..Setup::default() });
    machine.evictions = Evictions::LYING;
    machine.run_until_hits(200);
    machine
}

#[track_caller]
fn pool(machine: &Machine) -> PoolStatus {
    let mut pools = machine.status().pools;
    assert!(pools.len() == 1 && pools[0].is_mapped, "{pools:?}");
    pools.remove(0)
}

#[track_caller]
fn run_until_state(machine: &mut Machine, state: &str) {
    machine.run_until("the server is noticed", |machine| pool(machine).state == state);
}

#[test]
fn hits_go_on_while_the_server_is_stopped_and_killed() {
    let folder = tempfile::tempdir().unwrap();
    let mut server = Serve::start(folder.path(), "16M");
    let mut machine = machine(folder, &server, 171);
    let first = pool(&machine);
    assert_eq!((first.state.as_str(), first.granted_bytes), ("connected", 4 << 20));
    assert_eq!(first.server, server.local_address());
    let totals = server.status()["totals"].clone();
    assert_eq!((totals["sends"].as_u64(), totals["gets"].as_u64()), (Some(0), Some(0)), "no page goes over the socket");

    server.program.signal(Signal::STOP);
    machine.run_until_hits(500);
    assert_eq!(pool(&machine).state, "connected");
    // One that does not answer counts as away.
    machine.set("\"cache_bytes\":3145728");
    machine.run_until("it is smaller", |machine| machine.status().cache.granted_bytes == 3 << 20);
    assert_eq!(pool(&machine).state, "away");
    machine.run_until_hits(100);
    server.program.signal(Signal::CONT);
    run_until_state(&mut machine, "connected");
    wait_until("the server hears what was given up", || server.status()["pools"][0]["npages"] == 768);
    server.program.kill();
    run_until_state(&mut machine, "away");
    machine.run_until_hits(500);
    assert_eq!(pool(&machine).generation, first.generation);

    // Its size can only become smaller.
    let smaller = machine.set("\"cache_bytes\":2097152");
    assert_eq!(smaller.cache.wanted_bytes, 2 << 20);
    machine.run_until("it is smaller", |machine| machine.status().cache.granted_bytes == 2 << 20);
    machine.run_until_hits(100);
    machine.set("\"cache_bytes\":4194304");
    machine.run_until_hits(100);
    assert_eq!((machine.status().cache.granted_bytes, pool(&machine).state.as_str()), (2 << 20, "away"));
    assert_eq!(machine.counter("disconnections"), 0);

    // Without a service manager, the server comes back with another pool.
    server.restart();
    machine.run_until("another pool takes its place", |machine| {
        machine.status().pools.iter().any(|pool| pool.generation != first.generation && pool.state == "connected")
    });
    machine.run_until_hits(200);
    let second = pool(&machine);
    assert_eq!(second.granted_bytes, 4 << 20);
    assert!(machine.program.log().contains("came back without the pool"), "{}", machine.program.log());
    assert_eq!((machine.counter("fetch_wrong"), second.pages_taken_back), (0, 0));
    machine.finish();
}

/// On a host whose memory is slow to populate, more than a server makes usable within the five seconds that its client waits for an
/// answer. Takes 10 GiB of this host.
#[test]
#[ignore = "long: cargo xtask test-long"]
fn a_local_tier_of_many_gigabytes_gets_its_memory() {
    let folder = tempfile::tempdir().unwrap();
    let server = Serve::start(folder.path(), "11G");
    let mut machine = machine(folder, &server, 175);
    let said = run(&["set", machine.control().to_str().unwrap(), "--cache", "10G"]);
    let said = String::from_utf8_lossy(&said.stdout);
    let is_told =
        ["10G, all granted", "are granted so far: the rest is on its way"].iter().any(|text| said.contains(text));
    assert!(is_told, "{said}");
    machine.run_until("all is granted", |machine| machine.status().cache.granted_bytes == 10 << 30);
    assert_eq!((machine.counter("disconnections"), pool(&machine).state.as_str()), (0, "connected"));
    machine.run_until_hits(100);
    machine.finish();
}

#[test]
fn a_killed_server_that_its_manager_restarts_goes_on_with_the_pool() {
    let manager = Arc::new(FakeManager::start());
    let folder = tempfile::tempdir().unwrap();
    let mut server = Serve::start_under(Arc::clone(&manager), folder.path(), "16M");
    let mut machine = machine(folder, &server, 172);
    let first = pool(&machine);
    wait_until("the manager has the pool", || manager.names().len() == 2);
    for _ in 0..3 {
        server.program.kill();
        run_until_state(&mut machine, "away");
        machine.run_until_hits(100);
        machine.set("\"cache_bytes\":2097152");
        machine.run_until("it is smaller", |machine| machine.status().cache.granted_bytes == 2 << 20);
        server.restart();
        run_until_state(&mut machine, "connected");
        wait_until("the server hears what was given up", || server.status()["pools"][0]["npages"] == 512);
        machine.set("\"cache_bytes\":4194304");
        machine.run_until("it is larger", |machine| machine.status().cache.granted_bytes == 4 << 20);
        machine.run_until_hits(100);
        assert_eq!(pool(&machine).generation, first.generation);
    }
    assert_eq!((machine.counter("disconnections"), machine.counter("fetch_wrong")), (0, 0));
    assert_eq!(pool(&machine).pages_taken_back, 0);
    machine.finish();
}

#[test]
fn a_killed_process_finds_its_pool_again() {
    let folder = folder();
    let server = Serve::start(folder.path(), "16M");
    let mut machine = machine(folder, &server, 173);
    let first = pool(&machine);
    for _ in 0..3 {
        machine.settle();
        let used = machine.status().cache.used_bytes;
        machine.program.kill();
        machine.restart();
        machine.pages_sent = 0;
        wait_until("the pool is found again", || machine.status().server.is_some_and(|server| server.connected));
        let status = machine.status();
        assert_eq!((status.started.as_str(), status.cold_reason), ("warm", None), "{}", machine.program.log());
        assert!(status.cache.used_bytes * 10 >= used * 9, "{} of {used} bytes", status.cache.used_bytes);
        assert_eq!(pool(&machine).generation, first.generation);
        machine.run_until_hits(100);
        assert_eq!(machine.counter("fetch_wrong"), 0);
    }
    machine.finish();
}

#[test]
fn an_upgrade_passes_the_pool_on_though_its_server_is_gone() {
    let folder = tempfile::tempdir().unwrap();
    let mut server = Serve::start(folder.path(), "16M");
    let mut machine = machine(folder, &server, 174);
    machine.outlives = true;
    let first = pool(&machine);
    for is_gone in [false, true, true] {
        if is_gone && machine.status().pools[0].state == "connected" {
            server.program.kill();
            run_until_state(&mut machine, "away");
        }
        let used = machine.status().cache.used_bytes;
        let (done, said) = upgrade::upgrade_in_time(&mut machine, || None);
        assert!(done, "{said}");
        let state = if is_gone { "away" } else { "connected" };
        machine.run_until("the pool is found again", |machine| {
            machine.status().pools.first().is_some_and(|pool| pool.state == state)
        });
        machine.pages_sent = machine.counter("evictions_reported");
        let status = machine.status();
        assert!(status.cache.used_bytes * 10 >= used * 8, "{} of {used} bytes", status.cache.used_bytes);
        let now = pool(&machine);
        assert_eq!((now.generation.as_str(), now.state.as_str()), (first.generation.as_str(), state));
        machine.run_until_hits(100);
    }
    server.restart();
    machine.run_until("another pool takes its place", |machine| {
        machine.status().pools.iter().any(|pool| pool.generation != first.generation)
    });
    machine.run_until_hits(100);
    machine.finish();
}

#[test]
fn memory_that_the_server_takes_back_costs_the_pages_in_it() {
    // The process has a tenth of a second to answer, and may get no processor in that time.
    assert!((0..20).any(|_| a_session_outlives_what_is_taken_back()), "it is never in time");
}

/// Returns whether the process answered in time, so that it kept the rest of its pool.
fn a_session_outlives_what_is_taken_back() -> bool {
    let folder = tempfile::tempdir().unwrap();
    let server = Serve::start(folder.path(), "16M");
    let control = folder.path().join("server.ctl");
    let mut machine = machine(folder, &server, 175);
    let first = pool(&machine);
    let name = server.status()["pools"][0]["token"].as_str().unwrap().to_owned();
    for (size, pages) in [("2M", 512), ("1M", 256)] {
        let begun = Instant::now();
        let mut child = command(REMOCA);
        child.args(["take-back", &name, size, "--server"]).arg(&control);
        let mut child = child.stdout(Stdio::piped()).spawn().unwrap();
        while child.try_wait().unwrap().is_none() {
            machine.round();
        }
        let (done, said) = upgrade::end(child);
        assert!(done, "{said}");
        if said.contains("ended") {
            assert!(begun.elapsed() >= Duration::from_millis(TAKE_BACK_MS), "it had time left: {said}");
            // The guest reads what is right all the same.
            machine.run(20);
            return false;
        }
        assert_eq!(server.status()["pools"][0]["npages"], pages);
        machine.run_until("the cache is smaller", |machine| {
            machine.status().cache.granted_bytes == pages * 4096 && machine.status().pools.len() == 1
        });
        machine.run_until_hits(100);
        assert_eq!(pool(&machine).generation, first.generation);
    }
    assert_eq!(machine.counter("fetch_wrong"), 0);
    let sessions = ["connections", "disconnections", "pools_cut"].map(|name| machine.counter(name));
    assert_eq!(sessions, [1, 0, 2], "the session goes on");
    // All of it: there is no pool of this generation any more.
    let output = run(&["take-back", &name, "0", "--server", control.to_str().unwrap()]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    machine.run(20);
    assert_eq!(machine.counter("fetch_wrong"), 0);
    machine.finish();
    true
}
