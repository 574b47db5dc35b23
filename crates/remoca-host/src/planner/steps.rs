//! The changes under way, one command after the other.

use super::interface::Phase;
use super::moves::{Move, Side, Stage};
use super::{FOLLOW_TIME, Moment, Outcome, Planner, Step};

/// Number of windows for which a VM that did not follow is not asked again.
const IGNORED_WINDOWS: u32 = 10;

impl Planner {
    /// Returns the next command, and marks it as begun: [`Planner::record`] must be written before it is executed. Returns `None` if there is
    /// nothing to do now.
    pub fn next_step(&mut self, at: Moment) -> Option<Step> {
        if let Some(relief) = self.next_relief(at) {
            return Some(relief);
        }
        loop {
            let step = self.next_of_intent(at);
            let is_over = step.is_none() && self.finish();
            // The next step of lending needs no look at all.
            if !is_over || self.round.phase != Phase::Lend || self.counted(at.now) > self.memory(at.now).total_bytes {
                return step;
            }
            self.lend(at);
            self.intent.as_ref()?;
        }
    }

    fn next_of_intent(&mut self, at: Moment) -> Option<Step> {
        // All are told to give back at once.
        while let Some(take) = self.next_take() {
            let guest = self.guests.get(&take.vm).filter(|_| take.side == Side::Guest);
            let Some(why) = guest.and_then(|guest| guest.objection(at, take.from_bytes)) else {
                return Some(self.begin(at, Step { vm: take.vm, side: take.side, bytes: take.to_bytes }));
            };
            self.drop_move(at, &take.vm, Side::Guest, &why);
            // A former daemon may have told its balloon already.
            self.note_untold(&take.vm, true);
        }
        if self.intent.as_ref()?.open(true).is_some() {
            return self.begin_own(at);
        }
        while let Some(give) = self.next_give() {
            if give.stage == Stage::Begun {
                return None;
            }
            let mut bytes = self.room(at, &give.vm, give.side).min(give.to_bytes);
            if give.side == Side::Guest {
                // It may have got more since this was planned.
                bytes = bytes.max(self.guests.get(&give.vm).map_or(0, super::KnownGuest::has));
            }
            if bytes > give.from_bytes {
                return Some(self.begin(at, Step { vm: give.vm, side: give.side, bytes }));
            }
            self.drop_move(at, &give.vm, give.side, "what was to be taken for it did not come back");
        }
        None
    }

    /// Begins to give a guest what its own cache has given back, while others of the step have not given yet: none of that is theirs.
    /// Returns `None` if no guest has all that it is to get in its own cache.
    fn begin_own(&mut self, at: Moment) -> Option<Step> {
        let has = |name: &str| self.guests.get(name).map_or(0, super::KnownGuest::has);
        let is_own = |change: &&Move| {
            let is_planned = change.side == Side::Guest && change.stage == Stage::Planned && !change.takes();
            let own = self.given_by_own(&change.vm);
            is_planned && own > 0 && has(&change.vm).saturating_add(own) >= change.to_bytes
        };
        let give = self.intent.as_ref()?.moves.iter().find(is_own)?;
        let step = Step { vm: give.vm.clone(), side: Side::Guest, bytes: give.to_bytes.max(has(&give.vm)) };
        Some(self.begin(at, step))
    }

    /// Returns what the cache of a guest was seen to give back in the step that is under way.
    fn given_by_own(&self, name: &str) -> u64 {
        let given = self.intent.iter().flat_map(|intent| &intent.moves).find(|change| {
            change.vm == name && change.side == Side::Tier && change.takes() && change.stage == Stage::Done
        });
        given.map_or(0, |change| change.from_bytes - change.to_bytes)
    }

    /// Returns the change that takes and comes next.
    fn next_take(&self) -> Option<Move> {
        let moves = &self.intent.as_ref()?.moves;
        moves.iter().find(|change| change.takes() && change.stage == Stage::Planned).cloned()
    }

