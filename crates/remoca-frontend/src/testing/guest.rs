//! The front end and the guest's block driver.
//!
//! Every request has a slot of guest memory: header, status, descriptor table and data. With indirect descriptors there
//! are as many slots as descriptors. Without them, every slot has four descriptors of the ring.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::sockopt;
use rustix::time::Timespec;
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight};
use vhost::vhost_user::{Frontend, VhostUserFrontend, VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost::{VhostBackend, VhostUserDirtyLogRegion, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

use super::virtqueue::{Buffer, DESC_INDIRECT, Virtqueue};

const RINGS_START: u64 = 0x10_0000;
const RINGS_BYTES: u64 = 0x10_0000;
/// Start of the second region, above the hole that a PC has below 4 GiB.
const SLOTS_START: u64 = 1 << 32;
const STATUS_OFFSET: u64 = 64;
const TABLE_OFFSET: u64 = 128;
const DATA_OFFSET: u64 = 4096;
const SEGMENTS_MAX: usize = 240;
/// Long enough for any machine: a test that waits this long has failed.
const PATIENCE: Duration = Duration::from_secs(60);
const NO_STATUS: u8 = 0xaa;

/// How the guest drives its device.
#[derive(Debug, Clone)]
pub struct Options {
    pub queue_count: u16,
    pub queue_size: u16,
    pub indirect: bool,
    /// The most bytes of data of one request.
    pub data_bytes: u64,
    /// Number of buffers that the data of a request are cut into.
    pub segment_count: usize,
    /// Features beyond those that every connection has, or all of them if the back end offers them.
    pub features: u64,
    pub inflight: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            queue_count: 1,
            queue_size: 128,
            indirect: true,
            data_bytes: 1 << 20,
            segment_count: 1,
            features: u64::MAX,
            inflight: true,
        }
    }
}

/// A virtio-blk request.
#[derive(Debug, Clone, Copy)]
pub enum Command<'a> {
    Read {
        sector: u64,
        length: u64,
    },
    Write {
        sector: u64,
        data: &'a [u8],
    },
    Flush,
    /// Sector, number of sectors, flags.
    Discard(&'a [(u64, u32, u32)]),
    WriteZeroes(&'a [(u64, u32, u32)]),
    GetId,
    /// Any type, with data to the device and room for data from it.
    Raw {
        kind: u32,
        sector: u64,
        data: &'a [u8],
        length: u64,
    },
}

/// A request that was submitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ticket {
    pub queue: u16,
    pub slot: u16,
}

/// A guest with one virtio-blk device. It outlives its back ends.
pub struct TestGuest {
    pub options: Options,
    pub memory: Arc<GuestMemoryMmap<()>>,
    pub queues: Vec<Virtqueue>,
    pub frontend: Option<Frontend>,
    /// Where the back end says that the configuration has changed.
    changes: Option<UnixStream>,
    /// The features negotiated with the back end.
    features: u64,
    inflight: Option<(VhostUserInflight, File)>,
    free: Vec<Vec<u16>>,
    outstanding: HashSet<Ticket>,
    done: HashMap<Ticket, u8>,
}

impl TestGuest {
    pub fn new(options: Options) -> Self {
        let slots = u64::from(options.queue_size) * u64::from(options.queue_count);
        let slots_bytes = slots * slot_bytes(&options);
        let file = File::from(memfd_create("test-guest", MemfdFlags::CLOEXEC).unwrap());
        ftruncate(&file, RINGS_BYTES + slots_bytes).unwrap();
        let part = |start| Some(FileOffset::new(file.try_clone().unwrap(), start));
        let memory = GuestMemoryMmap::from_ranges_with_files([
            (GuestAddress(RINGS_START), RINGS_BYTES as usize, part(0)),
            (GuestAddress(SLOTS_START), slots_bytes as usize, part(RINGS_BYTES)),
        ]);
        let memory = Arc::new(memory.unwrap());
        let stride = Virtqueue::bytes(options.queue_size).next_multiple_of(4096);
        let queue =
            |index: u16| Virtqueue::new(memory.clone(), options.queue_size, RINGS_START + u64::from(index) * stride);
        let queues = (0..options.queue_count).map(queue).collect();
        let free = vec![free_slots(&options); usize::from(options.queue_count)];
        let (outstanding, done) = (HashSet::new(), HashMap::new());
        TestGuest {
            options,
            memory,
            queues,
            frontend: None,
            changes: None,
            features: 0,
            inflight: None,
            free,
            outstanding,
            done,
        }
    }

