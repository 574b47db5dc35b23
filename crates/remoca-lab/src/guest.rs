//! One guest: its QEMU process, its console, and the jobs in it.
//!
//! Called by tests and the demonstration; owns the QEMU process and the folder of its logs. Every wait has a limit; a
//! guest that misses one is killed, and the error shows the console's last lines.

use std::{
    fmt::Display,
    fs::{self, File},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::Child,
    thread,
    time::{Duration, Instant},
};

use remoca_qmp::{Limit, Qmp};

use crate::{
    accel::Accelerator,
    channel::{Channel, Failure, Job, Output},
    console::{Console, Waited},
    error::{Context, Error, Result},
    frame::Kind,
    image::{Image, Recipe},
    lab::Lab,
    machine::Machine,
    migration::{self, Incoming, Relay},
    program, qemu, service, store,
};

const TAIL_LINE_COUNT: usize = 25;
const TRANSFER_LIMIT: Duration = Duration::from_secs(240);
/// How long to wait for the console output of a hypervisor that has ended.
const LAST_WORDS: Duration = Duration::from_secs(10);
/// An emulated guest on a busy machine may get no processor for a minute.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(240);
/// Time limit for an answer of QEMU, which answers at once unless it hangs.
const ANSWER_LIMIT: Limit = Limit::Each(Duration::from_secs(240));

/// A disk of a guest. In the guest, `disk-by-serial NAME` prints its device.
#[derive(Clone, Debug)]
pub struct Disk {
    /// Serial number that the disk reports to the guest, at most 20 bytes. A vhost-user disk is named by its back end
    /// instead.
    pub serial: String,
    pub source: DiskSource,
}

#[derive(Clone, Debug)]
pub enum DiskSource {
    File {
        path: PathBuf,
        read_only: bool,
        /// Whether writes go to a throw-away layer.
        snapshot: bool,
    },
    /// A layer in the qcow2 format, which the guest may write.
    Layer { path: PathBuf },
    VhostUser {
        socket: PathBuf,
        queue_count: u16,
        queue_size: u16,
        /// Whether QEMU reconnects, every second, when the back end goes away.
        reconnect: bool,
    },
}

impl Disk {
    /// Returns a file or block device that the guest may write.
    pub fn file(serial: &str, path: &Path) -> Disk {
        Disk {
            serial: serial.to_owned(),
            source: DiskSource::File { path: path.to_owned(), read_only: false, snapshot: false },
        }
    }

    /// Returns a disk behind a vhost-user socket, with two queues of 128 entries.
    pub fn vhost_user(serial: &str, socket: &Path) -> Disk {
        Disk {
            serial: serial.to_owned(),
            source: DiskSource::VhostUser {
                socket: socket.to_owned(),
                queue_count: 2,
                queue_size: 128,
                reconnect: false,
            },
        }
    }
}

/// Configuration of a guest.
#[derive(Clone, Debug)]
pub struct GuestConfig {
    /// Name of its folder of logs, `out/lab/NAME`.
    pub name: String,
    /// Image that it boots; Debian 12 by default.
    pub recipe: Recipe,
    pub memory_mib: u32,
    /// Number of processors, at least two under software emulation. With one, the emulation drops memory barriers, and
    /// a vhost-user device can lose a kick.
    pub smp: u32,
    pub disks: Vec<Disk>,
    /// Files to find in the guest's `/payload` (which is in its PATH), by name.
    pub payload: Vec<(String, PathBuf)>,
    /// Whether the guest has a virtio balloon. It gives memory back when its driver is loaded.
    pub balloon: bool,
    /// Path of a socket at which QEMU has another monitor, for others than the laboratory.
    pub monitor: Option<PathBuf>,
    /// Appended to the kernel's command line.
    pub kernel_args: Vec<String>,
    /// Appended to QEMU's arguments.
    pub qemu_args: Vec<String>,
    /// Whether the guest may reboot; otherwise a reboot ends it.
    pub may_reboot: bool,
    /// Whether the guest can move to another QEMU ([`Guest::incoming`]). If so, its root's changes are in a file that
    /// both can open.
    pub migratable: bool,
    /// Network namespace (`ip netns`) that QEMU runs in, which needs root; `None` for the host's.
    pub name_space: Option<String>,
    /// Whether the guest's clock counts instructions, one nanosecond per instruction, so that a busy host does not
    /// matter. This always uses software emulation.
    pub count_instructions: bool,
    pub boot_limit: Duration,
}

impl GuestConfig {
    pub fn new(name: &str, memory_mib: u32) -> GuestConfig {
        GuestConfig {
            name: name.to_owned(),
            recipe: Recipe::bookworm(),
            memory_mib,
            smp: 2,
            disks: Vec::new(),
            payload: Vec::new(),
            balloon: false,
            monitor: None,
            kernel_args: Vec::new(),
            qemu_args: Vec::new(),
            may_reboot: false,
            migratable: false,
            name_space: None,
            count_instructions: false,
            boot_limit: Duration::from_secs(240),
        }
    }

