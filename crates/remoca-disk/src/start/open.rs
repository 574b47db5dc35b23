//! Images and sockets of the disks and of the port, opened as the options say, or as a previous program left them.

use super::exports::{self, Address, Exports};
use super::inherited::{self, FormerStore, Inherited, StoreTarget};
use super::options::{DiskOptions, Options, PortOptions, QUEUES_DEFAULT};
use crate::driver::{Disk, Opener, Port};
use anyhow::{Context, Result, bail};
use remoca_frontend::device::Frontend;
use remoca_frontend::nbd::{ExportGeometry, Target};
use remoca_frontend::vhost::{DeviceConfig, VhostDevice};
use remoca_io::lock::ImageLock;
use remoca_io::socket::SocketSource;
use remoca_protocol::guests::{FrontEnd, Guests};
use remoca_protocol::port::{PORT_BYTES, PORT_SERIAL};
use remoca_store::{
    AlignedStore, FileOptions, FileStore, Geometry, NbdOptions, NbdStore, OnLostConnection, OpenError, OpenErrorKind,
    Store, UringUse, VacantStore,
};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Maximum size of a disk, in bytes: block numbers have 40 bits.
const DISK_BYTES_MAX: u64 = 1 << 52;

/// Opens the images and sockets of all disks.
pub fn open_disks(
    options: &Options,
    are_away: bool,
    exports: &mut Exports,
    mut inherited: Option<&mut Inherited>,
) -> Result<Vec<Disk>> {
    check(options)?;
    let mut passed = match &inherited {
        Some(_) => None,
        None => options.fd.map(take_descriptor).transpose()?,
    };
    let mut disks = Vec::new();
    let predecessor_died = inherited.is_none() && predecessor_died(options);
    for (spec, number) in options.disks.iter().zip(0..) {
        let from_former = inherited.as_deref_mut().map(|inherited| inherited.disk(number.into()));
        let (source, store, guests) = from_former.unwrap_or_default();
        let found = Found { source: passed.take().or(source), store, guests, are_away };
        let mut disk = open_disk(spec, number, found, options, exports)?;
        if let Some(inherited) = inherited.as_deref() {
            disk.frontend.inherit_write_cache(inherited.write_cache(number.into()));
        }
        if predecessor_died
            && disk.store.geometry().outlives_process
            && !disk.store.geometry().read_only
            && !options.nbd_settle.is_zero()
        {
            let seconds = options.nbd_settle.as_secs();
            tracing::warn!("{}: requests of the killed predecessor wait for {seconds} s", disk.name);
            disk.settles_at = Some(Instant::now() + options.nbd_settle);
        }
        disks.push(disk);
    }
    Ok(disks)
}

/// Refuses options without a disk, with a disk to which no client could connect, or with a socket that is given twice.
fn check(options: &Options) -> Result<()> {
    if options.disks.is_empty() {
        bail!("no disk: say --image IMAGE --socket PATH, or --disk image=IMAGE,socket=PATH");
    }
    if let Some(disk) = options.disks.iter().find(|disk| disk.socket.is_none())
        && options.nbd.is_empty()
    {
        bail!(
            "{}: where does the hypervisor connect? Say --socket PATH (--fd N, socket=PATH), or --nbd ADDRESS",
            disk.image
        );
    }
    refuse_shared_sockets(options)?;
    exports::check_activation(&options.nbd, options.fd)
}

/// Returns whether a previous process was killed. A process that ends in good order removes its sockets, unless an NBD
/// server still has writes of it.
fn predecessor_died(options: &Options) -> bool {
    let control = options.is_named.then_some(&*options.control);
    let is_socket = |path: &Path| path.symlink_metadata().is_ok_and(|file| file.file_type().is_socket());
    guests_sockets(options).chain(control).any(is_socket)
}

/// Refuses a socket that is given twice. This is checked here, because the second user would be told that "another
/// process" has it.
fn refuse_shared_sockets(options: &Options) -> Result<()> {
    let mut sockets: Vec<&Path> = guests_sockets(options).chain([&*options.control]).collect();
    sockets.sort();
    match sockets.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => {
            bail!(
                "socket {} is given twice: each disk, the port, --nbd and --control need their own",
                pair[0].display()
            )
        }
        None => Ok(()),
    }
}

