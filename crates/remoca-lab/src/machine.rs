//! What runs a guest: a QEMU of ours, or a domain of libvirt.

use std::process::Child;

use crate::{
    error::{Context, Result},
    libvirt::Domain,
};

#[derive(Debug)]
pub(crate) enum Machine {
    Process(Child),
    Domain(Domain),
}

impl Machine {
    /// Returns whether the QEMU has ended.
    pub(crate) fn has_ended(&mut self) -> Result<bool> {
        match self {
            Machine::Process(child) => Ok(child.try_wait().context("waiting for QEMU")?.is_some()),
            Machine::Domain(domain) => domain.has_ended(),
        }
    }

    /// Kills the QEMU, and waits for its end.
    pub(crate) fn kill(&mut self) -> Result<()> {
        match self {
            Machine::Process(child) => {
                child.kill().context("killing QEMU")?;
                child.wait().context("waiting for QEMU")?;
                Ok(())
            }
            Machine::Domain(domain) => domain.kill(),
        }
    }
}
