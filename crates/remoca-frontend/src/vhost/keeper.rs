//! Keeps a connection beyond the death of this process: its descriptors are in the store of the service manager, and what
//! was agreed on is in a [`Ledger`] beside them.
//!
//! A [`Keeper`] belongs to the control thread of one device. [`KeptConnections`] has what a former process left, until
//! each device takes its own; a thread closes those whose front ends wait for too long, because a hypervisor does nothing
//! else while it waits. See `docs/decisions/0030-kept-connections.md`.
//!
//! 1. A connection whose ledger does not say that it is between two messages is closed.
//! 2. So is one of which anything is missing, or unknown to this program.

use super::command::failure;
use super::handler::Handler;
use super::ledger::Ledger;
use remoca_io::descriptor_store::{DescriptorStore, Kind, disconnect, is_hung_up};
use remoca_io::narrow;
use remoca_protocol::guests::{FrontEnd, Guests};
use remoca_protocol::ledger::{Entry, VERSION};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use vhost::vhost_user::Error as VhostError;

/// Time from the start of the first process that does not serve a front end until its connection is closed, if it is not
/// answered then.
const PATIENCE: Duration = Duration::from_secs(5);
/// Failed starts after which connections are closed.
const FAILURES_MAX: u64 = 2;
/// Delay before the next attempt to keep a connection that cannot be kept.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// What the store has of one connection.
struct Holding {
    ledger: Ledger,
    /// Descriptors that the connection uses, the ledger among them.
    numbers: Vec<u32>,
    /// Entry in the ledger.
    text: Vec<u8>,
    /// How often the store had been emptied.
    emptied: u32,
    /// Socket of a front end that a former process left, and this one does not answer yet.
    waits: Option<OwnedFd>,
}

/// One connection, for its device and for the thread that closes it after a while.
struct Connection {
    store: Arc<DescriptorStore>,
    /// Whether this process has started, so that whoever is answered is served.
    has_started: Arc<AtomicBool>,
    /// `None` if the connection is not in the store.
    holding: Mutex<Option<Holding>>,
}

impl Connection {
    fn holding(&self) -> MutexGuard<'_, Option<Holding>> {
        self.holding.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the connection out of the store. Ends it if its front end is not answered.
    fn close(&self) {
        let Some(holding) = self.holding().take() else { return };
        // Whatever becomes of the message to the manager, nobody continues this connection.
        let _ = holding.ledger.begin();
        if let Some(socket) = &holding.waits {
            disconnect(socket);
        }
        if holding.emptied == self.store.emptied() {
            holding.numbers.iter().for_each(|number| self.store.release(*number));
        }
    }

    fn waits(&self) -> bool {
        self.holding().as_ref().is_some_and(|holding| holding.waits.is_some())
    }

    /// Records that the front end is served, if it is answered by a process that has started.
    fn note_served(&self) {
        let holding = self.holding();
        if let Some(holding) = holding.as_ref().filter(|holding| holding.waits.is_none())
            && self.has_started.load(Ordering::SeqCst)
        {
            // Fails only if nothing of the ledger can be trusted, and then the successor reads none.
            let _ = holding.ledger.note_served();
        }
    }
}

/// Keeps the connection of a device.
pub struct Keeper {
    device: String,
    connection: Arc<Connection>,
    /// The connection that a former process left.
    found: Option<Entry>,
    /// Whether the last attempt to keep the connection failed.
    failed: bool,
}

impl Keeper {
    /// Returns the connection that a former process left, if it has not been taken yet.
    #[must_use]
    pub fn found(&self) -> Option<&FrontEnd<u32>> {
        self.found.as_ref().map(|entry| &entry.front_end)
    }

    /// Returns whether the guest of that connection has its write cache off, as the former process knew or assumed.
    pub(super) fn write_cache_is_off(&self) -> bool {
        self.found.as_ref().is_some_and(|entry| !entry.write_cache)
    }

