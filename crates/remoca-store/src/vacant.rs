//! A placeholder for a store that this process does not have, because its VM is about to arrive from another host, or
//! has gone to one.
//!
//! It has the geometry of the image but no descriptor of it. The driver takes no requests while it is in place.

use super::{
    DataPath, Geometry, HandOver, Identity, ImageStamp, StoreCompletion, StoreError, StoreEvent, StoreHealth, StoreOp,
};
use remoca_io::buffer::IoBuffer;
use remoca_io::wake;
use remoca_protocol::handover::StoreKind;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

/// A store that fails every operation.
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

impl DataPath for VacantStore {
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

    /// Returns `None`: every operation fails at once.
    fn next_deadline(&self) -> Option<Instant> {
        None
    }

    fn handle_timer(&mut self, _now: Instant) {}

    fn in_flight(&self) -> usize {
        self.events.len()
    }

    /// Returns that the store is up. The migration's status shows that the disk is elsewhere.
    fn health(&self) -> StoreHealth {
        StoreHealth::Up
    }
}

impl Identity for VacantStore {
    /// Returns false: there is no image.
    fn look(&mut self) -> bool {
        false
    }

    /// Returns false: there is no image.
    fn measure(&mut self) -> bool {
        false
    }

    /// Returns `None`: there is no image.
    fn stamp_at_opening(&self) -> Option<ImageStamp> {
        None
    }

    /// Returns `None`: there is no image.
    fn shared_stamp(&self, _at_opening: bool) -> Option<String> {
        None
    }

    /// Does nothing: there is no image.
    fn empty_page_cache(&mut self) {}

    /// Returns true: another process has the image, and the page cache was not checked.
    fn may_be_in_page_cache(&self) -> bool {
        true
    }
}

impl HandOver for VacantStore {
    /// Returns `None`: the driver keeps the failure while the image is elsewhere.
    fn failed_flush(&self) -> Option<i32> {
        None
    }

    fn set_failed_flush(&mut self, _errno: Option<i32>) {}

    /// Returns whether each failure has been taken. No operation goes to the kernel.
    fn is_still(&self) -> bool {
        self.events.is_empty()
    }

    /// Does nothing: no flush is due at the end.
    fn begin_drain(&mut self) {}

    /// Returns true: no operation was sent anywhere.
    fn drain(&mut self, _flush_by: Instant) -> bool {
        true
    }

    /// # Errors
    /// Always, because it has no descriptor of an image.
    fn hand_over(&self) -> Result<(BorrowedFd<'_>, StoreKind), String> {
        Err("its store cannot be handed over".into())
    }
}
