//! The changes under way, one command after the other.

use super::moves::Stage;
use super::{FOLLOW_TIME, Moment, Outcome, Planner, Step};

/// Number of windows for which a VM that did not follow is left alone.
const IGNORED_WINDOWS: u32 = 10;

impl Planner {
    /// Returns the next command, and marks it as begun: [`Planner::record`] must be written before it is executed. Returns `None` if there is
    /// nothing to do now.
    pub fn next_step(&mut self, at: Moment) -> Option<Step> {
        let intent = self.intent.as_ref()?;
        let is_planned = |change: &&super::Move| change.stage == Stage::Planned;
        // All are told to give back at once.
        let take = intent.moves.iter().filter(|change| change.takes()).find(is_planned);
        if let Some(take) = take {
            let step = Step { vm: take.vm.clone(), bytes: take.to_bytes };
            return Some(self.begin(at, step));
        }
        if intent.open(true).is_some() {
            return None;
        }
        while let Some(give) = self.intent.as_ref().and_then(|intent| intent.open(false)).cloned() {
            if give.stage == Stage::Begun {
                return None;
            }
            let bytes = self.room(at, &give.vm).min(give.to_bytes);
            if bytes > give.from_bytes {
                return Some(self.begin(at, Step { vm: give.vm, bytes }));
            }
            self.drop_move(at, &give.vm, "what was to be taken for it did not come back");
        }
        self.finish();
        None
    }

    /// Returns the size that a VM may have with the total kept, in whole units.
    fn room(&self, at: Moment, name: &str) -> u64 {
        let memory = self.settings.memory();
        let own = self.vms.get(name).map_or(0, |vm| vm.counted(memory));
        let others = self.counted(at.now).saturating_sub(own);
        let left = memory.total_bytes.saturating_sub(others);
        left - left % memory.unit_bytes
    }

    fn begin(&mut self, at: Moment, step: Step) -> Step {
        self.stepped_at = at.now;
        self.awaited_at = at.now;
        if let Some(change) = self.intent.as_mut().and_then(|intent| intent.of(&step.vm)) {
            change.stage = Stage::Begun;
            change.to_bytes = step.bytes;
        }
        step
    }

    /// Takes what came of a step.
    pub fn step_done(&mut self, at: Moment, step: &Step, outcome: Outcome) {
        let Some(vm) = self.vms.get_mut(&step.vm) else { return };
        vm.changed_at = Some(at.now);
        match outcome {
            Outcome::Answered(answer) => self.hear(at, &step.vm, answer),
            Outcome::Refused(why) => {
                // Others would give up memory for it again and again.
                vm.ignored_until = Some(at.now + IGNORED_WINDOWS * self.settings.window);
                self.drop_move(at, &step.vm, &format!("it refused: {why}"));
            }
            Outcome::NotSent(why) => self.drop_move(at, &step.vm, &why),
            Outcome::Unknown(why) => vm.await_size(step.bytes, why),
        }
    }

    /// Looks whether a change of the VM `name` has taken place.
    pub(super) fn follow(&mut self, at: Moment, name: &str) {
        let Some(reading) = self.vms.get(name).filter(|vm| vm.silent.is_none()).and_then(|vm| vm.reading.as_ref())
        else {
            return;
        };
        let Some(change) = self.intent.as_mut().and_then(|intent| intent.of(name)) else { return };
        if change.stage != Stage::Begun {
            return;
        }
        if reading.wanted != change.to_bytes {
            let why = match reading.wanted == change.from_bytes {
                true => "it kept its size".to_owned(),
                false => format!("somebody else has set {} bytes", reading.wanted),
            };
            if let Some(vm) = self.vms.get_mut(name) {
                vm.ignored_until = Some(at.now + IGNORED_WINDOWS * self.settings.window);
            }
            self.drop_move(at, name, &why);
        } else if !change.takes() || reading.granted <= change.to_bytes {
            change.stage = Stage::Done;
            let waited = at.now.saturating_sub(self.stepped_at).as_secs_f64();
            let outcome = match change.takes() {
                true => format!("given back after {waited:.1} s"),
                false => "set".to_owned(),
            };
            let change = change.clone();
            self.log.done(at.unix_s, &change, &outcome);
        }
    }

    /// Returns the VMs that are to give memory back, or whose answer is awaited.
    pub(super) fn awaited(&self) -> Vec<String> {
        let begun = self.intent.iter().flat_map(|intent| &intent.moves).filter(|change| change.stage == Stage::Begun);
        begun.map(|change| change.vm.clone()).collect()
    }

    /// Gives up on VMs that do not follow.
    pub(super) fn give_up(&mut self, at: Moment) {
        if at.now.saturating_sub(self.stepped_at) < FOLLOW_TIME {
            return;
        }
        for name in self.awaited() {
            if let Some(vm) = self.vms.get_mut(&name) {
                vm.ignored_until = Some(at.now + IGNORED_WINDOWS * self.settings.window);
            }
            self.drop_move(at, &name, &format!("it did not follow within {} s", FOLLOW_TIME.as_secs()));
        }
    }

    /// Drops the change of a VM, if it has one that is open.
    pub(super) fn drop_move(&mut self, at: Moment, name: &str, why: &str) {
        if let Some(change) = self.intent.as_mut().and_then(|intent| intent.of(name)).filter(|change| change.is_open())
        {
            change.stage = Stage::Dropped;
            let change = change.clone();
            self.log.dropped(at.unix_s, &change, why);
        }
    }

    /// Ends the plan if nothing is left to do.
    fn finish(&mut self) {
        if self.intent.as_ref().is_some_and(super::Intent::is_over) {
            self.intent = None;
        }
    }
}
