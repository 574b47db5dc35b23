//! The far ends of a driver's connections to other processes, for a simulator that carries what they say.
//!
//! Behind the feature `testing`; never part of the program.

use super::peer::{Line, Parcel};
use super::{Heard, Incoming, Peer};
use remoca_io::address::Endpoint;
use remoca_io::wake::{Wake, WakeUp, raise};
use remoca_protocol::peer::{self, PIECE_BYTES};
use std::collections::VecDeque;
use std::sync::mpsc::{SyncSender, TryRecvError, TrySendError};

/// The far end of a [`Peer`].
pub struct FarEnd {
    line: Line,
    /// What the driver has not heard yet.
    to_hear: VecDeque<Heard>,
}

/// What a driver asks of the connection to its peer.
#[derive(Debug, PartialEq, Eq)]
pub enum Wanted {
    /// To pass these frames on.
    Frames(Vec<u8>),
    /// To tell the peer that nothing more comes.
    NoMore,
    /// To close the connection.
    Closed,
}

impl FarEnd {
    /// Returns a peer of the driver that `wake` wakes, and its far end.
    #[must_use]
    pub fn pair(wake: &Wake) -> (Peer, Self) {
        let (peer, line) = Peer::pair(wake);
        (peer, Self { line, to_hear: VecDeque::new() })
    }

    /// Returns the far end of a peer that is gone.
    #[must_use]
    pub fn nobody() -> Self {
        let wake = WakeUp::new().expect("the system has an eventfd left");
        Self::pair(wake.wake()).1
    }

    /// Returns what the driver asks for next, or `None` if it asks for nothing.
    pub fn take(&mut self) -> Option<Wanted> {
        loop {
            return match self.line.to_send.try_recv() {
                Ok(Parcel::Bytes(bytes)) => Some(Wanted::Frames(bytes)),
                Ok(Parcel::Words(words)) => {
                    let frames = std::iter::from_fn(|| words.take(PIECE_BYTES / 4, peer::words));
                    Some(Wanted::Frames(frames.flatten().collect()))
                }
                Ok(Parcel::Mark) => {
                    self.to_hear.push_back(Heard::Sent);
                    continue;
                }
                Ok(Parcel::End) => Some(Wanted::NoMore),
                Err(TryRecvError::Empty) => None,
                Err(TryRecvError::Disconnected) => Some(Wanted::Closed),
            };
        }
    }

    /// Queues these frames for the driver.
    pub fn bring(&mut self, mut frames: &[u8]) {
        while let Ok(heard) = peer::read(&mut frames) {
            self.to_hear.push_back(Heard::Frame(heard));
        }
    }

    /// Queues the end of the connection for the driver.
    pub fn end(&mut self, why: &str) {
        self.to_hear.push_back(Heard::Ended(why.into()));
    }

    /// Passes as many of the queued events to the driver as it has room for.
    pub fn push(&mut self) {
        while let Some(heard) = self.to_hear.pop_front() {
            match self.line.tell.try_send(heard) {
                Ok(()) => raise(&self.line.wake),
                Err(TrySendError::Full(heard)) => return self.to_hear.push_front(heard),
                Err(TrySendError::Disconnected(_)) => return,
            }
        }
    }
}

/// Returns the listening side of a process, and where connections to it go.
#[must_use]
pub fn listening(endpoint: Endpoint) -> (Incoming, SyncSender<Peer>) {
    Incoming::unattended(endpoint)
}
