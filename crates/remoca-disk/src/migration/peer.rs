//! One connection to a process that has the key.

use super::Heard;
use remoca_core::migration::Message;
use remoca_io::address::Endpoint;
use remoca_io::secure::{Channel, Connector, SecureReader, SecureWriter};
use remoca_io::wake::{Wake, raise};
use remoca_io::words::LentWords;
use remoca_protocol::control::Secret;
use remoca_protocol::peer::{self, HEADER_BYTES, Offer, PIECE_BYTES, PeerFrame, StateHeader, kind};
use rustix::net::sockopt::{self, Timeout};
use std::io::{self, BufReader, Write};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, TrySendError, sync_channel};
use std::time::{Duration, Instant};

/// Time for connecting, for the proof of the key, and for each sign of life after it.
pub(in crate::migration) const SILENCE_MAX: Duration = Duration::from_secs(5);
/// Time between two signs of life of a side that has nothing to say.
const ALIVE_EVERY: Duration = Duration::from_secs(1);
/// Time limit for sending to a peer that receives nothing: its driver may be opening images.
const PATIENCE: Duration = Duration::from_secs(10);
/// Maximum number of frames that wait for the driver, of 1 MiB at most.
const HEARD_MAX: usize = 8;
/// Maximum number of parcels that wait to be sent. A peer that asks for more answers than it receives is cut off.
const PARCELS_MAX: usize = 64;

/// A unit of what is to be sent.
pub(super) enum Parcel {
    Bytes(Vec<u8>),
    Words(LentWords),
    /// Asks for [`Heard::Sent`] when everything before it is sent.
    Mark,
    /// The last parcel. The peer may continue to send.
    End,
}

/// A connection to another VM process, made or being made. Dropping it closes it; what is queued is lost.
pub struct Peer {
    /// `None`: nothing more is to be sent.
    parcels: Option<SyncSender<Parcel>>,
    says_no_more: bool,
    heard: Receiver<Heard>,
    /// Closed with the peer, which ends its threads.
    socket: Receiver<OwnedFd>,
    /// Words of an index that are being sent, or were.
    index: Option<LentWords>,
    /// Whether [`Heard::Sent`] is to come.
    sends: bool,
    /// How often it comes before that for a state that was called off.
    called_off: u32,
}

/// The other ends of a [`Peer`]'s channels. Their owner transports what the peer says.
pub(super) struct Line {
    pub(super) to_send: Receiver<Parcel>,
    pub(super) tell: SyncSender<Heard>,
    keep: SyncSender<OwnedFd>,
    pub(super) wake: Wake,
}

impl Peer {
    /// Returns a peer of the driver that `wake` wakes, and the other ends of its channels.
    pub(super) fn pair(wake: &Wake) -> (Self, Line) {
        let (parcels, to_send) = sync_channel(PARCELS_MAX);
        let (tell, heard) = sync_channel(HEARD_MAX);
        let (keep, socket) = sync_channel(1);
        let line = Line { to_send, tell, keep, wake: Arc::clone(wake) };
        let parcels = Some(parcels);
        (Self { parcels, says_no_more: false, heard, socket, index: None, sends: false, called_off: 0 }, line)
    }

    /// Starts to connect to the process at `endpoint`, which has to prove that it has the key. [`Self::hear`] returns
    /// the outcome.
    ///
    /// # Errors
    /// If the system has no thread left.
    pub fn connect(endpoint: Endpoint, secret: &Secret, wake: &Wake) -> io::Result<Self> {
        let connector = Connector::new(secret)?;
        Self::start(wake, move || {
            let deadline = Instant::now() + SILENCE_MAX;
            // Whoever tells of it names the address.
            let remedy = "Does a VM process with --incoming wait there?";
            let cannot = |error| io::Error::other(format!("it cannot be reached: {error}. {remedy}"));
            let socket = endpoint.connect(SILENCE_MAX).map_err(cannot)?;
            connector.connect(socket, deadline).map_err(|error| io::Error::other(with_remedy(&error)))
        })
    }

    /// Returns a peer over a connection that was accepted, and whose other side has proved that it has the key.
    ///
    /// # Errors
    /// If the system has no thread left.
    pub(super) fn over(channel: Channel, wake: &Wake) -> io::Result<Self> {
        Self::start(wake, move || Ok(channel))
    }

    fn start(wake: &Wake, establish: impl FnOnce() -> io::Result<Channel> + Send + 'static) -> io::Result<Self> {
        let (peer, Line { to_send, tell, keep, wake }) = Self::pair(wake);
        std::thread::Builder::new().name("migration".into()).spawn(move || {
            let told = establish().and_then(|channel| converse(channel, to_send, &tell, &keep, &wake));
            let why = match told {
                Ok(()) => "it closed the connection".into(),
                Err(error) => error.to_string(),
            };
            let _ = tell.send(Heard::Ended(why));
            raise(&wake);
        })?;
        Ok(peer)
    }

