//! A mapped pool: memory of its own that its client reads and writes by itself, and the accounts of it.
//!
//! Called by the session that has the pool and by the thread of all mapped pools. What takes long (allocating, punching,
//! locking) runs on helper threads, in slices: of 16 MiB, or of 50 ms where memory is punched. So neither other clients nor other
//! pools wait for it.
//!
//! 1. A pool of N granted pages has lent N/512 chunks of the arena, rounded up, and these have no memory there. While a pool
//!    grows, a slice of chunks gives its memory up before as much is allocated here.
//! 2. Granted pages are allocated, and locked if memory is locked, before the client hears of them. Pages that are no longer
//!    granted are punched before their chunks return to the arena, and the file is seen to have no more than the other chunks
//!    would hold (`st_blocks`): the kernel may round up to a huge page, and that much is lent.
//! 3. One change of a pool's memory at a time. A change that was begun is completed, or the part of a growth that is granted at a time,
//!    whatever becomes of the session.
//! 4. The memory has one owner ever: when a pool has ended, its file is closed.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use remoca_protocol::kept_pool::KeptPool;
use remoca_protocol::{PageCount, PoolGeneration, ServerId, Token};
use tokio::sync::{Mutex, Notify, OwnedMutexGuard};
use tokio::task::spawn_blocking;
use tokio::time::sleep;

use crate::arena::{Arena, CHUNK_PAGES, LentChunk};
use crate::helpers::{Helpers, Pace};
use crate::keeper::{Keeper, Kept, Left};
use crate::memfile::PoolFile;
use crate::pool::ResizeRefusal;

/// Chunks that are populated, or brought back, in one go.
const SLICE_CHUNKS: usize = 8;
/// Pause between two pieces that are punched, in which other threads that want this processor run.
const PIECE_PAUSE: Duration = Duration::from_micros(50);
/// Least time that a piece takes which has memory. No pause follows one that has none: a file may have 65,536 of them to a TiB.
const PIECE_MIN: Duration = Duration::from_micros(20);
/// Number of times that memory is punched which a client keeps using, and the pause between them.
const PUNCHES_MAX: u32 = 50;
const PUNCH_PAUSE: Duration = Duration::from_millis(10);
/// Number of looks at which a pool may be above its limit while memory changes. While nothing changes, a look counts for half of
/// them.
const LOOKS_MAX: u32 = 10;

/// Why a size was not granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    Resize(ResizeRefusal),
    /// The client uses memory that it was not granted, or the pool has ended already.
    Ended,
}

/// What a pool is known by.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Identity {
    pub(crate) token: Token,
    /// Server that made the pool: this one, or a former one of the same unit.
    pub(crate) server_id: ServerId,
    pub(crate) generation: PoolGeneration,
}

pub(crate) struct MappedPool {
    pub(crate) identity: Identity,
    arena: Arc<Arena>,
    helpers: Arc<Helpers>,
    pace: Pace,
    memory: PoolFile,
    quota: PageCount,
    granted: AtomicU32,
    /// Maximum size, which is lowered when memory is taken back.
    limit: AtomicU32,
    epoch: AtomicU64,
    /// Origin of the latest connection.
    peer: std::sync::Mutex<String>,
    refusals: AtomicU64,
    is_over: AtomicBool,
    /// Whether pages are being allocated, or punched.
    is_changing: AtomicBool,
    /// Whether the pool has ended and had no memory then. What its client allocates later is the client's own.
    is_emptied: AtomicBool,
    /// Held while memory changes.
    lent: Arc<Mutex<Vec<LentChunk>>>,
    kept: OnceLock<Kept>,
    /// Whether the operator was told that the pool is not kept.
    is_told_of: AtomicBool,
    is_misused: AtomicBool,
    /// Notified when the session has to look at [`Self::limit`] and [`Self::is_over`].
    pub(crate) called: Notify,
    /// Notified when memory was given back.
    settled: Notify,
    /// Notified when the pool is marked as ended.
    condemned: Notify,
    /// Number of looks in a row at which the pool was above its limit.
    looks_above_limit: AtomicU32,
}

impl MappedPool {
    /// Creates a pool without slots.
    pub(crate) fn new(
        identity: Identity,
        arena: Arc<Arena>,
        helpers: Arc<Helpers>,
        quota: PageCount,
    ) -> io::Result<Self> {
        let memory = PoolFile::create(quota, arena.locking())?;
        Ok(Self::of(identity, arena, helpers, memory, quota))
    }

