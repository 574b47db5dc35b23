//! An epoll instance with one timer, whose events carry the [`Source`] that they belong to.
//!
//! Each read that waits for a memory server has a deadline near enough to be the processor's next timer event, and almost no
//! deadline is ever reached. A timeout for each `epoll_wait` would set and clear the processor's timer again and again, and
//! each change costs a virtual machine an exit. The timer therefore stays armed when its deadline no longer matters.

use remoca_core::engine::ServerNumber;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// The part of the driver that a descriptor belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    Stop,
    Control,
    LinkWake,
    /// The session with a memory server.
    LinkSocket(ServerNumber),
    Store(u16),
    /// The device of a disk.
    Disk(u16),
    Port,
    /// NBD clients that negotiate.
    Nbd,
    /// SIGHUP.
    Hangup,
    /// A program that was asked whether it can take over has answered.
    Upgrade,
    /// Another VM process.
    Migration,
    /// A region that the index can move to.
    Index,
    /// The trace is written.
    Trace,
}

/// Sources of which there is only one. The kernel keeps the position in this list as their number.
const SINGLE: [Source; 10] = [
    Source::Stop,
    Source::Control,
    Source::LinkWake,
    Source::Port,
    Source::Nbd,
    Source::Hangup,
    Source::Upgrade,
    Source::Migration,
    Source::Index,
    Source::Trace,
];
/// Numbers of the sources that each disk or each server has. They follow those of the list.
const STORE: u64 = SINGLE.len() as u64;
const DISK: u64 = STORE + 1;
const LINK_SOCKET: u64 = DISK + 1;

impl Source {
    fn encode(self) -> u64 {
        let pack = |kind: u64, number: u32| kind | u64::from(number) << 16;
        match self {
            Self::Store(disk) => pack(STORE, disk.into()),
            Self::Disk(disk) => pack(DISK, disk.into()),
            Self::LinkSocket(server) => pack(LINK_SOCKET, server.0),
            single => {
                (0..).zip(SINGLE).find_map(|(kind, other)| (other == single).then_some(kind)).expect("it is listed")
            }
        }
    }

    fn decode(data: u64) -> Self {
        let bytes = data.to_le_bytes();
        let disk = u16::from_le_bytes([bytes[2], bytes[3]]);
        let server = u32::from_le_bytes([bytes[2], bytes[3], bytes[4], bytes[5]]);
        match u64::from(bytes[0]) {
            STORE => Self::Store(disk),
            DISK => Self::Disk(disk),
            LINK_SOCKET => Self::LinkSocket(ServerNumber(server)),
            _ => SINGLE[usize::from(bytes[0])],
        }
    }
}

/// Data of the timer's events, which no source encodes to.
const TIMER: u64 = u64::MAX;
const NO_TIME: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// The epoll instance of the I/O thread.
pub struct Poller {
    epoll: OwnedFd,
    events: Vec<Event>,
    timer: OwnedFd,
    /// When the timer expires; `None` if it is not armed.
    armed: Option<Instant>,
}

impl Poller {
    /// Returns an empty instance.
    ///
    /// # Errors
    /// If the system has no descriptors left.
    pub fn new() -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
        // Edge-triggered: each expiry is one event, and need not be read.
        epoll::add(&epoll, timer.as_fd(), EventData::new_u64(TIMER), EventFlags::IN | EventFlags::ET)?;
        Ok(Self { epoll, events: Vec::with_capacity(64), timer, armed: None })
    }

    /// Reports `source` whenever `fd` is readable (level-triggered), and writable if asked.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn add(&self, fd: BorrowedFd<'_>, source: Source, writable: bool) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, fd, EventData::new_u64(source.encode()), flags(writable))?)
    }

    /// Sets whether `fd` is also reported when it is writable.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn change(&self, fd: BorrowedFd<'_>, source: Source, writable: bool) -> io::Result<()> {
        Ok(epoll::modify(&self.epoll, fd, EventData::new_u64(source.encode()), flags(writable))?)
    }

    /// Stops reporting `fd`. Closing a descriptor does the same, unless a copy of it stays open.
    pub fn remove(&self, fd: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Waits for events, at most for `timeout` (`None`: without limit), and adds their sources to `ready`. Each comes
    /// with whether its descriptor is writable.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn wait(&mut self, ready: &mut Vec<(Source, bool)>, timeout: Option<Duration>) -> io::Result<()> {
        // A time beyond what an instant can hold never comes.
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let at_once = timeout.filter(Duration::is_zero).map(|_| NO_TIME);
        self.events.clear();
        loop {
            if let Some(until) = until.filter(|_| at_once.is_none()) {
                self.arm(until)?;
            }
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut self.events), at_once.as_ref()) {
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
            if let Some(at) = self.events.iter().position(|event| { event.data }.u64() == TIMER) {
                self.events.swap_remove(at);
                self.armed = None;
                if self.events.is_empty() && until.is_none_or(|until| Instant::now() < until) {
                    continue;
                }
            }
            break;
        }
        for event in &self.events {
            // Copies: the kernel's struct is packed.
            let (flags, data) = (event.flags, event.data);
            ready.push((Source::decode(data.u64()), flags.contains(EventFlags::OUT)));
        }
        Ok(())
    }

    /// Makes sure that the timer expires at `until` or earlier.
    fn arm(&mut self, until: Instant) -> io::Result<()> {
        if self.armed.is_some_and(|armed| armed <= until) {
            return Ok(());
        }
        // A timer set to zero would never expire.
        let left = until.saturating_duration_since(Instant::now()).max(Duration::from_nanos(1));
        let it_value = Timespec {
            // A longer time never comes.
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(left.subsec_nanos()),
        };
        let once = Itimerspec { it_interval: NO_TIME, it_value };
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once)?;
        self.armed = Some(until);
        Ok(())
    }
}

fn flags(writable: bool) -> EventFlags {
    if writable { EventFlags::IN | EventFlags::OUT } else { EventFlags::IN }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The timer is armed for later than is needed, then for earlier, then not at all. A watchdog ends a wait that misses it.
    #[test]
    fn no_timeout_is_missed() {
        let mut poller = Poller::new().unwrap();
        let (read, write) = rustix::pipe::pipe().unwrap();
        poller.add(read.as_fd(), Source::Stop, false).unwrap();
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_secs(20));
            let _ = rustix::io::write(&write, b"!");
        });
        let mut ready = Vec::new();
        poller.arm(Instant::now() + Duration::from_secs(3600)).unwrap();
        for milliseconds in [20, 40, 10] {
            let until = Instant::now() + Duration::from_millis(milliseconds);
            poller.arm(Instant::now() + Duration::from_millis(milliseconds / 2)).unwrap();
            poller.wait(&mut ready, Some(Duration::from_millis(milliseconds))).unwrap();
            assert!(ready.is_empty(), "the watchdog ended the wait");
            assert!(until <= Instant::now(), "nothing had happened");
        }
    }

    #[test]
    fn sources_survive_the_kernel() {
        let of_disks = [Source::Store(4095), Source::Store(0), Source::Disk(7)];
        let of_servers = [0, 7, u32::MAX].map(|server| Source::LinkSocket(ServerNumber(server)));
        for source in SINGLE.into_iter().chain(of_disks).chain(of_servers) {
            assert_eq!(Source::decode(source.encode()), source);
        }
    }
}
