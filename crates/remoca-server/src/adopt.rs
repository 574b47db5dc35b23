//! Takes up the mapped pools of a former server of the same unit, before the arena is locked.
//!
//! Their memory is in use already, so the arena lends as many chunks from the beginning and does not lock them. What a pool
//! has beyond its granted pages is punched: the former server may have been killed while it grew or shrank.

use std::io;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use remoca_core::units::{PAGE_SIZE_U64, PageCount};

use crate::arena::{Arena, CHUNK_PAGES};
use crate::config::{Config, PageLocking};
use crate::error::StartError;
use crate::helpers::Helpers;
use crate::host;
use crate::keeper::{Keeper, Left};
use crate::mapped_pool::{MappedPool, lent_for};
use crate::memfile::PoolFile;

/// Time that a step may take in which a pool is taken up: a piece that is punched, or a slice that is locked.
const STEP_PATIENCE: Duration = Duration::from_secs(5);
const HELD: &str = "its client holds its memory by a write that does not end. The memory is the client's until that process is \
                    ended (`ls -l /proc/*/fd | grep remoca-pool` shows who has such memory)";
/// Pages that are locked in one go.
const SLICE_PAGES: u32 = 4096;

/// Creates the arena, and the mapped pools that a former server left.
pub(crate) fn arena_and_pools(
    config: &Config,
    quota: PageCount,
    keeper: &Keeper,
    helpers: &Arc<Helpers>,
    progress: &mut dyn FnMut(u64),
) -> Result<(Arc<Arena>, Vec<MappedPool>), StartError> {
    let most = usize::try_from(config.memory_bytes / PAGE_SIZE_U64).unwrap_or(usize::MAX) / CHUNK_PAGES;
    let (mut pools, mut chunks) = (Vec::new(), 0);
    let received = keeper.receive(config.locking);
    // Tells the service manager that a long start goes on; else it would end it.
    let mut going = || {
        if config.locking == PageLocking::Locked {
            progress(0);
        }
    };
    if !received.is_empty() && config.locking == PageLocking::Locked {
        // What the pools need counts against the same limit as the arena.
        let _limit = host::raised_lock_limit();
        going();
    }
    for left in received {
        let token = left.record.token;
        match take_up_apart(left, most - chunks, quota, &mut going)? {
            Ok((left, used)) => {
                chunks += used;
                pools.push(left);
            }
            Err(error) => tracing::warn!(?token, %error, "a mapped pool of the former server is ended"),
        }
    }
    let (arena, mut lent) = Arena::beside(config.memory_bytes, config.locking, chunks, progress)?;
    let mut resume = |left: Left| {
        let used = lent.split_off(lent.len().saturating_sub(lent_chunks(left.record.npages)));
        let (token, pages) = (left.record.token, left.record.npages.0);
        tracing::info!(?token, pages, "a mapped pool of the former server waits for its client");
        MappedPool::resume(left, Arc::clone(&arena), Arc::clone(helpers), quota, used)
    };
    let pools = pools.into_iter().map(&mut resume).collect();
    Ok((arena, pools))
}

fn lent_chunks(granted: PageCount) -> usize {
    (granted.0 as usize).div_ceil(CHUNK_PAGES)
}

/// What a thread tells that takes up a pool.
enum Step {
    Going,
    /// The number of chunks in place of the pool's memory, which is punched if there is an error.
    Done(PoolFile, io::Result<usize>),
}

/// Takes up a pool on a thread of its own, as its client can hold that up for ever, and calls `going` after each step. If a step takes too
/// long, the thread ends the pool as soon as it can. Returns the pool and the number of chunks in place of its memory, or why it is ended:
/// nobody will come back for it.
///
/// # Errors
/// If there is no thread for it.
fn take_up_apart(
    left: Left,
    room: usize,
    quota: PageCount,
    going: &mut dyn FnMut(),
) -> Result<io::Result<(Left, usize)>, StartError> {
    let Left { record, memory, kept } = left;
    // A step is passed on only while somebody waits for it.
    let (sender, steps) = mpsc::sync_channel(0);
    let work = move || {
        let mut going = || drop(sender.send(Step::Going));
        let taken = take_up(&memory, record.npages, room, quota, &mut going);
        if taken.is_err() {
            // Its client may still have it, but its memory is free.
            let _punched = memory.punch_telling(PageCount(0), &mut going);
        }
        if let Err(mpsc::SendError(Step::Done(memory, _))) = sender.send(Step::Done(memory, taken)) {
            let _punched = memory.punch(PageCount(0));
        }
    };
    std::thread::Builder::new().name("remoca-take-up".into()).spawn(work).map_err(StartError::Thread)?;
    let taken = loop {
        match steps.recv_timeout(STEP_PATIENCE) {
            Ok(Step::Going) => going(),
            Ok(Step::Done(memory, taken)) => break taken.map(|used| (memory, used)),
            Err(_) => break Err(io::Error::other(HELD)),
        }
    };
    if taken.is_err() {
        kept.release();
    }
    Ok(taken.map(|(memory, used)| (Left { record, memory, kept }, used)))
}

/// Locks the granted pages of a pool, and punches all others. Returns the number of chunks in place of its memory.
fn take_up(
    memory: &PoolFile,
    granted: PageCount,
    room: usize,
    quota: PageCount,
    progress: &mut dyn FnMut(),
) -> io::Result<usize> {
    let chunks = lent_chunks(granted);
    if granted > memory.pages() || granted > quota {
        return Err(io::Error::other("it is larger than a pool can be"));
    }
    if chunks > room {
        return Err(io::Error::other("it does not fit into the memory of this server (--memory)"));
    }
    memory.punch_telling(granted, progress)?;
    let mut from = PageCount(0);
    while from < granted {
        let to = PageCount(from.0.saturating_add(SLICE_PAGES).min(granted.0));
        // Huge pages stay huge. Others would have to be copied, before anybody is served.
        memory.populate(from, to, &mut false)?;
        progress();
        from = to;
    }
    match memory.allocated() <= lent_for(granted) {
        true => Ok(chunks),
        false => Err(io::Error::other("its client uses memory that it was not granted")),
    }
}
