//! The pool that the slots describe, and the log of sends to it.
//!
//! ```text
//! log entry: number, slot
//! ```
//! An admitted page is logged before its slot becomes valid. If the process dies or the connection breaks, the server's
//! own count of received pages shows which pages it does not have, and the slots of those pages are dropped. Numbers
//! count from `BASE`.

use super::layout::{LOG_ENTRIES, LOG_WORDS, Layout, Words, header, long, set_long, settle};
use crate::units::SlotIndex;

/// Pool that the slots describe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pool {
    /// Number of the memory server that has it, assigned by the driver.
    pub server: u32,
    pub generation: u64,
}

/// End of the log of sends at some moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogEnd {
    base: u64,
    entries: u32,
    sends: u32,
}

/// Slots whose page was lost with a connection.
#[derive(Debug)]
pub(super) enum Lost {
    /// Any page may be lost: the log does not go back far enough, or the pool's count does not match it.
    All,
    Slots(Vec<SlotIndex>),
}

/// Log of sends, with its pool.
#[derive(Clone, Copy, Debug)]
pub(super) struct SendLog {
    at: usize,
}

impl SendLog {
    pub(super) fn new(layout: &Layout) -> Self {
        Self { at: layout.log_at() }
    }

    /// Returns the pool that the slots describe, or `None` if there is none.
    pub(super) fn pool<M: Words>(self, words: &M) -> Option<Pool> {
        let pool = Pool { server: words[header::SERVER], generation: long(words, header::GENERATION) };
        (words[header::POOL_VALID] == 1).then_some(pool)
    }

    /// Sets the pool that the slots describe, and empties the log. The pool has received `sends` pages so far.
    pub(super) fn begin_pool<M: Words>(self, words: &mut M, pool: Pool, sends: u64) {
        words[header::POOL_VALID] = 0;
        settle();
        words[header::SERVER] = pool.server;
        set_long(words, header::GENERATION, pool.generation);
        self.begin(words, sends);
        settle();
        words[header::POOL_VALID] = 1;
    }

    /// Empties the log and sets its next number to `sends`.
    fn begin<M: Words>(self, words: &mut M, sends: u64) {
        set_long(words, header::BASE, sends);
        words[header::SENDS] = 0;
        words[header::LOGGED] = 0;
        words[header::TAKEN] = 0;
        words[header::TAKEN_SENDS] = 0;
    }

    /// Returns the number of SENDPAGEs for this pool since it started.
    pub(super) fn sends<M: Words>(self, words: &M) -> u64 {
        long(words, header::BASE).saturating_add(u64::from(words[header::SENDS]))
    }

    /// Logs that the page of `slot` is about to be sent.
    pub(super) fn note_send<M: Words>(self, words: &mut M, slot: u32) {
        self.note_move(words, slot);
        words[header::SENDS] += 1;
        settle();
    }

    /// Logs that a page is about to be moved to `slot`. The entry has the number of the next send.
    pub(super) fn note_move<M: Words>(self, words: &mut M, slot: u32) {
        // Every send is an entry as well, but a forged index may have more sends than entries.
        if words[header::LOGGED].max(words[header::SENDS]) == u32::MAX {
            // The log starts anew after 2^32 entries. If the connection breaks while older pages are in transit, all
            // slots are dropped.
            let sends = self.sends(words);
            match self.pool(words) {
                Some(pool) => self.begin_pool(words, pool, sends),
                None => self.begin(words, sends),
            }
        }
        let at = self.entry_at(words[header::LOGGED]);
        words[at] = words[header::SENDS];
        words[at + 1] = slot;
        settle();
        words[header::LOGGED] += 1;
        settle();
    }

    /// Returns the current end of the log.
    pub(super) fn end<M: Words>(self, words: &M) -> LogEnd {
        LogEnd { base: long(words, header::BASE), entries: words[header::LOGGED], sends: words[header::SENDS] }
    }

    /// Marks everything logged before `end` as received by the server. Ignores the end of an earlier pool's log.
    pub(super) fn note_taken<M: Words>(self, words: &mut M, end: LogEnd) {
        // If another pool or log has begun since, `end` does not apply to it.
        if end.base == long(words, header::BASE) && end.entries <= words[header::LOGGED] {
            words[header::TAKEN] = end.entries;
            words[header::TAKEN_SENDS] = end.sends;
        }
    }

    fn entry_at(self, entry: u32) -> usize {
        self.at + (entry & (LOG_ENTRIES - 1)) as usize * LOG_WORDS
    }

    /// Returns the slots whose page is missing from a pool that has received `received` pages.
    pub(super) fn lost<M: Words>(self, words: &M, received: u64) -> Lost {
        let (base, logged) = (long(words, header::BASE), words[header::LOGGED]);
        let outstanding = logged.saturating_sub(words[header::TAKEN]);
        // The oldest entry may be half overwritten.
        let entries = outstanding.min(LOG_ENTRIES - 1);
        let number = |back: u32| base.saturating_add(u64::from(words[self.entry_at(logged - back)]));
        let complete_from = match entries < outstanding {
            true => number(entries).saturating_add(1),
            false => base.saturating_add(u64::from(words[header::TAKEN_SENDS])),
        };
        if received < complete_from || received > self.sends(words) {
            return Lost::All;
        }
        let lost = (1..=entries).take_while(|back| number(*back) >= received);
        Lost::Slots(lost.map(|back| SlotIndex(words[self.entry_at(logged - back) + 1])).collect())
    }
}
