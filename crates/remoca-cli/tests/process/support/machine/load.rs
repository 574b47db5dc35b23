//! What the guest of a machine does: rounds of requests and of evicted pages, and a record of what went wrong.

use super::Machine;
use super::disk::{OK, SECTOR};
use crate::support::PATIENCE;
use crate::support::model::{Action, BLOCK, Request};
use remoca_frontend::testing::{Command, Ticket};
use std::time::Instant;

const REQUESTS_PER_ROUND: usize = 16;
const PAGES_PER_ROUND: usize = 24;
/// Number of rounds between two looks at the state of the process, which cost more than a round.
const ROUNDS_BETWEEN_LOOKS: usize = 4;
/// Maximum number of descriptions of wrong answers that are kept.
const EXAMPLES_MAX: usize = 5;

/// What the guest writes to its port: relative frequencies.
#[derive(Clone, Copy, Debug)]
pub struct Evictions {
    pub current: usize,
    /// What a block held before it was written.
    pub stale: usize,
    pub garbage: usize,
    /// Pages of another guest, the same ones again and again.
    pub foreign: usize,
    pub zero: usize,
}

impl Evictions {
    /// A guest that behaves as it should.
    pub const HONEST: Self = Self { current: 30, stale: 0, garbage: 0, foreign: 0, zero: 1 };
    /// A guest that mostly lies.
    pub const LYING: Self = Self { current: 12, stale: 6, garbage: 6, foreign: 6, zero: 2 };
}

/// What went wrong so far.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Requests that returned a wrong byte.
    pub wrong: usize,
    /// Requests that failed.
    pub errors: usize,
    pub examples: Vec<String>,
}

impl Outcome {
    fn wrong(&mut self, example: String) {
        self.wrong += 1;
        self.note(example);
    }

    fn error(&mut self, example: String) {
        self.errors += 1;
        self.note(example);
    }

    fn note(&mut self, example: String) {
        if self.examples.len() < EXAMPLES_MAX {
            self.examples.push(example.chars().take(300).collect());
        }
    }
}

