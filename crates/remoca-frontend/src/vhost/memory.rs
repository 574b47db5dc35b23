//! The guest's memory as the front end shares it, and its translation from the front end's own addresses.
//!
//! Each region is a file mapped shared. A table is never changed: the control thread builds the next one and the I/O
//! thread takes it over, while requests in flight keep the old one, and so its mappings, alive. A front end that
//! truncates such a file afterwards kills this process by SIGBUS; QEMU seals its memfd against that.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use rustix::mm::{Advice, madvise};
use vhost::vhost_user::message::VhostUserMemoryRegion;
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryError, GuestMemoryMmap, GuestMemoryRegion,
    GuestRegionMmap, VolatileSlice,
};

use super::config::QUEUE_SIZE_MAX;
use super::footprint::{FileId, Footprint, file_in_memory};
use super::layout::RingLayout;
use super::log::{LogSwitch, PartLog, RegionLog};
use remoca_io::handover::Pass;
use remoca_io::undumped;
use remoca_io::wake;
use remoca_protocol::guests::{MemoryRegion, RingAddresses};

pub(crate) type GuestMemory = GuestMemoryMmap<RegionLog>;

/// Returns whether guest memory has these bytes.
pub(crate) fn contains(memory: &GuestMemory, address: GuestAddress, length: usize) -> bool {
    within_region(memory, address, length).is_some() || memory.check_range(address, length)
}

/// Copies bytes of guest memory to `target`.
pub(crate) fn read(memory: &GuestMemory, address: GuestAddress, target: &mut [u8]) -> Result<(), GuestMemoryError> {
    match within_region(memory, address, target.len()) {
        Some(bytes) => {
            bytes.copy_to(target);
            Ok(())
        }
        None => memory.read_slice(target, address),
    }
}

/// Copies `source` to guest memory.
pub(crate) fn write(memory: &GuestMemory, address: GuestAddress, source: &[u8]) -> Result<(), GuestMemoryError> {
    match within_region(memory, address, source.len()) {
        Some(bytes) => {
            bytes.copy_from(source);
            Ok(())
        }
        None => memory.write_slice(source, address),
    }
}

/// Returns bytes that lie in one region, as nearly all do, or `None` if they do not. `vm_memory`'s own access is prepared for bytes in several
/// regions: it was the dearest part of a read (decision 0041).
#[inline]
fn within_region(memory: &GuestMemory, address: GuestAddress, length: usize) -> Option<VolatileSlice<'_, PartLog<'_>>> {
    let region = memory.find_region(address)?;
    region.get_slice(region.to_region_addr(address)?, length).ok()
}

/// Number of bytes of guest memory that are let go at a time. A page fault of another thread may have to wait for them.
const PIECE_BYTES: usize = 16 << 20;

/// The guest's memory as this process has mapped it.
pub struct MappedMemory(Arc<GuestMemory>);

impl MappedMemory {
    pub(crate) fn new(memory: Arc<GuestMemory>) -> Self {
        Self(memory)
    }

    /// Makes the kernel forget where pages are mapped, so that it has less to do when the mappings end. Takes a time for each
    /// page that was touched, and stops at `give_up_at`. Other threads may use the memory meanwhile: each page is found again
    /// in its file.
    pub fn let_go(&self, give_up_at: Instant) {
        // The pages of a private mapping would be lost.
        let is_shared = |flags: i32| flags & libc::MAP_SHARED != 0;
        for region in self.0.iter().filter(|region| is_shared(region.flags())) {
            for offset in (0..region.size()).step_by(PIECE_BYTES) {
                if Instant::now() >= give_up_at {
                    return;
                }
                let (start, length) = (region.as_ptr().wrapping_add(offset), PIECE_BYTES.min(region.size() - offset));
                // SAFETY: the range is within the mapping, which lives as long as `self`. It is one of a file, shared, so what it
                // holds does not change.
                let advised = unsafe { madvise(start.cast(), length, Advice::LinuxDontNeed) };
                if let Err(error) = advised {
                    tracing::debug!("{length} bytes of guest memory stay mapped: {error}");
                }
            }
        }
    }
}

/// Regions that one front end may share; each is a mapping and a descriptor.
pub(crate) const REGION_COUNT_MAX: usize = 128;

