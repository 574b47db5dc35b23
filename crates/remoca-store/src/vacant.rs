//! The place of a store that this process does not have: its VM is about to come, or has gone, to another host.
//!
//! It has the geometry of the image, and no descriptor on it. The driver takes no requests while it is there.

use super::{Geometry, Store, StoreCompletion, StoreError, StoreEvent, StoreOp};
use remoca_io::buffer::IoBuffer;
use remoca_io::wake;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

/// A store that fails everything.
pub struct VacantStore {
    geometry: Geometry,
    event: OwnedFd,
    events: VecDeque<StoreEvent>,
}

impl VacantStore {
    /// # Errors
    /// If the system has no descriptor left.
    pub fn new(geometry: Geometry) -> io::Result<Self> {
        let event = wake::new()?;
        Ok(Self { geometry, event, events: VecDeque::new() })
    }
}

impl Store for VacantStore {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    fn submit(&mut self, token: u64, _operation: StoreOp, buffer: Option<IoBuffer>) {
        let completion = StoreCompletion { token, result: Err(StoreError::IO), buffer };
        self.events.push_back(StoreEvent::Completed(completion));
    }

    fn kick(&mut self, _now: Instant) {}

    fn handle_ready(&mut self, _now: Instant) {}

    fn next_event(&mut self) -> Option<StoreEvent> {
        self.events.pop_front()
    }

    fn in_flight(&self) -> usize {
        self.events.len()
    }

    /// Returns nothing: the driver keeps it while the image is elsewhere.
    fn failed_flush(&self) -> Option<i32> {
        None
    }

    fn set_failed_flush(&mut self, _errno: Option<i32>) {}
}
