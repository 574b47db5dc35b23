//! A RAM disk behind a [`VhostDevice`], driven by the loop that every driver uses.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;

use crate::request::Operation;
use crate::vhost::{BlkRequest, DeviceConfig, Status, VhostDevice};
use remoca_io::socket::SocketSource;

/// How often the loop looks at its plan when nothing else wakes it.
const PLAN_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };

/// A disk in memory.
#[derive(Debug, Default)]
pub struct RamDisk {
    pub bytes: Vec<u8>,
    pub flush_count: usize,
    buffer: Vec<u8>,
}

impl RamDisk {
    pub fn new(length: usize) -> Self {
        RamDisk { bytes: vec![0; length], ..RamDisk::default() }
    }

    pub fn execute(&mut self, request: &BlkRequest) -> Status {
        let index = |range: &Range<u64>| range.start as usize..range.end as usize;
        let copied = match request.operation() {
            Operation::Read { range } => request.copy_to_guest(0, &self.bytes[index(range)]),
            Operation::Write { range } => {
                self.buffer.resize(request.data_length(), 0);
                let copied = request.copy_from_guest(0, &mut self.buffer);
                if copied.is_ok() {
                    self.bytes[index(range)].copy_from_slice(&self.buffer);
                }
                copied
            }
            Operation::Flush => {
                self.flush_count += 1;
                Ok(())
            }
            Operation::Discard { ranges } => {
                ranges.iter().for_each(|range| self.bytes[index(range)].fill(0));
                Ok(())
            }
            Operation::WriteZeroes { ranges } => {
                ranges.iter().for_each(|zero| self.bytes[index(&zero.range)].fill(0));
                Ok(())
            }
        };
        if copied.is_ok() { Status::Ok } else { Status::IoError }
    }
}

/// What a [`Backend`] does with its requests; can be changed while it runs.
#[derive(Debug, Default)]
pub struct Plan {
    /// Takes requests and does not complete them.
    pub hold: AtomicBool,
    /// Takes no requests.
    pub deaf: AtomicBool,
    /// Executes the requests that it holds without completing them.
    pub execute_held: AtomicBool,
    /// Completes the requests of a batch in reverse order.
    pub reverse: AtomicBool,
    /// Ends the loop.
    pub stop: AtomicBool,
    /// Number of turns of the loop.
    pub turns: AtomicUsize,
    /// Number of requests that the loop holds.
    pub held: AtomicUsize,
    /// Number of requests taken so far.
    pub taken: AtomicUsize,
    pub connected: AtomicBool,
    pub write_cache: AtomicBool,
}

/// A device on a RAM disk, in a thread. Dropping it acts like the death of the back end: the requests that it holds are
/// not completed.
pub struct Backend {
    pub socket: PathBuf,
    pub plan: Arc<Plan>,
    pub disk: Arc<Mutex<RamDisk>>,
    thread: Option<JoinHandle<()>>,
}

impl Backend {
    pub fn spawn(config: DeviceConfig, socket: &Path, disk: Arc<Mutex<RamDisk>>) -> Self {
        Self::spawn_with(config, socket, disk, Plan::default())
    }

    pub fn spawn_with(config: DeviceConfig, socket: &Path, disk: Arc<Mutex<RamDisk>>, plan: Plan) -> Self {
        let plan = Arc::new(plan);
        let device = VhostDevice::new(config, SocketSource::bind(socket, None).unwrap()).unwrap();
        let (theirs, ram) = (plan.clone(), disk.clone());
        let thread = std::thread::spawn(move || serve(device, &ram, &theirs));
        Backend { socket: socket.into(), plan, disk, thread: Some(thread) }
    }

    /// Waits until `done`, or fails the test.
    pub fn wait_until(&self, what: &str, done: impl Fn(&Plan) -> bool) {
        for _ in 0..600_000 {
            if done(&self.plan) {
                return;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        panic!("{what} did not come");
    }

    /// Waits until the loop has seen everything that happened before the call.
    pub fn wait_for_turn(&self) {
        let seen = self.plan.turns.load(Ordering::SeqCst);
        self.wait_until("a turn of the loop", |plan| plan.turns.load(Ordering::SeqCst) >= seen + 2);
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        self.plan.stop.store(true, Ordering::SeqCst);
        let ended = self.thread.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            ended.unwrap().expect("the driver loop must not panic");
        }
    }
}

/// The driver loop: events, requests, completions, one notification.
fn serve(mut device: VhostDevice, disk: &Mutex<RamDisk>, plan: &Plan) {
    let mut held: Vec<BlkRequest> = Vec::new();
    while !plan.stop.load(Ordering::SeqCst) {
        if device.listen() != Some(true) {
            let _ = poll(&mut [PollFd::from_borrowed_fd(device.event_fd(), PollFlags::IN)], Some(&PLAN_INTERVAL));
        }
        device.handle_events().unwrap();
        let mut disk = disk.lock().unwrap();
        while !plan.deaf.load(Ordering::SeqCst)
            && let Some(request) = device.pop()
        {
            plan.taken.fetch_add(1, Ordering::SeqCst);
            if plan.hold.load(Ordering::SeqCst) && plan.execute_held.load(Ordering::SeqCst) {
                disk.execute(&request);
            }
            held.push(request);
        }
        if !plan.hold.load(Ordering::SeqCst) {
            if plan.reverse.load(Ordering::SeqCst) {
                held.reverse();
            }
            for request in held.drain(..) {
                let status = disk.execute(&request);
                device.complete(request, status);
            }
        }
        device.notify();
        // Who sees a connection, or its requests, also sees what was agreed on before.
        plan.write_cache.store(device.write_cache_enabled(), Ordering::SeqCst);
        plan.connected.store(device.is_connected(), Ordering::SeqCst);
        plan.held.store(held.len(), Ordering::SeqCst);
        plan.turns.fetch_add(1, Ordering::SeqCst);
    }
}
