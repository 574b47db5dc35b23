//! What miss-ratio curves cost (row 2.3 of the design's anchors): instructions of VM processes that keep them over those of processes that keep none, for
//! the same requests.
//!
//! Both are `remoca-ablation`, the latter with `--no-curves`. The instructions of their I/O threads are counted one by one (`steps.rs`), outside the
//! kernel: the kernel's share is missing in the denominator, so the ratio is greater than that of CPU time. The latter stands beside, by the share of
//! CPU time that the same process spends outside the kernel.

use super::scale::{Found, Scale};
use crate::rounds::{Rounds, Side};
use crate::steps::Steps;
use crate::vm::{Program, Vm, VmOptions, program};
use crate::work::{IMAGE_BYTES, Kind, Setting, Work};
use anyhow::{Context, Result, bail, ensure};
use remoca_io::control;
use remoca_lab::figures::Figure;
use remoca_protocol::control::{Command as Ask, CurveStatus, Reply};

/// Reads that are begun together.
const DEPTH: usize = 32;
/// Number of times that so many reads are counted: 128 reads, because what curves do once in 64 blocks must have its share.
const COUNTED: usize = 4;
/// Number of times that so many reads are made before, at full speed.
const BEFORE: usize = 1_000;
/// Maximum number of rounds: counts need fewer than times, and take longer.
const ROUNDS_MAX: usize = 3;

/// Measures hits.
pub fn hit(scale: &Scale) -> Result<Found> {
    Ok(vec![("A2.3-hit".into(), figure("A2.3-hit", Kind::Hit, scale))])
}

/// Measures misses.
pub fn miss(scale: &Scale) -> Result<Found> {
    Ok(vec![("A2.3-miss".into(), figure("A2.3-miss", Kind::Miss, scale))])
}

/// Measures hits and evictions.
pub fn evicted(scale: &Scale) -> Result<Found> {
    Ok(vec![("A2.3-evicted".into(), figure("A2.3-evicted", Kind::Evicted, scale))])
}

fn figure(id: &str, kind: Kind, scale: &Scale) -> Result<Figure> {
    let program =
        program("remoca-ablation", "cargo build --release -p remoca-cli --features ablation --bin remoca-ablation")?;
    let setting = Setting::new()?;
    let image = setting.folder.0.join("vm1.img").display().to_string();
    let (mut number, mut spent) = (0, Spent::default());
    let counts = Rounds::take(scale.rounds.min(ROUNDS_MAX), |side| {
        number += 1;
        // The disk is as fast as the tier: with hedges it would be preferred.
        let mut arguments = vec!["--no-hedge".to_owned()];
        arguments.extend((side != Side::Ours).then(|| "--no-curves".to_owned()));
        let options = VmOptions {
            program: Some(&program),
            arguments: &arguments,
            image_bytes: if scale.quick { scale.image_bytes() } else { IMAGE_BYTES },
            // The first process makes it, and all read it.
            image: (number > 1).then_some(&image),
            ..VmOptions::default()
        };
        let mut vm = setting.start(&format!("vm{number}"), kind, options)?;
        let count = instructions(&mut vm, kind, scale, setting.processor, &mut spent)?;
        ensure!(
            curve(&vm)?.is_some() == (side == Side::Ours),
            "{side:?}: curves are kept, or not, against what was meant"
        );
        vm.end()?;
        Ok(count)
    })?;
    let figure = counts.figure_with(id, "with_instructions", "without_instructions")?;
    let share = spent.share_outside_kernel();
    let with_kernel = ((1.0 + (figure.value - 1.0) * share) * 1e4).round() / 1e4;
    Ok(figure.beside("share_outside_kernel", (share * 100.0).round() / 100.0).beside("with_kernel", with_kernel))
}

/// Returns the curve of the VM process, if it keeps one.
fn curve(vm: &Vm) -> Result<Option<Box<CurveStatus>>> {
    let reply = control::call(vm.control(), Ask::Curve { disk: None, grid: None })?;
    Ok(if let Reply::Curve(curve) = reply { Some(curve) } else { None })
}

