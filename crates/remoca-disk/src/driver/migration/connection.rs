//! The connection to the process that gets the disks or has them: made by one side, made again while that process has our
//! disks, and lost.

use crate::driver::host::Host;
use crate::driver::poller::Source;
use crate::migration::{Heard, Incoming, Peer, PeerNetwork};
use remoca_core::migration::Ownership;
use remoca_io::address::Endpoint;
use remoca_io::control::ControlRequest;
use remoca_io::wake::WakeUp;
use remoca_protocol::control::MigrationStatus;
use remoca_protocol::control::Secret;
use remoca_protocol::peer::Offer;
use std::io;
use std::time::{Duration, Instant};

/// For a peer to be reached, to prove itself, and to offer or to answer; less than the control client waits.
const OFFER_PATIENCE: Duration = Duration::from_secs(5);

/// Between two attempts to reach a peer that has the disks: at first, and at last.
const LINK_AGAIN_AFTER: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(16));

/// Processes that connected and are looked at in one turn.
const CONNECTED_IN_A_TURN: usize = 16;

/// At most one peer, and how it is found.
pub(super) struct Connection {
    peers: Box<dyn PeerNetwork>,
    wake_up: WakeUp,
    incoming: Option<Incoming>,
    peer: Option<Peer>,
    /// As the operator named it, or "the source".
    name: String,
    /// When it was connected to, or tried last.
    since: Option<Instant>,
    /// Where the disks go or went, and the secret that is shared with it: for another link after one that broke.
    way: Option<(Endpoint, Secret)>,
    /// After the beginning of the last attempt, while the peer that has the disks is not linked.
    again_after: Duration,
    /// The peer is to have the disks already.
    links_again: bool,
    /// Who waits for the peer's answer to the offer.
    client: Option<ControlRequest>,
}

/// What is left of a connection that was lost.
pub(super) struct Lost {
    pub(super) name: String,
    pub(super) client: Option<ControlRequest>,
    /// The peer was to have the disks already.
    pub(super) linked_again: bool,
}

impl Connection {
    /// Returns a connection without a peer. `incoming`: where others may connect, and the secret that they must have.
    pub(super) fn new(mut peers: Box<dyn PeerNetwork>, incoming: Option<(Endpoint, Secret)>) -> io::Result<Self> {
        let wake_up = WakeUp::new()?;
        let incoming =
            incoming.map(|(endpoint, secret)| peers.listen(endpoint, &secret, wake_up.wake())).transpose()?;
        Ok(Self {
            peers,
            wake_up,
            incoming,
            peer: None,
            name: String::new(),
            since: None,
            way: None,
            again_after: LINK_AGAIN_AFTER.0,
            links_again: false,
            client: None,
        })
    }

    /// Has what comes from peers reported.
    pub(super) fn register(&self, host: &Host) -> io::Result<()> {
        host.watch(self.wake_up.fd(), Source::Migration)
    }

    /// Clears the wake-up, before everything that it may be about is looked at.
    pub(super) fn clear_wake(&self) {
        self.wake_up.clear();
    }

    /// Raises the wake-up: not everything was looked at.
    pub(super) fn raise_wake(&self) {
        self.wake_up.raise();
    }

    /// Takes a process that has connected, and refuses others. Returns whether there is one.
    pub(super) fn take_peers(&mut self, now: Instant) -> bool {
        let mut any = false;
        for _ in 0..CONNECTED_IN_A_TURN {
            let Some(peer) = self.incoming.as_mut().and_then(Incoming::take_peer) else { break };
            if self.peer.is_some() {
                peer.refuse("this process is connected with another one: is it about to get its disks already?");
                peer.end_politely();
            } else {
                any = true;
                self.peer = Some(peer);
                self.since = Some(now);
                self.links_again = false;
                "the source".clone_into(&mut self.name);
            }
        }
        any
    }

    /// Connects to a process, and offers it the disks, or says that it is to have them.
    pub(super) fn connect(&mut self, endpoint: Endpoint, key: &Secret, offer: &Offer, now: Instant) -> io::Result<()> {
        let peer = self.peers.connect(endpoint.clone(), key, self.wake_up.wake())?;
        peer.offer(offer);
        self.name = endpoint.to_string();
        self.peer = Some(peer);
        self.since = Some(now);
        self.links_again = offer.returns;
        self.way = Some((endpoint, key.clone()));
        Ok(())
    }

