//! The connections to memory servers: the list of servers, the sessions with those that have a pool, and what is known of
//! the others.
//!
//! Owned by the I/O thread. Name look-up, connecting and the hello block, so each attempt has a thread, which hands over an
//! established connection. The engine decides which server is asked, and which connections become sessions. The engine's
//! send window and fetch limit bound what waits to be sent. Frames are passed to the driver as they are; the engine
//! interprets them. Each server has a token of its own, so a token that strangers learn names no pool on another server.
//! A server that is taken out of the list keeps number and token as long as the engine drains its pool.

mod answers;
mod away;
mod connect;
mod leaving;
mod mapped;
mod memory;
mod outgoing;
mod rejoin;
mod session;
mod sessions;

pub use away::{KeptPool, News};
pub use connect::{Answer, AnswerTo, Connected, HostNetwork, LinkError, Network, give_back, probe, return_pool};
pub use memory::PoolMemory;
pub use session::{PageHere, Received, Session, Size, Traffic};

use crate::endpoints::Endpoints;
use crate::state::{Header, NUMBER_MAX, RosterEntry};
use away::{Rejoins, Waiting};
use connect::{Asker, bye};
use remoca_core::engine::ServerNumber;
use remoca_core::units::PageCount;
use remoca_io::address::Endpoint;
use remoca_io::wake;
use remoca_protocol::peer;
use remoca_protocol::{Frame, Token};
use sessions::Sessions;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

/// A server of the list, or that of the local tier.
pub struct KnownServer {
    pub number: ServerNumber,
    pub endpoint: Endpoint,
    token: Token,
    /// Epoch of the newest connection.
    epoch: u64,
    /// Number of pages that were ever written to mapped pools there.
    sends: u64,
    /// Mapped pool that a former program of this process had there, and which is in no session yet.
    kept: Option<KeptPool>,
    /// Why there was no connection, or why the last session ended.
    error: Option<LinkError>,
    /// When the server last answered, and how many pages it could give then.
    pub answered: Option<(Instant, PageCount)>,
    /// Whether it was taken out of the list, and the engine may still have a pool there.
    leaves: bool,
    /// Whether it was told that this process has no pool there.
    is_told: bool,
}

impl From<RosterEntry> for KnownServer {
    fn from(RosterEntry { number, endpoint, token, epoch, sends, leaves }: RosterEntry) -> Self {
        let (kept, error, answered, is_told) = (None, None, None, false);
        Self { number, endpoint, token, epoch, sends, kept, error, answered, leaves, is_told }
    }
}

impl KnownServer {
    fn entry(&self) -> RosterEntry {
        let (endpoint, token) = (self.endpoint.clone(), self.token);
        let Self { number, epoch, sends, leaves, .. } = *self;
        RosterEntry { number, endpoint, token, epoch, sends, leaves }
    }

    /// Returns why the server could not be used when it was last tried, or why its last session ended. Returns `None`
    /// if there is no error.
    #[must_use]
    pub fn error(&self) -> Option<String> {
        self.error.as_ref().map(ToString::to_string)
    }
}

/// The link to the memory servers.
pub struct ServerLink {
    network: Arc<dyn Network>,
    /// The listed servers, in the operator's order, that of the local tier, and after them those that leave.
    servers: Vec<KnownServer>,
    local: Option<Endpoint>,
    numbers: u32,
    /// Header of the state file, in which tokens and epochs are kept for a successor of this process.
    kept: Option<Arc<Header>>,
    answer_queue: Sender<(ServerNumber, Asker, Answer)>,
    answers: Receiver<(ServerNumber, Asker, Answer)>,
    wake: Arc<OwnedFd>,
    /// Connections that the engine has not decided on.
    waiting: Vec<Waiting>,
    sessions: Sessions,
    rejoins: Rejoins,
    /// The server of the session that began last.
    latest: Option<ServerNumber>,
}

impl ServerLink {
    /// Returns a link to these servers over `network`, without a connection. Restores the tokens and epochs that a
    /// previous process kept in `header`, and keeps its own there. Other servers of that process leave.
    ///
    /// # Errors
    /// If the system provides no eventfd or random numbers, or the servers are not valid ([`Endpoints::check`]).
    pub fn start(network: Arc<dyn Network>, endpoints: &Endpoints, header: Option<Arc<Header>>) -> io::Result<Self> {
        let wake = Arc::new(wake::new()?);
        let (answer_queue, answers) = channel();
        let former = header.as_ref().map(|header| header.roster()).unwrap_or_default();
        let after = |entry: &RosterEntry| entry.number.0.saturating_add(1);
        let numbers = header.as_ref().map_or(0, |header| header.server_numbers());
        let mut link = Self {
            network,
            numbers: former.iter().map(after).max().unwrap_or(0).max(numbers),
            servers: former.into_iter().map(KnownServer::from).collect(),
            local: None,
            kept: header,
            answer_queue,
            answers,
            wake,
            waiting: Vec::new(),
            sessions: Sessions::default(),
            rejoins: Rejoins::default(),
            latest: None,
        };
        link.replace(endpoints)?;
        Ok(link)
    }

