//! The trace of a VM's disk requests and of its guest's evictions, in the format of [`remoca_protocol::trace`]: into a file
//! (`--trace FILE`), or to a client of the control socket (`remoca trace record`).
//!
//! A thread writes it, so that requests do not wait for a file system or for the client. Records for which the thread has no
//! room are lost. The next frame that is kept says how many, and so do the status and the log at the end. A write error
//! ends the trace with a warning: all later records are lost, too. The program of an upgrade goes on with the file, and says
//! there how many are missing.

use remoca_io::wake::WakeUp;
use remoca_io::wake::raise;
use remoca_protocol::trace::{
    FRAME_HEADER_BYTES, FrameEncoder, FrameHeader, HEAD_BYTES, NotATrace, TraceRecord, check_head, head,
};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::time::Duration;

/// Maximum number of frames that wait for the file, 2.6 MB.
const FRAMES_MAX: usize = 128;
/// How long the start waits to learn whether the file can be made, and the end waits for records that are still to be
/// written. The file system may hang.
const PATIENCE: Duration = Duration::from_secs(1);

/// A frame that waits for the thread.
struct Encoded {
    bytes: Vec<u8>,
    records: u64,
    /// Number of lost records that it tells of.
    told: u64,
}

/// State shared by the thread that writes the file and the one that records.
struct Shared {
    /// Number of records that were passed to the thread and are not in the file. They are lost if the trace has ended.
    owed: AtomicU64,
    is_open: AtomicBool,
    /// Whether the file is a pipe or a device. Waiting for it can be interrupted, so another program can take over all
    /// the same.
    is_no_file: AtomicBool,
    has_ended: AtomicBool,
    /// Number of records that were lost and never passed to the thread, and how many lost ones the file tells of. A frame without
    /// records tells the rest at the end.
    lost: AtomicU64,
    told: AtomicU64,
    /// Raised when the file is open, when no record is owed any longer, and when the trace has ended.
    wake: Arc<OwnedFd>,
}

impl Shared {
    /// Returns the frame that ends a trace whose last records were lost, if they were.
    fn last_frame(&self) -> Option<Vec<u8>> {
        let untold = in_frame(self.lost.load(Ordering::Acquire) - self.told.load(Ordering::Acquire));
        (untold > 0).then(|| FrameEncoder::new().finish(untold, false))
    }

    fn settle(&self, records: u64) {
        if self.owed.fetch_sub(records, Ordering::AcqRel) == records {
            raise(&self.wake);
        }
    }

    /// Notes that a frame is in the file.
    fn settle_frame(&self, records: u64, told: u64) {
        self.told.fetch_add(told, Ordering::AcqRel);
        self.settle(records);
    }
}

/// Returns how many of some lost records a frame can tell of, which has 32 bits for it.
fn in_frame(records: u64) -> u32 {
    u32::try_from(records).unwrap_or(u32::MAX)
}

/// The writer of a trace.
pub struct TraceWriter {
    /// `None` when the trace has ended.
    frames: Option<SyncSender<Encoded>>,
    frame: FrameEncoder,
    /// Whether the guest's evictions are recorded in `frame`.
    sees_evictions: bool,
    /// Number of lost records of which frames tell that were passed to the thread.
    passed: u64,
    /// Number of lost records that the former program of this process left to be told.
    inherited: u64,
    /// Time for which [`Self::end`] waits for the thread.
    patience: Duration,
    shared: Arc<Shared>,
    wake_up: WakeUp,
    /// Delivers the outcome of opening the file, and an error when the thread has ended.
    outcome: Receiver<io::Result<()>>,
}

impl TraceWriter {
    /// Starts a trace in the file at `path`, behind the trace that is there. If the file system does not answer within a second, the
    /// file is opened later.
    ///
    /// # Errors
    /// If the file cannot be created or is no trace, or the system has no descriptors or threads left.
    pub fn create(path: &Path) -> io::Result<Self> {
        Self::create_within(path, PATIENCE)
    }

    fn create_within(path: &Path, patience: Duration) -> io::Result<Self> {
        let this = Self { patience, ..Self::start_in(path, open_first)? };
        match this.outcome.recv_timeout(patience) {
            Ok(Err(error)) => Err(error),
            Ok(Ok(())) | Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => Ok(this),
        }
    }

