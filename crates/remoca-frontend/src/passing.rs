//! Passes a device to another program of this process: the socket at which its guests connect, and their connections.

use crate::device::Frontend;
use remoca_io::handover::Pass;
use remoca_protocol::guests::Guests;
use remoca_protocol::handover::Listening;
use std::io;
use std::os::fd::{AsFd, RawFd};

impl Frontend {
    /// Stops listening to the guest's messages, for a program that takes over. Returns false if one is half done: the
    /// event descriptor becomes readable when that is over.
    pub fn pause(&self) -> bool {
        match self {
            Self::Vhost(device) => device.pause(),
            Self::Nbd(_) => true,
        }
    }

    /// Returns whether no request is with the driver, and none that was begun can be handed out now.
    pub fn is_idle(&self) -> bool {
        match self {
            Self::Vhost(device) => !device.has_begun(),
            Self::Nbd(export) => export.is_idle(),
        }
    }

    /// Returns whether an attached guest would be offered more if it connected again: a former program, which offered
    /// less, accepted it.
    pub fn has_news(&self) -> bool {
        match self {
            Self::Vhost(device) => device.has_news(),
            Self::Nbd(export) => export.has_news(),
        }
    }

    /// Listens to the guest's messages again.
    pub fn end_pause(&self) {
        if let Self::Vhost(device) = self {
            device.end_pause();
        }
    }

    /// Returns the listening socket and the connections of the device, for a program that continues them. `pass` returns
    /// the number of a descriptor in that program. The socket is `None` if the device shares it with others. A guest that
    /// is within a message is left out. No request may be in flight.
    ///
    /// # Errors
    /// The first error of `pass`, or if no guest could connect again.
    pub fn pass(&self, pass: &mut Pass<'_, RawFd>) -> io::Result<(Option<Listening>, Guests<RawFd>)> {
        match self {
            Self::Vhost(device) => {
                let Some((listener, path)) = device.listener() else {
                    return Err(io::Error::other(
                        "its hypervisor's connection was passed by --fd, and no other can take its place. Shut the guest \
                         down, or give --fd a listening socket",
                    ));
                };
                let socket = Listening { fd: pass(listener.as_fd())?, path: path.clone() };
                Ok((Some(socket), Guests { front_end: device.pass(pass)?, nbd: Vec::new() }))
            }
            Self::Nbd(export) => Ok((None, Guests { front_end: None, nbd: export.pass(pass)? })),
        }
    }
}
