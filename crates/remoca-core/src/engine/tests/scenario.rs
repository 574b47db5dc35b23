//! Scenarios of reads that server and disk race for: one method for each event, which checks what must follow from it.

use super::*;

/// Name of a read in a scenario. Its request has the lowest number that is free when it begins, as with a driver.
pub(super) type Name = u32;
pub(super) const A: Name = 0;
pub(super) const B: Name = 1;
/// Name of reads that begin and end in one method.
const PASSING: Name = 1000;

pub(super) const US: u64 = 1000;
pub(super) const DISK_NS: u64 = 7 * MS;
pub(super) const HIT_NS: u64 = 200 * US;
/// The block that is cached.
pub(super) const RANGE: ByteRange = ByteRange { offset: 3 * 4096, length: 4096 };

/// A read of the guest, and where it went when it began.
struct Read {
    id: u32,
    disk: DiskIndex,
    range: ByteRange,
    fetches: Vec<FetchId>,
    asked_disk: bool,
}

/// A bench whose block 3 is cached, and holds ones.
pub(super) struct Scenario {
    bench: Bench,
    reads: Vec<Option<Read>>,
}

impl std::ops::Deref for Scenario {
    type Target = Bench;

    fn deref(&self) -> &Bench {
        &self.bench
    }
}

impl std::ops::DerefMut for Scenario {
    fn deref_mut(&mut self) -> &mut Bench {
        &mut self.bench
    }
}

impl Scenario {
    /// Begins with disk reads of another block.
    pub(super) fn new(config: EngineConfig, disk_reads: u32, ns: u64) -> Self {
        let mut bench = Bench::new(config);
        bench.connect(1, 8, 0);
        bench.cache(3, 1);
        for _ in 0..disk_reads {
            bench.read(98, blocks(50, 1));
            bench.wait(ns);
            bench.disk_done(98, Ok(()), &page(50));
            // The agent lives: blocks are not admitted as they are read.
            bench.engine.handle_evicted(&page(9));
        }
        Self { bench, reads: Vec::new() }
    }

    /// Begins where it is known what the disk and the server normally take.
    pub(super) fn trained() -> Self {
        let mut it = Self::new(config(), 20, DISK_NS);
        it.hits(20, HIT_NS);
        it
    }

    /// Begins without hedging, where several blocks from the third on hold the same.
    pub(super) fn without_hedging(block_count: u64) -> Self {
        let config = EngineConfig { hedge: false, guest_memory: PageCount(1024), fetch_limit: 1024, ..config() };
        let mut it = Self::new(config, 0, 0);
        let content = page(1).repeat(usize::try_from(block_count).expect("few"));
        it.do_from_disk(write(blocks(3, block_count)), &content);
        it
    }

    /// Shows the engine that block 3 of the other disk holds the same.
    pub(super) fn copy_on_other_disk(&mut self) -> &mut Self {
        self.request(98, OTHER_DISK, GuestOp::Read(RANGE));
        self.disk_done(98, Ok(()), &page(1));
        self
    }

    fn of(&self, name: Name) -> &Read {
        self.reads[name as usize].as_ref().expect("the read has begun")
    }

    /// Returns the number of a read's request.
    pub(super) fn id(&self, name: Name) -> u32 {
        self.of(name).id
    }

    /// Returns the REQUESTs of a read.
    pub(super) fn fetches(&self, name: Name) -> Vec<FetchId> {
        self.of(name).fetches.clone()
    }

    /// Returns the action that asks the disk for a read that also waits for the server.
    pub(super) fn too(&self, name: Name) -> Action {
        let Read { id, disk, range, .. } = *self.of(name);
        Action::DiskToo { request: RequestId(id), disk, op: GuestOp::Read(range) }
    }

    pub(super) fn is_probe(&self, name: Name) -> bool {
        self.of(name).asked_disk && !self.of(name).fetches.is_empty()
    }

