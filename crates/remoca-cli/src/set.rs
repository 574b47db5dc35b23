//! `remoca set`: changes the cache of a running VM, or clears a failed flush.

use crate::output::output;
use crate::runtime;
use crate::size::{parse_size, show_size};
use anyhow::{Result, bail};
use clap::Args;
use remoca_io::address::Endpoint;
use remoca_io::show::sentence;
use remoca_protocol::control::{Command, KnownServerStatus, PoolStatus, Status};
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long the answer waits for the memory server to grant a new size.
const GRANT_TIME_MAX: Duration = Duration::from_secs(3);
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Change the cache of a running VM (size, on, off, memory servers), or clear the failed flush of a disk.
#[derive(Args, Debug)]
pub struct SetArgs {
    /// Name of the VM process, or the path of its control socket
    #[arg(value_name = "NAME")]
    name: String,

    /// New size of the cache, such as 2G; pages that still fit are kept
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    cache: Option<u64>,

    /// New size of the local tier, the memory of this host in front of the memory servers; 0 gives it back at once
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    local: Option<u64>,

    /// Turn the cache on; it starts cold
    #[arg(long, conflicts_with = "off")]
    on: bool,

    /// Turn the cache off, and release its memory; the disk keeps working
    #[arg(long)]
    off: bool,

    /// New list of memory servers, such as tcp:HOST:PORT; may be repeated. Pools of servers that are not named are drained:
    /// they get no new pages, and are given back when what they have was read, after ten minutes at most
    #[arg(long, value_name = "ADDRESS", conflicts_with_all = ["cache", "local", "on", "off"])]
    server: Vec<Endpoint>,

    /// With --server: leave servers that are not named at once, with all that is cached there; refused if none that is named answers
    #[arg(long, requires = "server", conflicts_with_all = ["cache", "on", "off"])]
    now: bool,

    /// Let flushes of this disk succeed again after one failed. Only if its image is known to be sound, or was repaired while
    /// the guest was off
    #[arg(long, value_name = "DISK", conflicts_with_all = ["cache", "local", "on", "off", "server"])]
    clear_failed_flush: Option<String>,

    /// Forget the failed flushes of images that were removed from this VM. Only if these images are known to be sound, or gone
    #[arg(long, conflicts_with_all = ["cache", "local", "on", "off", "server", "clear_failed_flush"])]
    clear_removed_flushes: bool,
}

/// Runs the subcommand.
///
/// # Errors
/// If there is nothing to change, or the VM process does not answer or refuses.
pub fn run(args: &SetArgs) -> Result<()> {
    if let Some(disk) = &args.clear_failed_flush {
        let socket = runtime::socket_named(&args.name)?;
        let before = runtime::ask(&socket, Command::Status)?;
        let had_failed = before.disks.iter().any(|known| known.name == *disk && known.failed_flush.is_some());
        let status = runtime::ask(&socket, Command::ClearFailedFlush { disk: disk.clone() })?;
        let text = match had_failed {
            true => format!("flushes of {disk} succeed again"),
            false => format!("no flush of {disk} had failed"),
        };
        return Ok(writeln!(output(), "{}: {text}", status.name)?);
    }
    if args.clear_removed_flushes {
        let socket = runtime::socket_named(&args.name)?;
        let status = runtime::ask(&socket, Command::ClearRemovedFlushes)?;
        return Ok(writeln!(output(), "{}: failed flushes of removed images are forgotten", status.name)?);
    }
    let enabled = match (args.on, args.off) {
        (true, _) => Some(true),
        (_, true) => Some(false),
        _ => None,
    };
    let servers: Option<Vec<_>> =
        (!args.server.is_empty()).then(|| args.server.iter().map(Endpoint::to_string).collect());
    if enabled.is_none() && args.cache.or(args.local).is_none() && servers.is_none() {
        bail!(
            "nothing to change: give --cache SIZE, --local SIZE, --on, --off, --server ADDRESS, --clear-failed-flush DISK or --clear-removed-flushes"
        );
    }
    let socket = runtime::socket_named(&args.name)?;
    if let Some(servers) = servers {
        let status = set_servers(&socket, servers, args.now)?;
        return Ok(write!(output(), "{}", servers_text(&status, &args.name))?);
    }
    let (cache_bytes, local_bytes) = (args.cache, args.local);
    let set = Command::Set { cache_bytes, local_bytes, enabled, servers: None, at_once: false };
    let status = settled(&socket, runtime::ask(&socket, set)?)?;
    let name = &status.name;
    let later = match args.cache.or(args.local) {
        Some(_) if !status.cache.enabled => format!(": the size is for the next `remoca set {name} --on`"),
        _ => String::new(),
    };
    let cold = status.state_lost.iter().map(|why| format!("\n{name}: {why}")).collect::<String>();
    Ok(writeln!(output(), "{name}: cache {}{later}{cold}", cache_text(&status))?)
}

/// Replaces the list of memory servers. Servers are left at once only if one of the new ones answers: a mistake in an address would
/// cost the whole cache.
fn set_servers(socket: &Path, servers: Vec<String>, now: bool) -> Result<Status> {
    let set = |servers, at_once| {
        let set = Command::Set { cache_bytes: None, local_bytes: None, enabled: None, servers: Some(servers), at_once };
        runtime::ask(socket, set)
    };
    let before = runtime::ask(socket, Command::Status)?;
    if !before.pools.iter().any(|pool| !pool.is_local_tier && !servers.contains(&pool.server)) {
        return set(servers, now);
    }
    let status = answered(socket, set(servers.clone(), false)?)?;
    if !now {
        return Ok(status);
    }
    if !listed(&status).any(answers) {
        let reasons: Vec<_> =
            listed(&status).map(|server| format!("{}: {}", server.endpoint, reason(server))).collect();
        set(listed(&before).map(|server| server.endpoint.clone()).collect(), false)?;
        bail!(
            "the cache would be lost: {} Nothing was changed. Start `remoca serve` there first, or leave out --now",
            sentence(&reasons.join("; "))
        );
    }
    set(servers, true)
}

