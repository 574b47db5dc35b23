//! How much of a device's requests the driver holds at most: what a guest may have in flight is up to the guest.

use super::chain::{CHAIN_LENGTH_MAX, SegmentCount};
use super::config::QUEUE_COUNT_MAX;
use std::sync::Arc;

/// Requests that the driver holds at most. One chain of a guest can be as long as the disk, and is handed out in pieces: all
/// of them at once would be as many as the guest likes.
const HELD_MAX: usize = 4096;
/// Segments of the chains of these requests at most, give or take a chain: 6 MiB. Nothing new is taken from the guest until
/// half of them are free.
const SEGMENTS_MAX: usize = 1 << 18;
// What queues keep of chains that are half handed out does not keep a device from going on.
const _: () = assert!(QUEUE_COUNT_MAX as usize * CHAIN_LENGTH_MAX as usize <= SEGMENTS_MAX / 2);

/// Requests that the driver holds, those of an earlier front end included.
#[derive(Default)]
pub(super) struct Throttle {
    held: usize,
    segments: Arc<SegmentCount>,
    /// The driver was refused for want of room, and will be called again when half of it is free.
    is_waiting: bool,
}

impl Throttle {
    /// Returns where chains count their segments.
    pub fn segments(&self) -> &Arc<SegmentCount> {
        &self.segments
    }

    /// Returns whether the driver holds nothing.
    pub fn is_idle(&self) -> bool {
        self.held == 0
    }

    /// Returns whether no new chain may be taken, though requests of those that are there may go out.
    pub fn lacks_segments(&self) -> bool {
        self.segments.get() >= SEGMENTS_MAX
    }

    /// Returns whether no request may go out at all.
    pub fn is_full(&self) -> bool {
        self.held >= HELD_MAX
    }

    /// Notes that the driver got nothing though there may be something.
    pub fn refuse(&mut self) {
        self.is_waiting = true;
    }

    /// Counts a request that goes out.
    pub fn hold(&mut self) {
        self.held += 1;
    }

    /// Counts a request that came back. Its chain may still be held.
    pub fn release(&mut self) {
        assert!(self.held > 0, "a request came back that was not handed out");
        self.held -= 1;
    }

    /// Returns whether there is room again for a driver that was refused, once.
    pub fn has_room_again(&mut self) -> bool {
        let room = self.is_waiting && self.held <= HELD_MAX / 2 && self.segments.get() <= SEGMENTS_MAX / 2;
        self.is_waiting &= !room;
        room
    }
}
