//! Two sides and all that can happen between them: a model with a versioned image, loss of the connection, death of either
//! side, and a hypervisor that migrates, gives up, or does what it should not.

use super::*;

/// Item in transit: an index that describes the image at some version, or a message.
#[derive(Clone, Copy, Debug)]
enum Parcel {
    Index(u64),
    Message(Message),
}

struct Side {
    machine: Ownership,
    alive: bool,
    running: bool,
    /// The images are open and, as far as locks reach, locked.
    open: bool,
    /// Version of the image that the index describes.
    index: Option<u64>,
    received: Option<u64>,
    wrote: bool,
    drains: u32,
    sends: bool,
    locks: bool,
    /// Whether it has yet to hear that the connection is gone.
    lost: bool,
    inbox: VecDeque<Parcel>,
}

/// Options of a run.
#[derive(Clone, Copy)]
struct Plan {
    lock_reaches: bool,
    /// Whether guests run wherever and whenever they like.
    careless: bool,
    /// Whether the operator takes disks back where a guest waits for them, if no other guest runs and the other process does not have them.
    operator: bool,
    /// Whether what the peer said counts however late it is heard.
    believes: bool,
    /// Whether a received index is used without a look at the image.
    unchecked: bool,
    /// Number of steps after which there are no more faults.
    faults_until: u32,
    /// Number of attempts to open the images that fail at first, whoever makes them.
    failures: u32,
}

struct World {
    plan: Plan,
    sides: [Side; 2],
    linked: bool,
    image: u64,
    now: Nanos,
    random: u64,
    failed: u32,
    warm: u32,
    taken: u32,
    log: Vec<String>,
}

impl World {
    fn new(plan: Plan, seed: u64) -> Self {
        let side = |incoming: bool| Side {
            machine: Ownership::new(incoming, plan.lock_reaches),
            alive: true,
            running: false,
            open: !incoming,
            index: (!incoming).then_some(0),
            received: None,
            wrote: false,
            drains: 0,
            sends: false,
            locks: false,
            lost: false,
            inbox: VecDeque::new(),
        };
        let random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut world = Self {
            plan,
            sides: [side(false), side(true)],
            linked: true,
            image: 0,
            now: Nanos(0),
            random,
            failed: 0,
            warm: 0,
            taken: 0,
            log: Vec::new(),
        };
        world.set_running(0, true);
        for side in [0, 1] {
            let now = world.now;
            world.sides[side].machine.handle_linked(now);
            world.execute(side);
        }
        world.sides[0].inbox.push_back(Parcel::Message(Message::Accept));
        world
    }

