//! Front ends that never connect again, beside a process that is killed: a service manager keeps their connections.

use super::ablation::binary;
use super::support::machine::{Evictions, Machine, Setup};
use super::support::model::BLOCK;
use super::support::program::{Serve, run};
use super::support::{PATIENCE, wait_until};
use super::upgrade;
use remoca_frontend::testing::Command;
use remoca_io::fake_manager::FakeManager;
use remoca_io::lock::{lock, retry_while_in_use};
use rustix::process::{Pid, Signal, kill_process};
use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Starts a machine whose connections a service manager keeps.
fn machine(setup: Setup) -> (Serve, Arc<FakeManager>, Machine) {
    let manager = Arc::new(FakeManager::start());
    let setup = Setup { manager: Some(manager.clone()), ..setup };
    let (server, mut machine) = Machine::start_with_server(tempfile::tempdir().unwrap(), setup);
    machine.evictions = Evictions::LYING;
    machine.outlives = true;
    (server, manager, machine)
}

#[track_caller]
fn wait_until_kept(machine: &Machine) {
    wait_until("the connections are kept", || {
        let status = machine.status();
        status.disks.iter().all(|disk| disk.outlives_crash) && status.port.is_some_and(|port| port.outlives_crash)
    });
}

/// Returns the setup of a process whose hypervisors are not disconnected however long a start takes on this machine, as long as the
/// file exists that this makes in `folder`.
fn without_hurry(folder: &Path) -> Setup {
    let gate = folder.join("gate");
    std::fs::write(&gate, "").unwrap();
    let arguments = vec!["--hold-at".into(), format!("patience-over:{}", gate.display())];
    Setup { binary: binary().into(), arguments, ..Setup::default() }
}

/// Kills the process at some moment of the load, again and again.
fn expect_no_reconnect(rounds: usize) {
    let folder = tempfile::tempdir().unwrap();
    let (_server, manager, mut machine) = machine(Setup { sectors: vec![512, 4096], ..without_hurry(folder.path()) });
    wait_until_kept(&machine);
    // Whoever has one of them has its lock.
    let locked = machine.disks.iter().map(|disk| disk.image.clone()).chain([machine.state()]);
    assert!(!locked.into_iter().any(|file| manager.keeps(&file)), "the manager keeps a file that is locked");
    let names = manager.names();
    for round in 1..=rounds {
        let pid = Pid::from_raw(machine.program.pid().cast_signed()).unwrap();
        let delay = Duration::from_micros(machine.random.below(20_000) as u64);
        let killer = std::thread::spawn(move || {
            std::thread::sleep(delay);
            kill_process(pid, Signal::KILL).unwrap();
        });
        machine.run_until("the process dies and comes back", |machine| machine.deaths == round);
        killer.join().unwrap();
        machine.run(5);
        machine.pages_sent = machine.counter("evictions_reported");
        machine.expect_no_harm();
        assert_eq!(machine.reconnects, 0, "round {round}: {}", machine.program.log());
        assert_eq!(manager.names(), names, "round {round}");
    }
    machine.run_until_hits(20);
    machine.finish();
}

#[test]
fn a_guest_that_never_connects_again_goes_on_after_a_kill() {
    expect_no_reconnect(10);
}

#[test]
#[ignore = "long: cargo xtask test-long"]
fn a_guest_that_never_connects_again_goes_on_after_hundreds_of_kills() {
    expect_no_reconnect(300);
}

/// The service manager must not keep the memory of a VM that has ended.
#[test]
fn a_hypervisor_that_goes_while_there_is_no_process_leaves_nothing_behind() {
    let (_server, manager, mut machine) = machine(Setup::default());
    wait_until_kept(&machine);
    machine.run(5);
    machine.program.kill();
    let before = manager.names();
    machine.disks[0].guest.disconnect();
    machine.port.disconnect();
    machine.restart();
    assert!(machine.program.log().contains("it has gone"), "{}", machine.program.log());
    wait_until_kept(&machine);
    let after = manager.names();
    assert!(after.len() == before.len() && !after.iter().any(|name| before.contains(name)), "{before:?}, {after:?}");
    go_on(machine);
}

