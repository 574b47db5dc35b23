//! A store that fails or delays chosen operations, for tests.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::{
    DataPath, Geometry, HandOver, Identity, ImageStamp, Store, StoreCompletion, StoreError, StoreEvent, StoreHealth,
    StoreOp,
};
use remoca_io::buffer::IoBuffer;
use remoca_protocol::handover::StoreKind;

/// What happens to an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The operation is not executed, and fails with this error number (`EIO`, `ENOSPC`, ...).
    Fail(i32),
    /// The operation reaches the store below only after this time.
    Delay(Duration),
}

type Rule = Box<dyn FnMut(&StoreOp) -> Option<Fault> + Send>;

/// The rule of a [`FaultyStore`]. Clones share the rule, and can change it from any thread.
#[derive(Clone, Default)]
pub struct FaultPlan(Arc<Mutex<Option<Rule>>>);

impl FaultPlan {
    /// Asks `rule` about each operation from now on.
    pub fn set(&self, rule: impl FnMut(&StoreOp) -> Option<Fault> + Send + 'static) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(rule));
    }

    pub fn clear(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn fault_for(&self, operation: &StoreOp) -> Option<Fault> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).as_mut().and_then(|rule| rule(operation))
    }
}

type Operation = (u64, StoreOp, Option<IoBuffer>);

pub struct FaultyStore {
    below: Box<dyn Store>,
    plan: FaultPlan,
    failed: VecDeque<StoreCompletion>,
    /// Delayed operations submitted since the last kick, each with its delay.
    arrived: Vec<(Duration, Operation)>,
    delayed: Vec<(Instant, Operation)>,
}

impl FaultyStore {
    #[must_use]
    pub fn new(below: Box<dyn Store>, plan: FaultPlan) -> Self {
        Self { below, plan, failed: VecDeque::new(), arrived: Vec::new(), delayed: Vec::new() }
    }
}

impl DataPath for FaultyStore {
    fn geometry(&self) -> Geometry {
        self.below.geometry()
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.below.event_fd()
    }

    fn submit(&mut self, token: u64, operation: StoreOp, buffer: Option<IoBuffer>) {
        match self.plan.fault_for(&operation) {
            None => self.below.submit(token, operation, buffer),
            Some(Fault::Delay(delay)) => self.arrived.push((delay, (token, operation, buffer))),
            Some(Fault::Fail(errno)) => {
                self.failed.push_back(StoreCompletion { token, result: Err(StoreError { errno }), buffer });
            }
        }
    }

    fn kick(&mut self, now: Instant) {
        self.delayed.extend(self.arrived.drain(..).map(|(delay, operation)| (now + delay, operation)));
        self.below.kick(now);
    }

    fn handle_ready(&mut self, now: Instant) {
        self.below.handle_ready(now);
    }

    fn next_event(&mut self) -> Option<StoreEvent> {
        self.failed.pop_front().map(StoreEvent::Completed).or_else(|| self.below.next_event())
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.delayed.iter().map(|(due, _)| *due).chain(self.below.next_deadline()).min()
    }

    fn handle_timer(&mut self, now: Instant) {
        for (_, (token, operation, buffer)) in self.delayed.extract_if(.., |(due, _)| *due <= now) {
            self.below.submit(token, operation, buffer);
        }
        self.below.kick(now);
        self.below.handle_timer(now);
    }

    fn in_flight(&self) -> usize {
        self.failed.len() + self.arrived.len() + self.delayed.len() + self.below.in_flight()
    }

    fn health(&self) -> StoreHealth {
        self.below.health()
    }
}

impl Identity for FaultyStore {
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

impl HandOver for FaultyStore {
    fn failed_flush(&self) -> Option<i32> {
        self.below.failed_flush()
    }

    fn set_failed_flush(&mut self, errno: Option<i32>) {
        self.below.set_failed_flush(errno);
    }

    fn is_still(&self) -> bool {
        self.in_flight() == 0 && self.below.is_still()
    }

    /// Waits for the store below. Operations that are delayed here have not been sent anywhere.
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
