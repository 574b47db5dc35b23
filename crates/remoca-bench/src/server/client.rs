//! The client of the benchmark: one thread and the same code for all servers.
//!
//! Keeps a window of requests open on each connection: reads the available bytes, checks each page, and requests as
//! many new pages with one write. A single connection is read in blocking mode, several through epoll.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use remoca_core::fingerprint::{Fingerprint, Fingerprinter};
use remoca_protocol::{Frame, Hello, PAGE_SIZE, PageCount, RequestId, Token, VERSIONS};
use rustix::event::{Timespec, epoll};

use super::dialect::Dialect;
use super::pattern;

/// Maximum time without any answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Number of pages in one write that stores them.
const STORE_BATCH: u32 = 32;

/// A connection, and the pages that are read over it.
pub(crate) struct Connection {
    stream: TcpStream,
    dialect: Dialect,
    /// Numbers of the pages. On a memory server, the first one is in slot 0.
    pages: Range<u32>,
    open: VecDeque<u32>,
    buffer: Vec<u8>,
    filled: usize,
    out: Vec<u8>,
    random: u64,
    answered: u32,
    tags: Option<Tags>,
}

/// Fingerprints of all pages, which each page that arrives is checked against.
#[derive(Clone)]
pub(crate) struct Tags {
    prints: Fingerprinter,
    expected: Arc<[Fingerprint]>,
}

impl Tags {
    /// Computes the fingerprints of the pages from 0 to `pages` - 1.
    pub(crate) fn new(pages: u32) -> Self {
        let prints = Fingerprinter::new(&[9; 16]);
        let mut content = [0; PAGE_SIZE];
        let mut tag = |page| {
            pattern::fill(page, &mut content);
            prints.page(&content)
        };
        let expected = (0..pages).map(&mut tag).collect();
        Self { prints, expected }
    }

    fn check(&self, page: u32, content: &[u8]) -> bool {
        self.expected.get(page as usize) == Some(&self.prints.page(content))
    }
}

/// Result of one measurement of one server.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Measure {
    pub(crate) pages: u64,
    pub(crate) elapsed: Duration,
    pub(crate) client_cpu: Duration,
}

impl Measure {
    #[expect(clippy::cast_precision_loss, reason = "far fewer pages than 2^52")]
    pub(crate) fn pages_f64(&self) -> f64 {
        self.pages as f64
    }

    /// Returns the mean time from one page to the next, in microseconds.
    pub(crate) fn us_each(&self) -> f64 {
        self.elapsed.as_secs_f64() * 1e6 / self.pages_f64()
    }
}