    fn draw(&mut self, below: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11) % below
    }

    fn set_running(&mut self, side: usize, running: bool) {
        let now = self.now;
        self.sides[side].running = running;
        self.sides[side].machine.handle_queues(now, running);
        self.execute(side);
    }

    fn execute(&mut self, at: usize) {
        while let Some(action) = self.sides[at].machine.poll_action() {
            self.log.push(format!("{at}: {action:?}"));
            let side = &mut self.sides[at];
            match action {
                Action::Drain => side.drains += 1,
                Action::SendState => side.sends = true,
                Action::Release => (side.open, side.index) = (false, None),
                Action::Send(message) => {
                    if self.linked {
                        self.sides[1 - at].inbox.push_back(Parcel::Message(message));
                    }
                }
                Action::Disconnect => {
                    side.inbox.clear();
                    (side.lost, side.sends) = (false, false);
                    self.sides[1 - at].lost |= self.linked;
                    self.linked = false;
                }
                Action::Close => {
                    assert!(side.open && !self.plan.lock_reaches && !side.machine.serves());
                    side.open = false;
                }
                Action::Forget => side.received = None,
                Action::Lock => side.locks = true,
                Action::Serve { warm } => {
                    assert!(side.open, "serves without the image");
                    (side.wrote, self.warm) = (false, self.warm + u32::from(warm));
                    side.index = Some(if warm { side.received.expect("an index was received") } else { self.image });
                    side.received = None;
                }
                Action::TellStuck => assert!(!self.plan.lock_reaches),
            }
        }
    }

    fn check(&self) {
        let [a, b] = &self.sides;
        // Who asks whether the disks are still its own has only opened them.
        let holds = |side: &Side| side.open && !matches!(side.machine.state, State::Confirming { .. });
        assert!(!(holds(a) && holds(b)), "both hold the image");
        for side in [a, b] {
            assert!(!side.machine.serves() || !side.alive || side.open, "serves what it does not hold");
            if side.alive && side.machine.serves() {
                assert_eq!(side.index, Some(self.image), "an index that is not of the image");
            }
        }
    }

    /// Makes one thing happen. Returns false if it was none of those that happen by themselves.
    fn step(&mut self, faults: bool) -> bool {
        let at = usize::try_from(self.draw(2)).unwrap();
        let kind = self.draw(if faults { 12 + u64::from(self.plan.operator) } else { 6 });
        if !self.sides[at].alive {
            return false;
        }
        self.log.push(format!("{at}: step {kind}"));
        let now = self.now;
        match kind {
            0 | 1 => return self.deliver(at),
            2 if self.sides[at].drains > 0 => {
                let side = &mut self.sides[at];
                side.drains -= 1;
                if side.drains > 0 {
                    return true;
                }
                let wrote = side.wrote;
                side.machine.handle_drained(wrote);
            }
            3 if self.sides[at].sends => {
                self.sides[at].sends = false;
                if !self.linked {
                    // It will hear of that; its messages are lost.
                } else if let Some(index) = self.sides[at].index
                    && self.sides[at].machine.gives_index()
                {
                    self.sides[1 - at].inbox.push_back(Parcel::Index(index));
                }
                self.sides[at].machine.handle_sent();
            }
            4 if self.sides[at].locks => {
                self.sides[at].locks = false;
                let locked = self.lock(at);
                self.sides[at].machine.handle_locked(now, locked);
            }
            5 => {
                let Some(due) = self.sides[at].machine.next_deadline() else { return false };
                self.now = Nanos(self.now.0.max(due.0));
                let now = self.now;
                self.sides[at].machine.handle_timer(now);
            }
            6..=8 => return self.move_guest(at),
            9 => return self.write(at),
            10 if self.draw(6) == 0 => self.cut(at),
            11 if self.draw(30) == 0 => self.kill(at),
            12 => return self.take_back(at),
            _ => return false,
        }
        self.execute(at);
        true
    }

    fn deliver(&mut self, at: usize) -> bool {
        let now = self.now;
        let side = &mut self.sides[at];
        match side.inbox.pop_front() {
            Some(Parcel::Index(index)) => {
                side.received = Some(index);
                side.machine.handle_alive();
            }
            Some(Parcel::Message(message)) => {
                self.log.push(format!("{at}: gets {message:?}"));
                let asked_at = match side.machine.state {
                    State::Confirming { asked_at, .. } if self.plan.believes => asked_at,
                    _ => now,
                };
                side.machine.handle_message(asked_at, message);
            }
            None if std::mem::take(&mut side.lost) => {
                side.sends = false;
                side.machine.handle_lost(now);
            }
            None => return false,
        }
        self.execute(at);
        true
    }

    fn lock(&mut self, at: usize) -> Locked {
        if self.failed < self.plan.failures {
            self.failed += 1;
            return Locked::InUse;
        }
        if self.plan.lock_reaches && self.sides[1 - at].open {
            return Locked::InUse;
        }
        self.sides[at].open = true;
        match self.sides[at].received {
            Some(index) if index == self.image || self.plan.unchecked => Locked::Unchanged,
            _ => Locked::Changed,
        }
    }

    /// Starts or stops a guest. Unless it is careless, the hypervisor starts one only where no other runs.
    fn move_guest(&mut self, at: usize) -> bool {
        let running = self.sides[at].running;
        if !running && !self.plan.careless && self.sides[1 - at].running {
            return false;
        }
        self.set_running(at, !running);
        true
    }

    /// Time passes, and the operator helps a guest that waits.
    fn take_back(&mut self, at: usize) -> bool {
        self.now = Nanos(self.now.0 + self.draw(4) * CONFIRMED_FOR);
        let other = &self.sides[1 - at];
        // Or is about to have them, because the operator said so.
        let is_told = matches!(other.machine.state, State::Entering { ground: Ground::Free, .. });
        let has_disks = other.machine.has_disks() || is_told;
        if self.plan.lock_reaches || !self.sides[at].running || other.running || other.alive && has_disks {
            return false;
        }
        let taken = self.sides[at].machine.take_back(self.now);
        self.log.push(format!("{at}: the operator takes them back: {taken:?}"));
        self.taken += u32::from(taken.is_ok());
        self.execute(at);
        taken.is_ok()
    }

    fn write(&mut self, at: usize) -> bool {
        let side = &mut self.sides[at];
        if !(side.running && side.machine.serves()) {
            return false;
        }
        self.image += 1;
        (side.index, side.wrote) = (Some(self.image), true);
        true
    }

    /// Messages in transit may arrive or not.
    fn cut(&mut self, at: usize) {
        if !std::mem::replace(&mut self.linked, false) {
            return;
        }
        for side in [at, 1 - at] {
            self.sides[side].lost = true;
            let keep = self.draw(4);
            self.sides[side].inbox.truncate(usize::try_from(keep).unwrap());
        }
    }

    fn kill(&mut self, at: usize) {
        self.cut(at);
        let side = &mut self.sides[at];
        (side.alive, side.running, side.open, side.index) = (false, false, false, None);
        side.machine = Ownership::new(true, self.plan.lock_reaches);
    }

    fn run(&mut self, steps: u32) {
        self.check();
        for step in 0..steps {
            self.step(step < self.plan.faults_until);
            self.check();
        }
        // Everything that is pending happens.
        for _ in 0..400 {
            self.step(false);
            self.check();
        }
    }
}

