//! `remoca status`: one line for each VM, or everything about one.
//!
//! [`remoca_view::figures`] says what the counters mean. [`table`] makes the line of a VM, [`details`] everything else about it.

pub mod explain;
pub mod server;
mod table;

use crate::form::Form;
use crate::number::{parse_whole, whole_in};
use crate::output::say;
use crate::runtime;
use crate::settings::Folder;
use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use remoca_protocol::control::{Command, Status};
use remoca_view::address::Address;
use remoca_view::details::{self, Detail};
use remoca_view::figures::{Figures, counter_since, is_same_program};
use remoca_view::snapshot::Snapshot;
use remoca_view::vm::Silence;
use remoca_view::{Shown, client, text};
use std::collections::BTreeSet;
use std::io::{BufWriter, Write};
use std::path::PathBuf;
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant, SystemTime};
use table::View;

/// Number of processes that are asked at the same time.
const ASKED_AT_A_TIME_MAX: usize = 64;
/// Number of lines after which a heading is repeated.
const LINES_BELOW_HEADING_MAX: usize = 24;

/// Show what the cache does for each running VM of this host.
#[derive(Args, Debug)]
pub struct StatusArgs {
    /// Only this VM: its name, or the path of its control socket
    #[arg(value_name = "NAME")]
    name: Option<String>,

    /// Repeat at this interval; later figures are those of the interval
    #[arg(short, long, value_name = "SECONDS", value_parser = whole_in("number of seconds", 1_u32..=86_400))]
    interval: Option<u32>,

    /// Stop after this many repetitions [default: never]
    #[arg(short, long, value_name = "N", requires = "interval", value_parser = parse_whole::<u32>)]
    count: Option<u32>,

    /// Show everything, with each disk apart, not only one line per VM
    #[arg(short, long)]
    verbose: bool,

    /// Order of the VMs: by name, or the largest first
    #[arg(short, long, value_enum, default_value_t = Order::Name)]
    sort: Order,

    /// Show the memory server of this host (`remoca serve`) and its clients, by its control socket [default: `control` of [serve]
    /// in remoca.toml, else that of the unit, /run/remoca-serve/control]
    #[arg(long, value_name = "PATH", num_args = 0..=1, require_equals = true, conflicts_with_all = ["name", "verbose", "sort"])]
    server: Option<Option<PathBuf>>,

    /// Show the newest snapshot of the `remoca web` at this address (127.0.0.1:9170, unix:/PATH), the one that its page shows
    #[arg(long, value_name = "ADDRESS", conflicts_with = "server")]
    from: Option<Address>,

    #[command(flatten)]
    folder: Folder,

    /// Explain all columns and counters, and exit
    #[arg(long, exclusive = true)]
    explain: bool,

    /// Output format
    #[arg(short, long, value_enum, default_value_t = Form::Table)]
    output: Form,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Order {
    Name,
    Reads,
    Writes,
    /// Share of blocks read that needed no disk
    Hits,
    /// Time that the cache saved
    Saved,
    /// Memory that holds pages
    Used,
    Evicted,
}

/// Status of a VM, with the figures that the table shows and the status that these begin at.
struct Line<'a> {
    shown: Shown<&'a Status>,
    earlier: Option<&'a Status>,
}

/// Runs the subcommand.
///
/// # Errors
/// If the VM named on the command line does not answer, there are VM processes and none of them does, or there is no VM to show in the
/// table.
pub fn run(args: &StatusArgs) -> Result<()> {
    match show_repeatedly(args) {
        // The output has a reader that has read enough, as in `remoca status | head -1`.
        Err(error) if is_broken_pipe(&error) => Ok(()),
        shown => shown,
    }
}

