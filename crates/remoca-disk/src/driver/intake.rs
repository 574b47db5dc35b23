//! What is taken from guests at the moment.

use remoca_frontend::device::{Frontend, GuestRequest};

/// What is taken from the queues of a device.
#[derive(Clone, Copy, Debug)]
pub(super) enum Intake {
    All,
    /// The rest of requests of which a part was handed out: nothing else before an upgrade.
    Begun,
    /// The process is to end.
    Nothing,
    /// Another process has the disks. `comes`: it is about to hand them over.
    Away {
        comes: bool,
    },
}

impl Intake {
    /// Returns the next request of a device that is to be taken.
    pub(super) fn pop(self, frontend: &mut Frontend) -> Option<GuestRequest> {
        match self {
            Self::All => frontend.pop(),
            Self::Begun => frontend.pop_begun(),
            Self::Nothing | Self::Away { .. } => None,
        }
    }
}