/// Returns the sockets that guests connect to.
fn guests_sockets(options: &Options) -> impl Iterator<Item = &Path> {
    let disks = options.disks.iter().filter_map(|disk| disk.socket.as_deref());
    let port = match &options.port {
        PortOptions::Socket(path) => Some(path.as_path()),
        PortOptions::None | PortOptions::NbdExport => None,
    };
    disks.chain(port).chain(options.nbd.iter().filter_map(Address::socket))
}

/// The parts of a disk that exist already.
struct Found {
    source: Option<SocketSource>,
    store: Option<FormerStore>,
    guests: Guests<OwnedFd>,
    /// Whether another process has the image.
    are_away: bool,
}

fn open_disk(spec: &DiskOptions, number: u16, found: Found, options: &Options, exports: &mut Exports) -> Result<Disk> {
    // The socket comes first: an image is locked only by a process that can be reached.
    let source = match (found.source, &spec.socket) {
        (Some(source), _) => Some(source),
        (None, Some(socket)) => Some(SocketSource::bind(socket, options.socket_group)?),
        (None, None) => None,
    };
    let target = store_target(spec, options)?;
    let former = found.store.and_then(|former| inherited::go_on(former, &target));
    let kept_open = former.is_some();
    let store = match former {
        Some(store) => AlignedStore::wrap(store),
        None if found.are_away => vacant_store(&target)?,
        None => open_store(&target, ImageLock::default())?,
    };
    let open: Opener = Box::new(move || open_store(&target, ImageLock::default()));
    let Geometry { size, physical_block, read_only, can_discard, can_write_zeroes, may_forget, .. } = store.geometry();
    if size > DISK_BYTES_MAX {
        bail!("{}: it has {size} bytes, a disk may have 4 PiB", spec.image);
    }
    if !size.is_multiple_of(spec.sector.into()) {
        bail!("{}: its {size} bytes are not a multiple of the sector of 4096: leave out sector=4096", spec.image);
    }
    let name = spec.name.clone().unwrap_or_else(|| format!("disk{number}"));
    let (frontend, socket) = match (source, &spec.socket) {
        (Some(source), Some(socket)) => {
            (vhost_disk(&name, spec, source, &store.geometry(), found.guests.front_end)?, socket.display().to_string())
        }
        _ => {
            let geometry = ExportGeometry {
                size,
                block: spec.sector,
                preferred_block: physical_block.next_power_of_two().clamp(4096, 1 << 20),
                read_only,
                can_trim: can_discard,
                can_write_zeroes,
                may_forget,
            };
            (exports.add(&name, Target::Disk(number), geometry, found.guests.nbd)?, format!("NBD export {name}"))
        }
    };
    let image = spec.image.clone();
    Ok(Disk { name, image, socket, store, open, swap: spec.swap, settles_at: None, kept_open, frontend })
}

fn vhost_disk(
    name: &str,
    spec: &DiskOptions,
    source: SocketSource,
    geometry: &Geometry,
    kept: Option<FrontEnd<OwnedFd>>,
) -> Result<Frontend> {
    let mut config = DeviceConfig::disk(name, name, geometry.size);
    config.logical_block_bytes = spec.sector;
    config.physical_block_bytes = geometry.physical_block.max(4096);
    config.read_only = geometry.read_only;
    config.discard = geometry.can_discard;
    config.write_zeroes = geometry.can_write_zeroes;
    config.queue_count_max = spec.queues;
    // Invalidation is by block: this bounds how long one request keeps the others waiting.
    config.range_bytes_max = 256 << 20;
    let device = VhostDevice::with(config, source, kept).with_context(|| format!("disk {name}"))?;
    Ok(Frontend::Vhost(device))
}

