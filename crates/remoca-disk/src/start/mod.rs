//! The start of a VM process: the operator's options become ready parts, which run until they are told to stop.
//!
//! [`run`] is the entry point. `options` defines what can be asked for, `check` refuses what cannot be, `whereabouts` and
//! `state::Caution` decide,
//! `open` and `exports` open images and sockets, `inherited` takes over from a previous program of this process.

mod check;
mod exports;
mod inherited;
mod key;
mod open;
mod options;
mod settings;
mod whereabouts;
mod wrong;

pub use check::{addresses, check_options, check_restart, check_state, check_upgrade, foresee_upgrade};
pub use exports::Address;
pub use key::{ADVICE, KeySource};
pub use open::{guests_sockets, offers, refuse_other_formats};
pub use options::{DiskOptions, Incoming, Options, PortOptions, QUEUES_DEFAULT};
pub use wrong::WrongOptions;

use crate::clock::SystemClock;
use crate::driver::{Disk, Driver, Ended, Migration, Parts, Port, Start, TierSizes, on_a_thread};
use crate::endpoints::Endpoints;
use crate::handover::Checking;
use crate::link::{HostNetwork, ServerLink, give_back};
use crate::migration::{HostPeers, Mark};
use crate::state::{self, Before, Caution, Deaths, EngineStart, Former, Header, RosterEntry, StateFile};
use crate::trace::TraceWriter;
use anyhow::{Context, Result, bail};
use exports::Exports;
use inherited::Inherited;
use open::{PassedSocket, is_in_use, open_disks, open_port};
use options::is_nbd_uri;
use remoca_core::engine::{DiskEngine, EngineConfig, disk_numbers, layout};
use remoca_core::units::{PAGE_SIZE_U64, POOLS_MAX, PageCount};
use remoca_frontend::answer_messages;
use remoca_frontend::vhost::KeptConnections;
use remoca_io::address::Endpoint;
use remoca_io::buffer::{BUFFER_LEN_MAX, BufferPool};
use remoca_io::control::{self, ControlServer, left};
use remoca_io::descriptor_store::DescriptorStore;
use remoca_io::handover::VARIABLE;
use remoca_io::narrow;
use remoca_io::service::ServiceManager;
use remoca_io::show::show_size;
use remoca_io::signals::Signals;
use remoca_io::sizes;
use remoca_io::words::IndexMemory;
use remoca_protocol::control::{Reply, Secret, Status};
use rustix::pipe::PipeFlags;
use settings::{CacheSettings, cache_settings, checked_cache, hash_of};
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;
use whereabouts::{Signs, Whereabouts};

/// Pages that may wait for the connection to the server: 8 MiB.
const SEND_WINDOW_PAGES: u32 = 2048;
/// One frame of this many is examined. Each costs copying and hashing 4 KiB, beside a block that is read, so one of so
/// many costs next to nothing.
const FRAME_SAMPLE: u32 = 64;
/// Maximum number of requests to the server without a reply.
const FETCH_LIMIT: u32 = 8192;
/// Maximum number of slots processed in one turn, which takes less than a millisecond.
const SLOTS_PER_TURN: u32 = 1024;
/// A guest with more memory than this (1 TiB) is indexed as if it had this much, whatever the operator says.
const GUEST_PAGES_MAX: u32 = 1 << 28;

