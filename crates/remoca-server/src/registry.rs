//! Which client has which pool, on one thread: that of a worker, or that of all mapped pools.
//!
//! Called by the thread when a connection comes or goes; knows no socket. Owns the pools and remembers epochs.
//!
//! 1. A pool has at most one session: [`Registry::arrive`] returns the older one, to be ended before the newer begins.
//! 2. A session whose epoch is not the pool's latest changes nothing, whatever it still reports.
//! 3. A pool whose client is gone is freed after the grace time; a pool without slots or an operator's limit, at once.
//! 4. Each pool has one of the permits of all clients, as long as it is kept: nobody takes the place of a client that may come back. A
//!    client that is refused changes nothing.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use remoca_protocol::{Hello, PageCount, PoolGeneration, Token};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::pool::Pool;
use crate::status::{PoolStatus, Totals, WorkerReport, shown};

/// A handle on a pool of either kind.
pub(crate) trait Handle: Clone {
    fn npages(&self) -> PageCount;
    /// Returns whether an operator has set a limit on its size.
    fn is_limited(&self) -> bool;
    /// Returns what the pool adds to the totals.
    fn totals(&self) -> Totals;
    /// Fills in what only the pool knows.
    fn describe(&self, status: &mut PoolStatus);
}

impl Handle for Rc<RefCell<Pool>> {
    fn npages(&self) -> PageCount {
        self.borrow().npages()
    }

    fn is_limited(&self) -> bool {
        false
    }

    fn totals(&self) -> Totals {
        totals_of(&self.borrow())
    }

    fn describe(&self, status: &mut PoolStatus) {
        let pool = self.borrow();
        status.pages_written = pool.written_pages();
        status.gets = pool.counters.gets;
        status.not_found = pool.counters.not_found;
        status.sends = pool.counters.sends;
    }
}

pub(crate) struct Registry<P> {
    grace: Duration,
    /// One permit for each client that may have a pool, on any thread.
    clients: Arc<Semaphore>,
    pools: HashMap<Token, Entry<P>>,
    /// Totals of freed pools, and of sessions.
    totals: Totals,
}

struct Entry<P> {
    pool: P,
    generation: PoolGeneration,
    /// Latest epoch seen.
    epoch: u64,
    peer: String,
    presence: Presence,
    /// `None` for a pool of a former server that allowed more clients.
    permit: Option<OwnedSemaphorePermit>,
}

enum Presence {
    /// A connection has been admitted, and its session is about to begin.
    Arriving,
    Here(JoinHandle<()>),
    /// The client is gone; the pool is freed at this time.
    Vanished(Instant),
}

/// What an arriving client receives.
#[derive(Debug)]
pub(crate) struct Arrived<P> {
    pub(crate) pool: P,
    pub(crate) generation: PoolGeneration,
    /// Older session of the same client. It must have ended before the client is answered.
    pub(crate) older: Option<JoinHandle<()>>,
}

/// Why an arriving client is refused.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// Its epoch is not newer than the latest.
    StaleEpoch { latest: u64 },
    /// There are as many clients as there may be.
    Full,
}

/// How a client left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Left {
    /// Its connection is gone; it may come back.
    Vanished,
    /// It said BYE.
    ForGood,
}

impl<P: Handle> Registry<P> {
    pub(crate) fn new(grace: Duration, clients: Arc<Semaphore>) -> Self {
        Self { grace, clients, pools: HashMap::new(), totals: Totals::default() }
    }

    /// Returns the pool of a client, or `None` if it has none.
    pub(crate) fn find(&self, token: &Token) -> Option<&P> {
        self.pools.get(token).map(|entry| &entry.pool)
    }

    /// Returns all pools, and whether the client of each is here.
    pub(crate) fn pools(&self) -> impl Iterator<Item = (&Token, &P, bool)> {
        self.pools.iter().map(|(token, entry)| (token, &entry.pool, entry.is_here()))
    }

    /// Adds a pool whose client was here before this server started, and waits for the client for the grace time.
    pub(crate) fn expect(&mut self, token: Token, pool: P, generation: PoolGeneration, epoch: u64, now: Instant) {
        let (peer, presence) = ("kept over a restart".into(), Presence::Vanished(now + self.grace));
        let permit = Arc::clone(&self.clients).try_acquire_owned().ok();
        self.pools.insert(token, Entry { pool, generation, epoch, peer, presence, permit });
    }

