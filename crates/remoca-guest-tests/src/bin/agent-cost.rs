//! Measures the cost of the agent in a guest: the same work without it and with it, in turns, with the real VM process.
//!
//! The guest has 256 MiB and two processors, and 600 MiB of files on each of two disks: one in memory, where the
//! agent's relative cost is largest, and one with 7 ms per read. Without the agent the cache is off. With it the cache
//! holds 16 MiB, so that pages are captured and sent but hardly ever found again: cost without gain. The program
//! prints the medians of the rounds' ratios. `time` also measures the processor time of the guest's QEMU.
//! `instructions` counts the instructions that both processors execute, which does not depend on the load of the
//! machine; it uses only the disk in memory.
//!
//! `cargo run --release -p remoca-guest-tests --bin agent-cost [time|instructions [ROUNDS [PART OF A WORK'S NAME]]]`; without
//! arguments both, 7 and 1. A run of `time` with all works leaves its figures for `make bench-targets` (P14).

use remoca_guest_tests::{Host, Image, LIMIT, Result, remoca_release, start_agent, stop_agent};
use remoca_lab::figures::{self, Figure, Spread};
use remoca_lab::{Guest, Lab, Qmp, store, workload::dataset};
use remoca_protocol::port::AgentStats;
use std::path::Path;
use std::time::{Duration, Instant};

const DATA_MIB: u64 = 600;
const READ_DELAY: Duration = Duration::from_millis(7);

struct Work {
    name: &'static str,
    /// Name of its target.
    id: &'static str,
    /// Name of one of [`DISKS`].
    disk: &'static str,
    /// Command run before the measurement.
    prepare: &'static str,
    /// Measured command; `$n` is the number of the run.
    command: &'static str,
}

const DISKS: [&str; 2] = ["ram", "slow"];

