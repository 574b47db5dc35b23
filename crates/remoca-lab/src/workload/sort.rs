//! An in-place sort of records in memory, for guests with less memory than it needs. Wrong data from swap appears as a
//! record that is damaged, missing, or out of order.

use std::time::Instant;

use serde::Serialize;

use super::pattern::{Random, mix};

/// A record: a key, and words derived from it.
type Record = [u64; 8];

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    pub records: u64,
    pub fill_seconds: f64,
    pub sort_seconds: f64,
    pub verify_seconds: f64,
    /// Number of records that do not match their key.
    pub damaged: u64,
    /// Number of records with a smaller key than the previous one.
    pub out_of_order: u64,
    /// Whether the keys are unchanged, by their sum and by the sum of their hashes.
    pub complete: bool,
}

impl Report {
    pub fn is_right(&self) -> bool {
        self.damaged == 0 && self.out_of_order == 0 && self.complete
    }
}

/// Fills `bytes` of memory with records of random keys, sorts them in place, and checks each of them.
pub fn sort(bytes: usize, seed: u64) -> Report {
    let mut random = Random::new(seed);
    let mut expected = Sums::default();
    let fill = Instant::now();
    let mut records: Vec<Record> = Vec::with_capacity(bytes / size_of::<Record>());
    for _ in 0..bytes / size_of::<Record>() {
        let key = random.draw();
        expected.add(key);
        records.push(record(key));
    }
    let fill_seconds = fill.elapsed().as_secs_f64();
    let sort = Instant::now();
    records.sort_unstable_by_key(|record| record[0]);
    let sort_seconds = sort.elapsed().as_secs_f64();
    let verify = Instant::now();
    let (damaged, out_of_order, sums) = look_at(&records);
    Report {
        records: records.len() as u64,
        fill_seconds,
        sort_seconds,
        verify_seconds: verify.elapsed().as_secs_f64(),
        damaged,
        out_of_order,
        complete: sums == expected,
    }
}

fn record(key: u64) -> Record {
    std::array::from_fn(|i| if i == 0 { key } else { mix(key.wrapping_add(i as u64)) })
}

#[derive(Default, PartialEq)]
struct Sums(u64, u64);

impl Sums {
    fn add(&mut self, key: u64) {
        self.0 = self.0.wrapping_add(key);
        self.1 = self.1.wrapping_add(mix(key));
    }
}

/// Counts damaged records and records out of order, and sums the keys.
fn look_at(records: &[Record]) -> (u64, u64, Sums) {
    let (mut damaged, mut out_of_order, mut sums) = (0, 0, Sums::default());
    let mut before = 0;
    for found in records {
        let key = found[0];
        damaged += u64::from(*found != record(key));
        out_of_order += u64::from(key < before);
        sums.add(key);
        before = key;
    }
    (damaged, out_of_order, sums)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sorted_is_right() {
        let report = sort(1 << 20, 7);
        assert_eq!(report.records, 16384);
        assert!(report.is_right(), "{report:?}");
    }

    #[test]
    fn every_kind_of_damage_is_seen() {
        let keys = [1, 2, 3];
        let mut sums = Sums::default();
        keys.iter().for_each(|key| sums.add(*key));
        let mut records = keys.map(record);
        assert!(look_at(&records) == (0, 0, Sums(sums.0, sums.1)));
        records[1][7] ^= 1;
        assert_eq!(look_at(&records).0, 1);
        records = [record(1), record(3), record(2)];
        assert_eq!(look_at(&records).1, 1);
        records = [record(1), record(1), record(3)];
        assert!(look_at(&records).2 != sums, "one is there twice, another is gone");
    }
}
