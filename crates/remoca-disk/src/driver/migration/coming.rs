//! The disks come to this process: an offer is judged, an index received, the images are locked, and the guest is served.

use super::{Migration, Told};
use crate::driver::TierSizes;
use crate::driver::disk::Disk;
use crate::driver::poller::Source;
use crate::driver::vm::Vm;
use crate::driver::warmth::contents;
use crate::link::ServerLink;
use crate::migration::{IndexRoom, Receipt};
use crate::state::StateFile;
use remoca_core::engine::{DiskEngine, EngineConfig, Leaving, layout};
use remoca_core::index::{DISK_BYTES_MAX, Origin};
use remoca_core::migration::{Locked, Message};
use remoca_core::units::{DiskIndex, PageCount};
use remoca_frontend::vhost::Attachment;
use remoca_io::lock::ImageLock;
use remoca_io::show::show_size;
use remoca_io::sizes;
use remoca_io::words::IndexMemory;
use remoca_protocol::peer::{Offer, OfferedDisk, Server, StateHeader};
use remoca_store::{OpenError, OpenErrorKind};
use std::sync::Arc;
use std::time::Duration;

/// Lock of an image that another process may have for long: there is another attempt later.
const AT_ONCE: ImageLock = ImageLock::Required { wait: Duration::ZERO };

/// The parts with which the disks are served.
struct Served {
    engine: DiskEngine<IndexMemory>,
    state: Option<StateFile>,
    link: Option<ServerLink>,
}

impl Migration {
    /// Judges an offer, and accepts or refuses it. It must describe the disks for which this process was started, or
    /// come from the same source after a connection that broke.
    pub(super) fn judge(&mut self, vm: &mut Vm, offer: &Offer) {
        let holds = self.ownership.holds();
        let verdict = match (offer.returns, holds) {
            (false, true) => Err("the target has its disks already".into()),
            (true, false) => Err(
                "the target does not have the disks: they went on, or it was started again. If the VM runs nowhere \
                     else, say `remoca migrate NAME --take-back`"
                    .into(),
            ),
            _ => self.own_offer(vm).and_then(|own| fits(offer, &own)),
        };
        let verdict = verdict.and_then(|order| {
            self.prepare_mark()?;
            let words = sizes::in_memory(offer.words.min(vm.size.words_max(&self.config)));
            IndexMemory::new(words).map(|_| order).map_err(|error| format!("no memory for the index: {error}"))
        });
        let Some(peer) = self.connection.peer() else { return };
        match verdict {
            Ok(order) => {
                self.order = order;
                peer.send(Message::Accept);
                self.tell(match holds {
                    true => "the source is connected again".into(),
                    false => format!("waiting for the disks of {}", offer.name),
                });
                // A guest that runs since this turn is to ask the peer, and not to try the lock that the peer has.
                self.ownership.handle_linked(vm.host.now());
                self.follow_queues(vm);
                self.do_migration(vm);
                // What was made for the index since the source connected was given back.
                vm.fit_index(self.is_idle());
            }
            Err(why) => {
                peer.refuse(&why);
                self.warn(format!("refused to take over {}: {why}", offer.name));
                self.connection.end_politely();
            }
        }
    }

    /// Records in the mark that the disks came. Until a guest runs with them here, the source's may continue, and a
    /// successor of this process must not lock them.
    pub(super) fn mark_that_disks_came(&self) {
        if let Some(mark) = &self.mark {
            mark.disks_came();
        }
    }

    pub(super) fn begin_receiving(&mut self, vm: &mut Vm, header: StateHeader) {
        let header = in_own_order(header, &self.offered_order(vm));
        self.ownership.handle_alive();
        let words_max = vm.size.words_max(&self.config);
        if header.words > words_max {
            tracing::warn!(
                "an index of {} would come, and that of this process has at most {}, so the cache starts cold: start it \
                 with the same --cache and --guest-memory-max",
                show_size(header.words.saturating_mul(4)),
                show_size(words_max.saturating_mul(4))
            );
        }
        self.failed_flushes.clone_from(&header.failed_flushes);
        self.write_caches.clone_from(&header.write_caches);
        // What came of a hand-over that was called off may have a file where this index is to have one.
        self.received = None;
        self.received = Some(Receipt::begin(header, words_max, |words| self.index_room(words)));
    }