    /// Returns the connection that a former process left.
    ///
    /// # Errors
    /// If it was closed, or its front end has gone.
    pub(super) fn resume(&mut self) -> Result<FrontEnd<OwnedFd>, VhostError> {
        let entry = self.found.take().ok_or_else(|| failure("there is no connection of a former process"))?;
        let holding = self.connection.holding();
        let waits = holding.as_ref().and_then(|holding| holding.waits.as_ref());
        let socket = waits.ok_or_else(|| failure("this process was not ready in time"))?;
        if is_hung_up(socket) {
            return Err(failure("it has gone"));
        }
        let copy = |number| self.connection.store.copy(number);
        let missing = || failure("the service manager has lost a descriptor of its connection");
        entry.front_end.try_map(&mut |number| copy(number).ok_or_else(missing))
    }

    /// Notes that the front end of a former process is answered from now on.
    pub(super) fn note_answered(&self) {
        if let Some(holding) = &mut *self.connection.holding() {
            holding.waits = None;
        }
        self.connection.note_served();
    }

    /// Notes that the front end may have begun a message.
    pub(super) fn begin_message(&self) {
        let noted = self.connection.holding().as_ref().map(|holding| holding.ledger.begin());
        if noted.is_some_and(|noted| noted.is_err()) {
            self.connection.close();
        }
    }

    /// Notes that the message is answered. Returns whether the connection outlives this process from now on.
    pub(super) fn end_message(&mut self, socket: BorrowedFd<'_>, handler: &Handler) -> bool {
        match self.keep(socket, handler) {
            Ok(is_kept) => {
                self.failed = false;
                is_kept
            }
            Err(error) => {
                if !std::mem::replace(&mut self.failed, true) {
                    tracing::warn!(
                        "{}: its hypervisor would have to connect again after a crash: the service manager: {error}",
                        self.device
                    );
                }
                false
            }
        }
    }

    /// Returns when [`Self::end_message`] is to be called although there is no message, or `None` if that is useless.
    pub(super) fn retries_after(&self) -> Option<Duration> {
        self.failed.then_some(AGAIN_AFTER)
    }

    /// Takes the connection out of the store, because its front end has gone or is to connect again.
    pub(super) fn end(&mut self) {
        self.connection.close();
        (self.found, self.failed) = (None, false);
    }

    fn keep(&self, socket: BorrowedFd<'_>, handler: &Handler) -> io::Result<bool> {
        let store = &self.connection.store;
        if !handler.outlives_process() {
            self.connection.close();
            return Ok(false);
        }
        let mut holding = self.connection.holding();
        // An upgrade that failed has emptied the store.
        if holding.as_ref().is_some_and(|holding| holding.emptied != store.emptied()) {
            *holding = None;
        }
        let holding = match &mut *holding {
            Some(holding) => holding,
            none => none.insert(Holding::new(store)?),
        };
        // Until the new entry is in the ledger, the connection uses what it had and what it will have.
        let before = holding.numbers.len();
        let result = self.renew(holding, socket, handler);
        let numbers = &mut holding.numbers;
        match &result {
            Ok(()) => numbers.drain(..before).for_each(|number| store.release(number)),
            // It is tried again and again, and must not use more each time.
            Err(_) => split_repeated(numbers, before).into_iter().for_each(|number| store.release(number)),
        }
        result.map(|()| true)
    }

    /// Has the manager keep what the connection is now made of, and enters it in the ledger. The numbers of the descriptors are
    /// added to those of before.
    fn renew(&self, holding: &mut Holding, socket: BorrowedFd<'_>, handler: &Handler) -> io::Result<()> {
        let store = &self.connection.store;
        let Holding { ledger, numbers, text, .. } = holding;
        let mut put = |fd: BorrowedFd<'_>, kind| {
            let number = store.put(fd, kind)?;
            numbers.push(number);
            Ok(number)
        };
        put(ledger.as_fd(), Kind::Ledger)?;
        let number = put(socket, Kind::Other)?;
        let front_end = handler.pass(number, &mut |fd| put(fd, Kind::Other))?;
        let (device, write_cache) = (self.device.clone(), handler.write_cache());
        let entry = Entry { version: VERSION, device, write_cache, front_end };
        let new = entry.encode().map_err(io::Error::other)?;
        if new != *text {
            ledger.begin()?;
            store.confirm()?;
            ledger.write(&new)?;
            *text = new;
        }
        ledger.end()
    }
}

