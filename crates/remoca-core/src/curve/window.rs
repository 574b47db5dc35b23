//! Windows: the reads of a curve fade from window to window, and each window shows how good the forecast of it was.
//!
//! Three figures are kept apart. The *estimate's error* comes from sampling ([`MissRatioCurve::standard_error`]). The *forecast's error*
//! is the difference between the curve at the start of a window and what the window then was; it contains the estimate's. Beside
//! it stands the error of *"as before"*: the last window alone as the forecast. Decision 0038.

use super::histogram::Totals;
use super::{MissRatioCurve, PageCount, REACH_MAX, REACH_MIN, WINDOW_KEPT};
use crate::units::Nanos;

/// Minimum length of a window.
const WINDOW_MIN_NS: u64 = 60_000_000_000;
/// Minimum number of sampled reads of a window: fewer say little about it.
const SAMPLED_READS_MIN: f64 = 1024.;
/// Maximum number of sizes at which forecasts are compared: 1 MiB, 2 MiB ... 4 TiB. Those beyond the reach of a curve are left out.
const SIZES: usize = 23;
/// Number of windows of which the errors are a mean; older ones fade out.
const MEAN_OF: u32 = 8;

type Ratios = [f64; SIZES];

/// How well windows were foretold.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Forecasts {
    /// Number of windows that were compared with their forecast.
    pub windows: u32,
    /// Mean difference of the miss ratio at 17 sizes or more, by the curve.
    pub curve_error: f64,
    /// The same by the window before alone.
    pub as_before_error: f64,
}

/// Weights of a curve's reads at one moment.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    totals: Totals,
    within: Ratios,
}

impl Tally {
    fn of(curve: &MissRatioCurve) -> Self {
        let mut tally = Self { totals: curve.histogram.totals(), within: [0.; SIZES] };
        let sizes = (0..SIZES).map(|at| u64::from(size(at).0));
        tally.within.iter_mut().zip(curve.histogram.weights_within(sizes)).for_each(|(to, weight)| *to = weight);
        tally
    }

    /// Returns what was added since `before`.
    fn since(&self, before: &Self) -> Self {
        let (now, then) = (self.totals, before.totals);
        let totals = Totals {
            reads: now.reads - then.reads,
            beyond: (now.beyond - then.beyond).max(0.),
            found: (now.found - then.found).max(0.),
        };
        // A bucket that became wider in between may seem to lose weight.
        let within = std::array::from_fn(|at| (self.within[at] - before.within[at]).clamp(0., totals.found));
        Self { totals, within }
    }

    fn ratios(&self) -> Ratios {
        self.within.map(|within| self.totals.miss_ratio(within))
    }
}

/// The windows of one curve.
#[derive(Clone, Debug, Default)]
pub struct Windows {
    began: Option<Nanos>,
    at_begin: Tally,
    /// The curve at the start of this window.
    forecast: Option<Ratios>,
    /// The window before this one alone.
    last: Option<Ratios>,
    forecasts: Forecasts,
    /// Blocks read each second in the last window.
    reads_per_s: Option<f64>,
}

impl Windows {
    /// Ends the window if it is long enough. The reads of `curve` then fade. Returns whether it ended.
    #[inline]
    pub fn advance(&mut self, now: Nanos, curve: &mut MissRatioCurve) -> bool {
        let Some(began) = self.began else {
            // A curve of a previous process has reads already.
            (self.began, self.at_begin) = (Some(now), Tally::of(curve));
            return false;
        };
        now.since_ns(began) >= WINDOW_MIN_NS && self.end(now, began, curve)
    }

    /// Returns how well the windows so far were foretold.
    #[must_use]
    pub fn forecasts(&self) -> Forecasts {
        self.forecasts
    }

    /// Returns the number of blocks read each second in the last window, or so far in the first one. Returns `None` where that is
    /// shorter than a second.
    #[must_use]
    pub fn reads_per_s(&self, now: Nanos, curve: &MissRatioCurve) -> Option<f64> {
        let elapsed_ns = now.since_ns(self.began?);
        let so_far = || (curve.reads() - self.at_begin.totals.reads) / (elapsed_ns as f64 / 1e9);
        self.reads_per_s.or_else(|| (elapsed_ns >= 1_000_000_000).then(so_far))
    }

    /// Returns the miss ratio of the last window alone at the sizes 1 MiB, 2 MiB ... 4 TiB, or `None` if there was none.
    #[must_use]
    pub fn last(&self) -> Option<&[f64]> {
        self.last.as_ref().map(|ratios| &ratios[..])
    }

    fn end(&mut self, now: Nanos, began: Nanos, curve: &mut MissRatioCurve) -> bool {
        if (curve.reads() - self.at_begin.totals.reads) * curve.rate() / f64::from(curve.one_of()) < SAMPLED_READS_MIN {
            return false;
        }
        let end = Tally::of(curve);
        let window = end.since(&self.at_begin);
        let ratios = window.ratios();
        let forecasts = &mut self.forecasts;
        if let (Some(forecast), Some(last)) = (&self.forecast, &self.last) {
            let sizes = sizes_within(curve.reach());
            forecasts.windows += 1;
            let share = 1. / f64::from(forecasts.windows.min(MEAN_OF));
            forecasts.curve_error += (difference(&forecast[..sizes], &ratios) - forecasts.curve_error) * share;
            forecasts.as_before_error += (difference(&last[..sizes], &ratios) - forecasts.as_before_error) * share;
        }
        self.reads_per_s = Some(window.totals.reads / (now.since_ns(began) as f64 / 1e9));
        (self.forecast, self.last) = (Some(end.ratios()), Some(ratios));
        curve.age(WINDOW_KEPT);
        (self.began, self.at_begin) = (Some(now), Tally::of(curve));
        true
    }
}

/// Returns the size number `at`, in pages.
fn size(at: usize) -> PageCount {
    PageCount(256 << at)
}

/// Returns the number of sizes up to `reach`, and up to 64 GiB at least.
fn sizes_within(reach: PageCount) -> usize {
    (reach.clamp(REACH_MIN, REACH_MAX).0 / size(0).0).ilog2() as usize + 1
}

/// Returns the mean difference of `a` from `b` at the sizes of `a`.
fn difference(a: &[f64], b: &Ratios) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).sum::<f64>() / a.len() as f64
}
