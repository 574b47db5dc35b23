//! Reports the measurements as ratios within a round, as a table and as JSON.

use std::collections::BTreeMap;

use remoca_lab::figures::{Figure, Spread};
use serde_json::{Value, json};

use super::client::Measure;
use super::plan::{Cell, Contender};
use crate::wanted;

/// One measurement.
pub(crate) struct Sample {
    pub(crate) cell: Cell,
    pub(crate) contender: Contender,
    pub(crate) round: usize,
    pub(crate) measure: Measure,
    pub(crate) server_cpu_us: f64,
}

impl Sample {
    fn kops(&self) -> f64 {
        self.measure.pages_f64() / self.measure.elapsed.as_secs_f64() / 1e3
    }

    fn server_us(&self) -> f64 {
        self.server_cpu_us / self.measure.pages_f64()
    }

    fn client_us(&self) -> f64 {
        self.measure.client_cpu.as_secs_f64() * 1e6 / self.measure.pages_f64()
    }
}

pub(crate) struct Report {
    samples: Vec<Sample>,
    rounds: usize,
}

/// What is taken of a sample.
type Part = fn(&Sample) -> f64;

impl Report {
    pub(crate) fn new(samples: Vec<Sample>, rounds: usize) -> Self {
        Self { samples, rounds }
    }

    fn value(&self, cell: Cell, contender: Contender, round: usize, figure: Part) -> Option<f64> {
        let mut matching = self.samples.iter().filter(|s| (s.cell, s.contender, s.round) == (cell, contender, round));
        matching.next().map(figure)
    }

    /// Returns the figure of the raw server: the mean of its two measurements in the round. Returns `None` if one is
    /// missing.
    fn raw(&self, cell: Cell, round: usize, figure: Part) -> Option<f64> {
        let twice = [Contender::RawA, Contender::RawB].map(|raw| self.value(cell, raw, round, figure));
        let [Some(a), Some(b)] = twice else { return None };
        Some(f64::midpoint(a, b))
    }

    fn spread(&self, of_round: impl Fn(usize) -> Option<f64>) -> Option<Spread> {
        Spread::of((0..self.rounds).filter_map(of_round).collect())
    }

    /// Returns the memory server's figure divided by that of another contender.
    fn ratio(&self, cell: Cell, other: Contender, figure: Part) -> Option<Spread> {
        self.spread(|round| {
            let theirs = match other {
                Contender::RawA | Contender::RawB => self.raw(cell, round, figure),
                _ => self.value(cell, other, round, figure),
            };
            Some(self.value(cell, Contender::Remoca, round, figure)? / theirs?)
        })
    }

    fn noise(&self, cell: Cell, figure: Part) -> Option<Spread> {
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
            let throughput: Part = Sample::kops;
            let all = [
                (format!("ratio_raw_{name}"), self.ratio(cell, Contender::RawA, throughput)),
                (format!("ratio_raw_headers_{name}"), self.ratio(cell, Contender::RawHeaders, throughput)),
                (format!("ratio_memcached_{name}"), self.ratio(cell, Contender::Memcached, throughput)),
                (format!("ratio_redis_{name}"), self.ratio(cell, Contender::Redis, throughput)),
                (format!("server_cpu_ratio_raw_{name}"), self.ratio(cell, Contender::RawA, Sample::server_us)),
                (
                    format!("server_cpu_ratio_raw_headers_{name}"),
                    self.ratio(cell, Contender::RawHeaders, Sample::server_us),
                ),
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

    /// Returns the figures that have a target, of the situations that were measured.
    pub(crate) fn figures(&self) -> Vec<Figure> {
        let kops: Part = Sample::kops;
        let time: Part = |sample| 1.0 / sample.kops();
        let cpu: Part = Sample::server_us;
        let all = [
            ("P1-raw", Cell::D32x4, Contender::RawHeaders, kops),
            ("P1-bare", Cell::D32x4, Contender::RawA, kops),
            ("P1-memcached", Cell::D32x4, Contender::Memcached, kops),
            ("P1-cpu", Cell::D32x4, Contender::RawA, cpu),
            ("P2", Cell::D32, Contender::RawA, cpu),
            ("P3-blocking", Cell::D1, Contender::RawA, time),
            ("P4", Cell::SetD32, Contender::RawA, cpu),
        ];
        let figure = |(id, cell, other, part): (&str, Cell, Contender, Part)| {
            let figure = Figure::of_rounds(id, self.rounds, self.ratio(cell, other, part)?, self.noise(cell, part));
            let to_headers = self.ratio(cell, Contender::RawHeaders, part);
            Some(match (other, to_headers) {
                (Contender::RawA, Some(ratio)) => figure.beside("over_raw_with_headers", ratio.median),
                _ => figure,
            })
        };
        all.into_iter().filter_map(figure).collect()
    }

    pub(crate) fn json(&self, conditions: Value) -> Value {
        let ratios = self.ratios();
        let mut report = serde_json::Map::new();
        report.extend(ratios.iter().map(|(name, spread)| (name.clone(), json!(spread.median))));
        report.insert("spreads".into(), json!(ratios));
        report.insert("cells".into(), self.cells());
        report.insert("conditions".into(), conditions);
        Value::Object(report)
    }

    fn cells(&self) -> Value {
        let mut cells = Vec::new();
        for cell in Cell::ALL {
            for contender in Contender::ALL {
                let spread = |figure: Part| self.spread(|round| self.value(cell, contender, round, figure));
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
                let median = |figure: Part| {
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
        text + &wanted::table_of(&self.figures())
    }
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
                    sample(Contender::RawHeaders, round, 160),
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
        assert_eq!(figures("ratio_raw_headers_d32x4"), Some((0.5, 0.5, 0.5)));
        assert_eq!(figures("ratio_memcached_d32x4"), None);
        assert_eq!(report.json(json!({}))["ratio_raw_d32x4"], 0.8);
        let of_targets = report.figures();
        let value = |id: &str| of_targets.iter().find(|figure| figure.id == id).map(|figure| figure.value);
        assert_eq!([value("P1-bare"), value("P1-raw"), value("P2")], [Some(0.8), Some(0.5), None]);
        assert_eq!(of_targets[0].noise.map(|noise| noise.median), Some(1.2222));
        assert_eq!(of_targets[0].rounds, 3);
    }
}
