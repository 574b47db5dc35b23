//! What is wrong, the worst first, and what to do. Pure: from a snapshot alone.
//!
//! Each rule looks at one VM. Rules stand in the order in which their problems are shown: what harms a guest, then causes before the
//! symptoms that follow from them, then what is worth knowing.

mod balloon;
mod daemon;
mod disk;
mod found;
mod guest;
mod server;

pub use disk::{WAITS, is_unreachable, why_unreachable};
pub use guest::{agent, attached, memory, needs_memory};
pub use server::{MORE_CLIENTS, has_too_many_clients};

use crate::figures::Figures;
use crate::finding::Finding;
use crate::lately::Lately;
use crate::shown::Shown;
use crate::text::{count_of, one_line};
use crate::vm::{Heard, Silence, Vm};
use Finds::{Each, One};
use found::Found;
use remoca_protocol::control::Status;
use remoca_protocol::shown::clean;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Something that is wrong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// Name of the cause, the same in all versions.
    pub cause: String,
    /// Names of the VMs that have it, in order. Several have it if one memory server is the cause, or if the same is found of each and
    /// NAME stands for their names. None has it if it is the host's.
    pub vms: Vec<String>,
    #[serde(flatten)]
    pub finding: Finding,
    /// What the problem is that of, if several VMs may have one problem.
    #[serde(skip)]
    shared: Option<String>,
}

