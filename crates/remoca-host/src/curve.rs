//! The miss-ratio curve of one VM, in units of memory, with the margins that its errors ask for.
//!
//! What a VM process says is checked completely before anything is made of it. Then:
//! 1. The ratios never increase, and are from 0 to 1.
//! 2. Near a cliff a size is known to some percent only. So a size that is to be given is judged by a smaller one
//!    ([`Curve::at_worst`]), and one that is to be promised by a larger one ([`Curve::at_best`]).

use remoca_core::allocation::MISS_RATIO_FLOOR;
use remoca_protocol::control::{CurveGrid, CurveStatus};

/// Share by which a size must be beyond the one where a curve falls.
const CLIFF_MARGIN: f64 = 0.02;
/// Fewest blocks read, and fewest of them followed, of a curve that says anything.
const READS_MIN: f64 = 1024.;
const FOLLOWED_READS_MIN: f64 = 256.;
/// Time of a read that a memory server answers, where none was measured.
const SERVER_US: f64 = 200.;
/// Longest time of a read that is believed, in microseconds.
pub(crate) const LATENCY_US_MAX: f64 = 1e9;
/// Most blocks read in a second that are believed: 4 TB/s.
const RATE_MAX: f64 = 1e9;
/// Greatest rise of a miss ratio that may be an error of arithmetic.
const RISE_MAX: f64 = 1e-9;
/// Number of standard errors that a difference must have.
const ERRORS: f64 = 2.;

/// Miss-ratio curve of a VM.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    /// Miss ratio with 0, 1, 2 ... units behind those of a tier in front.
    ratios: Vec<f64>,
    /// Units of the queue in front of the first one.
    first: usize,
    /// Number of blocks that are followed; infinite if all are.
    followed: f64,
    /// Mean error as a forecast of the next window; 0 while none is known.
    forecast_error: f64,
    /// Blocks read each second in the last window of the process.
    pub reads_per_s: Option<f64>,
    /// Time that a read is shorter by if a memory server answers it.
    pub saved_us: Option<f64>,
}

impl Curve {
    /// Checks the curve that a VM process sent when it was asked for `grid`. A unit is a step of it.
    ///
    /// # Errors
    /// Why the curve is not to be trusted.
    pub fn new(status: &CurveStatus, grid: CurveGrid) -> Result<Self, String> {
        let expected =
            (0..grid.count).map(|at| u64::from(at).saturating_mul(grid.step_bytes).saturating_add(grid.first_bytes));
        if !status.points.iter().map(|point| point.bytes).eq(expected) {
            return Err("its curve is not at the sizes that it was asked for".into());
        }
        let ratios: Vec<f64> = status.points.iter().map(|point| point.miss_ratio).collect();
        let is_share = |ratio: f64| ratio.is_finite() && (0. ..=1.).contains(&ratio);
        if !ratios.iter().all(|ratio| is_share(*ratio))
            || !ratios.is_sorted_by(|a, b| *b <= *a + RISE_MAX)
            || !status.points.iter().all(|point| is_share(point.standard_error))
        {
            return Err("its curve rises, or has numbers that are no miss ratios".into());
        }
        let forecast_error = status.forecast.as_ref().map_or(0., |forecast| forecast.curve_error);
        let share = status.followed_share;
        let is_known = |number: Option<f64>, most: f64| {
            number.is_none_or(|number| number.is_finite() && (0. ..=most).contains(&number))
        };
        let is_sane = is_share(forecast_error)
            && is_share(share)
            && share > 0.
            && status.blocks_read.is_finite()
            && status.blocks_read >= 0.
            && is_known(status.blocks_read_per_s, RATE_MAX)
            && is_known(status.disk_read_us, LATENCY_US_MAX)
            && is_known(status.server_read_us, LATENCY_US_MAX);
        if !is_sane {
            return Err("its curve has absurd numbers".into());
        }
        let reads = status.blocks_read;
        if reads < READS_MIN {
            return Err(format!("its curve is made of {reads:.0} blocks read, which is too few"));
        }
        let followed_reads = reads * share;
        if followed_reads < FOLLOWED_READS_MIN {
            return Err(format!("its curve follows {followed_reads:.0} of {reads:.0} blocks read, which is too few"));
        }
        if status.learns_from == "reads" && status.cache_bytes == 0 {
            return Err(
                "it has no cache and no evictions are seen, so its curve is that of another kind of cache".into()
            );
        }
        let mut least = 1_f64;
        let ratios = ratios.into_iter().map(|ratio| {
            least = least.min(ratio);
            least
        });
        let server_us = status.server_read_us.unwrap_or(SERVER_US);
        Ok(Self {
            ratios: ratios.collect(),
            first: usize::try_from(grid.first_bytes.div_ceil(grid.step_bytes.max(1))).unwrap_or(usize::MAX),
            followed: followed(status),
            forecast_error,
            reads_per_s: status.blocks_read_per_s,
            saved_us: status.disk_read_us.map(|disk_us| disk_us - server_us),
        })
    }

