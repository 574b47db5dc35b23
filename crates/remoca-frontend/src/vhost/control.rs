//! The control thread of a device: accepts front ends and answers their messages.
//!
//! It owns no queue. Messages that concern a running queue become commands to the I/O thread, and the control thread
//! waits for each answer. So the I/O thread never waits for a front end, and a front end gets its answer only when it
//! is true.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;
use vhost::vhost_user::{BackendReqHandler, Error as VhostError};

use super::command::{IoThread, failure};
use super::config::DeviceConfig;
use super::handler::{Handler, Requests, replay};
use super::pause::{Pause, Work};
use remoca_io::handover::Pass;
use remoca_io::socket::SocketSource;
use remoca_io::wake;
use remoca_protocol::guests::FrontEnd;

/// Wait after an accept that failed, for instance for lack of descriptors.
const ACCEPT_RETRY: Duration = Duration::from_secs(1);

/// The running control thread; dropping it ends the thread.
pub(crate) struct ControlThread {
    shared: Arc<Shared>,
    handler: Arc<Mutex<Handler>>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    /// Name of the device, for the log.
    name: String,
    pause: Pause,
    stop: OwnedFd,
    stopping: AtomicBool,
    finished: AtomicBool,
    connection: Mutex<Option<UnixStream>>,
}

