//! The eviction port: a block device whose written blocks are pages that the guest evicted.
//!
//! The driver calls this module for each request of the port device. A read of block 0 returns the identification page,
//! which the agent looks for and obeys. A write of block 0 carries the agent's statistics. Every other written block is
//! one evicted page, and its block number has no meaning. All of this is hostile input, but a guest can at worst waste
//! its own cache.
//! ```text
//! identification: "REMOCAEP" | version u32 | batch pages u32 | received u64 | matched u64
//!                 | unmatched u64 | dropped u64 | cookie u64 | advice u32 | classes u32
//! statistics:     "REMOCAST" | version u32 | 0 u32 | captured u64 | lost u64 | sampled out u64
//!                 | written u64 | agent's cookie u64 | waiting for memory u32 | classes u32
//! ```
//! *classes* N advises the agent to send only the pages of one class of N, always the same ones, and the agent answers that it does: what it
//! sends after that report is that sample. 0 is for all pages. An agent that knows no classes sends all, and leaves its word 0.
//!
//! The agent, which depends on no crate of the project, has its own reader and writer (`remoca-agent/src/page.rs`). The
//! fuzz target `agent-page` checks that the two agree.

use remoca_core::engine::{CLASSES, EngineStats};
use remoca_core::units::PAGE_SIZE;
use serde::{Deserialize, Serialize};

/// Serial of the port, which the guest finds in `/sys/block/*/serial`.
pub const PORT_SERIAL: &str = "remoca-port";
/// Size of the port's address space in bytes. Only block 0 has a meaning.
pub const PORT_BYTES: u64 = 64 << 20;
/// Maximum number of pages that the agent may send in one request.
pub const BATCH_PAGES: u32 = 256;
const VERSION: u32 = 1;
/// All of the time, in hundredths of a percent.
const MEMORY_WAIT_MAX: u32 = 10_000;
const IDENTIFICATION_MAGIC: &[u8; 8] = b"REMOCAEP";
const STATISTICS_MAGIC: &[u8; 8] = b"REMOCAST";

/// Statistics that the agent in the guest reports. The guest may lie; nothing depends on them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentStats {
    /// Pages copied out at eviction.
    pub captured: u64,
    /// Pages that the agent could not take (its ring was full).
    pub lost: u64,
    /// Pages left out because of the port's advice.
    pub sampled_out: u64,
    /// Pages written to the port.
    pub written: u64,
    /// Number that changes with each start of the agent.
    pub cookie: u64,
    /// Share of the last ten seconds in which some task of the guest waited for memory, in hundredths of a percent; `None` if the
    /// guest's kernel does not tell, or the agent is too old to ask it.
    #[serde(default)]
    pub memory_wait: Option<u32>,
    /// Number of classes of pages of which the agent sends one; 0 if it sends all, or names a number that it cannot have been advised.
    #[serde(default)]
    pub classes: u32,
}

/// Returns the identification page with the counters of `stats`.
#[must_use]
pub fn identification(stats: &EngineStats, cookie: u64, advice: u32, classes: u32) -> [u8; PAGE_SIZE] {
    let mut page = [0; PAGE_SIZE];
    page[..8].copy_from_slice(IDENTIFICATION_MAGIC);
    page[8..12].copy_from_slice(&VERSION.to_le_bytes());
    page[12..16].copy_from_slice(&BATCH_PAGES.to_le_bytes());
    // What the insertion policy passed over was worth sending: the agent should go on.
    let known = stats.evictions_admitted + stats.evictions_duplicate + stats.evictions_passed_over;
    let matched = known + stats.evictions_zero;
    let words = [stats.evictions_reported, matched, stats.evictions_unmatched, stats.evictions_dropped, cookie];
    for (at, word) in words.into_iter().enumerate() {
        page[16 + at * 8..24 + at * 8].copy_from_slice(&word.to_le_bytes());
    }
    page[56..60].copy_from_slice(&advice.to_le_bytes());
    page[60..64].copy_from_slice(&classes.to_le_bytes());
    page
}

/// Returns the agent's statistics, or `None` if `page` is not a statistics page of a known version.
#[must_use]
pub fn agent_stats(page: &[u8]) -> Option<AgentStats> {
    if page.len() < PAGE_SIZE || &page[..8] != STATISTICS_MAGIC || page[8..12] != VERSION.to_le_bytes() {
        return None;
    }
    let word = |at: usize| {
        let mut word = [0; 8];
        word.copy_from_slice(&page[16 + at * 8..24 + at * 8]);
        u64::from_le_bytes(word)
    };
    let half = |at: usize| {
        let mut half = [0; 4];
        half.copy_from_slice(&page[at..at + 4]);
        u32::from_le_bytes(half)
    };
    // Agents that do not know it leave it 0.
    let memory_wait = half(56).checked_sub(1).filter(|wait| *wait <= MEMORY_WAIT_MAX);
    Some(AgentStats {
        captured: word(0),
        lost: word(1),
        sampled_out: word(2),
        written: word(3),
        cookie: word(4),
        memory_wait,
        classes: Some(half(60)).filter(|classes| *classes == CLASSES).unwrap_or(0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_identification_page_is_as_documented() {
        let stats = EngineStats {
            evictions_reported: 10,
            evictions_admitted: 4,
            evictions_duplicate: 1,
            evictions_passed_over: 1,
            evictions_zero: 1,
            evictions_unmatched: 2,
            evictions_dropped: 1,
            ..EngineStats::default()
        };
        let page = identification(&stats, 0x1122, 64, 128);
        assert_eq!(&page[..16], b"REMOCAEP\x01\0\0\0\0\x01\0\0");
        let words: Vec<u64> = page[16..56].as_chunks::<8>().0.iter().map(|w| u64::from_le_bytes(*w)).collect();
        assert_eq!(words, [10, 7, 2, 1, 0x1122]);
        assert_eq!(page[56..60], 64_u32.to_le_bytes());
        assert_eq!(page[60..64], 128_u32.to_le_bytes());
        assert!(page[64..].iter().all(|byte| *byte == 0));
    }

    #[test]
    fn only_statistics_pages_are_taken_for_them() {
        let mut page = [0_u8; PAGE_SIZE];
        assert_eq!(agent_stats(&page), None);
        page[..8].copy_from_slice(b"REMOCAST");
        page[8] = 1;
        for (at, byte) in (16..56).step_by(8).zip(1_u8..) {
            page[at] = byte;
        }
        let expected =
            AgentStats { captured: 1, lost: 2, sampled_out: 3, written: 4, cookie: 5, memory_wait: None, classes: 0 };
        assert_eq!(agent_stats(&page), Some(expected), "as agents write it that know no more");
        for (written, wait) in [(1_u32, Some(0)), (10_001, Some(10_000)), (10_002, None), (u32::MAX, None)] {
            page[56..60].copy_from_slice(&written.to_le_bytes());
            assert_eq!(agent_stats(&page).unwrap().memory_wait, wait);
        }
        for (written, classes) in [(CLASSES, CLASSES), (64, 0), (1, 0), (u32::MAX, 0)] {
            page[60..64].copy_from_slice(&written.to_le_bytes());
            assert_eq!(agent_stats(&page).unwrap().classes, classes);
        }
        assert_eq!(agent_stats(&page[..512]), None);
    }
}
