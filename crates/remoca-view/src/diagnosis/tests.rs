//! Each fault comes first, with its cause.

use super::*;
use crate::snapshot::{Answer, Taker};
use crate::testing::{full_status, snapshot};
use remoca_protocol::control::{KnownServerStatus, MigrationStatus, NormalLatency, PoolStatus, TOO_MANY_CLIENTS};
use serde_json::json;

/// Returns the problems of one VM with a change.
fn problems(change: impl Fn(&mut Status)) -> Vec<Problem> {
    let mut status = full_status(1, 100);
    change(&mut status);
    of_status(&status)
}

#[track_caller]
fn expect_first(cause: &str, words: &[&str], change: impl Fn(&mut Status)) {
    let problems = problems(change);
    let first = problems.first().unwrap_or_else(|| panic!("{cause} is not seen"));
    let text = first.to_string();
    assert_eq!(first.cause, cause, "{problems:#?}");
    words.iter().for_each(|word| assert!(text.contains(word), "`{word}` is missing in: {text}"));
}

fn set(status: &mut Status, counter: &str, value: u64) {
    status.counters.insert(counter.into(), value);
}

/// Adds a local tier whose pool is in this state.
fn add_local_tier(status: &mut Status, state: &str) {
    (status.cache.local_wanted_bytes, status.cache.local_granted_bytes) = (1 << 20, 1 << 20);
    let (server, pool) = (&status.servers[0], &status.pools[0]);
    let (endpoint, error) = ("local:/s".to_owned(), Some("refused".to_owned()));
    let server = KnownServerStatus { endpoint: endpoint.clone(), is_local_tier: true, error, ..server.clone() };
    let pool = PoolStatus { server: endpoint, is_local_tier: true, state: state.into(), ..pool.clone() };
    status.servers.push(server);
    status.pools.push(pool);
}

/// A cache of the local tier alone has one server, which is named once.
#[test]
fn a_local_tier_that_is_all_of_the_cache_is_named_once() {
    let alone = problems(|status| {
        add_local_tier(status, "connected");
        status.servers.retain(|server| server.is_local_tier);
        status.servers[0].in_use = false;
        status.pools.clear();
        let server = status.server.as_mut().expect("a server");
        (server.endpoint, server.connected) = ("local:/s".into(), false);
    });
    assert_eq!(alone.iter().map(|problem| problem.cause.as_str()).collect::<Vec<_>>(), ["server-unreachable"]);
}

#[test]
fn nothing_is_wrong_with_a_vm_that_is_well() {
    assert_eq!(problems(|_| {}), []);
}

