//! What the agent costs a guest: the same work without it, with it sending, and with it advised to send one page of 1024.
//!
//! One guest of 256 MiB with two CPUs; the three take turns in it, round by round, and the medians of the rounds' ratios are
//! printed. Time is the guest's clock; CPU is what its virtual CPUs took of the host's.
//!
//! `cargo run --release -p remoca-agent --example capture_cost [ROUNDS] [PART OF A WORK'S NAME]`

#[path = "../tests/support/mod.rs"]
mod support;

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

#[derive(Clone, Copy, Default)]
struct Cost {
    seconds: f64,
    cpu_seconds: f64,
}

fn main() {
    let round_count = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(5);
    let wanted = std::env::args().nth(2).unwrap_or_default();
    let lab = Lab::open().expect("the laboratory opens");
    let port = TestPort::start(BlockSet::default());
    let mut config = guest(&lab, "agent-cost").disk(snapshot("data", &data_disk(&lab)));
    config.qemu_args = port.qemu_args();
    let mut guest = config.boot(&lab).expect("the guest boots");
    guest.run("mount -o ro,noatime $(disk-by-serial data) /mnt", LIMIT).expect("the data disk mounts");

    for (name, command) in WORKS.into_iter().filter(|(name, _)| name.contains(&wanted)) {
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
    let cpu_before = cpu_seconds(guest.pid());
    let timed = format!("a=$(date +%s%N); {command}; b=$(date +%s%N); echo $((b - a))");
    let nanoseconds: f64 = guest.run(&timed, LIMIT).expect("the work is done").parse().expect("a number");
    Cost { seconds: nanoseconds / 1e9, cpu_seconds: cpu_seconds(guest.pid()) - cpu_before }
}

/// User and system time of the threads that are the guest's CPUs ("CPU 0/TCG" and so on), in seconds (of 100 ticks).
fn cpu_seconds(pid: u32) -> f64 {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).expect("QEMU runs");
    let stats = threads.flatten().filter_map(|thread| std::fs::read_to_string(thread.path().join("stat")).ok());
    let ticks = stats.filter(|stat| stat.contains("(CPU ")).map(|stat| {
        let fields = stat.rsplit(") ").next().unwrap_or_default().split(' ').skip(11).take(2);
        fields.filter_map(|field| field.parse::<f64>().ok()).sum::<f64>()
    });
    ticks.sum::<f64>() / 100.0
}

fn report(rounds: &[[Cost; 3]]) {
    for (mode, name) in MODES.iter().enumerate() {
        let median_of = |value: &dyn Fn(&[Cost; 3]) -> f64| {
            let mut values: Vec<f64> = rounds.iter().map(value).collect();
            values.sort_by(f64::total_cmp);
            values[values.len() / 2]
        };
        println!(
            "  {name:<15} {:6.2} s ({:.2} x)   CPU {:6.2} s ({:.2} x)",
            median_of(&|round| round[mode].seconds),
            median_of(&|round| round[mode].seconds / round[0].seconds),
            median_of(&|round| round[mode].cpu_seconds),
            median_of(&|round| round[mode].cpu_seconds / round[0].cpu_seconds),
        );
    }
}
