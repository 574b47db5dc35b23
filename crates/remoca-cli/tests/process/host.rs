//! `remoca host` beside real VM processes and a memory server, and beside others that hang, lie and die.

use super::support::fake_vm::{FakeVm, Manner};
use super::support::machine::{Machine, Setup};
use super::support::model::BLOCK;
use super::support::program::{Program, REMOCA, Serve, Signal, command, expect_refusal, run};
use super::support::{folder, wait_at_most, wait_until};
use remoca_protocol::host::{HostReport, HostVm};
use std::collections::HashMap;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Duration;

pub const MIB: u64 = 1 << 20;
/// Long enough for memory to move while guests read thousands of blocks in between, on a busy machine.
const MOVE_TIME: Duration = Duration::from_secs(600);
const FAILURE: i32 = 1;
const CONFIGURATION: i32 = 78;

/// A VM process with a name, whose control socket is found in the folder of the host, and the blocks of a loop.
pub struct Vm {
    pub machine: Machine,
    pub blocks: Vec<usize>,
}

impl Vm {
    /// Starts the VM `name` with a cache. Its guest is going to read `count` blocks again and again.
    fn start(host: &Path, name: &str, server: &Serve, cache: &'static str, count: usize, seed: u64) -> Self {
        Self::with(host, name, server, cache, &[], count, seed)
    }

    /// The same with more arguments.
    fn with(
        host: &Path,
        name: &str,
        server: &Serve,
        cache: &'static str,
        more: &[&str],
        count: usize,
        seed: u64,
    ) -> Self {
        let own = [format!("--name={name}")];
        let setup = Setup {
            server: Some(server.address.clone()),
            cache,
            blocks: 4096,
            named: false,
            // The server may be slower than the disk here.
            arguments: own.into_iter().chain(more.iter().copied().map(String::from)).collect(),
            seed,
            ..Setup::default()
        };
        Self::with_setup(host, name, setup, count)
    }

    /// The same with a setup.
    pub fn with_setup(host: &Path, name: &str, setup: Setup, count: usize) -> Self {
        let machine = Machine::start_in(folder(), setup);
        symlink(machine.control(), host.join(format!("{name}.ctl"))).unwrap();
        let model = &machine.disks[0].model;
        let all: Vec<_> = model.bytes.chunks(BLOCK).collect();
        let mut times = HashMap::new();
        all.iter().for_each(|block| *times.entry(*block).or_insert(0) += 1);
        let is_unique = |number: &usize| times[all[*number]] == 1 && all[*number] != [0; BLOCK];
        let blocks: Vec<_> = (0..all.len()).filter(is_unique).take(count).collect();
        assert_eq!(blocks.len(), count);
        Self { machine, blocks }
    }

    /// Reads all blocks; the guest evicts each at once.
    pub fn pass(&mut self) {
        let machine = &mut self.machine;
        for number in &self.blocks {
            let page = machine.disks[0].read(&(number * BLOCK..(number + 1) * BLOCK));
            assert!(page == machine.disks[0].model.block(*number));
            assert_eq!(machine.send_to_port(1, &page), 0);
            machine.pages_sent += 1;
        }
    }

    /// Returns the size of the local tier, and the blocks that it has answered.
    pub fn local(&self) -> (u64, u64) {
        let status = self.machine.status();
        let hits = status.pools.iter().filter(|pool| pool.is_local_tier).map(|pool| pool.hits).sum();
        (status.cache.local_granted_bytes / MIB, hits)
    }

    fn wanted_mib(&self) -> u64 {
        self.machine.status().cache.wanted_bytes / MIB
    }
}

pub fn daemon(host: &Path, arguments: &[&str]) -> Program {
    let sockets = host.to_str().unwrap();
    let mut command = command(REMOCA);
    command.args(["host", "--sockets", sockets, "--interval", "300ms", "--window", "1s"]).args(arguments);
    Program::start(&mut command, &host.join("host.log"))
}

/// Returns the report of the daemon; `None` while it has none.
pub fn report(host: &Path) -> Option<HostReport> {
    let output = run(&["host", "status", "-o", "json", "--sockets", host.to_str().unwrap()]);
    output.status.success().then(|| HostReport::parse(&output.stdout).unwrap())
}