impl Connection {
    /// Connects to a server. On a memory server, also opens the pool number `pool` for `pages`.
    pub(crate) fn open(address: SocketAddr, dialect: Dialect, pages: Range<u32>, pool: u8) -> Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut connection = Self {
            stream,
            dialect,
            pages,
            open: VecDeque::new(),
            buffer: vec![0; 40 * (PAGE_SIZE + 64)],
            filled: 0,
            out: Vec::new(),
            random: 0,
            answered: 0,
            tags: None,
        };
        if dialect == Dialect::Remoca {
            connection.open_pool(pool)?;
        }
        Ok(connection)
    }

    /// Checks the fingerprint of each page that arrives from now on, or of none.
    pub(crate) fn check_tags(&mut self, tags: Option<Tags>) {
        self.tags = tags;
    }

    fn open_pool(&mut self, pool: u8) -> Result<()> {
        let npages = PageCount(self.pages.end - self.pages.start);
        let mut bytes = Vec::new();
        Frame::Hello(Hello { versions: VERSIONS, token: Token([pool; 16]), epoch: 1 }).encode(&mut bytes);
        Frame::SetSize { request: RequestId(1), npages }.encode(&mut bytes);
        self.stream.write_all(&bytes)?;
        let mut sized = false;
        while !sized {
            self.receive()?;
            let mut used = 0;
            while let Some((frame, length)) = remoca_protocol::decode(&self.buffer[used..self.filled])? {
                match frame {
                    Frame::Welcome(_) => {}
                    Frame::Sized { .. } => sized = true,
                    other => bail!("the memory server answers {other:?}"),
                }
                used += length;
            }
            self.drop_front(used);
        }
        Ok(())
    }

    /// Returns the slot of the page on a memory server, or its number on other servers.
    fn slot(&self, page: u32) -> u32 {
        if self.dialect == Dialect::Remoca { page - self.pages.start } else { page }
    }

    /// Stores all pages.
    pub(crate) fn store_all(&mut self) -> Result<()> {
        let mut content = [0; PAGE_SIZE];
        let mut page = self.pages.start;
        while page < self.pages.end {
            let end = self.pages.end.min(page + STORE_BATCH);
            self.out.clear();
            for page in page..end {
                pattern::fill(page, &mut content);
                self.dialect.put_set(self.slot(page), &content, &mut self.out);
            }
            self.stream.write_all(&self.out)?;
            let expected = self.dialect.stored();
            let mut answer = vec![0; expected.len() * (end - page) as usize];
            self.stream.read_exact(&mut answer)?;
            ensure!(answer == expected.repeat((end - page) as usize), "the server did not store the pages: {answer:?}");
            page = end;
        }
        Ok(())
    }

    /// Returns requests that store a sample of the pages again, with unchanged content.
    fn store_batches(&self) -> Vec<Vec<u8>> {
        let mut content = [0; PAGE_SIZE];
        let count = u64::from(self.pages.end - self.pages.start);
        let mut batch = |batch: u32| {
            let mut bytes = Vec::new();
            for number in 0..STORE_BATCH {
                let place = u64::from(batch * STORE_BATCH + number) * 0x9e37_79b1 % count;
                let page = self.pages.start + u32::try_from(place).unwrap_or(0);
                pattern::fill(page, &mut content);
                self.dialect.put_set(self.slot(page), &content, &mut bytes);
            }
            bytes
        };
        (0..64).map(&mut batch).collect()
    }

    /// Reads each page once, and compares it as a whole.
    pub(crate) fn verify_all(&mut self) -> Result<()> {
        let mut next = self.pages.start;
        let mut whole = true;
        while next < self.pages.end || !self.open.is_empty() {
            self.out.clear();
            while next < self.pages.end && self.open.len() < 32 {
                self.dialect.put_get(self.slot(next), &mut self.out);
                self.open.push_back(next);
                next += 1;
            }
            self.stream.write_all(&self.out)?;
            self.receive()?;
            self.take_pages(|page, content, _| whole &= pattern::check_whole(page, content))?;
            ensure!(whole, "the server sent a page with wrong content");
        }
        Ok(())
    }

    /// Requests `count` random pages with one write.
    fn ask(&mut self, count: usize) -> Result<()> {
        self.out.clear();
        for _ in 0..count {
            let page = self.random_page();
            self.dialect.put_get(self.slot(page), &mut self.out);
            self.open.push_back(page);
        }
        // A window of requests is far smaller than a socket buffer.
        Ok(self.stream.write_all(&self.out)?)
    }

    /// Checks the pages that have arrived, and returns their number.
    fn take_checked(&mut self) -> Result<usize> {
        let mut right = true;
        let tags = self.tags.clone();
        let taken = self.take_pages(|page, content, sequence| {
            right &= pattern::check(page, content, sequence);
            right &= tags.as_ref().is_none_or(|tags| tags.check(page, content));
        })?;
        ensure!(right, "the server sent a page with wrong content");
        Ok(taken)
    }

    fn take_pages(&mut self, mut look: impl FnMut(u32, &[u8], u32)) -> Result<usize> {
        let mut used = 0;
        let mut taken = 0;
        while let Some(&page) = self.open.front() {
            let bytes = &self.buffer[used..self.filled];
            let Some(reply) = self.dialect.take_page(self.slot(page), bytes)? else { break };
            look(page, &bytes[reply.page_at..reply.page_at + PAGE_SIZE], self.answered);
            self.answered = self.answered.wrapping_add(1);
            self.open.pop_front();
            used += reply.length;
            taken += 1;
        }
        self.drop_front(used);
        Ok(taken)
    }

    fn drop_front(&mut self, used: usize) {
        self.buffer.copy_within(used..self.filled, 0);
        self.filled -= used;
    }

    /// Reads the available bytes. Returns `false` if there are none (non-blocking mode only).
    fn receive(&mut self) -> Result<bool> {
        match self.stream.read(&mut self.buffer[self.filled..]) {
            Ok(0) => bail!("the server closed the connection"),
            Ok(count) => {
                self.filled += count;
                Ok(true)
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock && !self.blocking()? => Ok(false),
            Err(error) => Err(error).context("no answer"),
        }
    }

    fn blocking(&self) -> Result<bool> {
        Ok(!rustix::fs::fcntl_getfl(&self.stream)?.contains(rustix::fs::OFlags::NONBLOCK))
    }

    fn random_page(&mut self) -> u32 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let count = u64::from(self.pages.end - self.pages.start);
        // Below 2^32, as `count` is.
        self.pages.start + u32::try_from(((self.random >> 32) * count) >> 32).unwrap_or(0)
    }
}

