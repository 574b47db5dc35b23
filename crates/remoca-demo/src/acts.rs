//! The acts: the same reads without the cache and with it, then the death and return of the memory server, then the same reads
//! with a local tier.

use std::{path::Path, thread, time::Instant};

use anyhow::{Context, Result, bail};
use remoca_lab::{Guest, Service, store};

use crate::{
    conditions::Conditions,
    figures,
    observed::{Act, CacheAct, Kill, Phase},
    phases::{Reads, note, read_phase},
    plan::Plan,
    progress::Progress,
    reading::{self, Pace, Reading, Until},
    report::Report,
    sampler::Sampler,
    stage::{AGENT_TICK, Stage, kernel_faults, page_cache_pages, start_agent, stop_agent},
    tiers,
    vm::{VmConfig, VmProcess},
};

/// Performs the whole demonstration, from preparation to report.
pub fn perform(plan: &Plan, out: &Path) -> Result<Report> {
    let progress = Progress::start();
    let stage = Stage::prepare(plan, out, &progress)?;
    let prepared = progress.elapsed();
    progress.end(&format!(
        "the disk: {}, so each read request takes {} ms",
        plan.disk_command(),
        plan.disk_delay.as_millis()
    ));
    let mut conditions = Conditions::of_this_machine(plan, stage.accelerator, stage.lock_memory);
    let baseline = perform_baseline(plan, &stage, &progress)?;
    let (cached, guest_kernel) = perform_cached(plan, &stage, &progress)?;
    let tiers = tiers::perform(plan, &stage, &progress)?;
    progress.begin("checking the file system from outside", 0);
    let file_system = store::check_ext4(&stage.disk).err().map(|error| error.to_string());
    progress.end("done");
    conditions.guest_kernel = guest_kernel;
    conditions.note_end();
    conditions.prepare_seconds = prepared.as_secs_f64();
    conditions.run_seconds = (progress.elapsed() - prepared).as_secs_f64();
    Ok(figures::make(plan, conditions, &baseline, &cached, tiers.as_ref(), file_system))
}

fn perform_baseline(plan: &Plan, stage: &Stage, progress: &Progress) -> Result<Act> {
    progress.begin(&format!("booting a guest with {} MiB, without the cache", plan.guest_memory_mib), 0);
    let disk = stage.slow_disk(plan)?;
    let image = disk.uri();
    let config = VmConfig {
        program: &stage.program,
        name: "baseline",
        sockets: stage.sockets(),
        logs: &stage.logs,
        image: &image,
        cache: None,
        local: None,
    };
    let vm = config.start()?;
    let mut guest = stage.guest(plan, "baseline", &config.disk_socket(), None)?;
    let warmup = read_phase(plan, &vm, &mut guest, progress, "without the cache, warm-up", Reads::Warmup)?;
    let measured = read_phase(plan, &vm, &mut guest, progress, "without the cache, measured", Reads::Measured)?;
    let kernel_faults = kernel_faults(&mut guest)?;
    guest.shut_down()?;
    let trace = vm.stop()?;
    disk.stop()?;
    Ok(Act { warmup, measured, kernel_faults, trace })
}