pub fn vm<'r>(report: &'r HostReport, name: &str) -> &'r HostVm {
    report.vms.iter().find(|vm| vm.name == name).unwrap_or_else(|| panic!("no {name}: {report:?}"))
}

pub fn once(host: &Path, arguments: &[&str]) -> HostReport {
    let all = [&["host", "--once", "-o", "json", "--sockets", host.to_str().unwrap()], arguments].concat();
    let output = run(&all);
    assert!(output.status.success(), "{output:?}");
    HostReport::parse(&output.stdout).unwrap()
}

#[test]
fn memory_moves_to_the_vm_that_gains_and_the_total_is_kept() {
    let host = folder();
    let donor = folder();
    let server = Serve::start(donor.path(), "64M");
    let mut gains = Vm::start(host.path(), "gains", &server, "8M", 2560, 1);
    let mut gives = Vm::start(host.path(), "gives", &server, "8M", 256, 2);
    wait_until("both have their caches", || server.pages_given() * 4096 == 16 * MIB);
    (0..3).for_each(|_| gains.pass());
    (0..6).for_each(|_| gives.pass());
    let mut plan = once(host.path(), &["--total", "16M"]);
    wait_at_most(MOVE_TIME, "the plan moves memory", || {
        gains.pass();
        gives.pass();
        plan = once(host.path(), &["--total", "16M"]);
        vm(&plan, "gains").target_bytes > 8 * MIB
    });
    assert_eq!((vm(&plan, "gains").target_bytes, vm(&plan, "gives").target_bytes), (12 * MIB, 4 * MIB), "{plan:?}");
    assert!(!plan.applies && vm(&plan, "gains").why.starts_with("it gains"));
    let equal = once(host.path(), &["--total", "16M", "--policy", "equal"]);
    assert_eq!(vm(&equal, "gains").target_bytes, 8 * MIB);
    assert_eq!((gains.wanted_mib(), gives.wanted_mib()), (8, 8), "nothing was changed");

    let mut daemon = daemon(host.path(), &["--total", "16M", "--apply", "-o", "json"]);
    wait_at_most(MOVE_TIME, "the memory has moved", || {
        gains.pass();
        gives.pass();
        assert!(daemon.is_running(), "{}", daemon.log());
        assert!(server.pages_given() * 4096 <= 16 * MIB, "{}", daemon.log());
        (gains.wanted_mib(), gives.wanted_mib()) == (12, 4)
    });
    // A read for which the server is late counts as missed, too.
    let misses = |vm: &Vm| {
        let counters = vm.machine.status().counters;
        (counters["missed_blocks"], counters["fetch_timeouts"] + counters["probes"])
    };
    wait_at_most(MOVE_TIME, "the loop is answered by the cache", || {
        let before = misses(&gains);
        gains.pass();
        assert!(server.pages_given() * 4096 <= 16 * MIB);
        let now = misses(&gains);
        now.0 - before.0 <= now.1 - before.1
    });
    expect_one_daemon(host.path());
    let mut rests = None;
    wait_at_most(MOVE_TIME, "it has come to rest", || {
        gives.pass();
        rests = report(host.path()).filter(|shown| shown.state.starts_with("all sizes are as they should be"));
        rests.is_some()
    });
    let shown = rests.unwrap();
    let decisions: Vec<_> = shown.decisions.iter().map(|d| (d.vm.as_deref().unwrap(), d.to_bytes / MIB)).collect();
    assert_eq!(decisions, [("gives", 4), ("gains", 12)], "{shown:?}");
    let log = run(&["host", "log", "--sockets", host.path().to_str().unwrap()]);
    let log = String::from_utf8(log.stdout).unwrap();
    assert!(
        log.contains("gives: 8M -> 4M: others gain more than it loses") && log.contains("given back after"),
        "{log}"
    );
    daemon.terminate();
    assert!(!host.path().join("remoca-host.socket").exists());
    assert_eq!((gains.wanted_mib(), gives.wanted_mib()), (12, 4), "sizes stay as they are");
    gains.machine.finish();
    gives.machine.finish();
}

/// Checks that no second daemon starts, but that a look beside the first one is possible.
fn expect_one_daemon(host: &Path) {
    let sockets = host.to_str().unwrap();
    let second = run(&["host", "--total", "16M", "--apply", "--sockets", sockets]);
    expect_refusal(&second, FAILURE, &["another `remoca host`, or a `remoca host give-back`, works here"]);
    assert_eq!(once(host, &["--total", "16M"]).vms.len(), 2);
}

