//! A local tier in front of a memory server: pages enter memory of this host, and what falls out of it unread moves on. Either
//! server is stopped, killed and restarted, sizes change, and the VM process is killed and upgraded. The guest reads, writes
//! and evicts meanwhile; every answer is checked.

use super::restart::wait_until_sent;
use super::support::machine::{Evictions, Machine, Setup};
use super::support::model::BLOCK;
use super::support::program::{REMOCA, Serve, command, expect_refusal, expect_set, run};
use super::support::{folder, wait_until};
use super::upgrade;
use remoca_io::fake_manager::FakeManager;
use remoca_protocol::control::PoolStatus;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;

const MIB: u64 = 1 << 20;
const FAILURE: i32 = 1;
const CONFIGURATION: i32 = 78;

/// The servers of both tiers.
struct Servers {
    local: Serve,
    remote: Serve,
}

impl Servers {
    fn start(folder: &Path) -> Self {
        let start = |name| Serve::start(&Self::folder(folder, name), "16M");
        Self { local: start("local"), remote: start("remote") }
    }

    /// Starts both, and the local one as a service of `manager`, which keeps its pool.
    fn start_under(manager: &Arc<FakeManager>, folder: &Path) -> Self {
        let local = Serve::start_under(Arc::clone(manager), &Self::folder(folder, "local"), "16M");
        Self { local, remote: Serve::start(&Self::folder(folder, "remote"), "16M") }
    }

    fn folder(folder: &Path, name: &str) -> PathBuf {
        let folder = folder.join(name);
        std::fs::create_dir(&folder).unwrap();
        folder
    }

    /// Returns a machine with a local tier of 1 MiB and 2 MiB at the other server, of which both have pages.
    fn machine(&self, folder: tempfile::TempDir, seed: u64) -> Machine {
        let arguments = ["--local", "1M", "--local-server", &self.local.local_address()].map(String::from).to_vec();
        let server = Some(self.remote.address.clone());
        let mut machine = Machine::start_in(folder, Setup { cache: "2M", server, arguments, seed, ..Setup::default() });
        machine.evictions = Evictions::LYING;
        run_until_both_hit(&mut machine, 200);
        machine
    }
}

fn pools(machine: &Machine) -> [Option<PoolStatus>; 2] {
    let pools = machine.status().pools;
    assert!(pools.len() <= 2, "{pools:?}");
    [true, false].map(|is_local| pools.iter().find(|pool| pool.is_local_tier == is_local).cloned())
}

#[track_caller]
fn local(machine: &Machine) -> PoolStatus {
    pools(machine)[0].clone().expect("there is a local tier")
}

#[track_caller]
fn remote(machine: &Machine) -> PoolStatus {
    pools(machine)[1].clone().expect("there is another tier")
}

/// Returns what screens name as wrong with servers: the cause, and the address. How fast they are beside the disk of a test, which
/// is in memory, depends on the machine, and is left out.
fn wrong_servers(machine: &Machine) -> Vec<(String, String)> {
    let problems = remoca_view::diagnosis::of_status(&machine.status()).into_iter();
    let problems = problems.filter(|wrong| !["fast-disk", "slow-server"].contains(&&*wrong.cause));
    problems.filter_map(|wrong| Some((wrong.cause, wrong.finding.what.strip_prefix("server ")?.to_owned()))).collect()
}

/// Runs until the guest has received `count` more blocks from each tier.
#[track_caller]
fn run_until_both_hit(machine: &mut Machine, count: u64) {
    let hits = |machine: &Machine| pools(machine).map(|pool| pool.map_or(0, |pool| pool.hits));
    let before = hits(machine);
    machine.run_until("both tiers hit", |machine| {
        hits(machine).iter().zip(before).all(|(now, before)| *now >= before + count)
    });
}

