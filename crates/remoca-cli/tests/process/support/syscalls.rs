//! The system calls of one thread, as a tracer sees them: which calls, and on what.
//!
//! The tracer is a separate process, another run of this test program. In the test's process, each `waitpid` for a
//! traced child would receive the tracer's events.

use super::program::{Program, command};
use super::wait_until;
use std::collections::BTreeSet;
use std::io;
use std::os::fd::RawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Environment variables of a tracer process: the thread, and the file that it writes its findings to.
const THREAD: &str = "REMOCA_TEST_TRACED_THREAD";
const SEEN: &str = "REMOCA_TEST_TRACE";

/// Which argument of a call names its object, and whether the call waits.
#[derive(Clone, Copy, PartialEq)]
enum On {
    Nothing,
    /// The first argument is a descriptor.
    First,
    /// The first argument is a descriptor, and the call waits for it unless the descriptor or this argument says
    /// otherwise.
    Waits(Option<usize>),
    /// A mapping: of the file in this argument, unless it is anonymous.
    Mapped(usize),
    /// The first argument is a path.
    Path,
    /// The second argument is a path. If it is empty, the call is on the first argument.
    PathAt,
    /// The first argument is a descriptor, the second a command.
    Command,
    /// No descriptor; the call waits for as long as this argument says.
    WaitsFor(usize),
    /// The call waits if the operation, its second argument, says so.
    Futex,
    /// The first argument is a ring. The call waits for as many completions as the third argument says.
    Ring,
}

macro_rules! calls {
    ($($name:ident $on:expr,)*) => {
        const CALLS: &[(libc::c_long, &str, On)] = &[$((libc::$name, stringify!($name), $on),)*];
    };
}

calls! {
    SYS_read On::Waits(None), SYS_write On::Waits(None), SYS_readv On::Waits(None), SYS_writev On::Waits(None),
    SYS_recvfrom On::Waits(Some(3)), SYS_sendto On::Waits(Some(3)),
    SYS_recvmsg On::Waits(Some(2)), SYS_sendmsg On::Waits(Some(2)),
    SYS_accept4 On::Waits(None), SYS_connect On::Waits(None),
    SYS_pread64 On::First, SYS_pwrite64 On::First, SYS_preadv2 On::First, SYS_pwritev2 On::First,
    SYS_fsync On::First, SYS_fdatasync On::First, SYS_fallocate On::First, SYS_ftruncate On::First,
    SYS_fadvise64 On::First, SYS_fstat On::First, SYS_fstatfs On::First, SYS_lseek On::First, SYS_close On::First,
    SYS_fcntl On::Command, SYS_ioctl On::First, SYS_dup On::First, SYS_shutdown On::First,
    SYS_getsockopt On::First, SYS_setsockopt On::First, SYS_getsockname On::First, SYS_getpeername On::First,
    SYS_epoll_ctl On::First, SYS_epoll_wait On::First, SYS_epoll_pwait On::First, SYS_epoll_pwait2 On::First,
    SYS_timerfd_settime On::First, SYS_io_uring_enter On::Ring, SYS_getdents64 On::First,
    SYS_ppoll On::WaitsFor(2),
    SYS_mmap On::Mapped(4), SYS_munmap On::Nothing, SYS_mremap On::Nothing, SYS_mprotect On::Nothing,
    SYS_madvise On::Nothing, SYS_mincore On::Nothing, SYS_msync On::Nothing, SYS_brk On::Nothing,
    SYS_mlock On::Nothing, SYS_mlock2 On::Nothing, SYS_munlock On::Nothing,
    SYS_open On::Path, SYS_unlink On::Path, SYS_rename On::Path, SYS_stat On::Path, SYS_lstat On::Path,
    SYS_statfs On::Path, SYS_readlink On::Path, SYS_execve On::Path, SYS_mkdir On::Path, SYS_chmod On::Path,
    SYS_openat On::PathAt, SYS_unlinkat On::PathAt, SYS_newfstatat On::PathAt, SYS_statx On::PathAt,
    SYS_readlinkat On::PathAt,
    SYS_futex On::Futex, SYS_clone On::Nothing, SYS_clone3 On::Nothing, SYS_wait4 On::Nothing,
    SYS_nanosleep On::Nothing, SYS_clock_nanosleep On::Nothing, SYS_sched_yield On::Nothing,
    SYS_rt_sigprocmask On::Nothing, SYS_rt_sigaction On::Nothing, SYS_sigaltstack On::Nothing,
    SYS_eventfd2 On::Nothing, SYS_memfd_create On::Nothing, SYS_pipe2 On::Nothing, SYS_socket On::Nothing,
    SYS_socketpair On::Nothing, SYS_getrandom On::Nothing, SYS_getpid On::Nothing, SYS_gettid On::Nothing,
    SYS_geteuid On::Nothing, SYS_sched_getaffinity On::Nothing, SYS_clock_gettime On::Nothing,
    SYS_prctl On::Nothing, SYS_prlimit64 On::Nothing, SYS_sysinfo On::Nothing, SYS_restart_syscall On::Nothing,
    SYS_exit_group On::Nothing,
}

