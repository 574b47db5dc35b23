//! Which number each disk has: that under which the state file knows it, by name and image. Decision 0031.

use super::header::Header;
use super::{EngineStart, FailedFlush, StateFile};
use remoca_core::engine::DiskEngine;
use remoca_core::units::DiskIndex;
use remoca_io::narrow;
use remoca_io::words::IndexMemory;

/// Who a disk is, whatever its position and size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskIdentity {
    /// Hash of its name.
    pub name: u64,
    /// Identity of its image but for the size.
    pub image: [u64; 3],
}

type Engine = DiskEngine<IndexMemory>;

impl EngineStart {
    /// Returns the positions of the disks that had another image in a previous process. To be called before
    /// [`Self::number_disks`].
    pub fn replaced(&self, disks: &[DiskIdentity]) -> Vec<usize> {
        let Some(header) = self.state.as_ref().map(StateFile::header) else { return Vec::new() };
        let known = known(&header, &self.engine, disks);
        let mut named = known.clone();
        find(&header, &self.engine, disks, &mut named, |kept, disk| kept.name == disk.name);
        (0..disks.len()).filter(|at| known[*at].is_none() && named[*at].is_some()).collect()
    }

    /// Returns the number of each disk: the one that it had in a previous process, or one that is free. Removes all other
    /// disks of that process. Keeps the failed flushes of images that are not among these disks.
    ///
    /// # Panics
    /// If there are more disks than numbers.
    pub fn number_disks(&mut self, disks: &[DiskIdentity]) -> Vec<DiskIndex> {
        let Self { engine, state, former, .. } = self;
        let header = state.as_ref().map(StateFile::header);
        let mut numbers = header.as_ref().map_or(vec![None; disks.len()], |header| known(header, engine, disks));
        for number in engine.index().disks().filter(|number| !numbers.contains(&Some(*number))) {
            remove(header.as_deref(), engine, number);
        }
        for at in (0..disks.len()).filter(|at| numbers[*at].is_none()).collect::<Vec<_>>() {
            let free = |engine: &Engine| {
                let mut untaken = engine.index().disks().filter(|number| !numbers.contains(&Some(*number)));
                untaken.find(|number| engine.is_free(*number))
            };
            let number = free(engine).or_else(|| {
                // Nobody is served yet.
                engine.forget_removed();
                free(engine).or_else(|| vacate(header.as_deref(), engine, &numbers))
            });
            numbers[at] = Some(number.expect("there is a number for each disk"));
        }
        let numbers: Vec<_> = numbers.into_iter().flatten().collect();
        if let Some(state) = state {
            let here: Vec<_> = numbers.iter().copied().zip(disks.iter().map(|disk| disk.image)).collect();
            state.keep_failed_flushes(engine, &former.failed_flushes, &here);
        }
        numbers
    }
}

impl StateFile {
    /// Records failed flushes of images, except of those that disks have: these are `here`, with their numbers.
    pub fn keep_failed_flushes(&self, engine: &mut Engine, failed: &[FailedFlush], here: &[(DiskIndex, [u64; 3])]) {
        let taken: Vec<_> = here.iter().map(|(number, _)| *number).collect();
        for failed in failed.iter().filter(|failed| here.iter().all(|(_, image)| *image != failed.image)) {
            keep_failed_flush(&self.header, engine, failed, &taken);
        }
    }

    /// Clears all failed flushes but those of the disks that are `here`.
    pub fn clear_removed_failures(&self, engine: &mut Engine, here: &[DiskIndex]) {
        for number in engine.index().disks().filter(|number| !here.contains(number)) {
            if self.header.flush_failed(number).is_some() {
                self.header.set_flush_failed(number, None);
                self.header.clear_disk(number);
                engine.set_failed_flush(number, None);
            }
        }
    }

    /// Clears the failed flushes of an image, whatever numbers they were recorded under.
    pub fn clear_failed_flushes(&self, engine: &mut Engine, image: [u64; 3]) {
        for number in failures_of(&self.header, engine, image).collect::<Vec<_>>() {
            self.header.set_flush_failed(number, None);
            engine.set_failed_flush(number, None);
        }
    }
}