/// Why a memory table or an address in it is refused.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    #[error("{0} memory regions, at most 128 are possible")]
    TooMany(usize),
    #[error("memory region at guest address {0:#x} has no size or wraps around")]
    Range(u64),
    #[error("file of the memory region at guest address {guest:#x} has {file_bytes} bytes, the region ends at {end}")]
    FileTooShort { guest: u64, file_bytes: u64, end: u64 },
    #[error("cannot map the memory region at guest address {guest:#x}")]
    Map { guest: u64, source: std::io::Error },
    #[error("memory regions overlap")]
    Overlap,
    #[error("no memory region at guest address {0:#x}")]
    Missing(u64),
    #[error(
        "a ring at {user:#x} ({length} bytes) is in none of the {regions} memory regions that the hypervisor shares. All memory of \
         the guest must be shared: memory-backend-memfd with share=on for QEMU, <memoryBacking> with <access mode='shared'/> for \
         libvirt"
    )]
    Untranslatable { user: u64, length: u64, regions: usize },
    #[error("queue size {0} is zero, above 1024 or not a power of two")]
    QueueSize(u32),
}

#[derive(Clone)]
struct Region {
    guest: u64,
    user: u64,
    length: u64,
    mapping: Arc<GuestRegionMmap<RegionLog>>,
    /// `None` if the region is not a file in memory.
    file: Option<FileId>,
}

/// A memory table; immutable, cheap to clone.
#[derive(Clone)]
pub(crate) struct MemoryTable {
    regions: Vec<Region>,
    memory: Arc<GuestMemory>,
    log: Arc<LogSwitch>,
}

impl MemoryTable {
    /// Returns a table without regions. Writes to regions that are added later are logged by `log`.
    pub fn empty(log: Arc<LogSwitch>) -> Self {
        MemoryTable { regions: Vec::new(), memory: Arc::default(), log }
    }

    pub fn with_all(&self, regions: &[VhostUserMemoryRegion], files: Vec<File>) -> Result<Self, MemoryError> {
        let mapped = regions.iter().zip(files).map(|(region, file)| map(region, file, &self.log));
        self.rebuilt(mapped.collect::<Result<Vec<_>, _>>()?)
    }

    pub fn with_added(&self, region: &VhostUserMemoryRegion, file: File) -> Result<Self, MemoryError> {
        let mut regions = self.regions.clone();
        regions.push(map(region, file, &self.log)?);
        self.rebuilt(regions)
    }

    pub fn with_removed(&self, region: &VhostUserMemoryRegion) -> Result<Self, MemoryError> {
        let (guest, user, length) = (region.guest_phys_addr, region.user_addr, region.memory_size);
        let same = |region: &Region| (region.guest, region.user, region.length) == (guest, user, length);
        let position = self.regions.iter().position(same).ok_or(MemoryError::Missing(guest))?;
        let mut regions = self.regions.clone();
        regions.remove(position);
        self.rebuilt(regions)
    }

    fn rebuilt(&self, mut regions: Vec<Region>) -> Result<Self, MemoryError> {
        if regions.len() > REGION_COUNT_MAX {
            return Err(MemoryError::TooMany(regions.len()));
        }
        regions.sort_by_key(|region| region.guest);
        let mappings: Vec<_> = regions.iter().map(|region| region.mapping.clone()).collect();
        let memory = match mappings.is_empty() {
            true => GuestMemory::default(),
            false => GuestMemory::from_arc_regions(mappings).map_err(|_| MemoryError::Overlap)?,
        };
        Ok(MemoryTable { regions, memory: Arc::new(memory), log: self.log.clone() })
    }

    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// Returns the regions, for a program that maps them as well. Their files are what `pass` returns for them.
    pub fn pass<G>(&self, pass: &mut Pass<'_, G>) -> io::Result<Vec<MemoryRegion<G>>> {
        let regions = self.regions.iter().map(|region| {
            let file = region.mapping.file_offset().expect("regions are mapped files");
            let (guest, user, bytes) = (region.guest, region.user, region.length);
            Ok(MemoryRegion { file: pass(file.file().as_fd())?, file_offset: file.start(), guest, user, bytes })
        });
        regions.collect()
    }

    pub fn footprint(&self) -> Footprint {
        let file = |region: &Region| region.mapping.file_offset().expect("regions are mapped files").arc().clone();
        Footprint::new(self.regions.iter().map(|region| (region.length, region.file, file(region))))
    }

