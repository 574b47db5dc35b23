//! What went wrong in the last minutes, from counters that only grow. Pure.

use crate::figures::{counter, is_same_program};
use remoca_protocol::control::Status;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Time that is looked back on, in seconds.
const WINDOW_S: f64 = 600.0;
/// Least time between two statuses that are kept, in seconds.
const STEP_S: f64 = 20.0;

/// Counts of the last ten minutes, or since the start of a process that was not watched for so long.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Lately {
    /// Time that the counts cover.
    pub seconds: f64,
    pub is_since_start: bool,
    /// Requests that the disk failed.
    pub disk_errors: u64,
    /// Pages with another content than the requested one, and replies that nobody asked for.
    pub wrong_pages: u64,
    /// Pages that the memory server did not have.
    pub missing_pages: u64,
    /// Reads that the disk answered because the memory server was late.
    pub late_reads: u64,
    /// Reads that the memory server answered.
    pub hits: u64,
    pub disconnections: u64,
    /// Times that another program was seen to write to an image.
    pub foreign_writes: u64,
    /// Evicted pages, without those while the cache was off.
    pub evicted: u64,
    /// Evicted pages that the disk is not known to hold.
    pub unknown_pages: u64,
    pub reads: u64,
    /// Reads that the disk answered.
    #[serde(default)]
    pub disk_reads: u64,
    pub misaligned_reads: u64,
    /// Evicted pages that the agent took, and that it could not take.
    #[serde(default)]
    pub captured: u64,
    #[serde(default)]
    pub uncaptured: u64,
    /// Cookie of the agent that counted them. Its counts begin again when it is started again.
    #[serde(skip)]
    agent: Option<u64>,
}

impl Lately {
    /// Returns the counts of `status` since its start.
    #[must_use]
    pub fn of(status: &Status) -> Self {
        let count = |name| counter(status, name);
        let agent = status.port.as_ref().and_then(|port| port.agent.as_ref());
        Self {
            seconds: status.uptime_s,
            is_since_start: true,
            disk_errors: count("disk_errors"),
            wrong_pages: count("fetch_wrong").saturating_add(count("fetch_unexpected")),
            missing_pages: count("fetch_missing"),
            late_reads: count("hedges_won").saturating_add(count("fetch_timeouts")),
            hits: status.latency.read_from_cache.count,
            disconnections: count("disconnections"),
            foreign_writes: count("foreign_writes"),
            evicted: count("evictions_reported").saturating_sub(count("evictions_unjudged")),
            unknown_pages: count("evictions_unmatched"),
            reads: count("reads"),
            disk_reads: status.latency.read_from_disk.count,
            misaligned_reads: count("misaligned_reads"),
            captured: agent.map_or(0, |agent| agent.captured),
            uncaptured: agent.map_or(0, |agent| agent.lost),
            agent: agent.map(|agent| agent.cookie),
        }
    }

    /// Returns the counts since `earlier`, both of which began at the same time.
    fn since(&self, earlier: &Self) -> Self {
        let since = |count: fn(&Self) -> u64| count(self).saturating_sub(count(earlier));
        let is_new_agent = self.agent != earlier.agent;
        let since_agent = |count: fn(&Self) -> u64| if is_new_agent { count(self) } else { since(count) };
        Self {
            seconds: self.seconds - earlier.seconds,
            is_since_start: false,
            disk_errors: since(|counts| counts.disk_errors),
            wrong_pages: since(|counts| counts.wrong_pages),
            missing_pages: since(|counts| counts.missing_pages),
            late_reads: since(|counts| counts.late_reads),
            hits: since(|counts| counts.hits),
            disconnections: since(|counts| counts.disconnections),
            foreign_writes: since(|counts| counts.foreign_writes),
            evicted: since(|counts| counts.evicted),
            unknown_pages: since(|counts| counts.unknown_pages),
            reads: since(|counts| counts.reads),
            disk_reads: since(|counts| counts.disk_reads),
            misaligned_reads: since(|counts| counts.misaligned_reads),
            captured: since_agent(|counts| counts.captured),
            uncaptured: since_agent(|counts| counts.uncaptured),
            agent: self.agent,
        }
    }