fn runs(plan: Plan, seeds: std::ops::Range<u64>) -> Vec<World> {
    let run = |seed| {
        let mut world = World::new(plan, seed);
        world.run(80);
        world
    };
    seeds.map(run).collect()
}

const PLAN: Plan = Plan {
    lock_reaches: true,
    careless: false,
    operator: false,
    believes: false,
    unchecked: false,
    faults_until: 80,
    failures: 0,
};

#[test]
fn never_two_owners_and_never_an_index_of_another_image() {
    for (lock_reaches, careless) in [(true, false), (true, true), (false, false), (false, true)] {
        let worlds = runs(Plan { lock_reaches, careless, ..PLAN }, 0..2500);
        let warm: u32 = worlds.iter().map(|world| world.warm).sum();
        assert!(warm > 200, "the model hands over: {warm}");
        runs(Plan { lock_reaches, careless, failures: 4, ..PLAN }, 0..2500);
    }
}

/// What a process heard before it was held up is old when it goes on: the operator may have decided otherwise meanwhile.
#[test]
fn disks_that_the_operator_took_back_are_not_taken_by_a_peer_that_was_held_up() {
    for careless in [false, true] {
        let plan = Plan { lock_reaches: false, operator: true, careless, ..PLAN };
        let worlds = runs(plan, 0..10_000);
        let taken: u32 = worlds.iter().map(|world| world.taken).sum();
        assert!(taken > 500, "the operator has something to do: {taken}");
        let found = std::panic::catch_unwind(|| runs(Plan { believes: true, ..plan }, 0..200_000));
        assert!(found.is_err(), "the model is blind");
    }
}

