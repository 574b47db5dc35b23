//! The measured servers: started with enough memory and without writes to disk, pinned, and stopped at the end.

use std::ffi::OsString;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use remoca_server::{Config, Limits, ListenAddress, PageLocking, Server, StartError};
use rustix::process::{Signal, set_parent_process_death_signal};
use rustix::thread::{Pid, sched_setaffinity};

use super::raw;
use crate::cpus;

/// How long a server may take to start; two of them first lock or populate their pages.
const PATIENCE: Duration = Duration::from_secs(60);

const RAW_VERSION: &str = "plain batched TCP server of this benchmark";

/// Options of a server process of our own.
#[derive(Args)]
pub(crate) struct TargetArgs {
    #[command(subcommand)]
    which: Which,
}

#[derive(Subcommand)]
enum Which {
    Raw(Own),
    Remoca(Own),
    /// Another program.
    Program {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
        command: Vec<OsString>,
    },
}

/// One of our own servers.
#[derive(Args)]
struct Own {
    port: u16,
    /// Number of pages that the server must have room for.
    pages: u32,
    /// Address that it listens at.
    #[arg(long, default_value_t = Ipv4Addr::LOCALHOST)]
    host: Ipv4Addr,
}

/// Runs a server until it is killed, or the benchmark ends for any reason. No process that holds gigabytes may be left
/// behind.
pub(crate) fn run_target(args: &TargetArgs) -> Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    match &args.which {
        Which::Raw(own) => raw::serve(&TcpListener::bind((own.host, own.port))?, own.pages),
        Which::Remoca(own) => {
            let address = ListenAddress::Tcp { host: own.host.to_string(), port: own.port };
            let _server = start_remoca(address, u64::from(own.pages) * 4096)?;
            loop {
                std::thread::park();
            }
        }
        Which::Program { command } => {
            let (program, arguments) = command.split_first().context("no program")?;
            let error = Command::new(program).args(arguments).exec();
            Err(error).with_context(|| format!("cannot start {}", program.display()))
        }
    }
}

/// Starts the server with locked memory, or with unlocked memory if this user may not lock as much.
fn start_remoca(address: ListenAddress, memory_bytes: u64) -> Result<Server> {
    let mut config = Config {
        listen: vec![address],
        memory_bytes,
        quota_bytes: None,
        grace: Duration::from_secs(60),
        locking: PageLocking::Locked,
        threads: 1,
        control: None,
        limits: Limits::default(),
    };
    match Server::start(config.clone()) {
        Err(StartError::LockLimit { .. }) => {
            eprintln!("this user may not lock that much memory: measuring with --no-lock instead");
            config.locking = PageLocking::Unlocked;
            Ok(Server::start(config)?)
        }
        started => Ok(started?),
    }
}

/// A running server.
pub(crate) struct Target {
    pub(crate) name: &'static str,
    pub(crate) address: SocketAddr,
    /// Version that it reports.
    pub(crate) version: String,
    /// Command line that started it.
    pub(crate) command: String,
    child: Child,
}

impl Target {
    pub(crate) fn raw(pages: u32) -> Result<Self> {
        let port = free_port()?;
        Self::start("raw", port, own_target("raw", port, pages)?, RAW_VERSION.to_owned())
    }

    /// Starts the raw server at an address elsewhere. `prefix` is put before its command.
    pub(crate) fn raw_at(address: SocketAddrV4, prefix: &[String], pages: u32) -> Result<Self> {
        let own = own_target("raw", address.port(), pages)?;
        let (program, arguments) = prefix.split_first().context("no command to start it elsewhere")?;
        let mut command = Command::new(program);
        command.args(arguments).arg(own.get_program()).args(own.get_args()).arg("--host").arg(address.ip().to_string());
        Self::start_at("raw", address.into(), command, RAW_VERSION.to_owned())
    }

    /// Starts the memory server with room for each page twice: in one pool, and in one of four.
    pub(crate) fn remoca(pages: u32) -> Result<Self> {
        let port = free_port()?;
        let command = own_target("remoca", port, 2 * pages.next_multiple_of(2048))?;
        let version = format!("remoca-server {}, protocol {}", env!("CARGO_PKG_VERSION"), remoca_protocol::VERSION);
        Self::start("remoca", port, command, version)
    }

