//! The eBPF side as the agent sees it: loading `bpf/capture.bpf.c`, the words shared with it, and its ring of pages.
//!
//! The program runs inside reclaim and never waits; everything that can be slow is on this side. `Shared` must be laid out
//! as in the C file, which is checked by size. Only this file maps kernel memory, and only as long as [`Capture`] lives.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use libbpf_rs::{Link, MapCore, Object, ObjectBuilder, PrintLevel, RingBuffer, RingBufferBuilder};
use rustix::mm::{MapFlags, ProtFlags};

use crate::error::AgentError;
use crate::page::PAGE_BYTES;
use crate::process::{self, TRACING_OFF};
use crate::ring::{RingReader, Run};

const PROGRAM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/capture.bpf.o"));
const SHARED_MAP: &str = ".data.shared";
const SLOTS_MAP: &str = "slots";
const STATES_MAP: &str = "slot_states";
const WAKEUPS_MAP: &str = "wakeups";

/// Maximum number of pages per wakeup of the reader: about half a batch.
const PAGES_PER_WAKEUP_MAX: u32 = 256;
/// Part of the ring that one batch may take. While a batch is written, the rest has room for pages.
const BATCHES_PER_RING: u32 = 4;
/// Number of lines kept of a refusal's log: its end, which gives the reason.
const LOG_LINE_COUNT_MAX: usize = 25;
const FUNCTION_IN_USE: &str = "a live patch or another tracer has the function __filemap_remove_folio. End that one, which \
     /sys/kernel/tracing/enabled_functions may show. The systemd unit tries again";

#[repr(C)]
struct Shared {
    freed: AtomicU64,
    slot_mask: AtomicU32,
    wakeup_mask: AtomicU32,
    paused: AtomicU32,
    sample_one_in: AtomicU32,
    reader_idle: AtomicU32,
    classes: AtomicU32,
    padding: [u32; 8],
    taken: AtomicU64,
    failed: AtomicU64,
    refused: AtomicU64,
    sampled_out: AtomicU64,
    kernel_bases: [u64; 2],
}

const _: () = assert!(size_of::<Shared>() == 112);

/// Numbers of pages since the start of the agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CaptureCounters {
    pub captured: u64,
    pub lost: u64,
    pub sampled_out: u64,
}

/// The program in the kernel; unloaded when this value is dropped.
pub struct Capture {
    object: Object,
    shared: Mapping,
    slots: Mapping,
    states: Mapping,
    slot_count: usize,
}

impl Capture {
    /// Loads the program. Captures nothing before [`Capture::attach`]. `ring_bytes` must be a power of two.
    pub fn load(ring_bytes: u32) -> Result<Capture, AgentError> {
        LOG.take();
        libbpf_rs::set_print(Some((PrintLevel::Info, keep_in_log)));
        let slot_count = (ring_bytes >> PAGE_BYTES.trailing_zeros()).max(1);
        let object = open_and_load(slot_count).map_err(refused("it did not load"))?;
        let read_only = ProtFlags::READ;
        let slots = slot_count as usize;
        let capture = Capture {
            shared: Mapping::new(&object, SHARED_MAP, size_of::<Shared>(), read_only | ProtFlags::WRITE)?,
            slots: Mapping::new(&object, SLOTS_MAP, slots * PAGE_BYTES, read_only)?,
            states: Mapping::new(&object, STATES_MAP, slots * size_of::<u64>(), read_only)?,
            slot_count: slots,
            object,
        };
        let shared = capture.shared();
        shared.slot_mask.store(slot_count - 1, Ordering::Relaxed);
        let half_a_batch = slot_count / (2 * BATCHES_PER_RING);
        shared.wakeup_mask.store(half_a_batch.clamp(1, PAGES_PER_WAKEUP_MAX) - 1, Ordering::Relaxed);
        LOG.take();
        Ok(capture)
    }

    /// Attaches the program. Evictions are captured as long as the returned link lives.
    pub fn attach(&self) -> Result<Link, AgentError> {
        let missing = || refused("it has no program")(not_found());
        let program = self.object.progs_mut().next().ok_or_else(missing)?;
        program.attach().map_err(refused("it could not be attached"))
    }

    /// Returns the maximum number of pages to take from the ring at once.
    pub fn batch_page_count_max(&self) -> usize {
        (self.slot_count / BATCHES_PER_RING as usize).max(1)
    }

    pub fn counters(&self) -> CaptureCounters {
        let shared = self.shared();
        let failed = shared.failed.load(Ordering::Relaxed);
        CaptureCounters {
            captured: shared.taken.load(Ordering::Relaxed).saturating_sub(failed),
            lost: shared.refused.load(Ordering::Relaxed) + failed,
            sampled_out: shared.sampled_out.load(Ordering::Relaxed),
        }
    }

