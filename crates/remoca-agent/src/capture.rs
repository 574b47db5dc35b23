//! The eBPF side as the agent sees it: loading `bpf/capture.bpf.c`, the words shared with it, and its ring of pages.
//!
//! The program runs inside reclaim and never waits; everything that can be slow is on this side. `Shared` must be laid out
//! as in the C file, which the loader checks by size. Only this file maps kernel memory.

use std::cell::RefCell;
use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

use libbpf_rs::{Link, MapCore, Object, ObjectBuilder, PrintLevel, RingBuffer, RingBufferBuilder};
use rustix::mm::{MapFlags, ProtFlags};

use crate::batch::Batch;
use crate::error::AgentError;

const PROGRAM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/capture.bpf.o"));
const SHARED_MAP: &str = ".data.shared";
const RING_MAP: &str = "ring";
/// Of a refusal's log, the part that says why.
const LOG_LINE_COUNT_MAX: usize = 25;

#[repr(C)]
struct Shared {
    paused: AtomicU32,
    sample_one_in: AtomicU32,
    reader_idle: AtomicU32,
    padding: [u32; 13],
    captured: AtomicU64,
    lost: AtomicU64,
    sampled_out: AtomicU64,
    kernel_bases: [u64; 2],
}

const _: () = assert!(size_of::<Shared>() == 104);

/// Pages since the start of the agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CaptureCounters {
    pub captured: u64,
    pub lost: u64,
    pub sampled_out: u64,
}

/// The program in the kernel. Attached while `link` lives; gone with this value.
pub struct Capture {
    object: Object,
    link: Option<Link>,
    shared: NonNull<Shared>,
}

impl Capture {
    /// Loads the program; nothing is captured before [`Capture::attach`].
    pub fn load(ring_bytes: u32) -> Result<Capture, AgentError> {
        LOG.take();
        libbpf_rs::set_print(Some((PrintLevel::Info, keep_in_log)));
        let object = open_and_load(ring_bytes).map_err(refused("it did not load"))?;
        let shared = map_shared(&object)?;
        let capture = Capture { object, link: None, shared };
        capture.set_sample_one_in(1);
        LOG.take();
        Ok(capture)
    }

    pub fn attach(&mut self) -> Result<(), AgentError> {
        let program = self.object.progs_mut().next();
        let program = program.ok_or_else(|| refused("it has no program")(libbpf_rs::Error::from_raw_os_error(2)))?;
        self.link = Some(program.attach().map_err(refused("it could not be attached"))?);
        Ok(())
    }

    pub fn detach(&mut self) {
        self.link = None;
    }

    pub fn counters(&self) -> CaptureCounters {
        let shared = self.shared();
        CaptureCounters {
            captured: shared.captured.load(Ordering::Relaxed),
            lost: shared.lost.load(Ordering::Relaxed),
            sampled_out: shared.sampled_out.load(Ordering::Relaxed),
        }
    }

    /// While paused, evictions are counted as lost and cost nothing more.
    pub fn set_paused(&self, paused: bool) {
        self.shared().paused.store(u32::from(paused), Ordering::Relaxed);
    }

    pub fn set_sample_one_in(&self, one_in: u32) {
        self.shared().sample_one_in.store(one_in, Ordering::Relaxed);
    }

    /// Asks for a wakeup by the very next page; without it they come once for many pages.
    pub fn ask_for_wakeup(&self) {
        self.shared().reader_idle.store(1, Ordering::SeqCst);
    }

    fn shared(&self) -> &Shared {
        // SAFETY: the mapping is as large as Shared (checked by map_shared), lives as long as self, and everything in it
        // that the kernel changes is atomic.
        unsafe { self.shared.as_ref() }
    }

    /// The pages captured, put into `batch` as they are read.
    pub fn ring<'a>(&'a self, batch: &'a RefCell<Batch>) -> Result<PageRing<'a>, AgentError> {
        let not_there = || refused("its ring is missing")(libbpf_rs::Error::from_raw_os_error(2));
        let map = self.object.maps().find(|map| map.name() == OsStr::new(RING_MAP)).ok_or_else(not_there)?;
        let mut builder = RingBufferBuilder::new();
        let into_batch = move |page: &[u8]| {
            let taken = batch.borrow_mut().push(page, Instant::now());
            if taken { 0 } else { -libc::ENOSPC }
        };
        builder.add(&map, into_batch).map_err(refused("its ring could not be read"))?;
        Ok(PageRing { ring: builder.build().map_err(refused("its ring could not be mapped"))? })
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        // SAFETY: the address and size are those that map_shared got; nobody else has them.
        unsafe { rustix::mm::munmap(self.shared.as_ptr().cast(), size_of::<Shared>()).ok() };
    }
}

