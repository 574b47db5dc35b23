//! The size of the index: as large as the cache and the guest's memory require, up to what the operator allows.
//!
//! A new region is made on a thread, which takes its memory from the system. The index then moves into it, some entries
//! in each turn (`remoca-core/src/index/moves.rs`). Another thread gives the old region back. No request has to wait
//! for any of this. Whoever has the socket of a disk reports how much memory the guest has, and that may be a lie.
//! `guest_memory_max` is its limit, and when the last front end has disconnected the index is as small as at the start.
//! A command that needs a larger index is answered when there is one.
//!
//! Without room for a larger state file the index is made without one. Then it moves, as large as it is, into a new state file as soon
//! as there is room.

use super::guests::Guests;
use super::host::Host;
use super::poller::Source;
use super::tiers::TierSizes;
use super::warmth::Warmth;
use crate::state::{StateError, StateFile};
use remoca_core::engine::{DiskEngine, EngineConfig, IndexMaker, layout};
use remoca_core::index::{CacheIndex, Layout};
use remoca_core::units::{PAGE_SIZE_U64, PageCount};
use remoca_io::control::ControlRequest;
use remoca_io::show::show_size;
use remoca_io::wake::WakeUp;
use remoca_io::words::{IndexMemory, check_half_available};
use remoca_protocol::control::{Command, Reply};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::time::{Duration, Instant};

/// Number of entries moved in one turn, which takes about an eighth of a millisecond in a large index.
const ENTRIES_PER_TURN: u32 = 512;
/// Time between two looks whether there is room again for a state file that was lost.
const LOOK_FOR_ROOM_EVERY: Duration = Duration::from_secs(10);
/// Why a larger cache is refused at the moment.
pub(super) const HANDED_OVER: &str = "the disks are being handed over: try again when that is done";
/// Why a command that waited for a larger index is refused after a later one.
const OVERTAKEN: &str = "another command has set the same meanwhile: look at `remoca status`";

type Engine = DiskEngine<IndexMemory>;

/// Function that runs work under a name, somewhere else or later. Work that cannot be done is dropped.
pub type Aside = Box<dyn Fn(&str, Box<dyn FnOnce() + Send>) -> io::Result<()> + Send>;

/// Runs `work` on a thread of its own with this name.
///
/// # Errors
/// If the system has no thread left.
pub fn on_a_thread(name: &str, work: Box<dyn FnOnce() + Send>) -> io::Result<()> {
    std::thread::Builder::new().name(name.into()).spawn(work).map(drop)
}

/// Answers a command that has waited for a larger index. Logs what came of it as well: its client may have given up.
pub(super) fn answer_late(client: ControlRequest, reply: Reply) {
    match &reply {
        Reply::Status(status) => {
            let [cache, local] = [status.cache.wanted_bytes, status.cache.local_wanted_bytes].map(show_size);
            tracing::info!("a change that waited for a larger index is done: cache {cache}, local tier {local}");
        }
        Reply::Error { error } => tracing::warn!("a change that waited for a larger index is refused: {error}"),
        Reply::Curve(_) => {}
    }
    client.answer(reply);
}

/// What the driver knows of the sizes of cache and index.
pub(super) struct IndexSize {
    /// Sizes that "on" restores.
    tiers: TierSizes,
    /// Minimum of the guest memory that is indexed: a guest with less is indexed as if it had this much.
    guest_memory_min: PageCount,
    /// Maximum of the guest memory that is indexed: a guest with more is indexed as if it had this much.
    guest_memory_max: PageCount,
    aside: Aside,
    wake_up: WakeUp,
    stage: Option<Stage>,
    /// The layout for which there was no memory, and what the system said.
    refused: Option<(Layout, String)>,
    /// Number of chunks that no pool had when [`Self::fit`] last looked. When it is another one, the index may be too large.
    free_chunks: usize,
    /// Commands that wait for a larger index, and the largest cache that they ask for.
    clients: Vec<ControlRequest>,
    awaited: PageCount,
    /// Whether the operator was told that the guest is too large.
    told: bool,
    /// When to look again for room for a state file that was lost.
    look_at: Option<Instant>,
}

