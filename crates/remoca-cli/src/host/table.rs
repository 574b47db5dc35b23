//! The report of the host's daemon as text.

use crate::size::show_size;
use remoca_protocol::host::{HostGuests, HostReport, HostVm};
use remoca_view::host::decision_text;
use remoca_view::text::{one_line, percent, show_seconds, tenths};
use std::fmt::Write;
use std::time::Duration;

const NAME_WIDTH_MIN: usize = 10;

/// Returns a line for each VM, and what holds for all of them.
pub fn text(report: &HostReport) -> String {
    let width = report.vms.iter().map(|vm| line_of(&vm.name).chars().count()).fold(NAME_WIDTH_MIN, usize::max);
    let mut text = format!(
        "{:<width$} {:>7} {:>7} {:>7} {:>7} {:>6} {:>6} {:>5} {:>9}   {}\n",
        "VM", "HAS", "GETS", "WEIGHT", "FLOOR", "MISS%", "THEN%", "+-", "SAVED", "WHY"
    );
    report.vms.iter().for_each(|vm| line(&mut text, vm, width));
    let sizes = [report.counted_bytes, report.total_bytes, report.unit_bytes].map(show_size);
    let [counted, total, unit] = &sizes;
    add(
        &mut text,
        format_args!(
            "\n{counted} of {total} are in use ({}), in units of {unit}; policy {}.\n",
            report.resource, report.policy
        ),
    );
    if let (Some(mean), Some(saved)) = (report.geometric_mean, report.saved_ms_per_s) {
        let (expected, saved) = (tenths((1. - mean) * 100.), tenths(saved));
        add(
            &mut text,
            format_args!(
                "Expected of the sizes under GETS: miss ratios lower by {expected:.1} % (geometric mean), reads shorter by\n"
            ),
        );
        add(&mut text, format_args!("{saved:.1} ms in each second.\n"));
    }
    let mode = if report.applies { "" } else { " Sizes are only shown, not changed (--apply)." };
    add(&mut text, format_args!("{}.{mode}\n", capital(&report.state)));
    if let Some(guests) = &report.guests {
        add_guests(&mut text, report, guests, width);
    }
    text
}

/// Returns the line that says of an old report that it is one; nothing of another. `now_s` is in seconds since 1970.
pub fn age(report: &HostReport, now_s: u64) -> String {
    report.overdue_s(now_s).map_or_else(String::new, |age_s| {
        let age = show_seconds(Duration::from_secs(age_s).as_secs_f64());
        format!("\nThis is {age} old: the daemon hangs. `systemctl restart remoca-host` ends that.\n")
    })
}

/// Adds a line for each guest, and what holds for all of them.
fn add_guests(text: &mut String, report: &HostReport, guests: &HostGuests, width: usize) {
    add(
        text,
        format_args!(
            "\n{:<width$} {:>7} {:>7} {:>7} {:>7} {:>7}   {}\n",
            "GUEST", "HOME", "HAS", "LENT", "COULD", "LEAST", "WHY"
        ),
    );
    for vm in &report.vms {
        let Some(guest) = &vm.guest else { continue };
        let size = |bytes: Option<u64>| bytes.map_or("-".into(), show_size);
        let could = Some(guest.could_lend_bytes).filter(|_| guest.state == "usable");
        let least = guest.home_bytes.map(|_| guest.minimum_bytes);
        let (home, has) = (size(guest.home_bytes), size(guest.guest_bytes));
        let (lent, could, least) = (show_size(guest.lent_bytes), size(could), size(least));
        let why = match guest.state.as_str() {
            "advised" => format!("not asked for memory: {}", guest.why),
            _ => guest.why.clone(),
        };
        let (name, why) = (line_of(&vm.name), line_of(&why));
        add(text, format_args!("{name:<width$} {home:>7} {has:>7} {lent:>7} {could:>7} {least:>7}   {why}\n"));
    }
    let (lent, reserve) = (show_size(guests.lent_bytes), show_size(guests.reserve_bytes));
    add(
        text,
        format_args!(
            "\nGuests have lent {lent}, which is divided as well; {reserve} of the total are the reserve for guests that are short of memory.\n"
        ),
    );
    let mode = if report.applies { "" } else { " Nothing is moved (--apply)." };
    add(text, format_args!("{}.{mode}\n", capital(&guests.state)));
}

