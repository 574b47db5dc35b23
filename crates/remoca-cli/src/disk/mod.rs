//! `remoca disk`: the VM process. Turns arguments into ready parts, then runs the driver until it is told to stop.

mod args;
mod open;

pub use args::DiskArgs;

use crate::inherited::{self, Inherited};
use crate::key;
use crate::log;
use crate::nbd;
use crate::runtime;
use crate::signals::Signals;
use anyhow::{Context, Result, bail};
use open::{is_in_use, open_disks, open_port};
use remoca_core::engine::{DiskEngine, EngineConfig, layout};
use remoca_core::rules::Rules;
use remoca_core::units::{PAGE_SIZE_U64, PageCount};
use remoca_disk::clock::SystemClock;
use remoca_disk::control::{self, ControlServer};
use remoca_disk::driver::{Driver, Ended, Migration, Parts, Start, cache_pages, on_a_thread};
use remoca_disk::handover::{self, Checking};
use remoca_disk::link::{HostNetwork, ServerLink, check_list, give_back};
use remoca_disk::migration::{HostPeers, Mark};
use remoca_disk::service::ServiceManager;
use remoca_disk::state::{
    Before, Caution, Deaths, EngineStart, Former, RosterEntry, StateFile, settings_at, stable_hash,
};
use remoca_disk::trace::TraceWriter;
use remoca_io::address::Endpoint;
use remoca_io::buffer::{BUFFER_LEN_MAX, BufferPool};
use remoca_io::narrow;
use remoca_io::words::IndexMemory;
use remoca_protocol::control::{Reply, Secret};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// Pages that may wait for the connection to the server: 8 MiB.
const SEND_WINDOW_PAGES: u32 = 2048;
/// A frame is 4 KiB to copy and to hash, beside a block that is read; one of so many costs next to nothing.
const FRAME_SAMPLE: u32 = 64;
/// Requests to the server without reply.
const FETCH_LIMIT: u32 = 8192;
/// Less than a millisecond.
const SLOTS_PER_TURN: u32 = 1024;
/// A guest with more memory than this (1 TiB) is indexed as if it had this much, whatever the operator says.
const GUEST_PAGES_MAX: u32 = 1 << 28;

