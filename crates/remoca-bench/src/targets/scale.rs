//! How much is measured.

use anyhow::Result;
use remoca_lab::figures::Figure;
use std::fmt;
use std::time::Duration;

/// What came of a group: for each row its figure, or why it has none.
pub type Found = Vec<(String, Result<Figure>)>;

/// Number of rounds, and size of each.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    pub rounds: usize,
    pub quick: bool,
    /// How long VM processes look for requests before they sleep, in microseconds; `None` means as long as they do by themselves.
    pub poll_max_us: Option<u64>,
}

impl Scale {
    /// Returns how long a measurement by time takes.
    pub fn slice(&self) -> Duration {
        Duration::from_millis(if self.quick { 100 } else { 600 })
    }

    /// Returns how many operations a measurement by count has.
    pub fn count(&self, whole: usize) -> usize {
        if self.quick { whole / 10 } else { whole }
    }

    /// Returns the size of the disk's content in bytes.
    pub fn image_bytes(&self) -> u64 {
        if self.quick { 16 << 20 } else { 64 << 20 }
    }
}

impl fmt::Display for Scale {
    /// Shows the options by which a command differs from the usual one.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.rounds != 7 {
            write!(f, " --rounds {}", self.rounds)?;
        }
        if self.quick {
            write!(f, " --quick")?;
        }
        if let Some(us) = self.poll_max_us {
            write!(f, " --poll-max-us {us}")?;
        }
        Ok(())
    }
}
