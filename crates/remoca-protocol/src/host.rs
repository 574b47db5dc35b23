//! Content of `remoca host status`: what the host's daemon knows, plans and did, as one JSON object for each connection to its socket.

use crate::shown;
use serde::{Deserialize, Serialize};

/// Maximum number of decisions that are kept.
pub const DECISIONS_MAX: usize = 100;
/// Maximum size of a report in bytes.
pub const REPORT_BYTES_MAX: usize = 4 << 20;
/// Age up to which no report is overdue, in seconds, however short the interval of the daemon is.
const FRESH_S: u64 = 30;

/// Everything about the division of a host's memory among its VMs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostReport {
    pub version: String,
    pub pid: u32,
    /// Time of the report, in seconds since 1970.
    pub at_s: u64,
    /// Time between two looks at all VMs, each of which makes a new report. Older daemons do not tell it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interval_ms: Option<u64>,
    /// What is divided: "cache" at memory servers, or "local tier" in memory of the host.
    pub resource: String,
    /// Whether sizes are changed. Otherwise the daemon only says what it would do.
    pub applies: bool,
    /// "optimal", or one of the policies that are shown for comparison.
    pub policy: String,
    pub total_bytes: u64,
    /// Memory is counted in units of this size.
    pub unit_bytes: u64,
    /// Sum of what the VMs have: of each the granted or the wanted size, whichever is larger.
    pub counted_bytes: u64,
    /// What the daemon is about to do, or why it does nothing.
    pub state: String,
    /// Weighted geometric mean of the expected miss ratios, divided by that of the present sizes; `None` without a plan. Below 1 is better.
    pub geometric_mean: Option<f64>,
    /// Time that reads would be shorter by, in milliseconds for each second, over all VMs that the plan changes.
    pub saved_ms_per_s: Option<f64>,
    /// Time that the last plan took.
    pub plan_us: u64,
    /// What of the total is never planned with, and what guests have lent beside it; `None` if guests take no part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guests: Option<HostGuests>,
    pub vms: Vec<HostVm>,
    /// Latest decisions, the newest last; at most [`DECISIONS_MAX`].
    pub decisions: Vec<HostDecision>,
}

/// One VM of the host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostVm {
    pub name: String,
    /// "free": the plan may change it. "keeps": it keeps what it has. "stuck": it cannot be changed now.
    pub state: String,
    /// Size that counts: granted or wanted, whichever is larger; for a VM that never answered, the most that it could have.
    pub has_bytes: u64,
    pub granted_bytes: Option<u64>,
    pub wanted_bytes: Option<u64>,
    /// Size that it would get.
    pub target_bytes: u64,
    /// Size by weight alone.
    pub baseline_bytes: u64,
    /// Least size with which the VM is within its isolation bound and has its minimum.
    pub floor_bytes: u64,
    pub minimum_bytes: u64,
    pub maximum_bytes: u64,
    pub weight: f64,
    /// Greatest loss against the baseline, as a share of the baseline's miss ratio; `None` without such a bound.
    pub bound: Option<f64>,
    /// Share of the blocks read that the cache does not answer, by the curve, with the present size and with the target.
    pub miss_ratio: Option<f64>,
    pub miss_ratio_then: Option<f64>,
    /// Error of the difference between the two.
    pub miss_ratio_error: Option<f64>,
    pub blocks_read_per_s: Option<f64>,
    /// Time that reads would be shorter by, in milliseconds for each second.
    pub saved_ms_per_s: Option<f64>,
    /// Reason for the target.
    pub why: String,
    /// Memory of its guest; `None` if guests take no part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest: Option<HostGuest>,
}

/// Memory that goes between guests and their caches.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostGuests {
    pub reserve_bytes: u64,
    /// What guests have lent, as the host has seen it. It is divided beside the total.
    pub lent_bytes: u64,
    /// "rest", "lend", "observe", "divide" or "return".
    pub phase: String,
    /// What the round is about, in words.
    pub state: String,
    /// VMs whose guests lack memory, and whose process does not run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub absent: Vec<String>,
}

