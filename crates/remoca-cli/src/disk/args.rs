//! The options of `remoca disk`.

use crate::group::parse_group;
use crate::key::KeySource;
use crate::nbd;
use crate::size::parse_size;
use clap::{Args, ValueEnum};
use remoca_io::address::Endpoint;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::str::FromStr;

/// Serve the disks of one VM, with a cache in a memory server's memory.
#[derive(Args, Debug)]
pub struct DiskArgs {
    /// Name of this VM, for `remoca status` and `remoca set` [default: the process id]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,

    /// Image of the VM's only disk: a raw file, a block device, or an NBD URI
    #[arg(long, visible_alias = "blk-file", value_name = "IMAGE", conflicts_with = "disk")]
    pub image: Option<String>,

    /// Socket that the hypervisor connects to, for the disk of --image
    #[arg(long, visible_alias = "socket-path", value_name = "PATH", requires = "image", conflicts_with = "disk")]
    pub socket: Option<PathBuf>,

    /// Use this descriptor (a listening or a connected socket) in place of --socket
    #[arg(long, value_name = "N", conflicts_with_all = ["socket", "disk"], requires = "image")]
    pub fd: Option<RawFd>,

    /// The disk of --image can only be read
    #[arg(long, requires = "image")]
    pub read_only: bool,

    /// A disk: image=IMAGE,socket=PATH[,name=NAME][,read-only][,swap][,sector=512|4096][,queues=N]; may be repeated.
    /// With `swap` all of it is taken for a swap area; areas with a signature are recognised without. With --nbd, disks
    /// without socket= are NBD exports. Of an NBD image: [,on-loss=continue|fail][,write-through]. A server that comes back may
    /// have lost what it had not flushed: with `fail` the next flush then fails, and with `write-through` there is nothing to
    /// lose, at the price of a sync for each write
    #[arg(long, value_name = "KEY=VALUE,...")]
    pub disk: Vec<DiskSpec>,

    /// Socket of the eviction port, which the agent in the guest writes to
    #[arg(long, value_name = "PATH")]
    pub port: Option<PathBuf>,

    /// Offer disks that have no socket to NBD clients, under their names: unix:PATH, tcp:HOST:PORT, or systemd (the sockets
    /// that it passed); may be repeated. Whoever can connect can read and write the disks
    #[arg(long, value_name = "ADDRESS")]
    pub nbd: Vec<nbd::Address>,

    /// Offer the eviction port to NBD clients, as the export remoca-port
    #[arg(long, requires = "nbd", conflicts_with = "port")]
    pub nbd_port: bool,

    /// Group whose members may connect to the sockets of disks, port and NBD, such as that of libvirt's QEMU; its name or number.
    /// Without it only the user of this process may
    #[arg(long, value_name = "GROUP", value_parser = parse_group)]
    pub socket_group: Option<u32>,

    /// Memory of the guest, which the index is made for; a vhost-user front end tells it by itself, an NBD client does not
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = parse_size)]
    pub guest_memory: u64,

    /// Most memory of a guest that the index is made for, whatever a vhost-user front end tells: a guest with more is served all
    /// the same, and fewer of its blocks are known. Costs 12 MiB for each GiB, while such a guest is attached [at least --guest-memory]
    #[arg(long, value_name = "SIZE", default_value = "16G", value_parser = parse_size)]
    pub guest_memory_max: u64,

    /// Memory server: tcp:HOST:PORT or unix:PATH; may be repeated (the pool is placed on one of them); without one,
    /// nothing is cached
    #[arg(long, value_name = "ADDRESS")]
    pub server: Vec<Endpoint>,

    /// Size of the cache
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = parse_size)]
    pub cache: u64,

    /// Control socket [default: NAME.ctl in /run/remoca, for users in $XDG_RUNTIME_DIR/remoca]
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,

    /// Seconds before requests that a killed predecessor had in flight are sent to an NBD image again: so long its server may
    /// still do what that one sent
    #[arg(long, value_name = "SECONDS", default_value_t = 3, value_parser = clap::value_parser!(u64).range(..=3600))]
    pub nbd_settle: u64,

    /// State file, by which a restarted process finds its cache warm; locked, for the owner only, as large as the index
    /// [default: with --name, NAME.state beside the control socket]
    #[arg(long, value_name = "PATH")]
    pub state: Option<PathBuf>,

    /// Start without the disks, and wait at tcp:HOST:PORT or unix:PATH for the process that has them: the VM migrates to this
    /// host. Needs --incoming-key. See `remoca migrate`
    #[arg(long, value_name = "ADDRESS", conflicts_with_all = ["nbd", "fd"])]
    pub incoming: Option<Endpoint>,

    /// The key by which this process and the one that has the disks know each other: FILE (for nobody else to read), or
    /// credential:NAME (LoadCredential= of the systemd unit). `remoca migrate --new-key FILE` makes one. Without --incoming it is not used
    #[arg(long, value_name = "FILE")]
    pub incoming_key: Option<KeySource>,

    /// The disks are not here: they are still to come, or another host has them.
    #[arg(skip)]
    pub away: bool,

    /// Memory for the data of requests in flight; at least 8M for each disk
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = parse_size)]
    pub buffers: u64,

    /// Record every request in this file
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,

    /// Use threads in place of io_uring, as where the system refuses it
    #[arg(long)]
    pub no_io_uring: bool,

    /// Ask the disk for a cached page only if the memory server takes twice the disk's time and 5 ms at least, or fails, even where
    /// the disk is the faster one: spares the disk at the cost of slower reads
    #[arg(long)]
    pub no_hedge: bool,

    /// Never look at what guest memory holds before a read overwrites it, to find evicted pages without an agent
    #[arg(long)]
    pub no_frames: bool,

    /// Print what this vhost-user back end can do, as JSON, and exit
    #[arg(long)]
    pub print_capabilities: bool,

    /// Print, as JSON, that this program could take over from a running one that has these options, and exit
    #[arg(long)]
    pub check_handover: bool,

    /// Leave out one safety rule, to see that the tests notice
    #[cfg(feature = "ablation")]
    #[arg(long, value_name = "RULE")]
    pub omit_rule: Option<String>,

    /// Kill this process when it passes a narrow place for the N-th time
    #[cfg(feature = "ablation")]
    #[arg(long, value_name = "PLACE:N")]
    pub kill_at: Option<String>,

    /// Panic when this process passes a narrow place for the N-th time
    #[cfg(feature = "ablation")]
    #[arg(long, value_name = "PLACE:N")]
    pub panic_at: Option<String>,
}

