//! A page that can show nothing new ends, so that its unit starts it again.

use remoca_view::web::{self, Options};
use std::time::Duration;

#[test]
fn a_page_without_more_snapshots_ends() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("page");
    let options = Options {
        listen: vec![format!("unix:{}", path.display()).parse().unwrap()],
        hosts: Vec::new(),
        group: None,
        interval: Duration::from_secs(1),
        sockets: Box::new(|| panic!("nobody finds sockets")),
        host_socket: None,
    };
    let error = web::run(options, |_| {}).unwrap_err().to_string();
    assert!(error.contains("no more snapshots") && error.contains("panicked"), "{error}");
    assert!(!path.exists(), "its socket is removed");
}
