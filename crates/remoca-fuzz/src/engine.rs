//! The disk engine under an arbitrary sequence of events: a guest, its disk and memory servers that lie, lose and
//! disconnect, against a model of what each block may read as.
//!
//! A small version of the simulator: one disk of 16 blocks, a cache of 8 pages in one or more pools, contents of one byte.
//! The fuzzer chooses the order of events; the simulator draws it.

use crate::pool::Pool;
use crate::source::Source;
use remoca_core::engine::{
    Action, DiskEngine, DiskError, EngineConfig, Evicted, FetchId, GuestOp, Leaving, PageOutcome, PoolOffer, PoolSlot,
    RequestId, ServerNumber, layout,
};
use remoca_core::rules::Rules;
use remoca_core::units::{ByteRange, DiskIndex, Nanos, PAGE_SIZE, PAGE_SIZE_U64, PageCount, PoolIndex};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

pub const DISK: DiskIndex = DiskIndex(0);
pub const BLOCKS: u8 = 16;
const CACHE: PageCount = PageCount(8);
const REQUESTS_MAX: u32 = 8;
const SERVERS_MAX: usize = 4;

/// Returns the engine's configuration, with a port or without.
pub fn config(has_port: bool) -> EngineConfig {
    EngineConfig {
        disks: 1,
        key: [7; 16],
        seed: 1,
        cache: CACHE,
        local: PageCount(0),
        guest_memory: PageCount(16),
        has_port,
        frame_sample: 1,
        send_window: 6,
        fetch_limit: 6,
        slots_per_turn: 2,
        pools: 16,
        hedge: true,
        rules: Rules::default(),
    }
}

pub fn run(data: &[u8]) {
    let mut source = Source(data);
    let mut world = World::new(source.byte());
    while !source.is_empty() {
        world.step(&mut source);
    }
    world.finish();
}

/// A guest request that has not completed.
struct Request {
    op: GuestOp,
    first: usize,
    /// Data that it writes, or has read so far: one byte per block.
    buffer: Vec<u8>,
    /// For a read: possible contents of each block.
    allowed: Vec<Vec<u8>>,
    /// The disk's content when the request was sent to it.
    sampled: Vec<u8>,
}

pub struct World {
    pub engine: DiskEngine<Vec<u32>>,
    options: u8,
    /// Whether the index's knowledge of the disk should be true, as far as this model knows.
    trusted: bool,
    now: Nanos,
    disk: [u8; BLOCKS as usize],
    requests: BTreeMap<u32, Request>,
    /// Requests in progress at the disk, including reads that the server may still answer, or has answered.
    disk_queue: VecDeque<u32>,
    hedged: BTreeSet<u32>,
    /// Pools by server number, also of servers no longer on the list.
    pools: Vec<Pool>,
    servers: Vec<ServerNumber>,
    asked: Vec<ServerNumber>,
    /// Servers that have answered, and are neither used nor released.
    answered: Vec<ServerNumber>,
    sessions: BTreeMap<ServerNumber, Session>,
}

/// Session with one server.
#[derive(Default)]
struct Session {
    /// Replies in flight, and the server's content for them.
    replies: VecDeque<(FetchId, Option<u8>)>,
    /// Size in the SETSIZE that is outstanding.
    size: Option<PageCount>,
}

fn page(content: u8) -> Vec<u8> {
    vec![content; PAGE_SIZE]
}

fn pages(contents: &[u8]) -> Vec<u8> {
    // Concatenated page by page. The fuzzer would count each step of a loop over bytes.
    contents.iter().map(|content| page(*content)).collect::<Vec<_>>().concat()
}

impl World {
    /// Makes a world. Bits of `options` select: no port, a swap disk, only one server, and no pool.
    pub fn new(options: u8) -> Self {
        let config = config(options & 1 == 0);
        let mut engine = DiskEngine::new(&config, vec![0; layout(&config).words()]);
        engine.describe_disk(DISK, u64::from(BLOCKS) * PAGE_SIZE_U64, options & 2 != 0);
        let mut world = Self {
            engine,
            options,
            trusted: true,
            now: Nanos(1),
            disk: [1; BLOCKS as usize],
            requests: BTreeMap::new(),
            disk_queue: VecDeque::new(),
            hedged: BTreeSet::new(),
            pools: Vec::new(),
            servers: Vec::new(),
            asked: Vec::new(),
            answered: Vec::new(),
            sessions: BTreeMap::new(),
        };
        // Most inputs begin with a pool of the wanted size.
        world.change_servers(0x80);
        if options & 4 == 0 {
            world.change_servers(0x80);
        }
        world.act();
        while options & 8 == 0 && !(world.asked.is_empty() && world.sessions.values().all(|it| it.size.is_none())) {
            world.answer(&mut Source(&[0, 2, 0x80]));
            world.act();
            world.answer_size(&mut Source(&[2]));
            world.act();
        }
        world
    }

