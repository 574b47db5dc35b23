//! How long runs of reads go on.
//!
//! For each octave of lengths it is known how many runs reached it and how many of these ended in it. So what is known of long runs does
//! not fade while many short ones end.

/// Octaves of lengths in pages; the last one begins at 4 GiB.
const OCTAVES: usize = 21;
/// Number of runs at which the counts of an octave are halved.
const WINDOW: u32 = 64;
/// What is assumed before anything is known: of three runs two end in each octave, so a run is expected to double.
const ASSUMED_ENDED: u64 = 2;
const ASSUMED_REACHED: u64 = 3;

/// Counts of one octave.
#[derive(Clone, Copy, Debug, Default)]
struct Octave {
    reached: u32,
    ended: u32,
}

/// Lengths of the runs that ended.
#[derive(Debug, Default)]
pub(super) struct Runs([Octave; OCTAVES]);

impl Runs {
    /// Adds a run of `pages` pages, at least 1.
    pub(super) fn note_end(&mut self, pages: u64) {
        let last = octave(pages);
        for (at, octave) in self.0[..=last].iter_mut().enumerate() {
            octave.reached += 1;
            octave.ended += u32::from(at == last);
            if octave.reached >= WINDOW {
                (octave.reached, octave.ended) = (octave.reached / 2, octave.ended / 2);
            }
        }
    }

    /// Returns how many pages are expected to follow in a run that has `pages` so far, at least 1.
    pub(super) fn expected(&self, pages: u64) -> u64 {
        let first = octave(pages);
        let mut expected = 0;
        for (at, octave) in self.0.iter().enumerate().skip(first).rev() {
            let length = 1 << at;
            let reached = u64::from(octave.reached) + ASSUMED_REACHED;
            let ended = u64::from(octave.ended) + ASSUMED_ENDED;
            expected = ((reached - ended) * (length + expected) + ended * length / 2) / reached;
        }
        expected
    }
}

fn octave(pages: u64) -> usize {
    (pages.ilog2() as usize).min(OCTAVES - 1)
}
