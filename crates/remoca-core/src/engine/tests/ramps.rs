//! Latencies that rise or fall step by step, in virtual time: what the guest pays compared with the disk alone.
//!
//! A guest with a fixed number of reads in flight reads cached blocks. Two courses give the latencies of server and disk for
//! each read; the disk alone gets the same reads. All windows of 10,000 reads are compared.

use super::*;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

const US: u64 = 1000;
const WINDOW: usize = 10_000;
const RANGE: ByteRange = ByteRange { offset: 3 * 4096, length: 4096 };
/// Block whose reads go to the disk.
const UNCACHED: ByteRange = ByteRange { offset: 50 * 4096, length: 4096 };

/// Course of a latency over the number of the read.
#[derive(Clone, Copy, Debug)]
enum Shape {
    Steady,
    /// From the first factor to the second one, where it stays.
    Ramp,
    /// To the second factor and back, again and again.
    Triangle,
    /// To the second factor, then back at once.
    Sawtooth,
}

#[derive(Clone, Copy, Debug)]
struct Course {
    median_ns: u64,
    /// Standard deviation of the logarithm; 0 for a fixed latency.
    sigma: f64,
    shape: Shape,
    from: f64,
    to: f64,
    /// Number of reads that one change takes.
    length: u32,
}

impl Course {
    fn steady(median_ns: u64, sigma: f64) -> Self {
        Self { median_ns, sigma, shape: Shape::Steady, from: 1.0, to: 1.0, length: 1 }
    }

    fn changing(self, shape: Shape, from: f64, to: f64, length: u32) -> Self {
        Self { shape, from, to, length, ..self }
    }

    fn latency_ns(&self, read: u32, random: &mut Random) -> u64 {
        let part = |at: u32| f64::from(at) / f64::from(self.length);
        let phase = match self.shape {
            Shape::Steady => 0.0,
            Shape::Ramp => part(read.min(self.length)),
            Shape::Sawtooth => part(read % self.length),
            Shape::Triangle => {
                let at = read % (2 * self.length);
                part(at.min(2 * self.length - at))
            }
        };
        let factor = self.from * (self.to / self.from).powf(phase);
        let median = f64::from(u32::try_from(self.median_ns).expect("at most four seconds"));
        nanos(median * factor * (self.sigma * random.normal()).exp())
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a latency is positive, and far below 2^53"
)]
fn nanos(value: f64) -> u64 {
    value.round() as u64
}

#[expect(clippy::cast_precision_loss, reason = "sums of latencies are far below 2^53")]
fn ratio(value: u64, of: u64) -> f64 {
    value as f64 / of as f64
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number between 0 and 1, both excluded.
    fn unit(&mut self) -> f64 {
        let high = u32::try_from(self.bits() >> 32).expect("32 bits");
        (f64::from(high) + 0.5) / 4_294_967_296.0
    }

    /// Returns a normally distributed number (Box and Muller).
    fn normal(&mut self) -> f64 {
        (-2.0 * self.unit().ln()).sqrt() * (std::f64::consts::TAU * self.unit()).cos()
    }
}

#[derive(Clone, Copy, Debug)]
struct Case {
    reads: u32,
    depth: usize,
    server: Course,
    disk: Course,
    /// Number of I/Os that the disk does at a time; the others wait in order.
    lanes: usize,
    /// Number of reads per one that is not cached; 0 for none.
    miss_one_of: u32,
}

/// Disk, as the end times of its I/Os.
struct Lanes(BinaryHeap<Reverse<u64>>);

impl Lanes {
    fn new(count: usize) -> Self {
        Self(std::iter::repeat_n(Reverse(0), count).collect())
    }

    fn end_of(&mut self, now: u64, ns: u64) -> u64 {
        let Reverse(free) = self.0.pop().expect("a disk does one I/O at least");
        let end = free.max(now) + ns;
        self.0.push(Reverse(end));
        end
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Page(FetchId),
    Disk(RequestId),
}

#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    read: usize,
    at_disk: bool,
    answered: bool,
}