#[test]
fn vms_that_hang_lie_or_die_change_nothing_for_the_others() {
    let host = folder();
    let donor = folder();
    let server = Serve::start(donor.path(), "64M");
    let mut gains = Vm::start(host.path(), "gains", &server, "8M", 2560, 1);
    let mut gives = Vm::start(host.path(), "gives", &server, "8M", 256, 2);
    let hangs = Vm::start(host.path(), "hangs", &server, "4M", 1, 3);
    let mut dies = Vm::start(host.path(), "dies", &server, "4M", 1, 4);
    let fake = |name: &str, manner: Manner| FakeVm::start(host.path(), name, Manner { mib: 2, ..manner });
    let liars = [
        fake("babbles", Manner::default()),
        fake("false-name", Manner::default()),
        fake("false-size", Manner::default()),
    ];
    wait_until("all have their caches", || server.pages_given() * 4096 == 24 * MIB);
    let total = 30 * MIB;
    let mut daemon = daemon(host.path(), &["--total", "30M", "--apply", "-o", "json"]);
    wait_until("the daemon knows all VMs", || {
        assert!(daemon.is_running(), "{}", daemon.log());
        report(host.path()).is_some_and(|report| report.vms.len() == 7 && report.counted_bytes == total)
    });
    hangs.machine.program.signal(Signal::STOP);
    dies.machine.program.kill();
    liars[0].change(|manner| manner.babbles = true);
    liars[1].change(|manner| manner.false_name = Some("gains".into()));
    liars[2].change(|manner| manner.false_bytes = Some(u64::MAX));
    wait_at_most(MOVE_TIME, "the memory has moved", || {
        gains.pass();
        (0..3).for_each(|_| gives.pass());
        assert!(daemon.is_running(), "{}", daemon.log());
        assert!(server.pages_given() * 4096 <= 24 * MIB, "{}", daemon.log());
        (gains.wanted_mib(), gives.wanted_mib()) == (12, 4)
    });
    wait_until("it says what is wrong with each", || {
        let Some(shown) = report(host.path()) else { return false };
        let says = |name: &str, words: &[&str]| words.iter().any(|words| vm(&shown, name).why.contains(words));
        assert_eq!(vm(&shown, "hangs").has_bytes, 4 * MIB, "it counts with what it had");
        says("hangs", &["did not answer within 2 seconds"])
            && says("dies", &["its process was killed"])
            && says("babbles", &["bytes", "did not answer"])
            && says("false-name", &["says that it is gains"])
            && says("false-size", &["which no process can"])
    });
    hangs.machine.program.signal(Signal::CONT);
    wait_until("the VM is heard again", || {
        report(host.path()).is_some_and(|shown| vm(&shown, "hangs").state == "keeps")
    });
    daemon.terminate();
    gains.machine.finish();
    gives.machine.finish();
    hangs.machine.finish();
    assert!(liars.iter().all(|liar| liar.now().heard.is_empty()), "nobody told them anything");
}

#[test]
fn a_daemon_that_is_killed_between_two_steps_has_a_successor_that_ends_the_plan() {
    let host = folder();
    let gives = FakeVm::start(host.path(), "gives", Manner { mib: 8, is_deaf: true, ..Manner::default() });
    let gains = FakeVm::start(host.path(), "gains", Manner { mib: 8, cliff_mib: 10, ..Manner::default() });
    let arguments = ["--total", "16M", "--apply", "-o", "json"];
    let mut first = daemon(host.path(), &arguments);
    // It is told again if this test is slow.
    wait_until("the command is on its way", || gives.now().heard.first() == Some(&4));
    first.kill();
    assert!(gains.now().heard.is_empty(), "nothing is given before it is taken");
    gives.change(|manner| (manner.is_deaf, manner.heard) = (false, Vec::new()));
    let mut second = daemon(host.path(), &arguments);
    wait_until("the plan is done", || {
        // What is given was taken before, so the one that gains is looked at first.
        let gained = gains.now().mib;
        assert!(gained + gives.now().mib <= 16);
        gained == 12
    });
    // One whose answer is late is told again.
    let told = |mut heard: Vec<u64>| {
        heard.dedup();
        heard
    };
    assert_eq!((told(gives.now().heard), told(gains.now().heard)), (vec![4], vec![12]));
    let mut log = Vec::new();
    wait_until("it is in the log", || {
        log = report(host.path()).map(|report| report.decisions).unwrap_or_default();
        log.len() == 3
    });
    assert!(log[0].why.contains("a former daemon ended") && log[0].why.contains("it is carried out"), "{log:?}");
    second.terminate();
}