#[test]
fn a_guest_that_runs_alone_gets_its_disks_unless_only_the_operator_can_tell() {
    for (lock_reaches, failures) in [(true, 0), (false, 0), (true, 4), (false, 4)] {
        for (seed, world) in runs(Plan { lock_reaches, failures, ..PLAN }, 10_000..12_500).iter().enumerate() {
            for (at, side) in world.sides.iter().enumerate() {
                let other = &world.sides[1 - at];
                if !side.alive || !side.running || side.machine.serves() {
                    continue;
                }
                // Its connection is gone, and the other one holds the disks, or may hold them: the operator was told.
                let excused = !world.linked && (other.open || side.machine.told_stuck);
                assert!(lock_reaches || world.linked || side.machine.told_stuck, "seed {seed}: side {at} says nothing");
                assert!(excused, "seed {seed}: side {at} waits for ever: {:#?}", world.log);
            }
        }
    }
}

#[test]
fn a_received_index_that_is_not_compared_with_the_image_is_caught() {
    let found = std::panic::catch_unwind(|| runs(Plan { unchecked: true, careless: true, ..PLAN }, 0..20_000));
    assert!(found.is_err(), "the model is blind");
}

#[test]
fn the_ordinary_ways() {
    let now = Nanos(0);
    let drain = |machine: &mut Ownership| std::iter::from_fn(|| machine.poll_action()).collect::<Vec<_>>();
    let mut source = Ownership::new(false, true);
    source.handle_queues(now, true);
    source.handle_linked(now);
    source.handle_message(now, Message::Accept);
    assert_eq!(drain(&mut source), [], "while the guest runs");
    source.handle_queues(now, false);
    assert_eq!(drain(&mut source), [Action::Drain]);
    source.handle_drained(true);
    assert_eq!(drain(&mut source), [Action::SendState]);
    source.handle_sent();
    assert_eq!(drain(&mut source), [Action::Release, Action::Send(Message::Yours { state: true })]);
    assert!(!source.holds());
    // The hypervisor gives up: the guest continues here.
    source.handle_queues(now, true);
    assert_eq!(drain(&mut source), [Action::Send(Message::Want)]);

    let mut target = Ownership::new(true, true);
    target.handle_linked(now);
    target.handle_message(now, Message::Yours { state: true });
    assert_eq!(drain(&mut target), [Action::Lock]);
    target.handle_message(now, Message::Want);
    target.handle_locked(now, Locked::Unchanged);
    let busy = Action::Send(Message::Busy);
    assert_eq!(drain(&mut target), [busy, Action::Serve { warm: true }, Action::Drain]);
    let mut wrote = target.clone();
    target.handle_drained(false);
    assert_eq!(drain(&mut target), [Action::SendState]);
    assert!(target.gives_index());
    wrote.handle_drained(true);
    assert_eq!(drain(&mut wrote), [Action::SendState], "a flush that failed is still reported");
    assert!(!wrote.gives_index());
    wrote.handle_sent();
    assert_eq!(drain(&mut wrote), [Action::Release, Action::Send(Message::Yours { state: false })]);

    source.handle_message(now, Message::Yours { state: false });
    assert_eq!(drain(&mut source), [Action::Lock]);
    source.handle_locked(now, Locked::Changed);
    assert_eq!(drain(&mut source), [Action::Serve { warm: false }]);
}

#[test]
fn a_hand_over_that_is_called_off_while_the_state_is_sent_is_made_when_the_guest_stops_again() {
    let now = Nanos(0);
    let drain = |machine: &mut Ownership| std::iter::from_fn(|| machine.poll_action()).collect::<Vec<_>>();
    let mut source = Ownership::new(false, true);
    source.handle_linked(now);
    source.handle_message(now, Message::Accept);
    source.handle_drained(false);
    assert_eq!(drain(&mut source), [Action::Drain, Action::SendState]);
    source.handle_queues(now, true);
    source.handle_sent();
    assert_eq!(drain(&mut source), [], "the peer hears nothing of it");
    assert!(source.serves() && source.is_linked() && source.is_wanted());
    source.handle_queues(now, false);
    source.handle_drained(true);
    assert_eq!(drain(&mut source), [Action::Drain, Action::SendState]);
    source.handle_sent();
    assert_eq!(drain(&mut source), [Action::Release, Action::Send(Message::Yours { state: true })]);
}