/// Removes those numbers from position `before` on that stand before them already, and returns them.
fn split_repeated(numbers: &mut Vec<u32>, before: usize) -> Vec<u32> {
    let new = numbers.split_off(before);
    let mut repeated = Vec::new();
    for number in new {
        let list = if numbers.contains(&number) { &mut repeated } else { &mut *numbers };
        list.push(number);
    }
    repeated
}

impl Holding {
    fn new(store: &DescriptorStore) -> io::Result<Self> {
        let (ledger, emptied) = (Ledger::create()?, store.emptied());
        Ok(Self { ledger, numbers: Vec::new(), text: Vec::new(), emptied, waits: None })
    }
}

/// The connections that a former process left, until their devices take them.
pub struct KeptConnections {
    store: Arc<DescriptorStore>,
    has_started: Arc<AtomicBool>,
    found: Vec<(Entry, Arc<Connection>)>,
    /// All of them, whether they were taken or not.
    connections: Vec<Arc<Connection>>,
}

impl KeptConnections {
    /// Returns the connections in `store`. Those that cannot be continued are closed and removed at once.
    #[must_use]
    pub fn of(store: DescriptorStore) -> Self {
        let (store, has_started) = (Arc::new(store), Arc::<AtomicBool>::default());
        let mut found = Vec::new();
        let now = boot_clock();
        let mut first_start = now;
        for number in store.ledgers() {
            match Connection::of_ledger(&store, &has_started, number, now) {
                Ok((entry, connection, since)) => {
                    first_start = first_start.min(since);
                    found.push((entry, Arc::new(connection)));
                }
                Err(error) => tracing::warn!("a hypervisor has to connect again: {error}"),
            }
        }
        store.close_unused();
        let connections: Vec<_> = found.iter().map(|(_, connection)| connection.clone()).collect();
        let left = PATIENCE.saturating_sub(Duration::from_nanos(now.saturating_sub(first_start)));
        close_after(left, &connections);
        Self { store, has_started, found, connections }
    }

    /// Returns what keeps the connection of a device, with the connection that a former process left. Returns `None` if
    /// there is no service manager that keeps descriptors.
    #[must_use]
    pub fn keeper(&mut self, device: &str) -> Option<Keeper> {
        let is_its = |(entry, _): &(Entry, Arc<Connection>)| entry.device == device;
        let mut its: Vec<_> = self.found.extract_if(.., |found| is_its(found)).collect();
        if its.len() > 1 {
            // A device has one front end: nobody knows which is the right one.
            its.drain(..).for_each(|(_, connection)| connection.close());
        }
        let new = || Connection {
            store: self.store.clone(),
            has_started: self.has_started.clone(),
            holding: Mutex::default(),
        };
        let (found, connection) = match its.pop() {
            Some((entry, connection)) => (Some(entry), connection),
            None => (None, Arc::new(new())),
        };
        let keeper = Keeper { device: device.to_owned(), connection, found, failed: false };
        (self.store.is_on() || keeper.found.is_some()).then_some(keeper)
    }

    /// Closes all connections that are not answered yet.
    pub fn close_all(&mut self) {
        self.found.clear();
        self.connections.iter().filter(|connection| connection.waits()).for_each(|connection| connection.close());
    }

