//! Orderly replacement of a VM process: by another program on the same host, or by a process on another host.
//!
//! An upgrade waits for the guest's requests in flight, and continues in the next process with the words as they are.
//! A migration is two [`Ownership`] machines and a connection between them, which may break at any time. The plan
//! decides where the hypervisor runs the guest, also back and forth. Only the owner's process has an engine.

use super::process::End;
use super::{Event, Outcome, World};
use crate::HostRule;
use crate::disk::ModelDisk;
use crate::violation::{Promise, Violation};
use remoca_core::migration::{Action, Locked, Message, Ownership};
use remoca_core::units::Nanos;

/// Time that the drain for an upgrade may take, in nanoseconds.
const DRAIN_PATIENCE_NS: u64 = 1_000_000_000;

/// A migration in progress.
#[derive(Debug)]
pub(super) struct Moving {
    id: u64,
    sides: [Ownership; 2],
    hosts: [usize; 2],
    /// Hosts where the guest runs next; the last is the next.
    hops: Vec<usize>,
    guest_at: Option<usize>,
    /// The side that has locked the images.
    owner: Option<usize>,
    /// Whether data was written since then.
    pub(super) wrote: bool,
    /// Number of changes of the connection; odd while it is up.
    link: u64,
    /// Arrival time of the last message. The next one arrives no earlier.
    arrived_at: Nanos,
    received: [Option<Vec<u32>>; 2],
    /// A side's index at the time when it handed over the disks: worthless.
    kept: [Option<Vec<u32>>; 2],
    timer_at: Option<Nanos>,
}

/// An event of a migration.
#[derive(Debug)]
pub(crate) enum Move {
    Link,
    Cut,
    Message { link: u64, to: usize, message: Message },
    State { link: u64, to: usize, words: Vec<u32> },
    Sent { link: u64, side: usize },
    Drained { side: usize },
    Lock { side: usize },
    StopGuest,
    RunGuest,
    Timer,
}

