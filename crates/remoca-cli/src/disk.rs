//! `remoca disk`: the VM process. Turns arguments into ready parts, then runs the driver until it is told to stop.

use crate::group::parse_group;
use crate::nbd;
use crate::runtime;
use crate::size::parse_size;
use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use remoca_core::engine::{DiskEngine, EngineConfig, layout};
use remoca_core::rules::Rules;
use remoca_core::units::{PAGE_SIZE_U64, PageCount};
use remoca_disk::IndexMemory;
use remoca_disk::control::ControlServer;
use remoca_disk::driver::{Disk, Driver, Parts, Port, cache_pages};
use remoca_disk::endpoint::Endpoint;
use remoca_disk::frontend::Frontend;
use remoca_disk::link::{ServerLink, check_list};
use remoca_disk::nbd::{ExportGeometry, Target};
use remoca_disk::port::{PORT_BYTES, PORT_SERIAL};
use remoca_disk::store::{
    AlignedStore, BufferPool, FileOptions, FileStore, Geometry, NbdOptions, NbdStore, NbdUri, Store, UringUse,
};
use remoca_disk::trace::TraceWriter;
use remoca_disk::vhost::{DeviceConfig, SocketSource, VhostDevice};
use std::io::Write;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Pages that may wait for the connection to the server: 8 MiB.
const SEND_WINDOW_PAGES: u32 = 2048;
/// A frame is 4 KiB to copy and to hash, beside a block that is read; one of so many costs next to nothing.
const FRAME_SAMPLE: u32 = 64;
/// Requests to the server without reply.
const FETCH_LIMIT: u32 = 8192;
/// Block numbers have 40 bits.
const DISK_BYTES_MAX: u64 = 1 << 52;
/// A guest with more memory than this (1 TiB) is indexed as if it had this much.
const GUEST_PAGES_MAX: u32 = 1 << 28;

/// Serve the disks of one VM, with a cache in a memory server's memory.
#[derive(Args, Debug)]
pub struct DiskArgs {
    /// Name of this VM, for `remoca status` and `remoca set` [default: the process id]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,

    /// Image of the VM's only disk: a raw file, a block device, or an NBD URI
    #[arg(long, visible_alias = "blk-file", value_name = "IMAGE", conflicts_with = "disk")]
    image: Option<String>,

    /// Socket that the hypervisor connects to, for the disk of --image
    #[arg(long, visible_alias = "socket-path", value_name = "PATH", requires = "image", conflicts_with = "disk")]
    socket: Option<PathBuf>,

    /// Use this descriptor (a listening or a connected socket) in place of --socket
    #[arg(long, value_name = "N", conflicts_with_all = ["socket", "disk"], requires = "image")]
    fd: Option<RawFd>,

    /// The disk of --image can only be read
    #[arg(long, requires = "image")]
    read_only: bool,

    /// A disk: image=IMAGE,socket=PATH[,name=NAME][,read-only][,swap][,sector=512|4096][,queues=N]; may be repeated.
    /// With `swap` all of it is taken for a swap area; areas with a signature are recognised without. With --nbd, disks
    /// without socket= are NBD exports
    #[arg(long, value_name = "KEY=VALUE,...")]
    disk: Vec<DiskSpec>,

    /// Socket of the eviction port, which the agent in the guest writes to
    #[arg(long, value_name = "PATH")]
    port: Option<PathBuf>,

    /// Offer disks that have no socket to NBD clients, under their names: unix:PATH, tcp:HOST:PORT, or systemd (the sockets
    /// that it passed); may be repeated. Whoever can connect can read and write the disks
    #[arg(long, value_name = "ADDRESS")]
    nbd: Vec<nbd::Address>,

    /// Offer the eviction port to NBD clients, as the export remoca-port
    #[arg(long, requires = "nbd", conflicts_with = "port")]
    nbd_port: bool,

    /// Group whose members may connect to the sockets of disks, port and NBD, such as that of libvirt's QEMU; its name or number.
    /// Without it only the user of this process may
    #[arg(long, value_name = "GROUP", value_parser = parse_group)]
    socket_group: Option<u32>,