    /// Continues a trace of a previous program of this process, which has lost `untold` records that the file does not tell of. Times
    /// start at zero again. A file that cannot be opened, or that is of another format, ends the trace.
    ///
    /// # Errors
    /// If the system has no descriptors or threads left.
    pub fn append(path: &Path, untold: u64) -> io::Result<Self> {
        let this = Self::start_in(path, open_again)?;
        this.shared.lost.store(untold, Ordering::Release);
        Ok(Self { inherited: untold, ..this })
    }

    fn start_in(path: &Path, open: fn(&Path) -> io::Result<File>) -> io::Result<Self> {
        let path = PathBuf::from(path);
        Self::start(move |shared, told, frames| {
            let is_no_file = std::fs::metadata(&path).is_ok_and(|file| !file.is_file());
            shared.is_no_file.store(is_no_file, Ordering::Release);
            let opened = open(&path);
            told(opened.as_ref().map(|_| ()).map_err(|error| io::Error::new(error.kind(), error.to_string())));
            write_file(opened?, frames, shared)
        })
    }

    /// Starts a trace for a client, which reads `first` and then the trace from the stream. It ends when the client is gone.
    ///
    /// # Errors
    /// If the system has no descriptors or threads left.
    pub fn send(stream: UnixStream, first: Vec<u8>) -> io::Result<Self> {
        Self::start(move |shared, told, frames| {
            shared.is_no_file.store(true, Ordering::Release);
            told(Ok(()));
            send_frames(&stream, &first, frames, shared)
        })
    }

    /// Starts the thread, which runs `work` and calls its second argument once it has opened what it writes to.
    fn start(
        work: impl FnOnce(&Shared, &mut dyn FnMut(io::Result<()>), &Receiver<Encoded>) -> io::Result<()> + Send + 'static,
    ) -> io::Result<Self> {
        let wake_up = WakeUp::new()?;
        let shared = Arc::new(Shared {
            owed: AtomicU64::new(0),
            is_open: AtomicBool::new(false),
            is_no_file: AtomicBool::new(false),
            has_ended: AtomicBool::new(false),
            lost: AtomicU64::new(0),
            told: AtomicU64::new(0),
            wake: Arc::clone(wake_up.wake()),
        });
        let (frames, queue) = sync_channel(FRAMES_MAX);
        let (tell, outcome) = sync_channel(1);
        let of_thread = Arc::clone(&shared);
        std::thread::Builder::new().name("trace".into()).spawn(move || {
            let mut told = |outcome: io::Result<()>| {
                let _ = tell.send(outcome);
                of_thread.is_open.store(true, Ordering::Release);
                raise(&of_thread.wake);
            };
            if let Err(error) = work(&of_thread, &mut told, &queue) {
                tracing::warn!("the trace ends here: {error}");
            }
            of_thread.has_ended.store(true, Ordering::Release);
            raise(&of_thread.wake);
        })?;
        let frames = Some(frames);
        let (frame, sees_evictions, passed, inherited) = (FrameEncoder::new(), false, 0, 0);
        let patience = PATIENCE;
        Ok(Self { frames, frame, sees_evictions, passed, inherited, patience, shared, wake_up, outcome })
    }

    /// Appends one record, or loses it. `sees_evictions`: whether the guest's evictions are recorded now.
    pub fn record(&mut self, record: &TraceRecord, sees_evictions: bool) {
        if self.frames.is_none() {
            self.lose(1);
            return;
        }
        if sees_evictions != self.sees_evictions {
            self.flush();
            self.sees_evictions = sees_evictions;
        }
        self.frame.push(record);
        if self.frame.is_full() {
            self.flush();
        }
    }

    /// Passes the records so far to the thread.
    pub fn flush(&mut self) {
        let records = u64::from(self.frame.records());
        if records == 0 {
            return;
        }
        let told = in_frame(self.shared.lost.load(Ordering::Acquire) - self.passed);
        let bytes = self.frame.finish(told, self.sees_evictions);
        let told = u64::from(told);
        let Some(frames) = &self.frames else { return self.lose(records) };
        self.shared.owed.fetch_add(records, Ordering::AcqRel);
        let Err(refused) = frames.try_send(Encoded { bytes, records, told }) else {
            self.passed += told;
            return;
        };
        self.shared.settle(records);
        self.lose(records);
        if let TrySendError::Disconnected(_) = refused {
            // The thread has logged the reason.
            self.frames = None;
        }
    }

