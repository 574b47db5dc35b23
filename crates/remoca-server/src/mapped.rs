//! The thread of all mapped pools: it admits their clients, watches that none uses more memory than it was granted, takes
//! memory back, and ends pools.
//!
//! Nothing on this thread takes long: pages do not come this way, and memory changes on helper threads. A client has a mapped
//! pool under its token beside the paged one that it may have under the same.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use remoca_core::units::PAGE_SIZE_U64;
use remoca_protocol::{ErrorCode, Hello, PageCount, Token};
use tokio::runtime::Runtime;
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::task::{LocalSet, spawn_blocking, spawn_local};
use tokio::time::{Instant, MissedTickBehavior, interval, timeout_at};

use crate::command::{TakeBackError, TakenBack};
use crate::keeper::Keeper;
use crate::mapped_pool::{Identity, MappedPool};
use crate::mapped_session::MappedSession;
use crate::registry::{Handle, Left, Registry, status_of};
use crate::session::SessionEnd;
use crate::status::{MappedStatus, PoolStatus, Totals, WorkerReport, shown};
use crate::worker::{Arrival, Farewells, Shared, random_generation, reached};

/// Interval at which the memory of all pools is looked at.
const WATCH_EVERY: Duration = Duration::from_secs(1);
/// How long an operator waits for memory that is taken back. Punching takes less, unless a client goes on using it.
const OPERATOR_PATIENCE: Duration = Duration::from_secs(10);

pub(crate) enum MappedMessage {
    Arrival(Arrival),
    Report(oneshot::Sender<WorkerReport>),
    TakeBack(TakeBack),
}

/// An operator's command.
pub(crate) struct TakeBack {
    /// The shown part of the pool's token.
    pub(crate) pool: String,
    pub(crate) npages: PageCount,
    pub(crate) reply: oneshot::Sender<Result<TakenBack, TakeBackError>>,
}

impl Handle for Arc<MappedPool> {
    fn npages(&self) -> PageCount {
        self.granted()
    }

    fn is_limited(&self) -> bool {
        self.limit() < self.quota()
    }

    fn totals(&self) -> Totals {
        Totals { resizes_refused: self.refusals(), ..Totals::default() }
    }

    fn describe(&self, status: &mut PoolStatus) {
        status.mapped = Some(MappedStatus {
            resident_pages: self.allocated(),
            limit_pages: self.limit().0,
            kept: self.is_kept(),
            held: self.is_held(),
        });
    }
}

/// Runs the thread until the sender of `stopped` is gone. `left` are the pools of a former server.
pub(crate) fn run(
    runtime: &Runtime,
    shared: Arc<Shared>,
    keeper: Keeper,
    left: Vec<MappedPool>,
    messages: mpsc::Receiver<MappedMessage>,
    stopped: watch::Receiver<()>,
) {
    let mut registry = Registry::new(shared.config.grace, Arc::clone(&shared.clients));
    for pool in left {
        let Identity { token, generation, .. } = pool.identity;
        let epoch = pool.epoch();
        registry.expect(token, Arc::new(pool), generation, epoch, Instant::now());
    }
    let worker = Rc::new(MappedWorker {
        shared,
        keeper,
        registry: RefCell::new(registry),
        ended: RefCell::default(),
        ending: RefCell::default(),
        left: Notify::new(),
        farewells: Farewells::new(),
    });
    // Dropping the set closes all connections.
    LocalSet::new().block_on(runtime, worker.serve(messages, stopped));
}

struct MappedWorker {
    shared: Arc<Shared>,
    keeper: Keeper,
    registry: RefCell<Registry<Arc<MappedPool>>>,
    /// Pools that nobody has any more, and whose memory is still to be given back.
    ended: RefCell<Vec<Arc<MappedPool>>>,
    /// Those of them whose memory is being given back.
    ending: RefCell<Vec<Arc<MappedPool>>>,
    /// Notified when a client has left.
    left: Notify,
    farewells: Farewells,
}