/// A restart in good order is no other thing for the guest than a kill. So is a kill after an upgrade.
#[test]
fn a_guest_stays_connected_over_a_restart_and_a_kill_after_an_upgrade() {
    let folder = tempfile::tempdir().unwrap();
    let (_server, manager, mut machine) = machine(without_hurry(folder.path()));
    for upgrades in [false, true] {
        wait_until_kept(&machine);
        let count = manager.names().len();
        if upgrades {
            let upgrade = run(&[OsStr::new("upgrade"), machine.control().as_os_str()]);
            assert!(upgrade.status.success(), "{}", String::from_utf8_lossy(&upgrade.stderr));
            wait_until_kept(&machine);
            machine.run(5);
            machine.program.kill();
        } else {
            machine.run(5);
            machine.program.terminate();
        }
        assert_eq!(manager.names().len(), count);
        machine.respawn();
        machine.run(5);
        assert_eq!(machine.reconnects, 0);
    }
    go_on(machine);
}

/// Upgrades to a program that can be described, and is gone when it is to start.
#[track_caller]
fn upgrade_in_vain(machine: &Machine) {
    let text = format!("#!/bin/sh\n{} \"$@\" && rm $0\n", binary().display());
    let program = upgrade::script(machine.folder.path(), "vanishes", &text);
    let (is_done, said) = upgrade::end(upgrade::begin(&machine.control(), Some(&program)));
    assert!(!is_done && said.contains("new program cannot be started"), "{said}");
}

/// Kills the process and starts another one, and expects that the guest stays connected.
#[track_caller]
fn expect_no_reconnect_after_a_kill(mut machine: Machine) {
    machine.program.kill();
    machine.respawn();
    machine.run(5);
    assert_eq!(machine.reconnects, 0, "{}", machine.program.log());
    go_on(machine);
}

/// The program that was to take over has the connections, and does not start. The guest says nothing meanwhile.
#[test]
fn an_upgrade_that_fails_at_the_last_step_keeps_the_connections() {
    let folder = tempfile::tempdir().unwrap();
    let (_server, manager, mut machine) = machine(without_hurry(folder.path()));
    wait_until_kept(&machine);
    machine.run(5);
    let count = manager.names().len();
    upgrade_in_vain(&machine);
    wait_until("the connections are kept again", || manager.names().len() == count);
    wait_until_kept(&machine);
    expect_no_reconnect_after_a_kill(machine);
}

/// The store was emptied for a program that did not start, and the manager hangs.
#[test]
fn after_an_upgrade_that_failed_a_connection_is_not_said_to_be_kept_before_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let (_server, manager, machine) = machine(without_hurry(folder.path()));
    wait_until_kept(&machine);
    let hangs = manager.hang();
    upgrade_in_vain(&machine);
    assert!(machine.status().disks.iter().all(|disk| !disk.outlives_crash));
    drop(hangs);
    wait_until_kept(&machine);
    expect_no_reconnect_after_a_kill(machine);
}

/// The process that is killed may only have assumed that the cache is off, and have owed a flush.
#[test]
fn a_write_cache_that_was_off_at_a_kill_is_flushed_once_when_it_is_switched_off_again() {
    let folder = tempfile::tempdir().unwrap();
    let (_server, _manager, mut machine) = machine(without_hurry(folder.path()));
    machine.disks[0].guest.set_writeback(false).unwrap();
    wait_until_kept(&machine);
    machine.program.kill();
    machine.respawn();
    wait_until("the successor is there", || UnixStream::connect(machine.control()).is_ok());
    // Nobody knows whether the process that was killed had made the flush that it may have owed.
    wait_until("the successor makes it, without a request", || machine.counter("flushes") == 1);
    machine.run(5);
    assert_eq!(machine.disks[0].guest.read_config(32, 1).unwrap(), [0]);
    let before = machine.counter("flushes");
    for _ in 0..2 {
        machine.disks[0].guest.set_writeback(false).unwrap();
        assert_eq!(machine.counter("flushes"), before + 1);
    }
    assert_eq!(machine.reconnects, 0, "{}", machine.program.log());
    go_on(machine);
}