    /// Removes a pool without a client, and returns it. Returns `None` if its client is here, or there is none.
    pub(crate) fn remove_vanished(&mut self, token: &Token) -> Option<P> {
        if self.pools.get(token)?.is_here() {
            return None;
        }
        let entry = self.pools.remove(token)?;
        self.totals.add(&entry.pool.totals());
        Some(entry.pool)
    }

    /// Finds the pool of a client, or has `create` make one of generation `fresh`. Records the new epoch and peer.
    pub(crate) fn arrive(
        &mut self,
        hello: &Hello,
        peer: String,
        fresh: PoolGeneration,
        create: impl FnOnce() -> P,
    ) -> Result<Arrived<P>, Refused> {
        if let Some(entry) = self.pools.get(&hello.token)
            && hello.epoch <= entry.epoch
        {
            return Err(Refused::StaleEpoch { latest: entry.epoch });
        }
        let permit = match self.pools.get_mut(&hello.token).and_then(|entry| entry.permit.take()) {
            Some(permit) => permit,
            None => Arc::clone(&self.clients).try_acquire_owned().map_err(|_| Refused::Full)?,
        };
        let entry = self.pools.entry(hello.token).or_insert_with(|| Entry {
            pool: create(),
            generation: fresh,
            epoch: hello.epoch,
            peer: String::new(),
            presence: Presence::Arriving,
            permit: None,
        });
        entry.permit = Some(permit);
        entry.epoch = hello.epoch;
        entry.peer = peer;
        self.totals.sessions += 1;
        let older = match std::mem::replace(&mut entry.presence, Presence::Arriving) {
            Presence::Here(session) => {
                self.totals.fenced += 1;
                Some(session)
            }
            Presence::Arriving | Presence::Vanished(_) => None,
        };
        Ok(Arrived { pool: entry.pool.clone(), generation: entry.generation, older })
    }

    /// Stores the running session of an arrived client, so that a newer one can end it. Does nothing if the client has
    /// left or a newer one has arrived.
    pub(crate) fn settle(&mut self, hello: &Hello, session: JoinHandle<()>) {
        if let Some(entry) = self.pools.get_mut(&hello.token)
            && entry.epoch == hello.epoch
            && matches!(entry.presence, Presence::Arriving)
        {
            entry.presence = Presence::Here(session);
        }
    }

    /// Keeps the pool of a vanished client for the grace period if it has pages, or a limit that the client shall find when
    /// it comes back. Frees it otherwise. Called at the end of a client's session, also of one that never began. Does nothing
    /// if a newer one has arrived. Returns the pool if it was removed.
    pub(crate) fn leave(&mut self, hello: &Hello, left: Left, now: Instant) -> Option<P> {
        let entry = self.pools.get_mut(&hello.token)?;
        if entry.epoch != hello.epoch {
            return None;
        }
        let keep = left == Left::Vanished && (entry.pool.npages() > PageCount(0) || entry.pool.is_limited());
        if keep {
            entry.presence = Presence::Vanished(now + self.grace);
            return None;
        }
        let entry = self.pools.remove(&hello.token)?;
        self.totals.add(&entry.pool.totals());
        Some(entry.pool)
    }

    /// Returns the time when the next pool is to be freed, or `None` if no client is gone.
    pub(crate) fn next_expiry(&self) -> Option<Instant> {
        self.pools.values().filter_map(Entry::expiry).min()
    }

    /// Removes the pools whose clients did not come back in time, and returns them.
    pub(crate) fn expire(&mut self, now: Instant) -> Vec<P> {
        let is_expired = |entry: &Entry<P>| entry.expiry().is_some_and(|at| at <= now);
        let mut expired = Vec::new();
        for (token, Entry { pool, .. }) in self.pools.extract_if(|_, entry| is_expired(entry)) {
            tracing::info!(?token, pages = pool.npages().0, "client did not come back: pool freed");
            self.totals.add(&pool.totals());
            self.totals.expired += 1;
            expired.push(pool);
        }
        expired
    }

