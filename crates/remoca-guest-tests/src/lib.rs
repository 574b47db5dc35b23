//! A host for tests with real guests: the real `remoca` program as memory server and VM process, with a guest of the
//! laboratory.
//!
//! Used by the tests of this crate. It builds the programs that it needs (with assertions), owns their processes, and
//! sends commands to the VM process over its control socket, as an operator would.

pub mod correctness;
pub mod documents;
mod emulation;
pub mod file_systems;
pub mod hotplug;
pub mod installed;
pub mod liar;
pub mod readers;
pub mod soak;
pub mod suites;

pub use emulation::{unless_qemu_aborts, wait_in_guest};
pub use hotplug::{attach, wait_for_disk};

use remoca_io::control;
use remoca_io::fake_manager::FakeManager;
use remoca_lab::store::{Nbdkit, NbdkitConfig};
use remoca_lab::{Disk, Guest, GuestConfig, Lab, Service, program};
use remoca_protocol::control::{Command as Ask, Reply, Status};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Result of a test. The error's text is meant for readers.
pub type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Time limit for any single step on a busy machine.
pub const LIMIT: Duration = Duration::from_secs(240);

/// Returns the path of the `remoca` program: that of the environment variable `REMOCA_PROGRAM`, which `cargo xtask test` has
/// built already, or else one that is built now.
pub fn remoca() -> Result<PathBuf> {
    match std::env::var_os("REMOCA_PROGRAM") {
        Some(program) => Ok(program.into()),
        None => built(&[], "debug/remoca"),
    }
}

/// Builds the `remoca` program as operators run it, for measurements.
pub fn remoca_release() -> Result<PathBuf> {
    built(&["--release"], "release/remoca")
}

/// Builds the `remoca` program that can leave out safety rules.
pub fn remoca_ablation() -> Result<PathBuf> {
    built(&["--features", "ablation,testing", "--bin", "remoca-ablation"], "debug/remoca-ablation")
}

fn built(options: &[&str], program: &str) -> Result<PathBuf> {
    static PROJECT: OnceLock<PathBuf> = OnceLock::new();
    let project = PROJECT.get_or_init(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."));
    let target = project.join("target");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo)
        .current_dir(project)
        .args(["build", "--quiet", "--package", "remoca-cli", "--target-dir"])
        .arg(&target)
        .args(options)
        .status()?;
    if !status.success() {
        return Err("the remoca program does not build".into());
    }
    Ok(target.join(program))
}

/// One disk of the VM process.
#[derive(Clone, Debug)]
pub struct Image {
    pub name: &'static str,
    pub path: PathBuf,
    /// More options for `--disk`, such as `sector=512`.
    pub options: &'static str,
}

/// A memory server and a VM process on this host.
pub struct Host {
    folder: TempDir,
    program: PathBuf,
    memory: &'static str,
    memory_socket: PathBuf,
    server: Option<Service>,
    process: Option<Service>,
    names: Vec<&'static str>,
    has_port: bool,
    manager: Option<FakeManager>,
}

impl Host {
    /// Makes a host whose memory server has `memory` (such as `512M`).
    pub fn new(program: PathBuf, memory: &'static str) -> Result<Self> {
        let folder = TempDir::new()?;
        let memory_socket = folder.path().join("memory.sock");
        Ok(Self {
            folder,
            program,
            memory,
            memory_socket,
            server: None,
            process: None,
            names: Vec::new(),
            has_port: true,
            manager: None,
        })
    }

    /// Makes all later VM processes start without an eviction port, because the guest has no agent.
    pub fn without_port(&mut self) {
        self.has_port = false;
    }

    /// Makes all later VM processes services of a manager that keeps their connections, as systemd does.
    pub fn keep_connections(&mut self) {
        self.manager = Some(FakeManager::start());
    }

