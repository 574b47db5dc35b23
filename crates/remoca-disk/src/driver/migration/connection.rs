//! The connection to the process that is to get the disks or has them. One side makes it, and makes it again if it is
//! lost while that process has our disks.

use crate::driver::host::Host;
use crate::driver::poller::Source;
use crate::migration::{Heard, Incoming, Peer, PeerNetwork};
use remoca_core::migration::Ownership;
use remoca_io::address::Endpoint;
use remoca_io::control::ControlRequest;
use remoca_io::wake::WakeUp;
use remoca_io::words::LentWords;
use remoca_protocol::control::MigrationStatus;
use remoca_protocol::control::Secret;
use remoca_protocol::peer::{Offer, StateHeader};
use std::io;
use std::time::{Duration, Instant};

/// Time for a peer to be reached, to prove that it has the key, and to offer or to answer. Less than the control client
/// waits.
const OFFER_PATIENCE: Duration = Duration::from_secs(5);

/// Time between two attempts to reach a peer that has the disks: the first interval, and the longest.
const LINK_AGAIN_AFTER: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(16));

/// Maximum number of connected processes that are handled in one turn.
const CONNECTED_IN_A_TURN: usize = 16;

/// The connection to at most one peer, and the means to make it.
pub(super) struct Connection {
    peers: Box<dyn PeerNetwork>,
    wake_up: WakeUp,
    incoming: Option<Incoming>,
    peer: Option<Peer>,
    /// Name of the peer: as the operator gave it, or "the source".
    name: String,
    /// When the peer was connected or lost, or an attempt to connect last started or failed.
    since: Option<Instant>,
    /// Address of the process to which the disks go or went, and the secret shared with it, for a new connection after
    /// one that broke.
    way: Option<(Endpoint, Secret)>,
    /// Time until the next attempt, while the peer that has the disks is not linked.
    again_after: Duration,
    /// Whether the peer should have the disks already.
    links_again: bool,
    /// Whether the peer has made the connection.
    came: bool,
    /// Control client that waits for the peer's answer to the offer.
    client: Option<ControlRequest>,
}

