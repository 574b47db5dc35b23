//! Size of the guest's memory: what the front end shares, and what of it takes memory of this host.

use rustix::fs::{fstat, fstatfs};
use std::fs::File;
use std::sync::Arc;

/// Type of a file system in memory, as the kernel numbers it. That of a memfd is one.
const TMPFS: u64 = 0x0102_1994;
const BLOCK_BYTES: u64 = 512;

/// Device and inode of a file in memory.
pub(crate) type FileId = (u64, u64);

/// Returns which file it is if it is one in memory, whose blocks are what it takes. Asking another file could wait for a device or a peer.
pub(crate) fn file_in_memory(file: &File) -> Option<FileId> {
    let kind = u64::try_from(fstatfs(file).ok()?.f_type).ok()?;
    let found = fstat(file).ok().filter(|_| kind == TMPFS)?;
    Some((found.st_dev, found.st_ino))
}

/// Size of the guest's memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct Footprint {
    bytes: u64,
    /// All files of it; `None` if one is not in memory.
    files: Option<Vec<Arc<File>>>,
}

impl Footprint {
    /// Returns the size of regions with these lengths and files. Regions may share a file.
    pub fn new(regions: impl Iterator<Item = (u64, Option<FileId>, Arc<File>)>) -> Self {
        let (mut bytes, mut seen, mut files) = (0, Vec::new(), Some(Vec::new()));
        for (length, id, file) in regions {
            bytes += length;
            match id {
                Some(id) if seen.contains(&id) => {}
                Some(id) => {
                    seen.push(id);
                    files.iter_mut().for_each(|files| files.push(file.clone()));
                }
                None => files = None,
            }
        }
        Self { bytes, files }
    }

    /// Returns the memory that the front end shares.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns whether there is memory, and all of it is files in memory.
    pub fn is_in_memory(&self) -> bool {
        self.files.as_ref().is_some_and(|files| !files.is_empty())
    }

    /// Returns the memory and swap space of this host that the files take now; `None` if there are no files, or it is not known.
    pub fn resident_bytes(&self) -> Option<u64> {
        let files = self.files.as_ref().filter(|files| !files.is_empty())?;
        let blocks = files.iter().map(|file| u64::try_from(fstat(file).ok()?.st_blocks).ok());
        blocks.sum::<Option<u64>>()?.checked_mul(BLOCK_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, memfd_create};

    fn memory() -> Arc<File> {
        let file = File::from(memfd_create("memory", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(1 << 20).unwrap();
        Arc::new(file)
    }

    fn footprint(files: &[&Arc<File>]) -> Footprint {
        Footprint::new(files.iter().map(|file| (1 << 19, file_in_memory(file), Arc::clone(file))))
    }

    #[test]
    fn pages_that_are_given_back_take_nothing_and_shared_files_count_once() {
        let [first, second] = [memory(), memory()];
        let both = footprint(&[&first, &first, &second]);
        assert_eq!((both.bytes(), both.resident_bytes()), (3 << 19, Some(0)));
        assert!(both.is_in_memory());
        fallocate(&*first, FallocateFlags::empty(), 0, 64 << 10).unwrap();
        fallocate(&*second, FallocateFlags::empty(), 0, 8 << 10).unwrap();
        assert_eq!(both.resident_bytes(), Some(72 << 10));
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&*first, punch, 0, 16 << 10).unwrap();
        assert_eq!(both.resident_bytes(), Some(56 << 10));
    }

    #[test]
    fn what_is_not_in_memory_is_not_asked() {
        let process = Arc::new(File::open("/proc/self/maps").unwrap());
        let mixed = footprint(&[&memory(), &process]);
        assert_eq!((mixed.bytes(), mixed.resident_bytes()), (1 << 20, None));
        assert!(!mixed.is_in_memory() && !Footprint::default().is_in_memory());
        assert_eq!(file_in_memory(&process), None);
        assert_eq!(Footprint::default().resident_bytes(), None);
        assert_eq!(footprint(&[]).resident_bytes(), None);
    }
}
