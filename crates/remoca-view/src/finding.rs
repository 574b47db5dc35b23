//! What was found about one thing: a line of `remoca check`.

use remoca_io::show::sentence;
use serde::{Deserialize, Serialize};
use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Level {
    Ok,
    Warning,
    Failed,
}

/// What was found about one thing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    pub what: String,
    pub level: Level,
    pub found: String,
    pub advice: Option<String>,
}

impl Finding {
    /// Returns what needs no advice.
    pub fn ok(what: impl Into<String>, found: impl Into<String>) -> Self {
        Self { what: what.into(), level: Level::Ok, found: found.into(), advice: None }
    }

    pub fn warning(what: impl Into<String>, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { what: what.into(), level: Level::Warning, found: found.into(), advice: Some(advice.into()) }
    }

    pub fn failed(what: impl Into<String>, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { level: Level::Failed, ..Self::warning(what, found, advice) }
    }

    /// Returns what was found, and what to do about it.
    #[must_use]
    pub fn said(&self) -> String {
        match &self.advice {
            Some(advice) => format!("{} {advice}", sentence(&self.found)),
            None => self.found.clone(),
        }
    }
}

impl Level {
    /// Returns the level as a word.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Failed => "failed",
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<8} {}: {}", self.level.word(), self.what, self.said())
    }
}
