//! The model store, as the driver sees it: it holds requests until the world takes them, and reports the results that
//! the world decides.

use super::plan::DiskPlan;
use super::time::VirtualClock;
use remoca_disk::clock::Clock;
use remoca_io::buffer::IoBuffer;
use remoca_protocol::handover::StoreKind;
use remoca_store::{
    DataPath, Geometry, HandOver, Identity, ImageStamp, OpenError, OpenErrorKind, StoreEvent, StoreHealth, StoreOp,
};
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// An operation as the driver submitted it.
pub(super) struct Submitted {
    pub(super) token: u64,
    pub(super) op: StoreOp,
    pub(super) buffer: Option<IoBuffer>,
}

/// State that the store and the world share.
#[derive(Default)]
pub(super) struct Desk {
    submitted: Vec<Submitted>,
    issued: Vec<Submitted>,
    events: VecDeque<StoreEvent>,
    in_flight: usize,
    /// Whether the driver asks when the image last changed.
    pub(super) is_asked_to_look: bool,
    /// Whether it asks for the size of the image.
    pub(super) is_asked_to_measure: bool,
    /// Error of the first flush or durable write that failed.
    pub(super) failed: Option<i32>,
}

/// State of an image shared by all that open it.
pub(super) struct Image {
    /// Time of its last change.
    changed_ns: AtomicU64,
    /// Whether a process has it open.
    is_locked: AtomicBool,
    /// Size in bytes, ...
    bytes: AtomicU64,
    /// ... and that of which the process knows.
    known_bytes: AtomicU64,
}

impl Image {
    pub(super) fn new(changed_ns: u64, bytes: u64) -> Self {
        Self { changed_ns: changed_ns.into(), is_locked: false.into(), bytes: bytes.into(), known_bytes: bytes.into() }
    }

    /// Gives the image another size.
    pub(super) fn resize(&self, bytes: u64, now_ns: u64) {
        self.bytes.store(bytes, Ordering::Relaxed);
        self.changed_ns.store(now_ns, Ordering::Relaxed);
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Returns whether the process knows the size.
    pub(super) fn is_known(&self) -> bool {
        self.bytes() == self.known_bytes.load(Ordering::Relaxed)
    }

    /// Returns the size that a guest may use: that of which the process knows, as far as the image has it.
    pub(super) fn usable_bytes(&self) -> u64 {
        self.bytes().min(self.known_bytes.load(Ordering::Relaxed))
    }

    fn changed_ns(&self) -> u64 {
        self.changed_ns.load(Ordering::Relaxed)
    }
}

/// The world's end of a store.
#[derive(Clone)]
pub(super) struct StoreDesk {
    desk: Arc<Mutex<Desk>>,
    wake: Arc<OwnedFd>,
    image: Arc<Image>,
}

impl StoreDesk {
    pub(super) fn new(image: &Arc<Image>) -> Self {
        Self { desk: Arc::default(), wake: Arc::new(super::eventfd()), image: Arc::clone(image) }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the requests that the driver has issued.
    pub(super) fn take_issued(&self) -> Vec<Submitted> {
        std::mem::take(&mut self.lock().issued)
    }

    /// Reports to the driver when the image last changed.
    pub(super) fn tell_change(&self) {
        let changed_ns = Some(self.image.changed_ns());
        self.tell(StoreEvent::Looked { changed_ns });
    }

    /// Queues an event, which the driver receives when it looks.
    pub(super) fn tell(&self, event: StoreEvent) {
        self.lock().events.push_back(event);
        super::raise(&self.wake);
    }
}

/// The driver's end of a store.
pub(super) struct ModelStore {
    shared: StoreDesk,
    geometry: Geometry,
    can_measure: bool,
    at_opening: Option<ImageStamp>,
    clock: VirtualClock,
    /// Name that distinguishes its image from others on all hosts.
    name: String,
    changed_at_opening_ns: u64,
}

impl ModelStore {
    /// Opens and locks the image of a disk; `number` distinguishes it from others. A remote image does not show
    /// whether it has changed.
    pub(super) fn open(
        shared: StoreDesk,
        plan: &DiskPlan,
        number: u64,
        clock: VirtualClock,
    ) -> Result<Self, OpenError> {
        if shared.image.is_locked.swap(true, Ordering::Relaxed) {
            return Err(OpenError::new(OpenErrorKind::InUse, "another process has it"));
        }
        let size = shared.image.bytes();
        shared.image.known_bytes.store(size, Ordering::Relaxed);
        let geometry = Geometry {
            size,
            logical_sector: if plan.is_coarse { 4096 } else { 512 },
            physical_block: 4096,
            read_only: false,
            can_discard: true,
            can_write_zeroes: true,
            may_forget: false,
            outlives_process: false,
        };
        let identity = (!plan.remote).then_some([1, 2050, number, size]);
        let changed_at_opening_ns = shared.image.changed_ns();
        let at_opening = identity.map(|identity| ImageStamp { identity, changed_ns: Some(changed_at_opening_ns) });
        let name = format!("image {number}");
        Ok(Self { shared, geometry, can_measure: plan.may_resize, at_opening, clock, name, changed_at_opening_ns })
    }
}

impl Drop for ModelStore {
    fn drop(&mut self) {
        self.shared.image.is_locked.store(false, Ordering::Relaxed);
    }
}

impl DataPath for ModelStore {
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
            self.shared.image.changed_ns.store(self.clock.of_file_stamps(), Ordering::Relaxed);
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
        drop(desk);
        if let StoreEvent::Measured(Ok(())) = event {
            let bytes = self.shared.image.bytes();
            self.shared.image.known_bytes.store(bytes, Ordering::Relaxed);
            self.geometry.size = bytes;
            if let Some(ImageStamp { identity: [.., size], .. }) = &mut self.at_opening {
                *size = bytes;
            }
        }
        Some(event)
    }

