//! What the agent costs a guest: the same work without it, with it sending, and with it advised to send one page of 1024.
//!
//! One guest of 256 MiB with two CPUs; the three take turns in it, round by round, and the medians of the rounds' ratios are
//! printed. Two clocks: `time` is the guest's, as it runs. With `instructions` the emulator runs both CPUs in turn and counts
//! a nanosecond for each instruction of either (`-icount`), so that a busy host does not matter.
//!
//! `cargo run --release -p remoca-agent --example capture_cost time|instructions [ROUNDS] [PART OF A WORK'S NAME]`

#[path = "../tests/support/mod.rs"]
mod support;

use std::time::Duration;

use remoca_lab::{Guest, Lab};
use support::blocks::BlockSet;
use support::port::TestPort;
use support::{LIMIT, data_disk, guest, snapshot, start_agent, stop_agent};

const MODES: [&str; 3] = ["none", "sending", "advised 1/1024"];

/// Name and command; /mnt/big has 600 MiB.
const WORKS: [(&str, &str); 3] = [
    ("1.2 GiB read in sequence", "cat /mnt/big /mnt/big > /dev/null"),
    (
        "100,000 random reads of 4 KiB",
        "fio --name=r --filename=/mnt/big --rw=randread --bs=4k --ioengine=psync --numjobs=2 --number_ios=50000 \
         --norandommap --fadvise_hint=0 --randrepeat=1 > /dev/null",
    ),
    ("memory enough: 100 MiB read 20 times", "for i in $(seq 20); do head -c 100M /mnt/big > /dev/null; done"),
];

const WORK_LIMIT: Duration = Duration::from_secs(600);

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let argument = |index: usize| arguments.get(index).map_or("", String::as_str);
    let round_count = argument(1).parse().unwrap_or(5);
    let lab = Lab::open().expect("the laboratory opens");
    let port = TestPort::start(BlockSet::default());
    let mut config = guest(&lab, "agent-cost").disk(snapshot("data", &data_disk(&lab)));
    config.qemu_args = port.qemu_args();
    match argument(0) {
        "instructions" => config.count_instructions = true,
        "time" => {}
        _ => return eprintln!("the clock is missing: time or instructions"),
    }
    config.boot_limit = LIMIT;
    let mut guest = config.boot(&lab).expect("the guest boots");
    guest.run("mount -o ro,noatime $(disk-by-serial data) /mnt", LIMIT).expect("the data disk mounts");

    for (name, command) in WORKS.into_iter().filter(|(name, _)| name.contains(argument(2))) {
        println!("{name}");
        measure(&mut guest, command);
        let rounds: Vec<_> = (0..round_count).map(|_| round(&mut guest, &port, command)).collect();
        report(&rounds);
    }
}

/// One turn of each mode, in seconds.
fn round(guest: &mut Guest, port: &TestPort, command: &str) -> [f64; 3] {
    let mut seconds = [0.0; 3];
    seconds[0] = measure(guest, command);
    for (mode, advice) in [(1, 0), (2, 1024)] {
        port.state().advice = advice;
        let received = port.state().received;
        start_agent(guest, "remoca-agent");
        seconds[mode] = measure(guest, command);
        let (_, said) = stop_agent(guest);
        let ended = said.lines().last().unwrap_or_default().to_owned();
        println!("    {}: {} pages received; {ended}", MODES[mode], port.state().received - received);
    }
    seconds
}

fn measure(guest: &mut Guest, command: &str) -> f64 {
    let timed = format!("a=$(date +%s%N); {command}; b=$(date +%s%N); echo $((b - a))");
    let nanoseconds: f64 = guest.run(&timed, WORK_LIMIT).expect("the work is done").parse().expect("a number");
    nanoseconds / 1e9
}

fn report(rounds: &[[f64; 3]]) {
    let median_of = |value: &dyn Fn(&[f64; 3]) -> f64| {
        let mut values: Vec<f64> = rounds.iter().map(value).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    for (mode, name) in MODES.iter().enumerate() {
        let (seconds, ratio) = (median_of(&|round| round[mode]), median_of(&|round| round[mode] / round[0]));
        println!("  {name:<15} {seconds:7.2} s ({ratio:.3} x)");
    }
}
