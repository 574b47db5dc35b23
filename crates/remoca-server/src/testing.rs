//! A session without a server around it, for fuzzing. Behind the feature `testing`; never part of the program.

#![allow(clippy::expect_used, reason = "in a test a surprise is a failure")]

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use remoca_protocol::{Hello, PageCount, PoolGeneration, ReceiveBuffer, SendCount, ServerId, Token, VERSIONS, Welcome};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use crate::arena::Arena;
use crate::config::PageLocking;
use crate::pool::Pool;
use crate::session::{Session, Told};
use crate::stream::Stream;

/// Memory and quota of a session's pool.
#[derive(Clone, Copy, Debug)]
pub struct PoolSetup {
    /// Memory of the arena in bytes, a multiple of 2 MiB.
    pub memory_bytes: u64,
    pub quota: PageCount,
}

/// Serves one client with a new pool. The client sends `input` and closes. Returns everything that it received.
///
/// # Panics
/// If the system has no memory or sockets.
#[must_use]
pub fn serve_bytes(setup: PoolSetup, input: &[u8]) -> Vec<u8> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let arena = Arena::new(setup.memory_bytes, PageLocking::Unlocked, &mut |_| ()).expect("memory");
        let pool = Rc::new(RefCell::new(Pool::new(arena, setup.quota)));
        let welcome = Welcome {
            version: 1,
            server_id: ServerId([0; 16]),
            pool_generation: PoolGeneration(0),
            npages: PageCount(0),
            available: pool.borrow().available(),
            quota: setup.quota,
            sends_received: SendCount(0),
        };
        let (client, server) = UnixStream::pair().expect("sockets");
        let stall_timeout = Duration::from_secs(60);
        // The minimum size, so that frames are cut.
        let told = Told::new("a test".to_owned(), Hello { versions: VERSIONS, token: Token([0; 16]), epoch: 1 });
        let session = Session::new(Stream::Unix(server), ReceiveBuffer::new(0), pool, stall_timeout, told);
        let (mut from_server, mut to_server) = client.into_split();
        let send = async {
            // The session may end before it has read everything.
            let _sent = to_server.write_all(input).await;
            let _closed = to_server.shutdown().await;
        };
        let mut replies = Vec::new();
        let (_end, (), read) = tokio::join!(session.run(welcome), send, from_server.read_to_end(&mut replies));
        // A connection that is closed with unread input may end in a reset, after everything that was sent.
        drop(read);
        replies
    })
}
