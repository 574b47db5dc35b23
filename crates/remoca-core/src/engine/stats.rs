//! Counters of one engine, which only grow. Sizes and latency estimates are in [`super::EngineStatus`].

macro_rules! counters {
    ($(#[doc = $doc:literal] $name:ident),* $(,)?) => {
        /// Counters since the engine was created.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct EngineStats { $(#[doc = $doc] pub $name: u64),* }

        impl EngineStats {
            /// Names and meanings of all counters, in the order of their declaration.
            pub const EXPLAINED: &[(&str, &str)] = &[$((stringify!($name), $doc)),*];

            /// Returns all counters with their names, in the order of their declaration.
            #[must_use]
            pub fn named(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name)),*]
            }

            /// Adds the counters of another engine.
            pub fn add(&mut self, other: &Self) {
                $(self.$name += other.$name;)*
            }
        }
    };
}

counters! {
    /// Guest reads completed, from any source.
    reads,
    /// Guest reads answered without the disk.
    reads_from_cache,
    /// Blocks (4 KiB) read by the guest.
    read_blocks,
    /// Blocks answered by the memory server.
    hit_blocks,
    /// Blocks known to be zero, answered locally.
    zero_blocks,
    /// Blocks that were cached but read from the disk: along with neighbours, in a stream, or because a server is slower.
    covered_blocks,
    /// Blocks read from the disk that were not cached.
    missed_blocks,
    /// Reads that did not consist of whole blocks.
    misaligned_reads,
    /// Guest writes completed.
    writes,
    /// Blocks written by the guest, in whole or in part.
    written_blocks,
    /// Flushes completed.
    flushes,
    /// Discards and write-zeroes completed.
    discards,
    /// Requests that the disk failed, also reads that a memory server then answered.
    disk_errors,
    /// Evicted pages reported by the guest; the next six counters add up to it.
    evictions_reported,
    /// Evicted pages that went to the cache.
    evictions_admitted,
    /// Evicted pages that were cached already.
    evictions_duplicate,
    /// Evicted pages full of zeroes, which need no cache.
    evictions_zero,
    /// Evicted pages that the disk is not known to hold.
    evictions_unmatched,
    /// Evicted pages that were not sent, because the cache was off, or the server was busy, slow or not connected.
    evictions_dropped,
    /// Evicted pages that were not sent, because the insertion policy kept the older ones (a loop or a scan).
    evictions_passed_over,
    /// Those of the dropped ones of which nobody looked up whether the disk holds them, because the cache was off.
    evictions_unjudged,
    /// Pages that fell out of the local tier unread and went to a memory server.
    demotions,
    /// Frames of guest memory examined before a read overwrote them; the next six counters add up to it.
    frames_looked_at,
    /// Frames that went to the cache.
    frames_admitted,
    /// Frames whose page was cached already.
    frames_duplicate,
    /// Frames full of zeroes.
    frames_zero,
    /// Frames whose content the disk is not known to hold.
    frames_unmatched,
    /// Frames that were not sent, because the server was busy, slow or not connected.
    frames_dropped,
    /// Frames that were not sent, because the insertion policy kept the older pages.
    frames_passed_over,
    /// Blocks of swap areas admitted when they were written or read.
    swap_admissions,
    /// Blocks written to swap areas that were not sent, because the server was busy, slow or not connected.
    swap_dropped,
    /// Blocks admitted when they were read, because nothing shows evictions.
    read_admissions,
    /// Reads of cached blocks that went to the disk because it reads on cheaply.
    stream_reads,
    /// Reads hedged with a disk read, because the server's answer was late.
    hedges,
    /// Hedged reads that the disk answered first.
    hedges_won,
    /// Reads sent to the disk because the wait for the server reached the timeout.
    fetch_timeouts,
    /// Reads that try a server: sent to it and to the disk at the same time, to compare the two; with --no-hedge to the server first.
    probes,
    /// Times that the breaker opened.
    breaker_openings,
    /// Pages that the server did not have.
    fetch_missing,
    /// Pages whose content was not the requested one.
    fetch_wrong,
    /// Pages that arrived after their read was answered.
    fetch_late,
    /// Replies to no outstanding REQUEST.
    fetch_unexpected,
    /// Reads whose connection was lost while they waited for the server.
    fetch_disconnected,
    /// Times that a foreign writer was noticed and the index dropped.
    foreign_writes,
    /// Sessions begun with memory servers.
    connections,
    /// Sessions lost.
    disconnections,
    /// Times that a pool joined others, for more memory or so that the loss of one costs less.
    pool_joins,
    /// Times that a pool was drained because its server was much slower than the others.
    pool_drains,
    /// Slots given up because their page was in transit when a connection was lost.
    lost_sends,
    /// Times that a server took back memory of a mapped pool, whose session went on.
    pools_cut,
}
