//! A page on a port of loopback and on a Unix socket, and a client that sends whatever it likes.

use remoca_view::address::Address;
use remoca_view::testing::{Change, Fleet};
use remoca_view::web::{self, Options};
use serde_json::Value;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Long enough for any machine, however busy.
pub const PATIENCE: Duration = Duration::from_secs(60);

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < end, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A running page. It ends with the test program.
pub struct Site {
    pub fleet: Fleet,
    pub address: SocketAddr,
    pub folder: TempDir,
}

impl Site {
    /// Starts a page of `count` VMs, and waits until it shows them all: one that does not answer within a second is left out.
    pub fn start(count: u32) -> Self {
        let site = Self::start_with(count, || {}, || {});
        let all = format!("remoca_vms_answering {count}\n");
        wait_until("all VMs answer", || content(&site.get("/metrics", "")).contains(&all));
        site
    }

    /// Changes what VM `number` says from now on, and waits until the page shows it.
    pub fn change(&self, number: u32, change: Change) {
        let shown = || -> u64 {
            let overview: Value = serde_json::from_str(content(&self.get("/api/overview", ""))).unwrap();
            overview["snapshot"].as_u64().unwrap()
        };
        self.fleet.change(number, change);
        // The VMs may have been asked for the next snapshot already.
        let next = shown() + 2;
        wait_until("the page shows another snapshot", || shown() >= next);
    }

    /// Starts a page of `count` VMs. The thread that asks them calls `before_asking` for each snapshot, and the one that answers requests
    /// calls `before_answering` once.
    pub fn start_with(
        count: u32,
        before_asking: impl Fn() + Send + 'static,
        before_answering: impl FnOnce() + Send + 'static,
    ) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let fleet = Fleet::start(folder.path(), count);
        let sockets = fleet.sockets.clone();
        let options = Options {
            listen: vec!["127.0.0.1:0".parse().unwrap(), Address::Unix(folder.path().join("page"))],
            hosts: Vec::new(),
            group: None,
            interval: Duration::from_secs(1),
            sockets: Box::new(move || {
                before_asking();
                sockets.clone()
            }),
            host_socket: Some(folder.path().join("remoca-host.socket")),
        };
        let (ready, is_ready) = channel();
        let say = move |addresses: &[String]| {
            before_answering();
            ready.send(addresses[0].clone()).unwrap();
        };
        std::thread::spawn(move || web::run(options, say));
        let address = is_ready.recv_timeout(PATIENCE).unwrap();
        let address = address.trim_start_matches("http://").trim_end_matches('/').parse().unwrap();
        Self { fleet, address, folder }
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// Sends bytes, and returns all that comes until the connection ends.
    pub fn send(&self, bytes: &[u8]) -> String {
        exchange(self.connect(), bytes)
    }

    /// Asks for a path as a browser does, with more lines in the head.
    pub fn get(&self, path: &str, lines: &str) -> String {
        self.send(format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{lines}\r\n").as_bytes())
    }

    pub fn connect_unix(&self) -> UnixStream {
        UnixStream::connect(self.folder.path().join("page")).unwrap()
    }
}

/// Sends bytes, and returns all that comes until the connection ends.
pub fn exchange(mut stream: impl Read + Write, bytes: &[u8]) -> String {
    // The page may answer and close before it has everything.
    let _ = stream.write_all(bytes);
    let mut answer = Vec::new();
    if let Err(error) = stream.read_to_end(&mut answer) {
        assert_eq!(error.kind(), ErrorKind::ConnectionReset, "the connection stays: {error}");
    }
    String::from_utf8(answer).unwrap()
}

/// Returns the number in the first line of an answer.
pub fn code(answer: &str) -> u16 {
    answer.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or_else(|| panic!("no answer: {answer:?}"))
}

/// Returns what follows the head of an answer.
pub fn content(answer: &str) -> &str {
    answer.split_once("\r\n\r\n").unwrap().1
}
