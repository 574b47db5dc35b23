//! Images and sockets of the disks and of the port, opened as the options say, or as a former program left them.

use super::args::{DiskArgs, DiskSpec, OnLoss, QUEUES_DEFAULT, Sector};
use super::random;
use crate::inherited::{self, FormerStore, Inherited, StoreTarget};
use crate::nbd;
use crate::runtime;
use anyhow::{Context, Result, bail};
use remoca_disk::driver::{Disk, Opener, Port};
use remoca_frontend::device::Frontend;
use remoca_frontend::nbd::{ExportGeometry, Target};
use remoca_frontend::vhost::{DeviceConfig, VhostDevice};
use remoca_io::lock::ImageLock;
use remoca_io::socket::SocketSource;
use remoca_protocol::port::{PORT_BYTES, PORT_SERIAL};
use remoca_store::{
    AlignedStore, FileOptions, FileStore, Geometry, NbdOptions, NbdStore, OnLostConnection, OpenError, OpenErrorKind,
    Store, UringUse, VacantStore,
};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Block numbers have 40 bits.
const DISK_BYTES_MAX: u64 = 1 << 52;

pub fn open_disks(
    args: &DiskArgs,
    exports: &mut nbd::Exports,
    mut inherited: Option<&mut Inherited>,
) -> Result<Vec<Disk>> {
    let mut specs = args.disk.clone();
    let mut passed = None;
    if let Some(image) = &args.image {
        if inherited.is_none() {
            passed = args.fd.map(take_descriptor).transpose()?;
        }
        let socket = args.socket.clone().or(args.fd.map(|_| PathBuf::from("fd")));
        let (read_only, image) = (args.read_only, image.clone());
        specs.push(DiskSpec {
            name: None,
            image,
            socket,
            read_only,
            swap: false,
            sector: Sector::Small,
            queues: QUEUES_DEFAULT,
            on_loss: OnLoss::default(),
            write_through: false,
        });
    }
    if specs.is_empty() {
        bail!("no disk: say --image IMAGE --socket PATH, or --disk image=IMAGE,socket=PATH");
    }
    if let Some(spec) = specs.iter().find(|spec| spec.socket.is_none())
        && args.nbd.is_empty()
    {
        bail!(
            "{}: where does the hypervisor connect? Say --socket PATH (--fd N, socket=PATH), or --nbd ADDRESS",
            spec.image
        );
    }
    refuse_shared_sockets(&specs, args)?;
    nbd::check_activation(&args.nbd, args.fd)?;
    let mut disks = Vec::new();
    let predecessor_died = inherited.is_none() && predecessor_died(&specs, args)?;
    for (spec, number) in specs.into_iter().zip(0..) {
        let from_former = inherited.as_deref_mut().map(|inherited| inherited.disk(number.into()));
        let (source, store) = from_former.unwrap_or_default();
        let mut disk = open_disk(spec, number, (passed.take().or(source), store), args, exports)?;
        if let Some(inherited) = inherited.as_deref() {
            disk.frontend.inherit_write_cache(inherited.write_cache(number.into()));
        }
        let Geometry { outlives_process, read_only, .. } = disk.store.geometry();
        if predecessor_died && outlives_process && !read_only && args.nbd_settle > 0 {
            tracing::warn!("{}: requests of the killed predecessor wait for {} s", disk.name, args.nbd_settle);
            disk.settles_at = Some(Instant::now() + Duration::from_secs(args.nbd_settle));
        }
        disks.push(disk);
    }
    Ok(disks)
}

/// Returns whether a former process was killed. One that ends in good order removes its sockets, unless an NBD server
/// still has writes of it.
fn predecessor_died(specs: &[DiskSpec], args: &DiskArgs) -> Result<bool> {
    let control = match (&args.control, &args.name) {
        (Some(path), _) => Some(path.clone()),
        (None, Some(name)) => Some(runtime::socket_of(name)?),
        (None, None) => None,
    };
    let nbd = args.nbd.iter().filter_map(nbd::Address::socket);
    let sockets = specs.iter().filter_map(|spec| spec.socket.as_deref()).chain(nbd).chain(control.as_deref());
    let is_socket = |path: &Path| path.symlink_metadata().is_ok_and(|file| file.file_type().is_socket());
    Ok(sockets.chain(args.port.as_deref()).any(is_socket))
}

