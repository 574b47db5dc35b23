//! The VM process: frontends, backing stores, and the driver of the disk engine.

pub mod clock;
pub mod control;
pub mod driver;
pub mod endpoint;
pub mod frontend;
pub mod handover;
mod index_memory;
pub mod latency;
pub mod link;
pub mod migration;
pub mod narrow;
pub mod nbd;
pub mod port;
pub mod secure;
pub mod service;
pub mod state;
pub mod status;
pub mod store;
pub mod trace;
mod undumped;
pub mod vhost;

pub use index_memory::IndexMemory;
#[cfg(feature = "testing")]
pub mod testing;
