//! `remoca check`: whether everything that one VM's disks need is as it should be.

mod finding;
mod guest;
mod image;
mod limits;
mod reach;

use crate::settings::Folder;
use crate::size::show_size;
use crate::vm::{FilesState, Vm};
use anyhow::{Result, bail};
use clap::Args;
use finding::{Finding, Level};
use remoca_disk::link;
use std::io::Write;

/// Check everything that the disks of one VM need, and say what to do about what is wrong.
///
/// Works for a VM process that runs, and for one that is configured: files of the configuration, image and lock, memory servers, sockets and who may
/// connect, and of a running one also the guest's memory, whether its QEMU reconnects, the agent, and limits. Nothing is
/// changed. The exit code is 1 if anything has failed.
#[derive(Args, Debug)]
pub struct CheckArgs {
    /// Name of the VM process, or the path of its control socket
    #[arg(value_name = "NAME")]
    name: String,

    /// Print JSON: a list of objects with `what`, `level` (ok, warning, failed), `found` and `advice`
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    folder: Folder,
}

/// Runs the subcommand.
///
/// # Errors
/// If there is no such VM, or something has failed.
pub fn run(args: &CheckArgs) -> Result<()> {
    let vm = Vm::find(&args.name, &args.folder.config)?;
    let mut findings = vec![process(&vm)];
    findings.extend(files(&vm));
    findings.extend(image::check(&vm));
    findings.extend(servers(&vm));
    findings.extend(reach::check(&vm));
    findings.extend(guest::check(&vm));
    findings.extend(limits::check(&vm));
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&findings)?)?;
    } else {
        findings.iter().try_for_each(|finding| writeln!(out, "{finding}"))?;
    }
    match findings.iter().filter(|finding| finding.level == Level::Failed).count() {
        0 => Ok(()),
        count => bail!("{}: {count} of {} checks failed", vm.options.name, findings.len()),
    }
}

fn process(vm: &Vm) -> Finding {
    let own = env!("CARGO_PKG_VERSION");
    let name = &vm.options.name;
    match &vm.running {
        Some(status) if status.version == own => {
            Finding::ok("process", format!("runs as {}, version {own}, started {}", status.pid, status.started))
        }
        Some(status) => Finding::warning(
            "process",
            format!("runs version {}, and {own} is installed", status.version),
            format!("`remoca upgrade {name}` changes that under the running guest"),
        ),
        None => Finding::warning(
            "process",
            "does not run: its guest cannot start, or hangs",
            format!("Start it with `systemctl start remoca-disk@{name}`"),
        ),
    }
}

fn files(vm: &Vm) -> Option<Finding> {
    const WHAT: &str = "configuration";
    let name = &vm.options.name;
    match &vm.files {
        FilesState::None => None,
        FilesState::InEffect if vm.running.is_none() => Some(Finding::ok(WHAT, "has no mistakes")),
        FilesState::InEffect => Some(Finding::ok(WHAT, "is in effect")),
        FilesState::Pending(changes) => Some(Finding::warning(
            WHAT,
            format!("not in effect yet: {}", changes.join("; ")),
            format!("`remoca upgrade {name}` takes it up under the running guest"),
        )),
        FilesState::Unusable(error) => {
            let advice = "Correct it; `remoca config check` names every mistake";
            Some(Finding::failed(WHAT, format!("{error}. What follows is about the last good copy"), advice))
        }
    }
}

/// Asks each memory server what it could give.
fn servers(vm: &Vm) -> Vec<Finding> {
    let wanted = vm.running.as_ref().map_or(vm.options.cache, |status| status.cache.wanted_bytes);
    let endpoints = match &vm.running {
        Some(status) => status.servers.iter().filter_map(|server| server.endpoint.parse().ok()).collect(),
        None => vm.options.servers.clone(),
    };
    if endpoints.is_empty() {
        let advice = "Name one with --server, or with `server` in the configuration";
        return vec![Finding::warning("server", "there is no memory server, so nothing is cached", advice)];
    }
    let mut findings: Vec<_> = endpoints
        .iter()
        .map(|endpoint| {
            let what = format!("server {endpoint}");
            let in_use = |name: &str| {
                vm.running
                    .as_ref()
                    .is_some_and(|status| status.servers.iter().any(|server| server.in_use && server.endpoint == name))
            };
            let held = if in_use(&endpoint.to_string()) {
                vm.running.as_ref().map_or(0, |status| status.cache.granted_bytes)
            } else {
                0
            };
            match link::probe(endpoint) {
                Err(error) => Finding::failed(what, error.to_string(), "Reads go to the disk meanwhile"),
                Ok((free, round_trip)) => {
                    let found =
                        format!("{} free, round trip {:.2} ms", show_size(free), round_trip.as_secs_f64() * 1e3);
                    if free + held >= wanted {
                        Finding::ok(what, found)
                    } else {
                        let advice = format!(
                            "That is less than the {} wanted: give it more, or name another",
                            show_size(wanted)
                        );
                        Finding::warning(what, found, advice)
                    }
                }
            }
        })
        .collect();
    // One of several that is away costs nothing.
    if findings.iter().any(|finding| finding.level == Level::Ok) {
        findings.iter_mut().for_each(|finding| finding.level = finding.level.min(Level::Warning));
    }
    findings
}