/// Gets random pages for `time`, with `depth` requests open on each connection.
pub(crate) fn get(connections: &mut [Connection], depth: usize, time: Duration, seed: u64) -> Result<Measure> {
    for (number, connection) in (1_u64..).zip(&mut *connections) {
        connection.random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (number << 17) | 1;
        connection.stream.set_nonblocking(false)?;
    }
    let cpu = thread_cpu();
    let started = Instant::now();
    let deadline = started + time;
    let pages = match connections {
        [connection] => get_blocking(connection, depth, deadline)?,
        several => get_by_events(several, depth, deadline)?,
    };
    Ok(Measure { pages, elapsed: started.elapsed(), client_cpu: thread_cpu() - cpu })
}

fn get_blocking(connection: &mut Connection, depth: usize, deadline: Instant) -> Result<u64> {
    connection.ask(depth)?;
    let mut pages = 0;
    while !connection.open.is_empty() {
        connection.receive()?;
        let taken = connection.take_checked()?;
        pages += taken as u64;
        if taken > 0 && Instant::now() < deadline {
            connection.ask(taken)?;
        }
    }
    Ok(pages)
}

fn get_by_events(connections: &mut [Connection], depth: usize, deadline: Instant) -> Result<u64> {
    let events = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    for (number, connection) in (0..).zip(&mut *connections) {
        connection.stream.set_nonblocking(true)?;
        epoll::add(&events, &connection.stream, epoll::EventData::new_u64(number), epoll::EventFlags::IN)?;
        connection.ask(depth)?;
    }
    let patience = Timespec { tv_sec: PATIENCE.as_secs().try_into()?, tv_nsec: 0 };
    let mut ready = Vec::with_capacity(connections.len());
    let mut pages = 0;
    while connections.iter().any(|connection| !connection.open.is_empty()) {
        ready.clear();
        let count = epoll::wait(&events, rustix::buffer::spare_capacity(&mut ready), Some(&patience))?;
        ensure!(count > 0, "no answer");
        for event in &ready {
            let connection = &mut connections[usize::try_from(event.data.u64())?];
            connection.receive()?;
            let taken = connection.take_checked()?;
            pages += taken as u64;
            if taken > 0 && Instant::now() < deadline {
                connection.ask(taken)?;
            }
        }
    }
    Ok(pages)
}

/// Stores pages for `time`, [`STORE_BATCH`] at a time. Sends the next batch when the server has confirmed the previous
/// one, by its answers or by answering a get sent after it.
pub(crate) fn set(connection: &mut Connection, time: Duration) -> Result<Measure> {
    let batches = connection.store_batches();
    connection.stream.set_nonblocking(false)?;
    connection.random = 1;
    let answers = connection.dialect.stored().repeat(STORE_BATCH as usize);
    let mut received = vec![0; answers.len()];
    let cpu = thread_cpu();
    let started = Instant::now();
    let mut pages = 0;
    for batch in batches.iter().cycle() {
        connection.stream.write_all(batch)?;
        if answers.is_empty() {
            get_blocking(connection, 1, started)?;
        } else {
            connection.stream.read_exact(&mut received)?;
            ensure!(received == answers, "the server did not store the pages");
        }
        pages += u64::from(STORE_BATCH);
        if started.elapsed() >= time {
            break;
        }
    }
    Ok(Measure { pages, elapsed: started.elapsed(), client_cpu: thread_cpu() - cpu })
}

fn thread_cpu() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec.try_into().unwrap_or(0), now.tv_nsec.try_into().unwrap_or(0))
}
