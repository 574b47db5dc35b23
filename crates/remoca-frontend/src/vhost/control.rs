//! The control thread of a device: accepts front ends and answers their messages.
//!
//! It owns no queue. Messages that concern a running queue become commands to the I/O thread, and the control thread
//! waits for each answer. So the I/O thread never waits for a front end, and a front end gets its answer only when it
//! is true.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;
use vhost::vhost_user::{BackendReqHandler, Error as VhostError};

use super::command::IoThread;
use super::config::DeviceConfig;
use super::handler::Handler;
use remoca_io::socket::SocketSource;
use remoca_io::wake;

/// Wait after an accept that failed, for instance for lack of descriptors.
const ACCEPT_RETRY: Duration = Duration::from_secs(1);

/// The running control thread; dropping it ends the thread.
pub(crate) struct ControlThread {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    stop: OwnedFd,
    stopping: AtomicBool,
    finished: AtomicBool,
    connection: Mutex<Option<UnixStream>>,
}

impl ControlThread {
    pub fn spawn(config: Arc<DeviceConfig>, source: SocketSource, io: IoThread) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            stop: wake::new()?,
            stopping: AtomicBool::new(false),
            finished: AtomicBool::new(false),
            connection: Mutex::new(None),
        });
        let name = format!("vhost {}", config.name);
        let control = Control { shared: shared.clone(), wake: io.wake.clone(), handler: Handler::new(config, io) };
        let thread = std::thread::Builder::new().name(name).spawn(move || control.run(source))?;
        Ok(ControlThread { shared, thread: Some(thread) })
    }

    /// Returns whether no front end can connect any longer.
    pub fn is_finished(&self) -> bool {
        self.shared.finished.load(Ordering::Acquire)
    }

    /// Closes the connection and tells the thread to end. The thread ends as soon as its command is answered or its
    /// command channel is closed.
    pub fn begin_stop(&self) {
        self.shared.stopping.store(true, Ordering::SeqCst);
        wake::raise(&self.shared.stop);
        let connection = self.shared.connection.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(connection) = &*connection {
            // Fails only if it is closed already.
            let _ = connection.shutdown(std::net::Shutdown::Both);
        }
    }

    pub fn join(&mut self) {
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the control thread panicked");
        }
    }
}

struct Control {
    shared: Arc<Shared>,
    wake: Arc<OwnedFd>,
    handler: Handler,
}

impl Control {
    fn run(self, source: SocketSource) {
        let Control { shared, wake, handler } = self;
        let handler = Arc::new(Mutex::new(handler));
        match source {
            SocketSource::Stream(stream) => shared.serve(stream, &handler),
            SocketSource::Listener { listener, path: _path } => {
                while let Some(stream) = shared.accept(&listener) {
                    shared.serve(stream, &handler);
                }
            }
        }
        shared.finished.store(true, Ordering::Release);
        wake::raise(wake);
    }
}

impl Shared {
    /// Accepts the next front end. Returns `None` if the device is to end or the socket cannot be used.
    fn accept(&self, listener: &UnixListener) -> Option<UnixStream> {
        if let Err(error) = listener.set_nonblocking(true) {
            tracing::error!(%error, "cannot use the listening socket");
            return None;
        }
        while self.wait(listener, None) {
            match listener.accept() {
                Ok((stream, _)) => return Some(stream),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a front end");
                    self.wait(&self.stop, Some(ACCEPT_RETRY));
                }
            }
        }
        None
    }

    /// Answers one front end until it disconnects or breaks the protocol, then detaches it.
    fn serve(&self, stream: UnixStream, handler: &Arc<Mutex<Handler>>) {
        let clones = stream.set_nonblocking(false).and_then(|()| Ok((stream.try_clone()?, stream.try_clone()?)));
        let (watch, connection) = match clones {
            Ok(clones) => clones,
            Err(error) => {
                tracing::warn!(%error, "cannot use the connection of a front end");
                return;
            }
        };
        self.set_connection(Some(connection));
        let with_handler = |action: fn(&mut Handler) -> Result<(), VhostError>| {
            action(&mut handler.lock().unwrap_or_else(PoisonError::into_inner))
        };
        if with_handler(Handler::attach).is_ok() {
            let mut requests = BackendReqHandler::from_stream(stream, handler.clone());
            match self.answer(&watch, &mut requests) {
                VhostError::Disconnected => tracing::info!("the front end has gone"),
                error => tracing::warn!(%error, "the front end is disconnected"),
            }
        }
        self.set_connection(None);
        // Fails only if the device is shut down, which the next wait will notice.
        let _ = with_handler(Handler::detach);
    }

    fn set_connection(&self, connection: Option<UnixStream>) {
        *self.connection.lock().unwrap_or_else(PoisonError::into_inner) = connection;
    }

    /// Answers messages until the connection or the device ends. Returns the reason.
    fn answer(&self, watch: &UnixStream, requests: &mut BackendReqHandler<Mutex<Handler>>) -> VhostError {
        while self.wait(watch, None) {
            if let Err(error) = requests.handle_request() {
                return error;
            }
        }
        VhostError::Disconnected
    }

    /// Waits until `source` is readable or `timeout` has passed. Returns false if the device is to end or the wait
    /// failed.
    fn wait(&self, source: impl std::os::fd::AsFd, timeout: Option<Duration>) -> bool {
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        while !self.stopping.load(Ordering::SeqCst) {
            let mut sources = [PollFd::new(&source, PollFlags::IN), PollFd::new(&self.stop, PollFlags::IN)];
            match poll(&mut sources, timeout.as_ref()) {
                Ok(0) => return true,
                Ok(_) if !sources[0].revents().is_empty() => return !self.stopping.load(Ordering::SeqCst),
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "cannot wait for the front end");
                    return false;
                }
            }
        }
        false
    }
}
