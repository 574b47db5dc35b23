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
use anyhow::{Context, Result, anyhow};
use args::options;
pub use args::{DISK_FLAGS, DiskArgs, FORMER_VARIABLE, configured, disks_of, options_of, schema};
pub use files::without_former;
use files::{Words, check_upgrade, recognise, usable};
pub use qcow2::socket as qcow2_socket;
use remoca_disk::handover;
use remoca_disk::start::{self, WrongOptions};
use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;

/// Runs the subcommand. `words` are its arguments as they were typed.
///
/// # Errors
/// If an option cannot be used; the text says how to correct it.
pub fn run(args: &DiskArgs, words: &[OsString]) -> Result<()> {
    if let Some(change) = &args.change {
        return change::run(change, &args.folder.config);
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
    let control = control(args)?;
    if args.check_handover {
        let options = options(configured(&files?, words.own)?, control)?;
        check_upgrade(&options, words)?;
        let offers = start::offers(&options);
        return Ok(writeln!(std::io::stdout(), "{}", handover::confirmation(offers))?);
    }
    #[cfg(feature = "ablation")]
    arm(args)?;
    let kept_at = args.name.is_some().then(|| Kept::beside(&control));
    let former = kept_at.as_deref().and_then(Kept::read);
    let (mut options, files) = usable(files, words, former.as_ref(), &control).map_err(|error| {
        start::note_failure();
        failure::of_start(error, former.is_some())
    })?;
    // A name that was mistyped, or another folder.
    let file = args.name.as_ref().map(|name| vm_path(&args.folder.config, name)).filter(|file| !file.exists());
    if options.disks.is_empty()
        && let Some(file) = file
    {
        let advice = "write that file, correct --name or --config, or say --disk image=IMAGE,socket=PATH";
        start::note_failure();
        let error = anyhow!("no disk: there is no {}: {advice}", file.display()).context(WrongOptions);
        return Err(failure::of_start(error, former.is_some()));
    }
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

fn check_name(name: Option<&str>) -> Result<()> {
    match name {
        Some(name) if name.is_empty() || name.contains('/') => {
            Err(anyhow!("invalid VM name `{name}`: names are used in file names and must not be empty or contain `/`")
                .context(WrongOptions))
        }
        _ => Ok(()),
    }
}

/// Returns the path of the control socket, and makes its folder if it is the default one.
fn control(args: &DiskArgs) -> Result<PathBuf> {
    if let Some(path) = &args.control {
        return Ok(path.clone());
    }
    let directory = runtime::directory()?;
    std::fs::create_dir_all(&directory).with_context(|| format!("cannot create {}", directory.display()))?;
    runtime::socket_of(&args.name.clone().unwrap_or_else(|| std::process::id().to_string()))
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