#[test]
fn what_the_files_say_holds() {
    let host = folder();
    let config = folder();
    std::fs::create_dir(config.path().join("vms")).unwrap();
    let write =
        |name: &str, text: &str| std::fs::write(config.path().join(name), format!("version = 1\n{text}")).unwrap();
    write("remoca.toml", "[host]\ntotal = '16M'\n[memory]\nbound = 'none'\n");
    write("vms/a.toml", "[memory]\nminimum = '7M'\nweight = 3\n");
    write("vms/b.toml", "[memory]\nweight = 'heavy'\n");
    FakeVm::start(host.path(), "a", Manner { mib: 8, ..Manner::default() });
    FakeVm::start(host.path(), "b", Manner { mib: 4, ..Manner::default() });
    FakeVm::start(host.path(), "c", Manner { mib: 4, cliff_mib: 6, ..Manner::default() });
    let with =
        |arguments: &[&str]| once(host.path(), &[&["--config", config.path().to_str().unwrap()], arguments].concat());
    let report = with(&[]);
    assert_eq!(report.total_bytes, 16 * MIB);
    let a = vm(&report, "a");
    assert_eq!((a.minimum_bytes, a.bound, a.weight), (7 * MIB, None, 3.0));
    assert!(a.baseline_bytes > vm(&report, "c").baseline_bytes, "{report:?}");
    assert!(vm(&report, "b").why.contains("b.toml:3: weight: `heavy` is not a weight"), "{report:?}");
    assert_eq!(vm(&report, "b").target_bytes, 4 * MIB, "it keeps what it has");
    // The minimum of the one leaves the other in front of its cliff.
    assert_eq!((a.target_bytes, vm(&report, "c").target_bytes), (8 * MIB, 4 * MIB), "{report:?}");
    assert_eq!(vm(&with(&["--total", "32M"]), "c").target_bytes, 8 * MIB);

    let check = run(&["config", "check", "--config", config.path().to_str().unwrap()]);
    let said = String::from_utf8(check.stdout).unwrap();
    assert!(said.contains("b.toml:3: weight: `heavy`") && !said.contains("a.toml"), "{said}");
    let nowhere = config.path().join("nowhere").display().to_string();
    expect_refusal(&run(&["config", "check", "--config", &nowhere]), FAILURE, &["there is no folder", "nowhere"]);
    let shown = run(&["config", "show", "a", "--origin", "--config", config.path().to_str().unwrap()]);
    let shown = String::from_utf8(shown.stdout).unwrap();
    for words in ["\n[memory]\nminimum = \"7M\"    # ", "vms/a.toml:3\n", "bound = \"none\"    # ", "remoca.toml:5\n"] {
        assert!(shown.contains(words), "`{words}` is missing in: {shown}");
    }
    // Only what is typed beside --once changes anything.
    write("remoca.toml", "[host]\ntotal = '32M'\napply = true\n");
    assert!(!with(&[]).applies && !with(&["--apply=false"]).applies);
    assert_eq!(vm(&with(&[]), "c").has_bytes, 4 * MIB);
    assert!(with(&["--apply"]).applies);
    write("remoca.toml", "[host]\ntotl = '16M'\n");
    let wrong = run(&["host", "--once", "--config", config.path().to_str().unwrap()]);
    expect_refusal(&wrong, CONFIGURATION, &["remoca.toml:3: unknown key `totl`: did you mean `total`?"]);
    // Settings that are right one by one, and with which neither the daemon nor a server starts.
    for (text, words) in [
        ("[host]\ntotal = '64'\n", "remoca.toml:3: [host]: these options cannot be used: a total of 64 bytes"),
        ("[host]\ntotal = '64M'\nguests = true\n", "needs --tier local"),
        ("[host]\ntotal = '64M'\ntier = 'local'\nguests = true\nreserve = '1M'\n", "at least 2M"),
        (
            "[host]\ntier = 'both'\n",
            "remoca.toml:3: tier: invalid value 'both' for 'tier <TIER>' [possible values: local, remote]",
        ),
        ("[serve]\nlisten = 'tcp:a:1'\nmemory = '3M'\n", "remoca.toml:3: [serve]: these options cannot be used"),
        ("[serve]\nlisten = 'tcp:a:1'\nmemory = '2M'\nquota = '4M'\n", "--quota"),
    ] {
        write("remoca.toml", text);
        let check = run(&["config", "check", "--config", config.path().to_str().unwrap()]);
        let said = String::from_utf8_lossy(&check.stdout);
        assert!(said.contains(words) && !check.status.success(), "`{words}` is missing in: {said}");
    }
    write("remoca.toml", "[host]\napply = true\n[serve]\nmemory = '3M'\n");
    let check = run(&["config", "check", "--config", config.path().to_str().unwrap()]);
    let said = String::from_utf8_lossy(&check.stdout);
    assert!(!said.contains("remoca.toml"), "flags may say the rest: {said}");
    let disk = "[[disk]]\nname = 'r'\nformat = 'raw'\nimage = '/i'\nsocket = '/s'\n";
    write("vms/d.toml", &format!("incoming = 'tcp:127.0.0.1:1'\n{disk}"));
    let check = run(&["config", "check", "d", "--config", config.path().to_str().unwrap()]);
    let said = String::from_utf8_lossy(&check.stdout);
    assert!(said.contains("d.toml:1: `incoming` without `incoming-key`"), "{said}");
    expect_refusal(&run(&["host", "--once"]), CONFIGURATION, &["no total: say --total SIZE"]);
    let file = config.path().join("remoca.toml");
    for place in [Path::new("/no/such/folder"), &file] {
        let place = place.to_str().unwrap();
        let look = run(&["host", "--once", "--total", "16M", "--sockets", place]);
        expect_refusal(&look, FAILURE, &[&format!("{place} cannot be read as a folder")]);
    }
    let nobody = run(&["host", "status", "--sockets", config.path().to_str().unwrap()]);
    expect_refusal(&nobody, FAILURE, &["no daemon of this host answers"]);
}