#[test]
fn pages_enter_the_local_tier_and_move_on() {
    let folder = tempfile::tempdir().unwrap();
    let servers = Servers::start(folder.path());
    let mut machine = servers.machine(folder, 301);
    let (local, remote) = (local(&machine), remote(&machine));
    assert_eq!([local.granted_bytes, remote.granted_bytes], [MIB, 2 * MIB]);
    assert!(local.is_mapped && !remote.is_mapped);
    assert_eq!(local.used_bytes, MIB, "a full tier is in front");
    machine.settle();
    let (status, remote) = (machine.status(), self::remote(&machine));
    let cache = &status.cache;
    assert_eq!([cache.wanted_bytes, cache.granted_bytes], [2 * MIB; 2]);
    assert_eq!([cache.local_wanted_bytes, cache.local_granted_bytes], [MIB; 2]);
    assert_eq!(status.server.unwrap().endpoint, servers.remote.address);
    // All that came to the other server came from the local tier.
    let demoted = status.counters["demotions"];
    assert!(remote.pages_sent < local.pages_sent, "{} of {} travelled", remote.pages_sent, local.pages_sent);
    machine.run_until_hits(500);
    machine.settle();
    let now = pools(&machine)[1].clone().unwrap();
    assert_eq!(now.pages_sent - remote.pages_sent, machine.counter("demotions") - demoted);
    let totals = servers.local.status()["totals"].clone();
    assert_eq!(
        (totals["sends"].as_u64(), totals["gets"].as_u64()),
        (Some(0), Some(0)),
        "no page goes over that socket"
    );
    let said = run(&["status", "-v", machine.control().to_str().unwrap()]);
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    for line in ["local tier  1M wanted, 1M granted", "local tier: 1M, 1M used"] {
        assert!(said.contains(line), "{line} is missing:\n{said}");
    }
    assert_eq!((machine.counter("fetch_wrong"), local.pages_taken_back), (0, 0));
    machine.finish();
}

#[test]
fn either_server_may_be_killed() {
    let folder = tempfile::tempdir().unwrap();
    let mut servers = Servers::start(folder.path());
    let mut machine = servers.machine(folder, 302);
    let generation = local(&machine).generation;
    servers.local.program.kill();
    machine.run_until("its server is away", |machine| local(machine).state == "away");
    assert_eq!(wrong_servers(&machine), [("server-away".to_owned(), servers.local.local_address())]);
    run_until_both_hit(&mut machine, 100);
    assert_eq!((local(&machine).generation.clone(), machine.counter("disconnections")), (generation.clone(), 0));
    servers.remote.program.kill();
    machine.run_until("the other tier is lost", |machine| pools(machine)[1].is_none());
    let status = machine.status().server.unwrap();
    assert_eq!((status.endpoint.as_str(), status.connected), (servers.remote.address.as_str(), false), "{status:?}");
    assert_eq!(wrong_servers(&machine)[0], ("server-unreachable".to_owned(), servers.remote.address.clone()));
    let hits = local(&machine).hits;
    machine.run_until("the local tier goes on alone", |machine| local(machine).hits > hits + 100);
    servers.remote.restart();
    run_until_both_hit(&mut machine, 100);

    // Without a service manager, the local server comes back with another pool.
    servers.local.restart();
    machine.run_until("another pool takes its place", |machine| {
        pools(machine)[0].as_ref().is_some_and(|pool| pool.generation != generation && pool.state == "connected")
    });
    run_until_both_hit(&mut machine, 100);
    assert_eq!(machine.counter("fetch_wrong"), 0);
    machine.finish();
}

/// Number of reads that are in flight at the same time in [`local_hits_of_a_pass`].
const IN_FLIGHT: usize = 16;

/// Reads the whole disk, expects exactly what it holds, and returns how many blocks came from the local tier. Calls `at_half`
/// in the middle, with reads in flight.
#[track_caller]
fn local_hits_of_a_pass(machine: &mut Machine, mut at_half: impl FnMut()) -> u64 {
    let before = local(machine).hits;
    let blocks = machine.disks[0].model.bytes.len() / BLOCK;
    for first in (0..blocks).step_by(IN_FLIGHT) {
        let disk = &mut machine.disks[0];
        let range = |number: usize| number * BLOCK..(number + 1) * BLOCK;
        let reads: Vec<_> =
            (first..first + IN_FLIGHT).map(|number| (number, disk.submit_read(&range(number)))).collect();
        if first == blocks / 2 {
            at_half();
        }
        for (number, ticket) in reads {
            assert!(disk.finish_read(ticket, BLOCK) == disk.model.block(number), "block {number}");
        }
    }
    local(machine).hits - before
}

