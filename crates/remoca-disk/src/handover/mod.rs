//! Upgrade in place: a process hands its descriptors to the program that takes its place under the same process id.
//!
//! ```text
//! old program   asks the new one whether it could (check) - drains - Handover: descriptors without close-on-exec, and a
//!               sealed memfd of JSON that says what they are; its number in the environment - execve
//! new program   Inheritance: reads it, or starts as after a crash, loudly
//! ```
//! Nothing is closed on the way: listening sockets keep those who connect waiting, images stay locked, an NBD server never
//! sees its client leave. The driver decides when (`driver/upgrade.rs`). See `docs/decisions/0021-upgrade.md`.

mod check;
#[cfg(feature = "testing")]
pub(crate) mod fuzz;
mod receive;

pub use check::{Ask, Checking, Verdict, confirmation};
pub use receive::Inheritance;

use remoca_store::StoreKind;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use serde::{Deserialize, Serialize};
use std::ffi::{CString, OsStr, OsString};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

/// Version of [`Description`]. A program that reads another one starts as after a crash.
pub const VERSION: u32 = 2;
/// The environment variable with the number of the description's descriptor.
const VARIABLE: &str = "REMOCA_HANDOVER";
/// The largest description that is read: 4096 disks with long names fit.
const DESCRIPTION_BYTES_MAX: u64 = 8 << 20;

/// What the descriptors are, and what an operator changed since the start. Descriptors are numbers here.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Description {
    pub version: u32,
    /// Name of the VM.
    pub name: String,
    /// Hand-overs since the first start, with this one.
    pub upgrades: u32,
    pub cache_pages: u32,
    pub cache_enabled: bool,
    pub servers: Vec<String>,
    /// The locked state file, if there is one: whatever else is found under its name is not of this VM's last moment.
    pub state: Option<RawFd>,
    pub control: Option<Listening>,
    /// Who asked for the upgrade, and waits for an answer.
    pub client: Option<RawFd>,
    pub disks: Vec<PassedDisk>,
    pub port: Option<Listening>,
    pub nbd: Vec<Listening>,
}

/// A listening socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listening {
    pub fd: RawFd,
    /// Where it is in the file system, with its inode, if this process made it: it is removed at the end.
    pub path: Option<(PathBuf, u64)>,
}

/// A disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassedDisk {
    pub name: String,
    pub image: String,
    pub socket: Option<Listening>,
    pub store: PassedStore,
    /// The guest has switched its write cache off, and sends no flushes. Programs before this field did not say so.
    #[serde(default)]
    pub write_cache_off: bool,
}

/// What holds the blocks of a disk, with nothing in flight.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassedStore {
    pub fd: RawFd,
    pub kind: StoreKind,
}

/// A hand-over in the making. Dropped, it changes nothing: the descriptors in it are copies.
#[derive(Debug, Default)]
pub struct Handover {
    pub description: Description,
    program: PathBuf,
    arguments: Vec<OsString>,
    copies: Vec<OwnedFd>,
}

impl Handover {
    /// To `program`, which gets these arguments, the first one being its name.
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
        // SAFETY: F_DUPFD on an open descriptor; the result belongs to nobody else.
        let copy = unsafe {
            use std::os::fd::FromRawFd;
            match libc::fcntl(fd.as_fd().as_raw_fd(), libc::F_DUPFD, 3) {
                -1 => return Err(io::Error::last_os_error()),
                copy => OwnedFd::from_raw_fd(copy),
            }
        };
        let number = copy.as_raw_fd();
        self.copies.push(copy);
        Ok(number)
    }

    /// Passes a listening socket.
    ///
    /// # Errors
    /// As [`Self::pass`].
    pub fn pass_socket(&mut self, fd: impl AsFd, path: Option<(PathBuf, u64)>) -> io::Result<Listening> {
        Ok(Listening { fd: self.pass(fd)?, path })
    }

    /// Becomes the new program. Comes back only if that is impossible; then nothing has changed.
    ///
    /// The signal mask stays: signals that come meanwhile wait for the new program.
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
        let inherited = std::env::vars_os().filter(|(name, _)| name != VARIABLE);
        let environment = inherited
            .chain([(VARIABLE.into(), number.to_string().into())])
            .map(|(name, value)| c_string(&[name.as_os_str(), value.as_os_str()].join(OsStr::new("="))))
            .collect::<io::Result<Vec<_>>>()?;
        let pointers = |strings: &[CString]| -> Vec<*const libc::c_char> {
            strings.iter().map(|text| text.as_ptr()).chain([std::ptr::null()]).collect()
        };
        let (arguments, environment) = (pointers(&arguments), pointers(&environment));
        remoca_io::narrow::passes("handover-described");
        // SAFETY: both lists are arrays of pointers to strings that live until the call returns, with a null pointer at the end.
        unsafe { libc::execve(program.as_ptr(), arguments.as_ptr(), environment.as_ptr()) };
        Err(io::Error::last_os_error())
    }
}

fn c_string(text: &OsStr) -> io::Result<CString> {
    Ok(CString::new(text.to_owned().into_vec())?)
}

/// Writes the description into a sealed memfd: what the new program reads is what was written.
fn write_description(description: &Description) -> io::Result<OwnedFd> {
    let fd = memfd_create("remoca-handover", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let mut file = File::from(fd);
    file.write_all(&serde_json::to_vec(description).map_err(io::Error::other)?)?;
    fcntl_add_seals(&file, SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file.into())
}
