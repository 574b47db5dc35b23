//! Phases of an act: a series of record reads in the guest, and its span on the clock of the VM process.

use anyhow::Result;
use remoca_lab::Guest;

use crate::{
    observed::Phase,
    plan::Plan,
    progress::Progress,
    reading::{Pace, Reading, Until},
    vm::VmProcess,
};

/// The two series of reads that both guests make.
#[derive(Clone, Copy)]
pub enum Reads {
    Warmup,
    Measured,
}

/// Runs the reader in the guest for one series of reads, and returns what came of it.
pub fn read_phase(
    plan: &Plan,
    vm: &VmProcess,
    guest: &mut Guest,
    progress: &Progress,
    step: &str,
    reads: Reads,
) -> Result<Phase> {
    let (seed, count) = match reads {
        Reads::Warmup => (plan.seed, plan.warmup_reads),
        Reads::Measured => (plan.seed + 1, plan.measured_reads),
    };
    progress.begin(&format!("{step}: {count} record reads"), count);
    let reading = Reading { seed, until: Until::Reads(count) };
    let each = |_: &mut Guest, pace: &Pace| {
        progress.advance(pace.reads, &note(pace));
        Ok(())
    };
    let (outcome, window) = vm.during(|| reading.run(guest, plan, each))?;
    let latency = &outcome.measured.reads;
    progress.end(&format!(
        "{step}: {} reads in {:.0} s, mean {:.2} ms in the guest",
        latency.count,
        outcome.measured.seconds,
        latency.mean_us / 1e3
    ));
    Ok(Phase { outcome, window })
}

/// Returns what the reader says now, as a note beside the progress.
pub fn note(pace: &Pace) -> String {
    let faults = pace.io_errors + pace.wrong_signatures;
    let faults = if faults > 0 { format!(", {faults} FAULTS") } else { String::new() };
    format!("{} reads, {:.2} ms each in the last second{faults}", pace.reads, pace.interval_mean_us / 1e3)
}
