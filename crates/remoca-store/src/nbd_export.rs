//! Turns the offer of an NBD server into a geometry, or into a message that explains why it does not fit.
//!
//! Called by `nbd` when it opens an export, and after each reconnect. Pure.

use super::nbd_link::LinkError;
use super::nbd_protocol::{Export, ExportFlags, HandshakeError};
use super::nbd_task::Abilities;
use super::{Geometry, OpenError, OpenErrorKind, SECTOR_SIZE};

/// Coarsest minimum block of a server that frontends can offer to guests, in bytes.
const BLOCK_MIN_MAX: u32 = 4096;
/// Larger preferred blocks are not announced to guests, in bytes.
const PHYSICAL_BLOCK_MAX: u32 = 64 * 1024;

/// The geometry and abilities agreed on with a server.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    pub(super) geometry: Geometry,
    pub(super) abilities: Abilities,
}

impl Terms {
    pub(super) fn agree(server: &str, export: Export, read_only: bool, write_through: bool) -> Result<Self, OpenError> {
        check_export(server, &export, read_only)?;
        let logical_sector = if export.block_min <= SECTOR_SIZE { SECTOR_SIZE } else { BLOCK_MIN_MAX };
        let abilities = Abilities::of(&export, logical_sector, write_through);
        let geometry = Geometry {
            size: export.size,
            logical_sector,
            physical_block: export.block_preferred.clamp(logical_sector, PHYSICAL_BLOCK_MAX),
            read_only,
            can_discard: !read_only && abilities.trim,
            can_write_zeroes: !read_only && abilities.write_zeroes,
            may_forget: true,
            outlives_process: true,
        };
        Ok(Self { geometry, abilities })
    }

    /// Returns the terms for a server that came back. It has to offer the same disk, which may have grown; nothing else
    /// changes in the geometry that the guest knows.
    pub(super) fn agree_again(&self, server: &str, export: Export, write_through: bool) -> Result<Self, OpenError> {
        let terms = Self::agree(server, export, self.geometry.read_only, write_through)?;
        let (old, new) = (self.geometry, terms.geometry);
        if new.size < old.size || new.logical_sector > old.logical_sector {
            let message = format!(
                "the NBD server {server} came back with another disk: {} bytes in blocks of {}, before it was {} in blocks \
                 of {}",
                new.size, new.logical_sector, old.size, old.logical_sector
            );
            return Err(OpenError::new(OpenErrorKind::Unsuitable, message));
        }
        // Writes that are not flushed yet would never become durable.
        if !old.read_only && self.abilities.flush && !terms.abilities.flush {
            let message = format!(
                "the NBD server {server} came back without flush, which it had before: start it with the same options"
            );
            return Err(OpenError::new(OpenErrorKind::Unsuitable, message));
        }
        // The part of a sector at the end is not used, as in an image that has grown.
        let size = new.size - new.size % u64::from(old.logical_sector);
        Ok(Self { geometry: Geometry { size, ..old }, abilities: terms.abilities })
    }
}

fn check_export(server: &str, export: &Export, read_only: bool) -> Result<(), OpenError> {
    let error = |kind, message| Err(OpenError::new(kind, message));
    let Export { size, flags, block_min, .. } = *export;
    if size == 0 {
        return error(OpenErrorKind::Empty, format!("the export of the NBD server {server} is empty: give it a size"));
    }
    if block_min > BLOCK_MIN_MAX {
        let message = format!(
            "the NBD server {server} takes only requests in blocks of {block_min} bytes, more than {BLOCK_MIN_MAX}: put \
             nbdkit's blocksize filter before it"
        );
        return error(OpenErrorKind::Unsuitable, message);
    }
    let sector = if block_min <= SECTOR_SIZE { SECTOR_SIZE } else { BLOCK_MIN_MAX };
    if !size.is_multiple_of(u64::from(sector)) {
        let message = format!(
            "the export of the NBD server {server} has {size} bytes, which is not a multiple of its {sector}-byte sector: \
             round it up, with nbdkit by `--filter=truncate round-up={sector}`"
        );
        return error(OpenErrorKind::OddSize, message);
    }
    if export.payload_max < sector {
        let message = format!("the NBD server {server} takes less than a sector of {sector} bytes at once");
        return error(OpenErrorKind::Unsuitable, message);
    }
    if read_only {
        return Ok(());
    }
    if flags.has(ExportFlags::READ_ONLY) {
        let message =
            format!("the export of the NBD server {server} is read-only: use it read-only, or make it writable there");
        return error(OpenErrorKind::ReadOnly, message);
    }
    if !flags.has(ExportFlags::FLUSH) && !flags.has(ExportFlags::FUA) {
        let message = format!(
            "the NBD server {server} offers neither flush nor FUA, so no write to it is ever known to be durable: use it \
             read-only, or a server that can flush"
        );
        return error(OpenErrorKind::Unsuitable, message);
    }
    Ok(())
}

