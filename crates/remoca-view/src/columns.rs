//! The table of VMs that the page and the terminal show: a column with its text and, for sorting and programs, its value.

use crate::curve::Prospect;
use crate::diagnosis::Problem;
use crate::figures::{Agent, Figures};
use crate::finding::Level;
use crate::snapshot::Snapshot;
use crate::text::{micros, percent, rate, show_seconds, tenths};
use crate::vm::Vm;
use remoca_io::show::show_size;
use remoca_protocol::control::PoolStatus;
use serde::Serialize;

/// One column, as the page reads it.
#[derive(Serialize)]
pub struct Column {
    /// Name in JSON and on the page.
    pub key: &'static str,
    pub heading: &'static str,
    pub meaning: &'static str,
    pub is_number: bool,
    #[serde(skip)]
    cell: Show,
}

/// What one column shows of one VM.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Cell {
    pub text: String,
    /// The figure itself; `None` if there is none.
    pub value: Option<f64>,
}

/// One VM, or all of them together.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    pub name: String,
    /// The worst of its problems.
    pub level: Level,
    /// Whether its figures are those since the start of its process, and not those since the snapshot before.
    pub is_since_start: bool,
    pub cells: Vec<Cell>,
}

pub const COLUMNS: [Column; 13] = [
    number("cache", "CACHE", "memory that the servers grant; off: the cache is off", |_, vm| {
        vm.cache_bytes.map_or_else(|| none("off"), bytes)
    }),
    number("used", "USED", USED, |_, vm| bytes(vm.used_bytes)),
    number(
        "hits",
        "HIT%",
        "share of the blocks read that needed no disk; reads of parts of blocks do not count",
        |_, vm| maybe(vm.hit_ratio(), percent),
    ),
    number("hit_us", "HIT us", "mean time of reads that needed no disk", |_, vm| maybe(vm.hits.mean_us(), micros)),
    number("disk_us", "DISK us", "mean time of reads that needed the disk", |_, vm| {
        maybe(vm.disk_reads.mean_us(), micros)
    }),
    number("saved", "SAVED", SAVED, |_, vm| maybe(vm.saved_s, |saved| saved.map_or("-".into(), show_seconds))),
    number("reads", "READ/s", "reads of the guest in a second", |_, vm| each_second(vm, vm.reads)),
    number("writes", "WRITE/s", "writes of the guest in a second", |_, vm| each_second(vm, vm.writes)),
    number("evicted", "EVICT/s", "pages that the guest evicts in a second", |_, vm| each_second(vm, vm.evicted)),
    number("double", "x2 HIT%", "by how many points twice the cache would raise the share of hits", |vm, _| {
        let gain = vm.prospect.as_ref().and_then(Prospect::gain_of_double);
        maybe(gain, |gain| gain.map_or("-".into(), points))
    }),
    text("agent", "AGENT", AGENT, |_, vm| none(agent(vm.agent))),
    text("server", "SERVER", SERVER, |_, vm| none(vm.server.words())),
    text("from", "MEMORY FROM", "servers that the memory is from, and how much", |vm, _| none(&memory_from(vm))),
];

const USED: &str = "memory that holds pages; also that of servers that are away, so it can be more than CACHE";
const SAVED: &str = "time that reads were shorter by; negative: the cache makes the guest slower";
const AGENT: &str =
    "whether the agent in the guest reports; silent: not for half a minute; -: the VM has no eviction port";
const SERVER: &str = "left alone: the memory server is slower than the disk, which answers all reads";

type Show = fn(&Vm, &Figures) -> Cell;

const fn number(key: &'static str, heading: &'static str, meaning: &'static str, cell: Show) -> Column {
    Column { key, heading, meaning, is_number: true, cell }
}

const fn text(key: &'static str, heading: &'static str, meaning: &'static str, cell: Show) -> Column {
    Column { key, heading, meaning, is_number: false, cell }
}

/// Returns the rows of all VMs, in the order of the snapshot.
#[must_use]
pub fn rows(snapshot: &Snapshot) -> Vec<Row> {
    snapshot.vms.iter().map(|vm| row(vm, level(&vm.name, &snapshot.problems))).collect()
}

/// Returns the row of all VMs together, or `None` if fewer than two answer.
#[must_use]
pub fn total(snapshot: &Snapshot) -> Option<Row> {
    let figures = snapshot.total().filter(|_| snapshot.statuses().count() > 1)?;
    let nobody = Vm::silent("TOTAL");
    let is_summed = |column: &Column| column.is_number && column.key != "double";
    let cells =
        COLUMNS.iter().map(|column| if is_summed(column) { (column.cell)(&nobody, &figures) } else { none("") });
    Some(Row { name: "TOTAL".into(), level: Level::Ok, is_since_start: figures.since_start, cells: cells.collect() })
}

