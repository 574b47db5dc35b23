//! Asks another program, with the arguments that it would get, whether it could take over in this process. The driver
//! decides when (`driver/upgrade.rs`); how it takes over is in [`remoca_io::handover`]. See
//! `docs/decisions/0021-upgrade.md`.

use remoca_frontend::vhost::MappedMemory;
use remoca_io::handover::VARIABLE;
use remoca_io::wake;
use remoca_protocol::handover::VERSION;
use remoca_protocol::offer::Offers;
use serde::{Deserialize, Serialize};
use std::ffi::{OsStr, OsString};
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// Option that asks this, in front of a subcommand's other arguments.
const OPTION: &str = "--check-handover";
/// Time limit for an answer.
const PATIENCE: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// Maximum number of bytes kept of a program's answer, which has some 150 for each disk.
const ANSWER_BYTES_MAX: usize = 1 << 20;
/// Maximum number of bytes kept of its complaint.
const COMPLAINT_BYTES_MAX: usize = 600;
/// Maximum number of bytes read of one of them at a time.
const LOOK_BYTES_MAX: usize = 1 << 20;

/// The answer of a program that could take over.
#[derive(Debug, Serialize, Deserialize)]
struct Confirmation {
    /// Version of the description that it reads.
    remoca_handover: u32,
    version: String,
    /// What it would offer to guests. Programs that do not say it may disconnect them.
    #[serde(default)]
    offers: Option<Offers>,
}

/// Returns the answer of this program, which would make these `offers`.
#[must_use]
pub fn confirmation(offers: Offers) -> String {
    let version = env!("CARGO_PKG_VERSION").into();
    serde_json::to_string(&Confirmation { remoca_handover: VERSION, version, offers: Some(offers) }).unwrap_or_default()
}

/// A program that could take over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Successor {
    pub version: String,
    /// What it would offer to guests, or `None` if it does not say.
    pub offers: Option<Offers>,
}

/// A check in progress. It has a thread of its own, because it waits for another process.
pub struct Checking {
    verdict: Receiver<Result<Successor, String>>,
    wake: Arc<OwnedFd>,
}

/// Function that asks a program, which would be started with these arguments (its name, a subcommand, and so on), and lets go
/// of guest memory if it could take over.
pub type Ask = Box<dyn Fn(PathBuf, Vec<OsString>, Vec<MappedMemory>) -> io::Result<Checking> + Send>;

/// The sender of a [`Checking`]'s verdict.
pub struct Verdict {
    sender: Sender<Result<Successor, String>>,
    wake: Arc<OwnedFd>,
}

impl Verdict {
    /// Sends the program that could take over, or the reason why it cannot.
    pub fn give(self, verdict: Result<Successor, String>) {
        let _ = self.sender.send(verdict);
        wake::raise(&*self.wake);
    }
}

impl Checking {
    /// Returns a check, and the sender of its verdict.
    ///
    /// # Errors
    /// If the system has no descriptors left.
    pub fn pending() -> io::Result<(Self, Verdict)> {
        let wake = Arc::new(wake::new()?);
        let (sender, verdict) = channel();
        Ok((Self { verdict, wake: Arc::clone(&wake) }, Verdict { sender, wake }))
    }

    /// Starts to ask `program`, which would be started with `arguments` (its name, a subcommand, and so on). If it could take
    /// over, lets go of `memory` before the verdict: `execve` would do that while guests wait.
    ///
    /// # Errors
    /// If the system has no descriptors or threads left.
    pub fn start(program: PathBuf, arguments: Vec<OsString>, memory: Vec<MappedMemory>) -> io::Result<Self> {
        let (checking, verdict) = Self::pending()?;
        let asking = move || {
            let give_up_at = Instant::now() + PATIENCE;
            let said = ask(&program, &arguments);
            memory.into_iter().filter(|_| said.is_ok()).for_each(|memory| memory.let_go(give_up_at));
            verdict.give(said);
        };
        std::thread::Builder::new().name("upgrade check".into()).spawn(asking)?;
        Ok(checking)
    }

