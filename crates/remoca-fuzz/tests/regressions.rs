//! Runs the seeds of each target, every input that once made it fail (`regressions/TARGET/*`), and variations of the seeds.
//! They are the same each time, so that a change never fails by chance. The search for more is the fuzzer's work.

#![allow(clippy::unwrap_used, reason = "a test that meets an error has failed")]

use remoca_fuzz::{TARGETS, Target};
use std::fs;
use std::ops::Range;
use std::path::Path;
use std::thread;

/// Number of variations of each target.
const VARIATIONS: usize = 20_000;

#[test]
fn seeds_and_old_findings_do_no_harm() {
    let regressions = Path::new(env!("CARGO_MANIFEST_DIR")).join("regressions");
    for target in &TARGETS {
        let seeds = (target.seeds)();
        assert!(!seeds.is_empty(), "{} has nothing to start from", target.name);
        for seed in &seeds {
            assert!(seed.len() <= target.length_max, "{}: a seed of {} bytes", target.name, seed.len());
            (target.run)(seed);
        }
        (target.run)(&[]);
        for entry in fs::read_dir(regressions.join(target.name)).into_iter().flatten() {
            let path = entry.unwrap().path();
            println!("{}", path.display());
            (target.run)(&fs::read(path).unwrap());
        }
    }
}

#[test]
fn findings_belong_to_a_target() {
    let regressions = Path::new(env!("CARGO_MANIFEST_DIR")).join("regressions");
    for entry in fs::read_dir(regressions).into_iter().flatten() {
        let name = entry.unwrap().file_name();
        assert!(TARGETS.iter().any(|target| name == target.name), "there is no target {}", name.display());
    }
}

/// Choices of the next change: numbers derived from a constant.
struct Choices(u64);

impl Choices {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        usize::try_from(self.0 >> 33).unwrap() % bound.max(1)
    }

    fn byte(&mut self) -> u8 {
        match self.below(8) {
            0 => 0,
            1 => 1,
            2 => 0x7f,
            3 => 0x80,
            4 => 0xff,
            _ => u8::try_from(self.below(256)).unwrap(),
        }
    }

    fn range(&mut self, length: usize) -> Range<usize> {
        let start = self.below(length + 1);
        start..start + self.below((length - start).min(16) + 1)
    }

    /// Returns one of the seeds with up to eight changes.
    fn variation(&mut self, seeds: &[Vec<u8>], length_max: usize) -> Vec<u8> {
        let mut input = seeds[self.below(seeds.len())].clone();
        for _ in 0..=self.below(8) {
            let range = self.range(input.len());
            match self.below(4) {
                0 => drop(input.drain(range)),
                1 => {
                    let other = &seeds[self.below(seeds.len())];
                    let piece = self.range(other.len());
                    input.splice(range, other[piece].iter().copied());
                }
                _ => input[range].iter_mut().for_each(|byte| *byte = self.byte()),
            }
        }
        input.truncate(length_max);
        input
    }
}

fn try_variations(target: &Target) {
    let (seeds, mut choices) = ((target.seeds)(), Choices(1));
    for number in 0..VARIATIONS {
        let input = choices.variation(&seeds, target.length_max);
        let outcome = std::panic::catch_unwind(|| (target.run)(&input));
        assert!(outcome.is_ok(), "{}: variation {number} of the seeds: {input:?}", target.name);
    }
}

#[test]
fn variations_of_the_seeds_do_no_harm() {
    thread::scope(|threads| {
        for target in &TARGETS {
            threads.spawn(move || try_variations(target));
        }
    });
}