    /// Returns that manager, or an error if there is none.
    pub fn manager(&self) -> Result<&FakeManager> {
        self.manager.as_ref().ok_or_else(|| "there is no service manager".into())
    }

    /// Makes all later processes run another build of `remoca`.
    pub fn use_program(&mut self, program: PathBuf) {
        self.program = program;
    }

    /// Returns the program that its processes run.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// Returns the folder of its sockets and logs.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Starts the memory server.
    pub fn start_server(&mut self) -> Result<()> {
        let socket = self.path("memory.sock");
        let mut command = Command::new(&self.program);
        // Not locked: tests run where little memory can be locked, and locking has its own tests.
        command.args(["serve", "--no-lock", "--memory", self.memory, "--listen"]);
        command.arg(format!("unix:{}", socket.display()));
        let mut server = Service::start("remoca serve", command, &self.path("serve.log"))?;
        server.wait_for_socket(&socket, LIMIT)?;
        self.server = Some(server);
        Ok(())
    }

    /// Sets the socket through which later VM processes reach the memory server, for example that of a proxy.
    pub fn connect_to(&mut self, socket: &Path) {
        self.memory_socket = socket.to_owned();
    }

    /// Returns the memory server's process, or an error if it is not running.
    pub fn server(&mut self) -> Result<&mut Service> {
        self.server.as_mut().ok_or_else(|| "the memory server does not run".into())
    }

    /// Kills the memory server.
    pub fn kill_server(&mut self) -> Result<()> {
        if let Some(mut server) = self.server.take() {
            server.kill()?;
        }
        Ok(())
    }

    /// Starts the VM process with these disks, a cache of size `cache`, and an eviction port if the host has one.
    pub fn start_process(&mut self, images: &[Image], cache: &str, more: &[&str]) -> Result<()> {
        let mut process = self.launch(images, cache, more)?;
        process.wait_for_socket(&self.path("vm.ctl"), LIMIT)?;
        self.process = Some(process);
        self.names = images.iter().map(|image| image.name).collect();
        Ok(())
    }

    /// Starts the VM process with the disks of its file ([`Self::configure`]).
    pub fn start_configured(&mut self, cache: &str, more: &[&str]) -> Result<()> {
        let folder = self.folder().display().to_string();
        self.start_process(&[], cache, &[&["--config", folder.as_str()], more].concat())
    }

    /// Writes the VM's file, with these disks, each of which is on a raw image.
    pub fn configure(&self, images: &[Image]) -> Result<()> {
        let mut text = "version = 1\n".to_owned();
        for Image { name, path, .. } in images {
            let (image, socket) = (path.display(), self.socket(name));
            let socket = socket.display();
            text += &format!("[[disk]]\nname = '{name}'\nformat = 'raw'\nimage = '{image}'\nsocket = '{socket}'\n");
        }
        std::fs::create_dir_all(self.path("vms"))?;
        Ok(std::fs::write(self.path("vms/vm.toml"), text)?)
    }

    /// Starts the VM process as [`Self::start_process`] does, and does not wait until it serves.
    pub fn launch(&self, images: &[Image], cache: &str, more: &[&str]) -> Result<Service> {
        let mut command = match &self.manager {
            Some(manager) => manager.service(&self.program),
            None => Command::new(&self.program),
        };
        command.arg("disk").args(["--name", "vm", "--cache", cache]);
        if self.has_port {
            command.arg("--port").arg(self.socket("port"));
        }
        command.arg("--control").arg(self.path("vm.ctl"));
        command.arg("--server").arg(format!("unix:{}", self.memory_socket.display()));
        for image in images {
            let socket = self.socket(image.name);
            let comma = if image.options.is_empty() { "" } else { "," };
            let (path, socket) = (image.path.display(), socket.display());
            let spec = format!("name={},image={path},socket={socket}{comma}{}", image.name, image.options);
            command.arg("--disk").arg(spec);
        }
        command.args(more);
        // A killed process left its control socket behind. The wait below is for the new one.
        let _ = std::fs::remove_file(self.path("vm.ctl"));
        Ok(Service::start("remoca disk", command, &self.path("disk.log"))?)
    }

