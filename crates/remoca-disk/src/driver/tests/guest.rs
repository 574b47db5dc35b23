//! A driver with a real device and a guest, on a disk that answers as the test says.

use super::driver_of;
use crate::driver::{Disk, Driver, Source};
use crate::frontend::Frontend;
use crate::store::{Geometry, IoBuffer, Store, StoreCompletion, StoreError, StoreEvent, StoreOp};
use crate::testing::{Command, Options, TestGuest, Ticket};
use crate::vhost::{DeviceConfig, SocketSource, VhostDevice, signal};
use remoca_core::engine::Evicted;
use remoca_core::units::{PAGE_SIZE, PAGE_SIZE_U64, SlotIndex};
use remoca_protocol::{Frame, RequestId};
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

const DISK_BYTES: u64 = 1 << 20;
const PAGES: usize = 8;
const OK: u8 = 0;
const IO_ERROR: u8 = 1;
const PATIENCE: Duration = Duration::from_secs(60);

/// What the driver asked of the disk, and what the disk says.
#[derive(Default)]
struct Script {
    asked: VecDeque<(u64, StoreOp, Option<IoBuffer>)>,
    answers: VecDeque<StoreEvent>,
}

struct ScriptedStore {
    event: OwnedFd,
    script: Arc<Mutex<Script>>,
}

impl ScriptedStore {
    fn script(&self) -> MutexGuard<'_, Script> {
        self.script.lock().unwrap()
    }
}

impl Store for ScriptedStore {
    fn geometry(&self) -> Geometry {
        Geometry {
            size: DISK_BYTES,
            logical_sector: 512,
            physical_block: 4096,
            read_only: false,
            can_discard: true,
            can_write_zeroes: true,
        }
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    fn submit(&mut self, token: u64, op: StoreOp, buffer: Option<IoBuffer>) {
        self.script().asked.push_back((token, op, buffer));
    }

    fn kick(&mut self, _: Instant) {}

    fn handle_ready(&mut self, _: Instant) {}

    fn next_event(&mut self) -> Option<StoreEvent> {
        self.script().answers.pop_front()
    }

    fn in_flight(&self) -> usize {
        self.script().asked.len()
    }

    fn failed_flush(&self) -> Option<i32> {
        None
    }

    fn set_failed_flush(&mut self, _: Option<i32>) {}
}

struct Bench {
    driver: Driver,
    guest: TestGuest,
    script: Arc<Mutex<Script>>,
    _folder: tempfile::TempDir,
}

impl Bench {
    /// Has buffers for [`PAGES`] pages.
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("s");
        let mut config = DeviceConfig::disk("test", "test", DISK_BYTES);
        config.logical_block_bytes = 512;
        let device = VhostDevice::new(config, SocketSource::bind(&socket, None).unwrap()).unwrap();
        let script = Arc::<Mutex<Script>>::default();
        let disk = Disk {
            name: "disk".into(),
            image: String::new(),
            socket: String::new(),
            store: Box::new(ScriptedStore { event: signal::new().unwrap(), script: Arc::clone(&script) }),
            open: Box::new(|| unreachable!("nobody opens it anew")),
            swap: false,
            settles_at: None,
            kept_open: false,
            frontend: Frontend::Vhost(device),
        };
        let driver = driver_of(PAGES, vec![disk]);
        let guest = TestGuest::new(Options { queue_size: 16, data_bytes: 64 << 10, ..Options::default() });
        let mut bench = Self { driver, guest, script, _folder: folder };
        bench.meanwhile(|guest| guest.connect(&socket).unwrap());
        bench
    }

    fn turn(&mut self) {
        self.driver.handle(Source::Disk(0), false);
        self.driver.end_turn();
    }

    /// Turns until `done`.
    fn turn_until(&mut self, mut done: impl FnMut(&mut Self) -> bool) {
        let give_up_at = Instant::now() + PATIENCE;
        while !done(self) {
            assert!(Instant::now() < give_up_at, "waited in vain");
            self.turn();
            std::thread::yield_now();
        }
    }

