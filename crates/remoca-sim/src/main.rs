//! `remoca-sim`: runs seeds, and explains a failing one. `cargo xtask sim` calls it.

use anyhow::{Context, bail};
use clap::Parser;
use remoca_core::rules::Rule;
use remoca_sim::{
    DriverOptions, Failure, Flaw, HostRule, Options, Origin, Plan, Report, load, run, run_driver, save, shrink, trace,
};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Number of trace lines shown for a failure.
const LINES_SHOWN: usize = 40;
const SHRINK_RUNS: usize = 3_000;

/// Simulates guest, disks, engine, network and memory server, and checks what a guest is promised.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask sim")]
struct Arguments {
    /// How many seeds to run, one after the other.
    #[arg(long)]
    seeds: Option<u64>,
    /// The first seed; with no --seeds the only one. Otherwise it comes from the time.
    #[arg(long)]
    seed: Option<u64>,
    /// Run the plan in this file.
    #[arg(long, conflicts_with_all = ["seed", "seeds"])]
    plan: Option<PathBuf>,
    /// Write a plan that fails to this file, reduced.
    #[arg(long)]
    save: Option<PathBuf>,
    /// Leave out one rule of the engine, or of its surroundings: the run must fail.
    #[arg(long, value_parser = rule)]
    omit: Option<AnyRule>,
    /// Run only this many steps of the plan.
    #[arg(long)]
    steps: Option<usize>,
    /// Steps of the plan to leave out, as 3,7-9.
    #[arg(long, value_parser = step_list)]
    without: Option<Steps>,
    /// Run without an agent in the guest, and without a port.
    #[arg(long)]
    agentless: bool,
    /// Stop only at violations that the guest itself can notice.
    #[arg(long)]
    guest_visible_only: bool,
    /// Print all events.
    #[arg(long)]
    trace: bool,
    /// Simulate the whole VM process: its real driver, frontends, link and state file.
    #[arg(long, conflicts_with_all = ["plan", "save", "omit", "without", "agentless", "guest_visible_only"])]
    driver: bool,
    /// A fault around the driver: the run must fail.
    #[arg(long, requires = "driver", value_parser = flaw)]
    flaw: Option<Flaw>,
    /// Do not look for a shorter plan that fails in the same way.
    #[arg(long)]
    no_shrink: bool,
}

#[derive(Clone, Debug, Default)]
struct Steps(BTreeSet<usize>);

#[derive(Clone, Copy, Debug)]
enum AnyRule {
    Engine(Rule),
    Host(HostRule),
}

fn rule(name: &str) -> Result<AnyRule, String> {
    let engine = Rule::ALL.iter().map(|(n, rule)| (*n, AnyRule::Engine(*rule)));
    let mut all = engine.chain(HostRule::ALL.iter().map(|(n, rule)| (*n, AnyRule::Host(*rule))));
    let names = || all.clone().map(|(name, _)| name).collect::<Vec<_>>().join(", ");
    let unknown = format!("one of: {}", names());
    all.find(|(n, _)| *n == name).map(|(_, rule)| rule).ok_or(unknown)
}

