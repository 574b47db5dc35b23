//! A memory server that is killed while a VM process reads its pool (row 1.8 of the design's anchors): the local tier goes on,
//! and the server that comes back takes the pool up again.
//!
//! The tier holds half of the image. The guest only reads, and has an agent, which reports only what no block holds, so nothing enters the
//! tier and each pass over the image hits the same blocks. A service manager of our own keeps the pool, as systemd does.

use super::scale::{Found, Scale};
use crate::vm::{Folder, MemoryServer, ServerOptions, Vm, VmOptions};
use anyhow::{Context, Result, ensure};
use remoca_io::fake_manager::FakeManager;
use remoca_lab::figures::{Figure, Spread};
use remoca_protocol::control::PoolStatus;
use std::time::{Duration, Instant};

const DEPTH: usize = 32;
const DISK_MS: u32 = 1;
const PATIENCE: Duration = Duration::from_secs(20);
/// Most passes until each pass hits the same blocks.
const PASSES_MAX: usize = 10;

/// Measures hits of passes while the server dies, while it is away, while it comes back, and afterwards.
pub fn hits(scale: &Scale) -> Result<Found> {
    let (folder, manager) = (Folder::new()?, FakeManager::start());
    let options = ServerOptions { manager: Some(&manager), ..ServerOptions::default() };
    let mut server = MemoryServer::start(&folder.0, &options)?;
    let (tier, size) = (server.local_endpoint(), (scale.image_bytes() / 2).to_string());
    let image_bytes = scale.image_bytes();
    let local = Some((&*tier, &*size));
    let options_of_vm = VmOptions { disk_ms: DISK_MS, local, image_bytes, port: true, ..VmOptions::default() };
    let mut vm = Vm::start(&folder.0, "vm", &options_of_vm)?;
    vm.evict_all()?;
    let before = settled_hits(&mut vm)?;
    let generation = pool(&vm)?.generation;
    wait_until("the service manager has the pool", || Ok(manager.names().len() == 2))?;
    let (mut worst, mut adopted_ms) = (Vec::new(), Vec::new());
    for _ in 0..scale.rounds {
        let mut hits = vec![hits_of_pass(&mut vm, || server.process.kill())?];
        wait_until("the VM process notices", || Ok(pool(&vm)?.state == "away"))?;
        hits.push(hits_of_pass(&mut vm, || Ok(()))?);
        let began = Instant::now();
        server = std::thread::scope(|scope| {
            let restart = scope.spawn(|| MemoryServer::start(&folder.0, &options));
            while !restart.is_finished() {
                hits.push(hits_of_pass(&mut vm, || Ok(()))?);
            }
            restart.join().ok().context("the thread that starts the server panicked")?
        })?;
        wait_until("the server has the pool again", || Ok(pool(&vm)?.state == "connected"))?;
        adopted_ms.push(began.elapsed().as_secs_f64() * 1e3);
        hits.push(hits_of_pass(&mut vm, || Ok(()))?);
        ensure!(pool(&vm)?.generation == generation, "the server came back without the pool");
        worst.push(hits.into_iter().min().unwrap_or(0) as f64 / before as f64);
    }
    ensure!(vm.counter("fetch_wrong")? == 0, "pages were wrong");
    let spread = |values| Spread::of(values).context("nothing was measured");
    let figure = Figure::of_rounds("A1.8", scale.rounds, spread(worst)?, None)
        .beside("hits_of_a_pass", before as f64)
        .beside("adopted_ms", spread(adopted_ms)?.median)
        .beside("pages_missing", pool(&vm)?.pages_taken_back as f64)
        .beside("sessions_lost", vm.counter("disconnections")? as f64);
    Ok(vec![("A1.8".into(), Ok(figure))])
}

fn pool(vm: &Vm) -> Result<PoolStatus> {
    vm.status()?.pools.into_iter().find(|pool| pool.is_local_tier).context("the local tier is gone")
}

/// Reads each block once, calls `at_half` in the middle with reads in flight, and returns how many came from the local tier.
fn hits_of_pass(vm: &mut Vm, mut at_half: impl FnMut() -> Result<()>) -> Result<u64> {
    let (before, blocks) = (vm.hits(true)?, vm.blocks());
    // An agent that reports far less than is read counts as gone (decision 0015), and then what is read enters the tier.
    vm.evict_unknown(usize::try_from(blocks / 4)?)?;
    let (mut next, mut done) = (0..blocks, Ok(()));
    vm.client().reads(DEPTH, || {
        let block = next.next();
        if block == Some(blocks / 2) {
            done = at_half();
        }
        block
    })?;
    done?;
    Ok(vm.hits(true)? - before)
}

/// Reads until two passes in a row hit equally often, and returns how often.
fn settled_hits(vm: &mut Vm) -> Result<u64> {
    let mut before = 0;
    for _ in 0..PASSES_MAX {
        let hits = hits_of_pass(vm, || Ok(()))?;
        if hits > 0 && hits == before {
            return Ok(hits);
        }
        before = hits;
    }
    anyhow::bail!("{PASSES_MAX} passes over the image did not fill the local tier")
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
    let began = Instant::now();
    while !is_so()? {
        ensure!(began.elapsed() < PATIENCE, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}
