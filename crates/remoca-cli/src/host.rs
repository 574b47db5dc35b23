//! `remoca host`: divides the memory of one cache tier of this host among its VMs, or says how it would.

mod give_back;
mod here;
mod table;

use crate::form::Form;
use crate::memory::KnownFiles;
use crate::runtime::{self, KnownSockets};
use crate::settings::file::{self, HOST};
use crate::settings::layers::Merged;
use crate::settings::schema::Schema;
use crate::settings::{Files, Folder, Unusable};
use crate::size::{parse_size, show_size};
use crate::status::is_broken_pipe;
use crate::time::parse_duration;
use anyhow::{Context, Result, anyhow, bail};
use clap::{ArgAction, Args, FromArgMatches, Subcommand, ValueEnum};
use here::{Host, asked};
use remoca_disk::start::WrongOptions;
use remoca_host::daemon::{Daemon, Extent};
use remoca_host::plan::Policy;
use remoca_host::planner::{GuestTerms, Settings};
use remoca_host::record::{HostLock, Paths};
use remoca_host::resource::Resource;
use remoca_io::signals::Signals;
use remoca_protocol::host::HostReport;
use sd_notify::NotifyState;
use std::ffi::OsString;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Flags that are no settings.
const NOT_IN_FILES: &[&str] = &["config", "sockets", "once", "output", "policy"];
/// Reserve for guests that are short of memory, unless the operator names another one.
const RESERVE_BYTES: u64 = 256 << 20;
/// Smallest reserve: a guest gets half of it at most, in MiB.
const RESERVE_MIN: u64 = 2 << 20;
/// Least time between two looks at all VMs.
const INTERVAL_MIN: Duration = Duration::from_millis(100);
/// Least time in which a VM changes at most once.
const WINDOW_MIN: Duration = Duration::from_secs(1);

/// Divide the cache memory of this host among its VMs, by their miss-ratio curves: that at memory servers, or that of their local tiers.
///
/// Without --apply it changes nothing: it shows what each VM has and would get, and why. Every flag that is not given is looked up in the
/// table [host] of remoca.toml; the limits of a VM are in the table [memory] of its file. A key is a flag without its dashes.
#[derive(Args, Debug)]
#[command(args_conflicts_with_subcommands = true)]
pub struct HostArgs {
    #[command(subcommand)]
    ask: Option<Ask>,

    #[command(flatten)]
    folder: Folder,

    /// Memory that all VMs of this host may have together in the tier that is divided
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    total: Option<u64>,

    /// What is divided; the other tier stays as it is
    #[arg(long, value_enum, default_value_t = Tier::Remote)]
    tier: Tier,

    /// Change the sizes, as `remoca set` does. Memory is taken first, and given once it is there
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true, default_missing_value = "true",
          default_value_t = false, action = ArgAction::Set, hide_default_value = true, hide_possible_values = true)]
    apply: bool,

    /// Time between two looks at the VMs, such as 10s
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse_duration)]
    interval: Duration,

    /// Time in which a VM changes at most once
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse_duration)]
    window: Duration,

    /// Move memory between guests and their local tiers: guests whose file names a monitor ([memory] monitor) lend some for a round, the
    /// tiers are divided by what is then seen, and guests get back what is left in theirs. Needs --tier local
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true, default_missing_value = "true",
          default_value_t = false, action = ArgAction::Set, hide_default_value = true, hide_possible_values = true)]
    guests: bool,

    /// With --guests: memory of the total that no plan gives away, from which guests that are short of memory get theirs back at once
    /// [default: 256M, at most an eighth of the total; at least 2M]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    reserve: Option<u64>,

    /// With --guests: time from the end of a round to the next one
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = parse_duration)]
    round: Duration,

    #[command(flatten)]
    place: Place,

    /// Look once, and end; with --apply, after the changes of one plan, and with --guests after one round. That --apply must be typed: the
    /// one in remoca.toml is for the daemon
    #[arg(long)]
    once: bool,

    /// How memory is divided; all but the best division are for comparison, and not with --apply
    #[arg(long, value_enum, default_value_t = Division::Optimal)]
    policy: Division,

    /// Output format
    #[arg(short, long, value_enum, default_value_t = Form::Table)]
    output: Form,
}

