//! The `remoca` program: passes the command line to the module of its subcommand.

mod disk;
mod group;
mod log;
mod migrate;
mod runtime;
mod serve;
mod set;
mod size;
mod status;
mod upgrade;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// A disk cache for virtual machines in the idle memory of other machines.
#[derive(Parser)]
#[command(name = "remoca", version, arg_required_else_help = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Serve(serve::ServeArgs),
    Disk(Box<disk::DiskArgs>),
    Status(status::StatusArgs),
    Set(set::SetArgs),
    Upgrade(upgrade::UpgradeArgs),
    Migrate(migrate::MigrateArgs),
}

/// Runs the subcommand, and returns the exit code.
pub fn main() -> ExitCode {
    let arguments = Arguments::parse();
    log::start();
    let result = match arguments.command {
        Command::Serve(args) => serve::run(args),
        Command::Disk(args) => disk::run(*args),
        Command::Status(args) => status::run(&args),
        Command::Set(args) => set::run(&args),
        Command::Upgrade(args) => upgrade::run(&args),
        Command::Migrate(args) => migrate::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("remoca: {error:#}");
            ExitCode::FAILURE
        }
    }
}
