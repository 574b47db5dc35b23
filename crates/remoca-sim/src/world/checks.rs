//! The checkers: what a guest was promised when a request completes, what must hold at any time, and what must be left
//! at the end.

use super::guest_side::EIO;
use super::local::LOCAL;
use super::vm::FlushFailure;
use super::{Outcome, World};
use crate::content::{BLOCK_SECTORS, bytes};
use crate::guest::{DiskState, Key, Pending};
use crate::plan::Kind;
use crate::server::Pool;
use crate::violation::{Promise, Violation};
use remoca_core::engine::{DiskError, PoolStatus, RequestId, ServerNumber};
use remoca_core::fingerprint::Fingerprint;
use remoca_core::units::SlotIndex;

impl World<'_> {
    /// Checks that a request has the result that the disk returned. Without a result of the disk, only reads may complete.
    pub(super) fn check_result(&mut self, id: RequestId, pending: &Pending, result: Result<(), DiskError>) -> Outcome {
        let key = (pending.disk, pending.sectors.start / BLOCK_SECTORS);
        if pending.beyond {
            if result == Err(DiskError(EIO)) {
                return Ok(());
            }
            let text = format!("request {} is beyond the end of its disk, and ends with {result:?}", id.0);
            return self.fail(Violation::at(Promise::DiskErrorsOnly, key, text));
        }
        let failed = self.vm.flush_failed[usize::from(pending.disk)];
        let right = match (&pending.state, pending.kind) {
            (DiskState::Running, _) => {
                let text = format!("request {} completes while the disk is at it", id.0);
                return self.fail(Violation::at(Promise::ExactlyOnce, key, text));
            }
            (DiskState::NotAsked | DiskState::Starved | DiskState::Hedged, Kind::Read) => result.is_ok(),
            (DiskState::NotAsked | DiskState::Starved | DiskState::Hedged, _) => false,
            // The server may still have answered.
            (DiskState::Failed(said), _) => result.is_ok() || result == Err(DiskError(*said)),
            (DiskState::Done(_), Kind::Flush) if failed.told => result.is_err(),
            // An error that was never reported may have been lost along with its process.
            (DiskState::Done(said), Kind::Flush) if failed.heard => result.is_err() || said.is_ok(),
            (DiskState::Done(said), _) => result.map_err(|e| e.0) == *said,
        };
        if pending.kind == Kind::Flush && result.is_err() {
            self.vm.flush_failed[usize::from(pending.disk)] = FlushFailure { heard: true, told: true };
            self.tally.flushes_failed += 1;
        }
        if right {
            return Ok(());
        }
        let text = format!("request {} ends with {result:?}, the disk said {:?}", id.0, pending.state);
        self.fail(Violation::at(Promise::DiskErrorsOnly, key, text))
    }

    /// Checks that every sector read was on the disk at some time while the read was in flight.
    pub(super) fn check_read(&mut self, id: RequestId, pending: &Pending) -> Outcome {
        let disk = &self.vm.disks[usize::from(pending.disk)];
        let sectors = pending.sectors.clone().zip(&pending.buffer);
        let wrong = sectors.into_iter().find(|(at, got)| !disk.held(*at, **got, pending.submitted, self.event));
        self.tally.sectors_checked += pending.buffer.len() as u64;
        let Some((at, got)) = wrong else { return Ok(()) };
        let right = disk.values(at, pending.submitted, self.event);
        let text = format!("request {} reads {got} from sector {at}; right would be {right:?}", id.0);
        self.fail(Violation::at(Promise::NoStaleRead, (pending.disk, at / BLOCK_SECTORS), text))
    }

    /// Checks that the writes acknowledged before a flush began are durable when it succeeds.
    pub(super) fn check_flush(&mut self, id: RequestId, pending: &Pending) -> Outcome {
        let Some(at) = self.vm.disks[usize::from(pending.disk)].broken_promise(&pending.promise) else { return Ok(()) };
        let text = format!("flush {} succeeds, and sector {at} is not durable", id.0);
        self.fail(Violation::at(Promise::FlushIsDurable, (pending.disk, at / BLOCK_SECTORS), text))
    }

    /// Checks the invariants that must hold after every event.
    pub(super) fn check_always(&mut self) -> Outcome {
        if let Some(violation) = self.waits_in_vain() {
            return self.fail(violation);
        }
        let (counts, capacity) = (self.vm.engine.index().slot_counts(), self.vm.engine.index().total_capacity());
        if counts.free + counts.used + counts.draining != capacity.0 {
            return self.fail(Violation::new(Promise::SlotsAddUp, format!("{counts:?} of {}", capacity.0)));
        }
        let known = self.vm.engine.index().known_blocks().0;
        // What is being forgotten is not believed.
        let is_left = || !self.vm.engine.index().is_cutting() || self.vm.knowledge().is_any();
        if !self.vm.engine.status().enabled && (counts.used > 0 || known > 0 && is_left()) {
            let text = format!("{known} blocks are known and {} slots used", counts.used);
            return self.fail(Violation::new(Promise::OffIsCold, text));
        }
        Ok(())
    }

    fn waits_in_vain(&self) -> Option<Violation> {
        let outstanding = |pending: &Pending| self.vm.outstanding.values().any(|o| Some(o.event) == pending.taken);
        let waiting = self.vm.guest.waiting().find(|pending| !outstanding(pending))?;
        let key = (waiting.disk, waiting.sectors.start / BLOCK_SECTORS);
        let text = format!("the read of sectors {:?} waits for nothing", waiting.sectors);
        Some(Violation::at(Promise::NoWaitInVain, key, text))
    }

    /// Checks, for every block that is not being changed, that its known content is what the disk holds.
    pub(super) fn check_known_blocks(&mut self) -> Outcome {
        let blocks = self.vm.machine.sectors / BLOCK_SECTORS;
        for disk in 0..self.vm.machine.disks {
            for block in (0..blocks).filter(|block| !self.vm.guest.is_changing((disk, *block))) {
                if let Some(violation) = self.wrong_knowledge((disk, block)) {
                    return self.fail(violation);
                }
            }
        }
        Ok(())
    }

    fn wrong_knowledge(&self, key: Key) -> Option<Violation> {
        let (disk, block) = key;
        let known = self.vm.engine.known(self.vm.block_id(key))?;
        let start = block * BLOCK_SECTORS;
        let content: Vec<_> = self.vm.disks[usize::from(disk)].content(start..start + BLOCK_SECTORS).collect();
        (self.vm.prints.page(&bytes(&content)) != known).then(|| {
            let text = format!("the disk holds {content:?}, the index says something else");
            Violation::at(Promise::KnownIsTrue, key, text)
        })
    }

    /// Checks the state at the end of the run.
    pub(super) fn check_end(&mut self) -> Outcome {
        self.check_up()?;
        self.check_known_blocks()?;
        self.check_nothing_left()?;
        self.check_counters()?;
        let faults = self.plan.scenario.faults;
        if !faults.lies {
            self.check_size()?;
            self.check_local_size()?;
            let wrong = self.vm.engine.stats().fetch_wrong;
            if wrong != 0 {
                let text = format!("{wrong} wrong pages of honest servers");
                self.fail(Violation::new(Promise::CachedIsThere, text))?;
            }
            if !faults.memory {
                self.check_cached_pages()?;
            }
        }
        Ok(())
    }

    fn check_nothing_left(&mut self) -> Outcome {
        let requests = (self.vm.guest.in_flight(), self.vm.engine.requests_in_flight());
        if requests != (0, 0) || !self.vm.disks.iter().all(crate::disk::ModelDisk::is_idle) {
            let text = format!("requests under way at the end: {requests:?}");
            self.fail(Violation::new(Promise::NothingLeft, text))?;
        }
        // A server that lies may never send the replies it owes.
        let pins = self.vm.engine.index().pinned_slots().0;
        if !self.plan.scenario.faults.lies && (!self.vm.outstanding.is_empty() || pins != 0) {
            let text = format!("{} REQUESTs outstanding, {pins} slots pinned", self.vm.outstanding.len());
            self.fail(Violation::new(Promise::NothingLeft, text))?;
        }
        let waiting: u32 = self.vm.wires.iter().map(|wire| wire.pages_waiting()).sum();
        if waiting != 0 {
            let text = format!("{waiting} pages still wait");
            self.fail(Violation::new(Promise::NothingLeft, text))?;
        }
        Ok(())
    }

    fn check_counters(&mut self) -> Outcome {
        let s = self.vm.engine.stats();
        let judged = s.evictions_admitted
            + s.evictions_duplicate
            + s.evictions_zero
            + s.evictions_unmatched
            + s.evictions_dropped
            + s.evictions_passed_over;
        if s.evictions_reported != judged || s.evictions_reported != self.vm.life.evictions {
            let text =
                format!("{} evictions, {} reported, {judged} judged", self.vm.life.evictions, s.evictions_reported);
            self.fail(Violation::new(Promise::CountersAddUp, text))?;
        }
        let answered = s.hit_blocks + s.zero_blocks + s.covered_blocks + s.missed_blocks;
        if s.read_blocks != answered + self.vm.life.misaligned_blocks {
            let text =
                format!("{} blocks read, {answered} + {} answered", s.read_blocks, self.vm.life.misaligned_blocks);
            self.fail(Violation::new(Promise::CountersAddUp, text))?;
        }
        let judged = s.frames_admitted
            + s.frames_duplicate
            + s.frames_zero
            + s.frames_unmatched
            + s.frames_dropped
            + s.frames_passed_over;
        if s.frames_looked_at != judged || s.frames_looked_at != self.vm.life.frames {
            let text = format!("{} frames, {} looked at, {judged} judged", self.vm.life.frames, s.frames_looked_at);
            self.fail(Violation::new(Promise::CountersAddUp, text))?;
        }
        let admitted = s.evictions_admitted + s.frames_admitted + s.swap_admissions + s.read_admissions;
        if admitted != self.vm.life.pages_sent {
            let text = format!("{s:?}, and {} pages were sent", self.vm.life.pages_sent);
            self.fail(Violation::new(Promise::CountersAddUp, text))?;
        }
        Ok(())
    }

    /// Checks, with servers that work, that the pools are at listed servers, and as large as requested, or as all of these
    /// can provide, unless other VMs want the same memory.
    fn check_size(&mut self) -> Outcome {
        let status = self.vm.engine.status();
        let owner = self.owner();
        let size = |at: usize| self.donors[at].pools.get(&owner).map(Pool::size).unwrap_or_default();
        let is_right = |pool: &PoolStatus| size(self.vm.server(pool.server)) == pool.granted;
        let remote = || status.pools.iter().filter(|pool| !pool.is_local);
        let sizes = remote().all(is_right);
        let listed = |server: &usize| self.vm.listed >> server & 1 == 1;
        let placed = remote().all(|pool| listed(&self.vm.server(pool.server)));
        let free: u32 = (0..self.donors.len()).filter(listed).map(|at| self.donors[at].free()).sum();
        let short = status.wanted.0 - status.granted.0.min(status.wanted.0);
        let reached = status.granted <= status.wanted && (short == 0 || free == 0 || !self.others.is_empty());
        if status.connected && sizes && placed && reached {
            return Ok(());
        }
        let text = format!("{status:?}, the servers have {free} pages left");
        self.fail(Violation::new(Promise::Useful, text))
    }

    /// Checks, without lies or losses, that every page of the index is on its server.
    fn check_cached_pages(&mut self) -> Outcome {
        let index = self.vm.engine.index();
        let owner = self.owner();
        let held = |slot: SlotIndex| {
            let (pool, slot) = index.place_of(slot)?;
            if index.pool(pool)?.server == LOCAL.0 {
                return self.vm.local.current(self.vm.host)?.page(slot);
            }
            let server = self.vm.server(ServerNumber(index.pool(pool)?.server));
            self.donors[server].pools.get(&owner)?.page(slot)
        };
        let is_wrong = |(slot, content): &(SlotIndex, Fingerprint)| {
            held(*slot).is_none_or(|page| self.vm.prints.page(&bytes(&page)) != *content)
        };
        let wrong = index.pages().find(is_wrong).map(|(slot, _)| (slot, held(slot)));
        match wrong {
            Some((slot, held)) => {
                let text = format!("{slot:?} holds something else: {held:?}");
                self.fail(Violation::new(Promise::CachedIsThere, text))
            }
            None => Ok(()),
        }
    }
}
