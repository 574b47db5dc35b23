//! The monitors of all guests. Each call of one runs on a thread of its own, so one that hangs delays nobody else.
//!
//! 1. A look waits for monitors that answered in time when they were last asked, and for these [`PATIENCE`] at most. One that was late is
//!    asked beside the looks, and what it says counts while it is fresh.
//! 2. A monitor has one call at a time. Of sizes that a guest is to be told meanwhile the newest counts.
//! 3. No monitor is read while [`CALLS_MAX`] are called, and no late one while half as many are: each may be a program that runs. A size is
//!    told at once.

use super::address::Address;
use super::monitor::{GuestMemory, Monitor, Unusable};
use crate::text::shortened;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

/// Time for which a look waits for monitors, and within which an answer is in time.
const PATIENCE: Duration = Duration::from_secs(1);
/// Age at which a late answer says nothing about now: at least, and beyond the time from one look at all VMs to the next. Otherwise a slow
/// monitor would never be heard.
const FRESH_FOR: Duration = Duration::from_secs(12);
const FRESH_BEYOND: Duration = Duration::from_secs(2);
/// Number of calls at the same time with which another monitor is not read, and with which another late one is not.
const CALLS_MAX: usize = 64;
const LATE_CALLS_MAX: usize = CALLS_MAX / 2;

type Said = Result<GuestMemory, Unusable>;

/// Monitors by the name of the VM.
pub struct Monitors {
    all: BTreeMap<String, Known>,
    /// Number of the newest entry of `all`.
    newest: u64,
    patience: Duration,
    /// Age at which a late answer says nothing about now.
    fresh_for: Duration,
    /// Time that may still be waited until the next look.
    left: Duration,
    /// Number of calls that have not ended, also of monitors that are no longer there.
    calls: usize,
    sender: Sender<Ended>,
    ended: Receiver<Ended>,
    failed: Vec<(String, u64, String)>,
}

/// One monitor.
struct Known {
    number: u64,
    address: Address,
    /// `None` while a thread has it.
    monitor: Option<Box<dyn Monitor>>,
    /// The VM whose file names the same one.
    twin: Option<String>,
    /// Whether it was in time when it was last asked.
    is_prompt: bool,
    called_at: Option<Instant>,
    /// What it said last, and when.
    latest: Option<(Instant, Said)>,
    /// Whether a look has heard that.
    is_heard: bool,
    /// Size that its guest is to be told when it is free.
    next_bytes: Option<u64>,
}

/// A call that has ended.
struct Ended {
    vm: String,
    number: u64,
    monitor: Box<dyn Monitor>,
    was_prompt: bool,
    at: Instant,
    result: Answer,
}

enum Call {
    Read,
    Set(u64),
}

enum Answer {
    Read(Said),
    Set(u64, Result<(), String>),
}

impl Monitors {
    /// Returns no monitors yet. All are looked at each `interval`.
    #[must_use]
    pub fn new(interval: Duration) -> Self {
        Self::with_patience(PATIENCE, FRESH_FOR.max(interval.saturating_add(FRESH_BEYOND)))
    }

    fn with_patience(patience: Duration, fresh_for: Duration) -> Self {
        let (sender, ended) = channel();
        let (all, failed) = (BTreeMap::new(), Vec::new());
        Self { all, newest: 0, patience, fresh_for, left: patience, calls: 0, sender, ended, failed }
    }

    /// Keeps a monitor for each of these VMs. Those that are there stay as they are; others are dropped.
    pub fn keep(&mut self, wanted: &BTreeMap<String, Address>) {
        self.all.retain(|vm, known| wanted.get(vm) == Some(&known.address));
        for (vm, address) in wanted {
            if !self.all.contains_key(vm) {
                self.add(vm, address, address.monitor());
            }
        }
        for (vm, known) in &mut self.all {
            let twin = wanted.iter().find(|(other, address)| *other != vm && **address == known.address);
            known.twin = twin.map(|(other, _)| other.clone());
        }
    }

    fn add(&mut self, vm: &str, address: &Address, monitor: Box<dyn Monitor>) {
        self.newest += 1;
        let known = Known {
            number: self.newest,
            address: address.clone(),
            monitor: Some(monitor),
            twin: None,
            is_prompt: true,
            called_at: None,
            latest: None,
            is_heard: false,
            next_bytes: None,
        };
        self.all.insert(vm.into(), known);
    }

