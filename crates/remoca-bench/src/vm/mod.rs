//! A VM process with its disk and its memory server, all of them real programs, and a polling client in a closed loop.
//!
//! The disk is an image of distinct blocks behind nbdkit, which delays each request, or a raw file if there is no delay. The
//! client checks every block that it reads.
//! Without an agent, blocks are admitted when they are read, so one pass over the image caches all of it.

mod client;
pub mod content;
mod image;
pub mod peer;
mod port;
pub mod proxy;
mod server;

pub use client::Client;
pub use image::DelayedImage;
pub use port::Port;
pub use server::{MemoryServer, ServerOptions, memory_server, memory_server_at, status_at};

use anyhow::{Context, Result, bail, ensure};
use image::disk;
use nix::time::ClockId;
use remoca_io::control;
use remoca_lab::figures::{self, Figure};
use remoca_protocol::control::{CacheStatus, Command as Ask, Reply, Status};
use rustix::process::{Pid, Signal, kill_process};
use std::ffi::OsString;
use std::io::Read;
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

pub const IMAGE_BYTES: u64 = 16 << 20;
const BLOCK: u64 = 4096;
const PATIENCE: Duration = Duration::from_secs(20);
const NO_PORT: &str = "this VM has no eviction port";
/// Most bytes that are kept of what a program says on its standard error.
const ERRORS_MAX: u64 = 16 << 10;
/// Most passes over the image until all of it is cached.
const PASSES_MAX: usize = 20;

/// A program that ends with its owner.
pub struct Program(Child);

impl Program {
    /// Starts a program, and waits until its socket is there.
    pub fn start(command: &mut Command, socket: &Path) -> Result<Self> {
        Self::start_until(command, || socket.exists())
    }

    /// Starts a program, and waits until it listens at `address`.
    pub fn start_at(command: &mut Command, address: SocketAddr) -> Result<Self> {
        Self::start_until(command, || TcpStream::connect(address).is_ok())
    }