    fn lose(&self, records: u64) {
        self.shared.lost.fetch_add(records, Ordering::AcqRel);
    }

    /// Returns whether the trace has ended, because its file or client takes no more.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.frames.is_none() || self.shared.has_ended.load(Ordering::Acquire)
    }

    /// Returns the number of records that were lost.
    #[must_use]
    pub fn lost(&self) -> u64 {
        let owed = if self.has_ended() { self.shared.owed.load(Ordering::Acquire) } else { 0 };
        self.shared.lost.load(Ordering::Acquire) - self.inherited + owed
    }

    /// Returns the number of records that are lost if this program ends now, of which the file does not tell.
    #[must_use]
    pub fn untold(&self) -> u64 {
        let Shared { owed, lost, told, .. } = &*self.shared;
        lost.load(Ordering::Acquire) - told.load(Ordering::Acquire) + owed.load(Ordering::Acquire)
    }

    /// Returns whether another program can take over: all records are in the file, or waiting for them is not necessary.
    #[must_use]
    pub fn is_still(&self) -> bool {
        let Shared { owed, is_open, is_no_file, has_ended, .. } = &*self.shared;
        let holds = |flag: &AtomicBool| flag.load(Ordering::Acquire);
        holds(is_open) && owed.load(Ordering::Acquire) == 0 || holds(is_no_file) || holds(has_ended)
    }

    /// Returns a descriptor that becomes readable when [`Self::is_still`] may have become true.
    #[must_use]
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake_up.fd()
    }

    /// Clears the wake-up.
    pub fn clear_wake(&self) {
        self.wake_up.clear();
    }

    /// Ends the trace as [`Self::end`] does, and waits no longer than `patience`.
    pub fn end_within(&mut self, patience: Duration) {
        self.patience = patience;
        self.end();
    }

    /// Ends the trace. Records that are not in the file within a second are lost.
    pub fn end(&mut self) {
        self.flush();
        self.frames = None;
        while self.outcome.recv_timeout(self.patience).is_ok() {}
        let lost = self.shared.lost.load(Ordering::Acquire) - self.inherited + self.shared.owed.load(Ordering::Acquire);
        if lost > 0 {
            tracing::warn!(
                "{lost} records of the trace were lost: its file or client took them too slowly, or not at all"
            );
        }
    }
}

/// Opens a file, pipe or device for a process that starts. Where a former process left a trace, which may end within a frame, it is
/// made whole.
fn open_first(path: &Path) -> io::Result<File> {
    if std::fs::metadata(path).is_ok_and(|file| !file.is_file()) {
        let mut file = File::options().write(true).open(path)?;
        file.write_all(&head())?;
        return Ok(file);
    }
    let mut file = File::options().create(true).read(true).append(true).open(path)?;
    lock(&file, path)?;
    let length = file.metadata()?.len();
    let whole = whole_bytes(&file, length).map_err(|why| {
        let text = format!(
            "there is a file {} already, and it is not overwritten: {why}. Name another file, or move this one away",
            path.display()
        );
        io::Error::new(io::ErrorKind::AlreadyExists, text)
    })?;
    if whole < length {
        tracing::warn!(
            "the trace in {} ended within a frame: its last {} bytes are removed",
            path.display(),
            length - whole
        );
        file.set_len(whole)?;
    }
    if whole == 0 {
        file.write_all(&head())?;
    } else {
        tracing::info!("the trace in {} goes on", path.display());
    }
    Ok(file)
}

