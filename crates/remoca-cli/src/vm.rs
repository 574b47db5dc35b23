//! One VM as an operator names it: its process if it runs, else what it would start with.

use crate::config::show;
use crate::settings::kept::Kept;
use crate::settings::{Files, Unusable, vm_path};
use crate::upgrade::{PORT, guests};
use crate::{disk, look, runtime};
use anyhow::{Error, Result, anyhow, bail};
use remoca_disk::start::{self, Address, DiskOptions, Options, PortOptions};
use remoca_io::address::Endpoint;
use remoca_protocol::control::{Command, Status};
use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A VM that has a process, or a file in the configuration.
pub struct Vm {
    pub options: Options,
    /// Status of its process; `None` if none answers.
    pub running: Option<Status>,
    pub files: FilesState,
}

/// How the files of a VM relate to the options that it has, or would have.
pub enum FilesState {
    /// There are none.
    None,
    InEffect,
    /// Changes that the process has not taken up yet, and why an upgrade would not take them up, if that is known.
    Pending {
        changes: Vec<String>,
        refusal: Option<Error>,
    },
    /// Why they cannot be used. The options are those of the last good copy.
    Unusable(String),
}

impl Vm {
    /// Finds the VM `name`, which may also be the path of a control socket.
    ///
    /// # Errors
    /// If there is neither a process nor a file of that name, or the file has a mistake and there is no good copy.
    pub fn find(name: &str, folder: &Path) -> Result<Self> {
        let socket = runtime::socket_named(name)?;
        let running = runtime::ask(&socket, Command::Status);
        let own_name = running.as_ref().map_or(name, |status| &status.name).to_owned();
        if own_name.contains('/') {
            return Err(running.err().unwrap_or_else(|| anyhow::anyhow!("there is no VM `{name}`")));
        }
        let files = Files::read(folder, Some(&own_name));
        let is_configured = files.as_ref().map_or(true, |files| files.vm.is_some());
        let running = match running {
            Ok(status) => Some(status),
            // A process that does not answer for another reason is there.
            Err(error) if is_configured && runtime::is_absent(&error) => None,
            Err(error) if is_configured => return Err(error),
            Err(error) => {
                bail!("{error:#}. It is not configured either: there is no {}", vm_path(folder, name).display())
            }
        };
        Self::with_files(running, &own_name, &socket, folder, files)
    }

    /// Returns the VM `name` as it would start, whose process has the control socket `socket` and is not asked. Returns `None` if it is not
    /// configured.
    ///
    /// # Errors
    /// If its files have a mistake and there is no good copy.
    pub fn of_files(name: &str, socket: &Path, folder: &Path) -> Result<Option<Self>> {
        let files = Files::read(folder, Some(name));
        let is_configured = files.as_ref().map_or(true, |files| files.vm.is_some());
        is_configured.then(|| Self::with_files(None, name, socket, folder, files)).transpose()
    }

    /// Returns the VM whose process has the control socket `socket` and this status.
    ///
    /// # Errors
    /// If its files have a mistake and there is no good copy.
    pub fn of_running(status: Status, socket: &Path, folder: &Path) -> Result<Self> {
        let name = status.name.clone();
        let files = Files::read(folder, Some(&name));
        Self::with_files(Some(status), &name, socket, folder, files)
    }

    fn with_files(
        running: Option<Status>,
        name: &str,
        socket: &Path,
        folder: &Path,
        files: Result<Files, Unusable>,
    ) -> Result<Self> {
        let words = match &running {
            Some(status) => show::words_of(status, name, folder),
            None => vec![OsString::from("--name"), OsString::from(name)],
        };
        let kept = Kept::read(&Kept::beside(socket));
        let at = running.as_ref().and_then(|status| std::fs::read_link(format!("/proc/{}/cwd", status.pid)).ok());
        let options = |files: &Files| -> Result<Options> {
            let mut options = disk::options_of(files, &words, socket)?;
            at.iter().for_each(|at| make_absolute(&mut options, at));
            Ok(options)
        };
        let refusal = |options, former| {
            let mut status = running.clone().filter(|_| is_own(socket))?;
            for disk in &mut status.disks {
                let mut spec = DiskOptions::new(disk.image.clone());
                at.iter().for_each(|at| spec.make_absolute(at));
                disk.image = spec.image;
            }
            refusal(options, former, status, vm_path(folder, name))
        };
        let (options, files) = effective(files, kept, running.is_some(), &words, options, refusal)?;
        Ok(Self { options, running, files })
    }

