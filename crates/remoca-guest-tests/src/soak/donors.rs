//! The memory servers of a soak: two behind faulty networks, and one on the VM's host, which has the local tier.

use super::events::Event;
use super::proxy::Proxy;
use crate::{Host, LIMIT, Result};
use remoca_lab::Service;
use remoca_lab::workload::pattern::Random;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

const MIB: u64 = 1 << 20;
/// Memory of the server with the local tier: as much as the largest one.
const TIER_MEMORY: &str = "128M";
/// Size of the local tier at the start, and after the torment.
pub const TIER_BYTES: u64 = 32 * MIB;

/// A memory server, and the network in front of it.
pub struct Donor {
    program: PathBuf,
    socket: PathBuf,
    log: PathBuf,
    pub proxy: Proxy,
    pub service: Service,
}

impl Donor {
    /// Starts both.
    pub fn start(program: &Path, folder: &Path, name: &str, memory: &str) -> Result<Donor> {
        let socket = folder.join(format!("{name}.sock"));
        let log = folder.join(format!("{name}.log"));
        let service = serve(program, &socket, &log, memory)?;
        let proxy = Proxy::start(&folder.join(format!("{name}-net.sock")), socket.clone())?;
        Ok(Donor { program: program.to_owned(), socket, log, proxy, service })
    }

    /// Starts the server again, with other memory.
    pub fn start_again(&mut self, memory: &str) -> Result<()> {
        self.service = serve(&self.program, &self.socket, &self.log, memory)?;
        Ok(())
    }
}

fn serve(program: &Path, socket: &Path, log: &Path, memory: &str) -> Result<Service> {
    let mut command = Command::new(program);
    // Not locked: a soak runs where little memory can be locked, and locking has its own tests.
    command.args(["serve", "--no-lock", "--memory", memory, "--listen"]);
    command.arg(format!("unix:{}", socket.display()));
    let mut service = Service::start("remoca serve", command, log)?;
    service.wait_for_socket(socket, LIMIT)?;
    Ok(service)
}

/// The memory server on the VM's host. Its pool is mapped, so there is no network in front of it.
pub struct Tier {
    program: PathBuf,
    socket: PathBuf,
    log: PathBuf,
    service: Service,
}

impl Tier {
    /// Starts the server.
    pub fn start(program: &Path, folder: &Path) -> Result<Tier> {
        let (socket, log) = (folder.join("tier.sock"), folder.join("tier.log"));
        let service = serve(program, &socket, &log, TIER_MEMORY)?;
        Ok(Tier { program: program.to_owned(), socket, log, service })
    }

    /// Returns the options of a VM process that has its local tier here.
    pub fn options(&self) -> [String; 4] {
        let server = format!("local:{}", self.socket.display());
        ["--local".into(), TIER_BYTES.to_string(), "--local-server".into(), server]
    }

    /// Kills the server.
    pub fn kill(&mut self) -> Result<()> {
        Ok(self.service.kill()?)
    }

    /// Starts the server again.
    pub fn start_again(&mut self) -> Result<()> {
        self.service = serve(&self.program, &self.socket, &self.log, TIER_MEMORY)?;
        Ok(())
    }

    /// Performs an event of the local tier, with the server away or stopped for as long as given.
    pub fn perform(&mut self, event: Event, host: &Host, random: &mut Random, away: Duration) -> Result<()> {
        match event {
            Event::ResizeLocal => host.set_local(random.below(9) * 16 * MIB).map(drop),
            Event::KillLocalServer => {
                self.kill()?;
                sleep(away);
                self.start_again()
            }
            Event::RestartLocalServer => {
                self.service.terminate(LIMIT)?;
                sleep(away);
                self.start_again()
            }
            Event::StopLocalServer => {
                self.service.freeze()?;
                sleep(away);
                Ok(self.service.thaw()?)
            }
            _ => Err(format!("{} is not an event of the local tier", event.name()).into()),
        }
    }
}