/// Serves the disks of a VM until the process is told to end. Calls `ready` with its state once everything is open, before
/// anything is served.
///
/// # Errors
/// If something that was given cannot be used; the text says what to do.
pub fn run(options: &Options, ready: impl FnOnce(&Status)) -> Result<()> {
    let is_upgrade = std::env::var_os(VARIABLE).is_some();
    let mut inherited = inherited::receive(options);
    // Before any thread starts and any socket exists: a signal that comes early must not be lost.
    let signals = Signals::take().context("cannot take signals")?;
    let client = inherited.as_mut().and_then(Inherited::client);
    let mut manager = ServiceManager::of_environment();
    manager.begin_start(Instant::now());
    let mut kept = kept_connections(is_upgrade);
    let parts = parts(options, signals, inherited, manager, &mut kept);
    let driver = parts.and_then(|parts| Driver::new(parts).context("cannot watch the descriptors"));
    let mut driver = driver.inspect_err(|_| kept.note_failed_start())?;
    kept.note_started();
    kept.close_rest();
    if driver.has_taken_over() {
        narrow::passes("handover-opened");
    }
    let status = driver.snapshot();
    ready(&status);
    left::remove(&options.control);
    driver.manager().say_ready(Instant::now());
    log_start(&status, options);
    if let Some(client) = client {
        control::answer_for_former(client, Reply::Status(Box::new(status)));
    }
    loop {
        match driver.run().context("waiting for events failed")? {
            Ended::Finished => {
                mark_left_guest(options, &driver);
                break;
            }
            Ended::Unsettled => {
                mark_left_guest(options, &driver);
                std::mem::forget(driver);
                break;
            }
            Ended::HandOver(handover) => {
                driver.manager().say_giving_way(Instant::now());
                // The new program has a store of its own. It gets the descriptors from this one.
                kept.store().remove_all();
                let error = handover.exec();
                driver.refuse_upgrade(&format!("the new program cannot be started: {error}"));
                driver.manager().say_ready(Instant::now());
            }
        }
    }
    if let Some(state) = &options.state {
        Deaths::beside(state).forget();
    }
    Ok(())
}

/// Leaves a mark if the process ends under its guest. Called while the control socket is there: at no moment is the VM gone from the
/// screens.
fn mark_left_guest(options: &Options, driver: &Driver) {
    // Only a later process with the same control socket removes it.
    if options.is_named
        && driver.has_guest()
        && let Err(error) = left::leave(&options.control)
    {
        let path = left::beside(&options.control);
        tracing::warn!(
            "cannot write {}: {error}. `remoca check` and `remoca top` will not name this VM",
            path.display()
        );
    }
}

/// Notes that this process cannot start, before [`run`] was called. At the second one, hypervisors that wait for it are
/// disconnected.
pub fn note_failure() {
    kept_connections(std::env::var_os(VARIABLE).is_some()).note_failed_start();
}

/// Returns the connections of guests that a former process left with the service manager. A former program of this process
/// passes its own.
fn kept_connections(is_upgrade: bool) -> KeptConnections {
    KeptConnections::of(if is_upgrade { DescriptorStore::empty() } else { DescriptorStore::receive() })
}

/// Logs what this process serves, and where.
fn log_start(status: &Status, options: &Options) {
    let control = options.control.display();
    tracing::info!("remoca {} serves the disks of {}; its control socket is {control}", status.version, status.name);
    for disk in &status.disks {
        let access = if disk.read_only { ", read-only" } else { "" };
        tracing::info!("{}: {} ({}{access}) at {}", disk.name, disk.image, show_size(disk.bytes), disk.socket);
    }
    if let Some(port) = &status.port {
        tracing::info!("port: at {}", port.socket);
    }
}