#[test]
fn each_fault_is_named_first() {
    expect_first("slow-server", &["server tcp:donor1:7070 or tcp:donor2:7070: slow", "52 ms", "7.00 ms"], |status| {
        status.server.as_mut().expect("a server").breaker = "open".into();
        status.hedging.server = Some(NormalLatency { p50_us: 52_000.0, p99_us: 80_000.0 });
        set(status, "hedges_won", 5000);
    });
    expect_first("lying-server", &["it lies: 12 pages", "The guest got none of them"], |status| {
        set(status, "fetch_wrong", 12);
        status.server.as_mut().expect("a server").breaker = "open".into();
    });
    expect_first(
        "full-server",
        &["full: 512M of the 2G wanted", "tcp:donor1:7070 has at most 8G", "--cache 512M"],
        |status| {
            status.cache.granted_bytes = 512 << 20;
        },
    );
    // After `remoca take-back` more --memory is no cure.
    expect_first(
        "full-server",
        &["limited: 128M of the 512M wanted for the local tier", "`remoca take-back POOL SIZE` raises", "--local 128M"],
        |status| {
            status.cache.local_wanted_bytes = 512 << 20;
            status.cache.local_granted_bytes = 128 << 20;
            let server = status.servers.first_mut().expect("a server");
            (server.is_local_tier, server.in_use) = (true, true);
        },
    );
    expect_first("full-server", &["server tcp:donor1:7070 or tcp:donor2:7070: full: 512M"], |status| {
        status.cache.granted_bytes = 512 << 20;
        add_local_tier(status, "connected");
    });
    expect_first(
        "server-away",
        &["server local:/s: away", "cannot grow: refused", "systemctl status remoca-serve"],
        |status| {
            add_local_tier(status, "away");
        },
    );
    expect_first("server-away", &["server local:/s: there is no local tier: refused"], |status| {
        add_local_tier(status, "connected");
        status.pools.retain(|pool| !pool.is_local_tier);
        status.servers.iter_mut().for_each(|server| server.in_use = !server.is_local_tier);
    });
    expect_first(
        "slow-disk",
        &["slow: a read of /var/lib/libvirt/images/web1.img takes 180 ms", "until now"],
        |status| {
            status.hedging.disk = Some(NormalLatency { p50_us: 180_000.0, p99_us: 900_000.0 });
        },
    );
    expect_first("agent-gone", &["agent: last heard 95 s ago", "systemctl status remoca-agent"], |status| {
        status.port.as_mut().expect("a port").agent_heard_s_ago = Some(95);
    });
    expect_first("agent-gone", &["not heard since the guest attached"], |status| {
        status.port.as_mut().expect("a port").agent_heard_s_ago = None;
    });
    expect_first("failed-flush", &["failed", "remoca set web001 --clear-failed-flush root"], |status| {
        status.disks[0].failed_flush = Some("EIO".into());
        set(status, "disk_errors", 1);
        set(status, "fetch_wrong", 12);
    });
    expect_first("disk-unreachable", &["its server cannot be reached. The guest waits until"], |status| {
        status.disks[0].store = "waiting".into();
    });
    expect_first("disk-unreachable", &["web1.img: the NBD server cannot be used: no flush. The guest"], |status| {
        status.disks[0].store = "waiting".into();
        status.disks[0].store_error = Some("the NBD server cannot be used: no flush".into());
    });
    let words = ["failed 3 requests", "except for reads that a memory server answered", "-u remoca-disk@web001` names"];
    expect_first("disk-errors", &words, |status| {
        set(status, "disk_errors", 3);
    });
    expect_first("memory-not-shared", &["guest memory", "paused"], |status| status.memory.guest_bytes = 0);
    expect_first("disk-errors", &["failed 1 request in the"], |status| {
        set(status, "disk_errors", 1);
    });
    expect_first("lying-server", &["it lies: 1 page was not"], |status| set(status, "fetch_wrong", 1));
    expect_first("foreign-writer", &["another program wrote", ", 1 time in the"], |status| {
        set(status, "foreign_writes", 1)
    });
    expect_first("server-unreachable", &["not connected: no route", "remoca check web001"], |status| {
        let server = status.server.as_mut().expect("a server");
        (server.connected, server.error) = (false, Some("no route".into()));
    });
    let full = format!("the memory server refused this session: {TOO_MANY_CLIENTS}");
    expect_first("server-unreachable", &[&format!("{full}. Reads"), "larger --max-clients"], |status| {
        let server = status.server.as_mut().expect("a server");
        (server.connected, server.error) = (false, Some(full.clone()));
    });
    expect_first("server-unreachable", &["this session: Busy. Reads", "larger --max-clients"], |status| {
        let server = status.server.as_mut().expect("a server");
        (server.connected, server.error) = (false, Some("the memory server refused this session: Busy".into()));
    });
    expect_first("server-unreachable", &["Is it there? Reads go to the disk"], |status| {
        let server = status.server.as_mut().expect("a server");
        (server.connected, server.error) = (false, Some("Is it there?".into()));
    });
    expect_first("server-unreachable", &["no answer yet. Reads beyond the local tier go to the disk"], |status| {
        status.server.as_mut().expect("a server").connected = false;
        add_local_tier(status, "connected");
    });
    // It said once what it had.
    expect_first(
        "server-unreachable",
        &["server tcp:donor2:7070: not connected: no route. The others", "1G of the 2G"],
        |status| {
            status.cache.granted_bytes = 1 << 30;
            (status.servers[1].in_use, status.servers[1].error) = (false, Some("no route".into()));
        },
    );
    expect_first(
        "spare-server-unreachable",
        &["tcp:donor2:7070: not connected: no route. The others", "all of the 2G"],
        |status| {
            (status.servers[1].in_use, status.servers[1].error) = (false, Some("no route".into()));
        },
    );
    expect_first("fast-disk", &["no faster than the disk (0.09 ms)"], |status| {
        status.server.as_mut().expect("a server").breaker = "open".into();
        status.hedging.disk = Some(NormalLatency { p50_us: 90.0, p99_us: 200.0 });
        status.latency.read_from_disk.p50_us = 90.0;
    });
    expect_first("slow-server", &["its answers do not come in time", "the disk answers all reads"], |status| {
        status.server.as_mut().expect("a server").breaker = "open".into();
        status.hedging.server = Some(NormalLatency { p50_us: 200.0, p99_us: 900.0 });
        status.hedging.disk = Some(NormalLatency { p50_us: 7_000.0, p99_us: 9_000.0 });
        status.latency.read_from_disk.p50_us = 7_000.0;
    });
    expect_first("agent-loses-pages", &["no room for 90000 of 100000 evicted pages", "--ring"], |status| {
        let port = status.port.as_mut().expect("a port");
        let agent = json!({"captured": 10_000, "lost": 90_000, "sampled_out": 0, "written": 0, "cookie": 0});
        port.agent = Some(serde_json::from_value(agent).expect("statistics"));
    });
    expect_first("unknown-content", &["dm-crypt"], |status| {
        let evicted = status.counters["evictions_reported"];
        set(status, "evictions_unmatched", evicted - evicted / 20);
    });
    expect_first("old-version", &["runs version 0.0.1", "remoca upgrade web001"], |status| {
        status.version = "0.0.1".into()
    });
    expect_first("old-version", &["has been replaced or removed since", "remoca upgrade web001"], |status| {
        status.is_replaced = true
    });
    expect_first("configuration", &["a mistake"], |status| status.notice = Some("a mistake".into()));
    expect_first("state-lost", &["state file: no room. Make room there"], |status| {
        status.state_lost = Some("no room".into());
    });
    expect_first("guest-too-large", &["guest-memory-max"], |status| status.memory.guest_bytes = 64 << 30);
}

