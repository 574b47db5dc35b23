//! The machine against a model of the store below. It completes in any order, fails now and then, and applies a modification
//! at any moment between its submission and its completion. When its connection is lost, it forgets what was not flushed.

use proptest::prelude::*;

use super::*;

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 6;
const SECTORS: usize = 48;
const SECTOR: usize = 512;
/// Content of sectors whose discard was not followed by a write.
const DISCARDED: u64 = u64::MAX;

/// The store below: a version number for each sector.
struct Below {
    content: Vec<u64>,
    pending: Vec<Pending>,
}

struct Pending {
    request: AlignedRequest,
    is_applied: bool,
}

impl Below {
    fn accept(&mut self, request: AlignedRequest) {
        let (offset, len) = request.operation.range().unwrap_or_default();
        assert!(offset % BLOCK == 0 && len % BLOCK == 0, "{:?} is not aligned", request.operation);
        assert!(offset + len <= BLOCKS * BLOCK);
        assert!(request.operation == StoreOp::Flush || len > 0);
        self.pending.push(Pending { request, is_applied: false });
    }

    fn apply(&mut self, index: usize) {
        let Pending { request, is_applied } = &mut self.pending[index];
        if std::mem::replace(is_applied, true) {
            return;
        }
        let (offset, len) = request.operation.range().unwrap_or_default();
        let sectors = sector_range(offset, len);
        match request.operation {
            StoreOp::Read { .. } => {
                let buffer = request.buffer.as_mut().unwrap();
                for (sector, version) in buffer.chunks_mut(SECTOR).zip(&self.content[sectors]) {
                    sector.fill(0);
                    sector[..8].copy_from_slice(&version.to_le_bytes());
                }
            }
            StoreOp::Write { .. } => {
                let buffer = request.buffer.as_ref().unwrap();
                for (sector, version) in buffer.chunks(SECTOR).zip(&mut self.content[sectors]) {
                    *version = u64::from_le_bytes(sector[..8].try_into().unwrap());
                }
            }
            StoreOp::Discard { .. } => self.content[sectors].fill(DISCARDED),
            StoreOp::WriteZeroes { .. } => self.content[sectors].fill(0),
            StoreOp::Flush => {}
        }
    }

    fn complete(&mut self, index: usize, fails: bool) -> StoreCompletion {
        if !fails {
            self.apply(index);
        }
        let AlignedRequest { token, buffer, .. } = self.pending.swap_remove(index).request;
        StoreCompletion { token, result: if fails { Err(StoreError::IO) } else { Ok(()) }, buffer }
    }
}

/// One operation of the caller, with the times of its begin and end.
struct Issued {
    operation: StoreOp,
    version: u64,
    begin: u64,
    /// `None` while it is in flight, and for ever if it failed: it may take effect or not.
    end: Option<u64>,
    is_completed: bool,
    /// It was acknowledged before a loss: it may have taken effect or not.
    is_lost: bool,
}

fn sector_range(offset: u64, len: u64) -> Range<usize> {
    usize::try_from(offset / 512).unwrap()..usize::try_from((offset + len) / 512).unwrap()
}

/// Whether a read of `sector` from `begin` to `end` may find `version`.
fn is_possible(history: &[Issued], sector: usize, version: u64, begin: u64, end: u64) -> bool {
    let touches = |issued: &Issued| {
        issued.operation.is_modification()
            && issued.operation.range().is_some_and(|(offset, len)| sector_range(offset, len).contains(&sector))
    };
    // A discard may do nothing, so it supersedes nothing.
    let supersedes = |later: &Issued, earlier_end: Option<u64>| {
        !matches!(later.operation, StoreOp::Discard { .. })
            && !later.is_lost
            && earlier_end.is_some_and(|earlier| earlier < later.begin)
            && later.end.is_some_and(|later| later < begin)
    };
    let is_current = |earlier_end| !history.iter().any(|later| touches(later) && supersedes(later, earlier_end));
    if version == 0 && is_current(Some(0)) {
        return true;
    }
    history
        .iter()
        .any(|issued| touches(issued) && issued.version == version && issued.begin < end && is_current(issued.end))
}

