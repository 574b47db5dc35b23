//! What is known of one VM: its limits, its newest answer, what it read lately, and when it was changed.

use super::Moment;
use crate::curve::Curve;
use crate::limits::Limits;
use crate::plan::{Memory, Standing, Subject};
use crate::reading::{Answer, Reading};
use crate::text::{not_asked_for, time_left};
use std::time::Duration;

/// How long a guest may read nothing before its curve is too old.
const STALE_AFTER: Duration = Duration::from_secs(600);
/// How long the memory of a process that was killed or stopped counts: its memory server keeps the pages for it, and a successor may come.
pub(super) const DEAD_FOR: Duration = Duration::from_secs(60);
/// How long a command whose answer did not come may still be executed, once the process answers again.
const UNSURE_FOR: Duration = Duration::from_secs(30);
/// Part of a new rate of reads in the mean.
const RATE_SHARE: f64 = 0.25;

/// One VM.
#[derive(Clone, Debug)]
pub(super) struct KnownVm {
    /// Newest limits that could be read; `None` if none could.
    pub(super) limits: Option<Limits>,
    /// Mistake in its file.
    mistake: Option<String>,
    /// Newest answer that was believed.
    pub(super) reading: Option<Reading>,
    /// Newest curve, or why it has none.
    pub(super) curve: Result<Curve, String>,
    /// Number of full answers of this process.
    readings: u32,
    /// When its rate of reads was brought up to date last, and the blocks read until then.
    read_at: Duration,
    read_blocks: u64,
    /// When its guest read something last.
    active_at: Duration,
    reads_per_s: Option<f64>,
    /// Why it does not answer now.
    pub(super) silent: Option<String>,
    dead_since: Option<Duration>,
    /// Whether a former daemon saw it dead for too long. It says nothing once somebody has its socket again.
    pub(super) was_dead: bool,
    /// When its size was changed last, or was to be.
    pub(super) changed_at: Option<Duration>,
    /// The same in seconds since 1970, for the record: 0 if it was not changed.
    pub(super) changed_s: u64,
    /// Until when it is not changed again because a former daemon changed it.
    pub(super) held_until: Option<Duration>,
    /// Whether it could not be told that change.
    pub(super) is_untold: bool,
    /// Size that it may still get by a command whose answer did not come, and when it answered again.
    unanswered: Option<(u64, Option<Duration>)>,
    /// Size by the record of a former daemon, if it has not answered this one.
    recorded: Option<u64>,
    /// It did not do what it was told to, and is not asked again until then.
    pub(super) ignored_until: Option<Duration>,
}

impl KnownVm {
    /// Returns a VM that has not answered yet.
    pub(super) fn new(now: Duration, recorded: Option<u64>) -> Self {
        Self {
            limits: None,
            mistake: None,
            reading: None,
            curve: Err("it has not told its curve yet".into()),
            readings: 0,
            read_at: now,
            read_blocks: 0,
            active_at: now,
            reads_per_s: None,
            silent: Some("it has not answered yet".into()),
            dead_since: None,
            was_dead: false,
            changed_at: None,
            changed_s: 0,
            held_until: None,
            is_untold: false,
            unanswered: None,
            recorded,
            ignored_until: None,
        }
    }

    /// Takes what the operator says about it. While its file has a mistake, the limits of before count.
    pub(super) fn hear_limits(&mut self, limits: Result<Limits, String>) {
        self.mistake = limits.map(|limits| self.limits = Some(limits)).err();
    }

    /// Takes an answer. Returns whether it is that of another process than before.
    pub(super) fn hear(&mut self, now: Duration, answer: Answer) -> bool {
        match answer {
            Answer::Read(reading) => {
                self.silent = None;
                (self.dead_since, self.was_dead) = (None, false);
                self.settle(now, reading.wanted);
                self.read(now, *reading)
            }
            Answer::Silent(why) => {
                self.silent = Some(why);
                (self.dead_since, self.was_dead) = (None, false);
                false
            }
            Answer::Unasked(why) => {
                if !self.is_dead() {
                    self.silent = Some(why);
                }
                false
            }
            Answer::Dead => {
                self.silent = Some("its process was killed".into());
                self.dead_since.get_or_insert(now);
                false
            }
        }
    }

