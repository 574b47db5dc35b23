//! What the store tests share: a driver of one store, patterns to tell sectors apart, a small random generator.

#![allow(clippy::unwrap_used, reason = "a test that meets an error has failed")]
#![allow(dead_code, reason = "each test file uses its own part")]

pub mod machine;
pub mod servers;

use std::collections::HashMap;
use std::time::{Duration, Instant};

use remoca_io::buffer::{BufferPool, IoBuffer};
use remoca_store::{Store, StoreCompletion, StoreError, StoreEvent, StoreOp};
use rustix::event::{PollFd, PollFlags, Timespec};

/// A test that waits longer than this for one completion has hung.
pub const HANG_AFTER: Duration = Duration::from_secs(60);

/// Drives one store the way the I/O thread does.
pub struct Driver {
    pub store: Box<dyn Store>,
    pub pool: BufferPool,
    pub uncertain_count: usize,
    next_token: u64,
    completed: HashMap<u64, StoreCompletion>,
}

impl Driver {
    pub fn new(store: impl Store + 'static) -> Self {
        Self::boxed(Box::new(store))
    }

    pub fn boxed(store: Box<dyn Store>) -> Self {
        let pool = BufferPool::new(64 << 20);
        Self { store, pool, uncertain_count: 0, next_token: 1, completed: HashMap::new() }
    }

    /// Submits and kicks; the token to wait for.
    pub fn start(&mut self, operation: StoreOp, data: Option<&[u8]>) -> u64 {
        let token = self.queue(operation, data);
        self.store.kick(Instant::now());
        self.drain();
        token
    }

    /// Submits without a kick.
    pub fn queue(&mut self, operation: StoreOp, data: Option<&[u8]>) -> u64 {
        let buffer = self.buffer_for(&operation, data);
        let token = self.next_token;
        self.next_token += 1;
        self.store.submit(token, operation, buffer);
        token
    }

    pub fn wait(&mut self, token: u64) -> StoreCompletion {
        let give_up_at = Instant::now() + HANG_AFTER;
        loop {
            if let Some(completion) = self.completed.remove(&token) {
                return completion;
            }
            assert!(Instant::now() < give_up_at, "operation {token} hangs");
            self.turn(Duration::from_secs(1));
        }
    }

    /// One round of the loop: waits for the store at most for `limit`.
    pub fn turn(&mut self, limit: Duration) {
        let now = Instant::now();
        let wait = self.store.next_deadline().map_or(limit, |due| due.saturating_duration_since(now).min(limit));
        let wait = Timespec::try_from(wait).unwrap();
        let is_ready = {
            let mut fds = [PollFd::from_borrowed_fd(self.store.event_fd(), PollFlags::IN)];
            matches!(rustix::event::poll(&mut fds, Some(&wait)), Ok(count) if count > 0)
        };
        let now = Instant::now();
        if is_ready {
            self.store.handle_ready(now);
        }
        if self.store.next_deadline().is_some_and(|due| due <= now) {
            self.store.handle_timer(now);
        }
        self.drain();
    }

    pub fn take_completed(&mut self) -> Vec<StoreCompletion> {
        self.completed.drain().map(|(_, completion)| completion).collect()
    }

    pub fn run(&mut self, operation: StoreOp, data: Option<&[u8]>) -> Result<Option<IoBuffer>, StoreError> {
        let token = self.start(operation, data);
        let completion = self.wait(token);
        completion.result.map(|()| completion.buffer)
    }

    pub fn read(&mut self, offset: u64, len: usize) -> Result<Vec<u8>, StoreError> {
        let operation = StoreOp::Read { offset, len: u32::try_from(len).unwrap() };
        self.run(operation, None).map(|buffer| buffer.expect("a read gives its buffer back").to_vec())
    }

    pub fn write(&mut self, offset: u64, data: &[u8], durable: bool) -> Result<(), StoreError> {
        let operation = StoreOp::Write { offset, len: u32::try_from(data.len()).unwrap(), durable };
        self.run(operation, Some(data)).map(|_| ())
    }

    pub fn flush(&mut self) -> Result<(), StoreError> {
        self.run(StoreOp::Flush, None).map(|_| ())
    }

    fn buffer_for(&self, operation: &StoreOp, data: Option<&[u8]>) -> Option<IoBuffer> {
        match (operation, data) {
            (StoreOp::Write { .. }, Some(data)) => {
                let mut buffer = self.pool.take(data.len()).expect("the pool of the test is large enough");
                buffer.copy_from_slice(data);
                Some(buffer)
            }
            (StoreOp::Read { len, .. }, None) => {
                let mut buffer = self.pool.take(usize::try_from(*len).unwrap()).expect("the pool is large enough");
                // What a store failed to fill shows.
                buffer.fill(0xEE);
                Some(buffer)
            }
            _ => None,
        }
    }

    fn drain(&mut self) {
        while let Some(event) = self.store.next_event() {
            match event {
                StoreEvent::Completed(completion) => {
                    let token = completion.token;
                    assert!(self.completed.insert(token, completion).is_none(), "operation {token} completed twice");
                }
                StoreEvent::Looked { .. } | StoreEvent::Measured(_) => {}
                StoreEvent::ContentUncertain => self.uncertain_count += 1,
            }
        }
    }
}

/// A store fails flushes and durable writes after a flush that failed before the store was opened, and nothing else.
pub fn expect_failed_flush_to_be_inherited(driver: &mut Driver) {
    let (failed, data) = (StoreError { errno: libc::EIO }, pattern(0, 4096, 1));
    driver.store.set_failed_flush(Some(failed.errno));
    assert_eq!(driver.flush(), Err(failed));
    assert_eq!(driver.write(0, &data, true), Err(failed));
    driver.write(0, &data, false).unwrap();
    driver.store.set_failed_flush(None);
    driver.flush().unwrap();
}

/// Bytes that name their sector and a version, so that no two sectors or versions look alike.
pub fn pattern(offset: u64, len: usize, version: u64) -> Vec<u8> {
    assert!(offset.is_multiple_of(512) && len.is_multiple_of(512));
    let mut bytes = Vec::with_capacity(len);
    for sector in (offset / 512)..(offset / 512 + len as u64 / 512) {
        let mut random = Random(sector ^ version.rotate_left(32) ^ 0x9E37_79B9_7F4A_7C15);
        bytes.extend((0..64).flat_map(|_| random.next().to_le_bytes()));
    }
    bytes
}

/// SplitMix64: the same numbers from the same seed.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}
