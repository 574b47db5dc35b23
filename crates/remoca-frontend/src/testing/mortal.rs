//! A back end process whose disk is a file: it can be killed, and another one continues where it stopped.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Signal, getpid, kill_process, set_parent_process_death_signal};

use crate::request::{CopyError, Operation};
use crate::vhost::{BlkRequest, DeviceConfig, Status, VhostDevice};
use remoca_io::socket::SocketSource;

/// A disk in a file.
#[derive(Debug)]
pub struct FileDisk {
    file: File,
    buffer: Vec<u8>,
}

impl FileDisk {
    pub fn new(file: File) -> Self {
        FileDisk { file, buffer: Vec::new() }
    }

    pub fn execute(&mut self, request: &BlkRequest) -> Status {
        self.buffer.resize(request.data_length(), 0);
        let result = match request.operation() {
            Operation::Read { range } => {
                self.file.read_exact_at(&mut self.buffer, range.start).unwrap();
                request.copy_to_guest(0, &self.buffer)
            }
            Operation::Write { range } => {
                let copied = request.copy_from_guest(0, &mut self.buffer);
                copied.map(|()| self.file.write_all_at(&self.buffer, range.start).unwrap())
            }
            Operation::Discard { ranges } => {
                ranges.iter().for_each(|range| self.zero(range));
                Ok(())
            }
            Operation::WriteZeroes { ranges } => {
                ranges.iter().for_each(|zero| self.zero(&zero.range));
                Ok(())
            }
            Operation::Flush => Ok(()),
        };
        match result {
            Ok(()) | Err(CopyError::Disconnected) => Status::Ok,
            Err(CopyError::OutOfRange | CopyError::GuestMemory) => Status::IoError,
        }
    }

    fn zero(&self, range: &std::ops::Range<u64>) {
        let zeroes = [0; 65_536];
        let mut start = range.start;
        while start < range.end {
            let length = (range.end - start).min(zeroes.len() as u64);
            self.file.write_all_at(&zeroes[..length as usize], start).unwrap();
            start += length;
        }
    }
}

/// Serves the file until this process is killed: by another process, by itself after `steps` steps of its work, or
/// because the thread that started it has ended.
///
/// Requests are completed last in, first out, and published in parts of different sizes.
pub fn serve_until_death(config: DeviceConfig, socket: &Path, file: File, steps: Option<u64>) -> ! {
    set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
    let mut left = steps.unwrap_or(u64::MAX);
    let mut step = || {
        left -= 1;
        if left == 0 {
            kill_process(getpid(), Signal::KILL).unwrap();
        }
    };
    let mut disk = FileDisk::new(file);
    let mut device = VhostDevice::new(config, SocketSource::bind(socket, None).unwrap()).unwrap();
    let mut taken: Vec<BlkRequest> = Vec::new();
    loop {
        if device.listen() != Some(true) {
            poll(&mut [PollFd::from_borrowed_fd(device.event_fd(), PollFlags::IN)], None).unwrap();
        }
        device.handle_events().unwrap();
        while let Some(request) = device.pop() {
            taken.push(request);
            step();
        }
        while let Some(request) = taken.pop() {
            let status = disk.execute(&request);
            step();
            device.complete(request, status);
            step();
            if taken.len().is_multiple_of(3) {
                device.notify();
                step();
            }
        }
        device.notify();
    }
}
