//! The log on standard error. It never waits for a reader: lines that do not fit into a pipe or a socket are dropped and counted.
//!
//! A process that serves a guest must not stop when its journal stops. The writer blocks only where standard error is
//! a file. Standard error may be shared with other processes, so it is not made non-blocking. A pipe or a terminal is
//! opened again instead, and each write to a socket is marked as non-blocking.
//!
//! Strangers cause lines: whoever connects, says nonsense, and connects again. So each place in the program has a limit of lines in a
//! minute; those beyond it are left out and counted.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::net::{SendFlags, send};
use rustix::stdio::stderr;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::io::{self, IsTerminal, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::filter::{EnvFilter, LevelFilter};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

/// Number of bytes that a pipe has room for when it polls as writable.
const PIECE_BYTES_MAX: usize = 4096;
/// Most lines of one place in the program in a minute.
const LINES_MAX: u64 = 600;
const MINUTE: Duration = Duration::from_secs(60);
/// Level down to which lines are logged unless `REMOCA_LOG` says something else.
const DEFAULT: &str = "info";

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
    let value = std::env::var_os("REMOCA_LOG").unwrap_or_default();
    let filter = levels(&value);
    let is_understood = filter.is_some();
    let filter = filter.unwrap_or_else(|| EnvFilter::new(DEFAULT));
    let [no_colour, terminal] = ["NO_COLOR", "TERM"].map(std::env::var_os);
    let colours = io::stderr().is_terminal() && wants_colours(no_colour.as_deref(), terminal.as_deref());
    let lines = tracing_subscriber::fmt::layer().with_writer(|| Line).with_ansi(colours).with_target(false);
    tracing_subscriber::registry().with(filter).with(Limit::default()).with(lines).init();
    std::panic::set_hook(Box::new(|panic| {
        let thread = std::thread::current();
        let name = thread.name().unwrap_or("<unnamed>").to_owned();
        put(format!("thread '{name}' {panic}\n{}\n", std::backtrace::Backtrace::capture()).as_bytes());
    }));
    if !is_understood {
        tracing::warn!(
            "REMOCA_LOG={value:?} is not understood, so {DEFAULT} counts: say error, warn, info, debug, trace or off, or MODULE=LEVEL, \
             with commas between them"
        );
    }
}

/// Returns what is logged by a value of `REMOCA_LOG`: what it says, and by default [`DEFAULT`]. Returns `None` if it is not understood.
fn levels(value: &OsStr) -> Option<EnvFilter> {
    let text = value.to_str()?;
    // The library takes any other word for the name of a module.
    let is_known = |word: &str| word.is_empty() || word.contains(['=', '[']) || word.parse::<LevelFilter>().is_ok();
    let filter = || EnvFilter::builder().parse(format!("{DEFAULT},{text}")).ok();
    text.split(',').all(is_known).then(filter).flatten()
}

/// Returns whether a terminal gets colours, by the values of `NO_COLOR` and `TERM`.
fn wants_colours(no_colour: Option<&OsStr>, terminal: Option<&OsStr>) -> bool {
    no_colour.is_none_or(OsStr::is_empty) && terminal.is_none_or(|terminal| terminal != OsStr::new("dumb"))
}

/// The limit on the lines of each place in the program. Lines that only a developer asks for have none.
#[derive(Default)]
struct Limit(Mutex<HashMap<usize, Minute>>);

/// The lines of one place in the present minute.
struct Minute {
    began: Instant,
    lines: u64,
}

impl Limit {
    /// Counts a line of `place`. Returns which one of its minute it is, and how many were left out before it.
    fn count(&self, place: &'static Metadata<'static>, now: Instant) -> (u64, u64) {
        // All of the map is valid at every moment, so a panic elsewhere does not corrupt it.
        let mut places = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let minute = places.entry(std::ptr::from_ref(place).addr()).or_insert(Minute { began: now, lines: 0 });
        let mut left_out = 0;
        if now.saturating_duration_since(minute.began) >= MINUTE {
            left_out = minute.lines.saturating_sub(LINES_MAX);
            *minute = Minute { began: now, lines: 0 };
        }
        minute.lines += 1;
        (minute.lines, left_out)
    }
}

