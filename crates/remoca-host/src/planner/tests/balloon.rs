//! Guests with balloons, and what must hold whenever a command is sent.

use super::world::{UNIT, World};
use crate::guest::{GuestMemory, Pressure, Unusable};
use crate::planner::{GuestTerms, Outcome, Settings, Side, Stage, Step};
use std::collections::BTreeMap;
use std::time::Duration;

/// Units by which a balloon moves between two looks.
const SPEED: u64 = 3;

/// How a guest behaves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Manner {
    Honest,
    /// It has never touched its memory beyond so many units.
    Fresh(u64),
    /// Its balloon does not move.
    Stuck,
    /// It says that it follows, and keeps its memory.
    Lies,
    /// Its monitor passes nothing on.
    Refuses,
    /// It takes all of its memory back at this look, without a word.
    Grabs(u32),
    /// It grabs, and says that it has not.
    GrabsSilently(u32),
    /// Its monitor says nothing for so many looks from this one on.
    Silent(u32, u32),
    /// It says that it is short of memory for so many looks from this one on.
    Short(u32, u32),
    /// It does not run for so many looks from this one on.
    Paused(u32, u32),
    /// Its hypervisor is gone.
    Saved,
    /// It takes back a unit of what it has given, at each look at all VMs, without a word.
    Nibbles,
    /// Its balloon moves at looks at all VMs only, and only as much as a look in two asks for.
    Crawls,
}

#[derive(Clone, Debug)]
pub struct Guest {
    pub manner: Manner,
    pub boot: u64,
    /// What it had when the daemon came.
    pub home: u64,
    pub target: u64,
    pub actual: u64,
    pub resident: u64,
    /// Look from which on it tells nothing of its memory.
    pub mute_from: u32,
    /// Look from which on nothing may be taken from it, and whether it migrates then.
    pub held_from: u32,
    pub leaves: bool,
    /// Share of time in which its tasks wait for memory, as its VM process passes that on, in percent.
    pub waits: Option<f64>,
    moved_at: u32,
}

impl Guest {
    /// Returns a guest that has so many units.
    pub fn new(manner: Manner, units: u64) -> Self {
        let bytes = units * UNIT;
        let resident = if let Manner::Fresh(touched) = manner { touched * UNIT } else { bytes };
        Self {
            manner,
            boot: bytes,
            home: bytes,
            target: bytes,
            actual: bytes,
            resident: resident.min(bytes),
            mute_from: u32::MAX,
            held_from: u32::MAX,
            leaves: false,
            waits: None,
            moved_at: 0,
        }
    }

    /// Returns the memory of the host that it takes, or may take at once.
    fn holds(&self) -> u64 {
        self.resident.max(self.target.min(self.home))
    }

    pub fn told(&mut self, bytes: u64) -> Outcome {
        if self.manner == Manner::Refuses {
            return Outcome::Unknown("it refused".into());
        }
        self.target = bytes.min(self.boot);
        Outcome::Told
    }

    fn moves(&mut self, looks: u32) {
        let is_seen = std::mem::replace(&mut self.moved_at, looks) == looks;
        if self.is_paused(looks) || (self.manner == Manner::Crawls && is_seen) {
            return;
        }
        let (is_stuck, keeps) = (self.manner == Manner::Stuck, self.manner == Manner::Lies);
        match self.manner {
            Manner::Grabs(at) if looks >= at => {
                (self.actual, self.resident) = (self.boot, self.boot);
                return;
            }
            Manner::GrabsSilently(at) if looks >= at => self.resident = self.boot,
            Manner::Nibbles if !is_seen && self.actual <= self.target && self.actual < self.home => {
                (self.actual, self.resident) = (self.actual + UNIT, self.actual + UNIT);
                return;
            }
            _ => {}
        }
        if !is_stuck {
            let (down, up) = (self.actual.saturating_sub(SPEED * UNIT), self.actual + SPEED * UNIT);
            self.actual = self.target.clamp(down, up);
        }
        match self.manner {
            Manner::Fresh(_) => self.resident = self.resident.min(self.actual),
            Manner::GrabsSilently(at) if looks >= at => {}
            _ if !keeps => self.resident = self.actual,
            _ => {}
        }
    }

    fn is_paused(&self, looks: u32) -> bool {
        match self.manner {
            Manner::Paused(from, count) => (from..from + count).contains(&looks),
            manner => manner == Manner::Saved,
        }
    }

    /// Returns the memory of the host that its VM process sees in it.
    pub fn seen(&self) -> Option<u64> {
        (self.manner != Manner::Saved).then_some(self.resident)
    }

