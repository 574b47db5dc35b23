//! `remoca curve`: what a cache of each size would do for a VM, from its miss-ratio curve.

use crate::form::Form;
use crate::output::output;
use crate::runtime;
use crate::size::show_size;
use anyhow::{Result, bail};
use clap::Args;
use remoca_io::control;
use remoca_protocol::control::{Command, CurveStatus, Reply, Status};
use remoca_view::curve::{Figures, SERVER_US, Shown, chart};
use remoca_view::figures::{Agent, counter};
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;

/// Show what a cache of each size would do for a VM, whether or not it has one.
#[derive(Args, Debug)]
pub struct CurveArgs {
    /// Name of the VM process, or the path of its control socket
    #[arg(value_name = "NAME")]
    name: String,

    /// Only this disk, as if the whole cache were for it
    #[arg(long, value_name = "DISK")]
    disk: Option<String>,

    /// Time that a read of the memory server takes, where none was measured yet, in milliseconds [default: 0.2]
    #[arg(long, value_name = "MS", value_parser = milliseconds)]
    server_latency: Option<f64>,

    /// Output format
    #[arg(short, long, value_enum, default_value_t = Form::Table)]
    output: Form,
}

/// Runs the subcommand.
///
/// # Errors
/// If the VM process does not answer, or has no such curve.
pub fn run(args: &CurveArgs) -> Result<()> {
    let socket = runtime::socket_named(&args.name)?;
    let curve = ask(&socket, &args.name, args.disk.clone())?;
    let figures = Figures::of(&curve, args.server_latency.map(|ms| ms * 1000.0), SERVER_US);
    let text = match args.output {
        Form::Json => format!("{}\n", serde_json::to_string_pretty(&Shown { curve: &curve, figures: &figures })?),
        Form::Table => text(&curve, &figures, says_unheard(&socket))?,
    };
    Ok(output().write_all(text.as_bytes())?)
}

/// Asks the VM process behind `socket`, which the operator calls `name`.
fn ask(socket: &Path, name: &str, disk: Option<String>) -> Result<CurveStatus> {
    let reply = control::call(socket, Command::Curve { disk, grid: None })
        .map_err(|error| runtime::no_answer(socket, error))?;
    match reply {
        Reply::Curve(curve) => Ok(*curve),
        Reply::Status(_) => bail!("the process answers with something else than a curve"),
        Reply::Error { error } if error.starts_with("this is no command") => {
            bail!("the process is of an older version, without curves: `remoca upgrade {name}` brings it to this one")
        }
        Reply::Error { error } => bail!("{error}"),
    }
}

/// Returns whether the process says that it waits for an agent that it never heard of. One that says nothing by now has told its curve
/// all the same.
fn says_unheard(socket: &Path) -> bool {
    runtime::ask(socket, Command::Status).is_ok_and(|status| is_unheard(&status))
}

/// Returns whether the process waits for an agent that it never heard of.
fn is_unheard(status: &Status) -> bool {
    Agent::of(status.port.as_ref()) == Agent::NotHeard && counter(status, "evictions_reported") == 0
}

/// Returns chart, table and notes. `is_unheard` says whether the process waits for an agent that it never heard of.
fn text(curve: &CurveStatus, figures: &Figures, is_unheard: bool) -> Result<String> {
    let mut text = chart::draw(curve, figures);
    writeln!(text, "\n{:>8}{:>9}{:>8}{:>14}{:>20}", "CACHE", "HITS %", "+-", "READ, MEAN", "BLOCKS SAVED / S")?;
    for row in figures.table() {
        let read = row.read_us.map_or("-".into(), |us| format!("{:.2} ms", us / 1000.0));
        let saved = row.blocks_saved_per_s.map_or("-".into(), remoca_view::text::rate);
        let error = format!("{:.1}", row.standard_error * 100.0);
        let mark = if row.is_present { "  <- has now" } else { "" };
        let size = show_size(row.bytes);
        writeln!(text, "{size:>8}{:>9.1}{error:>8}{read:>14}{saved:>20}{mark}", row.hit_ratio * 100.0)?;
    }
    notes(&mut text, curve, figures, is_unheard)?;
    Ok(text)
}