/// The second of two that are dead is as dead as the first.
#[test]
fn each_server_that_cannot_be_reached_is_named() {
    let named = |cause: &str, change: &dyn Fn(&mut Status)| {
        let problems = problems(|status| {
            for server in &mut status.servers {
                (server.in_use, server.error) = (false, Some("no route".into()));
            }
            let own = KnownServerStatus {
                endpoint: "tcp:donor3:7070".into(),
                in_use: true,
                error: None,
                ..status.servers[0].clone()
            };
            status.servers.push(own);
            change(status);
        });
        assert!(problems.iter().all(|problem| problem.cause == cause), "{problems:#?}");
        problems.into_iter().map(|problem| problem.finding.what).collect::<Vec<_>>()
    };
    let dead = ["server tcp:donor1:7070", "server tcp:donor2:7070"];
    assert_eq!(named("spare-server-unreachable", &|_| {}), dead);
    assert_eq!(named("server-unreachable", &|status| status.cache.granted_bytes = 0), dead);
    let none = named("server-unreachable", &|status| {
        status.cache.granted_bytes = 0;
        status.server.as_mut().expect("a server").connected = false;
    });
    assert_eq!(none, dead);
    assert!(named("", &|status| status.cache.enabled = false).is_empty());
}

#[test]
fn an_agent_that_counts_more_than_there_can_be_is_no_reason_to_panic() {
    let words = "no room for 18446744073709551615 of 18446744073709551615 evicted pages";
    expect_first("agent-loses-pages", &[words], |status| {
        let agent = json!({"captured": u64::MAX, "lost": u64::MAX, "sampled_out": 0, "written": 0, "cookie": 0});
        let port = status.port.as_mut().expect("a port");
        port.agent = Some(serde_json::from_value(agent).expect("statistics"));
    });
}

