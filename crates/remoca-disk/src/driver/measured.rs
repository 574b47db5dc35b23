//! The measurements of requests: their latencies, and the traces.

use super::disk::Disk;
use super::host::Host;
use super::poller::Source;
use super::requests::Pending;
use crate::latency::Histogram;
use crate::trace::TraceWriter;
use remoca_core::engine::{DiskEngine, GuestOp};
use remoca_core::units::{ByteRange, Nanos};
use remoca_io::words::IndexMemory;
use remoca_protocol::control::Latencies;
use remoca_protocol::trace::{TraceRecord, TracedOp, TracedSource};
use std::io;
use std::time::Duration;

/// Latencies by kind, and the writers of traces.
pub(super) struct Measured {
    read: Histogram,
    read_from_cache: Histogram,
    read_from_disk: Histogram,
    write: Histogram,
    /// Trace in a file, if there is to be one.
    trace: Option<TraceWriter>,
    /// Trace for a client of the control socket, if there is one.
    client: Option<TraceWriter>,
}

impl Measured {
    /// Returns empty histograms, together with the writer of the trace.
    pub(super) fn new(trace: Option<TraceWriter>) -> Self {
        let (read, read_from_cache, read_from_disk, write) = Default::default();
        Self { read, read_from_cache, read_from_disk, write, trace, client: None }
    }

    /// Adds a request that completes at `now` to the latencies, to the traffic of its disk, and to the traces.
    pub(super) fn record(
        &mut self,
        now: Nanos,
        pending: &Pending,
        from_disk: bool,
        disk: &mut Disk,
        engine: &DiskEngine<IndexMemory>,
    ) {
        let traffic = &mut disk.traffic;
        let latency_ns = now.since_ns(pending.issued);
        let (op, range) = match pending.op {
            GuestOp::Read(range) => {
                self.read.record(latency_ns);
                let part = if from_disk { &mut self.read_from_disk } else { &mut self.read_from_cache };
                part.record(latency_ns);
                traffic.reads += 1;
                traffic.reads_from_cache += u64::from(!from_disk);
                traffic.read_bytes += range.length;
                (TracedOp::Read, Some(range))
            }
            GuestOp::Write { range, .. } => {
                self.write.record(latency_ns);
                traffic.writes += 1;
                traffic.written_bytes += range.length;
                (TracedOp::Write, Some(range))
            }
            GuestOp::Flush => (TracedOp::Flush, None),
            GuestOp::Discard(range) => (TracedOp::Discard, Some(range)),
            GuestOp::WriteZeroes { range, .. } => (TracedOp::WriteZeroes, Some(range)),
        };
        if self.is_tracing() {
            let from_cache = op == TracedOp::Read && !from_disk;
            let ByteRange { offset, length } = range.unwrap_or(ByteRange { offset: 0, length: 0 });
            let record = TraceRecord {
                issued_ns: pending.issued.0,
                latency_ns,
                // The engine's, as in the records of evictions: positions change when a disk goes.
                disk: disk.number.0,
                source: if from_cache { TracedSource::Cache } else { TracedSource::Disk },
                ..TraceRecord::of_bytes(op, offset, length)
            };
            self.add(&record, engine.sees_evictions());
        }
    }

    /// Adds the eviction that the engine was told last to the traces, if it was that of a known block.
    pub(super) fn record_eviction(&mut self, now: Nanos, engine: &DiskEngine<IndexMemory>) {
        if !self.is_tracing() || !engine.sees_evictions() {
            return;
        }
        let Some(block) = engine.last_evicted() else { return };
        let record = TraceRecord {
            issued_ns: now.0,
            disk: block.disk.0,
            block: block.bno.0,
            blocks: 1,
            ..TraceRecord::of_bytes(TracedOp::Evicted, 0, 0)
        };
        self.add(&record, true);
    }

    /// Adds a record to the traces. Forgets a client that is gone, so that nothing is made ready for it any longer.
    fn add(&mut self, record: &TraceRecord, sees_evictions: bool) {
        self.traces().for_each(|trace| trace.record(record, sees_evictions));
        self.client.take_if(|trace| trace.has_ended());
    }

    /// Returns whether requests and evictions are to be recorded.
    pub(super) fn is_tracing(&self) -> bool {
        self.trace.is_some() || self.client.is_some()
    }

    fn traces(&mut self) -> impl Iterator<Item = &mut TraceWriter> {
        self.trace.iter_mut().chain(self.client.iter_mut())
    }

    /// Returns whether a client of the control socket receives a trace.
    pub(super) fn has_client(&mut self) -> bool {
        self.client.take_if(|trace| trace.has_ended());
        self.client.is_some()
    }

    /// Begins a trace for a client of the control socket.
    pub(super) fn begin_client(&mut self, trace: TraceWriter) {
        self.client = Some(trace);
    }

    /// Completes the trace for a client. Returns whether there was one.
    pub(super) fn end_client(&mut self) -> bool {
        let Some(mut trace) = self.client.take() else { return false };
        trace.flush();
        if trace.has_ended() {
            return false;
        }
        if trace.lost() > 0 {
            tracing::warn!("{} records of the trace were lost: its client took them too slowly", trace.lost());
        }
        true
    }

    /// Completes the trace for a client, if there is one, because another program takes over. The client gets what there is of it; one
    /// that takes nothing is waited for no longer than `patience`.
    pub(super) fn end_client_within(&mut self, patience: Duration) {
        if let Some(mut trace) = self.client.take() {
            trace.end_within(patience);
        }
    }

    /// Returns the latencies so far.
    pub(super) fn latencies(&self) -> Latencies {
        Latencies {
            read: self.read.summary(),
            read_from_cache: self.read_from_cache.summary(),
            read_from_disk: self.read_from_disk.summary(),
            write: self.write.summary(),
        }
    }

    /// Returns the writer of the trace in a file, or `None` if there is no such trace.
    pub(super) fn trace(&mut self) -> Option<&mut TraceWriter> {
        self.trace.as_mut()
    }

    /// Registers the wake-ups of the trace's writer with the poller, if there is a trace.
    pub(super) fn register(&self, host: &Host) -> io::Result<()> {
        self.trace.as_ref().map_or(Ok(()), |trace| host.watch(trace.wake_fd(), Source::Trace))
    }

    /// Clears the wake-up of the trace's writer.
    pub(super) fn clear_wake(&self) {
        self.trace.iter().for_each(TraceWriter::clear_wake);
    }

    /// Completes the traces.
    pub(super) fn end(&mut self) {
        self.traces().for_each(TraceWriter::end);
    }
}