    fn says(&self, looks: u32) -> Result<GuestMemory, Unusable> {
        if let Manner::Silent(from, count) = self.manner
            && (from..from + count).contains(&looks)
        {
            return Err(Unusable::Silent("its monitor did not answer within 2 s".into()));
        }
        if self.is_paused(looks) {
            return Err(Unusable::Advised("its guest does not run now".into()));
        }
        let is_short = matches!(self.manner, Manner::Short(from, count) if (from..from + count).contains(&looks));
        Ok(GuestMemory {
            boot_bytes: self.boot,
            actual_bytes: self.actual,
            available_bytes: (looks < self.mute_from).then_some(self.actual / 2),
            held: (looks >= self.held_from).then(|| "its guest is migrating".into()),
            leaves: self.leaves && looks >= self.held_from,
            pressure: Pressure { swapped_in_per_s: is_short.then_some(60.), ..Pressure::default() },
            ..GuestMemory::default()
        })
    }
}

/// Returns settings with so many units in total, of which some are the reserve.
pub fn with_guests(total: u64, reserve: u64) -> Settings {
    let terms = GuestTerms { reserve_bytes: reserve * UNIT, rest: Duration::from_secs(3600) };
    Settings { total_bytes: total * UNIT, guests: Some(terms), ..super::world::settings() }
}

/// Returns a size that can be less than nothing.
pub fn signed(bytes: u64) -> i64 {
    bytes.try_into().unwrap()
}

impl World {
    pub fn add_guest(&mut self, name: &str, guest: Guest) {
        self.guests.insert(name.into(), guest);
    }

    pub fn guest(&mut self, name: &str) -> &mut Guest {
        self.guests.get_mut(name).unwrap()
    }

    pub fn move_guests(&mut self) {
        let looks = self.looks;
        self.guests.values_mut().for_each(|guest| guest.moves(looks));
    }

    pub fn hear_guests(&mut self, names: Option<&[String]>) {
        let is_asked = |name: &String| names.is_none_or(|names| names.contains(name));
        let asked = self.guests.iter().filter(|(name, _)| self.processes.contains_key(*name) && is_asked(name));
        let said: BTreeMap<_, _> = asked.map(|(name, guest)| (name.clone(), guest.says(self.looks))).collect();
        self.planner.hear_guests(self.at, said);
    }

    /// Returns what caches and guests take of the host's memory, beyond what the guests had at first.
    pub fn taken_of_host(&self) -> i64 {
        let guests = self.guests.iter().filter(|(name, _)| self.processes.contains_key(*name));
        let (holds, home) = guests.fold((0, 0), |(holds, home), (_, guest)| (holds + guest.holds(), home + guest.home));
        signed(self.held() * UNIT + holds) - signed(home)
    }

    /// Checks a command before it is sent.
    pub fn check_step(&self, step: &Step) {
        let Some(terms) = self.settings.guests else { return };
        let record = self.planner.record();
        let moves = record.intent.iter().flat_map(|intent| &intent.moves);
        let begun = moves.clone().filter(|change| change.vm == step.vm && change.stage == Stage::Begun).count();
        assert!(begun <= 1, "{} steps of {} at a time: {record:?}", begun, step.vm);
        let bytes = step.bytes;
        let told = record.reliefs.iter().chain(moves.clone());
        let mut told = told.filter(|change| change.vm == step.vm && change.side == step.side && !change.takes());
        if let Some(known) = self.planner.guests.get(&step.vm).and_then(|guest| guest.memory.as_ref())
            && step.side == Side::Guest
            && told.any(|change| change.stage == Stage::Begun)
        {
            assert!(bytes >= known.actual_bytes, "giving takes memory from a guest: {step:?} {known:?} {record:#?}");
        }
        let after = match (step.side, self.guests.get(&step.vm), self.processes.get(&step.vm)) {
            (Side::Guest, Some(guest), _) => {
                let least = guest.home / 2;
                assert!(bytes >= guest.target.min(least), "a guest is asked to have less than its minimum: {step:?}");
                assert!(bytes <= guest.boot, "a guest is asked to have more than it can: {step:?}");
                self.taken_of_host() + signed(bytes.saturating_sub(guest.holds()))
            }
            (Side::Tier, _, Some(process)) => {
                self.taken_of_host() + signed(bytes.saturating_sub(process.holds() * UNIT))
            }
            _ => return,
        };
        // What a balloon is told once more counts as its guest's own since it was told first, and caches shrink for it.
        let is_had = record.reliefs.iter().any(|told| {
            told.vm == step.vm && told.stage == Stage::Begun && (told.from_bytes, told.to_bytes) == (bytes, bytes)
        });
        if after <= self.taken_of_host() || is_had {
            return;
        }
        // A guest may get its own back from the reserve, or from its own cache while others have too much.
        let is_own = step.side == Side::Guest;
        let total =
            signed(if is_own { self.settings.total_bytes } else { self.settings.total_bytes - terms.reserve_bytes });
        let from_cache = moves.filter(|change| change.vm == step.vm && change.side == Side::Tier && change.takes());
        let from_cache: u64 = from_cache.map(|change| change.from_bytes - change.to_bytes).sum();
        let is_own = is_own && after - self.taken_of_host() <= signed(from_cache);
        assert!(after <= total || is_own, "{step:?} would take {after} of {total}: {:#?}", self.steps);
    }
}