/// Returns whether `image` is an NBD URI. One of a kind that is not supported counts too: it must not be taken for a file.
fn is_nbd_uri(image: &str) -> bool {
    image.starts_with("nbd:") || image.split_once("://").is_some_and(|(scheme, _)| scheme.starts_with("nbd"))
}

/// Returns the kind and place of a disk's store, as the options say.
fn store_target(spec: &DiskOptions, options: &Options) -> Result<StoreTarget> {
    if is_nbd_uri(&spec.image) {
        let uri = spec.image.parse().with_context(|| spec.image.clone())?;
        let DiskOptions { read_only, write_through, on_loss: on_lost_connection, .. } = *spec;
        return Ok(StoreTarget::Nbd(uri, NbdOptions { read_only, write_through, on_lost_connection }));
    }
    if spec.on_loss != OnLostConnection::Continue || spec.write_through {
        bail!("{}: on-loss= and write-through are for NBD images", spec.image);
    }
    let uring = if options.uses_io_uring { UringUse::Auto } else { UringUse::Off };
    let file = FileOptions { read_only: spec.read_only, uring, ..FileOptions::default() };
    Ok(StoreTarget::File(PathBuf::from(&spec.image), file))
}

/// Opens the store. It accepts requests of 512 bytes, whatever the image's own unit is.
fn open_store(target: &StoreTarget, lock: ImageLock) -> Result<Box<dyn Store>, OpenError> {
    let store: Box<dyn Store> = match target {
        StoreTarget::Nbd(uri, options) => Box::new(NbdStore::open(uri, *options)?),
        StoreTarget::File(path, options) => Box::new(FileStore::open(path, FileOptions { lock, ..*options })?),
    };
    Ok(AlignedStore::wrap(store))
}

/// Returns a vacant store for an image that another process has. The image is opened only to read its geometry.
fn vacant_store(target: &StoreTarget) -> Result<Box<dyn Store>> {
    let geometry = open_store(target, ImageLock::Off)?.geometry();
    Ok(Box::new(VacantStore::new(geometry).context("no descriptors")?))
}

/// Opens the eviction port. Returns `None` if there is to be none. `cookie` is random.
pub fn open_port(
    options: &Options,
    cookie: u64,
    exports: &mut Exports,
    inherited: Option<&mut Inherited>,
) -> Result<Option<Port>> {
    let (source, guests) = inherited.map(Inherited::port).unwrap_or_default();
    let (frontend, socket) = match &options.port {
        PortOptions::Socket(socket) => {
            let source = match source {
                Some(source) => source,
                None => SocketSource::bind(socket, options.socket_group)?,
            };
            (vhost_port(source, guests.front_end)?, socket.display().to_string())
        }
        PortOptions::NbdExport => (exports.add_port(guests.nbd)?, format!("NBD export {PORT_SERIAL}")),
        PortOptions::None => return Ok(None),
    };
    Ok(Some(Port { socket, frontend, cookie }))
}

fn vhost_port(source: SocketSource, kept: Option<FrontEnd<OwnedFd>>) -> Result<Frontend> {
    let mut config = DeviceConfig::disk("port", PORT_SERIAL, PORT_BYTES);
    config.discard = false;
    config.write_zeroes = false;
    config.queue_count_max = QUEUES_DEFAULT;
    Ok(Frontend::Vhost(VhostDevice::with(config, source, kept).context("eviction port")?))
}

pub fn is_in_use(error: &anyhow::Error) -> bool {
    error.downcast_ref::<OpenError>().is_some_and(|error| error.kind == OpenErrorKind::InUse)
}

fn take_descriptor(fd: RawFd) -> Result<SocketSource> {
    // SAFETY: only asks whether the number is an open descriptor.
    let open = fd > 2 && unsafe { libc::fcntl(fd, libc::F_GETFD) } >= 0;
    if !open {
        bail!("--fd {fd}: there is no such descriptor");
    }
    // SAFETY: it is open, and whoever started us passed it for this use alone.
    let descriptor = unsafe { OwnedFd::from_raw_fd(fd) };
    SocketSource::from_descriptor(descriptor).with_context(|| format!("--fd {fd}"))
}
