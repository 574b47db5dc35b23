//! Migration, seen from the I/O thread: passes the peer's messages to [`Ownership`], and executes its decisions.
//!
//! While the disks are away, vacant stores take their places, there is no link to a memory server, and the requests in
//! the guest's queues wait. Opening and locking an image blocks, but is done on this thread all the same: no guest is
//! served at that time. It waits for another process to unlock an image only if that one has just given it.

mod coming;
mod connection;
mod going;

use super::guests::Guests;
use super::host::Host;
use super::vm::Vm;
use crate::endpoints::Endpoints;
use crate::link::{HostNetwork, Network};
use crate::migration::{Heard, Mark, PeerNetwork, Receipt};
use crate::state::Former;
use connection::{Connection, Lost};
use remoca_core::engine::{DiskEngine, EngineConfig, layout};
use remoca_core::migration::{Action, Message, NotTaken, Ownership};
use remoca_core::units::PageCount;
use remoca_frontend::vhost::Attachment;
use remoca_io::address::Endpoint;
use remoca_io::words::IndexMemory;
use remoca_protocol::control::MigrationStatus;
use remoca_protocol::control::Reply;
use remoca_protocol::control::Secret;
use remoca_protocol::peer::PeerFrame;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum number of the peer's frames that are handled in one turn.
const HEARD_IN_A_TURN: usize = 16;

/// Why a process whose disks are elsewhere, or may go there, is not upgraded.
const MIGRATES: &str = "its disks are with another process, or one is connected to which they may go (`remoca status -v`): try again when that has ended";
/// Why one is not upgraded whose disks are elsewhere while nobody is connected.
const WITHOUT_DISKS: &str = "its disks are not here, and no guest is attached: restart it if its VM is still to come; if that has moved away, end it \
                             (`systemctl disable --now`)";

/// The driver's state of migration.
pub struct Migration {
    ownership: Ownership,
    connection: Connection,
    mark: Option<Mark>,
    /// Whether the disks came, and no guest has run with them yet.
    owes_mark: bool,
    lock_reaches: bool,
    received: Option<Receipt>,
    /// Path that the state file is to have; `None` if there is to be none.
    state_path: Option<PathBuf>,
    /// Memory servers, while there is no link to them.
    servers: Endpoints,
    /// Network by which memory servers are reached.
    network: Arc<dyn Network>,
    config: EngineConfig,
    draining: bool,
    running: bool,
    /// Whether this process served its disks when the ownership machine's actions were last executed.
    served: bool,
    /// Position here of each disk in the order of the offer; empty if this process has made the offer.
    order: Vec<usize>,
    /// Failed flushes, and write caches, of the disks as they were last handed over. The guest stays the same.
    failed_flushes: Vec<Option<i32>>,
    write_caches: Vec<bool>,
    /// Write caches when this process handed its disks over, each with the front end that was attached.
    own_write_caches: Vec<(bool, Option<Attachment>)>,
    /// What a previous process left that no longer had its disks at the end.
    former: Former,
    /// When the guest's queues had stopped, or this process started to lock the disks.
    since: Option<Instant>,
    /// The latest event, for the operator.
    news: Option<String>,
    told: Told,
}

/// What was logged of attempts that are made again and again, while the disks are not here.
#[derive(Default)]
struct Told {
    /// Why the images could not be opened.
    unopened: Option<String>,
    /// Why the process that has our disks could not be asked for them.
    unasked: Option<String>,
}

impl Migration {
    /// Returns the state of migration at the start. `away`: the disks are not here, because they are still to come
    /// (`incoming`), or because they went. An index that comes is kept at `state_path` for a successor of this process.
    ///
    /// # Errors
    /// If listening at the address fails, or the system has no descriptors or threads left.
    pub fn new(
        peers: Box<dyn PeerNetwork>,
        incoming: Option<(Endpoint, Secret)>,
        mark: Option<Mark>,
        state_path: Option<PathBuf>,
        config: EngineConfig,
        lock_reaches: bool,
        away: bool,
    ) -> io::Result<Self> {
        let went = away && incoming.is_none();
        Ok(Self {
            ownership: Ownership::new(away, lock_reaches),
            connection: Connection::new(peers, incoming)?,
            mark,
            owes_mark: false,
            lock_reaches,
            received: None,
            state_path,
            servers: Endpoints::default(),
            network: Arc::new(HostNetwork),
            config,
            order: Vec::new(),
            failed_flushes: Vec::new(),
            write_caches: Vec::new(),
            own_write_caches: Vec::new(),
            former: Former::default(),
            draining: false,
            running: false,
            served: !away,
            since: None,
            news: went.then(|| {
                "the disks were handed over before this process was started, and no lock says where they are: if the VM runs \
                 nowhere else, say `remoca migrate NAME --take-back`"
                    .into()
            }),
            told: Told::default(),
        })
    }

