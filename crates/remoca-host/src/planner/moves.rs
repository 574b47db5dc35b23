//! The changes of one plan, in their order: first all that take, then, once these are seen in the granted sizes, those that give.
//!
//! They are the intent that is on record: a successor of this daemon ends or undoes them.

use serde::{Deserialize, Serialize};

/// How far a change has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stage {
    #[default]
    Planned,
    /// On record: the command was sent, or is sent next.
    Begun,
    /// Seen.
    Done,
    /// It was refused, or is not possible any more.
    Dropped,
}

/// Which memory of a VM has its size changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Side {
    /// What is divided: its cache, or its local tier.
    #[default]
    Tier,
    /// The memory that its balloon leaves to the guest.
    Guest,
}

/// One change of the size of one VM.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Move {
    pub vm: String,
    #[serde(default, skip_serializing_if = "is_tier")]
    pub side: Side,
    pub from_bytes: u64,
    pub to_bytes: u64,
    pub stage: Stage,
    /// Reason, for the log of decisions.
    pub why: String,
    pub miss_ratio: Option<f64>,
    pub miss_ratio_then: Option<f64>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for it")]
fn is_tier(side: &Side) -> bool {
    *side == Side::Tier
}

impl Move {
    /// Returns whether memory is taken from the VM.
    #[must_use]
    pub fn takes(&self) -> bool {
        self.to_bytes < self.from_bytes
    }

    /// Returns whether it may still happen.
    #[must_use]
    pub fn is_open(&self) -> bool {
        matches!(self.stage, Stage::Planned | Stage::Begun)
    }
}

/// All changes of one plan.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Intent {
    /// When it was made, in seconds since 1970.
    pub at_s: u64,
    pub moves: Vec<Move>,
}

impl Intent {
    /// Returns the first change that is not done, among those that take or those that give.
    #[must_use]
    pub fn open(&self, takes: bool) -> Option<&Move> {
        self.moves.iter().find(|change| change.takes() == takes && change.is_open())
    }

    /// Returns whether nothing is left to do.
    #[must_use]
    pub fn is_over(&self) -> bool {
        !self.moves.iter().any(Move::is_open)
    }

    /// Returns the change of one side of a VM that is not done.
    pub fn of(&mut self, vm: &str, side: Side) -> Option<&mut Move> {
        self.moves.iter_mut().find(|change| change.vm == vm && change.side == side && change.is_open())
    }

    /// Returns whether memory goes from guests to their caches, or back.
    #[must_use]
    pub fn is_exchange(&self) -> bool {
        self.moves.iter().any(|change| change.side == Side::Guest)
    }

    /// Decides what becomes of the intent of a daemon that died, by the size of each VM and guest now (`wanted`); `None` for one that does not
    /// answer. A young intent goes on where it was. Of an old one, what was done is undone, but no guest gives what it was given.
    #[must_use]
    pub fn resumed(mut self, is_young: bool, wanted: impl Fn(&str, Side) -> Option<u64>) -> Self {
        let begun = |change: &Move| matches!(change.stage, Stage::Begun | Stage::Done);
        if !self.moves.iter().any(begun) {
            self.moves.clear();
        }
        let mut silent = Vec::new();
        for change in &mut self.moves {
            let now = wanted(&change.vm, change.side);
            if now.is_none() && change.side == Side::Guest && !change.takes() && change.is_open() {
                silent.push(change.vm.clone());
            }
            change.stage = match (change.stage, now) {
                (Stage::Dropped, _) | (_, None) => Stage::Dropped,
                // A guest follows slowly, and may be anywhere between the two. It can be told again, unless it has followed: it may have got
                // something since.
                (stage, Some(_)) if change.side == Side::Guest && (!is_young || stage == Stage::Done) => stage,
                (_, Some(_)) if change.side == Side::Guest => Stage::Planned,
                // A take is over when it is seen in the granted size, which is not known here.
                (_, Some(now)) if now == change.to_bytes && change.takes() => Stage::Begun,
                (_, Some(now)) if now == change.to_bytes => Stage::Done,
                (_, Some(now)) if now == change.from_bytes => Stage::Planned,
                // Somebody else has changed it.
                (_, Some(_)) => Stage::Dropped,
            };
        }
        if is_young {
            silent.iter().for_each(|vm| self.keep_together(vm));
            return self;
        }
        let is_given = |change: &&Move| change.side == Side::Guest && !change.takes() && begun(change);
        let given: Vec<String> = self.moves.iter().filter(is_given).map(|change| change.vm.clone()).collect();
        // The cache of such a guest does without, too.
        self.moves.retain(|change| begun(change) && !given.contains(&change.vm));
        for change in &mut self.moves {
            (change.from_bytes, change.to_bytes, change.stage) = (change.to_bytes, change.from_bytes, Stage::Planned);
            (change.miss_ratio, change.miss_ratio_then) = (change.miss_ratio_then, change.miss_ratio);
            change.why = "what a former daemon began long ago is undone".into();
        }
        self
    }
}

