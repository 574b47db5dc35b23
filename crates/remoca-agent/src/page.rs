//! The two pages of the eviction port's block 0, version 1, as bytes: what the agent reads there and what it writes.
//!
//! ```text
//! read:  0 "REMOCAEP" | 8 version u32 | 12 largest batch u32 | 16 received | 24 matched | 32 unmatched | 40 dropped
//!        | 48 boot cookie | 56 advice u32 | 60 classes u32                                   (u64, little-endian)
//! write: 0 "REMOCAST" | 8 version u32 | 16 captured | 24 lost | 32 sampled out | 40 written | 48 start cookie
//!        | 56 waiting for memory u32 | 60 classes u32
//! ```
//! Pure: bytes in, values out. The VM process's input is checked here and nowhere else.

use zerocopy::{FromZeros, Immutable, IntoBytes};

pub const PAGE_BYTES: usize = 4096;
pub const PORT_VERSION: u32 = 1;
/// Maximum number of pages in a batch, whatever the port says.
pub const BATCH_PAGE_COUNT_MAX: u32 = 256;
/// Highest advice that the agent follows.
pub const ADVICE_MAX: u32 = 1024;
/// All of the time, in hundredths of a percent.
const MEMORY_WAIT_MAX: u32 = 10_000;

const IDENTIFICATION_MAGIC: &[u8; 8] = b"REMOCAEP";
const STATISTICS_MAGIC: &[u8; 8] = b"REMOCAST";

/// A page as direct I/O needs it: aligned to its size.
#[derive(Clone, Copy, FromZeros, IntoBytes, Immutable)]
#[repr(C, align(4096))]
pub struct Page(pub [u8; PAGE_BYTES]);

impl Page {
    pub const ZERO: Page = Page([0; PAGE_BYTES]);

    fn u32_at(&self, offset: usize) -> u32 {
        let mut bytes = [0; 4];
        bytes.copy_from_slice(&self.0[offset..offset + 4]);
        u32::from_le_bytes(bytes)
    }

    fn u64_at(&self, offset: usize) -> u64 {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&self.0[offset..offset + 8]);
        u64::from_le_bytes(bytes)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PageError {
    #[error("its first block is not the identification page of an eviction port")]
    NotAPort,
    #[error("the port speaks version {0}, this agent version {PORT_VERSION}")]
    OtherVersion(u32),
}

/// The VM process's report on its port. The counters restart with the process, which also changes the cookie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdentificationPage {
    /// Pages that one request may carry, 1 to [`BATCH_PAGE_COUNT_MAX`].
    pub batch_page_count_max: u32,
    pub received: u64,
    pub matched: u64,
    pub unmatched: u64,
    pub dropped: u64,
    pub boot_cookie: u64,
    /// Advice to send about one page of this many, 1 to [`ADVICE_MAX`].
    pub sample_one_in: u32,
    /// Advice to send only the pages of one class of this many, always the same ones; 1 for all.
    pub classes: u32,
}

impl IdentificationPage {
    pub fn parse(page: &Page) -> Result<IdentificationPage, PageError> {
        if page.0[..8] != IDENTIFICATION_MAGIC[..] {
            return Err(PageError::NotAPort);
        }
        let version = page.u32_at(8);
        if version != PORT_VERSION {
            return Err(PageError::OtherVersion(version));
        }
        Ok(IdentificationPage {
            batch_page_count_max: page.u32_at(12).clamp(1, BATCH_PAGE_COUNT_MAX),
            received: page.u64_at(16),
            matched: page.u64_at(24),
            unmatched: page.u64_at(32),
            dropped: page.u64_at(40),
            boot_cookie: page.u64_at(48),
            sample_one_in: page.u32_at(56).clamp(1, ADVICE_MAX),
            classes: page.u32_at(60).clamp(1, ADVICE_MAX),
        })
    }
}

/// The agent's report on itself, counted in pages since its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StatisticsPage {
    /// Pages copied into the ring.
    pub captured: u64,
    /// Pages not captured: the ring was full, the copy failed, or there was no port.
    pub lost: u64,
    /// Pages not captured because of the port's advice.
    pub sampled_out: u64,
    /// Pages written to the port.
    pub written: u64,
    /// Random number, new at each start of the agent.
    pub start_cookie: u64,
    /// Share of the last ten seconds in which some task waited for memory, in hundredths of a percent. Written as one more; 0 is for
    /// a kernel that does not tell, and for agents that did not ask it.
    pub memory_wait: Option<u32>,
    /// Number of classes of pages of which one is sent from now on, 1 if all are. Written as 0 then, as by agents that know no classes.
    pub classes: u32,
}

