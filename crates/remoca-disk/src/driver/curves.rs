//! Miss-ratio curves: what the control socket tells of them, and the file that outlives this process.
//!
//! The file is written when the process ends or gives way, and about once a minute while reads come, by another thread.

use super::disk::Disk;
use super::index_size::Aside;
use super::vm::Vm;
use crate::state::{curves_beside, keep_curves, resume_curves};
use remoca_core::engine::{Admission, CurveReport, DiskEngine};
use remoca_core::units::{DiskIndex, PAGE_SIZE_U64, PageCount};
use remoca_io::words::IndexMemory;
use remoca_protocol::control::{CurvePoint, CurveStatus, ForecastStatus};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::time::{Duration, Instant};

/// Time between two copies: what a killed process loses of its curves.
const KEEP_EVERY: Duration = Duration::from_secs(60);
/// How long a process that ends waits for a copy that another thread is writing.
const COPY_TIME_MAX: Duration = Duration::from_secs(1);
/// Sizes of a curve for each doubling, and number of doublings from 1 MiB on.
const STEPS: u32 = 4;
const DOUBLINGS: u32 = 16;
/// Size of the smallest cache on a curve.
const LEAST: PageCount = PageCount(256);

type Engine = DiskEngine<IndexMemory>;

/// The file of the curves.
pub(super) struct KeptCurves {
    /// `None`: nothing outlives this process.
    path: Option<PathBuf>,
    kept_at: Instant,
    /// Number of blocks read when the last copy was made.
    read_blocks: u64,
    copying: Option<Receiver<()>>,
}

impl KeptCurves {
    /// Returns a value without a file.
    pub(super) fn none(now: Instant) -> Self {
        Self { path: None, kept_at: now, read_blocks: 0, copying: None }
    }

    /// Continues the curves of the previous process, if `state` is the path of a state file.
    pub(super) fn resume(state: Option<&Path>, engine: &mut Engine, now: Instant) -> Self {
        let path = state.map(curves_beside);
        if let Some(path) = &path
            && let Err(error) = resume_curves(path, engine)
        {
            tracing::warn!("{}: the miss-ratio curves of the former process are not used: {error}", path.display());
        }
        Self { path, kept_at: now, read_blocks: engine.stats().read_blocks, copying: None }
    }

    /// Has another thread write the curves, if that is due.
    pub(super) fn run_timer(&mut self, engine: &Engine, now: Instant, aside: &Aside) {
        let Some(path) = &self.path else { return };
        let read_blocks = engine.stats().read_blocks;
        if now.saturating_duration_since(self.kept_at) < KEEP_EVERY
            || read_blocks == self.read_blocks
            || self.is_copying()
        {
            return;
        }
        (self.kept_at, self.read_blocks) = (now, read_blocks);
        let (path, curves) = (path.clone(), engine.curves_to_bytes());
        let (done, copying) = sync_channel(1);
        let work = move || {
            // The next copy may succeed.
            let _ = keep_curves(&path, &curves);
            let _ = done.send(());
        };
        // A copy that cannot be made now is made later.
        self.copying = aside("curves", Box::new(work)).ok().map(|()| copying);
    }

    /// Writes the curves for a successor.
    pub(super) fn keep(&mut self, engine: &Engine) {
        let Some(path) = &self.path else { return };
        if let Some(copying) = self.copying.take() {
            let _ = copying.recv_timeout(COPY_TIME_MAX);
        }
        if let Err(error) = keep_curves(path, &engine.curves_to_bytes()) {
            tracing::warn!("{}: the miss-ratio curves are not kept: {error}", path.display());
        }
    }

    /// Removes the file: this process has no successor.
    pub(super) fn abandon(&mut self) {
        if let Some(path) = self.path.take() {
            // There may be none.
            let _ = std::fs::remove_file(path);
        }
    }

    fn is_copying(&self) -> bool {
        self.copying.as_ref().is_some_and(|copying| matches!(copying.try_recv(), Err(TryRecvError::Empty)))
    }
}

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
