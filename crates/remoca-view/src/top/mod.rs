//! `remoca top`: all VMs of this host on a terminal.
//!
//! One thread takes snapshots, or reads those of a page, and another one reads keys. The main thread waits for both, and draws only when
//! something has changed.

mod app;
mod draw;
pub mod svg;

pub use app::App;
pub use draw::height;

use crate::address::Address;
use crate::client;
use crate::history::{self, History};
use crate::snapshot::Snapshot;
use crate::watch::{Sockets, Watch, runtime};
use anyhow::{Context, Result, bail};
use app::Next;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{self, Event};
use ratatui::crossterm::terminal;
use ratatui::{DefaultTerminal, Terminal};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

/// Width of a frame that goes to no terminal.
const WIDTH: u16 = 160;
/// Time between the two snapshots of the first frame: its figures are those in between.
const FIRST: Duration = Duration::from_secs(1);

/// What the screen is started with.
pub struct Options {
    /// Page whose snapshots are shown; without one, processes are asked.
    pub from: Option<Address>,
    pub interval: Duration,
    /// Whether one frame is printed as text.
    pub is_once: bool,
    pub sockets: Sockets,
    /// Socket of the daemon that divides memory, which need not run.
    pub host_socket: Option<PathBuf>,
}

/// Shows the screen until a key ends it, or prints one frame.
///
/// # Errors
/// If there is no snapshot, or the terminal cannot be used.
pub fn run(options: Options) -> Result<()> {
    if options.is_once || !std::io::stdout().is_terminal() || !has_screen(std::env::var_os("TERM").as_deref()) {
        return once(options);
    }
    let (sender, events) = channel();
    let keys = sender.clone();
    thread::Builder::new().name("snapshots".into()).spawn(move || snapshots(options, &sender))?;
    let mut terminal = ratatui::try_init().context("this terminal cannot be used; `remoca top --once` needs none")?;
    let result = show(&mut terminal, keys, &events);
    ratatui::restore();
    result
}

/// Shows the screen until a key ends it.
fn show(terminal: &mut DefaultTerminal, keys: Sender<Message>, events: &Receiver<Message>) -> Result<()> {
    thread::Builder::new().name("keys".into()).spawn(move || read_keys(&keys))?;
    let mut app = App::default();
    loop {
        terminal.draw(|frame| draw::draw(frame, &app, false))?;
        match events.recv() {
            Ok(Message::Snapshot(snapshot)) => app.take(snapshot),
            Ok(Message::Terminal(Event::Key(key))) if app.press(key) == Next::Quit => return Ok(()),
            // It has another size, perhaps.
            Ok(Message::Terminal(_)) => {}
            Ok(Message::Lost(error)) => return Err(error),
            Err(_) => bail!("nobody takes snapshots any longer"),
        }
    }
}

/// Returns whether a terminal of this kind shows more than lines of text, as far as is known.
fn has_screen(kind: Option<&OsStr>) -> bool {
    kind.is_none_or(|kind| kind != OsStr::new("dumb"))
}

enum Message {
    Snapshot(Result<Arc<Snapshot>, String>),
    Terminal(Event),
    Lost(anyhow::Error),
}

fn read_keys(events: &Sender<Message>) {
    loop {
        let message = match event::read() {
            Ok(event) => Message::Terminal(event),
            Err(error) => Message::Lost(error.into()),
        };
        let is_over = matches!(message, Message::Lost(_));
        if events.send(message).is_err() || is_over {
            return;
        }
    }
}

/// Takes or reads snapshots until nobody wants them.
fn snapshots(options: Options, events: &Sender<Message>) {
    let Options { from, interval, sockets, host_socket, .. } = options;
    let Some(page) = from else {
        let watch = Watch::new(sockets, interval).with_host(host_socket);
        let watched = runtime().map(|runtime| runtime.block_on(take_all(watch, interval, events)));
        watched.unwrap_or_else(|error| drop(events.send(Message::Lost(error.into()))));
        return;
    };
    let mut histories = Histories::default();
    loop {
        let snapshot = client::snapshot(&page).map(|snapshot| Arc::new(histories.remember(snapshot)));
        if events.send(Message::Snapshot(snapshot.map_err(|error| format!("{error:#}")))).is_err() {
            return;
        }
        thread::sleep(interval);
    }
}