    /// Closes the connections that no device has taken.
    pub fn close_rest(&mut self) {
        for (entry, connection) in self.found.drain(..) {
            tracing::warn!("the hypervisor of `{}` is disconnected: this process has no such device", entry.device);
            connection.close();
        }
    }

    /// Notes that this process serves its devices from now on.
    pub fn note_started(&self) {
        self.has_started.store(true, Ordering::SeqCst);
        self.connections.iter().for_each(|connection| connection.note_served());
    }

    /// Notes that this process cannot start. Closes the connections if it is not the first one.
    pub fn note_failed_start(&self) {
        for connection in &self.connections {
            let noted = connection.holding().as_ref().map(|holding| holding.ledger.note_failure());
            if noted.is_some_and(|failures| failures.is_ok_and(|failures| failures >= FAILURES_MAX)) {
                connection.close();
            }
        }
    }

    /// Returns the store, to be emptied before another program takes over in this process.
    #[must_use]
    pub fn store(&self) -> Arc<DescriptorStore> {
        self.store.clone()
    }
}

impl Connection {
    /// Returns the connection of the ledger `number`, and the start of the first process that has not served it.
    fn of_ledger(
        store: &Arc<DescriptorStore>,
        has_started: &Arc<AtomicBool>,
        number: u32,
        now: u64,
    ) -> io::Result<(Entry, Self, u64)> {
        let missing = || io::Error::other("the service manager has lost a descriptor of its connection");
        let ledger = Ledger::of(store.copy(number).ok_or_else(missing)?);
        let (entry, text) = ledger.read()?;
        let numbers = Guests { front_end: Some(entry.front_end.clone()), nbd: Vec::new() }.descriptors();
        let socket = store.copy(entry.front_end.socket).ok_or_else(missing)?;
        if is_hung_up(&socket) {
            return Err(io::Error::other("it has gone"));
        }
        let has_all = numbers.iter().all(|number| store.copy(*number).is_some());
        let since = if has_all { ledger.note_start(now) } else { Err(missing()) };
        let since = since.inspect_err(|_| disconnect(&socket))?;
        let numbers: Vec<u32> = numbers.into_iter().chain([number]).collect();
        numbers.iter().for_each(|number| store.hold(*number));
        let holding = Holding { ledger, numbers, text, emptied: store.emptied(), waits: Some(socket) };
        let (store, has_started, holding) = (store.clone(), has_started.clone(), Mutex::new(Some(holding)));
        Ok((entry, Self { store, has_started, holding }, since))
    }
}

/// Starts a thread that closes after `left` those of the connections whose front ends are not answered then.
fn close_after(left: Duration, connections: &[Arc<Connection>]) {
    if connections.is_empty() {
        return;
    }
    let theirs = connections.to_vec();
    let close = move || {
        std::thread::sleep(left);
        narrow::passes("patience-over");
        for connection in theirs.iter().filter(|connection| connection.waits()) {
            tracing::error!("a hypervisor is disconnected, because this process is not ready after 5 s");
            connection.close();
        }
    };
    if std::thread::Builder::new().name("kept connections".into()).spawn(close).is_err() {
        // Nobody would close them later.
        connections.iter().for_each(|connection| connection.close());
    }
}

/// Returns the time since the boot in nanoseconds, which all processes agree on.
fn boot_clock() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    seconds.saturating_mul(1_000_000_000).saturating_add(u64::try_from(time.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::split_repeated;

    /// A connection that cannot be kept is tried once a second, for as long as it lasts.
    #[test]
    fn attempts_that_fail_add_up_to_one() {
        let mut numbers = vec![1, 2, 2];
        for attempt in 0..3 {
            let before = numbers.len();
            numbers.extend([1, 2, 3, 3, 4]);
            let repeated = split_repeated(&mut numbers, before);
            assert_eq!(numbers, [1, 2, 2, 3, 4]);
            assert_eq!(repeated, if attempt == 0 { vec![1, 2, 3] } else { vec![1, 2, 3, 3, 4] });
        }
    }
}
