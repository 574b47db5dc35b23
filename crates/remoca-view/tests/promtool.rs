//! Prometheus' own tool evaluates the alerts and the dashboard of the package.

#![allow(clippy::unwrap_used, reason = "in a test a surprise is a failure")]

use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;

/// Unpacks promtool from its package, which Debian 12 does not have: there it is in that of Prometheus. Neither is installed, as the
/// latter would start a service.
const FETCH: &str = "
    apt-get -q -o Acquire::Retries=3 download promtool || apt-get -q -o Acquire::Retries=3 download prometheus
    dpkg-deb --fsys-tarfile *.deb | tar -x ./usr/bin/promtool";

/// Path of promtool, or why there is none.
static PROMTOOL: LazyLock<Result<PathBuf, String>> = LazyLock::new(find);

/// Finds promtool in the search path or in the project's cache. Fetches it if it is in neither (19 MB, once).
fn find() -> Result<PathBuf, String> {
    if Command::new("promtool").arg("--version").output().is_ok_and(|output| output.status.success()) {
        return Ok("promtool".into());
    }
    let cache = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache");
    let program = cache.join("promtool");
    if !program.is_file() {
        fetch(&cache, &program)?;
    }
    Ok(program)
}

fn fetch(cache: &Path, program: &Path) -> Result<(), String> {
    fs::create_dir_all(cache).unwrap();
    let folder = tempfile::Builder::new().prefix("promtool-").tempdir_in(cache).unwrap();
    let fetch =
        Command::new("sh").args(["-ec", FETCH]).current_dir(folder.path()).stdin(Stdio::null()).output().unwrap();
    if !fetch.status.success() {
        let said = String::from_utf8_lossy(&fetch.stderr).into_owned();
        return Err(format!(
            "promtool cannot be fetched: run `apt-get update` as root and try again, or put a promtool into the search path\n{said}"
        ));
    }
    fs::rename(folder.path().join("usr/bin/promtool"), program).unwrap();
    Ok(())
}

/// Runs promtool in a folder, and expects that it is content.
#[track_caller]
fn expect(folder: &Path, arguments: &[&str]) {
    let program = PROMTOOL.as_ref().unwrap_or_else(|why| panic!("{why}"));
    let output = Command::new(program).args(arguments).current_dir(folder).output().unwrap();
    let said = [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned()).concat();
    assert!(output.status.success(), "{said}");
}

#[test]
fn the_alerts_fire_when_something_is_wrong_and_only_then() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    expect(&folder, &["check", "rules", "../../../packaging/prometheus-alerts.yaml"]);
    expect(&folder, &["test", "rules", "alerts.test.yaml"]);
}

#[test]
fn the_panels_of_the_dashboard_show_what_is_chosen() {
    let dashboard: Value = serde_json::from_str(include_str!("../../../packaging/grafana-dashboard.json")).unwrap();
    let mut rules = Vec::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().unwrap() {
            let record = format!("panel_{}_{}", panel["id"], target["refId"].as_str().unwrap());
            rules.push(json!({"record": record, "expr": asked(target["expr"].as_str().unwrap())}));
        }
    }
    let folder = tempfile::tempdir().unwrap();
    // JSON is YAML.
    let rules = json!({"groups": [{"name": "dashboard", "rules": rules}]});
    fs::write(folder.path().join("dashboard.json"), rules.to_string()).unwrap();
    fs::write(folder.path().join("dashboard.test.yaml"), include_str!("dashboard.test.yaml")).unwrap();
    expect(folder.path(), &["test", "rules", "dashboard.test.yaml"]);
}

/// Returns an expression as Grafana asks it with two VMs chosen, at a scrape each minute.
fn asked(expression: &str) -> String {
    expression.replace("$instance", "h:1").replace("$vm", "web1|idle").replace("$__rate_interval", "4m")
}