    /// Returns memory for an index that is to be received, or `None` if there is none. In a state file none of it is
    /// reserved yet.
    fn index_room(&self, words: usize) -> Option<IndexRoom> {
        if let Some(path) = &self.state_path {
            match StateFile::create_late(path, self.config.disks, words) {
                Ok((state, words)) => return Some(IndexRoom { words, state: Some(state) }),
                Err(error) => tracing::warn!("{error}"),
            }
        }
        match IndexMemory::new(words) {
            Ok(words) => Some(IndexRoom { words, state: None }),
            Err(error) => {
                tracing::warn!("no memory for the index, so no cache: {error}");
                None
            }
        }
    }

    /// Returns whether an index may be received: only before this process has the disks.
    pub(super) fn may_receive(&self) -> bool {
        self.ownership.is_linked() && !self.ownership.holds()
    }

    pub(super) fn receive_words(&mut self, vm: &mut Vm, bytes: &[u8]) {
        self.ownership.handle_alive();
        let Some(received) = &mut self.received else {
            return self.lose_peer(vm, "it sends an index without its header");
        };
        if let Err(why) = received.take(bytes) {
            self.lose_peer(vm, why);
        }
    }

    /// Opens and locks all images, or none of them, and reports the outcome to the ownership machine.
    pub(super) fn lock_disks(&mut self, vm: &mut Vm) {
        self.since = Some(vm.host.instant());
        // A thread of a peer that gave them may have an image open for a moment longer. Any other attempt is made again later, and front
        // ends and the operator have their answers meanwhile.
        let lock = if self.ownership.was_given() { ImageLock::default() } else { AT_ONCE };
        let locked = match self.open_disks(vm, lock) {
            Ok(unchanged) => match unchanged {
                true => Locked::Unchanged,
                false => Locked::Changed,
            },
            Err(why) => {
                self.warn_of_change(|told| &mut told.unopened, why);
                self.received = None;
                Locked::InUse
            }
        };
        // The pause until the next attempt begins here, however long this one took.
        vm.host.update();
        self.ownership.handle_locked(vm.host.now(), locked);
    }

    /// Opens and locks the images. Returns whether they are the ones that the received index describes.
    ///
    /// # Errors
    /// If an image cannot be opened or locked; the text says what to do.
    fn open_disks(&mut self, vm: &mut Vm, lock: ImageLock) -> Result<bool, String> {
        let mut stores = Vec::new();
        for disk in vm.guests.disks() {
            stores.push((disk.open)(lock).map_err(|error| explain(&error, &disk.image))?);
        }
        let stamps: Vec<_> = stores.iter().map(|store| store.shared_stamp(true)).collect();
        let sent = self.received.iter().flat_map(|received| &received.header.stamps);
        for (disk, (sent, found)) in vm.guests.disks().iter().zip(sent.zip(&stamps)) {
            if is_another_file(sent.as_deref(), found.as_deref()) {
                tracing::warn!(
                    "{}: {} is another file than the one that the other process had. If that is not intended, stop the VM before it writes",
                    disk.name,
                    disk.image
                );
            }
        }
        for (store, index) in stores.iter().zip(0..) {
            if let Err(error) = vm.host.watch(store.event_fd(), Source::Store(index)) {
                stores[..usize::from(index)].iter().for_each(|store| vm.host.unwatch(store.event_fd()));
                return Err(format!("the disks cannot be opened: they cannot be watched: {error}"));
            }
        }
        for (disk, store) in vm.guests.disks_mut().iter_mut().zip(stores) {
            vm.host.unwatch(disk.store.event_fd());
            disk.store = store;
        }
        // An image may have become larger or smaller since its size was told.
        for number in 0..vm.guests.disks().len() {
            let disk = vm.guests.disk_mut(number);
            let bytes = disk.store.geometry().size.min(DISK_BYTES_MAX);
            disk.frontend.resize(bytes);
            vm.guests.resize_export(number, bytes);
        }
        let received = self.received.as_ref().filter(|received| received.is_whole());
        Ok(received.is_some_and(|received| are_the_same(&received.header.stamps, &stamps)))
    }

