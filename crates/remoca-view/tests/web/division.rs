//! What the page tells of the daemon that divides memory, while there is one and when it is gone.

use super::site::{PATIENCE, Site, content};
use remoca_protocol::host::HostReport;
use remoca_view::testing::browser::Browser;
use remoca_view::testing::host_report;
use std::io::Write;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::{Duration, Instant};

#[track_caller]
fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < end, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Answers with this report where the page asks the daemon. Returns its socket.
fn answer_with(site: &Site, report: &HostReport) -> PathBuf {
    let path = site.folder.path().join("remoca-host.socket");
    let listener = UnixListener::bind(&path).unwrap();
    let line = report.line().unwrap();
    // A client may be gone by then.
    std::thread::spawn(move || listener.incoming().for_each(|stream| drop(stream.unwrap().write_all(&line))));
    path
}

#[test]
fn the_report_of_the_daemon_is_shown_as_long_as_it_answers() {
    let site = Site::start(2);
    let said = |path: &str, text: &str| content(&site.get(path, "")).contains(text);
    wait_until("there is a snapshot", || said("/metrics", "remoca_vms_answering 2"));
    assert!(said("/api/overview", "\"host_report\":null"));
    let path = answer_with(&site, &host_report());
    wait_until("it is shown", || said("/api/overview", "local tier: 3G of 4G given; all sizes are as they should be"));
    assert!(said("/metrics", "remoca_host_total_bytes{tier=\"local tier\"} 4294967296"));
    assert!(said("/api/snapshot", "\"why\":\"it gains\""));
    std::fs::remove_file(path).unwrap();
    wait_until("it is gone", || said("/api/overview", "\"host_report\":null"));
    assert!(said("/metrics", "remoca_vms_answering 2"));
}

#[test]
fn what_is_wrong_with_the_daemon_is_a_problem_of_the_host_in_a_browser() {
    let Some(browser) = Browser::find() else { return };
    let site = Site::start(2);
    answer_with(&site, &HostReport { interval_ms: Some(10_000), ..host_report() });
    wait_until("it hangs", || content(&site.get("/api/overview", "")).contains("host-hangs"));
    let seen = browser.open(&format!("http://{}/", site.address));
    assert!(seen.dom.contains("warning  this host</b>remoca host: it last looked"), "{}", seen.dom);
}

#[test]
fn a_daemon_that_is_stopped_is_told_from_one_that_is_not_there() {
    let site = Site::start(2);
    let said = |text: &str| content(&site.get("/api/overview", "")).contains(text);
    assert!(!said("host-silent"));
    let path = site.folder.path().join("remoca-host.socket");
    // As with one that is stopped, clients connect, and nobody answers.
    let stopped = UnixListener::bind(&path).unwrap();
    wait_until("it is missed", || said("\"host-silent\"") && said("remoca host") && said("it has not answered for "));
    drop(stopped);
    wait_until("it is gone", || !said("host-silent"));
}
