//! A session: one connection that has a pool.
//!
//! Runs as a task of the worker that owns the pool. Reads the available bytes, handles all frames in them, and
//! answers with one vectored write whose pieces point into the pool.
//!
//! 1. While replies wait to be sent, nothing is read. So a peer that does not read its replies costs one receive buffer
//!    and one reply queue, and is closed after a while.
//! 2. Waiting replies are sent before a frame is handled that would change their pages or free their memory.
//! 3. A session with much work lets the other sessions of its thread run in between.

use std::cell::RefCell;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use remoca_protocol::{DecodeError, ErrorCode, ErrorReply, Frame, Hello, PageCount, ReceiveBuffer, RequestId, Welcome};
use tokio::time::timeout;

use crate::pool::{Pool, ResizeRefusal};
use crate::replies::Replies;
use crate::stream::Stream;

/// How a session ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SessionEnd {
    #[error("the client closed the connection")]
    Closed,
    #[error("the client said BYE")]
    Bye,
    #[error("{0}")]
    Malformed(Violation),
    #[error("the client has not read its replies for {} s", .0.as_secs())]
    Stalled(Duration),
    #[error("its memory was taken back")]
    TakenBack,
    #[error("the connection failed: {0}")]
    Failed(#[from] io::Error),
}

/// A violation of the protocol by a client.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Violation {
    #[error(transparent)]
    NoFrame(#[from] DecodeError),
    #[error("a frame came that a client does not send in a session")]
    OutOfPlace,
}

/// Why the handling of frames stopped.
enum Pause {
    /// All complete frames have been handled.
    NoFrame,
    /// Waiting replies must be sent first, or it is time for other sessions.
    Flush,
    /// The client said BYE.
    Bye,
}

/// What the log says of a session: nothing of a connection that only asks what this server could give, as VM processes do that want more
/// than they have, again and again.
pub(crate) struct Told {
    peer: String,
    hello: Hello,
    is_told: bool,
}

impl Told {
    pub(crate) fn new(peer: String, hello: Hello) -> Self {
        Self { peer, hello, is_told: false }
    }

    /// Says that the session has a pool, or asks for one. Says it once.
    fn begins(&mut self, npages: PageCount) {
        if !std::mem::replace(&mut self.is_told, true) {
            let Self { peer, hello, .. } = &*self;
            tracing::info!(peer, token = ?hello.token, epoch = hello.epoch, pages = npages.0, "session begins");
        }
    }

    /// Says why the session ended, if anything was said of it or its client broke the protocol.
    fn ended(&self, end: &SessionEnd) {
        let Self { peer, hello, is_told } = self;
        if *is_told || matches!(end, SessionEnd::Malformed(_)) {
            tracing::info!(peer, token = ?hello.token, reason = %end, "session ended");
        } else {
            tracing::debug!(peer, token = ?hello.token, reason = %end, "a connection without a pool ended");
        }
    }
}

/// Amount of work after which other sessions have their turn, in pages moved.
const WORK_MAX: u32 = 128;

pub(crate) struct Session {
    stream: Stream,
    buffer: ReceiveBuffer,
    replies: Replies,
    pool: Rc<RefCell<Pool>>,
    stall_timeout: Duration,
    told: Told,
    /// Work since other sessions last had their turn, in pages moved.
    work: u32,
}

impl Session {
    /// Creates a session. `buffer` may hold frames that came directly after the HELLO.
    pub(crate) fn new(
        stream: Stream,
        buffer: ReceiveBuffer,
        pool: Rc<RefCell<Pool>>,
        stall_timeout: Duration,
        told: Told,
    ) -> Self {
        Self { stream, buffer, replies: Replies::default(), pool, stall_timeout, told, work: 0 }
    }

    /// Serves the client until its connection ends, and returns why it ended.
    pub(crate) async fn run(mut self, welcome: Welcome) -> SessionEnd {
        if welcome.npages > PageCount(0) {
            self.told.begins(welcome.npages);
        }
        let Err(end) = self.serve(welcome).await;
        self.told.ended(&end);
        if let SessionEnd::Malformed(_) = end {
            let request = RequestId(0);
            self.stream.farewell(ErrorReply { request, code: ErrorCode::Malformed, detail: 0 }).await;
        }
        end
    }

    async fn serve(&mut self, welcome: Welcome) -> Result<std::convert::Infallible, SessionEnd> {
        let mut bytes = Vec::new();
        Frame::Welcome(welcome).encode(&mut bytes);
        let sent = timeout(self.stall_timeout, self.stream.write_all(&bytes)).await;
        sent.map_err(|_| SessionEnd::Stalled(self.stall_timeout))??;
        loop {
            let handled = self.handle_frames();
            if let Err(end) = self.flush().await {
                let is_gone = !matches!(end, SessionEnd::Stalled(_));
                let limit = self.stall_timeout;
                let said_bye = is_gone && timeout(limit, self.said_bye(handled)).await.unwrap_or(false);
                return Err(if said_bye { SessionEnd::Bye } else { end });
            }
            match handled? {
                Pause::Bye => return Err(SessionEnd::Bye),
                Pause::Flush => {}
                Pause::NoFrame => {
                    let count = self.stream.read(self.buffer.space()).await?;
                    if count == 0 {
                        return Err(SessionEnd::Closed);
                    }
                    self.buffer.filled(count);
                }
            }
            if self.work >= WORK_MAX {
                self.work = 0;
                tokio::task::yield_now().await;
            }
        }
    }

