//! The record: a small file with the intent, the known sizes and the latest decisions. It is on the disk before a command is sent.

use crate::planner::Record;
use remoca_io::lock::lock_whole;
use remoca_io::small_file;
use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Maximum size of the file.
const BYTES_MAX: usize = 4 << 20;
/// Maximum size of one that is read: former versions wrote without a limit.
const READ_BYTES_MAX: u64 = 64 << 20;

/// Reads the record at `path`. Returns an empty one if there is none.
///
/// # Errors
/// If there is a file that is no record.
pub fn read(path: &Path) -> io::Result<Record> {
    match small_file::read(path, READ_BYTES_MAX) {
        Ok(text) => serde_json::from_str(&text).map_err(io::Error::other),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Record::default()),
        Err(error) => Err(error),
    }
}

/// Reads the record at `path`, as [`read`]. One that is broken is kept beside it, for the operator, and not used.
///
/// # Errors
/// If there is a file that cannot be read: nobody knows what it says.
pub fn read_or_keep(path: &Path) -> io::Result<Record> {
    let error = match read(path) {
        Err(error) if is_broken(error.kind()) => error,
        Err(error) => return Err(told(path, "the record of a former daemon cannot be read", &error)),
        read => return read,
    };
    let broken = path.with_extension("broken");
    std::fs::rename(path, &broken)
        .map_err(|error| told(path, "the record of a former daemon is broken, and cannot be kept", &error))?;
    tracing::warn!(
        "{}: the record of a former daemon is not used: {error}; it is kept as {}. Guests count with what they have now: if some have lent \
         memory, `virsh domstats --balloon` shows which, and `virsh setmem`, or QMP's `balloon`, gives them theirs back",
        path.display(),
        broken.display()
    );
    Ok(Record::default())
}

fn is_broken(kind: io::ErrorKind) -> bool {
    matches!(kind, io::ErrorKind::Other | io::ErrorKind::InvalidData | io::ErrorKind::FileTooLarge)
}

fn told(path: &Path, what: &str, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {what}: {error}", path.display()))
}

/// Writes the record, and returns when it is on the disk.
///
/// # Errors
/// If the system refuses, or it is too large. The former record is unchanged then.
pub fn write(path: &Path, record: &Record) -> io::Result<()> {
    let text = serde_json::to_string(record).map_err(io::Error::other)?;
    if text.len() > BYTES_MAX {
        let why = format!("it has {} bytes, and at most {BYTES_MAX} are possible", text.len());
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, why));
    }
    small_file::write_durably(path, text)
}

/// The lock that says that there is a daemon. It ends with the process.
#[derive(Debug)]
pub struct HostLock {
    _file: File,
}

impl HostLock {
    /// Locks the file at `path`, which is made if need be.
    ///
    /// # Errors
    /// `WouldBlock` if another daemon has it, or another error of the system.
    pub fn take(path: &Path) -> io::Result<Self> {
        // A reader could lock it too.
        let mut options = File::options();
        let file = options.create(true).truncate(false).write(true).read(true).mode(0o600).open(path)?;
        lock_whole(&file)?;
        Ok(Self { _file: file })
    }
}

/// Paths of the daemon's files in the folder of control sockets.
#[derive(Clone, Debug)]
pub struct Paths {
    pub lock: PathBuf,
    pub record: PathBuf,
    pub socket: PathBuf,
    /// Is there while guests are to get all of their memory back.
    pub request: PathBuf,
}

impl Paths {
    /// Returns the paths in `folder`. No VM process has a file of such a name.
    #[must_use]
    pub fn new(folder: &Path) -> Self {
        let path = |name: &str| folder.join(name);
        Self {
            lock: path("remoca-host.lock"),
            record: path("remoca-host.record"),
            socket: path("remoca-host.socket"),
            request: path("remoca-host.give-back"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planner::{GuestRecord, Intent, Move, Stage};

    #[test]
    fn a_record_comes_back_and_a_broken_one_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let paths = Paths::new(folder.path());
        assert_eq!(read(&paths.record).unwrap(), Record::default());
        let change = Move {
            vm: "a".into(),
            from_bytes: 1,
            to_bytes: 2,
            stage: Stage::Begun,
            why: "more".into(),
            miss_ratio: Some(0.5),
            ..Move::default()
        };
        let record = Record {
            intent: Some(Intent { at_s: 7, moves: vec![change] }),
            sizes: [("a".to_owned(), 1)].into(),
            ..Record::default()
        };
        write(&paths.record, &record).unwrap();
        assert_eq!(read(&paths.record).unwrap(), record);
        assert_eq!(read_or_keep(&paths.record).unwrap(), record);
        std::fs::write(&paths.record, "{").unwrap();
        assert!(read(&paths.record).is_err());
        assert_eq!(read_or_keep(&paths.record).unwrap(), Record::default());
        assert_eq!(std::fs::read_to_string(folder.path().join("remoca-host.broken")).unwrap(), "{");
        assert!(!paths.record.exists());
        // What cannot be read stays where it is.
        std::fs::create_dir(&paths.record).unwrap();
        let error = read_or_keep(&paths.record).unwrap_err();
        assert!(
            error.to_string().contains("remoca-host.record: the record of a former daemon cannot be read"),
            "{error}"
        );
        assert!(paths.record.is_dir());
    }

    #[test]
    fn a_record_that_is_too_large_is_not_written_and_none_is_read_in_part() {
        let folder = tempfile::tempdir().unwrap();
        let paths = Paths::new(folder.path());
        let small = Record { sizes: [("a".to_owned(), 1)].into(), ..Record::default() };
        write(&paths.record, &small).unwrap();
        let large = Record { sizes: [("a".repeat(BYTES_MAX), 1)].into(), ..Record::default() };
        let error = write(&paths.record, &large).unwrap_err();
        assert!(error.to_string().contains("at most 4194304 are possible"), "{error}");
        assert_eq!(read(&paths.record).unwrap(), small);
        // A former version wrote it all the same.
        std::fs::write(&paths.record, serde_json::to_string(&large).unwrap()).unwrap();
        assert!(read_or_keep(&paths.record).unwrap() == large);
        File::create(&paths.record).unwrap().set_len(READ_BYTES_MAX + 1).unwrap();
        assert_eq!(read(&paths.record).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        assert_eq!(read_or_keep(&paths.record).unwrap(), Record::default());
        assert!(folder.path().join("remoca-host.broken").exists());
    }

    #[test]
    fn a_record_of_an_older_version_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("record");
        let guest = r#"{"home_bytes":8,"base_bytes":8,"asked_bytes":6}"#;
        std::fs::write(&path, format!(r#"{{"intent":null,"sizes":{{}},"guests":{{"a":{guest}}},"decisions":[]}}"#))
            .unwrap();
        let sizes = GuestRecord { home_bytes: 8, base_bytes: 8, asked_bytes: 6, ..GuestRecord::default() };
        let record = Record { guests: [("a".to_owned(), sizes)].into(), ..Record::default() };
        assert_eq!(read_or_keep(&path).unwrap(), record);
    }

    #[test]
    fn there_is_one_daemon() {
        let folder = tempfile::tempdir().unwrap();
        let paths = Paths::new(folder.path());
        let first = HostLock::take(&paths.lock).unwrap();
        assert_eq!(HostLock::take(&paths.lock).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(first);
        HostLock::take(&paths.lock).unwrap();
    }
}
