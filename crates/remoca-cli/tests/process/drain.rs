//! Memory servers that are taken out of the list: what they have is read from them, and then they are left. The guest reads
//! meanwhile; every answer is checked.

use super::support::machine::{Evictions, Machine, Setup};
use super::support::program::{Serve, expect_refusal, run};
use super::support::{folder, wait_until};
use super::upgrade;
use remoca_protocol::control::PoolStatus;
use std::path::Path;

/// Starts a memory server with a folder of its own.
fn serve(folder: &Path, name: &str) -> Serve {
    let folder = folder.join(name);
    std::fs::create_dir(&folder).unwrap();
    Serve::start_with(&folder, "16M", &["--grace", "3600s"])
}

/// Starts two servers, and a machine with a cache at the first. Nothing is written while the cache is on, so that each page in
/// it is of use until it is read.
fn machine(seed: u64) -> (Machine, [Serve; 2]) {
    let folder = folder();
    let servers = ["a", "b"].map(|name| serve(folder.path(), name));
    let setup = Setup { server: Some(servers[0].address.clone()), seed, ..Setup::default() };
    let mut machine = Machine::start_in(folder, setup);
    machine.evictions = Evictions::HONEST;
    machine.set("\"enabled\":false");
    machine.run(150);
    machine.set("\"enabled\":true");
    machine.read_until_hits(500);
    (machine, servers)
}

