//! The VM moves: another process is started for its disks, the guest stops at one and runs at the other, or returns.
//!
//! [`World::process`] is the process that the guest is attached to, `other` the other one. The two agree which of them
//! has the disks.

use super::guests::Attachment;
use super::plan::Way;
use super::process::Process;
use super::store::{ModelStore, StoreDesk};
use super::world::{Event, Outcome, World};
use crate::violation::{Promise, Violation};
use remoca_disk::driver::{Disk, Opener};
use remoca_disk::migration::{Incoming, Peer, PeerNetwork};
use remoca_disk::testing::{FarEnd, Wanted, listening};
use remoca_frontend::device::Frontend;
use remoca_io::address::Endpoint;
use remoca_io::control::Answer;
use remoca_io::wake::Wake;
use remoca_protocol::control::{Command, Reply, Secret};
use remoca_store::{AlignedStore, Geometry, VacantStore};
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const MS: u64 = 1_000_000;

/// Connections between processes, as their drivers see them.
#[derive(Clone, Default)]
pub(super) struct ModelPeers(Arc<Mutex<PeerDesk>>);

#[derive(Default)]
pub(super) struct PeerDesk {
    /// Connections that were started.
    begun: Vec<FarEnd>,
    /// Receiver of incoming connections, and the signal that wakes its process.
    listening: Option<(SyncSender<Peer>, Wake)>,
    /// Images that were opened since the world last looked.
    opened: Vec<(usize, StoreDesk)>,
}

impl ModelPeers {
    fn lock(&self) -> MutexGuard<'_, PeerDesk> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PeerNetwork for ModelPeers {
    fn connect(&mut self, _: Endpoint, _: &Secret, wake: &Wake) -> io::Result<Peer> {
        let (peer, far) = FarEnd::pair(wake);
        self.lock().begun.push(far);
        Ok(peer)
    }

    fn listen(&mut self, endpoint: Endpoint, _: &Secret, wake: &Wake) -> io::Result<Incoming> {
        let (incoming, found) = listening(endpoint);
        self.lock().listening = Some((found, Arc::clone(wake)));
        Ok(incoming)
    }
}

/// A connection between the two processes: the end that made it, and the other end.
pub(super) struct PeerLine {
    ends: [FarEnd; 2],
    /// Time at which all messages so far have arrived, at each end.
    until_ns: [u64; 2],
    is_cut: bool,
}

/// Progress of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The guest runs, and the disks are offered.
    Offered,
    /// The guest's queues are being stopped.
    Stopping,
    /// The guest runs nowhere.
    Stopped,
    /// The guest runs where it will stay.
    Settled,
}

/// A move in progress.
pub(super) struct Move {
    pub(super) way: Way,
    stage: Stage,
    /// Number of the move, for its events.
    number: u64,
    /// Receives the reply that says whether the disks may go.
    answer: Receiver<Answer>,
}

impl Move {
    /// Returns whether the connection between the processes is cut in this move.
    pub(super) fn is_cut(&self) -> bool {
        self.way == Way::Cut
    }
}

/// Returns whether the process is there, and has the disks.
fn has_disks(process: &mut Option<Process>) -> bool {
    let state = process.as_mut().and_then(|process| process.driver.snapshot().migration);
    state.is_some_and(|state| state.has_disks)
}