    /// Returns the miss ratio with so many units; beyond the curve that of its end.
    #[must_use]
    pub fn ratio(&self, units: usize) -> f64 {
        self.ratios.get(units).or(self.ratios.last()).copied().unwrap_or(1.)
    }

    /// Returns the miss ratio that `units` have at worst: a cliff may be a little further away than it seems.
    #[must_use]
    pub fn at_worst(&self, units: usize) -> f64 {
        self.ratio(units.saturating_sub(self.margin(units)))
    }

    /// Returns the miss ratio that `units` have at best: a cliff may be a little nearer than it seems.
    #[must_use]
    pub fn at_best(&self, units: usize) -> f64 {
        self.ratio(units.saturating_add(self.margin(units)))
    }

    /// Returns the units by which a size of `units` may be wrong, at least one: a share of all that is in front of its end.
    fn margin(&self, units: usize) -> usize {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a small share of a number of units"
        )]
        let share = (units.saturating_add(self.first) as f64 * CLIFF_MARGIN).ceil() as usize;
        share.max(1)
    }

    /// Returns the error of a difference of two miss ratios, by sampling: two standard errors.
    #[must_use]
    pub fn error(&self, difference: f64) -> f64 {
        if self.followed.is_infinite() {
            return 0.;
        }
        let share = difference.abs().clamp(1. / self.followed, 1.);
        ERRORS * (share * (1. - share) / self.followed).sqrt()
    }

    /// Returns the error of a gain: that of the difference or that of the forecasts so far, whichever is larger.
    #[must_use]
    pub fn gain_error(&self, difference: f64) -> f64 {
        self.error(difference).max(self.forecast_error)
    }

    /// Returns the least number of units, from `least` to `baseline`, that costs no more than the share `bound` against the baseline,
    /// even if the curve is wrong by its margin.
    #[must_use]
    pub fn floor(&self, least: usize, baseline: usize, bound: f64) -> usize {
        let allowed = self.at_best(baseline).max(MISS_RATIO_FLOOR) * (1. + bound);
        (least..baseline).find(|units| self.at_worst(*units) <= allowed).unwrap_or(baseline)
    }
}

