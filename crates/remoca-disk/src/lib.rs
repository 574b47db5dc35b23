//! The VM process: frontends, backing stores, and the driver of the disk engine.

pub mod clock;
pub mod driver;
pub mod endpoints;
pub mod handover;
pub mod latency;
pub mod link;
pub mod migration;
pub mod start;
pub mod state;
pub mod trace;

#[cfg(feature = "testing")]
pub mod testing;
