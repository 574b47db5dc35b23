//! Random numbers from a seed, and the record access patterns of REMOCA's evaluation (papers/remoca.txt, section IV.B).

/// SplitMix64: the same numbers from the same seed, everywhere.
#[derive(Clone, Debug)]
pub struct Random {
    state: u64,
}

impl Random {
    pub fn new(seed: u64) -> Random {
        Random { state: mix(seed) }
    }

    pub fn draw(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.state)
    }

    /// Draws a number below `bound`, which must be at least 1.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.draw() % bound
    }

    /// Draws a number from 0 up to, but not including, 1.
    fn unit(&mut self) -> f64 {
        (self.draw() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Mixes a word with the finishing step of SplitMix64: every bit of the result depends on every bit of the word.
pub(super) fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[derive(Clone, Copy, Debug, PartialEq, clap::ValueEnum)]
pub enum Pattern {
    /// First to last, repeatedly.
    Seq,
    /// Each record equally likely.
    Rand,
    /// Record i (from 1) with a probability proportional to 1/i^alpha.
    Zipf,
    /// Each of the first tenth of the records 10 times as likely as one of the others.
    Class,
}

/// Draws record indices.
#[derive(Debug)]
pub struct Chooser {
    random: Random,
    choice: Choice,
    record_count: u64,
}

#[derive(Debug)]
enum Choice {
    Next(u64),
    Uniform,
    /// Sum of the weights up to and including each record.
    Weighted(Vec<f64>),
}

impl Chooser {
    /// Makes a chooser. `alpha` is used only by [`Pattern::Zipf`]. `record_count` must be at least 1.
    pub fn new(pattern: Pattern, alpha: f64, record_count: u64, seed: u64) -> Chooser {
        let choice = match pattern {
            Pattern::Seq => Choice::Next(0),
            Pattern::Rand => Choice::Uniform,
            Pattern::Zipf => Choice::Weighted(sums(record_count, |index| (index as f64 + 1.0).powf(-alpha))),
            Pattern::Class => {
                let favoured_count = record_count.div_ceil(10);
                Choice::Weighted(sums(record_count, |index| if index < favoured_count { 10.0 } else { 1.0 }))
            }
        };
        Chooser { random: Random::new(seed), choice, record_count }
    }

    pub fn choose(&mut self) -> u64 {
        let last = self.record_count - 1;
        match &mut self.choice {
            Choice::Next(next) => {
                let index = *next;
                *next = if index == last { 0 } else { index + 1 };
                index
            }
            Choice::Uniform => self.random.below(self.record_count),
            Choice::Weighted(sums) => {
                let point = self.random.unit() * sums.last().copied().unwrap_or_default();
                let index = sums.partition_point(|&sum| sum <= point);
                u64::try_from(index).map_or(last, |index| index.min(last))
            }
        }
    }
}

fn sums(count: u64, weight: impl Fn(u64) -> f64) -> Vec<f64> {
    let mut sum = 0.0;
    let add = |index| {
        sum += weight(index);
        sum
    };
    (0..count).map(add).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const DRAW_COUNT: u64 = 100_000;

    fn counts(pattern: Pattern, record_count: u64) -> Vec<u64> {
        let mut chooser = Chooser::new(pattern, 1.0, record_count, 42);
        let mut counts = vec![0; usize::try_from(record_count).unwrap()];
        for _ in 0..DRAW_COUNT {
            counts[usize::try_from(chooser.choose()).unwrap()] += 1;
        }
        counts
    }

    /// Returns whether a share is as expected. Draws from a seed are always the same, so these bounds hold always or never.
    fn near(count: u64, share: f64) -> bool {
        (count as f64 / DRAW_COUNT as f64 - share).abs() < 0.01
    }

    #[test]
    fn zipf_favours_as_one_over_i() {
        let counts = counts(Pattern::Zipf, 10);
        let harmonic: f64 = (1..=10).map(|i| 1.0 / f64::from(i)).sum();
        assert!(near(counts[0], 1.0 / harmonic) && near(counts[3], 0.25 / harmonic), "{counts:?}");
    }

    #[test]
    fn class_favours_the_first_tenth_tenfold() {
        let counts = counts(Pattern::Class, 20);
        assert!(near(counts[1], 10.0 / 38.0) && near(counts[2], 1.0 / 38.0), "{counts:?}");
    }

    #[test]
    fn rand_is_even_and_seq_wraps() {
        assert!(counts(Pattern::Rand, 10).into_iter().all(|count| near(count, 0.1)));
        let mut seq = Chooser::new(Pattern::Seq, 1.0, 3, 0);
        assert_eq!([(); 5].map(|()| seq.choose()), [0, 1, 2, 0, 1]);
    }

    #[test]
    fn one_record_is_always_chosen() {
        for pattern in [Pattern::Seq, Pattern::Rand, Pattern::Zipf, Pattern::Class] {
            assert_eq!(counts(pattern, 1), [DRAW_COUNT]);
        }
    }
}
