//! A client against QEMUs that answer, hang, lie and die.

use super::*;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::thread::{self, JoinHandle};

const SOON: Duration = Duration::from_millis(100);
const EACH: Limit = Limit::Each(Duration::from_secs(30));
/// Some systems have sockets that take megabytes before anybody reads.
const SOCKET_BYTES: usize = 64 << 10;
const OPENED: &str = "{\"QMP\":{}}\r\n{\"return\":{},\"id\":1}\r\n";

/// Opens a monitor that has sent `text` and keeps silent, or has ended.
fn opened(text: &[u8], limit: Limit, has_ended: bool) -> (Result<Qmp>, Option<UnixStream>) {
    let (socket, mut qemu) = UnixStream::pair().unwrap();
    qemu.write_all(text).unwrap();
    let qemu = if has_ended { qemu.shutdown(std::net::Shutdown::Write).map(|()| None).unwrap() } else { Some(qemu) };
    (Qmp::open(socket, limit), qemu)
}

fn error_within(limit: Limit, text: &str) -> String {
    opened(text.as_bytes(), limit, false).0.map(drop).unwrap_err().to_string()
}

fn error(text: &str) -> String {
    error_within(EACH, text)
}

#[test]
fn answers_are_found_among_events_and_refusals_are_told() {
    let rest = "{\"event\":\"STOP\"}\n{\"return\":{\"running\":true},\"id\":2}\n\
                {\"id\":3,\"error\":{\"class\":\"DeviceNotActive\",\"desc\":\"no\\u001b[2J\"}}\n{\"id\":4,\"return\":{}}\n";
    let (qmp, _qemu) = opened(format!("{OPENED}{rest}").as_bytes(), EACH, false);
    let mut qmp = qmp.unwrap();
    assert!(qmp.is_running().unwrap());
    let refused = qmp.pause().unwrap_err();
    assert!(refused.is_refusal("DeviceNotActive") && !refused.is_refusal("GenericError"));
    assert_eq!(refused.to_string(), "stop: no [2J");
    qmp.resume().unwrap();
}

#[test]
fn what_is_no_monitor_is_told() {
    assert!(error("{\"hello\":1}\n").contains("it greets with {\"hello\":1}"));
    assert!(error("SSH-2.0-OpenSSH\r\n").contains("does not speak QMP"));
    assert!(error("{\"QMP\":{}}\n{\"return\":{}}\n").contains("answers qmp_capabilities with"));
    assert!(error("{\"QMP\":{}}\n{\"id\":1}\n").contains("answers qmp_capabilities with"));
    assert!(error("[1]\n").contains("it greets with [1]"));
    assert!(error(&format!("{}\n", "[".repeat(100_000))).contains("does not speak QMP"));
    let long = error(&format!("{}\n", "x".repeat(100_000)));
    assert!(long.len() < 600, "{long}");
}

#[test]
fn one_that_hangs_is_left_in_time_and_not_asked_again() {
    for text in ["", "{\"QMP\":{}}\n", "{\"QMP\":{}", "{\"QMP\":{}}\n{\"event\":\"STOP\"}\n{\"return\""] {
        assert!(error_within(Limit::Each(SOON), text).contains("did not answer in time"), "{text}");
    }
    let (qmp, mut qemu) = opened(OPENED.as_bytes(), EACH, false);
    let mut qmp = qmp.unwrap();
    qmp.limit = Limit::Each(SOON);
    assert!(matches!(qmp.pause(), Err(Error::Silent)));
    qemu.as_mut().unwrap().write_all(b"{\"return\":{},\"id\":2}\n").unwrap();
    assert!(matches!(qmp.resume(), Err(Error::Closed)), "the answer to another command is none to this one");
    let past = Limit::Until(Instant::now());
    assert!(matches!(opened(OPENED.as_bytes(), past, false).0, Err(Error::Silent)));
}

#[test]
fn one_that_dies_is_noticed() {
    for text in ["", "{\"QMP\":{}}\n", "{\"QMP\":{}}\n{\"ret"] {
        assert!(matches!(opened(text.as_bytes(), EACH, true).0, Err(Error::Closed)), "{text}");
    }
    let (qmp, qemu) = opened(OPENED.as_bytes(), EACH, false);
    drop(qemu);
    let mut qmp = qmp.unwrap();
    assert!(matches!(qmp.pause(), Err(Error::Closed)));
    assert!(matches!(qmp.pause(), Err(Error::Closed)));
}

/// Sends `piece` until the client has had enough.
fn endless(piece: &'static str) -> (UnixStream, JoinHandle<usize>) {
    let (socket, mut qemu) = UnixStream::pair().unwrap();
    sockopt::set_socket_send_buffer_size(&qemu, SOCKET_BYTES).unwrap();
    let sender = thread::spawn(move || {
        qemu.write_all(OPENED.as_bytes()).unwrap();
        let block = piece.repeat((64 << 10) / piece.len());
        let mut sent = 0;
        while qemu.write_all(block.as_bytes()).is_ok() {
            sent += block.len();
        }
        sent
    });
    (socket, sender)
}

#[test]
fn endless_lines_and_endless_events_end() {
    for piece in ["x", "{\"event\":\"STOP\"}\n"] {
        let (socket, sender) = endless(piece);
        let mut qmp = Qmp::open(socket, EACH).unwrap();
        let error = qmp.pause().unwrap_err().to_string();
        assert!(error.contains("more than"), "{error}");
        drop(qmp);
        // What the client has not read is in the buffers of two sockets.
        let sent = sender.join().unwrap();
        assert!(sent < 2 * ANSWER_BYTES_MAX, "{sent}");
    }
}

#[test]
fn a_command_that_is_not_read_is_not_waited_for() {
    let (socket, mut qemu) = UnixStream::pair().unwrap();
    qemu.write_all(OPENED.as_bytes()).unwrap();
    sockopt::set_socket_send_buffer_size(&socket, SOCKET_BYTES).unwrap();
    let mut qmp = Qmp::open(socket, EACH).unwrap();
    // It takes its time to make the command.
    qmp.limit = Limit::Each(Duration::from_secs(3));
    let long = "x".repeat(8 << 20);
    assert!(matches!(qmp.execute("a", json!({ "long": long })), Err(Error::Silent)));
}

#[test]
fn a_monitor_is_reached_by_its_path() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("qmp");
    assert!(matches!(Qmp::connect(&path, EACH), Err(Error::Absent)));
    let listener = UnixListener::bind(&path).unwrap();
    let answers = thread::spawn(move || {
        let (mut qemu, _) = listener.accept().unwrap();
        qemu.write_all(OPENED.as_bytes()).unwrap();
        let mut lines = BufReader::new(qemu).lines();
        assert_eq!(lines.next().unwrap().unwrap(), r#"{"arguments":{},"execute":"qmp_capabilities","id":1}"#);
        listener
    });
    Qmp::connect(&path, EACH).unwrap();
    let listener = answers.join().unwrap();
    // Nobody accepts any more: clients wait in the queue until it is full, and then for a place in it.
    net::listen(&listener, 1).unwrap();
    let busy = |_| matches!(Qmp::connect(&path, Limit::Each(Duration::from_millis(2))), Err(Error::Silent));
    assert!((0..5).all(busy));
}
