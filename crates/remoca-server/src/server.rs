//! The server as a whole: checks its configuration and addresses, allocates the memory, binds the sockets, starts the threads.
//!
//! One thread accepts; `threads` workers serve. [`Server`] is their handle; dropping it stops the server.

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use remoca_core::units::PAGE_SIZE_U64;
use remoca_io::descriptor_store::DescriptorStore;
use remoca_protocol::{PageCount, ServerId};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::JoinSet;

use crate::adopt;
use crate::arena::chunk_count;
use crate::command::command_path;
use crate::config::{Config, ListenAddress};
use crate::control::{Reporter, answer_commands, answer_control};
use crate::error::StartError;
use crate::handshake::{self, Workers};
use crate::helpers::Helpers;
use crate::host;
use crate::keeper::Keeper;
use crate::listener::{BoundListener, Listener};
use crate::mapped::{self, MappedMessage};
use crate::mapped_pool::MappedPool;
use crate::places::Places;
use crate::status::Status;
use crate::worker::{self, ARRIVALS_MAX, Message, Shared, fill_random};

const THREADS_MAX: usize = 1024;
/// Maximum number of clients that may be configured.
const CLIENTS_MAX: usize = 1 << 16;

/// Time that helper threads have to end. One that waits for a client may never do.
const HELPERS_END_WITHIN: Duration = Duration::from_secs(2);

/// Queues of the worker threads.
type Senders = Vec<mpsc::Sender<Message>>;

/// A running memory server.
#[derive(Debug)]
pub struct Server {
    addresses: Vec<ListenAddress>,
    reporter: Arc<Reporter>,
    /// For requests from outside the server's threads.
    handle: Handle,
    /// Dropping it tells all threads to stop.
    stop: Option<watch::Sender<()>>,
    threads: Vec<JoinHandle<()>>,
}

impl Server {
    /// Checks a configuration as far as that is possible without taking memory and addresses.
    ///
    /// # Errors
    /// If no server can have it.
    pub fn check(config: &Config) -> Result<(), StartError> {
        check(config).map(|_quota| ())
    }

    /// Starts a server. When this returns, clients can connect.
    ///
    /// # Errors
    /// [`StartError`]. Then nothing is left behind.
    pub fn start(config: Config) -> Result<Self, StartError> {
        Self::start_telling(config, None, &mut |_| ())
    }

    /// Starts a server as [`Self::start`] does. Mapped pools outlive it in `store`, and those that a former server left there
    /// are taken up. Calls `progress` with the bytes locked so far, first with 0, unless the memory is not to be locked.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_telling(
        config: Config,
        store: Option<DescriptorStore>,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Self, StartError> {
        let quota = check(&config)?;
        // Before memory is locked, which takes long. They are bound afterwards: until then clients are refused, and do not wait.
        let control_address = config.control.clone().map(ListenAddress::Unix);
        BoundListener::try_out(&config.listen)?;
        BoundListener::try_out(control_address.as_slice())?;
        let mut server_id = ServerId([0; 16]);
        fill_random(&mut server_id.0).map_err(StartError::Random)?;
        host::raise_descriptor_limit(&config.limits);
        let keeper = Keeper::new(store);
        let helpers = Arc::new(Helpers::new());
        let (arena, left) = adopt::arena_and_pools(&config, quota, &keeper, &helpers, progress)?;
        let bind = |address| BoundListener::bind(address, &config.listen);
        let listeners = config.listen.iter().map(bind).collect::<Result<Vec<_>, _>>()?;
        let addresses =
            listeners.iter().map(BoundListener::address).collect::<io::Result<Vec<_>>>().map_err(StartError::Thread)?;
        let control = control_address.as_ref().map(bind).transpose()?;
        let commands = config.control.as_deref().and_then(bind_commands);

        let clients = Arc::new(Semaphore::new(config.limits.sessions));
        let shared =
            Arc::new(Shared { config, arena, helpers, quota, server_id, clients, full_told_at: Mutex::default() });
        let (stop, stopped) = watch::channel(());
        let (senders, mut threads) = start_workers(&shared, &stopped)?;
        let (mapped, thread) = start_mapped(&shared, keeper, left, &stopped)?;
        threads.push(thread);
        let workers = Workers::new(senders, mapped);
        let reporter = Arc::new(Reporter { workers: Arc::new(workers), shared, started: Instant::now() });
        let runtime = event_loop()?;
        let handle = runtime.handle().clone();
        let (listeners, [control, commands]) =
            attach(&runtime, listeners, [control, commands]).map_err(StartError::Thread)?;
        let doors = Doors { listeners, control, commands, reporter: Arc::clone(&reporter), stopped };
        threads.push(spawn("remoca-accept", move || runtime.block_on(doors.keep_open()))?);
        let arena = Arc::clone(&reporter.shared.arena);
        if arena.gives_back() {
            threads.push(spawn("remoca-free", move || arena.give_back())?);
        }
        Ok(Self { addresses, reporter, handle, stop: Some(stop), threads })
    }

