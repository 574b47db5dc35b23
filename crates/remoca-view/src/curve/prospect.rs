//! What more memory would do for a VM, in a few figures.

use super::{Figures, Row, SERVER_US};
use remoca_protocol::control::CurveStatus;
use serde::{Deserialize, Serialize};

/// Multiples of its present cache that a VM is shown.
const TIMES: [f64; 4] = [0.5, 1.0, 2.0, 4.0];
/// Size that stands for the present one where there is no cache yet.
const FIRST_BYTES: u64 = 1 << 30;

/// What a cache of half, once, twice and four times the present size would do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Prospect {
    /// Time at which the curve was read, in seconds since 1970.
    pub taken_s: f64,
    /// "evictions", "frames", or "reads", as in the curve.
    pub learns_from: String,
    /// Number of blocks read that the curve is made of.
    pub blocks_read: f64,
    pub sizes: Vec<Row>,
}

impl Prospect {
    /// Returns the prospect of the VM with this curve, or `None` if it has read nothing yet.
    #[must_use]
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a few digits are shown"
    )]
    pub fn of(curve: &CurveStatus, taken_s: f64) -> Option<Self> {
        let has_cache = curve.cache_bytes > 0;
        let base = if has_cache { curve.cache_bytes } else { FIRST_BYTES };
        let row = |times: f64| {
            let bytes = (base as f64 * times) as u64;
            let curve = CurveStatus { cache_bytes: bytes, ..curve.clone() };
            let row = Figures::of(&curve, None, SERVER_US).sizes.into_iter().find(|row| row.is_present)?;
            Some(Row { is_present: has_cache && bytes == base, ..row })
        };
        let sizes: Vec<Row> = TIMES.into_iter().filter_map(row).collect();
        let CurveStatus { learns_from, blocks_read, .. } = curve;
        let is_known = !sizes.is_empty() && *blocks_read > 0.0;
        is_known.then(|| Self { taken_s, learns_from: learns_from.clone(), blocks_read: *blocks_read, sizes })
    }

    /// Returns by how much the share of hits would grow with twice the present cache, or `None` where there is none.
    #[must_use]
    pub fn gain_of_double(&self) -> Option<f64> {
        let now = self.sizes.iter().position(|row| row.is_present)?;
        Some(self.sizes.get(now + 1)?.hit_ratio - self.sizes[now].hit_ratio)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::curve;

    #[test]
    fn twice_the_cache_hits_as_often_as_the_curve_says() {
        let mut curve = curve();
        curve.cache_bytes = 1 << 30;
        let prospect = Prospect::of(&curve, 5.0).expect("a curve");
        let sizes: Vec<_> = prospect.sizes.iter().map(|row| (row.bytes >> 20, row.is_present)).collect();
        assert_eq!(sizes, [(512, false), (1024, true), (2048, false), (4096, false)]);
        // The curve falls by 4/64 at each doubling.
        assert!((prospect.gain_of_double().expect("a cache") - 4.0 / 64.0).abs() < 1e-9);
    }

    #[test]
    fn without_a_cache_or_reads_nothing_is_present() {
        let mut curve = curve();
        assert_eq!(Prospect::of(&curve, 0.0).and_then(|prospect| prospect.gain_of_double()), None);
        curve.blocks_read = 0.0;
        assert_eq!(Prospect::of(&curve, 0.0), None);
        (curve.blocks_read, curve.cache_bytes) = (9.0, 1 << 50);
        assert_eq!(Prospect::of(&curve, 0.0).and_then(|prospect| prospect.gain_of_double()), None, "beyond the curve");
    }
}
