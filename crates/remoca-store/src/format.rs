//! Formats of images other than raw, recognised by their first bytes.
//!
//! A guest can write such bytes to a raw image. So this is asked only when an image is first configured (decision 0032).

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

/// Number of bytes that [`name`] looks at.
const HEAD: usize = 512;

/// Beginnings of images: offset, bytes, name.
const BEGINNINGS: [(usize, &[u8], &str); 8] = [
    (0, b"QFI\xfb", "qcow2"),
    (0, b"KDMV", "vmdk"),
    (0, b"COWD", "vmdk"),
    (0, b"# Disk DescriptorFile", "vmdk"),
    (64, b"\x7f\x10\xda\xbe", "vdi"),
    (0, b"vhdxfile", "vhdx"),
    (0, b"conectix", "vpc"),
    (0, b"QED\0", "qed"),
];

/// Returns the name of the format, as qemu-img has it, of the image that begins with `head`. Returns `None` if it may be raw.
#[must_use]
pub fn name(head: &[u8]) -> Option<&'static str> {
    let is_there = |at: usize, bytes: &[u8]| head.get(at..).is_some_and(|head| head.starts_with(bytes));
    BEGINNINGS.iter().find(|(at, bytes, _)| is_there(*at, bytes)).map(|(.., name)| *name)
}

/// Returns the name of the format of the image at `path`, as [`name`] does.
///
/// # Errors
/// If it cannot be read. What is neither a file nor a block device is not opened: that may have an effect, or wait.
pub fn of(path: &Path) -> io::Result<Option<&'static str>> {
    let kind = path.metadata()?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut head = Vec::new();
    File::open(path)?.take(HEAD as u64).read_to_end(&mut head)?;
    Ok(name(&head))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_known_by_how_they_begin() {
        let mut vdi = b"<<< Oracle VM VirtualBox Disk Image >>>\n".to_vec();
        vdi.resize(64, 0);
        vdi.extend(0xbeda_107f_u32.to_le_bytes());
        let heads: [(&[u8], _); 8] = [
            (b"QFI\xfb\0\0\0\x03", Some("qcow2")),
            (b"KDMV\x01", Some("vmdk")),
            (&vdi, Some("vdi")),
            (b"vhdxfileM", Some("vhdx")),
            (&[0; 512], None),
            (b"LUKS\xba\xbe", None),
            (b"", None),
            (b"QFI", None),
        ];
        for (head, format) in heads {
            assert_eq!(name(head), format, "{head:?}");
        }
    }
}
