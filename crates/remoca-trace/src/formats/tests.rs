//! Each format: bytes as the format's documentation has them become these records; what is cut, of another format or absurd is
//! refused with its position.

use super::*;
use crate::error::Position;
use crate::writer::Writer;
use remoca_protocol::trace::{TraceRecord, TracedOp, TracedSource};

fn read(bytes: &[u8], format: Option<Format>) -> Result<(Format, Vec<TraceRecord>), TraceError> {
    let mut source = open(Box::new(std::io::Cursor::new(bytes.to_vec())), format)?;
    let (mut batch, mut records) = (Batch::default(), Vec::new());
    while source.read(&mut batch)? {
        records.extend(batch.records.iter().copied());
    }
    Ok((source.format(), records))
}

/// Reads a trace whose format must be found.
#[track_caller]
fn records(bytes: &[u8], format: Format) -> Vec<TraceRecord> {
    let (found, records) = read(bytes, None).unwrap();
    assert_eq!(found, format);
    records
}

fn brief(records: &[TraceRecord]) -> Vec<(TracedOp, u64, u64, u64, u16)> {
    records.iter().map(|record| (record.op, record.issued_ns, record.block, record.blocks, record.disk)).collect()
}

#[track_caller]
fn refused(bytes: &[u8], format: Option<Format>, at: Position, says: &str) {
    let error = read(bytes, format).unwrap_err();
    assert_eq!(error.at, at, "{error}");
    assert!(error.to_string().contains(says), "{error}");
}

/// Lines as the traces of Microsoft Research Cambridge have them (their README's example is of this form).
const MSR: &str = "128166372003061629,hm,1,Read,383496192,32768,413\n\
                   128166372016382155,hm,1,Write,310983168,20480,1239\r\n\
                   128166372026382245,web,0,Read,4096,512,12\n";

#[test]
fn msr() {
    let records = records(MSR.as_bytes(), Format::Msr);
    assert_eq!(
        brief(&records),
        [
            (TracedOp::Read, 0, 93627, 8, 0),
            (TracedOp::Write, 1_332_052_600, 75923, 6, 0),
            (TracedOp::Read, 2_332_061_600, 1, 1, 1)
        ]
    );
    assert_eq!(records[1].latency_ns, 123_900);
    assert_eq!(self::records(format!("\r\n\n{MSR}").as_bytes(), Format::Msr), records);
    assert_eq!(self::records(&MSR.as_bytes()[..MSR.len() - 1], Format::Msr).len(), 3, "without the last line's end");
    for (line, says) in [
        ("1,hm,0,Read,0", "`1,hm,0,Read,0` is no request"),
        ("1,hm,0,Erase,0,1,1", "is no request"),
        ("1,hm,0,Read,9007199254740992,512,1", "no disk is larger than 4 PiB"),
        ("1,hm,0,Read,0,18446744073709551615,1", "no disk is larger"),
        ("1,hm,0,Write,0,4294967296,1", "none is longer than 1 GiB"),
        ("1,hm,0,Read,-5,512,1", "is no request"),
    ] {
        refused(format!("{MSR}{line}\n").as_bytes(), None, Position::Line(4), says);
    }
    // A copy that was made while it was written.
    let cut = read(&MSR.as_bytes()[..MSR.len() - 20], None).unwrap_err();
    assert_eq!((cut.is_cut_short(), cut.at), (true, Position::Line(3)));
    refused(&[MSR.as_bytes(), &[b'1'; 5000]].concat(), None, Position::Line(4), "longer than 4096 bytes");
}

/// Made by hand from the form that blkparse(1) documents as its default, and the summary that it adds.
const BLKPARSE: &str = "  8,0    3        1     0.000000000   697  G   W 223490 + 8 [kjournald]
  8,0    3        2     0.000001829   697  Q   W 223490 + 8 [kjournald]
  8,16   1       11    12.000002000  4162  Q  RA 16 + 256 [cat]
  8,0    0        0     0.000002000     0  m   N cfq workload slice:100
  8,0    3        5     0.000003000   697  Q FWS [kjournald]
  8,0    3        6     0.000004000   697  Q   D 0 + 4096 [fstrim]
  8,0    3        7     0.000005000     0  C   W 223490 + 8 [0]
CPU3 (8,0):
 Reads Queued:           0,        0KiB  Writes Queued:           1,        4KiB

Total (8,0):
";

