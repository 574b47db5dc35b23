//! The ownership of a migrating VM's disks, with any message at any time from a peer that lies, and local events: the
//! guest, the images' lock, time, the operator.

use crate::source::Source;
use remoca_core::migration::{Action, Locked, Message, Ownership};
use remoca_core::units::Nanos;

/// Maximum number of actions after one event.
const ACTIONS_MAX: usize = 8;
/// Time, in nanoseconds, for which the peer's word is believed.
const SECOND: u64 = 1_000_000_000;

pub fn run(data: &[u8]) {
    let mut source = Source(data);
    let (incoming, lock_reaches) = (source.below(2) == 1, source.below(2) == 1);
    let mut side = Side {
        machine: Ownership::new(incoming, lock_reaches),
        now: Nanos(1),
        lock_reaches,
        running: false,
        linked: false,
        open: !incoming,
        entitled: false,
        asked_at: None,
        may_serve: false,
        has_state: false,
        locking: false,
        locked: None,
        drained: false,
    };
    while !source.is_empty() {
        side.step(&mut source);
        side.act();
        side.check();
    }
}

struct Side {
    machine: Ownership,
    now: Nanos,
    lock_reaches: bool,
    running: bool,
    linked: bool,
    /// Whether the images are open.
    open: bool,
    /// Whether the peer gave the disks away, or the operator says that no process has them.
    entitled: bool,
    /// When the peer was last asked whether it still gives them.
    asked_at: Option<Nanos>,
    /// Whether, where no lock tells, it has said so in time, or the operator has.
    may_serve: bool,
    /// Whether the peer said that an index came with them.
    has_state: bool,
    locking: bool,
    locked: Option<Locked>,
    /// Whether, since the guest stopped, nothing is in flight and everything is durable.
    drained: bool,
}

impl Side {
    fn step(&mut self, source: &mut Source) {
        match source.below(10) {
            0 if !self.linked => {
                self.linked = true;
                self.machine.handle_linked(self.now);
            }
            1 if self.linked => self.lose(),
            2 => {
                self.running = !self.running;
                self.drained &= !self.running;
                self.machine.handle_queues(self.now, self.running);
            }
            3 if !self.running && self.open => {
                self.drained = true;
                self.machine.handle_drained(source.below(2) == 1);
            }
            4 if self.linked => self.machine.handle_sent(),
            5 if self.locking => self.lock(source.below(3)),
            6 => self.pass_time(source),
            7 => {
                let is_taken = self.machine.take_back(self.now).is_ok();
                assert!(!is_taken || (!self.open && !self.locking), "what is here is not taken back");
                (self.entitled, self.may_serve) = (self.entitled || is_taken, self.may_serve || is_taken);
            }
            _ if self.linked => self.hear(source.below(7)),
            _ => {}
        }
    }

    fn lose(&mut self) {
        self.linked = false;
        self.machine.handle_lost(self.now);
    }

    fn lock(&mut self, outcome: u8) {
        let outcome = [Locked::Unchanged, Locked::Changed, Locked::InUse][usize::from(outcome)];
        self.locking = false;
        self.locked = Some(outcome);
        self.open = outcome != Locked::InUse;
        self.machine.handle_locked(self.now, outcome);
    }

    fn pass_time(&mut self, source: &mut Source) {
        self.now = self.now.plus_ns(u64::from(source.byte()) << 28);
        if self.machine.next_deadline().is_some_and(|at| at <= self.now) {
            self.machine.handle_timer(self.now);
            assert!(self.machine.next_deadline().is_none_or(|at| at > self.now), "a timer that never rests");
        }
    }

    fn hear(&mut self, message: u8) {
        let message = match message {
            0 => Message::Accept,
            1 => Message::Want,
            2 => Message::Busy,
            3 => Message::Confirm,
            4 => Message::Confirmed,
            state => Message::Yours { state: state == 5 },
        };
        match message {
            Message::Yours { state } if !self.machine.holds() => (self.entitled, self.has_state) = (true, state),
            Message::Confirmed => self.may_serve |= self.asked_at.is_some_and(|at| self.now.since_ns(at) <= SECOND),
            _ => {}
        }
        self.machine.handle_alive();
        self.machine.handle_message(self.now, message);
    }

    fn act(&mut self) {
        for count in 0.. {
            let Some(action) = self.machine.poll_action() else { return };
            assert!(count < ACTIONS_MAX, "one thing leads to another without end");
            match action {
                Action::Release => {
                    assert!(self.open && self.drained && !self.running, "a guest that runs keeps its disks");
                    (self.open, self.drained, self.entitled, self.has_state) = (false, false, false, false);
                    self.may_serve = false;
                }
                Action::Close => {
                    assert!(self.open && !self.machine.serves() && !self.lock_reaches);
                    (self.open, self.entitled, self.asked_at) = (false, false, None);
                }
                Action::Send(Message::Yours { .. }) => {
                    assert!(!self.open && !self.machine.serves(), "what is given away is not kept");
                    self.entitled = false;
                }
                Action::Lock => {
                    assert!(!self.open && !self.locking, "locked twice");
                    assert!(self.entitled || self.lock_reaches, "no lock would tell that another host has it");
                    self.locking = true;
                }
                Action::Serve { warm } => {
                    assert!(self.open);
                    assert!(self.lock_reaches || self.may_serve, "another host may have taken the disks back");
                    assert!(
                        !warm || (self.has_state && self.locked == Some(Locked::Unchanged)),
                        "an index of other disks"
                    );
                }
                Action::Forget => self.has_state = false,
                Action::Disconnect => self.linked = false,
                Action::Drain | Action::SendState => assert!(self.open),
                Action::Send(Message::Confirm) => self.asked_at = Some(self.now),
                Action::Send(_) | Action::TellStuck => {}
            }
        }
    }

    fn check(&self) {
        assert!(!self.machine.serves() || self.open, "nobody serves a disk that is not open");
        assert!(!self.machine.has_disks() || self.open);
        assert!(self.machine.holds() || !self.open && !self.locking);
        let waits = self.machine.holds() && !self.open && !self.locking;
        assert!(!waits || self.machine.next_deadline().is_some(), "disks that were given and are never locked");
        assert_eq!(self.machine.is_linked(), self.linked);
    }
}

/// Returns the seeds: there and back; a peer that gives the disks unasked; a peer that never answers.
pub fn seeds() -> Vec<Vec<u8>> {
    let (accept, want, yours, confirmed) = ([8, 0], [8, 1], [8, 5], [8, 4]);
    let [out, back] =
        [[&[0, 0, 1, 0][..], &accept, &[3, 0, 4]], [&[2][..], &yours, &[5, 0]]].map(|parts| parts.concat());
    vec![
        [&out[..], &back].concat(),
        [&[1, 1, 0][..], &yours, &[5, 0, 2, 2], &want, &[3, 1, 4]].concat(),
        [&[1, 0, 0][..], &yours, &yours, &[1, 5, 2]].concat(),
        [&[0, 1, 0][..], &yours, &accept, &accept, &[2, 6, 200]].concat(),
        [&[1, 0, 0][..], &yours, &[5, 0, 6, 1], &confirmed, &[6, 9], &confirmed, &confirmed].concat(),
        [&[1, 0, 0][..], &yours, &[5, 1, 1, 7, 5, 1]].concat(),
        [&out[..], &[2, 6, 100, 6, 100, 7, 5, 2, 6, 100, 5, 0]].concat(),
    ]
}
