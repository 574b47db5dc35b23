//! A curve as bytes, so that it survives a restart of its process.
//!
//! ```text
//! "REMOCURV" | version u32 | check of the key u64 | threshold u64 | reach u32 | one of u32 | width u64
//! | reads f64 | beyond f64 | blocks u32 | buckets u32 | priority u64 of each block, oldest first
//! | number u32, weight f64 of each bucket that is not 0, in order
//! | size up to which no block is missing u32, if that is less than 64 GiB and than the reach: former programs do not read
//! such a curve
//! ```
//! All numbers are little-endian. Priorities mean something only under the key that made them, so a curve is read with the same key.
//! The reach is the size up to which the curve says something, but at least 64 GiB: older programs forget what is deeper.

use super::histogram::{Histogram, WIDTH_MAX};
use super::priority::{self, Priorities};
use super::queue::{Queue, SAMPLES_MAX};
use super::{MissRatioCurve, ONE_OF_MAX, PageCount, REACH_MIN, Sample};

const MAGIC: [u8; 8] = *b"REMOCURV";
const VERSION: u32 = 1;

/// Maximum number of reads: sums of weights stay finite.
const WEIGHT_MAX: f64 = 1e100;

/// Reason why bytes are not a curve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unreadable {
    /// They begin otherwise.
    NotACurve,
    /// Another version of the format.
    Version(u32),
    /// Another key made them.
    Key,
    /// They are cut short, too long, or contradict themselves.
    Damaged,
}

impl MissRatioCurve {
    /// Returns the curve as bytes. The key is not among them, nor are blocks of an older sample.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let buckets: Vec<(usize, f64)> =
            self.histogram.buckets.iter().copied().enumerate().filter(|(_, weight)| *weight > 0.).collect();
        let mut bytes = MAGIC.to_vec();
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(self.priorities.key_check().to_le_bytes());
        bytes.extend(self.threshold.to_le_bytes());
        bytes.extend(self.kept_reach().0.to_le_bytes());
        bytes.extend(self.one_of.to_le_bytes());
        bytes.extend(self.histogram.width.to_le_bytes());
        bytes.extend(self.histogram.reads.to_le_bytes());
        bytes.extend(self.histogram.beyond.max(0.).to_le_bytes());
        bytes.extend(count(self.queue.len() - self.queue.older()));
        bytes.extend(count(buckets.len()));
        bytes.extend(self.queue.iter().flat_map(u64::to_le_bytes));
        for (bucket, weight) in buckets {
            bytes.extend(count(bucket));
            bytes.extend(weight.to_le_bytes());
        }
        if self.complete < f64::from(self.reach.min(REACH_MIN).0) {
            // Not even 64 GiB are known.
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "from 0 to 64 GiB")]
            bytes.extend((self.complete as u32).to_le_bytes());
        }
        bytes
    }

    /// Returns the size up to which the curve says something once it was read.
    fn kept_reach(&self) -> PageCount {
        let least = self.reach.min(REACH_MIN);
        if self.queue.older() > 0 { least } else { self.reach().max(least) }
    }

    /// Returns the curve that [`Self::to_bytes`] made under the same `key`.
    ///
    /// # Errors
    /// If `bytes` are something else; see [`Unreadable`].
    pub fn from_bytes(key: &[u8; 16], bytes: &[u8]) -> Result<Self, Unreadable> {
        let rest = bytes.strip_prefix(&MAGIC).ok_or(Unreadable::NotACurve)?;
        let mut input = Input(rest);
        let version = input.u32()?;
        if version != VERSION {
            return Err(Unreadable::Version(version));
        }
        let priorities = Priorities::new(key);
        if input.u64()? != priorities.key_check() {
            return Err(Unreadable::Key);
        }
        let threshold = input.u64()?;
        let (reach, one_of) = (PageCount(input.u32()?), input.u32()?);
        let (width, reads, beyond) = (input.u64()?, input.weight()?, input.weight()?);
        let (blocks, buckets) = (input.u32()? as usize, input.u32()? as usize);
        let is_sound = (1..=priority::ALL).contains(&threshold)
            && (1..=ONE_OF_MAX).contains(&one_of)
            && width.is_power_of_two()
            && width <= WIDTH_MAX
            && blocks <= SAMPLES_MAX
            && buckets <= SAMPLES_MAX;
        if !is_sound {
            return Err(Unreadable::Damaged);
        }
        let queue = input.queue(blocks, threshold)?;
        let histogram = Histogram { buckets: input.buckets(buckets)?, width, reads, beyond };
        // Nobody knows whether deeper blocks were forgotten.
        let complete = if input.0.is_empty() { reach.0 } else { input.u32()? };
        if !input.0.is_empty() || complete > reach.0 {
            return Err(Unreadable::Damaged);
        }
        let (complete, raised_from, older) = (complete.into(), None, Sample::ALL);
        Ok(Self { priorities, threshold, queue, histogram, reach, complete, one_of, raised_from, older })
    }
}

/// Bytes that are not read yet.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], Unreadable> {
        let (head, rest) = self.0.split_first_chunk().ok_or(Unreadable::Damaged)?;
        self.0 = rest;
        Ok(*head)
    }

    fn u32(&mut self) -> Result<u32, Unreadable> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, Unreadable> {
        self.take().map(u64::from_le_bytes)
    }

    fn weight(&mut self) -> Result<f64, Unreadable> {
        let weight = f64::from_le_bytes(self.take()?);
        if (0. ..=WEIGHT_MAX).contains(&weight) { Ok(weight) } else { Err(Unreadable::Damaged) }
    }

    fn queue(&mut self, blocks: usize, threshold: u64) -> Result<Queue, Unreadable> {
        let mut queue = Queue::new();
        for before in 0..blocks {
            let priority = self.u64()?;
            if priority >= threshold {
                return Err(Unreadable::Damaged);
            }
            queue.put(priority);
            // The queue does not take a block twice.
            if queue.len() == before {
                return Err(Unreadable::Damaged);
            }
        }
        Ok(queue)
    }

    fn buckets(&mut self, count: usize) -> Result<Box<[f64]>, Unreadable> {
        let mut buckets = Histogram::new().buckets;
        let mut unused = 0..SAMPLES_MAX;
        for _ in 0..count {
            let (bucket, weight) = (self.u32()? as usize, self.weight()?);
            if !unused.contains(&bucket) {
                return Err(Unreadable::Damaged);
            }
            buckets[bucket] = weight;
            unused.start = bucket + 1;
        }
        Ok(buckets)
    }
}

/// Returns a number of samples or buckets as bytes.
fn count(number: usize) -> [u8; 4] {
    const { assert!(SAMPLES_MAX <= u32::MAX as usize) };
    u32::try_from(number).unwrap_or(u32::MAX).to_le_bytes()
}
