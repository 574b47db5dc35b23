//! The properties of a virtio-blk device that its guest sees: sizes, limits, features, and the configuration space.
//!
//! Pure data. The control thread answers feature and configuration requests from it, and the I/O thread checks each
//! request against it. 512-byte sectors appear here and in `request`, and nowhere else.

use crate::request::RANGE_PIECE;
use remoca_protocol::guests::FrontEnd;
use remoca_protocol::guests::Offer;
use vhost::vhost_user::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_MQ,
    VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_INDIRECT_DESC;

/// The features of the vhost-user protocol that every device offers.
pub(super) const PROTOCOL_FEATURES: VhostUserProtocolFeatures = VhostUserProtocolFeatures::MQ
    .union(VhostUserProtocolFeatures::CONFIG)
    .union(VhostUserProtocolFeatures::BACKEND_REQ)
    .union(VhostUserProtocolFeatures::INFLIGHT_SHMFD)
    .union(VhostUserProtocolFeatures::LOG_SHMFD)
    .union(VhostUserProtocolFeatures::REPLY_ACK)
    .union(VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS);
/// Those that were offered by programs that did not yet pass on what they had offered.
const PROTOCOL_FEATURES_BEFORE_OFFERS: u64 = 0x920B;
pub(crate) const SECTOR_BYTES: u64 = 512;
/// The longest answer to VIRTIO_BLK_T_GET_ID.
pub const SERIAL_BYTES_MAX: usize = 20;
/// The most queues of one device. The vhost-user messages that pass descriptors have one byte for the index.
pub const QUEUE_COUNT_MAX: u16 = 64;
/// The most descriptors of one queue. QEMU has the same limit.
pub(crate) const QUEUE_SIZE_MAX: u16 = 1024;
/// The most data segments of one request, as announced to the guest. They fit a queue of 128 descriptors without
/// indirect ones.
pub(crate) const SEGMENTS_MAX: u16 = 126;
/// Size of struct virtio_blk_config up to write_zeroes_may_unmap.
const CONFIG_SPACE_BYTES: usize = 60;
pub(crate) const WRITEBACK_OFFSET: u32 = 32;

/// One virtio-blk device.
#[derive(Debug, Clone)]
pub struct DeviceConfig {
    /// For messages and the name of the control thread.
    pub name: String,
    /// The serial number, which a Linux guest shows as /sys/block/vdX/serial: at most [`SERIAL_BYTES_MAX`] bytes of
    /// ASCII.
    pub serial: String,
    /// The size at first: a multiple of `logical_block_bytes`.
    pub capacity_bytes: u64,
    /// The smallest unit of I/O: a power of two, 512 to 65,536.
    pub logical_block_bytes: u32,
    /// The unit that is cheap to write: a power of two, at least `logical_block_bytes`.
    pub physical_block_bytes: u32,
    pub read_only: bool,
    /// The most queues that a front end may use.
    pub queue_count_max: u16,
    /// Offers VIRTIO_BLK_F_FLUSH and a write cache that the guest may switch off.
    pub flush: bool,
    pub discard: bool,
    pub write_zeroes: bool,
    /// The most bytes of one range of a discard or write-zeroes: a multiple of `logical_block_bytes`.
    pub range_bytes_max: u64,
    /// The most ranges of one discard or write-zeroes.
    pub range_count_max: u16,
    /// The most bytes of the ranges of one [`BlkRequest`](super::BlkRequest): a multiple of `logical_block_bytes`. A
    /// longer discard or write-zeroes of the guest is handed out in pieces, cut at multiples of it.
    pub range_piece_bytes: u64,
    /// The most data of one [`BlkRequest`](super::BlkRequest): a multiple of `logical_block_bytes`. A longer request of
    /// the guest is handed out in pieces.
    pub transfer_bytes_max: u32,
}

/// Why a [`DeviceConfig`] is not valid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    #[error("serial {0:?} is longer than 20 bytes or not printable ASCII")]
    Serial(String),
    #[error("block size of {0} bytes is not a power of two from 512 to 65536")]
    LogicalBlock(u32),
    #[error("physical block size of {physical} bytes is not a power of two of at least {logical}")]
    PhysicalBlock { physical: u32, logical: u32 },
    #[error("capacity of {capacity} bytes is not a multiple of the block size {logical}")]
    Capacity { capacity: u64, logical: u32 },
    #[error("{0} queues: a device has 1 to 64")]
    QueueCount(u16),
    #[error("limit {name} of {bytes} bytes is zero, too large or not a multiple of the block size {logical}")]
    Limit { name: &'static str, bytes: u64, logical: u32 },
    #[error("a discard of 0 ranges")]
    RangeCount,
}

