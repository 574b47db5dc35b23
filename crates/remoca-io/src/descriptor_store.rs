//! Descriptors that the service manager keeps for the next process of its unit: systemd's descriptor store, of version
//! 252 and later.
//!
//! Each descriptor has a name of its own, which comes back in `LISTEN_FDNAMES`. The manager ignores a descriptor that it
//! has already, whatever its name, and one for which it has no room. So this process compares each with those that it sent
//! before (`kcmp`), and its successor expects any of them to be missing.
//!
//! Owned by the control threads of devices, which may wait for the manager; the I/O thread never does. See
//! `docs/decisions/0030-kept-connections.md`.

use crate::file_systems::is_of_this_host;
use crate::service::connect;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::{FdFlags, fcntl_dupfd_cloexec, fcntl_setfd};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, sendmsg_addr, sockopt,
};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::time::Timespec;
use std::cmp::Ordering;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Environment variable with the number of descriptors that the manager keeps. systemd sets it from version 254 on; before,
/// our unit does.
pub const ROOM: &str = "FDSTORE";
/// Names of our descriptors begin with this, and go on with a number.
const PREFIX: &str = "remoca-";
/// The same for ledgers, which say what the others are.
const LEDGER_PREFIX: &str = "remoca-ledger-";
/// Time limit for the manager, of each message and each confirmation.
const PATIENCE: Duration = Duration::from_secs(1);
/// Maximum number of descriptors. Their names are one string of the successor's environment, which the kernel limits to
/// 128 KiB.
const ROOM_MAX: usize = 8192;
const FIRST_PASSED: RawFd = 3;
const KCMP_FILE: libc::c_int = 0;

/// What a descriptor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// File that says what other descriptors are. It says nothing once it is empty.
    Ledger,
    Other,
}

/// The descriptors of this process that the manager has.
pub struct DescriptorStore {
    /// `None` if there is no manager that keeps descriptors.
    manager: Option<(OwnedFd, SocketAddrUnix)>,
    room: usize,
    /// Time limit of each confirmation.
    patience: Duration,
    kept: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    /// In the order of `kcmp`.
    kept: Vec<Kept>,
    /// Number of the next descriptor. No number is used again, so a name means one descriptor whatever got lost.
    next: u32,
    /// Number of times that everything was removed.
    emptied: u32,
    /// Whether the manager did not take the last removal. Each further one could wait as long, so [`DescriptorStore::confirm`]
    /// tries again.
    is_stuck: bool,
}

struct Kept {
    number: u32,
    kind: Kind,
    /// Copy of this process.
    fd: OwnedFd,
    users: u32,
}

impl DescriptorStore {
    /// Returns the store that the environment names, with the descriptors that a former process of this unit left there.
    /// Nobody uses those yet.
    ///
    /// Must be called only once, before the program opens anything, and not by a program that took over from a former
    /// one of the same process.
    #[must_use]
    pub fn receive() -> Self {
        let store = Self::empty();
        for (number, name) in passed() {
            let Some((kind, of_name)) = kind_of(&name) else { continue };
            // SAFETY: the manager passed it for this use alone; `passed` found it open, and no other part takes those of
            // our names.
            let fd = unsafe { OwnedFd::from_raw_fd(number) };
            let mut inner = store.inner();
            inner.next = inner.next.max(of_name.saturating_add(1));
            let known =
                fcntl_setfd(&fd, FdFlags::CLOEXEC).map_err(io::Error::from).and_then(|()| inner.place(fd.as_fd()));
            match known {
                Ok(Err(at)) => inner.kept.insert(at, Kept { number: of_name, kind, fd, users: 0 }),
                // It cannot be compared, or it is there twice.
                Ok(Ok(_)) | Err(_) => {
                    drop(inner);
                    let _ = store.send_removal(kind, of_name);
                }
            }
        }
        store
    }

