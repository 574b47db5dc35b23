//! Actions of guests: requests, switches of write caches, disconnections and connections, and the results of requests.

use super::guests::{Attachment, Completion, QUEUE_SIZE, Request, send_nbd};
use super::moving::Move;
use super::nbd::NbdClient;
use super::plan::Ask;
use super::world::{Event, Outcome, World};
use crate::content::{SECTOR_SIZE, Sector, sectors_of};
use crate::plan::Fill;
use crate::violation::{Promise, Violation};
use remoca_frontend::testing::Answered;
use remoca_io::buffer::BUFFER_LEN_MAX;
use std::ops::Range;
use std::time::Duration;

impl World<'_> {
    /// Submits a guest's request, if it may have one more in flight.
    pub(super) fn ask(&mut self, step: usize, number: usize, ask: &Ask) {
        let event = self.event;
        let disk = &mut self.disks[number];
        let guest = &mut disk.guest;
        let most = disk.plan.depth.min(usize::from(QUEUE_SIZE));
        let fits = ranges(ask).iter().all(|range| range.end as u64 * SECTOR_SIZE as u64 <= disk.image.usable_bytes());
        if guest.is_gone || guest.is_paused || guest.requests.len() >= most || !fits {
            self.tally.skipped += 1;
            return;
        }
        let data = match ask {
            Ask::Write { range, fill, .. } => match fill {
                Fill::Template(class) => vec![Sector::template(*class); range.len()],
                Fill::Zero => vec![Sector::ZERO; range.len()],
                Fill::Same => disk.model.content(range.clone()).collect(),
                Fill::Unique | Fill::SwapHeader(_) => (0..range.len()).map(|at| Sector::written(step, at)).collect(),
            },
            _ => Vec::new(),
        };
        let is_durable = match ask {
            Ask::Write { durable, .. } | Ask::WriteZeroes { durable, .. } => {
                *durable || guest.cache_is_on == Some(false)
            }
            _ => false,
        };
        let promise = if *ask == Ask::Flush { disk.model.flush_promise() } else { Vec::new() };
        guest.requests.push(Request {
            step,
            ask: ask.clone(),
            data,
            submitted: event,
            ticket: None,
            is_durable,
            switches: guest.switches,
            failed: false,
            may_have_failed: false,
            ios: 0,
            done: Vec::new(),
            promise,
        });
        self.tally.requests += 1;
        let bytes = disk_range(ask).map_or(0, |range| range.len() * SECTOR_SIZE);
        self.tally.long_requests += u64::from(bytes > BUFFER_LEN_MAX);
        self.tally.on_other_queues += u64::from(!step.is_multiple_of(self.disks[number].plan.queues.into()));
        let last = self.disks[number].guest.requests.len() - 1;
        self.disks[number].guest.send(last);
        self.note(|| format!("disk {number}: request {step}: {ask:?}"));
        self.push(number);
    }

    /// Sends some of the bytes that an NBD client has queued.
    pub(super) fn push(&mut self, number: usize) {
        let Attachment::Nbd(Some(client)) = &mut self.disks[number].guest.attachment else { return };
        client.push(&mut self.random);
        if client.has_more() {
            let in_ns = self.random.below(200_000);
            self.schedule(in_ns, Event::Push(number));
        }
    }

    /// Switches a guest's write cache.
    pub(super) fn switch_cache(&mut self, number: usize, is_on: bool) {
        let disk = &mut self.disks[number];
        let promise = disk.model.flush_promise();
        let guest = &mut disk.guest;
        let Attachment::Vhost { front: Some(front), .. } = &mut guest.attachment else { return };
        // A process whose connection broke before the disks arrived answers at once, and flushes when it has them (decision
        // 0023, Weak).
        let is_cut = self.moving.as_ref().is_some_and(Move::is_cut);
        if guest.is_gone || guest.is_paused || !front.is_idle() || is_cut {
            return;
        }
        front.set_write_cache(is_on);
        front.pump();
        guest.switches += 1;
        guest.switch_promise = promise;
        guest.cache_is_on = guest.cache_is_on.filter(|before| *before == is_on);
        self.tally.cache_switches += 1;
        self.note(|| format!("disk {number}: the guest switches its write cache: {is_on}"));
    }

    /// Disconnects a guest. Another one connects after `in_ns`.
    pub(super) fn guest_gone(&mut self, number: usize, in_ns: u64) {
        let guest = &mut self.disks[number].guest;
        if guest.is_gone || guest.is_paused || guest.is_switching() {
            return;
        }
        if let Attachment::Vhost { front: Some(front), .. } = &mut guest.attachment {
            front.disconnect();
            front.pump();
        }
        guest.depart();
        guest.switches += 1;
        guest.is_gone = true;
        self.disks[number].model.leave(self.event);
        self.tally.departures += 1;
        self.note(|| format!("disk {number}: the guest is gone"));
        self.schedule(in_ns, Event::GuestBack(number));
    }

    pub(super) fn guest_back(&mut self, number: usize) {
        let disk = &mut self.disks[number];
        // The guest of another image may be there by now.
        if disk.position.is_none() || !disk.is_wanted || !disk.guest.is_gone {
            return;
        }
        disk.guest.is_gone = false;
        self.reattach(number);
    }

    /// Connects a guest to the present process.
    pub(super) fn reattach(&mut self, number: usize) {
        let path = self.nbd_path();
        let runs = self.process.is_some();
        let guest = &mut self.disks[number].guest;
        if guest.is_gone || guest.is_paused || !runs {
            return;
        }
        self.note(|| format!("disk {number}: the guest attaches"));
        let guest = &mut self.disks[number].guest;
        match &mut guest.attachment {
            Attachment::Vhost { guest, record, front: Some(front) } => {
                front.connect(guest, record.as_ref());
                front.pump();
            }
            Attachment::Vhost { front: None, .. } => {}
            Attachment::Nbd(client) => {
                *client = NbdClient::connect(&path, &format!("disk{number}"));
                let Some(client) = client else { return };
                guest.requests.iter().for_each(|request| send_nbd(client, request));
            }
        }
        self.push(number);
    }

    /// Receives the process's answers to a guest.
    pub(super) fn hear(&mut self, number: usize) -> Outcome {
        if let Attachment::Vhost { front: Some(front), .. } = &mut self.disks[number].guest.attachment
            && let Some(answered) = front.pump()
        {
            self.answered(number, answered)?;
        }
        while let Some((at, result)) = self.next_completion(number)? {
            let request = self.disks[number].guest.requests.remove(at);
            self.completed(number, &request, result)?;
        }
        self.push_idle(number);
        Ok(())
    }

    /// Reconnects a client whose connection was closed.
    fn push_idle(&mut self, number: usize) {
        let guest = &self.disks[number].guest;
        let Attachment::Nbd(client) = &guest.attachment else { return };
        if client.as_ref().is_some_and(|client| !client.is_connected()) && self.process.is_some() {
            self.reattach(number);
        }
    }

    fn answered(&mut self, number: usize, answered: Answered) -> Outcome {
        let disk = &mut self.disks[number];
        if answered == Answered::Stopped {
            disk.guest.queues_to_stop = disk.guest.queues_to_stop.saturating_sub(1);
        }
        let Answered::WriteCache(is_on) = answered else { return Ok(()) };
        disk.guest.cache_is_on = Some(is_on);
        let promise = std::mem::take(&mut disk.guest.switch_promise);
        if !is_on
            && !disk.guest.flush_may_fail
            && let Some(sector) = disk.model.broken_promise(&promise)
        {
            let text = format!("the write cache is off, and sector {sector} is not durable");
            return Err(self.at(Promise::FlushIsDurable, number, sector, text));
        }
        Ok(())
    }

    /// Returns the next request that the process has completed, or `None` if there is none.
    fn next_completion(&mut self, number: usize) -> Result<Option<Completion>, Violation> {
        let guest = &mut self.disks[number].guest;
        let requests = &guest.requests;
        match &mut guest.attachment {
            Attachment::Vhost { guest: memory, .. } => {
                // A guest polls only when it is notified.
                for queue in 0..memory.options.queue_count {
                    memory.interrupted(queue, Duration::ZERO).then(|| memory.poll(queue));
                }
                for (at, request) in requests.iter().enumerate() {
                    let Some(ticket) = request.ticket else { continue };
                    let data = memory.data(ticket, request.read_bytes());
                    if let Some(status) = memory.polled(ticket) {
                        let result = if status == 0 { Ok(sectors_of(&data)) } else { Err(()) };
                        return Ok(Some((at, result)));
                    }
                }
                Ok(None)
            }
            Attachment::Nbd(Some(client)) => {
                let find = |cookie: u64| requests.iter().position(|request| request.step as u64 == cookie);
                let answer = client.take(|cookie| find(cookie).map(|at| requests[at].read_bytes()));
                let answer = answer.map_err(|text| Violation::new(Promise::ExactlyOnce, text))?;
                Ok(answer.and_then(|(cookie, result)| {
                    Some((find(cookie)?, result.map(|data| sectors_of(&data)).map_err(drop)))
                }))
            }
            Attachment::Nbd(None) => Ok(None),
        }
    }
}

/// Returns the parts of the disk that a request is for.
fn ranges(ask: &Ask) -> &[Range<usize>] {
    match ask {
        Ask::Read(range) | Ask::Write { range, .. } => std::slice::from_ref(range),
        Ask::Discard(ranges) | Ask::WriteZeroes { ranges, .. } => ranges,
        Ask::Flush => &[],
    }
}

/// Returns the sectors of a request's data, or `None` if it has no data.
fn disk_range(ask: &Ask) -> Option<&Range<usize>> {
    match ask {
        Ask::Read(range) | Ask::Write { range, .. } => Some(range),
        Ask::Flush | Ask::Discard(_) | Ask::WriteZeroes { .. } => None,
    }
}
