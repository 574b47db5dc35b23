//! Everything about one VM, as lines of a label and a text. Pure.

use super::figures::ServerState;
use crate::size::show_size;
use remoca_protocol::control::{
    DiskStatus, KnownServerStatus, LatencySummary, MemoryStatus, MigrationStatus, NormalLatency, PortStatus, Status,
};

/// One line. A line without a label continues the subject of the line above.
#[derive(Debug, PartialEq, Eq)]
pub struct Detail {
    pub label: &'static str,
    pub text: String,
}

/// Returns the lines that `remoca status -v` shows for a VM between its first line and its counters.
pub fn of(status: &Status) -> Vec<Detail> {
    let mut lines = Lines(Vec::new());
    let reason = status.cold_reason.as_ref().map_or(String::new(), |reason| format!(": {reason}"));
    lines.add("started", format!("{}{reason}", status.started));
    status.migration.iter().for_each(|migration| lines.add_migration(migration));
    lines.add_cache(status);
    status.disks.iter().for_each(|disk| lines.add_disk(&status.name, disk));
    status.port.iter().for_each(|port| lines.add("port", port_text(port)));
    let latency = &status.latency;
    lines.add("read", latency_text(&latency.read));
    lines.add("  by cache", latency_text(&latency.read_from_cache));
    lines.add("  by disk", latency_text(&latency.read_from_disk));
    lines.add("write", latency_text(&latency.write));
    let (disk, server) = (normal(status.hedging.disk.as_ref()), normal(status.hedging.server.as_ref()));
    lines.add("now", format!("disk {disk}; server {server}; late after {:.0} us", status.hedging.late_after_us));
    lines.add_memory(&status.memory);
    if let Some(lost) = status.trace_lost.filter(|lost| *lost > 0) {
        lines.add("trace", format!("{lost} records lost: writing to the trace file fails or is too slow"));
    }
    lines.0
}

struct Lines(Vec<Detail>);

impl Lines {
    fn add(&mut self, label: &'static str, text: String) {
        self.0.push(Detail { label, text });
    }

    fn add_migration(&mut self, migration: &MigrationStatus) {
        let place = if migration.has_disks { "the disks are here" } else { "the disks are not here" };
        let peer = migration.peer.as_ref().map_or(String::new(), |peer| format!(", connected to {peer}"));
        self.add("migration", format!("{place}{peer}"));
        migration.news.iter().for_each(|news| self.add("", news.clone()));
    }

    fn add_cache(&mut self, status: &Status) {
        self.add("server", server_text(status));
        if status.servers.len() > 1 {
            status.servers.iter().for_each(|server| self.add("of", known_server(server)));
        }
        let cache = &status.cache;
        let (wanted, granted) = (show_size(cache.wanted_bytes), show_size(cache.granted_bytes));
        let state = if cache.enabled { "on" } else { "off" };
        self.add("cache", format!("{state}, {wanted} wanted, {granted} granted, {} used", show_size(cache.used_bytes)));
        self.add("admission", format!("by {}", cache.admission));
    }

    fn add_disk(&mut self, vm: &str, disk: &DiskStatus) {
        let attached = attached(disk.attached, disk.nbd_clients);
        let access = if disk.read_only { ", read-only" } else { "" };
        let swap = if disk.swap_areas > 0 { format!(", {} swap areas", disk.swap_areas) } else { String::new() };
        let DiskStatus { name, image, store, socket, .. } = disk;
        let bytes = show_size(disk.bytes);
        self.add("disk", format!("{name}: {image} ({bytes}{access}{swap}, {store}) at {socket}, {attached}"));
        if let Some(error) = &disk.failed_flush {
            let clear = format!("remoca set {vm} --clear-failed-flush {name}");
            self.add("", format!("a flush failed ({error}); all others fail until `{clear}`"));
        }
        disk.cold_reason.iter().for_each(|reason| self.add("", format!("started cold: {reason}")));
    }

    fn add_memory(&mut self, memory: &MemoryStatus) {
        let (index, buffers) = (show_size(memory.index_bytes), show_size(memory.buffer_bytes));
        self.add("memory", format!("index {index}, buffers {buffers}, {} blocks known", memory.known_blocks));
        if memory.guest_bytes > memory.guest_bytes_indexed {
            let (guest, indexed) = (show_size(memory.guest_bytes), show_size(memory.guest_bytes_indexed));
            self.add("", format!("the guest has {guest}, the index is made for {indexed} (--guest-memory-max)"));
        }
    }
}

