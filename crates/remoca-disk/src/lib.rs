//! The VM process: frontends, backing stores, and the driver of the disk engine.

pub mod store;
pub mod vhost;
