//! Counters of one engine, which only grow. Sizes and latency estimates are in [`super::EngineStatus`].

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counters since the engine was created.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct EngineStats { $($(#[$doc])* pub $name: u64),* }

        impl EngineStats {
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
    /// Blocks that were cached but read from the disk along with their neighbours.
    covered_blocks,
    /// Blocks read from the disk that were not cached.
    missed_blocks,
    /// Reads that did not consist of whole blocks.
    misaligned_reads,
    writes,
    written_blocks,
    flushes,
    discards,
    disk_errors,
    /// Evicted pages reported by the guest; the next five counters add up to it.
    evictions_reported,
    evictions_admitted,
    evictions_duplicate,
    evictions_zero,
    evictions_unmatched,
    evictions_dropped,
    /// Frames of guest memory examined before a read overwrote them; the next five counters add up to it.
    frames_looked_at,
    frames_admitted,
    frames_duplicate,
    frames_zero,
    frames_unmatched,
    frames_dropped,
    /// Blocks of swap areas admitted when they were written or read.
    swap_admissions,
    /// Blocks written to swap areas that were not sent, because the server was busy, slow or not connected.
    swap_dropped,
    /// Blocks admitted when they were read, because nothing shows evictions.
    read_admissions,
    /// Reads hedged with a disk read, because the server's answer was late.
    hedges,
    /// Hedged reads that the disk answered first.
    hedges_won,
    /// Reads sent to the disk because the wait for the server reached the timeout.
    fetch_timeouts,
    /// Reads sent to server and disk at the same time, to compare the two.
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
    connections,
    disconnections,
    /// Times that the pool moved because another server could give more.
    pool_moves,
    /// Slots given up because their page was in transit when a connection was lost.
    lost_sends,
}
