//! The model store, as the driver has it: it holds what it was given until the world takes it, and reports what the world
//! says became of it.

use super::plan::DiskPlan;
use super::time::VirtualClock;
use remoca_disk::clock::Clock;
use remoca_disk::store::{Geometry, ImageStamp, IoBuffer, Store, StoreEvent, StoreOp};
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// An operation as the driver submitted it.
pub(super) struct Submitted {
    pub(super) token: u64,
    pub(super) op: StoreOp,
    pub(super) buffer: Option<IoBuffer>,
}

/// What the store and the world share.
#[derive(Default)]
pub(super) struct Desk {
    submitted: Vec<Submitted>,
    issued: Vec<Submitted>,
    events: VecDeque<StoreEvent>,
    in_flight: usize,
    /// The driver wants to know when the image was changed.
    pub(super) is_asked_to_look: bool,
    /// The first flush or durable write that failed.
    pub(super) failed: Option<i32>,
    /// When the image was changed last.
    pub(super) changed_ns: u64,
}

/// The world's end of a store.
#[derive(Clone)]
pub(super) struct StoreDesk {
    desk: Arc<Mutex<Desk>>,
    wake: Arc<OwnedFd>,
}

impl StoreDesk {
    pub(super) fn new(changed_ns: u64) -> Self {
        let desk = Desk { changed_ns, ..Desk::default() };
        Self { desk: Arc::new(Mutex::new(desk)), wake: Arc::new(super::eventfd()) }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes what the driver has handed over for good.
    pub(super) fn take_issued(&self) -> Vec<Submitted> {
        std::mem::take(&mut self.lock().issued)
    }

    /// The driver hears when the image was changed last.
    pub(super) fn tell_change(&self) {
        let changed_ns = Some(self.lock().changed_ns);
        self.tell(StoreEvent::Looked { changed_ns });
    }

    /// Something happened; the driver hears of it when it looks.
    pub(super) fn tell(&self, event: StoreEvent) {
        self.lock().events.push_back(event);
        super::raise(&self.wake);
    }
}

/// The driver's end.
pub(super) struct ModelStore {
    shared: StoreDesk,
    geometry: Geometry,
    at_opening: Option<ImageStamp>,
    clock: VirtualClock,
}

impl ModelStore {
    /// The store of a disk; `number` tells its image from others. With a remote one nobody can tell whether it changed.
    pub(super) fn new(shared: StoreDesk, plan: &DiskPlan, number: u64, clock: VirtualClock) -> Self {
        let size = plan.sectors as u64 * 512;
        let geometry = Geometry {
            size,
            logical_sector: if plan.is_coarse { 4096 } else { 512 },
            physical_block: 4096,
            read_only: false,
            can_discard: true,
            can_write_zeroes: true,
        };
        let identity = (!plan.remote).then_some([1, 2050, number, size]);
        let changed_ns = Some(shared.lock().changed_ns);
        let at_opening = identity.map(|identity| ImageStamp { identity, changed_ns });
        Self { shared, geometry, at_opening, clock }
    }
}

impl Store for ModelStore {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.shared.wake.as_fd()
    }

    fn submit(&mut self, token: u64, op: StoreOp, buffer: Option<IoBuffer>) {
        let mut desk = self.shared.lock();
        desk.in_flight += 1;
        if op.is_modification() {
            desk.changed_ns = self.clock.of_file_stamps();
        }
        desk.submitted.push(Submitted { token, op, buffer });
    }

    fn kick(&mut self, _: Instant) {
        let mut desk = self.shared.lock();
        let submitted = std::mem::take(&mut desk.submitted);
        desk.issued.extend(submitted);
    }

    fn handle_ready(&mut self, _: Instant) {
        super::clear(&self.shared.wake);
    }

    fn next_event(&mut self) -> Option<StoreEvent> {
        let mut desk = self.shared.lock();
        let event = desk.events.pop_front()?;
        desk.in_flight -= usize::from(matches!(event, StoreEvent::Completed(_)));
        Some(event)
    }

    fn in_flight(&self) -> usize {
        self.shared.lock().in_flight
    }

    fn look(&mut self) -> bool {
        let can_tell = self.at_opening.is_some();
        self.shared.lock().is_asked_to_look |= can_tell;
        can_tell
    }

    fn stamp_at_opening(&self) -> Option<ImageStamp> {
        self.at_opening
    }

    fn may_be_in_page_cache(&self) -> bool {
        false
    }

    fn failed_flush(&self) -> Option<i32> {
        self.shared.lock().failed
    }

    fn set_failed_flush(&mut self, errno: Option<i32>) {
        self.shared.lock().failed = errno;
    }

    fn hand_over(&self) -> Result<(BorrowedFd<'_>, remoca_disk::handover::StoreKind), String> {
        let flush_failed = self.shared.lock().failed;
        Ok((self.shared.wake.as_fd(), remoca_disk::handover::StoreKind::File { flush_failed }))
    }
}
