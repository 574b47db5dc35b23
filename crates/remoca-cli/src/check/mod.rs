//! `remoca check`: whether everything that one VM's disks need is as it should be.

mod files;
mod guest;
mod image;
mod limits;
mod reach;

pub(crate) use image::is_replaced;

use crate::config::check::vms;
use crate::disk;
use crate::form::Form;
use crate::output::output;
use crate::runtime;
use crate::settings::Folder;
use crate::size::show_size;
use crate::vm::Vm;
use anyhow::{Result, bail};
use clap::Args;
use remoca_disk::link;
use remoca_io::address::Endpoint;
use remoca_io::control::left;
use remoca_protocol::control::{CacheStatus, KnownServerStatus, Status, TOO_MANY_CLIENTS};
use remoca_view::diagnosis::{self, MORE_CLIENTS, Problem};
use remoca_view::finding::{Finding, Level};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Number of looks, of a second each, at which a process is silent that hangs.
const SILENT_LOOKS: u32 = 6;
/// Causes of problems that the checks of one VM find by themselves.
const FOUND_BY_CHECKS: [&str; 12] = [
    "failed-flush",
    "disk-unreachable",
    "memory-not-shared",
    "server-unreachable",
    "spare-server-unreachable",
    "server-away",
    "full-server",
    "agent-gone",
    "disk-not-attached",
    "configuration",
    "old-version",
    "no-server",
];

/// Check everything that the disks of one VM need, or what is wrong with all VMs of this host, and say what to do about it.
///
/// With NAME it works for a VM process that runs, and for one that is configured: what is wrong now, files of the configuration,
/// image and lock, memory servers, sockets and who may connect, and of a running one also the guest's memory, whether its QEMU
/// reconnects, the agent, and limits. One whose process hangs is checked as one that does not run. Without, it lists what
/// `remoca top` and the page name as wrong, and mistakes in the files of the configuration, the worst first. Nothing is changed.
/// The exit code is 1 if anything has failed, or if VMs are configured and none runs; a host without VMs is no failure.
///
/// As JSON it is a list of objects with `what`, `level` (ok, warning, failed), `found` and `advice`; without NAME only what is wrong,
/// also with `cause` and `vms`.
#[derive(Args, Debug)]
pub struct CheckArgs {
    /// Name of the VM process, or the path of its control socket [default: all that run here]
    #[arg(value_name = "NAME")]
    name: Option<String>,

    /// Output format
    #[arg(short, long, value_enum, default_value_t = Form::Table)]
    output: Form,

    /// The same as `-o json`, of which there was no other form
    #[arg(long, hide = true)]
    json: bool,

    #[command(flatten)]
    folder: Folder,
}

impl CheckArgs {
    fn prints_json(&self) -> bool {
        self.json || self.output == Form::Json
    }
}

/// Runs the subcommand.
///
/// # Errors
/// If there is no such VM, or something has failed.
pub fn run(args: &CheckArgs) -> Result<()> {
    match &args.name {
        Some(name) => of_one(args, name),
        None => of_all(args),
    }
}

/// Lists what is wrong with the VMs of this host.
fn of_all(args: &CheckArgs) -> Result<()> {
    let sockets = runtime::sockets(None)?;
    let snapshot = remoca_view::watch::take_one(&sockets, crate::top::host_socket())?;
    let count = snapshot.vms.len();
    let problems = &files::with_problems(snapshot.problems, &snapshot.vms, &args.folder.config);
    let is_empty = count == 0 && problems.is_empty();
    let mut out = output();
    if args.prints_json() {
        writeln!(out, "{}", serde_json::to_string_pretty(problems)?)?;
    } else if problems.is_empty() && !is_empty {
        writeln!(out, "{:<8} nothing is wrong with the VMs of this host: {count}", Level::Ok.word())?;
    } else {
        problems.iter().try_for_each(|problem| writeln!(out, "{problem}"))?;
    }
    if is_empty {
        return of_none(args);
    }
    match problems.iter().filter(|problem| problem.finding.level == Level::Failed).count() {
        0 => Ok(()),
        1 => bail!("1 thing has failed on this host"),
        failed => bail!("{failed} things have failed on this host"),
    }
}