#[derive(Args, Clone, Debug)]
struct Place {
    /// Folder with the control sockets of the VM processes (NAME.ctl), and with this daemon's own files [default: /run/remoca, for
    /// users $XDG_RUNTIME_DIR/remoca]
    #[arg(long, value_name = "FOLDER")]
    sockets: Option<PathBuf>,
}

impl Place {
    fn folder(&self) -> Result<PathBuf> {
        self.sockets.clone().map_or_else(|| runtime::directory_or("give --sockets FOLDER"), Ok)
    }
}

#[derive(Subcommand, Debug)]
enum Ask {
    /// Show what the daemon that runs (`remoca host`, remoca-host.service) knows and plans
    Status {
        #[command(flatten)]
        place: Place,

        /// Output format
        #[arg(short, long, value_enum, default_value_t = Form::Table)]
        output: Form,
    },
    /// Give all guests back, at once, the memory that they have lent to their caches (--guests). Tiers shrink first. Works whether a
    /// daemon runs or not; a daemon with --guests then waits --round until its next round
    GiveBack {
        #[command(flatten)]
        folder: Folder,

        #[command(flatten)]
        place: Place,
    },
    /// Show the latest decisions of the daemon that runs: what it changed, or would, why, and what came of it
    Log {
        #[command(flatten)]
        place: Place,

        /// Output format
        #[arg(short, long, value_enum, default_value_t = Form::Table)]
        output: Form,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Division {
    /// The least geometric mean of the miss ratios, with all bounds kept
    Optimal,
    /// One unit at a time, as in the paper, with all bounds and margins kept; it stops in front of cliffs
    Greedy,
    /// What VMware ESX would do with idle memory; bounds do not hold
    Esx,
    /// By weight alone
    Equal,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Tier {
    /// Memory of this host, in front of the memory servers: what `remoca set --local` sets
    Local,
    /// The caches at memory servers: what `remoca set --cache` sets
    Remote,
}

impl From<Tier> for Resource {
    fn from(tier: Tier) -> Self {
        match tier {
            Tier::Local => Self::Local,
            Tier::Remote => Self::Cache,
        }
    }
}

impl From<Division> for Policy {
    fn from(division: Division) -> Self {
        match division {
            Division::Optimal => Self::Optimal,
            Division::Greedy => Self::Greedy,
            Division::Esx => Self::Esx,
            Division::Equal => Self::Equal,
        }
    }
}

/// Returns the keys that the table [host] may have.
pub fn schema() -> Schema {
    Schema::new(HostArgs::augment_args(clap::Command::new("host")), NOT_IN_FILES, &[])
}

/// Runs the subcommand. `words` are its arguments as they were typed.
///
/// # Errors
/// If an option cannot be used, another daemon runs, no daemon answers, or of one plan (`--once`) a change was not made.
pub fn run(args: &HostArgs, words: &[OsString]) -> Result<()> {
    let shown = match &args.ask {
        Some(Ask::GiveBack { folder, place }) => give_back::run(&folder.config, &place.folder()?),
        Some(Ask::Status { place, output }) => tell(place, |report| match output {
            Form::Json => Ok(format!("{}\n", serde_json::to_string(report)?)),
            Form::Table => {
                let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
                Ok(table::text(report) + &table::age(report, now.map_or(0, |now| now.as_secs())))
            }
        }),
        Some(Ask::Log { place, output }) => tell(place, |report| match output {
            Form::Json => Ok(format!("{}\n", serde_json::to_string(&report.decisions)?)),
            Form::Table => Ok(table::log(report)),
        }),
        None => configured(&args.folder.config, words).and_then(|mut all| {
            // Who only looks once must say that it is to change something.
            all.apply &= args.apply || !args.once;
            divide(&all)
        }),
    };
    match shown {
        Err(error) if is_broken_pipe(&error) => Ok(()),
        shown => shown,
    }
}

/// Returns the arguments that were typed, completed by those in the host's file.
fn configured(folder: &Path, words: &[OsString]) -> Result<HostArgs> {
    let files = Files::read(folder, None)?;
    let (settings, problems) = files.host.map(|text| text.host(HOST, &schema())).unwrap_or_default();
    if !problems.is_empty() {
        return Err(Unusable(problems).into());
    }
    Ok(HostArgs::from_arg_matches(&Merged::new(&schema(), words, &[&settings])?.matches)?)
}

/// Checks what the table [host] says together. Where it has no total, flags have it.
///
/// # Errors
/// If no daemon can start with it.
pub fn check(file: &file::Settings) -> Result<()> {
    if !file.entries.contains_key("total") {
        return Ok(());
    }
    let merged = Merged::new(&schema(), &[], &[file])?;
    settings(&HostArgs::from_arg_matches(&merged.matches)?).map(drop).context(WrongOptions)
}

fn divide(args: &HostArgs) -> Result<()> {
    let settings = settings(args).context(WrongOptions)?;
    let directory = args.place.folder()?;
    if args.once && args.place.sockets.is_some() {
        check_folder(&directory)?;
    }
    let extent = if args.once { Extent::Once } else { Extent::Always };
    // A single look leaves nothing behind, and may be beside a daemon.
    let is_daemon = settings.applies || !args.once;
    let paths = is_daemon.then(|| Paths::new(&directory));
    let _lock = paths.as_ref().map(|paths| lock(paths, &directory)).transpose()?;
    let signals = Signals::take().context("cannot take signals")?;
    let is_service = std::env::var_os("NOTIFY_SOCKET").is_some();
    let host = Host {
        directory,
        folder: args.folder.config.clone(),
        output: (!is_service).then_some(args.output),
        is_first: true,
        known: KnownSockets::default(),
        files: KnownFiles::default(),
    };
    let mut daemon = Daemon::new(settings, host, paths.as_ref())?;
    if is_daemon {
        let total = remoca_io::show::show_size(settings.total_bytes);
        let what = if settings.applies { "divides" } else { "watches, and would divide," };
        tracing::info!("remoca {} {what} {total} of memory ({})", env!("CARGO_PKG_VERSION"), settings.resource.name());
        if let Err(error) = sd_notify::notify(&[NotifyState::Ready]) {
            tracing::warn!(%error, "cannot tell the service manager that the daemon is ready");
        }
    }
    daemon.run(signals.stop.as_fd(), extent)?;
    let _told = sd_notify::notify(&[NotifyState::Stopping]);
    match daemon.failed() {
        failed if args.once && failed > 0 => bail!("{failed} of the sizes were not changed: the log above says why"),
        _ => Ok(()),
    }
}

/// Returns the settings of the daemon, as far as these options can be used.
fn settings(args: &HostArgs) -> Result<Settings> {
    let Some(total_bytes) = args.total else {
        bail!(
            "no total: say --total SIZE, or in the table [host] of remoca.toml, how much memory all VMs may have together"
        );
    };
    if !(2 << 20..=1 << 46).contains(&total_bytes) {
        bail!("a total of {total_bytes} bytes: from 2M to 64T are possible");
    }
    if args.apply && args.policy != Division::Optimal {
        bail!("this policy is for comparison: leave out --apply or --policy");
    }
    if args.interval < INTERVAL_MIN {
        bail!("an interval of {} ms: at least 100 are needed", args.interval.as_millis());
    }
    if args.window < WINDOW_MIN {
        let window = args.window.as_millis();
        bail!("a window of {window} ms: at least 1s is needed between two changes of a VM");
    }
    let guests = guest_terms(args, total_bytes)?;
    Ok(Settings {
        resource: args.tier.into(),
        total_bytes,
        policy: args.policy.into(),
        applies: args.apply,
        interval: args.interval,
        window: args.window,
        readings_min: if args.once { 1 } else { 2 },
        guests,
    })
}

/// Returns how guests take part, if they do.
fn guest_terms(args: &HostArgs, total_bytes: u64) -> Result<Option<GuestTerms>> {
    if !args.guests {
        return Ok(None);
    }
    if args.tier != Tier::Local {
        bail!("--guests moves memory of this host, so it needs --tier local: memory at servers is elsewhere");
    }
    if args.policy != Division::Optimal {
        bail!("this policy is for comparison: leave out --guests or --policy");
    }
    let reserve_bytes = args.reserve.unwrap_or(RESERVE_BYTES.min(total_bytes / 8).max(RESERVE_MIN));
    if reserve_bytes < RESERVE_MIN {
        let reserve = show_size(reserve_bytes);
        let advice = "with --guests at least 2M is needed, or no guest that is short of memory gets any back from it";
        bail!("a reserve of {reserve}: {advice}");
    }
    if reserve_bytes > total_bytes / 2 {
        let (reserve, total) = (show_size(reserve_bytes), show_size(total_bytes));
        bail!("a reserve of {reserve} of a total of {total}: half of it at most");
    }
    // A single look is for a round that is wanted now.
    let rest = if args.once { Duration::ZERO } else { args.round };
    Ok(Some(GuestTerms { reserve_bytes, rest }))
}

/// Checks that there is a folder, as one that was named for a single look must be. A daemon makes it.
fn check_folder(folder: &Path) -> Result<()> {
    let unusable = || format!("--sockets: {} cannot be read as a folder", folder.display());
    std::fs::read_dir(folder).map(drop).with_context(unusable)
}

fn lock(paths: &Paths, directory: &Path) -> Result<HostLock> {
    std::fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
    HostLock::take(&paths.lock).map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock => anyhow!(
            "another `remoca host`, or a `remoca host give-back`, works here: `remoca host status` shows what it does. Wait until it has ended, then \
             try again, as remoca-host.service does by itself every 5 s; `remoca host --once` looks beside it"
        ),
        _ => anyhow::Error::new(error).context(format!("cannot lock {}", paths.lock.display())),
    })
}

/// Shows what the daemon that runs knows.
fn tell(place: &Place, text: impl Fn(&HostReport) -> Result<String>) -> Result<()> {
    let report = asked(&Paths::new(&place.folder()?))?;
    Ok(io::stdout().write_all(text(&report)?.as_bytes())?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser, Debug)]
    struct Program {
        #[command(flatten)]
        host: HostArgs,
    }

