//! The page: one file with its style and script, and the policy that forbids it everything else.

use aws_lc_rs::digest::{SHA256, digest};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;

const HTML: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// Returns the page.
#[must_use]
pub fn html() -> String {
    HTML.replace("/*STYLE*/", STYLE).replace("/*SCRIPT*/", SCRIPT)
}

/// Returns the Content-Security-Policy of the page: its own style, its own script, requests to where it comes from.
#[must_use]
pub fn policy() -> String {
    let hash = |text: &str| BASE64_STANDARD.encode(digest(&SHA256, text.as_bytes()));
    format!(
        "default-src 'none'; style-src 'sha256-{}'; script-src 'sha256-{}'; connect-src 'self'; img-src data:; base-uri 'none'; \
         form-action 'none'; frame-ancestors 'none'",
        hash(STYLE),
        hash(SCRIPT)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Largest size of the page, in bytes.
    const BYTES_MAX: usize = 150 << 10;

    #[test]
    fn the_page_is_small_and_names_no_other_place() {
        let html = html();
        assert!(html.len() <= BYTES_MAX && html.len() > STYLE.len() + SCRIPT.len(), "{} bytes", html.len());
        for word in ["//cdn", "src=", "@import", "url(", "eval(", "innerHTML", "document.write"] {
            assert!(!html.contains(word), "`{word}`");
        }
        // The only address is the name of a format.
        let addresses: Vec<_> = html.match_indices("http").map(|(at, _)| &html[at..at + 26]).collect();
        assert_eq!(addresses, ["http://www.w3.org/2000/svg"]);
    }

    #[test]
    fn what_the_policy_allows_is_what_the_page_has() {
        let inner = |tag: &str| {
            let html = html();
            let (_, rest) = html.split_once(&format!("<{tag}>")).expect("it begins");
            rest.split_once(&format!("</{tag}>")).expect("it ends").0.to_owned()
        };
        assert_eq!((inner("style"), inner("script")), (STYLE.to_owned(), SCRIPT.to_owned()));
    }
}
