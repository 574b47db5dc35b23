//! Asks all VM processes at the same time. One that hangs holds up nobody.
//!
//! A process that has not answered in time is not asked again while its connection is open: a process that is stopped would otherwise
//! find a queue full of clients, and so would the operator's next command.
//!
//! No more processes are asked at the same time than this one may have files open for. The others have their turn as soon as one has
//! answered. If none does, those that hang have all the room: the longest wait is then given up, and the next round begins with the first
//! that had no turn.

use crate::snapshot::Answer;
use crate::vm::Silence;
use remoca_io::control::left;
use remoca_protocol::control::{Command, CurveStatus, Reply, Status};
use rustix::io::Errno;
use rustix::process::Resource;
use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};

/// Time in which processes that are well have answered.
pub const PATIENCE: Duration = Duration::from_secs(1);
/// Largest answer that is read, in bytes. A status has some thousands.
const ANSWER_BYTES_MAX: u64 = 4 << 20;

/// Asks processes, and remembers whom it still waits for.
pub struct Asker {
    waiting: HashMap<PathBuf, Question<(Status, Option<CurveStatus>)>>,
    patience: Duration,
    /// Room for connections.
    room: Arc<Semaphore>,
    /// The first process that had no turn in the last round.
    next: Option<PathBuf>,
}

impl Default for Asker {
    fn default() -> Self {
        Self::with_patience(PATIENCE)
    }
}

/// A question that is not answered yet. Nobody waits for the answer any longer once it is dropped.
pub(crate) struct Question<T> {
    since: Instant,
    pub(crate) answer: JoinHandle<io::Result<T>>,
}

impl<T: Send + 'static> Question<T> {
    /// Begins to ask.
    pub(crate) fn begin(ask: impl Future<Output = io::Result<T>> + Send + 'static) -> Self {
        Self { since: Instant::now(), answer: tokio::spawn(ask) }
    }

    /// Returns in words how long it has not been answered.
    pub(crate) fn age(&self) -> String {
        format!("it has not answered for {} s", self.since.elapsed().as_secs().max(1))
    }
}

impl<T> Drop for Question<T> {
    fn drop(&mut self) {
        self.answer.abort();
    }
}

impl Asker {
    /// Returns what waits for an answer for `patience` at most.
    pub(super) fn with_patience(patience: Duration) -> Self {
        Self { waiting: HashMap::new(), patience, room: Arc::new(Semaphore::new(asked_at_a_time_max())), next: None }
    }

    /// Asks the processes at all of `sockets`, and those of `curves` also for their curve. Returns an answer for each of them after
    /// [`PATIENCE`] at most.
    pub async fn ask(&mut self, sockets: &[PathBuf], curves: &[PathBuf]) -> Vec<Answer> {
        let deadline = Instant::now() + self.patience;
        // An answer that came too late says how things were then.
        self.waiting.retain(|socket, question| sockets.contains(socket) && !question.answer.is_finished());
        let next = self.next.take();
        let at = sockets.iter().position(|socket| Some(socket) == next.as_ref()).unwrap_or(0);
        for socket in sockets[at..].iter().chain(&sockets[..at]) {
            if self.waiting.contains_key(socket) {
                continue;
            }
            let Ok(Ok(room)) = timeout_at(deadline, Arc::clone(&self.room).acquire_owned()).await else {
                self.next = Some(socket.clone());
                break;
            };
            let (path, wants_curve) = (socket.clone(), curves.contains(socket));
            let question = Question::begin(async move {
                let _room = room;
                ask(&path, wants_curve).await
            });
            self.waiting.insert(socket.clone(), question);
        }
        let mut answers = Vec::new();
        for socket in sockets {
            answers.push(self.answer_of(socket, deadline).await);
        }
        let oldest = self.waiting.iter().min_by_key(|(_, question)| question.since).map(|(socket, _)| socket.clone());
        if let Some(oldest) = oldest.filter(|_| self.next.is_some()) {
            self.waiting.remove(&oldest);
        }
        answers
    }

    async fn answer_of(&mut self, socket: &Path, deadline: Instant) -> Answer {
        let answer = |status, curve| Answer { socket: socket.into(), status, curve };
        let Some(question) = self.waiting.get_mut(socket) else {
            // The same socket twice, if there was room for all.
            let silence = if self.next.is_none() { Silence::Failed("it is named twice".into()) } else { no_room() };
            return answer(Err(silence), None);
        };
        match timeout_at(deadline, &mut question.answer).await {
            Err(_) => answer(Err(Silence::Hangs(question.age())), None),
            Ok(joined) => {
                self.waiting.remove(socket);
                match joined.unwrap_or_else(|error| Err(io::Error::other(error))) {
                    Ok((status, curve)) => answer(Ok(status), curve),
                    Err(error) => answer(Err(explain(socket, &error)), None),
                }
            }
        }
    }
}

/// Returns how many processes may be asked at the same time: with half of the files that this process may have open.
fn asked_at_a_time_max() -> usize {
    let files = rustix::process::getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
    usize::try_from(files / 2).unwrap_or(usize::MAX).clamp(1, Semaphore::MAX_PERMITS)
}

