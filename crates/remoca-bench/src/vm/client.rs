//! A guest without a VM that reads 4 KiB blocks over vhost-user-blk and polls for their completion.
//!
//! It does as little as a guest's driver may do, so that the time is that of the back end: descriptors are written once, a read
//! writes a sector number, and the device is kicked once for a batch, and only if it wants to be. Interrupts are off. Every
//! block is checked: its content says which block it is.

use anyhow::{Context, Result, bail, ensure};
use remoca_frontend::testing::{Buffer, DESC_INDIRECT, Options, TestGuest, Ticket};
use remoca_protocol::PAGE_SIZE;
use std::path::Path;
use std::time::{Duration, Instant};
use vm_memory::{Bytes, GuestAddress};

use super::content;

/// Longest wait for any completion.
const PATIENCE: Duration = Duration::from_secs(20);
/// Number of looks at the queue between two looks at the clock.
const LOOKS: u32 = 1 << 14;
const QUEUE_SIZE: u16 = 256;
/// The queue is looked at as often as possible, so the device need not say how far it has come.
const WITHOUT_EVENT_INDEX: u64 = !(1 << 29);
const NOT_DONE: u8 = 0xaa;
/// First word of a block before it is read. No block begins with it.
const POISON: u64 = 0xa5a5_a5a5_a5a5_a5a5;
/// Offsets within the memory of a request, as [`TestGuest`] lays it out.
const STATUS_AT: u64 = 64;
const TABLE_AT: u64 = 128;
const DATA_AT: u64 = 4096;

/// The guest and its requests.
pub struct Client {
    guest: TestGuest,
    /// Number of blocks with content; those behind them are zero.
    blocks: u64,
    free: Vec<u16>,
    /// Block and start of the read that each descriptor is used for.
    flying: Vec<Option<(u64, Instant)>>,
    answered: u32,
    random: u64,
}

impl Client {
    /// Connects to a disk whose first `blocks` blocks have the content of [`super::content`].
    pub fn connect(socket: &Path, blocks: u64, inflight: bool) -> Result<Self> {
        let options = Options {
            queue_size: QUEUE_SIZE,
            data_bytes: PAGE_SIZE as u64,
            inflight,
            features: WITHOUT_EVENT_INDEX,
            ..Options::default()
        };
        let mut guest = TestGuest::new(options);
        guest.connect(socket).with_context(|| format!("cannot connect to {}", socket.display()))?;
        let queue = &guest.queues[0];
        queue.suppress_interrupts(true);
        for slot in 0..QUEUE_SIZE {
            let at = guest.slot_address(Ticket { queue: 0, slot });
            let part = |offset: u64, length: u32, writable| Buffer { address: at + offset, length, writable };
            let buffers = [part(0, 16, false), part(DATA_AT, 4096, true), part(STATUS_AT, 1, true)];
            queue.write_chain(at + TABLE_AT, 0, &buffers);
            let table = part(TABLE_AT, 16 * 3, false);
            queue.write_descriptor(queue.descriptors, slot, table, DESC_INDIRECT, 0);
            // The type of a read is 0.
            guest.memory.write_slice(&[0; 16], GuestAddress(at))?;
        }
        let free = (0..QUEUE_SIZE).rev().collect();
        let flying = vec![None; usize::from(QUEUE_SIZE)];
        Ok(Self { guest, blocks, free, flying, answered: 0, random: 0x9e37_79b9_7f4a_7c15 })
    }

    /// Returns whether the connection is open.
    pub fn is_connected(&self) -> bool {
        self.guest.is_connected()
    }

    /// Reads each block that has content once, in order.
    pub fn pass(&mut self, depth: usize) -> Result<()> {
        let mut next = 0..self.blocks;
        self.reads(depth, || next.next()).map(drop)
    }

    /// Reads `count` random blocks that have content, `depth` at a time, and returns the latency of each in nanoseconds. Calls
    /// `at` with the number of each read.
    pub fn measure(&mut self, depth: usize, count: usize, mut at: impl FnMut(usize)) -> Result<Vec<u64>> {
        let (mut random, mut begun, blocks) = (self.random, 0, self.blocks);
        let latencies = self.reads(depth, || {
            begun += 1;
            at(begun);
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (begun <= count).then_some((random >> 33) % blocks)
        });
        self.random = random;
        latencies
    }

