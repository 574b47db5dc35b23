//! The receiving side: descriptors that a previous program of this process left open, or a reason to start without them.

use super::VARIABLE;
use crate::sealed;
use remoca_protocol::handover::{BYTES_MAX, Description};
use rustix::io::{FdFlags, fcntl_setfd};
use std::collections::HashMap;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

/// What was handed over. Descriptors that are not taken from it are closed when it is dropped.
#[derive(Debug, Default)]
pub struct Inheritance {
    pub description: Description,
    descriptors: HashMap<RawFd, OwnedFd>,
}

impl Inheritance {
    /// Receives what was handed over to this process, as its environment says. Returns `None` if nothing was, or if it
    /// cannot be understood. In the latter case all descriptors but the standard ones are closed, as a crash would have
    /// closed them.
    ///
    /// Must be called only once, before the program opens anything.
    #[must_use]
    pub fn receive() -> Option<Self> {
        let number = std::env::var_os(VARIABLE)?;
        let received = number
            .to_str()
            .and_then(|number| number.parse().ok())
            .ok_or_else(|| io::Error::other("its number is none"))
            .and_then(Self::read);
        match received {
            Ok(inheritance) => {
                // Descriptors that front ends passed to the previous program came without close-on-exec.
                close_all_but(inheritance.descriptors.keys().copied().collect());
                crate::narrow::passes("handover-received");
                Some(inheritance)
            }
            Err(error) => {
                tracing::error!(
                    "what the former program handed over cannot be used: {error}. This one starts as after a crash: \
                     nothing is lost, requests in flight are done again"
                );
                close_all_but(Vec::new());
                None
            }
        }
    }

    /// Reads the description. Closes its own descriptor before those in it are taken, so it cannot be one of them.
    fn read(number: RawFd) -> io::Result<Self> {
        Self::of(Description::parse(&sealed::read(adopt(number)?, BYTES_MAX)?).map_err(io::Error::other)?)
    }

    fn of(description: Description) -> io::Result<Self> {
        let mut descriptors = HashMap::new();
        for number in description.numbers() {
            if descriptors.contains_key(&number) {
                return Err(io::Error::other(format!("descriptor {number} is there twice")));
            }
            descriptors.insert(number, adopt(number)?);
        }
        Ok(Self { description, descriptors })
    }

    /// Removes and returns the descriptor of this number.
    ///
    /// # Errors
    /// If it was not handed over, or was taken before.
    pub fn take(&mut self, number: RawFd) -> io::Result<OwnedFd> {
        self.descriptors.remove(&number).ok_or_else(|| io::Error::other(format!("descriptor {number} was not passed")))
    }
}

/// Takes ownership of a descriptor that was left open for this program, and sets close-on-exec, so that no other
/// program gets it.
fn adopt(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: only asks whether the number is an open descriptor.
    if number <= 2 || unsafe { libc::fcntl(number, libc::F_GETFD) } < 0 {
        return Err(io::Error::other(format!("there is no descriptor {number}")));
    }
    // SAFETY: it is open, was left open for this use, and `of` takes none twice.
    let fd = unsafe { OwnedFd::from_raw_fd(number) };
    fcntl_setfd(&fd, FdFlags::CLOEXEC)?;
    Ok(fd)
}

/// Closes all descriptors of this new program that are neither standard nor in `kept`. Otherwise the previous program's
/// locks would keep this one out, and its guest's memory would not be freed.
fn close_all_but(mut kept: Vec<RawFd>) {
    kept.sort_unstable();
    let mut first = 3;
    for end in kept.into_iter().filter_map(|fd| u32::try_from(fd).ok()).chain([u32::MAX]) {
        if first < end {
            // SAFETY: the program has just begun: it owns no descriptors but the standard ones and those that are kept.
            unsafe { libc::syscall(libc::SYS_close_range, first, end - 1, 0_u32) };
        }
        first = end.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Handover, write_description};
    use super::*;
    use remoca_protocol::handover::{Listening, VERSION};
    use std::os::fd::{AsRawFd, IntoRawFd};

    /// As the new program sees it.
    fn received(description: &Description) -> io::Result<Inheritance> {
        Inheritance::read(write_description(description).unwrap().into_raw_fd())
    }

    #[test]
    fn descriptors_are_found_under_their_numbers() {
        let mut handover = Handover::new("/bin/true".into(), Vec::new());
        let file = tempfile::tempfile().unwrap();
        let fd = handover.pass(&file).unwrap();
        assert_ne!(fd, file.as_raw_fd());
        handover.description.port = Some(Listening { fd, path: Some(("/run/x".into(), 7)) });
        let state = handover.pass(&file).unwrap();
        handover.description.state = Some(state);
        std::mem::forget(std::mem::take(&mut handover.copies));
        let mut inheritance = received(&handover.description).unwrap();
        assert_eq!(inheritance.description, handover.description);
        let taken = inheritance.take(fd).unwrap();
        assert!(rustix::io::fcntl_getfd(&taken).unwrap().contains(FdFlags::CLOEXEC));
        assert!(inheritance.take(fd).is_err(), "one owner");
        assert!(inheritance.take(state).is_ok());
    }

    #[test]
    fn what_is_odd_is_refused() {
        let version = Description { version: VERSION + 1, ..Description::default() };
        let error = received(&version).unwrap_err().to_string();
        assert!(error.contains(&format!("version {}", VERSION + 1)), "{error}");
        let closed = Description { version: VERSION, client: Some(1_000_000), ..Description::default() };
        assert!(received(&closed).unwrap_err().to_string().contains("no descriptor"));
        let standard = Description { version: VERSION, client: Some(1), ..Description::default() };
        assert!(received(&standard).unwrap_err().to_string().contains("no descriptor 1"));
        let fd = tempfile::tempfile().unwrap().into_raw_fd();
        let twice = Listening { fd, path: None };
        let twice =
            Description { version: VERSION, port: Some(twice.clone()), control: Some(twice), ..Description::default() };
        assert!(received(&twice).unwrap_err().to_string().contains("twice"));
        let file = tempfile::tempfile().unwrap().into_raw_fd();
        assert!(Inheritance::read(file).unwrap_err().to_string().contains("sealed"));
        assert!(Inheritance::read(-1).is_err());
        // It names its own descriptor.
        let itself = Description { version: VERSION, client: Some(900), ..Description::default() };
        let fd = rustix::io::fcntl_dupfd_cloexec(write_description(&itself).unwrap(), 900).unwrap();
        assert_eq!(fd.as_raw_fd(), 900);
        assert!(Inheritance::read(fd.into_raw_fd()).unwrap_err().to_string().contains("no descriptor 900"));
    }
}