    /// Returns the addresses that the server listens on, with the assigned ports in place of port 0.
    #[must_use]
    pub fn local_addresses(&self) -> &[ListenAddress] {
        &self.addresses
    }

    /// Returns the server's status: its pools, its memory and its counters.
    ///
    /// # Panics
    /// When called from within a tokio runtime.
    #[must_use]
    pub fn status(&self) -> Status {
        self.handle.block_on(self.reporter.status())
    }

    /// Closes all connections, frees all memory, and removes its sockets. Returns when that is done, but does not wait for clients
    /// that hold the memory of their pools.
    pub fn shutdown(self) {
        drop(self);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stop.take());
        self.reporter.shared.arena.stop_giving_back();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread of the server had panicked");
            }
        }
        let arena = &self.reporter.shared.arena;
        if Arc::strong_count(arena) > 1 {
            tracing::warn!(
                "a client holds its pool's memory by a write that does not end: this process cannot end before that client's \
                 process is ended. All other memory is given back"
            );
            arena.abandon();
        }
    }
}

/// Checks the options that can be checked without looking at the host, and returns the quota in pages.
fn check(config: &Config) -> Result<PageCount, StartError> {
    let memory_bytes = config.memory_bytes;
    if config.listen.is_empty() {
        return Err(StartError::NoAddress);
    }
    // Without this, "another program" would have the address.
    let is_port_chosen = |address: &ListenAddress| !matches!(address, ListenAddress::Tcp { port: 0, .. });
    for (at, address) in config.listen.iter().enumerate() {
        if is_port_chosen(address) && config.listen[..at].contains(address) {
            return Err(StartError::ListenTwice { address: address.clone() });
        }
    }
    if let Some(path) = config.control.clone().filter(|path| config.listen.contains(&ListenAddress::Unix(path.clone())))
    {
        return Err(StartError::ControlIsAddress { path });
    }
    if !(1..=THREADS_MAX).contains(&config.threads) {
        return Err(StartError::Threads { threads: config.threads, most: THREADS_MAX });
    }
    if !(1..=CLIENTS_MAX).contains(&config.limits.sessions) {
        return Err(StartError::Clients { clients: config.limits.sessions, most: CLIENTS_MAX });
    }
    chunk_count(memory_bytes)?;
    let quota_bytes = config.quota_bytes.unwrap_or(memory_bytes);
    if quota_bytes == 0 && memory_bytes > 0 {
        return Err(StartError::NoQuota);
    }
    if config.quota_bytes.is_some() && !quota_bytes.is_multiple_of(PAGE_SIZE_U64) {
        return Err(StartError::QuotaNotMultiple { quota_bytes });
    }
    if quota_bytes > memory_bytes {
        return Err(StartError::QuotaAboveMemory { quota_bytes, memory_bytes });
    }
    // The arena refuses memory of more pages than a `u32` can count.
    Ok(PageCount(u32::try_from(quota_bytes / PAGE_SIZE_U64).unwrap_or(u32::MAX)))
}

