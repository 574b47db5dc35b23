//! The header of the state file: what a successor needs besides the index's words.
//!
//! ```text
//! 64-bit words:  fixed 32 | pools: 64 each, 16 of them | disk numbers: 16 each | to the next page: nothing | index
//! ```
//! Each memory server has one pool so far. Words without a name are 0. Every field is one word, which a single store changes. A record is made void, filled, and made valid, in this order.
//! Only the I/O thread writes. The header holds the fingerprint key and the tokens of pools, so the file is readable
//! only by its owner.

use crate::endpoints::SERVERS_MAX;
use remoca_core::engine::ServerNumber;
use remoca_core::index::DISK_BYTES_MAX;
use remoca_core::units::{DiskIndex, PAGE_SIZE_U64, PageCount};
use remoca_io::address::Endpoint;
use remoca_io::sizes;
use remoca_io::undumped;
use remoca_protocol::Token;
use remoca_store::ImageStamp;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::time::ClockId;
use std::fs::File;
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// Highest server number that is accepted from another process. As many numbers are left for new servers.
pub const NUMBER_MAX: u32 = u32::MAX / 2;
/// First word of a valid file. Versions 1 and 2 began with `REMOCAST`, as the page of the agent's statistics does.
pub const MAGIC: u64 = u64::from_le_bytes(*b"REMOCASF");
/// Version of the layout. A process starts cold from a file of any other.
pub const VERSION: u64 = 4;

const AT_MAGIC: usize = 0;
const AT_VERSION: usize = 1;
const AT_BOOT: usize = 2;
const AT_KEY: usize = 4;
const AT_SEED: usize = 6;
const AT_DISKS: usize = 7;
const AT_INDEX_WORDS: usize = 8;
/// Number of server numbers that were assigned.
const AT_NUMBERS: usize = 9;
/// The [`Settings`]: a hash of the options, and `size of the cache << 8 | number of servers << 1 | on`.
const AT_OPTIONS: usize = 11;
const AT_SETTINGS: usize = 12;
/// Number of servers in [`AT_SETTINGS`] that no list has.
const SERVERS_UNKNOWN: u64 = 0x7f << 1;
/// `size of the local tier << 1 | 1`; 0 if there is none. Its server is the one after those of the list.
const AT_LOCAL: usize = 13;
/// The hash of each size in the options. Programs before this one leave what is there.
const AT_OPTION_SIZES: usize = 14;

/// Bytes of an endpoint that fit into the record of its server.
const ENDPOINT_MAX: usize = 35 * 8;

/// Words of a server's record. Those of former programs of this version are 0: they have no mapped pools, and do not keep
/// what they drain.
const SERVER_SENDS: usize = 40;
const SERVER_LEAVES: usize = 41;

const DISK: usize = 16;
const DISK_SEEN: usize = 4;
const DISK_WRITTEN: usize = 5;
const DISK_CLOCK: usize = 6;
const DISK_FLUSH: usize = 7;
const DISK_NAME: usize = 8;
/// Size of the image before it became smaller. 0: it is as large as ever.
const DISK_HAD: usize = 9;

/// Sizes of the header's parts, in words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    version: u64,
    fixed: usize,
    server: usize,
}

/// Shape of the current version.
const SHAPE: Shape = Shape { version: VERSION, fixed: 32, server: 64 };
/// Shapes of this version and of the former one, of which what does not depend on the index is still read.
const SHAPES: [Shape; 2] = [SHAPE, Shape { version: 3, fixed: 16, server: 40 }];

impl Shape {
    /// Returns the shape of a header of this version, or `None` if the version is not known.
    pub(super) fn of_version(version: u64) -> Option<Self> {
        SHAPES.into_iter().find(|shape| shape.version == version)
    }

    fn disks_at(self) -> usize {
        self.fixed + SERVERS_MAX * self.server
    }

    /// Returns the size in bytes of the header for `disks` disk numbers, a multiple of 4096.
    pub(super) fn bytes(self, disks: u16) -> u64 {
        ((self.disks_at() + usize::from(disks) * DISK) as u64 * 8).next_multiple_of(4096)
    }
}

/// One memory server, with the token and epoch that make its pool this process's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RosterEntry {
    pub number: ServerNumber,
    pub endpoint: Endpoint,
    pub token: Token,
    pub epoch: u64,
    /// Number of pages that this process, and those before it, have written to mapped pools there.
    pub sends: u64,
    /// Whether it was taken out of the list, and its pool is drained.
    pub leaves: bool,
}

