//! A driver whose disks hang and whose memory server is the test.

use super::requests::{Group, Origin};
use super::servers::Hearing;
use super::sizes::Sizes;
use super::*;
use crate::clock::{Clock, SystemClock};
use crate::link::{HostNetwork, ServerLink};
use crate::state::{Before, OptionHashes, StateFile};
use remoca_core::engine::{
    DiskEngine, EngineConfig, Evicted, GuestOp, Leaving, PoolOffer, RequestId, ServerNumber, layout,
};
use remoca_core::index::DISK_BYTES_MAX;
use remoca_core::rules::Rules;
use remoca_core::units::PageCount;
use remoca_core::units::{ByteRange, DiskIndex, PAGE_SIZE, PAGE_SIZE_U64};
use remoca_frontend::device::Frontend;
use remoca_frontend::nbd::{ExportGeometry, NbdExport};
use remoca_io::buffer::{BufferPool, IoBuffer};
use remoca_io::control::{Answer, ControlServer};
use remoca_io::lock::ImageLock;
use remoca_io::wake;
use remoca_io::words::IndexMemory;
use remoca_protocol::Frame;
use remoca_protocol::control::{Command, DiskTraffic, Reply};
use remoca_protocol::handover::StoreKind;
use remoca_store::{
    DataPath, Geometry, HandOver, Identity, ImageStamp, OpenError, OpenErrorKind, StoreEvent, StoreHealth, StoreOp,
};
use rustix::event::{PollFd, PollFlags, poll};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Instant;

const DISK_SIZE: u64 = 1 << 20;
const PAGE: GuestOp = GuestOp::Read(ByteRange { offset: 0, length: PAGE_SIZE_U64 });

/// A store without an image: nobody can have changed it, and nothing of it outlives its use. Whether it tells its size again.
macro_rules! leaves_nothing_behind {
    ($store:ty, $measures:literal) => {
        impl Identity for $store {
            fn look(&mut self) -> bool {
                false
            }

            fn measure(&mut self) -> bool {
                $measures
            }

            fn stamp_at_opening(&self) -> Option<ImageStamp> {
                None
            }

            fn shared_stamp(&self, _: bool) -> Option<String> {
                None
            }

            fn empty_page_cache(&mut self) {}

            fn may_be_in_page_cache(&self) -> bool {
                true
            }
        }

        impl HandOver for $store {
            fn failed_flush(&self) -> Option<i32> {
                None
            }

            fn set_failed_flush(&mut self, _: Option<i32>) {}

            fn is_still(&self) -> bool {
                self.in_flight() == 0
            }

            fn begin_drain(&mut self) {}

            fn drain(&mut self, _flush_by: Instant) -> bool {
                true
            }

            fn hand_over(&self) -> Result<(BorrowedFd<'_>, StoreKind), String> {
                Err("its store cannot be handed over".into())
            }
        }
    };
}

mod guest;

type Submitted = Arc<Mutex<Vec<(u64, Option<IoBuffer>)>>>;

/// Does nothing but hold what it was given.
struct HangingStore {
    size: u64,
    event: OwnedFd,
    submitted: Submitted,
}

