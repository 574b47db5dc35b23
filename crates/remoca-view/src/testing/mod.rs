//! Statuses made up for tests, and processes that answer with them.

#![allow(clippy::unwrap_used, reason = "in a test a surprise is a failure")]

pub mod browser;
mod fleet;

pub use fleet::{Change, Fleet, absurd_status, full_status};

use crate::snapshot::{Answer, Snapshot, Taker};
use crate::vm::Silence;
use remoca_protocol::control::{CurvePoint, CurveStatus, ForecastStatus, Status};
use remoca_protocol::host::{HostDecision, HostReport};
use serde_json::{Value, json};

/// Returns the status of a process with these counters. The pairs are the count and the sum of its read
/// latencies.
pub fn status(counters: Value, cache_ns: [u64; 2], disk_ns: [u64; 2]) -> Status {
    let latency = |[count, sum_ns]: [u64; 2]| {
        json!({"count": count, "sum_ns": sum_ns, "mean_us": 0.0, "p50_us": 0.0, "p99_us": 0.0, "p999_us": 0.0,
            "max_us": 0.0})
    };
    let status = json!({
        "name": "vm", "pid": 1, "version": "0.1.0", "uptime_s": 1.0, "started": "cold", "port": null,
        "server": {"endpoint": "unix:/s", "connected": true, "breaker": "closed", "error": null},
        "servers": [
            {"endpoint": "unix:/r", "in_use": false, "possible_bytes": null, "answered_s_ago": null, "error": "no"},
            {"endpoint": "unix:/s", "in_use": true, "possible_bytes": 8192, "answered_s_ago": 1, "error": null},
        ],
        "cache": {"enabled": true, "wanted_bytes": 8192, "granted_bytes": 8192, "used_bytes": 4096,
            "admission": "evictions", "hit_ratio": null},
        "disks": [{"name": "a", "image": "i", "socket": "s", "bytes": 4096, "read_only": false, "store": "up",
            "attached": true, "nbd_clients": null}],
        "counters": counters,
        "latency": {"read": latency([0, 0]), "read_from_cache": latency(cache_ns), "read_from_disk": latency(disk_ns),
            "write": latency([0, 0])},
        "hedging": {"late_after_us": 0.0, "disk": null, "server": null},
        "memory": {"index_bytes": 0, "buffer_bytes": 0, "known_blocks": 0},
    });
    serde_json::from_value(status).unwrap()
}

/// Returns a curve that falls evenly from 1 at 1 MiB to 0 at 64 GiB.
pub fn curve() -> CurveStatus {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most 2^36")]
    let bytes = |at: u32| (2_f64.powf(f64::from(at) / 4.0) * 1048576.0).round() as u64;
    let point = |at: u32| CurvePoint {
        bytes: bytes(at),
        miss_ratio: 1.0 - f64::from(at) / 64.0,
        standard_error: 0.01,
        last_window: at.is_multiple_of(4).then_some(0.5),
    };
    CurveStatus {
        curve_of: "web1".into(),
        disk: None,
        disks: vec!["root".into(), "data".into()],
        learns_from: "evictions".into(),
        cache_bytes: 0,
        blocks_read: 12345.4,
        followed_share: 0.01,
        reach_bytes: None,
        points: (0..=64).map(point).collect(),
        forecast: Some(ForecastStatus { windows: 5, curve_error: 0.02, as_before_error: 0.03 }),
        blocks_read_per_s: Some(100.0),
        disk_read_us: Some(7000.0),
        server_read_us: None,
    }
}

/// Returns the first snapshot of VMs that answer, and of some that do not and have these names.
#[must_use]
pub fn snapshot(vms: Vec<Result<Status, &str>>) -> Snapshot {
    let answer = |(number, answer): (u32, Result<Status, &str>)| match answer {
        Ok(status) => Answer { socket: format!("/s/{number}.ctl").into(), status: Ok(status), curve: None },
        Err(name) => Answer {
            socket: format!("/s/{name}.ctl").into(),
            status: Err(Silence::Hangs("it has not answered for 1 s".into())),
            curve: None,
        },
    };
    Taker::new("host".into()).next((0..).zip(vms).map(answer).collect(), 1_700_000_000.0, None)
}

/// Returns the report of a daemon that has just given a local tier to a VM.
#[must_use]
pub fn host_report() -> HostReport {
    let decision = HostDecision {
        at_s: 1_700_000_000,
        vm: Some("web001".into()),
        from_bytes: 1 << 30,
        to_bytes: 2 << 30,
        why: "it gains".into(),
        outcome: "set".into(),
        ..HostDecision::default()
    };
    HostReport {
        at_s: 1_700_000_001,
        resource: "local tier".into(),
        applies: true,
        total_bytes: 4 << 30,
        counted_bytes: 3 << 30,
        state: "all sizes are as they should be".into(),
        decisions: vec![decision],
        ..HostReport::default()
    }
}

/// Returns the second snapshot of VMs that have everything: a port, a server, pools, latencies and a curve.
#[must_use]
pub fn full_snapshot(count: u32) -> Snapshot {
    let mut taker = Taker::new("host".into());
    let answers = |round: u32| -> Vec<Answer> {
        let answer = |number: u32| {
            let status = full_status(number, round);
            let mut curve = curve();
            curve.cache_bytes = status.cache.granted_bytes;
            Answer { socket: format!("/s/{}.ctl", status.name).into(), status: Ok(status), curve: Some(curve) }
        };
        (0..count).map(answer).collect()
    };
    taker.next(answers(1), 1_700_000_000.0, None);
    taker.next(answers(2), 1_700_000_005.0, Some(Ok(host_report())))
}
