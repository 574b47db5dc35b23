//! Admission: which pages enter the cache. That depends on whether the guest has an agent and, if not, on whether its
//! memory still shows what it evicted. This module also derives the advice to an agent that sends too much unknown
//! content.
//!
//! A kernel that does not clear freed pages (`init_on_alloc=0`) still has the evicted page in the frame that a read is about
//! to overwrite. The driver asks [`super::DiskEngine::wants_frame`] before it overwrites one. While frames do not pay, only a
//! sample is examined, which notices another kernel after a reboot. None of this affects safety: a frame is judged by its
//! content, like any evicted page. Decision 0015.

use super::stats::EngineStats;
use super::types::Evicted;
use crate::index::Place;

/// Number of frames per window: this many while frames do not pay, and [`WINDOW`] while they do.
const PROBE_WINDOW: u32 = 32;
const WINDOW: u32 = 1024;
/// Pages per window of the advice at full rate.
const ADVICE_WINDOW: u32 = 4096;
/// Largest advice: the agent sends one page in this many.
pub(super) const ADVICE_MAX: u32 = 1024;
/// Number of blocks admitted on read for each one that enters as the newest. With it, the cache follows a changing
/// workload (bimodal insertion, Qureshi et al., ISCA 2007).
const BIMODAL: u64 = 32;

/// Source of the pages that enter the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Pages that the agent reports as evicted.
    Evictions,
    /// Frames, before a read overwrites them: there is no agent, or it fell silent.
    Frames,
    /// Blocks that the guest reads, because frames show nothing either. Most of these blocks enter as the next to be
    /// discarded.
    Reads,
}

/// State of the three sources.
#[derive(Debug)]
struct Sources {
    has_port: bool,
    agent: bool,
    /// Blocks read from the disk since the agent's last page.
    blocks_since_eviction: u64,
    frames: Frames,
}

/// Whether frames hold known content, measured in windows.
#[derive(Debug)]
struct Frames {
    /// Number of frames for each one that is examined, while frames do not pay.
    sample: u32,
    pay: bool,
    /// Frames since the last one that was examined.
    passed: u32,
    looked: u32,
    known: u32,
}

impl Sources {
    fn new(has_port: bool, frame_sample: u32) -> Self {
        let frames = Frames { sample: frame_sample, pay: false, passed: 0, looked: 0, known: 0 };
        Self { has_port, agent: has_port, blocks_since_eviction: 0, frames }
    }

    fn admission(&self) -> Admission {
        match (self.agent, self.frames.pay) {
            (true, _) => Admission::Evictions,
            (false, true) => Admission::Frames,
            (false, false) => Admission::Reads,
        }
    }

    fn note_eviction(&mut self) {
        self.blocks_since_eviction = 0;
        self.agent = self.has_port;
    }

    /// Adds `blocks` to the blocks read since the agent's last page. If they exceed `resident`, the blocks that the
    /// guest's memory holds, the agent no longer counts as working.
    fn note_read(&mut self, blocks: u64, resident: u64) {
        self.blocks_since_eviction += blocks;
        self.agent &= self.blocks_since_eviction <= resident;
    }

    fn examines_frames(&self) -> bool {
        !self.agent && self.frames.sample > 0
    }

    fn wants_frame(&mut self) -> bool {
        if !self.examines_frames() {
            return false;
        }
        self.frames.passed = (self.frames.passed + 1) % self.frames.sample;
        self.frames.pay || self.frames.passed == 0
    }