impl DataPath for HangingStore {
    fn geometry(&self) -> Geometry {
        Geometry {
            size: self.size,
            logical_sector: 512,
            physical_block: 4096,
            read_only: false,
            can_discard: false,
            can_write_zeroes: false,
            may_forget: false,
            outlives_process: false,
        }
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    fn submit(&mut self, token: u64, _: StoreOp, buffer: Option<IoBuffer>) {
        self.submitted.lock().unwrap().push((token, buffer));
    }

    fn kick(&mut self, _: Instant) {}

    fn handle_ready(&mut self, _: Instant) {}

    fn next_event(&mut self) -> Option<StoreEvent> {
        None
    }

    fn next_deadline(&self) -> Option<Instant> {
        None
    }

    fn handle_timer(&mut self, _: Instant) {}

    fn in_flight(&self) -> usize {
        self.submitted.lock().unwrap().len()
    }

    fn health(&self) -> StoreHealth {
        StoreHealth::Up
    }
}

leaves_nothing_behind!(HangingStore, false);

fn disk(submitted: &Submitted) -> Disk {
    disk_with(DISK_SIZE, submitted)
}

/// With an image of `size` bytes.
fn disk_with(size: u64, submitted: &Submitted) -> Disk {
    let geometry = ExportGeometry { can_trim: false, can_write_zeroes: false, ..ExportGeometry::of_disk(DISK_SIZE) };
    Disk {
        number: DiskIndex(0),
        name: String::new(),
        image: String::new(),
        socket: String::new(),
        store: Box::new(HangingStore { size, event: wake::new().unwrap(), submitted: Arc::clone(submitted) }),
        open: Box::new(|_| unreachable!("nobody opens it anew")),
        swap: false,
        settles_at: None,
        had_guest: false,
        has_lost_guest: false,
        kept_open: false,
        had_bytes: None,
        traffic: DiskTraffic::default(),
        frontend: Frontend::Nbd(NbdExport::new(geometry).unwrap()),
    }
}

/// With a session, two disks, and buffers for `pages` pages.
fn driver(pages: usize, submitted: &[Submitted; 2]) -> Driver {
    // Numbers are not positions.
    let numbered = |(submitted, number)| Disk { number: DiskIndex(number), ..disk(submitted) };
    driver_of(pages, submitted.iter().zip([1, 0]).map(numbered).collect())
}

fn driver_of(pages: usize, disks: Vec<Disk>) -> Driver {
    let config = config(disks.len());
    begin(parts(pages, disks, config))
}

pub(super) fn config(disks: usize) -> EngineConfig {
    EngineConfig {
        disks: u16::try_from(disks).unwrap(),
        key: [7; 16],
        seed: 1,
        cache: PageCount(8),
        local: PageCount(0),
        guest_memory: PageCount(20_000),
        has_port: true,
        frame_sample: 0,
        send_window: 64,
        fetch_limit: 64,
        slots_per_turn: 64,
        pools: 16,
        hedge: true,
        rules: Rules::default(),
    }
}

fn parts(pages: usize, disks: Vec<Disk>, config: EngineConfig) -> Parts {
    Parts {
        name: String::new(),
        clock: Box::new(SystemClock),
        engine: DiskEngine::new(&config, IndexMemory::new(layout(&config).words()).unwrap()),
        state: None,
        cold_reason: None,
        former: Former::default(),
        sizes: TierSizes { cache: config.cache, local: config.local },
        cache_enabled: true,
        options: OptionHashes::default(),
        disks,
        port: None,
        nbd: None,
        link: None,
        local_server: "local:/l".parse().unwrap(),
        migration: Migration::new(Box::new(crate::migration::HostPeers), None, None, None, config, true, false)
            .unwrap(),
        control: None,
        guest_memory_max: PageCount(1 << 20),
        poll_time_max: std::time::Duration::ZERO,
        buffers: BufferPool::new(pages * PAGE_SIZE),
        trace: None,
        stop: wake::new().unwrap(),
        hangup: wake::new().unwrap(),
        start: Start {
            program: "remoca".into(),
            arguments: Vec::new(),
            upgrades: 0,
            notice: None,
            openers: Arc::default(),
        },
        ask: Box::new(|_, _, _| unreachable!("no upgrade is asked for")),
        aside: Box::new(on_a_thread),
        manager: ServiceManager::default(),
    }
}

/// A driver that waits for its disk.
pub(super) fn waiting(config: EngineConfig) -> Driver {
    let peers = Box::new(crate::migration::HostPeers);
    let migration = Migration::new(peers, None, None, None, config, true, true).unwrap();
    begin(Parts { migration, ..parts(8, vec![disk(&Submitted::default())], config) })
}

/// A driver whose index is in a new state file.
fn begin_with_state(path: &Path, engine: EngineConfig) -> Driver {
    let started = StateFile::start(path, &engine, Before::Another).unwrap();
    let parts = parts(8, vec![disk(&Submitted::default())], engine);
    begin(Parts { engine: started.engine, state: started.state, ..parts })
}

/// A driver of these parts, with a session if it has its disks.
fn begin(parts: Parts) -> Driver {
    let cache = parts.sizes.cache;
    let mut driver = Driver::new(parts).unwrap();
    if !driver.migration.serves() {
        return driver;
    }
    let server = ServerNumber(0);
    driver.vm.engine.set_servers(driver.vm.host.now(), &[server], Leaving::AtOnce);
    let offer = PoolOffer { generation: 1, npages: cache, available: cache, sends_received: 0 };
    driver.vm.engine.handle_answer(driver.vm.host.now(), server, Some(offer));
    driver.vm.execute();
    driver
}

impl Driver {
    /// A guest reads the first page of a disk.
    fn read(&mut self, disk: u16) -> RequestId {
        let group = Group::new(None, 1);
        let origin = Origin::Part(Rc::new(group));
        let vm = &mut self.vm;
        let id = vm.in_flight.begin(disk, PAGE, vm.host.now(), origin);
        vm.engine.handle_request(vm.host.now(), id, vm.guests.number(disk), PAGE);
        vm.execute();
        id
    }

