//! Finds the format of a trace from its first bytes.

use super::batch::number;
use super::format::Format;
use super::oracle::RECORD_BYTES;
use super::text::shown;
use super::{blkparse, blktrace, msr, vscsi};
use remoca_protocol::trace::MAGIC;

/// Programs that decompress what begins like this.
const COMPRESSED: [(&[u8], &str); 4] = [
    (&[0x28, 0xb5, 0x2f, 0xfd], "zstdcat"),
    (&[0x1f, 0x8b], "zcat"),
    (b"BZh", "bzcat"),
    (&[0xfd, b'7', b'z', b'X', b'Z'], "xzcat"),
];

/// Returns the format of a trace that begins with these bytes, or why it is not known.
pub(super) fn format(first: &[u8]) -> Result<Format, String> {
    if first.is_empty() {
        return Err("the trace is empty".into());
    }
    check_not_compressed(first)?;
    let magic = first.first_chunk().map(|bytes| u32::from_le_bytes(*bytes));
    let is_blktrace = |magic: u32| [magic, magic.swap_bytes()].iter().any(|word| word & !0xff == blktrace::MAGIC);
    let mut lines = lines(first);
    let line = lines.find(|line| !line.is_empty() && !line.starts_with(blkparse::NOTE)).unwrap_or_default();
    match () {
        () if first.starts_with(&MAGIC) => Ok(Format::Remoca),
        () if magic.is_some_and(is_blktrace) => Ok(Format::Blktrace),
        () if msr::split(line).is_some() => Ok(Format::Msr),
        () if blkparse::split(line).is_some() => Ok(Format::Blkparse),
        () if vscsi::Version::of(first).is_some() => Ok(Format::Vscsi),
        () if is_oracle_general(first) => Ok(Format::OracleGeneral),
        () => {
            let names: Vec<_> = Format::names().collect();
            let line = if !line.is_empty() && is_text(line) {
                format!(" by the line `{}`", shown(line))
            } else {
                String::new()
            };
            Err(format!(
                "the format of the trace is not recognized{line}: say which one it is (--format {})",
                names.join(", ")
            ))
        }
    }
}

/// Checks that a trace that begins with these bytes may be of a format that is text.
///
/// # Errors
/// What else it is.
pub(super) fn check_text(first: &[u8]) -> Result<(), String> {
    check_not_compressed(first)?;
    match lines(first).next().is_none_or(is_text) {
        true => Ok(()),
        false => Err("the trace is no text: say another format (--format auto finds out which)".into()),
    }
}

fn check_not_compressed(first: &[u8]) -> Result<(), String> {
    match COMPRESSED.iter().find(|(magic, _)| first.starts_with(magic)) {
        Some((_, program)) => Err(format!("the trace is compressed: pass it through `{program}`, with - for the file")),
        None => Ok(()),
    }
}

fn lines(first: &[u8]) -> impl Iterator<Item = &[u8]> {
    first.split(|byte| *byte == b'\n').map(|line| line.strip_suffix(b"\r").unwrap_or(line))
}

fn is_text(line: &[u8]) -> bool {
    line.iter().all(|byte| *byte >= b' ' || *byte == b'\t')
}

/// Returns whether records make sense together: times do not fall, and each object is read next later, or never.
fn is_oracle_general(first: &[u8]) -> bool {
    let records = first.as_chunks::<RECORD_BYTES>().0;
    let times = records.iter().map(|record| number::<4>(record, 0));
    !records.is_empty()
        && times.is_sorted()
        && (0..).zip(records).all(|(at, record)| {
            let (size, next) = (number::<4>(record, 12), number::<8>(record, 16));
            size < 1 << 31 && (next == u64::MAX || next == u64::MAX >> 1 || (at..1 << 48).contains(&next))
        })
}
