//! What frames of guest memory held before reads overwrote them, for a guest that has no agent.
//!
//! A frame is copied out while actions are executed, and judged when none is left: what the engine says then goes to the
//! server behind everything that it wanted sent before.

use remoca_core::engine::DiskEngine;
use remoca_core::units::PAGE_SIZE;
use remoca_frontend::device::GuestRequest;
use std::ops::DerefMut;

/// Most frames that wait to be judged (4 MiB); more are not looked at.
const PAGES_MAX: usize = 1024;

/// Copies of frames that are not judged yet, one after the other.
#[derive(Default)]
pub(super) struct CapturedFrames {
    pages: Vec<u8>,
}

impl CapturedFrames {
    /// Captures what `length` bytes at `offset` of a read's destination hold before its data overwrite them, as far
    /// as the engine wants it.
    pub(super) fn capture<M: DerefMut<Target = [u32]>>(
        &mut self,
        engine: &mut DiskEngine<M>,
        request: &GuestRequest,
        offset: usize,
        length: usize,
    ) {
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

    /// Judges the frames that were copied out; all actions are done.
    pub(super) fn judge(&mut self, judge: impl FnMut(&[u8])) {
        self.pages.chunks_exact(PAGE_SIZE).for_each(judge);
        self.pages.clear();
    }
}