    /// Returns the store that the environment names, without anything in it.
    #[must_use]
    pub fn empty() -> Self {
        let room = std::env::var(ROOM).ok().and_then(|text| text.parse().ok()).unwrap_or(0_usize).min(ROOM_MAX);
        let socket = std::env::var_os("NOTIFY_SOCKET").and_then(|name| {
            let (socket, address) = connect(&name, SocketFlags::empty()).ok()?;
            set_socket_timeout(&socket, Timeout::Send, Some(PATIENCE)).ok()?;
            Some((socket, address))
        });
        Self { manager: socket, room, patience: PATIENCE, kept: Mutex::default() }
    }

    /// Returns whether the manager keeps descriptors for this process.
    #[must_use]
    pub fn is_on(&self) -> bool {
        let own = rustix::stdio::stderr();
        self.manager.is_some() && self.room > 0 && compare(own, own).is_ok()
    }

    /// Returns the numbers of all ledgers.
    #[must_use]
    pub fn ledgers(&self) -> Vec<u32> {
        let inner = self.inner();
        inner.kept.iter().filter(|kept| kept.kind == Kind::Ledger).map(|kept| kept.number).collect()
    }

    /// Returns a copy of the descriptor of this number, or `None` if there is none, or there are two.
    #[must_use]
    pub fn copy(&self, number: u32) -> Option<OwnedFd> {
        let inner = self.inner();
        let mut found = inner.kept.iter().filter(|kept| kept.number == number);
        let (kept, None) = (found.next()?, found.next()) else { return None };
        fcntl_dupfd_cloexec(&kept.fd, 3).ok()
    }

    /// Makes the caller a user of the descriptor of this number, if there is one.
    pub fn hold(&self, number: u32) {
        if let Some(kept) = self.inner().kept.iter_mut().find(|kept| kept.number == number) {
            kept.users += 1;
        }
    }

    /// Gives `fd` to the manager unless it has it. Returns the number of the descriptor, of which the caller is a user.
    /// The manager may not have it before [`Self::confirm`].
    ///
    /// # Errors
    /// If the manager has no room or does not receive the message, or this process has no room for a copy.
    pub fn put(&self, fd: BorrowedFd<'_>, kind: Kind) -> io::Result<u32> {
        // The manager asks about what it keeps, and must not hang for a front end. Before the lock, which all devices share: whoever
        // answers for this file may not.
        let is_of_this_host = is_of_this_host(rustix::fs::fstatfs(fd)?.f_type);
        let mut inner = self.inner();
        let place = match inner.place(fd)? {
            Ok(at) => {
                inner.kept[at].users += 1;
                return Ok(inner.kept[at].number);
            }
            Err(place) => place,
        };
        if inner.kept.len() >= self.room {
            return Err(io::Error::other(format!("it keeps no more than {} descriptors", self.room)));
        }
        if !is_of_this_host {
            return Err(io::Error::other("a front end's file is of a file system that could make it wait"));
        }
        let copy = fcntl_dupfd_cloexec(fd, 3)?;
        let number = inner.next;
        inner.next = number.checked_add(1).ok_or_else(|| io::Error::other("no names are left"))?;
        let name = name(kind, number);
        self.send(&format!("FDSTORE=1\nFDNAME={name}\nFDPOLL=0\n"), Some(fd))?;
        inner.kept.insert(place, Kept { number, kind, fd: copy, users: 1 });
        Ok(number)
    }

    /// Ends a use of the descriptor of this number. The last one removes it.
    pub fn release(&self, number: u32) {
        let mut inner = self.inner();
        let Some(at) = inner.kept.iter().position(|kept| kept.number == number) else { return };
        let Kept { kind, users, .. } = &mut inner.kept[at];
        *users = users.saturating_sub(1);
        if *users > 0 {
            return;
        }
        let kind = *kind;
        if !inner.is_stuck {
            inner.is_stuck = self.send_removal(kind, number).is_err();
            if !inner.is_stuck {
                inner.kept.remove(at);
            }
        }
    }

    /// Removes what nobody uses, and ends the connections among it.
    pub fn close_unused(&self) {
        self.inner().kept.iter().filter(|kept| kept.users == 0).for_each(|kept| disconnect(&kept.fd));
        let _ = self.remove_unused();
    }

