//! The disks of VM processes: an image with the content of [`super::content`], as a raw file or behind nbdkit.

use anyhow::Result;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::{Program, content};
use crate::delay::DelayProxy;
use crate::server::free_port;

/// Makes a disk of `bytes` with content and as many zeroes as given, and returns it with the address of its image.
pub(super) fn disk(
    folder: &Path,
    name: &str,
    delay_ms: u32,
    bytes: u64,
    zero_bytes: u64,
) -> Result<(Option<Program>, String)> {
    if delay_ms == 0 {
        let path = folder.join(format!("{name}.img"));
        std::fs::write(&path, content::of(0..bytes))?;
        std::fs::OpenOptions::new().write(true).open(&path)?.set_len(bytes + zero_bytes)?;
        return Ok((None, path.display().to_string()));
    }
    let socket = folder.join(format!("{name}.nbd"));
    let mut command = Command::new("nbdkit");
    command.args(["-f", "-t", "64", "-U"]).arg(&socket).args(["--filter=delay", "--filter=truncate", "pattern"]);
    command.arg(format!("size={bytes}")).arg(format!("truncate={}", bytes + zero_bytes));
    command.arg(format!("rdelay={delay_ms}ms"));
    // Its socket is there before it listens.
    let program = Program::start_until(&mut command, || UnixStream::connect(&socket).is_ok())?;
    Ok((Some(program), format!("nbd+unix:///?socket={}", socket.display())))
}

/// An image behind nbdkit whose answers are late by a time that can change: it is read without delay to fill a cache, and is a
/// slow disk from then on.
pub struct DelayedImage {
    /// Its address, as `remoca disk` takes it.
    pub address: String,
    proxy: DelayProxy,
    _nbdkit: Program,
}

impl DelayedImage {
    /// Starts an image of `bytes` with content, without delay.
    pub fn start(bytes: u64) -> Result<Self> {
        let [at, anywhere] = [free_port()?, 0].map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
        let mut command = Command::new("nbdkit");
        command.args(["-f", "-t", "64", "-i", "127.0.0.1", "-p", &at.port().to_string()]);
        command.arg("pattern").arg(format!("size={bytes}"));
        let nbdkit = Program::start_at(&mut command, at)?;
        let proxy = DelayProxy::start(anywhere, at, Duration::ZERO)?;
        Ok(Self { address: format!("nbd://{}/", proxy.address), proxy, _nbdkit: nbdkit })
    }

    /// Changes how late answers are from now on.
    pub fn set_delay(&self, delay: Duration) {
        self.proxy.set_delay(delay);
    }
}
