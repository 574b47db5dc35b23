//! A client of QMP, QEMU's machine protocol: JSON messages, one on each line.
//!
//! Used by the host's daemon, which asks monitors of operators, and by the guest laboratory. Knows no command except those of [`Qmp`].
//!
//! 1. A QEMU that hangs, lies or dies costs its caller at most the time of [`Limit`], and [`ANSWER_BYTES_MAX`] of memory.
//! 2. After an answer that did not come, or made no sense, nothing more is sent: a later answer could be that of an earlier command.

#![forbid(unsafe_code)]

mod error;
mod wire;

pub use error::{Error, Result};

use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use serde_json::{Value, json};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};
use wire::Wire;

/// Maximum size of an answer, together with the events before it.
pub const ANSWER_BYTES_MAX: usize = 256 << 10;

/// How long to wait.
#[derive(Clone, Copy, Debug)]
pub enum Limit {
    /// Time for each answer.
    Each(Duration),
    /// End of the time for all of them.
    Until(Instant),
}

impl Limit {
    fn deadline(self) -> Instant {
        match self {
            Self::Each(time) => Instant::now() + time,
            Self::Until(deadline) => deadline,
        }
    }
}

/// A connection to a monitor. QEMU serves one client of a monitor at a time.
#[derive(Debug)]
pub struct Qmp {
    wire: Wire,
    limit: Limit,
    last_id: u64,
    is_usable: bool,
}

impl Qmp {
    /// Connects to the monitor that listens at `path`.
    ///
    /// # Errors
    /// If nobody listens there, or it is no monitor, or it is busy with another client.
    pub fn connect(path: &Path, limit: Limit) -> Result<Self> {
        let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        let left = limit.deadline().saturating_duration_since(Instant::now());
        // Linux waits no longer for a place in the queue of clients either. Zero would be for ever.
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(left.max(Duration::from_millis(1))))?;
        net::connect(&socket, &SocketAddrUnix::new(path)?)?;
        Self::open(UnixStream::from(socket), limit)
    }

    /// Begins to speak with the monitor at the other end of `stream`.
    ///
    /// # Errors
    /// If it is no monitor, or it is busy with another client.
    pub fn open(stream: UnixStream, limit: Limit) -> Result<Self> {
        let mut qmp = Self { wire: Wire::new(stream), limit, last_id: 0, is_usable: true };
        let greeting = qmp.wire.receive(limit.deadline(), ANSWER_BYTES_MAX)?;
        if greeting.get("QMP").is_none() {
            return Err(Error::Nonsense(format!("it greets with {greeting}")).shown());
        }
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Runs a command, and returns its result.
    ///
    /// # Errors
    /// If QEMU refuses it; or no answer comes in time, or one that makes no sense. Then it is not known whether the command was run.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        if !self.is_usable {
            return Err(Error::Closed);
        }
        let answer = self.exchange(command, arguments);
        self.is_usable = matches!(answer, Ok(_) | Err(Error::Refused { .. }));
        answer
    }

    /// Returns whether the guest's processors are running.
    ///
    /// # Errors
    /// As for [`Self::execute`].
    pub fn is_running(&mut self) -> Result<bool> {
        let status = self.execute("query-status", json!({}))?;
        Ok(status["running"].as_bool().unwrap_or(false))
    }

    /// Stops the guest's processors.
    ///
    /// # Errors
    /// As for [`Self::execute`].
    pub fn pause(&mut self) -> Result<()> {
        self.execute("stop", json!({})).map(drop)
    }

    /// Lets the guest's processors run.
    ///
    /// # Errors
    /// As for [`Self::execute`].
    pub fn resume(&mut self) -> Result<()> {
        self.execute("cont", json!({})).map(drop)
    }

    fn exchange(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let deadline = self.limit.deadline();
        self.last_id += 1;
        let id = json!(self.last_id);
        let request = json!({ "execute": command, "arguments": arguments, "id": id });
        self.wire.send(format!("{request}\n").as_bytes(), deadline)?;
        let mut bytes_left = ANSWER_BYTES_MAX;
        loop {
            let before = self.wire.received_bytes();
            let mut message = self.wire.receive(deadline, bytes_left)?;
            bytes_left = bytes_left.saturating_sub(self.wire.received_bytes().saturating_sub(before));
            // Events may come before the answer.
            if message.get("event").is_some() {
                continue;
            }
            if message.get("id") != Some(&id) {
                return Err(Error::Nonsense(format!("it answers {command} with {message}")).shown());
            }
            if let Some(error) = message.get("error") {
                return Err(Error::refused(command, error).shown());
            }
            match message.get_mut("return") {
                Some(result) => return Ok(result.take()),
                None => return Err(Error::Nonsense(format!("it answers {command} with {message}")).shown()),
            }
        }
    }
}

#[cfg(test)]
mod tests;
