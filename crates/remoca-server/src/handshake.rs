//! Accepts connections, reads each one's HELLO, and hands it to the worker that has its pool.
//!
//! Runs on the server's first thread. The number of connections between accept and session is bounded; more wait in the
//! kernel's backlog.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use remoca_protocol::{ErrorCode, ErrorReply, Frame, Hello, ReceiveBuffer, RequestId, Token, VERSIONS};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{sleep, timeout};

use crate::listener::Listener;
use crate::stream::Stream;
use crate::worker::{Arrival, Message, Shared};

/// Pause after accept failed, for want of descriptors mostly.
pub(crate) const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The workers, and which of them has a token.
#[derive(Debug)]
pub(crate) struct Workers {
    senders: Vec<mpsc::Sender<Message>>,
    /// Keyed, so that clients cannot all choose tokens of one worker.
    hasher: RandomState,
}

impl Workers {
    pub(crate) fn new(senders: Vec<mpsc::Sender<Message>>) -> Self {
        Self { senders, hasher: RandomState::new() }
    }

    fn of(&self, token: &Token) -> Option<&mpsc::Sender<Message>> {
        let hash = usize::try_from(self.hasher.hash_one(token) >> 32).unwrap_or(0);
        self.senders.get(hash % self.senders.len().max(1))
    }

    pub(crate) fn all(&self) -> &[mpsc::Sender<Message>] {
        &self.senders
    }
}

/// Accepts until it is cancelled.
pub(crate) async fn accept(listener: Listener, handshakes: Arc<Semaphore>, workers: Arc<Workers>, shared: Arc<Shared>) {
    loop {
        // The semaphore is never closed.
        let Ok(permit) = Arc::clone(&handshakes).acquire_owned().await else { return };
        match listener.accept().await {
            Ok(stream) => drop(tokio::spawn(greet(stream, permit, Arc::clone(&workers), Arc::clone(&shared)))),
            Err(error) => {
                tracing::warn!(address = %listener.address(), %error, "cannot accept a connection");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Why there is no session.
enum NoSession {
    /// The peer went away, or its connection broke.
    Gone,
    Refused(ErrorCode, u32),
}

async fn greet(mut stream: Stream, handshake: OwnedSemaphorePermit, workers: Arc<Workers>, shared: Arc<Shared>) {
    let peer = stream.peer();
    let limits = &shared.config.limits;
    if let Err(error) = stream.tune(limits.stall_timeout) {
        return tracing::debug!(peer, %error, "connection gone before it began");
    }
    let mut buffer = ReceiveBuffer::new(limits.receive_bytes);
    let hello = match timeout(limits.hello_timeout, read_hello(&mut stream, &mut buffer)).await {
        Ok(Ok(hello)) => hello,
        Ok(Err(NoSession::Gone)) => return,
        Ok(Err(NoSession::Refused(code, detail))) => {
            tracing::warn!(peer, ?code, "connection refused");
            return stream.farewell(ErrorReply { request: RequestId(0), code, detail }).await;
        }
        Err(_) => return tracing::warn!(peer, "no HELLO came in time: connection closed"),
    };
    let stream = match stream.detach() {
        Ok(stream) => stream,
        Err(error) => return tracing::warn!(peer, %error, "connection lost to the event loop"),
    };
    let Some(worker) = workers.of(&hello.token) else { return };
    let arrival = Arrival { stream, buffer, hello, peer, handshake };
    if worker.send(Message::Arrival(arrival)).await.is_err() {
        tracing::warn!("the server is stopping: connection closed");
    }
}

async fn read_hello(stream: &mut Stream, buffer: &mut ReceiveBuffer) -> Result<Hello, NoSession> {
    loop {
        match buffer.take() {
            Ok(Some(Frame::Hello(hello))) => {
                return match hello.versions.common(VERSIONS) {
                    Some(_) => Ok(hello),
                    None => Err(NoSession::Refused(ErrorCode::VersionMismatch, VERSIONS.to_detail())),
                };
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
