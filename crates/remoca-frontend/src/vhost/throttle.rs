//! The limit on the requests of a device that the driver holds. How many requests are in flight is up to the guest.

use super::chain::{CHAIN_LENGTH_MAX, SegmentCount};
use super::config::QUEUE_COUNT_MAX;
use std::sync::Arc;

/// The most requests that the driver holds. Each range of a discard or write-zeroes counts; the last request may exceed it. One chain of a guest can be as long as the disk, and is handed out in
/// pieces. Without a limit their number would be up to the guest.
const HELD_MAX: usize = 4096;
/// The most segments in the chains of these requests, give or take one chain: 6 MiB. Above this, nothing new is taken
/// from the guest until half of them are free.
const SEGMENTS_MAX: usize = 1 << 18;
// The chains that queues have handed out in part cannot prevent a device from continuing.
const _: () = assert!(QUEUE_COUNT_MAX as usize * CHAIN_LENGTH_MAX as usize <= SEGMENTS_MAX / 2);

/// Counts the requests that the driver holds, including those of an earlier front end.
#[derive(Default)]
pub(super) struct Throttle {
    /// Number of their parts.
    held: usize,
    segments: Arc<SegmentCount>,
    /// The driver was refused for lack of room, and is woken when half of the room is free.
    is_waiting: bool,
}

impl Throttle {
    /// Returns the counter in which chains count their segments.
    pub fn segments(&self) -> &Arc<SegmentCount> {
        &self.segments
    }

    /// Returns whether the driver holds no requests.
    pub fn is_idle(&self) -> bool {
        self.held == 0
    }

    /// Returns whether the segment limit is reached, so that no new chain may be taken. Pieces of chains already taken
    /// may still be handed out.
    pub fn lacks_segments(&self) -> bool {
        self.segments.get() >= SEGMENTS_MAX
    }

    /// Returns whether no request may go out at all.
    pub fn is_full(&self) -> bool {
        self.held >= HELD_MAX
    }

    /// Records that the driver was refused although there may be requests, for [`Self::has_room_again`].
    pub fn refuse(&mut self) {
        self.is_waiting = true;
    }

    /// Adds a request of `parts` parts that goes out to those that the driver holds.
    pub fn hold(&mut self, parts: usize) {
        self.held += parts;
    }

    /// Removes a request of `parts` parts that came back from those that the driver holds. Its chain may still be held.
    pub fn release(&mut self, parts: usize) {
        assert!(self.held >= parts, "a request came back that was not handed out");
        self.held -= parts;
    }

    /// Returns whether there is room again for a driver that was refused. Returns true only once per refusal.
    pub fn has_room_again(&mut self) -> bool {
        let room = self.is_waiting && self.held <= HELD_MAX / 2 && self.segments.get() <= SEGMENTS_MAX / 2;
        self.is_waiting &= !room;
        room
    }
}