/// Returns the number of followed blocks that the standard errors of a curve stand for.
fn followed(status: &CurveStatus) -> f64 {
    let points = status.points.iter().filter(|point| point.standard_error > 0.);
    let number = points.map(|point| point.miss_ratio * (1. - point.miss_ratio) / point.standard_error.powi(2));
    number.reduce(f64::min).unwrap_or(f64::INFINITY).max(1.)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{GRID, curve_status};
    use remoca_protocol::control::ForecastStatus;

    fn of(status: &CurveStatus) -> Result<Curve, String> {
        Curve::new(status, GRID)
    }

    #[test]
    fn a_cliff_is_judged_with_a_margin_on_both_sides() {
        let curve = of(&curve_status(|units| if units < 100 { 1. } else { 0.1 })).unwrap();
        let first = |at: fn(&Curve, usize) -> f64| (0..200).find(|units| at(&curve, *units) < 1.).unwrap();
        assert_eq!((first(Curve::at_best), first(Curve::ratio), first(Curve::at_worst)), (98, 100, 103));
        assert_eq!((curve.floor(1, 120, 0.25), curve.floor(1, 90, 0.25)), (103, 1));
        // Perhaps it has the cliff already: nothing may be taken.
        assert_eq!(curve.floor(1, 99, 0.25), 99);
        assert_eq!((curve.error(0.5), curve.ratio(1 << 20)), (0., 0.1));
    }

    #[test]
    fn the_error_of_a_difference_is_that_of_the_reads_between_two_sizes() {
        let mut status = curve_status(|units| 1. / (1. + units as f64));
        for point in &mut status.points {
            point.standard_error = (point.miss_ratio * (1. - point.miss_ratio) / 400.).sqrt();
        }
        let curve = of(&status).unwrap();
        assert!((curve.error(0.5) - 2. * 0.5 / 20.).abs() < 1e-9, "{}", curve.error(0.5));
        assert!(curve.error(0.) > 0. && curve.error(0.) < 0.01, "{}", curve.error(0.));
    }

    #[test]
    fn a_gain_has_the_error_of_the_forecasts_or_of_the_size_with_the_fewest_reads() {
        let mut status = curve_status(|units| 1. / (1. + f64::from(units)));
        let forecast = |curve_error| Some(ForecastStatus { windows: 3, curve_error, as_before_error: 0. });
        status.forecast = forecast(0.3);
        let curve = of(&status).unwrap();
        assert_eq!((curve.error(0.5), curve.gain_error(0.5)), (0., 0.3));
        // 400 blocks, 100 and 900 are followed there.
        for (at, followed) in [(1, 400.), (3, 100.), (4, 900.)] {
            let ratio: f64 = status.points[at].miss_ratio;
            status.points[at].standard_error = (ratio * (1. - ratio) / followed).sqrt();
        }
        status.forecast = forecast(0.05);
        let curve = of(&status).unwrap();
        assert!((curve.gain_error(0.5) - 0.1).abs() < 1e-9, "{}", curve.gain_error(0.5));
        status.forecast = forecast(1.1);
        assert!(of(&status).unwrap_err().contains("absurd"));
    }

    #[test]
    fn a_curve_of_just_enough_reads_says_what_a_read_saves() {
        let mut status = curve_status(|_| 0.5);
        (status.blocks_read, status.followed_share) = (1024., 0.25);
        assert_eq!(of(&status).unwrap().saved_us, Some(4800.));
        // None was measured: then the usual time of a server counts, and no time of a disk.
        status.server_read_us = None;
        assert_eq!(of(&status).unwrap().saved_us, Some(4800.));
        status.server_read_us = Some(1000.);
        assert_eq!(of(&status).unwrap().saved_us, Some(4000.));
        status.disk_read_us = None;
        assert_eq!(of(&status).unwrap().saved_us, None);
        status.followed_share = 0.249;
        assert!(of(&status).unwrap_err().contains("follows 255 of 1024 blocks read, which is too few"));
        (status.blocks_read, status.followed_share) = (1023., 1.);
        assert!(of(&status).unwrap_err().contains("too few"));
        // Without a cache reads alone say nothing; with one they do, and so do evictions without a cache.
        let mut status = curve_status(|_| 0.5);
        status.learns_from = "reads".into();
        assert!(of(&status).is_ok());
        (status.cache_bytes, status.learns_from) = (0, "evictions".into());
        assert!(of(&status).is_ok());
    }

    #[test]
    fn what_is_absurd_is_not_believed() {
        let good = curve_status(|_| 0.5);
        assert!(of(&good).is_ok());
        let refused = |change: &dyn Fn(&mut CurveStatus), words: &str| {
            let mut status = good.clone();
            change(&mut status);
            let error = of(&status).unwrap_err();
            assert!(error.contains(words), "{error}");
        };
        refused(&|curve| curve.points.truncate(200), "not at the sizes");
        refused(&|curve| curve.points[3].bytes += 1, "not at the sizes");
        refused(&|curve| curve.points[3].miss_ratio = 0.6, "rises");
        refused(&|curve| curve.points[3].miss_ratio = f64::NAN, "no miss ratios");
        refused(&|curve| curve.points[3].standard_error = f64::INFINITY, "no miss ratios");
        refused(&|curve| curve.blocks_read = -1., "absurd");
        refused(&|curve| curve.blocks_read_per_s = Some(f64::INFINITY), "absurd");
        refused(&|curve| curve.blocks_read_per_s = Some(1.1e9), "absurd");
        refused(&|curve| curve.disk_read_us = Some(-1.), "absurd");
        refused(&|curve| curve.server_read_us = Some(1.1e9), "absurd");
        refused(&|curve| curve.followed_share = 1.1, "absurd");
        refused(&|curve| curve.followed_share = 0., "absurd");
        refused(&|curve| curve.blocks_read = 1000., "too few");
        refused(&|curve| curve.followed_share = 1e-4, "too few");
        refused(&|curve| (curve.cache_bytes, curve.learns_from) = (0, "reads".into()), "no evictions are seen");
    }
}