/// Who copies a command from an advice has it done: sizes are those that commands take, and the VM is named.
#[test]
fn commands_in_advice_work_as_they_stand() {
    expect_first("full-server", &["full: 1.5G of the 2G", "`remoca set web001 --cache 1536M`"], |status| {
        status.cache.granted_bytes = 1536 << 20;
    });
    expect_first("full-server", &["1.2G of the 2G wanted for the local tier", "--local 1260M`"], |status| {
        add_local_tier(status, "connected");
        (status.cache.local_wanted_bytes, status.cache.local_granted_bytes) = (2 << 30, 1260 << 20);
    });
    let nothing = problems(|status| status.cache.granted_bytes = 0);
    let text = nothing[0].to_string();
    assert!(nothing[0].cause == "full-server" && !text.contains("want less"), "`--cache 0` is refused: {text}");
    expect_first("lying-server", &["`remoca set web001 --server`"], |status| set(status, "fetch_wrong", 12));
    expect_first("slow-server", &["`remoca check web001` measures the way"], |status| {
        status.server.as_mut().expect("a server").breaker = "open".into();
        status.hedging.server = Some(NormalLatency { p50_us: 52_000.0, p99_us: 80_000.0 });
    });
    expect_first("guest-too-large", &["`remoca upgrade web001`"], |status| status.memory.guest_bytes = 64 << 30);
    expect_first("disks-elsewhere", &["`systemctl disable --now remoca-disk@web001`"], |status| {
        status.migration = Some(MigrationStatus { has_disks: false, incoming: None, peer: None, news: None });
        (status.server, status.servers, status.pools) = (None, Vec::new(), Vec::new());
    });
    expect_first("fast-disk", &["`remoca set web001 --off`"], |status| {
        status.server.as_mut().expect("a server").breaker = "open".into();
        status.hedging.disk = Some(NormalLatency { p50_us: 90.0, p99_us: 200.0 });
        status.latency.read_from_disk.p50_us = 90.0;
    });
}

/// Who took a liar out of the list has no other server to take out.
#[test]
fn the_server_that_lied_is_named_and_no_other() {
    let of = |lies: [u64; 2]| {
        let problems = problems(|status| {
            set(status, "fetch_wrong", 4);
            status.servers.iter_mut().zip(lies).for_each(|(server, lies)| server.lies = Some(lies));
        });
        assert_eq!(problems.len(), 1, "{problems:#?}");
        problems[0].to_string()
    };
    let second = of([0, 4]);
    assert!(second.contains("server tcp:donor2:7070: it lies: 4 pages") && !second.contains("donor1"), "{second}");
    let gone = of([0, 0]);
    assert!(gone.contains("server: one that is no longer in the list lied: 4 pages"), "{gone}");
    assert!(!gone.contains("donor") && !gone.contains("--server"), "{gone}");
}

/// A server that granted nothing is asked for no page.
#[test]
fn a_server_with_a_pool_of_no_size_is_not_said_to_be_no_faster() {
    expect_first("fast-disk", &["server tcp:donor2:7070: no faster"], |status| {
        status.server.as_mut().expect("a server").breaker = "open".into();
        status.hedging.disk = Some(NormalLatency { p50_us: 90.0, p99_us: 200.0 });
        status.latency.read_from_disk.p50_us = 90.0;
        status.pools[0].granted_bytes = 0;
    });
}