    /// Time passes until the disk is asked for reads that the server has not answered.
    fn be_late(&mut self) {
        let vm = &mut self.vm;
        let deadline = vm.engine.next_deadline().expect("a read waits");
        let now = vm.host.now();
        vm.host.advance_to(now.plus_ns(deadline.since_ns(now)));
        vm.engine.handle_timer(vm.host.now());
        vm.execute();
        vm.feed_starved();
    }

    /// Waits for the region that a thread makes for the index, and takes it.
    fn take_index(&mut self) {
        let wake = PollFd::from_borrowed_fd(self.vm.size.wake_fd(), PollFlags::IN);
        poll(&mut [wake], None).unwrap();
        self.handle(Source::Index, false);
    }

    /// Moves the rest of the index.
    fn end_move(&mut self) {
        while self.is_moving_index() {
            self.take_leftovers();
        }
    }

    fn begin_upgrade(&mut self, program: &str) {
        self.upgrades.begin(Some(program.into()), None, &self.vm, None);
    }

    /// Goes on with an upgrade that cannot be done, or not yet. Returns whether it is still under way.
    fn is_draining_for_upgrade(&mut self) -> bool {
        assert!(self.upgrades.advance(&mut self.vm, None, None).is_none());
        self.is_draining()
    }

    /// The server sends a frame.
    fn hear(&mut self, frame: &Frame<'_>) {
        let Vm { engine, in_flight, host, .. } = &mut self.vm;
        Hearing::new(ServerNumber(0)).hear(frame, engine, in_flight, host.now());
        self.vm.execute();
    }
}

#[test]
fn reads_that_the_server_does_not_answer_find_buffers_whatever_another_disk_has() {
    let submitted = [Submitted::default(), Submitted::default()];
    let asked = || submitted.each_ref().map(|of_disk| of_disk.lock().unwrap().len());
    let mut driver = driver(8, &submitted);
    for (disk, submitted) in (0..).zip(&submitted) {
        let id = driver.read(disk);
        let (_, buffer) = submitted.lock().unwrap().pop().expect("nothing is cached");
        let mut buffer = buffer.expect("a read has one");
        buffer.fill(1);
        driver.vm.disk_done(id, Ok(()), Some(buffer));
        driver.vm.execute();
    }
    assert!(matches!(driver.vm.engine.handle_evicted(&[1; PAGE_SIZE]), Evicted::Admit(_)));

    for _ in 0..3 {
        driver.read(0);
    }
    driver.be_late();
    assert_eq!(asked(), [2, 0], "a share of half of the buffers");
    driver.read(1);
    driver.be_late();
    assert_eq!(asked(), [2, 1], "the other disk has a share, too");
    // No page comes any more: now the guest waits for the disk alone.
    driver.vm.engine.handle_disconnected(driver.vm.host.now(), ServerNumber(0));
    driver.vm.execute();
    driver.vm.feed_starved();
    assert_eq!(asked(), [3, 1]);
    assert!(driver.vm.in_flight.is_fed());
}

/// However long it takes to get memory for a larger index, and to move there: reads are answered between two small pieces.
#[test]
fn the_index_grows_beside_the_requests() {
    let submitted = [Submitted::default(), Submitted::default()];
    let mut driver = driver(8, &submitted);
    let entries = driver.vm.engine.index().layout().entry_limit().0;
    driver.vm.size.aim_at(PageCount(1 << 16));
    driver.vm.fit_index(true);
    assert_eq!(driver.vm.engine.index().layout().slot_limit(), PageCount(8), "this thread has made nothing");
    driver.take_index();
    let mut turns = 0;
    while driver.is_moving_index() {
        assert_eq!(driver.vm.engine.index().layout().slot_limit(), PageCount(8), "the old one is in use until the end");
        driver.read(0);
        driver.take_leftovers();
        turns += 1;
        assert!(entries / turns > 128, "small pieces end");
    }
    assert!(turns >= entries / 512, "{entries} entries in {turns} turns");
    assert_eq!(driver.vm.engine.index().layout().slot_limit(), PageCount(1 << 16));
}

/// A cache that was large for a while does not keep its index for ever.
#[test]
fn the_index_becomes_smaller_when_the_cache_has() {
    let submitted = [Submitted::default(), Submitted::default()];
    let mut driver = driver(8, &submitted);
    // No command has come of it.
    driver.vm.size.aim_at(PageCount(1 << 16));
    driver.vm.fit_index(true);
    driver.take_index();
    driver.end_move();
    assert_eq!(driver.vm.engine.index().layout().slot_limit(), PageCount(1 << 16));
    assert!(driver.vm.size.is_busy(), "a smaller one is being made");
    driver.take_index();
    driver.end_move();
    assert_eq!(driver.vm.engine.index().layout().slot_limit(), PageCount(16), "half as much again as 8, rounded up");
    assert!(!driver.vm.size.is_busy());
}

/// The index in use has room for it, but not for long.
#[test]
fn a_cache_that_grows_waits_for_an_index_that_is_becoming_smaller() {
    let submitted = Submitted::default();
    let endpoints = ["unix:/nowhere".parse().unwrap()].to_vec();
    let link = ServerLink::start(Arc::new(HostNetwork), &endpoints.into(), None).unwrap();
    let mut driver = Driver::new(Parts { link: Some(link), ..parts(8, vec![disk(&submitted)], config(1)) }).unwrap();
    driver.vm.size.aim_at(PageCount(1 << 16));
    driver.vm.fit_index(true);
    driver.take_index();
    driver.end_move();
    driver.take_index();
    assert!(driver.is_moving_index());
    let bytes = Some(1000 * PAGE_SIZE_U64);
    let set =
        Command::Set { servers: None, cache_bytes: bytes, local_bytes: None, enabled: Some(true), at_once: false };
    assert!(driver.waits_for_index(&set));
    assert!(driver.set_cache(bytes, None, None).is_err());
    driver.end_move();
    assert!(driver.waits_for_index(&set), "a larger one is being made");
    driver.take_index();
    driver.end_move();
    assert!(!driver.waits_for_index(&set));
    assert_eq!(driver.set_cache(bytes, None, None), Ok(()));
}

/// It may wait long after its client has given up.
#[test]
fn a_command_that_waits_for_a_larger_index_does_not_undo_a_later_one() {
    for is_on in [Some(true), None] {
        let endpoints = ["unix:/nowhere".parse().unwrap()].to_vec();
        let link = ServerLink::start(Arc::new(HostNetwork), &endpoints.into(), None).unwrap();
        let (control, desk) = ControlServer::unattended(wake::new().unwrap(), None).unwrap();
        let parts = parts(8, vec![disk(&Submitted::default())], config(1));
        let mut driver = Driver::new(Parts { link: Some(link), control: Some(control), ..parts }).unwrap();
        let say = |driver: &mut Driver, cache_bytes, enabled| {
            let set = Command::Set { servers: None, cache_bytes, local_bytes: None, enabled, at_once: false };
            let (connection, _client) = UnixStream::pair().unwrap();
            let answer = desk.hand_in(set, connection).unwrap();
            driver.answer_control();
            answer
        };
        let first = say(&mut driver, Some(PAGE_SIZE_U64 << 16), is_on);
        assert!(first.try_recv().is_err(), "there is no such index yet");
        let second = say(&mut driver, None, Some(false));
        assert!(matches!(second.try_recv(), Ok(Answer::Reply(Reply::Status(_)))));
        driver.take_index();
        driver.end_move();
        assert!(!driver.vm.engine.status().enabled, "it was turned off after that");
        let is_done = matches!(first.try_recv(), Ok(Answer::Reply(Reply::Status(_))));
        assert_eq!(is_done, is_on.is_none(), "a size alone turns nothing on");
        assert_eq!(driver.vm.size.tiers().cache, PageCount(if is_done { 1 << 16 } else { 8 }));
    }
}

/// The two tiers have a size each.
#[test]
fn a_size_that_waits_for_a_larger_index_does_not_undo_a_later_one() {
    let (large, small) = (Some(PAGE_SIZE_U64 << 16), Some(4 * PAGE_SIZE_U64));
    for (first, second, cache_pages) in [
        ((large, None), (small, None), 4),
        ((None, large), (None, Some(0)), 8),
        ((large, None), (None, Some(0)), 1 << 16),
    ] {
        let endpoints = ["unix:/nowhere".parse().unwrap()].to_vec();
        let link = ServerLink::start(Arc::new(HostNetwork), &endpoints.into(), None).unwrap();
        let (control, desk) = ControlServer::unattended(wake::new().unwrap(), None).unwrap();
        let parts = parts(8, vec![disk(&Submitted::default())], config(1));
        let mut driver = Driver::new(Parts { link: Some(link), control: Some(control), ..parts }).unwrap();
        let mut say = |(cache_bytes, local_bytes)| {
            let set = Command::Set { servers: None, cache_bytes, local_bytes, enabled: None, at_once: false };
            let (connection, _client) = UnixStream::pair().unwrap();
            let answer = desk.hand_in(set, connection).unwrap();
            driver.answer_control();
            answer
        };
        let (first, second) = (say(first), say(second));
        assert!(matches!(second.try_recv(), Ok(Answer::Reply(Reply::Status(_)))));
        let is_overtaken = cache_pages < 1 << 16;
        assert_eq!(matches!(first.try_recv(), Ok(Answer::Reply(Reply::Error { .. }))), is_overtaken);
        driver.take_index();
        driver.end_move();
        assert_eq!(driver.vm.size.tiers(), TierSizes { cache: PageCount(cache_pages), local: PageCount(0) });
    }
}

/// Whoever drives the driver says what time it is. The poller alone waits for the host's clock.
#[test]
fn nothing_reads_a_clock_of_its_own() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/driver");
    let mut folders = vec![folder];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
            let name = entry.file_name().into_string().unwrap();
            match name.as_str() {
                "tests" | "tests.rs" | "poller.rs" => {}
                _ if entry.file_type().unwrap().is_dir() => folders.push(entry.path()),
                _ => {
                    let text = std::fs::read_to_string(entry.path()).unwrap();
                    let reads = ["Instant::now()", ".elapsed()"].iter().any(|call| text.contains(call));
                    assert!(!reads, "{name} does not ask the driver's clock");
                }
            }
        }
    }
}