/// Says that there is no VM on this host.
///
/// # Errors
/// If VMs are configured, or may run where this user cannot look.
fn of_none(args: &CheckArgs) -> Result<()> {
    let configured = vms(&args.folder.config)?;
    if !configured.is_empty() {
        let names = configured.join(", ");
        bail!("no VM process runs here, and these are configured: {names}{}", runtime::elsewhere());
    }
    if !runtime::of_others("check").is_empty() {
        bail!("no VM process runs here: start one with `remoca disk`{}", runtime::elsewhere());
    }
    if args.prints_json() {
        return Ok(());
    }
    Ok(writeln!(output(), "{:<8} there is no VM on this host", Level::Ok.word())?)
}

fn of_one(args: &CheckArgs, name: &str) -> Result<()> {
    let (own_name, findings) = checked(name, &args.folder.config)?;
    let mut out = output();
    if args.prints_json() {
        writeln!(out, "{}", serde_json::to_string_pretty(&findings)?)?;
    } else {
        findings.iter().try_for_each(|finding| writeln!(out, "{finding}"))?;
    }
    match findings.iter().filter(|finding| finding.level == Level::Failed).count() {
        0 => Ok(()),
        count => bail!("{own_name}: {count} of {} checks failed", findings.len()),
    }
}

/// Returns the name of a VM, and what was found of it. One whose process hangs is checked as one that does not run.
fn checked(name: &str, config: &Path) -> Result<(String, Vec<Finding>)> {
    let socket = runtime::socket_named(name)?;
    let Some(hangs) = hanging(&socket)? else {
        let vm = Vm::find(name, config)?;
        let findings = checks(&vm, process(&vm), false, config);
        return Ok((vm.options.name, with_problems(vm.running.iter().flat_map(diagnosis::of_status), findings)));
    };
    let own_name = hangs.whose();
    let findings = match Vm::of_files(&own_name, &socket, config) {
        Ok(Some(vm)) => checks(&vm, hangs.finding, true, config),
        Ok(None) => vec![hangs.finding],
        Err(error) => vec![hangs.finding, files::failed(format!("{error:#}"))],
    };
    Ok((own_name, findings))
}

/// Returns what is wrong with the process behind a socket if it hangs. One that is busy, or is being upgraded, may be silent for seconds.
fn hanging(socket: &PathBuf) -> Result<Option<Problem>> {
    let mut hangs = None;
    for _ in 0..SILENT_LOOKS {
        let seen = remoca_view::watch::take_one(std::slice::from_ref(socket), None)?;
        hangs = seen.problems.into_iter().find(|problem| problem.cause == "process-hangs");
        if hangs.is_none() {
            break;
        }
    }
    Ok(hangs)
}

/// Checks everything that a VM needs. Returns what is found behind what was found of its `process`.
fn checks(vm: &Vm, process: Finding, hangs: bool, config: &Path) -> Vec<Finding> {
    let mut findings = vec![process];
    findings.extend(files::check(vm, config));
    findings.extend(image::check(vm, hangs));
    findings.extend(servers(vm));
    findings.extend(reach::check(vm, hangs));
    findings.extend(guest::check(vm));
    findings.extend(limits::check(vm));
    findings
}

/// Returns what the screens name as wrong with one VM, and what the checks have found. What both have found is there once.
fn with_problems(problems: impl Iterator<Item = Problem>, mut findings: Vec<Finding>) -> Vec<Finding> {
    // One thing may have several problems: a server that lies may also be full.
    let is_new = |problem: &Problem| {
        let is_same = |own: &Finding| own.level != Level::Ok && own.what == problem.finding.what;
        !FOUND_BY_CHECKS.contains(&problem.cause.as_str()) || !findings.iter().any(is_same)
    };
    let wrong: Vec<_> = problems.filter(is_new).map(|problem| problem.finding).collect();
    findings.splice(..0, wrong);
    findings
}

fn process(vm: &Vm) -> Finding {
    let name = &vm.options.name;
    match &vm.running {
        Some(status) => diagnosis::process(status),
        None => {
            let start = match disk::has_unit(name) {
                true => format!("Start it with `systemctl start remoca-disk@{name}`"),
                false => format!("Start `remoca disk` yourself: {}", disk::UNIT_NAMES),
            };
            if left::is_there(&vm.options.control) {
                let advice = format!("{start}. If its guest was shut down meanwhile, it may be stopped again then");
                Finding::failed("process", format!("does not run: {}, which hangs", left::WORDS), advice)
            } else {
                Finding::warning("process", "does not run: its guest cannot start, or hangs", start)
            }
        }
    }
}

