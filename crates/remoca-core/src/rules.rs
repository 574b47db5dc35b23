//! Safety rules of the engine. A test build can omit one rule at a time, to prove that the tests notice its absence.
//!
//! Without the feature `ablation`, [`Rules::hold`] is a constant `true` and the compiler removes every other path.

/// Rule whose omission the tests must catch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// A read that a write overlapped sets no fingerprint, however late it completes.
    ReadOverlappedByWrite,
    /// Writes that overlapped in flight leave their blocks without a fingerprint.
    OverlappingWrites,
    /// A write that covers part of a block leaves the block without a fingerprint.
    PartialWrite,
    /// A discard leaves blocks unknown, not zero.
    DiscardUnknown,
    /// A write makes the blocks it touches unreachable before it is issued.
    Invalidation,
    /// A slot with an outstanding request is not reused.
    PinnedSlot,
    /// An evicted page is admitted only if the disk holds its content for some block.
    AdmissionCheck,
    /// A fetched page is served only if it has the requested fingerprint.
    FetchCheck,
    /// A pool is identified by its server and its generation, not by the generation alone.
    PoolOfOneServer,
    /// A page in transit on a connection that broke counts as not stored.
    LostSends,
    /// A failed flush stays failed, also in the next process.
    StickyFlush,
    /// An entry of the index becomes valid by its last store.
    StoreOrder,
    /// The number of a removed disk is not used again before every trace of the disk is gone.
    FreeNumber,
    /// What was known of a part of a disk that was cut off is not believed when the disk grows again.
    ForgetCut,
}

impl Rule {
    /// All rules with the names that test programs use for them.
    pub const ALL: [(&'static str, Self); 14] = [
        ("read-overlapped-by-write", Self::ReadOverlappedByWrite),
        ("overlapping-writes", Self::OverlappingWrites),
        ("partial-write", Self::PartialWrite),
        ("discard-unknown", Self::DiscardUnknown),
        ("invalidation", Self::Invalidation),
        ("pinned-slot", Self::PinnedSlot),
        ("admission-check", Self::AdmissionCheck),
        ("fetch-check", Self::FetchCheck),
        ("pool-of-one-server", Self::PoolOfOneServer),
        ("lost-sends", Self::LostSends),
        ("sticky-flush", Self::StickyFlush),
        ("store-order", Self::StoreOrder),
        ("free-number", Self::FreeNumber),
        ("forget-cut", Self::ForgetCut),
    ];
}

/// Set of rules in force: all of them, except in a test build.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rules {
    #[cfg(feature = "ablation")]
    omitted: Option<Rule>,
}

impl Rules {
    /// Returns all rules except `rule`.
    #[cfg(feature = "ablation")]
    #[must_use]
    pub fn without(rule: Rule) -> Self {
        Self { omitted: Some(rule) }
    }

    /// Returns whether `rule` holds.
    #[must_use]
    pub fn hold(self, rule: Rule) -> bool {
        #[cfg(feature = "ablation")]
        return self.omitted != Some(rule);
        #[cfg(not(feature = "ablation"))]
        {
            let _ = rule;
            true
        }
    }
}