    /// Makes the process record that its disks came when a guest runs here: the disks may have come to a previous program of this
    /// process, which waited for the guest.
    pub fn owe_mark(&mut self) {
        self.owes_mark = self.lock_reaches;
    }

    /// Returns whether requests of the guest are executed.
    pub(super) fn serves(&self) -> bool {
        self.ownership.serves()
    }

    /// Returns whether the disks are here, and no other process is to get them. The process from which they came may be connected for as
    /// long as it runs, so that they can go back.
    pub(super) fn is_idle(&self) -> bool {
        let stays = self.is_alone() || self.ownership.is_linked() && !self.ownership.is_wanted();
        stays && self.ownership.serves()
    }

    /// Returns whether the disks are here, and no other process is connected that may get them.
    fn is_alone(&self) -> bool {
        self.connection.peer().is_none() && self.ownership.serves()
    }

    /// Returns why no other program can take over from this one now, or `None` if one can.
    pub(super) fn hinders_upgrade(&self, guests: &Guests) -> Option<&'static str> {
        if self.is_alone() {
            return None;
        }
        let has_neither = self.connection.peer().is_none() && !guests.is_connected();
        Some(if has_neither { WITHOUT_DISKS } else { MIGRATES })
    }

    /// Returns the configuration of the engine.
    pub(super) fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Keeps what a previous process left until the disks come.
    pub(super) fn keep_former(&mut self, former: Former) {
        self.former = former;
    }

    /// Registers the wake-up of the peers' threads with the poller.
    pub(super) fn register(&self, host: &Host) -> io::Result<()> {
        self.connection.register(host)
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

    /// Tells the operator why an attempt has failed. It is logged unless the attempt before it failed for the same reason.
    fn warn_of_change(&mut self, of: fn(&mut Told) -> &mut Option<String>, news: String) {
        let told = of(&mut self.told);
        if told.as_ref() != Some(&news) {
            tracing::warn!("{news}");
            *told = Some(news.clone());
        }
        self.news = Some(news);
    }

    /// Drops the index and the link to memory servers if the disks are not here: a process that waits for them has no
    /// use for either yet.
    pub(super) fn begin(&mut self, vm: &mut Vm) -> io::Result<()> {
        if self.ownership.holds() {
            return Ok(());
        }
        self.leave_servers(vm);
        vm.engine = idle_engine(&self.config)?;
        Ok(())
    }

    /// Gives up a hand-over that has not happened yet. If it has happened, gives up the connection, so that the disks can be taken
    /// back, and returns what is left to do.
    pub(super) fn abort(&mut self, vm: &mut Vm) -> Result<(), String> {
        self.connection.forget_way();
        if self.connection.peer().is_none() {
            return Err(match self.ownership.holds() {
                true => "there is nothing to abort".into(),
                false => "the disks are not here: start the guest here, or say --take-back".into(),
            });
        }
        let (is_too_late, name) = (self.ownership.has_given(), self.connection.name().to_owned());
        self.lose_peer(vm, "aborted by the operator");
        if !is_too_late {
            return Ok(());
        }
        Err(format!(
            "it is too late to abort: {name} has the disks. The connection to it is given up. If the VM runs there, leave it so; if it \
             runs nowhere else, end that process, then start the guest here, or say --take-back"
        ))
    }

    pub(super) fn take_back(&mut self, vm: &mut Vm) -> Result<(), String> {
        match self.ownership.take_back(vm.host.now()) {
            Ok(()) => {}
            Err(NotTaken::Here) => return Err("the disks are here".into()),
            Err(NotTaken::PeerIsConnected) => {
                return Err(format!(
                    "{} is connected, and may have the disks, which no lock tells: end it, or say --abort, if the VM runs nowhere else",
                    self.connection.name()
                ));
            }
            Err(NotTaken::JustConfirmed) => {
                return Err(
                    "the other process was told a moment ago that the disks are its own, and may take them within \
                            this second: end it, and say --take-back again in two seconds"
                        .into(),
                );
            }
        }
        // The other process's answer no longer matters.
        self.connection.end(vm.host.instant());
        self.do_migration(vm);
        if !self.ownership.holds() {
            return Err(self.news.clone().unwrap_or_else(|| "the disks could not be had".into()));
        }
        self.connection.forget_way();
        Ok(())
    }

    /// Handles new connections and events from the peer, each up to its limit per turn. Raises the wake-up if events
    /// from the peer may remain.
    pub(super) fn handle_events(&mut self, vm: &mut Vm) {
        self.connection.clear_wake();
        if self.connection.take_peers(vm.host.instant()) {
            vm.size.refuse_clients();
        }
        for _ in 0..HEARD_IN_A_TURN {
            let Some(heard) = self.connection.hear() else { return };
            self.hear(vm, heard);
        }
        self.connection.raise_wake();
    }

    fn hear(&mut self, vm: &mut Vm, heard: Heard) {
        match heard {
            Heard::Frame(frame) => self.hear_frame(vm, frame),
            Heard::Sent => match self.mark.as_ref().map_or(Ok(()), Mark::disks_go) {
                Ok(()) => {
                    self.ownership.handle_sent();
                    self.do_migration(vm);
                }
                Err(why) => self.keep_disks(vm, &why),
            },
            Heard::Ended(why) => self.lose_peer(vm, &why),
        }
    }

    fn hear_frame(&mut self, vm: &mut Vm, frame: PeerFrame) {
        let linked = self.ownership.is_linked();
        match frame {
            // The side that connected accepts no offers.
            PeerFrame::Offer(offer) if !linked && !self.connection.asked() => self.judge(vm, &offer),
            PeerFrame::Refused(why) => {
                let why = format!("it refuses: {why}");
                self.lose_peer(vm, &why);
            }
            PeerFrame::Message(Message::Accept) if !linked && self.connection.has_client() => self.accepted(vm),
            PeerFrame::Message(Message::Accept) if self.connection.links_again() && !self.ownership.holds() => {
                self.linked_again(vm);
            }
            PeerFrame::Message(message) if linked => {
                let was_wanted = self.ownership.is_wanted();
                self.ownership.handle_message(vm.host.now_exactly(), message);
                if !was_wanted && self.ownership.is_wanted() {
                    // The index stops where it is, for as long as the peer waits.
                    vm.size.refuse_clients();
                }
                self.do_migration(vm);
            }
            PeerFrame::State(header) if self.may_receive() => self.begin_receiving(vm, *header),
            PeerFrame::Words(bytes) if linked && !self.ownership.holds() => self.receive_words(vm, &bytes),
            PeerFrame::Alive => {}
            PeerFrame::Offer(_) | PeerFrame::Message(_) | PeerFrame::State(_) | PeerFrame::Words(_) => {
                self.lose_peer(vm, "it does not keep to the protocol");
            }
        }
    }

    fn lose_peer(&mut self, vm: &mut Vm, why: &str) {
        let Some(Lost { name, client, linked_again, came }) = self.connection.lose(vm.host.instant()) else { return };
        let news = format!("no connection to {name} any more: {why}");
        if let Some(client) = client {
            client.answer(Reply::Error { error: format!("{name}: {why}") });
        }
        let is_done = came && self.ownership.has_disks();
        if linked_again {
            self.tell_missing(&name, why);
        } else if is_done || !self.ownership.is_linked() {
            tracing::info!("{news}");
        } else {
            self.warn(news);
        }
        if self.ownership.is_linked() {
            self.ownership.handle_lost(vm.host.now());
        }
        // The disks are no longer about to come, so waiting requests are examined again.
        vm.guests.pop_again();
        self.do_migration(vm);
        // Meanwhile it had the size for what might come.
        vm.fit_index(self.is_idle());
    }

    /// Executes the actions of the ownership machine. Returns whether there were any.
    fn do_migration(&mut self, vm: &mut Vm) -> bool {
        let mut any = false;
        while let Some(action) = self.ownership.poll_action() {
            any = true;
            match action {
                Action::Drain => self.begin_drain(vm),
                Action::SendState => self.send_state(vm),
                Action::Release => self.release_disks(vm),
                Action::Send(message) => {
                    if let Some(peer) = self.connection.peer() {
                        peer.send(message);
                    }
                }
                Action::Disconnect => {
                    self.connection.end(vm.host.instant());
                    // The disks are no longer about to come, so waiting requests are examined again.
                    vm.guests.pop_again();
                }
                Action::Close => self.close_disks(vm),
                Action::Forget => {
                    self.received = None;
                    // The guest may switch its write cache off before the disks come. What it says here is known.
                    self.write_caches.clear();
                }
                Action::Lock => self.lock_disks(vm),
                Action::Serve { warm } => {
                    self.connection.end_search();
                    self.serve_disks(vm, warm);
                }
                Action::TellStuck => self.warn(
                    "the guest waits for its disks: the process that has them is out of reach, and the lock of a block device or \
                     an NBD export does not reach other hosts. Make sure that the VM runs nowhere else and end that process, then say \
                     `remoca migrate NAME --take-back`"
                        .into(),
                ),
            }
        }
        // Requests that arrived in the meantime have consumed their event, so the queues are examined again.
        let serves = self.serves();
        if serves && !self.served {
            vm.guests.pop_again();
        }
        self.served = serves;
        if any {
            // The guest may have connected before its disks came.
            vm.fit_index(self.is_idle());
        }
        any
    }

    /// Follows the guest's queues and a drain at the end of a turn. Returns whether that led to any action.
    pub(super) fn advance(&mut self, vm: &mut Vm) -> bool {
        if self.owes_mark && vm.guests.is_running() {
            self.owes_mark = false;
            self.mark_that_disks_came();
        }
        if self.is_alone() {
            return false;
        }
        self.follow_queues(vm);
        // Actions come first: a drain that was called off must not count as the one that is to make the disks durable now.
        let any = self.do_migration(vm);
        let idle = vm.in_flight.is_empty() && vm.guests.disks().iter().all(|disk| disk.store.in_flight() == 0);
        if self.draining && !vm.in_flight.is_flushing_for_hand_over() && idle {
            self.draining = false;
            self.ownership.handle_drained(vm.guests.wrote());
        }
        self.do_migration(vm) || any
    }

    /// Returns whether the process that has the disks is about to hand them over: the guest runs here, and that process
    /// has been told.
    pub(super) fn disks_come(&self, guests: &Guests) -> bool {
        self.ownership.is_linked() && guests.is_running()
    }

    fn follow_queues(&mut self, vm: &mut Vm) {
        let running = vm.guests.is_running();
        if running != self.running {
            self.running = running;
            self.ownership.handle_queues(vm.host.now(), running);
            if running && self.serves() {
                self.connection.stop_sending();
            }
        }
    }

    /// Returns the time until [`Self::run_timers`] has something to do, or `None` if nothing is expected.
    pub(super) fn time_left(&self, vm: &Vm) -> Option<Duration> {
        let Self { ownership, connection, .. } = self;
        let machine = ownership.next_deadline().map(|at| Duration::from_nanos(at.since_ns(vm.host.now())));
        let (offer, link) =
            (connection.offer_left(ownership, &vm.host), connection.link_again_left(ownership, &vm.host));
        [machine, offer, link].into_iter().flatten().min()
    }

    /// Returns the time since the guest's queues had stopped, or since this process started to lock the disks.
    fn pause(&self, vm: &Vm) -> Duration {
        self.since.map_or(Duration::ZERO, |since| vm.host.time_since(since))
    }

    /// Handles the timers that are due.
    pub(super) fn run_timers(&mut self, vm: &mut Vm) {
        if self.connection.offer_left(&self.ownership, &vm.host) == Some(Duration::ZERO) {
            self.lose_peer(vm, "it says nothing: is it a VM process that was started with --incoming?");
        }
        if self.connection.link_again_left(&self.ownership, &vm.host) == Some(Duration::ZERO) {
            self.link_again(vm);
        }
        if self.ownership.next_deadline().is_some_and(|at| at <= vm.host.now()) {
            self.ownership.handle_timer(vm.host.now());
            self.do_migration(vm);
        }
    }

    /// Returns the status of migration for the operator, or `None` if there is nothing to report.
    pub(super) fn status(&self) -> Option<MigrationStatus> {
        self.connection.status(self.ownership.has_disks(), self.news.as_ref())
    }
}

/// Returns an engine that caches nothing, for a process without disks.
fn idle_engine(config: &EngineConfig) -> io::Result<DiskEngine<IndexMemory>> {
    let idle = EngineConfig { cache: PageCount(0), local: PageCount(0), guest_memory: PageCount(0), ..*config };
    Ok(DiskEngine::new(&idle, IndexMemory::new(layout(&idle).words())?))
}
