//! Frames of a trace, for any records.

use proptest::collection::vec;
use proptest::prelude::*;
use remoca_protocol::trace::{FrameEncoder, TICK_NS, TraceRecord, TracedOp, TracedSource, head, parse_trace};

const MAX: u64 = u64::MAX / TICK_NS;

fn number() -> impl Strategy<Value = u64> {
    prop_oneof![0..4u64, 0..MAX / 2, Just(MAX / 2)]
}

fn record() -> impl Strategy<Value = TraceRecord> {
    use TracedOp::{Discard, Evicted, Flush, Read, Write, WriteZeroes};
    let op = prop::sample::select(vec![Read, Write, Flush, Discard, WriteZeroes, Evicted]);
    let source = prop::sample::select(vec![TracedSource::Disk, TracedSource::Cache]);
    (number(), number(), number(), number(), any::<u16>(), op, source, any::<bool>()).prop_map(
        |(issued, latency, block, blocks, disk, op, source, is_partial)| TraceRecord {
            issued_ns: issued * TICK_NS,
            latency_ns: if op == Evicted { 0 } else { latency * TICK_NS },
            block,
            blocks,
            disk,
            op,
            source,
            is_partial,
        },
    )
}

proptest! {
    #[test]
    fn any_records_come_back(frames in vec((vec(record(), 0..40), any::<u32>(), any::<bool>()), 0..5), cut in any::<prop::sample::Index>()) {
        let mut bytes = head().to_vec();
        let mut ends = vec![bytes.len()];
        let mut encoder = FrameEncoder::new();
        for (records, lost, sees_evictions) in &frames {
            records.iter().for_each(|record| encoder.push(record));
            bytes.extend(encoder.finish(*lost, *sees_evictions));
            ends.push(bytes.len());
        }
        let parsed = parse_trace(&bytes).unwrap();
        let all: Vec<TraceRecord> = frames.iter().flat_map(|(records, ..)| records.clone()).collect();
        prop_assert_eq!(&parsed.records, &all);
        prop_assert_eq!(parsed.lost, frames.iter().map(|(_, lost, _)| u64::from(*lost)).sum::<u64>());
        // Cut anywhere: the whole frames before the cut are left.
        let cut = 16 + cut.index(bytes.len() - 15);
        let left = ends.iter().filter(|end| **end <= cut).count() - 1;
        let kept: usize = frames[..left].iter().map(|(records, ..)| records.len()).sum();
        prop_assert_eq!(&parse_trace(&bytes[..cut]).unwrap().records, &all[..kept]);
    }

    #[test]
    fn no_changed_byte_goes_unnoticed(records in vec(record(), 1..20), at in any::<prop::sample::Index>(), bit in 0..8u32) {
        let mut encoder = FrameEncoder::new();
        records.iter().for_each(|record| encoder.push(record));
        let mut frame = encoder.finish(0, false);
        let at = at.index(frame.len());
        frame[at] ^= 1 << bit;
        let parsed = parse_trace(&[&head()[..], &frame].concat());
        // A length that grew leaves a frame that is cut short.
        prop_assert!(parsed.is_err() || parsed.unwrap().records.is_empty());
    }
}