/// What is left of a connection that was lost.
pub(super) struct Lost {
    pub(super) name: String,
    pub(super) client: Option<ControlRequest>,
    /// Whether the peer should have had the disks already.
    pub(super) linked_again: bool,
    /// Whether the peer had made the connection.
    pub(super) came: bool,
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
            came: false,
            client: None,
        })
    }

    /// Registers the wake-up of the peers' threads with the poller.
    pub(super) fn register(&self, host: &Host) -> io::Result<()> {
        host.watch(self.wake_up.fd(), Source::Migration)
    }

    /// Clears the wake-up. Called before everything that may have raised it is examined.
    pub(super) fn clear_wake(&self) {
        self.wake_up.clear();
    }

    /// Raises the wake-up, because not everything was examined.
    pub(super) fn raise_wake(&self) {
        self.wake_up.raise();
    }

    /// Accepts a process that has connected as the peer, and refuses any others. Returns whether one was accepted.
    pub(super) fn take_peers(&mut self, now: Instant) -> bool {
        let mut any = false;
        for _ in 0..CONNECTED_IN_A_TURN {
            let Some(peer) = self.incoming.as_mut().and_then(Incoming::take_peer) else { break };
            if self.peer.is_some() {
                peer.refuse("this process is connected with another one: is it about to get its disks already?");
                peer.end_politely();
            } else {
                any = true;
                self.came = true;
                self.peer = Some(peer);
                self.since = Some(now);
                self.links_again = false;
                "the source".clone_into(&mut self.name);
            }
        }
        any
    }

    /// Connects to a process and sends `offer`, which offers it the disks or says that it should have them already.
    pub(super) fn connect(&mut self, endpoint: Endpoint, key: &Secret, offer: &Offer, now: Instant) -> io::Result<()> {
        let peer = self.peers.connect(endpoint.clone(), key, self.wake_up.wake())?;
        peer.offer(offer);
        self.name = endpoint.to_string();
        self.came = false;
        self.peer = Some(peer);
        self.since = Some(now);
        self.links_again = offer.returns;
        self.way = Some((endpoint, key.clone()));
        Ok(())
    }

    /// Returns the next event from the peer, or `None` if there is none.
    pub(super) fn hear(&mut self) -> Option<Heard> {
        self.peer.as_mut().and_then(Peer::hear)
    }

    /// Returns the peer, or `None` if there is no connection.
    pub(super) fn peer(&self) -> Option<&Peer> {
        self.peer.as_ref()
    }

    /// Sends the state of the disks to the peer, if there is one: its header, and the words of the index, if it goes along.
    pub(super) fn send_state(&mut self, header: &StateHeader, index: Option<(Vec<u32>, LentWords)>) {
        if let Some(peer) = &mut self.peer {
            peer.send_state(header, index);
        }
    }

    /// Calls off the sending of the state, if it is being sent.
    pub(super) fn stop_sending(&mut self) {
        if let Some(peer) = &mut self.peer {
            peer.stop_sending();
        }
    }

    /// Returns the peer's name.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Keeps the client that waits for the answer to an offer.
    pub(super) fn keep_client(&mut self, client: ControlRequest) {
        self.client = Some(client);
    }

    /// Removes and returns the client that waits for the answer to an offer, or returns `None` if no client waits.
    pub(super) fn take_client(&mut self) -> Option<ControlRequest> {
        self.client.take()
    }

    /// Returns whether the peer has made the connection.
    pub(super) fn came(&self) -> bool {
        self.came
    }

    /// Returns whether a client waits for the answer to an offer.
    pub(super) fn has_client(&self) -> bool {
        self.client.is_some()
    }

    /// Returns whether the peer should have the disks already.
    pub(super) fn links_again(&self) -> bool {
        self.links_again
    }

    /// Returns whether the connection is one that this side made.
    pub(super) fn asked(&self) -> bool {
        self.client.is_some() || self.links_again
    }

    /// Resets the time between two attempts to connect, and ends the search for our disks: the peer has answered.
    pub(super) fn note_answer(&mut self) {
        self.again_after = LINK_AGAIN_AFTER.0;
        self.links_again = false;
    }

    /// Ends a connection that was made to find out where our disks are, because they are here now.
    pub(super) fn end_search(&mut self) {
        if std::mem::take(&mut self.links_again) {
            self.peer = None;
        }
    }

    /// Ends the connection.
    pub(super) fn end(&mut self, now: Instant) {
        self.peer = None;
        self.since = Some(now);
    }

    /// Ends the connection when everything that was queued is sent.
    pub(super) fn end_politely(&mut self) {
        if let Some(peer) = self.peer.take() {
            peer.end_politely();
        }
    }

    /// Forgets the peer's address, so that no other connection is made when this one is lost.
    pub(super) fn forget_way(&mut self) {
        self.way = None;
    }

    /// Ends a connection that was lost. Returns what is left of it, or `None` if there was none.
    pub(super) fn lose(&mut self, now: Instant) -> Option<Lost> {
        self.peer.take()?;
        self.since = Some(now);
        let (name, client) = (std::mem::take(&mut self.name), self.client.take());
        Some(Lost { name, client, linked_again: std::mem::take(&mut self.links_again), came: self.came })
    }

    /// Tells the peer that nothing more comes.
    pub(super) fn say_no_more(&mut self) {
        if let Some(peer) = &mut self.peer {
            peer.say_no_more();
        }
    }

    /// Doubles the time until the next attempt to reach the process that has our disks, up to a maximum. Records the
    /// start of this one. Returns the address and the secret, or `None` if there is no address.
    pub(super) fn begin_attempt(&mut self, now: Instant) -> Option<(Endpoint, Secret)> {
        self.again_after = LINK_AGAIN_AFTER.1.min(self.again_after * 2);
        self.since = Some(now);
        self.way.clone()
    }

    /// Returns the time that is left for an offer, or for the answer to one. Returns `None` if neither is expected.
    pub(super) fn offer_left(&self, ownership: &Ownership, host: &Host) -> Option<Duration> {
        let waits = self.peer.is_some() && !ownership.is_linked();
        waits.then(|| OFFER_PATIENCE.saturating_sub(self.age(host)))
    }

    /// Returns the time until the next attempt to reach the process that has our disks, or `None` if there is nothing
    /// to attempt.
    pub(super) fn link_again_left(&self, ownership: &Ownership, host: &Host) -> Option<Duration> {
        let is_due = self.peer.is_none() && !ownership.holds() && self.way.is_some();
        is_due.then(|| self.again_after.saturating_sub(self.age(host)))
    }

    /// Returns the time since the peer was connected or lost, or an attempt to connect last started or failed.
    fn age(&self, host: &Host) -> Duration {
        self.since.map_or(Duration::ZERO, |since| host.time_since(since))
    }

    /// Returns the status of the connection for the operator, with the `news`. Returns `None` if there is nothing to report.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::SystemClock;
    use crate::migration::HostPeers;

    /// A process that ends after its VM has moved is not to come back to the other one at its end.
    #[test]
    fn a_peer_that_was_lost_is_not_looked_for_at_once_however_long_it_was_there() {
        let host = Host::new(Box::new(SystemClock)).unwrap();
        let mut connection = Connection::new(Box::new(HostPeers), None).unwrap();
        let offer = Offer {
            version: 1,
            name: "vm".into(),
            disks: Vec::new(),
            has_port: false,
            lock_reaches: true,
            words: 1,
            returns: false,
        };
        let nowhere = "unix:/there/is/no/such/socket".parse().unwrap();
        connection.connect(nowhere, &Secret::new([7; 32]), &offer, host.instant()).unwrap();
        // A time to come, until which the pause has not begun.
        let later = host.instant() + Duration::from_secs(60);
        connection.lose(later).expect("there is a peer");
        assert_eq!(connection.link_again_left(&Ownership::new(true, true), &host), Some(LINK_AGAIN_AFTER.0));
    }
}
