//! `remoca disk`: turns the command line into the options of a VM process.

use crate::group::parse_group;
use crate::runtime;
use crate::size::parse_size;
use anyhow::{Context, Result, bail};
use clap::Args;
use remoca_core::rules::Rules;
use remoca_disk::handover;
use remoca_disk::start::{self, Address, DiskOptions, Incoming, KeySource, Options, PortOptions};
use remoca_io::address::Endpoint;
use remoca_store::OnLostConnection;
use std::io::Write;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::time::Duration;

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
    /// `swap` declares the whole disk a swap area; areas with a signature are recognised without it. With --nbd, disks
    /// without socket= are NBD exports. An NBD image also takes [,on-loss=continue|fail][,write-through]: a server that comes
    /// back may have lost writes that it had not flushed. With `fail` the next flush then fails. With `write-through` nothing
    /// can be lost, but each write costs a sync
    #[arg(long, value_name = "KEY=VALUE,...", value_parser = parse_disk)]
    disk: Vec<DiskOptions>,

    /// Socket of the eviction port, which the agent in the guest writes to
    #[arg(long, value_name = "PATH")]
    port: Option<PathBuf>,

    /// Offer disks that have no socket to NBD clients, under their names: unix:PATH, tcp:HOST:PORT, or systemd (the sockets
    /// that it passed); may be repeated. Anyone who can connect can read and write the disks
    #[arg(long, value_name = "ADDRESS")]
    nbd: Vec<Address>,

    /// Offer the eviction port to NBD clients, as the export remoca-port
    #[arg(long, requires = "nbd", conflicts_with = "port")]
    nbd_port: bool,

    /// Group whose members may connect to the sockets of disks, port and NBD, such as that of libvirt's QEMU; its name or
    /// number [default: only the user of this process]
    #[arg(long, value_name = "GROUP", value_parser = parse_group)]
    socket_group: Option<u32>,

    /// Guest memory that the index is sized for; a vhost-user front end reports it, an NBD client does not
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = parse_size)]
    guest_memory: u64,

    /// Maximum guest memory that the index is sized for, whatever a vhost-user front end reports. A larger guest is still served,
    /// but fewer of its blocks are known. Costs 12 MiB per GiB while such a guest is attached [at least --guest-memory]
    #[arg(long, value_name = "SIZE", default_value = "16G", value_parser = parse_size)]
    guest_memory_max: u64,

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

    /// Seconds to wait before sending an NBD image the requests that a killed predecessor had in flight: its server may still
    /// be working on them
    #[arg(long, value_name = "SECONDS", default_value_t = 3, value_parser = clap::value_parser!(u64).range(..=3600))]
    nbd_settle: u64,

    /// State file that keeps the cache warm across restarts; locked, readable only by its owner, as large as the index
    /// [default: with --name, NAME.state beside the control socket]
    #[arg(long, value_name = "PATH")]
    state: Option<PathBuf>,

    /// Start without the disks, and wait at tcp:HOST:PORT or unix:PATH for the process that has them, because the VM migrates
    /// to this host. Needs --incoming-key. See `remoca migrate`
    #[arg(long, value_name = "ADDRESS", conflicts_with_all = ["nbd", "fd"])]
    incoming: Option<Endpoint>,

    /// Key that this process shares with the one that has the disks: FILE (readable only by its owner), or credential:NAME
    /// (LoadCredential= of the systemd unit). `remoca migrate --new-key FILE` makes one. Ignored without --incoming
    #[arg(long, value_name = "FILE")]
    incoming_key: Option<KeySource>,

    /// Memory for the data of requests in flight; at least 8M per disk
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = parse_size)]
    buffers: u64,

    /// Record every request in this file
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,

    /// Use threads instead of io_uring, as on systems that refuse it
    #[arg(long)]
    no_io_uring: bool,

    /// Read a cached page from the disk only if the memory server fails, or takes at least 5 ms and twice the disk's time, even
    /// where the disk is faster. Spares the disk at the cost of slower reads
    #[arg(long)]
    no_hedge: bool,

    /// Do not search guest memory for evicted pages before reads overwrite it (which finds them without an agent)
    #[arg(long)]
    no_frames: bool,

    /// Print what this vhost-user back end can do, as JSON, and exit
    #[arg(long)]
    print_capabilities: bool,

    /// Print as JSON that this program can take over from a running one with these options, and exit
    #[arg(long)]
    check_handover: bool,

    /// Leave out one safety rule, to check that the tests notice
    #[cfg(feature = "ablation")]
    #[arg(long, value_name = "RULE")]
    omit_rule: Option<String>,

    /// Kill this process when it passes a narrow place for the N-th time
    #[cfg(feature = "ablation")]
    #[arg(long, value_name = "PLACE:N")]
    kill_at: Option<String>,

    /// Panic when this process passes a narrow place for the N-th time
    #[cfg(feature = "ablation")]
    #[arg(long, value_name = "PLACE:N")]
    panic_at: Option<String>,
}