impl Machine {
    /// Does rounds until `done` returns true. Fails the test if that takes too long.
    #[track_caller]
    pub fn run_until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        let give_up_at = Instant::now() + PATIENCE;
        loop {
            self.run(ROUNDS_BETWEEN_LOOKS);
            if done(self) {
                return;
            }
            assert!(Instant::now() < give_up_at, "waited in vain: {what}");
        }
    }

    /// Does rounds until the memory server has delivered `count` more blocks. Has no time limit while some arrive.
    #[track_caller]
    pub fn run_until_hits(&mut self, count: u64) {
        let mut hits = self.counter("hit_blocks");
        let wanted = hits + count;
        while hits < wanted {
            self.run_until("blocks come from the memory server", |machine| {
                let before = std::mem::replace(&mut hits, machine.counter("hit_blocks"));
                hits > before
            });
        }
    }

    /// Reads until the memory server has delivered `count` more blocks. Without writes, pages on the server stay
    /// useful. Has no time limit while some arrive.
    #[track_caller]
    pub fn read_until_hits(&mut self, count: u64) {
        let mut hits = self.counter("hit_blocks");
        let wanted = hits + count;
        let mut give_up_at = Instant::now() + PATIENCE;
        while hits < wanted {
            assert!(Instant::now() < give_up_at, "no more blocks come from the memory server");
            self.read_everything();
            let before = std::mem::replace(&mut hits, self.counter("hit_blocks"));
            if hits > before {
                give_up_at = Instant::now() + PATIENCE;
            }
        }
    }

    /// Reads all disks, and expects exactly what they hold. Also evicts pages: a guest that reports no evictions
    /// would have its reads admitted.
    #[track_caller]
    pub fn read_everything(&mut self) {
        for disk in 0..self.disks.len() {
            for number in 0..self.disks[disk].model.bytes.len() / BLOCK {
                if number % 256 == 0 {
                    self.evict();
                }
                let disk = &mut self.disks[disk];
                let got = disk.read(&(number * BLOCK..(number + 1) * BLOCK));
                assert!(got == disk.model.block(number), "block {number}");
            }
        }
    }

    /// Does rounds until `count()` has reached `wanted`. Has no time limit while it grows.
    #[track_caller]
    pub fn run_until_count(&mut self, what: &str, wanted: usize, count: impl Fn() -> usize) {
        let mut reached = count();
        while reached < wanted {
            self.run_until(what, |_| {
                let before = std::mem::replace(&mut reached, count());
                reached > before
            });
        }
    }

    pub fn run(&mut self, rounds: usize) {
        (0..rounds).for_each(|_| self.round());
    }

    /// Does one round: submits requests to every disk, and evicts pages.
    pub fn round(&mut self) {
        for number in 0..self.disks.len() {
            self.requests(number);
        }
        self.evict();
    }

    /// Submits requests to one disk, and checks the answers.
    pub fn requests(&mut self, number: usize) {
        let disk = &mut self.disks[number];
        let requests = disk.model.requests(REQUESTS_PER_ROUND, &mut self.random);
        let submitted: Vec<(Ticket, &Request)> =
            requests.iter().zip(0..).map(|(r, n)| (disk.submit(r, n), r)).collect();
        for queue in &disk.guest.queues {
            queue.kick();
        }
        self.outlive();
        let disk = &mut self.disks[number];
        for (ticket, request) in &submitted {
            if disk.guest.wait(*ticket) != OK {
                self.outcome.error(format!("disk {number}: {request:?} failed"));
            }
        }
        for (ticket, request) in &submitted {
            let range = &request.range;
            if request.action == Action::Read {
                let got = disk.guest.data(*ticket, range.len());
                if let Some(at) = disk.model.first_wrong_byte(range, &got, &requests) {
                    self.outcome.wrong(format!("disk {number}: wrong byte {at} in a read of {range:?}"));
                }
            }
        }
        requests.iter().for_each(|request| disk.model.apply(request));
        for discard in requests.iter().filter(|request| request.action == Action::Discard) {
            let ticket = self.disks[number].submit_read(&discard.range);
            self.outlive();
            let disk = &mut self.disks[number];
            let got = disk.finish_read(ticket, discard.range.len());
            if let Some(at) = disk.model.adopt(&discard.range, &got) {
                self.outcome.wrong(format!("disk {number}: wrong byte {at} after a discard of {:?}", discard.range));
            }
        }
    }

    /// Writes evicted pages of all kinds to the port. Some pages are sent twice.
    fn evict(&mut self) {
        let mut pages: Vec<Vec<u8>> = Vec::new();
        for _ in 0..PAGES_PER_ROUND {
            let again = self.random.one_in(16);
            let page = match pages.last() {
                Some(last) if again => last.clone(),
                _ => self.evicted_page(),
            };
            pages.push(page);
        }
        let block = 1 + self.random.below(100);
        if self.send_to_port(block, &pages.concat()) != OK {
            self.outcome.error("the port refused a batch".into());
        }
        self.pages_sent += pages.len() as u64;
    }

    fn evicted_page(&mut self) -> Vec<u8> {
        let Evictions { current, stale, garbage, foreign, zero } = self.evictions;
        let disk = self.random.below(self.disks.len());
        let model = &self.disks[disk].model;
        let kind = self.random.below(current + stale + garbage + foreign + zero);
        let page = if kind < current {
            model.held_block(&mut self.random).map(|number| model.block(number).to_vec())
        } else if kind < current + stale {
            model.stale_content(&mut self.random)
        } else if kind < current + stale + garbage {
            None
        } else if kind < current + stale + garbage + foreign {
            Some(self.random.pick(&self.foreign).clone())
        } else {
            Some(vec![0; BLOCK])
        };
        page.unwrap_or_else(|| self.random.bytes(BLOCK))
    }

    /// Writes to the port, and returns the status byte.
    pub fn send_to_port(&mut self, block: usize, data: &[u8]) -> u8 {
        let ticket = self.port.submit(0, Command::Write { sector: (block * BLOCK / SECTOR) as u64, data });
        self.port.queues[0].kick();
        self.outlive();
        self.port.wait(ticket)
    }
}
