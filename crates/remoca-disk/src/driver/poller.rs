//! An epoll instance whose events carry what they are about.

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

/// What a descriptor belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    Stop,
    Control,
    LinkWake,
    LinkSocket,
    Store(u16),
    /// The device of a disk.
    Disk(u16),
    Port,
    /// NBD clients that negotiate.
    Nbd,
}

impl Source {
    fn encode(self) -> u64 {
        let pack = |kind: u64, disk: u16| kind | u64::from(disk) << 16;
        match self {
            Self::Stop => pack(0, 0),
            Self::Control => pack(1, 0),
            Self::LinkWake => pack(2, 0),
            Self::LinkSocket => pack(3, 0),
            Self::Store(disk) => pack(4, disk),
            Self::Disk(disk) => pack(5, disk),
            Self::Port => pack(6, 0),
            Self::Nbd => pack(7, 0),
        }
    }

    fn decode(data: u64) -> Self {
        let bytes = data.to_le_bytes();
        let disk = u16::from_le_bytes([bytes[2], bytes[3]]);
        match bytes[0] {
            0 => Self::Stop,
            1 => Self::Control,
            2 => Self::LinkWake,
            3 => Self::LinkSocket,
            4 => Self::Store(disk),
            5 => Self::Disk(disk),
            6 => Self::Port,
            _ => Self::Nbd,
        }
    }
}

/// The epoll instance of the I/O thread.
pub struct Poller {
    epoll: OwnedFd,
    events: Vec<Event>,
}

impl Poller {
    /// An empty instance.
    ///
    /// # Errors
    /// If the system has none left.
    pub fn new() -> io::Result<Self> {
        Ok(Self { epoll: epoll::create(CreateFlags::CLOEXEC)?, events: Vec::with_capacity(64) })
    }

    /// Reports `source` whenever `fd` is readable (level-triggered), and writable if asked.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn add(&self, fd: BorrowedFd<'_>, source: Source, writable: bool) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, fd, EventData::new_u64(source.encode()), flags(writable))?)
    }

    /// Changes whether `fd` is reported when writable.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn change(&self, fd: BorrowedFd<'_>, source: Source, writable: bool) -> io::Result<()> {
        Ok(epoll::modify(&self.epoll, fd, EventData::new_u64(source.encode()), flags(writable))?)
    }

    /// Reports `fd` no more. Closing a descriptor does the same, unless a copy of it stays open.
    pub fn remove(&self, fd: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Waits for events (`None`: as long as it takes), and adds them to `ready` with whether they are about writing.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn wait(&mut self, ready: &mut Vec<(Source, bool)>, timeout: Option<Duration>) -> io::Result<()> {
        let timeout = timeout.map(|timeout| rustix::event::Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(timeout.subsec_nanos()),
        });
        self.events.clear();
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut self.events), timeout.as_ref()) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        for event in &self.events {
            // Copies: the kernel's struct is packed.
            let (flags, data) = (event.flags, event.data);
            ready.push((Source::decode(data.u64()), flags.contains(EventFlags::OUT)));
        }
        Ok(())
    }
}

fn flags(writable: bool) -> EventFlags {
    if writable { EventFlags::IN | EventFlags::OUT } else { EventFlags::IN }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_survive_the_kernel() {
        let all = [
            Source::Stop,
            Source::Control,
            Source::LinkWake,
            Source::LinkSocket,
            Source::Store(4095),
            Source::Disk(7),
            Source::Port,
            Source::Nbd,
        ];
        for source in all {
            assert_eq!(Source::decode(source.encode()), source);
        }
    }
}