/// Returns the number of reads that the VM process's curve is made of, or 0 without one. It falls when a window ends.
fn blocks_read(vm: &Vm) -> Result<f64> {
    Ok(curve(vm)?.map_or(0.0, |curve| curve.blocks_read))
}

/// Returns what `count` returns. Counts again if a window of the curve ended meanwhile: that takes as long as a few reads, but comes once a minute
/// and not, as it may seem here, after a hundred reads.
///
/// # Errors
/// If counting fails, or a window ends each time.
pub fn within_a_window<T>(vm: &mut Vm, mut count: impl FnMut(&mut Vm) -> Result<T>) -> Result<T> {
    for _ in 0..2 {
        let were_read = blocks_read(vm)?;
        let counted = count(vm)?;
        if blocks_read(vm)? >= were_read {
            return Ok(counted);
        }
    }
    bail!("a window of the curve ended while instructions were counted: the machine is too slow now")
}

/// Returns the number of instructions of the VM process for each block. Adds the CPU time of the same work at full speed to `spent`.
fn instructions(vm: &mut Vm, kind: Kind, scale: &Scale, processor: usize, spent: &mut Spent) -> Result<f64> {
    let hits_before = vm.counter("hit_blocks")?;
    let mut work = Work::new(kind, DEPTH, vm.blocks());
    let began = Spent::by(&vm.process)?;
    work.run(vm, scale.count(BEFORE))?;
    spent.add(&Spent::by(&vm.process)?, &began);
    let steps = Steps::of(&vm.process, processor)?;
    // The first turns after it was stopped have more to do.
    work.run(vm, 1)?;
    let each = within_a_window(vm, |vm| {
        let before = steps.at_rest()?;
        let reads = work.run(vm, if scale.quick { 1 } else { COUNTED })?;
        Ok((steps.at_rest()? - before) as f64 / reads as f64)
    })?;
    steps.end(|| vm.status().map(drop))?;
    let hits = vm.counter("hit_blocks")? - hits_before;
    let are_as_meant = hits == if kind == Kind::Miss { 0 } else { work.reads };
    ensure!(are_as_meant, "{hits} of {} reads were hits: the figure is not what it is called", work.reads);
    Ok(each)
}

/// CPU time in the kernel and outside it, in the kernel's unit of time.
#[derive(Clone, Copy, Default)]
struct Spent {
    outside: u64,
    inside: u64,
}

impl Spent {
    /// Returns what a program has spent so far.
    fn by(program: &Program) -> Result<Self> {
        let text = std::fs::read_to_string(format!("/proc/{}/stat", program.pid()))?;
        Self::parse(&text).context("the kernel does not say what CPU time a process spent")
    }

    fn parse(text: &str) -> Option<Self> {
        // The name of the program ends with the last bracket, and may contain anything.
        let (_, rest) = text.rsplit_once(')')?;
        let mut words = rest.split_whitespace().skip(11);
        let mut next = || words.next()?.parse().ok();
        Some(Self { outside: next()?, inside: next()? })
    }

    fn add(&mut self, now: &Self, before: &Self) {
        self.outside += now.outside - before.outside;
        self.inside += now.inside - before.inside;
    }

    fn share_outside_kernel(&self) -> f64 {
        self.outside as f64 / (self.outside + self.inside).max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_is_found_behind_any_name() {
        let spent = Spent::parse("17 (a) b) S 1 17 17 0 -1 4194560 100 0 0 0 123 45 0 0 20 0 1 0 77").unwrap();
        assert_eq!((spent.outside, spent.inside), (123, 45));
        assert!((spent.share_outside_kernel() - 123. / 168.).abs() < 1e-9);
        assert!(Spent::parse("17 (a) S 1").is_none() && Spent::parse("").is_none());
        assert_eq!(Spent::default().share_outside_kernel(), 0.);
    }
}
