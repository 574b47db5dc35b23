//! What pages of figures are made of: charts as SVG, numbers for people, and one style sheet with a light and a dark theme.
//!
//! Pure, and independent of what the figures mean. Used by the demonstration and by `remoca sim`. A page is one HTML file that
//! loads nothing from elsewhere.

#![forbid(unsafe_code)]

pub mod chart;
pub mod numbers;

/// Style sheet of a page.
pub const STYLE: &str = include_str!("style.css");
