//! The table of VMs: a heading, and a line for each VM. Column widths are fixed except that of the names, so that the lines
//! of later intervals align.

use crate::size::show_size;
use remoca_view::figures::{Agent, Figures};
use remoca_view::text::{micros, percent, rate, show_seconds, show_time};

/// One column.
pub struct Column {
    pub heading: &'static str,
    /// Heading with an interval, if the column then shows rates.
    pub heading_of_rate: Option<&'static str>,
    /// What the column shows, for `--explain`.
    pub meaning: &'static str,
    width: usize,
    align: Align,
    cell: fn(&Figures, View) -> String,
}

/// Alignment of a cell: text to the left, numbers to the right.
enum Align {
    Left,
    Right,
}

use Align::{Left, Right};

/// How figures are shown: as totals, or with an interval as rates and with the time, in seconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum View {
    Totals,
    Rates { now_s: u64 },
}

/// Heading of the names.
const NAME: &str = "VM";
pub const NAME_WIDTH_MIN: usize = 16;
/// Number of columns that only a table with an interval has. They are the first ones.
const INTERVAL_COLUMNS: usize = 2;

pub const COLUMNS: [Column; 19] = [
    column("TIME", 9, Left, time, "time of the line, in UTC like the log (only with -i)"),
    column("OVER", 5, Right, over, "time that the figures cover; `start`: since the process started (only with -i)"),
    column(NAME, NAME_WIDTH_MIN, Left, |vm, _| vm.name.clone(), "name of the VM; TOTAL: all of them together"),
    column("GUEST", 5, Right, |vm, _| guest(vm), "whether a guest has attached all disks; 1/2: one of two"),
    column("AGENT", 6, Right, |vm, _| agent(vm.agent), AGENT),
    column(
        "CACHE",
        6,
        Right,
        |vm, _| vm.cache_bytes.map_or("off".into(), show_size),
        "memory that the servers grant, in all tiers",
    ),
    column("USED", 6, Right, |vm, _| show_size(vm.used_bytes), USED),
    column("SERVER", 11, Left, |vm, _| vm.server.words().into(), SERVER),
    column("READS", 7, Right, |vm, view| count(vm, view, vm.reads), "reads of the guest (M: millions)")
        .with_rate("READ/s"),
    column("READ", 6, Right, |vm, view| bytes(vm, view, vm.read_bytes), "bytes read").with_rate("rB/s"),
    column("WRITES", 7, Right, |vm, view| count(vm, view, vm.writes), "writes of the guest").with_rate("WRITE/s"),
    column("WRITTEN", 7, Right, |vm, view| bytes(vm, view, vm.written_bytes), "bytes written").with_rate("wB/s"),
    column("HIT%", 6, Right, |vm, _| percent(vm.hit_ratio()), HITS),
    column("HIT us", 7, Right, |vm, _| micros(vm.hits.mean_us()), "mean time of reads that needed no disk"),
    column("DISK us", 8, Right, |vm, _| micros(vm.disk_reads.mean_us()), "mean time of reads that needed the disk"),
    column("SAVED", 6, Right, |vm, _| vm.saved_s.map_or("-".into(), show_seconds), SAVED),
    column("EVICTED", 8, Right, |vm, view| count(vm, view, vm.evicted), EVICTED).with_rate("EVICT/s"),
    column("KNOWN%", 7, Right, |vm, _| percent(vm.known_ratio()), KNOWN),
    column("POOL AT", 0, Left, |vm, _| pool_and_faults(vm), POOL_AT),
];

const USED: &str = "memory that holds pages; that of a server that is away counts until it returns or others take its place, so it can \
                    be more than CACHE";
const AGENT: &str = "whether the agent in the guest reports (every ten seconds); 5m: silent for so long; no: not heard since the \
                     guest attached; -: the VM has no eviction port";
const SERVER: &str =
    "`left alone`: the memory server is slower than the disk, which answers all reads; with --no-hedge: it is silent";
const HITS: &str = "share of the blocks read that needed no disk: cached pages, and blocks known to be zero; reads of parts of blocks \
                    do not count";
