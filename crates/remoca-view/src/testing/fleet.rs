//! Many VM processes that are none: each answers on a control socket with a status that changes from one question to the next.

use super::curve;
use remoca_protocol::control::{Command, CurveStatus, Reply, Status};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// Returns the status of VM `number` after `round` rounds of five seconds, with everything that a VM can have.
#[must_use]
pub fn full_status(number: u32, round: u32) -> Status {
    let (n, r) = (u64::from(number), u64::from(round));
    let latency = |count: u64, us: u64| {
        let us_f = us as f64;
        json!({"count": count, "sum_ns": count * us * 1000, "mean_us": us_f, "p50_us": us_f * 0.9, "p99_us": us_f * 3.0,
            "p999_us": us_f * 5.0, "max_us": us_f * 9.0})
    };
    // Some VMs hit often, and the work of all of them rises and falls.
    let reads = r * (400 + n * 37 % 900) + r % 9 * 45;
    let hits = reads * (35 + n * 13 % 60) / 100;
    let cache = (1 + n % 4) << 30;
    let donors = ["tcp:donor1:7070", "tcp:donor2:7070"];
    let pool = |server: &str, bytes: u64, is_mapped: bool| {
        json!({"server": server, "state": "connected", "is_mapped": is_mapped, "hits": hits, "latency_us": 200.0, "generation": "00000000000000aa",
            "granted_bytes": bytes, "pages_sent": hits * 2, "pages_requested": hits, "pages_received": hits,
            "pages_taken_back": 0})
    };
    let known = |server: &str| json!({"endpoint": server, "in_use": true, "possible_bytes": 8u64 << 30, "answered_s_ago": 5, "error": null});
    let port = json!({"socket": "/run/remoca/port.sock", "attached": true, "outlives_crash": true, "nbd_clients": null,
        "agent": {"captured": reads * 2, "lost": 3, "sampled_out": 0, "written": reads * 2, "cookie": 7},
        "agent_heard_s_ago": 4, "advice": 0});
    let disk = json!({"name": "root", "image": format!("/var/lib/libvirt/images/web{number}.img"),
        "socket": format!("/run/remoca/web{number}.sock"), "bytes": 20u64 << 30, "read_only": false, "store": "up",
        "attached": true, "outlives_crash": true, "nbd_clients": null, "guest_sees_size": true,
        "traffic": {"reads": reads, "read_bytes": reads * 8192, "reads_from_cache": hits, "writes": reads / 5,
            "written_bytes": reads * 1024}});
    let status = json!({
        "name": format!("web{number:03}"), "pid": 1000 + number, "version": env!("CARGO_PKG_VERSION"), "upgrades": 0,
        "uptime_s": 5.0 * f64::from(round) + 90.0, "started": "warm", "port": port,
        "server": {"endpoint": donors[0], "connected": true, "breaker": "closed", "error": null},
        "servers": donors.map(known),
        "pools": [pool(donors[0], cache / 2, false), pool(donors[1], cache / 4, false), pool("local:/run/remoca-serve/m.sock", cache / 4, true)],
        "cache": {"enabled": true, "wanted_bytes": cache, "granted_bytes": cache, "used_bytes": cache / 10 * 9,
            "admission": "evictions", "insertion": "lru", "hit_ratio": 0.5},
        "disks": [disk],
        "counters": {"reads": reads, "reads_from_cache": hits, "read_blocks": reads * 2, "hit_blocks": hits * 2,
            "zero_blocks": reads / 50, "missed_blocks": (reads - hits) * 2, "covered_blocks": reads / 90, "writes": reads / 5,
            "written_blocks": reads / 4, "evictions_reported": reads * 2, "evictions_unmatched": reads / 60, "hedges": reads / 200,
            "disconnections": 1},
        "latency": {"read": latency(reads, 3000), "read_from_cache": latency(hits, 210 + n % 60),
            "read_from_disk": latency(reads - hits, 7100 + n % 900), "write": latency(reads / 5, 8000)},
        "hedging": {"late_after_us": 900.0, "disk": {"p50_us": 7000.0, "p99_us": 14000.0},
            "server": {"p50_us": 200.0, "p99_us": 480.0}},
        "memory": {"index_bytes": cache / 4096 * 58, "buffer_bytes": 4 << 20, "known_blocks": reads * 3,
            "guest_bytes": 4u64 << 30, "guest_bytes_indexed": 16u64 << 30},
    });
    serde_json::from_value(status).unwrap()
}