const WORKS: [Work; 5] = [
    Work {
        name: "disk in memory: 600 MiB in sequence",
        id: "P14-ram-sequential",
        disk: "ram",
        prepare: "true",
        command: "cat /ram/f* > /dev/null",
    },
    Work {
        name: "disk in memory: 40,000 random reads of 4 KiB",
        id: "P14-ram-random",
        disk: "ram",
        prepare: "true",
        command: "fio --filename=/ram/f00000 --rw=randread --bs=4k --ioengine=psync --number_ios=20000 --norandommap --fadvise_hint=0 \
                  --name=a --randseed=1$n --name=b --randseed=2$n > /dev/null",
    },
    Work {
        name: "memory enough: 100 MiB read 10 times",
        id: "P14-enough",
        disk: "ram",
        prepare: "for i in 1 2; do head -c 100M /ram/f00000 > /dev/null; done",
        command: "for i in $(seq 10); do head -c 100M /ram/f00000 > /dev/null; done",
    },
    Work {
        name: "disk of 7 ms: 192 MiB in sequence",
        id: "P14-slow-sequential",
        disk: "slow",
        prepare: "true",
        command: "dd if=/slow/f00000 of=/dev/null bs=1M count=192 skip=$((n % 3 * 192)) 2> /dev/null",
    },
    Work {
        name: "disk of 7 ms: 400 random reads of 4 KiB",
        id: "P14-slow-random",
        disk: "slow",
        prepare: "true",
        command: "fio --filename=/slow/f00000 --rw=randread --bs=4k --ioengine=psync --number_ios=200 --norandommap --fadvise_hint=0 \
                  --name=a --randseed=1$n --name=b --randseed=2$n > /dev/null",
    },
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Clock {
    Time,
    Instructions,
}

/// Cost of one execution of a work.
#[derive(Clone, Copy, Default)]
struct Cost {
    /// Time in seconds, or 10^9 instructions.
    elapsed: f64,
    /// Processor time of the guest's QEMU, in seconds.
    processor_s: f64,
    /// Pages that the agent captured, and pages for which it had no room.
    captured: u64,
    lost: u64,
    /// Pages left out by the port's advice. If there are many, the cost of capturing pages was not measured.
    sampled_out: u64,
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let round_count = |default| arguments.get(1).map_or(Ok(default), |text| text.parse::<u32>());
    match arguments.first().map(String::as_str) {
        None => {
            measure(Clock::Time, 7)?;
            measure(Clock::Instructions, 1)
        }
        Some("time") => measure(Clock::Time, round_count(7)?),
        Some("instructions") => measure(Clock::Instructions, round_count(1)?),
        Some(other) => Err(format!("{other} is no clock: time or instructions").into()),
    }
}

fn measure(clock: Clock, round_count: u32) -> Result<()> {
    let wanted = std::env::args().nth(3).unwrap_or_default();
    let measured = |work: &&Work| work.name.contains(&wanted) && (clock == Clock::Time || work.disk == "ram");
    let works: Vec<&Work> = WORKS.iter().filter(measured).collect();
    let mut host = Host::new(remoca_release()?, "64M")?;
    let memory = tempfile::tempdir_in("/dev/shm")?;
    let (ram, slow) = (memory.path().join("ram.img"), host.folder().join("slow.img"));
    make_disk(&ram, 1)?;
    make_disk(&slow, 2)?;
    let nbdkit = store::NbdkitConfig::slow_file(&slow, READ_DELAY).start(host.folder())?;
    host.start_server()?;
    let images =
        [Image { name: "ram", path: ram, options: "" }, Image { name: "slow", path: nbdkit.uri().into(), options: "" }];
    host.start_process(&images, "16M", &[])?;
    let mut config = host.guest(&Lab::open()?, "agent-cost")?;
    config.count_instructions = clock == Clock::Instructions;
    let guest = config.boot(&Lab::open()?)?;
    let mut bench = Bench { clock, host, guest, monitor: None, run: 0, seen: AgentStats::default() };
    if clock == Clock::Instructions {
        bench.monitor = Some(bench.guest.qmp()?);
    }
    for disk in DISKS {
        bench.guest.run(&format!("mkdir /{disk} && mount -o ro,noatime $(disk-by-serial {disk}) /{disk}"), LIMIT)?;
    }

    bench.turn(&works, false)?;
    let mut rounds = Vec::new();
    for round in 0..round_count {
        eprintln!("round {} of {round_count}", round + 1);
        rounds.push([bench.turn(&works, false)?, bench.turn(&works, true)?]);
    }
    report(clock, &works, &rounds);
    // A run of some works must not hide the last run of all.
    if clock == Clock::Time && wanted.is_empty() {
        let path = figures::save("agent-cost", &target_figures(&works, &rounds), &())?;
        println!("\n{}", path.display());
    }
    bench.guest.shut_down()?;
    bench.host.stop_process()?;
    nbdkit.stop()?;
    Ok(())
}

fn make_disk(image: &Path, seed: u64) -> Result<()> {
    let folder = tempfile::tempdir()?;
    dataset::create(folder.path(), 1, DATA_MIB << 20, seed)?;
    store::ext4_of_folder(image, (DATA_MIB + 64) << 20, folder.path())?;
    Ok(())
}

struct Bench {
    clock: Clock,
    host: Host,
    guest: Guest,
    monitor: Option<Qmp>,
    run: u32,
    /// Counters that this start of the agent had reported before this work.
    seen: AgentStats,
}

impl Bench {
    /// Runs each work once, with or without the agent.
    fn turn(&mut self, works: &[&Work], agent: bool) -> Result<Vec<Cost>> {
        self.host.set(None, Some(agent))?;
        if agent {
            self.host.wait_until("the cache is on", |s| s.cache.granted_bytes > 0)?;
            start_agent(&mut self.guest)?;
        }
        // Pages read while the cache was off would be unknown when evicted, and the agent would be advised to send less.
        self.guest.run("echo 3 > /proc/sys/vm/drop_caches; head -c 300M /ram/f00000 > /dev/null", LIMIT)?;
        if agent {
            self.seen = self.told()?;
        }
        self.run += 1;
        let costs = works.iter().map(|work| self.cost(work, agent)).collect::<Result<Vec<_>>>()?;
        if agent {
            stop_agent(&mut self.guest)?;
        }
        Ok(costs)
    }

    fn cost(&mut self, work: &Work, agent: bool) -> Result<Cost> {
        self.guest.run(work.prepare, LIMIT)?;
        let (started, processor_s, instructions) = (Instant::now(), self.processor_s()?, self.instructions()?);
        self.guest.run(&format!("n={}; {}", self.run, work.command), LIMIT)?;
        let seconds = started.elapsed().as_secs_f64();
        let cost = Cost {
            elapsed: match self.clock {
                Clock::Time => seconds,
                Clock::Instructions => self.instructions()? - instructions,
            },
            processor_s: self.processor_s()? - processor_s,
            ..Cost::default()
        };
        if !agent {
            return Ok(cost);
        }
        let now = self.told()?;
        let before = std::mem::replace(&mut self.seen, now);
        let of_work = |count: fn(&AgentStats) -> u64| count(&now) - count(&before);
        Ok(Cost {
            captured: of_work(|stats| stats.captured),
            lost: of_work(|stats| stats.lost),
            sampled_out: of_work(|stats| stats.sampled_out),
            ..cost
        })
    }

    /// Waits for the agent's next statistics, which it sends once a second by the guest's clock.
    fn told(&mut self) -> Result<AgentStats> {
        self.guest.run("sleep 1.1", LIMIT)?;
        Ok(self.host.status()?.port.and_then(|port| port.agent).ok_or("the agent said nothing of itself")?)
    }

    fn processor_s(&self) -> Result<f64> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.guest.pid()))?;
        let fields = stat.rsplit_once(") ").map_or("", |(_, fields)| fields);
        // STATE is the third field; utime and stime are the 14th and the 15th, in hundredths of a second.
        let ticks: f64 = fields.split(' ').skip(11).take(2).filter_map(|field| field.parse::<f64>().ok()).sum();
        Ok(ticks / 100.0)
    }

    /// Returns the number of instructions that the guest's processors have executed, in 10^9; 0 if they are not counted.
    fn instructions(&mut self) -> Result<f64> {
        let Some(monitor) = &mut self.monitor else { return Ok(0.0) };
        let answer = monitor.execute("query-replay", serde_json::json!({}))?;
        Ok(answer["icount"].as_f64().ok_or("QEMU tells no number of instructions")? / 1e9)
    }
}

