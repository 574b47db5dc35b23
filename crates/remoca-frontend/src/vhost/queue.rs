//! One queue of a device: takes chains from its ring, hands them out, and puts them back as used.
//!
//! Owned by the I/O thread. The ring runs from `start` to `stop` or `reset`.
//!
//! Invariants:
//! 1. A head is handed out once until its completion is published; a guest that offers it again breaks its queue.
//! 2. Chains taken = chains published + chains marked in the in-flight record, in the order of the available ring.
//! 3. Every chain taken is completed exactly once, unless the front end is gone.
//! 4. A broken queue takes no more chains until it is started again; chains that it took before are still completed.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use remoca_io::narrow;

use super::chain::{Chain, ChainError, SegmentCount, Session};
use super::config::DeviceConfig;
use super::flights::{Back, Flights, Taken};
use super::inflight::{InflightError, InflightQueue};
use super::layout::RingLayout;
use super::log::LogSwitch;
use super::memory::GuestMemory;
use super::request::{Parsed, Status, parse};
use super::ring::{Ring, RingUnreachable};
use remoca_io::wake;

/// How the guest broke its queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
enum QueueError {
    #[error("{offered} new chains on a ring of {size}")]
    AvailableIndex { offered: u16, size: u16 },
    #[error("head {head} of a ring of {size}")]
    Head { head: u16, size: u16 },
    #[error("head {0} is in flight already")]
    HeadInFlight(u16),
    #[error(transparent)]
    Chain(#[from] ChainError),
    #[error(transparent)]
    Ring(#[from] RingUnreachable),
}

/// Why a queue cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("the ring is not in guest memory")]
    Ring,
    #[error(transparent)]
    Inflight(#[from] InflightError),
}

/// What a queue needs to know about its device in order to take a chain.
pub(crate) struct Context<'a> {
    pub config: &'a DeviceConfig,
    pub session: &'a Arc<Session>,
    pub indirect: bool,
    pub segments: &'a Arc<SegmentCount>,
}

/// How to start a queue.
pub(crate) struct Start {
    pub layout: RingLayout,
    pub memory: Arc<GuestMemory>,
    /// Where to continue in the available ring if there is no in-flight record.
    pub base: u16,
    pub record: Option<InflightQueue>,
}

pub(crate) struct Queue {
    index: u16,
    log: Arc<LogSwitch>,
    ring: Option<Ring>,
    pub enabled: bool,
    stopping: bool,
    broken: bool,
    next_available: u16,
    available_seen: u16,
    next_used: u16,
    flights: Flights,
    in_flight: u16,
    resubmit: VecDeque<u16>,
    record: Option<InflightQueue>,
    /// Whether the ring started without a record that was used before, which would tell what an earlier process had in flight.
    begins_anew: bool,
    /// Heads completed and not yet published.
    batch: Vec<u16>,
    call: Option<Arc<OwnedFd>>,
    pub error: Option<Arc<OwnedFd>>,
    /// Whether the guest was told that it need not kick: the driver looks at the ring by itself.
    is_watched: bool,
}

impl Queue {
    pub fn new(index: u16, log: Arc<LogSwitch>) -> Self {
        Queue {
            index,
            log,
            ring: None,
            enabled: false,
            stopping: false,
            broken: false,
            next_available: 0,
            available_seen: 0,
            next_used: 0,
            flights: Flights::default(),
            in_flight: 0,
            resubmit: VecDeque::new(),
            record: None,
            begins_anew: false,
            batch: Vec::new(),
            call: None,
            error: None,
            is_watched: false,
        }
    }

    /// Starts the ring, and resubmits the requests that its record lists as in flight.
    pub fn start(&mut self, start: Start) -> Result<(), StartError> {
        let size = start.layout.size;
        let ring = Ring::new(start.layout, start.memory, self.log.clone());
        let used = ring.used_index().map_err(|_| StartError::Ring)?;
        // A back end that was killed may have told the guest not to kick.
        ring.set_kicks_wanted(true).map_err(|_| StartError::Ring)?;
        self.is_watched = false;
        let mut record = start.record;
        self.begins_anew = record.as_ref().is_none_or(InflightQueue::is_unused);
        self.resubmit.clear();
        self.next_available = start.base;
        if let Some(record) = &mut record {
            // A front end that lost its back end does not know how far that had got. The record and the used index do.
            self.resubmit = record.recover(used, size)?.into();
            let resubmitted = u16::try_from(self.resubmit.len()).unwrap_or(size);
            self.next_available = used.wrapping_add(resubmitted);
        }
        narrow::passes("queue-recovered");
        if !self.resubmit.is_empty() {
            tracing::info!(queue = self.index, requests = self.resubmit.len(), "resubmitting requests in flight");
        }
        self.available_seen = self.next_available;
        self.next_used = used;
        self.flights.restart(size);
        self.in_flight = 0;
        self.batch.clear();
        self.record = record;
        self.stopping = false;
        self.broken = false;
        self.ring = Some(ring);
        self.log_used_ring();
        Ok(())
    }