fn line(text: &mut String, vm: &HostVm, width: usize) {
    let error = vm.miss_ratio_error.map_or("-".into(), |error| format!("{:.1}", error * 100.));
    let saved = vm.saved_ms_per_s.map_or("-".into(), |ms| format!("{:.1} ms/s", tenths(ms)));
    let gets = if vm.target_bytes == vm.has_bytes { "=".into() } else { show_size(vm.target_bytes) };
    let (by_weight, floor) = (show_size(vm.baseline_bytes), show_size(vm.floor_bytes));
    add(
        text,
        format_args!(
            "{:<width$} {:>7} {gets:>7} {by_weight:>7} {floor:>7} {:>6} {:>6} {error:>5} {saved:>9}   {}\n",
            line_of(&vm.name),
            show_size(vm.has_bytes),
            percent(vm.miss_ratio),
            percent(vm.miss_ratio_then),
            line_of(&vm.why)
        ),
    );
}

/// Returns a line for each guest that has memory to lend, after all was given back, and the number of those that lack some. Of those whose
/// VM process does not run, the ones count for which `is_meant` holds.
pub fn given_back(report: &HostReport, is_meant: impl Fn(&str) -> bool) -> (String, usize) {
    let absent = report.guests.iter().flat_map(|guests| &guests.absent).filter(|name| is_meant(name));
    let names = report.vms.iter().map(|vm| &vm.name).chain(absent.clone());
    let width = names.map(|name| line_of(name).chars().count()).fold(NAME_WIDTH_MIN, usize::max);
    let mut text = format!("{:<width$} {:>7} {:>7} {:>7}   {}\n", "VM", "TIER", "GUEST", "OF", "NOTE");
    let mut lacking = 0;
    for vm in &report.vms {
        let Some((guest, home)) = vm.guest.as_ref().and_then(|guest| Some((guest, guest.home_bytes?))) else {
            continue;
        };
        let has = guest.guest_bytes.unwrap_or_default();
        let is_usable = guest.state == "usable";
        let is_lacking = guest.taken_bytes > 0 || (has < home && !is_usable);
        lacking += usize::from(is_lacking);
        let note = match is_lacking {
            true if !is_usable => guest.why.as_str(),
            true => "tiers did not shrink enough: `remoca host log` says why",
            false if has < home => "it lends nothing: somebody else has made it smaller, as `virsh setmem` does",
            false => "it has all of its memory",
        };
        let (tier, home) = (show_size(vm.has_bytes), show_size(home));
        let has = guest.guest_bytes.map_or("-".into(), show_size);
        let (name, note) = (line_of(&vm.name), line_of(note));
        add(&mut text, format_args!("{name:<width$} {tier:>7} {has:>7} {home:>7}   {note}\n"));
    }
    for name in absent {
        lacking += 1;
        let note = "its VM process does not run: start it, and repeat the command";
        let name = line_of(name);
        add(&mut text, format_args!("{name:<width$} {0:>7} {0:>7} {0:>7}   {note}\n", "-"));
    }
    match text.lines().count() {
        1 => ("No guest is known to have lent memory.\n".into(), 0),
        _ => (text, lacking),
    }
}

/// Returns a line for each decision, the newest last.
pub fn log(report: &HostReport) -> String {
    let mut text = String::new();
    for decision in &report.decisions {
        add(&mut text, format_args!("{}\n", decision_text(decision)));
    }
    if text.is_empty() { "Nothing was decided yet.\n".into() } else { text }
}

fn add(text: &mut String, more: std::fmt::Arguments<'_>) {
    // Nothing fails in memory.
    let _ = text.write_fmt(more);
}

