//! The mark that a process leaves beside its control socket if it ends in good order while a guest is attached. The socket is gone then,
//! and the guest hangs: by the mark, those who look for control sockets still find the VM.

use crate::small_file::{self, with_ending};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// What became of a process that left a mark.
pub const WORDS: &str = "it was told to end while a guest was attached";
const EXTENSION: &str = "left";

/// Returns the path of the mark beside this control socket. No two sockets have the same.
#[must_use]
pub fn beside(control: &Path) -> PathBuf {
    with_ending(control, &format!(".{EXTENSION}"))
}

/// Returns the control socket beside which `path` is the mark, or `None` if that is no mark.
#[must_use]
pub fn control_of(path: &Path) -> Option<PathBuf> {
    path.extension().is_some_and(|extension| extension == EXTENSION).then(|| path.with_extension(""))
}

/// Returns the path of what the process with this control socket keeps of its configuration. No two sockets have the same.
#[must_use]
pub fn config_beside(control: &Path) -> PathBuf {
    match control.extension() {
        Some(extension) if extension == "ctl" => control.with_extension("config"),
        _ => with_ending(control, ".config"),
    }
}

/// Returns whether the process with this control socket left a mark, and none has served since. One whose program knows no marks leaves
/// it there, but has written its configuration anew.
#[must_use]
pub fn is_there(control: &Path) -> bool {
    let left = time_of(&beside(control));
    left.is_some_and(|left| time_of(&config_beside(control)).is_none_or(|started| started <= left))
}

/// Leaves the mark.
///
/// # Errors
/// If the system refuses.
pub fn leave(control: &Path) -> io::Result<()> {
    let mark = beside(control);
    small_file::write(&mark, "")?;
    // The clock may have been set back since this process started.
    if let Some(started) = time_of(&config_beside(control)) {
        let _ = File::options().write(true).open(mark).and_then(|mark| mark.set_modified(started));
    }
    Ok(())
}

fn time_of(path: &Path) -> Option<SystemTime> {
    path.symlink_metadata().ok()?.modified().ok()
}

/// Removes the mark, if there is one.
pub fn remove(control: &Path) {
    let _ = std::fs::remove_file(beside(control));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    use std::time::Duration;

    #[test]
    fn a_mark_is_found_from_its_socket_and_the_socket_from_its_mark() {
        let folder = tempfile::tempdir().unwrap();
        for name in [&b"web1.ctl"[..], b"web 1.left.ctl", b"\xff.ctl", b"plain"] {
            let control = folder.path().join(OsStr::from_bytes(name));
            assert!(!is_there(&control));
            leave(&control).unwrap();
            assert!(is_there(&control));
            assert_eq!(control_of(&beside(&control)), Some(control.clone()));
            assert_eq!(control_of(&control), None);
            remove(&control);
            assert!(!is_there(&control));
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_process_that_knows_no_marks_makes_one_void_by_its_start() {
        let folder = tempfile::tempdir().unwrap();
        let control = folder.path().join("web1.ctl");
        let start_at = |seconds| {
            let config = File::create(config_beside(&control)).unwrap();
            config.set_modified(SystemTime::now() + Duration::from_secs(seconds)).unwrap();
        };
        // The clock was set back while it ran.
        start_at(60);
        leave(&control).unwrap();
        assert!(is_there(&control));
        start_at(120);
        assert!(!is_there(&control));
    }

    #[test]
    fn each_control_socket_has_its_own_configuration() {
        let beside = |control: &str| config_beside(control.as_ref()).display().to_string();
        assert_eq!(beside("/run/remoca/web1.ctl"), "/run/remoca/web1.config");
        assert_eq!([beside("/run/vm.1"), beside("/run/vm.2")], ["/run/vm.1.config", "/run/vm.2.config"]);
    }
}
