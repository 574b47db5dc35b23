//! Miss-ratio curves over the control socket: of a guest that reads in a known pattern, with and without a cache.

use super::support::folder;
use super::support::machine::{Machine, Setup};
use super::support::model::BLOCK;
use super::support::program::{Serve, ask_raw, expect_refusal, run};
use remoca_frontend::testing::Command;
use remoca_protocol::control::{CurveStatus, Reply};
use std::collections::HashMap;
use std::path::PathBuf;
use std::process::Output;

/// Blocks of the loop: 4 MiB.
const LOOP: usize = 1024;
const MIB: u64 = 1 << 20;
const FAILURE: i32 = 1;

/// Returns the blocks of the loop.
fn unique_blocks(machine: &Machine, disk: usize) -> Vec<usize> {
    let mut found = all_unique_blocks(machine, disk);
    found.truncate(LOOP);
    assert_eq!(found.len(), LOOP);
    found
}

/// Returns the blocks whose content no other block has: which of the two was evicted could not be told.
fn all_unique_blocks(machine: &Machine, disk: usize) -> Vec<usize> {
    let blocks: Vec<_> = machine.disks.iter().flat_map(|disk| disk.model.bytes.chunks(BLOCK)).collect();
    let mut count = HashMap::new();
    blocks.iter().for_each(|block| *count.entry(*block).or_insert(0) += 1);
    let model = &machine.disks[disk].model;
    let is_unique = |number: &usize| count[model.block(*number)] == 1 && model.block(*number) != [0; BLOCK];
    (0..model.bytes.len() / BLOCK).filter(is_unique).collect()
}

/// Reads the blocks of the loop one after the other. Each is evicted right after its read if `is_seen` says so of its place in the loop.
fn pass(machine: &mut Machine, disk: usize, is_seen: impl Fn(usize) -> bool) {
    for (place, number) in unique_blocks(machine, disk).into_iter().enumerate() {
        let page = machine.disks[disk].read(&(number * BLOCK..(number + 1) * BLOCK));
        assert!(page == machine.disks[disk].model.block(number));
        if is_seen(place) {
            assert_eq!(machine.send_to_port(1, &page), 0);
            machine.pages_sent += 1;
        }
    }
}

fn ask(machine: &Machine, more: &[&str]) -> Output {
    run(&[&["curve", machine.control().to_str().unwrap()], more].concat())
}

#[track_caller]
fn curve(machine: &Machine, more: &[&str]) -> CurveStatus {
    let output = ask(machine, &[&["-o", "json"], more].concat());
    assert!(output.status.success(), "{output:?}: {}", machine.program.log());
    serde_json::from_slice(&output.stdout).unwrap()
}

fn miss_ratio(curve: &CurveStatus, bytes: u64) -> f64 {
    curve.points.iter().find(|point| point.bytes == bytes).unwrap().miss_ratio
}

/// Checks that of so many passes all but the first hit, from 4 MiB on.
#[track_caller]
fn expect_loop(curve: &CurveStatus, passes: f64) {
    assert_eq!((curve.points.len(), curve.points[64].bytes, curve.reach_bytes), (65, 64 << 30, Some(64 << 30)));
    for point in &curve.points {
        let expected = if point.bytes < 4 * MIB { 1.0 } else { 1.0 / passes };
        assert!((point.miss_ratio - expected).abs() < 1e-9 && point.standard_error == 0.0, "{point:?}");
    }
}

fn curves_file(machine: &Machine) -> PathBuf {
    machine.state().with_file_name("test.state.curves")
}