/// A rule: the name of its cause, and what finds it in a VM that answers.
type Rule = (&'static str, Finds);

enum Finds {
    /// One thing at most.
    One(fn(&Vm, &Shown) -> Option<Found>),
    /// One for each of several memory servers.
    Each(fn(&Shown) -> Vec<Found>),
}

/// All rules, in the order in which their problems are shown.
const RULES: [Rule; 28] = [
    ("failed-flush", One(disk::failed_flush)),
    ("disk-unreachable", One(disk::unreachable)),
    ("image-shrunk", One(disk::shrunk)),
    ("memory-not-shared", One(|_, shown| guest::memory(&shown.status).and_then(Found::from_finding))),
    ("foreign-writer", One(disk::foreign_writer)),
    ("disk-errors", One(disk::errors)),
    ("lying-server", One(server::lies)),
    ("slow-disk", One(disk::slow)),
    ("slow-server", One(server::slow)),
    ("server-unreachable", Each(server::unreachable)),
    ("server-away", One(server::away)),
    ("full-server", One(server::full)),
    ("server-lost-pages", One(server::lost_pages)),
    ("agent-gone", One(|_, shown| guest::agent(&shown.status).and_then(Found::from_finding))),
    ("agent-loses-pages", One(guest::lost_pages)),
    ("disk-not-attached", One(|_, shown| Found::from_finding(guest::attached(&shown.status)))),
    ("disks-elsewhere", One(guest::migrated)),
    ("unknown-content", One(guest::unknown_content)),
    ("misaligned", One(guest::misaligned)),
    ("guest-too-large", One(guest::too_large)),
    ("configuration", One(|_, shown| configuration(&shown.status))),
    ("state-lost", One(|_, shown| state_lost(&shown.status))),
    ("old-version", One(|_, shown| Found::from_finding(process(&shown.status)))),
    ("size-not-seen", One(disk::size_not_seen)),
    ("spare-server-unreachable", Each(server::spare)),
    ("no-server", One(server::none)),
    ("fast-disk", One(server::is_no_faster)),
    ("trace-lost", One(|_, shown| trace(&shown.status))),
];

/// Causes of problems for which the host's daemon is there and does not work.
pub const DAEMON_HANGS: [&str; 2] = ["host-silent", "host-hangs"];

/// Returns all problems of these VMs, the worst first.
#[must_use]
pub fn of_all(vms: &[Vm]) -> Vec<Problem> {
    let mut ranked: Vec<(usize, Problem, Finding)> = Vec::new();
    for vm in vms {
        for (rank, problem) in of_vm(vm) {
            let general = without_name(&problem.finding, vm.plain_name());
            let is_same = |other: &Problem, of_other: &Finding| {
                let has_one_server = other.shared.is_some() && other.shared == problem.shared;
                other.cause == problem.cause && (has_one_server || *of_other == general)
            };
            match ranked.iter_mut().find(|(_, other, of_other)| is_same(other, of_other)) {
                Some((_, other, of_other)) => {
                    other.vms.extend(problem.vms);
                    if other.shared.is_none() {
                        other.finding.clone_from(of_other);
                    }
                }
                None => ranked.push((rank, problem, general)),
            }
        }
    }
    // Of two problems with one cause that which more VMs have comes first.
    ranked.sort_by_key(|(rank, problem, _)| {
        (std::cmp::Reverse(problem.finding.level), *rank, std::cmp::Reverse(problem.vms.len()))
    });
    ranked.into_iter().map(|(_, problem, _)| problem).collect()
}

/// Returns a finding of the VM `name` with NAME in place of its name, in what was found and in what to do.
fn without_name(finding: &Finding, name: &str) -> Finding {
    let general = |text: &str| {
        let is_word = |at: usize| {
            let around = [text[..at].chars().next_back(), text[at + name.len()..].chars().next()];
            !around.into_iter().flatten().any(char::is_alphanumeric)
        };
        let (mut general, mut copied) = (String::new(), 0);
        for (at, _) in text.match_indices(name).filter(|(at, _)| is_word(*at)) {
            general += &text[copied..at];
            general += "NAME";
            copied = at + name.len();
        }
        general + &text[copied..]
    };
    let Finding { what, level, found, advice } = finding;
    Finding { what: what.clone(), level: *level, found: general(found), advice: advice.as_deref().map(general) }
}

/// Returns all problems of these VMs and of what the host's daemon does with them, the worst first. `now_s` is in seconds since 1970.
#[must_use]
pub fn of_host(vms: &[Vm], heard: Option<&Heard>, now_s: f64) -> Vec<Problem> {
    let mut problems = of_all(vms);
    let report = heard.and_then(|heard| heard.as_ref().ok());
    let silent = heard.and_then(|heard| heard.as_ref().err()).map(|why| daemon::silent(why));
    problems.extend(silent.map(|finding| Problem::new("host-silent", Vec::new(), finding)));
    let hangs = report.and_then(|report| daemon::of_report(report, now_s));
    problems.extend(hangs.map(|finding| Problem::new("host-hangs", Vec::new(), finding)));
    let stuck = report.into_iter().flat_map(balloon::of_report);
    problems.extend(stuck.map(|(vm, finding)| Problem::new("balloon-stuck", vec![vm.into()], finding)));
    sort(&mut problems);
    problems
}

/// Sorts problems, the worst first. Equally bad ones stay in order.
pub fn sort(problems: &mut [Problem]) {
    problems.sort_by_key(|problem| std::cmp::Reverse(problem.finding.level));
}

/// Returns what is wrong with one VM that answers, in the order of the rules.
#[must_use]
pub fn of_status(status: &Status) -> Vec<Problem> {
    let shown = Shown { snapshot: 0, status: status.clone(), figures: Figures::of(status, None), recent: None };
    let vm = Vm { status: Some(shown), lately: Lately::of(status), ..Vm::silent(&status.name) };
    of_all(&[vm])
}

/// Returns the problems of a VM with their ranks.
fn of_vm(vm: &Vm) -> Vec<(usize, Problem)> {
    let problem = |cause: &str, found: Found| {
        let Found { level, what, found, advice, shared } = found;
        let finding = Finding { what, level, found, advice: Some(advice) };
        Problem { cause: cause.into(), vms: vec![vm.name.clone()], finding, shared }
    };
    let silent = vm.silence.iter().map(|silence| silent(vm, silence)).map(|(cause, found)| (0, problem(cause, found)));
    let shown = vm.status.iter().flat_map(|shown| {
        let found = RULES.iter().zip(1..).flat_map(move |((cause, finds), rank)| {
            let found: Vec<Found> = match finds {
                One(find) => find(vm, shown).into_iter().collect(),
                Each(find) => find(shown),
            };
            found.into_iter().map(move |found| (rank, *cause, found))
        });
        found.map(|(rank, cause, found)| (rank, problem(cause, found)))
    });
    silent.chain(shown).collect()
}

fn silent(vm: &Vm, silence: &Silence) -> (&'static str, Found) {
    let (name, socket) = (vm.plain_name(), vm.socket.display());
    match silence {
        Silence::Gone(text) => (
            "process-gone",
            Found::failed(
                "process",
                format!("it does not run: {text}. A guest of it hangs"),
                format!(
                    "`systemctl status remoca-disk@{name}` says why, `systemctl start` starts it. If its guest was shut down meanwhile, it \
                     may be stopped again then. If the VM is gone for good: `remoca forget {name} --control {socket}`"
                ),
            ),
        ),
        Silence::Hangs(text) => (
            "process-hangs",
            Found::failed(
                "process",
                format!("{text}, so its guest probably hangs"),
                format!(
                    "Is it stopped, or is the host out of CPU time? Its watchdog ends it; else `systemctl restart remoca-disk@{name}`"
                ),
            ),
        ),
        Silence::Denied(text) => not_asked(text, "Run this as root, or as the user that runs the VM"),
        Silence::Busy(text) => not_asked(
            text,
            format!("Try again. If that does not help, which programs keep connections to {socket} open?"),
        ),
        Silence::Failed(text) => not_asked(
            text,
            format!(
                "If it is of another version, ask with the program of that version, or `systemctl restart remoca-disk@{name}`"
            ),
        ),
        Silence::Unasked(text) => not_asked(
            text,
            "Raise its limit to twice as many files as there are VMs: `ulimit -n`, or LimitNOFILE= of remoca-web.service",
        ),
    }
}

fn not_asked(text: &str, advice: impl Into<String>) -> (&'static str, Found) {
    ("process-not-asked", Found::warning("process", text, advice))
}

/// Returns whether the process runs the version of this program, and the program that is installed.
#[must_use]
pub fn process(status: &Status) -> Finding {
    let (own, name) = (env!("CARGO_PKG_VERSION"), &status.name);
    let found = match status.version == own {
        true if !status.is_replaced => {
            return Finding::ok(
                "process",
                format!("runs as {}, version {own}, started {}", status.pid, status.started),
            );
        }
        true => "runs a program whose file has been replaced or removed since it was started".into(),
        false => format!("runs version {}, and {own} is installed", status.version),
    };
    let advice = match status.has_disks() {
        true => format!("`remoca upgrade {name}` changes that under the running guest"),
        false => "Its disks are elsewhere, so it cannot be upgraded. One that waits for them may be restarted".into(),
    };
    Finding::warning("process", found, advice)
}

fn configuration(status: &Status) -> Option<Found> {
    let notice = status.notice.as_ref()?;
    Some(Found::failed("configuration", notice.clone(), "`remoca config check` names every mistake"))
}

fn state_lost(status: &Status) -> Option<Found> {
    let advice = "Make room there: it is made again within seconds, and nothing is lost until then";
    Some(Found::warning("state file", status.state_lost.clone()?, advice))
}

fn trace(status: &Status) -> Option<Found> {
    let lost = status.trace_lost.filter(|lost| *lost > 0)?;
    let found = format!("lost {}: writing to the trace file fails or is too slow", count_of(lost, "record"));
    let advice = format!(
        "Is its file system full? A write error ends the trace: once there is room, `remoca upgrade {}` goes on with it. The guest is not held \
         up",
        status.name
    );
    Some(Found::warning("trace", found, advice))
}

impl Problem {
    /// Returns what is wrong with `vms`, or with the host if there are none.
    #[must_use]
    pub fn new(cause: &str, vms: Vec<String>, finding: Finding) -> Self {
        Self { cause: cause.into(), vms, finding, shared: None }
    }

    /// Returns whose problem it is, in words.
    #[must_use]
    pub fn whose(&self) -> String {
        match &self.vms[..] {
            [] => "this host".into(),
            [one] => one.clone(),
            [one, others @ ..] => format!("{one} and {} more", others.len()),
        }
    }

    /// Returns what is wrong, without what to do.
    #[must_use]
    pub fn found(&self) -> String {
        format!("{}: {}", self.finding.what, self.finding.found)
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { finding, .. } = self;
        let whose = one_line(&self.whose(), usize::MAX);
        let text = format!("{:<8} {whose}: {}: {}", finding.level.word(), finding.what, finding.said());
        // Names and paths are those of files.
        f.write_str(&clean(&text))
    }
}

#[cfg(test)]
mod tests;