    /// Connects and starts all queues as QEMU does, both the first time and after a back end was lost.
    pub fn connect(&mut self, socket: &Path) -> vhost::Result<()> {
        let bases: Vec<u16> = self.queues.iter().map(Virtqueue::used_index).collect();
        self.connect_at(socket, &bases)
    }

    pub fn connect_at(&mut self, socket: &Path, bases: &[u16]) -> vhost::Result<()> {
        self.negotiate(socket)?;
        self.share_memory()?;
        self.share_inflight()?;
        for (index, base) in bases.iter().enumerate() {
            self.start_queue(index, *base)?;
        }
        Ok(())
    }

    /// Connects and negotiates features, no more.
    pub fn negotiate(&mut self, socket: &Path) -> vhost::Result<()> {
        self.greet(socket)?;
        self.set_features()
    }

    /// Connects as QEMU does for a guest whose driver has not started: the features are not set yet.
    pub fn greet(&mut self, socket: &Path) -> vhost::Result<()> {
        let mut frontend = Frontend::connect(socket, u64::from(self.options.queue_count))?;
        // SAFETY: the descriptor stays open as long as `frontend`, which outlives the borrow.
        let stream = unsafe { BorrowedFd::borrow_raw(frontend.as_raw_fd()) };
        sockopt::set_socket_timeout(stream, sockopt::Timeout::Recv, Some(PATIENCE)).unwrap();
        frontend.set_owner()?;
        let offered = frontend.get_features()?;
        let protocol = frontend.get_protocol_features()?;
        frontend.set_protocol_features(protocol)?;
        if protocol.contains(VhostUserProtocolFeatures::REPLY_ACK) {
            frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        }
        let wanted = self.options.features | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
        self.features = offered & wanted & !VhostUserVirtioFeatures::LOG_ALL.bits();
        self.frontend = Some(frontend);
        if self.changes.is_some() {
            self.listen()?;
        }
        Ok(())
    }

