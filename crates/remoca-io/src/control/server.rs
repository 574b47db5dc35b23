//! The control socket of a VM process: one line of JSON in, one line out, then it is closed.
//!
//! A separate thread accepts. Each of a limited number of clients has another thread, with bounds on size and time, so
//! that a silent client does not delay others. The I/O thread answers from its own state, which is not shared. Whoever
//! may open the socket (mode 0600) may control the cache.

use crate::socket::{SocketPath, SocketSource};
use crate::wake;
use remoca_protocol::control::{Command, LINE_BYTES_MAX, PATIENCE, Reply};
use rustix::event::{PollFd, PollFlags, poll};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The most clients that are served at a time. Others are refused.
const CLIENTS_MAX: usize = 16;

/// A command and the channel for its answer.
pub struct ControlRequest {
    pub command: Command,
    answer: SyncSender<Answer>,
    connection: UnixStream,
}

/// What becomes of a client.
pub enum Answer {
    Reply(Reply),
    /// Another thread has its connection, and answers there.
    Elsewhere,
}

impl ControlRequest {
    /// Sends the answer, which is dropped if the client is gone.
    pub fn answer(self, reply: Reply) {
        let _ = self.answer.send(Answer::Reply(reply));
    }

    /// Returns the connection, on which the caller answers. The client no longer counts among those that are served.
    pub fn into_connection(self) -> UnixStream {
        let _ = self.answer.send(Answer::Elsewhere);
        self.connection
    }

    /// Returns the connection on which the client waits for the answer, so that another program can send it.
    pub fn connection(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }
}

/// Answers a command that a previous program of this process received. Answers on a thread, because the client may be
/// slow or gone.
pub fn answer_for_former(connection: OwnedFd, reply: Reply) {
    let answer = move || {
        if let Err(error) = reply_to(&connection.into(), &reply) {
            tracing::debug!("nobody took the answer to an upgrade: {error}");
        }
    };
    if let Err(error) = std::thread::Builder::new().name("control client".into()).spawn(answer) {
        tracing::warn!("no thread to say that the upgrade is done: {error}");
    }
}

/// The listening side, owned by the I/O thread.
pub struct ControlServer {
    /// For a program that takes over. The thread has the original.
    listener: OwnedFd,
    /// Removes the socket at the end.
    guard: Option<SocketPath>,
    requests: Receiver<ControlRequest>,
    wake: Arc<OwnedFd>,
    gate: Arc<Gate>,
}

/// The sending side of the queue of commands to the I/O thread.
#[derive(Clone)]
pub struct Desk {
    requests: Sender<ControlRequest>,
    wake: Arc<OwnedFd>,
}

impl Desk {
    /// Passes a command that came on `connection` to the I/O thread. Returns the channel on which the answer arrives.
    ///
    /// # Errors
    /// If the I/O thread is about to end.
    pub fn hand_in(&self, command: Command, connection: UnixStream) -> io::Result<Receiver<Answer>> {
        let (answer, reply) = sync_channel(1);
        self.requests.send(ControlRequest { command, answer, connection }).map_err(|_| io::ErrorKind::BrokenPipe)?;
        wake::raise(&*self.wake);
        Ok(reply)
    }
}

/// The number of clients being served, and whether more are accepted. Other clients wait in the queue of the listening
/// socket, which a program that takes over inherits, so no command is lost between two programs.
#[derive(Default)]
struct Gate {
    state: Mutex<GateState>,
    opened: Condvar,
}

#[derive(Default)]
struct GateState {
    closed: bool,
    clients: usize,
}

impl Gate {
    fn lock(&self) -> MutexGuard<'_, GateState> {
        // The two fields are valid at every moment, so a panic elsewhere does not corrupt them.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the gate is open. The caller keeps the returned guard until it has counted the next client.
    fn wait_until_open(&self) -> MutexGuard<'_, GateState> {
        let state = self.opened.wait_while(self.lock(), |state| state.closed);
        state.unwrap_or_else(PoisonError::into_inner)
    }
}

/// A client that is being served. Dropping it wakes the I/O thread.
struct Client {
    gate: Arc<Gate>,
    wake: Arc<OwnedFd>,
}

impl Drop for Client {
    fn drop(&mut self) {
        self.gate.lock().clients -= 1;
        wake::raise(&*self.wake);
    }
}

impl ControlServer {
    /// Listens at `path`. Replaces a socket file that no process listens on.
    ///
    /// # Errors
    /// If the path is in use or too long, the socket cannot be made, or the system has no descriptors or threads left.
    /// The text says what to do.
    pub fn start(path: &Path) -> io::Result<Self> {
        Self::adopt(SocketSource::bind(path, None).map_err(io::Error::other)?)
    }

    /// Listens at a socket that a previous program of this process made.
    ///
    /// # Errors
    /// If the source is not a listening socket, or the system has no descriptors or threads left.
    pub fn adopt(source: SocketSource) -> io::Result<Self> {
        let SocketSource::Listener { listener, path: guard } = source else {
            return Err(io::Error::other("this is no listening socket"));
        };
        let (server, desk) = Self::unattended(listener.try_clone()?.into(), guard)?;
        let gate = Arc::clone(&server.gate);
        std::thread::Builder::new().name("control".into()).spawn(move || accept_loop(&listener, &desk, &gate))?;
        Ok(server)
    }

