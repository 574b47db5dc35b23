//! What follows from a curve: expected times, and reads that the disk would be spared.

use remoca_protocol::control::{CurvePoint, CurveStatus};
use serde::{Deserialize, Serialize};

/// Smallest size in the table, unless almost all that can hit already does there.
const LEAST: u64 = 64 << 20;
/// Share of the greatest hit ratio from which on a smaller size is of interest.
const ALMOST_ALL: f64 = 0.95;

/// Figures of a curve.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Figures {
    /// Time of a read that a memory server answers.
    pub server_us: f64,
    /// Whether that time is an assumption.
    pub server_is_assumed: bool,
    /// Whether the figures are those of the last window alone, which was the better forecast.
    pub is_as_before: bool,
    pub sizes: Vec<Row>,
}

/// Figures of one size.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    pub bytes: u64,
    pub hit_ratio: f64,
    pub standard_error: f64,
    /// Expected mean time of a read; `None` if the disk's is not known.
    pub read_us: Option<f64>,
    pub blocks_saved_per_s: Option<f64>,
    /// Whether this is the size that the VM has now.
    pub is_present: bool,
}

impl Figures {
    /// Returns the figures of `curve`. A measured latency of a memory server comes before that which the operator says, and that before
    /// the `assumed` one.
    pub fn of(curve: &CurveStatus, said_us: Option<f64>, assumed_us: f64) -> Self {
        let server_us = curve.server_read_us.or(said_us).unwrap_or(assumed_us);
        let forecast = curve.forecast.as_ref();
        let is_as_before = forecast.is_some_and(|forecast| forecast.as_before_error < forecast.curve_error);
        let row = |bytes: u64, miss_ratio: f64, standard_error: f64| Row {
            bytes,
            hit_ratio: 1.0 - miss_ratio,
            standard_error,
            read_us: curve.disk_read_us.map(|disk_us| miss_ratio * disk_us + (1.0 - miss_ratio) * server_us),
            blocks_saved_per_s: curve.blocks_read_per_s.map(|rate| rate * (1.0 - miss_ratio)),
            is_present: false,
        };
        // The last window is known at each doubling.
        let value = |point: &CurvePoint| if is_as_before { point.last_window } else { Some(point.miss_ratio) };
        let mut sizes: Vec<Row> = curve
            .points
            .iter()
            .filter_map(|point| Some(row(point.bytes, value(point)?, point.standard_error)))
            .collect();
        if curve.cache_bytes > 0 {
            mark_present(&mut sizes, curve.cache_bytes, row);
        }
        Self { server_us, server_is_assumed: curve.server_read_us.is_none() && said_us.is_none(), is_as_before, sizes }
    }

    /// Returns the size from which on it is worth looking at.
    pub fn first(&self) -> u64 {
        let hits = |bytes: u64| self.sizes.iter().find(|row| row.bytes >= bytes).map_or(0.0, |row| row.hit_ratio);
        let most = self.sizes.last().map_or(0.0, |row| row.hit_ratio);
        if hits(LEAST) < most * ALMOST_ALL || most <= 0.0 { LEAST } else { 1 << 20 }
    }

    /// Returns the rows of the table: each doubling, and the present size.
    pub fn table(&self) -> impl Iterator<Item = &Row> {
        let first = self.first();
        let is_shown = move |row: &&Row| row.is_present || row.bytes >= first && row.bytes.is_power_of_two();
        self.sizes.iter().filter(is_shown)
    }
}

/// Marks the row of the present size, and adds it between two others if need be.
fn mark_present(sizes: &mut Vec<Row>, bytes: u64, row: impl Fn(u64, f64, f64) -> Row) {
    let at = sizes.partition_point(|size| size.bytes < bytes);
    match sizes.get_mut(at) {
        Some(size) if size.bytes == bytes => size.is_present = true,
        Some(above) => {
            let (above, none) = (above.clone(), Row { bytes: 0, hit_ratio: 0.0, ..above.clone() });
            let below = at.checked_sub(1).map_or(none, |at| sizes[at].clone());
            let share = (bytes - below.bytes) as f64 / (above.bytes - below.bytes) as f64;
            let hits = below.hit_ratio + share * (above.hit_ratio - below.hit_ratio);
            let between = row(bytes, 1.0 - hits, above.standard_error.max(below.standard_error));
            sizes.insert(at, Row { is_present: true, ..between });
        }
        // Beyond the curve.
        None => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::curve;

    #[test]
    fn the_present_size_is_between_its_neighbours() {
        let mut curve = curve();
        let present = |curve: &CurveStatus| {
            let figures = Figures::of(curve, None, 1.0);
            assert!(figures.sizes.is_sorted_by_key(|row| row.bytes));
            figures.sizes.into_iter().filter(|row| row.is_present).collect::<Vec<_>>()
        };
        assert!(present(&curve).is_empty());
        for (bytes, hits) in [(64 << 20, 0.375), (512 << 10, 0.0), (1 << 36, 1.0)] {
            curve.cache_bytes = bytes;
            let [row] = &present(&curve)[..] else { panic!("one is present") };
            assert!(row.bytes == bytes && (row.hit_ratio - hits).abs() < 1e-9, "{row:?}");
        }
        curve.cache_bytes = (curve.points[24].bytes + curve.points[25].bytes) / 2;
        let [row] = &present(&curve)[..] else { panic!("one is present") };
        assert!((row.hit_ratio - 24.5 / 64.0).abs() < 1e-6, "{row:?}");
        curve.cache_bytes = 1 << 40;
        assert!(present(&curve).is_empty());
    }

    #[test]
    fn a_measured_latency_comes_before_one_that_is_said() {
        let mut curve = curve();
        let server = |curve: &CurveStatus, said| {
            let figures = Figures::of(curve, said, 200.0);
            (figures.server_us, figures.server_is_assumed)
        };
        assert_eq!((server(&curve, None), server(&curve, Some(90.0))), ((200.0, true), (90.0, false)));
        curve.server_read_us = Some(70.0);
        assert_eq!(server(&curve, Some(90.0)), (70.0, false));
    }

    #[test]
    fn a_small_working_set_is_shown_from_smaller_sizes_on() {
        let mut curve = curve();
        assert_eq!(Figures::of(&curve, None, 1.0).table().count(), 11);
        curve.points[8..].iter_mut().for_each(|point| point.miss_ratio = 0.25);
        assert_eq!(Figures::of(&curve, None, 1.0).table().count(), 17);
        curve.points.iter_mut().for_each(|point| point.miss_ratio = 1.0);
        assert_eq!(Figures::of(&curve, None, 1.0).table().count(), 11);
    }
}