/// Hashes of the options that `remoca set` can overrule. They tell a successor which of them have changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OptionHashes {
    /// Hash of the sizes together, above that of the servers.
    pub all: u64,
    /// Hash of the cache's size, above that of the local tier's. They mean nothing beside any other `all`.
    pub sizes: u64,
}

/// The current values of what `remoca set` can change. The servers are in the roster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Hashes of the options that the process was started with.
    pub options: OptionHashes,
    pub cache: PageCount,
    /// Size of the local tier; `None` if it has no server.
    pub local: Option<PageCount>,
    pub enabled: bool,
    /// Number of servers of the list.
    pub servers: usize,
}

/// The record of a disk's image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskRecord {
    /// Identity of the image. All 0: there is no record.
    pub identity: [u64; 4],
    /// When the image was last changed, as of the last look at it. 0: that is not known.
    pub seen_ns: u64,
    /// When a write of this process was last in flight. 0: the image has settled, and `seen_ns` is later.
    pub written_ns: u64,
    /// Real time minus time since the boot at `written_ns`, in nanoseconds.
    pub clock_offset: i64,
}

/// The mapped header.
pub struct Header {
    start: NonNull<AtomicU64>,
    words: usize,
    shape: Shape,
}

// SAFETY: all access is by atomic operations on memory that lives as long as the value.
unsafe impl Send for Header {}
// SAFETY: as above.
unsafe impl Sync for Header {}

impl Header {
    /// Offsets of the version and of the number of disk numbers, in bytes.
    pub const VERSION_AT: u64 = AT_VERSION as u64 * 8;
    pub const DISKS_AT: u64 = AT_DISKS as u64 * 8;

    /// Returns the size in bytes of the header for `disks` disk numbers, a multiple of 4096.
    pub fn bytes(disks: u16) -> u64 {
        SHAPE.bytes(disks)
    }

    /// Maps the header of `file`, which must have at least [`Self::bytes`] bytes.
    pub fn map(file: &File, disks: u16) -> io::Result<Self> {
        Self::map_as(file, disks, SHAPE)
    }

