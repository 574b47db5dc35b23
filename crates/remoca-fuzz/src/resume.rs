//! An index from a previous process or from a stranger: words of the input replace some of the index's own. Then an
//! index, or an engine with its guest, disk and servers, continues with it.
//!
//! With no word changed, this is a restart after a kill, and the engine target's assertions on reads hold across it.

use crate::engine::{self, BLOCKS, DISK, World};
use crate::source::Source;
use remoca_core::engine::DiskEngine;
use remoca_core::fingerprint::{Fingerprint, Fingerprinter};
use remoca_core::index::{CacheIndex, DISK_BYTES_MAX, DiskState, LogEnd, Move, Offer, Origin, Place, Pool, Tiers};
use remoca_core::units::{BlockId, BlockNumber, DiskIndex, PAGE_SIZE, PageCount, PoolIndex, PoolSet, SlotIndex};
use std::collections::{HashMap, HashSet, VecDeque};

type Index = CacheIndex<Vec<u32>>;

/// Position of the first pool in the words.
const POOLS_AT: usize = 32;
/// Position of the checksum of a closed index.
const CLOSED: usize = 26;
/// Pool of the index that is tested alone.
const POOL: PoolIndex = PoolIndex(0);
/// Position and length of the log in the words of an index for one disk, and how many of its words may change.
const LOG_AT: usize = POOLS_AT + 16 * 16 + 30;
const LOG_WORDS: usize = 3 * 16 * 1024;
const LOG_SHOWN: usize = 32;

/// Bits of the first byte; the upper four are the options of [`World::new`].
const EMPTY: u8 = 1;
const INDEX_ALONE: u8 = 2;
const IN_GOOD_ORDER: u8 = 4;
const NONSENSE: u8 = 8;

/// The disk has the same number in both processes.
const SAME: [(DiskIndex, DiskIndex); 1] = [(DISK, DISK)];

pub fn run(data: &[u8]) {
    let mut source = Source(data);
    let mode = source.byte();
    let mut former = World::new(mode >> 4);
    if mode & EMPTY == 0 {
        act(&mut former, &mut Source(&busy_life()), usize::MAX);
    }
    let steps = usize::from(source.below(32));
    act(&mut former, &mut source, steps);
    if mode & IN_GOOD_ORDER != 0 {
        former.engine.end();
    }
    let mut words = former.engine.index().words().clone();
    if mode & NONSENSE != 0 {
        fill(&mut words, source.word());
    }
    let changed = mode & NONSENSE != 0 || change(&mut words, &mut source);
    if changed {
        // Otherwise they would be taken as they are.
        words[CLOSED] = 0;
    }
    let origin = if changed || mode & IN_GOOD_ORDER == 0 { Origin::Peer(&SAME) } else { Origin::Own };
    if mode & INDEX_ALONE != 0 {
        return alone(words, origin, changed, &mut source);
    }
    let config = engine::config(mode >> 4 & 1 == 0);
    let Ok(engine) = DiskEngine::resume(&config, words, origin) else {
        return assert!(changed, "what a process left can be resumed from");
    };
    check(engine.index());
    former.succeed(engine, !changed);
    act(&mut former, &mut source, usize::MAX);
    former.finish();
    former.come_to_rest();
    former.engine.end();
    come_back(former.engine.index());
}

/// Performs `steps` steps, or fewer if the input ends.
fn act(world: &mut World, source: &mut Source, steps: usize) {
    for _ in 0..steps {
        if source.is_empty() {
            return;
        }
        world.step(source);
        check(world.engine.index());
    }
}

/// Returns the events of a process in which five blocks are written with five contents, read, and evicted.
fn busy_life() -> Vec<u8> {
    let (write, read) = (|content: u8| [0, content, 0, 3, content], |content: u8| [0, content, 0, 0, 0]);
    (1..6)
        .flat_map(|content| [&write(content)[..], &[3, 0, 1], &read(content), &[3, 0, 1, 5, content]].concat())
        .collect()
}

/// Returns a position in the words. Positions in the log are only at its ends.
fn place(words: &[u32], number: usize) -> usize {
    let shown = words.len() - LOG_WORDS + LOG_SHOWN;
    match number % shown {
        at if at < LOG_AT + LOG_SHOWN / 2 => at,
        at => at + LOG_WORDS - LOG_SHOWN,
    }
}

/// Replaces some words by numbers. Returns whether there were any.
fn change(words: &mut [u32], source: &mut Source) -> bool {
    let count = source.below(16);
    for _ in 0..count {
        let (kind, number) = (source.byte(), source.word());
        let (at, from) = (place(words, number as usize & 0xffff), place(words, number as usize >> 16));
        match kind % 8 {
            0..3 => words[at] = number >> 24,
            3 => words[at] = source.word(),
            4 => words[at] = u32::MAX - (number >> 24),
            5 => words[at] ^= 1 << (number >> 27),
            6 => words[at] = words[from],
            // An entry with some of the next.
            _ => words.copy_within(from.min(words.len() - 7)..from.min(words.len() - 7) + 7, at.min(words.len() - 7)),
        }
    }
    count > 0
}

