//! The log on standard error, which nobody waits for: lines that a pipe or a socket has no room for are counted and lost.
//!
//! A process that serves a guest must not stop because its journal does. Only where standard error is a file does the writer
//! wait for that file's system. Others may use the same standard error, so it is not made non-blocking: a pipe or a terminal is
//! opened once more, and of a socket each write says that it does not wait.

use rustix::fs::{FileType, Mode, OFlags};
use rustix::net::{SendFlags, send};
use rustix::stdio::stderr;
use std::io::{self, IsTerminal, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, OnceLock, PoisonError};

static TARGET: OnceLock<Target> = OnceLock::new();
static STATE: Mutex<State> = Mutex::new(State { lost: 0, is_torn: false });

struct State {
    /// Lines since the last one that was written.
    lost: u64,
    /// The last line was written in part.
    is_torn: bool,
}

/// Sends warnings and news to standard error; `REMOCA_LOG` chooses more or less (for instance `debug`). So do panics.
pub fn start() {
    TARGET.get_or_init(Target::of_process);
    let filter = tracing_subscriber::EnvFilter::try_from_env("REMOCA_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    let colours = io::stderr().is_terminal();
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(|| Line).with_ansi(colours);
    log.with_target(false).init();
    std::panic::set_hook(Box::new(|panic| {
        let thread = std::thread::current();
        let name = thread.name().unwrap_or("<unnamed>").to_owned();
        put(format!("thread '{name}' {panic}\n{}\n", std::backtrace::Backtrace::capture()).as_bytes());
    }));
}

/// Writes one line.
struct Line;

impl Write for Line {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        put(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn put(line: &[u8]) {
    let mut state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    let before = match (state.is_torn, state.lost) {
        (false, 0) => String::new(),
        (is_torn, lost) => {
            let end = if is_torn { "\n" } else { "" };
            format!("{end}{lost} lines of this log were lost: there was no room for them\n")
        }
    };
    let text = [before.as_bytes(), line].concat();
    let written = write_at_once(&text);
    if written == text.len() {
        *state = State { lost: 0, is_torn: false };
    } else {
        state.lost += 1;
        state.is_torn |= written > 0;
    }
}

/// Standard error, as something that is written to without waiting.
enum Target {
    Socket,
    /// A descriptor of our own, not blocking.
    Reopened(OwnedFd),
    /// A file; or something that cannot be opened once more: there is no other way.
    Shared,
}

impl Target {
    fn of_process() -> Self {
        let kind = rustix::fs::fstat(stderr()).map(|stat| FileType::from_raw_mode(stat.st_mode));
        match kind {
            Ok(FileType::Socket) => Self::Socket,
            Ok(FileType::Fifo | FileType::CharacterDevice) => {
                let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
                rustix::fs::open("/proc/self/fd/2", flags, Mode::empty()).map_or(Self::Shared, Self::Reopened)
            }
            _ => Self::Shared,
        }
    }
}

/// Writes what can be written without waiting, and returns how many bytes.
fn write_at_once(text: &[u8]) -> usize {
    let written = match TARGET.get_or_init(Target::of_process) {
        Target::Socket => send(stderr(), text, SendFlags::DONTWAIT | SendFlags::NOSIGNAL),
        Target::Reopened(descriptor) => rustix::io::write(descriptor.as_fd(), text),
        Target::Shared => rustix::io::write(stderr(), text),
    };
    written.unwrap_or(0)
}