fn notes(text: &mut String, curve: &CurveStatus, figures: &Figures, is_unheard: bool) -> Result<()> {
    let share = match curve.followed_share {
        1.0.. => "All of them are followed".into(),
        share @ 0.5.. => format!("{:.0} % of them are followed", (share * 100.0).floor()),
        share => format!("One of {:.0} is followed", 1.0 / share),
    };
    writeln!(text, "\nFrom {:.0} blocks read; older reads count less. {share}.", curve.blocks_read)?;
    writeln!(
        text,
        "{}",
        match curve.learns_from.as_str() {
            "reads" =>
                "No evictions are seen, so this is a cache into which reads are admitted.\n\
                 With an agent in the guest it would hold other blocks, and hit more.",
            "frames" => "Evictions are seen in guest memory that reads overwrite, without an agent.",
            _ if is_unheard =>
                "No agent has reported yet, so no evictions are seen, and the curve says too\n\
                 little. It becomes that of a cache into which reads are admitted, once the\n\
                 guest has read as much as its memory holds.",
            _ => "Evictions are those that the agent reports.",
        }
    )?;
    let forecast = match &curve.forecast {
        None => "No forecast was compared with what came yet: that takes three windows.".into(),
        Some(forecast) if figures.is_as_before => format!(
            "Shown is the last window alone: as a forecast it was off by {:.1} points, the\ncurve by {:.1} (mean of {} windows, all sizes).",
            forecast.as_before_error * 100.0,
            forecast.curve_error * 100.0,
            forecast.windows
        ),
        Some(forecast) => format!(
            "As a forecast of the next window the curve was off by {:.1} points, the last\nwindow alone by {:.1} (mean of {} windows, all sizes).",
            forecast.curve_error * 100.0,
            forecast.as_before_error * 100.0,
            forecast.windows
        ),
    };
    writeln!(text, "{forecast}")?;
    let disk = curve.disk_read_us.map_or("not measured yet".into(), |us| format!("{:.2} ms", us / 1000.0));
    let assumed = if figures.server_is_assumed { ", assumed, not\nmeasured (--server-latency)" } else { "" };
    writeln!(text, "Disk: {disk}. Memory server: {:.2} ms{assumed}.", figures.server_us / 1000.0)?;
    if curve.disk.is_none() && curve.disks.len() > 1 {
        writeln!(text, "Disks with a curve of their own (--disk): {}.", curve.disks.join(", "))?;
    }
    Ok(())
}

