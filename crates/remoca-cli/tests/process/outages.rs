//! The memory server is killed, stopped, restarted and resized while a guest reads, writes and evicts. Every answer
//! is compared with a model, and so are the images afterwards.

use super::support::machine::{Evictions, Machine, Setup};
use super::support::model::BLOCK;
use super::support::program::{Serve, Signal};
use super::support::wait_until;
use remoca_frontend::testing::{Command, Options, TestGuest};
use remoca_store::testing::hold_port;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

fn machine(setup: Setup) -> (Serve, Machine) {
    let setup = Setup { hedges: true, ..setup };
    let (server, mut machine) = Machine::start_with_server(tempfile::tempdir().unwrap(), setup);
    machine.evictions = Evictions::LYING;
    (server, machine)
}

fn is_connected(machine: &mut Machine) -> bool {
    machine.status().server.unwrap().connected
}

fn run_for(machine: &mut Machine, time: Duration) {
    let started = Instant::now();
    while started.elapsed() < time {
        machine.round();
    }
}

#[test]
fn the_server_is_killed_and_started_again() {
    let (mut server, mut machine) = machine(Setup { seed: 11, ..Setup::default() });
    machine.run_until_hits(200);
    for _ in 0..3 {
        server.program.kill();
        machine.run(20);
        machine.run_until("the loss is noticed", |machine| !is_connected(machine));
        machine.run(20);
        server.restart();
        machine.run_until("the VM process is back", is_connected);
        machine.run_until_hits(200);
    }
    machine.finish();
}

#[test]
fn a_server_on_tcp_is_killed_and_started_again() {
    // Held, so that no other program takes it between the two runs of the server.
    let (_held, port) = hold_port();
    let folder = tempfile::tempdir().unwrap();
    let mut server = Serve::start_at(folder.path(), "16M", &format!("tcp:127.0.0.1:{port}"));
    let setup = Setup { server: Some(server.address.clone()), hedges: true, seed: 12, ..Setup::default() };
    let mut machine = Machine::start_in(folder, setup);
    machine.run_until_hits(200);
    server.program.kill();
    machine.run_until("the loss is noticed", |machine| !is_connected(machine));
    machine.run(20);
    server.restart();
    machine.run_until_hits(200);
    machine.finish();
}

#[test]
fn the_server_stops_for_seconds_and_goes_on() {
    let (server, mut machine) = machine(Setup { sectors: vec![4096], seed: 13, ..Setup::default() });
    machine.run_until_hits(200);
    let mut short_stops = 0;
    for _ in 0..20 {
        let (lost, stopped) = (machine.counter("lost_sends"), Instant::now());
        server.program.signal(Signal::STOP);
        run_for(&mut machine, Duration::from_secs(2));
        server.program.signal(Signal::CONT);
        let took = stopped.elapsed();
        machine.run_until_hits(200);
        // A round may take seconds on a busy machine, and a server that is silent for 10 s is given up.
        if took < Duration::from_secs(5) {
            assert_eq!(machine.counter("lost_sends"), lost, "what waited on the way arrived");
            short_stops += 1;
        }
        if short_stops == 2 {
            break;
        }
    }
    assert_eq!(short_stops, 2, "this machine is too slow for a short stop");
    machine.finish();
}

#[test]
fn a_server_that_stays_stopped_is_given_up_and_found_again() {
    let (server, mut machine) = machine(Setup { seed: 14, ..Setup::default() });
    machine.run_until_hits(200);
    server.program.signal(Signal::STOP);
    machine.run_until("the server is given up", |machine| machine.counter("disconnections") > 0);
    machine.run(20);
    server.program.signal(Signal::CONT);
    machine.run_until_hits(200);
    machine.finish();
}

