//! What a monitor tells, and does.

use crate::text::shortened;
use std::time::Duration;

/// Age at which the agent's report says nothing about now. An agent that runs reports at least every ten seconds.
pub const AGENT_SILENT_AFTER: Duration = Duration::from_secs(15);
/// Greatest memory of a guest that is believed: 64 TiB.
const BOOT_BYTES_MAX: u64 = 1 << 46;

/// Memory of one guest, as its monitor tells.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GuestMemory {
    /// Memory that the guest had at boot.
    pub boot_bytes: u64,
    /// Memory that the balloon leaves to the guest now.
    pub actual_bytes: u64,
    /// Memory that the guest says it could use without swapping.
    pub available_bytes: Option<u64>,
    pub pressure: Pressure,
    /// Why nothing may be taken from it now. What was taken can go back all the same.
    pub held: Option<String>,
    /// Whether it is on its way to another host, with the size that its balloon is told until then.
    pub leaves: bool,
    /// Whether an earlier look heard this already: the monitor is late, and its answer still counts.
    pub is_repeated: bool,
}

/// What a guest says about its shortage of memory. Rates are those since the last reading.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pressure {
    pub major_faults_per_s: Option<f64>,
    /// Pages swapped in.
    pub swapped_in_per_s: Option<f64>,
}

/// Why a guest's memory cannot be moved in either direction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unusable {
    /// It has no balloon, or does not run.
    Advised(String),
    /// Its monitor does not answer as it should.
    Silent(String),
}

/// The monitor of one guest's hypervisor. Every call ends within a few seconds.
pub trait Monitor: Send {
    /// Returns the guest's memory as it is now.
    ///
    /// # Errors
    /// Why it cannot be moved, or nothing is known of it.
    fn read(&mut self) -> Result<GuestMemory, Unusable>;

    /// Asks the guest to use this much memory. It follows later, or never: [`Monitor::read`] tells.
    ///
    /// # Errors
    /// Why it was not asked. It may have been all the same if the monitor fell silent in the middle.
    fn set_bytes(&mut self, bytes: u64) -> Result<(), String>;
}

/// Returns sizes that can be, with what the guest tells within them.
pub(super) fn checked(memory: GuestMemory) -> Result<GuestMemory, Unusable> {
    let GuestMemory { boot_bytes, actual_bytes, available_bytes, .. } = memory;
    if actual_bytes == 0 || actual_bytes > boot_bytes || boot_bytes > BOOT_BYTES_MAX {
        return Err(Unusable::Silent(format!(
            "its monitor says that the guest had {boot_bytes} bytes at boot and has {actual_bytes} now, which cannot be"
        )));
    }
    let available_bytes = available_bytes.map(|bytes| bytes.min(boot_bytes));
    let held = memory.held.map(shortened);
    Ok(GuestMemory { available_bytes, held, ..memory })
}

impl Unusable {
    /// Returns the reason, for people.
    #[must_use]
    pub fn why(&self) -> &str {
        match self {
            Self::Advised(why) | Self::Silent(why) => why,
        }
    }

    /// Returns this with the beginning of the reason.
    pub(super) fn shortened(self) -> Self {
        match self {
            Self::Advised(why) => Self::Advised(shortened(why)),
            Self::Silent(why) => Self::Silent(shortened(why)),
        }
    }

    pub(super) fn no_balloon() -> Self {
        Self::Advised("its guest has no balloon: give it one (QEMU: -device virtio-balloon-pci)".into())
    }

    pub(super) fn is_paused() -> Self {
        Self::Advised("its guest does not run now".into())
    }
}

pub(super) fn passed_device(which: &str) -> String {
    format!(
        "a device of the host is passed to its guest ({which}), which keeps all of the guest's memory: a balloon would give nothing back"
    )
}

pub(super) fn huge_pages() -> String {
    "its guest is on huge pages, which a balloon cannot give back".into()
}

pub(super) fn plugged_memory(kind: &str) -> String {
    format!("its guest has memory that can be plugged ({kind}), which a balloon does not count right")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_cannot_be_are_not_believed_and_what_a_guest_tells_is_within_them() {
        let of = |boot_bytes: u64, actual_bytes: u64| {
            let available_bytes = Some(u64::MAX);
            checked(GuestMemory { boot_bytes, actual_bytes, available_bytes, ..GuestMemory::default() })
        };
        for (boot, actual) in [(8, 8), (8, 1), (BOOT_BYTES_MAX, 1)] {
            assert_eq!(of(boot, actual).unwrap().available_bytes, Some(boot));
        }
        for (boot, actual) in [(8, 0), (8, 9), (0, 0), (BOOT_BYTES_MAX + 1, 1)] {
            assert!(matches!(of(boot, actual), Err(Unusable::Silent(_))), "{boot} {actual}");
        }
    }
}
