//! `remoca serve`: serves memory of this host to VM processes of other hosts.

use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use clap::{ArgAction, Args, FromArgMatches};
use remoca_disk::start::WrongOptions;
use remoca_io::descriptor_store::DescriptorStore;
use remoca_server::{Config, Limits, ListenAddress, PageLocking, Server, StartError};
use sd_notify::NotifyState;
use tokio::signal::unix::{SignalKind, signal};

use crate::number::parse_whole;
use crate::settings::file::{SERVE, Settings};
use crate::settings::layers::Merged;
use crate::settings::schema::Schema;
use crate::settings::{Files, Folder, Unusable};
use crate::size::{parse_size, show_size};
use crate::time::parse_duration;

/// Flags that are no settings.
const NOT_IN_FILES: &[&str] = &["config"];

/// Serve memory of this host to VM processes (`remoca disk`).
///
/// Every flag that is not given is looked up in the table [serve] of remoca.toml. A key there is a flag without its dashes.
#[derive(Args, Debug)]
pub struct ServeArgs {
    #[command(flatten)]
    folder: Folder,

    /// Where to listen: tcp:HOST:PORT or unix:PATH; may be repeated
    #[arg(long, value_name = "ADDRESS")]
    listen: Vec<ListenAddress>,

    /// Memory to serve, a multiple of 2 MiB; allocated and locked at the start
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    memory: Option<u64>,

    /// Maximum memory of one client [default: all; of a local tier at most 64 TiB divided by --max-clients]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    quota: Option<u64>,

    /// How long to keep the pages of a client that lost its connection
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse_duration)]
    grace: Duration,

    /// Let the host swap pages out, and allocate memory only when it is used
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true, default_missing_value = "true",
          default_value_t = false, action = ArgAction::Set, hide_default_value = true, hide_possible_values = true)]
    no_lock: bool,

    /// Threads that serve clients [default: one per processor]
    #[arg(long, value_name = "N", value_parser = parse_whole::<usize>)]
    threads: Option<usize>,

    /// Maximum number of clients at a time, with those that are gone and whose pools are kept for them
    #[arg(long, value_name = "N", default_value_t = Limits::default().sessions, value_parser = parse_whole::<usize>)]
    max_clients: usize,

    /// A Unix socket for `remoca status --server`, which answers each connection with the status as JSON [default: `control` in
    /// $RUNTIME_DIRECTORY, which a systemd unit sets; else none]
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
}

impl ServeArgs {
    fn config(self) -> anyhow::Result<Config> {
        const WHERE: &str = "or in the table [serve] of remoca.toml";
        if self.listen.is_empty() {
            return Err(anyhow!("no address: say --listen tcp:HOST:PORT or unix:PATH, {WHERE}").context(WrongOptions));
        }
        let Some(memory) = self.memory else {
            return Err(anyhow!("no memory to serve: say --memory SIZE, {WHERE}").context(WrongOptions));
        };
        let processors = || std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Config {
            listen: self.listen,
            memory_bytes: memory,
            quota_bytes: self.quota,
            grace: self.grace,
            locking: if self.no_lock { PageLocking::Unlocked } else { PageLocking::Locked },
            threads: self.threads.unwrap_or_else(processors),
            control: self.control.or_else(control_of_unit),
            limits: Limits { sessions: self.max_clients, ..Limits::default() },
        })
    }
}

/// Returns the keys that the table [serve] may have.
pub fn schema() -> Schema {
    Schema::new(ServeArgs::augment_args(clap::Command::new("serve")), NOT_IN_FILES, &[])
}

/// Returns the control socket in the runtime directory that the service manager made.
fn control_of_unit() -> Option<PathBuf> {
    let folders = std::env::var_os("RUNTIME_DIRECTORY")?;
    Some(std::env::split_paths(&folders).next()?.join("control"))
}

/// Returns the arguments that were typed, completed by those in the host's file.
fn configured(folder: &Path, words: &[OsString]) -> anyhow::Result<ServeArgs> {
    let files = Files::read(folder, None)?;
    let (settings, problems) = files.host.map(|text| text.host(SERVE, &schema())).unwrap_or_default();
    if !problems.is_empty() {
        return Err(Unusable(problems).into());
    }
    Ok(ServeArgs::from_arg_matches(&Merged::new(&schema(), words, &[&settings])?.matches)?)
}

/// Checks what the table [serve] says together. Where it has no address or no memory, flags have them.
///
/// # Errors
/// If no server can start with it.
pub fn check(file: &Settings) -> anyhow::Result<()> {
    if !["listen", "memory"].iter().all(|key| file.entries.contains_key(*key)) {
        return Ok(());
    }
    let merged = Merged::new(&schema(), &[], &[file])?;
    Server::check(&ServeArgs::from_arg_matches(&merged.matches)?.config()?).map_err(of_start)
}