fn no_room() -> Silence {
    Silence::Unasked("not asked: this program may have no more files open".into())
}

fn explain(socket: &Path, error: &io::Error) -> Silence {
    let shown = socket.display();
    if matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE)) {
        return no_room();
    }
    match error.kind() {
        io::ErrorKind::NotFound if left::is_there(socket) => Silence::Gone(left::WORDS.into()),
        io::ErrorKind::NotFound => Silence::Gone(format!("there is no {shown}")),
        io::ErrorKind::ConnectionRefused | io::ErrorKind::ConnectionReset | io::ErrorKind::UnexpectedEof => {
            Silence::Gone(format!("nobody answers at {shown}, which it has left behind"))
        }
        io::ErrorKind::WouldBlock => Silence::Hangs("it hangs, and its queue of clients is full".into()),
        io::ErrorKind::PermissionDenied => Silence::Denied(format!("{shown} is not open to this user")),
        io::ErrorKind::ResourceBusy => Silence::Busy(format!("it refuses to answer: {error}")),
        io::ErrorKind::InvalidData => Silence::Failed(format!("its answer makes no sense: {error}")),
        _ => Silence::Failed(format!("{shown}: {error}")),
    }
}

/// Returns the status of the process at `socket`, and its curve if that is wanted and it has one.
async fn ask(socket: &Path, wants_curve: bool) -> io::Result<(Status, Option<CurveStatus>)> {
    let status = match call(socket, &Command::Status).await? {
        Reply::Status(status) => *status,
        Reply::Error { error } => return Err(io::Error::new(io::ErrorKind::ResourceBusy, error)),
        Reply::Curve(_) => {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it is something else than a status"));
        }
    };
    if !wants_curve {
        return Ok((status, None));
    }
    // A process of an older version has none.
    match call(socket, &Command::Curve { disk: None, grid: None }).await {
        Ok(Reply::Curve(curve)) => Ok((status, Some(*curve))),
        Ok(_) | Err(_) => Ok((status, None)),
    }
}

async fn call(socket: &Path, command: &Command) -> io::Result<Reply> {
    let line = command.line().map_err(io::Error::other)?;
    let mut stream = UnixStream::connect(socket).await?;
    // A busy process may answer and close before it has this line, so the answer counts.
    let sent = stream.write_all(&line).await;
    let mut text = Vec::new();
    let read = stream.take(ANSWER_BYTES_MAX).read_to_end(&mut text).await;
    if text.is_empty() {
        read?;
        return Err(sent.err().unwrap_or_else(|| io::ErrorKind::UnexpectedEof.into()));
    }
    Reply::parse(&text).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixListener;

    #[test]
    fn one_that_is_busy_or_speaks_otherwise_is_not_said_to_hang() {
        let folder = tempfile::tempdir().unwrap();
        let said = |name: &str, answer: &'static [u8]| {
            let socket = folder.path().join(name);
            let listener = UnixListener::bind(&socket).unwrap();
            let process = std::thread::spawn(move || {
                let mut stream = BufReader::new(listener.accept().unwrap().0);
                stream.read_line(&mut String::new()).unwrap();
                stream.get_mut().write_all(answer).unwrap();
            });
            let mut asker = Asker::with_patience(Duration::from_secs(600));
            let mut answers = crate::watch::runtime().unwrap().block_on(asker.ask(&[socket], &[]));
            process.join().unwrap();
            answers.remove(0).status.unwrap_err()
        };
        let busy = said("busy", b"{\"error\": \"16 others are being served\"}\n");
        assert_eq!(busy, Silence::Busy("it refuses to answer: 16 others are being served".into()));
        let other = said("other", b"{\"name\": \"web1\"}\n");
        assert!(matches!(&other, Silence::Failed(why) if why.starts_with("its answer makes no sense: ")), "{other:?}");
        let denied = explain(Path::new("/s"), &io::ErrorKind::PermissionDenied.into());
        assert_eq!(denied, Silence::Denied("/s is not open to this user".into()));
    }

    #[test]
    fn one_that_is_not_asked_for_want_of_files_is_not_said_to_hang_and_asked_next() {
        let folder = tempfile::tempdir().unwrap();
        let sockets = ["a.ctl", "b.ctl"].map(|name| folder.path().join(name));
        // Nobody accepts.
        let _listeners = sockets.each_ref().map(|socket| UnixListener::bind(socket).unwrap());
        let mut asker = Asker { room: Arc::new(Semaphore::new(1)), ..Asker::with_patience(Duration::from_millis(20)) };
        let runtime = crate::watch::runtime().unwrap();
        let mut ask = || {
            let answers = runtime.block_on(asker.ask(&sockets, &[]));
            answers.into_iter().map(|answer| answer.status.unwrap_err()).collect::<Vec<_>>()
        };
        let (first, second) = (ask(), ask());
        assert!(matches!(&first[..], [Silence::Hangs(_), Silence::Unasked(_)]), "{first:?}");
        assert!(matches!(&second[..], [Silence::Unasked(_), Silence::Hangs(_)]), "{second:?}");
    }
}