    /// Handles what the client sent before it left, and returns whether it said BYE. Replies are dropped, as when a
    /// client leaves with reads in flight.
    async fn said_bye(&mut self, mut handled: Result<Pause, SessionEnd>) -> bool {
        loop {
            self.replies.clear();
            match handled {
                Ok(Pause::Bye) => return true,
                Ok(Pause::Flush) => {}
                Ok(Pause::NoFrame) => match self.stream.read(self.buffer.space()).await {
                    Ok(count @ 1..) => self.buffer.filled(count),
                    Ok(0) | Err(_) => return false,
                },
                Err(_) => return false,
            }
            if self.work >= WORK_MAX {
                self.work = 0;
                tokio::task::yield_now().await;
            }
            handled = self.handle_frames();
        }
    }

    /// Handles frames until there is no complete one, one has to wait or says BYE, or the work of a turn is done.
    fn handle_frames(&mut self) -> Result<Pause, SessionEnd> {
        let Self { buffer, replies, pool, work, told, .. } = self;
        let mut pool = pool.borrow_mut();
        let mut length = 0;
        while *work < WORK_MAX {
            buffer.consume(length);
            let Some((frame, frame_length)) = buffer.peek().map_err(|error| SessionEnd::Malformed(error.into()))?
            else {
                return Ok(Pause::NoFrame);
            };
            if replies.is_full() || must_wait(&frame, replies, &pool) {
                return Ok(Pause::Flush);
            }
            if let Frame::Bye = frame {
                return Ok(Pause::Bye);
            }
            if let Frame::SetSize { .. } = frame {
                told.begins(pool.npages());
            }
            *work += handle(frame, &mut pool, replies).map_err(SessionEnd::Malformed)?;
            length = frame_length;
        }
        buffer.consume(length);
        Ok(Pause::Flush)
    }

    /// Sends all waiting replies.
    async fn flush(&mut self) -> Result<(), SessionEnd> {
        while !self.replies.is_empty() {
            let written = {
                let pool = self.pool.borrow();
                self.stream.try_write_vectored(&self.replies.slices(&pool))
            };
            match written {
                Ok(0) => return Err(SessionEnd::Closed),
                Ok(count) => self.replies.advance(count),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let writable = timeout(self.stall_timeout, self.stream.writable()).await;
                    writable.map_err(|_| SessionEnd::Stalled(self.stall_timeout))??;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// Returns whether the frame would change memory that a waiting reply points to.
fn must_wait(frame: &Frame<'_>, replies: &Replies, pool: &Pool) -> bool {
    match *frame {
        // The slot that a page is moved from keeps its bytes until another page is stored in it.
        Frame::SendPage { slot, .. } | Frame::Move { to: slot, .. } => replies.points_to(slot),
        Frame::SetSize { npages, .. } => npages < pool.npages() && !replies.is_empty(),
        Frame::Hello(_)
        | Frame::Welcome(_)
        | Frame::Sized { .. }
        | Frame::Request { .. }
        | Frame::Error(_)
        | Frame::Bye
        | Frame::TakeBack { .. } => false,
    }
}

/// Executes the frame, and returns the work in pages moved.
#[inline]
fn handle(frame: Frame<'_>, pool: &mut Pool, replies: &mut Replies) -> Result<u32, Violation> {
    match frame {
        Frame::Request { request, slot } => {
            if pool.request(slot) {
                replies.push_page(request, slot);
            } else {
                replies.push(Frame::Error(ErrorReply { request, code: ErrorCode::NotFound, detail: 0 }));
            }
        }
        Frame::SendPage { slot, page, .. } => return Ok(pool.store(slot, page)),
        Frame::Move { from, to } => return Ok(pool.relocate(from, to)),
        Frame::SetSize { request, npages } => {
            replies.push(resize(pool, request, npages));
            return Ok(WORK_MAX);
        }
        Frame::Hello(_)
        | Frame::Welcome(_)
        | Frame::Sized { .. }
        | Frame::Error(_)
        | Frame::Bye
        | Frame::TakeBack { .. } => {
            return Err(Violation::OutOfPlace);
        }
    }
    Ok(1)
}

fn resize(pool: &mut Pool, request: RequestId, npages: PageCount) -> Frame<'static> {
    let result = pool.resize(npages);
    let available = pool.available();
    let refused = |code| Frame::Error(ErrorReply { request, code, detail: available.0 });
    match result {
        Ok(()) => Frame::Sized { request, npages, available },
        Err(ResizeRefusal::Quota) => refused(ErrorCode::Quota),
        Err(ResizeRefusal::NoMemory) => refused(ErrorCode::NoMemory),
    }
}