/// Row 1.8 of the design's anchors.
#[test]
fn a_killed_local_server_costs_no_hit() {
    let manager = Arc::new(FakeManager::start());
    let folder = tempfile::tempdir().unwrap();
    let mut servers = Servers::start_under(&manager, folder.path());
    let mut machine = servers.machine(folder, 308);
    wait_until("the manager has the pool", || manager.names().len() == 2);
    let first = local(&machine);
    let token = servers.local.status()["pools"][0]["token"].clone();
    // From here on the guest only reads, so the same blocks are in the tier, and are hit by each pass. The first one learns the
    // blocks that are not known.
    local_hits_of_a_pass(&mut machine, || {});
    let hits = local_hits_of_a_pass(&mut machine, || {});
    assert!(hits >= 200, "{hits} blocks of a tier of 256 pages");
    for _ in 0..3 {
        assert_eq!(local_hits_of_a_pass(&mut machine, || servers.local.program.kill()), hits, "while it dies");
        wait_until("its server is away", || local(&machine).state == "away");
        assert_eq!(local_hits_of_a_pass(&mut machine, || {}), hits, "while it is away");
        assert_eq!(local_hits_of_a_pass(&mut machine, || servers.local.restart()), hits, "while it comes back");
        wait_until("its server is back", || local(&machine).state == "connected");
        assert_eq!(local_hits_of_a_pass(&mut machine, || {}), hits, "when it is back");
        let status = servers.local.status();
        let pools = status["pools"].as_array().unwrap();
        assert!(pools.len() == 1 && pools[0]["token"] == token && pools[0]["connected"] == true, "{pools:?}");
        assert_eq!(pools[0]["npages"], MIB / 4096);
        assert_eq!(local(&machine).generation, first.generation);
    }
    assert_eq!(local(&machine).pages_taken_back, 0);
    assert_eq!(["connections", "disconnections", "fetch_wrong"].map(|name| machine.counter(name)), [2, 0, 0]);
    // The pool is as good as before for pages that come and go.
    run_until_both_hit(&mut machine, 100);
    machine.finish();
}

/// Returns the memory of the only mapped pool of a server. It can be looked at when the server has closed it.
#[track_caller]
fn memory_of_pool(server: &Serve) -> File {
    let files = std::fs::read_dir(format!("/proc/{}/fd", server.program.pid())).unwrap();
    let is_pool = |path: &PathBuf| {
        std::fs::read_link(path).is_ok_and(|link| link.to_string_lossy().starts_with("/memfd:remoca-pool"))
    };
    let mut pools = files.map(|file| file.unwrap().path()).filter(is_pool);
    let memory = File::open(pools.next().expect("there is a mapped pool")).unwrap();
    assert!(pools.next().is_none(), "there are several mapped pools");
    memory
}

/// The counts of row 1.9 of the design's anchors; `remoca-bench takeback` has the times.
#[test]
fn the_host_gets_the_memory_of_the_local_tier_back_under_load() {
    let folder = tempfile::tempdir().unwrap();
    let servers = Servers::start(folder.path());
    let mut machine = servers.machine(folder, 309);
    let bytes = |memory: &File| memory.metadata().unwrap().blocks() * 512;
    for by_server in [false, true] {
        machine.set(&format!("\"local_bytes\":{}", 4 * MIB));
        machine.run_until("it is larger", |machine| machine.status().cache.local_granted_bytes == 4 * MIB);
        machine.run_until("it is half full", |machine| local(machine).used_bytes > 2 * MIB);
        let memory = memory_of_pool(&servers.local);
        let before = bytes(&memory);
        assert!(before >= 4 * MIB, "{before} bytes");
        if by_server {
            let name = servers.local.status()["pools"][0]["token"].as_str().unwrap().to_owned();
            let mut child = command(REMOCA);
            child.args(["take-back", &name, "0", "--server"]).arg(machine.folder.path().join("local/server.ctl"));
            let mut child = child.stdout(Stdio::piped()).spawn().unwrap();
            while child.try_wait().unwrap().is_none() {
                machine.round();
            }
            let (done, said) = upgrade::end(child);
            assert!(done && bytes(&memory) * 100 <= before, "{} of {before} bytes are left: {said}", bytes(&memory));
        } else {
            machine.set("\"local_bytes\":0");
            machine.run_until("the memory is back", |_| bytes(&memory) * 100 <= before);
            assert_eq!(pools(&machine)[0], None, "the pool is gone");
        }
        // What the guest does goes on without the tier, and brings no memory back into the file.
        machine.run_until_hits(100);
        assert!(bytes(&memory) * 100 <= before, "{} bytes came back", bytes(&memory));
    }
    assert_eq!((machine.counter("fetch_wrong"), machine.status().cache.local_granted_bytes), (0, 0));
    machine.finish();
}