/// Waits until each server of the list has answered or failed, but not for long. Returns the status then.
fn answered(socket: &Path, mut status: Status) -> Result<Status> {
    let give_up_at = Instant::now() + GRANT_TIME_MAX;
    while listed(&status).any(|server| !answers(server) && server.error.is_none()) && Instant::now() < give_up_at {
        std::thread::sleep(LOOK_EVERY);
        status = runtime::ask(socket, Command::Status)?;
    }
    Ok(status)
}

/// Returns the servers of the operator's list.
fn listed(status: &Status) -> impl Iterator<Item = &KnownServerStatus> {
    status.servers.iter().filter(|server| !server.is_local_tier)
}

/// Returns whether a server has a pool, or could have one.
fn answers(server: &KnownServerStatus) -> bool {
    server.in_use || server.error.is_none() && server.possible_bytes.is_some()
}

/// Returns why a server does not answer.
fn reason(server: &KnownServerStatus) -> &str {
    server.error.as_deref().unwrap_or("no answer yet")
}

/// Waits until the memory server has granted what is wanted, but not for long. Returns the status then.
fn settled(socket: &Path, mut status: Status) -> Result<Status> {
    let give_up_at = Instant::now() + GRANT_TIME_MAX;
    loop {
        let is_connected = status.server.as_ref().is_some_and(|server| server.connected);
        let cache = &status.cache;
        let is_granted = is_connected
            && cache.granted_bytes == cache.wanted_bytes
            && cache.local_granted_bytes == cache.local_wanted_bytes;
        if !status.cache.enabled || is_granted || Instant::now() >= give_up_at {
            return Ok(status);
        }
        std::thread::sleep(LOOK_EVERY);
        status = runtime::ask(socket, Command::Status)?;
    }
}

/// Returns the servers of the VM `name`, and which pools are drained.
fn servers_text(status: &Status, name: &str) -> String {
    let servers: Vec<_> = listed(status).map(|server| server.endpoint.as_str()).collect();
    let mut text = format!("{}: servers {}\n", status.name, servers.join(" "));
    let is_drained = |pool: &&PoolStatus| pool.state == "draining" && !servers.contains(&pool.server.as_str());
    let drained: Vec<_> = status.pools.iter().filter(is_drained).collect();
    for pool in &drained {
        text += &format!("{}: draining, {} left\n", pool.server, show_size(pool.used_bytes));
    }
    if !drained.is_empty() {
        for server in listed(status).filter(|server| !answers(server)) {
            text += &format!("{}: {}\n", server.endpoint, reason(server));
        }
        text += &format!(
            "It takes ten minutes at most; `remoca status {name} -v` shows what is left. The same command with --now leaves at once.\n"
        );
    }
    text
}

/// Returns the sizes of the cache and its local tier, and why a memory server grants less if it does.
fn cache_text(status: &Status) -> String {
    let cache = &status.cache;
    if !cache.enabled {
        return "off".into();
    }
    let local = local_text(status).map_or(String::new(), |local| format!("; local tier {local}"));
    format!("{}{local}", remote_text(status))
}

/// Returns the size of the local tier, and why its server grants less if it does. Returns `None` if there is no such tier.
fn local_text(status: &Status) -> Option<String> {
    let cache = &status.cache;
    let (wanted, granted) = (show_size(cache.local_wanted_bytes), show_size(cache.local_granted_bytes));
    let is_up = status.pools.iter().any(|pool| pool.is_local_tier);
    match (cache.local_wanted_bytes, cache.local_granted_bytes) {
        (0, _) => None,
        (all, given) if all == given => Some(format!("{wanted}, all granted")),
        _ if is_up && cache.local_granted_at_most_bytes > cache.local_granted_bytes => {
            Some(format!("{wanted}, of which {granted} are granted so far: the rest is on its way"))
        }
        _ if is_up => Some(format!(
            "{wanted}, of which {granted} are granted: the memory server of this host has no more to give now"
        )),
        _ => {
            let error = status.servers.iter().find(|server| server.is_local_tier);
            let error =
                error.and_then(|server| server.error.as_ref()).map_or(String::new(), |error| format!(" ({error})"));
            Some(format!("{wanted}, granted when there is a connection to the memory server of this host{error}"))
        }
    }
}

fn remote_text(status: &Status) -> String {
    let cache = &status.cache;
    if cache.wanted_bytes == 0 {
        return "0".into();
    }
    let (wanted, granted) = (show_size(cache.wanted_bytes), show_size(cache.granted_bytes));
    match (&status.server, status.servers.iter().find(|server| server.in_use && !server.is_local_tier)) {
        (Some(server), _) if !server.connected => {
            let error = server.error.as_ref().map_or(String::new(), |error| format!(" ({error})"));
            format!("{wanted}, granted when there is a connection to {}{error}", server.endpoint)
        }
        _ if cache.granted_bytes == cache.wanted_bytes => format!("{wanted}, all granted"),
        _ if cache.granted_at_most_bytes > cache.granted_bytes => {
            format!("{wanted}, of which {granted} are granted so far: the rest is on its way")
        }
        (_, Some(server)) => {
            format!("{wanted}, of which {granted} are granted: {} has no more to give now", server.endpoint)
        }
        _ => format!("{wanted}, of which {granted} are granted"),
    }
}