#[test]
fn one_plan_is_applied_and_none_without_a_record() {
    let host = folder();
    let gives = FakeVm::start(host.path(), "gives", Manner { mib: 8, ..Manner::default() });
    let gains = FakeVm::start(host.path(), "gains", Manner { mib: 8, cliff_mib: 10, ..Manner::default() });
    let report = once(host.path(), &["--total", "16M", "--apply"]);
    assert_eq!((gives.now().mib, gains.now().mib), (4, 12), "{report:?}");
    assert!(report.applies && report.decisions.len() == 2 && report.counted_bytes == 16 * MIB);
    assert!(!host.path().join("remoca-host.socket").exists());
    let table = run(&["host", "--once", "--total", "16M", "--sockets", host.path().to_str().unwrap()]);
    let table = String::from_utf8(table.stdout).unwrap();
    assert!(table.contains("All sizes are as they should be. Sizes are only shown, not changed (--apply)."), "{table}");
    // Within the window nothing is changed again, whoever asks.
    gains.change(|manner| manner.cliff_mib = 14);
    gives.change(|manner| manner.mib = 4);
    let report = once(host.path(), &["--total", "32M", "--apply"]);
    assert!(vm(&report, "gains").why.starts_with("it was changed by a former daemon"), "{report:?}");
    assert_eq!(gains.now().mib, 12, "{report:?}");
    // A record that cannot be written: nothing is changed.
    std::fs::remove_file(host.path().join("remoca-host.record")).unwrap();
    std::fs::create_dir(host.path().join("remoca-host.record.new")).unwrap();
    let arguments = ["host", "--once", "-o", "json", "--total", "32M", "--apply", "--sockets"];
    let failed = run(&[&arguments[..], &[host.path().to_str().unwrap()]].concat());
    let said = String::from_utf8_lossy(&failed.stderr);
    assert_eq!(failed.status.code(), Some(FAILURE), "{said}");
    assert!(said.contains("of the sizes were not changed: the log above says why"), "{said}");
    let report = HostReport::parse(&failed.stdout).unwrap();
    assert_eq!(gains.now().mib, 12, "{report:?}");
    assert!(report.decisions.last().unwrap().outcome.contains("the intent cannot be written"), "{report:?}");
}

