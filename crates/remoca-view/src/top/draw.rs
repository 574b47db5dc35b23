//! Draws the screen. Pure: from the state into a buffer.

use super::app::App;
use crate::columns::{self, COLUMNS, Row as VmRow};
use crate::curve::{self, chart};
use crate::details;
use crate::diagnosis::Problem;
use crate::finding::Level;
use crate::host;
use crate::snapshot::Snapshot;
use crate::text::{milliseconds, show_time};
use crate::vm::Vm;
use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::{Block, Borders, Cell, Paragraph, Row, Sparkline, Table, TableState, Wrap};
use remoca_io::show::show_size;

const KEYS: &str = "q quit  up/down select  Enter details  left/right sort  r reverse  PgUp/PgDn scroll";
/// Width of the words before a problem.
const INDENT: usize = 9;
const NAME_WIDTH_MIN: usize = 12;
const LAST_WIDTH_MIN: u16 = 20;
/// Columns in the order in which they get room where there is little.
const FIRST: [&str; COLUMNS.len()] = [
    "hits", "saved", "cache", "server", "disk_us", "hit_us", "reads", "double", "agent", "writes", "from", "used",
    "evicted",
];

/// Returns the height that shows everything but details in this width.
#[must_use]
pub fn height(app: &App, width: u16) -> u16 {
    let Some(snapshot) = app.snapshot.as_deref() else { return 1 };
    let problems = problem_lines(snapshot, width, usize::MAX).len();
    let rows = snapshot.vms.len().max(1) + usize::from(columns::total(snapshot).is_some());
    let report = usize::from(snapshot.host_report.is_some());
    u16::try_from(2 + problems + report + rows).unwrap_or(u16::MAX)
}

/// Draws the screen. With `shows_all` every problem is shown, and no key.
pub fn draw(frame: &mut Frame<'_>, app: &App, shows_all: bool) {
    let area = frame.area();
    let Some(snapshot) = app.snapshot.as_deref() else {
        let text = app.error.as_deref().unwrap_or("Asking the VM processes of this host ...");
        return frame.render_widget(Paragraph::new(text).wrap(Wrap { trim: false }), area);
    };
    // The VMs have the other half.
    let lines_max = if shows_all { usize::MAX } else { usize::from(area.height / 2).max(2) };
    let problems = problem_lines(snapshot, area.width, lines_max);
    let problems_height = u16::try_from(problems.len()).unwrap_or(u16::MAX);
    let details = if app.has_details && !shows_all { Constraint::Percentage(60) } else { Constraint::Length(0) };
    let report = snapshot.host_report.as_ref().map(|report| Line::raw(format!("memory   {}", host::text(report))));
    let [title, wrong, divided, table, below, keys] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(problems_height),
        Constraint::Length(u16::from(report.is_some())),
        Constraint::Min(2),
        details,
        Constraint::Length(u16::from(!shows_all)),
    ])
    .areas(area);
    frame.render_widget(title_line(app, snapshot), title);
    frame.render_widget(Paragraph::new(problems), wrong);
    report.into_iter().for_each(|report| frame.render_widget(report, divided));
    draw_table(frame, table, app, snapshot, shows_all);
    if let Some(vm) = app.vm().filter(|_| app.has_details) {
        draw_details(frame, below, vm, app.scroll);
    }
    frame.render_widget(Paragraph::new(KEYS).style(Style::new().fg(Color::DarkGray)), keys);
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a time since 1970")]
fn title_line(app: &App, snapshot: &Snapshot) -> Line<'static> {
    let (answering, all) = (snapshot.statuses().count(), snapshot.vms.len());
    let time = show_time(snapshot.taken_s as u64);
    let text = format!(
        "remoca {}   snapshot {} of {time}   {answering} of {all} VMs answer",
        snapshot.host, snapshot.snapshot
    );
    let mut line = Line::default();
    // First, so that the narrowest screen shows it.
    if let Some(error) = &app.error {
        line.push_span(Span::styled(format!("old: {error}   "), style(Level::Failed)));
    }
    line.push_span(Span::styled(text, Style::new().add_modifier(Modifier::BOLD)));
    let first = snapshot.statuses().filter(|shown| shown.recent.is_none()).count();
    if first > 0 {
        line.push_span(Span::raw(format!("   figures of {first} are since their start")));
    }
    line
}

