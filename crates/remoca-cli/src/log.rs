//! The log on standard error. It never waits for a reader: lines that do not fit into a pipe or a socket are dropped and counted.
//!
//! A process that serves a guest must not stop when its journal stops. The writer blocks only where standard error is
//! a file. Standard error may be shared with other processes, so it is not made non-blocking. A pipe or a terminal is
//! opened again instead, and each write to a socket is marked as non-blocking.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::net::{SendFlags, send};
use rustix::stdio::stderr;
use std::ffi::OsStr;
use std::io::{self, IsTerminal, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, OnceLock, PoisonError};

/// Number of bytes that a pipe has room for when it polls as writable.
const PIECE_BYTES_MAX: usize = 4096;

static TARGET: OnceLock<Target> = OnceLock::new();
static STATE: Mutex<State> = Mutex::new(State { lost: 0, is_torn: false });

struct State {
    /// Number of lines dropped since the last line that was written.
    lost: u64,
    /// Whether the last line was written only in part.
    is_torn: bool,
}

/// Starts the log, and sends panics to it too. `REMOCA_LOG` sets how much is logged (for instance `debug`).
pub fn start() {
    TARGET.get_or_init(Target::of_process);
    let filter = tracing_subscriber::EnvFilter::try_from_env("REMOCA_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    let [no_colour, terminal] = ["NO_COLOR", "TERM"].map(std::env::var_os);
    let colours = io::stderr().is_terminal() && wants_colours(no_colour.as_deref(), terminal.as_deref());
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(|| Line).with_ansi(colours);
    log.with_target(false).init();
    std::panic::set_hook(Box::new(|panic| {
        let thread = std::thread::current();
        let name = thread.name().unwrap_or("<unnamed>").to_owned();
        put(format!("thread '{name}' {panic}\n{}\n", std::backtrace::Backtrace::capture()).as_bytes());
    }));
}

/// Returns whether a terminal gets colours, by the values of `NO_COLOR` and `TERM`.
fn wants_colours(no_colour: Option<&OsStr>, terminal: Option<&OsStr>) -> bool {
    no_colour.is_none_or(OsStr::is_empty) && terminal.is_none_or(|terminal| terminal != OsStr::new("dumb"))
}

/// Writer of one line.
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

/// Writes a line. If lines were dropped before it, writes a note about them first.
fn put(line: &[u8]) {
    let mut state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    let before = match (state.is_torn, state.lost) {
        (false, 0) => String::new(),
        (is_torn, lost) => {
            let end = if is_torn { "\n" } else { "" };
            format!("{end}{lost} lines of this log were dropped: its reader was too slow\n")
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

/// Standard error, in the form in which it can be written without blocking.
enum Target {
    Socket,
    /// Our own non-blocking descriptor.
    Reopened(OwnedFd),
    /// A file, or a pipe or terminal that this user may not open again, such as one of another user.
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

/// Writes as much of `text` as fits without blocking, and returns the number of bytes written.
fn write_at_once(text: &[u8]) -> usize {
    match TARGET.get_or_init(Target::of_process) {
        Target::Socket => send(stderr(), text, SendFlags::DONTWAIT | SendFlags::NOSIGNAL).unwrap_or(0),
        Target::Reopened(descriptor) => rustix::io::write(descriptor, text).unwrap_or(0),
        Target::Shared => write_where_there_is_room(stderr(), text),
    }
}

/// Writes to a blocking descriptor piece by piece, for as long as it has room. Returns the number of bytes written.
fn write_where_there_is_room(descriptor: impl AsFd, text: &[u8]) -> usize {
    let mut written = 0;
    for piece in text.chunks(PIECE_BYTES_MAX) {
        let mut ready = [PollFd::from_borrowed_fd(descriptor.as_fd(), PollFlags::OUT)];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        if !matches!(poll(&mut ready, Some(&at_once)), Ok(1)) {
            break;
        }
        match rustix::io::write(&descriptor, piece) {
            Ok(count) => written += count,
            Err(_) => break,
        }
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_gets_no_colours_that_it_or_its_user_does_not_want() {
        for (no_colour, terminal, wants) in [
            (None, Some("xterm"), true),
            (Some(""), None, true),
            (Some("1"), Some("xterm"), false),
            (None, Some("dumb"), false),
        ] {
            assert_eq!(wants_colours(no_colour.map(OsStr::new), terminal.map(OsStr::new)), wants);
        }
    }

    /// Tests a pipe that cannot be opened again, such as one of another user.
    #[test]
    fn a_pipe_that_nobody_reads_is_not_waited_for() {
        let (_reader, writer) = rustix::pipe::pipe().unwrap();
        let line = [b'x'; 3000];
        let lines = (0..1000).take_while(|_| write_where_there_is_room(&writer, &line) == line.len()).count();
        assert!((1..1000).contains(&lines), "{lines} lines of 3,000 bytes");
    }
}