    /// Returns the next event of the connection, or `None` if there is none.
    pub fn hear(&mut self) -> Option<Heard> {
        loop {
            return match self.heard.try_recv() {
                Ok(Heard::Sent) if self.called_off > 0 => {
                    self.called_off -= 1;
                    continue;
                }
                Ok(heard) => {
                    self.sends &= !matches!(heard, Heard::Sent);
                    Some(heard)
                }
                Err(TryRecvError::Empty) => None,
                Err(TryRecvError::Disconnected) => Some(Heard::Ended("its thread has ended".into())),
            };
        }
    }

    pub fn offer(&self, offer: &Offer) {
        self.send_text(kind::OFFER, serde_json::to_vec(offer));
    }

    pub fn refuse(&self, why: &str) {
        let end = why.len().min(4000);
        self.queue(Parcel::Bytes(peer::frame(kind::REFUSE, &why.as_bytes()[..end])));
    }

    pub fn send(&self, message: Message) {
        self.queue(Parcel::Bytes(peer::message(message)));
    }

    /// Sends the state of the disks: its header, and the words of the index, if it goes along: the first ones, then the rest.
    /// [`Heard::Sent`] follows when that is done.
    pub fn send_state(&mut self, header: &StateHeader, index: Option<(Vec<u32>, LentWords)>) {
        self.send_text(kind::STATE, serde_json::to_vec(header));
        if let Some((head, rest)) = index {
            self.queue(Parcel::Bytes(peer::words(&head)));
            self.queue(Parcel::Words(rest.clone()));
            self.index = Some(rest);
        }
        self.sends = true;
        self.queue(Parcel::Mark);
    }

    /// Calls off the sending of a state. What was not sent of its index is dropped, and no [`Heard::Sent`] follows.
    pub fn stop_sending(&mut self) {
        if std::mem::take(&mut self.sends) {
            self.called_off += 1;
            self.forget_index();
        }
    }

    /// Drops what was not sent of an index. The guest may continue here, and change it: nothing is to be copied for a peer that does not
    /// get it.
    fn forget_index(&mut self) {
        self.index.take().iter().for_each(LentWords::forget);
    }

    /// Tells the peer that nothing more comes, after everything that was queued.
    pub fn say_no_more(&mut self) {
        if !std::mem::replace(&mut self.says_no_more, true) {
            self.queue(Parcel::End);
        }
    }

    fn send_text(&self, kind: u8, text: serde_json::Result<Vec<u8>>) {
        if let Ok(text) = text {
            self.queue(Parcel::Bytes(peer::frame(kind, &text)));
        }
    }

    /// Queues a parcel. If the queue is full, shuts the connection down. A parcel for a peer that is gone is dropped:
    /// the end of the connection is reported by [`Self::hear`].
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
        self.forget_index();
    }
}

fn with_remedy(error: &io::Error) -> String {
    format!("{error}: it has to be a VM process that was started with --incoming, and with the same key")
}

/// Reads frames until the connection ends, while another thread writes.
fn converse(
    channel: Channel,
    to_send: Receiver<Parcel>,
    tell: &SyncSender<Heard>,
    keep: &SyncSender<OwnedFd>,
    wake: &Wake,
) -> io::Result<()> {
    sockopt::set_socket_timeout(channel.socket(), Timeout::Recv, Some(SILENCE_MAX))?;
    sockopt::set_socket_timeout(channel.socket(), Timeout::Send, Some(PATIENCE))?;
    let _ = keep.try_send(channel.socket().try_clone_to_owned()?);
    let (reader, mut writer) = channel.split()?;
    let (tell_sent, wake_sent) = (tell.clone(), Arc::clone(wake));
    std::thread::Builder::new().name("migration".into()).spawn(move || {
        // The reader notices any failure, because the connection is shut down.
        let _ = write_all(&mut writer, &to_send, &tell_sent, &wake_sent);
        writer.shut_down();
    })?;
    listen(reader, tell, wake)
}

fn listen(reader: SecureReader, tell: &SyncSender<Heard>, wake: &Wake) -> io::Result<()> {
    let mut source = BufReader::with_capacity(PIECE_BYTES + HEADER_BYTES, reader);
    loop {
        let heard = match peer::read(&mut source) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(io::Error::new(io::ErrorKind::TimedOut, "it has said nothing for five seconds"));
            }
            heard => heard?,
        };
        if matches!(heard, PeerFrame::Alive) {
            continue;
        }
        if tell.send(Heard::Frame(heard)).is_err() {
            return Ok(());
        }
        raise(wake);
    }
}

