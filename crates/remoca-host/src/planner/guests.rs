//! What is known of the memory of guests: how much of it was taken, and how much of that the host has seen.
//!
//! Sizes of a guest, in bytes: `home` is what it had when it was first seen, `asked` what its balloon was last asked to leave it, and `base`
//! what it would have now if nothing had been taken: less than `home` if somebody else has shrunk it too.
//! 1. *Lent* is `base` less the largest of what was asked for, what the balloon says, and what the host has in memory for the guest. So
//!    nothing counts that a guest only says, that nobody asked for, or that was given back already.
//! 2. No guest is asked to have less than its minimum.

use super::interface::{GuestRecord, Moment};
use crate::guest::{AGENT_SILENT_AFTER, GuestMemory, Unusable};
use crate::limits::Limits;
use crate::text::{not_asked_for, time_left};
use std::time::Duration;

/// Most that is taken from a guest at a time, beside a share of its memory.
const STEP_MAX: u64 = 64 << 20;
const STEP_SHARE: u64 = 16;
/// Piece by which balloons move.
const PAGE_BYTES: u64 = 4096;
/// Share of a guest's memory that must be available to it.
const AVAILABLE_SHARE: u64 = 16;
/// Signs of a guest that is short of memory: share of time in which tasks wait for it, in percent; pages in each second.
const WAITING_MAX: f64 = 10.;
const MAJOR_FAULTS_MAX: f64 = 200.;
const SWAPPED_IN_MAX: f64 = 50.;
/// Windows for which a guest that was short of memory, or whose balloon did not follow, lends nothing.
pub(super) const LEFT_WINDOWS: u32 = 10;
/// Number of answers of its monitor within which a guest is to tell of its memory for the first time.
const ANSWERS_UNTIL_TOLD: u32 = 3;
/// How long what a VM process saw last counts, if it sees nothing any longer: it may be a new program, to which the guest comes back.
const UNSEEN_FOR: Duration = Duration::from_secs(60);
/// Windows, and blocks read, after which a curve is that of the guest's new size.
pub(super) const SETTLED_WINDOWS: u32 = 2;
const SETTLED_READS: u64 = 1024;

/// Memory of one guest.
#[derive(Clone, Debug)]
pub(super) struct KnownGuest {
    /// `None` until its monitor has answered for the first time.
    pub(super) sizes: Option<GuestRecord>,
    /// Newest answer of its monitor to this daemon.
    pub(super) memory: Option<GuestMemory>,
    /// Number of answers of its monitor.
    answers: u32,
    /// Memory that it takes of the host, as its VM process said last.
    pub(super) resident: Option<u64>,
    /// Share of time in which its tasks wait for memory, as its agent says, and when its VM process passed that on.
    waits: Option<(f64, Duration)>,
    /// Since when its VM process does not see that any longer.
    unseen_since: Option<Duration>,
    /// Size that it was asked to have when it was seen to have that.
    followed_bytes: Option<u64>,
    /// What it had at the latest answer of its monitor if somebody else left it less, and the number of that answer.
    less: Option<(u64, u32)>,
    /// Why its memory cannot be moved now.
    pub(super) unusable: Option<Unusable>,
    /// Its balloon did not do what it was asked to, and is not asked again until then.
    pub(super) left: Option<(Duration, String)>,
    /// When its size changed last, and the blocks it had read until then.
    changed: Option<(Duration, u64)>,
    /// It was short of memory, and lends nothing until then.
    spared_until: Option<Duration>,
    /// When its balloon was told last what it is to leave to it at least, with memory from the reserve or without.
    pub(super) told_at: Option<Duration>,
    /// When its own cache was last to give back what it has of it.
    returned_at: Option<Duration>,
    /// When it got memory from the reserve last, and how much since the reserve was full.
    pub(super) relieved_at: Option<Duration>,
    pub(super) relieved_bytes: u64,
    /// Whether what it was promised last was less than it was due, because others had left no more.
    pub(super) is_leftover: bool,
    /// What this daemon promised it last, and whether that was for its minimum.
    pub(super) promised_bytes: u64,
    pub(super) is_for_minimum: bool,
}

