//! The trace of a VM's disk requests (`--trace FILE`), in the format of [`remoca_protocol::trace`].
//!
//! A thread writes the file, so that requests do not wait for its file system. Records for which the thread has no room
//! are lost. The next record that is kept says how many, and so do the status and the log at the end. A write error
//! ends the trace with a warning, and has no other effect.

use remoca_io::wake::WakeUp;
use remoca_io::wake::raise;
use remoca_protocol::trace::{RECORD_BYTES, TraceRecord, lost_before};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::time::Duration;

/// Number of records that are passed to the thread together.
const CHUNK_RECORDS: usize = 512;
/// Maximum number of chunks that wait for the file, 2.6 MB.
const CHUNKS_MAX: usize = 128;
/// How long the start waits to learn whether the file can be made, and the end waits for records that are still to be
/// written. The file system may hang.
const PATIENCE: Duration = Duration::from_secs(1);

/// State shared by the thread that writes the file and the one that records.
struct Shared {
    /// Number of records that were passed to the thread and are not in the file, plus one until the file is open.
    owed: AtomicU64,
    /// Whether the file is a pipe or a device. Waiting for it can be interrupted, so another program can take over all
    /// the same.
    is_no_file: AtomicBool,
    has_ended: AtomicBool,
    /// Raised when no record is owed any longer, or the trace has ended.
    wake: Arc<OwnedFd>,
}

impl Shared {
    fn settle(&self, records: u64) {
        if self.owed.fetch_sub(records, Ordering::AcqRel) == records {
            raise(&self.wake);
        }
    }
}

/// The writer of a trace.
pub struct TraceWriter {
    /// `None` when the trace has ended.
    chunks: Option<SyncSender<Vec<u8>>>,
    chunk: Vec<u8>,
    /// Records lost since the last one in `chunk`.
    untold: u32,
    lost: u64,
    shared: Arc<Shared>,
    wake_up: WakeUp,
    /// Delivers the outcome of opening the file, and an error when the thread has ended.
    outcome: Receiver<io::Result<()>>,
}

impl TraceWriter {
    /// Starts a trace in a new file at `path`. If the file system does not answer within a second, the file is opened later.
    ///
    /// # Errors
    /// If the file cannot be created, or the system has no descriptors or threads left.
    pub fn create(path: &Path) -> io::Result<Self> {
        let this = Self::start(path, |path| File::create(path))?;
        match this.outcome.recv_timeout(PATIENCE) {
            Ok(Err(error)) => Err(error),
            Ok(Ok(())) | Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => Ok(this),
        }
    }

    /// Continues a trace of a previous program of this process. Times start at zero again. A file that cannot be opened
    /// ends the trace.
    ///
    /// # Errors
    /// If the system has no descriptors or threads left.
    pub fn append(path: &Path) -> io::Result<Self> {
        Self::start(path, |path| File::options().create(true).append(true).open(path))
    }

    fn start(path: &Path, open: fn(&Path) -> io::Result<File>) -> io::Result<Self> {
        let wake_up = WakeUp::new()?;
        let shared = Arc::new(Shared {
            owed: AtomicU64::new(1),
            is_no_file: AtomicBool::new(false),
            has_ended: AtomicBool::new(false),
            wake: Arc::clone(wake_up.wake()),
        });
        let (chunks, queue) = sync_channel(CHUNKS_MAX);
        let (tell, outcome) = sync_channel(1);
        let (path, of_thread) = (PathBuf::from(path), Arc::clone(&shared));
        std::thread::Builder::new().name("trace".into()).spawn(move || {
            let is_no_file = std::fs::metadata(&path).is_ok_and(|file| !file.is_file());
            of_thread.is_no_file.store(is_no_file, Ordering::Release);
            let opened = open(&path);
            let outcome = opened.as_ref().map(|_| ()).map_err(|error| io::Error::new(error.kind(), error.to_string()));
            let _ = tell.send(outcome);
            of_thread.settle(1);
            if let Err(error) = opened.and_then(|file| write_chunks(file, &queue, &of_thread)) {
                tracing::warn!("the trace ends here: {error}");
            }
            of_thread.has_ended.store(true, Ordering::Release);
            raise(&of_thread.wake);
        })?;
        Ok(Self { chunks: Some(chunks), chunk: Vec::new(), untold: 0, lost: 0, shared, wake_up, outcome })
    }

    /// Appends one record, or loses it.
    pub fn record(&mut self, record: &TraceRecord) {
        if self.chunks.is_none() {
            return;
        }
        let lost = std::mem::take(&mut self.untold);
        self.chunk.extend(TraceRecord { lost, ..*record }.encode());
        if self.chunk.len() >= CHUNK_RECORDS * RECORD_BYTES {
            self.flush();
        }
    }

