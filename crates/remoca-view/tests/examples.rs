//! The dashboard and the alerts of the package name metrics that there are.

#![allow(clippy::unwrap_used, reason = "in a test a surprise is a failure")]

use remoca_view::metrics::{Form, text};
use remoca_view::testing::full_snapshot;
use std::collections::BTreeSet;
use yaml_rust2::{Yaml, YamlLoader};

const DASHBOARD: &str = include_str!("../../../packaging/grafana-dashboard.json");
const ALERTS: &str = include_str!("../../../packaging/prometheus-alerts.yaml");

/// Returns the names of metrics in an expression.
fn named(expression: &str) -> BTreeSet<&str> {
    let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("remoca_")).collect()
}

/// Returns the names of all metrics.
fn metrics() -> BTreeSet<String> {
    let text = text(&full_snapshot(1), Form::Prometheus);
    let names = text.lines().filter(|line| !line.starts_with('#'));
    names.filter_map(|line| Some(line.split(['{', ' ']).next()?.to_owned())).collect()
}

#[track_caller]
fn expect_metrics(expression: &str) {
    let names = named(expression);
    assert!(!names.is_empty(), "no metric in {expression}");
    let metrics = metrics();
    for name in names {
        assert!(metrics.contains(name), "there is no {name}, which is in {expression}");
    }
    let count = |part: char| expression.matches(part).count();
    assert!(count('(') == count(')') && count('{') == count('}') && count('[') == count(']'), "{expression}");
}

#[test]
fn the_dashboard_shows_metrics_that_there_are() {
    let dashboard: serde_json::Value = serde_json::from_str(DASHBOARD).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    assert!(panels.len() >= 10);
    for target in panels.iter().flat_map(|panel| panel["targets"].as_array().unwrap()) {
        expect_metrics(target["expr"].as_str().unwrap());
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
        expect_metrics(rule["expr"].as_str().unwrap());
        for part in [
            &rule["alert"],
            &rule["labels"]["severity"],
            &rule["annotations"]["summary"],
            &rule["annotations"]["action"],
        ] {
            assert!(matches!(part, Yaml::String(text) if !text.is_empty()), "{rule:?}");
        }
    }
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
