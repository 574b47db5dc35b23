//! Files full of signatures: creation, and full verification.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::Path,
};

use serde::{Deserialize, Serialize};

use super::{
    Faults,
    journal::Versions,
    signature::{self, Place, SECTOR_SIZE},
};
use crate::error::{Context, Error, Result};

pub const MANIFEST_NAME: &str = "manifest.json";

const CHUNK_SIZE: usize = 1 << 20;
const ALIGNMENT: usize = 4096;

/// The files of a data set, in the order in which their records are counted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    pub seed: u64,
    pub files: Vec<FileEntry>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    pub name: String,
    pub id: u64,
    /// Size in bytes, a multiple of 512.
    pub size: u64,
}

/// Result of reading a whole data set.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Verified {
    pub sectors: u64,
    #[serde(flatten)]
    pub faults: Faults,
}

impl Manifest {
    /// Reads the manifest of the data set in a folder.
    pub fn read(folder: &Path) -> Result<Manifest> {
        let path = folder.join(MANIFEST_NAME);
        let text = fs::read(&path).context_path("reading", &path)?;
        serde_json::from_slice(&text)
            .map_err(|error| Error::Invalid(format!("{} is no manifest: {error}", path.display())))
    }

    /// Writes the manifest to `folder` and syncs the file.
    pub fn write(&self, folder: &Path) -> Result<()> {
        let path = folder.join(MANIFEST_NAME);
        let text = serde_json::to_vec(self).map_err(|error| Error::Invalid(error.to_string()))?;
        let write = || -> io::Result<()> {
            let mut file = File::create(&path)?;
            file.write_all(&text)?;
            file.sync_all()
        };
        write().context_path("writing", &path)
    }
}

/// Creates a data set: `file_count` files of `file_size` bytes, durable when this returns.
pub fn create(folder: &Path, file_count: u64, file_size: u64, seed: u64) -> Result<Manifest> {
    if file_count == 0 || file_size == 0 || !file_size.is_multiple_of(SECTOR_SIZE as u64) {
        return Err(Error::Invalid("a data set needs files, of a size that is a multiple of 512 bytes".into()));
    }
    fs::create_dir_all(folder).context_path("creating", folder)?;
    let entry = |id| FileEntry { name: format!("f{id:05}"), id, size: file_size };
    let manifest = Manifest { seed, files: (0..file_count).map(entry).collect() };
    for entry in &manifest.files {
        let path = folder.join(&entry.name);
        create_file(&path, entry, seed).context_path("writing", &path)?;
    }
    manifest.write(folder)?;
    Ok(manifest)
}

/// Creates one file at version 0. It is durable when this returns.
pub(super) fn create_file(path: &Path, entry: &FileEntry, seed: u64) -> io::Result<()> {
    let file = File::create(path)?;
    let mut buffer = vec![0; CHUNK_SIZE];
    let mut offset = 0;
    while offset < entry.size {
        let chunk = first_bytes(&mut buffer, entry.size - offset);
        fill(chunk, Place { seed, file: entry.id, offset }, 0);
        file.write_all_at(chunk, offset)?;
        offset += chunk.len() as u64;
    }
    file.sync_all()
}

/// Reads every byte of a data set and checks it.
pub fn verify(folder: &Path, manifest: &Manifest, versions: &Versions, direct: bool) -> Verified {
    let mut verified = Verified::default();
    for entry in &manifest.files {
        verify_file(folder, entry, manifest.seed, versions, direct, &mut verified);
    }
    verified
}

pub(super) fn verify_file(
    folder: &Path,
    entry: &FileEntry,
    seed: u64,
    versions: &Versions,
    direct: bool,
    verified: &mut Verified,
) {
    let faults = &mut verified.faults;
    let file = match open(&folder.join(&entry.name), direct) {
        Ok(file) => file,
        Err(error) => return faults.io_error(&entry.name, &error),
    };
    match file.metadata() {
        Ok(metadata) if metadata.len() == entry.size => {}
        Ok(metadata) => {
            let text = format!("has {} bytes, must have {}", metadata.len(), entry.size);
            faults.io_error(&entry.name, &io::Error::other(text));
        }
        Err(error) => faults.io_error(&entry.name, &error),
    }
    let mut buffer = AlignedBuffer::new(CHUNK_SIZE);
    let mut offset = 0;
    while offset < entry.size {
        let chunk = first_bytes(buffer.bytes(), entry.size - offset);
        match file.read_exact_at(chunk, offset) {
            Ok(()) => check(chunk, &entry.name, Place { seed, file: entry.id, offset }, versions, faults),
            Err(error) => faults.io_error(&format!("{} offset {offset}", entry.name), &error),
        }
        offset += chunk.len() as u64;
        verified.sectors += (chunk.len() / SECTOR_SIZE) as u64;
    }
}