fn flaw(name: &str) -> Result<Flaw, String> {
    let names = || Flaw::ALL.map(|(name, _)| name).join(", ");
    Flaw::ALL
        .iter()
        .find(|(known, _)| *known == name)
        .map(|(_, flaw)| *flaw)
        .ok_or_else(|| format!("one of: {}", names()))
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

/// Runs seeds of the driver. Reduces a failing plan to the fewest steps from its beginning.
fn simulate_driver(arguments: &Arguments) -> anyhow::Result<()> {
    let options = DriverOptions { flaw: arguments.flaw, steps: arguments.steps, tell: arguments.trace };
    let first = arguments.seed.map_or_else(seed_of_the_day, Ok)?;
    let count = arguments.seeds.unwrap_or(if arguments.seed.is_some() { 1 } else { 1_000 });
    println!("driver seeds {first} to {}", first.saturating_add(count - count.min(1)));
    let started = Instant::now();
    let mut totals = Totals::default();
    for seed in first..first.saturating_add(count) {
        match run_driver(seed, &options) {
            Ok(tally) => totals.count(tally.named()),
            Err(failure) => {
                println!("{failure}");
                let steps = fewest_steps(seed, &options);
                let flaw = Flaw::ALL.iter().find(|(_, flaw)| Some(*flaw) == options.flaw);
                let flaw = flaw.map_or(String::new(), |(name, _)| format!(" --flaw {name}"));
                println!("reproduce: cargo xtask sim --driver --seed {seed}{flaw} --steps {steps} --trace");
                bail!("driver seed {seed} failed, after {} that passed", totals.seeds);
            }
        }
    }
    totals.print(started.elapsed().as_secs_f64());
    if let Some(flaw) = arguments.flaw {
        bail!("{flaw:?} was there, and no seed noticed");
    }
    Ok(())
}

/// Finds, by bisection, a number of steps that fails while one step less does not.
fn fewest_steps(seed: u64, options: &DriverOptions) -> usize {
    let fails =
        |steps| run_driver(seed, &DriverOptions { steps: Some(steps), tell: false, ..options.clone() }).is_err();
    let (mut passes, mut failing) = (0, options.steps.unwrap_or(1 << 10));
    while failing - passes > 1 {
        let middle = passes + (failing - passes) / 2;
        if fails(middle) { failing = middle } else { passes = middle }
    }
    failing
}

fn simulate(arguments: &Arguments) -> anyhow::Result<()> {
    if arguments.driver {
        return simulate_driver(arguments);
    }
    let options = Options {
        omit: arguments.omit.and_then(|rule| if let AnyRule::Engine(rule) = rule { Some(rule) } else { None }),
        omit_host: arguments.omit.and_then(|rule| if let AnyRule::Host(rule) = rule { Some(rule) } else { None }),
        steps: arguments.steps,
        without: arguments.without.clone().unwrap_or_default().0,
        agentless: arguments.agentless,
        guest_visible_only: arguments.guest_visible_only,
    };
    if let Some(path) = &arguments.plan {
        let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let saved = load(&path.display().to_string(), &text).map_err(anyhow::Error::msg)?;
        println!("{}", saved.what);
        // The plan's own options apply if no rule is given on the command line.
        let rule_is_given = arguments.omit.is_some();
        let options = Options {
            omit: if rule_is_given { options.omit } else { saved.options.omit },
            omit_host: if rule_is_given { options.omit_host } else { saved.options.omit_host },
            agentless: options.agentless || saved.options.agentless,
            guest_visible_only: options.guest_visible_only || saved.options.guest_visible_only,
            ..options
        };
        return run_one(&saved.plan, &options, arguments);
    }
    let first = match arguments.seed {
        Some(seed) => seed,
        None => seed_of_the_day()?,
    };
    let count = arguments.seeds.unwrap_or(if arguments.seed.is_some() { 1 } else { 1_000 });
    if arguments.trace {
        return run_one(&Plan::draw(first), &options, arguments);
    }
    println!("seeds {first} to {}", first.saturating_add(count - count.min(1)));
    let started = Instant::now();
    let mut totals = Totals::default();
    for seed in first..first.saturating_add(count) {
        let plan = Plan::draw(seed);
        match run(&plan, &options) {
            Ok(report) => totals.add(&report),
            Err(failure) => {
                explain(&plan, &failure, &options, arguments)?;
                bail!("seed {seed} failed, after {} that passed", totals.seeds);
            }
        }
    }
    totals.print(started.elapsed().as_secs_f64());
    if let Some(rule) = arguments.omit {
        bail!("{rule:?} was left out, and no seed noticed");
    }
    Ok(())
}

fn run_one(plan: &Plan, options: &Options, arguments: &Arguments) -> anyhow::Result<()> {
    if arguments.trace {
        return print_trace(plan, options);
    }
    match run(plan, options) {
        Ok(_) => println!("{} passes", plan.origin),
        Err(failure) => {
            explain(plan, &failure, options, arguments)?;
            bail!("{} failed", plan.origin);
        }
    }
    Ok(())
}

/// Returns a first seed that changes by a million each second, so that runs do not repeat each other.
fn seed_of_the_day() -> anyhow::Result<u64> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).context("the clock is before 1970")?;
    Ok(since.as_secs() * 1_000_000)
}

fn print_trace(plan: &Plan, options: &Options) -> anyhow::Result<()> {
    println!("{}: {}", plan.origin, describe(plan));
    let (lines, result) = trace(plan, options);
    for line in &lines {
        println!("{line}");
    }
    match result {
        Ok(tally) => println!("{tally:#?}"),
        Err(failure) => bail!("{failure}"),
    }
    Ok(())
}

/// Returns a readable description of a plan's conditions.
fn describe(plan: &Plan) -> String {
    format!("{} steps; {:?}", plan.steps.len(), plan.scenario)
}

/// Prints the failure, the last events of the block it failed at, and the command that reproduces it.
fn explain(plan: &Plan, failure: &Failure, options: &Options, arguments: &Arguments) -> anyhow::Result<()> {
    println!("\n{failure}\n{}\n", describe(plan));
    print_last_lines(plan, failure, options);
    println!("\nreproduce: {}", command(&plan.origin, options));
    let (mut failure, mut options) = (failure.clone(), options.clone());
    if !arguments.no_shrink {
        let shrunk = shrink(plan, &failure, &options, SHRINK_RUNS);
        println!("\ncut down to {} steps: {}\n", shrunk.steps, shrunk.failure);
        (failure, options) = (shrunk.failure, shrunk.options);
        print_last_lines(plan, &failure, &options);
        println!("\nreproduce: {} --trace\n", command(&plan.origin, &options));
    }
    if let Some(path) = &arguments.save {
        let text = save(plan, &options, &failure.to_string())?;
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
        println!("or: cargo xtask sim --plan {} --trace\n", path.display());
    }
    Ok(())
}

fn print_last_lines(plan: &Plan, failure: &Failure, options: &Options) {
    let (lines, _) = trace(plan, options);
    let chosen: Vec<_> =
        lines.iter().filter(|line| line.concerns(failure.violation.vm, failure.violation.at)).collect();
    println!("the last of {} events there:", chosen.len());
    for line in &chosen[chosen.len().saturating_sub(LINES_SHOWN)..] {
        println!("{line}");
    }
}

fn command(origin: &Origin, options: &Options) -> String {
    let mut command = match origin {
        Origin::Seed(seed) => format!("cargo xtask sim --seed {seed}"),
        Origin::File(name) => format!("cargo xtask sim --plan {name}"),
    };
    if let Some((name, _)) = Rule::ALL.iter().find(|(_, rule)| Some(*rule) == options.omit) {
        command += &format!(" --omit {name}");
    }
    if let Some((name, _)) = HostRule::ALL.iter().find(|(_, rule)| Some(*rule) == options.omit_host) {
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
        self.count(report.tally.named());
    }

    fn count(&mut self, counters: Vec<(&'static str, u64)>) {
        self.seeds += 1;
        for (name, count) in counters {
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
