//! The loop of the daemon: asks, plans, changes, shows. Everything that waits has a deadline.

use crate::ask::{Place, Processes};
use crate::guest::{Address, Monitors, Unusable};
use crate::limits::Limits;
use crate::planner::{Heard, Look, Moment, Outcome, Planner, Settings, Side, Step};
use crate::record::{self, Paths};
use crate::request;
use crate::resource::Resource;
use crate::socket::ReportSocket;
use remoca_protocol::host::HostReport;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

/// Time between two looks for a request of the operator.
const REQUEST_EVERY: Duration = Duration::from_secs(1);

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
    ///
    /// # Errors
    /// What is wrong with its file.
    fn monitor(&self, vm: &str) -> Result<Option<Address>, String>;
    /// Takes a new report.
    ///
    /// # Errors
    /// If nobody reads what is shown any longer; the daemon then ends.
    fn show(&mut self, report: &HostReport) -> io::Result<()>;
}

/// The daemon.
pub struct Daemon<S> {
    planner: Planner,
    surroundings: S,
    processes: Processes,
    monitors: Monitors,
    /// The monitors by the files of the VMs, or why there is none.
    addresses: BTreeMap<String, Result<Address, String>>,
    /// `None` for a look that leaves nothing behind.
    record: Option<PathBuf>,
    /// A file with which the operator has all guests get their memory back. `None` for a daemon that changes nothing.
    request: Option<PathBuf>,
    socket: Option<ReportSocket>,
    wish: Wish,
    started: Instant,
    plan_us: u64,
}

