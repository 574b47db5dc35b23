//! A faulty network: forwards bytes between the VM process and one memory server, until told to cut, hang or delay.

use crate::Result;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// Special value of the delay: nothing is forwarded.
const HANG: u64 = u64::MAX;
const POLL: Duration = Duration::from_millis(10);

/// The faulty network of one server.
pub struct Proxy {
    socket: PathBuf,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    /// Delay of each piece, in microseconds, or [`HANG`].
    delay_us: AtomicU64,
    streams: Mutex<Streams>,
}

#[derive(Default)]
struct Streams {
    open: Vec<(u64, UnixStream)>,
    next: u64,
}

impl Proxy {
    /// Listens at `socket` for clients of the server at `server`.
    pub fn start(socket: &Path, server: PathBuf) -> Result<Proxy> {
        let listener = UnixListener::bind(socket)?;
        let shared = Arc::<Shared>::default();
        let of_thread = Arc::clone(&shared);
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                // Without a server, the client's connection ends at once.
                let Ok(server) = UnixStream::connect(&server) else { continue };
                let _ = of_thread.join(&client, &server);
            }
        });
        Ok(Proxy { socket: socket.to_owned(), shared })
    }

    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns the address at which the VM process reaches the server.
    pub fn address(&self) -> String {
        format!("unix:{}", self.socket.display())
    }

    /// Ends every connection now.
    pub fn cut(&self) {
        for (_, stream) in self.shared.streams().open.drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Holds all data back until [`Self::pass`].
    pub fn hang(&self) {
        self.shared.delay_us.store(HANG, Ordering::Relaxed);
    }

    /// Delays every piece by this much until [`Self::pass`].
    pub fn delay(&self, delay: Duration) {
        self.shared.delay_us.store(u64::try_from(delay.as_micros()).unwrap_or(HANG), Ordering::Relaxed);
    }

    pub fn pass(&self) {
        self.shared.delay_us.store(0, Ordering::Relaxed);
    }
}

impl Shared {
    fn streams(&self) -> MutexGuard<'_, Streams> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn join(self: &Arc<Self>, client: &UnixStream, server: &UnixStream) -> std::io::Result<()> {
        let connection = {
            let mut streams = self.streams();
            streams.next += 1;
            let connection = streams.next;
            streams.open.push((connection, client.try_clone()?));
            streams.open.push((connection, server.try_clone()?));
            connection
        };
        for (from, to) in [(client, server), (server, client)] {
            let (shared, mut from, mut to) = (Arc::clone(self), from.try_clone()?, to.try_clone()?);
            thread::spawn(move || {
                shared.pump(&mut from, &mut to);
                let _ = from.shutdown(Shutdown::Both);
                let _ = to.shutdown(Shutdown::Both);
                shared.streams().open.retain(|(of, _)| *of != connection);
            });
        }
        Ok(())
    }

    fn pump(&self, from: &mut UnixStream, to: &mut UnixStream) {
        let mut piece = vec![0; 1 << 16];
        loop {
            let count = match from.read(&mut piece) {
                Ok(count) if count > 0 => count,
                _ => return,
            };
            while self.delay_us.load(Ordering::Relaxed) == HANG {
                thread::sleep(POLL);
            }
            let delay = self.delay_us.load(Ordering::Relaxed);
            if delay > 0 && delay != HANG {
                thread::sleep(Duration::from_micros(delay));
            }
            if to.write_all(&piece[..count]).is_err() {
                return;
            }
        }
    }
}
