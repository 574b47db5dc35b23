//! Jobs in a running guest, over its virtio-serial port: the host's side of [`crate::frame`].
//!
//! One thread reads the port and assigns everything to its job; callers wait on a condition variable. Output beyond
//! [`OUTPUT_SIZE_MAX`] is dropped, and the job's output is marked as truncated.

use std::{
    collections::HashMap,
    fs::File,
    io::{self, Write},
    os::unix::net::UnixStream,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use crate::frame::{Frame, Kind};

/// Maximum size of one stream of one job, in bytes.
const OUTPUT_SIZE_MAX: usize = 256 << 20;

/// A job's output and exit status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    /// Exit code, or the negated number of the signal that killed the job.
    pub status: i32,
    /// Whether the output exceeded the laboratory's limit.
    pub truncated: bool,
}

impl Output {
    pub fn success(&self) -> bool {
        self.status == 0 && !self.truncated
    }

    /// Returns standard output as text, without the final line end.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).trim_end().to_owned()
    }
}

/// A job that runs in a guest. Dropping this value forgets the job, which keeps running.
#[derive(Debug)]
pub struct Job {
    pub(crate) id: u32,
    pub(crate) command: String,
    /// Bytes of its standard output already returned as lines.
    consumed_size: usize,
    channel: Channel,
}

/// Reason why a wait failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    TimedOut,
    /// The guest ended or rebooted.
    Closed,
}

#[derive(Clone, Debug)]
pub(crate) struct Channel {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    writer: Mutex<UnixStream>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    hello_count: u32,
    closed: bool,
    next_job: u32,
    jobs: HashMap<u32, JobState>,
}

#[derive(Debug, Default)]
struct JobState {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    truncated: bool,
    end: Option<End>,
}

#[derive(Clone, Copy, Debug)]
enum End {
    Exit(i32),
    Lost,
}

impl Channel {
    /// Serves the port on a thread of its own. All output also goes to `log`.
    pub fn open(port: UnixStream, log: File) -> io::Result<Channel> {
        let writer = Mutex::new(port.try_clone()?);
        let shared = Arc::new(Shared { writer, state: Mutex::default(), changed: Condvar::new() });
        let channel = Channel { shared: Arc::clone(&shared) };
        thread::spawn(move || shared.read_all(port, log));
        Ok(channel)
    }

    /// Waits until the guest's command server has started more than `seen_count` times. Returns how often it has started.
    pub fn wait_for_hello(&self, seen_count: u32, limit: Duration) -> Result<u32, Failure> {
        self.shared.wait(limit, |state| match state.hello_count {
            count if count > seen_count => Some(Ok(count)),
            _ if state.closed => Some(Err(Failure::Closed)),
            _ => None,
        })
    }

    pub fn hello_count(&self) -> u32 {
        self.shared.lock().hello_count
    }

    pub fn start(&self, kind: Kind, payload: &[u8]) -> io::Result<Job> {
        let id = {
            let mut state = self.shared.lock();
            state.next_job += 1;
            let id = state.next_job;
            let end = state.closed.then_some(End::Lost);
            state.jobs.insert(id, JobState { end, ..JobState::default() });
            id
        };
        let command = String::from_utf8_lossy(payload).into_owned();
        let job = Job { id, command, consumed_size: 0, channel: self.clone() };
        self.send(id, kind, payload)?;
        Ok(job)
    }

    pub fn send(&self, job: u32, kind: Kind, payload: &[u8]) -> io::Result<()> {
        let mut writer = self.shared.writer.lock().unwrap_or_else(PoisonError::into_inner);
        Frame::write(&mut *writer, job, kind, payload)
    }
}

impl Job {
    /// Waits for the end of the job, and returns its output.
    pub(crate) fn output(&self, limit: Duration) -> Result<Output, Failure> {
        let id = self.id;
        self.channel.shared.wait(limit, |state| {
            let job = state.jobs.get_mut(&id)?;
            match job.end? {
                End::Lost => Some(Err(Failure::Closed)),
                End::Exit(status) => Some(Ok(Output {
                    stdout: job.stdout.clone(),
                    stderr: job.stderr.clone(),
                    status,
                    truncated: job.truncated,
                })),
            }
        })
    }

    /// Returns the next line of the job's standard output, without the line end, or `None` after the last line.
    pub(crate) fn next_line(&mut self, limit: Duration) -> Result<Option<String>, Failure> {
        let (id, start) = (self.id, self.consumed_size);
        let bytes = self.channel.shared.wait(limit, |state| {
            let job = state.jobs.get(&id)?;
            let rest = &job.stdout[start..];
            match (rest.iter().position(|&byte| byte == b'\n'), job.end) {
                (Some(end), _) => Some(Ok(rest[..=end].to_vec())),
                (None, None) => None,
                (None, Some(End::Exit(_))) => Some(Ok(rest.to_vec())),
                (None, Some(End::Lost)) => Some(Err(Failure::Closed)),
            }
        })?;
        self.consumed_size += bytes.len();
        Ok((!bytes.is_empty()).then(|| String::from_utf8_lossy(&bytes).trim_end().to_owned()))
    }