#[test]
fn a_loop_is_a_cliff_and_stays_one_over_an_upgrade_and_a_restart() {
    let folder = folder();
    let server = Serve::start(folder.path(), "16M");
    let setup = Setup { server: Some(server.address.clone()), sectors: vec![512, 512], ..Setup::default() };
    let mut machine = Machine::start_in(folder, setup);
    expect_refusal(&ask(&machine, &[]), FAILURE, &["its guest has read nothing yet"]);
    (0..3).for_each(|_| pass(&mut machine, 0, |_| true));
    let first = curve(&machine, &[]);
    expect_loop(&first, 3.0);
    assert_eq!((first.curve_of.as_str(), first.learns_from.as_str()), ("test", "evictions"));
    assert_eq!((first.cache_bytes, first.disks.as_slice()), (4 * MIB, &["disk0".to_owned()][..]));

    let shown = ask(&machine, &["--disk", "disk0", "--server-latency", "0.5"]);
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.lines().all(|line| line.len() <= 80) && shown.contains("<- has now"), "{shown}");
    expect_refusal(&ask(&machine, &["--disk", "disk1"]), FAILURE, &["the disk disk1 has no curve"]);
    expect_refusal(&ask(&machine, &["--disk", "x"]), FAILURE, &["it has no disk x, but disk0, disk1"]);

    // Other commands are answered as before.
    let answer = ask_raw(&machine.control(), b"{\"op\":\"curve\"}\n");
    assert!(matches!(Reply::parse(answer.as_bytes()), Ok(Reply::Curve(_))), "{answer}");
    assert_eq!(machine.status().name, "test");

    let upgraded = run(&["upgrade", machine.control().to_str().unwrap()]);
    assert!(upgraded.status.success(), "{upgraded:?}");
    expect_loop(&curve(&machine, &[]), 3.0);
    pass(&mut machine, 0, |_| true);
    expect_loop(&curve(&machine, &[]), 4.0);

    machine.program.terminate();
    machine.restart();
    machine.pages_sent = 0;
    expect_loop(&curve(&machine, &[]), 4.0);
    // The second disk makes two more curves: in one cache the loops are in each other's way.
    for _ in 0..2 {
        pass(&mut machine, 0, |_| true);
        pass(&mut machine, 1, |_| true);
    }
    expect_loop(&curve(&machine, &["--disk", "disk0"]), 6.0);
    expect_loop(&curve(&machine, &["--disk", "disk1"]), 2.0);
    let both = curve(&machine, &[]);
    assert_eq!(both.disks, ["disk0", "disk1"]);
    assert!((miss_ratio(&both, 8 * MIB) - 2.0 / 8.0).abs() < 1e-9, "{both:?}");
    assert!((miss_ratio(&both, 4 * MIB) - 4.0 / 8.0).abs() < 1e-9, "{both:?}");

    machine.program.terminate();
    let file = std::fs::read(curves_file(&machine)).unwrap();
    assert!(file.len() < 3 * (96 << 10), "{} bytes", file.len());
    for broken in [&file[..file.len() / 2], b"", b"something else"] {
        std::fs::write(curves_file(&machine), broken).unwrap();
        machine.restart();
        machine.pages_sent = 0;
        assert!(machine.program.log().contains("curves of the former process are not used: the file is damaged"));
        assert!(machine.status().started == "warm", "all else is as it was");
        machine.program.terminate();
    }
    machine.restart();
    machine.finish();
}

#[test]
fn without_a_cache_the_curve_says_what_one_would_do() {
    let arguments = vec!["--guest-memory=64M".into()];
    let mut machine = Machine::start_in(folder(), Setup { arguments, ..Setup::default() });
    assert!(!machine.status().cache.enabled);
    assert_eq!(machine.status().port.unwrap().advice, 8, "the agent sends one page of eight");
    (0..3).for_each(|_| pass(&mut machine, 0, |place| place % 8 == 3));
    let ghost = curve(&machine, &[]);
    assert_eq!((ghost.cache_bytes, ghost.blocks_read), (0, 3.0 * LOOP as f64));
    assert!((ghost.followed_share - 1.0 / 8.0).abs() < 1e-9, "{ghost:?}");
    assert!((miss_ratio(&ghost, 8 * MIB) - 1.0 / 3.0).abs() < 1e-9, "{ghost:?}");
    assert!((miss_ratio(&ghost, 2 * MIB) - 1.0).abs() < 1e-9, "{ghost:?}");
    let figures = ask(&machine, &["-o", "json"]);
    let figures: serde_json::Value = serde_json::from_slice(&figures.stdout).unwrap();
    assert_eq!(figures["figures"]["server_is_assumed"], true);
    machine.program.terminate();
    machine.restart();
    machine.pages_sent = 0;
    let again = curve(&machine, &[]);
    assert!((miss_ratio(&again, 8 * MIB) - 1.0 / 3.0).abs() < 1e-9, "{again:?}");
    machine.finish();
}

