//! The control protocol of a VM process: one line of JSON in, one line out.
//!
//! Both the process that listens and its clients use this module. The sockets of neither side are here. A line ends
//! with a line feed, or with the connection. The permissions of the socket decide who may open it.

mod curve;
mod secret;
mod status;

use crate::peer::NAME_BYTES_MAX;
use crate::shown;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

pub use curve::{CURVE_POINTS_MAX, CURVE_REACH_BYTES, CurveGrid, CurvePoint, CurveStatus, ForecastStatus};
pub use secret::{SECRET_BYTES, Secret, TEXT_BYTES as SECRET_TEXT_BYTES};
pub use status::{
    CacheStatus, DiskStatus, DiskTraffic, HedgingStatus, KnownServerStatus, Latencies, LatencySummary, MemoryStatus,
    MigrationStatus, NormalLatency, PoolStatus, PortStatus, ServerStatus, Status,
};

/// Maximum size of a command in bytes.
pub const LINE_BYTES_MAX: usize = 8192;
/// Maximum size of an answer in bytes.
pub const REPLY_BYTES_MAX: usize = 4 << 20;
/// Why an upgrade is refused that may be asked for again soon.
pub const UPGRADE_UNDER_WAY: &str = "another upgrade is under way";
/// End of the reason why a memory server is not used that has no place for another client.
pub const TOO_MANY_CLIENTS: &str = "it has as many clients as it takes (--max-clients there)";
/// Maximum time for a command to arrive, and for its answer to be received.
pub const PATIENCE: Duration = Duration::from_secs(10);
/// Maximum time for the answer to an upgrade. The new program sends it, after the old one has drained its requests.
const UPGRADE_PATIENCE: Duration = Duration::from_secs(60);

/// Command to a running VM process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Command {
    /// Returns the status of the process.
    Status,
    /// Returns the miss-ratio curve of a disk, or that of the VM.
    Curve {
        /// Name of the disk.
        #[serde(default)]
        disk: Option<String>,
        /// Sizes of the curve, in place of those from 1 MiB on.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        grid: Option<CurveGrid>,
    },
    /// Changes the settings that are given.
    Set {
        /// Size of the cache in bytes, a multiple of 4096.
        #[serde(default)]
        cache_bytes: Option<u64>,
        /// Size of the local tier in bytes, a multiple of 4096; 0 for none. Older processes do not know it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        local_bytes: Option<u64>,
        /// Whether the cache is on. Switching it off drops all cached pages; switching it on starts cold.
        #[serde(default)]
        enabled: Option<bool>,
        /// Addresses of the memory servers, which replace the current ones.
        #[serde(default)]
        servers: Option<Vec<String>>,
        /// Whether servers that are not among them are left at once. Otherwise their pools are drained first.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        at_once: bool,
    },
    /// Returns the status after the sizes of all images have been measured.
    Rescan,
    /// Allows flushes of a disk to succeed again after one has failed.
    ClearFailedFlush {
        /// Name of the disk.
        disk: String,
    },
    /// Forgets the failed flushes of images that are no disks any more.
    ClearRemovedFlushes,
    /// Replaces the program under the same process ID: by the program at `program` or, without it, by the current
    /// content of the old program's file.
    Upgrade {
        #[serde(default)]
        program: Option<PathBuf>,
    },
    /// Replaces the program as `Upgrade` does, by one without this disk. Its guests are disconnected.
    RemoveDisk {
        /// Name of the disk.
        disk: String,
    },
    /// Offers the disks to another process that has the key. That process receives them when the guest stops.
    Migrate { to: String, key: Secret },
    /// Withdraws the offer of the disks.
    MigrateAbort,
    /// Takes back disks that were handed over, whatever has happened to the other process.
    MigrateTakeBack,
    /// Sends the trace of the guest's requests and evictions on this connection, after the status, until the client is gone.
    TraceStart,
    /// Completes the trace that a client receives.
    TraceStop,
}

/// Answer to a command.
#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Reply {
    Status(Box<Status>),
    Curve(Box<CurveStatus>),
    Error { error: String },
}

/// Reason why a line is not valid in this protocol.
#[derive(Debug, thiserror::Error)]
pub enum LineError {
    #[error("this is no command: it is longer than {LINE_BYTES_MAX} bytes")]
    TooLong,
    #[error("this is no command: {0}")]
    NoCommand(serde_json::Error),
    #[error("{0}")]
    NoReply(serde_json::Error),
    #[error("it says a name of {0} bytes, which no VM has: names are used in file names")]
    LongName(usize),
}

impl Command {
    /// Returns the maximum time that the answer may take.
    #[must_use]
    pub fn patience(&self) -> Duration {
        match self {
            Self::Status | Self::Curve { .. } | Self::Set { .. } | Self::Rescan => PATIENCE,
            Self::ClearFailedFlush { .. } | Self::ClearRemovedFlushes => PATIENCE,
            Self::TraceStart | Self::TraceStop => PATIENCE,
            Self::Migrate { .. } | Self::MigrateAbort | Self::MigrateTakeBack => PATIENCE,
            Self::Upgrade { .. } | Self::RemoveDisk { .. } => UPGRADE_PATIENCE,
        }
    }

    /// Returns the command as a line of JSON, including the trailing newline.
    ///
    /// # Errors
    /// If the path of a program is not valid UTF-8.
    pub fn line(&self) -> Result<Vec<u8>, LineError> {
        let mut line = serde_json::to_vec(self).map_err(LineError::NoCommand)?;
        line.push(b'\n');
        Ok(line)
    }

