//! `remoca disk`: turns the command line into the options of a VM process. Its subcommands change the disks of a running
//! one.

mod args;
mod change;
mod files;
mod qcow2;

use crate::failure;
use crate::runtime;
use crate::settings::kept::Kept;
use crate::settings::{Files, vm_path};
use anyhow::{Context, Result, anyhow, bail};
use args::options;
pub use args::{DISK_FLAGS, DiskArgs, FORMER_VARIABLE, PER_VM, configured, disks_of, options_of, schema};
use files::{Words, check_upgrade, recognise, usable};
pub use files::{check_file, refuse_addresses_of_others, without_former};
pub use qcow2::socket as qcow2_socket;
use remoca_disk::handover;
use remoca_disk::start::{self, WrongOptions};
use remoca_io::socket::{PATH_BYTES_MAX, SocketError};
use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Runs the subcommand. `words` are its arguments as they were typed.
///
/// # Errors
/// If an option cannot be used; the text says how to correct it.
pub fn run(args: &DiskArgs, words: &[OsString]) -> Result<()> {
    if let Some(change) = &args.change {
        return change::run(change);
    }
    if args.print_capabilities {
        return Ok(writeln!(std::io::stdout(), r#"{{"type": "block", "features": ["read-only", "blk-file"]}}"#)?);
    }
    check_name(args.name.as_deref())?;
    let former = std::env::var_os(FORMER_VARIABLE);
    let name = args.name.as_deref().unwrap_or_default();
    let own = without_former(words, name, &args.folder.config, former.as_deref());
    let words = Words { typed: words, own: &own };
    let files = Files::read(&args.folder.config, args.name.as_deref());
    let file = args.name.as_ref().map(|name| vm_path(&args.folder.config, name));
    let control = control(args)?;
    if args.check_handover {
        let options = options(configured(&files?, words.own)?, control)?;
        check_file(&options, file.as_deref())?;
        check_upgrade(&options, words)?;
        let offers = start::offers(&options);
        return Ok(writeln!(std::io::stdout(), "{}", handover::confirmation(offers))?);
    }
    #[cfg(feature = "ablation")]
    arm(args)?;
    let kept_at = args.name.is_some().then(|| Kept::beside(&control));
    let former = kept_at.as_deref().and_then(Kept::read);
    let used = usable(files, words, former.as_ref(), &control, file.as_deref()).and_then(|(options, files)| {
        check_file(&options, file.as_deref())?;
        Ok((options, files))
    });
    let (mut options, files) = used.map_err(|error| {
        start::note_failure();
        failure::of_start(error, former.is_some())
    })?;
    recognise(&mut options, former.as_ref());
    options.has_predecessor = former.is_some();
    let mut kept = Kept { files, ..Kept::default() };
    if let Some(former) = &former {
        kept.since(former, schema, words.own).iter().for_each(|change| tracing::info!("configuration: {change}"));
    }
    let mut has_started = false;
    let result = start::run(&options, |status| {
        has_started = true;
        kept.images = status.disks.iter().map(|disk| disk.image.clone()).collect();
        if let Some(former) = former.as_ref().filter(|_| status.disks.len() < options.disks.len()) {
            // A disk could not be added. The next process could not start with these files.
            kept.files = former.files.clone();
        }
        kept_at.iter().for_each(|path| kept.write(path));
    });
    result.map_err(|error| if has_started { error } else { failure::of_start(error, former.is_some()) })
}

/// Refuses the name of a file of which no process could start with its control socket in the default place.
///
/// # Errors
/// Why it could not.
pub fn check_file_name(name: &str) -> Result<()> {
    if name.starts_with('-') {
        bail!("invalid VM name `{}`: the unit's command would take it for an option", name.escape_debug());
    }
    // A user without a directory has to say where the socket is.
    let control = runtime::directory().map(|directory| runtime::socket_in(&directory, name));
    let fits = |control: PathBuf| check_control(&control, Some(name));
    let checked = check_name(Some(name)).and_then(|()| control.map_or(Ok(()), fits));
    // There are no options that could not be used.
    checked.map_err(|error| anyhow!("{}", error.root_cause()))
}

/// Returns whether `remoca-disk@NAME` can have this name. systemd escapes other characters, and the unit then looks for another file.
pub fn has_unit(name: &str) -> bool {
    name.chars().all(|letter| letter.is_ascii_alphanumeric() || ":_.-".contains(letter))
}

/// Which names have a unit ([`has_unit`]).
pub const UNIT_NAMES: &str = "a unit remoca-disk@NAME has letters, digits and : _ . - only";

/// Refuses a name that files, or the tables of VMs, cannot have.
fn check_name(name: Option<&str>) -> Result<()> {
    let Some(name) = name else { return Ok(()) };
    let why = match name {
        _ if name.is_empty() || name.contains('/') => {
            "names are used in file names and must not be empty or contain `/`"
        }
        "." | ".." => "it is that of a folder wherever it stands in a path",
        _ if name.contains(char::is_control) => "names are shown in tables and must not contain control characters",
        _ => return Ok(()),
    };
    Err(anyhow!("invalid VM name `{}`: {why}", name.escape_debug()).context(WrongOptions))
}

/// Refuses a control socket whose path is too long. `name` is that of the VM if the path comes from it. The socket itself is made after
/// the state file, which would be left behind.
fn check_control(control: &Path, name: Option<&str>) -> Result<()> {
    let length = control.as_os_str().len();
    let excess = length.saturating_sub(PATH_BYTES_MAX);
    match name {
        _ if excess == 0 => Ok(()),
        None => Err(SocketError::PathTooLong { path: control.into(), length }.into()),
        Some(name) => {
            let (bytes, most) = (name.len(), name.len().saturating_sub(excess));
            let folder = control.parent().unwrap_or(Path::new("")).display();
            let why = format!("at most {most} are possible, as its control socket is in {folder}");
            Err(anyhow!("a VM name of {bytes} bytes: {why}").context(WrongOptions))
        }
    }
}

/// Returns the path of the control socket, and makes its folder if it is the default one.
fn control(args: &DiskArgs) -> Result<PathBuf> {
    if let Some(path) = &args.control {
        check_control(path, None)?;
        return Ok(path.clone());
    }
    let directory = runtime::directory_or("give --control PATH")?;
    let name = args.name.clone().unwrap_or_else(|| std::process::id().to_string());
    let control = runtime::socket_in(&directory, &name);
    check_control(&control, Some(&name))?;
    std::fs::create_dir_all(&directory).with_context(|| format!("cannot create {}", directory.display()))?;
    Ok(control)
}

/// Notes that this is the program for tests, and arms the kill point or panic point given on the command line. Fails if both are given.
#[cfg(feature = "ablation")]
fn arm(args: &DiskArgs) -> Result<()> {
    use remoca_io::narrow::{End, end_at, hold_at, note_test_program};
    note_test_program();
    for (option, end) in [(&args.kill_at, End::Kill), (&args.panic_at, End::Panic)] {
        let Some(place) = option else { continue };
        let (place, passage) = place.split_once(':').context("a place has the form PLACE:N")?;
        end_at(place, passage.parse().context("a place has the form PLACE:N")?, end).map_err(anyhow::Error::msg)?;
    }
    let held = args.hold_at.iter().filter_map(|place| place.split_once(':'));
    hold_at(held.map(|(place, file)| (place.to_owned(), file.into())).collect()).map_err(anyhow::Error::msg)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_goes_into_file_names_and_tables() {
        for good in [None, Some("web1"), Some("Web server 1"), Some("wéb")] {
            assert!(check_name(good).is_ok(), "{good:?}");
        }
        for (bad, shown) in [
            ("", "``"),
            ("a/b", "`a/b`"),
            (".", "`.`"),
            ("..", "`..`"),
            ("a\nb", "`a\\nb`"),
            ("\u{1b}[2J", "`\\u{1b}[2J`"),
        ] {
            let error = format!("{:#}", check_name(Some(bad)).unwrap_err());
            assert!(error.contains(&format!("invalid VM name {shown}: ")), "{error}");
        }
    }

    #[test]
    fn a_name_that_is_too_long_for_its_control_socket_is_refused_with_the_limit() {
        let check = |length: usize| {
            let name = "x".repeat(length);
            check_control(&runtime::socket_in(Path::new("/run/remoca"), &name), Some(&name))
        };
        assert!(check(91).is_ok());
        let error = format!("{:#}", check(92).unwrap_err());
        assert!(error.contains("a VM name of 92 bytes: at most 91 are possible"), "{error}");
        let error = check_control(Path::new(&"x".repeat(108)), None).unwrap_err();
        assert!(error.to_string().contains("has 108 bytes, at most 107"), "{error}");
    }
}