fn server_text(status: &Status) -> String {
    let Some(server) = &status.server else { return "none: nothing is cached".into() };
    let state = match (ServerState::of(Some(server)), &server.error) {
        (ServerState::Connected, _) => "connected".into(),
        (ServerState::LeftAlone, _) => {
            format!("connected, slower than the disk: left alone (breaker {})", server.breaker)
        }
        (_, Some(error)) => format!("not connected: {error}"),
        (_, None) => "not connected yet".into(),
    };
    format!("{} {state}", server.endpoint)
}

fn known_server(server: &KnownServerStatus) -> String {
    let state = match (&server.error, server.in_use) {
        (Some(error), _) => error.as_str(),
        (None, true) => "has the pool",
        (None, false) => "not in use",
    };
    match (server.possible_bytes, server.answered_s_ago) {
        (Some(bytes), Some(ago)) => {
            format!("{}: {state}; offered {} {ago} s ago", server.endpoint, show_size(bytes))
        }
        _ => format!("{}: {state}", server.endpoint),
    }
}

fn port_text(port: &PortStatus) -> String {
    let attached = attached(port.attached, port.nbd_clients);
    let agent = match port.agent {
        None => "no report from an agent yet".into(),
        Some(agent) => {
            format!("agent: {} captured, {} lost, {} left out", agent.captured, agent.lost, agent.sampled_out)
        }
    };
    format!("{}, {attached}, {agent}", port.socket)
}

fn latency_text(latency: &LatencySummary) -> String {
    let LatencySummary { count, mean_us, p50_us, p99_us, p999_us, max_us, .. } = latency;
    format!(
        "{count:>9} requests, mean {mean_us:.0} us, p50 {p50_us:.0}, p99 {p99_us:.0}, p99.9 {p999_us:.0}, longest {max_us:.0}"
    )
}

fn normal(latency: Option<&NormalLatency>) -> String {
    latency.map_or("not known yet".into(), |latency| format!("p50 {:.0} us, p99 {:.0}", latency.p50_us, latency.p99_us))
}

fn attached(attached: bool, nbd_clients: Option<usize>) -> String {
    match nbd_clients {
        Some(1) => "1 NBD client".into(),
        Some(clients @ 2..) => format!("{clients} NBD clients"),
        Some(0) | None => if attached { "attached" } else { "no guest" }.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::figures::tests::status;
    use super::*;
    use serde_json::json;

    fn text_of(status: &Status, label: &str) -> String {
        of(status).into_iter().filter(|detail| detail.label == label).map(|detail| detail.text + "\n").collect()
    }

    #[test]
    fn details_of_a_vm_that_is_well() {
        let status = status(json!({}), [0, 0], [0, 0]);
        assert_eq!(text_of(&status, "started"), "cold\n");
        assert_eq!(text_of(&status, "server"), "unix:/s connected\n");
        assert_eq!(text_of(&status, "of"), "unix:/r: no\nunix:/s: has the pool; offered 8K 1 s ago\n");
        assert_eq!(text_of(&status, "cache"), "on, 8K wanted, 8K granted, 4K used\n");
        assert_eq!(text_of(&status, "disk"), "a: i (4K, up) at s, attached\n");
        assert_eq!(text_of(&status, "") + &text_of(&status, "trace"), "");
    }

    #[test]
    fn details_of_what_is_wrong() {
        let mut status = status(json!({}), [0, 0], [0, 0]);
        status.cold_reason = Some("no state".into());
        status.server.as_mut().unwrap().connected = false;
        status.disks[0].failed_flush = Some("EIO".into());
        status.memory.guest_bytes = 4096;
        status.trace_lost = Some(3);
        assert_eq!(text_of(&status, "started"), "cold: no state\n");
        assert_eq!(text_of(&status, "server"), "unix:/s not connected yet\n");
        let below = text_of(&status, "");
        assert!(below.contains("a flush failed (EIO)") && below.contains("`remoca set vm --clear-failed-flush a`"));
        assert!(below.contains("the guest has 4K") && below.contains("(--guest-memory-max)"), "{below}");
        assert!(text_of(&status, "trace").starts_with("3 records lost"));
    }
}