    /// Relocates a running ring after the front end changed its memory table. Does nothing if the ring is not running.
    pub fn relocate(&mut self, layout: RingLayout, memory: Arc<GuestMemory>) {
        if self.ring.is_some() {
            self.ring = Some(Ring::new(layout, memory, self.log.clone()));
        }
    }

    /// Sets the guest address at which the used ring is logged, or `None` if it is not logged.
    pub fn set_used_log(&mut self, used_log: Option<u64>) {
        if let Some(ring) = &mut self.ring {
            ring.set_used_log(used_log);
        }
        self.log_used_ring();
    }

    /// Marks the used ring in the log, which may be a new one. A back end that was killed may have published completions
    /// without marking them.
    pub fn log_used_ring(&self) {
        if let Some(ring) = &self.ring {
            ring.log_used_ring();
        }
    }

    /// Records the state of the write cache for the next back end.
    pub fn note_write_cache(&self, is_on: bool) {
        if let Some(record) = &self.record {
            record.set_writeback(is_on);
        }
    }

    pub fn is_running(&self) -> bool {
        self.ring.is_some()
    }

    /// Returns where another program continues in the available ring, or `None` if the ring is not running.
    pub fn base(&self) -> Option<u16> {
        self.ring.as_ref().map(|_| self.next_available)
    }

    /// Stops taking new chains from the ring. Chains that are to be resubmitted are still taken.
    pub fn begin_stop(&mut self) {
        self.stopping = true;
    }

    /// Returns whether every chain that was taken or was to be resubmitted is completed. A broken queue does not
    /// resubmit.
    pub fn is_drained(&self) -> bool {
        self.in_flight == 0 && (self.resubmit.is_empty() || self.broken)
    }

    /// Publishes the last completions and removes the ring. Returns its position in the available ring.
    pub fn finish_stop(&mut self) -> u16 {
        self.publish();
        self.listen();
        self.ring = None;
        self.record = None;
        // Chains that were not resubmitted are still in the record.
        self.resubmit.clear();
        self.stopping = false;
        self.next_available
    }

    /// Resets the queue to its initial state after the front end has disconnected.
    pub fn reset(&mut self) {
        *self = Queue::new(self.index, self.log.clone());
    }

    /// Returns whether a request that an earlier process had in flight is still to be resubmitted, or nothing tells whether it had
    /// any.
    pub fn repeats(&self) -> bool {
        !self.resubmit.is_empty() || self.is_running() && self.begins_anew
    }

    pub fn in_flight(&self) -> u16 {
        self.in_flight
    }

    /// Returns the next chain, or piece of one, for the driver, or `None` if there is none. Answers requests that do
    /// not need the driver.
    pub fn take(&mut self, context: &Context) -> Option<Taken> {
        // A head stays busy until its completion is published, so the loop ends after at most one round of the ring.
        loop {
            if let Some(piece) = self.flights.next_piece(context.config) {
                return Some(piece);
            }
            let chain = match self.next_chain(context) {
                Ok(chain) => chain?,
                Err(error) => {
                    self.fail(error);
                    return None;
                }
            };
            match parse(&chain, context.config) {
                Parsed::Answer(status) => self.finish(&chain, status),
                Parsed::Execute { operation, data_start } => self.flights.load(chain, operation, data_start),
            }
        }
    }

    /// Tells the guest that it need not kick, until [`Self::listen`]. Does nothing if the queue takes no new chains.
    fn watch(&mut self) {
        if !self.is_watched && self.takes_new() {
            let told = self.ring.as_ref().map(|ring| ring.set_kicks_wanted(false));
            self.is_watched = matches!(told, Some(Ok(())));
        }
    }

    /// Tells the guest to kick again, if it was told that it need not.
    pub fn listen(&mut self) {
        if std::mem::take(&mut self.is_watched)
            && let Some(ring) = &self.ring
        {
            // A ring that is gone is noticed when chains are taken from it.
            let _ = ring.set_kicks_wanted(true);
        }
    }

    /// Returns whether the guest was told that it need not kick.
    pub fn is_watched(&self) -> bool {
        self.is_watched
    }

    /// Returns whether the guest has made chains available that [`Self::take`] would find.
    pub fn has_available(&self) -> bool {
        let Some(ring) = self.ring.as_ref().filter(|_| self.takes_new()) else { return false };
        // A ring that is gone is noticed when chains are taken from it.
        self.available_seen != self.next_available || ring.available_index() != Ok(self.next_available)
    }

    fn takes_new(&self) -> bool {
        self.enabled && !self.broken && !self.stopping
    }

