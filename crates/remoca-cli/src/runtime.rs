//! Finds running VM processes by their control sockets, and sends them commands.

use anyhow::{Context, Result, bail};
use remoca_io::control::{self, left};
use remoca_protocol::control::{Command, Reply, Status};
use std::cell::RefCell;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

const SUFFIX: &str = "ctl";
/// Directory of root's control sockets. The unit makes it.
pub const OF_ROOT: &str = "/run/remoca";

/// Returns the directory of control sockets: `/run/remoca` for root, else below `$XDG_RUNTIME_DIR`. Returns `None` for a user without
/// one.
pub fn directory() -> Option<PathBuf> {
    match rustix::process::geteuid().is_root() {
        true => Some(OF_ROOT.into()),
        false => of_user(std::env::var_os("XDG_RUNTIME_DIR")),
    }
}

/// Returns the directory of control sockets.
///
/// # Errors
/// If there is none; the text says what the user may do `instead` of setting the variable.
pub fn directory_or(instead: &str) -> Result<PathBuf> {
    let lacking = "$XDG_RUNTIME_DIR is not set to a folder, so there is no directory for the control socket";
    directory().with_context(|| format!("{lacking}: set it, or {instead}"))
}

/// Returns the directory below `$XDG_RUNTIME_DIR`. A value that is empty or relative counts as none: the folder from which a command is
/// started must not decide where processes are looked for.
fn of_user(runtime: Option<OsString>) -> Option<PathBuf> {
    runtime.map(PathBuf::from).filter(|runtime| runtime.is_absolute()).map(|runtime| runtime.join("remoca"))
}

/// Returns the control socket of the VM process `name`. A user without a directory is told what to do `instead`.
///
/// # Errors
/// As [`directory_or`].
pub fn socket_of(name: &str, instead: &str) -> Result<PathBuf> {
    Ok(socket_in(&directory_or(instead)?, name))
}

/// Returns the path of the control socket of the VM `name` in this directory.
pub fn socket_in(directory: &Path, name: &str) -> PathBuf {
    directory.join(format!("{name}.{SUFFIX}"))
}

/// Returns the control socket that `name` denotes: the path itself if it contains `/`, else the socket of the VM with
/// that name.
///
/// # Errors
/// As [`directory_or`].
pub fn socket_named(name: &str) -> Result<PathBuf> {
    match name.contains('/') {
        true => Ok(name.into()),
        false => socket_of(name, "give the path of the control socket in place of the name"),
    }
}

/// Returns the control socket that `name` denotes, or without a name all control sockets of the directory.
///
/// # Errors
/// If there is no directory for control sockets, or it has to be read and cannot be.
pub fn sockets(name: Option<&str>) -> Result<Vec<PathBuf>> {
    match name {
        Some(name) => Ok(vec![socket_named(name)?]),
        // A user without a directory has no processes, but may look for those of others.
        None => directory().map_or(Ok(Vec::new()), |directory| all_in(&directory)),
    }
}

fn all_in(directory: &Path) -> Result<Vec<PathBuf>> {
    let unknown = || format!("{} cannot be read, so what runs there is not known", directory.display());
    read_sockets(directory).with_context(unknown)
}

/// Control sockets of a directory that is read again and again.
#[derive(Default)]
pub struct KnownSockets(RefCell<Vec<PathBuf>>);

impl KnownSockets {
    /// Returns the control sockets in `directory`, or if that cannot be read those that were there before: VMs that nobody can ask any
    /// longer are silent, and not gone.
    pub fn read(&self, directory: &Path) -> Vec<PathBuf> {
        if let Ok(found) = read_sockets(directory) {
            self.0.replace(found);
        }
        self.0.borrow().clone()
    }
}

/// Returns the control sockets in `directory`, in the order of their names, with those of processes that ended under their guests: these
/// have left marks in their place. A directory that is not there has none.
///
/// # Errors
/// If it cannot be read.
pub fn read_sockets(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match std::fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let socket = |path: PathBuf| match left::control_of(&path) {
        Some(control) => left::is_there(&control).then_some(control),
        None => Some(path),
    };
    let found = entries.map(|entry| Ok(socket(entry?.path()))).collect::<io::Result<Vec<_>>>()?;
    let mut found: Vec<_> = found.into_iter().flatten().collect();
    found.retain(|path| path.extension().is_some_and(|extension| extension == SUFFIX));
    found.sort();
    // A process that has just started, or is about to end, has both.
    found.dedup();
    Ok(found)
}

/// Sends a command to the VM process behind `socket`, and returns the status that the process reports afterwards.
///
/// # Errors
/// If the process does not answer, or refuses the command.
pub fn ask(socket: &Path, command: Command) -> Result<Status> {
    let only_asks = matches!(command, Command::Status);
    let reply = control::call(socket, command).map_err(|error| match only_asks {
        true => no_answer(socket, error),
        false => no_vm_process(socket, error),
    })?;
    match reply {
        Reply::Status(status) => Ok(*status),
        Reply::Curve(_) => bail!("the process answers with something else than its status"),
        Reply::Error { error } => bail!("{error}"),
    }
}

