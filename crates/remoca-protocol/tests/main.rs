//! Formats, as others see them.

mod control;
mod golden;
mod golden_mapped;
mod handover;
mod properties;
mod trace;
