//! What an operator sees and says: the status, collected from all threads, and the socket for commands.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::command::{COMMAND_BYTES_MAX, Command, Reply, TakeBackError, TakenBack, whole_pages};
use crate::config::PageLocking;
use crate::handshake::{ACCEPT_PAUSE, Workers};
use crate::listener::Listener;
use crate::mapped::{MappedMessage, TakeBack};
use crate::places::{Place, Places};
use crate::status::{Status, Totals, hex};
use crate::stream::Stream;
use crate::worker::{Message, Shared};

/// Time that a client may take to read the status, to send a command, or to read its answer.
const CONTROL_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of operators that are served at the same time on one socket, and of those of one user that are waited for.
const OPERATORS_MAX: usize = 64;
const OPERATORS_OF_USER_MAX: usize = 32;

/// Collects the status from all threads.
#[derive(Debug)]
pub(crate) struct Reporter {
    pub(crate) workers: Arc<Workers>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) started: Instant,
}

impl Reporter {
    pub(crate) async fn status(&self) -> Status {
        let mut totals = Totals::default();
        let mut pools = Vec::new();
        for worker in self.workers.all() {
            let (reply, report) = oneshot::channel();
            // A worker that is stopping has nothing to report.
            if worker.send(Message::Report(reply)).await.is_ok()
                && let Ok(report) = report.await
            {
                totals.add(&report.totals);
                pools.extend(report.pools);
            }
        }
        let (reply, report) = oneshot::channel();
        if self.workers.mapped().send(MappedMessage::Report(reply)).await.is_ok()
            && let Ok(report) = report.await
        {
            totals.add(&report.totals);
            pools.extend(report.pools);
        }
        let Shared { arena, quota, server_id, .. } = &*self.shared;
        Status {
            server_id: hex(&server_id.0),
            version: env!("CARGO_PKG_VERSION").into(),
            uptime_s: self.started.elapsed().as_secs(),
            backing: arena.backing(),
            locked: arena.locking() == PageLocking::Locked,
            pages: arena.pages().0,
            pages_free: arena.free_pages().0,
            pages_to_give_back: arena.pages_to_give_back().0,
            quota_pages: quota.0,
            totals,
            pools,
        }
    }

    /// Executes an operator's command.
    async fn execute(&self, command: Command) -> Result<TakenBack, TakeBackError> {
        let Command::TakeBack { pool, bytes } = command;
        let (reply, outcome) = oneshot::channel();
        let order = MappedMessage::TakeBack(TakeBack { pool, npages: whole_pages(bytes), reply });
        self.workers.mapped().send(order).await.map_err(|_| TakeBackError::Stopping)?;
        outcome.await.unwrap_or(Err(TakeBackError::Stopping))
    }
}

/// Answers each connection with the status as JSON, and closes it.
pub(crate) async fn answer_control(control: Listener, reporter: Arc<Reporter>) {
    serve_operators(control, |stream, place| answer_status(stream, place, Arc::clone(&reporter))).await;
}

/// Reads one command from each connection, and answers it.
pub(crate) async fn answer_commands(commands: Listener, reporter: Arc<Reporter>) {
    serve_operators(commands, |stream, place| answer_command(stream, place, Arc::clone(&reporter))).await;
}

/// Serves several operators side by side. Beyond [`OPERATORS_MAX`], one that is waited for makes room for the next.
async fn serve_operators<F>(listener: Listener, serve: impl Fn(Stream, Place) -> F)
where
    F: Future<Output = ()> + Send + 'static,
{
    let places = Arc::new(Places::new(OPERATORS_MAX, OPERATORS_OF_USER_MAX));
    loop {
        match listener.accept().await {
            Ok(stream) => places.begin(stream.origin(), |place| serve(stream, place)).await,
            Err(error) => {
                tracing::warn!(address = %listener.address(), %error, "cannot accept an operator's connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Keeps its place until the status was read: only then is nobody waited for.
async fn answer_status(stream: Stream, place: Place, reporter: Arc<Reporter>) {
    let Ok(mut json) = serde_json::to_vec_pretty(&reporter.status().await) else { return };
    json.push(b'\n');
    // A client that does not read the status in time does not get it.
    let _answered = timeout(CONTROL_TIMEOUT, stream.answer(&json)).await;
    drop(place);
}

async fn answer_command(mut stream: Stream, place: Place, reporter: Arc<Reporter>) {
    let Ok(Some(line)) = timeout(CONTROL_TIMEOUT, read_line(&mut stream)).await else { return };
    place.hear();
    let reply = match Command::parse(&line) {
        Ok(command) => {
            tracing::info!(?command, "told by an operator");
            reporter.execute(command).await.map_or_else(|error| Reply::Error(error.to_string()), Reply::Done)
        }
        Err(error) => Reply::Error(error),
    };
    // An operator that does not read the answer in time does not get it.
    let _answered = timeout(CONTROL_TIMEOUT, stream.answer(&reply.line())).await;
}

/// Reads up to the end of a line, or of the stream. Returns `None` if the line is too long or the connection breaks.
async fn read_line(stream: &mut Stream) -> Option<Vec<u8>> {
    let mut line = Vec::new();
    let mut piece = [0; 256];
    while line.len() <= COMMAND_BYTES_MAX {
        let count = stream.read(&mut piece).await.ok()?;
        let end = piece[..count].iter().position(|byte| *byte == b'\n');
        line.extend_from_slice(&piece[..end.unwrap_or(count)]);
        if count == 0 || end.is_some() {
            return Some(line);
        }
    }
    None
}
