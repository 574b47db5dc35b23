//! Key files: each contains a secret, and only its owner can read it.

use remoca_protocol::control::{SECRET_BYTES, SECRET_TEXT_BYTES, Secret};
use rustix::fs::{Mode, OFlags};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Permission bits that expose a key file: any access by others, and writing by the group.
const TOO_OPEN: u32 = 0o027;

/// Generates a new secret.
///
/// # Errors
/// If the system provides no random numbers.
pub fn generate() -> io::Result<Secret> {
    let mut bytes = [0; SECRET_BYTES];
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())? {
        SECRET_BYTES => Ok(Secret::new(bytes)),
        _ => Err(io::Error::other("the system gives too few random numbers")),
    }
}

/// Writes a secret to a new file that only its owner can read.
///
/// # Errors
/// If the file exists already, or cannot be created, written or synced.
pub fn write_new(secret: &Secret, path: &Path) -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut file = File::from(rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)?);
    file.write_all(format!("{}\n", secret.text()).as_bytes())?;
    file.sync_all()
}

/// Reads a secret from a file. With `is_private`, refuses a file that others can read or change.
///
/// # Errors
/// If the file is not a regular file, cannot be read, does not contain a valid key, or, with `is_private`, is open to
/// others. The text says what to do.
pub fn read(path: &Path, is_private: bool) -> Result<Secret, String> {
    let shown = path.display();
    let open = || -> io::Result<File> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        Ok(File::from(rustix::fs::open(path, flags, Mode::empty())?))
    };
    let cannot = |error: io::Error| format!("cannot read the key {shown}: {error}");
    let file = open().map_err(cannot)?;
    let metadata = file.metadata().map_err(cannot)?;
    if !metadata.is_file() {
        return Err(format!("the key {shown} is no file"));
    }
    if is_private && metadata.mode() & TOO_OPEN != 0 {
        return Err(format!(
            "others can read or change the key {shown}: chmod 600 it, and make a new one if they may have"
        ));
    }
    let mut text = String::new();
    file.take(SECRET_TEXT_BYTES as u64 + 2).read_to_string(&mut text).map_err(cannot)?;
    text.trim_end().parse().map_err(|error| format!("{shown}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn what_is_written_is_read_and_by_nobody_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        let secret = generate().unwrap();
        write_new(&secret, &path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(read(&path, true), Ok(secret.clone()));
        assert!(write_new(&secret, &path).is_err(), "a key that is in use is not replaced");
        assert_ne!(secret, generate().unwrap());
        assert!(!format!("{secret:?}").contains(&secret.text()[..8]));
        for (mode, is_good) in [(0o640, true), (0o644, false), (0o602, false), (0o620, false), (0o400, true)] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            let got = read(&path, true);
            assert_eq!(got.is_ok(), is_good, "{mode:o}: {got:?}");
            assert!(read(&path, false).is_ok(), "what systemd made is its own affair");
        }
        assert!(read(folder.path(), true).unwrap_err().contains("no file"));
    }
}