#[test]
fn the_cache_is_resized_and_turned_off_and_on() {
    let (server, mut machine) = machine(Setup { seed: 15, ..Setup::default() });
    machine.run_until_hits(200);
    for (change, pages) in [
        ("\"cache_bytes\":1048576", 256),
        ("\"cache_bytes\":4096", 1),
        ("\"cache_bytes\":8388608", 2048),
        ("\"enabled\":false", 0),
        ("\"cache_bytes\":2097152", 0),
        ("\"enabled\":true", 512),
        ("\"cache_bytes\":4194304,\"enabled\":true", 1024),
    ] {
        println!("{change}");
        machine.set(change);
        // The server allocates memory in pieces of 2 MiB.
        let given = u64::next_multiple_of(pages, 512);
        machine.run_until("the server gives or takes", |machine| {
            server.pages_given() == given && machine.status().cache.granted_bytes == pages * 4096
        });
        let status = machine.status();
        assert_eq!(status.cache.enabled, pages > 0);
        match pages {
            0 => {
                assert_eq!(status.cache.used_bytes, 0);
                let before = machine.counter("hit_blocks");
                machine.run(20);
                assert_eq!(machine.counter("hit_blocks"), before, "off is off");
            }
            1 => machine.run(20),
            _ => machine.run_until_hits(100),
        }
    }
    machine.finish();
}

#[test]
fn pages_that_still_fit_survive_a_smaller_size() {
    let (server, mut machine) = machine(Setup { seed: 16, ..Setup::default() });
    machine.evictions = Evictions::HONEST;
    machine.run_until("the cache is half full", |machine| machine.status().cache.used_bytes >= 2 * MIB);
    machine.set("\"cache_bytes\":2097152");
    // The answer to `set` comes before the server's; no eviction comes in between.
    assert!(machine.status().cache.used_bytes > 3 * MIB / 2);
    machine.run_until("the server takes", |_| server.pages_given() == 512);
    assert_eq!(machine.counter("fetch_missing") + machine.counter("fetch_wrong"), 0);
    machine.run_until_hits(200);
    assert_eq!(machine.counter("fetch_missing") + machine.counter("fetch_wrong"), 0, "all moved pages are there");
    machine.finish();
}

#[test]
fn the_vm_process_is_killed_and_the_guest_goes_on() {
    let (server, mut machine) = machine(Setup { sectors: vec![512, 4096], seed: 17, ..Setup::default() });
    for _ in 0..3 {
        machine.run(30);
        machine.program.kill();
        machine.restart();
        // The new process's counters start at zero.
        machine.pages_sent = 0;
    }
    machine.run_until_hits(200);
    assert_eq!(server.status()["pools"].as_array().unwrap().len(), 1, "each finds the pool of the one before");
    machine.finish();
}

/// A front end that disconnects takes its requests along, including those that wait for a server that does not
/// answer.
#[test]
fn the_guest_goes_and_comes_back_while_the_server_is_stopped() {
    let (server, mut machine) = machine(Setup { seed: 18, ..Setup::default() });
    machine.run_until_hits(200);
    for _ in 0..3 {
        server.program.signal(Signal::STOP);
        let disk = &mut machine.disks[0];
        let read = |number: usize| Command::Read { sector: (number * BLOCK / 512) as u64, length: BLOCK as u64 };
        let tickets: Vec<_> = (0..30).map(|number| (disk.guest.submit(0, read(number)), number)).collect();
        disk.guest.queues[0].kick();
        disk.guest.disconnect();
        disk.guest.connect(&disk.socket).unwrap();
        for (ticket, number) in tickets {
            assert_eq!(disk.guest.wait(ticket), 0);
            assert!(disk.guest.data(ticket, BLOCK) == disk.model.block(number), "block {number}");
        }
        server.program.signal(Signal::CONT);
        machine.run_until_hits(100);
    }
    machine.finish();
}

