//! The table of VMs: a heading, and a line for each VM. Column widths are fixed, so that the lines of later intervals
//! align.

use super::figures::{Figures, ServerState};
use crate::size::show_size;

/// One column.
struct Column {
    heading: &'static str,
    width: usize,
    align: Align,
    cell: fn(&Figures<'_>) -> String,
}

/// Alignment of a cell: text to the left, numbers to the right.
enum Align {
    Left,
    Right,
}

use Align::{Left, Right};

const COLUMNS: [Column; 12] = [
    column("VM", 16, Left, |vm| vm.name.into()),
    column("CACHE", 5, Right, |vm| vm.cache_bytes.map_or("off".into(), show_size)),
    column("USED", 9, Right, |vm| show_size(vm.used_bytes)),
    column("SERVER", 11, Left, |vm| server(vm.server).into()),
    column("READS", 7, Right, |vm| vm.reads.to_string()),
    column("HIT%", 6, Right, |vm| percent(vm.hit_ratio)),
    column("CACHE us", 9, Right, |vm| micros(vm.cache_read_us)),
    column("DISK us", 9, Right, |vm| micros(vm.disk_read_us)),
    column("WRITES", 8, Right, |vm| vm.writes.to_string()),
    column("EVICTED", 8, Right, |vm| vm.evicted.to_string()),
    column("KNOWN%", 7, Right, |vm| percent(vm.known_ratio)),
    column("POOL AT", 0, Left, pool_and_faults),
];

const fn column(heading: &'static str, width: usize, align: Align, cell: fn(&Figures<'_>) -> String) -> Column {
    Column { heading, width, align, cell }
}

/// Returns the heading of the table.
pub fn heading() -> String {
    join(|column| column.heading.into())
}

/// Returns the line of one VM.
pub fn line(vm: &Figures<'_>) -> String {
    join(|column| (column.cell)(vm))
}

fn join(cell: impl Fn(&Column) -> String) -> String {
    let mut line = String::new();
    for column in &COLUMNS {
        let (text, width) = (cell(column), column.width);
        line += &match column.align {
            Left if line.is_empty() => format!("{text:<width$}"),
            Left => format!("   {text:<width$}"),
            Right => format!(" {text:>width$}"),
        };
    }
    line
}

fn server(state: ServerState) -> &'static str {
    match state {
        ServerState::None => "none",
        ServerState::Unreachable => "unreachable",
        ServerState::Connected => "connected",
        ServerState::LeftAlone => "left alone",
    }
}

fn pool_and_faults(vm: &Figures<'_>) -> String {
    let faults = vm.failed_flushes.iter().map(|disk| format!("   FLUSHES OF {disk} FAIL (see -v)"));
    std::iter::once(vm.pool_at.unwrap_or("-").to_owned()).chain(faults).collect()
}

fn percent(share: Option<f64>) -> String {
    share.map_or("-".into(), |share| format!("{:.1}", share * 100.0))
}

fn micros(us: Option<f64>) -> String {
    us.map_or("-".into(), |us| format!("{us:.0}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_stand_below_their_headings() {
        let vm = Figures {
            name: "web",
            cache_bytes: Some(4 << 20),
            used_bytes: 1 << 20,
            server: ServerState::LeftAlone,
            reads: 1234,
            hit_ratio: Some(0.756),
            cache_read_us: Some(80.4),
            disk_read_us: None,
            writes: 5,
            evicted: 10,
            known_ratio: Some(1.0),
            pool_at: Some("tcp:h:1"),
            failed_flushes: vec!["a"],
        };
        let wanted = [
            "VM               CACHE      USED   SERVER        READS   HIT%  CACHE us   DISK us   WRITES  EVICTED  KNOWN%   POOL AT",
            "web                 4M        1M   left alone     1234   75.6        80         -        5       10   100.0   \
             tcp:h:1   FLUSHES OF a FAIL (see -v)",
        ];
        assert_eq!([heading(), line(&vm)], wanted);
        let off = Figures { cache_bytes: None, pool_at: None, failed_flushes: Vec::new(), ..vm };
        assert!(line(&off).starts_with("web                off ") && line(&off).ends_with("   -"), "{}", line(&off));
    }
}
