//! The status that the process reports.

use super::disk::Disk;
use super::tiers::CACHE_PAGES_MAX;
use super::vm::Vm;
use super::warmth::failed_flush;
use crate::link::{KnownServer, ServerLink, Session};
use remoca_core::engine::{Admission, BreakerState, EngineStats, EngineStatus, Insertion, Latency};
use remoca_core::units::{PAGE_SIZE_U64, PageCount};
use remoca_protocol::control::{
    CacheStatus, DiskStatus, HedgingStatus, KnownServerStatus, MemoryStatus, MigrationStatus, NormalLatency,
    PoolStatus, PortStatus, ServerStatus, Status,
};
use remoca_store::StoreHealth;
use std::os::unix::ffi::OsStrExt;

/// Returns the status of the process. Flushes the trace first, so that the number of lost records is current.
pub(super) fn snapshot(vm: &mut Vm, migration: Option<MigrationStatus>) -> Status {
    let engine = vm.engine.status();
    let stats = vm.engine.stats();
    let bytes = |pages: u32| u64::from(pages) * PAGE_SIZE_U64;
    let trace_lost = vm.in_flight.measured().trace().map(|trace| {
        trace.flush();
        trace.lost()
    });
    Status {
        name: vm.name.clone(),
        pid: std::process::id(),
        version: env!("CARGO_PKG_VERSION").into(),
        is_replaced: is_replaced(),
        upgrades: vm.upgrades,
        uptime_s: vm.host.uptime().as_secs_f64(),
        started: if vm.warmth.cold_reason().is_none() { "warm".into() } else { "cold".into() },
        cold_reason: vm.warmth.cold_reason().cloned(),
        state_lost: vm.warmth.loss().map(Into::into),
        notice: vm.notice.clone(),
        server: vm.servers.link().and_then(|link| Some(server_status(link, link.current()?, engine.hedging.breaker))),
        servers: vm.servers.link().map(|link| known_servers(vm, link)).unwrap_or_default(),
        pools: vm.servers.link().map(|link| pools(link, &engine)).unwrap_or_default(),
        cache: cache_status(&engine, &stats, vm.servers.local_server().map(|server| server.to_string())),
        disks: vm.guests.disks().iter().enumerate().map(|(at, disk)| disk_status(vm, at, disk)).collect(),
        port: vm.guests.port().get().map(|port| PortStatus {
            socket: port.socket.clone(),
            attached: port.frontend.is_connected(),
            outlives_crash: port.frontend.is_kept(),
            nbd_clients: port.frontend.nbd_clients(),
            offers_more: port.frontend.has_news(),
            agent: vm.guests.port().agent(),
            agent_heard_s_ago: vm.guests.port().heard_at().map(|at| vm.host.time_since(at).as_secs()),
            advice: vm.engine.advice(),
            class_advice: vm.engine.class_advice(),
        }),
        counters: stats.named().into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
        trace_lost,
        latency: vm.in_flight.measured().latencies(),
        hedging: hedging_status(&engine.hedging),
        migration,
        memory: MemoryStatus {
            index_bytes: engine.index_bytes as u64,
            buffer_bytes: vm.in_flight.buffer_bytes() as u64,
            known_blocks: u64::from(engine.known_blocks.0),
            guest_bytes: vm.guests.memory_bytes(),
            guest_bytes_indexed: bytes(vm.engine.covered_guest_memory().0),
            guest_resident_bytes: vm.guests.resident_bytes(),
        },
    }
}

/// Returns whether the file of this program has been replaced or removed since it was started. The kernel knows, without its file system.
fn is_replaced() -> bool {
    std::fs::read_link("/proc/self/exe").is_ok_and(|file| file.as_os_str().as_bytes().ends_with(b" (deleted)"))
}