/// Returns how many of the `length` bytes of a trace are its head and whole frames.
///
/// # Errors
/// If it is no trace, or a frame is damaged.
fn whole_bytes(file: &File, length: u64) -> io::Result<u64> {
    let mut first = [0; HEAD_BYTES];
    if length < HEAD_BYTES as u64 {
        let there = &mut first[..usize::try_from(length).unwrap_or(0)];
        file.read_exact_at(there, 0)?;
        return if head().starts_with(there) { Ok(0) } else { Err(io::Error::other(NotATrace::OtherFile)) };
    }
    file.read_exact_at(&mut first, 0)?;
    check_head(&first).map_err(io::Error::other)?;
    let mut whole = HEAD_BYTES as u64;
    while whole + FRAME_HEADER_BYTES as u64 <= length {
        let mut header = [0; FRAME_HEADER_BYTES];
        file.read_exact_at(&mut header, whole)?;
        let header =
            FrameHeader::parse(&header).map_err(|error| io::Error::other(format!("at byte {whole}: {error}")))?;
        let next = whole + (FRAME_HEADER_BYTES + header.length) as u64;
        if next > length {
            break;
        }
        whole = next;
    }
    Ok(whole)
}

/// Makes this process the only one that records into `file`: the frames of two VMs would be one trace. The kernel takes the lock back
/// when the file is closed.
fn lock(file: &File, path: &Path) -> io::Result<()> {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => {
            let text = format!("another process records into {}: name a file for each VM", path.display());
            Err(io::Error::new(io::ErrorKind::AlreadyExists, text))
        }
        // A file system without locks is taken as it is.
        _ => Ok(()),
    }
}

/// Opens a file to which a previous program of this process wrote a trace.
fn open_again(path: &Path) -> io::Result<File> {
    let is_file = std::fs::metadata(path).map_or(true, |file| file.is_file());
    let mut file = File::options().create(true).read(is_file).append(true).open(path)?;
    if !is_file {
        return Ok(file);
    }
    lock(&file, path)?;
    if file.metadata()?.len() == 0 {
        file.write_all(&head())?;
    } else {
        let mut first = [0; HEAD_BYTES];
        file.read_exact(&mut first)?;
        check_head(&first).map_err(io::Error::other)?;
    }
    Ok(file)
}

/// Writes frames into a file. After an error it has whole frames only, because a later program may go on with it.
fn write_file(mut file: File, frames: &Receiver<Encoded>, shared: &Shared) -> io::Result<()> {
    let mut whole = file.metadata()?.len();
    for Encoded { bytes, records, told } in frames {
        if let Err(error) = file.write_all(&bytes) {
            // A pipe has no length; what it has taken is gone.
            let _ = file.set_len(whole);
            return Err(error);
        }
        shared.settle_frame(records, told);
        whole += bytes.len() as u64;
    }
    if let Some(bytes) = shared.last_frame()
        && let Err(error) = file.write_all(&bytes)
    {
        let _ = file.set_len(whole);
        return Err(error);
    }
    Ok(())
}

/// Sends the first bytes, what a trace begins with, and the frames. Ends without an error when the client is gone.
fn send_frames(mut stream: &UnixStream, first: &[u8], frames: &Receiver<Encoded>, shared: &Shared) -> io::Result<()> {
    let gone = |error: &io::Error| matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset);
    if let Err(error) = stream.write_all(&[first, &head()].concat()) {
        return if gone(&error) { Ok(()) } else { Err(error) };
    }
    loop {
        match frames.recv_timeout(PATIENCE) {
            Ok(Encoded { bytes, records, told }) => match stream.write_all(&bytes) {
                Err(error) if gone(&error) => return Ok(()),
                result => {
                    result?;
                    shared.settle_frame(records, told);
                }
            },
            // A client of an idle VM would otherwise be missed only with the next frame.
            Err(RecvTimeoutError::Timeout) if has_hung_up(stream) => return Ok(()),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                return match shared.last_frame().map_or(Ok(()), |bytes| stream.write_all(&bytes)) {
                    Err(error) if gone(&error) => Ok(()),
                    result => result,
                };
            }
        }
    }
}