/// Expects that all is well with a machine whose process was started again.
fn go_on(mut machine: Machine) {
    machine.run(5);
    machine.pages_sent = machine.counter("evictions_reported");
    machine.finish();
}

/// Only a message that is half done costs a connection.
#[test]
fn killed_at_every_step_of_a_message() {
    // The front ends have sent fewer messages when all queues run.
    let places = [("message-begun", 80, 1), ("message-answered", 81, 1), ("message-kept", 82, 0)];
    for (place, passage, reconnects) in places {
        let folder = tempfile::tempdir().unwrap();
        let mut setup = without_hurry(folder.path());
        setup.arguments.extend(["--kill-at".into(), format!("{place}:{passage}")]);
        let (_server, _manager, mut machine) = machine(setup);
        wait_until_kept(&machine);
        let (mut sends, is_dead) = (machine.disks[0].guest.sender(), Arc::<AtomicBool>::default());
        let dies = is_dead.clone();
        // The last message is answered by the successor, or never.
        let sender = std::thread::spawn(move || while !dies.load(Ordering::SeqCst) && sends() {});
        wait_until("it dies within a message", || !machine.program.is_running());
        is_dead.store(true, Ordering::SeqCst);
        machine.come_back();
        sender.join().unwrap();
        machine.run(20);
        assert_eq!((machine.deaths, machine.reconnects), (1, reconnects), "{place}: {}", machine.program.log());
        go_on(machine);
    }
}

/// It waits for that, to connect again. The service manager has a copy of its connection.
#[test]
fn a_hypervisor_that_is_refused_is_hung_up_though_the_manager_hangs() {
    let (_server, manager, mut machine) = machine(Setup::default());
    wait_until_kept(&machine);
    let hangs = manager.hang();
    let (no_memory, _other) = UnixStream::pair().unwrap();
    assert!(machine.disks[0].guest.share_file(&no_memory, 4096).is_err());
    wait_until("it is hung up", || !machine.disks[0].guest.is_connected());
    drop(hangs);
    machine.come_back();
    go_on(machine);
}

/// Time that passes takes nothing from a hypervisor that is served, in this process or in the next one.
#[test]
fn a_guest_that_is_served_stays_connected_when_the_time_for_a_start_is_over() {
    let folder = tempfile::tempdir().unwrap();
    let gate = folder.path().join("gate");
    let arguments = vec!["--hold-at".into(), format!("patience-over:{}", gate.display())];
    let (_server, _manager, mut machine) = machine(Setup { binary: binary().into(), arguments, ..Setup::default() });
    wait_until_kept(&machine);
    std::fs::write(&gate, "").unwrap();
    machine.program.kill();
    machine.respawn();
    machine.run(5);
    let tasks = format!("/proc/{}/task", machine.program.pid());
    let waits = || {
        let is_closer = |task: PathBuf| {
            // A thread that has just ended has no file.
            let name = std::fs::read_to_string(task.join("comm")).unwrap_or_default();
            name.starts_with("kept connection")
        };
        std::fs::read_dir(&tasks).unwrap().any(|task| is_closer(task.unwrap().path()))
    };
    wait_until("there is a thread for that time", waits);
    std::fs::remove_file(&gate).unwrap();
    wait_until("the time is over", || !waits());
    machine.run(5);
    expect_no_reconnect_after_a_kill(machine);
}

/// A hypervisor does nothing else while it waits for an answer.
#[test]
fn a_hypervisor_is_answered_before_the_index_is_made_ready() {
    let folder = tempfile::tempdir().unwrap();
    let gate = folder.path().join("index-gate");
    let mut setup = without_hurry(folder.path());
    setup.arguments.extend(["--hold-at".into(), format!("index-found:{}", gate.display())]);
    let (_server, _manager, mut machine) = machine(setup);
    wait_until_kept(&machine);
    machine.run_until_hits(20);
    machine.program.kill();
    std::fs::write(&gate, "").unwrap();
    let guest = &mut machine.disks[0].guest;
    let read = guest.submit(0, Command::Read { sector: 0, length: BLOCK as u64 });
    guest.queues[0].kick();
    machine.respawn();
    let guest = &mut machine.disks[0].guest;
    let bytes = guest.capacity().unwrap();
    let base = guest.stop_queue(0).unwrap();
    guest.start_queue(0, base).unwrap();
    assert_eq!(guest.capacity().unwrap(), bytes);
    assert_eq!(guest.result(read), None);
    assert_eq!(machine.program.log().matches("the cache starts").count(), 1, "that of the former process");
    std::fs::remove_file(&gate).unwrap();
    assert_eq!(machine.disks[0].guest.wait(read), 0);
    assert!(machine.disks[0].guest.data(read, BLOCK) == machine.disks[0].model.block(0));
    assert_eq!(machine.reconnects, 0);
    go_on(machine);
}