#[derive(Clone, Debug)]
enum Action {
    Submit { kind: u8, first: usize, count: usize },
    Apply(usize),
    Complete(usize, bool),
    Lose,
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        3 => (0_u8..5, 0..SECTORS, 1_usize..30).prop_map(|(kind, first, count)| Action::Submit { kind, first, count }),
        2 => any::<usize>().prop_map(Action::Apply),
        4 => (any::<usize>(), prop::bool::weighted(0.03)).prop_map(|(i, fails)| Action::Complete(i, fails)),
        1 => Just(Action::Lose),
    ]
}

struct World {
    machine: SectorMachine,
    below: Below,
    history: Vec<Issued>,
    callers: BufferPool,
    copies: BufferPool,
    now: u64,
}

impl World {
    fn new() -> Self {
        // Two chunks in flight at most, so that tasks starve.
        let copies = BufferPool::new(6 * 4096);
        let machine = SectorMachine::new(Limits { block: BLOCK, chunk_max: 2 * BLOCK }, copies.clone());
        let below = Below { content: vec![0; SECTORS], pending: Vec::new() };
        Self { machine, below, history: Vec::new(), callers: BufferPool::new(64 << 20), copies, now: 1 }
    }

    fn act(&mut self, action: &Action) {
        self.now += 1;
        match action {
            Action::Submit { kind, first, count } => self.submit(*kind, *first, (*count).min(SECTORS - first)),
            Action::Apply(index) if !self.below.pending.is_empty() => {
                self.below.apply(index % self.below.pending.len());
            }
            Action::Complete(index, fails) if !self.below.pending.is_empty() => {
                let completion = self.below.complete(index % self.below.pending.len(), *fails);
                self.machine.handle_completion(completion);
            }
            Action::Lose => self.lose(),
            Action::Apply(_) | Action::Complete(..) => {}
        }
        self.settle();
    }

    /// Everything is lost. The store below does the requests in flight again from their start.
    fn lose(&mut self) {
        self.below.content.fill(0);
        self.below.pending.iter_mut().for_each(|pending| pending.is_applied = false);
        for issued in self.history.iter_mut().filter(|issued| issued.is_completed) {
            issued.is_lost = true;
        }
        self.machine.repeat_modifications();
    }

    fn submit(&mut self, kind: u8, first: usize, count: usize) {
        let (offset, len) = (first as u64 * 512, count as u64 * 512);
        let version = self.history.len() as u64 + 1;
        let short_len = u32::try_from(len).unwrap();
        let (operation, version) = match kind {
            0 => (StoreOp::Read { offset, len: short_len }, 0),
            1 | 2 => (StoreOp::Write { offset, len: short_len, durable: kind == 1 }, version),
            3 => (StoreOp::WriteZeroes { offset, len, may_unmap: true, durable: false }, 0),
            _ => (StoreOp::Discard { offset, len }, DISCARDED),
        };
        let mut buffer = operation.buffer_len().map(|len| self.callers.take(len).unwrap());
        for sector in buffer.iter_mut().flat_map(|buffer| buffer.chunks_mut(SECTOR)) {
            sector[..8].copy_from_slice(&version.to_le_bytes());
        }
        let token = self.history.len() as u64;
        self.history.push(Issued {
            operation,
            version,
            begin: self.now,
            end: None,
            is_completed: false,
            is_lost: false,
        });
        self.machine.submit(token, operation, buffer);
    }

    /// Moves everything between caller, machine and store.
    fn settle(&mut self) {
        while let Some(request) = self.machine.next_request() {
            self.check_not_rewritten(&request);
            self.below.accept(request);
        }
        while let Some(completion) = self.machine.next_completion() {
            self.now += 1;
            let index = usize::try_from(completion.token).unwrap();
            let issued = &mut self.history[index];
            assert!(!std::mem::replace(&mut issued.is_completed, true), "completed twice");
            issued.end = completion.result.is_ok().then_some(self.now);
            assert_eq!(completion.buffer.as_deref().map(<[u8]>::len), issued.operation.buffer_len());
            if completion.result.is_ok() && matches!(issued.operation, StoreOp::Read { .. }) {
                self.check_read(index, &completion.buffer.unwrap());
            }
        }
    }

