//! The control socket: a line of JSON from any client, and one from any server.

use remoca_protocol::control::{Command, Reply};

pub fn run(data: &[u8]) {
    if let Ok(command) = Command::parse(data) {
        assert_eq!(Command::parse(&command.line().unwrap()).unwrap(), command);
    }
    // A reply holds floating-point numbers, whose last digit may change when it is written and parsed again. It stays
    // a reply.
    if let Ok(reply) = Reply::parse(data) {
        let again = Reply::parse(&reply.line().unwrap()).unwrap();
        assert_eq!(matches!(again, Reply::Error { .. }), matches!(reply, Reply::Error { .. }));
    }
}

pub fn seeds() -> Vec<Vec<u8>> {
    let lines = [
        r#"{"op":"curve","disk":"data"}"#,
        r#"{"op":"status"}"#,
        r#"{"op":"set","cache_bytes":1073741824,"enabled":false,"servers":["tcp:192.0.2.1:7070","unix:/run/s"]}"#,
        r#"{"error":"busy"}"#,
    ];
    let seeds = lines.map(|line| line.as_bytes().to_vec()).to_vec();
    assert!(seeds[..3].iter().all(|line| Command::parse(line).is_ok()), "these are commands");
    seeds
}
