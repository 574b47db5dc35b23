//! Candidates for the fingerprint of a page, compared with an unkeyed hash (decision 0002).
//!
//! Each candidate hashes one page repeatedly (hot), and 256 MiB once (cold). The candidates take turns. The figures
//! are medians over the rounds.

use aegis::aegis128l::Aegis128LMac;
use aegis::aegis128x2::Aegis128X2Mac;
use aegis::aegis128x4::Aegis128X4Mac;
use anyhow::Result;
use polyval::Polyval;
use polyval::universal_hash::UniversalHash;
use remoca_core::fingerprint::Fingerprinter;
use std::hint::black_box;
use std::time::Instant;

const PAGE_BYTES: usize = 4096;
const HOT_COUNT: usize = 20_000;
const ROUND_COUNT: usize = 7;

type Hash = Box<dyn Fn(&[u8]) -> u8>;

/// Runs the benchmark and prints its table.
///
/// # Errors
/// Never. It has the signature of the other benchmarks.
pub fn run() -> Result<()> {
    let cold = vec![3; 256 << 20];
    let hot = vec![7; PAGE_BYTES];
    let candidates = candidates();
    let mut rounds = vec![[Vec::new(), Vec::new()]; candidates.len()];
    for round in 0..ROUND_COUNT {
        for at in 0..candidates.len() {
            let at = if round % 2 == 0 { at } else { candidates.len() - 1 - at };
            let hash = &candidates[at].1;
            let many = std::iter::repeat_n(hot.as_slice(), HOT_COUNT);
            rounds[at][0].push(ns_each(many, hash));
            rounds[at][1].push(ns_each(cold.chunks_exact(PAGE_BYTES), hash));
        }
    }
    println!("ns per 4 KiB page, medians of {ROUND_COUNT} rounds in alternation");
    println!("{:24} {:>6} {:>6}", "", "hot", "cold");
    for ((name, _), mut figures) in candidates.iter().zip(rounds) {
        figures.iter_mut().for_each(|figures| figures.sort_by(f64::total_cmp));
        println!("{name:24} {:6.0} {:6.0}", figures[0][ROUND_COUNT / 2], figures[1][ROUND_COUNT / 2]);
    }
    Ok(())
}

fn candidates() -> Vec<(&'static str, Hash)> {
    let key = [9; 16];
    let (narrow, two, four) =
        (Aegis128LMac::<16>::new(&key), Aegis128X2Mac::<16>::new(&key), Aegis128X4Mac::<16>::new(&key));
    let polyval = Polyval::new(&key.into());
    let prints = Fingerprinter::new(&key);
    vec![
        ("fingerprint (ours)", Box::new(move |page| prints.page(page).0[0].to_le_bytes()[0])),
        ("xxh3 (no key)", Box::new(|page| xxhash_rust::xxh3::xxh3_64(page).to_le_bytes()[0])),
        (
            "AEGIS-128L MAC",
            Box::new(move |page| {
                let mut mac = narrow.clone();
                mac.update(page);
                mac.finalize()[0]
            }),
        ),
        (
            "AEGIS-128X2 MAC",
            Box::new(move |page| {
                let mut mac = two.clone();
                mac.update(page);
                mac.finalize()[0]
            }),
        ),
        (
            "AEGIS-128X4 MAC",
            Box::new(move |page| {
                let mut mac = four.clone();
                mac.update(page);
                mac.finalize()[0]
            }),
        ),
        (
            "POLYVAL",
            Box::new(move |page| {
                let mut hash = polyval.clone();
                hash.update_padded(page);
                hash.finalize()[0]
            }),
        ),
    ]
}

fn ns_each<'a>(pages: impl Iterator<Item = &'a [u8]>, hash: &Hash) -> f64 {
    let started = Instant::now();
    let mut count = 0_u32;
    for page in pages {
        black_box(hash(black_box(page)));
        count += 1;
    }
    started.elapsed().as_secs_f64() * 1e9 / f64::from(count)
}