    /// Returns the network by which the servers are reached.
    pub fn network(&self) -> Arc<dyn Network> {
        Arc::clone(&self.network)
    }

    /// Keeps tokens and epochs in `header` from now on.
    pub fn keep_in(&mut self, header: Arc<Header>) {
        self.kept = Some(header);
        self.keep();
    }

    /// Keeps tokens and epochs nowhere from now on: a header that is mapped keeps the memory of its whole file.
    pub fn keep_nowhere(&mut self) {
        self.kept = None;
    }

    fn keep(&self) {
        let Some(header) = &self.kept else { return };
        header.set_server_numbers(self.numbers);
        header.set_roster(&self.servers.iter().map(KnownServer::entry).collect::<Vec<_>>());
    }

    /// Returns a link to these servers that uses the numbers, tokens and epochs of another process: it may have a pool
    /// there under that token.
    ///
    /// # Errors
    /// As for [`Self::start`].
    pub fn resume(network: Arc<dyn Network>, endpoints: &Endpoints, roster: &[peer::Server]) -> io::Result<Self> {
        let mut link = Self::start(network, endpoints, None)?;
        let roster: Vec<_> = roster.iter().filter(|known| known.number <= NUMBER_MAX).collect();
        link.numbers = roster.iter().map(|known| known.number).max().map_or(0, |highest| highest.saturating_add(1));
        let mut named = Vec::new();
        for server in &mut link.servers {
            let address = server.endpoint.to_string();
            let known = roster.iter().find(|known| known.endpoint == address && !named.contains(&known.number));
            if let Some(known) = known {
                named.push(known.number);
                // The other process is on another host, and so is what its local pool was. The same server may be asked anew.
                if matches!(server.endpoint, Endpoint::Local(_)) {
                    server.number = ServerNumber(link.numbers);
                    link.numbers = link.numbers.saturating_add(1);
                } else {
                    server.number = ServerNumber(known.number);
                }
                (server.token, server.epoch) = (Token(known.token), known.epoch.min(u64::MAX / 2));
            } else {
                server.number = ServerNumber(link.numbers);
                link.numbers = link.numbers.saturating_add(1);
            }
        }
        Ok(link)
    }

    /// Returns the number, token and epoch that identify this process, and so its pool, at each server.
    pub fn roster(&self) -> Vec<peer::Server> {
        let name = |server: &KnownServer| peer::Server {
            number: server.number.0,
            endpoint: server.endpoint.to_string(),
            token: server.token.0,
            epoch: server.epoch,
        };
        self.servers.iter().map(name).collect()
    }

    /// Replaces the servers. Those that stay keep their numbers and tokens. Those that are no longer named leave: they keep
    /// them until [`Self::forget_left`] is told that they have no pool.
    ///
    /// # Errors
    /// As for [`Self::start`]; then nothing has changed.
    pub fn replace(&mut self, endpoints: &Endpoints) -> io::Result<()> {
        endpoints.check().map_err(io::Error::other)?;
        let is_new = |endpoint: &&Endpoint| self.servers.iter().all(|server| server.endpoint != **endpoint);
        let new: Vec<_> = endpoints.iter().filter(is_new).collect();
        let tokens = new.iter().map(|_| self.network.token()).collect::<io::Result<Vec<_>>>()?;
        for (endpoint, token) in new.into_iter().zip(tokens) {
            let (number, endpoint) = (ServerNumber(self.numbers), endpoint.clone());
            self.numbers += 1;
            self.servers.push(RosterEntry { number, endpoint, token, epoch: 0, sends: 0, leaves: false }.into());
        }
        for server in &mut self.servers {
            server.leaves = endpoints.position(&server.endpoint).is_none();
        }
        self.servers.sort_by_key(|server| endpoints.position(&server.endpoint).unwrap_or(usize::MAX));
        self.local.clone_from(&endpoints.local);
        self.keep();
        Ok(())
    }

    /// Returns the servers that do not leave, in the operator's order and that of the local tier last.
    pub fn servers(&self) -> &[KnownServer] {
        &self.servers[..self.servers.partition_point(|server| !server.leaves)]
    }

    /// Returns the addresses of the servers.
    pub fn endpoints(&self) -> Endpoints {
        let listed = self.servers().iter().filter(|server| !self.is_local(server));
        Endpoints { listed: listed.map(|server| server.endpoint.clone()).collect(), local: self.local.clone() }
    }

    /// Returns whether a server has the local tier.
    pub fn is_local(&self, server: &KnownServer) -> bool {
        self.local.as_ref() == Some(&server.endpoint)
    }