/// Names of the `fcntl` commands.
const COMMANDS: &[(i32, &str)] = &[
    (libc::F_DUPFD, "F_DUPFD"),
    (libc::F_DUPFD_CLOEXEC, "F_DUPFD_CLOEXEC"),
    (libc::F_GETFD, "F_GETFD"),
    (libc::F_SETFD, "F_SETFD"),
    (libc::F_GETFL, "F_GETFL"),
    (libc::F_SETFL, "F_SETFL"),
    (libc::F_ADD_SEALS, "F_ADD_SEALS"),
    (libc::F_OFD_SETLK, "F_OFD_SETLK"),
];

/// A running tracer.
pub struct Tracer {
    process: Program,
    seen: PathBuf,
}

impl Tracer {
    /// Starts to trace a thread. Tracing begins at its next wait for events. `folder` belongs to the tracer.
    ///
    /// # Panics
    /// If the thread cannot be traced.
    pub fn start(thread: u32, folder: &Path) -> Self {
        let seen = folder.join("seen");
        let _ = std::fs::remove_file(&seen);
        let mut tracer = command(std::env::current_exe().unwrap());
        tracer.args(["--exact", "io_thread::tracer_process", "--nocapture"]);
        tracer.env(THREAD, thread.to_string()).env(SEEN, &seen);
        let mut process = Program::start(&mut tracer, &folder.join("tracer.log"));
        wait_until("the thread is traced", || {
            assert!(process.is_running(), "{}", process.log());
            seen.with_extension("begun").exists()
        });
        Self { process, seen }
    }

    /// Ends the tracer, and returns the calls with their objects. `wake` must make the thread call something more.
    #[track_caller]
    pub fn end(mut self, mut wake: impl FnMut()) -> BTreeSet<String> {
        std::fs::write(self.seen.with_extension("end"), "").unwrap();
        wait_until("the tracer ends", || {
            wake();
            !self.process.is_running()
        });
        let seen =
            std::fs::read_to_string(&self.seen).unwrap_or_else(|error| panic!("{error}: {}", self.process.log()));
        for mark in ["begun", "end"] {
            std::fs::remove_file(self.seen.with_extension(mark)).unwrap();
        }
        seen.lines().map(str::to_owned).collect()
    }
}