    #[must_use]
    pub fn disk(mut self, disk: Disk) -> GuestConfig {
        self.disks.push(disk);
        self
    }

    /// Adds a file of the host as `/payload/NAME`.
    #[must_use]
    pub fn payload(mut self, name: &str, path: &Path) -> GuestConfig {
        self.payload.push((name.to_owned(), path.to_owned()));
        self
    }

    /// Makes what a QEMU is started with, and a folder of logs. The root is a throw-away layer.
    pub(crate) fn prepare(mut self, lab: &Lab) -> Result<(Parts, PathBuf, File)> {
        let image = Image::ensure(lab, &self.recipe)?;
        let accelerator =
            if self.count_instructions { Accelerator::Tcg } else { Accelerator::of_this_machine(lab, &image)? };
        let (folder, lock) = lab.log_folder(&self.name)?;
        let server = program::build(lab, "remoca-lab", "remoca-lab-guest")?;
        self.payload.push(("remoca-lab-guest".into(), server));
        let payload = folder.join("payload.img");
        store::image_of_files(&payload, &self.payload)?;

        let root = qemu::throw_away(&image.root());
        Ok((Parts { config: self, image, accelerator, root, payload }, folder, lock))
    }

    /// Boots the guest, and waits until it accepts jobs. The first boot with a recipe builds its image.
    pub fn boot(self, lab: &Lab) -> Result<Guest> {
        let (mut parts, folder, lock) = self.prepare(lab)?;
        if parts.config.migratable {
            parts.root = migration::own_root(&parts.image, &folder)?;
        }
        let jobs_log = File::create(folder.join("jobs.log")).context_path("creating a log in", &folder)?;
        let boot_limit = parts.config.boot_limit;
        let started = Instant::now();
        let Qemu { child, console, port, monitor, far_port } = Qemu::start(&parts, &folder, 0)?;
        let guest = Guest {
            console,
            channel: Channel::open(port, jobs_log).context("opening the guest's port")?,
            monitor: Some(monitor),
            name: parts.config.name.clone(),
            relay: far_port.map(Relay::Waiting),
            folder,
            machine: Machine::Process(child),
            started,
            parts,
            qemu_count: 1,
            _lock: lock,
        };
        guest.wait_for_boot(0, boot_limit)
    }
}

/// The parts that a QEMU is started with.
#[derive(Clone, Debug)]
pub(crate) struct Parts {
    pub(crate) config: GuestConfig,
    pub(crate) image: Image,
    pub(crate) accelerator: Accelerator,
    pub(crate) root: DiskSource,
    pub(crate) payload: PathBuf,
}

/// A QEMU process and our ends of its sockets.
pub(crate) struct Qemu {
    pub(crate) child: Child,
    pub(crate) console: Console,
    pub(crate) port: UnixStream,
    pub(crate) monitor: UnixStream,
    /// QEMU's own end of the port, kept for its successor. `None` if the guest is not migratable.
    pub(crate) far_port: Option<UnixStream>,
}

impl Qemu {
    /// Starts a QEMU. `number` distinguishes the logs of several QEMUs of one guest.
    pub(crate) fn start(parts: &Parts, folder: &Path, number: u32) -> Result<Qemu> {
        let name = |kind: &str| if number == 0 { format!("{kind}.log") } else { format!("{kind}-{number}.log") };
        let (port, qemu_port) = UnixStream::pair().context("creating a socket pair")?;
        let (monitor, qemu_monitor) = UnixStream::pair().context("creating a socket pair")?;
        let log = File::create(folder.join(name("qemu"))).context_path("creating a log in", folder)?;
        let mut command = qemu::command(parts, &qemu_port, &qemu_monitor);
        command.stderr(log);
        let mut child = service::spawn(command)?;
        let stdout = child.stdout.take().ok_or_else(|| Error::Invalid("QEMU has no standard output".into()))?;
        let console = Console::capture(stdout, &folder.join(name("console")))?;
        // QEMU now holds the other ends. With ours closed, we notice when it ends.
        drop(qemu_monitor);
        let far_port = parts.config.migratable.then_some(qemu_port);
        Ok(Qemu { child, console, port, monitor, far_port })
    }
}

/// A running guest. Killed when dropped.
#[derive(Debug)]
pub struct Guest {
    pub(crate) name: String,
    pub(crate) folder: PathBuf,
    pub(crate) machine: Machine,
    pub(crate) console: Console,
    pub(crate) channel: Channel,
    pub(crate) monitor: Option<UnixStream>,
    pub(crate) relay: Option<Relay>,
    pub(crate) parts: Parts,
    pub(crate) qemu_count: u32,
    pub(crate) started: Instant,
    pub(crate) _lock: File,
}

