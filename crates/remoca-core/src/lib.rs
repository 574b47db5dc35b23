//! The pure core of remoca: units, fingerprints, cache index, disk engine, disk ownership of a VM that
//! migrates, miss-ratio curves, and the division of memory by them.
//!
//! No code in this crate opens files or sockets, reads a clock, starts threads or draws random numbers: bytes, time and
//! seeds are arguments. Drivers (`remoca-disk` and the simulator) do the I/O.

#![cfg_attr(test, allow(clippy::disallowed_types, clippy::disallowed_methods, reason = "a test may look at the clock"))]
#![forbid(unsafe_code)]

pub mod allocation;
pub mod curve;
pub mod engine;
pub mod fingerprint;
pub mod index;
pub mod migration;
pub mod rules;
pub mod units;
