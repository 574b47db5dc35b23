//! What emulation does to guests on a busy machine, and is not the fault of what is tested.

use crate::{Host, LIMIT, Result};
use remoca_lab::{Guest, Libvirt};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// What QEMU 10.0.2 says when its emulation of several processors aborts while devices of the guest change: a fault of its own,
/// which its developers know (their issue 1921).
const QEMUS_ABORT: &str = "iotlb_to_section: Assertion `section_index < d->map.sections_nb' failed";
/// How often a scenario is tried again after QEMU aborted.
const AGAIN_MAX: u32 = 2;

/// Runs a scenario with a domain of this name, under a libvirtd of its own. Tries it again, at most twice and loudly, if it failed
/// and the log of the domain has the one assertion by which QEMU itself is known to abort. Each try has a host of its own.
///
/// # Errors
/// If the scenario fails in any other way, or QEMU aborts each time.
pub fn unless_qemu_aborts<T>(
    domain: &str,
    prepare: impl Fn() -> Result<(Host, T)>,
    scenario: impl Fn(Host, T, &Libvirt) -> Result<()>,
) -> Result<()> {
    for left in (0..=AGAIN_MAX).rev() {
        let (host, more) = prepare()?;
        let libvirt = Libvirt::start(host.folder(), &[])?;
        // An assertion of a test may fail because QEMU is gone.
        let outcome = catch_unwind(AssertUnwindSafe(|| scenario(host, more, &libvirt)));
        if matches!(outcome, Ok(Ok(()))) {
            return Ok(());
        }
        let log = std::fs::read_to_string(libvirt.qemu_log(domain)).unwrap_or_default();
        if left == 0 || !has_aborted(&log) {
            return outcome.unwrap_or_else(|panic| resume_unwind(panic));
        }
        eprintln!("QEMU ITSELF HAS ABORTED: {QEMUS_ABORT}. The scenario is tried again, at most {left} times.");
    }
    Ok(())
}

/// Returns whether the log of a QEMU ends with the known abort.
fn has_aborted(log: &str) -> bool {
    log.contains(QEMUS_ABORT)
}

/// Waits until a shell command succeeds in the guest, which tries it 600 times. The limit is one of what the guest does, not of
/// time: emulated processors may stand still for minutes, and then come back. Only silence for [`LIMIT`] is an error before.
///
/// # Errors
/// If the command never succeeds, or the guest does nothing.
pub fn wait_in_guest(guest: &mut Guest, condition: &str) -> Result<()> {
    let attempts = format!(
        "for i in $(seq 600); do {{ {condition}; }} > /dev/null 2>&1 && exit 0; echo $i; sleep 0.1; done; exit 1"
    );
    let mut job = guest.start(&attempts)?;
    let mut attempts = 0;
    while guest.next_line(&mut job, LIMIT)?.is_some() {
        attempts += 1;
    }
    let output = guest.wait(&job, LIMIT)?;
    match output.success() {
        true => Ok(()),
        false => {
            Err(format!("{attempts} times in vain in the guest: {condition}\n{}", crate::kernel_tail(guest)).into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_known_abort_is_one() {
        let line = |what: &str| {
            format!("qemu-system-x86_64: ../../system/physmem.c:2434: {what}.\nshutting down, reason=crashed\n")
        };
        assert!(has_aborted(&line(
            "MemoryRegionSection *iotlb_to_section: Assertion `section_index < d->map.sections_nb' failed"
        )));
        for other in [
            "iotlb_to_section: Assertion `section_index < 5' failed",
            "Assertion `d->map.sections_nb' failed",
            "out of memory",
        ] {
            assert!(!has_aborted(&line(other)), "{other}");
        }
    }
}
