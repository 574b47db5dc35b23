//! The division of local tiers.
//!
//! Three guests of 96 MiB share 144 MiB of local tiers. All read first with equal tiers, a minute and more for each turn, so that the curves forget
//! the start. Then `remoca host` divides by the curves of the VM processes, with bounds of 5 % and 25 %, by each policy. The best division with 25 %
//! is moved by `remoca host --apply`, the others by `remoca set --local`. With each division other reads of the same patterns are made. Predicted and
//! measured ratios are blocks from the disk against those with equal tiers.

use crate::{NAMES, Pair, Plan, RATIO_FLOOR, WINDOW};
use remoca_guest_tests::readers::{Bench, Kind, MIB, Memory, Observed, Reader, Work};
use remoca_guest_tests::{Result, remoca};
use remoca_lab::figures;
use remoca_protocol::control::CurveGrid;
use remoca_protocol::host::HostReport;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, btree_map::Entry};
use std::ops::Range;
use std::time::Duration;

const GUEST_MIB: u32 = 96;
const TOTAL: u64 = 144 * MIB;
const FIRST: Work = Work { set: "large", pattern: "rand", count: 6000, noise: None };
const PLAN: Plan = Plan::new(2000, FIRST, CurveGrid { first_bytes: 0, step_bytes: MIB, count: 145 });
const BOUNDS: [&str; 2] = ["5%", "25%"];
/// Bound of the figures at the top of the file.
const MAIN_BOUND: &str = "25%";
const POLICIES: [&str; 4] = ["optimal", "greedy", "esx", "equal"];
/// Turns before the division, and turns with each division, the last of which counts: a tier that has grown fills slowly. No turn is made twice: a guest that read the same turns
/// again and again would be in a loop, and tiers would suit the loop and not the pattern.
const BEFORE: u64 = 5;
const WITH_EACH: u64 = 5;
const TURNS_MAX: u64 = BEFORE + WITH_EACH * (BOUNDS.len() * POLICIES.len()) as u64;
/// Errors of ratios below this one are shares of it.
const RATIO_LEAST: f64 = 0.05;

/// Tiers of the three VMs, in bytes.
type Tiers = [u64; 3];

/// A division that the product proposes.
struct Proposal {
    bound: &'static str,
    policy: &'static str,
    tiers: Tiers,
    predicted: [f64; 3],
}

/// A division as it was proposed and measured.
#[derive(Serialize)]
struct Outcome {
    bound: &'static str,
    policy: &'static str,
    vms: BTreeMap<&'static str, Share>,
    geometric_mean: Pair,
}

#[derive(Serialize)]
struct Share {
    tier_mib: u64,
    from_disk: u64,
    /// Blocks from the disk against those with equal tiers. Predicted by the product's plan.
    ratio: Pair,
    /// The same by the curve of exactly the reads that count with equal tiers.
    predicted_by_same_reads: f64,
    error: f64,
}

/// Measures the divisions, and returns the figures.
pub fn measure() -> Result<Map<String, Value>> {
    let sets = [("large", 128), ("small", 16), ("noise", Work::noise_mib(TURNS_MAX).next_multiple_of(16))];
    let bench = Bench::new(remoca()?, &sets, TOTAL)?;
    let equal = [TOTAL / 3; 3];
    let mut vms = NAMES
        .iter()
        .map(|name| bench.start(name, Memory::all(GUEST_MIB), Kind::Tiered(equal[0])))
        .collect::<Result<Vec<_>>>()?;
    eprintln!("equal tiers, before the division");
    let before = turns(&mut vms, 0..BEFORE, WINDOW)?;
    let mut proposals = Vec::new();
    for bound in BOUNDS {
        for policy in POLICIES {
            proposals.push(propose(&bench, bound, policy)?);
        }
    }
    let by_daemon = |proposal: &&Proposal| proposal.bound == MAIN_BOUND && proposal.policy == "optimal";
    let best = proposals.iter().find(by_daemon).ok_or("the best division is missing")?;
    apply(&bench, &vms, best)?;
    let (mut measured, mut turn) = (BTreeMap::from([(equal, before.clone())]), BEFORE);
    for tiers in std::iter::once(best.tiers).chain(proposals.iter().map(|proposal| proposal.tiers)) {
        if let Entry::Vacant(missing) = measured.entry(tiers) {
            set(&vms, tiers)?;
            eprintln!("tiers of {} MiB", tiers.map(|bytes| (bytes / MIB).to_string()).join(", "));
            missing.insert(turns(&mut vms, turn..turn + WITH_EACH, Duration::ZERO)?);
            turn += WITH_EACH;
        }
    }
    vms.into_iter().try_for_each(Reader::end)?;
    let outcomes: Vec<Outcome> =
        proposals.iter().map(|proposal| outcome(proposal, &before, &measured[&proposal.tiers])).collect();
    Ok(report(&outcomes, &before))
}

