//! Reads and rewrites the records of a data set. Every byte is checked and every access timed.

use std::{
    collections::BTreeSet,
    fs::{File, OpenOptions},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::PathBuf,
    time::{Duration, Instant},
};

use serde::Serialize;

use super::{
    Faults,
    dataset::{self, AlignedBuffer, Manifest},
    histogram::{Histogram, Summary},
    journal::{After, Versions, Writer, Written},
    pattern::{Chooser, Pattern, Random},
    signature::{Place, SECTOR_SIZE},
};
use crate::error::{Context, Error, Result};

const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Clone, Debug)]
pub struct Options {
    pub folder: PathBuf,
    /// Size in bytes, a multiple of 512.
    pub record_size: usize,
    pub pattern: Pattern,
    pub alpha: f64,
    pub seed: u64,
    /// Number of accesses that are made first and reported separately.
    pub warmup_count: u64,
    /// Number of accesses after that, unless the time or the stop file ends them first.
    pub count: u64,
    pub time_limit: Option<Duration>,
    /// File whose appearance ends the accesses.
    pub stop_file: Option<PathBuf>,
    pub direct: bool,
    pub writes: Option<WriteOptions>,
    /// Duration above which each access is reported individually; `None` for no such reports.
    pub pause: Option<Duration>,
}

#[derive(Clone, Debug)]
pub struct WriteOptions {
    /// Number of accesses out of 100 that rewrite the record.
    pub percent: u64,
    /// Journal file, on another disk than the data. Versions continue from its content.
    pub journal: PathBuf,
    /// Number of writes between two fsyncs; 0 for none.
    pub sync_interval: u64,
}

/// Event during the accesses: progress once a second, the end of the warm-up, and pauses on request.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    Progress(Progress),
    WarmupDone {
        seconds: f64,
    },
    /// Pauses are reported from now on.
    Started,
    Pause(Pause),
}

/// A slow access, including the fsync after it.
#[derive(Clone, Debug, Serialize)]
pub struct Pause {
    /// Time from [`Event::Started`] to the end of the access.
    pub end_us: u64,
    pub length_us: u64,
}

#[derive(Clone, Debug, Serialize)]
pub struct Progress {
    /// Time since the first access.
    pub seconds: f64,
    pub warmup: bool,
    /// Reads since the first access, warm-up included.
    pub reads: u64,
    pub writes: u64,
    /// Latencies of the reads since the last progress event.
    pub interval_reads: u64,
    pub interval_mean_us: f64,
    pub io_errors: u64,
    pub wrong_signatures: u64,
}

#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub record_size: usize,
    pub record_count: u64,
    pub warmup: Phase,
    pub measured: Phase,
    #[serde(flatten)]
    pub faults: Faults,
}

#[derive(Clone, Debug, Serialize)]
pub struct Phase {
    pub seconds: f64,
    /// Time in the read call only, without the check.
    pub reads: Summary,
    /// Time in the write call only.
    pub writes: Summary,
}

/// Accesses records and returns a report. Errors of single accesses are counted, not returned.
pub fn access(options: &Options, mut tell: impl FnMut(&Event)) -> Result<Report> {
    let mut run = Run::new(options)?;
    let started = Instant::now();
    if options.pause.is_some() {
        tell(&Event::Started);
    }
    let mut pace = Pace { started, last: started, interval: Histogram::default(), reads: 0, writes: 0 };
    let warmup = run.phase(options.warmup_count, None, &mut pace, true, &mut tell);
    if options.warmup_count > 0 {
        tell(&Event::WarmupDone { seconds: started.elapsed().as_secs_f64() });
    }
    let measured = run.phase(options.count, options.time_limit, &mut pace, false, &mut tell);
    run.sync();
    Ok(Report {
        record_size: options.record_size,
        record_count: run.records.count(),
        warmup,
        measured,
        faults: run.faults,
    })
}

/// Positions of the records: each file holds as many whole ones as fit.
struct Records {
    /// Number of records before and in each file.
    ends: Vec<u64>,
    size: u64,
}

impl Records {
    fn new(manifest: &Manifest, size: u64) -> Records {
        let mut end = 0;
        let add = |entry: &dataset::FileEntry| {
            end += entry.size / size;
            end
        };
        Records { ends: manifest.files.iter().map(add).collect(), size }
    }

    fn count(&self) -> u64 {
        self.ends.last().copied().unwrap_or_default()
    }

    /// Returns the index of the record's file, and its offset in that file.
    fn locate(&self, record: u64) -> (usize, u64) {
        let file = self.ends.partition_point(|&end| end <= record);
        let before = if file == 0 { 0 } else { self.ends[file - 1] };
        (file, (record - before) * self.size)
    }
}

