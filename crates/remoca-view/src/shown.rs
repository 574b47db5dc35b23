//! Status of a VM as `remoca status -o json` prints it.

use crate::figures::Figures;
use remoca_protocol::control::Status;
use serde::{Deserialize, Serialize};

/// Status of a VM with the figures that are shown of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Shown<S = Status> {
    /// Number of the snapshot that has this status.
    pub snapshot: u64,
    #[serde(flatten)]
    pub status: S,
    pub figures: Figures,
    /// Figures since the snapshot before; `None` if that one has no status of the same program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recent: Option<Figures>,
}

impl Shown {
    /// Returns this with what the JSON of its figures leaves out.
    #[must_use]
    pub fn completed(mut self) -> Self {
        self.figures = self.figures.completed(&self.status);
        self.recent = self.recent.map(|recent| recent.completed(&self.status));
        self
    }

    /// Returns the newest figures: those since the snapshot before, else those since the start.
    #[must_use]
    pub fn newest(&self) -> &Figures {
        self.recent.as_ref().unwrap_or(&self.figures)
    }
}
