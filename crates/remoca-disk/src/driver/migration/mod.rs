//! Migration, seen from the I/O thread: carries what the peer says to [`Ownership`], and does what that decides.
//!
//! While the disks are away their places hold vacant stores, there is no link to a memory server, and nothing is taken from
//! the guest's queues: its requests wait. Opening and locking an image blocks, and is done here all the same: nobody is
//! served then.

mod coming;
mod going;

use super::Driver;
use crate::control::Request;
use crate::link::{HostNetwork, Network};
use crate::migration::{Heard, Incoming, Mark, Offer, OfferedDisk, Peer, PeerNetwork, Receipt, VERSION};
use crate::state::Former;
use remoca_core::engine::{DiskEngine, EngineConfig, layout};
use remoca_core::migration::{Action, Message, Ownership};
use remoca_core::units::PageCount;
use remoca_frontend::device::Frontend;
use remoca_io::address::Endpoint;
use remoca_io::wake::WakeUp;
use remoca_io::words::IndexMemory;
use remoca_protocol::control::{MigrationStatus, Reply, Secret};
use remoca_store::{OpenError, Store};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// For a peer to be reached, to prove itself, and to offer or to answer; less than the control client waits.
const OFFER_PATIENCE: Duration = Duration::from_secs(5);

/// Between two attempts to reach a peer that has the disks: at first, and at last.
const LINK_AGAIN_AFTER: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(16));

/// Frames of the peer that are looked at in one turn.
const HEARD_IN_A_TURN: usize = 16;

/// Opens the image of a disk again, and locks it.
pub type Opener = Box<dyn Fn() -> Result<Box<dyn Store>, OpenError> + Send>;

/// What the driver knows of migration.
pub struct Migration {
    ownership: Ownership,
    peers: Box<dyn PeerNetwork>,
    wake_up: WakeUp,
    mark: Option<Mark>,
    /// The disks came, and no guest has run with them yet.
    owes_mark: bool,
    lock_reaches: bool,
    incoming: Option<Incoming>,
    peer: Option<Peer>,
    /// As the operator named it, or "the source".
    peer_name: String,
    /// When it was connected to, or tried last.
    peer_since: Option<Instant>,
    /// Where the disks go or went, and the secret that is shared with it: for another link after one that broke.
    way: Option<(Endpoint, Secret)>,
    /// After the beginning of the last attempt, while the peer that has the disks is not linked.
    link_again_after: Duration,
    /// The peer is to have the disks already.
    links_again: bool,
    /// Who waits for the peer's answer to the offer.
    client: Option<Request>,
    received: Option<Receipt>,
    /// Where the state file is to be, if there is to be one.
    state_path: Option<PathBuf>,
    /// Memory servers, while there is no link to them.
    servers: Vec<Endpoint>,
    /// How they are reached.
    network: Arc<dyn Network>,
    config: EngineConfig,
    /// Flushes under way that belong to a hand-over.
    pub(super) flushes: u32,
    draining: bool,
    running: bool,
    /// When the machine's wishes were fulfilled last.
    served: bool,
    /// Of the disks, as they were handed over last. The guest stays the same.
    failed_flushes: Vec<Option<i32>>,
    write_caches: Vec<bool>,
    /// What a former process left that did not have its disks any more at the end.
    pub(super) former: Former,
    /// Since the disks became ours.
    pub(super) wrote: bool,
    /// When the guest's queues stopped, or the disks became ours.
    since: Option<Instant>,
    /// What happened last, for the operator.
    news: Option<String>,
}