fn style(level: Level) -> Style {
    match level {
        Level::Ok => Style::new().fg(Color::Green),
        Level::Warning => Style::new().fg(Color::Yellow),
        Level::Failed => Style::new().fg(Color::Red).add_modifier(Modifier::BOLD),
    }
}

/// Returns the lines of the first problems: what is wrong, and what to do. At most `lines_max` of them, each at most as wide as `width`.
fn problem_lines(snapshot: &Snapshot, width: u16, lines_max: usize) -> Vec<Line<'static>> {
    let problems = &snapshot.problems;
    if snapshot.vms.is_empty() && problems.is_empty() {
        return vec![Line::raw("No VM process runs here: start one with `remoca disk`.")];
    }
    if problems.is_empty() {
        let text = format!("nothing is wrong with the VMs of this host: {}", snapshot.vms.len());
        return vec![Line::from(vec![Span::styled("ok       ", style(Level::Ok)), Span::raw(text)])];
    }
    let mut lines: Vec<Line<'static>> = Vec::new();
    for (number, problem) in problems.iter().enumerate() {
        let own = lines_of(problem, usize::from(width).saturating_sub(INDENT).max(20));
        let is_last = number + 1 == problems.len();
        // The first problem is shown as far as possible.
        if number > 0 && lines.len() + own.len() + usize::from(!is_last) > lines_max {
            lines.push(Line::raw(format!("{:INDENT$}{} more: `remoca check`", "", problems.len() - number)));
            break;
        }
        lines.extend(own);
    }
    lines.truncate(lines_max);
    lines
}

fn lines_of(problem: &Problem, width: usize) -> Vec<Line<'static>> {
    let level = problem.finding.level;
    let found = wrapped(&format!("{}: {}", problem.whose(), problem.found()), width);
    let words = std::iter::once(level.word()).chain(std::iter::repeat(""));
    let found = found
        .into_iter()
        .zip(words)
        .map(|(text, word)| Line::from(vec![Span::styled(format!("{word:INDENT$}"), style(level)), Span::raw(text)]));
    let advice = wrapped(problem.finding.advice.as_deref().unwrap_or_default(), width);
    let faint = Style::new().fg(Color::DarkGray);
    found.chain(advice.into_iter().map(|text| Line::styled(format!("{:INDENT$}{text}", ""), faint))).collect()
}

/// Returns a text in lines that are at most `width` wide, and end between words where no word is wider.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if shown_width(line.as_str()) + 1 + shown_width(word) <= width => *line += &format!(" {word}"),
            _ => lines.extend(pieces(word, width)),
        }
    }
    lines
}

/// Returns a word in pieces that are at most `width` wide.
fn pieces(word: &str, width: usize) -> Vec<String> {
    let (mut pieces, mut piece, mut used) = (Vec::new(), String::new(), 0);
    for character in word.chars() {
        let own = shown_width(character.encode_utf8(&mut [0; 4]));
        if used + own > width {
            pieces.push(std::mem::take(&mut piece));
            used = 0;
        }
        piece.push(character);
        used += own;
    }
    pieces.push(piece);
    pieces
}

/// Returns the number of columns that a text takes: a wide character takes two.
fn shown_width(text: &str) -> usize {
    Span::raw(text).width()
}

