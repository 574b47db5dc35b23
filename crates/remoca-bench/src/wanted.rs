//! The targets, and how a row of `targets.json` is made of a figure and its target.
//!
//! Rows of the design's anchors begin with A: 1.3, 1.6 and 1.7 are in `tiers.rs`, 1.9 is in `takeback.rs`, and the
//! others are in `targets`.

use remoca_lab::figures::{Figure, Spread};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Whether a value should be large or small.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    AtLeast,
    AtMost,
}

/// One target.
pub struct Wanted {
    /// Its number, and what tells it from others of the same number.
    pub id: &'static str,
    pub what: &'static str,
    /// Unit of value and target; a ratio has none.
    pub unit: &'static str,
    pub target: f64,
    pub direction: Direction,
}

const fn least(id: &'static str, target: f64, unit: &'static str, what: &'static str) -> Wanted {
    Wanted { id, what, unit, target, direction: Direction::AtLeast }
}

const fn most(id: &'static str, target: f64, unit: &'static str, what: &'static str) -> Wanted {
    Wanted { id, what, unit, target, direction: Direction::AtMost }
}

/// All targets, in the order of their numbers.
pub const WANTED: &[Wanted] = &[
    least("P1-raw", 0.95, "", "gets, depth 32 x 4, over a raw server with headers"),
    least("P1-bare", 0.85, "", "gets, depth 32 x 4, over a raw server of bare pages"),
    least("P1-memcached", 1.7, "", "gets, depth 32 x 4, over memcached"),
    most("P1-cpu", 1.2, "", "server CPU of a get, depth 32 x 4, over raw"),
    most("P2", 1.25, "", "server CPU of a get, depth 32, over raw"),
    most("P3-blocking", 1.05, "", "time of a get, depth 1, over raw"),
    most("P3-polling", 1.3, "", "time of a get, depth 1, both polling, over raw"),
    most("P4", 1.4, "", "server CPU of a SENDPAGE, depth 32, over raw"),
    most("P5", 16.0, "bytes", "server memory beside each page"),
    most("P6", 18.0, "MB", "index for 1 GiB of guest and 1 GiB of cache"),
    most("P7-hit", 150.0, "ns", "hit in an index of 16 million pages"),
    most("P7-evict", 200.0, "ns", "one page discarded and another admitted there"),
    most("P7-stall", 1.0, "ms", "longest stall while that index grows"),
    most("P8-tag", 1.1, "", "CPU of a get with a tag check over without"),
    most("P8-aead", 1.5, "", "CPU of a get with encryption over without"),
    most("P9-d1", 1.2, "", "local hit, depth 1: time over qemu-storage-daemon"),
    least("P9-d32", 0.9, "", "local hits, depth 32: IOPS over qemu-storage-daemon"),
    most("P10-d1", 1.3, "", "remote hit, depth 1: time over a raw TCP fetch"),
    least("P10-d32", 0.6, "", "remote hits, depth 32: pages/s over raw"),
    most("P11-cpu", 1.1, "", "miss: CPU over qemu-storage-daemon"),
    most("P11-latency", 1.05, "", "miss, disk of 7 ms: time over qemu-storage-daemon"),
    least("P12", 0.97, "", "remote hits on a link of 1 Gbit over 29,000 pages/s"),
    least("P13", 100.0, "", "time of a read of a 7 ms disk over a remote hit"),
    most("P14-enough", 1.01, "", "time in the guest with the agent, memory enough"),
    most("P14-ram-random", 1.1, "", "the same, random reads, disk in memory"),
    most("P14-slow-random", 1.1, "", "the same, random reads, disk of 7 ms"),
    most("P14-ram-sequential", 1.1, "", "the same, in sequence, disk in memory"),
    most("P14-slow-sequential", 1.1, "", "the same, in sequence, disk of 7 ms"),
    least("P15", 0.9, "", "speed-up of the demo over that of an ideal cache"),
    most("P16-cannot", 1.03, "", "passes that cannot hit: time over without remoca"),
    most("P16-can", 1.03, "", "passes that can hit: time over without remoca"),
    least("P17-hits", 0.9, "", "loop over 1.5 x the cache: hits over the best subset"),
    most("P17-sent", 0.05, "", "the same: pages sent over pages read"),
    most("P18-time", 0.125, "", "fetch from a mapped pool over its Unix socket"),
    most("P18-cpu", 0.0, "us", "server CPU of a fetch from a mapped pool"),
    most("P19", 4.0, "MB", "memory that the agent takes of a small guest"),
    most("P20-longest", 50.0, "ms", "longest read during an upgrade"),
    most("P20-lost", 0.0, "", "connections lost in upgrades"),
    most("A1.3-total", 0.5, "points", "hits of all tiers against one exact LRU queue, worst trace"),
    most("A1.3-local", 1.0, "points", "hits of the local tier against its part of that queue"),
    most("A1.4", 1.05, "", "mean read time over that of its shares of local tier, remote pool and disk"),
    least("A1.5-two", 0.9, "", "hits from two servers over the sum of their links of 1 Gbit"),
    least("A1.5-three", 0.9, "", "the same, three servers"),
    least("A1.5-slower", 0.9, "", "the same, three links of 200 Mbit"),
    most("A1.5-late", 1.2, "", "p99 of hits, 1 s after one of three servers is 20 ms late, over without"),
    most("A1.6", 0.02, "", "hits lost with one of four pools, beyond its quarter"),
    most("A1.7", 1.0, "", "pages sent for each that leaves the local tier unread"),
    least("A1.8", 1.0, "", "hits of a local tier whose server is killed over before, worst pass"),
    least("A1.9-back", 0.99, "", "memory of a local tier that the host has back"),
    most("A1.9-time", 100.0, "ms", "time for that, a GiB"),
    most("A1.9-read", 1.1, "", "longest read meanwhile over that of the disk alone"),
    most(
        "A1.10-gbit",
        1.05,
        "",
        "median time of a hit while evicted pages fill a link of 1 Gbit, over that without them",
    ),
    most("A1.10-100mbit", 1.05, "", "the same, 100 Mbit"),
    most("A2.3-hit", 1.005, "", "local hits: instructions of the VM process with miss-ratio curves over without"),
    most("A2.3-miss", 1.005, "", "the same, misses of a guest with an agent"),
    most("A2.3-evicted", 1.005, "", "the same, local hits with an evicted page for each"),
];

