//! Notifications to the service manager (systemd): that the process is ready, gives way to another program, or is
//! alive.
//!
//! Owned by the I/O thread, which never waits for the manager: a message that finds the manager's socket full is sent
//! again later. The I/O thread itself sends the sign of life in its turns, so that a hanging thread is noticed: the
//! manager then kills the process, and starts it again.

use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sendto, socket_with};
use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, Instant};

/// The longest time for a start, and for another program to take over. It is enough to rebuild an index of terabytes.
const START_TIME_MAX: Duration = Duration::from_secs(600);
/// Delay before the next attempt when the manager's socket is full.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// The manager of this process, if there is one.
#[derive(Debug, Default)]
pub struct ServiceManager {
    socket: Option<(OwnedFd, SocketAddrUnix)>,
    /// The manager kills a process that gives no sign of life for this long.
    patience: Option<Duration>,
    /// The newest state that could not be sent to the manager yet; empty if there is none.
    owed: String,
    next_sign: Option<Instant>,
}

impl ServiceManager {
    /// Creates the manager that the environment names, or one that ignores everything if the environment names none.
    #[must_use]
    pub fn of_environment() -> Self {
        let variable = |name| std::env::var_os(name);
        let number = |name| variable(name).and_then(|text| text.to_str()?.parse::<u64>().ok());
        let is_for_us = number("WATCHDOG_PID").is_none_or(|pid| pid == u64::from(std::process::id()));
        let patience = number("WATCHDOG_USEC").filter(|usec| is_for_us && *usec > 0).map(Duration::from_micros);
        let socket = variable("NOTIFY_SOCKET").and_then(|name| {
            connect(&name, SocketFlags::NONBLOCK)
                .inspect_err(|error| tracing::warn!("no way to the service manager: {error}"))
                .ok()
        });
        Self { patience: patience.filter(|_| socket.is_some()), socket, ..Self::default() }
    }

    /// Reports that the start may take long.
    pub fn begin_start(&mut self, now: Instant) {
        self.tell(now, &format!("EXTEND_TIMEOUT_USEC={}\n", START_TIME_MAX.as_micros()));
    }

    /// Reports that requests are served, and sets how long the manager waits for a sign of life from now on.
    pub fn say_ready(&mut self, now: Instant) {
        let patience = self.patience.map(|patience| format!("WATCHDOG_USEC={}\nWATCHDOG=1\n", patience.as_micros()));
        self.next_sign = self.sign_every().map(|every| now + every);
        self.tell(now, &format!("READY=1\n{}", patience.unwrap_or_default()));
    }

    /// Reports that another program is about to take over, which may take as long as a start.
    pub fn say_giving_way(&mut self, now: Instant) {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let now_usec = time.tv_sec.saturating_mul(1_000_000).saturating_add(time.tv_nsec / 1000);
        let start_usec = START_TIME_MAX.as_micros();
        let patience = self.patience.map(|_| format!("WATCHDOG_USEC={start_usec}\n")).unwrap_or_default();
        self.tell(
            now,
            &format!("RELOADING=1\nMONOTONIC_USEC={now_usec}\nEXTEND_TIMEOUT_USEC={start_usec}\n{patience}"),
        );
    }

    /// Returns when [`Self::handle_timer`] is due, or `None` if no timer is running.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        self.next_sign
    }

    /// If the timer is due, sends the state that is still owed, and then a sign of life.
    pub fn handle_timer(&mut self, now: Instant) {
        if self.next_sign.is_none_or(|at| now < at) {
            return;
        }
        let is_told = self.owed.is_empty() || self.send(&self.owed);
        if is_told {
            self.owed.clear();
        }
        let every = self.sign_every();
        let has_signed = is_told && every.is_none_or(|_| self.send("WATCHDOG=1\n"));
        self.next_sign = if has_signed { every.map(|every| now + every) } else { Some(now + AGAIN_AFTER) };
    }

    /// Returns the interval between signs of life, a third of the manager's patience, so that two may be late. Returns
    /// `None` if the manager expects none.
    fn sign_every(&self) -> Option<Duration> {
        self.patience.map(|patience| patience / 3)
    }

    fn tell(&mut self, now: Instant, state: &str) {
        if !self.owed.is_empty() || !self.send(state) {
            // Only the newest state matters. Its length is bounded.
            state.clone_into(&mut self.owed);
            self.next_sign = self.next_sign.into_iter().chain([now + AGAIN_AFTER]).min();
        }
    }

    /// Sends `state` to the manager. Returns false if the manager's socket is full.
    fn send(&self, state: &str) -> bool {
        let Some((socket, address)) = &self.socket else { return true };
        match sendto(socket, state.as_bytes(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL, address) {
            Ok(_) => true,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::NOBUFS) => false,
            Err(error) => {
                tracing::debug!("the service manager cannot be told: {error}");
                true
            }
        }
    }
}

