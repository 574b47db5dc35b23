//! Divides memory among three guests by their curves, as `remoca host` does it, and counts what came of it.
//!
//! *zipf* and *rand* read 128 MiB each (112 in the second part). *light* reads 16 MiB by classes, and a light task in the background reads through much more without
//! coming back to it: its working set is larger than its memory, and yet it needs little. Guests read one after the other, and check every byte of
//! the records. Blocks are counted, nothing is timed.
//! - `tiers`: local tiers are divided, by each policy (the paper's section 6.5, Tables 2 and 3).
//! - `guests`: the guests' own memory is moved (the paper's section 4.3).
//!
//! `make bench-allocation` runs both and writes `out/bench/allocation.json`; with `PART=guests` it runs one, and leaves the figures of the other one
//! as they are.

mod guests;
mod tiers;
mod watch;

use remoca_guest_tests::Result;
use remoca_guest_tests::readers::{Bench, Observed, Reader, Work};
use remoca_lab::figures;
use remoca_protocol::control::CurveGrid;
use serde::Serialize;
use serde_json::{Map, Value};
use std::process::Command;
use std::time::{Duration, Instant};

const NAMES: [&str; 3] = ["zipf", "rand", "light"];
/// Minimum length of a window of a curve.
const WINDOW: Duration = Duration::from_secs(61);
/// Miss ratio below which the product counts no gain, as in `remoca_core::allocation`.
const RATIO_FLOOR: f64 = 1e-4;

/// A ratio as the product predicted it, and as it came.
#[derive(Clone, Copy, Serialize)]
struct Pair {
    predicted: f64,
    measured: f64,
}

impl Pair {
    /// Returns the geometric means.
    fn mean<'a>(pairs: impl Iterator<Item = &'a Self> + Clone) -> Self {
        let mean = |of: fn(&Self) -> f64| {
            let product: f64 = pairs.clone().map(|pair| of(pair).max(RATIO_FLOOR)).product();
            product.cbrt()
        };
        Self { predicted: mean(|pair| pair.predicted), measured: mean(|pair| pair.measured) }
    }
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Some(other) = arguments.iter().find(|part| !["tiers", "guests"].contains(&part.as_str())) {
        return Err(format!("{other}: tiers, guests, or nothing for both").into());
    }
    let is_wanted = |part: &str| arguments.is_empty() || arguments.iter().any(|name| name == part);
    if is_wanted("tiers") {
        save(tiers::measure()?)?;
    }
    if is_wanted("guests") {
        let (figures, broken) = guests::measure()?;
        save(Map::from_iter([("guests".to_owned(), figures)]))?;
        if broken > 0 {
            return Err(format!(
                "{broken} times something was broken that must not be: see `looks` and `killed_for_memory`"
            )
            .into());
        }
    }
    Ok(())
}

/// Puts figures into the file, in the places of those of an earlier run.
fn save(figures: Map<String, Value>) -> Result<()> {
    let folder = figures::folder();
    std::fs::create_dir_all(&folder)?;
    let path = folder.join("allocation.json");
    let former = std::fs::read(&path).ok().and_then(|text| serde_json::from_slice(&text).ok());
    let mut all: Map<String, Value> = former.unwrap_or_default();
    all.extend(figures);
    std::fs::write(&path, format!("{:#}\n", Value::Object(all)))?;
    println!("\n{}", path.display());
    Ok(())
}

/// What the VMs read.
struct Plan {
    works: [Work; 3],
    /// Reads at the start of the first two: nearly all blocks for the first time, which misses at every size.
    first: Work,
    /// Sizes at which curves are asked for.
    grid: CurveGrid,
}

impl Plan {
    /// Returns reads with so many records in each turn of the first two VMs.
    const fn new(count: u64, first: Work, grid: CurveGrid) -> Self {
        Self {
            works: [
                Work { set: "large", pattern: "zipf", count, noise: None },
                Work { set: "large", pattern: "rand", count, noise: None },
                Work { set: "small", pattern: "class", count: count / 5 * 8, noise: Some("noise") },
            ],
            first,
            grid,
        }
    }
}

/// Has each VM make one turn of reads, one VM after the other, and returns what was counted. Takes at least so long.
fn turn(vms: &mut [Reader], plan: &Plan, turn: u64, least: Duration) -> Result<Vec<Observed>> {
    let began = Instant::now();
    let mut all = Vec::new();
    for ((vm, work), name) in vms.iter_mut().zip(&plan.works).zip(NAMES) {
        let work = if turn == 0 && work.noise.is_none() { &plan.first } else { work };
        let observed = vm.read(work, turn, plan.grid)?;
        let Observed { read, from_disk, lost, .. } = &observed;
        eprintln!("  {name}, turn {turn}: {read} read, {from_disk} from disk, {lost} lost");
        all.push(observed);
    }
    // Each turn is in a window of its own, so that the curve forgets the first reads, as it would after some minutes.
    std::thread::sleep(least.saturating_sub(began.elapsed()));
    Ok(all)
}

/// Returns the command of `remoca host` for one look at the VMs, with a report as JSON.
fn host(bench: &Bench, total: u64) -> Command {
    let mut command = Command::new(bench.program());
    command.args(["host", "--once", "-o", "json", "--tier", "local", "--total", &total.to_string()]);
    command.arg("--sockets").arg(bench.folder()).arg("--config").arg(bench.folder().join("config"));
    command
}