impl DeviceConfig {
    /// Returns the configuration of a writable disk with 4 KiB blocks and all features on. Change its fields as needed.
    pub fn disk(name: impl Into<String>, serial: impl Into<String>, capacity_bytes: u64) -> Self {
        DeviceConfig {
            name: name.into(),
            serial: serial.into(),
            capacity_bytes,
            logical_block_bytes: 4096,
            physical_block_bytes: 4096,
            read_only: false,
            queue_count_max: 16,
            flush: true,
            discard: true,
            write_zeroes: true,
            range_bytes_max: 1 << 30,
            range_count_max: 16,
            range_piece_bytes: RANGE_PIECE,
            transfer_bytes_max: 4 << 20,
        }
    }

    /// Checks that there can be such a device.
    ///
    /// # Errors
    /// If there cannot. The text names the limit.
    pub fn check(&self) -> Result<(), ConfigError> {
        let logical = self.logical_block_bytes;
        let printable = self.serial.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ');
        if self.serial.len() > SERIAL_BYTES_MAX || !printable {
            return Err(ConfigError::Serial(self.serial.clone()));
        }
        if !logical.is_power_of_two() || !(512..=65536).contains(&logical) {
            return Err(ConfigError::LogicalBlock(logical));
        }
        let physical = self.physical_block_bytes;
        if !physical.is_power_of_two() || physical < logical {
            return Err(ConfigError::PhysicalBlock { physical, logical });
        }
        if !self.capacity_bytes.is_multiple_of(u64::from(logical)) {
            return Err(ConfigError::Capacity { capacity: self.capacity_bytes, logical });
        }
        if !(1..=QUEUE_COUNT_MAX).contains(&self.queue_count_max) {
            return Err(ConfigError::QueueCount(self.queue_count_max));
        }
        self.check_limit("transfer_bytes_max", u64::from(self.transfer_bytes_max))?;
        self.check_limit("range_bytes_max", self.range_bytes_max)?;
        self.check_limit("range_piece_bytes", self.range_piece_bytes)?;
        if self.range_count_max == 0 {
            return Err(ConfigError::RangeCount);
        }
        Ok(())
    }

    fn check_limit(&self, name: &'static str, bytes: u64) -> Result<(), ConfigError> {
        let logical = self.logical_block_bytes;
        let sectors_fit = u32::try_from(bytes / SECTOR_BYTES).is_ok();
        if bytes == 0 || !sectors_fit || !bytes.is_multiple_of(u64::from(logical)) {
            return Err(ConfigError::Limit { name, bytes, logical });
        }
        Ok(())
    }

    /// Returns the virtio features that the device offers.
    pub(crate) fn features(&self) -> u64 {
        let writable = !self.read_only;
        let optional = [
            (self.read_only, VIRTIO_BLK_F_RO),
            (self.flush && writable, VIRTIO_BLK_F_FLUSH),
            (self.flush && writable, VIRTIO_BLK_F_CONFIG_WCE),
            (self.discard && writable, VIRTIO_BLK_F_DISCARD),
            (self.write_zeroes && writable, VIRTIO_BLK_F_WRITE_ZEROES),
            (self.queue_count_max > 1, VIRTIO_BLK_F_MQ),
        ];
        let always = [
            VIRTIO_F_VERSION_1,
            VIRTIO_RING_F_INDIRECT_DESC,
            VIRTIO_BLK_F_SEG_MAX,
            VIRTIO_BLK_F_BLK_SIZE,
            VIRTIO_BLK_F_TOPOLOGY,
        ];
        let optional = optional.into_iter().filter_map(|(offered, bit)| offered.then_some(bit));
        always.into_iter().chain(optional).fold(0, |features, bit| features | feature(bit))
    }

    /// Returns what the device offers to front ends.
    #[must_use]
    pub fn offer(&self) -> Offer {
        let of_protocol = VhostUserVirtioFeatures::PROTOCOL_FEATURES | VhostUserVirtioFeatures::LOG_ALL;
        Offer {
            features: self.features() | of_protocol.bits(),
            protocol_features: PROTOCOL_FEATURES.bits(),
            queues: self.queue_count_max,
            sector: self.logical_block_bytes,
            nbd_flags: 0,
        }
    }

    /// Returns what a former program offered that does not say it.
    pub(super) fn offer_before_offers(&self) -> Offer {
        Offer { protocol_features: PROTOCOL_FEATURES_BEFORE_OFFERS, ..self.offer() }
    }

    /// Keeps offering what the front end `kept` uses or was offered, even if the store has become unable to do it since: a discard then
    /// does nothing, and zeroes are written.
    pub fn keep_offering<F>(&mut self, kept: &FrontEnd<F>) {
        let promised = kept.features.unwrap_or(0) | kept.offered.map_or(0, |offer| offer.features);
        let uses = |bit| promised & feature(bit) != 0;
        self.discard |= uses(VIRTIO_BLK_F_DISCARD);
        self.write_zeroes |= uses(VIRTIO_BLK_F_WRITE_ZEROES);
    }

