//! Sockets for front ends: a socket path, or a descriptor passed by the process that started this one.

use std::fs::Permissions;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::fs::Mode;
use rustix::net::sockopt;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Longest socket path in bytes: sizeof(sun_path) less the terminating zero.
pub const PATH_BYTES_MAX: usize = 107;
/// Mode of a socket for its owner alone.
const OWNER_MODE: u32 = 0o600;
/// As many connections that were not accepted as the system allows.
const BACKLOG: i32 = -1;
/// Mode of a socket that belongs to a group. Whoever may write to it may connect.
const GROUP_MODE: u32 = 0o660;

/// Why a socket cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    #[error(
        "socket path {path} has {length} bytes, at most 107 are possible: use a shorter one, such as in /run/remoca"
    )]
    PathTooLong { path: PathBuf, length: usize },
    #[error("socket {0} is in use by another process: stop that one or choose another path")]
    InUse(PathBuf),
    #[error("{0} exists and is not a socket: remove it or choose another path")]
    NotASocket(PathBuf),
    #[error("cannot listen on socket {path}")]
    Bind { path: PathBuf, source: io::Error },
    #[error("socket {path} cannot be given to group {group}: {source}; run as root, or name a group that you are in")]
    Group { path: PathBuf, group: u32, source: io::Error },
    #[error("the descriptor passed is not a stream socket of the Unix family")]
    WrongDescriptor,
    #[error("cannot use the socket passed")]
    Descriptor(#[source] io::Error),
}

/// The socket over which the front ends of a device connect.
#[derive(Debug)]
pub enum SocketSource {
    /// Front ends connect one after the other. A path that this program made is removed at the end.
    Listener { listener: UnixListener, path: Option<SocketPath> },
    /// A single front end.
    Stream(UnixStream),
}

/// A socket in the file system. It is removed on drop unless another file has taken its place.
#[derive(Debug)]
pub struct SocketPath {
    path: PathBuf,
    inode: u64,
}

/// A listening socket, and its path and inode if this program made the path.
pub type ListeningCopy = (OwnedFd, Option<(PathBuf, u64)>);

impl SocketPath {
    /// Returns path and inode, which [`SocketSource::adopt`] needs in another program.
    pub fn name(&self) -> (PathBuf, u64) {
        (self.path.clone(), self.inode)
    }

    /// Makes a socket that a previous program made as [`SocketSource::bind`] would have made it for `group`: members of that
    /// group may connect, or without one only the owner, if a group could until now.
    ///
    /// # Errors
    /// If the socket cannot be given to the group. It is as before then.
    pub fn regroup(&self, group: Option<u32>) -> Result<(), SocketError> {
        let Ok(metadata) = self.path.symlink_metadata() else { return Ok(()) };
        let now = (metadata.mode() & 0o777 == GROUP_MODE).then(|| metadata.gid());
        match group {
            _ if metadata.ino() != self.inode || now == group => Ok(()),
            Some(group) => self.give_to(group, GROUP_MODE),
            None => self.give_to(rustix::process::getegid().as_raw(), OWNER_MODE),
        }
    }

    fn give_to(&self, group: u32, mode: u32) -> Result<(), SocketError> {
        let path = &self.path;
        let group_error = |source| SocketError::Group { path: path.clone(), group, source };
        std::os::unix::fs::lchown(path, None, Some(group)).map_err(group_error)?;
        std::fs::set_permissions(path, Permissions::from_mode(mode)).map_err(group_error)
    }
}

impl SocketSource {
    /// Gives a listening socket that a previous program made to `group`, as [`Self::bind`] would.
    ///
    /// # Errors
    /// If that is not allowed. The socket is as before then.
    pub fn regroup(&self, group: Option<u32>) -> Result<(), SocketError> {
        match self {
            SocketSource::Listener { path: Some(path), .. } => path.regroup(group),
            SocketSource::Listener { path: None, .. } | SocketSource::Stream(_) => Ok(()),
        }
    }

    /// Takes over a listening socket that a previous program of this process made.
    ///
    /// # Errors
    /// If the descriptor is not a valid listening socket.
    pub fn adopt(descriptor: OwnedFd, path: Option<(PathBuf, u64)>) -> Result<Self, SocketError> {
        match Self::from_descriptor(descriptor)? {
            SocketSource::Listener { listener, .. } => {
                let path = path.map(|(path, inode)| SocketPath { path, inode });
                Ok(SocketSource::Listener { listener, path })
            }
            SocketSource::Stream(_) => Err(SocketError::WrongDescriptor),
        }
    }

