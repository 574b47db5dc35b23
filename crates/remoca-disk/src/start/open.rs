//! Images and sockets of the disks and of the port, opened as the options say, or as a previous program left them.

use super::exports::{Address, Exports};
use super::inherited::{self, FormerStore, Inherited, StoreTarget};
use super::options::{DiskOptions, Options, PortOptions, QUEUES_DEFAULT, is_nbd_uri};
use super::wrong::WrongOptions;
use crate::driver::{Disk, Opener, Port};
use anyhow::{Context, Result, anyhow, bail};
use remoca_core::index::DISK_BYTES_MAX;
use remoca_core::units::DiskIndex;
use remoca_frontend::device::Frontend;
use remoca_frontend::nbd::{ExportGeometry, Target};
use remoca_frontend::vhost::{DeviceConfig, Keeper, KeptConnections, VhostDevice};
use remoca_io::lock::ImageLock;
use remoca_io::socket::{SocketSource, has_listener};
use remoca_protocol::control::DiskTraffic;
use remoca_protocol::guests::Guests;
use remoca_protocol::offer::Offers;
use remoca_protocol::port::{PORT_BYTES, PORT_SERIAL};
use remoca_store::{
    AlignedStore, FileOptions, FileStore, Geometry, NbdOptions, NbdStore, OnLostConnection, OpenError, OpenErrorKind,
    Store, UringUse, VacantStore, format,
};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the image of a disk that comes may take to be opened. It was opened once before, while all guests were served.
const COMING_TIME_MAX: Duration = Duration::from_millis(500);
/// How long a process that was killed may still listen while the last of its threads end, and how often that is looked at.
const ENDING_TIME_MAX: Duration = Duration::from_secs(2);
const LOOK_AGAIN_AFTER: Duration = Duration::from_millis(100);