/// Runs the subcommand.
///
/// # Errors
/// If something that was given cannot be used; the text says what to do.
pub fn run(args: DiskArgs) -> Result<()> {
    if args.print_capabilities {
        return Ok(writeln!(std::io::stdout(), r#"{{"type": "block", "features": ["read-only", "blk-file"]}}"#)?);
    }
    if args.check_handover {
        return Ok(writeln!(std::io::stdout(), "{}", handover::confirmation())?);
    }
    #[cfg(feature = "ablation")]
    arm(&args)?;
    let mut inherited = inherited::receive(&args);
    // Before any thread starts and any socket exists: a signal that comes early must not be lost.
    let signals = Signals::take()?;
    let client = inherited.as_mut().and_then(Inherited::client);
    let mut manager = ServiceManager::of_environment();
    manager.begin_start(Instant::now());
    let parts = parts(args, signals, inherited, manager)?;
    let mut driver = Driver::new(parts).context("cannot watch the descriptors")?;
    if driver.has_taken_over() {
        narrow::passes("handover-opened");
    }
    driver.manager().say_ready(Instant::now());
    if let Some(client) = client {
        control::answer_for_former(client, Reply::Status(Box::new(driver.snapshot())));
    }
    loop {
        match driver.run().context("waiting for events failed")? {
            Ended::Finished => return Ok(()),
            Ended::Unsettled => {
                std::mem::forget(driver);
                return Ok(());
            }
            Ended::HandOver(handover) => {
                driver.manager().say_giving_way(Instant::now());
                let error = handover.exec();
                driver.refuse_upgrade(&format!("the new program cannot be started: {error}"));
                driver.manager().say_ready(Instant::now());
            }
        }
    }
}

fn parts(
    mut args: DiskArgs,
    signals: Signals,
    mut inherited: Option<Inherited>,
    manager: ServiceManager,
) -> Result<Parts> {
    let name = args.name.clone().unwrap_or_else(|| std::process::id().to_string());
    if name.is_empty() || name.contains('/') {
        bail!("`{name}` cannot be the name of a VM: it is part of a file's name");
    }
    let cache_as_said = checked_cache(&args).map_err(anyhow::Error::msg)?;
    let caution = caution(&args, inherited.is_some())?;
    let mut exports = nbd::Exports::default();
    let lock_reaches = args.images().all(|image| std::fs::metadata(image).is_ok_and(|image| image.is_file()));
    // Another process of this name finds it.
    let is_named = args.name.is_some() || args.control.is_some();
    let control = is_named.then(|| control_path(&args, &name)).transpose()?;
    let mark = control.map(|path| Mark::beside(&path, lock_reaches));
    let waits = args.incoming.take_if(|_| inherited.is_some() || mark.as_ref().is_some_and(Mark::says_here));
    let has_gone = inherited.is_none() && mark.as_ref().is_some_and(Mark::says_gone);
    args.away = args.incoming.is_some() || has_gone;
    incoming(&args)?;
    let mut disks = match open_disks(&args, &mut exports, inherited.as_mut()) {
        // It is wherever the VM went since.
        Err(error) if waits.is_some() && inherited.is_none() && is_in_use(&error) => {
            (args.incoming, args.away) = (waits, true);
            open_disks(&args, &mut exports, None)?
        }
        disks => disks?,
    };
    let (servers, cache, cache_enabled) = match caution {
        Caution::Plain => (Vec::new(), PageCount(0), false),
        Caution::None | Caution::Cold => cache_settings(&args, cache_as_said, inherited.as_ref())?,
    };
    let port = open_port(&args, &mut exports, inherited.as_mut())?;
    let config = engine_config(&args, if cache_enabled { cache } else { PageCount(0) }, disks.len())?;
    let EngineStart { engine, state, cold_reason, former, is_handed_over } =
        start_engine(&args, &config, inherited.as_mut(), caution)?;
    disks.iter_mut().for_each(|disk| disk.kept_open &= is_handed_over);
    let nbd = exports.serve(&args.nbd, args.socket_group, inherited.as_mut())?;
    // What a former process left, if anything.
    let header = state.as_ref().map(StateFile::header);
    let (key, seed) = header.map_or((config.key, config.seed), |header| (header.key(), header.seed()));
    let config = EngineConfig { key, seed, ..config };
    let incoming = incoming(&args)?;
    let migration =
        Migration::new(Box::new(HostPeers), incoming, mark, state_path(&args)?, config, lock_reaches, args.away)
            .context("--incoming")?;
    let control = match inherited.as_mut().and_then(Inherited::control) {
        Some(control) => control,
        None => control_socket(&args, &name)?,
    };
    let open_trace = if inherited.is_some() { TraceWriter::append } else { TraceWriter::create };
    let trace = args.trace.as_deref().map(open_trace).transpose().context("cannot make the trace file")?;
    let header = state.as_ref().map(StateFile::header);
    let resumed = cold_reason.is_none();
    let is_ours = |pool: &RosterEntry| resumed && servers.contains(&pool.endpoint);
    give_back(former.servers.iter().filter(|pool| !is_ours(pool)).cloned());
    let link = || ServerLink::start(Arc::new(HostNetwork), &servers, header).context("cannot start the server link");
    let link = if servers.is_empty() { None } else { Some(link()?) };
    let buffers = usize::try_from(buffer_bytes(args.buffers, disks.len())).unwrap_or(usize::MAX);
    Ok(Parts {
        name,
        clock: Box::new(SystemClock),
        engine,
        state,
        cold_reason,
        former,
        cache,
        cache_enabled,
        options: options(&args),
        disks,
        port,
        nbd,
        link,
        migration,
        control: Some(control),
        guest_memory_max: guest_pages(args.guest_memory_max.max(args.guest_memory)),
        buffers: BufferPool::new(buffers),
        trace,
        stop: signals.stop,
        hangup: signals.hangup,
        start: Start {
            program: inherited::own_program()?,
            arguments: std::env::args_os().collect(),
            upgrades: inherited.map_or(0, |inherited| inherited.upgrades()),
        },
        ask: Box::new(Checking::start),
        aside: Box::new(on_a_thread),
        manager,
    })
}

/// Returns where disks may come to, and the key of whoever brings them.
fn incoming(args: &DiskArgs) -> Result<Option<(Endpoint, Secret)>> {
    let Some(endpoint) = &args.incoming else { return Ok(None) };
    let Some(source) = &args.incoming_key else {
        bail!("--incoming without --incoming-key FILE would give the disks to whoever connects first. {}", key::ADVICE)
    };
    Ok(Some((endpoint.clone(), source.read().context("--incoming-key")?)))
}

/// Checks the options of the cache before anything is opened, and returns its size.
fn checked_cache(args: &DiskArgs) -> Result<PageCount, String> {
    if args.server.is_empty() {
        return Ok(PageCount(0));
    }
    check_list(&args.server)?;
    cache_pages(args.cache)
}

/// Servers, size of the cache, and whether it is on: as the options say, or as `remoca set` left them.
fn cache_settings(
    args: &DiskArgs,
    size: PageCount,
    inherited: Option<&Inherited>,
) -> Result<(Vec<Endpoint>, PageCount, bool)> {
    if args.server.is_empty() {
        return Ok((Vec::new(), PageCount(0), false));
    }
    let set = match inherited.and_then(Inherited::cache_settings) {
        None if !args.away => state_path(args)?.and_then(|path| settings_at(&path, options(args))),
        set => set,
    };
    Ok(set.unwrap_or((args.server.clone(), size, true)))
}

/// Returns what tells the options that `remoca set` can overrule from others.
fn options(args: &DiskArgs) -> u64 {
    let texts: Vec<_> =
        [args.cache.to_string()].into_iter().chain(args.server.iter().map(Endpoint::to_string)).collect();
    stable_hash(&texts.iter().map(String::as_str).collect::<Vec<_>>())
}

/// Returns how to start after processes of this name that died by a fault of this program, and has this one recorded if it does.
fn caution(args: &DiskArgs, takes_over: bool) -> Result<Caution> {
    let Some(path) = state_path(args)? else { return Ok(Caution::None) };
    let deaths = Deaths::beside(&path);
    let caution = if takes_over || args.away { Caution::None } else { deaths.caution() };
    log::die_of_panics(move || deaths.note());
    Ok(caution)
}

/// Starts without the index that a former process left, since this program died with it again and again.
fn start_cautiously(path: &Path, config: &EngineConfig, caution: Caution) -> Result<EngineStart> {
    let (former, reason) = match caution {
        Caution::Plain => {
            (StateFile::discard(path)?, "it died six times within a minute: it serves its disks without a cache")
        }
        Caution::None | Caution::Cold => (StateFile::set_aside(path)?, "it died three times within a minute"),
    };
    tracing::error!(
        "{reason}. This is a bug of remoca: please report it, with the lines of this log that say `panicked`, and with {}.bad",
        path.display()
    );
    let start = StateFile::start(path, config, Before::Another)?;
    Ok(EngineStart { former, cold_reason: Some(reason.into()), ..start })
}

/// Starts the engine with what a former process of this name left, if that is usable.
fn start_engine(
    args: &DiskArgs,
    config: &EngineConfig,
    inherited: Option<&mut Inherited>,
    caution: Caution,
) -> Result<EngineStart> {
    let (former, cold_reason) = match state_path(args)? {
        // Whatever a former process left there: the disks have been elsewhere since.
        Some(path) if args.away => (StateFile::discard(&path)?, "it waits for its disks"),
        Some(path) if caution != Caution::None => return start_cautiously(&path, config, caution),
        Some(path) => {
            let before = inherited.map_or(Before::Another, |inherited| Before::ThisProcess(inherited.state()));
            return Ok(StateFile::start(&path, config, before)?);
        }
        None => (Former::default(), "the process has no name, so none after it can find its state (--name, --state)"),
    };
    let words = IndexMemory::new(layout(config).words()).context("there is no memory for the index of this cache")?;
    let (engine, cold_reason) = (DiskEngine::new(config, words), Some(cold_reason.into()));
    Ok(EngineStart { engine, state: None, cold_reason, former, is_handed_over: false })
}

/// Returns where the state file is to be; `None` without a name: such a process has no successor.
fn state_path(args: &DiskArgs) -> Result<Option<PathBuf>> {
    let Some(name) = &args.name else { return Ok(args.state.clone()) };
    let file = format!("{name}.state");
    Ok(Some(match (&args.state, &args.control) {
        (Some(path), _) => path.clone(),
        (None, Some(control)) => control.with_file_name(file),
        (None, None) => own_directory()?.join(file),
    }))
}

/// Returns the limit on buffers. Half of it is divided among the disks, and the part of each must hold its longest request:
/// otherwise a disk that hangs stops the others.
fn buffer_bytes(asked: u64, disks: usize) -> u64 {
    asked.max(disks.max(1) as u64 * 2 * BUFFER_LEN_MAX as u64)
}

/// Returns the pages of a guest's memory, as far as they can be indexed.
fn guest_pages(bytes: u64) -> PageCount {
    PageCount(u32::try_from(bytes / PAGE_SIZE_U64).unwrap_or(u32::MAX).min(GUEST_PAGES_MAX))
}

fn engine_config(args: &DiskArgs, cache: PageCount, disks: usize) -> Result<EngineConfig> {
    let seed = random()?;
    Ok(EngineConfig {
        disks: u16::try_from(disks).ok().filter(|disks| *disks < 4096).context("a VM has fewer than 4096 disks")?,
        key: random()?,
        seed: u64::from_ne_bytes(seed),
        cache,
        guest_memory: guest_pages(args.guest_memory),
        has_port: args.port.is_some() || args.nbd_port,
        frame_sample: if args.no_frames { 0 } else { FRAME_SAMPLE },
        send_window: SEND_WINDOW_PAGES,
        fetch_limit: FETCH_LIMIT,
        slots_per_turn: SLOTS_PER_TURN,
        hedge: !args.no_hedge,
        rules: rules(args)?,
    })
}

#[cfg(feature = "ablation")]
fn arm(args: &DiskArgs) -> Result<()> {
    for (option, end) in [(&args.kill_at, narrow::End::Kill), (&args.panic_at, narrow::End::Panic)] {
        let Some(place) = option else { continue };
        let (place, passage) = place.split_once(':').context("a place has the form PLACE:N")?;
        narrow::end_at(place, passage.parse().context("a place has the form PLACE:N")?, end)
            .map_err(anyhow::Error::msg)?;
    }
    Ok(())
}

#[cfg(feature = "ablation")]
fn rules(args: &DiskArgs) -> Result<Rules> {
    use remoca_core::rules::Rule;
    let Some(name) = &args.omit_rule else { return Ok(Rules::default()) };
    let found = Rule::ALL.iter().find(|(known, _)| known == name);
    let (_, rule) = found.with_context(|| format!("there is no rule `{name}`"))?;
    tracing::error!("THE SAFETY RULE {name} IS LEFT OUT: this disk will be damaged");
    Ok(Rules::without(*rule))
}

#[cfg(not(feature = "ablation"))]
#[expect(clippy::unnecessary_wraps, reason = "the ablation build can fail here")]
fn rules(_args: &DiskArgs) -> Result<Rules> {
    Ok(Rules::default())
}

/// Returns the directory of control sockets and state files, and makes it if it is not there.
fn own_directory() -> Result<PathBuf> {
    let directory = runtime::directory()?;
    std::fs::create_dir_all(&directory).with_context(|| format!("cannot make {}", directory.display()))?;
    Ok(directory)
}

fn control_path(args: &DiskArgs, name: &str) -> Result<PathBuf> {
    match &args.control {
        Some(path) => Ok(path.clone()),
        None => {
            own_directory()?;
            runtime::socket_of(name)
        }
    }
}

fn control_socket(args: &DiskArgs, name: &str) -> Result<ControlServer> {
    ControlServer::start(&control_path(args, name)?).context("control socket")
}

/// Returns random bytes of the system.
fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    let count = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    if count.context("the system gives no random numbers")? != N {
        bail!("the system gives too few random numbers");
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_disk_has_a_buffer_for_its_longest_request() {
        for (asked, disks, bytes) in [(1, 0, 8), (8, 1, 8), (8, 2, 16), (64, 2, 64), (64, 9, 72)] {
            assert_eq!(buffer_bytes(asked << 20, disks), bytes << 20, "{asked} MiB, {disks} disks");
        }
    }
}
