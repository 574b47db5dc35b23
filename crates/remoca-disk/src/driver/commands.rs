//! The control commands that the process executes.

use super::Driver;
use super::curve_status::curve_status;
use super::index_size::{HANDED_OVER, answer_late};
use super::snapshot::{cache_pages, local_pages};
use super::tiers::TierSizes;
use super::vm::Vm;
use crate::endpoints::Endpoints;
use crate::link::ServerLink;
use crate::trace::TraceWriter;
use remoca_core::engine::Leaving;
use remoca_core::units::PageCount;
use remoca_io::address::Endpoint;
use remoca_io::control::{ControlRequest, ControlServer};
use remoca_io::narrow;
use remoca_protocol::control::{Command, Reply};

const NO_SERVER: &str = "this process has no memory server; start it with --server, or with --local";
const ONLY_LOCAL: &str =
    "this process has no memory server but that of its local tier: give it others with --server first";

impl Driver {
    pub(super) fn answer_control(&mut self) {
        while let Some(request) = self.operator.control().and_then(ControlServer::next_request) {
            let program = match &request.command {
                Command::Upgrade { program } => Some(program.clone()),
                Command::RemoveDisk { .. } => Some(None),
                _ => None,
            };
            if let Some(program) = program {
                let hindrance = self.migration.hinders_upgrade(&self.vm.guests);
                self.upgrades.begin(program, Some(request), &self.vm, hindrance);
                continue;
            }
            if let Command::Migrate { to, key } = &request.command {
                let (to, key) = (to.clone(), key.clone());
                let is_draining = self.is_draining();
                self.migration.migrate(&mut self.vm, &to, &key, request, is_draining);
                continue;
            }
            if request.command == Command::Rescan && self.migration.serves() {
                let Vm { sizes, guests, host, .. } = &mut self.vm;
                sizes.measure_for(request, guests.disks_mut(), host.instant());
                continue;
            }
            if let Command::Curve { disk, grid } = &request.command {
                let reply = match curve_status(&mut self.vm, disk.as_deref(), *grid) {
                    Ok(curve) => Reply::Curve(Box::new(curve)),
                    Err(error) => Reply::Error { error },
                };
                request.answer(reply);
                continue;
            }
            if request.command == Command::TraceStart {
                self.begin_trace(request);
                continue;
            }
            self.vm.size.try_again();
            if self.waits_for_index(&request.command) {
                self.vm.size.wait(request);
                continue;
            }
            let reply = self.obey(&request);
            request.answer(reply);
        }
    }

    /// Answers the clients that waited for the sizes of the images.
    pub(super) fn answer_size_clients(&mut self) {
        let Vm { sizes, guests, host, .. } = &mut self.vm;
        for (client, outcome) in sizes.take_clients(guests.disks(), host.instant()) {
            let reply = self.reply(outcome);
            client.answer(reply);
        }
    }

    fn obey(&mut self, request: &ControlRequest) -> Reply {
        let done = match &request.command {
            Command::Status | Command::Curve { .. } => Ok(()),
            Command::TraceStart => Err("it is answered with the trace".into()),
            Command::TraceStop => match self.vm.in_flight.measured().end_client() {
                true => Ok(()),
                false => Err("nobody records a trace".into()),
            },
            Command::MigrateAbort => self.migration.abort(&mut self.vm),
            Command::MigrateTakeBack => self.migration.take_back(&mut self.vm),
            Command::Migrate { .. } => Err("it is answered when the other process has answered".into()),
            Command::ClearFailedFlush { disk } => self.clear_failed_flush(disk),
            Command::ClearRemovedFlushes => self.clear_removed_failures(),
            Command::Set { .. } if !self.migration.serves() => {
                Err("its disks are with another process, and so is its cache".into())
            }
            Command::Set { servers: None, at_once: true, .. } => {
                Err("only servers are left at once: name those that stay".into())
            }
            Command::Set { servers: None, cache_bytes, local_bytes, enabled, .. } => {
                self.set_cache(*cache_bytes, *local_bytes, *enabled)
            }
            Command::Set { servers: Some(servers), cache_bytes: None, local_bytes: None, enabled: None, at_once } => {
                self.set_servers(servers, if *at_once { Leaving::AtOnce } else { Leaving::Drained })
            }
            Command::Rescan => Err("its disks are with another process: say it there".into()),
            Command::Upgrade { .. } | Command::RemoveDisk { .. } => {
                Err("an upgrade is answered when it is done".into())
            }
            Command::Set { .. } => Err("the servers and the cache cannot be changed in one command".into()),
        };
        self.reply(done)
    }

    /// Begins to send the trace to a client.
    fn begin_trace(&mut self, request: ControlRequest) {
        if self.vm.in_flight.measured().has_client() {
            let name = &self.vm.name;
            let error = format!(
                "somebody else records a trace of this VM: end that one first, with `remoca trace stop {name}`"
            );
            return request.answer(Reply::Error { error });
        }
        let line = match Reply::Status(Box::new(self.snapshot())).line() {
            Ok(line) => line,
            Err(error) => return request.answer(Reply::Error { error: error.to_string() }),
        };
        match TraceWriter::send(request.into_connection(), line) {
            Ok(trace) => self.vm.in_flight.measured().begin_client(trace),
            Err(error) => tracing::warn!("no trace for a client: {error}"),
        }
    }

    fn reply(&mut self, outcome: Result<(), String>) -> Reply {
        match outcome {
            Ok(()) => Reply::Status(Box::new(self.snapshot())),
            Err(error) => Reply::Error { error },
        }
    }

