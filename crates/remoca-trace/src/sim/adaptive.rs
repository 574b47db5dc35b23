//! The engine's cache with its own insertion policy ([`remoca_core::engine::Policy`], decision 0037), over two tiers.
//!
//! As in the engine, a page that hit stays and is the next to be discarded; an evicted page that is still cached is a
//! duplicate that need not travel, or rises to the local tier if it hit in the remote one; what the policy passes over is not
//! cached; a page that hit and is displaced from the local tier does not travel. Where no evictions are seen, blocks are
//! admitted as they are read (decision 0015): hits become the newest, and so do the blocks of one read in 32 of those that
//! miss. The blocks of the others enter as the next to be discarded; if they are several, only as long as there is room.

use super::ids::{Id, Key};
use super::lists::Lists;
use super::types::{Found, Pages};
use remoca_core::engine::{Insertion, Policy};
use remoca_core::fingerprint::Fingerprint;
use remoca_core::units::PageCount;

const LOCAL: usize = 0;
const REMOTE: usize = 1;
/// Number of reads that miss for each one whose blocks enter as the newest, where blocks are admitted as they are read.
const BIMODAL: u64 = 32;

pub(super) struct Adaptive {
    lists: Lists<2>,
    /// Whether each block was read since it entered.
    was_hit: Vec<bool>,
    pages: Pages,
    policy: Policy,
    /// Number of reads that missed, where blocks are admitted as they are read.
    misses: u64,
    /// The read under way there.
    under_way: UnderWay,
    /// Pages sent to the remote tier.
    pub(super) sent: u64,
    pub(super) passed_over: u64,
}

/// A read whose blocks are admitted.
#[derive(Clone, Copy, Default)]
struct UnderWay {
    hits: bool,
    /// Whether its blocks become the newest.
    enters_first: bool,
    is_of_one: bool,
}

/// Returns a fingerprint that stands for the content of a block.
fn content(key: Key) -> Fingerprint {
    let mixed = (key ^ key >> 31).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let [a, b, c, d, e, f, g, h] = (mixed ^ mixed >> 32).to_le_bytes();
    let [i, j, k, l, ..] = key.to_le_bytes();
    Fingerprint([[a, b, c, d], [e, f, g, h], [i, j, k, l]].map(u32::from_le_bytes))
}

impl Adaptive {
    pub(super) fn new(pages: Pages) -> Self {
        let mut policy = Policy::new();
        policy.fit(PageCount(u32::try_from(pages.local + pages.remote).unwrap_or(u32::MAX)));
        let (lists, under_way) = (Lists::new(), UnderWay::default());
        Self { lists, was_hit: Vec::new(), pages, policy, misses: 0, under_way, sent: 0, passed_over: 0 }
    }

    pub(super) fn reach(&mut self, count: usize) {
        self.lists.reach(count);
        self.was_hit.resize(count.max(self.was_hit.len()), false);
    }

    pub(super) fn bytes(&self) -> usize {
        self.lists.bytes() + self.was_hit.capacity()
    }

    /// Returns the policy in force.
    pub(super) fn in_force(&self) -> Insertion {
        self.policy.in_force()
    }

    fn found(&self, id: Id) -> (Found, Option<usize>) {
        match self.lists.list_of(id) {
            Some(REMOTE) => (Found::Remote, Some(REMOTE)),
            Some(list) => (Found::Local, Some(list)),
            None => (Found::Nowhere, None),
        }
    }

    /// Answers a read. A page that hits is the next to be discarded.
    pub(super) fn read(&mut self, id: Id, key: Key) -> Found {
        let content = content(key);
        let (found, list) = self.found(id);
        if self.policy.samples(content) {
            self.policy.note_read(content, list.is_some());
        }
        if let Some(list) = list {
            self.was_hit[id as usize] = true;
            self.lists.remove(id);
            self.lists.push_back(list, id);
        }
        found
    }

    /// Notes that the guest evicts a block.
    pub(super) fn evicted(&mut self, id: Id, key: Key) {
        let content = content(key);
        if self.policy.samples(content) {
            self.policy.note_eviction(content);
        }
        if let Some(list) = self.lists.list_of(id) {
            let was_hit = std::mem::take(&mut self.was_hit[id as usize]);
            if list == REMOTE && was_hit && self.pages.local > 0 {
                self.lists.remove(id);
                self.enter(id);
            } else {
                self.lists.move_to_front(list, id);
            }
            return;
        }
        if self.is_full() && self.policy.in_force() == Insertion::Bimodal && !self.policy.inserts() {
            self.passed_over += 1;
            return;
        }
        self.enter(id);
    }

    /// Begins a read of some blocks where no evictions are seen.
    pub(super) fn begin_read(&mut self, ids: &[Id]) {
        let hits = ids.iter().all(|id| self.lists.list_of(*id).is_some());
        self.misses += u64::from(!hits);
        self.under_way =
            UnderWay { hits, enters_first: self.misses.is_multiple_of(BIMODAL), is_of_one: ids.len() == 1 };
    }

    /// Answers a read where no evictions are seen, and admits the block.
    pub(super) fn read_and_keep(&mut self, id: Id) -> Found {
        let UnderWay { hits, enters_first, is_of_one } = self.under_way;
        let (found, list) = self.found(id);
        match list {
            Some(list) if hits || enters_first => {
                self.was_hit[id as usize] = false;
                self.lists.move_to_front(list, id);
            }
            // The disk answers all blocks of the read.
            Some(list) => {
                self.was_hit[id as usize] = true;
                self.lists.remove(id);
                self.lists.push_back(list, id);
            }
            None if enters_first => self.enter(id),
            None if is_of_one || !self.is_full() => self.enter_last(id),
            None => {}
        }
        found
    }

    fn is_full(&self) -> bool {
        self.lists.len(LOCAL) + self.lists.len(REMOTE) >= self.pages.local + self.pages.remote
    }

    /// Makes a block that is in no list the newest of all.
    fn enter(&mut self, id: Id) {
        self.was_hit[id as usize] = false;
        self.lists.push_front(LOCAL, id);
        self.settle();
    }

    /// Lets a block, which the guest holds, take the place of the one that is to be discarded next, or a free one.
    fn enter_last(&mut self, id: Id) {
        let Pages { local, remote } = self.pages;
        let list = if self.lists.len(LOCAL) < local || remote == 0 { LOCAL } else { REMOTE };
        if self.lists.len(list) >= [local, remote][list] {
            self.lists.pop_back(list);
        }
        if [local, remote][list] > 0 {
            self.sent += u64::from(list == REMOTE);
            self.was_hit[id as usize] = true;
            self.lists.push_back(list, id);
        }
    }

    /// Displaces what is too much in the local tier, and then in the remote one.
    fn settle(&mut self) {
        if self.lists.len(LOCAL) <= self.pages.local {
            return;
        }
        let Some(victim) = self.lists.pop_back(LOCAL) else { return };
        if self.pages.remote == 0 || self.was_hit[victim as usize] {
            return;
        }
        self.sent += 1;
        self.lists.push_front(REMOTE, victim);
        if self.lists.len(REMOTE) > self.pages.remote {
            self.lists.pop_back(REMOTE);
        }
    }

    /// Drops a block whose content is another one now.
    pub(super) fn forget(&mut self, id: Id) {
        self.lists.remove(id);
    }
}
