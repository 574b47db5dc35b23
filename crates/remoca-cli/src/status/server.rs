//! `remoca status --server`: the memory server of this host, and what each of its clients has and does.

use super::table::View;
use crate::runtime::explain_unreachable;
use crate::serve;
use crate::size::show_size;
use anyhow::{Context, Result, bail};
use remoca_io::control::{connect_within, read_all};
use remoca_protocol::shown;
use remoca_server::{Backing, MappedStatus, PoolStatus, Status};
use remoca_view::figures::each_second;
use remoca_view::text::{rate, show_seconds, show_time, size_of_rate};
use std::io::{ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Control socket of the packaged unit.
const CONTROL: &str = "/run/remoca-serve/control";
const PATIENCE: Duration = Duration::from_secs(10);
/// Largest answer that is read, in bytes. A pool takes some hundreds, and a server has 65,536 clients at most.
const ANSWER_BYTES_MAX: usize = 64 << 20;
const PAGE_BYTES: u64 = 4096;

/// Returns the control socket of this host's memory server: the one that is `given`, that of the configuration in `folder`, or
/// that of the unit.
///
/// # Errors
/// If the configuration is asked, and has a mistake.
pub fn control(given: Option<&Path>, folder: &Path) -> Result<PathBuf> {
    let configured = || Ok(serve::configured_control(folder)?.unwrap_or_else(|| CONTROL.into()));
    given.map_or_else(configured, |given| Ok(given.into()))
}

/// Returns the status of the memory server whose control socket is at `socket`.
///
/// # Errors
/// If no memory server answers there.
pub fn ask(socket: &Path) -> Result<Status> {
    let text = match answer(socket, &[], PATIENCE) {
        Err(error) if error.kind() == ErrorKind::NotFound => bail!(
            "no memory server answers at {}: one that its unit did not start needs --control PATH, and is found by \
             `remoca status --server=PATH`",
            socket.display()
        ),
        Err(error) => {
            let hint = "is `remoca serve` running with this --control?";
            return Err(explain_unreachable(socket, error, "no memory server answers", hint));
        }
        Ok(text) => text,
    };
    shown::from_json(&text).with_context(|| format!("this is no memory server: {}", socket.display()))
}

/// Sends a `line` to the memory server that listens at `socket`, and returns all that it answers.
///
/// # Errors
/// If nobody listens there, or takes the connection and answers within `patience` (`WouldBlock`), or the answer has no end.
pub fn answer(socket: &Path, line: &[u8], patience: Duration) -> std::io::Result<Vec<u8>> {
    let give_up_at = Instant::now() + patience;
    let mut stream = connect_within(socket, patience)?;
    stream.write_all(line)?;
    read_all(&stream, ANSWER_BYTES_MAX, give_up_at, UnixStream::set_read_timeout).map_err(|error| match error.kind() {
        ErrorKind::TimedOut => ErrorKind::WouldBlock.into(),
        _ => error,
    })
}

/// Prints the status. The figures of a client that `before` has are those since then. How long ago that was is told beside it: the age
/// that the server tells is in whole seconds, too coarse for rates.
pub fn show(
    out: &mut impl Write,
    now: &Status,
    before: Option<(&Status, Duration)>,
    view: View,
) -> std::io::Result<()> {
    let before = before.filter(|(before, _)| before.server_id == now.server_id);
    let seconds = before.map_or(Duration::from_secs(now.uptime_s), |(_, passed)| passed).as_secs_f64();
    let before = before.map(|(before, _)| before);
    let (time, period) = match (view, before) {
        (View::Totals, _) => (String::new(), "totals since its start".to_owned()),
        (View::Rates { now_s }, None) => (show_time(now_s) + "  ", "per second since its start".to_owned()),
        (View::Rates { now_s }, Some(_)) => {
            (show_time(now_s) + "  ", format!("per second in the last {}", show_seconds(seconds)))
        }
    };
    writeln!(out, "{time}{}; {period}", memory(now))?;
    writeln!(
        out,
        "{:<24} {:>8}  {:<4} {:>6} {:>6} {:>9} {:>6} {:>9} {:>6} {:>8}",
        "CLIENT", "POOL", "HERE", "SIZE", "USED", "GETS", "", "PUTS", "", "MISSING"
    )?;
    for pool in &now.pools {
        let earlier = before.and_then(|before| before.pools.iter().find(|earlier| earlier.token == pool.token));
        let here = if pool.connected { "yes" } else { "no" };
        let (size, used) = (bytes(u64::from(pool.npages)), bytes(used_pages(pool)));
        let name = format!("{:<24} {:>8}  {here:<4} {size:>6} {used:>6}", pool.peer, pool.token);
        match &pool.mapped {
            Some(mapped) => writeln!(out, "{name} {}", mapped_text(mapped))?,
            None => writeln!(out, "{name} {}", Traffic::of_pool(pool, earlier).text(view, seconds))?,
        }
    }
    let used = now.pools.iter().map(used_pages).fold(0, u64::saturating_add);
    let given = now.pages.saturating_sub(now.pages_free);
    let name = format!("{:<24} {:>8}  {:<4} {:>6} {:>6}", "TOTAL", "", "", bytes(given.into()), bytes(used));
    writeln!(out, "{name} {}", Traffic::of_all(now, before).text(view, seconds))
}

/// Returns the pages of a pool that hold something, or of a mapped one those that have memory.
fn used_pages(pool: &PoolStatus) -> u64 {
    pool.mapped.map_or(pool.pages_written, |mapped| mapped.resident_pages)
}

/// Returns what stands in place of the traffic of a mapped pool, which does not pass the server.
fn mapped_text(mapped: &MappedStatus) -> String {
    if mapped.held {
        return "mapped, held by a write that does not end: end the client's process".into();
    }
    let kept = if mapped.kept { "outlives the server" } else { "ends with the server" };
    format!("mapped, at most {}, {kept}", bytes(mapped.limit_pages.into()))
}

/// Returns what the server has, and who uses it.
fn memory(status: &Status) -> String {
    let Status { version, pages, pages_free, quota_pages, pools, .. } = status;
    let locked = if status.locked { "locked" } else { "not locked" };
    let huge = if status.backing == Backing::HugeTlb { ", in huge pages" } else { "" };
    let [all, free, quota] = [*pages, *pages_free, *quota_pages].map(|pages| bytes(pages.into()));
    let here = pools.iter().filter(|pool| pool.connected).count();
    let connected = match here {
        1 => "1 client is connected".to_owned(),
        here => format!("{here} clients are connected"),
    };
    let up = show_seconds(Duration::from_secs(status.uptime_s).as_secs_f64());
    let kept = match pools.len() - here {
        0 => String::new(),
        gone => format!(", pools of {gone} more are kept until they come back or --grace ends"),
    };
    format!(
        "memory server (version {version}, up {up}): {all} {locked}{huge}, {free} free, at most {quota} for one client; {connected}{kept}"
    )
}

/// Pages that a server sent, received, and did not have.
struct Traffic {
    gets: u64,
    puts: u64,
    missing: u64,
}

impl Traffic {
    fn of_pool(now: &PoolStatus, before: Option<&PoolStatus>) -> Self {
        let since = |count: fn(&PoolStatus) -> u64| count(now).saturating_sub(before.map_or(0, count));
        Self { gets: since(|pool| pool.gets), puts: since(|pool| pool.sends), missing: since(|pool| pool.not_found) }
    }

    fn of_all(now: &Status, before: Option<&Status>) -> Self {
        let since = |count: fn(&Status) -> u64| count(now).saturating_sub(before.map_or(0, count));
        Self {
            gets: since(|status| status.totals.gets),
            puts: since(|status| status.totals.sends),
            missing: since(|status| status.totals.not_found),
        }
    }

    fn text(&self, view: View, seconds: f64) -> String {
        let part = |pages: u64| match view {
            View::Totals => format!("{pages:>9} {:>6}", bytes(pages)),
            View::Rates { .. } => {
                let size = size_of_rate(each_second(pages.saturating_mul(PAGE_BYTES), seconds));
                format!("{:>9} {size:>6}", rate(each_second(pages, seconds)))
            }
        };
        let missing = match view {
            View::Totals => self.missing.to_string(),
            View::Rates { .. } => rate(each_second(self.missing, seconds)),
        };
        format!("{} {} {missing:>8}", part(self.gets), part(self.puts))
    }
}

fn bytes(pages: u64) -> String {
    show_size(pages.saturating_mul(PAGE_BYTES))
}

#[cfg(test)]
mod tests {
    use super::*;
    use remoca_io::socket::listen_as_hung;
    use serde_json::json;
    use std::os::unix::net::UnixListener;

    fn status(uptime_s: u64, gets: u64) -> Status {
        let pool = json!({"token": "0a1b2c3d", "peer": "10.0.0.7:4000", "connected": true, "npages": 1024, "pages_written": 256,
            "gets": gets, "not_found": 1, "sends": 512});
        let totals = json!({"gets": gets, "not_found": 1, "sends": 512, "moves": 0, "resizes_refused": 0, "sessions": 1,
            "fenced": 0, "expired": 0});
        let status = json!({"server_id": "1", "version": "0.1.0", "uptime_s": uptime_s, "backing": "ordinary", "locked": true,
            "pages": 2048, "pages_free": 1024, "pages_to_give_back": 0, "quota_pages": 2048, "totals": totals, "pools": [pool]});
        serde_json::from_value(status).unwrap()
    }

    fn shown(now: &Status, before: Option<(&Status, Duration)>, view: View) -> String {
        let mut out = Vec::new();
        show(&mut out, now, before, view).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn the_unit_makes_the_socket_that_is_asked() {
        let unit = include_str!("../../../../packaging/remoca-serve.service");
        // Where a server makes its socket that is told nothing else.
        assert_eq!(CONTROL, "/run/remoca-serve/control");
        assert!(unit.contains("\nRuntimeDirectory=remoca-serve\n") && !unit.contains("--control"), "{unit}");
    }

    #[test]
    fn a_server_that_hangs_is_waited_for_no_longer_than_one_that_is_slow() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("control");
        let _hung = listen_as_hung(&socket).unwrap();
        let silent = answer(&socket, b"x\n", Duration::from_millis(20)).unwrap_err();
        assert_eq!(silent.kind(), ErrorKind::TimedOut);
    }

    /// Its socket is where another user says that it is.
    #[test]
    fn a_server_that_drips_and_one_that_commands_the_terminal_get_nowhere() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("control");
        let listener = UnixListener::bind(&socket).unwrap();
        let mut lies = status(1, 0);
        lies.pools[0].peer = "\u{1b}[2J".into();
        let lies = serde_json::to_vec(&lies).unwrap();
        let server = std::thread::spawn(move || {
            listener.accept().unwrap().0.write_all(&lies).unwrap();
            let mut stream = listener.accept().unwrap().0;
            while stream.write_all(b" ").is_ok() {
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        assert_eq!(ask(&socket).unwrap().pools[0].peer, "\u{fffd}[2J");
        let silent = answer(&socket, &[], Duration::from_millis(50)).unwrap_err();
        assert_eq!(silent.kind(), ErrorKind::WouldBlock);
        server.join().unwrap();
    }

    #[test]
    fn totals_and_rates() {
        let wanted = "\
memory server (version 0.1.0, up 100s): 8M locked, 4M free, at most 8M for one client; 1 client is connected; totals since its start
CLIENT                       POOL  HERE   SIZE   USED      GETS             PUTS         MISSING
10.0.0.7:4000            0a1b2c3d  yes      4M     1M      2000   7.8M       512     2M        1
TOTAL                                       4M     1M      2000   7.8M       512     2M        1
";
        assert_eq!(shown(&status(100, 2000), None, View::Totals), wanted);
        let earlier = (&status(100, 2000), Duration::from_secs(2));
        let rates = shown(&status(102, 2256), Some(earlier), View::Rates { now_s: 61 });
        assert!(
            rates.starts_with("00:01:01Z  memory server ") && rates.contains("; per second in the last 2.0s\n"),
            "{rates}"
        );
        assert!(rates.ends_with("128   512K         0     0B        0\n"), "{rates}");
        // The server's age in whole seconds is the same after 0.9 s, and two more after 1.1 s.
        for (uptime_s, ms) in [(100, 900), (102, 1100)] {
            let earlier = (&status(100, 2000), Duration::from_millis(ms));
            let rates = shown(&status(uptime_s, 2000 + ms), Some(earlier), View::Rates { now_s: 61 });
            assert!(rates.ends_with("1000   3.9M         0     0B        0\n"), "{rates}");
        }
        let mut mapped = status(1, 0);
        let of_pool = MappedStatus { resident_pages: 1000, limit_pages: 2048, kept: true, held: false };
        mapped.pools[0].mapped = Some(of_pool);
        let wanted = "4M   3.9M mapped, at most 8M, outlives the server\n";
        assert!(shown(&mapped, None, View::Totals).contains(wanted), "{}", shown(&mapped, None, View::Totals));
        mapped.pools[0].mapped = Some(MappedStatus { held: true, ..of_pool });
        assert!(shown(&mapped, None, View::Totals).contains("end the client's process\n"));
        let mut lies = status(1, u64::MAX);
        (lies.pages_free, lies.pools[0].pages_written) = (u32::MAX, u64::MAX);
        lies.pools.push(lies.pools[0].clone());
        for view in [View::Totals, View::Rates { now_s: 61 }] {
            assert!(shown(&lies, None, view).contains("\nTOTAL "), "what no server has is no reason to panic");
        }
        let mut gone = status(1, 0);
        gone.pools[0].connected = false;
        assert!(shown(&gone, None, View::Totals).contains("0 clients are connected, pools of 1 more are kept until"));
    }
}