fn milliseconds(text: &str) -> Result<f64, String> {
    let error = || format!("`{text}` is not a number of milliseconds above 0 and up to 60000, such as 0.2");
    text.parse().ok().filter(|ms: &f64| *ms > 0.0 && *ms <= 60_000.0).ok_or_else(error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use remoca_protocol::control::ForecastStatus;
    use remoca_view::testing::{curve, full_status};
    use std::io::{BufRead, BufReader};
    use std::os::unix::net::UnixListener;

    fn shown(curve: &CurveStatus) -> String {
        text(curve, &Figures::of(curve, None, SERVER_US), false).unwrap()
    }

    #[test]
    fn the_curve_of_a_process_that_ends_meanwhile_is_shown() {
        let socket = std::env::temp_dir().join(format!("remoca-curve-{}.ctl", std::process::id()));
        let _ = std::fs::remove_file(&socket);
        let listener = UnixListener::bind(&socket).unwrap();
        let process = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            BufReader::new(&stream).read_line(&mut String::new()).unwrap();
            drop(listener);
            stream.write_all(&serde_json::to_vec(&Reply::Curve(Box::new(curve()))).unwrap()).unwrap();
        });
        let name = socket.to_str().unwrap().to_owned();
        let shown = run(&CurveArgs { name, disk: None, server_latency: None, output: Form::Table });
        process.join().unwrap();
        std::fs::remove_file(&socket).unwrap();
        shown.unwrap();
    }

    #[test]
    fn evictions_are_not_said_to_come_from_an_agent_that_never_reported() {
        let (curve, mut status) = (curve(), full_status(1, 100));
        let figures = Figures::of(&curve, None, SERVER_US);
        let shown = |status: &Status| text(&curve, &figures, is_unheard(status)).unwrap();
        assert!(shown(&status).contains("Evictions are those that the agent reports."));
        status.port.as_mut().unwrap().agent_heard_s_ago = None;
        assert!(shown(&status).contains("that the agent reports"), "they were, before the guest attached again");
        status.counters.insert("evictions_reported".into(), 0);
        let unheard = shown(&status);
        assert!(unheard.contains("No agent has reported yet") && !unheard.contains("the agent reports"), "{unheard}");
        assert!(unheard.lines().all(|line| line.len() <= 80), "{unheard}");
    }

    #[test]
    fn a_curve_fits_80_columns_and_says_where_it_comes_from() {
        let mut curve = curve();
        let all = shown(&curve);
        assert!(all.is_ascii() && all.lines().all(|line| line.len() <= 80), "{all}");
        for words in [
            "     64M     37.5     1.0       4.45 ms                  38\n",
            "     64G    100.0     1.0       0.20 ms                 100\n",
            "From 12345 blocks read; older reads count less. One of 100 is followed.",
            "the curve was off by 2.0 points, the last\nwindow alone by 3.0 (mean of 5 windows",
            "Disk: 7.00 ms. Memory server: 0.20 ms, assumed, not\nmeasured",
            "(--disk): root, data.",
        ] {
            assert!(all.contains(words), "`{words}` is missing in:\n{all}");
        }
        for (share, says) in [
            (1.0, "All of them are"),
            (0.999, "99 % of them are"),
            (0.76, "76 % of them are"),
            (0.5, "50 % of them are"),
        ] {
            curve.followed_share = share;
            assert!(shown(&curve).contains(&format!("less. {says} followed.")), "{share}");
        }
        curve.forecast = Some(ForecastStatus { windows: 5, curve_error: 0.03, as_before_error: 0.02 });
        curve.cache_bytes = 512 << 20;
        (curve.server_read_us, curve.disk_read_us, curve.learns_from) = (Some(250.0), None, "reads".into());
        let all = shown(&curve);
        assert!(all.lines().all(|line| line.len() <= 80), "{all}");
        for words in [
            "    512M     50.0     1.0             -                  50  <- has now\n",
            "Shown is the last window alone: as a forecast it was off by 2.0 points",
            "into which reads are admitted",
            "Disk: not measured yet. Memory server: 0.25 ms.",
        ] {
            assert!(all.contains(words), "`{words}` is missing in:\n{all}");
        }
        curve.points.clear();
        shown(&curve);
    }

    #[test]
    fn the_command_that_upgrades_an_older_process_works_as_it_stands() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("s");
        let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let older = std::thread::spawn(move || {
            let mut stream = listener.accept().unwrap().0;
            stream.write_all(b"{\"error\":\"this is no command: curve\"}\n").unwrap();
            stream
        });
        let refused = ask(&socket, "web1", None).unwrap_err().to_string();
        assert!(refused.contains("`remoca upgrade web1` brings it"), "{refused}");
        drop(older.join().unwrap());
    }

    #[test]
    fn a_latency_is_a_positive_number_of_at_most_a_minute() {
        assert_eq!((milliseconds("0.25"), milliseconds("60000")), (Ok(0.25), Ok(60_000.0)));
        for wrong in ["0", "-1", "inf", "NaN", "2ms", "", "1e300", "60001"] {
            let error = milliseconds(wrong).unwrap_err();
            assert!(error.contains("above 0 and up to 60000"), "{wrong}: {error}");
        }
    }
}