    pub(crate) fn memcached(pages: u32) -> Result<Self> {
        let port = free_port()?;
        let mut command = target("program")?;
        // One thread, like all others. Started by root it needs a user; another one would keep it from ending with the
        // benchmark. Memory is twice the pages' size, so that nothing is evicted. By default it serves 20 requests of a
        // connection in a row; 1024 makes it faster here.
        command.args(["memcached", "-u", "root", "-l", "127.0.0.1", "-U", "0", "-t", "1", "-c", "64", "-R", "1024"]);
        command.args(["-p", &port.to_string(), "-m", &(2 * (pages >> 8)).max(64).to_string()]);
        let version = version_of("memcached", "-V")?;
        Self::start("memcached", port, command, version)
    }

    pub(crate) fn redis() -> Result<Self> {
        let port = free_port()?;
        let mut command = target("program")?;
        command.args([
            "redis-server",
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
            "--port",
            &port.to_string(),
        ]);
        let version = version_of("redis-server", "-v")?;
        Self::start("redis", port, command, version)
    }

    fn start(name: &'static str, port: u16, command: Command, version: String) -> Result<Self> {
        Self::start_at(name, SocketAddr::from((Ipv4Addr::LOCALHOST, port)), command, version)
    }

    fn start_at(name: &'static str, address: SocketAddr, mut command: Command, version: String) -> Result<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let words = command.get_args().skip_while(|word| *word == "target" || *word == "program");
        let shown = words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ");
        let child = command.spawn().with_context(|| format!("cannot start {shown}"))?;
        let mut target = Self { name, address, version, command: shown, child };
        target.wait_until_up()?;
        Ok(target)
    }

    fn wait_until_up(&mut self) -> Result<()> {
        let started = Instant::now();
        while TcpStream::connect(self.address).is_err() {
            if let Some(status) = self.child.try_wait()? {
                bail!("{} ended right after its start: {status}", self.command);
            }
            if started.elapsed() > PATIENCE {
                bail!("{} does not listen on {}", self.command, self.address);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Pins all threads of the server to one processor.
    pub(crate) fn pin(&self, cpu: usize) -> Result<()> {
        for thread in fs::read_dir(self.proc("task"))? {
            let id: i32 = thread?.file_name().to_string_lossy().parse()?;
            sched_setaffinity(Pid::from_raw(id), &cpus::one(cpu))?;
        }
        Ok(())
    }

    /// Returns the CPU time of all threads of the server, exact to the nanosecond while they sleep.
    pub(crate) fn cpu(&self) -> Result<Duration> {
        let mut ns = 0;
        for thread in fs::read_dir(self.proc("task"))? {
            let text = fs::read_to_string(thread?.path().join("schedstat"))?;
            ns += text.split_whitespace().next().context("schedstat is empty")?.parse::<u64>()?;
        }
        Ok(Duration::from_nanos(ns))
    }

    /// Returns the size of the server's resident anonymous memory, in bytes.
    pub(crate) fn resident_bytes(&self) -> Result<u64> {
        Ok(self.kib("status", "RssAnon:")? << 10)
    }

    /// Returns how many of these bytes are in transparent huge pages.
    pub(crate) fn huge_bytes(&self) -> Result<u64> {
        Ok(self.kib("smaps_rollup", "AnonHugePages:")? << 10)
    }

    fn kib(&self, file: &str, key: &str) -> Result<u64> {
        let text = fs::read_to_string(self.proc(file))?;
        let line = text.lines().find(|line| line.starts_with(key)).with_context(|| format!("no {key}"))?;
        Ok(line.split_whitespace().nth(1).context("no number")?.parse()?)
    }

    fn proc(&self, file: &str) -> String {
        format!("/proc/{}/{file}", self.child.id())
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        // It may already have ended.
        let _killed = self.child.kill();
        let _reaped = self.child.wait();
    }
}

fn own_target(which: &str, port: u16, pages: u32) -> Result<Command> {
    let mut command = target(which)?;
    command.args([&port.to_string(), &pages.to_string()]);
    Ok(command)
}

/// Returns the command that runs this program as a server.
fn target(which: &str) -> Result<Command> {
    let mut command = Command::new(std::env::current_exe().context("cannot find this program")?);
    command.args(["target", which]);
    Ok(command)
}

/// Returns a port of the loopback device that nobody uses.
pub(crate) fn free_port() -> Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

fn version_of(program: &str, flag: &str) -> Result<String> {
    let output = Command::new(program).arg(flag).output().with_context(|| {
        format!("cannot run {program}, which is needed for comparison (apt install memcached redis-server)")
    })?;
    Ok(String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or_default().to_owned())
}
