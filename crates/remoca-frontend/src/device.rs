//! The driver's view of the devices that guests attach to. A device yields requests to execute, independent of the
//! protocol that carries them.
//!
//! The driver owns a [`Frontend`] for each disk and one for the port, and treats all kinds alike. When `event_fd()` is
//! readable, it calls `handle_events()`, then `pop()` until that returns `None`, `complete()` in any order, and
//! `notify()` and `listen()` before it waits again. Requests come out validated: ranges lie within the device and on its block
//! boundaries, and writes to read-only devices never come out.

use crate::nbd::{Attached, NbdExport, NbdRequest};
use crate::request::{CopyError, Operation, Outcome};
use crate::vhost::{Attachment, BlkRequest, Frame, MappedMemory, Status, VhostDevice};
use remoca_io::buffer::IoBuffer;
use std::io;
use std::os::fd::BorrowedFd;

/// A device of the VM.
pub enum Frontend {
    Vhost(Box<VhostDevice>),
    Nbd(NbdExport),
}

impl Frontend {
    /// Returns a descriptor that is readable when [`Self::handle_events`] has something to do. The descriptor never
    /// changes.
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Vhost(device) => device.event_fd(),
            Self::Nbd(export) => export.event_fd(),
        }
    }

    /// Handles pending events. Call [`Self::pop`] afterwards until it returns `None`, then [`Self::notify`].
    ///
    /// # Errors
    /// If the system refuses to report events.
    pub fn handle_events(&mut self) -> io::Result<()> {
        match self {
            Self::Vhost(device) => device.handle_events(),
            Self::Nbd(export) => export.handle_events(),
        }
    }

    /// Returns whether [`Self::pop`] would find requests that the guest need not announce.
    pub fn has_requests(&self) -> bool {
        match self {
            Self::Vhost(device) => device.has_requests(),
            Self::Nbd(_) => false,
        }
    }

    /// Tells the guest to announce requests again, before the driver waits. Returns whether there are some that it did not
    /// announce, or `None` if it announces all.
    pub fn listen(&mut self) -> Option<bool> {
        match self {
            Self::Vhost(device) => device.listen(),
            Self::Nbd(_) => None,
        }
    }

    /// Returns the next request, or `None` if there is none now.
    pub fn pop(&mut self) -> Option<GuestRequest> {
        match self {
            Self::Vhost(device) => device.pop().map(GuestRequest::Vhost),
            Self::Nbd(export) => export.pop().map(GuestRequest::Nbd),
        }
    }

    /// Returns another piece of a request that was begun: a piece of it was handed out, or its header was received.
    /// Returns `None` if there is none.
    pub fn pop_begun(&mut self) -> Option<GuestRequest> {
        match self {
            Self::Vhost(device) => device.pop_begun().map(GuestRequest::Vhost),
            Self::Nbd(export) => export.pop_begun().map(GuestRequest::Nbd),
        }
    }

    /// Completes a request with `outcome`. The guest sees the completion after the next [`Self::notify`].
    pub fn complete(&mut self, request: GuestRequest, outcome: Outcome) {
        match (self, request) {
            (Self::Vhost(device), GuestRequest::Vhost(request)) => device.complete(request, status(outcome)),
            (Self::Nbd(export), GuestRequest::Nbd(request)) => export.complete(request, outcome),
            (Self::Vhost(_) | Self::Nbd(_), _) => unreachable!("a request of another frontend"),
        }
    }

    /// Marks each incomplete request for repetition of which the disk may have lost finished parts. [`Self::pop`]
    /// returns such a request again when all of its parts are back and none has failed.
    pub fn repeat_parts(&mut self) {
        match self {
            Self::Vhost(device) => device.repeat_parts(),
            Self::Nbd(export) => export.repeat_parts(),
        }
    }

    /// Publishes the requests completed since the last call to the guest.
    pub fn notify(&mut self) {
        match self {
            Self::Vhost(device) => device.notify(),
            Self::Nbd(export) => export.notify(),
        }
    }

    /// Returns whether the guest has its write cache on. Returns true for an NBD export, whose clients cannot switch
    /// it.
    pub fn write_cache(&self) -> bool {
        match self {
            Self::Vhost(device) => device.write_cache(),
            Self::Nbd(_) => true,
        }
    }

    /// Takes over the state of the write cache from the process that had the disk. That process made durable everything
    /// that it completed.
    pub fn inherit_write_cache(&mut self, is_on: bool) {
        if let Self::Vhost(device) = self {
            device.inherit_write_cache(is_on);
        }
    }

    /// Assumes that the guest has no write cache, and that not everything that was completed before is durable: the process
    /// that had the disk has said nothing, or says that the cache is off and may only have assumed so itself.
    pub fn assume_no_write_cache(&mut self) {
        if let Self::Vhost(device) = self {
            device.assume_no_write_cache();
        }
    }

    /// Hands out a flush before anything else, and nothing until that is done: the guest has switched its write cache off
    /// and has its answer, perhaps without a flush, because there was no disk or a former process owed it.
    pub fn flush_first(&mut self) {
        if let Self::Vhost(device) = self {
            device.flush_first();
        }
    }

    /// Returns the attachment of the front end that is connected. Returns `None` if none is, if its guest has not run here,
    /// and for an NBD export.
    pub fn attachment(&self) -> Option<Attachment> {
        match self {
            Self::Vhost(device) => device.attachment(),
            Self::Nbd(_) => None,
        }
    }

    /// Forgets the state of the write cache, because the disk goes to another process.
    pub fn forget_write_cache(&mut self) {
        if let Self::Vhost(device) = self {
            device.forget_write_cache();
        }
    }

    /// Answers the commands of the front end that can be answered while another process has the disk. `comes` means
    /// that the other process is about to hand the disk over.
    pub fn stand_aside(&mut self, comes: bool) {
        if let Self::Vhost(device) = self {
            device.stand_aside(comes);
        }
    }

    /// Returns whether a write may be completed before it is durable, unless the request says otherwise.
    pub fn write_cache_enabled(&self) -> bool {
        match self {
            Self::Vhost(device) => device.write_cache_enabled(),
            Self::Nbd(_) => true,
        }
    }

    /// Changes the size of the device. Guests are told at once over vhost-user, and when they connect over NBD.
    pub fn resize(&mut self, bytes: u64) {
        match self {
            Self::Vhost(device) => device.resize(bytes),
            Self::Nbd(export) => export.resize(bytes),
        }
    }

    /// Returns whether all guests were told the size that the device has now.
    pub fn sees_size(&self) -> bool {
        match self {
            Self::Vhost(device) => device.sees_size(),
            Self::Nbd(export) => export.sees_size(),
        }
    }

    /// Returns the size of the guest's memory in bytes, or zero if the frontend does not know it.
    pub fn guest_memory_bytes(&self) -> u64 {
        match self {
            Self::Vhost(device) => device.guest_memory_bytes(),
            Self::Nbd(_) => 0,
        }
    }

    /// Returns the memory of this host that the guest's memory takes now, or `None` if the frontend does not know it.
    pub fn guest_resident_bytes(&self) -> Option<u64> {
        match self {
            Self::Vhost(device) => device.guest_resident_bytes(),
            Self::Nbd(_) => None,
        }
    }

    /// Returns the guest's memory as this process has mapped it, or `None` if it has not, or not as files in memory.
    pub fn mapped_memory(&self) -> Option<MappedMemory> {
        match self {
            Self::Vhost(device) => device.mapped_memory(),
            Self::Nbd(_) => None,
        }
    }

    /// Attaches an NBD client that chose this device.
    ///
    /// # Errors
    /// If the system refuses to report events, or to watch the client's socket. The client is disconnected then.
    pub fn attach(&mut self, client: Attached) -> io::Result<()> {
        match self {
            Self::Vhost(_) => Ok(()),
            Self::Nbd(export) => export.attach(client),
        }
    }

    /// Returns whether the connections of the guest outlive a kill of this process. Those of NBD clients do not.
    pub fn is_kept(&self) -> bool {
        match self {
            Self::Vhost(device) => device.is_kept(),
            Self::Nbd(_) => false,
        }
    }

    /// Returns the number of attached NBD clients, or `None` if the device is not an NBD export.
    pub fn nbd_clients(&self) -> Option<usize> {
        match self {
            Self::Vhost(_) => None,
            Self::Nbd(export) => Some(export.client_count()),
        }
    }

    /// Makes the event descriptor readable, so that the driver looks at all queues.
    pub(crate) fn wake(&self) {
        if let Self::Vhost(device) = self {
            device.wake();
        }
    }

    pub fn is_connected(&self) -> bool {
        match self {
            Self::Vhost(device) => device.is_connected(),
            Self::Nbd(export) => export.client_count() > 0,
        }
    }

    /// Returns whether a guest uses the device: at least one of its queues is running, or an NBD client is attached.
    pub fn is_running(&self) -> bool {
        match self {
            Self::Vhost(device) => device.is_running(),
            Self::Nbd(export) => export.client_count() > 0,
        }
    }

    /// Returns whether no guest can attach any longer.
    pub fn is_finished(&self) -> bool {
        match self {
            Self::Vhost(device) => device.is_finished(),
            Self::Nbd(_) => false,
        }
    }

    /// Returns whether the next requests may repeat requests that an earlier process had in flight, or precede them: a guest that
    /// begins anew knows nothing of them. Always true for NBD, because its clients do not tell.
    pub fn may_repeat(&self) -> bool {
        match self {
            Self::Vhost(device) => device.repeats(),
            Self::Nbd(_) => true,
        }
    }

    /// Returns whether every request that was begun is handed out entirely, and every answer has been sent. The
    /// connection to the guest can be dropped then.
    pub fn is_quiet(&self) -> bool {
        match self {
            Self::Vhost(device) => !device.has_begun(),
            Self::Nbd(export) => export.is_quiet(),
        }
    }

    /// Returns whether the device's requests carry the buffers for their disk I/O.
    pub fn brings_buffers(&self) -> bool {
        match self {
            Self::Vhost(_) => false,
            Self::Nbd(_) => true,
        }
    }

    /// Returns the sector size in bytes if another process can take the device over, or `None` if it cannot. A
    /// hand-over needs queues that show when the guest has stopped using them here.
    pub fn sector_to_hand_over(&self) -> Option<u32> {
        match self {
            Self::Vhost(device) => Some(device.config().logical_block_bytes),
            Self::Nbd(_) => None,
        }
    }

    pub fn is_read_only(&self) -> bool {
        match self {
            Self::Vhost(device) => device.config().read_only,
            Self::Nbd(export) => export.geometry().read_only,
        }
    }
}

