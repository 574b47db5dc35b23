//! The control socket of a VM process: one line of JSON in, one line out, then it is closed.
//!
//! A thread of its own accepts and parses, with bounds on size and time; the I/O thread answers from its own state, so
//! no state is shared. Whoever may open the socket (mode 0600) may control the cache.

use crate::status::Status;
use crate::vhost::{SocketPath, SocketSource};
use rustix::event::{EventfdFlags, eventfd};
use serde::{Deserialize, Serialize};
use std::fs::Permissions;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::time::Duration;

const LINE_BYTES_MAX: u64 = 4096;
const PATIENCE: Duration = Duration::from_secs(10);

/// What a running VM process can be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Command {
    /// Everything it knows of itself.
    Status,
    /// Changes what is given.
    Set {
        /// Size of the cache in bytes, a multiple of 4096.
        #[serde(default)]
        cache_bytes: Option<u64>,
        /// Off drops all that is cached, on starts cold.
        #[serde(default)]
        enabled: Option<bool>,
    },
}

/// What it answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Reply {
    Status(Box<Status>),
    Error { error: String },
}

/// A command with the way back.
pub struct Request {
    pub command: Command,
    answer: SyncSender<Reply>,
}

impl Request {
    /// Sends the answer; the other side may be gone.
    pub fn answer(self, reply: Reply) {
        let _ = self.answer.send(reply);
    }
}

/// The listening side, owned by the I/O thread.
pub struct ControlServer {
    /// Removes the socket at the end.
    _guard: Option<SocketPath>,
    requests: Receiver<Request>,
    wake: Arc<OwnedFd>,
}

impl ControlServer {
    /// Listens at `path`. A socket file that nobody listens at is replaced.
    ///
    /// # Errors
    /// With a text that says what to do, if the path is taken, too long, or cannot be made.
    pub fn start(path: &Path) -> io::Result<Self> {
        let SocketSource::Listener { listener, path: guard } = SocketSource::bind(path).map_err(io::Error::other)?
        else {
            return Err(io::Error::other("a path gives a listening socket"));
        };
        std::fs::set_permissions(path, Permissions::from_mode(0o600))?;
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (sender, requests) = channel();
        let thread_wake = Arc::clone(&wake);
        std::thread::Builder::new()
            .name("control".into())
            .spawn(move || accept_loop(&listener, &sender, &thread_wake))?;
        Ok(Self { _guard: guard, requests, wake })
    }

    /// Becomes readable when [`Self::next_request`] has something.
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// The next request, if any.
    pub fn next_request(&self) -> Option<Request> {
        let _ = rustix::io::read(&*self.wake, &mut [0; 8]);
        self.requests.try_recv().ok()
    }
}

fn accept_loop(listener: &UnixListener, requests: &Sender<Request>, wake: &OwnedFd) {
    for stream in listener.incoming() {
        match stream {
            Ok(stream) => {
                if let Err(error) = serve(&stream, requests, wake) {
                    tracing::debug!("a control connection ended: {error}");
                }
            }
            // Out of descriptors: the next client may have more luck.
            Err(_) => std::thread::sleep(Duration::from_millis(100)),
        }
    }
}

fn serve(stream: &UnixStream, requests: &Sender<Request>, wake: &OwnedFd) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut line = String::new();
    BufReader::new(stream.take(LINE_BYTES_MAX)).read_line(&mut line)?;
    let reply = match serde_json::from_str(&line) {
        Ok(command) => ask(command, requests, wake),
        Err(error) => Reply::Error { error: format!("this is no command: {error}") },
    };
    let mut text = serde_json::to_string(&reply).map_err(io::Error::other)?;
    text.push('\n');
    let mut stream = stream;
    stream.write_all(text.as_bytes())
}

fn ask(command: Command, requests: &Sender<Request>, wake: &OwnedFd) -> Reply {
    let (answer, reply) = sync_channel(1);
    let gone = || Reply::Error { error: "the process is about to end".into() };
    if requests.send(Request { command, answer }).is_err() || rustix::io::write(wake, &1_u64.to_ne_bytes()).is_err() {
        return gone();
    }
    reply.recv_timeout(PATIENCE).unwrap_or_else(|_| gone())
}

/// Asks the VM process that listens at `path`.
///
/// # Errors
/// If nobody listens there, or it does not answer with JSON.
pub fn call(path: &Path, command: Command) -> io::Result<Reply> {
    let mut stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut line = serde_json::to_string(&command).map_err(io::Error::other)?;
    line.push('\n');
    stream.write_all(line.as_bytes())?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    serde_json::from_str(&text).map_err(io::Error::other)
}
