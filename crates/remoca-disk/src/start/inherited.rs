//! What a previous program of this process left: parts that `remoca disk` makes itself otherwise.
//!
//! All or nothing: if the description does not fit the options, everything is closed, and the process starts as after a
//! crash. A store that cannot be taken over is opened again.

use super::options::Options;
use anyhow::{Context, Result};
use remoca_core::units::PageCount;
use remoca_frontend::nbd::Listener;
use remoca_io::address::Endpoint;
use remoca_io::control::ControlServer;
use remoca_io::handover::Inheritance;
use remoca_io::socket::SocketSource;
use remoca_protocol::guests::Guests;
use remoca_protocol::handover::{Description, Listening, StoreKind};
use remoca_store::{FileOptions, FileStore, NbdOptions, NbdStore, NbdUri, OpenError, Store};
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

/// The parts of a previous program.
pub struct Inherited(Inheritance);

/// A store as a previous program left it.
pub struct FormerStore {
    fd: OwnedFd,
    kind: StoreKind,
}

/// The kind and place of a disk's store, as the options say.
pub enum StoreTarget {
    File(PathBuf, FileOptions),
    Nbd(NbdUri, NbdOptions),
}

/// Returns what was handed over to this process, or `None` if nothing was or it does not fit the options.
pub fn receive(options: &Options) -> Option<Inherited> {
    let inheritance = Inheritance::receive()?;
    let Description { name, disks, upgrades, .. } = &inheritance.description;
    let images = options.disks.iter().map(|disk| &disk.image);
    if options.name != *name || !images.eq(disks.iter().map(|disk| &disk.image)) {
        tracing::error!("what was handed over is of another VM: this process starts as after a crash");
        return None;
    }
    tracing::info!("took over from the former program; upgrade {upgrades} of this process");
    Some(Inherited(inheritance))
}

impl Inherited {
    pub fn upgrades(&self) -> u32 {
        self.0.description.upgrades
    }

    /// Returns the connection of the client that waits for the end of the upgrade, or `None` if no client waits.
    pub fn client(&mut self) -> Option<OwnedFd> {
        let number = self.0.description.client?;
        self.0.take(number).ok()
    }

    /// Returns the locked state file, or `None` if there is none.
    pub fn state(&mut self) -> Option<OwnedFd> {
        let number = self.0.description.state?;
        self.0.take(number).ok()
    }

    /// Returns the servers, the size of the cache, and whether it is on, or `None` if the previous program had no cache.
    pub fn cache_settings(&self) -> Option<(Vec<Endpoint>, PageCount, bool)> {
        let Description { servers, cache_pages, cache_enabled, .. } = &self.0.description;
        let servers: Vec<Endpoint> = servers.iter().map(|server| server.parse()).collect::<Result<_, _>>().ok()?;
        (!servers.is_empty() && *cache_pages > 0).then_some((servers, PageCount(*cache_pages), *cache_enabled))
    }

    pub fn control(&mut self) -> Option<ControlServer> {
        let listening = self.0.description.control.take();
        let source = self.source(listening)?;
        ControlServer::adopt(source).inspect_err(|error| tracing::warn!("the control socket: {error}")).ok()
    }

    /// Returns the socket of the port, and its connections.
    pub fn port(&mut self) -> (Option<SocketSource>, Guests<OwnedFd>) {
        let listening = self.0.description.port.take();
        let guests = std::mem::take(&mut self.0.description.port_guests);
        (self.source(listening), self.guests(guests))
    }

    /// Returns socket, store and connections of the disk `number`. The first two are `None` if they were not handed over.
    pub fn disk(&mut self, number: usize) -> (Option<SocketSource>, Option<FormerStore>, Guests<OwnedFd>) {
        let Some(disk) = self.0.description.disks.get_mut(number) else { return Default::default() };
        let (listening, store, guests) = (disk.socket.take(), disk.store.clone(), std::mem::take(&mut disk.guests));
        let fd = self.0.take(store.fd).ok();
        (self.source(listening), fd.map(|fd| FormerStore { fd, kind: store.kind }), self.guests(guests))
    }

    /// Returns whether the guest of the disk `number` has its write cache on.
    pub fn write_cache(&self, number: usize) -> bool {
        self.0.description.disks.get(number).is_none_or(|disk| !disk.write_cache_off)
    }

    /// Returns the listeners at which NBD clients connect.
    pub fn nbd(&mut self) -> Vec<Listener> {
        let listening = std::mem::take(&mut self.0.description.nbd);
        let adopt = |Listening { fd, path }| {
            let listener = Listener::adopt(self.0.take(fd).ok()?, path);
            listener.inspect_err(|error| tracing::warn!("a socket that was handed over: {error}")).ok()
        };
        listening.into_iter().filter_map(adopt).collect()
    }

    fn guests(&mut self, guests: Guests<RawFd>) -> Guests<OwnedFd> {
        let taken = guests.try_map(&mut |number| self.0.take(number));
        taken.inspect_err(|error| tracing::warn!("a connection that was handed over: {error}")).unwrap_or_default()
    }

    fn source(&mut self, listening: Option<Listening>) -> Option<SocketSource> {
        let Listening { fd, path } = listening?;
        let source = SocketSource::adopt(self.0.take(fd).ok()?, path);
        source.inspect_err(|error| tracing::warn!("a socket that was handed over: {error}")).ok()
    }
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
    #[test]
    fn a_program_finds_its_own_file() {
        let program = super::own_program().unwrap();
        assert!(program.is_absolute() && program.is_file(), "{}", program.display());
    }
}
