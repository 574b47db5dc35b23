//! The `remoca` program: what the user typed goes to the module of its subcommand.

mod disk;
mod group;
mod inherited;
mod migrate;
mod nbd;
mod runtime;
mod serve;
mod set;
mod signals;
mod size;
mod status;
mod upgrade;

use clap::{Parser, Subcommand};
use std::io::IsTerminal;
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

/// Does what the command line says.
pub fn main() -> ExitCode {
    let arguments = Arguments::parse();
    start_log();
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

/// Warnings and news go to standard error; `REMOCA_LOG` chooses more or less (for instance `debug`).
fn start_log() {
    let filter = tracing_subscriber::EnvFilter::try_from_env("REMOCA_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    let colours = std::io::stderr().is_terminal();
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(colours);
    log.with_target(false).init();
}
