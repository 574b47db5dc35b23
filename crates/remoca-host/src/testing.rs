//! Curves and answers for tests.

use remoca_protocol::control::{CurveGrid, CurvePoint, CurveStatus, Status};
use serde_json::json;

/// Unit of memory in tests.
pub const UNIT: u64 = 2 << 20;
/// Grid of the curves in tests.
pub const GRID: CurveGrid = CurveGrid { first_bytes: 0, step_bytes: UNIT, count: 201 };

/// Returns an exact curve with these miss ratios, by number of units.
pub fn curve_status(ratio: impl Fn(u32) -> f64) -> CurveStatus {
    let point = |at: u32| CurvePoint {
        bytes: u64::from(at) * UNIT,
        miss_ratio: if at == 0 { 1. } else { ratio(at) },
        standard_error: 0.,
        last_window: None,
    };
    CurveStatus {
        curve_of: "vm".into(),
        disk: None,
        disks: Vec::new(),
        learns_from: "evictions".into(),
        cache_bytes: UNIT,
        blocks_read: 1e6,
        followed_share: 1.,
        reach_bytes: None,
        points: (0..GRID.count).map(point).collect(),
        forecast: None,
        blocks_read_per_s: Some(1000.),
        disk_read_us: Some(5000.),
        server_read_us: Some(200.),
    }
}

/// Returns the status of a VM process with these sizes, in bytes.
pub fn status(name: &str, wanted: u64, granted: u64) -> Status {
    let latency =
        json!({"count": 0, "sum_ns": 0, "mean_us": 0.0, "p50_us": 0.0, "p99_us": 0.0, "p999_us": 0.0, "max_us": 0.0});
    let status = json!({
        "name": name, "pid": 1, "version": "0.2.0", "uptime_s": 1.0, "started": "cold", "port": null,
        "server": {"endpoint": "unix:/s", "connected": true, "breaker": "closed", "error": null},
        "cache": {"enabled": true, "wanted_bytes": wanted, "granted_bytes": granted, "used_bytes": 0,
            "admission": "evictions", "hit_ratio": null},
        "disks": [],
        "counters": {},
        "latency": {"read": latency, "read_from_cache": latency, "read_from_disk": latency, "write": latency},
        "hedging": {"late_after_us": 0.0, "disk": null, "server": null},
        "memory": {"index_bytes": 0, "buffer_bytes": 0, "known_blocks": 0},
    });
    serde_json::from_value(status).unwrap()
}