/// The time that the test says.
struct SaidTime(Arc<Mutex<Instant>>);

impl Clock for SaidTime {
    fn now(&self) -> Instant {
        *self.0.lock().unwrap()
    }

    fn of_files(&self) -> crate::state::Clock {
        SystemClock.of_files()
    }

    fn of_file_stamps(&self) -> u64 {
        SystemClock.of_file_stamps()
    }
}

/// A file system may hold each attempt up for longer than the pause between two of them.
#[test]
fn front_ends_have_their_turn_between_two_attempts_to_lock_an_image() {
    let time = Arc::new(Mutex::new(Instant::now()));
    let clock = Box::new(SaidTime(Arc::clone(&time)));
    let open: Opener = Box::new(move |lock| {
        assert_eq!(lock, ImageLock::Required { wait: Duration::ZERO }, "nobody has just given it");
        *time.lock().unwrap() += Duration::from_secs(5);
        Err(OpenError::new(OpenErrorKind::InUse, ""))
    });
    let peers = Box::new(crate::migration::HostPeers);
    let migration = Migration::new(peers, None, None, None, config(1), true, true).unwrap();
    let disk = Disk { open, ..disk(&Submitted::default()) };
    let mut driver = begin(Parts { migration, clock, ..parts(8, vec![disk], config(1)) });
    assert!(driver.migration.take_back(&mut driver.vm).unwrap_err().contains("are in use"));
    assert_eq!(driver.migration.time_left(&driver.vm), Some(Duration::from_secs(1)));
}

