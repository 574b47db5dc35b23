//! `remoca upgrade`: replaces the program of a running VM process, which keeps its process ID and all of its sockets.

use crate::runtime;
use anyhow::{Context, Result, bail};
use clap::Args;
use remoca_protocol::control::Command;
use std::io::Write;
use std::path::PathBuf;

/// Upgrade a running VM process in place: the guest pauses for about a second, and nothing is restarted.
///
/// First the new program is asked whether it can take over; if it cannot, nothing changes. SIGHUP does the same with the
/// program at the path from which the process was started.
#[derive(Args, Debug)]
pub struct UpgradeArgs {
    /// Name of the VM process, or the path of its control socket
    #[arg(value_name = "NAME")]
    name: String,

    /// The program to run from now on [default: the one at the path from which the process was started]
    #[arg(long, value_name = "PATH")]
    program: Option<PathBuf>,
}

/// Runs the subcommand.
///
/// # Errors
/// If the VM process does not answer, or continues without the upgrade.
pub fn run(args: &UpgradeArgs) -> Result<()> {
    let program = args.program.as_ref().map(std::path::absolute).transpose().context("no working directory")?;
    let Some(socket) = runtime::sockets(Some(&args.name))?.pop() else { bail!("there is no such VM process") };
    let status = runtime::ask(&socket, Command::Upgrade { program })?;
    let (name, pid, version) = (&status.name, status.pid, &status.version);
    Ok(writeln!(std::io::stdout(), "{name}: process {pid} runs version {version}")?)
}