/// Opens everything, in the order in which one thing depends on another: sockets, images, the state file, servers.
fn parts(
    options: &Options,
    signals: Signals,
    mut inherited: Option<Inherited>,
    manager: ServiceManager,
    kept: &mut KeptConnections,
) -> Result<Parts> {
    check_options(options)?;
    if inherited.is_none() {
        check_state(options)?;
    }
    let sizes_as_said = checked_cache(options).map_err(anyhow::Error::msg)?;
    let mut found = whereabouts(options, inherited.is_some())?;
    let caution = caution(options, inherited.is_some() || found.are_away);
    let (mut disks, mut exports) = disks(options, &mut found, inherited.as_mut(), kept)?;
    let (mark, lock_reaches) = mark(options, disks.iter().map(|disk| &*disk.image));
    let caution = if found.are_away { Caution::None } else { caution };
    let cache = match caution {
        Caution::Plain => CacheSettings::default(),
        Caution::None | Caution::Cold => cache_settings(options, sizes_as_said, found.are_away, inherited.as_ref()),
    };
    let mut port = open_port(options, u64::from_ne_bytes(random()?), &mut exports, inherited.as_mut(), kept)?;
    let config = engine_config(options, cache.wanted(), disks.len())?;
    let start = || start_engine(options, &config, inherited.as_mut(), found.are_away, caution);
    let mut started = beside(&mut disks, port.as_mut(), start).context("cannot start a thread")??;
    number(&mut disks, &mut started, inherited.is_some());
    let EngineStart { mut engine, state, cold_reason, former, is_handed_over } = started;
    engine.keep_curves(options.keeps_curves);
    disks.iter_mut().for_each(|disk| disk.kept_open &= is_handed_over);
    let listeners = inherited.as_mut().map(Inherited::nbd).unwrap_or_default();
    let nbd = exports.serve(&options.nbd, options.socket_group, listeners)?;
    // What a previous process left, if anything.
    let header = state.as_ref().map(StateFile::header);
    let (key, seed) = header.as_ref().map_or((config.key, config.seed), |header| (header.key(), header.seed()));
    let config = EngineConfig { key, seed, disks: engine.index().layout().disks(), ..config };
    let migration = migration(options, &found, mark, lock_reaches, config, inherited.is_some())?;
    let control = control_socket(options, inherited.as_mut())?;
    let trace = trace(options, inherited.as_ref())?;
    give_back(unused_pools(&former, cold_reason.is_none() && !cache.endpoints.are_none()));
    let link = link(&cache.endpoints, header, inherited.as_mut()).context("cannot start the server link")?;
    let buffers = sizes::in_memory(buffer_bytes(options.buffers, disks.len()));
    Ok(Parts {
        name: options.name.clone(),
        clock: Box::new(SystemClock),
        engine,
        state,
        cold_reason,
        former,
        sizes: cache.sizes,
        cache_enabled: cache.enabled,
        options: hash_of(options),
        disks,
        port,
        nbd,
        link,
        local_server: options.local_server.clone(),
        migration,
        control: Some(control),
        guest_memory_max: guest_pages(options.guest_memory_max.max(options.guest_memory)),
        poll_time_max: options.poll_time_max,
        buffers: BufferPool::new(buffers),
        trace,
        stop: signals.stop,
        hangup: signals.hangup,
        start: start_of(options, inherited.as_ref())?,
        ask: Box::new(Checking::start),
        aside: Box::new(on_a_thread),
        manager,
    })
}

/// Returns the control socket of the previous program of this process, or else a new one.
fn control_socket(options: &Options, inherited: Option<&mut Inherited>) -> Result<ControlServer> {
    match inherited.and_then(Inherited::control) {
        Some(control) => Ok(control),
        None => ControlServer::start(&options.control).context("control socket"),
    }
}

/// Executes `work` on another thread, because it may take long, and answers the messages of front ends meanwhile.
///
/// # Errors
/// If the system has no thread or descriptor left.
fn beside<T: Send>(disks: &mut [Disk], port: Option<&mut Port>, work: impl FnOnce() -> T + Send) -> io::Result<T> {
    let devices = disks.iter_mut().map(|disk| &mut disk.frontend).chain(port.map(|port| &mut port.frontend));
    let (done, raised) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    std::thread::scope(|scope| {
        let worker = move || {
            // Closed at the end of the work, even if it panics.
            let _raised = raised;
            work()
        };
        let worker = std::thread::Builder::new().name("index".into()).spawn_scoped(scope, worker)?;
        answer_messages(devices.collect(), done.as_fd());
        Ok(worker.join().expect("the thread of the index has ended by itself"))
    })
}

/// Opens the disks. Returns them, and the exports of those that NBD clients are to have.
fn disks(
    options: &Options,
    found: &mut Whereabouts,
    inherited: Option<&mut Inherited>,
    kept: &mut KeptConnections,
) -> Result<(Vec<Disk>, Exports)> {
    let mut exports = Exports::default();
    let passed = options.fd.filter(|_| inherited.is_none()).map(PassedSocket::take).transpose()?;
    if found.are_away {
        // What the guest had in flight is the business of the process that has them.
        kept.close_all();
    }
    match open_disks(options, found.are_away, passed.as_ref(), &mut exports, inherited, kept) {
        // The disks are wherever the VM has gone since.
        Err(error) if is_in_use(&error) && found.found_in_use() => {
            exports = Exports::default();
            kept.close_all();
            Ok((open_disks(options, true, passed.as_ref(), &mut exports, None, kept)?, exports))
        }
        disks => Ok((disks?, exports)),
    }
}

