//! The events of a run, line by line. Kept only if they will be read: a failing run is repeated for them.

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
    pub vm: usize,
    /// Disk and blocks it is about; `None` if it is about all of them.
    pub blocks: Option<(u16, Range<usize>)>,
    pub text: String,
}

impl Line {
    /// Returns whether the line is about the VM `vm`, and about the block `key` if there is one.
    #[must_use]
    pub fn concerns(&self, vm: usize, key: Option<Key>) -> bool {
        let about = |(disk, blocks): &(u16, Range<usize>)| key.is_none_or(|(d, b)| *disk == d && blocks.contains(&b));
        self.vm == vm && self.blocks.as_ref().is_none_or(about)
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (ms, us) = (self.at.0 / 1_000_000, self.at.0 / 1_000 % 1_000);
        write!(f, "{:>6} {ms:>6}.{us:03} ms  vm {} ", self.event, self.vm)?;
        match &self.blocks {
            Some((disk, blocks)) if blocks.len() == 1 => write!(f, "disk {disk} block {}", blocks.start)?,
            Some((disk, blocks)) => write!(f, "disk {disk} blocks {}..{}", blocks.start, blocks.end)?,
            None => write!(f, "-")?,
        }
        write!(f, ": {}", self.text)
    }
}
