//! The plan of the demonstration: sizes, counts, times.

use std::time::Duration;

#[derive(Clone, Debug)]
pub struct Plan {
    pub quick: bool,
    pub file_count: u64,
    pub file_bytes: u64,
    pub record_bytes: u64,
    /// Exponent of the zipf distribution.
    pub alpha: f64,
    pub seed: u64,
    pub warmup_reads: u64,
    pub measured_reads: u64,
    pub guest_memory_mib: u32,
    pub cache_bytes: u64,
    /// Part of the cache that is a local tier in the last act; 0 leaves that act out.
    pub local_bytes: u64,
    pub disk_delay: Duration,
    pub server_kill: ServerKill,
    pub lock_memory: bool,
}

/// Timing of the memory server's death: how long the guest reads before the memory server is killed, without it, and with the new one.
#[derive(Clone, Copy, Debug)]
pub struct ServerKill {
    pub before: Duration,
    pub away: Duration,
    pub after: Duration,
}

impl Plan {
    pub fn set_bytes(&self) -> u64 {
        self.file_count * self.file_bytes
    }

    pub fn record_count(&self) -> u64 {
        self.set_bytes() / self.record_bytes
    }

    /// Returns the size of the guest's disk: the files, and room for the metadata of ext4.
    pub fn image_bytes(&self) -> u64 {
        let bytes = self.set_bytes() + self.set_bytes() / 8 + (64 << 20);
        bytes.next_multiple_of(1 << 20)
    }

    /// Returns the command line of the disk.
    pub fn disk_command(&self) -> String {
        format!("nbdkit -t 1 --filter=delay file IMAGE rdelay={}ms", self.disk_delay.as_millis())
    }
}
