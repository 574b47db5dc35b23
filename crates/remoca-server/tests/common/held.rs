//! A client that holds the lock of its file: it writes there from a page of memory that never arrives.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::thread::JoinHandle;

use rustix::mm::{MapFlags, ProtFlags, UserfaultfdFlags, mmap_anonymous, munmap, userfaultfd};

const PAGE_BYTES: usize = 4096;
/// Size of the kernel's message about a page that is missing.
const MESSAGE_BYTES: usize = 32;
/// `UFFD_API` and `UFFDIO_REGISTER_MODE_MISSING` of `linux/userfaultfd.h`, and the numbers of two of its requests.
const API: u64 = 0xaa;
const MISSING: u64 = 1;
const UFFDIO_API: libc::Ioctl = 0xc018_aa3f;
const UFFDIO_REGISTER: libc::Ioctl = 0xc020_aa00;

/// The lock of a file, held by a write that does not end. Dropping it lets the write end.
pub struct Held {
    page: NonNull<libc::c_void>,
    /// Closed first of all: the page is all zeroes then.
    handler: Option<File>,
    writer: Option<JoinHandle<()>>,
}

impl Held {
    /// Returns once the lock is held.
    pub fn hold(memory: OwnedFd) -> Self {
        // SAFETY: a new mapping at an address of the kernel's choice.
        let page = unsafe {
            mmap_anonymous(std::ptr::null_mut(), PAGE_BYTES, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        };
        let page = NonNull::new(page.unwrap()).unwrap();
        // SAFETY: only the page just mapped is registered with it, to which no reference exists.
        let mut handler = File::from(unsafe { userfaultfd(UserfaultfdFlags::CLOEXEC) }.unwrap());
        let start = page.addr().get();
        request(&handler, UFFDIO_API, &mut [API, 0, 0, 0]);
        request(&handler, UFFDIO_REGISTER, &mut [start as u64, PAGE_BYTES as u64, MISSING, 0]);
        let writer = std::thread::spawn(move || {
            // SAFETY: the page is mapped until this thread has ended; the kernel reads it.
            let _written = unsafe { libc::pwrite(memory.as_raw_fd(), start as *const libc::c_void, PAGE_BYTES, 0) };
        });
        // The kernel asks for the page when the write has the lock.
        handler.read_exact(&mut [0; MESSAGE_BYTES]).unwrap();
        Self { page, handler: Some(handler), writer: Some(writer) }
    }
}

fn request(handler: &File, number: libc::Ioctl, argument: &mut [u64; 4]) {
    // SAFETY: both structures are that large, or smaller.
    let done = unsafe { libc::ioctl(handler.as_raw_fd(), number, argument.as_mut_ptr()) };
    assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
}

impl Drop for Held {
    fn drop(&mut self) {
        drop(self.handler.take());
        self.writer.take().map(JoinHandle::join);
        // SAFETY: the thread that used the page has ended.
        let _unmapped = unsafe { munmap(self.page.as_ptr(), PAGE_BYTES) };
    }
}

/// Returns whether this user may hold locks so; the test is left out otherwise.
pub fn is_root() -> bool {
    remoca_io::left_out::is_root("needs root for userfaultfd")
}
