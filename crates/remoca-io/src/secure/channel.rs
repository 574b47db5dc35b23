//! The byte stream of a protected connection: a handshake with a time limit, then one half for each of two threads.

use rustix::net::sockopt::{self, Timeout};
use rustls::{Connection, Error};
use std::fs::File;
use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The most bytes of a handshake that are read at a time.
const HANDSHAKE_PIECE: usize = 4096;
/// The most bytes that are received at a time. The TLS library gets more of them when its decrypted data have been
/// read.
const RECEIVED_PIECE: usize = 32 << 10;
/// The most bytes that are encrypted at a time. The library accepts up to 64 KiB.
const SENT_PIECE: usize = 32 << 10;

/// A connection both of whose sides have proved that they know the secret.
pub struct Channel {
    connection: Box<Connection>,
    socket: File,
}

impl std::fmt::Debug for Channel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Channel")
    }
}

impl Channel {
    /// Performs the handshake. `deadline` applies to the whole handshake, however the other side divides its messages.
    pub(super) fn establish(connection: Connection, socket: OwnedFd, deadline: Instant) -> io::Result<Self> {
        let mut channel = Self { connection: Box::new(connection), socket: socket.into() };
        match channel.shake_hands(deadline) {
            Ok(()) => Ok(channel),
            Err(error) => {
                // Sends the TLS alert with the reason to the other side, if it accepts that at once.
                let _ = channel.flush(Instant::now() + Duration::from_millis(100));
                Err(error)
            }
        }
    }

    fn shake_hands(&mut self, deadline: Instant) -> io::Result<()> {
        let mut bytes = [0; HANDSHAKE_PIECE];
        loop {
            self.flush(deadline)?;
            if !self.connection.is_handshaking() {
                return Ok(());
            }
            self.limit(Timeout::Recv, deadline)?;
            let count = match self.socket.read(&mut bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(too_late()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                count => count?,
            };
            if count == 0 {
                return Err(io::Error::new(
                    io::ErrorKind::UnexpectedEof,
                    "it closed the connection without a proof of its key",
                ));
            }
            feed(&mut self.connection, &bytes[..count])?;
        }
    }

    fn flush(&mut self, deadline: Instant) -> io::Result<()> {
        let mut bytes = Vec::new();
        while self.connection.wants_write() {
            self.connection.write_tls(&mut bytes)?;
        }
        if !bytes.is_empty() {
            self.limit(Timeout::Send, deadline)?;
            self.socket.write_all(&bytes)?;
        }
        Ok(())
    }

    fn limit(&self, direction: Timeout, deadline: Instant) -> io::Result<()> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(too_late());
        }
        Ok(sockopt::set_socket_timeout(&self.socket, direction, Some(left))?)
    }

    /// Shuts down both directions of the connection at once.
    ///
    /// # Errors
    /// If the connection has already ended.
    pub fn shut_down(&self) -> io::Result<()> {
        Ok(rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both)?)
    }

    /// Returns the socket, so that the caller can set its time limits.
    #[must_use]
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Splits the channel into its receiving and its sending half.
    ///
    /// # Errors
    /// If there is no descriptor left.
    pub fn split(self) -> io::Result<(SecureReader, SecureWriter)> {
        let connection = Arc::new(Mutex::new(*self.connection));
        let socket = self.socket.try_clone()?;
        let sealed = vec![0; RECEIVED_PIECE];
        let reader = SecureReader { connection: Arc::clone(&connection), socket, sealed, rest: 0..0 };
        Ok((reader, SecureWriter { connection, socket: self.socket, sealed: Vec::new() }))
    }
}

/// The half that receives. Locks nothing while it waits.
pub struct SecureReader {
    connection: Arc<Mutex<Connection>>,
    socket: File,
    sealed: Vec<u8>,
    /// The part of `sealed` that the library has not been given yet.
    rest: Range<usize>,
}

impl Read for SecureReader {
    /// Reads data that the other side sent. If the connection ends without the other side's close message, that is an
    /// error ([`io::ErrorKind::UnexpectedEof`]).
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match lock(&self.connection).reader().read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                done => return done,
            }
            if self.rest.is_empty() {
                self.rest = 0..self.socket.read(&mut self.sealed)?;
            }
            let mut connection = lock(&self.connection);
            self.rest.start += connection.read_tls(&mut &self.sealed[self.rest.clone()])?;
            connection.process_new_packets().map_err(explain)?;
        }
    }
}

/// The half that sends.
pub struct SecureWriter {
    connection: Arc<Mutex<Connection>>,
    socket: File,
    sealed: Vec<u8>,
}

impl SecureWriter {
    /// Tells the other side that no more data will follow, and ends the sending direction.
    ///
    /// # Errors
    /// If the connection is gone.
    pub fn finish(&mut self) -> io::Result<()> {
        lock(&self.connection).send_close_notify();
        self.send_sealed()?;
        Ok(rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Write)?)
    }

    /// Ends the connection, for the other half as well.
    pub fn shut_down(&self) {
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
    }

    fn send_sealed(&mut self) -> io::Result<()> {
        self.sealed.clear();
        let mut connection = lock(&self.connection);
        while connection.wants_write() {
            connection.write_tls(&mut self.sealed)?;
        }
        // Only this half writes to the socket, so the records go out in order.
        drop(connection);
        self.socket.write_all(&self.sealed)
    }
}

impl Write for SecureWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let piece = &bytes[..bytes.len().min(SENT_PIECE)];
        let count = lock(&self.connection).writer().write(piece)?;
        self.send_sealed()?;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.send_sealed()
    }
}

/// Locks the connection. Poison is ignored: a panic of the other half has ended its thread and thereby the connection.
fn lock(connection: &Mutex<Connection>) -> MutexGuard<'_, Connection> {
    connection.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Passes received bytes of a handshake to the library.
fn feed(connection: &mut Connection, mut bytes: &[u8]) -> io::Result<()> {
    loop {
        connection.read_tls(&mut bytes)?;
        connection.process_new_packets().map_err(explain)?;
        if bytes.is_empty() {
            return Ok(());
        }
    }
}

fn explain(error: Error) -> io::Error {
    let text = match error {
        Error::InvalidCertificate(_) => "it has another key".into(),
        Error::AlertReceived(alert) => format!("it does not accept our key ({alert:?})"),
        Error::InvalidMessage(_) => "it does not speak the language of a VM process of this version".into(),
        error => format!("it does not keep to TLS: {error}"),
    };
    io::Error::new(io::ErrorKind::InvalidData, text)
}

fn too_late() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "it did not prove in time that it has the key")
}
