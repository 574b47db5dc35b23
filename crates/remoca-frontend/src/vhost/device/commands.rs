//! Commands of the control thread to a device. They are executed between two requests, and answered at once or when the
//! driver has given back the requests that the command waits for.

use super::VhostDevice;
use crate::vhost::audience::Audience;
use crate::vhost::chain::Session;
use crate::vhost::command::{Command, Envelope, Reply, Until, Waiting};
use crate::vhost::footprint::Footprint;
use crate::vhost::inflight::{InflightQueue, InflightRegion};
use crate::vhost::layout::RingLayout;
use crate::vhost::memory::GuestMemory;
use crate::vhost::queue::{Queue, Start};
use crate::vhost::request::Status;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use vhost::vhost_user::VhostUserVirtioFeatures;

impl VhostDevice {
    /// Answers the waiting command of a device whose disk another process has. Such a command may wait for requests
    /// that only `pop` would hand out. A queue stops with its marks left in the record, for the process that will serve
    /// them. A flush waits if the disk `comes`, because the other process may not have made everything durable yet. If
    /// the disk does not come, the front end must not wait: the flush is made when it comes ([`Self::flush_first`]).
    pub fn stand_aside(&mut self, comes: bool) {
        match self.waiting_until() {
            Some(Until::CacheFlushed { handed_out: false }) if !comes => self.answer(Ok(0)),
            Some(Until::QueueDrained(queue)) => {
                let number = *queue;
                if self.queues[usize::from(number)].in_flight() == 0 {
                    self.finish_stop(number);
                }
            }
            _ => {}
        }
    }

    pub(super) fn apply(&mut self, envelope: Envelope) {
        let Envelope { command, reply } = envelope;
        let answer: Reply = match command {
            Command::StopQueue { queue } => {
                self.queues[usize::from(queue)].begin_stop();
                self.wait_until(Until::QueueDrained(queue), reply);
                return;
            }
            Command::Detach => {
                self.detach();
                self.wait_until(Until::NothingHeld, reply);
                return;
            }
            Command::Attach => {
                self.session = Session::new();
                self.audience = Audience::new(self.config.capacity_bytes);
                Ok(0)
            }
            Command::Attached => {
                self.connected = true;
                Ok(0)
            }
            Command::SetFeatures(features) => {
                self.features = features;
                self.log.set_wanted(features & VhostUserVirtioFeatures::LOG_ALL.bits() != 0);
                Ok(0)
            }
            Command::SetMemory { memory, footprint, layouts } => {
                self.set_memory(memory, footprint, layouts);
                Ok(0)
            }
            Command::StartQueue { queue, layout, base, kick, region } => {
                self.start(queue, layout, base, kick, region).map(|()| 0)
            }
            Command::EnableQueue { queue, enable } => {
                self.queues[usize::from(queue)].enabled = enable;
                Ok(0)
            }
            Command::SetKick { queue, kick } => self.kicks.set(queue, kick).map(|()| 0),
            Command::SetCall { queue, call } => {
                self.queues[usize::from(queue)].set_call(call);
                Ok(0)
            }
            Command::SetError { queue, error } => {
                self.queues[usize::from(queue)].error = error;
                Ok(0)
            }
            Command::SetLog(log) => {
                self.log.set_log(log);
                self.queues.iter().for_each(Queue::log_used_ring);
                Ok(0)
            }
            Command::LogRing { queue, used_log } => {
                self.queues[usize::from(queue)].set_used_log(used_log);
                Ok(0)
            }
            Command::SetChannel { channel, told_bytes } => {
                let has_started = self.is_running();
                self.audience.listens_at(channel, told_bytes, (self.config.capacity_bytes, has_started));
                Ok(0)
            }
            Command::SetWriteback(writeback) => {
                self.set_writeback(writeback, reply);
                return;
            }
        };
        // Fails only if the control thread is gone.
        let _ = reply.send(answer);
    }

