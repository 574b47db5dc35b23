//! The process of the VM: its start, death, commands, and replacement by another program.

use super::Flaw;
use super::agent::Agent;
use super::disks::DiskSide;
use super::guests::Attachment;
use super::local::Change;
use super::store::{ModelStore, StoreDesk};
use super::world::{Event, Outcome, World};
use crate::violation::{Promise, Violation};
use remoca_core::engine::{DiskEngine, EngineConfig, layout};
use remoca_core::rules::Rules;
use remoca_core::units::{DiskIndex, PAGE_SIZE_U64, PageCount};
use remoca_disk::clock::Clock;
use remoca_disk::driver::{Disk, Driver, Migration, Parts, Port, Start};
use remoca_disk::endpoints::Endpoints;
use remoca_disk::handover::Checking;
use remoca_disk::link::ServerLink;
use remoca_disk::state::{Before, EngineStart, Former, OptionHashes, StateFile};
use remoca_frontend::device::Frontend;
use remoca_frontend::nbd::{Export, ExportGeometry, Listener, NbdExport, NbdServer, Target};
use remoca_frontend::testing::DirectFrontEnd;
use remoca_frontend::vhost::{DeviceConfig, VhostDevice};
use remoca_io::address::Endpoint;
use remoca_io::buffer::BufferPool;
use remoca_io::control::{Answer, ControlServer, Desk};
use remoca_io::service::ServiceManager;
use remoca_io::words::IndexMemory;
use remoca_protocol::control::DiskTraffic;
use remoca_protocol::control::{Command, Secret};
use remoca_protocol::offer::Offers;
use remoca_store::{AlignedStore, Store};
use std::fs::File;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

const MS: u64 = 1_000_000;
/// Number of disk numbers: there are more than disks.
const NUMBERS: u16 = 8;

/// A running process.
pub(super) struct Process {
    pub(super) driver: Driver,
    pub(super) desk: Desk,
    /// Replies to commands; kept so that answers have a receiver.
    pub(super) replies: Vec<Receiver<Answer>>,
    /// Front ends of its disks, while the guest runs at another host.
    pub(super) fronts: Vec<DirectFrontEnd>,
}

