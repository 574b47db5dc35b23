//! Deaths and moves of the VM process: it is restarted, or the guest continues at another VM process.

use super::Machine;
use super::setup::{socket, spawn};
use crate::support::program::{Program, status};
use crate::support::{PATIENCE, wait_until};
use remoca_frontend::testing::TestGuest;
use remoca_protocol::control::Status;
use std::path::PathBuf;
use std::time::Instant;

/// A VM process beside the one that the guest is attached to.
pub struct Other {
    pub program: Program,
    pub host: PathBuf,
}

impl Other {
    #[track_caller]
    pub fn status(&self) -> Status {
        status(&self.host.join("control"))
    }
}

impl Machine {
    /// Starts `remoca disk` again after it ended, and attaches nobody.
    pub fn respawn(&mut self) {
        self.program = spawn(&self.setup, &self.host, &self.disks, &[]);
    }

    /// Starts `remoca disk` again after it was killed.
    pub fn restart(&mut self) {
        for (disk, number) in self.disks.iter_mut().zip(0..) {
            disk.socket = socket(&self.host, number);
        }
        self.program = spawn(&self.setup, &self.host, &self.disks, &[]);
        self.attach();
    }

    /// Starts another VM process for the same disks in the folder `name`, with further arguments. It has its own sockets.
    pub fn start_other(&self, name: &str, arguments: &[String]) -> Other {
        let host = self.folder.path().join(name);
        std::fs::create_dir_all(&host).unwrap();
        let mut program = spawn(&self.setup, &host, &self.disks, arguments);
        wait_until("the other VM process answers", || {
            assert!(program.is_running(), "{}", program.log());
            std::os::unix::net::UnixStream::connect(host.join("control")).is_ok()
        });
        Other { program, host }
    }

    /// Stops all queues, as a hypervisor does after it has copied all memory. Each stop is answered when the queue is
    /// drained.
    pub fn stop_queues(&mut self) {
        for guest in self.guests() {
            for queue in 0..guest.queues.len() {
                guest.stop_queue(queue).unwrap();
            }
        }
    }

    /// Starts the queues again, at the same VM process.
    pub fn start_queues(&mut self) {
        for guest in self.guests() {
            for queue in 0..guest.queues.len() {
                let base = guest.queues[queue].used_index();
                guest.start_queue(queue, base).unwrap();
            }
        }
    }

    /// Moves the guest, whose queues are stopped, to the other VM process. Returns the process that it left.
    pub fn move_to(&mut self, other: Other) -> Other {
        self.guests().for_each(TestGuest::move_away);
        let Other { program, host } = other;
        let left = Other {
            program: std::mem::replace(&mut self.program, program),
            host: std::mem::replace(&mut self.host, host),
        };
        for (disk, number) in self.disks.iter_mut().zip(0..) {
            disk.socket = socket(&self.host, number);
        }
        self.attach();
        // The process may have counted pages when the guest was there before.
        self.pages_sent = self.counter("evictions_reported");
        left
    }

    /// Waits until no request of the guest is in flight. Meanwhile restores what is lost: the process, and
    /// connections to it.
    pub fn outlive(&mut self) {
        let give_up_at = Instant::now() + PATIENCE;
        while self.outlives && self.is_waiting() {
            assert!(Instant::now() < give_up_at, "requests are lost: {}", self.program.log());
            self.come_back();
            std::thread::sleep(std::time::Duration::from_micros(200));
        }
    }

    fn is_waiting(&mut self) -> bool {
        let mut is_waiting = false;
        for guest in self.disks.iter_mut().map(|disk| &mut disk.guest).chain([&mut self.port]) {
            for queue in 0..guest.options.queue_count {
                guest.poll(queue);
            }
            is_waiting |= guest.outstanding() > 0;
        }
        is_waiting
    }

    /// Restarts the process if it has died, and reconnects the guests that are disconnected.
    pub fn come_back(&mut self) {
        if !self.program.is_running() {
            self.deaths += usize::from(!self.image_was_in_use());
            if let Some(at) = self.setup.arguments.iter().position(|argument| argument == "--kill-at") {
                // The successor must not die of the same option.
                self.setup.arguments.drain(at..at + 2);
            }
            self.program = spawn(&self.setup, &self.host, &self.disks, &[]);
        }
        let port = self.host.join("port");
        let disks = self.disks.iter_mut().map(|disk| (&mut disk.guest, disk.socket.as_path()));
        for (guest, socket) in disks.chain([(&mut self.port, port.as_path())]) {
            // The process may not listen yet, or may die again meanwhile.
            if !guest.is_connected() {
                match guest.connect(socket) {
                    Ok(()) => self.reconnects += 1,
                    Err(_) => guest.disconnect(),
                }
            }
        }
    }
}
