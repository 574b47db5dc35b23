//! VM processes die, at any point of their work, and are restarted; so are hosts.
//!
//! Requests of the dead process to a disk take effect later, in part or never, but before its successor gets the
//! image's lock. The successor then receives all pending requests of the guest, in the order of arrival.

use super::local::LOCAL;
use super::region::{Fuse, Region};
use super::vm::{cold_engine, warm_engine};
use super::{Event, Outcome, World};
use crate::HostRule;
use crate::disk::LATE_PORTIONS;
use crate::guest::DiskState;
use crate::plan::{Kill, Kind, Point};
use crate::violation::{Promise, Violation};
use remoca_core::engine::{DiskEngine, Leaving};
use remoca_core::index::Origin;
use remoca_core::units::PageCount;
use std::rc::Rc;

/// Kind of end of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// Another program replaces it, with no request of the guest in flight. Servers may owe pages.
    Upgraded,
    /// A process elsewhere replaces it, with no request in flight.
    Clean,
    Killed,
}

impl World<'_> {
    /// Arranges the death of the process: a step of the plan.
    pub(super) fn kill(&mut self, kill: Kill) {
        if !self.vm.up || self.vm.moving.is_some() {
            return;
        }
        self.note(None, || format!("{kill:?}"));
        self.vm.doom = Some(kill);
        match kill.point {
            Point::Now => self.vm.actions_left = Some(0),
            Point::Actions(count) => self.vm.actions_left = Some(count + 1),
            Point::Stores(count) => self.vm.fuse.light(count),
        }
    }

    /// Cleans up after a process that died during an event.
    pub(super) fn bury(&mut self) {
        let kill = self.vm.doom.unwrap_or(Kill { point: Point::Now, down_ns: 0, cold: true, changed: false });
        self.note(None, || "the process dies".into());
        self.tally.kills += 1;
        self.end_process(End::Killed);
        if kill.changed {
            self.change_image();
        }
        if kill.cold || (self.vm.machine.remote_store && self.holds(HostRule::LocalStore)) {
            self.vm.remains = None;
        }
        self.schedule(kill.down_ns, Event::Start);
    }

    /// Removes the process. Its messages in flight stay in the network.
    pub(super) fn end_process(&mut self, end: End) {
        self.lose_session();
        let vm = &mut self.vm;
        vm.local.lose_process(end != End::Killed);
        self.tally.stats.add(&vm.engine.stats());
        match end {
            End::Upgraded => {
                self.tally.upgrades_owed += u64::from(vm.engine.is_owed_pages());
                vm.engine.close();
            }
            End::Clean => vm.engine.end(),
            End::Killed => {}
        }
        let torn = vm.fuse.has_burnt();
        self.tally.torn_indexes += u64::from(torn);
        vm.knew = (!torn).then(|| vm.knowledge());
        let (empty, fuse) =
            cold_engine(&remoca_core::engine::EngineConfig { cache: PageCount(0), local: PageCount(0), ..vm.config });
        vm.engine = empty;
        vm.remains = std::mem::replace(&mut vm.fuse, fuse).take_remains();
        vm.up = false;
        vm.doom = None;
        vm.actions_left = None;
        vm.timer_at = None;
        vm.captured.clear();
        vm.starved.clear();
        for id in vm.guest.by_arrival() {
            if let Some(pending) = vm.guest.pending(id)
                && let (Kind::Flush, DiskState::Done(result)) = (pending.kind, &pending.state)
            {
                vm.disks[usize::from(pending.disk)].result_unheard(*result);
            }
        }
        vm.upgrade_since = None;
        vm.guest.begin_anew();
        if end == End::Killed {
            self.orphan_ios();
        }
    }

    /// Orphans the dead process's disk I/O: it takes effect later, or not at all.
    fn orphan_ios(&mut self) {
        for disk in 0..self.vm.machine.disks {
            for io in self.vm.disks[usize::from(disk)].orphan(self.event, &mut self.random) {
                let late_ns = self.plan.scenario.disk_ns * 20;
                for portion in LATE_PORTIONS {
                    let ns = self.random.below(late_ns);
                    self.schedule(ns, Event::Portion { disk, io, portion });
                }
                self.schedule(late_ns, Event::IoDone { disk, io });
            }
        }
    }

    /// Cancels all deaths, and starts all processes, because the plan is over.
    pub(super) fn spare(&mut self) {
        if self.vm.up && !self.vm.is_dead() {
            self.vm.fuse.put_out();
            self.vm.actions_left = None;
        }
        self.schedule(0, Event::Start);
    }

    /// Drops all connections of the process.
    fn lose_session(&mut self) {
        while let Some(wire) = self.vm.wires.first() {
            self.drop_connection(wire.id);
        }
        for (server, connection) in std::mem::take(&mut self.vm.answered) {
            let server = self.vm.server(server);
            self.abandon(server, connection);
        }
        self.vm.asked.clear();
    }

    /// Writes to an image as a foreign writer.
    fn change_image(&mut self) {
        let disk = self.random.index(self.vm.disks.len());
        let first = self.random.index(self.vm.machine.sectors);
        let last = (first + 1 + self.random.index(64)).min(self.vm.machine.sectors);
        self.note(None, || format!("somebody else writes to sectors {first}..{last} of disk {disk}"));
        self.tally.images_changed += 1;
        self.vm.disks[disk].overwrite(first..last, self.event, &mut self.random);
        self.image_changed();
    }

    /// Discards the state of the last process, because an image changed while there was none, unless that rule is left
    /// out.
    pub(super) fn image_changed(&mut self) {
        if self.holds(HostRule::ImageUnchanged) {
            self.vm.remains = None;
        }
    }

    /// Starts the process as soon as it can lock its images.
    pub(super) fn start(&mut self) -> Outcome {
        if self.vm.up || self.vm.moving.is_some() {
            return Ok(());
        }
        let host_is_up = self.hosts[self.vm.host] <= self.now;
        let locked = self.holds(HostRule::ImageLock) && !self.vm.disks.iter().all(crate::disk::ModelDisk::is_idle);
        if locked || !host_is_up {
            let again_ns = if host_is_up { self.plan.scenario.disk_ns / 4 + 1 } else { 100_000_000 };
            self.schedule(again_ns, Event::Start);
            return Ok(());
        }
        self.start_process()
    }

    /// Starts the process, which has locked its images.
    pub(super) fn start_process(&mut self) -> Outcome {
        self.vm.config.guest_memory = PageCount(self.vm.resident);
        let moved = self.vm.moved.take();
        let leaving = if moved.is_some() { Leaving::AtOnce } else { Leaving::Drained };
        let origin = moved.as_ref().map_or(Origin::Own, |moved| Origin::Peer(moved));
        match self.vm.remains.take().and_then(|words| warm_engine(&self.vm.config, words, origin)) {
            Some((engine, fuse)) => self.start_warm(engine, fuse)?,
            None => self.start_cold(),
        }
        if moved.is_some() {
            self.vm.local.forget_counts();
        }
        let servers = self.listed_servers();
        let local = (self.vm.machine.local > 0).then_some(LOCAL);
        self.vm.engine.set_local_server(self.clock(), local);
        self.vm.engine.set_servers(self.clock(), &servers, leaving);
        self.execute()?;
        self.hand_over_all()
    }

    /// Cancels the promises about failed flushes that the guest was told of: a process that starts cold does not know them.
    fn forget_flush_failures(&mut self) {
        let vm = &mut self.vm;
        for (disk, failed) in vm.disks.iter_mut().zip(&mut vm.flush_failed) {
            if std::mem::take(failed).told {
                disk.forgive();
            }
        }
        for id in vm.guest.by_arrival() {
            if let Some(pending) = vm.guest.pending(id).filter(|pending| pending.kind == Kind::Flush) {
                let now = vm.disks[usize::from(pending.disk)].flush_promise();
                pending.promise.iter_mut().zip(now).for_each(|(promised, now)| *promised = now.min(*promised));
            }
        }
    }

    fn start_cold(&mut self) {
        self.note(None, || "the process starts cold".into());
        self.tally.cold_starts += 1;
        self.vm.token += 1;
        self.vm.local.end_pools();
        let (engine, fuse) = cold_engine(&self.vm.config);
        self.vm.begin(engine, fuse);
        self.forget_flush_failures();
    }

    fn start_warm(&mut self, engine: DiskEngine<Region>, fuse: Rc<Fuse>) -> Outcome {
        self.note(None, || "the process starts warm".into());
        self.tally.warm_starts += 1;
        self.vm.begin(engine, fuse);
        let is_off = self.vm.config.cache.0 + self.vm.config.local.0 == 0;
        if let Some(knew) = self.vm.knew.take().filter(|_| !is_off)
            && knew != self.vm.knowledge()
        {
            let text = format!("{knew:?} was known, and {:?} is", self.vm.knowledge());
            self.fail(Violation::new(Promise::Useful, text))?;
        }
        self.set_sizes();
        Ok(())
    }

    /// Fails a host with everything on it: a step of the plan.
    pub(super) fn host_fault(&mut self, host: usize, down_ns: u64) -> Outcome {
        self.note(None, || format!("host {host} fails for {} ms", down_ns / 1_000_000));
        self.tally.host_faults += 1;
        self.hosts[host] = self.now.plus_ns(down_ns);
        for server in 0..self.donors.len() {
            if self.plan.scenario.host_of_server(server) == host {
                self.gone(server, down_ns);
            }
        }
        self.for_each_vm(|world| {
            if world.vm.host == host {
                world.vm_fails();
                world.schedule(down_ns, Event::Start);
            }
            Ok(())
        })
    }

    /// Fails the host of a VM. The process, the guest, and all data that was not durable are lost.
    fn vm_fails(&mut self) {
        self.vm.moving = None;
        if self.vm.up {
            self.end_process(End::Killed);
        }
        self.vm.local.end_pools();
        if self.holds(HostRule::SameBoot) {
            self.vm.remains = None;
        }
        self.vm.guest.reboot();
        for disk in &mut self.vm.disks {
            disk.crash(self.event, &mut self.random);
        }
    }

    /// Checks that every process is running at the end.
    pub(super) fn check_up(&mut self) -> Outcome {
        if self.vm.up {
            return Ok(());
        }
        self.fail(Violation::new(Promise::Useful, "the process was never started again"))
    }
}