/// The index is sent from where it is, and copied if it changes meanwhile. A turn without events changes nothing.
#[test]
fn a_turn_in_which_nothing_happens_leaves_a_lent_index_where_it_is() {
    let mut driver = driver(8, &[Submitted::default(), Submitted::default()]);
    let head = driver.vm.engine.closed_head();
    let lent = driver.vm.engine.index().words().lend(head.len());
    for _ in 0..3 {
        driver.take_leftovers();
        driver.run_timers();
        driver.vm.end_turn();
        driver.follow_migration();
    }
    let words = driver.vm.engine.index().words()[head.len()..].as_ptr();
    assert_eq!(lent.take(1, <[u32]>::as_ptr), Some(words));
    driver.vm.engine.set_failed_flush(DiskIndex(0), Some(5));
    assert_ne!(lent.take(1, <[u32]>::as_ptr), Some(words.wrapping_add(1)), "it was copied");
}

/// While another process is concerned with the disks, nothing is asked of them, and the looks go on later.
#[test]
fn sizes_are_not_measured_while_the_disks_are_on_their_way() {
    let (mut disks, now) = ([disk(&Submitted::default())], Instant::now());
    let mut sizes = Sizes::new(&disks, now);
    sizes.run_timers(false, &mut disks, now);
    let next = sizes.next_deadline().expect("they are looked at later");
    assert!(next > now);
    // This store cannot tell its size again.
    sizes.run_timers(true, &mut disks, next);
    assert_eq!(sizes.next_deadline(), None);
}

