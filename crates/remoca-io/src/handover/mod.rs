//! Upgrade in place: a process hands its descriptors to the program that takes its place under the same process id.
//!
//! ```text
//! old program   Handover: descriptors without close-on-exec, and a sealed memfd of JSON that says what they are; its
//!               number in the environment - execve
//! new program   Inheritance: reads it, or starts as after a crash, loudly
//! ```
//! Nothing is closed on the way: clients that connect to listening sockets wait, images stay locked, and an NBD server
//! never sees its client leave. See `docs/decisions/0021-upgrade.md`.

mod receive;

pub use receive::Inheritance;

use crate::{narrow, sealed};
use remoca_protocol::handover::{BYTES_MAX, Description, Listening, VERSION};
use rustix::io::{FdFlags, fcntl_dupfd_cloexec, fcntl_setfd};
use std::ffi::{CString, OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

/// The environment variable with the number of the description's descriptor.
pub const VARIABLE: &str = "REMOCA_HANDOVER";

/// Function that passes a descriptor to the new program, and returns what stands for it there.
pub type Pass<'a, G> = dyn FnMut(BorrowedFd<'_>) -> io::Result<G> + 'a;

/// A hand-over in the making. Dropped, it changes nothing: the descriptors in it are copies.
#[derive(Debug, Default)]
pub struct Handover {
    pub description: Description,
    program: PathBuf,
    arguments: Vec<OsString>,
    copies: Vec<OwnedFd>,
}

impl Handover {
    /// Returns a hand-over to `program`, which gets these arguments, the first one being its name.
    #[must_use]
    pub fn new(program: PathBuf, arguments: Vec<OsString>) -> Self {
        let description = Description { version: VERSION, ..Description::default() };
        Self { description, program, arguments, copies: Vec::new() }
    }

    /// Passes a descriptor, and returns the number under which the new program will find it.
    ///
    /// # Errors
    /// If the process has no room for a copy.
    pub fn pass(&mut self, fd: impl AsFd) -> io::Result<RawFd> {
        let copy = fcntl_dupfd_cloexec(fd, 3)?;
        fcntl_setfd(&copy, FdFlags::empty())?;
        let number = copy.as_raw_fd();
        self.copies.push(copy);
        Ok(number)
    }

    /// Returns a copy of a descriptor that is passed under this number, or `None` if there is no such descriptor.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn copy_of(&self, number: RawFd) -> Option<OwnedFd> {
        self.copies.iter().find(|copy| copy.as_raw_fd() == number)?.try_clone().ok()
    }

    /// Passes a listening socket.
    ///
    /// # Errors
    /// As [`Self::pass`].
    pub fn pass_socket(&mut self, fd: impl AsFd, path: Option<(PathBuf, u64)>) -> io::Result<Listening> {
        Ok(Listening { fd: self.pass(fd)?, path })
    }

    /// Replaces this program with the new one. Returns only if that is impossible; nothing has changed then.
    ///
    /// The signal mask stays: signals that arrive in the meantime wait for the new program.
    #[must_use]
    pub fn exec(mut self) -> io::Error {
        match self.try_exec() {
            Ok(never) => match never {},
            Err(error) => error,
        }
    }

    fn try_exec(&mut self) -> io::Result<std::convert::Infallible> {
        let description = write_description(&self.description)?;
        let number = self.pass(&description)?;
        let program = c_string(self.program.as_os_str())?;
        let arguments = self.arguments.iter().map(|text| c_string(text)).collect::<io::Result<Vec<_>>>()?;
        // Descriptors of the service manager belong to this program: their numbers may be others in the new one.
        let old = [VARIABLE, "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"];
        let inherited = std::env::vars_os().filter(|(name, _)| !old.iter().any(|old| name == old));
        let environment = inherited
            .chain([(VARIABLE.into(), number.to_string().into())])
            .map(|(name, value)| c_string(&[name.as_os_str(), value.as_os_str()].join(OsStr::new("="))))
            .collect::<io::Result<Vec<_>>>()?;
        let pointers = |strings: &[CString]| -> Vec<*const libc::c_char> {
            strings.iter().map(|text| text.as_ptr()).chain([std::ptr::null()]).collect()
        };
        let (arguments, environment) = (pointers(&arguments), pointers(&environment));
        narrow::passes("handover-described");
        // SAFETY: both lists are arrays of pointers to strings that live until the call returns, with a null pointer at the end.
        unsafe { libc::execve(program.as_ptr(), arguments.as_ptr(), environment.as_ptr()) };
        Err(io::Error::last_os_error())
    }
}

fn c_string(text: &OsStr) -> io::Result<CString> {
    Ok(CString::new(text.to_owned().into_vec())?)
}

fn write_description(description: &Description) -> io::Result<OwnedFd> {
    let text = description.encode().map_err(io::Error::other)?;
    if text.len() as u64 > BYTES_MAX {
        return Err(io::Error::other("its description would be too long: it has too many disks or connections"));
    }
    sealed::write("remoca-handover", &text)
}
