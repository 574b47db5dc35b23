//! Shows progress: a bar at a terminal, plain lines elsewhere.

use std::{
    cell::{Cell, RefCell},
    io::{IsTerminal, stderr},
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressStyle};

const PLAIN_INTERVAL: Duration = Duration::from_secs(10);

pub struct Progress {
    started: Instant,
    at_terminal: bool,
    bar: RefCell<Option<ProgressBar>>,
    last_line: Cell<Instant>,
}

impl Progress {
    pub fn start() -> Progress {
        let now = Instant::now();
        Progress {
            started: now,
            at_terminal: stderr().is_terminal(),
            bar: RefCell::default(),
            last_line: Cell::new(now),
        }
    }

    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// Prints a permanent line, above the bar.
    pub fn say(&self, text: &str) {
        let line = || eprintln!("{:4.0} s  {text}", self.elapsed().as_secs_f64());
        match &*self.bar.borrow() {
            Some(bar) => bar.suspend(line),
            None => line(),
        }
        self.last_line.set(Instant::now());
    }

    /// Ends a step with a permanent line.
    pub fn end(&self, text: &str) {
        self.end_bar();
        self.say(text);
    }

    /// Begins a long step. `total` is the number that [`Progress::advance`] counts up to, or 0 if it is unknown.
    pub fn begin(&self, step: &str, total: u64) {
        self.end(step);
        if self.at_terminal {
            let bar = if total == 0 { ProgressBar::new_spinner() } else { ProgressBar::new(total) };
            let template =
                if total == 0 { "        {spinner} {msg}" } else { "        {bar:40} {percent:>3} %  {msg}" };
            if let Ok(style) = ProgressStyle::with_template(template) {
                bar.set_style(style.progress_chars("━╸─"));
            }
            bar.enable_steady_tick(Duration::from_millis(200));
            *self.bar.borrow_mut() = Some(bar);
        }
    }

    pub fn advance(&self, done: u64, note: &str) {
        if let Some(bar) = &*self.bar.borrow() {
            bar.set_position(done);
            bar.set_message(note.to_owned());
        } else if self.last_line.get().elapsed() >= PLAIN_INTERVAL {
            eprintln!("{:4.0} s    {note}", self.elapsed().as_secs_f64());
            self.last_line.set(Instant::now());
        }
    }

    fn end_bar(&self) {
        if let Some(bar) = self.bar.borrow_mut().take() {
            bar.finish_and_clear();
        }
    }
}
