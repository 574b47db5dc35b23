//! The ownership of a migrating VM's disks, with any message at any time from a peer that lies, and local events: the
//! guest, the images' lock, time, the operator.

use crate::source::Source;
use remoca_core::migration::{Action, Locked, Message, Ownership};
use remoca_core::units::Nanos;

/// Maximum number of actions after one event.
const ACTIONS_MAX: usize = 8;

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
                let away = !self.open && !self.locking;
                self.entitled |= away;
                assert!(!self.machine.take_back(self.now) || away, "what is here is not taken back");
            }
            _ if self.linked => self.hear(source.below(5)),
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
            state => Message::Yours { state: state == 3 },
        };
        if let (Message::Yours { state }, false) = (message, self.machine.holds()) {
            (self.entitled, self.has_state) = (true, state);
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
                    assert!(
                        !warm || (self.has_state && self.locked == Some(Locked::Unchanged)),
                        "an index of other disks"
                    );
                }
                Action::Forget => self.has_state = false,
                Action::Disconnect => self.linked = false,
                Action::Drain | Action::SendState => assert!(self.open),
                Action::Send(_) | Action::TellStuck => {}
            }
        }
    }

    fn check(&self) {
        assert!(!self.machine.serves() || self.open, "nobody serves a disk that is not open");
        assert_eq!(self.machine.has_images(), self.open);
        assert!(self.machine.holds() || !self.open && !self.locking);
        let waits = self.machine.holds() && !self.open && !self.locking;
        assert!(!waits || self.machine.next_deadline().is_some(), "disks that were given and are never locked");
        assert_eq!(self.machine.is_linked(), self.linked);
    }
}

/// Returns the seeds: there and back; a peer that gives the disks unasked; a peer that never answers.
pub fn seeds() -> Vec<Vec<u8>> {
    let (accept, want, yours) = ([8, 0], [8, 1], [8, 3]);
    let [out, back] =
        [[&[0, 0, 1, 0][..], &accept, &[3, 0, 4]], [&[2][..], &yours, &[5, 0]]].map(|parts| parts.concat());
    vec![
        [&out[..], &back].concat(),
        [&[1, 1, 0][..], &yours, &[5, 0, 2, 2], &want, &[3, 1, 4]].concat(),
        [&[1, 0, 0][..], &yours, &yours, &[1, 5, 2]].concat(),
        [&[0, 1, 0][..], &yours, &accept, &accept, &[2, 6, 200]].concat(),
        [&out[..], &[2, 6, 100, 6, 100, 7, 5, 2, 6, 100, 5, 0]].concat(),
    ]
}