#[test]
fn a_silent_peer_is_given_up_and_the_lock_decides_or_the_operator() {
    for lock_reaches in [true, false] {
        let mut source = Ownership::new(false, lock_reaches);
        source.handle_linked(Nanos(0));
        source.handle_message(Nanos(0), Message::Accept);
        source.handle_drained(false);
        source.handle_sent();
        source.handle_queues(Nanos(5), true);
        while source.poll_action().is_some() {}
        let due = source.next_deadline().unwrap();
        source.handle_message(due, Message::Busy);
        source.handle_timer(due);
        assert_eq!(source.poll_action(), Some(Action::Send(Message::Want)), "it lives, and is asked again");
        let due = source.next_deadline().unwrap();
        source.handle_timer(due);
        assert_eq!((source.poll_action(), source.poll_action()), (Some(Action::Disconnect), Some(Action::Forget)));
        if lock_reaches {
            assert_eq!(source.poll_action(), Some(Action::Lock));
            source.handle_locked(due, Locked::InUse);
            assert_eq!(source.poll_action(), None);
            source.handle_timer(source.next_deadline().unwrap());
        } else {
            assert_eq!((source.poll_action(), source.poll_action()), (Some(Action::TellStuck), None));
            assert_eq!(source.take_back(due), Ok(()));
        }
        assert_eq!(source.poll_action(), Some(Action::Lock));
        source.handle_locked(due, Locked::Changed);
        assert_eq!(source.poll_action(), Some(Action::Serve { warm: false }));
    }
}

#[test]
fn disks_of_a_peer_that_is_connected_are_not_taken_back_unless_a_lock_guards_them() {
    for lock_reaches in [true, false] {
        let mut source = Ownership::new(false, lock_reaches);
        source.handle_linked(Nanos(0));
        source.handle_message(Nanos(0), Message::Accept);
        source.handle_drained(false);
        source.handle_sent();
        while source.poll_action().is_some() {}
        assert_eq!(source.take_back(Nanos(0)).is_ok(), lock_reaches);
        let locks = std::iter::from_fn(|| source.poll_action()).any(|action| action == Action::Lock);
        assert_eq!(locks, lock_reaches);
        source.handle_lost(Nanos(0));
        assert!(source.holds() || source.take_back(Nanos(0)).is_ok());
    }
}

#[test]
fn the_disks_are_not_lost_with_the_message_that_gives_them() {
    let now = Nanos(0);
    for lock_reaches in [true, false] {
        // `Yours` was in transit when the connection broke: the guest starts where the disks never were.
        let mut target = Ownership::new(true, lock_reaches);
        target.handle_linked(now);
        target.handle_lost(now);
        assert_eq!(target.poll_action(), Some(Action::Forget));
        target.handle_queues(now, true);
        if !lock_reaches {
            assert_eq!((target.poll_action(), target.poll_action()), (Some(Action::TellStuck), None));
            assert_eq!(target.take_back(now), Ok(()));
        }
        assert_eq!((target.poll_action(), target.poll_action()), (Some(Action::Lock), None));
        target.handle_locked(now, Locked::Changed);
        assert_eq!(target.poll_action(), Some(Action::Serve { warm: false }));
    }
}

