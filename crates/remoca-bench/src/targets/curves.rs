//! What miss-ratio curves cost (row 2.3 of the design's anchors): CPU time of VM processes that keep them over that of processes that keep none, for the
//! same work.
//!
//! Both are `remoca-ablation`, the latter with `--no-curves`. Each measurement has a new process, because the memory layout that a process happens to get
//! makes it faster or slower for its whole life by more than curves cost. So the noise is that of two processes without curves.

use super::scale::{Found, Scale};
use crate::cpus::{Cpus, pin_this_thread};
use crate::rounds::{Rounds, Side};
use crate::vm::{Folder, Vm, VmOptions, memory_server, pinned, program};
use anyhow::{Context, Result, ensure};
use remoca_io::control;
use remoca_lab::figures::Figure;
use remoca_protocol::control::{Command as Ask, Reply};

/// Size of a local tier that holds the whole image.
const TIER: &str = "128M";
const DEPTH: usize = 32;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Reads that the local tier answers. Nothing reports evictions, so a curve is told a read and an eviction of each block.
    Hit,
    /// Reads that the disk answers, of a guest with an agent that reports nothing known: the curve's queue stays empty.
    Miss,
    /// Reads that the local tier answers, and pages that an agent reports as evicted, one for each.
    Evicted,
}

/// Difference of two processes without curves above which the machine cannot tell what curves cost.
const NOISE_MAX: f64 = 0.0025;

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
    let (folder, cpus) = (Folder::new()?, Cpus::choose()?);
    let server = memory_server(&folder.0, &pinned(Some(cpus.behind)))?;
    let tier = server.local_endpoint();
    pin_this_thread(cpus.client)?;
    let image = folder.0.join("vm1.img").display().to_string();
    let mut number = 0;
    let times = Rounds::take(scale.rounds, |side| {
        number += 1;
        // The disk is as fast as the tier: with hedges it would be preferred.
        let mut arguments = vec!["--no-hedge".to_owned()];
        arguments.extend((side != Side::Ours).then(|| "--no-curves".to_owned()));
        let options = VmOptions {
            program: Some(&program),
            arguments: &arguments,
            // Without memory for its cache the VM process would not hash what it reads.
            server: (kind == Kind::Miss).then_some(&server.endpoint),
            local: (kind != Kind::Miss).then_some((&tier, TIER)),
            cache: Some(if kind == Kind::Miss { TIER } else { "0" }),
            port: kind != Kind::Hit,
            inflight: true,
            processor: Some(cpus.server),
            image_bytes: scale.image_bytes(),
            // The first process makes it, and all read it.
            image: (number > 1).then_some(&image),
            ..VmOptions::default()
        };
        let mut vm = Vm::start(&folder.0, &format!("vm{number}"), &options)?;
        let us = cpu_us(&mut vm, kind, scale)?;
        ensure!(has_curve(&vm)? == (side == Side::Ours), "{side:?}: curves are kept, or not, against what was meant");
        vm.end()?;
        Ok(us)
    })?;
    let noise = times.noise().context("nothing was measured")?.median - 1.0;
    ensure!(
        noise.abs() <= NOISE_MAX || scale.quick,
        "two processes without curves differ by {:.2} %: this machine cannot tell half a percent now",
        noise * 100.0
    );
    times.figure_with(id, "with_us", "without_us")
}

/// Returns whether the VM process has a curve.
fn has_curve(vm: &Vm) -> Result<bool> {
    let reply = control::call(vm.control(), Ask::Curve { disk: None, grid: None })?;
    Ok(matches!(reply, Reply::Curve(_)))
}

/// Returns the CPU time of the VM process for each block, in microseconds.
fn cpu_us(vm: &mut Vm, kind: Kind, scale: &Scale) -> Result<f64> {
    let blocks = usize::try_from(vm.blocks())?;
    match kind {
        Kind::Hit => vm.fill()?,
        Kind::Miss => vm.evict_unknown()?,
        Kind::Evicted => vm.evict_all()?,
    }
    let (before, hits_before) = (vm.process.cpu_time()?, vm.counter("hit_blocks")?);
    let count = match kind {
        Kind::Hit | Kind::Miss => vm.measure(DEPTH, scale.count(50_000), |_| {})?.len(),
        Kind::Evicted => {
            let times = scale.count(30) / 10;
            for _ in 0..times {
                vm.pass(DEPTH)?;
                vm.evict_all()?;
            }
            blocks * times
        }
    };
    let spent = vm.process.cpu_time()? - before;
    let hits = vm.counter("hit_blocks")? - hits_before;
    let are_as_meant = if kind == Kind::Miss { hits == 0 } else { hits * 100 >= count as u64 * 99 };
    ensure!(are_as_meant, "{hits} of {count} reads were hits: the figure is not what it is called");
    Ok(spent.as_secs_f64() * 1e6 / f64::from(u32::try_from(count)?))
}
