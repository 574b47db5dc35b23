//! What a rule finds.

use crate::finding::{Finding, Level};

/// What a rule finds: its level, what is wrong with what, and what to do.
pub struct Found {
    pub level: Level,
    pub what: String,
    pub found: String,
    pub advice: String,
    /// Address of the memory server that is the cause.
    pub shared: Option<String>,
}

impl Found {
    pub fn warning(what: impl Into<String>, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { level: Level::Warning, what: what.into(), found: found.into(), advice: advice.into(), shared: None }
    }

    pub fn failed(what: impl Into<String>, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { level: Level::Failed, ..Self::warning(what, found, advice) }
    }

    /// Returns this as a problem of a memory server, which other VMs may have as well.
    pub fn of_server(self, endpoint: &str) -> Self {
        Self { shared: Some(endpoint.into()), ..self }
    }

    /// Returns what is wrong in a finding, or `None` if it is well.
    pub fn from_finding(finding: Finding) -> Option<Self> {
        let Finding { what, level, found, advice } = finding;
        (level != Level::Ok).then(|| Self { level, what, found, advice: advice.unwrap_or_default(), shared: None })
    }
}
