//! What the host's daemon says of guests whose memory it moves.

use crate::finding::Finding;
use remoca_io::show::show_size;
use remoca_protocol::host::{HostGuest, HostReport};

/// Returns the VMs whose guests' memory has a problem, by the report of the daemon.
pub fn of_report(report: &HostReport) -> impl Iterator<Item = (&str, Finding)> {
    report.vms.iter().filter_map(|vm| Some((&*vm.name, of_guest(&vm.name, vm.guest.as_ref()?)?)))
}

fn of_guest(name: &str, guest: &HostGuest) -> Option<Finding> {
    let why: String = guest.why.chars().filter(|c| !c.is_control()).collect();
    let taken = show_size(guest.taken_bytes);
    match guest.state.as_str() {
        "stuck" => Some(Finding::warning(
            "balloon",
            why,
            format!(
                "Does the guest have the virtio_balloon driver, and is memory free in it? Raise guest-minimum in the table [memory] of {name}, or leave out its monitor"
            ),
        )),
        "silent" if guest.taken_bytes > 0 => Some(Finding::warning(
            "balloon",
            format!("{taken} were taken from its guest, and its monitor does not answer: {why}"),
            format!(
                "Does its QEMU run? `remoca host status` says when {name} is heard again; its balloon then gets back what is its own"
            ),
        )),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use remoca_protocol::host::HostVm;

    #[test]
    fn a_balloon_that_does_not_follow_is_a_problem_of_its_vm() {
        let of = |state: &str, taken_bytes: u64| {
            let why = "its balloon did not follow within 30 s; the daemon does not ask it again for 9 min\x1b".into();
            let guest = Some(HostGuest { state: state.into(), taken_bytes, why, ..HostGuest::default() });
            let vm = HostVm { name: "web1".into(), guest, ..HostVm::default() };
            let report = HostReport { vms: vec![HostVm::default(), vm], ..HostReport::default() };
            of_report(&report).map(|(vm, finding)| format!("{vm}: {finding:?}")).collect::<Vec<_>>()
        };
        let stuck = of("stuck", 0);
        assert!(
            stuck.len() == 1 && stuck[0].contains("web1") && stuck[0].contains("within 30 s; the daemon"),
            "{stuck:?}"
        );
        assert!(of("silent", 1 << 30)[0].contains("1G were taken"));
        assert!(of("silent", 0).is_empty() && of("usable", 1).is_empty() && of("advised", 0).is_empty());
    }
}
