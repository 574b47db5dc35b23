//! Rounds in which ours and theirs take turns, theirs twice: the ratio, and the noise of theirs against itself.

use anyhow::{Context, Result};
use remoca_lab::figures::{Figure, Spread};

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Ours,
    Theirs,
    TheirsAgain,
}

const SIDES: [Side; 3] = [Side::Theirs, Side::Ours, Side::TheirsAgain];

/// Measurements of all rounds.
pub struct Rounds {
    ours: Vec<f64>,
    theirs: Vec<f64>,
    again: Vec<f64>,
}

impl Rounds {
    /// Measures all sides in each round. Each round begins with another side, and every second order is reversed.
    ///
    /// # Errors
    /// That of the first measurement that fails: a figure of a run with errors is none.
    pub fn take(count: usize, mut measure: impl FnMut(Side) -> Result<f64>) -> Result<Self> {
        let mut rounds = Self { ours: Vec::new(), theirs: Vec::new(), again: Vec::new() };
        for round in 0..count {
            for side in order(round) {
                let value = measure(side)?;
                match side {
                    Side::Ours => rounds.ours.push(value),
                    Side::Theirs => rounds.theirs.push(value),
                    Side::TheirsAgain => rounds.again.push(value),
                }
            }
        }
        Ok(rounds)
    }

    /// Returns the figure that is ours divided by the mean of theirs in the same round.
    pub fn figure(&self, id: &str) -> Result<Figure> {
        let theirs = self.theirs.iter().zip(&self.again).map(|(a, b)| f64::midpoint(*a, *b));
        let ratio = Spread::of(self.ours.iter().zip(theirs).map(|(ours, theirs)| ours / theirs).collect());
        let ratio = ratio.context("no ratio: nothing was measured, or nothing took no time")?;
        Ok(Figure::of_rounds(id, self.ours.len(), ratio, self.noise()))
    }

    /// Returns theirs divided by theirs of the same round.
    pub fn noise(&self) -> Option<Spread> {
        Spread::of(self.again.iter().zip(&self.theirs).map(|(again, theirs)| again / theirs).collect())
    }

    /// Returns the same measurements as rates: one divided by each time.
    pub fn inverse(&self) -> Self {
        let inverse = |times: &[f64]| times.iter().map(|time| 1.0 / time).collect();
        Self { ours: inverse(&self.ours), theirs: inverse(&self.theirs), again: inverse(&self.again) }
    }

    /// Returns the measurements of ours, and those of theirs.
    pub fn each(&self) -> (Vec<f64>, Vec<f64>) {
        (self.ours.clone(), [&self.theirs[..], &self.again].concat())
    }

    /// Returns the median of ours, and that of theirs.
    fn medians(&self) -> Result<(f64, f64)> {
        let median = |values: Vec<f64>| Spread::of(values).map(|spread| spread.median).context("nothing was measured");
        let (ours, theirs) = self.each();
        Ok((median(ours)?, median(theirs)?))
    }

    /// Returns the figure as [`Self::figure`] does, with the medians of both sides beside it.
    pub fn figure_with(&self, id: &str, ours: &str, theirs: &str) -> Result<Figure> {
        let (of_ours, of_theirs) = self.medians()?;
        Ok(self.figure(id)?.beside(ours, of_ours).beside(theirs, of_theirs))
    }
}

fn order(round: usize) -> [Side; 3] {
    let mut order = SIDES;
    order.rotate_left(round % SIDES.len());
    if round % 2 == 1 {
        order.reverse();
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_of_the_same_round() {
        // Each round is ten times as slow as the one before, for all.
        let mut number = 0;
        let rounds = Rounds::take(3, |side| {
            let factor = 10_f64.powi(number / 3);
            number += 1;
            Ok(factor
                * match side {
                    Side::Ours => 3.0,
                    Side::Theirs => 1.0,
                    Side::TheirsAgain => 2.0,
                })
        })
        .unwrap();
        let figure = rounds.figure_with("P9-d1", "ours_us", "theirs_us").unwrap();
        let same = |value| Some(Spread { median: value, min: value, max: value });
        assert_eq!((figure.id.as_str(), figure.rounds, figure.value), ("P9-d1", 3, 2.0));
        assert_eq!((figure.spread, figure.noise), (same(2.0), same(2.0)));
        let rates = rounds.inverse().figure("P9-d32").unwrap();
        // The mean of theirs is that of their rates.
        assert_eq!((rates.value, rates.noise), (0.4444, same(0.5)));
        assert_eq!((figure.beside["ours_us"], figure.beside["theirs_us"]), (30.0, 15.0));
    }

    #[test]
    fn every_round_has_all_sides_and_none_is_always_first() {
        let orders: Vec<_> = (0..6).map(order).collect();
        for side in SIDES {
            assert!(orders.iter().all(|order| order.contains(&side)));
            assert!(orders.iter().any(|order| order[0] == side));
            assert!(orders.iter().any(|order| order[2] == side));
        }
    }

    #[test]
    fn a_failed_measurement_leaves_no_figure() {
        assert!(Rounds::take(2, |side| if side == Side::Ours { anyhow::bail!("no") } else { Ok(1.0) }).is_err());
        assert!(Rounds::take(1, |_| Ok(0.0)).unwrap().figure("P9-d1").is_err());
        assert!(Rounds::take(0, |_| Ok(1.0)).unwrap().figure("P9-d1").is_err());
    }
}
