//! One look at all VMs of a host, with a number. Pure: [`Taker`] gets answers and the time, and returns the snapshot.

use crate::curve::Prospect;
use crate::diagnosis::{self, Problem};
use crate::figures::Figures;
use crate::history::{self, History};
use crate::lately::{Lately, Past};
use crate::shown::Shown;
use crate::vm::{Heard, Silence, Vm};
use remoca_protocol::control::{CurveStatus, LineError, Status};
use remoca_protocol::host::HostReport;
use remoca_protocol::peer::NAME_BYTES_MAX;
use remoca_protocol::shown;
use serde::de::Error;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// One look at all VMs of a host.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Snapshot {
    /// Number of the snapshot, which rises by one.
    pub snapshot: u64,
    /// Time at which it was taken, in seconds since 1970.
    pub taken_s: f64,
    /// Name of the host.
    pub host: String,
    /// Version of the program that took it.
    pub version: String,
    /// What is wrong, the worst first.
    pub problems: Vec<Problem>,
    /// All VMs, by name.
    pub vms: Vec<Vm>,
    /// Report of the daemon that divides memory of the host among its VMs, if it runs and answers.
    #[serde(default)]
    pub host_report: Option<HostReport>,
}

/// What one process answered.
#[derive(Debug)]
pub struct Answer {
    pub socket: PathBuf,
    pub status: Result<Status, Silence>,
    /// Its curve, if it was asked for it now.
    pub curve: Option<CurveStatus>,
}

/// Makes snapshots from answers, one after the other.
#[derive(Default)]
pub struct Taker {
    taken: u64,
    host: String,
    pasts: BTreeMap<PathBuf, Known>,
    /// When each process was asked for its curve last, whether or not it answered.
    curves_asked: BTreeMap<PathBuf, Instant>,
}

/// What is known of a VM from before.
#[derive(Default)]
struct Known {
    name: Option<String>,
    past: Past,
    history: History,
    curve: Option<KnownCurve>,
}

struct KnownCurve {
    curve: Arc<CurveStatus>,
    prospect: Option<Prospect>,
}

impl Taker {
    /// Returns a taker for the host with this name.
    #[must_use]
    pub fn new(host: String) -> Self {
        Self { host, ..Self::default() }
    }

    /// Returns whether there was a snapshot.
    #[must_use]
    pub fn has_taken(&self) -> bool {
        self.taken > 0
    }

    /// Returns those of `sockets` that are to be asked for their curve `now`: at most `count` of them, which were asked longest ago, and
    /// `age` before that or earlier. One that hangs or has no curve has its turn as all others.
    pub fn curves_to_ask(&mut self, sockets: &[PathBuf], now: Instant, age: Duration, count: usize) -> Vec<PathBuf> {
        self.curves_asked.retain(|socket, _| sockets.contains(socket));
        let asked = |socket: &PathBuf| self.curves_asked.get(socket).copied();
        let is_old = |socket: &&PathBuf| asked(socket).is_none_or(|at| now.saturating_duration_since(at) >= age);
        let mut old: Vec<_> = sockets.iter().filter(is_old).cloned().collect();
        old.sort_by_key(|socket| asked(socket));
        old.truncate(count);
        self.curves_asked.extend(old.iter().map(|socket| (socket.clone(), now)));
        old
    }

    /// Returns the next snapshot, which has these answers and was taken at `now_s`, with what was heard of the host's daemon. What is known of
    /// a VM that is not among them is forgotten.
    pub fn next(&mut self, answers: Vec<Answer>, now_s: f64, heard: Option<Heard>) -> Snapshot {
        self.taken += 1;
        let mut before = std::mem::take(&mut self.pasts);
        let mut vms: Vec<Vm> = Vec::new();
        for answer in answers {
            let mut known = before.remove(&answer.socket).unwrap_or_default();
            let socket = answer.socket.clone();
            vms.push(known.look(answer, self.taken, now_s));
            self.pasts.insert(socket, known);
        }
        vms.sort_by(|one, other| (&one.name, &one.socket).cmp(&(&other.name, &other.socket)));
        tell_apart(&mut vms);
        Snapshot {
            snapshot: self.taken,
            taken_s: now_s,
            host: self.host.clone(),
            version: env!("CARGO_PKG_VERSION").into(),
            problems: diagnosis::of_host(&vms, heard.as_ref(), now_s),
            vms,
            host_report: heard.and_then(Result::ok),
        }
    }
}

