//! What a compressed tail of the local tier could hold: pages of an image, each compressed by LZ4 (decision 0051).
//!
//! A guest evicts pages of its files, so the blocks of a disk image that are not zero stand for them. A tail needs a place for each
//! page; three are compared: pieces of any size, pieces of 1 KiB, and the memory of one page that two share.

use crate::cost::median;
use anyhow::{Context, Result, ensure};
use clap::Args;
use std::fs::File;
use std::hint::black_box;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

const PAGE_BYTES: usize = 4096;
const PIECE_BYTES: usize = 1024;

#[derive(Args)]
pub struct CompressArgs {
    /// Disk images or files, read in pages of 4 KiB
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// Most pages of a file to look at, evenly spaced
    #[arg(long, default_value_t = 50_000)]
    pages: u64,
}

/// Sums over the pages of a file that are not zero.
#[derive(Default)]
struct Sums {
    pages: usize,
    /// Bytes of the compressed pages, at most a page each.
    bytes: usize,
    /// Pieces of 1 KiB that they take.
    pieces: usize,
    /// Pages that take at most half of their size.
    halves: usize,
    /// Pages that take more than four fifths of their size.
    hard: usize,
}

impl Sums {
    fn add(&mut self, bytes: usize) {
        let bytes = bytes.min(PAGE_BYTES);
        self.pages += 1;
        self.bytes += bytes;
        self.pieces += bytes.div_ceil(PIECE_BYTES);
        self.halves += usize::from(bytes <= PAGE_BYTES / 2);
        self.hard += usize::from(bytes * 5 > PAGE_BYTES * 4);
    }

    /// Returns how many pages the memory of one holds: pieces of any size, of 1 KiB, and that of one for two.
    fn held(&self) -> [f64; 3] {
        let pages = count(self.pages);
        let shared = count(self.pages - self.halves) + count(self.halves) / 2.0;
        [pages * count(PAGE_BYTES) / count(self.bytes), pages * 4.0 / count(self.pieces), pages / shared]
    }
}

/// Runs the benchmark and prints its table.
///
/// # Errors
/// A file that cannot be read, or that has only zeroes.
pub fn run(args: &CompressArgs) -> Result<()> {
    println!("pages compressed by LZ4, each alone; medians of the times of one page");
    println!(
        "{:>7} {:>6} {:>6} {:>6} {:>8} {:>8} {:>8}",
        "pages", "any", "1 KiB", "two", "> 80 %", "in, us", "out, us"
    );
    for file in &args.files {
        let pages = pages(file, args.pages).with_context(|| format!("cannot read {}", file.display()))?;
        ensure!(!pages.is_empty(), "{} has only zeroes: name an image with files in it", file.display());
        let mut sums = Sums::default();
        let (mut times_in, mut times_out) = (Vec::new(), Vec::new());
        let mut packed = vec![0; lz4_flex::block::get_maximum_output_size(PAGE_BYTES)];
        let mut page_again = vec![0; PAGE_BYTES];
        for page in &pages {
            let started = Instant::now();
            let length = lz4_flex::block::compress_into(black_box(page), &mut packed)?;
            times_in.push(started.elapsed().as_secs_f64() * 1e6);
            let started = Instant::now();
            lz4_flex::block::decompress_into(black_box(&packed[..length]), &mut page_again)?;
            times_out.push(started.elapsed().as_secs_f64() * 1e6);
            ensure!(page_again == *page, "a page of {} was not the same after compression", file.display());
            sums.add(length);
        }
        let [any, pieces, two] = sums.held();
        let hard = 100.0 * count(sums.hard) / count(sums.pages);
        let (time_in, time_out) = (median(times_in.into_iter()), median(times_out.into_iter()));
        println!(
            "{:7} {any:6.2} {pieces:6.2} {two:6.2} {hard:6.1} % {time_in:8.2} {time_out:8.2}  {}",
            sums.pages,
            file.display()
        );
    }
    Ok(())
}

/// Returns pages of a file, evenly spaced over it, without those of zeroes.
fn pages(path: &Path, most: u64) -> Result<Vec<Vec<u8>>> {
    let file = File::open(path)?;
    let total = file.metadata()?.len() / PAGE_BYTES as u64;
    let step = total.div_ceil(most.max(1)).max(1);
    let mut pages = Vec::new();
    for number in (0..total).step_by(usize::try_from(step)?) {
        let mut page = vec![0; PAGE_BYTES];
        file.read_exact_at(&mut page, number * PAGE_BYTES as u64)?;
        if page.iter().any(|byte| *byte != 0) {
            pages.push(page);
        }
    }
    Ok(pages)
}

fn count(number: usize) -> f64 {
    number as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_held_follow_from_their_sizes() {
        let mut sums = Sums::default();
        [1024, 2048, 3000, 5000].into_iter().for_each(|bytes| sums.add(bytes));
        let bytes = f64::from(1024 + 2048 + 3000 + 4096);
        assert_eq!(sums.held(), [4.0 * 4096.0 / bytes, 4.0 * 4.0 / f64::from(1 + 2 + 3 + 4), 4.0 / 3.0]);
        assert_eq!(sums.hard, 1, "only the page that grew");
    }
}
