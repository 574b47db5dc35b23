//! Fuzz targets: for each kind of bytes that strangers send, a function that passes them to the code that receives
//! them first, and asserts what must hold for any input.
//!
//! Called by the fuzzer (`cargo xtask fuzz`, `main.rs`) and, with the seeds and all earlier findings, by an ordinary
//! test. A target is deterministic, keeps no state from one input to the next, and depends only on its input. How to
//! run, reproduce and add one: `docs/fuzzing.md`.

#![allow(clippy::unwrap_used, reason = "a target that meets an error has failed")]

mod agent_page;
mod control;
mod engine;
mod handover;
mod handshake;
mod memory;
mod migration;
mod nbd_server;
mod ownership;
mod pool;
mod protocol;
mod resume;
mod session;
mod source;
mod trace;
mod trace_formats;

use remoca_disk::testing::fuzz_migration_seeds;
use remoca_frontend::testing::{fuzz_nbd, fuzz_vhost_queue, fuzz_vhost_queue_seeds};
use remoca_io::secure::fuzz as fuzz_secure;
use remoca_store::testing::{fuzz_nbd_client, fuzz_nbd_client_seeds};

/// One kind of input.
pub struct Target {
    pub name: &'static str,
    /// Longest input that the fuzzer tries, in bytes.
    pub length_max: usize,
    /// The target. Panics if an assertion does not hold.
    pub run: fn(&[u8]),
    /// Inputs to start from.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

/// All targets.
pub const TARGETS: [Target; 19] = [
    Target { name: "agent-page", length_max: 4200, run: agent_page::run, seeds: agent_page::seeds },
    Target { name: "control", length_max: 1024, run: control::run, seeds: control::seeds },
    Target { name: "engine", length_max: 400, run: engine::run, seeds: engine::seeds },
    Target { name: "handover", length_max: 4096, run: handover::run, seeds: handover::seeds },
    Target { name: "handshake", length_max: fuzz_secure::LENGTH_MAX, run: handshake::run, seeds: fuzz_secure::seeds },
    Target { name: "migration", length_max: 4096, run: migration::run, seeds: fuzz_migration_seeds },
    Target { name: "nbd-client", length_max: 4096, run: fuzz_nbd_client, seeds: fuzz_nbd_client_seeds },
    Target { name: "nbd-server", length_max: 4096, run: fuzz_nbd, seeds: nbd_server::seeds },
    Target { name: "ownership", length_max: 200, run: ownership::run, seeds: ownership::seeds },
    Target { name: "protocol", length_max: 12 << 10, run: protocol::run, seeds: protocol::seeds },
    Target { name: "resume", length_max: 400, run: resume::run, seeds: resume::seeds },
    Target { name: "session", length_max: 2048, run: session::run, seeds: session::seeds },
    Target { name: "trace", length_max: 1024, run: trace::run, seeds: trace::seeds },
    Target {
        name: "trace-blkparse",
        length_max: 1024,
        run: trace_formats::blkparse,
        seeds: trace_formats::blkparse_seeds,
    },
    Target {
        name: "trace-blktrace",
        length_max: 1024,
        run: trace_formats::blktrace,
        seeds: trace_formats::blktrace_seeds,
    },
    Target { name: "trace-msr", length_max: 1024, run: trace_formats::msr, seeds: trace_formats::msr_seeds },
    Target { name: "trace-oracle", length_max: 1024, run: trace_formats::oracle, seeds: trace_formats::oracle_seeds },
    Target { name: "trace-vscsi", length_max: 1024, run: trace_formats::vscsi, seeds: trace_formats::vscsi_seeds },
    Target { name: "vhost-queue", length_max: 2048, run: fuzz_vhost_queue, seeds: fuzz_vhost_queue_seeds },
];