/// Gives VMs of one name, which processes of several users may have, names that differ. One whose socket alone is called so keeps it:
/// another process says what it likes.
fn tell_apart(vms: &mut [Vm]) {
    let is_called_so = |vm: &Vm| vm.socket.file_stem().is_some_and(|stem| stem == vm.name.as_str());
    let names: Vec<(String, bool)> = vms.iter().map(|vm| (vm.name.clone(), is_called_so(vm))).collect();
    for (vm, (name, is_called_so)) in vms.iter_mut().zip(&names) {
        let namesakes = || names.iter().filter(|(other, _)| other == name);
        let is_alone_called_so = *is_called_so && namesakes().filter(|(_, is_called_so)| *is_called_so).count() == 1;
        if namesakes().count() > 1 && !is_alone_called_so {
            vm.name = format!("{name}{}", vm.distinction());
        }
    }
}

impl Known {
    /// Returns what is shown of a VM that answered so.
    fn look(&mut self, answer: Answer, snapshot: u64, now_s: f64) -> Vm {
        if let Some(curve) = answer.curve {
            let prospect = Prospect::of(&curve, now_s);
            self.curve = Some(KnownCurve { curve: Arc::new(curve), prospect });
        }
        let stem = || answer.socket.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let (status, silence, lately) = match answer.status {
            Ok(status) => {
                let (lately, before) = self.past.add(&status);
                self.name = Some(status.name.clone());
                let figures = Figures::of(&status, None);
                let recent = before.map(|before| Figures::of(&status, Some(&before)));
                if let Some(recent) = &recent {
                    history::add(&mut self.history, recent, now_s);
                }
                (Some(Shown { snapshot, status, figures, recent }), None, lately)
            }
            Err(silence) => (None, Some(silence), Lately::default()),
        };
        Vm {
            name: self.name.clone().unwrap_or_else(stem),
            status,
            silence,
            lately,
            prospect: self.curve.as_ref().and_then(|known| known.prospect.clone()),
            curve: self.curve.as_ref().map(|known| Arc::clone(&known.curve)),
            history: Arc::clone(&self.history),
            socket: answer.socket,
        }
    }
}

impl Snapshot {
    /// Returns a snapshot from the JSON that [`Self::json`] makes. Its texts may be shown on a terminal.
    ///
    /// # Errors
    /// If the text is something else, or says a name that no VM has.
    pub fn parse(json: &[u8]) -> serde_json::Result<Self> {
        let mut snapshot: Self = shown::from_json(json)?;
        let names = snapshot.statuses().map(|shown| &shown.status.name);
        if let Some(long) = names.map(String::len).find(|length| *length > NAME_BYTES_MAX) {
            return Err(serde_json::Error::custom(LineError::LongName(long)));
        }
        for vm in &mut snapshot.vms {
            vm.status = vm.status.take().map(Shown::completed);
        }
        Ok(snapshot)
    }

    /// Returns the snapshot as JSON.
    #[must_use]
    pub fn json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Returns the VMs that answered, as `remoca status -o json` shows them.
    pub fn statuses(&self) -> impl Iterator<Item = &Shown> {
        self.vms.iter().filter_map(|vm| vm.status.as_ref())
    }

