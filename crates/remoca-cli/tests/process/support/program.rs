//! `remoca` as child processes, and their output.

use super::{PATIENCE, wait_at_most, wait_until};
use remoca_io::fake_manager::FakeManager;
use remoca_protocol::control::Status;
use serde_json::Value;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use rustix::process::Signal;

/// The program under test.
pub const REMOCA: &str = env!("CARGO_BIN_EXE_remoca");

/// How long `remoca set` waits for memory servers.
const GRANT_TIME_MAX: Duration = Duration::from_secs(3);

/// Returns a command whose process dies with the test.
pub fn command(binary: impl AsRef<Path>) -> Command {
    prepare(Command::new(binary.as_ref()), true)
}

/// Returns a command that runs `binary` as a service of `manager`, which passes it what it keeps.
pub fn service(manager: &FakeManager, binary: &Path) -> Command {
    prepare(manager.service(binary), false)
}

fn prepare(mut command: Command, is_alone: bool) -> Command {
    if is_alone {
        // A unit may run the tests.
        for variable in ["NOTIFY_SOCKET", "RUNTIME_DIRECTORY", "CREDENTIALS_DIRECTORY"] {
            command.env_remove(variable);
        }
    }
    // Not what this machine has configured.
    command.env("REMOCA_CONFIG", "/nonexistent");
    command.env_remove("REMOCA_LOG").stdin(Stdio::null());
    // SAFETY: prctl is a system call, allowed between fork and exec; it touches no memory.
    unsafe {
        command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
    command
}

/// Copies a program in a separate process. If this process had the file open for writing while another test forks,
/// the child would keep it open until its `exec`, and a file that is open for writing cannot be executed.
pub fn install(source: &Path, target: &Path) {
    assert!(command("install").args(["-m", "755"]).args([source, target]).status().unwrap().success());
}

/// Descriptor number that [`pass`] uses; no file here has it.
pub const PASSED: &str = "900";

/// Passes a copy of `file` to the process of `command` as descriptor [`PASSED`]. No other child gets one.
pub fn pass<'c>(command: &'c mut Command, file: &impl AsRawFd) -> &'c mut Command {
    let (fd, number) = (file.as_raw_fd(), PASSED.parse().unwrap());
    // SAFETY: dup2 is a system call, allowed between fork and exec; it touches no memory.
    unsafe {
        command.pre_exec(move || match libc::dup2(fd, number) {
            -1 => Err(std::io::Error::last_os_error()),
            _ => Ok(()),
        })
    }
}

/// Returns a command to which a program is appended: it sees `run` as `/run/remoca`, and nothing else in `/run`. Returns `None` if this
/// user may not mount.
pub fn with_run(run: &Path) -> Option<Command> {
    const SCRIPT: &str = "mount -t tmpfs -o mode=755 tmpfs /run && mkdir /run/remoca && mount --bind \"$1\" /run/remoca && shift && exec \"$@\"";
    let start = || {
        let mut shell = command("unshare");
        shell.args(["--mount", "sh", "-c", SCRIPT, "sh"]).arg(run);
        shell
    };
    start().arg("true").output().unwrap().status.success().then(start)
}

/// Runs `remoca` to its end, and returns its output.
#[track_caller]
pub fn run<S: AsRef<std::ffi::OsStr>>(arguments: &[S]) -> Output {
    run_command(command(REMOCA).args(arguments))
}

/// Runs `remoca set`. Returns what it says, and whether it waited for memory servers as long as it ever does.
#[track_caller]
pub fn set(control: &Path, arguments: &[&str]) -> (String, bool) {
    let begun = Instant::now();
    let output = run(&[&["set", control.to_str().unwrap()], arguments].concat());
    assert!(output.status.success(), "{output:?}");
    (String::from_utf8(output.stdout).unwrap(), begun.elapsed() >= GRANT_TIME_MAX)
}

/// Repeats `remoca set` until it says `wanted`: a server may need more time than the command gives it.
#[track_caller]
pub fn expect_set(control: &Path, arguments: &[&str], wanted: &str) {
    wait_until(wanted, || {
        let (said, has_waited) = set(control, arguments);
        assert!(said == wanted || has_waited, "it did not wait: {said}");
        said == wanted
    });
}

