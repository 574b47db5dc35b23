//! Miss-ratio curves that one process leaves for the next, in a file beside the state file.
//!
//! ```text
//! "REMOCRVS" | version u32 | number of curves u32 | for each: disk u32 (all ones: the VM) | length u32 | bytes (remoca-core/src/curve/bytes.rs)
//! ```
//! Numbers are little-endian. The curves mean something only under the key in the state file; without it they are ignored. So is
//! a file that is damaged: all that depends on it is a forecast.

use remoca_core::curve::Unreadable;
use remoca_core::engine::{DISK_CURVES_MAX, DiskEngine};
use remoca_core::units::DiskIndex;
use remoca_io::small_file;
use remoca_io::words::IndexMemory;
use std::io;
use std::path::{Path, PathBuf};

const MAGIC: &[u8; 8] = b"REMOCRVS";
const VERSION: u32 = 1;
const OF_VM: u32 = u32::MAX;
/// Maximum size of the file: each curve takes less than 96 KiB.
const BYTES_MAX: u64 = 2 << 20;
const CURVES_MAX: usize = DISK_CURVES_MAX + 1;

type Curves = Vec<(Option<DiskIndex>, Vec<u8>)>;

/// Why the curves of a previous process cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnusableCurves {
    #[error("the file is damaged, or of another version of remoca")]
    Damaged,
    #[error("their key is gone with the state file")]
    Key,
}

impl From<Unreadable> for UnusableCurves {
    fn from(unreadable: Unreadable) -> Self {
        match unreadable {
            Unreadable::Key => Self::Key,
            Unreadable::NotACurve | Unreadable::Version(_) | Unreadable::Damaged => Self::Damaged,
        }
    }
}

/// Returns the path of the curves that go with the state file at `state`.
#[must_use]
pub fn curves_beside(state: &Path) -> PathBuf {
    small_file::with_ending(state, ".curves")
}

/// Writes the curves of an engine to `path`.
///
/// # Errors
/// If the system refuses. An existing file is unchanged then.
pub fn keep_curves(path: &Path, curves: &Curves) -> io::Result<()> {
    small_file::write(path, encode(curves))
}

/// Continues the curves that are at `path`, as far as the engine has their disks. A missing file is no error.
///
/// # Errors
/// If the file cannot be used. Curves before the first one that cannot be used are continued.
pub fn resume_curves(path: &Path, engine: &mut DiskEngine<IndexMemory>) -> Result<(), UnusableCurves> {
    let bytes = match small_file::read_bytes(path, BYTES_MAX) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::FileTooLarge => return Err(UnusableCurves::Damaged),
        Err(_) => return Ok(()),
    };
    for (disk, bytes) in decode(&bytes).ok_or(UnusableCurves::Damaged)? {
        if disk.is_none_or(|disk| engine.disk_bytes(disk).is_some()) {
            engine.restore_curve(disk, bytes)?;
        }
    }
    Ok(())
}

fn encode(curves: &Curves) -> Vec<u8> {
    let number = |number: usize| u32::try_from(number).unwrap_or(u32::MAX).to_le_bytes();
    let mut file = MAGIC.to_vec();
    file.extend(VERSION.to_le_bytes());
    file.extend(number(curves.len()));
    for (disk, bytes) in curves {
        file.extend(disk.map_or(OF_VM, |disk| disk.0.into()).to_le_bytes());
        file.extend(number(bytes.len()));
        file.extend(bytes);
    }
    file
}

fn decode(file: &[u8]) -> Option<Vec<(Option<DiskIndex>, &[u8])>> {
    let mut rest = file.strip_prefix(MAGIC)?;
    let number = |rest: &mut &[u8]| {
        let (head, tail) = rest.split_first_chunk()?;
        *rest = tail;
        Some(u32::from_le_bytes(*head))
    };
    let (version, count) = (number(&mut rest)?, usize::try_from(number(&mut rest)?).ok()?);
    if version != VERSION || count > CURVES_MAX {
        return None;
    }
    let mut curves = Vec::new();
    for _ in 0..count {
        let disk = match number(&mut rest)? {
            OF_VM => None,
            disk => Some(DiskIndex(u16::try_from(disk).ok()?)),
        };
        let length = number(&mut rest)?.try_into().ok()?;
        let (bytes, tail) = rest.split_at_checked(length)?;
        rest = tail;
        curves.push((disk, bytes));
    }
    rest.is_empty().then_some(curves)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_files_are_refused() {
        let curves = vec![(None, vec![1, 2, 3]), (Some(DiskIndex(4095)), Vec::new())];
        let file = encode(&curves);
        let read = |file: &[u8]| {
            decode(file).map(|read| read.into_iter().map(|(disk, bytes)| (disk, bytes.to_vec())).collect::<Curves>())
        };
        assert_eq!(read(&file), Some(curves));
        assert!((0..file.len()).all(|length| read(&file[..length]).is_none()));
        assert_eq!(read(&[&file[..], &[0]].concat()), None);
        for (at, byte) in [(0, 0), (8, 2), (12, 17), (15, 1), (20, 4), (23, 0xff), (29, 0x10), (31, 1)] {
            let mut changed = file.clone();
            changed[at] = byte;
            assert_eq!(read(&changed), None, "byte {at}");
        }
    }
}