    /// Notes that its process was stopped.
    pub(super) fn stop(&mut self, now: Duration) {
        self.silent = Some("its process was stopped".into());
        self.dead_since.get_or_insert(now);
    }

    /// Returns whether its process was stopped or killed, and no other one has answered since.
    pub(super) fn is_dead(&self) -> bool {
        self.dead_since.is_some()
    }

    /// Notes that it was changed, or was to be.
    pub(super) fn note_change(&mut self, at: Moment) {
        (self.changed_at, self.changed_s) = (Some(at.now), at.unix_s);
    }

    /// Notes that a former daemon changed it at `changed_s`, in seconds since 1970. The clock may have been set since.
    pub(super) fn note_former_change(&mut self, at: Moment, window: Duration, changed_s: u64) {
        let left = window.saturating_sub(Duration::from_secs(at.unix_s.saturating_sub(changed_s)));
        (self.changed_s, self.held_until) = (changed_s, Some(at.now + left));
    }

    /// Lets it be changed before the end of its window.
    pub(super) fn end_window(&mut self) {
        (self.changed_at, self.changed_s, self.held_until) = (None, 0, None);
    }

    /// Notes that the VM is told to have `bytes`: they count until it answers.
    pub(super) fn expect_size(&mut self, bytes: u64) {
        self.unanswered = Some((bytes, None));
    }

    /// Notes that a command was answered, refused, or not sent.
    pub(super) fn end_wait(&mut self) {
        self.unanswered = None;
    }

    /// Notes that the answer to a command that gives the VM `bytes` did not come.
    pub(super) fn await_size(&mut self, bytes: u64, why: String) {
        self.unanswered = Some((bytes, None));
        self.silent = Some(why);
    }

    /// Forgets a command whose answer did not come, once it was executed or can no longer be.
    fn settle(&mut self, now: Duration, wanted: u64) {
        let Some((bytes, answered_at)) = &mut self.unanswered else { return };
        let answered_at = *answered_at.get_or_insert(now);
        if *bytes == wanted || now.saturating_sub(answered_at) >= UNSURE_FOR {
            self.unanswered = None;
        }
    }

    fn read(&mut self, now: Duration, reading: Reading) -> bool {
        let before = self.reading.as_ref();
        let is_same = before.is_some_and(|before| before.process == reading.process);
        let is_other = before.is_some() && !is_same;
        if !is_same {
            (self.readings, self.reads_per_s, self.active_at, self.ignored_until) = (0, None, now, None);
        }
        if let Some(curve) = &reading.curve {
            self.curve.clone_from(curve);
            self.readings = self.readings.saturating_add(1);
        }
        self.note_reads(now, &reading, is_same);
        self.reading = Some(reading);
        is_other
    }

    /// Brings the rate of reads up to date.
    fn note_reads(&mut self, now: Duration, reading: &Reading, is_same: bool) {
        let seconds = now.saturating_sub(self.read_at).as_secs_f64();
        if !is_same {
            self.reads_per_s = self.curve.as_ref().ok().and_then(|curve| curve.reads_per_s);
        } else if seconds >= 1. {
            let blocks = reading.blocks_read.saturating_sub(self.read_blocks);
            if blocks > 0 {
                self.active_at = now;
            }
            let rate = blocks as f64 / seconds;
            self.reads_per_s = Some(self.reads_per_s.map_or(rate, |mean| mean + (rate - mean) * RATE_SHARE));
        } else {
            // Too short a time: the blocks count next time.
            return;
        }
        (self.read_at, self.read_blocks) = (now, reading.blocks_read);
    }

