//! The eviction port as the guest sees it: a virtio disk with the serial number `remoca-port`.
//!
//! Nothing is written to a disk before its serial number and its identification page have been read through the same
//! descriptor. That descriptor claims the disk (O_EXCL): a mounted disk is refused, and so is a second agent. I/O is
//! always direct: a page cache of evicted pages would evict itself.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{OFlags, major, minor};

use crate::error::AgentError;
use crate::page::{IdentificationPage, PAGE_BYTES, Page, PageError, StatisticsPage};
use zerocopy::IntoBytes;

const SERIAL: &str = "remoca-port";
/// Number of requests in flight at once: a port on a busy host has a long latency, not a low throughput.
const REQUESTS_AT_ONCE: usize = 4;
/// Bytes of a sector, as sysfs counts them.
const SECTOR_BYTES: u64 = 512;

pub struct Port {
    disk: File,
    device: PathBuf,
    block_count: u64,
    /// First block of the next batch. Positions have no meaning for the port. Walking over all of them keeps a trace
    /// readable.
    next_block: u64,
    /// Number of pages in the largest request of this disk's queue.
    queue_page_count_max: usize,
    page: Box<Page>,
}

impl Port {
    /// Finds and opens the port: the chosen device, or the one disk with the port's serial number.
    pub fn open(choice: Option<&Path>) -> Result<(Port, IdentificationPage), AgentError> {
        if let Some(device) = choice {
            return Port::open_device(device);
        }
        let candidates = disks_with_our_serial(Path::new("/sys/block"));
        let mut first_error = None;
        for name in &candidates {
            match Port::open_device(&Path::new("/dev").join(name)) {
                Ok(port) => return Ok(port),
                Err(error) => first_error = first_error.or(Some(error)),
            }
        }
        let nothing_found = || AgentError::NoPort(format!("no disk of this VM has the serial number {SERIAL}"));
        Err(first_error.unwrap_or_else(nothing_found))
    }

    fn open_device(device: &Path) -> Result<(Port, IdentificationPage), AgentError> {
        let metadata =
            fs::metadata(device).map_err(|error| AgentError::NoPort(format!("{}: {error}", device.display())))?;
        if !metadata.file_type().is_block_device() {
            let reason = "it is no block device".to_owned();
            return Err(AgentError::WrongPort { device: device.to_owned(), reason });
        }
        let number = metadata.rdev();
        // What was found out about a disk that is unplugged meanwhile says nothing.
        Port::open_disk(device, number).map_err(|error| match is_there(device, number) {
            true => error,
            false => unplugged(device, &error.to_string()),
        })
    }

    /// Opens the disk with this number.
    fn open_disk(device: &Path, number: u64) -> Result<(Port, IdentificationPage), AgentError> {
        let wrong = |reason: String| AgentError::WrongPort { device: device.to_owned(), reason };
        let facts = DiskFacts::read(number).map_err(|none| match none {
            NoFacts::Unplugged(error) => unplugged(device, &error.to_string()),
            NoFacts::Wrong(reason) => wrong(reason),
        })?;
        facts.check().map_err(wrong)?;

        let disk = open_exclusively(device)?;
        let opened = disk.metadata().map_err(AgentError::io(device.display().to_string()))?;
        if opened.rdev() != number {
            return Err(wrong("it was replaced by another disk just now".to_owned()));
        }
        let mut port = Port {
            disk,
            device: device.to_owned(),
            block_count: facts.block_count,
            next_block: 1,
            queue_page_count_max: facts.queue_page_count_max,
            page: Box::new(Page::ZERO),
        };
        let identification = port.identification()?;
        Ok((port, identification))
    }

    pub fn device(&self) -> &Path {
        &self.device
    }

    /// Returns whether the disk is still there. An unplugged disk stays open, and says nothing until it is used.
    pub fn is_plugged_in(&self) -> bool {
        // What cannot be found out is not held against the port.
        let number = self.disk.metadata().map(|metadata| metadata.rdev());
        number.map_or(true, |number| sysfs_directory(number).exists())
    }

    /// Returns the size of the largest batch: several whole requests of the disk's queue, or one if the port accepts
    /// no such request.
    pub fn batch_page_count_max(&self, identification: &IdentificationPage) -> usize {
        let room = usize::try_from(self.block_count - 1).unwrap_or(usize::MAX);
        let port_max = identification.batch_page_count_max as usize;
        // The kernel cuts a write at the queue's limit; it does not know the port's limit.
        let requests = if port_max < self.queue_page_count_max { 1 } else { REQUESTS_AT_ONCE };
        (port_max.min(self.queue_page_count_max) * requests).min(room)
    }

