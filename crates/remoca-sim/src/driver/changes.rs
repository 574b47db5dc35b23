//! Disks that come and go, and images that change their size. The process gets other disks when its next program takes over,
//! or when it is started again.

use super::Flaw;
use super::disks::DiskSide;
use super::plan::Fate;
use super::world::{Event, Outcome, World};
use crate::content::SECTOR_SIZE;
use remoca_disk::clock::Clock;

const MS: u64 = 1_000_000;
/// Time after which no guest comes back.
const NEVER_NS: u64 = 1 << 60;

impl World<'_> {
    /// Removes a disk with its guest, unless it is the only one or its guest cannot leave now. Or the process is stopped, and
    /// started again with another image behind the name.
    pub(super) fn remove_disk(&mut self, number: usize) -> Outcome {
        let wanted = self.disks.iter().filter(|disk| disk.is_wanted).count();
        if !self.disks[number].is_wanted || wanted < 2 || self.process.is_none() {
            return Ok(());
        }
        self.guest_gone(number, NEVER_NS);
        if !self.disks[number].guest.is_gone {
            return Ok(());
        }
        if self.disks[number].model.is_idle() && self.random.one_in(2) {
            self.note(|| format!("disk {number} gets another image"));
            self.tally.images_replaced += 1;
            self.die(self.plan.conditions.is_named)?;
            self.replace_image(number);
            self.schedule(MS, Event::Start);
        } else {
            self.note(|| format!("disk {number} is to go"));
            self.tally.disks_removed += 1;
            self.disks[number].is_wanted = false;
            self.upgrade(Fate::TakesOver);
        }
        Ok(())
    }

    /// Puts another image, with a guest of its own, behind the name of a disk.
    fn replace_image(&mut self, number: usize) {
        let disk = &mut self.disks[number];
        let (generation, plan) = (disk.generation + 1, disk.plan.clone());
        *disk = DiskSide::new(number, generation, &plan);
    }

    /// Adds a disk that was removed, once nothing of its former guest is in flight.
    pub(super) fn add_disk(&mut self, number: usize) {
        let disk = &mut self.disks[number];
        if disk.is_wanted || disk.position.is_some() || !disk.model.is_idle() || self.process.is_none() {
            return;
        }
        disk.is_wanted = true;
        self.note(|| format!("disk {number} is to come"));
        self.tally.disks_added += 1;
        self.upgrade(Fate::TakesOver);
    }

    /// Gives the image of a disk another size, while nothing is in flight.
    pub(super) fn resize_image(&mut self, number: usize, sectors: usize) {
        let (event, is_unnoticed) = (self.event, self.has(Flaw::CutUnnoticed));
        let disk = &mut self.disks[number];
        let bytes = (sectors * SECTOR_SIZE) as u64;
        let is_idle = disk.guest.requests.is_empty() && !disk.is_busy() && disk.model.is_idle();
        // What is cut and grows again between two looks is not noticed (decision 0031, Weak).
        if !is_idle || bytes == disk.image.bytes() || !disk.image.is_known() {
            return;
        }
        if bytes < disk.image.bytes() {
            disk.model.cut(sectors, event);
            if is_unnoticed {
                return;
            }
        }
        disk.image.resize(bytes, self.clock.of_file_stamps());
        self.note(|| format!("the image of disk {number} has {sectors} sectors"));
        self.tally.resizes += 1;
    }

    /// Gives each disk that the next process has its position. Returns the disks that the last one did not have. Another
    /// image may be behind the name of a disk that went.
    pub(super) fn place_disks(&mut self) -> Vec<usize> {
        let (mut came, mut positions) = (Vec::new(), 0..);
        for number in 0..self.disks.len() {
            let disk = &mut self.disks[number];
            let had = disk.position.take().is_some();
            if disk.is_wanted {
                disk.position = positions.next();
                if !had {
                    disk.guest.is_gone = false;
                    came.push(number);
                }
            } else if had && disk.model.is_idle() && self.random.one_in(2) {
                self.replace_image(number);
                let disk = &mut self.disks[number];
                (disk.is_wanted, disk.guest.is_gone) = (false, true);
            } else if had && !self.plan.conditions.is_named {
                disk.lose_knowledge();
            }
        }
        came
    }
}