    /// Parses a command from a line without its line feed.
    ///
    /// # Errors
    /// If the line is too long, or is not a valid command.
    pub fn parse(line: &[u8]) -> Result<Self, LineError> {
        match line.len() {
            ..=LINE_BYTES_MAX => serde_json::from_slice(line).map_err(LineError::NoCommand),
            _ => Err(LineError::TooLong),
        }
    }
}

impl Reply {
    /// Returns the reply as a line of JSON, including the trailing newline.
    ///
    /// # Errors
    /// If serialization fails, which no reply can cause.
    pub fn line(&self) -> Result<Vec<u8>, LineError> {
        let mut line = serde_json::to_vec(self).map_err(LineError::NoReply)?;
        line.push(b'\n');
        Ok(line)
    }

    /// Parses a reply from a line. Its texts may be shown on a terminal: control characters in them, but for line feeds and tabs, are
    /// replaced.
    ///
    /// # Errors
    /// If the line is not a valid reply, or says a name that no VM has.
    pub fn parse(line: &[u8]) -> Result<Self, LineError> {
        let reply: Self = shown::from_json(line).map_err(LineError::NoReply)?;
        if let Self::Status(status) = &reply
            && status.name.len() > NAME_BYTES_MAX
        {
            return Err(LineError::LongName(status.name.len()));
        }
        Ok(reply)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line_of(command: &Command) -> String {
        String::from_utf8(command.line().unwrap()).unwrap()
    }

    #[test]
    fn what_a_terminal_would_obey_is_replaced() {
        let parse = |text: &str| Reply::parse(text.as_bytes());
        for (sent, shown) in [
            (r#"{"error":"a\u001b[2Jb\u009bc\r\td\ne"}"#, "a\u{fffd}[2Jb\u{fffd}c\u{fffd}\td\ne"),
            ("{\"error\":\"a\u{9b}2J \u{7f}\"}", "a\u{fffd}2J \u{fffd}"),
            (r#"{"error":"no \\u001b, ü and \u00fc"}"#, r"no \u001b, ü and ü"),
        ] {
            let Ok(Reply::Error { error }) = parse(sent) else { panic!("{sent}") };
            assert_eq!(error, shown);
        }
    }

    #[test]
    fn commands_are_these_lines() {
        let set = |at_once| Command::Set {
            cache_bytes: Some(1 << 30),
            local_bytes: Some(0),
            enabled: None,
            servers: Some(vec!["unix:/s".into()]),
            at_once,
        };
        let key = "0123456789abcdef".repeat(4);
        let migrate = Command::Migrate { to: "tcp:h:1".into(), key: key.parse().unwrap() };
        let lines = [
            (Command::Status, r#"{"op":"status"}"#.to_owned()),
            (Command::Curve { disk: Some("a".into()), grid: None }, r#"{"op":"curve","disk":"a"}"#.to_owned()),
            (
                Command::Curve { disk: None, grid: Some(CurveGrid { first_bytes: 0, step_bytes: 1 << 20, count: 3 }) },
                r#"{"op":"curve","disk":null,"grid":{"step_bytes":1048576,"count":3}}"#.to_owned(),
            ),
            (
                set(false),
                r#"{"op":"set","cache_bytes":1073741824,"local_bytes":0,"enabled":null,"servers":["unix:/s"]}"#.to_owned(),
            ),
            (
                set(true),
                r#"{"op":"set","cache_bytes":1073741824,"local_bytes":0,"enabled":null,"servers":["unix:/s"],"at_once":true}"#
                    .to_owned(),
            ),
            (Command::Rescan, r#"{"op":"rescan"}"#.to_owned()),
            (Command::ClearFailedFlush { disk: "a".into() }, r#"{"op":"clear-failed-flush","disk":"a"}"#.to_owned()),
            (Command::ClearRemovedFlushes, r#"{"op":"clear-removed-flushes"}"#.to_owned()),
            (Command::Upgrade { program: Some("/p".into()) }, r#"{"op":"upgrade","program":"/p"}"#.to_owned()),
            (Command::RemoveDisk { disk: "a".into() }, r#"{"op":"remove-disk","disk":"a"}"#.to_owned()),
            (migrate, format!(r#"{{"op":"migrate","to":"tcp:h:1","key":"{key}"}}"#)),
            (Command::MigrateAbort, r#"{"op":"migrate-abort"}"#.to_owned()),
            (Command::MigrateTakeBack, r#"{"op":"migrate-take-back"}"#.to_owned()),
            (Command::TraceStart, r#"{"op":"trace-start"}"#.to_owned()),
            (Command::TraceStop, r#"{"op":"trace-stop"}"#.to_owned()),
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
    fn a_curve_is_told_from_a_status() {
        let curve =
            r#"{"curve_of":"vm","disk":null,"disks":[],"learns_from":"reads","cache_bytes":0,"blocks_read":4.0,"#
                .to_owned()
                + r#""followed_share":1.0,"points":[{"bytes":1048576,"miss_ratio":0.5,"standard_error":0.0,"last_window":null}],"#
                + r#""forecast":null,"blocks_read_per_s":null,"disk_read_us":null,"server_read_us":null}"#;
        let Ok(Reply::Curve(read)) = Reply::parse(curve.as_bytes()) else { panic!("it is a curve") };
        assert_eq!(Reply::Curve(read).line().unwrap(), format!("{curve}\n").as_bytes());
    }

    #[test]
    fn an_error_is_told_from_a_status() {
        let reply = Reply::Error { error: "busy".into() };
        assert_eq!(reply.line().unwrap(), b"{\"error\":\"busy\"}\n");
        assert!(matches!(Reply::parse(br#"{"error":"busy"}"#), Ok(Reply::Error { error }) if error == "busy"));
        assert!(matches!(Reply::parse(b"[]"), Err(LineError::NoReply(_))));
    }
}
