//! What an operator can tell a server: one line of JSON in, one line out, over a socket beside that of the status.
//!
//! `{"op":"take_back","pool":"0a1b2c3d","bytes":0}` sets the maximum size of a mapped pool, and takes back what is above it.
//! Only the server's own user and root may connect, whereas the status is also for its group.

use std::path::{Path, PathBuf};

use remoca_core::units::PAGE_SIZE_U64;
use remoca_protocol::PageCount;
use serde::{Deserialize, Serialize};

/// Maximum length of a command, in bytes.
pub const COMMAND_BYTES_MAX: usize = 1024;

/// A command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case", deny_unknown_fields)]
pub enum Command {
    /// Limits a mapped pool to `bytes`, rounded down to pages. `pool` is its token as the status shows it.
    TakeBack { pool: String, bytes: u64 },
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    Done(TakenBack),
    Error(String),
}

/// The outcome of taking memory back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TakenBack {
    /// Pages that the client may use now.
    pub pages: u32,
    /// Whether the pool was ended, because its client did not answer in time or is gone.
    pub ended: bool,
}

/// Why memory was not taken back.
#[derive(Debug, thiserror::Error)]
pub enum TakeBackError {
    #[error("there is no mapped pool `{0}`: `remoca status --server` shows the pools")]
    NoSuchPool(String),
    #[error("the client goes on using memory that was taken back: its process has to be ended")]
    StillUsed,
    #[error("the memory was not given back within {0} s: `remoca status --server` shows what is used. Try again")]
    Late(u64),
    #[error(
        "the client ({0}) holds its memory by a write that does not end, and nothing can be taken from it: its process has to be \
         ended"
    )]
    Held(String),
    #[error("the server is stopping")]
    Stopping,
}

impl Command {
    /// Parses a line.
    ///
    /// # Errors
    /// A text that says what is wrong.
    pub fn parse(line: &[u8]) -> Result<Self, String> {
        serde_json::from_slice(line).map_err(|error| format!("not a command: {error}"))
    }
}

impl Reply {
    /// Returns the answer as a line.
    #[must_use]
    pub fn line(&self) -> Vec<u8> {
        // Strings and numbers can always be expressed.
        let mut line = serde_json::to_vec(self).unwrap_or_default();
        line.push(b'\n');
        line
    }
}

/// Returns the path of the socket for commands, beside the one that shows the status.
#[must_use]
pub fn command_path(control: &Path) -> PathBuf {
    let mut name = control.as_os_str().to_owned();
    name.push("-commands");
    name.into()
}

/// Returns the pages that fit into `bytes`.
pub(crate) fn whole_pages(bytes: u64) -> PageCount {
    PageCount(u32::try_from(bytes / PAGE_SIZE_U64).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_and_answers_are_lines_of_json() {
        let line = br#"{"op":"take_back","pool":"0a1b2c3d","bytes":8191}"#;
        let Command::TakeBack { pool, bytes } = Command::parse(line).expect("good");
        assert_eq!((pool.as_str(), whole_pages(bytes)), ("0a1b2c3d", PageCount(1)));
        assert_eq!(whole_pages(u64::MAX), PageCount(u32::MAX));
        for bad in [&b""[..], b"{}", br#"{"op":"give"}"#, br#"{"op":"take_back","pool":"x","bytes":-1}"#, &[0xff; 40]] {
            assert!(Command::parse(bad).expect_err("bad").starts_with("not a command"));
        }
        let done = Reply::Done(TakenBack { pages: 1, ended: false }).line();
        assert_eq!(done, b"{\"done\":{\"pages\":1,\"ended\":false}}\n");
    }
}
