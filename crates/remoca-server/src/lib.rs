//! The memory server: pinned page pools, one for each client, over TCP and Unix sockets.
//!
//! Used by `remoca serve` and, in-process, by tests and benchmarks: [`Server::start`] does everything. One thread
//! accepts connections and reads each HELLO. The connection then moves to the worker thread that owns the pools of
//! its token, and stays there. So there is no lock on the path of a page.
//!
//! 1. A page is reachable only through the slot and pool it was sent to: memory that changes hands is unreachable until
//!    it is written again (`pool.rs`).
//! 2. A pool has at most one connection. An older one is closed before a newer one is answered (`registry.rs`).
//! 3. What one connection can make the server hold is bounded: one receive buffer and one reply queue; while the peer
//!    does not read its replies, nothing more is read from it (`session.rs`).
//! 4. A page that a queued reply points to does not change before the reply is sent (`session.rs`).
//! 5. Mapped pools, whose pages their clients reach by themselves, have a thread of their own (`mapped.rs`), files of their own
//!    (`memfile.rs`), and the same account (`arena.rs`). A file has one owner ever.
//!
//! Not here: de-duplication, encryption, authentication. See `docs/decisions/0004-memory-server.md` and
//! `0039-mapped-pools.md`.

mod adopt;
mod arena;
pub mod command;
mod config;
mod control;
mod doorway;
mod error;
mod free;
mod handshake;
mod helpers;
mod host;
mod keeper;
mod listener;
mod mapped;
mod mapped_pool;
mod mapped_session;
mod mapping;
mod memfile;
mod places;
mod pool;
mod registry;
mod replies;
mod server;
mod session;
mod status;
mod stream;
#[cfg(feature = "testing")]
pub mod testing;
mod worker;

pub use config::{Config, Limits, ListenAddress, PageLocking};
pub use error::StartError;
pub use server::Server;
pub use status::{Backing, MappedStatus, PoolStatus, Status, Totals};
