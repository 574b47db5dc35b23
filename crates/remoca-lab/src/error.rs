//! Errors of the laboratory.

use std::{fmt::Display, io, path::Path, time::Duration};

pub type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{program} is not installed; scripts/install-deps.sh installs it")]
    NotInstalled { program: String },
    #[error("{what}: {source}")]
    Io { what: String, source: io::Error },
    #[error("`{command}` failed ({status}):\n{output}")]
    Command { command: String, status: String, output: String },
    /// A missed time limit, for which the guest was killed.
    #[error("guest {guest}: {what} took more than {} s; it was killed. Last console lines:\n{console}", limit.as_secs_f32())]
    GuestTimeout { guest: String, what: String, limit: Duration, console: String },
    #[error("guest {guest} ended during {what}. Last console lines:\n{console}")]
    GuestEnded { guest: String, what: String, console: String },
    #[error("guest {guest}: `{command}` {status}:\n{output}")]
    Job { guest: String, command: String, status: String, output: String },
    #[error("{service}: {what} took more than {} s. Last lines of its log:\n{log}", limit.as_secs_f32())]
    ServiceTimeout { service: String, what: String, limit: Duration, log: String },
    #[error("{service} ended ({status}). Last lines of its log:\n{log}")]
    ServiceEnded { service: String, status: String, log: String },
    #[error("{0}")]
    Invalid(String),
    #[error("QMP: {0}")]
    Qmp(#[from] remoca_qmp::Error),
}

/// Adds a description of the failed action to an I/O error.
pub(crate) trait Context<T> {
    fn context(self, what: impl Display) -> Result<T>;
    fn context_path(self, what: &str, path: &Path) -> Result<T>;
}

impl<T, E: Into<io::Error>> Context<T> for std::result::Result<T, E> {
    fn context(self, what: impl Display) -> Result<T> {
        self.map_err(|source| Error::Io { what: what.to_string(), source: source.into() })
    }

    fn context_path(self, what: &str, path: &Path) -> Result<T> {
        self.map_err(|source| Error::Io { what: format!("{what} {}", path.display()), source: source.into() })
    }
}