/// Runs as the tracer, if this process was started as one.
pub fn be_tracer() {
    let (Ok(thread), Some(seen)) = (std::env::var(THREAD), std::env::var_os(SEEN)) else { return };
    let (thread, seen) = (thread.parse().unwrap(), PathBuf::from(seen));
    ptrace(libc::PTRACE_SEIZE, thread, 0, (libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_TRACEEXEC) as usize).unwrap();
    ptrace(libc::PTRACE_INTERRUPT, thread, 0, 0).unwrap();
    std::fs::write(seen.with_extension("begun"), "").unwrap();
    let (mut calls, mut is_in_loop) = (BTreeSet::new(), false);
    while let Some(stop) = wait(thread) {
        let mut signal = 0;
        match stop {
            Stop::Call => note(thread, &mut calls, &mut is_in_loop),
            Stop::Signal(number) => signal = number,
            Stop::Event => {}
        }
        if seen.with_extension("end").exists() {
            ptrace(libc::PTRACE_DETACH, thread, 0, signal).unwrap();
            break;
        }
        ptrace(libc::PTRACE_SYSCALL, thread, 0, signal).unwrap();
    }
    std::fs::write(seen, calls.into_iter().collect::<Vec<String>>().join("\n")).unwrap();
}

fn ptrace(request: libc::c_uint, thread: i32, address: usize, data: usize) -> io::Result<libc::c_long> {
    // SAFETY: of the requests that are made here, only PTRACE_GET_SYSCALL_INFO writes to memory of ours: to `data`, which is a
    // structure of `address` bytes there.
    match unsafe { libc::ptrace(request, thread, address, data) } {
        -1 => Err(io::Error::last_os_error()),
        done => Ok(done),
    }
}

/// Why the thread is stopped.
enum Stop {
    /// It begins or ends a system call.
    Call,
    /// It is about to receive this signal.
    Signal(usize),
    Event,
}

/// Waits until the thread stops. Returns `None` if it has ended.
fn wait(thread: i32) -> Option<Stop> {
    let mut status = 0;
    // SAFETY: the call writes to `status` alone.
    let waited = unsafe { libc::waitpid(thread, &raw mut status, libc::__WALL) };
    if waited != thread || !libc::WIFSTOPPED(status) {
        return None;
    }
    Some(match libc::WSTOPSIG(status) {
        signal if signal == libc::SIGTRAP | 0x80 => Stop::Call,
        _ if status >> 16 != 0 => Stop::Event,
        signal => Stop::Signal(usize::try_from(signal).unwrap()),
    })
}

/// Records the call that begins. Calls before the first wait for events are part of the start, which may wait. A start looks
/// for events of its guests, but does not wait for them so.
fn note(thread: i32, calls: &mut BTreeSet<String>, is_in_loop: &mut bool) {
    // SAFETY: a plain C structure, for which all zero is a valid value.
    let mut info: libc::ptrace_syscall_info = unsafe { std::mem::zeroed() };
    let size = size_of::<libc::ptrace_syscall_info>();
    ptrace(libc::PTRACE_GET_SYSCALL_INFO, thread, size, (&raw mut info) as usize).unwrap();
    if info.op != libc::PTRACE_SYSCALL_INFO_ENTRY {
        return;
    }
    // SAFETY: at the beginning of a call this is what the union holds.
    let (number, arguments) = unsafe { (info.u.entry.nr.cast_signed(), info.u.entry.args) };
    *is_in_loop |= match number {
        libc::SYS_epoll_wait | libc::SYS_epoll_pwait => arguments[3] as i32 != 0,
        libc::SYS_epoll_pwait2 => arguments[3] == 0 || bytes(thread, arguments[3], 16).iter().any(|byte| *byte != 0),
        _ => false,
    };
    if *is_in_loop {
        calls.insert(describe(thread, number, &arguments));
    }
    *is_in_loop &= number != libc::SYS_execve;
}