    /// Returns a server without an accepting thread, and the desk to which the caller passes the clients' commands.
    ///
    /// # Errors
    /// If the system has no descriptors left.
    pub fn unattended(listener: OwnedFd, guard: Option<SocketPath>) -> io::Result<(Self, Desk)> {
        let wake = Arc::new(wake::new()?);
        let (sender, requests) = channel();
        let desk = Desk { requests: sender, wake: Arc::clone(&wake) };
        Ok((Self { listener, guard, requests, wake, gate: Arc::default() }, desk))
    }

    /// Returns the number of clients being served. [`Self::wake_fd`] becomes readable when one has gone.
    pub fn clients(&self) -> usize {
        self.gate.lock().clients
    }

    /// Accepts no client until [`Self::open`].
    pub fn close(&self) {
        self.gate.lock().closed = true;
    }

    pub fn open(&self) {
        self.gate.lock().closed = false;
        self.gate.opened.notify_one();
    }

    /// Returns the listening socket with its path and inode, to be passed to a program that takes over.
    pub fn listener(&self) -> (BorrowedFd<'_>, Option<(PathBuf, u64)>) {
        (self.listener.as_fd(), self.guard.as_ref().map(SocketPath::name))
    }

    /// Returns the descriptor that becomes readable when there may be a request, or a client has gone.
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Returns the next request, or `None` if there is none.
    pub fn next_request(&self) -> Option<ControlRequest> {
        wake::clear(&*self.wake);
        self.requests.try_recv().ok()
    }
}

fn accept_loop(listener: &UnixListener, desk: &Desk, gate: &Arc<Gate>) {
    loop {
        // No other thread accepts on this socket, so a client that waits is still there after the gate opens.
        if poll(&mut [PollFd::new(listener, PollFlags::IN)], None).is_err() {
            continue;
        }
        let mut state = gate.wait_until_open();
        let Ok((stream, _)) = listener.accept() else {
            drop(state);
            // For lack of descriptors, for instance. Another attempt later may succeed.
            std::thread::sleep(Duration::from_millis(100));
            continue;
        };
        state.clients += 1;
        let is_full = state.clients > CLIENTS_MAX;
        drop(state);
        let client = Client { gate: Arc::clone(gate), wake: Arc::clone(&desk.wake) };
        if is_full {
            let error = format!("{CLIENTS_MAX} others are being served: try again");
            let _ = reply_to(&stream, &Reply::Error { error });
            continue;
        }
        let desk = desk.clone();
        let spawned = std::thread::Builder::new().name("control client".into()).spawn(move || {
            if let Err(error) = serve(&stream, &desk) {
                tracing::debug!("a control connection ended: {error}");
            }
            // The answer is sent. The client is dropped before the connection, so that its place is free once the other
            // side sees the end of the connection.
            drop(client);
            drop(stream);
        });
        if let Err(error) = spawned {
            tracing::warn!("a control connection was closed: no thread for it: {error}");
        }
    }
}

fn serve(stream: &UnixStream, desk: &Desk) -> io::Result<()> {
    let line = read_line(stream)?;
    let answer = match Command::parse(&line) {
        Ok(command) => ask(command, stream.try_clone()?, desk),
        Err(error) => Answer::Reply(Reply::Error { error: error.to_string() }),
    };
    match answer {
        Answer::Reply(reply) => reply_to(stream, &reply),
        Answer::Elsewhere => Ok(()),
    }
}

/// Reads bytes up to the end of the line or of the stream. Stops reading once there are more than a command can have.
fn read_line(mut stream: &UnixStream) -> io::Result<Vec<u8>> {
    let deadline = Instant::now() + PATIENCE;
    let mut line = Vec::new();
    let mut piece = [0; 512];
    while line.len() <= LINE_BYTES_MAX {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        let count = stream.read(&mut piece)?;
        let end = piece[..count].iter().position(|byte| *byte == b'\n');
        line.extend_from_slice(&piece[..end.unwrap_or(count)]);
        if count == 0 || end.is_some() {
            break;
        }
    }
    Ok(line)
}

fn reply_to(mut stream: &UnixStream, reply: &Reply) -> io::Result<()> {
    let line = reply.line().map_err(io::Error::other)?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(&line)
}

fn ask(command: Command, connection: UnixStream, desk: &Desk) -> Answer {
    let patience = command.patience();
    let error = |text: String| Answer::Reply(Reply::Error { error: text });
    let gone = || error("the process is about to end".into());
    let Ok(reply) = desk.hand_in(command, connection) else { return gone() };
    reply.recv_timeout(patience).unwrap_or_else(|failure| match failure {
        RecvTimeoutError::Disconnected => gone(),
        RecvTimeoutError::Timeout => error(format!(
            "no answer within {} seconds; it may still be done. Look at `remoca status`",
            patience.as_secs()
        )),
    })
}
