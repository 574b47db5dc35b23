//! The connections to memory servers, as the driver has them: sessions begin and end, frames come and go.

use super::host::Host;
use super::in_flight::InFlight;
use super::poller::Source;
use crate::link::{Received, ServerLink, Session};
use remoca_core::engine::{DiskEngine, FetchId, PageOutcome, PoolOffer, ServerNumber};
use remoca_core::units::{Nanos, PAGE_SIZE_U64, PageCount, SlotIndex};
use remoca_io::narrow;
use remoca_io::words::IndexMemory;
use remoca_protocol::{ErrorCode, Frame, Welcome};
use std::io;

/// The link to memory servers, if there is one.
pub(super) struct Servers {
    link: Option<ServerLink>,
    hearing: Hearing,
    /// The server sent more than one turn takes.
    receive_again: bool,
}

/// What the server of the session said that outlives the turn.
#[derive(Default)]
pub(super) struct Hearing {
    /// It ended the session with this.
    dismissal: Option<ErrorCode>,
    /// The operator was told that it has no room, in this session and for this size.
    refusal_told: bool,
}

impl Servers {
    /// Returns the connections of this link.
    pub(super) fn new(link: Option<ServerLink>) -> Self {
        Self { link, hearing: Hearing::default(), receive_again: false }
    }

    /// Returns the link.
    pub(super) fn link(&self) -> Option<&ServerLink> {
        self.link.as_ref()
    }

    /// Returns the link, to be changed.
    pub(super) fn link_mut(&mut self) -> Option<&mut ServerLink> {
        self.link.as_mut()
    }

    /// Has the link's answers reported, if there is a link.
    pub(super) fn register(&self, host: &Host) -> io::Result<()> {
        self.link.as_ref().map_or(Ok(()), |link| host.watch(link.wake_fd(), Source::LinkWake))
    }

    /// Replaces the link by one whose descriptors are not reported yet.
    pub(super) fn attach(&mut self, link: Option<ServerLink>) {
        self.link = link;
    }

    /// Returns the link, whose descriptors are not reported any more.
    pub(super) fn detach(&mut self, host: &Host) -> Option<ServerLink> {
        self.receive_again = false;
        let mut link = self.link.take()?;
        if let Some(session) = link.session_mut() {
            host.unwatch(session.socket_fd());
        }
        host.unwatch(link.wake_fd());
        Some(link)
    }

    /// Returns the numbers of all servers.
    pub(super) fn numbers(&self) -> Option<Vec<ServerNumber>> {
        let link = self.link.as_ref()?;
        Some(link.servers().iter().map(|server| server.number).collect())
    }

    fn session(&mut self) -> Option<&mut Session> {
        self.link.as_mut()?.session_mut()
    }

    /// Queues a frame for the server.
    pub(super) fn send(&mut self, frame: &Frame<'_>) {
        if let Some(session) = self.session() {
            frame.encode(session.out());
        }
    }

    /// Queues a page for the server.
    pub(super) fn send_page(&mut self, slot: SlotIndex, page: &[u8]) {
        if let Some(session) = self.session() {
            session.send_page(slot, page);
        }
    }

    /// Asks a server what it could give.
    pub(super) fn ask(&mut self, server: ServerNumber) {
        if let Some(link) = &mut self.link {
            link.ask(server);
        }
    }

    /// Says goodbye to a server that was asked.
    pub(super) fn release(&mut self, server: ServerNumber) {
        if let Some(link) = &mut self.link {
            link.release(server);
        }
    }

    /// Begins a session with a server that was asked.
    pub(super) fn begin_session(&mut self, host: &Host, server: ServerNumber) -> Result<(), String> {
        let Some(link) = &mut self.link else { return Ok(()) };
        self.hearing.refusal_told = false;
        let watched = match link.begin(server).then(|| link.session_mut()).flatten() {
            Some(session) => host.watch(session.socket_fd(), Source::LinkSocket),
            None => Err(io::ErrorKind::NotConnected.into()),
        };
        narrow::passes("session-begun");
        watched.map_err(|error| format!("its socket cannot be watched: {error}"))
    }

    /// Ends the session, as `end` says it.
    pub(super) fn end_session(&mut self, host: &Host, end: impl FnOnce(&mut ServerLink)) {
        if let Some(link) = &mut self.link {
            if let Some(session) = link.session_mut() {
                host.unwatch(session.socket_fd());
            }
            end(link);
        }
        self.receive_again = false;
    }