/// Has the VMs make their turns of reads. Returns what the last turn counted.
fn turns(vms: &mut [Reader], turns: Range<u64>, least: Duration) -> Result<Vec<Observed>> {
    let mut last = Vec::new();
    for turn in turns {
        last = crate::turn(vms, &PLAN, turn, least)?;
    }
    Ok(last)
}

/// Runs `remoca host` once, with these arguments.
fn host(bench: &Bench, arguments: &[&str]) -> Result<HostReport> {
    let output = crate::host(bench, TOTAL).args(["--window", "1s"]).args(arguments).output()?;
    if !output.status.success() {
        return Err(format!("remoca host: {}", String::from_utf8_lossy(&output.stderr)).into());
    }
    Ok(HostReport::parse(&output.stdout)?)
}

fn configure(bench: &Bench, bound: &str) -> Result<()> {
    let folder = bench.folder().join("config");
    std::fs::create_dir_all(&folder)?;
    Ok(std::fs::write(folder.join("remoca.toml"), format!("version = 1\n[memory]\nbound = \"{bound}\"\n"))?)
}

/// Asks the product how it would divide.
fn propose(bench: &Bench, bound: &'static str, policy: &'static str) -> Result<Proposal> {
    configure(bench, bound)?;
    let said = host(bench, &["--policy", policy])?;
    let (mut tiers, mut predicted) = ([0; 3], [1.; 3]);
    for (at, name) in NAMES.iter().enumerate() {
        let vm = said.vms.iter().find(|vm| vm.name == *name).ok_or("a VM is missing in the report")?;
        let (now, then) = vm.miss_ratio.zip(vm.miss_ratio_then).ok_or_else(|| format!("{name}: {}", vm.why))?;
        (tiers[at], predicted[at]) = (vm.target_bytes, then.max(RATIO_FLOOR) / now.max(RATIO_FLOOR));
        eprintln!("bound {bound}, {policy}: {name} gets {} MiB, {:.3}: {}", tiers[at] / MIB, predicted[at], vm.why);
    }
    Ok(Proposal { bound, policy, tiers, predicted })
}

/// Has the daemon move the memory, and waits until the VMs have what it proposed.
fn apply(bench: &Bench, vms: &[Reader], proposal: &Proposal) -> Result<()> {
    configure(bench, proposal.bound)?;
    for decision in host(bench, &["--apply"])?.decisions {
        eprintln!("{:?}: {} to {} MiB", decision.vm, decision.from_bytes / MIB, decision.to_bytes / MIB);
    }
    vms.iter().zip(proposal.tiers).zip(NAMES).try_for_each(|((vm, bytes), name)| {
        vm.wait_until(&format!("{name} gets its {bytes} bytes"), |status| status.cache.local_granted_bytes == bytes)
    })
}

