//! What the cache did for a VM over the last snapshots. Pure.

use crate::figures::Figures;
use serde::Serialize;
use std::sync::Arc;

/// Snapshots that are remembered: half an hour of one each five seconds.
const MOMENTS_MAX: usize = 360;

/// Figures between two snapshots.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Moment {
    /// Time of the later one, in seconds since 1970.
    pub taken_s: f64,
    /// Share of the blocks read that needed no disk; `None` without reads.
    pub hit_ratio: Option<f64>,
    /// Mean time of a read, in microseconds.
    pub read_us: Option<f64>,
    pub reads_per_s: f64,
    /// Time by which the cache shortened reads, for each second.
    pub saved_per_s: Option<f64>,
}

/// The last moments of a VM, the oldest first.
pub type History = Arc<Vec<Moment>>;

/// Adds what `recent` says to `history`.
pub fn add(history: &mut History, recent: &Figures, taken_s: f64) {
    let taken = recent.hits.and(recent.disk_reads);
    let moment = Moment {
        taken_s,
        hit_ratio: recent.hit_ratio(),
        read_us: taken.mean_us(),
        reads_per_s: recent.each_second(recent.reads),
        saved_per_s: recent.saved_s.filter(|_| recent.seconds > 0.0).map(|saved_s| saved_s / recent.seconds),
    };
    let moments = Arc::make_mut(history);
    if moments.len() == MOMENTS_MAX {
        moments.remove(0);
    }
    moments.push(moment);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figures::Taken;

    #[test]
    fn the_oldest_moment_makes_room() {
        let mut history = History::default();
        let (hits, disk_reads) = (Taken { count: 3, sum_ns: 300_000 }, Taken { count: 1, sum_ns: 700_000 });
        let recent =
            Figures { seconds: 2.0, reads: 4, hits, disk_reads, hit_blocks: 3, read_blocks: 4, ..Figures::default() };
        for second in 0..MOMENTS_MAX + 5 {
            add(&mut history, &recent, second as f64);
        }
        assert_eq!((history.len(), history[0].taken_s), (MOMENTS_MAX, 5.0));
        let Moment { hit_ratio, read_us, reads_per_s, .. } = history[0];
        assert_eq!((hit_ratio, read_us, reads_per_s), (Some(0.75), Some(250.0), 2.0));
    }
}
