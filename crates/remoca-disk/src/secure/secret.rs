//! A secret that two processes share, and the file that it is in.

use rustix::fs::{Mode, OFlags};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::str::FromStr;

const SECRET_BYTES: usize = 32;
const TEXT_BYTES: usize = 2 * SECRET_BYTES;
/// Permissions that make a key file anybody's: reading and writing by others, writing by the group.
const TOO_OPEN: u32 = 0o027;

/// 256 random bits, written as 64 hexadecimal digits. Never a password: who sees a handshake could try them all.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Secret([u8; SECRET_BYTES]);

impl Secret {
    /// Returns a new one.
    ///
    /// # Errors
    /// If the system gives no random numbers.
    pub fn generate() -> io::Result<Self> {
        let mut bytes = [0; SECRET_BYTES];
        match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())? {
            SECRET_BYTES => Ok(Self(bytes)),
            _ => Err(io::Error::other("the system gives too few random numbers")),
        }
    }

    /// Writes it to a new file that only its owner can read.
    ///
    /// # Errors
    /// If there is such a file, or it cannot be made.
    pub fn write_new(&self, path: &Path) -> io::Result<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut file = File::from(rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)?);
        file.write_all(format!("{}\n", self.text()).as_bytes())?;
        file.sync_all()
    }

    /// Reads it from a file. With `is_private`, one that others can read or change is refused.
    ///
    /// # Errors
    /// If it cannot be read, is no key, or is open to others; the text says what to do.
    pub fn read(path: &Path, is_private: bool) -> Result<Self, String> {
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
        file.take(TEXT_BYTES as u64 + 2).read_to_string(&mut text).map_err(cannot)?;
        text.trim_end().parse().map_err(|error| format!("{shown}: {error}"))
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    fn text(&self) -> String {
        use fmt::Write as _;
        self.0.iter().fold(String::with_capacity(TEXT_BYTES), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
    }
}

impl FromStr for Secret {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const WRONG: &str = "a key has 64 hexadecimal digits, as `remoca migrate --new-key FILE` makes it";
        let mut bytes = [0; SECRET_BYTES];
        if text.len() != TEXT_BYTES || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(WRONG);
        }
        for (byte, at) in bytes.iter_mut().zip((0..).step_by(2)) {
            *byte = text.get(at..at + 2).and_then(|pair| u8::from_str_radix(pair, 16).ok()).ok_or(WRONG)?;
        }
        match bytes.iter().all(|byte| *byte == bytes[0]) {
            true => Err("a key of equal bytes is no secret: make one with `remoca migrate --new-key FILE`"),
            false => Ok(Self(bytes)),
        }
    }
}

impl TryFrom<String> for Secret {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<Secret> for String {
    fn from(secret: Secret) -> Self {
        secret.text()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn what_is_written_is_read_and_by_nobody_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        let secret = Secret::generate().unwrap();
        secret.write_new(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(Secret::read(&path, true), Ok(secret.clone()));
        assert!(secret.write_new(&path).is_err(), "a key that is in use is not replaced");
        assert_ne!(secret, Secret::generate().unwrap());
        assert!(!format!("{secret:?}").contains(&secret.text()[..8]));
        for (mode, is_good) in [(0o640, true), (0o644, false), (0o602, false), (0o620, false), (0o400, true)] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            let read = Secret::read(&path, true);
            assert_eq!(read.is_ok(), is_good, "{mode:o}: {read:?}");
            assert!(Secret::read(&path, false).is_ok(), "what systemd made is its own affair");
        }
        assert!(Secret::read(folder.path(), true).unwrap_err().contains("no file"));
    }

    #[test]
    fn a_password_is_no_key() {
        let good = "0123456789abcdef".repeat(4);
        assert!(good.parse::<Secret>().is_ok());
        for bad in
            ["", "swordfish", &good[1..], &format!("{good}0"), &"0".repeat(64), &"é".repeat(32), &"+1".repeat(32)]
        {
            let error = bad.parse::<Secret>().unwrap_err();
            assert!(error.contains("--new-key"), "{bad}: {error}");
        }
    }
}
