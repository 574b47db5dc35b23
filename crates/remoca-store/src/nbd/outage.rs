//! The time without a connection: why there is none, and what the log says of attempts to connect again.

use crate::nbd_link::LinkError;
use std::fmt::Display;
use std::time::Instant;

/// How many reasons of one outage are logged when an attempt first fails for them. They may be made of what a server says.
const REASONS_MAX: usize = 8;

#[derive(Debug)]
pub(super) struct Outage {
    attempts: u32,
    /// `None` while an attempt is in progress.
    pub(super) retry_at: Option<Instant>,
    /// How the connection was lost, or why the last attempt failed.
    why: String,
    /// Reasons for which attempts have failed, as far as they are counted.
    reasons: Vec<String>,
}

impl Outage {
    pub(super) fn new(why: String, retry_at: Instant) -> Self {
        Self { attempts: 0, retry_at: Some(retry_at), why, reasons: Vec::new() }
    }

    /// Returns how the connection was lost, or why the last attempt failed.
    pub(super) fn why(&self) -> &str {
        &self.why
    }

    /// Ends an attempt that has failed. Returns the number of attempts if this one is to be logged: its reason is a new one, or
    /// the number a power of two, so that a long outage does not fill the log.
    pub(super) fn end_attempt(&mut self, why: String, retry_at: Instant) -> Option<u32> {
        self.attempts += 1;
        self.retry_at = Some(retry_at);
        let is_new = self.reasons.len() < REASONS_MAX && !self.reasons.contains(&why);
        if is_new {
            self.reasons.push(why.clone());
        }
        self.why = why;
        (is_new || self.attempts.is_power_of_two()).then_some(self.attempts)
    }
}

/// Returns in words why there is no connection.
pub(super) fn explain(error: &LinkError) -> String {
    match error {
        LinkError::Lost(_) | LinkError::TimedOut => format!("the NBD server cannot be reached: {error}"),
        LinkError::Handshake(_) => explain_refusal(error),
    }
}

/// Returns in words why a server that was reached is not used.
pub(super) fn explain_refusal(error: &dyn Display) -> String {
    format!("the NBD server cannot be used: {error}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_reason_is_logged_at_once_and_an_old_one_ever_more_rarely() {
        let now = Instant::now();
        let mut outage = Outage::new("lost".into(), now);
        assert_eq!(outage.why(), "lost");
        let mut logged = |reasons: &[&str]| -> Vec<u32> {
            reasons.iter().filter_map(|why| outage.end_attempt((*why).into(), now)).collect()
        };
        assert_eq!(logged(&["a"; 7]), [1, 2, 4]);
        assert_eq!(logged(&["a", "a", "b", "b", "a", "b"]), [8, 10]);
        let many: Vec<String> = (0..100).map(|at| at.to_string()).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert_eq!(logged(&many), [14, 15, 16, 17, 18, 19, 32, 64], "a server that says something else each time");
        assert_eq!(outage.why(), "99");
    }
}