    pub(crate) fn report(&self) -> WorkerReport {
        let mut totals = self.totals;
        let mut pools = Vec::new();
        for (token, entry) in &self.pools {
            totals.add(&entry.pool.totals());
            pools.push(status_of(&entry.pool, token, entry.peer.clone(), entry.is_here()));
        }
        WorkerReport { totals, pools }
    }
}

impl<P> Entry<P> {
    fn is_here(&self) -> bool {
        !matches!(self.presence, Presence::Vanished(_))
    }

    fn expiry(&self) -> Option<Instant> {
        match self.presence {
            Presence::Vanished(at) => Some(at),
            Presence::Arriving | Presence::Here(_) => None,
        }
    }
}

/// Returns the status of a pool. `connected` says whether its client is here.
pub(crate) fn status_of(pool: &impl Handle, token: &Token, peer: String, connected: bool) -> PoolStatus {
    let mut status = PoolStatus {
        token: shown(token),
        peer,
        connected,
        npages: pool.npages().0,
        pages_written: 0,
        gets: 0,
        not_found: 0,
        sends: 0,
        mapped: None,
    };
    pool.describe(&mut status);
    status
}

fn totals_of(pool: &Pool) -> Totals {
    let counters = pool.counters;
    Totals {
        gets: counters.gets,
        not_found: counters.not_found,
        sends: counters.sends,
        moves: counters.moves,
        resizes_refused: counters.resizes_refused,
        ..Totals::default()
    }
}

#[cfg(test)]
mod tests {
    use remoca_protocol::VERSIONS;

    use super::*;
    use crate::arena::Arena;
    use crate::config::PageLocking;

    const GRACE: Duration = Duration::from_secs(60);

    struct Setup {
        arena: Arc<Arena>,
        registry: Registry<Rc<RefCell<Pool>>>,
    }

    impl std::ops::Deref for Setup {
        type Target = Registry<Rc<RefCell<Pool>>>;
        fn deref(&self) -> &Self::Target {
            &self.registry
        }
    }

    impl std::ops::DerefMut for Setup {
        fn deref_mut(&mut self) -> &mut Self::Target {
            &mut self.registry
        }
    }

    /// Returns a registry for one client at a time.
    fn registry() -> Setup {
        let arena = Arena::new(4 << 20, PageLocking::Unlocked, &mut |_| ()).expect("4 MiB");
        Setup { arena, registry: Registry::new(GRACE, Arc::new(Semaphore::new(1))) }
    }

    fn hello(epoch: u64) -> Hello {
        Hello { versions: VERSIONS, token: Token([1; 16]), epoch }
    }

    fn pool(setup: &Setup) -> Rc<RefCell<Pool>> {
        Rc::new(RefCell::new(Pool::new(Arc::clone(&setup.arena), PageCount(1024))))
    }

    fn arrive_as(setup: &mut Setup, hello: &Hello) -> Result<Arrived<Rc<RefCell<Pool>>>, Refused> {
        let pool = pool(setup);
        setup.registry.arrive(hello, "test".into(), PoolGeneration(100 + hello.epoch), || pool)
    }

    fn arrive(setup: &mut Setup, epoch: u64) -> Result<Arrived<Rc<RefCell<Pool>>>, Refused> {
        arrive_as(setup, &hello(epoch))
    }

    #[test]
    fn nobody_takes_the_place_of_a_client_whose_pool_is_kept() {
        let mut registry = registry();
        let (now, other) = (Instant::now(), Hello { token: Token([2; 16]), ..hello(1) });
        arrive(&mut registry, 1).expect("new").pool.borrow_mut().resize(PageCount(600)).expect("room");
        assert_eq!(arrive_as(&mut registry, &other).err(), Some(Refused::Full), "while it is here");
        registry.leave(&hello(1), Left::Vanished, now);
        assert_eq!(arrive_as(&mut registry, &other).err(), Some(Refused::Full), "while it may come back");
        let again = arrive(&mut registry, 2).expect("its own place");
        assert_eq!(again.pool.borrow().npages(), PageCount(600));
        registry.leave(&hello(2), Left::Vanished, now);
        registry.expire(now + GRACE);
        assert!(arrive_as(&mut registry, &other).is_ok(), "when it did not come back");
        registry.leave(&other, Left::Vanished, now);
        assert!(arrive(&mut registry, 3).is_ok(), "a client without a pool leaves its place");
    }

