//! Moves pages from the ring to the port, a batch at a time, and exchanges the pages of block 0 once a second.
//!
//! One thread, one write at a time, directly from the ring's memory. Meanwhile, pages that reclaim evicts go into the
//! rest of the ring. Pages that find no room are counted and lost. Handling a page allocates no memory. Invariants:
//! 1. Reclaim never waits for anything here.
//! 2. After the start, only a signal ends the agent. A port that fails or vanishes is closed, and looked for again at
//!    increasing intervals.
//! 3. While there is no port, no page is copied.

use std::io::{self, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use sd_notify::NotifyState;

use crate::capture::{Capture, CaptureCounters, PageRing};
use crate::error::AgentError;
use crate::pace::{Next, Pace};
use crate::page::{IdentificationPage, PAGE_BYTES, StatisticsPage};
use crate::port::Port;
use crate::pressure::MemoryPressure;
use crate::process::{self, StopSignals};

const TICK: Duration = Duration::from_secs(1);
/// Tick while one class of pages is sent: the advice to send all again must not come late.
const QUIET_TICK: Duration = Duration::from_millis(100);
/// Number of pages written after which the advice is read again, however short the time.
const PAGES_PER_ADVICE: u64 = 4096;
/// How long to wait at the end for a page that another processor is copying.
const LAST_PAGES_TIME_MAX: Duration = Duration::from_secs(5);
/// Longest time for which pages of before are written ahead of the report of a class.
const PAGES_OF_BEFORE_TIME_MAX: Duration = Duration::from_secs(1);
/// Longest time between two reports of the statistics: the host tells by them that the agent runs.
const REPORT_INTERVAL_MAX: Duration = Duration::from_secs(10);
const RETRY_DELAY_MIN: Duration = Duration::from_secs(1);
const RETRY_DELAY_MAX: Duration = Duration::from_secs(30);

pub struct Options {
    pub port: Option<PathBuf>,
    pub ring_bytes: u32,
    /// Whether to wait for a port if there is none.
    pub wait: bool,
}

/// Runs the agent until a signal arrives.
pub fn run(options: &Options) -> Result<(), AgentError> {
    let signals = StopSignals::block().map_err(AgentError::io("cannot take signals"))?;
    process::check_btf()?;
    process::check_capabilities()?;
    process::check_kernel_symbols()?;
    let Some((port, identification)) = first_port(options, &signals)? else { return Ok(()) };

    let pressure = MemoryPressure::open();
    let mut capture = Capture::load(options.ring_bytes)?;
    process::prepare_for_memory_pressure().iter().for_each(|refused| log(&format!("warning: {refused}")));
    let (capture, ring) = capture.ring()?;
    process::lock_memory()?;

    let mut agent = Agent {
        options,
        capture,
        ring,
        pace: Pace::default(),
        batch_page_count_max: 1,
        port: PortState::Away(Retry::at_once(Instant::now())),
        boot_cookie: None,
        pressure,
        sample_one_in: 1,
        classes: 1,
        written: 0,
        start_cookie: process::start_cookie(),
        reported: None,
        is_tracing_off: false,
    };
    agent.take_port(port, identification);
    // Attached last: pages evicted before the reader is ready would be lost.
    let _attached = capture.attach()?;
    notify(&[NotifyState::Ready]);
    agent.work(&signals);
    notify(&[NotifyState::Stopping]);
    agent.finish();
    Ok(())
}

/// Returns the port to start with, or `None` if a signal arrived while waiting for one.
fn first_port(options: &Options, signals: &StopSignals) -> Result<Option<(Port, IdentificationPage)>, AgentError> {
    let mut said = false;
    loop {
        match Port::open(options.port.as_deref()) {
            Ok(found) => return Ok(Some(found)),
            Err(error @ AgentError::NoPort(_)) if options.wait => {
                if !said {
                    log(&format!("{error}; waiting for one"));
                    notify(&[NotifyState::Ready, NotifyState::Status("waiting for an eviction port")]);
                    said = true;
                }
            }
            Err(error) => return Err(error),
        }
        sleep_until_readable(&mut [PollFd::new(&signals.fd(), PollFlags::IN)], 5 * TICK);
        if signals.arrived() {
            return Ok(None);
        }
    }
}

struct Agent<'a> {
    options: &'a Options,
    capture: &'a Capture,
    ring: PageRing<'a>,
    pace: Pace,
    batch_page_count_max: usize,
    port: PortState,
    /// Cookie of the VM process that the port belongs to; it changes with each start of that process.
    boot_cookie: Option<u64>,
    sample_one_in: u32,
    /// Number of classes of pages of which one is captured, 1 if all are.
    classes: u32,
    /// Number of pages written.
    written: u64,
    start_cookie: u64,
    /// Statistics that were last written to the port, and when.
    reported: Option<(Instant, StatisticsPage)>,
    /// Whether the kernel does not call the program, and that was said.
    is_tracing_off: bool,
    pressure: MemoryPressure,
}

