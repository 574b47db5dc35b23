//! Real guests that read by known patterns, with a local tier or without a cache, and what the curves of their VM processes say.
//!
//! Used by the experiments on curves and on the division of memory. Everything is counted in blocks; nothing is timed. The guests' files are
//! on one image, which all VM processes open read-only. Guests read single pages (no read-ahead), so that a block is read from the disk
//! exactly if neither the guest nor the tier has it.

mod seen;
mod work;

pub use seen::{Observed, Seen};
pub use work::{RECORD_BYTES, Work};

use crate::{LIMIT, Result, start_agent};
use remoca_io::control;
use remoca_lab::workload::dataset;
use remoca_lab::{Disk, Guest, GuestConfig, Lab, Qmp, Service, program, store};
use remoca_protocol::control::{Command as Ask, CurveGrid, CurveStatus, Reply, Status};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Bytes of a mebibyte.
pub const MIB: u64 = 1 << 20;

/// A host for guests that read: an image with the files, and a memory server.
pub struct Bench {
    lab: Lab,
    program: PathBuf,
    image: PathBuf,
    folder: TempDir,
    _server: Service,
}

/// What a VM has besides its guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A local tier of so many bytes, and an agent in the guest.
    Tiered(u64),
    /// No cache, but an agent: the same programs in the guest.
    Watched,
    /// Neither.
    Plain,
}

/// Memory of a guest, in MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// What it boots with.
    pub boot_mib: u32,
    /// What a balloon leaves it. The kernel's own tables stay as large as after the boot.
    pub left_mib: u32,
    /// Whether the host's daemon may take some of it: with a balloon, and a monitor at `NAME.qmp`.
    pub lends: bool,
}

impl Memory {
    /// Returns memory of which a balloon takes nothing.
    #[must_use]
    pub fn all(mib: u32) -> Self {
        Self { boot_mib: mib, left_mib: mib, lends: false }
    }

    /// Returns memory of which the host's daemon may take some.
    #[must_use]
    pub fn lending(mib: u32) -> Self {
        Self { lends: true, ..Self::all(mib) }
    }

    fn has_balloon(self) -> bool {
        self.lends || self.left_mib < self.boot_mib
    }
}

/// A VM: its process and its guest.
pub struct Reader {
    control: PathBuf,
    process: Service,
    guest: Guest,
    kind: Kind,
}

impl Bench {
    /// Makes the files, a folder with files of `mib` MiB in all for each (name, `mib`), and starts a memory server with `memory` bytes.
    pub fn new(program: PathBuf, sets: &[(&str, u64)], memory: u64) -> Result<Self> {
        let (lab, folder) = (Lab::open()?, TempDir::with_prefix("remoca-readers-")?);
        let files = TempDir::new_in(folder.path())?;
        for (seed, (name, mib)) in (1..).zip(sets) {
            dataset::create(&files.path().join(name), mib.div_ceil(16), 16 * MIB, seed)?;
        }
        let image = folder.path().join("data.img");
        let mib: u64 = sets.iter().map(|(_, mib)| mib.next_multiple_of(16)).sum();
        // From 512 MiB on, blocks of the file system are as large as pages.
        store::ext4_of_folder(&image, (mib + mib / 8 + 64).max(576) * MIB, files.path())?;
        let socket = folder.path().join("memory.sock");
        let mut command = Command::new(&program);
        // Not locked: the pages of the guests count, not their speed.
        command.args(["serve", "--no-lock", "--memory", &memory.to_string(), "--listen"]);
        command.arg(format!("unix:{}", socket.display()));
        let mut server = Service::start("remoca serve", command, &folder.path().join("serve.log"))?;
        server.wait_for_socket(&socket, LIMIT)?;
        Ok(Self { lab, program, image, folder, _server: server })
    }

    /// Returns the folder with the control sockets of the VM processes, `NAME.ctl`.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Returns the program that its processes run.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// Starts the VM `name`.
    pub fn start(&self, name: &str, memory: Memory, kind: Kind) -> Result<Reader> {
        let path = |end: &str| self.folder().join(format!("{name}.{end}"));
        let (control, disk, port) = (path("ctl"), path("disk"), path("port"));
        let mut command = Command::new(&self.program);
        // A hedged read would be counted at the disk although the tier has the block.
        command.args(["disk", "--no-hedge", "--name", name, "--state"]).arg(path("state"));
        command.arg("--disk").arg(format!(
            "name=data,read-only,image={},socket={}",
            self.image.display(),
            disk.display()
        ));
        command.arg("--control").arg(&control);
        if let Kind::Tiered(bytes) = kind {
            let server = format!("local:{}", self.folder().join("memory.sock").display());
            command.args(["--cache", "0", "--local-server", &server, "--local", &bytes.to_string()]);
        }
        if kind != Kind::Plain {
            command.arg("--port").arg(&port);
        }
        // A VM of this name that has ended left its socket and its curve behind.
        for end in ["ctl", "state", "state.curves"] {
            let _ = std::fs::remove_file(path(end));
        }
        let mut process = Service::start("remoca disk", command, &path("log"))?;
        process.wait_for_socket(&control, LIMIT)?;
        let mut config = GuestConfig::new(&format!("readers-{name}"), memory.boot_mib)
            .disk(Disk::vhost_user("data", &disk))
            .payload("remoca-workload", &program::build(&self.lab, "remoca-lab", "remoca-workload")?);
        if kind != Kind::Plain {
            let agent = program::build(&self.lab, "remoca-agent", "remoca-agent")?;
            config = config.disk(Disk::vhost_user("port", &port)).payload("remoca-agent", &agent);
        }
        config.boot_limit = LIMIT;
        config.balloon = memory.has_balloon();
        config.monitor = memory.lends.then(|| path("qmp"));
        let guest = config.boot(&self.lab)?;
        let mut reader = Reader { control, process, guest, kind };
        reader.prepare()?;
        if memory.has_balloon() {
            reader.guest.run("modprobe virtio_balloon", LIMIT)?;
        }
        if memory.left_mib < memory.boot_mib {
            reader.inflate(memory.left_mib)?;
        }
        Ok(reader)
    }
}