pub(super) fn explain_unreachable(server: &str, error: &dyn std::fmt::Display) -> OpenError {
    let message = format!("cannot reach the NBD server {server}: {error}. Is it running, and is the address right?");
    OpenError::new(OpenErrorKind::Unreachable, message)
}

pub(super) fn explain_link_error(server: &str, error: &LinkError) -> OpenError {
    let kind = match error {
        LinkError::Lost(_) | LinkError::TimedOut => return explain_unreachable(server, error),
        LinkError::Handshake(HandshakeError::ExportMissing { .. }) => OpenErrorKind::Missing,
        LinkError::Handshake(HandshakeError::NotNbd | HandshakeError::Malformed(_)) => OpenErrorKind::Protocol,
        LinkError::Handshake(HandshakeError::TooOld | HandshakeError::TlsRequired | HandshakeError::Refused { .. }) => {
            OpenErrorKind::Unsuitable
        }
    };
    OpenError::new(kind, format!("{server}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXPORT: Export = Export {
        size: 1 << 30,
        flags: ExportFlags(ExportFlags::FLUSH | ExportFlags::FUA),
        block_min: 1,
        block_preferred: 4096,
        payload_max: 32 << 20,
    };

    fn agree(export: Export, read_only: bool) -> Result<Geometry, OpenErrorKind> {
        Terms::agree("server", export, read_only, false).map(|terms| terms.geometry).map_err(|error| error.kind)
    }

    #[test]
    fn exports_that_cannot_be_a_disk_are_refused() {
        let flags = ExportFlags;
        for (export, read_only, expected) in [
            (Export { size: 0, ..EXPORT }, true, OpenErrorKind::Empty),
            (Export { size: 1000, ..EXPORT }, true, OpenErrorKind::OddSize),
            (Export { size: 4096 + 512, block_min: 4096, ..EXPORT }, true, OpenErrorKind::OddSize),
            (Export { block_min: 8192, block_preferred: 8192, ..EXPORT }, true, OpenErrorKind::Unsuitable),
            (Export { payload_max: 256, block_preferred: 256, ..EXPORT }, true, OpenErrorKind::Unsuitable),
            (Export { flags: flags(ExportFlags::READ_ONLY | 4), ..EXPORT }, false, OpenErrorKind::ReadOnly),
            (Export { flags: flags(0), ..EXPORT }, false, OpenErrorKind::Unsuitable),
        ] {
            assert_eq!(agree(export, read_only), Err(expected), "{export:?}");
        }
        assert!(agree(Export { flags: flags(0), ..EXPORT }, true).is_ok());
        assert!(agree(Export { flags: flags(ExportFlags::FUA), ..EXPORT }, false).is_ok());
    }

    #[test]
    fn the_servers_blocks_become_the_sectors() {
        let small = agree(EXPORT, false).unwrap();
        assert_eq!((small.logical_sector, small.physical_block), (512, 4096));
        let large = agree(Export { block_min: 1024, block_preferred: 1 << 20, ..EXPORT }, false).unwrap();
        assert_eq!((large.logical_sector, large.physical_block), (4096, 65536));
    }

    #[test]
    fn a_server_that_comes_back_must_offer_the_same_disk_or_a_larger_one() {
        let terms = Terms::agree("server", EXPORT, false, false).unwrap();
        assert!(terms.agree_again("server", EXPORT, false).is_ok());
        let grown = terms.agree_again("server", Export { size: 1 << 31, ..EXPORT }, false).unwrap();
        assert_eq!(grown.geometry, Geometry { size: 1 << 31, ..terms.geometry });
        for other in [Export { size: 1 << 29, ..EXPORT }, Export { block_min: 4096, ..EXPORT }] {
            let error = terms.agree_again("server", other, false).unwrap_err();
            assert!(error.to_string().contains("another disk"), "{error}");
        }
        let coarse = Terms::agree("server", Export { block_min: 4096, ..EXPORT }, false, false).unwrap();
        let odd = coarse.agree_again("server", Export { size: EXPORT.size + 4096 + 512, ..EXPORT }, false).unwrap();
        assert_eq!(odd.geometry, Geometry { size: EXPORT.size + 4096, ..coarse.geometry }, "in sectors as before");
        let no_flush = Export { flags: ExportFlags(ExportFlags::FUA), ..EXPORT };
        let error = terms.agree_again("server", no_flush, false).unwrap_err();
        assert!(error.to_string().contains("without flush"), "{error}");
        let terms = Terms::agree("server", no_flush, false, false).unwrap();
        assert!(terms.agree_again("server", no_flush, false).is_ok(), "it never had it");
    }
}