/// Returns the control socket that the host's file in `folder` names.
///
/// # Errors
/// If the file has a mistake.
pub fn configured_control(folder: &Path) -> anyhow::Result<Option<PathBuf>> {
    Ok(configured(folder, &[])?.control)
}

/// Serves until SIGTERM or SIGINT. `words` are the arguments as they were typed.
///
/// # Errors
/// If the server cannot start; the message says what to do.
pub fn run(args: &ServeArgs, words: &[OsString]) -> anyhow::Result<()> {
    // First of all: it takes over descriptors that were passed to this process.
    let store = DescriptorStore::receive();
    let config = configured(&args.folder.config, words)?.config()?;
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_io().build().context("cannot wait for signals")?;
    let (mut terminate, mut interrupt) = {
        let _context = runtime.enter();
        (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?)
    };
    let control = config.control.as_ref().map(|path| path.display().to_string());
    let (version, size) = (env!("CARGO_PKG_VERSION"), show_size(config.memory_bytes));
    let mut locking = Locking::new(config.memory_bytes);
    let server = Server::start_telling(config, Some(store), &mut |bytes| locking.report(bytes)).map_err(of_start)?;
    let control = control.map_or_else(String::new, |path| format!("; its control socket is {path}"));
    tracing::info!("remoca {version} serves {size} of memory{control}");
    let addresses: Vec<String> = server.local_addresses().iter().map(ListenAddress::to_string).collect();
    // The parent may not read our output; that is no reason to end.
    let _said = writeln!(std::io::stdout(), "listening on {}", addresses.join(" "));
    if let Err(error) = sd_notify::notify(&[NotifyState::Ready]) {
        tracing::warn!(%error, "cannot tell the service manager that the server is ready");
    }
    let name = runtime.block_on(async {
        tokio::select! {
            _ = terminate.recv() => "SIGTERM",
            _ = interrupt.recv() => "SIGINT",
        }
    });
    tracing::info!("{name}: stopping");
    let _told = sd_notify::notify(&[NotifyState::Stopping]);
    server.shutdown();
    Ok(())
}

/// Returns the error of a server that could not start, marked if only the operator can mend it.
fn of_start(error: StartError) -> anyhow::Error {
    match error.is_lasting() {
        true => anyhow::Error::new(error).context(WrongOptions),
        false => error.into(),
    }
}

/// Report of how much memory is locked: to the log, and to the service manager, which would otherwise end a start that takes
/// long.
struct Locking {
    total_bytes: u64,
    started: Instant,
    reported: Option<Instant>,
}

impl Locking {
    /// Shortest time between two reports.
    const INTERVAL: Duration = Duration::from_secs(2);
    /// Time that the service manager gives after a report. One piece of memory takes far less.
    const PATIENCE: Duration = Duration::from_secs(60);

    fn new(total_bytes: u64) -> Self {
        Self { total_bytes, started: Instant::now(), reported: None }
    }

    fn report(&mut self, bytes: u64) {
        let (now, all) = (Instant::now(), show_size(self.total_bytes));
        if bytes == self.total_bytes {
            let seconds = self.started.elapsed().as_secs_f64();
            let state = format!("{all} of memory are locked, after {seconds:.1} s");
            tracing::info!("{state}");
            let _told = sd_notify::notify(&[NotifyState::Status(&state)]);
            return;
        }
        if self.reported.is_some_and(|reported| now < reported + Self::INTERVAL) {
            return;
        }
        self.reported = Some(now);
        let state = match bytes {
            0 => format!("locking {all} of memory: with much of it this takes a while"),
            _ => format!("locking memory: {} of {all} are locked", show_size(bytes)),
        };
        tracing::info!("{state}");
        let patience = u32::try_from(Self::PATIENCE.as_micros()).unwrap_or(u32::MAX);
        let _told = sd_notify::notify(&[NotifyState::ExtendTimeoutUsec(patience), NotifyState::Status(&state)]);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Read};
    use std::os::unix::net::{UnixDatagram, UnixStream};
    use std::process::{Child, Command, Stdio};

    use clap::Parser;
    use rustix::process::{Pid, Signal, kill_process};

    use super::*;

    const ARGUMENTS: &str = "REMOCA_TEST_SERVE_ARGUMENTS";

    #[derive(Parser, Debug)]
    struct Program {
        #[command(flatten)]
        serve: ServeArgs,
    }

    fn parse(arguments: &str) -> Result<ServeArgs, String> {
        let words = std::iter::once("serve").chain(arguments.split_whitespace());
        Program::try_parse_from(words).map(|program| program.serve).map_err(|error| error.to_string())
    }