/// Returns the status of the VM process at a control socket.
pub fn status(control: &Path) -> Result<Status> {
    match control::call(control, Ask::Status)? {
        Reply::Status(status) => Ok(*status),
        Reply::Curve(_) => Err("it is no status".into()),
        Reply::Error { error } => Err(error.into()),
    }
}

impl Reader {
    fn prepare(&mut self) -> Result<()> {
        if let Kind::Tiered(tier) = self.kind {
            self.wait_until("the tier has its size", |status| status.cache.local_granted_bytes == tier)?;
        }
        let mount = "D=$(disk-by-serial data) && mount -o ro,noatime $D /mnt && echo 0 > /sys/block/${D#/dev/}/queue/read_ahead_kb";
        self.guest.run(mount, LIMIT)?;
        if self.kind != Kind::Plain {
            start_agent(&mut self.guest)?;
        }
        self.guest.run("echo 3 > /proc/sys/vm/drop_caches", LIMIT)?;
        Ok(())
    }

    /// Inflates the balloon until the guest has so much memory left.
    fn inflate(&mut self, left_mib: u32) -> Result<()> {
        let mut monitor = self.guest.qmp()?;
        let (bytes, deadline) = (u64::from(left_mib) * MIB, Instant::now() + LIMIT);
        monitor.execute("balloon", json!({"value": bytes}))?;
        loop {
            let actual = monitor.execute("query-balloon", json!({}))?["actual"].as_u64();
            if actual == Some(bytes) {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(format!("the balloon does not leave {left_mib} MiB: {actual:?} bytes").into());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Returns the control socket of the VM process.
    pub fn control(&self) -> &Path {
        &self.control
    }

    /// Returns the laboratory's monitor of the guest's QEMU, which may be taken once.
    pub fn monitor(&mut self) -> Result<Qmp> {
        Ok(self.guest.qmp()?)
    }

    /// Returns the status of the VM process.
    pub fn status(&self) -> Result<Status> {
        status(&self.control)
    }

    /// Returns the curve of the VM process at the sizes, or `None` while there is none.
    pub fn curve(&self, grid: CurveGrid) -> Result<Option<CurveStatus>> {
        match control::call(&self.control, Ask::Curve { disk: None, grid: Some(grid) })? {
            Reply::Curve(curve) => Ok(Some(*curve)),
            Reply::Status(_) => Err("it is no curve".into()),
            Reply::Error { .. } => Ok(None),
        }
    }

    /// Returns the number of pages of files that the guest holds.
    pub fn file_pages(&mut self) -> Result<u64> {
        let said = self
            .guest
            .run("awk '/^(Active|Inactive)\\(file\\)/ { sum += $2 } END { print sum / 4 }' /proc/meminfo", LIMIT)?;
        Ok(said.trim().parse()?)
    }

    /// Runs a shell command in the guest to its end.
    pub fn run(&mut self, command: &str) -> Result<String> {
        Ok(self.guest.run(command, LIMIT)?)
    }

    /// Sets the size of the local tier, as `remoca set --local` does, and waits until the tier has it.
    pub fn set_local(&self, bytes: u64) -> Result<()> {
        let local_bytes = Some(bytes);
        let command = Ask::Set { cache_bytes: None, local_bytes, enabled: None, servers: None, at_once: false };
        if let Reply::Error { error } = control::call(&self.control, command)? {
            return Err(error.into());
        }
        self.wait_until("the tier changes its size", |status| status.cache.local_granted_bytes == bytes)
    }

    /// Reads by the pattern to its end: one turn of it. Returns what was counted, with the curve of these reads alone at the sizes of the grid.
    pub fn read(&mut self, work: &Work, turn: u64, grid: CurveGrid) -> Result<Observed> {
        let before = self.status()?;
        let mut seen = Seen::new(grid);
        seen.note(self.curve(grid)?);
        let mut job = self.guest.start(&work.command(turn))?;
        let mut last = String::new();
        while let Some(line) = self.guest.next_line(&mut job, LIMIT)? {
            last = line;
            seen.note(self.curve(grid)?);
        }
        let ended = self.guest.wait(&job, LIMIT)?;
        if !ended.success() {
            return Err(format!("the reader ended with status {}: {last} {}", ended.status, ended.text()).into());
        }
        seen.note(self.curve(grid)?);
        // The agent sends its statistics, and the last pages, once a second.
        self.guest.run(if self.kind == Kind::Plain { "true" } else { "sleep 1.1" }, LIMIT)?;
        Ok(Observed::new(&before, &self.status()?, seen))
    }

    /// Waits until `done` returns true for the status. `what` is used in the error.
    pub fn wait_until(&self, what: &str, mut done: impl FnMut(&Status) -> bool) -> Result<()> {
        let deadline = Instant::now() + LIMIT;
        loop {
            let status = self.status()?;
            if done(&status) {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(format!("{what}: not in time; status: {status:?}").into());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Ends the guest and its VM process.
    pub fn end(mut self) -> Result<()> {
        self.guest.shut_down()?;
        let status = self.process.terminate(LIMIT)?;
        if !status.success() {
            return Err(format!("remoca disk ended with {status}: {}", self.process.log_tail()).into());
        }
        Ok(())
    }
}