    /// Serves, with a disk that does all it is asked, while the front end does something that it waits for.
    fn meanwhile<T: Send>(&mut self, action: impl FnOnce(&mut TestGuest) -> T + Send) -> T {
        let Self { driver, guest, script, .. } = self;
        std::thread::scope(|threads| {
            let action = threads.spawn(|| action(guest));
            while !action.is_finished() {
                driver.handle(Source::Disk(0), false);
                while answer(script, 0, Ok(()), 0) {}
                driver.end_turn();
                std::thread::yield_now();
            }
            action.join().unwrap()
        })
    }

    /// Submits a request, which the disk has then been asked about.
    fn submit(&mut self, command: Command) -> Ticket {
        let ticket = self.guest.submit(0, command);
        self.turn();
        ticket
    }

    /// The disk is done with the `which`th operation that it was asked for; a read brings this byte, failed or not.
    fn answer(&mut self, which: usize, result: Result<(), StoreError>, byte: u8) {
        assert!(answer(&self.script, which, result, byte), "the disk was asked for less");
        self.turn();
    }

    fn asked(&self) -> Vec<StoreOp> {
        self.script.lock().unwrap().asked.iter().map(|(_, op, _)| *op).collect()
    }

    fn read(&mut self, page: u64, pages: u64) -> Ticket {
        self.submit(Command::Read { sector: page * 8, length: pages * PAGE_SIZE_U64 })
    }

    /// The first page of the disk, of ones, is at the memory server.
    fn cache_first_page(&mut self) {
        let ticket = self.read(0, 1);
        self.answer(0, Ok(()), 1);
        assert_eq!(self.guest.result(ticket), Some(OK));
        assert!(matches!(self.driver.engine.handle_evicted(&[1; PAGE_SIZE]), Evicted::Admit(SlotIndex(0))));
    }

    /// The page of the only request under way comes, whatever its number.
    fn page_comes(&mut self) {
        for number in 0..16 {
            let (request, page) = (RequestId(number), &[1; PAGE_SIZE]);
            self.driver.handle_frame(&Frame::SendPage { request, slot: SlotIndex(0), page });
            self.driver.execute();
        }
        self.turn();
    }
}

fn answer(script: &Mutex<Script>, which: usize, result: Result<(), StoreError>, byte: u8) -> bool {
    let mut script = script.lock().unwrap();
    let Some((token, op, mut buffer)) = script.asked.remove(which) else { return false };
    if let (StoreOp::Read { .. }, Some(buffer)) = (op, &mut buffer) {
        buffer.fill(byte);
    }
    script.answers.push_back(StoreEvent::Completed(StoreCompletion { token, result, buffer }));
    true
}

#[test]
fn nothing_of_a_failed_read_is_delivered() {
    let mut bench = Bench::start();
    bench.cache_first_page();
    let ticket = bench.read(0, 1);
    assert!(bench.asked().is_empty(), "the memory server is asked");
    bench.driver.be_late();
    bench.turn();
    bench.answer(0, Err(StoreError::IO), 0xee);
    assert_eq!(bench.guest.result(ticket), None, "the page may still come");
    bench.page_comes();
    assert_eq!(bench.guest.result(ticket), Some(OK));
    assert!(bench.guest.data(ticket, PAGE_SIZE) == [1; PAGE_SIZE], "what the failed read left");
    assert!(bench.driver.requests.is_empty());
}

#[test]
fn a_departed_guest_writes_nothing() {
    let mut bench = Bench::start();
    bench.read(16, PAGES as u64);
    bench.submit(Command::Write { sector: 0, data: &[7; PAGE_SIZE] });
    assert_eq!(bench.asked().len(), 1, "there is no buffer for the write");
    bench.guest.disconnect();
    bench.turn_until(|bench| !bench.driver.disks[0].frontend.is_connected());
    bench.answer(0, Ok(()), 1);
    assert_eq!(bench.asked(), [], "whatever the buffer held before");
    assert!(bench.driver.requests.is_empty() && bench.driver.starved.is_empty());
}

