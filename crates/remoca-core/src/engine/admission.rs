//! Which blocks enter the cache now, and what the guest is for that: one with an agent, one whose memory still shows
//! what it evicted, or neither.
//!
//! A kernel that leaves freed pages as they were (`init_on_alloc=0`) has, in each frame that a read is about to
//! overwrite, what it evicted from it. The driver asks [`DiskEngine::wants_frame`] before it overwrites one. While
//! frames do not pay, only a sample is looked at, so another kernel after a reboot is noticed. Nothing of this is about
//! safety: a frame is judged by its content, like any evicted page. Decision 0015.

use super::{DiskEngine, Evicted};
use std::ops::DerefMut;

/// Frames of one window while they do not pay, and while they do.
const PROBE_WINDOW: u32 = 32;
const WINDOW: u32 = 1024;

/// Which blocks enter the cache now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Pages that the agent reports as evicted.
    Evictions,
    /// What frames held before a read overwrites them: there is no agent, or it fell silent.
    Frames,
    /// Blocks the guest reads, next to be discarded: frames show nothing either.
    Reads,
}

/// What is known of the three sources.
#[derive(Debug)]
pub(super) struct Sources {
    has_port: bool,
    agent: bool,
    /// Blocks read from the disk since the agent's last page.
    blocks_since_eviction: u64,
    frames: Frames,
}

/// Whether frames hold known content, measured in windows.
#[derive(Debug)]
struct Frames {
    /// One of so many is looked at while they do not pay.
    sample: u32,
    pay: bool,
    /// Frames since one was looked at.
    passed: u32,
    looked: u32,
    known: u32,
}

impl Sources {
    pub(super) fn new(has_port: bool, frame_sample: u32) -> Self {
        let frames = Frames { sample: frame_sample, pay: false, passed: 0, looked: 0, known: 0 };
        Self { has_port, agent: has_port, blocks_since_eviction: 0, frames }
    }

    pub(super) fn admission(&self) -> Admission {
        match (self.agent, self.frames.pay) {
            (true, _) => Admission::Evictions,
            (false, true) => Admission::Frames,
            (false, false) => Admission::Reads,
        }
    }

    pub(super) fn note_eviction(&mut self) {
        self.blocks_since_eviction = 0;
        self.agent = self.has_port;
    }

    /// Counts blocks that the guest read. If it read more than the `resident` blocks that its memory holds and evicted
    /// nothing, no agent works.
    pub(super) fn note_read(&mut self, blocks: u64, resident: u64) {
        self.blocks_since_eviction += blocks;
        self.agent &= self.blocks_since_eviction <= resident;
    }

    fn wants_frame(&mut self) -> bool {
        if self.agent || self.frames.sample == 0 {
            return false;
        }
        self.frames.passed = (self.frames.passed + 1) % self.frames.sample;
        self.frames.pay || self.frames.passed == 0
    }

    /// Counts a frame, known or not. More than a quarter known: they pay. Less than a sixteenth: no longer. Zeroes are
    /// what an empty frame holds.
    fn note_frame(&mut self, known: bool) {
        let frames = &mut self.frames;
        frames.looked += 1;
        frames.known += u32::from(known);
        if frames.looked >= if frames.pay { WINDOW } else { PROBE_WINDOW } {
            let least = if frames.pay { frames.looked / 16 } else { frames.looked / 4 };
            frames.pay = frames.known > least;
            (frames.looked, frames.known) = (0, 0);
        }
    }
}

impl<M: DerefMut<Target = [u32]>> DiskEngine<M> {
    /// Returns whether to call [`Self::handle_frame`] with the page of guest memory that a read is about to
    /// overwrite, and what it still holds.
    pub fn wants_frame(&mut self) -> bool {
        self.is_enabled() && self.link.can_send() && self.sources.wants_frame()
    }

    /// Handles what a frame held before a read overwrote it: `page`, 4 KiB, copied out of guest memory. With
    /// [`Evicted::Admit`] the caller sends it.
    pub fn handle_frame(&mut self, page: &[u8]) -> Evicted {
        let judged = self.judge(page);
        self.stats.frames_looked_at += 1;
        match judged {
            Evicted::Admit(_) => {
                self.stats.frames_admitted += 1;
                self.link.note_send();
            }
            Evicted::Duplicate => self.stats.frames_duplicate += 1,
            Evicted::Zero => self.stats.frames_zero += 1,
            Evicted::Unmatched => self.stats.frames_unmatched += 1,
            Evicted::Dropped => self.stats.frames_dropped += 1,
        }
        self.sources.note_frame(!matches!(judged, Evicted::Zero | Evicted::Unmatched));
        judged
    }
}