impl KnownGuest {
    /// Returns a guest that was not heard of yet by this daemon. A balloon that a former one had stopped asking
    /// is not asked again for ten windows at most.
    pub(super) fn new(at: Moment, window: Duration, recorded: Option<GuestRecord>) -> Self {
        let until = |until_s: u64| {
            let left = Duration::from_secs(until_s.saturating_sub(at.unix_s)).min(LEFT_WINDOWS * window);
            (!left.is_zero()).then_some(at.now + left)
        };
        let left = recorded.and_then(|sizes| until(sizes.left_until_s));
        let why = || "its balloon did not do what a former daemon asked of it".to_owned();
        Self {
            sizes: recorded,
            memory: None,
            answers: 0,
            resident: None,
            waits: None,
            unseen_since: None,
            followed_bytes: None,
            less: None,
            unusable: Some(Unusable::Silent("its monitor has not answered yet".into())),
            left: left.map(|until| (until, why())),
            changed: None,
            spared_until: recorded.and_then(|sizes| until(sizes.spared_until_s)),
            told_at: None,
            returned_at: None,
            relieved_at: None,
            relieved_bytes: 0,
            is_leftover: false,
            promised_bytes: 0,
            is_for_minimum: false,
        }
    }

    /// Takes the answer of its monitor.
    pub(super) fn hear(&mut self, answer: Result<GuestMemory, Unusable>) {
        let memory = match answer {
            Ok(memory) => memory,
            Err(why) => {
                self.unusable = Some(why);
                return;
            }
        };
        let actual = memory.actual_bytes;
        let first =
            GuestRecord { home_bytes: actual, base_bytes: actual, asked_bytes: actual, ..GuestRecord::default() };
        let sizes = self.sizes.get_or_insert(first);
        sizes.home_bytes = sizes.home_bytes.min(memory.boot_bytes);
        sizes.base_bytes = sizes.base_bytes.min(sizes.home_bytes);
        // It may have been booted with less. Its balloon would be told for ever what it cannot follow.
        sizes.asked_bytes = sizes.asked_bytes.min(memory.boot_bytes);
        self.unusable = None;
        self.answers = self.answers.saturating_add(u32::from(!memory.is_repeated));
        self.memory = Some(memory);
    }

    /// Takes what its VM process says of the memory that it takes of the host.
    pub(super) fn hear_resident(&mut self, now: Duration, resident: Option<u64>) {
        if resident.is_some() {
            (self.resident, self.unseen_since) = (resident, None);
        } else if now.saturating_sub(*self.unseen_since.get_or_insert(now)) >= UNSEEN_FOR {
            self.resident = None;
        }
        let (Some(sizes), Some(memory), Some(resident)) = (&mut self.sizes, &self.memory, resident) else { return };
        // Only what the host sees makes it larger: a guest can say anything.
        sizes.home_bytes = sizes.home_bytes.max(resident.min(memory.boot_bytes));
    }

    /// Returns whether its VM process does not see now how much memory of the host it takes.
    pub(super) fn is_unseen(&self) -> bool {
        self.unseen_since.is_some()
    }

    /// Notes whether somebody else has taken memory from it since it followed, while nothing of it `is_moving`. What they took is no longer
    /// its own then, or it would get that back with what it lent. The host must see that, with two answers of the monitor: a size may be
    /// read while it changes.
    pub(super) fn note_shrunk(&mut self, is_moving: bool, slack: u64) {
        let (Some(sizes), Some(memory)) = (self.sizes, &self.memory) else { return };
        let actual = memory.actual_bytes;
        if actual >= sizes.asked_bytes {
            (self.followed_bytes, self.less) = (Some(sizes.asked_bytes), None);
            return;
        }
        let has_followed = self.followed_bytes == Some(sizes.asked_bytes) && !sizes.is_untold && !is_moving;
        let is_seen = self.resident.is_some_and(|resident| resident <= actual.saturating_add(slack));
        let is_shrunk = has_followed && is_seen && self.unusable.is_none() && sizes.taken() > 0;
        let before = std::mem::replace(&mut self.less, is_shrunk.then_some((actual, self.answers)));
        if is_shrunk && before.is_some_and(|(bytes, answer)| bytes == actual && answer != self.answers) {
            self.rebase();
        }
    }

