//! The control commands: what the process tells of itself, and what it can be told.

use super::Driver;
use crate::control::Request;
use crate::link::{KnownServer, ServerLink};
use crate::trace::TraceWriter;
use remoca_core::engine::{Admission, BreakerState, EngineStats, Latency};
use remoca_core::units::{DiskIndex, PAGE_SIZE_U64, PageCount};
use remoca_io::address::Endpoint;
use remoca_io::narrow;
use remoca_protocol::control::{
    CacheStatus, Command, DiskStatus, HedgingStatus, KnownServerStatus, Latencies, MemoryStatus, NormalLatency,
    PortStatus, Reply, ServerStatus, Status,
};
use remoca_store::StoreHealth;
use std::time::Instant;

/// Why a larger cache is refused at the moment.
pub(super) const HANDED_OVER: &str = "the disks are being handed over: try again when that is done";
const NO_SERVER: &str = "this process has no memory server; start it with --server";

impl Driver {
    pub(super) fn answer_control(&mut self) {
        while let Some(request) = self.control.as_ref().and_then(|control| control.next_request()) {
            if let Command::Upgrade { program } = &request.command {
                self.begin_upgrade(program.clone(), Some(request));
                continue;
            }
            if let Command::Migrate { to, key } = &request.command {
                let (to, key) = (to.clone(), key.clone());
                self.migrate(&to, &key, request);
                continue;
            }
            self.index_size.try_again();
            if self.waits_for_index(&request.command) {
                self.index_size.wait(request);
                continue;
            }
            let reply = self.obey(&request);
            request.answer(reply);
        }
    }

    pub(super) fn obey(&mut self, request: &Request) -> Reply {
        let done = match &request.command {
            Command::Status => Ok(()),
            Command::MigrateAbort => self.abort_migration(),
            Command::MigrateTakeBack => self.take_disks_back(),
            Command::Migrate { .. } => Err("it is answered when the other process has answered".into()),
            Command::ClearFailedFlush { disk } => self.clear_failed_flush(disk),
            Command::Set { .. } if !self.migration.serves() => {
                Err("its disks are with another process, and so is its cache".into())
            }
            Command::Set { servers: None, cache_bytes, enabled } => self.set_cache(*cache_bytes, *enabled),
            Command::Set { servers: Some(servers), cache_bytes: None, enabled: None } => self.set_servers(servers),
            Command::Upgrade { .. } => Err("an upgrade is answered when it is done".into()),
            Command::Set { .. } => Err("the servers and the cache cannot be changed in one command".into()),
        };
        match done {
            Ok(()) => Reply::Status(Box::new(self.snapshot())),
            Err(error) => Reply::Error { error },
        }
    }

    /// Replaces the list of memory servers. The pool leaves a server that is not in it at once, and gives its memory
    /// back.
    fn set_servers(&mut self, servers: &[String]) -> Result<(), String> {
        let Some(link) = &mut self.link else { return Err(NO_SERVER.into()) };
        let endpoints = servers.iter().map(|server| server.parse()).collect::<Result<Vec<Endpoint>, _>>()?;
        link.replace(&endpoints).map_err(|error| error.to_string())?;
        self.keep_settings();
        self.tell_servers();
        Ok(())
    }

    /// Sets the size of the cache, and on or off. A size alone keeps "off" off, and is what "on" brings back.
    fn set_cache(&mut self, bytes: Option<u64>, enabled: Option<bool>) -> Result<(), String> {
        if self.link.is_none() {
            return Err(NO_SERVER.into());
        }
        let size = match bytes {
            None => self.cache,
            Some(bytes) => cache_pages(bytes)?,
        };
        let on = enabled.unwrap_or(self.engine.status().enabled);
        if on && size > self.engine.index().layout().slot_limit() {
            return Err(match self.migration.is_idle() {
                true => "there is no memory for an index of that size".into(),
                false => HANDED_OVER.into(),
            });
        }
        self.cache = size;
        self.refusal_told = false;
        self.engine.resize(if on { size } else { PageCount(0) });
        self.keep_settings();
        self.fit_index();
        narrow::passes("resize-begun");
        self.execute();
        narrow::passes("resize-done");
        Ok(())
    }

