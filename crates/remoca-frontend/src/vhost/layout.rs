//! Where the three parts of a ring lie in guest memory, and how long they are (virtio 1.2, 2.7).

use vm_memory::GuestAddress;

pub(super) const DESCRIPTOR_BYTES: u64 = 16;
pub(super) const HEADER_BYTES: u64 = 4;
pub(super) const AVAILABLE_ENTRY_BYTES: u64 = 2;
pub(super) const USED_ENTRY_BYTES: u64 = 8;
const EVENT_BYTES: u64 = 2;

/// The place of a ring in guest memory. `size` is a power of two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RingLayout {
    pub size: u16,
    pub descriptors: GuestAddress,
    pub available: GuestAddress,
    pub used: GuestAddress,
    /// Guest address at which writes to the used ring are logged (VHOST_VRING_F_LOG), in addition to its address in
    /// guest memory.
    pub used_log: Option<u64>,
}

impl RingLayout {
    pub fn descriptors_bytes(size: u16) -> u64 {
        u64::from(size) * DESCRIPTOR_BYTES
    }

    pub fn available_bytes(size: u16) -> u64 {
        HEADER_BYTES + u64::from(size) * AVAILABLE_ENTRY_BYTES + EVENT_BYTES
    }

    pub fn used_bytes(size: u16) -> u64 {
        HEADER_BYTES + u64::from(size) * USED_ENTRY_BYTES + EVENT_BYTES
    }
}
