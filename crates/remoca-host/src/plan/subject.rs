//! What a division starts from, and what it results in.

use crate::curve::Curve;

/// Time in which a gain must outweigh the cost of moving, and in which a VM must be able to fill what it gets.
pub(super) const HORIZON_S: f64 = 600.;
/// Bytes of a page.
pub(super) const PAGE_BYTES: f64 = 4096.;

/// How memory is divided. All but `Optimal` are for comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    Optimal,
    Greedy,
    Esx,
    Equal,
}

impl Policy {
    /// Returns the name for reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Optimal => "optimal",
            Self::Greedy => "greedy",
            Self::Esx => "esx",
            Self::Equal => "equal",
        }
    }
}

/// What is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    pub total_bytes: u64,
    pub unit_bytes: u64,
}

impl Memory {
    /// Returns the whole units of the total.
    #[must_use]
    pub fn units(self) -> usize {
        usize::try_from(self.total_bytes / self.unit_bytes).unwrap_or(usize::MAX)
    }
}

/// A VM before the division.
#[derive(Clone, Debug)]
pub struct Subject<'c> {
    pub has_bytes: u64,
    /// The same in units, rounded up; rounded down if that is less than its minimum.
    pub has: usize,
    pub least: usize,
    pub most: usize,
    /// Units that its guest has lent: by weight they are its own.
    pub own: usize,
    pub weight: f64,
    pub bound: f64,
    /// Blocks that its guest reads each second, as far as it is known.
    pub reads_per_s: Option<f64>,
    pub standing: Standing<'c>,
    /// Whether it ever said what it has. If not, that is the most it can have.
    pub is_known: bool,
}

/// What may be done with a VM.
#[derive(Clone, Copy, Debug)]
pub enum Standing<'c> {
    /// Its size may change.
    Free(&'c Curve),
    /// It keeps what it has, unless all have more than the total.
    Keeps,
    /// Its size cannot be changed.
    Stuck,
}

/// Reason for a VM's target.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Why {
    /// It stands apart: the planner knows why.
    Apart,
    /// It has the best size.
    Best,
    /// It gains.
    Gains,
    /// Others gain more than it loses.
    Gives,
    /// It must have its minimum, or what its bound asks for.
    Owed,
    /// It has more than its maximum, or all have more than the total.
    TooMuch,
    /// Its gain does not exceed its error.
    Unsure,
    /// It has no more than its share by weight, and all have more than the total.
    Spared,
    /// What it would gain is not worth the moving.
    NotWorth,
    /// Its guest reads too little to fill more soon.
    Idle,
}

/// A VM after the division.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    pub baseline: usize,
    pub floor: usize,
    pub target: usize,
    /// Miss ratio with what it has, with the target, and the error of their difference.
    pub ratios: Option<(f64, f64, f64)>,
    /// Milliseconds for each second; negative for a loss.
    pub saved_ms: Option<f64>,
    pub why: Why,
}

/// A division.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    pub rows: Vec<Row>,
    /// Weighted geometric mean of the miss ratios, against the present one.
    pub geometric_mean: f64,
    pub saved_ms: f64,
}

impl Subject<'_> {
    pub(super) fn curve(&self) -> Option<&Curve> {
        match self.standing {
            Standing::Free(curve) => Some(curve),
            Standing::Keeps | Standing::Stuck => None,
        }
    }

    pub(super) fn floor(&self, baseline: usize) -> usize {
        self.curve().map_or(self.least, |curve| curve.floor(self.least, baseline, self.bound))
    }

    /// Returns the units that are set aside for it before the division.
    pub(super) fn apart(&self, floor: usize) -> usize {
        if self.curve().is_some() { floor } else { self.has }
    }

    /// Returns the units that hold all that it has.
    pub(super) fn covering(&self, unit_bytes: u64) -> usize {
        usize::try_from(self.has_bytes.div_ceil(unit_bytes)).unwrap_or(usize::MAX)
    }

    /// Returns the whole units that it has; one if it has less. One that lacks a part of a unit to its minimum has that as well.
    pub(super) fn whole(&self, unit_bytes: u64) -> usize {
        let covering = self.covering(unit_bytes);
        let whole = Memory { total_bytes: self.has_bytes, unit_bytes }.units().max(1).min(self.has);
        if self.has < covering { covering } else { whole }
    }

    /// Returns the most units that its guest can fill soon.
    pub(super) fn fillable(&self, curve: &Curve, unit_bytes: u64) -> usize {
        let misses_per_s = self.reads_per_s.unwrap_or(0.) * curve.ratio(self.has);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "positive; a huge one saturates")]
        let units = (misses_per_s * HORIZON_S * PAGE_BYTES / unit_bytes as f64) as usize;
        self.has.saturating_add(units)
    }
}
