//! The guest requests that the engine has not completed, with their buffers.

use crate::frontend::{GuestRequest, Outcome};
use crate::store::{IoBuffer, StoreOp};
use remoca_core::engine::{GuestOp, RequestId};
use remoca_core::units::Nanos;
use std::rc::Rc;

/// A guest request that the engine works on: a read, write or flush, or one range of a discard.
pub struct Pending {
    pub disk: u16,
    pub op: GuestOp,
    pub issued: Nanos,
    pub buffer: Option<IoBuffer>,
    /// Part of a read's data is in guest memory: its frames do not show what they held.
    pub delivered: bool,
    pub origin: Origin,
}

/// What the guest gets when the request completes.
pub enum Origin {
    Whole(GuestRequest),
    /// One of several ranges; the last of them completes the guest's request.
    Part(Rc<Group>),
}

/// A guest request of several ranges.
pub struct Group {
    pub request: std::cell::RefCell<Option<GuestRequest>>,
    pub left: std::cell::Cell<usize>,
    pub outcome: std::cell::Cell<Outcome>,
}

/// Disk I/O for which there is no buffer now.
#[derive(Clone, Copy)]
pub struct Starved {
    pub id: RequestId,
    pub op: GuestOp,
}

/// Requests by number; numbers are reused, so that the engine's table stays small.
#[derive(Default)]
pub struct RequestTable {
    slab: slab::Slab<Pending>,
}

impl RequestTable {
    /// Takes a request in; its number is the engine's name for it.
    pub fn insert(&mut self, pending: Pending) -> RequestId {
        // Far fewer than 2^32: a device hands out some thousand at a time.
        RequestId(u32::try_from(self.slab.insert(pending)).unwrap_or(u32::MAX))
    }

    /// The request `id`.
    pub fn get_mut(&mut self, id: RequestId) -> Option<&mut Pending> {
        self.slab.get_mut(id.0 as usize)
    }

    /// Takes the request `id` out.
    pub fn remove(&mut self, id: RequestId) -> Option<Pending> {
        self.slab.try_remove(id.0 as usize)
    }
}

/// The store's operation for the engine's.
pub fn store_op(op: GuestOp) -> StoreOp {
    // Requests are bounded far below 4 GiB by the frontend.
    let short = |length: u64| u32::try_from(length).unwrap_or(u32::MAX);
    match op {
        GuestOp::Read(range) => StoreOp::Read { offset: range.offset, len: short(range.length) },
        GuestOp::Write { range, durable } => StoreOp::Write { offset: range.offset, len: short(range.length), durable },
        GuestOp::Flush => StoreOp::Flush,
        GuestOp::Discard(range) => StoreOp::Discard { offset: range.offset, len: range.length },
        GuestOp::WriteZeroes { range, may_unmap, durable } => {
            StoreOp::WriteZeroes { offset: range.offset, len: range.length, may_unmap, durable }
        }
    }
}