/// Opens the images and sockets of all disks.
pub fn open_disks(
    options: &Options,
    are_away: bool,
    passed: Option<&PassedSocket>,
    exports: &mut Exports,
    mut inherited: Option<&mut Inherited>,
    kept: &mut KeptConnections,
) -> Result<Vec<Disk>> {
    if inherited.is_none() {
        await_end_of_predecessor(options, ENDING_TIME_MAX);
    }
    let mut passed = passed.map(PassedSocket::source).transpose()?;
    let mut disks = Vec::new();
    let predecessor_died = inherited.is_none() && predecessor_died(options);
    for (spec, position) in options.disks.iter().zip(0..) {
        let (name, at) = (spec.name_at(position), disk_position(disks.len())?);
        if inherited.is_none() {
            refuse_shared_image(spec, position, options)?;
        }
        let from_former = inherited.as_deref_mut().map(|inherited| inherited.disk(&name));
        let (source, store, guests) = from_former.unwrap_or_default();
        let source = passed.take().or(source);
        let is_continued = inherited.as_deref().is_some_and(|inherited| inherited.has(&name));
        let keeper = keeper(options, kept, &[name.clone(), spec.image.clone()], spec.socket.as_deref());
        let comes = inherited.as_deref().filter(|_| !is_continued).map(Inherited::openers);
        let found = Found { source, store, guests, is_continued, comes, are_away, keeper };
        let mut disk = match open_disk(&name, spec, at, found, options, exports) {
            Ok(disk) => disk,
            // The guests of the other disks are worth more than a disk that nobody has yet.
            Err(error) if inherited.is_some() && !is_continued => {
                tracing::error!("{name}: it cannot be added: {error:#}");
                continue;
            }
            Err(error) => return Err(error),
        };
        if let Some(inherited) = inherited.as_deref() {
            if !inherited.write_cache(&name) {
                // The former program may only have assumed so, and owe a flush, or not have made the one for which the guest has its
                // answer. It does not say.
                disk.frontend.assume_no_write_cache();
                disk.frontend.flush_first();
            }
            disk.had_bytes = inherited.had_bytes(&name);
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

/// Returns the position of the next disk when there are `disks`.
fn disk_position(disks: usize) -> Result<u16> {
    u16::try_from(disks).context("a VM has fewer than 4096 disks")
}

/// Returns whether a previous process was killed. A process that ends in good order removes its sockets, unless an NBD
/// server may still have writes of it, or of one that was killed before it.
pub(super) fn predecessor_died(options: &Options) -> bool {
    let control = options.is_named.then_some(&*options.control);
    let is_socket = |path: &Path| path.symlink_metadata().is_ok_and(|file| file.file_type().is_socket());
    guests_sockets(options).chain(control).any(is_socket)
}

/// Waits until nobody listens at the Unix sockets of this VM, for `patience` at most: its previous process may have been killed a moment ago.
fn await_end_of_predecessor(options: &Options, patience: Duration) {
    let give_up_at = Instant::now() + patience;
    for socket in guests_sockets(options).chain([&*options.control]) {
        while has_listener(socket) && Instant::now() < give_up_at {
            std::thread::sleep(LOOK_AGAIN_AFTER);
        }
    }
}

/// Returns the sockets that guests connect to.
pub fn guests_sockets(options: &Options) -> impl Iterator<Item = &Path> {
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
    /// Whether the previous program of this process had the disk.
    is_continued: bool,
    /// Set if the disk comes to guests of other disks, which wait for the end of an upgrade: what threads share that open images.
    comes: Option<Arc<()>>,
    /// Whether another process has the image.
    are_away: bool,
    keeper: Option<Keeper>,
}

/// Returns what keeps the connections of the device at `socket` beyond a kill. `words` say which device it is. Returns
/// `None` if nothing does: there is no service manager, or no state file, whose lock keeps other processes out.
fn keeper(options: &Options, kept: &mut KeptConnections, words: &[String], socket: Option<&Path>) -> Option<Keeper> {
    let (Some(_), Some(socket)) = (&options.state, socket) else { return None };
    kept.keeper(&format!("{} {}", words.join(" "), socket.display()))
}

fn open_disk(
    name: &str,
    spec: &DiskOptions,
    at: u16,
    mut found: Found,
    options: &Options,
    exports: &mut Exports,
) -> Result<Disk> {
    // The socket comes first: an image is locked only by a process that can be reached.
    let source = match (found.source.take(), &spec.socket) {
        (Some(source), _) => Some(source),
        (None, Some(socket)) => Some(SocketSource::bind(socket, options.socket_group)?),
        (None, None) => None,
    };
    let is_known = found.is_continued || spec.is_known;
    let target = store_target(spec, is_known, options)?;
    let opened = open_found(&mut found, spec, &target);
    let (store, kept_open) = opened.map_err(|error| name_unit(error, spec, &options.name))?;
    // A guest has the disk by then, and the image may have any size.
    let again = store_target(spec, true, options)?;
    let open: Opener = Box::new(move |lock| open_store(&again, lock));
    let geometry = store.geometry();
    check_size(spec, geometry.size, is_known)?;
    let size = geometry.size.min(DISK_BYTES_MAX);
    let geometry = Geometry { size: size - size % u64::from(spec.sector), ..geometry };
    let (frontend, socket) = match (source, &spec.socket) {
        (Some(source), Some(socket)) => {
            let mut config = disk_config(name, spec, &geometry);
            found.guests.front_end.iter().for_each(|kept| config.keep_offering(kept));
            found.keeper.iter().filter_map(Keeper::found).for_each(|kept| config.keep_offering(kept));
            let device = VhostDevice::with(config, source, found.guests.front_end, found.keeper);
            let device = device.with_context(|| format!("disk {name}"))?;
            (Frontend::Vhost(Box::new(device)), socket.display().to_string())
        }
        _ => {
            let mut geometry = export_geometry(spec, &geometry);
            found.guests.nbd.iter().for_each(|client| geometry.keep_offering(client));
            (exports.add(name, Target::Disk(at), geometry, found.guests.nbd)?, format!("NBD export {name}"))
        }
    };
    let (name, image) = (name.to_owned(), spec.image.clone());
    let traffic = DiskTraffic::default();
    // The engine, which is not there yet, gives it its number.
    let number = DiskIndex(at);
    Ok(Disk {
        number,
        name,
        image,
        socket,
        store,
        open,
        swap: spec.swap,
        settles_at: None,
        had_guest: false,
        has_lost_guest: false,
        kept_open,
        had_bytes: None,
        frontend,
        traffic,
    })
}

/// Opens the store of a disk, or takes it over from the former program. Returns it, and whether that had it open until now. Flushes that
/// failed there fail in either case.
fn open_found(found: &mut Found, spec: &DiskOptions, target: &StoreTarget) -> Result<(Box<dyn Store>, bool)> {
    let former = found.store.take();
    let flush_error = former.as_ref().and_then(|former| former.flush_error(target));
    if let Some(store) = former.and_then(|former| inherited::go_on(former, target)) {
        return Ok((AlignedStore::wrap(store), true));
    }
    if found.are_away {
        return Ok((vacant_store(target)?, false));
    }
    let must_be_raw = (!found.is_continued && !spec.is_raw).then(|| spec.image.clone());
    let mut store = match found.comes.take() {
        Some(openers) => open_in_time(&spec.image, target.clone(), must_be_raw, openers)?,
        None => open_new(target, must_be_raw.as_deref())?,
    };
    if flush_error.is_some() {
        store.set_failed_flush(flush_error);
    }
    Ok((store, false))
}

/// Refuses the image of a disk that another disk of this VM has: whoever opens it would be told that "another process" has it, and to
/// stop that one.
pub(super) fn refuse_shared_image(spec: &DiskOptions, position: u16, options: &Options) -> Result<()> {
    // Servers of NBD images decide for themselves who may have one.
    let file = |disk: &DiskOptions| {
        let metadata = (!is_nbd_uri(&disk.image)).then(|| std::fs::metadata(&disk.image).ok()).flatten();
        metadata.map(|metadata| (metadata.dev(), metadata.ino()))
    };
    let Some(own) = file(spec) else { return Ok(()) };
    let may_share = |disk: &DiskOptions| disk.read_only && spec.read_only;
    let is_rival = |disk: &DiskOptions, at: u16| at != position && !may_share(disk) && file(disk) == Some(own);
    match options.disks.iter().zip(0..).find(|(disk, at)| is_rival(disk, *at)) {
        Some((other, at)) => {
            let by = if other.image == spec.image { String::new() } else { format!(" (as {})", other.image) };
            let text = format!(
                "{} is given twice: it is the image of {} and of {}{by}. Give each disk its own",
                spec.image,
                spec.name_at(position),
                other.name_at(at)
            );
            Err(anyhow!(text).context(WrongOptions))
        }
        None => Ok(()),
    }
}

/// Refuses an image of a size that a disk with these options cannot have. One that `is_known` is used as far as it can be.
pub(super) fn check_size(spec: &DiskOptions, size: u64, is_known: bool) -> Result<()> {
    let image = &spec.image;
    if is_known {
        return Ok(());
    }
    if size > DISK_BYTES_MAX {
        let text = format!("{image}: it has {size} bytes, a disk may have 4 PiB");
        return Err(OpenError::new(OpenErrorKind::Unsuitable, text).into());
    }
    if !size.is_multiple_of(spec.sector.into()) {
        let error =
            anyhow!("{image}: its {size} bytes are not a multiple of the sector of 4096: leave out sector=4096");
        return Err(error.context(WrongOptions));
    }
    Ok(())
}

fn export_geometry(spec: &DiskOptions, geometry: &Geometry) -> ExportGeometry {
    ExportGeometry {
        size: geometry.size,
        block: spec.sector,
        preferred_block: geometry.physical_block.next_power_of_two().clamp(4096, 1 << 20),
        read_only: geometry.read_only,
        can_trim: geometry.can_discard,
        can_write_zeroes: geometry.can_write_zeroes,
        may_forget: geometry.may_forget,
    }
}

fn disk_config(name: &str, spec: &DiskOptions, geometry: &Geometry) -> DeviceConfig {
    let mut config = vhost_config(name, spec);
    config.capacity_bytes = geometry.size;
    config.physical_block_bytes = geometry.physical_block.max(4096);
    config.read_only = geometry.read_only;
    config.discard = geometry.can_discard;
    config.write_zeroes = geometry.can_write_zeroes;
    // Longer ones are refused, and this is what guests have been told so far. They are handed out in smaller pieces.
    config.range_bytes_max = 256 << 20;
    config
}

/// Returns the configuration of a disk as far as its options decide it. Discards and zeroes are on: they are offered if the
/// store or an attached guest has them.
pub(super) fn vhost_config(name: &str, spec: &DiskOptions) -> DeviceConfig {
    let mut config = DeviceConfig::disk(name, name, u64::from(spec.sector));
    config.logical_block_bytes = spec.sector;
    config.read_only = spec.read_only;
    config.queue_count_max = spec.queues;
    config
}

/// Returns what a process with these options offers to guests.
pub fn offers(options: &Options) -> Offers {
    let of_disk = |(spec, number): (&DiskOptions, u16)| {
        let name = spec.name_at(number);
        let geometry = ExportGeometry { block: spec.sector, read_only: spec.read_only, ..ExportGeometry::of_disk(0) };
        let offer = if spec.socket.is_some() { vhost_config(&name, spec).offer() } else { geometry.offer() };
        (name, offer)
    };
    let port = match options.port {
        PortOptions::None => None,
        PortOptions::Socket(_) => Some(port_config().offer()),
        PortOptions::NbdExport => Some(ExportGeometry::of_port(PORT_BYTES).offer()),
    };
    Offers { disks: options.disks.iter().zip(0..).map(of_disk).collect(), port }
}

/// Returns the kind and place of a disk's store, as the options say. `is_known`: a process had the disk before.
pub(super) fn store_target(spec: &DiskOptions, is_known: bool, options: &Options) -> Result<StoreTarget> {
    if is_nbd_uri(&spec.image) {
        let uri = spec.image.parse().with_context(|| spec.image.clone())?;
        let DiskOptions { read_only, write_through, on_loss: on_lost_connection, .. } = *spec;
        return Ok(StoreTarget::Nbd(uri, NbdOptions { read_only, write_through, on_lost_connection }));
    }
    if spec.on_loss != OnLostConnection::Continue || spec.write_through {
        bail!("{}: on-loss= and write-through are for NBD images", spec.image);
    }
    let uring = if options.uses_io_uring { UringUse::Auto } else { UringUse::Off };
    let file = FileOptions { read_only: spec.read_only, uring, any_size: is_known, ..FileOptions::default() };
    Ok(StoreTarget::File(PathBuf::from(&spec.image), file))
}

/// Opens the store. It accepts requests of 512 bytes, whatever the image's own unit is.
pub(super) fn open_store(target: &StoreTarget, lock: ImageLock) -> Result<Box<dyn Store>, OpenError> {
    let store: Box<dyn Store> = match target {
        StoreTarget::Nbd(uri, options) => Box::new(NbdStore::open(uri, *options)?),
        StoreTarget::File(path, options) => Box::new(FileStore::open(path, FileOptions { lock, ..*options })?),
    };
    Ok(AlignedStore::wrap(store))
}

/// Opens a store as [`open_store`] does. Its image `must_be_raw` if it is named: it is looked at before.
fn open_new(target: &StoreTarget, must_be_raw: Option<&str>) -> Result<Box<dyn Store>, OpenError> {
    must_be_raw.map_or(Ok(()), refuse_other_formats)?;
    open_store(target, ImageLock::default())
}

/// Opens a store as [`open_new`] does, or gives up: a server or file system that hangs is one of a disk that nobody has yet.
/// A store that is opened later is closed at once. Its thread has a part of `openers` until then.
fn open_in_time(
    image: &str,
    target: StoreTarget,
    must_be_raw: Option<String>,
    openers: Arc<()>,
) -> Result<Box<dyn Store>, OpenError> {
    let (sender, opened) = std::sync::mpsc::sync_channel(1);
    let open = move || {
        drop(sender.send(open_new(&target, must_be_raw.as_deref())));
        drop(openers);
    };
    let failed = |text| OpenError::new(OpenErrorKind::System, text);
    let thread = std::thread::Builder::new().name("opening".into()).spawn(open);
    thread.map_err(|error| failed(format!("{image}: no thread to open it: {error}")))?;
    opened.recv_timeout(COMING_TIME_MAX).unwrap_or_else(|_| {
        let milliseconds = COMING_TIME_MAX.as_millis();
        Err(failed(format!(
            "{image}: it could not be opened within {milliseconds} ms, while the other disks' guests wait"
        )))
    })
}

/// Adds the unit that serves a disk's qcow2 image to the error of a server that cannot be reached. `vm` is the name of the VM.
pub(super) fn name_unit(error: anyhow::Error, spec: &DiskOptions, vm: &str) -> anyhow::Error {
    let open_error = error.downcast_ref::<OpenError>();
    let is_unreachable = open_error.is_some_and(|error| error.kind == OpenErrorKind::Unreachable);
    match spec.qcow2_image.as_ref().filter(|_| is_unreachable) {
        Some(image) => error.context(format!(
            "the unit remoca-qcow2@{vm}, which serves {image}, is to run (`systemctl enable --now remoca-qcow2@{vm}`)"
        )),
        None => error,
    }
}

/// Refuses an image that looks like one of another format than raw.
///
/// # Errors
/// If it does; the text says what to do.
pub fn refuse_other_formats(image: &str) -> Result<(), OpenError> {
    if is_nbd_uri(image) {
        return Ok(());
    }
    match format::of(Path::new(image)) {
        Ok(Some(name)) => Err(OpenError::new(
            OpenErrorKind::NotRaw,
            format!(
                "{image}: it looks like a {name} image, and only raw images are served. Serve it through qemu-nbd (docs/guests.md; \
                 format=qcow2 with the unit remoca-qcow2@), or convert it (qemu-img convert -O raw). If its guest is to see these very \
                 bytes, say so with format=raw"
            ),
        )),
        // What cannot be read is reported when it is opened.
        Ok(None) | Err(_) => Ok(()),
    }
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
    kept: &mut KeptConnections,
) -> Result<Option<Port>> {
    let (source, guests) = inherited.map(Inherited::port).unwrap_or_default();
    let (frontend, socket) = match &options.port {
        PortOptions::Socket(socket) => {
            let source = match source {
                Some(source) => source,
                None => SocketSource::bind(socket, options.socket_group)?,
            };
            let keeper = keeper(options, kept, &["port".to_owned()], Some(socket));
            let device = VhostDevice::with(port_config(), source, guests.front_end, keeper);
            (Frontend::Vhost(Box::new(device.context("eviction port")?)), socket.display().to_string())
        }
        PortOptions::NbdExport => (exports.add_port(guests.nbd)?, format!("NBD export {PORT_SERIAL}")),
        PortOptions::None => return Ok(None),
    };
    Ok(Some(Port { socket, frontend, cookie }))
}

fn port_config() -> DeviceConfig {
    let mut config = DeviceConfig::disk("port", PORT_SERIAL, PORT_BYTES);
    config.discard = false;
    config.write_zeroes = false;
    config.queue_count_max = QUEUES_DEFAULT;
    config
}

pub fn is_in_use(error: &anyhow::Error) -> bool {
    error.downcast_ref::<OpenError>().is_some_and(|error| error.kind == OpenErrorKind::InUse)
}

/// The socket that `--fd` names. It outlives an attempt to open the disks, so that there can be a second one.
pub struct PassedSocket {
    number: RawFd,
    descriptor: OwnedFd,
}

impl PassedSocket {
    /// Takes the descriptor `number`. May be called once in the life of a program: the number is another one's afterwards.
    ///
    /// # Errors
    /// If there is no such descriptor.
    pub fn take(number: RawFd) -> Result<Self> {
        // SAFETY: only asks whether the number is an open descriptor.
        let open = number > 2 && unsafe { libc::fcntl(number, libc::F_GETFD) } >= 0;
        if !open {
            bail!("--fd {number}: there is no such descriptor");
        }
        // SAFETY: it is open, and whoever started us passed it for this use alone.
        let descriptor = unsafe { OwnedFd::from_raw_fd(number) };
        Ok(Self { number, descriptor })
    }

    /// Returns the socket, as a copy of the descriptor.
    fn source(&self) -> Result<SocketSource> {
        let copy = self.descriptor.try_clone().map_err(anyhow::Error::from);
        let source = copy.and_then(|copy| Ok(SocketSource::from_descriptor(copy)?));
        source.with_context(|| format!("--fd {}", self.number))
    }
}

#[cfg(test)]
mod tests {
    use super::super::settings::tests::options;
    use super::*;
    use remoca_protocol::handover::StoreKind;
    use std::io::{Read, Write};
    use std::os::fd::IntoRawFd;
    use std::os::unix::net::{UnixListener, UnixStream};

    #[test]
    fn a_start_waits_for_a_process_that_was_killed_and_still_listens() {
        let folder = tempfile::tempdir().unwrap();
        let control = folder.path().join("vm.ctl");
        let dying = UnixListener::bind(&control).unwrap();
        // It ends once somebody has looked.
        let end = std::thread::spawn(move || drop(dying.accept().unwrap()));
        let options = Options { control: control.clone(), ..options(&[], 0) };
        await_end_of_predecessor(&options, Duration::from_secs(600));
        assert!(!has_listener(&control));
        end.join().unwrap();
    }

    /// A process that is told of it at a restart has a guest on it.
    #[test]
    fn an_image_above_the_largest_size_is_refused_until_it_is_known() {
        let spec = DiskOptions::new("image".into());
        for (size, is_known, is_refused) in
            [(DISK_BYTES_MAX, false, false), (DISK_BYTES_MAX + 512, false, true), (DISK_BYTES_MAX + 512, true, false)]
        {
            assert_eq!(check_size(&spec, size, is_known).is_err(), is_refused, "{size} bytes, known: {is_known}");
        }
    }

    /// What a former program opened for another use is not taken over.
    #[test]
    fn a_failed_flush_stays_failed_if_an_upgrade_opens_the_image_anew() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("image");
        std::fs::write(&image, [0; 8192]).unwrap();
        let fd = std::fs::File::open(&image).unwrap().into();
        let found = Found {
            source: None,
            store: Some(FormerStore { fd, kind: StoreKind::File { flush_failed: Some(28) } }),
            guests: Guests::default(),
            is_continued: true,
            comes: None,
            are_away: false,
            keeper: None,
        };
        let spec = DiskOptions::new(image.display().to_string());
        let disk = open_disk("disk0", &spec, 0, found, &options(&[], 0), &mut Exports::default()).unwrap();
        assert_eq!((disk.kept_open, disk.store.failed_flush()), (false, Some(28)));
    }

    #[test]
    fn the_unit_that_serves_a_qcow2_image_is_named_if_its_server_is_not_there() {
        let folder = tempfile::tempdir().unwrap();
        let server = format!("nbd+unix:///?socket={}", folder.path().join("nowhere").display());
        let open = |qcow2_image| {
            let found = Found {
                source: None,
                store: None,
                guests: Guests::default(),
                is_continued: false,
                comes: None,
                are_away: false,
                keeper: None,
            };
            let spec = DiskOptions { qcow2_image, ..DiskOptions::new(server.clone()) };
            open_disk("disk0", &spec, 0, found, &options(&[], 0), &mut Exports::default()).err().unwrap()
        };
        let error = open(Some("/b.qcow2".to_owned()));
        let text = format!("{error:#}");
        assert!(text.starts_with("the unit remoca-qcow2@vm, which serves /b.qcow2, "), "{text}");
        assert!(text.contains("cannot reach the NBD server"), "{text}");
        let kind = error.downcast_ref::<OpenError>().map(|error| error.kind);
        assert_eq!(kind, Some(OpenErrorKind::Unreachable));
        assert!(!format!("{:#}", open(None)).contains("remoca-qcow2@"));
    }

    #[test]
    fn a_socket_that_was_passed_is_there_for_a_second_attempt() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let passed = PassedSocket::take(theirs.into_raw_fd()).unwrap();
        drop(passed.source().unwrap());
        let Ok(SocketSource::Stream(mut stream)) = passed.source() else { panic!("it is a connection") };
        drop(passed);
        ours.write_all(b"x").unwrap();
        stream.read_exact(&mut [0]).unwrap();
        drop(stream);
        assert_eq!(ours.read(&mut [0]).unwrap(), 0, "nothing of it is left open");
    }
}
