//! What a VM process takes from the files of its configuration, and what it does if they cannot be used.

use super::args::options_of;
use crate::runtime;
use crate::settings::kept::Kept;
use crate::settings::{Files, Unusable, env_file, vm_path};
use anyhow::{Context, Error, Result, anyhow};
use remoca_disk::start::{self, Options, WrongOptions};
use remoca_io::address::Endpoint;
use remoca_io::control::left;
use remoca_io::handover::VARIABLE;
use remoca_protocol::control::Command;
use std::ffi::{OsStr, OsString};
use std::path::Path;

/// Arguments of a VM process.
#[derive(Clone, Copy)]
pub(super) struct Words<'a> {
    /// As they were typed.
    pub(super) typed: &'a [OsString],
    /// Without those of a former unit that have become the VM's file.
    pub(super) own: &'a [OsString],
}

impl<'a> Words<'a> {
    /// Returns the arguments that are in force beside these files.
    fn beside(self, files: &Files) -> &'a [OsString] {
        if files.vm.is_some() { self.own } else { self.typed }
    }
}

/// Returns the options of a VM process, with those of its files, and these files. If they cannot be used, they are the files of
/// the process before it; the options say so. `file` is the path of the VM's own.
pub(super) fn usable(
    files: Result<Files, Unusable>,
    words: Words<'_>,
    former: Option<&Kept>,
    control: &Path,
    file: Option<&Path>,
) -> Result<(Options, Files)> {
    // One that was killed listened there last, and has a guest that waits.
    let killed = former.filter(|_| control.symlink_metadata().is_ok() || left::is_there(control));
    let killed = killed.and_then(|kept| options_of(&kept.files, words.beside(&kept.files), control).ok());
    let used = files.map_err(Error::from).and_then(|files| {
        let options = options_of(&files, words.beside(&files), control)?;
        refuse_addresses_of_others(&options, killed.as_ref())?;
        if let Some(former) = former.filter(|former| former.files != files) {
            check_file(&options, file)?;
            check_restart(&options, former, words)?;
        }
        Ok((options, files))
    });
    let (unusable, former) = match (used, former) {
        (Err(unusable), Some(former)) => (unusable, former),
        (used, _) => return used,
    };
    let copy = Kept::beside(control);
    let notice = format!("runs with the last good copy of its configuration, {}, for {unusable:#}", copy.display());
    tracing::error!("{notice}");
    let options = options_of(&former.files, words.beside(&former.files), control);
    let options = options.context("the last good copy of the configuration cannot be used either")?;
    refuse_addresses_of_others(&options, killed.as_ref())?;
    Ok((Options { notice: Some(notice), ..options }, former.files.clone()))
}

/// Refuses options without a disk if the VM's `file` is not there: its name was mistyped, or it is in another folder.
///
/// # Errors
/// If so; the text names the file.
pub fn check_file(options: &Options, file: Option<&Path>) -> Result<()> {
    let Some(file) = file.filter(|file| options.disks.is_empty() && !file.exists()) else { return Ok(()) };
    let advice = "write that file, correct --name or --config, or say --disk image=IMAGE,socket=PATH";
    Err(anyhow!("no disk: there is no {}: {advice}", file.display()).context(WrongOptions))
}

/// Refuses to start with files that changed since the process before, if an upgrade to them would be refused because they, or a
/// disk that comes, cannot be used. Guests may wait for the other disks.
fn check_restart(options: &Options, former: &Kept, words: Words<'_>) -> Result<()> {
    // A program that takes over was asked before.
    if std::env::var_os(VARIABLE).is_some() {
        return Ok(());
    }
    let files = &former.files;
    let Ok(former) = options_of(files, words.beside(files), &options.control) else { return Ok(()) };
    start::check_restart(options, &former)
}