/// Returns a status whose numbers are all as large as they can be.
#[must_use]
pub fn absurd_status() -> Status {
    let mut status = full_status(0, 1);
    let names = "evictions_unmatched fetch_missing fetch_timeouts fetch_unexpected fetch_wrong frames_looked_at frames_unmatched hedges_won \
                 misaligned_reads";
    status.counters.extend(names.split(' ').map(|name| (name.to_owned(), 1)));
    let mut json = serde_json::to_value(&status).unwrap();
    let mut places = Vec::new();
    find_numbers(&json, "", &mut places);
    for place in places {
        let before = json.pointer_mut(&place).unwrap().take();
        for number in [json!(u64::MAX), json!(u32::MAX), before] {
            *json.pointer_mut(&place).unwrap() = number;
            if serde_json::from_value::<Status>(json.clone()).is_ok() {
                break;
            }
        }
    }
    serde_json::from_value(json).unwrap()
}

/// Adds the places of all whole numbers in `json`, which is at `place`.
fn find_numbers(json: &Value, place: &str, places: &mut Vec<String>) {
    match json {
        Value::Number(number) if number.is_u64() => places.push(place.into()),
        Value::Array(values) => {
            let at = values.iter().enumerate();
            at.for_each(|(at, value)| find_numbers(value, &format!("{place}/{at}"), places));
        }
        Value::Object(fields) => {
            fields.iter().for_each(|(name, value)| find_numbers(value, &format!("{place}/{name}"), places));
        }
        _ => {}
    }
}

/// Processes that answer. They end with this one.
pub struct Fleet {
    pub sockets: Vec<PathBuf>,
    changes: Changes,
}

/// What is different about some of them.
type Changes = Arc<Mutex<HashMap<u32, Change>>>;
/// A change of what a VM says.
pub type Change = fn(&mut Status);

impl Fleet {
    /// Starts `count` processes with control sockets in `folder`.
    #[must_use]
    pub fn start(folder: &Path, count: u32) -> Self {
        let changes = Changes::default();
        let start = |number| {
            let socket = folder.join(format!("web{number:03}.ctl"));
            let listener = UnixListener::bind(&socket).unwrap();
            let changes = Arc::clone(&changes);
            std::thread::spawn(move || serve(&listener, number, &changes));
            socket
        };
        Self { sockets: (0..count).map(start).collect(), changes }
    }

    /// Changes what VM `number` says from now on.
    pub fn change(&self, number: u32, change: Change) {
        self.changes.lock().unwrap().insert(number, change);
    }
}

fn serve(listener: &UnixListener, number: u32, changes: &Changes) {
    let mut round = 0;
    while let Ok((stream, _)) = listener.accept() {
        // A client that goes away is no matter.
        let _ = answer(stream, number, &mut round, changes);
    }
}

/// Returns what the curve of VM `number` learns from: that of the first one from evictions, those of the next two from frames and reads.
fn learns_from(number: u32) -> &'static str {
    match number % 3 {
        0 => "evictions",
        1 => "frames",
        _ => "reads",
    }
}

fn answer(mut stream: UnixStream, number: u32, round: &mut u32, changes: &Changes) -> std::io::Result<()> {
    let mut line = Vec::new();
    BufReader::new(&stream).read_until(b'\n', &mut line)?;
    let mut status = full_status(number, *round);
    let reply = match Command::parse(line.trim_ascii_end()) {
        Ok(Command::Curve { .. }) => Reply::Curve(Box::new(CurveStatus {
            curve_of: status.name,
            learns_from: learns_from(number).into(),
            cache_bytes: status.cache.granted_bytes,
            ..curve()
        })),
        _ => {
            *round += 1;
            if let Some(change) = changes.lock().unwrap().get(&number) {
                change(&mut status);
            }
            Reply::Status(Box::new(status))
        }
    };
    stream.write_all(&reply.line().map_err(std::io::Error::other)?)
}
