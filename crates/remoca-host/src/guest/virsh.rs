//! The monitor of a domain of libvirt, which `virsh` asks. Libvirt's own monitor of its QEMU is never touched.

use super::domain::{Domain, job, state_and_statistics};
use super::monitor::{GuestMemory, Monitor, Unusable, checked};
use super::statistics::{PERIOD_S, Statistics};

use remoca_io::program::printed;
use std::process::Command;
use std::time::{Duration, Instant};

/// Time for each run of `virsh`.
const PATIENCE: Duration = Duration::from_secs(5);
/// Variables in which the operator says which libvirt is meant. Otherwise it is that of this system.
const CHOSEN_BY: [&str; 2] = ["VIRSH_DEFAULT_CONNECT_URI", "LIBVIRT_DEFAULT_URI"];
const SYSTEM: &str = "qemu:///system";

/// A domain that `virsh` asks.
pub struct Virsh {
    name: String,
    uri: Option<String>,
    statistics: Statistics,
}

impl Virsh {
    /// Returns the domain `name` of the libvirt of this system, or that which the environment names.
    #[must_use]
    pub fn new(name: String) -> Self {
        let is_chosen = CHOSEN_BY.iter().any(|name| std::env::var_os(name).is_some());
        let uri = (!is_chosen).then(|| SYSTEM.to_owned());
        Self { name, uri, statistics: Statistics::new() }
    }

    /// Returns the domain, of the libvirt at `uri`.
    #[must_use]
    pub fn at(self, uri: &str) -> Self {
        Self { uri: Some(uri.to_owned()), ..self }
    }

    fn run(&self, arguments: &[&str]) -> Result<String, String> {
        let mut command = Command::new("virsh");
        command.arg("--quiet");
        if let Some(uri) = &self.uri {
            command.args(["--connect", uri]);
        }
        // Its texts are not shown to anybody, and its keys are read.
        command.env("LC_ALL", "C").args(arguments);
        printed(&mut command, PATIENCE).map_err(|error| error.to_string())
    }

    fn domain(&self) -> Result<Domain, Unusable> {
        let xml = self.run(&["dumpxml", &self.name]).map_err(Unusable::Silent)?;
        let domain = Domain::parse(&xml).map_err(|why| Unusable::Silent(format!("libvirt's domain: {why}")))?;
        // A name that is a number could be that of another one's.
        match domain.name == self.name {
            true => Ok(domain),
            false => Err(Unusable::Silent(format!("libvirt has no running domain with the name {}", self.name))),
        }
    }

    /// Returns what libvirt does with the domain beside running it: nothing may be taken from its guest meanwhile.
    fn job(&self, domain: &Domain) -> Option<String> {
        let unknown = |why| Some(format!("libvirt does not tell whether its guest migrates: {why}"));
        self.run(&["domjobinfo", &domain.uuid]).map_or_else(unknown, |text| job(&text))
    }
}

impl Monitor for Virsh {
    fn read(&mut self) -> Result<GuestMemory, Unusable> {
        let domain = self.domain()?;
        domain.check()?;
        if !domain.has_statistics {
            let period = PERIOD_S.to_string();
            let asked = self.run(&["dommemstat", &domain.uuid, "--period", &period, "--live"]);
            asked.map_err(Unusable::Silent)?;
        }
        // Does not wait for what else is done to the domain.
        let text =
            self.run(&["domstats", "--state", "--balloon", "--nowait", &domain.uuid]).map_err(Unusable::Silent)?;
        let said = state_and_statistics(&text).map_err(|why| Unusable::Silent(format!("libvirt's domain: {why}")))?;
        if !said.is_running {
            return Err(Unusable::is_paused());
        }
        let held = domain.held.clone().or_else(|| self.job(&domain));
        let boot_bytes = domain.boot_bytes;
        let actual_bytes = said.actual_bytes.saturating_sub(domain.plugged_bytes);
        let (available_bytes, pressure) = self.statistics.hear(Instant::now(), said.told, actual_bytes);
        // Libvirt lets a size wait for the end of a migration.
        let leaves = false;
        let nothing = GuestMemory::default();
        checked(GuestMemory { boot_bytes, actual_bytes, available_bytes, pressure, held, leaves, ..nothing })
    }

    fn set_bytes(&mut self, bytes: u64) -> Result<(), String> {
        let domain = self.domain().and_then(|domain| domain.check().map(|()| domain));
        let domain = domain.map_err(|unusable| unusable.why().to_owned())?;
        let bytes = bytes.saturating_add(domain.plugged_bytes);
        self.run(&["setmem", &domain.uuid, &kib(bytes).to_string(), "--live"]).map(drop)
    }
}

/// Returns a size for libvirt. Rounded down, a guest would never seem to have what it was to get.
fn kib(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_never_told_as_less() {
        assert_eq!([1 << 30, (1 << 30) + 1, (1 << 30) + 1024].map(kib), [1 << 20, (1 << 20) + 1, (1 << 20) + 1]);
    }
}
