//! The cache below the guest, by its policy.

use super::adaptive::Adaptive;
use super::fixed::Fixed;
use super::ids::{Id, Key};
use super::lru::Lru;
use super::types::{Found, Pages, PolicyKind};

pub(super) enum Cache {
    Lru(Lru),
    Adaptive(Box<Adaptive>),
    /// Which blocks hit is known at the end.
    Fixed(Fixed, Pages),
}

impl Cache {
    pub(super) fn new(kind: PolicyKind, pages: Pages) -> Self {
        match kind {
            PolicyKind::Lru => Self::Lru(Lru::new(pages)),
            PolicyKind::Adaptive => Self::Adaptive(Box::new(Adaptive::new(pages))),
            PolicyKind::Fixed => Self::Fixed(Fixed::default(), pages),
        }
    }

    pub(super) fn reach(&mut self, count: usize) {
        match self {
            Self::Lru(lru) => lru.reach(count),
            Self::Adaptive(adaptive) => adaptive.reach(count),
            Self::Fixed(fixed, _) => fixed.reach(count),
        }
    }

    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Lru(lru) => lru.bytes(),
            Self::Adaptive(adaptive) => adaptive.bytes(),
            Self::Fixed(fixed, _) => fixed.bytes(),
        }
    }

    /// Answers a read of a block that the guest does not hold.
    #[inline]
    pub(super) fn read(&mut self, id: Id, key: Key) -> Found {
        match self {
            Self::Lru(lru) => lru.read(id),
            Self::Adaptive(adaptive) => adaptive.read(id, key),
            Self::Fixed(fixed, _) => {
                fixed.read(id);
                Found::Nowhere
            }
        }
    }

    /// Begins a read of some blocks, where each is admitted as it is read ([`Self::read_and_keep`]).
    #[inline]
    pub(super) fn begin_read(&mut self, ids: &[Id]) {
        if let Self::Adaptive(adaptive) = self {
            adaptive.begin_read(ids);
        }
    }

    /// Answers a read, and makes the block the newest at once.
    #[inline]
    pub(super) fn read_and_keep(&mut self, id: Id) -> Found {
        match self {
            Self::Lru(lru) => lru.read_and_keep(id),
            Self::Adaptive(adaptive) => adaptive.read_and_keep(id),
            Self::Fixed(fixed, _) => {
                fixed.read(id);
                fixed.evicted(id);
                Found::Nowhere
            }
        }
    }

    /// Admits a block that the guest evicts.
    #[inline]
    pub(super) fn evicted(&mut self, id: Id, key: Key) {
        match self {
            Self::Lru(lru) => lru.evicted(id),
            Self::Adaptive(adaptive) => adaptive.evicted(id, key),
            Self::Fixed(fixed, _) => fixed.evicted(id),
        }
    }

    /// Drops a block whose content is another one now.
    #[inline]
    pub(super) fn forget(&mut self, id: Id) {
        match self {
            Self::Lru(lru) => lru.forget(id),
            Self::Adaptive(adaptive) => adaptive.forget(id),
            Self::Fixed(fixed, _) => fixed.forget(id),
        }
    }
}