/// Asks each memory server what it could give.
fn servers(vm: &Vm) -> Vec<Finding> {
    if vm.running.as_ref().is_some_and(|status| !status.has_disks()) {
        // It has left its servers until the disks are here, which is said elsewhere.
        return Vec::new();
    }
    // Each with what is wanted of it, and whether it is that of the local tier.
    let mut endpoints: Vec<(Endpoint, u64, bool)> = match &vm.running {
        Some(status) => {
            let parsed = |server: &KnownServerStatus| {
                let CacheStatus { wanted_bytes, local_wanted_bytes, .. } = status.cache;
                let wanted = if server.is_local_tier { local_wanted_bytes } else { wanted_bytes };
                Some((server.endpoint.parse().ok()?, wanted, server.is_local_tier))
            };
            status.servers.iter().filter_map(parsed).collect()
        }
        None => {
            let listed = vm.options.servers.iter().map(|server| (server.clone(), vm.options.cache, false));
            listed.chain([(vm.options.local_server.clone(), vm.options.local, true)]).collect()
        }
    };
    endpoints.retain(|(_, wanted, is_local)| !is_local || *wanted > 0);
    if endpoints.is_empty() {
        let advice = "Name one with --server, or with `server` in the configuration";
        return vec![Finding::warning("server", "there is no memory server, so nothing is cached", advice)];
    }
    let ask = |(endpoint, wanted, is_local): (Endpoint, u64, bool)| {
        let answer = link::probe(&endpoint).map_err(|error| error.to_string());
        Asked { endpoint, wanted, is_local, answer }
    };
    let asked: Vec<_> = endpoints.into_iter().map(ask).collect();
    asked.iter().map(|server| of_server(server, &asked, vm.running.as_ref())).collect()
}

/// A memory server that was asked what it could give.
struct Asked {
    endpoint: Endpoint,
    /// What is wanted of all servers of its tier together.
    wanted: u64,
    /// Whether it is that of the local tier.
    is_local: bool,
    /// Its free memory and the time of a round trip, or why it does not answer.
    answer: Result<(u64, Duration), String>,
}

/// Returns what was found of `server`, one of the servers that were `asked`.
fn of_server(server: &Asked, asked: &[Asked], running: Option<&Status>) -> Finding {
    let Asked { endpoint, wanted, is_local, answer } = server;
    let what = format!("server {endpoint}");
    let granted = running.map_or(0, |Status { cache, .. }| match is_local {
        true => cache.local_granted_bytes,
        false => cache.granted_bytes,
    });
    let (free, round_trip) = match answer {
        Ok(answer) => *answer,
        // The level of what the screens name: no guest is harmed.
        Err(error) => {
            let name = endpoint.to_string();
            let mut pools = running.iter().flat_map(|status| &status.pools);
            let is_full = diagnosis::has_too_many_clients(error);
            let meanwhile = match pools.find(|pool| pool.server == name) {
                Some(pool) if pool.is_mapped || pool.state == "away" => {
                    "Its pool is in use meanwhile, but cannot grow".to_owned()
                }
                // This question was one client more.
                Some(pool) if is_full => {
                    let found = format!("has a pool of {} for it; {TOO_MANY_CLIENTS}", show_size(pool.granted_bytes));
                    return Finding::ok(what, found);
                }
                None if granted > 0 => {
                    format!("The others have granted {} of the {} wanted", show_size(granted), show_size(*wanted))
                }
                _ => "Reads go to the disk meanwhile".to_owned(),
            };
            let advice = if is_full { format!("{meanwhile}. {MORE_CLIENTS}") } else { meanwhile };
            return Finding::warning(what, error.clone(), advice);
        }
    };
    // A cache is made of the pools of several servers.
    let of_tier = asked.iter().filter(|other| other.is_local == *is_local);
    let possible = of_tier.filter_map(|other| Some(other.answer.as_ref().ok()?.0)).fold(granted, u64::saturating_add);
    let found = format!("{} free, round trip {:.2} ms", show_size(free), round_trip.as_secs_f64() * 1e3);
    if possible >= *wanted {
        return Finding::ok(what, found);
    }
    let (possible, wanted) = (show_size(possible), show_size(*wanted));
    let advice = format!("In all there are {possible} of the {wanted} wanted: give it more, or name another");
    Finding::warning(what, found, advice)
}

#[cfg(test)]
mod tests {
    use super::*;
    use remoca_view::testing::full_status;