    /// Replaces the process by another one, with an engine made from the words that it left. Unless they are
    /// `trusted`, the engine may claim anything. Half of the writes in flight take effect.
    pub fn succeed(&mut self, engine: DiskEngine<Vec<u32>>, trusted: bool) {
        for id in std::mem::take(&mut self.disk_queue) {
            let write = self.requests.get(&id).filter(|request| !matches!(request.op, GuestOp::Read(_)));
            if let Some(Request { first, buffer, .. }) = write.filter(|_| id & 1 == 0) {
                self.disk[*first..first + buffer.len()].copy_from_slice(buffer);
            }
        }
        self.requests.clear();
        self.hedged.clear();
        self.asked.clear();
        self.answered.clear();
        self.sessions.clear();
        (self.engine, self.trusted) = (engine, trusted);
        self.engine.describe_disk(DISK, u64::from(BLOCKS) * PAGE_SIZE_U64, self.options & 2 != 0);
        self.engine.set_servers(self.now, &self.servers, Leaving::AtOnce);
        self.act();
    }

    pub fn step(&mut self, source: &mut Source) {
        match source.below(16) {
            0..=2 => self.request(source),
            3 | 4 => self.disk_done(source),
            5 | 6 => self.evict(source.byte()),
            7 | 8 => self.reply(source),
            9 => self.answer(source),
            10 => self.disconnect(source),
            11 => self.answer_size(source),
            12 => {
                if let Some(server) = self.any_session(source) {
                    self.engine.handle_sent(server, u32::from(source.below(4)));
                }
            }
            13 => self.pass_time(source),
            14 => self.engine.resize(self.now, PageCount(u32::from(source.below(3)) * 4), PageCount(0)),
            _ => match source.byte() {
                kind if kind & 1 == 0 => self.change_servers(kind),
                _ => self.reply_unasked(source),
            },
        }
        self.act();
        self.check();
    }

    /// Returns a server with a session, or `None` if there is none.
    fn any_session(&self, source: &mut Source) -> Option<ServerNumber> {
        // Inputs with one session do not choose.
        let at = if self.sessions.len() > 1 { usize::from(source.byte()) % self.sessions.len() } else { 0 };
        self.sessions.keys().nth(at).copied()
    }

    /// Sends a page that nobody asked this server for, although another server may owe it.
    fn reply_unasked(&mut self, source: &mut Source) {
        let fetch = FetchId(source.word());
        let Some(server) = self.any_session(source) else { return };
        if self.sessions[&server].replies.iter().all(|(waiting, _)| *waiting != fetch) {
            let outcome = self.engine.handle_page(self.now, server, fetch, &page(source.byte()));
            assert_eq!(outcome, PageOutcome::Unexpected);
        }
    }

    /// Adds a server with a new number, or removes one.
    fn change_servers(&mut self, kind: u8) {
        if kind & 0x80 != 0 && self.servers.len() < SERVERS_MAX {
            self.servers.push(ServerNumber(u32::try_from(self.pools.len()).unwrap()));
            self.pools.push(Pool::default());
        } else if !self.servers.is_empty() {
            self.servers.remove(usize::from(kind >> 1) % self.servers.len());
        }
        let leaving = if kind & 0x40 == 0 { Leaving::AtOnce } else { Leaving::Drained };
        self.engine.set_servers(self.now, &self.servers, leaving);
    }

    /// Returns the pool at a server.
    fn pool(&mut self, server: ServerNumber) -> &mut Pool {
        assert!(self.sessions.contains_key(&server), "frames go over a session");
        &mut self.pools[server.0 as usize]
    }

    fn session(&mut self, server: ServerNumber) -> &mut Session {
        self.sessions.get_mut(&server).expect("frames go over a session")
    }