/// Guest, engine, server and disk in virtual time.
struct World<'a> {
    bench: Bench,
    case: &'a Case,
    draws: &'a [Draw],
    lanes: Lanes,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    order: u64,
    entries: Vec<Entry>,
    free: Vec<u32>,
    begun: Vec<u64>,
    latencies: Vec<u64>,
    in_flight: usize,
}

#[derive(Clone, Copy, Debug)]
struct Draw {
    server_ns: u64,
    disk_ns: u64,
}

fn draws(case: &Case) -> Vec<Draw> {
    let mut random = Random(u64::from(case.reads));
    let draw = |read| Draw {
        server_ns: case.server.latency_ns(read, &mut random),
        disk_ns: case.disk.latency_ns(read, &mut random),
    };
    (0..case.reads).map(draw).collect()
}

/// Returns the latencies of the same reads without a server.
fn disk_alone(case: &Case, draws: &[Draw]) -> Vec<u64> {
    let mut lanes = Lanes::new(case.lanes);
    let mut guest: BinaryHeap<Reverse<u64>> = std::iter::repeat_n(Reverse(0), case.depth).collect();
    let read = |draw: &Draw| {
        let Reverse(now) = guest.pop().expect("the depth is one at least");
        let end = lanes.end_of(now, draw.disk_ns);
        guest.push(Reverse(end));
        end - now
    };
    draws.iter().map(read).collect()
}

impl<'a> World<'a> {
    fn new(case: &'a Case, draws: &'a [Draw]) -> Self {
        let mut bench = Bench::new(EngineConfig { fetch_limit: 1024, ..config() });
        bench.connect(1, 8, 0);
        bench.cache(3, 1);
        let mut random = Random(7);
        for _ in 0..300 {
            bench.read(98, UNCACHED);
            bench.wait(case.disk.latency_ns(0, &mut random));
            bench.disk_done(98, Ok(()), &page(50));
            // The agent lives: blocks are not admitted as they are read.
            bench.engine.handle_evicted(&page(9));
        }
        Self {
            bench,
            case,
            draws,
            lanes: Lanes::new(case.lanes),
            events: BinaryHeap::new(),
            order: 0,
            entries: Vec::new(),
            free: Vec::new(),
            begun: Vec::new(),
            latencies: vec![0; draws.len()],
            in_flight: 0,
        }
    }

    fn push(&mut self, at: u64, event: Event) {
        self.order += 1;
        self.events.push(Reverse((at, self.order, event)));
    }

    fn begin_reads(&mut self) {
        while self.in_flight < self.case.depth && self.begun.len() < self.draws.len() {
            let read = self.begun.len();
            let id = self.free.pop().unwrap_or_else(|| {
                self.entries.push(Entry::default());
                u32::try_from(self.entries.len() - 1).expect("few")
            });
            self.entries[id as usize] = Entry { read, at_disk: false, answered: false };
            self.begun.push(self.bench.now.0);
            self.in_flight += 1;
            let misses = self.case.miss_one_of > 0 && read.is_multiple_of(self.case.miss_one_of as usize);
            let actions = self.bench.read(id, if misses { UNCACHED } else { RANGE });
            self.execute(actions, self.draws[read].server_ns);
        }
    }

    fn execute(&mut self, actions: Vec<Action>, server_ns: u64) {
        let now = self.bench.now.0;
        for action in actions {
            match action {
                Action::Fetch { fetch, .. } => self.push(now + server_ns, Event::Page(fetch)),
                Action::Disk { request, .. } | Action::DiskToo { request, .. } => {
                    let entry = &mut self.entries[request.0 as usize];
                    entry.at_disk = true;
                    let end = self.lanes.end_of(now, self.draws[entry.read].disk_ns);
                    self.push(end, Event::Disk(request));
                }
                Action::Complete { request, .. } => {
                    let entry = &mut self.entries[request.0 as usize];
                    entry.answered = true;
                    self.latencies[entry.read] = now - self.begun[entry.read];
                    self.in_flight -= 1;
                    self.release(request);
                }
                Action::SendBlock { .. } => self.bench.engine.handle_sent(SERVER, 1),
                other => panic!("nothing else happens here: {other:?}"),
            }
        }
    }