fn disk_status(vm: &Vm, at: usize, disk: &Disk) -> DiskStatus {
    let geometry = disk.store.geometry();
    let (store, store_error) = match disk.store.health() {
        StoreHealth::Up => ("up", None),
        StoreHealth::Waiting { why } => ("waiting", Some(why)),
    };
    DiskStatus {
        swap_areas: vm.engine.swap_areas(disk.number),
        name: disk.name.clone(),
        image: disk.image.clone(),
        socket: disk.socket.clone(),
        bytes: geometry.size,
        shrunk_from_bytes: vm.sizes.shrunk_from(at),
        guest_sees_size: disk.frontend.sees_size(),
        read_only: disk.frontend.is_read_only(),
        store: store.into(),
        store_error,
        failed_flush: failed_flush(disk, &vm.engine).map(|errno| std::io::Error::from_raw_os_error(errno).to_string()),
        cold_reason: vm.warmth.disk_reason(at),
        attached: disk.frontend.is_connected(),
        outlives_crash: disk.frontend.is_kept(),
        nbd_clients: disk.frontend.nbd_clients(),
        offers_more: disk.frontend.has_news(),
        traffic: disk.traffic,
    }
}

/// Returns the status of a server. The local tier may have a session while this one has none.
fn server_status(link: &ServerLink, server: &KnownServer, breaker: BreakerState) -> ServerStatus {
    let connected = link.has_session(server.number);
    ServerStatus {
        endpoint: server.endpoint.to_string(),
        connected,
        breaker: match breaker {
            BreakerState::Closed => "closed".into(),
            BreakerState::Open => "open".into(),
            BreakerState::HalfOpen => "half-open".into(),
        },
        error: if connected { None } else { server.error() },
    }
}

fn known_servers(vm: &Vm, link: &ServerLink) -> Vec<KnownServerStatus> {
    let now = vm.host.instant();
    let status = |server: &KnownServer| KnownServerStatus {
        endpoint: server.endpoint.to_string(),
        is_local_tier: link.is_local(server),
        in_use: link.has_session(server.number),
        possible_bytes: server.answered.map(|(_, pages)| u64::from(pages.0) * PAGE_SIZE_U64),
        answered_s_ago: server.answered.map(|(at, _)| now.saturating_duration_since(at).as_secs()),
        error: server.error(),
        lies: Some(vm.engine.lies_of(server.number)),
    };
    link.servers().iter().map(status).collect()
}

fn pools(link: &ServerLink, engine: &EngineStatus) -> Vec<PoolStatus> {
    let status = |session: &Session| {
        let pool = engine.pools.iter().find(|pool| pool.server == session.server());
        let state = match (pool.is_some_and(|pool| pool.is_draining), session.socket_fd()) {
            (true, _) => "draining",
            (false, Some(_)) => "connected",
            (false, None) => "away",
        };
        let latency = pool.and_then(|pool| pool.hedging.server);
        PoolStatus {
            server: link.known(session.server()).map(|server| server.endpoint.to_string()).unwrap_or_default(),
            state: state.into(),
            is_mapped: session.is_mapped(),
            is_local_tier: pool.is_some_and(|pool| pool.is_local),
            generation: format!("{:016x}", session.generation()),
            granted_bytes: u64::from(session.granted().0) * PAGE_SIZE_U64,
            used_bytes: pool.map_or(0, |pool| u64::from(pool.slots.used) * PAGE_SIZE_U64),
            hits: pool.map_or(0, |pool| pool.hits),
            latency_us: latency.map(|latency| micros(latency.p50_ns)),
            pages_sent: session.traffic().sent,
            pages_requested: session.traffic().requested,
            pages_received: session.traffic().received,
            pages_taken_back: session.traffic().taken_back,
        }
    };
    link.sessions().iter().map(status).collect()
}

fn cache_status(engine: &EngineStatus, stats: &EngineStats, local_server: Option<String>) -> CacheStatus {
    let bytes = |pages: u32| u64::from(pages) * PAGE_SIZE_U64;
    CacheStatus {
        enabled: engine.enabled,
        wanted_bytes: bytes(engine.wanted.0),
        granted_bytes: bytes(engine.granted.0),
        granted_at_most_bytes: bytes(engine.granted_at_most.0),
        used_bytes: bytes(engine.slots.used),
        local_wanted_bytes: bytes(engine.local_wanted.0),
        local_granted_bytes: bytes(engine.local_granted.0),
        local_granted_at_most_bytes: bytes(engine.local_granted_at_most.0),
        local_server,
        admission: match engine.admission {
            Admission::Evictions => "evictions".into(),
            Admission::Frames => "frames".into(),
            Admission::Reads => "reads".into(),
        },
        insertion: match engine.policy.in_force {
            Insertion::Lru => "lru".into(),
            Insertion::Bimodal => "bimodal".into(),
        },
        lru_hit_ratio: engine.policy.lru,
        bimodal_hit_ratio: engine.policy.bimodal,
        hit_ratio: hit_ratio(stats),
    }
}

