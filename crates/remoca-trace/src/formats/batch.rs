//! What parsers have in common.

use crate::error::TraceError;
use crate::input::Input;
use remoca_protocol::trace::TraceRecord;

/// Number of records that a batch of a foreign format has at most.
pub(super) const BATCH_RECORDS: usize = 512;

/// Records that were read together.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    pub records: Vec<TraceRecord>,
    /// Number of records that were lost before these.
    pub lost: u64,
    /// Number of entries between these records that are no requests for blocks.
    pub skipped: u64,
    /// Whether the guest's evictions are among the records.
    pub sees_evictions: bool,
}

impl Batch {
    pub(super) fn clear(&mut self) {
        let records = std::mem::take(&mut self.records);
        *self = Self { records, ..Self::default() };
        self.records.clear();
    }
}

/// Parser of one format.
pub(super) trait Parser {
    /// Appends records to an empty batch. Returns `false` at the end of the trace.
    ///
    /// # Errors
    /// What is wrong with the trace at the input's position, or that of reading it.
    fn parse(&mut self, input: &mut Input, batch: &mut Batch) -> Result<bool, TraceError>;
}

/// Returns the little-endian number of N bytes at `at`.
pub(super) fn number<const N: usize>(bytes: &[u8], at: usize) -> u64 {
    bytes[at..at + N].iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}
