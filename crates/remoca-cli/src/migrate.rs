//! `remoca migrate`: hands the disks and the cache of a VM to a process on another host.

use crate::check::is_replaced;
use crate::output::output;
use crate::{look, runtime};
use anyhow::{Context, Result, bail};
use clap::{ArgGroup, Args};
use remoca_disk::start::{ADVICE, KeySource};
use remoca_io::address::Endpoint;
use remoca_io::key;
use remoca_protocol::control::{Command, Status};
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

/// Hand the disks and the cache of a migrating VM to the process on the other host.
///
/// That process was started with --incoming. Run this before the hypervisor migrates. The disks move when the guest stops here, and
/// come back if it resumes here.
#[derive(Args, Debug)]
#[command(group(ArgGroup::new("what").required(true)))]
pub struct MigrateArgs {
    /// Name of the VM process, or the path of its control socket
    #[arg(value_name = "NAME", required_unless_present = "new_key", conflicts_with = "new_key")]
    name: Option<String>,

    /// Where the other process waits: the address of its --incoming, with the name of its host
    #[arg(long, value_name = "ADDRESS", group = "what", value_parser = Endpoint::of_process)]
    to: Option<Endpoint>,

    /// Key that both processes share: FILE, or credential:NAME. This command reads it, and passes it to the VM process over its
    /// control socket
    #[arg(long, value_name = "FILE", requires = "to")]
    key: Option<KeySource>,

    /// Make a key in a new file, for --key here and --incoming-key at the other process. Copy it there over a protected
    /// channel: anyone who has it can take the disks of a VM that migrates with it
    #[arg(long, value_name = "FILE", group = "what")]
    new_key: Option<PathBuf>,

    /// Cancel the migration: keep the disks here
    #[arg(long, group = "what")]
    abort: bool,

    /// Take back disks that were handed over when the other process cannot be reached; the cache is then cold. Only if the VM
    /// runs nowhere else: two VMs on one disk destroy it
    #[arg(long, group = "what")]
    take_back: bool,
}

/// Runs the subcommand.
///
/// # Errors
/// If either of the two processes does not answer, or refuses; the text says why.
pub fn run(args: &MigrateArgs) -> Result<()> {
    if let Some(path) = &args.new_key {
        let written = key::generate().and_then(|secret| key::write_new(&secret, path));
        written.with_context(|| format!("cannot make the key {}", path.display()))?;
        return Ok(writeln!(output(), "{}: new key written; protect it as you protect the disks", path.display())?);
    }
    let Some(socket) = runtime::sockets(args.name.as_deref())?.pop() else { bail!("there is no such VM process") };
    let command = match (&args.to, &args.key) {
        (Some(to), Some(key)) => Command::Migrate { to: to.to_string(), key: key.read()? },
        (Some(_), None) => {
            bail!("--key FILE is missing: give the key that the other process has as --incoming-key. {ADVICE}")
        }
        _ if args.abort => Command::MigrateAbort,
        _ => Command::MigrateTakeBack,
    };
    if args.to.is_some() {
        refuse_replaced_images(&Arc::new(runtime::ask(&socket, Command::Status)?))?;
    }
    let status = runtime::ask(&socket, command)?;
    let news = status.migration.and_then(|migration| migration.news).unwrap_or_default();
    Ok(writeln!(output(), "{}: {news}", status.name)?)
}

/// Refuses the first image whose path leads to another file by now: the process on the other host would open that one. Nobody knows that of
/// an image whose file system hangs.
fn refuse_replaced_images(status: &Arc<Status>) -> Result<()> {
    let disks = if status.has_disks() { &status.disks[..] } else { &[] };
    let begin = |(at, disk)| {
        let status = Arc::clone(status);
        (disk, look::begin(move || is_replaced(&status, &status.disks[at])))
    };
    let mut looks = look::end(disks.iter().enumerate().map(begin).collect());
    match looks.find(|(_, is_replaced)| *is_replaced == Some(true)) {
        Some((disk, _)) => bail!(
            "{}: {} is not the file that this process serves, so the guest would get another one at the other host. Put it back in place, for \
             example from /proc/{}/fd; or shut the guest down, and restart the process",
            disk.name,
            disk.image,
            status.pid
        ),
        None => Ok(()),
    }
}
