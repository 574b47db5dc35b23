//! Accepts connections, reads each one's HELLO, and passes it to the worker that has its pool.
//!
//! Runs on the server's first thread. The number of connections between accept and session is bounded, both in total
//! and per peer. A silent connection makes room for those that come after it (`places.rs`).

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use remoca_protocol::{
    ErrorCode, ErrorReply, Frame, Hello, MAPPED_VERSIONS, ReceiveBuffer, RequestId, Token, VERSIONS,
};
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

use crate::arena::Arena;
use crate::listener::Listener;
use crate::mapped::MappedMessage;
use crate::places::{Place, Places};
use crate::stream::Stream;
use crate::worker::{Arrival, Message, Shared};

/// Pause after accept failed, mostly for lack of descriptors.
pub(crate) const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The worker threads, and the mapping from tokens to workers.
#[derive(Debug)]
pub(crate) struct Workers {
    senders: Vec<mpsc::Sender<Message>>,
    mapped: mpsc::Sender<MappedMessage>,
    /// Keyed with a random key, so that clients cannot all choose tokens of one worker.
    hasher: RandomState,
}

impl Workers {
    pub(crate) fn new(senders: Vec<mpsc::Sender<Message>>, mapped: mpsc::Sender<MappedMessage>) -> Self {
        Self { senders, mapped, hasher: RandomState::new() }
    }

    fn of(&self, token: &Token) -> Option<&mpsc::Sender<Message>> {
        let hash = usize::try_from(self.hasher.hash_one(token) >> 32).unwrap_or(0);
        self.senders.get(hash % self.senders.len().max(1))
    }

    /// Returns the thread of all mapped pools.
    pub(crate) fn mapped(&self) -> &mpsc::Sender<MappedMessage> {
        &self.mapped
    }

    /// Passes a connection to the thread that has its pool. Returns false if the server is stopping.
    async fn pass_on(&self, arrival: Arrival) -> bool {
        if is_paged(&arrival.hello) {
            let Some(worker) = self.of(&arrival.hello.token) else { return false };
            return worker.send(Message::Arrival(arrival)).await.is_ok();
        }
        self.mapped.send(MappedMessage::Arrival(arrival)).await.is_ok()
    }

    pub(crate) fn all(&self) -> &[mpsc::Sender<Message>] {
        &self.senders
    }
}

/// Accepts connections until it is cancelled.
pub(crate) async fn accept(listener: Listener, places: Arc<Places>, workers: Arc<Workers>, shared: Arc<Shared>) {
    loop {
        match listener.accept().await {
            Ok(stream) => {
                let (workers, shared) = (Arc::clone(&workers), Arc::clone(&shared));
                places.begin(stream.origin(), |place| greet(stream, place, workers, shared)).await;
            }
            Err(error) => {
                tracing::warn!(address = %listener.address(), %error, "cannot accept a connection");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Why a connection gets no session.
enum NoSession {
    /// The peer went away, or its connection broke.
    Gone,
    Refused(ErrorCode, u32),
}

async fn greet(mut stream: Stream, place: Place, workers: Arc<Workers>, shared: Arc<Shared>) {
    let peer = stream.peer();
    let limits = &shared.config.limits;
    if let Err(error) = stream.tune(limits.stall_timeout) {
        return tracing::debug!(peer, %error, "connection gone before it began");
    }
    let mut buffer = ReceiveBuffer::new(limits.receive_bytes);
    let hello = match timeout(limits.hello_timeout, read_hello(&mut stream, &mut buffer, &shared.arena)).await {
        Ok(Ok(hello)) => hello,
        Ok(Err(NoSession::Gone)) => return,
        Ok(Err(NoSession::Refused(code, detail))) => {
            tracing::warn!(peer, ?code, detail, "connection refused");
            return stream.farewell(ErrorReply { request: RequestId(0), code, detail }).await;
        }
        Err(_) => return tracing::warn!(peer, "no HELLO came in time: connection closed"),
    };
    place.hear();
    let stream = match stream.detach() {
        Ok(stream) => stream,
        Err(error) => return tracing::warn!(peer, %error, "connection lost to the event loop"),
    };
    if !workers.pass_on(Arrival { stream, buffer, hello, peer }).await {
        tracing::warn!("the server is stopping: connection closed");
    }
}

async fn read_hello(stream: &mut Stream, buffer: &mut ReceiveBuffer, arena: &Arena) -> Result<Hello, NoSession> {
    loop {
        match buffer.take() {
            Ok(Some(Frame::Hello(hello))) => {
                return check_hello(hello, stream.is_unix(), arena.can_lend());
            }
            Ok(None) => {}
            Ok(Some(_)) | Err(_) => return Err(NoSession::Refused(ErrorCode::Malformed, 0)),
        }
        match stream.read(buffer.space()).await {
            Ok(0) | Err(_) => return Err(NoSession::Gone),
            Ok(count) => buffer.filled(count),
        }
    }
}

/// Returns whether a client wants a paged session, or could have one.
fn is_paged(hello: &Hello) -> bool {
    hello.versions.common(VERSIONS).is_some()
}

/// Decides whether a HELLO can be answered by a session.
fn check_hello(hello: Hello, is_unix: bool, can_lend: bool) -> Result<Hello, NoSession> {
    if is_paged(&hello) {
        return Ok(hello);
    }
    if hello.versions.common(MAPPED_VERSIONS).is_none() {
        // Each kind of session counts its versions apart.
        let own = if hello.versions.lowest < MAPPED_VERSIONS.lowest { VERSIONS } else { MAPPED_VERSIONS };
        return Err(NoSession::Refused(ErrorCode::VersionMismatch, own.to_detail()));
    }
    match (is_unix, can_lend) {
        (true, true) => Ok(hello),
        (false, _) => Err(NoSession::Refused(ErrorCode::NOT_MAPPABLE, 1)),
        (true, false) => Err(NoSession::Refused(ErrorCode::NOT_MAPPABLE, 2)),
    }
}
