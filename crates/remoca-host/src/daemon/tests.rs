//! The daemon beside VM processes that hang.

use super::*;
use crate::plan::Policy;
use crate::planner::{GuestTerms, Move, Record};
use crate::resource::Resource;
use crate::testing::{UNIT, status};
use remoca_protocol::control::{Command, Reply};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

/// Time that VM processes have in tests: one that is not to answer hangs, and the others may be late on a busy machine.
const LONG: Duration = Duration::from_secs(600);

struct Host(Vec<(String, PathBuf)>);

impl Surroundings for Host {
    fn vms(&self) -> Vec<(String, PathBuf)> {
        self.0.clone()
    }

    fn limits(&self, _: &str) -> Result<Limits, String> {
        Ok(Limits::default())
    }

    fn monitor(&self, _: &str) -> Result<Option<Address>, String> {
        Ok(None)
    }

    fn show(&mut self, _: &HostReport) -> io::Result<()> {
        Ok(())
    }
}

fn settings(total_bytes: u64) -> Settings {
    Settings {
        resource: Resource::Cache,
        total_bytes,
        policy: Policy::Optimal,
        applies: true,
        interval: Duration::from_millis(1),
        window: Duration::from_secs(60),
        readings_min: 1,
        guests: None,
    }
}

fn daemon(settings: Settings, host: Host, paths: Option<&Paths>) -> Daemon<Host> {
    let processes = Processes::with_patience(settings.resource, LONG, LONG);
    Daemon { processes, ..Daemon::new(settings, host, paths).unwrap() }
}

/// Answers for a VM that has so many bytes, and gives memory back after it has answered to that. Sends each command to `heard`.
fn serve_later(listener: &UnixListener, name: &str, bytes: u64, heard: &Sender<(String, bool)>) {
    let (mut wanted, mut granted) = (bytes, bytes);
    for mut stream in listener.incoming().flatten() {
        let mut line = String::new();
        BufReader::new(&stream).read_line(&mut line).unwrap();
        let command = Command::parse(line.trim_end().as_bytes()).unwrap();
        if let Command::Set { cache_bytes: Some(bytes), .. } = command {
            wanted = bytes;
        } else {
            granted = wanted;
        }
        // Nobody listens when the daemon ends.
        let _ = stream.write_all(&Reply::Status(Box::new(status(name, wanted, granted))).line().unwrap());
        let _ = heard.send((name.to_owned(), matches!(command, Command::Set { .. })));
    }
}

/// Answers for a VM that has so many bytes. Sends each command to `heard`; a size is not answered before there is something in `go_on`.
fn serve(listener: &UnixListener, name: &str, mut bytes: u64, heard: &Sender<(String, bool)>, go_on: &Receiver<()>) {
    for mut stream in listener.incoming().flatten() {
        let mut line = String::new();
        BufReader::new(&stream).read_line(&mut line).unwrap();
        let command = Command::parse(line.trim_end().as_bytes()).unwrap();
        let is_told = matches!(command, Command::Set { .. });
        let _ = heard.send((name.to_owned(), is_told));
        if let Command::Set { cache_bytes: Some(wanted), .. } = command {
            let _ = go_on.recv();
            bytes = wanted;
        }
        let reply = match command {
            Command::Curve { .. } => Reply::Error { error: "none".into() },
            _ => Reply::Status(Box::new(status(name, bytes, bytes))),
        };
        // Nobody listens when the daemon ends.
        let written = stream.write_all(&reply.line().unwrap());
        assert!(!is_told || written.is_ok(), "the daemon has given up");
    }
}

#[test]
fn the_others_are_looked_at_while_a_vm_process_does_not_answer_to_a_new_size() {
    let folder = tempfile::tempdir().unwrap();
    let (sender, heard) = channel();
    let mut vms = Vec::new();
    let mut go_on = BTreeMap::new();
    for name in ["a", "b"] {
        let socket = folder.path().join(name);
        let listener = UnixListener::bind(&socket).unwrap();
        let (release, held) = channel();
        let sender = sender.clone();
        thread::spawn(move || serve(&listener, name, 60 * UNIT, &sender, &held));
        vms.push((name.to_owned(), socket));
        go_on.insert(name.to_owned(), release);
    }
    // Both have too much.
    let settings = settings(80 * UNIT);
    let (stop, ends) = UnixStream::pair().unwrap();
    let daemon = thread::spawn(move || {
        let mut daemon = daemon(settings, Host(vms), None);
        daemon.run(ends.as_fd(), Extent::Always).unwrap();
        daemon.report()
    });
    let (told, other) = loop {
        if let (name, true) = heard.recv().unwrap() {
            break (name.clone(), if name == "a" { "b" } else { "a" });
        }
    };
    // It hangs, and is not asked. The other one is.
    assert_eq!(heard.recv().unwrap(), (other.to_owned(), false));
    go_on[&told].send(()).unwrap();
    go_on[other].send(()).unwrap();
    // Then it is the turn of the other one.
    while heard.recv().unwrap() != (other.to_owned(), true) {}
    (&stop).write_all(&[1]).unwrap();
    let report = daemon.join().unwrap();
    let first = report.decisions.iter().find(|decision| decision.vm.as_ref() == Some(&told)).unwrap();
    assert!(first.outcome.starts_with("given back"), "{report:?}");
}