/// Its guest is told the largest size that there is.
#[test]
fn an_image_above_the_largest_size_has_not_become_smaller() {
    let mut driver = driver_of(8, vec![disk_with(DISK_BYTES_MAX + PAGE_SIZE_U64, &Submitted::default())]);
    assert_eq!(driver.vm.engine.disk_bytes(DiskIndex(0)), Some(DISK_BYTES_MAX));
    let Vm { sizes, guests, warmth, engine, host, .. } = &mut driver.vm;
    sizes.follow(0, Ok(()), guests, (warmth, engine), host);
    assert_eq!(sizes.shrunk_from(0), None);
}

/// Another process was told the size of the index that there is.
#[test]
fn the_index_does_not_move_while_the_disks_are_on_their_way() {
    let mut driver = driver(8, &[Submitted::default(), Submitted::default()]);
    driver.vm.size.aim_at(PageCount(1 << 16));
    driver.vm.fit_index(false);
    assert!(!driver.vm.size.is_busy());
    driver.vm.fit_index(true);
    let wake = PollFd::from_borrowed_fd(driver.vm.size.wake_fd(), PollFlags::IN);
    poll(&mut [wake], None).unwrap();
    let Vm { size, engine, guests, .. } = &mut driver.vm;
    assert!(size.take_region(false, engine, guests));
    assert!(!size.is_busy() && !size.has_region());
    assert_eq!(engine.index().layout().slot_limit(), PageCount(8));
}