impl Guest {
    /// Returns the folder of the guest's logs: `console.log`, `jobs.log` (output of its jobs), `qemu.log`.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the process ID of the guest's QEMU, or 0 for a domain of libvirt.
    pub fn pid(&self) -> u32 {
        match &self.machine {
            Machine::Process(child) => child.id(),
            Machine::Domain(_) => 0,
        }
    }

    /// Returns the time since QEMU was started.
    pub fn age(&self) -> Duration {
        self.started.elapsed()
    }

    pub fn console(&self) -> &Console {
        &self.console
    }

    /// Returns the monitor of the guest's QEMU. Returns an error if it is already open: there is only one.
    pub fn qmp(&mut self) -> Result<Qmp> {
        let monitor = self.monitor.take().ok_or_else(|| Error::Invalid("the monitor is already open".into()))?;
        Ok(Qmp::open(monitor, ANSWER_LIMIT)?)
    }

    /// Starts another QEMU, which waits at `address` (as QEMU writes it: `tcp:HOST:PORT`) for this guest. `change`
    /// adapts its configuration, such as the sockets of its disks. Needs [`GuestConfig::migratable`].
    pub fn incoming(&mut self, address: &str, change: impl FnOnce(&mut GuestConfig)) -> Result<Incoming> {
        let mut parts = self.parts.clone();
        change(&mut parts.config);
        let changed = parts.config.clone();
        parts.config.qemu_args.extend(["-incoming".into(), address.into()]);
        self.qemu_count += 1;
        let mut qemu = Qemu::start(&parts, &self.folder, self.qemu_count)?;
        qemu.far_port = None;
        let monitor = qemu.monitor.try_clone().context("copying a socket")?;
        // QEMU accepts commands when it listens.
        let qmp = Qmp::open(monitor, ANSWER_LIMIT)?;
        Ok(Incoming { waiting: Some((qemu, qmp)), config: changed })
    }

    /// Switches to the other QEMU, in which the guest now runs: kills the previous one, and sends jobs to the new one.
    /// Returns the new monitor.
    pub fn go_on(&mut self, mut incoming: Incoming) -> Result<Qmp> {
        let (qemu, qmp) = incoming.waiting.take().ok_or_else(|| Error::Invalid("no QEMU waits".into()))?;
        let relay = self.relay.take().ok_or_else(|| Error::Invalid("the guest is not migratable".into()))?;
        // In this order: if a QEMU ends before another one has replaced it, the port also ends.
        self.relay = Some(relay.switch(qemu.port)?);
        self.kill()?;
        (self.machine, self.console, self.monitor) = (Machine::Process(qemu.child), qemu.console, None);
        self.parts.config = incoming.config.clone();
        Ok(qmp)
    }

    /// Starts a shell command, and returns while it runs.
    pub fn start(&self, command: &str) -> Result<Job> {
        self.channel.start(Kind::Run, command.as_bytes()).context(format_args!("starting a job in {}", self.name))
    }

    /// Runs a shell command until it ends, with or without success.
    pub fn try_run(&mut self, command: &str, limit: Duration) -> Result<Output> {
        let job = self.start(command)?;
        self.wait(&job, limit)
    }

    /// Runs a shell command and returns its standard output as text. Returns an error if the command fails.
    pub fn run(&mut self, command: &str, limit: Duration) -> Result<String> {
        let output = self.try_run(command, limit)?;
        if output.success() { Ok(output.text()) } else { Err(self.job_failed(command, &output)) }
    }

    /// Waits for the end of a job.
    pub fn wait(&mut self, job: &Job, limit: Duration) -> Result<Output> {
        job.output(limit).map_err(|failure| self.failed(failure, format_args!("`{}`", job.command), limit))
    }

    /// Returns the next line of a job's standard output, or `None` when the job has ended.
    pub fn next_line(&mut self, job: &mut Job, limit: Duration) -> Result<Option<String>> {
        job.next_line(limit)
            .map_err(|failure| self.failed(failure, format_args!("the next line of `{}`", job.command), limit))
    }

