//! What came of a simulation.

use super::counts::{BlockCounts, RequestCounts};
use super::fixed::Best;
use super::policy::Cache;
use super::run::Simulation;
use super::types::{Found, PolicyKind, Setup, Traffic};
use remoca_core::engine::Insertion;
use serde::Serialize;

/// Smallest size of the curve in pages: 1 MiB.
const LEAST_PAGES: f64 = 256.0;
/// Number of the curve's sizes for each doubling.
const STEPS: i32 = 4;

/// Shares of the blocks that were read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct TierShares {
    pub guest: f64,
    pub local: f64,
    pub remote: f64,
    pub disk: f64,
}

/// One size of the curve.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CurvePoint {
    pub bytes: u64,
    /// Share of the blocks read below the guest's memory that a cache of this size hits.
    pub hit_ratio: f64,
    pub standard_error: f64,
}

/// What came of a simulation.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// Counts of the whole trace, which are estimates of it if only a share of the blocks was simulated. So are traffic and footprint.
    pub blocks: BlockCounts,
    pub shares: TierShares,
    /// `None` where which blocks hit is known only at the end: with the best fixed set.
    pub requests: Option<RequestCounts>,
    pub traffic: Traffic,
    /// Evicted pages that the insertion policy passed over; `None` with other policies.
    pub passed_over: Option<u64>,
    /// Whether bimodal insertion was in force at the end; `None` with other policies.
    pub ends_bimodal: Option<bool>,
    /// Number of different blocks.
    pub footprint: u64,
    /// Whether it is an estimate of the blocks that a cache could hold at the end: the sampled curve alone was wanted.
    pub is_footprint_estimated: bool,
    /// Whether evictions of the trace were used.
    pub uses_evictions: bool,
    /// Whether evictions were to come while some reads were recorded, as for an agent that never reported, and none came: these reads
    /// were not admitted.
    pub lacks_evictions: bool,
    /// Whether reads of parts of blocks were counted as misses.
    pub has_partial: bool,
    pub curve: Vec<CurvePoint>,
    /// Bytes that the simulation took.
    pub memory_bytes: u64,
}

impl Simulation {
    /// Returns what came of it. The curve has its sizes up to that of all blocks together.
    #[must_use]
    pub fn finish(self) -> Outcome {
        let memory_bytes = self.bytes() as u64;
        let footprint = match self.is_curve_alone {
            true => self.curve.followed_blocks(),
            false => self.ids.len() as u64 * self.setup.one_of.max(1),
        };
        let curve = self.curve_points(footprint);
        let place = self.first_place();
        let Self {
            cache,
            mut blocks,
            requests,
            may_hit,
            has_evictions,
            has_expected,
            has_partial,
            setup,
            is_curve_alone,
            ..
        } = self;
        let mut requests = Some(requests);
        let (mut passed_over, mut ends_bimodal) = (None, None);
        let mut sent = match cache {
            Cache::Lru(lru) => lru.sent,
            Cache::Adaptive(adaptive) => {
                passed_over = Some(adaptive.passed_over);
                ends_bimodal = Some(adaptive.in_force() == Insertion::Bimodal);
                adaptive.sent
            }
            Cache::Fixed(fixed, pages) => {
                let Best { local_hits, remote_hits, sent } = fixed.best(pages);
                (blocks.local, blocks.remote) = (local_hits, remote_hits);
                blocks.disk -= local_hits + remote_hits;
                sent
            }
        };
        // Of a request of many blocks, a sample has some: how slow the slowest is, they do not tell.
        if setup.policy == PolicyKind::Fixed || setup.one_of > 1 {
            requests = None;
        }
        if setup.one_of > 1 {
            let sampled = blocks.remote;
            blocks.correct(place, may_hit.wanted(setup.one_of), may_hit.simulated);
            // What is read from there returns when it is evicted.
            if setup.policy == PolicyKind::Lru {
                sent = (sent + blocks.remote).saturating_sub(sampled);
            }
        }
        let share = |count: u64| if blocks.all() == 0 { 0.0 } else { count as f64 / blocks.all() as f64 };
        let BlockCounts { guest, local, remote, disk, .. } = blocks;
        let one_of = setup.one_of.max(1);
        let shares = TierShares { guest: share(guest), local: share(local), remote: share(remote), disk: share(disk) };
        Outcome {
            blocks: blocks.times(one_of),
            shares,
            requests,
            traffic: Traffic { sent: sent * one_of, fetched: blocks.remote * one_of },
            passed_over: passed_over.map(|pages| pages * one_of),
            ends_bimodal,
            footprint,
            is_footprint_estimated: is_curve_alone,
            uses_evictions: has_evictions,
            lacks_evictions: has_expected && !has_evictions && setup.guest == 0,
            has_partial,
            curve,
            memory_bytes,
        }
    }

    /// Returns the first place that has memory: most reads of a popular block find it there.
    fn first_place(&self) -> Found {
        let Setup { tiers, one_of, .. } = self.setup;
        match () {
            () if self.guest_pages > 0 => Found::Guest,
            () if tiers.local >= one_of => Found::Local,
            () if tiers.remote >= one_of => Found::Remote,
            () => Found::Nowhere,
        }
    }

    /// Returns a hit ratio of a cache of some pages with as many reads as there should be, as [`BlockCounts::correct`] does.
    fn corrected(&self, hit_ratio: f64, pages: u64) -> f64 {
        let one_of = self.setup.one_of;
        if one_of <= 1 || self.guest_pages > 0 || pages == 0 || self.may_hit.simulated == 0 {
            return hit_ratio;
        }
        let reads = self.blocks.all() as f64;
        let lacking = self.may_hit.all as f64 / one_of as f64 - self.may_hit.simulated as f64;
        (hit_ratio * reads + lacking).max(0.0) / (reads + lacking)
    }

    fn curve_points(&self, footprint: u64) -> Vec<CurvePoint> {
        let one_of = self.setup.one_of.max(1);
        let mut sizes: Vec<u64> = Vec::new();
        for step in 0.. {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a footprint is at most 2^32 blocks and their samples"
            )]
            let pages = (LEAST_PAGES * 2_f64.powf(f64::from(step) / f64::from(STEPS))).round() as u64;
            sizes.push(pages);
            // Whole doublings, so that the scale of a chart ends with one.
            if pages >= footprint && step % STEPS == 0 {
                break;
            }
        }
        let scaled: Vec<u64> = sizes.iter().map(|pages| pages / one_of).collect();
        let Some(ratios) = self.curve.hit_ratios(&scaled) else { return Vec::new() };
        let point = |(pages, hit_ratio): (u64, f64)| CurvePoint {
            bytes: pages * 4096,
            hit_ratio: self.corrected(hit_ratio, pages / one_of),
            standard_error: self.curve.standard_error(hit_ratio),
        };
        sizes.into_iter().zip(ratios).map(point).collect()
    }
}
