//! Errors that keep the agent from starting, each with an exit code for scripts and the systemd unit.
//!
//! None of them ends a running agent: it waits for a port that fails or vanishes.

use std::io;
use std::path::PathBuf;

use crate::page::PORT_VERSION;

#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    #[error("{context}: {source}")]
    Io { context: String, source: io::Error },

    #[error(
        "this kernel offers no type information: {0} is missing. The agent needs Linux 6.1 or later, built with \
         CONFIG_DEBUG_INFO_BTF=y (Debian, Ubuntu, Fedora and others have it)"
    )]
    NoBtf(PathBuf),

    #[error("not permitted: {0}. Run the agent as root, or give it the capabilities of its systemd unit")]
    NotPermitted(String),

    #[error(
        "no eviction port: {0}. Give the VM the port of its remoca process as one more disk, or name it with --port"
    )]
    NoPort(String),

    #[error("{device} is not an eviction port: {reason}. Nothing was written to it")]
    WrongPort { device: PathBuf, reason: String },

    #[error(
        "{device}: the port speaks version {version}, this agent version {PORT_VERSION}. Install the agent that belongs \
         to the remoca on the host"
    )]
    PortVersion { device: PathBuf, version: u32 },

    #[error("{0} is in use: another remoca-agent runs, or the disk is mounted")]
    PortInUse(PathBuf),

    #[error("the kernel refused the eBPF program: {reason}\n{log}")]
    ProgramRefused { reason: String, log: String },

    #[error("the eBPF program cannot capture now: {0}")]
    Busy(String),

    #[error(
        "memory cannot be locked: {0}. Raise the limit (`ulimit -l unlimited`, LimitMEMLOCK=infinity in the unit) or give \
         the agent CAP_IPC_LOCK"
    )]
    MemoryNotLocked(io::Error),
}

impl AgentError {
    pub fn io(context: impl Into<String>) -> impl FnOnce(io::Error) -> AgentError {
        let context = context.into();
        move |source| AgentError::Io { context, source }
    }

    /// Returns the exit code of this error. Code 2 is reserved for wrong usage of the command line.
    pub fn exit_code(&self) -> u8 {
        match self {
            AgentError::Io { .. } | AgentError::Busy(_) => 1,
            AgentError::NoBtf(_) => 3,
            AgentError::NotPermitted(_) => 4,
            AgentError::NoPort(_) => 5,
            AgentError::WrongPort { .. } => 6,
            AgentError::PortVersion { .. } => 7,
            AgentError::PortInUse(_) => 8,
            AgentError::ProgramRefused { .. } => 9,
            AgentError::MemoryNotLocked(_) => 10,
        }
    }
}

/// Table of exit codes, for `--help`.
pub const EXIT_CODES: &str = "\
Exit codes:
   0  done, or ended by SIGTERM or SIGINT
   1  any other error
   2  wrong usage
   3  the kernel offers no BTF
   4  not permitted (CAP_BPF and CAP_PERFMON, or the disk)
   5  no eviction port found
   6  the disk is not an eviction port
   7  the port speaks another version
   8  the port is in use
   9  the kernel refused the eBPF program
  10  memory cannot be locked";
