//! A pool of a model memory server, which keeps to the protocol, and [`Pool::lie`], which does not.
//!
//! Frames are plain values here; their bytes are tested in `remoca-protocol`.

use crate::content::{Block, Sector};
use crate::random::Random;
use crate::wire::ConnectionId;
use remoca_core::engine::{FetchId, PoolOffer};
use remoca_core::units::{Nanos, PageCount, SlotIndex};

/// A message of a client.
#[derive(Clone, Debug)]
pub enum Message {
    SetSize(PageCount),
    SendPage { slot: SlotIndex, page: Block },
    Move { from: SlotIndex, to: SlotIndex },
    Request { fetch: FetchId, slot: SlotIndex },
}

/// A message of a server.
#[derive(Clone, Debug)]
pub enum Reply {
    Sized(PageCount),
    Refused { available: PageCount },
    Page { fetch: FetchId, page: Block },
    Missing { fetch: FetchId },
}

/// One page of the pool, with its previous content.
#[derive(Clone, Debug, Default)]
struct Slot {
    page: Option<Block>,
    previous: Option<Block>,
}

impl Slot {
    fn set(&mut self, page: Option<Block>) {
        self.previous = self.page.take().or(self.previous);
        self.page = page;
    }
}

/// Error of a message that a correct client never sends.
#[derive(Debug, PartialEq, Eq)]
pub struct BadSlot(pub SlotIndex);

/// The pool of one client.
#[derive(Debug)]
pub struct Pool {
    pool: Vec<Slot>,
    generation: u64,
    sends_received: u64,
    /// Number of pages of a mapped pool that its process has counted.
    counted: u64,
    /// Newest connection to the pool; 0 if there is none.
    pub connection: ConnectionId,
    /// First message of that connection that never arrives; nor does any later one.
    pub lost_from: u64,
    /// Time at which the pool lost its client; `None` if it has one.
    pub abandoned: Option<Nanos>,
    /// Earliest arrival of messages still in flight on a broken connection.
    pub slow_until: Nanos,
    /// First connection that is not void.
    pub void_below: ConnectionId,
}

impl Default for Pool {
    fn default() -> Self {
        Self {
            pool: Vec::new(),
            generation: 1,
            sends_received: 0,
            counted: 0,
            connection: 0,
            lost_from: u64::MAX,
            abandoned: None,
            slow_until: Nanos(0),
            void_below: 0,
        }
    }
}

impl Pool {
    /// Returns an empty pool of this generation.
    #[must_use]
    pub fn of_generation(generation: u64) -> Self {
        Self { generation, ..Self::default() }
    }

    /// Counts the pages that were sent so far, as the process that writes to a mapped pool does at the end of its turns.
    pub fn count(&mut self) {
        self.counted = self.sends_received;
    }

    /// Ends the life of the process that counts the pages. It has counted all of them if it `ends_well`.
    pub fn end_count(&mut self, ends_well: bool) {
        if ends_well {
            self.count();
        }
        self.sends_received = self.counted;
    }

    /// Forgets how many pages were sent.
    pub fn forget_count(&mut self) {
        (self.sends_received, self.counted) = (0, 0);
    }

    /// Drops all pages, and voids connections below `void_below`. Generations of different servers are often equal, so
    /// one means nothing on another server.
    pub fn close(&mut self, void_below: ConnectionId) {
        self.generation += u64::from(!self.pool.is_empty() || self.sends_received > 0);
        self.pool.clear();
        (self.sends_received, self.counted) = (0, 0);
        self.connection = 0;
        self.abandoned = None;
        self.void_below = void_below;
    }

    /// Returns the offer in a WELCOME, with `free` pages left on the server.
    #[must_use]
    pub fn offer(&self, free: u32) -> PoolOffer {
        PoolOffer {
            generation: self.generation,
            npages: self.size(),
            available: PageCount(free),
            sends_received: self.sends_received,
        }
    }

    /// Returns the number of pages in the pool, empty ones included.
    #[must_use]
    pub fn size(&self) -> PageCount {
        PageCount(u32::try_from(self.pool.len()).unwrap_or(u32::MAX))
    }

    /// Returns the content of `slot`, or `None` if it is empty or not in the pool.
    #[must_use]
    pub fn page(&self, slot: SlotIndex) -> Option<Block> {
        self.pool.get(slot.0 as usize)?.page
    }