    /// Returns what the process tells of itself.
    pub fn snapshot(&mut self) -> Status {
        let engine = self.engine.status();
        let stats = self.engine.stats();
        let bytes = |pages: u32| u64::from(pages) * PAGE_SIZE_U64;
        if let Some(trace) = &mut self.trace {
            trace.flush();
        }
        Status {
            name: self.name.clone(),
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").into(),
            upgrades: self.start.upgrades,
            uptime_s: self.clock.now().saturating_duration_since(self.started).as_secs_f64(),
            started: if self.warmth.cold_reason.is_none() { "warm".into() } else { "cold".into() },
            cold_reason: self.warmth.cold_reason.clone(),
            server: self.link.as_ref().and_then(ServerLink::current).map(|server| ServerStatus {
                endpoint: server.endpoint.to_string(),
                connected: engine.connected,
                breaker: match engine.hedging.breaker {
                    BreakerState::Closed => "closed".into(),
                    BreakerState::Open => "open".into(),
                    BreakerState::HalfOpen => "half-open".into(),
                },
                error: if engine.connected { None } else { server.error() },
            }),
            servers: self.link.as_ref().map(|link| known_servers(link, self.clock.now())).unwrap_or_default(),
            cache: CacheStatus {
                enabled: engine.enabled,
                wanted_bytes: bytes(engine.wanted.0),
                granted_bytes: bytes(engine.granted.0),
                used_bytes: bytes(engine.slots.used),
                admission: match engine.admission {
                    Admission::Evictions => "evictions".into(),
                    Admission::Frames => "frames".into(),
                    Admission::Reads => "reads".into(),
                },
                hit_ratio: hit_ratio(&stats),
            },
            disks: (0..).zip(&self.disks).map(|(index, disk)| self.disk_status(DiskIndex(index), disk)).collect(),
            port: self.port.as_ref().map(|port| PortStatus {
                socket: port.socket.clone(),
                attached: port.frontend.is_connected(),
                nbd_clients: port.frontend.nbd_clients(),
                agent: self.agent,
                advice: self.engine.advice(),
            }),
            counters: stats.named().into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
            trace_lost: self.trace.as_ref().map(TraceWriter::lost),
            latency: Latencies {
                read: self.latency.read.summary(),
                read_from_cache: self.latency.read_from_cache.summary(),
                read_from_disk: self.latency.read_from_disk.summary(),
                write: self.latency.write.summary(),
            },
            hedging: hedging_status(&engine.hedging),
            migration: self.migration_status(),
            memory: MemoryStatus {
                index_bytes: engine.index_bytes as u64,
                buffer_bytes: self.buffers.allocated_bytes() as u64,
                known_blocks: u64::from(engine.known_blocks.0),
                guest_bytes: self.guest_memory_bytes(),
                guest_bytes_indexed: bytes(self.engine.index().layout().resident_limit().0),
            },
        }
    }

    fn disk_status(&self, index: DiskIndex, disk: &super::Disk) -> DiskStatus {
        let geometry = disk.store.geometry();
        DiskStatus {
            swap_areas: self.engine.swap_areas(index),
            name: disk.name.clone(),
            image: disk.image.clone(),
            socket: disk.socket.clone(),
            bytes: geometry.size,
            read_only: disk.frontend.is_read_only(),
            store: match disk.store.health() {
                StoreHealth::Up => "up".into(),
                StoreHealth::Waiting => "waiting".into(),
            },
            failed_flush: self.failed_flush(index).map(|errno| std::io::Error::from_raw_os_error(errno).to_string()),
            cold_reason: self.warmth.disk_reason(index),
            attached: disk.frontend.is_connected(),
            nbd_clients: disk.frontend.nbd_clients(),
        }
    }
}

fn known_servers(link: &ServerLink, now: Instant) -> Vec<KnownServerStatus> {
    let status = |server: &KnownServer| KnownServerStatus {
        endpoint: server.endpoint.to_string(),
        in_use: link.session() == Some(server.number),
        possible_bytes: server.answered.map(|(_, pages)| u64::from(pages.0) * PAGE_SIZE_U64),
        answered_s_ago: server.answered.map(|(at, _)| now.saturating_duration_since(at).as_secs()),
        error: server.error(),
    };
    link.servers().iter().map(status).collect()
}

#[expect(clippy::cast_precision_loss, reason = "for people to read")]
fn hedging_status(hedging: &remoca_core::engine::HedgingStatus) -> HedgingStatus {
    let micros = |ns: u64| ns as f64 / 1000.0;
    let normal = |latency: Latency| NormalLatency { p50_us: micros(latency.p50_ns), p99_us: micros(latency.p99_ns) };
    HedgingStatus {
        late_after_us: micros(hedging.late_after_ns),
        disk: hedging.disk.map(normal),
        server: hedging.server.map(normal),
    }
}

/// Returns the share of blocks that the cache answered, of those it could have answered.
#[expect(clippy::cast_precision_loss, reason = "a ratio for people to read")]
fn hit_ratio(stats: &EngineStats) -> Option<f64> {
    let hits = stats.hit_blocks + stats.zero_blocks;
    let all = hits + stats.covered_blocks + stats.missed_blocks;
    (all > 0).then(|| hits as f64 / all as f64)
}

/// Returns the pages of a cache of so many bytes.
///
/// # Errors
/// If that is no possible size; the text says which are.
pub fn cache_pages(bytes: u64) -> Result<PageCount, String> {
    let pages = bytes / PAGE_SIZE_U64;
    if bytes == 0 || !bytes.is_multiple_of(PAGE_SIZE_U64) {
        return Err(format!("a cache of {bytes} bytes: the size is a multiple of 4096 above 0 (`off` turns it off)"));
    }
    match u32::try_from(pages) {
        Ok(pages) if pages <= 1 << 30 => Ok(PageCount(pages)),
        _ => Err(format!("a cache of {bytes} bytes: 4 TiB is the limit")),
    }
}
