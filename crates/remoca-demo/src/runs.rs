//! Derives the figures that the runs of all guests have.

use std::collections::BTreeMap;

use remoca_protocol::control::Status;

use crate::{
    analysis::{BLOCK_BYTES, ratio, reads_in},
    observed::{Act, Phase},
    plan::Plan,
    report::{AppFigures, Evictions, PhaseFigures, Run, Sources},
};

/// Returns `value` divided by `by`, or 0 if `by` is not positive, because JSON has no infinity.
pub fn over(value: f64, by: f64) -> f64 {
    if by > 0.0 { value / by } else { 0.0 }
}

/// Returns the figures of the reads of one guest.
pub fn run_figures(plan: &Plan, act: &Act) -> Run {
    let measured = phase_figures(plan, act, &act.measured);
    Run {
        mean_read_ms: measured.vm.mean_read_ms,
        app_mean_read_ms: measured.app.mean_ms,
        measured,
        warmup: phase_figures(plan, act, &act.warmup),
    }
}

fn phase_figures(plan: &Plan, act: &Act, phase: &Phase) -> PhaseFigures {
    let latency = &phase.outcome.measured.reads;
    let vm = reads_in(&act.trace, phase.window);
    let wanted = latency.count * plan.record_bytes.div_ceil(BLOCK_BYTES);
    PhaseFigures {
        seconds: phase.outcome.measured.seconds,
        app: AppFigures {
            reads: latency.count,
            mean_ms: latency.mean_us / 1e3,
            p50_ms: latency.p50_us / 1e3,
            p90_ms: latency.p90_us / 1e3,
            p99_ms: latency.p99_us / 1e3,
            max_ms: latency.max_us / 1e3,
        },
        sources: Sources {
            guest_page_cache: wanted.saturating_sub(vm.blocks),
            remote_memory: vm.blocks_from_cache,
            disk: vm.blocks - vm.blocks_from_cache,
        },
        vm,
    }
}

/// Returns by how much each counter has grown.
pub fn counted(from: &Status, to: &Status) -> BTreeMap<String, u64> {
    let before = |name: &str| from.counters.get(name).copied().unwrap_or_default();
    to.counters.iter().map(|(name, value)| (name.clone(), value.saturating_sub(before(name)))).collect()
}

/// Returns the fates of the pages that were reported as evicted between two looks at the status.
pub fn evictions(from: &Status, to: &Status) -> Evictions {
    let counters = counted(from, to);
    let count = |name: &str| counters.get(name).copied().unwrap_or_default();
    let lost = |status: &Status| status.port.as_ref().and_then(|port| port.agent).map_or(0, |agent| agent.lost);
    let (reported, unmatched) = (count("evictions_reported"), count("evictions_unmatched"));
    Evictions {
        reported,
        admitted: count("evictions_admitted"),
        duplicate: count("evictions_duplicate"),
        zero: count("evictions_zero"),
        unmatched,
        dropped: count("evictions_dropped"),
        passed_over: count("evictions_passed_over"),
        lost: lost(to).saturating_sub(lost(from)),
        known_ratio: ratio(reported.saturating_sub(unmatched), reported),
    }
}
