//! The mark that a process leaves beside its control socket if it ends in good order while a guest is attached. The socket is gone then,
//! and the guest hangs: by the mark, those who look for control sockets still find the VM.

use crate::small_file::{self, with_ending};
use std::io;
use std::path::{Path, PathBuf};

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

/// Returns whether the process with this control socket left a mark, and none has served since.
#[must_use]
pub fn is_there(control: &Path) -> bool {
    beside(control).symlink_metadata().is_ok()
}

/// Leaves the mark.
///
/// # Errors
/// If the system refuses.
pub fn leave(control: &Path) -> io::Result<()> {
    small_file::write(&beside(control), "")
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
}