    /// Has the operator told again when the server has no room.
    pub(super) fn forget_refusal(&mut self) {
        self.hearing.refusal_told = false;
    }

    /// Returns the next answer of a server that was asked; `None` in it: there is none.
    pub(super) fn next_answer(&mut self, host: &Host) -> Option<(ServerNumber, Option<PoolOffer>)> {
        let (server, welcome) = self.link.as_mut()?.take_answer(host.instant())?;
        Some((server, welcome.map(|welcome| pool_offer(&welcome))))
    }

    /// Notes that the socket has room.
    pub(super) fn note_writable(&mut self) {
        if let Some(session) = self.session() {
            session.note_writable();
        }
    }

    /// Sends what is queued. Returns how many pages that were.
    pub(super) fn flush(&mut self, host: &Host) -> io::Result<u32> {
        let Some(session) = self.session() else { return Ok(0) };
        let pages = session.flush()?;
        if let Some(watch) = session.watch_change()
            && let Err(error) = host.watch_room(session.socket_fd(), Source::LinkSocket, watch)
        {
            tracing::warn!("cannot watch the server's socket: {error}");
        }
        Ok(pages)
    }

    /// Returns the session, and who hears what comes on it.
    pub(super) fn listen(&mut self) -> Option<(&mut Session, &mut Hearing)> {
        Some((self.link.as_mut()?.session_mut()?, &mut self.hearing))
    }

    /// Returns why the session is lost, if it is.
    pub(super) fn lost(&mut self, received: io::Result<Received>) -> Option<String> {
        if let Some(code) = self.hearing.dismissal.take() {
            return Some(format!("it ended the session: {code:?}"));
        }
        match received {
            Ok(Received::Drained) => {}
            Ok(Received::More) => self.receive_again = true,
            Err(error) => return Some(error.to_string()),
        }
        None
    }

    /// Returns whether more has come than one turn takes.
    pub(super) fn receives_again(&self) -> bool {
        self.receive_again
    }

    /// Returns whether more has come than one turn takes, once.
    pub(super) fn take_receive_again(&mut self) -> bool {
        std::mem::take(&mut self.receive_again)
    }

    /// Handles a frame as if the server had sent it.
    #[cfg(test)]
    pub(super) fn hear(
        &mut self,
        frame: &Frame<'_>,
        engine: &mut DiskEngine<IndexMemory>,
        in_flight: &mut InFlight,
        now: Nanos,
    ) {
        self.hearing.hear(frame, engine, in_flight, now);
    }
}

impl Hearing {
    /// Handles a frame of the server.
    pub(super) fn hear(
        &mut self,
        frame: &Frame<'_>,
        engine: &mut DiskEngine<IndexMemory>,
        in_flight: &mut InFlight,
        now: Nanos,
    ) {
        match *frame {
            Frame::SendPage { request, page, .. } => {
                let outcome = engine.handle_page(now, FetchId(request.0), page);
                if let PageOutcome::Deliver { request, offset } = outcome {
                    in_flight.deliver(engine, request, offset, page);
                }
            }
            Frame::Sized { npages, .. } => engine.handle_sized(now, npages),
            Frame::Error(error) => match error.code {
                ErrorCode::NotFound => engine.handle_missing(now, FetchId(error.request.0)),
                ErrorCode::NoMemory | ErrorCode::Quota => {
                    let available = PageCount(error.detail);
                    if !std::mem::replace(&mut self.refusal_told, true) {
                        tracing::warn!(
                            "the memory server has no room for the cache's size; it could give {} MiB more. Taking what there is.",
                            (u64::from(available.0) * PAGE_SIZE_U64) >> 20
                        );
                    }
                    engine.handle_size_refused(now, available);
                }
                // After these the server closes the connection. Should it not, we do.
                ErrorCode::VersionMismatch | ErrorCode::StaleEpoch | ErrorCode::Malformed | ErrorCode::Busy => {
                    self.dismissal = Some(error.code);
                }
                ErrorCode::Unknown(code) => {
                    tracing::debug!("the memory server says error {code}, which means nothing here")
                }
            },
            // Nobody asked for one, and a server that owes an answer must not pass for alive by it.
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
