//! Asks VM processes over their control sockets. Each has its own deadline for all that a look asks, and a thread waits for it.
//!
//! 1. A look waits for processes that answered in time when they were last asked. One that was late is asked beside the looks whether it
//!    answers again, and counts as silent until it does. One of which only the curve was late tells its status in each look, and is asked
//!    for its curve beside them. What either says beside a look is not used: it could be older than a command.
//! 2. One process at a time is told a size. It is not asked anything until it has answered to that.

use crate::curve::Curve;
use crate::planner::{Outcome, Step};
use crate::reading::{Answer, Reading};
use crate::resource::Resource;
use crate::text::shortened;
use remoca_io::control::call_within;
use remoca_protocol::control::{Command, CurveGrid, Reply, Status};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Time that a VM process has to answer to all that a look asks.
const PATIENCE: Duration = Duration::from_secs(2);
/// Time that it has to change its size: its index may have to grow first.
const SET_PATIENCE: Duration = Duration::from_secs(5);
/// Time of that for which a look waits.
const LOOK_WAITS: Duration = Duration::from_secs(1);
/// Number of processes that are asked at the same time, and as many beside the looks.
const ASKED_AT_A_TIME_MAX: usize = 64;

/// A VM with its control socket.
pub type Place<'p> = (&'p str, &'p Path);

/// The VM processes of this host.
pub struct Processes {
    resource: Resource,
    patience: Duration,
    set_patience: Duration,
    /// Those that did not answer in time when they were last asked.
    late: BTreeMap<String, Late>,
    told: Option<Told>,
}

/// A process that was late.
struct Late {
    socket: PathBuf,
    /// Why it is silent, or has no curve.
    why: String,
    /// Where it is asked for its curve, if only that was late; `None` if it is silent.
    grid: Option<CurveGrid>,
    asked_at: Instant,
    /// Returns whether it answers in time. `None` while nobody asks.
    question: Option<JoinHandle<bool>>,
}

/// What a process did not answer in time.
struct Lateness {
    why: String,
    /// Where its curve was asked for; `None` if not even its status came.
    grid: Option<CurveGrid>,
}

/// A process that was told a size, and has not answered yet.
struct Told {
    step: Step,
    at: Instant,
    outcome: Receiver<Outcome>,
}

impl Processes {
    /// Returns processes that have not been asked yet.
    #[must_use]
    pub fn new(resource: Resource) -> Self {
        Self::with_patience(resource, PATIENCE, SET_PATIENCE)
    }

    /// Returns processes that have `patience` to answer what a look asks, and `set_patience` to answer a new size.
    pub(super) fn with_patience(resource: Resource, patience: Duration, set_patience: Duration) -> Self {
        Self { resource, patience, set_patience, late: BTreeMap::new(), told: None }
    }

