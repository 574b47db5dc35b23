//! The pools that the slots describe, and the log of sends to them.
//!
//! ```text
//! log entry: number, slot, pool
//! ```
//! The log is one for all pools, which number their sends apart. An admitted page is logged before its slot becomes valid. If the process dies or the connection breaks, the server's
//! own count of received pages shows which pages it does not have, and the slots of those pages are dropped. Numbers
//! count from `BASE`.

use super::layout::{LOG_ENTRIES, LOG_WORDS, Layout, Words, header, long, of_pool, pool_word, set_long, settle};
use crate::units::{PoolIndex, SlotIndex};

/// Pool that slots describe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pool {
    /// Number of the memory server that has it, assigned by the driver.
    pub server: u32,
    pub generation: u64,
}

/// End of a pool's log of sends at some moment.
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

    /// Returns the pool of this number that slots describe, or `None` if there is none.
    pub(super) fn pool<M: Words>(self, words: &M, pool: PoolIndex) -> Option<Pool> {
        let server = words[pool_word(pool, of_pool::SERVER)];
        let generation = long(words, pool_word(pool, of_pool::GENERATION));
        (words[pool_word(pool, of_pool::VALID)] == 1).then_some(Pool { server, generation })
    }

    /// Sets the pool that the slots of this number describe, and empties its log. It has received `sends` pages so far.
    pub(super) fn begin_pool<M: Words>(self, words: &mut M, number: PoolIndex, pool: Pool, sends: u64) {
        self.begin_log(words, number, pool, sends, false);
    }

    fn begin_log<M: Words>(self, words: &mut M, number: PoolIndex, pool: Pool, sends: u64, is_in_doubt: bool) {
        self.end_pool(words, number);
        words[pool_word(number, of_pool::SERVER)] = pool.server;
        set_long(words, pool_word(number, of_pool::GENERATION), pool.generation);
        self.begin(words, number, sends, is_in_doubt);
        settle();
        words[pool_word(number, of_pool::VALID)] = 1;
    }

    /// Forgets the pool of this number.
    pub(super) fn end_pool<M: Words>(self, words: &mut M, number: PoolIndex) {
        words[pool_word(number, of_pool::VALID)] = 0;
        settle();
    }

    /// Empties the log of a pool and sets its next number to `sends`. With `is_in_doubt`, earlier moves may not have arrived: all
    /// is lost with the connection, until a page of the new log has arrived after them.
    fn begin<M: Words>(self, words: &mut M, pool: PoolIndex, sends: u64, is_in_doubt: bool) {
        set_long(words, pool_word(pool, of_pool::BASE), sends);
        words[pool_word(pool, of_pool::SENDS)] = 0;
        words[pool_word(pool, of_pool::TAKEN)] = words[header::LOGGED];
        words[pool_word(pool, of_pool::TAKEN_SENDS)] = u32::from(is_in_doubt);
        words[pool_word(pool, of_pool::MOVED)] = u32::from(is_in_doubt);
    }

    fn base<M: Words>(self, words: &M, pool: PoolIndex) -> u64 {
        long(words, pool_word(pool, of_pool::BASE))
    }

    /// Returns the number of SENDPAGEs for this pool since it started.
    pub(super) fn sends<M: Words>(self, words: &M, pool: PoolIndex) -> u64 {
        self.base(words, pool).saturating_add(u64::from(words[pool_word(pool, of_pool::SENDS)]))
    }

    /// Logs that the page of `slot` is about to be sent to its pool.
    pub(super) fn note_send<M: Words>(self, words: &mut M, pool: PoolIndex, slot: u32) {
        self.add(words, pool, slot);
        words[pool_word(pool, of_pool::SENDS)] += 1;
        settle();
    }

    /// Logs that a page is about to be moved to `slot` of a pool. The entry has the number of the next send.
    pub(super) fn note_move<M: Words>(self, words: &mut M, pool: PoolIndex, slot: u32) {
        self.add(words, pool, slot);
        words[pool_word(pool, of_pool::MOVED)] = words[header::LOGGED];
        settle();
    }

    fn add<M: Words>(self, words: &mut M, pool: PoolIndex, slot: u32) {
        // Every send is an entry as well, but a forged index may have more sends than entries.
        if words[header::LOGGED].max(words[pool_word(pool, of_pool::SENDS)]) == u32::MAX {
            self.begin_anew(words);
        }
        let at = self.entry_at(words[header::LOGGED]);
        words[at] = words[pool_word(pool, of_pool::SENDS)];
        words[at + 1] = slot;
        words[at + 2] = u32::from(pool.0);
        settle();
        words[header::LOGGED] += 1;
        settle();
    }

    /// Empties the log, which starts anew after 2^32 entries. If a connection breaks while older pages or moves are in transit,
    /// all slots of its pool are dropped.
    fn begin_anew<M: Words>(self, words: &mut M) {
        let of = |pool| (pool, self.pool(words, pool), self.sends(words, pool), self.has_open_moves(words, pool));
        let pools: Vec<_> = PoolIndex::all().map(of).collect();
        pools.iter().for_each(|(pool, ..)| self.end_pool(words, *pool));
        words[header::LOGGED] = 0;
        for (number, pool, sends, is_in_doubt) in pools {
            match pool {
                Some(pool) => self.begin_log(words, number, pool, sends, is_in_doubt),
                None => self.begin(words, number, sends, is_in_doubt),
            }
        }
    }

    /// Returns whether moves are not known to have arrived.
    fn has_open_moves<M: Words>(self, words: &M, pool: PoolIndex) -> bool {
        words[pool_word(pool, of_pool::MOVED)] > words[pool_word(pool, of_pool::TAKEN)]
    }

    /// Returns the current end of the log of a pool.
    pub(super) fn end<M: Words>(self, words: &M, pool: PoolIndex) -> LogEnd {
        let sends = words[pool_word(pool, of_pool::SENDS)];
        LogEnd { base: self.base(words, pool), entries: words[header::LOGGED], sends }
    }

    /// Marks everything logged for a pool before `end` as received by its server. Ignores the end of an earlier pool's log.
    pub(super) fn note_taken<M: Words>(self, words: &mut M, pool: PoolIndex, end: LogEnd) {
        // If another pool or log has begun since, `end` does not apply to it.
        let taken = words[pool_word(pool, of_pool::TAKEN)];
        if end.base == self.base(words, pool) && (taken..=words[header::LOGGED]).contains(&end.entries) {
            words[pool_word(pool, of_pool::TAKEN)] = end.entries;
            words[pool_word(pool, of_pool::TAKEN_SENDS)] = end.sends;
        }
    }

    fn entry_at(self, entry: u32) -> usize {
        self.at + (entry & (LOG_ENTRIES - 1)) as usize * LOG_WORDS
    }

    /// Returns the slots whose page is missing from a pool that has received `received` pages.
    pub(super) fn lost<M: Words>(self, words: &M, pool: PoolIndex, received: u64) -> Lost {
        let (base, logged) = (self.base(words, pool), words[header::LOGGED]);
        let outstanding = logged.saturating_sub(words[pool_word(pool, of_pool::TAKEN)]);
        // The oldest entry may be half overwritten.
        let entries = outstanding.min(LOG_ENTRIES - 1);
        let number = |at: usize| base.saturating_add(u64::from(words[at]));
        let of_pool = |at: &usize| words[at + 2] == u32::from(pool.0);
        // From the newest to the oldest.
        let own = (1..=entries).map(|back| self.entry_at(logged - back)).filter(of_pool);
        let complete_from = if entries == outstanding {
            base.saturating_add(u64::from(words[pool_word(pool, of_pool::TAKEN_SENDS)]))
        } else if let Some(oldest) = own.clone().last() {
            number(oldest).saturating_add(1)
        } else if self.has_open_moves(words, pool) {
            // The pool's count does not tell whether a move has arrived that nothing was sent after.
            return Lost::All;
        } else {
            self.sends(words, pool)
        };
        if received < complete_from || received > self.sends(words, pool) {
            return Lost::All;
        }
        let lost = own.take_while(|at| number(*at) >= received);
        Lost::Slots(lost.map(|at| SlotIndex(words[at + 1])).collect())
    }
}