    /// Drops the pages of up to `count` slots.
    pub fn take(&mut self, count: u32, random: &mut Random) {
        if self.pool.is_empty() {
            return;
        }
        for _ in 0..count {
            let at = random.index(self.pool.len());
            self.pool[at].set(None);
        }
    }

    /// Executes `message`, with `free` pages left on the server. Returns the reply, or `None` if the message needs none.
    ///
    /// # Errors
    /// If the message names a slot outside the pool.
    pub fn handle(&mut self, message: Message, free: u32) -> Result<Option<Reply>, BadSlot> {
        match message {
            Message::SetSize(size) => Ok(Some(self.set_size(size, free))),
            Message::SendPage { slot, page } => {
                self.sends_received += 1;
                self.slot(slot)?.set(Some(page));
                Ok(None)
            }
            Message::Move { from, to } => {
                let page = self.slot(from)?.page;
                self.slot(to)?.set(page);
                self.slot(from)?.set(None);
                Ok(None)
            }
            Message::Request { fetch, slot } => Ok(Some(match self.slot(slot)?.page {
                Some(page) => Reply::Page { fetch, page },
                None => Reply::Missing { fetch },
            })),
        }
    }

    fn slot(&mut self, slot: SlotIndex) -> Result<&mut Slot, BadSlot> {
        self.pool.get_mut(slot.0 as usize).ok_or(BadSlot(slot))
    }

    fn set_size(&mut self, size: PageCount, free: u32) -> Reply {
        if size.0.saturating_sub(self.size().0) > free {
            return Reply::Refused { available: PageCount(free) };
        }
        self.pool.resize(size.0 as usize, Slot::default());
        Reply::Sized(size)
    }

    /// Turns an honest reply into the replies of a lying server: none, one or two.
    pub fn lie(&self, honest: Reply, random: &mut Random) -> Vec<Reply> {
        if !random.one_in(6) {
            return vec![honest];
        }
        match honest {
            Reply::Page { fetch, page } => self.lie_about_page(fetch, page, random),
            Reply::Missing { fetch } => vec![Reply::Page { fetch, page: garbage(random) }],
            Reply::Sized(_) => vec![Reply::Sized(PageCount(*random.pick(&[0, 1, 7, 40, u32::MAX])))],
            Reply::Refused { .. } => {
                vec![Reply::Refused { available: PageCount(*random.pick(&[0, 1, 7, 40, u32::MAX])) }]
            }
        }
    }

    fn lie_about_page(&self, fetch: FetchId, page: Block, random: &mut Random) -> Vec<Reply> {
        let honest = Reply::Page { fetch, page };
        let other = &self.pool[random.index(self.pool.len().max(1))];
        match random.below(8) {
            0 => {
                let mut wrong = page;
                wrong[random.index(wrong.len())] = Sector::garbage(random);
                vec![Reply::Page { fetch, page: wrong }]
            }
            1 => vec![Reply::Page { fetch, page: other.page.unwrap_or(page) }],
            2 => vec![Reply::Page { fetch, page: other.previous.unwrap_or(page) }],
            3 => vec![Reply::Page { fetch, page: garbage(random) }],
            4 => vec![honest.clone(), honest],
            5 => vec![],
            6 => vec![Reply::Missing { fetch }],
            _ => {
                let nobodys = FetchId(random.count(0..=20));
                vec![Reply::Page { fetch: nobodys, page }, honest]
            }
        }
    }

    /// Puts wrong numbers into a WELCOME.
    pub fn lie_about_pool(&self, honest: PoolOffer, random: &mut Random) -> PoolOffer {
        match random.below(8) {
            0 => PoolOffer { sends_received: random.below(honest.sends_received + 10), ..honest },
            3 => PoolOffer { sends_received: u64::MAX - random.below(3), ..honest },
            4 => PoolOffer { npages: PageCount(u32::MAX), ..honest },
            1 => PoolOffer { npages: PageCount(random.count(0..=64)), ..honest },
            5 => PoolOffer { available: PageCount(*random.pick(&[0, 1, 40, u32::MAX])), ..honest },
            2 => PoolOffer { generation: honest.generation.saturating_sub(1), ..honest },
            _ => honest,
        }
    }
}

fn garbage(random: &mut Random) -> Block {
    std::array::from_fn(|_| Sector::garbage(random))
}
