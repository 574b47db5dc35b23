//! Which requests are accepted from guests at present.

use remoca_frontend::device::{Frontend, GuestRequest};

/// Which requests are accepted from the queues of a device.
#[derive(Clone, Copy, Debug)]
pub(super) enum Intake {
    All,
    /// Only the rest of requests that were handed out in part, before an upgrade.
    Begun,
    /// No requests: the process is to end.
    Nothing,
    /// No requests: another process has the disks. `comes`: that process is about to hand them over.
    Away {
        comes: bool,
    },
}

impl Intake {
    /// Returns the next request of a device that is accepted, or `None` if there is none.
    pub(super) fn pop(self, frontend: &mut Frontend) -> Option<GuestRequest> {
        match self {
            Self::All => frontend.pop(),
            Self::Begun => frontend.pop_begun(),
            Self::Nothing | Self::Away { .. } => None,
        }
    }
}
