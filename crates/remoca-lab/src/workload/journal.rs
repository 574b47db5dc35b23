//! The versions that each sector of a data set may hold.
//!
//! A writer appends to a text file: `W FILE OFFSET LENGTH VERSION` before a write, `D` with the same fields when it
//! has ended, `S` when everything before is durable. The file belongs on another disk than the data. A later reader of
//! the data learns from it the range of right versions. Normally this is exactly the newest; after a crash, it is from
//! the newest durable one to the newest that was begun.

use std::{
    collections::HashMap,
    fs::File,
    io::{self, BufRead, BufReader, Write},
    ops::RangeInclusive,
    path::Path,
};

use super::signature::SECTOR_SIZE;

const SECTOR_BYTES: u64 = SECTOR_SIZE as u64;

/// A write of one record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    pub file: u64,
    pub offset: u64,
    pub length: u64,
    pub version: u64,
}

#[derive(Debug)]
pub struct Writer {
    file: File,
}

impl Writer {
    /// Opens the file for appending, and creates it if needed.
    pub fn open(path: &Path) -> io::Result<Writer> {
        Ok(Writer { file: File::options().create(true).append(true).open(path)? })
    }

    pub fn begun(&mut self, write: Written) -> io::Result<()> {
        self.line('W', write)
    }

    pub fn done(&mut self, write: Written) -> io::Result<()> {
        self.line('D', write)
    }

    pub fn durable(&mut self) -> io::Result<()> {
        self.file.write_all(b"S\n")
    }

    fn line(&mut self, kind: char, Written { file, offset, length, version }: Written) -> io::Result<()> {
        // One system call per line, so that the record survives the end of this process.
        self.file.write_all(format!("{kind} {file} {offset} {length} {version}\n").as_bytes())
    }
}

/// Event after which the data is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After {
    /// A normal end: all completed writes are there.
    Order,
    /// A crash: durable writes are there, other writes may be.
    Crash,
}

/// The versions of every sector; 0 for sectors never recorded.
#[derive(Debug, Default)]
pub struct Versions {
    /// Ranges by file, then by sector.
    files: HashMap<u64, Vec<Range>>,
    newest: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Range {
    least: u64,
    most: u64,
}

impl Versions {
    /// Reads a journal. Its last line may be truncated.
    pub fn read(path: &Path, after: After) -> io::Result<Versions> {
        let mut versions = Versions::default();
        let mut not_durable = Vec::new();
        let file = File::open(path)?;
        // Garbage must not exhaust the memory: 8 GiB of file at most.
        let sector_count_max = 1 << 24;
        for line in BufReader::new(file).lines() {
            let line = line?;
            let fields: Vec<u64> = line.split(' ').skip(1).filter_map(|field| field.parse().ok()).collect();
            let write = match fields[..] {
                [file, offset, length, version] if offset.saturating_add(length) / SECTOR_BYTES < sector_count_max => {
                    Some(Written { file, offset, length, version })
                }
                _ => None,
            };
            match (line.chars().next(), write) {
                (Some('W'), Some(write)) => versions.begun(write),
                (Some('D'), Some(write)) if after == After::Order => versions.done(write),
                (Some('D'), Some(write)) => not_durable.push(write),
                (Some('S'), None) => not_durable.drain(..).for_each(|write| versions.done(write)),
                _ => {}
            }
        }
        Ok(versions)
    }

    /// Returns the highest version that was ever begun.
    pub fn newest(&self) -> u64 {
        self.newest
    }

    /// Records a write that may or may not have reached the sectors.
    pub fn begun(&mut self, write: Written) {
        self.newest = self.newest.max(write.version);
        for range in self.sectors(write) {
            range.most = range.most.max(write.version);
        }
    }

    /// Records that a write has reached the sectors.
    pub fn done(&mut self, write: Written) {
        for range in self.sectors(write) {
            range.least = range.least.max(write.version);
            range.most = range.most.max(write.version);
        }
    }

    /// Returns the versions that are right for the sector at an offset.
    pub fn of(&self, file: u64, offset: u64) -> RangeInclusive<u64> {
        let index = usize::try_from(offset / SECTOR_BYTES).unwrap_or(usize::MAX);
        let range = self.files.get(&file).and_then(|sectors| sectors.get(index)).copied().unwrap_or_default();
        range.least..=range.most
    }

    fn sectors(&mut self, write: Written) -> impl Iterator<Item = &mut Range> {
        let first = usize::try_from(write.offset / SECTOR_BYTES).unwrap_or(usize::MAX);
        let count = usize::try_from(write.length / SECTOR_BYTES).unwrap_or_default();
        let sectors = self.files.entry(write.file).or_default();
        let end = first.saturating_add(count);
        if sectors.len() < end {
            sectors.resize(end, Range::default());
        }
        sectors[first..end].iter_mut()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_follow_what_was_begun_done_and_durable() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        let write = |version| Written { file: 1, offset: 512, length: 1024, version };
        let mut writer = Writer::open(&path).unwrap();
        for version in 1..=3 {
            writer.begun(write(version)).unwrap();
            if version < 3 {
                writer.done(write(version)).unwrap();
            }
            if version == 1 {
                writer.durable().unwrap();
            }
        }
        let mut file = File::options().append(true).open(&path).unwrap();
        file.write_all(b"W 1 51").unwrap();
        let order = Versions::read(&path, After::Order).unwrap();
        assert_eq!([order.of(1, 0), order.of(1, 512), order.of(1, 1024)], [0..=0, 2..=3, 2..=3]);
        assert_eq!([order.of(1, 1536), order.of(2, 512)], [0..=0, 0..=0]);
        assert_eq!(Versions::read(&path, After::Crash).unwrap().of(1, 512), 1..=3);
        assert_eq!(order.newest(), 3);
    }
}
