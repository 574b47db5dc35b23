//! `remoca support`: one archive of what is needed to find out what is wrong with a VM process.
//!
//! Everything in it is text that this module collects by name, and passes [`redacted`]. The state file, images, key files and
//! memory are never read.

mod collect;
mod redact;

use crate::output::output;
use crate::runtime;
use crate::settings::Folder;
use anyhow::{Context, Result};
use clap::Args;
use collect::Entry;
use flate2::Compression;
use flate2::write::GzEncoder;
use redact::redacted;
use remoca_protocol::control::{Command, Status};
use std::fs::File;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Collect everything that helps to find out what is wrong with a VM: one archive to look into, or to send.
///
/// It has the status, the configuration, the log, and facts about this host and the process. It has no keys, no state file and
/// no data of the guest. Long hexadecimal numbers and passwords in addresses are blacked out wherever they appear.
#[derive(Args, Debug)]
pub struct SupportArgs {
    #[command(flatten)]
    folder: Folder,

    /// Name of the VM process, or the path of its control socket. The process need not be running
    #[arg(value_name = "NAME")]
    name: String,

    /// The archive, which must not exist yet [default: remoca-support-NAME-TIME.tar.gz in this directory]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Runs the subcommand.
///
/// # Errors
/// If the archive exists or cannot be written.
pub fn run(args: &SupportArgs) -> Result<()> {
    let socket = runtime::socket_named(&args.name)?;
    let status = runtime::ask(&socket, Command::Status);
    let name = name_of(&status, &socket);
    let now_s = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let folder = format!("remoca-support-{name}-{now_s}");
    let path = args.output.clone().unwrap_or_else(|| format!("{folder}.tar.gz").into());
    let file = create(&path)?;
    let entries = collect::all(&name, &socket, &status, &args.folder.config);
    write(file, &folder, now_s, &entries).with_context(|| format!("cannot write {}", path.display())).inspect_err(
        |_| {
            // Half an archive is of no use.
            let _ = std::fs::remove_file(&path);
        },
    )?;
    let mut out = output();
    writeln!(out, "{}:", path.display())?;
    for entry in &entries {
        writeln!(out, "  {:<16} {}", entry.name, entry.what)?;
    }
    writeln!(
        out,
        "Not in it: keys, the state file, data of the guest. It names disks, hosts and paths: look before you send it."
    )?;
    if let Err(error) = status {
        writeln!(out, "The process did not answer: {error:#}")?;
    }
    Ok(())
}

/// Returns the name of the VM: what its process says or, if it says none or one that no file has, that of its socket.
fn name_of(status: &Result<Status>, socket: &Path) -> String {
    match status {
        Ok(status) if !status.name.contains('/') => status.name.clone(),
        _ => socket.file_stem().unwrap_or_default().to_string_lossy().into_owned(),
    }
}

/// Creates the archive, readable only by its owner. Never overwrites a file.
fn create(path: &Path) -> Result<File> {
    let created = File::options().write(true).create_new(true).mode(0o600).open(path);
    created.map_err(|error| match error.kind() {
        ErrorKind::AlreadyExists => {
            anyhow::anyhow!("{} exists: remove it, or name another file with --output", path.display())
        }
        _ => anyhow::Error::new(error).context(format!("cannot create {}", path.display())),
    })
}

/// Writes the archive: all entries in one folder, without what must stay secret.
fn write(file: File, folder: &str, now_s: u64, entries: &[Entry]) -> std::io::Result<()> {
    let mut archive = tar::Builder::new(GzEncoder::new(file, Compression::default()));
    for entry in entries {
        let text = redacted(&entry.text);
        let mut header = tar::Header::new_gnu();
        header.set_size(text.len() as u64);
        header.set_mode(0o600);
        header.set_mtime(now_s);
        archive.append_data(&mut header, format!("{folder}/{}", entry.name), text.as_bytes())?;
    }
    archive.into_inner()?.finish()?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn no_process_chooses_the_folder_of_the_archive_or_of_what_is_in_it() {
        let socket = Path::new("/run/remoca/web1.ctl");
        let says =
            |name: &str| Ok(Status { name: name.into(), ..remoca_view::testing::status(json!({}), [0; 2], [0; 2]) });
        assert_eq!(name_of(&says("shop"), socket), "shop");
        for status in [says("../../etc/cron.d/x"), Err(anyhow::anyhow!("it hangs"))] {
            assert_eq!(name_of(&status, socket), "web1");
        }
    }
}
