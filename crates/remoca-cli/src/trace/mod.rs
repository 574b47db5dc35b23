//! `remoca trace`: traces of disk requests, recorded from a running VM or imported from other programs.

mod import;
mod info;
mod reading;
mod record;

use crate::form::Form;
use anyhow::Result;
use clap::{Args, Subcommand};
pub use import::{complete, removed_at_a_signal};
pub use reading::{Opened, TraceFile, read_all};
use std::path::PathBuf;

/// Record and import traces of disk requests, for `remoca sim`.
#[derive(Args, Debug)]
pub struct TraceArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand, Debug)]
enum Action {
    /// Record what a VM's guest reads, writes and evicts, until the time or the size is reached or the command is interrupted
    Record(record::RecordArgs),
    /// End the recording of a VM that another `remoca trace record` receives
    Stop {
        /// Name of the VM process, or the path of its control socket
        #[arg(value_name = "NAME")]
        name: String,
    },
    /// Turn a trace of another program into a compact one
    Import(ImportArgs),
    /// Show what is in a trace
    Info(InfoArgs),
}

#[derive(Args, Debug)]
struct ImportArgs {
    #[command(flatten)]
    file: TraceFile,

    /// File to write; it appears when the import is complete
    #[arg(short, long, value_name = "OUTPUT")]
    output: PathBuf,

    /// Replace OUTPUT if it is there
    #[arg(long)]
    force: bool,
}

#[derive(Args, Debug)]
struct InfoArgs {
    #[command(flatten)]
    file: TraceFile,

    /// Output format
    #[arg(short, long, value_enum, default_value_t = Form::Table)]
    output: Form,
}

/// Runs the subcommand.
///
/// # Errors
/// If the VM process does not answer, or a trace cannot be read or written.
pub fn run(args: &TraceArgs) -> Result<()> {
    match &args.action {
        Action::Record(args) => record::run(args),
        Action::Stop { name } => record::stop(name),
        Action::Import(args) => import::run(&args.file, &args.output, args.force),
        Action::Info(args) => info::run(&args.file, args.output),
    }
}
