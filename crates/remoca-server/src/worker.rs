//! A worker thread: the pools of some tokens and the sessions that use them.
//!
//! Receives connections from the handshakes through a channel. Runs one task per session, all on one thread, so pools
//! need no locks. Arrivals are handled one after the other: an older session has ended before the next arrival is
//! looked at.

use std::cell::RefCell;
use std::future::pending;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use remoca_protocol::{
    ErrorCode, ErrorReply, Hello, PageCount, PoolGeneration, ReceiveBuffer, RequestId, SendCount, ServerId, VERSION,
    Welcome,
};
use tokio::runtime::Runtime;
use tokio::sync::{Notify, Semaphore, mpsc, oneshot, watch};
use tokio::task::{LocalSet, spawn_local};
use tokio::time::{Instant, sleep_until};

use crate::arena::Arena;
use crate::config::Config;
use crate::helpers::Helpers;
use crate::pool::Pool;
use crate::registry::{Left, Refused, Registry};
use crate::session::{Session, SessionEnd, Told};
use crate::status::WorkerReport;
use crate::stream::{DetachedStream, Stream};

/// Maximum number of arrivals that wait for a worker.
pub(crate) const ARRIVALS_MAX: usize = 16;

/// Maximum number of clients that a thread tells at the same time why they have no session.
const FAREWELLS_MAX: usize = 16;

/// Interval at which the log says that there are too many clients.
const FULL_TOLD_EVERY: Duration = Duration::from_secs(60);

/// State shared by all threads of a server.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) config: Config,
    pub(crate) arena: Arc<Arena>,
    pub(crate) helpers: Arc<Helpers>,
    pub(crate) quota: PageCount,
    pub(crate) server_id: ServerId,
    /// One permit for each client that may have a pool.
    pub(crate) clients: Arc<Semaphore>,
    /// When it was last logged that there are too many clients.
    pub(crate) full_told_at: Mutex<Option<Instant>>,
}

impl Shared {
    /// Logs why a client is refused, and returns what it is told.
    pub(crate) fn refuse(&self, refused: &Refused, hello: &Hello, peer: &str) -> ErrorCode {
        match refused {
            Refused::StaleEpoch { latest } => {
                tracing::warn!(peer, token = ?hello.token, epoch = hello.epoch, latest, "stale epoch");
                ErrorCode::StaleEpoch
            }
            Refused::Full => {
                self.note_full(peer);
                ErrorCode::Busy
            }
        }
    }

    /// Logs that there are too many clients: hundreds may ask again each minute, whether or not they need anything.
    fn note_full(&self, peer: &str) {
        let mut told_at = self.full_told_at.lock().unwrap_or_else(PoisonError::into_inner);
        if told_at.is_none_or(|at| at.elapsed() >= FULL_TOLD_EVERY) {
            *told_at = Some(Instant::now());
            tracing::warn!(peer, most = self.config.limits.sessions, "too many clients: connections are refused");
        }
    }
}

pub(crate) enum Message {
    Arrival(Arrival),
    Report(oneshot::Sender<WorkerReport>),
}

/// A connection that said HELLO with a version that the server speaks too.
pub(crate) struct Arrival {
    pub(crate) stream: DetachedStream,
    /// Also holds the bytes that came after the HELLO.
    pub(crate) buffer: ReceiveBuffer,
    pub(crate) hello: Hello,
    pub(crate) peer: String,
}

/// Runs a worker until the sender of `stopped` is gone.
pub(crate) fn run(
    runtime: &Runtime,
    shared: Arc<Shared>,
    messages: mpsc::Receiver<Message>,
    stopped: watch::Receiver<()>,
) {
    let registry = Registry::new(shared.config.grace, Arc::clone(&shared.clients));
    let (registry, farewells) = (RefCell::new(registry), Farewells::new());
    let worker = Rc::new(Worker { shared, registry, left: Notify::new(), farewells });
    let sessions = LocalSet::new();
    sessions.block_on(runtime, worker.serve(messages, stopped));
    // Dropping the set closes all connections.
}

struct Worker {
    shared: Arc<Shared>,
    registry: RefCell<Registry<Rc<RefCell<Pool>>>>,
    /// Notified when a client has left, because the earliest expiry may have changed.
    left: Notify,
    farewells: Farewells,
}