enum PortState {
    Here(Port),
    Away(Retry),
}

impl Agent<'_> {
    fn work(&mut self, signals: &StopSignals) {
        let mut next_tick = Instant::now();
        while !signals.arrived() {
            let next = self.move_pages();
            let now = Instant::now();
            if now >= next_tick || self.is_advice_old() {
                self.tick(now);
                next_tick = now + if self.classes > 1 { QUIET_TICK } else { TICK };
            }
            match next {
                Next::Write => {}
                Next::WaitUntil(due_at) => self.sleep(signals, due_at.min(next_tick)),
                Next::Idle => self.sleep(signals, next_tick),
            }
        }
    }

    /// Returns whether so many pages were written since the last report that the advice may be another one.
    fn is_advice_old(&self) -> bool {
        let reported = self.reported.map_or(self.written, |(_, statistics)| statistics.written);
        matches!(self.port, PortState::Here(_)) && self.written >= reported + PAGES_PER_ADVICE
    }

    /// Writes at most one batch, so that signals and ticks have their turn whatever the rate of evictions.
    fn move_pages(&mut self) -> Next {
        let page_count_max = self.batch_page_count_max.min(self.ring.page_count_to_end());
        let waiting = self.ring.ready(page_count_max).len() / PAGE_BYTES;
        // Half a batch is worth a write; the other half is used to catch up.
        let worthwhile = (self.batch_page_count_max / 2).clamp(1, page_count_max);
        let next = self.pace.next(waiting, worthwhile, Instant::now());
        match next {
            Next::Write => {
                self.write_pages(page_count_max);
            }
            Next::WaitUntil(_) | Next::Idle => self.ring.arm_wakeup(next == Next::Idle),
        }
        next
    }

    /// Writes at most `page_count_max` ready pages, and returns their number. Without a port, drops them.
    fn write_pages(&mut self, page_count_max: usize) -> usize {
        let pages = self.ring.ready(page_count_max);
        let page_count = pages.len() / PAGE_BYTES;
        let result = match &mut self.port {
            PortState::Here(port) if page_count > 0 => port.write_pages(pages).map(|()| page_count as u64),
            PortState::Here(_) | PortState::Away(_) => Ok(0),
        };
        self.ring.free(page_count);
        self.pace.written();
        match result {
            Ok(written) => self.written += written,
            Err(error) => self.lose_port(&format!("writing failed: {error}")),
        }
        page_count
    }

    /// Sleeps until the eBPF program wakes the agent, a signal arrives, or `until`. If a page arrives between the last
    /// look at the ring and the request for a wakeup, it waits for the next page or the next tick.
    fn sleep(&self, signals: &StopSignals, until: Instant) {
        let timeout = until.saturating_duration_since(Instant::now());
        let (wakeups, stop) = (self.ring.wakeups(), signals.fd());
        sleep_until_readable(&mut [PollFd::new(&wakeups, PollFlags::IN), PollFd::new(&stop, PollFlags::IN)], timeout);
    }

    fn tick(&mut self, now: Instant) {
        self.note_tracing(process::is_tracing_off());
        match &self.port {
            PortState::Here(port) if !port.is_plugged_in() => self.lose_port("it was unplugged"),
            PortState::Here(_) => self.exchange_pages(now),
            PortState::Away(retry) if retry.is_due(now) => self.look_for_port(now),
            PortState::Away(_) => {}
        }
    }

    /// Says that nothing is captured while tracing is off, and that it is again. The program stays attached.
    fn note_tracing(&mut self, is_off: bool) {
        if is_off == self.is_tracing_off {
            return;
        }
        self.is_tracing_off = is_off;
        match is_off {
            true => log(&format!("warning: nothing is captured: {}", process::TRACING_OFF)),
            false => log("the tracing of kernel functions is on again, and pages are captured"),
        }
    }

    /// Writes the statistics to the port, and follows its advice. Does nothing if the statistics have not changed
    /// and were reported a short time ago.
    fn exchange_pages(&mut self, now: Instant) {
        let statistics = self.statistics();
        let is_known = |(at, reported): (Instant, _)| reported == statistics && now < at + REPORT_INTERVAL_MAX;
        if self.reported.is_some_and(is_known) {
            return;
        }
        if !self.report(now, statistics) {
            return;
        }
        let PortState::Here(port) = &mut self.port else { return };
        match port.identification() {
            Ok(identification) => {
                let before = self.classes;
                self.obey(&identification);
                if self.classes != before {
                    self.report_classes(now);
                }
            }
            Err(error) => self.lose_port(&error.to_string()),
        }
    }

    /// Reports which classes of pages come from now on, after the pages that were captured before. Capture goes on meanwhile: where
    /// pages come as fast as the port takes them, a few of before come later.
    fn report_classes(&mut self, now: Instant) {
        let give_up_at = now + PAGES_OF_BEFORE_TIME_MAX;
        while self.classes > 1 && Instant::now() < give_up_at && self.goes_on_writing() {
            std::thread::yield_now();
        }
        let statistics = self.statistics();
        self.report(now, statistics);
    }

    /// Writes the statistics to the port. Returns whether the port has taken them.
    fn report(&mut self, now: Instant, statistics: StatisticsPage) -> bool {
        let PortState::Here(port) = &mut self.port else { return false };
        if let Err(error) = port.write_statistics(&statistics) {
            self.lose_port(&format!("writing the statistics failed: {error}"));
            return false;
        }
        self.reported = Some((now, statistics));
        true
    }

    fn statistics(&self) -> StatisticsPage {
        let CaptureCounters { captured, lost, sampled_out } = self.capture.counters();
        StatisticsPage {
            captured,
            lost,
            sampled_out,
            written: self.written,
            start_cookie: self.start_cookie,
            memory_wait: self.pressure.now(),
            classes: self.classes,
        }
    }

    fn obey(&mut self, identification: &IdentificationPage) {
        if self.boot_cookie.is_some_and(|cookie| cookie != identification.boot_cookie) {
            log("the VM process was started anew");
        }
        self.boot_cookie = Some(identification.boot_cookie);
        if self.sample_one_in != identification.sample_one_in {
            self.sample_one_in = identification.sample_one_in;
            match self.sample_one_in {
                1 => log("pages match: sending all"),
                one_in => log(&format!("few pages match: sending about one of {one_in}")),
            }
        }
        self.capture.set_sample_one_in(self.sample_one_in);
        self.classes = identification.classes;
        self.capture.set_classes(self.classes);
    }

    fn take_port(&mut self, port: Port, identification: IdentificationPage) {
        let page_count_max = port.batch_page_count_max(&identification).min(self.capture.batch_page_count_max());
        self.batch_page_count_max = page_count_max;
        log(&format!("sending evicted pages to {}, {page_count_max} at once", port.device().display()));
        notify(&[NotifyState::Status(&format!("sending evicted pages to {}", port.device().display()))]);
        self.port = PortState::Here(port);
        self.reported = None;
        self.obey(&identification);
        self.capture.set_paused(false);
    }

    fn lose_port(&mut self, reason: &str) {
        self.capture.set_paused(true);
        let retry = Retry::after_failure(Instant::now());
        log(&format!("the port is gone: {reason}; looking for it again"));
        notify(&[NotifyState::Status("waiting for the eviction port to come back")]);
        // This closes the port: a disk that was unplugged can be removed for good only then.
        self.port = PortState::Away(retry);
    }

    fn look_for_port(&mut self, now: Instant) {
        match Port::open(self.options.port.as_deref()) {
            Ok((port, identification)) => self.take_port(port, identification),
            Err(_) => {
                if let PortState::Away(retry) = &mut self.port {
                    retry.postpone(now);
                }
            }
        }
    }

    /// Writes a batch of the pages that are ready. Returns whether there were any, or some are being copied.
    fn goes_on_writing(&mut self) -> bool {
        self.write_pages(self.batch_page_count_max) > 0 || self.ring.is_being_filled()
    }

    /// Writes the pages that are ready or being copied, while capture is paused. Stops waiting for the latter at `give_up_at`.
    fn write_all_pages(&mut self, give_up_at: Instant) {
        while self.write_pages(self.batch_page_count_max) > 0
            || (self.ring.is_being_filled() && Instant::now() < give_up_at)
        {
            std::thread::yield_now();
        }
    }

    /// Writes the pages captured by now. If there is no port, drops them.
    fn finish(&mut self) {
        self.capture.set_paused(true);
        let give_up_at = Instant::now() + LAST_PAGES_TIME_MAX;
        self.write_all_pages(give_up_at);
        // A processor may have seen just before the pause that capture was on, and take its ticket now.
        std::thread::sleep(Duration::from_millis(10));
        self.write_all_pages(give_up_at);
        let statistics = self.statistics();
        if let PortState::Here(port) = &mut self.port
            && let Err(error) = port.write_statistics(&statistics)
        {
            log(&format!("writing the statistics failed: {error}"));
        }
        let StatisticsPage { captured, lost, sampled_out, written, .. } = statistics;
        log(&format!("ended: {captured} pages captured, {written} written, {lost} lost, {sampled_out} sampled out"));
    }
}

