//! A snapshot as metrics for Prometheus: its text format, or that of OpenMetrics. Pure.
//!
//! At most 40 series for each VM, whatever it has. No label is a block, an address, a page or a disk.

use crate::diagnosis::{DAEMON_HANGS, is_unreachable, needs_memory};
use crate::figures::{Agent, ServerState, counter};
use crate::finding::Level;
use crate::shown::Shown;
use crate::snapshot::Snapshot;
use crate::vm::{Silence, Vm};
use remoca_protocol::control::{DiskStatus, NormalLatency, Status};
use std::fmt::Write;

/// Form of the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Prometheus,
    OpenMetrics,
}

impl Form {
    /// Returns the form that a client wants whose `Accept` header this is.
    #[must_use]
    pub fn wanted(accept: &str) -> Self {
        if accept.contains("application/openmetrics-text") { Self::OpenMetrics } else { Self::Prometheus }
    }

    /// Returns the type of the content.
    #[must_use]
    pub fn content_type(self) -> &'static str {
        match self {
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// A metric of one VM.
pub struct Metric {
    /// Name without `remoca_vm_`. That of a counter ends with `_total`.
    pub name: &'static str,
    pub help: &'static str,
    kind: Kind,
    /// Returns its value; `None` if there is none.
    value: fn(&Vm, &Shown) -> Option<f64>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Gauge,
    Counter,
}

/// Metrics of a VM that answers. `up` and `problems` are those of every VM.
pub const METRICS: [Metric; 38] = [
    gauge("uptime_seconds", "Time since the program started.", |_, shown| Some(shown.status.uptime_s)),
    gauge("cache_enabled", "Whether the cache is on.", |_, shown| flag(shown.status.cache.enabled)),
    gauge("cache_wanted_bytes", "Size of the cache that is wanted, in all tiers.", |_, shown| {
        number(shown.status.cache.wanted_bytes.saturating_add(shown.status.cache.local_wanted_bytes))
    }),
    gauge("cache_granted_bytes", "Memory that the servers grant, in all tiers.", |_, shown| {
        number(shown.status.cache.granted_bytes.saturating_add(shown.status.cache.local_granted_bytes))
    }),
    gauge(
        "cache_used_bytes",
        "Memory that holds pages, also that of servers that are away: it can be more than is granted.",
        |_, shown| number(shown.figures.used_bytes),
    ),
    gauge("server_connected", "Whether the memory server is connected.", |_, shown| {
        let server = shown.status.server.as_ref()?;
        flag(server.connected)
    }),
    gauge(
        "server_left_alone",
        "Whether the disk answers all reads, because the memory server is slower.",
        |_, shown| flag(shown.figures.server == ServerState::LeftAlone),
    ),
    gauge(
        "server_read_median_seconds",
        "Usual time of a read from the memory server, by the newest reads.",
        |_, shown| median(shown.status.hedging.server.as_ref()),
    ),
    gauge("disk_read_median_seconds", "Usual time of a read from the disk, by the newest reads.", |_, shown| {
        median(shown.status.hedging.disk.as_ref())
    }),
    gauge("disks", "Disks.", |_, shown| number(shown.figures.disks as u64)),
    gauge("disks_attached", "Disks that a guest has attached.", |_, shown| number(shown.figures.disks_attached as u64)),
    gauge("disks_with_failed_flush", "Disks on which a flush failed, so that all later ones fail.", |_, shown| {
        number(shown.figures.failed_flushes.len() as u64)
    }),
    gauge("disks_unreachable", "Disks whose image cannot be reached, so that the guest waits.", |_, shown| {
        disks(shown, is_unreachable)
    }),
    gauge(
        "disks_shrunk",
        "Disks whose image is smaller than it was, so that requests beyond its end fail.",
        |_, shown| disks(shown, |_, disk| disk.shrunk_from_bytes.is_some()),
    ),
    gauge(
        "disks_without_memory",
        "Disks that do not work, because the hypervisor that has attached them shares no guest memory.",
        |_, shown| disks(shown, |status, disk| status.memory.guest_bytes == 0 && needs_memory(status, disk)),
    ),
    gauge(
        "agent_running",
        "Whether the agent in the guest reports; absent while no guest has attached the port.",
        |_, shown| {
            shown.status.port.as_ref().filter(|port| port.attached)?;
            flag(shown.figures.agent == Agent::Running)
        },
    ),
    count("reads_total", "Reads of the guest.", |_, shown| number(shown.figures.reads)),
    count("read_bytes_total", "Bytes in the blocks that the guest read.", |_, shown| number(shown.figures.read_bytes)),
    count("writes_total", "Writes of the guest.", |_, shown| number(shown.figures.writes)),
    count("written_bytes_total", "Bytes in the blocks that the guest wrote.", |_, shown| {
        number(shown.figures.written_bytes)
    }),
    count(
        "read_blocks_total",
        "Blocks read that the cache could have answered, without reads of parts of blocks.",
        |_, shown| number(shown.figures.read_blocks),
    ),
    count("hit_blocks_total", "Blocks read that needed no disk.", |_, shown| number(shown.figures.hit_blocks)),
    count("hits_total", "Reads that needed no disk.", |_, shown| number(shown.figures.hits.count)),
    count("hits_seconds_total", "Time that reads took which needed no disk.", |_, shown| {
        nanoseconds(shown.figures.hits.sum_ns)
    }),
    count("disk_reads_total", "Reads that needed the disk.", |_, shown| number(shown.figures.disk_reads.count)),
    count("disk_reads_seconds_total", "Time that reads took which needed the disk.", |_, shown| {
        nanoseconds(shown.figures.disk_reads.sum_ns)
    }),
    gauge(
        "saved_seconds",
        "Time that reads were shorter by since the start; negative if the cache slowed the guest.",
        |_, shown| shown.figures.saved_s,
    ),
    count("evicted_pages_total", "Pages that the guest evicted.", |_, shown| number(shown.figures.evicted)),
    count(
        "known_pages_total",
        "Evicted pages that the disk is known to hold; none of them was evicted while the cache was off.",
        |_, shown| number(shown.figures.known),
    ),
    count("disk_errors_total", "Requests that the disk failed.", |_, shown| counted(shown, "disk_errors")),
    count("wrong_pages_total", "Pages from a memory server that were not the requested ones.", |_, shown| {
        Some(counted(shown, "fetch_wrong")? + counted(shown, "fetch_unexpected")?)
    }),
    count("missing_pages_total", "Pages that the memory server did not have.", |_, shown| {
        counted(shown, "fetch_missing")
    }),
    count("hedges_total", "Reads that also went to the disk, because the memory server was late.", |_, shown| {
        counted(shown, "hedges")
    }),
    count("disconnections_total", "Sessions with memory servers that were lost.", |_, shown| {
        counted(shown, "disconnections")
    }),
    count("foreign_writes_total", "Times that another program wrote to an image.", |_, shown| {
        counted(shown, "foreign_writes")
    }),
    gauge("index_bytes", "Memory of the index.", |_, shown| number(shown.status.memory.index_bytes)),
    gauge("curve_hit_ratio", "Share of hits at the present size, by the miss-ratio curve.", |vm, _| {
        let prospect = vm.prospect.as_ref()?;
        prospect.sizes.iter().find(|row| row.is_present).map(|row| row.hit_ratio)
    }),
    gauge("curve_double_gain_ratio", "By how much twice the cache would raise the share of hits.", |vm, _| {
        vm.prospect.as_ref()?.gain_of_double()
    }),
];

const fn gauge(name: &'static str, help: &'static str, value: fn(&Vm, &Shown) -> Option<f64>) -> Metric {
    Metric { name, help, kind: Kind::Gauge, value }
}

const fn count(name: &'static str, help: &'static str, value: fn(&Vm, &Shown) -> Option<f64>) -> Metric {
    Metric { name, help, kind: Kind::Counter, value }
}

/// Returns the metrics of a snapshot.
#[must_use]
pub fn text(snapshot: &Snapshot, form: Form) -> String {
    let mut text = Text { text: String::with_capacity(256 + snapshot.vms.len() * 3000), form };
    let answering = snapshot.statuses().count();
    text.single("remoca_snapshot", "Number of the snapshot that all figures are from.", number(snapshot.snapshot));
    text.single("remoca_snapshot_timestamp_seconds", "Time at which it was taken.", Some(snapshot.taken_s));
    text.single("remoca_vms", "VMs of this host.", number(snapshot.vms.len() as u64));
    text.single("remoca_vms_answering", "VMs of this host whose process answers.", number(answering as u64));
    let local = snapshot.statuses().map(|shown| shown.status.cache.local_granted_bytes).fold(0, u64::saturating_add);
    text.single("remoca_local_tier_granted_bytes", "Memory of this host in the local tiers of all VMs.", number(local));
    let divided = [
        ("remoca_host_total_bytes", "Memory that `remoca host` may give to all VMs, by tier; absent without it."),
        ("remoca_host_given_bytes", "Memory of it that VMs have or want; absent without it."),
    ];
    for (at, (name, help)) in divided.into_iter().enumerate() {
        text.family(name, help, Kind::Gauge);
        if let Some(report) = &snapshot.host_report {
            let bytes = [report.total_bytes, report.counted_bytes][at];
            text.sample(name, "tier", &report.resource, bytes as f64);
        }
    }
    let help = "Whether `remoca host` answers, with a report that is not old; absent without it.";
    text.single("remoca_host_up", help, daemon_works(snapshot));
    text.family("remoca_problems", "Problems that `remoca check` names, by level.", Kind::Gauge);
    for level in [Level::Failed, Level::Warning] {
        let problems = snapshot.problems.iter().filter(|problem| problem.finding.level == level).count();
        text.sample("remoca_problems", "level", level.word(), problems as f64);
    }
    let help = "Whether the process of the VM answers; absent if it could not be asked, or gives no status.";
    text.family("remoca_vm_up", help, Kind::Gauge);
    for vm in snapshot.vms.iter().filter(|vm| vm.silence.as_ref().is_none_or(Silence::is_down)) {
        text.sample("remoca_vm_up", "vm", &vm.name, f64::from(u8::from(vm.status.is_some())));
    }
    text.family("remoca_vm_problems", "Problems of the VM.", Kind::Gauge);
    for vm in &snapshot.vms {
        let problems = snapshot.problems.iter().filter(|problem| problem.vms.contains(&vm.name)).count();
        text.sample("remoca_vm_problems", "vm", &vm.name, problems as f64);
    }
    for metric in &METRICS {
        let name = format!("remoca_vm_{}", metric.name);
        text.family(&name, metric.help, metric.kind);
        for vm in &snapshot.vms {
            let value = vm.status.as_ref().and_then(|shown| (metric.value)(vm, shown));
            value.iter().for_each(|value| text.sample(&name, "vm", &vm.name, *value));
        }
    }
    if form == Form::OpenMetrics {
        text.text += "# EOF\n";
    }
    text.text
}

/// Returns whether the host's daemon works; `None` if there is none.
fn daemon_works(snapshot: &Snapshot) -> Option<f64> {
    let hangs = snapshot.problems.iter().any(|problem| DAEMON_HANGS.contains(&problem.cause.as_str()));
    (hangs || snapshot.host_report.is_some()).then_some(f64::from(u8::from(!hangs)))
}

struct Text {
    text: String,
    form: Form,
}

impl Text {
    /// Adds what is said of all samples of a name. The family of a counter has no `_total` in OpenMetrics.
    fn family(&mut self, name: &str, help: &str, kind: Kind) {
        let family = match self.form {
            Form::OpenMetrics if kind == Kind::Counter => name.trim_end_matches("_total"),
            Form::OpenMetrics | Form::Prometheus => name,
        };
        let kind = if kind == Kind::Counter { "counter" } else { "gauge" };
        // Writing to a string does not fail.
        let _ = writeln!(self.text, "# HELP {family} {help}\n# TYPE {family} {kind}");
    }

    fn sample(&mut self, name: &str, label: &str, of: &str, value: f64) {
        let _ = writeln!(self.text, "{name}{{{label}=\"{}\"}} {value}", escaped(of));
    }

    /// Adds a gauge without labels.
    fn single(&mut self, name: &str, help: &str, value: Option<f64>) {
        self.family(name, help, Kind::Gauge);
        value.iter().for_each(|value| {
            let _ = writeln!(self.text, "{name} {value}");
        });
    }
}

/// Returns the value of a label as the format wants it.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[expect(clippy::cast_precision_loss, reason = "values of Prometheus are these")]
fn number(value: u64) -> Option<f64> {
    Some(value as f64)
}

/// Returns the number of disks of which `is_one` is true.
fn disks(shown: &Shown, is_one: fn(&Status, &DiskStatus) -> bool) -> Option<f64> {
    number(shown.status.disks.iter().filter(|disk| is_one(&shown.status, disk)).count() as u64)
}

fn flag(value: bool) -> Option<f64> {
    Some(f64::from(u8::from(value)))
}

fn nanoseconds(ns: u64) -> Option<f64> {
    number(ns).map(|ns| ns / 1e9)
}

fn counted(shown: &Shown, name: &str) -> Option<f64> {
    number(counter(&shown.status, name))
}

fn median(latency: Option<&NormalLatency>) -> Option<f64> {
    latency.map(|latency| latency.p50_us / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::Taker;
    use crate::testing::{full_snapshot, full_status, host_report, snapshot, status};
    use crate::vm::Heard;
    use remoca_protocol::control::MigrationStatus;
    use remoca_protocol::host::HostReport;
    use serde_json::json;

    /// Most series that a VM may have.
    const SERIES_MAX: usize = 40;

    #[test]
    fn a_vm_has_at_most_forty_series_and_each_has_help_and_type() {
        let snapshot = full_snapshot(2);
        let text = text(&snapshot, Form::Prometheus);
        let name = &snapshot.vms[0].name;
        let series = text.lines().filter(|line| line.contains(&format!("vm=\"{name}\""))).count();
        assert_eq!(series, METRICS.len() + 2, "every metric has a value here: {text}");
        assert!(series <= SERIES_MAX, "{series}");
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let name = line.split(['{', ' ']).next().expect("a name");
            assert!(text.contains(&format!("# HELP {name} ")) && text.contains(&format!("# TYPE {name} ")), "{line}");
            let is_counter = text.contains(&format!("# TYPE {name} counter"));
            assert_eq!(is_counter, name.ends_with("_total"), "{name}");
            let value = line.rsplit(' ').next().expect("a value");
            assert!(value.parse::<f64>().is_ok_and(f64::is_finite), "{line}");
        }
        assert!(!text.contains("EOF"));
        assert!(text.contains("\nremoca_host_given_bytes{tier=\"local tier\"} 3221225472\n"), "{text}");
    }

    #[test]
    fn a_daemon_that_hangs_is_told_from_one_that_works_and_from_none() {
        let up = |heard: Option<Heard>| {
            let text = text(&Taker::default().next(Vec::new(), 1_700_001_000.0, heard), Form::Prometheus);
            text.lines().find_map(|line| line.strip_prefix("remoca_host_up ")).map(str::to_owned)
        };
        let old = HostReport { interval_ms: Some(10_000), ..host_report() };
        let new = HostReport { at_s: 1_700_000_999, ..old.clone() };
        let silent = Err("it has not answered for 1 s".into());
        let heard: [Option<Heard>; 4] = [None, Some(silent), Some(Ok(old)), Some(Ok(new))];
        assert_eq!(heard.map(up), [None, Some("0".into()), Some("0".into()), Some("1".into())]);
    }

    #[test]
    fn openmetrics_ends_with_eof_and_names_families_of_counters_without_total() {
        let text = text(&full_snapshot(1), Form::OpenMetrics);
        assert!(text.ends_with("\n# EOF\n") && text.contains("# TYPE remoca_vm_reads counter\n"), "{text}");
        assert!(text.contains("\nremoca_vm_reads_total{vm="));
        assert_eq!(Form::wanted("application/openmetrics-text;version=1.0.0,text/plain;q=0.5"), Form::OpenMetrics);
        assert_eq!(Form::wanted("*/*"), Form::Prometheus);
    }

    #[test]
    fn disks_that_do_not_work_are_counted_by_what_is_wrong() {
        let faults = |change: fn(&mut Status)| {
            let mut status = full_status(1, 100);
            status.disks.push(DiskStatus { name: "data".into(), ..status.disks[0].clone() });
            change(&mut status);
            let text = text(&snapshot(vec![Ok(status)]), Form::Prometheus);
            ["unreachable", "shrunk", "without_memory"].map(|fault| {
                let start = format!("remoca_vm_disks_{fault}{{vm=\"web001\"}} ");
                text.lines().find_map(|line| line.strip_prefix(&start)).expect("a figure").to_owned()
            })
        };
        assert_eq!(faults(|_| {}), ["0", "0", "0"]);
        assert_eq!(faults(|status| status.disks[1].store = "waiting".into()), ["1", "0", "0"]);
        assert_eq!(faults(|status| status.disks[1].shrunk_from_bytes = Some(40 << 30)), ["0", "1", "0"]);
        assert_eq!(faults(|status| status.memory.guest_bytes = 0), ["0", "0", "2"]);
        let elsewhere = faults(|status| {
            status.disks[1].store = "waiting".into();
            status.memory.guest_bytes = 0;
            status.migration = Some(MigrationStatus { has_disks: false, incoming: None, peer: None, news: None });
        });
        assert_eq!(elsewhere, ["0", "0", "0"], "another process has them");
        let needless = faults(|status| {
            status.memory.guest_bytes = 0;
            status.disks[0].attached = false;
            status.disks[1].nbd_clients = Some(1);
        });
        assert_eq!(needless, ["0", "0", "0"], "no hypervisor is to share it");
    }

    #[test]
    fn a_vm_that_does_not_answer_is_down_and_names_are_escaped() {
        let mut odd = status(json!({}), [0; 2], [0; 2]);
        odd.name = "a\"b\\c\nd".into();
        (odd.cache.local_wanted_bytes, odd.cache.local_granted_bytes) = (1 << 31, 1 << 30);
        let text = text(&snapshot(vec![Ok(odd), Err("gone")]), Form::Prometheus);
        assert!(text.contains("remoca_vm_up{vm=\"gone\"} 0\n") && text.contains("remoca_vms_answering 1\n"), "{text}");
        assert!(text.contains("remoca_vm_up{vm=\"a\\\"b\\\\c\\nd\"} 1\n"));
        assert!(!text.contains("remoca_vm_reads_total{vm=\"gone\"}"));
        assert!(text.contains("\nremoca_local_tier_granted_bytes 1073741824\n"), "{text}");
        // Beside 8 KiB elsewhere.
        for (part, bytes) in [("granted", 1_073_750_016_u64), ("wanted", 2_147_491_840)] {
            let line = text.lines().find(|line| line.starts_with(&format!("remoca_vm_cache_{part}_bytes{{")));
            assert!(line.is_some_and(|line| line.ends_with(&format!(" {bytes}"))), "{line:?}");
        }
        assert!(!text.contains("\nremoca_host_given_bytes"), "there is no daemon");
    }

    /// Otherwise an alert would fire for VMs that are well.
    #[test]
    fn a_vm_that_could_not_be_asked_is_not_said_to_be_down() {
        let vm = |kind: fn(String) -> Silence| Vm { silence: Some(kind("not asked".into())), ..Vm::silent("unasked") };
        let vms = [Silence::Denied, Silence::Busy, Silence::Failed, Silence::Unasked].map(vm).into();
        let text = text(&Snapshot { vms, ..snapshot(Vec::new()) }, Form::Prometheus);
        assert!(text.contains("remoca_vms_answering 0\n") && !text.contains("remoca_vm_up{"), "{text}");
    }
}
