//! `remoca take-back`: has the memory server of this host take memory back from a VM process that has it mapped.

use crate::runtime::explain_unreachable;
use crate::settings::Folder;
use crate::size::{parse_size, show_size};
use crate::status::server::{answer, control};
use anyhow::{Context, Result, bail};
use clap::Args;
use remoca_server::command::{Command, Reply, command_path};
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

/// Longer than the server takes for its answer.
const PATIENCE: Duration = Duration::from_secs(20);
const PAGE_BYTES: u64 = 4096;

/// Limit a mapped pool of this host's memory server (`remoca serve`), and take back what is above the limit.
///
/// Its VM process forgets the pages above it. One that does not answer within 100 ms loses the whole pool, and gets another one.
#[derive(Args, Debug)]
pub struct TakeBackArgs {
    /// The pool, as `remoca status --server` shows it
    #[arg(value_name = "POOL")]
    pool: String,

    /// What the VM process may keep, such as 512M, or 0
    #[arg(value_name = "SIZE", value_parser = parse_size)]
    size: u64,

    /// Control socket of the memory server [default: `control` of [serve] in remoca.toml, else that of the unit,
    /// /run/remoca-serve/control]
    #[arg(long, value_name = "PATH")]
    server: Option<PathBuf>,

    #[command(flatten)]
    folder: Folder,
}

/// Runs the subcommand.
///
/// # Errors
/// If the server does not answer, or refuses.
pub fn run(args: &TakeBackArgs) -> Result<()> {
    let socket = command_path(&control(args.server.as_deref(), &args.folder.config)?);
    let mut line = serde_json::to_vec(&Command::TakeBack { pool: args.pool.clone(), bytes: args.size })?;
    line.push(b'\n');
    let answer = answer(&socket, &line, PATIENCE).map_err(|error| {
        let hint = "is `remoca serve` running with this --control, and are you its user or root?";
        explain_unreachable(&socket, error, "no memory server answers", hint)
    })?;
    let reply = serde_json::from_str(&answer)
        .with_context(|| format!("this is no memory server that takes commands: {}", socket.display()))?;
    let pool = &args.pool;
    match reply {
        Reply::Error(error) => bail!(error),
        Reply::Done(done) if done.ended => {
            Ok(writeln!(std::io::stdout(), "{pool}: ended, its client did not answer or is gone; all memory is back")?)
        }
        Reply::Done(done) => {
            let (has, limit) = (show_size(u64::from(done.pages) * PAGE_BYTES), show_size(args.size));
            Ok(writeln!(std::io::stdout(), "{pool}: has {has}, at most {limit}")?)
        }
    }
}
