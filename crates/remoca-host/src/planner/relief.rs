//! Help for guests that are short of memory: some of what was taken from them, at once from the reserve, then from their own caches.
//!
//! 1. A guest gets at most what was taken from it, so one that lies gains nothing but its own.
//! 2. It gets at most half of the reserve until that is full again, and something once in a window only. Those that wait for it longest come
//!    first. One that gets less because others have left no more keeps its place.
//! 3. A guest whose balloon may be at work on less than counts as its own is told again: that is in no reserve.
//! 4. A promise whose command was not sent is taken back: when its guest is told next, another one may have taken back its own.
//! 5. A guest that has less than its minimum, because the operator has raised that, gets what it lacks once in a window, as far as half of
//!    the reserve stays for those that are short of memory.
//! 6. The reserve fills again because the total is less by what the guest got: the next plan takes it from caches.
//! 7. A guest that is still short half a window after it was helped, or that gets nothing from the reserve, gets all that its own cache has
//!    of it: first the cache gives, then the balloon is told. That takes nothing from others, and waits for no window.
//! 8. From a guest that migrates nothing more is taken. It gets what its own cache has of it as with 7, but at once, whether it was helped
//!    before or not; only guests that are short come first. What is missing then comes as with 5, whether its VM process answers or not.
//! 9. A VM that never answered keeps no guest from help: no plan gives the reserve away, so it has none of it. As nobody knows what it has,
//!    all guests together get no more than the reserve until it answers.

use super::guests::LEFT_WINDOWS;
use super::moves::{Intent, Move, Side, Stage};
use super::round::exchange;
use super::{FOLLOW_TIME, KnownGuest, KnownVm, Moment, Planner, Step};
use std::time::Duration;

/// Unit of what a guest gets: its balloon moves by pages, so units of tiers do not matter.
const HELP_UNIT: u64 = 1 << 20;

impl Planner {
    /// Returns the names of the guests from which memory was taken, or may be.
    pub(super) fn taken_from(&self) -> Vec<String> {
        let is_less = |guest: &KnownGuest| guest.taken() > 0 || guest.is_untold();
        let taken = self.guests.iter().filter(|(name, guest)| is_less(guest) && self.vms.contains_key(*name));
        if self.settings.guests.is_some() { taken.map(|(name, _)| name.clone()).collect() } else { Vec::new() }
    }

    /// Returns the names of the guests from which memory was taken, in the order in which they get some of the reserve: first those that have
    /// waited for it longest. By their names, the same ones would come first each time that the reserve is full again.
    fn in_turn(&self) -> Vec<String> {
        let mut names = self.taken_from();
        names.sort_by_key(|name| self.guests.get(name).and_then(|guest| guest.relieved_at));
        names
    }

    /// Decides what guests get that are short of memory.
    pub(super) fn relieve(&mut self, at: Moment) {
        let Some(terms) = self.settings.guests.filter(|_| self.settings.applies) else { return };
        self.give_up_reliefs(at);
        if self.counted(at.now) <= self.memory(at.now).total_bytes {
            self.guests.values_mut().for_each(|guest| guest.relieved_bytes = 0);
        }
        for name in self.in_turn() {
            if self.reliefs.iter().any(|relief| relief.vm == name) {
                continue;
            }
            let is_owed = self.is_owed(at.now, &name);
            let moves = self.intent.iter().flat_map(|intent| &intent.moves);
            let takes = moves.filter(|change| change.vm == name && change.side == Side::Guest && change.takes());
            let (lends, is_taken_from) = (takes.clone().next().is_some(), takes.clone().any(Move::is_open));
            let Some(guest) = self.guests.get(&name) else { continue };
            let Some(why) = guest.pressure() else {
                let is_free = guest.bond(at.now).is_none();
                if is_free && is_taken_from && guest.leaves() {
                    // It would go with a balloon that is still at work.
                    self.drop_exchange(at, &name, "its guest is migrating");
                    self.promise(at, &name, "its guest is migrating, and was to lend".into(), 0);
                } else if is_free && is_owed {
                    self.promise(at, &name, "its balloon may have missed its last size, and is told again".into(), 0);
                }
                continue;
            };
            let most = self.claim(at.now, &name, terms.reserve_bytes);
            let is_leftover = most < self.due(&name, terms.reserve_bytes);
            if is_taken_from || most > 0 || is_owed {
                // What is on its way back to it goes on.
                if lends {
                    self.drop_exchange(at, &name, "its guest is short of memory");
                }
                self.guests.get_mut(&name).into_iter().for_each(|guest| guest.is_leftover = is_leftover);
                self.promise(at, &name, format!("it is short of memory: {why}"), most);
            }
        }
        self.return_own(at);
        self.keep_guest_minimums(at, terms.reserve_bytes);
    }