    /// Removes what nobody uses.
    ///
    /// # Errors
    /// If the manager does not take a removal. Those after it are left for the next time.
    fn remove_unused(&self) -> io::Result<()> {
        let mut inner = self.inner();
        let mut result = Ok(());
        inner.kept.retain(|kept| {
            if kept.users == 0 && result.is_ok() {
                result = self.send_removal(kept.kind, kept.number);
                return result.is_err();
            }
            true
        });
        inner.is_stuck = result.is_err();
        result
    }

    /// Removes everything: a program that takes over in this process keeps its own. Ledgers are emptied, so that none of
    /// them means anything if the manager does not receive the message. What it does not take is removed later, or used again.
    pub fn remove_all(&self) {
        let mut inner = self.inner();
        for ledger in inner.kept.iter().filter(|kept| kept.kind == Kind::Ledger) {
            // Fails only if it was sealed, which nobody does.
            let _ = rustix::fs::ftruncate(&ledger.fd, 0);
        }
        inner.kept.iter_mut().for_each(|kept| kept.users = 0);
        inner.emptied += 1;
        drop(inner);
        let _ = self.remove_unused();
    }

    /// Returns how often everything was removed. What was held before the last time is gone.
    #[must_use]
    pub fn emptied(&self) -> u32 {
        self.inner().emptied
    }

    /// Waits until the manager has everything that was put.
    ///
    /// # Errors
    /// If it does not say so in time.
    pub fn confirm(&self) -> io::Result<()> {
        self.remove_unused()?;
        let (ours, theirs) = pipe_with(PipeFlags::CLOEXEC)?;
        self.send("BARRIER=1", Some(theirs.as_fd()))?;
        drop(theirs);
        let patience = Timespec::try_from(self.patience).map_err(|_| io::ErrorKind::InvalidInput)?;
        match poll(&mut [PollFd::new(&ours, PollFlags::empty())], Some(&patience))? {
            0 => Err(io::Error::other("it does not answer")),
            _ => Ok(()),
        }
    }

    fn send_removal(&self, kind: Kind, number: u32) -> io::Result<()> {
        match &self.manager {
            Some(_) => self.send(&format!("FDSTOREREMOVE=1\nFDNAME={}\n", name(kind, number)), None),
            None => Ok(()),
        }
    }

    fn send(&self, text: &str, fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let (socket, address) = self.manager.as_ref().ok_or_else(|| io::Error::other("there is none"))?;
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut room);
        let fds = fd.map(|fd| [fd]);
        if let Some(fds) = &fds {
            control.push(SendAncillaryMessage::ScmRights(fds));
        }
        sendmsg_addr(socket, address, &[IoSlice::new(text.as_bytes())], &mut control, SendFlags::NOSIGNAL)?;
        Ok(())
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// Returns where `fd` is, or where it is to be inserted.
    fn place(&self, fd: BorrowedFd<'_>) -> io::Result<Result<usize, usize>> {
        let mut failed = None;
        let place = self.kept.binary_search_by(|kept| {
            compare(kept.fd.as_fd(), fd).unwrap_or_else(|error| {
                failed = Some(error);
                Ordering::Equal
            })
        });
        failed.map_or(Ok(place), Err)
    }
}

/// Compares the open file descriptions of two descriptors. The order is the kernel's, and stays while both are open.
fn compare(one: BorrowedFd<'_>, other: BorrowedFd<'_>) -> io::Result<Ordering> {
    let pid = rustix::process::getpid().as_raw_nonzero().get();
    // SAFETY: compares two descriptors of this process, and touches no memory.
    match unsafe { libc::syscall(libc::SYS_kcmp, pid, pid, KCMP_FILE, one.as_raw_fd(), other.as_raw_fd()) } {
        0 => Ok(Ordering::Equal),
        1 => Ok(Ordering::Less),
        2 => Ok(Ordering::Greater),
        _ => Err(io::Error::last_os_error()),
    }
}

