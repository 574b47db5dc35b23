//! The disks go: they are offered, made durable, told about, and let go of.

use super::{LINK_AGAIN_AFTER, Migration, idle_engine};
use crate::control::Request;
use crate::driver::Driver;
use remoca_protocol::control::{Reply, Secret};

use crate::driver::requests::{Origin, Pending};
use crate::link::ServerLink;
use crate::migration::{Offer, StateHeader};
use remoca_core::engine::GuestOp;
use remoca_core::migration::Message;
use remoca_core::units::{DiskIndex, PageCount};
use remoca_io::address::Endpoint;
use remoca_store::VacantStore;
use std::io;
use std::sync::Arc;
use std::time::Duration;

impl Driver {
    /// Offers the disks to another process, as the operator commands.
    pub(in crate::driver) fn migrate(&mut self, to: &str, key: &Secret, client: Request) {
        match self.offer(to, key) {
            Ok(()) => self.migration.client = Some(client),
            Err(error) => client.answer(Reply::Error { error }),
        }
    }

    fn offer(&mut self, to: &str, key: &Secret) -> Result<(), String> {
        let endpoint: Endpoint = to.parse()?;
        if !self.migration.ownership.serves() {
            return Err("this process does not have the disks".into());
        }
        if self.is_draining() {
            return Err("an upgrade is under way".into());
        }
        if self.migration.peer.is_some() {
            return Err(format!("it is handing over to {}: --abort that first", self.migration.peer_name));
        }
        if let Some(disk) =
            self.disks.iter().zip(self.failed_flushes()).find_map(|(disk, failed)| failed.and(Some(disk)))
        {
            return Err(format!(
                "{}: a flush of this disk has failed, so writes may be lost, and the guest must hear of it: it is not handed over. \
                 Stop the guest, mend the image, and say `remoca set {} --clear-failed-flush {}`",
                disk.name, self.name, disk.name
            ));
        }
        let offer = self.own_offer()?;
        self.connect(endpoint, key, &offer).map_err(|error| error.to_string())
    }

    fn connect(&mut self, endpoint: Endpoint, key: &Secret, offer: &Offer) -> io::Result<()> {
        let peer = self.migration.peers.connect(endpoint.clone(), key, self.migration.wake_up.wake())?;
        peer.offer(offer);
        self.migration.peer_name = endpoint.to_string();
        self.index_size.refuse_clients();
        self.migration.peer = Some(peer);
        self.migration.peer_since = Some(self.clock.now());
        self.migration.links_again = offer.returns;
        self.migration.way = Some((endpoint, key.clone()));
        Ok(())
    }

    /// Returns whether the connection is one that this side made.
    pub(super) fn asked(&self) -> bool {
        self.migration.client.is_some() || self.migration.links_again
    }

    /// Returns the time until the next attempt to reach the process that has our disks; `None` if there is nothing to
    /// attempt.
    pub(super) fn link_again_left(&self) -> Option<Duration> {
        let Migration { peer, ownership, way, link_again_after, .. } = &self.migration;
        let is_due = peer.is_none() && !ownership.holds() && way.is_some();
        is_due.then(|| link_again_after.saturating_sub(self.time_of_peer()))
    }

    pub(super) fn link_again(&mut self) {
        let after = self.migration.link_again_after;
        self.migration.link_again_after = LINK_AGAIN_AFTER.1.min(after * 2);
        self.migration.peer_since = Some(self.clock.now());
        let Some((endpoint, key)) = self.migration.way.clone() else { return };
        let linked = self
            .own_offer()
            .map_err(io::Error::other)
            .and_then(|offer| self.connect(endpoint, &key, &Offer { returns: true, ..offer }));
        if let Err(error) = linked {
            tracing::warn!("cannot look for the process that has the disks: {error}");
        }
    }

    /// Tells the process that has our disks, which is there again, when the guest continues here.
    pub(super) fn linked_again(&mut self) {
        self.migration.link_again_after = LINK_AGAIN_AFTER.0;
        self.migration.links_again = false;
        let news = format!("connected again with {}, which has the disks", self.migration.peer_name);
        self.migration.tell(news);
        self.follow_queues();
        self.migration.ownership.handle_linked(self.now);
        self.do_migration();
    }

    /// Says once, and not at each attempt, what became of the process that had our disks.
    pub(super) fn tell_missing(&mut self, name: &str, why: &str) {
        let news = format!("{name} is to have the disks, and cannot be asked for them: {why}");
        if !self.migration.ownership.holds() && self.migration.news.as_ref() != Some(&news) {
            self.migration.warn(news);
        }
    }

