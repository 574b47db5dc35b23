//! The model disk: the history of every sector, and I/O that takes effect in pieces between issue and completion.
//!
//! 1. A write's sectors take effect in up to three portions, at any time before its completion; overlapping writes in
//!    any order. A read samples its sectors in the same way.
//! 2. A failed write took effect for any part of its sectors, at the latest when it completes.
//! 3. A discarded sector keeps its content, or has zeroes or garbage from then on.
//! 4. The write cache is volatile: a version is durable after a flush that was issued later, or if its write was
//!    durable. A failed flush loses versions for good, and the next one still succeeds.
//!
//! 5. I/O of a dead process takes effect in whole, in part or not at all, and its result is lost. The error of a flush
//!    that was never reported is returned by the next flush.
//!
//! The world schedules the portions. The only notion of time in this file is the number of the event.

use crate::content::Sector;
use crate::random::Random;
use std::collections::BTreeMap;
use std::ops::Range;

/// Portions of an I/O that takes effect late, after its process died.
pub const LATE_PORTIONS: Range<u8> = 4..7;
/// Portion of sectors that an I/O never reaches.
const NEVER: u8 = u8::MAX;

/// ID of an I/O, unique on its disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct IoId(pub u64);

/// Operation of an I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoKind {
    Read,
    Write,
    Discard,
    WriteZeroes,
    Flush,
}

/// An I/O as it is issued.
#[derive(Clone, Debug)]
pub struct Io {
    pub kind: IoKind,
    pub sectors: Range<usize>,
    pub durable: bool,
    /// Data to write; empty for everything else.
    pub data: Vec<Sector>,
    /// The errno with which it will fail; `None` if it will succeed.
    pub error: Option<i32>,
    /// Event in which it was issued.
    pub issued: u64,
}

/// Outcome of an I/O.
#[derive(Debug)]
pub struct Finished {
    pub result: Result<(), i32>,
    /// Data that was read.
    pub data: Vec<Sector>,
    pub write: Option<Applied>,
}

/// Effect of a modification: for each of its sectors, the number of the version that it made, or `None` if it made none.
#[derive(Debug)]
pub struct Applied {
    first: usize,
    versions: Vec<Option<usize>>,
    durable: bool,
}

impl Applied {
    /// Returns an effect without any modified sector.
    #[must_use]
    pub fn none() -> Self {
        Self { first: 0, versions: Vec::new(), durable: false }
    }
}

#[derive(Debug)]
struct Running {
    io: Io,
    portions: Vec<u8>,
    versions: Vec<Option<usize>>,
    /// Event in which the process that issued it died.
    orphan: Option<u64>,
    /// Event in which the guest that it is for disconnected.
    gone: Option<u64>,
    /// Whether its first completion is void.
    late: bool,
}

#[derive(Debug)]
struct Version {
    since: u64,
    value: Sector,
}

#[derive(Debug)]
struct History {
    versions: Vec<Version>,
    /// Newest version that survives a power failure.
    durable: usize,
    /// First version that may still become durable; those below are lost.
    lost: usize,
    /// Newest version whose write was reported to the guest.
    acknowledged: usize,
}

impl History {
    fn push(&mut self, since: u64, value: Sector) -> usize {
        self.versions.push(Version { since, value });
        self.versions.len() - 1
    }

    fn now(&self) -> Sector {
        self.versions[self.versions.len() - 1].value
    }

    /// Returns the versions that were in force at some time between the events `from` and `to`.
    fn during(&self, from: u64, to: u64) -> impl Iterator<Item = Sector> + '_ {
        let first = self.versions.partition_point(|v| v.since <= from).saturating_sub(1);
        self.versions[first..].iter().take_while(move |v| v.since <= to).map(|v| v.value)
    }
}

/// One disk.
#[derive(Debug)]
pub struct ModelDisk {
    sectors: Vec<History>,
    running: BTreeMap<IoId, Running>,
    /// Sector after those of the newest I/O.
    end: usize,
    /// Whether acknowledged writes are lost: flushes fail from now on.
    spoiled: bool,
    /// Error of a flush whose result was never received.
    unheard: Option<i32>,
    /// Sector in which a request of a dead process, or of a guest that has gone, has overwritten something newer.
    overwritten: Option<usize>,
}

impl ModelDisk {
    /// Makes a disk that holds `content`, all of it durable.
    pub fn new(content: impl Iterator<Item = Sector>) -> Self {
        let sectors = content
            .map(|value| History { versions: vec![Version { since: 0, value }], durable: 0, lost: 0, acknowledged: 0 })
            .collect();
        Self { sectors, running: BTreeMap::new(), end: 0, spoiled: false, unheard: None, overwritten: None }
    }