    pub fn identification(&mut self) -> Result<IdentificationPage, AgentError> {
        let failed = AgentError::io(format!("{}: cannot read the identification page", self.device.display()));
        self.disk.read_exact_at(&mut self.page.0, 0).map_err(failed)?;
        IdentificationPage::parse(&self.page).map_err(|error| match error {
            PageError::NotAPort => AgentError::WrongPort { device: self.device.clone(), reason: error.to_string() },
            PageError::OtherVersion(version) => AgentError::PortVersion { device: self.device.clone(), version },
        })
    }

    pub fn write_statistics(&mut self, statistics: &StatisticsPage) -> io::Result<()> {
        statistics.encode(&mut self.page);
        self.disk.write_all_at(self.page.as_bytes(), 0)
    }

    /// Writes evicted pages. Returns when the port has them. `pages` must be a whole number of pages, at most a batch,
    /// and page-aligned.
    pub fn write_pages(&mut self, pages: &[u8]) -> io::Result<()> {
        let page_count = (pages.len() / PAGE_BYTES) as u64;
        let block = batch_position(self.next_block, page_count, self.block_count);
        self.next_block = block + page_count;
        self.disk.write_all_at(pages, block * PAGE_BYTES as u64)
    }
}

/// Returns whether a device node still leads to the disk with this number, and that is plugged in.
fn is_there(device: &Path, number: u64) -> bool {
    fs::metadata(device).is_ok_and(|metadata| metadata.rdev() == number) && sysfs_directory(number).exists()
}

fn unplugged(device: &Path, error: &str) -> AgentError {
    AgentError::NoPort(format!("{} was unplugged while it was looked at ({error})", device.display()))
}

/// Returns the first block of the next batch. The batch never covers block 0, nor extends beyond the end.
fn batch_position(next_block: u64, page_count: u64, block_count: u64) -> u64 {
    if next_block + page_count > block_count { 1 } else { next_block }
}

fn open_exclusively(device: &Path) -> Result<File, AgentError> {
    let flags = (OFlags::DIRECT | OFlags::EXCL).bits().cast_signed();
    let opened = OpenOptions::new().read(true).write(true).custom_flags(flags).open(device);
    opened.map_err(|error| match error.kind() {
        io::ErrorKind::ResourceBusy => AgentError::PortInUse(device.to_owned()),
        _ if is_without_disk(&error) => unplugged(device, &error.to_string()),
        io::ErrorKind::PermissionDenied => AgentError::NotPermitted(format!("{}: {error}", device.display())),
        io::ErrorKind::ReadOnlyFilesystem => {
            AgentError::WrongPort { device: device.to_owned(), reason: "it is read-only".to_owned() }
        }
        _ => AgentError::io(device.display().to_string())(error),
    })
}

fn disks_with_our_serial(sys_block: &Path) -> Vec<String> {
    let Ok(disks) = fs::read_dir(sys_block) else { return Vec::new() };
    let serial = |directory: &Path| attribute(directory, "serial").ok().flatten();
    let has_our_serial = |directory: &Path| serial(directory).is_some_and(|serial| serial == SERIAL);
    let mut names: Vec<_> = disks
        .flatten()
        .filter(|disk| has_our_serial(&disk.path()))
        .filter_map(|disk| disk.file_name().into_string().ok())
        .collect();
    names.sort();
    names
}

/// Returns the directory of a block device in sysfs, which is there for as long as the device.
fn sysfs_directory(device_number: u64) -> PathBuf {
    format!("/sys/dev/block/{}:{}", major(device_number), minor(device_number)).into()
}

/// Returns whether an error says that the disk is no longer there.
fn is_without_disk(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENODEV | libc::ENXIO))
}

/// Returns an attribute of a device, or `None` if it has none of that name.
fn attribute(directory: &Path, name: &str) -> io::Result<Option<String>> {
    match fs::read_to_string(directory.join(name)) {
        Ok(text) => Ok(Some(text.trim().to_owned())),
        Err(error) if is_without_disk(&error) => Err(error),
        Err(_) => Ok(None),
    }
}

/// Facts that sysfs reports about a disk before it is opened.
#[derive(Debug)]
struct DiskFacts {
    is_partition: bool,
    serial: Option<String>,
    block_count: u64,
    queue_page_count_max: usize,
}

/// Why there are no facts about a disk.
#[derive(Debug)]
enum NoFacts {
    /// It is no longer there.
    Unplugged(io::Error),
    /// It is no disk that could be a port.
    Wrong(String),
}

impl DiskFacts {
    fn read(device_number: u64) -> Result<DiskFacts, NoFacts> {
        DiskFacts::read_directory(&sysfs_directory(device_number))
    }