/// Refuses two disks with one socket. Said here, because the second would be told that "another process" has it.
fn refuse_shared_sockets(specs: &[DiskSpec], args: &DiskArgs) -> Result<()> {
    let mut sockets: Vec<&Path> = specs.iter().filter_map(|spec| spec.socket.as_deref()).collect();
    sockets.extend(args.port.as_deref());
    sockets.extend(args.nbd.iter().filter_map(nbd::Address::socket));
    sockets.extend(args.control.as_deref());
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

fn open_disk(
    spec: DiskSpec,
    number: u16,
    (source, store): (Option<SocketSource>, Option<FormerStore>),
    args: &DiskArgs,
    exports: &mut nbd::Exports,
) -> Result<Disk> {
    // The socket comes first, as ever: an image is locked only by a process that can be reached.
    let source = match (source, &spec.socket) {
        (Some(source), _) => Some(source),
        (None, Some(socket)) => Some(SocketSource::bind(socket, args.socket_group)?),
        (None, None) => None,
    };
    let target = store_target(&spec, args)?;
    let former = store.and_then(|former| inherited::go_on(former, &target));
    let kept_open = former.is_some();
    let store = match former {
        Some(store) => AlignedStore::wrap(store),
        None if args.away => vacant_store(&target)?,
        None => open_store(&target, ImageLock::default())?,
    };
    let open: Opener = Box::new(move || open_store(&target, ImageLock::default()));
    let Geometry { size, physical_block, read_only, can_discard, can_write_zeroes, may_forget, .. } = store.geometry();
    if size > DISK_BYTES_MAX {
        bail!("{}: it has {size} bytes, a disk may have 4 PiB", spec.image);
    }
    if !size.is_multiple_of(spec.sector.bytes().into()) {
        bail!("{}: its {size} bytes are not a multiple of the sector of 4096: leave out sector=4096", spec.image);
    }
    let name = spec.name.clone().unwrap_or_else(|| format!("disk{number}"));
    let (frontend, socket) = match (source, &spec.socket) {
        (Some(source), Some(socket)) => {
            (vhost_disk(&name, &spec, source, &store.geometry())?, socket.display().to_string())
        }
        _ => {
            let geometry = ExportGeometry {
                size,
                block: spec.sector.bytes(),
                preferred_block: physical_block.next_power_of_two().clamp(4096, 1 << 20),
                read_only,
                can_trim: can_discard,
                can_write_zeroes,
                may_forget,
            };
            (exports.add(&name, Target::Disk(number), geometry)?, format!("NBD export {name}"))
        }
    };
    Ok(Disk { name, image: spec.image, socket, store, open, swap: spec.swap, settles_at: None, kept_open, frontend })
}

fn vhost_disk(name: &str, spec: &DiskSpec, source: SocketSource, geometry: &Geometry) -> Result<Frontend> {
    let mut config = DeviceConfig::disk(name, name, geometry.size);
    config.logical_block_bytes = spec.sector.bytes();
    config.physical_block_bytes = geometry.physical_block.max(4096);
    config.read_only = geometry.read_only;
    config.discard = geometry.can_discard;
    config.write_zeroes = geometry.can_write_zeroes;
    config.queue_count_max = spec.queues;
    // Invalidation is by block: this bounds how long one request keeps the others waiting.
    config.range_bytes_max = 256 << 20;
    let device = VhostDevice::new(config, source).with_context(|| format!("disk {name}"))?;
    Ok(Frontend::Vhost(device))
}

/// Returns whether this is an NBD URI, also of a kind that is not supported, which must not be taken for a file.
fn is_nbd_uri(image: &str) -> bool {
    image.starts_with("nbd:") || image.split_once("://").is_some_and(|(scheme, _)| scheme.starts_with("nbd"))
}

/// Returns where a disk's blocks are, as the options say.
fn store_target(spec: &DiskSpec, args: &DiskArgs) -> Result<StoreTarget> {
    if is_nbd_uri(&spec.image) {
        let uri = spec.image.parse().with_context(|| spec.image.clone())?;
        let on_lost_connection = match spec.on_loss {
            OnLoss::Continue => OnLostConnection::Continue,
            OnLoss::Fail => OnLostConnection::FailFlush,
        };
        let (read_only, write_through) = (spec.read_only, spec.write_through);
        return Ok(StoreTarget::Nbd(uri, NbdOptions { read_only, write_through, on_lost_connection }));
    }
    if spec.on_loss != OnLoss::default() || spec.write_through {
        bail!("{}: on-loss= and write-through are for NBD images", spec.image);
    }
    let uring = if args.no_io_uring { UringUse::Off } else { UringUse::Auto };
    let options = FileOptions { read_only: spec.read_only, uring, ..FileOptions::default() };
    Ok(StoreTarget::File(PathBuf::from(&spec.image), options))
}

/// Opens the store, which takes requests of 512 bytes, whatever lies below.
fn open_store(target: &StoreTarget, lock: ImageLock) -> Result<Box<dyn Store>, OpenError> {
    let store: Box<dyn Store> = match target {
        StoreTarget::Nbd(uri, options) => Box::new(NbdStore::open(uri, *options)?),
        StoreTarget::File(path, options) => Box::new(FileStore::open(path, FileOptions { lock, ..*options })?),
    };
    Ok(AlignedStore::wrap(store))
}

/// Returns the place of a store that another process has: only its geometry is looked at.
fn vacant_store(target: &StoreTarget) -> Result<Box<dyn Store>> {
    let geometry = open_store(target, ImageLock::Off)?.geometry();
    Ok(Box::new(VacantStore::new(geometry).context("no descriptors")?))
}

pub fn open_port(
    args: &DiskArgs,
    exports: &mut nbd::Exports,
    inherited: Option<&mut Inherited>,
) -> Result<Option<Port>> {
    let (frontend, socket) = match &args.port {
        Some(socket) => {
            let source = match inherited.and_then(Inherited::port) {
                Some(source) => source,
                None => SocketSource::bind(socket, args.socket_group)?,
            };
            (vhost_port(source)?, socket.display().to_string())
        }
        None if args.nbd_port => (exports.add_port()?, format!("NBD export {PORT_SERIAL}")),
        None => return Ok(None),
    };
    Ok(Some(Port { socket, frontend, cookie: u64::from_ne_bytes(random()?) }))
}

fn vhost_port(source: SocketSource) -> Result<Frontend> {
    let mut config = DeviceConfig::disk("port", PORT_SERIAL, PORT_BYTES);
    config.discard = false;
    config.write_zeroes = false;
    config.queue_count_max = QUEUES_DEFAULT;
    Ok(Frontend::Vhost(VhostDevice::new(config, source).context("eviction port")?))
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