fn name(kind: Kind, number: u32) -> String {
    let prefix = match kind {
        Kind::Ledger => LEDGER_PREFIX,
        Kind::Other => PREFIX,
    };
    format!("{prefix}{number}")
}

fn kind_of(name: &str) -> Option<(Kind, u32)> {
    let number = |text: &str| text.parse().ok();
    match name.strip_prefix(LEDGER_PREFIX) {
        Some(text) => Some((Kind::Ledger, number(text)?)),
        None => Some((Kind::Other, number(name.strip_prefix(PREFIX)?)?)),
    }
}

/// Returns the descriptors that the manager passed to this process and that are not of its store: listening sockets.
#[must_use]
pub fn listening() -> Vec<RawFd> {
    passed().into_iter().filter(|(_, name)| kind_of(name).is_none()).map(|(number, _)| number).collect()
}

/// Returns number and name of each descriptor that the manager passed to this process.
fn passed() -> Vec<(RawFd, String)> {
    let variable = |name| std::env::var(name).ok();
    let number = |name| variable(name)?.parse::<RawFd>().ok();
    if number("LISTEN_PID") != Some(rustix::process::getpid().as_raw_nonzero().get()) {
        return Vec::new();
    }
    let count = number("LISTEN_FDS").unwrap_or(0).max(0);
    let names = variable("LISTEN_FDNAMES").unwrap_or_default();
    let names = names.split(':').map(str::to_owned).chain(std::iter::repeat(String::new()));
    let all = (FIRST_PASSED..FIRST_PASSED.saturating_add(count)).zip(names);
    // SAFETY: only asks whether the number is an open descriptor.
    all.filter(|(number, _)| unsafe { libc::fcntl(*number, libc::F_GETFD) } >= 0).collect()
}

/// Ends the connection of `socket` for all processes that have it.
pub fn disconnect(socket: impl AsFd) {
    // Fails only if the other side has gone, or it is no socket.
    let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
}