/// Unit of a disk's requests, as the guest sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Sector {
    #[value(name = "512")]
    Small,
    #[value(name = "4096")]
    Large,
}

impl Sector {
    pub fn bytes(self) -> u32 {
        match self {
            Self::Small => 512,
            Self::Large => 4096,
        }
    }
}

/// One disk as the user described it.
#[derive(Clone, Debug)]
pub struct DiskSpec {
    pub name: Option<String>,
    pub image: String,
    /// `None`: an NBD export.
    pub socket: Option<PathBuf>,
    pub read_only: bool,
    pub swap: bool,
    pub sector: Sector,
    pub queues: u16,
    /// Of an NBD image.
    pub on_loss: OnLoss,
    /// Of an NBD image.
    pub write_through: bool,
}

/// What a lost connection to an NBD server means for writes that were not flushed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum OnLoss {
    #[default]
    Continue,
    Fail,
}

impl DiskArgs {
    /// Returns the images of all disks, in order.
    pub fn images(&self) -> impl Iterator<Item = &str> {
        self.disk.iter().map(|disk| disk.image.as_str()).chain(self.image.as_deref())
    }
}

impl FromStr for DiskSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (mut name, mut image, mut socket) = (None, None, None);
        let (mut read_only, mut swap, mut sector, mut queues) = (false, false, Sector::Small, QUEUES_DEFAULT);
        let (mut on_loss, mut write_through) = (OnLoss::default(), false);
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
                ("on-loss", what) => {
                    on_loss = OnLoss::from_str(what, false).map_err(|_| "on-loss is continue or fail")?;
                }
                ("write-through", "" | "on") => write_through = true,
                ("write-through", "off") => write_through = false,
                _ => {
                    return Err(format!(
                        "`{field}`: a disk has image=, socket=, name=, read-only, swap, sector=, queues=, on-loss= and \
                         write-through"
                    ));
                }
            }
        }
        let image = image.ok_or("a disk needs image=IMAGE")?;
        Ok(Self { name, image, socket, read_only, swap, sector, queues, on_loss, write_through })
    }
}

/// QEMU asks for one queue for each virtual processor unless told otherwise.
pub const QUEUES_DEFAULT: u16 = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_are_described_by_keys() {
        let spec: DiskSpec = "image=/a,socket=/b,read-only,swap,sector=4096,name=root,queues=2".parse().unwrap();
        assert_eq!((spec.image.as_str(), spec.read_only, spec.swap, spec.queues), ("/a", true, true, 2));
        assert_eq!(spec.sector.bytes(), 4096);
        let spec: DiskSpec = "image=nbd://host,on-loss=fail,write-through".parse().unwrap();
        assert_eq!((spec.on_loss, spec.write_through), (OnLoss::Fail, true));
        for bad in ["", "image=/a,on-loss=hope", "socket=/b", "image=/a,socket=/b,x=1", "image=/a,socket=/b,sector=520"]
        {
            assert!(bad.parse::<DiskSpec>().is_err(), "{bad}");
        }
    }
}