    /// Returns a descriptor that becomes readable when [`Self::verdict`] has an answer.
    #[must_use]
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Returns the program that could take over, or the reason why it cannot. Returns `None` while neither is known.
    #[must_use]
    pub fn verdict(&self) -> Option<Result<Successor, String>> {
        self.verdict.try_recv().ok()
    }
}

/// Asks the program, and blocks until it has answered or its time is over.
fn ask(program: &Path, arguments: &[OsString]) -> Result<Successor, String> {
    let shown = program.display();
    let mut rest = arguments.iter().skip(1).map(OsString::as_os_str);
    let subcommand = rest.next().unwrap_or(OsStr::new("disk"));
    let mut command = std::process::Command::new(program);
    command.arg(subcommand).arg(OPTION).args(rest);
    for variable in [VARIABLE, "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS"] {
        command.env_remove(variable);
    }
    // What it logs besides is no complaint.
    command.env_remove("REMOCA_LOG");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| format!("{shown} cannot be started: {error}"))?;
    let mut answer = Hearing::new(child.stdout.take(), ANSWER_BYTES_MAX);
    let mut complaint = Hearing::new(child.stderr.take(), COMPLAINT_BYTES_MAX);
    let ended = wait(&mut child, || {
        answer.listen();
        complaint.listen();
    });
    let (said, complaint) = (answer.into_text(), complaint.into_text());
    match ended {
        None => return Err(format!("{shown} did not say within {} seconds whether it could", PATIENCE.as_secs())),
        Some(status) if !status.success() => {
            let reason = complaint.lines().find(|line| !line.trim().is_empty()).unwrap_or("it says nothing");
            return Err(format!("{shown} cannot take over with these options ({status}): {}", reason.trim()));
        }
        Some(_) => {}
    }
    match serde_json::from_str(said.trim()) {
        Ok(Confirmation { remoca_handover: VERSION, version, offers }) => Ok(Successor { version, offers }),
        Ok(Confirmation { remoca_handover, version, .. }) => Err(format!(
            "{shown} (version {version}) takes over by description {remoca_handover}, this one gives {VERSION}"
        )),
        Err(_) => Err(format!("{shown} is no remoca that could take over")),
    }
}

/// Waits for the process to end, and calls `listen` from time to time and after the end. Returns the exit status, or
/// `None` if the process had to be killed.
fn wait(child: &mut Child, mut listen: impl FnMut()) -> Option<ExitStatus> {
    let give_up_at = Instant::now() + PATIENCE;
    loop {
        let ended = child.try_wait();
        listen();
        match ended {
            Ok(Some(status)) => return Some(status),
            Ok(None) if Instant::now() < give_up_at => std::thread::sleep(LOOK_EVERY),
            Ok(None) | Err(_) => {
                // Both fail only if it has ended meanwhile.
                let _ = child.kill();
                let _ = child.wait();
                return None;
            }
        }
    }
}

/// What a process writes to a pipe. It is read while the process runs, because a full pipe would stop the process. A
/// child of that process may have the pipe open, so nothing here waits for the end of the pipe.
struct Hearing<P> {
    /// The pipe, if it can be read without blocking.
    pipe: Option<P>,
    /// The first bytes. The rest is read and dropped.
    heard: Vec<u8>,
    /// Maximum number of bytes of `heard`.
    bytes_max: usize,
}

impl<P: Read + AsFd> Hearing<P> {
    fn new(pipe: Option<P>, bytes_max: usize) -> Self {
        let pipe = pipe.filter(|pipe| rustix::io::ioctl_fionbio(pipe, true).is_ok());
        Self { pipe, heard: Vec::new(), bytes_max }
    }

    /// Reads what is in the pipe, and at most [`LOOK_BYTES_MAX`], however fast the process writes.
    fn listen(&mut self) {
        let Some(pipe) = &mut self.pipe else { return };
        let mut bytes = [0; 16 << 10];
        for _ in 0..LOOK_BYTES_MAX / bytes.len() {
            match pipe.read(&mut bytes) {
                Ok(0) => return,
                Ok(count) => {
                    let room = self.bytes_max - self.heard.len();
                    self.heard.extend(&bytes[..count.min(room)]);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    }

    fn into_text(self) -> String {
        String::from_utf8_lossy(&self.heard).into_owned()
    }
}
