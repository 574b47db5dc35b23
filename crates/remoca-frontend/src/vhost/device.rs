//! One virtio-blk device, from the side of the I/O thread that owns its queues.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, channel};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::time::Timespec;
use vhost::vhost_user::VhostUserVirtioFeatures;
use virtio_bindings::virtio_blk::{VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_FLUSH};
use virtio_bindings::virtio_ring::VIRTIO_RING_F_INDIRECT_DESC;

use super::chain::{CHAIN_LENGTH_MAX, SegmentCount, Session};
use super::config::{ConfigError, DeviceConfig, QUEUE_COUNT_MAX, feature};
use super::control::{Command, ControlThread, Envelope, IoThread, Reply, WriteCache};
use super::inflight::{InflightQueue, InflightRegion};
use super::log::LogSwitch;
use super::memory::GuestMemory;
use super::queue::{Context, Queue, Start};
use super::request::{BlkRequest, RequestId, Status};
use super::ring::RingLayout;
use remoca_io::socket::{ListeningCopy, SocketSource};
use remoca_io::wake;

/// Event data of the control thread's eventfd; kicks have the number of their queue.
const CONTROL: u64 = u64::MAX;
const NO_WAIT: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// Why a device cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("cannot make the device's descriptors or its control thread")]
    System(#[from] io::Error),
}

/// Requests that the driver holds at most. One chain of a guest can be as long as the disk, and is handed out in pieces: all
/// of them at once would be as many as the guest likes.
const HELD_MAX: usize = 4096;
/// Segments of the chains of these requests at most, give or take a chain: 6 MiB. Nothing new is taken from the guest until
/// half of them are free.
const SEGMENTS_MAX: usize = 1 << 18;
// What queues keep of chains that are half handed out does not keep a device from going on.
const _: () = assert!(QUEUE_COUNT_MAX as usize * CHAIN_LENGTH_MAX as usize <= SEGMENTS_MAX / 2);

/// A virtio-blk device on a vhost-user socket. See the documentation of the module for how to drive it.
pub struct VhostDevice {
    config: Arc<DeviceConfig>,
    queues: Vec<Queue>,
    kicks: Vec<Option<OwnedFd>>,
    /// Queues up to the last one that this front end started: those after it have nothing, and most guests use one.
    started: usize,
    /// The queue that `pop` looks at first.
    turn: usize,
    next_id: u64,
    /// Requests that the driver holds, those of an earlier front end included.
    held: usize,
    segments: Arc<SegmentCount>,
    /// `pop` refused for want of room, and will be called again when half of it is free.
    throttled: bool,
    session: Arc<Session>,
    log: Arc<LogSwitch>,
    features: u64,
    write_cache: Arc<WriteCache>,
    memory: Arc<GuestMemory>,
    guest_memory_bytes: u64,
    connected: bool,
    epoll: OwnedFd,
    wake: Arc<OwnedFd>,
    commands: Option<Receiver<Envelope>>,
    waiting: Option<Waiting>,
    /// Speaks for its front ends.
    control: Option<ControlThread>,
    /// For a program that takes over; the control thread has the original.
    listener: Option<ListeningCopy>,
}

/// A command whose answer has to wait for the driver.
struct Waiting {
    until: Until,
    reply: SyncSender<Reply>,
}

enum Until {
    QueueDrained(u16),
    NothingHeld,
    /// The write cache is off once everything that was completed while it was on is durable: nothing is handed out until
    /// the driver holds nothing, then a flush.
    CacheFlushed {
        handed_out: bool,
    },
}

impl VhostDevice {
    /// Makes the device and starts its control thread, which serves front ends from now on.
    pub fn new(config: DeviceConfig, source: SocketSource) -> Result<Self, DeviceError> {
        let listener = source.copy()?;
        let (mut device, io) = Self::without_front_end(config, listener)?;
        device.control = Some(ControlThread::spawn(device.config.clone(), source, io)?);
        Ok(device)
    }

