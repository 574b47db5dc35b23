//! Disk I/O that waits for a buffer, in the order in which it came.
//!
//! Owned by `in_flight.rs`, which walks over it whenever buffers may have come back. Pure: the caller decides which I/O
//! has room.
//! 1. A refused I/O holds back all later I/O of its disk, however small: each I/O is placed after at most what was
//!    ahead of it when it came (property-tested).
//! 2. A hedge that was refused because its disk has enough hedges holds back only the hedges after it.
//! 3. One disk never holds back another.

use remoca_core::engine::{GuestOp, RequestId};
use std::collections::VecDeque;

/// I/O for a backing store; it may have to wait for a buffer.
#[derive(Clone, Copy, Debug)]
pub struct DiskIo {
    pub id: RequestId,
    pub disk: usize,
    pub op: GuestOp,
    /// Whether pages of a memory server may still come for the request. Its own buffer is then reserved for them.
    pub too: bool,
    /// Bytes that it takes from the driver's buffers.
    pub bytes: usize,
}

/// Outcome of an attempt to place an I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tried {
    Placed,
    /// Its disk already has its share of the buffers.
    NoShare,
    /// Its disk already has its share of hedges.
    NoHedgeShare,
    /// No buffer is free, whichever disks have them.
    NoBuffer,
}

/// The queues, one for each disk.
pub struct Starved {
    queues: Vec<VecDeque<DiskIo>>,
    /// The disk that a walk begins with.
    first: usize,
}

/// One walk over everything that waits.
pub struct Walk {
    disks_left: usize,
    disk: usize,
    at: usize,
    hedges_wait: bool,
    lacked_buffers: bool,
}

impl Starved {
    pub fn new(disks: usize) -> Self {
        Self { queues: vec![VecDeque::new(); disks], first: 0 }
    }

    pub fn is_empty(&self) -> bool {
        self.queues.iter().all(VecDeque::is_empty)
    }

    /// Returns whether I/O of this disk waits.
    pub fn has(&self, disk: usize) -> bool {
        !self.queues[disk].is_empty()
    }

    /// Returns the bytes that the first I/O in a disk's queue waits for, or 0 if the queue is empty.
    pub fn wanted_bytes(&self, disk: usize) -> usize {
        self.queues[disk].front().map_or(0, |io| io.bytes)
    }

    pub fn push(&mut self, io: DiskIo) {
        self.queues[io.disk].push_back(io);
    }

    /// Calls `keep` for each I/O that waits. `keep` may change the I/O, or return false to drop it.
    pub fn retain(&mut self, mut keep: impl FnMut(&mut DiskIo) -> bool) {
        self.queues.iter_mut().for_each(|queue| queue.retain_mut(&mut keep));
    }

    /// Starts a walk with the disk for which there was no buffer the last time.
    pub fn walk(&self) -> Walk {
        let (disks_left, disk) = (self.queues.len(), self.first);
        Walk { disks_left, disk, at: 0, hedges_wait: false, lacked_buffers: false }
    }

    /// Returns the next I/O to place, or `None` at the end of the walk. The caller must report the outcome to
    /// [`Self::note`].
    pub fn next(&self, walk: &mut Walk) -> Option<DiskIo> {
        while walk.disks_left > 0 {
            let mut rest = self.queues[walk.disk].iter().enumerate().skip(walk.at);
            if let Some((at, io)) = rest.find(|(_, io)| !(walk.hedges_wait && io.too)) {
                walk.at = at;
                return Some(*io);
            }
            self.leave_disk(walk);
        }
        None
    }

    pub fn note(&mut self, walk: &mut Walk, tried: Tried) {
        match tried {
            Tried::Placed => drop(self.queues[walk.disk].remove(walk.at)),
            Tried::NoHedgeShare => walk.hedges_wait = true,
            Tried::NoShare => self.leave_disk(walk),
            Tried::NoBuffer => {
                if !std::mem::replace(&mut walk.lacked_buffers, true) {
                    self.first = walk.disk;
                }
                self.leave_disk(walk);
            }
        }
    }

