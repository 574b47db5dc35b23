//! The eviction port, if the VM has one: its requests, and the reports of its agent.

use super::disk::Port;
use super::host::Host;
use super::intake::Intake;
use remoca_core::engine::{DiskEngine, EVICTED_BATCH};
use remoca_core::units::PAGE_SIZE;
use remoca_frontend::device::{Frontend, GuestRequest};
use remoca_frontend::request::{CopyError, Outcome};
use remoca_io::words::IndexMemory;
use remoca_protocol::port::{self, AgentStats};
use std::ops::Range;
use std::time::Instant;

/// The port of a VM.
pub(super) struct EvictionPort {
    port: Option<Port>,
    agent: Option<AgentStats>,
    /// When the agent last reported; `None` if it has not since the guest attached the port.
    heard_at: Option<Instant>,
    /// Copies of the pages that were last read from guest memory.
    pages: Box<[[u8; PAGE_SIZE]; EVICTED_BATCH]>,
}

impl EvictionPort {
    /// Returns an eviction port whose agent has not reported anything yet.
    pub(super) fn new(port: Option<Port>) -> Self {
        Self { port, agent: None, heard_at: None, pages: Box::new([[0; PAGE_SIZE]; EVICTED_BATCH]) }
    }

    /// Returns the port, or `None` if the VM has none.
    pub(super) fn get(&self) -> Option<&Port> {
        self.port.as_ref()
    }

    /// Returns the frontend of the port, or `None` if the VM has no port.
    pub(super) fn frontend(&self) -> Option<&Frontend> {
        self.port.as_ref().map(|port| &port.frontend)
    }

    /// Returns a mutable reference to the frontend of the port, or `None` if the VM has no port.
    pub(super) fn frontend_mut(&mut self) -> Option<&mut Frontend> {
        self.port.as_mut().map(|port| &mut port.frontend)
    }

    /// Returns the statistics that the agent last reported, or `None` if it has not reported any.
    pub(super) fn agent(&self) -> Option<AgentStats> {
        self.agent
    }

    /// Returns when the agent last reported, or `None` if it has not since the guest attached the port.
    pub(super) fn heard_at(&self) -> Option<Instant> {
        self.heard_at
    }

    /// Handles the events of the port's descriptor. Returns whether there may be requests.
    pub(super) fn handle_events(&mut self) -> bool {
        let Some(port) = &mut self.port else { return false };
        let handled = port.frontend.handle_events();
        if !port.frontend.is_connected() {
            self.heard_at = None;
        }
        handled.inspect_err(|error| tracing::warn!("eviction port: {error}")).is_ok()
    }

    /// Returns whether requests are accepted. While another process has the disks, answers those commands of the front
    /// end that can be answered without them.
    pub(super) fn admits(&mut self, intake: Intake) -> bool {
        match intake {
            Intake::Away { .. } => {
                // What was evicted needs no flush.
                if let Some(port) = &mut self.port {
                    port.frontend.stand_aside(false);
                }
                false
            }
            Intake::Nothing => false,
            Intake::Begun | Intake::All => true,
        }
    }

    /// Returns the next request, or `None` if there is none that `intake` accepts.
    pub(super) fn pop(&mut self, intake: Intake) -> Option<GuestRequest> {
        intake.pop(&mut self.port.as_mut()?.frontend)
    }

    /// Completes a request of the guest with `outcome`.
    pub(super) fn complete(&mut self, request: GuestRequest, outcome: Outcome) {
        if let Some(port) = &mut self.port {
            port.frontend.complete(request, outcome);
        }
    }

    /// Answers a read: block 0 is the identification page, and everything else is zero.
    pub(super) fn read(
        &self,
        engine: &DiskEngine<IndexMemory>,
        request: &mut GuestRequest,
        start: u64,
    ) -> Result<(), CopyError> {
        request.fill_zero(0, request.data_length())?;
        if start == 0 {
            let cookie = self.port.as_ref().map_or(0, |port| port.cookie);
            let page = port::identification(&engine.stats(), cookie, engine.advice(), engine.class_advice());
            let length = request.data_length().min(PAGE_SIZE);
            request.copy_to_guest(0, &page[..length])?;
        }
        Ok(())
    }

    /// Copies the pages of a write from `offset` on out of guest memory before they are examined, because the guest may change
    /// them at any time: at most [`EVICTED_BATCH`]. Returns how many were copied, and which of them is the first that was
    /// evicted: statistics of the agent come before the others.
    pub(super) fn take_pages(
        &mut self,
        request: &GuestRequest,
        start: u64,
        offset: usize,
        host: &Host,
    ) -> Result<Range<usize>, CopyError> {
        let count = (request.data_length() - offset).div_ceil(PAGE_SIZE).min(EVICTED_BATCH);
        request.copy_from_guest(offset, &mut self.pages.as_flattened_mut()[..count * PAGE_SIZE])?;
        let is_report = start == 0 && offset == 0;
        if let Some(agent) = port::agent_stats(&self.pages[0]).filter(|_| is_report) {
            self.agent = Some(agent);
            self.heard_at = Some(host.instant());
        }
        Ok(usize::from(is_report)..count)
    }

    /// Returns the pages that [`Self::take_pages`] copied last.
    pub(super) fn pages(&self) -> &[[u8; PAGE_SIZE]; EVICTED_BATCH] {
        &self.pages
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::{Clock, SystemClock};
    use remoca_frontend::nbd::{ExportGeometry, NbdExport};

    #[test]
    fn an_agent_whose_guest_has_gone_was_not_heard_since() {
        let frontend = Frontend::Nbd(NbdExport::new(ExportGeometry::of_disk(1 << 20)).unwrap());
        let mut port = EvictionPort::new(Some(Port { socket: String::new(), frontend, cookie: 1 }));
        port.heard_at = Some(SystemClock.now());
        port.handle_events();
        assert_eq!(port.heard_at(), None, "nobody is connected");
    }
}