    /// Takes what its VM process says of the time in which its tasks wait for memory.
    pub(super) fn hear_waits(&mut self, now: Duration, waits: Option<f64>) {
        self.waits = waits.map(|share| (share, now));
    }

    /// Notes that its VM process says nothing now: what it passed on last is too old after a while.
    pub(super) fn note_silence(&mut self, now: Duration) {
        self.waits = self.waits.filter(|(_, then)| now.saturating_sub(*then) < AGENT_SILENT_AFTER);
    }

    /// Returns what was taken from it.
    pub(super) fn taken(&self) -> u64 {
        self.sizes.map_or(0, |sizes| sizes.taken())
    }

    /// Returns what was taken from it and the host has seen.
    pub(super) fn lent(&self) -> u64 {
        let (Some(sizes), Some(memory), Some(resident)) = (self.sizes, &self.memory, self.resident) else { return 0 };
        sizes.base_bytes.saturating_sub(sizes.asked_bytes.max(memory.actual_bytes).max(resident))
    }

    /// Returns why its memory is not moved now, or `None` if it may be.
    pub(super) fn bond(&self, now: Duration) -> Option<String> {
        match &self.unusable {
            Some(Unusable::Advised(why) | Unusable::Silent(why)) => return Some(why.clone()),
            None => {}
        }
        if self.resident.is_none() {
            return Some(
                "its VM process does not see how much memory of the host the guest takes, so nobody would know that it gave some"
                    .into(),
            );
        }
        let (until, why) = self.left.as_ref().filter(|_| self.is_not_asked(now))?;
        Some(format!("{why}; {}", not_asked_for(until.saturating_sub(now))))
    }

    /// Returns why nothing is taken from it now, though it can get back what was; `None` if something may be.
    pub(super) fn held(&self) -> Option<String> {
        let memory = self.memory.as_ref()?;
        let tells_nothing = || "its balloon driver does not tell how much memory is available in it, so nobody would see that it is short of memory";
        memory.held.clone().or_else(|| memory.available_bytes.is_none().then(|| tells_nothing().into()))
    }

    /// Returns whether it is on its way to another host. That one does not know what it lent here.
    pub(super) fn leaves(&self) -> bool {
        self.unusable.is_none() && self.memory.as_ref().is_some_and(|memory| memory.leaves)
    }

    /// Returns whether it may still tell of its memory for the first time: its monitor may have just asked it to.
    pub(super) fn may_tell_soon(&self) -> bool {
        let is_mute = |memory: &GuestMemory| memory.held.is_none() && memory.available_bytes.is_none();
        self.unusable.is_none() && self.answers < ANSWERS_UNTIL_TOLD && self.memory.as_ref().is_some_and(is_mute)
    }

    /// Returns why a step that was to take it down from `from_bytes` is not made any longer; `None` if it may be.
    pub(super) fn objection(&self, at: Moment, from_bytes: u64) -> Option<String> {
        if let Some(why) = self.held() {
            return Some(why);
        }
        if self.is_spared(at.now) {
            return Some(self.spared_for(at.now).map_or_else(
                || "its balloon may still be working towards an earlier size".into(),
                |left| format!("it was told to take memory back, and lends nothing for {}", time_left(left)),
            ));
        }
        (self.has() > from_bytes).then(|| "it got more memory since that was planned".into())
    }

    /// Returns for how long it lends nothing because it was to get memory back; `None` if that does not keep it from lending.
    pub(super) fn spared_for(&self, now: Duration) -> Option<Duration> {
        self.spared_until?.checked_sub(now).filter(|left| !left.is_zero())
    }

    /// Returns whether it lends nothing now, because it was short of memory or may not have what is its own.
    fn is_spared(&self, now: Duration) -> bool {
        self.spared_until.is_some_and(|until| now < until) || self.is_untold()
    }

