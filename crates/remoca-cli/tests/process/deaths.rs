//! A fault of this program that recurs at each start. The third death within a minute sets the previous process's
//! index aside, the sixth the cache. A kill from outside is not counted.

use super::ablation::binary;
use super::support::folder;
use super::support::machine::{Machine, Setup};
use super::support::program::{Serve, run};
use remoca_frontend::testing::Command;

#[test]
fn a_process_that_dies_again_and_again_ends_with_the_plain_disk() {
    let folder = folder();
    let server = Serve::start(folder.path(), "64M");
    let setup = Setup { binary: binary().into(), server: Some(server.address.clone()), seed: 91, ..Setup::default() };
    let mut machine = Machine::start_in(folder, setup);
    machine.run_until_hits(50);
    for _ in 0..7 {
        machine.settle();
        machine.program.kill();
        machine.restart();
        assert_eq!(machine.status().started, "warm", "{}", machine.program.log());
    }
    // The operator's setting survives everything that follows.
    let said = run(&["set", machine.control().to_str().unwrap(), "--cache", "2M"]);
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    let bad = machine.state().with_extension("state.bad");
    assert!(!bad.exists());
    machine.outlives = true;
    // Dies as soon as it has a memory server.
    machine.setup().arguments.extend(["--panic-at".to_owned(), "session-begun:1".to_owned()]);
    machine.program.kill();
    machine.deaths = 0;
    for deaths in 1..=7 {
        // Each start has its time. A process that has just started may be about to die.
        machine.run_until("it does without its cache", |machine| machine.deaths >= deaths);
    }
    machine.run(20);
    // One kill from outside, and six deaths of its own.
    assert_eq!(machine.deaths, 7);
    let status = machine.status();
    assert!(status.server.is_none() && status.cache.used_bytes == 0, "{status:?}");
    let reason = status.cold_reason.unwrap_or_default();
    assert!(reason.contains("six times"), "{reason}");
    let log = machine.program.log();
    let told = |text: &str| log.lines().filter(|line| line.contains(text)).count();
    let (third, sixth) = (told("three times within a minute. This is a bug"), told("without a cache. This is a bug"));
    assert_eq!((third, sixth), (3, 1));
    assert_eq!(told("`session-begun` is passed"), 6);
    assert!(bad.exists());
    machine.read_everything();
    assert_eq!(machine.disks[0].guest.run(0, Command::Flush), 0);
    // The bug is mended, and the process is ended in an orderly way.
    machine.outlives = false;
    machine.setup().arguments.clear();
    machine.program.terminate();
    machine.restart();
    assert_eq!(machine.status().cache.wanted_bytes, 2 << 20, "{}", machine.program.log());
    machine.run_until_hits(50);
    machine.pages_sent = machine.counter("evictions_reported");
    machine.finish();
}