/// Returns the figures of P14: the time with the agent divided by that without. The noise is the time without it divided by
/// that of the round before.
fn target_figures(works: &[&Work], rounds: &[[Vec<Cost>; 2]]) -> Vec<Figure> {
    let figure = |(index, work): (usize, &&Work)| {
        let times = |agent: usize| rounds.iter().map(move |round| round[agent][index].elapsed);
        let ratio = Spread::of(times(1).zip(times(0)).map(|(agent, none)| agent / none).collect())?;
        let noise = Spread::of(times(0).skip(1).zip(times(0)).map(|(later, earlier)| later / earlier).collect());
        let pages = |count: fn(&Cost) -> u64| {
            rounds.iter().map(|round| count(&round[1][index])).sum::<u64>() as f64 / rounds.len() as f64
        };
        let figure = Figure::of_rounds(work.id, rounds.len(), ratio, noise);
        Some(figure.beside("captured", pages(|cost| cost.captured)).beside("left_out", pages(|cost| cost.sampled_out)))
    };
    works.iter().enumerate().filter_map(figure).collect()
}

fn report(clock: Clock, works: &[&Work], rounds: &[[Vec<Cost>; 2]]) {
    let unit = match clock {
        Clock::Time => "s",
        Clock::Instructions => "10^9 instructions",
    };
    println!("\nmedians of {} rounds, {unit}", rounds.len());
    println!(
        "| work | none | agent | ratio | (least, most) | QEMU's CPU | taken | lost | left out |\n|---|---|---|---|---|---|---|---|---|"
    );
    for (index, work) in works.iter().enumerate() {
        let values = |value: &dyn Fn(&Cost, &Cost) -> f64| {
            let mut values: Vec<f64> = rounds.iter().map(|[none, agent]| value(&none[index], &agent[index])).collect();
            values.sort_by(f64::total_cmp);
            values
        };
        let median = |value: &dyn Fn(&Cost, &Cost) -> f64| values(value)[rounds.len() / 2];
        let ratios = values(&|none, agent| agent.elapsed / none.elapsed);
        let pages = |count: fn(&Cost) -> u64| {
            rounds.iter().map(|[_, agent]| count(&agent[index])).sum::<u64>() / rounds.len() as u64
        };
        println!(
            "| {} | {:.2} | {:.2} | {:.3} | {:.3}, {:.3} | {:.3} | {} | {} | {} |",
            work.name,
            median(&|none, _| none.elapsed),
            median(&|_, agent| agent.elapsed),
            ratios[ratios.len() / 2],
            ratios[0],
            ratios[ratios.len() - 1],
            median(&|none, agent| agent.processor_s / none.processor_s),
            pages(|cost| cost.captured),
            pages(|cost| cost.lost),
            pages(|cost| cost.sampled_out),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_of_the_same_round_and_noise_is_of_the_guest_without_agent() {
        let costs = |times: [f64; 2]| {
            let cost = |elapsed| Cost { elapsed, captured: 10, ..Cost::default() };
            times.map(cost).to_vec()
        };
        let rounds = [
            [costs([1.0, 4.0]), costs([1.5, 4.0])],
            [costs([2.0, 2.0]), costs([3.0, 3.0])],
            [costs([4.0, 2.0]), costs([6.0, 2.5])],
        ];
        let figures = target_figures(&[&WORKS[0], &WORKS[2]], &rounds);
        assert_eq!(
            figures.iter().map(|figure| figure.id.as_str()).collect::<Vec<_>>(),
            ["P14-ram-sequential", "P14-enough"]
        );
        assert_eq!((figures[0].value, figures[0].rounds, figures[0].beside["captured"]), (1.5, 3, 10.0));
        assert_eq!(figures[0].noise, Some(Spread { median: 2.0, min: 2.0, max: 2.0 }));
        assert_eq!(figures[1].spread, Some(Spread { median: 1.25, min: 1.0, max: 1.5 }));
        assert_eq!(figures[1].noise, Some(Spread { median: 0.75, min: 0.5, max: 1.0 }));
    }
}