/// Returns the number under which a previous process had the image of each disk, or `None` if it did not have it.
fn known(header: &Header, engine: &Engine, disks: &[DiskIdentity]) -> Vec<Option<DiskIndex>> {
    let mut numbers = vec![None; disks.len()];
    // A disk that was renamed is still the same image.
    find(header, engine, disks, &mut numbers, |kept, disk| kept == disk);
    find(header, engine, disks, &mut numbers, |kept, disk| kept.image == disk.image);
    numbers
}

/// Finds the numbers of the disks that have none yet: those under which a previous process had disks that are the `same`.
fn find(
    header: &Header,
    engine: &Engine,
    disks: &[DiskIdentity],
    numbers: &mut [Option<DiskIndex>],
    same: impl Fn(&DiskIdentity, &DiskIdentity) -> bool,
) {
    for number in engine.index().disks().filter(|number| engine.is_known(*number)) {
        let [kind, device, inode, _] = header.disk(number).identity;
        let kept = DiskIdentity { name: header.disk_name(number), image: [kind, device, inode] };
        if !numbers.contains(&Some(number))
            && let Some(at) = (0..disks.len()).find(|at| numbers[*at].is_none() && same(&kept, &disks[*at]))
        {
            numbers[at] = Some(number);
        }
    }
}

/// Removes a disk. The index forgets it before its record is cleared: a process that dies in between leaves a record that
/// nothing in the index belongs to.
fn remove(header: Option<&Header>, engine: &mut Engine, number: DiskIndex) {
    if engine.is_known(number) {
        engine.remove_disk(number);
        narrow::passes("disk-forgotten");
        if let Some(header) = header {
            header.clear_disk(number);
        }
    }
}

/// Frees a number that only a failed flush has, and returns it. The failed flush gets another number first.
fn vacate(header: Option<&Header>, engine: &mut Engine, taken: &[Option<DiskIndex>]) -> Option<DiskIndex> {
    let is_spare = |number: &DiskIndex| !taken.contains(&Some(*number)) && engine.is_unused(*number);
    let number = engine.index().disks().find(is_spare)?;
    if let Some(header) = header {
        if let Some(errno) = header.flush_failed(number) {
            let [kind, device, inode, _] = header.disk(number).identity;
            record_failed_flush(header, engine, &FailedFlush { image: [kind, device, inode], errno }, |number| {
                taken.contains(&Some(number))
            });
        }
        header.set_flush_failed(number, None);
        header.clear_disk(number);
    }
    engine.set_failed_flush(number, None);
    Some(number)
}

/// Records the failed flush of an image that no disk has, under a number that is not `taken`.
fn keep_failed_flush(header: &Header, engine: &mut Engine, failed: &FailedFlush, taken: &[DiskIndex]) {
    if failures_of(header, engine, failed.image).next().is_none() {
        record_failed_flush(header, engine, failed, |number| taken.contains(&number));
    }
}

/// Records a failed flush under the highest number that is free and not taken.
fn record_failed_flush(
    header: &Header,
    engine: &mut Engine,
    failed: &FailedFlush,
    is_taken: impl Fn(DiskIndex) -> bool,
) {
    let mut spare = engine.index().disks().filter(|number| !is_taken(*number) && engine.is_free(*number));
    match spare.next_back() {
        Some(number) => {
            header.keep_failed_flush(number, failed.image, failed.errno);
            engine.set_failed_flush(number, Some(failed.errno));
        }
        None => tracing::error!("no room is left to record that a flush of an image which is gone has failed"),
    }
}

fn failures_of<'a>(header: &'a Header, engine: &Engine, image: [u64; 3]) -> impl Iterator<Item = DiskIndex> + use<'a> {
    let failed =
        move |number: &DiskIndex| header.flush_failed(*number).is_some() && header.disk(*number).identity[..3] == image;
    engine.index().disks().filter(failed)
}
