//! Which client has which pool, on one worker thread.
//!
//! Called by the worker when a connection comes or goes; knows no socket. Owns the pools and remembers epochs.
//!
//! 1. A pool has at most one session: [`Registry::arrive`] returns the older one, to be ended before the newer begins.
//! 2. A session whose epoch is not the pool's latest changes nothing, whatever it still reports.
//! 3. A pool whose client is gone is freed after the grace time; a pool without slots, at once.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use remoca_protocol::{Hello, PageCount, PoolGeneration, Token};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::arena::Arena;
use crate::pool::Pool;
use crate::status::{PoolStatus, Totals, WorkerReport, shown};

pub(crate) struct Registry {
    arena: Arc<Arena>,
    quota: PageCount,
    grace: Duration,
    pools: HashMap<Token, Entry>,
    /// Totals of freed pools, and of sessions.
    totals: Totals,
}

struct Entry {
    pool: Rc<RefCell<Pool>>,
    generation: PoolGeneration,
    /// Latest epoch seen.
    epoch: u64,
    peer: String,
    presence: Presence,
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
pub(crate) struct Arrived {
    pub(crate) pool: Rc<RefCell<Pool>>,
    pub(crate) generation: PoolGeneration,
    /// Older session of the same client. It must have ended before the client is answered.
    pub(crate) older: Option<JoinHandle<()>>,
}

/// Refusal of an arriving client whose epoch is not newer than the latest.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct StaleEpoch {
    pub(crate) latest: u64,
}

/// How a client left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Left {
    /// Its connection is gone; it may come back.
    Vanished,
    /// It said BYE.
    ForGood,
}

impl Registry {
    pub(crate) fn new(arena: Arc<Arena>, quota: PageCount, grace: Duration) -> Self {
        Self { arena, quota, grace, pools: HashMap::new(), totals: Totals::default() }
    }

    /// Finds the pool of a client, or creates one of generation `fresh`. Records the new epoch and peer.
    pub(crate) fn arrive(&mut self, hello: &Hello, peer: String, fresh: PoolGeneration) -> Result<Arrived, StaleEpoch> {
        if let Some(entry) = self.pools.get(&hello.token)
            && hello.epoch <= entry.epoch
        {
            return Err(StaleEpoch { latest: entry.epoch });
        }
        let entry = self.pools.entry(hello.token).or_insert_with(|| Entry {
            pool: Rc::new(RefCell::new(Pool::new(Arc::clone(&self.arena), self.quota))),
            generation: fresh,
            epoch: hello.epoch,
            peer: String::new(),
            presence: Presence::Arriving,
        });
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
        Ok(Arrived { pool: Rc::clone(&entry.pool), generation: entry.generation, older })
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

    /// Keeps the pool of a vanished client for the grace period if it has pages, and frees it otherwise. Called at the
    /// end of a client's session, also of one that never began. Does nothing if a newer one has arrived.
    pub(crate) fn leave(&mut self, hello: &Hello, left: Left, now: Instant) {
        let Some(entry) = self.pools.get_mut(&hello.token) else { return };
        if entry.epoch != hello.epoch {
            return;
        }
        let keep = left == Left::Vanished && entry.pool.borrow().npages() > PageCount(0);
        if keep {
            entry.presence = Presence::Vanished(now + self.grace);
        } else if let Some(entry) = self.pools.remove(&hello.token) {
            self.totals.add(&totals_of(&entry.pool.borrow()));
        }
    }

    /// Returns the time when the next pool is to be freed, or `None` if no client is gone.
    pub(crate) fn next_expiry(&self) -> Option<Instant> {
        self.pools.values().filter_map(Entry::expiry).min()
    }

    /// Frees the pools whose clients did not come back in time.
    pub(crate) fn expire(&mut self, now: Instant) {
        let totals = &mut self.totals;
        self.pools.retain(|token, entry| {
            let expired = entry.expiry().is_some_and(|at| at <= now);
            if expired {
                let pool = entry.pool.borrow();
                tracing::info!(?token, pages = pool.npages().0, "client did not come back: pool freed");
                totals.add(&totals_of(&pool));
                totals.expired += 1;
            }
            !expired
        });
    }

    pub(crate) fn report(&self) -> WorkerReport {
        let mut totals = self.totals;
        let mut pools = Vec::new();
        for (token, entry) in &self.pools {
            let pool = entry.pool.borrow();
            totals.add(&totals_of(&pool));
            pools.push(PoolStatus {
                token: shown(token),
                peer: entry.peer.clone(),
                connected: !matches!(entry.presence, Presence::Vanished(_)),
                npages: pool.npages().0,
                pages_written: pool.written_pages(),
                gets: pool.counters.gets,
                not_found: pool.counters.not_found,
                sends: pool.counters.sends,
            });
        }
        WorkerReport { totals, pools }
    }
}

impl Entry {
    fn expiry(&self) -> Option<Instant> {
        match self.presence {
            Presence::Vanished(at) => Some(at),
            Presence::Arriving | Presence::Here(_) => None,
        }
    }
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
    use crate::config::PageLocking;

    const GRACE: Duration = Duration::from_secs(60);

    fn registry() -> Registry {
        let arena = Arena::new(4 << 20, PageLocking::Unlocked, &mut |_| ()).expect("4 MiB");
        Registry::new(arena, PageCount(1024), GRACE)
    }

    fn hello(epoch: u64) -> Hello {
        Hello { versions: VERSIONS, token: Token([1; 16]), epoch }
    }

    fn arrive(registry: &mut Registry, epoch: u64) -> Result<Arrived, StaleEpoch> {
        registry.arrive(&hello(epoch), "test".into(), PoolGeneration(100 + epoch))
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
        assert_eq!(arrive(&mut registry, 5).err(), Some(StaleEpoch { latest: 5 }));
        assert_eq!(arrive(&mut registry, 4).err(), Some(StaleEpoch { latest: 5 }));
        registry.leave(&hello(5), Left::Vanished, Instant::now());
        assert_eq!(arrive(&mut registry, 5).err(), Some(StaleEpoch { latest: 5 }));
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
