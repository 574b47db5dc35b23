//! How large the index is: as large as the cache and the guest's memory need it, up to what the operator allows.
//!
//! A new region is made on a thread, which takes its memory from the system; then the index moves into it, some nodes in each
//! turn (`remoca-core/src/index/region.rs`). A thread gives the old region back. So nothing here keeps a request waiting.
//! Whoever has the socket of a disk says how much memory the guest has, and that may be a lie: `guest_memory_max` bounds it,
//! and when the last front end has gone the index is as small as at the start. A command that needs a larger index is answered
//! when there is one.

use super::Driver;
use super::snapshot::HANDED_OVER;
use crate::control::Request;
use crate::state::StateFile;
use remoca_core::engine::IndexMaker;
use remoca_core::index::{CacheIndex, Layout};
use remoca_core::units::{PAGE_SIZE_U64, PageCount};
use remoca_io::wake::WakeUp;
use remoca_io::words::IndexMemory;
use remoca_protocol::control::{Command, Reply};
use std::io;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};

/// Nodes that are moved in one turn: less than a millisecond.
const NODES_PER_TURN: u32 = 4096;

/// Does work under a name, somewhere else or later; work that cannot be done is dropped.
pub type Aside = Box<dyn Fn(&str, Box<dyn FnOnce() + Send>) -> io::Result<()> + Send>;

/// Does work on a thread of its own.
///
/// # Errors
/// If the system has no thread left.
pub fn on_a_thread(name: &str, work: Box<dyn FnOnce() + Send>) -> io::Result<()> {
    std::thread::Builder::new().name(name.into()).spawn(work).map(drop)
}

/// What the driver knows of the index's size.
pub(super) struct IndexSize {
    pub(super) guest_memory_max: PageCount,
    aside: Aside,
    wake_up: WakeUp,
    stage: Option<Stage>,
    /// The layout for which there was no memory.
    refused: Option<Layout>,
    /// Commands that wait for a larger index, and the largest cache that they ask for.
    clients: Vec<Request>,
    pub(super) cache: PageCount,
    /// The operator was told that the guest is too large.
    told: bool,
}

enum Stage {
    Making { layout: Layout, region: Receiver<io::Result<Region>> },
    Moving { state: Option<StateFile> },
}

/// An empty index in memory that is there.
struct Region {
    index: CacheIndex<IndexMemory>,
    /// The file that its words are in.
    state: Option<StateFile>,
}

/// What a region is made from.
struct Plan {
    layout: Layout,
    maker: IndexMaker,
    /// Where the state file is.
    path: Option<PathBuf>,
    /// The index must become larger, if need be at the price of the state file.
    grows: bool,
}

impl Plan {
    fn make(self) -> io::Result<Region> {
        let file = self.path.map(|path| StateFile::create(&path, self.layout.disks(), self.layout.words()));
        let (state, words) = match file {
            Some(Ok((state, words))) => (Some(state), words),
            Some(Err(error)) if !self.grows => return Err(io::Error::other(error)),
            without => {
                let words = IndexMemory::new(self.layout.words())?;
                if let Some(Err(error)) = without {
                    tracing::warn!("{error}");
                }
                (None, words)
            }
        };
        Ok(Region { index: self.maker.make(self.layout, words), state })
    }
}

impl IndexSize {
    /// # Errors
    /// If the system has no eventfd left.
    pub(super) fn new(guest_memory_max: PageCount, aside: Aside) -> io::Result<Self> {
        Ok(Self {
            guest_memory_max,
            aside,
            wake_up: WakeUp::new()?,
            stage: None,
            refused: None,
            clients: Vec::new(),
            cache: PageCount(0),
            told: false,
        })
    }

