//! Counters of one engine; all of them only grow, except `latency` estimates and sizes in [`super::EngineStatus`].

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counters since the engine was made.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct EngineStats { $($(#[$doc])* pub $name: u64),* }

        impl EngineStats {
            /// Returns all counters with their names, in the order of their declaration.
            #[must_use]
            pub fn named(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name)),*]
            }

            /// Adds what another engine counted.
            pub fn add(&mut self, other: &Self) {
                $(self.$name += other.$name;)*
            }
        }
    };
}

counters! {
    /// Guest reads completed, whatever answered them.
    reads,
    /// Guest reads answered without the disk.
    reads_from_cache,
    /// 4 KiB blocks read by the guest.
    read_blocks,
    /// Blocks answered by the memory server.
    hit_blocks,
    /// Blocks known to be zero, answered locally.
    zero_blocks,
    /// Blocks that were cached but read from the disk along with their neighbours.
    covered_blocks,
    /// Blocks the disk was asked for and that were not cached.
    missed_blocks,
    /// Reads that were not whole blocks.
    misaligned_reads,
    writes,
    written_blocks,
    flushes,
    discards,
    disk_errors,
    /// Evicted pages reported by the guest; the next five add up to it.
    evictions_reported,
    evictions_admitted,
    evictions_duplicate,
    evictions_zero,
    evictions_unmatched,
    evictions_dropped,
    /// Frames of guest memory looked at before a read overwrote them; the next five add up to it.
    frames_looked_at,
    frames_admitted,
    frames_duplicate,
    frames_zero,
    frames_unmatched,
    frames_dropped,
    /// Blocks of swap areas admitted when they were written or read.
    swap_admissions,
    /// Blocks written to swap areas that were not sent, because the server was busy, slow or away.
    swap_dropped,
    /// Blocks admitted when they were read, for lack of evictions.
    read_admissions,
    /// Reads that were also given to the disk, because the server's answer was late.
    hedges,
    /// Of these, those that the disk answered first.
    hedges_won,
    /// Reads that were given to the disk because the server's answer was very late, or the server is left alone.
    fetch_timeouts,
    /// Reads that went both ways while the server was left alone.
    probes,
    /// Times from which on the server was left alone.
    breaker_openings,
    /// Pages the server did not have.
    fetch_missing,
    /// Pages that were not what was asked for.
    fetch_wrong,
    /// Pages that came after their request was answered.
    fetch_late,
    /// Replies nobody asked for.
    fetch_unexpected,
    /// Reads that lost the connection while they waited for the server.
    fetch_disconnected,
    /// Times a foreign writer was noticed and the index dropped.
    foreign_writes,
    connections,
    disconnections,
    /// Times the pool was given back because another server could give more.
    pool_moves,
    /// Slots given up because their page was on the way when a connection was lost.
    lost_sends,
}
