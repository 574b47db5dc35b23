//! One VM of a snapshot.

use crate::curve::Prospect;
use crate::figures::Figures;
use crate::history::History;
use crate::lately::Lately;
use crate::shown::Shown;
use remoca_protocol::control::CurveStatus;
use remoca_protocol::host::HostReport;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::sync::Arc;

/// One VM.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Vm {
    pub name: String,
    /// Path of the control socket.
    pub socket: PathBuf,
    /// What its process says; `None` if it does not answer.
    pub status: Option<Shown>,
    /// Why it does not answer.
    pub silence: Option<Silence>,
    pub lately: Lately,
    /// What more memory would do; `None` while its curve is not known.
    pub prospect: Option<Prospect>,
    #[serde(skip)]
    pub curve: Option<Arc<CurveStatus>>,
    /// What the cache did between the last snapshots.
    #[serde(skip)]
    pub history: History,
}

/// Report of the host's daemon, or in words that one is there and does not answer.
pub type Heard = Result<HostReport, String>;

/// Why a process does not answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "Said", from = "Said")]
pub enum Silence {
    /// Nobody listens at its socket.
    Gone(String),
    /// It is there, and does not answer in time.
    Hangs(String),
    /// Its socket is closed to this user.
    Denied(String),
    /// It answers that it cannot say it now.
    Busy(String),
    /// Something else, such as an answer that makes no sense.
    Failed(String),
    /// Nothing is known of it: this process could not ask.
    Unasked(String),
}

/// A [`Silence`] as a snapshot has it. Former versions know three kinds and read no other, so those that came later are failures that say
/// `why`. This one reads what it does not know as a failure.
#[derive(Serialize, Deserialize)]
struct Said {
    kind: String,
    text: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    why: Option<String>,
}

impl From<Said> for Silence {
    fn from(Said { kind, text, why }: Said) -> Self {
        match why.as_deref().unwrap_or(&kind) {
            "gone" => Self::Gone(text),
            "hangs" => Self::Hangs(text),
            "denied" => Self::Denied(text),
            "busy" => Self::Busy(text),
            "unasked" => Self::Unasked(text),
            _ => Self::Failed(text),
        }
    }
}

impl From<Silence> for Said {
    fn from(silence: Silence) -> Self {
        let (kind, why) = match silence {
            Silence::Gone(_) => ("gone", None),
            Silence::Hangs(_) => ("hangs", None),
            Silence::Failed(_) => ("failed", None),
            Silence::Denied(_) => ("failed", Some("denied")),
            Silence::Busy(_) => ("failed", Some("busy")),
            Silence::Unasked(_) => ("failed", Some("unasked")),
        };
        Self { kind: kind.into(), text: silence.text().into(), why: why.map(Into::into) }
    }
}

impl Silence {
    /// Returns the reason in words.
    #[must_use]
    pub fn text(&self) -> &str {
        match self {
            Self::Gone(text) | Self::Hangs(text) => text,
            Self::Denied(text) | Self::Busy(text) | Self::Failed(text) | Self::Unasked(text) => text,
        }
    }

    /// Returns whether it says that a guest of the VM hangs, and not only that nothing is known.
    #[must_use]
    pub fn is_down(&self) -> bool {
        matches!(self, Self::Gone(_) | Self::Hangs(_))
    }
}

impl Vm {
    /// Returns a VM of which nothing is known.
    #[must_use]
    pub fn silent(name: &str) -> Self {
        Self {
            name: name.into(),
            socket: PathBuf::new(),
            status: None,
            silence: None,
            lately: Lately::default(),
            prospect: None,
            curve: None,
            history: History::default(),
        }
    }

    /// Returns what is behind the name of a VM if others have the same.
    pub(crate) fn distinction(&self) -> String {
        format!(" ({})", self.socket.display())
    }

    /// Returns the name as its unit has it.
    pub(crate) fn plain_name(&self) -> &str {
        self.name.strip_suffix(&self.distinction()).unwrap_or(&self.name)
    }

    /// Returns the newest figures; `None` if its process does not answer.
    #[must_use]
    pub fn newest(&self) -> Option<&Figures> {
        self.status.as_ref().map(Shown::newest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_silence_is_read_as_it_was_written_and_one_of_a_later_version_as_a_failure() {
        let read = |json: &str| serde_json::from_str::<Silence>(json).unwrap();
        type Kind = fn(String) -> Silence;
        let kinds: [Kind; 6] =
            [Silence::Gone, Silence::Hangs, Silence::Denied, Silence::Busy, Silence::Failed, Silence::Unasked];
        for silence in kinds.map(|kind| kind("why".into())) {
            let written = serde_json::to_string(&silence).unwrap();
            assert_eq!(read(&written), silence);
            let is_known =
                ["gone", "hangs", "failed"].iter().any(|kind| written.contains(&format!("\"kind\":\"{kind}\"")));
            assert!(is_known, "a former version reads no other kind: {written}");
        }
        assert_eq!(read(r#"{"kind":"asleep","text":"why"}"#), Silence::Failed("why".into()));
    }
}
