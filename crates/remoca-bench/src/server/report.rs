//! Reports the measurements as ratios within a round, as a table and as JSON.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::{Value, json};

use super::client::Measure;
use super::plan::{Cell, Contender};

/// One measurement.
pub(crate) struct Sample {
    pub(crate) cell: Cell,
    pub(crate) contender: Contender,
    pub(crate) round: usize,
    pub(crate) measure: Measure,
    pub(crate) server_cpu_us: f64,
}

impl Sample {
    #[expect(clippy::cast_precision_loss, reason = "far fewer pages than 2^52")]
    fn pages(&self) -> f64 {
        self.measure.pages as f64
    }

    fn kops(&self) -> f64 {
        self.pages() / self.measure.elapsed.as_secs_f64() / 1e3
    }

    fn server_us(&self) -> f64 {
        self.server_cpu_us / self.pages()
    }

    fn client_us(&self) -> f64 {
        self.measure.client_cpu.as_secs_f64() * 1e6 / self.pages()
    }
}

/// Median, minimum and maximum over the rounds.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Spread {
    median: f64,
    min: f64,
    max: f64,
}

impl Spread {
    fn of(mut values: Vec<f64>) -> Option<Self> {
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

pub(crate) struct Report {
    samples: Vec<Sample>,
    rounds: usize,
}

type Figure = fn(&Sample) -> f64;

impl Report {
    pub(crate) fn new(samples: Vec<Sample>, rounds: usize) -> Self {
        Self { samples, rounds }
    }

    fn value(&self, cell: Cell, contender: Contender, round: usize, figure: Figure) -> Option<f64> {
        let mut matching = self.samples.iter().filter(|s| (s.cell, s.contender, s.round) == (cell, contender, round));
        matching.next().map(figure)
    }

    /// Returns the figure of the raw server: the mean of its two measurements in the round. Returns `None` if one is
    /// missing.
    fn raw(&self, cell: Cell, round: usize, figure: Figure) -> Option<f64> {
        let twice = [Contender::RawA, Contender::RawB].map(|raw| self.value(cell, raw, round, figure));
        let [Some(a), Some(b)] = twice else { return None };
        Some(f64::midpoint(a, b))
    }

    fn spread(&self, of_round: impl Fn(usize) -> Option<f64>) -> Option<Spread> {
        Spread::of((0..self.rounds).filter_map(of_round).collect())
    }

    /// Returns the memory server's figure divided by that of another contender.
    fn ratio(&self, cell: Cell, other: Contender, figure: Figure) -> Option<Spread> {
        self.spread(|round| {
            let theirs = match other {
                Contender::RawA | Contender::RawB => self.raw(cell, round, figure),
                _ => self.value(cell, other, round, figure),
            };
            Some(self.value(cell, Contender::Remoca, round, figure)? / theirs?)
        })
    }

    fn noise(&self, cell: Cell, figure: Figure) -> Option<Spread> {
        self.spread(|round| {
            let second = self.value(cell, Contender::RawB, round, figure)?;
            Some(second / self.value(cell, Contender::RawA, round, figure)?)
        })
    }

    /// Returns all ratios, by name.
    pub(crate) fn ratios(&self) -> BTreeMap<String, Spread> {
        let mut ratios = BTreeMap::new();
        for cell in Cell::ALL {
            let name = cell.name();
            let throughput: Figure = Sample::kops;
            let all = [
                (format!("ratio_raw_{name}"), self.ratio(cell, Contender::RawA, throughput)),
                (format!("ratio_memcached_{name}"), self.ratio(cell, Contender::Memcached, throughput)),
                (format!("ratio_redis_{name}"), self.ratio(cell, Contender::Redis, throughput)),
                (format!("server_cpu_ratio_raw_{name}"), self.ratio(cell, Contender::RawA, Sample::server_us)),
                (
                    format!("server_cpu_ratio_memcached_{name}"),
                    self.ratio(cell, Contender::Memcached, Sample::server_us),
                ),
                (format!("aa_ratio_{name}"), self.noise(cell, throughput)),
                (format!("aa_server_cpu_ratio_{name}"), self.noise(cell, Sample::server_us)),
            ];
            ratios.extend(all.into_iter().filter_map(|(name, spread)| Some((name, spread?))));
        }
        ratios
    }

    pub(crate) fn json(&self, conditions: Value) -> Value {
        let ratios = self.ratios();
        let mut report = serde_json::Map::new();
        report.extend(ratios.iter().map(|(name, spread)| (name.clone(), json!(spread.median))));
        report.insert("expectations".into(), json!(expectations(&ratios)));
        report.insert("spreads".into(), json!(ratios));
        report.insert("cells".into(), self.cells());
        report.insert("conditions".into(), conditions);
        Value::Object(report)
    }

    fn cells(&self) -> Value {
        let mut cells = Vec::new();
        for cell in Cell::ALL {
            for contender in Contender::ALL {
                let spread = |figure: Figure| self.spread(|round| self.value(cell, contender, round, figure));
                if let Some(kops) = spread(Sample::kops) {
                    cells.push(json!({
                        "cell": cell.name(), "server": contender.name(), "kops": kops,
                        "server_cpu_us_per_page": spread(Sample::server_us),
                        "client_cpu_us_per_page": spread(Sample::client_us),
                    }));
                }
            }
        }
        Value::Array(cells)
    }

    /// Returns the figures as a table.
    pub(crate) fn table(&self) -> String {
        let mut text = String::new();
        let mut line = |arguments: std::fmt::Arguments<'_>| text += &format!("{arguments}\n");
        line(format_args!(
            "{:14} {:10} {:>9} {:>15} {:>15} {:>11}",
            "", "", "kops", "server us/page", "client us/page", "kops : raw"
        ));
        for cell in Cell::ALL {
            for contender in Contender::ALL {
                let median = |figure: Figure| {
                    self.spread(|round| self.value(cell, contender, round, figure)).map(|spread| spread.median)
                };
                let Some(kops) = median(Sample::kops) else { continue };
                let to_raw = self.spread(|round| {
                    Some(self.value(cell, contender, round, Sample::kops)? / self.raw(cell, round, Sample::kops)?)
                });
                line(format_args!(
                    "{:14} {:10} {kops:9.1} {:15.2} {:15.2} {:11.2}",
                    cell.name(),
                    contender.name(),
                    median(Sample::server_us).unwrap_or(f64::NAN),
                    median(Sample::client_us).unwrap_or(f64::NAN),
                    to_raw.map_or(f64::NAN, |spread| spread.median),
                ));
            }
        }
        line(format_args!(""));
        for expectation in expectations(&self.ratios()) {
            line(format_args!("{expectation}"));
        }
        text
    }
}

/// A requirement of the design, and the measured figure.
#[derive(Serialize)]
struct Expectation {
    what: &'static str,
    ratio: &'static str,
    at_least: Option<f64>,
    at_most: Option<f64>,
    measured: f64,
    met: bool,
}

impl std::fmt::Display for Expectation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (word, bound) = match (self.at_least, self.at_most) {
            (Some(bound), _) => ("at least", bound),
            (None, bound) => ("at most", bound.unwrap_or(f64::INFINITY)),
        };
        let verdict = if self.met { "met" } else { "MISSED" };
        write!(f, "{:32} {:6.2}  ({word} {bound}: {verdict})  {}", self.ratio, self.measured, self.what)
    }
}

