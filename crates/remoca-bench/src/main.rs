//! Benchmarks: each measures remoca beside what it is compared with, in one run, in alternation.

mod hash;
mod server;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "remoca-bench", about = "Benchmarks side by side")]
struct Arguments {
    #[command(subcommand)]
    benchmark: Benchmark,
}

#[derive(Subcommand)]
enum Benchmark {
    /// 4 KiB gets from the memory server, memcached, Redis and a plain batched TCP server
    Server(server::ServerBenchArgs),
    /// Candidates for the fingerprint of a page
    Hash,
    /// A server to be measured; started by the benchmark itself
    #[command(hide = true)]
    Target(server::TargetArgs),
}

fn main() -> ExitCode {
    let result = match Arguments::parse().benchmark {
        Benchmark::Server(args) => server::run(&args),
        Benchmark::Hash => hash::run(),
        Benchmark::Target(args) => server::run_target(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("remoca-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}
