//! The connections to memory servers, as the driver uses them: sessions start and end, frames are sent and received.

use super::host::Host;
use super::in_flight::InFlight;
use super::poller::Source;
use crate::link::{Received, ServerLink, Session};
use remoca_core::engine::{Admitted, DiskEngine, FetchId, PageOutcome, PoolOffer, PoolSlot, ServerNumber};
use remoca_core::units::{Nanos, PAGE_SIZE_U64, PageCount};
use remoca_io::narrow;
use remoca_io::show::show_size;
use remoca_io::words::IndexMemory;
use remoca_protocol::{ErrorCode, Frame, RequestId, Welcome};
use std::io;

/// The link to memory servers, if there is one.
pub(super) struct Servers {
    link: Option<ServerLink>,
    /// One for each session, in no order.
    hearings: Vec<Hearing>,
}

/// What outlives a turn of the messages from a session's server.
pub(super) struct Hearing {
    server: ServerNumber,
    /// Error with which the server ended the session.
    dismissal: Option<ErrorCode>,
    /// Whether the operator was told that the server has no room, in this session and for this size.
    refusal_told: bool,
    /// Whether the server sent more than one turn handles.
    receive_again: bool,
}

impl Servers {
    /// Returns the connections of `link`.
    pub(super) fn new(link: Option<ServerLink>) -> Self {
        Self { link, hearings: Vec::new() }
    }

    /// Returns the link, or `None` if the process has no memory servers.
    pub(super) fn link(&self) -> Option<&ServerLink> {
        self.link.as_ref()
    }

    /// Returns a mutable reference to the link, or `None` if the process has no memory servers.
    pub(super) fn link_mut(&mut self) -> Option<&mut ServerLink> {
        self.link.as_mut()
    }

    /// Registers the descriptor that reports the link's answers with the poller, if there is a link.
    pub(super) fn register(&self, host: &Host) -> io::Result<()> {
        self.link.as_ref().map_or(Ok(()), |link| host.watch(link.wake_fd(), Source::LinkWake))
    }

    /// Replaces the link with one whose descriptors are not registered yet.
    pub(super) fn attach(&mut self, link: Option<ServerLink>) {
        self.hearings.clear();
        self.link = link;
    }

    /// Removes the link and unregisters its descriptors. Returns the link, or `None` if there was none.
    pub(super) fn detach(&mut self, host: &Host) -> Option<ServerLink> {
        self.hearings.clear();
        let link = self.link.take()?;
        link.sessions().iter().for_each(|session| host.unwatch(session.socket_fd()));
        host.unwatch(link.wake_fd());
        Some(link)
    }

    /// Returns the numbers of all servers, or `None` if there is no link.
    pub(super) fn numbers(&self) -> Option<Vec<ServerNumber>> {
        let link = self.link.as_ref()?;
        Some(link.servers().iter().map(|server| server.number).collect())
    }

    #[inline]
    fn session(&mut self, server: ServerNumber) -> Option<&mut Session> {
        self.link.as_mut()?.session_mut(server)
    }

    /// Returns the server of the first session after that with `previous`, or of the first of all, or `None` if there
    /// is none. Sessions may begin and end between two calls.
    pub(super) fn next_session(&self, previous: Option<ServerNumber>) -> Option<ServerNumber> {
        self.link.as_ref()?.next_session(previous)
    }

    /// Queues a frame for a server. Drops it if there is no session with that server.
    pub(super) fn send(&mut self, server: ServerNumber, frame: &Frame<'_>) {
        if let Some(session) = self.session(server) {
            frame.encode(session.out());
        }
    }

    /// Queues the request for the page of a slot. Drops it if there is no session with the slot's server.
    pub(super) fn fetch(&mut self, fetch: FetchId, at: PoolSlot) {
        if let Some(session) = self.session(at.server) {
            session.request(RequestId(fetch.0), at.slot);
        }
    }

    /// Queues an admitted page for its slot. Drops it if there is no session with the slot's server.
    ///
    /// # Panics
    /// If the page that is there is to be copied to another pool first: nobody can read it here.
    pub(super) fn admit(&mut self, admitted: Admitted, page: &[u8]) {
        assert!(admitted.demoted_to.is_none(), "the page in {:?} cannot be copied from there", admitted.at);
        if let Some(session) = self.session(admitted.at.server) {
            session.send_page(admitted.at.slot, page);
        }
    }

    /// Asks a server how many pages it could give.
    pub(super) fn ask(&mut self, server: ServerNumber) {
        if let Some(link) = &mut self.link {
            link.ask(server);
        }
    }

    /// Gives up the connection to a server that was asked, and a pool that this process may have there.
    pub(super) fn release(&mut self, server: ServerNumber) {
        if let Some(link) = &mut self.link {
            link.release(server);
        }
    }

    /// Starts a session with a server that was asked.
    pub(super) fn begin_session(&mut self, host: &Host, server: ServerNumber) -> Result<(), String> {
        let Some(link) = &mut self.link else { return Ok(()) };
        let watched = match link.begin(server).then(|| link.session_mut(server)).flatten() {
            Some(session) => host.watch(session.socket_fd(), Source::LinkSocket(server)),
            None => Err(io::ErrorKind::NotConnected.into()),
        };
        self.hearings.push(Hearing::new(server));
        narrow::passes("session-begun");
        watched.map_err(|error| format!("its socket cannot be watched: {error}"))
    }

