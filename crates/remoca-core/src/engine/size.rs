//! The size of the pool: what the operator wants, what the server grants, and which slots are usable meanwhile.

use super::server::State;
use super::{Action, DiskEngine};
use crate::index::Move;
use crate::units::{Nanos, PageCount};
use std::ops::DerefMut;

/// After a refusal, or with less than was asked for, the size is asked for again after this time.
const RESIZE_RETRY_NS: u64 = 10_000_000_000;

/// Most moves on the way to the server, of which its answer to a SETSIZE shows that it has taken them. The log of sends has room
/// for them.
const MOVES_MAX: u32 = 4096;

impl<M: DerefMut<Target = [u32]>> DiskEngine<M> {
    /// Handles the size that the server gave the pool.
    pub fn handle_sized(&mut self, now: Nanos, npages: PageCount) {
        let Some(asked) = self.take_asked(now) else { return };
        self.link.granted = npages;
        self.placement.note_size(now, npages, self.link.wanted);
        // Never at once after an answer that is not what was asked for: such a server would be asked without end.
        if npages != asked || (self.link.reduced && npages < self.link.wanted) {
            self.link.retry_at = Some(now.plus_ns(RESIZE_RETRY_NS));
            self.fit_capacity();
        } else {
            self.ask_size(None);
        }
    }

    /// Handles the refusal of a size by a server that could give `available` pages more than the pool has.
    pub fn handle_size_refused(&mut self, now: Nanos, available: PageCount) {
        let Some(asked) = self.take_asked(now) else { return };
        let possible = PageCount(self.link.granted.0.saturating_add(available.0));
        if self.link.wanted < asked {
            // The operator wants less by now.
            self.ask_size(None);
        } else if possible > self.link.granted && possible < asked && !self.link.reduced {
            self.ask_size(Some(possible));
        } else {
            self.placement.note_size(now, self.link.granted, self.link.wanted);
            self.link.retry_at = Some(now.plus_ns(RESIZE_RETRY_NS));
            self.fit_capacity();
        }
    }

    /// Returns the size that the server was asked for, now that it has answered.
    fn take_asked(&mut self, now: Nanos) -> Option<PageCount> {
        let State::Up { asked: Some(asked) } = self.link.state else { return None };
        self.note_answer(now);
        self.link.state = State::Up { asked: None };
        self.link.size_owed_since = None;
        if let Some(end) = self.link.log_end.take() {
            self.index.note_taken(end);
        }
        Some(asked)
    }

    /// Sets the size of the cache; 0 turns it off and forgets everything (a later size starts cold). The index must be
    /// large enough, see [`Self::needs_layout`].
    pub fn resize(&mut self, wanted: PageCount) {
        self.link.wanted = PageCount(wanted.0.min(self.index.layout().slot_limit().0));
        if wanted.0 == 0 {
            self.index.drop_everything();
        }
        self.link.retry_at = None;
        self.placement.look_soon();
        self.ask_size(None);
    }

    /// Asks for the operator's size, or the `reduced` one that a refusal left, if the pool has another one. A smaller one is
    /// asked for when the pages have been moved out of the part that is cut off, some in each turn.
    pub(super) fn ask_size(&mut self, reduced: Option<PageCount>) {
        if self.link.state == (State::Up { asked: None }) {
            let size = reduced.unwrap_or(self.link.wanted);
            self.link.to_ask = (size != self.link.granted).then_some(size);
            if self.link.to_ask.is_some() {
                self.link.retry_at = None;
                self.link.reduced = reduced.is_some();
            }
        }
        self.fit_capacity();
    }

    /// Has the index make as many slots usable as the pool has and the operator wants, and does the first part of that.
    pub(super) fn fit_capacity(&mut self) {
        self.aim();
        self.go_on_with_size();
    }

    /// Tells the index how many slots there should be. Pages are moved only while the server has nothing to answer about sizes, and
    /// not without end.
    fn aim(&mut self) {
        let (granted, wanted, capacity) = (self.link.granted, self.link.wanted, self.index.capacity());
        if self.link.is_up() {
            self.index.lose_from(granted);
        }
        self.index.aim(match self.link.state {
            State::Down => capacity,
            State::Up { asked: None } if self.link.moves < MOVES_MAX => granted.min(wanted),
            State::Up { asked } => granted.min(asked.unwrap_or(granted)).min(wanted.max(capacity)),
        });
    }

    /// Does the next part of a change of size; SETSIZE follows where it was for that, or where many pages were moved.
    pub(super) fn go_on_with_size(&mut self) {
        let (actions, moves) = (&mut self.actions, &mut self.link.moves);
        self.index.resize(self.slots_per_turn.min(MOVES_MAX), |Move { from, to }| {
            *moves += 1;
            actions.push_back(Action::MovePage { from, to });
        });
        let capacity = self.index.capacity();
        match self.link.to_ask {
            Some(size) if capacity <= size => self.set_size(size),
            Some(_) if self.link.moves >= MOVES_MAX => self.set_size(capacity),
            _ if self.link.moves >= MOVES_MAX => self.aim(),
            _ => {}
        }
    }

    fn set_size(&mut self, size: PageCount) {
        self.link.to_ask = None;
        self.link.moves = 0;
        self.link.state = State::Up { asked: Some(size) };
        self.link.log_end = Some(self.index.log_end());
        self.actions.push_back(Action::SetSize(size));
        self.aim();
    }
}