/// A request of the guest. The driver returns it to the [`Frontend`] that it came from.
#[derive(Debug)]
#[must_use = "a request that is not completed stays in flight for ever"]
pub enum GuestRequest {
    Vhost(BlkRequest),
    Nbd(NbdRequest),
}

impl GuestRequest {
    pub fn operation(&self) -> &Operation {
        match self {
            Self::Vhost(request) => request.operation(),
            Self::Nbd(request) => request.operation(),
        }
    }

    /// Returns whether this write must be durable when it completes, regardless of the device's write cache.
    pub fn is_durable(&self) -> bool {
        match self {
            Self::Vhost(_) => false,
            Self::Nbd(request) => request.is_durable(),
        }
    }

    /// Returns the number of bytes to copy to or from the guest. It is zero for anything but a read or write.
    pub fn data_length(&self) -> usize {
        match self {
            Self::Vhost(request) => request.data_length(),
            Self::Nbd(request) => request.data_length(),
        }
    }

    /// Returns the buffer that the request carries for its disk I/O; for a write it holds the data. If it returns
    /// `None`, the driver uses its own buffers and copies the data.
    pub fn take_buffer(&mut self) -> Option<IoBuffer> {
        match self {
            Self::Vhost(_) => None,
            Self::Nbd(request) => request.take_buffer(),
        }
    }