impl Migration {
    /// `away`: the disks are not here, because they are still to come (`incoming`), or because they went. What comes is kept
    /// at `state_path` for a successor of this process.
    ///
    /// # Errors
    /// If the address cannot be listened at.
    pub fn new(
        mut peers: Box<dyn PeerNetwork>,
        incoming: Option<(Endpoint, Secret)>,
        mark: Option<Mark>,
        state_path: Option<PathBuf>,
        config: EngineConfig,
        lock_reaches: bool,
        away: bool,
    ) -> io::Result<Self> {
        let wake_up = WakeUp::new()?;
        let ownership = Ownership::new(away, lock_reaches);
        let went = away && incoming.is_none();
        let incoming =
            incoming.map(|(endpoint, secret)| peers.listen(endpoint, &secret, wake_up.wake())).transpose()?;
        Ok(Self {
            ownership,
            peers,
            wake_up,
            mark,
            owes_mark: false,
            lock_reaches,
            incoming,
            peer: None,
            peer_name: String::new(),
            peer_since: None,
            way: None,
            link_again_after: LINK_AGAIN_AFTER.0,
            links_again: false,
            client: None,
            received: None,
            state_path,
            servers: Vec::new(),
            network: Arc::new(HostNetwork),
            config,
            flushes: 0,
            failed_flushes: Vec::new(),
            write_caches: Vec::new(),
            former: Former::default(),
            draining: false,
            running: false,
            served: !away,
            wrote: false,
            since: None,
            news: went.then(|| {
                "the disks were handed over before this process was started, and no lock says where they are: if the VM runs \
                 nowhere else, say `remoca migrate NAME --take-back`"
                    .into()
            }),
        })
    }

    /// Returns whether requests of the guest are executed.
    pub fn serves(&self) -> bool {
        self.ownership.serves()
    }

    /// Returns whether the disks are here, and no other process is concerned.
    pub fn is_idle(&self) -> bool {
        self.peer.is_none() && self.ownership.serves()
    }

    /// Returns the configuration of the engine.
    pub(super) fn config(&self) -> &EngineConfig {
        &self.config
    }

    pub fn wake_up(&self) -> &WakeUp {
        &self.wake_up
    }

    pub(super) fn process_ends(&self, guest_stays: bool) {
        if let Some(mark) = &self.mark {
            mark.process_ends(guest_stays);
        }
    }

    fn tell(&mut self, news: String) {
        tracing::info!("{news}");
        self.news = Some(news);
    }

    fn warn(&mut self, news: String) {
        tracing::warn!("{news}");
        self.news = Some(news);
    }
}

impl Driver {
    /// Begins without disks: a process that waits for them has no use for an index or a memory server yet.
    pub(super) fn begin_migration(&mut self) -> io::Result<()> {
        if self.migration.ownership.holds() {
            return Ok(());
        }
        self.leave_servers();
        self.engine = idle_engine(&self.migration.config)?;
        Ok(())
    }

    /// Gives a hand-over up that has not happened; or the connection, so that the disks can be taken back.
    pub(super) fn abort_migration(&mut self) -> Result<(), String> {
        self.migration.way = None;
        if self.migration.peer.is_none() {
            return Err(match self.migration.ownership.holds() {
                true => "there is nothing to abort".into(),
                false => "the disks are not here: start the guest here, or say --take-back".into(),
            });
        }
        self.lose_peer("aborted by the operator");
        Ok(())
    }

    pub(super) fn take_disks_back(&mut self) -> Result<(), String> {
        let taken = self.migration.ownership.take_back(self.now);
        if taken {
            // Whatever the other process would answer now.
            (self.migration.way, self.migration.peer) = (None, None);
        }
        self.do_migration();
        match (taken, self.migration.ownership.holds()) {
            (false, true) => Err("the disks are here".into()),
            (false, false) => Err(format!(
                "{} is connected, and may have the disks, which no lock tells: end it, or say --abort, if the VM runs nowhere else",
                self.migration.peer_name
            )),
            (true, false) => Err(self.migration.news.clone().unwrap_or_else(|| "the disks could not be had".into())),
            (true, true) => Ok(()),
        }
    }

    /// Returns what this process offers. All of its disks must come over vhost-user, whose queues say when a guest has stopped.
    fn own_offer(&self) -> Result<Offer, String> {
        let disks = self.disks.iter().map(|disk| match disk.frontend.sector_to_hand_over() {
            Some(sector) => Ok(OfferedDisk {
                name: disk.name.clone(),
                bytes: disk.store.geometry().size,
                read_only: disk.frontend.is_read_only(),
                sector,
            }),
            None => Err(format!("{}: an NBD export cannot be handed over, only a vhost-user disk can", disk.name)),
        });
        Ok(Offer {
            version: VERSION,
            name: self.name.clone(),
            disks: disks.collect::<Result<_, String>>()?,
            has_port: self.port.is_some(),
            lock_reaches: self.migration.lock_reaches,
            words: self.engine.index().words().len() as u64,
            returns: false,
        })
    }