    /// Returns what the peer said next.
    pub(super) fn hear(&mut self) -> Option<Heard> {
        self.peer.as_mut().and_then(Peer::hear)
    }

    /// Returns the peer.
    pub(super) fn peer(&self) -> Option<&Peer> {
        self.peer.as_ref()
    }

    /// Returns the peer's name.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Returns whether others may connect.
    pub(super) fn is_incoming(&self) -> bool {
        self.incoming.is_some()
    }

    /// Keeps the client that waits for the answer to an offer.
    pub(super) fn keep_client(&mut self, client: ControlRequest) {
        self.client = Some(client);
    }

    /// Returns the client that waits for the answer to an offer.
    pub(super) fn take_client(&mut self) -> Option<ControlRequest> {
        self.client.take()
    }

    /// Returns whether a client waits for the answer to an offer.
    pub(super) fn has_client(&self) -> bool {
        self.client.is_some()
    }

    /// Returns whether the peer is to have the disks already.
    pub(super) fn links_again(&self) -> bool {
        self.links_again
    }

    /// Returns whether the connection is one that this side made.
    pub(super) fn asked(&self) -> bool {
        self.client.is_some() || self.links_again
    }

    /// Notes that the peer answered: another connection can be made soon after this one.
    pub(super) fn note_answer(&mut self) {
        self.again_after = LINK_AGAIN_AFTER.0;
        self.links_again = false;
    }

    /// Ends a connection that was to find out where our disks are: they are here.
    pub(super) fn end_search(&mut self) {
        if std::mem::take(&mut self.links_again) {
            self.peer = None;
        }
    }

    /// Ends the connection.
    pub(super) fn end(&mut self) {
        self.peer = None;
    }

    /// Ends the connection when everything is sent.
    pub(super) fn end_politely(&mut self) {
        if let Some(peer) = self.peer.take() {
            peer.end_politely();
        }
    }

    /// Makes no other connection when this one is lost.
    pub(super) fn forget_way(&mut self) {
        self.way = None;
    }

    /// Ends the connection; `None`: there was none.
    pub(super) fn lose(&mut self) -> Option<Lost> {
        self.peer.take()?;
        let (name, client) = (std::mem::take(&mut self.name), self.client.take());
        Some(Lost { name, client, linked_again: std::mem::take(&mut self.links_again) })
    }

    /// Has the peer hear that no more comes.
    pub(super) fn say_no_more(&mut self) {
        if let Some(peer) = &mut self.peer {
            peer.say_no_more();
        }
    }

    /// Begins another attempt to reach the process that has our disks. Returns where it is, and the secret.
    pub(super) fn begin_attempt(&mut self, now: Instant) -> Option<(Endpoint, Secret)> {
        self.again_after = LINK_AGAIN_AFTER.1.min(self.again_after * 2);
        self.since = Some(now);
        self.way.clone()
    }

    /// Returns the time that is left for an offer, or the answer to one.
    pub(super) fn offer_left(&self, ownership: &Ownership, host: &Host) -> Option<Duration> {
        let waits = self.peer.is_some() && !ownership.is_linked();
        waits.then(|| OFFER_PATIENCE.saturating_sub(self.age(host)))
    }

    /// Returns the time until the next attempt to reach the process that has our disks; `None` if there is nothing to
    /// attempt.
    pub(super) fn link_again_left(&self, ownership: &Ownership, host: &Host) -> Option<Duration> {
        let is_due = self.peer.is_none() && !ownership.holds() && self.way.is_some();
        is_due.then(|| self.again_after.saturating_sub(self.age(host)))
    }

    /// Returns how long ago the peer was connected to, or tried last.
    fn age(&self, host: &Host) -> Duration {
        self.since.map_or(Duration::ZERO, |since| host.time_since(since))
    }

    /// Returns what the operator is told of the connection, beside the `news`; `None`: there is nothing to tell.
    pub(super) fn status(&self, has_disks: bool, news: Option<&String>) -> Option<MigrationStatus> {
        if self.incoming.is_none() && self.peer.is_none() && news.is_none() {
            return None;
        }
        Some(MigrationStatus {
            has_disks,
            incoming: self.incoming.as_ref().map(|incoming| incoming.endpoint.to_string()),
            peer: self.peer.as_ref().map(|_| self.name.clone()),
            news: news.cloned(),
        })
    }
}