    /// Begins a read, wherever it goes.
    pub(super) fn begin(&mut self, name: Name, disk: DiskIndex, range: ByteRange) -> &mut Self {
        let free = |id: &u32| self.engine.requests.get(RequestId(*id)).is_none();
        let id = (0..).find(free).expect("few are in flight");
        let actions = self.request(id, disk, GuestOp::Read(range));
        let (fetches, others): (Vec<_>, Vec<_>) =
            actions.into_iter().partition(|action| matches!(action, Action::Fetch { .. }));
        let number = |action| if let Action::Fetch { fetch, .. } = action { Some(fetch) } else { None };
        let fetches: Vec<_> = fetches.into_iter().filter_map(number).collect();
        let asked_disk = !others.is_empty();
        let alone = Action::Disk { request: RequestId(id), disk, op: GuestOp::Read(range) };
        let (only_disk, at) = (fetches.is_empty(), name as usize);
        if self.reads.len() <= at {
            self.reads.resize_with(at + 1, || None);
        }
        self.reads[at] = Some(Read { id, disk, range, fetches, asked_disk });
        if asked_disk {
            assert_eq!(others, [if only_disk { alone } else { self.too(name) }]);
        }
        self
    }

    /// Begins a read of block 3 that goes to the server alone.
    pub(super) fn waiting(&mut self, name: Name) -> &mut Self {
        self.waiting_on(name, DISK)
    }

    pub(super) fn waiting_on(&mut self, name: Name, disk: DiskIndex) -> &mut Self {
        self.begin(name, disk, RANGE);
        assert!(self.of(name).fetches.len() == 1 && !self.of(name).asked_disk, "only the server is asked");
        self
    }

    /// Begins a read of block 3 that the server is late with: the disk is also asked.
    pub(super) fn hedged(&mut self, name: Name) -> &mut Self {
        self.waiting(name);
        assert!(self.until_due() < DISK_NS / 10, "it is asked soon");
        self.asks_disk(name)
    }

    /// Begins a read of block 3 that goes both ways at once.
    pub(super) fn probe(&mut self, name: Name) -> &mut Self {
        self.begin(name, DISK, RANGE);
        assert!(self.is_probe(name), "a probe goes both ways");
        self
    }

    /// Begins a read of block 3 that goes to the disk alone.
    pub(super) fn disk_only(&mut self, name: Name) -> &mut Self {
        self.begin(name, DISK, RANGE);
        assert!(self.of(name).fetches.is_empty(), "no REQUEST goes out");
        self
    }

    /// Begins another read with the number of one that is over.
    pub(super) fn reuse_number_of(&mut self, name: Name) -> &mut Self {
        let (id, range) = (self.id(name), blocks(9, 1));
        assert_eq!(self.read(id, range), [disk_action(id, GuestOp::Read(range))]);
        self
    }

    pub(super) fn server_answers(&mut self, name: Name) -> &mut Self {
        let id = self.id(name);
        for (fetch, offset) in self.fetches(name).into_iter().zip((0..).step_by(PAGE_SIZE)) {
            assert_eq!(self.page_comes(fetch, 1), deliver(id, offset));
        }
        assert_eq!(self.actions(), [complete(id)]);
        self
    }

    /// The page of a read waits to be sent to the server, and is taken from there.
    pub(super) fn page_has_not_left(&mut self, name: Name) -> &mut Self {
        let (now, id, fetch) = (self.now, self.id(name), self.of(name).fetches[0]);
        assert_eq!(self.engine.handle_unsent_page(now, SERVER, fetch, &page(1)), deliver(id, 0));
        assert_eq!(self.actions(), [complete(id)]);
        self
    }

    /// The server sends the page of a read that was answered.
    pub(super) fn page_is_late(&mut self, name: Name) -> &mut Self {
        for fetch in self.fetches(name) {
            assert_eq!(self.page_comes(fetch, 1), PageOutcome::Late);
        }
        assert_eq!(self.actions(), []);
        self
    }

    pub(super) fn server_has_no_page(&mut self, name: Name) -> &mut Self {
        let (now, fetch) = (self.now, self.of(name).fetches[0]);
        self.engine.handle_missing(now, SERVER, fetch);
        self
    }

    pub(super) fn disk_answers(&mut self, name: Name) -> &mut Self {
        let id = self.id(name);
        assert_eq!(self.disk_done(id, Ok(()), &page(1)), [complete(id)]);
        self
    }

    /// The disk read of an answered request ends, which has no effect on the guest.
    pub(super) fn abandoned_ends(&mut self, name: Name) -> &mut Self {
        let id = self.id(name);
        assert_eq!(self.disk_done(id, Ok(()), &page(1)), []);
        self
    }