    /// Unregisters the socket of the session with this server, and ends the session by calling `end`.
    pub(super) fn end_session(&mut self, host: &Host, server: ServerNumber, end: impl FnOnce(&mut ServerLink)) {
        if let Some(session) = self.session(server) {
            host.unwatch(session.socket_fd());
        }
        if let Some(link) = &mut self.link {
            end(link);
        }
        self.hearings.retain(|hearing| hearing.server != server);
    }

    /// Makes the operator be told again when a server has no room.
    pub(super) fn forget_refusal(&mut self) {
        self.hearings.iter_mut().for_each(|hearing| hearing.refusal_told = false);
    }

    /// Returns the next answer of a server that was asked, or `None` if no answer is there. The offer in it is `None`
    /// if the server did not make one.
    pub(super) fn next_answer(&mut self, host: &Host) -> Option<(ServerNumber, Option<PoolOffer>)> {
        let (server, welcome) = self.link.as_mut()?.take_answer(host.instant())?;
        Some((server, welcome.map(|welcome| pool_offer(&welcome))))
    }

    /// Marks the socket of the session with this server as writable, because it has room again.
    pub(super) fn note_writable(&mut self, server: ServerNumber) {
        if let Some(session) = self.session(server) {
            session.note_writable();
        }
    }

    /// Sends the frames that are queued for this server. Returns the number of pages sent.
    pub(super) fn flush(&mut self, host: &Host, server: ServerNumber) -> io::Result<u32> {
        let Some(session) = self.session(server) else { return Ok(0) };
        let pages = session.flush()?;
        if let Some(watch) = session.watch_change()
            && let Err(error) = host.watch_room(session.socket_fd(), Source::LinkSocket(server), watch)
        {
            tracing::warn!("cannot watch the server's socket: {error}");
        }
        Ok(pages)
    }

    /// Returns the session with this server and the handler of its frames, or `None` if there is no session.
    pub(super) fn listen(&mut self, server: ServerNumber) -> Option<(&mut Session, &mut Hearing)> {
        let hearing = self.hearings.iter_mut().find(|hearing| hearing.server == server)?;
        Some((self.link.as_mut()?.session_mut(server)?, hearing))
    }

    /// Returns why the session with this server is lost, or `None` if it continues. Schedules another receive if the
    /// server sent more than one turn handles.
    pub(super) fn lost(&mut self, server: ServerNumber, received: io::Result<Received>) -> Option<String> {
        let hearing = self.hearings.iter_mut().find(|hearing| hearing.server == server)?;
        if let Some(code) = hearing.dismissal.take() {
            return Some(format!("it ended the session: {code:?}"));
        }
        match received {
            Ok(Received::Drained) => {}
            Ok(Received::More) => hearing.receive_again = true,
            Err(error) => return Some(error.to_string()),
        }
        None
    }

    /// Returns whether a server sent more than one turn handles.
    pub(super) fn receives_again(&self) -> bool {
        self.hearings.iter().any(|hearing| hearing.receive_again)
    }

    /// Returns the servers that sent more than one turn handles, and clears their flags.
    pub(super) fn take_receive_again(&mut self) -> Vec<ServerNumber> {
        let again = |hearing: &mut Hearing| std::mem::take(&mut hearing.receive_again).then_some(hearing.server);
        self.hearings.iter_mut().filter_map(again).collect()
    }
}

impl Hearing {
    pub(super) fn new(server: ServerNumber) -> Self {
        Self { server, dismissal: None, refusal_told: false, receive_again: false }
    }

    /// Passes a frame of the server to the engine, and a page to its request. Keeps an error that ends the session.
    pub(super) fn hear(
        &mut self,
        frame: &Frame<'_>,
        engine: &mut DiskEngine<IndexMemory>,
        in_flight: &mut InFlight,
        now: Nanos,
    ) {
        let server = self.server;
        match *frame {
            Frame::SendPage { request, page, .. } => {
                let outcome = engine.handle_page(now, server, FetchId(request.0), page);
                if let PageOutcome::Deliver { request, offset } = outcome {
                    in_flight.deliver(engine, request, offset, page);
                }
            }
            Frame::Sized { npages, .. } => engine.handle_sized(now, server, npages),
            Frame::Error(error) => match error.code {
                ErrorCode::NotFound => engine.handle_missing(now, server, FetchId(error.request.0)),
                ErrorCode::NoMemory | ErrorCode::Quota => {
                    let available = PageCount(error.detail);
                    if !std::mem::replace(&mut self.refusal_told, true) {
                        tracing::warn!(
                            "the memory server has no room for the cache's size; it could give {} more. Taking what there is.",
                            show_size(u64::from(available.0) * PAGE_SIZE_U64)
                        );
                    }
                    engine.handle_size_refused(now, server, available);
                }
                // After these errors the server closes the connection. If it does not, we do.
                ErrorCode::VersionMismatch | ErrorCode::StaleEpoch | ErrorCode::Malformed | ErrorCode::Busy => {
                    self.dismissal = Some(error.code);
                }
                ErrorCode::Unknown(code) => {
                    tracing::debug!("the memory server says error {code}, which means nothing here")
                }
            },
            // No such frame was asked for. A server that owes an answer must not count as alive because of it.
            _ => tracing::debug!("the memory server sent a frame that means nothing here"),
        }
    }
}

fn pool_offer(welcome: &Welcome) -> PoolOffer {
    PoolOffer {
        generation: welcome.pool_generation.0,
        npages: welcome.npages,
        available: welcome.available,
        // The engine counts on from the server's figure, so it must leave room for that.
        sends_received: welcome.sends_received.0.min(u64::MAX / 2),
    }
}
