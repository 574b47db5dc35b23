//! A driver with a real device and a guest, on a disk that answers as the test says.

use super::{begin, config, parts};
use crate::clock::{Clock, SystemClock};
use crate::driver::guests::SECOND_LOOK;
use crate::driver::{Disk, Driver, Ended, Migration, Parts, Port, Source, TierSizes};
use crate::handover::{Checking, Successor};
use crate::migration::{HostPeers, Incoming, Peer, PeerNetwork};
use crate::state::{self, Before, StateFile};
use crate::testing::{FarEnd, Wanted, listening};
use crate::trace::TraceWriter;
use remoca_core::engine::{EngineConfig, Evicted};
use remoca_core::migration::Message;
use remoca_core::units::{BlockId, BlockNumber, DiskIndex, PAGE_SIZE, PAGE_SIZE_U64, PageCount, SlotIndex};
use remoca_frontend::device::Frontend;
use remoca_frontend::testing::{Command, Options, TestGuest, Ticket};
use remoca_frontend::vhost::{DeviceConfig, VhostDevice};
use remoca_io::address::Endpoint;
use remoca_io::buffer::IoBuffer;
use remoca_io::control::{Answer, ControlServer};
use remoca_io::socket::SocketSource;
use remoca_io::wake::{self, Wake};
use remoca_protocol::control::{DiskTraffic, Reply, Secret};
use remoca_protocol::handover::StoreKind;
use remoca_protocol::peer::{self, Offer, OfferedDisk};
use remoca_protocol::{ErrorCode, ErrorReply, Frame, RequestId};
use remoca_store::{
    DataPath, Geometry, HandOver, Identity, ImageStamp, Store, StoreCompletion, StoreError, StoreEvent, StoreHealth,
    StoreOp,
};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;
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
    /// When its timer is due.
    deadline: Option<Instant>,
    /// Looks at something whenever the store may go on with what it was asked.
    watch: Option<Box<dyn FnMut(Moment) + Send>>,
}

/// A call in which a store hands operations to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Moment {
    Kick,
    Ready,
    Timer,
}

struct ScriptedStore {
    event: OwnedFd,
    script: Arc<Mutex<Script>>,
}

impl ScriptedStore {
    fn script(&self) -> MutexGuard<'_, Script> {
        self.script.lock().unwrap()
    }

    fn note(&self, moment: Moment) {
        let mut script = self.script();
        if !script.asked.is_empty()
            && let Some(watch) = &mut script.watch
        {
            watch(moment);
        }
    }
}

impl DataPath for ScriptedStore {
    fn geometry(&self) -> Geometry {
        Geometry {
            size: DISK_BYTES,
            logical_sector: 512,
            physical_block: 4096,
            read_only: false,
            can_discard: true,
            can_write_zeroes: true,
            may_forget: false,
            outlives_process: false,
        }
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    fn submit(&mut self, token: u64, op: StoreOp, buffer: Option<IoBuffer>) {
        self.script().asked.push_back((token, op, buffer));
    }

    fn kick(&mut self, _: Instant) {
        self.note(Moment::Kick);
    }

    fn handle_ready(&mut self, _: Instant) {
        self.note(Moment::Ready);
    }

    fn next_event(&mut self) -> Option<StoreEvent> {
        self.script().answers.pop_front()
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.script().deadline
    }

    fn handle_timer(&mut self, _: Instant) {
        self.script().deadline = None;
        self.note(Moment::Timer);
    }

    fn in_flight(&self) -> usize {
        self.script().asked.len()
    }

    fn health(&self) -> StoreHealth {
        StoreHealth::Up
    }
}

leaves_nothing_behind!(ScriptedStore, true);

fn device() -> DeviceConfig {
    let mut config = DeviceConfig::disk("test", "test", DISK_BYTES);
    config.logical_block_bytes = 512;
    config
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
        Self::start_with(config(1), device(), |_, _| ())
    }

    /// With other parts, in a folder.
    fn start_with(engine: EngineConfig, config: DeviceConfig, change: impl FnOnce(&mut Parts, &Path)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("s");
        let device = VhostDevice::new(config, SocketSource::bind(&socket, None).unwrap()).unwrap();
        let script = Arc::<Mutex<Script>>::default();
        let of_stores = Arc::clone(&script);
        let open = move || -> Box<dyn Store> {
            Box::new(ScriptedStore { event: wake::new().unwrap(), script: Arc::clone(&of_stores) })
        };
        let disk = Disk {
            number: DiskIndex(0),
            name: "disk".into(),
            image: String::new(),
            socket: String::new(),
            store: open(),
            open: Box::new(move |_| Ok(open())),
            swap: false,
            settles_at: None,
            had_guest: false,
            has_lost_guest: false,
            kept_open: false,
            had_bytes: None,
            traffic: DiskTraffic::default(),
            frontend: Frontend::Vhost(Box::new(device)),
        };
        let mut parts = parts(PAGES, vec![disk], engine);
        change(&mut parts, folder.path());
        let driver = begin(parts);
        let guest = TestGuest::new(Options { queue_size: 16, data_bytes: 64 << 10, ..Options::default() });
        let mut bench = Self { driver, guest, script, _folder: folder };
        bench.meanwhile(|guest| guest.connect(&socket).unwrap());
        bench
    }

