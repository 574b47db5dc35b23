//! The pure core of remoca: units, fingerprints, cache index, disk engine.
//!
//! No code in this crate opens a file or a socket, reads a clock, starts a thread or draws randomness: bytes, time and
//! seeds are arguments. Drivers (`remoca-disk` and the simulator) do the I/O.
#![forbid(unsafe_code)]

pub mod engine;
pub mod fingerprint;
pub mod index;
pub mod rules;
pub mod units;
