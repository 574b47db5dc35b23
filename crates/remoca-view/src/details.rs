//! Everything about one VM, as lines of a label and a text. Pure.

use crate::figures::{Agent, Figures, ServerState, Taken, counter_since, disk_us, each_second, traffic};
use crate::text::{count_of, rate, show_seconds, size_of_rate};
use remoca_io::show::show_size;
use remoca_protocol::control::{
    DiskStatus, DiskTraffic, KnownServerStatus, LatencySummary, MigrationStatus, NormalLatency, PoolStatus, PortStatus,
    Status,
};
use serde::Serialize;

const MORE: &str = "this version offers features that its guest does not have yet: it gets them when it connects again, or is \
                    started again";

/// One line. A line without a label continues the subject of the line above.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Detail {
    pub label: &'static str,
    pub text: String,
}

/// Returns the lines that `remoca status -v` shows for a VM between its first line and its counters. Figures of requests
/// are those since `earlier`, an older status of the same program, or since it started.
pub fn of(status: &Status, earlier: Option<&Status>) -> Vec<Detail> {
    let mut lines = Lines(Vec::new());
    let reason = status.cold_reason.as_ref().map_or(String::new(), |reason| format!(": {reason}"));
    lines.add("started", format!("{}{reason}", status.started));
    status.state_lost.iter().chain(&status.notice).for_each(|text| lines.add("attention", text.clone()));
    status.migration.iter().for_each(|migration| lines.add_migration(migration));
    lines.add_cache(status);
    lines.add_use(status, earlier);
    status.disks.iter().for_each(|disk| lines.add_disk(status, disk, earlier));
    if let Some(port) = &status.port {
        lines.add("port", port_text(port));
        if port.offers_more {
            lines.add("", MORE.into());
        }
    }
    for (at, label) in ["read", "  no disk", "  disk", "write"].into_iter().enumerate() {
        lines.add(label, latency_text(latencies(status)[at], earlier.map(|earlier| latencies(earlier)[at])));
    }
    let (disk, server) = (normal(status.hedging.disk.as_ref()), normal(status.hedging.server.as_ref()));
    lines.add("now", format!("disk {disk}; server {server}; late after {:.0} us", status.hedging.late_after_us));
    lines.add_memory(status);
    if let Some(lost) = status.trace_lost.filter(|lost| *lost > 0) {
        lines
            .add("trace", format!("{} lost: writing to the trace file fails or is too slow", count_of(lost, "record")));
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
        status.pools.iter().for_each(|pool| self.add("pool", pool_text(pool)));
        let cache = &status.cache;
        let (wanted, granted) = (show_size(cache.wanted_bytes), show_size(cache.granted_bytes));
        let state = if cache.enabled { "on" } else { "off" };
        self.add("cache", format!("{state}, {wanted} wanted, {granted} granted, {} used", show_size(cache.used_bytes)));
        if cache.local_wanted_bytes > 0 {
            let (wanted, granted) = (show_size(cache.local_wanted_bytes), show_size(cache.local_granted_bytes));
            self.add("local tier", format!("{wanted} wanted, {granted} granted"));
        }
        self.add("admission", format!("by {}", cache.admission));
        if let (Some(lru), Some(bimodal)) = (cache.lru_hit_ratio, cache.bimodal_hit_ratio) {
            let which = if cache.insertion == "bimodal" { "few pages or none (bimodal)" } else { "every page (LRU)" };
            let tried = format!("LRU would hit {:.1} %, bimodal {:.1} %", lru * 100., bimodal * 100.);
            self.add("inserts", format!("{which}; tried on a sample: {tried}"));
        }
    }

    /// Adds what the cache is good for: where blocks came from, and the time that this saved.
    fn add_use(&mut self, status: &Status, earlier: Option<&Status>) {
        let count = |name: &str| counter_since(status, earlier, name);
        let (hits, zeroes) = (count("hit_blocks"), count("zero_blocks"));
        // Blocks of reads of parts of blocks have no counter of their own.
        let disk = count("read_blocks").saturating_sub(hits).saturating_sub(zeroes);
        let figures = Figures::of(status, earlier);
        self.add("helps", help(figures.hits, disk_us(status, earlier.is_some()), figures.saved_s));
        self.add("blocks", format!("{hits} from the cache, {zeroes} known to be zero, {disk} from the disk"));
    }

    fn add_disk(&mut self, status: &Status, disk: &DiskStatus, earlier: Option<&Status>) {
        let vm = &status.name;
        let attached = attached(disk.attached, disk.outlives_crash, disk.nbd_clients);
        let access = if disk.read_only { ", read-only" } else { "" };
        let swap = match disk.swap_areas {
            0 => String::new(),
            areas => format!(", {}", count_of(areas as u64, "swap area")),
        };
        let DiskStatus { name, image, store, socket, .. } = disk;
        let bytes = show_size(disk.bytes);
        self.add("disk", format!("{name}: {image} ({bytes}{access}{swap}, {store}) at {socket}, {attached}"));
        let period_s = status.uptime_s - earlier.map_or(0.0, |earlier| earlier.uptime_s);
        self.add("", traffic_text(&traffic(disk, earlier), period_s));
        disk.store_error.iter().for_each(|error| self.add("", error.clone()));
        if let Some(error) = &disk.failed_flush {
            let clear = format!("remoca set {vm} --clear-failed-flush {name}");
            self.add("", format!("a flush failed ({error}); all others fail until `{clear}`"));
        }
        if disk.nbd_clients.is_some_and(|clients| clients > 0) {
            let restarted =
                "a client that does not connect again by itself gives its guest I/O errors when this process";
            self.add("", format!("NBD: {restarted} is restarted or dies; an upgrade keeps it"));
        }
        if disk.offers_more {
            self.add("", MORE.into());
        }
        if let Some(before) = disk.shrunk_from_bytes {
            let before = show_size(before);
            self.add("", format!("the image had {before} before: reads and writes beyond its end fail"));
        }
        if !disk.guest_sees_size {
            self.add("", "its size has changed; the guest sees it when it connects again".into());
        }
        disk.cold_reason.iter().for_each(|reason| self.add("", format!("started cold: {reason}")));
    }

    fn add_memory(&mut self, status: &Status) {
        let memory = &status.memory;
        let (index, buffers) = (show_size(memory.index_bytes), show_size(memory.buffer_bytes));
        self.add("memory", format!("index {index}, buffers {buffers}, {} blocks known", memory.known_blocks));
        if status.exceeds_index() {
            let (guest, indexed) = (show_size(memory.guest_bytes), show_size(memory.guest_bytes_indexed));
            self.add("", format!("the guest has {guest}, the index is made for {indexed} (--guest-memory-max)"));
        }
    }
}

