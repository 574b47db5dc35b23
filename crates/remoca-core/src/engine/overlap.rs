//! Overlapping I/O in flight on one disk, which decides whether an I/O may set a fingerprint.
//!
//! An I/O is *tainted* once a modification overlapped it between issue and completion: the disk may have applied the two
//! in either order. A new I/O is compared with all others: frontends bound their number to a few thousand, and the driver begins some
//! hundred in a turn.

use super::types::RequestId;
use crate::rules::{Rule, Rules};
use std::ops::Range;

#[derive(Debug)]
struct InFlight {
    request: RequestId,
    blocks: Range<u64>,
    modifies: bool,
    tainted: bool,
}

/// Disk I/O in flight on one disk.
#[derive(Debug, Default)]
pub struct Overlaps {
    in_flight: Vec<InFlight>,
}

impl Overlaps {
    /// Adds an I/O on `blocks`. Taints the new I/O if a modification in flight overlaps it. If the new I/O is a
    /// modification, taints all I/Os in flight that it overlaps.
    pub fn begin(&mut self, rules: Rules, request: RequestId, blocks: Range<u64>, modifies: bool) {
        let mut tainted = false;
        for other in &mut self.in_flight {
            if other.blocks.start >= blocks.end || blocks.start >= other.blocks.end {
                continue;
            }
            match (modifies, other.modifies) {
                (false, false) => {}
                (true, true) if !rules.hold(Rule::OverlappingWrites) => {}
                (true, false) if !rules.hold(Rule::ReadOverlappedByWrite) => {}
                _ => {
                    other.tainted |= modifies;
                    tainted |= other.modifies;
                }
            }
        }
        self.in_flight.push(InFlight { request, blocks, modifies, tainted });
    }

    /// Removes the I/O of `request`, which has ended. Returns `true` if no modification overlapped it.
    pub fn end(&mut self, request: RequestId) -> bool {
        match self.in_flight.iter().position(|io| io.request == request) {
            Some(at) => !self.in_flight.swap_remove(at).tainted,
            None => {
                panic!("the disk I/O of request {} ends, and it never began", request.0)
            }
        }
    }

    /// Taints all I/O in flight, so that none of it sets a fingerprint.
    pub fn taint_all(&mut self) {
        for io in &mut self.in_flight {
            io.tainted = true;
        }
    }

    /// Returns the number of I/Os in flight.
    pub fn len(&self) -> usize {
        self.in_flight.len()
    }

    /// Returns whether no I/O is in flight.
    pub fn is_empty(&self) -> bool {
        self.in_flight.is_empty()
    }
}