    /// Begins to give guests that are still short of memory, and those that migrate, what their own caches have of theirs. One that was
    /// short for a moment goes on lending.
    pub(super) fn return_own(&mut self, at: Moment) {
        if self.intent.is_some() || self.back.is_some() {
            return;
        }
        let mut moves = Vec::new();
        let names = self.taken_from();
        // A step ends when all of its caches have given or were given up, so one that hangs would delay those that become short next.
        let is_any_short = names.iter().any(|name| self.gets_own_as_short(at.now, name));
        for name in names {
            let (Some(guest), Some((has, kept))) = (self.guests.get(&name), self.own_back(at.now, &name)) else {
                continue;
            };
            let why = match guest.pressure() {
                Some(why) => format!("it is short of memory, and gets back what its cache has of it: {why}"),
                None if !is_any_short && guest.leaves() && guest.bond(at.now).is_none() => {
                    "its guest is migrating, and gets back what its cache has of it".into()
                }
                None => continue,
            };
            let Some(memory) = &guest.memory else { continue };
            if kept == has || guest.waits_for_own(at.now, self.settings.window) {
                continue;
            }
            self.log.note(at.unix_s, format!("{name}: {why}"));
            moves.push(exchange(&name, Side::Tier, has, kept, &why));
            moves.push(exchange(&name, Side::Guest, memory.actual_bytes, guest.has() + (has - kept), &why));
            // Nor is this tried at each look.
            let spared = LEFT_WINDOWS * self.settings.window;
            if let Some(guest) = self.guests.get_mut(&name) {
                guest.note_relief(at, spared, false);
                guest.note_return(at.now);
            }
        }
        if !moves.is_empty() {
            self.stepped_at = at.now;
            self.intent = Some(Intent { at_s: at.unix_s, moves });
        }
    }

    /// Returns whether a guest is short of memory, and its own cache has some of it, though it may keep that for now.
    fn gets_own_as_short(&self, now: Duration, name: &str) -> bool {
        let is_short = self.guests.get(name).is_some_and(|guest| guest.pressure().is_some());
        is_short && self.own_back(now, name).is_some_and(|(has, kept)| kept < has)
    }

    /// Gives guests what they lack to their minimums, and those that migrate what they lack of their own. Half of the reserve stays for those
    /// that are short of memory.
    fn keep_guest_minimums(&mut self, at: Moment, reserve_bytes: u64) {
        for name in self.in_turn() {
            let moves = self.intent.iter().flat_map(|intent| &intent.moves).chain(&self.reliefs);
            let is_moving = moves.clone().any(|change| change.vm == name && change.is_open());
            let Some(guest) = self.guests.get(&name).filter(|_| !is_moving) else { continue };
            let waits = guest.waits_for_reserve(at.now, self.settings.window);
            if waits || guest.pressure().is_some() || guest.bond(at.now).is_some() {
                continue;
            }
            let spare = self.reserve_left(at.now, self.counted(at.now)).saturating_sub(reserve_bytes / 2);
            let short = self.lacking(&name).min(spare);
            let why = match guest.leaves() {
                true => "its guest is migrating, and has less than its own",
                false => "it has less than its minimum (guest-minimum)",
            };
            if short > 0 {
                self.guests.get_mut(&name).into_iter().for_each(|guest| guest.is_leftover = false);
                self.promise(at, &name, why.into(), short);
                self.guests.get_mut(&name).into_iter().for_each(KnownGuest::note_for_minimum);
            }
        }
    }

