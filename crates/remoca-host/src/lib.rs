//! The host's daemon: divides the cache memory of a host, or its local tiers, among its VMs, by their miss-ratio curves.
//!
//! Called by `remoca host`. `planner` decides and does no I/O: it gets answers, and returns commands. `plan` is one division, `curve` and `reading`
//! check what VM processes say, `resource` names what is divided. Around it: `ask` (control sockets), `record` (what outlives the
//! daemon), `request` (guests get all back), `socket` (its own socket), `daemon` (the loop). Decision 0042.

#![forbid(unsafe_code)]

pub mod ask;
pub mod curve;
pub mod daemon;
pub mod guest;
pub mod limits;
pub mod plan;
pub mod planner;
pub mod reading;
pub mod record;
pub mod request;
pub mod resource;
pub mod socket;
#[cfg(test)]
mod testing;
mod text;