#[test]
fn blkparse() {
    assert_eq!(
        brief(&records(BLKPARSE.as_bytes(), Format::Blkparse)),
        [
            (TracedOp::Write, 1829, 27936, 2, 0),
            (TracedOp::Read, 12_000_002_000, 2, 32, 1),
            (TracedOp::Flush, 3000, 0, 0, 0),
            (TracedOp::Discard, 4000, 0, 512, 0)
        ]
    );
    let only_c = "  8,0    3        7     0.000005000     0  C   W 223490 + 8 [0]\n";
    refused(only_c.as_bytes(), None, Position::Line(2), "no request that was queued");
    refused(format!("{only_c}hello\n").as_bytes(), None, Position::Line(2), "`hello` is no event");
    assert!(read(format!("{only_c}  8,0    3  ").as_bytes(), None).unwrap_err().is_cut_short());
    // What is left of the last line would be a request, too, but for another sector, or of fewer.
    let queued = "  8,0    3        1     0.000000000   697  Q   W 223488 + 128 [kjournald]";
    assert_eq!(records(queued.as_bytes(), Format::Blkparse)[0].blocks, 16);
    for cut in 1..=22 {
        let (before, _) = queued.split_at(queued.len() - cut);
        let cut = read(format!("{queued}\n{before}").as_bytes(), None).unwrap_err();
        assert_eq!((cut.is_cut_short(), cut.at), (true, Position::Line(2)), "{before}");
    }
    // What blkparse says of its files comes first where there are more than its buffer holds.
    let notes: String = (0..200).map(|cpu| format!("Input file sda.blktrace.{cpu} added\n")).collect();
    let (format, noted) = read(format!("{notes}{BLKPARSE}").as_bytes(), None).unwrap();
    assert_eq!((format, brief(&noted)), (Format::Blkparse, brief(&records(BLKPARSE.as_bytes(), Format::Blkparse))));
    let far = "  8,0    3        7     0.000005000     0  Q   W 36028797018963968 + 8 [0]\n";
    refused(far.as_bytes(), None, Position::Line(1), "no disk is larger than 4 PiB");
}

/// Returns an event of blktrace, in either byte order.
fn event(is_little: bool, time: u64, sector: u64, bytes: u32, action: u32, data: &[u8]) -> Vec<u8> {
    let mut event = Vec::new();
    let length = u16::try_from(data.len()).unwrap();
    let put = |event: &mut Vec<u8>, bytes: &[u8]| {
        let ordered: Vec<u8> = if is_little { bytes.iter().rev().copied().collect() } else { bytes.to_vec() };
        event.extend(ordered);
    };
    put(&mut event, &0x6561_7407_u32.to_be_bytes());
    put(&mut event, &1_u32.to_be_bytes());
    put(&mut event, &time.to_be_bytes());
    put(&mut event, &sector.to_be_bytes());
    [bytes, action, 697, 0x80_0000, 3].iter().for_each(|word| put(&mut event, &word.to_be_bytes()));
    put(&mut event, &0_u16.to_be_bytes());
    put(&mut event, &length.to_be_bytes());
    event.extend(data);
    event
}

#[test]
fn blktrace() {
    let (queue, read_, write, notice, discard) = (1, 1 << 16, 2 << 16, 1 << 26, 1 << 29);
    for is_little in [true, false] {
        let event = |time, sector, bytes, action, data: &[u8]| event(is_little, time, sector, bytes, action, data);
        let bytes = [
            event(0, 0, 0, notice, b"swapper"),
            event(5, 223_488, 4096, queue | write | 1 << 8, b"cgroup"),
            event(7, 16, 131_072, queue | read_, b""),
            event(8, 16, 131_072, 8 | read_, b""),
            event(9, 4096, 8192, queue | write | discard, b""),
            event(10, 0, 0, queue | write | 4 << 16, b""),
            event(11, 8, 1 << 31, queue | write, b""),
        ]
        .concat();
        assert_eq!(
            brief(&records(&bytes, Format::Blktrace)),
            [
                (TracedOp::Write, 5, 27936, 1, 0),
                (TracedOp::Read, 7, 2, 32, 0),
                (TracedOp::Discard, 9, 512, 2, 0),
                (TracedOp::Flush, 10, 0, 0, 0),
                // `blkdiscard -z`: no write of data is that long.
                (TracedOp::WriteZeroes, 11, 1, 1 << 19, 0)
            ]
        );
        refused(&bytes[..bytes.len() - 1], None, Position::Byte(6 * 48 + 13), "it ends within the record");
        refused(&event(5, 0, 1 << 31, queue | read_, b""), None, Position::Byte(0), "none is longer than 1 GiB");
        refused(&bytes[..58], None, Position::Byte(55), "cut short");
        refused(&[&bytes[..55], &[0; 48]].concat(), None, Position::Byte(55), "magic number");
        let far = event(5, 1 << 60, 4096, queue | write, b"");
        refused(&far, None, Position::Byte(0), "no disk is larger than 4 PiB");
        refused(&event(5, 0, 4096, 8 | write, b""), None, Position::Byte(48), "no request that was queued");
    }
}