    /// Returns each disk with its name.
    pub fn disks(&self) -> impl Iterator<Item = (String, &DiskOptions)> {
        let default = |number| DiskOptions::default_name(number);
        (0..)
            .zip(&self.options.disks)
            .map(move |(number, disk)| (disk.name.clone().unwrap_or_else(|| default(number)), disk))
    }
}

/// Returns the options of a process with these words on its command line: those that a running one started with, else those that its
/// files give, or their last good copy. `refusal` returns why a running one would refuse an upgrade to other options, from those that it
/// has.
fn effective(
    files: Result<Files, Unusable>,
    kept: Option<Kept>,
    is_running: bool,
    words: &[OsString],
    options: impl Fn(&Files) -> Result<Options>,
    refusal: impl Fn(Options, Options) -> Option<Error>,
) -> Result<(Options, FilesState)> {
    let now = files.map_err(Error::from).and_then(|files| Ok((options(&files)?, files)));
    match (now, kept) {
        (Ok((now, files)), Some(kept)) if is_running && (files != Files::default() || kept.files != files) => {
            let changes = Kept { files, ..Kept::default() }.since(&kept, disk::schema, words);
            let state = match changes.is_empty() {
                true => FilesState::InEffect,
                false => FilesState::Pending { changes, refusal: refusal(now, options(&kept.files)?) },
            };
            Ok((options(&kept.files)?, state))
        }
        (Ok((options, files)), _) if files == Files::default() => Ok((options, FilesState::None)),
        (Ok((options, _)), _) => Ok((options, FilesState::InEffect)),
        (Err(error), Some(kept)) => Ok((options(&kept.files)?, FilesState::Unusable(format!("{error:#}")))),
        (Err(error), None) => Err(error),
    }
}

/// Returns whether the process at this control socket is one of this user. That of another one may be allowed less, so nothing is opened
/// in its stead.
fn is_own(socket: &Path) -> bool {
    socket.metadata().is_ok_and(|socket| socket.uid() == rustix::process::geteuid().as_raw())
}

/// Returns why the `running` process, which has the options `former`, would refuse an upgrade to these options, or `None` if it would not.
/// `file` is the path of the VM's file.
fn refusal(options: Options, former: Options, running: Status, file: PathBuf) -> Option<Error> {
    let asked = look::begin(move || {
        disk::check_file(&options, Some(&file))?;
        check_reload(&options, &former, &running)
    });
    let ((), found) = look::end(vec![((), asked)]).next()?;
    let hangs = || Err(anyhow!("the image of a new disk does not answer"));
    found.unwrap_or_else(hangs).err()
}

/// Checks that a running process, which was started with the options `former`, would take up these options under its guests, as an
/// upgrade to this program finds it out. Touches nothing: an image in use, a TCP address or a server is left to the upgrade.
///
/// # Errors
/// If it would refuse them; the text says why.
fn check_reload(options: &Options, former: &Options, running: &Status) -> Result<()> {
    let disks: Vec<_> = running.disks.iter().map(|disk| (&*disk.name, &*disk.image)).collect();
    disk::refuse_addresses_of_others(options, Some(former))?;
    start::foresee_upgrade(options, former, &disks)?;
    let guests = guests(running);
    let is_used = |device: &str| guests.iter().any(|(name, count)| name == device && *count > 0);
    let (offered, mut promised) = (start::offers(options), start::offers(former));
    promised.disks.retain(|name, _| is_used(name));
    promised.port = promised.port.filter(|_| is_used(PORT));
    let gone = promised.disks.keys().map(String::as_str).find(|name| !offered.disks.contains_key(*name));
    if let Some(name) = gone.or_else(|| (promised.port.is_some() && offered.port.is_none()).then_some(PORT)) {
        bail!("it would not have {name}, to which a guest is attached");
    }
    offered.check_beside(&promised).map_err(Error::msg)
}