fn show_repeatedly(args: &StatusArgs) -> Result<()> {
    if args.explain {
        return Ok(write!(std::io::stdout(), "{}", explain::text())?);
    }
    match &args.server {
        Some(socket) => {
            let socket = server::control(socket.as_deref(), &args.folder.config)?;
            let ask = || server::ask(&socket).map(|status| (status, Instant::now()));
            repeat(args, ask, |_, _| false, |now, before| show_server(args, now, before))
        }
        None => {
            let mut page = Page::default();
            let mut taken = 0;
            let collect = || {
                taken += 1;
                collect(args, taken)
            };
            // A page takes its snapshots in its own time.
            let is_same = |before: &Answers, now: &Answers| args.from.is_some() && before.snapshot == now.snapshot;
            repeat(args, collect, is_same, |now, before| show(args, &mut page, now, before))
        }
    }
}

/// Returns the time, in seconds since 1970.
fn now_s() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// Collects a status and shows it, again and again if an interval is given. Passes the previous status along. One that `is_same` as that
/// is neither shown nor counted. After the first status it goes on while there is none: a process that is restarted is what somebody may
/// be waiting to see.
///
/// # Errors
/// If there is no status at first, or none at the last of a number of times.
fn repeat<S>(
    args: &StatusArgs,
    mut collect: impl FnMut() -> Result<S>,
    is_same: impl Fn(&S, &S) -> bool,
    mut show: impl FnMut(&S, Option<&S>) -> Result<()>,
) -> Result<()> {
    let (mut before, mut shown) = (None, 0);
    loop {
        let looked = collect();
        let is_shown = matches!((&looked, &before), (Ok(now), Some(before)) if is_same(before, now));
        shown += u32::from(!is_shown);
        let interval = args.interval.filter(|_| args.count.is_none_or(|count| shown < count));
        match looked {
            Ok(_) if is_shown => {}
            Ok(now) => {
                show(&now, before.as_ref())?;
                before = Some(now);
            }
            Err(error) if interval.is_some() && before.is_some() => {
                say(format_args!("{}: {error:#}", text::show_time(now_s())));
            }
            Err(error) => return Err(error),
        }
        let Some(interval) = interval else { return Ok(()) };
        std::thread::sleep(Duration::from_secs(interval.into()));
    }
}

/// Status of a memory server, and when it answered.
type ServerAnswer = (remoca_server::Status, Instant);

fn show_server(args: &StatusArgs, (now, at): &ServerAnswer, before: Option<&ServerAnswer>) -> Result<()> {
    let mut out = std::io::stdout().lock();
    if args.output == Form::Json {
        serde_json::to_writer(&mut out, now)?;
        return Ok(writeln!(out)?);
    }
    let before = before.map(|(before, then)| (before, at.duration_since(*then)));
    Ok(server::show(&mut out, now, before, view(args))?)
}

/// Returns whether totals are shown, or rates with the present time.
fn view(args: &StatusArgs) -> View {
    args.interval.map_or(View::Totals, |_| View::Rates { now_s: now_s() })
}

/// Returns whether nobody reads the output any longer.
pub fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let is_broken_pipe = |error: &std::io::Error| error.kind() == std::io::ErrorKind::BrokenPipe;
    error.downcast_ref::<std::io::Error>().is_some_and(is_broken_pipe)
        || error.downcast_ref::<serde_json::Error>().and_then(serde_json::Error::io_error_kind)
            == Some(std::io::ErrorKind::BrokenPipe)
}

/// What the VMs answered.
#[derive(Default)]
struct Answers {
    /// Number of the snapshot: of this command, or of the page.
    snapshot: u64,
    /// Status of each VM, with its figures since the snapshot before, if a page has these.
    vms: Vec<(Status, Option<Figures>)>,
    /// Why others did not.
    silent: Vec<String>,
}

