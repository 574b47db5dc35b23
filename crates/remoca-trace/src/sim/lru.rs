//! An exclusive cache of two tiers, both LRU: evicted blocks enter the local tier, and what is displaced from there the remote one.

use super::ids::Id;
use super::lists::Lists;
use super::types::{Found, Pages};

const LOCAL: usize = 0;
const REMOTE: usize = 1;

pub(super) struct Lru {
    lists: Lists<2>,
    pages: Pages,
    /// Pages sent to the remote tier.
    pub(super) sent: u64,
}

impl Lru {
    pub(super) fn new(pages: Pages) -> Self {
        Self { lists: Lists::new(), pages, sent: 0 }
    }

    pub(super) fn reach(&mut self, count: usize) {
        self.lists.reach(count);
    }

    pub(super) fn bytes(&self) -> usize {
        self.lists.bytes()
    }

    /// Takes a block that the guest reads.
    #[inline]
    pub(super) fn read(&mut self, id: Id) -> Found {
        match self.lists.remove(id) {
            Some(LOCAL) => Found::Local,
            Some(_) => Found::Remote,
            None => Found::Nowhere,
        }
    }

    /// Takes a block that the guest reads, and makes it the newest at once.
    #[inline]
    pub(super) fn read_and_keep(&mut self, id: Id) -> Found {
        if self.lists.list_of(id) == Some(LOCAL) {
            self.lists.move_to_front(LOCAL, id);
            return Found::Local;
        }
        let found = self.read(id);
        self.evicted(id);
        found
    }

    /// Makes a block that the guest evicts the newest.
    #[inline]
    pub(super) fn evicted(&mut self, id: Id) {
        self.lists.remove(id);
        self.lists.push_front(LOCAL, id);
        if self.lists.len(LOCAL) <= self.pages.local {
            return;
        }
        if let Some(victim) = self.lists.pop_back(LOCAL)
            && self.pages.remote > 0
        {
            self.sent += 1;
            self.lists.push_front(REMOTE, victim);
            if self.lists.len(REMOTE) > self.pages.remote {
                self.lists.pop_back(REMOTE);
            }
        }
    }

    /// Drops a block whose content is another one now.
    #[inline]
    pub(super) fn forget(&mut self, id: Id) {
        self.lists.remove(id);
    }
}