    /// Returns a copy of a listening socket and its name, for [`Self::adopt`] in another program. Returns `None` for a
    /// single connection.
    ///
    /// # Errors
    /// If the process has no descriptor left for a copy.
    pub fn copy(&self) -> io::Result<Option<ListeningCopy>> {
        match self {
            SocketSource::Listener { listener, path } => {
                Ok(Some((listener.try_clone()?.into(), path.as_ref().map(SocketPath::name))))
            }
            SocketSource::Stream(_) => Ok(None),
        }
    }

    /// Listens on `path`. Replaces a socket that no process listens on any longer. With `group` (a group ID), members
    /// of that group may connect besides the owner, and nobody else, at no moment and whatever the umask.
    ///
    /// # Errors
    /// If the path cannot be used, or the socket cannot be given to the group.
    pub fn bind(path: &Path, group: Option<u32>) -> Result<Self, SocketError> {
        let length = path.as_os_str().len();
        if length > PATH_BYTES_MAX {
            return Err(SocketError::PathTooLong { path: path.into(), length });
        }
        remove_stale(path)?;
        let bind_error = |source| SocketError::Bind { path: path.into(), source };
        let listener = listen(path).map_err(bind_error)?;
        let inode = path.symlink_metadata().map_err(bind_error)?.ino();
        let made = SocketPath { path: path.into(), inode };
        group.map_or(Ok(()), |group| made.give_to(group, GROUP_MODE))?;
        Ok(Self::Listener { listener, path: Some(made) })
    }

    /// Takes over a listening or a connected socket (`--fd`, socket activation).
    pub fn from_descriptor(descriptor: OwnedFd) -> Result<Self, SocketError> {
        let socket_error = |errno: rustix::io::Errno| match errno {
            rustix::io::Errno::NOTSOCK => SocketError::WrongDescriptor,
            errno => SocketError::Descriptor(errno.into()),
        };
        let family = sockopt::socket_domain(&descriptor).map_err(socket_error)?;
        let kind = sockopt::socket_type(&descriptor).map_err(socket_error)?;
        if family != AddressFamily::UNIX || kind != SocketType::STREAM {
            return Err(SocketError::WrongDescriptor);
        }
        match sockopt::socket_acceptconn(&descriptor).map_err(socket_error)? {
            true => Ok(SocketSource::Listener { listener: descriptor.into(), path: None }),
            false => Ok(SocketSource::Stream(descriptor.into())),
        }
    }
}

