//! `remoca host --guests` beside real VM processes with memory servers, and monitors of QEMUs that are none.

use super::host::{MIB, Vm, daemon, once, report, tiers, vm};
use super::support::fake_qemu::{FakeQemu, Manner};
use super::support::machine::Setup;
use super::support::program::{Program, Serve, run};
use super::support::{folder, wait_at_most, wait_until};
use remoca_frontend::testing::{Options, TestGuest};
use remoca_protocol::host::{HostGuest, HostReport};
use std::time::Duration;
use tempfile::TempDir;

/// Memory of each guest at boot.
const HOME: u64 = 64 * MIB;
/// Long enough for a round in which a balloon does not follow, on a busy machine.
const ROUND_TIME: Duration = Duration::from_secs(600);
/// Number of blocks that a guest reads at least in a pass: a curve needs some that is to be believed soon.
const PASS_BLOCKS: usize = 1024;

/// A VM process with a guest that has memory, a balloon and a monitor.
struct Guest {
    vm: Vm,
    qemu: FakeQemu,
    _memory: TestGuest,
}

/// A host with its VMs, its memory servers and the operator's files.
struct Host {
    folder: TempDir,
    config: TempDir,
    local: Serve,
    _remote: Serve,
    guests: Vec<Guest>,
    _servers: TempDir,
}