    /// Returns the guest address of `length` bytes at the front end's address `user`.
    fn translate(&self, user: u64, length: u64) -> Result<GuestAddress, MemoryError> {
        let inside = |region: &&Region| {
            let offset = user.checked_sub(region.user);
            offset.and_then(|offset| offset.checked_add(length)).is_some_and(|end| end <= region.length)
        };
        let region = self.regions.iter().find(inside).ok_or(MemoryError::Untranslatable {
            user,
            length,
            regions: self.regions.len(),
        })?;
        Ok(GuestAddress(region.guest + (user - region.user)))
    }

    /// Translates the front end's addresses of the three parts of a ring to a layout in guest memory.
    pub fn ring_layout(&self, addresses: &RingAddresses, size: u32) -> Result<RingLayout, MemoryError> {
        let checked = u16::try_from(size).ok().filter(|size| size.is_power_of_two() && *size <= QUEUE_SIZE_MAX);
        let size = checked.ok_or(MemoryError::QueueSize(size))?;
        Ok(RingLayout {
            size,
            descriptors: self.translate(addresses.descriptors, RingLayout::descriptors_bytes(size))?,
            available: self.translate(addresses.available, RingLayout::available_bytes(size))?,
            used: self.translate(addresses.used, RingLayout::used_bytes(size))?,
            used_log: addresses.used_log,
        })
    }
}

/// Returns a region as the front end described it, and its file.
pub(crate) fn region_of(region: MemoryRegion<OwnedFd>) -> (VhostUserMemoryRegion, File) {
    let MemoryRegion { file, file_offset, guest, user, bytes } = region;
    (VhostUserMemoryRegion::new(guest, bytes, user, file_offset), file.into())
}

fn map(region: &VhostUserMemoryRegion, file: File, log: &Arc<LogSwitch>) -> Result<Region, MemoryError> {
    let (guest, user, length) = (region.guest_phys_addr, region.user_addr, region.memory_size);
    let (offset, range_error) = (region.mmap_offset, MemoryError::Range(guest));
    let wraps = [guest, user, offset].iter().any(|start| start.checked_add(length).is_none());
    let (Ok(size), false, 1..) = (usize::try_from(length), wraps, length) else {
        return Err(range_error);
    };
    check_file_covers(&file, guest, offset + length)?;
    let id = file_in_memory(&file);
    wake::keep(&file).map_err(|source| MemoryError::Map { guest, source })?;
    let mapping = MmapRegionBuilder::new_with_bitmap(size, RegionLog::new(log.clone(), guest))
        .with_file_offset(FileOffset::new(file, offset))
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
        .with_mmap_flags(libc::MAP_NORESERVE | libc::MAP_SHARED)
        .build()
        .map_err(|error| MemoryError::Map { guest, source: std::io::Error::other(error) })?;
    // SAFETY: the range is the mapping's; the advice changes nothing of what it holds.
    unsafe { undumped::leave_out(mapping.as_ptr().cast(), size) };
    let mapping = GuestRegionMmap::new(mapping, GuestAddress(guest)).ok_or(range_error)?;
    Ok(Region { guest, user, length, mapping: Arc::new(mapping), file: id })
}

