//! The `remoca` program: passes the command line to the module of its subcommand.

mod check;
mod config;
mod curve;
mod disk;
mod failure;
mod forget;
mod form;
mod generate;
mod group;
mod host;
mod hypervisor;
mod log;
mod look;
mod memory;
mod migrate;
mod number;
mod output;
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
mod top;
mod trace;
mod upgrade;
mod vm;
mod web;
mod xml;

use clap::{CommandFactory, Parser, Subcommand};
use std::process::ExitCode;

const VARIABLES: &str = "REMOCA_LOG in the environment says what is logged: error, warn, info, debug, trace or off, or MODULE=LEVEL, with commas \
                         between them [default: info]";

/// A disk cache for virtual machines in the idle memory of other machines.
#[derive(Parser)]
#[command(name = "remoca", version, arg_required_else_help = true, after_help = VARIABLES)]
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
    Top(top::TopArgs),
    Web(web::WebArgs),
    Curve(curve::CurveArgs),
    Trace(trace::TraceArgs),
    Sim(sim::SimArgs),
    Set(set::SetArgs),
    Forget(forget::ForgetArgs),
    TakeBack(take_back::TakeBackArgs),
    Host(Box<host::HostArgs>),
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
        Command::Top(args) => top::run(args),
        Command::Web(args) => web::run(args),
        Command::Curve(args) => curve::run(&args),
        Command::Trace(args) => trace::run(&args),
        Command::Sim(args) => sim::run(&args),
        Command::Set(args) => set::run(&args),
        Command::Forget(args) => forget::run(&args),
        Command::TakeBack(args) => take_back::run(&args),
        Command::Host(args) => host::run(&args, &words),
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
            output::say(format_args!("{error:#}"));
            failure::exit_code(&error)
        }
    }
}
