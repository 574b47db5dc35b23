//! Small files that one process leaves for the next. Such a file is complete or does not exist, belongs to
//! this user only, and is never a link.

use rustix::fs::{Mode, OFlags};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Reads the file at `path`.
///
/// # Errors
/// If there is no regular file of this user at `path`; or it cannot be read, has more than `most` bytes, or is not valid UTF-8.
pub fn read(path: &Path, most: u64) -> io::Result<String> {
    String::from_utf8(read_bytes(path, most)?).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// Reads the file at `path`, whatever its bytes are.
///
/// # Errors
/// If there is no regular file of this user at `path`; or it cannot be read, or has more than `most` bytes (`FileTooLarge`).
pub fn read_bytes(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("it has more than {most} bytes")));
    }
    Ok(bytes)
}

/// Returns whether there is a regular file of this user at `path`.
#[must_use]
pub fn is_there(path: &Path) -> bool {
    open(path).is_ok()
}

fn open(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file"));
    }
    if metadata.uid() != rustix::process::geteuid().as_raw() {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "it belongs to another user"));
    }
    Ok(file)
}

/// Writes a file with this text, or these bytes, at `path`. Replaces an existing file atomically.
///
/// # Errors
/// If the system refuses. An existing file is unchanged then.
pub fn write(path: &Path, text: impl AsRef<[u8]>) -> io::Result<()> {
    replace(path, text.as_ref(), |_| Ok(()))
}

/// Writes a file as [`write`] does, and returns when it is on the disk.
///
/// # Errors
/// As [`write`]. If only the folder cannot be synchronised, the new file is in place.
pub fn write_durably(path: &Path, text: impl AsRef<[u8]>) -> io::Result<()> {
    replace(path, text.as_ref(), File::sync_all)?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder)?.sync_all()
}

fn replace(path: &Path, text: &[u8], finish: impl Fn(&File) -> io::Result<()>) -> io::Result<()> {
    let new = with_ending(path, ".new");
    // A killed process may have left such a file.
    let _ = std::fs::remove_file(&new);
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut file = File::from(rustix::fs::open(&new, flags, Mode::RUSR | Mode::WUSR)?);
    let written = file.write_all(text).and_then(|()| finish(&file));
    drop(file);
    let placed = written.and_then(|()| std::fs::rename(&new, path));
    if placed.is_err() {
        // It would take room where there is none.
        let _ = std::fs::remove_file(&new);
    }
    placed
}

/// Returns `path` with `ending` appended.
#[must_use]
pub fn with_ending(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn what_cannot_be_put_in_place_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::create_dir(&path).unwrap();
        assert!(write(&path, "text").is_err(), "a folder is in its place");
        let left = std::fs::read_dir(folder.path()).unwrap().count();
        assert_eq!(left, 1);
    }

    #[test]
    fn a_file_is_for_this_user_alone_and_never_a_link() {
        let folder = tempfile::tempdir().unwrap();
        let [path, other] = ["file", "other"].map(|name| folder.path().join(name));
        std::fs::write(&other, "of somebody else").unwrap();
        symlink(&other, &path).unwrap();
        assert!(read(&path, 100).is_err());
        symlink(&other, with_ending(&path, ".new")).unwrap();
        write(&path, "what is left").unwrap();
        assert_eq!(read(&path, 12).unwrap(), "what is left");
        assert_eq!(
            read(&path, 11).unwrap_err().kind(),
            io::ErrorKind::FileTooLarge,
            "a part of it says something else"
        );
        write_durably(&path, "this is new").unwrap();
        assert!(is_there(&path) && read(&path, u64::MAX).unwrap() == "this is new");
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(std::fs::read(&other).unwrap(), b"of somebody else");
        assert!(!is_there(folder.path()));
        assert_eq!(read(folder.path(), 100).unwrap_err().to_string(), "it is no regular file");
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&path, Some(65_534), None).unwrap();
            assert!(!is_there(&path));
            assert_eq!(read(&path, 100).unwrap_err().to_string(), "it belongs to another user");
        }
    }
}
