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
/// An agent trickles that sends less than one page for this many blocks read, of at least so many.
const TRICKLE_SHARE: u64 = 8;
const TRICKLE_READS: u64 = 16384;
/// It works again when it has sent one page for at most this many blocks of as many: a burst is not enough.
const RETURN_SHARE: u64 = 4;
/// Number of blocks admitted on read for each one that enters as the newest. With it, the cache follows a changing
/// workload (bimodal insertion, Qureshi et al., ISCA 2007).
const BIMODAL: u64 = 32;

/// Source of the pages that enter the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Pages that the agent reports as evicted.
    Evictions,
    /// Frames, before a read overwrites them: there is no agent, it fell silent, or what it sends is a trickle beside what the
    /// guest reads.
    Frames,
    /// Blocks that the guest reads, because frames show nothing either. Most of these blocks enter as the next to be
    /// discarded.
    Reads,
}

/// Whether the agent counts as the source of what the guest evicts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Agent {
    Works,
    /// There is none, or it fell silent. Its next page makes it work.
    Silent,
    /// What it sends is a trickle beside what the guest reads: most reads do not go through the guest's page cache (O_DIRECT).
    Trickles,
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

impl Frames {
    /// Counts a frame, and decides at the end of a window whether frames pay. They start to pay if more than a quarter
    /// of the frames hold known content, and stop if at most a sixteenth do.
    fn note(&mut self, known: bool) {
        self.looked += 1;
        self.known += u32::from(known);
        if self.looked >= if self.pay { WINDOW } else { PROBE_WINDOW } {
            let least = if self.pay { self.looked / 16 } else { self.looked / 4 };
            self.pay = self.known > least;
            (self.looked, self.known) = (0, 0);
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
}

impl Feedback {
    /// Counts a page of an agent that sends one class of pages of `classes`, and decides at the end of a window what it is advised.
    fn note(&mut self, matched: bool, classes: u32) {
        self.received += 1;
        self.matched += u32::from(matched);
        let window = (ADVICE_WINDOW / self.one_of.max(classes).max(1)).max(64);
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

/// Admission policy: the state of the three sources, and the feedback to the agent.
#[derive(Debug)]
pub(super) struct Admit {
    has_port: bool,
    agent: Agent,
    /// Blocks read since the agent's last page.
    blocks_since_eviction: u64,
    /// Blocks read, and pages evicted meanwhile, since the agent was judged last.
    read: u64,
    evicted: u64,
    frames: Frames,
    feedback: Feedback,
    /// Number of reads whose blocks were offered.
    offered: u64,
}

impl Admit {
    pub(super) fn new(has_port: bool, frame_sample: u32) -> Self {
        let frames = Frames { sample: frame_sample, pay: false, passed: 0, looked: 0, known: 0 };
        let agent = if has_port { Agent::Works } else { Agent::Silent };
        let feedback = Feedback::default();
        Self { has_port, agent, blocks_since_eviction: 0, read: 0, evicted: 0, frames, feedback, offered: 0 }
    }

    /// Returns the source of the pages that enter the cache now.
    pub(super) fn admission(&self) -> Admission {
        match (self.agent, self.frames.pay) {
            (Agent::Works, _) => Admission::Evictions,
            (_, true) => Admission::Frames,
            (_, false) => Admission::Reads,
        }
    }

    /// Returns whether what is read is admitted: [`Admission::Reads`].
    #[inline]
    pub(super) fn takes_reads(&self) -> bool {
        self.agent != Agent::Works && !self.frames.pay
    }

    /// Notes `blocks` read, wherever from. The agent no longer counts as working if more than `resident` of them, the blocks that the
    /// guest's memory holds, came since its last page, or many times as many as it sent pages.
    pub(super) fn note_read(&mut self, blocks: u64, resident: u64) {
        self.blocks_since_eviction += blocks;
        self.read += blocks;
        match self.agent {
            Agent::Works if self.blocks_since_eviction > resident => self.judge_as(Agent::Silent),
            Agent::Works if self.read > resident.max(TRICKLE_READS) => self.judge_by(TRICKLE_SHARE),
            Agent::Trickles if self.read > TRICKLE_READS => self.judge_by(RETURN_SHARE),
            Agent::Works | Agent::Silent | Agent::Trickles => {}
        }
    }

    /// Notes a page of the agent that stands for `pages` evicted ones. An agent that was silent works if there is an eviction port; one
    /// that trickles, if it sends enough.
    pub(super) fn note_eviction(&mut self, pages: u32) {
        self.blocks_since_eviction = 0;
        self.evicted += u64::from(pages);
        if self.agent == Agent::Silent && self.has_port {
            self.judge_as(Agent::Works);
        }
    }

    fn judge_by(&mut self, share: u64) {
        let works = self.evicted * share >= self.read;
        self.judge_as(if works { Agent::Works } else { Agent::Trickles });
    }

    fn judge_as(&mut self, agent: Agent) {
        (self.agent, self.read, self.evicted) = (agent, 0, 0);
    }

    /// Counts a read whose blocks are admitted, and returns the end of the queue at which they enter.
    pub(super) fn place_of_read(&mut self) -> Place {
        self.offered += 1;
        if self.offered.is_multiple_of(BIMODAL) { Place::Tail } else { Place::Head }
    }

    /// Returns whether any frames are examined.
    pub(super) fn examines_frames(&self) -> bool {
        self.agent != Agent::Works && self.frames.sample > 0
    }

    /// Returns whether to examine the frame that a read is about to overwrite.
    pub(super) fn wants_frame(&mut self) -> bool {
        if !self.examines_frames() {
            return false;
        }
        self.frames.passed = (self.frames.passed + 1) % self.frames.sample;
        self.frames.pay || self.frames.passed == 0
    }

    /// Counts the outcome for a page that the agent sent, in `stats` and for the advice to the agent. It sends one class of pages of
    /// `classes`.
    pub(super) fn count_evicted(&mut self, evicted: Evicted, classes: u32, stats: &mut EngineStats) {
        stats.evictions_reported += 1;
        *match evicted {
            Evicted::Admit(_) => &mut stats.evictions_admitted,
            Evicted::Duplicate => &mut stats.evictions_duplicate,
            Evicted::Zero => &mut stats.evictions_zero,
            Evicted::Unmatched => &mut stats.evictions_unmatched,
            Evicted::Dropped => &mut stats.evictions_dropped,
            Evicted::PassedOver => &mut stats.evictions_passed_over,
        } += 1;
        self.feedback.note(evicted != Evicted::Unmatched, classes);
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
        self.frames.note(!matches!(evicted, Evicted::Zero | Evicted::Unmatched));
    }

    /// Returns the advice to the agent: 0 to send every page, or N to send one page in N.
    pub(super) fn advice(&self) -> u32 {
        self.feedback.one_of
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A database that reads with O_DIRECT: what its guest evicts is a trickle, and keeps nothing of it out of the cache.
    #[test]
    fn an_agent_that_sends_little_does_not_keep_out_what_is_read_past_the_page_cache() {
        let mut admit = Admit::new(true, 64);
        let mut after = |blocks_per_page: u64, pages: u32, one_of: u32| {
            for _ in 0..pages {
                admit.note_read(blocks_per_page, 4096);
                admit.note_eviction(one_of);
            }
            admit.admission()
        };
        assert_eq!(after(7, 10_000, 1), Admission::Evictions, "a seventh of the reads goes through the page cache");
        assert_eq!(after(700, 1000, 128), Admission::Evictions, "one class of the pages is sent");
        assert_eq!(after(40, 2000, 1), Admission::Reads);
        assert_eq!(after(40, 2000, 1), Admission::Reads, "a page in a while changes nothing");
        assert_eq!(after(5, 10_000, 1), Admission::Reads, "nor do a few more");
        assert_eq!(after(3, 10_000, 1), Admission::Evictions, "the page cache is used again");
    }

    /// An agent that sends one class would otherwise send unknown content for as long as many times as many pages take.
    #[test]
    fn the_less_an_agent_sends_the_fewer_pages_its_advice_is_derived_from() {
        let pages_until_advice = |classes: u32| {
            let mut feedback = Feedback::default();
            let pages = (1..=ADVICE_WINDOW).find(|_| {
                feedback.note(false, classes);
                feedback.one_of > 0
            });
            (pages, feedback.one_of)
        };
        assert_eq!([1, 4, 128].map(pages_until_advice), [4096, 1024, 64].map(|pages| (Some(pages), 4)));
    }

    #[test]
    fn an_agent_that_trickles_is_not_judged_by_few_reads_or_pages() {
        let mut admit = Admit::new(true, 64);
        admit.note_eviction(1);
        for blocks in [TRICKLE_READS - 1, 1] {
            admit.note_read(blocks, u64::MAX);
            assert_eq!(admit.admission(), Admission::Evictions);
        }
        // A small guest.
        let mut admit = Admit::new(true, 64);
        for _ in 0..=TRICKLE_READS / 64 {
            assert_eq!(admit.admission(), Admission::Evictions);
            admit.note_read(64, 64);
            admit.note_eviction(1);
        }
        assert_eq!(admit.admission(), Admission::Reads);
        for _ in 0..2048 {
            admit.note_read(1, 64);
            admit.note_eviction(1);
        }
        admit.note_read(TRICKLE_READS - 2048, 64);
        assert_eq!(admit.admission(), Admission::Reads, "a burst of pages is not enough");
        admit.note_read(1, 64);
        for _ in 0..=TRICKLE_READS / 4 {
            admit.note_eviction(1);
        }
        assert_eq!(admit.admission(), Admission::Reads, "not before enough is read");
        admit.note_read(TRICKLE_READS, 64);
        admit.note_read(1, 64);
        assert_eq!(admit.admission(), Admission::Evictions);
    }
}