#[test]
fn with_the_write_cache_off_every_modification_is_durable_when_it_completes() {
    let mut bench = Bench::start();
    for is_on in [true, false, true] {
        bench.meanwhile(|guest| guest.set_writeback(is_on).unwrap());
        let durable = !is_on;
        for command in [
            Command::Write { sector: 8, data: &[1; PAGE_SIZE] },
            Command::Write { sector: 8, data: &[1; 512] },
            Command::WriteZeroes(&[(16, 8, 0), (32, 8, 1)]),
        ] {
            let ticket = bench.submit(command);
            for op in bench.asked() {
                let said = match op {
                    StoreOp::Write { durable, .. } | StoreOp::WriteZeroes { durable, .. } => durable,
                    other => panic!("{other:?}"),
                };
                assert_eq!(said, durable, "{op:?} with the write cache {is_on}");
                bench.answer(0, Ok(()), 0);
            }
            assert_eq!(bench.guest.result(ticket), Some(OK));
        }
    }
}

#[test]
fn of_several_ranges_the_worst_outcome_is_that_of_the_request() {
    let mut bench = Bench::start();
    let ranges = [(0, 8, 0), (16, 8, 0), (32, 8, 0)];
    for command in [Command::WriteZeroes(&ranges), Command::Discard(&ranges)] {
        for failing in [None, Some(0), Some(1), Some(2)] {
            for backwards in [false, true] {
                let ticket = bench.submit(command);
                let count = bench.asked().len();
                assert_eq!(count, 3);
                for number in 0..count {
                    assert_eq!(bench.guest.result(ticket), None, "a range is not done");
                    let which = if backwards { count - 1 - number } else { number };
                    let result = if failing == Some(which) { Err(StoreError::IO) } else { Ok(()) };
                    bench.answer(if backwards { which } else { 0 }, result, 0);
                }
                let expected = if failing.is_some() { IO_ERROR } else { OK };
                assert_eq!(bench.guest.result(ticket), Some(expected), "{failing:?} fails, backwards: {backwards}");
            }
        }
    }
}

#[test]
fn a_hedge_that_is_left_out_leaves_nothing_behind() {
    let mut bench = Bench::start();
    bench.cache_first_page();
    let other = bench.read(16, PAGES as u64);
    let ticket = bench.read(0, 1);
    bench.driver.be_late();
    bench.turn();
    assert_eq!(bench.asked().len(), 1, "there is no buffer for the hedge");
    assert!(bench.driver.starved.has(0));
    bench.page_comes();
    assert_eq!(bench.guest.result(ticket), Some(OK));
    assert!(!bench.driver.starved.has(0), "nobody wants it any more");
    bench.answer(0, Ok(()), 2);
    assert_eq!(bench.guest.result(other), Some(OK));
    assert!(bench.driver.requests.is_empty(), "an upgrade would wait for it for ever");
}

/// The large read is asked for before any that came after it.
#[test]
fn what_waits_for_a_buffer_is_not_overtaken() {
    let mut bench = Bench::start();
    let mut small: VecDeque<_> = (0..PAGES as u64).map(|page| bench.read(16 + page, 1)).collect();
    let large = bench.read(32, 4);
    for page in 0..4 {
        small.push_back(bench.read(48 + page, 1));
        bench.answer(0, Ok(()), 2);
        assert_eq!(bench.guest.result(small.pop_front().unwrap()), Some(OK));
    }
    let is_large = |op: &StoreOp| matches!(op, StoreOp::Read { len, .. } if *len > 4096);
    let asked = bench.asked();
    let at = asked.iter().position(is_large).expect("its turn has come: four pages are free");
    assert_eq!(at, PAGES - 4, "{asked:?}");
    bench.answer(at, Ok(()), 3);
    assert_eq!(bench.guest.result(large), Some(OK));
    bench.meanwhile(TestGuest::wait_for_all);
}