/// Runs the subcommand.
///
/// # Errors
/// If an option cannot be used; the text says how to correct it.
pub fn run(args: DiskArgs) -> Result<()> {
    if args.print_capabilities {
        return Ok(writeln!(std::io::stdout(), r#"{{"type": "block", "features": ["read-only", "blk-file"]}}"#)?);
    }
    if args.check_handover {
        return Ok(writeln!(std::io::stdout(), "{}", handover::confirmation())?);
    }
    #[cfg(feature = "ablation")]
    arm(&args)?;
    start::run(&options(args)?)
}

/// Returns the options of the VM process. Fills in the defaults that depend on other options.
fn options(args: DiskArgs) -> Result<Options> {
    let name = args.name.clone().unwrap_or_else(|| std::process::id().to_string());
    if name.is_empty() || name.contains('/') {
        bail!("invalid VM name `{name}`: names are used in file names and must not be empty or contain `/`");
    }
    let control = match &args.control {
        Some(path) => path.clone(),
        None => {
            let directory = runtime::directory()?;
            std::fs::create_dir_all(&directory).with_context(|| format!("cannot create {}", directory.display()))?;
            runtime::socket_of(&name)?
        }
    };
    let own_state = || args.name.as_ref().map(|name| control.with_file_name(format!("{name}.state")));
    let port = match args.port {
        Some(socket) => PortOptions::Socket(socket),
        None if args.nbd_port => PortOptions::NbdExport,
        None => PortOptions::None,
    };
    let mut disks = args.disk;
    if let Some(image) = args.image {
        let socket = args.socket.or(args.fd.map(|_| PathBuf::from("fd")));
        disks.push(DiskOptions { socket, read_only: args.read_only, ..DiskOptions::new(image) });
    }
    Ok(Options {
        is_named: args.name.is_some() || args.control.is_some(),
        state: args.state.or_else(own_state),
        name,
        control,
        disks,
        fd: args.fd,
        port,
        nbd: args.nbd,
        nbd_settle: Duration::from_secs(args.nbd_settle),
        socket_group: args.socket_group,
        guest_memory: args.guest_memory,
        guest_memory_max: args.guest_memory_max,
        servers: args.server,
        cache: args.cache,
        incoming: args.incoming.map(|endpoint| Incoming { endpoint, key: args.incoming_key }),
        buffers: args.buffers,
        trace: args.trace,
        uses_io_uring: !args.no_io_uring,
        hedges: !args.no_hedge,
        looks_at_frames: !args.no_frames,
        #[cfg(feature = "ablation")]
        rules: rules(args.omit_rule.as_deref())?,
        #[cfg(not(feature = "ablation"))]
        rules: Rules::default(),
    })
}

/// Parses `--disk KEY=VALUE,...`.
fn parse_disk(text: &str) -> Result<DiskOptions, String> {
    let (mut disk, mut image) = (DiskOptions::new(String::new()), None);
    for field in text.split(',') {
        let (key, value) = field.split_once('=').unwrap_or((field, ""));
        match (key, value) {
            ("name", name) => disk.name = Some(name.to_owned()),
            ("image", path) if !path.is_empty() => image = Some(path.to_owned()),
            ("socket", path) if !path.is_empty() => disk.socket = Some(PathBuf::from(path)),
            ("read-only", "" | "on") => disk.read_only = true,
            ("read-only", "off") => disk.read_only = false,
            ("swap", "" | "on") => disk.swap = true,
            ("swap", "off") => disk.swap = false,
            ("sector", "512") => disk.sector = 512,
            ("sector", "4096") => disk.sector = 4096,
            ("sector", _) => return Err("sector must be 512 or 4096".into()),
            ("queues", count) => {
                disk.queues = count.parse().map_err(|_| format!("`{count}` is not a number of queues"))?
            }
            ("on-loss", "continue") => disk.on_loss = OnLostConnection::Continue,
            ("on-loss", "fail") => disk.on_loss = OnLostConnection::FailFlush,
            ("on-loss", _) => return Err("on-loss must be continue or fail".into()),
            ("write-through", "" | "on") => disk.write_through = true,
            ("write-through", "off") => disk.write_through = false,
            _ => {
                return Err(format!(
                    "invalid disk field `{field}`: known are image=, socket=, name=, read-only, swap, sector=, queues=, \
                     on-loss= and write-through"
                ));
            }
        }
    }
    Ok(DiskOptions { image: image.ok_or("a disk needs image=IMAGE")?, ..disk })
}

/// Arms the kill point or panic point given on the command line. Fails if both are given.
#[cfg(feature = "ablation")]
fn arm(args: &DiskArgs) -> Result<()> {
    use remoca_io::narrow::{End, end_at};
    for (option, end) in [(&args.kill_at, End::Kill), (&args.panic_at, End::Panic)] {
        let Some(place) = option else { continue };
        let (place, passage) = place.split_once(':').context("a place has the form PLACE:N")?;
        end_at(place, passage.parse().context("a place has the form PLACE:N")?, end).map_err(anyhow::Error::msg)?;
    }
    Ok(())
}

/// Returns all safety rules, without the one named `omitted` if there is a name.
#[cfg(feature = "ablation")]
fn rules(omitted: Option<&str>) -> Result<Rules> {
    use remoca_core::rules::Rule;
    let Some(name) = omitted else { return Ok(Rules::default()) };
    let found = Rule::ALL.iter().find(|(known, _)| *known == name);
    let (_, rule) = found.with_context(|| format!("there is no rule `{name}`"))?;
    tracing::error!("THE SAFETY RULE {name} IS LEFT OUT: this disk will be damaged");
    Ok(Rules::without(*rule))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_are_described_by_keys() {
        let disk = parse_disk("image=/a,socket=/b,read-only,swap,sector=4096,name=root,queues=2").unwrap();
        assert_eq!((disk.image.as_str(), disk.read_only, disk.swap, disk.queues), ("/a", true, true, 2));
        assert_eq!((disk.sector, disk.name.as_deref()), (4096, Some("root")));
        let disk = parse_disk("image=nbd://host,on-loss=fail,write-through").unwrap();
        assert_eq!((disk.on_loss, disk.write_through), (OnLostConnection::FailFlush, true));
        for bad in ["", "image=/a,on-loss=hope", "socket=/b", "image=/a,socket=/b,x=1", "image=/a,socket=/b,sector=520"]
        {
            assert!(parse_disk(bad).is_err(), "{bad}");
        }
    }
}
