//! One connection, and the socket that such connections come to.

use super::wire::{self, HEADER_BYTES, Heard, Offer, PIECE_BYTES, StateHeader, kind};
use crate::endpoint::Endpoint;
use remoca_core::migration::Message;
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::sockopt::{self, Timeout};
use std::fs::File;
use std::io::{self, BufReader, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, TrySendError, sync_channel};
use std::time::Duration;

/// For connecting, and for a peer that takes nothing.
const PATIENCE: Duration = Duration::from_secs(10);
/// Frames that wait for the driver: at most so many MiB.
const HEARD_MAX: usize = 8;
/// What waits to be sent. A peer that asks for more answers than it takes is cut off.
const PARCELS_MAX: usize = 64;

/// What is to be sent.
enum Parcel {
    Bytes(Vec<u8>),
    Words(Arc<Vec<u32>>),
    /// Say so when everything before is sent.
    Mark,
    /// Nothing comes after it; the peer may go on.
    End,
}

/// Wakes the driver.
type Wake = Arc<OwnedFd>;

fn raise(wake: &Wake) {
    let _ = rustix::io::write(&**wake, &1_u64.to_ne_bytes());
}

/// A connection to another VM process, made or being made. Dropping it closes it; what is queued is lost.
pub struct Peer {
    /// `None`: nothing more is to be sent.
    parcels: Option<SyncSender<Parcel>>,
    says_no_more: bool,
    heard: Receiver<Heard>,
    /// Closed with the peer, which ends its threads.
    socket: Receiver<OwnedFd>,
}

impl Peer {
    /// Connects to the process at `endpoint`; what comes of it will be heard.
    ///
    /// # Errors
    /// If the system has no thread left.
    pub fn connect(endpoint: Endpoint, wake: &Wake) -> io::Result<Self> {
        let (parcels, to_send) = sync_channel(PARCELS_MAX);
        let (tell, heard) = sync_channel(HEARD_MAX);
        let (keep, socket) = sync_channel(1);
        let wake = Arc::clone(wake);
        std::thread::Builder::new().name("migration".into()).spawn(move || {
            let told = match endpoint.connect(PATIENCE) {
                Ok(connected) => converse(connected, to_send, &tell, &keep, &wake),
                Err(error) => Err(io::Error::other(format!("{endpoint} cannot be reached: {error}"))),
            };
            finish(&tell, &wake, told);
        })?;
        Ok(Self { parcels: Some(parcels), says_no_more: false, heard, socket })
    }

    fn accepted(connected: OwnedFd, wake: &Wake) -> io::Result<Self> {
        let (parcels, to_send) = sync_channel(PARCELS_MAX);
        let (tell, heard) = sync_channel(HEARD_MAX);
        let (keep, socket) = sync_channel(1);
        let wake = Arc::clone(wake);
        std::thread::Builder::new().name("migration".into()).spawn(move || {
            let told = converse(connected, to_send, &tell, &keep, &wake);
            finish(&tell, &wake, told);
        })?;
        Ok(Self { parcels: Some(parcels), says_no_more: false, heard, socket })
    }

    /// What was heard next, if anything.
    pub fn hear(&mut self) -> Option<Heard> {
        match self.heard.try_recv() {
            Ok(heard) => Some(heard),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => Some(Heard::Ended("its thread has ended".into())),
        }
    }

    pub fn offer(&self, offer: &Offer) {
        self.send_text(kind::OFFER, serde_json::to_vec(offer));
    }

    pub fn refuse(&self, why: &str) {
        let end = why.len().min(4000);
        self.queue(Parcel::Bytes(wire::frame(kind::REFUSE, &why.as_bytes()[..end])));
    }

    pub fn send(&self, message: Message) {
        self.queue(Parcel::Bytes(wire::message(message)));
    }

    /// Sends an index; [`Heard::Sent`] when that is done.
    pub fn send_state(&self, header: &StateHeader, words: Arc<Vec<u32>>) {
        self.send_text(kind::STATE, serde_json::to_vec(header));
        self.queue(Parcel::Words(words));
        self.queue(Parcel::Mark);
    }

    /// Tells the peer that nothing more comes, when everything that was queued is sent.
    pub fn say_no_more(&mut self) {
        if !std::mem::replace(&mut self.says_no_more, true) {
            self.queue(Parcel::End);
        }
    }

    fn send_text(&self, kind: u8, text: serde_json::Result<Vec<u8>>) {
        if let Ok(text) = text {
            self.queue(Parcel::Bytes(wire::frame(kind, &text)));
        }
    }

    /// Whoever is gone will be heard to have ended.
    fn queue(&self, parcel: Parcel) {
        if let Some(parcels) = &self.parcels
            && let Err(TrySendError::Full(_)) = parcels.try_send(parcel)
        {
            self.shut_down();
        }
    }

    fn shut_down(&self) {
        if let Ok(socket) = self.socket.try_recv() {
            let _ = rustix::net::shutdown(&socket, rustix::net::Shutdown::Both);
        }
    }