    /// Makes the device, and the way to command it for whoever speaks for its front ends.
    pub(crate) fn without_front_end(
        config: DeviceConfig,
        listener: Option<ListeningCopy>,
    ) -> Result<(Self, IoThread), DeviceError> {
        config.check()?;
        let config = Arc::new(config);
        let epoll = epoll::create(CreateFlags::CLOEXEC).map_err(io::Error::from)?;
        let wake = Arc::new(wake::new()?);
        epoll::add(&epoll, &wake, EventData::new_u64(CONTROL), EventFlags::IN).map_err(io::Error::from)?;
        let (sender, receiver) = channel();
        let log = Arc::<LogSwitch>::default();
        let write_cache = Arc::<WriteCache>::default();
        let io = IoThread { commands: sender, wake: wake.clone(), log: log.clone(), write_cache: write_cache.clone() };
        let device = VhostDevice {
            queues: (0..config.queue_count_max).map(|index| Queue::new(index, log.clone())).collect(),
            log,
            kicks: (0..config.queue_count_max).map(|_| None).collect(),
            config,
            started: 0,
            turn: 0,
            next_id: 0,
            held: 0,
            segments: Arc::default(),
            throttled: false,
            session: Session::new(),
            features: 0,
            write_cache,
            memory: Arc::default(),
            guest_memory_bytes: 0,
            connected: false,
            epoll,
            wake,
            commands: Some(receiver),
            waiting: None,
            control: None,
            listener,
        };
        Ok((device, io))
    }