    /// Asks it nothing for `time`, because of `why`.
    pub(super) fn stop_asking(&mut self, at: Moment, time: Duration, why: String) {
        self.left = Some((at.now + time, why));
        if let Some(sizes) = &mut self.sizes {
            sizes.left_until_s = at.unix_s.saturating_add(time.as_secs());
        }
    }

    /// Notes that its balloon is told now what it is to leave to it, and whether it gets something from the reserve by that. It lends
    /// nothing for `time`.
    pub(super) fn note_relief(&mut self, at: Moment, time: Duration, is_helped: bool) {
        (self.told_at, self.spared_until) = (Some(at.now), Some(at.now + time));
        if is_helped {
            self.relieved_at = Some(at.now);
        }
        if let Some(sizes) = &mut self.sizes {
            sizes.spared_until_s = at.unix_s.saturating_add(time.as_secs());
        }
    }

    /// Returns whether it was helped within the last `window` because it was short of memory.
    pub(super) fn was_relieved(&self, now: Duration, window: Duration) -> bool {
        !self.is_for_minimum && self.relieved_at.is_some_and(|then| now.saturating_sub(then) < window)
    }

    /// Notes that its own cache is now to give back what it has of it.
    pub(super) fn note_return(&mut self, now: Duration) {
        self.returned_at = Some(now);
    }

    /// Returns whether its own cache keeps what it has of it for now: one that was told within half a window may have enough. One that leaves
    /// does not wait for that.
    pub(super) fn waits_for_own(&self, now: Duration, window: Duration) -> bool {
        let began = if self.leaves() { self.returned_at } else { self.told_at };
        began.is_some_and(|then| now.saturating_sub(then) < window / 2)
    }

    /// Returns whether it gets nothing for its minimum, or as one that leaves, until `window` is over. What came from its own cache is beside
    /// that if it leaves.
    pub(super) fn waits_for_reserve(&self, now: Duration, window: Duration) -> bool {
        let began = if self.leaves() { self.relieved_at } else { self.told_at };
        began.is_some_and(|then| now.saturating_sub(then) < window)
    }

    /// Returns whether its balloon was told within the last `window`.
    pub(super) fn was_told(&self, now: Duration, window: Duration) -> bool {
        self.told_at.is_some_and(|then| now.saturating_sub(then) < window)
    }

    /// Returns whether its balloon may still be at work on less than it is asked to leave.
    pub(super) fn is_untold(&self) -> bool {
        self.sizes.is_some_and(|sizes| sizes.is_untold)
    }

    /// Notes whether its balloon may still be at work on less than it is asked to leave.
    pub(super) fn note_untold(&mut self, is_untold: bool) {
        if let Some(sizes) = &mut self.sizes {
            sizes.is_untold = is_untold;
        }
    }

    /// Returns what it has or will have: the balloon may be behind, the guest may have taken some back by itself, and somebody else may have
    /// given it more than it had at first.
    pub(super) fn has(&self) -> u64 {
        self.sizes.unwrap_or_default().asked_bytes.max(self.actual())
    }

    /// Returns the size that its balloon leaves to it, and the one that it had without what was taken; `None` if nothing is missing.
    pub(super) fn missing(&self) -> Option<(u64, u64)> {
        let (sizes, memory) = (self.sizes?, self.memory.as_ref()?);
        let has = sizes.asked_bytes.min(memory.actual_bytes);
        ((sizes.taken() > 0 || sizes.is_untold) && has < sizes.base_bytes).then_some((has, sizes.base_bytes))
    }

    /// Returns how much of what was taken from it it has taken back: by the word of its balloon from a page on, since a size that was asked
    /// for need not be one of whole pages; by what the host sees if that is more than `slack`. Says so only while no step is under way.
    pub(super) fn taken_back(&self, slack: u64) -> u64 {
        let sizes = self.sizes.unwrap_or_default();
        let beyond = |has: u64| has.min(sizes.base_bytes).saturating_sub(sizes.asked_bytes);
        let (said, seen) = (beyond(self.actual()), beyond(self.resident.unwrap_or_default()));
        let said = if said < PAGE_BYTES { 0 } else { said };
        if seen > slack { said.max(seen) } else { said }
    }