    /// Passes the records so far to the thread.
    pub fn flush(&mut self) {
        let chunk = std::mem::take(&mut self.chunk);
        let records = (chunk.len() / RECORD_BYTES) as u64;
        if records == 0 {
            return;
        }
        let Some(chunks) = &self.chunks else { return };
        self.shared.owed.fetch_add(records, Ordering::AcqRel);
        let Err(refused) = chunks.try_send(chunk) else { return };
        self.shared.settle(records);
        match refused {
            TrySendError::Full(chunk) => {
                // The record has 32 bits for it: that many or more.
                let untold = u64::from(lost_before(&chunk)) + records;
                self.untold = u32::try_from(untold).unwrap_or(u32::MAX);
                self.lost += records;
            }
            // The thread has logged the reason.
            TrySendError::Disconnected(_) => self.chunks = None,
        }
    }

    /// Returns the number of records that were lost.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// Returns whether another program can take over: all records are in the file, or waiting for them is not necessary.
    #[must_use]
    pub fn is_still(&self) -> bool {
        let Shared { owed, is_no_file, has_ended, .. } = &*self.shared;
        owed.load(Ordering::Acquire) == 0 || [is_no_file, has_ended].iter().any(|flag| flag.load(Ordering::Acquire))
    }

    /// Returns a descriptor that becomes readable when all records are in the file, or the trace has ended.
    #[must_use]
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake_up.fd()
    }

    /// Clears the wake-up.
    pub fn clear_wake(&self) {
        self.wake_up.clear();
    }

    /// Ends the trace. Records that are not in the file within a second are lost.
    pub fn end(&mut self) {
        self.flush();
        self.chunks = None;
        while self.outcome.recv_timeout(PATIENCE).is_ok() {}
        let lost = self.lost + self.shared.owed.load(Ordering::Acquire);
        if lost > 0 {
            tracing::warn!("{lost} records of the trace were lost: its file took them too slowly, or not at all");
        }
    }
}

fn write_chunks(mut file: File, chunks: &Receiver<Vec<u8>>, shared: &Shared) -> io::Result<()> {
    for chunk in chunks {
        let result = file.write_all(&chunk);
        shared.settle((chunk.len() / RECORD_BYTES) as u64);
        result?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use remoca_protocol::trace::{TracedOp, TracedSource, parse_trace};
    use std::io::Read;

    fn record(number: u64) -> TraceRecord {
        let ops = [TracedOp::Read, TracedOp::Write, TracedOp::Flush, TracedOp::Discard, TracedOp::WriteZeroes];
        TraceRecord {
            issued_ns: number << 40,
            latency_ns: number,
            offset: number * 4096,
            length: 512,
            disk: 3,
            op: ops[usize::try_from(number).unwrap() % ops.len()],
            source: if number.is_multiple_of(2) { TracedSource::Cache } else { TracedSource::Disk },
            lost: 0,
        }
    }

    #[test]
    fn a_trace_reads_back() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let records: Vec<_> = (1..2000).map(record).collect();
        let mut writer = TraceWriter::create(file.path()).unwrap();
        let (first, second) = records.split_at(1200);
        first.iter().for_each(|record| writer.record(record));
        writer.end();
        assert!(writer.is_still());
        let mut writer = TraceWriter::append(file.path()).unwrap();
        second.iter().for_each(|record| writer.record(record));
        writer.end();
        assert_eq!((parse_trace(&std::fs::read(file.path()).unwrap()).unwrap(), writer.lost()), (records, 0));
    }

    #[test]
    fn a_file_that_cannot_be_made_is_said_at_once() {
        assert!(TraceWriter::create(Path::new("/no/such/folder/trace")).is_err());
    }

    /// A file, and no device, that takes nothing.
    #[test]
    fn a_trace_that_cannot_be_written_keeps_nobody() {
        let mut writer = TraceWriter::append(Path::new("/proc/version")).unwrap();
        while writer.chunks.is_some() {
            writer.record(&record(1));
        }
        writer.end();
        assert!(writer.is_still());
    }

    /// Nobody reads from a pipe for long: the writer goes on, and says how many records are missing, and where.
    #[test]
    fn records_that_nobody_takes_are_counted() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        let mut writer = TraceWriter::append(&path).unwrap();
        let mut recorded = 0;
        while writer.lost() == 0 {
            recorded += 1;
            writer.record(&record(recorded));
        }
        let lost = writer.lost();
        assert!(recorded - lost <= (CHUNKS_MAX as u64 + 2) * CHUNK_RECORDS as u64);
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
        writer.record(&record(recorded));
        writer.end();
        drop(writer);
        let records = parse_trace(&reader.join().unwrap().unwrap()).unwrap();
        assert_eq!(records.len() as u64, recorded - lost);
        let missing: Vec<_> = records.iter().filter(|record| record.lost > 0).collect();
        assert_eq!(missing.len(), 1);
        assert_eq!((u64::from(missing[0].lost), missing[0].latency_ns), (lost, recorded));
    }
}
