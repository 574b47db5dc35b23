//! The local tier: one pool in front of all others, at the memory server of this host, with a size of its own.
//!
//! It takes no part in placement and sharing: its server is asked whenever there is no session, and its answer is always
//! taken. A pool that was lost is kept until its server turns out to have another one, so that a server that comes back is
//! warm. Decision 0045.

use super::need::Choice;
use super::placement::{BACKOFF_MAX_NS, BACKOFF_MIN_NS, Seat};
use super::types::{Action, PoolOffer, ServerNumber};
use crate::units::{Nanos, PageCount};
use std::collections::VecDeque;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It may be asked from this time on.
    Idle(Nanos),
    Asked,
    InUse,
}

/// State of the server that has the local tier.
#[derive(Debug)]
pub(super) struct LocalTier {
    server: Option<ServerNumber>,
    /// Size that the operator wants.
    wanted: PageCount,
    state: State,
    backoff_ns: u64,
}

impl LocalTier {
    pub(super) fn new(wanted: PageCount) -> Self {
        Self { server: None, wanted, state: State::Idle(Nanos(0)), backoff_ns: BACKOFF_MIN_NS }
    }

    /// Returns the server, or `None` if there is no local tier.
    pub(super) fn server(&self) -> Option<ServerNumber> {
        self.server
    }

    /// Returns whether the tier is at this server.
    #[inline]
    pub(super) fn is_at(&self, server: ServerNumber) -> bool {
        self.server == Some(server)
    }

    /// Returns the size that the operator wants.
    pub(super) fn wanted(&self) -> PageCount {
        self.wanted
    }

    /// Sets the size that the operator wants.
    pub(super) fn want(&mut self, wanted: PageCount) {
        self.wanted = wanted;
    }

    /// Sets the server. The pool at another one must have been left.
    pub(super) fn set_server(&mut self, now: Nanos, server: Option<ServerNumber>) {
        if self.server != server {
            *self = Self { server, state: State::Idle(now), ..Self::new(self.wanted) };
        }
    }

    /// Asks the server if that is due.
    pub(super) fn ask(&mut self, now: Nanos, actions: &mut VecDeque<Action>) {
        if let Some(server) = self.server
            && self.deadline().is_some_and(|at| at <= now)
        {
            self.state = State::Asked;
            actions.push_back(Action::Ask(server));
        }
    }

    /// Returns when the server is asked, or `None` if it is not: it was asked, or there is a session, or no tier is wanted.
    pub(super) fn deadline(&self) -> Option<Nanos> {
        match self.state {
            State::Idle(at) if self.server.is_some() && self.wanted.0 > 0 => Some(at),
            State::Idle(_) | State::Asked | State::InUse => None,
        }
    }

    /// Takes the answer of the server (`None`: there is no connection). Returns the choice of this server, or `None` if it
    /// gets no pool: then a connection is to be released.
    pub(super) fn answer(&mut self, now: Nanos, offer: Option<PoolOffer>) -> Option<Choice> {
        // It was asked twice, once as a server of the list.
        if self.state == State::InUse {
            return None;
        }
        let server = self.server.filter(|_| self.wanted.0 > 0 && self.state == State::Asked);
        let choice = server.zip(offer).map(|(server, offer)| Choice { server, offer, gives: offer.possible() });
        match choice {
            Some(_) => self.state = State::InUse,
            None => self.fail(now),
        }
        choice
    }

    /// Begins the session with the server that was chosen.
    pub(super) fn begin(&mut self, now: Nanos, choice: &Choice) -> Seat {
        self.backoff_ns = BACKOFF_MIN_NS;
        Seat::new(now, choice)
    }

    /// Takes note that the session has ended.
    pub(super) fn end(&mut self, now: Nanos) {
        self.fail(now);
    }

    /// Delays the next question, by more each time.
    fn fail(&mut self, now: Nanos) {
        self.state = State::Idle(now.plus_ns(self.backoff_ns));
        self.backoff_ns = (self.backoff_ns * 2).min(BACKOFF_MAX_NS);
    }
}
