//! A VM process with its disk and its memory server, all of them real programs, and a polling client in a closed loop.
//!
//! The disk is an image of distinct blocks behind nbdkit, which delays each request, or a raw file if there is no delay.
//! Without an agent, blocks are admitted when they are read, so one pass over the image caches all of it.

pub mod proxy;

use anyhow::{Context, Result, bail, ensure};
use remoca_frontend::testing::{Command as Read, Options, TestGuest, Ticket};
use remoca_io::control;
use remoca_protocol::control::{Command as Ask, Reply};
use rustix::process::{Pid, Signal, kill_process};
use std::ffi::OsString;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

pub const IMAGE_BYTES: u64 = 16 << 20;
const BLOCK: u64 = 4096;
/// Size of one write of evicted pages to the port, in bytes.
const BATCH_BYTES: u64 = 256 << 10;
const PATIENCE: Duration = Duration::from_secs(20);

/// A program that ends with its owner.
pub struct Program(Child);

impl Program {
    pub fn start(command: &mut Command, socket: &Path) -> Result<Self> {
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let program = Self(child.with_context(|| format!("cannot start {command:?}"))?);
        let started = Instant::now();
        while !socket.exists() {
            ensure!(started.elapsed() < PATIENCE, "{command:?} does not listen at {}", socket.display());
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(program)
    }

    /// Returns the CPU time that the program's threads have used.
    pub fn cpu_time(&self) -> Result<Duration> {
        let mut total = Duration::ZERO;
        for task in std::fs::read_dir(format!("/proc/{}/task", self.0.id()))? {
            let stat = std::fs::read_to_string(task?.path().join("schedstat"))?;
            total += Duration::from_nanos(stat.split_whitespace().next().context("no CPU time")?.parse()?);
        }
        Ok(total)
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
    let path = std::env::current_exe()?.with_file_name("remoca");
    if !path.exists() {
        bail!("{} does not exist: build it with cargo build --release -p remoca-cli", path.display());
    }
    Ok(path)
}

pub fn memory_server(folder: &Path) -> Result<(Program, PathBuf)> {
    let socket = folder.join("server.sock");
    let listen = format!("unix:{}", socket.display());
    let mut command = Command::new(remoca()?);
    let program =
        Program::start(command.args(["serve", "--listen", &listen, "--memory", "256M", "--no-lock"]), &socket)?;
    Ok((program, socket))
}

/// One VM process and its guest.
pub struct Vm {
    pub process: Program,
    control: PathBuf,
    guest: TestGuest,
    /// Guest driver of the eviction port, if the VM has one.
    port: Option<TestGuest>,
    random: u64,
    // The disk must outlive the process.
    _disk: Option<Program>,
}

#[derive(Default)]
pub struct VmOptions<'a> {
    /// Delay of each disk read; 0 means a raw file without delay.
    pub disk_ms: u32,
    pub server: Option<&'a Path>,
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
    /// File for callgrind's instruction counts of the VM process; with it, the process runs under valgrind.
    pub callgrind: Option<&'a Path>,
}

impl Vm {
    pub fn start(folder: &Path, name: &str, options: &VmOptions<'_>) -> Result<Self> {
        let (disk, image) = disk(folder, name, options.disk_ms)?;
        let (socket, control) = (folder.join(format!("{name}.vhost")), folder.join(format!("{name}.ctl")));
        let program = options.program.map_or_else(remoca, |program| Ok(program.to_owned()))?;
        let mut words: Vec<OsString> = Vec::new();
        if let Some(processor) = options.processor {
            words.extend(["taskset".into(), "--cpu-list".into(), processor.to_string().into()]);
        }
        if let Some(path) = options.callgrind {
            let out = format!("--callgrind-out-file={}", path.display());
            words.extend(["valgrind".into(), "--tool=callgrind".into(), out.into()]);
        }
        words.push(program.into());
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        command.args(["disk", "--read-only", "--no-frames", "--cache", options.cache.unwrap_or("32M")]);
        command.args(["--image", &image, "--socket"]);
        command.arg(&socket).arg("--control").arg(&control).args(options.arguments);
        let port_socket = folder.join(format!("{name}.port"));
        if options.port {
            command.arg("--port").arg(&port_socket);
        }
        if let Some(server) = options.server {
            command.arg("--server").arg(format!("unix:{}", server.display()));
        }
        let process = Program::start(&mut command, &socket)?;
        let inflight = options.inflight;
        let mut guest = TestGuest::new(Options { queue_size: 256, data_bytes: BLOCK, inflight, ..Options::default() });
        guest.connect(&socket)?;
        guest.queues[0].suppress_interrupts(true);
        let port = options.port.then(|| connect_port(&port_socket)).transpose()?;
        let mut vm = Self { process, control, guest, port, random: 0x9e37_79b9_7f4a_7c15, _disk: disk };
        // Waits for the pool: from then on, everything is cached.
        std::thread::sleep(Duration::from_millis(1500));
        for _ in 0..2 {
            vm.pass(32)?;
        }
        Ok(vm)
    }