/// Listens at `path`, for the owner alone.
fn listen(path: &Path) -> io::Result<UnixListener> {
    let socket = bind_with_mode(path, OWNER_MODE)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

/// Makes a socket at `path` that does not listen. It is made with `mode`, less what the umask takes away: if it got the mode afterwards, a umask that
/// allows more would let others in for a moment.
///
/// # Errors
/// If the path cannot be used, or is too long.
pub fn bind_with_mode(path: &Path, mode: u32) -> io::Result<OwnedFd> {
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    rustix::fs::fchmod(&socket, Mode::from_raw_mode(mode))?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// Removes a socket that no process listens on, because its process was killed. Does not wait for a process that listens.
///
/// # Errors
/// If a process listens there, `path` is no socket, or it cannot be removed.
pub fn remove_stale(path: &Path) -> Result<(), SocketError> {
    match is_stale(path)? {
        true => std::fs::remove_file(path).map_err(|source| SocketError::Bind { path: path.into(), source }),
        false => Ok(()),
    }
}

/// Checks that a process could listen at `path`, as far as that shows without doing it. Makes and removes nothing.
///
/// # Errors
/// As [`SocketSource::bind`].
pub fn look_at(path: &Path) -> Result<(), SocketError> {
    let length = path.as_os_str().len();
    if length > PATH_BYTES_MAX {
        return Err(SocketError::PathTooLong { path: path.into(), length });
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let looked = folder.map_or(Ok(()), |folder| folder.metadata().map(drop));
    looked.map_err(|source| SocketError::Bind { path: path.into(), source })?;
    is_stale(path).map(drop)
}

/// Returns whether `path` is a socket that no process listens on, or `false` if there is nothing.
fn is_stale(path: &Path) -> Result<bool, SocketError> {
    let bind_error = |source| SocketError::Bind { path: path.into(), source };
    match path.symlink_metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(bind_error(error)),
        Ok(metadata) if !metadata.file_type().is_socket() => return Err(SocketError::NotASocket(path.into())),
        Ok(_) => {}
    }
    match try_connect(path) {
        Ok(()) => Err(SocketError::InUse(path.into())),
        // A process listens that has not accepted the connections before this one.
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(SocketError::InUse(path.into())),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(true),
        Err(error) => Err(bind_error(error)),
    }
}

/// Returns whether a process listens at `path`. Does not wait for it, even if it hangs.
#[must_use]
pub fn has_listener(path: &Path) -> bool {
    try_connect(path).map_or_else(|error| error.kind() == io::ErrorKind::WouldBlock, |()| true)
}

/// Listens at `path` as a process that hangs: it accepts nobody, and its queue of clients is full.
///
/// # Errors
/// If the path cannot be used.
#[cfg(any(test, feature = "testing"))]
pub fn listen_as_hung(path: &Path) -> io::Result<OwnedFd> {
    let hung = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    rustix::net::bind(&hung, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&hung, 0)?;
    // A connection that was not accepted takes its place although it has hung up.
    while try_connect(path).is_ok() {}
    Ok(hung)
}

/// Connects to a socket and hangs up, without waiting for the process that listens.
fn try_connect(path: &Path) -> io::Result<()> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    Ok(rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?)
}

impl Drop for SocketPath {
    fn drop(&mut self) {
        let ours = self.path.symlink_metadata().is_ok_and(|metadata| metadata.ino() == self.inode);
        if ours && let Err(error) = std::fs::remove_file(&self.path) {
            tracing::debug!(path = %self.path.display(), %error, "cannot remove the socket");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_taken_only_while_somebody_listens() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let first = SocketSource::bind(&path, None).unwrap();
        assert!(matches!(SocketSource::bind(&path, None), Err(SocketError::InUse(_))));
        drop(first);
        assert!(!path.exists(), "a socket of ours is removed");
        // Nobody has listened there: a program that another test starts has a copy of each socket for a moment.
        let stale =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::bind(&stale, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        drop(stale);
        assert!(path.exists(), "a stale socket");
        let _second = SocketSource::bind(&path, None).unwrap();
    }

    #[test]
    fn a_process_that_accepts_nothing_has_its_path_and_delays_nobody() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        assert!(!has_listener(&path));
        let _hung = listen_as_hung(&path).unwrap();
        assert!(has_listener(&path));
        assert!(matches!(SocketSource::bind(&path, None), Err(SocketError::InUse(_))));
    }

    #[test]
    fn a_socket_for_the_owner_is_so_from_the_beginning() {
        let directory = tempfile::tempdir().unwrap();
        let mode = |path: &Path| path.symlink_metadata().unwrap().mode() & 0o777;
        let path = directory.path().join("s");
        let listener = listen(&path).unwrap();
        assert_eq!(mode(&path), OWNER_MODE, "nobody has changed it afterwards");
        let _client = UnixStream::connect(&path).unwrap();
        listener.accept().unwrap();
        let other = directory.path().join("other");
        let source = SocketSource::bind(&other, None).unwrap();
        assert_eq!(mode(&other), OWNER_MODE);
        drop(source);
        assert!(!other.exists());
    }

    #[test]
    fn a_socket_that_took_our_place_is_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let first = SocketSource::bind(&path, None).unwrap();
        std::fs::rename(&path, directory.path().join("moved")).unwrap();
        let _other = UnixListener::bind(&path).unwrap();
        drop(first);
        assert!(path.exists());
    }

    #[test]
    fn impossible_paths_are_named() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        std::fs::write(&file, "x").unwrap();
        let error = SocketSource::bind(&file, None).unwrap_err().to_string();
        assert!(error.contains("is not a socket"), "{error}");
        let long = directory.path().join("x".repeat(120));
        let error = SocketSource::bind(&long, None).unwrap_err().to_string();
        assert!(error.contains("at most 107"), "{error}");
        let missing = directory.path().join("no/such/place");
        assert!(matches!(SocketSource::bind(&missing, None), Err(SocketError::Bind { .. })));
    }

    #[test]
    fn descriptors_are_told_apart() {
        let (stream, _peer) = UnixStream::pair().unwrap();
        assert!(matches!(SocketSource::from_descriptor(stream.into()), Ok(SocketSource::Stream(_))));
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join("s")).unwrap();
        let listener = SocketSource::from_descriptor(listener.into());
        assert!(matches!(listener, Ok(SocketSource::Listener { path: None, .. })));
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(matches!(SocketSource::from_descriptor(file.into()), Err(SocketError::WrongDescriptor)));
    }
}