    /// Returns whether its balloon is asked nothing now.
    pub(super) fn is_not_asked(&self, now: Duration) -> bool {
        self.left.as_ref().is_some_and(|(until, _)| now < *until)
    }

    /// Returns the size below which it is never taken. What it booted with is the same at each host; what it was first seen with is less after a
    /// migration.
    pub(super) fn minimum(&self, limits: &Limits) -> u64 {
        let home = self.sizes.map_or(0, |sizes| sizes.home_bytes);
        let boot = self.memory.as_ref().map_or(home, |memory| memory.boot_bytes);
        limits.guest_minimum_bytes.unwrap_or(boot / 2)
    }

    fn actual(&self) -> u64 {
        self.memory.as_ref().map_or(0, |memory| memory.actual_bytes)
    }

    /// Returns the size that it is taken down to for a round: three quarters of the way to its minimum.
    fn visible(&self, limits: &Limits) -> u64 {
        let home = self.sizes.map_or(0, |sizes| sizes.home_bytes);
        home - home.saturating_sub(self.minimum(limits)) / 4 * 3
    }

    /// Returns what it could lend.
    pub(super) fn could_lend(&self, limits: &Limits) -> u64 {
        let most = self.actual().saturating_sub(self.visible(limits));
        if self.held().is_some() || self.is_enlarged() { 0 } else { most }
    }

    /// Returns whether somebody else gave it more, and the host has not seen that in it: it would count as nothing, and not be given back.
    pub(super) fn is_enlarged(&self) -> bool {
        self.actual() > self.sizes.map_or(0, |sizes| sizes.home_bytes)
    }

    /// Returns the most that it could lend in its next step.
    pub(super) fn step_max(&self, limits: &Limits, unit: u64) -> u64 {
        let home = self.sizes.map_or(0, |sizes| sizes.home_bytes);
        (home / STEP_SHARE).min(STEP_MAX).max(unit).min(self.could_lend(limits))
    }

    /// Returns the size to ask for in the next step of lending, in whole units below what it has; `None` if it lends no more.
    pub(super) fn next_step(&self, at: Moment, limits: &Limits, unit: u64) -> Option<u64> {
        if self.bond(at.now).is_some() || self.is_spared(at.now) || self.pressure().is_some() {
            return None;
        }
        let memory = self.memory.as_ref()?;
        let step = self.step_max(limits, unit) / unit * unit;
        // It is never helped if it does not tell.
        let is_short = memory.available_bytes.is_none_or(|available| available < available_min(memory) + step);
        if step == 0 || is_short {
            return None;
        }
        Some(memory.actual_bytes - step)
    }

    /// Notes what it would have without what was taken, before something more is.
    pub(super) fn rebase(&mut self) {
        let (Some(sizes), Some(memory)) = (&mut self.sizes, &self.memory) else { return };
        let actual = memory.actual_bytes;
        if sizes.taken() == 0 || actual > sizes.base_bytes {
            sizes.base_bytes = actual.min(sizes.home_bytes);
            sizes.asked_bytes = sizes.base_bytes;
        } else {
            // What somebody else took from it is not lent.
            sizes.base_bytes = sizes.base_bytes.min(actual.saturating_add(sizes.taken()));
            sizes.asked_bytes = sizes.asked_bytes.min(actual);
        }
    }

    /// Notes that it is asked to have `bytes`.
    pub(super) fn ask(&mut self, bytes: u64) {
        if let Some(sizes) = &mut self.sizes {
            sizes.asked_bytes = bytes;
        }
    }

    /// Returns whether it was asked to have `to_bytes`, which takes memory from it or gives it some.
    pub(super) fn was_asked(&self, takes: bool, to_bytes: u64) -> bool {
        let asked = self.sizes.map(|sizes| sizes.asked_bytes);
        asked.is_some_and(|asked| if takes { asked <= to_bytes } else { asked >= to_bytes })
    }

