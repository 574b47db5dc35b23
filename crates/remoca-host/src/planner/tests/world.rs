//! The world: VM processes that change their sizes when told to, each in its way, and a daemon that passes answers and commands along.

use super::balloon::Guest;
use crate::curve::Curve;
use crate::limits::Limits;
use crate::plan::Policy;
use crate::planner::{Heard, Look, Moment, Outcome, Planner, Record, Settings, Side, Step};
use crate::reading::{Answer, Reading};
use crate::resource::Resource;
use crate::testing::{GRID, curve_status};
use remoca_protocol::control::CurveGrid;
use std::collections::BTreeMap;
use std::time::Duration;

pub const UNIT: u64 = 2 << 20;
/// Total of all worlds, in units.
pub const TOTAL: u64 = 200;
/// Time within which a VM process that runs executes a command.
const COMMAND_LASTS: Duration = Duration::from_secs(30);

/// Shape of a miss-ratio curve.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Shape {
    /// Misses everything below a size, and the rest of it little.
    Cliff(u32),
    /// Falls ever more slowly; halves with each of these units.
    Smooth(u32),
    Flat(u32),
}

impl Shape {
    pub fn ratio(self, units: u32) -> f64 {
        match self {
            Self::Cliff(at) => {
                if units < at {
                    1.
                } else {
                    0.05
                }
            }
            Self::Smooth(half) => 0.5_f64.powf(f64::from(units) / f64::from(half)),
            Self::Flat(percent) => f64::from(percent) / 100.,
        }
    }

    /// Returns the curve of a VM with a local tier of so many units in front.
    pub fn curve(self, first: u32) -> Curve {
        let grid = CurveGrid { first_bytes: u64::from(first) * UNIT, step_bytes: UNIT, count: 201 };
        let mut status = curve_status(|units| self.ratio(units + first));
        status.points.iter_mut().for_each(|point| point.bytes += grid.first_bytes);
        if first > 0 {
            status.points[0].miss_ratio = self.ratio(first);
        }
        Curve::new(&status, grid).unwrap()
    }

    /// Returns the curve of the cache of a VM whose guest has so many units.
    pub fn curve_with_guest(self, guest: u64) -> Curve {
        let guest = u32::try_from(guest).unwrap();
        let mut status = curve_status(|units| self.ratio(units + guest));
        status.points[0].miss_ratio = self.ratio(guest);
        Curve::new(&status, GRID).unwrap()
    }
}

/// How a VM process behaves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Nature {
    Honest,
    /// Its curve is now one, now the other, for so many looks each: it floods false evictions, or lends and borrows.
    Alternates(Shape, u32),
    /// It says that it has so many units more than it has, and does nothing that it is told.
    Claims(u64),
    /// Its curve says too little.
    Blind,
    /// Its guest reads nothing.
    Idle,
    /// It says that it does what it is told, and does not give anything back.
    Ignores,
    /// It refuses every change.
    Refuses,
    /// It hangs from this look on, and executes commands when it wakes up after so many looks.
    Hangs(u32, u32),
    /// It answers, but executes commands only from this look on, and says nothing to them.
    Late(u32),
    /// It is killed at this look.
    Dies(u32),
    /// Another program takes its place at each look from this one on.
    Upgrades(u32),
}

#[derive(Clone, Debug)]
pub struct Process {
    pub shape: Shape,
    pub nature: Nature,
    pub limits: Limits,
    /// Units of another tier in front of what is divided.
    pub first: u32,
    /// In units.
    pub wanted: u64,
    pub granted: u64,
    /// Commands that it has not executed yet.
    queue: Vec<u64>,
    blocks_read: u64,
}

impl Process {
    pub fn new(shape: Shape, nature: Nature, units: u64) -> Self {
        let limits = Limits::default();
        Self { shape, nature, limits, first: 0, wanted: units, granted: units, queue: Vec::new(), blocks_read: 0 }
    }

    /// Returns the units that it really has.
    pub fn holds(&self) -> u64 {
        self.wanted.max(self.granted)
    }

    fn execute_queue(&mut self) {
        self.wanted = self.queue.drain(..).next_back().unwrap_or(self.wanted);
    }
}