/// Without hedging a server is left alone only if it is silent, however fast the disk is.
#[test]
fn the_cache_is_not_said_to_gain_little_where_it_is_wanted_to_spare_the_disk() {
    expect_first("slow-server", &["its answers do not come in time"], |status| {
        status.server.as_mut().expect("a server").breaker = "open".into();
        status.hedging.is_off = true;
        status.hedging.disk = Some(NormalLatency { p50_us: 90.0, p99_us: 200.0 });
        status.latency.read_from_disk.p50_us = 90.0;
    });
}

/// Nothing asks a server whose VM does not read, so nobody knows whether it is still slow.
#[test]
fn a_server_that_was_slow_before_its_vm_became_idle_is_not_named() {
    let idle = |ns: f64| {
        problems(|status| {
            status.server.as_mut().expect("a server").breaker = "open".into();
            status.hedging.server = Some(NormalLatency { p50_us: 200.0, p99_us: 900.0 });
            status.hedging.disk = Some(NormalLatency { p50_us: ns, p99_us: ns });
            for counter in ["reads", "hedges_won", "misaligned_reads"] {
                set(status, counter, 0);
            }
        })
    };
    assert_eq!((idle(7_000.0), idle(90.0)), (vec![], vec![]));
}

#[test]
fn a_disk_that_was_slow_before_nobody_read_from_it_is_not_named() {
    let quiet = problems(|status| {
        status.hedging.disk = Some(NormalLatency { p50_us: 180_000.0, p99_us: 900_000.0 });
        status.latency.read_from_disk.count = 0;
    });
    assert_eq!(quiet, []);
}

#[test]
fn a_cache_that_is_off_needs_no_server() {
    let off = problems(|status| {
        status.cache.enabled = false;
        status.cache.granted_bytes = 0;
        status.server.as_mut().expect("a server").connected = false;
    });
    assert_eq!(off, []);
    let off = problems(|status| {
        status.cache.enabled = false;
        add_local_tier(status, "away");
    });
    assert_eq!(off, []);
    let none = problems(|status| (status.server, status.servers) = (None, Vec::new()));
    assert_eq!(none[0].cause, "no-server");
}

/// It leaves its servers when it hands its disks over, or until they come, and has an index that knows no guest.
#[test]
fn a_vm_whose_disks_are_elsewhere_is_not_told_to_name_a_server_nor_to_raise_the_memory_of_its_guest() {
    let elsewhere = problems(|status| {
        status.migration = Some(MigrationStatus { has_disks: false, incoming: None, peer: None, news: None });
        (status.server, status.servers, status.pools) = (None, Vec::new(), Vec::new());
        (status.memory.guest_bytes, status.memory.guest_bytes_indexed) = (64 << 20, 64 << 10);
    });
    assert_eq!(elsewhere.iter().map(|problem| problem.cause.as_str()).collect::<Vec<_>>(), ["disks-elsewhere"]);
}

/// It refuses an upgrade.
#[test]
fn a_process_without_its_disks_is_not_told_to_be_upgraded() {
    for (has_disks, advice) in [(true, "`remoca upgrade web000`"), (false, "so it cannot be upgraded")] {
        let mut status = full_status(0, 1);
        status.is_replaced = true;
        status.migration = Some(MigrationStatus { has_disks, incoming: None, peer: None, news: None });
        let finding = process(&status).to_string();
        assert!(finding.contains("replaced or removed") && finding.contains(advice), "{finding}");
    }
}

#[test]
fn one_server_that_is_away_is_one_problem_of_many_vms() {
    let lost = |number| {
        let mut status = full_status(number, 3);
        let server = status.server.as_mut().expect("a server");
        (server.connected, server.error) = (false, Some("refused".into()));
        Ok(status)
    };
    let mut ill = full_status(9, 3);
    ill.disks[0].failed_flush = Some("EIO".into());
    let problems = snapshot(vec![lost(1), lost(2), lost(3), Ok(ill), Err("hung")]).problems;
    let causes: Vec<_> = problems.iter().map(|problem| (problem.cause.as_str(), problem.whose())).collect();
    let wanted = [("process-hangs", "hung"), ("failed-flush", "web009"), ("server-unreachable", "web001 and 2 more")];
    assert_eq!(causes, wanted.map(|(cause, whose)| (cause, whose.to_owned())));
}