impl Worker {
    async fn serve(self: Rc<Self>, mut messages: mpsc::Receiver<Message>, mut stopped: watch::Receiver<()>) {
        loop {
            let expired = reached(self.registry.borrow().next_expiry());
            tokio::select! {
                // An error means that the sender is gone: it is time to stop.
                _ = stopped.changed() => return,
                message = messages.recv() => match message {
                    Some(Message::Arrival(arrival)) => self.admit(arrival).await,
                    // Fails if the task that asked has gone.
                    Some(Message::Report(reply)) => drop(reply.send(self.registry.borrow().report())),
                    None => return,
                },
                () = self.left.notified() => {}
                () = expired => drop(self.registry.borrow_mut().expire(Instant::now())),
            }
        }
    }

    /// Begins the session of a connection, after ending an older session of the same client.
    async fn admit(self: &Rc<Self>, arrival: Arrival) {
        let Arrival { stream, buffer, hello, peer } = arrival;
        let stream = match stream.attach() {
            Ok(stream) => stream,
            Err(error) => return tracing::warn!(peer, %error, "connection lost to the event loop"),
        };
        let fresh = match random_generation() {
            Ok(fresh) => fresh,
            Err(error) => return tracing::error!(peer, %error, "no random numbers: connection closed"),
        };
        let create = || Rc::new(RefCell::new(Pool::new(Arc::clone(&self.shared.arena), self.shared.quota)));
        let arrived = match self.registry.borrow_mut().arrive(&hello, peer.clone(), fresh, create) {
            Ok(arrived) => arrived,
            Err(refused) => return self.farewells.say(stream, self.shared.refuse(&refused, &hello, &peer)),
        };
        // From here on, whatever ends this arrival makes the client leave.
        let mut attendance = Attendance { worker: Rc::clone(self), hello, left: Left::Vanished };
        if let Some(older) = arrived.older {
            older.abort();
            // Its socket is closed when this returns. That it was cancelled is expected.
            let _cancelled = older.await;
            tracing::info!(peer, token = ?hello.token, "a newer connection replaced an older one");
        }
        let welcome = self.welcome(&arrived.pool.borrow(), arrived.generation);
        let stall_timeout = self.shared.config.limits.stall_timeout;
        let session = Session::new(stream, buffer, arrived.pool, stall_timeout, Told::new(peer, hello));
        let task = spawn_local(async move {
            if let SessionEnd::Bye = session.run(welcome).await {
                attendance.left = Left::ForGood;
            }
            drop(attendance);
        });
        self.registry.borrow_mut().settle(&hello, task);
    }

    fn welcome(&self, pool: &Pool, pool_generation: PoolGeneration) -> Welcome {
        Welcome {
            version: VERSION,
            server_id: self.shared.server_id,
            pool_generation,
            npages: pool.npages(),
            available: pool.available(),
            quota: pool.quota(),
            sends_received: SendCount(pool.counters.sends),
        }
    }
}

/// One permit for each client that may be told at a time why it has no session.
pub(crate) struct Farewells(Arc<Semaphore>);

impl Farewells {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Semaphore::new(FAREWELLS_MAX)))
    }

    /// Tells a client why it has no session. If too many clients are being told, its connection is only closed.
    pub(crate) fn say(&self, stream: Stream, code: ErrorCode) {
        let Ok(permit) = Arc::clone(&self.0).try_acquire_owned() else { return };
        spawn_local(async move {
            stream.farewell(ErrorReply { request: RequestId(0), code, detail: 0 }).await;
            drop(permit);
        });
    }
}

/// The presence of a client. Its end is recorded however the session ends: by return, abort, or a panic.
struct Attendance {
    worker: Rc<Worker>,
    hello: Hello,
    left: Left,
}

impl Drop for Attendance {
    fn drop(&mut self) {
        drop(self.worker.registry.borrow_mut().leave(&self.hello, self.left, Instant::now()));
        self.worker.left.notify_one();
    }
}

/// Returns once it is `time`; never if there is none.
pub(crate) async fn reached(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => pending().await,
    }
}

pub(crate) fn random_generation() -> std::io::Result<PoolGeneration> {
    let mut bytes = [0; 8];
    fill_random(&mut bytes)?;
    Ok(PoolGeneration(u64::from_le_bytes(bytes)))
}

/// Fills `bytes` from the system's random source.
pub(crate) fn fill_random(bytes: &mut [u8]) -> std::io::Result<()> {
    let count = rustix::rand::getrandom(&mut *bytes, rustix::rand::GetRandomFlags::empty())?;
    // Requests of up to 256 bytes are never cut short.
    if count == bytes.len() { Ok(()) } else { Err(std::io::ErrorKind::UnexpectedEof.into()) }
}
