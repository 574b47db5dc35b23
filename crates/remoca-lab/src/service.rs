//! Child processes that end with this process, and daemons next to a guest.

use std::{
    env,
    fs::{self, File},
    io,
    os::unix::{net::UnixStream, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{OnceLock, mpsc},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, getppid, kill_process, set_parent_process_death_signal};

use crate::error::{Context, Error, Result};

const POLL: Duration = Duration::from_millis(10);

/// A daemon that runs next to a guest: a store, a back end, a memory server. Killed when dropped.
#[derive(Debug)]
pub struct Service {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Service {
    /// Starts the command with its output appended to the file `log`.
    pub fn start(name: &str, mut command: Command, log: &Path) -> Result<Service> {
        let file = File::options().create(true).append(true).open(log).context_path("opening", log)?;
        let second = file.try_clone().context_path("opening", log)?;
        command.stdin(Stdio::null()).stdout(file).stderr(second);
        let child = spawn(command)?;
        Ok(Service { name: name.to_owned(), child, log: log.to_owned() })
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the daemon's last lines of output.
    pub fn log_tail(&self) -> String {
        tail_of(&self.log)
    }

    /// Returns the daemon's exit status, or `None` if it is running.
    pub fn exit_status(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().context(format_args!("waiting for {}", self.name))
    }

    /// Waits until the Unix socket accepts a connection.
    pub fn wait_for_socket(&mut self, socket: &Path, limit: Duration) -> Result<()> {
        self.wait_until("opening its socket", limit, || UnixStream::connect(socket).is_ok())
    }

    /// Waits until the file exists. For daemons that accept only one connection, which a test connection would use up.
    pub fn wait_for_file(&mut self, path: &Path, limit: Duration) -> Result<()> {
        self.wait_until("creating its socket", limit, || path.exists())
    }

    /// Waits until the log contains the text.
    pub fn wait_for_log(&mut self, text: &str, limit: Duration) -> Result<()> {
        let log = self.log.clone();
        self.wait_until(&format!("writing '{text}'"), limit, || {
            fs::read(&log).is_ok_and(|bytes| String::from_utf8_lossy(&bytes).contains(text))
        })
    }

    /// Waits until `done` returns true. Returns an error if the daemon ends first, or after `limit`.
    pub fn wait_until(&mut self, what: &str, limit: Duration, mut done: impl FnMut() -> bool) -> Result<()> {
        let started = Instant::now();
        while !done() {
            if let Some(status) = self.exit_status()? {
                return Err(self.ended(status));
            }
            if started.elapsed() > limit {
                return Err(self.late(what, limit));
            }
            thread::sleep(POLL);
        }
        Ok(())
    }

    /// Waits until the daemon has ended, and returns its exit status.
    pub fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        let started = Instant::now();
        loop {
            if let Some(status) = self.exit_status()? {
                return Ok(status);
            }
            if started.elapsed() > limit {
                return Err(self.late("ending", limit));
            }
            thread::sleep(POLL);
        }
    }

    /// Asks the daemon to end (SIGTERM), and waits.
    pub fn terminate(&mut self, limit: Duration) -> Result<ExitStatus> {
        self.signal(Signal::TERM)?;
        self.wait(limit)
    }

    /// Kills the daemon (SIGKILL), and waits.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill().context(format_args!("killing {}", self.name))?;
        self.child.wait().context(format_args!("waiting for {}", self.name))?;
        Ok(())
    }

    /// Stops the daemon without ending it (SIGSTOP).
    pub fn freeze(&self) -> Result<()> {
        self.signal(Signal::STOP)
    }

    /// Resumes the daemon after [`freeze`](Service::freeze).
    pub fn thaw(&self) -> Result<()> {
        self.signal(Signal::CONT)
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        kill_process(Pid::from_child(&self.child), signal).context(format_args!("signalling {}", self.name))
    }

    fn ended(&self, status: ExitStatus) -> Error {
        Error::ServiceEnded { service: self.name.clone(), status: status.to_string(), log: self.log_tail() }
    }

    fn late(&self, what: &str, limit: Duration) -> Error {
        Error::ServiceTimeout { service: self.name.clone(), what: what.to_owned(), limit, log: self.log_tail() }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // The daemon may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns a command for a program of the system. Disk programs are not in the PATH of a normal user.
pub(crate) fn tool(program: &str) -> Command {
    let mut command = Command::new(program);
    let path = env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{path}:/usr/local/sbin:/usr/sbin:/sbin"));
    command
}

/// Runs a short command to its end and returns its standard output.
pub(crate) fn run(command: &mut Command) -> Result<Vec<u8>> {
    let text = format!("{command:?}");
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().map_err(|error| not_started(&program, error))?;
    if !output.status.success() {
        let said = [output.stdout, output.stderr].concat();
        let output_text = String::from_utf8_lossy(&said).into_owned();
        return Err(Error::Command { command: text, status: output.status.to_string(), output: output_text });
    }
    Ok(output.stdout)
}

/// Variable that names the folder of remoca's configuration.
const CONFIGURATION: &str = "REMOCA_CONFIG";

/// Starts a child that the kernel kills when this process ends. If it is remoca, and the command does not say otherwise, it has no
/// configuration: that of this machine is for other VMs.
///
/// The kernel ties the child to the *thread* that started it, and a test's thread may end before its guest should. So
/// all children are started by one thread that never ends.
pub(crate) fn spawn(mut command: Command) -> Result<Child> {
    type Request = (Command, mpsc::Sender<io::Result<Child>>);
    static STARTER: OnceLock<mpsc::Sender<Request>> = OnceLock::new();

    let program = command.get_program().to_string_lossy().into_owned();
    let parent = Pid::from_raw(i32::try_from(std::process::id()).unwrap_or_default());
    if command.get_envs().all(|(variable, _)| variable != CONFIGURATION) {
        command.env(CONFIGURATION, "/nonexistent");
    }
    // SAFETY: the closure runs between fork and exec and makes two system calls; it allocates nothing, takes no lock.
    unsafe {
        command.pre_exec(move || {
            set_parent_process_death_signal(Some(Signal::KILL))?;
            // The parent may have ended before the line above took effect.
            if getppid() == parent { Ok(()) } else { Err(io::ErrorKind::BrokenPipe.into()) }
        });
    }
    let starter = STARTER.get_or_init(|| {
        let (sender, receiver) = mpsc::channel::<Request>();
        thread::spawn(move || {
            for (mut command, answer) in receiver {
                // A caller that no longer waits has dropped its end.
                let _ = answer.send(command.spawn());
            }
        });
        sender
    });
    let (sender, receiver) = mpsc::channel();
    let gone = || Error::Invalid("the thread that starts processes has ended".into());
    starter.send((command, sender)).map_err(|_| gone())?;
    receiver.recv().map_err(|_| gone())?.map_err(|error| not_started(&program, error))
}

fn not_started(program: &str, error: io::Error) -> Error {
    if error.kind() == io::ErrorKind::NotFound {
        return Error::NotInstalled { program: program.to_owned() };
    }
    Error::Io { what: format!("starting {program}"), source: error }
}

fn tail_of(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(20)..].join("\n")
}
