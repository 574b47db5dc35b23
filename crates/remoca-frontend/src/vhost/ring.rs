//! Access to one split virtqueue in guest memory.
//!
//! Every field is read once into a local value and checked there, because the guest can change the ring at any time.
//! The layout was checked when the ring was started, so an access fails only where the guest's memory has a hole.
//!
//! ```text
//! descriptors  size * { addr: u64, len: u32, flags: u16, next: u16 }
//! available    { flags: u16, index: u16, ring: [u16; size], used_event: u16 }
//! used         { flags: u16, index: u16, ring: [{ id: u32, len: u32 }; size], avail_event: u16 }
//! ```

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use virtio_bindings::virtio_ring::{VRING_AVAIL_F_NO_INTERRUPT, VRING_USED_F_NO_NOTIFY};
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Address, ByteValued, Bytes, GuestAddress};

use super::layout::{AVAILABLE_ENTRY_BYTES, DESCRIPTOR_BYTES, HEADER_BYTES, RingLayout, USED_ENTRY_BYTES};
use super::log::LogSwitch;
use super::memory::{self, GuestMemory};

const INDEX_OFFSET: u64 = 2;
const FLAGS_BYTES: u64 = 2;
/// Flags of a used ring whose guest need not kick. The field has 16 bits.
const NO_NOTIFY: u16 = 1;
const _: () = assert!(NO_NOTIFY as u32 == VRING_USED_F_NO_NOTIFY);

/// The guest has no memory where its ring should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the ring is not in guest memory")]
pub(crate) struct RingUnreachable;

impl From<vm_memory::GuestMemoryError> for RingUnreachable {
    fn from(_: vm_memory::GuestMemoryError) -> Self {
        RingUnreachable
    }
}

pub(crate) struct Ring {
    layout: RingLayout,
    memory: Arc<GuestMemory>,
    log: Arc<LogSwitch>,
}

impl Ring {
    pub fn new(layout: RingLayout, memory: Arc<GuestMemory>, log: Arc<LogSwitch>) -> Self {
        Ring { layout, memory, log }
    }

    pub fn set_used_log(&mut self, used_log: Option<u64>) {
        self.layout.used_log = used_log;
    }

    pub fn size(&self) -> u16 {
        self.layout.size
    }

    pub fn descriptors(&self) -> GuestAddress {
        self.layout.descriptors
    }

    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// Returns the guest's count of chains made available. The load is Acquire: the entries and descriptors that the
    /// count covers are visible after it.
    pub fn available_index(&self) -> Result<u16, RingUnreachable> {
        self.load(self.layout.available, INDEX_OFFSET, Ordering::Acquire)
    }

    /// Returns the head of the chain at `position` of the available ring. `position` runs on beyond the ring's size.
    pub fn available_entry(&self, position: u16) -> Result<u16, RingUnreachable> {
        let offset = HEADER_BYTES + self.slot(position) * AVAILABLE_ENTRY_BYTES;
        self.load(self.layout.available, offset, Ordering::Relaxed)
    }

    pub fn used_index(&self) -> Result<u16, RingUnreachable> {
        self.load(self.layout.used, INDEX_OFFSET, Ordering::Relaxed)
    }

    /// Writes the used entry at `position`; the guest sees it once an index beyond it is published.
    pub fn write_used(&self, position: u16, head: u16, length: u32) -> Result<(), RingUnreachable> {
        let offset = HEADER_BYTES + self.slot(position) * USED_ENTRY_BYTES;
        let address = self.layout.used.checked_add(offset).ok_or(RingUnreachable)?;
        let entry = u64::from(head) | u64::from(length) << 32;
        memory::write(&self.memory, address, &entry.to_le_bytes())?;
        self.log_used(offset, USED_ENTRY_BYTES);
        Ok(())
    }

    pub fn publish_used(&self, index: u16) -> Result<(), RingUnreachable> {
        let address = self.layout.used.checked_add(INDEX_OFFSET).ok_or(RingUnreachable)?;
        self.memory.store(index.to_le(), address, Ordering::Release)?;
        self.log_used(INDEX_OFFSET, 2);
        Ok(())
    }

    /// Marks the whole used ring in the log. A back end that was killed may not have marked what it published.
    pub fn log_used_ring(&self) {
        self.log_used(0, RingLayout::used_bytes(self.layout.size));
    }

    fn log_used(&self, offset: u64, length: u64) {
        if let Some(start) = self.layout.used_log {
            self.log.mark(start.saturating_add(offset), length);
        }
    }

    /// Sets whether the guest is to kick the device when it has made chains available. A count read after this covers each
    /// chain for which the guest did not kick (VIRTIO 1.2, 2.7.10).
    pub fn set_kicks_wanted(&self, are_wanted: bool) -> Result<(), RingUnreachable> {
        let flags = if are_wanted { 0 } else { NO_NOTIFY };
        self.memory.store(flags.to_le(), self.layout.used, Ordering::Relaxed)?;
        self.log_used(0, FLAGS_BYTES);
        // The flags must be visible before the count is read: the guest writes the count, then reads the flags.
        fence(Ordering::SeqCst);
        Ok(())
    }

    /// Returns whether the guest wants an interrupt for what was just published.
    pub fn interrupt_wanted(&self) -> bool {
        // The index must be visible before the flag is read: the guest clears the flag, then reads the index.
        fence(Ordering::SeqCst);
        let flags: u16 = self.load(self.layout.available, 0, Ordering::Relaxed).unwrap_or(0);
        u32::from(flags) & VRING_AVAIL_F_NO_INTERRUPT == 0
    }

    fn slot(&self, position: u16) -> u64 {
        u64::from(position % self.layout.size)
    }

    fn load(&self, part: GuestAddress, offset: u64, order: Ordering) -> Result<u16, RingUnreachable> {
        let address = part.checked_add(offset).ok_or(RingUnreachable)?;
        Ok(u16::from_le(self.memory.load(address, order)?))
    }
}

/// Reads descriptor `index` of the table at `table`.
pub(crate) fn read_descriptor(
    memory: &GuestMemory,
    table: GuestAddress,
    index: u16,
) -> Result<Descriptor, RingUnreachable> {
    let address = table.checked_add(u64::from(index) * DESCRIPTOR_BYTES).ok_or(RingUnreachable)?;
    let mut descriptor = Descriptor::default();
    memory::read(memory, address, descriptor.as_mut_slice())?;
    Ok(descriptor)
}