fn describe(thread: i32, number: libc::c_long, arguments: &[u64; 6]) -> String {
    let Some((_, name, on)) = CALLS.iter().find(|(known, ..)| *known == number) else {
        return format!("call {number}");
    };
    let name = name.trim_start_matches("SYS_");
    match *on {
        On::Nothing => name.to_owned(),
        On::First => format!("{name} {}", kind(thread, arguments[0] as RawFd)),
        On::Mapped(at) => match arguments[at] as RawFd {
            -1 => format!("{name} nothing"),
            file => format!("{name} {}", kind(thread, file)),
        },
        On::Path => format!("{name} {}", kind_of_path(&text(thread, arguments[0]))),
        On::PathAt => match text(thread, arguments[1]) {
            path if path.is_empty() => format!("{name} {}", kind(thread, arguments[0] as RawFd)),
            path => format!("{name} {}", kind_of_path(&path)),
        },
        On::Command => {
            let known = COMMANDS.iter().find(|(number, _)| u64::from(number.cast_unsigned()) == arguments[1]);
            let command = known.map_or_else(|| arguments[1].to_string(), |(_, name)| (*name).to_owned());
            format!("{name} {command} {}", kind(thread, arguments[0] as RawFd))
        }
        On::WaitsFor(at) => {
            let at_once = arguments[at] != 0 && bytes(thread, arguments[at], 16).iter().all(|byte| *byte == 0);
            format!("{name}{}", if at_once { "" } else { ", waiting" })
        }
        On::Futex => {
            let operation = arguments[1] as i32 & libc::FUTEX_CMD_MASK;
            format!("{name}{}", if operation == libc::FUTEX_WAKE { "" } else { ", waiting" })
        }
        On::Ring => format!(
            "{name} {}{}",
            kind(thread, arguments[0] as RawFd),
            if arguments[2] == 0 { "" } else { ", waiting" }
        ),
        On::Waits(flags) => {
            let on = arguments[0] as RawFd;
            let told = flags.is_some_and(|at| arguments[at] & libc::MSG_DONTWAIT as u64 != 0);
            let kind = kind(thread, on);
            let may_wait = !kind.starts_with("file ") && !told && !is_nonblocking(thread, on);
            format!("{name} {kind}{}", if may_wait { ", waiting" } else { "" })
        }
    }
}

/// Returns the kind of a descriptor of the traced process.
fn kind(thread: i32, on: RawFd) -> String {
    let link = std::fs::read_link(format!("/proc/{thread}/fd/{on}")).unwrap_or_default();
    let link = link.to_string_lossy();
    match link.split_once(":[") {
        Some(("anon_inode", kind)) => kind.trim_end_matches(']').to_owned(),
        Some((kind, _)) => kind.to_owned(),
        None if link.starts_with("anon_inode:") => link.trim_start_matches("anon_inode:").to_owned(),
        None => kind_of_path(&link),
    }
}

/// Returns the kind of the file at a path.
fn kind_of_path(path: &str) -> String {
    let path = path.trim_end_matches(" (deleted)");
    let name = path.rsplit('/').next().unwrap_or_default();
    let kind = match name {
        _ if path.starts_with("/memfd:") => "memory".to_owned(),
        "schedstat" if path.starts_with("/proc/") => "of its times".to_owned(),
        _ if path.starts_with("/proc/") || path.starts_with("/sys/") => path.to_owned(),
        _ if path.is_empty() => "nothing".to_owned(),
        name => name.trim_end_matches(|end: char| end.is_ascii_digit()).to_owned(),
    };
    format!("file {kind}")
}

fn is_nonblocking(thread: i32, on: RawFd) -> bool {
    let info = std::fs::read_to_string(format!("/proc/{thread}/fdinfo/{on}")).unwrap_or_default();
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap_or("0").trim();
    i32::from_str_radix(flags, 8).unwrap() & libc::O_NONBLOCK != 0
}

/// Returns a text in the traced process's memory.
fn text(thread: i32, address: u64) -> String {
    let bytes = bytes(thread, address, 512);
    let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(text).into_owned()
}

/// Returns at most `most` bytes of the traced process's memory.
fn bytes(thread: i32, address: u64, most: usize) -> Vec<u8> {
    let memory = std::fs::File::open(format!("/proc/{thread}/mem")).unwrap();
    let mut bytes = vec![0; most];
    let count = memory.read_at(&mut bytes, address).unwrap_or(0);
    bytes.truncate(count);
    bytes
}