pub struct PageRing<'a> {
    ring: RingBuffer<'a>,
}

impl PageRing<'_> {
    /// Moves at most `page_count_max` pages into the batch; tells how many.
    pub fn read(&self, page_count_max: usize) -> usize {
        if page_count_max == 0 {
            return 0;
        }
        usize::try_from(self.ring.consume_raw_n(page_count_max)).unwrap_or(0)
    }

    /// Readable when the program woke the reader.
    pub fn wakeups(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring owns this descriptor and keeps it open as long as it lives, which the lifetime says.
        unsafe { BorrowedFd::borrow_raw(self.ring.epoll_fd()) }
    }
}

fn open_and_load(ring_bytes: u32) -> libbpf_rs::Result<Object> {
    let mut object = ObjectBuilder::default().open_memory(PROGRAM)?;
    for mut map in object.maps_mut() {
        if map.name() == OsStr::new(RING_MAP) {
            map.set_max_entries(ring_bytes)?;
        }
    }
    object.load()
}

fn map_shared(object: &Object) -> Result<NonNull<Shared>, AgentError> {
    let mismatch =
        || refused("its shared words are not as expected")(libbpf_rs::Error::from_raw_os_error(libc::EINVAL));
    let map = object.maps().find(|map| map.name() == OsStr::new(SHARED_MAP)).ok_or_else(mismatch)?;
    if map.value_size() as usize != size_of::<Shared>() {
        return Err(mismatch());
    }
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    let (fd, length) = (map.as_fd(), size_of::<Shared>());
    // SAFETY: a new mapping of a map that libbpf made mappable; no existing memory is touched.
    let address = unsafe { rustix::mm::mmap(std::ptr::null_mut(), length, protection, MapFlags::SHARED, fd, 0) };
    let address =
        address.map_err(|error| AgentError::io("cannot map the words shared with the kernel")(error.into()))?;
    NonNull::new(address.cast()).ok_or_else(mismatch)
}

/// What libbpf says while it loads. Its errors alone do not tell why.
static LOG: Log = Log(Mutex::new(String::new()));

struct Log(Mutex<String>);

impl Log {
    fn take(&self) -> String {
        self.0.lock().map(|mut text| std::mem::take(&mut *text)).unwrap_or_default()
    }
}

fn keep_in_log(_level: PrintLevel, text: String) {
    if let Ok(mut log) = LOG.0.lock() {
        log.push_str(&text);
    }
}

fn refused(what: &'static str) -> impl Fn(libbpf_rs::Error) -> AgentError {
    move |error| {
        let log = LOG.take();
        AgentError::ProgramRefused { reason: format!("{what}: {}{}", error, hint(&log)), log: tail(&log) }
    }
}

/// What the usual refusals mean.
fn hint(log: &str) -> &'static str {
    if log.contains("page_offset_base") && log.contains("not resolved") {
        ". The kernel does not list its data symbols (CONFIG_KALLSYMS_ALL), or hides them (kernel.kptr_restrict=2)"
    } else if log.contains("__filemap_remove_folio") && log.contains("not found") {
        ". The kernel has no function __filemap_remove_folio: Linux 5.17 or later is needed"
    } else if log.contains("Operation not permitted") {
        ". The kernel may be locked down (see /sys/kernel/security/lockdown), which forbids reading its memory"
    } else {
        ""
    }
}

fn tail(log: &str) -> String {
    let lines: Vec<_> = log.lines().collect();
    lines[lines.len().saturating_sub(LOG_LINE_COUNT_MAX)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_has_the_maps_and_the_layout_that_this_side_expects() {
        let object = ObjectBuilder::default().open_memory(PROGRAM).unwrap();
        let shared = object.maps().find(|map| map.name() == OsStr::new(SHARED_MAP)).unwrap();
        assert_eq!(shared.value_size() as usize, size_of::<Shared>());
        assert!(object.maps().any(|map| map.name() == OsStr::new(RING_MAP)));
        let programs: Vec<_> = object.progs().map(|program| program.name().to_owned()).collect();
        assert_eq!(programs, ["evicted"]);
    }

    #[test]
    fn log_is_cut_to_its_end() {
        let log: String = (0..100).map(|line| format!("line {line}\n")).collect();
        let tail = tail(&log);
        assert_eq!(tail.lines().count(), LOG_LINE_COUNT_MAX);
        assert!(tail.ends_with("line 99"));
    }
}