    fn release(&mut self, id: RequestId) {
        let entry = self.entries[id.0 as usize];
        if entry.answered && !entry.at_disk {
            self.free.push(id.0);
        }
    }

    fn run(&mut self) {
        self.begin_reads();
        while self.in_flight > 0 {
            let wake = self.bench.engine.next_wake();
            let next = self.events.peek().map(|Reverse((at, ..))| *at);
            let at = [wake.map(|at| at.0), next].into_iter().flatten().min().expect("something is under way");
            self.bench.now = Nanos(at.max(self.bench.now.0));
            if next == Some(at) {
                let Some(Reverse((_, _, event))) = self.events.pop() else { unreachable!() };
                self.happen(event);
            }
            if self.bench.engine.next_deadline().is_some_and(|due| due <= self.bench.now) {
                let actions = self.bench.timer();
                self.execute(actions, 0);
            }
            self.begin_reads();
        }
    }

    fn happen(&mut self, event: Event) {
        let actions = match event {
            Event::Page(fetch) => {
                self.bench.page_comes(fetch, 1);
                self.bench.actions()
            }
            Event::Disk(id) => {
                let entry = &mut self.entries[id.0 as usize];
                entry.at_disk = false;
                let misses = self.case.miss_one_of > 0 && entry.read.is_multiple_of(self.case.miss_one_of as usize);
                let was_answered = entry.answered;
                let actions = self.bench.disk_done(id.0, Ok(()), &page(if misses { 50 } else { 1 }));
                self.bench.engine.handle_evicted(&page(9));
                if was_answered {
                    self.release(id);
                }
                actions
            }
        };
        self.execute(actions, 0);
    }
}

/// Worst windows of a run, compared with the disk alone in the same window.
#[derive(Clone, Copy, Debug)]
struct Worst {
    mean: f64,
    p999: f64,
    /// Maximum number of reads of a window above 1.10 of the disk's p99.9.
    slow: usize,
}

/// Value at a rank of a window that slides over latencies.
struct Ranked {
    sorted: Vec<u64>,
    tree: Vec<u32>,
}

impl Ranked {
    fn new(values: &[u64]) -> Self {
        let mut sorted = values.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        let tree = vec![0; sorted.len().next_power_of_two() + 1];
        Self { sorted, tree }
    }

    fn add(&mut self, value: u64, count: u32) {
        let mut at = self.sorted.partition_point(|other| *other < value) + 1;
        while at < self.tree.len() {
            self.tree[at] = self.tree[at].wrapping_add(count);
            at += at & at.wrapping_neg();
        }
    }

    /// Returns the value that `rank` values of the window do not exceed.
    fn at_rank(&self, mut rank: u32) -> u64 {
        let (mut at, mut step) = (0, self.tree.len() - 1);
        while step > 0 {
            if at + step < self.tree.len() && self.tree[at + step] < rank {
                at += step;
                rank -= self.tree[at];
            }
            step /= 2;
        }
        self.sorted[at]
    }

    fn count_above(&self, value: u64) -> u32 {
        let mut at = self.sorted.partition_point(|other| *other <= value);
        let mut below = 0_u32;
        while at > 0 {
            below += self.tree[at];
            at -= at & at.wrapping_neg();
        }
        u32::try_from(WINDOW).expect("few") - below
    }
}

fn worst(got: &[u64], alone: &[u64]) -> Worst {
    let rank = u32::try_from(WINDOW * 999 / 1000).expect("few");
    let (mut of_got, mut of_alone) = (Ranked::new(got), Ranked::new(alone));
    let (mut sum_got, mut sum_alone) = (0, 0);
    let mut worst = Worst { mean: 0.0, p999: 0.0, slow: 0 };
    for read in 0..got.len() {
        of_got.add(got[read], 1);
        of_alone.add(alone[read], 1);
        sum_got += got[read];
        sum_alone += alone[read];
        let Some(gone) = (read + 1).checked_sub(WINDOW) else { continue };
        worst.mean = worst.mean.max(ratio(sum_got, sum_alone));
        let limit = of_alone.at_rank(rank);
        worst.p999 = worst.p999.max(ratio(of_got.at_rank(rank), limit));
        worst.slow = worst.slow.max(of_got.count_above(limit + limit / 10) as usize);
        of_got.add(got[gone], u32::MAX);
        of_alone.add(alone[gone], u32::MAX);
        sum_got -= got[gone];
        sum_alone -= alone[gone];
    }
    worst
}

