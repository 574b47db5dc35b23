//! The exports that clients can choose from.

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
}