    /// Continues a pool of a former server. `lent` are the chunks in place of its memory.
    pub(crate) fn resume(
        left: Left,
        arena: Arc<Arena>,
        helpers: Arc<Helpers>,
        quota: PageCount,
        lent: Vec<LentChunk>,
    ) -> Self {
        let Left { record, memory, kept } = left;
        let KeptPool { token, server_id, generation, .. } = record;
        let mut pool = Self::of(Identity { token, server_id, generation }, arena, helpers, memory, quota);
        pool.lent = Arc::new(Mutex::new(lent));
        pool.granted.store(record.npages.0, SeqCst);
        pool.limit.store(record.limit.0, SeqCst);
        pool.epoch.store(record.epoch, SeqCst);
        let _new = pool.kept.set(kept);
        pool
    }

    fn of(identity: Identity, arena: Arc<Arena>, helpers: Arc<Helpers>, memory: PoolFile, quota: PageCount) -> Self {
        let quota = quota.min(memory.pages());
        Self {
            identity,
            arena,
            helpers,
            pace: Pace::default(),
            memory,
            quota,
            granted: AtomicU32::new(0),
            limit: AtomicU32::new(u32::MAX),
            epoch: AtomicU64::new(0),
            peer: std::sync::Mutex::default(),
            refusals: AtomicU64::new(0),
            is_over: AtomicBool::new(false),
            is_changing: AtomicBool::new(false),
            is_emptied: AtomicBool::new(false),
            lent: Arc::default(),
            kept: OnceLock::new(),
            is_told_of: AtomicBool::new(false),
            is_misused: AtomicBool::new(false),
            called: Notify::new(),
            settled: Notify::new(),
            condemned: Notify::new(),
            looks_above_limit: AtomicU32::new(0),
        }
    }

    /// Returns the number of pages that the client may use.
    pub(crate) fn granted(&self) -> PageCount {
        PageCount(self.granted.load(SeqCst))
    }

    /// Returns the maximum size that an operator can allow.
    pub(crate) fn quota(&self) -> PageCount {
        self.quota
    }

    /// Returns the maximum size.
    pub(crate) fn limit(&self) -> PageCount {
        self.quota.min(PageCount(self.limit.load(SeqCst)))
    }

    /// Returns the number of pages that have memory.
    pub(crate) fn allocated(&self) -> u64 {
        self.memory.allocated()
    }

    pub(crate) fn refusals(&self) -> u64 {
        self.refusals.load(SeqCst)
    }

    pub(crate) fn is_kept(&self) -> bool {
        self.kept.get().is_some()
    }