/// A figure beside its target: one object of `targets.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    pub id: String,
    pub what: String,
    pub value: Option<f64>,
    pub unit: String,
    pub target: f64,
    pub direction: Direction,
    /// Whether the target is reached; `None` without a value.
    pub met: Option<bool>,
    pub rounds: usize,
    pub spread: Option<Spread>,
    /// The same ratio for one thing measured against itself.
    pub noise: Option<Spread>,
    pub beside: BTreeMap<String, f64>,
    /// Command that measures it.
    pub command: String,
    /// Why there is no value.
    pub reason: Option<String>,
    /// When it was measured, in seconds since 1970.
    pub made_unix_s: Option<u64>,
    pub load_average: Option<f64>,
}

impl Wanted {
    /// Returns the number of the target, such as `P9`.
    pub fn number(&self) -> &'static str {
        self.id.split('-').next().unwrap_or(self.id)
    }

    /// Returns the row of a figure.
    pub fn row(&self, figure: &Figure, command: &str, made_unix_s: u64, load_average: Option<f64>) -> Row {
        let met = match self.direction {
            Direction::AtLeast => figure.value >= self.target,
            Direction::AtMost => figure.value <= self.target,
        };
        Row {
            value: Some(figure.value),
            met: Some(met),
            rounds: figure.rounds,
            spread: figure.spread,
            noise: figure.noise,
            beside: figure.beside.clone(),
            reason: None,
            made_unix_s: Some(made_unix_s),
            load_average,
            ..self.without_value(command, "")
        }
    }

    /// Returns the row that says why there is no value.
    pub fn without_value(&self, command: &str, reason: &str) -> Row {
        Row {
            id: self.id.to_owned(),
            what: self.what.to_owned(),
            value: None,
            unit: self.unit.to_owned(),
            target: self.target,
            direction: self.direction,
            met: None,
            rounds: 0,
            spread: None,
            noise: None,
            beside: BTreeMap::new(),
            command: command.to_owned(),
            reason: Some(reason.to_owned()),
            made_unix_s: None,
            load_average: None,
        }
    }
}

/// Returns the figures of one benchmark beside their targets, as a table.
pub fn table_of(figures: &[Figure]) -> String {
    let find = |wanted: &Wanted| figures.iter().find(|figure| figure.id == wanted.id);
    let rows = WANTED.iter().filter_map(|wanted| Some(wanted.row(find(wanted)?, "", 0, None)));
    table(&rows.collect::<Vec<_>>(), 0)
}