    /// Memory of the guest, which the index is made for; a vhost-user front end tells it by itself, an NBD client does not
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = parse_size)]
    guest_memory: u64,

    /// Memory server: tcp:HOST:PORT or unix:PATH; may be repeated (the pool is placed on one of them); without one,
    /// nothing is cached
    #[arg(long, value_name = "ADDRESS")]
    server: Vec<Endpoint>,

    /// Size of the cache
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = parse_size)]
    cache: u64,

    /// Control socket [default: NAME.ctl in /run/remoca, for users in $XDG_RUNTIME_DIR/remoca]
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,

    /// Memory for the data of requests in flight
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = parse_size)]
    buffers: u64,

    /// Record every request in this file
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,

    /// Use threads in place of io_uring, as where the system refuses it
    #[arg(long)]
    no_io_uring: bool,

    /// Never look at what guest memory holds before a read overwrites it, to find evicted pages without an agent
    #[arg(long)]
    no_frames: bool,

    /// Print what this vhost-user back end can do, as JSON, and exit
    #[arg(long)]
    print_capabilities: bool,

    /// Leave out one safety rule, to see that the tests notice
    #[cfg(feature = "ablation")]
    #[arg(long, value_name = "RULE")]
    omit_rule: Option<String>,
}

/// Unit of a disk's requests, as the guest sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Sector {
    #[value(name = "512")]
    Small,
    #[value(name = "4096")]
    Large,
}

impl Sector {
    fn bytes(self) -> u32 {
        match self {
            Self::Small => 512,
            Self::Large => 4096,
        }
    }
}

/// One disk as the user described it.
#[derive(Clone, Debug)]
struct DiskSpec {
    name: Option<String>,
    image: String,
    /// `None`: an NBD export.
    socket: Option<PathBuf>,
    read_only: bool,
    swap: bool,
    sector: Sector,
    queues: u16,
}

impl FromStr for DiskSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (mut name, mut image, mut socket) = (None, None, None);
        let (mut read_only, mut swap, mut sector, mut queues) = (false, false, Sector::Small, QUEUES_DEFAULT);
        for field in text.split(',') {
            let (key, value) = field.split_once('=').unwrap_or((field, ""));
            match (key, value) {
                ("name", name_given) => name = Some(name_given.to_owned()),
                ("image", path) if !path.is_empty() => image = Some(path.to_owned()),
                ("socket", path) if !path.is_empty() => socket = Some(PathBuf::from(path)),
                ("read-only", "" | "on") => read_only = true,
                ("read-only", "off") => read_only = false,
                ("swap", "" | "on") => swap = true,
                ("swap", "off") => swap = false,
                ("sector", size) => sector = Sector::from_str(size, false).map_err(|_| "sector is 512 or 4096")?,
                ("queues", count) => queues = count.parse().map_err(|_| format!("`{count}` is no number of queues"))?,
                _ => {
                    return Err(format!(
                        "`{field}`: a disk has image=, socket=, name=, read-only, swap, sector= and queues="
                    ));
                }
            }
        }
        let image = image.ok_or("a disk needs image=IMAGE")?;
        Ok(Self { name, image, socket, read_only, swap, sector, queues })
    }
}

/// QEMU asks for one queue for each virtual processor unless told otherwise.
const QUEUES_DEFAULT: u16 = 64;

