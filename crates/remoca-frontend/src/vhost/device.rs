//! One virtio-blk device, from the side of the I/O thread that owns its queues.

mod commands;

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use virtio_bindings::virtio_blk::{VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_FLUSH};
use virtio_bindings::virtio_ring::VIRTIO_RING_F_INDIRECT_DESC;

use super::audience::Audience;
use super::chain::{Attachment, Session};
use super::command::{Capacity, Envelope, IoThread, Until, Waiting, WriteCache};
use super::config::{ConfigError, DeviceConfig, feature};
use super::control::ControlThread;
use super::footprint::Footprint;
use super::keeper::Keeper;
use super::kicks::Kicks;
use super::log::LogSwitch;
use super::memory::{GuestMemory, MappedMemory};
use super::queue::{Context, Queue};
use super::request::{BlkRequest, RequestId, Status};
use super::throttle::Throttle;
use remoca_io::handover::Pass;
use remoca_io::socket::{ListeningCopy, SocketSource};
use remoca_io::wake;
use remoca_protocol::guests::FrontEnd;

/// Why a device cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("cannot make the device's descriptors or its control thread")]
    System(#[from] io::Error),
}

/// A virtio-blk device on a vhost-user socket. See the documentation of the module for how to drive it.
pub struct VhostDevice {
    config: Arc<DeviceConfig>,
    queues: Vec<Queue>,
    kicks: Kicks,
    /// Number of queues up to the last one that this front end started. The queues after it are unused; most guests use
    /// only one queue.
    started: usize,
    /// The queue that `pop` looks at first.
    turn: usize,
    next_id: u64,
    throttle: Throttle,
    session: Arc<Session>,
    log: Arc<LogSwitch>,
    features: u64,
    /// The size in `config`, for the control thread.
    capacity: Arc<Capacity>,
    /// What the front end knows of the size.
    audience: Audience,
    write_cache: Arc<WriteCache>,
    /// Whether a former process may have completed writes that are not durable yet, although the write cache is off. They
    /// become so when the guest itself switches it off.
    owes_flush: bool,
    /// Whether nothing is handed out before a flush of the device's own is done, for which no front end waits.
    flushes_first: bool,
    memory: Arc<GuestMemory>,
    /// Of the guest's memory.
    footprint: Footprint,
    connected: bool,
    commands: Option<Receiver<Envelope>>,
    waiting: Option<Waiting>,
    /// Handles the messages of the front ends.
    control: Option<ControlThread>,
    /// For a program that takes the device over. The control thread has the original.
    listener: Option<ListeningCopy>,
}

impl VhostDevice {
    /// Makes the device and starts its control thread, which serves front ends from now on.
    pub fn new(config: DeviceConfig, source: SocketSource) -> Result<Self, DeviceError> {
        Self::with(config, source, None, None)
    }

    /// Makes the device as [`Self::new`] does. If there is a front end `kept`, which was connected to a former program
    /// of this process, it is served first, and notices nothing. So is one that `keeper` found, which keeps the
    /// connections of all front ends from then on.
    pub fn with(
        config: DeviceConfig,
        source: SocketSource,
        kept: Option<FrontEnd<OwnedFd>>,
        keeper: Option<Keeper>,
    ) -> Result<Self, DeviceError> {
        let listener = source.copy()?;
        let (mut device, io) = Self::without_front_end(config, listener)?;
        if keeper.as_ref().is_some_and(Keeper::write_cache_is_off) {
            device.assume_no_write_cache();
            // The process before may have been killed before it made the flush for which the guest already has its answer.
            device.flush_first();
        }
        device.control = Some(ControlThread::spawn(device.config.clone(), source, io, kept, keeper)?);
        Ok(device)
    }

    /// Makes the device, and the channel over which the front end's side sends it commands.
    pub(crate) fn without_front_end(
        config: DeviceConfig,
        listener: Option<ListeningCopy>,
    ) -> Result<(Self, IoThread), DeviceError> {
        config.check()?;
        let config = Arc::new(config);
        let kicks = Kicks::new(config.queue_count_max)?;
        let wake = kicks.control().clone();
        let (sender, receiver) = channel();
        let log = Arc::<LogSwitch>::default();
        let write_cache = Arc::<WriteCache>::default();
        let capacity = Arc::new(Capacity::new(config.capacity_bytes));
        let io = IoThread {
            commands: sender,
            wake,
            log: log.clone(),
            write_cache: write_cache.clone(),
            capacity: capacity.clone(),
        };
        let device = VhostDevice {
            queues: (0..config.queue_count_max).map(|index| Queue::new(index, log.clone())).collect(),
            log,
            kicks,
            config,
            started: 0,
            turn: 0,
            next_id: 0,
            throttle: Throttle::default(),
            session: Session::new(),
            features: 0,
            audience: Audience::new(capacity.bytes()),
            capacity,
            write_cache,
            owes_flush: false,
            flushes_first: false,
            memory: Arc::default(),
            footprint: Footprint::default(),
            connected: false,
            commands: Some(receiver),
            waiting: None,
            control: None,
            listener,
        };
        Ok((device, io))
    }