/// What blkparse 2.0.0 (Debian's blktrace) makes of the events below, with `blkparse -i FILE`.
const BY_BLKPARSE: &str = "  8,0    0        1     0.000000000   697  Q   W 223488 + 8 [(null)]
  8,0    0        2     0.000001500   697  Q  RA 16 + 256 [(null)]
  8,0    0        3     0.000002000   697  D   R 16 + 256 [(null)]
  8,0    0        4     0.000003000   697  Q FWS [(null)]
  8,0    0        5     0.000004000   697  Q   D 4096 + 2048 [(null)]
  8,0    0        6     0.000005000   697  Q  RM 99 + 1 [(null)]
  8,0    0        7    12.000006000   697  Q WFS 2048 + 16 [(null)]
  8,0    0        8    12.000008000   697  C   R 16 + 256 [0]
  8,0    0        9    12.000009000   697  Q  WS 0 + 4194304 [(null)]
CPU0 (syn):
 Reads Queued:           2,      128KiB	 Writes Queued:           4,     1036KiB
";

#[test]
fn binary_and_text_of_the_same_events_are_the_same_requests() {
    let (queue, write, read, file_system) = (1_u32 | 1 << 20, 2 << 16, 1 << 16, 1 << 24);
    let event = |time, sector, bytes, action| event(true, time, sector, bytes, action | file_system, b"");
    let bytes = [
        event(0, 223_488, 4096, queue | write),
        event(1500, 16, 131_072, queue | read | 1 << 27),
        event(2000, 16, 131_072, 7 | read | 1 << 22),
        event(3000, 0, 0, queue | write | 4 << 16),
        event(4000, 4096, 1 << 20, queue | write | 1 << 29),
        event(5000, 99, 512, queue | read | 1 << 28),
        event(12_000_006_000, 2048, 8192, queue | write | 1_u32 << 31),
        event(12_000_008_000, 16, 131_072, 8 | read | 1 << 23),
        event(12_000_009_000, 0, 1 << 31, queue | write),
    ]
    .concat();
    let by_text = records(BY_BLKPARSE.as_bytes(), Format::Blkparse);
    assert_eq!((by_text.len(), &by_text), (7, &records(&bytes, Format::Blktrace)));
}

/// Returns a record of vscsiStats. The layouts are those in libCacheSim's `vscsi.h`.
fn vscsi_record(version: u8, command: u16, size: u32, sector: u64, us: u64) -> Vec<u8> {
    let (command, ver) = (command.to_le_bytes(), [0, version]);
    let (sector, us) = (sector.to_le_bytes(), us.to_le_bytes());
    match version {
        1 => [&[9, 0, 0, 0][..], &size.to_le_bytes(), &[1, 0, 0, 0], &command, &ver, &sector, &us].concat(),
        _ => {
            let latency = 250_u64.to_le_bytes();
            [&command[..], &ver, &[9, 0, 0, 0], &size.to_le_bytes(), &[1, 0, 0, 0], &sector, &us, &latency].concat()
        }
    }
}

#[test]
fn vscsi() {
    for (version, bytes_each) in [(1, 32), (2, 40)] {
        let record = |command, size, sector, us| vscsi_record(version, command, size, sector, us);
        let bytes =
            [record(0x28, 4096, 80, 1_000_000), record(0x2a, 65536, 0, 1_000_003), record(0x12, 36, 0, 1_000_004)];
        let bytes = bytes.concat();
        let records = records(&bytes, Format::Vscsi);
        assert_eq!(brief(&records), [(TracedOp::Read, 0, 10, 1, 0), (TracedOp::Write, 3000, 0, 16, 0)]);
        assert_eq!(records[0].latency_ns, if version == 2 { 250_000 } else { 0 });
        refused(&bytes[..bytes.len() - 1], None, Position::Byte(2 * bytes_each), "cut short");
        let far = [&bytes[..], &record(0x28, 512, 1 << 63, 0)].concat();
        let says = "a request at sector 9223372036854775808: no disk is larger";
        refused(&far, None, Position::Byte(3 * bytes_each), says);
        let other = [&bytes[..], &vec![0; bytes.len()]].concat();
        refused(&other, None, Position::Byte(3 * bytes_each), "another version");
    }
    refused(&[0; 80], Some(Format::Vscsi), Position::Byte(0), "neither version 1 nor 2");
}

