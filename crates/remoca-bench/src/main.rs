//! Benchmarks: each measures remoca and what it is compared with in one run, in alternation.

mod agent;
mod compress;
mod cost;
mod cpus;
mod crowd;
mod curve;
mod delay;
mod guest;
mod hash;
mod hedging;
mod index;
mod instructions;
mod link;
mod machine;
mod policy;
mod rounds;
mod server;
mod sim;
mod steps;
mod streams;
mod takeback;
mod targets;
mod tiers;
mod upgrade;
mod versus;
mod vm;
mod wanted;
mod work;

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
    /// All targets (P1 to P20, A1.3 to A1.10, A2.3): out/bench/targets.json, and a table
    Targets(targets::TargetsArgs),
    /// 4 KiB gets from the memory server, memcached, Redis and a plain batched TCP server
    Server(server::ServerBenchArgs),
    /// Candidates for the fingerprint of a page
    Hash,
    /// Memory of the index, and time of its operations
    Index(index::IndexBenchArgs),
    /// Hits of the insertion policy on traces of reads, compared with LRU
    Policy(policy::PolicyBenchArgs),
    /// Hits of a local tier in front of a remote pool on traces of reads, compared with one exact LRU queue
    Tiers(tiers::TiersBenchArgs),
    /// A local tier that is given back under load: memory that the host has again, time, and reads meanwhile
    Takeback(takeback::TakebackArgs),
    /// Error, memory and time of miss-ratio curves, compared with exact stack distances
    Curve(curve::CurveBenchArgs),
    /// Requests that `remoca sim` simulates in a CPU second, beside libCacheSim
    Sim(sim::SimBenchArgs),
    /// Pages of disk images compressed by LZ4: how many fit in the memory of one, and the time of each
    Compress(compress::CompressArgs),
    /// Passes over files on a disk whose sequential reads are cheap, with remoca and without
    Streams(streams::StreamsArgs),
    /// Guest reads while the memory server is late or stops, with and without hedging
    Hedging(hedging::HedgingArgs),
    /// Cost of in-flight tracking, the kept index and hedging while there are no faults
    Cost(cost::CostArgs),
    /// Many busy VM processes on one processor, that look for the next request before they sleep and that do not
    Crowd(crowd::CrowdArgs),
    /// Longest guest read, and lost connections, while the VM process is upgraded
    Upgrade(upgrade::UpgradeBenchArgs),
    /// Functions in which a VM process spends the instructions of a read
    Instructions(instructions::InstructionsArgs),
    /// CPU time of a hit, a miss and an eviction, compared with another build of `remoca`
    Versus(versus::VersusArgs),
    /// Pass bytes between clients and a server, each so much later
    Delay(delay::DelayArgs),
    /// A server to be measured; started by the benchmark itself
    #[command(hide = true)]
    Target(server::TargetArgs),
}

fn main() -> ExitCode {
    let result = match Arguments::parse().benchmark {
        Benchmark::Targets(args) => targets::run(&args),
        Benchmark::Server(args) => server::run(&args),
        Benchmark::Hash => hash::run(),
        Benchmark::Index(args) => index::run(&args),
        Benchmark::Policy(args) => policy::run(&args),
        Benchmark::Tiers(args) => tiers::run(&args),
        Benchmark::Takeback(args) => takeback::run(&args),
        Benchmark::Curve(args) => curve::run(&args),
        Benchmark::Sim(args) => sim::run(&args),
        Benchmark::Compress(args) => compress::run(&args),
        Benchmark::Streams(args) => streams::run(&args),
        Benchmark::Hedging(args) => hedging::run(&args),
        Benchmark::Cost(args) => cost::run(&args),
        Benchmark::Crowd(args) => crowd::run(&args),
        Benchmark::Upgrade(args) => upgrade::run(&args),
        Benchmark::Instructions(args) => instructions::run(&args),
        Benchmark::Versus(args) => versus::run(&args),
        Benchmark::Delay(args) => delay::run(&args),
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
