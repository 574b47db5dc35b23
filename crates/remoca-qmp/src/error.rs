//! What goes wrong with a monitor.

use serde_json::Value;
use std::io;

/// Number of characters of what a monitor says that an error shows.
const SHOWN_CHARS_MAX: usize = 300;

pub type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}")]
    Io(io::Error),
    #[error(
        "it did not answer in time: QEMU hangs, or its monitor is busy with another client. It serves one at a time, so give it a monitor \
         of its own (-qmp unix:PATH,server=on,wait=off)"
    )]
    Silent,
    #[error("no QEMU listens there (-qmp unix:PATH,server=on,wait=off)")]
    Absent,
    #[error("it closed the connection")]
    Closed,
    #[error("it does not speak QMP as QEMU does: {0}")]
    Nonsense(String),
    /// QEMU's answer that it will not do it.
    #[error("{command}: {text}")]
    Refused { command: String, class: String, text: String },
}

impl Error {
    /// Returns QEMU's refusal of a command, which its member `error` tells.
    pub(crate) fn refused(command: &str, error: &Value) -> Self {
        let text = |member: &str| error[member].as_str().map(str::to_owned);
        let class = text("class").unwrap_or_default();
        Self::Refused { command: command.into(), class, text: text("desc").unwrap_or_else(|| error.to_string()) }
    }

    /// Returns whether the error is QEMU's refusal, of this class.
    #[must_use]
    pub fn is_refusal(&self, of_class: &str) -> bool {
        matches!(self, Self::Refused { class, .. } if class == of_class)
    }

    /// Returns the error with texts that fit a line of a terminal, whatever the other end has sent.
    pub(crate) fn shown(self) -> Self {
        match self {
            Self::Nonsense(text) => Self::Nonsense(shown(&text)),
            Self::Refused { command, class, text } => {
                Self::Refused { command, class: shown(&class), text: shown(&text) }
            }
            Self::Io(_) | Self::Silent | Self::Absent | Self::Closed => self,
        }
    }
}

fn shown(text: &str) -> String {
    let mut shown: String = text.chars().take(SHOWN_CHARS_MAX).collect();
    if shown.len() < text.len() {
        shown.push_str("...");
    }
    shown.replace(|c: char| c.is_control(), " ")
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Self::Silent,
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset | io::ErrorKind::UnexpectedEof => Self::Closed,
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => Self::Absent,
            _ => Self::Io(error),
        }
    }
}

impl From<rustix::io::Errno> for Error {
    fn from(error: rustix::io::Errno) -> Self {
        io::Error::from(error).into()
    }
}