    #[test]
    fn a_server_that_lies_is_named_whatever_else_is_wrong_with_it() {
        let mut status = full_status(1, 100);
        status.servers.truncate(1);
        status.cache.granted_bytes = status.cache.wanted_bytes / 2;
        status.counters.insert("fetch_wrong".into(), 12);
        let what = format!("server {}", status.servers[0].endpoint);
        let shown = |own: Finding| {
            let findings = with_problems(diagnosis::of_status(&status).into_iter(), vec![own]);
            findings.into_iter().map(|finding| finding.found).collect::<Vec<_>>()
        };
        let full = shown(Finding::warning(&*what, "1G free", "Name another"));
        assert!(full.len() == 2 && full[0].starts_with("it lies: 12 pages") && full[1] == "1G free", "{full:?}");
        let well = shown(Finding::ok(&*what, "8G free"));
        assert!(well.len() == 3 && well[1].starts_with("full: "), "{well:?}");
    }

    /// It can be silent for long before its pool is given up or called away, and its pages are read without it.
    #[test]
    fn a_mapped_pool_is_in_use_while_its_server_hangs() {
        let mut status = full_status(1, 100);
        let hangs = |status: &Status| {
            let endpoint = status.pools[0].server.parse().unwrap();
            let asked = Asked { endpoint, wanted: 1, is_local: false, answer: Err("no answer".into()) };
            of_server(&asked, &[], Some(status)).to_string()
        };
        assert!(hangs(&status).contains("Reads go to the disk"), "{}", hangs(&status));
        status.pools[0].is_mapped = true;
        assert!(hangs(&status).contains("Its pool is in use meanwhile"), "{}", hangs(&status));
    }

    /// As the screens judge them, which call no server of a cache full that has its size.
    #[test]
    fn servers_are_judged_together() {
        let asked = |endpoint: &str, free| Asked {
            endpoint: endpoint.parse().unwrap(),
            wanted: 8 << 30,
            is_local: false,
            answer: Ok((free, Duration::ZERO)),
        };
        let judged = |asked: &[Asked], running: Option<&Status>| {
            asked.iter().map(|server| of_server(server, asked, running)).collect::<Vec<_>>()
        };
        let halves = [asked("tcp:donor1:7070", 4 << 30), asked("tcp:donor2:7070", 4 << 30)];
        assert!(judged(&halves, None).iter().all(|finding| finding.level == Level::Ok));
        let half = judged(&halves[..1], None).remove(0);
        let advice = "In all there are 4G of the 8G wanted: give it more, or name another";
        assert_eq!((half.level, half.advice.as_deref()), (Level::Warning, Some(advice)));
        // The third server of a cache that the other two have granted.
        let mut status = full_status(1, 1);
        (status.cache.wanted_bytes, status.cache.granted_bytes) = (8 << 30, 8 << 30);
        assert_eq!(judged(&[asked("tcp:donor3:7070", 0)], Some(&status))[0].level, Level::Ok);
        // A mapped pool is in use without its server.
        let silent = Asked { answer: Err("nobody".into()), ..asked("tcp:donor1:7070", 0) };
        let advice = |status: &Status| of_server(&silent, &[], Some(status)).advice.unwrap();
        assert_eq!(advice(&status), "Reads go to the disk meanwhile");
        // One without a pool, of a cache that others have granted.
        let spare = Asked { answer: Err("nobody".into()), ..asked("tcp:donor3:7070", 0) };
        let said = |running: Option<&Status>| of_server(&spare, &[], running).advice.unwrap();
        assert_eq!(said(Some(&status)), "The others have granted 8G of the 8G wanted");
        assert_eq!(said(None), "Reads go to the disk meanwhile");
        // One that has no place for a client more.
        let full = |endpoint| Asked { answer: Err(format!("refused: {TOO_MANY_CLIENTS}")), ..asked(endpoint, 0) };
        let told = |endpoint| of_server(&full(endpoint), &[], Some(&status)).to_string();
        assert!(told("tcp:donor1:7070").starts_with("ok "), "{}", told("tcp:donor1:7070"));
        let words = format!("(--max-clients there). The others have granted 8G of the 8G wanted. {MORE_CLIENTS}");
        assert!(told("tcp:donor3:7070").ends_with(&words), "{}", told("tcp:donor3:7070"));
        status.pools[0].state = "away".into();
        assert!(advice(&status).starts_with("Its pool is in use"));
    }
}
