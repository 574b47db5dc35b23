//! What the VM process is compared with: qemu-storage-daemon, which serves the same kind of disk over vhost-user-blk.

use anyhow::{Context, Result};
use std::path::Path;
use std::process::Command;

use super::{Client, Program, disk, pinned};

/// What the daemon serves, and how.
#[derive(Default)]
pub struct PeerOptions {
    /// Delay of each read of the disk; 0 means a raw file without delay.
    pub disk_ms: u32,
    pub image_bytes: u64,
    /// Processor that all threads of the daemon are pinned to.
    pub processor: Option<usize>,
    /// Whether its I/O thread polls its queue for up to 32 us before it sleeps, as it does unless told otherwise. That makes
    /// its answers faster, and its CPU time longer.
    pub polls: bool,
    /// Whether it bypasses the page cache of the host, as the VM process does.
    pub is_direct: bool,
}

/// A running daemon, and a guest that is connected to it.
pub struct Peer {
    pub process: Program,
    pub client: Client,
    // The disk must outlive the process.
    _disk: Option<Program>,
}

impl Peer {
    /// Starts the daemon with a disk in `folder`.
    pub fn start(folder: &Path, name: &str, options: &PeerOptions) -> Result<Self> {
        let (disk, image) = disk(folder, name, options.disk_ms, options.image_bytes, 0)?;
        let socket = folder.join(format!("{name}.vhost"));
        let words = [pinned(options.processor), vec!["qemu-storage-daemon".to_owned()]].concat();
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        let polls = if options.polls { "" } else { ",poll-max-ns=0" };
        command.arg("--object").arg(format!("iothread,id=thread{polls}"));
        let node = match image.strip_prefix("nbd+unix:///?socket=") {
            Some(path) => format!("driver=nbd,node-name=disk,server.type=unix,server.path={path},read-only=on"),
            None => {
                let direct = if options.is_direct { "on" } else { "off" };
                format!(
                    "driver=file,node-name=disk,filename={image},aio=io_uring,locking=off,read-only=on,cache.direct={direct}"
                )
            }
        };
        command.arg("--blockdev").arg(node).arg("--export").arg(format!(
            "vhost-user-blk,id=export,node-name=disk,iothread=thread,addr.type=unix,addr.path={}",
            socket.display()
        ));
        let process = Program::start(&mut command, &socket)
            .context("qemu-storage-daemon, which is needed for comparison (apt install qemu-utils)")?;
        let mut client = Client::connect(&socket, options.image_bytes / 4096, false)?;
        // Without direct I/O the image is in the page cache of the host from here on.
        client.pass(32)?;
        Ok(Self { process, client, _disk: disk })
    }
}
