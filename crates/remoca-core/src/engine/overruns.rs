//! The overrun budget of a guest: how many of its reads may take clearly longer than the disk's slow reads.
//!
//! An *overrun* is a read that waited for a memory server, and so took clearly longer than the disk alone would have
//! taken. The promise is about the guest, so all pools share the budget. The pool whose overrun finds it spent is left
//! alone. Decision 0022.

/// Token bucket of reads that may take clearly longer than the disk's slow reads. It allows [`Self::BURST`] at once, and one
/// per [`Self::OVERRUN_COST`] reads. With 10 overruns in 10,000 reads a guest's p99.9 would grow; this allows 8.
#[derive(Debug)]
pub(super) struct OverrunBudget {
    tokens: u32,
}

impl Default for OverrunBudget {
    fn default() -> Self {
        Self { tokens: Self::CAPACITY }
    }
}

impl OverrunBudget {
    const OVERRUN_COST: u32 = 2500;
    const BURST: u32 = 4;
    const CAPACITY: u32 = Self::OVERRUN_COST * Self::BURST;

    /// Adds a token for an answered guest read.
    pub(super) fn note_read(&mut self) {
        self.tokens = (self.tokens + 1).min(Self::CAPACITY);
    }

    /// Spends the budget of one overrun. Returns whether too little is left for another one.
    pub(super) fn note_overrun(&mut self) -> bool {
        self.tokens = self.tokens.saturating_sub(Self::OVERRUN_COST);
        self.tokens < Self::OVERRUN_COST
    }

    /// Returns whether at least half of the overruns are allowed again.
    pub(super) fn is_half_full(&self) -> bool {
        self.tokens >= Self::CAPACITY / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn four_overruns_are_allowed_and_one_more_for_every_2500_reads() {
        let mut budget = OverrunBudget::default();
        for _ in 0..2 {
            assert!(budget.is_half_full());
            assert!((0..3).all(|_| !budget.note_overrun()) && budget.note_overrun(), "the fourth is the last");
            (0..20_000).for_each(|_| budget.note_read());
        }
        assert!((0..4).any(|_| budget.note_overrun()) && budget.note_overrun(), "none is left");
        (0..4999).for_each(|_| budget.note_read());
        assert!(!budget.is_half_full());
        budget.note_read();
        assert!(budget.is_half_full() && !budget.note_overrun() && budget.note_overrun());
    }
}
