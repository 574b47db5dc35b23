//! The `remoca` program: passes the command line to the module of its subcommand.

mod chart;
mod check;
mod config;
mod curve;
mod disk;
mod failure;
mod generate;
mod group;
mod hypervisor;
mod log;
mod migrate;
mod qcow2;
mod runtime;
mod serve;
mod set;
pub mod settings;
mod sim;
mod size;
mod status;
mod support;
mod take_back;
mod time;
mod trace;
mod upgrade;
mod vm;
mod xml;

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
    Config(config::ConfigArgs),
    Status(status::StatusArgs),
    Curve(curve::CurveArgs),
    Trace(trace::TraceArgs),
    Sim(sim::SimArgs),
    Set(set::SetArgs),
    TakeBack(take_back::TakeBackArgs),
    Upgrade(upgrade::UpgradeArgs),
    Migrate(migrate::MigrateArgs),
    Support(support::SupportArgs),
    Check(check::CheckArgs),
    Qcow2(qcow2::Qcow2Args),
    Xml(xml::XmlArgs),
    Generate(generate::GenerateArgs),
}

/// Runs the subcommand, and returns the exit code.
pub fn main() -> ExitCode {
    let arguments = Arguments::parse();
    // As they were typed: behind the name of the program and that of the subcommand.
    let words: Vec<_> = std::env::args_os().skip(2).collect();
    log::start();
    let result = match arguments.command {
        Command::Serve(args) => serve::run(&args, &words),
        Command::Disk(args) => disk::run(&args, &words),
        Command::Config(args) => config::run(&args),
        Command::Status(args) => status::run(&args),
        Command::Curve(args) => curve::run(&args),
        Command::Trace(args) => trace::run(&args),
        Command::Sim(args) => sim::run(&args),
        Command::Set(args) => set::run(&args),
        Command::TakeBack(args) => take_back::run(&args),
        Command::Upgrade(args) => upgrade::run(&args),
        Command::Migrate(args) => migrate::run(&args),
        Command::Support(args) => support::run(&args),
        Command::Check(args) => check::run(&args),
        Command::Qcow2(args) => qcow2::run(&args),
        Command::Xml(args) => xml::run(&args),
        Command::Generate(args) => generate::run(&args, Arguments::command()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("remoca: {error:#}");
            failure::exit_code(&error)
        }
    }
}