    /// Returns the latest epoch that is on record.
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch.load(SeqCst)
    }

    /// Returns the number of pages available beyond the present size. Other pools may take them first.
    pub(crate) fn available(&self) -> PageCount {
        let granted = self.granted().0;
        let chunk_pages = u32::try_from(CHUNK_PAGES).unwrap_or(u32::MAX);
        let slack = granted.next_multiple_of(chunk_pages) - granted;
        let memory = self.arena.free_pages().0.saturating_add(slack);
        PageCount(memory.min(self.limit().0.saturating_sub(granted)))
    }

    /// Waits until no change of the memory is under way.
    pub(crate) async fn settle(&self) {
        drop(self.lent.lock().await);
    }

    /// Records a new connection of the client.
    pub(crate) fn note_epoch(&self, epoch: u64, peer: &str) {
        peer.clone_into(&mut self.peer.lock().unwrap_or_else(PoisonError::into_inner));
        self.epoch.store(epoch, SeqCst);
        self.note();
    }

    /// Sets the maximum size, and calls the session if the pool is larger.
    pub(crate) fn set_limit(&self, npages: PageCount) {
        self.limit.store(npages.0, SeqCst);
        self.note();
        if self.granted() > npages {
            self.called.notify_one();
        }
    }

    /// Returns the origin of the latest connection.
    pub(crate) fn peer(&self) -> String {
        self.peer.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns once no memory above the limit is used, or the client goes on using it, or holds it. Says whether the pool exists
    /// then.
    pub(crate) async fn given_back(&self) -> bool {
        loop {
            let settled = self.settled.notified();
            if self.is_misused() || self.is_held() || self.is_emptied.load(SeqCst) {
                return false;
            }
            // A growth that has begun is undone, and has memory until then. So has a pool that has ended.
            let is_still = !self.is_changing.load(SeqCst) && !self.is_over();
            if is_still && self.allocated() <= lent_for(self.limit()) && self.granted() <= self.limit() {
                return true;
            }
            settled.await;
        }
    }

    /// Returns whether the client goes on using memory that was taken back.
    pub(crate) fn is_misused(&self) -> bool {
        self.is_misused.load(SeqCst)
    }

    /// Returns whether the client keeps everybody from changing the pool's memory.
    pub(crate) fn is_held(&self) -> bool {
        self.pace.is_held()
    }

    pub(crate) fn is_over(&self) -> bool {
        self.is_over.load(SeqCst)
    }

    /// Marks the pool as ended, and calls its session to end as well.
    pub(crate) fn condemn(&self) {
        self.is_over.store(true, SeqCst);
        self.kept.get().into_iter().for_each(Kept::void);
        self.called.notify_one();
        self.condemned.notify_waiters();
    }

    /// Returns once the pool is marked as ended.
    pub(crate) async fn over(&self) {
        loop {
            let condemned = self.condemned.notified();
            if self.is_over() {
                return;
            }
            condemned.await;
        }
    }

    /// Returns whether the pool stays above its limit whatever its client does: at two looks in a row, or at ten while memory
    /// changes. Called once a second. A client that answers in time is never above for so long.
    pub(crate) fn stays_above_limit(&self) -> bool {
        if self.granted() <= self.limit() {
            self.looks_above_limit.store(0, SeqCst);
            return false;
        }
        let weight = if self.lent.try_lock().is_ok() { LOOKS_MAX / 2 } else { 1 };
        self.looks_above_limit.fetch_add(weight, SeqCst) + weight >= LOOKS_MAX
    }

    /// Returns whether the client uses more memory than was lent for it. False while memory changes.
    pub(crate) fn overshoots(&self) -> bool {
        self.lent.try_lock().is_ok_and(|_still| self.memory.allocated() > lent_for(self.granted()))
    }

    /// Changes the size. On an error the size is as before. A pool that grows may get a part only, so that its client has its answer in
    /// time: each GiB takes a second of a processor, and others wait for theirs.
    pub(crate) async fn resize(self: Arc<Self>, npages: PageCount) -> Result<(), Refusal> {
        let began = Instant::now();
        let lent = Arc::clone(&self.lent).lock_owned().await;
        let result = if self.is_over() {
            Err(Refusal::Ended)
        } else if npages < self.granted() {
            self.is_changing.store(true, SeqCst);
            Arc::clone(&self).shrink(npages, lent).await
        } else if npages > self.limit() {
            let quota = if npages > self.quota { ResizeRefusal::Quota } else { ResizeRefusal::NoMemory };
            Err(Refusal::Resize(quota))
        } else {
            self.is_changing.store(true, SeqCst);
            let result = Arc::clone(&self).grow(npages, lent, began).await;
            self.is_changing.store(false, SeqCst);
            self.settled.notify_waiters();
            result
        };
        self.refusals.fetch_add(u64::from(result.is_err()), SeqCst);
        result
    }

    async fn grow(
        self: Arc<Self>,
        target: PageCount,
        mut lent: OwnedMutexGuard<Vec<LentChunk>>,
        began: Instant,
    ) -> Result<(), Refusal> {
        const NO_MEMORY: Refusal = Refusal::Resize(ResizeRefusal::NoMemory);
        let (before, had) = (self.granted(), lent.len());
        let more = (target.0 as usize).div_ceil(CHUNK_PAGES).saturating_sub(had);
        let arena = Arc::clone(&self.arena);
        let mut chunks = self.blocking(move || arena.take_to_lend(more)).await.flatten().ok_or(NO_MEMORY)?;
        let (mut from, mut huge) = (before, true);
        let mut slice_time = Duration::ZERO;
        while from < target && (from == before || began.elapsed() + slice_time < self.helpers.growth) {
            let slice_began = Instant::now();
            if self.is_over() || target > self.limit() {
                lent.append(&mut chunks);
                self.shed(before, had, lent).await;
                return Err(NO_MEMORY);
            }
            let slice = chunks.split_off(chunks.len().saturating_sub(SLICE_CHUNKS));
            let pool = Arc::clone(&self);
            let populated = self.blocking(move || {
                lent.extend(slice.into_iter().map(|mut chunk| {
                    chunk.give_up_memory();
                    chunk
                }));
                let covered = u32::try_from(lent.len() * CHUNK_PAGES).unwrap_or(u32::MAX);
                let to = PageCount(target.0.min(covered));
                let result = pool.memory.populate(from, to, &mut huge);
                (lent, result.map(|()| (to, huge)))
            });
            // Only a stopping server has no helper.
            let Some((still, populated)) = populated.await else { return Err(NO_MEMORY) };
            lent = still;
            // With its wait for a helper.
            slice_time = slice_began.elapsed();
            match populated {
                Ok(done) => (from, huge) = done,
                Err(error) => {
                    tracing::warn!(%error, "a mapped pool cannot grow: the host has no memory for it");
                    lent.append(&mut chunks);
                    self.shed(before, had, lent).await;
                    return Err(NO_MEMORY);
                }
            }
        }
        if self.is_over() || from > self.limit() {
            lent.append(&mut chunks);
            self.shed(before, had, lent).await;
            return Err(NO_MEMORY);
        }
        self.granted.store(from.0, SeqCst);
        self.note();
        // What it did not get in time has its memory, so nothing is locked, and no helper is needed.
        let kept = spawn_blocking(move || chunks.into_iter().filter_map(|chunk| chunk.bring_back().err()).collect());
        let kept: Vec<LentChunk> = kept.await.unwrap_or_default();
        lent.extend(kept);
        Ok(())
    }

    async fn shrink(self: Arc<Self>, target: PageCount, lent: OwnedMutexGuard<Vec<LentChunk>>) -> Result<(), Refusal> {
        // The record first: what is allocated beyond it is punched by a successor.
        self.granted.store(target.0, SeqCst);
        if target <= self.limit() {
            // The client has answered. The looks at what is taken back next begin anew.
            self.looks_above_limit.store(0, SeqCst);
        }
        self.note();
        self.shed(target, (target.0 as usize).div_ceil(CHUNK_PAGES), lent).await;
        if self.memory.allocated() > lent_for(target) { Err(Refusal::Ended) } else { Ok(()) }
    }

    /// Punches all pages from `target` on until they stay away, and brings all chunks beyond `chunks` back to the arena.
    async fn shed(self: &Arc<Self>, target: PageCount, chunks: usize, mut lent: OwnedMutexGuard<Vec<LentChunk>>) {
        let is_punched = self.punch(target).await;
        self.is_emptied.fetch_or(is_punched && target == PageCount(0) && self.is_over(), SeqCst);
        self.is_changing.store(false, SeqCst);
        self.settled.notify_waiters();
        while lent.len() > chunks {
            let at = lent.len().saturating_sub(SLICE_CHUNKS).max(chunks);
            let slice = lent.split_off(at);
            let kept = self.blocking(move || slice.into_iter().filter_map(|chunk| chunk.bring_back().err()).collect());
            let kept: Vec<LentChunk> = kept.await.unwrap_or_default();
            if !kept.is_empty() {
                // The host has no memory now. The chunks are counted as this pool's until it changes again, or ends.
                lent.extend(kept);
                return;
            }
        }
    }

    /// Punches all pages from `target` on until they stay away, for a limited time. Returns whether they did.
    async fn punch(self: &Arc<Self>, target: PageCount) -> bool {
        for attempt in 0..PUNCHES_MAX {
            self.punch_once(target).await;
            if self.memory.allocated() <= lent_for(target) {
                return true;
            }
            if attempt == 0 {
                tracing::warn!(token = ?self.identity.token, "a client uses memory that it was not granted: punched again");
            }
            sleep(PUNCH_PAUSE).await;
        }
        self.is_misused.store(true, SeqCst);
        tracing::warn!(token = ?self.identity.token, "a client goes on using memory that was taken back");
        false
    }

    /// Punches all pages from `target` on, in slices between which others get the helper's place.
    async fn punch_once(self: &Arc<Self>, target: PageCount) {
        let mut next = Some(target);
        while let Some(from) = next {
            let (pool, time) = (Arc::clone(self), self.helpers.punching);
            let punched = self.blocking(move || {
                let began = Instant::now();
                let mut piece_began = began;
                pool.memory.punch_while(from, &mut || {
                    if piece_began.elapsed() >= PIECE_MIN {
                        std::thread::sleep(PIECE_PAUSE);
                    }
                    piece_began = Instant::now();
                    piece_began - began < time
                })
            });
            next = match punched.await {
                Some(Ok(next)) => next,
                Some(Err(error)) => {
                    tracing::warn!(%error, "memory of a mapped pool cannot be punched");
                    None
                }
                // Only a stopping server has no helper.
                None => None,
            };
        }
    }

    /// Runs `work` on a helper thread. Returns `None` if the server is stopping.
    async fn blocking<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let held = || {
            tracing::warn!(
                token = ?self.identity.token,
                peer = self.peer(),
                "a client holds its pool's memory by a write that does not end: nothing can be taken from it, and this server \
                 cannot end, until that client's process is ended"
            );
            self.settled.notify_waiters();
        };
        self.helpers.run(&self.pace, held, work).await
    }

    /// Ends the pool: its pages read as zeroes, its chunks are back in the arena, and no successor hears of it.
    pub(crate) async fn end(self: Arc<Self>) {
        self.condemn();
        let lent = Arc::clone(&self.lent).lock_owned().await;
        self.granted.store(0, SeqCst);
        let pool = Arc::clone(&self);
        // It waits for the service manager, not for a client.
        let released = spawn_blocking(move || pool.kept.get().map(Kept::release));
        self.shed(PageCount(0), 0, lent).await;
        let _released = released.await;
        // A host without memory for the arena may have some later.
        while !self.lent.lock().await.is_empty() {
            sleep(Duration::from_secs(1)).await;
            let lent = Arc::clone(&self.lent).lock_owned().await;
            self.shed(PageCount(0), 0, lent).await;
        }
    }

    /// Has the service manager keep the pool, so that it outlives this process. Waits for the manager.
    pub(crate) fn keep(&self, keeper: &Keeper) {
        if self.is_kept() || self.is_over() || self.granted() == PageCount(0) || !keeper.is_on() {
            return;
        }
        match keeper.keep(&self.memory, self.record()) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Ok(kept) => {
                if let Err(second) = self.kept.set(kept) {
                    return second.release();
                }
                // What changed meanwhile is not on record yet.
                self.note();
                if self.is_over() {
                    self.kept.get().into_iter().for_each(Kept::release);
                }
            }
            Err(error) if self.is_told_of.swap(true, SeqCst) => {
                tracing::debug!(%error, "a mapped pool is still not kept")
            }
            Err(error) => {
                tracing::warn!(token = ?self.identity.token, %error, "a mapped pool would not outlive this server: the service manager does not keep it");
            }
        }
    }

    fn note(&self) {
        if let Some(kept) = self.kept.get() {
            kept.note(|| (!self.is_over()).then(|| self.record()));
        }
    }

    fn record(&self) -> KeptPool {
        let Identity { token, server_id, generation } = self.identity;
        KeptPool {
            descriptor: 0,
            token,
            server_id,
            generation,
            epoch: self.epoch(),
            npages: self.granted(),
            limit: PageCount(self.limit.load(SeqCst)),
        }
    }
}

