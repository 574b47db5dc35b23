//! `remoca sim`: what guest memory and cache tiers of some sizes would do for a recorded trace.

mod figures;
mod page;
mod text;

use crate::form::Form;
use crate::number::whole_in;
use crate::size::{parse_size, show_size};
use crate::trace::{Opened, TraceFile, complete, read_all, removed_at_a_signal};
use anyhow::{Context, Result, anyhow, bail};
use clap::{Args, ValueEnum};
use figures::{Latencies, Report};
use remoca_trace::sim::{BLOCK_COST_BYTES, CurveKind, Pages, PolicyKind, Setup, Simulation, TooManyBlocks};
use remoca_trace::{Format, Summary};
use std::io::Write as _;
use std::path::PathBuf;

const PAGE_BYTES: u64 = 4096;

/// Show what guest memory, a local tier and a remote one of some sizes would do for a trace.
#[derive(Args, Debug)]
pub struct SimArgs {
    #[command(flatten)]
    file: TraceFile,

    /// Guest memory in front of the cache, beyond what the guest had while the trace was recorded
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = parse_size)]
    guest: u64,

    /// Cache in memory of the same host
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = parse_size)]
    local: u64,

    /// Cache in the memory of another host
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = parse_size)]
    remote: u64,

    /// How pages enter the cache, and which are displaced
    #[arg(long, value_enum, default_value_t = Policy::Lru)]
    policy: Policy,

    /// Curve of the hits at each size: from a sample, exact, or none
    #[arg(long, value_enum, default_value_t = Curve::Sampled)]
    curve: Curve,

    /// Simulate one block of N, with as much less memory: for traces of very many blocks
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole_in("number", 1_u64..=4096))]
    one_of: u64,

    /// Limit on the memory of this command
    #[arg(long, value_name = "SIZE", default_value = "2G", value_parser = parse_size)]
    memory: u64,

    /// Time of a read from the local tier, in milliseconds [default: if it is the only tier, that of the trace's cache; else 0.01]
    #[arg(long, value_name = "MS", value_parser = milliseconds)]
    local_latency: Option<f64>,

    /// Time of a read from the remote tier, in milliseconds [default: if it is the only tier, that of the trace's cache; else 0.2]
    #[arg(long, value_name = "MS", value_parser = milliseconds)]
    remote_latency: Option<f64>,

    /// Time of a read from the disk, in milliseconds [default: that of the trace, or 7 if it has none]
    #[arg(long, value_name = "MS", value_parser = milliseconds)]
    disk_latency: Option<f64>,

    /// Output format
    #[arg(short, long, value_enum, default_value_t = Form::Table)]
    output: Form,

    /// Also write a page with charts into this file
    #[arg(long, value_name = "PAGE")]
    html: Option<PathBuf>,

    /// Replace PAGE if it is there
    #[arg(long, requires = "html")]
    force: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Policy {
    /// Every page enters, in place of the least recently used one
    Lru,
    /// The insertion policy of `remoca disk`
    Adaptive,
    /// The best set of blocks that never changes, known beforehand; a cache can do better where the blocks in use change
    Fixed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Curve {
    Sampled,
    Exact,
    None,
}

impl SimArgs {
    /// Returns what is to be simulated.
    ///
    /// # Errors
    /// If nothing would be left of a memory.
    fn setup(&self) -> Result<Setup> {
        let pages = |option: &str, bytes: u64| {
            if (1..PAGE_BYTES * self.one_of).contains(&bytes) {
                let least = show_size(PAGE_BYTES * self.one_of);
                let share =
                    if self.one_of > 1 { format!(" in the share of --one-of {}", self.one_of) } else { String::new() };
                bail!("--{option} is less than a block{share}: say at least {least}, or 0 for none");
            }
            Ok(bytes / PAGE_BYTES)
        };
        Ok(Setup {
            guest: pages("guest", self.guest)?,
            tiers: Pages { local: pages("local", self.local)?, remote: pages("remote", self.remote)? },
            policy: match self.policy {
                Policy::Lru => PolicyKind::Lru,
                Policy::Adaptive => PolicyKind::Adaptive,
                Policy::Fixed => PolicyKind::Fixed,
            },
            curve: match self.curve {
                Curve::Sampled => CurveKind::Sampled,
                Curve::Exact => CurveKind::Exact,
                Curve::None => CurveKind::None,
            },
            one_of: self.one_of,
            // Numbers of blocks have 32 bits, and lists their ends besides.
            blocks_max: u32::try_from(self.memory / BLOCK_COST_BYTES).unwrap_or(u32::MAX).min(u32::MAX - 16),
        })
    }
}

/// Runs the subcommand.
///
/// # Errors
/// If the trace cannot be read or takes too much memory, or the page cannot be written.
pub fn run(args: &SimArgs) -> Result<()> {
    let setup = args.setup()?;
    // Before the work, so that it is not done in vain.
    let page = args.html.as_deref().map(|page| removed_at_a_signal(page, args.force)).transpose()?;
    let mut opened = args.file.open()?;
    let report = simulate(args, setup, &mut opened)?;
    if let (Some(mut page), Some(path)) = (page, &args.html) {
        let cannot = || format!("cannot write {}", path.display());
        page.write_all(page::render(&report).into_string().as_bytes()).with_context(cannot)?;
        complete(page, path, args.force)?;
    }
    let text = match args.output {
        Form::Json => serde_json::to_string_pretty(&report)? + "\n",
        Form::Table => text::text(&report),
    };
    Ok(crate::output::output().write_all(text.as_bytes())?)
}

fn simulate(args: &SimArgs, setup: Setup, opened: &mut Opened) -> Result<Report> {
    let mut simulation = Simulation::new(setup);
    let mut summary = Summary::default();
    let format = opened.source.format();
    let before = cpu_seconds();
    let cut = read_all(opened, |batch| {
        summary.note(batch, format == Format::Remoca);
        simulation.take(batch).map_err(|TooManyBlocks { blocks_max }| {
            anyhow!(
                "the trace has more than {blocks_max} different blocks, which is what {} of memory are enough for: give it \
                 more (--memory), or simulate one block of some (--one-of 16)",
                show_size(args.memory)
            )
        })
    })?;
    let outcome = simulation.finish();
    let sizes = figures::Sizes { guest: args.guest, local: args.local, remote: args.remote };
    let said = [args.local_latency, args.remote_latency, args.disk_latency];
    let latencies = Latencies::of(said, sizes, &summary);
    let file = args.file.file.display().to_string();
    let trace = figures::TraceFigures { file, format: format.to_string(), summary, cut };
    Ok(Report::of(trace, sizes, &setup, latencies, outcome, cpu_seconds() - before))
}

fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn milliseconds(text: &str) -> Result<f64, String> {
    let error = || format!("`{text}` is not a number of milliseconds from 0 on, such as 0.2");
    text.parse().ok().filter(|ms: &f64| ms.is_finite() && *ms >= 0.0).ok_or_else(error)
}
