//! The loop of the daemon: asks, plans, changes, shows. Everything that waits has a deadline.

use crate::ask::{ask_all, set};
use crate::guest::{Address, Monitors, Unusable};
use crate::limits::Limits;
use crate::planner::{Heard, Look, Moment, Outcome, Planner, Settings, Side, Step};
use crate::record::{self, Paths};
use crate::socket::ReportSocket;
use remoca_protocol::host::HostReport;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

/// Longest time of a single wait.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// Where the daemon finds VMs and their limits.
pub trait Surroundings {
    /// Returns the VMs with their control sockets.
    fn vms(&self) -> Vec<(String, PathBuf)>;
    /// Returns what the operator says about a VM.
    ///
    /// # Errors
    /// What is wrong with its file.
    fn limits(&self, vm: &str) -> Result<Limits, String>;
    /// Returns the monitor of the VM's guest; `None` if the operator names none.
    fn monitor(&self, vm: &str) -> Option<Address>;
    /// Takes a new report.
    ///
    /// # Errors
    /// If nobody reads what is shown any longer; the daemon then ends.
    fn show(&mut self, report: &HostReport) -> io::Result<()>;
}

/// The daemon.
pub struct Daemon<S> {
    planner: Planner,
    settings: Settings,
    surroundings: S,
    monitors: Monitors,
    /// `None` for a look that leaves nothing behind.
    record: Option<PathBuf>,
    socket: Option<ReportSocket>,
    started: Instant,
    plan_us: u64,
}

/// How long the daemon runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// One plan, with its changes.
    Once,
    Always,
}

impl<S: Surroundings> Daemon<S> {
    /// Returns a daemon with a record and a socket at `paths`, or one that only looks.
    ///
    /// # Errors
    /// If the socket cannot be made.
    pub fn new(settings: Settings, surroundings: S, paths: Option<&Paths>) -> io::Result<Self> {
        let on_disk = paths.map(|paths| {
            record::read(&paths.record).unwrap_or_else(|error| {
                tracing::warn!("{}: the record of a former daemon is not used: {error}", paths.record.display());
                crate::planner::Record::default()
            })
        });
        let record = on_disk.unwrap_or_default();
        let lend = record.guests.iter().filter(|(_, sizes)| sizes.taken() > 0).map(|(vm, _)| vm.as_str());
        let lend: Vec<_> = lend.filter(|_| settings.guests.is_none()).collect();
        if !lend.is_empty() {
            tracing::warn!(
                "guests take no part now, but these have less memory than at first: {}. `--guests` goes on with them; or give them theirs back by `virsh setmem` or QMP's `balloon`",
                lend.join(", ")
            );
        }
        Ok(Self {
            planner: Planner::new(settings, record),
            settings,
            surroundings,
            monitors: Monitors::default(),
            record: paths.filter(|_| settings.applies).map(|paths| paths.record.clone()),
            socket: paths.map(|paths| ReportSocket::start(&paths.socket)).transpose()?,
            started: Instant::now(),
            plan_us: 0,
        })
    }

    /// Runs until `stop` becomes readable. Sizes then stay as they are.
    ///
    /// # Errors
    /// If the system does not let it wait, or nobody reads what is shown.
    pub fn run(&mut self, stop: BorrowedFd<'_>, extent: Extent) -> io::Result<()> {
        loop {
            match self.planner.next_look() {
                Look::All(at) => {
                    if wait(stop, self.started + at)? {
                        return Ok(());
                    }
                    self.look_at_all();
                }
                Look::Awaited(at, names) => {
                    if wait(stop, self.started + at)? {
                        return Ok(());
                    }
                    self.look_at(&names);
                }
            }
            if self.execute(stop)? {
                return Ok(());
            }
            self.keep();
            let report = self.report();
            if let Some(socket) = &self.socket {
                socket.show(&report);
            }
            if extent == Extent::Once && self.planner.is_moving() {
                continue;
            }
            self.surroundings.show(&report)?;
            if extent == Extent::Once {
                return Ok(());
            }
        }
    }