    /// Clears the failed flush of the disk `name`, because the operator says that its image is sound.
    fn clear_failed_flush(&mut self, name: &str) -> Result<(), String> {
        if !self.migration.serves() {
            return Err("its disks are with another process: say it there".into());
        }
        let Vm { warmth, guests, engine, .. } = &mut self.vm;
        warmth.clear_failed_flush(name, guests.disks_mut(), engine)
    }

    /// Clears the failed flushes of images that are no disks any more.
    fn clear_removed_failures(&mut self) -> Result<(), String> {
        if !self.migration.serves() {
            return Err("its disks are with another process".into());
        }
        let Vm { warmth, guests, engine, .. } = &mut self.vm;
        warmth.clear_removed_failures(guests.disks(), engine);
        Ok(())
    }

    /// Replaces the list of memory servers. Pools on servers that are no longer listed are drained, or given back at once.
    fn set_servers(&mut self, servers: &[String], leaving: Leaving) -> Result<(), String> {
        let Some(link) = self.vm.servers.link_mut() else { return Err(NO_SERVER.into()) };
        let listed = servers.iter().map(|server| server.parse()).collect::<Result<Vec<Endpoint>, _>>()?;
        // A local tier of size 0 is not in the way of a pool of the list at a server of this host.
        let is_listed = listed.iter().any(|endpoint| matches!(endpoint, Endpoint::Local(_)));
        let gives_way = is_listed && self.vm.size.tiers().local.0 == 0;
        let local = link.endpoints().local.filter(|_| !gives_way);
        let endpoints = Endpoints { listed, local };
        link.replace(&endpoints).map_err(|error| error.to_string())?;
        self.vm.keep_settings();
        self.vm.tell_servers(leaving);
        Ok(())
    }

    /// Sets the sizes of the cache and of its local tier, and switches both on or off. A size without `enabled` does not switch
    /// the cache on; it is the size that the next "on" restores.
    pub(super) fn set_cache(
        &mut self,
        bytes: Option<u64>,
        local_bytes: Option<u64>,
        enabled: Option<bool>,
    ) -> Result<(), String> {
        let sizes = self.sizes_after(bytes, local_bytes)?;
        self.check_servers(sizes)?;
        let vm = &mut self.vm;
        let on = enabled.unwrap_or(vm.engine.status().enabled);
        if on && sizes.sum() > vm.engine.index().slot_limit() {
            return Err(match self.migration.is_idle() {
                true => format!("there is no memory for an index of that size{}", vm.size.refusal()),
                false => HANDED_OVER.into(),
            });
        }
        vm.servers.add_local_server(sizes.local)?;
        vm.size.set_tiers(sizes);
        vm.size.refuse_overtaken(bytes, local_bytes, enabled);
        vm.servers.forget_refusal();
        vm.resize(if on { sizes } else { TierSizes::default() });
        vm.keep_settings();
        vm.fit_index(self.migration.is_idle());
        narrow::passes("resize-begun");
        vm.execute();
        vm.tell_servers(Leaving::Drained);
        narrow::passes("resize-done");
        Ok(())
    }

    /// Returns the sizes of the cache and its local tier after a command that gives these.
    fn sizes_after(&self, bytes: Option<u64>, local_bytes: Option<u64>) -> Result<TierSizes, String> {
        let now = self.vm.size.tiers();
        let cache = bytes.map_or(Ok(now.cache), cache_pages)?;
        let local = local_bytes.map_or(Ok(now.local), local_pages)?;
        TierSizes { cache, local }.checked()
    }

    /// Checks that there are servers for these sizes.
    fn check_servers(&self, sizes: TierSizes) -> Result<(), String> {
        let endpoints = self.vm.servers.link().map(ServerLink::endpoints).unwrap_or_default();
        match (endpoints.listed.is_empty(), sizes) {
            (true, _) if endpoints.local.is_none() => Err(NO_SERVER.into()),
            (true, TierSizes { cache: PageCount(1..), .. }) => Err(ONLY_LOCAL.into()),
            _ => Ok(()),
        }
    }

    /// Returns whether `command` has to wait for a larger index. Requests that index if it is needed.
    pub(super) fn waits_for_index(&mut self, command: &Command) -> bool {
        let Command::Set { servers: None, cache_bytes, local_bytes, enabled, at_once: false } = command else {
            return false;
        };
        let Ok(sizes) = self.sizes_after(*cache_bytes, *local_bytes) else { return false };
        let (vm, is_idle) = (&mut self.vm, self.migration.is_idle());
        let size = sizes.sum();
        let on = enabled.unwrap_or(vm.engine.status().enabled);
        if !on || vm.servers.link().is_none() || size <= vm.engine.index().slot_limit() {
            return false;
        }
        vm.size.aim_at(size);
        vm.fit_index(is_idle);
        // The index does not grow while disks are being handed over.
        vm.size.is_busy() && is_idle
    }

    /// Executes the commands that waited for a larger index, and checks whether the index has to change its size again.
    pub(super) fn go_on_with_size(&mut self) {
        let Some(clients) = self.vm.size.take_clients() else { return };
        for client in clients {
            if self.waits_for_index(&client.command) {
                self.vm.size.wait(client);
            } else {
                let reply = self.obey(&client);
                answer_late(client, reply);
            }
        }
        self.fill_index();
        self.vm.fit_index(self.migration.is_idle());
    }

    /// Gives the cache the size that it is to have, once the index that came from another process has room for it.
    fn fill_index(&mut self) {
        let vm = &mut self.vm;
        let (sizes, status) = (vm.size.tiers(), vm.engine.status());
        let is_cut = status.wanted < sizes.cache || status.local_wanted < sizes.local;
        if status.enabled && is_cut && sizes.sum() <= vm.engine.index().slot_limit() {
            vm.resize(sizes);
            vm.execute();
            vm.tell_servers(Leaving::Drained);
        }
    }
}