    /// Returns the time that the counts cover, in words.
    #[must_use]
    pub fn period(&self) -> String {
        let time = crate::text::show_seconds(self.seconds);
        if self.is_since_start { format!("in the {time} since its start") } else { format!("in the last {time}") }
    }
}

/// Counts of one VM over the last ten minutes and a little more, and its newest status.
#[derive(Default)]
pub struct Past {
    /// Counts since the start of the program.
    kept: VecDeque<Lately>,
    newest: Option<Status>,
}

impl Past {
    /// Adds a status. Returns the counts of the last minutes, by the clock of its program, and the status before if the same program
    /// reported it.
    pub fn add(&mut self, status: &Status) -> (Lately, Option<Status>) {
        if self.newest.as_ref().is_some_and(|newest| !is_same_program(newest, status)) {
            *self = Self::default();
        }
        let counts = Lately::of(status);
        let passed_s = |earlier: &Lately| counts.seconds - earlier.seconds;
        let baseline = self.kept.iter().take_while(|earlier| passed_s(earlier) >= WINDOW_S).count();
        let is_due = self.kept.back().is_none_or(|newest| passed_s(newest) >= STEP_S);
        self.kept.drain(..baseline.saturating_sub(1));
        let lately = match self.kept.front().filter(|_| baseline > 0) {
            Some(earlier) => counts.since(earlier),
            None => counts.clone(),
        };
        if is_due {
            self.kept.push_back(counts);
        }
        (lately, self.newest.replace(status.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::status;
    use serde_json::json;

    fn at(uptime_s: f64, wrong: u64) -> Status {
        Status { uptime_s, ..status(json!({"fetch_wrong": wrong}), [0; 2], [0; 2]) }
    }

    #[test]
    fn old_faults_are_forgotten_after_ten_minutes() {
        let mut past = Past::default();
        let (first, before) = past.add(&at(5000.0, 7));
        assert!(first.is_since_start && first.wrong_pages == 7 && before.is_none());
        assert_eq!(first.period(), "in the 83m since its start");
        for number in 1..=119 {
            let (lately, before) = past.add(&at(5000.0 + f64::from(number) * 5.0, 7));
            assert!(lately.is_since_start && before.is_some(), "{number}");
        }
        let (lately, _) = past.add(&at(5600.0, 9));
        assert_eq!(
            (lately.is_since_start, lately.wrong_pages, lately.period().as_str()),
            (false, 2, "in the last 10m")
        );
        assert!(past.kept.len() <= 32, "{}", past.kept.len());
        let (lately, _) = past.add(&at(6300.0, 9));
        assert_eq!(lately.wrong_pages, 0, "what was seen ten minutes ago");
    }

    #[test]
    fn what_an_agent_counted_begins_anew_with_the_next() {
        let at = |uptime_s: f64, [cookie, captured, lost]: [u64; 3]| {
            let agent = json!({"cookie": cookie, "captured": captured, "lost": lost, "sampled_out": 0, "written": 0});
            let port = json!({"socket": "p", "attached": true, "agent": agent, "advice": 0});
            Status { port: serde_json::from_value(port).unwrap(), uptime_s, ..status(json!({}), [0; 2], [0; 2]) }
        };
        let mut past = Past::default();
        past.add(&at(100.0, [1, 5000, 10]));
        let (lately, _) = past.add(&at(700.0, [1, 5600, 11]));
        assert_eq!((lately.captured, lately.uncaptured), (600, 1));
        let (lately, _) = past.add(&at(730.0, [2, 300, 30]));
        assert_eq!(
            (lately.captured, lately.uncaptured),
            (300, 30),
            "more lost and fewer captured than by the agent before"
        );
        let (lately, _) = past.add(&at(1400.0, [2, 400, 31]));
        assert_eq!((lately.captured, lately.uncaptured), (100, 1));
    }

    #[test]
    fn another_program_begins_anew() {
        let mut past = Past::default();
        past.add(&at(100.0, 7));
        let (lately, before) = past.add(&at(1.0, 1));
        assert!(lately.is_since_start && lately.wrong_pages == 1 && before.is_none());
    }
}