    /// Asks processes, several at a time, for their status, and for their curve at the sizes of `grid`. Returns the answers in the same
    /// order.
    pub fn ask(&mut self, places: &[Place<'_>], grid: Option<CurveGrid>) -> Vec<Answer> {
        self.ask_late();
        let prompt: Vec<Place<'_>> = places.iter().filter(|(name, _)| self.silence(name).is_none()).copied().collect();
        let (resource, patience, late) = (self.resource, self.patience, &self.late);
        let curve_of = |name: &str| {
            // One that is late tells its status, or it would not be asked.
            let of_grid = |grid| late.get(name).map_or(Ok(grid), |late| Err(late.why.clone()));
            grid.map(of_grid)
        };
        let answers = all_of(&prompt, |place| ask(place, resource, curve_of(place.0), patience));
        let mut said: BTreeMap<&str, Answer> = BTreeMap::new();
        for ((name, socket), answer) in prompt.iter().zip(answers) {
            let Some((answer, lateness)) = answer else { continue };
            said.insert(*name, answer);
            if let Some(lateness) = lateness {
                self.note_late(name, socket, lateness);
            }
        }
        let silent = |name| match self.silence(name) {
            Some(why) => Answer::Silent(why.into()),
            None => Answer::Unasked("it could not be asked".into()),
        };
        places.iter().map(|(name, _)| said.remove(name).unwrap_or_else(|| silent(name))).collect()
    }

    /// Returns why a process is not waited for.
    fn silence(&self, name: &str) -> Option<&str> {
        if self.told.as_ref().is_some_and(|told| told.step.vm == name) {
            return Some("it has not answered yet to the size that it was told");
        }
        self.late.get(name).filter(|late| late.grid.is_none()).map(|late| late.why.as_str())
    }

    /// Notes that a process was late. If it is asked beside the looks for its curve already, that says as well whether it answers.
    fn note_late(&mut self, name: &str, socket: &Path, lateness: Lateness) {
        let Lateness { why, grid } = lateness;
        let late = self.late.entry(name.into()).or_insert_with(|| Late {
            socket: socket.into(),
            why: String::new(),
            grid: None,
            asked_at: Instant::now(),
            question: None,
        });
        (late.why, late.grid) = (why, grid);
    }

    /// Forgets those that are no longer late, and asks some of the others, beside the looks.
    fn ask_late(&mut self) {
        self.late.retain(|_, late| {
            let ended = late.question.take_if(|question| question.is_finished());
            !ended.is_some_and(|question| question.join().unwrap_or_default())
        });
        let asked = self.late.values().filter(|late| late.question.is_some()).count();
        let told = self.told.as_ref().map(|told| told.step.vm.as_str());
        let is_free = |name: &str, late: &Late| late.question.is_none() && told != Some(name);
        let free = self.late.iter_mut().filter(|(name, late)| is_free(name, late));
        let mut free: Vec<&mut Late> = free.map(|(_, late)| late).collect();
        free.sort_by_key(|late| late.asked_at);
        for late in free.into_iter().take(ASKED_AT_A_TIME_MAX.saturating_sub(asked)) {
            late.ask(self.patience);
        }
    }

    /// Tells a process its new size. [`Self::outcome`] says what came of it.
    ///
    /// # Errors
    /// Why it was not told.
    pub fn set(&mut self, socket: &Path, step: &Step) -> Result<(), String> {
        let (sender, outcome) = channel();
        let (socket, step, resource) = (socket.to_owned(), step.clone(), self.resource);
        let (name, bytes, patience) = (step.vm.clone(), step.bytes, self.set_patience);
        let tell = move || {
            // Nobody listens when the daemon ends.
            let _ = sender.send(set((&name, &socket), resource, bytes, patience));
        };
        let thread = thread::Builder::new().name("set".into()).spawn(tell);
        thread.map_err(|error| format!("its process cannot be told: {error}"))?;
        self.told = Some(Told { step, at: Instant::now(), outcome });
        Ok(())
    }

    /// Returns whether a process has not answered yet to what it was told.
    #[must_use]
    pub fn is_told(&self) -> bool {
        self.told.is_some()
    }

    /// Waits for the answer to what a process was told, until `until`, and [`LOOK_WAITS`] at least. Returns what came of it; `None` if no
    /// answer came in this time.
    pub fn outcome(&mut self, until: Instant) -> Option<(Step, Outcome)> {
        let told = self.told.as_ref()?;
        let left = until.max(told.at + LOOK_WAITS).saturating_duration_since(Instant::now());
        let outcome = match told.outcome.recv_timeout(left) {
            Ok(outcome) => outcome,
            Err(RecvTimeoutError::Timeout) => return None,
            Err(RecvTimeoutError::Disconnected) => Outcome::Unknown("telling it panicked".into()),
        };
        self.told.take().map(|told| (told.step, outcome))
    }
}

impl Late {
    /// Asks it whether it answers to what it was late with. If no thread can be started, it is asked at a later look.
    fn ask(&mut self, patience: Duration) {
        self.asked_at = Instant::now();
        let socket = self.socket.clone();
        let command = self.grid.map_or(Command::Status, curve_at);
        let question = move || !call(&socket, command, patience).is_err_and(|error| is_late(&error));
        self.question = thread::Builder::new().name("late".into()).spawn(question).ok();
    }
}

fn is_late(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::TimedOut
}

/// Returns whether this system lacks file descriptors or memory for a connection.
fn is_shortage(error: &io::Error) -> bool {
    let shortages = [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::NOBUFS];
    Errno::from_io_error(error).is_some_and(|errno| shortages.contains(&errno))
}

fn curve_at(grid: CurveGrid) -> Command {
    Command::Curve { disk: None, grid: Some(grid) }
}

/// Asks all processes, several at a time. Returns the answers in the same order; `None` for one that could not be asked.
fn all_of<T: Send + Sync>(places: &[Place<'_>], ask: impl Fn(Place<'_>) -> T + Sync) -> Vec<Option<T>> {
    let next = AtomicUsize::new(0);
    let answers: Vec<OnceLock<T>> = places.iter().map(|_| OnceLock::new()).collect();
    let work = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let (Some(place), Some(answer)) = (places.get(at), answers.get(at)) else { return };
            // Nobody else has this number.
            let _ = answer.set(ask(*place));
        }
    };
    thread::scope(|scope| {
        let threads = 0..places.len().min(ASKED_AT_A_TIME_MAX);
        let workers: Vec<_> = threads.map_while(|_| thread::Builder::new().spawn_scoped(scope, work).ok()).collect();
        // One that panicked leaves a place without an answer.
        workers.into_iter().for_each(|worker| drop(worker.join()));
    });
    answers.into_iter().map(OnceLock::into_inner).collect()
}

