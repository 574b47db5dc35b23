//! Servers that a test starts: [`VolatileNbd`] is an NBD server that loses its cache, and [`hold_port`] finds a port
//! for other servers. Also the fuzzing of the NBD client. Compiled only with the feature `testing`; never part of the
//! program.
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "in a test a surprise is a failure, and sizes are small"
)]

mod tcp;
mod volatile_nbd;

pub use crate::nbd_fuzz::{run as fuzz_nbd_client, seeds as fuzz_nbd_client_seeds};
pub use tcp::hold_port;
pub use volatile_nbd::{NbdCommand, NbdOffer, NbdRequested, Verdict, VolatileNbd};
