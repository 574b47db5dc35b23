//! `remoca migrate`: hands the disks and the cache of a VM to a process on another host.

use crate::runtime;
use anyhow::{Context, Result, bail};
use clap::{ArgGroup, Args};
use remoca_disk::start::{ADVICE, KeySource};
use remoca_io::address::Endpoint;
use remoca_io::key;
use remoca_protocol::control::Command;
use std::io::Write;
use std::path::PathBuf;

/// Hand the disks and the cache of a VM that migrates to the process on the other host. Say it before the hypervisor
/// migrates; the other process was started with --incoming. The disks go over when the guest stops here, and come back if it
/// goes on here
#[derive(Args, Debug)]
#[command(group(ArgGroup::new("what").required(true)))]
pub struct MigrateArgs {
    /// Name of the VM process, or the path of its control socket
    #[arg(value_name = "NAME", required_unless_present = "new_key", conflicts_with = "new_key")]
    name: Option<String>,

    /// Where the other process waits: what its --incoming says, with the name of its host
    #[arg(long, value_name = "ADDRESS", group = "what")]
    to: Option<Endpoint>,

    /// The key that both processes have: FILE, or credential:NAME. It is read here, and the VM process gets it over its control
    /// socket
    #[arg(long, value_name = "FILE", requires = "to")]
    key: Option<KeySource>,

    /// Make a key in a new file, for --key here and for --incoming-key at the other process. Copy it there over a protected
    /// way: whoever has it can take the disks of a VM that migrates with it
    #[arg(long, value_name = "FILE", group = "what")]
    new_key: Option<PathBuf>,

    /// Do not hand the disks over after all
    #[arg(long, group = "what")]
    abort: bool,

    /// Take disks back that were handed over, with a cold cache, when the other process is out of reach. Only if the VM runs
    /// nowhere else: two VMs on one disk destroy it
    #[arg(long, group = "what")]
    take_back: bool,
}

/// Runs the subcommand.
///
/// # Errors
/// If one of the two processes does not answer or refuses; the text says why.
pub fn run(args: &MigrateArgs) -> Result<()> {
    if let Some(path) = &args.new_key {
        let written = key::generate().and_then(|secret| key::write_new(&secret, path));
        written.with_context(|| format!("cannot make the key {}", path.display()))?;
        return Ok(writeln!(std::io::stdout(), "{}: a new key; keep it as you keep the disks", path.display())?);
    }
    let Some(socket) = runtime::sockets(args.name.as_deref())?.pop() else { bail!("no such VM process") };
    let command = match (&args.to, &args.key) {
        (Some(to), Some(key)) => Command::Migrate { to: to.to_string(), key: key.read()? },
        (Some(_), None) => {
            bail!("say --key FILE, the one that the other process has as --incoming-key. {ADVICE}")
        }
        _ if args.abort => Command::MigrateAbort,
        _ => Command::MigrateTakeBack,
    };
    let status = runtime::ask(&socket, command)?;
    let news = status.migration.and_then(|migration| migration.news).unwrap_or_default();
    Ok(writeln!(std::io::stdout(), "{}: {news}", status.name)?)
}