/// Fills all words with nonsense, except the counts and the key.
fn fill(words: &mut [u32], seed: u32) {
    let mut state = u64::from(seed);
    for word in &mut words[8..] {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        let [_, kind, small, _, bytes @ ..] = state.to_le_bytes();
        *word = if kind & 1 == 0 { u32::from(small % 40) } else { u32::from_le_bytes(bytes) };
    }
    words[8] = 1;
}

/// Checks the invariants of an index.
fn check(index: &Index) {
    let mut contents = HashSet::new();
    for pool in PoolIndex::all() {
        let (counts, capacity) = (index.pool_slot_counts(pool), index.capacity(pool).0);
        assert_eq!(counts.free + counts.used + counts.draining, capacity, "{counts:?}");
        let queue: Vec<_> = index.queue(pool).take(capacity as usize + 1).collect();
        let is_used = queue.len() == counts.used as usize;
        assert!(is_used || index.is_resizing() && queue.len() < counts.used as usize, "the queue is what is used");
        for (slot, content) in queue {
            assert!(index.place_of(slot).is_some_and(|(of, local)| of == pool && local.0 < capacity));
            assert_eq!(index.cached(content), Some(slot), "a content is found where it is");
            assert!(contents.insert(content), "one slot for each content");
        }
    }
    assert!(index.known_blocks() <= index.layout().entry_limit());
    let known = blocks().filter(|block| index.known(*block).is_some()).count();
    assert!(known <= index.known_blocks().0 as usize);
}

fn blocks() -> impl Iterator<Item = BlockId> {
    (0..BLOCKS).map(block)
}

fn block(bno: u8) -> BlockId {
    BlockId { disk: DISK, bno: BlockNumber(bno.into()) }
}

fn prints() -> Fingerprinter {
    Fingerprinter::new(&engine::config(true).key)
}

fn resume(words: Vec<u32>, origin: Origin<'_>) -> Option<Index> {
    let config = engine::config(true);
    let mut index = CacheIndex::resume(words, origin, config.disks, config.seed, prints().zero()).ok()?;
    // As at a start: the former process may have begun to forget something.
    index.cut(u32::MAX);
    match index.disk_state(DISK) {
        DiskState::Absent => index.take_up_disk(DISK, DISK_BYTES_MAX),
        DiskState::Present { .. } | DiskState::Leaving => {}
    }
    Some(index)
}

/// Checks that a closed index resumes unchanged, whether it is taken as it is or rebuilt.
fn come_back(closed: &Index) {
    let mut open = closed.words().clone();
    open[CLOSED] = 0;
    let words = || closed.words().clone();
    for (words, origin) in [
        (words(), Origin::Own),
        (words(), Origin::Peer(&SAME)),
        (open.clone(), Origin::Own),
        (open, Origin::Peer(&SAME)),
    ] {
        let again = resume(words, origin).unwrap();
        check(&again);
        assert_eq!(again.slot_counts(), closed.slot_counts(), "{origin:?}");
        assert!(again.pages().eq(closed.pages()), "{origin:?}: another queue");
        assert!(again.pools().eq(closed.pools()), "{origin:?}: other pools");
        assert_eq!(again.known_blocks(), closed.known_blocks());
        assert!(blocks().all(|block| again.known(block) == closed.known(block)), "{origin:?}: other contents");
        assert_eq!(again.swap_areas(DISK), closed.swap_areas(DISK));
        assert_eq!(again.flush_failed(DISK), closed.flush_failed(DISK));
        fill_up(again);
    }
}

/// Checks that everything that counts as free can be used.
fn fill_up(mut index: Index) {
    let unknown = |number: u32| {
        let content = Fingerprint([number, u32::MAX, number]);
        (BlockId { disk: DISK, bno: BlockNumber((1 << 39) + u64::from(number)) }, content)
    };
    for (number, used) in (0..index.slot_counts().free).zip(index.slot_counts().used..) {
        let (block, content) = unknown(number);
        index.learn(block, content);
        assert!(matches!(index.offer(content, Place::Tail, PoolSet::ALL), Offer::Admitted(_)), "there is a free slot");
        assert_eq!(index.slot_counts().used, used + 1, "nothing had to go for it");
    }
    let (limit, nodes) = (index.layout().entry_limit().0, index.layout().resident_limit().0);
    for number in 0..nodes {
        let (block, content) = unknown(number + limit);
        let known = index.known_blocks().0;
        index.learn(block, content);
        assert!([known, known + 1].contains(&index.known_blocks().0), "one had to go for it, or none");
    }
    let in_slots = index.pages().filter(|(_, content)| is_known(&index, *content)).count();
    assert!(index.known_blocks().0 as usize >= nodes as usize + in_slots, "all nodes are used");
    check(&index);
}

