//! Retry delays: they double and have jitter, so that the clients of a server that comes back do not all reconnect at
//! once.

use std::time::Duration;

const DELAY_MIN: Duration = Duration::from_millis(20);
pub(super) const DELAY_MAX: Duration = Duration::from_secs(3);

#[derive(Debug)]
pub(super) struct Backoff {
    next: Duration,
    random: u64,
}

impl Backoff {
    pub(super) fn new(seed: u64) -> Self {
        Self { next: DELAY_MIN, random: seed }
    }

    pub(super) fn reset(&mut self) {
        self.next = DELAY_MIN;
    }

    /// Returns a random delay between half and all of the current delay, and doubles the current delay up to its
    /// maximum.
    pub(super) fn next_delay(&mut self) -> Duration {
        let delay = self.next;
        self.next = (delay * 2).min(DELAY_MAX);
        // An LCG (Knuth's MMIX) is random enough; its upper bits are the better ones.
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let part_of_256 = u32::try_from(self.random >> 56).unwrap_or(0);
        delay / 2 + delay / 2 * part_of_256 / 256
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_the_maximum_and_differ_between_clients() {
        let mut backoff = Backoff::new(1);
        let mut expected = DELAY_MIN;
        for _ in 0..20 {
            let delay = backoff.next_delay();
            assert!(delay >= expected / 2 && delay <= expected, "{delay:?} for {expected:?}");
            expected = (expected * 2).min(DELAY_MAX);
        }
        assert_ne!(Backoff::new(1).next_delay(), Backoff::new(2).next_delay());
        backoff.reset();
        assert!(backoff.next_delay() <= DELAY_MIN);
    }
}