/// Returns all of a text in one line: the name of a file may have line breaks, and so may what another process says.
fn line_of(text: &str) -> String {
    one_line(text, usize::MAX)
}

/// Returns the text in one line, with a capital letter at its start.
fn capital(text: &str) -> String {
    let text = line_of(text);
    let mut characters = text.chars();
    characters.next().map(|first| first.to_uppercase().chain(characters).collect()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use remoca_protocol::host::{HostDecision, HostGuest};

    #[test]
    fn what_was_given_back_is_told_for_each_guest() {
        let vm = |name: &str, state: &str, has: Option<u64>, taken_bytes: u64| HostVm {
            name: name.into(),
            has_bytes: 2 << 20,
            guest: Some(HostGuest {
                state: state.into(),
                home_bytes: Some(4 << 30),
                guest_bytes: has,
                taken_bytes,
                why: "its reason".into(),
                ..HostGuest::default()
            }),
            ..HostVm::default()
        };
        let vms = vec![
            vm("whole", "usable", Some(4 << 30), 0),
            vm("silent", "silent", None, 1 << 30),
            vm("slow", "stuck", Some(3 << 30), 0),
            vm("stays", "usable", Some(3 << 30), 1 << 30),
            vm("shrunk", "usable", Some(3 << 30), 0),
            HostVm { name: "other".into(), ..HostVm::default() },
        ];
        let (text, lacking) = given_back(&HostReport { vms, ..HostReport::default() }, |_| true);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lacking, 3);
        assert_eq!(lines[1], "whole           2M      4G      4G   it has all of its memory");
        assert_eq!(lines[2], "silent          2M       -      4G   its reason");
        assert!(lines[3].ends_with("its reason") && lines[4].contains("did not shrink enough"), "{text}");
        assert!(lines[5].contains("somebody else") && lines.len() == 6, "{text}");
        assert_eq!(given_back(&HostReport::default(), |_| true).1, 0);
        let absent = vec!["gone".to_owned(), "stopped".to_owned()];
        let guests = Some(HostGuests { absent, ..HostGuests::default() });
        let (text, lacking) = given_back(&HostReport { guests, ..HostReport::default() }, |name| name == "stopped");
        let lines: Vec<_> = text.lines().skip(1).collect();
        assert_eq!(lacking, 1);
        let note = "its VM process does not run: start it, and repeat the command";
        assert_eq!(lines, [format!("stopped          -       -       -   {note}")]);
    }

    #[test]
    fn a_name_with_a_line_break_has_one_row() {
        let guest = HostGuest { home_bytes: Some(1), why: "c\nd".into(), ..HostGuest::default() };
        let vm = |name: &str| HostVm {
            name: name.into(),
            why: "a\nb".into(),
            guest: Some(guest.clone()),
            ..HostVm::default()
        };
        let guests = Some(HostGuests { absent: vec!["gone\n".into()], ..HostGuests::default() });
        let report = HostReport { vms: vec![vm("ev\n"), vm("e\nv")], guests, ..HostReport::default() };
        let (shown, (given, _)) = (text(&report), given_back(&report, |_| true));
        let rows = |text: &str, name: &str, why: &str| {
            text.lines().filter(|line| line.starts_with(&format!("{name:<11}")) && line.ends_with(why)).count()
        };
        for name in ["ev", "e v"] {
            assert_eq!((rows(&shown, name, "   a b"), rows(&shown, name, "   c d")), (1, 1), "{shown}");
            assert_eq!(rows(&given, name, "   c d"), 1, "{given}");
        }
        assert!(given.lines().count() == 4 && rows(&given, "gone", "repeat the command") == 1, "{given}");
    }

    #[test]
    fn an_old_report_is_said_to_be_one() {
        let report = HostReport { at_s: 1000, interval_ms: Some(10_000), ..HostReport::default() };
        assert_eq!(age(&report, 1030), "");
        assert!(age(&report, 1400).contains("This is 6.7m old: the daemon hangs."));
    }

    #[test]
    fn a_report_explains_itself() {
        let vm = HostVm {
            name: "web1".into(),
            has_bytes: 2 << 30,
            target_bytes: 3 << 30,
            baseline_bytes: 2 << 30,
            floor_bytes: 1 << 30,
            miss_ratio: Some(0.5),
            miss_ratio_then: Some(0.25),
            miss_ratio_error: Some(0.01),
            saved_ms_per_s: Some(41.),
            why: "it gains".into(),
            ..HostVm::default()
        };
        let keeps = HostVm {
            name: "web2".into(),
            has_bytes: 1 << 20,
            target_bytes: 1 << 20,
            why: "no".into(),
            ..HostVm::default()
        };
        let decision = HostDecision {
            vm: Some("web1".into()),
            from_bytes: 1 << 20,
            to_bytes: 2 << 20,
            why: "it gains".into(),
            outcome: "set".into(),
            ..HostDecision::default()
        };
        let report = HostReport {
            total_bytes: 4 << 30,
            unit_bytes: 2 << 20,
            counted_bytes: 3 << 30,
            resource: "local tier".into(),
            policy: "optimal".into(),
            state: "gives memory to web1".into(),
            geometric_mean: Some(0.8),
            saved_ms_per_s: Some(41.),
            vms: vec![vm, keeps],
            decisions: vec![decision],
            ..HostReport::default()
        };
        let shown = text(&report);
        for words in [
            "VM             HAS    GETS  WEIGHT   FLOOR  MISS%  THEN%    +-     SAVED   WHY\n",
            "web1            2G      3G      2G      1G   50.0   25.0   1.0 41.0 ms/s   it gains\n",
            "web2            1M       =      0B      0B      -      -     -         -   no\n",
            "3G of 4G are in use (local tier), in units of 2M; policy optimal.\n",
            "lower by 20.0 % (geometric mean)",
            "Gives memory to web1. Sizes are only shown, not changed (--apply).\n",
        ] {
            assert!(shown.contains(words), "`{words}` is missing in:\n{shown}");
        }
        let nothing = text(&HostReport { saved_ms_per_s: Some(-0.04), ..report.clone() });
        assert!(nothing.contains("\n0.0 ms in each second"), "{nothing}");
        let mut nothing = report.clone();
        nothing.vms[0].saved_ms_per_s = Some(-0.04);
        assert!(text(&nothing).contains("  0.0 ms/s   it gains\n"), "{}", text(&nothing));
        let guest = HostGuest {
            state: "usable".into(),
            home_bytes: Some(4 << 30),
            guest_bytes: Some(4 << 30),
            could_lend_bytes: 1536 << 20,
            minimum_bytes: 2 << 30,
            why: "it could lend 1.5G".into(),
            ..HostGuest::default()
        };
        let advised = HostGuest { state: "advised".into(), why: "it has no monitor".into(), ..HostGuest::default() };
        let mut with_guests = report.clone();
        (with_guests.vms[0].guest, with_guests.vms[1].guest) = (Some(guest), Some(advised));
        let state = "a round would take it".into();
        with_guests.guests = Some(HostGuests { reserve_bytes: 256 << 20, state, ..HostGuests::default() });
        let shown = text(&with_guests);
        for words in [
            "GUEST         HOME     HAS    LENT   COULD   LEAST   WHY\n",
            "web1            4G      4G      0B    1.5G      2G   it could lend 1.5G\n",
            "web2             -       -      0B       -       -   not asked for memory: it has no monitor\n",
            "256M of the total are the reserve",
            "A round would take it. Nothing is moved (--apply).\n",
        ] {
            assert!(shown.contains(words), "`{words}` is missing in:\n{shown}");
        }
        assert_eq!(log(&report), "1970-01-01T00:00:00Z web1: 1M -> 2M: it gains: set\n");
        assert_eq!(log(&HostReport::default()), "Nothing was decided yet.\n");
    }
}
