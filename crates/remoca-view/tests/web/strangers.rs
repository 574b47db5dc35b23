//! Requests that are no good: each gets one clear answer, nobody reads more than the page, and nobody is held up.

use super::site::{PATIENCE, Site, code, content, exchange};
use remoca_view::web::CONNECTIONS_MAX;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;

#[test]
fn all_paths_answer_and_say_what_a_browser_may_do_with_it() {
    let site = Site::start(2);
    for (path, kind, part) in [
        ("/", "text/html; charset=utf-8", "<title>remoca</title>"),
        ("/api/overview", "application/json", "\"problems\":"),
        ("/api/snapshot", "application/json", "\"taken_s\":"),
        ("/api/status", "application/json", "\"web001\""),
        ("/api/vm/web001", "application/json", "\"history\":"),
        ("/metrics", "text/plain; version=0.0.4; charset=utf-8", "remoca_vm_up{vm=\"web001\"} 1\n"),
        ("/healthz", "text/plain; charset=utf-8", "ok\n"),
    ] {
        let answer = site.get(path, "");
        assert_eq!(code(&answer), 200, "{path}");
        assert!(answer.contains(&format!("content-type: {kind}\r\n")) && answer.contains(part), "{path}: {answer}");
        for line in [
            "content-security-policy: default-src 'none'; style-src 'sha256-",
            "x-content-type-options: nosniff\r\n",
            "cross-origin-resource-policy: same-origin\r\n",
            "cache-control: no-store\r\n",
        ] {
            assert!(answer.contains(line), "{path} lacks `{line}`");
        }
        assert!(!answer.to_lowercase().contains("access-control-allow"), "{path}");
        let head =
            site.send(format!("HEAD {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").as_bytes());
        assert!(code(&head) == 200 && content(&head).is_empty(), "{head}");
    }
    let open = site.get("/metrics", "Accept: application/openmetrics-text;version=1.0.0\r\n");
    assert!(open.contains("content-type: application/openmetrics-text; version=1.0.0") && open.ends_with("# EOF\n"));
}

#[test]
fn a_page_is_not_read_under_another_name_and_nothing_is_changed() {
    let site = Site::start(1);
    let ask = |head: &str| site.send(format!("{head}\r\nConnection: close\r\n\r\n").as_bytes());
    for (head, wanted) in [
        ("GET /api/snapshot HTTP/1.1\r\nHost: evil.example", 421),
        ("GET /api/snapshot HTTP/1.1\r\nHost: evil.example:9170", 421),
        ("GET /api/snapshot HTTP/1.1", 400),
        ("GET /api/snapshot HTTP/1.1\r\nHost: localhost\r\nHost: evil.example", 400),
        ("GET http://evil.example/api/snapshot HTTP/1.1\r\nHost: localhost", 421),
        ("POST /api/snapshot HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0", 405),
        ("DELETE / HTTP/1.1\r\nHost: localhost", 405),
        ("OPTIONS / HTTP/1.1\r\nHost: localhost", 405),
        ("BREW / HTTP/1.1\r\nHost: localhost", 405),
    ] {
        let answer = ask(head);
        assert_eq!(code(&answer), wanted, "{head}: {answer}");
        assert!(!answer.contains("taken_s") && !content(&answer).is_empty(), "{head}: {answer}");
        assert!(wanted != 405 || answer.contains("allow: GET, HEAD\r\n"), "{answer}");
    }
    let told = ask("GET / HTTP/1.1\r\nHost: evil.example");
    assert!(told.contains("this page is not called `evil.example`") && told.contains("--host"), "{told}");
}

#[test]
fn there_is_nothing_beyond_the_paths() {
    let site = Site::start(1);
    for path in [
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/api/vm/..%2f..%2fetc%2fpasswd",
        "/api/vm/%00",
        "/api/vm/%ff%fe",
        "/api/vm/",
        "/api/vm/nobody",
        "//etc/passwd",
        "/page.js",
        "/index.html",
    ] {
        let answer = site.get(path, "");
        assert!([400, 404].contains(&code(&answer)), "{path}: {answer}");
        assert!(!answer.contains("root:"), "{path}");
    }
}

#[test]
fn huge_and_broken_heads_are_refused() {
    let site = Site::start(1);
    let long = format!("X-Long: {}\r\n", "a".repeat(64 << 10));
    assert_eq!(code(&site.get("/healthz", &long)), 431);
    let many: String = (0..200).map(|number| format!("X-{number}: a\r\n")).collect();
    assert_eq!(code(&site.get("/healthz", &many)), 431);
    let path = "/".repeat(64 << 10);
    assert!([414, 431].contains(&code(&site.get(&path, ""))));
    for broken in
        ["\0\0\0\0", "GET", "GET / HTTP/9.9\r\n\r\n", "\x16\x03\x01\x02\x00\x01", "GET / HTTP/1.1\r\nHost\r\n\r\n"]
    {
        let mut stream = site.connect();
        stream.write_all(broken.as_bytes()).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.is_empty() || code(&answer) == 400 || code(&answer) == 505, "{broken:?}: {answer}");
    }
    assert_eq!(code(&site.get("/healthz", "")), 200, "it lives");
}

/// More of them than the page has room for, each of which never finishes its request or never reads its answer.
#[test]
fn slow_clients_hold_up_nobody() {
    let site = Site::start(1);
    let mut slow = Vec::new();
    for number in 0..CONNECTIONS_MAX * 2 {
        let mut stream = site.connect();
        let head = "GET /api/snapshot HTTP/1.1\r\nHost: localhost\r\n";
        let sent = if number % 2 == 0 { head.to_owned() } else { format!("{head}\r\n") };
        // The page may have ended it already.
        let _ = stream.write_all(sent.as_bytes());
        slow.push(stream);
        if number % 16 == 0 {
            assert_eq!(code(&site.get("/healthz", "")), 200);
        }
    }
    assert_eq!(code(&site.get("/api/overview", "")), 200);
    // A client that sends nothing is not waited for. It ends when its time is over.
    let mut last = slow.pop().unwrap();
    let mut rest = Vec::new();
    last.set_read_timeout(Some(2 * PATIENCE)).unwrap();
    if let Err(error) = last.read_to_end(&mut rest) {
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{error}");
    }
}

#[test]
fn the_unix_socket_is_its_owners() {
    let site = Site::start(1);
    let mode = std::fs::metadata(site.folder.path().join("page")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let answer = exchange(site.connect_unix(), b"GET /healthz HTTP/1.0\r\nHost: localhost\r\n\r\n");
    assert!(code(&answer) == 200 && content(&answer) == "ok\n", "{answer}");
}
