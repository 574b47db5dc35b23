//! The `remoca` program: passes the command line to the module of its subcommand.

mod disk;
mod generate;
mod group;
mod log;
mod migrate;
mod runtime;
mod serve;
mod set;
mod size;
mod status;
mod upgrade;

use clap::{CommandFactory, Parser, Subcommand};
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
    Generate(generate::GenerateArgs),
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
        Command::Generate(args) => generate::run(&args, Arguments::command()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever reads the output has read enough, as in `remoca status | head -1`.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("remoca: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let is_broken_pipe = |error: &std::io::Error| error.kind() == std::io::ErrorKind::BrokenPipe;
    error.downcast_ref::<std::io::Error>().is_some_and(is_broken_pipe)
        || error.downcast_ref::<serde_json::Error>().and_then(serde_json::Error::io_error_kind)
            == Some(std::io::ErrorKind::BrokenPipe)
}
