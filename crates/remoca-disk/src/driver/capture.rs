//! The content of frames of guest memory before reads overwrote them, for a guest that has no agent.
//!
//! A frame is copied out while actions are executed, and judged when no action is left. Pages that the engine then
//! admits are sent to the server after everything that it wanted to send before.

use remoca_core::engine::DiskEngine;
use remoca_core::units::PAGE_SIZE;
use remoca_frontend::device::GuestRequest;
use std::ops::DerefMut;

/// Maximum number of frames that wait to be judged (4 MiB). Further frames are ignored.
const PAGES_MAX: usize = 1024;

/// Copies of frames that are not judged yet, one after the other.
#[derive(Default)]
pub(super) struct CapturedFrames {
    pages: Vec<u8>,
}

impl CapturedFrames {
    /// Copies the frames that `length` bytes at `offset` of a read's data are about to overwrite, as far as the engine
    /// wants to examine them.
    pub(super) fn capture<M: DerefMut<Target = [u32]>>(
        &mut self,
        engine: &mut DiskEngine<M>,
        request: &GuestRequest,
        offset: usize,
        length: usize,
    ) {
        if !engine.examines_frames() {
            return;
        }
        for frame in request.frames(offset, length) {
            if !engine.wants_frame() || self.pages.len() >= PAGES_MAX * PAGE_SIZE {
                continue;
            }
            let start = self.pages.len();
            self.pages.resize(start + PAGE_SIZE, 0);
            if request.copy_frame(frame, &mut self.pages[start..]).is_err() {
                self.pages.truncate(start);
            }
        }
    }

    /// Passes the frames that were copied out to `judge`, and forgets them. Called when no action is left.
    pub(super) fn judge(&mut self, judge: impl FnMut(&[u8])) {
        self.pages.chunks_exact(PAGE_SIZE).for_each(judge);
        self.pages.clear();
    }
}