/// Makes paths absolute which the process, whose folder is `folder`, was given as relative ones.
fn make_absolute(options: &mut Options, folder: &Path) {
    let join = |path: &mut PathBuf| *path = folder.join(&*path);
    options.disks.iter_mut().for_each(|disk| disk.make_absolute(folder));
    options.state.iter_mut().for_each(join);
    if let PortOptions::Socket(path) = &mut options.port {
        join(path);
    }
    for address in &mut options.nbd {
        if let Address::Endpoint(Endpoint::Unix(path)) = address {
            join(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::file::Text;

    fn files(text: &str) -> Files {
        Files { vm: Some(Text { path: "V".into(), text: format!("version = 1\n{text}") }), host: None }
    }

    fn cache(files: Files, kept: Option<&str>, is_running: bool) -> Result<(u64, String)> {
        cache_by(&[], files, kept, is_running)
    }

    fn cache_by(words: &[&str], files: Files, kept: Option<&str>, is_running: bool) -> Result<(u64, String)> {
        let words: Vec<_> = words.iter().map(OsString::from).collect();
        let kept = kept.map(|text| Kept { files: self::files(text), ..Kept::default() });
        let options = |files: &Files| disk::options_of(files, &words, Path::new("/c"));
        let (options, state) = effective(Ok(files), kept, is_running, &words, options, |_, _| None)?;
        let state = match state {
            FilesState::None => "none".into(),
            FilesState::InEffect => "in effect".into(),
            FilesState::Pending { changes, .. } => changes.join("; "),
            FilesState::Unusable(error) => error,
        };
        Ok((options.cache >> 20, state))
    }

    #[test]
    fn a_process_has_what_it_started_with_and_its_successor_the_last_good_copy() {
        let said = |files, kept, is_running| cache(files, kept, is_running).unwrap();
        for is_running in [false, true] {
            assert_eq!(said(Files::default(), None, is_running), (1024, "none".into()));
            let options = |files: &Files| disk::options_of(files, &[], Path::new("/c"));
            let by_flags =
                effective(Ok(Files::default()), Some(Kept::default()), is_running, &[], options, |_, _| None);
            assert!(matches!(by_flags, Ok((_, FilesState::None))));
            assert_eq!(said(files("cache = '2M'"), None, is_running), (2, "in effect".into()));
            let (size, error) = said(files("cahce = '2M'"), Some("cache = '3M'"), is_running);
            assert!(size == 3 && error.contains("V:2: unknown key"), "{error}");
            assert!(cache(files("cahce = '2M'"), None, is_running).is_err());
        }
        assert_eq!(said(files("cache = '2M'"), Some("cache = '3M'"), false), (2, "in effect".into()));
        assert_eq!(said(files("cache = '2M'"), Some("cache = '3M'"), true), (3, "cache: 3M -> 2M (V:2)".into()));
        assert_eq!(said(files("cache = '3M'"), Some("cache = '3M'"), true), (3, "in effect".into()));
    }

    /// What a flag displaces does not come into effect by an upgrade either.
    #[test]
    fn what_a_flag_displaces_is_no_change() {
        let disk = "[[disk]]\nname = 'a'\nimage = '/a'\nformat = 'raw'\n";
        let now = || files(&format!("cache = '2M'\nport = '/p'\n{disk}"));
        let said = |words: &[&str]| cache_by(words, now(), Some("cache = '3M'"), true).unwrap().1;
        assert_eq!(said(&[]), "cache: 3M -> 2M (V:2); port: /p (V:3); disk a: new (V:4)");
        assert_eq!(said(&["--cache", "5M"]), "port: /p (V:3); disk a: new (V:4)");
        assert_eq!(said(&["--image", "/b", "--cache=5M", "--nbd-port", "--nbd", "systemd"]), "in effect");
    }
}