impl World<'_> {
    /// Returns the number that distinguishes the image of a disk from others.
    pub(super) fn image_of(&self, number: usize) -> u64 {
        let generation = if self.has(Flaw::ImageMistaken) { 0 } else { self.disks[number].generation };
        77 + number as u64 + 64 * u64::from(generation)
    }

    pub(super) fn nbd_path(&self) -> PathBuf {
        self.directory.path().join("nbd")
    }

    fn state_path(&self) -> PathBuf {
        self.directory.path().join("state")
    }

    pub(super) fn config(&self) -> EngineConfig {
        let conditions = &self.plan.conditions;
        EngineConfig {
            disks: NUMBERS,
            key: conditions.key,
            seed: 1,
            cache: PageCount(conditions.slots),
            local: PageCount(conditions.local.unwrap_or(0)),
            guest_memory: PageCount(conditions.resident),
            has_port: conditions.has_port,
            frame_sample: conditions.frame_sample,
            send_window: conditions.send_window,
            fetch_limit: conditions.fetch_limit,
            slots_per_turn: 1 + conditions.slots % 7,
            pools: 16,
            hedge: conditions.hedge,
            rules: Rules::default(),
        }
    }

    /// Starts the process, once no request of a previous one can still take effect on the disks. With `handed_over`, a
    /// previous program hands over to it, with these failed flushes.
    pub(super) fn start(&mut self, handed_over: Option<&[Option<i32>]>) {
        if self.process.is_some() {
            return;
        }
        if !self.disks.iter().all(DiskSide::lets_start) {
            return self.schedule(MS, Event::Start);
        }
        let config = self.config();
        let mut started = self.start_engine(&config, handed_over.is_some());
        self.note(|| format!("the process starts: {:?}", started.cold_reason));
        self.tally.warm_starts += u64::from(started.cold_reason.is_none());
        let is_handed_over = started.is_handed_over;
        let came = self.place_disks();
        let mut disks: Vec<_> = (0..self.disks.len())
            .filter(|disk| self.disks[*disk].position.is_some())
            .collect::<Vec<_>>()
            .into_iter()
            .map(|disk| self.open(disk, handed_over, is_handed_over && !came.contains(&disk)))
            .collect();
        let identities: Vec<_> = disks.iter().map(Disk::identity).collect();
        let numbers = started.number_disks(&identities);
        disks.iter_mut().zip(numbers).for_each(|(disk, number)| disk.number = number);
        let process = self.launch(started, disks, None);
        self.process = Some(process);
        for disk in 0..self.disks.len() {
            self.reattach(disk);
        }
        if let Some(agent) = &mut self.agent {
            agent.attach();
        }
    }

    /// Makes a process from its parts. With `incoming`, its disks are still to arrive there.
    pub(super) fn launch(
        &mut self,
        started: EngineStart,
        disks: Vec<Disk>,
        incoming: Option<(Endpoint, Secret)>,
    ) -> Process {
        let config = self.config();
        let EngineStart { engine, state, cold_reason, former, .. } = started;
        let header = state.as_ref().map(StateFile::header);
        let (key, seed) = header.as_ref().map_or((config.key, config.seed), |header| (header.key(), header.seed()));
        let config = EngineConfig { key, seed, ..config };
        let servers: Vec<Endpoint> = self.listed.iter().copied().map(super::servers::endpoint).collect();
        let local = self.plan.conditions.local.map(|_| super::local::endpoint());
        let endpoints = Endpoints { listed: servers, local };
        let mut link =
            ServerLink::start(Arc::new(self.network.clone()), &endpoints, header).expect("the list of servers is one");
        link.keep_pools(std::mem::take(&mut self.kept_pools));
        let nbd = self.open_nbd();
        let listener = self.listener.try_clone().expect("the system has descriptors left").into();
        let (control, desk) = ControlServer::unattended(listener, None).expect("the system has descriptors left");
        let port = self.open_port();
        let (verdicts, jobs) = (Arc::clone(&self.verdicts), Arc::clone(&self.jobs));
        let parts = Parts {
            name: "vm".into(),
            clock: Box::new(self.clock.clone()),
            engine,
            state,
            cold_reason,
            former,
            sizes: remoca_disk::driver::TierSizes { cache: config.cache, local: config.local },
            cache_enabled: true,
            options: OptionHashes::default(),
            disks,
            port,
            nbd,
            link: Some(link),
            local_server: super::local::endpoint(),
            migration: self.migration(incoming, config),
            control: Some(control),
            buffers: BufferPool::new(self.plan.conditions.buffer_bytes),
            trace: None,
            manager: ServiceManager::default(),
            guest_memory_max: PageCount(1 << 12),
            poll_time_max: std::time::Duration::ZERO,
            stop: super::eventfd(),
            hangup: super::eventfd(),
            start: Start {
                program: "/this".into(),
                arguments: vec!["remoca".into(), "disk".into()],
                upgrades: 0,
                notice: None,
                openers: std::sync::Arc::default(),
            },
            ask: Box::new(move |_, _, _| {
                let (checking, verdict) = Checking::pending()?;
                verdicts.lock().unwrap_or_else(PoisonError::into_inner).push(verdict);
                Ok(checking)
            }),
            aside: Box::new(move |_, job| {
                jobs.lock().unwrap_or_else(PoisonError::into_inner).push(job);
                Ok(())
            }),
        };
        let driver = Driver::new(parts).expect("descriptors can be watched");
        Process { driver, desk, replies: Vec::new(), fronts: Vec::new() }
    }

    fn migration(&self, incoming: Option<(Endpoint, Secret)>, config: EngineConfig) -> Migration {
        let away = incoming.is_some();
        let peers = Box::new(self.peers.clone());
        Migration::new(peers, incoming, None, None, config, true, away).expect("the system has descriptors left")
    }

    fn open_nbd(&self) -> Option<NbdServer> {
        let exports = self
            .disks
            .iter()
            .filter(|disk| disk.plan.nbd && disk.position.is_some())
            .map(|disk| self.export(disk.number));
        let exports: Vec<_> = exports.collect();
        (!exports.is_empty()).then(|| {
            let listener = Listener::bind(&Endpoint::Unix(self.nbd_path()), None).expect("it can be listened there");
            NbdServer::new(exports, vec![listener]).expect("listeners can be watched")
        })
    }

    fn open_port(&mut self) -> Option<Port> {
        let cookie = self.cookie();
        let agent = self.agent.as_mut()?;
        let listener = self.listener.try_clone().expect("the system has descriptors left");
        Some(Port { socket: String::new(), frontend: agent.open(listener.into()), cookie })
    }

    pub(super) fn start_engine(&self, config: &EngineConfig, handed_over: bool) -> EngineStart {
        if !self.plan.conditions.is_named {
            let words = IndexMemory::new(layout(config).words()).expect("there is memory");
            let engine = DiskEngine::new(config, words);
            let cold_reason = Some("it has no name".into());
            return EngineStart { engine, state: None, cold_reason, former: Former::default(), is_handed_over: false };
        }
        let path = self.state_path();
        let before = match handed_over {
            true => Before::ThisProcess(File::options().read(true).write(true).open(&path).ok().map(Into::into)),
            false => Before::Another,
        };
        StateFile::start(&path, config, before).expect("nobody else has the state file")
    }

    pub(super) fn export_name(disk: usize) -> String {
        format!("disk{disk}")
    }

    fn geometry(&self, disk: usize) -> ExportGeometry {
        ExportGeometry::of_disk(self.disks[disk].image.bytes())
    }

    fn export(&self, disk: usize) -> Export {
        let target = Target::Disk(self.disks[disk].position.unwrap_or(0));
        Export { name: Self::export_name(disk), target, geometry: self.geometry(disk) }
    }

    fn open(&mut self, number: usize, handed_over: Option<&[Option<i32>]>, kept_open: bool) -> Disk {
        let (geometry, image) = (self.geometry(number), self.image_of(number));
        let disk = &mut self.disks[number];
        disk.store = StoreDesk::new(&disk.image);
        let settles = !disk.model.is_idle() && self.options.flaw != Some(Flaw::NotSettled);
        if settles {
            self.tally.settlings += u64::from(!disk.guest.requests.is_empty());
            disk.settles_until_ns = disk.busy_until_ns + MS;
        }
        disk.store.lock().failed = handed_over.and_then(|failed| *failed.get(number)?);
        let plan = &disk.plan;
        let store = ModelStore::open(disk.store.clone(), plan, image, self.clock.clone());
        let store = AlignedStore::wrap(Box::new(store.expect("no other process has the image")));
        let settles_at = settles.then(|| self.clock.now() + Duration::from_nanos(disk.settles_until_ns - self.now));
        let frontend = match &disk.guest.attachment {
            Attachment::Nbd(_) => Frontend::Nbd(NbdExport::new(geometry).expect("the system has descriptors left")),
            Attachment::Vhost { .. } => {
                let (device, new) = self.device(number);
                if let Attachment::Vhost { front, .. } = &mut self.disks[number].guest.attachment {
                    *front = Some(new);
                }
                Frontend::Vhost(Box::new(device))
            }
        };
        Disk { settles_at, kept_open, ..self.disk(number, store, frontend) }
    }

    pub(super) fn disk(&self, number: usize, store: Box<dyn Store>, frontend: Frontend) -> Disk {
        Disk {
            number: DiskIndex(u16::try_from(number).unwrap_or(0)),
            name: Self::export_name(number),
            image: format!("image{}", self.image_of(number)),
            socket: String::new(),
            store,
            open: self.opener(number),
            swap: self.disks[number].plan.swap,
            settles_at: None,
            had_guest: false,
            has_lost_guest: false,
            kept_open: false,
            had_bytes: None,
            traffic: DiskTraffic::default(),
            frontend,
        }
    }

    pub(super) fn device(&self, number: usize) -> (VhostDevice, DirectFrontEnd) {
        let listener = self.listener.try_clone().expect("the system has descriptors left");
        DirectFrontEnd::device(self.device_config(number), Some(listener.into()))
    }

    fn device_config(&self, number: usize) -> DeviceConfig {
        let mut config = DeviceConfig::disk("d", "s", self.geometry(number).size);
        config.logical_block_bytes = 512;
        config.queue_count_max = self.disks[number].plan.queues;
        config.transfer_bytes_max = self.plan.conditions.piece_bytes;
        config.range_piece_bytes = self.plan.conditions.piece_bytes.into();
        config
    }

    /// Returns what the next program offers to guests: the same as this one.
    pub(super) fn offers(&self) -> Offers {
        let of_disk = |number: usize| match self.disks[number].guest.attachment {
            Attachment::Nbd(_) => self.geometry(number).offer(),
            Attachment::Vhost { .. } => self.device_config(number).offer(),
        };
        let wanted = self.disks.iter().filter(|disk| disk.is_wanted).map(|disk| disk.number);
        let disks = wanted.map(|number| (Self::export_name(number), of_disk(number))).collect();
        Offers { disks, port: Some(Agent::config().offer()) }
    }

    /// Ends the process, whatever it was doing. If it `keeps` them, the next process learns which flushes have failed.
    pub(super) fn die(&mut self, keeps: bool) -> Outcome {
        self.check_process()?;
        self.note(|| "the process is gone".into());
        self.end_move();
        let Some(Process { driver, .. }) = self.process.take() else { return Ok(()) };
        drop(driver);
        self.lives += 1;
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner).clear();
        for number in 0..self.disks.len() {
            let late = self.disks[number].orphan(self.event, &mut self.random);
            self.schedule_late(number, late);
            self.disks[number].lose_process(keeps);
        }
        if let Some(agent) = &mut self.agent {
            agent.lose_process();
        }
        Ok(())
    }

    /// Simulates a power failure. All, part or none of the data that is not durable survives.
    pub(super) fn power_failure(&mut self) -> Outcome {
        self.note(|| "the host loses power".into());
        self.tally.power_failures += 1;
        let ran = self.process.is_some();
        self.die(false)?;
        let _ = std::fs::remove_file(self.state_path());
        self.change_local(Change::Restart(false));
        for disk in &mut self.disks {
            disk.model.crash(self.event, &mut self.random);
            disk.model.forget_promises();
            disk.guest.depart();
            disk.guest.forget_failures();
        }
        if let Some(agent) = &mut self.agent {
            agent.reboot();
        }
        if ran {
            self.schedule(1_000 * MS, Event::Start);
        }
        Ok(())
    }

    /// Sends a command of the operator.
    pub(super) fn command(&mut self, command: Command) {
        let Some(process) = &mut self.process else { return };
        let (connection, _) = UnixStream::pair().expect("the system has sockets left");
        if let Ok(reply) = process.desk.hand_in(command, connection) {
            process.replies.push(reply);
        }
    }

    pub(super) fn resize(&mut self, pages: u32) {
        self.note(|| format!("the operator sets the cache to {pages} pages"));
        let cache_bytes = (pages > 0).then_some(u64::from(pages) * PAGE_SIZE_U64);
        let enabled = Some(pages > 0);
        self.command(Command::Set { cache_bytes, local_bytes: None, enabled, servers: None, at_once: false });
    }

    pub(super) fn enable(&mut self, is_on: bool) {
        self.note(|| format!("the operator switches the cache: {is_on}"));
        let enabled = Some(is_on);
        self.command(Command::Set { cache_bytes: None, local_bytes: None, enabled, servers: None, at_once: false });
    }

    pub(super) fn list_servers(&mut self, servers: &[usize]) {
        self.note(|| format!("the operator lists the servers {servers:?}"));
        self.tally.server_lists += 1;
        self.listed = servers.to_vec();
        let servers = servers.iter().map(|server| super::servers::endpoint(*server).to_string()).collect();
        let (servers, at_once) = (Some(servers), self.tally.server_lists.is_multiple_of(2));
        self.command(Command::Set { cache_bytes: None, local_bytes: None, enabled: None, servers, at_once });
    }

    /// Checks, at the end of a process, what it reports about itself.
    pub(super) fn check_process(&mut self) -> Outcome {
        let Some(process) = &mut self.process else { return Ok(()) };
        let snapshot = process.driver.snapshot();
        let counters = snapshot.counters;
        let leaves_state = std::fs::metadata(self.directory.path().join("state")).is_ok_and(|state| state.len() > 0);
        if self.plan.conditions.is_named && !leaves_state {
            return Err(Violation::new(Promise::Useful, "a process with a name leaves nothing to its successor"));
        }
        let count = |name: &str| counters.iter().find(|(known, _)| *known == name).map_or(0, |(_, count)| *count);
        let tally = &mut self.tally;
        let (read, hit) = (count("read_blocks"), count("hit_blocks"));
        tally.read_blocks += read;
        tally.hit_blocks += hit;
        let local = snapshot.pools.iter().filter(|pool| pool.is_local_tier);
        tally.local_hit_blocks += local.map(|pool| pool.hits).sum::<u64>();
        tally.demotions += count("demotions");
        if self.plan.conditions.is_cosy && self.plan.conditions.faults.none() {
            tally.cosy_read_blocks += read;
            tally.cosy_hit_blocks += hit;
        }
        tally.evictions_admitted += count("evictions_admitted");
        tally.evictions_duplicate += count("evictions_duplicate");
        tally.evictions_unmatched += count("evictions_unmatched");
        tally.hedges += count("hedges");
        tally.fetch_missing += count("fetch_missing");
        let wrong = count("fetch_wrong");
        tally.fetch_wrong += wrong;
        if wrong > 0 && !self.plan.conditions.faults.lies {
            let text = format!("{wrong} wrong pages of honest servers");
            return Err(Violation::new(Promise::CachedIsThere, text));
        }
        Ok(())
    }
}