    /// Closes the connection when everything that was queued is sent, or cannot be.
    pub fn end_politely(mut self) {
        // The sending thread shuts the connection down when it has nothing left; then the other one ends, and so does this.
        self.parcels = None;
        let farewell = move || while self.heard.recv().is_ok() {};
        let _ = std::thread::Builder::new().name("goodbye".into()).spawn(farewell);
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.shut_down();
    }
}

fn finish(tell: &SyncSender<Heard>, wake: &Wake, told: io::Result<()>) {
    let why = match told {
        Ok(()) => "it closed the connection".into(),
        Err(error) => error.to_string(),
    };
    let _ = tell.send(Heard::Ended(why));
    raise(wake);
}

/// Reads until the end; another thread writes.
fn converse(
    socket: OwnedFd,
    to_send: Receiver<Parcel>,
    tell: &SyncSender<Heard>,
    keep: &SyncSender<OwnedFd>,
    wake: &Wake,
) -> io::Result<()> {
    sockopt::set_socket_timeout(&socket, Timeout::Recv, None)?;
    sockopt::set_socket_timeout(&socket, Timeout::Send, Some(PATIENCE))?;
    let _ = keep.try_send(socket.try_clone()?);
    let writing = File::from(socket.try_clone()?);
    let (tell_sent, wake_sent) = (tell.clone(), Arc::clone(wake));
    std::thread::Builder::new().name("migration".into()).spawn(move || {
        // Whatever fails is seen by the reader: the connection is shut down.
        let _ = write_all(&writing, &to_send, &tell_sent, &wake_sent);
        let _ = rustix::net::shutdown(&writing, rustix::net::Shutdown::Both);
    })?;
    let mut source = BufReader::with_capacity(PIECE_BYTES + HEADER_BYTES, File::from(socket));
    loop {
        let heard = match wire::read(&mut source) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            heard => heard?,
        };
        if tell.send(heard).is_err() {
            return Ok(());
        }
        raise(wake);
    }
}

fn write_all(mut socket: &File, to_send: &Receiver<Parcel>, tell: &SyncSender<Heard>, wake: &Wake) -> io::Result<()> {
    while let Ok(parcel) = to_send.recv() {
        match parcel {
            Parcel::Bytes(bytes) => socket.write_all(&bytes)?,
            Parcel::Words(words) => {
                for piece in words.chunks(PIECE_BYTES / 4) {
                    let bytes: Vec<u8> = piece.iter().flat_map(|word| word.to_le_bytes()).collect();
                    socket.write_all(&wire::frame(kind::WORDS, &bytes))?;
                }
            }
            Parcel::End => rustix::net::shutdown(socket, rustix::net::Shutdown::Write)?,
            Parcel::Mark => {
                let _ = tell.send(Heard::Sent);
                raise(wake);
            }
        }
    }
    Ok(())
}

/// The socket at which a process waits for one that hands its disks over.
pub struct Incoming {
    pub endpoint: Endpoint,
    peers: Receiver<Peer>,
}

impl Incoming {
    /// Listens at `endpoint`.
    ///
    /// # Errors
    /// If the address cannot be listened at.
    pub fn listen(endpoint: Endpoint, wake: &Wake) -> io::Result<Self> {
        let listener = endpoint.listen()?;
        // One that the driver has not looked at: the next wait in the socket's queue.
        let (found, peers) = sync_channel(1);
        let wake = Arc::clone(wake);
        std::thread::Builder::new().name("incoming".into()).spawn(move || {
            loop {
                let peer = listener.accept().and_then(|socket| Peer::accepted(socket, &wake));
                match peer.map(|peer| found.send(peer)) {
                    Ok(Ok(())) => raise(&wake),
                    Ok(Err(_)) => return,
                    // Out of descriptors: the next one may have more luck.
                    Err(_) => std::thread::sleep(Duration::from_millis(100)),
                }
            }
        })?;
        Ok(Self { endpoint, peers })
    }

    /// The next connection, if there is one.
    pub fn take_peer(&mut self) -> Option<Peer> {
        self.peers.try_recv().ok()
    }
}

/// What the driver waits for: readable when a peer or an [`Incoming`] has something.
pub struct WakeUp(Wake);

impl WakeUp {
    /// # Errors
    /// If the system has no eventfd left.
    pub fn new() -> io::Result<Self> {
        Ok(Self(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)))
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    pub fn wake(&self) -> &Arc<OwnedFd> {
        &self.0
    }

    /// For what is left of a turn.
    pub fn raise(&self) {
        raise(&self.0);
    }

    pub fn clear(&self) {
        let _ = rustix::io::read(&*self.0, &mut [0; 8]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn a_peer_that_asks_and_takes_no_answers_is_cut_off() {
        let (ours, theirs) = rustix::net::socketpair(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::STREAM,
            rustix::net::SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        let wake = WakeUp::new().unwrap();
        let mut peer = Peer::accepted(ours, wake.wake()).unwrap();
        let give_up_at = Instant::now() + Duration::from_secs(30);
        loop {
            peer.send(Message::Busy);
            match peer.hear() {
                Some(Heard::Ended(_)) => break,
                Some(_) => panic!("nothing was said"),
                None => assert!(Instant::now() < give_up_at, "it is still connected"),
            }
        }
        drop(theirs);
    }
}
