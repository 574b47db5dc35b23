//! All targets by one command: `out/bench/targets.json`, and a table.
//!
//! Targets that are measured together are a group. Each group runs in a thread of its own, because it moves to certain
//! processors or to another network; if it fails, its rows say why, and the others go on. What takes a guest, or long, has a
//! command of its own, whose last result is taken.

mod curves;
mod disk;
mod killed;
mod links;
mod mean;
mod narrow;
mod scale;
mod taken;

pub use curves::within_a_window;

use crate::wanted::{Row, WANTED, Wanted, table};
use crate::{index, policy, server, takeback};
use anyhow::{Context, Result, anyhow, ensure};
use clap::Args;
use remoca_lab::figures::{Figure, folder, load_average, unix_s};
use scale::{Found, Scale};
use std::fs;
use std::path::PathBuf;
use taken::TAKEN;

#[derive(Args)]
pub struct TargetsArgs {
    /// Only these targets, such as P9,P10-d1; the other rows stay as they are in the file
    #[arg(long, value_name = "TARGETS", value_delimiter = ',')]
    only: Vec<String>,

    /// Rounds of each comparison
    #[arg(long, value_name = "N", default_value_t = 7)]
    rounds: usize,

    /// A short run that only shows that everything works; its figures mean little, and go to targets-quick.json
    #[arg(long)]
    quick: bool,

    /// Option of the VM processes of P9 to P13 and P18, to see what it is worth; the figures go to targets-polling.json
    #[arg(long, value_name = "MICROSECONDS")]
    poll_max_us: Option<u64>,
}

/// Targets that are measured together.
struct Group {
    ids: &'static [&'static str],
    measure: fn(&Scale) -> Result<Found>,
}

const GROUPS: &[Group] = &[
    Group {
        ids: &["P1-raw", "P1-bare", "P1-memcached", "P1-cpu", "P2", "P3-blocking", "P3-polling", "P4", "P5"],
        measure: servers,
    },
    Group { ids: &["P6"], measure: |_| Ok(all(vec![index::memory_figure()])) },
    Group { ids: &["P7-hit", "P7-evict", "P7-stall"], measure: indices },
    Group { ids: &["P8-tag", "P8-aead"], measure: tags },
    Group { ids: &["P9-d1", "P9-d32"], measure: disk::local },
    Group { ids: &["P10-d1", "P10-d32", "P13"], measure: disk::remote },
    Group { ids: &["P11-cpu", "P11-latency"], measure: disk::miss },
    Group { ids: &["P12"], measure: disk::link },
    Group { ids: &["P17-hits", "P17-sent"], measure: policies },
    Group { ids: &["P18-time", "P18-cpu"], measure: disk::mapped },
    Group { ids: &["A1.3-total", "A1.3-local", "A1.6", "A1.7"], measure: tiers },
    Group { ids: &["A1.4"], measure: mean::time },
    Group { ids: &["A1.5-two", "A1.5-three", "A1.5-slower", "A1.5-late"], measure: links::figures },
    Group { ids: &["A1.8"], measure: killed::hits },
    Group { ids: &["A1.9-back", "A1.9-time", "A1.9-read"], measure: taken_back },
    Group { ids: &["A1.10-gbit"], measure: narrow::gbit },
    Group { ids: &["A1.10-100mbit"], measure: narrow::slower },
    Group { ids: &["A2.3-hit"], measure: curves::hit },
    Group { ids: &["A2.3-miss"], measure: curves::miss },
    Group { ids: &["A2.3-evicted"], measure: curves::evicted },
];

fn servers(scale: &Scale) -> Result<Found> {
    let figures = server::figures(scale.rounds, scale.quick)?;
    let mut found: Found = figures.into_iter().map(|figure| (figure.id.clone(), Ok(figure))).collect();
    found.push(("P3-polling".into(), Err(anyhow!("the memory server does not poll"))));
    Ok(found)
}

fn indices(scale: &Scale) -> Result<Found> {
    let (entries, operations) = if scale.quick { (1 << 20, 1 << 16) } else { (16 << 20, 1 << 20) };
    Ok(all(index::figures(entries, operations, scale.rounds, true)?))
}

fn tags(scale: &Scale) -> Result<Found> {
    let pages = if scale.quick { 1 << 14 } else { 1 << 18 };
    let aead = ("P8-aead".to_owned(), Err(anyhow!("remoca does not encrypt pages yet")));
    Ok(vec![("P8-tag".into(), server::tag_figure(scale.rounds, scale.slice(), pages)), aead])
}

fn policies(_: &Scale) -> Result<Found> {
    Ok(all(policy::figures()))
}

fn tiers(_: &Scale) -> Result<Found> {
    Ok(all(crate::tiers::figures()))
}