/// Returns in words whether reads without the disk saved the guest time. `disk_us` is the usual time of a disk read.
fn help(hits: Taken, disk_us: Option<f64>, saved_s: Option<f64>) -> String {
    let Some(mean_us) = hits.mean_us() else {
        return "not yet: every read so far needed the disk, or there was none".into();
    };
    let reads = format!("{} reads needed no disk and took {mean_us:.0} us each", hits.count);
    let (Some(disk_us), Some(saved_s)) = (disk_us, saved_s) else {
        return format!("{reads}; none needed the disk, so there is nothing to compare with");
    };
    let effect = match saved_s < 0.0 {
        false => format!("the guest waited {} less", show_seconds(saved_s)),
        true => format!("the guest waited {} longer", show_seconds(-saved_s)),
    };
    format!("{effect}: {reads}; one from the disk usually takes {disk_us:.0} us")
}

/// Returns the requests of a disk, in all and for each second.
fn traffic_text(traffic: &DiskTraffic, period_s: f64) -> String {
    let part = |count: u64, bytes: u64| {
        let (rate, size) = (rate(each_second(count, period_s)), show_size(bytes));
        format!("{count} ({rate}/s), {size} ({}/s)", size_of_rate(each_second(bytes, period_s)))
    };
    let reads = part(traffic.reads, traffic.read_bytes);
    let from_cache = traffic.reads_from_cache;
    format!("reads {reads}, {from_cache} without the disk; writes {}", part(traffic.writes, traffic.written_bytes))
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

fn pool_text(pool: &PoolStatus) -> String {
    let (size, used) = (show_size(pool.granted_bytes), show_size(pool.used_bytes));
    if pool.state == "draining" {
        let (server, pages) = (&pool.server, count_of(pool.used_bytes / 4096, "page"));
        return format!("{server}: draining, {used} left ({pages}): what is read moves to the other servers");
    }
    let name = if pool.is_local_tier { "local tier" } else { pool.server.as_str() };
    let latency = pool.latency_us.map_or(String::new(), |us| format!(" in {us:.0} us"));
    let mapped = if pool.is_mapped { format!("; {}", mapped_pool(pool)) } else { String::new() };
    format!("{name}: {size}, {used} used, {} hits{latency}{mapped}", pool.hits)
}

fn mapped_pool(pool: &PoolStatus) -> String {
    let server = match pool.state.as_str() {
        "away" => "its server is away: in use as before, but it cannot grow",
        _ => "its server is connected",
    };
    let gone = match pool.pages_taken_back {
        0 => String::new(),
        pages => format!("; {pages} reads found their page taken back"),
    };
    format!("memory that this process reads and writes by itself; {server}{gone}")
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
    let attached = attached(port.attached, port.outlives_crash, port.nbd_clients);
    let state = match Agent::of(Some(port)) {
        Agent::NotHeard | Agent::NoPort => "no report from an agent since the guest attached".into(),
        Agent::Running => "agent is running".into(),
        Agent::SilentFor(seconds) => format!("agent silent for {seconds} s"),
    };
    let counters = port.agent.map_or(String::new(), |agent| {
        // Otherwise it looks as if the guest evicts next to nothing.
        let classes = match agent.classes {
            0 | 1 => String::new(),
            of => format!("; sends one page of {of} as a sample, because the cache has the others or would keep none"),
        };
        format!(": {} captured, {} lost, {} left out{classes}", agent.captured, agent.lost, agent.sampled_out)
    });
    format!("{}, {attached}, {state}{counters}", port.socket)
}

/// Returns the latencies of reads, of those that the cache answered and of those that the disk did, and of writes.
fn latencies(Status { latency, .. }: &Status) -> [&LatencySummary; 4] {
    [&latency.read, &latency.read_from_cache, &latency.read_from_disk, &latency.write]
}

/// Returns the requests since `earlier`, or since the start, and their mean time. Quantiles are known of all requests together alone.
fn latency_text(latency: &LatencySummary, earlier: Option<&LatencySummary>) -> String {
    let taken = Taken::since(latency, earlier);
    let Some(mean_us) = taken.mean_us() else { return format!("{:>9} requests", 0) };
    let LatencySummary { p50_us, p99_us, p999_us, max_us, .. } = latency;
    let of_all = if earlier.is_some() { "; since the start" } else { "," };
    format!(
        "{:>9} requests, mean {mean_us:.0} us{of_all} p50 {p50_us:.0}, p99 {p99_us:.0}, p99.9 {p999_us:.0}, longest {max_us:.0}",
        taken.count
    )
}

fn normal(latency: Option<&NormalLatency>) -> String {
    latency.map_or("not known yet".into(), |latency| format!("p50 {:.0} us, p99 {:.0}", latency.p50_us, latency.p99_us))
}

fn attached(attached: bool, outlives_crash: bool, nbd_clients: Option<usize>) -> String {
    let after_crash = if outlives_crash { "stays after a crash" } else { "must reconnect after a crash" };
    match nbd_clients {
        Some(1) => format!("1 NBD client ({after_crash})"),
        Some(clients @ 2..) => format!("{clients} NBD clients ({after_crash})"),
        Some(0) | None if attached => format!("attached ({after_crash})"),
        Some(0) | None => "no guest".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::status;
    use serde_json::json;

    fn text_of(status: &Status, label: &str) -> String {
        of(status, None).into_iter().filter(|detail| detail.label == label).map(|detail| detail.text + "\n").collect()
    }

    #[test]
    fn details_of_a_vm_that_is_well() {
        let status = status(json!({}), [0, 0], [0, 0]);
        assert_eq!(text_of(&status, "started"), "cold\n");
        assert_eq!(text_of(&status, "server"), "unix:/s connected\n");
        assert_eq!(text_of(&status, "of"), "unix:/r: no\nunix:/s: has the pool; offered 8K 1 s ago\n");
        assert_eq!(text_of(&status, "cache"), "on, 8K wanted, 8K granted, 4K used\n");
        assert_eq!(text_of(&status, "disk"), "a: i (4K, up) at s, attached (must reconnect after a crash)\n");
        let traffic = "reads 0 (0/s), 0B (0B/s), 0 without the disk; writes 0 (0/s), 0B (0B/s)\n";
        assert_eq!(text_of(&status, "") + &text_of(&status, "trace"), traffic);
        assert_eq!(text_of(&status, "read"), "        0 requests\n");
    }

    #[test]
    fn details_of_an_interval_and_of_what_the_cache_is_good_for() {
        let mut before = status(json!({"hit_blocks": 1}), [1, 80_000], [1, 9_000]);
        before.disks[0].traffic = DiskTraffic { reads: 10, read_bytes: 40960, ..DiskTraffic::default() };
        let mut now = status(
            json!({"read_blocks": 12, "hit_blocks": 3, "zero_blocks": 4, "missed_blocks": 2}),
            [11, 880_000],
            [1, 9_000],
        );
        now.uptime_s = 5.0;
        now.disks[0].traffic =
            DiskTraffic { reads: 20, read_bytes: 81920, reads_from_cache: 9, ..before.disks[0].traffic };
        let text = |now: &Status, label: &str| {
            let details = of(now, Some(&before)).into_iter().filter(|detail| detail.label == label);
            details.map(|detail| detail.text).collect::<Vec<_>>().join("\n")
        };
        assert_eq!(text(&now, "blocks"), "2 from the cache, 4 known to be zero, 6 from the disk");
        assert_eq!(text(&now, ""), "reads 10 (2.5/s), 40K (10K/s), 9 without the disk; writes 0 (0/s), 0B (0B/s)");
        now.hedging.disk = Some(NormalLatency { p50_us: 1080.0, p99_us: 0.0 });
        let less = "the guest waited 10ms less: 10 reads needed no disk and took 80 us each; one from the disk usually takes 1080 us";
        assert_eq!(text(&now, "helps"), less);
        now.hedging.disk = Some(NormalLatency { p50_us: 5.0, p99_us: 0.0 });
        assert!(text(&now, "helps").starts_with("the guest waited 1ms longer: "), "{}", text(&now, "helps"));
        now.hedging.disk = None;
        now.latency.read_from_disk.count = 0;
        assert!(text(&now, "helps").ends_with("there is nothing to compare with"));
        assert!(text(&before, "helps").starts_with("not yet: "));
    }

    #[test]
    fn times_of_an_interval_are_not_those_since_the_start() {
        let before = status(json!({}), [10, 800_000], [4, 9_000_000]);
        let now = status(json!({}), [12, 1_000_000], [4, 9_000_000]);
        let text = |earlier: Option<&Status>, label: &str| {
            let line = of(&now, earlier).into_iter().find(|detail| detail.label == label);
            line.expect("each has a line").text
        };
        let later = "        2 requests, mean 100 us; since the start p50 0, p99 0, p99.9 0, longest 0";
        assert_eq!(text(Some(&before), "  no disk"), later);
        assert_eq!(text(Some(&before), "  disk"), "        0 requests");
        assert_eq!(text(None, "  no disk"), "       12 requests, mean 83 us, p50 0, p99 0, p99.9 0, longest 0");
    }

    #[test]
    fn details_of_pools() {
        let pool = json!({"server": "unix:/r", "state": "connected", "is_mapped": false, "generation": "1", "granted_bytes": 8192,
            "used_bytes": 4096, "pages_sent": 1, "pages_requested": 0, "pages_received": 0, "pages_taken_back": 0});
        let pool: PoolStatus = serde_json::from_value(pool).unwrap();
        let mut vm = status(json!({}), [0, 0], [0, 0]);
        vm.pools = vec![pool.clone(), PoolStatus { state: "draining".into(), ..pool.clone() }];
        let draining = "unix:/r: 8K, 4K used, 0 hits\nunix:/r: draining, 4K left (1 page): what is read moves to the other servers\n";
        assert_eq!(text_of(&vm, "pool"), draining);
        let local = PoolStatus { is_local_tier: true, hits: 7, latency_us: Some(1.6), ..pool };
        vm.pools = vec![PoolStatus { is_mapped: true, pages_taken_back: 2, ..local }];
        let mapped = "local tier: 8K, 4K used, 7 hits in 2 us; memory that this process reads and writes by itself; its server is \
                      connected; 2 reads found their page taken back\n";
        assert_eq!(text_of(&vm, "pool"), mapped);
    }

    #[test]
    fn details_of_an_agent() {
        let port = json!({"socket": "p", "attached": true, "nbd_clients": null, "agent": null, "advice": 0});
        let mut port: PortStatus = serde_json::from_value(port).unwrap();
        assert_eq!(
            port_text(&port),
            "p, attached (must reconnect after a crash), no report from an agent since the guest attached"
        );
        let agent = json!({"captured": 3, "lost": 2, "sampled_out": 1, "written": 0, "cookie": 0});
        port.agent = serde_json::from_value(agent).unwrap();
        port.agent_heard_s_ago = Some(1);
        let mut vm = status(json!({}), [0, 0], [0, 0]);
        vm.port = Some(PortStatus { offers_more: true, ..port.clone() });
        assert!(text_of(&vm, "").contains("features that its guest does not have yet"));
        assert_eq!(
            port_text(&port),
            "p, attached (must reconnect after a crash), agent is running: 3 captured, 2 lost, 1 left out"
        );
        port.agent_heard_s_ago = Some(61);
        assert_eq!(
            port_text(&port),
            "p, attached (must reconnect after a crash), agent silent for 61 s: 3 captured, 2 lost, 1 left out"
        );
        port.agent.as_mut().unwrap().classes = 128;
        let text = port_text(&port);
        assert!(text.ends_with(
            "1 left out; sends one page of 128 as a sample, because the cache has the others or would keep none"
        ));
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
        // A process that waits for the disks gets their index with them.
        status.migration = Some(MigrationStatus { has_disks: false, incoming: None, peer: None, news: None });
        assert!(!text_of(&status, "").contains("--guest-memory-max"));
    }
}