    /// Returns the change that gives and comes next, or whose answer is awaited. Guests need not be waited for one after the other.
    fn next_give(&self) -> Option<Move> {
        let moves = &self.intent.as_ref()?.moves;
        let awaits = |change: &&Move| change.stage == Stage::Planned || change.side == Side::Tier;
        moves.iter().filter(|change| !change.takes() && change.is_open()).find(awaits).cloned()
    }

    /// Returns the size that a VM or its guest may have with the total kept: a VM in whole units.
    fn room(&self, at: Moment, name: &str, side: Side) -> u64 {
        let mut memory = self.memory(at.now);
        // A guest may have taken back what it lent while its VM process does not see that.
        memory.total_bytes = memory.total_bytes.saturating_sub(self.lent_unseen(at.now));
        let counted = self.counted(at.now);
        match side {
            Side::Tier => {
                let own = self.vms.get(name).map_or(0, |vm| vm.counted(memory));
                let left = memory.total_bytes.saturating_sub(counted.saturating_sub(own));
                left - left % memory.unit_bytes
            }
            Side::Guest => {
                let Some(guest) = self.guests.get(name) else { return 0 };
                // What the guest gets is no longer lent. What its own cache gave back is its own, even if all have too much.
                let left = memory.total_bytes.saturating_sub(counted).max(self.given_by_own(name));
                guest.has().saturating_add(left).min(guest.sizes.map_or(0, |sizes| sizes.base_bytes))
            }
        }
    }

    fn begin(&mut self, at: Moment, step: Step) -> Step {
        self.stepped_at = at.now;
        self.awaited_at = at.now;
        if let Some(change) = self.intent.as_mut().and_then(|intent| intent.of(&step.vm, step.side)) {
            change.stage = Stage::Begun;
            change.to_bytes = step.bytes;
        }
        match step.side {
            Side::Guest => self.guests.get_mut(&step.vm).into_iter().for_each(|guest| guest.ask(step.bytes)),
            // Help for a guest does not wait for the answer.
            Side::Tier => self.vms.get_mut(&step.vm).into_iter().for_each(|vm| vm.expect_size(step.bytes)),
        }
        step
    }

    /// Takes what came of a step.
    pub fn step_done(&mut self, at: Moment, step: &Step, outcome: Outcome) {
        if step.side == Side::Guest {
            self.guest_step_done(at, step, outcome);
            return;
        }
        let Some(vm) = self.vms.get_mut(&step.vm) else { return };
        vm.note_change(at);
        vm.is_untold = matches!(outcome, Outcome::NotSent(_));
        vm.end_wait();
        match outcome {
            Outcome::Answered(answer) => self.hear(at, &step.vm, answer),
            Outcome::Refused(why) => {
                // Others would give up memory for it again and again.
                vm.ignored_until = Some(at.now + IGNORED_WINDOWS * self.settings.window);
                self.drop_move(at, &step.vm, step.side, &format!("it refused: {why}"));
            }
            Outcome::NotSent(why) => self.drop_move(at, &step.vm, step.side, &why),
            Outcome::Unknown(why) => vm.await_size(step.bytes, why),
            Outcome::Told => {}
        }
    }

    fn guest_step_done(&mut self, at: Moment, step: &Step, outcome: Outcome) {
        let name = &step.vm;
        let (why, was_sent) = match outcome {
            Outcome::Answered(_) | Outcome::Told => return,
            Outcome::NotSent(why) => (why, false),
            Outcome::Refused(why) | Outcome::Unknown(why) => {
                (format!("its monitor did not pass on what its balloon is to do: {why}"), true)
            }
        };
        // It may be about a step that was given up meanwhile.
        let is_it =
            |change: &&Move| change.vm == *name && change.stage == Stage::Begun && change.to_bytes == step.bytes;
        let is_change = self.begun().filter(|change| change.side == Side::Guest).any(|change| is_it(&change));
        if !is_change && !self.reliefs.iter().any(|relief| is_it(&relief)) {
            return;
        }
        if was_sent {
            self.stop_asking(at, name, why.clone());
        }
        // Help may name the same size. It was told first then, and what was told is not taken back.
        if is_change {
            self.drop_move(at, name, Side::Guest, &why);
        } else {
            if let Some(guest) = self.guests.get_mut(name).filter(|_| !was_sent) {
                guest.withdraw();
            }
            self.end_relief(at, name, false, &format!("not done: {why}"));
        }
    }

