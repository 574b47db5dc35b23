//! Evicted pages: admitted if their content is what the disk holds for some block, and advice to the agent where
//! nothing ever is.

use super::{DiskEngine, Evicted};
use crate::index::{Offer, Place};
use crate::rules::Rule;
use std::ops::DerefMut;

/// Pages in one window of the advice at full rate.
const WINDOW: u32 = 4096;
/// The agent is never told to send less than one page of so many.
const ADVICE_MAX: u32 = 1024;

/// How many of the guest's evictions are known content, in windows: what the port advises its agent to send.
#[derive(Debug, Default)]
pub(super) struct Feedback {
    received: u32,
    matched: u32,
    /// 0: everything; else one page of so many.
    one_of: u32,
}

impl Feedback {
    fn note(&mut self, matched: bool) {
        self.received += 1;
        self.matched += u32::from(matched);
        let window = (WINDOW / self.one_of.max(1)).max(64);
        if self.received < window {
            return;
        }
        // Less than 2 % matches: four times less. More than 10 %: everything again.
        if self.matched * 50 < self.received {
            self.one_of = (self.one_of.max(1) * 4).min(ADVICE_MAX);
        } else if self.matched * 10 > self.received {
            self.one_of = 0;
        }
        (self.received, self.matched) = (0, 0);
    }
}

impl<M: DerefMut<Target = [u32]>> DiskEngine<M> {
    /// Handles `page`, which the guest evicted (4 KiB, copied out of guest memory). With [`Evicted::Admit`] the caller
    /// sends it.
    pub fn handle_evicted(&mut self, page: &[u8]) -> Evicted {
        self.sources.note_eviction();
        let evicted = self.judge(page);
        self.stats.evictions_reported += 1;
        match evicted {
            Evicted::Admit(_) => {
                self.stats.evictions_admitted += 1;
                self.link.note_send();
            }
            Evicted::Duplicate => self.stats.evictions_duplicate += 1,
            Evicted::Zero => self.stats.evictions_zero += 1,
            Evicted::Unmatched => self.stats.evictions_unmatched += 1,
            Evicted::Dropped => self.stats.evictions_dropped += 1,
        }
        self.feedback.note(evicted != Evicted::Unmatched);
        evicted
    }

    pub(super) fn judge(&mut self, page: &[u8]) -> Evicted {
        if !self.is_enabled() {
            return Evicted::Dropped;
        }
        let content = self.prints.page(page);
        if content == self.prints.zero() {
            return Evicted::Zero;
        }
        if !self.rules.hold(Rule::AdmissionCheck)
            && !self.index.is_known_content(content)
            && let Some(block) = self.index.any_resident()
        {
            self.index.learn(block, content);
        }
        if !self.may_send() {
            return if self.index.cached(content).is_some() {
                Evicted::Duplicate
            } else if self.index.is_known_content(content) {
                Evicted::Dropped
            } else {
                Evicted::Unmatched
            };
        }
        match self.index.offer(content, Place::Tail) {
            Offer::Admitted(slot) => Evicted::Admit(slot),
            Offer::Duplicate => Evicted::Duplicate,
            Offer::Unmatched => Evicted::Unmatched,
            Offer::NoSlot => Evicted::Dropped,
        }
    }

    /// Returns what the agent should send: 0 everything, else one page of so many (at most 1024). Nothing is wanted
    /// while the cache is off.
    pub fn advice(&self) -> u32 {
        if self.is_enabled() { self.feedback.one_of } else { ADVICE_MAX }
    }
}