impl AsFd for MappedPool {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }
}

/// Returns the pages that can be had in the chunks that are lent for a pool of `granted` pages. A file has no more memory.
pub(crate) fn lent_for(granted: PageCount) -> u64 {
    u64::from(granted.0).next_multiple_of(CHUNK_PAGES as u64)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests fail by panics")]
mod tests {
    use std::sync::mpsc;

    use tokio::runtime::Builder;
    use tokio::task::{LocalSet, spawn_local, yield_now};

    use super::*;
    use crate::config::PageLocking;

    /// With one thread for all helpers, which work in the order in which they were asked.
    #[test]
    fn a_pool_that_is_punched_lets_others_in_between() {
        let runtime = Builder::new_current_thread().enable_all().max_blocking_threads(1).build().unwrap();
        LocalSet::new().block_on(&runtime, async {
            let arena = Arena::new(64 << 20, PageLocking::Unlocked, &mut |_| ()).unwrap();
            let identity =
                Identity { token: Token([1; 16]), server_id: ServerId([2; 16]), generation: PoolGeneration(3) };
            let mut helpers = Helpers::new();
            (helpers.growth, helpers.punching) = (Duration::from_secs(3600), Duration::ZERO);
            let all = PageCount(16384);
            let pool = Arc::new(MappedPool::new(identity, Arc::clone(&arena), Arc::new(helpers), all).unwrap());
            Arc::clone(&pool).resize(all).await.unwrap();
            assert_eq!(pool.allocated(), 16384);

            let (open, gate) = mpsc::channel::<()>();
            let busy = spawn_blocking(move || gate.recv());
            let change = spawn_local(Arc::clone(&pool).resize(PageCount(0)));
            for _ in 0..10 {
                yield_now().await;
            }
            let theirs = Arc::clone(&pool);
            let other = spawn_blocking(move || theirs.allocated());
            open.send(()).unwrap();
            busy.await.unwrap().unwrap();
            assert_eq!(other.await.unwrap(), 3 * 4096, "one piece of four is punched");
            change.await.unwrap().unwrap();
            assert_eq!((pool.allocated(), arena.free_pages()), (0, all));
        });
    }
}
