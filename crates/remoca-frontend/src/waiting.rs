//! Devices before their process executes requests: messages of front ends are answered, and requests stay in their queues.

use crate::device::Frontend;
use rustix::event::{PollFd, PollFlags, poll};
use std::os::fd::BorrowedFd;

/// Answers the messages of front ends until `done` is readable. A message that has to wait for requests waits longer.
pub fn answer_messages(mut devices: Vec<&mut Frontend>, done: BorrowedFd<'_>) {
    // An export has no messages: its clients send requests.
    devices.retain(|device| matches!(device, Frontend::Vhost(_)));
    loop {
        let sources = devices.iter().map(|device| device.event_fd()).chain([done]);
        let mut sources: Vec<_> = sources.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        let polled = poll(&mut sources, None);
        let mut ready: Vec<_> = sources.iter().map(|source| !source.revents().is_empty()).collect();
        if ready.pop() == Some(true) || polled.is_err_and(|error| error != rustix::io::Errno::INTR) {
            break;
        }
        let mut ready = ready.into_iter();
        // The driver meets the same error.
        devices.retain_mut(|device| ready.next() != Some(true) || device.handle_events().is_ok());
        devices.iter_mut().for_each(|device| device.notify());
    }
    devices.iter().for_each(|device| device.wake());
}
