//! The choice among servers that have answered.
//!
//! Servers are drawn at random, with a weight of what they could give. VMs that ask at the same time see the same figures,
//! and must not all choose the same server. Decision 0014.

use super::need::{Choice, Need, SPREAD_MIN, SPREAD_POOLS};
use super::random::Random;
use crate::units::PageCount;

/// Server that has answered.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    pub(super) choice: Choice,
    /// Whether its pages took more than twice as long as those of the fastest server.
    pub(super) is_slow: bool,
}

/// Returns the next server that gets a pool, or `None` if the cache needs no other one.
///
/// Memory comes first: a server is drawn among those that can give what is missing or, if none can, among those that can
/// give most. A cache of [`SPREAD_MIN`] pages takes an equal share from each of [`SPREAD_POOLS`] servers instead. A slow
/// server is taken only if memory is missing without it.
pub(super) fn draw(candidates: Vec<Candidate>, need: &Need, random: &mut Random) -> Option<Choice> {
    if !need.can_add {
        return None;
    }
    let missing = need.missing();
    let is_first = need.seats == 0;
    let is_useful = |candidate: &Candidate| candidate.choice.gives.0 > 0;
    let is_spread = need.wanted >= SPREAD_MIN && need.members() < SPREAD_POOLS;
    let able = candidates.iter().filter(|candidate| is_useful(candidate) && !candidate.is_slow).count();
    let fair = u64::from(need.wanted.0).div_ceil(SPREAD_POOLS.min(need.members() + able).max(1) as u64);
    let goal = if is_spread { fair } else { missing };

    let only = |these: &dyn Fn(&Candidate) -> bool| -> Vec<Choice> {
        candidates.iter().filter(|candidate| these(candidate)).map(|candidate| candidate.choice).collect()
    };
    let fast = only(&|candidate| is_useful(candidate) && !candidate.is_slow);
    let mut good = if missing > 0 || is_first {
        // A server without memory is better than none.
        let slow = || only(&is_useful);
        let empty = || if is_first { only(&|_| true) } else { Vec::new() };
        [fast, slow(), empty()].into_iter().find(|these| !these.is_empty())?
    } else if is_spread {
        // It joins for the sake of spread only if it can take an equal share.
        fast.into_iter().filter(|choice| u64::from(choice.gives.0) >= goal).collect()
    } else {
        return None;
    };
    let most = good.iter().map(|choice| choice.gives).max()?;
    good.retain(|choice| u64::from(choice.gives.0) >= goal.min(most.0.into()));
    weighted(&good, random)
}

/// Returns one of `choices`, drawn with a weight of what each can give.
fn weighted(choices: &[Choice], random: &mut Random) -> Option<Choice> {
    let weight = |gives: PageCount| u64::from(gives.0) + 1;
    let mut dice = random.below(choices.iter().map(|choice| weight(choice.gives)).sum());
    choices.iter().copied().find(|choice| {
        let hit = dice < weight(choice.gives);
        dice = dice.saturating_sub(weight(choice.gives));
        hit
    })
}
