//! What the VM processes of a host do, on a terminal, on a page and as metrics.
//!
//! [`ask`] asks all processes at once, [`snapshot::Taker`] makes numbered snapshots of their answers, and [`diagnosis`] says what is
//! wrong. [`top`], [`web`] and [`metrics`] show a snapshot, each with the same figures as `remoca status -o json` of it.
//! Nothing here changes anything.

pub mod address;
pub mod ask;
pub mod chart;
pub mod client;
pub mod columns;
pub mod curve;
pub mod details;
pub mod diagnosis;
pub mod figures;
pub mod finding;
pub mod history;
pub mod host;
pub mod lately;
pub mod metrics;
mod shown;
pub mod snapshot;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod text;
pub mod top;
pub mod vm;
pub mod watch;
pub mod web;

pub use shown::Shown;
