//! The control protocol of a VM process: one line of JSON in, one line out.
//!
//! Called by the process that listens and by everything that asks it; neither side's sockets are here. A line ends with a
//! line feed, or with the connection. Who may open the socket is a matter of its permissions.

mod secret;
mod status;

use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

pub use secret::{SECRET_BYTES, Secret, TEXT_BYTES as SECRET_TEXT_BYTES};
pub use status::{
    CacheStatus, DiskStatus, HedgingStatus, KnownServerStatus, Latencies, LatencySummary, MemoryStatus,
    MigrationStatus, NormalLatency, PortStatus, ServerStatus, Status,
};

/// Most bytes of a command.
pub const LINE_BYTES_MAX: usize = 8192;
/// Time for a command to arrive, and for the answer to be taken.
pub const PATIENCE: Duration = Duration::from_secs(10);
/// The same for the answer to an upgrade, which is asked for, drained for, and given by another program.
const UPGRADE_PATIENCE: Duration = Duration::from_secs(60);

/// What a running VM process can be asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Command {
    /// Everything it knows of itself.
    Status,
    /// Changes what is given.
    Set {
        /// Size of the cache in bytes, a multiple of 4096.
        #[serde(default)]
        cache_bytes: Option<u64>,
        /// Off drops all that is cached, on starts cold.
        #[serde(default)]
        enabled: Option<bool>,
        /// Addresses of the memory servers, in place of those that it has.
        #[serde(default)]
        servers: Option<Vec<String>>,
    },
    /// Lets flushes of a disk succeed again, after one had failed.
    ClearFailedFlush {
        /// Its name.
        disk: String,
    },
    /// Another program takes over, under the same process id: this one's file as it is now, or the one at `program`.
    Upgrade {
        #[serde(default)]
        program: Option<PathBuf>,
    },
    /// Offers the disks to another process that has the key, which gets them when the guest stops.
    Migrate { to: String, key: Secret },
    /// Does not offer them any more.
    MigrateAbort,
    /// Takes disks back that were handed over, whatever has become of the other process.
    MigrateTakeBack,
}

/// What it answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Reply {
    Status(Box<Status>),
    Error { error: String },
}

/// Why a line is none of this protocol.
#[derive(Debug, thiserror::Error)]
pub enum LineError {
    #[error("this is no command: it is longer than {LINE_BYTES_MAX} bytes")]
    TooLong,
    #[error("this is no command: {0}")]
    NoCommand(serde_json::Error),
    #[error("{0}")]
    NoReply(serde_json::Error),
}

impl Command {
    /// Returns how long the answer may take.
    #[must_use]
    pub fn patience(&self) -> Duration {
        match self {
            Self::Status | Self::Set { .. } | Self::ClearFailedFlush { .. } => PATIENCE,
            Self::Migrate { .. } | Self::MigrateAbort | Self::MigrateTakeBack => PATIENCE,
            Self::Upgrade { .. } => UPGRADE_PATIENCE,
        }
    }

    /// Returns the command as its line, with the line feed.
    ///
    /// # Errors
    /// If the path of a program is no text.
    pub fn line(&self) -> Result<Vec<u8>, LineError> {
        let mut line = serde_json::to_vec(self).map_err(LineError::NoCommand)?;
        line.push(b'\n');
        Ok(line)
    }

    /// Returns the command that a line has, which comes without its line feed.
    ///
    /// # Errors
    /// If it is too long, or no command.
    pub fn parse(line: &[u8]) -> Result<Self, LineError> {
        match line.len() {
            ..=LINE_BYTES_MAX => serde_json::from_slice(line).map_err(LineError::NoCommand),
            _ => Err(LineError::TooLong),
        }
    }
}

impl Reply {
    /// Returns the reply as its line, with the line feed.
    ///
    /// # Errors
    /// If a string of it is no text, which none is.
    pub fn line(&self) -> Result<Vec<u8>, LineError> {
        let mut line = serde_json::to_vec(self).map_err(LineError::NoReply)?;
        line.push(b'\n');
        Ok(line)
    }

    /// Returns the reply that a line has.
    ///
    /// # Errors
    /// If it is none.
    pub fn parse(line: &[u8]) -> Result<Self, LineError> {
        serde_json::from_slice(line).map_err(LineError::NoReply)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line_of(command: &Command) -> String {
        String::from_utf8(command.line().unwrap()).unwrap()
    }

    #[test]
    fn commands_are_these_lines() {
        let set = Command::Set { cache_bytes: Some(1 << 30), enabled: None, servers: Some(vec!["unix:/s".into()]) };
        let key = "0123456789abcdef".repeat(4);
        let migrate = Command::Migrate { to: "tcp:h:1".into(), key: key.parse().unwrap() };
        let lines = [
            (Command::Status, r#"{"op":"status"}"#.to_owned()),
            (set, r#"{"op":"set","cache_bytes":1073741824,"enabled":null,"servers":["unix:/s"]}"#.to_owned()),
            (Command::ClearFailedFlush { disk: "a".into() }, r#"{"op":"clear-failed-flush","disk":"a"}"#.to_owned()),
            (Command::Upgrade { program: Some("/p".into()) }, r#"{"op":"upgrade","program":"/p"}"#.to_owned()),
            (migrate, format!(r#"{{"op":"migrate","to":"tcp:h:1","key":"{key}"}}"#)),
            (Command::MigrateAbort, r#"{"op":"migrate-abort"}"#.to_owned()),
            (Command::MigrateTakeBack, r#"{"op":"migrate-take-back"}"#.to_owned()),
        ];
        for (command, line) in lines {
            assert_eq!(line_of(&command), format!("{line}\n"));
            assert_eq!(Command::parse(line.as_bytes()).unwrap(), command);
        }
    }

    #[test]
    fn what_is_no_command_is_said_and_a_long_line_is_not_parsed() {
        for line in ["", "{}", r#"{"op":"set","more":1}"#, r#"{"op":"migrate","to":"a","key":"swordfish"}"#] {
            let error = Command::parse(line.as_bytes()).unwrap_err().to_string();
            assert!(error.starts_with("this is no command: "), "{error}");
        }
        let mut line = br#"{"op":"status"}"#.to_vec();
        line.resize(LINE_BYTES_MAX, b' ');
        assert_eq!(Command::parse(&line).unwrap(), Command::Status);
        line.push(b' ');
        assert!(matches!(Command::parse(&line), Err(LineError::TooLong)));
    }

    #[test]
    fn an_error_is_told_from_a_status() {
        let reply = Reply::Error { error: "busy".into() };
        assert_eq!(reply.line().unwrap(), b"{\"error\":\"busy\"}\n");
        assert!(matches!(Reply::parse(br#"{"error":"busy"}"#), Ok(Reply::Error { error }) if error == "busy"));
        assert!(matches!(Reply::parse(b"[]"), Err(LineError::NoReply(_))));
    }
}