    pub(super) fn serve_disks(&mut self, vm: &mut Vm, warm: bool) {
        let received = self.received.take();
        if let Some(received) = &received {
            self.follow_settings(vm, &received.header);
        }
        let servers = received.as_ref().map(|received| received.header.servers.clone()).unwrap_or_default();
        let resumed = received.filter(|_| warm).and_then(|received| self.resume(received, vm.guests.disks()));
        let is_warm = resumed.is_some();
        let mut state = None;
        if let Some(served) = resumed.or_else(|| self.start_cold(&servers)) {
            vm.change_engine(served.engine);
            vm.servers.attach(served.link);
            state = served.state;
        }
        if let Err(error) = vm.servers.register(&vm.host) {
            tracing::error!("cannot watch the server link: {error}");
            vm.servers.attach(None);
        }
        vm.describe_disks();
        // What came is believed while a guest is here. Who was here before is no matter.
        vm.guests.disks_mut().iter_mut().for_each(|disk| disk.has_lost_guest = !disk.frontend.is_connected());
        let former = std::mem::take(&mut self.former);
        vm.inherit_failed_flushes(&former);
        let is_assumed = self.inherit_write_caches(vm);
        for (disk, failed) in vm.guests.disks_mut().iter_mut().zip(&self.failed_flushes) {
            if let Some(errno) = failed.filter(|errno| (1..4096).contains(errno)) {
                vm.engine.set_failed_flush(disk.number, Some(errno));
                disk.store.set_failed_flush(Some(errno));
            }
        }
        if let Some(state) = state {
            vm.keep_in(state, &former, &self.config);
            vm.curves.keep_beside(vm.warmth.path());
        }
        vm.tell_servers(Leaving::AtOnce);
        self.owes_mark = self.lock_reaches && !vm.guests.is_running();
        if !self.owes_mark {
            self.mark_that_disks_came();
        }
        vm.guests.forget_writes();
        self.told = Told::default();
        vm.warmth.note_arrival(is_warm);
        let (how, pause) = (if is_warm { "warm" } else { "cold" }, self.pause(vm));
        let caution = match is_assumed {
            true => "; its write cache may be off, so each write is made durable until the guest switches it",
            false => "",
        };
        self.tell(format!("has the disks, {how}, after {} ms{caution}", pause.as_millis()));
    }

    /// Sets the write cache of each disk to what the former owner said, or to what the guest has that stayed connected. Where neither is known it is
    /// off, because a guest that has switched it off sends no flushes. Returns whether that was assumed of a disk.
    fn inherit_write_caches(&mut self, vm: &mut Vm) -> bool {
        let (told, own) = (std::mem::take(&mut self.write_caches), std::mem::take(&mut self.own_write_caches));
        // A guest that goes on over the connection that it had then said nothing to another process.
        let goes_on = vm.guests.is_running();
        let lasts = |attachment: &Option<Attachment>| goes_on && attachment.as_ref().is_some_and(Attachment::lasts);
        let stayed = |at: usize| own.get(at).filter(|(_, attachment)| lasts(attachment)).map(|(is_on, _)| *is_on);
        let mut is_assumed = false;
        for (at, disk) in vm.guests.disks_mut().iter_mut().enumerate() {
            match told.get(at).copied().or_else(|| stayed(at)) {
                Some(is_on) => disk.frontend.inherit_write_cache(is_on),
                None => {
                    let was_off = !disk.frontend.write_cache();
                    disk.frontend.assume_no_write_cache();
                    if was_off {
                        // The guest may have had its answer while there was no disk. What the former owner completed may not be durable.
                        disk.frontend.flush_first();
                    }
                    is_assumed |= !disk.frontend.write_cache();
                }
            }
        }
        is_assumed
    }

