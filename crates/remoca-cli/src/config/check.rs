//! `remoca config check`: every problem of every file.

use crate::output::output;
use crate::settings::file::{DiskEntry, HOST, MEMORY, Place, Problem, SERVE, Settings, Text, VMS};
use crate::settings::{Files, host_path, vm_path};
use crate::{disk, host, look, memory, serve};
use anyhow::{Context, Result, bail};
use remoca_disk::start::{check_options, check_state};
use remoca_store::format;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Checks the files of the VMs `names`, or of all VMs, and the host's file.
///
/// # Errors
/// If there is a problem; all of them have been written to standard output.
pub fn run(names: &[String], folder: &Path) -> Result<()> {
    if !folder.is_dir() {
        bail!("there is no folder {}, so nothing is configured, or --config names another one", folder.display());
    }
    let all = vms(folder)?;
    if let Some(name) = names.iter().find(|name| !all.contains(name)) {
        bail!("there is no {}: the VM `{name}` is not configured", vm_path(folder, name).display());
    }
    let Looked { problems, disks, count } = look(names, &all, folder, &of_host);
    let mut out = output();
    problems.iter().try_for_each(|problem| writeln!(out, "{problem}"))?;
    // No mistake: a guest may have written this.
    let is_looked_at = |disk: &&DiskEntry| !disk.options.is_qcow2 && is_meant(names, folder, &disk.place.path);
    let begin = |disk: &DiskEntry| {
        let image = PathBuf::from(&disk.options.image);
        look::begin(move || format::of(&image))
    };
    let begun = disks.iter().filter(is_looked_at).map(|disk| (disk, begin(disk))).collect();
    for (disk, found) in look::end(begun) {
        if let Some(Ok(Some(name))) = found {
            let (place, image) = (&disk.place, &disk.options.image);
            writeln!(out, "{place}: note: {image} looks like a {name} image, and its guest sees these very bytes")?;
        }
    }
    match problems.len() {
        0 => Ok(writeln!(out, "{}: no mistakes, files: {count}", folder.display())?),
        1 => bail!("1 mistake"),
        count => bail!("{count} mistakes"),
    }
}

/// Returns all mistakes in the files of the folder.
///
/// # Errors
/// If the folder cannot be read.
pub fn mistakes(folder: &Path) -> Result<Vec<Problem>> {
    Ok(look(&[], &vms(folder)?, folder, &of_host).problems)
}

/// Returns the mistakes in the file of the VM `name`, and in what the host's file says to all VMs.
///
/// # Errors
/// If the folder cannot be read.
pub fn mistakes_of(name: &str, folder: &Path) -> Result<Vec<Problem>> {
    let of_vms = |text: &Text| {
        let (_, mut problems) = text.host(VMS, &disk::schema());
        add_new(&mut problems, text.host(MEMORY, &memory::schema()).1);
        problems
    };
    Ok(look(&[name.to_owned()], &vms(folder)?, folder, &of_vms).problems)
}

/// What is in the files.
struct Looked {
    problems: Vec<Problem>,
    /// Disks of all VMs.
    disks: Vec<DiskEntry>,
    /// Number of files that were checked.
    count: usize,
}

/// Returns whether a file is that of one of the VMs `names`, or there are no names.
fn is_meant(names: &[String], folder: &Path, path: &Path) -> bool {
    names.is_empty() || names.iter().any(|name| vm_path(folder, name) == path)
}

/// Checks the files of the VMs `names`, or of `all` VMs, and the host's file by `of_host`.
fn look(names: &[String], all: &[String], folder: &Path, of_host: &dyn Fn(&Text) -> Vec<Problem>) -> Looked {
    let (mut problems, mut disks, mut count) = (Vec::new(), Vec::new(), 0);
    let host = read(&host_path(folder), &mut problems);
    if let Some(text) = &host {
        count += 1;
        problems.extend(of_host(text));
    }
    for name in all {
        let Some(text) = read(&vm_path(folder, name), &mut problems) else { continue };
        let (settings, mut of_vm) = text.vm(&disk::schema().of_vm());
        add_new(&mut of_vm, text.vm_table(MEMORY, &memory::schema()).1);
        disks.extend(settings.disks.into_iter().flatten());
        if is_meant(names, folder, &text.path) {
            count += 1;
            if of_vm.is_empty()
                && let Err(error) = combined(name, &text, host.as_ref())
            {
                problems.push(Problem { place: Place { path: text.path, line: 1 }, text: format!("{error:#}") });
            }
            problems.extend(of_vm);
        }
    }
    problems.extend(shared(&disks).into_iter().filter(|problem| is_meant(names, folder, &problem.place.path)));
    Looked { problems, disks, count }
}

