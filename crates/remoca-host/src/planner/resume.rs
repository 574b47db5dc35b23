//! Which changes go on: those of a former daemon, and those whose limits have changed since they were planned.

use super::Planner;
use super::interface::Moment;
use super::moves::{Intent, Move, Side, Stage};

/// Longest time after which the intent of a former daemon is still carried out; an older one is undone.
const INTENT_YOUNG_S: u64 = 600;

impl Planner {
    /// Decides about the intent of a former daemon.
    pub(super) fn resume(&mut self, at: Moment, intent: Intent) {
        let age_s = at.unix_s.saturating_sub(intent.at_s);
        let is_young = age_s <= INTENT_YOUNG_S;
        let wanted = |name: &str, side: Side| match side {
            Side::Tier => {
                let vm = self.vms.get(name).filter(|vm| vm.silent.is_none())?;
                Some(vm.reading.as_ref()?.wanted)
            }
            Side::Guest => {
                let guest = self.guests.get(name).filter(|guest| guest.unusable.is_none())?;
                Some(guest.memory.as_ref()?.actual_bytes)
            }
        };
        let given = intent.moves.iter().filter(|change| change.side == Side::Guest && change.stage == Stage::Begun);
        let given: Vec<String> = given.filter(|change| !change.takes()).map(|change| change.vm.clone()).collect();
        let was_told = |change: &&Move| change.side == Side::Tier && change.stage == Stage::Begun;
        let told: Vec<String> = intent.moves.iter().filter(was_told).map(|change| change.vm.clone()).collect();
        let told_s = intent.at_s;
        let mut resumed = intent.resumed(is_young, wanted);
        // What was told when the daemon died is not among the changes on record.
        for name in told {
            if let Some(vm) = self.vms.get_mut(&name) {
                vm.note_former_change(at, self.settings.window, told_s.max(vm.changed_s));
            }
        }
        // What a balloon was to be told when the daemon died counts as told. A daemon that looks at no guests does not tell it.
        for name in given {
            if resumed.of(&name, Side::Guest).is_none() || !self.guests.contains_key(&name) {
                self.note_untold(&name, true);
            }
        }
        let what = match (resumed.is_over(), is_young) {
            (true, _) => "nothing of it is left to do",
            (false, true) => "it is carried out",
            (false, false) => "what was done of it is undone",
        };
        self.log.note(at.unix_s, format!("a former daemon ended in the last {age_s} s with a plan under way: {what}"));
        self.stepped_at = at.now;
        self.intent = Some(resumed).filter(|intent| !intent.is_over());
    }

    /// Drops what is left of a plan that leaves some VM less than its minimum, which the operator may have raised meanwhile: memory is planned
    /// anew. If memory goes between guests and their caches, only what concerns that VM is dropped.
    pub(super) fn keep_minimums(&mut self, at: Moment) {
        let Some(intent) = &self.intent else { return };
        let unit = self.memory(at.now).unit_bytes;
        let takes_too_much = |change: &&Move| {
            // A plan may round what a VM has down to whole units.
            let is_taken = change.stage != Stage::Dropped && change.from_bytes >= change.to_bytes.saturating_add(unit);
            let is_known = self.vms.contains_key(&change.vm);
            is_taken && is_known && self.least(change).is_none_or(|least| change.to_bytes < least)
        };
        let below: Vec<String> = intent.moves.iter().filter(takes_too_much).map(|change| change.vm.clone()).collect();
        let Some(first) = below.first() else { return };
        let is_exchange = intent.is_exchange();
        let is_dropped = |change: &&Move| change.is_open() && (!is_exchange || below.contains(&change.vm));
        let dropped: Vec<(String, Side)> =
            intent.moves.iter().filter(is_dropped).map(|change| (change.vm.clone(), change.side)).collect();
        for (name, side) in dropped {
            let cause = if is_exchange { &name } else { first };
            let why = format!("it would leave {cause} less than its minimum, or nobody can read that");
            self.drop_move(at, &name, side, &why);
            if side == Side::Guest {
                // A former daemon may have told its balloon already.
                self.note_untold(&name, true);
            }
        }
        // What it is owed does not wait for the end of its window: others would get that meanwhile.
        for name in &below {
            if let Some(vm) = self.vms.get_mut(name) {
                vm.end_window();
            }
        }
        self.intent.take_if(|intent| intent.is_over());
    }

    /// Returns the minimum of what a change is about; `None` if nobody knows it.
    fn least(&self, change: &Move) -> Option<u64> {
        let limits = self.vms.get(&change.vm)?.limits?;
        match change.side {
            Side::Tier => Some(limits.minimum_bytes),
            Side::Guest => Some(self.guests.get(&change.vm)?.minimum(&limits)),
        }
    }
}
