//! What was counted while a guest read, and the part that these reads have in the VM's curve.

use remoca_protocol::control::{CurveGrid, CurveStatus, Status};
use serde::Serialize;
use std::collections::BTreeMap;

/// Part of a curve since a first look. A curve forgets most of its reads when a window of time ends, so it is looked at again and again,
/// and what was added between two looks is summed up. A look that finds less than the one before it saw the end of a window: what was
/// added before it is left out.
#[derive(Debug)]
pub struct Seen {
    grid: CurveGrid,
    /// Reads and misses at each size, at the last look.
    last: Option<(f64, Vec<f64>)>,
    reads: f64,
    misses: Vec<f64>,
}

/// What was counted while a guest read, in blocks.
#[derive(Clone, Debug, Serialize)]
pub struct Observed {
    /// Blocks that the guest read from its disk, because its memory did not have them.
    pub read: u64,
    /// Those of them that came from the disk.
    pub from_disk: u64,
    /// Pages for which the agent had no room: blocks that the guest gave up unseen.
    pub lost: u64,
    /// What became of the pages that the guest gave up.
    pub evictions: BTreeMap<String, u64>,
    /// Share of the blocks read that the curve of these reads is made of.
    pub followed: f64,
    grid: [u64; 3],
    /// Miss ratio by the curve of these reads at each size; empty without a curve.
    pub miss_ratios: Vec<f64>,
}

impl Seen {
    #[must_use]
    pub fn new(grid: CurveGrid) -> Self {
        Self { grid, last: None, reads: 0., misses: vec![0.; grid.count as usize] }
    }

    /// Takes a look; `None` while the VM has no curve.
    pub fn note(&mut self, curve: Option<CurveStatus>) {
        let zeroes = || (0., vec![0.; self.misses.len()]);
        let now = curve.map_or_else(zeroes, |curve| {
            let misses = curve.points.iter().map(|point| point.miss_ratio * curve.blocks_read).collect();
            (curve.blocks_read, misses)
        });
        if let Some((reads, misses)) = self.last.take().filter(|(reads, _)| *reads <= now.0) {
            self.reads += now.0 - reads;
            for (sum, (now, then)) in self.misses.iter_mut().zip(now.1.iter().zip(misses)) {
                *sum += now - then;
            }
        }
        self.last = Some(now);
    }
}

impl Observed {
    pub(super) fn new(before: &Status, after: &Status, seen: Seen) -> Self {
        let grown = |name: &str| {
            let of = |status: &Status| status.counters.get(name).copied().unwrap_or_default();
            of(after) - of(before)
        };
        let read = grown("read_blocks");
        let lost = |status: &Status| status.port.as_ref().and_then(|port| port.agent).map_or(0, |agent| agent.lost);
        let has_curve = seen.reads > 0.;
        Self {
            read,
            lost: lost(after).saturating_sub(lost(before)),
            from_disk: grown("missed_blocks") + grown("covered_blocks"),
            evictions: after
                .counters
                .keys()
                .filter_map(|name| Some((name.strip_prefix("evictions_")?.to_owned(), grown(name))))
                .collect(),
            followed: if read > 0 { seen.reads / read as f64 } else { 0. },
            grid: [seen.grid.first_bytes, seen.grid.step_bytes, seen.grid.count.into()],
            miss_ratios: if has_curve {
                seen.misses.iter().map(|misses| misses / seen.reads).collect()
            } else {
                vec![]
            },
        }
    }

    /// Returns the blocks that would have come from the disk with a cache of so many bytes, by the curve; between two sizes of the grid
    /// by a straight line.
    #[must_use]
    pub fn expected_from_disk(&self, bytes: u64) -> f64 {
        let [first, step, _] = self.grid;
        let at = bytes.saturating_sub(first) / step;
        let part = (bytes.saturating_sub(first) % step) as f64 / step as f64;
        let ratio = |at: u64| {
            let at = usize::try_from(at).unwrap_or(usize::MAX).min(self.miss_ratios.len().saturating_sub(1));
            self.miss_ratios.get(at).copied().unwrap_or(1.)
        };
        (ratio(at) * (1. - part) + ratio(at + 1) * part) * self.read as f64
    }
}