    fn of(words: &str) -> Result<Settings> {
        let words = std::iter::once("host").chain(words.split_whitespace());
        match Program::try_parse_from(words) {
            Ok(program) => settings(&program.host),
            Err(error) => bail!("{error}"),
        }
    }

    #[test]
    fn what_is_typed_becomes_settings() {
        let all = of("--total 8G --apply --interval 1s --window 5m").unwrap();
        assert_eq!((all.total_bytes, all.applies, all.window), (8 << 30, true, Duration::from_secs(300)));
        assert_eq!((all.readings_min, all.memory().unit_bytes), (2, 4 << 20));
        assert_eq!((all.resource, of("--total 1G --tier local").unwrap().resource), (Resource::Cache, Resource::Local));
        assert_eq!((all.guests, of("--total 1G --tier local --reserve 1M").unwrap().guests), (None, None));
        let guests = |words: &str| of(&format!("--tier local --guests {words}")).unwrap().guests.unwrap();
        let hour = Duration::from_secs(3600);
        assert_eq!(guests("--total 8G"), GuestTerms { reserve_bytes: 256 << 20, rest: hour });
        assert_eq!(guests("--total 64M --once"), GuestTerms { reserve_bytes: 8 << 20, rest: Duration::ZERO });
        assert_eq!(guests("--total 8G --reserve 1G --round 5m").reserve_bytes, 1 << 30);
        assert_eq!(guests("--total 4M").reserve_bytes, 2 << 20);
        let look = of("--total 8G --once --policy esx").unwrap();
        assert_eq!((look.readings_min, look.policy, look.applies), (1, Policy::Esx, false));
    }

    #[test]
    fn what_is_wrong_is_said() {
        for (words, expected) in [
            ("", "no total: say --total"),
            ("--total 4K", "from 2M to 64T"),
            ("--total 8G --apply --policy greedy", "for comparison"),
            ("--total 8G --guests", "needs --tier local"),
            ("--total 8G --tier local --guests --reserve 5G", "half of it at most"),
            ("--total 3M --tier local --guests", "half of it at most"),
            ("--total 8G --tier local --guests --reserve 0", "a reserve of 0B: with --guests at least 2M"),
            ("--total 8G --tier local --guests --reserve 1M", "with --guests at least 2M is needed"),
            ("--total 8G --tier local --guests --policy esx", "for comparison"),
            ("--total 8G --interval 1ms", "at least 100 are needed"),
            ("--total 8G --window 0s", "at least 1s is needed"),
            ("--total 8G --tier near", "possible values: local, remote"),
            ("--total 8G --interval soon", "is not a time"),
        ] {
            let error = format!("{:#}", of(words).unwrap_err());
            assert!(error.contains(expected), "{words}: {error}");
        }
    }
}
