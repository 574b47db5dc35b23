//! A proxy in front of the memory server that delays single pages, or stops for a while.
//!
//! Frames of the client pass unchanged. Some pages of the server are held back, and others overtake them.

use anyhow::Result;
use remoca_protocol::{Frame, decode};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// Current faults. They may change at any time.
#[derive(Default)]
pub struct Trouble {
    /// One page in this many is late; 0 means none.
    pub late_one_of: AtomicU64,
    pub late_us: AtomicU64,
    /// Time before which nothing passes, in microseconds since the start of the proxy.
    pub stopped_until_us: AtomicU64,
}

pub struct Proxy {
    pub socket: PathBuf,
    pub trouble: Arc<Trouble>,
    began: Instant,
}

impl Proxy {
    pub fn start(folder: &Path, name: &str, server: &Path) -> Result<Self> {
        let socket = folder.join(format!("{name}.proxy"));
        let listener = UnixListener::bind(&socket)?;
        let (trouble, began, server) = (Arc::<Trouble>::default(), Instant::now(), server.to_owned());
        let shared = Arc::clone(&trouble);
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                if let Ok(upstream) = UnixStream::connect(&server) {
                    carry(client, upstream, &shared, began);
                }
            }
        });
        Ok(Self { socket, trouble, began })
    }

    pub fn stop_for(&self, time: Duration) {
        let until = (self.began.elapsed() + time).as_micros();
        self.trouble.stopped_until_us.store(u64::try_from(until).unwrap_or(u64::MAX), Ordering::Relaxed);
    }
}

/// Starts the threads of one connection, which end with it.
fn carry(client: UnixStream, upstream: UnixStream, trouble: &Arc<Trouble>, began: Instant) {
    let (Ok(mut from_client), Ok(mut to_server)) = (client.try_clone(), upstream.try_clone()) else { return };
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut from_client, &mut to_server);
        let _ = to_server.shutdown(Shutdown::Both);
    });
    let (sender, receiver) = channel();
    let (shared, mut upstream) = (Arc::clone(trouble), upstream);
    std::thread::spawn(move || {
        let (mut buffer, mut bytes) = (Vec::new(), vec![0; 1 << 16]);
        let mut pages = 0;
        while let Ok(count @ 1..) = upstream.read(&mut bytes) {
            buffer.extend_from_slice(&bytes[..count]);
            let mut at = 0;
            while let Ok(Some((frame, length))) = decode(&buffer[at..]) {
                let mut due = Instant::now();
                if let Frame::SendPage { .. } = frame {
                    pages += 1;
                    let one_of = shared.late_one_of.load(Ordering::Relaxed);
                    if one_of > 0 && pages % one_of == 0 {
                        due += Duration::from_micros(shared.late_us.load(Ordering::Relaxed));
                    }
                }
                if sender.send((due, buffer[at..at + length].to_vec())).is_err() {
                    return;
                }
                at += length;
            }
            buffer.drain(..at);
        }
    });
    let shared = Arc::clone(trouble);
    std::thread::spawn(move || deliver(client, &receiver, &shared, began));
}

/// Writes each frame when it is due, but none while the server is stopped.
fn deliver(mut client: UnixStream, frames: &Receiver<(Instant, Vec<u8>)>, trouble: &Trouble, began: Instant) {
    let mut waiting = BTreeMap::new();
    let mut number = 0_u64;
    loop {
        let next = waiting.keys().next().map(|(due, _): &(Instant, u64)| due.saturating_duration_since(Instant::now()));
        match frames.recv_timeout(next.unwrap_or(Duration::from_secs(1))) {
            Ok((due, frame)) => {
                number += 1;
                waiting.insert((due, number), frame);
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
        let until = began + Duration::from_micros(trouble.stopped_until_us.load(Ordering::Relaxed));
        std::thread::sleep(until.saturating_duration_since(Instant::now()));
        while let Some(entry) = waiting.first_entry().filter(|entry| entry.key().0 <= Instant::now()) {
            if client.write_all(&entry.remove()).is_err() {
                return;
            }
        }
    }
    let _ = client.shutdown(Shutdown::Both);
}