fn hedging_status(hedging: &remoca_core::engine::HedgingStatus) -> HedgingStatus {
    let normal = |latency: Latency| NormalLatency { p50_us: micros(latency.p50_ns), p99_us: micros(latency.p99_ns) };
    HedgingStatus {
        is_off: !hedging.enabled,
        late_after_us: micros(hedging.late_after_ns),
        disk: hedging.disk.map(normal),
        server: hedging.server.map(normal),
    }
}

#[expect(clippy::cast_precision_loss, reason = "for people to read")]
fn micros(ns: u64) -> f64 {
    ns as f64 / 1000.0
}

/// Returns the share of blocks that the cache answered, among those that it could have answered. Returns `None` if
/// there were none.
#[expect(clippy::cast_precision_loss, reason = "a ratio for people to read")]
fn hit_ratio(stats: &EngineStats) -> Option<f64> {
    let hits = stats.hit_blocks + stats.zero_blocks;
    let all = hits + stats.covered_blocks + stats.missed_blocks;
    (all > 0).then(|| hits as f64 / all as f64)
}

/// Returns the number of pages in a local tier of `bytes` bytes, which may be 0.
///
/// # Errors
/// As for [`cache_pages`].
pub fn local_pages(bytes: u64) -> Result<PageCount, String> {
    if bytes == 0 { Ok(PageCount(0)) } else { pages(bytes, "a local tier", "a multiple of 4096", "0 is no local tier") }
}

/// Returns the number of pages in a cache of `bytes` bytes.
///
/// # Errors
/// If `bytes` is not a valid size. The text says which sizes are.
pub fn cache_pages(bytes: u64) -> Result<PageCount, String> {
    pages(bytes, "a cache", "a multiple of 4096 above 0", "`remoca set NAME --off` turns a cache off")
}

/// Returns the number of pages in `bytes` bytes of `what`, whose size is `valid`. `how_none` says how to have none of it.
fn pages(bytes: u64, what: &str, valid: &str, how_none: &str) -> Result<PageCount, String> {
    let pages = bytes / PAGE_SIZE_U64;
    if bytes == 0 || !bytes.is_multiple_of(PAGE_SIZE_U64) {
        let advice = match pages * PAGE_SIZE_U64 / 1024 {
            0 => how_none.into(),
            kib => format!("such as {kib}K; K, M, G and T are powers of 1024, and KB, MB, GB and TB powers of 1000"),
        };
        return Err(format!("{what} of {bytes} bytes: the size is {valid} ({advice})"));
    }
    match u32::try_from(pages) {
        Ok(pages) if PageCount(pages) <= CACHE_PAGES_MAX => Ok(PageCount(pages)),
        _ => Err(format!("{what} of {bytes} bytes: 4 TiB is the limit")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_that_is_refused_is_that_of_the_cache_or_of_the_local_tier() {
        assert_eq!((cache_pages(4096), local_pages(8192)), (Ok(PageCount(1)), Ok(PageCount(2))));
        let error = cache_pages(4095).unwrap_err();
        assert!(error.starts_with("a cache of 4095 bytes") && error.contains("--off"), "{error}");
        let error = local_pages(4095).unwrap_err();
        assert!(error.starts_with("a local tier of 4095 bytes") && error.ends_with("(0 is no local tier)"), "{error}");
        let error = local_pages(5000).unwrap_err();
        assert!(error.contains("a multiple of 4096 (such as 4K;"), "{error}");
        let error = local_pages(u64::MAX - 4095).unwrap_err();
        assert!(error.starts_with("a local tier of ") && error.ends_with("4 TiB is the limit"), "{error}");
    }
}