    fn set_writeback(&mut self, writeback: bool, reply: SyncSender<Reply>) {
        let switched_off = (self.write_cache.is_on() || self.owes_flush) && !writeback;
        self.write_cache.set(writeback);
        self.owes_flush &= writeback;
        if switched_off {
            return self.wait_until(Until::CacheFlushed { handed_out: false }, reply);
        }
        // Fails only if the control thread is gone.
        let _ = reply.send(Ok(0));
    }

    fn set_memory(&mut self, memory: Arc<GuestMemory>, footprint: Footprint, layouts: Vec<Option<RingLayout>>) {
        for (queue, layout) in self.queues.iter_mut().zip(layouts) {
            if let Some(layout) = layout {
                queue.relocate(layout, memory.clone());
            }
        }
        (self.memory, self.footprint) = (memory, footprint);
    }

    fn start(
        &mut self,
        number: u16,
        layout: RingLayout,
        base: u16,
        kick: Arc<OwnedFd>,
        region: Option<Arc<InflightRegion>>,
    ) -> Result<(), String> {
        let record = region.and_then(|region| InflightQueue::new(region, number));
        let memory = self.memory.clone();
        let queue = &mut self.queues[usize::from(number)];
        queue.start(Start { layout, memory, base, record }).map_err(|error| error.to_string())?;
        queue.note_write_cache(self.write_cache.is_on());
        self.started = self.started.max(usize::from(number) + 1);
        if self.features & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() == 0 {
            queue.enabled = true;
        }
        self.kicks.set(number, kick)?;
        self.audience.tell_again(self.config.capacity_bytes);
        Ok(())
    }

    /// Forgets the front end. Requests that the driver still holds are dropped when it completes them.
    fn detach(&mut self) {
        self.session.end();
        self.log.reset();
        for queue in 0..self.config.queue_count_max {
            self.kicks.remove(queue);
            self.queues[usize::from(queue)].reset();
        }
        (self.started, self.turn) = (0, 0);
        self.features = 0;
        self.memory = Arc::default();
        self.footprint = Footprint::default();
        self.connected = false;
        self.audience = Audience::new(self.config.capacity_bytes);
    }

    fn wait_until(&mut self, until: Until, reply: SyncSender<Reply>) {
        self.waiting = Some(Waiting { until, reply });
        self.settle();
    }

    /// Answers the waiting command if its condition is met.
    pub(super) fn settle(&mut self) {
        let answer = match &self.waiting {
            Some(Waiting { until: Until::QueueDrained(queue), .. }) => {
                let number = *queue;
                if self.queues[usize::from(number)].is_drained() {
                    self.finish_stop(number);
                }
                return;
            }
            Some(Waiting { until: Until::NothingHeld, .. }) if self.throttle.is_idle() => 0,
            Some(_) | None => return,
        };
        self.answer(Ok(answer));
    }

    fn finish_stop(&mut self, number: u16) {
        let base = self.queues[usize::from(number)].finish_stop();
        self.kicks.remove(number);
        self.answer(Ok(base));
    }

    pub(super) fn waiting_until(&mut self) -> Option<&mut Until> {
        self.waiting.as_mut().map(|waiting| &mut waiting.until)
    }

    pub(super) fn end_cache_flush(&mut self, status: Status) {
        if status != Status::Ok {
            // The failure cannot be reported to the guest, which did not ask for a flush.
            tracing::error!(
                device = self.config.name,
                "the flush for a write cache that is off failed: what was written before may be lost"
            );
        }
        if matches!(self.waiting_until(), Some(Until::CacheFlushed { handed_out: true })) {
            self.answer(Ok(0));
        }
    }

    /// Answers the waiting command, if there is one.
    fn answer(&mut self, answer: Reply) {
        if let Some(waiting) = self.waiting.take() {
            // Fails only if the control thread is gone.
            let _ = waiting.reply.send(answer);
        }
    }
}