impl MappedWorker {
    async fn serve(self: Rc<Self>, mut messages: mpsc::Receiver<MappedMessage>, mut stopped: watch::Receiver<()>) {
        let mut watch = interval(WATCH_EVERY);
        watch.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            for pool in self.ended.take() {
                self.finish(pool);
            }
            let expired = reached(self.registry.borrow().next_expiry());
            let has_pools = self.registry.borrow().pools().next().is_some();
            tokio::select! {
                // An error means that the sender is gone: it is time to stop.
                _ = stopped.changed() => return,
                message = messages.recv() => match message {
                    Some(MappedMessage::Arrival(arrival)) => self.admit(arrival).await,
                    Some(MappedMessage::Report(reply)) => {
                        self.look_at_memory();
                        // Fails if the task that asked has gone.
                        drop(reply.send(self.report()));
                    }
                    Some(MappedMessage::TakeBack(order)) => self.take_back(order),
                    None => return,
                },
                () = self.left.notified() => {}
                () = expired => {
                    let expired = self.registry.borrow_mut().expire(Instant::now());
                    self.ended.borrow_mut().extend(expired);
                }
                _ = watch.tick(), if has_pools => {
                    self.look_at_memory();
                    self.look_at_limits();
                    self.keep();
                }
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
        let pool = match self.pool_of(&hello) {
            Ok(pool) => pool,
            Err(error) => {
                tracing::warn!(peer, %error, "no mapped pool for this client: connection refused");
                return self.farewells.say(stream, ErrorCode::Busy);
            }
        };
        let generation = pool.identity.generation;
        let arrived = match self.registry.borrow_mut().arrive(&hello, peer.clone(), generation, || pool) {
            Ok(arrived) => arrived,
            Err(refused) => return self.farewells.say(stream, self.shared.refuse(&refused, &hello, &peer)),
        };
        // From here on, whatever ends this arrival makes the client leave.
        let mut attendance = Attendance { worker: Rc::clone(self), hello, left: Left::Vanished };
        arrived.pool.note_epoch(hello.epoch, &peer);
        if let Some(older) = arrived.older {
            older.abort();
            // Its socket is closed when this returns. That it was cancelled is expected.
            let _cancelled = older.await;
            tracing::info!(peer, token = ?hello.token, "a newer connection replaced an older one");
        }
        let pages = arrived.pool.granted().0;
        tracing::info!(peer, token = ?hello.token, epoch = hello.epoch, pages, "session of a mapped pool begins");
        let stall_timeout = self.shared.config.limits.stall_timeout;
        let session = MappedSession::new(stream, buffer, arrived.pool, self.keeper.clone(), stall_timeout);
        let worker = Rc::clone(self);
        let task = spawn_local(async move {
            let (end, stream) = session.run().await;
            tracing::info!(peer, token = ?hello.token, reason = %end, "session ended");
            let code = match end {
                SessionEnd::TakenBack => Some(ErrorCode::TAKEN_BACK),
                SessionEnd::Malformed(_) => Some(ErrorCode::Malformed),
                SessionEnd::Bye | SessionEnd::Closed | SessionEnd::Stalled(_) | SessionEnd::Failed(_) => None,
            };
            if matches!(end, SessionEnd::Bye | SessionEnd::TakenBack) {
                attendance.left = Left::ForGood;
            }
            // The memory is given back before the client is told.
            drop(attendance);
            if let Some(code) = code {
                worker.farewells.say(stream, code);
            }
        });
        self.registry.borrow_mut().settle(&hello, task);
    }

    /// Returns the pool of a client, or a new one.
    fn pool_of(&self, hello: &Hello) -> std::io::Result<Arc<MappedPool>> {
        let registry = self.registry.borrow();
        if let Some(pool) = registry.find(&hello.token) {
            return Ok(Arc::clone(pool));
        }
        let Shared { arena, helpers, quota, server_id, config, clients, .. } = &*self.shared;
        let most = config.limits.sessions;
        // Each of those that are ending may have a thread that waits for its client.
        if clients.available_permits() == 0 || self.ending.borrow().len() >= most {
            return Err(std::io::Error::other(format!(
                "there are {most} clients, or as many pools that are ending (--max-clients)"
            )));
        }
        let quota = if config.quota_bytes.is_some() { *quota } else { (*quota).min(reserved_at_most(most)) };
        let identity = Identity { token: hello.token, server_id: *server_id, generation: random_generation()? };
        Ok(Arc::new(MappedPool::new(identity, Arc::clone(arena), Arc::clone(helpers), quota)?))
    }

    /// Gives the memory of a pool back that nobody has any more.
    fn finish(self: &Rc<Self>, pool: Arc<MappedPool>) {
        self.ending.borrow_mut().push(Arc::clone(&pool));
        let worker = Rc::clone(self);
        spawn_local(async move {
            Arc::clone(&pool).end().await;
            worker.ending.borrow_mut().retain(|other| !Arc::ptr_eq(other, &pool));
        });
    }

    /// Reports all pools, with those that have ended and whose clients hold their memory.
    fn report(&self) -> WorkerReport {
        let mut report = self.registry.borrow().report();
        let ending = self.ending.borrow();
        let held = ending.iter().filter(|pool| pool.is_held());
        report.pools.extend(held.map(|pool| status_of(pool, &pool.identity.token, pool.peer(), false)));
        report
    }

    /// Ends the pools that stay above their limits: their clients are gone, or do anything but answer. The sessions of others end
    /// sooner.
    fn look_at_limits(&self) {
        let stays = |pool: &MappedPool| !pool.is_over() && pool.stays_above_limit();
        let pools: Vec<_> = self.registry.borrow().pools().filter(|(_, pool, _)| stays(pool)).map(told).collect();
        for (token, pool) in pools {
            tracing::warn!(?token, "memory that is taken back is not given: the pool is ended");
            self.end(&token, &pool);
        }
    }

    /// Ends a pool, whether its client is here or not.
    fn end(&self, token: &Token, pool: &MappedPool) {
        pool.condemn();
        self.ended.borrow_mut().extend(self.registry.borrow_mut().remove_vanished(token));
    }

    /// Ends the pools whose clients use memory that they were not granted.
    fn look_at_memory(&self) {
        let overshooting = |pool: &MappedPool| !pool.is_over() && pool.overshoots();
        let pools: Vec<_> =
            self.registry.borrow().pools().filter(|(_, pool, _)| overshooting(pool)).map(told).collect();
        for (token, pool) in pools {
            let (granted, allocated) = (pool.granted().0, pool.allocated());
            tracing::warn!(
                ?token,
                granted,
                allocated,
                "a client uses memory that it was not granted: its pool is ended"
            );
            self.end(&token, &pool);
        }
    }

    /// Has the service manager keep the pools that it does not have yet.
    fn keep(&self) {
        if !self.keeper.is_on() {
            return;
        }
        let not_kept = |pool: &MappedPool| !pool.is_kept() && pool.granted() > PageCount(0);
        let pools: Vec<_> = self.registry.borrow().pools().filter(|(_, pool, _)| not_kept(pool)).map(told).collect();
        for (_, pool) in pools {
            let keeper = self.keeper.clone();
            drop(spawn_blocking(move || pool.keep(&keeper)));
        }
    }

    /// Lowers, or raises, the limit of a pool, and answers once no memory above it is used.
    fn take_back(&self, order: TakeBack) {
        let TakeBack { pool: name, npages, reply } = order;
        // Several if clients, which choose their tokens, mean them to look the same. None of them gets away by that.
        let named: Vec<_> =
            self.registry.borrow().pools().filter(|(token, ..)| shown(token) == name).map(told).collect();
        if named.is_empty() {
            // Fails if the operator has gone.
            return drop(reply.send(Err(TakeBackError::NoSuchPool(name))));
        }
        for (token, pool) in &named {
            pool.set_limit(npages);
            if pool.granted() > npages {
                // Nobody is there who could answer.
                self.ended.borrow_mut().extend(self.registry.borrow_mut().remove_vanished(token));
            }
        }
        spawn_local(async move {
            let give_up_at = Instant::now() + OPERATOR_PATIENCE;
            let mut outcome = Ok(TakenBack { pages: 0, ended: false });
            for (_, pool) in named {
                let still = timeout_at(give_up_at, pool.given_back()).await;
                outcome = match (outcome, still) {
                    (Err(error), _) => Err(error),
                    (Ok(_), Ok(false)) if pool.is_held() => Err(TakeBackError::Held(pool.peer())),
                    (Ok(_), Ok(false)) if pool.is_misused() => Err(TakeBackError::StillUsed),
                    (Ok(_), Err(_)) => Err(TakeBackError::Late(OPERATOR_PATIENCE.as_secs())),
                    (Ok(others), Ok(still)) => {
                        Ok(TakenBack { pages: others.pages + pool.granted().0, ended: others.ended || !still })
                    }
                };
            }
            drop(reply.send(outcome));
        });
    }
}

fn told((token, pool, _): (&Token, &Arc<MappedPool>, bool)) -> (Token, Arc<MappedPool>) {
    (*token, Arc::clone(pool))
}

/// The presence of a client. Its end is recorded however the session ends: by return, abort, or a panic.
struct Attendance {
    worker: Rc<MappedWorker>,
    hello: Hello,
    left: Left,
}

impl Drop for Attendance {
    fn drop(&mut self) {
        let mut registry = self.worker.registry.borrow_mut();
        // Nobody comes back for a pool that has ended, though its session may have ended before it heard of that.
        let is_over = registry.find(&self.hello.token).is_some_and(|pool| pool.is_over());
        let left = if is_over { Left::ForGood } else { self.left };
        let ended = registry.leave(&self.hello, left, Instant::now());
        drop(registry);
        self.worker.ended.borrow_mut().extend(ended);
        self.worker.left.notify_one();
    }
}

/// Returns the largest pool if there may be so many and nobody said how large one may be: the server maps each of them as large as it may
/// become, and a process has 128 TiB of addresses.
fn reserved_at_most(pools: usize) -> PageCount {
    const ADDRESSES: u64 = 64 << 40;
    PageCount(u32::try_from(ADDRESSES / PAGE_SIZE_U64 / pools.max(1) as u64).unwrap_or(u32::MAX))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests fail by panics")]
mod tests {
    use std::sync::Mutex;

    use remoca_protocol::{MAPPED_VERSIONS, ServerId};
    use tokio::sync::Semaphore;

    use super::*;
    use crate::arena::Arena;
    use crate::config::{Config, Limits, PageLocking};
    use crate::helpers::Helpers;

    fn worker() -> Rc<MappedWorker> {
        let config = Config {
            listen: Vec::new(),
            memory_bytes: 4 << 20,
            quota_bytes: None,
            grace: Duration::from_secs(3600),
            locking: PageLocking::Unlocked,
            threads: 1,
            control: None,
            limits: Limits::default(),
        };
        let arena = Arena::new(config.memory_bytes, config.locking, &mut |_| ()).unwrap();
        let (helpers, clients) = (Arc::new(Helpers::new()), Arc::new(Semaphore::new(1)));
        let registry = RefCell::new(Registry::new(config.grace, Arc::clone(&clients)));
        let (quota, server_id) = (PageCount(1024), ServerId([1; 16]));
        let shared =
            Arc::new(Shared { config, arena, helpers, quota, server_id, clients, full_told_at: Mutex::default() });
        Rc::new(MappedWorker {
            shared,
            keeper: Keeper::default(),
            registry,
            ended: RefCell::default(),
            ending: RefCell::default(),
            left: Notify::new(),
            farewells: Farewells::new(),
        })
    }

    /// Returns the pool of a client that has just come, and its presence.
    async fn arrive(worker: &Rc<MappedWorker>, epoch: u64) -> (Arc<MappedPool>, Attendance) {
        let hello = Hello { versions: MAPPED_VERSIONS, token: Token([1; 16]), epoch };
        let pool = worker.pool_of(&hello).unwrap();
        let generation = pool.identity.generation;
        let arrived = worker.registry.borrow_mut().arrive(&hello, "test".into(), generation, || pool).unwrap();
        Arc::clone(&arrived.pool).resize(PageCount(600)).await.unwrap();
        (arrived.pool, Attendance { worker: Rc::clone(worker), hello, left: Left::Vanished })
    }

    /// Tests a pool that is ended while its client's session ends.
    #[test]
    fn a_pool_that_has_ended_does_not_wait_for_its_client() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        LocalSet::new().block_on(&runtime, async {
            let worker = worker();
            let (pool, attendance) = arrive(&worker, 1).await;
            drop(attendance);
            assert!(worker.ended.borrow().is_empty(), "a client that is gone may come back");
            let (again, attendance) = arrive(&worker, 2).await;
            assert!(Arc::ptr_eq(&pool, &again));
            worker.end(&Token([1; 16]), &pool);
            assert!(worker.ended.borrow().is_empty(), "its client is here, and is told first");
            drop(attendance);
            assert_eq!((worker.ended.borrow().len(), worker.registry.borrow().pools().count()), (1, 0));
        });
    }
}