    pub(super) fn hear_migration(&mut self) {
        self.migration.wake_up.clear();
        for _ in 0..HEARD_IN_A_TURN {
            let Some(peer) = self.migration.incoming.as_mut().and_then(Incoming::take_peer) else { break };
            if self.migration.peer.is_some() {
                peer.refuse("this process is connected with another one: is it about to get its disks already?");
                peer.end_politely();
            } else {
                self.index_size.refuse_clients();
                self.migration.peer = Some(peer);
                self.migration.peer_since = Some(self.clock.now());
                self.migration.links_again = false;
                "the source".clone_into(&mut self.migration.peer_name);
            }
        }
        for _ in 0..HEARD_IN_A_TURN {
            let Some(heard) = self.migration.peer.as_mut().and_then(Peer::hear) else { return };
            self.hear(heard);
        }
        self.migration.wake_up.raise();
    }

    fn hear(&mut self, heard: Heard) {
        let linked = self.migration.ownership.is_linked();
        match heard {
            // The side that connected does not hear offers.
            Heard::Offer(offer) if !linked && !self.asked() => self.judge(&offer),
            Heard::Refused(why) => {
                let why = format!("it refuses: {why}");
                self.lose_peer(&why);
            }
            Heard::Message(Message::Accept) if !linked && self.migration.client.is_some() => self.accepted(),
            Heard::Message(Message::Accept) if self.migration.links_again && !self.migration.ownership.holds() => {
                self.linked_again();
            }
            Heard::Message(message) if linked => {
                self.migration.ownership.handle_message(self.now, message);
                self.do_migration();
            }
            Heard::State(header) if self.may_receive() => self.begin_receiving(*header),
            Heard::Words(bytes) if linked && !self.migration.ownership.holds() => self.receive_words(&bytes),
            Heard::Sent => {
                self.migration.ownership.handle_sent();
                self.do_migration();
            }
            Heard::Ended(why) => self.lose_peer(&why),
            Heard::Alive => {}
            Heard::Offer(_) | Heard::Message(_) | Heard::State(_) | Heard::Words(_) => {
                self.lose_peer("it does not keep to the protocol");
            }
        }
    }

    fn lose_peer(&mut self, why: &str) {
        if self.migration.peer.take().is_none() {
            return;
        }
        let name = std::mem::take(&mut self.migration.peer_name);
        let news = format!("no connection to {name} any more: {why}");
        if let Some(client) = self.migration.client.take() {
            client.answer(Reply::Error { error: format!("{name}: {why}") });
        }
        let is_done = self.migration.incoming.is_some() && self.migration.ownership.holds();
        if std::mem::take(&mut self.migration.links_again) {
            self.tell_missing(&name, why);
        } else if is_done || !self.migration.ownership.is_linked() {
            tracing::info!("{news}");
        } else {
            self.migration.warn(news);
        }
        if self.migration.ownership.is_linked() {
            self.migration.ownership.handle_lost(self.now);
        }
        // Nobody waits any longer for disks that come.
        self.pop_again = true;
        self.do_migration();
    }

    /// Does what the machine wants; whether that was anything.
    fn do_migration(&mut self) -> bool {
        let mut any = false;
        while let Some(action) = self.migration.ownership.poll_action() {
            any = true;
            match action {
                Action::Drain => self.begin_drain(),
                Action::SendState => self.send_state(),
                Action::Release => self.release_disks(),
                Action::Send(message) => {
                    if let Some(peer) = &self.migration.peer {
                        peer.send(message);
                    }
                }
                Action::Disconnect => {
                    self.migration.peer = None;
                    // Nobody waits any longer for disks that come.
                    self.pop_again = true;
                }
                Action::Forget => self.migration.received = None,
                Action::Lock => self.lock_disks(),
                Action::Serve { warm } => {
                    if std::mem::take(&mut self.migration.links_again) {
                        self.migration.peer = None;
                    }
                    self.serve_disks(warm);
                }
                Action::TellStuck => self.migration.warn(
                    "the guest waits for its disks: the process that has them is out of reach, and the lock of a block device or \
                     an NBD export does not reach other hosts. Make sure that the VM runs nowhere else, then say \
                     `remoca migrate NAME --take-back`"
                        .into(),
                ),
            }
        }
        // What came meanwhile has brought its event already.
        let serves = self.migration.serves();
        self.pop_again |= serves && !self.migration.served;
        self.migration.served = serves;
        if any {
            // The guest may have come before its disks.
            self.fit_index();
        }
        any
    }

