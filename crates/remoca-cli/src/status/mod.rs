//! `remoca status`: one line for each VM, or everything about one.
//!
//! [`figures`] says what the counters mean. [`table`] makes the line of a VM, [`details`] everything else about it.

mod details;
mod figures;
mod table;

use crate::runtime;
use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use details::Detail;
use figures::Figures;
use remoca_protocol::control::{Command, Status};
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

/// Show what the cache does for each running VM of this host.
#[derive(Args, Debug)]
pub struct StatusArgs {
    /// Only this VM: its name, or the path of its control socket
    #[arg(value_name = "NAME")]
    name: Option<String>,

    /// Repeat at this interval; later figures are those of the interval
    #[arg(short, long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..=86400))]
    interval: Option<u32>,

    /// Stop after this many repetitions [default: never]
    #[arg(short, long, value_name = "N", requires = "interval")]
    count: Option<u32>,

    /// Show everything, not only one line per VM
    #[arg(short, long)]
    verbose: bool,

    /// Output format
    #[arg(short, long, value_enum, default_value_t = Form::Table)]
    output: Form,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Form {
    Table,
    Json,
}

/// Runs the subcommand.
///
/// # Errors
/// If the VM named on the command line does not answer, or there is no VM to show in the table.
pub fn run(args: &StatusArgs) -> Result<()> {
    let mut before: Vec<Status> = Vec::new();
    let mut shown = 0;
    loop {
        let now = collect(args)?;
        show(args, &now, &before)?;
        shown += 1;
        let Some(interval) = args.interval.filter(|_| args.count.is_none_or(|count| shown < count)) else {
            return Ok(());
        };
        before = now;
        std::thread::sleep(Duration::from_secs(interval.into()));
    }
}

/// Returns the status of each VM that the command line asks for.
fn collect(args: &StatusArgs) -> Result<Vec<Status>> {
    let sockets = runtime::sockets(args.name.as_deref())?;
    if args.name.is_some() {
        return sockets.iter().map(|socket| runtime::ask(socket, Command::Status)).collect();
    }
    // A killed process leaves its socket behind. The other VMs are still shown.
    let answer = |socket: &PathBuf| match runtime::ask(socket, Command::Status) {
        Ok(status) => Some(status),
        Err(error) => {
            eprintln!("remoca: {error:#}");
            None
        }
    };
    Ok(sockets.iter().filter_map(answer).collect())
}

/// Prints the status of all VMs. The figures of a VM that is in `before` are those since then.
fn show(args: &StatusArgs, now: &[Status], before: &[Status]) -> Result<()> {
    let mut out = std::io::stdout().lock();
    if args.output == Form::Json {
        serde_json::to_writer(&mut out, now)?;
        writeln!(out)?;
        return Ok(());
    }
    if now.is_empty() {
        bail!("no VM process runs here: start one with `remoca disk`");
    }
    if args.verbose {
        for status in now {
            show_all(&mut out, status)?;
        }
        return Ok(());
    }
    if before.is_empty() {
        writeln!(out, "{}", table::heading())?;
    }
    for status in now {
        let earlier = before.iter().find(|earlier| earlier.pid == status.pid && earlier.name == status.name);
        writeln!(out, "{}", table::line(&Figures::of(status, earlier)))?;
    }
    out.flush()?;
    Ok(())
}

/// Prints everything about one VM.
fn show_all(out: &mut impl Write, status: &Status) -> Result<()> {
    writeln!(out, "{} (process {}, up {:.0} s, version {})", status.name, status.pid, status.uptime_s, status.version)?;
    for Detail { label, text } in details::of(status) {
        writeln!(out, "  {label:<11} {text}")?;
    }
    for (name, value) in &status.counters {
        writeln!(out, "  {name:<26} {value:>12}")?;
    }
    Ok(())
}