/// Returns whether the disk is known to hold `content` for some block.
fn is_known(index: &CacheIndex<Vec<u32>>, content: Fingerprint) -> bool {
    index.find(content).is_some_and(|found| index.block_of(found).is_some())
}

/// Tests the index without an engine, which would shield it from some operations.
fn alone(words: Vec<u32>, origin: Origin<'_>, changed: bool, source: &mut Source) {
    let Some(mut index) = resume(words, origin) else { return assert!(changed) };
    check(&index);
    // As at the first connection: the rest of the log is not looked at again.
    let received = if source.byte() & 1 == 0 { index.sends(POOL) } else { u64::from(source.word()) };
    index.give_up_sends(POOL, received);
    check(&index);
    index.begin_pool(POOL, Pool { server: 0, generation: 0 }, received);
    let prints = prints();
    let contents = (0..9).map(|content| prints.page(&[content; PAGE_SIZE])).collect();
    let server = index.pages().filter_map(|(slot, content)| Some((index.place_of(slot)?, content))).collect();
    let log_end = index.log_end(POOL);
    let mut life = Life { contents, server, pinned: VecDeque::new(), log_end, index };
    while !source.is_empty() {
        life.step(source);
        check(&life.index);
        for (slot, content) in life.index.pages() {
            let place = life.index.place_of(slot).expect("a page has a place");
            assert_eq!(life.server.get(&place), Some(&content), "the server has it there");
        }
    }
    life.pinned.drain(..).for_each(|slot| life.index.unpin(slot));
    life.resize(u32::MAX);
    check(&life.index);
    life.index.close();
    come_back(&life.index);
}

struct Life {
    index: Index,
    /// Few contents, to make collisions likely.
    contents: Vec<Fingerprint>,
    /// Content of each slot of each pool, as sent to the servers.
    server: HashMap<(PoolIndex, SlotIndex), Fingerprint>,
    pinned: VecDeque<SlotIndex>,
    log_end: LogEnd,
}

impl Life {
    fn step(&mut self, source: &mut Source) {
        let (kind, bno) = (source.below(16), source.below(BLOCKS));
        let block = block(bno);
        let cached = self.index.known(block).and_then(|content| self.index.cached(content));
        match (kind, cached) {
            (0..=2, _) => self.learn(block, source.byte()),
            (3, _) => {
                self.index.forget(block);
                assert_eq!(self.index.known(block), None);
            }
            (4..=6, _) => self.offer(source.byte()),
            (7, Some(slot)) => {
                let (hint, _) = self.index.look_up(block).expect("what is cached for it is known");
                self.index.hit(hint, block, slot, source.byte() & 1 == 0);
            }
            (8, Some(slot)) if self.index.pin(slot) => self.pinned.push_back(slot),
            (9, _) => self.pinned.pop_front().into_iter().for_each(|slot| self.index.unpin(slot)),
            (10, _) => {
                self.index.aim(POOL, PageCount(bno.into()));
                self.resize(if bno & 1 == 0 { u32::MAX } else { bno.into() });
            }
            (11, _) => {
                let end = if source.byte() & 1 == 0 { u64::MAX } else { u64::from(bno) + 2 };
                self.index.forget_range(DISK, bno.into()..end);
                assert_eq!(self.index.known(block), None);
            }
            (12, _) if bno == 0 => self.index.drop_all_slots(),
            (12, _) => self.index.drop_slot(SlotIndex(bno.into())),
            // A new connection. Sends that the server has not received are lost.
            (13, _) => drop(self.index.give_up_sends(POOL, self.index.sends(POOL).saturating_sub(bno.into()))),
            (14, _) if bno & 1 == 0 => self.index.note_taken(POOL, self.log_end),
            (14, _) => self.log_end = self.index.log_end(POOL),
            (15, _) if bno & 3 == 0 => self.grow(bno),
            _ => {
                let areas = self.index.swap_areas(DISK);
                self.index.set_swap_areas(DISK, areas.iter());
                assert_eq!(self.index.swap_areas(DISK), areas);
            }
        }
    }

    fn resize(&mut self, slots: u32) {
        let server = &mut self.server;
        self.index.resize(POOL, slots, |Move { from, to }| {
            let page = server.remove(&(POOL, from)).expect("what is moved was there");
            server.insert((POOL, to), page);
        });
    }

    fn content(&self, number: u8) -> Fingerprint {
        self.contents[usize::from(number) % self.contents.len()]
    }