    /// Passes a channel for changes of the configuration, now and at each connection from now on.
    pub fn listen(&mut self) -> vhost::Result<()> {
        let (theirs, ours) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(PATIENCE)).unwrap();
        self.changes = Some(ours);
        self.frontend().set_backend_request_fd(&theirs)
    }

    /// Passes no channel when it connects again.
    pub fn stop_listening(&mut self) {
        self.changes = None;
    }

    /// Waits until the back end says that the configuration has changed.
    pub fn wait_for_change(&mut self) {
        let mut message = [0; 12];
        self.changes.as_mut().expect("a channel").read_exact(&mut message).expect("a change of the configuration");
        let [request, flags, bytes] = [0, 4, 8].map(|at| message[at]);
        assert_eq!((request, flags, bytes), (2, 1, 0), "a change of the configuration that needs no reply");
    }

    /// Returns the size of the disk in bytes, as the back end tells it now.
    pub fn capacity(&mut self) -> vhost::Result<u64> {
        let sectors = self.read_config(0, 8)?;
        Ok(u64::from_le_bytes(sectors.try_into().unwrap()) * 512)
    }

    /// Sets the features, as a guest's driver does when it starts.
    pub fn set_features(&mut self) -> vhost::Result<()> {
        let features = self.features;
        self.frontend().set_features(features)
    }

    pub fn regions(&self) -> Vec<VhostUserMemoryRegionInfo> {
        let regions = GuestMemoryBackend::iter(&*self.memory);
        regions.map(|region| VhostUserMemoryRegionInfo::from_guest_region(region).unwrap()).collect()
    }

    pub fn share_memory(&mut self) -> vhost::Result<()> {
        let regions = self.regions();
        self.frontend().set_mem_table(&regions).map(drop)
    }

    /// Shares `bytes` bytes of memory without allocating any page of it.
    pub fn claim_memory(&mut self, bytes: u64) -> vhost::Result<()> {
        let memory = memfd_create("claimed", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&memory, bytes).unwrap();
        self.share_file(&memory, bytes)
    }

    /// Shares `bytes` bytes of memory that are in a file.
    pub fn share_file(&mut self, memory: &impl AsRawFd, bytes: u64) -> vhost::Result<()> {
        let region = VhostUserMemoryRegionInfo {
            guest_phys_addr: 0,
            memory_size: bytes,
            userspace_addr: 1 << 44,
            mmap_offset: 0,
            mmap_handle: memory.as_raw_fd(),
        };
        self.frontend().set_mem_table(&[region]).map(drop)
    }

    pub fn share_inflight(&mut self) -> vhost::Result<()> {
        if !self.options.inflight {
            return Ok(());
        }
        if self.inflight.is_none() {
            let (queues, size) = (self.options.queue_count, self.options.queue_size);
            let wanted = VhostUserInflight::new(0, 0, queues, size);
            self.inflight = Some(self.frontend().get_inflight_fd(&wanted)?);
        }
        let (shape, fd) = self.inflight.as_ref().map(|(shape, file)| (*shape, file.as_raw_fd())).unwrap();
        self.frontend().set_inflight_fd(&shape, fd)
    }

    pub fn start_queue(&mut self, index: usize, base: u16) -> vhost::Result<()> {
        let mut frontend = self.frontend().clone();
        let queue = &self.queues[index];
        frontend.set_vring_num(index, queue.size)?;
        frontend.set_vring_base(index, base)?;
        frontend.set_vring_addr(index, &self.addresses(index, None))?;
        frontend.set_vring_call(index, &queue.call)?;
        frontend.set_vring_err(index, &queue.error)?;
        frontend.set_vring_kick(index, &queue.kick)?;
        frontend.set_vring_enable(index, true)
    }

    fn addresses(&self, index: usize, used_log: Option<u64>) -> VringConfigData {
        let queue = &self.queues[index];
        let host = |address| self.memory.get_host_address(GuestAddress(address)).unwrap() as u64;
        VringConfigData {
            queue_max_size: queue.size,
            queue_size: queue.size,
            flags: u32::from(used_log.is_some()),
            desc_table_addr: host(queue.descriptors),
            used_ring_addr: host(queue.used),
            avail_ring_addr: host(queue.available),
            log_addr: used_log,
        }
    }

    /// Makes the back end log its writes to this file, as QEMU does when it starts a migration. The used ring of each
    /// queue is logged at the address that `used_log` returns for it.
    pub fn start_log(&mut self, log: &File, used_log: impl Fn(&Virtqueue) -> u64) -> vhost::Result<()> {
        let region = VhostUserDirtyLogRegion {
            mmap_size: log.metadata().unwrap().len(),
            mmap_offset: 0,
            mmap_handle: log.as_raw_fd(),
        };
        self.frontend().set_log_base(0, Some(region))?;
        self.switch_log(VhostUserVirtioFeatures::LOG_ALL.bits(), |queue| Some(used_log(queue)))
    }

    pub fn stop_log(&mut self) -> vhost::Result<()> {
        self.switch_log(0, |_| None)
    }

    fn switch_log(&mut self, bits: u64, used_log: impl Fn(&Virtqueue) -> Option<u64>) -> vhost::Result<()> {
        let features = self.features | bits;
        self.frontend().set_features(features)?;
        for index in 0..self.queues.len() {
            let addresses = self.addresses(index, used_log(&self.queues[index]));
            self.frontend().set_vring_addr(index, &addresses)?;
        }
        Ok(())
    }

    /// Stops a queue as QEMU does, and returns its base when the queue is drained.
    pub fn stop_queue(&mut self, index: usize) -> vhost::Result<u16> {
        self.frontend().set_vring_enable(index, false)?;
        Ok(u16::try_from(self.frontend().get_vring_base(index)?).unwrap())
    }

    /// Returns a function that sends a message which changes nothing, and returns whether it is acknowledged. It may wait
    /// on another thread.
    pub fn sender(&mut self) -> impl FnMut() -> bool + Send + 'static {
        let mut frontend = self.frontend().clone();
        move || frontend.set_vring_enable(0, true).is_ok()
    }

    /// Lets the back end take requests from a queue, or stops it from doing so.
    pub fn enable_queue(&mut self, index: usize, enable: bool) -> vhost::Result<()> {
        self.frontend().set_vring_enable(index, enable)
    }

    /// Returns whether the connection is still open at the back end.
    pub fn is_connected(&self) -> bool {
        let Some(frontend) = &self.frontend else { return false };
        // SAFETY: the descriptor stays open as long as `frontend`, which outlives the borrow.
        let socket = unsafe { BorrowedFd::borrow_raw(frontend.as_raw_fd()) };
        let mut sockets = [PollFd::from_borrowed_fd(socket, PollFlags::empty())];
        poll(&mut sockets, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 0
    }

    pub fn disconnect(&mut self) {
        self.frontend = None;
    }

    /// Moves the guest to another hypervisor, which knows only its memory and the positions of its rings.
    pub fn move_away(&mut self) {
        self.frontend = None;
        self.inflight = None;
    }

    /// Resets the device as its driver does: rings and the in-flight record start afresh, and requests are forgotten.
    pub fn reset(&mut self) {
        self.queues.iter_mut().for_each(Virtqueue::reset);
        self.inflight = None;
        self.free.fill(free_slots(&self.options));
        self.outstanding.clear();
        self.done.clear();
    }

    pub fn frontend(&mut self) -> &mut Frontend {
        self.frontend.as_mut().expect("connected")
    }

    /// Returns bytes of struct virtio_blk_config.
    pub fn read_config(&mut self, offset: u32, length: usize) -> vhost::Result<Vec<u8>> {
        let room = vec![0; length];
        let flags = VhostUserConfigFlags::empty();
        Ok(self.frontend().get_config(offset, length as u32, flags, &room)?.1)
    }

    pub fn set_writeback(&mut self, writeback: bool) -> vhost::Result<()> {
        self.frontend().set_config(32, VhostUserConfigFlags::WRITABLE, &[u8::from(writeback)])
    }

    /// Submits a request, waits for it, and returns its status byte.
    pub fn run(&mut self, queue: u16, command: Command) -> u8 {
        let ticket = self.submit(queue, command);
        self.queues[usize::from(queue)].kick();
        self.wait(ticket)
    }

    pub fn has_free_slot(&self, queue: u16) -> bool {
        !self.free[usize::from(queue)].is_empty()
    }

    /// Makes a request available. The device is not kicked.
    pub fn submit(&mut self, queue: u16, command: Command) -> Ticket {
        let slot = self.free[usize::from(queue)].pop().expect("a free slot");
        let ticket = Ticket { queue, slot };
        let address = self.slot_address(ticket);
        let (kind, sector, data, room) = encode(command);
        let mut header = [0; 16];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        self.memory.write_slice(&header, GuestAddress(address)).unwrap();
        self.memory.write_obj(NO_STATUS, GuestAddress(address + STATUS_OFFSET)).unwrap();
        self.memory.write_slice(&data, GuestAddress(address + DATA_OFFSET)).unwrap();

        let mut buffers = vec![Buffer { address, length: 16, writable: false }];
        let data_length = data.len() as u64;
        self.add_segments(&mut buffers, address + DATA_OFFSET, data_length, false);
        self.add_segments(&mut buffers, address + DATA_OFFSET + data_length, room, true);
        buffers.push(Buffer { address: address + STATUS_OFFSET, length: 1, writable: true });
        self.write_chain(ticket, &buffers);
        self.outstanding.insert(ticket);
        ticket
    }

    fn add_segments(&self, buffers: &mut Vec<Buffer>, start: u64, length: u64, writable: bool) {
        let piece = length.div_ceil(self.options.segment_count as u64).max(1);
        let mut offset = 0;
        while offset < length {
            let bytes = piece.min(length - offset);
            buffers.push(Buffer { address: start + offset, length: bytes as u32, writable });
            offset += bytes;
        }
    }

    fn write_chain(&mut self, ticket: Ticket, buffers: &[Buffer]) {
        let table = self.slot_address(ticket) + TABLE_OFFSET;
        let indirect = self.options.indirect;
        let queue = &mut self.queues[usize::from(ticket.queue)];
        if indirect {
            assert!(buffers.len() <= SEGMENTS_MAX, "the slot's table has no room");
            queue.write_chain(table, 0, buffers);
            let table = Buffer { address: table, length: 16 * buffers.len() as u32, writable: false };
            queue.write_descriptor(queue.descriptors, ticket.slot, table, DESC_INDIRECT, 0);
        } else {
            assert!(buffers.len() <= 4, "four descriptors for each slot");
            queue.write_chain(queue.descriptors, ticket.slot, buffers);
        }
        queue.offer(ticket.slot);
        queue.publish();
    }

    /// Takes the requests that the device completed on `queue`, and returns their number.
    pub fn poll(&mut self, queue: u16) -> usize {
        let mut count = 0;
        while let Some((head, _)) = self.queues[usize::from(queue)].next_used() {
            let ticket = Ticket { queue, slot: head };
            assert!(self.outstanding.remove(&ticket), "{ticket:?} completed twice or never submitted");
            let status = GuestAddress(self.slot_address(ticket) + STATUS_OFFSET);
            self.done.insert(ticket, self.memory.read_obj(status).unwrap());
            count += 1;
        }
        count
    }

    /// Returns the status of a request, or `None` if it is not complete. A completed request's slot, including its
    /// data, becomes free for the next request.
    pub fn result(&mut self, ticket: Ticket) -> Option<u8> {
        self.poll(ticket.queue);
        self.polled(ticket)
    }

    /// Returns the same as [`Self::result`], but considers only completions that [`Self::poll`] has taken.
    pub fn polled(&mut self, ticket: Ticket) -> Option<u8> {
        let status = self.done.remove(&ticket)?;
        self.free[usize::from(ticket.queue)].push(ticket.slot);
        Some(status)
    }

    /// Waits for the interrupt that announces a request's completion, and returns the status byte.
    pub fn wait(&mut self, ticket: Ticket) -> u8 {
        loop {
            if let Some(status) = self.result(ticket) {
                return status;
            }
            let call = &self.queues[usize::from(ticket.queue)].call;
            assert!(raised(call, PATIENCE), "no interrupt for {ticket:?}");
        }
    }

    /// Waits until nothing is outstanding; every status must be success.
    pub fn wait_for_all(&mut self) {
        let completed = self.done.keys().chain(&self.outstanding).copied().collect::<Vec<_>>();
        for ticket in completed {
            assert_eq!(self.wait(ticket), 0, "{ticket:?}");
        }
    }

    pub fn outstanding(&self) -> usize {
        self.outstanding.len()
    }

    /// Waits for the eventfd that reports a broken queue. Returns false if it was not raised in time.
    pub fn wait_for_error(&self, queue: u16) -> bool {
        raised(&self.queues[usize::from(queue)].error, PATIENCE)
    }

    /// Returns whether the queue is interrupted within `patience`.
    pub fn interrupted(&self, queue: u16, patience: Duration) -> bool {
        raised(&self.queues[usize::from(queue)].call, patience)
    }

    /// Returns the data of a completed read.
    pub fn data(&self, ticket: Ticket, length: usize) -> Vec<u8> {
        let mut data = vec![0; length];
        self.memory.read_slice(&mut data, GuestAddress(self.slot_address(ticket) + DATA_OFFSET)).unwrap();
        data
    }

    /// Returns the guest address at which the memory of a slot starts.
    pub fn slot_address(&self, ticket: Ticket) -> u64 {
        let number = u64::from(ticket.queue) * u64::from(self.options.queue_size) + u64::from(ticket.slot);
        SLOTS_START + number * slot_bytes(&self.options)
    }
}

