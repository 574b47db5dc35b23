//! Traces of other programs, as `remoca trace import` and `remoca sim` read them.

use super::memory::bounded;
use remoca_trace::sim::{CurveKind, Pages, PolicyKind, Setup, Simulation};
use remoca_trace::{Batch, Format, Position, TraceRecord, Writer, open};
use std::io::{Cursor, Read};

/// Memory for any trace: the buffer of the input, a batch, and its copies here.
const BYTES_MAX: usize = 8 << 20;

pub fn blkparse(data: &[u8]) {
    run(Format::Blkparse, data);
}

pub fn blktrace(data: &[u8]) {
    run(Format::Blktrace, data);
}

pub fn msr(data: &[u8]) {
    run(Format::Msr, data);
}

pub fn oracle(data: &[u8]) {
    run(Format::OracleGeneral, data);
}

pub fn vscsi(data: &[u8]) {
    run(Format::Vscsi, data);
}

/// A reader that yields a few bytes at a time.
struct Pieces(Cursor<Vec<u8>>, usize);

impl Read for Pieces {
    fn read(&mut self, to: &mut [u8]) -> std::io::Result<usize> {
        self.1 = self.1 % 7 + 1;
        let length = to.len().min(self.1);
        self.0.read(&mut to[..length])
    }
}

/// What is read of a trace, and where it is wrong.
type Outcome = (Vec<TraceRecord>, Option<(Position, String)>);

fn read(format: Option<Format>, reader: Box<dyn Read>) -> Outcome {
    let mut records = Vec::new();
    let mut batch = Batch::default();
    let mut source = match open(reader, format) {
        Ok(source) => source,
        Err(error) => return (records, Some((error.at, error.to_string()))),
    };
    loop {
        let read = source.read(&mut batch);
        if matches!(read, Ok(false)) {
            return (records, None);
        }
        records.extend(batch.records.iter().copied());
        if let Err(error) = read {
            return (records, Some((error.at, error.to_string())));
        }
    }
}

fn run(format: Format, data: &[u8]) {
    bounded(BYTES_MAX, || {
        let whole = read(Some(format), Box::new(Cursor::new(data.to_vec())));
        let pieces = read(Some(format), Box::new(Pieces(Cursor::new(data.to_vec()), 0)));
        assert_eq!(whole, pieces, "it depends on how the bytes come");
        let (records, error) = whole;
        if let Some((at, said)) = error {
            let (Position::Byte(at) | Position::Line(at)) = at;
            assert!(at <= data.len() as u64 + 1 && said.len() < 500, "{said}");
        }
        check(&records);
        let _ = read(None, Box::new(Cursor::new(data.to_vec())));
    });
}

/// The records come back from our own format, and any simulation of them adds up.
fn check(records: &[TraceRecord]) {
    let batch = Batch { records: records.to_vec(), ..Batch::default() };
    let mut writer = Writer::new(Vec::new()).unwrap();
    writer.write(&batch).unwrap();
    let (again, error) = read(None, Box::new(Cursor::new(writer.finish().unwrap())));
    assert_eq!((again.len(), error), (records.len(), None), "our own format takes what the parsers yield");
    for (guest, policy) in [(0, PolicyKind::Lru), (3, PolicyKind::Adaptive), (2, PolicyKind::Fixed)] {
        let tiers = Pages { local: 5, remote: 6 };
        let setup = Setup { guest, tiers, policy, curve: CurveKind::Exact, one_of: 1, blocks_max: 4096 };
        let mut simulation = Simulation::new(setup);
        if simulation.take(&batch).is_ok() {
            let outcome = simulation.finish();
            let read = records.iter().filter(|record| record.op == remoca_trace::TracedOp::Read);
            assert_eq!(outcome.blocks.all(), read.map(|record| record.blocks).sum::<u64>());
        }
    }
}

pub fn blkparse_seeds() -> Vec<Vec<u8>> {
    vec![
        b"  8,0    3        2     0.000001829   697  Q   W 223490 + 8 [kjournald]\n\
           8,16   1       11    12.000002000  4162  Q  RA 16 + 256 [cat]\n\
           8,0    3        5     0.000003000   697  Q FWS [kjournald]\n\
           8,0    3        6     0.000004000   697  Q   D 0 + 4096 [fstrim]\nCPU3 (8,0):\n"
            .to_vec(),
    ]
}

pub fn msr_seeds() -> Vec<Vec<u8>> {
    vec![b"128166372003061629,hm,1,Read,383496192,32768,413\n128166372016382155,web,0,Write,4096,512,9\r\n".to_vec()]
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

pub fn blktrace_seeds() -> Vec<Vec<u8>> {
    let event = |sector: u32, bytes: u32, action: u32, data: u32| {
        words(&[0x6561_7407, 1, 5, 0, sector, 0, bytes, action, 697, 0x80_0000, 0, data << 16])
    };
    let events =
        [event(16, 4096, 0x1_0001, 0), event(8, 8192, 0x2_0001, 3), vec![1, 2, 3], event(0, 512, 0x2002_0001, 0)];
    vec![events.concat()]
}

pub fn oracle_seeds() -> Vec<Vec<u8>> {
    vec![words(&[0, 42, 0, 4096, 2, 0, 1, 7, 9, 512, u32::MAX, u32::MAX, 2, 42, 0, 4096, u32::MAX, u32::MAX])]
}

pub fn vscsi_seeds() -> Vec<Vec<u8>> {
    let first = [words(&[9, 4096, 1, 0x100_0028, 80, 0, 5, 0]), words(&[10, 4096, 1, 0x100_002a, 8, 0, 6, 0])];
    let second = [words(&[0x200_0028, 9, 4096, 1, 80, 0, 5, 0, 7, 0]), words(&[0x200_0035, 9, 0, 1, 0, 0, 5, 0, 7, 0])];
    vec![first.concat(), second.concat()]
}