    fn request(&mut self, source: &mut Source) {
        let Some(id) = (0..REQUESTS_MAX).find(|id| !self.requests.contains_key(id) && !self.disk_queue.contains(id))
        else {
            return;
        };
        let first = usize::from(source.below(BLOCKS));
        let count = usize::from(source.below(3) + 1).min(usize::from(BLOCKS) - first);
        let range = ByteRange { offset: first as u64 * PAGE_SIZE_U64, length: count as u64 * PAGE_SIZE_U64 };
        let kind = source.below(8);
        let content = source.below(6);
        let (op, buffer) = match kind {
            0..=2 => (GuestOp::Read(range), vec![0xee; count]),
            3 | 4 => (GuestOp::Write { range, durable: kind == 3 }, vec![content; count]),
            5 => (GuestOp::Flush, Vec::new()),
            6 => (GuestOp::Discard(range), vec![0; count]),
            _ => (GuestOp::WriteZeroes { range, may_unmap: true, durable: false }, vec![0; count]),
        };
        let mut allowed = Vec::new();
        if let GuestOp::Read(_) = op {
            allowed = (first..first + count).map(|block| self.contents_of(block)).collect();
        } else {
            for (block, content) in (first..).zip(&buffer) {
                for read in self.requests.values_mut().filter(|other| matches!(other.op, GuestOp::Read(_))) {
                    if let Some(allowed) = block.checked_sub(read.first).and_then(|at| read.allowed.get_mut(at)) {
                        allowed.push(*content);
                    }
                }
            }
        }
        self.requests.insert(id, Request { op, first, buffer, allowed, sampled: Vec::new() });
        self.engine.handle_request(self.now, RequestId(id), DISK, op);
    }

    /// Returns the contents that a read that begins now may return: the disk's content, and data being written.
    fn contents_of(&self, block: usize) -> Vec<u8> {
        let mut contents = vec![self.disk[block]];
        for write in self.requests.values().filter(|other| !matches!(other.op, GuestOp::Read(_))) {
            contents.extend(block.checked_sub(write.first).and_then(|at| write.buffer.get(at)));
        }
        contents
    }

    /// Completes one of the disk's requests: in any order, successfully or not.
    fn disk_done(&mut self, source: &mut Source) {
        if self.disk_queue.is_empty() {
            return;
        }
        let at = usize::from(source.byte()) % self.disk_queue.len();
        let outcome = source.byte();
        let id = self.disk_queue.remove(at).unwrap();
        let failed = outcome.is_multiple_of(8);
        let hedged = self.hedged.remove(&id);
        let Some(request) = self.requests.get_mut(&id).filter(|_| !(hedged && failed)) else {
            // The server was faster, or may still answer.
            assert!(hedged, "the disk works for requests that wait");
            if outcome & 32 != 0 && !self.requests.contains_key(&id) {
                return self.engine.handle_disk_skipped(RequestId(id));
            }
            let result = if failed { Err(DiskError(5)) } else { Ok(()) };
            return self.engine.handle_disk_done(self.now, RequestId(id), result, &[]);
        };
        let blocks = request.first..request.first + request.buffer.len();
        if let GuestOp::Read(_) = request.op {
            // The disk reads at the beginning or at the end.
            let sampled = if outcome & 16 == 0 { request.sampled.clone() } else { self.disk[blocks].to_vec() };
            request.buffer = sampled;
        } else if !failed || outcome & 16 == 0 {
            // A failed write may still have been done; a discard may have been ignored.
            let ignored = matches!(request.op, GuestOp::Discard(_)) && outcome & 32 != 0;
            if !ignored {
                self.disk[blocks].copy_from_slice(&request.buffer);
            }
        }
        let data = if matches!(request.op, GuestOp::Read(_) | GuestOp::Write { .. }) {
            pages(&request.buffer)
        } else {
            Vec::new()
        };
        let result = if failed { Err(DiskError(5)) } else { Ok(()) };
        self.engine.handle_disk_done(self.now, RequestId(id), result, &data);
    }

    /// Evicts a page that the agent sends, or one that is about to be overwritten in its frame.
    fn evict(&mut self, kind: u8) {
        let content = kind % 6;
        let evicted = match kind & 0x80 {
            0 => self.engine.handle_evicted(&page(content)),
            _ if self.engine.wants_frame() => self.engine.handle_frame(&page(content)),
            _ => return,
        };
        match evicted {
            Evicted::Admit(admitted) => {
                assert!(!self.trusted || self.disk.contains(&content), "what is admitted is what the disk holds");
                self.store(admitted.at, content);
            }
            Evicted::Zero => assert_eq!(content, 0),
            Evicted::Duplicate | Evicted::Unmatched | Evicted::Dropped | Evicted::PassedOver => {}
        }
    }

    fn store(&mut self, at: PoolSlot, content: u8) {
        self.pool(at.server).store(at.slot, content);
    }

