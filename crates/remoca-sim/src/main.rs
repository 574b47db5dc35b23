//! `remoca-sim`: runs seeds, and explains one that fails. `cargo xtask sim` calls it.

use anyhow::{Context, bail};
use clap::Parser;
use remoca_core::rules::Rule;
use remoca_sim::{Failure, Key, Line, Options, Report, describe, run, shrink, trace};
use std::collections::{BTreeMap, BTreeSet};
use std::process::ExitCode;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Lines of the trace that are shown of a failure.
const LINES_SHOWN: usize = 40;
const SHRINK_RUNS: usize = 3_000;

/// Simulates guest, disks, engine, network and memory server, and checks what a guest is promised.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask sim")]
struct Arguments {
    /// How many seeds to run, one after the other.
    #[arg(long)]
    seeds: Option<u64>,
    /// The first seed; with no --seeds the only one. Otherwise the time decides.
    #[arg(long)]
    seed: Option<u64>,
    /// Leave out one rule of the engine: the run has to fail.
    #[arg(long, value_parser = rule)]
    omit: Option<Rule>,
    /// Only so many steps of the plan.
    #[arg(long)]
    steps: Option<usize>,
    /// Steps of the plan to leave out, as 3,7-9.
    #[arg(long, value_parser = step_list)]
    without: Option<Steps>,
    /// No agent in the guest, and no port.
    #[arg(long)]
    agentless: bool,
    /// Stop only at what the guest itself can notice.
    #[arg(long)]
    guest_visible_only: bool,
    /// Print everything that happens.
    #[arg(long)]
    trace: bool,
    /// Do not look for a shorter plan that fails in the same way.
    #[arg(long)]
    no_shrink: bool,
}

#[derive(Clone, Debug, Default)]
struct Steps(BTreeSet<usize>);

fn rule(name: &str) -> Result<Rule, String> {
    let names = || Rule::ALL.map(|(name, _)| name).join(", ");
    Rule::ALL.iter().find(|(n, _)| *n == name).map(|(_, rule)| *rule).ok_or_else(|| format!("one of: {}", names()))
}

fn step_list(text: &str) -> Result<Steps, String> {
    let mut steps = BTreeSet::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let number = |t: &str| t.trim().parse::<usize>().map_err(|_| format!("{t:?} is no step; write 3,7-9"));
        let (first, last) = (number(first)?, number(last)?);
        if last < first || last > 1_000_000 {
            return Err(format!("{part:?} is no range of steps"));
        }
        steps.extend(first..=last);
    }
    Ok(Steps(steps))
}

fn main() -> ExitCode {
    match simulate(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn simulate(arguments: &Arguments) -> anyhow::Result<()> {
    let options = Options {
        omit: arguments.omit,
        steps: arguments.steps,
        without: arguments.without.clone().unwrap_or_default().0,
        agentless: arguments.agentless,
        guest_visible_only: arguments.guest_visible_only,
    };
    let first = match arguments.seed {
        Some(seed) => seed,
        None => seed_of_the_day()?,
    };
    let count = arguments.seeds.unwrap_or(if arguments.seed.is_some() { 1 } else { 1_000 });
    if arguments.trace {
        return print_trace(first, &options);
    }
    println!("seeds {first} to {}", first.saturating_add(count - count.min(1)));
    let started = Instant::now();
    let mut totals = Totals::default();
    for seed in first..first.saturating_add(count) {
        match run(seed, &options) {
            Ok(report) => totals.add(&report),
            Err(failure) => {
                explain(&failure, &options, !arguments.no_shrink);
                bail!("seed {seed} failed, after {} that passed", totals.seeds);
            }
        }
    }
    totals.print(started.elapsed().as_secs_f64());
    if let Some(rule) = options.omit {
        bail!("{rule:?} was left out, and no seed noticed");
    }
    Ok(())
}

/// Another million of seeds in each second, so that runs do not repeat each other.
fn seed_of_the_day() -> anyhow::Result<u64> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).context("the clock is before 1970")?;
    Ok(since.as_secs() * 1_000_000)
}

fn print_trace(seed: u64, options: &Options) -> anyhow::Result<()> {
    println!("seed {seed}: {}", describe(seed));
    let (lines, result) = trace(seed, options);
    for line in &lines {
        println!("{line}");
    }
    match result {
        Ok(tally) => println!("{tally:#?}"),
        Err(failure) => bail!("{failure}"),
    }
    Ok(())
}

/// Prints what failed, the last events of the block it failed at, and how to see it again.
fn explain(failure: &Failure, options: &Options, shorten: bool) {
    println!("\n{failure}\n{}\n", describe(failure.seed));
    print_last_lines(failure, options);
    println!("\nreproduce: {}", command(failure.seed, options));
    if shorten {
        let shrunk = shrink(failure, options, SHRINK_RUNS);
        println!("\ncut down to {} steps: {}\n", shrunk.steps, shrunk.failure);
        print_last_lines(&shrunk.failure, &shrunk.options);
        println!("\nreproduce: {} --trace", command(failure.seed, &shrunk.options));
    }
}

fn print_last_lines(failure: &Failure, options: &Options) {
    let (lines, _) = trace(failure.seed, options);
    let concerns = |line: &&Line| failure.violation.at.is_none_or(|key: Key| line.concerns(key));
    let chosen: Vec<_> = lines.iter().filter(concerns).collect();
    println!("the last of {} events there:", chosen.len());
    for line in &chosen[chosen.len().saturating_sub(LINES_SHOWN)..] {
        println!("{line}");
    }
}

fn command(seed: u64, options: &Options) -> String {
    let mut command = format!("cargo xtask sim --seed {seed}");
    if let Some((name, _)) = Rule::ALL.iter().find(|(_, rule)| Some(*rule) == options.omit) {
        command += &format!(" --omit {name}");
    }
    if let Some(steps) = options.steps {
        command += &format!(" --steps {steps}");
    }
    if !options.without.is_empty() {
        command += &format!(" --without {}", ranges(&options.without));
    }
    if options.agentless {
        command += " --agentless";
    }
    if options.guest_visible_only {
        command += " --guest-visible-only";
    }
    command
}

fn ranges(steps: &BTreeSet<usize>) -> String {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for &step in steps {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == step => *last = step,
            _ => ranges.push((step, step)),
        }
    }
    let text = |(a, b): &(usize, usize)| if a == b { a.to_string() } else { format!("{a}-{b}") };
    ranges.iter().map(text).collect::<Vec<_>>().join(",")
}

/// Sums over all seeds.
#[derive(Default)]
struct Totals {
    seeds: u64,
    counters: BTreeMap<&'static str, u64>,
}

impl Totals {
    fn add(&mut self, report: &Report) {
        self.seeds += 1;
        for (name, count) in report.tally.named() {
            *self.counters.entry(name).or_default() += count;
        }
    }

    fn print(&self, seconds: f64) {
        for (name, count) in &self.counters {
            println!("{count:>12} {name}");
        }
        let seeds = u32::try_from(self.seeds).unwrap_or(u32::MAX);
        println!("{seeds} seeds passed in {seconds:.1} s, {:.0} a minute", f64::from(seeds) / seconds * 60.0);
    }
}