    /// Follows the guest's queues, and a drain, at the end of a turn. Returns whether that led to anything.
    pub(super) fn advance_migration(&mut self) -> bool {
        if self.migration.owes_mark && self.is_running() {
            self.migration.owes_mark = false;
            self.mark_that_disks_came();
        }
        if self.migration.is_idle() {
            return false;
        }
        self.follow_queues();
        // A drain that was called off is none of what is to be made durable now.
        let any = self.do_migration();
        let idle = self.requests.is_empty() && self.disks.iter().all(|disk| disk.store.in_flight() == 0);
        if self.migration.draining && self.migration.flushes == 0 && idle {
            self.migration.draining = false;
            self.migration.ownership.handle_drained(self.migration.wrote);
        }
        self.do_migration() || any
    }

    /// Returns whether the process that has the disks is about to hand them over: the guest runs here, and that process has
    /// heard of it.
    pub(super) fn disks_come(&self) -> bool {
        self.migration.ownership.is_linked() && self.is_running()
    }

    fn is_running(&self) -> bool {
        let disks = self.disks.iter().map(|disk| &disk.frontend);
        disks.chain(self.port.iter().map(|port| &port.frontend)).any(Frontend::is_running)
    }

    fn follow_queues(&mut self) {
        let running = self.is_running();
        if running != self.migration.running {
            self.migration.running = running;
            self.migration.ownership.handle_queues(self.now, running);
        }
    }

    fn change_engine(&mut self, mut engine: DiskEngine<IndexMemory>) {
        engine.count_on(self.engine.stats());
        self.index_size.forget();
        self.engine = engine;
    }

    pub(super) fn migration_deadline(&self) -> Option<Duration> {
        let machine = self.migration.ownership.next_deadline().map(|at| Duration::from_nanos(at.since_ns(self.now)));
        [machine, self.offer_left(), self.link_again_left()].into_iter().flatten().min()
    }

    /// Returns how long ago the peer was connected to, or tried last.
    fn time_of_peer(&self) -> Duration {
        self.time_since(self.migration.peer_since)
    }

    /// Returns how long ago the guest's queues stopped, or the disks became ours.
    fn pause(&self) -> Duration {
        self.time_since(self.migration.since)
    }

    fn time_since(&self, at: Option<Instant>) -> Duration {
        at.map_or(Duration::ZERO, |at| self.clock.now().saturating_duration_since(at))
    }

    /// Returns the time that is left for an offer, or the answer to one.
    fn offer_left(&self) -> Option<Duration> {
        let waits = self.migration.peer.is_some() && !self.migration.ownership.is_linked();
        waits.then(|| OFFER_PATIENCE.saturating_sub(self.time_of_peer()))
    }

    pub(super) fn run_migration_timers(&mut self) {
        if self.offer_left() == Some(Duration::ZERO) {
            self.lose_peer("it says nothing: is it a VM process that was started with --incoming?");
        }
        if self.link_again_left() == Some(Duration::ZERO) {
            self.link_again();
        }
        if self.migration.ownership.next_deadline().is_some_and(|at| at <= self.now) {
            self.migration.ownership.handle_timer(self.now);
            self.do_migration();
        }
    }

    pub(super) fn migration_status(&self) -> Option<MigrationStatus> {
        let Migration { ownership, incoming, peer, peer_name, news, .. } = &self.migration;
        if incoming.is_none() && peer.is_none() && news.is_none() {
            return None;
        }
        Some(MigrationStatus {
            has_disks: ownership.holds(),
            incoming: incoming.as_ref().map(|incoming| incoming.endpoint.to_string()),
            peer: peer.as_ref().map(|_| peer_name.clone()),
            news: news.clone(),
        })
    }
}

/// Returns an engine that caches nothing, for a process without disks.
fn idle_engine(config: &EngineConfig) -> io::Result<DiskEngine<IndexMemory>> {
    let idle = EngineConfig { cache: PageCount(0), guest_memory: PageCount(0), ..*config };
    Ok(DiskEngine::new(&idle, IndexMemory::new(layout(&idle).words())?))
}
