//! A memory server as the engine's target sees it: a pool whose pages are one byte each, and which may never have
//! received the last messages sent to it.

use remoca_core::engine::PoolOffer;
use remoca_core::units::{PageCount, SlotIndex};
use std::collections::HashMap;

#[derive(Default)]
pub struct Pool {
    pub npages: PageCount,
    generation: u64,
    slots: HashMap<u32, u8>,
    pub sends: u64,
    /// Slots and number of SENDPAGEs before each of the last messages.
    history: Vec<(HashMap<u32, u8>, u64)>,
}

impl Pool {
    pub fn page(&self, slot: SlotIndex) -> Option<u8> {
        self.slots.get(&slot.0).copied()
    }

    pub fn store(&mut self, slot: SlotIndex, content: u8) {
        self.history.push((self.slots.clone(), self.sends));
        self.sends += 1;
        // The pool may be smaller than the client knows.
        if slot.0 < self.npages.0 {
            self.slots.insert(slot.0, content);
        }
    }

    pub fn relocate(&mut self, from: SlotIndex, to: SlotIndex) {
        self.history.push((self.slots.clone(), self.sends));
        match self.slots.remove(&from.0) {
            Some(content) => drop(self.slots.insert(to.0, content)),
            None => drop(self.slots.remove(&to.0)),
        }
    }

    pub fn resize(&mut self, npages: PageCount) {
        self.npages = npages;
        self.slots.retain(|slot, _| *slot < npages.0);
    }

    /// Marks all messages sent so far as arrived, because the server has answered. [`Self::lose`] no longer affects
    /// them.
    pub fn note_answer(&mut self) {
        self.history.clear();
    }

    /// Undoes the last `count` messages, as if they had been lost. Messages before the last answer are never undone.
    pub fn lose(&mut self, count: u8) {
        for _ in 0..count {
            if let Some((slots, sends)) = self.history.pop() {
                (self.slots, self.sends) = (slots, sends);
            }
        }
        self.history.clear();
    }

    /// Resets the pool.
    pub fn restart(&mut self, npages: PageCount) {
        *self = Self { generation: self.generation + 1, npages, ..Self::default() };
    }

    pub fn offer(&self, available: PageCount) -> PoolOffer {
        let Self { npages, generation, sends, .. } = *self;
        PoolOffer { generation, npages, available, sends_received: sends }
    }
}