enum Stage {
    Making {
        layout: Layout,
        /// Path of the state file; `None` if there is none.
        path: Option<PathBuf>,
        region: Receiver<io::Result<Region>>,
        /// Whether it is to have the present size, in a state file again.
        is_again: bool,
    },
    Moving {
        state: Result<Option<StateFile>, String>,
    },
}

/// An empty index in memory that is already allocated.
pub(super) struct Region {
    pub(super) index: CacheIndex<IndexMemory>,
    /// State file that holds its words; `None` if they are in private memory, and there is to be no state file. An error is why
    /// there is none.
    pub(super) state: Result<Option<StateFile>, String>,
}

/// The plan for a region.
struct Plan {
    layout: Layout,
    maker: IndexMaker,
    /// Path of the state file; `None` if there is to be none.
    path: Option<PathBuf>,
    /// Whether there is a state file at the path now.
    is_kept: bool,
    /// Whether the index is made without a state file if need be: it must become larger, or has none now.
    grows: bool,
}

impl Plan {
    fn new(layout: Layout, grows: bool, engine: &Engine, warmth: &Warmth) -> Self {
        let (path, index, is_kept) = (warmth.place().map(Into::into), engine.index(), warmth.is_kept());
        // Without the state file a successor would not know of it.
        let has_failed = is_kept && index.disks().any(|disk| index.flush_failed(disk).is_some());
        Self { layout, maker: engine.index_maker(), path, is_kept, grows: grows && !has_failed }
    }

    /// Creates the state file.
    fn create(&self, path: &Path) -> Result<(StateFile, IndexMemory), StateError> {
        if !self.is_kept {
            // Nothing has kept other processes from the path since.
            StateFile::check_free(path)?;
        }
        StateFile::create(path, self.layout.disks(), self.layout.words())
    }

    fn make(self) -> io::Result<Region> {
        let words = self.layout.words();
        let (state, words) = match self.path.as_deref().map(|path| self.create(path)) {
            Some(Ok((state, words))) => (Ok(Some(state)), words),
            Some(Err(error)) if !self.grows => return Err(io::Error::other(error)),
            Some(Err(error)) => {
                // The rest of the host needs memory as well.
                let why = "the state file cannot be made, and without one";
                check_half_available(words.saturating_mul(4))
                    .map_err(|error| io::Error::new(error.kind(), format!("{why} {error}")))?;
                (Err(error.to_string()), IndexMemory::new(words)?)
            }
            None => (Ok(None), IndexMemory::new(words)?),
        };
        Ok(Region { index: self.maker.make(self.layout, words), state })
    }
}

impl IndexSize {
    /// Returns the function that runs work outside the I/O thread.
    pub(super) fn aside(&self) -> &Aside {
        &self.aside
    }

    /// Returns the sizes of a process whose cache has these `tiers` when it is on.
    pub(super) fn new(
        tiers: TierSizes,
        guest_memory_min: PageCount,
        guest_memory_max: PageCount,
        aside: Aside,
    ) -> io::Result<Self> {
        Ok(Self {
            tiers,
            guest_memory_min,
            guest_memory_max,
            aside,
            wake_up: WakeUp::new()?,
            stage: None,
            refused: None,
            free_chunks: 0,
            clients: Vec::new(),
            awaited: PageCount(0),
            told: false,
            look_at: None,
        })
    }

    /// Registers the wake-up for finished regions with the poller.
    pub(super) fn register(&self, host: &Host) -> io::Result<()> {
        host.watch(self.wake_up.fd(), Source::Index)
    }