/// Asks each VM that the command line names, or the page for what it has of them. Its own snapshots have the number `taken`.
fn collect(args: &StatusArgs, taken: u64) -> Result<Answers> {
    if let Some(page) = &args.from {
        return read(page, args.name.as_deref());
    }
    let sockets = runtime::sockets(args.name.as_deref())?;
    let answers = ask_all(&sockets);
    if args.name.is_some() {
        let vms = answers.into_iter().map(|answer| answer.map(|status| (status, None))).collect::<Result<_>>()?;
        return Ok(Answers { snapshot: taken, vms, silent: Vec::new() });
    }
    // A killed process leaves its socket behind. The other VMs are still shown.
    let (mut vms, mut silent) = (Vec::new(), Vec::new());
    for answer in answers {
        answer.map_or_else(|error| silent.push(format!("{error:#}")), |status| vms.push((status, None)));
    }
    Ok(Answers { snapshot: taken, vms, silent })
}

/// Reads the newest snapshot of a page.
fn read(page: &Address, name: Option<&str>) -> Result<Answers> {
    let answers = Answers::of(client::snapshot(page)?, name);
    match name.filter(|_| answers.vms.is_empty()) {
        Some(name) => bail!("{page} has no VM `{name}` that answers"),
        None => Ok(answers),
    }
}

/// Asks all processes, several at a time: the wait for one that hangs is not a wait for the others.
fn ask_all(sockets: &[PathBuf]) -> Vec<Result<Status>> {
    let ask = |socket: &PathBuf| runtime::ask(socket, Command::Status);
    let batch = |batch: &[PathBuf]| -> Vec<Result<Status>> {
        thread::scope(|scope| {
            let asked: Vec<_> = batch.iter().map(|socket| scope.spawn(move || ask(socket))).collect();
            let answer = |asked: ScopedJoinHandle<'_, _>| asked.join().unwrap_or_else(|_| bail!("asking it panicked"));
            asked.into_iter().map(answer).collect()
        })
    };
    sockets.chunks(ASKED_AT_A_TIME_MAX).flat_map(batch).collect()
}

/// What was printed so far.
#[derive(Default)]
struct Page {
    /// Width of the names in the last heading.
    name_width: usize,
    /// Number of lines below the last heading.
    lines: usize,
    /// What was said besides the table, so that it is said once.
    remarks: BTreeSet<String>,
}

impl Page {
    /// Returns whether a heading comes before the next `lines` lines, in which names are up to `name_width` wide.
    fn needs_heading(&mut self, lines: usize, name_width: usize) -> bool {
        let is_new = self.name_width < name_width || self.lines + lines > LINES_BELOW_HEADING_MAX;
        if is_new {
            (self.name_width, self.lines) = (name_width.max(self.name_width), 0);
        }
        self.lines += lines;
        is_new
    }

    /// Prints what is not in the table, below it, where it is seen. What was said in the last interval is not repeated.
    fn remark(&mut self, now: BTreeSet<String>) {
        now.difference(&self.remarks).for_each(say);
        self.remarks = now;
    }
}

/// Prints the status of all VMs. The figures of a VM that is in `before` are those since then.
fn show(args: &StatusArgs, page: &mut Page, now: &Answers, before: Option<&Answers>) -> Result<()> {
    let earlier = before.map_or(&[][..], |before| &before.vms);
    let mut vms: Vec<_> =
        now.vms.iter().map(|(status, recent)| Line::of(status, recent.as_ref(), now.snapshot, earlier)).collect();
    vms.sort_by(|one, other| args.sort.compare(&one.shown.figures, &other.shown.figures));
    let mut out = BufWriter::new(std::io::stdout().lock());
    let view = view(args);
    let mut remarks: BTreeSet<_> = now.silent.iter().cloned().collect();
    if args.output == Form::Json {
        serde_json::to_writer(&mut out, &vms.iter().map(|vm| &vm.shown).collect::<Vec<_>>())?;
        writeln!(out)?;
    } else if args.verbose {
        vms.iter().try_for_each(|vm| show_all(&mut out, vm, view))?;
    } else if !vms.is_empty() {
        let notice = |status: &Status| Some(format!("{}: {}", status.name, status.notice.as_ref()?));
        remarks.extend(now.vms.iter().filter_map(|(status, _)| notice(status)));
        show_table(&mut out, page, vms.into_iter().map(|vm| vm.shown.figures).collect(), view)?;
    }
    let written = out.flush();
    page.remark(remarks);
    written?;
    match now.silent.len() {
        _ if !now.vms.is_empty() || before.is_some() => Ok(()),
        // What a page says of them.
        _ if args.output == Form::Json && args.from.is_some() => Ok(()),
        // A program learns from an empty list that there are no VMs.
        0 if args.output == Form::Json && runtime::of_others("status").is_empty() => Ok(()),
        0 => bail!("no VM process runs here: start one with `remoca disk`{}", runtime::elsewhere()),
        1 => bail!("the only VM process does not answer"),
        count => bail!("none of {count} VM processes answers"),
    }
}