    /// Notes that what it was promised last is for its minimum, and uses up none of its help.
    pub(super) fn note_for_minimum(&mut self) {
        self.is_for_minimum = true;
        self.relieved_bytes = self.relieved_bytes.saturating_sub(self.promised_bytes);
    }

    /// Takes back what it was promised last.
    pub(super) fn withdraw(&mut self) {
        let bytes = std::mem::take(&mut self.promised_bytes);
        if let Some(sizes) = &mut self.sizes {
            sizes.asked_bytes = sizes.asked_bytes.saturating_sub(bytes);
        }
        if !self.is_for_minimum {
            self.relieved_bytes = self.relieved_bytes.saturating_sub(bytes);
        }
    }

    /// Notes that it is not asked any longer to have less than `bytes`.
    pub(super) fn ask_at_least(&mut self, bytes: u64) {
        if let Some(sizes) = &mut self.sizes {
            sizes.asked_bytes = sizes.asked_bytes.max(bytes.min(sizes.base_bytes));
        }
    }

    /// Notes that its size changed.
    pub(super) fn note_change(&mut self, now: Duration, blocks_read: u64) {
        self.changed = Some((now, blocks_read));
    }

    /// Returns whether the curve of its VM is still that of another size of the guest.
    pub(super) fn is_unsettled(&self, now: Duration, window: Duration, blocks_read: u64) -> bool {
        self.changed.is_some_and(|(then, blocks)| {
            // A VM process that was started again counts from 0.
            let read = blocks_read.checked_sub(blocks).unwrap_or(blocks_read);
            now.saturating_sub(then) < SETTLED_WINDOWS * window || read < SETTLED_READS
        })
    }

    /// Returns whether a change of its size to `to_bytes` is seen. The host may see `slack` more in a guest that has followed.
    pub(super) fn follows(&self, takes: bool, to_bytes: u64, slack: u64) -> bool {
        let Some(memory) = &self.memory else { return false };
        let is_seen = || self.resident.is_some_and(|resident| resident <= to_bytes.saturating_add(slack));
        if takes { memory.actual_bytes <= to_bytes && is_seen() } else { memory.actual_bytes >= to_bytes }
    }

    /// Returns why it is said to be short of memory, or `None` if it is not.
    pub(super) fn pressure(&self) -> Option<String> {
        let memory = self.memory.as_ref().filter(|_| self.unusable.is_none())?;
        let over = |number: Option<f64>, most: f64| number.filter(|number| *number > most);
        if let Some(share) = over(self.waits.map(|(share, _)| share), WAITING_MAX) {
            return Some(format!("its tasks wait for memory {share:.0} % of the time"));
        }
        if let Some(pages) = over(memory.pressure.swapped_in_per_s, SWAPPED_IN_MAX) {
            return Some(format!("it swaps in {pages:.0} pages each second"));
        }
        if let Some(faults) = over(memory.pressure.major_faults_per_s, MAJOR_FAULTS_MAX) {
            return Some(format!("it has {faults:.0} major faults each second"));
        }
        let available = memory.available_bytes.filter(|available| *available < available_min(memory))?;
        Some(format!("only {} is available in it", remoca_io::show::show_size(available)))
    }
}

/// Returns the least memory that must be available to a guest.
fn available_min(memory: &GuestMemory) -> u64 {
    memory.actual_bytes / AVAILABLE_SHARE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_promise_is_taken_back_once_and_uses_up_no_help() {
        let sizes = GuestRecord { home_bytes: 100, base_bytes: 100, asked_bytes: 70, ..GuestRecord::default() };
        let mut guest =
            KnownGuest::new(Moment { now: Duration::ZERO, unix_s: 0 }, Duration::from_secs(60), Some(sizes));
        // Of 20 that it got from the reserve, the last 10 were not passed on.
        (guest.relieved_bytes, guest.promised_bytes) = (20, 10);
        for _ in 0..2 {
            guest.withdraw();
            assert_eq!((guest.taken(), guest.relieved_bytes), (40, 10));
        }
    }
}