    /// Reads the memory of the guests for which `is_asked` holds.
    pub fn read(&mut self, is_asked: impl Fn(&str) -> bool) -> BTreeMap<String, Said> {
        self.left = self.patience;
        self.take_ended();
        let asked: Vec<String> = self.all.keys().filter(|vm| is_asked(vm)).cloned().collect();
        let began = Instant::now();
        // Each in its turn, if there is no room for all.
        let mut free: Vec<String> = asked.iter().filter(|vm| self.all[*vm].monitor.is_some()).cloned().collect();
        free.sort_by_key(|vm| self.all[vm].called_at);
        let (prompt, late): (Vec<String>, Vec<String>) = free.into_iter().partition(|vm| self.all[vm].is_prompt);
        self.read_prompt(&prompt);
        for vm in late {
            if self.calls < LATE_CALLS_MAX {
                self.begin(&vm, Call::Read);
            }
        }
        let fresh_for = self.fresh_for;
        asked.into_iter().filter_map(|vm| Some((vm.clone(), self.all.get_mut(&vm)?.hear(began, fresh_for)))).collect()
    }

    /// Reads monitors that are waited for, some at a time. Leaves out those for which there is no room or no time, because too many others
    /// are late: they are the first ones next time.
    fn read_prompt(&mut self, mut vms: &[String]) {
        let began = Instant::now();
        while !vms.is_empty() && self.calls < CALLS_MAX {
            let (batch, others) = vms.split_at(vms.len().min(CALLS_MAX - self.calls));
            let awaited = batch.iter().filter(|vm| self.begin(vm, Call::Read)).cloned().collect();
            self.wait(awaited, self.patience.saturating_sub(began.elapsed()));
            // Those of the first batch are asked, however late it has become.
            if began.elapsed() >= self.patience {
                break;
            }
            vms = others;
        }
    }

    /// Asks one guest to use this much memory. If its monitor does not answer in time, [`Self::failed`] tells later what became of it.
    ///
    /// # Errors
    /// As [`Monitor::set_bytes`].
    pub fn set_bytes(&mut self, vm: &str, bytes: u64) -> Result<(), String> {
        self.take_ended();
        let Some(known) = self.all.get_mut(vm) else { return Err("it has no monitor".into()) };
        if let Some(twin) = &known.twin {
            return Err(same_monitor(twin));
        }
        // What became of an older call with this size says nothing about this one.
        self.failed.retain(|(name, of, _)| name != vm || *of != bytes);
        known.next_bytes = Some(bytes);
        // What it said before is no sign that it was told.
        known.latest.take_if(|(_, said)| said.is_ok());
        if self.begin(vm, Call::Set(bytes)) {
            let began = Instant::now();
            self.wait([vm.to_owned()].into(), self.left);
            self.left = self.left.saturating_sub(began.elapsed());
        }
        // That of an older size is told by `failed`.
        let failed = self.failed.iter().position(|(name, of, _)| name == vm && *of == bytes);
        failed.map_or(Ok(()), |at| Err(self.failed.remove(at).2))
    }

    /// Returns the sizes that guests were not told since the last call, and why.
    pub fn failed(&mut self) -> Vec<(String, u64, String)> {
        self.take_ended();
        std::mem::take(&mut self.failed)
    }