    /// Sends a signal to the job's process group.
    pub fn signal(&self, number: i32) -> io::Result<()> {
        self.channel.send(self.id, Kind::Signal, &number.to_le_bytes())
    }

    pub(crate) fn send_data(&self, data: &[u8]) -> io::Result<()> {
        if !data.is_empty() {
            self.channel.send(self.id, Kind::Data, data)?;
        }
        self.channel.send(self.id, Kind::Data, &[])
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.channel.shared.lock().jobs.remove(&self.id);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<T>(
        &self,
        limit: Duration,
        mut check: impl FnMut(&mut State) -> Option<Result<T, Failure>>,
    ) -> Result<T, Failure> {
        let deadline = Instant::now() + limit;
        let mut state = self.lock();
        loop {
            if let Some(result) = check(&mut state) {
                return result;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Failure::TimedOut);
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn read_all(&self, mut port: UnixStream, mut log: File) {
        while let Ok(Some(frame)) = Frame::read(&mut port) {
            if matches!(frame.kind, Kind::Stdout | Kind::Stderr) {
                // The log is only for finding faults; a full disk must not become another fault.
                let _ = log.write_all(&frame.payload);
            }
            self.lock().accept(frame);
            self.changed.notify_all();
        }
        let mut state = self.lock();
        state.closed = true;
        state.lose_jobs();
        self.changed.notify_all();
    }
}

impl State {
    fn accept(&mut self, frame: Frame) {
        if frame.kind == Kind::Hello {
            self.hello_count += 1;
            self.lose_jobs();
            return;
        }
        // Output of a job that was dropped is not recorded.
        let Some(job) = self.jobs.get_mut(&frame.job) else { return };
        match frame.kind {
            Kind::Stdout => keep(&mut job.stdout, &mut job.truncated, &frame.payload),
            Kind::Stderr => keep(&mut job.stderr, &mut job.truncated, &frame.payload),
            Kind::Exit => job.end = Some(End::Exit(frame.number())),
            Kind::Run
            | Kind::Signal
            | Kind::Put
            | Kind::Data
            | Kind::Get
            | Kind::PowerOff
            | Kind::Reboot
            | Kind::Hello => {}
        }
    }

    fn lose_jobs(&mut self) {
        for job in self.jobs.values_mut() {
            job.end = job.end.or(Some(End::Lost));
        }
    }
}

fn keep(kept: &mut Vec<u8>, truncated: &mut bool, new: &[u8]) {
    let room = OUTPUT_SIZE_MAX - kept.len();
    *truncated |= new.len() > room;
    kept.extend(&new[..new.len().min(room)]);
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    fn pair() -> (Channel, UnixStream) {
        let (host, guest) = UnixStream::pair().unwrap();
        (Channel::open(host, tempfile::tempfile().unwrap()).unwrap(), guest)
    }

    #[test]
    fn outputs_of_two_jobs_stay_apart() {
        let (channel, mut guest) = pair();
        let mut first = channel.start(Kind::Run, b"a").unwrap();
        let second = channel.start(Kind::Run, b"b").unwrap();
        Frame::write(&mut guest, first.id, Kind::Stdout, b"one\ntw").unwrap();
        Frame::write(&mut guest, second.id, Kind::Stderr, b"other").unwrap();
        Frame::write(&mut guest, second.id, Kind::Exit, &3i32.to_le_bytes()).unwrap();
        assert_eq!(first.next_line(LIMIT).unwrap().as_deref(), Some("one"));
        assert_eq!(first.next_line(Duration::from_millis(1)), Err(Failure::TimedOut));
        let output = second.output(LIMIT).unwrap();
        assert_eq!((output.status, output.stderr.as_slice()), (3, &b"other"[..]));
        Frame::write(&mut guest, first.id, Kind::Exit, &0i32.to_le_bytes()).unwrap();
        assert_eq!(first.next_line(LIMIT).unwrap().as_deref(), Some("tw"));
        assert_eq!(first.next_line(LIMIT).unwrap(), None);
        assert_eq!(first.output(LIMIT).unwrap().stdout, b"one\ntw");
    }

    #[test]
    fn jobs_are_lost_when_the_guest_reboots_or_ends() {
        let (channel, mut guest) = pair();
        let job = channel.start(Kind::Run, b"a").unwrap();
        Frame::write(&mut guest, 0, Kind::Hello, &[]).unwrap();
        assert_eq!(job.output(LIMIT), Err(Failure::Closed));
        assert_eq!(channel.wait_for_hello(0, LIMIT), Ok(1));
        drop(guest);
        assert_eq!(channel.wait_for_hello(1, LIMIT), Err(Failure::Closed));
    }
}
