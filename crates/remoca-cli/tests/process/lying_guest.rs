//! Guests that lie to their eviction port: garbage, other guests' pages and old versions of their own blocks are never
//! served, and nothing that is written to the port does any harm.

use super::support::machine::{Evictions, Machine, Setup};
use super::support::model::BLOCK;
use super::support::program::Serve;
use remoca_frontend::testing::{Command, Options, TestGuest};

const OK: u8 = 0;
const IO_ERROR: u8 = 1;
const UNSUPPORTED: u8 = 2;

fn machine(seed: u64) -> (Serve, Machine) {
    Machine::start_with_server(tempfile::tempdir().unwrap(), Setup { seed, ..Setup::default() })
}

#[test]
fn garbage_foreign_pages_and_old_versions() {
    let (_server, mut machine) = machine(31);
    machine.evictions = Evictions::LYING;
    machine.run_until_hits(1000);
    assert!(machine.counter("evictions_unmatched") > machine.pages_sent / 4, "the lies were told");
    machine.finish();
}

#[test]
fn nothing_but_lies() {
    let (_server, mut machine) = machine(32);
    // Old contents may be the present content of another block.
    machine.evictions = Evictions { current: 0, stale: 0, zero: 0, ..Evictions::LYING };
    machine.run_until("the agent is told to send less", |machine| machine.status().port.unwrap().advice > 0);
    assert_eq!(machine.counter("evictions_unmatched"), machine.pages_sent);
    machine.evictions = Evictions::HONEST;
    machine.run_until_hits(100);
    machine.run_until("everything is asked for again", |machine| machine.status().port.unwrap().advice == 0);
    machine.finish();
}

#[test]
fn requests_of_odd_sizes() {
    let (_server, mut machine) = machine(33);
    machine.run_until_hits(100);
    let reported = machine.counter("evictions_reported");
    let end = 64 << 20;
    let page = machine.random.bytes(BLOCK);
    let refused = [
        Command::Write { sector: 8, data: &page[..512] },
        Command::Write { sector: 9, data: &page },
        Command::Write { sector: end / 512, data: &page },
        Command::Write { sector: u64::MAX, data: &page },
        Command::Read { sector: 1, length: 4096 },
        Command::Read { sector: end / 512 - 8, length: 8192 },
    ];
    for command in refused {
        assert_eq!(machine.port.run(0, command), IO_ERROR, "{command:?}");
    }
    for command in [Command::Discard(&[(8, 8, 0)]), Command::WriteZeroes(&[(8, 8, 0)])] {
        assert_eq!(machine.port.run(0, command), UNSUPPORTED, "{command:?}");
    }
    assert_eq!(machine.port.run(0, Command::Flush), OK);
    assert_eq!(machine.counter("evictions_reported"), reported, "what was refused was not looked at");
    machine.run_until_hits(100);
    machine.finish();
}

/// Tests requests of 4 MiB and more, many of them at once.
#[test]
fn requests_of_huge_sizes() {
    let (_server, mut machine) = machine(34);
    machine.run_until_hits(100);
    let options = Options { queue_size: 8, data_bytes: 6 << 20, ..Options::default() };
    machine.port.disconnect();
    machine.port = TestGuest::new(options);
    machine.port.connect(&machine.folder.path().join("port")).unwrap();
    for length in [4 << 20, 5 << 20, 6 << 20] {
        let pages = machine.random.bytes(length);
        let submit = |port: &mut TestGuest| port.submit(0, Command::Write { sector: 8, data: &pages });
        let tickets: Vec<_> = (0..8).map(|_| submit(&mut machine.port)).collect();
        machine.port.queues[0].kick();
        for ticket in tickets {
            assert_eq!(machine.port.wait(ticket), OK);
        }
        machine.pages_sent += 8 * (length / BLOCK) as u64;
    }
    machine.run_until_hits(100);
    machine.finish();
}

#[test]
fn statistics_without_sense() {
    let (_server, mut machine) = machine(35);
    let mut page = vec![0xff; BLOCK];
    page[..8].copy_from_slice(b"REMOCAST");
    assert_eq!(machine.send_to_port(0, &page), OK);
    assert_eq!(machine.status().port.unwrap().agent, None, "a version that nobody knows");
    page[8..12].copy_from_slice(&1_u32.to_le_bytes());
    assert_eq!(machine.send_to_port(0, &page), OK);
    let agent = machine.status().port.unwrap().agent.unwrap();
    assert_eq!([agent.captured, agent.lost, agent.written], [u64::MAX; 3]);
    // Garbage in place of the statistics changes nothing, and does not count as an evicted page either.
    let garbage = machine.random.bytes(BLOCK);
    assert_eq!(machine.send_to_port(0, &garbage), OK);
    assert_eq!(machine.status().port.unwrap().agent, Some(agent));
    // Pages after the statistics in the same request do count.
    let mut batch = page.clone();
    batch.extend_from_slice(&garbage);
    assert_eq!(machine.send_to_port(0, &batch), OK);
    machine.pages_sent += 1;
    let shown = super::support::program::run(&["status", machine.control().to_str().unwrap(), "-v"]);
    assert!(shown.status.success());
    assert!(String::from_utf8_lossy(&shown.stdout).contains("18446744073709551615 captured"));
    machine.run_until_hits(100);
    machine.finish();
}

#[test]
fn what_the_port_reads_as() {
    let (_server, mut machine) = machine(36);
    machine.run(5);
    let read = |machine: &mut Machine, block: u64, length: u64| {
        let ticket = machine.port.submit(0, Command::Read { sector: block * 8, length });
        machine.port.queues[0].kick();
        assert_eq!(machine.port.wait(ticket), OK);
        machine.port.data(ticket, length as usize)
    };
    let page = read(&mut machine, 0, 8192);
    assert_eq!(&page[..8], b"REMOCAEP");
    let word = |at: usize| u64::from_le_bytes(page[at..at + 8].try_into().unwrap());
    let counters = machine.status().counters;
    assert_eq!(word(16), machine.pages_sent);
    assert_eq!(word(32), counters["evictions_unmatched"]);
    assert_eq!(word(40), counters["evictions_dropped"]);
    assert_eq!(word(24) + word(32) + word(40), machine.pages_sent);
    assert!(page[64..].iter().all(|byte| *byte == 0));
    assert!(read(&mut machine, 9, 65536).iter().all(|byte| *byte == 0));
    machine.finish();
}