    pub(super) fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake_up.fd()
    }

    /// Forgets what was for the former engine, and tells those who wait for it.
    pub(super) fn forget(&mut self) {
        self.stage = None;
        self.refused = None;
        self.refuse_clients();
    }

    /// Refuses the commands that wait for a larger index. One that is carried out after the disks have moved would undo what
    /// was asked for meanwhile.
    pub(super) fn refuse_clients(&mut self) {
        self.cache = PageCount(0);
        for client in self.clients.drain(..) {
            client.answer(Reply::Error { error: HANDED_OVER.into() });
        }
    }

    /// Keeps a command until there is a larger index, or no memory for it.
    pub(super) fn wait(&mut self, client: Request) {
        self.clients.push(client);
    }

    /// Gives memory back to the system, which takes a while for much of it: here and now if nobody else can.
    fn give_back(&self, memory: impl Send + 'static) {
        let _ = (self.aside)("give back", Box::new(move || drop(memory)));
    }

    /// Tries again: there may be memory by now.
    pub(super) fn try_again(&mut self) {
        self.refused = None;
    }
}

impl Driver {
    /// Returns the guest's memory as its hypervisor says it.
    pub(super) fn guest_memory_bytes(&self) -> u64 {
        self.disks.iter().map(|disk| disk.frontend.guest_memory_bytes()).max().unwrap_or(0)
    }

    /// Returns the memory that the index is made for: never less than the operator said, and never more than he allows.
    fn guest_memory(&self) -> PageCount {
        let pages = self.guest_memory_bytes() / PAGE_SIZE_U64;
        let pages = PageCount(u32::try_from(pages).unwrap_or(u32::MAX));
        pages.min(self.index_size.guest_memory_max).max(self.migration.config().guest_memory)
    }

    /// Returns the layout that the index should have, if that is another one, and whether it must become larger.
    fn wanted_layout(&self) -> Option<(Layout, bool)> {
        let (cache, memory) = (self.engine.status().wanted.max(self.index_size.cache), self.guest_memory());
        let is_tried = |layout: &Layout| self.index_size.refused == Some(*layout);
        if cache.0 > 0
            && let Some(layout) = self.engine.needs_layout(cache, memory)
        {
            return Some((layout, true)).filter(|_| !is_tried(&layout));
        }
        // A front end that has just come says it in a moment.
        let is_known = self.guest_memory_bytes() > 0 || !self.disks.iter().any(|disk| disk.frontend.is_connected());
        let layout = self.engine.spare_layout(memory).filter(|layout| is_known && !is_tried(layout));
        layout.map(|layout| (layout, false))
    }

    fn plan(&self, layout: Layout, grows: bool) -> Plan {
        let path = self.warmth.path().map(Into::into);
        Plan { layout, maker: self.engine.index_maker(), path, grows }
    }

    /// Begins to make the index as large as it should be, unless that is under way.
    pub(super) fn fit_index(&mut self) {
        self.tell_of_large_guest();
        // What is offered to another process is as large as was said.
        if self.index_size.stage.is_some() || !self.migration.is_idle() {
            return;
        }
        let Some((layout, grows)) = self.wanted_layout() else { return };
        let (sender, region) = sync_channel(1);
        let (plan, wake_up) = (self.plan(layout, grows), self.index_size.wake_up.wake().clone());
        let work = move || {
            // Nobody listens if the process has lost its disks meanwhile.
            let _ = sender.send(plan.make());
            remoca_io::wake::raise(&wake_up);
        };
        match (self.index_size.aside)("index", Box::new(work)) {
            Ok(()) => self.index_size.stage = Some(Stage::Making { layout, region }),
            Err(error) => self.refuse_layout(layout, &error),
        }
    }

    /// Makes the index large enough for a cache of `cache` pages at once: nobody is served yet.
    pub(super) fn fit_index_now(&mut self, cache: PageCount) {
        let Some(layout) = self.engine.needs_layout(cache, PageCount(0)) else { return };
        match self.plan(layout, true).make() {
            Ok(Region { index, state }) => {
                self.engine.begin_move(index);
                self.end_move(state);
            }
            Err(error) => self.refuse_layout(layout, &error),
        }
    }