#[test]
fn a_process_without_a_name_leaves_no_curves() {
    let mut machine = Machine::start_in(folder(), Setup { named: false, ..Setup::default() });
    pass(&mut machine, 0, |_| false);
    assert!(miss_ratio(&curve(&machine, &[]), MIB) >= 1.0);
    let folder = machine.state().parent().unwrap().to_owned();
    machine.program.terminate();
    let names = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert!(!names.into_iter().any(|name| name.contains("curves")));
    machine.restart();
    machine.finish();
}

/// A scan that nothing is hit of: the agent is asked for one class of pages, and curves go on with what it says that it sends.
#[test]
fn an_agent_is_asked_for_one_class_of_pages_and_believed_when_it_sends_one() {
    let folder = folder();
    let server = Serve::start(folder.path(), "40M");
    let setup = Setup { server: Some(server.address.clone()), blocks: 20_480, cache: "32M", ..Setup::default() };
    let mut machine = Machine::start_in(folder, setup);
    let mut blocks = all_unique_blocks(&machine, 0).into_iter();
    let advice = |machine: &mut Machine| {
        let ticket = machine.port.submit(0, Command::Read { sector: 0, length: BLOCK as u64 });
        machine.port.queues[0].kick();
        assert_eq!(machine.port.wait(ticket), 0);
        let page = machine.port.data(ticket, BLOCK);
        let advice = u32::from_le_bytes(page[60..64].try_into().unwrap());
        assert_eq!(machine.status().port.unwrap().class_advice, advice);
        advice
    };
    assert_eq!(advice(&mut machine), 0);
    while advice(&mut machine) == 0 {
        let batch: Vec<u8> = blocks.by_ref().take(32).flat_map(|number| read(&mut machine, number)).collect();
        assert!(!batch.is_empty(), "the whole disk was read in vain: {:?}", machine.status().counters);
        assert_eq!(machine.send_to_port(1, &batch), 0);
    }
    assert_eq!(advice(&mut machine), 128);
    let share = |machine: &mut Machine, number| {
        // Curves follow a change with the next read.
        read(machine, number);
        curve(machine, &[]).followed_share
    };
    let all = share(&mut machine, blocks.next().unwrap());
    assert!(all > 1.0 / 128.0, "{all}");
    // A page that the agent sends in the request of its report counts with it.
    for (classes, expected) in [(128_u32, 1.0 / 128.0), (64, all), (128, 1.0 / 128.0), (u32::MAX, all), (0, all)] {
        let mut report = vec![0; BLOCK];
        report[..8].copy_from_slice(b"REMOCAST");
        report[8..12].copy_from_slice(&1_u32.to_le_bytes());
        report[60..64].copy_from_slice(&classes.to_le_bytes());
        let reported = machine.counter("evictions_reported");
        report.extend(read(&mut machine, blocks.next().unwrap()));
        assert_eq!(machine.send_to_port(0, &report), 0);
        assert_eq!(machine.counter("evictions_reported"), reported + 1);
        let believed = if classes == 128 { 128 } else { 0 };
        assert_eq!(machine.status().port.unwrap().agent.unwrap().classes, believed);
        let followed = share(&mut machine, blocks.next().unwrap());
        assert!((followed / expected - 1.0).abs() < 1e-9, "{followed} with {classes} classes, {expected} expected");
    }
}

fn read(machine: &mut Machine, number: usize) -> Vec<u8> {
    let page = machine.disks[0].read(&(number * BLOCK..(number + 1) * BLOCK));
    assert!(page == machine.disks[0].model.block(number));
    page
}
