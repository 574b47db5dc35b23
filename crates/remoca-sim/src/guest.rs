//! The model guest: its requests in flight, and its page cache. It reports the pages that it drops.
//!
//! It remembers which contents the engine must know by now, from requests that nothing overlapped. If such a page is
//! reported, the engine may not call it unknown.

use crate::content::{BLOCK_SECTORS, Block, Sector, block_at};
use crate::disk::{Applied, IoId};
use crate::plan::Kind;
use crate::random::Random;
use remoca_core::engine::{GuestOp, RequestId};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

/// A block of a disk.
pub type Key = (u16, usize);

/// Number of past contents kept for stale evictions.
const PAST: usize = 48;

/// State of a request at the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskState {
    NotAsked,
    Running,
    /// To be read from the disk besides the server, as soon as there is a buffer.
    Starved,
    /// Being read from the disk besides the server; the first answer counts.
    Hedged,
    /// Failed; the server may still answer.
    Failed(i32),
    Done(Result<(), i32>),
}

/// A request that has not completed.
#[derive(Debug)]
pub struct Pending {
    pub disk: u16,
    pub sectors: Range<usize>,
    pub kind: Kind,
    /// Operation that the engine was asked to perform.
    pub op: GuestOp,
    /// Whether the process had no such part of the disk when it took the request, which must then fail.
    pub beyond: bool,
    /// Event in which it was submitted.
    pub submitted: u64,
    /// Data to write, or that was read.
    pub buffer: Vec<Sector>,
    /// Event in which the process took it.
    pub taken: Option<u64>,
    pub state: DiskState,
    /// The disk's I/O for it.
    pub io: Option<IoId>,
    pub applied: Option<Applied>,
    /// For a read: the content of the whole pages at its destination until they are overwritten.
    pub frames: Vec<Option<Block>>,
    /// Whether no modification of its blocks was in flight when it began.
    pub undisturbed: bool,
    /// For a flush: the versions it must make durable.
    pub promise: Vec<usize>,
}

/// Returns the blocks that `sectors` touch, whole or in part.
pub fn touched(sectors: &Range<usize>) -> Range<usize> {
    sectors.start / BLOCK_SECTORS..sectors.end.div_ceil(BLOCK_SECTORS)
}

/// Returns the blocks that `sectors` cover as a whole.
pub fn covered(sectors: &Range<usize>) -> Range<usize> {
    let first = sectors.start.div_ceil(BLOCK_SECTORS);
    first..(sectors.end / BLOCK_SECTORS).max(first)
}

/// Modifications of one block.
#[derive(Clone, Copy, Debug, Default)]
struct Changes {
    under_way: u32,
    /// Event in which the last one began.
    last: u64,
}

/// The guest.
#[derive(Debug)]
pub struct Guest {
    requests: Vec<Option<Pending>>,
    /// Completed reads whose disk I/O is still in flight, or (`None`) has not started.
    losers: BTreeMap<u32, Option<IoId>>,
    pages: BTreeMap<Key, Block>,
    /// Pages from the least to the most recently used.
    order: VecDeque<Key>,
    capacity: usize,
    past: VecDeque<Block>,
    /// Content of its free pages; the last is used next.
    free: Vec<Block>,
    changes: BTreeMap<Key, Changes>,
    known: BTreeMap<Key, Block>,
}

impl Guest {
    /// Makes a guest with at most `depth` requests in flight and `capacity` pages.
    #[must_use]
    pub fn new(depth: usize, capacity: usize) -> Self {
        Self {
            requests: (0..depth).map(|_| None).collect(),
            losers: BTreeMap::new(),
            pages: BTreeMap::new(),
            order: VecDeque::new(),
            capacity,
            past: VecDeque::new(),
            free: Vec::new(),
            changes: BTreeMap::new(),
            known: BTreeMap::new(),
        }
    }

    /// Returns a free ID for one more request, or `None` if there is none.
    #[must_use]
    pub fn free_id(&self) -> Option<RequestId> {
        let free = |id: &u32| self.requests[*id as usize].is_none() && !self.losers.contains_key(id);
        (0..u32::try_from(self.requests.len()).ok()?).find(free).map(RequestId)
    }

    /// Begins a request.
    pub fn begin(&mut self, id: RequestId, mut pending: Pending) {
        let blocks = touched(&pending.sectors);
        pending.undisturbed = self.range(pending.disk, blocks.clone()).all(|c| c.under_way == 0);
        if pending.modifies() {
            for block in blocks {
                let key = (pending.disk, block);
                let changes = self.changes.entry(key).or_default();
                changes.under_way += 1;
                changes.last = pending.submitted;
                self.known.remove(&key);
                self.change_page(key, &pending);
            }
        }
        self.requests[id.0 as usize] = Some(pending);
    }