impl World<'_> {
    /// Starts the upgrade to another program: a step of the plan.
    pub(super) fn upgrade(&mut self) {
        if self.vm.up && self.vm.doom.is_none() && self.vm.moving.is_none() && self.vm.upgrade_since.is_none() {
            self.note(None, || "the process is to be upgraded".into());
            self.vm.upgrade_since = Some(self.now);
            self.schedule(0, Event::Upgrade);
        }
    }

    /// Continues an upgrade if all requests have drained.
    pub(super) fn go_on_with_upgrade(&mut self) -> Outcome {
        let Some(since) = self.vm.upgrade_since.filter(|_| self.vm.up) else { return Ok(()) };
        if !self.is_drained() {
            if self.now.since_ns(since) > DRAIN_PATIENCE_NS {
                self.note(None, || "the upgrade is given up".into());
                self.vm.upgrade_since = None;
                return self.hand_over_all();
            }
            self.schedule(self.plan.scenario.disk_ns / 2 + 1, Event::Upgrade);
            return Ok(());
        }
        self.tally.upgrades += 1;
        self.end_process(End::Upgraded);
        self.start()
    }

    fn is_drained(&self) -> bool {
        self.vm.engine.requests_in_flight() == 0 && self.vm.disks.iter().all(ModelDisk::is_idle)
    }

    /// Starts the VM's migration to `host`, and on from there: a step of the plan.
    pub(super) fn migrate(&mut self, host: usize, hops: &[usize]) {
        if !self.vm.up || self.vm.doom.is_some() || self.vm.moving.is_some() || self.vm.upgrade_since.is_some() {
            return;
        }
        self.note(None, || format!("the VM migrates to host {host}: {hops:?}"));
        self.tally.migrations += 1;
        let mut sides = [Ownership::new(false, true), Ownership::new(true, true)];
        sides[0].handle_queues(self.clock(), true);
        self.vm.moving = Some(Moving {
            id: self.event,
            sides,
            hosts: [self.vm.host, host],
            hops: hops.iter().rev().map(|side| side % 2).collect(),
            guest_at: Some(0),
            owner: Some(0),
            wrote: false,
            link: 0,
            arrived_at: Nanos(0),
            received: [None, None],
            kept: [None, None],
            timer_at: None,
        });
        self.schedule_move(0, Move::Link);
        let ns = self.random.below(self.plan.scenario.disk_ns * 20);
        self.schedule_move(ns, Move::StopGuest);
        if self.plan.scenario.faults.network {
            let ns = self.random.below(self.plan.scenario.disk_ns * 60);
            self.schedule_move(ns, Move::Cut);
        }
    }

    fn schedule_move(&mut self, in_ns: u64, what: Move) {
        if let Some(id) = self.vm.moving.as_ref().map(|moving| moving.id) {
            self.schedule(in_ns, Event::Move(id, what));
        }
    }

    /// Returns whether the process accepts the guest's requests now.
    pub(super) fn accepts(&self) -> bool {
        let here =
            self.vm.moving.as_ref().is_none_or(|moving| moving.guest_at.is_some() && moving.guest_at == moving.owner);
        self.vm.up && here && self.vm.upgrade_since.is_none()
    }

    /// Returns whether there is a running guest, which could submit requests.
    pub(super) fn guest_runs(&self) -> bool {
        self.hosts[self.vm.host] <= self.now && self.vm.moving.as_ref().is_none_or(|moving| moving.guest_at.is_some())
    }

    /// Handles an event of a migration.
    pub(super) fn go_on_with_move(&mut self, id: u64, what: Move) -> Outcome {
        let (now, random) = (self.now, self.random.bits());
        let drained = self.is_drained();
        let up = self.vm.up;
        let disk_ns = self.plan.scenario.disk_ns;
        // A remote store does not show whether it was written to or came back from a crash.
        let shows_changes = !self.vm.machine.remote_store || !self.holds(HostRule::LocalStore);
        let Some(moving) = self.vm.moving.as_mut().filter(|moving| moving.id == id) else { return Ok(()) };
        match what {
            Move::Link => {
                moving.link += 1;
                moving.sides.iter_mut().for_each(|side| side.handle_linked(now));
                if !moving.sides[1].holds() {
                    let link = moving.link;
                    self.schedule_move(1, Move::Message { link, to: 0, message: Message::Accept });
                }
            }
            Move::Cut => self.cut_link(),
            Move::Message { link, to, message } if link == moving.link => {
                self.note(None, || format!("side {to} gets {message:?}"));
                if let Some(moving) = &mut self.vm.moving {
                    moving.sides[to].handle_message(now, message);
                }
            }
            Move::State { link, to, words } if link == moving.link => moving.received[to] = Some(words),
            Move::Sent { link, side } if link == moving.link => moving.sides[side].handle_sent(),
            Move::Message { .. } | Move::State { .. } | Move::Sent { .. } => {}
            Move::Drained { side } if drained => {
                let wrote = moving.wrote;
                moving.sides[side].handle_drained(wrote);
            }
            Move::Drained { side } => self.schedule_move(disk_ns / 2 + 1, Move::Drained { side }),
            Move::Lock { side } => {
                let free = moving.owner.is_none();
                if free {
                    (moving.owner, moving.wrote) = (Some(side), false);
                }
                let locked = if shows_changes { Locked::Unchanged } else { Locked::Changed };
                moving.sides[side].handle_locked(now, if free { locked } else { Locked::InUse });
            }
            Move::StopGuest => {
                moving.guest_at = None;
                if up && !drained {
                    self.schedule_move(disk_ns / 2 + 1, Move::StopGuest);
                } else {
                    moving.sides.iter_mut().for_each(|side| side.handle_queues(now, false));
                    self.schedule_move(random % (disk_ns * 8), Move::RunGuest);
                }
            }
            Move::RunGuest => {
                let side = moving.hops.pop().unwrap_or(0);
                moving.guest_at = Some(side);
                moving.sides[side].handle_queues(now, true);
                if !moving.hops.is_empty() {
                    self.schedule_move(random % (disk_ns * 40), Move::StopGuest);
                }
                self.note(None, || format!("the guest runs at side {side}"));
                self.hand_over_all()?;
            }
            Move::Timer => moving.sides.iter_mut().for_each(|side| side.handle_timer(now)),
        }
        self.execute_moves()?;
        self.finish_move();
        Ok(())
    }

    /// Breaks the connection between the two sides; the operator makes another one.
    fn cut_link(&mut self) {
        let now = self.now;
        let ns = self.random.between(1_000_000..=3_000_000_000);
        let Some(moving) = &mut self.vm.moving else { return };
        if moving.link % 2 == 1 {
            moving.link += 1;
            moving.sides.iter_mut().for_each(|side| side.handle_lost(now));
            self.note(None, || "the connection between the sides breaks".into());
            self.schedule_move(ns, Move::Link);
        }
    }

    fn execute_moves(&mut self) -> Outcome {
        loop {
            let Some(moving) = &mut self.vm.moving else { return Ok(()) };
            let mut sides = moving.sides.iter_mut().enumerate();
            let Some((side, action)) = sides.find_map(|(side, machine)| Some((side, machine.poll_action()?))) else {
                break;
            };
            self.note(None, || format!("side {side}: {action:?}"));
            self.do_move(side, action)?;
        }
        let Some(moving) = &mut self.vm.moving else { return Ok(()) };
        let deadline = moving.sides.iter().filter_map(Ownership::next_deadline).min();
        if let Some(at) = deadline.filter(|at| moving.timer_at.is_none_or(|armed| armed <= self.now || *at < armed)) {
            moving.timer_at = Some(at);
            self.schedule_move(at.since_ns(self.now), Move::Timer);
        }
        Ok(())
    }

    fn do_move(&mut self, side: usize, action: Action) -> Outcome {
        let latency = self.random.between(1..=self.plan.scenario.network_ns * 4);
        let state = (action == Action::SendState).then(|| {
            let mut words = self.vm.engine.closed_head();
            words.extend_from_slice(&self.vm.engine.index().words()[words.len()..]);
            words
        });
        let Some(moving) = &mut self.vm.moving else { return Ok(()) };
        let link = moving.link;
        let arrives = self.now.plus_ns(latency).max(moving.arrived_at);
        match action {
            Action::Drain => self.schedule_move(1, Move::Drained { side }),
            Action::SendState => {
                moving.arrived_at = arrives;
                self.schedule_move(
                    arrives.since_ns(self.now),
                    Move::State { link, to: 1 - side, words: state.unwrap_or_default() },
                );
                self.schedule_move(latency / 2, Move::Sent { link, side });
            }
            Action::Release => {
                moving.owner = None;
                self.end_process(End::Clean);
                let remains = self.vm.remains.take();
                if let Some(moving) = &mut self.vm.moving {
                    moving.kept[side] = remains;
                }
            }
            Action::Send(message) => {
                moving.arrived_at = arrives;
                self.schedule_move(arrives.since_ns(self.now), Move::Message { link, to: 1 - side, message });
            }
            Action::Disconnect => {
                if moving.link % 2 == 1 {
                    moving.link += 1;
                    let now = self.now;
                    moving.sides[1 - side].handle_lost(now);
                    self.schedule_move(latency + 1_000_000_000, Move::Link);
                }
            }
            // Its images are files, whose lock tells.
            Action::Close => moving.owner = None,
            Action::Forget => moving.received[side] = None,
            Action::Lock => self.schedule_move(latency, Move::Lock { side }),
            Action::Serve { warm } => return self.serve(side, warm),
            Action::TellStuck => {}
        }
        Ok(())
    }

    fn serve(&mut self, side: usize, warm: bool) -> Outcome {
        let cold_rule = self.holds(HostRule::MovedIsCold);
        let ahead_ns = self.random.below(1_000_000_000_000);
        let Some(moving) = &mut self.vm.moving else { return Ok(()) };
        if self.vm.up || moving.owner != Some(side) {
            let text = format!("side {side} serves, and the disks are {:?}'s", moving.owner);
            return self.fail(Violation::new(Promise::OneOwner, text));
        }
        let received = moving.received[side].take();
        let kept = moving.kept[side].take();
        self.vm.remains = match (warm, cold_rule) {
            (true, _) => received,
            (false, true) => None,
            (false, false) => kept,
        };
        self.vm.host = moving.hosts[side];
        if warm {
            self.vm.move_numbers();
        }
        self.vm.ahead_ns = ahead_ns;
        self.tally.moved_warm += u64::from(warm);
        self.tally.moved_cold += u64::from(!warm);
        self.vm.knew = None;
        self.start_process()
    }

    /// Ends the migration if the guest is at its destination and has its disks.
    fn finish_move(&mut self) {
        let done = self.vm.moving.as_ref().is_some_and(|moving| {
            let at = moving.guest_at;
            moving.hops.is_empty() && at.is_some_and(|at| moving.sides[at].serves()) && at == moving.owner && self.vm.up
        });
        if done {
            self.note(None, || "the migration is over".into());
            self.vm.moving = None;
        }
    }

    /// Passes all waiting requests of the guest to the process, as long as it accepts them.
    pub(super) fn hand_over_all(&mut self) -> Outcome {
        for id in self.vm.guest.by_arrival() {
            if self.accepts() && !self.vm.is_dead() && !self.vm.engine_has(id) {
                self.hand_over(id)?;
            }
        }
        Ok(())
    }
}
