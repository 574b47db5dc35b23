//! Compares guests whose memory is partly a local tier with guests that have all of it, on the same reads, in blocks read from the disk.
//!
//! *Equal* (the paper's section 3.4): a guest of 96 MiB with a local tier of 48 MiB, against one of 144 MiB without a cache. *Sizes* (its
//! Figure 11): the curve of the first one foretells what the disk answers at other sizes, and guests of these sizes without a cache are run; all
//! relative to the present size of 144 MiB. The patterns are those of the paper's microbenchmarks, over 128 MiB. All guests boot with the
//! same memory, and a balloon leaves them their size, as when memory moves to a tier. Guests without a cache have an agent too, because its
//! memory counts in guests as small as these; *equal* alone also has guests without. Nothing is timed.
//!
//! `cargo run -p remoca-guest-tests --bin curves [equal|sizes [PART OF A PATTERN'S NAME]]`; *sizes* by default, which has *equal* in it. Writes
//! `out/bench/curves.json`.

use remoca_guest_tests::readers::{Bench, Kind, MIB, Memory, Observed, Work};
use remoca_guest_tests::{Result, remoca};
use remoca_lab::figures::{self, Figure};
use remoca_protocol::control::CurveGrid;
use serde::Serialize;

/// What all guests boot with; a balloon leaves them the sizes below. More than the largest of these: a guest without a balloon reads a loop
/// otherwise (decision 0038).
const BOOT_MIB: u32 = 224;
const GUEST_MIB: u32 = 96;
const PRESENT_MIB: u32 = 144;
const SIZES_MIB: [u32; 4] = [112, 128, 168, 192];
const SET_MIB: u64 = 128;
/// Reads at the start, for all patterns but the loop: most blocks for the first time, which misses at every size.
const FIRST: Work = Work { set: "set", pattern: "rand", count: 2000, noise: None };
const GRID: CurveGrid = CurveGrid { first_bytes: 0, step_bytes: MIB, count: 129 };

/// Share of its size by which the end of a cliff may be elsewhere, as the host's daemon has it (decision 0042).
const CLIFF_MARGIN: f64 = 0.02;
/// Share of the present misses that a cliff is, within the margin on both sides. Random reads fall by half of it.
const CLIFF_FALL: f64 = 0.3;
/// Errors of ratios below this one are shares of it: without it, a guest that misses nothing would have an infinite error.
const RATIO_LEAST: f64 = 0.05;

/// Patterns with the records of each turn: a loop is read from its start to its end.
const WORKS: [Work; 4] = [
    Work { set: "set", pattern: "seq", count: 2048, noise: None },
    Work { set: "set", pattern: "rand", count: 2000, noise: None },
    Work { set: "set", pattern: "zipf", count: 2000, noise: None },
    Work { set: "set", pattern: "class", count: 2000, noise: None },
];

/// What one guest did with one pattern.
#[derive(Serialize)]
struct Run {
    pattern: &'static str,
    guest_mib: u32,
    /// Pages of files that the guest held at the end.
    file_pages: u64,
    observed: Observed,
}

/// A size at which the curve was compared with a guest of that size.
#[derive(Serialize)]
struct Compared {
    pattern: &'static str,
    guest_mib: u32,
    /// Blocks from the disk.
    expected: f64,
    measured: u64,
    /// Both, divided by those at the present size.
    expected_ratio: f64,
    measured_ratio: f64,
    error: f64,
    /// Whether the curve falls by more than [`CLIFF_FALL`] of the present misses within the margin of this size.
    is_at_cliff: bool,
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let sizes = match arguments.first().map(String::as_str) {
        Some("equal") => &[][..],
        None | Some("sizes") => &SIZES_MIB[..],
        Some(other) => return Err(format!("{other}: equal or sizes").into()),
    };
    let wanted = arguments.get(1).map_or("", String::as_str);
    let works: Vec<&Work> = WORKS.iter().filter(|work| work.pattern.contains(wanted)).collect();
    let bench = Bench::new(remoca()?, &[("set", SET_MIB)], 128 * MIB)?;
    let tiered = run(&bench, GUEST_MIB, Kind::Tiered(u64::from(PRESENT_MIB - GUEST_MIB) * MIB), &works)?;
    let present = run(&bench, PRESENT_MIB, Kind::Watched, &works)?;
    let plain = if sizes.is_empty() { run(&bench, PRESENT_MIB, Kind::Plain, &works)? } else { Vec::new() };
    let equal = equal(&tiered, &present, &plain);
    let mut others = Vec::new();
    for size in sizes {
        others.extend(run(&bench, *size, Kind::Watched, &works)?);
    }
    let compared: Vec<Compared> = others.iter().filter_map(|other| compare(&tiered, &present, other)).collect();
    let figures = [equal, errors(&compared)].concat();
    // A part of the patterns or sizes must not hide the last run of all.
    if wanted.is_empty() && !sizes.is_empty() {
        let report = serde_json::json!({
            "tiered": tiered, "present": present, "others": others, "compared": compared,
        });
        println!("\n{}", figures::save("curves", &figures, &report)?.display());
    }
    Ok(())
}