    fn failed_flushes(&self) -> Vec<Option<i32>> {
        (0..).take(self.disks.len()).map(|disk| self.engine.index().flush_failed(DiskIndex(disk))).collect()
    }

    pub(super) fn accepted(&mut self) {
        let news = format!("the disks go to {} when the guest stops", self.migration.peer_name);
        self.migration.tell(news);
        if let Some(client) = self.migration.client.take() {
            client.answer(Reply::Status(Box::new(self.snapshot())));
        }
        self.follow_queues();
        self.migration.link_again_after = LINK_AGAIN_AFTER.0;
        self.migration.ownership.handle_linked(self.now);
        self.migration.ownership.handle_message(self.now, Message::Accept);
        self.do_migration();
    }

    /// Returns whether disks are still on their way, for a process that is to end. Once the last word is sent the peer hears
    /// that no more comes, and ends the connection when it has everything.
    pub(in crate::driver) fn ends_hand_over(&mut self) -> bool {
        let Migration { ownership, peer: Some(peer), .. } = &mut self.migration else { return false };
        if !ownership.is_linked() {
            return false;
        }
        if !ownership.holds() {
            peer.say_no_more();
        }
        ownership.is_leaving() || !ownership.holds()
    }

    pub(super) fn begin_drain(&mut self) {
        self.migration.draining = true;
        self.migration.since = Some(self.clock.now());
        for disk in (0..).take(self.disks.len()) {
            if self.disks[usize::from(disk)].frontend.is_read_only() {
                continue;
            }
            self.migration.flushes += 1;
            let (op, origin) = (GuestOp::Flush, Origin::HandOver);
            let pending = Pending { disk, op, issued: self.now, buffer: None, delivered: false, origin };
            let id = self.requests.insert(pending);
            self.engine.handle_request(self.now, id, DiskIndex(disk), op);
            self.execute();
        }
    }

    /// Sends the state. A failed flush is told even if the index stays.
    pub(super) fn send_state(&mut self) {
        self.migration.failed_flushes = self.failed_flushes();
        let words = self.migration.ownership.gives_index().then(|| self.engine.index().words().to_vec());
        let words = Arc::new(words.unwrap_or_default());
        let config = &self.migration.config;
        self.migration.write_caches = self.disks.iter().map(|disk| disk.frontend.write_cache()).collect();
        let header = StateHeader {
            key: config.key,
            seed: config.seed,
            words: words.len() as u64,
            cache_pages: self.cache.0,
            enabled: self.engine.status().enabled,
            servers: self.link.as_ref().map(ServerLink::roster).unwrap_or_default(),
            stamps: self.disks.iter().map(|disk| disk.store.shared_stamp(false)).collect(),
            failed_flushes: self.migration.failed_flushes.clone(),
            write_caches: self.migration.write_caches.clone(),
        };
        if let Some(peer) = &self.migration.peer {
            peer.send_state(&header, words);
        }
    }

    pub(super) fn release_disks(&mut self) {
        self.warmth.abandon();
        self.migration.owes_mark = false;
        if let Some(mark) = &self.migration.mark {
            mark.disks_went();
        }
        self.disks.iter_mut().for_each(|disk| disk.frontend.forget_write_cache());
        self.leave_servers();
        self.migration.config.cache = if self.engine.status().enabled { self.cache } else { PageCount(0) };
        let vacated = self.vacate().and_then(|()| idle_engine(&self.migration.config));
        match vacated {
            Ok(engine) => self.change_engine(engine),
            // Nothing is taken from the guest any more, so whatever is left open does no harm but keep its lock.
            Err(error) => {
                tracing::error!("no descriptors or memory left: {error}");
                for disk in (0..).take(self.disks.len()) {
                    self.engine.handle_content_uncertain(DiskIndex(disk));
                }
            }
        }
        let pause = self.pause();
        self.migration.tell(format!(
            "handed the disks over to {}, {} ms after the guest had stopped",
            self.migration.peer_name,
            pause.as_millis()
        ));
    }

    fn vacate(&mut self) -> io::Result<()> {
        for disk in &mut self.disks {
            let vacant = VacantStore::new(disk.store.geometry())?;
            self.poller.remove(disk.store.event_fd());
            // It never has news.
            disk.store = Box::new(vacant);
        }
        Ok(())
    }

    /// Leaves the memory servers without a word: the pool is the next owner's.
    pub(super) fn leave_servers(&mut self) {
        if let Some(link) = self.link.take() {
            if let Some(socket) = link.socket_fd() {
                self.poller.remove(socket);
            }
            self.poller.remove(link.wake_fd());
            self.migration.network = link.network();
            self.migration.servers = link.servers().iter().map(|server| server.endpoint.clone()).collect();
        }
        self.receive_again = false;
    }
}
