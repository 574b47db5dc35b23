//! What the page reads: all VMs in short, and everything about one. Pure.

use crate::columns::{self, COLUMNS, Column, Row};
use crate::curve;
use crate::details::{self, Detail};
use crate::diagnosis::Problem;
use crate::history::Moment;
use crate::host;
use crate::snapshot::Snapshot;
use crate::vm::Vm;
use serde::Serialize;

/// All VMs of a snapshot in short.
#[derive(Serialize)]
pub struct Overview<'a> {
    snapshot: u64,
    taken_s: f64,
    host: &'a str,
    version: &'a str,
    answering: usize,
    columns: &'static [Column],
    rows: Vec<Row>,
    total: Option<Row>,
    problems: &'a [Problem],
    host_report: Option<host::Summary<'a>>,
}

impl<'a> Overview<'a> {
    /// Returns what is shown of `snapshot`.
    #[must_use]
    pub fn of(snapshot: &'a Snapshot) -> Self {
        Self {
            snapshot: snapshot.snapshot,
            taken_s: snapshot.taken_s,
            host: &snapshot.host,
            version: &snapshot.version,
            answering: snapshot.statuses().count(),
            columns: &COLUMNS,
            rows: columns::rows(snapshot),
            total: columns::total(snapshot),
            problems: &snapshot.problems,
            host_report: snapshot.host_report.as_ref().map(host::Summary::of),
        }
    }
}

/// Everything about one VM.
#[derive(Serialize)]
pub struct Details<'a> {
    snapshot: u64,
    vm: &'a Vm,
    /// What `remoca status -v` says of it.
    lines: Vec<Detail>,
    problems: Vec<&'a Problem>,
    history: &'a [Moment],
    /// What `remoca curve -o json` says, as it was when the curve was read.
    curve: Option<curve::Shown<'a>>,
}

/// Returns everything about a VM of `snapshot` as JSON.
#[must_use]
pub fn details(snapshot: &Snapshot, vm: &Vm) -> String {
    let figures = vm.curve.as_ref().map(|curve| curve::Figures::of(curve, None, curve::SERVER_US));
    let curve = vm.curve.as_ref().zip(figures.as_ref()).map(|(curve, figures)| curve::Shown { curve, figures });
    let details = Details {
        snapshot: snapshot.snapshot,
        vm,
        lines: vm.status.as_ref().map(|shown| details::of(&shown.status, None)).unwrap_or_default(),
        problems: snapshot.problems.iter().filter(|problem| problem.vms.contains(&vm.name)).collect(),
        history: &vm.history,
        curve,
    };
    serde_json::to_string(&details).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics;
    use crate::snapshot::{Answer, Taker};
    use crate::testing::{absurd_status, full_snapshot, full_status};
    use remoca_protocol::control::Status;
    use serde_json::Value;

    #[test]
    fn what_the_page_reads_has_the_figures_of_the_snapshot() {
        let snapshot = full_snapshot(3);
        let parse = |text: &str| serde_json::from_str::<Value>(text).expect("JSON");
        let overview = parse(&serde_json::to_string(&Overview::of(&snapshot)).expect("JSON"));
        assert_eq!((&overview["snapshot"], &overview["rows"][2]["name"]), (&Value::from(2), &Value::from("web002")));
        assert_eq!(overview["host_report"]["last_decision"]["why"], "it gains");
        assert!(overview["host_report"]["text"].as_str().is_some_and(|text| text.contains("3G of 4G given")));
        let details = parse(&details(&snapshot, &snapshot.vms[1]));
        let whole = parse(&snapshot.json());
        assert_eq!(details["vm"], whole["vms"][1]);
        assert_eq!(details["curve"]["points"].as_array().map(Vec::len), Some(65));
        assert_eq!(details["history"].as_array().map(Vec::len), Some(1));
    }

    /// One process says what it likes, and the figures of all others are on the same screen.
    #[test]
    fn absurd_numbers_are_shown_as_any_others() {
        let mut taker = Taker::new("host".into());
        let mut answers = |before: bool| {
            let statuses = [absurd_status(), Status { name: "b".into(), ..absurd_status() }, full_status(7, 2)];
            let answer = |mut status: Status| {
                if before {
                    status.uptime_s = 1.0;
                    status.counters.clear();
                }
                Answer { socket: format!("/s/{}.ctl", status.name).into(), status: Ok(status), curve: None }
            };
            taker.next(statuses.map(answer).into(), 1_700_000_000.0, None)
        };
        answers(true);
        let snapshot = answers(false);
        assert_eq!(snapshot.total().map(|total| total.reads), Some(u64::MAX));
        let overview = serde_json::to_value(Overview::of(&snapshot)).expect("JSON");
        assert_eq!(overview["rows"].as_array().map(Vec::len), Some(3));
        for vm in &snapshot.vms {
            assert!(details(&snapshot, vm).starts_with('{'));
        }
        let metrics = metrics::text(&snapshot, metrics::Form::Prometheus);
        assert!(metrics.contains("remoca_vms_answering 3\n"), "{metrics}");
        assert!(Snapshot::parse(snapshot.json().as_bytes()).is_ok());
    }

    #[test]
    fn a_snapshot_is_read_back_as_it_was() {
        let snapshot = full_snapshot(2);
        let read = Snapshot::parse(snapshot.json().as_bytes()).expect("a snapshot");
        assert_eq!(read.json(), snapshot.json());
        for (read, own) in read.vms.iter().zip(&snapshot.vms) {
            let figures = |vm: &Vm| vm.newest().cloned().expect("figures");
            assert_eq!(figures(read), figures(own));
        }
        assert!(Snapshot::parse(b"{}").is_err());
    }
}