/// Sends a command to a process. Returns its reply, with the beginning of what it says of an error.
fn call(socket: &Path, command: Command, patience: Duration) -> io::Result<Reply> {
    match call_within(socket, command, patience) {
        Ok(Reply::Error { error }) => Ok(Reply::Error { error: shortened(error) }),
        reply => reply,
    }
}

/// Asks a process for its status, and for its `curve` if there are sizes for that; otherwise the curve is missing for the reason there.
/// Both have `patience` together. Returns its answer, and what of that was late.
fn ask(
    (name, socket): Place<'_>,
    resource: Resource,
    curve: Option<Result<CurveGrid, String>>,
    patience: Duration,
) -> (Answer, Option<Lateness>) {
    let give_up_at = Instant::now() + patience;
    let status = match call(socket, Command::Status, patience) {
        Ok(Reply::Status(status)) => status,
        Err(error) if is_late(&error) => {
            let why = error.to_string();
            return (Answer::Silent(why.clone()), Some(Lateness { why, grid: None }));
        }
        other => return (silence(other), None),
    };
    let mut lateness = None;
    let curve = curve.map(|grid| {
        let grid = resource.grid(&status, grid?);
        // A time of nothing cannot be set.
        let left = give_up_at.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        match call(socket, curve_at(grid), left) {
            Ok(Reply::Curve(curve)) => resource.says_enough(&status, &curve).and_then(|()| {
                let mut curve = Curve::new(&curve, grid)?;
                curve.saved_us = resource.saved_us(&status).or(curve.saved_us);
                Ok(curve)
            }),
            Ok(Reply::Error { error }) if error.starts_with("this is no command") => {
                Err(format!("its process is of an older version: `remoca upgrade {name}` brings it to this one"))
            }
            Ok(Reply::Error { error }) => Err(error),
            Ok(Reply::Status(_)) => Err("it answers with something else than a curve".into()),
            Err(error) if is_late(&error) => {
                let why =
                    format!("it does not tell its curve: it did not answer within {} seconds", patience.as_secs());
                lateness = Some(Lateness { why: why.clone(), grid: Some(grid) });
                Err(why)
            }
            Err(error) => Err(format!("it does not tell its curve: {error}")),
        }
    });
    (read(name, resource, &status, curve), lateness)
}

fn read(name: &str, resource: Resource, status: &Status, curve: Option<Result<Curve, String>>) -> Answer {
    match Reading::new(name, resource, status, curve) {
        Ok(mut reading) => {
            reading.fixed = reading.fixed.or_else(|| resource.first_server(status).and_then(nobody_at));
            Answer::Read(Box::new(reading))
        }
        Err(why) => Answer::Silent(why),
    }
}

/// Returns what it means that no server has a socket at `path`; `None` if one has, or the path is one of the process alone.
fn nobody_at(path: &str) -> Option<String> {
    let is_there = std::fs::metadata(path).is_ok_and(|found| found.file_type().is_socket());
    (Path::new(path).is_absolute() && !is_there).then(|| {
        format!(
            "no memory server listens at {path} (`remoca serve --listen unix:{path}`), where its local tier would be"
        )
    })
}

/// Returns what it means that no status came.
fn silence(answer: io::Result<Reply>) -> Answer {
    match answer {
        Ok(Reply::Error { error }) => Answer::Silent(error),
        Ok(Reply::Status(_) | Reply::Curve(_)) => {
            Answer::Silent("it answers with something else than its status".into())
        }
        Err(error) if matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound) => {
            Answer::Dead
        }
        Err(error) if is_shortage(&error) => Answer::Unasked(format!("it could not be asked: {error}")),
        Err(error) => Answer::Silent(error.to_string()),
    }
}

/// Gives the VM a size.
fn set((name, socket): Place<'_>, resource: Resource, bytes: u64, patience: Duration) -> Outcome {
    match call(socket, resource.command(bytes), patience) {
        Ok(Reply::Status(status)) => match read(name, resource, &status, None) {
            // It may have taken the size all the same.
            Answer::Silent(why) => Outcome::Unknown(why),
            answer => Outcome::Answered(answer),
        },
        Ok(Reply::Error { error }) => Outcome::Refused(error),
        Ok(Reply::Curve(_)) => Outcome::Unknown("it answers with something else than its status".into()),
        Err(error) if matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound) => {
            Outcome::NotSent("its process was killed".into())
        }
        Err(error) => Outcome::Unknown(error.to_string()),
    }
}

#[cfg(test)]
mod tests;
