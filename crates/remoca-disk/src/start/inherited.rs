//! What a previous program of this process left: parts that `remoca disk` makes itself otherwise.
//!
//! All or nothing: if the description does not fit the options, everything is closed, and the process starts as after a
//! crash. A store that cannot be taken over is opened again.

use super::options::Options;
use crate::link::{KeptPool, PoolMemory};
use crate::state::{FormerSettings, OptionHashes};
use anyhow::{Context, Result};
use remoca_core::units::PageCount;
use remoca_frontend::nbd::Listener;
use remoca_io::address::Endpoint;
use remoca_io::control::ControlServer;
use remoca_io::handover::Inheritance;
use remoca_io::socket::{SocketError, SocketSource};
use remoca_protocol::guests::Guests;
use remoca_protocol::handover::{Description, Listening, PassedPool, StoreKind};
use remoca_store::{FileOptions, FileStore, NbdOptions, NbdStore, NbdUri, OnLostConnection, OpenError, Store};
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;

/// The parts of a previous program.
pub struct Inherited {
    left: Inheritance,
    /// The group that may connect to the sockets, by the options of now.
    socket_group: Option<u32>,
    /// Shared with each thread that opens an image, as long as it does.
    openers: Arc<()>,
}

/// A store as a previous program left it.
pub struct FormerStore {
    pub(super) fd: OwnedFd,
    pub(super) kind: StoreKind,
}

impl FormerStore {
    /// Returns the error with which all flushes must fail if the store is opened anew, or `None` if they may succeed. The connection to an
    /// NBD server is lost then.
    pub(super) fn flush_error(&self, target: &StoreTarget) -> Option<i32> {
        let (failed, unflushed) = match &self.kind {
            StoreKind::File { flush_failed } => (*flush_failed, 0),
            StoreKind::Nbd(export) => (export.flush_failed, export.unflushed),
        };
        let fails_at_loss = match target {
            StoreTarget::Nbd(_, options) => options.on_lost_connection == OnLostConnection::FailFlush,
            StoreTarget::File(..) => false,
        };
        failed.or((fails_at_loss && unflushed > 0).then_some(libc::EIO))
    }
}

/// The kind and place of a disk's store, as the options say.
#[derive(Clone)]
pub enum StoreTarget {
    File(PathBuf, FileOptions),
    Nbd(NbdUri, NbdOptions),
}

/// Returns what was handed over to this process, or `None` if nothing was or it does not fit the options.
pub fn receive(options: &Options) -> Option<Inherited> {
    let inheritance = Inheritance::receive()?;
    let Description { name, disks, upgrades, .. } = &inheritance.description;
    let former: Vec<_> = disks.iter().map(|disk| (&*disk.name, &*disk.image)).collect();
    let fits = if options.name == *name { check_disks(options, &former) } else { Err(format!("it is {name}")) };
    if let Err(error) = fits {
        tracing::error!("what was handed over is of another VM: {error}. This process starts as after a crash");
        return None;
    }
    tracing::info!("took over from the former program; upgrade {upgrades} of this process");
    let mut inherited = Inherited { left: inheritance, socket_group: options.socket_group, openers: Arc::default() };
    let names: Vec<_> = inherited.left.description.disks.iter().map(|disk| disk.name.clone()).collect();
    let stays = |name: &str| options.disks.iter().zip(0..).any(|(disk, position)| disk.name_at(position) == name);
    for name in names.iter().filter(|name| !stays(name)) {
        tracing::info!("{name}: it is no longer among the disks");
        // Closes its image, and removes its socket.
        drop(inherited.disk(name));
    }
    Some(inherited)
}

/// Checks that the disks in `options` and the `former` ones (names and images) are of one VM: some may come or go, and none
/// becomes another one.
///
/// # Errors
/// If they are not. The text names the disk.
pub fn check_disks(options: &Options, former: &[(&str, &str)]) -> Result<(), String> {
    let disks: Vec<_> = options.disks.iter().zip(0..).map(|(disk, at)| (disk.name_at(at), &*disk.image)).collect();
    let advice = "with the guest shut down, restart the process";
    for (name, image) in &disks {
        let is_former = |(former, _): &&(&str, &str)| former == name;
        match former.iter().find(is_former) {
            Some((_, former)) if former == image => {}
            Some((_, former)) => return Err(format!("disk {name} would be {image} in place of {former}: {advice}")),
            None => {
                let goes = |(name, _): &&(&str, &str)| disks.iter().all(|(stays, _)| stays != name);
                if let Some((former, _)) = former.iter().filter(goes).find(|(_, former)| former == image) {
                    return Err(format!("disk {former} ({image}) would have the name {name}: {advice}"));
                }
            }
        }
    }
    match disks.iter().any(|(name, _)| former.iter().any(|(former, _)| former == name)) {
        true => Ok(()),
        false => Err(format!("none of the running process's disks is left: {advice}")),
    }
}