/// Prints a line for each VM, and their total.
fn show_table(out: &mut impl Write, page: &mut Page, mut figures: Vec<Figures>, view: View) -> std::io::Result<()> {
    let total = (figures.len() > 1).then(|| Figures::total(&figures)).flatten();
    figures.extend(total);
    let name_width = figures.iter().map(|vm| vm.name.chars().count()).fold(table::NAME_WIDTH_MIN, usize::max);
    if page.needs_heading(figures.len(), name_width) {
        writeln!(out, "{}", table::heading(view, page.name_width))?;
    }
    figures.iter().try_for_each(|vm| writeln!(out, "{}", table::line(vm, view, page.name_width)))
}

/// Returns what `remoca status -v` prints about one VM.
pub fn details_of(status: &Status) -> String {
    let mut text = Vec::new();
    let vm = Line::of(status, None, 0, &[]);
    // Nothing fails in memory.
    let _ = show_all(&mut text, &vm, View::Totals);
    String::from_utf8_lossy(&text).into_owned()
}

/// Prints everything about one VM.
fn show_all(out: &mut impl Write, vm: &Line<'_>, view: View) -> Result<()> {
    let Line { shown: Shown { status, figures, .. }, earlier } = vm;
    if let View::Rates { now_s } = view {
        let period = match earlier {
            None => "figures since the start".to_owned(),
            Some(_) => format!("figures of the last {}", text::show_seconds(figures.seconds)),
        };
        writeln!(out, "{} {period}", text::show_time(now_s))?;
    }
    writeln!(out, "{} (process {}, up {:.0} s, version {})", status.name, status.pid, status.uptime_s, status.version)?;
    for Detail { label, text } in details::of(status, *earlier) {
        writeln!(out, "  {label:<11} {text}")?;
    }
    for name in status.counters.keys() {
        writeln!(out, "  {name:<26} {:>12}", counter_since(status, *earlier, name))?;
    }
    Ok(())
}

impl Answers {
    /// Returns what a page's snapshot has of the VM with this name, or of all.
    fn of(snapshot: Snapshot, name: Option<&str>) -> Self {
        let mut answers = Self { snapshot: snapshot.snapshot, ..Self::default() };
        for vm in snapshot.vms.into_iter().filter(|vm| name.is_none_or(|name| vm.name == name)) {
            match (vm.status, vm.silence) {
                (Some(shown), _) => answers.vms.push((shown.status, shown.recent)),
                (None, silence) => {
                    let reason = silence.as_ref().map_or("it does not answer", Silence::text);
                    answers.silent.push(format!("{}: {reason}", vm.name));
                }
            }
        }
        answers
    }
}

impl<'a> Line<'a> {
    /// Returns what is shown of `status`, which is of this snapshot, with its `recent` figures. The others are those since the status of the
    /// same program in `before`.
    fn of(
        status: &'a Status,
        recent: Option<&Figures>,
        snapshot: u64,
        before: &'a [(Status, Option<Figures>)],
    ) -> Self {
        let earlier = before.iter().map(|(earlier, _)| earlier).find(|earlier| is_same_program(earlier, status));
        let figures = Figures::of(status, earlier);
        Self { shown: Shown { snapshot, status, figures, recent: recent.cloned() }, earlier }
    }
}

