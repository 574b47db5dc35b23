//! Memory that moves between guests and their local tiers (decision 0046).
//!
//! Three guests have 144 MiB each, and a local tier of 8 MiB. After some turns of reads one `remoca host --apply --guests` makes a round, while the guests
//! read on: their balloons lend memory to their own tiers, so that the curves below their old sizes are seen, the tiers are divided, and each guest
//! gets back what its tier still has of it. Then the guests go on reading, and the last turn is compared with the last one before the round: the same
//! number of records by the same pattern, and blocks from the disk.
//!
//! All the time the sizes are looked at (`watch.rs`).

use crate::watch::{Limits, Looks, Sizes, Watch};
use crate::{NAMES, Pair, Plan, WINDOW, host, turn};
use remoca_guest_tests::readers::{Bench, Kind, MIB, Memory, Observed, RECORD_BYTES, Reader, Work};
use remoca_guest_tests::{Result, remoca};
use remoca_host::record::Paths;
use remoca_host::socket;
use remoca_lab::{Service, figures};
use remoca_protocol::control::CurveGrid;
use remoca_protocol::host::{HostDecision, HostReport};
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

const GUEST_MIB: u32 = 144;
const GUEST_MINIMUM_MIB: u64 = 72;
const TIER: u64 = 8 * MIB;
const RESERVE: u64 = 8 * MIB;
/// Memory of the host beside that of the guests.
const TOTAL: u64 = 3 * TIER + RESERVE;
/// Memory of guests and tiers together.
const HOST: u64 = TOTAL + 3 * GUEST_MIB as u64 * MIB;
const LARGE_MIB: u64 = 112;
/// Reads all of it once, so that no later read is the first of its block, which misses at every size.
const FIRST: Work = Work { set: "large", pattern: "seq", count: LARGE_MIB * MIB / RECORD_BYTES, noise: None };
const PLAN: Plan = Plan::new(1500, FIRST, CurveGrid { first_bytes: 0, step_bytes: MIB, count: 257 });
/// Turns before and after the round, the last of which counts.
const BEFORE: u64 = 5;
const AFTER: u64 = 4;
/// Longest time of a round.
const ROUND_MAX: Duration = Duration::from_secs(1800);

/// One VM, before the round and after it.
#[derive(Serialize)]
struct Vm {
    before: Part,
    after: Part,
    /// Memory of guest and tier, after the round.
    all_mib: u64,
    /// Blocks from the disk after the round against before. Predicted by the daemon when it divided.
    ratio: Pair,
    /// The same by the curve of the reads that were made while guests lent memory.
    predicted_by_observed: Option<f64>,
}

#[derive(Serialize)]
struct Part {
    sizes: Sizes,
    observed: Observed,
}

/// What a round did.
struct Round {
    report: HostReport,
    /// Reads that were made while guests lent memory, and what they had then.
    observed: Option<(Vec<Sizes>, Vec<Observed>)>,
    turns: u64,
}

/// Measures a round, and returns the figures, and how often something was seen that must not be.
pub fn measure() -> Result<(Value, u64)> {
    let sets = [("large", LARGE_MIB), ("small", 16), ("noise", Work::noise_mib(u64::MAX))];
    let bench = Bench::new(remoca()?, &sets, HOST)?;
    configure(&bench)?;
    let start = |name: &&str| bench.start(name, Memory::lending(GUEST_MIB), Kind::Tiered(TIER));
    let mut vms = NAMES.iter().map(start).collect::<Result<Vec<_>>>()?;
    let limits = Limits { guest_minimum_bytes: GUEST_MINIMUM_MIB * MIB, host_bytes: HOST };
    let watch = Watch::start(&mut vms, limits)?;
    eprintln!("guests of {GUEST_MIB} MiB, before the round");
    let mut before = Vec::new();
    for number in 0..BEFORE {
        before = turn(&mut vms, &PLAN, number, WINDOW)?;
    }
    let sizes_before = watch.sizes()?;
    let round = make_round(&bench, &mut vms, &watch)?;
    let mut after = Vec::new();
    for number in BEFORE + round.turns..BEFORE + round.turns + AFTER {
        after = turn(&mut vms, &PLAN, number, Duration::ZERO)?;
    }
    let sizes_after = watch.sizes()?;
    let looks = watch.end()?;
    let complaints = vms.iter_mut().map(kills).collect::<Result<Vec<_>>>()?;
    vms.into_iter().try_for_each(Reader::end)?;
    let part =
        |sizes: &[Sizes], observed: &[Observed], at: usize| Part { sizes: sizes[at], observed: observed[at].clone() };
    let vm = |at: usize| vm(at, part(&sizes_before, &before, at), part(&sizes_after, &after, at), &round);
    let vms: Vec<Vm> = (0..NAMES.len()).map(vm).collect();
    let kills = complaints.iter().sum();
    let broken = looks.below_minimum + looks.over_host + kills;
    Ok((report(&vms, &round, &looks, limits, kills), broken))
}

/// Writes what the operator says about the VMs.
fn configure(bench: &Bench) -> Result<()> {
    let folder = bench.folder().join("config/vms");
    std::fs::create_dir_all(&folder)?;
    for name in NAMES {
        let monitor = bench.folder().join(format!("{name}.qmp"));
        let text = format!(
            "version = 1\n[memory]\nmonitor = \"qmp:{}\"\nguest-minimum = \"{GUEST_MINIMUM_MIB}M\"\n",
            monitor.display()
        );
        std::fs::write(folder.join(format!("{name}.toml")), text)?;
    }
    Ok(())
}