#[test]
fn a_vm_that_gives_memory_back_is_looked_at_before_the_next_look_at_all() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("a");
    let listener = UnixListener::bind(&socket).unwrap();
    let (sender, heard) = channel();
    thread::spawn(move || serve_later(&listener, "a", 60 * UNIT, &sender));
    let settings = Settings { interval: Duration::from_secs(3600), ..settings(40 * UNIT) };
    let (stop, ends) = UnixStream::pair().unwrap();
    let daemon = thread::spawn(move || {
        let mut daemon = daemon(settings, Host(vec![("a".into(), socket)]), None);
        daemon.run(ends.as_fd(), Extent::Always).unwrap();
    });
    while heard.recv().unwrap() != ("a".into(), true) {}
    let after = heard.recv_timeout(Duration::from_secs(60)).expect("a look before the hour is over");
    assert_eq!(after, ("a".into(), false));
    (&stop).write_all(&[1]).unwrap();
    daemon.join().unwrap();
}

#[test]
fn help_waits_neither_for_a_look_that_is_due_nor_for_a_vm_process_that_was_told_a_size() {
    let folder = tempfile::tempdir().unwrap();
    let paths = Paths::new(folder.path());
    let relief = |vm: &str| Move { vm: vm.into(), side: Side::Guest, from_bytes: 1, to_bytes: 2, ..Move::default() };
    let record = Record { reliefs: vec![relief("a"), relief("b")], ..Record::default() };
    record::write(&paths.record, &record).unwrap();
    let guests = Some(GuestTerms { reserve_bytes: UNIT, rest: Duration::from_secs(60) });
    let settings = Settings { guests, ..settings(80 * UNIT) };
    let mut daemon = daemon(settings, Host(Vec::new()), Some(&paths));
    let socket = folder.path().join("hangs");
    let _hangs = UnixListener::bind(&socket).unwrap();
    daemon.processes.set(&socket, &Step { vm: "hangs".into(), side: Side::Tier, bytes: 1 }).unwrap();
    let helped: Vec<String> = (0..2).map(|_| daemon.next_step(true).unwrap().vm).collect();
    assert_eq!(helped, ["a", "b"]);
    assert!(daemon.next_step(true).is_none() && daemon.processes.is_told());
}

/// What the file of each VM says of its monitor.
struct Files(Result<Option<Address>, String>);

impl Surroundings for Files {
    fn vms(&self) -> Vec<(String, PathBuf)> {
        Vec::new()
    }

    fn limits(&self, _: &str) -> Result<Limits, String> {
        Ok(Limits::default())
    }

    fn monitor(&self, _: &str) -> Result<Option<Address>, String> {
        self.0.clone()
    }

    fn show(&mut self, _: &HostReport) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_mistake_in_a_file_costs_no_vm_its_monitor() {
    let address: Address = "libvirt:a".parse().unwrap();
    let mistake = || Err("a mistake".to_owned());
    let mut daemon = Daemon::new(settings(80 * UNIT), Files(mistake()), None).unwrap();
    let mut found = |said: Result<Option<Address>, String>| {
        daemon.surroundings.0 = said;
        daemon.find_monitors(&["a".to_owned()]);
        daemon.addresses["a"].clone()
    };
    assert_eq!(found(mistake()), Err("a mistake".into()));
    assert_eq!(found(Ok(Some(address.clone()))), Ok(address.clone()));
    for _ in 0..2 {
        assert_eq!(found(mistake()), Ok(address.clone()));
    }
    assert!(found(Ok(None)).unwrap_err().contains("names no monitor"));
    assert_eq!(found(mistake()), Err("a mistake".into()), "it has none to keep");
    daemon.find_monitors(&[]);
    assert!(daemon.addresses.is_empty());
}

#[test]
fn nothing_is_told_that_is_not_on_record() {
    let folder = tempfile::tempdir().unwrap();
    let paths = Paths::new(folder.path());
    let help = Move { vm: "a".into(), side: Side::Guest, from_bytes: 1, to_bytes: 2, ..Move::default() };
    record::write(&paths.record, &Record { reliefs: vec![help], ..Record::default() }).unwrap();
    let guests = Some(GuestTerms { reserve_bytes: UNIT, rest: Duration::from_secs(60) });
    let mut daemon = daemon(Settings { guests, ..settings(80 * UNIT) }, Host(Vec::new()), Some(&paths));
    let (_stop, ends) = UnixStream::pair().unwrap();
    daemon.record = Some(folder.path().join("nowhere").join("record"));
    assert!(!daemon.execute(ends.as_fd()).unwrap());
    let decisions = daemon.report().decisions;
    assert!(decisions.last().unwrap().outcome.contains("the intent cannot be written"), "{decisions:?}");
}
