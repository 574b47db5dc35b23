//! The command server in a laboratory guest: executes the host's requests from a virtio-serial port.
//!
//! Started by the guest's init with the port's device. Speaks [`remoca_lab::frame`].

use std::{
    collections::HashMap,
    env,
    fs::{self, File},
    io::{self, Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::process::{CommandExt, ExitStatusExt},
    },
    process::{Command, Stdio},
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc},
    thread,
};

use anyhow::Context;
use remoca_lab::frame::{Frame, Kind, PAYLOAD_SIZE_MAX};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::retry_on_intr,
    mount::{UnmountFlags, unmount},
    pipe::{PipeFlags, pipe_with},
    process::{Pid, Signal, kill_process_group},
    system::{RebootCommand, reboot},
};

/// How long output of a job is accepted after its shell has ended, while a background process still holds the pipe.
const LATE_OUTPUT: Timespec = Timespec { tv_sec: 0, tv_nsec: 500_000_000 };

fn main() -> anyhow::Result<()> {
    let path = env::args().nth(1).context("the port's device is missing")?;
    let mut port = File::options().read(true).write(true).open(&path).with_context(|| format!("opening {path}"))?;
    // The guest is put under memory pressure on purpose, and must stay reachable.
    fs::write("/proc/self/oom_score_adj", "-1000").context("setting the OOM score")?;
    let server = Arc::new(Server { port: Mutex::new(port.try_clone()?), groups: Mutex::default() });
    server.send(0, Kind::Hello, &[]);
    let mut uploads = HashMap::new();
    while let Some(frame) = Frame::read(&mut port)? {
        server.handle(frame, &mut uploads);
    }
    Ok(())
}

struct Server {
    port: Mutex<File>,
    /// Process group of each running job.
    groups: Mutex<HashMap<u32, Pid>>,
}

impl Server {
    fn handle(self: &Arc<Self>, frame: Frame, uploads: &mut HashMap<u32, io::Result<File>>) {
        let text = String::from_utf8_lossy(&frame.payload).into_owned();
        let job = frame.job;
        match frame.kind {
            Kind::Run => {
                let server = Arc::clone(self);
                thread::spawn(move || server.run(job, &text));
            }
            Kind::Signal => {
                let group = self.groups().get(&job).copied();
                if let (Some(group), Some(signal)) = (group, Signal::from_named_raw(frame.number())) {
                    // The group may have ended meanwhile.
                    let _ = kill_process_group(group, signal);
                }
            }
            Kind::Put => drop(uploads.insert(job, File::create(&text))),
            Kind::Data if frame.payload.is_empty() => {
                let result = uploads.remove(&job).unwrap_or_else(|| Err(io::ErrorKind::NotFound.into()));
                self.finish(job, result.map(drop));
            }
            Kind::Data => {
                if let Some(upload) = uploads.get_mut(&job)
                    && let Ok(file) = upload
                    && let Err(error) = file.write_all(&frame.payload)
                {
                    *upload = Err(error);
                }
            }
            Kind::Get => {
                let server = Arc::clone(self);
                thread::spawn(move || server.finish(job, server.send_file(job, &text)));
            }
            Kind::PowerOff => leave(RebootCommand::PowerOff),
            Kind::Reboot => leave(RebootCommand::Restart),
            Kind::Hello | Kind::Stdout | Kind::Stderr | Kind::Exit => {}
        }
    }