impl Inherited {
    /// Returns the number of records that the trace has lost and does not tell of.
    pub fn trace_untold(&self) -> u64 {
        self.left.description.trace_untold
    }

    pub fn upgrades(&self) -> u32 {
        self.left.description.upgrades
    }

    /// Returns a value that threads share while they open images, which others need not wait for.
    pub fn openers(&self) -> Arc<()> {
        Arc::clone(&self.openers)
    }

    /// Returns the connection of the client that waits for the end of the upgrade, or `None` if no client waits.
    pub fn client(&mut self) -> Option<OwnedFd> {
        let number = self.left.description.client?;
        self.left.take(number).ok()
    }

    /// Returns the locked state file, or `None` if there is none.
    pub fn state(&mut self) -> Option<OwnedFd> {
        let number = self.left.description.state?;
        self.left.take(number).ok()
    }

    /// Returns what the previous program had, or `None` if it had no cache.
    pub fn cache_settings(&self) -> Option<FormerSettings> {
        let Description { servers, local_server, cache_pages, local_pages, cache_enabled, .. } = &self.left.description;
        let Description { options, option_sizes, .. } = &self.left.description;
        let listed: Vec<Endpoint> = servers.iter().map(|server| server.parse()).collect::<Result<_, _>>().ok()?;
        let (cache, local) = (PageCount(*cache_pages), local_server.as_ref().map(|_| PageCount(*local_pages)));
        let options = options.map(|all| OptionHashes { all, sizes: *option_sizes });
        let is_any = !listed.is_empty() || local.is_some();
        is_any.then_some(FormerSettings { options, listed, cache, local, enabled: *cache_enabled })
    }

    /// Returns the mapped pools of the previous program, with the endpoints of their servers.
    pub fn pools(&mut self) -> Vec<(String, KeptPool)> {
        let passed = std::mem::take(&mut self.left.description.pools);
        let adopt = |PassedPool { server, memory, generation, granted_pages }| {
            let memory = PoolMemory::adopt(self.left.take(memory).ok()?);
            let memory = memory.inspect_err(|error| tracing::warn!("a pool that was handed over: {error}")).ok()?;
            Some((server, KeptPool::new(memory, generation, PageCount(granted_pages))))
        };
        passed.into_iter().filter_map(adopt).collect()
    }

    pub fn control(&mut self) -> Option<ControlServer> {
        let listening = self.left.description.control.take();
        let source = self.source(listening)?;
        ControlServer::adopt(source).inspect_err(|error| tracing::warn!("the control socket: {error}")).ok()
    }

    /// Returns the socket of the port, and its connections.
    pub fn port(&mut self) -> (Option<SocketSource>, Guests<OwnedFd>) {
        let listening = self.left.description.port.take();
        let guests = std::mem::take(&mut self.left.description.port_guests);
        (self.front_door(listening), self.guests(guests))
    }

    /// Returns whether the previous program had the disk `name`.
    pub fn has(&self, name: &str) -> bool {
        self.left.description.disks.iter().any(|disk| disk.name == name)
    }

    /// Returns socket, store and connections of the disk `name`. The first two are `None` if they were not handed over.
    pub fn disk(&mut self, name: &str) -> (Option<SocketSource>, Option<FormerStore>, Guests<OwnedFd>) {
        let disk = self.left.description.disks.iter_mut().find(|disk| disk.name == name);
        let Some(disk) = disk else { return Default::default() };
        let (listening, store, guests) = (disk.socket.take(), disk.store.clone(), std::mem::take(&mut disk.guests));
        let fd = self.left.take(store.fd).ok();
        (self.front_door(listening), fd.map(|fd| FormerStore { fd, kind: store.kind }), self.guests(guests))
    }

    /// Returns whether the guest of the disk `name` has its write cache on.
    pub fn write_cache(&self, name: &str) -> bool {
        self.left.description.disks.iter().find(|disk| disk.name == name).is_none_or(|disk| !disk.write_cache_off)
    }

    /// Returns the size that the image of the disk `name` had before it became smaller, or `None` if it has not.
    pub fn had_bytes(&self, name: &str) -> Option<u64> {
        self.left.description.disks.iter().find(|disk| disk.name == name)?.had_bytes
    }

