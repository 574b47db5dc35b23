//! Memory servers of the product.

use anyhow::{Result, ensure};
use remoca_io::fake_manager::FakeManager;
use remoca_server::Status;
use std::fs::File;
use std::io::Read;
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Program, remoca};

/// How a memory server is started.
#[derive(Clone, Copy, Default)]
pub struct ServerOptions<'a> {
    /// What is put before the command, to pin it or to run it elsewhere.
    pub prefix: &'a [String],
    /// Its memory, as on the command line; `None` means 256 MiB.
    pub memory: Option<&'a str>,
    /// Service manager that keeps its mapped pools. Such a server has no prefix.
    pub manager: Option<&'a FakeManager>,
    /// Path of its control socket.
    pub control: Option<&'a Path>,
}

/// A memory server of the product.
pub struct MemoryServer {
    pub process: Program,
    /// Its address, as `remoca disk` takes it.
    pub endpoint: String,
    /// Path of its Unix socket; empty if it has none.
    pub socket: PathBuf,
}

impl MemoryServer {
    /// Starts a memory server at a Unix socket in `folder`.
    pub fn start(folder: &Path, options: &ServerOptions<'_>) -> Result<Self> {
        let socket = folder.join("server.sock");
        let endpoint = format!("unix:{}", socket.display());
        // A socket that a killed server left behind would look like one that listens.
        let _ = std::fs::remove_file(&socket);
        let process = Program::start(&mut options.command(&endpoint)?, &socket)?;
        Ok(Self { process, endpoint, socket })
    }

    /// Starts a memory server at a TCP address.
    pub fn start_at(address: SocketAddr, options: &ServerOptions<'_>) -> Result<Self> {
        let endpoint = format!("tcp:{address}");
        let process = Program::start_at(&mut options.command(&endpoint)?, address)?;
        Ok(Self { process, endpoint, socket: PathBuf::new() })
    }

    /// Returns the memory of the server's mapped pools. It can be looked at when the server has closed it.
    pub fn pool_memory(&self) -> Result<Vec<File>> {
        let mut files = Vec::new();
        for file in std::fs::read_dir(format!("/proc/{}/fd", self.process.pid()))? {
            let path = file?.path();
            // The server may close one meanwhile.
            let link = std::fs::read_link(&path).unwrap_or_default();
            if link.to_string_lossy().starts_with("/memfd:remoca-pool") {
                files.push(File::open(path)?);
            }
        }
        Ok(files)
    }

    /// Returns the address of the server's Unix socket for a VM process that reads and writes its pool by itself.
    pub fn local_endpoint(&self) -> String {
        format!("local:{}", self.socket.display())
    }
}

/// Starts a memory server at a Unix socket. `prefix` is put before the command, to pin it.
pub fn memory_server(folder: &Path, prefix: &[String]) -> Result<MemoryServer> {
    MemoryServer::start(folder, &ServerOptions { prefix, ..ServerOptions::default() })
}

/// Starts a memory server at a TCP address. `prefix` is put before the command, to pin it or to run it elsewhere.
pub fn memory_server_at(address: SocketAddr, prefix: &[String]) -> Result<MemoryServer> {
    MemoryServer::start_at(address, &ServerOptions { prefix, ..ServerOptions::default() })
}

/// Returns the status that a memory server reports at its control socket.
pub fn status_at(control: &Path) -> Result<Status> {
    let mut text = String::new();
    UnixStream::connect(control)?.read_to_string(&mut text)?;
    Ok(serde_json::from_str(&text)?)
}

impl ServerOptions<'_> {
    fn command(&self, endpoint: &str) -> Result<Command> {
        let program = remoca()?;
        let mut command = match (self.manager, self.prefix) {
            (Some(manager), prefix) => {
                ensure!(prefix.is_empty(), "a service is not started by another command");
                manager.service(&program)
            }
            (None, [first, rest @ ..]) => {
                let mut command = Command::new(first);
                command.args(rest).arg(program);
                command
            }
            (None, []) => Command::new(program),
        };
        command.args(["serve", "--listen", endpoint, "--memory", self.memory.unwrap_or("256M"), "--no-lock"]);
        if let Some(control) = self.control {
            command.arg("--control").arg(control);
        }
        Ok(command)
    }
}