    /// Begins a call, unless the monitor has one. Returns whether it is to be waited for.
    fn begin(&mut self, vm: &str, call: Call) -> bool {
        let Some(known) = self.all.get_mut(vm).filter(|known| known.twin.is_none()) else { return false };
        let Some(mut monitor) = known.monitor.take() else { return false };
        if matches!(call, Call::Set(_)) {
            known.next_bytes = None;
        }
        let (sender, patience) = (self.sender.clone(), self.patience);
        let (name, number) = (vm.to_owned(), known.number);
        let bytes = if let Call::Set(bytes) = call { Some(bytes) } else { None };
        // Its time runs while the thread has not begun, as that of the look does.
        let began = Instant::now();
        known.called_at = Some(began);
        let thread = thread::Builder::new().name("monitor".into()).spawn(move || {
            let result = match call {
                Call::Read => {
                    let panicked = |_| Err(Unusable::Silent("asking its monitor panicked".into()));
                    Answer::Read(catch_unwind(AssertUnwindSafe(|| monitor.read())).unwrap_or_else(panicked))
                }
                Call::Set(bytes) => {
                    let panicked = |_| Err("telling its monitor panicked".into());
                    let told = catch_unwind(AssertUnwindSafe(|| monitor.set_bytes(bytes))).unwrap_or_else(panicked);
                    Answer::Set(bytes, told)
                }
            };
            let at = Instant::now();
            let was_prompt = at.saturating_duration_since(began) < patience;
            // Nobody listens when the daemon ends.
            let _ = sender.send(Ended { vm: name, number, monitor, was_prompt, at, result });
        });
        if let Err(error) = thread {
            // The monitor went with the thread.
            known.monitor = Some(known.address.monitor());
            let why = format!("its monitor cannot be asked: {error}");
            match bytes {
                Some(bytes) => self.failed.push((vm.into(), bytes, why)),
                None => known.latest = Some((Instant::now(), Err(Unusable::Silent(why)))),
            }
            return false;
        }
        self.calls += 1;
        known.is_prompt
    }

    /// Waits for the calls of these monitors, for so long at most.
    fn wait(&mut self, mut awaited: BTreeSet<String>, time: Duration) {
        let deadline = Instant::now().checked_add(time);
        while !awaited.is_empty() {
            let left = deadline.map_or(time, |deadline| deadline.saturating_duration_since(Instant::now()));
            let Ok(ended) = self.ended.recv_timeout(left) else { break };
            if let Some(vm) = self.end(ended) {
                awaited.remove(&vm);
            }
        }
    }

    /// Takes what the calls returned that have ended meanwhile.
    fn take_ended(&mut self) {
        while let Ok(ended) = self.ended.try_recv() {
            self.end(ended);
        }
    }

    /// Takes what a call returned. Returns the VM whose monitor it was; `None` if another monitor has its place.
    fn end(&mut self, ended: Ended) -> Option<String> {
        let Ended { vm, number, monitor, was_prompt, at, result } = ended;
        self.calls -= 1;
        let known = self.all.get_mut(&vm).filter(|known| known.number == number)?;
        known.monitor = Some(monitor);
        known.is_prompt = was_prompt;
        match result {
            Answer::Read(said) if known.next_bytes.is_none() => {
                known.latest = Some((at, said.map_err(Unusable::shortened)));
                known.is_heard = false;
            }
            Answer::Set(bytes, Err(why)) if known.next_bytes.is_none() => {
                self.failed.push((vm.clone(), bytes, shortened(why)));
            }
            Answer::Read(_) | Answer::Set(..) => {}
        }
        if let Some(bytes) = known.next_bytes {
            self.begin(&vm, Call::Set(bytes));
        }
        Some(vm)
    }
}

impl Known {
    /// Returns what it says now, as [`Self::said`], and marks what an earlier look has heard: that is one answer, however often it counts.
    fn hear(&mut self, began: Instant, fresh_for: Duration) -> Said {
        let is_repeated = std::mem::replace(&mut self.is_heard, true);
        self.said(began, fresh_for).map(|memory| GuestMemory { is_repeated, ..memory })
    }

    /// Returns what it says now, in a look that `began` then.
    fn said(&self, began: Instant, fresh_for: Duration) -> Said {
        if let Some(twin) = &self.twin {
            return Err(Unusable::Advised(same_monitor(twin)));
        }
        match &self.latest {
            Some((at, said)) if said.is_err() || began.saturating_duration_since(*at) < fresh_for => said.clone(),
            _ if self.monitor.is_some() => Err(Unusable::Silent(format!(
                "the monitor {} is asked when it is its turn: too many answer late",
                self.address
            ))),
            _ => Err(Unusable::Silent(format!(
                "the monitor {} has not answered in time, and is still asked",
                self.address
            ))),
        }
    }
}

fn same_monitor(twin: &str) -> String {
    format!("the file of {twin} names the same monitor ([memory] monitor): each guest has one of its own")
}

#[cfg(test)]
mod tests;
