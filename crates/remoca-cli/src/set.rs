//! `remoca set`: changes the cache of a running VM, or clears a failed flush.

use crate::runtime;
use crate::size::{parse_size, show_size};
use anyhow::{Result, bail};
use clap::Args;
use remoca_io::address::Endpoint;
use remoca_protocol::control::Command;
use std::io::Write;

/// Change the cache of a running VM: its size, on, off, its memory servers. Or clear the failed flush of a disk.
#[derive(Args, Debug)]
pub struct SetArgs {
    /// Name of the VM process, or the path of its control socket
    #[arg(value_name = "NAME")]
    name: String,

    /// New size of the cache, such as 2G; pages that still fit are kept
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    cache: Option<u64>,

    /// Turn the cache on; it starts cold
    #[arg(long, conflicts_with = "off")]
    on: bool,

    /// Turn the cache off, and release its memory; the disk keeps working
    #[arg(long)]
    off: bool,

    /// New list of memory servers, such as tcp:HOST:PORT; may be repeated. Servers that are not named are left at once and get
    /// their memory back
    #[arg(long, value_name = "ADDRESS", conflicts_with_all = ["cache", "on", "off"])]
    server: Vec<Endpoint>,

    /// Let flushes of this disk succeed again after one failed. Only if its image is known to be sound, or was repaired while
    /// the guest was off
    #[arg(long, value_name = "DISK", conflicts_with_all = ["cache", "on", "off", "server"])]
    clear_failed_flush: Option<String>,
}

/// Runs the subcommand.
///
/// # Errors
/// If there is nothing to change, or the VM process does not answer or refuses.
pub fn run(args: &SetArgs) -> Result<()> {
    if let Some(disk) = &args.clear_failed_flush {
        let Some(socket) = runtime::sockets(Some(&args.name))?.pop() else { bail!("there is no such VM process") };
        let status = runtime::ask(&socket, Command::ClearFailedFlush { disk: disk.clone() })?;
        return Ok(writeln!(std::io::stdout(), "{}: flushes of {disk} succeed again", status.name)?);
    }
    let enabled = match (args.on, args.off) {
        (true, _) => Some(true),
        (_, true) => Some(false),
        _ => None,
    };
    let servers: Option<Vec<_>> =
        (!args.server.is_empty()).then(|| args.server.iter().map(Endpoint::to_string).collect());
    if enabled.is_none() && args.cache.is_none() && servers.is_none() {
        bail!("nothing to change: give --cache SIZE, --on, --off, --server ADDRESS or --clear-failed-flush DISK");
    }
    let Some(socket) = runtime::sockets(Some(&args.name))?.pop() else { bail!("there is no such VM process") };
    let status = runtime::ask(&socket, Command::Set { cache_bytes: args.cache, enabled, servers })?;
    if !args.server.is_empty() {
        let servers: Vec<_> = status.servers.iter().map(|server| server.endpoint.as_str()).collect();
        return Ok(writeln!(std::io::stdout(), "{}: servers {}", status.name, servers.join(" "))?);
    }
    let state = if status.cache.enabled { show_size(status.cache.wanted_bytes) } else { "off".into() };
    Ok(writeln!(std::io::stdout(), "{}: cache {state}", status.name)?)
}
