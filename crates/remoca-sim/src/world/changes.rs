//! Disks come, go, grow and shrink while the process runs. It may die between any two stores of it.
//!
//! What the state file of a real process says about the disks is here in `Vm::records`: which image has which number.

use super::vm::{FlushFailure, Vm, new_disk};
use super::{Event, Outcome, World};
use crate::guest::touched;
use remoca_core::engine::DiskEngine;
use remoca_core::units::DiskIndex;

/// Number of attempts to find a disk without requests.
const ATTEMPTS: u32 = 200;

/// Change of a disk.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Change {
    /// Another image in its place.
    Replace,
    /// This many sectors.
    Size(usize),
}

impl World<'_> {
    /// Begins a change: a step of the plan. The guest sends no more requests to a disk that goes or shrinks.
    pub(super) fn begin_change(&mut self, disk: u16, change: Change) -> Outcome {
        self.vm.detached[usize::from(disk)] |= !self.grows(disk, change);
        self.change(disk, change, ATTEMPTS)
    }

    fn grows(&self, disk: u16, change: Change) -> bool {
        matches!(change, Change::Size(sectors) if sectors >= self.vm.sizes[usize::from(disk)])
    }

    /// Changes a disk, or tries again later if it is in use or nobody could make the change.
    pub(super) fn change(&mut self, disk: u16, change: Change, attempts: u32) -> Outcome {
        let at = usize::from(disk);
        let is_free = self.grows(disk, change) || self.vm.disks[at].is_idle() && !self.vm.guest.uses(disk);
        if !is_free || !self.accepts() || self.vm.is_dead() {
            match attempts.checked_sub(1) {
                Some(attempts) => self.schedule(self.plan.scenario.disk_ns, Event::Change(disk, change, attempts)),
                None => self.vm.detached[at] = false,
            }
            return Ok(());
        }
        self.vm.detached[at] = false;
        self.note(Some((disk, touched(&(0..self.vm.machine.sectors)))), || format!("disk {disk}: {change:?}"));
        self.tally.disk_changes += 1;
        match change {
            Change::Size(sectors) => {
                if sectors < self.vm.sizes[at] {
                    self.vm.disks[at].cut(sectors, self.event);
                    self.vm.guest.disturb(disk);
                }
                self.vm.sizes[at] = sectors;
                self.vm.engine.resize_disk(self.vm.index_of(disk), sectors as u64 * 512);
                self.execute()
            }
            Change::Replace => {
                self.replace(disk);
                if self.vm.is_dead() { Ok(()) } else { self.attach(disk) }
            }
        }
    }

    fn replace(&mut self, disk: u16) {
        let (vm, at) = (&mut self.vm, usize::from(disk));
        vm.images[at] += 1;
        vm.sizes[at] = vm.machine.sectors;
        vm.disks[at] = new_disk(vm.number, disk + 64 * vm.images[at], vm.machine.sectors);
        vm.flush_failed[at] = FlushFailure::default();
        vm.guest.drop_disk(disk);
        if let Some(number) = vm.numbers[at].take() {
            vm.engine.remove_disk(number);
            if !vm.is_dead() {
                vm.records.remove(&number);
            }
        }
    }

    /// Adds a disk to the process, if a number is free. Otherwise tries again later.
    pub(super) fn attach(&mut self, disk: u16) -> Outcome {
        let at = usize::from(disk);
        if !self.vm.up || self.vm.numbers[at].is_some() {
            return Ok(());
        }
        match self.vm.engine.add_disk(self.vm.bytes(disk), self.vm.is_declared(disk)) {
            Some(number) if !self.vm.is_dead() => self.vm.record(disk, number),
            Some(_) => {}
            None => self.schedule(self.plan.scenario.disk_ns, Event::Attach(disk)),
        }
        self.execute()
    }
}

impl Vm<'_> {
    /// Returns the number of a disk, or one that no disk has.
    pub(super) fn index_of(&self, disk: u16) -> DiskIndex {
        self.numbers[usize::from(disk)].unwrap_or(DiskIndex(4095))
    }

    /// Returns the disk that has this number.
    pub(super) fn disk_of(&self, number: DiskIndex) -> u16 {
        let at = self.numbers.iter().position(|has| *has == Some(number));
        at.and_then(|at| u16::try_from(at).ok()).expect("the engine asks only disks that there are")
    }

    pub(super) fn bytes(&self, disk: u16) -> u64 {
        self.sizes[usize::from(disk)] as u64 * 512
    }

    fn is_declared(&self, disk: u16) -> bool {
        self.machine.declared_swap && disk == 0
    }

    fn record(&mut self, disk: u16, number: DiskIndex) {
        self.numbers[usize::from(disk)] = Some(number);
        self.records.insert(number, (disk, self.images[usize::from(disk)]));
    }

    /// Gives the disks the numbers under which the last process had them, or free ones, and removes all others.
    pub(super) fn number_disks(&mut self) {
        self.numbers.fill(None);
        let is_known = |engine: &DiskEngine<_>, number: &DiskIndex| engine.is_known(*number);
        for number in self.engine.index().disks().filter(|number| is_known(&self.engine, number)).collect::<Vec<_>>() {
            match self.records.get(&number).copied() {
                Some((disk, image)) if image == self.images[usize::from(disk)] => self.record(disk, number),
                _ => {
                    self.engine.remove_disk(number);
                    self.records.remove(&number);
                }
            }
        }
        for disk in 0..self.machine.disks {
            let (bytes, is_declared) = (self.bytes(disk), self.is_declared(disk));
            match self.numbers[usize::from(disk)] {
                Some(number) => self.engine.describe_disk(number, bytes, is_declared),
                None => {
                    let number = self.engine.add_disk(bytes, is_declared).or_else(|| {
                        self.engine.forget_removed();
                        self.engine.add_disk(bytes, is_declared)
                    });
                    number.into_iter().for_each(|number| self.record(disk, number));
                }
            }
        }
    }

    /// Gives the disks other numbers, in a process elsewhere that gets the index.
    pub(super) fn move_numbers(&mut self) {
        // The last one first, so that the numbers differ.
        let here = (0..self.machine.disks).rev().map(DiskIndex);
        let numbers = std::mem::take(&mut self.numbers);
        self.moved =
            Some(numbers.iter().zip(here.clone()).filter_map(|(there, here)| Some(((*there)?, here))).collect());
        self.numbers = numbers.iter().zip(here).map(|(there, here)| there.map(|_| here)).collect();
        let records = (0..).zip(&self.numbers).zip(&self.images);
        self.records = records.filter_map(|((disk, number), image)| Some(((*number)?, (disk, *image)))).collect();
    }
}
