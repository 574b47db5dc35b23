//! The measurements of requests: their latencies, and the trace.

use super::host::Host;
use super::poller::Source;
use super::requests::Pending;
use crate::latency::Histogram;
use crate::trace::TraceWriter;
use remoca_core::engine::GuestOp;
use remoca_core::units::Nanos;
use remoca_protocol::control::{DiskTraffic, Latencies};
use remoca_protocol::trace::{TraceRecord, TracedOp, TracedSource};
use std::io;

/// Latencies by kind, and the writer of the trace, if there is to be one.
pub(super) struct Measured {
    read: Histogram,
    read_from_cache: Histogram,
    read_from_disk: Histogram,
    write: Histogram,
    trace: Option<TraceWriter>,
}

impl Measured {
    /// Returns empty histograms, together with the writer of the trace.
    pub(super) fn new(trace: Option<TraceWriter>) -> Self {
        let (read, read_from_cache, read_from_disk, write) = Default::default();
        Self { read, read_from_cache, read_from_disk, write, trace }
    }

    /// Adds a request that completes at `now` to the latencies, to the traffic of its disk, and to the trace.
    pub(super) fn record(&mut self, now: Nanos, pending: &Pending, from_disk: bool, traffic: &mut DiskTraffic) {
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
        if let Some(trace) = &mut self.trace {
            let from_cache = op == TracedOp::Read && !from_disk;
            trace.record(&TraceRecord {
                issued_ns: pending.issued.0,
                latency_ns,
                offset: range.map_or(0, |range| range.offset),
                length: range.map_or(0, |range| range.length),
                disk: pending.disk,
                op,
                source: if from_cache { TracedSource::Cache } else { TracedSource::Disk },
                lost: 0,
            });
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

    /// Returns the writer of the trace, or `None` if there is no trace.
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

    /// Completes the trace.
    pub(super) fn end(&mut self) {
        if let Some(trace) = &mut self.trace {
            trace.end();
        }
    }
}
