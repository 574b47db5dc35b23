//! What the guest reads, pass by pass.

use super::world::{READAHEAD, Run};
use crate::guest::{Random, Zipf, scattered};

/// Passes of one kind.
pub struct Pattern {
    pub name: &'static str,
    /// Whether no LRU cache of this size hits any of it.
    pub never_hits: bool,
    pub passes: Vec<Vec<Run>>,
}

/// Returns the readahead-sized reads of a file.
fn file(start: u64, pages: u64) -> Vec<Run> {
    let starts = (start..start + pages).step_by(usize::try_from(READAHEAD).unwrap_or(1));
    starts.map(|at| Run { start: at, pages: READAHEAD.min(start + pages - at) }).collect()
}

/// Takes turns: `each` reads of one, then as many of the other.
fn in_turn(one: &[Run], other: &[Run], each: usize) -> Vec<Run> {
    one.chunks(each).zip(other.chunks(each)).flat_map(|(one, other)| [one, other].concat()).collect()
}

fn times(count: usize, pass: &[Run]) -> Vec<Vec<Run>> {
    vec![pass.to_vec(); count]
}

/// Pages of a pass that never hits, and the distance of files: 256 MiB and 16 GiB.
const PASS: u64 = 1 << 16;
const APART: u64 = 1 << 22;

/// Returns the patterns for a cache of `cache` pages.
pub fn patterns(cache: u32) -> Vec<Pattern> {
    let c = u64::from(cache);
    let can = |name, passes| Pattern { name, never_hits: false, passes };
    never(c).into_iter().chain(again(c).into_iter().map(|(name, passes)| can(name, passes))).collect()
}

/// Returns patterns of which no LRU cache hits anything.
fn never(c: u64) -> Vec<Pattern> {
    let fresh = |number: u64| file(number * APART, PASS);
    let mut random = Random(11);
    let mut scattered_reads = |number: u64| -> Vec<Run> {
        let at = |_| Run { start: (40 + number) * APART + random.next() % APART, pages: 4 };
        (0..PASS / 16).map(at).collect()
    };
    let turns =
        |number: u64| in_turn(&file(number * 2 * APART, PASS / 2), &file((number * 2 + 1) * APART, PASS / 2), 8);
    let passes = [
        ("one file after the other", (0..4).map(fresh).collect::<Vec<_>>()),
        ("two files at a time, 1 MiB of each", (0..4).map(turns).collect()),
        ("a loop over 16 x the cache", times(2, &file(0, 16 * c)).concat().chunks(2048).map(<[Run]>::to_vec).collect()),
        ("reads of 16 KiB anywhere, once", (0..6).map(&mut scattered_reads).collect()),
    ];
    passes.into_iter().map(|(name, passes)| Pattern { name, never_hits: true, passes }).collect()
}

/// Returns patterns that read what was read before.
fn again(c: u64) -> Vec<(&'static str, Vec<Vec<Run>>)> {
    let fits = file(0, c * 9 / 10);
    // Of every 2 MiB the half is cached, and the other half was pushed out.
    let halves: Vec<Run> = file(0, c).into_iter().filter(|run| run.start / 256 % 2 == 0).collect();
    let gaps = [halves.clone(), halves.clone(), file(0, c), halves.clone(), file(0, c)];
    // Of every 512 KiB one read is cached.
    let crumbs: Vec<Run> = file(0, c * 2).into_iter().filter(|run| (run.start / READAHEAD).is_multiple_of(4)).collect();
    let mut random = Random(12);
    let (ranks, mut at) = (Zipf::new(c / 2, 0.9), Random(13));
    let mut popular = |pages: u64| -> Vec<Run> {
        let count = c / pages / 2;
        (0..count).map(|_| Run { start: scattered(ranks.rank(&mut at)) * pages, pages }).collect()
    };
    let small: Vec<Vec<Run>> = (0..8).map(|_| popular(1)).collect();
    let large: Vec<Vec<Run>> = (0..8).map(|_| popular(16)).collect();
    let mut noisy = || -> Vec<Run> {
        let other = |_| Run { start: APART + random.next() % (c * 2 / 10), pages: 1 };
        let others: Vec<Run> = (0..c * 6 / 10 / READAHEAD / 8).map(other).collect();
        let stream = file(0, c * 6 / 10);
        stream.chunks(8).zip(others).flat_map(|(reads, other)| [reads, &[other]].concat()).collect()
    };
    vec![
        ("a loop that fits the cache", times(6, &fits)),
        ("a loop over 1.5 x the cache", times(12, &file(0, c * 3 / 2))),
        ("every other MiB, then all", gaps.to_vec()),
        ("one read of four, then all", vec![crumbs.clone(), crumbs.clone(), file(0, c * 2), crumbs, file(0, c * 2)]),
        ("two loops at a time, 1 MiB of each", times(6, &in_turn(&file(0, c * 4 / 10), &file(APART, c * 4 / 10), 8))),
        ("a loop that fits, and single pages between", (0..6).map(|_| noisy()).collect()),
        ("zipf 0.9, pages", small),
        ("zipf 0.9, 64 KiB", large),
    ]
}
