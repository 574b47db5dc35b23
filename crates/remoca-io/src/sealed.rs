//! Files in memory that one program fills for the next. What is read is what was written: they are sealed.

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, memfd_create};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

/// Creates a file with these bytes. The system shows it under `name`.
///
/// # Errors
/// If the system has no memory or no descriptor left.
pub fn write(name: &str, bytes: &[u8]) -> io::Result<OwnedFd> {
    let mut file = File::from(memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
    file.write_all(bytes)?;
    fcntl_add_seals(&file, SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file.into())
}

/// Returns the bytes of a file that [`write`] made. Closes it.
///
/// # Errors
/// If it is another kind of file, or has more than `most` bytes.
pub fn read(file: OwnedFd, most: u64) -> io::Result<Vec<u8>> {
    let file = File::from(file);
    let seals = fcntl_get_seals(&file).unwrap_or(SealFlags::empty());
    let length = file.metadata()?.len();
    if !seals.contains(SealFlags::WRITE | SealFlags::SHRINK) || length > most {
        return Err(io::Error::other("it is not a sealed file of a former program"));
    }
    let mut bytes = vec![0; usize::try_from(length).unwrap_or(0)];
    file.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_sealed_file_of_the_right_size_is_read() {
        let file = write("test", b"text").unwrap();
        assert_eq!(read(file.try_clone().unwrap(), 4).unwrap(), b"text");
        assert!(read(file, 3).is_err());
        let open = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        assert!(read(open, 4).is_err());
        assert!(read(tempfile::tempfile().unwrap().into(), 4).is_err());
    }
}