    fn start_until(command: &mut Command, is_ready: impl Fn() -> bool) -> Result<Self> {
        // The configuration of this machine is for other VMs.
        command.env("REMOCA_CONFIG", "/nonexistent");
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
        let mut program = Self(child.with_context(|| format!("cannot start {command:?}"))?);
        let mut errors = program.0.stderr.take().context("no stderr")?;
        let said = std::thread::spawn(move || {
            let mut text = Vec::new();
            // What a program says before it fails is enough; it may go on to say more than fits into memory.
            let _ = errors.by_ref().take(ERRORS_MAX).read_to_end(&mut text);
            let _ = std::io::copy(&mut errors, &mut std::io::sink());
            String::from_utf8_lossy(&text).trim().to_owned()
        });
        let started = Instant::now();
        while !is_ready() {
            if let Some(status) = program.0.try_wait()? {
                let said = said.join().unwrap_or_default();
                bail!("{command:?} ended right after its start: {status}: {said}");
            }
            ensure!(started.elapsed() < PATIENCE, "{command:?} does not listen");
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(program)
    }

    /// Returns the CPU time that the program's threads have used, with those that have ended.
    pub fn cpu_time(&self) -> Result<Duration> {
        let pid = nix::unistd::Pid::from_raw(self.0.id().try_into()?);
        Ok(ClockId::pid_cpu_clock_id(pid)?.now()?.into())
    }

    /// Returns the number of the process.
    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Kills the program, and waits for its end.
    pub fn kill(&mut self) -> Result<()> {
        self.0.kill()?;
        self.0.wait()?;
        Ok(())
    }

    /// Ends the program with SIGTERM, so that it can write its results, and waits for its end.
    fn end(mut self) -> Result<()> {
        kill_process(Pid::from_child(&self.0), Signal::TERM)?;
        let started = Instant::now();
        while self.0.try_wait()?.is_none() {
            ensure!(started.elapsed() < PATIENCE, "a program did not end after SIGTERM");
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the path of `remoca`, next to this program.
pub fn remoca() -> Result<PathBuf> {
    program("remoca", "cargo build --release -p remoca-cli")
}

/// Returns the path of a program next to this one. `command` is what builds it.
pub fn program(name: &str, command: &str) -> Result<PathBuf> {
    let path = std::env::current_exe()?.with_file_name(name);
    ensure!(path.exists(), "{} does not exist: build it with {command}", path.display());
    Ok(path)
}

/// One VM process and its guest.
pub struct Vm {
    pub process: Program,
    control: PathBuf,
    guest: Client,
    blocks: u64,
    /// Guest driver of the eviction port, if the VM has one.
    port: Option<Port>,
    // The disk must outlive the process.
    _disk: Option<Program>,
}

#[derive(Clone, Copy, Default)]
pub struct VmOptions<'a> {
    /// Delay of each disk read; 0 means a raw file without delay.
    pub disk_ms: u32,
    /// Address of a memory server; `None` means that there is none.
    pub server: Option<&'a str>,
    /// Address of the memory server that has a local tier, and its size; `None` means that there is none.
    pub local: Option<(&'a str, &'a str)>,
    pub inflight: bool,
    pub arguments: &'a [String],
    /// Size of the cache, as on the command line; `None` means more than the image.
    pub cache: Option<&'a str>,
    /// Program to measure; `None` means the `remoca` next to this benchmark.
    pub program: Option<&'a Path>,
    /// Processor that all threads of the VM process are pinned to.
    pub processor: Option<usize>,
    /// Whether the VM has an eviction port.
    pub port: bool,
    /// A variable of the VM process's environment, and its value.
    pub environment: Option<(&'a str, &'a str)>,
    /// File for callgrind's instruction counts of the VM process; with it, the process runs under valgrind.
    pub callgrind: Option<&'a Path>,
    /// Size of the image; 0 means [`IMAGE_BYTES`].
    pub image_bytes: u64,
    /// Address of an image that is there already; `None` means that one is made.
    pub image: Option<&'a str>,
    /// Bytes of zeroes behind the image's content.
    pub zero_bytes: u64,
}

impl Vm {
    /// Starts a VM process, waits for its pool if it is to have one, and reads its disk twice.
    pub fn start(folder: &Path, name: &str, options: &VmOptions<'_>) -> Result<Self> {
        let mut vm = Self::start_cold(folder, name, options)?;
        for _ in 0..2 {
            vm.pass(32)?;
        }
        Ok(vm)
    }

    /// Starts a VM process, and waits for its pool if it is to have one.
    pub fn start_cold(folder: &Path, name: &str, options: &VmOptions<'_>) -> Result<Self> {
        let bytes = if options.image_bytes == 0 { IMAGE_BYTES } else { options.image_bytes };
        let (disk, image) = match options.image {
            Some(image) => (None, image.to_owned()),
            None => disk(folder, name, options.disk_ms, bytes, options.zero_bytes)?,
        };
        let socket = folder.join(format!("{name}.vhost"));
        let control = folder.join(format!("{name}.ctl"));
        let port_socket = folder.join(format!("{name}.port"));
        let mut command = command(options)?;
        command.args(["--image", &image, "--socket"]);
        command.arg(&socket).arg("--control").arg(&control).args(options.arguments);
        if options.port {
            command.arg("--port").arg(&port_socket);
        }
        if let Some(server) = options.server {
            command.arg("--server").arg(server);
        }
        if let Some((server, size)) = options.local {
            command.args(["--local", size, "--local-server", server]);
        }
        let process = Program::start_until(&mut command, || socket.exists() && control.exists())?;
        let blocks = bytes / BLOCK;
        let guest = Client::connect(&socket, blocks, options.inflight)?;
        let port = options.port.then(|| Port::connect(&port_socket)).transpose()?;
        let vm = Self { process, control, guest, blocks, port, _disk: disk };
        vm.wait_for_pools(options)?;
        Ok(vm)
    }

    /// Waits until the process has a pool of each kind that it is to have: from then on, everything is cached.
    fn wait_for_pools(&self, options: &VmOptions<'_>) -> Result<()> {
        let started = Instant::now();
        let is_there = |is_wanted: bool, granted_bytes| !is_wanted || granted_bytes > 0;
        let are_there = |cache: CacheStatus| {
            is_there(options.server.is_some(), cache.granted_bytes)
                && is_there(options.local.is_some(), cache.local_granted_bytes)
        };
        while !are_there(self.status()?.cache) {
            ensure!(started.elapsed() < PATIENCE, "the VM process got no memory for its cache");
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Reads the image until all of it is cached.
    pub fn fill(&mut self) -> Result<()> {
        for _ in 0..PASSES_MAX {
            let before = self.counter("hit_blocks")?;
            self.pass(32)?;
            if self.counter("hit_blocks")? - before == self.blocks {
                return Ok(());
            }
        }
        bail!("{PASSES_MAX} passes over the image did not bring all of it into the cache")
    }

    /// Ends the VM process and its disk.
    pub fn end(self) -> Result<()> {
        self.process.end()
    }

    /// Returns whether the guest's connection is open.
    pub fn is_connected(&self) -> bool {
        self.guest.is_connected()
    }

    /// Returns the path of the process's control socket.
    pub fn control(&self) -> &Path {
        &self.control
    }

    /// Returns the number of blocks that the guest received from the pools that are, or are not, the local tier.
    pub fn hits(&self, of_local_tier: bool) -> Result<u64> {
        let pools = self.status()?.pools;
        Ok(pools.iter().filter(|pool| pool.is_local_tier == of_local_tier).map(|pool| pool.hits).sum())
    }

    /// Returns one of the process's counters.
    pub fn counter(&self, name: &str) -> Result<u64> {
        self.status()?.counters.get(name).copied().with_context(|| format!("no counter {name}"))
    }

    /// Returns the status of the process.
    pub fn status(&self) -> Result<Status> {
        match control::call(&self.control, Ask::Status)? {
            Reply::Status(status) => Ok(*status),
            Reply::Curve(_) => bail!("it is no status"),
            Reply::Error { error } => bail!(error),
        }
    }

    /// Reads `count` random blocks, `depth` at a time, and returns the latency of each in nanoseconds. Calls `at` with
    /// the number of each read.
    pub fn measure(&mut self, depth: usize, count: usize, at: impl FnMut(usize)) -> Result<Vec<u64>> {
        self.guest.measure(depth, count, at)
    }

    /// Reads every block once, in order.
    pub fn pass(&mut self, depth: usize) -> Result<()> {
        self.guest.pass(depth)
    }

    /// Returns the number of blocks with content.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Returns the process, and the guest that reads the disk.
    pub fn parts(&mut self) -> (&Program, &mut Client) {
        (&self.process, &mut self.guest)
    }

    /// Returns the guest that reads the disk.
    pub fn client(&mut self) -> &mut Client {
        &mut self.guest
    }

    /// Returns the guest that reads the disk, and the port to which it reports what it evicts.
    pub fn client_and_port(&mut self) -> Result<(&mut Client, &mut Port)> {
        let port = self.port.as_mut().context(NO_PORT)?;
        Ok((&mut self.guest, port))
    }

    /// Reports every block of the image as evicted, once, in order.
    pub fn evict_all(&mut self) -> Result<()> {
        let bytes = 0..self.blocks * BLOCK;
        self.port()?.evict_range(bytes)
    }

    /// Reports blocks as evicted.
    pub fn evict_blocks(&mut self, blocks: &[u64]) -> Result<()> {
        self.port()?.evict_blocks(blocks)
    }

    /// Reports pages that are not on the disk as evicted. They are dropped, but show that there is an agent, so that blocks are
    /// not admitted when they are read: as long as there is a page for each eight of them.
    pub fn evict_unknown(&mut self, pages: usize) -> Result<()> {
        self.port()?.evict_unknown(pages)
    }

    fn port(&mut self) -> Result<&mut Port> {
        self.port.as_mut().context(NO_PORT)
    }
}

/// Returns the command of the VM process, up to its disk.
fn command(options: &VmOptions<'_>) -> Result<Command> {
    let program = options.program.map_or_else(remoca, |program| Ok(program.to_owned()))?;
    let mut words: Vec<OsString> = pinned(options.processor).into_iter().map(Into::into).collect();
    if let Some(path) = options.callgrind {
        let out = format!("--callgrind-out-file={}", path.display());
        words.extend(["valgrind".into(), "--tool=callgrind".into(), out.into()]);
    }
    words.push(program.into());
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).envs(options.environment);
    command.args(["disk", "--read-only", "--no-frames", "--cache", options.cache.unwrap_or("32M")]);
    Ok(command)
}

/// Returns what is put before a command to run it on one processor.
pub fn pinned(processor: Option<usize>) -> Vec<String> {
    let words = |processor: usize| ["taskset".into(), "--cpu-list".into(), processor.to_string()];
    processor.map(words).into_iter().flatten().collect()
}

/// A folder that is removed with its owner.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new() -> Result<Self> {
        Self::below(&std::env::temp_dir())
    }

    /// Makes a folder whose files are in memory.
    pub fn in_memory() -> Result<Self> {
        Self::below(Path::new("/dev/shm"))
    }

    fn below(parent: &Path) -> Result<Self> {
        Ok(Self(tempfile::Builder::new().prefix("remoca-bench-").tempdir_in(parent)?.keep()))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Writes a report to `out/bench/NAME.json`.
pub fn save(name: &str, report: &impl serde::Serialize) -> Result<()> {
    save_figures(name, &[], report)
}

/// Writes a report, and its figures that have a target, to `out/bench/NAME.json`.
pub fn save_figures(name: &str, of: &[Figure], report: &impl serde::Serialize) -> Result<()> {
    println!("\n{}", figures::save(name, of, report)?.display());
    Ok(())
}