    /// Counts a frame, and decides at the end of a window whether frames pay. They start to pay if more than a quarter
    /// of the frames hold known content, and stop if at most a sixteenth do.
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

/// Share of the guest's evictions that is known content, and the advice that follows from it.
#[derive(Debug, Default)]
struct Feedback {
    received: u32,
    matched: u32,
    /// Advice: 0 to send every page, or N to send one page in N.
    one_of: u32,
    /// Number of classes of pages of which the agent sends one; 0 or 1 if it sends all.
    classes: u32,
}

impl Feedback {
    fn note(&mut self, matched: bool) {
        self.received += 1;
        self.matched += u32::from(matched);
        let window = (ADVICE_WINDOW / self.one_of.max(self.classes).max(1)).max(64);
        if self.received < window {
            return;
        }
        // Below 2 % of matches the agent sends a quarter as much. Above 10 % it sends every page.
        if self.matched * 50 < self.received {
            self.one_of = (self.one_of.max(1) * 4).min(ADVICE_MAX);
        } else if self.matched * 10 > self.received {
            self.one_of = 0;
        }
        (self.received, self.matched) = (0, 0);
    }
}

/// Admission policy: the state of the sources, and the feedback to the agent.
#[derive(Debug)]
pub(super) struct Admit {
    sources: Sources,
    feedback: Feedback,
    /// Number of blocks offered when they were read.
    reads: u64,
}

impl Admit {
    pub(super) fn new(has_port: bool, frame_sample: u32) -> Self {
        Self { sources: Sources::new(has_port, frame_sample), feedback: Feedback::default(), reads: 0 }
    }

    /// Returns the source of the pages that enter the cache now.
    pub(super) fn admission(&self) -> Admission {
        self.sources.admission()
    }

    /// Adds `blocks`, read from the disk, to the blocks read since the agent's last page. If they exceed `resident`,
    /// the blocks that the guest's memory holds, the agent no longer counts as working.
    pub(super) fn note_read(&mut self, blocks: u64, resident: u64) {
        self.sources.note_read(blocks, resident);
    }

    /// Counts a block that is admitted as it is read, and returns the end of the queue at which it enters.
    pub(super) fn place_of_read(&mut self) -> Place {
        self.reads += 1;
        if self.reads.is_multiple_of(BIMODAL) { Place::Tail } else { Place::Head }
    }

    /// Returns whether any frames are examined.
    pub(super) fn examines_frames(&self) -> bool {
        self.sources.examines_frames()
    }

    /// Returns whether to examine the frame that a read is about to overwrite.
    pub(super) fn wants_frame(&mut self) -> bool {
        self.sources.wants_frame()
    }

    /// Marks the agent as working if there is an eviction port, and restarts the count of blocks read since its last
    /// page.
    pub(super) fn note_eviction(&mut self) {
        self.sources.note_eviction();
    }

    /// Counts the outcome for a page that the agent sent, in `stats` and for the advice to the agent.
    pub(super) fn count_evicted(&mut self, evicted: Evicted, stats: &mut EngineStats) {
        stats.evictions_reported += 1;
        *match evicted {
            Evicted::Admit(_) => &mut stats.evictions_admitted,
            Evicted::Duplicate => &mut stats.evictions_duplicate,
            Evicted::Zero => &mut stats.evictions_zero,
            Evicted::Unmatched => &mut stats.evictions_unmatched,
            Evicted::Dropped => &mut stats.evictions_dropped,
            Evicted::PassedOver => &mut stats.evictions_passed_over,
        } += 1;
        self.feedback.note(evicted != Evicted::Unmatched);
    }

    /// Counts the outcome for the page in a frame, in `stats` and for the decision whether frames pay.
    pub(super) fn count_frame(&mut self, evicted: Evicted, stats: &mut EngineStats) {
        stats.frames_looked_at += 1;
        *match evicted {
            Evicted::Admit(_) => &mut stats.frames_admitted,
            Evicted::Duplicate => &mut stats.frames_duplicate,
            Evicted::Zero => &mut stats.frames_zero,
            Evicted::Unmatched => &mut stats.frames_unmatched,
            Evicted::Dropped => &mut stats.frames_dropped,
            Evicted::PassedOver => &mut stats.frames_passed_over,
        } += 1;
        self.sources.note_frame(!matches!(evicted, Evicted::Zero | Evicted::Unmatched));
    }

    /// Sets of how many classes of pages the agent sends one.
    pub(super) fn see_class_of(&mut self, classes: u32) {
        self.feedback.classes = classes;
    }

    /// Returns the advice to the agent: 0 to send every page, or N to send one page in N.
    pub(super) fn advice(&self) -> u32 {
        self.feedback.one_of
    }
}
