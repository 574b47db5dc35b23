//! `remoca migrate`: hands the disks and the cache of a VM to a process on another host.

use crate::runtime;
use anyhow::{Result, bail};
use clap::{ArgGroup, Args};
use remoca_disk::control::Command;
use remoca_disk::endpoint::Endpoint;
use std::io::Write;

/// Hand the disks and the cache of a VM that migrates to the process on the other host. Say it before the hypervisor
/// migrates; the other process was started with --incoming. The disks go over when the guest stops here, and come back if it
/// goes on here
#[derive(Args, Debug)]
#[command(group(ArgGroup::new("what").required(true)))]
pub struct MigrateArgs {
    /// Name of the VM process, or the path of its control socket
    #[arg(value_name = "NAME")]
    name: String,

    /// Where the other process waits: what its --incoming says, with the name of its host
    #[arg(long, value_name = "ADDRESS", group = "what")]
    to: Option<Endpoint>,

    /// Do not hand the disks over after all
    #[arg(long, group = "what")]
    abort: bool,

    /// Take disks back that were handed over, with a cold cache, when the other process is out of reach. Only if the VM runs
    /// nowhere else: two VMs on one disk destroy it
    #[arg(long, group = "what")]
    take_back: bool,
}

/// Runs the subcommand.
///
/// # Errors
/// If one of the two processes does not answer or refuses; the text says why.
pub fn run(args: &MigrateArgs) -> Result<()> {
    let Some(socket) = runtime::sockets(Some(&args.name))?.pop() else { bail!("no such VM process") };
    let command = match &args.to {
        Some(to) => Command::Migrate { to: to.to_string() },
        None if args.abort => Command::MigrateAbort,
        None => Command::MigrateTakeBack,
    };
    let status = runtime::ask(&socket, command)?;
    let news = status.migration.and_then(|migration| migration.news).unwrap_or_default();
    Ok(writeln!(std::io::stdout(), "{}: {news}", status.name)?)
}