impl ControlThread {
    /// Starts the thread. It continues the connection `kept` of a former program before it accepts other front ends.
    pub fn spawn(
        config: Arc<DeviceConfig>,
        source: SocketSource,
        io: IoThread,
        kept: Option<FrontEnd<OwnedFd>>,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            name: config.name.clone(),
            pause: Pause::new(io.wake.clone()),
            stop: wake::new()?,
            stopping: AtomicBool::new(false),
            finished: AtomicBool::new(false),
            connection: Mutex::new(None),
        });
        let name = format!("vhost {}", config.name);
        let wake = io.wake.clone();
        let handler = Arc::new(Mutex::new(Handler::new(config, io)));
        let control = Control { shared: shared.clone(), wake, handler: handler.clone() };
        let thread = std::thread::Builder::new().name(name).spawn(move || control.run(source, kept))?;
        Ok(ControlThread { shared, handler, thread: Some(thread) })
    }

    /// Returns the switch that keeps the thread between two messages.
    pub fn pause(&self) -> &Pause {
        &self.shared.pause
    }

    /// Returns the connected socket and what the handler knows of the connection, or `None` if no front end is
    /// connected. Descriptors are what `pass` returns for them; those of the queues are missing. The thread must be
    /// between two messages.
    pub fn pass<G>(&self, pass: &mut Pass<'_, G>) -> io::Result<Option<FrontEnd<G>>> {
        assert!(self.shared.pause.has_begun(), "a connection was passed on within a message");
        let connection = self.shared.connection.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(connection) = &*connection else { return Ok(None) };
        lock(&self.handler).pass(pass(connection.as_fd())?, pass).map(Some)
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
        self.shared.pause.end();
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

fn lock(handler: &Mutex<Handler>) -> MutexGuard<'_, Handler> {
    handler.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Control {
    shared: Arc<Shared>,
    wake: Arc<OwnedFd>,
    handler: Arc<Mutex<Handler>>,
}

impl Control {
    fn run(self, source: SocketSource, kept: Option<FrontEnd<OwnedFd>>) {
        let Control { shared, wake, handler } = self;
        if let Some(kept) = kept {
            shared.serve(shared.pause.begin_work(), Arrival::Kept(kept), &handler);
        }
        match source {
            SocketSource::Stream(stream) => shared.serve(shared.pause.begin_work(), Arrival::New(stream), &handler),
            SocketSource::Listener { listener, path: _path } => {
                while let Some((work, stream)) = shared.accept(&listener) {
                    shared.serve(work, Arrival::New(stream), &handler);
                }
            }
        }
        shared.finished.store(true, Ordering::Release);
        wake::raise(wake);
    }
}

/// A front end to answer.
enum Arrival {
    New(UnixStream),
    /// One that a former program of this process has answered before.
    Kept(FrontEnd<OwnedFd>),
}

impl Shared {
    /// Accepts the next front end. Returns `None` if the device is to end or the socket cannot be used.
    fn accept(&self, listener: &UnixListener) -> Option<(Work<'_>, UnixStream)> {
        if let Err(error) = listener.set_nonblocking(true) {
            tracing::error!(%error, "cannot use the listening socket");
            return None;
        }
        while self.wait(listener, None) {
            let work = self.pause.begin_work();
            match listener.accept() {
                Ok((stream, _)) => return Some((work, stream)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a front end");
                    drop(work);
                    self.wait(&self.stop, Some(ACCEPT_RETRY));
                }
            }
        }
        None
    }

    /// Answers one front end until it disconnects or breaks the protocol, then detaches it.
    fn serve(&self, work: Work<'_>, arrival: Arrival, handler: &Arc<Mutex<Handler>>) {
        let attached = match arrival {
            Arrival::New(stream) => self.attach(stream, handler),
            Arrival::Kept(front_end) => self.reattach(front_end, handler),
        };
        let mut work = Some(work);
        match attached {
            Ok((watch, mut requests)) => {
                drop(work.take());
                let (last, why) = self.answer(&watch, &mut requests);
                work = Some(last);
                match why {
                    VhostError::Disconnected => tracing::info!("{}: its hypervisor has disconnected", self.name),
                    error => tracing::warn!("{}: its hypervisor is disconnected: {error}", self.name),
                }
            }
            Err(error) => {
                tracing::warn!("{}: its hypervisor has to connect again: {error}", self.name);
            }
        }
        self.set_connection(None);
        // Fails only if the device is shut down, which the next wait will notice.
        let _ = lock(handler).detach();
        drop(work);
    }

    /// Attaches a front end that has just connected. Returns what its messages are waited for with, and answered with.
    fn attach(&self, stream: UnixStream, handler: &Arc<Mutex<Handler>>) -> Result<(UnixStream, Requests), VhostError> {
        stream.set_nonblocking(false).map_err(failure)?;
        let watch = stream.try_clone().map_err(failure)?;
        self.set_connection(Some(stream.try_clone().map_err(failure)?));
        lock(handler).attach()?;
        lock(handler).note_attached()?;
        tracing::info!("{}: a hypervisor is connected", self.name);
        Ok((watch, BackendReqHandler::from_stream(stream, handler.clone())))
    }

    /// Attaches a front end that was connected to a former program of this process, with all that was agreed on.
    fn reattach(
        &self,
        front_end: FrontEnd<OwnedFd>,
        handler: &Arc<Mutex<Handler>>,
    ) -> Result<(UnixStream, Requests), VhostError> {
        let stream = UnixStream::from(front_end.socket.try_clone().map_err(failure)?);
        let watch = stream.try_clone().map_err(failure)?;
        self.set_connection(Some(stream));
        lock(handler).attach()?;
        let requests = replay(front_end, handler)?;
        lock(handler).note_attached()?;
        tracing::info!("{}: its hypervisor stays connected", self.name);
        Ok((watch, requests))
    }

    fn set_connection(&self, connection: Option<UnixStream>) {
        *self.connection.lock().unwrap_or_else(PoisonError::into_inner) = connection;
    }

    /// Answers messages until the connection or the device ends. Returns the reason, still within the last message.
    fn answer(&self, watch: &UnixStream, requests: &mut Requests) -> (Work<'_>, VhostError) {
        while self.wait(watch, None) {
            let work = self.pause.begin_work();
            if let Err(error) = requests.handle_request() {
                return (work, error);
            }
        }
        (self.pause.begin_work(), VhostError::Disconnected)
    }

    /// Waits until `source` is readable or `timeout` has passed. Returns false if the device is to end or the wait
    /// failed.
    fn wait(&self, source: impl AsFd, timeout: Option<Duration>) -> bool {
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