fn run(case: &Case) -> (Worst, EngineStats) {
    let draws = draws(case);
    let alone = disk_alone(case, &draws);
    let mut world = World::new(case, &draws);
    world.run();
    (worst(&world.latencies, &alone), world.bench.engine.stats())
}

/// Name and shape of each change, its factors of the disk's median, and the number of reads that it takes.
const CHANGES: [(&str, Shape, f64, f64, u32); 10] = [
    ("rises slowly", Shape::Ramp, 0.03, 4.0, 25_000),
    ("rises quickly", Shape::Ramp, 0.03, 4.0, 5_000),
    ("rises past the other", Shape::Ramp, 0.3, 2.0, 25_000),
    ("falls", Shape::Ramp, 4.0, 0.03, 25_000),
    ("rises and falls slowly", Shape::Triangle, 0.03, 3.0, 15_000),
    ("rises and falls quickly", Shape::Triangle, 0.1, 3.0, 2_000),
    ("rises slowly, falls at once", Shape::Sawtooth, 0.03, 3.0, 15_000),
    ("falls slowly, rises at once", Shape::Sawtooth, 3.0, 0.03, 15_000),
    ("rises quickly, falls at once", Shape::Sawtooth, 0.2, 3.0, 3_000),
    ("falls quickly, rises at once", Shape::Sawtooth, 3.0, 0.2, 3_000),
];

/// Median of a disk in microseconds, its sigma, and that of the server.
type Kind = (u64, f64, f64);

/// Server and disk change, one at a time, in all ways.
fn table(depth: usize, lanes: usize, kinds: &[Kind]) -> Vec<(String, Case)> {
    let mut cases = Vec::new();
    for &(median_us, disk_sigma, server_sigma) in kinds {
        let disk = Course::steady(median_us * US, disk_sigma);
        let server = Course::steady(median_us * US, server_sigma);
        let quarter = |course: Course| Course { median_ns: course.median_ns / 4, ..course };
        for (what, shape, from, to, length) in CHANGES {
            let mut add = |who: &str, server, disk| {
                let name = format!("{who} {what}; depth {depth}, disk of {median_us} us, {disk_sigma}, {server_sigma}");
                cases.push((name, Case { reads: 30_000, depth, server, disk, lanes, miss_one_of: 0 }));
            };
            add("server", server.changing(shape, from, to, length), disk);
            // From the server's latency up, and from several times that down.
            let (from, to) = (4.0 * from, 4.0 * to);
            let disk = quarter(disk).changing(shape, from.clamp(0.3, 3.0), to.clamp(0.3, 3.0), length);
            add("disk", quarter(server), disk);
        }
    }
    cases
}

fn check(cases: Vec<(String, Case)>, is_good: impl Fn(&Worst) -> bool) {
    let mut bad = Vec::new();
    for (name, case) in cases {
        let (worst, stats) = run(&case);
        if !is_good(&worst) {
            bad.push(format!("{name}: {worst:?}, {} hits, {} hedges", stats.hit_blocks, stats.hedges));
        }
    }
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}

fn is_as_promised(worst: &Worst) -> bool {
    worst.mean <= 1.10 && worst.p999 <= 1.10
}

const LANES: usize = 64;

#[test]
fn no_window_is_slower_than_the_disk_alone_for_one_read_at_a_time() {
    let kinds = [(100, 0.0, 0.0), (7_000, 0.0, 0.3), (500, 0.5, 0.3), (20_000, 1.0, 0.0)];
    check(table(1, LANES, &kinds), is_as_promised);
}

#[test]
fn no_window_is_slower_than_the_disk_alone_for_many_reads_at_a_time() {
    let cases = [table(8, LANES, &[(500, 0.5, 0.3)]), table(32, LANES, &[(7_000, 0.3, 0.0)])].concat();
    check(cases, is_as_promised);
}