    fn refuse_layout(&mut self, layout: Layout, error: &io::Error) {
        tracing::warn!("no memory for another index: {error}. The cache works on with the one there is.");
        self.index_size.refused = Some(layout);
    }

    /// Takes the region that a thread has made, or failed to make.
    pub(super) fn take_region(&mut self) {
        self.index_size.wake_up.clear();
        let Some(Stage::Making { layout, region }) = &self.index_size.stage else { return };
        let (layout, made) = (*layout, region.try_recv());
        if matches!(made, Err(TryRecvError::Empty)) {
            return;
        }
        self.index_size.stage = None;
        let is_wanted = self.wanted_layout().is_some_and(|(wanted, _)| wanted == layout);
        match made.unwrap_or_else(|_| Err(io::Error::other("its thread has died"))) {
            Ok(Region { index, state }) if is_wanted && self.migration.is_idle() => {
                self.engine.begin_move(index);
                self.index_size.stage = Some(Stage::Moving { state });
            }
            Ok(region) => {
                // The next one may be made before this one is given back.
                region.state.iter().for_each(StateFile::make_room_beside);
                self.index_size.give_back(region);
            }
            Err(error) => self.refuse_layout(layout, &error),
        }
        self.go_on_with_size();
    }

    /// Returns whether a piece of the index is to be moved in this turn.
    pub(super) fn is_moving_index(&self) -> bool {
        matches!(self.index_size.stage, Some(Stage::Moving { .. })) && self.migration.is_idle() && !self.is_draining()
    }

    /// Moves the next piece of the index.
    pub(super) fn move_index(&mut self) {
        if !self.is_moving_index() || !self.engine.move_index(NODES_PER_TURN) {
            return;
        }
        if let Some(Stage::Moving { state }) = self.index_size.stage.take() {
            self.end_move(state);
        }
        self.go_on_with_size();
    }

    fn end_move(&mut self, state: Option<StateFile>) {
        let old = self.engine.finish_move();
        self.follow_index(state);
        self.index_size.give_back(old);
    }

    /// Continues what a change of size was for, and looks at what has changed meanwhile.
    fn go_on_with_size(&mut self) {
        if self.index_size.stage.is_some() {
            return;
        }
        self.index_size.cache = PageCount(0);
        for client in std::mem::take(&mut self.index_size.clients) {
            if self.waits_for_index(&client.command) {
                self.index_size.clients.push(client);
            } else {
                let reply = self.obey(&client);
                client.answer(reply);
            }
        }
        self.fit_index();
    }

    /// Returns whether a command needs a larger index, which is being made then.
    pub(super) fn waits_for_index(&mut self, command: &Command) -> bool {
        let Command::Set { servers: None, cache_bytes, enabled } = command else { return false };
        let Ok(size) = cache_bytes.map_or(Ok(self.cache), super::cache_pages) else { return false };
        let on = enabled.unwrap_or(self.engine.status().enabled);
        if !on || self.link.is_none() || size <= self.engine.index().layout().slot_limit() {
            return false;
        }
        self.index_size.cache = self.index_size.cache.max(size);
        self.fit_index();
        // While disks are handed over no index is made larger.
        self.index_size.stage.is_some() && self.migration.is_idle()
    }

    fn tell_of_large_guest(&mut self) {
        let (bytes, indexed) = (self.guest_memory_bytes(), self.guest_memory());
        let indexed = u64::from(indexed.0) * PAGE_SIZE_U64;
        if bytes > indexed && !std::mem::replace(&mut self.index_size.told, true) {
            tracing::warn!(
                "the guest has {} MiB of memory, and the index is made for {} MiB: fewer of its blocks are known, so fewer reads \
                 hit. If it is to have that much, say --guest-memory-max.",
                bytes >> 20,
                indexed >> 20
            );
        }
    }
}
