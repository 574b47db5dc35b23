//! The command line of `remoca disk`, and what it and the files of the configuration say together.

use super::{change, qcow2};
use crate::group::parse_group;
use crate::number::whole_in;
use crate::settings::layers::Merged;
use crate::settings::schema::Schema;
use crate::settings::{Files, Folder, fields};
use crate::size::parse_size;
#[cfg(feature = "ablation")]
use anyhow::Context;
use anyhow::Result;
use clap::{ArgAction, Args, FromArgMatches};
use remoca_core::rules::Rules;
use remoca_disk::start::{Address, DiskOptions, Incoming, KeySource, Options, PortOptions};
use remoca_io::address::Endpoint;
use std::ffi::OsString;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Flags that are no settings, or say where the process and its files are.
const NOT_IN_FILES: &[&str] = &[
    "name",
    "image",
    "socket",
    "fd",
    "read-only",
    "config",
    "control",
    "print-capabilities",
    "check-handover",
    "omit-rule",
    "no-curves",
    "kill-at",
    "panic-at",
    "hold-at",
];
/// Variable with the arguments of a former unit.
pub const FORMER_VARIABLE: &str = "REMOCA_DISK_ARGS";
/// Flags that describe a disk.
pub const DISK_FLAGS: [&str; 4] = ["disk", "image", "socket", "read-only"];
/// Flags that no two VMs of a host can share.
pub const PER_VM: &[&str] = &["disk", "port", "nbd", "nbd-port", "state", "trace", "incoming"];

/// Serve the disks of one VM, with a cache in a memory server's memory.
///
/// Every flag that is not given is looked up in the configuration: first in vms/NAME.toml, then in the table [vms] of remoca.toml.
/// A key there is a flag without its dashes. What a file has turned on, `=false` turns off: --no-hedge=false.
///
/// With a subcommand: change the disks of a VM process that runs.
#[derive(Args, Debug)]
#[command(args_conflicts_with_subcommands = true)]
pub struct DiskArgs {
    #[command(subcommand)]
    pub(super) change: Option<change::Change>,

    /// Name of this VM, for its configuration, `remoca status` and `remoca set` [default: the process id]
    #[arg(long, value_name = "NAME")]
    pub(super) name: Option<String>,

    #[command(flatten)]
    pub(super) folder: Folder,

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

    #[arg(long, value_name = "KEY=VALUE,...", value_parser = fields::parse, help = fields::help())]
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
    /// but fewer of its blocks are known. Costs 7.5 MiB per GiB while such a guest is attached [at least --guest-memory]
    #[arg(long, value_name = "SIZE", default_value = "16G", value_parser = parse_size)]
    guest_memory_max: u64,

    /// Memory server: tcp:HOST:PORT or unix:PATH, or local:PATH for one on this host, whose memory this process reads and writes
    /// by itself; may be repeated: the cache is on one of them, or in parts on several. Without one, only --local caches
    #[arg(long, value_name = "ADDRESS")]
    server: Vec<Endpoint>,

    /// Size of the cache at the memory servers
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = parse_size)]
    cache: u64,

    /// Size of the local tier: memory of this host, in front of the memory servers; pages that fall out of it unread move to
    /// them. 0: none
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = parse_size)]
    local: u64,

    /// Memory server of this host that has the local tier: local:PATH, where it listens at unix:PATH
    #[arg(long, value_name = "ADDRESS", default_value = "local:/run/remoca-serve/memory.sock",
          value_parser = Endpoint::of_local_tier)]
    local_server: Endpoint,

    /// Control socket [default: NAME.ctl in /run/remoca, for users in $XDG_RUNTIME_DIR/remoca]
    #[arg(long, value_name = "PATH")]
    pub(super) control: Option<PathBuf>,

    /// Seconds to wait after a predecessor was killed, before an NBD image gets the requests that it had in flight, or those of a
    /// guest that begins anew: the image's server may still be working on the former
    #[arg(long, value_name = "SECONDS", default_value_t = 3,
          value_parser = whole_in("number of seconds", 0_u64..=3600))]
    nbd_settle: u64,

    /// State file that keeps the cache warm across restarts; locked, readable only by its owner, as large as the index
    /// [default: with --name, NAME.state beside the control socket]
    #[arg(long, value_name = "PATH")]
    state: Option<PathBuf>,

    /// Start without the disks, and wait at tcp:HOST:PORT or unix:PATH for the process that has them, because the VM migrates
    /// to this host. Needs --incoming-key. See `remoca migrate`
    #[arg(long, value_name = "ADDRESS", conflicts_with_all = ["nbd", "fd"], value_parser = Endpoint::of_process)]
    incoming: Option<Endpoint>,

    /// Key that this process shares with the one that has the disks: FILE (readable only by its owner), or credential:NAME
    /// (LoadCredential= of the systemd unit). `remoca migrate --new-key FILE` makes one. Ignored without --incoming
    #[arg(long, value_name = "FILE")]
    incoming_key: Option<KeySource>,

    /// Memory for the data of requests in flight; at least 8M per disk
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = parse_size)]
    buffers: u64,

    /// Record every request in this file. A trace that is there goes on; any other file is refused
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,

    /// Use threads instead of io_uring, as on systems that refuse it
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true, default_missing_value = "true",
          default_value_t = false, action = ArgAction::Set, hide_default_value = true, hide_possible_values = true)]
    no_io_uring: bool,

    /// Longest time in microseconds to look for the next request before sleeping, as QEMU's I/O threads do. It saves the time to be
    /// woken where requests follow each other closely. 0 to 1000; 0: never look
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 32,
          value_parser = whole_in("number of microseconds", 0_u64..=1000))]
    poll_max_us: u64,

    /// Read a cached page from the disk only if the memory server fails, or takes at least 5 ms and twice the disk's time, even
    /// where the disk is faster. Spares the disk at the cost of slower reads
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true, default_missing_value = "true",
          default_value_t = false, action = ArgAction::Set, hide_default_value = true, hide_possible_values = true)]
    no_hedge: bool,

    /// Do not search guest memory for evicted pages before reads overwrite it (which finds them without an agent)
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true, default_missing_value = "true",
          default_value_t = false, action = ArgAction::Set, hide_default_value = true, hide_possible_values = true)]
    no_frames: bool,

    /// Print what this vhost-user back end can do, as JSON, and exit
    #[arg(long)]
    pub(super) print_capabilities: bool,

    /// Print as JSON that this program can take over from a running one with these options, and exit
    #[arg(long)]
    pub(super) check_handover: bool,

    /// Leave out one safety rule, to check that the tests notice
    #[cfg(feature = "ablation")]
    #[arg(long, value_name = "RULE")]
    omit_rule: Option<String>,

    /// Keep no miss-ratio curves, to measure what they cost
    #[cfg(feature = "ablation")]
    #[arg(long)]
    no_curves: bool,

    /// Kill this process when it passes a narrow place for the N-th time
    #[cfg(feature = "ablation")]
    #[arg(long, value_name = "PLACE:N")]
    pub(super) kill_at: Option<String>,

    /// Panic when this process passes a narrow place for the N-th time
    #[cfg(feature = "ablation")]
    #[arg(long, value_name = "PLACE:N")]
    pub(super) panic_at: Option<String>,

    /// Let threads wait at a narrow place as long as a file exists
    #[cfg(feature = "ablation")]
    #[arg(long, value_name = "PLACE:FILE")]
    pub(super) hold_at: Vec<String>,
}

