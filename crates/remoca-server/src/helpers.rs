//! Helper threads of mapped pools: what takes long, or waits for a client.
//!
//! The kernel lets one thread at a time change a file, or write to it, and a client can be that thread for ever: by a write from
//! memory that never arrives (a file system that does not answer). A helper that punches the file waits until that write ends.
//!
//! 1. One change of a pool at a time (`mapped_pool.rs`), so a pool has one such thread at most.
//! 2. At most [`WORKING_MAX`] of them work at the same time. One that takes longer than a [`TURN`] waits for a client rather than
//!    works: it does not count any longer.
//! 3. Pools whose last change took longer than a turn share one place. So clients that hold their memory now and then delay each
//!    other first.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use remoca_protocol::GROWTH_MS;
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

/// Maximum number of threads that change memory at the same time.
const WORKING_MAX: usize = 3;
/// Time for which a change counts as work. A slice of 16 MiB takes a tenth of it.
const TURN: Duration = Duration::from_millis(250);
/// Time after a turn until the operator is told of a change that is held up.
const HELD_AFTER: Duration = Duration::from_secs(2);

/// Time after which a pool that grows is granted what it has got so far. Its client then asks for more.
const GROWTH: Duration = Duration::from_millis(GROWTH_MS);
/// Time for which a helper punches a file before others get its place. With the piece that it ends with, much less than a [`TURN`].
const PUNCHING: Duration = Duration::from_millis(50);

/// The places of helper threads.
#[derive(Debug)]
pub(crate) struct Helpers {
    quick: Semaphore,
    slow: Semaphore,
    /// Time after which a pool that grows is granted what it has got so far.
    pub(crate) growth: Duration,
    /// Time for which a helper punches a file before others get its place.
    pub(crate) punching: Duration,
}

/// How the changes of one pool go.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    /// Whether the last change took longer than a turn.
    is_slow: AtomicBool,
    is_held: AtomicBool,
}

impl Pace {
    /// Returns whether a change is held up, by a client in all likelihood.
    pub(crate) fn is_held(&self) -> bool {
        self.is_held.load(SeqCst)
    }
}

impl Helpers {
    pub(crate) fn new() -> Self {
        Self { quick: Semaphore::new(WORKING_MAX), slow: Semaphore::new(1), growth: GROWTH, punching: PUNCHING }
    }

    /// Runs `work` on a helper thread, and calls `held` if it is held up. Returns `None` if the server is stopping.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        pace: &Pace,
        held: impl FnOnce(),
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let places = if pace.is_slow.load(SeqCst) { &self.slow } else { &self.quick };
        let place = places.acquire().await.ok()?;
        let mut work = spawn_blocking(work);
        let done = timeout(TURN, &mut work).await;
        pace.is_slow.store(done.is_err(), SeqCst);
        if let Ok(done) = done {
            return done.ok();
        }
        drop(place);
        if let Ok(done) = timeout(HELD_AFTER, &mut work).await {
            return done.ok();
        }
        pace.is_held.store(true, SeqCst);
        held();
        let done = work.await;
        pace.is_held.store(false, SeqCst);
        done.ok()
    }
}
