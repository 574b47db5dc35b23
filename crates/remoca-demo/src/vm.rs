//! The VM process (`remoca disk`), its clock and its trace.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use remoca_io::control;
use remoca_lab::Service;
use remoca_protocol::{
    control::{CacheStatus, Command as Ask, Reply, Status},
    trace::{Trace, TraceRecord, parse_trace},
};

use crate::analysis::Window;

const LIMIT: Duration = Duration::from_secs(240);

/// Options of the VM process.
pub struct VmConfig<'a> {
    pub program: &'a Path,
    pub name: &'a str,
    /// Folder for its sockets. Its path must be short, because that of a socket has at most 107 bytes.
    pub sockets: &'a Path,
    /// Folder for its log and its trace.
    pub logs: &'a Path,
    /// URI of the disk.
    pub image: &'a str,
    /// Memory server and size of the cache; `None` for no cache, and no eviction port.
    pub cache: Option<(&'a str, u64)>,
    /// Memory server of this host and size of the local tier; `None` for no local tier.
    pub local: Option<(&'a str, u64)>,
}

pub struct VmProcess {
    service: Service,
    control: PathBuf,
    trace: PathBuf,
    /// Instant at which its clock was zero.
    started: Instant,
}

impl VmConfig<'_> {
    pub fn disk_socket(&self) -> PathBuf {
        self.sockets.join(format!("{}.disk", self.name))
    }

    pub fn port_socket(&self) -> PathBuf {
        self.sockets.join(format!("{}.port", self.name))
    }

    pub fn start(&self) -> Result<VmProcess> {
        let control = self.sockets.join(format!("{}.ctl", self.name));
        let trace = self.logs.join(format!("{}.trace", self.name));
        let mut command = Command::new(self.program);
        command.arg("disk").args(["--name", self.name]);
        command.arg("--disk").arg(format!("image={},socket={},name=data", self.image, self.disk_socket().display()));
        command.arg("--control").arg(&control).arg("--trace").arg(&trace);
        if let Some((server, bytes)) = self.cache {
            command.args(["--server", server, "--cache", &bytes.to_string()]);
            command.arg("--port").arg(self.port_socket());
        }
        if let Some((server, bytes)) = self.local {
            command.args(["--local-server", server, "--local", &bytes.to_string()]);
        }
        let log = self.logs.join(format!("{}.log", self.name));
        let mut service = Service::start(&format!("remoca disk ({})", self.name), command, &log)?;
        service.wait_for_socket(&control, LIMIT)?;
        let started = clock_zero(&control)?;
        Ok(VmProcess { service, control, trace, started })
    }
}

/// Returns the instant at which the clock of a VM process was zero, derived from the fastest of ten answers.
fn clock_zero(control: &Path) -> Result<Instant> {
    let mut best: Option<(Duration, Instant)> = None;
    for _ in 0..10 {
        let asked = Instant::now();
        let uptime = Duration::from_secs_f64(ask(control)?.uptime_s);
        let took = asked.elapsed();
        if best.is_none_or(|(shortest, _)| took < shortest) {
            let zero = (asked + took / 2)
                .checked_sub(uptime)
                .context("the uptime of the VM process exceeds that of the machine")?;
            best = Some((took, zero));
        }
    }
    best.map(|(_, zero)| zero).context("the VM process gave no uptime")
}

impl VmProcess {
    pub fn control(&self) -> &Path {
        &self.control
    }

    pub fn status(&self) -> Result<Status> {
        ask(&self.control)
    }

    /// Returns the time since the start of the process, in nanoseconds.
    pub fn now_ns(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Runs `what`. Returns its result, and the time span that it took on the clock of the process.
    pub fn during<T>(&self, what: impl FnOnce() -> Result<T>) -> Result<(T, Window)> {
        let from_ns = self.now_ns();
        let done = what()?;
        Ok((done, Window { from_ns, to_ns: self.now_ns() }))
    }

    /// Waits until the memory servers grant the whole size of the cache and of its local tier.
    pub fn wait_for_cache(&mut self) -> Result<()> {
        let control = self.control.clone();
        let is_whole = |cache: CacheStatus| {
            cache.granted_bytes >= cache.wanted_bytes && cache.local_granted_bytes >= cache.local_wanted_bytes
        };
        let ready = || ask(&control).is_ok_and(|status| is_whole(status.cache));
        Ok(self.service.wait_until("getting its cache", LIMIT, ready)?)
    }

    /// Ends the process, and returns its trace.
    pub fn stop(mut self) -> Result<Vec<TraceRecord>> {
        let status = self.service.terminate(LIMIT)?;
        ensure!(status.success(), "remoca disk ended with {status}:\n{}", self.service.log_tail());
        let trace = std::fs::read(&self.trace).with_context(|| format!("cannot read {}", self.trace.display()))?;
        let Trace { records, lost } =
            parse_trace(&trace).with_context(|| format!("cannot read {}", self.trace.display()))?;
        ensure!(lost == 0, "{lost} requests are missing in the trace {}", self.trace.display());
        Ok(records)
    }
}

fn ask(control: &Path) -> Result<Status> {
    match control::call(control, Ask::Status).context("cannot ask remoca disk for its status")? {
        Reply::Status(status) => Ok(*status),
        Reply::Curve(_) => bail!("remoca disk: it is no status"),
        Reply::Error { error } => bail!("remoca disk: {error}"),
    }
}