/// Starts the link to the memory servers, with the mapped pools of a former program. Returns `None` if there are no servers.
fn link(
    servers: &Endpoints,
    header: Option<Arc<Header>>,
    inherited: Option<&mut Inherited>,
) -> io::Result<Option<ServerLink>> {
    if servers.are_none() {
        return Ok(None);
    }
    let mut link = ServerLink::start(Arc::new(HostNetwork), servers, header)?;
    link.keep_pools(inherited.map(Inherited::pools).unwrap_or_default());
    Ok(Some(link))
}

/// Opens the file in which requests are recorded. Returns `None` if there is to be none, or if there cannot be one and a guest may
/// wait for its disks.
fn trace(options: &Options, inherited: Option<&Inherited>) -> Result<Option<TraceWriter>> {
    let open = |path: &Path| match inherited {
        Some(inherited) => TraceWriter::append(path, inherited.trace_untold()),
        None => TraceWriter::create(path),
    };
    match options.trace.as_deref().map(open).transpose() {
        Err(error) if options.has_predecessor => {
            let path = options.trace.as_deref().unwrap_or(Path::new("")).display();
            tracing::warn!("no request is recorded: cannot open the trace file {path}: {error}");
            Ok(None)
        }
        trace => trace.context("cannot make the trace file"),
    }
}

/// Gives each disk the number by which the engine knows it.
fn number(disks: &mut [Disk], started: &mut EngineStart, is_upgrade: bool) {
    let identities: Vec<_> = disks.iter().map(Disk::identity).collect();
    for disk in started.replaced(&identities).into_iter().map(|at| &disks[at]) {
        tracing::warn!(
            "{}: {} is another image than the one that this disk had. If that is not intended, stop the VM before it writes",
            disk.name,
            disk.image
        );
    }
    let numbers = started.number_disks(&identities);
    let header = started.state.as_ref().map(StateFile::header);
    for (disk, number) in disks.iter_mut().zip(numbers) {
        disk.number = number;
        // An upgrade hands it over, with or without a state file.
        disk.had_bytes = disk.had_bytes.or_else(|| header.as_ref()?.largest_bytes(number, disk.identity().image));
    }
    if is_upgrade {
        narrow::passes("disk-numbered");
    }
}

/// Returns how another program is started in place of this one.
fn start_of(options: &Options, inherited: Option<&Inherited>) -> Result<Start> {
    let (program, arguments) = (inherited::own_program()?, std::env::args_os().collect());
    let (upgrades, notice) = (inherited.map_or(0, Inherited::upgrades), options.notice.clone());
    let openers = inherited.map(Inherited::openers).unwrap_or_default();
    Ok(Start { program, arguments, upgrades, notice, openers })
}

/// Returns the mark that says where the disks on these `images` are, and whether the locks of all images reach the processes of
/// other hosts.
fn mark<'a>(options: &Options, images: impl Iterator<Item = &'a str>) -> (Option<Mark>, bool) {
    let lock_reaches = are_files(images);
    // Only a later process with the same control socket finds the mark.
    (options.is_named.then(|| Mark::beside(&options.control, lock_reaches)), lock_reaches)
}

/// Returns whether all `images` are files, whose locks reach the processes of other hosts.
fn are_files<'a>(mut images: impl Iterator<Item = &'a str>) -> bool {
    images.all(|image| std::fs::metadata(image).is_ok_and(|image| image.is_file()))
}

/// Returns where the disks are, as far as it can be known before their images are opened.
fn whereabouts(options: &Options, is_upgrade: bool) -> Result<Whereabouts> {
    // In an upgrade they are here, and the image of a disk that comes may hang.
    let looks = !is_upgrade && options.is_named;
    let images = options.disks.iter().map(|disk| &*disk.image);
    // An image that is missing may have been a file, or a device.
    let is_file = |image: &str| std::fs::metadata(image).map_or(!is_nbd_uri(image), |image| image.is_file());
    let came = looks && images.clone().all(is_file) && Mark::beside(&options.control, true).says_here();
    let went = looks && !are_files(images) && Mark::beside(&options.control, false).says_gone();
    let found = Whereabouts::new(options.incoming.clone(), Signs { is_upgrade, came, went });
    // A key that cannot be read is reported before anything is opened.
    found.incoming.as_ref().map(address_and_key).transpose().context(WrongOptions)?;
    Ok(found)
}