    /// Returns whether the balloon of a guest has to be told once more what it leaves to it, with no step that does so under way.
    fn is_owed(&self, now: Duration, name: &str) -> bool {
        let moves = self.intent.iter().flat_map(|intent| &intent.moves);
        let is_open = moves.clone().any(|change| change.vm == name && change.side == Side::Guest && change.is_open());
        let is_due = |guest: &KnownGuest| guest.is_untold() && !guest.was_told(now, self.settings.window);
        !is_open && self.guests.get(name).is_some_and(is_due)
    }

    /// Returns how much less than its minimum a guest was asked to have, or than its own if it migrates. Nothing while nobody knows the
    /// minimum. One that migrates cannot wait until its VM process answers.
    fn lacking(&self, name: &str) -> u64 {
        let Some(guest) = self.guests.get(name) else { return 0 };
        let own = guest.sizes.filter(|_| guest.leaves()).map(|sizes| sizes.base_bytes);
        let limits = self.vms.get(name).filter(|vm| vm.silent.is_none()).and_then(|vm| vm.limits);
        let least = own.or_else(|| limits.map(|limits| guest.minimum(&limits)));
        least.unwrap_or_default().saturating_sub(guest.has()).min(guest.taken())
    }

    /// Returns how much a guest that is short of memory gets from the reserve now at most.
    fn claim(&self, now: Duration, name: &str, reserve_bytes: u64) -> u64 {
        let Some(guest) = self.guests.get(name) else { return 0 };
        if guest.was_relieved(now, self.settings.window) {
            return 0;
        }
        let left = self.help_left(now, reserve_bytes);
        // It keeps its place if that is less than it is due, but gets so little once in a window as well.
        if left < self.due(name, reserve_bytes) && guest.was_told(now, self.settings.window) {
            return 0;
        }
        let most = (reserve_bytes / 2).saturating_sub(guest.relieved_bytes).min(left);
        most - most % HELP_UNIT
    }

    /// Returns how much a guest that is short of memory gets when it is its turn: half of the reserve, or what it lacks.
    fn due(&self, name: &str, reserve_bytes: u64) -> u64 {
        let Some(guest) = self.guests.get(name) else { return 0 };
        let most = (reserve_bytes / 2).saturating_sub(guest.relieved_bytes).min(guest.taken());
        most - most % HELP_UNIT
    }

    /// Returns what is left for guests that are short of memory.
    fn help_left(&self, now: Duration, reserve_bytes: u64) -> u64 {
        let helped = self.guests.values().fold(0, |sum: u64, guest| sum.saturating_add(guest.relieved_bytes));
        let known = self.reserve_left(now, self.counted_by(now, KnownVm::is_known));
        self.reserve_left(now, self.counted(now)).max(known.min(reserve_bytes.saturating_sub(helped)))
    }

    /// Returns what is left of the reserve and of the rest of the total, of which so much is `counted`. What the guest of a VM lent that is
    /// gone may be its own again.
    fn reserve_left(&self, now: Duration, counted: u64) -> u64 {
        let lent = self.lent_by(|name| self.is_there(now, name) && !self.vms[name].is_dead());
        let all = self.settings.total_bytes.saturating_add(lent);
        all.saturating_sub(counted).saturating_sub(self.on_its_way(now))
    }

    /// Returns what caches gave back to their guests that the balloons have not been told of yet: others get nothing of it.
    pub(super) fn on_its_way(&self, now: Duration) -> u64 {
        let (memory, moves) = (self.memory(now), self.intent.iter().flat_map(|intent| &intent.moves));
        let is_planned =
            |change: &Move| change.side == Side::Guest && change.stage == Stage::Planned && !change.takes();
        let goes_back = |vm: &str| moves.clone().any(|change| change.vm == vm && is_planned(change));
        let left = |change: &Move| {
            let has = self.vms.get(&change.vm).map_or(change.from_bytes, |vm| vm.counted(memory));
            change.from_bytes.saturating_sub(has.max(change.to_bytes))
        };
        let takes = moves.clone().filter(|change| change.side == Side::Tier && change.stage != Stage::Dropped);
        takes.filter(|change| change.takes() && goes_back(&change.vm)).map(left).fold(0, u64::saturating_add)
    }