pub(super) fn open(path: &Path, direct: bool) -> io::Result<File> {
    let flags = if direct { libc::O_DIRECT } else { 0 };
    OpenOptions::new().read(true).custom_flags(flags).open(path)
}

/// Fills a run of sectors that starts at a place.
pub(super) fn fill(bytes: &mut [u8], place: Place, version: u64) {
    let mut offset = place.offset;
    for sector in bytes.as_chunks_mut::<SECTOR_SIZE>().0 {
        signature::fill(sector, Place { offset, ..place }, version);
        offset += SECTOR_SIZE as u64;
    }
}

/// Checks a run of sectors that starts at a place.
pub(super) fn check(bytes: &[u8], name: &str, place: Place, versions: &Versions, faults: &mut Faults) {
    let mut offset = place.offset;
    for sector in bytes.as_chunks::<SECTOR_SIZE>().0 {
        if let Err(wrong) = signature::check(sector, Place { offset, ..place }, versions.of(place.file, offset)) {
            faults.wrong(&format!("{name} offset {offset}"), &wrong);
        }
        offset += SECTOR_SIZE as u64;
    }
}

fn first_bytes(buffer: &mut [u8], limit: u64) -> &mut [u8] {
    let size = usize::try_from(limit).map_or(buffer.len(), |limit| limit.min(buffer.len()));
    &mut buffer[..size]
}

/// Bytes at an address suitable for direct I/O.
pub(super) struct AlignedBuffer {
    memory: Vec<u8>,
    start: usize,
    size: usize,
}

impl AlignedBuffer {
    pub fn new(size: usize) -> AlignedBuffer {
        let memory = vec![0; size + ALIGNMENT];
        let start = memory.as_ptr().align_offset(ALIGNMENT);
        AlignedBuffer { memory, start, size }
    }

    pub fn bytes(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.size]
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::journal::{After, Writer, Written},
        *,
    };

    #[test]
    fn each_kind_of_damage_is_found_and_described() {
        let folder = tempfile::tempdir().unwrap();
        let manifest = create(folder.path(), 3, 8192, 9).unwrap();
        assert_eq!(Manifest::read(folder.path()).unwrap(), manifest);
        let none = Versions::default();
        let clean = verify(folder.path(), &manifest, &none, false);
        assert_eq!((clean.sectors, clean.faults), (48, Faults::default()));

        let first = folder.path().join("f00000");
        let file = File::options().write(true).open(&first).unwrap();
        file.write_all_at(&[0; 512], 1024).unwrap();
        file.write_all_at(&fs::read(folder.path().join("f00001")).unwrap()[..512], 0).unwrap();
        File::options().write(true).open(folder.path().join("f00001")).unwrap().set_len(4096).unwrap();
        fs::remove_file(folder.path().join("f00002")).unwrap();
        let faults = verify(folder.path(), &manifest, &none, false).faults;
        assert_eq!((faults.wrong_signatures, faults.io_errors), (2, 3), "{:?}", faults.examples);
        assert_eq!(faults.examples[0], "f00000 offset 0: holds file 1 offset 0 version 0 of seed 9");
        assert_eq!(faults.examples[1], "f00000 offset 1024: zeroes");
        assert_eq!(faults.examples[2], "f00001: has 4096 bytes, must have 8192");
    }

    #[test]
    fn a_lost_write_is_an_old_version() {
        let folder = tempfile::tempdir().unwrap();
        let manifest = create(folder.path(), 1, 4096, 9).unwrap();
        let journal = folder.path().join("journal");
        let write = Written { file: 0, offset: 512, length: 512, version: 4 };
        Writer::open(&journal).unwrap().done(write).unwrap();
        let versions = Versions::read(&journal, After::Order).unwrap();
        let faults = verify(folder.path(), &manifest, &versions, false).faults;
        assert_eq!(faults.examples, ["f00000 offset 512: old version 0, must be 4 at least"]);
    }

    #[test]
    fn sizes_that_are_no_sectors_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        assert!(create(folder.path(), 1, 1000, 0).is_err());
        assert!(create(folder.path(), 0, 1024, 0).is_err());
    }
}