/// Runs the subcommand.
///
/// # Errors
/// If something that was given cannot be used; the text says what to do.
pub fn run(args: DiskArgs) -> Result<()> {
    if args.print_capabilities {
        return Ok(writeln!(std::io::stdout(), r#"{{"type": "block", "features": ["read-only", "blk-file"]}}"#)?);
    }
    // Before any thread starts and any socket exists: a signal that comes early must not be lost.
    let stop = stop_pipe()?;
    let parts = parts(args, stop)?;
    let mut driver = Driver::new(parts).context("cannot watch the descriptors")?;
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    driver.run().context("waiting for events failed")
}

fn parts(args: DiskArgs, stop: OwnedFd) -> Result<Parts> {
    let name = args.name.clone().unwrap_or_else(|| std::process::id().to_string());
    if name.is_empty() || name.contains('/') {
        bail!("`{name}` cannot be the name of a VM: it is part of a file's name");
    }
    let cache = if args.server.is_empty() {
        PageCount(0)
    } else {
        check_list(&args.server).map_err(anyhow::Error::msg)?;
        cache_pages(args.cache).map_err(anyhow::Error::msg)?
    };
    let mut exports = nbd::Exports::default();
    let disks = open_disks(&args, &mut exports)?;
    let port = open_port(&args, &mut exports)?;
    let config = engine_config(&args, cache, disks.len())?;
    let words = IndexMemory::new(layout(&config).words()).context("there is no memory for the index of this cache")?;
    let nbd = exports.serve(&args.nbd, args.socket_group)?;
    let control = control_socket(&args, &name)?;
    let trace = args.trace.as_deref().map(TraceWriter::create).transpose().context("cannot make the trace file")?;
    let start = || ServerLink::start(&args.server).context("cannot start the server link");
    let link = if args.server.is_empty() { None } else { Some(start()?) };
    Ok(Parts {
        name,
        engine: DiskEngine::new(&config, words),
        cache,
        disks,
        port,
        nbd,
        link,
        control: Some(control),
        buffers: BufferPool::new(usize::try_from(args.buffers.max(8 << 20)).unwrap_or(usize::MAX)),
        trace,
        stop,
    })
}

fn engine_config(args: &DiskArgs, cache: PageCount, disks: usize) -> Result<EngineConfig> {
    let seed = random()?;
    let guest_pages = u32::try_from(args.guest_memory / PAGE_SIZE_U64).unwrap_or(u32::MAX);
    Ok(EngineConfig {
        disks: u16::try_from(disks).ok().filter(|disks| *disks < 4096).context("a VM has fewer than 4096 disks")?,
        key: random()?,
        seed: u64::from_ne_bytes(seed),
        cache,
        guest_memory: PageCount(guest_pages.min(GUEST_PAGES_MAX)),
        has_port: args.port.is_some() || args.nbd_port,
        frame_sample: if args.no_frames { 0 } else { FRAME_SAMPLE },
        send_window: SEND_WINDOW_PAGES,
        fetch_limit: FETCH_LIMIT,
        rules: rules(args)?,
    })
}

#[cfg(feature = "ablation")]
fn rules(args: &DiskArgs) -> Result<Rules> {
    use remoca_core::rules::Rule;
    let Some(name) = &args.omit_rule else { return Ok(Rules::default()) };
    let found = Rule::ALL.iter().find(|(known, _)| known == name);
    let (_, rule) = found.with_context(|| format!("there is no rule `{name}`"))?;
    tracing::error!("THE SAFETY RULE {name} IS LEFT OUT: this disk will be damaged");
    Ok(Rules::without(*rule))
}

#[cfg(not(feature = "ablation"))]
#[expect(clippy::unnecessary_wraps, reason = "the ablation build can fail here")]
fn rules(_args: &DiskArgs) -> Result<Rules> {
    Ok(Rules::default())
}

fn open_disks(args: &DiskArgs, exports: &mut nbd::Exports) -> Result<Vec<Disk>> {
    let mut specs = args.disk.clone();
    let mut passed = None;
    if let Some(image) = &args.image {
        passed = args.fd.map(take_descriptor).transpose()?;
        let socket = args.socket.clone().or(passed.as_ref().map(|_| PathBuf::from("fd")));
        let (read_only, image) = (args.read_only, image.clone());
        specs.push(DiskSpec {
            name: None,
            image,
            socket,
            read_only,
            swap: false,
            sector: Sector::Small,
            queues: QUEUES_DEFAULT,
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
    for (spec, number) in specs.into_iter().zip(0..) {
        disks.push(open_disk(spec, number, passed.take(), args, exports)?);
    }
    Ok(disks)
}

/// Said here, because the second of them would be told that "another process" has the socket.
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
    passed: Option<SocketSource>,
    args: &DiskArgs,
    exports: &mut nbd::Exports,
) -> Result<Disk> {
    // The socket comes first, as ever: an image is locked only by a process that can be reached.
    let source = match (passed, &spec.socket) {
        (Some(source), _) => Some(source),
        (None, Some(socket)) => Some(SocketSource::bind(socket, args.socket_group)?),
        (None, None) => None,
    };
    let store = open_store(&spec, args)?;
    let Geometry { size, physical_block, read_only, can_discard, can_write_zeroes, .. } = store.geometry();
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
            };
            (exports.add(&name, Target::Disk(number), geometry)?, format!("NBD export {name}"))
        }
    };
    Ok(Disk { name, image: spec.image, socket, store, swap: spec.swap, frontend })
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

/// Kinds that are not supported too, so that they are not taken for files.
fn is_nbd_uri(image: &str) -> bool {
    image.starts_with("nbd:") || image.split_once("://").is_some_and(|(scheme, _)| scheme.starts_with("nbd"))
}

/// The store of a disk; it takes requests of 512 bytes, whatever lies below.
fn open_store(spec: &DiskSpec, args: &DiskArgs) -> Result<Box<dyn Store>> {
    let store: Box<dyn Store> = if is_nbd_uri(&spec.image) {
        let uri: NbdUri = spec.image.parse().with_context(|| spec.image.clone())?;
        let options = NbdOptions { read_only: spec.read_only, ..NbdOptions::default() };
        Box::new(NbdStore::open(&uri, options)?)
    } else {
        let uring = if args.no_io_uring { UringUse::Off } else { UringUse::Auto };
        let options = FileOptions { read_only: spec.read_only, uring, ..FileOptions::default() };
        Box::new(FileStore::open(spec.image.as_ref(), options)?)
    };
    Ok(AlignedStore::wrap(store))
}

fn open_port(args: &DiskArgs, exports: &mut nbd::Exports) -> Result<Option<Port>> {
    let (frontend, socket) = match &args.port {
        Some(socket) => (vhost_port(socket, args.socket_group)?, socket.display().to_string()),
        None if args.nbd_port => (exports.add_port()?, format!("NBD export {PORT_SERIAL}")),
        None => return Ok(None),
    };
    Ok(Some(Port { socket, frontend, cookie: u64::from_ne_bytes(random()?) }))
}

fn vhost_port(socket: &Path, group: Option<u32>) -> Result<Frontend> {
    let mut config = DeviceConfig::disk("port", PORT_SERIAL, PORT_BYTES);
    config.discard = false;
    config.write_zeroes = false;
    config.queue_count_max = QUEUES_DEFAULT;
    let source = SocketSource::bind(socket, group)?;
    Ok(Frontend::Vhost(VhostDevice::new(config, source).context("eviction port")?))
}

fn control_socket(args: &DiskArgs, name: &str) -> Result<ControlServer> {
    let path = match &args.control {
        Some(path) => path.clone(),
        None => {
            let directory = runtime::directory()?;
            std::fs::create_dir_all(&directory).with_context(|| format!("cannot make {}", directory.display()))?;
            runtime::socket_of(name)?
        }
    };
    ControlServer::start(&path).context("control socket")
}

/// Readable after SIGTERM or SIGINT.
fn stop_pipe() -> Result<OwnedFd> {
    let (read, write) = std::os::unix::net::UnixStream::pair().context("no descriptors")?;
    for signal in [libc::SIGTERM, libc::SIGINT] {
        signal_hook::low_level::pipe::register(signal, write.try_clone().context("no descriptors")?)
            .context("cannot handle signals")?;
    }
    Ok(read.into())
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

/// Random bytes of the system.
fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    let count = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    if count.context("the system gives no random numbers")? != N {
        bail!("the system gives too few random numbers");
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_are_described_by_keys() {
        let spec: DiskSpec = "image=/a,socket=/b,read-only,swap,sector=4096,name=root,queues=2".parse().unwrap();
        assert_eq!((spec.image.as_str(), spec.read_only, spec.swap, spec.queues), ("/a", true, true, 2));
        assert_eq!(spec.sector.bytes(), 4096);
        for bad in ["", "socket=/b", "image=/a,socket=/b,x=1", "image=/a,socket=/b,sector=520"] {
            assert!(bad.parse::<DiskSpec>().is_err(), "{bad}");
        }
    }
}