    fn run(self: &Arc<Self>, job: u32, command: &str) {
        let (ended, shell_runs) = match pipe_with(PipeFlags::CLOEXEC) {
            Ok((ended, shell_runs)) => (Arc::new(ended), shell_runs),
            Err(error) => return self.finish(job, Err(error.into())),
        };
        // This server is safe from the OOM killer; its jobs are not.
        let script = format!("echo 0 > /proc/self/oom_score_adj\n{command}");
        let spawned = Command::new("/bin/sh")
            .args(["-c", &script])
            .current_dir("/root")
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        let mut child = match spawned {
            Ok(child) => child,
            Err(error) => return self.finish(job, Err(error)),
        };
        self.groups().insert(job, Pid::from_child(&child));
        let (drained, all_drained) = mpsc::channel();
        if let Some(stdout) = child.stdout.take() {
            self.forward(job, Kind::Stdout, stdout, Arc::clone(&ended), drained.clone());
        }
        if let Some(stderr) = child.stderr.take() {
            self.forward(job, Kind::Stderr, stderr, ended, drained);
        }
        let status = child.wait();
        self.groups().remove(&job);
        drop(shell_runs);
        // Returns when both forwarders have dropped their end.
        let _ = all_drained.recv();
        match status {
            Ok(status) => {
                let number = status.code().or_else(|| status.signal().map(|signal| -signal)).unwrap_or(i32::MIN);
                self.send(job, Kind::Exit, &number.to_le_bytes());
            }
            Err(error) => self.finish(job, Err(error)),
        }
    }

    /// Forwards a stream until its end. Drops `drained` when everything that the shell wrote has been sent: the other
    /// end of `ended` is closed, and no more output comes.
    fn forward(
        self: &Arc<Self>,
        job: u32,
        kind: Kind,
        mut stream: impl Read + AsFd + Send + 'static,
        ended: Arc<OwnedFd>,
        drained: mpsc::Sender<()>,
    ) {
        let server = Arc::clone(self);
        thread::spawn(move || {
            let mut drained = Some(drained);
            let mut buffer = vec![0; PAYLOAD_SIZE_MAX];
            loop {
                if drained.is_some() && !is_more_expected(&stream, &*ended) {
                    drained = None;
                }
                match stream.read(&mut buffer) {
                    Ok(length @ 1..) => server.send(job, kind, &buffer[..length]),
                    Ok(0) | Err(_) => break,
                }
            }
        });
    }

    fn send_file(&self, job: u32, path: &str) -> io::Result<()> {
        let mut file = File::open(path)?;
        let mut buffer = vec![0; PAYLOAD_SIZE_MAX];
        loop {
            let length = file.read(&mut buffer)?;
            if length == 0 {
                return Ok(());
            }
            self.send(job, Kind::Stdout, &buffer[..length]);
        }
    }

    fn finish(&self, job: u32, result: io::Result<()>) {
        let code: i32 = match result {
            Ok(()) => 0,
            Err(error) => {
                self.send(job, Kind::Stderr, error.to_string().as_bytes());
                1
            }
        };
        self.send(job, Kind::Exit, &code.to_le_bytes());
    }

    fn send(&self, job: u32, kind: Kind, data: &[u8]) {
        let mut port = self.port.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = Frame::write(&mut *port, job, kind, data) {
            // To the console, which the host reads when the port is silent.
            eprintln!("lab: writing to the port: {error}");
        }
    }

    fn groups(&self) -> MutexGuard<'_, HashMap<u32, Pid>> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waits for data in the stream, but no longer than [`LATE_OUTPUT`] once the shell has ended. Returns whether to read on.
fn is_more_expected(stream: impl AsFd, ended: impl AsFd) -> bool {
    let either = &mut [PollFd::new(&stream, PollFlags::IN), PollFd::new(&ended, PollFlags::IN)];
    // If the poll fails, the read decides.
    if retry_on_intr(|| poll(either, None)).is_err() || !either[0].revents().is_empty() {
        return true;
    }
    let late = &mut [PollFd::new(&stream, PollFlags::IN)];
    retry_on_intr(|| poll(late, Some(&LATE_OUTPUT))) != Ok(0)
}

/// Unmounts the file systems that jobs have mounted, newest first, and powers off or reboots.
fn leave(command: RebootCommand) {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    for line in mounts.lines().rev() {
        let mut fields = line.split(' ');
        let (Some(device), Some(target)) = (fields.next(), fields.next()) else { continue };
        if device.starts_with("/dev/")
            && !["/", "/payload"].contains(&target)
            && let Err(error) = unmount(target, UnmountFlags::empty())
        {
            eprintln!("lab: unmounting {target}: {error}");
        }
    }
    rustix::fs::sync();
    if let Err(error) = reboot(command) {
        eprintln!("lab: leaving: {error}");
    }
}