fn write_all(
    writer: &mut SecureWriter,
    to_send: &Receiver<Parcel>,
    tell: &SyncSender<Heard>,
    wake: &Wake,
) -> io::Result<()> {
    let mut is_finished = false;
    loop {
        match to_send.recv_timeout(ALIVE_EVERY) {
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
            Err(RecvTimeoutError::Timeout) if is_finished => {}
            Err(RecvTimeoutError::Timeout) => writer.write_all(&peer::frame(kind::ALIVE, &[]))?,
            Ok(Parcel::Bytes(bytes)) => writer.write_all(&bytes)?,
            Ok(Parcel::Words(words)) => {
                while let Some(frame) = words.take(PIECE_BYTES / 4, peer::words) {
                    writer.write_all(&frame)?;
                }
            }
            Ok(Parcel::End) => {
                writer.finish()?;
                is_finished = true;
            }
            Ok(Parcel::Mark) => {
                let _ = tell.send(Heard::Sent);
                raise(wake);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use remoca_io::key;
    use remoca_io::secure::Acceptor;
    use remoca_io::wake::WakeUp;
    use remoca_io::words::IndexMemory;
    use std::os::unix::net::UnixStream;

    /// A peer, and the other end of its connection, at which nobody is yet.
    fn peer() -> (Peer, Channel) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let secret = key::generate().unwrap();
        let (acceptor, deadline) = (Acceptor::new(&secret).unwrap(), Instant::now() + Duration::from_secs(60));
        let accepting = std::thread::spawn(move || acceptor.accept(ours.into(), deadline).unwrap());
        let other = Connector::new(&secret).unwrap().connect(theirs.into(), deadline).unwrap();
        let wake = WakeUp::new().unwrap();
        (Peer::over(accepting.join().unwrap(), wake.wake()).unwrap(), other)
    }

    #[test]
    fn a_peer_that_asks_and_takes_no_answers_is_cut_off() {
        let (mut peer, theirs) = peer();
        let give_up_at = Instant::now() + Duration::from_secs(60);
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

    fn state(words: u64) -> StateHeader {
        StateHeader {
            key: [0; 16],
            seed: 0,
            words,
            cache_pages: 0,
            enabled: false,
            servers: Vec::new(),
            numbers: Vec::new(),
            stamps: Vec::new(),
            failed_flushes: Vec::new(),
            write_caches: Vec::new(),
        }
    }

    /// The connection holds less than this index, so a part of it is sent later, whoever is first.
    #[test]
    fn an_index_that_changes_while_it_is_sent_arrives_as_it_was() {
        let (mut peer, theirs) = peer();
        let mut memory = IndexMemory::new(3 * PIECE_BYTES / 4).unwrap();
        memory.iter_mut().zip(0..).for_each(|(word, number)| *word = number);
        let sent: Vec<u8> = memory.iter().flat_map(|word| word.to_le_bytes()).collect();
        peer.send_state(&state(memory.len() as u64), Some((memory[..9].to_vec(), memory.lend(9))));
        memory.fill(7);
        drop(memory);
        let (reader, _writer) = theirs.split().unwrap();
        let mut source = BufReader::new(reader);
        let mut arrived = Vec::new();
        while arrived.len() < sent.len() {
            match peer::read(&mut source).unwrap() {
                PeerFrame::Words(bytes) => arrived.extend(bytes),
                PeerFrame::State(_) | PeerFrame::Alive => {}
                _ => panic!("nothing else is said"),
            }
        }
        assert!(arrived == sent);
    }

    #[test]
    fn no_index_is_copied_for_a_peer_that_is_gone() {
        let (mut peer, _theirs) = peer();
        let memory = IndexMemory::new(3 * PIECE_BYTES / 4).unwrap();
        let lent = memory.lend(0);
        peer.send_state(&state(memory.len() as u64), Some((Vec::new(), lent.clone())));
        drop(peer);
        assert_eq!(lent.take(1, <[u32]>::len), None, "the guest would wait for the copy");
    }

    #[test]
    fn a_peer_that_falls_silent_is_gone_and_one_that_has_nothing_to_say_is_not() {
        let (peer, theirs) = peer();
        let (reader, writer) = theirs.split().unwrap();
        let mut source = BufReader::new(reader);
        // It goes on saying that it is there, and does not hear that of us.
        for _ in 0..2 {
            assert!(matches!(peer::read(&mut source), Ok(PeerFrame::Alive)));
        }
        let Ok(Heard::Ended(why)) = peer.heard.recv() else { panic!("nothing was said") };
        assert!(why.contains("five seconds"), "{why}");
        drop((peer, writer));
    }
}
