//! What pages of figures are made of: charts as SVG, numbers for people, and one style sheet with a light and a dark theme.
//!
//! Pure, and independent of what the figures mean. Used by the demonstration and by `remoca sim`. A page is one HTML file that
//! loads nothing from elsewhere.

#![forbid(unsafe_code)]

pub mod chart;
pub mod numbers;

use maud::{DOCTYPE, Markup, PreEscaped, html};

/// Returns the page with this title and content.
pub fn page(title: &str, content: &Markup) -> Markup {
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { (title) }
                style { (PreEscaped(include_str!("style.css"))) }
            }
            body { main { (content) } }
        }
    }
}
