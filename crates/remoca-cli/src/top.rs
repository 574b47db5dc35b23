//! `remoca top`: all VMs of this host on a terminal.

use crate::number::whole_in;
use crate::runtime::{self, KnownSockets};
use anyhow::{Result, bail};
use clap::Args;
use remoca_host::record::Paths;
use remoca_view::address::Address;
use remoca_view::top::{self, Options};
use remoca_view::watch::Sockets;
use std::path::PathBuf;
use std::time::Duration;

/// Show all VMs of this host on the terminal: what is wrong, what the cache does, and for one VM its curve and its last minutes.
///
/// Keys: q quits, up and down select a VM, Enter shows everything about it, left and right choose the column that sorts, r reverses.
/// Without a terminal, or on one that shows only lines (TERM=dumb), it prints one frame.
#[derive(Args, Debug)]
pub struct TopArgs {
    /// Only these VMs: names, or paths of control sockets [default: all that run here]
    #[arg(value_name = "NAME", conflicts_with = "from")]
    names: Vec<String>,

    /// Time between two looks
    #[arg(short, long, value_name = "SECONDS", default_value_t = 4,
          value_parser = whole_in("number of seconds", 1_u32..=3600))]
    interval: u32,

    /// Print one frame as text, of what happens in a second, and exit
    #[arg(long)]
    once: bool,

    /// Show the snapshots of the `remoca web` at this address (127.0.0.1:9170, unix:/PATH) instead of asking
    #[arg(long, value_name = "ADDRESS")]
    from: Option<Address>,
}

/// Runs the subcommand.
///
/// # Errors
/// If no VM process may be asked by this user, the page does not answer, or the terminal cannot be used.
pub fn run(args: TopArgs) -> Result<()> {
    let TopArgs { names, interval, once, from } = args;
    let asks_all = from.is_none() && names.is_empty();
    let sockets = sockets_of(names)?;
    if asks_all && sockets().is_empty() {
        let others = runtime::of_others("top");
        if !others.is_empty() {
            bail!("there is no VM process that you may ask{others}");
        }
    }
    top::run(Options {
        from,
        interval: Duration::from_secs(interval.into()),
        is_once: once,
        sockets,
        host_socket: host_socket(),
    })
}

/// Returns the socket of the daemon that divides memory, which need not run.
pub fn host_socket() -> Option<PathBuf> {
    runtime::directory().map(|directory| Paths::new(&directory).socket)
}

/// Returns what finds the control sockets of the VMs with these names, or all of this host each time.
///
/// # Errors
/// If there is no directory for control sockets, and a name is no path.
pub fn sockets_of(names: Vec<String>) -> Result<Sockets> {
    if names.is_empty() {
        let known = KnownSockets::default();
        // A user without a directory has no processes.
        return Ok(Box::new(move || runtime::directory().map(|it| known.read(&it)).unwrap_or_default()));
    }
    let sockets = names.iter().map(|name| runtime::socket_named(name)).collect::<Result<Vec<_>>>()?;
    Ok(Box::new(move || sockets.clone()))
}