fn perform_cached(plan: &Plan, stage: &Stage, progress: &Progress) -> Result<(CacheAct, String)> {
    let mib = plan.cache_bytes >> 20;
    progress.begin(&format!("booting the guest again, with a cache of {mib} MiB in a memory server's memory"), 0);
    let server = stage.memory_server(plan.cache_bytes, "tcp:127.0.0.1:0", "serve")?;
    let address = stage.address_of(&server)?;
    let disk = stage.slow_disk(plan)?;
    let image = disk.uri();
    let config = VmConfig {
        program: &stage.program,
        name: "cached",
        sockets: stage.sockets(),
        logs: &stage.logs,
        image: &image,
        cache: Some((&address, plan.cache_bytes)),
        local: None,
    };
    let mut vm = config.start()?;
    vm.wait_for_cache()?;
    let mut guest = stage.guest(plan, "cached", &config.disk_socket(), Some(&config.port_socket()))?;
    let kernel = guest.run("uname -r", crate::stage::JOB_LIMIT)?;
    let agent = start_agent(&mut guest)?;
    let sampler = Sampler::start(vm.control());
    let before = vm.status()?;
    let warmup = read_phase(plan, &vm, &mut guest, progress, "with the cache, warm-up", Reads::Warmup)?;
    let warm = vm.status()?;
    let measured = read_phase(plan, &vm, &mut guest, progress, "with the cache, measured", Reads::Measured)?;
    let page_cache_pages = page_cache_pages(&mut guest)?;
    thread::sleep(AGENT_TICK);
    let after = vm.status()?;
    let kill = kill_server(plan, stage, &vm, &mut guest, server, &address, progress)?;
    let samples = sampler.stop();
    stop_agent(&mut guest, &agent)?;
    let end = vm.status()?;
    let kernel_faults = kernel_faults(&mut guest)?;
    guest.shut_down()?;
    let trace = vm.stop()?;
    disk.stop()?;
    let act = Act { warmup, measured, kernel_faults, trace };
    Ok((CacheAct { act, before, warm, after, end, page_cache_pages, kill, samples }, kernel))
}

/// Progress of the last act, with the time at which each stage began.
#[derive(Clone, Copy)]
enum KillStage {
    Before(Instant),
    Away(Instant),
    Back(Instant),
    Over,
}

/// Kills the memory server (SIGKILL) while the guest reads, and restarts it after a while.
fn kill_server(
    plan: &Plan,
    stage: &Stage,
    vm: &VmProcess,
    guest: &mut Guest,
    server: Service,
    address: &str,
    progress: &Progress,
) -> Result<Kill> {
    let times = plan.server_kill;
    let total = times.before + times.away + times.after;
    progress.begin("the memory server will be killed and started again while the guest reads on", total.as_secs());
    let reading = Reading { seed: plan.seed + 2, until: Until::Stopped };
    let mut server = Some(server);
    let mut now = KillStage::Before(Instant::now());
    let (mut killed, mut restarted) = (None, None);
    let mut app_reads_before = 0;
    let started = Instant::now();
    let each = |guest: &mut Guest, pace: &Pace| {
        progress.advance(started.elapsed().as_secs(), &note(pace));
        match now {
            KillStage::Before(since) if since.elapsed() >= times.before => {
                if let Some(mut server) = server.take() {
                    server.kill()?;
                }
                killed = Some(vm.now_ns());
                app_reads_before = pace.reads;
                now = KillStage::Away(Instant::now());
                progress.say("the memory server is killed (SIGKILL); the guest reads on");
            }
            KillStage::Away(since) if since.elapsed() >= times.away => {
                // Its first answer may arrive before the call returns.
                restarted = Some(vm.now_ns());
                server = Some(stage.memory_server(plan.cache_bytes, address, "serve-again")?);
                now = KillStage::Back(Instant::now());
                progress.say("the memory server is started again, empty");
            }
            KillStage::Back(since) if since.elapsed() >= times.after => {
                reading::stop(guest)?;
                now = KillStage::Over;
            }
            KillStage::Before(_) | KillStage::Away(_) | KillStage::Back(_) | KillStage::Over => {}
        }
        Ok(())
    };
    let (outcome, window) = vm.during(|| reading.run(guest, plan, each))?;
    let killed_ns = killed.context("the reader ended before the memory server was killed")?;
    let restarted_ns = restarted.context("the reader ended before the memory server was started again")?;
    let ended = server.as_mut().map(Service::exit_status).transpose()?.flatten();
    if let Some(status) = ended {
        bail!("the new memory server ended: {status}");
    }
    Ok(Kill { phase: Phase { outcome, window }, killed_ns, restarted_ns, app_reads_before })
}