/// Returns a socket for messages to the manager, and the manager's address.
pub(crate) fn connect(name: &OsStr, flags: SocketFlags) -> io::Result<(OwnedFd, SocketAddrUnix)> {
    let address = match name.as_bytes() {
        [b'@', name @ ..] => SocketAddrUnix::new_abstract_name(name)?,
        path => SocketAddrUnix::new(path)?,
    };
    let flags = flags | SocketFlags::CLOEXEC;
    Ok((socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?, address))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixDatagram;

    fn manager(patience: Option<Duration>) -> (ServiceManager, UnixDatagram, tempfile::TempDir) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let theirs = UnixDatagram::bind(&path).unwrap();
        theirs.set_nonblocking(true).unwrap();
        let socket = Some(connect(path.as_os_str(), SocketFlags::NONBLOCK).unwrap());
        (ServiceManager { socket, patience, ..ServiceManager::default() }, theirs, folder)
    }

    fn told(theirs: &UnixDatagram) -> Option<String> {
        let mut text = [0; 500];
        let count = theirs.recv(&mut text).ok()?;
        Some(String::from_utf8(text[..count].to_vec()).unwrap())
    }

    #[test]
    fn without_a_watchdog_it_says_when_it_is_ready_and_nothing_more() {
        let (mut manager, theirs, _folder) = manager(None);
        manager.say_ready(Instant::now());
        assert_eq!(told(&theirs).unwrap(), "READY=1\n");
        assert_eq!(manager.next_deadline(), None);
    }

    #[test]
    fn without_a_watchdog_it_says_later_that_it_is_ready_to_a_manager_that_takes_nothing() {
        let (mut manager, theirs, _folder) = manager(None);
        while manager.send("x") {}
        let start = Instant::now();
        manager.say_ready(start);
        assert_eq!(manager.next_deadline(), Some(start + AGAIN_AFTER));
        while told(&theirs).is_some_and(|text| text == "x") {}
        manager.handle_timer(start + AGAIN_AFTER);
        assert_eq!(told(&theirs).unwrap(), "READY=1\n");
        assert_eq!(manager.next_deadline(), None);
    }

    #[test]
    fn a_manager_that_takes_nothing_is_not_waited_for_and_is_told_later() {
        let (mut manager, theirs, _folder) = manager(Some(Duration::from_secs(30)));
        while manager.send("x") {}
        let start = Instant::now();
        manager.say_giving_way(start);
        assert_eq!(manager.next_deadline(), Some(start + AGAIN_AFTER));
        manager.say_ready(start);
        let due = start + AGAIN_AFTER;
        assert_eq!(manager.next_deadline(), Some(due), "it owes something");
        manager.handle_timer(due);
        let again = manager.next_deadline().unwrap();
        assert_eq!(again, due + AGAIN_AFTER);
        while told(&theirs).is_some_and(|text| text == "x") {}
        manager.handle_timer(again);
        let ready = told(&theirs).unwrap();
        assert!(ready.starts_with("READY=1\nWATCHDOG_USEC=30000000\n"), "{ready}");
        assert_eq!(told(&theirs).unwrap(), "WATCHDOG=1\n");
        assert_eq!(manager.next_deadline(), Some(again + Duration::from_secs(10)));
    }
}
