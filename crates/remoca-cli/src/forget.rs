//! `remoca forget`: removes what is kept of a VM that is gone.
//!
//! 1. Nothing is touched while a process of the VM runs: it listens at its control socket, or has its state file locked. None
//!    starts meanwhile: the state file stays locked, and is removed last.
//! 2. Pools are given back before the state file is removed, which has their tokens.
//! 3. A mark that the disks went to another host stays: without it, a process that is started here again would be an owner.

use crate::disk;
use crate::output::output;
use crate::runtime;
use crate::settings::kept::Kept;
use crate::settings::{Files, Folder, vm_path};
use crate::size::show_size;
use anyhow::{Context, Result, bail};
use clap::Args;
use remoca_disk::link::{LinkError, return_pool};
use remoca_disk::start::guests_sockets;
use remoca_disk::state::{self, Deaths, Former, Remains, RosterEntry, StateError, curves_beside};
use remoca_io::control::left;
use remoca_io::small_file::with_ending;
use remoca_io::socket::has_listener;
use remoca_view::text::count_of;
use std::ffi::OsString;
use std::io::{self, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Remove what is kept of a VM that is gone: its state in memory, and its pools at memory servers.
///
/// A VM that stops leaves its cache for its return. One that never returns holds that memory until the host boots again, and
/// its pools until the servers' grace time. Sockets that a killed process left go with it, if nobody listens on them. The images are
/// not touched, and neither is the configuration in /etc/remoca.
#[derive(Args, Debug)]
pub struct ForgetArgs {
    /// Name of the VM
    #[arg(value_name = "NAME")]
    name: String,

    /// Only show what would be removed
    #[arg(long)]
    dry_run: bool,

    /// Control socket that its process had [default: as of `remoca disk`]
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,

    /// State file that its process had [default: as of `remoca disk`]
    #[arg(long, value_name = "PATH")]
    state: Option<PathBuf>,

    #[command(flatten)]
    folder: Folder,
}

/// Where a VM leaves its files.
struct Places {
    control: PathBuf,
    state: PathBuf,
    /// Sockets of guests, as the configuration of its last process says. Another VM may have them since.
    sockets: Vec<PathBuf>,
}

/// Runs the subcommand.
///
/// # Errors
/// If a process of the VM runs, nothing is kept of it, or a file cannot be removed.
pub fn run(args: &ForgetArgs) -> Result<()> {
    let name = &args.name;
    if name.is_empty() || name.contains('/') {
        bail!("`{name}` is no name of a VM: give the path of its control socket with --control, and its name here");
    }
    let places = places(args)?;
    if has_listener(&places.control) {
        bail!("{name} is running: a process listens at {}. Stop it first", places.control.display());
    }
    let files = places.files();
    let remains = match state::look(&places.state) {
        Err(StateError::InUse(path)) => bail!("{name} is running: a process uses {}. Stop it first", path.display()),
        remains => remains?,
    };
    let former = remains.as_ref().map(|remains| &remains.former);
    if files.is_empty() {
        let looked = [&places.control, &places.state].map(|path| path.display().to_string());
        bail!("nothing is kept of {name}: there is no {} and no {}{}", looked[0], looked[1], runtime::elsewhere());
    }
    let mut out = output();
    if args.dry_run {
        writeln!(out, "{name}: nothing is removed because of --dry-run")?;
    }
    let given_back = pools(former, args.dry_run, &mut out)?;
    let flushes = former.map_or(0, |former| former.failed_flushes.len());
    if flushes > 0 {
        writeln!(out, "{}", flushes_text(flushes as u64, args.dry_run))?;
    }
    let freed = remove(remains.as_ref(), &files, args.dry_run, &mut out)?;
    let (freed, given_back) = (show_size(freed), show_size(given_back));
    match args.dry_run {
        true => writeln!(out, "{name}: {freed} would be free on this host")?,
        false => writeln!(out, "{name}: {freed} are free on this host, and {given_back} at memory servers")?,
    }
    if places.is_gone() {
        writeln!(out, "{} stays: it says that the disks are at another host", places.mark("gone").display())?;
    }
    let configuration = vm_path(&args.folder.config, name);
    if configuration.exists() {
        writeln!(out, "{} stays: it is yours to remove", configuration.display())?;
    }
    Ok(())
}

/// Returns where the VM leaves its files: as its options say, or those of its last good configuration.
fn places(args: &ForgetArgs) -> Result<Places> {
    let own_socket = || runtime::socket_of(&args.name, "give --control PATH");
    let first = args.control.clone().map_or_else(own_socket, Ok)?;
    let words = [OsString::from("--name"), OsString::from(&args.name)];
    let options_of = |files: Files| {
        let is_configured = files.vm.is_some();
        disk::options_of(&files, &words, &first).ok().filter(|_| is_configured)
    };
    let left = Kept::read(&Kept::beside(&first)).and_then(|kept| options_of(kept.files));
    let sockets = left.iter().flat_map(guests_sockets).filter(|path| path.is_absolute()).map(PathBuf::from).collect();
    let options = Files::read(&args.folder.config, Some(&args.name)).ok().and_then(options_of).or(left);
    let control = match (&args.control, &options) {
        (None, Some(options)) => options.control.clone(),
        _ => first,
    };
    let state = args.state.clone().or_else(|| options.and_then(|options| options.state));
    let state = state.unwrap_or_else(|| control.with_file_name(format!("{}.state", args.name)));
    Ok(Places { control, state, sockets })
}

impl Places {
    fn mark(&self, kind: &str) -> PathBuf {
        with_ending(&self.control, &format!(".{kind}"))
    }

    /// Returns whether the disks went to another host whose lock does not reach here.
    fn is_gone(&self) -> bool {
        self.mark("gone").exists()
    }

    /// Returns the files that are there, the state file last, with the bytes of memory that each takes.
    fn files(&self) -> Vec<(PathBuf, u64)> {
        let beside = |ending| with_ending(&self.state, ending);
        let paths = [
            beside(".new"),
            beside(".bad"),
            curves_beside(&self.state),
            Deaths::beside(&self.state).path().to_owned(),
            Kept::beside(&self.control),
            self.mark("here"),
            self.mark("gone.ready"),
            left::beside(&self.control),
            self.control.clone(),
            self.state.clone(),
        ];
        let bytes = |path: &PathBuf| {
            let file = path.symlink_metadata().ok()?;
            // What has the name of a socket may be something else by now.
            let is_to_be_socket = *path == self.control || self.sockets.contains(path);
            let is_ours = file.is_file() && !is_to_be_socket || file.file_type().is_socket();
            is_ours.then(|| file.blocks() * 512)
        };
        let sockets = self.sockets.iter().filter(|path| !has_listener(path)).cloned();
        sockets.chain(paths).filter_map(|path| bytes(&path).map(|bytes| (path, bytes))).collect()
    }
}

/// Gives the pools back, all at once, and writes what came of each to `out`. Returns how many bytes they had.
fn pools(former: Option<&Former>, is_dry: bool, out: &mut impl Write) -> Result<u64> {
    let servers = former.map(|former| &former.servers[..]).unwrap_or_default();
    if is_dry {
        for RosterEntry { endpoint, .. } in servers {
            writeln!(out, "would give back what it has at {endpoint}")?;
        }
        return Ok(0);
    }
    let outcomes: Vec<Result<u64, LinkError>> = std::thread::scope(|scope| {
        let threads: Vec<_> = servers.iter().map(|server| scope.spawn(|| return_pool(server))).collect();
        threads.into_iter().map(|thread| thread.join().expect("giving a pool back does not panic")).collect()
    });
    let mut sum = 0;
    for (RosterEntry { endpoint, .. }, outcome) in servers.iter().zip(outcomes) {
        match outcome {
            Ok(0) => writeln!(out, "{endpoint} has no pool of it")?,
            Ok(bytes) => {
                sum += bytes;
                writeln!(out, "gave back {} at {endpoint}", show_size(bytes))?;
            }
            Err(error) => writeln!(out, "{error} A pool there is free after the server's grace time")?,
        }
    }
    Ok(sum)
}

/// Returns what comes of the failed flushes of so many images.
fn flushes_text(images: u64, is_dry: bool) -> String {
    let verb = if is_dry { "would be" } else { "are" };
    let images = count_of(images, "image");
    format!("failed flushes of {images} {verb} forgotten: check what is there before another VM uses it")
}

/// Removes the files, and writes their names to `out`. Returns how many bytes they took.
fn remove(remains: Option<&Remains>, files: &[(PathBuf, u64)], is_dry: bool, out: &mut impl Write) -> Result<u64> {
    for (path, bytes) in files {
        let (shown, size) = (path.display(), show_size(*bytes));
        if is_dry {
            writeln!(out, "would remove {shown} ({size})")?;
            continue;
        }
        remove_one(path, remains).with_context(|| format!("cannot remove {shown}"))?;
        writeln!(out, "removed {shown} ({size})")?;
    }
    Ok(files.iter().map(|(_, bytes)| bytes).sum())
}

/// Removes a file, which may be the state file, and may be gone.
fn remove_one(path: &Path, remains: Option<&Remains>) -> io::Result<()> {
    let removed = match remains {
        Some(remains) if remains.path() == path => remains.remove(),
        // Servers were asked meanwhile.
        _ if has_listener(path) => Err(io::Error::other("a process listens there by now")),
        _ => std::fs::remove_file(path),
    };
    removed.or_else(|error| if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use remoca_io::lock::lock_whole;
    use remoca_io::socket::listen_as_hung;
    use std::fs::OpenOptions;
    use std::os::unix::fs::OpenOptionsExt;
    use std::os::unix::net::UnixListener;

    #[derive(Parser, Debug)]
    struct Program {
        #[command(flatten)]
        forget: ForgetArgs,
    }

    #[test]
    fn what_is_only_shown_is_not_said_to_have_happened() {
        let [dry, done] = [true, false].map(|is_dry| flushes_text(2, is_dry));
        assert!(dry.starts_with("failed flushes of 2 images would be forgotten: "), "{dry}");
        assert!(done.starts_with("failed flushes of 2 images are forgotten: "), "{done}");
    }

    #[test]
    fn a_process_that_hangs_is_one_that_runs_and_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let control = folder.path().join("vm.ctl");
        let _hung = listen_as_hung(&control).unwrap();
        let [path, config] = [control.as_path(), folder.path()].map(|path| path.to_str().unwrap());
        let words = ["forget", "vm", "--control", path, "--config", config];
        let refused = run(&Program::try_parse_from(words).unwrap().forget).unwrap_err().to_string();
        assert!(refused.starts_with("vm is running: a process listens at "), "{refused}");
        assert!(control.exists());
    }

    /// Output that is written while files are removed: whoever has the state file locked may have made the others.
    struct Watched<'a>(&'a Places);

    impl Write for Watched<'_> {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            match OpenOptions::new().read(true).write(true).open(&self.0.state) {
                Ok(state) => assert!(lock_whole(&state).is_err(), "a process of the VM could start"),
                Err(_) => assert!(!self.0.control.exists(), "the state file is removed last"),
            }
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn no_process_starts_until_the_files_are_gone() {
        let folder = tempfile::tempdir().unwrap();
        let [control, state] = ["vm.ctl", "vm.state"].map(|name| folder.path().join(name));
        let places = Places { control, state, sockets: Vec::new() };
        drop(UnixListener::bind(&places.control).unwrap());
        OpenOptions::new().write(true).create_new(true).mode(0o600).open(&places.state).unwrap();
        let (files, remains) = (places.files(), state::look(&places.state).unwrap());
        assert_eq!(files.len(), 2);
        remove(remains.as_ref(), &files, false, &mut Watched(&places)).unwrap();
        assert!(!places.control.exists() && !places.state.exists());
    }
}
