//! The guest's driver of the eviction port, to which it reports the pages that leave its memory.

use anyhow::{Result, ensure};
use remoca_frontend::testing::{Command, Options, TestGuest, Ticket};
use std::path::Path;

use super::{BLOCK, content};

/// Size of one write of evicted pages, in bytes.
const BATCH_BYTES: u64 = 256 << 10;
/// Most pages in a write that is not waited for.
const REPORT_PAGES: usize = 16;
const QUEUE_SIZE: u16 = 8;

/// An eviction port.
pub struct Port {
    guest: TestGuest,
    /// Blocks that are still to be reported.
    waiting: Vec<u64>,
    flying: Vec<Ticket>,
}

impl Port {
    /// Connects to the port at `socket`.
    pub fn connect(socket: &Path) -> Result<Self> {
        let options = Options { queue_size: QUEUE_SIZE, data_bytes: BATCH_BYTES, ..Options::default() };
        let mut guest = TestGuest::new(options);
        guest.connect(socket)?;
        Ok(Self { guest, waiting: Vec::new(), flying: Vec::new() })
    }

    /// Reports whole blocks of the image's content in this range of bytes, and waits until they are taken.
    pub fn evict_range(&mut self, bytes: std::ops::Range<u64>) -> Result<()> {
        let (first, end) = (bytes.start, bytes.end);
        for first in (first..end).step_by(usize::try_from(BATCH_BYTES)?) {
            self.evict(&content::of(first..end.min(first + BATCH_BYTES)))?;
        }
        Ok(())
    }

    /// Reports blocks, and waits until they are taken.
    pub fn evict_blocks(&mut self, blocks: &[u64]) -> Result<()> {
        content_of(blocks).chunks(usize::try_from(BATCH_BYTES)?).try_for_each(|pages| self.evict(pages))
    }

    /// Reports pages that no disk holds, and waits until they are taken.
    pub fn evict_unknown(&mut self, pages: usize) -> Result<()> {
        let batch = vec![0x5a; usize::try_from(BATCH_BYTES)?];
        let lengths = (1..=pages).rev().step_by(batch.len() / 4096).map(|left| left * 4096);
        lengths.map(|bytes| bytes.min(batch.len())).try_for_each(|bytes| self.evict(&batch[..bytes]))
    }

    /// Reports pages, and waits until they are taken.
    fn evict(&mut self, pages: &[u8]) -> Result<()> {
        let status = self.guest.run(0, command(pages));
        ensure!(status == 0, "the eviction port failed a write");
        Ok(())
    }

    /// Reports a block, together with others, and does not wait. Those for which the port has no room now follow later.
    pub fn report(&mut self, block: u64) -> Result<()> {
        self.waiting.push(block);
        if self.waiting.len() < REPORT_PAGES {
            return Ok(());
        }
        self.guest.poll(0);
        let mut failed = false;
        self.flying.retain(|ticket| {
            let status = self.guest.polled(*ticket);
            failed |= status.is_some_and(|status| status != 0);
            status.is_none()
        });
        ensure!(!failed, "the eviction port failed a write");
        if self.guest.has_free_slot(0) {
            let rest = self.waiting.split_off(REPORT_PAGES);
            let blocks = std::mem::replace(&mut self.waiting, rest);
            self.flying.push(self.guest.submit(0, command(&content_of(&blocks))));
            self.guest.queues[0].kick();
        }
        Ok(())
    }
}

fn content_of(blocks: &[u64]) -> Vec<u8> {
    blocks.iter().flat_map(|block| content::of(block * BLOCK..(block + 1) * BLOCK)).collect()
}

/// Returns the command that reports pages. The page at sector 0 of the port is for the guest agent's own report.
fn command(pages: &[u8]) -> Command<'_> {
    Command::Write { sector: BLOCK / 512, data: pages }
}