/// Returns the state of migration at the start. `is_upgrade`: a previous program of this process had its disks.
fn migration(
    options: &Options,
    found: &Whereabouts,
    mark: Option<Mark>,
    lock_reaches: bool,
    config: EngineConfig,
    is_upgrade: bool,
) -> Result<Migration> {
    let (host, kept_at) = (Box::new(HostPeers), options.state.clone());
    let incoming = found.incoming.as_ref().map(address_and_key).transpose()?;
    let migration = Migration::new(host, incoming, mark, kept_at, config, lock_reaches, found.are_away);
    let mut migration = migration.context("--incoming")?;
    if is_upgrade && options.incoming.is_some() {
        migration.owe_mark();
    }
    Ok(migration)
}

/// Returns the address at which the process waits for disks, and the key of the process that brings them.
fn address_and_key(incoming: &Incoming) -> Result<(Endpoint, Secret)> {
    let Some(key) = &incoming.key else {
        bail!("--incoming without --incoming-key FILE would give the disks to whoever connects first. {ADVICE}")
    };
    Ok((incoming.endpoint.clone(), key.read().context("--incoming-key")?))
}

/// Returns the pools of a previous process that this one has no use for: all of them, unless it `goes_on` with the index, of
/// which the link gives back what it does not need.
fn unused_pools(former: &Former, goes_on: bool) -> Vec<RosterEntry> {
    if goes_on { Vec::new() } else { former.servers.clone() }
}

/// Returns how to start after processes of this name that died by a fault of this program. Also makes this process
/// record such a death of its own.
fn caution(options: &Options, goes_on: bool) -> Caution {
    let Some(path) = &options.state else { return Caution::None };
    let deaths = Deaths::beside(path);
    let caution = if goes_on { Caution::None } else { deaths.caution() };
    die_of_panics(move || deaths.note());
    caution
}

/// Makes the process abort as soon as this thread panics, after its message and `note`. Nothing that it holds is
/// cleaned up, so its successor finds what a kill would leave.
fn die_of_panics(note: impl Fn() + Send + Sync + 'static) {
    let (tell, this) = (std::panic::take_hook(), std::thread::current().id());
    std::panic::set_hook(Box::new(move |panic| {
        tell(panic);
        if std::thread::current().id() == this {
            note();
            std::process::abort();
        }
    }));
}

/// Starts without the index that a previous process left, because this program died with it again and again.
fn start_cautiously(path: &Path, config: &EngineConfig, caution: Caution) -> Result<EngineStart> {
    let reason = match caution {
        Caution::Plain => "it died six times within a minute: it serves its disks without a cache",
        Caution::None | Caution::Cold => "it died three times within a minute",
    };
    let former = state::set_aside(path)?;
    tracing::error!(
        "{reason}. This is a bug of remoca: please report it, with the lines of this log that say `panicked`; what it died with is \
         in {}.bad, if there was room for it",
        path.display()
    );
    let start = StateFile::start(path, config, Before::Another)?;
    // A cold start with a cache records the settings itself, with new pools.
    if let Some(state) = start.state.as_ref().filter(|_| caution == Caution::Plain) {
        former.keep_settings(&state.header());
    }
    Ok(EngineStart { former, cold_reason: Some(reason.into()), ..start })
}