impl<S: Subscriber> Layer<S> for Limit {
    fn event_enabled(&self, event: &Event<'_>, _context: Context<'_, S>) -> bool {
        let place = event.metadata();
        if *place.level() > Level::INFO {
            return true;
        }
        let (lines, left_out) = self.count(place, Instant::now());
        if left_out > 0 {
            put(format!("{left_out} lines like the next one were left out: more than {LINES_MAX} in a minute\n")
                .as_bytes());
        }
        // There may be no later line that could say so.
        if lines == LINES_MAX {
            put(format!("lines like the next one are left out after it: {LINES_MAX} in a minute\n").as_bytes());
        }
        lines <= LINES_MAX
    }
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

    #[test]
    fn what_is_no_level_does_not_silence_the_rest() {
        for (value, shown) in [
            ("", Some("info")),
            ("debug", Some("debug")),
            ("off", Some("off")),
            ("remoca_disk=trace", Some("remoca_disk=trace,info")),
            ("remoca_disk=trace,error", Some("remoca_disk=trace,error")),
            ("debg", None),
            ("remoca_disk=all", None),
        ] {
            assert_eq!(levels(OsStr::new(value)).map(|filter| filter.to_string()).as_deref(), shown, "{value}");
        }
    }

    #[test]
    fn of_each_place_only_so_many_lines_are_written_in_a_minute() {
        let limit = Limit::default();
        let seen: std::sync::Arc<Mutex<Vec<&'static Metadata<'static>>>> = std::sync::Arc::default();
        struct Places(std::sync::Arc<Mutex<Vec<&'static Metadata<'static>>>>);
        impl<S: Subscriber> Layer<S> for Places {
            fn on_event(&self, event: &Event<'_>, _context: Context<'_, S>) {
                self.0.lock().unwrap().push(event.metadata());
            }
        }
        tracing::subscriber::with_default(
            tracing_subscriber::registry().with(Places(std::sync::Arc::clone(&seen))),
            || {
                tracing::info!("one place");
                tracing::info!("another");
            },
        );
        let places = seen.lock().unwrap().clone();
        let (began, later) = (Instant::now(), Instant::now() + MINUTE);
        let lines: Vec<_> = (0..LINES_MAX + 5).map(|_| limit.count(places[0], began)).collect();
        assert_eq!(
            (lines[0], lines.last(), limit.count(places[1], began)),
            ((1, 0), Some(&(LINES_MAX + 5, 0)), (1, 0))
        );
        assert_eq!((limit.count(places[0], later), limit.count(places[0], later)), ((1, 5), (2, 0)));
    }

    /// Tests that a flood that ends is told of, without a line that comes later.
    #[test]
    fn a_place_that_writes_too_much_is_told_of_at_once() {
        const CHILD: &str = "REMOCA_TEST_OF_LOG";
        if std::env::var_os(CHILD).is_some() {
            let log = tracing_subscriber::fmt::layer().with_writer(|| Line);
            tracing::subscriber::with_default(tracing_subscriber::registry().with(Limit::default()).with(log), || {
                (0..LINES_MAX + 5).for_each(|number| tracing::info!("line {number}"));
            });
            return;
        }
        let name = "log::tests::a_place_that_writes_too_much_is_told_of_at_once";
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        let file = std::env::temp_dir().join(format!("remoca-log-{}", std::process::id()));
        child.args(["--exact", name]).env(CHILD, "1").stderr(std::fs::File::create(&file).unwrap());
        assert!(child.output().unwrap().status.success());
        let text = std::fs::read_to_string(&file).unwrap();
        std::fs::remove_file(&file).unwrap();
        let count = |words: &str| text.lines().filter(|line| line.contains(words)).count() as u64;
        assert_eq!((count("line "), count("are left out after it")), (LINES_MAX, 1), "{text}");
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
