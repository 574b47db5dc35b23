//! 512-byte sectors on a store whose own sectors are larger.
//!
//! Owned by the I/O thread like the store that it wraps. [`super::sector_machine`] does the work; this module passes
//! its requests to the store below, and the completions back.

use remoca_protocol::handover::StoreKind;
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::time::Instant;

use super::sector_machine::{Limits, SectorMachine};
use super::{
    DataPath, Geometry, HandOver, Identity, ImageStamp, SECTOR_SIZE, Store, StoreCompletion, StoreEvent, StoreHealth,
    StoreOp,
};
use remoca_io::buffer::{BufferPool, IoBuffer};

/// Longest copy of an unaligned operation, in bytes. Longer operations are split into chunks.
const CHUNK_LEN_MAX: u32 = 1 << 20;
/// The most bytes of memory for all copies.
const COPIES_BYTES_MAX: usize = 8 << 20;

/// A store with 512-byte sectors.
pub struct AlignedStore {
    below: Box<dyn Store>,
    machine: SectorMachine,
    events: VecDeque<StoreEvent>,
    in_flight: usize,
}

impl AlignedStore {
    /// Wraps `store` so that it has 512-byte sectors. Returns `store` itself if it has them already.
    #[must_use]
    pub fn wrap(store: Box<dyn Store>) -> Box<dyn Store> {
        let block = store.geometry().logical_sector;
        if block <= SECTOR_SIZE {
            return store;
        }
        let limits = Limits { block: u64::from(block), chunk_max: u64::from(CHUNK_LEN_MAX) };
        let machine = SectorMachine::new(limits, BufferPool::new(COPIES_BYTES_MAX));
        Box::new(Self { below: store, machine, events: VecDeque::new(), in_flight: 0 })
    }

    /// Passes requests down and completions up until no more requests result.
    fn exchange(&mut self, now: Instant) {
        loop {
            while let Some(event) = self.below.next_event() {
                match event {
                    StoreEvent::Completed(completion) => self.machine.handle_completion(completion),
                    StoreEvent::ContentUncertain => {
                        self.machine.repeat_modifications();
                        self.take_completions();
                        self.events.push_back(event);
                    }
                    StoreEvent::Looked { .. } | StoreEvent::Measured(_) => self.events.push_back(event),
                }
            }
            self.take_completions();
            let mut has_submitted = false;
            while let Some(request) = self.machine.next_request() {
                self.below.submit(request.token, request.operation, request.buffer);
                has_submitted = true;
            }
            if !has_submitted {
                return;
            }
            self.below.kick(now);
        }
    }

    fn take_completions(&mut self) {
        while let Some(completion) = self.machine.next_completion() {
            self.events.push_back(StoreEvent::Completed(completion));
        }
    }
}

impl DataPath for AlignedStore {
    fn geometry(&self) -> Geometry {
        Geometry { logical_sector: SECTOR_SIZE, ..self.below.geometry() }
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.below.event_fd()
    }

    fn submit(&mut self, token: u64, operation: StoreOp, buffer: Option<IoBuffer>) {
        self.in_flight += 1;
        match operation.validate(&self.geometry(), buffer.as_ref()) {
            Ok(()) => self.machine.submit(token, operation, buffer),
            Err(error) => {
                let completion = StoreCompletion { token, result: Err(error), buffer };
                self.events.push_back(StoreEvent::Completed(completion));
            }
        }
    }

    fn kick(&mut self, now: Instant) {
        self.exchange(now);
        // A look or a size may have been asked for, which is no request.
        self.below.kick(now);
    }

    fn handle_ready(&mut self, now: Instant) {
        self.below.handle_ready(now);
        self.exchange(now);
    }

    fn next_event(&mut self) -> Option<StoreEvent> {
        let event = self.events.pop_front()?;
        if matches!(event, StoreEvent::Completed(_)) {
            self.in_flight -= 1;
        }
        Some(event)
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.below.next_deadline()
    }

    fn handle_timer(&mut self, now: Instant) {
        self.below.handle_timer(now);
        self.exchange(now);
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn health(&self) -> StoreHealth {
        self.below.health()
    }
}

impl Identity for AlignedStore {
    fn look(&mut self) -> bool {
        self.below.look()
    }

    fn measure(&mut self) -> bool {
        self.below.measure()
    }

    fn stamp_at_opening(&self) -> Option<ImageStamp> {
        self.below.stamp_at_opening()
    }

    fn shared_stamp(&self, at_opening: bool) -> Option<String> {
        self.below.shared_stamp(at_opening)
    }

    fn empty_page_cache(&mut self) {
        self.below.empty_page_cache();
    }

    fn may_be_in_page_cache(&self) -> bool {
        self.below.may_be_in_page_cache()
    }
}

impl HandOver for AlignedStore {
    fn failed_flush(&self) -> Option<i32> {
        self.below.failed_flush()
    }

    fn set_failed_flush(&mut self, errno: Option<i32>) {
        self.below.set_failed_flush(errno);
    }

    fn is_still(&self) -> bool {
        self.in_flight == 0 && self.below.is_still()
    }

    fn begin_drain(&mut self) {
        self.below.begin_drain();
    }

    fn drain(&mut self, flush_by: Instant) -> bool {
        self.below.drain(flush_by)
    }

    fn hand_over(&self) -> Result<(BorrowedFd<'_>, StoreKind), String> {
        self.below.hand_over()
    }
}
