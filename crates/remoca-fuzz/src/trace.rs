//! A trace file (`remoca disk --trace`), as read by the demonstration.

use remoca_protocol::trace::{FrameEncoder, Trace, TraceRecord, TracedOp, TracedSource, head, parse_trace};

pub fn run(data: &[u8]) {
    // What a fuzzer cannot guess is given: the head and, if the input begins with 1, the checksum.
    let mut bytes = [&head()[..], data.get(1..).unwrap_or_default()].concat();
    if let [1, ..] = data
        && bytes.len() >= 44
    {
        let length = u32::from_le_bytes(bytes[16..20].try_into().unwrap()) as usize;
        if let Some(records) = bytes.get(44..44_usize.saturating_add(length)) {
            let check = crc32fast::hash(&[&bytes[16..40], records].concat());
            bytes[40..44].copy_from_slice(&check.to_le_bytes());
        }
    }
    let Ok(trace) = parse_trace(&bytes) else { return };
    let mut encoder = FrameEncoder::new();
    let mut again = head().to_vec();
    // A frame of any size may come, but one of ours is bounded.
    for records in trace.records.chunks(1000) {
        records.iter().for_each(|record| encoder.push(record));
        again.extend(encoder.finish(0, false));
    }
    assert_eq!(parse_trace(&again).unwrap(), Trace { lost: 0, ..trace });
}

pub fn seeds() -> Vec<Vec<u8>> {
    let record = |op, block| TraceRecord {
        issued_ns: 100,
        latency_ns: 200,
        block,
        blocks: 2,
        disk: 1,
        op,
        source: TracedSource::Cache,
        is_partial: false,
    };
    let mut encoder = FrameEncoder::new();
    encoder.push(&record(TracedOp::Read, 7));
    encoder.push(&record(TracedOp::Write, 9));
    encoder.push(&TraceRecord { latency_ns: 0, ..record(TracedOp::Evicted, 1) });
    let frame = encoder.finish(3, true);
    vec![[&[0], &frame[..]].concat(), [&[1], &frame[..], &frame[..]].concat()]
}