    /// Ends the VM process with SIGTERM, as an operator would.
    pub fn stop_process(&mut self) -> Result<()> {
        if let Some(mut process) = self.process.take() {
            let status = process.terminate(LIMIT)?;
            if !status.success() {
                return Err(format!("remoca disk ended with {status}: {}", process.log_tail()).into());
            }
        }
        Ok(())
    }

    /// Returns the VM process, or an error if it is not running.
    pub fn process(&mut self) -> Result<&mut Service> {
        self.process.as_mut().ok_or_else(|| "the VM process does not run".into())
    }

    /// Kills the VM process. For the guest, its disks are gone until the next process starts.
    pub fn kill_process(&mut self) -> Result<()> {
        if let Some(mut process) = self.process.take() {
            process.kill()?;
        }
        Ok(())
    }

    /// Returns the log of the VM process.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.path("disk.log")).unwrap_or_default()
    }

    /// Returns a guest of 256 MiB and two processors with the disks, the agent and the workload program.
    pub fn guest(&self, lab: &Lab, name: &str) -> Result<GuestConfig> {
        let mut config = GuestConfig::new(name, 256);
        for disk in self.names.iter().copied().chain(self.has_port.then_some("port")) {
            config = config.disk(Disk::vhost_user(disk, &self.socket(disk)));
        }
        for (package, program) in [("remoca-agent", "remoca-agent"), ("remoca-lab", "remoca-workload")] {
            config = config.payload(program, &program::build(lab, package, program)?);
        }
        config.may_reboot = true;
        config.boot_limit = LIMIT;
        Ok(config)
    }

    /// Returns the socket at which the hypervisor connects to a disk, or to `port`.
    pub fn socket(&self, disk: &str) -> PathBuf {
        self.path(&format!("{disk}.sock"))
    }

    /// Returns the status that `remoca status` would show.
    pub fn status(&self) -> Result<Status> {
        self.ask(Ask::Status)
    }

    /// Sets the size of the cache, and turns it on or off, as `remoca set` does.
    pub fn set(&self, cache_bytes: Option<u64>, enabled: Option<bool>) -> Result<Status> {
        self.ask(Ask::Set { cache_bytes, local_bytes: None, enabled, servers: None, at_once: false })
    }

    /// Sets the size of the local tier, as `remoca set --local` does.
    pub fn set_local(&self, bytes: u64) -> Result<Status> {
        let local_bytes = Some(bytes);
        self.ask(Ask::Set { cache_bytes: None, local_bytes, enabled: None, servers: None, at_once: false })
    }

    /// Sets the servers as `remoca set --server` does.
    pub fn set_servers(&self, servers: Vec<String>) -> Result<Status> {
        let servers = Some(servers);
        self.ask(Ask::Set { cache_bytes: None, local_bytes: None, enabled: None, servers, at_once: false })
    }

    /// Upgrades as `remoca upgrade` does, to the current file of the program. Tries again if a disk takes seconds for a request, as
    /// one on a busy machine may.
    pub fn upgrade(&self) -> Result<Status> {
        for _ in 1..5 {
            match self.ask(Ask::Upgrade { program: None }) {
                Err(error) if error.to_string().contains("still in flight") => {}
                result => return result,
            }
        }
        self.ask(Ask::Upgrade { program: None })
    }

    /// Upgrades on a thread of its own.
    pub fn upgrade_in_background(&self) -> JoinHandle<std::io::Result<Reply>> {
        let control = self.control();
        std::thread::spawn(move || control::call(&control, Ask::Upgrade { program: None }))
    }

    /// Returns the control socket of the VM process.
    pub fn control(&self) -> PathBuf {
        self.path("vm.ctl")
    }

    fn ask(&self, command: Ask) -> Result<Status> {
        match control::call(&self.control(), command)? {
            Reply::Status(status) => Ok(*status),
            Reply::Curve(_) => Err("it is no status".into()),
            Reply::Error { error } => Err(error.into()),
        }
    }

    /// Returns a counter of the VM process.
    pub fn counter(&self, name: &str) -> Result<u64> {
        let status = self.status()?;
        status.counters.get(name).copied().ok_or_else(|| format!("there is no counter {name}").into())
    }

    /// Waits until `done` returns true for the status. `what` is used in the error.
    pub fn wait_until(&self, what: &str, mut done: impl FnMut(&Status) -> bool) -> Result<Status> {
        let deadline = Instant::now() + LIMIT;
        loop {
            let status = self.status()?;
            if done(&status) {
                return Ok(status);
            }
            if Instant::now() > deadline {
                return Err(format!("{what}: not in time; status: {status:?}").into());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Serves an image by an NBD server that takes longer than a memory server would, even on a busy machine: 1 ms for
/// reads of a few pages, 5 ms for reads of a MiB. So the hit ratio does not depend on the speed of this machine's
/// disk: a faster disk is rightly preferred to the memory server.
pub fn slow(image: &Path, host: &Host, read_ms: u64) -> Result<Nbdkit> {
    Ok(NbdkitConfig::slow_file(image, Duration::from_millis(read_ms)).start(host.folder())?)
}

/// Starts the agent in the guest, and waits until it reports that it sends pages.
pub fn start_agent(guest: &mut Guest) -> Result<()> {
    launch_agent(guest)?;
    wait_for_agent(guest)
}

/// Starts the agent in the guest.
pub fn launch_agent(guest: &mut Guest) -> Result<()> {
    guest.run("remoca-agent > /tmp/agent.log 2>&1 & echo $! > /tmp/agent.pid", LIMIT)?;
    Ok(())
}

/// Waits until the agent reports that it sends pages.
pub fn wait_for_agent(guest: &mut Guest) -> Result<()> {
    let wait = "for i in $(seq 2000); do grep -q sending /tmp/agent.log && exit 0; sleep 0.1; done; \
                cat /tmp/agent.log; exit 1";
    guest.run(wait, LIMIT)?;
    Ok(())
}

/// Ends the agent, which first sends the pages that it has captured.
pub fn stop_agent(guest: &mut Guest) -> Result<()> {
    end_agent(guest, "TERM")
}

/// Sends the agent a signal that ends it, and waits. The agent holds the port until its last request has completed.
pub fn end_agent(guest: &mut Guest, signal: &str) -> Result<()> {
    let end = format!(
        "kill -{signal} $(cat /tmp/agent.pid); for i in $(seq 2000); do kill -0 $(cat /tmp/agent.pid) 2> /dev/null || exit 0; sleep 0.1; done; exit 1"
    );
    guest.run(&end, LIMIT)?;
    Ok(())
}

/// Returns the last lines of the guest's kernel, for the message of a failure.
fn kernel_tail(guest: &mut Guest) -> String {
    guest.run("dmesg | tail -20", LIMIT).unwrap_or_else(|error| error.to_string())
}

/// Returns an error if the guest's kernel complained about its disks.
pub fn assert_kernel_is_content(guest: &mut Guest) -> Result<()> {
    let found = kernel_complaints(guest)?;
    if found.is_empty() { Ok(()) } else { Err(format!("the guest's kernel says: {found}").into()) }
}

/// Returns the complaints of the guest's kernel about its disks, one per line.
pub fn kernel_complaints(guest: &mut Guest) -> Result<String> {
    let complaints = "dmesg | grep -iE 'I/O error|EXT4-fs (error|warning)|XFS .*(error|corrupt)|BTRFS (error|warning|critical)|blocked for more than|corrupt' ; true";
    Ok(guest.run(complaints, LIMIT)?)
}
