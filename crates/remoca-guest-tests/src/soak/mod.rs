//! The soak: everything around the disk of a running guest is killed, stopped, restarted, resized, cut off and
//! delayed, at random and repeatedly, and a second disk comes, grows and goes. Then every byte is checked, in the guest and on the image.
//!
//! Called by the program `soak` (`make soak`) and by the test of two minutes. After the faults come calm restarts of
//! the VM process, without any other event: ten seconds before and after them give the hit ratio.

mod donors;
pub mod events;
mod extra;
mod hits;
mod proxy;
mod report;
mod stage;
mod work;

pub use report::{Report, RunReport};
pub use stage::StoreKind;

use crate::Result;
use events::{Deck, Event};
use hits::Watch;
use remoca_lab::store;
use remoca_lab::workload::journal::{After, Versions};
use remoca_lab::workload::pattern::Random;
use report::{Happened, Restart};
use stage::Stage;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};
use work::Work;

/// Time without events before and after a restart.
const CALM: Duration = Duration::from_secs(10);
const CALM_EVENTS: [Event; 3] = [Event::KillDisk, Event::UpgradeDisk, Event::RestartDisk];
/// Maximum pause between two events. With an event's own time, this is less than three seconds on an otherwise idle
/// machine.
const PAUSE_MS_MAX: u64 = 800;
/// Value of `--nbd-settle`. With a longer one, waiting for the disk after a kill would leave no time for other events.
const SETTLE: Duration = Duration::from_secs(3);

/// How long a started agent may take until it reacts to signals.
const AGENT_START: Duration = Duration::from_secs(3);

/// Duration and order of a soak.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    pub seed: u64,
    /// Duration of each run, including the calm restarts. The faults continue until each event has happened.
    pub time: Duration,
    pub calm_restarts: u32,
}

/// Performs one run on one store, and returns its report. Errors of the run are in the report.
pub fn run(kind: StoreKind, options: &Options, logs: &Path, tell: &mut dyn FnMut(&str)) -> RunReport {
    let mut report = RunReport::new(kind.name());
    if let Err(error) = run_into(&mut report, kind, options, logs, tell) {
        report.failures.push(error.to_string());
    }
    report.failures.iter().for_each(|failure| tell(&format!("FAILED: {failure}")));
    report
}

fn run_into(
    report: &mut RunReport,
    kind: StoreKind,
    options: &Options,
    logs: &Path,
    tell: &mut dyn FnMut(&str),
) -> Result<()> {
    tell(&format!("store: {}; seed {}", kind.name(), options.seed));
    let mut stage = Stage::start(kind)?;
    let result = soak(report, &mut stage, kind, options, tell);
    keep_logs(stage.host.folder(), &logs.join(kind.name().replace(' ', "-")))?;
    result
}

fn soak(
    report: &mut RunReport,
    stage: &mut Stage,
    kind: StoreKind,
    options: &Options,
    tell: &mut dyn FnMut(&str),
) -> Result<()> {
    let work = Work::start(&mut stage.guest)?;
    let watch = Watch::start(stage.host.control());
    let mut happened = torment(report, stage, kind, options, tell)?;
    stage.heal()?;
    // What follows is about the disk that was always there.
    if stage.extra.is_there {
        stage.extra.end_work(&mut stage.guest)?;
    }
    tell("the torment is over; the cache fills again");
    stage.wait_until("the cache fills again", |status| {
        status.cache.used_bytes > 48 << 20 && status.counters["hit_blocks"] > 0
    })?;
    for number in 0..options.calm_restarts {
        stage.rest(CALM)?;
        let event = CALM_EVENTS[usize::try_from(number)? % CALM_EVENTS.len()];
        happened.push(perform(report, stage, event, &mut Random::new(number.into()), tell)?);
        stage.rest(CALM)?;
        report.calm();
    }
    report.hits(&watch);
    drop(watch);

    tell("the work ends; everything is read again");
    let mut account = work.finish(&mut stage.guest)?;
    let journal = stage.guest.fetch(work::JOURNAL)?;
    stage.guest.run("umount /mnt", crate::LIMIT)?;
    stage.release_image()?;
    report.store_crashes = stage.store_crashes;
    check_from_outside(stage, &journal, &mut account)?;
    stage.extra.check()?;
    account.verified_bytes += stage.extra.verified_bytes;
    report.take(account, &happened);
    Ok(())
}

/// Causes events until the time is over and each event has happened.
fn torment(
    report: &mut RunReport,
    stage: &mut Stage,
    kind: StoreKind,
    options: &Options,
    tell: &mut dyn FnMut(&str),
) -> Result<Vec<Happened>> {
    let mut kinds = Event::ALWAYS.to_vec();
    if kind == StoreKind::Nbd {
        kinds.extend(Event::OF_STORE);
    }
    let (mut deck, mut random) = (Deck::new(kinds), Random::new(options.seed));
    let calm = 2 * CALM * options.calm_restarts;
    let started = Instant::now();
    let mut happened = Vec::new();
    let (mut settled_at, mut agent_at) = (started, started);
    while started.elapsed() + calm < options.time || !deck.is_complete() {
        sleep(Duration::from_millis(random.below(PAUSE_MS_MAX)));
        let now = Instant::now();
        let settles = kind == StoreKind::Nbd && now < settled_at;
        // An agent that is starting notices only later that it is to end.
        let must_wait =
            |event: Event| settles && event.needs_the_disk() || now < agent_at && event == Event::RestartAgent;
        let event = deck.deal(&mut random, |event| !must_wait(event) && stage.extra.suits(event));
        happened.push(perform(report, stage, event, &mut random, tell)?);
        if event.kills_disk() {
            settled_at = Instant::now() + SETTLE;
        }
        if event.starts_agent() {
            agent_at = Instant::now() + AGENT_START;
        }
    }
    report.gaps(&happened);
    report.seconds = started.elapsed().as_secs();
    Ok(happened)
}

fn perform(
    report: &mut RunReport,
    stage: &mut Stage,
    event: Event,
    random: &mut Random,
    tell: &mut dyn FnMut(&str),
) -> Result<Happened> {
    let begun = Instant::now();
    stage.perform(event, random).map_err(|error| format!("{}: {error}", event.name()))?;
    let ended = Instant::now();
    *report.events.entry(event.name()).or_default() += 1;
    let mut more = String::new();
    if event.restarts_disk() {
        let restart = Restart::of(event, begun, ended, &stage.host.status()?)?;
        more = restart.to_string();
        report.restarted(restart);
    }
    tell(&format!("{} took {} ms {more}", event.name(), (ended - begun).as_millis()));
    Ok(Happened { event, begun })
}

/// Checks the file system and every byte of the data set, directly on the image.
fn check_from_outside(stage: &Stage, journal: &[u8], account: &mut work::Account) -> Result<()> {
    store::check_ext4(&stage.image)?;
    let path = stage.host.folder().join("journal");
    std::fs::write(&path, journal)?;
    let verified = store::verify_ext4(&stage.image, "/set", &Versions::read(&path, After::Order)?)?;
    account.offline(verified.sectors, &verified.faults);
    Ok(())
}

fn keep_logs(folder: &Path, target: &Path) -> Result<()> {
    std::fs::create_dir_all(target)?;
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if let (Some("log"), Some(name)) = (path.extension().and_then(|end| end.to_str()), path.file_name()) {
            std::fs::copy(&path, target.join(name))?;
        }
    }
    Ok(())
}