/// Returns rows as a table, with the age of figures from before this run, which began at `began`.
pub fn table(rows: &[Row], began: u64) -> String {
    let mut text =
        format!("{:<20} {:>10}   {:>17} {:<7} {:>7}  {:<12} {}\n", "", "value", "target", "", "rounds", "A/A", "what");
    for row in rows {
        let word = match row.direction {
            Direction::AtLeast => "at least",
            Direction::AtMost => "at most",
        };
        let unit = if row.unit.is_empty() { String::new() } else { format!(" {}", row.unit) };
        let target = format!("{word} {}{unit}", row.target);
        let (value, verdict) = match (row.value, row.met) {
            (Some(value), Some(true)) => (number(value), "met"),
            (Some(value), _) => (number(value), "MISSED"),
            (None, _) => ("-".to_owned(), ""),
        };
        let noise = row.noise.map_or_else(String::new, |noise| format!("{:.2}-{:.2}", noise.min, noise.max));
        // Writing to a string does not fail.
        let _ = write!(
            text,
            "{:<20} {value:>10}   {target:>17} {verdict:<7} {:>7}  {noise:<12} {}",
            row.id, row.rounds, row.what
        );
        if let Some(reason) = &row.reason {
            let _ = write!(text, ": {reason}");
        }
        if let Some(age) = row.made_unix_s.and_then(|made| began.checked_sub(made)).filter(|age| *age > 0) {
            let _ = write!(text, " ({} old)", duration(age));
        }
        text.push('\n');
    }
    text
}

fn number(value: f64) -> String {
    if value.abs() >= 100.0 { format!("{value:.0}") } else { format!("{value:.3}") }
}

fn duration(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min", seconds / 60),
        3600..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn wanted(id: &str) -> &'static Wanted {
        WANTED.iter().find(|wanted| wanted.id == id).expect("a target")
    }

    #[test]
    fn every_number_has_a_row_and_no_two_rows_have_a_name() {
        let numbers: BTreeSet<&str> = WANTED.iter().map(Wanted::number).collect();
        let anchors = ["A1.3", "A1.4", "A1.5", "A1.6", "A1.7", "A1.8", "A1.9", "A1.10", "A2.3"].map(String::from);
        let all: BTreeSet<String> = (1..=20).map(|number| format!("P{number}")).chain(anchors).collect();
        assert_eq!(numbers, all.iter().map(String::as_str).collect());
        assert_eq!(WANTED.iter().map(|wanted| wanted.id).collect::<BTreeSet<_>>().len(), WANTED.len());
    }

    #[test]
    fn a_target_is_met_on_its_own_side_and_exactly() {
        let met = |id: &str, value| wanted(id).row(&Figure::single(id, value), "", 0, None).met;
        assert_eq!([1.1, 1.2, 1.3].map(|value| met("P9-d1", value)), [Some(true), Some(true), Some(false)]);
        assert_eq!([0.8, 0.9, 1.0].map(|value| met("P9-d32", value)), [Some(false), Some(true), Some(true)]);
        assert_eq!(wanted("P9-d1").without_value("", "none").met, None);
    }

    #[test]
    fn a_row_has_the_fields_that_are_promised() {
        let spread = Spread { median: 1.5, min: 1.0, max: 2.0 };
        let figure = Figure::of_rounds("P9-d1", 7, spread, Some(spread)).beside("hit_us", 9.0);
        let row = serde_json::to_value(wanted("P9-d1").row(&figure, "a command", 5, Some(0.5))).unwrap();
        assert_eq!(row["id"], "P9-d1");
        assert_eq!((&row["value"], &row["target"]), (&1.5.into(), &1.2.into()));
        assert_eq!(
            (&row["direction"], &row["rounds"], &row["command"]),
            (&"at_most".into(), &7.into(), &"a command".into())
        );
        assert_eq!((&row["reason"], &row["beside"]["hit_us"]), (&serde_json::Value::Null, &9.0.into()));
        let row = serde_json::to_value(wanted("P1-raw").without_value("b", "it is away")).unwrap();
        assert_eq!((&row["value"], &row["reason"]), (&serde_json::Value::Null, &"it is away".into()));
        assert_eq!(row["direction"], "at_least");
        let back: Row = serde_json::from_value(row).unwrap();
        assert_eq!(back, wanted("P1-raw").without_value("b", "it is away"));
    }

    #[test]
    fn the_table_tells_what_is_missed_missing_and_old() {
        let rows = [
            wanted("P9-d1").row(&Figure::single("P9-d1", 1.25), "", 1_000, None),
            wanted("P13").row(&Figure::single("P13", 123.4), "", 9_010, None),
            wanted("P8-aead").without_value("", "not built"),
        ];
        let table = table(&rows, 9_010);
        let line = |id: &str| table.lines().find(|line| line.starts_with(id)).expect("a line").to_owned();
        assert!(
            line("P9-d1").contains("1.250") && line("P9-d1").contains("MISSED") && line("P9-d1").ends_with("(2 h old)")
        );
        assert!(line("P13").contains(" 123 ") && line("P13").contains("met") && !line("P13").contains("old"));
        assert!(line("P8-aead").contains(" - ") && line("P8-aead").ends_with("not built"));
    }
}