/// Returns the servers of both tiers, in folders of their own.
pub fn tiers(folder: &Path) -> [Serve; 2] {
    ["local", "remote"].map(|name| {
        let folder = folder.join(name);
        std::fs::create_dir(&folder).unwrap();
        Serve::start(&folder, "64M")
    })
}

#[test]
fn memory_of_the_local_tier_moves_to_the_vm_that_gains() {
    let (host, servers) = (folder(), folder());
    let [local, remote] = tiers(servers.path());
    let address = local.local_address();
    let arguments = ["--local", "8M", "--local-server", &address];
    let mut gains = Vm::with(host.path(), "gains", &remote, "4M", &arguments, 2560, 1);
    let mut gives = Vm::with(host.path(), "gives", &remote, "4M", &arguments, 256, 2);
    let nowhere = ["--local-server", "local:/nowhere/memory.sock"];
    let none = Vm::with(host.path(), "none", &remote, "4M", &nowhere, 1, 3);
    wait_until("all have their memory", || {
        local.pages_given() * 4096 == 16 * MIB && remote.pages_given() * 4096 == 12 * MIB
    });
    let arguments = ["--tier", "local", "--total", "16M"];
    let mut daemon = daemon(host.path(), &[&arguments[..], &["--apply", "-o", "json"]].concat());
    wait_at_most(MOVE_TIME, "the memory has moved", || {
        gains.pass();
        (0..3).for_each(|_| gives.pass());
        assert!(daemon.is_running(), "{}", daemon.log());
        assert!(local.pages_given() * 4096 <= 16 * MIB, "{}", daemon.log());
        (gains.local().0, gives.local().0) == (12, 4)
    });
    wait_at_most(MOVE_TIME, "the loop is answered by the local tier", || {
        let before = gains.local().1;
        gains.pass();
        assert!(local.pages_given() * 4096 <= 16 * MIB);
        gains.local().1 - before == 2560
    });
    let mut rests = None;
    wait_at_most(MOVE_TIME, "it has come to rest", || {
        gains.pass();
        gives.pass();
        rests = report(host.path()).filter(|shown| shown.state.starts_with("all sizes are as they should be"));
        rests.is_some()
    });
    let shown = rests.unwrap();
    assert_eq!((shown.resource.as_str(), shown.counted_bytes), ("local tier", 16 * MIB));
    let decisions: Vec<_> = shown.decisions.iter().map(|d| (d.vm.as_deref().unwrap(), d.to_bytes / MIB)).collect();
    assert_eq!(decisions, [("gives", 4), ("gains", 12)], "{shown:?}");
    assert!(vm(&shown, "none").why.contains("no memory server listens at /nowhere/memory.sock"), "{shown:?}");
    assert_eq!((none.local().0, vm(&shown, "none").has_bytes), (0, 0));
    daemon.terminate();
    // The other tier is as it was, and it is behind the first: more of it is worth nothing to the loop.
    assert_eq!((gains.wanted_mib(), gives.wanted_mib(), none.wanted_mib()), (4, 4, 4));
    let remote_plan = once(host.path(), &["--total", "12M"]);
    assert_eq!((remote_plan.resource.as_str(), remote_plan.counted_bytes), ("cache", 12 * MIB));
    assert!(vm(&remote_plan, "gains").target_bytes <= 4 * MIB, "{remote_plan:?}");
    [gains, gives, none].into_iter().for_each(|vm| vm.machine.finish());
}

#[test]
fn a_vm_without_a_local_tier_is_given_one_if_its_server_is_there() {
    let (host, servers) = (folder(), folder());
    let [local, remote] = tiers(servers.path());
    let address = local.local_address();
    let mut grows = Vm::with(host.path(), "grows", &remote, "8M", &["--local-server", &address], 1024, 1);
    wait_until("it has its cache", || remote.pages_given() * 4096 == 8 * MIB);
    let arguments = ["--tier", "local", "--total", "16M", "--apply"];
    wait_at_most(MOVE_TIME, "it has a local tier", || {
        grows.pass();
        once(host.path(), &arguments);
        assert!(local.pages_given() * 4096 <= 16 * MIB);
        grows.local().0 >= 4
    });
    wait_until("the local tier answers", || {
        grows.pass();
        grows.local().1 > 0
    });
    assert_eq!(grows.wanted_mib(), 8);
    grows.machine.finish();
}