/// Starts a process that is killed, and then twice in vain after `obstruct`, and with success without what that returns. A
/// hypervisor does nothing else while it waits: it is better off without its disk.
fn expect_two_chances<O>(obstruct: impl FnOnce(&Machine) -> O) {
    let folder = tempfile::tempdir().unwrap();
    let environment = vec![("REMOCA_CONFIG", folder.path().join("config").display().to_string())];
    // Only failures count.
    let (_server, manager, mut machine) = machine(Setup { environment, ..without_hurry(folder.path()) });
    wait_until_kept(&machine);
    machine.run(5);
    machine.program.kill();
    let obstacle = obstruct(&machine);
    for failed_starts in 1..=2 {
        assert!(machine.disks[0].guest.is_connected() && !manager.names().is_empty());
        machine.respawn();
        wait_until("it cannot start", || !machine.program.is_running());
        if failed_starts == 1 {
            assert!(!manager.names().is_empty(), "{}", machine.program.log());
            assert!(machine.disks[0].guest.is_connected(), "{}", machine.program.log());
        }
    }
    wait_until("nothing is kept", || manager.names().is_empty());
    // A program that another test is just starting has copies of the front end's socket and of the obstacle until its `exec`.
    wait_until("the front end is disconnected", || !machine.disks[0].guest.is_connected());
    drop(obstacle);
    let _ = std::fs::remove_file(machine.control());
    machine.disks[0].guest.disconnect();
    machine.port.disconnect();
    machine.restart();
    go_on(machine);
}

#[test]
fn connections_of_a_process_that_cannot_have_its_image_are_closed() {
    expect_two_chances(|machine| {
        // Another program. The kernel may still write for the one that was killed.
        let locked = retry_while_in_use(PATIENCE, || {
            let image = File::options().read(true).write(true).open(&machine.disks[0].image).unwrap();
            lock(&image, false).map(|()| image)
        });
        locked.unwrap()
    });
}

/// It has answered the front end by then, but serves nothing.
#[test]
fn connections_of_a_process_that_cannot_have_its_control_socket_are_closed() {
    expect_two_chances(|machine| {
        std::fs::remove_file(machine.control()).unwrap();
        UnixListener::bind(machine.control()).unwrap()
    });
}

/// It has opened nothing by then.
#[test]
fn connections_of_a_process_that_cannot_use_any_configuration_are_closed() {
    struct Broken(PathBuf);
    impl Drop for Broken {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }
    expect_two_chances(|machine| {
        let folder = PathBuf::from(&machine.setup.environment[0].1);
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join("remoca.toml"), "version = 1\n[vms]\ncache = 'much'\n").unwrap();
        // The last good copy.
        std::fs::write(machine.control().with_file_name("control.config"), "no copy").unwrap();
        Broken(folder)
    });
}

#[test]
fn connections_of_a_process_that_does_not_become_ready_are_closed() {
    let (_server, manager, mut machine) = machine(Setup { nbd: true, ..Setup::default() });
    wait_until_kept(&machine);
    machine.run(5);
    machine.program.kill();
    let nbdkit = &machine.disks[0].nbd.as_ref().unwrap().program;
    nbdkit.signal(Signal::STOP);
    machine.respawn();
    wait_until("the front end is disconnected", || !machine.disks[0].guest.is_connected());
    wait_until("nothing is kept", || manager.names().is_empty());
    machine.disks[0].nbd.as_ref().unwrap().program.signal(Signal::CONT);
    machine.run(5);
    assert_eq!(machine.reconnects, 2, "the disk and the port");
    go_on(machine);
}