#[test]
fn oracle_general() {
    let record = |time: u32, object: u64, next: i64| {
        [&time.to_le_bytes()[..], &object.to_le_bytes(), &4096_u32.to_le_bytes(), &next.to_le_bytes()].concat()
    };
    let bytes = [record(0, 42, 2), record(1, u64::MAX - 1, -1), record(3, 42, i64::MAX)].concat();
    let records = records(&bytes, Format::OracleGeneral);
    assert_eq!((records[0].block, records[2].block, records[2].issued_ns), (42, 42, 3_000_000_000));
    assert!(records.iter().all(|record| record.blocks == 1 && record.end() <= crate::limits::BLOCKS_MAX));
    refused(&bytes[..50], None, Position::Byte(48), "cut short");
}

#[test]
fn our_own() {
    let batch = Batch { records: records(MSR.as_bytes(), Format::Msr), lost: 3, ..Batch::default() };
    let mut writer = Writer::new(Vec::new()).unwrap();
    writer.write(&batch).unwrap();
    let second = TraceRecord { op: TracedOp::Evicted, source: TracedSource::Disk, latency_ns: 0, ..batch.records[0] };
    writer.write(&Batch { records: vec![second], sees_evictions: true, ..Batch::default() }).unwrap();
    let bytes = writer.finish().unwrap();
    let mut source = open(Box::new(std::io::Cursor::new(bytes.clone())), None).unwrap();
    let mut read = Batch::default();
    assert!(source.read(&mut read).unwrap());
    assert_eq!((&read.records, read.lost, read.sees_evictions), (&batch.records, 3, false));
    assert!(source.read(&mut read).unwrap());
    assert_eq!((&read.records[..], read.lost, read.sees_evictions), (&[second][..], 0, true));
    assert!(!source.read(&mut read).unwrap() && read.records.is_empty());

    refused(&bytes[..10], None, Position::Byte(0), "cut short");
    refused(&bytes[..30], None, Position::Byte(16), "cut short");
    refused(&bytes[..bytes.len() - 1], None, Position::Byte(bytes.len() as u64 - 28 - 6), "cut short");
    let mut damaged = bytes.clone();
    damaged[50] ^= 1;
    refused(&damaged, None, Position::Byte(16), "its checksum is wrong");
    let mut writer = Writer::new(Vec::new()).unwrap();
    let absurd = TraceRecord { block: 1 << 41, ..batch.records[0] };
    writer.write(&Batch { records: vec![batch.records[0], absurd], ..Batch::default() }).unwrap();
    refused(&writer.finish().unwrap(), None, Position::Byte(16), "record 2 of the frame there");
}

#[test]
fn what_is_no_trace_is_told() {
    refused(b"", None, Position::Byte(0), "the trace is empty");
    refused(&[0x28, 0xb5, 0x2f, 0xfd, 1, 2, 3], None, Position::Byte(0), "zstdcat");
    refused(&[0x1f, 0x8b, 8, 0], None, Position::Byte(0), "zcat");
    refused(b"hello, world\n", None, Position::Byte(0), "not recognized by the line `hello, world`: say");
    refused(b"\x01\0 binary\n", None, Position::Byte(0), "not recognized: say");
    let of_msr = |before: &str, comma: &str| format!("{before}1,hm,0,Read,0,512,1\n").replace(',', comma);
    let cut = format!("`{}...`", "x".repeat(60));
    for (csv, says) in [
        (of_msr("\u{feff}", ","), "`?1,hm,0,Read,0,512,1`"),
        (of_msr("Time,Host\n", ","), "`Time,Host`"),
        (of_msr("", ", "), "`1, hm, 0, Read, 0, 512, 1`"),
        (of_msr(&"x".repeat(100), ","), &cut[..]),
    ] {
        refused(csv.as_bytes(), None, Position::Byte(0), says);
    }
    refused(b"hello, world\n", Some(Format::Msr), Position::Line(1), "is no request");
    for format in [Format::Msr, Format::Blkparse] {
        refused(&[0x1f, 0x8b, 8, 0], Some(format), Position::Byte(0), "zcat");
        refused(&[7; 40], Some(format), Position::Byte(0), "no text");
    }
    refused(b"hello, world\n", Some(Format::Remoca), Position::Byte(0), "cut short");
    refused(&[b'x'; 100], Some(Format::Remoca), Position::Byte(0), "not a remoca trace");
    assert!("auto".parse::<Format>().is_err());
    assert!(Format::names().all(|name| name.parse::<Format>().unwrap().to_string() == name));
}