    /// Answers the oldest REQUEST to a server: correctly, with something else, or with nothing.
    fn reply(&mut self, source: &mut Source) {
        let Some(server) = self.any_session(source) else { return };
        let Some((fetch, content)) = self.session(server).replies.pop_front() else { return };
        self.pool(server).note_answer();
        let kind = source.byte();
        let sent = match content {
            Some(content) if kind & 3 != 0 => content,
            Some(_) if kind & 4 != 0 => kind >> 3,
            _ => return self.engine.handle_missing(self.now, server, fetch),
        };
        match self.engine.handle_page(self.now, server, fetch, &page(sent)) {
            PageOutcome::Deliver { request, offset } => self.deliver(request, offset, sent),
            PageOutcome::Unexpected => panic!("the engine asked for it"),
            PageOutcome::Late | PageOutcome::Wrong => {}
        }
    }

    fn deliver(&mut self, request: RequestId, offset: u32, content: u8) {
        let request = self.requests.get_mut(&request.0).expect("pages go to requests that wait");
        request.buffer[offset as usize / PAGE_SIZE] = content;
    }

    /// Answers an `Ask`: with nothing, with an offer of a pool that may have lost something or everything, or with
    /// arbitrary numbers.
    fn answer(&mut self, source: &mut Source) {
        if self.asked.is_empty() {
            return;
        }
        let number = self.asked.remove(usize::from(source.byte()) % self.asked.len());
        let kind = source.byte();
        let pool = &mut self.pools[number.0 as usize];
        pool.lose(kind >> 2 & 7);
        if kind & 1 != 0 {
            pool.restart(PageCount(source.count()));
        }
        let offer = (kind & 3 != 3).then(|| PoolOffer {
            sends_received: if kind < 0xe0 { pool.sends } else { u64::from(source.word()) },
            ..pool.offer(PageCount(source.count()))
        });
        if offer.is_some() {
            self.answered.push(number);
        }
        self.engine.handle_answer(self.now, number, offer);
    }

    fn disconnect(&mut self, source: &mut Source) {
        if let Some(server) = self.any_session(source) {
            self.hang_up(server);
            self.engine.handle_disconnected(self.now, server);
        }
    }

    fn hang_up(&mut self, server: ServerNumber) {
        assert!(self.sessions.remove(&server).is_some(), "there is a session to be ended");
    }

    /// Checks that the connection to this server is used or closed.
    fn take_answered(&mut self, number: ServerNumber) {
        let at = self.answered.iter().position(|answered| *answered == number);
        self.answered.remove(at.expect("it answered, and was neither used nor released"));
    }

    fn answer_size(&mut self, source: &mut Source) {
        let waiting = self.sessions.iter().filter(|(_, session)| session.size.is_some());
        let waiting: Vec<_> = waiting.map(|(server, _)| *server).collect();
        if waiting.is_empty() {
            return;
        }
        let at = if waiting.len() > 1 { usize::from(source.byte()) % waiting.len() } else { 0 };
        let server = waiting[at];
        let asked = self.session(server).size.take().expect("it waits for an answer");
        let kind = source.byte();
        self.pool(server).note_answer();
        if kind & 3 == 0 {
            return self.engine.handle_size_refused(self.now, server, PageCount(source.count()));
        }
        let granted = if kind & 3 == 1 { PageCount(source.count()) } else { asked };
        self.pool(server).resize(granted);
        self.engine.handle_sized(self.now, server, granted);
    }

    fn pass_time(&mut self, source: &mut Source) {
        self.now = self.now.plus_ns(u64::from(source.byte()) << (10 + source.below(24)));
        if self.engine.next_deadline().is_some_and(|deadline| deadline <= self.now) {
            self.engine.handle_timer(self.now);
        }
    }

    /// Checks what holds after every event.
    fn check(&self) {
        let index = self.engine.index();
        for pool in PoolIndex::all() {
            let (counts, capacity) = (index.pool_slot_counts(pool), index.capacity(pool));
            assert_eq!(counts.free + counts.used + counts.draining, capacity.0, "{counts:?}");
        }
        let status = self.engine.status();
        assert_eq!(status.pools.len(), self.sessions.len());
        let shares = status.pools.iter().filter(|pool| !pool.is_draining).map(|pool| u64::from(pool.wanted.0));
        assert!(shares.sum::<u64>() <= u64::from(status.wanted.0), "more is asked for than wanted: {status:?}");
    }

