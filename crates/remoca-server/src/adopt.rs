//! Takes up the mapped pools of a former server of the same unit, before the arena is locked.
//!
//! Their memory is in use already, so the arena lends as many chunks from the beginning and does not lock them. What a pool
//! has beyond its granted pages is punched: the former server may have been killed while it grew or shrank.

use std::io;
use std::sync::Arc;

use remoca_core::units::{PAGE_SIZE_U64, PageCount};

use crate::arena::{Arena, CHUNK_PAGES};
use crate::config::{Config, PageLocking};
use crate::error::StartError;
use crate::host;
use crate::keeper::{Keeper, Left};
use crate::mapped_pool::{MappedPool, lent_for};

/// Pages that are locked in one go.
const SLICE_PAGES: u32 = 4096;

/// Creates the arena, and the mapped pools that a former server left.
pub(crate) fn arena_and_pools(
    config: &Config,
    quota: PageCount,
    keeper: &Keeper,
    progress: &mut dyn FnMut(u64),
) -> Result<(Arc<Arena>, Vec<MappedPool>), StartError> {
    let most = usize::try_from(config.memory_bytes / PAGE_SIZE_U64).unwrap_or(usize::MAX) / CHUNK_PAGES;
    let (mut pools, mut chunks) = (Vec::new(), 0);
    let received = keeper.receive(quota, config.locking);
    if !received.is_empty() && config.locking == PageLocking::Locked {
        // What the pools need counts against the same limit as the arena.
        let _limit = host::raised_lock_limit();
        progress(0);
    }
    for left in received {
        let token = left.record.token;
        match take_up(&left, most - chunks) {
            Ok(used) => {
                chunks += used;
                pools.push(left);
            }
            Err(error) => {
                tracing::warn!(?token, %error, "a mapped pool of the former server is ended");
                // Its client may still have it, but its memory is free.
                let _punched = left.memory.punch(PageCount(0));
                left.kept.release();
            }
        }
    }
    let (arena, mut lent) = Arena::beside(config.memory_bytes, config.locking, chunks, progress)?;
    let mut resume = |left: Left| {
        let used = lent.split_off(lent.len().saturating_sub(chunks_of(&left)));
        let (token, pages) = (left.record.token, left.record.npages.0);
        tracing::info!(?token, pages, "a mapped pool of the former server waits for its client");
        MappedPool::resume(left, Arc::clone(&arena), quota, used)
    };
    let pools = pools.into_iter().map(&mut resume).collect();
    Ok((arena, pools))
}

fn chunks_of(left: &Left) -> usize {
    (left.record.npages.0 as usize).div_ceil(CHUNK_PAGES)
}

/// Locks the granted pages of a pool, and punches all others. Returns the number of chunks in place of its memory.
fn take_up(left: &Left, room: usize) -> io::Result<usize> {
    let chunks = chunks_of(left);
    if chunks > room {
        return Err(io::Error::other("it does not fit into the memory of this server (--memory)"));
    }
    let granted = left.record.npages;
    left.memory.punch(granted)?;
    let mut from = PageCount(0);
    while from < granted {
        let to = PageCount(from.0.saturating_add(SLICE_PAGES).min(granted.0));
        // Huge pages stay huge. Others would have to be copied, before anybody is served.
        left.memory.populate(from, to, &mut false)?;
        from = to;
    }
    match left.memory.allocated() <= lent_for(granted) {
        true => Ok(chunks),
        false => Err(io::Error::other("its client uses memory that it was not granted")),
    }
}
