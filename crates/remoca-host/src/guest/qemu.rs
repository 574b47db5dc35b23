//! The monitor of a QEMU that the operator started with one for us: QMP on a Unix socket.
//!
//! Each look connects anew, so that the monitor is free for others in between.

use super::monitor::{GuestMemory, Monitor, Unusable, checked, huge_pages, passed_device, plugged_memory};
use super::statistics::{PERIOD_S, Statistics, Told, is_often_enough};

use remoca_qmp::{Error, Limit, Qmp};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Time for all that one call asks.
const PATIENCE: Duration = Duration::from_secs(5);
/// Parents of all devices: of those with a name, and of others.
const DEVICES: [&str; 2] = ["/machine/peripheral", "/machine/peripheral-anon"];
/// Number of objects of one QEMU that are looked at.
const OBJECTS_MAX: usize = 1024;
const PAGE_BYTES: u64 = 4096;

/// A QEMU that is asked by QMP.
pub struct Qemu {
    socket: PathBuf,
    patience: Duration,
    statistics: Statistics,
}

impl Qemu {
    #[must_use]
    pub fn new(socket: PathBuf) -> Self {
        Self { socket, patience: PATIENCE, statistics: Statistics::new() }
    }

    fn connect(&self) -> Result<Qmp, String> {
        Qmp::connect(&self.socket, Limit::Until(Instant::now() + self.patience))
            .map_err(|error| format!("the monitor at {}: {error}", self.socket.display()))
    }
}

impl Monitor for Qemu {
    fn read(&mut self) -> Result<GuestMemory, Unusable> {
        let mut qmp = self.connect().map_err(Unusable::Silent)?;
        let mut asked = Asked { qmp: &mut qmp, socket: &self.socket };
        let devices = asked.devices()?;
        asked.check_running()?;
        let plugged = asked.plugged()?;
        let migration = asked.migration()?;
        let migrates = || migration.as_ref().map(|_| "its guest is migrating".to_owned());
        let held = asked.held(&devices, &plugged)?.or_else(migrates);
        // In these states QEMU still takes sizes. A guest that runs in a later one has arrived here.
        let leaves = migration.is_some_and(|state| matches!(state.as_str(), "setup" | "wait-unplug" | "active"));
        let boot_bytes = asked.number("query-memory-size-summary", "base-memory")?;
        let actual_bytes = asked.number("query-balloon", "actual")?.saturating_sub(plugged.counted_bytes);
        let told = asked.told(&devices)?;
        let (available_bytes, pressure) = self.statistics.hear(Instant::now(), told, actual_bytes);
        let nothing = GuestMemory::default();
        checked(GuestMemory { boot_bytes, actual_bytes, available_bytes, pressure, held, leaves, ..nothing })
    }

    fn set_bytes(&mut self, bytes: u64) -> Result<(), String> {
        let mut qmp = self.connect()?;
        let plugged = Asked { qmp: &mut qmp, socket: &self.socket }.plugged();
        let plugged = plugged.map_err(|unusable| unusable.why().to_owned())?;
        match qmp.execute("balloon", json!({ "value": bytes.saturating_add(plugged.counted_bytes) })) {
            Ok(_) => Ok(()),
            Err(error) => Err(format!("the monitor at {}: {error}", self.socket.display())),
        }
    }
}

/// A device of the guest.
struct Device {
    path: String,
    kind: String,
}

impl Device {
    fn name(&self) -> &str {
        self.path.rsplit('/').next().unwrap_or_default()
    }
}

/// Memory of the guest beside that which it had at boot.
struct Plugged {
    /// What it is, if there is any.
    kind: Option<&'static str>,
    /// What the sizes of the balloon count of it: QEMU adds DIMMs to the memory at boot, and nothing else.
    counted_bytes: u64,
}

/// What one call asks.
struct Asked<'m> {
    qmp: &'m mut Qmp,
    socket: &'m Path,
}