    fn next_chain(&mut self, context: &Context) -> Result<Option<Chain>, QueueError> {
        let Some(ring) = &self.ring else { return Ok(None) };
        if self.broken || !(self.enabled || self.stopping) {
            return Ok(None);
        }
        let resubmitted = self.resubmit.front().copied();
        let head = match resubmitted {
            Some(head) => head,
            None if self.stopping => return Ok(None),
            None => {
                if self.available_seen == self.next_available {
                    self.available_seen = ring.available_index()?;
                }
                match self.available_seen.wrapping_sub(self.next_available) {
                    0 => return Ok(None),
                    offered if offered > ring.size() => {
                        return Err(QueueError::AvailableIndex { offered, size: ring.size() });
                    }
                    _ => ring.available_entry(self.next_available)?,
                }
            }
        };
        match self.flights.is_busy(head) {
            None => return Err(QueueError::Head { head, size: ring.size() }),
            Some(true) => return Err(QueueError::HeadInFlight(head)),
            Some(false) => {}
        }
        let chain = Chain::walk(ring, head, context.indirect, context.session, context.segments)?;
        self.board(head, resubmitted.is_some());
        self.watch();
        Ok(Some(chain))
    }

    /// Adds `head` to the chains in flight. Marks it in the record before its request is executed, unless it is
    /// resubmitted and thus marked already.
    fn board(&mut self, head: u16, resubmitted: bool) {
        if resubmitted {
            self.resubmit.pop_front();
            narrow::passes("request-repeated");
        } else {
            self.next_available = self.next_available.wrapping_add(1);
            if let Some(record) = &mut self.record {
                record.mark(head);
            }
        }
        self.flights.begin(head);
        self.in_flight += 1;
    }

    /// Marks each write and write-zeroes for repetition of which the disk may have lost finished pieces. It goes out
    /// again when all of its pieces are back and none has failed.
    pub fn repeat_parts(&mut self) {
        self.flights.repeat_parts();
    }

    /// Returns whether [`Self::take`] has a request that goes out again.
    pub fn has_repeats(&self) -> bool {
        self.flights.has_repeats()
    }

    /// Returns whether [`Self::take`] has a piece of a chain of which others were handed out before.
    pub fn has_begun(&self) -> bool {
        self.flights.has_begun()
    }

    /// Returns whether a front end waits for chains that the queue has to resubmit before it stops.
    pub fn repeats_to_stop(&self) -> bool {
        self.stopping && !self.broken && !self.resubmit.is_empty()
    }

    /// Completes a piece of `chain` with `status`. Returns true if the chain goes out again, so that [`Self::take`] has
    /// a piece of it.
    pub fn complete(&mut self, chain: &Arc<Chain>, status: Status) -> bool {
        match self.flights.take_back(chain, status) {
            Back::Waits => false,
            Back::Again => true,
            Back::Answer(status) => {
                self.finish(chain, status);
                false
            }
        }
    }

    /// Writes the status and the used entry of a chain. The guest sees them after the next `publish`.
    fn finish(&mut self, chain: &Chain, status: Status) {
        let Some(ring) = &self.ring else { return };
        let written = match status {
            // The guest's buffers may hold more bytes than the field can express.
            Status::Ok => u32::try_from(chain.writable.total()).unwrap_or(u32::MAX),
            Status::IoError | Status::Unsupported => 0,
        };
        // The status was checked to be in memory that the chain keeps mapped.
        let answered = chain.write_status(status.byte()).map_err(|_| RingUnreachable);
        let result = answered.and_then(|()| ring.write_used(self.next_used, chain.head, written));
        self.in_flight -= 1;
        match result {
            Ok(()) => {
                self.next_used = self.next_used.wrapping_add(1);
                self.batch.push(chain.head);
            }
            Err(error) => self.fail(error.into()),
        }
    }

    /// Publishes the completed chains to the guest. Interrupts it once for the whole batch, if it wants interrupts.
    pub fn publish(&mut self) {
        let Some(ring) = &self.ring else { return };
        if self.batch.is_empty() {
            return;
        }
        if let Some(record) = &self.record {
            record.begin_publish(&self.batch);
        }
        narrow::passes("publish-begun");
        if let Err(error) = ring.publish_used(self.next_used) {
            self.batch.clear();
            self.fail(error.into());
            return;
        }
        narrow::passes("publish-seen");
        if let Some(record) = &self.record {
            record.end_publish(&self.batch, self.next_used);
        }
        for head in self.batch.drain(..) {
            self.flights.end(head);
        }
        if ring.interrupt_wanted() {
            self.interrupt();
        }
    }

    /// Sets the eventfd to call, and calls it: requests may have been completed while there was none, by this process or
    /// by a back end that died.
    pub fn set_call(&mut self, call: Option<Arc<OwnedFd>>) {
        self.call = call;
        self.interrupt();
    }

    fn interrupt(&self) {
        if let Some(call) = &self.call {
            wake::raise(call);
        }
    }

    fn fail(&mut self, error: QueueError) {
        tracing::warn!(queue = self.index, %error, "the guest broke its queue; it is stopped until the guest resets it");
        self.broken = true;
        if let Some(error) = &self.error {
            wake::raise(error);
        }
    }
}
