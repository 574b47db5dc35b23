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
use super::keeper::Keeper;
use super::pause::{Pause, Work};
use remoca_io::handover::Pass;
use remoca_io::narrow;
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
    /// Whether the front end would be offered more if it connected again.
    has_news: AtomicBool,
    /// Whether the connection outlives this process: no message is under way, and the next process finds all of it.
    /// Once there is a stream, changed with `connection` locked.
    is_kept: AtomicBool,
    connection: Mutex<Connection>,
}

#[derive(Default)]
struct Connection {
    stream: Option<UnixStream>,
    /// Whether the log says that the connection outlives this process.
    is_said_kept: bool,
}

impl ControlThread {
    /// Starts the thread. It continues the connection `kept` of a former program, or the one that `keeper` found, before
    /// it accepts other front ends.
    pub fn spawn(
        config: Arc<DeviceConfig>,
        source: SocketSource,
        io: IoThread,
        kept: Option<FrontEnd<OwnedFd>>,
        keeper: Option<Keeper>,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            name: config.name.clone(),
            pause: Pause::new(io.wake.clone())?,
            stop: wake::new()?,
            stopping: AtomicBool::new(false),
            finished: AtomicBool::new(false),
            has_news: AtomicBool::new(false),
            is_kept: AtomicBool::new(false),
            connection: Mutex::default(),
        });
        let name = format!("vhost {}", config.name);
        let wake = io.wake.clone();
        let handler = Arc::new(Mutex::new(Handler::new(config, io)));
        let control = Control { shared: shared.clone(), wake, handler: handler.clone() };
        let thread = std::thread::Builder::new().name(name).spawn(move || control.run(source, kept, keeper))?;
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
        let connection = lock(&self.shared.connection);
        let Some(stream) = &connection.stream else { return Ok(None) };
        lock(&self.handler).pass(pass(stream.as_fd())?, pass).map(Some)
    }

    /// Returns whether the connection of the front end would outlive a kill of this process now. Within a message it
    /// would not.
    pub fn is_kept(&self) -> bool {
        self.shared.is_kept.load(Ordering::SeqCst)
    }

    /// Ends a pause, or the wish for one. After a pause the connection counts as kept once the store has it again: a program that was to
    /// take over may have emptied it.
    pub fn end_pause(&self) {
        let _connection = lock(&self.shared.connection);
        if self.shared.pause.has_begun() {
            self.shared.is_kept.store(false, Ordering::SeqCst);
        }
        self.shared.pause.end();
    }

    /// Returns whether no front end can connect any longer.
    pub fn is_finished(&self) -> bool {
        self.shared.finished.load(Ordering::Acquire)
    }

    /// Returns whether the front end would be offered more if it connected again.
    pub fn has_news(&self) -> bool {
        self.shared.has_news.load(Ordering::Relaxed)
    }

    /// Tells the thread to end, and closes the connection unless the next process finds it. The thread ends as soon as
    /// its command is answered or its command channel is closed.
    pub fn begin_stop(&self) {
        let connection = lock(&self.shared.connection);
        self.shared.stopping.store(true, Ordering::SeqCst);
        wake::raise(&self.shared.stop);
        self.shared.pause.end();
        if let Some(stream) = connection.stream.as_ref().filter(|_| !self.is_kept()) {
            // Fails only if it is closed already.
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }

    pub fn join(&mut self) {
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the control thread panicked");
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Control {
    shared: Arc<Shared>,
    wake: Arc<OwnedFd>,
    handler: Arc<Mutex<Handler>>,
}

impl Control {
    fn run(self, source: SocketSource, kept: Option<FrontEnd<OwnedFd>>, mut keeper: Option<Keeper>) {
        let Control { shared, wake, handler } = self;
        let found = keeper.as_ref().and_then(Keeper::found).is_some().then_some(Arrival::Found);
        if let Some(arrival) = kept.map(Arrival::Kept).or(found) {
            shared.serve(shared.pause.begin_work(), arrival, &handler, &mut keeper);
        }
        match source {
            SocketSource::Stream(stream) => {
                shared.serve(shared.pause.begin_work(), Arrival::New(stream), &handler, &mut None);
            }
            SocketSource::Listener { listener, path: _path } => {
                while let Some((work, stream)) = shared.accept(&listener) {
                    shared.serve(work, Arrival::New(stream), &handler, &mut keeper);
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
    /// One that a former process has answered before, with its keeper.
    Found,
}

/// Why a wait is over.
#[derive(PartialEq, Eq)]
enum Woken {
    Readable,
    /// The time is over, or the event was raised.
    TimedOut,
    /// The device is to end, or the wait failed.
    Over,
}

impl Shared {
    /// Accepts the next front end. Returns `None` if the device is to end or the socket cannot be used.
    fn accept(&self, listener: &UnixListener) -> Option<(Work<'_>, UnixStream)> {
        if let Err(error) = listener.set_nonblocking(true) {
            tracing::error!(%error, "cannot use the listening socket");
            return None;
        }
        while self.wait(listener, None, None) == Woken::Readable {
            let work = self.pause.begin_work();
            match listener.accept() {
                Ok((stream, _)) => return Some((work, stream)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a front end");
                    drop(work);
                    self.wait(&self.stop, None, Some(ACCEPT_RETRY));
                }
            }
        }
        None
    }

    /// Answers one front end until it disconnects or breaks the protocol, then detaches it.
    fn serve(&self, work: Work<'_>, arrival: Arrival, handler: &Arc<Mutex<Handler>>, keeper: &mut Option<Keeper>) {
        let attached = match arrival {
            Arrival::New(stream) => self.attach(stream, handler, keeper.is_some()),
            Arrival::Kept(front_end) => self.reattach(front_end, handler),
            Arrival::Found => self.find(handler, keeper),
        };
        let mut work = Some(work);
        match attached {
            // The next process goes on.
            _ if self.stopping.load(Ordering::SeqCst) => {}
            Ok((watch, mut requests)) => {
                self.end_message(&watch, handler, keeper);
                drop(work.take());
                let (last, why) = self.answer(&watch, &mut requests, handler, keeper);
                work = Some(last);
                match why {
                    _ if self.stopping.load(Ordering::SeqCst) => {}
                    VhostError::Disconnected => tracing::info!("{}: its hypervisor has disconnected", self.name),
                    error => tracing::warn!("{}: its hypervisor is disconnected: {error}", self.name),
                }
            }
            Err(error) => {
                tracing::warn!("{}: its hypervisor has to connect again: {error}", self.name);
            }
        }
        if let Some(keeper) = keeper
            && !(self.stopping.load(Ordering::SeqCst) && self.is_kept.load(Ordering::SeqCst))
        {
            if let Some(stream) = &lock(&self.connection).stream {
                // The service manager has a copy, and may take its time to close it. Fails only if the connection is closed already.
                let _ = stream.shutdown(std::net::Shutdown::Both);
            }
            keeper.end();
        }
        self.set_connection(None);
        self.has_news.store(false, Ordering::Relaxed);
        // Fails only if the device is shut down, which the next wait will notice.
        let _ = lock(handler).detach();
        drop(work);
    }

    /// Attaches a front end that has just connected. Returns what its messages are waited for with, and answered with.
    fn attach(
        &self,
        stream: UnixStream,
        handler: &Arc<Mutex<Handler>>,
        is_kept: bool,
    ) -> Result<(UnixStream, Requests), VhostError> {
        stream.set_nonblocking(false).map_err(failure)?;
        let watch = stream.try_clone().map_err(failure)?;
        self.set_connection(Some(stream.try_clone().map_err(failure)?));
        lock(handler).attach()?;
        lock(handler).note_attached()?;
        let but = if is_kept { "" } else { "; if this process is killed, it has to connect again" };
        tracing::info!("{}: a hypervisor is connected{but}", self.name);
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
        self.has_news.store(lock(handler).has_news(), Ordering::Relaxed);
        lock(handler).note_attached()?;
        tracing::info!("{}: its hypervisor stays connected", self.name);
        Ok((watch, requests))
    }

    /// Attaches the front end that was connected to a former process, with all that was agreed on.
    fn find(
        &self,
        handler: &Arc<Mutex<Handler>>,
        keeper: &mut Option<Keeper>,
    ) -> Result<(UnixStream, Requests), VhostError> {
        let keeper = keeper.as_mut().ok_or_else(|| failure("there is no connection of a former process"))?;
        lock(&self.connection).is_said_kept = true;
        self.is_kept.store(true, Ordering::SeqCst);
        // Answered when the disks are locked. Only then is the connection looked at.
        lock(handler).attach()?;
        let attached = self.reattach(keeper.resume()?, handler)?;
        keeper.note_answered();
        Ok(attached)
    }

    fn set_connection(&self, stream: Option<UnixStream>) {
        let mut connection = lock(&self.connection);
        if stream.is_none() {
            self.is_kept.store(false, Ordering::SeqCst);
            connection.is_said_kept = false;
        }
        connection.stream = stream;
    }

    /// Answers messages until the connection or the device ends. Returns the reason, still within the last message.
    fn answer(
        &self,
        watch: &UnixStream,
        requests: &mut Requests,
        handler: &Mutex<Handler>,
        keeper: &mut Option<Keeper>,
    ) -> (Work<'_>, VhostError) {
        loop {
            let timeout = keeper.as_ref().and_then(Keeper::retries_after);
            // A pause that ends has let another program have what is kept, and that program did not start.
            let woken = self.wait(watch, Some(self.pause.ended()), timeout);
            let work = self.pause.begin_work();
            match woken {
                Woken::Readable if self.begin_message(keeper) => {
                    narrow::passes("message-begun");
                    let is_handled = lock(handler).receive(watch);
                    let handle = |is_handled| if is_handled { Ok(()) } else { requests.handle_request() };
                    if let Err(error) = is_handled.and_then(handle) {
                        return (work, error);
                    }
                    narrow::passes("message-answered");
                }
                Woken::TimedOut => {}
                Woken::Readable | Woken::Over => return (work, VhostError::Disconnected),
            }
            self.end_message(watch, handler, keeper);
            narrow::passes("message-kept");
        }
    }

    /// Notes that the front end has begun a message. Returns false if the device is to end.
    fn begin_message(&self, keeper: &Option<Keeper>) -> bool {
        let _connection = lock(&self.connection);
        if self.stopping.load(Ordering::SeqCst) {
            return false;
        }
        self.is_kept.store(false, Ordering::SeqCst);
        if let Some(keeper) = keeper {
            keeper.begin_message();
        }
        true
    }

    /// Notes that no message is under way.
    fn end_message(&self, stream: &UnixStream, handler: &Mutex<Handler>, keeper: &mut Option<Keeper>) {
        let Some(keeper) = keeper else { return };
        let is_kept = keeper.end_message(stream.as_fd(), &lock(handler));
        let mut connection = lock(&self.connection);
        self.is_kept.store(is_kept, Ordering::SeqCst);
        if !std::mem::replace(&mut connection.is_said_kept, is_kept) && is_kept {
            tracing::info!("{}: its hypervisor stays connected if this process is killed", self.name);
        }
    }

    /// Waits until `source` is readable, `event` is raised or `timeout` has passed.
    fn wait(&self, source: impl AsFd, event: Option<&OwnedFd>, timeout: Option<Duration>) -> Woken {
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        while !self.stopping.load(Ordering::SeqCst) {
            let mut sources = [source.as_fd(), self.stop.as_fd(), event.unwrap_or(&self.stop).as_fd()]
                .map(|source| PollFd::from_borrowed_fd(source, PollFlags::IN));
            match poll(&mut sources, timeout.as_ref()) {
                Ok(0) => return Woken::TimedOut,
                Ok(_) if !sources[0].revents().is_empty() => return Woken::Readable,
                Ok(_) if event.is_some() && !sources[2].revents().is_empty() => {
                    event.into_iter().for_each(wake::clear);
                    return Woken::TimedOut;
                }
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "cannot wait for the front end");
                    break;
                }
            }
        }
        Woken::Over
    }
}