impl Host {
    /// Starts VMs that read so many blocks again and again, and begin with 6 MiB of local tier. `memory` are lines of `[memory]`.
    fn start(vms: &[(&'static str, usize, &str, Manner)]) -> Self {
        let (folder, config, servers) = (folder(), folder(), folder());
        let [local, remote] = tiers(servers.path());
        std::fs::create_dir(config.path().join("vms")).unwrap();
        let start = |(seed, (name, count, memory, manner)): (u64, &(&'static str, usize, &str, Manner))| {
            let more = [format!("--name={name}"), "--local=6M".into()];
            let setup = Setup {
                server: Some(remote.address.clone()),
                sectors: vec![512, 512],
                blocks: 4096,
                named: false,
                arguments: more.into_iter().chain(["--local-server".into(), local.local_address()]).collect(),
                seed,
                ..Setup::default()
            };
            let mut vm = Vm::with_setup(folder.path(), name, setup, *count);
            let socket = folder.path().join(format!("{name}.qmp"));
            let qemu = FakeQemu::start(&socket, HOME, *manner);
            let text = format!("version = 1\n[memory]\nmonitor = 'qmp:{}'\n{memory}", socket.display());
            std::fs::write(config.path().join("vms").join(format!("{name}.toml")), text).unwrap();
            // The VM process sees the memory by its second disk.
            let disk = vm.machine.disks.pop().unwrap();
            let mut memory = disk.guest;
            memory.disconnect();
            memory = TestGuest::new(Options::default());
            memory.negotiate(&disk.socket).unwrap();
            memory.share_file(&*qemu.memory, HOME).unwrap();
            Guest { vm, qemu, _memory: memory }
        };
        let guests = (1..).zip(vms).map(start).collect();
        let host = Self { folder, config, local, _remote: remote, guests, _servers: servers };
        wait_until("all have their memory", || host.local_mib() == 6 * host.guests.len() as u64);
        host
    }

    fn arguments<'a>(&'a self, more: &[&'a str]) -> Vec<&'a str> {
        let own = ["--config", self.config.path().to_str().unwrap(), "--tier", "local", "--guests", "--reserve", "4M"];
        [&own[..], more].concat()
    }

    fn daemon(&self, total: &str) -> Program {
        daemon(self.folder.path(), &self.arguments(&["--apply", "-o", "json", "--total", total]))
    }

    /// Starts a daemon whose rounds follow soon: in one on a busy machine guests may read too little for a curve that says what they need.
    fn daemon_with_rounds(&self) -> Program {
        daemon(self.folder.path(), &self.arguments(&["--apply", "-o", "json", "--total", "16M", "--round", "20s"]))
    }

    fn report(&self) -> Option<HostReport> {
        report(self.folder.path())
    }

    /// Returns a report as soon as the daemon answers.
    fn some_report(&self) -> HostReport {
        let mut shown = None;
        wait_until("the daemon answers", || {
            shown = self.report();
            shown.is_some()
        });
        shown.unwrap()
    }

    fn local_mib(&self) -> u64 {
        self.local.pages_given() * 4096 / MIB
    }

    /// Returns the bytes that guests have, less than they had at first.
    fn missing(&self) -> u64 {
        self.guests.iter().map(|guest| HOME - resident(&guest.qemu)).sum()
    }

    /// Lets all guests read, and checks that no memory is given away that is not there.
    fn pass(&mut self, reserve: u64) {
        for guest in &mut self.guests {
            (0..PASS_BLOCKS.div_ceil(guest.vm.blocks.len())).for_each(|_| guest.vm.pass());
        }
        self.check_total(16 - reserve);
    }

    /// Checks that local tiers have no more MiB than these and what guests have less.
    fn check_total(&self, total: u64) {
        // A guest gives before a cache gets, and a cache before a guest: both may happen while this looks.
        let before = self.missing();
        let given = self.local_mib();
        let missing = before.max(self.missing()) / MIB;
        assert!(given <= total + missing, "{given} MiB are given of {total}, {missing} are missing");
    }

    fn finish(self) {
        self.guests.into_iter().for_each(|guest| guest.vm.machine.finish());
    }
}

/// Returns what the memory of a guest takes of the host.
fn resident(qemu: &FakeQemu) -> u64 {
    rustix::fs::fstat(&*qemu.memory).unwrap().st_blocks.cast_unsigned() * 512
}

fn guest<'r>(report: &'r HostReport, name: &str) -> &'r HostGuest {
    vm(report, name).guest.as_ref().unwrap()
}

#[test]
fn what_a_guest_needs_less_answers_the_reads_of_another() {
    let mut host =
        Host::start(&[("gains", 3000, "guest-minimum = '60M'\n", Manner::Honest), ("gives", 64, "", Manner::Honest)]);
    host.pass(4);
    let look = once(host.folder.path(), &host.arguments(&["--total", "16M"]));
    assert_eq!((guest(&look, "gains").could_lend_bytes, guest(&look, "gives").could_lend_bytes), (3 * MIB, 24 * MIB));
    assert!(host.guests.iter().all(|guest| guest.qemu.asked().is_empty()), "nothing is moved");
    let mut daemon = host.daemon_with_rounds();
    let is_over = |shown: &HostReport| {
        let state = &shown.guests.as_ref().unwrap().state;
        let has = vm(shown, "gains").has_bytes;
        state.starts_with("the next round begins") && guest(shown, "gains").taken_bytes == 0 && has >= 12 * MIB
    };
    let mut rounds = 0..10;
    let shown = loop {
        assert!(rounds.next().is_some(), "another round always begins before this one is looked at");
        let mut shown = None;
        wait_at_most(ROUND_TIME, "the loop is answered by the local tier, and the round is over", || {
            assert!(daemon.is_running(), "{}", daemon.log());
            let before = host.guests[0].vm.local().1;
            host.pass(4);
            let is_answered = host.guests[0].vm.local().1 - before == 3000;
            shown = host.report().filter(|shown| is_answered && is_over(shown));
            shown.is_some()
        });
        daemon.terminate();
        let shown = shown.unwrap();
        // The next round may have begun just before, with either of them.
        let lent = guest(&shown, "gives").lent_bytes;
        if host.guests.iter().zip([0, lent]).all(|(guest, lent)| guest.qemu.actual() + lent == HOME) {
            break shown;
        }
        daemon = host.daemon_with_rounds();
    };
    let (gains, gives) = (guest(&shown, "gains"), guest(&shown, "gives"));
    assert_eq!((gains.guest_bytes, gains.lent_bytes), (Some(HOME), 0), "{shown:?}");
    assert!(gives.lent_bytes >= 2 * MIB && host.guests[1].qemu.actual() == HOME - gives.lent_bytes, "{shown:?}");
    let table = once(host.folder.path(), &host.arguments(&["--total", "16M"]));
    assert_eq!(guest(&table, "gives").guest_bytes, Some(host.guests[1].qemu.actual()));
    host.finish();
}

#[test]
fn balloons_that_lie_hang_die_or_stay_where_they_are_give_nothing_away() {
    let mut host = Host::start(&[
        ("honest", 64, "", Manner::Honest),
        ("lies", 64, "", Manner::Lies),
        ("stays", 64, "", Manner::Stuck),
        ("hangs", 64, "", Manner::Hangs),
        ("babbles", 64, "", Manner::Babbles),
        ("dies", 64, "", Manner::Honest),
    ]);
    let mut daemon = host.daemon("40M");
    let is_asked = |host: &Host, at: usize| !host.guests[at].qemu.asked().is_empty();
    wait_at_most(ROUND_TIME, "guests are asked for memory", || {
        (0..3).all(|at| is_asked(&host, at)) && is_asked(&host, 5)
    });
    host.guests[5].qemu.die();
    wait_at_most(ROUND_TIME, "the balloons that do not follow are not asked again", || {
        assert!(daemon.is_running(), "{}", daemon.log());
        host.check_total(36);
        host.guests.iter_mut().for_each(|guest| guest.vm.pass());
        let shown = host.report();
        shown.is_some_and(|shown| ["lies", "stays"].iter().all(|name| guest(&shown, name).state == "stuck"))
    });
    let shown = host.some_report();
    for (name, state, why) in [
        ("lies", "stuck", "did not follow within 30 s"),
        ("stays", "stuck", "did not follow within 30 s"),
        ("hangs", "silent", "hangs.qmp"),
        ("babbles", "silent", "babbles.qmp"),
        ("dies", "silent", "dies.qmp"),
    ] {
        let guest = guest(&shown, name);
        assert!(guest.state == state && guest.why.contains(why) && guest.taken_bytes <= 8 * MIB, "{name}: {guest:?}");
    }
    for (at, name) in [(1, "lies"), (2, "stays")] {
        assert_eq!(guest(&shown, name).lent_bytes, 0, "{shown:?}");
        wait_at_most(ROUND_TIME, "its balloon is told to stop", || host.guests[at].qemu.asked().last() == Some(&HOME));
    }
    assert!(host.guests[3].qemu.asked().is_empty() && host.guests[4].qemu.asked().is_empty());
    daemon.terminate();
    host.finish();
}

#[test]
fn a_daemon_that_is_killed_has_a_successor_that_ends_the_round_and_helps_a_guest_that_is_short() {
    let mut host =
        Host::start(&[("gains", 3000, "guest-minimum = '60M'\n", Manner::Honest), ("gives", 64, "", Manner::Honest)]);
    for steps in [1, 3, 6] {
        let mut daemon = host.daemon("16M");
        wait_at_most(ROUND_TIME, "the guest is asked for memory", || host.guests[1].qemu.asked().len() >= steps);
        daemon.kill();
        host.pass(4);
    }
    let mut daemon = host.daemon_with_rounds();
    wait_at_most(ROUND_TIME, "the round is over", || {
        assert!(daemon.is_running(), "{}", daemon.log());
        host.pass(4);
        host.report().is_some_and(|shown| {
            let lent = guest(&shown, "gives").lent_bytes;
            let is_over = shown.guests.as_ref().unwrap().state.starts_with("the next round begins");
            is_over && lent >= 2 * MIB && host.guests[1].qemu.actual() == HOME - lent
        })
    });
    host.guests[1].qemu.set(Manner::Short);
    wait_at_most(ROUND_TIME, "it has its memory back", || {
        host.pass(0);
        host.guests[1].qemu.actual() == HOME
    });
    wait_at_most(ROUND_TIME, "the reserve is full again", || {
        host.pass(0);
        host.local_mib() <= 12
    });
    let shown = host.some_report();
    assert_eq!((guest(&shown, "gives").state.as_str(), guest(&shown, "gives").taken_bytes), ("short", 0), "{shown:?}");
    let is_told = |d: &remoca_protocol::host::HostDecision| d.why.contains("only 4K is available in it");
    assert!(shown.decisions.iter().any(is_told), "{:#?}", shown.decisions);
    daemon.terminate();
    host.finish();
}

#[test]
fn all_guests_have_their_memory_back_at_once_with_and_without_a_daemon() {
    let mut host =
        Host::start(&[("gains", 3000, "guest-minimum = '60M'\n", Manner::Honest), ("gives", 64, "", Manner::Honest)]);
    let arguments = |host: &Host| {
        let all = ["host", "give-back", "--sockets", host.folder.path().to_str().unwrap(), "--config"];
        all.into_iter().chain([host.config.path().to_str().unwrap()]).map(str::to_owned).collect::<Vec<_>>()
    };
    let give_back = |host: &Host| run(&arguments(host).iter().map(String::as_str).collect::<Vec<_>>());
    let is_whole = |host: &Host| host.guests.iter().all(|guest| guest.qemu.actual() == HOME);
    let lend = |host: &mut Host, daemon: &mut Program| {
        wait_at_most(ROUND_TIME, "a guest lends", || {
            assert!(daemon.is_running(), "{}", daemon.log());
            host.pass(4);
            host.report().is_some_and(|shown| shown.guests.unwrap().lent_bytes >= 8 * MIB)
        });
    };
    let output = give_back(&host);
    assert!(output.status.success() && is_whole(&host), "nothing is lent: {output:?}");
    // The next round is due after that time, also since a command that gave nothing back.
    let more = ["--apply", "-o", "json", "--total", "16M", "--round", "2s"];
    let mut daemon = super::host::daemon(host.folder.path(), &host.arguments(&more));
    lend(&mut host, &mut daemon);
    daemon.kill();
    // It may have given all back just before.
    while is_whole(&host) {
        daemon = super::host::daemon(host.folder.path(), &host.arguments(&more));
        lend(&mut host, &mut daemon);
        daemon.kill();
    }
    let output = give_back(&host);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && is_whole(&host), "{text}: {}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(text.matches("it has all of its memory").count(), 2, "{text}");
    host.check_total(12);
    let mut daemon = super::host::daemon(host.folder.path(), &host.arguments(&more));
    lend(&mut host, &mut daemon);
    host.guests[1].qemu.set(Manner::Hangs);
    // From now on it gets nothing; it may have got all just before.
    while host.guests[1].qemu.actual() == HOME {
        host.guests[1].qemu.set(Manner::Honest);
        lend(&mut host, &mut daemon);
        host.guests[1].qemu.set(Manner::Hangs);
    }
    let output = give_back(&host);
    let (text, error) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert!(!output.status.success() && text.contains("gives.qmp"), "{text}");
    assert!(error.contains("a guest does not have all of its memory back: NOTE says why"), "{error}");
    assert_eq!(text.matches("it has all of its memory").count(), 1, "{text}");
    daemon.terminate();
    host.guests[1].qemu.set(Manner::Honest);
    let output = give_back(&host);
    assert!(output.status.success() && is_whole(&host), "{output:?}");
    host.check_total(12);
    host.finish();
}