    /// Pauses or resumes capture. While paused, evictions are only counted as lost.
    pub fn set_paused(&self, paused: bool) {
        self.shared().paused.store(u32::from(paused), Ordering::Relaxed);
    }

    pub fn set_sample_one_in(&self, one_in: u32) {
        self.shared().sample_one_in.store(one_in, Ordering::Relaxed);
    }

    /// Sets that only the pages of one class of `classes` are captured, always the same ones; 1 for all.
    pub fn set_classes(&self, classes: u32) {
        self.shared().classes.store(classes, Ordering::Relaxed);
    }

    /// Returns the reader's side of the ring. There is only one reader: a second one would free slots that are not its own.
    pub fn ring(&mut self) -> Result<(&Capture, PageRing<'_>), AgentError> {
        let capture = &*self;
        let map = find_map(&capture.object, WAKEUPS_MAP)?;
        let mut builder = RingBufferBuilder::new();
        builder.add(&map, |_| 0).map_err(refused("its wakeups cannot be read"))?;
        let wakeups = builder.build().map_err(refused("its wakeups cannot be mapped"))?;
        Ok((capture, PageRing { capture, wakeups, reader: RingReader::new(capture.states()) }))
    }

    fn shared(&self) -> &Shared {
        // SAFETY: the mapping is as large as Shared, page-aligned, and lives as long as self; everything in it that the
        // kernel changes while we look is atomic, or not looked at.
        unsafe { self.shared.address.cast().as_ref() }
    }

    fn states(&self) -> &[AtomicU64] {
        // SAFETY: the mapping holds slot_count words, is page-aligned and lives as long as self. It is mapped for reading
        // only, and so it is used.
        unsafe { std::slice::from_raw_parts(self.states.address.as_ptr().cast(), self.slot_count) }
    }
}

pub struct PageRing<'a> {
    capture: &'a Capture,
    reader: RingReader<'a>,
    wakeups: RingBuffer<'a>,
}

impl PageRing<'_> {
    /// Returns ready adjacent pages, at most `page_count_max`. The slice is page-aligned and a whole number of pages.
    pub fn ready(&mut self, page_count_max: usize) -> &[u8] {
        let Run { first_slot, page_count } = self.reader.ready(page_count_max);
        // The slots before the run have no content.
        self.free(0);
        // SAFETY: a run lies within the ring, which is mapped as long as the capture lives. The program does not write to
        // a slot between its being ready and its being freed, which needs self again.
        unsafe {
            let first = self.capture.slots.address.as_ptr().cast::<u8>().add(first_slot * PAGE_BYTES);
            std::slice::from_raw_parts(first, page_count * PAGE_BYTES)
        }
    }

    /// Returns the number of slots from the next page to the end of the ring.
    pub fn page_count_to_end(&mut self) -> usize {
        self.capture.slot_count - self.reader.ready(0).first_slot
    }

    /// Frees the slots of the first `page_count` ready pages.
    pub fn free(&mut self, page_count: usize) {
        let freed = self.reader.free(page_count);
        self.capture.shared().freed.store(freed, Ordering::Release);
    }

    /// Returns whether the program has taken tickets whose pages are not ready: another processor is copying them.
    pub fn is_being_filled(&mut self) -> bool {
        self.reader.free(0) < self.capture.shared().taken.load(Ordering::Acquire)
    }

    /// Clears the pending wakeups. With `from_first_page`, requests a wakeup at the very next page.
    pub fn arm_wakeup(&self, from_first_page: bool) {
        // A wakeup carries no data, and the next tick repairs any failure.
        self.wakeups.consume_raw();
        self.capture.shared().reader_idle.store(u32::from(from_first_page), Ordering::SeqCst);
    }

    /// Returns a descriptor that is readable when the program has woken the reader.
    pub fn wakeups(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring owns this descriptor and keeps it open as long as it lives, as the lifetime says.
        unsafe { BorrowedFd::borrow_raw(self.wakeups.epoll_fd()) }
    }
}

/// A map of the program, mapped into this process's memory; unmapped when dropped.
struct Mapping {
    address: NonNull<libc::c_void>,
    length: usize,
}

impl Mapping {
    fn new(object: &Object, name: &'static str, length: usize, protection: ProtFlags) -> Result<Mapping, AgentError> {
        let map = find_map(object, name)?;
        let map_bytes = map.value_size() as usize * map.max_entries() as usize;
        if map_bytes != length {
            return Err(refused("its maps are not laid out as expected")(not_found()));
        }
        // SAFETY: a new mapping of a map that is at least as large; no existing memory is touched.
        let address =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), length, protection, MapFlags::SHARED, map.as_fd(), 0) };
        let failed = AgentError::io(format!("cannot map the memory {name} shared with the kernel"));
        match address.map(NonNull::new) {
            Ok(Some(address)) => Ok(Mapping { address, length }),
            Ok(None) => Err(failed(std::io::ErrorKind::OutOfMemory.into())),
            Err(error) => Err(failed(error.into())),
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: address and length are those that mmap gave to this value, and nothing that borrows from it is left.
        unsafe { rustix::mm::munmap(self.address.as_ptr(), self.length).ok() };
    }
}

