//! The miss-ratio curve that the control socket tells.

use super::disk::Disk;
use super::vm::Vm;
use remoca_core::engine::{Admission, CurveReport};
use remoca_core::units::{DiskIndex, PAGE_SIZE_U64, PageCount};
use remoca_protocol::control::{CurvePoint, CurveStatus, ForecastStatus};

/// Sizes of a curve for each doubling, and number of doublings from 1 MiB on.
const STEPS: u32 = 4;
const DOUBLINGS: u32 = 16;
/// Size of the smallest cache on a curve.
const LEAST: PageCount = PageCount(256);

/// Returns the curve of the disk `name`, or that of the VM.
///
/// # Errors
/// If there is no such disk, it has no curve, or nothing was read yet.
pub(super) fn curve_status(vm: &Vm, name: Option<&str>) -> Result<CurveStatus, String> {
    let disk = name.map(|name| number_of(vm.guests.disks(), name)).transpose()?;
    let sizes: Vec<_> = (0..=STEPS * DOUBLINGS).map(size).collect();
    let (engine, host) = (&vm.engine, &vm.host);
    let report = engine.curve(host.now(), disk, &sizes).ok_or_else(|| match name {
        None => "its guest has read nothing yet, so there is no curve".to_owned(),
        Some(name) => format!(
            "the disk {name} has no curve: it was not read yet, or it is not among the first ones of its VM that were"
        ),
    })?;
    let status = engine.status();
    let has_curve = |disk: &&Disk| engine.curve(host.now(), Some(disk.number), &[]).is_some();
    let micros = |ns: u64| ns as f64 / 1000.;
    Ok(CurveStatus {
        curve_of: vm.name.clone(),
        disk: name.map(str::to_owned),
        disks: vm.guests.disks().iter().filter(has_curve).map(|disk| disk.name.clone()).collect(),
        learns_from: match status.admission {
            Admission::Evictions => "evictions".into(),
            Admission::Frames => "frames".into(),
            Admission::Reads => "reads".into(),
        },
        cache_bytes: u64::from(status.granted.0) * PAGE_SIZE_U64,
        blocks_read: report.reads,
        followed_share: report.rate / f64::from(report.one_of),
        points: points(&sizes, &report),
        forecast: (report.forecasts.windows > 0).then_some(ForecastStatus {
            windows: report.forecasts.windows,
            curve_error: report.forecasts.curve_error,
            as_before_error: report.forecasts.as_before_error,
        }),
        blocks_read_per_s: report.reads_per_s,
        disk_read_us: status.hedging.disk.map(|latency| micros(latency.p50_ns)),
        server_read_us: status.hedging.server.map(|latency| micros(latency.p50_ns)),
    })
}

fn number_of(disks: &[Disk], name: &str) -> Result<DiskIndex, String> {
    disks.iter().find(|disk| disk.name == name).map(|disk| disk.number).ok_or_else(|| {
        let names: Vec<_> = disks.iter().map(|disk| disk.name.as_str()).collect();
        format!("it has no disk {name}, but {}", names.join(", "))
    })
}

/// Returns the size number `at` of a curve.
fn size(at: u32) -> PageCount {
    let pages = f64::from(LEAST.0) * (f64::from(at) / f64::from(STEPS)).exp2();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most 2^24 pages")]
    PageCount(pages.round() as u32)
}

fn points(sizes: &[PageCount], report: &CurveReport) -> Vec<CurvePoint> {
    let last = |at: usize| {
        let is_doubling = at.is_multiple_of(STEPS as usize);
        is_doubling.then(|| report.last_window.get(at / STEPS as usize).copied()).flatten()
    };
    let points = sizes.iter().zip(&report.miss_ratios).enumerate();
    points
        .map(|(at, (size, (miss_ratio, standard_error)))| CurvePoint {
            bytes: u64::from(size.0) * PAGE_SIZE_U64,
            miss_ratio: *miss_ratio,
            standard_error: *standard_error,
            last_window: last(at),
        })
        .collect()
}
