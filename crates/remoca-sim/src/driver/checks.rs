//! Promises to a guest, checked from outside.

use super::guests::Request;
use super::plan::Ask;
use super::world::{Outcome, World};
use crate::content::{BLOCK_SECTORS, Sector};
use crate::violation::{Promise, Violation};

impl World<'_> {
    pub(super) fn at(&self, promise: Promise, disk: usize, sector: usize, text: String) -> Violation {
        Violation::at(promise, (u16::try_from(disk).unwrap_or(0), sector / BLOCK_SECTORS), text)
    }

    /// Checks, when a request completes, every promise made to its guest about it.
    pub(super) fn completed(&mut self, disk: usize, request: &Request, result: Result<Vec<Sector>, ()>) -> Outcome {
        let step = request.step;
        self.note(|| format!("disk {disk}: request {step} completes: {:?}", result.as_ref().map(Vec::len)));
        self.tally.completed += 1;
        self.tally.failed += u64::from(result.is_err());
        if self.disks[disk].is_modifying_for(step) {
            let text = format!("request {step} {:?} completes while the disk is at it", request.ask);
            return Err(Violation::new(Promise::ExactlyOnce, text));
        }
        let guest = &mut self.disks[disk].guest;
        let Ok(data) = result else {
            let by_latch = guest.flush_may_fail && (request.ask == Ask::Flush || request.is_durable);
            guest.flush_must_fail |= request.ask == Ask::Flush;
            if request.ask == Ask::Flush {
                self.disks[disk].model.forgive();
            }
            if request.may_have_failed || by_latch {
                return Ok(());
            }
            let text = format!("request {step} {:?} fails, and the disk failed nothing of it", request.ask);
            return Err(Violation::new(Promise::DiskErrorsOnly, text));
        };
        if request.failed && !matches!(request.ask, Ask::Read(_)) {
            let text = format!("request {step} {:?} succeeds, and the disk failed some of it", request.ask);
            return Err(Violation::new(Promise::DiskErrorsOnly, text));
        }
        match &request.ask {
            Ask::Read(range) => {
                self.check_read(disk, request, range.start, &data)?;
                self.keep_pages(disk, range.start, &data);
                Ok(())
            }
            Ask::Flush => self.check_flush(disk, request),
            Ask::Write { range, .. } => {
                self.check_written(disk, request)?;
                self.keep_pages(disk, range.start, &request.data);
                Ok(())
            }
            Ask::WriteZeroes { .. } => self.check_written(disk, request),
            // On a coarse disk, a block that is discarded in part keeps its content.
            Ask::Discard(_) if self.disks[disk].plan.is_coarse => Ok(()),
            Ask::Discard(ranges) => {
                let is_done = |sector: usize| request.done.iter().any(|done| done.contains(&sector));
                let Some(sector) = ranges.iter().cloned().flatten().find(|sector| !is_done(*sector)) else {
                    return Ok(());
                };
                let text = format!("request {step} completes, and the disk was not asked to discard sector {sector}");
                Err(self.at(Promise::WriteThrough, disk, sector, text))
            }
        }
    }

    fn check_read(&mut self, disk: usize, request: &Request, start: usize, data: &[Sector]) -> Outcome {
        self.tally.sectors_checked += data.len() as u64;
        let model = &self.disks[disk].model;
        let from = request.submitted;
        let wrong = (start..).zip(data).find(|(at, got)| !model.held(*at, **got, from, self.event));
        let Some((at, got)) = wrong else { return Ok(()) };
        let right = model.values(at, from, self.event);
        let text = format!("request {} reads {got} from sector {at}; right would be {right:?}", request.step);
        Err(self.at(Promise::NoStaleRead, disk, at, text))
    }

    fn check_flush(&mut self, disk: usize, request: &Request) -> Outcome {
        let step = request.step;
        if self.disks[disk].guest.flush_must_fail {
            let text = format!("flush {step} succeeds, and one before it has failed");
            return Err(Violation::new(Promise::FlushIsDurable, text));
        }
        self.tally.flushes_after_loss += u64::from(self.disks[disk].guest.has_lost);
        let Some(sector) = self.disks[disk].model.broken_promise(&request.promise) else { return Ok(()) };
        let text = format!("flush {step} succeeds, and sector {sector} is not durable");
        Err(self.at(Promise::FlushIsDurable, disk, sector, text))
    }

    fn check_written(&mut self, disk: usize, request: &Request) -> Outcome {
        let switched = request.switches != self.disks[disk].guest.switches;
        let by_request =
            matches!(request.ask, Ask::Write { durable: true, .. } | Ask::WriteZeroes { durable: true, .. });
        let durable = by_request || request.is_durable && !switched;
        for (sector, value) in request.written() {
            let (is_there, is_durable) = self.disks[disk].model.acknowledge_value(sector, value, request.submitted);
            if !is_there || durable && !is_durable {
                let what = if is_there { "durable" } else { "on the disk" };
                let text = format!("request {} completes, and sector {sector} is not {what}: {value}", request.step);
                let promise = if is_there { Promise::FlushIsDurable } else { Promise::WriteThrough };
                return Err(self.at(promise, disk, sector, text));
            }
        }
        Ok(())
    }

    /// Checks the state some time after all faults were healed.
    pub(super) fn check_rest(&mut self) -> Outcome {
        if self.process.is_none() {
            return Err(Violation::new(Promise::NothingLeft, "the process does not come back"));
        }
        for disk in &self.disks {
            if let Some(request) = disk.guest.requests.first() {
                let text = format!("disk {}: request {} {:?} does not end", disk.number, request.step, request.ask);
                return Err(Violation::new(Promise::NothingLeft, text));
            }
        }
        self.check_local_size()?;
        if self.agent.as_ref().is_some_and(|agent| !agent.is_idle()) {
            return Err(Violation::new(Promise::NothingLeft, "a message to the port is not answered"));
        }
        Ok(())
    }

    /// Checks that nothing is in flight, as the last upgrade requires: no request, no disk I/O, no request ID that
    /// stays taken.
    pub(super) fn check_end(&mut self, upgraded: Option<bool>) -> Outcome {
        self.check_process()?;
        if upgraded != Some(true) {
            return Err(Violation::new(Promise::NothingLeft, "with nothing to do it does not give way to an upgrade"));
        }
        Ok(())
    }
}