/// Schedule for looking for the port again: after one second, then at increasing intervals.
#[derive(Debug, Clone, Copy)]
struct Retry {
    delay: Duration,
    due_at: Instant,
}

impl Retry {
    fn at_once(now: Instant) -> Retry {
        Retry { delay: RETRY_DELAY_MIN, due_at: now }
    }

    fn after_failure(now: Instant) -> Retry {
        Retry { delay: RETRY_DELAY_MIN, due_at: now + RETRY_DELAY_MIN }
    }

    fn is_due(&self, now: Instant) -> bool {
        now >= self.due_at
    }

    fn postpone(&mut self, now: Instant) {
        self.delay = (self.delay * 2).min(RETRY_DELAY_MAX);
        self.due_at = now + self.delay;
    }
}

fn sleep_until_readable(fds: &mut [PollFd<'_>], timeout: Duration) {
    let timeout = Timespec::try_from(timeout).ok();
    // Whatever it returns, the caller checks everything again.
    rustix::event::poll(fds, timeout.as_ref()).ok();
}

/// Notifies systemd, if it is there.
fn notify(states: &[NotifyState<'_>]) {
    sd_notify::notify(states).ok();
}

/// Writes a line to standard error. Errors are ignored: a closed standard error must not end the agent.
fn log(text: &str) {
    writeln!(io::stderr(), "remoca-agent: {text}").ok();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn port_is_looked_for_ever_more_rarely_but_always_again() {
        let now = Instant::now();
        let mut retry = Retry::after_failure(now);
        assert!(!retry.is_due(now));
        assert!(retry.is_due(now + RETRY_DELAY_MIN));
        let mut delays = Vec::new();
        for _ in 0..8 {
            retry.postpone(now);
            delays.push(retry.delay.as_secs());
        }
        assert_eq!(delays, [2, 4, 8, 16, 30, 30, 30, 30]);
        assert!(retry.is_due(now + RETRY_DELAY_MAX));
    }
}