/// Has the daemon make a round, while the guests read on.
fn make_round(bench: &Bench, vms: &mut [Reader], watch: &Watch) -> Result<Round> {
    let (mut command, log) = (host(bench, TOTAL), bench.folder().join("host.log"));
    command.args(["--apply", "--guests", "--reserve", &RESERVE.to_string()]);
    let mut daemon = Service::start("remoca host", command, &log)?;
    let deadline = Instant::now() + ROUND_MAX;
    let (mut observed, mut turns) = (None, 0);
    let status = loop {
        if let Some(status) = daemon.exit_status()? {
            break status;
        }
        if Instant::now() > deadline {
            return Err(format!("the round does not end: {}", daemon.log_tail()).into());
        }
        let (phase, sizes) = (phase(bench), watch.sizes()?);
        let counted = turn(vms, &PLAN, BEFORE + turns, Duration::ZERO)?;
        turns += 1;
        if phase == "observe" && self::phase(bench) == phase {
            observed = Some((sizes, counted));
        }
    };
    let text = std::fs::read_to_string(&log)?;
    let last = text.lines().rfind(|line| line.starts_with('{'));
    let report = last.filter(|_| status.success()).ok_or_else(|| format!("remoca host ended with {status}: {text}"))?;
    Ok(Round { report: HostReport::parse(report.as_bytes())?, observed, turns })
}

/// Returns the phase of the round, and shows it.
fn phase(bench: &Bench) -> String {
    let report = socket::read(&Paths::new(bench.folder()).socket);
    let guests = report.ok().and_then(|report| report.guests);
    let shown = guests
        .as_ref()
        .map_or_else(String::new, |guests| format!("{}, {} MiB lent", guests.state, guests.lent_bytes / MIB));
    eprintln!("  remoca host: {shown}");
    guests.map_or_else(String::new, |guests| guests.phase)
}

/// Returns how often the guest's kernel killed a process because it had no memory.
fn kills(vm: &mut Reader) -> Result<u64> {
    let said = vm.run("dmesg | grep -ci 'killed process' ; true")?;
    Ok(said.trim().parse()?)
}

fn vm(at: usize, before: Part, after: Part, round: &Round) -> Vm {
    let all = |sizes: &Sizes| sizes.guest_bytes + sizes.tier_bytes;
    let by_observed = round.observed.as_ref().map(|(sizes, observed)| {
        let expected = |part: &Part| observed[at].expected_from_disk(all(&part.sizes) - sizes[at].guest_bytes);
        expected(&after) / expected(&before).max(1.)
    });
    let measured = after.observed.from_disk as f64 / before.observed.from_disk.max(1) as f64;
    let predicted = round.report.decisions.iter().filter_map(|decision| planned(decision, NAMES[at])).product();
    let all_mib = all(&after.sizes) / MIB;
    Vm { before, after, all_mib, ratio: Pair { predicted, measured }, predicted_by_observed: by_observed }
}

/// Returns the ratio of misses by which the daemon decided about the VM; `None` if the decision is not about its misses.
fn planned(decision: &HostDecision, name: &str) -> Option<f64> {
    let is_its = decision.vm.as_deref() == Some(name);
    let (now, then) = decision.miss_ratio.zip(decision.miss_ratio_then).filter(|_| is_its)?;
    Some(then.max(crate::RATIO_FLOOR) / now.max(crate::RATIO_FLOOR))
}

/// Prints a table, and returns the figures.
fn report(vms: &[Vm], round: &Round, looks: &Looks, limits: Limits, kills: u64) -> Value {
    println!(
        "| VM | guest and tier before, MiB | after | from disk before | after | predicted | (by the reads observed) | measured |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for (name, vm) in NAMES.iter().zip(vms) {
        let sizes = |part: &Part| format!("{} + {}", part.sizes.guest_bytes / MIB, part.sizes.tier_bytes / MIB);
        let Vm { before, after, ratio, predicted_by_observed, .. } = vm;
        let observed = predicted_by_observed.map_or_else(|| "-".into(), |ratio| format!("{ratio:.3}"));
        println!(
            "| {name} | {} | {} | {} | {} | {:.3} | {observed} | {:.3} |",
            sizes(before),
            sizes(after),
            before.observed.from_disk,
            after.observed.from_disk,
            ratio.predicted,
            ratio.measured
        );
    }
    for HostDecision { vm, from_bytes, to_bytes, why, outcome, .. } in &round.report.decisions {
        println!(
            "{}: {} to {} MiB: {why}: {outcome}",
            vm.as_deref().unwrap_or("all"),
            from_bytes / MIB,
            to_bytes / MIB
        );
    }
    let geometric_mean = Pair::mean(vms.iter().map(|vm| &vm.ratio));
    let (predicted, measured) = (geometric_mean.predicted, geometric_mean.measured);
    println!("geometric mean {predicted:.3} predicted, {measured:.3} measured; {kills} killed for memory; {looks:?}");
    json!({
        "made_unix_s": figures::unix_s(),
        "load_average": figures::load_average(),
        "guest_mib": GUEST_MIB, "tier_mib": TIER / MIB, "reserve_mib": RESERVE / MIB,
        "vms": NAMES.iter().zip(vms).collect::<BTreeMap<_, _>>(),
        "geometric_mean": geometric_mean,
        "limits": limits, "looks": looks, "killed_for_memory": kills,
        "decisions": round.report.decisions,
    })
}