/// Submits three times as much data at once as there are buffers for.
#[test]
fn more_requests_than_buffers() {
    const LENGTH: usize = 4 << 20;
    for arguments in [vec![], vec!["--no-io-uring".into()]] {
        let arguments = [vec!["--buffers".into(), "8M".into()], arguments].concat();
        let (_server, mut machine) =
            machine(Setup { blocks: 8 * LENGTH / BLOCK, arguments, seed: 19, ..Setup::default() });
        machine.run_until_hits(50);
        let Machine { disks, random, .. } = &mut machine;
        let disk = &mut disks[0];
        disk.guest.disconnect();
        disk.guest = TestGuest::new(Options { queue_size: 16, data_bytes: LENGTH as u64, ..Options::default() });
        disk.guest.connect(&disk.socket).unwrap();
        for _ in 0..2 {
            let mut tickets = Vec::new();
            for number in 0..6 {
                random.fill(&mut disk.model.bytes[number * LENGTH..][..LENGTH]);
                let (sector, data) = ((number * LENGTH / 512) as u64, &disk.model.bytes[number * LENGTH..][..LENGTH]);
                tickets.push(disk.guest.submit(0, Command::Write { sector, data }));
                tickets.push(disk.guest.submit(0, Command::Flush));
            }
            disk.guest.queues[0].kick();
            assert!(tickets.into_iter().all(|ticket| disk.guest.wait(ticket) == 0));
            let read = |number: usize| Command::Read { sector: (number * LENGTH / 512) as u64, length: LENGTH as u64 };
            let tickets: Vec<_> = (0..8).map(|number| (disk.guest.submit(0, read(number)), number)).collect();
            disk.guest.queues[0].kick();
            for (ticket, number) in tickets {
                assert_eq!(disk.guest.wait(ticket), 0);
                assert!(disk.guest.data(ticket, LENGTH) == disk.model.bytes[number * LENGTH..][..LENGTH]);
            }
        }
        assert!(machine.status().memory.buffer_bytes <= 8 << 20);
        machine.finish();
    }
}

#[test]
fn a_vm_process_without_a_successor_gives_its_memory_back_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let server = Serve::start(folder.path(), "16M");
    let setup =
        Setup { server: Some(server.address.clone()), hedges: true, named: false, seed: 20, ..Setup::default() };
    let mut machine = Machine::start(setup);
    machine.run_until_hits(100);
    assert_eq!(server.pages_given(), 1024);
    machine.finish();
    // The grace time of a minute is for clients that vanish.
    wait_until("the memory is free", || server.pages_given() == 0);
    assert_eq!(server.status()["totals"]["expired"], 0);
}

/// Does everything that can be done to a server, in random order.
fn chaos(setup: Setup) {
    let (mut server, mut machine) = machine(setup);
    machine.run_until_hits(100);
    let mut is_alive = true;
    for step in 0..30 {
        match machine.random.below(8) {
            0 | 1 if is_alive => {
                server.program.kill();
                is_alive = false;
            }
            2 if is_alive => {
                server.program.terminate();
                is_alive = false;
            }
            0..=2 => {
                server.restart();
                is_alive = true;
            }
            3 | 4 if is_alive => {
                server.program.signal(Signal::STOP);
                let rounds = machine.random.below(20);
                machine.run(rounds);
                server.program.signal(Signal::CONT);
            }
            5 => drop(machine.set("\"enabled\":false")),
            6 => drop(machine.set("\"enabled\":true")),
            _ => {
                let pages = 1 + machine.random.below(2048);
                machine.set(&format!("\"enabled\":true,\"cache_bytes\":{}", pages * 4096));
            }
        }
        let rounds = machine.random.below(30);
        machine.run(rounds);
        assert!(machine.outcome.wrong == 0 && machine.outcome.errors == 0, "step {step}: {:#?}", machine.outcome);
    }
    if !is_alive {
        server.restart();
    }
    machine.set("\"enabled\":true,\"cache_bytes\":4194304");
    machine.run_until_hits(200);
    machine.finish();
}

#[test]
fn chaos_with_two_disks() {
    chaos(Setup { sectors: vec![512, 4096], blocks: 1024, seed: 21, ..Setup::default() });
}

#[test]
fn chaos_without_io_uring() {
    let arguments = vec!["--no-io-uring".into()];
    chaos(Setup { sectors: vec![4096, 512], blocks: 1024, arguments, seed: 22, ..Setup::default() });
}

#[test]
fn chaos_with_few_buffers() {
    let arguments = vec!["--buffers".into(), "1M".into()];
    chaos(Setup { arguments, seed: 23, ..Setup::default() });
}

/// A process without work makes no wakeups, even after the connection to the server was full for a while.
#[test]
fn a_process_without_work_sleeps() {
    let (server, mut machine) = machine(Setup { seed: 24, ..Setup::default() });
    machine.evictions = Evictions::HONEST;
    machine.run_until_hits(100);
    server.program.signal(Signal::STOP);
    machine.run_until("the way to the server is full", |machine| machine.program.waits_to_write());
    server.program.signal(Signal::CONT);
    machine.run_until_hits(100);
    wait_until("the server has everything", || !machine.program.waits_to_write());
    machine.program.wait_until_asleep();
    machine.finish();
}
