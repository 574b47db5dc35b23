//! Looks at the memory of all VMs again and again while it moves, beside the daemon that moves it, and counts what must not be.

use remoca_guest_tests::Result;
use remoca_guest_tests::readers::{self, MIB, Reader};
use remoca_lab::Qmp;
use serde::Serialize;
use serde_json::json;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// Time between two looks.
const EVERY: Duration = Duration::from_millis(100);

/// What no look may find broken.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Limits {
    /// What a guest has at least.
    pub guest_minimum_bytes: u64,
    /// What guests and tiers together have at most.
    pub host_bytes: u64,
}

/// Memory of one VM.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Sizes {
    /// What the balloon leaves its guest.
    pub guest_bytes: u64,
    /// What its guest takes of the host.
    pub resident_bytes: u64,
    /// What its local tier was granted.
    pub tier_bytes: u64,
}

/// What the looks found.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Looks {
    pub looks: u64,
    /// Looks at which some guest had less than its minimum.
    pub below_minimum: u64,
    /// Looks at which guests and tiers together had more than the host has for them. A look reads one VM after the other, so it may miss what lasts for
    /// less, and may see a step that is not there. Of each guest the larger of what its balloon leaves it and
    /// what it takes counts.
    pub over_host: u64,
    /// Least and most of all looks.
    pub least_guest_mib: u64,
    pub least_resident_mib: u64,
    pub most_of_host_mib: u64,
}

/// A VM that is looked at.
struct Watched {
    monitor: Qmp,
    control: PathBuf,
}

/// A thread that looks.
pub struct Watch {
    shared: Arc<Shared>,
    thread: JoinHandle<std::result::Result<Looks, String>>,
}

struct Shared {
    is_over: AtomicBool,
    latest: Mutex<Vec<Sizes>>,
}

impl Watch {
    /// Begins to look at the VMs, whose laboratory's monitors it takes.
    pub fn start(vms: &mut [Reader], limits: Limits) -> Result<Self> {
        let watched = |vm: &mut Reader| Ok(Watched { monitor: vm.monitor()?, control: vm.control().to_owned() });
        let mut watched = vms.iter_mut().map(watched).collect::<Result<Vec<_>>>()?;
        let first = look(&mut watched)?;
        let shared = Arc::new(Shared { is_over: AtomicBool::new(false), latest: Mutex::new(first) });
        let of_thread = Arc::clone(&shared);
        let thread = std::thread::spawn(move || {
            let mut looks = Looks::default();
            while !of_thread.is_over.load(Ordering::Relaxed) {
                let sizes = look(&mut watched).map_err(|error| error.to_string())?;
                looks.note(&sizes, &limits);
                *of_thread.latest.lock().map_err(|error| error.to_string())? = sizes;
                std::thread::sleep(EVERY);
            }
            Ok(looks)
        });
        Ok(Self { shared, thread })
    }

    /// Returns the sizes of the VMs at the newest look.
    ///
    /// # Errors
    /// If a look failed: from then on nobody looks.
    pub fn sizes(&self) -> Result<Vec<Sizes>> {
        if self.thread.is_finished() {
            return Err("a look at the sizes failed, so nobody looks any more".into());
        }
        Ok(self.shared.latest.lock().map_err(|error| error.to_string())?.clone())
    }

    /// Looks no more, and returns what was found.
    ///
    /// # Errors
    /// Also if a look failed: from then on nobody has looked.
    pub fn end(self) -> Result<Looks> {
        self.shared.is_over.store(true, Ordering::Relaxed);
        Ok(self.thread.join().map_err(|_| "the thread that looks panicked")??)
    }
}

fn look(watched: &mut [Watched]) -> Result<Vec<Sizes>> {
    watched.iter_mut().map(Watched::sizes).collect()
}

impl Watched {
    fn sizes(&mut self) -> Result<Sizes> {
        let actual = self.monitor.execute("query-balloon", json!({}))?["actual"].as_u64();
        let status = readers::status(&self.control)?;
        Ok(Sizes {
            guest_bytes: actual.ok_or("a balloon without a size")?,
            resident_bytes: status.memory.guest_resident_bytes.ok_or("no resident memory is seen")?,
            tier_bytes: status.cache.local_granted_bytes,
        })
    }
}

impl Looks {
    fn note(&mut self, sizes: &[Sizes], limits: &Limits) {
        let least = |of: fn(&Sizes) -> u64| sizes.iter().map(of).min().unwrap_or_default();
        let (guest, resident) = (least(|vm| vm.guest_bytes), least(|vm| vm.resident_bytes));
        let all: u64 = sizes.iter().map(|vm| vm.guest_bytes.max(vm.resident_bytes) + vm.tier_bytes).sum();
        let lesser = |now: u64, before: u64| if self.looks == 0 { now / MIB } else { before.min(now / MIB) };
        self.least_guest_mib = lesser(guest, self.least_guest_mib);
        self.least_resident_mib = lesser(resident, self.least_resident_mib);
        self.most_of_host_mib = self.most_of_host_mib.max(all.div_ceil(MIB));
        self.below_minimum += u64::from(guest < limits.guest_minimum_bytes);
        self.over_host += u64::from(all > limits.host_bytes);
        self.looks += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_at_which_something_is_broken_are_counted() {
        let limits = Limits { guest_minimum_bytes: 80 * MIB, host_bytes: 220 * MIB };
        let of = |guest, resident, tier| Sizes {
            guest_bytes: guest * MIB,
            resident_bytes: resident * MIB,
            tier_bytes: tier * MIB,
        };
        let mut looks = Looks::default();
        looks.note(&[of(100, 90, 10), of(100, 70, 10)], &limits);
        assert_eq!((looks.below_minimum, looks.over_host, looks.most_of_host_mib), (0, 0, 220));
        // A guest that takes more than its balloon leaves it.
        looks.note(&[of(100, 101, 10), of(100, 70, 10)], &limits);
        looks.note(&[of(79, 79, 0), of(100, 100, 0)], &limits);
        assert_eq!((looks.looks, looks.below_minimum, looks.over_host), (3, 1, 1));
        assert_eq!((looks.least_guest_mib, looks.least_resident_mib, looks.most_of_host_mib), (79, 70, 221));
    }
}