    fn resume(&mut self, received: Receipt, disks: &[Disk]) -> Option<Served> {
        let Receipt { header, room, .. } = received;
        let IndexRoom { words, state } = room?;
        let config = EngineConfig { key: header.key, seed: header.seed, ..self.config };
        let numbers: Vec<_> =
            header.numbers.iter().map(|there| DiskIndex(*there)).zip(disks.iter().map(|disk| disk.number)).collect();
        let engine = match DiskEngine::resume(&config, words, Origin::Peer(&numbers)) {
            Ok(engine) => {
                tracing::info!("what came of the cache: {}", contents(&engine));
                engine
            }
            Err(unusable) => {
                tracing::warn!("the index that came cannot be used: {}", unusable.reason);
                return None;
            }
        };
        let link = match self.servers.are_none() {
            true => None,
            false => {
                let network = Arc::clone(&self.network);
                Some(ServerLink::resume(network, &self.servers, &header.servers).ok()?)
            }
        };
        self.config = config;
        Some(Served { engine, state, link })
    }

    /// Adopts the size of the cache that the operator set at the other process, and whether it is on. This does not
    /// depend on whether the index is usable.
    fn follow_settings(&mut self, vm: &mut Vm, header: &StateHeader) {
        let cache = PageCount(header.cache_pages);
        if cache == PageCount(0) {
            // The other process had no memory servers, and so no settings.
            return;
        }
        // The local tier is that of this host, and without other servers it is alone.
        let own = vm.size.tiers();
        let sizes = if self.servers.listed.is_empty() { own } else { TierSizes { cache, ..own } };
        let on = if header.enabled { sizes } else { TierSizes::default() };
        let config = EngineConfig { cache: on.cache, local: on.local, ..self.config };
        if self.servers.are_none() || layout(&config).words() as u64 > vm.size.words_max(&self.config) {
            return;
        }
        self.config = config;
        vm.size.set_tiers(sizes);
    }

    /// Returns the parts for an empty cache. Returns `None` if there is no memory for an index: the idle engine then stays. The pools that
    /// the former owner left at `servers` are taken over without their pages, so that they do not keep their memory from this process.
    fn start_cold(&mut self, servers: &[Server]) -> Option<Served> {
        let config = self.config;
        let IndexRoom { mut words, mut state } = self.index_room(layout(&config).words())?;
        if let Some(Err(error)) = state.as_ref().map(|state| state.reserve(0..words.len() as u64)) {
            tracing::warn!("{error}");
            (words, state) = (IndexMemory::new(words.len()).ok()?, None);
        }
        let link = match self.servers.are_none() {
            true => None,
            false => ServerLink::resume(Arc::clone(&self.network), &self.servers, servers)
                .inspect_err(|error| tracing::warn!("cannot start the server link: {error}"))
                .ok(),
        };
        Some(Served { engine: DiskEngine::new(&config, words), state, link })
    }
}

/// Returns why the disks are not here, and what to do, where the image of one of them cannot be opened.
fn explain(error: &OpenError, image: &str) -> String {
    match error.kind {
        OpenErrorKind::InUse => format!(
            "the disks are in use: another process has {image}. If it is the process of this VM at another host, say `remoca migrate` \
             there: the disks then come with their cache. If it ends, they come without (`fuser -v {image}` helps to find it)"
        ),
        _ => format!("the disks cannot be opened: {error}"),
    }
}