#[test]
fn an_image_in_use_goes_back_and_is_asked_for_again_but_only_if_it_was_given() {
    let drain = |machine: &mut Ownership| std::iter::from_fn(|| machine.poll_action()).collect::<Vec<_>>();
    let mut target = Ownership::new(true, true);
    target.handle_linked(Nanos(0));
    target.handle_queues(Nanos(0), true);
    target.handle_message(Nanos(0), Message::Yours { state: true });
    target.handle_locked(Nanos(0), Locked::InUse);
    let back = Action::Send(Message::Yours { state: false });
    assert_eq!(drain(&mut target), [Action::Send(Message::Want), Action::Lock, back]);
    target.handle_timer(target.next_deadline().unwrap());
    assert_eq!(drain(&mut target), [Action::Send(Message::Want)]);

    // Tried on the operator's word, before a connection came: what was not given does not go back.
    let mut source = Ownership::new(true, false);
    source.handle_queues(Nanos(0), true);
    assert_eq!(source.take_back(Nanos(0)), Ok(()));
    source.handle_linked(Nanos(0));
    source.handle_locked(Nanos(0), Locked::InUse);
    assert_eq!(drain(&mut source), [Action::TellStuck, Action::Lock]);
    source.handle_timer(source.next_deadline().unwrap());
    assert_eq!(drain(&mut source), [Action::Send(Message::Want)]);
}

/// Their storage may be away, and refuse both at once.
#[test]
fn images_that_neither_side_can_open_go_to_and_fro_with_a_pause() {
    let drain = |machine: &mut Ownership| std::iter::from_fn(|| machine.poll_action()).collect::<Vec<_>>();
    let back = Message::Yours { state: false };
    let [mut source, mut target] = [false, true].map(|incoming| Ownership::new(incoming, true));
    // It has failed because the source has them.
    target.handle_queues(Nanos(0), true);
    target.handle_locked(Nanos(0), Locked::InUse);
    for machine in [&mut source, &mut target] {
        machine.handle_linked(Nanos(0));
    }
    drain(&mut target);
    source.handle_message(Nanos(0), Message::Accept);
    source.handle_drained(false);
    source.handle_sent();
    drain(&mut source);
    for machine in [&mut target, &mut source] {
        machine.handle_message(Nanos(0), back);
        assert_eq!(drain(machine), [Action::Lock], "the other one had them a moment ago");
        machine.handle_locked(Nanos(0), Locked::InUse);
        assert_eq!(drain(machine), [Action::Send(back)]);
    }
    target.handle_message(Nanos(5), back);
    assert_eq!(drain(&mut target), [], "it has just failed");
    assert!(target.holds() && !target.has_disks() && !target.serves(), "nothing is open here meanwhile");
    // The operator need not wait for the end of the pause, nor is there anybody to give them back to then.
    let mut taken = target.clone();
    assert_eq!(taken.take_back(Nanos(6)), Ok(()));
    assert_eq!(drain(&mut taken), [Action::Disconnect, Action::Lock]);
    assert_eq!(taken.take_back(Nanos(6)), Err(NotTaken::Here), "they are tried");
    taken.handle_locked(Nanos(6), Locked::InUse);
    assert_eq!((drain(&mut taken), taken.holds()), (Vec::new(), false));
    // Nor does it try at once, or never, when there is nobody left to give them back to.
    let mut alone = target.clone();
    alone.handle_lost(Nanos(6));
    for (mut machine, given) in [(target, true), (alone, false)] {
        let due = machine.next_deadline().unwrap();
        assert_eq!((drain(&mut machine), due), (Vec::new(), Nanos(LOCK_AGAIN_AFTER)));
        machine.handle_timer(due);
        assert_eq!(drain(&mut machine), [Action::Lock]);
        let mut fails = machine.clone();
        fails.handle_locked(due, Locked::InUse);
        assert_eq!(drain(&mut fails).contains(&Action::Send(back)), given);
        machine.handle_locked(due, Locked::Changed);
        assert_eq!(drain(&mut machine), [Action::Serve { warm: false }]);
    }
}