/// Runs a command to its end. A program that keeps running where it should have refused is killed, and fails the
/// test.
#[track_caller]
pub fn run_command(command: &mut Command) -> Output {
    run_within(PATIENCE, command)
}

/// Repeats a `remoca check` of processes that are well, until they have answered within its second: on a busy machine one may not,
/// now and then.
#[track_caller]
pub fn until_answered(mut check: impl FnMut() -> Output) -> Output {
    let mut answered = None;
    wait_until("the processes answer in time", || {
        let output = check();
        let hangs = String::from_utf8_lossy(&output.stdout).contains("it has not answered for ");
        answered = (!hangs).then_some(output);
        answered.is_some()
    });
    answered.unwrap()
}

#[track_caller]
pub fn run_within(patience: Duration, command: &mut Command) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let [out, err] = ["out", "err"].map(|name| folder.path().join(name));
    command.stdout(File::create(&out).unwrap()).stderr(File::create(&err).unwrap());
    let mut child = Killed(command.spawn().unwrap());
    let mut status = None;
    wait_at_most(patience, "the program ends", || {
        status = child.0.try_wait().unwrap();
        status.is_some()
    });
    Output { status: status.unwrap(), stdout: std::fs::read(out).unwrap(), stderr: std::fs::read(err).unwrap() }
}

/// Checks a refusal: exit code `code`, nothing on standard output, no panic, and `words` on standard error.
#[track_caller]
pub fn expect_refusal(output: &Output, code: i32, words: &[&str]) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{said}");
    assert!(output.stdout.is_empty(), "{}", String::from_utf8_lossy(&output.stdout));
    assert!(!said.contains("panicked"), "{said}");
    for word in words {
        assert!(said.contains(word), "`{word}` is missing in: {said}");
    }
}

/// Killed when dropped.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // Both fail only if the process has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A running process, killed when dropped; its log is shown if the test failed.
pub struct Program {
    child: Killed,
    name: PathBuf,
    /// Kept open, so that it can be shown when its folder is gone.
    log: File,
}

impl Program {
    /// Starts the command with both outputs appended to `log`.
    pub fn start(command: &mut Command, log: &Path) -> Self {
        let file = File::options().create(true).append(true).read(true).open(log).unwrap();
        command.stdout(file.try_clone().unwrap()).stderr(file.try_clone().unwrap());
        Self { child: Killed(command.spawn().unwrap()), name: log.into(), log: file }
    }

    pub fn pid(&self) -> u32 {
        self.child.0.id()
    }

    /// Returns the process's resident memory, in bytes.
    pub fn resident_bytes(&self) -> u64 {
        let statm = std::fs::read_to_string(format!("/proc/{}/statm", self.pid())).unwrap();
        statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
    }

    pub fn is_running(&mut self) -> bool {
        self.child.0.try_wait().unwrap().is_none()
    }

    /// Returns everything that the process, and its predecessors with the same log, wrote so far.
    pub fn log(&self) -> String {
        let mut text = vec![0; self.log.metadata().unwrap().len() as usize];
        self.log.read_exact_at(&mut text, 0).unwrap();
        String::from_utf8_lossy(&text).into_owned()
    }

    /// Kills the process with SIGKILL.
    pub fn kill(&mut self) {
        self.child.0.kill().unwrap();
        self.child.0.wait().unwrap();
    }

    /// Sends a signal. After [`Signal::STOP`], returns when no thread of the program runs.
    #[track_caller]
    pub fn signal(&self, signal: Signal) {
        rustix::process::kill_process(rustix::process::Pid::from_child(&self.child.0), signal).unwrap();
        if signal == Signal::STOP {
            let tasks = PathBuf::from(format!("/proc/{}/task", self.pid()));
            let has_stopped = |task: PathBuf| {
                // A thread that has just ended no longer has a file.
                let stat = std::fs::read_to_string(task.join("stat")).unwrap_or_default();
                stat.rsplit_once(") ").is_none_or(|(_, state)| state.starts_with('T'))
            };
            wait_until("the program stands still", || {
                std::fs::read_dir(&tasks).unwrap().all(|task| has_stopped(task.unwrap().path()))
            });
        }
    }

    /// Asks the process to end, and expects that it does so in good order.
    #[track_caller]
    pub fn terminate(&mut self) {
        self.signal(Signal::TERM);
        let mut status = None;
        wait_until("the program ends after SIGTERM", || {
            status = self.child.0.try_wait().unwrap();
            status.is_some()
        });
        assert_eq!(status.unwrap().code(), Some(0), "{}", self.log());
    }