fn expectations(ratios: &BTreeMap<String, Spread>) -> Vec<Expectation> {
    let wanted = [
        ("P1 throughput beside raw", "ratio_raw_d32x4", Some(0.75), None),
        ("P1 throughput beside memcached", "ratio_memcached_d32x4", Some(1.5), None),
        ("P1 server CPU beside raw", "server_cpu_ratio_raw_d32x4", None, Some(1.3)),
        ("P2 server CPU beside raw", "server_cpu_ratio_raw_d32", None, Some(1.25)),
        ("P3 time of one get beside raw", "ratio_raw_d1", Some(1.0 / 1.05), None),
        ("P4 server CPU of one SENDPAGE beside raw", "server_cpu_ratio_raw_set_d32", None, Some(1.4)),
    ];
    let expectation = |(what, ratio, at_least, at_most): (_, _, Option<f64>, Option<f64>)| {
        let measured = ratios.get(ratio)?.median;
        let met = at_least.is_none_or(|bound| measured >= bound) && at_most.is_none_or(|bound| measured <= bound);
        Some(Expectation { what, ratio, at_least, at_most, measured, met })
    };
    wanted.into_iter().filter_map(expectation).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn ratios_are_of_the_same_round() {
        // Each round is twice as slow as the previous one, for all contenders.
        let sample = |contender, round, pages| Sample {
            cell: Cell::D32x4,
            contender,
            round,
            measure: Measure { pages, elapsed: Duration::from_secs(1 << round), client_cpu: Duration::from_secs(1) },
            server_cpu_us: 1e6,
        };
        let samples = (0..3)
            .flat_map(|round| {
                [
                    sample(Contender::RawA, round, 90),
                    sample(Contender::Remoca, round, 80),
                    sample(Contender::RawB, round, 110),
                ]
            })
            .collect();
        let report = Report::new(samples, 3);
        let ratios = report.ratios();
        let figures = |name: &str| ratios.get(name).map(|spread| (spread.min, spread.median, spread.max));
        assert_eq!(figures("ratio_raw_d32x4"), Some((0.8, 0.8, 0.8)));
        assert_eq!(figures("aa_ratio_d32x4"), Some((1.2222, 1.2222, 1.2222)));
        assert_eq!(figures("ratio_memcached_d32x4"), None);
        assert_eq!(report.json(json!({}))["ratio_raw_d32x4"], 0.8);
    }

    #[test]
    fn medians() {
        assert_eq!(Spread::of(vec![3.0, 1.0, 2.0]).map(|spread| spread.median), Some(2.0));
        assert_eq!(Spread::of(vec![4.0, 1.0]).map(|spread| spread.median), Some(2.5));
        assert!(Spread::of(vec![]).is_none());
    }
}