struct Run<'a> {
    options: &'a Options,
    manifest: Manifest,
    files: Vec<File>,
    records: Records,
    chooser: Chooser,
    /// Decides which accesses write. It is separate from the chooser, so that the same records are accessed whatever
    /// the share.
    coin: Random,
    versions: Versions,
    journal: Option<Writer>,
    unsynced: BTreeSet<usize>,
    writes_since_sync: u64,
    buffer: AlignedBuffer,
    faults: Faults,
}

/// State of the progress events.
struct Pace {
    started: Instant,
    last: Instant,
    interval: Histogram,
    reads: u64,
    writes: u64,
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

impl<'a> Run<'a> {
    fn new(options: &'a Options) -> Result<Run<'a>> {
        let size = options.record_size;
        if size == 0 || !size.is_multiple_of(SECTOR_SIZE) {
            return Err(Error::Invalid(format!("a record size of {size} bytes is not a multiple of 512")));
        }
        let manifest = Manifest::read(&options.folder)?;
        let records = Records::new(&manifest, size as u64);
        if records.count() == 0 {
            return Err(Error::Invalid(format!("no file holds a record of {size} bytes")));
        }
        let (mut versions, mut journal) = (Versions::default(), None);
        if let Some(writes) = &options.writes {
            if writes.journal.exists() {
                versions = Versions::read(&writes.journal, After::Order).context_path("reading", &writes.journal)?;
            }
            journal = Some(Writer::open(&writes.journal).context_path("opening", &writes.journal)?);
        }
        // Without writes the files may be on a file system that is mounted read-only.
        let writes = options.writes.as_ref().is_some_and(|writes| writes.percent > 0);
        let mut files = Vec::new();
        for entry in &manifest.files {
            let path = options.folder.join(&entry.name);
            let flags = if options.direct { libc::O_DIRECT } else { 0 };
            let file = OpenOptions::new().read(true).write(writes).custom_flags(flags).open(&path);
            files.push(file.context_path("opening", &path)?);
        }
        Ok(Run {
            chooser: Chooser::new(options.pattern, options.alpha, records.count(), options.seed),
            coin: Random::new(options.seed.wrapping_add(1)),
            buffer: AlignedBuffer::new(size),
            unsynced: BTreeSet::new(),
            writes_since_sync: 0,
            faults: Faults::default(),
            options,
            manifest,
            files,
            records,
            versions,
            journal,
        })
    }

    fn phase(
        &mut self,
        count: u64,
        time_limit: Option<Duration>,
        pace: &mut Pace,
        warmup: bool,
        tell: &mut impl FnMut(&Event),
    ) -> Phase {
        let started = Instant::now();
        let (mut reads, mut writes) = (Histogram::default(), Histogram::default());
        for _ in 0..count {
            let (file, offset) = self.records.locate(self.chooser.choose());
            let write_percent = self.options.writes.as_ref().map_or(0, |writes| writes.percent);
            let begun = Instant::now();
            if self.coin.below(100) < write_percent {
                writes.record(self.write(file, offset));
                pace.writes += 1;
            } else {
                let latency = self.read(file, offset);
                reads.record(latency);
                pace.interval.record(latency);
                pace.reads += 1;
            }
            let length = begun.elapsed();
            if self.options.pause.is_some_and(|pause| length > pause) {
                tell(&Event::Pause(Pause { end_us: micros(pace.started.elapsed()), length_us: micros(length) }));
            }
            if pace.last.elapsed() >= PROGRESS_INTERVAL {
                tell(&Event::Progress(pace.progress(warmup, &self.faults)));
                if self.options.stop_file.as_ref().is_some_and(|path| path.exists()) {
                    break;
                }
            }
            if time_limit.is_some_and(|limit| started.elapsed() >= limit) {
                break;
            }
        }
        Phase { seconds: started.elapsed().as_secs_f64(), reads: reads.summary(), writes: writes.summary() }
    }

    /// Reads one record and checks it. Returns how long the read took.
    fn read(&mut self, file: usize, offset: u64) -> Duration {
        let entry = &self.manifest.files[file];
        let bytes = self.buffer.bytes();
        let started = Instant::now();
        let result = self.files[file].read_exact_at(bytes, offset);
        let latency = started.elapsed();
        match result {
            Ok(()) => {
                let place = Place { seed: self.manifest.seed, file: entry.id, offset };
                dataset::check(bytes, &entry.name, place, &self.versions, &mut self.faults);
            }
            Err(error) => self.faults.io_error(&format!("reading {} offset {offset}", entry.name), &error),
        }
        latency
    }

    /// Rewrites one record with the next version. Returns how long the write took.
    fn write(&mut self, file: usize, offset: u64) -> Duration {
        let entry = &self.manifest.files[file];
        let length = self.records.size;
        let write = Written { file: entry.id, offset, length, version: self.versions.newest() + 1 };
        let bytes = self.buffer.bytes();
        dataset::fill(bytes, Place { seed: self.manifest.seed, file: entry.id, offset }, write.version);
        self.versions.begun(write);
        let place = format!("writing {} offset {offset}", entry.name);
        if let Some(Err(error)) = self.journal.as_mut().map(|journal| journal.begun(write)) {
            self.faults.io_error("the journal", &error);
        }
        let started = Instant::now();
        let result = self.files[file].write_all_at(bytes, offset);
        let latency = started.elapsed();
        match result {
            Ok(()) => {
                self.versions.done(write);
                if let Some(Err(error)) = self.journal.as_mut().map(|journal| journal.done(write)) {
                    self.faults.io_error("the journal", &error);
                }
            }
            Err(error) => self.faults.io_error(&place, &error),
        }
        self.unsynced.insert(file);
        self.writes_since_sync += 1;
        let interval = self.options.writes.as_ref().map_or(0, |writes| writes.sync_interval);
        if interval > 0 && self.writes_since_sync >= interval {
            self.sync();
        }
        latency
    }

    fn sync(&mut self) {
        self.writes_since_sync = 0;
        let mut durable = true;
        for file in std::mem::take(&mut self.unsynced) {
            if let Err(error) = self.files[file].sync_data() {
                self.faults.io_error(&format!("fsync of {}", self.manifest.files[file].name), &error);
                durable = false;
            }
        }
        if durable && let Some(Err(error)) = self.journal.as_mut().map(Writer::durable) {
            self.faults.io_error("the journal", &error);
        }
    }
}

impl Pace {
    fn progress(&mut self, warmup: bool, faults: &Faults) -> Progress {
        let interval = std::mem::take(&mut self.interval);
        self.last = Instant::now();
        Progress {
            seconds: self.started.elapsed().as_secs_f64(),
            warmup,
            reads: self.reads,
            writes: self.writes,
            interval_reads: interval.count(),
            interval_mean_us: interval.summary().mean_us,
            io_errors: faults.io_errors,
            wrong_signatures: faults.wrong_signatures,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn options(folder: &Path, record_size: usize, writes: Option<WriteOptions>) -> Options {
        Options {
            folder: folder.to_owned(),
            record_size,
            pattern: Pattern::Rand,
            alpha: 1.0,
            seed: 5,
            warmup_count: 10,
            count: 500,
            time_limit: None,
            stop_file: None,
            direct: false,
            pause: None,
            writes,
        }
    }

    #[test]
    fn mixed_writes_of_several_sizes_leave_exactly_the_newest_versions() {
        let folder = tempfile::tempdir().unwrap();
        let manifest = dataset::create(folder.path(), 3, 10 * 1024, 9).unwrap();
        let journal = folder.path().join("journal");
        for record_size in [512, 4096, 1024] {
            let writes = WriteOptions { percent: 50, journal: journal.clone(), sync_interval: 100 };
            let report = access(&options(folder.path(), record_size, Some(writes)), |_| ()).unwrap();
            assert_eq!(report.faults, Faults::default());
            assert_eq!(report.measured.reads.count + report.measured.writes.count, 500);
            assert_eq!(report.warmup.reads.count + report.warmup.writes.count, 10);
        }
        let versions = Versions::read(&journal, After::Order).unwrap();
        let verified = dataset::verify(folder.path(), &manifest, &versions, false);
        assert_eq!((verified.sectors, verified.faults), (60, Faults::default()));

        let stale = Versions::default();
        assert!(dataset::verify(folder.path(), &manifest, &stale, false).faults.wrong_signatures > 0);
    }

    #[test]
    fn a_wrong_record_is_counted_and_does_not_end_the_run() {
        let folder = tempfile::tempdir().unwrap();
        dataset::create(folder.path(), 2, 4096, 9).unwrap();
        std::fs::write(folder.path().join("f00001"), [0; 2048]).unwrap();
        let report = access(&options(folder.path(), 2048, None), |_| ()).unwrap();
        assert!(report.faults.wrong_signatures > 0 && report.faults.io_errors > 0);
        assert_eq!(report.measured.reads.count, 500);
    }

    #[test]
    fn record_places() {
        let entry = |id, size| dataset::FileEntry { name: String::new(), id, size };
        let manifest = Manifest { seed: 0, files: vec![entry(0, 2560), entry(1, 512), entry(2, 1024)] };
        let records = Records::new(&manifest, 1024);
        assert_eq!(records.count(), 3);
        assert_eq!([0, 1, 2].map(|record| records.locate(record)), [(0, 0), (0, 1024), (2, 0)]);
    }
}
