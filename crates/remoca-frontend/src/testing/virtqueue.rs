//! The driver's side of a split virtqueue in the test guest's memory.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

pub const DESC_NEXT: u16 = 1;
pub const DESC_WRITE: u16 = 2;
pub const DESC_INDIRECT: u16 = 4;
const USED_NO_NOTIFY: u16 = 1;

/// A buffer of a chain.
#[derive(Debug, Clone, Copy)]
pub struct Buffer {
    pub address: u64,
    pub length: u32,
    pub writable: bool,
}

pub struct Virtqueue {
    memory: Arc<GuestMemoryMmap<()>>,
    pub size: u16,
    pub descriptors: u64,
    pub available: u64,
    pub used: u64,
    pub next_available: u16,
    next_used: u16,
    pub kick: EventFd,
    pub call: EventFd,
    pub error: EventFd,
}

impl Virtqueue {
    /// Returns the bytes of guest memory that a queue of `size` takes.
    pub fn bytes(size: u16) -> u64 {
        let size = u64::from(size);
        (16 * size + 6 + 2 * size).next_multiple_of(4) + 6 + 8 * size
    }

    pub fn new(memory: Arc<GuestMemoryMmap<()>>, size: u16, start: u64) -> Self {
        let eventfd = || EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).unwrap();
        let entries = u64::from(size);
        let available = start + 16 * entries;
        let used = (available + 6 + 2 * entries).next_multiple_of(4);
        Virtqueue {
            memory,
            size,
            descriptors: start,
            available,
            used,
            next_available: 0,
            next_used: 0,
            kick: eventfd(),
            call: eventfd(),
            error: eventfd(),
        }
    }

    /// Resets the queue, as a driver does after a reset of the device.
    pub fn reset(&mut self) {
        (self.next_available, self.next_used) = (0, 0);
        let zeroes = vec![0; Virtqueue::bytes(self.size) as usize];
        self.memory.write_slice(&zeroes, GuestAddress(self.descriptors)).unwrap();
    }

    /// Writes one descriptor of the table at `table`.
    pub fn write_descriptor(&self, table: u64, index: u16, buffer: Buffer, flags: u16, next: u16) {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&buffer.address.to_le_bytes());
        bytes[8..12].copy_from_slice(&buffer.length.to_le_bytes());
        let flags = flags | if buffer.writable { DESC_WRITE } else { 0 };
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        self.memory.write_slice(&bytes, GuestAddress(table + 16 * u64::from(index))).unwrap();
    }

    /// Writes a whole chain into consecutive descriptors from `first` of the table at `table`.
    pub fn write_chain(&self, table: u64, first: u16, buffers: &[Buffer]) {
        for (index, buffer) in (first..).zip(buffers) {
            let last = usize::from(index - first) + 1 == buffers.len();
            self.write_descriptor(table, index, *buffer, if last { 0 } else { DESC_NEXT }, index + 1);
        }
    }

    /// Puts `head` into the next entry of the available ring; the device sees it after `publish`.
    pub fn offer(&mut self, head: u16) {
        let entry = self.available + 4 + 2 * u64::from(self.next_available % self.size);
        self.memory.write_obj(head.to_le(), GuestAddress(entry)).unwrap();
        self.next_available = self.next_available.wrapping_add(1);
    }

    pub fn publish(&self) {
        let index = GuestAddress(self.available + 2);
        self.memory.store(self.next_available.to_le(), index, Ordering::Release).unwrap();
        fence(Ordering::SeqCst);
    }

    /// Tells the device that chains were made available, unless it looks by itself.
    pub fn kick(&self) {
        if self.wants_kicks() {
            self.kick.write(1).unwrap();
        }
    }

    /// Returns whether the device does not look by itself for chains that are made available.
    pub fn wants_kicks(&self) -> bool {
        u16::from_le(self.memory.load(GuestAddress(self.used), Ordering::Relaxed).unwrap()) & USED_NO_NOTIFY == 0
    }

    /// Asks the device for no interrupts, or for interrupts again.
    pub fn suppress_interrupts(&self, suppress: bool) {
        self.memory.store(u16::from(suppress).to_le(), GuestAddress(self.available), Ordering::Release).unwrap();
        fence(Ordering::SeqCst);
    }

    pub fn used_index(&self) -> u16 {
        u16::from_le(self.memory.load(GuestAddress(self.used + 2), Ordering::Acquire).unwrap())
    }

    /// Returns head and written bytes of the next completion, or `None` if there is none.
    pub fn next_used(&mut self) -> Option<(u16, u32)> {
        if self.used_index() == self.next_used {
            return None;
        }
        let entry = self.used + 4 + 8 * u64::from(self.next_used % self.size);
        let entry: u64 = self.memory.read_obj(GuestAddress(entry)).unwrap();
        self.next_used = self.next_used.wrapping_add(1);
        let entry = u64::from_le(entry);
        Some((u16::try_from(entry & 0xffff_ffff).unwrap(), (entry >> 32) as u32))
    }
}
