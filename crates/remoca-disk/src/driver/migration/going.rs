//! The disks leave this process: they are offered and flushed, their state is sent, and they are released.

use super::{Migration, idle_engine};
use crate::driver::TierSizes;
use crate::driver::snapshot::snapshot;
use crate::driver::vm::Vm;
use crate::link::ServerLink;
use crate::migration::Mark;
use remoca_core::migration::Message;
use remoca_io::address::Endpoint;
use remoca_io::control::ControlRequest;
use remoca_protocol::control::Reply;
use remoca_protocol::control::Secret;
use remoca_protocol::peer::{Offer, OfferedDisk, StateHeader, VERSION};
use remoca_store::VacantStore;
use std::io;

impl Migration {
    /// Offers the disks to another process, at the operator's command. `client` is answered when that process has
    /// answered, or at once if an offer is not possible. `is_draining`: no new requests are accepted from guests.
    pub(in crate::driver) fn migrate(
        &mut self,
        vm: &mut Vm,
        to: &str,
        key: &Secret,
        client: ControlRequest,
        is_draining: bool,
    ) {
        match self.offer(vm, to, key, is_draining) {
            Ok(()) => self.connection.keep_client(client),
            Err(error) => client.answer(Reply::Error { error }),
        }
    }

    fn offer(&mut self, vm: &mut Vm, to: &str, key: &Secret, is_draining: bool) -> Result<(), String> {
        let endpoint = Endpoint::of_process(to)?;
        if !self.ownership.serves() {
            return Err("this process does not have the disks".into());
        }
        if is_draining {
            return Err("an upgrade is under way".into());
        }
        if self.connection.peer().is_some() {
            let name = self.connection.name();
            return Err(match self.connection.came() {
                true => format!("{name} is connected, so that the disks can go back to it: end that process first"),
                false => format!("it is handing over to {name}: --abort that first"),
            });
        }
        if let Some(disk) =
            vm.guests.disks().iter().zip(failed_flushes(vm)).find_map(|(disk, failed)| failed.and(Some(disk)))
        {
            return Err(format!(
                "{}: a flush of this disk has failed, so writes may be lost, and the guest must hear of it: it is not handed over. \
                 Stop the guest, mend the image, and say `remoca set {} --clear-failed-flush {}`",
                disk.name, vm.name, disk.name
            ));
        }
        if has_removed_failures(vm) {
            return Err(format!(
                "a flush of an image has failed that is no disk any more, and no other process would know it: if it comes back there, \
                 its guest must hear of it. Add the disk again, and do as docs/failures.md says; or, if the image is gone or sound, say \
                 `remoca set {} --clear-removed-flushes`",
                vm.name
            ));
        }
        self.prepare_mark()?;
        let offer = self.own_offer(vm)?;
        self.connect(vm, endpoint, key, &offer).map_err(|error| error.to_string())
    }

    /// Returns the offer of this process. All of its disks must be attached by vhost-user, whose queues say when a
    /// guest has stopped.
    pub(super) fn own_offer(&self, vm: &Vm) -> Result<Offer, String> {
        let disks = vm.guests.disks().iter().map(|disk| match disk.frontend.sector_to_hand_over() {
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
            name: vm.name.clone(),
            disks: disks.collect::<Result<_, String>>()?,
            has_port: vm.guests.port().get().is_some(),
            lock_reaches: self.lock_reaches,
            words: vm.engine.index().words().len() as u64,
            returns: false,
        })
    }

    /// Makes sure that the disks can go from here: without its mark, a process that is started again would be a second owner.
    pub(super) fn prepare_mark(&self) -> Result<(), String> {
        self.mark.as_ref().map_or(Ok(()), Mark::prepare)
    }

    fn connect(&mut self, vm: &mut Vm, endpoint: Endpoint, key: &Secret, offer: &Offer) -> io::Result<()> {
        self.connection.connect(endpoint, key, offer, vm.host.instant())?;
        self.order.clear();
        vm.size.refuse_clients();
        Ok(())
    }

    pub(super) fn link_again(&mut self, vm: &mut Vm) {
        let Some((endpoint, key)) = self.connection.begin_attempt(vm.host.instant()) else { return };
        let linked = self
            .own_offer(vm)
            .map_err(io::Error::other)
            .and_then(|offer| self.connect(vm, endpoint, &key, &Offer { returns: true, ..offer }));
        if let Err(error) = linked {
            tracing::warn!("cannot look for the process that has the disks: {error}");
        }
    }

    /// Resumes the link with the process that has our disks, after its answer. That process is then told when the guest
    /// continues here.
    pub(super) fn linked_again(&mut self, vm: &mut Vm) {
        self.connection.note_answer();
        let news = format!("connected again with {}, which has the disks", self.connection.name());
        self.tell(news);
        self.told.unasked = None;
        self.ownership.handle_linked(vm.host.now());
        self.follow_queues(vm);
        self.do_migration(vm);
    }

    /// Reports once, and not at each attempt, why the process that has our disks cannot be asked for them.
    pub(super) fn tell_missing(&mut self, name: &str, why: &str) {
        if !self.ownership.holds() {
            let news = format!("{name} is to have the disks, and cannot be asked for them: {why}");
            self.warn_of_change(|told| &mut told.unasked, news);
        }
    }

    pub(super) fn accepted(&mut self, vm: &mut Vm) {
        let news = format!("the disks go to {} when the guest stops", self.connection.name());
        self.tell(news);
        if let Some(client) = self.connection.take_client() {
            client.answer(Reply::Status(Box::new(snapshot(vm, self.status()))));
        }
        self.follow_queues(vm);
        self.connection.note_answer();
        self.ownership.handle_linked(vm.host.now());
        self.ownership.handle_message(vm.host.now(), Message::Accept);
        self.do_migration(vm);
    }

