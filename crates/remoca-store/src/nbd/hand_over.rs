//! The state of an NBD export that outlives its use: failed flushes, requests in flight, and the connection for another
//! program.

use super::{NbdStore, wait_until_ready};
use crate::flush_latch::FlushLatch;
use crate::nbd_export;
use crate::nbd_link::{Address, Direction, Link};
use crate::nbd_protocol::Export;
use crate::nbd_task::{NbdTask, WireState};
use crate::nbd_uri::{NbdAddress, NbdUri};
use crate::{DataPath, HandOver, LAST_FLUSH_TIME_MAX, NbdOptions, OnLostConnection, OpenError, StoreError, StoreOp};
use remoca_protocol::handover::{PassedExport, StoreKind};
use std::collections::VecDeque;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// How long a store that is dropped waits for outstanding replies.
const DRAIN_TIME_MAX: Duration = Duration::from_secs(2);
/// Token of the last flush. Those of drivers have 32 bits.
const LAST_FLUSH: u64 = u64::MAX;

impl NbdStore {
    /// Takes over a connection that a previous program of this process made. The server never saw its client
    /// disconnect.
    ///
    /// # Errors
    /// If the export that the server offered then does not fit, the descriptor is not a socket, or no address of the
    /// server is known.
    pub fn adopt(socket: OwnedFd, uri: &NbdUri, options: NbdOptions, passed: &PassedExport) -> Result<Self, OpenError> {
        let server = uri.server.to_string();
        let unreachable = |error: &dyn std::fmt::Display| nbd_export::explain_unreachable(&server, error);
        let addresses = match &uri.server {
            NbdAddress::Unix(_) => Address::resolve(&uri.server).map_err(|error| unreachable(&error))?,
            NbdAddress::Tcp { .. } => passed.addresses.iter().copied().map(Address::Tcp).collect(),
        };
        if addresses.is_empty() {
            return Err(unreachable(&"no address was passed"));
        }
        let mut link = Link::new(addresses, &uri.export).map_err(|error| unreachable(&error))?;
        link.adopt(socket, Instant::now()).map_err(|error| unreachable(&error))?;
        let mut store = Self::start(server, link, Export::from(passed), options)?;
        store.latch = FlushLatch::with(passed.flush_failed);
        store.writes = passed.unflushed;
        Ok(store)
    }

    /// Returns whether acknowledged writes count as lost with the connection, which is to end.
    fn owes_flush(&self) -> bool {
        let fails_at_loss = self.options.on_lost_connection == OnLostConnection::FailFlush;
        // A loss of the connection has latched its error.
        let is_known = self.outage.is_some() || self.latch.errno().is_some();
        fails_at_loss && !is_known && self.unflushed() > 0
    }

    /// Waits for the `flush` of the first `acknowledged` writes, and sends nothing else. Latches an error if it fails: whoever connects
    /// next cannot know whether the server has kept them.
    fn end_flush(&mut self, acknowledged: u64, flush: &VecDeque<usize>, deadline: Instant) {
        while self.writes_flushed < acknowledged && self.latch.errno().is_none() && Instant::now() < deadline {
            wait_until_ready(&self.link, deadline);
            self.transfer(Direction::Both, Instant::now());
            self.queue.retain(|key| flush.contains(key));
            self.pump(Instant::now());
        }
        if self.writes_flushed < acknowledged {
            self.latch.fail(StoreError::IO);
        }
    }
}

impl HandOver for NbdStore {
    fn failed_flush(&self) -> Option<i32> {
        self.latch.errno()
    }

    fn set_failed_flush(&mut self, errno: Option<i32>) {
        self.latch = FlushLatch::with(errno);
    }

    /// Returns whether no operation is in flight. The store's calls never stay in the kernel.
    fn is_still(&self) -> bool {
        self.in_flight == 0
    }

    fn begin_drain(&mut self) {
        if self.drain_deadline.is_some() || self.last_flush.is_some() {
            return;
        }
        self.queue.clear();
        if self.owes_flush() {
            self.submit(LAST_FLUSH, StoreOp::Flush, None);
            self.last_flush = Some((self.writes, self.queue.clone()));
            self.pump(Instant::now());
        }
    }

    /// Waits for the last flush, and for the replies to the requests that were sent, for at most two seconds more, if the connection is up.
    /// Returns false if a modification that was sent, also over a connection that was lost, may still take effect.
    fn drain(&mut self, flush_by: Instant) -> bool {
        self.begin_drain();
        let deadline = *self.drain_deadline.get_or_insert_with(|| Instant::now() + DRAIN_TIME_MAX);
        if let Some((acknowledged, flush)) = self.last_flush.take() {
            self.end_flush(acknowledged, &flush, flush_by.max(deadline));
        }
        self.queue.clear();
        while self.on_wire > 0 && self.outage.is_none() && Instant::now() < deadline {
            wait_until_ready(&self.link, deadline);
            self.transfer(Direction::Both, Instant::now());
            self.queue.clear();
        }
        let is_sent = |task: &NbdTask| {
            matches!(task.wire, WireState::Sending { .. } | WireState::AwaitsReply { .. }) || self.outage.is_some()
        };
        !self.tasks.iter().any(|(_, task)| task.operation.is_modification() && is_sent(task))
    }

    fn hand_over(&self) -> Result<(BorrowedFd<'_>, StoreKind), String> {
        let away = || format!("there is no connection to the NBD server {}: try again when it is back", self.server);
        let connection = self.link.idle_connection().filter(|_| self.tasks.is_empty()).ok_or_else(away)?;
        let export = PassedExport {
            addresses: self.link.addresses(),
            flush_failed: self.latch.errno(),
            unflushed: self.unflushed(),
            ..PassedExport::from(&self.export)
        };
        Ok((connection, StoreKind::Nbd(export)))
    }
}

impl Drop for NbdStore {
    /// Waits for outstanding replies, and sends a disconnect request if none is left: nbdkit 1.32 aborts when a client
    /// disconnects with requests outstanding.
    fn drop(&mut self) {
        self.drain(Instant::now() + LAST_FLUSH_TIME_MAX);
        if let Some(connection) = self.link.connection().filter(|_| self.on_wire == 0) {
            connection.disconnect();
        }
    }
}