/// Returns whether these images are those of the peer. An image of which nothing is known never is.
fn are_the_same(sent: &[Option<String>], found: &[Option<String>]) -> bool {
    sent == found && found.iter().all(Option::is_some)
}

/// Returns whether both stamps are of files, and not of the same one: that of a file begins with its inode.
fn is_another_file(sent: Option<&str>, found: Option<&str>) -> bool {
    let inode = |stamp: Option<&str>| stamp?.split(' ').next()?.parse::<u64>().ok();
    inode(sent).zip(inode(found)).is_some_and(|(sent, found)| sent != found)
}

/// Returns the header of a state with everything about disks in the order that they have here: `order` has the position
/// here of each disk in the order of the offer. The peer may have sent any number of each.
fn in_own_order(header: StateHeader, order: &[usize]) -> StateHeader {
    let there = |at: usize| order.iter().position(|position| *position == at).unwrap_or(at);
    let number = |at: usize| header.numbers.get(at).copied().or(u16::try_from(at).ok()).unwrap_or(u16::MAX);
    let is_on = |at: usize| header.write_caches.get(at) == Some(&true);
    let own = || (0..order.len()).map(there);
    StateHeader {
        numbers: own().map(number).collect(),
        stamps: own().map(|at| header.stamps.get(at).cloned().flatten()).collect(),
        failed_flushes: own().map(|at| header.failed_flushes.get(at).copied().flatten()).collect(),
        write_caches: own().filter(|_| !header.write_caches.is_empty()).map(is_on).collect(),
        ..header
    }
}

/// Returns whether both are the same disk, which may have another size.
fn is_alike(disk: &OfferedDisk, here: &OfferedDisk) -> bool {
    *here == OfferedDisk { bytes: here.bytes, ..disk.clone() }
}

/// Returns the position in `own` of each disk of `offered`, or `None` if they are not the same disks.
fn order_of(
    offered: &[OfferedDisk],
    own: &[OfferedDisk],
    is_it: impl Fn(&OfferedDisk, &OfferedDisk) -> bool,
) -> Option<Vec<usize>> {
    let order: Vec<_> = offered.iter().filter_map(|disk| own.iter().position(|here| is_it(disk, here))).collect();
    let is_each = (0..own.len()).all(|at| order.contains(&at));
    (is_each && order.len() == own.len() && order.len() == offered.len()).then_some(order)
}

/// Returns the position here of each disk that is offered. The two processes may have them in another order. Where the disks are here
/// already, an image may have grown since they came.
///
/// # Errors
/// If the disks, or anything else, are not those of this process.
fn fits(offer: &Offer, own: &Offer) -> Result<Vec<usize>, String> {
    if offer.version != own.version {
        return Err(other_version(offer, own.version));
    }
    let is_it =
        |disk: &OfferedDisk, here: &OfferedDisk| if offer.returns { is_alike(disk, here) } else { here == disk };
    let Some(order) = order_of(&offer.disks, &own.disks, is_it) else {
        let may_have_grown = |disk: &OfferedDisk, here: &OfferedDisk| is_alike(disk, here) && disk.bytes >= here.bytes;
        let cure = match order_of(&offer.disks, &own.disks, may_have_grown) {
            Some(_) => ". If an image has grown since the target was started to wait, start that again",
            None => "",
        };
        let show = |disks: &[OfferedDisk]| {
            let show = |disk: &OfferedDisk| {
                let access = if disk.read_only { ", read-only" } else { "" };
                format!("{} ({}{access}, sector {})", disk.name, show_size(disk.bytes), disk.sector)
            };
            disks.iter().take(8).map(show).collect::<Vec<_>>().join(", ")
        };
        return Err(format!(
            "the source has the disks {}, and the target has {}{cure}",
            show(&offer.disks),
            show(&own.disks)
        ));
    };
    if offer.has_port != own.has_port {
        return Err("one of the two has an eviction port, the other has none".into());
    }
    if offer.lock_reaches != own.lock_reaches {
        return Err(
            "the images are files on one side only, so the lock of one side does not keep the other out: give both \
                    the same kind of image"
                .into(),
        );
    }
    if offer.name != own.name {
        return Err(format!(
            "the source is the VM {}, and the target is {}: start both with the same --name",
            offer.name, own.name
        ));
    }
    Ok(order)
}