/// Returns whether the other side of `socket` has gone, or `socket` is none.
pub fn is_hung_up(socket: impl AsFd) -> bool {
    let gone = PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR | PollFlags::NVAL;
    let mut sockets = [PollFd::new(&socket, PollFlags::RDHUP)];
    let polled = poll(&mut sockets, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    polled.is_err() || sockets[0].revents().intersects(gone) || sockopt::socket_type(&socket).is_err()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_manager::FakeManager;
    use std::os::unix::net::UnixStream;
    use std::time::Instant;

    /// Time for a manager that answers, however busy the machine is.
    const LONG: Duration = Duration::from_secs(60);

    fn store(manager: &FakeManager) -> DescriptorStore {
        let (socket, address) = connect(manager.socket().as_os_str(), SocketFlags::empty()).unwrap();
        set_socket_timeout(&socket, Timeout::Send, Some(LONG)).unwrap();
        DescriptorStore { manager: Some((socket, address)), room: 4, patience: LONG, kept: Mutex::default() }
    }

    #[test]
    fn a_descriptor_is_kept_once_for_all_its_users() {
        let manager = FakeManager::start();
        let store = store(&manager);
        assert!(store.is_on());
        let files: Vec<_> = (0..3).map(|_| tempfile::tempfile().unwrap()).collect();
        let numbers: Vec<_> = files.iter().map(|file| store.put(file.as_fd(), Kind::Other).unwrap()).collect();
        let copy = files[1].try_clone().unwrap();
        assert_eq!(store.put(copy.as_fd(), Kind::Other).unwrap(), numbers[1], "the same file");
        store.confirm().unwrap();
        assert_eq!(manager.names(), ["remoca-0", "remoca-1", "remoca-2"]);
        store.release(numbers[1]);
        store.release(numbers[0]);
        store.confirm().unwrap();
        assert_eq!(manager.names(), ["remoca-1", "remoca-2"]);
        store.release(numbers[1]);
        assert_eq!(store.put(files[1].as_fd(), Kind::Ledger).unwrap(), 3, "names are not used again");
        store.confirm().unwrap();
        assert_eq!(manager.names(), ["remoca-2", "remoca-ledger-3"]);
        assert_eq!(store.ledgers(), [3]);
    }

    #[test]
    fn everything_can_be_removed_and_then_no_ledger_says_anything() {
        let manager = FakeManager::start();
        let store = store(&manager);
        let file = tempfile::tempfile().unwrap();
        rustix::io::write(&file, b"text").unwrap();
        store.put(file.as_fd(), Kind::Ledger).unwrap();
        store.confirm().unwrap();
        store.remove_all();
        store.confirm().unwrap();
        assert!(manager.names().is_empty() && store.emptied() == 1);
        assert_eq!(file.metadata().unwrap().len(), 0);
    }

    #[test]
    fn a_manager_without_room_and_one_that_is_silent_are_errors() {
        let manager = FakeManager::start();
        let store = store(&manager);
        let files: Vec<_> = (0..5).map(|_| tempfile::tempfile().unwrap()).collect();
        let numbers: Vec<_> = files.iter().map(|file| store.put(file.as_fd(), Kind::Other).ok()).collect();
        assert_eq!(numbers, [Some(0), Some(1), Some(2), Some(3), None]);
        drop(manager);
        assert!(store.confirm().is_err());
    }

    /// Each message may wait for a second, and hypervisors wait for it.
    #[test]
    fn a_manager_that_takes_no_removal_is_asked_once_and_then_by_the_next_confirmation() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("stuck");
        let manager = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
        let (socket, address) = connect(path.as_os_str(), SocketFlags::empty()).unwrap();
        let (at, patience) = (Some((socket, address)), Duration::ZERO);
        let store = DescriptorStore { manager: at, room: 4, patience, kept: Mutex::default() };
        let files: Vec<_> = (0..3).map(|_| tempfile::tempfile().unwrap()).collect();
        let numbers: Vec<_> = files.iter().map(|file| store.put(file.as_fd(), Kind::Other).unwrap()).collect();
        drop(manager);
        std::fs::remove_file(&path).unwrap();
        store.release(numbers[0]);
        let manager = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
        manager.set_nonblocking(true).unwrap();
        let received = || {
            let mut text = [0; 256];
            let bytes = manager.recv(&mut text).ok()?;
            Some(String::from_utf8_lossy(&text[..bytes]).into_owned())
        };
        store.release(numbers[1]);
        assert_eq!(received(), None);
        assert!(store.confirm().is_err(), "nobody closes the barrier");
        let removals: Vec<_> = std::iter::from_fn(received).filter(|text| text.contains("FDSTOREREMOVE")).collect();
        assert_eq!(removals.len(), 2, "{removals:?}");
        store.release(numbers[2]);
        assert!(received().is_some_and(|text| text.contains("FDNAME=remoca-2")));
    }

    #[test]
    fn a_socket_is_hung_up_when_the_other_side_has_gone() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        assert!(!is_hung_up(&ours));
        rustix::io::write(&theirs, b"last words").unwrap();
        assert!(!is_hung_up(&ours));
        drop(theirs);
        // A program that another test starts has a copy of it for a moment.
        let give_up_at = Instant::now() + LONG;
        while !is_hung_up(&ours) {
            assert!(Instant::now() < give_up_at, "nobody has the other end");
            std::thread::yield_now();
        }
        let (ours, theirs) = UnixStream::pair().unwrap();
        disconnect(&ours);
        assert!(is_hung_up(&theirs) && is_hung_up(&ours));
        assert!(is_hung_up(tempfile::tempfile().unwrap()), "not a socket");
    }

    #[test]
    fn names_that_are_not_ours_are_sockets_to_listen_at() {
        assert_eq!(kind_of("remoca-7"), Some((Kind::Other, 7)));
        assert_eq!(kind_of("remoca-ledger-8"), Some((Kind::Ledger, 8)));
        assert!(
            ["", "stored", "remoca-", "remoca-disk@web1.socket", "remoca-ledger-"].iter().all(|n| kind_of(n).is_none())
        );
    }
}
