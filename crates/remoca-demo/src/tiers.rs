//! The last act: the same reads with a cache of the same size, a part of which is a local tier in front of the memory server.

use std::thread;

use anyhow::Result;
use remoca_lab::Guest;

use crate::{
    observed::{Act, TierAct},
    phases::{Reads, read_phase},
    plan::Plan,
    progress::Progress,
    stage::{AGENT_TICK, Stage, kernel_faults, page_cache_pages, start_agent, stop_agent},
    vm::{VmConfig, VmProcess},
};

/// Performs the act. Returns what was observed, or `None` if the plan leaves it out.
pub fn perform(plan: &Plan, stage: &Stage, progress: &Progress) -> Result<Option<TierAct>> {
    if plan.local_bytes == 0 {
        return Ok(None);
    }
    let (local_bytes, remote_bytes) = (plan.local_bytes, plan.cache_bytes - plan.local_bytes);
    progress.begin(
        &format!(
            "booting the guest again, with {} MiB of this host's memory in front of {} MiB of the memory server's",
            local_bytes >> 20,
            remote_bytes >> 20
        ),
        0,
    );
    let path = stage.sockets().join("tier.mem");
    let _local = stage.memory_server(local_bytes, &format!("unix:{}", path.display()), "serve-tier")?;
    let remote = stage.memory_server(remote_bytes, "tcp:127.0.0.1:0", "serve-behind")?;
    let (local_address, address) = (format!("local:{}", path.display()), stage.address_of(&remote)?);
    let disk = stage.slow_disk(plan)?;
    let image = disk.uri();
    let config = VmConfig {
        program: &stage.program,
        name: "tiers",
        sockets: stage.sockets(),
        logs: &stage.logs,
        image: &image,
        cache: Some((&address, remote_bytes)),
        local: Some((&local_address, local_bytes)),
    };
    let mut vm = config.start()?;
    vm.wait_for_cache()?;
    let guest = stage.guest(plan, "tiers", &config.disk_socket(), Some(&config.port_socket()))?;
    let act = observe(plan, vm, guest, progress)?;
    disk.stop()?;
    Ok(Some(act))
}

fn observe(plan: &Plan, vm: VmProcess, mut guest: Guest, progress: &Progress) -> Result<TierAct> {
    let agent = start_agent(&mut guest)?;
    let before = vm.status()?;
    let warmup = read_phase(plan, &vm, &mut guest, progress, "with a local tier, warm-up", Reads::Warmup)?;
    let warm = vm.status()?;
    let measured = read_phase(plan, &vm, &mut guest, progress, "with a local tier, measured", Reads::Measured)?;
    let page_cache_pages = page_cache_pages(&mut guest)?;
    thread::sleep(AGENT_TICK);
    let after = vm.status()?;
    stop_agent(&mut guest, &agent)?;
    let end = vm.status()?;
    let kernel_faults = kernel_faults(&mut guest)?;
    guest.shut_down()?;
    let trace = vm.stop()?;
    let act = Act { warmup, measured, kernel_faults, trace };
    Ok(TierAct { act, before, warm, after, end, page_cache_pages })
}
