//! The control socket of a VM process: one command and one reply for each connection, as lines of JSON.

mod client;
pub mod left;
mod server;

pub use client::{call, call_for_stream, call_within, connect_within, read_all};
pub use server::{Answer, ControlRequest, ControlServer, Desk, answer_for_former};