fn open_and_load(slot_count: u32) -> libbpf_rs::Result<Object> {
    let mut object = ObjectBuilder::default().name("remoca_agent")?.open_memory(PROGRAM)?;
    for mut map in object.maps_mut() {
        if [OsStr::new(SLOTS_MAP), OsStr::new(STATES_MAP)].contains(&map.name()) {
            map.set_max_entries(slot_count)?;
        }
    }
    object.load()
}

fn find_map<'a>(object: &'a Object, name: &str) -> Result<libbpf_rs::Map<'a>, AgentError> {
    let map = object.maps().find(|map| map.name() == OsStr::new(name));
    map.ok_or_else(|| refused("one of its maps is missing")(not_found()))
}

fn not_found() -> libbpf_rs::Error {
    libbpf_rs::Error::from_raw_os_error(libc::ENOENT)
}

/// Messages of libbpf while it loads the program. Its errors without them do not give the reason.
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
        // What libbpf was about, and the error of the kernel.
        let error_text = format!("{error:#}");
        if is_busy(&error_text) {
            let why = if process::is_tracing_off() { TRACING_OFF } else { FUNCTION_IN_USE };
            return AgentError::Busy(format!("{what}: {error_text}: {why}"));
        }
        if is_passing(error.kind()) {
            return AgentError::Io { context: what.to_owned(), source: io::Error::other(error_text) };
        }
        AgentError::ProgramRefused { reason: format!("{what}: {error_text}{}", hint(&log)), log: tail(&log) }
    }
}

/// Returns whether another attempt may succeed: the guest has no memory now, or the call was interrupted.
fn is_passing(kind: libbpf_rs::ErrorKind) -> bool {
    use libbpf_rs::ErrorKind::{Interrupted, OutOfMemory, WouldBlock};
    matches!(kind, OutOfMemory | Interrupted | WouldBlock)
}

/// Returns whether the kernel does not let the program attach for now. The kinds of libbpf's errors do not tell.
fn is_busy(error_text: &str) -> bool {
    error_text.contains(&format!("(os error {})", libc::EBUSY))
}

/// Returns an explanation of a usual refusal, or an empty text if the log shows none.
fn hint(log: &str) -> &'static str {
    if log.contains("page_offset_base") && log.contains("not resolved") {
        ". The kernel does not list its data symbols (CONFIG_KALLSYMS_ALL), or hides them (kernel.kptr_restrict=2)"
    } else if log.contains("__filemap_remove_folio") && log.contains("not found") {
        ". The kernel has no function __filemap_remove_folio: Linux 6.1 or later is needed"
    } else if log.contains("unknown func bpf_probe_read") {
        ". The kernel is locked down (/sys/kernel/security/lockdown says confidentiality), and lets nobody read its memory"
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

    /// The unit starts the agent again after exit code 1, and not after 9.
    #[test]
    fn a_guest_without_memory_is_no_refusal_of_its_kernel() {
        let code = |errno| refused("it")(libbpf_rs::Error::from_raw_os_error(errno)).exit_code();
        assert_eq!([libc::ENOMEM, libc::EAGAIN, libc::EINTR, libc::EINVAL].map(code), [1, 1, 1, 9]);
    }

    #[test]
    fn a_function_that_others_have_now_is_no_refusal_and_has_advice() {
        let busy = refused("it could not be attached")(libbpf_rs::Error::from_raw_os_error(libc::EBUSY));
        let said = busy.to_string();
        assert!(busy.exit_code() == 1 && said.contains("it could not be attached: "), "{said}");
        assert!(said.contains(FUNCTION_IN_USE) || said.contains(TRACING_OFF), "{said}");
    }

    #[test]
    fn program_has_the_maps_and_the_layout_that_this_side_expects() {
        let object = ObjectBuilder::default().open_memory(PROGRAM).unwrap();
        let value_size = |name| object.maps().find(|map| map.name() == OsStr::new(name)).map(|map| map.value_size());
        assert_eq!(value_size(SHARED_MAP), u32::try_from(size_of::<Shared>()).ok());
        assert_eq!(value_size(SLOTS_MAP), Some(4096));
        assert_eq!(value_size(STATES_MAP), Some(8));
        assert_eq!(value_size(WAKEUPS_MAP), Some(0));
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