#[test]
fn the_local_tier_changes_its_size_and_goes_and_comes() {
    let folder = tempfile::tempdir().unwrap();
    let servers = Servers::start(folder.path());
    let mut machine = servers.machine(folder, 303);
    for size in [MIB / 2, 2 * MIB, 0, MIB] {
        machine.set(&format!("\"local_bytes\":{size}"));
        machine.run_until("it has that size", |machine| {
            let cache = machine.status().cache;
            cache.local_granted_bytes == size && pools(machine)[0].is_some() == (size > 0)
        });
        let pool_pages = || servers.local.status()["pools"][0]["npages"].as_u64();
        wait_until("the memory is back", || match size {
            0 => servers.local.pages_given() == 0,
            size => pool_pages() == Some(size / 4096),
        });
        assert_eq!(machine.status().cache.granted_bytes, 2 * MIB, "the other tier stays as it is");
        if size > 0 {
            run_until_both_hit(&mut machine, 100);
        } else {
            machine.run_until_hits(100);
        }
    }
    // Off and on are for both.
    machine.set("\"enabled\":false");
    machine.run_until("both are off", |_| servers.local.pages_given() + servers.remote.pages_given() == 0);
    assert_eq!(machine.status().cache.used_bytes, 0);
    machine.set("\"enabled\":true");
    run_until_both_hit(&mut machine, 100);
    assert_eq!((machine.counter("disconnections"), machine.counter("fetch_wrong")), (0, 0));
    machine.finish();
}

#[test]
fn a_killed_process_finds_both_tiers_again() {
    let folder = folder();
    let servers = Servers::start(folder.path());
    let mut machine = servers.machine(folder, 304);
    machine.set("\"local_bytes\":2097152");
    run_until_both_hit(&mut machine, 100);
    for _ in 0..3 {
        // Pages that the process still has to send go with it.
        wait_until_sent(&machine, &servers.remote);
        machine.settle();
        let (used, generations) =
            (machine.status().cache.used_bytes, pools(&machine).map(|pool| pool.unwrap().generation));
        machine.program.kill();
        machine.restart();
        machine.pages_sent = 0;
        wait_until("both pools are found again", || pools(&machine).iter().all(Option::is_some));
        let status = machine.status();
        assert_eq!((status.started.as_str(), status.cold_reason), ("warm", None), "{}", machine.program.log());
        assert!(status.cache.used_bytes * 10 >= used * 9, "{} of {used} bytes", status.cache.used_bytes);
        assert_eq!(pools(&machine).map(|pool| pool.unwrap().generation), generations);
        assert_eq!(status.cache.local_wanted_bytes, 2 * MIB, "as it was set");
        run_until_both_hit(&mut machine, 100);
        assert_eq!(machine.counter("fetch_wrong"), 0);
    }
    machine.finish();
}

#[test]
fn an_upgrade_keeps_both_tiers() {
    let folder = tempfile::tempdir().unwrap();
    let mut servers = Servers::start(folder.path());
    let mut machine = servers.machine(folder, 305);
    machine.outlives = true;
    for is_local_gone in [false, true] {
        if is_local_gone {
            servers.local.program.kill();
            machine.run_until("its server is away", |machine| local(machine).state == "away");
        }
        let (used, generation) = (machine.status().cache.used_bytes, local(&machine).generation);
        let (done, said) = upgrade::upgrade_in_time(&mut machine, || None);
        assert!(done, "{said}");
        machine.run_until("both are found again", |machine| pools(machine).iter().all(Option::is_some));
        machine.pages_sent = machine.counter("evictions_reported");
        let status = machine.status();
        assert!(status.cache.used_bytes * 10 >= used * 8, "{} of {used} bytes", status.cache.used_bytes);
        assert_eq!(local(&machine).generation, generation);
        run_until_both_hit(&mut machine, 100);
    }
    assert_eq!(machine.counter("fetch_wrong"), 0);
    machine.finish();
}

