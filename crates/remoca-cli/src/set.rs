//! `remoca set`: changes the cache of a running VM.

use crate::runtime;
use crate::size::{parse_size, show_size};
use anyhow::{Result, bail};
use clap::Args;
use remoca_disk::control::Command;
use std::io::Write;

/// Change the cache of a running VM: its size, on, off.
#[derive(Args, Debug)]
pub struct SetArgs {
    /// Name of the VM process, or the path of its control socket
    #[arg(value_name = "NAME")]
    name: String,

    /// New size of the cache, such as 2G; pages that still fit stay
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    cache: Option<u64>,

    /// Turn the cache on; it starts cold
    #[arg(long, conflicts_with = "off")]
    on: bool,

    /// Turn the cache off, and give its memory back; the disk works on
    #[arg(long)]
    off: bool,
}

/// Runs the subcommand.
///
/// # Errors
/// If there is nothing to change, or the VM process does not answer or refuses.
pub fn run(args: &SetArgs) -> Result<()> {
    let enabled = match (args.on, args.off) {
        (true, _) => Some(true),
        (_, true) => Some(false),
        _ => None,
    };
    if enabled.is_none() && args.cache.is_none() {
        bail!("nothing to change: say --cache SIZE, --on or --off");
    }
    let Some(socket) = runtime::sockets(Some(&args.name))?.pop() else { bail!("no such VM process") };
    let status = runtime::ask(&socket, Command::Set { cache_bytes: args.cache, enabled })?;
    let state = if status.cache.enabled { show_size(status.cache.wanted_bytes) } else { "off".into() };
    Ok(writeln!(std::io::stdout(), "{}: cache {state}", status.name)?)
}
