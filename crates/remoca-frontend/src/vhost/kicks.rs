//! The events that wake the I/O thread for one device: the kicks of its queues, and commands of its control thread.

use remoca_io::wake;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::time::Timespec;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Event data of the control thread's eventfd; kicks have the number of their queue.
const CONTROL: u64 = u64::MAX;
const NO_WAIT: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// The descriptors to wait for, combined in one epoll descriptor.
pub(super) struct Kicks {
    epoll: OwnedFd,
    control: Arc<OwnedFd>,
    queues: Vec<Option<Arc<OwnedFd>>>,
}

impl Kicks {
    /// Creates a set without kicks for a device of `queue_count` queues.
    pub fn new(queue_count: u16) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let control = Arc::new(wake::new()?);
        epoll::add(&epoll, &control, EventData::new_u64(CONTROL), EventFlags::IN)?;
        Ok(Self { epoll, control, queues: (0..queue_count).map(|_| None).collect() })
    }

    /// Returns the descriptor that is readable when [`Self::take`] has events to take. It stays the same for the
    /// device's whole life.
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Returns the eventfd that the control thread raises. The device raises it too when the driver has to look at the
    /// device again.
    pub fn control(&self) -> &Arc<OwnedFd> {
        &self.control
    }

    /// Takes the pending events, and returns whether the control thread has raised its eventfd.
    pub fn take(&self) -> io::Result<bool> {
        let mut events = [epoll::Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }; 16];
        let count = epoll::wait(&self.epoll, events.as_mut_slice(), Some(&NO_WAIT))?;
        // Kicks are edge-triggered: their only purpose is to wake this thread.
        let has_control = events[..count].iter().any(|event| event.data.u64() == CONTROL);
        if has_control {
            wake::clear(&self.control);
        }
        Ok(has_control)
    }

    /// Sets the kick of a queue.
    pub fn set(&mut self, queue: u16, kick: Arc<OwnedFd>) -> Result<(), String> {
        self.remove(queue);
        let (data, flags) = (EventData::new_u64(u64::from(queue)), EventFlags::IN | EventFlags::ET);
        epoll::add(&self.epoll, &kick, data, flags)
            .map_err(|error| format!("the kick of queue {queue} cannot be waited for: {error}"))?;
        self.queues[usize::from(queue)] = Some(kick);
        Ok(())
    }

    /// Removes the kick of a queue, if it has one.
    pub fn remove(&mut self, queue: u16) {
        if let Some(old) = self.queues[usize::from(queue)].take() {
            // A descriptor that cannot be removed is gone already.
            let _ = epoll::delete(&self.epoll, &old);
        }
    }
}
