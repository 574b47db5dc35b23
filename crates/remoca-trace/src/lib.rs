//! Traces of disk requests, and what memory would do for them.
//!
//! [`open`] reads a trace in the format of another program or in our own ([`remoca_protocol::trace`]), batch by batch;
//! [`Writer`] writes our own. [`sim::Simulation`] takes the records, and says what guest memory and cache tiers of some sizes
//! would answer. Used by `remoca trace` and `remoca sim`. Memory is bounded by the number of different blocks of a trace, not
//! by its length, and that number has a limit. No code here opens a file. Decision 0043.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test that meets an error has failed"))]

mod error;
mod formats;
mod input;
mod limits;
pub mod sim;
mod summary;
mod writer;

pub use error::{ErrorKind, Position, TraceError};
pub use formats::{Batch, Format, Source, open};
pub use remoca_protocol::trace::{TraceRecord, TracedOp, TracedSource};
pub use summary::Summary;
pub use writer::Writer;