    /// Reads the blocks that `next` returns, `depth` at a time, until it returns `None`. Returns the latency of each read in
    /// nanoseconds.
    pub fn reads(&mut self, depth: usize, mut next: impl FnMut() -> Option<u64>) -> Result<Vec<u64>> {
        ensure!(depth <= usize::from(QUEUE_SIZE), "the queue has only {QUEUE_SIZE} places");
        let (mut latencies, mut count, mut ended) = (Vec::new(), 0, false);
        let (mut idle, mut progress) = (0_u32, Instant::now());
        while !ended || count > 0 {
            let before = count;
            while !ended && count < depth {
                match next() {
                    None => ended = true,
                    Some(block) => {
                        self.begin(block)?;
                        count += 1;
                    }
                }
            }
            if count > before {
                self.publish();
            }
            let mut taken = 0;
            while let Some((head, _)) = self.guest.queues[0].next_used() {
                latencies.push(self.end(head)?);
                taken += 1;
            }
            count -= taken;
            idle = if taken > 0 { 0 } else { idle.wrapping_add(1) };
            if taken > 0 {
                progress = Instant::now();
            } else if idle.is_multiple_of(LOOKS) {
                ensure!(progress.elapsed() < PATIENCE, "{count} reads were not answered in {PATIENCE:?}");
            }
        }
        Ok(latencies)
    }

    /// Begins a read of a block, which [`Self::take_answer`] ends.
    pub fn begin_read(&mut self, block: u64) -> Result<()> {
        self.begin(block)?;
        self.publish();
        Ok(())
    }

    /// Ends a read that was begun if it was answered. Returns its latency in nanoseconds, or `None` if it was not. Does not wait.
    pub fn take_answer(&mut self) -> Result<Option<u64>> {
        let answer = self.guest.queues[0].next_used();
        answer.map(|(head, _)| self.end(head)).transpose()
    }

    fn begin(&mut self, block: u64) -> Result<()> {
        let slot = self.free.pop().context("more reads than places in the queue")?;
        let at = self.guest.slot_address(Ticket { queue: 0, slot });
        let memory = &self.guest.memory;
        memory.write_obj((block * 8).to_le(), GuestAddress(at + 8))?;
        memory.write_obj(NOT_DONE, GuestAddress(at + STATUS_AT))?;
        memory.write_obj(POISON, GuestAddress(at + DATA_AT))?;
        self.guest.queues[0].offer(slot);
        self.flying[usize::from(slot)] = Some((block, Instant::now()));
        Ok(())
    }

    fn publish(&self) {
        let queue = &self.guest.queues[0];
        queue.publish();
        queue.kick();
    }

    /// Ends a read, and returns its latency in nanoseconds.
    fn end(&mut self, head: u16) -> Result<u64> {
        let begun = self.flying.get_mut(usize::from(head)).and_then(Option::take);
        let Some((block, since)) = begun else { bail!("the device completed a request that was not in flight") };
        let latency = u64::try_from(since.elapsed().as_nanos())?;
        let at = self.guest.slot_address(Ticket { queue: 0, slot: head });
        let status: u8 = self.guest.memory.read_obj(GuestAddress(at + STATUS_AT))?;
        ensure!(status == 0, "a read of block {block} failed with status {status}");
        self.check(block, GuestAddress(at + DATA_AT))?;
        self.free.push(head);
        Ok(latency)
    }

    fn check(&mut self, block: u64, at: GuestAddress) -> Result<()> {
        self.answered = self.answered.wrapping_add(1);
        let word_at = |index: u64| Ok(u64::from_be(self.guest.memory.read_obj(GuestAddress(at.0 + 8 * index))?));
        ensure!(
            content::is_right(block, self.blocks, self.answered, word_at)?,
            "a read of block {block} returned wrong bytes"
        );
        Ok(())
    }
}