fn draw_table(frame: &mut Frame<'_>, area: Rect, app: &App, snapshot: &Snapshot, shows_all: bool) {
    let rows = app.rows();
    let total = columns::total(snapshot);
    let (shown, widths) = fitting(&rows, total.as_ref(), area.width);
    let heading = |column: Option<usize>| {
        let is_order = app.order.column == column && !shows_all;
        let style =
            Style::new().add_modifier(if is_order { Modifier::BOLD | Modifier::UNDERLINED } else { Modifier::BOLD });
        let text = column.map_or("VM", |column| COLUMNS[column].heading);
        Cell::new(aligned(text, column.is_some_and(|column| COLUMNS[column].is_number))).style(style)
    };
    let headings = std::iter::once(None).chain(shown.iter().copied().map(Some));
    let headings = Row::new(headings.map(heading).collect::<Vec<_>>());
    let line = |row: &VmRow| {
        let name =
            Cell::new(row.name.clone()).style(if row.level == Level::Ok { Style::new() } else { style(row.level) });
        let cell = |column: &usize| Cell::new(aligned(&row.cells[*column].text, COLUMNS[*column].is_number));
        Row::new(std::iter::once(name).chain(shown.iter().map(cell)).collect::<Vec<_>>())
    };
    let footer = total.as_ref().map(|total| line(total).style(Style::new().add_modifier(Modifier::BOLD)));
    let mut table = Table::new(rows.iter().map(line), widths).header(headings).column_spacing(1);
    if let Some(footer) = footer {
        table = table.footer(footer);
    }
    if shows_all {
        return frame.render_widget(table, area);
    }
    let table = table.row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    let mut state = TableState::new().with_selected((!rows.is_empty()).then(|| app.place()));
    frame.render_stateful_widget(table, area, &mut state);
}

/// Returns the columns that fit into a width, and the widths of the names and of these: those of their widest texts. The last column of all
/// may be cut.
fn fitting(rows: &[VmRow], total: Option<&VmRow>, width: u16) -> (Vec<usize>, Vec<Constraint>) {
    let all = || rows.iter().chain(total);
    let widest = |texts: &mut dyn Iterator<Item = usize>, least: usize| {
        u16::try_from(texts.fold(least, usize::max)).unwrap_or(u16::MAX)
    };
    let name = widest(&mut all().map(|row| shown_width(&row.name)), NAME_WIDTH_MIN);
    let last = COLUMNS.len() - 1;
    let width_of = |column: usize| match column {
        _ if column == last => LAST_WIDTH_MIN,
        _ => widest(&mut all().map(|row| shown_width(&row.cells[column].text)), COLUMNS[column].heading.len()),
    };
    let mut left = width.saturating_sub(name);
    let mut shown: Vec<usize> = Vec::new();
    for key in FIRST {
        let Some(column) = COLUMNS.iter().position(|column| column.key == key) else { continue };
        let needed = width_of(column).saturating_add(1);
        if needed <= left {
            left -= needed;
            shown.push(column);
        }
    }
    shown.sort_unstable();
    let constraint = |column: &usize| match *column {
        column if column == last => Constraint::Min(LAST_WIDTH_MIN),
        column => Constraint::Length(width_of(column)),
    };
    let widths = std::iter::once(Constraint::Length(name)).chain(shown.iter().map(constraint)).collect();
    (shown, widths)
}

fn aligned(text: &str, is_number: bool) -> Text<'static> {
    Text::from(text.to_owned()).alignment(if is_number { Alignment::Right } else { Alignment::Left })
}

