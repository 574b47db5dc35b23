//! The session of a mapped pool: it negotiates the size, and no page travels over it.
//!
//! Runs as a task of the thread of all mapped pools. The client's connection brings it the memory of its pool, once, with the
//! WELCOME. Descriptors that a client sends are closed by the kernel unread, because no room is given for any.
//!
//! 1. A change of the size that was begun is completed, or the part of a growth that is granted at a time, even if the session ends
//!    meanwhile (`mapped_pool.rs`).
//! 2. A client that does not answer a TAKEBACK in time, or uses memory that it was not granted, loses its pool.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use remoca_protocol::{
    ErrorCode, ErrorReply, Frame, MAPPED_VERSION, PageCount, ReceiveBuffer, RequestId, SendCount, TAKE_BACK_MS, Welcome,
};
use tokio::task::{spawn_blocking, spawn_local};
use tokio::time::{Instant, timeout};

use crate::keeper::Keeper;
use crate::mapped_pool::{MappedPool, Refusal};
use crate::pool::ResizeRefusal;
use crate::session::{SessionEnd, Violation};
use crate::stream::Stream;
use crate::worker::reached;

/// Time that a client has to answer a TAKEBACK.
const TAKE_BACK: Duration = Duration::from_millis(TAKE_BACK_MS);

pub(crate) struct MappedSession {
    stream: Stream,
    buffer: ReceiveBuffer,
    pool: Arc<MappedPool>,
    keeper: Keeper,
    stall_timeout: Duration,
    /// Time at which the pool is ended if the client has not answered a TAKEBACK.
    answer_by: Option<Instant>,
}

/// What woke a session.
enum Event {
    Received(usize),
    Called,
    TimeIsUp,
}

impl MappedSession {
    /// Creates a session. `buffer` may hold frames that came directly after the HELLO.
    pub(crate) fn new(
        stream: Stream,
        buffer: ReceiveBuffer,
        pool: Arc<MappedPool>,
        keeper: Keeper,
        stall_timeout: Duration,
    ) -> Self {
        Self { stream, buffer, pool, keeper, stall_timeout, answer_by: None }
    }

    /// Serves the client until its connection or its pool ends. Returns why it ended, and the connection.
    pub(crate) async fn run(mut self) -> (SessionEnd, Stream) {
        let Err(end) = self.serve().await;
        (end, self.stream)
    }

    async fn serve(&mut self) -> Result<std::convert::Infallible, SessionEnd> {
        // An earlier session may have begun a change of the size.
        tokio::select! {
            () = self.pool.settle() => {}
            () = self.pool.over() => return Err(SessionEnd::TakenBack),
        }
        self.welcome().await?;
        self.look_at_limit().await?;
        loop {
            if self.pool.is_over() {
                return Err(SessionEnd::TakenBack);
            }
            self.handle_frames().await?;
            match self.next_event().await? {
                Event::Received(0) => return Err(SessionEnd::Closed),
                Event::Received(count) => self.buffer.filled(count),
                Event::Called => self.look_at_limit().await?,
                Event::TimeIsUp => {
                    tracing::warn!(token = ?self.pool.identity.token, "a client does not give memory back: its pool is ended");
                    return Err(SessionEnd::TakenBack);
                }
            }
        }
    }

    async fn next_event(&mut self) -> Result<Event, SessionEnd> {
        let Self { stream, buffer, pool, answer_by, .. } = self;
        tokio::select! {
            // An answer that is there counts, however late this thread looks at it.
            biased;
            count = stream.read(buffer.space()) => Ok(Event::Received(count?)),
            () = pool.called.notified() => Ok(Event::Called),
            () = reached(*answer_by) => Ok(Event::TimeIsUp),
        }
    }