    /// Gives a guest at most `most` of what was taken from it, and nothing less than it has.
    fn promise(&mut self, at: Moment, name: &str, why: String, most: u64) {
        let spared = LEFT_WINDOWS * self.settings.window;
        let Some(guest) = self.guests.get_mut(name) else { return };
        let Some(sizes) = guest.sizes else { return };
        let bytes = most.min(sizes.taken());
        let to_bytes = sizes.asked_bytes.saturating_add(bytes).max(guest.has());
        // It counts as given from now on.
        guest.ask(to_bytes);
        guest.promised_bytes = bytes;
        guest.note_relief(at, spared, bytes > 0 && !guest.is_leftover);
        guest.is_for_minimum = false;
        guest.relieved_bytes = guest.relieved_bytes.saturating_add(bytes);
        self.reliefs.push(Move {
            vm: name.into(),
            side: Side::Guest,
            from_bytes: to_bytes - bytes,
            to_bytes,
            why,
            ..Move::default()
        });
    }

    /// Returns the next command that helps a guest, as [`Planner::next_step`] does before all others.
    pub fn next_relief(&mut self, at: Moment) -> Option<Step> {
        let relief = self.reliefs.iter_mut().find(|relief| relief.stage == Stage::Planned)?;
        relief.stage = Stage::Begun;
        let is_help = relief.to_bytes > relief.from_bytes;
        // It may have got more since a former daemon promised that.
        relief.to_bytes = relief.to_bytes.max(self.guests.get(&relief.vm).map_or(0, KnownGuest::has));
        let step = Step { vm: relief.vm.clone(), side: Side::Guest, bytes: relief.to_bytes };
        self.awaited_at = at.now;
        let spared = LEFT_WINDOWS * self.settings.window;
        if let Some(guest) = self.guests.get_mut(&step.vm) {
            guest.note_relief(at, spared, is_help && !guest.is_leftover);
            guest.ask(step.bytes);
        }
        Some(step)
    }

    /// Ends the help for a guest. Unless that is seen in it, its balloon is told again later.
    pub(super) fn end_relief(&mut self, at: Moment, name: &str, is_seen: bool, outcome: &str) {
        let ended = self.reliefs.extract_if(.., |relief| relief.vm == name).last();
        if let Some(relief) = ended {
            self.log.tell(at.unix_s, &relief, outcome);
            self.note_untold(name, !is_seen);
        }
    }

    /// Notes whether the balloon of a guest may still be at work on less than it is asked to leave.
    pub(super) fn note_untold(&mut self, name: &str, is_untold: bool) {
        match (self.guests.get_mut(name), self.guests_recorded.get_mut(name)) {
            (Some(guest), _) => guest.note_untold(is_untold),
            (None, Some(sizes)) => sizes.is_untold = is_untold,
            (None, None) => {}
        }
    }

    /// Looks whether a guest has what it got.
    pub(super) fn follow_relief(&mut self, at: Moment, name: &str) {
        let Some(relief) = self.reliefs.iter().find(|relief| relief.vm == name && relief.stage == Stage::Begun) else {
            return;
        };
        // What it had before its monitor fell silent is no sign that it was told.
        let is_seen = |guest: &KnownGuest| guest.unusable.is_none() && guest.follows(false, relief.to_bytes, 0);
        if self.guests.get(name).is_some_and(is_seen) {
            self.end_relief(at, name, true, "seen in the guest");
            self.note_guest_change(at, name);
        }
    }

    fn give_up_reliefs(&mut self, at: Moment) {
        let is_late = |name: &str| {
            let began = self.guests.get(name).and_then(|guest| guest.told_at);
            began.is_none_or(|began| at.now.saturating_sub(began) >= FOLLOW_TIME)
        };
        let late = self.reliefs.iter().filter(|relief| relief.stage == Stage::Begun && is_late(&relief.vm));
        let late: Vec<String> = late.map(|relief| relief.vm.clone()).collect();
        for name in late {
            self.stop_asking(at, &name, format!("its balloon did not follow within {} s", FOLLOW_TIME.as_secs()));
            self.end_relief(at, &name, false, "its balloon did not follow; what it was to get is given to nobody");
        }
    }

    /// Asks nothing of the balloon of a guest for some windows.
    pub(super) fn stop_asking(&mut self, at: Moment, name: &str, why: String) {
        let time = LEFT_WINDOWS * self.settings.window;
        if let Some(guest) = self.guests.get_mut(name) {
            guest.stop_asking(at, time, why);
        }
    }
}