    /// Returns a `struct virtio_blk_config`, little-endian, of a disk that has `capacity_bytes` now.
    pub(crate) fn configuration_space(&self, capacity_bytes: u64, writeback: bool) -> [u8; CONFIG_SPACE_BYTES] {
        // A limit that does not fit the field is no limit for the guest.
        let sectors = |bytes: u64| u32::try_from(bytes / SECTOR_BYTES).unwrap_or(u32::MAX);
        let blocks_per_physical = self.physical_block_bytes / self.logical_block_bytes;
        let exponent = u8::try_from(blocks_per_physical.trailing_zeros()).unwrap_or(0);
        let range_sectors = sectors(self.range_bytes_max);
        let range_count = u32::from(self.range_count_max);

        let mut space = [0; CONFIG_SPACE_BYTES];
        let mut set = |offset: usize, value: &[u8]| space[offset..offset + value.len()].copy_from_slice(value);
        set(0, &(capacity_bytes / SECTOR_BYTES).to_le_bytes());
        set(12, &u32::from(SEGMENTS_MAX).to_le_bytes());
        set(20, &self.logical_block_bytes.to_le_bytes());
        set(24, &[exponent]);
        set(26, &u16::try_from(blocks_per_physical).unwrap_or(1).to_le_bytes());
        set(32, &[u8::from(writeback)]);
        set(34, &self.queue_count_max.to_le_bytes());
        if self.discard {
            set(36, &range_sectors.to_le_bytes());
            set(40, &range_count.to_le_bytes());
            set(44, &sectors(u64::from(self.logical_block_bytes)).to_le_bytes());
        }
        if self.write_zeroes {
            set(48, &range_sectors.to_le_bytes());
            set(52, &range_count.to_le_bytes());
            set(56, &[1]);
        }
        space
    }
}

/// Returns the mask of feature bit `bit`.
pub(crate) const fn feature(bit: u32) -> u64 {
    1 << bit
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configuration_space_has_the_layout_of_the_virtio_specification() {
        let mut config = DeviceConfig::disk("d", "s", 64 << 20);
        config.logical_block_bytes = 512;
        config.queue_count_max = 3;
        let space = config.configuration_space(config.capacity_bytes, true);
        assert_eq!(space[0..8], (131_072u64).to_le_bytes());
        assert_eq!(space[12..16], 126u32.to_le_bytes());
        assert_eq!(space[20..24], 512u32.to_le_bytes());
        assert_eq!(space[24], 3, "4096 / 512 is 2 to the 3rd");
        assert_eq!(space[26..28], 8u16.to_le_bytes());
        assert_eq!(space[32], 1);
        assert_eq!(space[34..36], 3u16.to_le_bytes());
        assert_eq!(space[36..40], (1u32 << 21).to_le_bytes());
        assert_eq!(space[40..44], 16u32.to_le_bytes());
        assert_eq!(space[44..48], 1u32.to_le_bytes());
        assert_eq!(space[56], 1);
        assert_eq!(config.configuration_space(config.capacity_bytes, false)[32], 0);
    }

    #[test]
    fn a_read_only_disk_offers_nothing_that_writes() {
        let mut config = DeviceConfig::disk("d", "s", 4096);
        config.read_only = true;
        let writing = [VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_WRITE_ZEROES];
        assert!(writing.iter().all(|bit| config.features() & feature(*bit) == 0));
        assert_ne!(config.features() & feature(VIRTIO_BLK_F_RO), 0);
    }

    #[test]
    fn impossible_devices_are_refused() {
        let good = DeviceConfig::disk("d", "s", 1 << 20);
        assert_eq!(good.check(), Ok(()));
        type Spoil = fn(&mut DeviceConfig);
        let bad: [(Spoil, &str); 8] = [
            (|config| config.serial = "x".repeat(21), "longer than 20"),
            (|config| config.logical_block_bytes = 1000, "power of two"),
            (|config| config.physical_block_bytes = 512, "physical block size"),
            (|config| config.capacity_bytes = 4097, "capacity"),
            (|config| config.queue_count_max = 0, "queues"),
            (|config| config.transfer_bytes_max = 6000, "transfer_bytes_max"),
            (|config| config.range_bytes_max = 1 << 45, "range_bytes_max"),
            (|config| config.range_piece_bytes = 0, "range_piece_bytes"),
        ];
        for (spoil, message) in bad {
            let mut config = good.clone();
            spoil(&mut config);
            let error = config.check().unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
    }
}