impl StatisticsPage {
    pub fn encode(&self, page: &mut Page) {
        *page = Page::ZERO;
        page.0[..8].copy_from_slice(STATISTICS_MAGIC);
        page.0[8..12].copy_from_slice(&PORT_VERSION.to_le_bytes());
        let counters = [self.captured, self.lost, self.sampled_out, self.written, self.start_cookie];
        for (index, counter) in counters.iter().enumerate() {
            page.0[16 + index * 8..24 + index * 8].copy_from_slice(&counter.to_le_bytes());
        }
        let wait = self.memory_wait.map_or(0, |wait| wait.min(MEMORY_WAIT_MAX) + 1);
        page.0[56..60].copy_from_slice(&wait.to_le_bytes());
        let classes = if self.classes > 1 { self.classes } else { 0 };
        page.0[60..64].copy_from_slice(&classes.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the bytes of the contract, written out by hand.
    fn golden_identification() -> Page {
        let mut page = Page::ZERO;
        let bytes: [&[u8]; 10] = [
            b"REMOCAEP",
            &[1, 0, 0, 0],
            &[64, 0, 0, 0],
            &[10, 0, 0, 0, 0, 0, 0, 0],
            &[7, 1, 0, 0, 0, 0, 0, 0],
            &[2, 0, 0, 0, 0, 0, 0, 0],
            &[1, 0, 0, 0, 0, 0, 0, 0],
            &[8, 7, 6, 5, 4, 3, 2, 1],
            &[16, 0, 0, 0],
            &[128, 0, 0, 0],
        ];
        let bytes = bytes.concat();
        page.0[..bytes.len()].copy_from_slice(&bytes);
        page
    }

    #[test]
    fn identification_page_is_read_as_the_contract_has_it() {
        assert_eq!(
            IdentificationPage::parse(&golden_identification()),
            Ok(IdentificationPage {
                batch_page_count_max: 64,
                received: 10,
                matched: 263,
                unmatched: 2,
                dropped: 1,
                boot_cookie: 0x0102_0304_0506_0708,
                sample_one_in: 16,
                classes: 128,
            })
        );
    }

    #[test]
    fn other_disks_and_versions_are_told_apart() {
        assert_eq!(IdentificationPage::parse(&Page::ZERO), Err(PageError::NotAPort));
        let mut page = golden_identification();
        page.0[7] = b'X';
        assert_eq!(IdentificationPage::parse(&page), Err(PageError::NotAPort));
        let mut page = golden_identification();
        page.0[8] = 2;
        assert_eq!(IdentificationPage::parse(&page), Err(PageError::OtherVersion(2)));
    }

    #[test]
    fn what_the_port_says_is_bounded() {
        let parse = |batch: u32, advice: u32| {
            let mut page = golden_identification();
            page.0[12..16].copy_from_slice(&batch.to_le_bytes());
            page.0[56..60].copy_from_slice(&advice.to_le_bytes());
            page.0[60..64].copy_from_slice(&advice.to_le_bytes());
            let page = IdentificationPage::parse(&page).unwrap();
            assert_eq!(page.classes, page.sample_one_in);
            (page.batch_page_count_max, page.sample_one_in)
        };
        assert_eq!(parse(0, 0), (1, 1));
        assert_eq!(parse(256, 1024), (256, 1024));
        assert_eq!(parse(u32::MAX, u32::MAX), (256, 1024));
    }

    #[test]
    fn statistics_page_is_written_as_the_contract_has_it() {
        let mut page = Page([0xaa; PAGE_BYTES]);
        let statistics = StatisticsPage {
            captured: 0x0102,
            lost: 3,
            sampled_out: 4,
            written: 5,
            start_cookie: 6,
            memory_wait: Some(0x0203),
            classes: 128,
        };
        statistics.encode(&mut page);
        let golden: [&[u8]; 9] = [
            b"REMOCAST",
            &[1, 0, 0, 0, 0, 0, 0, 0],
            &[2, 1, 0, 0, 0, 0, 0, 0],
            &[3, 0, 0, 0, 0, 0, 0, 0],
            &[4, 0, 0, 0, 0, 0, 0, 0],
            &[5, 0, 0, 0, 0, 0, 0, 0],
            &[6, 0, 0, 0, 0, 0, 0, 0],
            &[4, 2, 0, 0],
            &[128, 0, 0, 0],
        ];
        let golden = golden.concat();
        assert_eq!(page.0[..golden.len()], golden[..]);
        assert!(page.0[golden.len()..].iter().all(|byte| *byte == 0));
        for (wait, written) in [(None, 0), (Some(0), 1), (Some(u32::MAX), 10_001_u32)] {
            StatisticsPage { memory_wait: wait, ..statistics }.encode(&mut page);
            assert_eq!(page.0[56..60], written.to_le_bytes());
        }
        StatisticsPage { classes: 1, ..statistics }.encode(&mut page);
        assert_eq!(page.0[60..64], [0; 4], "all are sent");
    }
}