const SAVED: &str = "time that reads were shorter by: reads without the disk x (usual time of the disk - their time); negative: \
                     the cache makes the guest slower";
const EVICTED: &str = "pages that the guest evicted, as far as its agent sent them: while the cache has them or would keep none, \
                       it sends a sample (-v says so)";
const KNOWN: &str = "share of the evicted pages that the disk is known to hold; low with dm-crypt or a compressed file system \
                     in the guest, and the agent then almost stops; pages that are evicted while the cache is off do not count";

const POOL_AT: &str = "memory server that has the pages, whether there is a local tier, and how many pools are drained; -v shows all of them";

const fn column(
    heading: &'static str,
    width: usize,
    align: Align,
    cell: fn(&Figures, View) -> String,
    meaning: &'static str,
) -> Column {
    Column { heading, heading_of_rate: None, meaning, width, align, cell }
}

impl Column {
    const fn with_rate(self, heading: &'static str) -> Self {
        Self { heading_of_rate: Some(heading), ..self }
    }
}

/// Returns the heading of the table, in which names are `name_width` wide.
pub fn heading(view: View, name_width: usize) -> String {
    join(view, name_width, |column| match view {
        View::Totals => column.heading.into(),
        View::Rates { .. } => column.heading_of_rate.unwrap_or(column.heading).into(),
    })
}

/// Returns the line of one VM.
pub fn line(vm: &Figures, view: View, name_width: usize) -> String {
    join(view, name_width, |column| (column.cell)(vm, view))
}

fn join(view: View, name_width: usize, cell: impl Fn(&Column) -> String) -> String {
    let mut line = String::new();
    for column in &COLUMNS[if view == View::Totals { INTERVAL_COLUMNS } else { 0 }..] {
        let (text, width) = (cell(column), if column.heading == NAME { name_width } else { column.width });
        line += &match column.align {
            Left if line.is_empty() => format!("{text:<width$}"),
            Left => format!("   {text:<width$}"),
            Right => format!(" {text:>width$}"),
        };
    }
    line.trim_end().into()
}

fn time(_: &Figures, view: View) -> String {
    match view {
        View::Totals => String::new(),
        View::Rates { now_s } => show_time(now_s),
    }
}

fn over(vm: &Figures, _: View) -> String {
    if vm.since_start { "start".into() } else { show_seconds(vm.seconds) }
}

fn guest(vm: &Figures) -> String {
    match vm.disks_attached {
        0 => "no".into(),
        attached if attached == vm.disks => "yes".into(),
        attached => format!("{attached}/{}", vm.disks),
    }
}

fn agent(agent: Agent) -> String {
    match agent {
        Agent::NoPort => "-".into(),
        Agent::NotHeard => "no".into(),
        Agent::Running => "yes".into(),
        Agent::SilentFor(seconds) => show_seconds(std::time::Duration::from_secs(seconds).as_secs_f64()),
    }
}

fn count(vm: &Figures, view: View, count: u64) -> String {
    match view {
        View::Totals => short(count),
        View::Rates { .. } => rate(vm.each_second(count)),
    }
}

/// Returns a number in seven characters at most: ten millions and more as `10.0M`, then with `G` and so on, in steps of a thousand.
fn short(count: u64) -> String {
    const UNITS: [&str; 5] = ["M", "G", "T", "P", "E"];
    if count < 10_000_000 {
        return count.to_string();
    }
    let (mut tenths, mut unit) = (count / 100_000, 0);
    while tenths >= 100_000 {
        (tenths, unit) = (tenths / 1000, unit + 1);
    }
    format!("{}.{}{}", tenths / 10, tenths % 10, UNITS[unit])
}

fn bytes(vm: &Figures, view: View, bytes: u64) -> String {
    match view {
        View::Totals => show_size(bytes),
        View::Rates { .. } => remoca_view::text::size_of_rate(vm.each_second(bytes)),
    }
}