    /// Forgets the curve, which was asked for in other units.
    pub(super) fn forget_curve(&mut self) {
        self.curve = Err("its curve is asked for once more, in other units".into());
    }

    /// Returns the blocks that its guest has read.
    pub(super) fn blocks_read(&self) -> u64 {
        self.reading.as_ref().map_or(0, |reading| reading.blocks_read)
    }

    /// Returns the blocks that its guest reads each second.
    pub(super) fn reads_per_s(&self) -> Option<f64> {
        self.reads_per_s
    }

    /// Returns whether it has ever said how much it has, to this daemon or a former one.
    pub(super) fn is_known(&self) -> bool {
        self.reading.is_some() || self.recorded.is_some()
    }

    /// Returns the size that counts: of a VM that never answered the most that it can have.
    pub(super) fn counted(&self, memory: Memory) -> u64 {
        let known = self.reading.as_ref().map(Reading::counted).or(self.recorded);
        let most = || self.limits().maximum_bytes.unwrap_or(memory.total_bytes);
        known.unwrap_or_else(most).max(self.unanswered.map_or(0, |(bytes, _)| bytes))
    }

    pub(super) fn limits(&self) -> Limits {
        self.limits.unwrap_or_default()
    }

    /// Returns whether it has been dead for too long to have any memory.
    pub(super) fn is_gone(&self, now: Duration) -> bool {
        self.dead_since.is_some_and(|since| self.was_dead || now.saturating_sub(since) >= DEAD_FOR)
    }

    /// Returns whether it has no part in the division: it has nothing and gets nothing, or has been dead for too long.
    pub(super) fn is_absent(&self, now: Duration) -> bool {
        let is_off = self.reading.as_ref().is_some_and(|reading| reading.fixed.is_some() && reading.counted() == 0);
        self.is_gone(now) || (is_off && self.silent.is_none())
    }

    /// Returns the reason why the VM keeps what it has, and whether it also cannot be changed at all; `None` if it is free. If it `is_urgent`
    /// that all have less, it can be changed again within a window.
    pub(super) fn bond(
        &self,
        now: Duration,
        window: Duration,
        readings_min: u32,
        is_urgent: bool,
    ) -> Option<(String, bool)> {
        let cannot = |why: String| Some((why, true));
        let keeps = |why: String| Some((why, false));
        if let Some(why) = &self.silent {
            return cannot(why.clone());
        }
        if let Some(why) = self.reading.as_ref().and_then(|reading| reading.fixed.clone()) {
            return cannot(why);
        }
        if let Some(left) = self.ignored_until.and_then(|until| until.checked_sub(now)).filter(|left| !left.is_zero()) {
            let wait = not_asked_for(left);
            return cannot(format!("it did not change its size as told (`remoca host log` says why); {wait}"));
        }
        let changed = self.changed_at.map(|at| now.saturating_sub(at)).filter(|passed| *passed < window);
        let changed = changed.map(|passed| {
            let what = if self.is_untold { "it could not be told its new size" } else { "it was changed" };
            (format!("{what} {} s ago", passed.as_secs()), window.saturating_sub(passed))
        });
        let held = self.held_until.and_then(|until| until.checked_sub(now)).filter(|left| !left.is_zero());
        let changed = changed.or_else(|| Some(("it was changed by a former daemon".into(), held?)));
        if let Some((why, left)) = changed.as_ref().filter(|_| !is_urgent) {
            return cannot(format!("{why}, and is not changed again for {}", time_left(*left)));
        }
        if let Some(why) = &self.mistake {
            // It may have a minimum that nobody knows.
            return Some((why.clone(), self.limits.is_none()));
        }
        if self.reading.as_ref().is_some_and(|reading| reading.is_left_alone) {
            return keeps("its memory server is slower than its disk, and left alone".into());
        }
        if let Err(why) = &self.curve {
            return keeps(why.clone());
        }
        if self.readings < readings_min {
            return cannot("it is new, and must be read once more before it is changed".into());
        }
        let idle = now.saturating_sub(self.active_at);
        (idle >= STALE_AFTER)
            .then(|| (format!("its guest has read nothing for {} minutes", idle.as_secs() / 60), false))
            .or_else(|| keeps(changed?.0))
    }

