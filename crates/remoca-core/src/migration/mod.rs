//! Ownership of the disks of a VM that migrates between two processes. The machine is pure: events go in by `handle_*`,
//! actions come out of `poll_action`, in the order in which they are to be executed.
//!
//! Both processes run this machine. The owner holds the image lock and the session with the memory server, and serves its
//! guest. The other process has none of these, and its guest waits. Ownership moves with one message, [`Message::Yours`].
//! Until it is sent, closing the connection cancels everything, and both sides forget what they received.
//! 1. A process without ownership serves nothing until it receives ownership. If the peer is unreachable, it may take
//!    the image lock instead, and then starts cold.
//! 2. An owner whose guest runs gives nothing away.
//! 3. Disks that go back after the other side wrote to them go back cold.
//! 4. A lock that other hosts do not see (block devices, NBD) decides nothing. In that case only the operator can
//!    decide, so the receiver of `Yours` serves nothing before the sender has confirmed it: the message may be old.
//!
//! Driven by `remoca-disk`'s driver; checked by a model with loss and death at every step (`tests`). Decision 0023.

#[cfg(test)]
mod tests;

use crate::units::Nanos;
use std::collections::VecDeque;

/// Time, in nanoseconds, for which a peer that was asked for the disks may be silent before it counts as unreachable.
const PEER_PATIENCE: u64 = 10_000_000_000;
/// Pause, in nanoseconds, between two attempts to lock an image that is in use.
const LOCK_AGAIN_AFTER: u64 = 1_000_000_000;
/// Time, in nanoseconds, from a [`Message::Confirm`] for which its answer is believed. Who answers takes nothing back for twice as long.
const CONFIRMED_FOR: u64 = 1_000_000_000;

/// Message between the two sides. The connection delivers them in order, and may lose only the last ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// The disks match: hand them over as soon as your guest stops.
    Accept,
    /// The disks are yours. `state` says that the index sent before this message describes their content.
    Yours { state: bool },
    /// My guest runs: give the disks back.
    Want,
    /// Not yet: my guest also runs, or its writes are not durable yet. Answers every `Want`.
    Busy,
    /// I have opened the disks that you gave me: are they still mine? Sent where no lock would tell.
    Confirm,
    /// They are yours. Answers `Confirm`.
    Confirmed,
}

/// Action for the driver. Actions are executed in the order in which they come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Wait until no request is in flight and all writes are durable, then call `handle_drained`. A second `Drain`
    /// restarts the first.
    Drain,
    /// Send the state, with the index if [`Ownership::gives_index`] says so. Then call `handle_sent`, or `handle_lost` if that
    /// fails. A state whose sending was called off, because the guest runs again, counts no more, and the next one takes its place.
    SendState,
    /// Unlock and close the images, and leave the memory server without giving up the pool.
    Release,
    Send(Message),
    /// Close the connection to the peer; messages in transit are lost.
    Disconnect,
    /// Close the images, which were opened and have not been served.
    Close,
    /// Discard an index that was received completely or in part.
    Forget,
    /// Open and lock the images, then call `handle_locked` with the time at which that has ended. Only if [`Ownership::was_given`] may it
    /// wait for a lock, and not for long.
    Lock,
    /// Serve the guest: the disks are ours. `warm` says whether to use the received index.
    Serve {
        warm: bool,
    },
    /// Tell the operator that our guest waits for a disk that only the operator can give it: the peer is unreachable, and the
    /// image lock says nothing about other hosts.
    TellStuck,
}

/// Result of [`Action::Lock`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Locked {
    /// The images are those that the received index describes.
    Unchanged,
    /// The images may have changed, or no index was received.
    Changed,
    InUse,
}

/// On what ground images are locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ground {
    /// The lock decides, or the operator has decided.
    Free,
    /// The peer gave the ownership over this connection.
    Given,
    /// The peer gave it over a connection that is gone, and no lock would tell whether it still does.
    Doubtful,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Own,
    /// Still the owner, about to give the disks to the peer.
    Draining,
    Sending,
    Gone,
    /// Locking the images, or about to when `lock_again` is due.
    Entering {
        warm: bool,
        ground: Ground,
    },
    /// The images are open. Whether the peer still gives them is asked since then.
    Confirming {
        warm: bool,
        asked_at: Nanos,
    },
}

/// Why disks are not taken back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotTaken {
    /// They are here, or about to be.
    Here,
    /// The peer is connected, and no lock would show that it has them.
    PeerIsConnected,
    /// The peer was told a moment ago that it has them.
    JustConfirmed,
}

