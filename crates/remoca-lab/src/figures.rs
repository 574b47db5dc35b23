//! Figures that are measured against a target, and the files that they are kept in: `out/bench/NAME.json` of the project.
//!
//! Each benchmark writes its figures with [`save`]; `make bench-targets` reads them with [`load`], so that a figure which takes
//! a guest and half an hour need not be measured again. The target itself is not here: there is one table of them, in
//! `remoca-bench`.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::error::{Context, Error, Result};

/// Median, minimum and maximum over the rounds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

impl Spread {
    /// Returns the spread of the values, rounded to four digits. Returns `None` if there is no value, or one is not a number.
    pub fn of(mut values: Vec<f64>) -> Option<Self> {
        if values.iter().any(|value| !value.is_finite()) {
            return None;
        }
        values.sort_by(f64::total_cmp);
        let middle = values.len() / 2;
        let median = if values.len().is_multiple_of(2) {
            (values.get(middle.checked_sub(1)?)? + values.get(middle)?) / 2.0
        } else {
            *values.get(middle)?
        };
        let [min, median, max] = [*values.first()?, median, *values.last()?].map(|value| (value * 1e4).round() / 1e4);
        Some(Self { median, min, max })
    }
}

/// One measured figure.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    /// Name in the table of targets, such as `P9-d1`.
    pub id: String,
    pub value: f64,
    /// Number of rounds that the value is the median of.
    #[serde(default)]
    pub rounds: usize,
    /// The value of each round.
    #[serde(default)]
    pub spread: Option<Spread>,
    /// The same ratio for one thing measured against itself in the same rounds; `None` where nothing is compared.
    #[serde(default)]
    pub noise: Option<Spread>,
    /// Further figures of the same run that help to read the value, by name and unit.
    #[serde(default)]
    pub beside: BTreeMap<String, f64>,
}

impl Figure {
    /// Returns a figure that is one number, not a median of rounds.
    pub fn single(id: &str, value: f64) -> Self {
        Self { id: id.to_owned(), value, rounds: 1, spread: None, noise: None, beside: BTreeMap::new() }
    }

    /// Returns a figure that is the median of rounds.
    pub fn of_rounds(id: &str, rounds: usize, spread: Spread, noise: Option<Spread>) -> Self {
        Self { rounds, spread: Some(spread), noise, ..Self::single(id, spread.median) }
    }

    /// Adds a further figure of the same run.
    #[must_use]
    pub fn beside(mut self, name: &str, value: f64) -> Self {
        self.beside.insert(name.to_owned(), value);
        self
    }
}

/// Figures of one run of a benchmark.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Figures {
    /// When the run ended, in seconds since 1970.
    pub made_unix_s: u64,
    /// Processes that were ready to run in the last minute: above that of the benchmark, another load disturbed it.
    #[serde(default)]
    pub load_average: Option<f64>,
    pub figures: Vec<Figure>,
}

/// Returns `out/bench` of the project.
pub fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap_or(Path::new(".")).join("out/bench")
}

/// Writes figures, and the report that they come from, to `out/bench/NAME.json`, and returns its path.
pub fn save(name: &str, figures: &[Figure], report: &impl Serialize) -> Result<PathBuf> {
    save_in(&folder(), name, figures, report)
}

/// Returns the figures in `out/bench/NAME.json`, or `None` if there is no such file.
pub fn load(name: &str) -> Result<Option<Figures>> {
    load_from(&folder(), name)
}

fn save_in(folder: &Path, name: &str, figures: &[Figure], report: &impl Serialize) -> Result<PathBuf> {
    let path = folder.join(format!("{name}.json"));
    let value = json!({
        "made_unix_s": unix_s(), "load_average": load_average(), "figures": figures, "report": report,
    });
    fs::create_dir_all(folder).context_path("creating", folder)?;
    fs::write(&path, format!("{value:#}\n")).context_path("writing", &path)?;
    Ok(path)
}

fn load_from(folder: &Path, name: &str) -> Result<Option<Figures>> {
    let path = folder.join(format!("{name}.json"));
    let text = match fs::read(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        text => text.context_path("reading", &path)?,
    };
    let bad = |error| Error::Invalid(format!("{} has no figures: {error}", path.display()));
    serde_json::from_slice(&text).map(Some).map_err(bad)
}

/// Returns the time in seconds since 1970.
pub fn unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Returns the machine's load average of the last minute, or `None` if it is unknown.
pub fn load_average() -> Option<f64> {
    fs::read_to_string("/proc/loadavg").ok()?.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(Spread::of(vec![3.0, 1.0, 2.0]), Some(Spread { median: 2.0, min: 1.0, max: 3.0 }));
        assert_eq!(Spread::of(vec![4.0, 1.0]).map(|spread| spread.median), Some(2.5));
        assert_eq!(Spread::of(vec![]), None);
        assert_eq!(Spread::of(vec![1.0, f64::NAN]), None);
        assert_eq!(Spread::of(vec![1.0, f64::INFINITY]), None);
    }

    #[test]
    fn what_is_saved_is_loaded() {
        let folder = tempfile::tempdir().unwrap();
        assert!(load_from(folder.path(), "some").unwrap().is_none());
        let spread = Spread { median: 0.5, min: 0.25, max: 0.75 };
        let figures = [
            Figure::of_rounds("P9-d1", 3, spread, Some(spread)).beside("hit_us", 7.0),
            Figure::single("P20-lost", 0.0),
        ];
        save_in(folder.path(), "some", &figures, &json!({ "more": 1 })).unwrap();
        let loaded = load_from(folder.path(), "some").unwrap().unwrap();
        assert_eq!(loaded.figures, figures);
        assert!(loaded.made_unix_s > 1_700_000_000);
    }

    #[test]
    fn figures_need_only_a_name_and_a_value() {
        let folder = tempfile::tempdir().unwrap();
        let text = r#"{"made_unix_s": 5, "figures": [{"id": "P16-cannot", "value": 1.01}]}"#;
        fs::write(folder.path().join("streams.json"), text).unwrap();
        let loaded = load_from(folder.path(), "streams").unwrap().unwrap();
        assert_eq!((loaded.figures[0].value, loaded.figures[0].rounds), (1.01, 0));
        fs::write(folder.path().join("streams.json"), "[1]").unwrap();
        assert!(load_from(folder.path(), "streams").is_err());
    }
}
