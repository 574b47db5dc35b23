//! Fuzzing of the handshake. The input is the bytes that a stranger sends, both to the accepting side and to the
//! connecting side.
//!
//! Compiled only with the feature `testing`; never part of the program.

#![allow(clippy::unwrap_used, reason = "in a test a surprise is a failure")]

use super::{Acceptor, Connector};
use remoca_protocol::control::Secret;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Never reached: the stranger has sent everything, and shut down its sending side, before its bytes are read.
const PATIENCE: Duration = Duration::from_secs(600);
/// Longest input, in bytes. A socket buffers that much before it is read.
pub const LENGTH_MAX: usize = 4096;

/// Feeds the input to both sides. Whatever it is, it must prove nothing, and must get only the messages that TLS sends
/// before a proof.
pub fn run(data: &[u8]) {
    let secret: Secret = format!("{:064x}", 1).parse().unwrap();
    let deadline = Instant::now() + PATIENCE;
    let acceptor = Acceptor::new(&secret).unwrap();
    assert!(acceptor.accept(stranger(data).1.into(), deadline).is_err(), "a stranger was let in");
    let connector = Connector::new(&secret).unwrap();
    let (mut stranger, ours) = stranger(data);
    assert!(connector.connect(ours.into(), deadline).is_err(), "a stranger was taken for the target");
    let mut heard = Vec::new();
    let _ = stranger.read_to_end(&mut heard);
    assert!(heard.len() < 16 << 10, "{} bytes for a stranger", heard.len());
}

/// Returns both ends of a connection over which `data` was sent, and after which nothing more will come.
fn stranger(data: &[u8]) -> (UnixStream, UnixStream) {
    let (mut stranger, ours) = UnixStream::pair().unwrap();
    stranger.write_all(&data[..data.len().min(LENGTH_MAX)]).unwrap();
    stranger.shutdown(Shutdown::Write).unwrap();
    (stranger, ours)
}

/// Returns the seeds of the corpus: mainly beginnings of handshakes.
pub fn seeds() -> Vec<Vec<u8>> {
    let hello = client_hello();
    let alert = vec![21, 3, 3, 0, 2, 2, 40];
    let cut = hello[..hello.len() / 2].to_vec();
    let twice = [&hello[..], &hello].concat();
    vec![hello, cut, twice, alert, b"GET / HTTP/1.1\r\n\r\n".to_vec(), server_hello()]
}

/// Returns a ClientHello that the target answers: TLS 1.3 with raw public keys, and a valid key share.
fn client_hello() -> Vec<u8> {
    // The base point is a valid share of X25519, and zeroes are one of ML-KEM-768.
    let share = [vec![0; 1184], vec![9], vec![0; 31]].concat();
    let group = [0x11, 0xec];
    let extensions = [
        extension(43, &[2, 3, 4]),
        extension(10, &[&[0, 2][..], &group].concat()),
        extension(13, &[0, 2, 8, 7]),
        extension(51, &with_length(&[&group[..], &with_length(&share)].concat())),
        extension(19, &[1, 2]),
        extension(20, &[1, 2]),
    ]
    .concat();
    let start = [&[3, 3][..], &[7; 32], &[0], &[0, 2, 0x13, 2], &[1, 0]].concat();
    record(1, &[start, with_length(&extensions)].concat())
}

/// Returns a ServerHello with a key share that no one has the private key of.
fn server_hello() -> Vec<u8> {
    let share = [vec![0; 1088], vec![9], vec![0; 31]].concat();
    let extensions =
        [extension(43, &[3, 4]), extension(51, &[&[0x11, 0xec][..], &with_length(&share)].concat())].concat();
    let start = [&[3, 3][..], &[7; 32], &[0], &[0x13, 2], &[0]].concat();
    record(2, &[start, with_length(&extensions)].concat())
}

fn record(kind: u8, body: &[u8]) -> Vec<u8> {
    [vec![22, 3, 3], with_length(&[vec![kind, 0], with_length(body)].concat())].concat()
}

fn extension(kind: u8, body: &[u8]) -> Vec<u8> {
    [vec![0, kind], with_length(body)].concat()
}

fn with_length(body: &[u8]) -> Vec<u8> {
    [&u16::try_from(body.len()).unwrap().to_be_bytes(), body].concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key;

    /// This lets variations of the greeting get further than the first message.
    #[test]
    fn the_target_answers_the_greeting_and_asks_for_a_key() {
        let secret = key::generate().unwrap();
        let (mut stranger, ours) = stranger(&client_hello());
        let refused = Acceptor::new(&secret).unwrap().accept(ours.into(), Instant::now() + PATIENCE);
        assert_eq!(refused.unwrap_err().kind(), std::io::ErrorKind::UnexpectedEof);
        let mut answer = Vec::new();
        stranger.read_to_end(&mut answer).unwrap();
        assert_eq!(answer[..1], [22], "a message of the handshake");
        assert_eq!(answer[5], 2, "a ServerHello");
    }
}