/// Ownership as one of the two sides sees it.
#[derive(Clone, Debug)]
pub struct Ownership {
    state: State,
    /// Whether other hosts see the image lock.
    lock_reaches: bool,
    /// Whether this process has owned the disks, and so may have a way back to them.
    has_owned: bool,
    linked: bool,
    peer_wants: bool,
    /// Whether any queue of our guest runs.
    running: bool,
    /// Whether the disks came over this connection.
    came_from_peer: bool,
    /// Whether the disks went over this connection.
    went_to_peer: bool,
    /// When the peer was last told that it still has the disks.
    confirmed_at: Option<Nanos>,
    /// Whether the disks go to the peer with the index.
    gives_index: bool,
    /// Whether `Want` was sent over this connection.
    asked: bool,
    /// Deadline for an answer to `Want`.
    answer_due: Option<Nanos>,
    answered: bool,
    lock_again: Option<Nanos>,
    told_stuck: bool,
    actions: VecDeque<Action>,
}

impl Ownership {
    /// Returns the ownership of a process that starts with the disks. If `incoming`, the process has no disks and waits
    /// to receive them. `lock_reaches` says whether other hosts see the image lock.
    #[must_use]
    pub fn new(incoming: bool, lock_reaches: bool) -> Self {
        Self {
            state: if incoming { State::Gone } else { State::Own },
            lock_reaches,
            has_owned: !incoming,
            linked: false,
            peer_wants: false,
            running: false,
            came_from_peer: false,
            went_to_peer: false,
            confirmed_at: None,
            gives_index: false,
            asked: false,
            answer_due: None,
            answered: false,
            lock_again: None,
            told_stuck: false,
            actions: VecDeque::new(),
        }
    }

    /// Returns the next action to execute, or `None` if there is none.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Returns whether requests of the guest may be executed.
    #[must_use]
    pub fn serves(&self) -> bool {
        self.state == State::Own
    }

