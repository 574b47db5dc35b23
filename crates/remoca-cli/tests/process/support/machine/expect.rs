//! What is expected of a machine: its state file, its account of evicted pages, and its images at the end.

use super::Machine;
use super::disk::OK;
use crate::support::wait_until;
use remoca_core::units::DiskIndex;
use remoca_disk::state::{DiskRecord, Header};
use remoca_frontend::testing::Command;
use std::fs::OpenOptions;

impl Machine {
    /// Waits until the state file records for every image that no write to it is in progress.
    #[track_caller]
    pub fn settle(&self) {
        for disk in 0..self.disks.len() {
            wait_until("the image is settled", || self.record_of_disk(disk).written_ns == 0);
        }
    }

    /// Returns the state file's record of a disk.
    pub fn record_of_disk(&self, disk: usize) -> DiskRecord {
        let file = OpenOptions::new().read(true).write(true).open(self.state()).unwrap();
        let header = Header::map(&file, self.disks.len().try_into().unwrap()).unwrap();
        assert!(header.is_valid(), "the state file says nothing");
        header.disk(DiskIndex(disk.try_into().unwrap()))
    }

    /// Ends the machine. Expects that nothing was wrong, that every evicted page is accounted for, and that the
    /// images hold what the model says once the process is gone.
    #[track_caller]
    pub fn finish(mut self) {
        self.expect_no_harm();
        self.expect_account();
        assert!(!self.server_is_honest || self.counter("fetch_wrong") == 0, "pages went to the wrong slots");
        for disk in &mut self.disks {
            assert_eq!(disk.guest.run(0, Command::Flush), OK);
            disk.guest.disconnect();
        }
        self.port.disconnect();
        self.program.terminate();
        // After a kill, an NBD server is given some time.
        let may_stay = self.setup.nbd && self.program.log().contains("the sockets stay, so that a successor waits");
        for (disk, number) in self.disks.iter().zip(0..) {
            assert!(may_stay || !disk.socket.exists(), "a socket is left behind");
            let image = std::fs::read(&disk.image).unwrap();
            assert_eq!(image.len(), disk.model.bytes.len());
            let differs = image.iter().zip(&disk.model.bytes).position(|(a, b)| a != b);
            assert_eq!(differs, None, "image {number} holds something else than was written");
        }
        assert!(may_stay || !self.control().exists(), "the control socket is left behind");
    }

    #[track_caller]
    pub fn expect_no_harm(&mut self) {
        assert!(self.program.is_running(), "{}", self.program.log());
        assert!(self.outcome.wrong == 0 && self.outcome.errors == 0, "{:#?}", self.outcome);
    }

    /// Expects that reported = admitted + duplicate + zero + unmatched + dropped, and that reported is what was sent.
    #[track_caller]
    fn expect_account(&self) {
        let counters = self.status().counters;
        let fates = ["admitted", "duplicate", "zero", "unmatched", "dropped", "passed_over"];
        let sum: u64 = fates.iter().map(|fate| counters[&format!("evictions_{fate}")]).sum();
        assert_eq!(counters["evictions_reported"], sum);
        assert_eq!(counters["evictions_reported"], self.pages_sent);
    }
}