    /// Returns `None`: the simulated image has its own times.
    fn next_deadline(&self) -> Option<Instant> {
        None
    }

    fn handle_timer(&mut self, _: Instant) {}

    fn in_flight(&self) -> usize {
        self.shared.lock().in_flight
    }

    fn health(&self) -> StoreHealth {
        StoreHealth::Up
    }
}

impl Identity for ModelStore {
    fn look(&mut self) -> bool {
        let can_tell = self.at_opening.is_some();
        self.shared.lock().is_asked_to_look |= can_tell;
        can_tell
    }

    fn measure(&mut self) -> bool {
        self.shared.lock().is_asked_to_measure |= self.can_measure;
        self.can_measure
    }

    fn stamp_at_opening(&self) -> Option<ImageStamp> {
        self.at_opening
    }

    fn shared_stamp(&self, at_opening: bool) -> Option<String> {
        let changed_ns = if at_opening { self.changed_at_opening_ns } else { self.shared.image.changed_ns() };
        Some(format!("{} {changed_ns}", self.name))
    }

    /// Does nothing, because no page cache is simulated.
    fn empty_page_cache(&mut self) {}

    fn may_be_in_page_cache(&self) -> bool {
        false
    }
}

impl HandOver for ModelStore {
    fn failed_flush(&self) -> Option<i32> {
        self.shared.lock().failed
    }

    fn set_failed_flush(&mut self, errno: Option<i32>) {
        self.shared.lock().failed = errno;
    }

    fn is_still(&self) -> bool {
        self.in_flight() == 0
    }

    /// Does nothing: no flush is due at the end.
    fn begin_drain(&mut self) {}

    /// Returns true: the image is on this host, and executes its requests before another process opens it.
    fn drain(&mut self, _flush_by: Instant) -> bool {
        true
    }

    fn hand_over(&self) -> Result<(BorrowedFd<'_>, StoreKind), String> {
        let flush_failed = self.shared.lock().failed;
        Ok((self.shared.wake.as_fd(), StoreKind::File { flush_failed }))
    }
}