impl DiskArgs {
    /// Returns the disks as they are configured.
    pub fn disks(&self) -> Vec<DiskOptions> {
        let mut disks = self.disk.clone();
        if let Some(image) = &self.image {
            let socket = self.socket.clone().or(self.fd.map(|_| PathBuf::from("fd")));
            disks.push(DiskOptions { socket, read_only: self.read_only, ..DiskOptions::new(image.clone()) });
        }
        disks
    }
}

/// Returns the options of the VM process at `control` with these arguments, and these files.
///
/// # Errors
/// As the process itself reports them when it starts.
pub fn options_of(files: &Files, words: &[OsString], control: &Path) -> Result<Options> {
    options(configured(files, words)?, control.into())
}

/// Returns the keys that files may have.
pub fn schema() -> Schema {
    Schema::new(DiskArgs::augment_args(clap::Command::new("disk")), NOT_IN_FILES, PER_VM)
}

/// Returns the disks that the command line describes.
///
/// # Errors
/// As clap reports them.
pub fn disks_of(matches: &clap::ArgMatches) -> Result<Vec<DiskOptions>> {
    Ok(DiskArgs::from_arg_matches(matches)?.disks())
}

/// Returns the arguments that were typed, completed by those in files.
///
/// # Errors
/// If there is a mistake in them.
pub fn configured(files: &Files, words: &[OsString]) -> Result<DiskArgs> {
    let [vm, host] = files.settings_of_vm(schema)?;
    let merged = Merged::new(&schema(), words, &[&vm, &host])?;
    let mut args = DiskArgs::from_arg_matches(&merged.matches)?;
    args.disk.extend(merged.disks.into_iter().flatten().map(|disk| disk.options));
    Ok(args)
}

/// Returns the options of the VM process. Fills in the defaults that depend on other options.
pub(super) fn options(args: DiskArgs, control: PathBuf) -> Result<Options> {
    let name = args.name.clone().unwrap_or_else(|| std::process::id().to_string());
    let mut disks = args.disks();
    qcow2::redirect(&mut disks, &control, &name)?;
    let own_state = || args.name.as_ref().map(|name| control.with_file_name(format!("{name}.state")));
    let port = match args.port {
        Some(socket) => PortOptions::Socket(socket),
        None if args.nbd_port => PortOptions::NbdExport,
        None => PortOptions::None,
    };
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
        local: args.local,
        local_server: args.local_server,
        incoming: args.incoming.map(|endpoint| Incoming { endpoint, key: args.incoming_key }),
        buffers: args.buffers,
        trace: args.trace,
        has_predecessor: false,
        uses_io_uring: !args.no_io_uring,
        poll_time_max: Duration::from_micros(args.poll_max_us),
        hedges: !args.no_hedge,
        looks_at_frames: !args.no_frames,
        notice: None,
        #[cfg(feature = "ablation")]
        keeps_curves: !args.no_curves,
        #[cfg(not(feature = "ablation"))]
        keeps_curves: true,
        #[cfg(feature = "ablation")]
        rules: rules(args.omit_rule.as_deref())?,
        #[cfg(not(feature = "ablation"))]
        rules: Rules::default(),
    })
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