    /// Returns the figures of all VMs that answer, together, or `None` without one.
    #[must_use]
    pub fn total(&self) -> Option<Figures> {
        let all: Vec<_> = self.statuses().map(|shown| shown.newest().clone()).collect();
        Figures::total(&all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{full_snapshot, full_status, snapshot};
    use remoca_protocol::control::Reply;

    fn answer(socket: &str, status: Result<Status, Silence>) -> Answer {
        Answer { socket: socket.into(), status, curve: None }
    }

    #[test]
    fn numbers_rise_by_one_and_rates_are_of_two_snapshots() {
        let mut taker = Taker::default();
        let first = taker.next(vec![answer("/a.ctl", Ok(full_status(1, 10)))], 0.0, None);
        let second = taker.next(vec![answer("/a.ctl", Ok(full_status(1, 11)))], 5.0, None);
        assert_eq!((first.snapshot, second.snapshot), (1, 2));
        let (shown, before) =
            (second.vms[0].status.as_ref().expect("it answers"), first.vms[0].status.as_ref().expect("it answers"));
        assert!(before.recent.is_none() && shown.snapshot == 2);
        let recent = shown.recent.as_ref().expect("two of them");
        assert_eq!((recent.seconds, recent.reads), (5.0, shown.figures.reads - before.figures.reads));
        assert_eq!((first.vms[0].history.len(), second.vms[0].history.len()), (0, 1));
    }

    #[test]
    fn a_vm_that_is_silent_keeps_its_name_and_what_was_before() {
        let mut taker = Taker::default();
        taker.next(vec![answer("/odd-name.ctl", Ok(full_status(1, 10)))], 0.0, None);
        let silent = taker.next(vec![answer("/odd-name.ctl", Err(Silence::Hangs("it hangs".into())))], 5.0, None);
        assert!(silent.vms[0].name == "web001" && silent.vms[0].newest().is_none());
        let back = taker.next(vec![answer("/odd-name.ctl", Ok(full_status(1, 12)))], 10.0, None);
        let recent = back.vms[0].newest().expect("it answers");
        assert_eq!(recent.seconds, 10.0, "since it answered last");
        let gone = taker.next(Vec::new(), 15.0, None);
        assert!(gone.vms.is_empty() && gone.problems.is_empty());
    }

    #[test]
    fn a_process_that_says_anothers_name_takes_nothing_from_it() {
        let names = |sockets: &[&str]| {
            let answers = sockets.iter().map(|socket| answer(socket, Ok(full_status(1, 10)))).collect();
            Taker::default().next(answers, 0.0, None).vms.into_iter().map(|vm| vm.name).collect::<Vec<_>>()
        };
        assert_eq!(names(&["/a/other.ctl", "/a/web001.ctl"]), ["web001 (/a/other.ctl)", "web001"]);
        // Those of two users.
        assert_eq!(names(&["/a/web001.ctl", "/b/web001.ctl"]), ["web001 (/a/web001.ctl)", "web001 (/b/web001.ctl)"]);
        assert_eq!(names(&["/a/odd.ctl", "/b/odder.ctl"]), ["web001 (/a/odd.ctl)", "web001 (/b/odder.ctl)"]);
    }

    #[test]
    fn a_name_that_no_vm_has_is_not_believed() {
        let parsed = |length| {
            let status = Status { name: "n".repeat(length), ..full_status(1, 10) };
            let line = Reply::Status(Box::new(status)).line().expect("a status is a line");
            Reply::parse(&line).map_err(|error| error.to_string())
        };
        assert!(parsed(256).is_ok());
        let error = parsed(70_000).expect_err("no name is that long");
        assert_eq!(error, "it says a name of 70000 bytes, which no VM has: names are used in file names");
    }

    /// Anybody may listen where a page is looked for.
    #[test]
    fn a_snapshot_of_a_stranger_neither_commands_the_terminal_nor_has_names_that_no_vm_has() {
        let parsed = |name: &str| {
            let mut snapshot = full_snapshot(1);
            snapshot.vms[0].status.as_mut().expect("it answers").status.name = name.into();
            snapshot.problems = diagnosis::of_all(&snapshot.vms);
            snapshot.host = name.into();
            Snapshot::parse(snapshot.json().as_bytes()).map_err(|error| error.to_string())
        };
        let read = parsed("a\u{1b}[2J\u{9b}").expect("a snapshot");
        assert_eq!((read.host.as_str(), read.json().contains("\\u001b")), ("a\u{fffd}[2J\u{fffd}", false));
        assert_eq!(read.vms[0].newest().map(|figures| figures.name.as_str()), Some(read.host.as_str()));
        assert!(parsed(&"n".repeat(256)).is_ok());
        let error = parsed(&"n".repeat(70_000)).expect_err("no name is that long");
        assert!(error.starts_with("it says a name of 70000 bytes"), "{error}");
    }

    #[test]
    fn a_clock_that_is_set_back_hides_nothing_of_the_last_minutes() {
        let mut taker = Taker::default();
        let mut take = |uptime_s: f64, now_s: f64| {
            let status = Status { uptime_s, ..full_status(1, 10) };
            taker.next(vec![answer("/a.ctl", Ok(status))], now_s, None).vms.remove(0).lately
        };
        for step in 0..=30 {
            assert!(take(100.0 + f64::from(step) * 20.0, 5000.0 - f64::from(step)).is_since_start == (step < 30));
        }
    }

    #[test]
    fn curves_are_read_in_turn() {
        let sockets: Vec<PathBuf> = ["/a", "/b", "/c"].map(PathBuf::from).to_vec();
        let mut taker = Taker::default();
        let (began, minute) = (Instant::now(), Duration::from_secs(60));
        let at = |seconds| began + Duration::from_secs(seconds);
        let mut ask = |seconds, count: usize| taker.curves_to_ask(&sockets, at(seconds), minute, count);
        assert_eq!(ask(0, 2), sockets[..2]);
        assert_eq!(ask(5, 2), sockets[2..], "the others were asked, though none has answered");
        assert!(ask(59, 3).is_empty());
        assert_eq!(ask(60, 1), sockets[..1]);
        assert_eq!(ask(65, 1), sockets[1..2]);
        assert_eq!(ask(70, 3), sockets[2..]);
        assert!(taker.curves_to_ask(&sockets[1..], at(75), minute, 3).is_empty());
        assert_eq!(taker.curves_to_ask(&sockets, at(80), minute, 3), sockets[..1], "it went, and has come again");
    }

    #[test]
    fn vms_of_one_name_are_told_apart() {
        let names: Vec<_> = snapshot(vec![Ok(full_status(1, 1)), Ok(full_status(1, 1)), Ok(full_status(2, 1))])
            .vms
            .into_iter()
            .map(|vm| vm.name)
            .collect();
        assert_eq!(names, ["web001 (/s/0.ctl)", "web001 (/s/1.ctl)", "web002"]);
    }
}