fn event_loop() -> Result<Runtime, StartError> {
    Builder::new_current_thread().enable_io().enable_time().build().map_err(StartError::Thread)
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, StartError> {
    std::thread::Builder::new().name(name.to_owned()).spawn(body).map_err(StartError::Thread)
}

fn start_workers(
    shared: &Arc<Shared>,
    stopped: &watch::Receiver<()>,
) -> Result<(Senders, Vec<JoinHandle<()>>), StartError> {
    let mut senders = Vec::new();
    let mut threads = Vec::new();
    for number in 0..shared.config.threads {
        let (sender, messages) = mpsc::channel(ARRIVALS_MAX);
        let (runtime, shared, stopped) = (event_loop()?, Arc::clone(shared), stopped.clone());
        threads.push(spawn(&format!("remoca-pools-{number}"), move || {
            worker::run(&runtime, shared, messages, stopped);
        })?);
        senders.push(sender);
    }
    Ok((senders, threads))
}

fn start_mapped(
    shared: &Arc<Shared>,
    keeper: Keeper,
    left: Vec<MappedPool>,
    stopped: &watch::Receiver<()>,
) -> Result<(mpsc::Sender<MappedMessage>, JoinHandle<()>), StartError> {
    let (sender, messages) = mpsc::channel(ARRIVALS_MAX);
    // One for each pool that can be there, and one for each that is ending; as many again wait for the service manager.
    let threads = 4 * (shared.config.limits.sessions + left.len());
    let runtime = Builder::new_current_thread().enable_io().enable_time().max_blocking_threads(threads).build();
    let (runtime, shared, stopped) = (runtime.map_err(StartError::Thread)?, Arc::clone(shared), stopped.clone());
    let thread = spawn("remoca-mapped", move || {
        mapped::run(&runtime, shared, keeper, left, messages, stopped);
        runtime.shutdown_timeout(HELPERS_END_WITHIN);
    })?;
    Ok((sender, thread))
}

/// Binds the socket for commands. Without it the server serves all the same.
fn bind_commands(control: &Path) -> Option<BoundListener> {
    let bound = BoundListener::bind_private(&command_path(control));
    bound.inspect_err(|error| tracing::warn!(%error, "this server takes no commands")).ok()
}

/// Attaches the listeners to the event loop of the thread that accepts.
fn attach(
    runtime: &Runtime,
    listeners: Vec<BoundListener>,
    own: [Option<BoundListener>; 2],
) -> io::Result<(Vec<Listener>, [Option<Listener>; 2])> {
    let _context = runtime.enter();
    let listeners = listeners.into_iter().map(BoundListener::attach).collect::<io::Result<_>>()?;
    let [control, commands] = own.map(|listener| listener.map(BoundListener::attach).transpose());
    Ok((listeners, [control?, commands?]))
}

/// Everything that the accepting thread owns.
struct Doors {
    listeners: Vec<Listener>,
    control: Option<Listener>,
    commands: Option<Listener>,
    reporter: Arc<Reporter>,
    stopped: watch::Receiver<()>,
}

impl Doors {
    async fn keep_open(mut self) {
        let Reporter { workers, shared, .. } = &*self.reporter;
        let limits = &shared.config.limits;
        let places = Arc::new(Places::new(limits.handshakes, limits.handshakes_of_peer));
        let mut open = JoinSet::new();
        for listener in self.listeners {
            let (places, workers, shared) = (Arc::clone(&places), Arc::clone(workers), Arc::clone(shared));
            open.spawn(handshake::accept(listener, places, workers, shared));
        }
        if let Some(control) = self.control {
            open.spawn(answer_control(control, Arc::clone(&self.reporter)));
        }
        if let Some(commands) = self.commands {
            open.spawn(answer_commands(commands, Arc::clone(&self.reporter)));
        }
        // An error means that the sender is gone: it is time to stop.
        let _stopped = self.stopped.changed().await;
    }
}