#[test]
fn an_index_for_which_there_is_no_memory_is_tried_again_only_when_the_operator_says_something() {
    let tries = Arc::new(Mutex::new(0));
    let counted = Arc::clone(&tries);
    let aside: Aside = Box::new(move |name: &str, _| {
        *counted.lock().unwrap() += u32::from(name == "index");
        Err(io::ErrorKind::OutOfMemory.into())
    });
    let mut driver = begin(Parts { aside, ..parts(8, vec![disk(&Submitted::default())], config(1)) });
    driver.vm.size.aim_at(PageCount(1 << 16));
    for (says_something, expected) in [(false, 1), (false, 1), (true, 2)] {
        if says_something {
            driver.vm.size.try_again();
        }
        driver.vm.fit_index(true);
        assert_eq!(*tries.lock().unwrap(), expected);
        assert!(!driver.vm.size.is_busy() && driver.vm.size.refusal().contains("out of memory"));
    }
}

/// The folder of state files is small, and private memory of that size would be missed by everything else on the host.
#[test]
fn an_index_that_no_state_file_holds_leaves_half_of_the_memory() {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap();
    let available = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:")?.trim().strip_suffix(" kB"));
    if available.unwrap().parse::<u64>().unwrap() > 64 << 20 {
        // The largest index is not half of that.
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut driver = begin_with_state(&folder.path().join("state"), config(1));
    folder.close().unwrap();
    driver.vm.size.aim_at(PageCount(1 << 30));
    driver.vm.fit_index(true);
    driver.take_index();
    let refusal = driver.vm.size.refusal();
    assert!(refusal.contains("without one it would take "), "{refusal}");
}

/// Without a state file, a process to which its disks have come back would be cold after a kill, and know of no failed flush.
#[test]
fn a_region_that_is_being_made_for_disks_that_went_is_in_the_way_of_no_state_file() {
    let (folder, engine) = (tempfile::tempdir().unwrap(), config(1));
    let path = folder.path().join("state");
    let started = StateFile::start(&path, &engine, Before::Another).unwrap();
    let parts = parts(8, vec![disk(&Submitted::default())], engine);
    let aside: Aside = Box::new(|_: &str, _| Ok(()));
    let mut driver = begin(Parts { engine: started.engine, state: started.state, aside, ..parts });
    driver.vm.size.aim_at(PageCount(1 << 16));
    driver.vm.fit_index(true);
    assert!(driver.vm.size.is_busy());
    let words = layout(&engine).words();
    // Its thread has made the file, and is still about the index.
    let made = StateFile::create(&path, engine.disks, words).unwrap();
    // The disks go.
    driver.vm.warmth.abandon();
    driver.vm.change_engine(DiskEngine::new(&engine, IndexMemory::new(words).unwrap()));
    let (mut state, _words) = StateFile::create_late(&path, engine.disks, words).unwrap();
    drop(made);
    state.put_in_place(&engine).unwrap();
    assert!(path.exists());
}

/// Nobody would find the pools of such a process, so it gives them back when it ends.
#[test]
fn nothing_outlives_a_process_whose_new_state_file_is_lost() {
    let (folder, engine) = (tempfile::tempdir().unwrap(), config(1));
    let path = folder.path().join("state");
    let mut driver = begin_with_state(&path, engine);
    assert!(driver.vm.warmth.is_kept());
    driver.vm.size.aim_at(PageCount(1 << 16));
    driver.vm.fit_index(true);
    driver.take_index();
    std::fs::remove_file(folder.path().join("state.new")).unwrap();
    driver.end_move();
    assert_eq!(driver.vm.engine.index().layout().slot_limit(), PageCount(1 << 16));
    assert!(!driver.vm.warmth.is_kept() && !path.exists());
}

/// Returns a driver whose state file at `path` is lost, since there was no room for a larger one.
fn begin_without_room(path: &Path, engine: EngineConfig) -> Driver {
    let mut driver = begin_with_state(path, engine);
    let _in_the_way = StateFile::create(path, engine.disks, layout(&engine).words()).unwrap();
    driver.vm.size.set_tiers(TierSizes { cache: PageCount(1 << 16), ..TierSizes::default() });
    driver.vm.fit_index(true);
    driver.take_index();
    driver.end_move();
    assert!(!driver.vm.warmth.is_kept() && !path.exists());
    assert!(driver.vm.warmth.loss().is_some_and(|why| why.contains("state")));
    driver
}

/// The memory of the former file may be all that was missing.
#[test]
fn a_lost_state_file_is_made_again_for_the_index_as_it_is() {
    let (folder, engine) = (tempfile::tempdir().unwrap(), config(1));
    let path = folder.path().join("state");
    let mut driver = begin_without_room(&path, engine);
    driver.run_timers();
    assert!(driver.vm.size.next_deadline(&driver.vm.warmth).is_some());
    driver.take_index();
    driver.end_move();
    assert!(driver.vm.warmth.is_kept() && driver.vm.warmth.loss().is_none());
    assert_eq!(driver.vm.engine.index().layout().slot_limit(), PageCount(1 << 16));
    assert!(driver.vm.engine.index().words().outlives_process());
    assert_eq!(driver.vm.size.next_deadline(&driver.vm.warmth), None);
    // The next one grows beside it, as if it had never been lost.
    driver.vm.size.set_tiers(TierSizes { cache: PageCount(1 << 17), ..TierSizes::default() });
    driver.vm.fit_index(true);
    driver.take_index();
    driver.end_move();
    drop(driver);
    let started = StateFile::start(&path, &engine, Before::Another).unwrap();
    assert_eq!((started.cold_reason, started.engine.index().layout().slot_limit()), (None, PageCount(1 << 17)));
}

#[test]
fn a_lost_state_file_is_not_made_again_in_place_of_that_of_another_process() {
    let (folder, engine) = (tempfile::tempdir().unwrap(), config(1));
    let path = folder.path().join("state");
    let mut driver = begin_without_room(&path, engine);
    let theirs = StateFile::start(&path, &engine, Before::Another).unwrap();
    driver.run_timers();
    driver.take_index();
    driver.end_move();
    assert!(!driver.vm.warmth.is_kept() && !driver.vm.size.is_busy());
    assert!(driver.vm.size.refusal().is_empty(), "an index of this size is not refused");
    drop((driver, theirs));
    assert!(StateFile::start(&path, &engine, Before::Another).unwrap().cold_reason.is_none(), "it is theirs");
}

/// The kernel reports it once, and a successor would not know of it.
#[test]
fn an_index_does_not_leave_the_state_file_that_says_that_a_flush_has_failed() {
    let (folder, engine) = (tempfile::tempdir().unwrap(), config(1));
    let path = folder.path().join("state");
    let mut driver = begin_with_state(&path, engine);
    // There is no room for a larger one beside it.
    let _made = StateFile::create(&path, engine.disks, layout(&engine).words()).unwrap();
    for (errno, slots) in [(Some(5), 8), (None, 1 << 16)] {
        driver.vm.engine.set_failed_flush(DiskIndex(0), errno);
        driver.vm.size.try_again();
        driver.vm.size.aim_at(PageCount(1 << 16));
        driver.vm.fit_index(true);
        driver.take_index();
        driver.end_move();
        assert_eq!(driver.vm.engine.index().layout().slot_limit(), PageCount(slots));
        assert_eq!(driver.vm.warmth.is_kept(), errno.is_some());
    }
}