    /// Returns a descriptor that is readable when `handle_events` has something to do. It is an epoll descriptor, and
    /// stays the same for the device's whole life.
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        self.kicks.event_fd()
    }

    /// Makes the event descriptor readable, so that the driver looks at all queues.
    pub(crate) fn wake(&self) {
        wake::raise(self.kicks.control());
    }

    /// Handles kicks and the control thread's commands. Call `pop` afterwards until it returns `None`, then `notify`, then
    /// `listen`, and do not wait if it finds requests.
    pub fn handle_events(&mut self) -> io::Result<()> {
        if self.kicks.take()? {
            while let Some(envelope) = self.commands.as_ref().and_then(|commands| commands.try_recv().ok()) {
                self.apply(envelope);
            }
        }
        Ok(())
    }

    /// Returns whether [`Self::pop`] would find requests for which the guest need not kick.
    pub fn has_requests(&self) -> bool {
        let mut watched = self.queues[..self.started].iter().filter(|queue| queue.is_watched());
        self.takes_requests() && watched.any(Queue::has_available)
    }

    /// Tells the guest to kick again, before the driver waits: it need not since `pop` found a request of the queue. Returns
    /// whether there are requests for which it did not, or `None` if it has to kick anyway.
    pub fn listen(&mut self) -> Option<bool> {
        let takes_requests = self.takes_requests();
        let watched = self.queues[..self.started].iter_mut().filter(|queue| queue.is_watched());
        let listen = |queue: &mut Queue| {
            queue.listen();
            takes_requests && queue.has_available()
        };
        watched.map(listen).reduce(|one, other| one | other)
    }

    /// Returns whether [`Self::pop`] takes new requests now. If not, the device's descriptor says when it does.
    fn takes_requests(&self) -> bool {
        !self.has_cache_flush() && !self.throttle.is_full() && !self.throttle.lacks_segments()
    }

    /// Returns the next request from the queues in turn, or `None` if there is none or the limits are reached. Invalid
    /// requests are answered here.
    pub fn pop(&mut self) -> Option<BlkRequest> {
        if self.has_cache_flush() {
            return self.pop_cache_flush();
        }
        // Requests that go out again hold their segments already, and free them only when they are complete.
        let is_full = self.throttle.lacks_segments();
        if self.throttle.is_full() || is_full && !self.queues[..self.started].iter().any(Queue::has_repeats) {
            self.throttle.refuse();
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

    /// Returns whether a flush of the device's own is to be handed out, or must be done before anything else.
    fn has_cache_flush(&self) -> bool {
        let waits = matches!(&self.waiting, Some(Waiting { until: Until::CacheFlushed { handed_out: false }, .. }));
        waits || self.flushes_first
    }

    /// Returns that flush, or `None` while requests are with the driver.
    fn pop_cache_flush(&mut self) -> Option<BlkRequest> {
        if !self.throttle.is_idle() {
            return None;
        }
        if let Some(Until::CacheFlushed { handed_out }) = self.waiting_until() {
            *handed_out = true;
        }
        Some(BlkRequest::cache_flush(self.hand_out(1)))
    }

    /// Returns whether [`Self::pop_begun`] has requests: another piece of one that has been handed out in part, or one that a
    /// queue repeats before it stops.
    pub fn has_begun(&self) -> bool {
        self.queues.iter().any(|queue| queue.has_begun() || queue.repeats_to_stop())
    }

    /// Returns another piece of a request that has been handed out in part, a request that a queue repeats before it stops, for
    /// which the front end waits, or a flush of the device's own. Never returns a new request of the guest. Returns `None` if
    /// there is none of these.
    pub fn pop_begun(&mut self) -> Option<BlkRequest> {
        loop {
            let begun = self.queues.iter().position(Queue::has_begun);
            let Some(index) = begun.or_else(|| self.queues.iter().position(Queue::repeats_to_stop)) else {
                return self.has_cache_flush().then(|| self.pop_cache_flush()).flatten();
            };
            if self.throttle.is_full() || begun.is_none() && self.throttle.lacks_segments() {
                self.throttle.refuse();
                return None;
            }
            // What needs no driver is answered, and a queue that is broken repeats nothing.
            if let Some(request) = self.pop_of(index) {
                return Some(request);
            }
        }
    }

    fn pop_of(&mut self, index: usize) -> Option<BlkRequest> {
        let indirect = self.features & feature(VIRTIO_RING_F_INDIRECT_DESC) != 0;
        let segments = self.throttle.segments();
        let context = Context { config: &self.config, session: &self.session, indirect, segments };
        let taken = self.queues[index].take(&context)?;
        Some(BlkRequest {
            id: self.hand_out(taken.operation.parts()),
            queue: u16::try_from(index).expect("at most 64 queues"),
            operation: taken.operation,
            chain: Some(taken.chain),
            data_start: taken.data_start,
            data_length: taken.data_length,
        })
    }

    fn hand_out(&mut self, parts: usize) -> RequestId {
        self.throttle.hold(parts);
        self.next_id += 1;
        RequestId(self.next_id)
    }

    /// Marks each write and write-zeroes for repetition of which the disk may have lost finished pieces. It goes out
    /// again when all of its pieces are back and none has failed.
    pub fn repeat_parts(&mut self) {
        self.queues.iter_mut().for_each(Queue::repeat_parts);
    }

    /// Completes a request with `status`. The guest sees the completion after the next `notify`.
    pub fn complete(&mut self, request: BlkRequest, status: Status) {
        self.throttle.release(request.operation.parts());
        let goes_on = match &request.chain {
            Some(chain) if chain.session.is_live() => self.queues[usize::from(request.queue)].complete(chain, status),
            Some(_) => false,
            None => {
                self.end_cache_flush(status);
                // What waited for it goes out.
                std::mem::take(&mut self.flushes_first)
            }
        };
        drop(request);
        let flushes = self.throttle.is_idle() && self.has_cache_flush();
        if self.throttle.has_room_again() || goes_on || flushes {
            // The driver need not call `pop` again on its own.
            wake::raise(self.kicks.control());
        }
    }

    /// Publishes the requests completed since the last call, with at most one interrupt per queue. Call it once for
    /// each turn of the driver's loop: a front end that stops a queue is also answered here.
    pub fn notify(&mut self) {
        self.queues[..self.started].iter_mut().for_each(Queue::publish);
        self.settle();
    }

    /// Returns whether a write may be completed before it is durable, because the guest sends flushes. When the guest
    /// switches its write cache off, `pop` returns a flush of the device's own for the writes before.
    pub fn write_cache_enabled(&self) -> bool {
        let negotiated = |bit| self.features & feature(bit) != 0;
        match negotiated(VIRTIO_BLK_F_CONFIG_WCE) {
            true => self.write_cache.is_on(),
            false => negotiated(VIRTIO_BLK_F_FLUSH),
        }
    }

    /// Returns whether the guest has its write cache on, to be passed to a process that takes over the disk.
    pub fn write_cache(&self) -> bool {
        self.write_cache.is_on()
    }

    /// Takes over the state of the write cache from the process that had the disk. Everything that process completed is
    /// durable. If the guest has switched the cache off here since, it stays off.
    pub fn inherit_write_cache(&mut self, is_on: bool) {
        let is_on = is_on && self.write_cache.is_on();
        self.write_cache.set(is_on);
        self.queues.iter().for_each(|queue| queue.note_write_cache(is_on));
        self.owes_flush = false;
    }

    /// Assumes that the guest has no write cache, and that not everything that was completed before is durable: the process
    /// that had the disk has said nothing, or says that the cache is off and may only have assumed so itself.
    pub fn assume_no_write_cache(&mut self) {
        self.inherit_write_cache(false);
        self.owes_flush = true;
    }

    /// Hands out a flush of the device's own before anything else, and nothing until that is done: the guest has switched its
    /// write cache off and has its answer, perhaps without a flush, because there was no disk or a former process owed it.
    pub fn flush_first(&mut self) {
        self.flushes_first = true;
    }

    /// Resets the write cache to on, because the disk goes to another process, and everything is durable. The guest goes there
    /// too, or it sets its write cache again.
    pub fn forget_write_cache(&mut self) {
        self.write_cache.set(true);
        (self.owes_flush, self.flushes_first) = (false, false);
    }

    /// Returns the attachment of the front end that is connected, or `None` if none is, or if its guest has not run here:
    /// before that, the guest may run elsewhere.
    pub fn attachment(&self) -> Option<Attachment> {
        (self.connected && self.started > 0).then(|| Attachment::of(&self.session))
    }

    /// Returns the number of requests that this device has taken from `queue` and not completed.
    pub fn in_flight(&self, queue: u16) -> u16 {
        self.queues.get(usize::from(queue)).map_or(0, Queue::in_flight)
    }

    /// Returns whether the next requests repeat requests that an earlier process had in flight, or nothing tells whether it had any:
    /// the guest begins anew, or its front end keeps no record.
    pub fn repeats(&self) -> bool {
        self.queues.iter().any(Queue::repeats)
    }

    /// Returns the size in bytes of the guest memory that the front end shares.
    pub fn guest_memory_bytes(&self) -> u64 {
        self.footprint.bytes()
    }

    /// Returns the memory of this host that the guest memory takes now, or `None` if it is not known.
    pub fn guest_resident_bytes(&self) -> Option<u64> {
        self.footprint.resident_bytes()
    }

    /// Returns the guest's memory as this process has mapped it, or `None` if there is none, or not all of it is files in memory.
    pub fn mapped_memory(&self) -> Option<MappedMemory> {
        self.footprint.is_in_memory().then(|| MappedMemory::new(Arc::clone(&self.memory)))
    }

    /// Returns whether any queue is running. A queue runs from its start until it is stopped and drained.
    pub fn is_running(&self) -> bool {
        self.queues.iter().any(Queue::is_running)
    }

    pub fn is_connected(&self) -> bool {
        self.connected
    }

    /// Returns whether the front end would be offered more if it connected again.
    pub fn has_news(&self) -> bool {
        self.control.as_ref().is_some_and(ControlThread::has_news)
    }

    /// Returns whether the connection of the front end would outlive a kill of this process.
    pub fn is_kept(&self) -> bool {
        self.control.as_ref().is_some_and(ControlThread::is_kept)
    }

    /// Stops answering the front end, between two of its messages. Returns false if it is within one: the device's
    /// event descriptor becomes readable when that is over.
    pub fn pause(&self) -> bool {
        self.control.as_ref().is_none_or(|control| control.pause().begin())
    }

    /// Answers the front end again.
    pub fn end_pause(&self) {
        if let Some(control) = &self.control {
            control.end_pause();
        }
    }

    /// Returns the connection of the front end with all that was agreed on it, for a program that continues it.
    /// Descriptors are what `pass` returns for them. Returns `None` if no front end is connected, or if it is within a
    /// message. No request may be with the driver.
    ///
    /// # Errors
    /// The first error of `pass`.
    pub fn pass<G>(&self, pass: &mut Pass<'_, G>) -> io::Result<Option<FrontEnd<G>>> {
        let control = self.control.as_ref().filter(|control| control.pause().has_begun() && !self.has_begun());
        let Some(control) = control else { return Ok(None) };
        let Some(mut front_end) = control.pass(pass)? else { return Ok(None) };
        front_end.told_bytes = Some(self.audience.known_bytes());
        for (queue, passed) in self.queues.iter().zip(&mut front_end.queues) {
            assert!(queue.in_flight() == 0, "a connection was passed on with requests in flight");
            passed.base = queue.base().unwrap_or(passed.base);
        }
        Ok(Some(front_end))
    }

    /// Returns whether no front end can connect any longer, because the device had a single connection and it has
    /// ended.
    pub fn is_finished(&self) -> bool {
        self.control.as_ref().is_some_and(ControlThread::is_finished)
    }

    /// Returns the listening socket for front ends, to be passed to a program that takes over. Returns `None` if no
    /// other front end can connect.
    pub fn listener(&self) -> Option<&ListeningCopy> {
        self.listener.as_ref()
    }

    /// Changes the size of the disk. Requests beyond the new end fail from now on. The front end is told, and nobody waits
    /// for it.
    pub fn resize(&mut self, bytes: u64) {
        let capacity_bytes = bytes - bytes % u64::from(self.config.logical_block_bytes);
        if capacity_bytes != self.config.capacity_bytes {
            self.config = Arc::new(DeviceConfig { capacity_bytes, ..DeviceConfig::clone(&self.config) });
            self.capacity.set(capacity_bytes);
            self.audience.tell(capacity_bytes, self.is_running());
        }
    }

    /// Returns whether the front end has been told the size of the disk, or there is none.
    pub fn sees_size(&self) -> bool {
        !self.connected || self.audience.sees(self.config.capacity_bytes)
    }

    pub fn config(&self) -> &DeviceConfig {
        &self.config
    }
}

impl Drop for VhostDevice {
    fn drop(&mut self) {
        // The control thread may be waiting for the connection or for the answer to a command. Ending both makes it
        // end.
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
    use crate::vhost::command::Command;
    use std::sync::mpsc::sync_channel;

    /// Before another program takes over, nothing else is taken from the guest.
    #[test]
    fn the_flush_of_a_write_cache_that_is_switched_off_counts_as_begun() {
        let (mut device, io) =
            VhostDevice::without_front_end(DeviceConfig::disk("test", "serial", 1 << 20), None).unwrap();
        assert!(device.pop_begun().is_none());
        let (reply, answer) = sync_channel(1);
        io.commands.send(Envelope { command: Command::SetWriteback(false), reply }).unwrap();
        wake::raise(&io.wake);
        device.handle_events().unwrap();
        let flush = device.pop_begun().expect("the front end waits for it");
        assert!(device.pop_begun().is_none() && device.pop().is_none() && answer.try_recv().is_err());
        device.complete(flush, Status::Ok);
        assert_eq!(answer.try_recv().unwrap(), Ok(0));
    }

    #[test]
    fn a_write_cache_that_was_only_assumed_to_be_off_is_flushed_once_when_it_is_switched_off() {
        let (mut device, io) =
            VhostDevice::without_front_end(DeviceConfig::disk("test", "serial", 1 << 20), None).unwrap();
        let switch = |device: &mut VhostDevice, writeback| {
            let (reply, answer) = sync_channel(1);
            io.commands.send(Envelope { command: Command::SetWriteback(writeback), reply }).unwrap();
            wake::raise(&io.wake);
            device.handle_events().unwrap();
            answer
        };
        device.assume_no_write_cache();
        let answer = switch(&mut device, false);
        let flush = device.pop().expect("what was completed before becomes durable");
        assert!(answer.try_recv().is_err());
        device.complete(flush, Status::Ok);
        assert_eq!(answer.try_recv().unwrap(), Ok(0));
        assert_eq!(switch(&mut device, false).try_recv().unwrap(), Ok(0));
        // One that is known to be off has nothing to flush, and where it is on, the guest flushes.
        device.inherit_write_cache(false);
        assert_eq!(switch(&mut device, false).try_recv().unwrap(), Ok(0));
        device.assume_no_write_cache();
        assert_eq!(switch(&mut device, true).try_recv().unwrap(), Ok(0));
        assert!(device.pop().is_none());
    }

    /// That of a hypervisor to which a VM is about to migrate is connected long before its guest is there.
    #[test]
    fn a_front_end_that_has_started_no_queue_has_said_nothing_for_its_guest() {
        let (mut device, io) =
            VhostDevice::without_front_end(DeviceConfig::disk("test", "serial", 1 << 20), None).unwrap();
        for command in [Command::Attach, Command::Attached] {
            let (reply, answer) = sync_channel(1);
            io.commands.send(Envelope { command, reply }).unwrap();
            wake::raise(&io.wake);
            device.handle_events().unwrap();
            assert_eq!(answer.try_recv().unwrap(), Ok(0));
        }
        assert!(device.is_connected() && device.attachment().is_none());
    }

    #[test]
    fn a_flush_that_goes_first_holds_everything_up_and_answers_nobody() {
        let (mut device, io) =
            VhostDevice::without_front_end(DeviceConfig::disk("test", "serial", 1 << 20), None).unwrap();
        device.flush_first();
        let flush = device.pop().expect("nothing is with the driver");
        assert!(device.pop().is_none() && device.pop_begun().is_none());
        let (reply, answer) = sync_channel(1);
        io.commands.send(Envelope { command: Command::SetWriteback(false), reply }).unwrap();
        wake::raise(&io.wake);
        device.handle_events().unwrap();
        device.complete(flush, Status::Ok);
        assert!(answer.try_recv().is_err(), "that flush began before the guest said so");
        assert!(device.kicks.take().unwrap(), "the driver looks again");
        let flush = device.pop_begun().expect("the front end waits for it");
        device.complete(flush, Status::Ok);
        assert_eq!(answer.try_recv().unwrap(), Ok(0));
        assert!(device.pop().is_none());
        // A failure is not tried again.
        device.flush_first();
        let flush = device.pop_begun().expect("before another program takes over");
        device.complete(flush, Status::IoError);
        assert!(device.kicks.take().unwrap() && device.pop().is_none());
        // The front end that connects next finds it done.
        device.flush_first();
        let (reply, _answer) = sync_channel(1);
        io.commands.send(Envelope { command: Command::Detach, reply }).unwrap();
        wake::raise(&io.wake);
        device.handle_events().unwrap();
        let flush = device.pop().expect("it is made all the same");
        device.complete(flush, Status::Ok);
        // The disk goes, flushed.
        device.flush_first();
        device.forget_write_cache();
        assert!(device.pop().is_none());
    }

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