#[test]
fn a_local_tier_needs_no_other_server() {
    let folder = tempfile::tempdir().unwrap();
    let server = Serve::start(folder.path(), "16M");
    let arguments = ["--local", "2M", "--local-server", &server.local_address()].map(String::from).to_vec();
    let mut machine = Machine::start_in(folder, Setup { arguments, seed: 306, ..Setup::default() });
    machine.evictions = Evictions::LYING;
    machine.run_until_hits(200);
    let status = machine.status();
    assert_eq!((status.cache.wanted_bytes, status.cache.local_granted_bytes), (0, 2 * MIB));
    let control = machine.control();
    let larger = run(&["set", control.to_str().unwrap(), "--cache", "1G"]);
    expect_refusal(&larger, FAILURE, &["no memory server but that of its local tier"]);
    expect_set(&control, &["--local", "1M"], "test: cache 0; local tier 1M, all granted\n");
    machine.run_until_hits(100);
    machine.finish();
}

#[test]
fn a_local_tier_can_be_added_to_a_running_process() {
    let folder = tempfile::tempdir().unwrap();
    let servers = Servers::start(folder.path());
    let arguments = ["--local-server", &servers.local.local_address()].map(String::from).to_vec();
    let server = Some(servers.remote.address.clone());
    let mut machine =
        Machine::start_in(folder, Setup { cache: "2M", server, arguments, seed: 307, ..Setup::default() });
    machine.evictions = Evictions::LYING;
    machine.run_until_hits(100);
    let control = machine.control();
    expect_set(&control, &["--local", "1M"], "test: cache 2M, all granted; local tier 1M, all granted\n");
    run_until_both_hit(&mut machine, 100);
    // It is none of the list, whatever that becomes.
    let said = run(&["set", control.to_str().unwrap(), "--server", &servers.remote.address]);
    assert_eq!(String::from_utf8_lossy(&said.stdout), format!("test: servers {}\n", servers.remote.address));
    run_until_both_hit(&mut machine, 100);
    assert_eq!(machine.counter("disconnections"), 0);
    // Its server can be one of the list only while there is no such tier.
    let list = ["set", control.to_str().unwrap(), "--now", "--server", &servers.local.local_address()];
    expect_refusal(&run(&list), FAILURE, &["beside a local tier"]);
    run_until_both_hit(&mut machine, 100);
    assert!(run(&["set", control.to_str().unwrap(), "--local", "0"]).status.success());
    wait_until("it is left", || machine.program.log().contains("left the memory server at local:"));
    assert!(machine.program.log().contains("no local tier is wanted any more"), "{}", machine.program.log());
    assert!(run(&list).status.success());
    machine.run_until("the pool of the list is there", |machine| {
        matches!(&machine.status().pools[..], [pool] if pool.is_mapped && !pool.is_local_tier && pool.hits > 0)
    });
    machine.finish();
}

#[test]
fn what_does_not_go_together_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("image");
    std::fs::write(&image, vec![0; 1 << 20]).unwrap();
    let refused = |options: &[&str], words: &[&str]| {
        let path = |name: &str| folder.path().join(name).display().to_string();
        let (image, socket, control) = (path("image"), path("socket"), path("control"));
        let mut arguments = vec!["disk", "--image", &image, "--socket", &socket, "--control", &control];
        arguments.extend(options);
        expect_refusal(&run(&arguments), CONFIGURATION, words);
    };
    refused(&["--local", "1M", "--local-server", "unix:/x"], &["local:PATH", "unix:/x"]);
    refused(&["--local", "1M", "--server", "local:/x"], &["beside a local tier", "--local-server"]);
    refused(&["--local", "4097"], &["multiple of 4096"]);
}