pub struct World {
    pub processes: BTreeMap<String, Process>,
    pub planner: Planner,
    pub settings: Settings,
    pub at: Moment,
    pub looks: u32,
    /// Every step, with its time.
    pub steps: Vec<(Duration, Step)>,
    /// Time that a server takes to grant a size, in looks at awaited VMs.
    pub delay: u32,
    waited: u32,
    /// Guests whose monitors are asked, by VM.
    pub guests: BTreeMap<String, Guest>,
    /// Numbers of steps at which the daemon is killed: before the command is sent, or before its answer is heard. Then the pause.
    pub kills: BTreeMap<usize, (bool, Duration)>,
    /// Whether the record cannot be written.
    pub is_full: bool,
    /// VM whose file has a mistake.
    pub misread: Option<String>,
}

pub fn honest(shape: Shape, units: u64) -> Process {
    Process::new(shape, Nature::Honest, units)
}

/// Returns the sizes that the VMs were told, in units.
pub fn sizes(world: &World) -> Vec<u64> {
    world.processes.values().map(|process| process.wanted).collect()
}

pub fn settings() -> Settings {
    Settings {
        resource: Resource::Cache,
        total_bytes: TOTAL * UNIT,
        policy: Policy::Optimal,
        applies: true,
        interval: Duration::from_secs(10),
        window: Duration::from_secs(60),
        readings_min: 2,
        guests: None,
    }
}

impl World {
    pub fn new(processes: Vec<Process>) -> Self {
        Self::with(settings(), processes)
    }

    pub fn with(settings: Settings, processes: Vec<Process>) -> Self {
        let named = processes.into_iter().enumerate().map(|(number, process)| (format!("vm{number}"), process));
        Self {
            processes: named.collect(),
            planner: Planner::new(settings, Record::default()),
            settings,
            at: Moment { now: Duration::ZERO, unix_s: 1_000_000 },
            looks: 0,
            steps: Vec::new(),
            delay: 1,
            waited: 0,
            guests: BTreeMap::new(),
            kills: BTreeMap::new(),
            is_full: false,
            misread: None,
        }
    }

    /// Returns the sum of what all processes really have.
    pub fn held(&self) -> u64 {
        // The memory server keeps the pages of a dead one for a minute.
        let is_kept = |process: &&Process| !matches!(process.nature, Nature::Dies(at) if self.looks >= at + 6);
        self.processes.values().filter(is_kept).map(Process::holds).sum()
    }

    pub fn process(&mut self, name: &str) -> &mut Process {
        self.processes.get_mut(name).unwrap()
    }

    /// Runs for so many looks at all VMs, and calls `check` after everything that happens.
    pub fn run(&mut self, looks: u32, mut check: impl FnMut(&Self)) {
        let end = self.looks + looks;
        while self.looks < end {
            match self.planner.next_look() {
                Look::All(at) => {
                    self.pass_until(at);
                    self.looks += 1;
                    self.wake_up();
                    self.grant();
                    self.move_guests();
                    check(self);
                    self.hear_guests(None);
                    let all = self.heard();
                    let active = self.processes.values_mut().filter(|process| process.nature != Nature::Idle);
                    active.for_each(|process| process.blocks_read += 100_000);
                    self.planner.hear_all(self.at, all);
                }
                Look::Awaited(at, names) => {
                    self.pass_until(at);
                    self.waited += 1;
                    if self.waited.is_multiple_of(self.delay) {
                        self.grant();
                        check(self);
                    }
                    self.move_guests();
                    self.hear_guests(Some(&names));
                    for name in names.iter().filter(|name| self.processes.contains_key(*name)) {
                        let answer = self.answer(name, false);
                        self.planner.hear(self.at, name, answer);
                    }
                    self.planner.looked_at_awaited(self.at, &names);
                }
            }
            while let Some(step) = self.planner.next_step(self.at) {
                let record = self.planner.record();
                assert!(record.intent.is_some() || !record.reliefs.is_empty(), "a step without an intent on record");
                self.check_step(&step);
                let killed = self.kills.remove(&self.steps.len());
                if let Some((true, pause)) = killed {
                    self.replace_daemon(pause);
                    continue;
                }
                let outcome = self.execute(&step);
                self.steps.push((self.at.now, step.clone()));
                check(self);
                if let Some((false, pause)) = killed {
                    self.replace_daemon(pause);
                    continue;
                }
                self.planner.step_done(self.at, &step, outcome);
            }
        }
    }

    /// Hears all that guests and processes say at the time of the next look, and carries out nothing.
    pub fn hear_next(&mut self) {
        self.at.now = self.planner.next_look().at();
        self.hear_guests(None);
        let all = self.heard();
        self.planner.hear_all(self.at, all);
    }