    #[test]
    fn what_is_typed_becomes_a_config() {
        let typed = "--listen tcp:[::1]:7070 --listen unix:/run/x.sock --memory 2G --quota 1G --grace 5m --threads 3";
        let config = parse(typed).expect("good").config().expect("complete");
        assert_eq!(config.listen.len(), 2);
        assert_eq!((config.memory_bytes, config.quota_bytes), (2 << 30, Some(1 << 30)));
        assert_eq!((config.grace, config.threads), (Duration::from_secs(300), 3));
        assert_eq!(config.locking, PageLocking::Locked);
        let config = parse("--listen tcp:h:1 --memory 2M --no-lock").expect("good").config().expect("complete");
        assert_eq!((config.locking, config.quota_bytes), (PageLocking::Unlocked, None));
        assert_eq!(config.grace, Duration::from_secs(60));
        assert!(config.threads >= 1);
    }

    #[test]
    fn what_is_wrong_is_said() {
        let cases = [
            ("--memory 2G", "--listen"),
            ("--listen tcp:h:1", "--memory"),
            ("--listen h:1 --memory 2G", "begins with `tcp:` or `unix:`"),
            ("--listen tcp:h:1 --memory lots", "`lots` is not a size"),
            ("--listen tcp:h:1 --memory 2G --grace 60", "`60` is not a time"),
            ("--listen tcp:h:1 --memory 2G --grace s", "`s` is not a time"),
            ("--listen tcp:h:1 --memory 2G --grace 999999h", "longer than a month"),
        ];
        for (typed, words) in cases {
            let refusal = match parse(typed) {
                Err(refusal) => refusal,
                Ok(args) => format!("{:#}", args.config().expect_err(typed)),
            };
            assert!(refusal.contains(words), "{typed}: {refusal}");
        }
    }

    /// Runs the program itself, as a child process that can be sent signals.
    #[test]
    #[ignore = "only a child of the tests below"]
    fn as_a_child() {
        let arguments = std::env::var(ARGUMENTS).expect("set by the parent");
        let words: Vec<OsString> = arguments.split_whitespace().map(OsString::from).collect();
        run(&parse(&arguments).expect("good"), &words).expect("a server that runs until it is told to stop");
    }

    /// Starts the program, and returns it with the line that reports its addresses.
    fn spawn(arguments: &str, notify: Option<&Path>) -> (Child, String) {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args(["--exact", "serve::tests::as_a_child", "--ignored", "--nocapture"]);
        command.env(ARGUMENTS, arguments).env_remove("NOTIFY_SOCKET").stdout(Stdio::piped());
        if let Some(path) = notify {
            command.env("NOTIFY_SOCKET", path);
        }
        let mut child = command.spawn().expect("it starts");
        let mut output = BufReader::new(child.stdout.take().expect("piped"));
        let mut lines = output.by_ref().lines().map_while(Result::ok);
        let line = lines.find_map(|line| line.find("listening on").map(|at| line[at..].to_owned()));
        // Keep the pipe open, so that the child can write its further output.
        child.stdout = Some(output.into_inner());
        (child, line.expect("it says where it listens"))
    }

    #[test]
    fn it_says_when_it_is_ready_and_stops_when_it_is_told_to() {
        let folder = tempfile::tempdir().expect("a folder");
        let [socket, control, notify] = ["s.sock", "c.sock", "notify"].map(|name| folder.path().join(name));
        let manager = UnixDatagram::bind(&notify).expect("a socket");
        let typed = format!(
            "--listen unix:{} --listen tcp:127.0.0.1:0 --memory 4M --no-lock --control {}",
            socket.display(),
            control.display()
        );
        for signal in [Signal::TERM, Signal::INT] {
            let (mut child, line) = spawn(&typed, Some(&notify));
            assert!(line.starts_with(&format!("listening on unix:{} tcp:127.0.0.1:", socket.display())), "{line}");
            let mut told = [0; 100];
            let count = manager.recv(&mut told).expect("the manager is told");
            assert_eq!(&told[..count], b"READY=1\n");
            UnixStream::connect(&socket).expect("it listens");
            let mut status = String::new();
            UnixStream::connect(&control).expect("it listens").read_to_string(&mut status).expect("an answer");
            assert!(status.contains("\"pages\": 1024"), "{status}");
            kill_process(Pid::from_child(&child), signal).expect("it is there");
            assert!(child.wait().expect("it ends").success());
            assert!(!socket.exists() && !control.exists(), "the sockets go with it");
            let count = manager.recv(&mut told).expect("the manager is told");
            assert_eq!(&told[..count], b"STOPPING=1\n");
        }
    }

    #[test]
    fn one_that_was_killed_leaves_nothing_in_the_way() {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("s.sock");
        let typed = format!("--listen unix:{} --memory 4M --no-lock", socket.display());
        for _ in 0..2 {
            let (mut child, _) = spawn(&typed, None);
            UnixStream::connect(&socket).expect("it listens");
            child.kill().expect("it is there");
            child.wait().expect("it ends");
            assert!(socket.exists(), "or there would be nothing to clear away");
        }
    }
}