    fn leave_disk(&self, walk: &mut Walk) {
        walk.disks_left -= 1;
        walk.disk = (walk.disk + 1) % self.queues.len();
        (walk.at, walk.hedges_wait) = (0, false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::requests::RequestTable;
    use proptest::prelude::*;
    use std::collections::HashMap;

    const DISKS: usize = 3;
    const LIMIT: usize = 64;

    /// A driver's use of the queues, with numbers in place of buffers.
    struct Model {
        starved: Starved,
        table: RequestTable,
        in_flight: Vec<DiskIo>,
        /// Of each I/O that waits: what was ahead of it when it came, and is not placed.
        ahead: HashMap<u32, Vec<DiskIo>>,
        next: u32,
    }

    impl Model {
        fn new() -> Self {
            let (starved, table) = (Starved::new(DISKS), RequestTable::new(DISKS));
            Self { starved, table, in_flight: Vec::new(), ahead: HashMap::new(), next: 0 }
        }

        fn submit(&mut self, disk: usize, bytes: usize, too: bool) {
            let io = DiskIo { id: RequestId(self.next), disk, op: GuestOp::Flush, too, bytes };
            self.next += 1;
            let ahead = self.starved.queues[disk].iter().copied().collect();
            self.ahead.insert(io.id.0, ahead);
            if self.starved.has(disk) || self.place(io) != Tried::Placed {
                self.starved.push(io);
            }
        }

        fn place(&mut self, io: DiskIo) -> Tried {
            let wanted = |disk| self.starved.wanted_bytes(disk);
            let tried = self.table.share(&io, LIMIT, wanted);
            let lent: usize = self.in_flight.iter().map(|io| io.bytes).sum();
            if tried != Tried::Placed {
                return tried;
            }
            if lent + io.bytes > LIMIT {
                return Tried::NoBuffer;
            }
            let ahead = self.ahead.remove(&io.id.0).unwrap();
            for other in &ahead {
                let overtaken = self.ahead.contains_key(&other.id.0);
                assert!(!overtaken || (other.too && !io.too), "{io:?} before {other:?}");
            }
            self.table.lend(io.disk, io.bytes, io.too);
            self.in_flight.push(io);
            Tried::Placed
        }

        fn complete(&mut self, which: usize) {
            let io = self.in_flight.remove(which % self.in_flight.len());
            self.table.take_back(io.disk, io.bytes, io.too);
        }

        fn feed(&mut self) {
            let mut walk = self.starved.walk();
            while let Some(io) = self.starved.next(&mut walk) {
                let tried = self.place(io);
                self.starved.note(&mut walk, tried);
            }
        }
    }

    proptest! {
        /// Mixed sizes of several disks while the buffers are full: nothing is overtaken but a hedge by what a guest waits for,
        /// and everything is placed in the end.
        #[test]
        fn nothing_overtakes_what_came_before(
            steps in prop::collection::vec((0..DISKS, prop_oneof![1..4_usize, 8..32_usize], any::<bool>(), any::<u8>()), 1..300),
        ) {
            let mut model = Model::new();
            for (disk, bytes, too, more) in steps {
                model.submit(disk, bytes, too && bytes < 8);
                if more % 3 == 0 && !model.in_flight.is_empty() {
                    model.complete(usize::from(more));
                    model.feed();
                }
            }
            while !model.starved.is_empty() {
                prop_assert!(!model.in_flight.is_empty(), "something waits for nothing");
                model.complete(0);
                model.feed();
            }
        }
    }

    /// Small I/O goes on at every disk, one in for one out. The large ones are placed as soon as what was in flight when they
    /// came has ended once.
    #[test]
    fn a_large_one_is_placed_beside_a_flood_of_small_ones() {
        for too in [false, true] {
            let mut model = Model::new();
            for turn in 0..LIMIT * DISKS {
                model.submit(turn % DISKS, 1, too);
            }
            let large: Vec<_> = (0..DISKS).zip(model.next..).collect();
            large.iter().for_each(|(disk, _)| model.submit(*disk, LIMIT / 2, false));
            let ahead = model.next as usize;
            for turn in 0..2 * ahead {
                model.submit(turn % DISKS, 1, too);
                model.complete(0);
                model.feed();
            }
            for (_, id) in large {
                assert!(!model.ahead.contains_key(&id), "I/O {id} waits still, hedges: {too}");
            }
        }
    }

    #[test]
    fn hedges_that_are_enough_hold_back_hedges_alone() {
        let mut model = Model::new();
        let part = LIMIT / 2 / DISKS;
        model.submit(0, part, true);
        model.submit(0, 2, true);
        model.submit(0, 1, true);
        model.submit(0, 3, false);
        model.feed();
        let placed = |model: &Model| model.in_flight.iter().map(|io| io.bytes).collect::<Vec<_>>();
        assert_eq!(placed(&model), [part, 3]);
        model.complete(0);
        model.feed();
        assert_eq!(placed(&model), [3, 2, 1]);
    }

    #[test]
    fn a_walk_begins_with_the_first_disk_that_lacked_a_buffer() {
        let mut starved = Starved::new(DISKS);
        for (disk, id) in (0..DISKS).zip(0..) {
            starved.push(DiskIo { id: RequestId(id), disk, op: GuestOp::Flush, too: false, bytes: 1 });
        }
        for (first, tried) in
            [(0, [Tried::NoShare, Tried::NoBuffer, Tried::NoBuffer]), (1, [Tried::NoShare; 3]), (1, [Tried::Placed; 3])]
        {
            let mut walk = starved.walk();
            for (at, tried) in tried.into_iter().enumerate() {
                assert_eq!(starved.next(&mut walk).map(|io| io.disk), Some((first + at) % DISKS));
                starved.note(&mut walk, tried);
            }
            assert!(starved.next(&mut walk).is_none());
        }
        assert!(starved.is_empty());
    }
}