    /// Looks whether a change of the memory of a guest has taken place.
    pub(super) fn follow_guest(&mut self, at: Moment, name: &str) {
        self.follow_relief(at, name);
        let slack = self.slack();
        let Some(guest) = self.guests.get(name).filter(|guest| guest.unusable.is_none()) else { return };
        let Some(change) = self.intent.as_mut().and_then(|intent| intent.of(name, Side::Guest)) else { return };
        if change.stage == Stage::Begun && guest.follows(change.takes(), change.to_bytes, slack) {
            change.stage = Stage::Done;
            self.note_guest_change(at, name);
            self.note_untold(name, false);
        }
    }

    pub(super) fn note_guest_change(&mut self, at: Moment, name: &str) {
        let blocks = self.vms.get(name).map_or(0, super::KnownVm::blocks_read);
        if let Some(guest) = self.guests.get_mut(name) {
            guest.note_change(at.now, blocks);
        }
    }

    /// Looks whether a change of the VM `name` has taken place.
    pub(super) fn follow(&mut self, at: Moment, name: &str) {
        let Some(reading) = self.vms.get(name).filter(|vm| vm.silent.is_none()).and_then(|vm| vm.reading.as_ref())
        else {
            return;
        };
        let is_exchange = self.intent.as_ref().is_some_and(super::Intent::is_exchange);
        let Some(change) = self.intent.as_mut().and_then(|intent| intent.of(name, Side::Tier)) else { return };
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
            self.drop_move(at, name, Side::Tier, &why);
        } else if !change.takes() || reading.granted <= change.to_bytes {
            change.stage = Stage::Done;
            // Of the many steps of a round only what went wrong is told.
            if is_exchange {
                return;
            }
            let waited = at.now.saturating_sub(self.stepped_at).as_secs_f64();
            let outcome = match change.takes() {
                true => format!("given back after {waited:.1} s"),
                false => "set".to_owned(),
            };
            let change = change.clone();
            self.log.done(at.unix_s, &change, &outcome);
        }
    }

    /// Returns the changes that were begun, and are not seen yet.
    fn begun(&self) -> impl Iterator<Item = &Move> {
        let moves = self.intent.iter().flat_map(|intent| &intent.moves);
        moves.filter(|change| change.stage == Stage::Begun)
    }

    /// Returns whether the balloon of a guest is told something, or is to be.
    pub(super) fn moves_guest(&self, name: &str) -> bool {
        let moves = self.intent.iter().chain(&self.inherited).flat_map(|intent| &intent.moves);
        let mut of_guest = moves.filter(|change| change.vm == name && change.side == Side::Guest);
        of_guest.any(Move::is_open) || self.reliefs.iter().any(|relief| relief.vm == name)
    }

    /// Returns the VMs that are to give memory back, or whose answer is awaited.
    pub(super) fn awaited(&self) -> Vec<String> {
        let reliefs = self.reliefs.iter().filter(|relief| relief.stage == Stage::Begun);
        let mut names: Vec<String> = self.begun().chain(reliefs).map(|change| change.vm.clone()).collect();
        names.sort();
        names.dedup();
        names
    }

    /// Gives up on VMs and guests that do not follow.
    pub(super) fn give_up(&mut self, at: Moment) {
        if at.now.saturating_sub(self.stepped_at) < FOLLOW_TIME {
            return;
        }
        let late: Vec<Move> = self.begun().cloned().collect();
        for change in late {
            let why = format!("it did not follow within {} s", FOLLOW_TIME.as_secs());
            match change.side {
                Side::Tier => {
                    if let Some(vm) = self.vms.get_mut(&change.vm) {
                        vm.ignored_until = Some(at.now + IGNORED_WINDOWS * self.settings.window);
                    }
                    self.drop_move(at, &change.vm, Side::Tier, &why);
                }
                Side::Guest => self.give_up_guest(at, &change),
            }
        }
    }

    /// Gives up on a balloon. One that was to take memory from its guest would go on trying for ever, so it is told to stop.
    fn give_up_guest(&mut self, at: Moment, change: &Move) {
        let is_usable = self.guests.get(&change.vm).is_some_and(|guest| guest.unusable.is_none());
        let why = format!("its balloon did not follow within {} s", FOLLOW_TIME.as_secs());
        self.stop_asking(at, &change.vm, why.clone());
        self.drop_move(at, &change.vm, Side::Guest, &why);
        if let Some(intent) = self.intent.as_mut().filter(|_| change.takes() && is_usable) {
            intent.moves.push(Move {
                vm: change.vm.clone(),
                side: Side::Guest,
                from_bytes: change.to_bytes,
                to_bytes: change.from_bytes,
                why: "its balloon did not follow, and is told to stop".into(),
                ..Move::default()
            });
        }
    }

    /// Drops the change of one side of a VM, if it has one that is open. If memory went between a guest and its cache, the other side
    /// is dropped with it: what did not come is given to nobody.
    pub(super) fn drop_move(&mut self, at: Moment, name: &str, side: Side, why: &str) {
        let is_exchange = self.intent.as_ref().is_some_and(super::Intent::is_exchange);
        self.drop_one(at, name, side, why);
        if is_exchange {
            let other = if side == Side::Tier { Side::Guest } else { Side::Tier };
            self.drop_one(at, name, other, why);
        }
    }

    fn drop_one(&mut self, at: Moment, name: &str, side: Side, why: &str) {
        let is_exchange = self.intent.as_ref().is_some_and(super::Intent::is_exchange);
        let Some(change) = self.intent.as_mut().and_then(|intent| intent.of(name, side)) else { return };
        let was_begun = change.stage == Stage::Begun;
        change.stage = Stage::Dropped;
        let change = change.clone();
        self.log.dropped(at.unix_s, &change, why);
        // A guest that lends nothing may need its memory.
        self.log.failed += usize::from(was_begun && !is_exchange);
        if side == Side::Tier {
            return;
        }
        // One that a former daemon had begun is only planned here, but its balloon may have heard of it.
        let was_asked = self.guests.get(name).is_some_and(|guest| guest.was_asked(change.takes(), change.to_bytes));
        // What a guest was to give may still come, and counts for nobody then.
        if let Some(guest) = self.guests.get_mut(name).filter(|_| change.takes()) {
            guest.ask_at_least(change.from_bytes);
        }
        if was_begun || was_asked {
            self.note_untold(name, true);
        }
    }

    /// Drops the changes in which memory goes between a guest and its cache.
    pub(super) fn drop_exchange(&mut self, at: Moment, name: &str, why: &str) {
        if self.intent.as_ref().is_some_and(super::Intent::is_exchange) {
            self.drop_move(at, name, Side::Guest, why);
            self.drop_move(at, name, Side::Tier, why);
        }
    }

    /// Drops all changes of a VM.
    pub(super) fn drop_moves(&mut self, at: Moment, name: &str, why: &str) {
        self.end_relief(at, name, false, &format!("not done: {why}"));
        self.drop_move(at, name, Side::Guest, why);
        self.drop_move(at, name, Side::Tier, why);
    }

    /// Ends the plan if nothing is left to do of it. Returns whether it has ended.
    fn finish(&mut self) -> bool {
        let is_over = self.intent.as_ref().is_some_and(super::Intent::is_over);
        if is_over {
            self.intent = None;
        }
        is_over
    }
}
