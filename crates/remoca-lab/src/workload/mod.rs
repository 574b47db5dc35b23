//! Data that reveals any wrong byte, and the access patterns of the papers over it.
//!
//! The `remoca-workload` program runs this in guests; tests and the demonstration run the same code on the host over
//! files taken out of an image. A data set is a folder of files in which every 512 bytes carry a signature
//! ([`signature`]); a manifest lists the files, a journal says which versions they may hold.

pub mod churn;
pub mod dataset;
pub mod histogram;
pub mod journal;
pub mod pattern;
pub mod records;
pub mod signature;
pub mod sort;

use std::io;

/// Faults found while data was read or written.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Faults {
    /// Number of reads and writes that failed or were short.
    pub io_errors: u64,
    /// Number of sectors with wrong content.
    pub wrong_signatures: u64,
    /// Descriptions of the first few.
    pub examples: Vec<String>,
}

const EXAMPLE_COUNT_MAX: usize = 20;

impl Faults {
    pub fn is_empty(&self) -> bool {
        self.io_errors == 0 && self.wrong_signatures == 0
    }

    pub(crate) fn io_error(&mut self, place: &str, error: &io::Error) {
        self.io_errors += 1;
        self.describe(format!("{place}: {error}"));
    }

    pub(crate) fn wrong(&mut self, place: &str, wrong: &signature::Wrong) {
        self.wrong_signatures += 1;
        self.describe(format!("{place}: {wrong}"));
    }

    pub(crate) fn add(&mut self, other: Faults) {
        self.io_errors += other.io_errors;
        self.wrong_signatures += other.wrong_signatures;
        let room = EXAMPLE_COUNT_MAX.saturating_sub(self.examples.len());
        self.examples.extend(other.examples.into_iter().take(room));
    }

    fn describe(&mut self, text: String) {
        if self.examples.len() < EXAMPLE_COUNT_MAX {
            self.examples.push(text);
        }
    }
}