fn row(vm: &Vm, level: Level) -> Row {
    let cells = match vm.newest() {
        Some(figures) => COLUMNS.iter().map(|column| (column.cell)(vm, figures)).collect(),
        None => COLUMNS.iter().map(|_| none("-")).collect(),
    };
    let is_since_start = vm.newest().is_some_and(|figures| figures.since_start);
    Row { name: vm.name.clone(), level, is_since_start, cells }
}

/// Returns the worst level of the problems that a VM has.
fn level(name: &str, problems: &[Problem]) -> Level {
    let own = problems.iter().filter(|problem| problem.vms.iter().any(|vm| vm == name));
    own.map(|problem| problem.finding.level).max().unwrap_or(Level::Ok)
}

fn memory_from(vm: &Vm) -> String {
    let Some(shown) = &vm.status else { return "-".into() };
    let pools = shown.status.pools.iter().map(|pool| {
        let place = match pool {
            PoolStatus { is_local_tier: true, .. } => "local tier",
            PoolStatus { is_mapped: true, .. } => "this host",
            PoolStatus { server, .. } => server.trim_start_matches("tcp:"),
        };
        let state = if pool.state == "draining" { " (draining)" } else { "" };
        format!("{place} {}{state}", show_size(pool.granted_bytes))
    });
    let all = pools.collect::<Vec<_>>().join(", ");
    if all.is_empty() { "-".into() } else { all }
}

fn agent(agent: Agent) -> &'static str {
    match agent {
        Agent::NoPort => "-",
        Agent::NotHeard => "no",
        Agent::Running => "yes",
        Agent::SilentFor(_) => "silent",
    }
}

/// Returns a difference of two shares in points.
fn points(gain: f64) -> String {
    format!("{:+.1}", tenths(gain * 100.0))
}

fn none(text: &str) -> Cell {
    Cell { text: text.into(), value: None }
}

fn maybe(value: Option<f64>, text: fn(Option<f64>) -> String) -> Cell {
    Cell { text: text(value), value }
}

#[expect(clippy::cast_precision_loss, reason = "JSON's numbers are these")]
fn bytes(bytes: u64) -> Cell {
    Cell { text: show_size(bytes), value: Some(bytes as f64) }
}

fn each_second(vm: &Figures, count: u64) -> Cell {
    let each_second = vm.each_second(count);
    Cell { text: rate(each_second), value: Some(each_second) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{full_status, snapshot, status};
    use serde_json::json;

    #[test]
    fn each_pool_is_said_to_be_where_it_is() {
        let mut status = full_status(1, 1);
        status.pools[1].state = "draining".into();
        let shown = |status: &remoca_protocol::control::Status| memory_from(&snapshot(vec![Ok(status.clone())]).vms[0]);
        assert_eq!(shown(&status), "donor1:7070 1G, donor2:7070 512M (draining), this host 512M");
        status.pools[2].is_local_tier = true;
        status.pools.truncate(3);
        assert!(shown(&status).ends_with(", local tier 512M"));
        status.pools.clear();
        assert_eq!(shown(&status), "-");
    }

    #[test]
    fn next_to_no_gain_is_no_loss() {
        assert_eq!([-0.0004, 0.0, 0.01, -0.01].map(points), ["+0.0", "+0.0", "+1.0", "-1.0"]);
    }

    #[test]
    fn a_row_has_a_cell_for_each_column() {
        let mut one = status(json!({"reads": 8, "hit_blocks": 3, "missed_blocks": 1}), [3, 600_000], [1, 7_000_000]);
        one.uptime_s = 4.0;
        let snapshot = snapshot(vec![Ok(one.clone()), Err("other")]);
        let rows = rows(&snapshot);
        let text = |row: usize, key: &str| {
            let at = COLUMNS.iter().position(|column| column.key == key).expect("a column");
            rows[row].cells[at].text.clone()
        };
        let shown = ["cache", "used", "hits", "hit_us", "disk_us", "reads", "agent", "server"].map(|key| text(1, key));
        assert_eq!(shown, ["8K", "4K", "75.0", "200", "7000", "2.0", "-", "connected"]);
        assert!(rows[0].name == "other" && rows[0].level == Level::Failed && text(0, "hits") == "-", "{rows:?}");
        assert!(rows[1].is_since_start);
        assert_eq!(total(&snapshot), None, "one VM is its own total");
        let both = crate::testing::snapshot(vec![Ok(one.clone()), Ok(one)]);
        let total = total(&both).expect("a total");
        assert_eq!((total.cells[0].text.as_str(), total.cells[2].text.as_str()), ("16K", "75.0"));
    }
}