    /// Returns the server of the session that began last, of another session if that one has ended, or of the last one if
    /// there is no session: of the list, or a server that leaves if no other has a session. Otherwise returns the first of
    /// the list.
    pub fn current(&self) -> Option<&KnownServer> {
        let is_there = |server: &&KnownServer| self.sessions.contains(server.number) && !self.is_local(server);
        let is_latest = |server: &&KnownServer| Some(server.number) == self.latest && !self.is_local(server);
        let with_session = || self.servers().iter().filter(is_there);
        let with_session = with_session().find(is_latest).or_else(|| with_session().next());
        let with_session = with_session.or_else(|| self.servers.iter().find(is_there));
        // The local tier is in front of all of them.
        with_session.or_else(|| self.servers().iter().find(is_latest)).or(self.servers.first())
    }

    /// Returns whether there is a session with this server, so that it has a pool.
    pub fn has_session(&self, server: ServerNumber) -> bool {
        self.sessions.contains(server)
    }

    /// Returns the sessions, in the order of their servers' numbers.
    pub fn sessions(&self) -> &[Session] {
        self.sessions.all()
    }

    /// Returns the server of the first session after that with `previous`, or of the first of all, or `None` if there
    /// is none. Sessions may begin and end between two calls.
    pub fn next_session(&self, previous: Option<ServerNumber>) -> Option<ServerNumber> {
        self.sessions.next(previous)
    }

    /// Returns a descriptor that becomes readable when [`Self::take_news`] has news.
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Returns the session with this server, for sending and receiving, or `None` if there is none. Nothing is sent
    /// then: the engine is first notified of the disconnection.
    #[inline]
    pub fn session_mut(&mut self, server: ServerNumber) -> Option<&mut Session> {
        self.sessions.with(server)
    }

    fn server(&mut self, number: ServerNumber) -> Option<&mut KnownServer> {
        self.servers.iter_mut().find(|server| server.number == number)
    }

    fn take_waiting(&mut self, number: ServerNumber) -> Option<Waiting> {
        let at = self.waiting.iter().position(|waiting| waiting.server == number)?;
        Some(self.waiting.swap_remove(at))
    }

    /// Makes the waiting connection to this server a session. Returns false if there is no such connection, or if there
    /// are as many sessions as there may be.
    ///
    /// # Panics
    /// If there is a session with this server.
    pub fn begin(&mut self, number: ServerNumber) -> bool {
        if !self.sessions.has_room() {
            return false;
        }
        let Some(Waiting { socket, welcome, memory, .. }) = self.take_waiting(number) else { return false };
        if let Some(server) = self.server(number).filter(|_| socket.is_some()) {
            tracing::info!("connected to the memory server at {}", server.endpoint);
        }
        if socket.is_none() {
            self.rejoins.begin(number);
        }
        self.sessions.insert(Session::new(number, socket, &welcome, memory));
        self.latest = Some(number);
        true
    }

    /// Gives up the waiting connection to this server, and a pool that this process may have there, unless a session uses that pool.
    pub fn release(&mut self, number: ServerNumber) {
        let waiting = self.take_waiting(number).filter(|_| !self.sessions.contains(number));
        if let Some(socket) = waiting.and_then(|waiting| waiting.socket) {
            self.network.say_goodbye(socket, bye());
            self.note_told(number);
        }
    }

    /// Ends the session with this server, if there is one, because of `why`. The server may still have the pool.
    pub fn end(&mut self, number: ServerNumber, why: &str) {
        let Some(session) = self.sessions.remove(number) else { return };
        self.keep_sends(&session);
        self.rejoins.end(number);
        let reads = if self.sessions.is_empty() { "Reads" } else { "Reads of what it had" };
        if let Some(server) = self.server(number) {
            let endpoint = &server.endpoint;
            tracing::warn!("lost the memory server at {endpoint}: {why}. {reads} go to the disk; connecting anew.");
            server.error = Some(LinkError::Lost(endpoint.clone(), why.to_owned()));
        }
    }

    /// Ends the session with this server, if there is one, and gives its pool back.
    pub fn leave(&mut self, number: ServerNumber) {
        let Some(session) = self.sessions.remove(number) else { return };
        self.keep_sends(&session);
        self.rejoins.end(number);
        match self.known(number) {
            // With what it still has, or without: it may have been left at once.
            Some(KnownServer { endpoint, leaves: true, .. }) => {
                tracing::info!("left the memory server at {endpoint}: it is not in the list any more");
            }
            Some(server) if self.is_local(server) => {
                tracing::info!("left the memory server at {}: no local tier is wanted any more", server.endpoint);
            }
            Some(server) => tracing::info!("left the memory server at {}: others have its share", server.endpoint),
            None => tracing::info!("left the memory server that is not in the list any more"),
        }
        // A server that is away frees the pool after its grace time.
        if let (Some(socket), left) = session.leave() {
            self.network.say_goodbye(socket, left);
            self.note_told(number);
        }
    }

    /// Tells all servers to free the pools, as far as that is possible without blocking.
    pub fn goodbye(&mut self) {
        for session in self.sessions.all_mut() {
            Frame::Bye.encode(session.out());
            let _ = session.flush();
        }
    }
}

#[cfg(test)]
mod tests;