    /// Returns the descriptor that is readable when a region is made.
    #[cfg(test)]
    pub(super) fn wake_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.wake_up.fd()
    }

    /// Returns the sizes that "on" restores.
    pub(super) fn tiers(&self) -> TierSizes {
        self.tiers
    }

    /// Sets the sizes that "on" restores.
    pub(super) fn set_tiers(&mut self, tiers: TierSizes) {
        self.tiers = tiers;
    }

    /// Returns the maximum number of words for an index of this process, whatever a peer says: with its cache, and with
    /// the largest guest that its operator allows.
    pub(super) fn words_max(&self, config: &EngineConfig) -> u64 {
        let guest_memory = self.guest_memory_max.max(config.guest_memory);
        let of_config = TierSizes { cache: config.cache, local: config.local };
        let cache = PageCount(self.tiers.sum().max(of_config.sum()).0.next_power_of_two());
        layout(&EngineConfig { cache, local: PageCount(0), guest_memory, ..*config }).words() as u64
    }

    /// Discards what was made for the previous engine, and refuses the commands that wait for it.
    pub(super) fn forget(&mut self) {
        if let Some(Stage::Making { path: Some(path), .. }) = self.stage.take() {
            // Its thread may take long, and the disks may be back before it has ended.
            StateFile::free_name_beside(&path);
        }
        self.refused = None;
        self.refuse_clients();
    }

    /// Refuses the commands that wait for a larger index. A command executed after the disks have moved would undo what
    /// was set in the meantime.
    pub(super) fn refuse_clients(&mut self) {
        self.awaited = PageCount(0);
        for client in self.clients.drain(..) {
            answer_late(client, Reply::Error { error: HANDED_OVER.into() });
        }
    }

    /// Refuses the commands that wait and that would undo one which sets these now: they came before it.
    pub(super) fn refuse_overtaken(&mut self, bytes: Option<u64>, local: Option<u64>, on: Option<bool>) {
        let is_overtaken = |client: &ControlRequest| {
            let Command::Set { cache_bytes, local_bytes, enabled, .. } = &client.command else { return false };
            cache_bytes.and(bytes).is_some() || local_bytes.and(local).is_some() || enabled.and(on).is_some()
        };
        let (overtaken, others): (Vec<_>, Vec<_>) = self.clients.drain(..).partition(is_overtaken);
        self.clients = others;
        if self.clients.is_empty() {
            self.awaited = PageCount(0);
        }
        for client in overtaken {
            answer_late(client, Reply::Error { error: OVERTAKEN.into() });
        }
    }

    /// Keeps a command until there is a larger index, or until it is known that there is no memory for one.
    pub(super) fn wait(&mut self, client: ControlRequest) {
        self.clients.push(client);
    }

    /// Removes and returns the commands that wait, or returns `None` while the index is being made or moved.
    pub(super) fn take_clients(&mut self) -> Option<Vec<ControlRequest>> {
        if self.is_busy() {
            return None;
        }
        self.awaited = PageCount(0);
        Some(std::mem::take(&mut self.clients))
    }

    /// Makes [`Self::fit`] aim for an index that is large enough for a cache of this size.
    pub(super) fn aim_at(&mut self, cache: PageCount) {
        self.awaited = self.awaited.max(cache);
    }

    /// Returns whether another region is being made, or the index is moving to it.
    pub(super) fn is_busy(&self) -> bool {
        self.stage.is_some()
    }

    /// Gives memory back to the system, which takes a while if it is much. This is done elsewhere if possible, and on
    /// this thread otherwise.
    pub(super) fn give_back(&self, memory: impl Send + 'static) {
        let _ = (self.aside)("give back", Box::new(move || drop(memory)));
    }

    /// Allows another attempt at a layout that was refused: there may be memory by now.
    pub(super) fn try_again(&mut self) {
        self.refused = None;
    }

    /// Returns the guest's memory as [`Self::guest_memory`] does, or `None` while nothing is known of it: a front end that has just
    /// connected reports it in a moment, and an NBD client never.
    pub(super) fn known_guest_memory(&self, guests: &Guests) -> Option<PageCount> {
        (guests.memory_bytes() > 0 || !guests.is_connected()).then(|| self.guest_memory(guests))
    }

    /// Returns the guest memory that the index is made for: never less than the operator said, and never more than the
    /// operator allows.
    fn guest_memory(&self, guests: &Guests) -> PageCount {
        // Another process reports this number, which may be anything. It has a limit either way.
        let pages = guests.memory_bytes() / PAGE_SIZE_U64;
        let pages = PageCount(u32::try_from(pages).unwrap_or(u32::MAX));
        pages.min(self.guest_memory_max).max(self.guest_memory_min)
    }

    /// Returns the layout that the index should change to, and whether it must become larger. Returns `None` if the
    /// layout is right as it is, or if there was no memory for that one.
    fn wanted_layout(&self, engine: &Engine, guests: &Guests) -> Option<(Layout, bool)> {
        let status = engine.status();
        let wanted = TierSizes { cache: status.wanted, local: status.local_wanted }.sum();
        // An index that came from another process may have no room for all of the cache yet.
        let wanted = if status.enabled { wanted.max(self.tiers.sum()) } else { wanted };
        let (cache, memory) = (wanted.max(self.awaited), self.guest_memory(guests));
        let is_tried = |layout: &Layout| self.refused.as_ref().is_some_and(|(refused, _)| refused == layout);
        if cache.0 > 0
            && let Some(layout) = engine.needs_layout(cache, memory)
        {
            return Some((layout, true)).filter(|_| !is_tried(&layout));
        }
        let memory = self.known_guest_memory(guests).unwrap_or(engine.index().layout().resident_limit());
        let layout = engine.spare_layout(cache.max(self.tiers.sum()), memory);
        layout.filter(|layout| !is_tried(layout)).map(|layout| (layout, false))
    }

    /// Starts to give the index the size that it should have, unless that is in progress or `is_idle` is false.
    /// `is_idle` says that no other process is concerned with the disks.
    pub(super) fn fit(&mut self, is_idle: bool, engine: &Engine, guests: &Guests, warmth: &Warmth) {
        self.tell_of_large_guest(guests);
        // An index that is offered to another process keeps the size that was announced.
        if self.stage.is_some() || !is_idle {
            return;
        }
        self.free_chunks = engine.index().free_chunks();
        let Some((layout, grows)) = self.wanted_layout(engine, guests) else { return };
        let plan = Plan::new(layout, grows || warmth.loss().is_some(), engine, warmth);
        if let Err(error) = self.begin(plan, false) {
            self.refuse(layout, &error);
        }
    }

    /// Starts to move the index into a state file if the former one was lost, unless something is in progress or `is_idle` is
    /// false. Tries it at intervals. There is room as soon as the memory of the former file is given back, or somebody makes room.
    pub(super) fn look_for_room(&mut self, is_idle: bool, engine: &Engine, warmth: &Warmth, now: Instant) {
        if warmth.loss().is_none() || self.look_at.is_some_and(|at| at > now) {
            return;
        }
        self.look_at = Some(now + LOOK_FOR_ROOM_EVERY);
        if self.stage.is_none() && is_idle {
            // If there is no thread for it, it is tried again.
            let _ = self.begin(Plan::new(engine.index().layout(), false, engine, warmth), true);
        }
    }

    /// Returns when [`Self::look_for_room`] has something to do, or `None` if the state file is not lost.
    pub(super) fn next_deadline(&self, warmth: &Warmth) -> Option<Instant> {
        self.look_at.filter(|_| warmth.loss().is_some())
    }

    /// Has a thread make a region.
    fn begin(&mut self, plan: Plan, is_again: bool) -> io::Result<()> {
        let (sender, region) = sync_channel(1);
        let (layout, path, wake_up) = (plan.layout, plan.path.clone(), self.wake_up.wake().clone());
        let work = move || {
            // The receiver is gone if the process has lost its disks in the meantime.
            let _ = sender.send(plan.make());
            remoca_io::wake::raise(&wake_up);
        };
        (self.aside)("index", Box::new(work))?;
        self.stage = Some(Stage::Making { layout, path, region, is_again });
        Ok(())
    }

    /// Returns whether pools have changed their sizes since [`Self::fit`] looked, and are done with it.
    pub(super) fn has_settled(&self, engine: &Engine) -> bool {
        engine.index().free_chunks() != self.free_chunks && !engine.are_sizes_changing()
    }

    /// Makes a region for a cache of `cache` pages. This blocks, but no guest is served yet. Returns `None` if the
    /// index is large enough, or if there is no memory.
    pub(super) fn make_now(&mut self, cache: PageCount, engine: &Engine, warmth: &Warmth) -> Option<Region> {
        let layout = engine.needs_layout(cache, PageCount(0))?;
        let made = Plan::new(layout, true, engine, warmth).make();
        made.inspect_err(|error| self.refuse(layout, error)).ok()
    }

    fn refuse(&mut self, layout: Layout, error: &io::Error) {
        tracing::warn!("no memory for another index: {error}. The cache works on with the one there is.");
        self.refused = Some((layout, error.to_string()));
    }

    /// Returns why a larger index could not be made, or an empty text if none was refused.
    pub(super) fn refusal(&self) -> String {
        self.refused.as_ref().map_or(String::new(), |(_, error)| format!(": {error}"))
    }

    /// Takes the region that a thread has made, or its failure to make one. Starts to move the index if the region is
    /// still wanted, and gives it back otherwise. Returns whether the thread has answered.
    pub(super) fn take_region(&mut self, is_idle: bool, engine: &mut Engine, guests: &Guests) -> bool {
        self.wake_up.clear();
        let Some(Stage::Making { layout, region, is_again, .. }) = &self.stage else { return false };
        let (layout, is_again, made) = (*layout, *is_again, region.try_recv());
        if matches!(made, Err(TryRecvError::Empty)) {
            return false;
        }
        self.stage = None;
        let is_wanted = is_again || self.wanted_layout(engine, guests).is_some_and(|(wanted, _)| wanted == layout);
        match made.unwrap_or_else(|_| Err(io::Error::other("its thread has died"))) {
            Ok(Region { index, state }) if is_wanted && is_idle => {
                engine.begin_move(index);
                self.stage = Some(Stage::Moving { state });
            }
            Ok(region) => {
                // The next one may be made before this one is given back.
                region.state.iter().flatten().for_each(StateFile::make_room_beside);
                self.give_back(region);
            }
            // It is said already that there is no room.
            Err(error) if is_again => tracing::debug!("no state file yet: {error}"),
            Err(error) => self.refuse(layout, &error),
        }
        true
    }

    /// Returns whether there is a region that the index is to move to.
    pub(super) fn has_region(&self) -> bool {
        matches!(self.stage, Some(Stage::Moving { .. }))
    }

    /// Moves the next piece of the index. After the last piece, returns the state file of the new region, as [`Region`] has it.
    /// Returns `None` before.
    pub(super) fn move_piece(&mut self, engine: &mut Engine) -> Option<Result<Option<StateFile>, String>> {
        if !self.has_region() || !engine.move_index(ENTRIES_PER_TURN) {
            return None;
        }
        match self.stage.take() {
            Some(Stage::Moving { state }) => Some(state),
            _ => None,
        }
    }

    fn tell_of_large_guest(&mut self, guests: &Guests) {
        let (bytes, indexed) = (guests.memory_bytes(), self.guest_memory(guests));
        let indexed = u64::from(indexed.0) * PAGE_SIZE_U64;
        if bytes > indexed && !std::mem::replace(&mut self.told, true) {
            tracing::warn!(
                "the guest has {} of memory, and the index is made for {}: fewer of its blocks are known, so fewer reads \
                 hit. If it is to have that much, say --guest-memory-max.",
                show_size(bytes),
                show_size(indexed)
            );
        }
    }
}
