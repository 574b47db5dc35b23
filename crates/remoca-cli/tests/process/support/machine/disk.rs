//! One disk of a machine: a front end, and the model of what it must hold.

use super::setup::{Setup, socket};
use crate::support::model::{Action, Model, Request};
use crate::support::program::Nbdkit;
use crate::support::random::Random;
use remoca_frontend::testing::{Command, Options, TestGuest, Ticket};
use std::ops::Range;
use std::path::{Path, PathBuf};

pub const SECTOR: usize = 512;
/// Status byte of a request that succeeded.
pub const OK: u8 = 0;

/// One disk of the machine.
pub struct VirtualDisk {
    pub guest: TestGuest,
    pub model: Model,
    pub image: PathBuf,
    pub socket: PathBuf,
    pub nbd: Option<Nbdkit>,
    pub sector: usize,
}

impl VirtualDisk {
    /// Makes the image of disk `number` in `folder`, with random content, and starts its NBD server if the setup has
    /// one.
    pub fn new(folder: &Path, setup: &Setup, number: usize, random: &mut Random) -> Self {
        let sector = setup.sectors[number];
        let model = Model::new(setup.blocks, sector, random);
        let image = folder.join(format!("image{number}"));
        std::fs::write(&image, &model.bytes).unwrap();
        // The process bypasses the page cache, and would take a later write-back for another program's write.
        std::fs::File::open(&image).unwrap().sync_all().unwrap();
        let options = Options { queue_count: 2, queue_size: 32, data_bytes: 64 << 10, ..Options::default() };
        let nbd = setup.nbd.then(|| {
            let socket = folder.join(format!("nbd{number}"));
            Nbdkit::start_in_blocks(&socket, &image, setup.nbd_block, setup.nbd_delay)
        });
        Self { guest: TestGuest::new(options), model, image, socket: socket(folder, number), nbd, sector }
    }
    pub fn submit(&mut self, request: &Request, number: u16) -> Ticket {
        let sector = (request.range.start / SECTOR) as u64;
        let sectors = (request.range.len() / SECTOR) as u32;
        let queue = number % self.guest.options.queue_count;
        match &request.action {
            Action::Read => self.guest.submit(queue, Command::Read { sector, length: request.range.len() as u64 }),
            Action::Write(data) => self.guest.submit(queue, Command::Write { sector, data }),
            Action::WriteZeroes { unmap } => {
                self.guest.submit(queue, Command::WriteZeroes(&[(sector, sectors, u32::from(*unmap))]))
            }
            Action::Discard => self.guest.submit(queue, Command::Discard(&[(sector, sectors, 0)])),
            Action::Flush => self.guest.submit(queue, Command::Flush),
        }
    }

    pub fn submit_read(&mut self, range: &Range<usize>) -> Ticket {
        assert!(range.start.is_multiple_of(self.sector) && range.len().is_multiple_of(self.sector));
        let sector = (range.start / SECTOR) as u64;
        let ticket = self.guest.submit(0, Command::Read { sector, length: range.len() as u64 });
        self.guest.queues[0].kick();
        ticket
    }

    /// Reads a range, and waits for the data.
    pub fn read(&mut self, range: &Range<usize>) -> Vec<u8> {
        let ticket = self.submit_read(range);
        self.finish_read(ticket, range.len())
    }

    pub fn finish_read(&mut self, ticket: Ticket, length: usize) -> Vec<u8> {
        assert_eq!(self.guest.wait(ticket), OK);
        self.guest.data(ticket, length)
    }
}