/// Starts the engine with what a previous process of this name left, if that is usable.
fn start_engine(
    options: &Options,
    config: &EngineConfig,
    inherited: Option<&mut Inherited>,
    are_away: bool,
    caution: Caution,
) -> Result<EngineStart> {
    let (former, cold_reason) = match &options.state {
        // What a previous process left there is out of date: the disks have been elsewhere since.
        Some(path) if are_away => (state::discard(path)?, "it waits for its disks"),
        Some(path) if caution != Caution::None => return start_cautiously(path, config, caution),
        Some(path) => {
            let before = inherited.map_or(Before::Another, |inherited| Before::ThisProcess(inherited.state()));
            return Ok(StateFile::start(path, config, before)?);
        }
        None => (Former::default(), "the process has no name, so none after it can find its state (--name, --state)"),
    };
    let words = IndexMemory::new(layout(config).words()).map_err(state::StateError::NoMemory)?;
    let (engine, cold_reason) = (DiskEngine::new(config, words), Some(cold_reason.into()));
    Ok(EngineStart { engine, state: None, cold_reason, former, is_handed_over: false })
}

/// Returns the limit on buffers, in bytes. Half of it is divided among the disks, and the part of each must hold its
/// longest request; otherwise a disk that hangs would stop the others.
fn buffer_bytes(asked: u64, disks: usize) -> u64 {
    asked.max(disks.max(1) as u64 * 2 * BUFFER_LEN_MAX as u64)
}

/// Returns the number of pages of a guest's memory, as far as they can be indexed.
fn guest_pages(bytes: u64) -> PageCount {
    let pages = (bytes / PAGE_SIZE_U64).min(GUEST_PAGES_MAX.into());
    PageCount(sizes::short(pages))
}

fn engine_config(options: &Options, sizes: TierSizes, disks: usize) -> Result<EngineConfig> {
    let seed = random()?;
    Ok(EngineConfig {
        disks: u16::try_from(disks)
            .ok()
            .filter(|disks| *disks < 4096)
            .map(disk_numbers)
            .context("a VM has fewer than 4096 disks")?,
        key: random()?,
        seed: u64::from_ne_bytes(seed),
        cache: sizes.cache,
        local: sizes.local,
        guest_memory: guest_pages(options.guest_memory),
        has_port: options.port != PortOptions::None,
        frame_sample: if options.looks_at_frames { FRAME_SAMPLE } else { 0 },
        send_window: SEND_WINDOW_PAGES,
        fetch_limit: FETCH_LIMIT,
        slots_per_turn: SLOTS_PER_TURN,
        pools: POOLS_MAX,
        hedge: options.hedges,
        rules: options.rules,
    })
}

/// Returns random bytes from the system.
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

    /// A guest may be connected to it. If the process waited for disks that are here, the connection would be closed.
    #[test]
    fn a_mark_is_found_also_while_an_image_is_missing() {
        let folder = tempfile::tempdir().unwrap();
        let (control, image) = (folder.path().join("vm.ctl"), folder.path().join("image"));
        let missing = image.display().to_string();
        let [here, gone] = [true, false].map(|lock_reaches| Mark::beside(&control, lock_reaches));
        let found = |image: &str, waits: bool| {
            let incoming = Incoming { endpoint: "unix:/incoming".parse().unwrap(), key: None };
            let disks = vec![DiskOptions::new(image.into())];
            let (control, incoming) = (control.clone(), waits.then_some(incoming));
            whereabouts(&Options { control, disks, incoming, ..settings::tests::options(&[], 0) }, false)
        };
        here.disks_came();
        let came = found(&missing, true).unwrap();
        assert!(!came.are_away && came.if_in_use.is_some());
        assert!(found("nbd://server", true).is_err(), "no lock tells, so it waits, for which it needs a key");
        here.disks_go().unwrap();
        assert!(found(&missing, true).is_err(), "it waits");
        gone.disks_go().unwrap();
        assert!(found(&missing, false).unwrap().are_away && found("nbd://server", false).unwrap().are_away);
        std::fs::write(&image, "").unwrap();
        assert!(!found(&missing, false).unwrap().are_away, "its lock tells");
    }

    #[test]
    fn every_disk_has_a_buffer_for_its_longest_request() {
        for (asked, disks, bytes) in [(1, 0, 8), (8, 1, 8), (8, 2, 16), (64, 2, 64), (64, 9, 72)] {
            assert_eq!(buffer_bytes(asked << 20, disks), bytes << 20, "{asked} MiB, {disks} disks");
        }
    }
}