    /// Returns the value of a line `name:   1234 kB` of /proc/PID/status, in bytes.
    pub fn memory(&self, name: &str) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = text.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
    }

    /// Returns how often each thread of the process got or gave up a processor.
    fn switches(&self) -> Vec<(PathBuf, String)> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.pid())).unwrap();
        let switches = tasks.map(|task| {
            let task = task.unwrap().path();
            // A thread that has just ended no longer has a file.
            let text = std::fs::read_to_string(task.join("status")).unwrap_or_default();
            (task, text.lines().filter(|line| line.contains("ctxt_switches")).collect())
        });
        switches.collect()
    }

    /// Waits until no thread of the process wakes up for a while, which is much shorter than the time between two looks at the sizes of
    /// its images: they are all that a process without work does.
    #[track_caller]
    pub fn wait_until_asleep(&self) {
        let mut before = self.switches();
        let give_up_at = Instant::now() + PATIENCE;
        loop {
            std::thread::sleep(Duration::from_millis(300));
            let now = self.switches();
            if now == before {
                return;
            }
            assert!(Instant::now() < give_up_at, "it wakes up again and again: {now:?}");
            before = now;
        }
    }

    /// Returns whether the process waits for a peer to accept more data.
    pub fn waits_to_write(&self) -> bool {
        let files = std::fs::read_dir(format!("/proc/{}/fdinfo", self.pid())).unwrap();
        // A descriptor may have been closed meanwhile.
        let texts = files.filter_map(|file| std::fs::read_to_string(file.unwrap().path()).ok());
        let waits = |line: &str| {
            let (_, events) = line.strip_prefix("tfd:")?.split_once("events:")?;
            let events = u32::from_str_radix(events.split_whitespace().next()?, 16).ok()?;
            Some(events & libc::EPOLLOUT as u32 != 0)
        };
        texts.into_iter().any(|text| text.lines().any(|line| waits(line) == Some(true)))
    }

    /// Returns how long the process's timer allows it to sleep if nothing else wakes it.
    pub fn sleeps_for(&self) -> Duration {
        let files = format!("/proc/{}/fd", self.pid());
        let is_timer =
            |file: &PathBuf| std::fs::read_link(file).is_ok_and(|link| link.ends_with("anon_inode:[timerfd]"));
        let timer = std::fs::read_dir(files).unwrap().map(|file| file.unwrap().path()).find(is_timer).unwrap();
        let number = timer.file_name().unwrap().to_str().unwrap();
        let text = std::fs::read_to_string(format!("/proc/{}/fdinfo/{number}", self.pid())).unwrap();
        let value = text.lines().find_map(|line| line.strip_prefix("it_value: (")).unwrap().trim_end_matches(')');
        let (seconds, nanoseconds) = value.split_once(", ").unwrap();
        Duration::new(seconds.parse().unwrap(), nanoseconds.parse().unwrap())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- {}\n{}", self.name.display(), self.log());
        }
    }
}

/// A running `remoca serve`.
pub struct Serve {
    pub program: Program,
    pub address: String,
    arguments: Vec<String>,
    folder: PathBuf,
    manager: Option<Arc<FakeManager>>,
}

impl Serve {
    /// Starts a server at the Unix socket `server` in `folder`.
    pub fn start(folder: &Path, memory: &str) -> Self {
        Self::start_at(folder, memory, &format!("unix:{}", folder.join("server").display()))
    }

    /// Starts a server with more options.
    pub fn start_with(folder: &Path, memory: &str, options: &[&str]) -> Self {
        Self::start_by(folder, memory, &format!("unix:{}", folder.join("server").display()), options, None)
    }

    /// Starts a server as a service of `manager`, which keeps its pools.
    pub fn start_under(manager: Arc<FakeManager>, folder: &Path, memory: &str) -> Self {
        let address = format!("unix:{}", folder.join("server").display());
        Self::start_by(folder, memory, &address, &[], Some(manager))
    }

    /// Returns the address at which the server's pools are mapped.
    pub fn local_address(&self) -> String {
        self.address.replace("unix:", "local:")
    }

    pub fn start_at(folder: &Path, memory: &str, address: &str) -> Self {
        Self::start_by(folder, memory, address, &[], None)
    }

