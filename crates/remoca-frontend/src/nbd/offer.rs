//! The exports that clients can choose from.

use remoca_protocol::guests::NbdClient;
use remoca_protocol::guests::Offer;
use remoca_protocol::nbd::ExportFlags;

/// The device that an export stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    Disk(u16),
    Port,
}

/// An export that a client can choose.
#[derive(Clone, Debug)]
pub struct Export {
    pub name: String,
    pub target: Target,
    pub geometry: ExportGeometry,
}

impl Export {
    pub(super) fn is_disk(&self) -> bool {
        matches!(self.target, Target::Disk(_))
    }
}

/// Size, block sizes and abilities of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportGeometry {
    /// Bytes; a multiple of `block`.
    pub size: u64,
    /// Requests are multiples of this: 512 or 4096.
    pub block: u32,
    /// Requests of this many bytes are cheap; at least `block`.
    pub preferred_block: u32,
    pub read_only: bool,
    pub can_trim: bool,
    pub can_write_zeroes: bool,
    /// Whether the disk may lose writes that it has acknowledged and not flushed while its guest keeps running. This is
    /// so if the disk is an NBD server itself.
    pub may_forget: bool,
}

impl ExportGeometry {
    /// Returns the geometry of a disk of `size` bytes that can be written in sectors of 512 bytes, and can trim and
    /// write zeroes.
    #[must_use]
    pub const fn of_disk(size: u64) -> Self {
        Self {
            size,
            block: 512,
            preferred_block: 4096,
            read_only: false,
            can_trim: true,
            can_write_zeroes: true,
            may_forget: false,
        }
    }

    /// Returns the geometry of an eviction port of `size` bytes, which can only be read and written.
    #[must_use]
    pub const fn of_port(size: u64) -> Self {
        Self { can_trim: false, can_write_zeroes: false, ..Self::of_disk(size) }
    }

    /// Returns what a client of the export is told.
    pub(super) fn flags(&self, structured_replies: bool) -> ExportFlags {
        // A flush on any connection covers the writes on all connections, because they share one store.
        let always = ExportFlags::HAS_FLAGS | ExportFlags::FLUSH | ExportFlags::FUA | ExportFlags::MULTI_CONNECTION;
        let conditions = [
            (self.read_only, ExportFlags::READ_ONLY),
            (self.can_trim && !self.read_only, ExportFlags::TRIM),
            (self.can_write_zeroes && !self.read_only, ExportFlags::WRITE_ZEROES),
            (structured_replies, ExportFlags::DONT_FRAGMENT),
        ];
        let given = conditions.into_iter().filter(|(condition, _)| *condition);
        ExportFlags(given.fold(always, |flags, (_, flag)| flags | flag))
    }

    /// Returns what the export offers to clients.
    #[must_use]
    pub fn offer(&self) -> Offer {
        self.offer_to(true)
    }

    /// Returns what the export offers to a client that may want structured replies.
    pub(super) fn offer_to(&self, structured_replies: bool) -> Offer {
        Offer { sector: self.block, nbd_flags: self.flags(structured_replies).0, ..Offer::default() }
    }

    /// Keeps offering what a client was told, even if the store has become unable to do it since: a trim then does
    /// nothing, and zeroes are written.
    pub fn keep_offering<F>(&mut self, kept: &NbdClient<F>) {
        let was_told = |flag| kept.offered.is_some_and(|offer| ExportFlags(offer.nbd_flags).has(flag));
        self.can_trim |= was_told(ExportFlags::TRIM);
        self.can_write_zeroes |= was_told(ExportFlags::WRITE_ZEROES);
    }
}