fn pool_and_faults(vm: &Figures) -> String {
    let faults = vm.failed_flushes.iter().map(|disk| format!("   FLUSHES OF {disk} FAIL (see -v)"));
    std::iter::once(vm.pool_at.clone().unwrap_or("-".into())).chain(faults).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use remoca_view::figures::{ServerState, Taken};
    use remoca_view::testing::status;
    use serde_json::json;

    fn vm() -> Figures {
        let of_nothing = Figures::of(&status(json!({}), [0, 0], [0, 0]), None);
        Figures {
            name: "web".into(),
            seconds: 8.0,
            agent: Agent::SilentFor(400),
            cache_bytes: Some(4 << 20),
            used_bytes: 1 << 20,
            server: ServerState::LeftAlone,
            reads: 1234,
            read_bytes: 8 << 20,
            writes: 5,
            written_bytes: 20 << 10,
            hit_blocks: 3,
            read_blocks: 4,
            hits: Taken { count: 10, sum_ns: 804_000 },
            saved_s: Some(-12.3),
            evicted: 10,
            known: 10,
            pool_at: Some("tcp:h:1".into()),
            failed_flushes: vec!["a".into()],
            ..of_nothing
        }
    }

    #[test]
    fn figures_stand_below_their_headings() {
        let vm = vm();
        let wanted = [
            "VM               GUEST  AGENT  CACHE   USED   SERVER        READS   READ  WRITES WRITTEN   HIT%  HIT us  DISK us  \
             SAVED  EVICTED  KNOWN%   POOL AT",
            "web                yes   6.7m     4M     1M   left alone     1234     8M       5     20K   75.0      80        -   \
             -12s       10   100.0   tcp:h:1   FLUSHES OF a FAIL (see -v)",
        ];
        assert_eq!([heading(View::Totals, 16), line(&vm, View::Totals, 16)], wanted);
        let off = Figures { cache_bytes: None, pool_at: None, failed_flushes: Vec::new(), disks: 2, ..vm };
        let off = line(&off, View::Totals, 16);
        assert!(off.starts_with("web                1/2   6.7m    off ") && off.ends_with("   -"), "{off}");
    }

    #[test]
    fn large_numbers_stay_in_their_columns() {
        let shown = [9_999_999, 10_000_000, 9_999_999_999, 12_345_678_901, u64::MAX].map(short);
        assert_eq!(shown, ["9999999", "10.0M", "9999.9M", "12.3G", "18.4E"]);
        let vm = Figures { reads: 123_456_789, writes: u64::MAX, evicted: 10_000_000, ..vm() };
        let (heading, line) = (heading(View::Totals, 16), line(&vm, View::Totals, 16));
        assert_eq!(heading.find("POOL AT"), line.find("tcp:h:1"), "{heading}\n{line}");
    }

    #[test]
    fn long_names_make_their_column_wider() {
        let name = "customer-0042-of-the-shop";
        let vm = Figures { name: name.into(), ..vm() };
        let shown = [heading(View::Totals, name.len()), line(&vm, View::Totals, name.len())];
        let at = shown.each_ref().map(|line| line.find("GUEST").or(line.find("  yes")).unwrap());
        assert_eq!(at[0], at[1], "{shown:#?}");
    }

    #[test]
    fn an_interval_is_shown_in_rates_with_its_time() {
        let view = View::Rates { now_s: 86_400 + 3_661 };
        let shown = [vm(), Figures { since_start: false, ..vm() }].map(|vm| line(&vm, view, 16));
        let wanted = [
            "TIME       OVER   VM               GUEST  AGENT  CACHE   USED   SERVER       READ/s   rB/s WRITE/s    wB/s   HIT%  \
             HIT us  DISK us  SAVED  EVICT/s  KNOWN%   POOL AT",
            "01:01:01Z start   web                yes   6.7m     4M     1M   left alone      154     1M     0.6    2.5K   75.0      \
             80        -   -12s      1.2   100.0   tcp:h:1   FLUSHES OF a FAIL (see -v)",
        ];
        assert_eq!([heading(view, 16), shown[0].clone()], wanted);
        assert!(shown[1].starts_with("01:01:01Z  8.0s   web "), "{}", shown[1]);
    }
}