impl Order {
    /// Returns which of two VMs comes first.
    fn compare(self, one: &Figures, other: &Figures) -> std::cmp::Ordering {
        let ratio =
            |one: Option<f64>, other: Option<f64>| one.unwrap_or(f64::MIN).total_cmp(&other.unwrap_or(f64::MIN));
        let larger_first = match self {
            Self::Name => std::cmp::Ordering::Equal,
            Self::Reads => one.reads.cmp(&other.reads),
            Self::Writes => one.writes.cmp(&other.writes),
            Self::Hits => ratio(one.hit_ratio(), other.hit_ratio()),
            Self::Saved => ratio(one.saved_s, other.saved_s),
            Self::Used => one.used_bytes.cmp(&other.used_bytes),
            Self::Evicted => one.evicted.cmp(&other.evicted),
        };
        larger_first.reverse().then_with(|| one.name.cmp(&other.name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::os::unix::net::UnixListener;
    use std::sync::Barrier;

    /// Each answers only when all have been asked.
    #[test]
    fn processes_are_asked_at_the_same_time() {
        let folder = tempfile::tempdir().unwrap();
        let names: Vec<String> = (0..ASKED_AT_A_TIME_MAX).map(|number| format!("vm{number}")).collect();
        let sockets: Vec<_> = names.iter().map(|name| folder.path().join(name)).collect();
        let listeners: Vec<_> = sockets.iter().map(|socket| UnixListener::bind(socket).unwrap()).collect();
        let all = Barrier::new(names.len());
        let answer = |listener: &UnixListener, name: &str| {
            let mut stream = BufReader::new(listener.accept().unwrap().0);
            stream.read_line(&mut String::new()).unwrap();
            all.wait();
            let status =
                Status { name: name.into(), ..remoca_view::testing::status(serde_json::json!({}), [0; 2], [0; 2]) };
            writeln!(stream.get_mut(), "{}", serde_json::to_string(&status).unwrap()).unwrap();
        };
        let statuses = thread::scope(|scope| {
            let servers = listeners.iter().zip(&names);
            servers.for_each(|(listener, name)| drop(scope.spawn(|| answer(listener, name))));
            ask_all(&sockets)
        });
        let answered: Vec<_> = statuses.into_iter().map(|status| status.unwrap().name).collect();
        assert_eq!(answered, names);
    }

    /// Processes of two users may have one.
    #[test]
    fn figures_of_a_page_are_those_of_their_vm_though_another_one_has_its_name() {
        let mut snapshot = remoca_view::testing::full_snapshot(2);
        for (reads, vm) in (7..).zip(&mut snapshot.vms) {
            let shown = vm.status.as_mut().unwrap();
            shown.status.name = "web".into();
            shown.recent.as_mut().unwrap().reads = reads;
        }
        let answers = Answers::of(snapshot, None);
        let shown = |(status, recent): &(Status, Option<Figures>)| {
            Line::of(status, recent.as_ref(), 2, &[]).shown.recent.map(|recent| recent.reads)
        };
        assert_eq!(answers.vms.iter().map(shown).collect::<Vec<_>>(), [Some(7), Some(8)]);
    }

    #[test]
    fn a_heading_comes_again_for_longer_names_and_after_a_page() {
        let mut page = Page::default();
        let headings: Vec<_> = (0..6).map(|_| page.needs_heading(10, 16)).collect();
        assert_eq!(headings, [true, false, true, false, true, false]);
        assert!(page.needs_heading(1, 20) && !page.needs_heading(1, 17));
        assert_eq!(page.name_width, 20);
    }
}