fn taken_back(scale: &Scale) -> Result<Found> {
    Ok(all(takeback::figures(if scale.quick { 256 } else { 4096 }, scale.rounds)?))
}

fn all(figures: Vec<Figure>) -> Found {
    figures.into_iter().map(|figure| (figure.id.clone(), Ok(figure))).collect()
}

/// Measures the targets, and writes their rows.
pub fn run(args: &TargetsArgs) -> Result<()> {
    ensure!(args.rounds > 0, "--rounds must be above 0");
    let chosen = chosen(&args.only)?;
    let began = unix_s();
    // A run of another kind must not hide the figures of a usual one.
    let name = match (args.quick, args.poll_max_us) {
        (true, _) => "targets-quick.json",
        (false, Some(_)) => "targets-polling.json",
        (false, None) => "targets.json",
    };
    let path = folder().join(name);
    let mut rows = former(&path);
    let scale = Scale { rounds: args.rounds, quick: args.quick, poll_max_us: args.poll_max_us };
    for group in GROUPS {
        let ids: Vec<&str> = group.ids.iter().copied().filter(|id| chosen.contains(id)).collect();
        if !ids.is_empty() {
            eprintln!("{} ...", ids.join(", "));
            let found = in_thread(group, scale);
            put(&mut rows, rows_of(&ids, found, &scale));
            write(&path, &rows)?;
        }
    }
    for taken in TAKEN {
        let wanted = WANTED.iter().filter(|wanted| wanted.number() == taken.number && chosen.contains(&wanted.id));
        put(&mut rows, taken.rows(&wanted.collect::<Vec<_>>()));
    }
    write(&path, &rows)?;
    println!("{}", table(&rows, began));
    if let Some(load) = load_average() {
        println!("Load of the machine at the end: {load}. Another load on it spoils times, and CPU less.");
    }
    if args.quick {
        println!("A quick run shows only that everything works: its figures mean little.");
    }
    println!("{}", path.display());
    Ok(())
}

/// Returns the names of the rows that `only` names, or of all rows if it is empty.
fn chosen(only: &[String]) -> Result<Vec<&'static str>> {
    let matches = |wanted: &Wanted, name: &str| wanted.id == name || wanted.number() == name;
    for name in only {
        ensure!(
            WANTED.iter().any(|wanted| matches(wanted, name)),
            "there is no target {name}: P1 to P20, A1.3 to A1.10, A2.3, or {}",
            ids()
        );
    }
    let is_chosen = |wanted: &&Wanted| only.is_empty() || only.iter().any(|name| matches(wanted, name));
    Ok(WANTED.iter().filter(is_chosen).map(|wanted| wanted.id).collect())
}

fn ids() -> String {
    WANTED.iter().map(|wanted| wanted.id).collect::<Vec<_>>().join(", ")
}

/// Runs a group in a thread of its own, and returns an error if it panics.
fn in_thread(group: &'static Group, scale: Scale) -> Result<Found> {
    let ended = std::thread::spawn(move || (group.measure)(&scale)).join();
    ended.unwrap_or_else(|panic| {
        let said = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
        Err(anyhow!("the benchmark panicked: {}", said.unwrap_or("without a message")))
    })
}

/// Returns the rows of a group, of which each has a value or a reason.
fn rows_of(ids: &[&str], found: Result<Found>, scale: &Scale) -> Vec<Row> {
    let (mut found, failure) = match found {
        Ok(found) => (found, "the benchmark did not measure it".to_owned()),
        Err(error) => (Vec::new(), format!("{error:#}")),
    };
    let row = |wanted: &Wanted| {
        let command = format!("cargo run --release -p remoca-bench -- targets --only {}{scale}", wanted.number());
        let at = found.iter().position(|(id, _)| id == wanted.id);
        match at.map(|at| found.swap_remove(at).1) {
            Some(Ok(figure)) if figure.value.is_finite() => wanted.row(&figure, &command, unix_s(), load_average()),
            Some(Ok(_)) => wanted.without_value(&command, "the value is no number"),
            Some(Err(error)) => wanted.without_value(&command, &format!("{error:#}")),
            None => wanted.without_value(&command, &failure),
        }
    };
    WANTED.iter().filter(|wanted| ids.contains(&wanted.id)).map(row).collect()
}

