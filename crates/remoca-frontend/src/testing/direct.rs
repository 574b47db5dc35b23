//! A front end on the thread of the device itself. It does what the control thread does with messages, without a
//! socket.
//!
//! Each command waits for the answer to the one before, as a front end's messages do. The driver of the device calls
//! [`DirectFrontEnd::pump`] between two turns to continue with them.

use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};

use vhost::vhost_user::VhostUserVirtioFeatures;
use vhost::vhost_user::message::VhostUserMemoryRegion;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

use super::guest::TestGuest;
use crate::vhost::command::{Command, Envelope, IoThread, Reply};
use crate::vhost::inflight::InflightRegion;
use crate::vhost::memory::MemoryTable;
use crate::vhost::{DeviceConfig, VhostDevice};
use remoca_io::wake;
use remoca_protocol::guests::RingAddresses;

/// The record of requests in flight, as a front end keeps it for the next process.
pub struct Record {
    file: File,
    bytes: u64,
    queues: u16,
    size: u16,
}

impl Record {
    /// Creates a fresh record for the queues of `guest`.
    pub fn new(guest: &TestGuest, writeback: bool) -> Self {
        let (queues, size) = (guest.options.queue_count, guest.options.queue_size);
        let (file, bytes) = InflightRegion::create(queues, size, writeback).unwrap();
        Self { file, bytes, queues, size }
    }

    fn open(&self) -> Arc<InflightRegion> {
        let file = self.file.try_clone().unwrap();
        Arc::new(InflightRegion::open(file, self.bytes, 0, self.queues, self.size).unwrap())
    }
}

/// An answer of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answered {
    /// The guest is connected, and its queues run.
    Connected,
    /// None of the guest's requests is in flight any longer.
    Gone,
    /// The guest's write cache is on or off.
    WriteCache(bool),
    /// The queue is drained.
    Stopped,
}

/// Plays the front ends of a device.
pub struct DirectFrontEnd {
    io: IoThread,
    features: u64,
    queued: VecDeque<(Command, Option<Answered>)>,
    waits: Option<(Receiver<Reply>, Option<Answered>)>,
    record: Option<Arc<InflightRegion>>,
}

impl DirectFrontEnd {
    /// Makes a device and its front end. The device can pass `listener` to another program.
    pub fn device(config: DeviceConfig, listener: Option<OwnedFd>) -> (VhostDevice, Self) {
        let features = config.features() | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
        let listener = listener.map(|listener| (listener, None));
        let (device, io) = VhostDevice::without_front_end(config, listener).unwrap();
        (device, Self { io, features, queued: VecDeque::new(), waits: None, record: None })
    }

    /// Connects as QEMU does, both the first time and after the back end was lost.
    pub fn connect(&mut self, guest: &TestGuest, record: Option<&Record>) {
        self.queue(Command::Attach, None);
        self.queue(Command::SetFeatures(self.features), None);
        let mut table = MemoryTable::empty(self.io.log.clone());
        for region in guest.memory.iter() {
            let (start, length) = (region.start_addr().0, region.len());
            let file = region.file_offset().unwrap();
            let message = VhostUserMemoryRegion::new(start, length, start, file.start());
            table = table.with_added(&message, file.file().try_clone().unwrap()).unwrap();
        }
        let layouts = vec![None; guest.queues.len()];
        self.queue(Command::SetMemory { memory: table.memory().clone(), footprint: table.footprint(), layouts }, None);
        self.record = record.map(Record::open);
        if let Some(writeback) = self.record.as_ref().and_then(|record| record.writeback()) {
            self.queue(Command::SetWriteback(writeback), None);
        }
        for (number, queue) in (0..).zip(&guest.queues) {
            let (descriptors, available, used) = (queue.descriptors, queue.available, queue.used);
            let addresses = RingAddresses { descriptors, available, used, used_log: None };
            let layout = table.ring_layout(&addresses, queue.size.into()).unwrap();
            let (call, kick) = (queue.call.try_clone().unwrap(), queue.kick.try_clone().unwrap());
            self.queue(Command::SetCall { queue: number, call: Some(to_owned(call)) }, None);
            let (base, region) = (queue.used_index(), self.record.clone());
            let start = Command::StartQueue { queue: number, layout, base, kick: to_owned(kick), region };
            self.queue(start, None);
            self.queue(Command::EnableQueue { queue: number, enable: true }, Some(Answered::Connected));
        }
    }

    /// Disconnects the front end.
    pub fn disconnect(&mut self) {
        self.record = None;
        self.queue(Command::Detach, Some(Answered::Gone));
    }

    /// Switches the guest's write cache.
    pub fn set_write_cache(&mut self, is_on: bool) {
        self.queue(Command::SetWriteback(is_on), Some(Answered::WriteCache(is_on)));
    }

    /// Stops a queue. The command is answered when the queue is drained.
    pub fn stop_queue(&mut self, queue: u16) {
        self.queue(Command::StopQueue { queue }, Some(Answered::Stopped));
    }

    fn queue(&mut self, command: Command, answered: Option<Answered>) {
        self.queued.push_back((command, answered));
    }

    /// Sends the next command if the one before is answered. Returns the answer that has been received, or `None` if
    /// there is none or it has no meaning to the caller.
    pub fn pump(&mut self) -> Option<Answered> {
        let mut news = None;
        if let Some((reply, answered)) = &self.waits {
            let Ok(reply) = reply.try_recv() else { return None };
            reply.unwrap();
            news = *answered;
            if let (Some(Answered::WriteCache(is_on)), Some(record)) = (news, &self.record) {
                record.set_writeback(is_on);
            }
            self.waits = None;
        }
        if let Some((command, answered)) = self.queued.pop_front() {
            let (reply, answer) = sync_channel(1);
            // Fails only if the device is gone.
            let _ = self.io.commands.send(Envelope { command, reply });
            wake::raise(&self.io.wake);
            self.waits = Some((answer, answered));
        }
        news
    }

    /// Returns whether every command was sent and answered.
    pub fn is_idle(&self) -> bool {
        self.queued.is_empty() && self.waits.is_none()
    }
}

fn to_owned(event: vmm_sys_util::eventfd::EventFd) -> Arc<OwnedFd> {
    use std::os::fd::{FromRawFd, IntoRawFd};
    // SAFETY: the descriptor was the eventfd's own, which has given it up.
    Arc::new(unsafe { OwnedFd::from_raw_fd(event.into_raw_fd()) })
}
