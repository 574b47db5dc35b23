//! An agent on paper: which of the evicted pages it takes, by the advice that it read last.

use crate::guest::Random;
use remoca_core::engine::DiskEngine;

/// Times between two looks at the advice: usual, and while one class of pages is sent.
const TICK_NS: u64 = 1_000_000_000;
const QUIET_TICK_NS: u64 = 100_000_000;
/// Number of pages after which the advice is read again, however short the time.
const PAGES_PER_ADVICE: u32 = 4096;

/// The agent. It begins without advice.
#[derive(Debug)]
pub struct Agent {
    one_of: u32,
    classes: u32,
    read_at: u64,
    since: u32,
    random: Random,
}

impl Agent {
    pub fn new() -> Self {
        Self { one_of: 1, classes: 1, read_at: 0, since: 0, random: Random(9) }
    }

    /// Returns whether the agent takes the page of a block that is evicted now.
    pub fn takes(&mut self, now: u64, engine: &mut DiskEngine<Vec<u32>>, block: u64) -> bool {
        let tick = if self.classes > 1 { QUIET_TICK_NS } else { TICK_NS };
        if now >= self.read_at + tick || self.since >= PAGES_PER_ADVICE {
            (self.read_at, self.since) = (now, 0);
            (self.one_of, self.classes) = (engine.advice().max(1), engine.class_advice().max(1));
            engine.handle_agent(self.classes);
        }
        let takes = is_in_class(block, self.classes) && self.random.next().is_multiple_of(self.one_of.into());
        self.since += u32::from(takes);
        takes
    }
}

/// Returns whether the page of a block is of the class that is sent, as `capture.bpf.c` does for a page of a file.
fn is_in_class(block: u64, classes: u32) -> bool {
    let mix = |word: u64| (word ^ word >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93);
    ((mix(mix(block)) >> 32) * u64::from(classes)) >> 32 == 0
}