    /// Tests the pools of a former server that allowed more clients.
    #[test]
    fn a_client_that_is_refused_does_not_put_off_the_end_of_its_pool() {
        let mut registry = registry();
        let (now, other) = (Instant::now(), Hello { token: Token([2; 16]), ..hello(1) });
        arrive_as(&mut registry, &other).expect("new");
        let kept = pool(&registry);
        kept.borrow_mut().resize(PageCount(600)).expect("room");
        registry.expect(hello(1).token, kept, PoolGeneration(101), 1, now);
        assert_eq!(arrive(&mut registry, 2).err(), Some(Refused::Full));
        assert_eq!(registry.next_expiry(), Some(now + GRACE));
        registry.leave(&other, Left::Vanished, now);
        assert_eq!(arrive(&mut registry, 2).expect("a place is free").generation, PoolGeneration(101));
    }

    #[test]
    fn a_pool_waits_for_its_client_as_long_as_the_grace_time() {
        let mut registry = registry();
        let now = Instant::now();
        let first = arrive(&mut registry, 1).expect("new");
        first.pool.borrow_mut().resize(PageCount(600)).expect("room");
        registry.leave(&hello(1), Left::Vanished, now);
        assert_eq!(registry.next_expiry(), Some(now + GRACE));
        registry.expire(now + GRACE - Duration::from_nanos(1));
        let second = arrive(&mut registry, 2).expect("kept");
        assert_eq!((second.generation, second.pool.borrow().npages()), (PoolGeneration(101), PageCount(600)));
        assert_eq!(registry.next_expiry(), None, "an arrival ends the countdown");
        registry.leave(&hello(2), Left::Vanished, now);
        drop((first, second));
        registry.expire(now + GRACE);
        assert_eq!(registry.arena.free_pages(), PageCount(1024));
        let third = arrive(&mut registry, 3).expect("new again");
        assert_eq!((third.generation, third.pool.borrow().npages()), (PoolGeneration(103), PageCount(0)));
        assert_eq!(registry.report().totals.expired, 1);
    }

    #[test]
    fn an_epoch_is_used_once() {
        let mut registry = registry();
        arrive(&mut registry, 5).expect("new").pool.borrow_mut().resize(PageCount(1)).expect("room");
        assert_eq!(arrive(&mut registry, 5).err(), Some(Refused::StaleEpoch { latest: 5 }));
        assert_eq!(arrive(&mut registry, 4).err(), Some(Refused::StaleEpoch { latest: 5 }));
        registry.leave(&hello(5), Left::Vanished, Instant::now());
        assert_eq!(arrive(&mut registry, 5).err(), Some(Refused::StaleEpoch { latest: 5 }));
        assert!(arrive(&mut registry, 6).is_ok());
    }

    #[test]
    fn a_replaced_session_has_no_say() {
        let mut registry = registry();
        arrive(&mut registry, 1).expect("new").pool.borrow_mut().resize(PageCount(1)).expect("room");
        let newer = arrive(&mut registry, 2).expect("newer");
        for left in [Left::ForGood, Left::Vanished] {
            registry.leave(&hello(1), left, Instant::now());
            assert_eq!(registry.next_expiry(), None);
            assert_eq!(newer.pool.borrow().npages(), PageCount(1));
            assert_eq!(registry.report().pools.len(), 1);
        }
    }

    #[test]
    fn pools_without_slots_and_bye_leave_nothing() {
        let mut registry = registry();
        arrive(&mut registry, 1).expect("new");
        registry.leave(&hello(1), Left::Vanished, Instant::now());
        assert_eq!(registry.report().pools.len(), 0, "many clients that come and go cannot fill the registry");
        arrive(&mut registry, 1).expect("new").pool.borrow_mut().resize(PageCount(1)).expect("room");
        registry.leave(&hello(1), Left::ForGood, Instant::now());
        assert_eq!(registry.report().pools.len(), 0);
        assert_eq!(registry.arena.free_pages(), PageCount(1024));
    }
}