    /// Returns whether disks are still on their way, for a process that is to end. Once the disks are released, and the peer was told what
    /// it asks then, it is told that nothing more comes. It then ends the connection when it has received everything.
    pub(in crate::driver) fn ends_hand_over(&mut self) -> bool {
        let Self { ownership, connection, .. } = self;
        if connection.peer().is_none() || !ownership.is_linked() {
            return false;
        }
        if !ownership.holds() && !ownership.owes_word() {
            connection.say_no_more();
        }
        ownership.is_leaving() || !ownership.holds()
    }

    pub(super) fn begin_drain(&mut self, vm: &mut Vm) {
        self.draining = true;
        self.since = Some(vm.host.instant());
        vm.flush_for_hand_over();
    }

    /// Returns the positions of the disks here, in the order of the offer.
    pub(super) fn offered_order(&self, vm: &Vm) -> Vec<usize> {
        let own = 0..vm.guests.disks().len();
        if self.order.is_empty() { own.collect() } else { self.order.clone() }
    }

    /// Sends the state of the disks to the peer. Failed flushes are sent even if the index stays.
    pub(super) fn send_state(&mut self, vm: &mut Vm) {
        self.failed_flushes = failed_flushes(vm);
        let index = self.ownership.gives_index().then(|| {
            let head = vm.engine.closed_head();
            let rest = vm.engine.index().words().lend(head.len());
            (head, rest)
        });
        let config = &self.config;
        let own = vm.guests.disks().iter().map(|disk| (disk.frontend.write_cache(), disk.frontend.attachment()));
        self.own_write_caches = own.collect();
        self.write_caches = self.own_write_caches.iter().map(|(is_on, _)| *is_on).collect();
        let order = self.offered_order(vm);
        let header = StateHeader {
            key: config.key,
            seed: config.seed,
            words: index.as_ref().map_or(0, |_| vm.engine.index().words().len() as u64),
            cache_pages: vm.size.tiers().cache.0,
            enabled: vm.engine.status().enabled,
            servers: vm.servers.link().map(ServerLink::roster).unwrap_or_default(),
            numbers: order.iter().map(|at| vm.guests.disks()[*at].number.0).collect(),
            stamps: order.iter().map(|at| vm.guests.disks()[*at].store.shared_stamp(false)).collect(),
            failed_flushes: order.iter().map(|at| self.failed_flushes[*at]).collect(),
            write_caches: order.iter().map(|at| self.write_caches[*at]).collect(),
        };
        self.connection.send_state(&header, index);
    }

    /// Gives up a hand-over for which everything is sent, and keeps the disks. The peer is told `why`.
    pub(super) fn keep_disks(&mut self, vm: &mut Vm, why: &str) {
        self.warn(format!("the disks stay here: {why}"));
        if let Some(peer) = self.connection.peer() {
            peer.refuse(why);
        }
        self.connection.end_politely();
        self.ownership.handle_lost(vm.host.now());
        self.do_migration(vm);
        vm.fit_index(self.is_idle());
    }

    pub(super) fn release_disks(&mut self, vm: &mut Vm) {
        vm.warmth.abandon();
        self.owes_mark = false;
        vm.guests.disks_mut().iter_mut().for_each(|disk| disk.frontend.forget_write_cache());
        self.leave_servers(vm);
        let sizes = if vm.engine.status().enabled { vm.size.tiers() } else { TierSizes::default() };
        (self.config.cache, self.config.local) = (sizes.cache, sizes.local);
        let vacated = vacate(vm).and_then(|()| idle_engine(&self.config));
        match vacated {
            Ok(engine) => vm.change_engine(engine),
            // No more requests are accepted from the guest, so an image that is left open does no harm except that it
            // stays locked.
            Err(error) => {
                tracing::error!("no descriptors or memory left: {error}");
                let Vm { guests, engine, .. } = vm;
                guests.disks().iter().for_each(|disk| engine.handle_content_uncertain(disk.number));
            }
        }
        let pause = self.pause(vm);
        self.tell(format!(
            "handed the disks over to {}, {} ms after the guest had stopped",
            self.connection.name(),
            pause.as_millis()
        ));
    }

    /// Closes images that were opened, and that nobody was served from.
    pub(super) fn close_disks(&mut self, vm: &mut Vm) {
        if let Err(error) = vacate(vm) {
            tracing::error!("the images stay open: no descriptors left: {error}");
        }
    }

    /// Leaves the memory servers without a goodbye: the pool belongs to the next owner.
    pub(super) fn leave_servers(&mut self, vm: &mut Vm) {
        if let Some(link) = vm.servers.detach(&vm.host) {
            self.network = link.network();
            self.servers = link.endpoints();
        }
    }
}

fn failed_flushes(vm: &Vm) -> Vec<Option<i32>> {
    vm.guests.disks().iter().map(|disk| vm.engine.index().flush_failed(disk.number)).collect()
}

/// Returns whether a flush of an image has failed that is none of the disks. Its record has the device and inode of the image, by
/// which another host does not know it.
fn has_removed_failures(vm: &Vm) -> bool {
    let is_here = |number| vm.guests.disks().iter().any(|disk| disk.number == number);
    let index = vm.engine.index();
    index.disks().any(|number| index.flush_failed(number).is_some() && !is_here(number))
}

/// Replaces the stores of all disks with vacant stores.
fn vacate(vm: &mut Vm) -> io::Result<()> {
    let Vm { guests, host, .. } = vm;
    for disk in guests.disks_mut() {
        let vacant = VacantStore::new(disk.store.geometry())?;
        host.unwatch(disk.store.event_fd());
        // A vacant store has no events to watch for.
        disk.store = Box::new(vacant);
    }
    Ok(())
}