/// After a package was upgraded, or while a host has no CPU time, they are hundreds.
#[test]
fn what_is_found_alike_of_many_vms_is_one_problem() {
    let old = |number| Ok(Status { version: "0.0.1".into(), ..full_status(number, 3) });
    let older = Ok(Status { version: "0.0.0".into(), ..full_status(3, 3) });
    let problems = snapshot(vec![old(1), old(2), older, Err("hung"), Err("hung2"), Err("e")]).problems;
    let texts: Vec<_> = problems.iter().map(ToString::to_string).collect();
    assert_eq!(texts.len(), 3, "{texts:#?}");
    assert!(texts[0].starts_with("failed   e and 2 more: process: it has not answered for 1 s"), "{}", texts[0]);
    assert!(texts[0].ends_with("`systemctl restart remoca-disk@NAME`"), "{}", texts[0]);
    assert!(texts[1].starts_with("warning  web001 and 1 more: ") && texts[1].contains("`remoca upgrade NAME`"));
    // One that is alone with it has a command that works as it stands.
    assert!(texts[2].starts_with("warning  web003: ") && texts[2].contains("`remoca upgrade web003`"), "{}", texts[2]);
    assert_eq!(problems[0].vms, ["e", "hung", "hung2"]);
}

#[test]
fn a_process_that_is_gone_is_told_with_what_to_do() {
    let answer =
        Answer { socket: "/run/remoca/a.ctl".into(), status: Err(Silence::Gone("nobody answers".into())), curve: None };
    let problems = Taker::default().next(vec![answer], 0.0, None).problems;
    let text = problems[0].to_string();
    assert!(text.starts_with("failed   a: process: ") && text.contains("systemctl status remoca-disk@a"), "{text}");
}

#[test]
fn what_to_do_about_a_process_that_was_not_asked_is_what_helps() {
    type Kind = fn(String) -> Silence;
    let kinds: [(Kind, &str); 4] = [
        (Silence::Denied, "Run this as root"),
        (Silence::Busy, "Try again. If that does not help, which programs keep connections to /s/a.ctl open?"),
        (Silence::Failed, "`systemctl restart remoca-disk@a`"),
        (Silence::Unasked, "`ulimit -n`"),
    ];
    for (kind, words) in kinds {
        let answer = Answer { socket: "/s/a.ctl".into(), status: Err(kind("why".into())), curve: None };
        let text = Taker::default().next(vec![answer], 0.0, None).problems[0].to_string();
        assert!(text.starts_with("warning  a: process: why. ") && text.contains(words), "{text}");
    }
}

/// Nobody has a unit whose name is a label.
#[test]
fn a_process_that_is_gone_is_called_what_its_unit_is_called() {
    let answer = |socket: &str, silence| Answer { socket: socket.into(), status: Err(silence), curve: None };
    let gone = answer("/a/web1.ctl", Silence::Gone("nobody answers".into()));
    let hangs = answer("/b/web1.ctl", Silence::Hangs("it hangs".into()));
    let problems = Taker::default().next(vec![gone, hangs], 0.0, None).problems;
    let texts: Vec<_> = problems.iter().map(ToString::to_string).collect();
    assert!(texts[0].starts_with("failed   web1 (/a/web1.ctl): process: "), "{texts:?}");
    for words in ["`systemctl status remoca-disk@web1`", "`remoca forget web1 --control /a/web1.ctl`"] {
        assert!(texts[0].contains(words), "{texts:?}");
    }
    assert!(texts[1].contains("`systemctl restart remoca-disk@web1`"), "{texts:?}");
}
