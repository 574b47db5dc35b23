//! Counts of a simulation.

use super::types::Found;
use serde::Serialize;

/// Blocks of reads that may hit.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MayHit {
    /// Those of the whole trace.
    pub(super) all: u64,
    pub(super) simulated: u64,
}

impl MayHit {
    /// Returns how many would be simulated if the sample had its share of the reads. Of none, nothing can be told.
    pub(super) fn wanted(&self, one_of: u64) -> u64 {
        if self.simulated == 0 { 0 } else { self.all.div_ceil(one_of.max(1)) }
    }
}

/// Blocks that were read, by where they were found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct BlockCounts {
    pub guest: u64,
    pub local: u64,
    pub remote: u64,
    pub disk: u64,
    /// Those from the disk that were cached: another block of the same read was not, and the disk answers the whole read.
    pub covered: u64,
    pub written: u64,
}

/// Reads, by the slowest place where one of their blocks was found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RequestCounts {
    pub guest: u64,
    pub local: u64,
    pub remote: u64,
    pub disk: u64,
}

impl BlockCounts {
    #[inline]
    pub(super) fn note(&mut self, found: Found, blocks: u64) {
        *match found {
            Found::Guest => &mut self.guest,
            Found::Local => &mut self.local,
            Found::Remote => &mut self.remote,
            Found::Nowhere => &mut self.disk,
        } += blocks;
    }

    /// Counts the blocks that were found in the tiers since the counts were `before` as read from the disk.
    #[inline]
    pub(super) fn cover_since(&mut self, before: Self) {
        let covered = self.local + self.remote - before.local - before.remote;
        (self.local, self.remote) = (before.local, before.remote);
        self.disk += covered;
        self.covered += covered;
    }

    /// Makes reads of `had` blocks as many as there should be. Those that are lacking are found at `place`. Those that are too many were
    /// found at the first places.
    pub(super) fn correct(&mut self, place: Found, wanted: u64, mut had: u64) {
        self.note(place, wanted);
        for count in [&mut self.guest, &mut self.local, &mut self.remote, &mut self.disk] {
            let taken = had.min(*count);
            *count -= taken;
            had -= taken;
        }
    }

    /// Returns as many times each count.
    pub(super) fn times(self, times: u64) -> Self {
        let Self { guest, local, remote, disk, covered, written } = self;
        let [guest, local, remote, disk, covered, written] =
            [guest, local, remote, disk, covered, written].map(|count| count * times);
        Self { guest, local, remote, disk, covered, written }
    }

    /// Returns the number of blocks read.
    #[must_use]
    pub fn all(&self) -> u64 {
        self.guest + self.below_guest()
    }

    /// Returns the number of blocks read that the guest did not hold.
    #[must_use]
    pub fn below_guest(&self) -> u64 {
        self.local + self.remote + self.disk
    }
}

impl RequestCounts {
    #[inline]
    pub(super) fn note(&mut self, found: Found) {
        *match found {
            Found::Guest => &mut self.guest,
            Found::Local => &mut self.local,
            Found::Remote => &mut self.remote,
            Found::Nowhere => &mut self.disk,
        } += 1;
    }

    /// Returns the number of reads.
    #[must_use]
    pub fn all(&self) -> u64 {
        self.guest + self.local + self.remote + self.disk
    }

    /// Returns the mean time of a read in milliseconds. One that the guest answers takes no time. Returns `None` without reads.
    #[must_use]
    pub fn mean_ms(&self, local_ms: f64, remote_ms: f64, disk_ms: f64) -> Option<f64> {
        let all = self.all();
        let sum = self.local as f64 * local_ms + self.remote as f64 * remote_ms + self.disk as f64 * disk_ms;
        (all > 0).then(|| sum / all as f64)
    }
}