impl Intent {
    /// Lets what a guest that does not answer was to be given depend on its cache: once that has given, the guest is told when it can be.
    fn keep_together(&mut self, vm: &str) {
        let mut of_vm = self.moves.iter_mut().filter(|change| change.vm == vm);
        let Some(take) = of_vm.find(|change| change.side == Side::Tier && change.takes()) else { return };
        let has_given = matches!(take.stage, Stage::Begun | Stage::Done);
        if !has_given {
            take.stage = Stage::Dropped;
        }
        let give = of_vm.find(|change| change.side == Side::Guest).filter(|_| has_given);
        give.into_iter().for_each(|give| give.stage = Stage::Planned);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(vm: &str, from_bytes: u64, to_bytes: u64, stage: Stage) -> Move {
        Move { vm: vm.into(), from_bytes, to_bytes, stage, ..Move::default() }
    }

    fn stages(intent: &Intent) -> Vec<(&str, u64, Stage)> {
        intent.moves.iter().map(|change| (change.vm.as_str(), change.to_bytes, change.stage)).collect()
    }

    #[test]
    fn an_intent_goes_on_where_it_was_or_is_undone() {
        use Stage::{Begun, Done, Dropped, Planned};
        let moves = vec![
            change("seen", 9, 4, Done),
            change("lost", 9, 5, Begun),
            change("other", 9, 6, Begun),
            change("silent", 9, 7, Begun),
            change("next", 1, 8, Planned),
        ];
        let wanted = |vm: &str, _| match vm {
            "seen" => Some(4),
            "lost" => Some(9),
            "other" => Some(2),
            "next" => Some(1),
            _ => None,
        };
        let intent = Intent { at_s: 0, moves };
        let young = intent.clone().resumed(true, wanted);
        assert_eq!(
            stages(&young),
            [
                ("seen", 4, Begun),
                ("lost", 5, Planned),
                ("other", 6, Dropped),
                ("silent", 7, Dropped),
                ("next", 8, Planned)
            ]
        );
        assert_eq!(stages(&intent.resumed(false, wanted)), [("seen", 9, Planned)]);
    }

    #[test]
    fn a_guest_is_told_again_or_gets_back_what_was_taken() {
        use Stage::{Begun, Planned};
        let guest = Move { side: Side::Guest, ..change("a", 90, 80, Begun) };
        let intent = Intent { at_s: 0, moves: vec![guest, change("a", 20, 30, Planned)] };
        let wanted = |_: &str, side| Some(if side == Side::Guest { 85 } else { 20 });
        assert_eq!(stages(&intent.clone().resumed(true, wanted)), [("a", 80, Planned), ("a", 30, Planned)]);
        assert_eq!(stages(&intent.resumed(false, wanted)), [("a", 90, Planned)]);
    }

    #[test]
    fn a_guest_that_followed_is_not_told_again() {
        use Stage::{Done, Planned};
        let guest = Move { side: Side::Guest, ..change("a", 90, 80, Done) };
        let intent = Intent { at_s: 0, moves: vec![guest, change("a", 20, 30, Planned)] };
        let wanted = |_: &str, side| Some(if side == Side::Guest { 86 } else { 20 });
        assert_eq!(stages(&intent.clone().resumed(true, wanted)), [("a", 80, Done), ("a", 30, Planned)]);
        assert_eq!(stages(&intent.resumed(false, wanted)), [("a", 90, Planned)]);
    }

    #[test]
    fn nothing_that_a_guest_was_given_is_taken_from_it_again() {
        use Stage::{Begun, Done, Planned};
        for stage in [Begun, Done] {
            let moves = vec![
                change("a", 30, 20, Done),
                change("b", 30, 20, Done),
                Move { side: Side::Guest, ..change("a", 80, 90, stage) },
                Move { side: Side::Guest, ..change("b", 80, 90, Planned) },
            ];
            let wanted = |_: &str, side| Some(if side == Side::Guest { 80 } else { 20 });
            let old = Intent { at_s: 0, moves }.resumed(false, wanted);
            assert_eq!(stages(&old), [("b", 30, Planned)]);
        }
    }

    #[test]
    fn a_guest_that_does_not_answer_gets_what_its_cache_has_given() {
        use Stage::{Begun, Done, Dropped, Planned};
        // What the cache has now, and what becomes of its change and of the guest's.
        for (stage, has, of_cache, of_guest) in
            [(Done, 20, Begun, Planned), (Begun, 20, Begun, Planned), (Planned, 30, Dropped, Dropped)]
        {
            let give = Move { side: Side::Guest, ..change("a", 80, 90, Planned) };
            let moves = vec![change("a", 30, 20, stage), give, change("b", 9, 8, Done)];
            let wanted = |name: &str, side| match (name, side) {
                ("a", Side::Tier) => Some(has),
                ("b", Side::Tier) => Some(8),
                _ => None,
            };
            let young = Intent { at_s: 0, moves }.resumed(true, wanted);
            assert_eq!(stages(&young), [("a", 20, of_cache), ("a", 90, of_guest), ("b", 8, Begun)]);
        }
    }

    #[test]
    fn an_intent_of_which_nothing_was_begun_is_forgotten() {
        let intent = Intent { at_s: 0, moves: vec![change("a", 1, 2, Stage::Planned)] };
        assert!(intent.clone().resumed(true, |_, _| Some(1)).is_over());
        assert!(intent.resumed(false, |_, _| Some(1)).moves.is_empty());
    }
}