/// How far the daemon is with what the operator wants: that all guests get their memory back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wish {
    None,
    Begun,
    /// It is done, and the request cannot be removed.
    Done,
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
    /// If the record cannot be read, or the socket cannot be made.
    pub fn new(settings: Settings, surroundings: S, paths: Option<&Paths>) -> io::Result<Self> {
        let on_disk = paths.map(|paths| record::read_or_keep(&paths.record)).transpose()?;
        let record = on_disk.unwrap_or_default();
        let lend = record.guests.iter().filter(|(_, sizes)| sizes.taken() > 0).map(|(vm, _)| vm.as_str());
        let lend: Vec<_> = lend.filter(|_| settings.guests.is_none() || !settings.applies).collect();
        if !lend.is_empty() {
            tracing::warn!(
                "guests take no part now, and get no help, but these have less memory than at first: {}. `--guests` with `--apply` goes on with them; `remoca host give-back` gives them theirs back",
                lend.join(", ")
            );
        }
        Ok(Self {
            planner: Planner::new(settings, record),
            surroundings,
            processes: Processes::new(settings.resource),
            monitors: Monitors::new(settings.interval),
            addresses: BTreeMap::new(),
            record: paths.filter(|_| settings.applies).map(|paths| paths.record.clone()),
            request: paths
                .filter(|_| settings.applies && settings.resource == Resource::Local)
                .map(|paths| paths.request.clone()),
            socket: paths.map(|paths| ReportSocket::start(&paths.socket)).transpose()?,
            wish: Wish::None,
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
            let look = self.planner.next_look();
            if self.wait_for_look(stop, look.at())? {
                return Ok(());
            }
            match look {
                Look::All(_) => self.look_at_all(),
                Look::Awaited(_, names) => self.look_at(&names),
            }
            if self.execute(stop)? {
                return Ok(());
            }
            self.keep();
            self.answer_request();
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

    /// Returns the number of changes that it has begun, and that did not take place. The log says why.
    #[must_use]
    pub fn failed(&self) -> usize {
        self.planner.failed()
    }

    /// Has all guests get their memory back.
    pub fn give_back(&mut self) {
        self.planner.ask_back();
        self.wish = Wish::Begun;
    }

    /// Waits until it is time for a look, or guests are to get all of their memory back. Returns whether `stop` became readable.
    fn wait_for_look(&mut self, stop: BorrowedFd<'_>, at: Duration) -> io::Result<bool> {
        let at = self.started + at;
        loop {
            if wait(stop, at.min(Instant::now() + REQUEST_EVERY))? {
                return Ok(true);
            }
            let is_asked = || self.request.as_ref().is_some_and(|request| request::is_there(request));
            if self.wish == Wish::None && is_asked() {
                self.give_back();
                return Ok(false);
            }
            if at <= Instant::now() {
                return Ok(false);
            }
        }
    }

    /// Tells the operator that guests got what they could get.
    fn answer_request(&mut self) {
        if self.wish == Wish::None || self.planner.gives_back() {
            return;
        }
        let Some(request) = &self.request else { return };
        if let Some(socket) = &self.socket {
            socket.show(&self.report());
        }
        let removed = request::remove(request);
        if let Err(error) = &removed
            && self.wish == Wish::Begun
        {
            tracing::warn!(
                "{} cannot be removed: {error}. Guests have been told; a daemon that is started while it is there tells them again",
                request.display()
            );
        }
        self.wish = if removed.is_ok() { Wish::None } else { Wish::Done };
    }

    fn moment(&self) -> Moment {
        let unix_s = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs());
        Moment { now: self.started.elapsed(), unix_s }
    }

    /// Returns what is known and planned now.
    #[must_use]
    pub fn report(&self) -> HostReport {
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
        let names: Vec<String> = vms.iter().map(|(vm, _)| vm.clone()).collect();
        if self.planner.has_guests() {
            self.find_monitors(&names);
        }
        // Guests first, as in `look_at`.
        self.look_at_guests(&names);
        let places: Vec<Place<'_>> = vms.iter().map(|(name, socket)| (name.as_str(), socket.as_path())).collect();
        let answers = self.processes.ask(&places, Some(self.planner.grid()));
        let heard = |((vm, _), answer): (&(String, PathBuf), _)| Heard {
            vm: vm.clone(),
            limits: self.surroundings.limits(vm),
            answer,
        };
        let all = vms.iter().zip(answers).map(heard).collect();
        let began = Instant::now();
        self.planner.hear_all(self.moment(), all);
        self.plan_us = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
    }

    /// Reads which monitor each VM has. One whose file has a mistake keeps that of before: its guest may need help.
    fn find_monitors(&mut self, names: &[String]) {
        let before = std::mem::take(&mut self.addresses);
        for name in names {
            let address = match (self.surroundings.monitor(name), before.get(name)) {
                (Ok(Some(address)), _) => Ok(address),
                (Ok(None), _) => Err("its file names no monitor ([memory] monitor)".into()),
                (Err(_), Some(Ok(address))) => Ok(address.clone()),
                (Err(why), _) => Err(why),
            };
            self.addresses.insert(name.clone(), address);
        }
        let known = self.addresses.iter().filter_map(|(name, address)| Some((name.clone(), address.clone().ok()?)));
        self.monitors.keep(&known.collect());
    }

    /// Asks the monitors of some guests.
    fn look_at_guests(&mut self, names: &[String]) {
        if !self.planner.has_guests() {
            return;
        }
        let mut said = self.monitors.read(|vm| names.iter().any(|name| name == vm));
        for name in names {
            let Some(Err(why)) = self.addresses.get(name) else { continue };
            said.insert(name.clone(), Err(Unusable::Advised(why.clone())));
        }
        // Before what they say now: that could look as if they had been told.
        for (vm, bytes, why) in self.monitors.failed() {
            let step = Step { vm, side: Side::Guest, bytes };
            self.planner.step_done(self.moment(), &step, Outcome::Unknown(why));
        }
        self.planner.hear_guests(self.moment(), said);
    }

    /// Asks some VMs for their status.
    fn look_at(&mut self, names: &[String]) {
        let vms = self.surroundings.vms();
        let asked = vms.iter().filter(|(name, _)| names.contains(name));
        let places: Vec<Place<'_>> = asked.map(|(name, socket)| (name.as_str(), socket.as_path())).collect();
        self.look_at_guests(names);
        // What the host sees of the guests must not be older than what they say.
        let answers = self.processes.ask(&places, None);
        for ((name, _), answer) in places.iter().zip(answers) {
            self.planner.hear(self.moment(), name, answer);
        }
        self.planner.looked_at_awaited(self.moment(), names);
    }

    /// Executes what the planner asks for, until it is time for a look. Returns whether the daemon is to stop.
    fn execute(&mut self, stop: BorrowedFd<'_>) -> io::Result<bool> {
        let mut is_due = false;
        while let Some(step) = self.next_step(is_due) {
            let outcome = match self.write_record() {
                Ok(()) => self.send(&step),
                Err(error) => Some(Outcome::NotSent(format!("the intent cannot be written: {error}"))),
            };
            if let Some(outcome) = outcome {
                self.planner.step_done(self.moment(), &step, outcome);
            }
            if wait(stop, Instant::now())? {
                self.hear_outcome();
                self.keep();
                return Ok(true);
            }
            // However many steps there are and however slow each is, a guest that is short of memory is seen in time.
            is_due = self.started.elapsed() >= self.planner.next_look().at();
        }
        Ok(false)
    }

    /// Returns the next command. Those that help guests wait neither for a look that `is_due` nor for a VM process.
    fn next_step(&mut self, is_due: bool) -> Option<Step> {
        let relief = self.planner.next_relief(self.moment());
        if relief.is_some() {
            return relief;
        }
        self.hear_outcome();
        if is_due || self.processes.is_told() { None } else { self.planner.next_step(self.moment()) }
    }

    /// Sends a command. Returns what came of it; `None` if it is for a VM process: [`Self::hear_outcome`] takes what came of that.
    fn send(&mut self, step: &Step) -> Option<Outcome> {
        if step.side == Side::Guest {
            return Some(match self.monitors.set_bytes(&step.vm, step.bytes) {
                Ok(()) => Outcome::Told,
                Err(why) => Outcome::Unknown(why),
            });
        }
        let vms = self.surroundings.vms();
        let Some((_, socket)) = vms.iter().find(|(name, _)| *name == step.vm) else {
            return Some(Outcome::NotSent("the VM is gone".into()));
        };
        self.processes.set(socket, step).err().map(Outcome::NotSent)
    }

    /// Takes the answer of the VM process that was told a size, if one was. Waits for it until it is time for a look.
    fn hear_outcome(&mut self) {
        let look_at = self.started + self.planner.next_look().at();
        if let Some((step, outcome)) = self.processes.outcome(look_at) {
            self.planner.step_done(self.moment(), &step, outcome);
        }
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
        let left = Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
        match poll(&mut [PollFd::new(&stop, PollFlags::IN)], Some(&left)) {
            Ok(count) => return Ok(count > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests;