    /// Skips to the next line of a job's standard output that contains the text.
    pub fn wait_for_line(&mut self, job: &mut Job, text: &str, limit: Duration) -> Result<String> {
        let deadline = Instant::now() + limit;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.next_line(job, left)? {
                Some(line) if line.contains(text) => return Ok(line),
                Some(_) => {}
                None => {
                    let output = self.wait(job, limit)?;
                    return Err(self.job_failed(&format!("{} (ended without '{text}')", job.command), &output));
                }
            }
        }
    }

    /// Waits for a line on the console, old or new, that contains the text.
    pub fn wait_for_console(&mut self, text: &str, limit: Duration) -> Result<String> {
        let failure = match self.console.wait_for(text, limit) {
            Waited::Found(line) => return Ok(line),
            Waited::Closed => Failure::Closed,
            Waited::TimedOut => Failure::TimedOut,
        };
        Err(self.failed(failure, format_args!("the console line '{text}'"), limit))
    }

    /// Returns the content of a file in the guest.
    pub fn fetch(&mut self, path: &str) -> Result<Vec<u8>> {
        let job = self.channel.start(Kind::Get, path.as_bytes()).context("asking the guest for a file")?;
        let output = self.wait(&job, TRANSFER_LIMIT)?;
        if output.success() { Ok(output.stdout) } else { Err(self.job_failed(&format!("read {path}"), &output)) }
    }

    /// Creates a file in the guest.
    pub fn put(&mut self, path: &str, content: &[u8]) -> Result<()> {
        let job = self.channel.start(Kind::Put, path.as_bytes()).context("sending the guest a file")?;
        job.send_data(content).context("sending the guest a file")?;
        let output = self.wait(&job, TRANSFER_LIMIT)?;
        if output.success() { Ok(()) } else { Err(self.job_failed(&format!("write {path}"), &output)) }
    }

    /// Unmounts everything, reboots, and waits until the guest accepts jobs again. Needs [`GuestConfig::may_reboot`].
    pub fn reboot(self, limit: Duration) -> Result<Guest> {
        let seen_count = self.channel.hello_count();
        self.channel.start(Kind::Reboot, &[]).context("asking the guest to reboot")?;
        self.wait_for_boot(seen_count, limit)
    }

    /// Has something else reboot the guest, and waits until it accepts jobs again.
    pub fn rebooted_by(self, reboot: impl FnOnce() -> Result<()>, limit: Duration) -> Result<Guest> {
        let seen_count = self.channel.hello_count();
        reboot()?;
        self.wait_for_boot(seen_count, limit)
    }

    /// Unmounts everything, powers off and waits for QEMU's end.
    pub fn shut_down(mut self) -> Result<()> {
        self.channel.start(Kind::PowerOff, &[]).context("asking the guest to power off")?;
        self.wait_for_end(SHUTDOWN_LIMIT)
    }

    /// Waits until QEMU has ended by itself.
    pub fn wait_for_end(&mut self, limit: Duration) -> Result<()> {
        let deadline = Instant::now() + limit;
        while !self.machine.has_ended()? {
            if Instant::now() > deadline {
                return Err(self.failed(Failure::TimedOut, "the end of QEMU", limit));
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Kills QEMU, like pulling the plug.
    pub fn kill(&mut self) -> Result<()> {
        self.machine.kill()
    }

    pub(crate) fn wait_for_boot(mut self, seen_count: u32, limit: Duration) -> Result<Guest> {
        match self.channel.wait_for_hello(seen_count, limit) {
            Ok(_) => Ok(self),
            Err(failure) => Err(self.failed(failure, "its boot", limit)),
        }
    }

    fn job_failed(&self, command: &str, output: &Output) -> Error {
        let status = match output.status {
            0 => "wrote more than the laboratory keeps".into(),
            code if code > 0 => format!("ended with exit code {code}"),
            signal => format!("was killed by signal {}", signal.unsigned_abs()),
        };
        let said = [&output.stdout[..], &output.stderr[..]].concat();
        let said = String::from_utf8_lossy(&said).into_owned();
        let lines: Vec<&str> = said.lines().collect();
        let tail = lines[lines.len().saturating_sub(TAIL_LINE_COUNT)..].join("\n");
        Error::Job { guest: self.name.clone(), command: command.to_owned(), status, output: tail }
    }

    /// Kills a guest that ended or took too long, and returns an error with its last output.
    fn failed(&mut self, failure: Failure, what: impl Display, limit: Duration) -> Error {
        // The guest may have ended already. The error to report is the first one.
        let _ = self.kill();
        self.console.wait_for_end(LAST_WORDS);
        let qemu_log = fs::read_to_string(self.folder.join("qemu.log")).unwrap_or_default();
        let console = format!("{}\n{}", self.console.tail(TAIL_LINE_COUNT), qemu_log.trim_end());
        let (guest, what) = (self.name.clone(), what.to_string());
        match failure {
            Failure::TimedOut => Error::GuestTimeout { guest, what, limit, console },
            Failure::Closed => Error::GuestEnded { guest, what, console },
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // QEMU may have ended already.
        let _ = self.machine.kill();
        if let Machine::Domain(domain) = &self.machine {
            domain.forget();
        }
        // The large files of the folder; the logs stay.
        for name in ["payload.img", "root.qcow2"] {
            let _ = fs::remove_file(self.folder.join(name));
        }
    }
}