fn draw_details(frame: &mut Frame<'_>, area: Rect, vm: &Vm, scroll: u16) {
    let [left, right] = Layout::horizontal([Constraint::Percentage(50), Constraint::Percentage(50)]).areas(area);
    let mut lines = Vec::new();
    if let Some(silence) = &vm.silence {
        lines.push(Line::styled(silence.text().to_owned(), style(Level::Failed)));
    }
    for detail in vm.status.iter().flat_map(|shown| details::of(&shown.status, None)) {
        let label = Span::styled(format!("{:<11} ", detail.label), Style::new().fg(Color::DarkGray));
        lines.push(Line::from(vec![label, Span::raw(detail.text)]));
    }
    let block = Block::new().borders(Borders::TOP).title(format!(" {} since its start ", vm.name));
    frame.render_widget(Paragraph::new(lines).wrap(Wrap { trim: false }).scroll((scroll, 0)).block(block), left);
    let [hits, times, prospect] =
        Layout::vertical([Constraint::Length(4), Constraint::Length(4), Constraint::Min(5)]).areas(right);
    let percents: Vec<Option<u64>> =
        vm.history.iter().map(|moment| moment.hit_ratio.map(|hits| whole(hits * 100.0))).collect();
    let newest = percents.iter().rev().find_map(|value| *value).map_or("-".into(), |hits| format!("{hits} %"));
    draw_past(frame, hits, &format!(" Hits: {newest} "), percents, Some(100));
    let micros: Vec<Option<u64>> = vm.history.iter().map(|moment| moment.read_us.map(whole)).collect();
    let newest = vm.history.iter().rev().find_map(|moment| moment.read_us).map_or("-".into(), milliseconds);
    draw_past(frame, times, &format!(" Mean time of a read: {newest} "), micros, None);
    let block = Block::new().borders(Borders::TOP).title(" What more or less memory would do ");
    frame.render_widget(Paragraph::new(prospect_text(vm)).block(block), prospect);
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a bar has no more digits")]
fn whole(value: f64) -> u64 {
    value.max(0.0) as u64
}

/// Draws the newest values as bars, the newest at the right end.
fn draw_past(frame: &mut Frame<'_>, area: Rect, title: &str, mut values: Vec<Option<u64>>, most: Option<u64>) {
    let width = usize::from(area.width);
    values.drain(..values.len().saturating_sub(width));
    let block = Block::new().borders(Borders::TOP).title(title.to_owned());
    let bars = Sparkline::default().data(values).block(block).style(Style::new().fg(Color::Cyan));
    frame.render_widget(most.map_or_else(|| bars.clone(), |most| bars.clone().max(most)), area);
}

fn prospect_text(vm: &Vm) -> String {
    let Some(prospect) = &vm.prospect else {
        return "Its miss-ratio curve is not known yet: that takes some reads.".into();
    };
    let mut text = format!("{:>8}{:>8}{:>6}{:>14}\n", "CACHE", "HITS %", "+-", "READ, MEAN");
    for row in &prospect.sizes {
        let read = row.read_us.map_or("-".into(), milliseconds);
        let mark = if row.is_present { "  <- has now" } else { "" };
        let (size, hits, error) = (show_size(row.bytes), row.hit_ratio * 100.0, row.standard_error * 100.0);
        text += &format!("{size:>8}{hits:>8.1}{error:>6.1}{read:>14}{mark}\n");
    }
    if let Some(curve) = &vm.curve {
        text += "\n";
        text += &chart::draw(curve, &curve::Figures::of(curve, None, curve::SERVER_US));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::screen_text;
    use super::*;
    use crate::snapshot::Taker;
    use crate::testing::{full_snapshot, full_status, snapshot};
    use std::sync::Arc;

    fn app(snapshot: Snapshot) -> App {
        let mut app = App::default();
        app.take(Ok(Arc::new(snapshot)));
        app
    }

    #[test]
    fn the_screen_has_a_line_for_each_vm_and_a_total() {
        let app = app(full_snapshot(3));
        let text = screen_text(&app, 160, height(&app, 160), true);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].starts_with("remoca host   snapshot 2 of 22:13:25Z   3 of 3 VMs answer"), "{text}");
        assert!(lines[1].starts_with("ok       nothing is wrong with the VMs of this host: 3"), "{text}");
        let report = "memory   local tier: 3G of 4G given; all sizes are as they should be; last: ";
        assert!(lines[2].starts_with(report) && lines[2].ends_with("web001: 1G -> 2G: it gains: set"), "{text}");
        assert!(lines[3].starts_with("VM           CACHE") && lines[7].starts_with("TOTAL"), "{text}");
        assert!(
            lines[4].starts_with("web000") && lines[4].contains("donor1:7070 512M, donor2:7070 256M, this host 256M"),
            "{text}"
        );
    }

    #[test]
    fn figures_since_the_start_are_said_to_be_such() {
        let title = |snapshot: Snapshot| screen_text(&app(snapshot), 160, 10, true).lines().next().unwrap().to_owned();
        assert!(!title(full_snapshot(2)).contains("since"));
        let new = title(snapshot(vec![Ok(full_status(1, 3)), Err("hung")]));
        assert!(new.ends_with("1 of 2 VMs answer   figures of 1 are since their start"), "{new}");
    }

    #[test]
    fn nothing_is_cut_off_of_what_is_wrong() {
        assert_eq!(wrapped("an image: gone", 9), ["an image:", "gone"]);
        assert_eq!(wrapped("at /var/lib/images: gone", 8), ["at", "/var/lib", "/images:", "gone"]);
        // Each of these takes two columns.
        assert_eq!(wrapped("a \u{78c1}\u{76e4}\u{78c1}\u{76e4} b", 6), ["a", "\u{78c1}\u{76e4}\u{78c1}", "\u{76e4} b"]);
        assert_eq!(wrapped("", 9), [""]);
        let name = "\u{78c1}".repeat(10);
        let app = app(snapshot(vec![Err(name.as_str())]));
        let text = screen_text(&app, 80, height(&app, 80), true);
        assert_eq!(text.lines().last().map(|line| line.matches('\u{78c1}').count()), Some(10), "{text}");
    }

    #[test]
    fn a_screen_that_is_old_says_so_even_if_it_is_narrow() {
        let mut snapshot = full_snapshot(200);
        snapshot.host = "hypervisor17.rack4.example.com".into();
        let mut app = app(snapshot);
        app.take(Err("no page answers".into()));
        assert!(screen_text(&app, 80, 24, false).starts_with("old: no page answers   remoca hypervisor17."));
    }

    #[test]
    fn what_is_wrong_stands_first_even_on_a_small_screen() {
        let mut ill = full_status(1, 3);
        ill.cache.granted_bytes = 512 << 20;
        let mut app = app(snapshot(vec![Ok(ill), Err("hung")]));
        let text = screen_text(&app, 80, 12, false);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[1].starts_with("failed   hung: process: it has not answered for 1 s"), "{text}");
        assert!(lines[2].starts_with("         hangs") || lines[2].starts_with("         Is it stopped"), "{text}");
        assert!(text.contains("         1 more: `remoca check`"), "{text}");
        let all = screen_text(&app, 80, height(&app, 80), true);
        assert!(all.contains("\nwarning  web001: server tcp:donor1:7070 or tcp:donor2:7070: full:"), "{all}");
        assert!(all.contains("\n         wanted are granted; tcp:donor1:7070 has at most 8G"), "{all}");
        assert!(COLUMNS.iter().all(|column| FIRST.contains(&column.key)));
        // A narrow table has fewer columns, each as wide as it needs.
        let small = screen_text(&app, 80, 30, false);
        assert!(small.contains("HIT% HIT us DISK us SAVED READ/s") && !small.contains("MEMORY FROM"), "{small}");
        app.has_details = true;
        for (width, height) in [(1, 1), (20, 5), (80, 24), (200, 60)] {
            let _ = screen_text(&app, width, height, false);
        }
    }

    #[test]
    fn a_host_without_vms_is_said_to_have_none() {
        let app = app(snapshot(Vec::new()));
        for text in [screen_text(&app, 80, height(&app, 80), true), screen_text(&app, 80, 24, false)] {
            assert!(text.contains("\nNo VM process runs here: start one with `remoca disk`."), "{text}");
        }
    }

    #[test]
    fn a_daemon_that_does_not_answer_has_a_line_even_without_vms() {
        let heard = Err("it has not answered for 7 s".into());
        let app = app(Taker::new("host".into()).next(Vec::new(), 0.0, Some(heard)));
        let text = screen_text(&app, 120, height(&app, 120), true);
        let line = "\nwarning  this host: remoca host: it has not answered for 7 s: sizes stay as they are";
        assert!(text.contains(line), "{text}");
    }

    #[test]
    fn details_have_lines_history_and_curve() {
        let mut app = app(full_snapshot(2));
        (app.has_details, app.selected) = (true, Some("web001".into()));
        let text = screen_text(&app, 160, 50, false);
        for words in [
            "web001 since its start",
            "helps",
            "Hits: ",
            "Mean time of a read: ",
            "<- has now",
            "Hits of web1 with a cache",
        ] {
            assert!(text.contains(words), "`{words}` is missing in:\n{text}");
        }
    }
}
