//! What the acts of the demonstration observed.

use remoca_protocol::{control::Status, trace::TraceRecord};

use crate::{analysis::Window, reading::Outcome, sampler::Sample};

/// Some reads, and when they were made by the clock of the VM process.
pub struct Phase {
    pub outcome: Outcome,
    pub window: Window,
}

/// A guest's life, with or without the cache.
pub struct Act {
    pub warmup: Phase,
    pub measured: Phase,
    /// Lines of the guest's kernel log that tell of failures.
    pub kernel_faults: Vec<String>,
    pub trace: Vec<TraceRecord>,
}

/// What only the guest with the cache has.
pub struct CacheAct {
    pub act: Act,
    /// The VM process before the warm-up, after the measured reads, and at the end, when the agent has ended.
    pub before: Status,
    pub after: Status,
    pub end: Status,
    /// Of the guest, after the measured reads.
    pub page_cache_pages: u64,
    pub kill: Kill,
    pub samples: Vec<Sample>,
}

pub struct Kill {
    pub phase: Phase,
    pub killed_ns: u64,
    pub restarted_ns: u64,
    /// Reads of the reader when the server was killed, as it said last.
    pub app_reads_before: u64,
}