/// Sets the list of servers. Returns what `remoca set` says.
#[track_caller]
fn set(machine: &Machine, servers: &[&Serve], options: &[&str]) -> String {
    let control = machine.control();
    let mut words = vec!["set", control.to_str().unwrap()];
    servers.iter().for_each(|server| words.extend(["--server", &server.address]));
    words.extend(options);
    let output = run(&words);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn pool_at(machine: &Machine, server: &Serve) -> Option<PoolStatus> {
    machine.status().pools.into_iter().find(|pool| pool.server == server.address)
}

fn is_draining(machine: &Machine, server: &Serve) -> bool {
    pool_at(machine, server).is_some_and(|pool| pool.state == "draining")
}

/// Reads all disks until `done` returns true.
#[track_caller]
fn read_until(machine: &mut Machine, what: &str, mut done: impl FnMut(&Machine) -> bool) {
    let mut is_done = false;
    wait_until(what, || {
        machine.read_everything();
        is_done = done(machine);
        is_done
    });
}

/// Expects that a server which was drained has its memory back, and that nothing is wrong.
#[track_caller]
fn expect_left(machine: &mut Machine, server: &Serve) {
    wait_until("it has its memory back", || server.pages_given() == 0);
    assert_eq!(server.status()["totals"]["expired"], 0, "by a BYE");
    assert!(pool_at(machine, server).is_none());
    machine.expect_no_harm();
}

#[test]
fn a_donor_is_drained_by_reads_and_then_left() {
    let (mut machine, servers) = machine(401);
    let hits = servers[0].status()["totals"]["gets"].as_u64().unwrap();
    let said = set(&machine, &[&servers[1]], &[]);
    let lines: Vec<_> = said.lines().collect();
    assert_eq!(lines[0], format!("test: servers {}", servers[1].address));
    assert!(lines[1].starts_with(&format!("{}: draining, ", servers[0].address)), "{said}");
    assert!(lines[2].contains("ten minutes at most") && lines[2].contains("--now"), "{said}");
    let pool = pool_at(&machine, &servers[0]).unwrap();
    assert!(pool.state == "draining" && pool.used_bytes > 256 << 10, "{pool:?}");
    let control = machine.control();
    let details = String::from_utf8(run(&["status", control.to_str().unwrap(), "-v"]).stdout).unwrap();
    assert!(details.contains(&format!("{}: draining, ", servers[0].address)), "{details}");

    read_until(&mut machine, "it is left", |machine| pool_at(machine, &servers[0]).is_none());
    let read = servers[0].status()["totals"]["gets"].as_u64().unwrap() - hits;
    assert!(read * 4096 >= pool.used_bytes * 9 / 10, "{read} pages were read of {} bytes", pool.used_bytes);
    expect_left(&mut machine, &servers[0]);
    assert!(machine.program.log().contains("it is not in the list any more"), "{}", machine.program.log());
    assert_eq!((machine.counter("disconnections"), machine.counter("fetch_missing")), (0, 0));
    wait_until("the other one has all", || machine.status().cache.granted_bytes == 4 << 20);
    machine.run_until_hits(200);
    machine.finish();
}

#[test]
fn a_donor_that_is_to_be_left_now_is_left_at_once() {
    let (mut machine, servers) = machine(402);
    set(&machine, &[&servers[1]], &[]);
    assert!(is_draining(&machine, &servers[0]));
    // Also one that is drained already.
    let said = set(&machine, &[&servers[1]], &["--now"]);
    assert_eq!(said, format!("test: servers {}\n", servers[1].address));
    expect_left(&mut machine, &servers[0]);
    let said = set(&machine, &[&servers[0]], &["--now"]);
    assert_eq!(said, format!("test: servers {}\n", servers[0].address));
    expect_left(&mut machine, &servers[1]);
    machine.run_until_hits(200);
    machine.finish();
}

#[test]
fn a_donor_that_is_named_again_keeps_its_pool() {
    let (mut machine, servers) = machine(403);
    let before = pool_at(&machine, &servers[0]).unwrap();
    for _ in 0..3 {
        set(&machine, &[&servers[1]], &[]);
        assert!(is_draining(&machine, &servers[0]));
        let said = set(&machine, &[&servers[0], &servers[1]], &[]);
        assert!(!said.contains("draining"), "{said}");
        let pool = pool_at(&machine, &servers[0]).unwrap();
        assert_eq!((pool.state.as_str(), &pool.generation), ("connected", &before.generation));
    }
    machine.read_until_hits(200);
    machine.run_until_hits(200);
    assert_eq!(machine.counter("disconnections"), 0);
    machine.finish();
}

#[test]
fn a_mistake_in_an_address_costs_nothing() {
    let (mut machine, servers) = machine(406);
    let before = pool_at(&machine, &servers[0]).unwrap();
    let control = machine.control();
    let mistaken = |options: &[&str]| {
        run(&[&["set", control.to_str().unwrap(), "--server", "unix:/no/such/server"], options].concat())
    };
    let is_as_before = |machine: &Machine| {
        let status = machine.status();
        let servers: Vec<_> = status.servers.iter().map(|server| &server.endpoint).collect();
        assert_eq!(servers, [&before.server]);
        let pool = &status.pools[0];
        assert_eq!((pool.state.as_str(), &pool.generation), ("connected", &before.generation));
    };
    let words = ["the cache would be lost: unix:/no/such/server: ", "running there? Nothing was changed"];
    expect_refusal(&mistaken(&["--now"]), 1, &words);
    is_as_before(&machine);
    let said = String::from_utf8(mistaken(&[]).stdout).unwrap();
    let lines: Vec<_> = said.lines().collect();
    assert!(lines[1].starts_with(&format!("{}: draining, ", servers[0].address)), "{said}");
    assert!(lines[2].starts_with("unix:/no/such/server: ") && lines[2].contains("No such file"), "{said}");
    set(&machine, &[&servers[0]], &[]);
    is_as_before(&machine);
    // One that answers is enough.
    let both = [
        "set",
        control.to_str().unwrap(),
        "--now",
        "--server",
        "unix:/no/such/server",
        "--server",
        &servers[1].address,
    ];
    assert!(run(&both).status.success());
    expect_left(&mut machine, &servers[0]);
    machine.run_until_hits(200);
    machine.finish();
}

#[test]
fn a_donor_that_is_killed_while_it_is_drained_costs_its_own_pages() {
    let (mut machine, mut servers) = machine(404);
    set(&machine, &[&servers[1]], &[]);
    // What is read before that is lost to it.
    wait_until("the other one is there", || machine.status().pools.len() == 2);
    machine.run_until("the other one has some", |machine| {
        pool_at(machine, &servers[1]).is_some_and(|pool| pool.used_bytes >= 32 << 10)
    });
    assert!(pool_at(&machine, &servers[0]).unwrap().used_bytes > 128 << 10, "most is not read yet");
    servers[0].program.kill();
    let kept = pool_at(&machine, &servers[1]).unwrap();
    wait_until("it is given up", || {
        machine.status().cache.granted_bytes == 4 << 20 && machine.status().pools.len() == 1
    });
    let now = pool_at(&machine, &servers[1]).unwrap();
    assert!(now.used_bytes >= kept.used_bytes && now.generation == kept.generation, "{kept:?} {now:?}");
    // Nobody comes back to it.
    servers[0].restart();
    machine.read_until_hits(200);
    machine.run_until_hits(200);
    assert_eq!(servers[0].pages_given(), 0);
    machine.finish();
}

#[test]
fn an_upgrade_and_a_death_do_not_end_a_drain() {
    let (mut machine, servers) = machine(405);
    machine.outlives = true;
    let before = pool_at(&machine, &servers[0]).unwrap();
    set(&machine, &[&servers[1]], &[]);
    wait_until("the other one is there", || machine.status().pools.len() == 2);

    let mut child = upgrade::begin(&machine.control(), None);
    wait_until("the program is another one", || child.try_wait().unwrap().is_some());
    let (done, said) = upgrade::end(child);
    assert!(done, "{said}");
    for what in ["upgraded", "killed"] {
        wait_until(what, || is_draining(&machine, &servers[0]));
        let status = machine.status();
        let endpoints: Vec<_> = status.servers.iter().map(|server| &server.endpoint).collect();
        assert_eq!((status.started.as_str(), endpoints), ("warm", vec![&servers[1].address]), "{what}");
        let pool = pool_at(&machine, &servers[0]).unwrap();
        assert_eq!(pool.generation, before.generation, "{what}");
        assert!(pool.used_bytes >= before.used_bytes * 8 / 10, "{what}: {} of {}", pool.used_bytes, before.used_bytes);
        if what == "upgraded" {
            machine.settle();
            machine.program.kill();
            machine.restart();
        }
    }
    machine.pages_sent = machine.counter("evictions_reported");
    read_until(&mut machine, "it is left", |machine| pool_at(machine, &servers[0]).is_none());
    expect_left(&mut machine, &servers[0]);
    machine.run_until_hits(200);
    machine.finish();
}