/// Returns the rows of the last run, and a row without a value for each target that it did not have.
fn former(path: &PathBuf) -> Vec<Row> {
    let text = fs::read(path).unwrap_or_default();
    let last: Vec<Row> = serde_json::from_slice(&text).unwrap_or_default();
    let row = |wanted: &Wanted| {
        let command = format!("cargo run --release -p remoca-bench -- targets --only {}", wanted.number());
        match last.iter().find(|row| row.id == wanted.id) {
            // The target may have been raised since.
            Some(Row {
                value: Some(value), rounds, spread, noise, beside, command, made_unix_s, load_average, ..
            }) => {
                let figure = Figure {
                    id: wanted.id.to_owned(),
                    value: *value,
                    rounds: *rounds,
                    spread: *spread,
                    noise: *noise,
                    beside: beside.clone(),
                };
                wanted.row(&figure, command, made_unix_s.unwrap_or(0), *load_average)
            }
            Some(row) => wanted.without_value(&row.command, row.reason.as_deref().unwrap_or("not measured yet")),
            None => wanted.without_value(&command, "not measured yet"),
        }
    };
    WANTED.iter().map(row).collect()
}

/// Puts new rows in the places of the former ones.
fn put(rows: &mut [Row], new: Vec<Row>) {
    for row in new {
        if let Some(former) = rows.iter_mut().find(|former| former.id == row.id) {
            *former = row;
        }
    }
}

fn write(path: &PathBuf, rows: &[Row]) -> Result<()> {
    fs::create_dir_all(folder())?;
    let text = serde_json::to_string_pretty(rows)?;
    fs::write(path, text + "\n").with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    const SCALE: Scale = Scale { rounds: 7, quick: false, poll_max_us: None };

    #[test]
    fn every_target_is_measured_by_one_group_or_taken_from_one_command() {
        let measured: Vec<&str> = GROUPS.iter().flat_map(|group| group.ids).copied().collect();
        let numbers: BTreeSet<&str> = TAKEN.iter().map(|taken| taken.number).collect();
        for wanted in WANTED {
            let times = measured.iter().filter(|id| **id == wanted.id).count();
            assert_eq!(times + usize::from(numbers.contains(wanted.number())), 1, "{}", wanted.id);
        }
        assert!(measured.iter().all(|id| WANTED.iter().any(|wanted| wanted.id == *id)));
    }

    #[test]
    fn targets_are_chosen_by_number_or_name() {
        let of = |only: &[&str]| chosen(&only.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>());
        assert_eq!(of(&["P9", "P10-d32"]).unwrap(), ["P9-d1", "P9-d32", "P10-d32"]);
        assert_eq!(of(&["P1"]).unwrap().len(), 4);
        assert_eq!(of(&[]).unwrap().len(), WANTED.len());
        assert!(of(&["P21"]).is_err() && of(&["9"]).is_err());
    }

    #[test]
    fn a_row_has_a_value_or_a_reason() {
        let ids = ["P9-d1", "P9-d32"];
        let rows = rows_of(&ids, Ok(vec![("P9-d1".into(), Ok(Figure::single("P9-d1", 1.0)))]), &SCALE);
        assert_eq!(rows.iter().map(|row| row.value).collect::<Vec<_>>(), [Some(1.0), None]);
        assert!(rows[0].reason.is_none() && rows[1].reason.is_some());
        let found = vec![
            ("P9-d1".into(), Err(anyhow!("nothing answers"))),
            ("P9-d32".into(), Ok(Figure::single("P9-d32", f64::INFINITY))),
        ];
        let rows = rows_of(&ids, Ok(found), &SCALE);
        assert_eq!(rows[0].reason.as_deref(), Some("nothing answers"));
        assert_eq!(rows[1].value, None);
        let rows = rows_of(&ids, Err(anyhow!("no machine")), &SCALE);
        assert!(rows.iter().all(|row| row.value.is_none() && row.reason.as_deref() == Some("no machine")));
    }

    #[test]
    fn a_group_that_panics_is_an_error_of_its_own() {
        static PANICS: Group = Group { ids: &["P9-d1"], measure: |_| panic!("it is {}", "broken") };
        let error = in_thread(&PANICS, SCALE).unwrap_err().to_string();
        assert!(error.contains("it is broken"), "{error}");
    }

    #[test]
    fn rows_that_are_not_measured_again_stay() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("targets.json");
        let mut rows = former(&path);
        assert_eq!(rows.len(), WANTED.len());
        assert!(rows.iter().all(|row| row.value.is_none() && row.reason.is_some()));
        put(&mut rows, rows_of(&["P13"], Ok(all(vec![Figure::single("P13", 120.0)])), &SCALE));
        fs::write(&path, serde_json::to_string(&rows).unwrap()).unwrap();
        assert_eq!(former(&path), rows);
        // A target that was raised since the last run is judged anew.
        let text = fs::read_to_string(&path).unwrap().replace("\"target\":100.0", "\"target\":200.0");
        fs::write(&path, text.replace("\"met\":true", "\"met\":false")).unwrap();
        assert_eq!(former(&path), rows);
    }
}
