//! Observations of the acts of the demonstration.

use remoca_protocol::{control::Status, trace::TraceRecord};

use crate::{analysis::Window, reading::Outcome, sampler::Sample};

/// A phase of reads, and its span on the clock of the VM process.
pub struct Phase {
    pub outcome: Outcome,
    pub window: Window,
}

/// Observations of one guest, with or without the cache.
pub struct Act {
    pub warmup: Phase,
    pub measured: Phase,
    /// Lines of the guest's kernel log that report failures.
    pub kernel_faults: Vec<String>,
    pub trace: Vec<TraceRecord>,
}

/// Observations of the guest with the cache only.
pub struct CacheAct {
    pub act: Act,
    /// Status of the VM process before the warm-up, after it, after the measured reads, and after the end of the agent.
    pub before: Status,
    pub warm: Status,
    pub after: Status,
    pub end: Status,
    /// Size of the guest's page cache after the measured reads.
    pub page_cache_pages: u64,
    pub kill: Kill,
    pub samples: Vec<Sample>,
}

pub struct Kill {
    pub phase: Phase,
    pub killed_ns: u64,
    pub restarted_ns: u64,
    /// Number of reads when the server was killed, as last reported by the reader.
    pub app_reads_before: u64,
}

/// Observations of the guest with the cache in two tiers.
pub struct TierAct {
    pub act: Act,
    /// Status of the VM process, as in [`CacheAct`].
    pub before: Status,
    pub warm: Status,
    pub after: Status,
    pub end: Status,
    /// Size of the guest's page cache after the measured reads.
    pub page_cache_pages: u64,
}
