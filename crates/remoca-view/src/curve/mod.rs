//! What a cache of each size would do for a VM, from its miss-ratio curve. Pure.

pub mod chart;
mod figures;
mod prospect;

pub use figures::{Figures, Row};
pub use prospect::Prospect;
use remoca_protocol::control::CurveStatus;
use serde::Serialize;

/// Latency of a memory server, in microseconds, where none was measured: that of the demonstration in the README.
pub const SERVER_US: f64 = 200.0;

/// A curve with the figures that follow from it: what `remoca curve -o json` prints.
#[derive(Serialize)]
pub struct Shown<'a> {
    #[serde(flatten)]
    pub curve: &'a CurveStatus,
    pub figures: &'a Figures,
}
