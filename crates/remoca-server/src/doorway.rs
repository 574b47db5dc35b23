//! Decides which connections may wait between accept and session, and which must go when there is no room.
//!
//! Pure; `handshake.rs` ends the connections that are named here. A connection that has not said HELLO can be ended
//! at any time, the oldest of its own peer first. A connection that has said HELLO cannot: a worker is about to take
//! it.
//! 1. At most `most` connections are here, and at most `most_of_peer` of one peer that have not said HELLO.
//! 2. A peer that is within its bound is never ended for one that is beyond it (property-tested).

use std::collections::VecDeque;

use crate::stream::Peer;

/// The connections between accept and session.
#[derive(Debug)]
pub(crate) struct Doorway {
    most: usize,
    most_of_peer: usize,
    /// Oldest first.
    guests: VecDeque<Guest>,
    next: u64,
}

#[derive(Debug)]
struct Guest {
    number: u64,
    peer: Peer,
    /// Whether it has said HELLO.
    heard: bool,
}

/// The outcome of [`Doorway::enter`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Entered {
    /// The connection is admitted under this number. If there is an `instead`, the connection with that number must
    /// be ended.
    In { number: u64, instead: Option<u64> },
    /// All connections here have said HELLO, and will leave soon.
    Full,
}

impl Doorway {
    pub(crate) fn new(most: usize, most_of_peer: usize) -> Self {
        Self { most, most_of_peer, guests: VecDeque::new(), next: 0 }
    }

    /// Admits a connection. If there is no room, removes a silent one for it.
    pub(crate) fn enter(&mut self, peer: Peer) -> Entered {
        let silent_of_peer = |guest: &&Guest| !guest.heard && guest.peer == peer;
        let instead = if self.guests.iter().filter(silent_of_peer).count() >= self.most_of_peer {
            self.guests.iter().find(silent_of_peer).map(|guest| guest.number)
        } else if self.guests.len() >= self.most {
            match self.oldest_of_the_most_frequent() {
                Some(number) => Some(number),
                None => return Entered::Full,
            }
        } else {
            None
        };
        if let Some(number) = instead {
            self.leave(number);
        }
        let number = self.next;
        self.next += 1;
        self.guests.push_back(Guest { number, peer, heard: false });
        Entered::In { number, instead }
    }

    /// Returns the oldest silent connection of the peer that has most of them, or `None` if all have said HELLO.
    fn oldest_of_the_most_frequent(&self) -> Option<u64> {
        let silent = || self.guests.iter().filter(|guest| !guest.heard);
        let frequency = |peer: Peer| silent().filter(|guest| guest.peer == peer).count();
        // `max_by_key` returns the last of several maxima, which is the oldest in this order.
        silent().rev().max_by_key(|guest| frequency(guest.peer)).map(|guest| guest.number)
    }

    /// Marks the connection `number` as one that has said HELLO, so that it is no longer removed to make room.
    pub(crate) fn hear(&mut self, number: u64) {
        if let Some(guest) = self.guests.iter_mut().find(|guest| guest.number == number) {
            guest.heard = true;
        }
    }

    /// Removes a connection that has become a session or has gone.
    pub(crate) fn leave(&mut self, number: u64) {
        self.guests.retain(|guest| guest.number != number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MOST: usize = 6;
    const MOST_OF_PEER: usize = 3;

    fn peer(number: u32) -> Peer {
        Peer::User(number)
    }

    #[track_caller]
    fn enter(doorway: &mut Doorway, number: u32) -> (u64, Option<u64>) {
        match doorway.enter(peer(number)) {
            Entered::In { number, instead } => (number, instead),
            Entered::Full => panic!("no room"),
        }
    }

    #[test]
    fn a_peer_beyond_its_bound_loses_its_own_oldest() {
        let mut doorway = Doorway::new(MOST, MOST_OF_PEER);
        let (other, _) = enter(&mut doorway, 9);
        let first: Vec<_> = (0..MOST_OF_PEER).map(|_| enter(&mut doorway, 1)).collect();
        assert!(first.iter().all(|(_, instead)| instead.is_none()));
        for (number, _) in first {
            assert_eq!(enter(&mut doorway, 1).1, Some(number));
        }
        assert!(doorway.guests.iter().any(|guest| guest.number == other));
    }

    #[test]
    fn who_has_said_hello_stays() {
        let mut doorway = Doorway::new(2, 1);
        let (first, _) = enter(&mut doorway, 1);
        doorway.hear(first);
        let (second, instead) = enter(&mut doorway, 1);
        assert_eq!(instead, None, "what has said HELLO does not count against its peer");
        assert_eq!(enter(&mut doorway, 2).1, Some(second));
        doorway.hear(2);
        assert_eq!(doorway.enter(peer(3)), Entered::Full);
        doorway.leave(first);
        assert_eq!(enter(&mut doorway, 3).1, None);
    }

    proptest! {
        #[test]
        fn a_peer_within_its_bound_is_ended_only_for_want_of_peers_with_more(
            steps in prop::collection::vec((0..8_u32, 0..4_u8, any::<prop::sample::Index>()), 1..200),
        ) {
            let mut doorway = Doorway::new(MOST, MOST_OF_PEER);
            let mut peers = std::collections::HashMap::new();
            for (peer_number, dice, which) in steps {
                let silent = |doorway: &Doorway, of: Peer| {
                    doorway.guests.iter().filter(|guest| !guest.heard && guest.peer == of).count()
                };
                match dice {
                    0 if !doorway.guests.is_empty() => {
                        let number = doorway.guests[which.index(doorway.guests.len())].number;
                        doorway.hear(number);
                    }
                    1 if !doorway.guests.is_empty() => {
                        let number = doorway.guests[which.index(doorway.guests.len())].number;
                        doorway.leave(number);
                    }
                    _ => {
                        let before: Vec<_> = doorway.guests.iter().map(|guest| silent(&doorway, guest.peer)).collect();
                        let most = before.into_iter().max().unwrap_or(0);
                        let own = silent(&doorway, peer(peer_number));
                        match doorway.enter(peer(peer_number)) {
                            Entered::Full => prop_assert!(doorway.guests.iter().all(|guest| guest.heard)),
                            Entered::In { number, instead } => {
                                if let Some(ended) = instead {
                                    let of: Peer = peers[&ended];
                                    let had = silent(&doorway, of) + usize::from(of != peer(peer_number));
                                    prop_assert!(of == peer(peer_number) && own >= MOST_OF_PEER || had == most);
                                }
                                peers.insert(number, peer(peer_number));
                            }
                        }
                    }
                }
                prop_assert!(doorway.guests.len() <= MOST);
                for guest in &doorway.guests {
                    prop_assert!(silent(&doorway, guest.peer) <= MOST_OF_PEER);
                }
            }
        }
    }
}
