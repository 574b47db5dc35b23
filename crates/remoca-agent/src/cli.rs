//! The command line.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::check::check;
use crate::error::{AgentError, EXIT_CODES};
use crate::run::{Options, run};

/// Sends the pages that this guest evicts from its page cache to the remoca process of the VM.
///
/// Runs until SIGTERM. Needs root, or the capabilities of its systemd unit; an eviction port, which is a disk of this VM
/// with the serial number remoca-port; and a kernel with BTF.
#[derive(Debug, Parser)]
#[command(name = "remoca-agent", version, after_help = EXIT_CODES)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,

    /// The eviction port [default: the disk with the serial number remoca-port]
    #[arg(long, value_name = "DEVICE", global = true)]
    port: Option<PathBuf>,

    /// Room for pages in flight; pages that find no room are dropped and counted. A power of two, 64K to 256M
    #[arg(long, value_name = "SIZE", default_value = "8M", value_parser = parse_ring_bytes, global = true)]
    ring: u32,

    /// Wait for the port if it does not exist yet
    #[arg(long)]
    wait: bool,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Report what would work in this guest, and capture nothing
    Check,
}

pub fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let result = match arguments.command {
        Some(Command::Check) => check(arguments.port.as_deref(), arguments.ring),
        None => run(&Options { port: arguments.port, ring_bytes: arguments.ring, wait: arguments.wait }),
    };
    result.map_or_else(|error| report(&error), |()| ExitCode::SUCCESS)
}

fn report(error: &AgentError) -> ExitCode {
    writeln!(io::stderr(), "remoca-agent: {error}").ok();
    ExitCode::from(error.exit_code())
}

fn parse_ring_bytes(text: &str) -> Result<u32, String> {
    let (number, unit) = match text.strip_suffix(['K', 'k']) {
        Some(number) => (number, 1 << 10),
        None => match text.strip_suffix(['M', 'm']) {
            Some(number) => (number, 1 << 20),
            None => (text, 1),
        },
    };
    let bytes = number.parse::<u32>().ok().and_then(|number| number.checked_mul(unit));
    match bytes {
        Some(bytes) if bytes.is_power_of_two() && (64 << 10..=256 << 20).contains(&bytes) => Ok(bytes),
        _ => Err("not a power of two from 64K to 256M".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn command_line_is_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn ring_sizes() {
        assert_eq!(parse_ring_bytes("8M"), Ok(8 << 20));
        assert_eq!(parse_ring_bytes("64k"), Ok(64 << 10));
        assert_eq!(parse_ring_bytes("1048576"), Ok(1 << 20));
        for wrong in ["", "M", "3M", "32K", "512M", "8G", "-8M", "4294967296M", "8 M"] {
            assert!(parse_ring_bytes(wrong).is_err(), "{wrong}");
        }
    }
}