    fn turn(&mut self) {
        self.driver.handle(Source::Disk(0), false);
        self.driver.vm.end_turn();
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
                driver.handle(Source::Port, false);
                while answer(script, 0, Ok(()), 0) {}
                driver.vm.end_turn();
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

    /// Something happens that the driver wakes for.
    fn raise_store(&self) {
        let event = self.driver.vm.guests.disks()[0].store.event_fd();
        rustix::io::write(event, &1_u64.to_ne_bytes()).unwrap();
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
        assert!(
            matches!(self.driver.vm.engine.handle_evicted(&[1; PAGE_SIZE]), Evicted::Admit(admitted) if admitted.at.slot == SlotIndex(0))
        );
    }

    /// The page of the only request under way comes, whatever its number.
    fn page_comes(&mut self) {
        for number in 0..16 {
            let (request, page) = (RequestId(number), &[1; PAGE_SIZE]);
            self.driver.hear(&Frame::SendPage { request, slot: SlotIndex(0), page });
        }
        self.turn();
    }
}

fn answer(script: &Mutex<Script>, which: usize, result: Result<(), StoreError>, byte: u8) -> bool {
    answer_with(script, which, result, |buffer| buffer.fill(byte))
}

fn answer_with(
    script: &Mutex<Script>,
    which: usize,
    result: Result<(), StoreError>,
    fill: impl FnOnce(&mut [u8]),
) -> bool {
    let mut script = script.lock().unwrap();
    let Some((token, op, mut buffer)) = script.asked.remove(which) else { return false };
    if let (StoreOp::Read { .. }, Some(buffer)) = (op, &mut buffer) {
        fill(buffer);
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
    assert!(bench.driver.vm.in_flight.is_empty());
}

#[test]
fn without_a_state_file_failed_flushes_of_removed_images_are_forgotten_too() {
    let mut bench = Bench::start_with(config(2), device(), |_, _| ());
    let super::Vm { warmth, guests, engine, .. } = &mut bench.driver.vm;
    assert!(!warmth.is_kept());
    let (here, removed) = (guests.disks()[0].number, DiskIndex(1));
    [here, removed].into_iter().for_each(|number| engine.set_failed_flush(number, Some(5)));
    warmth.clear_removed_failures(guests.disks(), engine);
    assert_eq!([here, removed].map(|number| engine.index().flush_failed(number)), [Some(5), None]);
}

#[test]
fn a_departed_guest_writes_nothing() {
    let mut bench = Bench::start();
    bench.read(16, PAGES as u64);
    bench.submit(Command::Write { sector: 0, data: &[7; PAGE_SIZE] });
    assert_eq!(bench.asked().len(), 1, "there is no buffer for the write");
    bench.guest.disconnect();
    bench.turn_until(|bench| !bench.driver.vm.guests.disks()[0].frontend.is_connected());
    bench.answer(0, Ok(()), 1);
    assert_eq!(bench.asked(), [], "whatever the buffer held before");
    assert!(bench.driver.vm.in_flight.is_empty() && bench.driver.vm.in_flight.is_fed());
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

/// The front end has its answer at once, and the guest sends no flush. So this process makes the one that is missing.
#[test]
fn what_a_former_owner_completed_is_flushed_if_the_guest_switched_its_write_cache_off_before_the_disks_came() {
    for is_on in [true, false] {
        let mut bench = Bench::start_with(config(1), device(), |parts, _| {
            parts.migration = Migration::new(Box::new(HostPeers), None, None, None, config(1), true, true).unwrap();
        });
        bench.meanwhile(|guest| guest.set_writeback(is_on).unwrap());
        assert!(!bench.driver.migration.serves());
        // The guest runs, and nobody else has the disk.
        bench.driver.turn(&[]);
        assert!(bench.driver.migration.serves());
        bench.driver.turn(&[]);
        assert_eq!(bench.asked().len(), usize::from(!is_on), "nobody waits for a request");
        let ticket = bench.submit(Command::Write { sector: 8, data: &[1; PAGE_SIZE] });
        if !is_on {
            assert_eq!(bench.asked(), [StoreOp::Flush], "a write waits for it");
            bench.answer(0, Ok(()), 0);
            bench.turn();
        }
        let asked = bench.asked();
        assert!(matches!(asked[..], [StoreOp::Write { durable: true, .. }]), "{asked:?}");
        bench.answer(0, Ok(()), 0);
        assert_eq!(bench.guest.result(ticket), Some(OK));
    }
}

/// Takes connections of other processes, and wakes the driver for them.
type Entrance = (SyncSender<Peer>, Wake);

/// Where processes that hand their disks over are let in.
#[derive(Clone, Default)]
struct Door {
    entrance: Arc<Mutex<Option<Entrance>>>,
    /// Whether the images' locks reach this host alone.
    locks_are_local: bool,
}

impl PeerNetwork for Door {
    fn connect(&mut self, _: Endpoint, _: &Secret, _: &Wake) -> io::Result<Peer> {
        unreachable!("it waits for its disks")
    }

    fn listen(&mut self, endpoint: Endpoint, _: &Secret, wake: &Wake) -> io::Result<Incoming> {
        let (incoming, found) = listening(endpoint);
        *self.entrance.lock().unwrap() = Some((found, Arc::clone(wake)));
        Ok(incoming)
    }
}

impl Door {
    /// Returns the far end of a connection over which the disk of a [`Bench`] is offered.
    fn offer(&self) -> FarEnd {
        self.offer_that(false)
    }

    /// As [`Self::offer`]; `returns`: its process was given the disk, or gave it, over a connection that broke.
    fn offer_that(&self, returns: bool) -> FarEnd {
        let (found, wake) = self.entrance.lock().unwrap().clone().expect("it listens");
        let (near, mut far) = FarEnd::pair(&wake);
        assert!(found.try_send(near).is_ok());
        let disk = OfferedDisk { name: "disk".into(), bytes: DISK_BYTES, read_only: false, sector: 512 };
        let offer = Offer {
            version: peer::VERSION,
            name: String::new(),
            disks: vec![disk],
            has_port: false,
            lock_reaches: !self.locks_are_local,
            words: 1,
            returns,
        };
        far.bring(&peer::frame(peer::kind::OFFER, &serde_json::to_vec(&offer).unwrap()));
        far.push();
        far
    }
}

/// Returns a process, with a guest that runs, to which another one may come through `door`. `away`: its disks are not here.
fn behind(door: &Door, away: bool) -> Bench {
    behind_with(door, away, |_| ())
}

/// As [`behind`], with other parts.
fn behind_with(door: &Door, away: bool, change: impl FnOnce(&mut Parts)) -> Bench {
    let mut bench = Bench::start_with(config(1), device(), |parts, _| {
        let incoming = ("tcp:here:1".parse().unwrap(), format!("{:064x}", 1).parse().unwrap());
        let (peers, lock_reaches) = (Box::new(door.clone()), !door.locks_are_local);
        parts.migration = Migration::new(peers, Some(incoming), None, None, config(1), lock_reaches, away).unwrap();
        change(parts);
    });
    bench.turn_until(|bench| bench.driver.vm.guests.is_running());
    bench
}

/// The lock that it would try is the peer's, and the next try comes a second later.
#[test]
fn a_guest_that_starts_in_the_turn_of_an_offer_has_the_peer_asked_for_its_disks() {
    let door = Door::default();
    let mut bench = behind(&door, true);
    let mut far = door.offer();
    bench.driver.handle(Source::Migration, false);
    assert!(!bench.driver.migration.serves(), "nobody gave it the disks");
    for message in [Message::Accept, Message::Want] {
        assert_eq!(far.take(), Some(Wanted::Frames(peer::message(message))));
    }
    assert_eq!(far.take(), None);
}

/// A clock that the test sets forward.
struct SetForward(Arc<AtomicU64>);

impl Clock for SetForward {
    fn now(&self) -> Instant {
        SystemClock.now() + Duration::from_secs(self.0.load(Ordering::Relaxed))
    }

    fn of_files(&self) -> state::Clock {
        SystemClock.of_files()
    }

    fn of_file_stamps(&self) -> u64 {
        SystemClock.of_file_stamps()
    }
}

/// What the former owner said may be as old as this process was held up, also within a turn.
#[test]
fn a_disk_that_no_lock_guards_is_served_on_a_fresh_word_and_closed_without_one() {
    for is_confirmed in [true, false] {
        let (door, seconds) = (Door { locks_are_local: true, ..Door::default() }, Arc::<AtomicU64>::default());
        let mut bench = behind_with(&door, true, |parts| parts.clock = Box::new(SetForward(Arc::clone(&seconds))));
        let mut far = door.offer();
        bench.driver.handle(Source::Migration, false);
        for message in [Message::Accept, Message::Want] {
            assert_eq!(far.take(), Some(Wanted::Frames(peer::message(message))));
        }
        let open = Arc::strong_count(&bench.script);
        // It is held up before it hears the answer.
        for (word, held_up_s) in [(Message::Yours { state: false }, 0), (Message::Confirmed, 2)] {
            seconds.fetch_add(held_up_s, Ordering::Relaxed);
            far.bring(&peer::message(word));
            far.push();
            bench.driver.handle(Source::Migration, false);
            assert_eq!(far.take(), Some(Wanted::Frames(peer::message(Message::Confirm))), "{word:?}");
            assert!(!bench.driver.migration.serves(), "{word:?}");
        }
        match is_confirmed {
            true => far.bring(&peer::message(Message::Confirmed)),
            false => far.end("gone"),
        }
        far.push();
        bench.driver.handle(Source::Migration, false);
        assert_eq!(bench.driver.migration.serves(), is_confirmed);
        assert_eq!(Arc::strong_count(&bench.script), open - usize::from(!is_confirmed), "whether it is open");
    }
}

/// Returns a bench that has its disk, whose source is connected, and whose cache has no room for all its pages in the index that came.
fn with_source_and_small_index() -> (Bench, FarEnd) {
    let door = Door::default();
    let mut bench = behind(&door, false);
    bench.driver.vm.size.set_tiers(TierSizes { cache: PageCount(1 << 16), local: PageCount(0) });
    let mut far = door.offer_that(true);
    bench.driver.handle(Source::Migration, false);
    assert_eq!(far.take(), Some(Wanted::Frames(peer::message(Message::Accept))));
    assert!(bench.driver.vm.size.is_busy(), "it is not to get the disk");
    (bench, far)
}

fn want(bench: &mut Bench, far: &mut FarEnd) {
    far.bring(&peer::message(Message::Want));
    far.push();
    bench.driver.handle(Source::Migration, false);
    assert!(bench.driver.migration.serves(), "the guest runs here");
}

/// It asks while memory for the index is being had, and is gone before the guest stops.
#[test]
fn a_source_that_asked_in_vain_leaves_no_small_cache() {
    let (mut bench, mut far) = with_source_and_small_index();
    want(&mut bench, &mut far);
    bench.driver.take_index();
    assert!(!bench.driver.vm.size.is_busy(), "what is about to go keeps its size");
    far.end("gone");
    far.push();
    bench.driver.handle(Source::Migration, false);
    assert!(bench.driver.vm.size.is_busy(), "it grows after all");
    bench.driver.take_index();
    bench.driver.end_move();
    assert_eq!(bench.driver.vm.engine.index().layout().slot_limit(), PageCount(1 << 16));
    assert_eq!(bench.driver.vm.engine.status().wanted, PageCount(1 << 16));
}

/// The index may not move on for as long as the guest runs.
#[test]
fn a_command_does_not_wait_for_an_index_that_the_source_has_stopped() {
    let (mut bench, mut far) = with_source_and_small_index();
    bench.driver.take_index();
    assert!(bench.driver.is_moving_index());
    let (control, desk) = ControlServer::unattended(wake::new().unwrap(), None).unwrap();
    let (client, _) = UnixStream::pair().unwrap();
    let answer = desk.hand_in(remoca_protocol::control::Command::Rescan, client).unwrap();
    bench.driver.vm.size.wait(control.next_request().unwrap());
    want(&mut bench, &mut far);
    assert!(!bench.driver.is_moving_index() && bench.driver.vm.size.is_busy());
    let refused = answer.try_recv();
    assert!(matches!(&refused, Ok(Answer::Reply(Reply::Error { error })) if error.contains("handed over")));
}

/// Turns, with a disk that does all it is asked, until the other process is told something. Returns that.
fn next_frames(bench: &mut Bench, far: &mut FarEnd) -> Vec<u8> {
    let give_up_at = Instant::now() + PATIENCE;
    loop {
        match far.take() {
            Some(Wanted::Frames(frames)) => return frames,
            Some(other) => panic!("{other:?}"),
            None => {
                assert!(Instant::now() < give_up_at, "waited in vain");
                while answer(&bench.script, 0, Ok(()), 0) {}
                bench.driver.turn(&[(Source::Disk(0), false)]);
            }
        }
    }
}

/// A hypervisor may cancel a migration at any time, and migrate again.
#[test]
fn disks_that_were_on_their_way_when_the_guest_went_on_go_when_it_stops_again() {
    let door = Door::default();
    let mut bench = behind(&door, false);
    bench.driver.turn(&[]);
    let mut far = door.offer_that(true);
    bench.driver.handle(Source::Migration, false);
    want(&mut bench, &mut far);
    for message in [Message::Accept, Message::Busy] {
        assert_eq!(far.take(), Some(Wanted::Frames(peer::message(message))));
    }
    bench.meanwhile(|guest| guest.stop_queue(0).unwrap());
    assert_eq!(next_frames(&mut bench, &mut far)[0], peer::kind::STATE);
    // All of it is sent, which the driver has not heard yet.
    while far.take().is_some() {}
    bench.meanwhile(|guest| {
        let base = guest.queues[0].used_index();
        guest.start_queue(0, base).unwrap();
    });
    bench.turn_until(|bench| bench.driver.vm.guests.is_running());
    bench.driver.turn(&[]);
    assert!(bench.driver.migration.serves(), "the guest runs here");
    bench.meanwhile(|guest| guest.stop_queue(0).unwrap());
    assert_eq!(next_frames(&mut bench, &mut far)[0], peer::kind::STATE, "the state is another one now");
    far.push();
    bench.driver.handle(Source::Migration, false);
    let yours = Wanted::Frames(peer::message(Message::Yours { state: true }));
    let rest: Vec<_> = std::iter::from_fn(|| far.take()).collect();
    assert!(!rest.is_empty() && !rest.contains(&yours), "only the former state was known to be sent");
    far.push();
    bench.driver.handle(Source::Migration, false);
    assert_eq!(far.take(), Some(yours));
}

/// A hypervisor stops the devices of its guest one after the other. Until it has stopped all of them, the guest may run on.
#[test]
fn a_guest_whose_disks_have_stopped_runs_while_a_queue_of_its_port_does() {
    let mut socket = None;
    let mut bench = Bench::start_with(config(1), device(), |parts, folder| {
        let path = folder.join("port");
        let port = VhostDevice::new(device(), SocketSource::bind(&path, None).unwrap()).unwrap();
        parts.port = Some(Port { socket: String::new(), frontend: Frontend::Vhost(Box::new(port)), cookie: 1 });
        socket = Some(path);
    });
    let socket = socket.unwrap();
    let mut port = TestGuest::new(Options { queue_size: 16, data_bytes: 64 << 10, ..Options::default() });
    bench.meanwhile(|_| port.connect(&socket).unwrap());
    assert!(bench.driver.vm.guests.is_running());
    bench.meanwhile(|disk| disk.stop_queue(0).unwrap());
    assert!(!bench.driver.vm.guests.disks()[0].frontend.is_running());
    assert!(bench.driver.vm.guests.is_running(), "its port is used");
    bench.meanwhile(|_| port.stop_queue(0).unwrap());
    assert!(!bench.driver.vm.guests.is_running());
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

/// One request of the guest is a million blocks. The first of them comes late.
#[test]
fn a_turn_takes_a_bounded_part_of_a_discard_and_forgets_no_more() {
    const DISK: u64 = 4 << 30;
    let device = DeviceConfig { capacity_bytes: DISK, ..device() };
    let mut bench = Bench::start_with(config(1), device, |_, _| ());
    bench.driver.vm.engine.resize_disk(DiskIndex(0), DISK);
    bench.cache_first_page();
    let ranges: Vec<_> = (0..16).rev().map(|at| (at << 19, 1 << 19, 0)).collect();
    let ticket = bench.submit(Command::Discard(&ranges));
    let (mut discarded, mut status) = (0, None);
    while status.is_none() {
        let asked = bench.asked();
        let bytes = |op: &StoreOp| match op {
            StoreOp::Discard { len, .. } => *len,
            other => panic!("{other:?}"),
        };
        let bytes: u64 = asked.iter().map(bytes).sum();
        assert!(0 < bytes && bytes < 80 << 20, "{asked:?} in one turn");
        discarded += bytes;
        let first = BlockId { disk: DiskIndex(0), bno: BlockNumber(0) };
        let is_known = bench.driver.vm.engine.index().known(first).is_some();
        assert_eq!(is_known, discarded <= 15 << 28, "after {discarded} bytes");
        while answer(&bench.script, 0, Ok(()), 0) {}
        bench.turn();
        status = bench.guest.result(ticket);
    }
    assert_eq!((status, discarded), (Some(OK), DISK));
}

/// A queue full of discards of many small ranges is thousands of requests of the engine.
#[test]
fn a_turn_takes_a_bounded_number_of_ranges() {
    let device = DeviceConfig { range_count_max: 40, ..device() };
    let mut bench = Bench::start_with(config(1), device, |_, _| ());
    let ranges: Vec<_> = (0..40).map(|at| (at % 4 * 8, 8, 0)).collect();
    let tickets: Vec<_> = (0..8).map(|_| bench.guest.submit(0, Command::Discard(&ranges))).collect();
    bench.turn();
    let mut asked = Vec::new();
    while !bench.asked().is_empty() {
        asked.push(bench.asked().len());
        while answer(&bench.script, 0, Ok(()), 0) {}
        bench.turn();
    }
    assert_eq!(asked, [280, 40], "the last request may exceed the limit of 256");
    assert!(tickets.into_iter().all(|ticket| bench.guest.result(ticket) == Some(OK)));
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
    assert!(bench.driver.vm.in_flight.starves(0));
    bench.page_comes();
    assert_eq!(bench.guest.result(ticket), Some(OK));
    assert!(!bench.driver.vm.in_flight.starves(0), "nobody wants it any more");
    bench.answer(0, Ok(()), 2);
    assert_eq!(bench.guest.result(other), Some(OK));
    assert!(bench.driver.vm.in_flight.is_empty(), "an upgrade would wait for it for ever");
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

impl Bench {
    /// The server has the first page that it is asked for, and has lost all others.
    fn one_page_comes(&mut self) {
        let before = self.frames_looked_at();
        for number in 0..16 {
            let (request, page) = (RequestId(number), &[1; PAGE_SIZE]);
            let frame = match self.frames_looked_at() == before {
                true => Frame::SendPage { request, slot: SlotIndex(0), page },
                false => Frame::Error(ErrorReply { request, code: ErrorCode::NotFound, detail: 0 }),
            };
            self.driver.hear(&frame);
        }
        self.turn();
    }

    fn pages_are_lost(&mut self) {
        for number in 0..16 {
            let lost = ErrorReply { request: RequestId(number), code: ErrorCode::NotFound, detail: 0 };
            self.driver.hear(&Frame::Error(lost));
        }
        self.turn();
    }

    fn frames_looked_at(&self) -> u64 {
        self.driver.vm.engine.stats().frames_looked_at
    }
}

/// A frame shows what the guest evicted until something is delivered into it. What this read brought is no eviction: it would
/// count for frames that pay, and take the place of a page.
#[test]
fn frames_are_looked_at_before_anything_is_delivered_into_them_and_not_again() {
    let mut bench =
        Bench::start_with(EngineConfig { has_port: false, frame_sample: 1, ..config(1) }, device(), |_, _| ());
    for page in [0, 1] {
        bench.read(page, 1);
        bench.answer(0, Ok(()), 1);
    }
    assert_eq!(bench.frames_looked_at(), 2, "what the disk brings fills frames, too");
    let zeroes = bench.submit(Command::WriteZeroes(&[(16, 8, 0)]));
    bench.answer(0, Ok(()), 0);
    assert_eq!(bench.guest.result(zeroes), Some(OK));

    let page = |byte| vec![byte; PAGE_SIZE];
    let partly = [
        (0, "a page of the server", [page(1), page(1)], Bench::one_page_comes as fn(&mut Bench)),
        (1, "zeroes", [page(1), page(0)], Bench::pages_are_lost),
    ];
    for (first, what, content, server) in partly {
        let looked_at = bench.frames_looked_at();
        let ticket = bench.read(first, 2);
        assert!(bench.asked().is_empty(), "the memory server is asked");
        server(&mut bench);
        assert_eq!(bench.asked().len(), 1, "it does not have everything");
        assert_eq!(bench.frames_looked_at(), looked_at + 1, "{what}: before it is delivered");
        assert!(answer_with(&bench.script, 0, Ok(()), |buffer| buffer.copy_from_slice(&content.concat())));
        bench.turn();
        assert_eq!(bench.guest.result(ticket), Some(OK));
        assert!(bench.guest.data(ticket, 2 * PAGE_SIZE) == content.concat());
        assert_eq!(bench.frames_looked_at(), looked_at + 1, "{what}: it was taken for evicted");
    }
}

/// The time that files are stamped with, as the test says.
struct SetClock(Arc<AtomicU64>);

impl Clock for SetClock {
    fn now(&self) -> Instant {
        SystemClock.now()
    }

    fn of_files(&self) -> state::Clock {
        let real_ns = self.of_file_stamps();
        state::Clock { real_ns, boot_ns: real_ns }
    }

    fn of_file_stamps(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Each call of a store may begin the next part of a write. Should the process be killed then, its successor must know that
/// the image can have changed as late as that.
#[test]
fn the_state_file_knows_of_writes_before_the_store_goes_on_with_them() {
    let time = Arc::new(AtomicU64::new(1_700_000_000_000_000_000));
    let clock = SetClock(Arc::clone(&time));
    let engine = config(1);
    let mut header = None;
    let mut bench = Bench::start_with(engine, device(), |parts, folder| {
        let started = StateFile::start(&folder.join("state"), &engine, Before::Another).unwrap();
        header = started.state.as_ref().map(StateFile::header);
        (parts.engine, parts.state, parts.clock) = (started.engine, started.state, Box::new(clock));
    });
    let header = header.unwrap();
    let later = || time.fetch_add(1_000_000_000, Ordering::Relaxed);
    let moments = Arc::<Mutex<Vec<(Moment, bool)>>>::default();
    let (seen, now) = (Arc::clone(&moments), Arc::clone(&time));
    let watch = move |moment| {
        let is_stamped = header.disk(DiskIndex(0)).written_ns == now.load(Ordering::Relaxed);
        seen.lock().unwrap().push((moment, is_stamped));
    };
    bench.script.lock().unwrap().watch = Some(Box::new(watch));

    for command in [Command::Write { sector: 0, data: &[1; 512] }, Command::Discard(&[(8, 8, 0)])] {
        later();
        let ticket = bench.submit(command);
        later();
        bench.driver.turn(&[(Source::Store(0), false)]);
        later();
        bench.script.lock().unwrap().deadline = Some(Instant::now());
        bench.driver.turn(&[]);
        later();
        bench.driver.turn(&[]);
        let mut seen = std::mem::take(&mut *moments.lock().unwrap());
        assert!(seen.iter().all(|(_, is_stamped)| *is_stamped), "{command:?}: {seen:?}");
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen, [Moment::Kick, Moment::Ready, Moment::Timer].map(|moment| (moment, true)));
        bench.answer(0, Ok(()), 0);
        assert_eq!(bench.guest.result(ticket), Some(OK));
    }
}

/// The disk loses what it has done of a write before all of it is done. However often, the guest hears of it once.
#[test]
fn a_write_in_pieces_goes_out_again_once_for_each_loss() {
    let config_of_device = DeviceConfig { transfer_bytes_max: 8192, ..device() };
    let mut bench = Bench::start_with(config(1), config_of_device, |_, _| ());
    let data = [7; 4 * PAGE_SIZE];
    for losses in [0, 1, 2, 0] {
        let ticket = bench.submit(Command::Write { sector: 0, data: &data });
        bench.turn();
        let pieces = bench.asked();
        assert_eq!(pieces.len(), 2);
        for _ in 0..losses {
            bench.answer(0, Ok(()), 0);
            bench.script.lock().unwrap().answers.push_back(StoreEvent::ContentUncertain);
            bench.turn();
            bench.answer(0, Ok(()), 0);
            bench.turn();
            assert_eq!(bench.guest.result(ticket), None, "its first half may be lost");
            assert_eq!(bench.asked(), pieces);
        }
        bench.answer(0, Ok(()), 0);
        assert_eq!(bench.guest.result(ticket), None);
        bench.answer(0, Ok(()), 0);
        bench.turn();
        assert_eq!((bench.guest.result(ticket), bench.asked()), (Some(OK), vec![]), "after {losses} losses");
        assert!(bench.driver.vm.in_flight.is_empty());
    }
}

/// A clock that stands still.
struct StillClock(Instant);

impl Clock for StillClock {
    fn now(&self) -> Instant {
        self.0
    }

    fn of_files(&self) -> state::Clock {
        SystemClock.of_files()
    }

    fn of_file_stamps(&self) -> u64 {
        SystemClock.of_file_stamps()
    }
}

/// Where the front end keeps no record, no other program knows of a request.
#[test]
fn an_upgrade_waits_for_all_of_a_request_that_was_begun() {
    let config_of_device = DeviceConfig { transfer_bytes_max: 8192, ..device() };
    let (checking, verdict) = Checking::pending().unwrap();
    let checking = Mutex::new(Some(checking));
    let mut bench = Bench::start_with(config(1), config_of_device, |parts, _| {
        parts.ask = Box::new(move |_, _, _| Ok(checking.lock().unwrap().take().expect("it is asked once")));
        // It would not wait for ever.
        parts.clock = Box::new(StillClock(Instant::now()));
    });
    let (_recorder, stream) = UnixStream::pair().unwrap();
    bench.driver.vm.in_flight.measured().begin_client(TraceWriter::send(stream, Vec::new()).unwrap());
    let ticket = bench.submit(Command::Write { sector: 0, data: &[7; 4 * PAGE_SIZE] });
    bench.driver.begin_upgrade("/next");
    verdict.give(Ok(Successor { version: "next".into(), offers: None }));
    bench.driver.handle(Source::Upgrade, false);
    let waits = |bench: &mut Bench| bench.driver.is_draining_for_upgrade();
    assert!(waits(&mut bench), "two pieces are in flight");
    bench.answer(0, Ok(()), 0);
    bench.script.lock().unwrap().answers.push_back(StoreEvent::ContentUncertain);
    bench.turn();
    bench.answer(0, Ok(()), 0);
    bench.driver.vm.end_turn();
    assert!(bench.asked().is_empty() && waits(&mut bench), "they are to go out again");
    let other = bench.submit(Command::Read { sector: 8, length: PAGE_SIZE_U64 });
    assert_eq!(bench.asked().len(), 2, "the write, and nothing new");
    for _ in 0..2 {
        assert!(waits(&mut bench));
        bench.answer(0, Ok(()), 0);
    }
    bench.turn();
    assert_eq!((bench.guest.result(ticket), bench.guest.result(other)), (Some(OK), None));
    // A disk that cannot be handed over has it refused, once the front end's last message is over: it has its answer before.
    bench.turn_until(|bench| !waits(bench));
    bench.turn();
    assert_eq!(bench.asked().len(), 1, "what came meanwhile is served");
    assert!(bench.driver.vm.in_flight.measured().has_client(), "it records on");
}

/// A driver that looks for requests for an hour before it sleeps.
fn looking() -> Bench {
    Bench::start_with(config(1), device(), |parts, _| parts.poll_time_max = Duration::from_secs(3600))
}

/// The guest is not heard otherwise: it does not kick.
#[test]
fn a_request_that_comes_while_the_driver_looks_is_found_without_a_kick() {
    let mut bench = looking();
    let mut ready = Vec::new();
    for round in 0..3 {
        let ticket = bench.read(round, 1);
        bench.answer(0, Ok(()), 1);
        assert_eq!(bench.guest.result(ticket), Some(OK));
        assert!(!bench.guest.queues[0].wants_kicks());
        bench.guest.submit(0, Command::Read { sector: 8 * (10 + round), length: PAGE_SIZE_U64 });
        bench.driver.wait(&mut ready).unwrap();
        ready.retain(|(source, _)| *source == Source::Disk(0));
        assert_eq!(ready, [], "a kick");
        bench.driver.turn(&[]);
        bench.answer(0, Ok(()), 1);
        assert!(bench.driver.vm.in_flight.are_completed());
    }
}

#[test]
fn a_driver_does_not_look_while_a_guest_waits_for_an_answer() {
    let mut bench = looking();
    bench.read(0, 1);
    bench.raise_store();
    let mut ready = Vec::new();
    bench.driver.wait(&mut ready).unwrap();
    assert!(bench.guest.queues[0].wants_kicks(), "the guest has to announce what it wants while the driver sleeps");
    bench.answer(0, Ok(()), 1);
    bench.read(1, 1);
    bench.answer(0, Ok(()), 1);
    bench.raise_store();
    bench.driver.wait(&mut ready).unwrap();
    assert!(!bench.guest.queues[0].wants_kicks(), "while the driver looks it need not");
}

/// The guest kicks only if it is told to, and submits at any moment between the driver's looks and its sleep.
#[test]
fn no_request_is_missed_whenever_it_comes() {
    const REQUESTS: u64 = 20_000;
    for poll_time_max in [Duration::ZERO, Duration::from_micros(32)] {
        let mut bench = Bench::start_with(config(1), device(), |parts, _| parts.poll_time_max = poll_time_max);
        // It would find what was missed.
        bench.driver.vm.guests.look_again_after(Duration::from_secs(3600));
        let is_over = AtomicBool::new(false);
        let event = bench.driver.vm.guests.disks()[0].store.event_fd().try_clone_to_owned().unwrap();
        let Bench { driver, guest, script, .. } = &mut bench;
        std::thread::scope(|threads| {
            let requests = threads.spawn(|| {
                let answered = (0..REQUESTS).take_while(|number| {
                    let ticket = guest.submit(0, Command::Read { sector: number % 200 * 8, length: PAGE_SIZE_U64 });
                    guest.queues[0].kick();
                    let give_up_at = Instant::now() + PATIENCE;
                    std::iter::repeat_with(|| guest.result(ticket))
                        .take_while(|_| Instant::now() < give_up_at)
                        .any(|result| result == Some(OK))
                });
                let answered = answered.count() as u64;
                is_over.store(true, Ordering::SeqCst);
                rustix::io::write(event, &1_u64.to_ne_bytes()).unwrap();
                answered
            });
            let mut ready = Vec::new();
            while !is_over.load(Ordering::SeqCst) {
                ready.clear();
                driver.wait(&mut ready).unwrap();
                driver.turn(&ready);
                while answer(script, 0, Ok(()), 0) {}
                driver.turn(&[(Source::Store(0), false)]);
            }
            assert_eq!(requests.join().unwrap(), REQUESTS, "looking for {poll_time_max:?}");
        });
    }
}

/// As under TCG with one processor, where the guest's write of its request may be seen after its look at the flags.
#[test]
fn a_request_that_is_never_announced_is_found_at_a_second_look() {
    let mut bench = Bench::start();
    bench.read(0, 1);
    bench.answer(0, Ok(()), 1);
    assert!(bench.driver.timeout().is_some() && bench.guest.queues[0].wants_kicks());
    bench.guest.submit(0, Command::Read { sector: 16, length: PAGE_SIZE_U64 });
    let until_it_rests = |bench: &mut Bench| {
        while bench.driver.timeout().is_some_and(|timeout| timeout <= SECOND_LOOK) {
            let mut ready = Vec::new();
            bench.driver.wait(&mut ready).unwrap();
            ready.retain(|(source, _)| *source == Source::Disk(0));
            assert_eq!(ready, [], "a kick");
            bench.driver.turn(&[]);
        }
    };
    until_it_rests(&mut bench);
    assert_eq!(bench.asked().len(), 1);
    bench.answer(0, Ok(()), 1);
    until_it_rests(&mut bench);
}

/// Another guest may make the driver sleep and wake all the time.
#[test]
fn a_second_look_that_is_due_is_not_put_off() {
    let mut bench = Bench::start();
    let listen = |bench: &mut Bench, at: Instant| {
        bench.read(0, 1);
        bench.answer(0, Ok(()), 1);
        assert!(!bench.driver.vm.guests.listen(at));
    };
    let (start, part) = (Instant::now(), SECOND_LOOK / 4);
    (0..3).for_each(|times| listen(&mut bench, start + times * part));
    let guests = &mut bench.driver.vm.guests;
    assert_eq!(guests.next_deadline(), Some(start + SECOND_LOOK));
    guests.take_pop_again();
    guests.run_timers(start + SECOND_LOOK - part);
    assert!(!guests.pops_again());
    guests.run_timers(start + SECOND_LOOK);
    assert!(guests.take_pop_again());
    assert_eq!(guests.next_deadline(), Some(start + 2 * part + SECOND_LOOK), "for the last time that they were told");
    guests.run_timers(start + 2 * part + SECOND_LOOK);
    assert!(guests.take_pop_again() && guests.next_deadline().is_none());
}

/// What takes over then may be a program that does not look by itself.
#[test]
fn a_driver_that_ends_leaves_guests_that_kick() {
    let mut bench = Bench::start();
    bench.read(0, 1);
    bench.answer(0, Ok(()), 1);
    assert!(!bench.guest.queues[0].wants_kicks());
    bench.driver.handle(Source::Stop, false);
    assert!(matches!(bench.driver.turn(&[]), Some(Ended::Finished)));
    assert!(bench.guest.queues[0].wants_kicks());
}

/// Its successor has to wait as well.
#[test]
fn a_driver_that_ends_while_a_server_is_given_time_says_so() {
    let mut bench = Bench::start_with(config(1), device(), |parts, _| {
        parts.disks[0].settles_at = Some(Instant::now() + Duration::from_secs(3600));
    });
    bench.driver.handle(Source::Stop, false);
    assert!(matches!(bench.driver.turn(&[]), Some(Ended::Unsettled)));
}

/// A process that is to end would not sleep until it does.
#[test]
fn a_driver_does_not_look_for_requests_that_it_does_not_accept() {
    let mut bench = Bench::start();
    bench.read(0, 1);
    bench.guest.submit(0, Command::Read { sector: 16, length: PAGE_SIZE_U64 });
    assert!(bench.driver.vm.guests.look());
    bench.driver.vm.guests.take_pop_again();
    bench.driver.handle(Source::Stop, false);
    assert!(!bench.driver.has_work());
}

/// Others that share the processor are to run between its turns.
#[test]
fn a_driver_rests_before_it_goes_on_with_what_nobody_waits_for() {
    let mut bench = Bench::start();
    // It listens to kicks, and looks once more.
    while bench.driver.timeout().is_some_and(|timeout| timeout <= SECOND_LOOK) {
        bench.driver.wait(&mut Vec::new()).unwrap();
        bench.driver.turn(&[]);
    }
    // Something of the disk may be in each entry of the index.
    bench.driver.vm.engine.remove_disk(DiskIndex(0));
    assert_eq!(bench.driver.timeout(), Some(crate::driver::REST));
}

/// A measurement that was under way may have missed what the operator did. One that does not end keeps nobody for ever.
#[test]
fn a_rescan_waits_for_a_measurement_that_began_after_it_and_not_for_ever() {
    let mut bench = Bench::start();
    let folder = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(folder.path().join("control")).unwrap();
    let (control, desk) = ControlServer::unattended(listener.into(), None).unwrap();
    let request = || {
        let (client, _) = UnixStream::pair().unwrap();
        desk.hand_in(remoca_protocol::control::Command::Rescan, client).unwrap();
        control.next_request().unwrap()
    };
    let now = Instant::now();
    let late = now + Duration::from_secs(5);
    let super::Vm { sizes, guests, warmth, engine, host, .. } = &mut bench.driver.vm;
    sizes.run_timers(true, guests.disks_mut(), now);
    sizes.measure_for(request(), guests.disks_mut(), now);
    for _ in 0..2 {
        assert!(sizes.take_clients(guests.disks(), now).is_empty());
        sizes.follow(0, Ok(()), guests, (&mut *warmth, &mut *engine), host);
    }
    let outcomes = |clients: Vec<(_, Result<(), String>)>| clients.into_iter().map(|(_, it)| it).collect::<Vec<_>>();
    assert_eq!(outcomes(sizes.take_clients(guests.disks(), now)), [Ok(())]);

    sizes.measure_for(request(), guests.disks_mut(), now);
    assert!(sizes.next_deadline().is_some_and(|at| at <= late));
    assert!(sizes.take_clients(guests.disks(), late - Duration::from_millis(1)).is_empty());
    let outcomes = outcomes(sizes.take_clients(guests.disks(), late));
    assert!(matches!(&outcomes[..], [Err(why)] if why.contains("has not told its size")), "{outcomes:?}");
}
