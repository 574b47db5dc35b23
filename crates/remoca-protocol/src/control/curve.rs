//! Content of `remoca curve`: a miss-ratio curve, with what is needed to turn it into times.

use serde::{Deserialize, Serialize};

/// Maximum number of sizes of a [`CurveGrid`].
pub const CURVE_POINTS_MAX: u32 = 4096;

/// Reach of a curve that does not say it: that of an older process.
pub const CURVE_REACH_BYTES: u64 = 64 << 30;

/// Evenly spaced sizes: the first one, a step more, two steps more and so on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CurveGrid {
    /// A multiple of 4096. Older processes know only 0.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub first_bytes: u64,
    /// A multiple of 4096 above 0.
    pub step_bytes: u64,
    /// Number of sizes, at most [`CURVE_POINTS_MAX`].
    pub count: u32,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
}

/// Miss-ratio curve of a VM or of one of its disks.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CurveStatus {
    /// Name of the VM.
    pub curve_of: String,
    /// Name of the disk; `None` for all disks of the VM in one cache.
    pub disk: Option<String>,
    /// Names of the disks that have a curve.
    pub disks: Vec<String>,
    /// What shows that the guest no longer holds a block: "evictions" that the agent reports, "frames" of guest memory, or nothing, so that
    /// the curve is that of a cache into which "reads" are admitted.
    pub learns_from: String,
    /// Size of the VM's cache that memory servers granted, with its local tier; 0 if there is none.
    pub cache_bytes: u64,
    /// Number of blocks read that the curve is made of; old ones count less.
    pub blocks_read: f64,
    /// Share of the evictions that are followed.
    pub followed_share: f64,
    /// Size up to which the curve says something: deeper blocks are forgotten, or were evicted before it began. Beyond that it is flat. `None` in the
    /// answer of an older process: then [`CURVE_REACH_BYTES`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reach_bytes: Option<u64>,
    /// From 1 MiB to the reach, but at least to 64 GiB, four sizes for each doubling; or the sizes that were asked for.
    pub points: Vec<CurvePoint>,
    /// How well the past was foretold; `None` before there is anything to compare.
    pub forecast: Option<ForecastStatus>,
    pub blocks_read_per_s: Option<f64>,
    /// Normal latency of reads that the disk answers; `None` while too few are known.
    pub disk_read_us: Option<f64>,
    /// The same for reads that a memory server answers.
    pub server_read_us: Option<f64>,
}

/// One size on a curve.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CurvePoint {
    pub bytes: u64,
    /// Share of the blocks read that a cache of this size would not answer.
    pub miss_ratio: f64,
    /// Standard error of the miss ratio by sampling; 0 if every block is followed.
    pub standard_error: f64,
    /// Miss ratio of the last window of time alone, for each doubling of the size.
    pub last_window: Option<f64>,
}

/// How well windows of time were foretold.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ForecastStatus {
    /// Number of windows, each of a minute or more.
    pub windows: u32,
    /// Mean difference between the curve at the start of a window and the window, over all sizes. Sampling has its part in it.
    pub curve_error: f64,
    /// The same if the window before it is the forecast.
    pub as_before_error: f64,
}