    /// Returns what all processes answer.
    pub fn heard(&self) -> Vec<Heard> {
        let heard = |(name, process): (&String, &Process)| Heard {
            vm: name.clone(),
            limits: match self.misread.as_ref() == Some(name) {
                true => Err("its file has a mistake".into()),
                false => Ok(process.limits),
            },
            answer: self.answer(name, true),
        };
        self.processes.iter().map(heard).collect()
    }

    /// Lets the daemon die, and another one take its place.
    pub fn replace_daemon(&mut self, pause: Duration) {
        let record = self.planner.record();
        self.at.unix_s += pause.as_secs();
        if pause >= COMMAND_LASTS {
            let late = self.processes.values_mut().filter(|process| matches!(process.nature, Nature::Late(_)));
            late.for_each(Process::execute_queue);
        }
        self.planner = Planner::new(self.settings, record);
        self.at.now = Duration::ZERO;
    }

    fn pass_until(&mut self, at: Duration) {
        let passed = at.saturating_sub(self.at.now);
        self.at.now += passed;
        self.at.unix_s += passed.as_secs();
    }

    fn grant(&mut self) {
        for process in self.processes.values_mut() {
            if process.nature != Nature::Ignores || process.wanted > process.granted {
                process.granted = process.wanted;
            }
        }
    }

    fn is_late(&self, process: &Process) -> bool {
        matches!(process.nature, Nature::Late(until) if self.looks < until)
    }

    fn hangs(&self, process: &Process) -> bool {
        matches!(process.nature, Nature::Hangs(from, count) if (from..from + count).contains(&self.looks))
    }

    fn wake_up(&mut self) {
        let names: Vec<_> = self.processes.keys().cloned().collect();
        for name in names {
            let process = &self.processes[&name];
            if !self.hangs(process) && !self.is_late(process) {
                self.process(&name).execute_queue();
            }
        }
    }

    fn answer(&self, name: &str, with_curve: bool) -> Answer {
        let process = &self.processes[name];
        let shape = match process.nature {
            Nature::Alternates(other, looks) if self.looks / looks % 2 == 1 => other,
            Nature::Dies(at) if self.looks >= at => return Answer::Dead,
            _ if self.hangs(process) => return Answer::Silent("it did not answer within 2 seconds".into()),
            _ => process.shape,
        };
        let (wanted, granted) = match process.nature {
            Nature::Claims(units) => (process.wanted + units, process.granted + units),
            _ => (process.wanted, process.granted),
        };
        let guest = self.guests.get(name);
        Answer::Read(Box::new(Reading {
            process: (1, if let Nature::Upgrades(from) = process.nature { self.looks.saturating_sub(from) } else { 0 }),
            wanted: wanted * UNIT,
            granted: granted * UNIT,
            fixed: None,
            is_left_alone: false,
            blocks_read: process.blocks_read,
            answered: (0, 0),
            guest_resident: guest.and_then(Guest::seen),
            guest_waits: guest.and_then(|guest| guest.waits),
            curve: with_curve.then(|| match (process.nature, guest) {
                (Nature::Blind, _) => Err("its curve is made of 7 blocks read, which is too few".into()),
                (_, Some(guest)) => Ok(shape.curve_with_guest(guest.actual / UNIT)),
                (_, None) => Ok(shape.curve(process.first)),
            }),
        }))
    }

    fn execute(&mut self, step: &Step) -> Outcome {
        if self.is_full {
            return Outcome::NotSent("the intent cannot be written: no space left on device".into());
        }
        if step.side == Side::Guest {
            return self.guests.get_mut(&step.vm).map_or(Outcome::Unknown("no".into()), |guest| guest.told(step.bytes));
        }
        assert!(step.bytes.is_multiple_of(UNIT) && step.bytes > 0);
        if !self.processes.contains_key(&step.vm) {
            return Outcome::NotSent("the VM is gone".into());
        }
        let process = &self.processes[&step.vm];
        let (hangs, looks) = (self.hangs(process) || self.is_late(process), self.looks);
        let process = self.process(&step.vm);
        match process.nature {
            Nature::Refuses => return Outcome::Refused("no".into()),
            Nature::Claims(_) => {}
            Nature::Dies(at) if looks >= at => return Outcome::NotSent("its process was killed".into()),
            _ if hangs => {
                process.queue.push(step.bytes / UNIT);
                return Outcome::Unknown("it did not answer within 5 seconds".into());
            }
            _ => process.wanted = step.bytes / UNIT,
        }
        Outcome::Answered(self.answer(&step.vm, false))
    }
}