/// Returns whether an error says that no process listens at the socket. A killed process leaves its socket behind.
pub fn is_absent(error: &anyhow::Error) -> bool {
    let kind = error.downcast_ref::<io::Error>().map(io::Error::kind);
    matches!(kind, Some(io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused))
}

/// Returns the error of a VM process that cannot be reached with a command that changes something, with what the operator can do.
pub fn no_vm_process(socket: &Path, error: io::Error) -> anyhow::Error {
    if error.kind() == io::ErrorKind::TimedOut {
        let shown = socket.display();
        // The process has the command, and carries it out when it can.
        return anyhow::Error::new(error).context(format!(
            "no VM process answers at {shown} in time. It may still do what it was told: see `remoca status {shown}` later"
        ));
    }
    no_answer(socket, error)
}

/// Returns the error of a VM process that cannot be reached with a question, with what the operator can do.
pub fn no_answer(socket: &Path, error: io::Error) -> anyhow::Error {
    if error.kind() == io::ErrorKind::InvalidData {
        let shown = socket.display();
        return anyhow::Error::new(error).context(format!(
            "the answer of the VM process at {shown} makes no sense. Is it of another version? Ask with the program of that version, or \
             restart it"
        ));
    }
    explain_unreachable(socket, error, "no VM process answers", "is `remoca disk` running with this name?")
}

/// Returns the error of a socket that cannot be reached, with what the operator can do: `what` happened, and what to ask
/// if nobody forbids it.
pub fn explain_unreachable(socket: &Path, error: io::Error, what: &str, hint: &str) -> anyhow::Error {
    let shown = socket.display();
    let text = match error.kind() {
        io::ErrorKind::PermissionDenied => {
            let owner = std::fs::metadata(socket).map(|file| user_name(file.uid()));
            let owner = owner.unwrap_or_else(|_| "the owner of its directory".into());
            let (owners, remedy) = match owner.as_str() {
                "root" => ("root".to_owned(), "with sudo"),
                owner => (format!("{owner} and root"), "as that user, or with sudo"),
            };
            format!("{shown} is not open to you: only {owners} may reach it. Run the command {remedy}")
        }
        io::ErrorKind::NotFound if left::is_there(socket) => format!("{what} at {shown}: {}", left::WORDS),
        io::ErrorKind::NotFound => format!("{what} at {shown}: {hint}{}", elsewhere()),
        // The second is how a read says that its time is over.
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => {
            format!("{what} at {shown} in time: it hangs, or has too much to do")
        }
        _ => format!("{what} at {shown}: {hint}"),
    };
    anyhow::Error::new(error).context(text)
}

/// Returns the VM processes in other directories than that of this user, as a continuation of a message. Returns an empty
/// text if none is seen.
pub fn elsewhere() -> String {
    let own = directory();
    let looked_in = own.iter().map(|own| format!(" (looked in {})", own.display())).collect::<String>();
    looked_in + &of_others("status")
}

/// Returns which VM processes may not be asked by this user, as a continuation of a message, with `remoca COMMAND` as what to say.
/// Returns an empty text if none is seen.
pub fn of_others(command: &str) -> String {
    let own = directory();
    let users = std::fs::read_dir("/run/user").into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    let all = std::iter::once(PathBuf::from(OF_ROOT)).chain(users.map(|user| user.join("remoca")));
    let others = all.filter(|place| Some(place) != own.as_ref()).filter_map(|place| seen_in(&place, command));
    // Directories of other users are closed, whether they have processes or not.
    let closed = own.as_deref().into_iter().chain([Path::new(OF_ROOT)]).filter_map(closed);
    closed.chain(others).collect()
}

/// Returns which VM processes `directory`, which is that of a stranger, has and who may reach them, or `None` if it has none.
fn seen_in(directory: &Path, command: &str) -> Option<String> {
    const SHOWN_MAX: usize = 5;
    let mut sockets = read_sockets(directory).unwrap_or_default();
    sockets.retain(|socket| is_plain(socket));
    // What a link leads to may hang.
    let owner = user_name(std::fs::symlink_metadata(sockets.first()?).ok()?.uid());
    let names: Vec<_> = sockets.iter().filter_map(|path| path.file_stem()?.to_str()).take(SHOWN_MAX).collect();
    let more = if sockets.len() > SHOWN_MAX { ", ..." } else { "" };
    let owners = if owner == "root" { owner } else { owner + " and root" };
    Some(format!(
        ". {} has {}{more}, which {owners} may reach: say `sudo remoca {command} {}`",
        directory.display(),
        names.join(", "),
        sockets.first()?.display()
    ))
}

