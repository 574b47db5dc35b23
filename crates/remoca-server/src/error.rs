//! Why a server does not start, in the operator's terms: what is wrong and what to do.

use std::io;
use std::path::PathBuf;

use crate::config::{ListenAddress, Size};

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("no address to listen on: give --listen tcp:HOST:PORT or --listen unix:PATH")]
    NoAddress,
    #[error("the memory to serve is 0: give --memory, as in --memory 2G")]
    NoMemory,
    #[error("--memory {memory_bytes} is not a multiple of 2 MiB ({})", Size(*memory_bytes))]
    MemoryNotMultiple { memory_bytes: u64 },
    #[error("--memory {} is more than one server can manage ({})", Size(*memory_bytes), Size(*most_bytes))]
    MemoryTooLarge { memory_bytes: u64, most_bytes: u64 },
    #[error(
        "--memory {}: this host has only {} available now (MemAvailable in /proc/meminfo); \
         ask for less, or free some",
        Size(*memory_bytes), Size(*available_bytes)
    )]
    NotAvailable { memory_bytes: u64, available_bytes: u64 },
    #[error(
        "--memory {}: the control group of this process may use only {} ({}); raise that limit \
         (MemoryMax= in a systemd unit), or ask for less",
        Size(*memory_bytes), Size(*limit_bytes), path.display()
    )]
    GroupLimit { memory_bytes: u64, limit_bytes: u64, path: PathBuf },
    #[error(
        "cannot lock {} of memory: the limit on locked memory (RLIMIT_MEMLOCK) is {}; raise it with \
         `ulimit -l unlimited` or LimitMEMLOCK=infinity in the systemd unit, or choose --no-lock and let the host swap \
         pages out",
        Size(*memory_bytes), Size(*limit_bytes)
    )]
    LockLimit { memory_bytes: u64, limit_bytes: u64 },
    #[error("cannot lock {} of memory: {source}; ask for less, or choose --no-lock", Size(*memory_bytes))]
    Lock { memory_bytes: u64, source: io::Error },
    #[error("cannot map {} of memory: {source}", Size(*memory_bytes))]
    Map { memory_bytes: u64, source: io::Error },
    #[error("--quota is 0: no client could have a page")]
    NoQuota,
    #[error("--quota {quota_bytes} is not a multiple of a page (4096 bytes)")]
    QuotaNotMultiple { quota_bytes: u64 },
    #[error("--quota {} is more than --memory {}", Size(*quota_bytes), Size(*memory_bytes))]
    QuotaAboveMemory { quota_bytes: u64, memory_bytes: u64 },
    #[error("--threads {threads}: 1 to {most} are possible")]
    Threads { threads: usize, most: usize },
    #[error("--max-clients {clients}: 1 to {most} are possible")]
    Clients { clients: usize, most: usize },
    #[error("--listen {address} is given twice")]
    ListenTwice { address: ListenAddress },
    #[error("--listen {address}: --listen {earlier} has that address already; leave one of them out")]
    ListenOverlap { address: ListenAddress, earlier: ListenAddress },
    #[error("--control {} is also an address to listen on; choose another path", path.display())]
    ControlIsAddress { path: PathBuf },
    #[error("cannot find out what host `{host}` is")]
    Resolve { host: String, source: io::Error },
    #[error("cannot listen on {address}")]
    Listen { address: ListenAddress, source: io::Error },
    #[error("cannot listen on {address}: another program has this port (`ss -ltnp` shows which)")]
    PortTaken { address: ListenAddress },
    #[error("cannot listen on {address}: this host has no such address")]
    NotOurAddress { address: ListenAddress },
    #[error("cannot listen on {}: the path of a Unix socket has at most {most} bytes, this one has {length}", path.display())]
    PathTooLong { path: PathBuf, length: usize, most: usize },
    #[error("cannot listen on {}: the folder does not exist", path.display())]
    NoFolder { path: PathBuf },
    #[error("cannot listen on {}: another process listens there; stop it, or choose another path", path.display())]
    SocketTaken { path: PathBuf },
    #[error("cannot listen on {}: it exists and is not a socket; choose another path, or remove it", path.display())]
    NotASocket { path: PathBuf },
    #[error("cannot start a thread or its event loop: {0}")]
    Thread(io::Error),
    #[error("the system gives no random numbers: {0}")]
    Random(io::Error),
}

impl StartError {
    /// Returns whether a further start fails as well until somebody changes an option or the host.
    pub fn is_lasting(&self) -> bool {
        match self {
            Self::NoAddress
            | Self::NoMemory
            | Self::MemoryNotMultiple { .. }
            | Self::MemoryTooLarge { .. }
            | Self::GroupLimit { .. }
            | Self::LockLimit { .. }
            | Self::NoQuota
            | Self::QuotaNotMultiple { .. }
            | Self::QuotaAboveMemory { .. }
            | Self::Threads { .. }
            | Self::Clients { .. }
            | Self::ListenTwice { .. }
            | Self::ListenOverlap { .. }
            | Self::ControlIsAddress { .. }
            | Self::PathTooLong { .. }
            | Self::NoFolder { .. }
            | Self::NotASocket { .. } => true,
            Self::Listen { source, .. } => source.kind() == io::ErrorKind::PermissionDenied,
            // Memory is freed, an address comes, another server ends.
            Self::NotAvailable { .. }
            | Self::Lock { .. }
            | Self::Map { .. }
            | Self::Resolve { .. }
            | Self::PortTaken { .. }
            | Self::NotOurAddress { .. }
            | Self::SocketTaken { .. }
            | Self::Thread(_)
            | Self::Random(_) => false,
        }
    }
}