/// Returns which side of a hand-over is older than the other one, which takes `version`. Whoever reads it may look at either.
fn other_version(offer: &Offer, version: u32) -> String {
    let (there, cure) = match offer.returns {
        true => ("the process that has the disks", ""),
        false => ("the waiting process", ", which a restart does"),
    };
    let (older, cure) = if offer.version < version { ("the source", "") } else { (there, cure) };
    format!("the source hands over in version {}, and {there} takes {version}: upgrade {older}{cure}", offer.version)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::tests::{config, waiting};
    use remoca_protocol::peer::VERSION;
    use rustix::event::{PollFd, PollFlags, poll};

    /// Its process had no memory servers.
    #[test]
    fn an_index_that_comes_gets_room_for_the_cache_here() {
        let here = EngineConfig { local: PageCount(64), ..config(1) };
        let there = EngineConfig { cache: PageCount(0), ..config(1) };
        let mut engine = DiskEngine::new(&there, IndexMemory::new(layout(&there).words()).unwrap());
        engine.close();
        let words = engine.index().words();
        let header = StateHeader {
            key: there.key,
            seed: there.seed,
            words: words.len() as u64,
            cache_pages: 0,
            enabled: false,
            servers: Vec::new(),
            numbers: vec![0],
            stamps: vec![None],
            failed_flushes: vec![None],
            write_caches: vec![true],
        };
        let room = |words| Some(IndexRoom { words: IndexMemory::new(words).ok()?, state: None });
        let mut received = Receipt::begin(header, u64::MAX, room);
        received.take(&words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>()).unwrap();
        let mut driver = waiting(here);
        driver.migration.received = Some(received);
        driver.migration.serve_disks(&mut driver.vm, true);
        assert!(driver.vm.warmth.cold_reason().is_none(), "it was used");
        driver.vm.fit_index(true);
        let wake = PollFd::from_borrowed_fd(driver.vm.size.wake_fd(), PollFlags::IN);
        poll(&mut [wake], None).unwrap();
        let Vm { size, engine, guests, .. } = &mut driver.vm;
        assert!(size.take_region(true, engine, guests) && size.has_region());
        while !driver.vm.move_index(driver.migration.config()) {}
        driver.go_on_with_size();
        let status = driver.vm.engine.status();
        assert_eq!((status.wanted, status.local_wanted), (PageCount(8), PageCount(64)));
    }

    #[test]
    fn a_lock_that_reaches_on_one_side_only_does_not_fit() {
        let offer = |lock_reaches| Offer {
            version: VERSION,
            name: "vm".into(),
            disks: Vec::new(),
            has_port: true,
            lock_reaches,
            words: 1,
            returns: false,
        };
        for (source, target) in [(true, false), (false, true)] {
            assert!(fits(&offer(source), &offer(target)).unwrap_err().contains("on one side only"));
            assert_eq!(fits(&offer(source), &offer(source)), Ok(Vec::new()));
        }
    }

    #[test]
    fn a_refusal_by_version_names_the_older_side_to_readers_of_both() {
        let offer = |version, returns| Offer {
            version,
            name: "vm".into(),
            disks: Vec::new(),
            has_port: true,
            lock_reaches: true,
            words: 1,
            returns,
        };
        let refused = |source, target, returns| fits(&offer(source, returns), &offer(target, false)).unwrap_err();
        assert_eq!(
            refused(4, 3, false),
            "the source hands over in version 4, and the waiting process takes 3: upgrade the waiting process, which a restart does"
        );
        assert!(refused(3, 4, false).ends_with("the waiting process takes 4: upgrade the source"));
        assert!(refused(4, 3, true).ends_with("upgrade the process that has the disks"));
    }

    #[test]
    fn disks_are_the_same_in_any_order() {
        let disk = |name: &str| OfferedDisk { name: name.into(), bytes: 1 << 30, read_only: false, sector: 512 };
        let offer = |names: &[&str]| Offer {
            version: VERSION,
            name: "vm".into(),
            disks: names.iter().map(|name| disk(name)).collect(),
            has_port: true,
            lock_reaches: true,
            words: 1,
            returns: false,
        };
        assert_eq!(fits(&offer(&["c", "a", "b"]), &offer(&["a", "b", "c"])), Ok(vec![2, 0, 1]));
        for other in [&["a", "b"][..], &["a", "b", "d"], &["a", "b", "b"], &["a", "b", "c", "c"]] {
            assert!(
                fits(&offer(other), &offer(&["a", "b", "c"])).unwrap_err().contains("the source has the disks"),
                "{other:?}"
            );
        }
        let mut grown = offer(&["b", "a"]);
        grown.disks[0].bytes = 2 << 30;
        let refused = fits(&grown, &offer(&["a", "b"])).unwrap_err();
        assert!(refused.ends_with(", start that again"), "{refused}");
        assert!(!fits(&offer(&["a", "b"]), &grown).unwrap_err().contains("start"), "it has become smaller");
        assert!(!fits(&grown, &offer(&["a", "c"])).unwrap_err().contains("start"), "it is another disk");
        let back = Offer { returns: true, ..grown };
        assert_eq!(fits(&back, &offer(&["a", "b"])), Ok(vec![1, 0]));
        let sent = StateHeader {
            key: [0; 16],
            seed: 0,
            words: 0,
            cache_pages: 0,
            enabled: false,
            servers: Vec::new(),
            numbers: vec![7, 9],
            stamps: vec![Some("of c".into()), Some("of a".into()), Some("of b".into())],
            failed_flushes: vec![None, Some(5)],
            write_caches: vec![true, false, false],
        };
        let own = in_own_order(sent.clone(), &[2, 0, 1]);
        assert_eq!((own.numbers, own.failed_flushes), (vec![9, 2, 7], vec![Some(5), None, None]));
        assert_eq!((own.stamps[0].as_deref(), own.write_caches), (Some("of a"), vec![false, false, true]));
        let nothing = StateHeader { write_caches: Vec::new(), ..sent };
        assert!(in_own_order(nothing, &[2, 0, 1]).write_caches.is_empty(), "nothing was said");
    }

    #[test]
    fn another_file_is_known_by_its_inode_and_not_by_what_was_written_to_it() {
        let file = Some("77 4096 1700000000.5");
        for (found, expected) in [
            (file, false),
            (Some("77 8192 1700000001.0"), false),
            (Some("78 4096 1700000000.5"), true),
            (Some("wwid naa.5"), false),
            (None, false),
        ] {
            assert_eq!((is_another_file(file, found), is_another_file(found, file)), (expected, expected), "{found:?}");
        }
        assert!(!is_another_file(Some("nbd host:10809 a"), Some("nbd host:10809 b")));
    }

    #[test]
    fn images_of_which_nothing_is_known_are_not_the_same() {
        let stamps = |stamps: &[Option<&str>]| stamps.iter().map(|stamp| stamp.map(str::to_owned)).collect::<Vec<_>>();
        let known = stamps(&[Some("nbd host:10809 a"), Some("wwid naa.5")]);
        assert!(are_the_same(&known, &known));
        for other in [&[Some("nbd host:10809 b"), Some("wwid naa.5")][..], &[known[0].as_deref()], &[None, None]] {
            assert!(!are_the_same(&stamps(other), &known), "{other:?}");
        }
        assert!(!are_the_same(&stamps(&[None]), &stamps(&[None])));
    }
}