#[test]
fn a_drain_that_takes_long_keeps_the_peer_waiting() {
    let mut owner = Ownership::new(false, true);
    owner.handle_linked(Nanos(0));
    for _ in 0..3 {
        owner.handle_message(Nanos(0), Message::Want);
    }
    let said: Vec<_> = std::iter::from_fn(|| owner.poll_action()).collect();
    let busy = Action::Send(Message::Busy);
    assert_eq!(said, [busy, Action::Drain, busy, busy]);
}

/// No lock tells, so the word of the peer must be fresh when the guest is served.
#[test]
fn what_no_lock_guards_is_served_once_the_peer_has_confirmed_it_within_a_second() {
    let drain = |machine: &mut Ownership| std::iter::from_fn(|| machine.poll_action()).collect::<Vec<_>>();
    let [mut source, mut target] = [false, true].map(|incoming| Ownership::new(incoming, false));
    for machine in [&mut source, &mut target] {
        machine.handle_linked(Nanos(0));
    }
    let mut stranger = target.clone();
    stranger.handle_message(Nanos(0), Message::Confirm);
    assert_eq!(drain(&mut stranger), [Action::Disconnect, Action::Forget], "it has given nothing");
    source.handle_message(Nanos(0), Message::Accept);
    source.handle_drained(false);
    source.handle_sent();
    drain(&mut source);
    target.handle_message(Nanos(0), Message::Yours { state: true });
    target.handle_locked(Nanos(5), Locked::Unchanged);
    assert_eq!(drain(&mut target), [Action::Lock, Action::Send(Message::Confirm)]);
    assert!(target.holds() && !target.has_disks());
    assert_eq!(target.take_back(Nanos(5)), Err(NotTaken::PeerIsConnected));
    assert!(source.owes_word(), "a process that ends waits for the question");
    source.handle_message(Nanos(7), Message::Confirm);
    assert_eq!(drain(&mut source), [Action::Send(Message::Confirmed)]);
    assert!(!source.owes_word());
    // Whoever is held up for longer asks again.
    let mut late = target.clone();
    late.handle_message(Nanos(6 + CONFIRMED_FOR), Message::Confirmed);
    assert_eq!((drain(&mut late), late.serves()), (vec![Action::Send(Message::Confirm)], false));
    late.handle_message(Nanos(6 + 2 * CONFIRMED_FOR), Message::Confirmed);
    assert_eq!(drain(&mut late), [Action::Serve { warm: true }]);
    // So nothing is taken back before that.
    source.handle_lost(Nanos(8));
    assert_eq!(source.take_back(Nanos(6 + 2 * CONFIRMED_FOR)), Err(NotTaken::JustConfirmed));
    assert_eq!(source.take_back(Nanos(7 + 2 * CONFIRMED_FOR)), Ok(()));
    // Without the connection nobody confirms anything.
    let mut lost = target.clone();
    lost.handle_queues(Nanos(8), true);
    lost.handle_lost(Nanos(8));
    assert_eq!(drain(&mut lost), [Action::Close, Action::Forget, Action::TellStuck]);
    assert!(!lost.holds());
    target.handle_message(Nanos(5 + CONFIRMED_FOR), Message::Confirmed);
    assert_eq!(drain(&mut target), [Action::Serve { warm: true }]);
    target.handle_message(Nanos(9), Message::Confirmed);
    assert_eq!(drain(&mut target), [Action::Disconnect], "it did not ask");
}

/// The connection may break while the images are opened.
#[test]
fn what_no_lock_guards_is_closed_again_if_the_peer_is_gone_before_it_could_confirm() {
    let drain = |machine: &mut Ownership| std::iter::from_fn(|| machine.poll_action()).collect::<Vec<_>>();
    let mut target = Ownership::new(true, false);
    target.handle_linked(Nanos(0));
    target.handle_message(Nanos(0), Message::Yours { state: true });
    target.handle_lost(Nanos(0));
    assert_eq!(drain(&mut target), [Action::Lock]);
    target.handle_locked(Nanos(0), Locked::Unchanged);
    assert_eq!((drain(&mut target), target.holds()), (vec![Action::Close, Action::Forget], false));
}
