//! The connections to memory servers, as the driver uses them: sessions start and end, frames are sent and received.

use super::host::Host;
use super::in_flight::InFlight;
use super::poller::Source;
use super::tiers::TierSizes;
use crate::endpoints::Endpoints;
use crate::link::{KnownServer, News, PageHere, Received, ServerLink, Session, Size};
use remoca_core::engine::{Admitted, DiskEngine, FetchId, PageOutcome, PoolOffer, PoolSlot, PoolStatus, ServerNumber};
use remoca_core::units::{Nanos, PAGE_SIZE_U64, PageCount, SlotIndex};
use remoca_io::address::Endpoint;
use remoca_io::narrow;
use remoca_io::show::show_size;
use remoca_io::words::IndexMemory;
use remoca_protocol::{ErrorCode, Frame, RequestId, Welcome};
use std::io;
use std::time::Instant;

/// The link to memory servers, if there is one.
pub(super) struct Servers {
    link: Option<ServerLink>,
    /// Server of this host, which has the local tier as soon as one is wanted.
    local_server: Endpoint,
    /// One for each session, in no order.
    hearings: Vec<Hearing>,
    /// Answers about sizes that were given without their servers.
    sizes: Vec<(ServerNumber, Size)>,
    /// Whether the operator was told that the servers have no room, for this size.
    shortage_told: bool,
}

/// What outlives a turn of the messages from a session's server.
pub(super) struct Hearing {
    server: ServerNumber,
    /// Error with which the server ended the session.
    dismissal: Option<ErrorCode>,
    /// Whether the server has answered a SETSIZE since [`Servers::take_sized`].
    is_sized: bool,
    /// Whether the server sent more than one turn handles.
    receive_again: bool,
}

impl Servers {
    /// Returns the connections of `link`. A local tier is at `local_server`.
    pub(super) fn new(link: Option<ServerLink>, local_server: Endpoint) -> Self {
        Self { link, local_server, hearings: Vec::new(), sizes: Vec::new(), shortage_told: false }
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
        self.sizes.clear();
        self.link = link;
    }

    /// Removes the link and unregisters its descriptors. Returns the link, or `None` if there was none.
    pub(super) fn detach(&mut self, host: &Host) -> Option<ServerLink> {
        self.hearings.clear();
        self.sizes.clear();
        let link = self.link.take()?;
        link.sessions().iter().filter_map(Session::socket_fd).for_each(|socket| host.unwatch(socket));
        host.unwatch(link.wake_fd());
        Some(link)
    }

    /// Returns the numbers of the listed servers, and of that of the local tier. Returns `None` if there is no link.
    pub(super) fn numbers(&self) -> Option<(Vec<ServerNumber>, Option<ServerNumber>)> {
        let link = self.link.as_ref()?;
        let (local, listed): (Vec<_>, Vec<_>) = link.servers().iter().partition(|server| link.is_local(server));
        Some((listed.iter().map(|server| server.number).collect(), local.first().map(|server| server.number)))
    }

    /// Returns the server that has the local tier, or would be asked for one. Returns `None` without any server.
    pub(super) fn local_server(&self) -> Option<Endpoint> {
        let Endpoints { listed, local } = self.link.as_ref()?.endpoints();
        local.or_else(|| (!listed.is_empty()).then(|| self.local_server.clone()))
    }

    /// Adds the server of the local tier, if one of this size is wanted and the server is not there yet.
    pub(super) fn add_local_server(&mut self, size: PageCount) -> Result<(), String> {
        let Some(link) = self.link.as_mut().filter(|_| size.0 > 0) else { return Ok(()) };
        let Endpoints { listed, local } = link.endpoints();
        let local = Some(local.unwrap_or_else(|| self.local_server.clone()));
        link.replace(&Endpoints { listed, local }).map_err(|error| error.to_string())
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

    /// Queues the move of a page within a pool, or moves it. Does nothing if there is no session with that server.
    pub(super) fn move_page(&mut self, server: ServerNumber, from: SlotIndex, to: SlotIndex) {
        if let Some(session) = self.session(server) {
            session.move_page(from, to);
        }
    }

    /// Queues the request for a size. Drops it if there is no session with that server. An answer that is there at once is
    /// one of [`Self::next_size`].
    pub(super) fn set_size(&mut self, server: ServerNumber, npages: PageCount) {
        if let Some(session) = self.session(server) {
            let size = session.set_size(npages);
            self.note_size(server, size);
            // What was sent before is known to have arrived once the size is answered.
            self.keep_sends(server);
        }
    }

    fn note_size(&mut self, server: ServerNumber, size: Size) {
        if size != Size::Asked {
            self.sizes.push((server, size));
        }
    }

    /// Returns the next answer about a size that was given without the server, or `None` if there is none.
    pub(super) fn next_size(&mut self) -> Option<(ServerNumber, Size)> {
        self.sizes.pop()
    }

    /// Queues the request for the page of a slot. Drops it if there is no session with the slot's server. Returns whether
    /// [`Self::read`] has the page instead, because the pool is mapped, or the page has not left for the server yet.
    pub(super) fn fetch(&mut self, fetch: FetchId, at: PoolSlot) -> bool {
        let Some(session) = self.session(at.server) else { return false };
        let Some(out) = session.begin_fetch(at.slot) else { return true };
        Frame::Request { request: RequestId(fetch.0), slot: at.slot }.encode(out);
        false
    }

    /// Returns the page of a slot of a mapped pool, or one that has not left yet. Returns `None` if it is not there.
    pub(super) fn read(&mut self, at: PoolSlot) -> Option<PageHere<'_>> {
        self.session(at.server)?.read(at.slot)
    }

