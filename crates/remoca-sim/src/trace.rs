//! What happened in a run, line by line. Kept only when somebody is going to read it: a run that fails is run again.

use crate::guest::Key;
use remoca_core::units::Nanos;
use std::fmt;
use std::ops::Range;

/// One line of a trace.
#[derive(Clone, Debug)]
pub struct Line {
    /// Number of the event.
    pub event: u64,
    pub at: Nanos,
    /// The blocks it is about; none if it is about all of them.
    pub blocks: Option<(u16, Range<usize>)>,
    pub text: String,
}

impl Line {
    /// Whether the line tells something about `key`.
    #[must_use]
    pub fn concerns(&self, key: Key) -> bool {
        self.blocks.as_ref().is_none_or(|(disk, blocks)| *disk == key.0 && blocks.contains(&key.1))
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (ms, us) = (self.at.0 / 1_000_000, self.at.0 / 1_000 % 1_000);
        write!(f, "{:>6} {ms:>6}.{us:03} ms  ", self.event)?;
        match &self.blocks {
            Some((disk, blocks)) if blocks.len() == 1 => write!(f, "disk {disk} block {}", blocks.start)?,
            Some((disk, blocks)) => write!(f, "disk {disk} blocks {}..{}", blocks.start, blocks.end)?,
            None => write!(f, "all")?,
        }
        write!(f, ": {}", self.text)
    }
}