    /// Returns a descriptor that is readable when `handle_events` has something to do: an epoll descriptor, the same
    /// for the device's whole life.
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Takes kicks and the control thread's commands. Call `pop` afterwards until it has nothing, then `notify`.
    pub fn handle_events(&mut self) -> io::Result<()> {
        let mut events = [epoll::Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }; 16];
        let (count, _) = epoll::wait(&self.epoll, events.as_mut_slice(), Some(&NO_WAIT)).map(|count| (count, ()))?;
        // Kicks are edge-triggered: to have woken us is all they are for.
        if events[..count].iter().any(|event| event.data.u64() == CONTROL) {
            wake::clear(&self.wake);
            while let Some(envelope) = self.commands.as_ref().and_then(|commands| commands.try_recv().ok()) {
                self.apply(envelope);
            }
        }
        Ok(())
    }

    /// Returns the next request, from all queues in turn. What the guest got wrong is answered here.
    pub fn pop(&mut self) -> Option<BlkRequest> {
        let held = self.held;
        if let Some(Until::CacheFlushed { handed_out: handed_out @ false }) = self.waiting_until() {
            if held > 0 {
                return None;
            }
            *handed_out = true;
            return Some(BlkRequest::cache_flush(self.hand_out()));
        }
        // What goes out again has its segments already, and gives them back only when it is done.
        let is_full = self.segments.get() >= SEGMENTS_MAX;
        if held >= HELD_MAX || is_full && !self.queues[..self.started].iter().any(Queue::has_repeats) {
            self.throttled = true;
            return None;
        }
        let first = self.turn;
        for index in (first..self.started).chain(0..first) {
            if is_full && !self.queues[index].has_repeats() {
                continue;
            }
            let Some(request) = self.pop_of(index) else { continue };
            self.turn = (index + 1) % self.started;
            return Some(request);
        }
        None
    }

    /// Returns whether [`Self::pop`] would hand out more of a request of which it has handed out a part.
    pub fn has_begun(&self) -> bool {
        self.queues.iter().any(Queue::has_begun)
    }

    /// Returns more of a request of which a part was handed out, and of no other.
    pub fn pop_begun(&mut self) -> Option<BlkRequest> {
        let index = self.queues.iter().position(Queue::has_begun)?;
        if self.held >= HELD_MAX {
            self.throttled = true;
            return None;
        }
        self.pop_of(index)
    }

    fn pop_of(&mut self, index: usize) -> Option<BlkRequest> {
        let indirect = self.features & feature(VIRTIO_RING_F_INDIRECT_DESC) != 0;
        let context = Context { config: &self.config, session: &self.session, indirect, segments: &self.segments };
        let taken = self.queues[index].take(&context)?;
        Some(BlkRequest {
            id: self.hand_out(),
            queue: u16::try_from(index).expect("at most 64 queues"),
            operation: taken.operation,
            chain: Some(taken.chain),
            data_start: taken.data_start,
            data_length: taken.data_length,
        })
    }

    fn hand_out(&mut self) -> RequestId {
        self.held += 1;
        self.next_id += 1;
        RequestId(self.next_id)
    }

    /// Notes that the disk may have lost what it has done of requests that are not completed: these are done again.
    pub fn repeat_parts(&mut self) {
        self.queues.iter_mut().for_each(Queue::repeat_parts);
    }

    /// Gives a request back. The guest sees it completed after the next `notify`.
    pub fn complete(&mut self, request: BlkRequest, status: Status) {
        self.held -= 1;
        let repeats = match &request.chain {
            Some(chain) if chain.session.is_live() => self.queues[usize::from(request.queue)].complete(chain, status),
            Some(_) => false,
            None => {
                self.end_cache_flush(status);
                false
            }
        };
        drop(request);
        let room = self.throttled && self.held <= HELD_MAX / 2 && self.segments.get() <= SEGMENTS_MAX / 2;
        self.throttled &= !room;
        if room || repeats || (self.held == 0 && matches!(self.waiting_until(), Some(Until::CacheFlushed { .. }))) {
            // The driver need not call `pop` again by itself.
            wake::raise(&self.wake);
        }
    }

    /// Shows the guest what was completed since the last call, with at most one interrupt for each queue. Call it once
    /// for each turn of the driver's loop: a front end that stops a queue is answered here too.
    pub fn notify(&mut self) {
        self.queues[..self.started].iter_mut().for_each(Queue::publish);
        self.settle();
    }

    /// Returns whether a write may be completed before it is durable: the guest sends flushes. When the guest switches
    /// that off, `pop` gives a flush of the device's own, for the writes before.
    pub fn write_cache_enabled(&self) -> bool {
        let negotiated = |bit| self.features & feature(bit) != 0;
        match negotiated(VIRTIO_BLK_F_CONFIG_WCE) {
            true => self.write_cache.is_on(),
            false => negotiated(VIRTIO_BLK_F_FLUSH),
        }
    }

    /// Returns whether the guest has its write cache on, for another process that gets the disk.
    pub fn write_cache(&self) -> bool {
        self.write_cache.is_on()
    }

    /// As it was at the process that had the disk. What that completed is durable. A guest that has switched it off here since
    /// has said so.
    pub fn inherit_write_cache(&mut self, is_on: bool) {
        let is_on = is_on && self.write_cache.is_on();
        self.write_cache.set(is_on);
        self.queues.iter().for_each(|queue| queue.note_write_cache(is_on));
    }

    /// Forgets the state of the write cache. The disk goes to another process, and so does the guest, or it says again
    /// what it wants.
    pub fn forget_write_cache(&mut self) {
        self.write_cache.set(true);
    }

    /// Answers the command that waits for what only `pop` could bring, for a device whose disk another process has. A queue stops
    /// with its marks in the record, for whoever serves them. A flush waits for a disk that `comes`: the other process may not
    /// have made everything durable yet. For one that does not come the front end must not wait.
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

    /// Returns the number of requests of `queue` that the guest waits for and this device has taken.
    pub fn in_flight(&self, queue: u16) -> u16 {
        self.queues.get(usize::from(queue)).map_or(0, Queue::in_flight)
    }

    /// Returns whether the next requests are repetitions of what an earlier process had in flight.
    pub fn repeats(&self) -> bool {
        self.queues.iter().any(Queue::repeats)
    }

    /// Returns the size of the guest's memory, as far as the front end shares it.
    pub fn guest_memory_bytes(&self) -> u64 {
        self.guest_memory_bytes
    }

    /// Returns whether any queue runs: it was started, and is not stopped and drained.
    pub fn is_running(&self) -> bool {
        self.queues.iter().any(Queue::is_running)
    }

    pub fn is_connected(&self) -> bool {
        self.connected
    }

    /// Returns whether no front end will come any more: the device had a single connection, and it has ended.
    pub fn is_finished(&self) -> bool {
        self.control.as_ref().is_some_and(ControlThread::is_finished)
    }

    /// Returns where front ends come from, for a program that takes over; `None` if no other will ever come.
    pub fn listener(&self) -> Option<&ListeningCopy> {
        self.listener.as_ref()
    }

    pub fn config(&self) -> &DeviceConfig {
        &self.config
    }

    fn apply(&mut self, envelope: Envelope) {
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
                self.connected = true;
                Ok(0)
            }
            Command::SetFeatures(features) => {
                self.features = features;
                self.log.set_wanted(features & VhostUserVirtioFeatures::LOG_ALL.bits() != 0);
                Ok(0)
            }
            Command::SetMemory { memory, bytes, layouts } => {
                for (queue, layout) in self.queues.iter_mut().zip(layouts) {
                    if let Some(layout) = layout {
                        queue.relocate(layout, memory.clone());
                    }
                }
                self.memory = memory;
                self.guest_memory_bytes = bytes;
                Ok(0)
            }
            Command::StartQueue { queue, layout, base, kick, region } => {
                self.start(queue, layout, base, kick, region).map(|()| 0)
            }
            Command::EnableQueue { queue, enable } => {
                self.queues[usize::from(queue)].enabled = enable;
                Ok(0)
            }
            Command::SetKick { queue, kick } => self.set_kick(queue, Some(kick)).map(|()| 0),
            Command::SetCall { queue, call } => {
                let queue = &mut self.queues[usize::from(queue)];
                queue.call = call;
                // What was completed while there was nobody to call, by us or by a back end that died.
                queue.interrupt();
                Ok(0)
            }
            Command::SetError { queue, error } => {
                self.queues[usize::from(queue)].error = error;
                Ok(0)
            }
            Command::SetLog(log) => {
                self.log.set_log(log);
                self.queues.iter().for_each(Queue::log_used_index);
                Ok(0)
            }
            Command::LogRing { queue, used_log } => {
                self.queues[usize::from(queue)].set_used_log(used_log);
                Ok(0)
            }
            Command::SetWriteback(writeback) => {
                let switched_off = self.write_cache.is_on() && !writeback;
                self.write_cache.set(writeback);
                if switched_off {
                    self.wait_until(Until::CacheFlushed { handed_out: false }, reply);
                    return;
                }
                Ok(0)
            }
        };
        // Nobody listens only if the control thread is gone.
        let _ = reply.send(answer);
    }

    fn start(
        &mut self,
        number: u16,
        layout: RingLayout,
        base: u16,
        kick: OwnedFd,
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
        self.set_kick(number, Some(kick))
    }

    fn set_kick(&mut self, queue: u16, kick: Option<OwnedFd>) -> Result<(), String> {
        let slot = &mut self.kicks[usize::from(queue)];
        if let Some(old) = slot.take() {
            // A descriptor that cannot be removed is gone already.
            let _ = epoll::delete(&self.epoll, &old);
        }
        if let Some(kick) = kick {
            let (data, flags) = (EventData::new_u64(u64::from(queue)), EventFlags::IN | EventFlags::ET);
            epoll::add(&self.epoll, &kick, data, flags)
                .map_err(|error| format!("the kick of queue {queue} cannot be waited for: {error}"))?;
            *slot = Some(kick);
        }
        Ok(())
    }

    /// Forgets the front end. Requests that the driver still holds are dropped when it gives them back.
    fn detach(&mut self) {
        self.session.end();
        self.log.reset();
        for queue in 0..self.config.queue_count_max {
            // Removing a kick cannot fail.
            let _ = self.set_kick(queue, None);
            self.queues[usize::from(queue)].reset();
        }
        (self.started, self.turn) = (0, 0);
        self.features = 0;
        self.memory = Arc::default();
        self.guest_memory_bytes = 0;
        self.connected = false;
    }

    fn wait_until(&mut self, until: Until, reply: SyncSender<Reply>) {
        self.waiting = Some(Waiting { until, reply });
        self.settle();
    }

    /// Answers the command that waits, if what it waits for has come.
    fn settle(&mut self) {
        let answer = match &self.waiting {
            Some(Waiting { until: Until::QueueDrained(queue), .. }) => {
                let number = *queue;
                if self.queues[usize::from(number)].is_drained() {
                    self.finish_stop(number);
                }
                return;
            }
            Some(Waiting { until: Until::NothingHeld, .. }) if self.held == 0 => 0,
            Some(_) | None => return,
        };
        self.answer(Ok(answer));
    }

    fn finish_stop(&mut self, number: u16) {
        let base = self.queues[usize::from(number)].finish_stop();
        // Removing a kick cannot fail.
        let _ = self.set_kick(number, None);
        self.answer(Ok(base));
    }

    fn waiting_until(&mut self) -> Option<&mut Until> {
        self.waiting.as_mut().map(|waiting| &mut waiting.until)
    }

    fn end_cache_flush(&mut self, status: Status) {
        if status != Status::Ok {
            // The guest cannot be told: it did not ask for a flush.
            tracing::error!(device = self.config.name, "the flush that goes with switching the write cache off failed");
        }
        self.answer(Ok(0));
    }

    /// Answers the command that waits.
    fn answer(&mut self, answer: Reply) {
        if let Some(waiting) = self.waiting.take() {
            // Nobody listens only if the control thread is gone.
            let _ = waiting.reply.send(answer);
        }
    }
}

impl Drop for VhostDevice {
    fn drop(&mut self) {
        // The control thread may wait for the connection or for our answer to a command: end both, then it ends.
        let Some(mut control) = self.control.take() else { return };
        control.begin_stop();
        self.waiting = None;
        self.commands = None;
        control.join();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::sync_channel;

    #[test]
    fn a_write_cache_is_not_off_while_another_process_may_still_make_its_writes_durable() {
        let (mut device, io) =
            VhostDevice::without_front_end(DeviceConfig::disk("test", "serial", 1 << 20), None).unwrap();
        let (reply, answer) = sync_channel(1);
        io.commands.send(Envelope { command: Command::SetWriteback(false), reply }).unwrap();
        wake::raise(&io.wake);
        device.handle_events().unwrap();
        device.stand_aside(true);
        assert!(answer.try_recv().is_err(), "the disk comes");
        device.stand_aside(false);
        assert_eq!(answer.try_recv().unwrap(), Ok(0));
    }
}
