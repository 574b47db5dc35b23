//! A trace file (`remoca disk --trace`), as read by the demonstration.

use remoca_protocol::trace::{RECORD_BYTES, TraceRecord, TracedOp, TracedSource, parse_trace};

pub fn run(data: &[u8]) {
    let Ok(records) = parse_trace(data) else { return };
    assert_eq!(records.len(), data.len() / RECORD_BYTES);
    let bytes: Vec<u8> = records.iter().flat_map(TraceRecord::encode).collect();
    assert_eq!(parse_trace(&bytes).unwrap(), records);
}

pub fn seeds() -> Vec<Vec<u8>> {
    let record = |op, source| TraceRecord {
        issued_ns: 1,
        latency_ns: 2,
        offset: 4096,
        length: 8192,
        disk: 1,
        op,
        source,
        lost: 7,
    };
    let records = [record(TracedOp::Read, TracedSource::Cache), record(TracedOp::Write, TracedSource::Disk)];
    vec![records.iter().flat_map(TraceRecord::encode).collect()]
}