    /// Maps the header of `file`, which has this shape and must be long enough for it.
    pub(super) fn map_as(file: &File, disks: u16, shape: Shape) -> io::Result<Self> {
        let bytes = usize::try_from(shape.bytes(disks)).map_err(io::Error::other)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let start = unsafe { mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, file, 0)? };
        // SAFETY: the mapping was just made, has so many bytes, and is ours.
        unsafe { undumped::leave_out(start, bytes) };
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, words: bytes / 8, shape })
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at < self.words, "a word beyond the header");
        // SAFETY: inside the mapping, aligned, and never accessed but atomically.
        unsafe { self.start.add(at).as_ref() }
    }

    fn get(&self, at: usize) -> u64 {
        self.word(at).load(Ordering::Acquire)
    }

    /// Stores a value. The compiler does not move it before earlier stores, here or in the index.
    fn set(&self, at: usize, value: u64) {
        self.word(at).store(value, Ordering::Release);
        #[cfg(test)]
        tests::note_store(self);
    }

    fn pair(&self, at: usize) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.get(at).to_le_bytes());
        bytes[8..].copy_from_slice(&self.get(at + 1).to_le_bytes());
        bytes
    }

    fn set_pair(&self, at: usize, bytes: [u8; 16]) {
        for (i, half) in bytes.chunks_exact(8).enumerate() {
            self.set(at + i, half.try_into().map_or(0, u64::from_le_bytes));
        }
    }

    /// Returns whether this is a valid header of its shape's version.
    pub fn is_valid(&self) -> bool {
        self.get(AT_MAGIC) == MAGIC && self.get(AT_VERSION) == self.shape.version
    }

    /// Sets whether the file is valid from now on.
    pub fn set_valid(&self, valid: bool) {
        self.set(AT_VERSION, self.shape.version);
        self.set(AT_MAGIC, if valid { MAGIC } else { 0 });
    }

    pub fn boot_id(&self) -> [u8; 16] {
        self.pair(AT_BOOT)
    }

    pub fn key(&self) -> [u8; 16] {
        self.pair(AT_KEY)
    }

    pub fn seed(&self) -> u64 {
        self.get(AT_SEED)
    }

    pub fn disks(&self) -> u64 {
        self.get(AT_DISKS)
    }

    pub fn index_words(&self) -> u64 {
        self.get(AT_INDEX_WORDS)
    }

    /// Writes the fields that do not change while the file is used.
    pub fn describe(&self, boot_id: [u8; 16], key: [u8; 16], seed: u64, disks: u16, index_words: u64) {
        self.set_pair(AT_BOOT, boot_id);
        self.set_pair(AT_KEY, key);
        self.set(AT_SEED, seed);
        self.set(AT_DISKS, u64::from(disks));
        self.set(AT_INDEX_WORDS, index_words);
    }

    /// Clears the key, which would tell a stranger what the disks hold, and the roster, which would give away the pools.
    pub fn forget_secrets(&self) {
        self.set_pair(AT_KEY, [0; 16]);
        (self.shape.fixed..self.shape.disks_at()).for_each(|at| self.set(at, 0));
    }

    /// Copies all fields of `old` except its validity, its version and its size.
    pub fn copy_from(&self, old: &Self) {
        for at in (0..self.words.min(old.words)).filter(|at| ![AT_MAGIC, AT_VERSION, AT_INDEX_WORDS].contains(at)) {
            self.set(at, old.get(at));
        }
    }

    fn disk_at(&self, disk: DiskIndex) -> usize {
        self.shape.disks_at() + usize::from(disk.0) * DISK
    }

    pub fn disk(&self, disk: DiskIndex) -> DiskRecord {
        let at = self.disk_at(disk);
        DiskRecord {
            identity: [0, 1, 2, 3].map(|i| self.get(at + i)),
            seen_ns: self.get(at + DISK_SEEN),
            written_ns: self.get(at + DISK_WRITTEN),
            clock_offset: self.get(at + DISK_CLOCK).cast_signed(),
        }
    }

    /// Returns the hash of the name of a disk, or 0 if no disk has the number.
    pub fn disk_name(&self, disk: DiskIndex) -> u64 {
        self.get(self.disk_at(disk) + DISK_NAME)
    }

    /// Sets the hash of the name of a disk. If it had another one, the record of its image is cleared.
    pub fn set_disk_name(&self, disk: DiskIndex, name: u64) {
        if self.disk_name(disk) != name {
            self.clear_disk(disk);
            self.set(self.disk_at(disk) + DISK_NAME, name);
        }
    }

    /// Clears the record of a disk's image. If a flush has failed, that and the image's identity are kept.
    pub fn clear_disk(&self, disk: DiskIndex) {
        let at = self.disk_at(disk);
        self.set(at + DISK_SEEN, 0);
        self.set(at + DISK_NAME, 0);
        self.set(at + DISK_HAD, 0);
        if self.flush_failed(disk).is_none() {
            (0..4).for_each(|i| self.set(at + i, 0));
        }
    }

    /// Records a failed flush of an image that no disk has.
    pub fn keep_failed_flush(&self, disk: DiskIndex, image: [u64; 3], errno: i32) {
        self.clear_disk(disk);
        (0..).zip(image).for_each(|(i, word)| self.set(self.disk_at(disk) + i, word));
        self.set_flush_failed(disk, Some(errno));
    }

    /// Records the image of a disk, as if a write were in flight.
    pub fn set_disk(&self, disk: DiskIndex, stamp: &ImageStamp, clock: Clock) {
        let at = self.disk_at(disk);
        self.set(at + DISK_SEEN, 0);
        for (i, word) in stamp.identity.into_iter().enumerate() {
            self.set(at + i, word);
        }
        self.set_written(disk, clock);
        self.set(at + DISK_SEEN, stamp.changed_ns.unwrap_or(0));
    }

    /// Returns the size that the image of a disk had before it became smaller, or `None` if it is as large as ever.
    pub fn had_bytes(&self, disk: DiskIndex) -> Option<u64> {
        Some(self.get(self.disk_at(disk) + DISK_HAD)).filter(|bytes| *bytes > 0)
    }

    /// Returns the largest size that is known of this image, in whole blocks, or `None` if the disk's record is of another image.
    pub fn largest_bytes(&self, disk: DiskIndex, image: [u64; 3]) -> Option<u64> {
        let [kind, device, inode, size] = self.disk(disk).identity;
        // What a disk does not use of its image is no part of its size.
        let size = (size - size % PAGE_SIZE_U64).min(DISK_BYTES_MAX);
        ([kind, device, inode] == image).then(|| size.max(self.had_bytes(disk).unwrap_or(0)))
    }

    /// Records the size that the image of a disk had before it became smaller, or that it is as large as ever.
    pub fn set_had_bytes(&self, disk: DiskIndex, bytes: Option<u64>) {
        self.set(self.disk_at(disk) + DISK_HAD, bytes.unwrap_or(0));
    }

    /// Returns the error number of the flush or durable write of this disk that failed, or `None` if none has.
    pub fn flush_failed(&self, disk: DiskIndex) -> Option<i32> {
        i32::try_from(self.get(self.disk_at(disk) + DISK_FLUSH)).ok().filter(|errno| *errno > 0)
    }

    pub fn set_flush_failed(&self, disk: DiskIndex, errno: Option<i32>) {
        self.set(self.disk_at(disk) + DISK_FLUSH, errno.and_then(|errno| u64::try_from(errno).ok()).unwrap_or(0));
    }

    /// Marks the image as written at the time of `clock`: writes are in flight, or about to be.
    pub fn set_written(&self, disk: DiskIndex, clock: Clock) {
        // The order matters: an old time with the offset of a clock that was set since would be believed.
        self.set(self.disk_at(disk) + DISK_WRITTEN, clock.real_ns);
        self.set(self.disk_at(disk) + DISK_CLOCK, clock.offset().cast_unsigned());
    }

    /// Records, while writes are in flight, that the image was last changed at `seen_ns` or later. 0: that is not known.
    pub fn set_seen(&self, disk: DiskIndex, seen_ns: u64) {
        self.set(self.disk_at(disk) + DISK_SEEN, seen_ns);
    }

    /// Records that no write is in flight, and none was for long enough: the image was last changed at `seen_ns`.
    pub fn set_settled(&self, disk: DiskIndex, seen_ns: u64) {
        self.set(self.disk_at(disk) + DISK_SEEN, seen_ns);
        self.set(self.disk_at(disk) + DISK_WRITTEN, 0);
    }

    /// Returns the number that the next new server gets.
    pub fn server_numbers(&self) -> u32 {
        sizes::short(self.get(AT_NUMBERS).min(NUMBER_MAX.into()))
    }

    pub fn set_server_numbers(&self, numbers: u32) {
        self.set(AT_NUMBERS, numbers.into());
    }

    pub fn settings(&self) -> Settings {
        let word = self.get(AT_SETTINGS);
        Settings {
            options: OptionHashes { all: self.get(AT_OPTIONS), sizes: self.get(AT_OPTION_SIZES) },
            cache: PageCount(u32::try_from(word >> 8).unwrap_or(0)),
            local: self.local_tier(),
            enabled: word & 1 == 1,
            servers: (word >> 1 & 0x7f) as usize,
        }
    }

    fn local_tier(&self) -> Option<PageCount> {
        let word = self.get(AT_LOCAL);
        (word & 1 == 1).then(|| PageCount(u32::try_from(word >> 1).unwrap_or(0)))
    }

    pub fn set_settings(&self, settings: &Settings) {
        self.set(AT_LOCAL, settings.local.map_or(0, |size| u64::from(size.0) << 1 | 1));
        let (cache, servers) = (u64::from(settings.cache.0), settings.servers as u64);
        self.set(AT_SETTINGS, cache << 8 | servers << 1 | u64::from(settings.enabled));
        // After them: with the options of a previous process the settings mean nothing.
        self.set(AT_OPTIONS, settings.options.all);
        // Asked only where the options are others than these, by a successor of a process that lived to write both.
        self.set(AT_OPTION_SIZES, settings.options.sizes);
    }

    fn server_at(&self, slot: usize) -> usize {
        self.shape.fixed + slot * self.shape.server
    }

    /// Returns the recorded servers. Records that are not valid are skipped. A server is there twice if a process died that moved
    /// its record to another slot: it is returned once.
    pub fn roster(&self) -> Vec<RosterEntry> {
        let mut roster: Vec<RosterEntry> = Vec::new();
        for entry in (0..SERVERS_MAX).filter_map(|slot| self.server(slot)) {
            if roster.iter().all(|known| known.number != entry.number) {
                roster.push(entry);
            }
        }
        roster
    }

    fn server(&self, slot: usize) -> Option<RosterEntry> {
        let at = self.server_at(slot);
        let number = u32::try_from(self.get(at).checked_sub(1)?).ok().filter(|number| *number <= NUMBER_MAX)?;
        let length = usize::try_from(self.get(at + 4)).ok().filter(|length| *length <= ENDPOINT_MAX)?;
        let mut bytes: Vec<u8> = (0..length.div_ceil(8)).flat_map(|i| self.get(at + 5 + i).to_le_bytes()).collect();
        bytes.truncate(length);
        let endpoint = String::from_utf8(bytes).ok()?.parse().ok()?;
        Some(RosterEntry {
            number: ServerNumber(number),
            endpoint,
            token: Token(self.pair(at + 1)),
            epoch: self.get(at + 3),
            sends: if self.shape.server > SERVER_SENDS { self.get(at + SERVER_SENDS) } else { 0 },
            leaves: self.shape.server > SERVER_LEAVES && self.get(at + SERVER_LEAVES) == 1,
        })
    }

    /// Records these servers in place of all others. A process that dies meanwhile leaves no list: part of it would be believed.
    pub fn set_roster(&self, servers: &[RosterEntry]) {
        let settings = self.get(AT_SETTINGS);
        self.set(AT_SETTINGS, settings | SERVERS_UNKNOWN);
        (0..SERVERS_MAX).for_each(|slot| self.set_server(slot, servers.get(slot)));
        self.set(AT_SETTINGS, settings);
    }

    /// Records `entry` in `slot`, or clears the slot. A server whose endpoint is too long for the record starts cold
    /// after a restart.
    pub fn set_server(&self, slot: usize, entry: Option<&RosterEntry>) {
        let at = self.server_at(slot);
        self.set(at, 0);
        let Some(entry) = entry else { return };
        let text = entry.endpoint.to_string();
        if text.len() > ENDPOINT_MAX {
            return;
        }
        self.set_pair(at + 1, entry.token.0);
        self.set(at + 3, entry.epoch);
        self.set(at + 4, text.len() as u64);
        for (i, piece) in text.as_bytes().chunks(8).enumerate() {
            let mut bytes = [0; 8];
            bytes[..piece.len()].copy_from_slice(piece);
            self.set(at + 5 + i, u64::from_le_bytes(bytes));
        }
        self.set_sends(slot, entry.sends);
        self.set(at + SERVER_LEAVES, entry.leaves.into());
        self.set(at, u64::from(entry.number.0) + 1);
    }

    /// Records the epoch of the server in `slot`, if there is such a slot. Called before the epoch is used.
    pub fn set_epoch(&self, slot: usize, epoch: u64) {
        if slot < SERVERS_MAX {
            self.set(self.server_at(slot) + 3, epoch);
        }
    }

    /// Records how many pages were written to mapped pools of the server in `slot`, if there is such a slot. Called after
    /// they are written.
    pub fn set_sends(&self, slot: usize, sends: u64) {
        if slot < SERVERS_MAX {
            self.set(self.server_at(slot) + SERVER_SENDS, sends);
        }
    }
}

impl Drop for Header {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours alone and nothing borrows it any more.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.words * 8) };
    }
}

/// A reading of two clocks: the real time, which files are stamped with, and the time since the boot, which cannot be set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Clock {
    pub real_ns: u64,
    pub boot_ns: u64,
}

impl Clock {
    pub fn now() -> Self {
        Self { real_ns: read_clock(ClockId::Realtime), boot_ns: read_clock(ClockId::Boottime) }
    }

    /// Returns the kernel's coarse real time, in nanoseconds. A file that is changed now is stamped with this time, or
    /// a later one.
    pub fn coarse_ns() -> u64 {
        read_clock(ClockId::RealtimeCoarse)
    }

    pub fn offset(self) -> i64 {
        self.real_ns.cast_signed().wrapping_sub(self.boot_ns.cast_signed())
    }
}

fn read_clock(clock: ClockId) -> u64 {
    let time = rustix::time::clock_gettime(clock);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    seconds.saturating_mul(1_000_000_000).saturating_add(u64::try_from(time.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
#[path = "header_tests.rs"]
mod tests;
