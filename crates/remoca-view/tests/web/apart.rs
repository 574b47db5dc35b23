//! One thread asks VM processes, and another one answers requests: neither waits for the other.

use super::site::{PATIENCE, Site, code, content};
use serde_json::Value;
use std::sync::mpsc::channel;

/// Returns the number of the newest snapshot.
#[track_caller]
fn number(site: &Site) -> u64 {
    let overview: Value = serde_json::from_str(content(&site.get("/api/overview", ""))).unwrap();
    overview["snapshot"].as_u64().unwrap()
}

#[test]
fn processes_are_asked_while_requests_keep_the_page_busy() {
    let (asked, is_asked) = channel();
    let before_asking = move || {
        // Later on nobody counts.
        let _ = asked.send(());
    };
    let before_answering = move || (0..3).for_each(|_| is_asked.recv_timeout(PATIENCE).expect("processes are asked"));
    let site = Site::start_with(1, before_asking, before_answering);
    // Before the third snapshot is begun, the second one is there.
    assert!(number(&site) >= 2);
}

#[test]
fn requests_are_answered_while_a_snapshot_is_taken() {
    let ((asked, is_asked), (go_on, may_go_on)) = (channel(), channel());
    let before_asking = move || {
        let _ = asked.send(());
        let _ = may_go_on.recv();
    };
    go_on.send(()).unwrap();
    let site = Site::start_with(1, before_asking, || {});
    (0..2).for_each(|_| is_asked.recv_timeout(PATIENCE).unwrap());
    // Now the second snapshot is being taken, for as long as this test likes.
    for path in ["/", "/metrics", "/api/snapshot", "/api/status", "/api/vm/web000"] {
        assert_eq!(code(&site.get(path, "")), 200, "{path}");
    }
    assert_eq!(number(&site), 1);
    drop(go_on);
}