    fn moment(&self) -> Moment {
        let unix_s = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs());
        Moment { now: self.started.elapsed(), unix_s }
    }

    fn report(&self) -> HostReport {
        HostReport {
            version: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
            plan_us: self.plan_us,
            ..self.planner.report(self.moment())
        }
    }

    /// Asks all VMs for status and curve, and hands the answers to the planner.
    fn look_at_all(&mut self) {
        let vms = self.surroundings.vms();
        let places: Vec<_> = vms.iter().map(|(name, socket)| (name.as_str(), socket.as_path())).collect();
        let answers = ask_all(&places, self.settings.resource, Some(self.planner.grid()));
        let heard = |((vm, _), answer): (&(String, PathBuf), _)| Heard {
            vm: vm.clone(),
            limits: self.surroundings.limits(vm),
            answer,
        };
        let all = vms.iter().zip(answers).map(heard).collect();
        let names: Vec<String> = vms.iter().map(|(vm, _)| vm.clone()).collect();
        let monitors = |vm: &String| Some((vm.clone(), self.surroundings.monitor(vm)?));
        let monitors: BTreeMap<_, _> = names.iter().filter_map(monitors).collect();
        if self.settings.guests.is_some() {
            self.monitors.keep(&monitors);
        }
        self.look_at_guests(&names);
        let began = Instant::now();
        self.planner.hear_all(self.moment(), all);
        self.plan_us = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
    }

    /// Asks the monitors of some guests.
    fn look_at_guests(&mut self, names: &[String]) {
        if self.settings.guests.is_none() {
            return;
        }
        let mut said = self.monitors.read(|vm| names.iter().any(|name| name == vm));
        for name in names {
            let none = || Err(Unusable::Advised("its file names no monitor ([memory] monitor)".into()));
            said.entry(name.clone()).or_insert_with(none);
        }
        self.planner.hear_guests(said);
    }

    /// Asks some VMs for their status.
    fn look_at(&mut self, names: &[String]) {
        let vms = self.surroundings.vms();
        let asked = vms.iter().filter(|(name, _)| names.contains(name));
        let places: Vec<_> = asked.map(|(name, socket)| (name.as_str(), socket.as_path())).collect();
        self.look_at_guests(names);
        // What the host sees of the guests must not be older than what they say.
        let answers = ask_all(&places, self.settings.resource, None);
        for ((name, _), answer) in places.iter().zip(answers) {
            self.planner.hear(self.moment(), name, answer);
        }
        self.planner.looked_at_awaited(self.moment(), names);
    }

    /// Executes what the planner asks for. Returns whether the daemon is to stop.
    fn execute(&mut self, stop: BorrowedFd<'_>) -> io::Result<bool> {
        while let Some(step) = self.planner.next_step(self.moment()) {
            let outcome = match self.write_record() {
                Ok(()) => self.send(&step),
                Err(error) => Outcome::NotSent(format!("the intent cannot be written: {error}")),
            };
            self.planner.step_done(self.moment(), &step, outcome);
            if wait(stop, Instant::now())? {
                self.keep();
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn send(&mut self, step: &Step) -> Outcome {
        if step.side == Side::Guest {
            return match self.monitors.set_bytes(&step.vm, step.bytes) {
                Ok(()) => Outcome::Told,
                Err(why) => Outcome::Unknown(why),
            };
        }
        let vms = self.surroundings.vms();
        let Some((name, socket)) = vms.iter().find(|(name, _)| *name == step.vm) else {
            return Outcome::NotSent("the VM is gone".into());
        };
        set((name, socket), self.settings.resource, step.bytes)
    }

    fn write_record(&self) -> io::Result<()> {
        self.record.as_ref().map_or(Ok(()), |path| record::write(path, &self.planner.record()))
    }

    /// Keeps what is known for a successor.
    fn keep(&self) {
        if let Err(error) = self.write_record() {
            tracing::warn!("the record cannot be written: {error}. Nothing is changed as long as that is so");
        }
    }
}

/// Waits until `deadline`, or until `stop` becomes readable. Returns whether it did.
fn wait(stop: BorrowedFd<'_>, deadline: Instant) -> io::Result<bool> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let time = left.min(WAIT_MAX);
        let time = Timespec { tv_sec: time.as_secs().cast_signed(), tv_nsec: time.subsec_nanos().into() };
        match poll(&mut [PollFd::new(&stop, PollFlags::IN)], Some(&time)) {
            Ok(0) if left > WAIT_MAX => {}
            Ok(count) => return Ok(count > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
