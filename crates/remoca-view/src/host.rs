//! What the host's daemon (`remoca host`) says of the memory that it divides: how it is asked, and what is shown of it.

use crate::ask::{PATIENCE, Question};
use crate::text::{one_line, show_date};
use crate::vm::Heard;
use remoca_io::show::show_size;
use remoca_protocol::host::{HostDecision, HostReport, REPORT_BYTES_MAX};
use serde::Serialize;
use std::io;
use std::path::PathBuf;
use std::time::Duration;
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tokio::time::timeout;

/// Longest text of the daemon that is shown, in characters.
const TEXT_MAX: usize = 400;

/// Asks the daemon for its report, and remembers that it still waits for one: a daemon that is stopped would otherwise find a queue full
/// of clients, and so would `remoca host status`.
pub struct HostAsker {
    /// Socket of the daemon, which need not run.
    socket: Option<PathBuf>,
    patience: Duration,
    waiting: Option<Question<HostReport>>,
}

impl HostAsker {
    /// Returns what asks the daemon that has this socket.
    #[must_use]
    pub fn new(socket: Option<PathBuf>) -> Self {
        Self { socket, patience: PATIENCE, waiting: None }
    }

    /// Returns the newest report, or that a daemon is there and does not answer, after [`PATIENCE`] at most; `None` if nobody
    /// listens, or has a report yet.
    pub async fn ask(&mut self) -> Option<Heard> {
        let socket = self.socket.clone()?;
        // A report that came too late says how things were then.
        self.waiting.take_if(|question| question.answer.is_finished());
        let question = self.waiting.get_or_insert_with(|| Question::begin(read(socket)));
        let Ok(joined) = timeout(self.patience, &mut question.answer).await else {
            return Some(Err(question.age()));
        };
        self.waiting = None;
        match joined.ok()? {
            Ok(report) => Some(Ok(report)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                Some(Err("it does not answer, and its queue of clients is full".into()))
            }
            Err(_) => None,
        }
    }
}

async fn read(socket: PathBuf) -> io::Result<HostReport> {
    let stream = UnixStream::connect(socket).await?;
    let mut text = Vec::new();
    stream.take(REPORT_BYTES_MAX as u64).read_to_end(&mut text).await?;
    HostReport::parse(&text).map_err(io::Error::other)
}

/// Report of the daemon in short.
#[derive(Serialize)]
pub struct Summary<'a> {
    /// What is divided.
    resource: &'a str,
    /// Whether sizes are changed.
    applies: bool,
    total_bytes: u64,
    given_bytes: u64,
    /// Time of the report, in seconds since 1970.
    at_s: u64,
    state: &'a str,
    last_decision: Option<&'a HostDecision>,
    /// All of this in words.
    text: String,
}

impl<'a> Summary<'a> {
    /// Returns what is shown of a report.
    #[must_use]
    pub fn of(report: &'a HostReport) -> Self {
        Self {
            resource: &report.resource,
            applies: report.applies,
            total_bytes: report.total_bytes,
            given_bytes: report.counted_bytes,
            at_s: report.at_s,
            state: &report.state,
            last_decision: report.decisions.last(),
            text: text(report),
        }
    }
}

/// Returns a report in one line: what is divided, what the daemon is about to do, and its last decision with its reason.
#[must_use]
pub fn text(report: &HostReport) -> String {
    let (given, total) = (show_size(report.counted_bytes), show_size(report.total_bytes));
    let mode = if report.applies { "" } else { " (only shown)" };
    let last = report.decisions.last().map_or(String::new(), |decision| format!("; last: {}", decision_text(decision)));
    let text = format!("{}: {given} of {total} given{mode}; {}{last}", report.resource, report.state);
    one_line(&text, TEXT_MAX)
}

/// Returns a decision in one line.
#[must_use]
pub fn decision_text(decision: &HostDecision) -> String {
    let HostDecision { at_s, vm, from_bytes, to_bytes, why, outcome, .. } = decision;
    let time = show_date(*at_s);
    let text = match vm {
        None => format!("{time} {why}"),
        Some(vm) => {
            let (from, to, vm) = (show_size(*from_bytes), show_size(*to_bytes), one_line(vm, usize::MAX));
            format!("{time} {vm}: {from} -> {to}: {why}: {outcome}")
        }
    };
    one_line(&text, usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::host_report;
    use std::io::Write;
    use std::os::unix::net::UnixListener;

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        crate::watch::runtime().unwrap().block_on(future)
    }

    #[test]
    fn a_decision_is_one_line() {
        let decision = HostDecision { vm: Some("ev\n".into()), why: "a\nb".into(), ..HostDecision::default() };
        assert_eq!(decision_text(&decision), "1970-01-01T00:00:00Z ev: 0B -> 0B: a b:");
    }

    #[test]
    fn a_report_is_one_line() {
        let mut report = host_report();
        let said = "local tier: 3G of 4G given; all sizes are as they should be; last: 2023-11-14T22:13:20Z web001: 1G -> 2G: it gains: set";
        assert_eq!(text(&report), said);
        report.applies = false;
        report.state = "\x1b[2J\n".repeat(1000);
        let text = text(&report);
        assert!(text.starts_with("local tier: 3G of 4G given (only shown);  [2J"), "{text}");
        assert!(text.len() == TEXT_MAX && !text.contains(char::is_control));
    }

    #[test]
    fn the_newest_report_is_read_and_one_that_is_none_is_not_shown() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        assert_eq!(block_on(HostAsker::new(None).ask()), None);
        assert_eq!(block_on(HostAsker::new(Some(path.clone())).ask()), None, "there is no daemon");
        let listener = UnixListener::bind(&path).unwrap();
        let said = [host_report().line().unwrap(), b"{}".to_vec(), Vec::new()];
        let server = std::thread::spawn(move || {
            said.iter().for_each(|text| listener.accept().unwrap().0.write_all(text).unwrap());
            listener
        });
        block_on(async {
            let mut asker = HostAsker::new(Some(path));
            asker.patience = Duration::from_secs(60);
            assert_eq!(asker.ask().await, Some(Ok(host_report())));
            assert_eq!((asker.ask().await, asker.ask().await), (None, None));
            // One that hangs has one client at a time, and is told from one that is not there.
            let listener = server.join().unwrap();
            asker.patience = Duration::from_millis(20);
            for _ in 0..2 {
                let heard = asker.ask().await;
                assert!(matches!(&heard, Some(Err(why)) if why.starts_with("it has not answered for ")), "{heard:?}");
            }
            // On a busy machine that time is over before the question has its turn, now and then.
            tokio::task::yield_now().await;
            let _first = listener.accept().unwrap();
            listener.set_nonblocking(true).unwrap();
            assert_eq!(listener.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
        });
    }
}