    /// Copies an admitted page into its slot, or queues it. Drops it if there is no session with the slot's server. Copies
    /// the page that is there to the slot to which it is demoted first. Returns the number of pages that have reached the
    /// pool of the slot.
    ///
    /// # Panics
    /// If the page to demote is in no mapped pool: it cannot be read here.
    pub(super) fn admit(&mut self, admitted: Admitted, page: &[u8]) -> u32 {
        let Admitted { at, demoted_to } = admitted;
        if let Some(target) = demoted_to {
            self.demote(at, target);
        }
        self.session(at.server).map_or(0, |session| session.send_page(at.slot, page))
    }

    fn demote(&mut self, at: PoolSlot, target: PoolSlot) {
        let Some(session) = self.session(at.server) else { return };
        let page = session.copy(at.slot);
        let page = page.unwrap_or_else(|| panic!("the page in {at:?} cannot be copied from there to {target:?}"));
        // If the page is not there, zeroes are no content that anybody asks for.
        let sent = self.session(target.server).map_or(0, |session| session.send_page(target.slot, &page));
        assert!(sent == 0, "a page is demoted from one mapped pool to another, {target:?}");
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
            Some(session) => watch(session, host),
            None => Err(io::ErrorKind::NotConnected.into()),
        };
        self.hearings.push(Hearing::new(server));
        narrow::passes("session-begun");
        watched.map_err(|error| format!("its socket cannot be watched: {error}"))
    }

    /// Unregisters the socket of the session with this server, and ends the session by calling `end`.
    pub(super) fn end_session(&mut self, host: &Host, server: ServerNumber, end: impl FnOnce(&mut ServerLink)) {
        if let Some(socket) = self.session(server).and_then(|session| session.socket_fd()) {
            host.unwatch(socket);
        }
        if let Some(link) = &mut self.link {
            end(link);
        }
        self.hearings.retain(|hearing| hearing.server != server);
    }

    /// Makes the operator be told again when the servers have no room.
    pub(super) fn forget_refusal(&mut self) {
        self.shortage_told = false;
    }

    /// Returns whether a server has answered a SETSIZE since the last call.
    pub(super) fn take_sized(&mut self, server: ServerNumber) -> bool {
        let hearing = self.hearings.iter_mut().find(|hearing| hearing.server == server);
        hearing.is_some_and(|hearing| std::mem::take(&mut hearing.is_sized))
    }

    /// Tells the operator, once for each size, that all servers together have less memory than is wanted. Says nothing while
    /// a server has not answered, or has no pool.
    pub(super) fn tell_shortage(&mut self, engine: &DiskEngine<IndexMemory>) {
        let status = engine.status();
        let link = self.link.as_ref();
        // The server of a local tier that is not wanted gives nothing, and what is drained goes.
        let servers = link.map_or(0, |link| {
            let is_counted = |server: &&KnownServer| status.local_wanted.0 > 0 || !link.is_local(server);
            link.servers().iter().filter(is_counted).count()
        });
        let is_asked = |pool: &PoolStatus| !pool.is_draining && pool.granted == pool.wanted;
        let are_asked = status.pools.len() == servers && status.pools.iter().all(is_asked);
        let (granted, wanted) = (
            TierSizes { cache: status.granted, local: status.local_granted },
            TierSizes { cache: status.wanted, local: status.local_wanted },
        );
        if granted.cache >= wanted.cache && granted.local >= wanted.local {
            self.shortage_told = false;
        } else if are_asked && !std::mem::replace(&mut self.shortage_told, true) {
            let size = |pages: PageCount| show_size(u64::from(pages.0) * PAGE_SIZE_U64);
            tracing::warn!(
                "the memory servers have no room for the cache's size: they gave {} of {}. Taking what there is.",
                size(granted.sum()),
                size(wanted.sum())
            );
        }
    }

    /// Returns the next news of a server, or `None` if there are none.
    pub(super) fn next_news(&mut self, host: &Host) -> Option<(ServerNumber, News)> {
        self.link.as_mut()?.take_news(host.instant())
    }

    /// Watches the new connection of the session with this server.
    ///
    /// # Errors
    /// If the system cannot watch its socket.
    pub(super) fn rejoin(&mut self, host: &Host, server: ServerNumber) -> Result<(), String> {
        let watched = self.session(server).map_or(Ok(()), |session| watch(session, host));
        watched.map_err(|error| format!("its socket cannot be watched: {error}"))
    }

    /// Closes the connection of the session with this server, which is lost because of `why`, if the session goes on without
    /// it. Returns whether it does.
    pub(super) fn outlive(&mut self, host: &Host, server: ServerNumber, why: &str) -> bool {
        let Some(session) = self.session(server).filter(|session| session.outlives_connection()) else { return false };
        if let Some(socket) = session.socket_fd() {
            host.unwatch(socket);
        }
        if let Some(size) = self.link.as_mut().and_then(|link| link.detach(server, why)) {
            self.note_size(server, size);
        }
        true
    }

    /// Returns the time at which [`Self::run_timers`] must be called, or `None` if nothing is due at any time.
    pub(super) fn next_deadline(&self, now: Instant) -> Option<Instant> {
        self.link.as_ref()?.next_deadline(now)
    }

    /// Connects anew to servers that are away. Returns a server that owes an answer for too long, or `None` if there is none.
    pub(super) fn run_timers(&mut self, now: Instant) -> Option<ServerNumber> {
        self.link.as_mut()?.run_timers(now)
    }

    /// Marks the socket of the session with this server as writable, because it has room again.
    pub(super) fn note_writable(&mut self, server: ServerNumber) {
        if let Some(session) = self.session(server) {
            session.note_writable();
        }
    }

    /// Sends the frames that are queued for this server. Returns the number of pages sent.
    ///
    /// # Errors
    /// If the connection is lost, or the system cannot watch its socket: nobody would say when it has room for the rest.
    pub(super) fn flush(&mut self, host: &Host, server: ServerNumber) -> io::Result<u32> {
        let Some(session) = self.session(server) else { return Ok(0) };
        let pages = session.flush()?;
        if let (Some(watch), Some(socket)) = (session.watch_change(), session.socket_fd()) {
            let watched = host.watch_room(socket, Source::LinkSocket(server), watch);
            watched.map_err(|error| io::Error::other(format!("its socket cannot be watched: {error}")))?;
        }
        self.keep_sends(server);
        Ok(pages)
    }

    fn keep_sends(&mut self, server: ServerNumber) {
        if let Some(link) = &mut self.link {
            link.keep_sends_of(server);
        }
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
            let why = match code {
                ErrorCode::TAKEN_BACK => "it took all memory back".to_owned(),
                code => format!("it ended the session: {code:?}"),
            };
            self.session(server)?.end(&why);
            return Some(why);
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
        Self { server, dismissal: None, is_sized: false, receive_again: false }
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
            Frame::Sized { npages, .. } => {
                self.is_sized = true;
                engine.handle_sized(now, server, npages);
            }
            Frame::TakeBack { npages } => engine.handle_taken_back(now, server, npages),
            Frame::Error(error) => match error.code {
                ErrorCode::NotFound => engine.handle_missing(now, server, FetchId(error.request.0)),
                ErrorCode::NoMemory | ErrorCode::Quota => {
                    self.is_sized = true;
                    engine.handle_size_refused(now, server, PageCount(error.detail));
                }
                // After these errors the server closes the connection. If it does not, we do.
                ErrorCode::VersionMismatch
                | ErrorCode::StaleEpoch
                | ErrorCode::Malformed
                | ErrorCode::Busy
                | ErrorCode::TAKEN_BACK => self.dismissal = Some(error.code),
                ErrorCode::Unknown(code) => {
                    tracing::debug!("the memory server says error {code}, which means nothing here")
                }
            },
            // No such frame was asked for. A server that owes an answer must not count as alive because of it.
            _ => tracing::debug!("the memory server sent a frame that means nothing here"),
        }
    }
}

fn watch(session: &Session, host: &Host) -> io::Result<()> {
    // The server of a mapped pool may be away.
    session.socket_fd().map_or(Ok(()), |socket| host.watch(socket, Source::LinkSocket(session.server())))
}

/// Returns the offer of a welcome.
pub(super) fn pool_offer(welcome: &Welcome) -> PoolOffer {
    PoolOffer {
        generation: welcome.pool_generation.0,
        npages: welcome.npages,
        available: welcome.available,
        // The engine counts on from the server's figure, so it must leave room for that.
        sends_received: welcome.sends_received.0.min(u64::MAX / 2),
    }
}

#[cfg(test)]
#[path = "servers_tests.rs"]
mod tests;
