//! Kills at the narrow places: a build with the feature `ablation` kills itself there, under load. Every request
//! completes exactly once (the test guest panics otherwise), every answer is right, and so are the images afterwards.

use super::ablation::binary;
use super::support::PATIENCE;
use super::support::machine::{Evictions, Machine, Setup};
use super::support::model::BLOCK;
use super::support::program::{REMOCA, Serve, command, run_command};
use remoca_frontend::testing::Command;
use remoca_io::narrow::PLACES;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Stdio;
use std::time::Instant;

/// What is done until the process has died, besides reading, writing and evicting.
#[derive(Clone, Copy, Debug)]
enum Provocation {
    Load,
    /// The size of the cache changes.
    Resize,
    /// The guest leaves with requests in flight, and comes back.
    Reconnect,
    /// The memory server is killed and started again.
    ServerDies,
    Upgrade,
    /// The image of the disk grows.
    Grow,
}

/// Places that no load passes: a disk comes or goes there, or a service manager keeps connections.
const NOT_UNDER_LOAD: [&str; 3] = ["patience-over", "disk-forgotten", "disk-numbered"];

/// Each other place, with the passages at which to die. Before anything else happens, one disk with two queues and the port
/// are started once, and one session begins.
const TABLE: [(&str, &[u64], Provocation); 21] = [
    ("publish-begun", &[40, 141], Provocation::Load),
    ("publish-seen", &[1, 40, 143], Provocation::Load),
    ("publish-half-cleared", &[55, 208], Provocation::Load),
    ("write-forgotten", &[50, 151], Provocation::Load),
    ("disk-submitted", &[60, 161], Provocation::Load),
    ("disk-done", &[70, 171], Provocation::Load),
    ("resize-begun", &[1, 4], Provocation::Resize),
    ("resize-done", &[2, 3], Provocation::Resize),
    ("queue-recovered", &[4, 6], Provocation::Reconnect),
    ("request-repeated", &[1, 5], Provocation::Reconnect),
    ("message-begun", &[60, 75], Provocation::Reconnect),
    ("message-answered", &[65], Provocation::Reconnect),
    ("message-kept", &[70], Provocation::Reconnect),
    ("session-begun", &[2], Provocation::ServerDies),
    ("handover-drained", &[1], Provocation::Upgrade),
    ("handover-described", &[1], Provocation::Upgrade),
    ("handover-received", &[1], Provocation::Upgrade),
    ("index-found", &[1], Provocation::Upgrade),
    ("handover-opened", &[1], Provocation::Upgrade),
    ("size-recorded", &[1, 2], Provocation::Grow),
    ("size-followed", &[1, 2], Provocation::Grow),
];

/// Sends a command to a process that may die of it, and returns the answer received so far.
fn tell(control: &Path, text: &str) -> String {
    let mut answer = Vec::new();
    if let Ok(mut stream) = UnixStream::connect(control) {
        let _ = stream.write_all(text.as_bytes());
        let _ = stream.read_to_end(&mut answer);
    }
    String::from_utf8_lossy(&answer).into_owned()
}

fn provoke(provocation: Provocation, machine: &mut Machine, server: &mut Serve) {
    let control = machine.control();
    match provocation {
        Provocation::Load => {}
        Provocation::Resize => {
            let pages = 256 + machine.random.below(1792);
            tell(&control, &format!("{{\"op\":\"set\",\"cache_bytes\":{}}}\n", pages * 4096));
        }
        Provocation::Reconnect => {
            let guest = &mut machine.disks[0].guest;
            let reads: Vec<_> =
                (0..8).map(|n| guest.submit(n % 2, Command::Read { sector: u64::from(n) * 8, length: 4096 })).collect();
            guest.queues.iter().for_each(|queue| queue.kick());
            guest.disconnect();
            machine.outlive();
            let disk = &mut machine.disks[0];
            for (read, number) in reads.into_iter().zip(0..) {
                assert_eq!(disk.guest.wait(read), 0);
                assert!(disk.guest.data(read, 4096) == disk.model.block(number), "block {number}");
            }
        }
        Provocation::ServerDies => {
            if tell(&control, "{\"op\":\"status\"}\n").contains("\"connected\":true") {
                server.program.kill();
                server.restart();
            }
        }
        Provocation::Grow => {
            let disk = &mut machine.disks[0];
            let bytes = disk.model.bytes.len() + BLOCK;
            File::options().write(true).open(&disk.image).unwrap().set_len(bytes as u64).unwrap();
            disk.model.resize(bytes);
            tell(&control, "{\"op\":\"rescan\"}\n");
        }
        Provocation::Upgrade => {
            let mut upgrade = command(REMOCA);
            upgrade.arg("upgrade").arg(&control).stdout(Stdio::null()).stderr(Stdio::null());
            let mut upgrade = upgrade.spawn().unwrap();
            let give_up_at = Instant::now() + PATIENCE;
            while upgrade.try_wait().unwrap().is_none() {
                assert!(Instant::now() < give_up_at, "the upgrade hangs");
                machine.round();
            }
        }
    }
}

fn dies_at(place: &str, passage: u64, provocation: Provocation, seed: u64) {
    println!("{place}:{passage}");
    let folder = tempfile::tempdir().unwrap();
    let mut server = Serve::start(folder.path(), "16M");
    let arguments = vec!["--kill-at".into(), format!("{place}:{passage}")];
    let address = Some(server.address.clone());
    let setup = Setup { binary: binary().into(), server: address, arguments, seed, ..Setup::default() };
    let mut machine = Machine::start_in(folder, setup);
    machine.evictions = Evictions::LYING;
    machine.outlives = true;
    machine.run_until("the process dies", |machine| {
        if machine.deaths == 0 {
            provoke(provocation, machine, &mut server);
            machine.run(1);
        }
        machine.deaths > 0
    });
    machine.run_until_hits(20);
    machine.run(20);
    assert_eq!(machine.deaths, 1);
    machine.pages_sent = machine.counter("evictions_reported");
    machine.finish();
}

fn die_everywhere(provocations: impl Fn(Provocation) -> bool) {
    for ((place, passages, provocation), seed) in TABLE.into_iter().zip(100..) {
        if provocations(provocation) {
            passages.iter().for_each(|&passage| dies_at(place, passage, provocation, seed));
        }
    }
}

#[test]
fn killed_between_two_steps_of_a_request() {
    die_everywhere(|provocation| matches!(provocation, Provocation::Load));
}

#[test]
fn killed_while_something_changes() {
    die_everywhere(|provocation| !matches!(provocation, Provocation::Load));
}

#[test]
fn every_place_is_in_the_table() {
    let places: Vec<_> = TABLE.iter().map(|(place, ..)| *place).collect();
    let others: Vec<_> = PLACES.into_iter().filter(|place| !NOT_UNDER_LOAD.contains(place)).collect();
    assert_eq!(places, others);
    // The shipped program has none of these places.
    let refused =
        run_command(command(REMOCA).args(["disk", "--kill-at", "disk-done:1", "--image", "x", "--socket", "y"]));
    assert_eq!(refused.status.code(), Some(2));
    let output =
        run_command(command(binary()).args(["disk", "--kill-at", "nowhere:1", "--image", "x", "--socket", "y"]));
    assert!(String::from_utf8_lossy(&output.stderr).contains("places are"));
}