/// Refuses an address at which the process of another VM listens, or did until it was killed or ended under its guest: that guest connects
/// there again by itself, and would get the disks of this VM. What the process before it has, with the options `former`, is its own.
///
/// # Errors
/// If there is one; the text says what to do.
pub fn refuse_addresses_of_others(options: &Options, former: Option<&Options>) -> Result<()> {
    // A program that takes over was asked before.
    if std::env::var_os(VARIABLE).is_some() {
        return Ok(());
    }
    let has: Vec<_> = former.into_iter().flat_map(start::addresses).collect();
    let own: Vec<_> = start::addresses(options).filter(|address| !has.contains(address)).collect();
    if own.is_empty() {
        return Ok(());
    }
    // Most have nothing alike, and to read what they have as settings takes milliseconds for each of hundreds.
    let endings: Vec<_> = own.iter().map(ending).collect();
    let may_have = |text: &str| endings.iter().any(|ending| text.contains(ending));
    let folder = options.control.parent().unwrap_or(Path::new(""));
    let others = runtime::read_sockets(folder).unwrap_or_default();
    for control in others.into_iter().filter(|control| *control != options.control) {
        let Some(Kept { files, .. }) = Kept::read_if(&Kept::beside(&control), may_have) else { continue };
        let vm = files.vm.as_ref().and_then(|file| file.path.file_stem());
        let Some(vm) = vm.filter(|vm| *vm != options.name.as_str()) else { continue };
        let words = [OsString::from("--name"), vm.to_owned()];
        let Ok(other) = options_of(&files, &words, &control) else { continue };
        if let Some(address) = start::addresses(&other).find(|address| own.contains(address)) {
            let vm = vm.display();
            let advice = format!("choose another one. If that VM is gone for good: `remoca forget {vm}`");
            return Err(anyhow!("{address} is where the guest of {vm} connects: {advice}").context(WrongOptions));
        }
    }
    Ok(())
}

/// Returns the name of a socket's file, or a port.
fn ending(address: &Endpoint) -> String {
    let text = address.to_string();
    text.rsplit(['/', ':']).next().unwrap_or_default().to_owned()
}

/// Marks the disks that a process of this name had: their content is not looked at, and their size is taken as it is.
pub(super) fn recognise(options: &mut Options, former: Option<&Kept>) {
    // A process of a former version left no more than its state.
    let is_continued = former.is_none() && options.state.as_ref().is_some_and(|state| state.exists());
    for disk in &mut options.disks {
        disk.is_known = is_continued || former.is_some_and(|former| former.images.contains(&disk.image));
        disk.is_raw |= disk.is_known;
    }
}

/// Returns the arguments of the VM process `name` without those of a former unit, which took them from a file (`former` is its
/// variable) that has become the VM's file since. A process that was upgraded in place still has them.
pub fn without_former(words: &[OsString], name: &str, folder: &Path, former: Option<&OsStr>) -> Vec<OsString> {
    let Some(former) = former.and_then(OsStr::to_str) else { return words.to_vec() };
    // `--name NAME`, behind `--check-handover` if this is asked.
    let own = 2 + usize::from(words.first().is_some_and(|word| word == "--check-handover"));
    let former: Vec<_> = env_file::words(former).into_iter().map(OsString::from).collect();
    let are_former = words.get(own..) == Some(&former[..]) && vm_path(folder, name).exists();
    words[..if are_former { own } else { words.len() }].to_vec()
}

/// Refuses to take over from the process with the same control socket, which runs, if a process with these options would lose
/// its guests, or could not start.
pub(super) fn check_upgrade(options: &Options, words: Words<'_>) -> Result<()> {
    let running = match runtime::ask(&options.control, Command::Status) {
        // No process would lose anything.
        Err(error) if runtime::is_absent(&error) => return Ok(()),
        running => running.context("cannot ask the running process which disks it has")?,
    };
    let disks: Vec<_> = running.disks.iter().map(|disk| (&*disk.name, &*disk.image)).collect();
    let kept = Kept::read(&Kept::beside(&options.control));
    let former = kept.and_then(|kept| options_of(&kept.files, words.beside(&kept.files), &options.control).ok());
    let former = former.as_ref().unwrap_or(options);
    refuse_addresses_of_others(options, Some(former))?;
    start::check_upgrade(options, former, &disks)
}