/// Returns the names of all VMs that have a file.
pub fn vms(folder: &Path) -> Result<Vec<String>> {
    let folder = folder.join("vms");
    let entries = match std::fs::read_dir(&folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.with_context(|| format!("cannot read {}", folder.display()))?,
    };
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let files = paths.filter(|path| path.extension().is_some_and(|extension| extension == "toml"));
    let mut names: Vec<_> = files.filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned())).collect();
    names.sort();
    Ok(names)
}

fn read(path: &Path, problems: &mut Vec<Problem>) -> Option<Text> {
    Text::read(path).unwrap_or_else(|problem| {
        problems.push(problem);
        None
    })
}

/// Checks what the files of the VM `name` say together. Each of them is right.
fn combined(name: &str, vm: &Text, host: Option<&Text>) -> Result<()> {
    let files = Files { vm: Some(vm.clone()), host: host.cloned() };
    if memory::tables(&files).1.is_empty() {
        memory::limits(&files)?;
    }
    // Mistakes of the host's file are reported as such.
    let Ok([settings, _]) = files.settings_of_vm(disk::schema) else { return Ok(()) };
    // Flags say which disks there are.
    if settings.disks.is_none() {
        return Ok(());
    }
    let words = ["--name", name].map(OsString::from);
    let options = disk::options_of(&files, &words, &Path::new(name).with_extension("ctl"))?;
    if options.incoming.as_ref().is_some_and(|incoming| incoming.key.is_none()) {
        bail!("`incoming` without `incoming-key`: `remoca migrate --new-key FILE` makes a key");
    }
    check_options(&options)?;
    // The default place depends on who starts the process.
    if settings.entries.contains_key("state") { check_state(&options) } else { Ok(()) }
}

/// Returns the problems of the host's file, each once.
fn of_host(text: &Text) -> Vec<Problem> {
    let (_, mut problems) = text.host(VMS, &disk::schema());
    for (table, schema) in [(SERVE, serve::schema()), (HOST, host::schema()), (MEMORY, memory::schema())] {
        add_new(&mut problems, text.host(table, &schema).1);
    }
    type Check = fn(&Settings) -> Result<()>;
    for (table, schema, check) in [(SERVE, serve::schema(), serve::check as Check), (HOST, host::schema(), host::check)]
    {
        let (settings, wrong) = text.host(table, &schema);
        let Some(line) = settings.entries.values().map(|entry| entry.place.line).min() else { continue };
        if wrong.is_empty()
            && let Err(error) = check(&settings)
        {
            let place = Place { path: text.path.clone(), line };
            problems.push(Problem { place, text: format!("[{table}]: {error:#}") });
        }
    }
    problems
}

/// Adds the problems that are not there yet.
fn add_new(problems: &mut Vec<Problem>, more: Vec<Problem>) {
    for problem in more {
        if !problems.contains(&problem) {
            problems.push(problem);
        }
    }
}

/// Returns a problem for each image or socket that two disks have.
fn shared(disks: &[DiskEntry]) -> Vec<Problem> {
    let mut first: BTreeMap<PathBuf, &DiskEntry> = BTreeMap::new();
    let mut problems = Vec::new();
    for disk in disks {
        let image = (!disk.options.read_only).then(|| PathBuf::from(&disk.options.image));
        for path in image.into_iter().chain(disk.options.socket.clone()).filter(|path| !path.as_os_str().is_empty()) {
            match first.get(&path) {
                Some(other) => {
                    let text = format!("{} is also used by the disk at {}", path.display(), other.place);
                    problems.push(Problem { place: disk.place.clone(), text });
                }
                None => {
                    first.insert(path, disk);
                }
            }
        }
    }
    problems
}