fn has_hung_up(stream: &UnixStream) -> bool {
    let mut polled = [PollFd::from_borrowed_fd(stream.as_fd(), PollFlags::RDHUP)];
    let no_time = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut polled, Some(&no_time)).is_ok_and(|count| count > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use remoca_protocol::trace::{TICK_NS, TracedOp, TracedSource, parse_trace};
    use std::io::Read;

    const LONG: Duration = Duration::from_secs(60);

    fn record(number: u64) -> TraceRecord {
        let ops = [TracedOp::Read, TracedOp::Write, TracedOp::Flush, TracedOp::Discard, TracedOp::WriteZeroes];
        TraceRecord {
            issued_ns: number * 1_000_000,
            latency_ns: number * TICK_NS,
            block: number,
            blocks: 1,
            disk: 3,
            op: ops[usize::try_from(number).unwrap() % ops.len()],
            source: if number.is_multiple_of(2) { TracedSource::Cache } else { TracedSource::Disk },
            is_partial: true,
        }
    }

    /// As [`TraceWriter::create`], however late its thread is.
    fn create(path: &Path) -> io::Result<TraceWriter> {
        TraceWriter::create_within(path, LONG)
    }

    /// As [`TraceWriter::append`], however late its thread is.
    fn append(path: &Path) -> TraceWriter {
        TraceWriter { patience: LONG, ..TraceWriter::append(path, 0).unwrap() }
    }

    #[test]
    fn a_trace_reads_back() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let records: Vec<_> = (1..2000).map(record).collect();
        let mut writer = create(file.path()).unwrap();
        let (first, second) = records.split_at(1200);
        first.iter().for_each(|record| writer.record(record, false));
        writer.end();
        assert!(writer.is_still());
        let mut writer = append(file.path());
        second.iter().for_each(|record| writer.record(record, false));
        writer.end();
        let trace = parse_trace(&std::fs::read(file.path()).unwrap()).unwrap();
        assert_eq!((trace.records, trace.lost, writer.lost()), (records, 0, 0));
    }

    /// A process that was killed while it wrote has left a part of a frame, or of the head.
    #[test]
    fn a_process_that_starts_goes_on_with_the_trace_of_a_former_one() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let write = |numbers: std::ops::Range<u64>| {
            let mut writer = create(file.path()).unwrap();
            for number in numbers {
                writer.record(&record(number), false);
                writer.flush();
            }
            writer.end();
        };
        let cut =
            |bytes: usize| file.as_file().set_len(file.as_file().metadata().unwrap().len() - bytes as u64).unwrap();
        write(1..1);
        cut(HEAD_BYTES - 3);
        write(1..4);
        for torn in [1, 30] {
            cut(torn);
            write(3..4);
        }
        let trace = parse_trace(&std::fs::read(file.path()).unwrap()).unwrap();
        assert_eq!(trace.records, (1..4).map(record).collect::<Vec<_>>());
    }

    #[test]
    fn two_processes_do_not_record_into_one_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut first = create(file.path()).unwrap();
        let Err(error) = create(file.path()) else { panic!("a second one records there") };
        assert!(error.to_string().starts_with("another process records into "), "{error}");
        let again = append(file.path());
        assert!(again.outcome.recv().unwrap().is_err(), "nor does the next program of another process");
        first.end();
        create(file.path()).unwrap().end();
    }

    #[test]
    fn a_file_that_cannot_be_made_is_said_at_once() {
        assert!(create(Path::new("/no/such/folder/trace")).is_err());
    }

    /// A file, and no device, that takes nothing.
    #[test]
    fn a_trace_that_cannot_be_written_keeps_nobody_and_loses_all_that_comes() {
        let mut writer = append(Path::new("/proc/version"));
        let mut recorded = 0;
        while writer.frames.is_some() {
            recorded += 1;
            writer.record(&record(1), false);
        }
        writer.record(&record(1), false);
        assert_eq!((writer.lost(), writer.untold()), (recorded + 1, recorded + 1));
        writer.end();
        assert!(writer.is_still());
    }

    /// Those that waited when the write failed, those of its frame and of which it told, and all that came later.
    #[test]
    fn the_next_program_tells_what_was_lost_since_a_write_failed() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut writer = TraceWriter { patience: LONG, ..TraceWriter::append(Path::new("/dev/full"), 3).unwrap() };
        for _ in 0..2 {
            writer.record(&record(1), false);
            writer.flush();
        }
        while !writer.has_ended() {
            std::thread::yield_now();
        }
        writer.record(&record(1), false);
        writer.flush();
        writer.record(&record(1), true);
        writer.flush();
        assert_eq!((writer.lost(), writer.untold()), (4, 7));
        drop(writer);

        let untold = 7;
        let mut writer = TraceWriter { patience: LONG, ..TraceWriter::append(file.path(), untold).unwrap() };
        (1..3).for_each(|number| {
            writer.record(&record(number), false);
            writer.flush();
        });
        assert_eq!(writer.lost(), 0);
        writer.end();
        assert_eq!(writer.untold(), 0);
        let trace = parse_trace(&std::fs::read(file.path()).unwrap()).unwrap();
        assert_eq!((trace.records.len(), trace.lost), (2, untold));
    }

    /// Returns a writer into a pipe in `folder` that nobody reads, and how many records it got until it lost some.
    fn recorded_into_a_full_pipe(folder: &Path) -> (TraceWriter, PathBuf, u64) {
        let path = folder.join("pipe");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        let mut writer = append(&path);
        let mut recorded: u64 = 0;
        while writer.lost() == 0 {
            recorded += 1;
            writer.record(&record(recorded), false);
        }
        (writer, path, recorded)
    }

    /// Nothing is kept after it that would tell it.
    #[test]
    fn what_is_lost_at_the_end_of_a_trace_is_counted() {
        let folder = tempfile::tempdir().unwrap();
        let (mut writer, path, recorded) = recorded_into_a_full_pipe(folder.path());
        let lost = writer.lost();
        let mut pipe = File::open(&path).unwrap();
        let reader = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            pipe.read_to_end(&mut bytes).map(|_| bytes)
        });
        writer.end();
        drop(writer);
        let trace = parse_trace(&[&head()[..], &reader.join().unwrap().unwrap()].concat()).unwrap();
        assert_eq!((trace.records.len() as u64, trace.lost), (recorded - lost, lost));
    }

    /// Nobody reads from a pipe for long: the writer goes on, and says how many records are missing, and where.
    #[test]
    fn records_that_nobody_takes_are_counted() {
        let folder = tempfile::tempdir().unwrap();
        let (mut writer, path, mut recorded) = recorded_into_a_full_pipe(folder.path());
        let lost = writer.lost();
        // Those that wait, one frame that is being written, and what a pipe holds; a frame has about 4,000.
        assert!(recorded - lost <= (FRAMES_MAX as u64 + 5) * 8192);
        let mut pipe = File::open(&path).unwrap();
        let reader = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            pipe.read_to_end(&mut bytes).map(|_| bytes)
        });
        // There is room when it has taken what was there.
        while writer.shared.owed.load(Ordering::Acquire) != 0 {
            std::thread::yield_now();
        }
        recorded += 1;
        writer.record(&record(recorded), false);
        writer.end();
        drop(writer);
        let bytes = [&head()[..], &reader.join().unwrap().unwrap()].concat();
        let trace = parse_trace(&bytes).unwrap();
        assert_eq!((trace.records.len() as u64, trace.lost), (recorded - lost, lost));
        assert_eq!(trace.records.last(), Some(&record(recorded)));
    }

    #[test]
    fn a_client_gets_a_trace_until_it_goes() {
        let (mut client, process) = UnixStream::pair().unwrap();
        let mut writer = TraceWriter::send(process, b"a reply\n".to_vec()).unwrap();
        (1..=10).for_each(|number| writer.record(&record(number), number > 5));
        writer.flush();
        assert!(!writer.has_ended());
        drop(writer);
        let mut bytes = Vec::new();
        client.read_to_end(&mut bytes).unwrap();
        let trace = parse_trace(bytes.strip_prefix(b"a reply\n").unwrap()).unwrap();
        assert_eq!(trace.records, (1..=10).map(record).collect::<Vec<_>>());

        let (client, process) = UnixStream::pair().unwrap();
        let writer = TraceWriter::send(process, Vec::new()).unwrap();
        drop(client);
        while !writer.has_ended() {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_file_of_another_format_is_left_alone() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), [7; 40]).unwrap();
        let mut writer = append(file.path());
        writer.record(&record(1), false);
        writer.end();
        assert_eq!(std::fs::read(file.path()).unwrap(), [7; 40]);
        for other in [&[7; 40][..], b"short", &[&head()[..], &[255; 40]].concat()] {
            std::fs::write(file.path(), other).unwrap();
            let Err(error) = create(file.path()) else { panic!("it is refused") };
            assert!(error.to_string().contains("it is not overwritten: "), "{error}");
            assert_eq!(std::fs::read(file.path()).unwrap(), other);
        }
    }
}