    /// Ends the VM process and its disk.
    pub fn end(self) -> Result<()> {
        self.process.end()
    }

    /// Returns whether the guest's connection is open.
    pub fn is_connected(&self) -> bool {
        self.guest.is_connected()
    }

    /// Returns one of the process's counters.
    pub fn counter(&self, name: &str) -> Result<u64> {
        match control::call(&self.control, Ask::Status)? {
            Reply::Status(status) => status.counters.get(name).copied().with_context(|| format!("no counter {name}")),
            Reply::Curve(_) => bail!("it is no status"),
            Reply::Error { error } => bail!(error),
        }
    }

    /// Reads `count` random blocks, `depth` at a time, and returns the latency of each in nanoseconds. Calls `at` with
    /// the number of each read.
    pub fn measure(&mut self, depth: usize, count: usize, mut at: impl FnMut(usize)) -> Result<Vec<u64>> {
        let mut random = self.random;
        let mut begun = 0;
        let latencies = self.reads(depth, |_| {
            begun += 1;
            at(begun);
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (begun <= count).then_some((random >> 33) % (IMAGE_BYTES / BLOCK))
        })?;
        self.random = random;
        Ok(latencies)
    }

    /// Reads every block once, in order.
    pub fn pass(&mut self, depth: usize) -> Result<()> {
        let mut next = 0..IMAGE_BYTES / BLOCK;
        self.reads(depth, |_| next.next()).map(drop)
    }

    /// Reports every block of the image as evicted, once, in order.
    pub fn evict_all(&mut self) -> Result<()> {
        let Some(port) = &mut self.port else { bail!("this VM has no eviction port") };
        for first in (0..IMAGE_BYTES).step_by(usize::try_from(BATCH_BYTES)?) {
            let batch = content(first..first + BATCH_BYTES);
            // The page at sector 0 of the port is for the guest agent's own report.
            let status = port.run(0, Read::Write { sector: BLOCK / 512, data: &batch });
            ensure!(status == 0, "the eviction port failed a write");
        }
        Ok(())
    }

    fn reads(&mut self, depth: usize, mut next: impl FnMut(&Self) -> Option<u64>) -> Result<Vec<u64>> {
        let mut flying: Vec<(Ticket, Instant)> = Vec::with_capacity(depth);
        let (mut latencies, mut ended) = (Vec::new(), false);
        while !ended || !flying.is_empty() {
            let before = flying.len();
            while !ended && flying.len() < depth {
                match next(self) {
                    None => ended = true,
                    Some(block) => {
                        let read = Read::Read { sector: block * 8, length: BLOCK };
                        flying.push((self.guest.submit(0, read), Instant::now()));
                    }
                }
            }
            if flying.len() > before {
                self.guest.queues[0].kick();
            }
            let mut failed = false;
            flying.retain(|(ticket, since)| match self.guest.result(*ticket) {
                None => true,
                Some(status) => {
                    failed |= status != 0;
                    latencies.push(u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX));
                    false
                }
            });
            ensure!(!failed, "a read failed");
        }
        Ok(latencies)
    }
}

/// Returns the content of the image in this range of bytes. It is the content that nbdkit's pattern plugin generates.
fn content(bytes: Range<u64>) -> Vec<u8> {
    (bytes.start / 8..bytes.end / 8).flat_map(|at| (at * 8).to_be_bytes()).collect()
}

fn connect_port(socket: &Path) -> Result<TestGuest> {
    let mut port = TestGuest::new(Options { queue_size: 8, data_bytes: BATCH_BYTES, ..Options::default() });
    port.connect(socket)?;
    Ok(port)
}

fn disk(folder: &Path, name: &str, delay_ms: u32) -> Result<(Option<Program>, String)> {
    if delay_ms == 0 {
        let path = folder.join(format!("{name}.img"));
        std::fs::write(&path, content(0..IMAGE_BYTES))?;
        return Ok((None, path.display().to_string()));
    }
    let socket = folder.join(format!("{name}.nbd"));
    let mut command = Command::new("nbdkit");
    command.args(["-f", "-U"]).arg(&socket).args(["--filter=delay", "pattern"]);
    command.arg(format!("size={IMAGE_BYTES}")).arg(format!("rdelay={delay_ms}ms"));
    let program = Program::start(&mut command, &socket)?;
    Ok((Some(program), format!("nbd+unix:///?socket={}", socket.display())))
}

/// A folder that is removed with its owner.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new() -> Result<Self> {
        let path = std::env::temp_dir().join(format!("remoca-bench-{}", std::process::id()));
        std::fs::create_dir_all(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Writes a report to `out/bench/NAME.json`.
pub fn save(name: &str, report: &impl serde::Serialize) -> Result<()> {
    let path = PathBuf::from(format!("out/bench/{name}.json"));
    std::fs::create_dir_all("out/bench")?;
    std::fs::write(&path, serde_json::to_vec_pretty(report)?)?;
    println!("\n{}", path.display());
    Ok(())
}
