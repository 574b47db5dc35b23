//! The pure core of remoca: units, fingerprints, cache index, disk engine, and who owns the disks of a VM that migrates.
//!
//! No code in this crate opens a file or a socket, reads a clock, starts a thread or draws randomness: bytes, time and
//! seeds are arguments. Drivers (`remoca-disk` and the simulator) do the I/O.

#![cfg_attr(test, allow(clippy::disallowed_types, clippy::disallowed_methods, reason = "a test may look at the clock"))]
#![forbid(unsafe_code)]

pub mod engine;
pub mod fingerprint;
pub mod index;
pub mod migration;
pub mod rules;
pub mod units;
