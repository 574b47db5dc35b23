//! What a VM process keeps of its configuration for the next one of its name, in `NAME.config` beside its control socket.
//!
//! It is in memory, as the state file is: a boot of the host leaves nothing of it.

use super::Files;
use super::changes::changes;
use super::layers::undisplaced;
use super::schema::Schema;
use remoca_io::control::left::config_beside;
use remoca_io::small_file;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Maximum size of the file, in bytes.
const BYTES_MAX: u64 = 16 << 20;

/// The configuration that a process runs with.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// The files as they were read: the last good copy.
    pub files: Files,
    /// Images without `format=raw` whose content was looked at when they were first configured, and those that a process had
    /// before. Their content is not looked at again: it is the guest's.
    pub images: BTreeSet<String>,
}

impl Kept {
    /// Returns the path for the process whose control socket is `control`. No two sockets have the same.
    pub fn beside(control: &Path) -> PathBuf {
        config_beside(control)
    }

    /// Reads what a process left. Returns `None` if there is nothing usable.
    pub fn read(path: &Path) -> Option<Self> {
        Self::read_if(path, |_| true)
    }

    /// Reads what a process left if its text is wanted. Returns `None` otherwise, or if there is nothing usable.
    pub fn read_if(path: &Path, is_wanted: impl FnOnce(&str) -> bool) -> Option<Self> {
        let text = small_file::read(path, BYTES_MAX).ok().filter(|text| is_wanted(text))?;
        serde_json::from_str(&text).ok()
    }

    /// Keeps it at `path`. Without it the process still works.
    pub fn write(&self, path: &Path) {
        let text = serde_json::to_string(self).map_err(std::io::Error::other);
        if let Err(error) = text.and_then(|text| small_file::write(path, &text)) {
            let path = path.display();
            tracing::warn!(
                "cannot write {path}: {error}. A process that replaces this one has no copy of the configuration"
            );
        }
    }

    /// Returns what is different since `former` for a process with `words` on its command line, a line for each setting. Leaves out
    /// settings that these displace.
    pub fn since(&self, former: &Self, schema: fn() -> Schema, words: &[OsString]) -> Vec<String> {
        let settings = |kept: &Self| {
            let files = kept.files.settings_of_vm(schema).unwrap_or_default();
            undisplaced(&schema(), words, files.clone()).unwrap_or_else(|_| files.to_vec())
        };
        changes(&settings(former), &settings(self), &schema())
    }
}