    fn learn(&mut self, block: BlockId, number: u8) {
        let content = self.content(number);
        self.index.learn(block, content);
        assert_eq!(self.index.known(block), Some(content));
        assert!(is_known(&self.index, content) || content == self.contents[0], "what is learned can be offered");
    }

    fn offer(&mut self, number: u8) {
        let content = self.content(number);
        let known = is_known(&self.index, content);
        let place = if number & 0x80 == 0 { Place::Tail } else { Place::Head };
        let first: PoolSet = [PoolIndex(0)].into_iter().collect();
        let others = PoolIndex::all().filter(|pool| !first.contains(*pool)).collect();
        let tiers = if number & 0x40 == 0 { PoolSet::ALL.into() } else { Tiers { local: first, remote: others } };
        let offer = self.index.offer(content, place, tiers);
        if let Offer::Demoting { slot, to } = offer {
            let demoted = self.server[&self.index.place_of(slot).expect("an admitted page has a place")];
            assert!(!self.pinned.contains(&to), "nobody waits for what was there");
            self.server.insert(self.index.place_of(to).expect("a demoted page has a place"), demoted);
        }
        match offer {
            Offer::Admitted(slot) | Offer::Demoting { slot, .. } => {
                assert!(known && !self.pinned.contains(&slot), "it is known, and nobody waits for what was there");
                self.server.insert(self.index.place_of(slot).expect("an admitted page has a place"), content);
            }
            Offer::Duplicate => assert!(self.index.cached(content).is_some()),
            Offer::Unmatched => assert!(!known),
            Offer::NoSlot => {
                assert_eq!(self.index.cached(content), None);
                assert!(self.index.slot_counts().free == 0 || self.index.is_resizing(), "there was room");
            }
        }
    }

    /// Moves the index into a larger region.
    fn grow(&mut self, more: u8) {
        let layout = self.index.layout();
        if layout.slot_limit().0 > 64 {
            return;
        }
        let slots = PageCount(layout.slot_limit().0 + u32::from(more));
        let larger = layout.resized(slots, PageCount(32));
        let config = engine::config(true);
        self.index.begin_move(CacheIndex::new(vec![0; larger.words()], larger, config.seed, self.contents[0]));
        self.index.finish_move();
    }
}

pub fn seeds() -> Vec<Vec<u8>> {
    let read = |bno: u8| [0, bno, 0, 0, 0];
    let warm = [&read(2)[..], &[7, 1], &read(3), &[7, 1], &read(4), &[3, 0, 1]].concat();
    let connect = [9, 0, 2, 0x80, 11, 2];
    let again = |mode: u8, changes: &[u8]| [&[mode, 0], changes, &connect, &warm].concat();
    // Some of everything.
    let operations: Vec<u8> =
        (0..16).flat_map(|kind| [kind, 1 + kind % 5, kind, 4, 2, kind, 5, 1, kind, 3, 1 + kind % 4]).collect();
    let index = |mode: u8, changes: &[u8]| [&[mode | INDEX_ALONE, 0], changes, &[0], &operations].concat();
    // The capacity of the first pool; its queue's first; a slot's next; a word of a hash table.
    let small = |at: usize, value: u8| {
        let [low, high] = u16::try_from(at).unwrap().to_le_bytes();
        [0, low, high, 0, value]
    };
    let chunks_at = LOG_AT + LOG_SHOWN;
    let changes = [
        &[4][..],
        &small(POOLS_AT + 9, 200),
        &small(POOLS_AT + 10, 3),
        &small(chunks_at + 60, 1),
        &small(chunks_at + 400, 0),
    ]
    .concat();
    // A node, and a slot, that exist twice.
    let copy = |from: usize, to: usize| {
        let [[a, b], [c, d]] = [to, from].map(|at| u16::try_from(at).unwrap().to_le_bytes());
        [7, a, b, c, d]
    };
    let slots_at = chunks_at + 18;
    let nodes_at = slots_at + 66;
    let twice = [(nodes_at, 5), (slots_at, 6)]
        .map(|(at, size)| [copy(at, at + 5 * size), copy(at + 2 * size, at + 6 * size)].concat());
    let twice = [&[4], &twice.concat()[..]].concat();
    vec![
        again(0, &twice),
        index(0, &twice),
        again(0, &[0]),
        again(IN_GOOD_ORDER, &[0]),
        again(0, &changes),
        again(NONSENSE, &[1, 2, 3, 4]),
        index(0, &[0]),
        index(IN_GOOD_ORDER, &[0]),
        index(0, &changes),
        index(NONSENSE, &[1, 2, 3, 4]),
        [&[0, 5][..], &read(1), &[0, 2, 0, 3, 5], &read(3), &[10], &[0], &connect, &warm].concat(),
    ]
}