/// Memory of the guest of a VM.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostGuest {
    /// "usable": it may be moved. "short": the guest is short of memory. "stuck": its balloon does not follow. "silent": its monitor does not
    /// answer. "advised": nothing can be taken from it.
    pub state: String,
    /// What it had when the daemon saw it first; `None` as long as its monitor has not answered.
    pub home_bytes: Option<u64>,
    /// What its balloon leaves to it.
    pub guest_bytes: Option<u64>,
    /// What it takes of the host's memory.
    pub resident_bytes: Option<u64>,
    /// What it has lent, as the host has seen it.
    pub lent_bytes: u64,
    /// What was taken from it, seen or not.
    pub taken_bytes: u64,
    /// What it could lend in a round, beside that.
    pub could_lend_bytes: u64,
    /// Size below which it is never taken.
    pub minimum_bytes: u64,
    /// Why it is as it is.
    pub why: String,
}

/// One change of a size, or what kept the daemon from one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostDecision {
    /// In seconds since 1970.
    pub at_s: u64,
    /// `None` for a decision about all VMs.
    pub vm: Option<String>,
    pub from_bytes: u64,
    pub to_bytes: u64,
    pub why: String,
    /// Miss ratios, by the curve, before and after.
    pub miss_ratio: Option<f64>,
    pub miss_ratio_then: Option<f64>,
    /// What came of it.
    pub outcome: String,
}

impl HostReport {
    /// Returns the report as a line of JSON, including the trailing newline.
    ///
    /// # Errors
    /// If serialization fails, which no report can cause.
    pub fn line(&self) -> serde_json::Result<Vec<u8>> {
        let mut line = serde_json::to_vec(self)?;
        line.push(b'\n');
        Ok(line)
    }

    /// Returns the age of the report at `now_s`, in seconds since 1970, if the daemon should have made another long ago: it hangs, and
    /// only the thread that shows its last report does not.
    #[must_use]
    pub fn overdue_s(&self, now_s: u64) -> Option<u64> {
        let patience_s = (self.interval_ms?.saturating_mul(3) / 1000).max(FRESH_S);
        Some(now_s.saturating_sub(self.at_s)).filter(|age_s| *age_s > patience_s)
    }

    /// Parses a report. Its texts may be shown on a terminal, see [`shown::from_json`].
    ///
    /// # Errors
    /// If the text is no report.
    pub fn parse(text: &[u8]) -> serde_json::Result<Self> {
        shown::from_json(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_overdue_after_three_intervals() {
        let of = |interval_ms| HostReport { at_s: 1000, interval_ms, ..HostReport::default() };
        let minute = of(Some(60_000));
        assert_eq!([0, 1000, 1180, 1181].map(|now_s| minute.overdue_s(now_s)), [None, None, None, Some(181)]);
        assert_eq!([1030, 1031].map(|now_s| of(Some(100)).overdue_s(now_s)), [None, Some(31)]);
        assert_eq!(of(None).overdue_s(u64::MAX), None, "it is not known when the next one is due");
    }

    #[test]
    fn a_report_is_one_line_and_comes_back() {
        let vm = HostVm { name: "a\nb".into(), bound: Some(0.25), miss_ratio: Some(0.5), ..HostVm::default() };
        let decision = HostDecision { vm: Some("a".into()), why: "more".into(), ..HostDecision::default() };
        let report = HostReport { vms: vec![vm], decisions: vec![decision], ..HostReport::default() };
        let line = report.line().unwrap();
        assert_eq!(line.iter().filter(|byte| **byte == b'\n').count(), 1);
        assert_eq!(HostReport::parse(&line).unwrap(), report);
        assert!(HostReport::parse(b"{}").is_err());
        let said = HostReport { state: "a\u{1b}[2J".into(), ..HostReport::default() };
        assert_eq!(HostReport::parse(&said.line().unwrap()).unwrap().state, "a\u{fffd}[2J");
    }
}
