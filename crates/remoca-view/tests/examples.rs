//! The dashboard and the alerts of the package name metrics that there are.

#![allow(clippy::unwrap_used, reason = "in a test a surprise is a failure")]

use remoca_view::metrics::{Form, text};
use remoca_view::testing::full_snapshot;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;
use yaml_rust2::{Yaml, YamlLoader};

const DASHBOARD: &str = include_str!("../../../packaging/grafana-dashboard.json");
const ALERTS: &str = include_str!("../../../packaging/prometheus-alerts.yaml");
const ALERT_TESTS: &str = include_str!("alerts.test.yaml");
const DASHBOARD_TESTS: &str = include_str!("dashboard.test.yaml");

/// What Prometheus itself says of a scrape of `remoca web`.
const SCRAPED: &str = "up{job=";

/// Names of all metrics, each with its labels, of which a scrape adds two.
static METRICS: LazyLock<BTreeMap<String, BTreeSet<String>>> = LazyLock::new(|| {
    let text = text(&full_snapshot(1), Form::Prometheus);
    let mut metrics: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (name, labels) in text.lines().filter(|line| !line.starts_with('#')).flat_map(named) {
        metrics.entry(name.into()).or_default().extend(labels.into_iter().chain(["instance", "job"]).map(String::from));
    }
    metrics
});

/// Returns the names of the metrics in a text, each with the labels that are named after it.
fn named(text: &str) -> Vec<(&str, Vec<&str>)> {
    let metric = |(at, _): (usize, &str)| {
        let rest = &text[at..];
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
        let (name, rest) = rest.split_at(end);
        let chosen = rest.strip_prefix('{').and_then(|rest| rest.split('}').next()).unwrap_or_default();
        let labels = chosen.split(',').filter_map(|part| part.split_once('='));
        (name, labels.map(|(label, _)| label.trim_end_matches('!')).collect())
    };
    text.match_indices("remoca_").map(metric).collect()
}

#[track_caller]
fn expect_metrics(text: &str) {
    let named = named(text);
    assert!(!named.is_empty() || text.contains(SCRAPED), "no metric in {text}");
    for (name, labels) in named {
        let known = METRICS.get(name).unwrap_or_else(|| panic!("there is no {name}, which is in {text}"));
        let unknown: Vec<_> = labels.into_iter().filter(|label| !known.contains(*label)).collect();
        assert!(unknown.is_empty(), "{name} has no {unknown:?}, which is in {text}");
    }
}

/// Expects that the metrics of an expression have the labels that a template fills in.
#[track_caller]
fn expect_labels(template: &str, expression: &str) {
    for part in template.split("{{").skip(1) {
        let label = part.split("}}").next().unwrap_or_default().trim().trim_start_matches("$labels.");
        let has_it = |(name, _): (&str, Vec<&str>)| METRICS[name].contains(label);
        assert!(label.starts_with("$value") || named(expression).into_iter().all(has_it), "no {label} for {template}");
    }
}

#[test]
fn the_dashboard_shows_metrics_that_there_are() {
    let dashboard: serde_json::Value = serde_json::from_str(DASHBOARD).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    assert!(panels.len() >= 10);
    for panel in panels {
        for target in panel["targets"].as_array().unwrap() {
            let expression = target["expr"].as_str().unwrap();
            expect_metrics(expression);
            expect_labels(target["legendFormat"].as_str().unwrap(), expression);
            let tested = format!("panel=\"{}_{}\"", panel["id"], target["refId"].as_str().unwrap());
            assert!(DASHBOARD_TESTS.contains(&tested), "no test expects {tested}");
        }
    }
    for variable in
        dashboard["templating"]["list"].as_array().unwrap().iter().filter(|variable| variable["type"] == "query")
    {
        expect_metrics(variable["query"].as_str().unwrap());
    }
}

#[test]
fn the_alerts_are_of_metrics_that_there_are_and_say_what_to_do() {
    let alerts = &YamlLoader::load_from_str(ALERTS).unwrap()[0];
    let rules = alerts["groups"][0]["rules"].as_vec().unwrap();
    assert!(rules.len() >= 10);
    for rule in rules {
        let (name, expression) = (rule["alert"].as_str().unwrap(), rule["expr"].as_str().unwrap());
        expect_metrics(expression);
        assert!(matches!(&rule["labels"]["severity"], Yaml::String(text) if !text.is_empty()), "{rule:?}");
        for part in ["summary", "action"] {
            let text = rule["annotations"][part].as_str().unwrap_or_default();
            assert!(!text.is_empty(), "{rule:?}");
            expect_labels(text, expression);
        }
        // That it fires, and what it says then.
        for tested in [format!("alertname=\"{name}\""), format!("alertname: {name}\n")] {
            assert!(ALERT_TESTS.contains(&tested), "no test expects {tested}");
        }
    }
}

#[test]
fn the_tests_of_alerts_and_dashboard_have_series_that_there_are() {
    let lines = [ALERT_TESTS, DASHBOARD_TESTS].into_iter().flat_map(str::lines);
    lines.filter(|line| line.contains("{series: ")).for_each(expect_metrics);
}

#[test]
fn the_unit_listens_on_loopback_and_can_write_nowhere() {
    let unit = include_str!("../../../packaging/remoca-web.service");
    let address = remoca_view::address::Address::default();
    for line in [
        &format!("ExecStart=/usr/bin/remoca web --listen {address}\n"),
        "IPAddressDeny=any\nIPAddressAllow=localhost\n",
        "\nCapabilityBoundingSet=\n",
        "\nProtectSystem=strict\n",
    ] {
        assert!(unit.contains(line), "{line}");
    }
}
