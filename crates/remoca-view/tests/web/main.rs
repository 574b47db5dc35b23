//! The page of `remoca web`, with VM processes that are none: what strangers send, and what a browser shows.

#![allow(clippy::unwrap_used, reason = "in a test a surprise is a failure")]

mod apart;
mod browser;
mod division;
mod end;
mod site;
mod strangers;