    fn range(&self, disk: u16, blocks: Range<usize>) -> impl Iterator<Item = Changes> + '_ {
        blocks.map(move |block| self.changes.get(&(disk, block)).copied().unwrap_or_default())
    }

    /// Returns the request with this ID, or `None` if it is not in flight.
    pub fn pending(&mut self, id: RequestId) -> Option<&mut Pending> {
        self.requests.get_mut(id.0 as usize)?.as_mut()
    }

    /// Ends a request, and returns it. Returns `None` if it is not in flight.
    pub fn end(&mut self, id: RequestId) -> Option<Pending> {
        let pending = self.requests.get_mut(id.0 as usize)?.take()?;
        if matches!(pending.state, DiskState::Hedged | DiskState::Starved) {
            self.losers.insert(id.0, pending.io);
        }
        if pending.modifies() {
            for block in touched(&pending.sectors) {
                self.changes.entry((pending.disk, block)).or_default().under_way -= 1;
            }
        }
        Some(pending)
    }

    /// Ends the disk I/O of a read that is already completed. Returns whether there was one.
    pub fn end_loser(&mut self, id: RequestId, io: IoId) -> bool {
        let was = self.losers.get(&id.0) == Some(&Some(io));
        if was {
            self.losers.remove(&id.0);
        }
        was
    }

    /// Cancels the disk I/O of a read that is already completed. Returns whether there was one.
    pub fn skip_loser(&mut self, id: RequestId) -> bool {
        let was = self.losers.get(&id.0) == Some(&None);
        if was {
            self.losers.remove(&id.0);
        }
        was
    }

    /// Takes `count` pages as the destination of a read, and returns their content.
    pub fn take_frames(&mut self, count: usize, leaves_pages: bool, random: &mut Random) -> Vec<Option<Block>> {
        let mut frame = || match random.below(16) {
            0 => std::array::from_fn(|_| Sector::garbage(random)),
            _ if leaves_pages => self.free.pop().unwrap_or([Sector::ZERO; BLOCK_SECTORS]),
            _ => [Sector::ZERO; BLOCK_SECTORS],
        };
        (0..count).map(|_| Some(frame())).collect()
    }

    /// Resets the requests for the next process, which receives those of the dead one in the order of arrival.
    pub fn begin_anew(&mut self) {
        self.known.clear();
        self.losers.clear();
        for pending in self.requests.iter_mut().flatten() {
            pending.taken = None;
            pending.state = DiskState::NotAsked;
            pending.io = None;
            pending.applied = None;
            pending.undisturbed = false;
            if pending.kind == Kind::Read {
                pending.buffer.fill(Sector::UNFILLED);
            }
        }
    }

    /// Returns the requests in flight, in the order of their arrival.
    #[must_use]
    pub fn by_arrival(&self) -> Vec<RequestId> {
        let pending = self.requests.iter().enumerate().filter_map(|(id, p)| Some((p.as_ref()?.submitted, id)));
        let mut pending: Vec<_> = pending.collect();
        pending.sort_unstable();
        pending.into_iter().filter_map(|(_, id)| u32::try_from(id).ok().map(RequestId)).collect()
    }

    /// Restarts the VM: no request is in flight, and its memory is empty.
    pub fn reboot(&mut self) {
        self.requests.fill_with(|| None);
        self.losers.clear();
        self.changes.values_mut().for_each(|changes| changes.under_way = 0);
        self.known.clear();
        self.pages.clear();
        self.order.clear();
        self.free.clear();
    }

    /// Returns the requests that the process has and that are not in progress at the disk.
    pub fn waiting(&self) -> impl Iterator<Item = &Pending> {
        self.requests.iter().flatten().filter(|pending| {
            pending.taken.is_some() && matches!(pending.state, DiskState::NotAsked | DiskState::Failed(_))
        })
    }

    /// Returns the number of requests in flight.
    pub fn in_flight(&self) -> usize {
        self.requests.iter().flatten().count()
    }

    /// Returns whether a modification of the block is in flight.
    #[must_use]
    pub fn is_changing(&self, key: Key) -> bool {
        self.changes.get(&key).is_some_and(|c| c.under_way > 0)
    }

    /// Returns whether no other request changed its blocks since it began.
    #[must_use]
    pub fn was_alone(&self, id: RequestId) -> bool {
        let Some(pending) = self.requests.get(id.0 as usize).and_then(Option::as_ref) else { return false };
        let blocks = touched(&pending.sectors);
        pending.undisturbed && self.range(pending.disk, blocks).all(|c| c.last <= pending.submitted)
    }

    /// Replaces the content that the engine must know of a block by `content`, which an I/O showed. Removes it if
    /// `content` is not `certain` or has no unique sector.
    pub fn note_known(&mut self, key: Key, content: Block, certain: bool) {
        self.known.remove(&key);
        // Content of several blocks may be forgotten along with one of them.
        if certain && content.iter().any(|s| s.is_unique()) {
            self.known.insert(key, content);
        }
    }

    /// Forgets all known content: the engine need not know any of it from now on.
    pub fn forget_known(&mut self) {
        self.known.clear();
    }

    /// Marks the disk's content as uncertain: the engine need not know any of it, and I/O in flight sets no fingerprints.
    pub fn disturb(&mut self, disk: u16) {
        self.known.retain(|key, _| key.0 != disk);
        for pending in self.requests.iter_mut().flatten().filter(|p| p.disk == disk) {
            pending.undisturbed = false;
        }
    }

    /// Returns whether a request for the disk is in flight.
    #[must_use]
    pub fn uses(&self, disk: u16) -> bool {
        self.requests.iter().flatten().any(|pending| pending.disk == disk)
    }

    /// Drops all pages of a disk, which was removed.
    pub fn drop_disk(&mut self, disk: u16) {
        self.disturb(disk);
        for key in self.order.iter().copied().filter(|key| key.0 == disk).collect::<Vec<_>>() {
            self.drop_page(key);
        }
    }

    /// Reports `content` as evicted. Returns whether the engine must know it; from now on it need not.
    pub fn take_known(&mut self, content: &Block) -> bool {
        let before = self.known.len();
        self.known.retain(|_, known| known != content);
        self.known.len() < before
    }

    /// Keeps a page of read data. Returns the page dropped for it, or `None` if there was room.
    pub fn hold(&mut self, key: Key, content: Block) -> Option<Block> {
        self.put(key, content);
        if self.pages.len() <= self.capacity {
            return None;
        }
        let oldest = *self.order.front()?;
        self.drop_page(oldest)
    }

    fn put(&mut self, key: Key, content: Block) {
        self.drop_page(key);
        self.pages.insert(key, content);
        self.order.push_back(key);
    }

    fn drop_page(&mut self, key: Key) -> Option<Block> {
        let page = self.pages.remove(&key)?;
        self.order.retain(|k| *k != key);
        if self.past.len() == PAST {
            self.past.pop_front();
        }
        self.past.push_back(page);
        if self.free.len() == PAST {
            self.free.clear();
        }
        self.free.push(page);
        Some(page)
    }

    /// Applies a modification to the page of a block, when it is submitted.
    fn change_page(&mut self, key: Key, pending: &Pending) {
        let start = key.1 * BLOCK_SECTORS;
        let whole = covered(&pending.sectors).contains(&key.1);
        match pending.kind {
            Kind::Write { .. } if whole => {
                let content = block_at(&pending.buffer, start - pending.sectors.start);
                self.put(key, content);
            }
            Kind::Write { .. } => {
                let Some(mut content) = self.pages.get(&key).copied() else { return };
                for (i, at) in pending.sectors.clone().enumerate() {
                    if (start..start + BLOCK_SECTORS).contains(&at) {
                        content[at - start] = pending.buffer[i];
                    }
                }
                self.put(key, content);
            }
            Kind::Discard | Kind::WriteZeroes { .. } => {
                self.drop_page(key);
            }
            Kind::Read | Kind::Flush => {}
        }
    }

    /// Returns a random page. Drops it unless `keep`. Returns `None` if there are no pages.
    pub fn any_page(&mut self, keep: bool, random: &mut Random) -> Option<Block> {
        if self.pages.is_empty() {
            return None;
        }
        let key = self.order[random.index(self.order.len())];
        if keep { self.pages.get(&key).copied() } else { self.drop_page(key) }
    }

    /// Returns a content that some page had in the past, or `None` if there is none.
    pub fn past_page(&mut self, random: &mut Random) -> Option<Block> {
        if self.past.is_empty() { None } else { Some(self.past[random.index(self.past.len())]) }
    }
}

impl Pending {
    /// Returns whether the request changes the disk's content.
    #[must_use]
    pub fn modifies(&self) -> bool {
        !matches!(self.kind, Kind::Read | Kind::Flush)
    }
}