    /// The disk fails, of which the guest hears nothing: the server has answered, or may still know.
    pub(super) fn disk_fails(&mut self, name: Name) -> &mut Self {
        let id = self.id(name);
        assert_eq!(self.disk_done(id, Err(EIO), &page(77)), []);
        self
    }

    /// The disk fails, and its error is the guest's answer.
    pub(super) fn disk_fails_guest(&mut self, name: Name) -> &mut Self {
        let id = self.id(name);
        assert_eq!(self.disk_done(id, Err(EIO), &[]), [fail(id)]);
        self
    }

    pub(super) fn after(&mut self, ns: u64) -> &mut Self {
        self.wait(ns);
        self
    }

    /// Lets time pass until something is due. Returns how much.
    pub(super) fn until_due(&mut self) -> u64 {
        let deadline = self.engine.next_deadline().expect("what waits has a deadline");
        let ns = deadline.since_ns(self.now);
        self.wait(ns);
        ns
    }

    /// The timer gives the read to the disk, and does nothing else.
    pub(super) fn asks_disk(&mut self, name: Name) -> &mut Self {
        assert_eq!(self.timer(), [self.too(name)]);
        self
    }

    /// Reads that the server answers. A probe leaves an abandoned disk read, which ends before the next read begins.
    pub(super) fn hits(&mut self, count: u32, ns: u64) -> &mut Self {
        for _ in 0..count {
            self.begin(PASSING, DISK, RANGE).after(ns).server_answers(PASSING);
            if self.is_probe(PASSING) {
                self.after(DISK_NS - ns).abandoned_ends(PASSING);
            }
        }
        self
    }

    /// Reads that the disk answers while the server is silent. Returns their names: the server owes their pages.
    pub(super) fn losses(&mut self, count: u32) -> std::ops::Range<Name> {
        for name in 0..count {
            self.hedged(name).after(DISK_NS).disk_answers(name);
        }
        0..count
    }

    /// The breaker opens, and the next read is a probe.
    pub(super) fn open_breaker(&mut self) -> &mut Self {
        self.losses(16);
        self.breaker_is(BreakerState::Open).after(20 * MS)
    }

    /// Probes that the server answers first.
    pub(super) fn probe_wins(&mut self, count: u32) -> &mut Self {
        for _ in 0..count {
            self.probe(PASSING).after(HIT_NS).server_answers(PASSING).after(DISK_NS).abandoned_ends(PASSING);
        }
        self
    }

    /// Slow answers of the server to reads of `pages` blocks, while the disk hangs. Returns those that it was asked for.
    pub(super) fn slow_answers(&mut self, pages: u64, names: std::ops::Range<Name>) -> Vec<Name> {
        let mut abandoned = Vec::new();
        for name in names {
            self.begin(name, DISK, blocks(3, pages));
            let mut asked_disk = self.is_probe(name);
            for _ in 0..10 {
                asked_disk |= self.after(10 * MS).timer().contains(&self.too(name));
            }
            self.nothing_is_due().server_answers(name);
            abandoned.extend(asked_disk.then_some(name));
        }
        abandoned
    }

    /// The disk has as many abandoned reads as it may have.
    pub(super) fn fill_with_abandoned(&mut self) -> &mut Self {
        (0..128).for_each(|_| self.engine.race.begin_abandoned(DISK, RANGE));
        self
    }

    pub(super) fn nothing_is_due(&mut self) -> &mut Self {
        let deadline = self.engine.next_deadline();
        assert!(deadline.is_none_or(|at| at > self.now), "nothing is due that cannot be done");
        self
    }

    pub(super) fn breaker_is(&mut self, state: BreakerState) -> &mut Self {
        assert_eq!(self.engine.status().hedging.breaker, state);
        self
    }

    /// Every block that was read is counted as a hit or a miss.
    pub(super) fn blocks_add_up(&mut self) -> &mut Self {
        let stats = self.stats();
        assert_eq!(stats.missed_blocks + stats.hit_blocks, stats.read_blocks);
        self
    }

    pub(super) fn stats(&self) -> EngineStats {
        self.engine.stats()
    }

    pub(super) fn late_after(&self) -> u64 {
        self.engine.status().hedging.late_after_ns
    }

    pub(super) fn pinned(&self) -> u32 {
        self.engine.index().pinned_slots().0
    }
}
