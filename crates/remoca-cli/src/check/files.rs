//! Files of the configuration: whether they have mistakes, and are in effect.

use crate::config::check::{mistakes, mistakes_of};
use crate::failure;
use crate::settings::file::Problem as Mistake;
use crate::settings::vm_path;
use crate::vm::{FilesState, Vm};
use anyhow::Result;
use remoca_view::diagnosis::{self, Problem};
use remoca_view::finding::{Finding, Level};
use remoca_view::vm::Vm as Seen;
use std::path::Path;

const WHAT: &str = "configuration";
const ADVICE: &str = "Correct it; `remoca config check` names every mistake";

/// Checks the files of one VM.
pub(super) fn check(vm: &Vm, folder: &Path) -> Vec<Finding> {
    let mut findings: Vec<_> = state(vm).into_iter().collect();
    let wrong: Vec<_> = new(mistakes_of(&vm.options.name, folder), &findings).map(|(_, finding)| finding).collect();
    if !wrong.is_empty() {
        findings.retain(|finding| finding.level != Level::Ok);
    }
    findings.extend(wrong);
    findings
}

/// Adds what is wrong with the files of all VMs to the `problems` of those that were seen. Returns the worst first.
pub(super) fn with_problems(mut problems: Vec<Problem>, seen: &[Seen], folder: &Path) -> Vec<Problem> {
    let (mut possible, mut refused): (Vec<Problem>, Vec<Problem>) = (Vec::new(), Vec::new());
    for (status, socket) in seen.iter().filter_map(|vm| Some((&vm.status.as_ref()?.status, &vm.socket))) {
        let Ok(vm) = Vm::of_running(status.clone(), socket, folder) else { continue };
        let Some(finding) = state(&vm).filter(|finding| finding.level != Level::Ok) else { continue };
        // Said in other words, and about a file that may be another one by now.
        problems.retain_mut(|problem| {
            let is_other = problem.finding.what != WHAT || problem.vms.is_empty();
            is_other || {
                problem.vms.retain(|vm| *vm != status.name);
                !problem.vms.is_empty()
            }
        });
        let is_possible = matches!(vm.files, FilesState::Pending { refusal: None, .. });
        let own = if is_possible { &mut possible } else { &mut refused };
        match own.iter_mut().find(|other| other.finding.found == finding.found) {
            Some(other) => other.vms.push(status.name.clone()),
            None => own.push(Problem::new(WHAT, vec![status.name.clone()], finding)),
        }
    }
    // An upgrade of all stops at the first that is refused.
    let command = if refused.is_empty() { "`remoca upgrade --all`" } else { "`remoca upgrade NAME` for each" };
    for shared in possible.iter_mut().filter(|problem| problem.vms.len() > 1) {
        shared.finding.advice = Some(format!("{command} takes it up under the running guests"));
    }
    let mut own = possible;
    own.extend(refused);
    let told: Vec<_> = own.iter().map(|problem| problem.finding.clone()).collect();
    let names = |path: Option<&Path>| -> Vec<String> {
        let name = path.and_then(|path| path.file_stem()?.to_str()).filter(|name| path == Some(&vm_path(folder, name)));
        name.map(str::to_owned).into_iter().collect()
    };
    own.extend(new(mistakes(folder), &told).map(|(mistake, finding)| {
        let path = mistake.as_ref().map(|mistake| mistake.place.path.as_path());
        Problem::new(WHAT, names(path), finding)
    }));
    problems.extend(own);
    diagnosis::sort(&mut problems);
    problems
}

/// Returns whether the files of a VM are in effect, or `None` if there are none.
fn state(vm: &Vm) -> Option<Finding> {
    let (name, runs) = (&vm.options.name, vm.running.is_some());
    match &vm.files {
        FilesState::None => None,
        FilesState::InEffect if !runs => Some(Finding::ok(WHAT, "has no mistakes")),
        FilesState::InEffect => Some(Finding::ok(WHAT, "is in effect")),
        FilesState::Pending { changes, refusal } => {
            let pending = format!("not in effect yet: {}", changes.join("; "));
            Some(match refusal {
                None => {
                    let advice = format!("`remoca upgrade {name}` takes it up under the running guest");
                    Finding::warning(WHAT, pending, advice)
                }
                Some(why) => refused(format!("{pending}. An upgrade would be refused: {why:#}"), why, name),
            })
        }
        FilesState::Unusable(error) => {
            let goes_on = if runs { "Its process goes on" } else { "It would start" };
            Some(Finding::failed(WHAT, format!("{error}. {goes_on} with the last good copy"), ADVICE))
        }
    }
}

/// Returns the finding of changes that an upgrade of the VM `name` would refuse.
fn refused(found: String, why: &anyhow::Error, name: &str) -> Finding {
    match failure::needs_correction(why) {
        true => Finding::failed(WHAT, found, "Correct it: after a boot of the host the VM could not start"),
        false => {
            let advice = format!("Correct it, or with the guest shut down say `systemctl restart remoca-disk@{name}`");
            Finding::warning(WHAT, found, advice)
        }
    }
}

/// Returns the finding that the files cannot be used.
pub(super) fn failed(text: String) -> Finding {
    Finding::failed(WHAT, text, ADVICE)
}

/// Returns a finding for each mistake that is not in those of `told`, with the mistake; and one if the files cannot be read.
fn new(mistakes: Result<Vec<Mistake>>, told: &[Finding]) -> impl Iterator<Item = (Option<Mistake>, Finding)> {
    let found = match mistakes {
        Err(error) => vec![(None, failed(format!("{error:#}")))],
        Ok(mistakes) => mistakes
            .into_iter()
            .map(|mistake| {
                let finding = failed(mistake.to_string());
                (Some(mistake), finding)
            })
            .collect(),
    };
    found.into_iter().filter(|(_, finding)| !told.iter().any(|told| told.found.contains(&finding.found)))
}
