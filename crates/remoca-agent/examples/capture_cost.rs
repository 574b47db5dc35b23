//! What the agent costs a guest: the same work without it, with it sending, and with it advised to send one page of 1024.
//!
//! One guest of 256 MiB with two CPUs; the three take turns in it, round by round, and the medians of the rounds' ratios are
//! printed. Two clocks: `time` is the guest's, as it runs. `instructions` lets the emulator count, one nanosecond for each
//! (`-icount`), so that a busy host does not matter; "busy" is then what the guest's CPUs executed outside of idling.
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

#[derive(Clone, Copy, Default)]
struct Cost {
    seconds: f64,
    /// CPU seconds that were not idle, of both CPUs.
    busy_seconds: f64,
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let argument = |index: usize| arguments.get(index).map_or("", String::as_str);
    let round_count = argument(1).parse().unwrap_or(5);
    let lab = Lab::open().expect("the laboratory opens");
    let port = TestPort::start(BlockSet::default());
    let mut config = guest(&lab, "agent-cost").disk(snapshot("data", &data_disk(&lab)));
    config.qemu_args = port.qemu_args();
    match argument(0) {
        "instructions" => config.qemu_args.extend(["-icount", "shift=0,sleep=on"].map(str::to_owned)),
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

/// One turn of each mode.
fn round(guest: &mut Guest, port: &TestPort, command: &str) -> [Cost; 3] {
    let mut costs = [Cost::default(); 3];
    costs[0] = measure(guest, command);
    for (mode, advice) in [(1, 0), (2, 1024)] {
        port.state().advice = advice;
        let received = port.state().received;
        start_agent(guest, "remoca-agent");
        costs[mode] = measure(guest, command);
        let (_, said) = stop_agent(guest);
        let ended = said.lines().last().unwrap_or_default().to_owned();
        println!("    {}: {} pages received; {ended}", MODES[mode], port.state().received - received);
    }
    costs
}

fn measure(guest: &mut Guest, command: &str) -> Cost {
    // User, nice, system; then idle and waiting; then interrupts. In hundredths of a second.
    let busy = "sed -n 's/^cpu  //p' /proc/stat | { read u n s i w h q rest; echo $((u + n + s + h + q)); }";
    let timed = format!("b=$({busy}); t=$(date +%s%N); {command}; echo $(($(date +%s%N) - t)) $(($({busy}) - b))");
    let text = guest.run(&timed, WORK_LIMIT).expect("the work is done");
    let numbers: Vec<f64> = text.split(' ').filter_map(|number| number.parse().ok()).collect();
    Cost { seconds: numbers[0] / 1e9, busy_seconds: numbers[1] / 100.0 }
}

fn report(rounds: &[[Cost; 3]]) {
    for (mode, name) in MODES.iter().enumerate() {
        let median_of = |value: &dyn Fn(&[Cost; 3]) -> f64| {
            let mut values: Vec<f64> = rounds.iter().map(value).collect();
            values.sort_by(f64::total_cmp);
            values[values.len() / 2]
        };
        println!(
            "  {name:<15} {:6.2} s ({:.2} x)   busy {:6.2} s ({:.2} x)",
            median_of(&|round| round[mode].seconds),
            median_of(&|round| round[mode].seconds / round[0].seconds),
            median_of(&|round| round[mode].busy_seconds),
            median_of(&|round| round[mode].busy_seconds / round[0].busy_seconds),
        );
    }
}