impl Asked<'_> {
    fn silent(&self, why: impl std::fmt::Display) -> Unusable {
        Unusable::Silent(format!("the monitor at {}: {why}", self.socket.display()))
    }

    fn ask(&mut self, command: &str, arguments: Value) -> Result<Value, Unusable> {
        self.qmp.execute(command, arguments).map_err(|error| match error.is_refusal("DeviceNotActive") {
            true => Unusable::no_balloon(),
            false => self.silent(error),
        })
    }

    fn number(&mut self, command: &str, member: &str) -> Result<u64, Unusable> {
        let answer = self.ask(command, json!({}))?;
        answer[member].as_u64().ok_or_else(|| self.silent(format_args!("{command} tells no {member}")))
    }

    fn list(&mut self, command: &str, arguments: Value) -> Result<Vec<Value>, Unusable> {
        match self.ask(command, arguments)? {
            Value::Array(list) if list.len() <= OBJECTS_MAX => Ok(list),
            Value::Array(list) => Err(self.silent(format_args!("{command} lists {} things", list.len()))),
            _ => Err(self.silent(format_args!("{command} returns no list"))),
        }
    }

    /// Returns a property of an object, or nothing if objects of its kind have none of that name.
    fn property(&mut self, path: &str, name: &str) -> Result<Value, Unusable> {
        match self.qmp.execute("qom-get", json!({ "path": path, "property": name })) {
            Err(Error::Refused { .. }) => Ok(Value::Null),
            answer => answer.map_err(|error| self.silent(error)),
        }
    }

    fn devices(&mut self) -> Result<Vec<Device>, Unusable> {
        let mut devices = Vec::new();
        for parent in DEVICES {
            for child in self.list("qom-list", json!({ "path": parent }))? {
                let kind = child["type"].as_str().and_then(|kind| kind.strip_prefix("child<")?.strip_suffix('>'));
                if let (Some(name), Some(kind)) = (child["name"].as_str(), kind) {
                    devices.push(Device { path: format!("{parent}/{name}"), kind: kind.to_owned() });
                }
            }
        }
        Ok(devices)
    }

    fn plugged(&mut self) -> Result<Plugged, Unusable> {
        let mut plugged = Plugged { kind: None, counted_bytes: 0 };
        for device in self.list("query-memory-devices", json!({}))? {
            match device["type"].as_str() {
                Some("dimm") => {
                    let size = device["data"]["size"].as_u64();
                    let size = size.ok_or_else(|| self.silent("query-memory-devices tells no size of a DIMM"))?;
                    plugged.kind = Some("dimm");
                    plugged.counted_bytes = plugged.counted_bytes.saturating_add(size);
                }
                Some("virtio-mem") => plugged.kind = Some("virtio-mem"),
                _ => {}
            }
        }
        Ok(plugged)
    }

    /// Returns the state of the migration that is under way; `None` if there is none.
    fn migration(&mut self) -> Result<Option<String>, Unusable> {
        let migration = self.ask("query-migrate", json!({}))?;
        Ok(match migration["status"].as_str() {
            None | Some("none" | "completed" | "failed" | "cancelled") => None,
            Some(state) => Some(state.to_owned()),
        })
    }

    /// Returns why nothing may be taken from the guest, whether it migrates or not.
    fn held(&mut self, devices: &[Device], plugged: &Plugged) -> Result<Option<String>, Unusable> {
        let is_passed = |device: &&Device| device.kind.starts_with("vfio") || device.kind.starts_with("vhost-vdpa");
        if let Some(device) = devices.iter().find(is_passed) {
            return Ok(Some(passed_device(&format!("{} {}", device.kind, device.name()))));
        }
        let has_virtio_mem = devices.iter().any(|device| device.kind.starts_with("virtio-mem"));
        if let Some(kind) = plugged.kind.or(has_virtio_mem.then_some("virtio-mem")) {
            return Ok(Some(plugged_memory(kind)));
        }
        Ok(self.has_huge_pages()?.then(huge_pages))
    }

    fn has_huge_pages(&mut self) -> Result<bool, Unusable> {
        for backend in self.list("query-memdev", json!({}))? {
            let Some(id) = backend["id"].as_str() else { continue };
            let path = format!("/objects/{id}");
            let is_huge = self.property(&path, "hugetlb")?.as_bool() == Some(true)
                || self.property(&path, "mem-path")?.as_str().is_some_and(is_on_huge_pages);
            if is_huge {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn check_running(&mut self) -> Result<(), Unusable> {
        let status = self.ask("query-status", json!({}))?;
        match status["running"].as_bool() {
            Some(true) => Ok(()),
            _ => Err(Unusable::is_paused()),
        }
    }

    /// Returns what the guest told last. Has it tell often enough from now on, if it does not yet.
    fn told(&mut self, devices: &[Device]) -> Result<Told, Unusable> {
        let Some(balloon) = devices.iter().find(|device| device.kind.starts_with("virtio-balloon")) else {
            return Ok(Told::default());
        };
        let period = self.property(&balloon.path, "guest-stats-polling-interval")?;
        if period.as_u64().is_some_and(|period| !is_often_enough(period)) {
            let period = json!({ "path": balloon.path, "property": "guest-stats-polling-interval", "value": PERIOD_S });
            match self.qmp.execute("qom-set", period) {
                Ok(_) => {}
                Err(error @ Error::Refused { .. }) => {
                    tracing::debug!("{}: no statistics of {}: {error}", self.socket.display(), balloon.name());
                }
                Err(error) => return Err(self.silent(error)),
            }
        }
        let said = self.property(&balloon.path, "guest-stats")?;
        // What the guest does not tell is the greatest number.
        let number = |name: &str| said["stats"][name].as_u64().filter(|number| *number < u64::MAX);
        Ok(Told {
            at_s: said["last-update"].as_u64().unwrap_or_default(),
            major_faults: number("stat-major-faults"),
            swapped_in_pages: number("stat-swap-in").map(|bytes| bytes / PAGE_BYTES),
            available_bytes: number("stat-available-memory"),
        })
    }
}

/// Returns whether a path is on a file system of huge pages, as this host mounts it. The path itself is not touched: it may hang.
fn is_on_huge_pages(path: &str) -> bool {
    // Without a list there are none that we know of. What does not come back to the host is not counted as lent anyway.
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    file_system_of(path, &mounts) == Some("hugetlbfs")
}

fn file_system_of<'m>(path: &str, mounts: &'m str) -> Option<&'m str> {
    let mounts = mounts.lines().filter_map(|line| {
        let mut words = line.split(' ');
        Some((words.nth(1)?, words.next()?))
    });
    let around = mounts.filter(|(point, _)| Path::new(path).starts_with(point));
    around.max_by_key(|(point, _)| point.len()).map(|(_, kind)| kind)
}

#[cfg(test)]
mod tests;
