//! The request that all guests get their memory back: a file of this user beside the control sockets, which is never a link. It outlives
//! whoever carries it out, and is removed when that is done.

use remoca_io::small_file;
use std::io;
use std::path::Path;

/// Makes the request at `path`.
///
/// # Errors
/// If the system refuses.
pub fn make(path: &Path) -> io::Result<()> {
    small_file::write(path, "")
}

/// Returns whether there is a request at `path`. What is a link, a folder or of another user is none.
#[must_use]
pub fn is_there(path: &Path) -> bool {
    small_file::is_there(path)
}

/// Removes the request at `path`, if there is one.
///
/// # Errors
/// If the system refuses.
pub fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_request_is_a_file_and_never_a_link() {
        let folder = tempfile::tempdir().unwrap();
        let [path, other] = ["request", "other"].map(|name| folder.path().join(name));
        assert!(!is_there(&path));
        std::fs::write(&other, "of somebody").unwrap();
        symlink(&other, &path).unwrap();
        assert!(!is_there(&path), "a link");
        make(&path).unwrap();
        assert!(is_there(&path));
        assert_eq!(std::fs::read(&other).unwrap(), b"of somebody");
        remove(&path).unwrap();
        assert!(!is_there(&path) && remove(&path).is_ok());
        std::fs::create_dir(&path).unwrap();
        assert!(!is_there(&path) && make(&path).is_err() && remove(&path).is_err(), "a folder");
    }
}
