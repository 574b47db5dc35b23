//! Ledger of a connection that outlives its process: what was agreed on with the front end, as JSON of a version of its
//! own. Descriptors appear as the numbers under which the service manager keeps them.
//!
//! ```text
//!  0  state: u64     magic if the rest says what both sides know; anything else while a message is under way
//!  8  since: u64     start of the first process that has not served the front end since, in ns of the boot clock, or 0
//! 16  failures: u64  number of starts that failed since
//! 24  length: u64    of the text
//! 32  text
//! ```

use crate::guests::FrontEnd;
use serde::{Deserialize, Serialize};

/// Version of [`Entry`]. An entry of a later version is not understood.
pub const VERSION: u32 = 1;
/// Value of `state` between two messages.
pub const WHOLE: u64 = u64::from_le_bytes(*b"RMLEDGER");
/// Offsets of the fields.
pub const STATE_AT: u64 = 0;
pub const SINCE_AT: u64 = 8;
pub const FAILURES_AT: u64 = 16;
pub const LENGTH_AT: u64 = 24;
pub const TEXT_AT: u64 = 32;
/// Maximum length of the text: 64 queues and 64 regions fit.
pub const TEXT_BYTES_MAX: u64 = 1 << 20;

/// What a successor needs to continue a connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    pub version: u32,
    /// Device that the front end is connected to: its name, image and socket.
    pub device: String,
    /// Whether the guest has its write cache on.
    pub write_cache: bool,
    pub front_end: FrontEnd<u32>,
}

/// Reason why an entry cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum EntryError {
    #[error("the ledger has version {0}, this program knows {VERSION}")]
    Version(u32),
    #[error("{0}")]
    Json(#[from] serde_json::Error),
}

/// Part that the entries of all versions have. It is read first.
#[derive(Deserialize)]
struct Version {
    version: u32,
}

impl Entry {
    /// Returns the entry as JSON.
    ///
    /// # Errors
    /// If it cannot be expressed as JSON.
    pub fn encode(&self) -> Result<Vec<u8>, EntryError> {
        Ok(serde_json::to_vec(self)?)
    }

    /// Parses an entry, which must have this version or an earlier one.
    ///
    /// # Errors
    /// If `text` has a later version, or is not a valid entry.
    pub fn parse(text: &[u8]) -> Result<Self, EntryError> {
        let Version { version } = serde_json::from_slice(text)?;
        match version {
            1..=VERSION => Ok(serde_json::from_slice(text)?),
            _ => Err(EntryError::Version(version)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A text that a program of version 1 wrote. It is read for good.
    const FIRST: &str = r#"{"version":1,"device":"root /a /run/a","write_cache":false,"front_end":{"socket":1,
        "features":5,"protocol_features":9,"memory":[{"file":2,"file_offset":0,"guest":0,"user":4096,"bytes":8192}],
        "record":{"file":3,"file_offset":0,"bytes":100,"queues":1,"queue_size":8},"log":null,
        "queues":[{"size":8,"addresses":{"descriptors":1,"available":2,"used":3,"used_log":null},"base":7,
        "kick":4,"call":5,"error":null,"enabled":true}]}}"#;

    #[test]
    fn an_entry_of_the_first_version_is_read_and_a_later_one_refused() {
        let entry = Entry::parse(FIRST.as_bytes()).unwrap();
        assert!(!entry.write_cache && entry.front_end.queues[0].base == 7);
        assert_eq!(Entry::parse(&entry.encode().unwrap()).unwrap(), entry);
        let error = Entry::parse(br#"{"version":2,"unknown":[]}"#).unwrap_err();
        assert_eq!(error.to_string(), "the ledger has version 2, this program knows 1");
        assert!(Entry::parse(br#"{"version":0}"#).is_err() && Entry::parse(b"").is_err());
    }
}