    /// Executes the engine's actions.
    fn act(&mut self) {
        while let Some(action) = self.engine.poll_action() {
            match action {
                Action::Disk { request, op, .. } => self.act_on_disk(request, op),
                Action::DiskToo { request, op, .. } => {
                    self.act_on_disk(request, op);
                    self.hedged.insert(request.0);
                }
                Action::ZeroFill { request, offset, length } => {
                    assert_eq!(length as usize, PAGE_SIZE);
                    self.deliver(request, offset, 0);
                }
                Action::Complete { request, result } => self.complete(request, result),
                Action::Fetch { fetch, at } => {
                    let content = self.pool(at.server).page(at.slot);
                    self.session(at.server).replies.push_back((fetch, content));
                }
                Action::SendBlock { admitted, request, offset } => {
                    let content = self.requests[&request.0].buffer[offset as usize / PAGE_SIZE];
                    self.store(admitted.at, content);
                }
                Action::MovePage { server, from, to } => self.pool(server).relocate(from, to),
                Action::SetSize { server, npages } => {
                    let before = self.session(server).size.replace(npages);
                    assert_eq!(before, None, "one SETSIZE is outstanding at a time");
                }
                Action::Ask(number) => {
                    assert!(
                        !self.asked.contains(&number) && !self.answered.contains(&number),
                        "a server is asked once"
                    );
                    self.asked.push(number);
                }
                Action::Use(number) => {
                    self.take_answered(number);
                    let before = self.sessions.insert(number, Session::default());
                    assert!(before.is_none(), "one session with a server ends before another begins");
                }
                Action::Release(number) => self.take_answered(number),
                Action::GiveUp(server) => self.hang_up(server),
                Action::Leave(server) => {
                    self.pool(server).restart(PageCount(0));
                    self.hang_up(server);
                }
                // A lying model could make the engine believe in one; then only the index is dropped.
                Action::ForeignWriter(_) => {}
            }
        }
    }

    fn act_on_disk(&mut self, id: RequestId, op: GuestOp) {
        let waiting = self.requests.get_mut(&id.0).expect("the disk works for requests that wait");
        assert_eq!(op, waiting.op);
        waiting.sampled = self.disk[waiting.first..waiting.first + waiting.buffer.len()].to_vec();
        assert!(!self.disk_queue.contains(&id.0), "the disk is asked once");
        self.disk_queue.push_back(id.0);
    }

    fn complete(&mut self, id: RequestId, result: Result<(), DiskError>) {
        let request = self.requests.remove(&id.0).expect("each request completes once");
        let busy = self.disk_queue.contains(&id.0) && !self.hedged.contains(&id.0);
        assert!(!busy, "nothing completes while only the disk can answer it");
        if let (GuestOp::Read(_), Ok(()), true) = (request.op, result, self.trusted) {
            for (at, content) in request.buffer.iter().enumerate() {
                let (block, allowed) = (request.first + at, &request.allowed[at]);
                assert!(allowed.contains(content), "block {block} reads as {content}, not as one of {allowed:?}");
            }
        }
    }

    /// Runs until the index has its wanted size.
    pub fn come_to_rest(&mut self) {
        while self.engine.index().is_resizing() || self.engine.index().is_cutting() {
            self.engine.handle_timer(self.now);
            self.act();
        }
    }

    /// Brings everything to an end, whatever happened.
    pub fn finish(&mut self) {
        self.servers.clear();
        self.engine.set_servers(self.now, &[], Leaving::AtOnce);
        self.act();
        assert!(self.sessions.is_empty() && self.answered.is_empty(), "a connection was left open");
        while !self.disk_queue.is_empty() {
            self.disk_done(&mut Source(&[0, 1]));
            self.act();
        }
        assert!(self.requests.is_empty(), "a request was never completed");
        assert_eq!(self.engine.requests_in_flight(), 0);
    }
}

pub fn seeds() -> Vec<Vec<u8>> {
    // Read block 3 from the disk; evict it; read it from the server.
    let read = [0, 3, 0, 0, 0];
    let done = [3, 0, 1];
    let hit = [&[0][..], &read, &done, &[5, 1], &read, &[7, 1]].concat();
    // The same with a write in flight, a lie, and a lost connection.
    let write = [0, 3, 0, 3, 4];
    let race = [&[4][..], &read, &done, &[5, 1], &read, &write, &[7, 4], &done, &done, &[10]].concat();
    let swap = [&[2][..], &write, &done, &read, &[7, 1], &write, &read, &done, &done].concat();
    // The page is sent, lost, and requested on the next connection.
    let lost = [&[0][..], &read, &done, &[5, 1, 10, 13, 200, 20, 9, 0, 4, 0x80], &read, &[7, 1], &done].concat();
    // Two servers with half of the cache each: one is lost, then drained.
    let two = [&[4, 15, 0x80, 9, 0, 0, 0x40, 9, 0, 0, 0x40, 11, 0, 2, 11, 2][..], &read, &done, &[5, 1], &read];
    let two = [&two.concat()[..], &[7, 0, 1, 10, 0, 15, 0xc0, 13, 200, 20, 9, 0, 4, 0x80], &read, &done].concat();
    vec![hit, race, swap, lost, two]
}
