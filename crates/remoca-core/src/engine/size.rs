//! The size of the pool: what the operator wants, what the server grants, and which slots are usable meanwhile.

use super::server::State;
use super::{Action, DiskEngine};
use crate::index::Move;
use crate::units::{Nanos, PageCount};
use std::ops::DerefMut;

/// After a refusal, or with less than was asked for, the size is asked for again after this time.
const RESIZE_RETRY_NS: u64 = 10_000_000_000;

impl<M: DerefMut<Target = [u32]>> DiskEngine<M> {
    /// The server gave the pool this size.
    pub fn handle_sized(&mut self, now: Nanos, npages: PageCount) {
        let Some(asked) = self.take_asked(now) else { return };
        self.link.granted = npages;
        self.placement.note_size(now, npages, self.link.wanted);
        self.fit_capacity();
        // Never at once after an answer that is not what was asked for: such a server would be asked without end.
        if npages != asked || (self.link.reduced && npages < self.link.wanted) {
            self.link.retry_at = Some(now.plus_ns(RESIZE_RETRY_NS));
        } else {
            self.ask_size(None);
        }
    }

    /// The server refused a size, and could give `available` pages more than the pool has.
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
        }
    }

    /// The size that the server was asked for, now that it has answered.
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

    /// Sends SETSIZE if the pool has another size than the operator's, or the `reduced` one that a refusal left. Pages
    /// are moved out of the part that a shrink cuts off first.
    pub(super) fn ask_size(&mut self, reduced: Option<PageCount>) {
        let size = reduced.unwrap_or(self.link.wanted);
        if self.link.state != (State::Up { asked: None }) || size == self.link.granted {
            return;
        }
        self.link.retry_at = None;
        self.link.reduced = reduced.is_some();
        if size < self.index.capacity() {
            let actions = &mut self.actions;
            self.index.set_capacity(size, |Move { from, to }| actions.push_back(Action::MovePage { from, to }));
        }
        self.link.state = State::Up { asked: Some(size) };
        self.link.log_end = Some(self.index.log_end());
        self.actions.push_back(Action::SetSize(size));
    }

    /// Usable are the slots that the pool has; pages in others are given up.
    pub(super) fn fit_capacity(&mut self) {
        let usable = self.link.granted;
        // None is outside else, and the queue of a large cache is long.
        if usable < self.index.capacity() {
            let outside: Vec<_> = self.index.queue().map(|(slot, _)| slot).filter(|slot| slot.0 >= usable.0).collect();
            for slot in outside {
                self.index.drop_slot(slot);
            }
        }
        self.index.set_capacity(usable, |_| {});
    }
}