impl World<'_> {
    /// Returns the opener of a disk's image, for a process that its disks move to.
    pub(super) fn opener(&self, number: usize) -> Opener {
        let disk = &self.disks[number];
        let (image, of, plan, clock) =
            (Arc::clone(&disk.image), self.image_of(number), disk.plan.clone(), self.clock.clone());
        let peers = self.peers.clone();
        Box::new(move |_| {
            let desk = StoreDesk::new(&image);
            let store = ModelStore::open(desk.clone(), &plan, of, clock.clone())?;
            peers.lock().opened.push((number, desk));
            Ok(AlignedStore::wrap(Box::new(store)))
        })
    }

    /// Starts a process for the disks on another host, and commands this one to offer them.
    pub(super) fn begin_move(&mut self, way: Way) {
        let ready = self.disks.iter().all(|disk| !disk.guest.is_gone && !disk.guest.is_switching());
        let Some(process) = self.process.as_mut().filter(|_| ready && self.moving.is_none()) else {
            self.tally.skipped += 1;
            return;
        };
        let secret: Secret = format!("{:064x}", 1).parse().expect("it is a secret");
        let endpoint = Endpoint::Tcp("other:7100".into());
        let (connection, _) = UnixStream::pair().expect("the system has sockets left");
        let command = Command::Migrate { to: endpoint.to_string(), key: secret.clone() };
        let Ok(answer) = process.desk.hand_in(command, connection) else { return };
        self.moves += 1;
        self.note(|| format!("the VM is to move: {way:?}"));
        let config = self.config();
        let started = self.start_engine(&config, false);
        let (disks, fronts) = (0..self.disks.len()).map(|number| self.vacant(number)).unzip();
        let process = self.launch(started, disks, Some((endpoint, secret)));
        self.other = Some(Process { fronts, ..process });
        self.moving = Some(Move { way, stage: Stage::Offered, number: self.moves, answer });
        let in_ns = self.random.below(300 * MS);
        self.schedule(in_ns, Event::GuestStops(self.moves));
    }

    fn vacant(&self, number: usize) -> (Disk, remoca_frontend::testing::DirectFrontEnd) {
        let geometry = Geometry {
            size: self.disks[number].plan.sectors as u64 * 512,
            logical_sector: 512,
            physical_block: 4096,
            read_only: false,
            can_discard: true,
            can_write_zeroes: true,
            may_forget: false,
            outlives_process: false,
        };
        let store = VacantStore::new(geometry).expect("the system has descriptors left");
        let (device, front) = self.device(number);
        (self.disk(number, Box::new(store), Frontend::Vhost(Box::new(device))), front)
    }

    fn is_at(&self, number: u64, stage: Stage) -> bool {
        self.moving.as_ref().is_some_and(|moving| moving.number == number && moving.stage == stage)
    }

    fn enter(&mut self, stage: Stage) {
        if let Some(moving) = &mut self.moving {
            moving.stage = stage;
        }
    }

    /// Stops the guest, and then its queues, once the reply says that the disks may go.
    pub(super) fn guest_stops(&mut self, number: u64) {
        if !self.is_at(number, Stage::Offered) {
            return;
        }
        let Some(moving) = &self.moving else { return };
        match moving.answer.try_recv() {
            Ok(Answer::Reply(Reply::Status(_) | Reply::Curve(_)) | Answer::Elsewhere) => {}
            Err(TryRecvError::Empty) => return self.schedule(MS, Event::GuestStops(number)),
            Ok(Answer::Reply(Reply::Error { error })) => {
                self.note(|| format!("the move is refused: {error}"));
                self.tally.moves_refused += 1;
                return self.end_move();
            }
            Err(TryRecvError::Disconnected) => return self.end_move(),
        }
        self.stop_guest(number);
    }

    fn stop_guest(&mut self, number: u64) {
        if self.disks.iter().any(|disk| disk.guest.is_switching() || disk.guest.is_gone) {
            return self.schedule(MS, Event::GuestSettles(number));
        }
        self.note(|| "the guest stops".into());
        self.enter(Stage::Stopping);
        for disk in &mut self.disks {
            disk.guest.is_paused = true;
            disk.guest.queues_to_stop = disk.plan.queues;
            if let Attachment::Vhost { front: Some(front), .. } = &mut disk.guest.attachment {
                (0..disk.plan.queues).for_each(|queue| front.stop_queue(queue));
                front.pump();
            }
        }
        if self.moving.as_ref().is_some_and(|moving| moving.way == Way::Cut) {
            let in_ns = self.random.below(20 * MS);
            self.schedule(in_ns, Event::LineCut(number));
        }
    }

    pub(super) fn guest_settles(&mut self, number: u64) {
        if self.is_at(number, Stage::Offered) {
            self.stop_guest(number);
        }
    }

    /// Continues a move when all queues are stopped.
    pub(super) fn follow_move(&mut self) {
        let Some(Move { way, stage: Stage::Stopping, number, .. }) = self.moving else { return };
        if self.disks.iter().any(|disk| disk.guest.queues_to_stop > 0) {
            return;
        }
        // A guest that was gone may have let the disks go. The system completes the requests of a process before it
        // ends it and frees its locks, so a process that has the disks dies when they are idle.
        let other_has_disks = way == Way::OtherDies && has_disks(&mut self.other);
        if other_has_disks && self.disks.iter().any(super::disks::DiskSide::is_busy) {
            return;
        }
        self.enter(Stage::Stopped);
        for disk in &mut self.disks {
            if let Attachment::Vhost { front: Some(front), .. } = &mut disk.guest.attachment {
                front.disconnect();
                front.pump();
            }
        }
        let is_gone = way == Way::OtherDies && self.random.one_in(2);
        if is_gone {
            self.other = None;
            if other_has_disks {
                self.disks.iter_mut().for_each(super::disks::DiskSide::lose_knowledge);
            }
        }
        // A drain may still be in progress when the guest runs again.
        let in_ns = if self.random.one_in(2) { 0 } else { self.random.below(100 * MS) };
        self.schedule(in_ns, Event::GuestRuns(number));
    }

    /// Resumes the guest, here or there.
    pub(super) fn guest_runs(&mut self, number: u64) {
        if !self.is_at(number, Stage::Stopped) {
            return;
        }
        self.enter(Stage::Settled);
        // A target without its connection waits for the lock.
        let goes_anyway = self.random.one_in(2);
        let way = self.moving.as_ref().map(|moving| moving.way);
        let goes = self.other.is_some() && (way == Some(Way::Goes) || way == Some(Way::Cut) && goes_anyway);
        self.note(|| format!("the guest runs {}", if goes { "at the other host" } else { "where it was" }));
        if goes {
            self.tally.moves += 1;
            std::mem::swap(&mut self.process, &mut self.other);
            let mut fronts =
                self.process.as_mut().map(|process| std::mem::take(&mut process.fronts)).unwrap_or_default();
            for disk in self.disks.iter_mut().rev() {
                let Attachment::Vhost { front, .. } = &mut disk.guest.attachment else { continue };
                let left = std::mem::replace(front, fronts.pop());
                if let (Some(other), Some(left)) = (&mut self.other, left) {
                    other.fronts.push(left);
                }
            }
        } else {
            self.tally.moves_back += 1;
        }
        for disk in 0..self.disks.len() {
            self.disks[disk].guest.is_paused = false;
            self.reattach(disk);
        }
        let in_ns = self.random.between(MS..=2_000 * MS);
        self.schedule(in_ns, Event::OtherEnds(number));
    }

    /// Ends the process that is no longer needed, once the other one has the disks.
    pub(super) fn other_ends(&mut self, number: u64) {
        if !self.is_at(number, Stage::Settled) {
            return;
        }
        let state = |process: &mut Option<Process>| process.as_mut()?.driver.snapshot().migration;
        let (here, there) = (state(&mut self.process), state(&mut self.other));
        self.note(|| format!("the other process is to end: {here:?}, {there:?}"));
        let is_warm = here
            .as_ref()
            .and_then(|state| state.news.as_ref())
            .is_some_and(|news| news.starts_with("has the disks, warm"));
        if here.is_some_and(|state| !state.has_disks) {
            // The guest waits for the disks. If that takes too long, the other process must end first.
            self.waits += 1;
            // The process's requests to a local disk complete before the system ends it.
            if self.waits >= 50 && self.other.is_some() && !self.disks.iter().any(super::disks::DiskSide::is_busy) {
                self.other = None;
                self.disks.iter_mut().for_each(super::disks::DiskSide::lose_knowledge);
            }
            return self.schedule(100 * MS, Event::OtherEnds(number));
        }
        self.tally.moved_warm += u64::from(is_warm);
        self.end_move();
    }

    /// Ends the other process, and the connection between the two.
    pub(super) fn end_move(&mut self) {
        self.other = None;
        self.moving = None;
        self.waits = 0;
        for disk in &mut self.disks {
            disk.guest.is_paused = false;
        }
        let mut desk = self.peers.lock();
        desk.listening = None;
    }

    pub(super) fn line_cut(&mut self, number: u64) {
        if self.moving.as_ref().is_none_or(|moving| moving.number != number) {
            return;
        }
        self.note(|| "the line between the processes is cut".into());
        for line in self.lines.iter_mut().filter(|line| !line.is_cut) {
            line.is_cut = true;
            self.tally.lines_cut += 1;
            line.ends.iter_mut().for_each(|end| end.end("cut"));
        }
    }

    /// Delivers the messages between the drivers, and registers the images that were opened.
    pub(super) fn collect_peers(&mut self) -> Outcome {
        let begun = std::mem::take(&mut self.peers.lock().begun);
        for far in begun {
            let in_ns = self.latency();
            self.schedule(in_ns, Event::PeerArrives(Box::new(far)));
        }
        for number in 0..self.lines.len() {
            for side in 0..2 {
                while let Some(wanted) = self.lines[number].ends[side].take() {
                    let to = 1 - side;
                    let in_ns = self.latency();
                    let is_cut = self.lines[number].is_cut;
                    let at = (self.now + in_ns).max(self.lines[number].until_ns[to]);
                    match wanted {
                        Wanted::Frames(frames) => {
                            self.lines[number].until_ns[to] = at;
                            self.schedule(at - self.now, Event::ToPeer(number, to, frames));
                        }
                        Wanted::NoMore => {}
                        Wanted::Closed if is_cut => break,
                        Wanted::Closed => {
                            self.lines[number].is_cut = true;
                            self.schedule(at - self.now, Event::PeerEnds(number, to));
                            break;
                        }
                    }
                }
                self.lines[number].ends[side].push();
            }
        }
        let opened = std::mem::take(&mut self.peers.lock().opened);
        for (number, desk) in opened {
            if self.disks[number].is_busy() {
                let text = format!("disk {number} is opened while another process uses it");
                return Err(Violation::new(Promise::DiskOnlyAsAsked, text));
            }
            self.disks[number].store = desk;
        }
        self.follow_move();
        Ok(())
    }

    pub(super) fn peer_arrives(&mut self, mut far: FarEnd) {
        let listening = self.peers.lock().listening.clone();
        let Some((found, wake)) = listening.filter(|_| self.other.is_some()) else {
            far.end("nobody listens there");
            far.push();
            return self.lines.push(PeerLine { ends: [far, FarEnd::nobody()], until_ns: [0; 2], is_cut: true });
        };
        let (peer, there) = FarEnd::pair(&wake);
        if found.try_send(peer).is_ok() {
            super::raise(&wake);
        }
        self.lines.push(PeerLine { ends: [far, there], until_ns: [0; 2], is_cut: false });
    }

    pub(super) fn reach_peer(&mut self, number: usize, side: usize, frames: &[u8]) {
        let line = &mut self.lines[number];
        if !line.is_cut {
            line.ends[side].bring(frames);
            line.ends[side].push();
        }
    }

    pub(super) fn peer_ends(&mut self, number: usize, side: usize) {
        let end = &mut self.lines[number].ends[side];
        end.end("it closed the connection");
        end.push();
    }
}