/// Gives the VMs their tiers. Memory is taken before it is given.
fn set(vms: &[Reader], tiers: Tiers) -> Result<()> {
    let mut changes = Vec::new();
    for (vm, bytes) in vms.iter().zip(tiers) {
        let now = vm.status()?.cache.local_granted_bytes;
        changes.push((bytes.cast_signed() - now.cast_signed(), vm, bytes));
    }
    changes.sort_by_key(|(growth, ..)| *growth);
    changes.into_iter().filter(|(growth, ..)| *growth != 0).try_for_each(|(_, vm, bytes)| vm.set_local(bytes))
}

fn outcome(proposal: &Proposal, before: &[Observed], after: &[Observed]) -> Outcome {
    let share = |at: usize| {
        let (then, now) = (&before[at], &after[at]);
        let measured = now.from_disk as f64 / then.from_disk.max(1) as f64;
        let expected = |bytes: u64| then.expected_from_disk(bytes);
        let predicted = proposal.predicted[at];
        Share {
            tier_mib: proposal.tiers[at] / MIB,
            from_disk: now.from_disk,
            ratio: Pair { predicted, measured },
            predicted_by_same_reads: expected(proposal.tiers[at]) / expected(TOTAL / 3).max(1.),
            error: (predicted - measured) / measured.max(RATIO_LEAST),
        }
    };
    let vms: BTreeMap<_, _> = NAMES.into_iter().zip((0..NAMES.len()).map(share)).collect();
    let geometric_mean = Pair::mean(vms.values().map(|share| &share.ratio));
    Outcome { bound: proposal.bound, policy: proposal.policy, vms, geometric_mean }
}

/// Prints a table, and returns the figures.
fn report(outcomes: &[Outcome], before: &[Observed]) -> Map<String, Value> {
    println!(
        "| bound | policy | VM | tier, MiB | from disk | predicted | (by the same reads) | measured | geometric mean |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    for Outcome { bound, policy, vms, geometric_mean } in outcomes {
        for (name, share) in vms {
            let Share { tier_mib, from_disk, ratio, predicted_by_same_reads, .. } = share;
            println!(
                "| {bound} | {policy} | {name} | {tier_mib} | {from_disk} | {:.3} | {predicted_by_same_reads:.3} | {:.3} | {:.3} predicted, {:.3} measured |",
                ratio.predicted, ratio.measured, geometric_mean.predicted, geometric_mean.measured
            );
        }
    }
    let errors = outcomes.iter().flat_map(|outcome| outcome.vms.values()).map(|share| share.error.abs());
    let error_max = errors.fold(0., f64::max);
    let means = |bound: &str| {
        let of_bound = outcomes.iter().filter(move |outcome| outcome.bound == bound);
        of_bound.map(|outcome| (outcome.policy, outcome.geometric_mean)).collect::<BTreeMap<_, _>>()
    };
    // All three touch more than they have, so there is nobody that a division by working sets would take from.
    let touched: BTreeMap<_, _> = NAMES.iter().zip([128, 128, 16 + Work::noise_mib(BEFORE)]).collect();
    let measured = |bound: &str| means(bound).into_iter().map(|(policy, pair)| (policy, pair.measured)).collect();
    let measured: BTreeMap<&str, f64> = measured(MAIN_BOUND);
    println!("\nprediction_error_max {error_max:.3}");
    let value = json!({
        "made_unix_s": figures::unix_s(),
        "load_average": figures::load_average(),
        "prediction_error_max": error_max,
        "geometric_mean": measured,
        "geometric_mean_by_bound": BOUNDS.map(|bound| (bound, means(bound))).into_iter().collect::<BTreeMap<_, _>>(),
        "esx_by_touched_blocks": {"touched_mib": touched, "guest_and_tier_mib": u64::from(GUEST_MIB) + TOTAL / 3 / MIB},
        "guest_mib": GUEST_MIB, "total_tiers_mib": TOTAL / MIB,
        "divisions": outcomes,
        "equal_tiers": before,
    });
    let Value::Object(figures) = value else { return Map::new() };
    figures
}
