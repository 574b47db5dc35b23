//! The miss-ratio curve that the control socket tells.

use super::disk::Disk;
use super::vm::Vm;
use remoca_core::curve::REACH_MIN;
use remoca_core::engine::{Admission, CurveReport};
use remoca_core::units::{DiskIndex, PAGE_SIZE_U64, PageCount};
use remoca_protocol::control::{
    CURVE_POINTS_MAX, CURVE_REACH_BYTES, CurveGrid, CurvePoint, CurveStatus, ForecastStatus,
};

/// Sizes of a curve for each doubling, and number of doublings from 1 MiB on.
const STEPS: u32 = 4;
const DOUBLINGS: u32 = 22;
/// Size of the smallest cache on a curve.
const LEAST: PageCount = PageCount(256);
const _: () = assert!(CURVE_REACH_BYTES == REACH_MIN.0 as u64 * PAGE_SIZE_U64);

/// Returns the curve of the disk `name`, or that of the VM, at the sizes of `grid` or at [`STEPS`] for each doubling within its reach.
///
/// # Errors
/// If there is no such disk, it has no curve, nothing was read yet, or the grid is not valid.
pub(super) fn curve_status(vm: &mut Vm, name: Option<&str>, grid: Option<CurveGrid>) -> Result<CurveStatus, String> {
    let disk = name.map(|name| number_of(vm.guests.disks(), name)).transpose()?;
    let sizes = match grid {
        None => (0..=STEPS * DOUBLINGS).map(size).collect(),
        Some(grid) => sizes_of(grid)?,
    };
    let (engine, host) = (&mut vm.engine, &vm.host);
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
        cache_bytes: (u64::from(status.granted.0) + u64::from(status.local_granted.0)) * PAGE_SIZE_U64,
        blocks_read: report.reads,
        followed_share: report.rate / f64::from(report.one_of),
        reach_bytes: Some(u64::from(report.reach.0) * PAGE_SIZE_U64),
        points: points(&sizes, &report, grid.is_none()),
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

/// Returns the sizes of a grid.
///
/// # Errors
/// If it has too many sizes, or they are no numbers of pages.
fn sizes_of(grid: CurveGrid) -> Result<Vec<PageCount>, String> {
    let CurveGrid { first_bytes, step_bytes, count } = grid;
    let is_whole = |bytes: u64| bytes.is_multiple_of(PAGE_SIZE_U64);
    if count > CURVE_POINTS_MAX || step_bytes == 0 || !is_whole(step_bytes) || !is_whole(first_bytes) {
        return Err(format!(
            "a curve at {count} sizes from {first_bytes} bytes on with {step_bytes} bytes between them: at most \
             {CURVE_POINTS_MAX} sizes are possible, a multiple of {PAGE_SIZE_U64} bytes apart"
        ));
    }
    let first = first_bytes / PAGE_SIZE_U64;
    let pages = |at: u32| u64::from(at).saturating_mul(step_bytes / PAGE_SIZE_U64).saturating_add(first);
    let size = |at: u32| PageCount(u32::try_from(pages(at)).unwrap_or(u32::MAX));
    Ok((0..count).map(size).collect())
}

/// Returns the size number `at` of a curve.
fn size(at: u32) -> PageCount {
    let pages = f64::from(LEAST.0) * (f64::from(at) / f64::from(STEPS)).exp2();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most 2^30 pages")]
    PageCount(pages.round() as u32)
}

fn points(sizes: &[PageCount], report: &CurveReport, has_doublings: bool) -> Vec<CurvePoint> {
    let last = |at: usize| {
        let is_doubling = has_doublings && at.is_multiple_of(STEPS as usize);
        is_doubling.then(|| report.last_window.get(at / STEPS as usize).copied()).flatten()
    };
    let most = if has_doublings { report.reach.max(REACH_MIN) } else { PageCount(u32::MAX) };
    let points = sizes.iter().take_while(|size| **size <= most).zip(&report.miss_ratios).enumerate();
    points
        .map(|(at, (size, (miss_ratio, standard_error)))| CurvePoint {
            bytes: u64::from(size.0) * PAGE_SIZE_U64,
            miss_ratio: *miss_ratio,
            standard_error: *standard_error,
            last_window: last(at),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(grid: CurveGrid) -> Option<Vec<u32>> {
        sizes_of(grid).ok().map(|sizes| sizes.into_iter().map(|size| size.0).collect())
    }

    #[test]
    fn a_grid_has_the_sizes_that_it_says_and_not_too_many() {
        let grid = CurveGrid { first_bytes: 8192, step_bytes: 4096, count: 3 };
        assert_eq!(pages(grid), Some(vec![2, 3, 4]));
        assert!(pages(CurveGrid { count: CURVE_POINTS_MAX, ..grid }).is_some());
        for wrong in [
            CurveGrid { count: CURVE_POINTS_MAX + 1, ..grid },
            CurveGrid { step_bytes: 0, ..grid },
            CurveGrid { step_bytes: 4097, ..grid },
            CurveGrid { first_bytes: 4095, ..grid },
        ] {
            assert_eq!(pages(wrong), None, "{wrong:?}");
        }
        let huge = CurveGrid { first_bytes: 0, step_bytes: 1 << 63, count: 3 };
        assert_eq!(pages(huge), Some(vec![0, u32::MAX, u32::MAX]));
    }

    #[test]
    fn without_a_grid_there_are_four_sizes_for_each_doubling() {
        assert_eq!([0, 1, STEPS, STEPS * DOUBLINGS].map(|at| size(at).0), [256, 304, 512, 1 << 30]);
    }
}