    /// Returns the listeners at which NBD clients connect.
    pub fn nbd(&mut self) -> Vec<Listener> {
        let listening = std::mem::take(&mut self.left.description.nbd);
        let adopt = |Listening { fd, path }| {
            let listener = Listener::adopt(self.left.take(fd).ok()?, path);
            if let Ok(listener) = &listener {
                warn_of_group(listener.regroup(self.socket_group));
            }
            listener.inspect_err(|error| tracing::warn!("a socket that was handed over: {error}")).ok()
        };
        listening.into_iter().filter_map(adopt).collect()
    }

    /// Returns a socket at which hypervisors connect, with the group that may.
    fn front_door(&mut self, listening: Option<Listening>) -> Option<SocketSource> {
        let source = self.source(listening)?;
        warn_of_group(source.regroup(self.socket_group));
        Some(source)
    }

    fn guests(&mut self, guests: Guests<RawFd>) -> Guests<OwnedFd> {
        let taken = guests.try_map(&mut |number| self.left.take(number));
        taken.inspect_err(|error| tracing::warn!("a connection that was handed over: {error}")).unwrap_or_default()
    }

    fn source(&mut self, listening: Option<Listening>) -> Option<SocketSource> {
        let Listening { fd, path } = listening?;
        let source = SocketSource::adopt(self.left.take(fd).ok()?, path);
        source.inspect_err(|error| tracing::warn!("a socket that was handed over: {error}")).ok()
    }
}

/// Logs that a socket has the group of before. The guests that are connected are worth more.
fn warn_of_group(result: Result<(), SocketError>) {
    let _ = result.inspect_err(|error| tracing::error!("{error}. It has the group of before"));
}

/// Takes over a store where a previous program stopped. Returns `None` if that is impossible. The store's descriptor is
/// closed then, as after a crash.
pub fn go_on(former: FormerStore, target: &StoreTarget) -> Option<Box<dyn Store>> {
    let FormerStore { fd, kind } = former;
    let store: Result<Box<dyn Store>, OpenError> = match (kind, target) {
        (StoreKind::File { flush_failed }, StoreTarget::File(path, options)) => {
            FileStore::adopt(fd, path, *options, flush_failed).map(|store| Box::new(store) as _)
        }
        (StoreKind::Nbd(export), StoreTarget::Nbd(uri, options)) => {
            NbdStore::adopt(fd, uri, *options, &export).map(|store| Box::new(store) as _)
        }
        (StoreKind::File { .. }, StoreTarget::Nbd(..)) | (StoreKind::Nbd(_), StoreTarget::File(..)) => return None,
    };
    store.inspect_err(|error| tracing::warn!("{error}; it is opened anew")).ok()
}

/// Returns the path of this program's file, under which an upgrade puts another one: the path by which it was started,
/// links included, if that leads to the file.
pub fn own_program() -> Result<PathBuf> {
    let own = || std::fs::metadata("/proc/self/exe").map(|file| (file.dev(), file.ino()));
    let called = std::env::args_os().next().map(PathBuf::from).filter(|path| path.components().count() > 1);
    if let Some(called) = called.and_then(|path| std::path::absolute(path).ok())
        && let (Ok(own), Ok(file)) = (own(), std::fs::metadata(&called))
        && own == (file.dev(), file.ino())
    {
        return Ok(called);
    }
    std::env::current_exe().context("cannot find the file of this program")
}

#[cfg(test)]
mod tests {
    use super::*;
    use remoca_protocol::handover::PassedExport;

    #[test]
    fn writes_that_a_lost_server_had_not_flushed_fail_the_next_flush_if_that_is_wanted() {
        let uri: NbdUri = "nbd+unix:///?socket=/s".parse().unwrap();
        let error = |flush_failed, unflushed, on_lost_connection| {
            let fd = std::fs::File::open("/dev/null").unwrap().into();
            let export = PassedExport {
                addresses: Vec::new(),
                flush_failed,
                unflushed,
                size: 1 << 20,
                flags: 1,
                block_min: 1,
                block_preferred: 4096,
                payload_max: 1 << 25,
            };
            let options = NbdOptions { read_only: false, write_through: false, on_lost_connection };
            let target = StoreTarget::Nbd(uri.clone(), options);
            FormerStore { fd, kind: StoreKind::Nbd(export) }.flush_error(&target)
        };
        let (fail, go_on) = (OnLostConnection::FailFlush, OnLostConnection::Continue);
        assert_eq!([error(None, 0, fail), error(None, 3, go_on)], [None; 2]);
        assert_eq!([error(None, 3, fail), error(Some(28), 3, fail)], [Some(libc::EIO), Some(28)]);
        assert_eq!(error(Some(28), 0, go_on), Some(28));
    }

    #[test]
    fn a_program_finds_its_own_file() {
        let program = own_program().unwrap();
        assert!(program.is_absolute() && program.is_file(), "{}", program.display());
    }
}
