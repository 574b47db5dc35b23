//! The command line.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use clap_complete::{Generator, Shell};

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

    /// Room for pages in flight; pages that find no room are dropped and counted. A power of two, 64K to 256M [default: up to 1/128
    /// of the guest's memory, 2M to 8M]
    #[arg(long, value_name = "SIZE", value_parser = parse_ring_bytes, global = true)]
    ring: Option<u32>,

    /// Wait for the port if it does not exist yet
    #[arg(long)]
    wait: bool,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Report what would work in this guest, and capture nothing
    Check,
    /// Write the manual pages, and the completions for bash, zsh and fish, into a folder. The package has them installed already
    Generate {
        /// The folder, which is made if it does not exist
        #[arg(value_name = "FOLDER")]
        folder: PathBuf,
    },
}

pub fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let ring_bytes = arguments.ring.unwrap_or_else(|| default_ring_bytes(guest_memory_bytes()));
    let result = match arguments.command {
        Some(Command::Generate { folder }) => match generate(&folder) {
            Ok(()) => return ExitCode::SUCCESS,
            Err(error) => {
                writeln!(io::stderr(), "remoca-agent: cannot write to {}: {error}", folder.display()).ok();
                return ExitCode::FAILURE;
            }
        },
        Some(Command::Check) => check(arguments.port.as_deref(), ring_bytes),
        None => run(&Options { port: arguments.port, ring_bytes, wait: arguments.wait }),
    };
    result.map_or_else(|error| report(&error), |()| ExitCode::SUCCESS)
}

fn generate(folder: &Path) -> io::Result<()> {
    std::fs::create_dir_all(folder)?;
    let mut command = Arguments::command().disable_help_subcommand(true);
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        // The library's own function for files panics where the disk is full.
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut command, "remoca-agent", &mut script);
        std::fs::write(folder.join(shell.file_name("remoca-agent")), script)?;
    }
    clap_mangen::generate_to(command, folder)
}

fn report(error: &AgentError) -> ExitCode {
    writeln!(io::stderr(), "remoca-agent: {error}").ok();
    ExitCode::from(error.exit_code())
}

fn guest_memory_bytes() -> u64 {
    let system = rustix::system::sysinfo();
    system.totalram.saturating_mul(system.mem_unit.into())
}

/// Returns the size of the ring in a guest with so much memory: the ring is memory that the guest's programs do not get.
fn default_ring_bytes(guest_memory_bytes: u64) -> u32 {
    let share = u32::try_from(guest_memory_bytes / 128).unwrap_or(u32::MAX);
    1 << share.clamp(2 << 20, 8 << 20).ilog2()
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

    #[test]
    fn command_line_is_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn pages_and_completions_name_the_options() {
        let folder = tempfile::tempdir().unwrap();
        generate(&folder.path().join("new")).unwrap();
        let read = |name: &str| std::fs::read_to_string(folder.path().join("new").join(name)).unwrap();
        for name in ["remoca-agent.bash", "_remoca-agent", "remoca-agent.fish"] {
            assert!(read(name).contains("ring") && read(name).contains("check"), "{name}");
        }
        assert!(read("remoca-agent.1").contains("\\-\\-ring") && read("remoca-agent.1").contains("wrong usage"));
        assert!(read("remoca-agent-check.1").contains(".SH OPTIONS"));
    }

    #[test]
    fn a_full_disk_is_an_error() {
        for name in
            ["remoca-agent.bash", "_remoca-agent", "remoca-agent.fish", "remoca-agent.1", "remoca-agent-check.1"]
        {
            let folder = tempfile::tempdir().unwrap();
            std::os::unix::fs::symlink("/dev/full", folder.path().join(name)).unwrap();
            let error = generate(folder.path()).expect_err(name);
            assert_eq!(error.kind(), io::ErrorKind::StorageFull, "{name}");
        }
    }

    #[test]
    fn ring_is_small_in_a_small_guest() {
        let sizes = [0, 120 << 20, 250 << 20, 700 << 20, 1 << 30, 64 << 30, u64::MAX].map(default_ring_bytes);
        assert_eq!(sizes.map(|bytes| bytes >> 10), [2048, 2048, 2048, 4096, 8192, 8192, 8192]);
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