/// Abandoned reads delay the other reads of the disk.
#[test]
fn no_window_is_slower_than_the_disk_alone_where_it_does_one_read_at_a_time() {
    let cases = [table(1, 1, &[(7_000, 0.5, 0.3)]), table(32, 1, &[(500, 0.3, 0.0), (7_000, 0.0, 0.0)])].concat();
    check(cases, is_as_promised);
}

/// The p99.9 of a disk without any variance is that of its fastest read. Only the mean can be promised if more reads are in
/// flight at a jump than the p99.9 leaves out, or if one more read in the queue is more than 10 %.
#[test]
fn the_mean_is_kept_where_the_disk_always_takes_the_same() {
    let cases = [table(32, LANES, &[(100, 0.0, 0.0)]), table(8, 2, &[(500, 0.0, 0.3)])].concat();
    check(cases, |worst| worst.mean <= 1.10);
}

#[test]
fn a_server_that_stays_faster_than_the_disk_answers_nearly_all_reads() {
    for (part, server_sigma) in [(0.03, 0.3), (0.03, 0.6), (0.1, 0.3), (0.3, 0.3), (0.5, 0.3)] {
        let server = Course::steady(7_000 * US, server_sigma).changing(Shape::Sawtooth, part, part, 1);
        let disk = Course::steady(7_000 * US, 0.5);
        for miss_one_of in [0, 3] {
            let case = Case { reads: 30_000, depth: 1, server, disk, lanes: LANES, miss_one_of };
            let (worst, stats) = run(&case);
            let cached = u64::from(case.reads) - case.reads.checked_div(miss_one_of).map_or(0, u64::from);
            assert!(stats.hit_blocks * 100 >= cached * 99, "{part} {server_sigma}: {worst:?} {stats:?}");
            assert!(is_as_promised(&worst), "{part} {server_sigma}: {worst:?}");
            assert!(stats.hedges <= 128 + u64::from(case.reads) / 32 + stats.hedges_won, "{stats:?}");
        }
    }
}

#[test]
fn a_server_that_is_far_from_the_disk_costs_the_disk_one_read_in_256() {
    let server = Course::steady(7_000 * US, 0.0).changing(Shape::Sawtooth, 0.03, 0.03, 1);
    let disk = Course::steady(7_000 * US, 0.5);
    let (_, stats) = run(&Case { reads: 30_000, depth: 1, server, disk, lanes: LANES, miss_one_of: 0 });
    assert!((100..=30_000 / 256).contains(&stats.probes), "{stats:?}");
    assert_eq!(stats.hedges, 0);
    let (_, stats) = run(&Case { reads: 30_000, depth: 1, server, disk, lanes: LANES, miss_one_of: 3 });
    assert_eq!(stats.probes, 0, "reads that only the disk can answer say enough of it");
}

/// The disk gets many reads that the server answers a little later, and does them beside those that it must answer.
#[test]
fn late_pages_of_a_noisy_server_are_hedged_where_the_disk_reads_in_parallel() {
    for (depth, sigma) in [(1, 0.3), (1, 0.6), (1, 0.9), (8, 0.3), (8, 0.6)] {
        let (server, disk) = (Course::steady(100 * US, sigma), Course::steady(7_000 * US, 0.03));
        let case = Case { reads: 40_000, depth, server, disk, lanes: LANES, miss_one_of: 0 };
        let mut draws = draws(&case);
        let mut random = Random(5);
        for draw in draws.iter_mut().filter(|_| random.bits().is_multiple_of(100)) {
            draw.server_ns += 20_000 * US;
        }
        let alone = disk_alone(&case, &draws);
        let mut world = World::new(&case, &draws);
        world.run();
        let (worst, stats) = (worst(&world.latencies, &alone), world.bench.engine.stats());
        assert!(is_as_promised(&worst), "depth {depth}, {sigma}: {worst:?} {stats:?}");
        assert!(worst.mean <= 0.10, "depth {depth}, {sigma}: the server is used: {worst:?}");
        assert!(stats.hedges <= 128 + u64::from(case.reads) / 32 + stats.hedges_won, "{stats:?}");
    }
}