async fn take_all(mut watch: Watch, interval: Duration, events: &Sender<Message>) {
    let mut snapshot = take_first(&mut watch, FIRST.min(interval)).await;
    let mut ticks = tokio::time::interval_at(tokio::time::Instant::now() + interval, interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    while events.send(Message::Snapshot(Ok(Arc::new(snapshot)))).is_ok() {
        ticks.tick().await;
        snapshot = watch.take().await;
    }
}

/// Takes two snapshots, and returns the second one: its figures are those since the first, as in all later ones.
async fn take_first(watch: &mut Watch, pause: Duration) -> Snapshot {
    let first = watch.take().await;
    if first.vms.is_empty() {
        return first;
    }
    tokio::time::sleep(pause).await;
    watch.take().await
}

/// What is remembered of snapshots that come without their history.
#[derive(Default)]
struct Histories {
    newest: u64,
    histories: HashMap<String, History>,
}

impl Histories {
    /// Returns the snapshot with the history of its VMs since the first one.
    fn remember(&mut self, mut snapshot: Snapshot) -> Snapshot {
        let is_new = snapshot.snapshot != self.newest;
        self.newest = snapshot.snapshot;
        let mut before = std::mem::take(&mut self.histories);
        for vm in &mut snapshot.vms {
            let mut own = before.remove(&vm.name).unwrap_or_default();
            if let Some(recent) = vm.status.as_ref().and_then(|shown| shown.recent.as_ref()).filter(|_| is_new) {
                history::add(&mut own, recent, snapshot.taken_s);
            }
            vm.history = Arc::clone(&own);
            self.histories.insert(vm.name.clone(), own);
        }
        snapshot
    }
}

/// Prints one frame.
fn once(options: Options) -> Result<()> {
    let Options { from, sockets, host_socket, .. } = options;
    let snapshot = match from {
        Some(page) => client::snapshot(&page)?,
        None => runtime()?
            .block_on(async { take_first(&mut Watch::new(sockets, FIRST).with_host(host_socket), FIRST).await }),
    };
    let mut app = App::default();
    app.take(Ok(Arc::new(snapshot)));
    let width =
        terminal::size().ok().filter(|_| std::io::stdout().is_terminal()).map_or(WIDTH, |(width, _)| width.max(80));
    let text = screen_text(&app, width, height(&app, width), true);
    match std::io::stdout().write_all(text.as_bytes()) {
        // Its reader has read enough.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        written => Ok(written?),
    }
}

/// Returns the screen of this size as text.
#[must_use]
pub fn screen_text(app: &App, width: u16, height: u16, shows_all: bool) -> String {
    let screen = screen(app, width, height, shows_all);
    let line = |y: u16| {
        let line: String = (0..width).map(|x| screen[(x, y)].symbol()).collect();
        line.trim_end().to_owned() + "\n"
    };
    (0..height).map(line).collect()
}

/// Returns the screen of this size.
#[must_use]
pub fn screen(app: &App, width: u16, height: u16, shows_all: bool) -> Buffer {
    // A buffer in memory fails in no way.
    let Ok(mut terminal) = Terminal::new(TestBackend::new(width, height));
    let Ok(frame) = terminal.draw(|frame| draw::draw(frame, app, shows_all));
    frame.buffer.clone()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::columns;
    use crate::testing::Fleet;

    #[test]
    fn the_first_table_has_figures_between_two_looks_as_the_later_ones() {
        let folder = tempfile::tempdir().unwrap();
        let sockets = Fleet::start(folder.path(), 2).sockets;
        let (sender, events) = channel();
        let interval = Duration::from_millis(1);
        let watch = Watch::new(Box::new(move || sockets.clone()), interval).with_patience(Duration::from_secs(60));
        let watcher = thread::spawn(move || runtime().unwrap().block_on(take_all(watch, interval, &sender)));
        let Ok(Message::Snapshot(Ok(first))) = events.recv() else { panic!("there is no snapshot") };
        assert_eq!((first.snapshot, columns::total(&first).map(|total| total.is_since_start)), (2, Some(false)));
        drop(events);
        watcher.join().unwrap();
    }

    #[test]
    fn a_terminal_that_shows_only_lines_gets_lines() {
        let kinds = [None, Some("xterm"), Some("dumb")];
        assert_eq!(kinds.map(|kind| has_screen(kind.map(OsStr::new))), [true, true, false]);
    }

    #[test]
    fn a_host_without_vms_is_shown_at_once() {
        let mut watch = Watch::new(Box::new(Vec::new), FIRST);
        let first = runtime().unwrap().block_on(take_first(&mut watch, FIRST));
        assert_eq!((first.snapshot, first.vms.len()), (1, 0));
    }
}