/// Checks that the file covers the region. Access beyond the end of a mapped file is a SIGBUS, so it is refused here.
/// Device files have no length.
pub(crate) fn check_file_covers(file: &File, guest: u64, end: u64) -> Result<(), MemoryError> {
    let metadata = file.metadata().map_err(|source| MemoryError::Map { guest, source })?;
    if metadata.is_file() && metadata.len() < end {
        return Err(MemoryError::FileTooShort { guest, file_bytes: metadata.len(), end });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, memfd_create};
    use std::os::unix::fs::FileExt;
    use std::time::Duration;

    /// Two regions side by side, a hole, and another one.
    fn memory() -> GuestMemory {
        GuestMemory::from_ranges(&[
            (GuestAddress(0x1000), 0x1000),
            (GuestAddress(0x2000), 0x1000),
            (GuestAddress(0x8000), 0x1000),
        ])
        .unwrap()
    }

    /// Returns whether the page at `start + offset` is in the page table of this process.
    fn is_mapped(start: *mut u8, offset: usize) -> bool {
        let (page, mut entry) = ((start.addr() + offset) / 4096, [0; 8]);
        File::open("/proc/self/pagemap").unwrap().read_exact_at(&mut entry, page as u64 * 8).unwrap();
        u64::from_ne_bytes(entry) >> 63 == 1
    }

    #[test]
    fn memory_that_is_let_go_is_not_mapped_and_holds_what_it_held() {
        let file = File::from(memfd_create("memory", MemfdFlags::CLOEXEC).unwrap());
        let bytes = PIECE_BYTES + 8192;
        file.set_len(bytes as u64).unwrap();
        let region = VhostUserMemoryRegion::new(0x10000, bytes as u64, 0x7000_0000, 0);
        let table = MemoryTable::empty(Arc::default()).with_added(&region, file).unwrap();
        let start = table.regions[0].mapping.as_ptr();
        // In the first piece and in the second.
        let offsets = [0, PIECE_BYTES - 4096, PIECE_BYTES + 4096];
        let address = |offset: usize| GuestAddress(0x10000 + offset as u64);
        for offset in offsets {
            write(table.memory(), address(offset), &offset.to_ne_bytes()).unwrap();
        }
        let mapped = || offsets.map(|offset| is_mapped(start, offset));
        let memory = MappedMemory::new(Arc::clone(table.memory()));
        let now = Instant::now();
        memory.let_go(now);
        assert_eq!(mapped(), [true; 3], "its time is over");
        memory.let_go(now + Duration::from_secs(3600));
        assert_eq!(mapped(), [false; 3]);
        for offset in offsets {
            let mut held = [0; 8];
            read(table.memory(), address(offset), &mut held).unwrap();
            assert_eq!(usize::from_ne_bytes(held), offset);
        }
    }

    /// Prints what ending a mapping takes, whose pages are let go before and are not. `REMOCA_LET_GO_GIB` makes it as large.
    #[test]
    fn let_go_cost() {
        let gib = std::env::var("REMOCA_LET_GO_GIB").ok().and_then(|gib| gib.parse::<u64>().ok());
        let bytes = gib.map_or(2 * PIECE_BYTES as u64, |gib| gib << 30);
        let file = memfd_create("memory", MemfdFlags::CLOEXEC).unwrap();
        let region = VhostUserMemoryRegion::new(0, bytes, 0x7000_0000, 0);
        for lets_go in [false, true, false, true] {
            let file = File::from(file.try_clone().unwrap());
            file.set_len(bytes).unwrap();
            let table = MemoryTable::empty(Arc::default()).with_added(&region, file).unwrap();
            for at in (0..bytes).step_by(4096) {
                write(table.memory(), GuestAddress(at), &[1]).unwrap();
            }
            let began = Instant::now();
            if lets_go {
                MappedMemory::new(Arc::clone(table.memory())).let_go(began + Duration::from_secs(3600));
            }
            let before = began.elapsed();
            drop(table);
            let after = began.elapsed() - before;
            println!("{} MiB, let go in {before:.1?} before: unmapped in {after:.1?}", bytes >> 20);
        }
    }

    #[test]
    fn memory_that_would_be_lost_is_not_let_go() {
        let memory = Arc::new(memory());
        write(&memory, GuestAddress(0x1000), &[7; 16]).unwrap();
        MappedMemory::new(Arc::clone(&memory)).let_go(Instant::now() + Duration::from_secs(3600));
        let mut held = [0; 16];
        read(&memory, GuestAddress(0x1000), &mut held).unwrap();
        assert_eq!(held, [7; 16]);
    }

    #[test]
    fn bytes_are_reached_within_a_region_and_across_two_but_in_no_hole() {
        let memory = memory();
        for (address, length, is_there) in [
            (0x1000, 0x1000, true),
            (0x1ffc, 8, true),
            (0x1000, 0x2000, true),
            (0x8fff, 1, true),
            (0x2ffc, 8, false),
            (0x0fff, 2, false),
            (0x8fff, 2, false),
            (0x5000, 1, false),
            (u64::MAX, 2, false),
        ] {
            let source: Vec<u8> = (1..=251).cycle().take(length).collect();
            let mut target = vec![0; length];
            let address = GuestAddress(address);
            assert_eq!(contains(&memory, address, length), is_there, "{address:?} {length}");
            assert_eq!(write(&memory, address, &source).is_ok(), is_there, "{address:?} {length}");
            assert_eq!(read(&memory, address, &mut target).is_ok(), is_there, "{address:?} {length}");
            assert!(!is_there || source == target, "{address:?} {length}");
        }
    }
}
