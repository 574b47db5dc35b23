//! The monitors of all guests, each asked on a thread of its own, several at a time.

use super::address::Address;
use super::monitor::{GuestMemory, Monitor, Unusable};
use std::collections::BTreeMap;
use std::thread;

/// Number of monitors that are asked at the same time.
const ASKED_AT_A_TIME_MAX: usize = 64;

/// Monitors by the name of the VM.
#[derive(Default)]
pub struct Monitors {
    all: BTreeMap<String, (Address, Box<dyn Monitor>)>,
}

impl Monitors {
    /// Keeps a monitor for each of these VMs. Those that are there stay as they are; others are dropped.
    pub fn keep(&mut self, wanted: &BTreeMap<String, Address>) {
        self.all.retain(|vm, (address, _)| wanted.get(vm) == Some(address));
        for (vm, address) in wanted {
            self.all.entry(vm.clone()).or_insert_with(|| (address.clone(), address.monitor()));
        }
    }

    /// Reads the memory of the guests for which `is_asked` holds.
    pub fn read(&mut self, is_asked: impl Fn(&str) -> bool) -> BTreeMap<String, Result<GuestMemory, Unusable>> {
        let asked = self.all.iter_mut().filter(|(vm, _)| is_asked(vm));
        let mut asked: Vec<_> = asked.map(|(vm, (_, monitor))| (vm, monitor)).collect();
        let mut said = BTreeMap::new();
        for batch in asked.chunks_mut(ASKED_AT_A_TIME_MAX) {
            thread::scope(|scope| {
                let threads: Vec<_> =
                    batch.iter_mut().map(|(vm, monitor)| (vm.to_string(), scope.spawn(|| monitor.read()))).collect();
                let panicked = |_| Err(Unusable::Silent("asking its monitor panicked".into()));
                let answers = threads.into_iter().map(|(vm, thread)| (vm, thread.join().unwrap_or_else(panicked)));
                said.extend(answers);
            });
        }
        said
    }

    /// Asks one guest to use this much memory.
    ///
    /// # Errors
    /// As [`Monitor::set_bytes`].
    pub fn set_bytes(&mut self, vm: &str, bytes: u64) -> Result<(), String> {
        match self.all.get_mut(vm) {
            Some((_, monitor)) => monitor.set_bytes(bytes),
            None => Err("it has no monitor".into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn monitors_come_and_go_with_their_vms() {
        let folder = tempfile::tempdir().unwrap();
        let address = |name: &str| Address::Qmp(folder.path().join(name));
        let mut monitors = Monitors::default();
        let count = u32::try_from(2 * ASKED_AT_A_TIME_MAX).unwrap();
        monitors.keep(&(0..count).map(|number| (format!("vm{number}"), address("a"))).collect());
        let said = monitors.read(|_| true);
        assert_eq!(said.len(), 2 * ASKED_AT_A_TIME_MAX);
        assert!(said.values().all(|said| matches!(said, Err(Unusable::Silent(_)))));
        assert!(monitors.set_bytes("vm0", 1).unwrap_err().contains("no QEMU listens there"));
        monitors.keep(&[("vm1".to_owned(), address("b"))].into());
        assert_eq!(monitors.read(|vm| vm == "vm0").len(), 0);
        let said = monitors.read(|vm| vm == "vm1");
        assert!(matches!(&said["vm1"], Err(Unusable::Silent(why)) if why.contains("/b: ")));
        assert_eq!(monitors.set_bytes("vm0", 1), Err("it has no monitor".into()));
    }
}