    /// Puts back the buffer of a finished write, which may have to be written again.
    pub fn give_back(&mut self, buffer: IoBuffer) {
        match self {
            // The data are still in guest memory.
            Self::Vhost(_) => drop(buffer),
            Self::Nbd(request) => request.give_back(buffer),
        }
    }

    /// Returns the whole pages of guest memory that `length` bytes at `offset` of a read's data will overwrite. There
    /// are none if the guest's memory is not shared.
    pub fn frames(&self, offset: usize, length: usize) -> impl Iterator<Item = Frame> {
        let frames = match self {
            Self::Vhost(request) => Some(request.frames(offset, length)),
            Self::Nbd(_) => None,
        };
        frames.into_iter().flatten()
    }

    /// Copies the current content of a frame of this request to `target`.
    ///
    /// # Errors
    /// As [`Self::copy_to_guest`]. An NBD request has no frames, so that this always fails for it.
    pub fn copy_frame(&self, frame: Frame, target: &mut [u8]) -> Result<(), CopyError> {
        match self {
            Self::Vhost(request) => request.copy_frame(frame, target),
            // An NBD request has no frames.
            Self::Nbd(_) => Err(CopyError::OutOfRange),
        }
    }

    /// Delivers all data of a read in the buffer that the disk filled: the one that the request carried, or one of the
    /// driver's.
    ///
    /// # Errors
    /// As [`Self::copy_to_guest`].
    pub fn deliver(&mut self, buffer: IoBuffer) -> Result<(), CopyError> {
        match self {
            Self::Vhost(request) => request.copy_to_guest(0, &buffer),
            Self::Nbd(request) => request.deliver(buffer),
        }
    }

    /// Copies part of a read's data, starting at `offset`, to the guest.
    ///
    /// # Errors
    /// If the guest is gone, its memory is not accessible, or the data do not fit the request.
    pub fn copy_to_guest(&mut self, offset: usize, source: &[u8]) -> Result<(), CopyError> {
        match self {
            Self::Vhost(request) => request.copy_to_guest(offset, source),
            Self::Nbd(request) => request.copy_to_guest(offset, source),
        }
    }

    /// Fills `length` bytes at `offset` of a read's data with zeroes.
    ///
    /// # Errors
    /// As [`Self::copy_to_guest`].
    pub fn fill_zero(&mut self, offset: usize, length: usize) -> Result<(), CopyError> {
        match self {
            Self::Vhost(request) => request.fill_zero(offset, length),
            Self::Nbd(request) => request.fill_zero(offset, length),
        }
    }

    /// Copies part of a write's data, starting at `offset`, to `target`. A guest that shares its memory may change them
    /// at any time: two copies need not be equal.
    ///
    /// # Errors
    /// As [`Self::copy_to_guest`].
    pub fn copy_from_guest(&self, offset: usize, target: &mut [u8]) -> Result<(), CopyError> {
        match self {
            Self::Vhost(request) => request.copy_from_guest(offset, target),
            Self::Nbd(request) => request.copy_from_guest(offset, target),
        }
    }
}

fn status(outcome: Outcome) -> Status {
    match outcome {
        Outcome::Done => Status::Ok,
        Outcome::Failed(_) => Status::IoError,
        Outcome::Unsupported => Status::Unsupported,
    }
}