/// Takes the signal of an eventfd, and waits up to `patience` for it. Returns whether there was one.
fn raised(event: &EventFd, patience: Duration) -> bool {
    // SAFETY: the descriptor stays open as long as `event`, which outlives the borrow.
    let descriptor = unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) };
    let patience = Timespec::try_from(patience).unwrap();
    poll(&mut [PollFd::from_borrowed_fd(descriptor, PollFlags::IN)], Some(&patience)).unwrap() > 0
        && event.read().is_ok()
}

fn slot_bytes(options: &Options) -> u64 {
    (DATA_OFFSET + options.data_bytes).next_multiple_of(4096)
}

fn free_slots(options: &Options) -> Vec<u16> {
    (0..options.queue_size)
        .rev()
        .step_by(if options.indirect { 1 } else { 4 })
        .map(|last| match options.indirect {
            true => last,
            false => last - 3,
        })
        .collect()
}

/// Returns type, sector, data to the device, and bytes of room for data from the device.
fn encode(command: Command) -> (u32, u64, Vec<u8>, u64) {
    let ranges = |ranges: &[(u64, u32, u32)]| {
        let bytes = |(sector, count, flags): &(u64, u32, u32)| {
            [&sector.to_le_bytes()[..], &count.to_le_bytes(), &flags.to_le_bytes()].concat()
        };
        ranges.iter().flat_map(bytes).collect::<Vec<u8>>()
    };
    match command {
        Command::Read { sector, length } => (0, sector, Vec::new(), length),
        Command::Write { sector, data } => (1, sector, data.to_vec(), 0),
        Command::Flush => (4, 0, Vec::new(), 0),
        Command::Discard(list) => (11, 0, ranges(list), 0),
        Command::WriteZeroes(list) => (13, 0, ranges(list), 0),
        Command::GetId => (8, 0, Vec::new(), 20),
        Command::Raw { kind, sector, data, length } => (kind, sector, data.to_vec(), length),
    }
}