/// Runs each pattern in a guest of its own: reads to warm up, and those that count. A guest, and the insertion policy of a tier, would
/// remember the pattern before for long.
fn run(bench: &Bench, guest_mib: u32, kind: Kind, works: &[&Work]) -> Result<Vec<Run>> {
    eprintln!("guests of {guest_mib} MiB, {kind:?}");
    works.iter().map(|work| run_one(bench, guest_mib, kind, work)).collect()
}

fn run_one(bench: &Bench, guest_mib: u32, kind: Kind, work: &Work) -> Result<Run> {
    let mut vm = bench.start("vm", Memory { boot_mib: BOOT_MIB, left_mib: guest_mib, lends: false }, kind)?;
    if work.pattern != "seq" {
        vm.read(&FIRST, 0, GRID)?;
    }
    let half = Work { count: work.count / 2, ..*work };
    vm.read(if work.pattern == "seq" { work } else { &half }, 1, GRID)?;
    let observed = vm.read(work, 2, GRID)?;
    let (pattern, file_pages) = (work.pattern, vm.file_pages()?);
    vm.end()?;
    let Observed { read, from_disk, lost, followed, .. } = &observed;
    eprintln!(
        "  {pattern}: {read} read, {from_disk} from disk, {lost} lost; {followed:.3} on the curve; {file_pages} pages of files"
    );
    Ok(Run { pattern, guest_mib, file_pages, observed })
}

/// Prints how a guest with a tier compares with one that has all memory, and returns the figures.
fn equal(tiered: &[Run], present: &[Run], plain: &[Run]) -> Vec<Figure> {
    println!(
        "| pattern | {GUEST_MIB} MiB and a tier: read | from disk | lost evictions | {PRESENT_MIB} MiB: from disk | ratio | without agent |"
    );
    println!("|---|---|---|---|---|---|---|");
    let row = |(at, (with, without)): (usize, (&Run, &Run))| {
        let (Observed { read, from_disk, lost, .. }, all) = (&with.observed, without.observed.from_disk);
        let ratio = |other: u64| *from_disk as f64 / other as f64;
        let plain = plain.get(at).map(|plain| ratio(plain.observed.from_disk));
        let shown = plain.map_or_else(|| "-".into(), |plain| format!("{plain:.3}"));
        println!("| {} | {read} | {from_disk} | {lost} | {all} | {:.3} | {shown} |", with.pattern, ratio(all));
        let figure = Figure::single(&format!("H9-{}", with.pattern), ratio(all)).beside("lost", *lost as f64);
        plain.into_iter().fold(figure, |figure, plain| figure.beside("ratio_without_agent", plain))
    };
    tiered.iter().zip(present).enumerate().map(row).collect()
}

/// Compares the curve of the guest with a tier with a guest of another size.
fn compare(tiered: &[Run], present: &[Run], other: &Run) -> Option<Compared> {
    let of = |runs: &'_ [Run]| runs.iter().position(|run| run.pattern == other.pattern);
    let (curve, present) = (&tiered[of(tiered)?].observed, &present[of(present)?].observed);
    let bytes = |mib: u32| u64::from(mib) * MIB;
    let at = |all: u64| curve.expected_from_disk(all - bytes(GUEST_MIB));
    let (expected, measured) = (at(bytes(other.guest_mib)), other.observed.from_disk);
    let now = at(bytes(PRESENT_MIB));
    let (expected_ratio, measured_ratio) = (expected / now, measured as f64 / present.from_disk as f64);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a small share of a size")]
    let margin = (bytes(other.guest_mib) as f64 * CLIFF_MARGIN) as u64;
    let fall = at(bytes(other.guest_mib) - margin) - at(bytes(other.guest_mib) + margin);
    Some(Compared {
        pattern: other.pattern,
        guest_mib: other.guest_mib,
        expected,
        measured,
        expected_ratio,
        measured_ratio,
        error: (expected_ratio - measured_ratio) / measured_ratio.max(RATIO_LEAST),
        is_at_cliff: fall > now * CLIFF_FALL,
    })
}

/// Prints the comparisons, and returns the greatest errors below and above the present size.
fn errors(compared: &[Compared]) -> Vec<Figure> {
    if compared.is_empty() {
        return Vec::new();
    }
    println!(
        "\n| pattern | MiB | expected | measured | ratio expected | measured | error |\n|---|---|---|---|---|---|---|"
    );
    for row in compared {
        let Compared { pattern, guest_mib, expected, measured, expected_ratio, measured_ratio, error, is_at_cliff } =
            row;
        let cliff = if *is_at_cliff { " (at a cliff)" } else { "" };
        println!(
            "| {pattern} | {guest_mib} | {expected:.0} | {measured} | {expected_ratio:.3} | {measured_ratio:.3} | {error:+.3}{cliff} |"
        );
    }
    let worst = |id: &str, is_in: &dyn Fn(&&Compared) -> bool| {
        let errors = |at_cliffs: bool| {
            let rows = compared.iter().filter(is_in).filter(move |row| at_cliffs || !row.is_at_cliff);
            rows.map(|row| row.error.abs()).fold(0., f64::max)
        };
        Figure::single(id, errors(false)).beside("with_cliffs", errors(true))
    };
    vec![worst("2.2-below", &|row| row.guest_mib < PRESENT_MIB), worst("2.2-above", &|row| row.guest_mib > PRESENT_MIB)]
}