    /// Sends the WELCOME, and with its first byte the memory.
    async fn welcome(&mut self) -> Result<(), SessionEnd> {
        let pool = &self.pool;
        let mut bytes = Vec::new();
        Frame::Welcome(Welcome {
            version: MAPPED_VERSION,
            server_id: pool.identity.server_id,
            pool_generation: pool.identity.generation,
            npages: pool.granted(),
            available: pool.available(),
            quota: pool.limit(),
            sends_received: SendCount(0),
        })
        .encode(&mut bytes);
        let stall_timeout = self.stall_timeout;
        let sent = timeout(stall_timeout, async {
            loop {
                match self.stream.try_send_with(&bytes, self.pool.as_fd()) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.stream.writable().await?,
                    sent => return sent,
                }
            }
        });
        let sent = sent.await.map_err(|_| SessionEnd::Stalled(stall_timeout))??;
        self.write(&bytes[sent..], stall_timeout).await
    }

    /// Asks the client for memory if the pool is above its limit.
    async fn look_at_limit(&mut self) -> Result<(), SessionEnd> {
        let npages = self.pool.limit();
        if self.pool.is_over() || self.pool.granted() <= npages {
            return Ok(());
        }
        self.answer_by.get_or_insert(Instant::now() + TAKE_BACK);
        let mut bytes = Vec::new();
        Frame::TakeBack { npages }.encode(&mut bytes);
        // Who does not even read cannot answer.
        self.write(&bytes, TAKE_BACK).await.map_err(|end| match end {
            SessionEnd::Stalled(_) => SessionEnd::TakenBack,
            other => other,
        })
    }

    /// Handles all complete frames.
    async fn handle_frames(&mut self) -> Result<(), SessionEnd> {
        loop {
            let frame = self.buffer.take().map_err(|error| SessionEnd::Malformed(error.into()))?;
            match frame {
                None => return Ok(()),
                Some(Frame::SetSize { request, npages }) => self.resize(request, npages).await?,
                Some(Frame::Bye) => return Err(SessionEnd::Bye),
                Some(
                    Frame::Hello(_)
                    | Frame::Welcome(_)
                    | Frame::Sized { .. }
                    | Frame::SendPage { .. }
                    | Frame::Request { .. }
                    | Frame::Move { .. }
                    | Frame::Error(_)
                    | Frame::TakeBack { .. },
                ) => return Err(SessionEnd::Malformed(Violation::OutOfPlace)),
            }
        }
    }

    async fn resize(&mut self, request: RequestId, npages: PageCount) -> Result<(), SessionEnd> {
        if self.pool.overshoots() {
            return Err(self.overshot());
        }
        // A task of its own: it goes on if this session is ended.
        let change = spawn_local(Arc::clone(&self.pool).resize(npages));
        let result = tokio::select! {
            result = change => result.map_err(io::Error::other)?,
            // A client can hold up the change for ever.
            () = self.pool.over() => return Err(SessionEnd::TakenBack),
        };
        let available = self.pool.available();
        let refused = |code| Frame::Error(ErrorReply { request, code, detail: available.0 });
        let reply = match result {
            Ok(()) => Frame::Sized { request, npages: self.pool.granted().min(npages), available },
            Err(Refusal::Resize(ResizeRefusal::Quota)) => refused(ErrorCode::Quota),
            Err(Refusal::Resize(ResizeRefusal::NoMemory)) => refused(ErrorCode::NoMemory),
            Err(Refusal::Ended) => return Err(self.overshot()),
        };
        if self.pool.granted() <= self.pool.limit() {
            self.answer_by = None;
        }
        let mut bytes = Vec::new();
        reply.encode(&mut bytes);
        self.write(&bytes, self.stall_timeout).await?;
        let (pool, keeper) = (Arc::clone(&self.pool), self.keeper.clone());
        // Nobody waits for the service manager. Until it has the pool, a killed server loses it.
        drop(spawn_blocking(move || pool.keep(&keeper)));
        Ok(())
    }

    fn overshot(&self) -> SessionEnd {
        if !self.pool.is_over() {
            let (token, granted) = (self.pool.identity.token, self.pool.granted().0);
            tracing::warn!(
                ?token,
                granted,
                allocated = self.pool.allocated(),
                "a client uses memory that it was not granted"
            );
        }
        SessionEnd::TakenBack
    }

    async fn write(&mut self, bytes: &[u8], limit: Duration) -> Result<(), SessionEnd> {
        let written = tokio::select! {
            written = timeout(limit, self.stream.write_all(bytes)) => written,
            // A client that reads nothing does not put off the end of its pool.
            () = self.pool.over() => return Err(SessionEnd::TakenBack),
        };
        Ok(written.map_err(|_| SessionEnd::Stalled(limit))??)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests fail by panics")]
mod tests {
    use std::sync::mpsc;

    use remoca_protocol::{PoolGeneration, ServerId, Token};
    use tokio::io::AsyncReadExt;
    use tokio::net::UnixStream;
    use tokio::runtime::Builder;
    use tokio::sync::oneshot;
    use tokio::task::{LocalSet, spawn_blocking, spawn_local, yield_now};

    use super::*;
    use crate::arena::Arena;
    use crate::config::PageLocking;
    use crate::helpers::Helpers;
    use crate::mapped_pool::Identity;

    /// Returns a session whose pool has 600 pages, and the client's end.
    async fn session() -> (MappedSession, UnixStream) {
        let arena = Arena::new(4 << 20, PageLocking::Unlocked, &mut |_| ()).unwrap();
        let identity = Identity { token: Token([1; 16]), server_id: ServerId([2; 16]), generation: PoolGeneration(3) };
        let pool = Arc::new(MappedPool::new(identity, arena, Arc::new(Helpers::new()), PageCount(1024)).unwrap());
        Arc::clone(&pool).resize(PageCount(600)).await.unwrap();
        let (own, client) = UnixStream::pair().unwrap();
        let buffer = ReceiveBuffer::new(1 << 16);
        let hour = Duration::from_secs(3600);
        (MappedSession::new(Stream::Unix(own), buffer, pool, Keeper::default(), hour), client)
    }

    /// Runs a test with one helper thread, which does its work in the order in which it was asked.
    fn run(test: impl Future<Output = ()>) {
        let runtime = Builder::new_current_thread().enable_all().max_blocking_threads(1).build().unwrap();
        LocalSet::new().block_on(&runtime, test);
    }

    /// Lets all other tasks go on as far as they can.
    async fn some_turns() {
        for _ in 0..10 {
            yield_now().await;
        }
    }

    #[test]
    fn only_a_size_within_the_limit_is_an_answer() {
        run(async {
            let (mut session, _client) = session().await;
            session.look_at_limit().await.unwrap();
            assert_eq!(session.answer_by, None, "nothing is asked for");
            session.pool.set_limit(PageCount(100));
            session.look_at_limit().await.unwrap();
            let answer_by = session.answer_by;
            assert!(answer_by.is_some());
            for size in [600, 700, 101] {
                session.resize(RequestId(1), PageCount(size)).await.unwrap();
                assert_eq!(session.answer_by, answer_by, "{size}");
            }
            session.resize(RequestId(1), PageCount(100)).await.unwrap();
            assert_eq!(session.answer_by, None, "it has answered, and nothing ends its pool");
        });
    }

    /// Each step takes longer than there is time.
    #[test]
    fn a_pool_grows_in_steps_if_all_takes_too_long() {
        run(async {
            let arena = Arena::new(64 << 20, PageLocking::Unlocked, &mut |_| ()).unwrap();
            let identity =
                Identity { token: Token([1; 16]), server_id: ServerId([2; 16]), generation: PoolGeneration(3) };
            let mut helpers = Helpers::new();
            helpers.growth = Duration::ZERO;
            let pool = Arc::new(MappedPool::new(identity, arena, Arc::new(helpers), PageCount(16384)).unwrap());
            let (own, mut client) = UnixStream::pair().unwrap();
            let (buffer, hour) = (ReceiveBuffer::new(1 << 16), Duration::from_secs(3600));
            let mut session = MappedSession::new(Stream::Unix(own), buffer, Arc::clone(&pool), Keeper::default(), hour);
            let all = PageCount(16384);
            for pages in [4096, 8192, 12288, 16384, 16384].map(PageCount) {
                session.resize(RequestId(1), all).await.unwrap();
                let available = PageCount(all.0 - pages.0);
                assert_eq!((pool.granted(), pool.available()), (pages, available));
                assert!(!pool.overshoots());
                let mut expected = Vec::new();
                Frame::Sized { request: RequestId(1), npages: pages, available }.encode(&mut expected);
                let mut told = vec![0; expected.len()];
                client.read_exact(&mut told).await.unwrap();
                assert_eq!(told, expected);
            }
            // Its memory is taken back while a step is under way: the helper is kept busy before it, and again between its parts.
            Arc::clone(&pool).resize(PageCount(0)).await.unwrap();
            let (open_first, first_gate) = mpsc::channel::<()>();
            let first = spawn_blocking(move || first_gate.recv());
            let change = spawn_local(Arc::clone(&pool).resize(all));
            some_turns().await;
            let (begin, has_begun) = oneshot::channel();
            let (open_second, second_gate) = mpsc::channel::<()>();
            let second = spawn_blocking(move || begin.send(()).is_ok() && second_gate.recv().is_err());
            drop(open_first);
            has_begun.await.unwrap();
            some_turns().await;
            assert!(
                pool.available() < all && pool.allocated() == 0,
                "memory is taken from the arena, and none is here yet"
            );
            pool.set_limit(PageCount(100));
            drop(open_second);
            assert!(first.await.unwrap().is_err() && second.await.unwrap());
            assert!(change.await.unwrap().is_err());
            assert_eq!((pool.granted(), pool.allocated()), (PageCount(0), 0));
            pool.set_limit(all);
            assert_eq!(pool.available(), all, "the rest of the growth is not lost to the arena");
        });
    }

    /// Tests that an operator who asks again and again does not give a silent client more time.
    #[test]
    fn the_time_for_an_answer_begins_once() {
        run(async {
            let (mut session, _client) = session().await;
            session.pool.set_limit(PageCount(100));
            session.look_at_limit().await.unwrap();
            let answer_by = session.answer_by;
            session.pool.set_limit(PageCount(90));
            session.look_at_limit().await.unwrap();
            assert_eq!(session.answer_by, answer_by);
            session.resize(RequestId(1), PageCount(95)).await.unwrap();
            assert_eq!(session.answer_by, answer_by, "enough for the first, not for the second");
        });
    }
}