    fn read_directory(directory: &Path) -> Result<DiskFacts, NoFacts> {
        let number = |name: &str| Ok(attribute(directory, name)?.and_then(|text| text.parse::<u64>().ok()));
        let no_size = || NoFacts::Wrong(format!("{} tells no size", directory.display()));
        let sector_count = number("size").map_err(NoFacts::Unplugged)?.ok_or_else(no_size)?;
        let request_kib = number("queue/max_sectors_kb").map_err(NoFacts::Unplugged)?;
        let request_page_count = request_kib.map_or(1, |kib| kib * 1024 / PAGE_BYTES as u64);
        let segment_count = number("queue/max_segments").map_err(NoFacts::Unplugged)?.unwrap_or(1);
        let queue_page_count_max = request_page_count.min(segment_count).max(1);
        Ok(DiskFacts {
            is_partition: directory.join("partition").exists(),
            serial: attribute(directory, "serial").map_err(NoFacts::Unplugged)?,
            block_count: sector_count * SECTOR_BYTES / PAGE_BYTES as u64,
            queue_page_count_max: usize::try_from(queue_page_count_max).unwrap_or(usize::MAX),
        })
    }

    /// Checks that this disk can be a port. If not, returns the reason.
    fn check(&self) -> Result<(), String> {
        if self.is_partition {
            return Err("it is a partition".to_owned());
        }
        match &self.serial {
            Some(serial) if serial == SERIAL => {}
            Some(serial) => return Err(format!("its serial number is {serial:?}, not {SERIAL:?}")),
            None => return Err(format!("it has no serial number, where a port has {SERIAL:?}")),
        }
        if self.block_count < 2 {
            return Err("it is too small".to_owned());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write_attributes(directory: &Path, attributes: &[(&str, &str)]) {
        for (name, value) in attributes {
            let path = directory.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, value).unwrap();
        }
    }

    const PORT: &[(&str, &str)] = &[
        ("serial", "remoca-port\n"),
        ("size", "131072\n"),
        ("queue/max_sectors_kb", "1280\n"),
        ("queue/max_segments", "126\n"),
    ];

    #[test]
    fn candidates_are_the_disks_with_our_serial() {
        let sys_block = tempfile::tempdir().unwrap();
        write_attributes(&sys_block.path().join("vdb"), PORT);
        write_attributes(&sys_block.path().join("vda"), &[("serial", "remoca-port-2\n")]);
        write_attributes(&sys_block.path().join("loop0"), &[("size", "0\n")]);
        assert_eq!(disks_with_our_serial(sys_block.path()), ["vdb"]);
        assert!(disks_with_our_serial(&sys_block.path().join("missing")).is_empty());
    }

    #[test]
    fn facts_of_a_port() {
        let directory = tempfile::tempdir().unwrap();
        write_attributes(directory.path(), PORT);
        let facts = DiskFacts::read_directory(directory.path()).unwrap();
        assert_eq!(facts.check(), Ok(()));
        assert_eq!(facts.block_count, 16384);
        assert_eq!(facts.queue_page_count_max, 126);
    }

    #[test]
    fn other_disks_are_refused_with_the_reason() {
        let refusal = |attributes: &[(&str, &str)]| {
            let directory = tempfile::tempdir().unwrap();
            write_attributes(directory.path(), PORT);
            write_attributes(directory.path(), attributes);
            match DiskFacts::read_directory(directory.path()) {
                Ok(facts) => facts.check().unwrap_err(),
                Err(NoFacts::Wrong(reason)) => reason,
                Err(NoFacts::Unplugged(error)) => panic!("{error}"),
            }
        };
        assert!(refusal(&[("serial", "data1\n")]).contains("data1"));
        assert!(refusal(&[("serial", "\n")]).contains("serial number"));
        assert!(refusal(&[("partition", "1\n")]).contains("partition"));
        assert!(refusal(&[("size", "8\n")]).contains("too small"));
        assert!(refusal(&[("size", "many\n")]).contains("no size"));
    }

    #[test]
    fn chosen_path_that_is_no_disk_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let code = |path: &Path| Port::open(Some(path)).err().map(|error| error.exit_code());
        assert_eq!(code(file.path()), Some(6));
        assert_eq!(code(Path::new("/dev/does-not-exist")), Some(5));
        assert_eq!(fs::metadata(file.path()).unwrap().len(), 0, "nothing was written");
    }

    #[test]
    fn batches_never_touch_block_0_or_the_end() {
        assert_eq!(batch_position(1, 15, 16), 1);
        assert_eq!(batch_position(2, 15, 16), 1);
        assert_eq!(batch_position(8, 8, 16), 8);
        assert_eq!(batch_position(16, 1, 16), 1);
    }
}