    /// Returns the VM as the division has it, if its guest has lent so much.
    pub(super) fn subject(&self, memory: Memory, lent_bytes: u64, bond: Option<&(String, bool)>) -> Subject<'_> {
        let limits = self.limits();
        let units = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        // What the guest lends goes back to it, so it is beside the maximum.
        let maximum = limits.maximum_bytes.map_or(memory.total_bytes, |most| most.saturating_add(lent_bytes));
        let maximum = maximum.min(memory.total_bytes);
        let has_bytes = self.counted(memory);
        // A size of 0 cannot be set, only kept. A minimum of more than all there is cannot be had, however much it is.
        let keeps_none = has_bytes == 0 && limits.minimum_bytes == 0 && maximum < memory.unit_bytes;
        let beyond = memory.units().saturating_add(1);
        let least = units(limits.minimum_bytes.div_ceil(memory.unit_bytes));
        let least = least.clamp(usize::from(!keeps_none), beyond);
        // Rounded up, it would seem to have a minimum of which it lacks a part of a unit.
        let has = match has_bytes < limits.minimum_bytes {
            true => has_bytes / memory.unit_bytes,
            false => has_bytes.div_ceil(memory.unit_bytes),
        };
        Subject {
            has_bytes,
            has: units(has),
            least,
            most: units(maximum / memory.unit_bytes).max(least),
            own: units(lent_bytes / memory.unit_bytes),
            weight: limits.weight,
            bound: limits.bound,
            reads_per_s: self.reads_per_s,
            standing: match (&self.curve, bond) {
                (Ok(curve), None) => Standing::Free(curve),
                (_, Some((_, true))) => Standing::Stuck,
                _ => Standing::Keeps,
            },
            is_known: self.is_known(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resource::Resource;
    use crate::testing::{GRID, curve_status, status};

    #[test]
    fn a_size_that_was_told_counts_until_it_is_answered() {
        let mut vm = KnownVm::new(Duration::ZERO, Some(5));
        let memory = Memory { total_bytes: 100, unit_bytes: 1 };
        vm.expect_size(9);
        assert_eq!(vm.counted(memory), 9);
        vm.end_wait();
        assert_eq!(vm.counted(memory), 5);
    }

    /// Lets a VM answer that it has five bytes, and what `change` makes of that.
    fn answer(vm: &mut KnownVm, now_s: u64, change: impl FnOnce(&mut Reading)) {
        let mut reading = Reading::new("a", Resource::Cache, &status("a", 5, 5), None).unwrap();
        change(&mut reading);
        vm.hear(Duration::from_secs(now_s), Answer::Read(Box::new(reading)));
    }

    #[test]
    fn a_size_whose_answer_did_not_come_counts_until_it_is_had_or_half_a_minute_after_the_next_answer() {
        let memory = Memory { total_bytes: 100, unit_bytes: 1 };
        let mut vm = KnownVm::new(Duration::ZERO, None);
        vm.await_size(9, "it hangs".into());
        for (now_s, has) in [(100, 9), (129, 9), (130, 5)] {
            answer(&mut vm, now_s, |_| {});
            assert_eq!(vm.counted(memory), has, "{now_s}");
        }
        vm.await_size(9, "it hangs".into());
        answer(&mut vm, 200, |reading| reading.wanted = 9);
        answer(&mut vm, 201, |_| {});
        assert_eq!(vm.counted(memory), 5, "it was executed");
    }

    #[test]
    fn a_vm_has_no_part_if_it_has_nothing_and_gets_nothing_or_is_dead_for_a_minute() {
        let at = Duration::from_secs;
        let mut vm = KnownVm::new(Duration::ZERO, None);
        let off = |bytes: u64| {
            move |reading: &mut Reading| {
                reading.fixed = Some("its cache is off".into());
                (reading.wanted, reading.granted) = (bytes, bytes);
            }
        };
        answer(&mut vm, 1, off(5));
        assert!(!vm.is_absent(at(1)), "it has something");
        answer(&mut vm, 2, |reading| (reading.wanted, reading.granted) = (0, 0));
        assert!(!vm.is_absent(at(2)), "it can get something");
        answer(&mut vm, 3, off(0));
        assert!(vm.is_absent(at(3)));
        vm.hear(at(4), Answer::Silent("it hangs".into()));
        assert!(!vm.is_absent(at(4)), "nobody knows what it has by now");
        answer(&mut vm, 5, |_| {});
        vm.stop(at(10));
        vm.hear(at(20), Answer::Dead);
        vm.hear(at(30), Answer::Unasked("too many open files".into()));
        assert!(vm.is_dead() && !vm.is_absent(at(69)) && vm.is_absent(at(70)));
        answer(&mut vm, 71, |_| {});
        assert!(!vm.is_dead() && !vm.is_absent(at(1000)));
    }

    #[test]
    fn one_that_lacks_a_part_of_a_unit_to_its_minimum_is_owed_that() {
        let memory = Memory { total_bytes: 100, unit_bytes: 10 };
        let mut vm = KnownVm::new(Duration::ZERO, Some(25));
        // The units that it has, and that it must have.
        for (minimum_bytes, expected) in [(0, (3, 1)), (25, (3, 3)), (26, (2, 3)), (30, (2, 3)), (31, (2, 4))] {
            vm.hear_limits(Ok(Limits { minimum_bytes, ..Limits::default() }));
            let subject = vm.subject(memory, 0, None);
            assert_eq!((subject.has, subject.least), expected, "{minimum_bytes}");
        }
    }

    #[test]
    fn one_that_a_former_daemon_saw_dead_for_a_minute_has_no_part_until_somebody_has_its_socket() {
        let at = Duration::from_secs;
        for comes_back in [
            |vm: &mut KnownVm| answer(vm, 2, |_| {}),
            |vm: &mut KnownVm| {
                vm.hear(Duration::from_secs(2), Answer::Silent("it hangs".into()));
            },
        ] {
            let mut vm = KnownVm::new(Duration::ZERO, Some(5));
            vm.was_dead = true;
            assert!(!vm.is_absent(at(0)), "it was not asked yet");
            vm.hear(at(1), Answer::Dead);
            vm.hear(at(1), Answer::Unasked("too many open files".into()));
            assert!(vm.is_absent(at(1)));
            comes_back(&mut vm);
            assert!(!vm.is_absent(at(2)));
            vm.hear(at(3), Answer::Dead);
            assert!(!vm.is_absent(at(62)) && vm.is_absent(at(63)));
        }
    }

    #[test]
    fn what_keeps_a_vm_from_being_changed_is_said_and_whether_it_can_be_cut() {
        let mut vm = KnownVm::new(Duration::ZERO, None);
        let window = Duration::from_secs(60);
        let bond = |vm: &KnownVm, now_s: u64| {
            let (why, is_stuck) = vm.bond(Duration::from_secs(now_s), window, 2, false).unwrap();
            (why.split(' ').take(4).collect::<Vec<_>>().join(" "), is_stuck)
        };
        let expect = |vm: &KnownVm, now_s: u64, why: &str, is_stuck: bool| {
            assert_eq!(bond(vm, now_s), (why.to_owned(), is_stuck), "{now_s}");
        };
        vm.hear_limits(Ok(Limits::default()));
        expect(&vm, 0, "it has not answered", true);
        answer(&mut vm, 1, |reading| reading.fixed = Some("its cache is off".into()));
        expect(&vm, 1, "its cache is off", true);
        answer(&mut vm, 2, |reading| reading.is_left_alone = true);
        expect(&vm, 2, "its memory server is", false);
        answer(&mut vm, 3, |_| {});
        expect(&vm, 3, "it has not told", false);
        vm.changed_at = Some(Duration::from_secs(10));
        expect(&vm, 69, "it was changed 59", true);
        vm.is_untold = true;
        expect(&vm, 69, "it could not be", true);
        expect(&vm, 70, "it has not told", false);
        vm.ignored_until = Some(Duration::from_secs(100));
        expect(&vm, 99, "it did not change", true);
        expect(&vm, 100, "it has not told", false);
        // Another process was told nothing yet.
        answer(&mut vm, 101, |_| {});
        vm.ignored_until = Some(Duration::from_secs(200));
        answer(&mut vm, 102, |reading| reading.process.1 += 1);
        expect(&vm, 102, "it has not told", false);
        vm.hear_limits(Err("its file has a mistake".into()));
        expect(&vm, 103, "its file has a", false);
    }

    /// As one that this daemon changed: it is cut to its share, however little its curve says that it would lose.
    #[test]
    fn one_that_a_former_daemon_changed_lately_keeps_what_it_has_even_if_all_must_have_less() {
        let (mut vm, window) = (KnownVm::new(Duration::ZERO, None), Duration::from_secs(60));
        vm.hear_limits(Ok(Limits::default()));
        let curve = Curve::new(&curve_status(|_| 0.5), GRID).unwrap();
        for now_s in [1, 2] {
            answer(&mut vm, now_s, |reading| reading.curve = Some(Ok(curve.clone())));
        }
        vm.note_former_change(Moment { now: Duration::from_secs(2), unix_s: 100 }, window, 90);
        let bond = |now_s: u64, is_urgent| vm.bond(Duration::from_secs(now_s), window, 2, is_urgent);
        let why = "it was changed by a former daemon";
        assert_eq!(bond(3, true), Some((why.into(), false)));
        let (text, is_stuck) = bond(3, false).unwrap();
        assert!(is_stuck && text.starts_with(&format!("{why}, and is not changed again for ")), "{text}");
        assert_eq!((bond(52, false), bond(52, true)), (None, None));
    }

    #[test]
    fn what_a_guest_lends_is_beside_the_maximum_of_its_cache() {
        let memory = Memory { total_bytes: 100, unit_bytes: 1 };
        let mut vm = KnownVm::new(Duration::ZERO, Some(5));
        vm.hear_limits(Ok(Limits { maximum_bytes: Some(40), ..Limits::default() }));
        let of = |lent_bytes: u64| {
            let subject = vm.subject(memory, lent_bytes, None);
            (subject.own, subject.most)
        };
        assert_eq!([0, 7, 70].map(of), [(0, 40), (7, 47), (70, 100)]);
    }

    #[test]
    fn blocks_that_are_read_between_close_looks_count() {
        let mut vm = KnownVm::new(Duration::ZERO, None);
        let mut look = |ms: u64, blocks_read: u64| {
            let reading = Reading::new("a", Resource::Cache, &status("a", 0, 0), None).unwrap();
            let now = Duration::from_millis(ms);
            vm.hear(now, Answer::Read(Box::new(Reading { blocks_read, ..reading })));
            (vm.reads_per_s(), now.saturating_sub(vm.active_at))
        };
        assert_eq!(look(0, 100), (None, Duration::ZERO));
        assert_eq!(look(900, 190).0, None);
        assert_eq!(look(1500, 250), (Some(100.), Duration::ZERO));
        // All of them were read between looks that are close to each other.
        assert_eq!(look(2300, 450).0, Some(100.));
        assert_eq!(look(2500, 450), (Some(125.), Duration::ZERO));
        assert_eq!(look(3500, 450), (Some(93.75), Duration::from_secs(1)));
    }
}
