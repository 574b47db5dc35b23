//! `remoca status`: one line for each VM, or everything about one.

use crate::runtime;
use crate::size::show_size;
use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use remoca_protocol::control::{
    Command, DiskStatus, HedgingStatus, KnownServerStatus, Latencies, MemoryStatus, MigrationStatus, NormalLatency,
    PortStatus, Status,
};
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

/// Show what the cache does for each running VM of this host.
#[derive(Args, Debug)]
pub struct StatusArgs {
    /// Only this VM: its name, or the path of its control socket
    #[arg(value_name = "NAME")]
    name: Option<String>,

    /// Show again every so many seconds; the figures are then those of the interval
    #[arg(short, long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..=86400))]
    interval: Option<u32>,

    /// Stop after so many lines [default: never]
    #[arg(short, long, value_name = "N", requires = "interval")]
    count: Option<u32>,

    /// Everything, not only one line for each VM
    #[arg(short, long)]
    verbose: bool,

    /// Form of the output
    #[arg(short, long, value_enum, default_value_t = Form::Table)]
    output: Form,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Form {
    Table,
    Json,
}

/// Runs the subcommand.
///
/// # Errors
/// If the VM that was named does not answer.
pub fn run(args: &StatusArgs) -> Result<()> {
    let mut before: Vec<Status> = Vec::new();
    let mut shown = 0;
    loop {
        let now = collect(args)?;
        show(args, &now, &before)?;
        shown += 1;
        let Some(interval) = args.interval.filter(|_| args.count.is_none_or(|count| shown < count)) else {
            return Ok(());
        };
        before = now;
        std::thread::sleep(Duration::from_secs(interval.into()));
    }
}

fn collect(args: &StatusArgs) -> Result<Vec<Status>> {
    let sockets = runtime::sockets(args.name.as_deref())?;
    if args.name.is_some() {
        return sockets.iter().map(|socket| runtime::ask(socket, Command::Status)).collect();
    }
    // A process that died leaves its socket behind; the others are still shown.
    let answer = |socket: &PathBuf| match runtime::ask(socket, Command::Status) {
        Ok(status) => Some(status),
        Err(error) => {
            eprintln!("remoca: {error:#}");
            None
        }
    };
    Ok(sockets.iter().filter_map(answer).collect())
}

fn show(args: &StatusArgs, now: &[Status], before: &[Status]) -> Result<()> {
    let mut out = std::io::stdout().lock();
    if args.output == Form::Json {
        serde_json::to_writer(&mut out, now)?;
        writeln!(out)?;
        return Ok(());
    }
    if now.is_empty() {
        bail!("no VM process runs here (start one with `remoca disk`)");
    }
    if args.verbose {
        for status in now {
            show_all(&mut out, status)?;
        }
        return Ok(());
    }
    if before.is_empty() {
        writeln!(out, "{HEADING}")?;
    }
    for status in now {
        let earlier = before.iter().find(|earlier| earlier.pid == status.pid && earlier.name == status.name);
        writeln!(out, "{}", line(status, earlier))?;
    }
    out.flush()?;
    Ok(())
}

const HEADING: &str = "VM               CACHE      USED   SERVER        READS   HIT%  CACHE us   DISK us   WRITES  EVICTED  KNOWN%   POOL AT";

/// Returns the line of one VM, since its start or since `earlier`.
fn line(status: &Status, earlier: Option<&Status>) -> String {
    let count = |name: &str| {
        let value = |status: &Status| status.counters.get(name).copied().unwrap_or(0);
        value(status).saturating_sub(earlier.map_or(0, value))
    };
    let hits = count("hit_blocks") + count("zero_blocks");
    let all = hits + count("missed_blocks") + count("covered_blocks");
    // Pages that nobody used before say nothing.
    let frames = count("frames_looked_at") - count("frames_zero").min(count("frames_looked_at"));
    let evicted = count("evictions_reported") + frames;
    let known = evicted - (count("evictions_unmatched") + count("frames_unmatched")).min(evicted);
    let mean = |pick: fn(&Status) -> (u64, u64)| {
        let (sum, number) = pick(status);
        let (sum_before, number_before) = earlier.map_or((0, 0), pick);
        ratio(sum.saturating_sub(sum_before), number.saturating_sub(number_before))
            .map_or("-".into(), |ns| format!("{:.0}", ns / 1000.0))
    };
    let server = match &status.server {
        None => "none",
        Some(server) if server.connected && server.breaker != "closed" => "left alone",
        Some(server) if server.connected => "connected",
        Some(_) => "unreachable",
    };
    let pool_at = status.servers.iter().find(|server| server.in_use).map_or("-", |server| &server.endpoint);
    let failed = status.disks.iter().filter(|disk| disk.failed_flush.is_some());
    let failed: String = failed.map(|disk| format!("   FLUSHES OF {} FAIL (see -v)", disk.name)).collect();
    format!(
        "{:<16} {:>5} {:>9}   {:<11} {:>7} {:>6} {:>9} {:>9} {:>8} {:>8} {:>7}   {pool_at}{failed}",
        status.name,
        if status.cache.enabled { show_size(status.cache.granted_bytes) } else { "off".into() },
        show_size(status.cache.used_bytes),
        server,
        count("reads"),
        percent(hits, all),
        mean(|s| (s.latency.read_from_cache.sum_ns, s.latency.read_from_cache.count)),
        mean(|s| (s.latency.read_from_disk.sum_ns, s.latency.read_from_disk.count)),
        count("writes"),
        evicted,
        percent(known, evicted),
    )
}

fn show_all(out: &mut impl Write, status: &Status) -> Result<()> {
    writeln!(out, "{} (process {}, up {:.0} s, version {})", status.name, status.pid, status.uptime_s, status.version)?;
    match &status.cold_reason {
        Some(reason) => writeln!(out, "  started     {}: {reason}", status.started)?,
        None => writeln!(out, "  started     {}", status.started)?,
    }
    if let Some(migration) = &status.migration {
        show_migration(out, migration)?;
    }
    show_cache(out, status)?;
    for disk in &status.disks {
        show_disk(out, &status.name, disk)?;
    }
    if let Some(port) = &status.port {
        show_port(out, port)?;
    }
    show_latency(out, &status.latency)?;
    show_hedging(out, &status.hedging)?;
    show_memory(out, &status.memory)?;
    if let Some(lost) = status.trace_lost.filter(|lost| *lost > 0) {
        writeln!(out, "  trace       {lost} records were lost: its file takes them too slowly, or not at all")?;
    }
    for (name, value) in &status.counters {
        writeln!(out, "  {name:<26} {value:>12}")?;
    }
    Ok(())
}

fn show_cache(out: &mut impl Write, status: &Status) -> Result<()> {
    match &status.server {
        None => writeln!(out, "  server      none: nothing is cached")?,
        Some(server) => {
            let state = match (&server.error, server.connected) {
                (Some(error), false) => format!("not connected: {error}"),
                (None, false) => "not connected yet".into(),
                (_, true) if server.breaker == "closed" => "connected".into(),
                (_, true) => format!("connected, slower than the disk: left alone (breaker {})", server.breaker),
            };
            writeln!(out, "  server      {} {state}", server.endpoint)?;
        }
    }
    if status.servers.len() > 1 {
        for server in &status.servers {
            writeln!(out, "  of          {}", known_server(server))?;
        }
    }
    let cache = &status.cache;
    let (wanted, granted) = (show_size(cache.wanted_bytes), show_size(cache.granted_bytes));
    let state = if cache.enabled { "on" } else { "off" };
    writeln!(out, "  cache       {state}, {wanted} wanted, {granted} granted, {} used", show_size(cache.used_bytes))?;
    Ok(writeln!(out, "  admission   by {}", cache.admission)?)
}

fn show_disk(out: &mut impl Write, vm: &str, disk: &DiskStatus) -> Result<()> {
    let attached = attached(disk.attached, disk.nbd_clients);
    let access = if disk.read_only { ", read-only" } else { "" };
    let swap = if disk.swap_areas > 0 { format!(", {} swap areas", disk.swap_areas) } else { String::new() };
    let DiskStatus { name, image, store, socket, .. } = disk;
    let bytes = show_size(disk.bytes);
    writeln!(out, "  disk        {name}: {image} ({bytes}{access}{swap}, {store}) at {socket}, {attached}")?;
    if let Some(error) = &disk.failed_flush {
        let clear = format!("remoca set {vm} --clear-failed-flush {name}");
        writeln!(out, "              a flush failed ({error}), and so do all others until `{clear}`")?;
    }
    if let Some(reason) = &disk.cold_reason {
        writeln!(out, "              started cold: {reason}")?;
    }
    Ok(())
}

fn show_port(out: &mut impl Write, port: &PortStatus) -> Result<()> {
    let attached = attached(port.attached, port.nbd_clients);
    let agent = match port.agent {
        None => "no agent heard of".into(),
        Some(agent) => {
            format!("agent: {} captured, {} lost, {} left out", agent.captured, agent.lost, agent.sampled_out)
        }
    };
    Ok(writeln!(out, "  port        {}, {attached}, {agent}", port.socket)?)
}

fn show_latency(out: &mut impl Write, latency: &Latencies) -> Result<()> {
    let rows = [
        ("read", &latency.read),
        ("  by cache", &latency.read_from_cache),
        ("  by disk", &latency.read_from_disk),
        ("write", &latency.write),
    ];
    for (name, row) in rows {
        writeln!(
            out,
            "  {name:<11} {:>9} requests, mean {:.0} us, p50 {:.0}, p99 {:.0}, p99.9 {:.0}, longest {:.0}",
            row.count, row.mean_us, row.p50_us, row.p99_us, row.p999_us, row.max_us
        )?;
    }
    Ok(())
}

fn show_memory(out: &mut impl Write, memory: &MemoryStatus) -> Result<()> {
    let (index, buffers) = (show_size(memory.index_bytes), show_size(memory.buffer_bytes));
    writeln!(out, "  memory      index {index}, buffers {buffers}, {} blocks known", memory.known_blocks)?;
    if memory.guest_bytes > memory.guest_bytes_indexed {
        let (guest, indexed) = (show_size(memory.guest_bytes), show_size(memory.guest_bytes_indexed));
        writeln!(out, "              the guest has {guest}, the index is made for {indexed} (--guest-memory-max)")?;
    }
    Ok(())
}

fn show_migration(out: &mut impl Write, migration: &MigrationStatus) -> Result<()> {
    let place = if migration.has_disks { "the disks are here" } else { "the disks are not here" };
    let peer = migration.peer.as_ref().map_or(String::new(), |peer| format!(", connected with {peer}"));
    writeln!(out, "  migration   {place}{peer}")?;
    if let Some(news) = &migration.news {
        writeln!(out, "              {news}")?;
    }
    Ok(())
}

fn show_hedging(out: &mut impl Write, hedging: &HedgingStatus) -> Result<()> {
    let normal = |latency: &Option<NormalLatency>| match latency {
        None => "not known yet".into(),
        Some(latency) => format!("p50 {:.0} us, p99 {:.0}", latency.p50_us, latency.p99_us),
    };
    let (disk, server) = (normal(&hedging.disk), normal(&hedging.server));
    writeln!(out, "  now         disk {disk}; server {server}; late after {:.0} us", hedging.late_after_us)?;
    Ok(())
}

fn known_server(server: &KnownServerStatus) -> String {
    let state = match (&server.error, server.in_use) {
        (Some(error), _) => error.clone(),
        (None, true) => "has the pool".into(),
        (None, false) => "not in use".into(),
    };
    match (server.possible_bytes, server.answered_s_ago) {
        (Some(bytes), Some(ago)) => {
            format!("{}: {state}; {ago} s ago it could give {}", server.endpoint, show_size(bytes))
        }
        _ => format!("{}: {state}", server.endpoint),
    }
}

fn attached(attached: bool, nbd_clients: Option<usize>) -> String {
    match nbd_clients {
        Some(1) => "1 NBD client".into(),
        Some(clients @ 2..) => format!("{clients} NBD clients"),
        Some(0) | None => if attached { "attached" } else { "no guest" }.into(),
    }
}

#[expect(clippy::cast_precision_loss, reason = "for people to read")]
fn ratio(part: u64, all: u64) -> Option<f64> {
    (all > 0).then(|| part as f64 / all as f64)
}

fn percent(part: u64, all: u64) -> String {
    ratio(part, all).map_or("-".into(), |share| format!("{:.1}", share * 100.0))
}