    /// No write may be in flight together with another request of a task that rewrites the same block.
    fn check_not_rewritten(&self, request: &AlignedRequest) {
        let rewrites = |token: u64| {
            let task = &self.machine.tasks[usize::try_from(token).unwrap()];
            task.step != Step::Pass && task.operation.is_modification()
        };
        let (offset, len) = request.operation.range().unwrap_or_default();
        for other in self.below.pending.iter().map(|pending| &pending.request) {
            let (other_offset, other_len) = other.operation.range().unwrap_or_default();
            let is_overlapping = offset < other_offset + other_len && other_offset < offset + len;
            let are_modifying = request.operation.is_modification() && other.operation.is_modification();
            if is_overlapping && (are_modifying || rewrites(request.token) && other.operation.is_modification()) {
                assert!(!rewrites(request.token) && !rewrites(other.token), "a rewrite is not alone");
            }
        }
    }

    fn check_read(&self, index: usize, buffer: &[u8]) {
        let Issued { operation, begin, end, .. } = &self.history[index];
        let (offset, len) = operation.range().unwrap_or_default();
        for (sector, data) in sector_range(offset, len).zip(buffer.chunks(SECTOR)) {
            let version = u64::from_le_bytes(data[..8].try_into().unwrap());
            assert!(
                is_possible(&self.history, sector, version, *begin, end.unwrap()),
                "sector {sector} reads version {version}"
            );
        }
    }

    fn finish(mut self) {
        while !self.below.pending.is_empty() {
            self.act(&Action::Complete(0, false));
        }
        assert!(self.history.iter().all(|issued| issued.is_completed), "something waits for ever");
        for (sector, version) in self.below.content.iter().enumerate() {
            let end = self.now + 1;
            assert!(
                is_possible(&self.history, sector, *version, end, end + 1),
                "sector {sector} holds version {version}"
            );
        }
        assert!(self.machine.tasks.is_empty());
        drop(self.machine);
        let lent = self.copies.take(6 * 4096 / 2).is_some();
        assert!(lent, "copies were not given back");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]
    #[test]
    fn no_acknowledged_write_is_lost_and_no_read_is_stale(actions in prop::collection::vec(action(), 1..120)) {
        let mut world = World::new();
        for action in &actions {
            world.act(action);
        }
        world.finish();
    }
}

#[test]
fn writes_to_two_sectors_of_one_block_at_once_both_survive() {
    let mut world = World::new();
    for first in [0, 1, 7] {
        world.submit(1, first, 1);
    }
    world.settle();
    assert_eq!(world.below.pending.len(), 1, "one rewrite at a time");
    while !world.below.pending.is_empty() {
        let completion = world.below.complete(0, false);
        world.machine.handle_completion(completion);
        world.settle();
    }
    assert_eq!(world.below.content[..8], [1, 2, 0, 0, 0, 0, 0, 3]);
    world.finish();
}

#[test]
fn unaligned_operations_touch_no_other_sector_and_keep_durability() {
    let mut world = World::new();
    world.submit(1, 0, SECTORS);
    world.settle();
    world.act(&Action::Complete(0, false));
    // Zeroes with a head, whole blocks, and a tail; a discard whose whole blocks are fewer than it names.
    world.submit(3, 3, 20);
    world.submit(4, 31, 12);
    world.settle();
    while !world.below.pending.is_empty() {
        let operation = world.below.pending[0].request.operation;
        assert!(!operation.is_durable());
        world.act(&Action::Complete(0, false));
    }
    let expected: Vec<u64> = (0..SECTORS)
        .map(|sector| match sector {
            3..23 => 0,
            32..40 => DISCARDED,
            _ => 1,
        })
        .collect();
    assert_eq!(world.below.content, expected);
    world.submit(1, 5, 9);
    world.settle();
    let mut writes = 0;
    while let Some(pending) = world.below.pending.first() {
        if pending.request.operation.is_modification() {
            assert!(pending.request.operation.is_durable());
            writes += 1;
        }
        world.act(&Action::Complete(0, false));
    }
    assert_eq!(writes, 1);
    world.finish();
}
