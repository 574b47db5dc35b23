//! Numbers for the disks of a trace, in the order in which they appear.

use crate::limits::DISKS_MAX;
use std::collections::HashMap;

/// Maximum number of bytes of a disk's name.
const NAME_BYTES_MAX: usize = 256;

#[derive(Debug, Default)]
pub(super) struct Disks(HashMap<Vec<u8>, u16>);

impl Disks {
    /// Returns the number of the disk with this name.
    pub(super) fn number(&mut self, name: &[u8]) -> Result<u16, String> {
        if let Some(number) = self.0.get(name) {
            return Ok(*number);
        }
        let next = u16::try_from(self.0.len()).unwrap_or(u16::MAX);
        if next >= DISKS_MAX || name.len() > NAME_BYTES_MAX {
            return Err(format!("it has more than {DISKS_MAX} disks, or one with an absurd name"));
        }
        self.0.insert(name.to_vec(), next);
        Ok(next)
    }
}