/// Returns whether the name of a socket says nothing else to a terminal, nor to a shell to which somebody copies it.
fn is_plain(socket: &Path) -> bool {
    let is_plain = |c: char| c.is_alphanumeric() || "._-:+=@".contains(c);
    socket.file_name().and_then(OsStr::to_str).is_some_and(|name| name.chars().all(is_plain))
}

/// Returns that this user may not look into `directory`, or `None` if that is not so.
fn closed(directory: &Path) -> Option<String> {
    let error = std::fs::read_dir(directory).err()?;
    let shown = directory.display();
    (error.kind() == io::ErrorKind::PermissionDenied)
        .then(|| format!(". {shown} is not open to you, so what runs there is not known: run the command with sudo"))
}

/// Returns the name of a user, or the number if it has no name.
fn user_name(uid: u32) -> String {
    let user = nix::unistd::User::from_uid(nix::unistd::Uid::from_raw(uid)).ok().flatten();
    user.map_or_else(|| format!("user {uid}"), |user| user.name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStrExt;

    #[test]
    fn only_a_process_that_was_told_to_change_something_may_still_do_it() {
        let socket = Path::new("/run/remoca/web1.ctl");
        let texts = [no_vm_process, no_answer].map(|text| text(socket, io::ErrorKind::TimedOut.into()).to_string());
        for (text, may_do) in texts.iter().zip([true, false]) {
            assert!(text.contains("web1.ctl in time") && text.contains("may still do") == may_do, "{text}");
        }
    }

    #[test]
    fn no_folder_is_made_where_a_command_is_started() {
        assert_eq!(of_user(Some("/run/user/7".into())), Some("/run/user/7/remoca".into()));
        for none in [None, Some(""), Some("here")] {
            assert_eq!(of_user(none.map(OsString::from)), None);
        }
    }

    /// A script would take the host for an empty one.
    #[test]
    fn a_folder_that_cannot_be_read_is_not_one_without_processes() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("remoca");
        assert!(all_in(&place).unwrap().is_empty(), "nothing was started yet");
        // Nobody reads a file as a folder, not even root.
        std::fs::write(&place, "").unwrap();
        let error = all_in(&place).unwrap_err().to_string();
        assert_eq!(error, format!("{} cannot be read, so what runs there is not known", place.display()));
    }

    #[test]
    fn vms_do_not_vanish_with_a_folder_that_cannot_be_read() {
        let folder = tempfile::tempdir().unwrap();
        let (directory, known) = (folder.path().join("remoca"), KnownSockets::default());
        let sockets = || known.read(&directory);
        assert!(sockets().is_empty());
        std::fs::create_dir(&directory).unwrap();
        let socket = directory.join("web1.ctl");
        std::fs::write(&socket, "").unwrap();
        assert_eq!(sockets(), std::slice::from_ref(&socket));
        // Nobody reads a file as a folder, not even root.
        std::fs::remove_dir_all(&directory).unwrap();
        std::fs::write(&directory, "").unwrap();
        assert_eq!(sockets(), [socket]);
        std::fs::remove_file(&directory).unwrap();
        assert!(sockets().is_empty());
    }

    #[test]
    fn a_vm_whose_process_ended_under_its_guest_is_found_by_its_mark() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &[u8]| folder.path().join(OsStr::from_bytes(name));
        for name in [&b"a.ctl"[..], b"a.ctl.left", b"b c.ctl.left", b"\xff.ctl.left", b"plain.left", b"d.ctl.here"] {
            std::fs::write(path(name), "").unwrap();
        }
        assert_eq!(read_sockets(folder.path()).unwrap(), [path(b"a.ctl"), path(b"b c.ctl"), path(b"\xff.ctl")]);
        let why = |name: &[u8]| no_answer(&path(name), io::ErrorKind::NotFound.into()).to_string();
        assert!(why(b"b c.ctl").ends_with("b c.ctl: it was told to end while a guest was attached"));
        assert!(why(b"plain.ctl").contains("is `remoca disk` running"));
    }

    #[test]
    fn processes_in_another_place_are_named() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(seen_in(folder.path(), "status"), None);
        for name in ["b.ctl", "a.ctl", "a.state"] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        for name in ["\u{1b}[2J.ctl", "\u{9b}2J.ctl", "$(reboot).ctl", "a;reboot.ctl", "a b.ctl"] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        std::fs::write(folder.path().join(OsStr::from_bytes(b"\xff.ctl")), "").unwrap();
        let place = folder.path().display();
        let seen = seen_in(folder.path(), "status").unwrap();
        assert!(seen.starts_with(&format!(". {place} has a, b, which ")), "{seen}");
        assert!(seen.ends_with(&format!("root may reach: say `sudo remoca status {place}/a.ctl`")), "{seen}");
    }
}