    /// Returns the current content of `range`.
    pub fn content(&self, range: Range<usize>) -> impl Iterator<Item = Sector> + '_ {
        self.sectors[range].iter().map(History::now)
    }

    /// Returns whether an I/O of `range` goes on behind the newest one.
    pub fn is_before(&self, range: &Range<usize>) -> bool {
        self.end <= range.start
    }

    /// Begins an I/O that takes effect in `portions` portions (1 ..= 3).
    pub fn issue(&mut self, id: IoId, io: Io, portions: u8, random: &mut Random) {
        self.end = io.sectors.end;
        let count = io.sectors.len();
        let portion = |_| u8::try_from(random.below(u64::from(portions))).unwrap_or(0);
        let portions = (0..count).map(portion).collect();
        let versions = vec![None; count];
        let data = if io.kind == IoKind::Read { vec![Sector::UNFILLED; count] } else { io.data };
        self.running
            .insert(id, Running { io: Io { data, ..io }, portions, versions, orphan: None, gone: None, late: false });
    }

    /// Makes one portion of `id` take effect.
    pub fn advance(&mut self, id: IoId, portion: u8, event: u64, random: &mut Random) {
        let Some(running) = self.running.get_mut(&id) else { return };
        let io = &mut running.io;
        for (i, at) in io.sectors.clone().enumerate().filter(|(i, _)| running.portions[*i] == portion) {
            let history = &mut self.sectors[at];
            if io.kind != IoKind::Read && io.error.is_some() && random.one_in(2) {
                continue;
            }
            let value = match io.kind {
                IoKind::Read => {
                    io.data[i] = history.now();
                    continue;
                }
                IoKind::Write => io.data[i],
                IoKind::WriteZeroes => Sector::ZERO,
                IoKind::Discard => match random.below(4) {
                    0 => Sector::ZERO,
                    1 => Sector::garbage(random),
                    _ => continue,
                },
                IoKind::Flush => continue,
            };
            let newest = &history.versions[history.acknowledged];
            let left = running.orphan.or(running.gone);
            if left.is_some_and(|left| newest.since > left && newest.value != value) {
                self.overwritten = Some(at);
            }
            running.versions[i] = Some(history.push(event, value));
        }
    }

    /// Marks the I/O in flight as that of a guest that disconnects in this event.
    pub fn leave(&mut self, event: u64) {
        self.running.values_mut().for_each(|running| running.gone = running.gone.or(Some(event)));
    }

    /// Marks this I/O as that of a guest that has disconnected.
    pub fn leave_io(&mut self, id: IoId, event: u64) {
        if let Some(running) = self.running.get_mut(&id) {
            running.gone = Some(event);
        }
    }

    /// Returns and clears a sector in which an old request has overwritten data that was written and acknowledged
    /// later. The old request is one of a dead process, or of a guest that has disconnected. Returns `None` if there
    /// is no such sector.
    pub fn take_overwritten(&mut self) -> Option<usize> {
        self.overwritten.take()
    }

    /// Completes `id`, all of whose portions have taken effect. Returns `None` if the I/O is late and will complete
    /// once more.
    pub fn finish(&mut self, id: IoId, random: &mut Random) -> Option<Finished> {
        let running = self.running.get_mut(&id)?;
        if std::mem::take(&mut running.late) {
            return None;
        }
        let Running { mut io, versions, orphan, .. } = self.running.remove(&id)?;
        if io.kind == IoKind::Read && io.error.is_some() {
            // A failed read fills its buffer in part.
            let filled = random.index(io.data.len() + 1);
            io.data[filled..].fill(Sector::UNFILLED);
        }
        let result = match io.kind {
            IoKind::Flush => self.flush(io.issued, io.error, random),
            _ => io.error.map_or(Ok(()), Err),
        };
        if orphan.is_some() {
            if io.kind == IoKind::Flush {
                self.result_unheard(result);
            }
            return None;
        }
        let modifies = !matches!(io.kind, IoKind::Read | IoKind::Flush);
        if modifies && io.durable && result.is_ok() {
            for (at, version) in io.sectors.clone().zip(&versions) {
                let history = &mut self.sectors[at];
                history.durable = history.durable.max(version.unwrap_or(0));
            }
        }
        let write = modifies.then_some(Applied { first: io.sectors.start, versions, durable: io.durable });
        Some(Finished { result, data: if io.kind == IoKind::Read { io.data } else { Vec::new() }, write })
    }

    fn flush(&mut self, issued: u64, error: Option<i32>, random: &mut Random) -> Result<(), i32> {
        let error = self.unheard.take().or(if self.spoiled { Some(error.unwrap_or(5)) } else { error });
        for history in &mut self.sectors {
            let written = history.versions.partition_point(|v| v.since <= issued) - 1;
            if error.is_none() && written >= history.lost {
                history.durable = history.durable.max(written);
            } else if error.is_some() && history.durable < history.versions.len() - 1 && random.one_in(2) {
                history.lost = history.versions.len();
            }
        }
        error.map_or(Ok(()), Err)
    }

    /// Keeps the error of a flush whose result no process received, unless an earlier one is kept.
    pub fn result_unheard(&mut self, result: Result<(), i32>) {
        self.unheard = self.unheard.or(result.err());
    }

    /// Orphans the I/O of a dead process. Portions that have not taken effect by now do so in whole, in part, late, or
    /// never. Returns the late I/Os: they have [`LATE_PORTIONS`], and complete once more.
    pub fn orphan(&mut self, event: u64, random: &mut Random) -> Vec<IoId> {
        let mut late = Vec::new();
        for (id, running) in self.running.iter_mut().filter(|(_, running)| running.orphan.is_none()) {
            running.orphan = Some(event);
            let fate = random.below(4);
            running.late = fate == 2;
            for portion in &mut running.portions {
                match fate {
                    0 => *portion = NEVER,
                    1 if random.one_in(2) => *portion = NEVER,
                    2 => *portion += LATE_PORTIONS.start,
                    _ => {}
                }
            }
            late.extend(running.late.then_some(*id));
        }
        late
    }

    /// Overwrites some sectors of `range` as a foreign writer.
    pub fn overwrite(&mut self, range: Range<usize>, event: u64, random: &mut Random) {
        for history in &mut self.sectors[range] {
            let value = match random.below(3) {
                0 => history.versions[random.index(history.versions.len())].value,
                _ => Sector::garbage(random),
            };
            history.push(event, value);
        }
    }

    /// Cuts the image off at `sector`. What lay beyond is zero if the image grows again.
    pub fn cut(&mut self, sector: usize, event: u64) {
        for history in &mut self.sectors[sector..] {
            let version = history.push(event, Sector::ZERO);
            (history.durable, history.acknowledged) = (version, version);
        }
    }

    /// Makes every flush fail from now on: the store comes back from a crash that it reported to its client.
    pub fn spoil(&mut self) {
        self.spoiled = true;
    }

    /// Crashes the store and brings it back: versions that were not durable may be gone. Writes in flight are repeated,
    /// so their sectors stay as they are.
    pub fn crash(&mut self, event: u64, random: &mut Random) {
        let writes = self.running.values().filter(|r| r.io.kind != IoKind::Read);
        let busy: Vec<_> = writes.map(|r| r.io.sectors.clone()).collect();
        for (at, history) in self.sectors.iter_mut().enumerate() {
            let newest = history.versions.len() - 1;
            if newest > history.durable && !busy.iter().any(|b| b.contains(&at)) && random.one_in(2) {
                let survivor = history.durable + random.index(newest - history.durable + 1);
                let value = history.versions[survivor].value;
                history.push(event, value);
            }
        }
    }

    /// Returns whether no I/O is in flight.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty()
    }

    /// Returns whether `sector` held `value` at some time between the events `from` and `to`.
    pub fn held(&self, sector: usize, value: Sector, from: u64, to: u64) -> bool {
        self.sectors[sector].during(from, to).any(|v| v == value)
    }

    /// Returns everything `sector` held between the events `from` and `to`.
    pub fn values(&self, sector: usize, from: u64, to: u64) -> Vec<Sector> {
        self.sectors[sector].during(from, to).collect()
    }

    /// Marks the sectors of a modification as acknowledged to the guest. The error is the first sector for which that
    /// is not true: it must be on the disk, and durable if requested. (A discard need not change anything.)
    pub fn acknowledge(&mut self, applied: &Applied, is_discard: bool) -> Result<(), usize> {
        for (at, version) in (applied.first..).zip(&applied.versions) {
            let history = &mut self.sectors[at];
            match *version {
                None if is_discard => {}
                None => return Err(at),
                Some(version) if applied.durable && history.durable < version => return Err(at),
                Some(version) => history.acknowledged = history.acknowledged.max(version),
            }
        }
        Ok(())
    }

    /// Marks `value` in `sector` as acknowledged to the guest, by a write that it submitted in event `since`. Returns
    /// whether it got there, and whether it is durable.
    pub fn acknowledge_value(&mut self, sector: usize, value: Sector, since: u64) -> (bool, bool) {
        let history = &mut self.sectors[sector];
        let found = history.versions.iter().position(|version| version.since >= since && version.value == value);
        let Some(found) = found else { return (false, false) };
        history.acknowledged = history.acknowledged.max(found);
        (true, history.durable >= found)
    }

    /// Returns for each sector the version that a flush beginning now must make durable.
    pub fn flush_promise(&self) -> Vec<usize> {
        self.sectors.iter().map(|history| history.acknowledged).collect()
    }

    /// Cancels the promises about data lost with a failed flush: the guest was told of it.
    pub fn forgive(&mut self) {
        for history in self.sectors.iter_mut().filter(|history| history.acknowledged < history.lost) {
            history.acknowledged = history.acknowledged.min(history.durable);
        }
    }

    /// Cancels all promises about data that is not durable: no process is left that has to keep them.
    pub fn forget_promises(&mut self) {
        for history in &mut self.sectors {
            history.acknowledged = history.acknowledged.min(history.durable);
        }
    }

    /// Returns the first sector for which a promise was broken.
    pub fn broken_promise(&self, promise: &[usize]) -> Option<usize> {
        self.sectors.iter().zip(promise).position(|(history, promised)| history.durable < *promised)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk() -> (ModelDisk, Random) {
        (ModelDisk::new((0..16).map(|s| Sector::initial(0, s))), Random::new(1))
    }

    fn io(kind: IoKind, sectors: Range<usize>, issued: u64) -> Io {
        let data = sectors.clone().map(|i| Sector::written(usize::try_from(issued).unwrap(), i)).collect();
        Io { kind, sectors, durable: false, data, error: None, issued }
    }

    fn write(disk: &mut ModelDisk, random: &mut Random, at: u64) -> Finished {
        disk.issue(IoId(at), io(IoKind::Write, 0..8, at), 1, random);
        disk.advance(IoId(at), 0, at + 1, random);
        disk.finish(IoId(at), random).unwrap()
    }

    fn flush(disk: &mut ModelDisk, random: &mut Random, at: u64, error: Option<i32>) -> Result<(), i32> {
        disk.issue(IoId(at), Io { error, ..io(IoKind::Flush, 0..0, at) }, 1, random);
        disk.finish(IoId(at), random).unwrap().result
    }

    #[test]
    fn a_version_is_in_force_until_the_next() {
        let (mut disk, mut random) = disk();
        write(&mut disk, &mut random, 10);
        let (old, new) = (Sector::initial(0, 3), Sector::written(10, 3));
        assert!(disk.held(3, old, 5, 7) && !disk.held(3, new, 5, 10));
        assert!(disk.held(3, old, 5, 20) && disk.held(3, new, 5, 20));
        assert!(!disk.held(3, old, 11, 20) && disk.held(3, new, 11, 20));
    }

    #[test]
    fn portions_tear_a_write() {
        let (mut disk, mut random) = disk();
        disk.issue(IoId(1), io(IoKind::Write, 0..16, 1), 2, &mut random);
        disk.advance(IoId(1), 0, 2, &mut random);
        let torn: Vec<_> = disk.content(0..16).collect();
        assert!(torn.contains(&Sector::initial(0, torn.iter().position(|s| *s != Sector::written(1, 0)).unwrap())));
        disk.advance(IoId(1), 1, 3, &mut random);
        assert!(disk.content(0..16).enumerate().all(|(i, s)| s == Sector::written(1, i)));
    }

    #[test]
    fn only_a_flush_makes_a_write_durable() {
        let (mut disk, mut random) = disk();
        let done = write(&mut disk, &mut random, 1);
        disk.acknowledge(done.write.as_ref().unwrap(), false).unwrap();
        let promise = disk.flush_promise();
        assert_eq!(disk.broken_promise(&promise), Some(0));
        flush(&mut disk, &mut random, 9, None).unwrap();
        assert_eq!(disk.broken_promise(&promise), None);
    }

    #[test]
    fn a_failed_flush_loses_data_and_the_next_one_hides_it() {
        let (mut disk, mut random) = disk();
        let done = write(&mut disk, &mut random, 1);
        disk.acknowledge(done.write.as_ref().unwrap(), false).unwrap();
        flush(&mut disk, &mut random, 9, Some(5)).unwrap_err();
        flush(&mut disk, &mut random, 10, None).unwrap();
        assert!(disk.broken_promise(&disk.flush_promise()).is_some());
    }
}