    fn start_by(
        folder: &Path,
        memory: &str,
        address: &str,
        options: &[&str],
        manager: Option<Arc<FakeManager>>,
    ) -> Self {
        let control = folder.join("server.ctl");
        let arguments = ["serve", "--no-lock", "--threads", "1", "--memory", memory, "--listen", address, "--control"];
        let mut arguments: Vec<String> = arguments.map(String::from).to_vec();
        arguments.push(control.display().to_string());
        arguments.extend(options.iter().map(|option| (*option).to_owned()));
        let program = Self::spawn(folder, &arguments, manager.as_deref());
        Self { program, address: address.into(), arguments, folder: folder.into(), manager }
    }

    fn spawn(folder: &Path, arguments: &[String], manager: Option<&FakeManager>) -> Program {
        let log = folder.join("serve.log");
        let starts = |log: &str| log.matches("listening on ").count();
        let before = std::fs::read_to_string(&log).map_or(0, |log| starts(&log));
        let mut command = manager.map_or_else(|| command(REMOCA), |manager| service(manager, Path::new(REMOCA)));
        let mut program = Program::start(command.args(arguments), &log);
        wait_until("the memory server listens", || {
            assert!(program.is_running(), "{}", program.log());
            starts(&program.log()) > before
        });
        program
    }

    /// Restarts the server, after it was killed or terminated.
    pub fn restart(&mut self) {
        self.program = Self::spawn(&self.folder, &self.arguments, self.manager.as_deref());
    }

    /// Returns the server's status.
    pub fn status(&self) -> Value {
        let mut text = String::new();
        let mut stream = UnixStream::connect(self.folder.join("server.ctl")).unwrap();
        stream.read_to_string(&mut text).unwrap();
        serde_json::from_str(&text).unwrap()
    }

    /// Returns the number of pages that pools have.
    pub fn pages_given(&self) -> u64 {
        let status = self.status();
        status["pages"].as_u64().unwrap() - status["pages_free"].as_u64().unwrap()
    }
}

/// An nbdkit that serves one file in blocks of a given size.
pub struct Nbdkit {
    pub program: Program,
    socket: PathBuf,
    image: PathBuf,
    block: usize,
    /// Time that each read takes at least, as nbdkit's filter wants it; empty for none.
    delay: &'static str,
}

impl Nbdkit {
    pub fn start(socket: &Path, image: &Path) -> Self {
        Self::start_in_blocks(socket, image, 4096, "")
    }

    pub fn start_in_blocks(socket: &Path, image: &Path, block: usize, delay: &'static str) -> Self {
        // Removes what a killed predecessor left.
        let _ = std::fs::remove_file(socket);
        let mut command = command("nbdkit");
        command.args(["-f", "--filter=blocksize-policy", "-U"]).arg(socket).arg("file").arg(image);
        command.arg(format!("blocksize-minimum={block}"));
        command.args(["blocksize-preferred=4K", "blocksize-error-policy=error"]);
        if !delay.is_empty() {
            command.arg("--filter=delay").arg(format!("rdelay={delay}"));
        }
        let mut program = Program::start(&mut command, &socket.with_extension("log"));
        wait_until("nbdkit listens", || {
            assert!(program.is_running(), "{}", program.log());
            UnixStream::connect(socket).is_ok()
        });
        Self { program, socket: socket.into(), image: image.into(), block, delay }
    }

    /// Returns the URI for `--image`.
    pub fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket.display())
    }

    /// Restarts nbdkit, after it was killed.
    pub fn restart(&mut self) {
        *self = Self::start_in_blocks(&self.socket, &self.image, self.block, self.delay);
    }
}

/// Sends bytes to a control socket, and returns the answer. It is empty if the process closes without one.
pub fn ask_raw(socket: &Path, bytes: &[u8]) -> String {
    let mut stream = UnixStream::connect(socket).unwrap();
    // The process may stop reading before it has everything.
    let _ = stream.write_all(bytes);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8(answer).unwrap()
}

/// Returns the status of the VM process at `socket`.
#[track_caller]
pub fn status(socket: &Path) -> Status {
    let answer = ask_raw(socket, b"{\"op\":\"status\"}\n");
    serde_json::from_str(&answer).unwrap_or_else(|error| panic!("{error}: {answer}"))
}