    /// Returns whether this process has locked the images, or is about to lock them.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.state != State::Gone
    }

    /// Returns whether the disks are here, and not only about to be.
    #[must_use]
    pub fn has_disks(&self) -> bool {
        matches!(self.state, State::Own | State::Draining | State::Sending)
    }

    /// Returns whether this process had the disks and has given them away.
    #[must_use]
    pub fn has_given(&self) -> bool {
        self.has_owned && !self.holds()
    }

    /// Returns whether the peer gave the disks over this connection, and they are about to be locked: it may not quite have closed them.
    #[must_use]
    pub fn was_given(&self) -> bool {
        matches!(self.state, State::Entering { ground: Ground::Given, .. })
    }

    /// Returns whether the disks are on their way to the peer.
    #[must_use]
    pub fn is_leaving(&self) -> bool {
        matches!(self.state, State::Draining | State::Sending)
    }

    /// Returns whether the peer, to which the disks went over this connection, has yet to ask whether they are its own, and serves nobody
    /// before it is told.
    #[must_use]
    pub fn owes_word(&self) -> bool {
        self.state == State::Gone && self.went_to_peer && !self.lock_reaches && self.confirmed_at.is_none()
    }

    /// Returns whether [`Action::SendState`] includes the index.
    #[must_use]
    pub fn gives_index(&self) -> bool {
        self.gives_index
    }

    #[must_use]
    pub fn is_linked(&self) -> bool {
        self.linked
    }

    /// Returns whether the peer is to get the disks, at the latest when our guest stops. A peer that gave them to us is not, before it asks.
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        self.peer_wants
    }

    /// Marks the peer as connected, and asks it for the disks if our guest wants them. Forgets the state of an earlier
    /// connection.
    pub fn handle_linked(&mut self, now: Nanos) {
        self.linked = true;
        (self.peer_wants, self.asked) = (false, false);
        (self.came_from_peer, self.went_to_peer) = (false, false);
        if self.state == State::Gone {
            // The peer may be the one that has had the images. It is asked at once.
            self.lock_again = None;
        }
        self.seek(now);
    }

    /// Marks the peer as alive: a sign of life, such as a piece of an index, counts as an answer.
    pub fn handle_alive(&mut self) {
        self.answered = true;
    }

    /// Marks the peer as disconnected, and cancels a hand-over to it. Before `Yours` the disks stay with the sender,
    /// after it with the receiver; where no lock tells, only once that was confirmed.
    pub fn handle_lost(&mut self, now: Nanos) {
        (self.linked, self.peer_wants) = (false, false);
        (self.came_from_peer, self.went_to_peer) = (false, false);
        (self.asked, self.answer_due) = (false, None);
        match self.state {
            State::Draining | State::Sending => self.state = State::Own,
            State::Gone => {
                self.actions.push_back(Action::Forget);
                self.seek(now);
            }
            State::Confirming { .. } => {
                self.actions.push_back(Action::Close);
                self.lose_claim(now);
            }
            State::Entering { ground: Ground::Free, .. } => {}
            // The disks are ours now, and there is no peer to give them back to.
            State::Entering { warm, .. } if self.lock_reaches => {
                self.state = State::Entering { warm, ground: Ground::Free };
            }
            State::Entering { .. } if self.lock_again.is_some() => self.lose_claim(now),
            State::Entering { warm, .. } => self.state = State::Entering { warm, ground: Ground::Doubtful },
            State::Own => {}
        }
    }

    /// Stores whether any queue of our guest runs. Starts or cancels a hand-over, or asks for the disks, as a result.
    pub fn handle_queues(&mut self, now: Nanos, running: bool) {
        self.running = running;
        self.told_stuck = false;
        match self.state {
            State::Own => self.leave(),
            State::Draining | State::Sending if running => self.state = State::Own,
            State::Gone => self.seek(now),
            State::Draining | State::Sending | State::Entering { .. } | State::Confirming { .. } => {}
        }
    }

    /// Follows a message of the peer. `now` is not earlier than the message was taken from the connection.
    pub fn handle_message(&mut self, now: Nanos, message: Message) {
        self.answered = true;
        match (message, self.state) {
            (Message::Accept, State::Own) => {
                self.peer_wants = true;
                self.leave();
            }
            (Message::Want, State::Gone) => {} // It crossed what it asks for.
            (Message::Want, _) => {
                self.peer_wants = true;
                self.actions.push_back(Action::Send(Message::Busy));
                self.leave();
            }
            (Message::Busy, _) => {}
            (Message::Yours { state }, State::Gone) => {
                self.has_owned = true;
                (self.asked, self.answer_due) = (false, None);
                self.enter(state, Ground::Given);
            }
            (Message::Confirm, State::Gone) if self.went_to_peer => {
                self.confirmed_at = Some(now);
                self.actions.push_back(Action::Send(Message::Confirmed));
            }
            (Message::Confirmed, State::Confirming { warm, asked_at }) => {
                // An older answer may have waited here while the operator took the disks back at the other side.
                if now.since_ns(asked_at) <= CONFIRMED_FOR { self.own(warm) } else { self.confirm(now, warm) }
            }
            (Message::Accept | Message::Yours { .. } | Message::Confirm | Message::Confirmed, _) => {
                self.disconnect(now)
            }
        }
    }

    /// Queues [`Action::SendState`] after a drain, unless the hand-over was cancelled: nothing is in flight and
    /// everything is durable. `wrote` says whether anything was written since the disks became ours.
    pub fn handle_drained(&mut self, wrote: bool) {
        if self.state != State::Draining {
            return;
        }
        self.gives_index = !(self.came_from_peer && wrote);
        self.state = State::Sending;
        self.actions.push_back(Action::SendState);
    }

    /// Gives the disks to the peer when [`Action::SendState`] is complete, unless the hand-over was cancelled.
    pub fn handle_sent(&mut self) {
        if self.state == State::Sending {
            self.go();
        }
    }

    /// Serves the guest if the images are open and ours, and otherwise gives them back or tries again.
    pub fn handle_locked(&mut self, now: Nanos, locked: Locked) {
        let State::Entering { warm, ground } = self.state else { return };
        let warm = warm && locked == Locked::Unchanged;
        match (locked, ground) {
            (Locked::InUse, _) => {
                self.state = State::Gone;
                if ground == Ground::Given {
                    // The peer had them a moment ago, so it may succeed. Disks that were never given are not given back.
                    self.peer_wants = false;
                    (self.went_to_peer, self.confirmed_at) = (true, None);
                    self.actions.push_back(Action::Send(Message::Yours { state: false }));
                }
                self.lock_again = Some(Nanos(now.0.saturating_add(LOCK_AGAIN_AFTER)));
            }
            (_, Ground::Doubtful) => {
                self.actions.push_back(Action::Close);
                self.lose_claim(now);
            }
            (_, Ground::Given) if !self.lock_reaches => self.confirm(now, warm),
            (_, Ground::Given | Ground::Free) => self.own(warm),
        }
    }

    /// Takes the disks back, because the operator says that the peer is gone or never had them.
    ///
    /// # Errors
    /// Why it does not.
    pub fn take_back(&mut self, now: Nanos) -> Result<(), NotTaken> {
        let is_believed = |at: Nanos| now.since_ns(at) < 2 * CONFIRMED_FOR;
        match self.state {
            State::Gone if self.lock_reaches => {}
            State::Gone | State::Confirming { .. } if self.linked => return Err(NotTaken::PeerIsConnected),
            State::Gone if self.confirmed_at.is_some_and(is_believed) => return Err(NotTaken::JustConfirmed),
            State::Gone => {}
            // The peer has given them back, so they are tried now, and not when the pause is over.
            State::Entering { .. } if self.lock_again.is_some() => {}
            State::Entering { .. } | State::Confirming { .. } | State::Own | State::Draining | State::Sending => {
                return Err(NotTaken::Here);
            }
        }
        if self.linked {
            self.disconnect(now);
        }
        if self.state == State::Gone || self.lock_again.is_some() {
            self.enter(false, Ground::Free);
        }
        Ok(())
    }

    /// Returns the time at which [`Self::handle_timer`] must be called, or `None` if no timer is running.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Nanos> {
        [self.answer_due, self.lock_again].into_iter().flatten().min()
    }

    pub fn handle_timer(&mut self, now: Nanos) {
        if self.lock_again.is_some_and(|at| at <= now) {
            self.lock_again = None;
            if let State::Entering { .. } = self.state {
                self.actions.push_back(Action::Lock);
            }
            self.seek(now);
        }
        if self.answer_due.is_some_and(|at| at <= now) {
            self.answer_due = None;
            self.asked = false;
            if std::mem::take(&mut self.answered) { self.seek(now) } else { self.disconnect(now) }
        }
    }

    /// Starts the hand-over if the peer wants the disks and our guest does not run.
    fn leave(&mut self) {
        if self.state == State::Own && self.linked && self.peer_wants && !self.running {
            self.state = State::Draining;
            self.actions.push_back(Action::Drain);
        }
    }

    fn go(&mut self) {
        self.state = State::Gone;
        (self.peer_wants, self.came_from_peer, self.told_stuck) = (false, false, false);
        // What was confirmed before has come back since.
        (self.went_to_peer, self.confirmed_at) = (true, None);
        self.actions.push_back(Action::Release);
        self.actions.push_back(Action::Send(Message::Yours { state: self.gives_index }));
    }

    /// Asks the peer for the disks that our guest wants, or tries to take them.
    fn seek(&mut self, now: Nanos) {
        if self.state != State::Gone || !self.running {
            return;
        }
        if self.linked {
            if !std::mem::replace(&mut self.asked, true) {
                // A process that waits for its first disks gains nothing from giving up on the source.
                self.answered = false;
                self.answer_due = self.has_owned.then(|| Nanos(now.0.saturating_add(PEER_PATIENCE)));
                self.actions.push_back(Action::Send(Message::Want));
            }
        } else if self.lock_reaches {
            if self.lock_again.is_none() {
                self.enter(false, Ground::Free);
            }
        } else if !std::mem::replace(&mut self.told_stuck, true) {
            self.actions.push_back(Action::TellStuck);
        }
    }

    fn enter(&mut self, warm: bool, ground: Ground) {
        self.state = State::Entering { warm, ground };
        if ground == Ground::Given && self.lock_again.is_some() {
            // This side has just failed, and now the other one has. They would go to and fro as fast as the connection carries it.
            return;
        }
        self.lock_again = None;
        self.actions.push_back(Action::Lock);
    }

    /// Asks the peer whether the disks, which are open here, are still given.
    fn confirm(&mut self, now: Nanos, warm: bool) {
        self.state = State::Confirming { warm, asked_at: now };
        self.actions.push_back(Action::Send(Message::Confirm));
    }

    fn own(&mut self, warm: bool) {
        self.state = State::Own;
        self.came_from_peer = self.linked;
        self.actions.push_back(Action::Serve { warm });
        self.leave();
    }

    /// Goes on without the disks, which the peer had given over a connection that broke before it confirmed that.
    fn lose_claim(&mut self, now: Nanos) {
        (self.state, self.lock_again) = (State::Gone, None);
        self.actions.push_back(Action::Forget);
        self.seek(now);
    }

    fn disconnect(&mut self, now: Nanos) {
        self.actions.push_back(Action::Disconnect);
        self.handle_lost(now);
    }
}
