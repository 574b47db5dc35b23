//! What libvirt tells of a domain: its XML, and the lines of `virsh domstats`.

use super::monitor::{Unusable, huge_pages, passed_device, plugged_memory};
use super::statistics::{Told, is_often_enough};
use roxmltree::{Document, Node};

const PAGE_KIB: u64 = 4;
/// State of a domain that runs, as libvirt numbers it.
const RUNNING: u64 = 1;

/// A domain as its XML describes it.
#[derive(Debug)]
pub(super) struct Domain {
    pub name: String,
    pub uuid: String,
    pub boot_bytes: u64,
    /// What the sizes of its balloon count beside that, as QEMU does: its DIMMs.
    pub plugged_bytes: u64,
    /// Whether its balloon driver is asked for statistics often enough.
    pub has_statistics: bool,
    /// Why nothing is to be taken from it.
    pub held: Option<String>,
    /// Why its memory cannot be moved in either direction.
    unusable: Option<Unusable>,
}

impl Domain {
    pub(super) fn parse(xml: &str) -> Result<Self, String> {
        let document = Document::parse(xml).map_err(|error| format!("its XML is broken: {error}"))?;
        let root = document.root_element();
        let text = |name: &str| {
            let found = child(root, name).and_then(|node| node.text());
            found.map(|text| text.trim().to_owned()).ok_or_else(|| format!("its XML has no <{name}>"))
        };
        let balloon = child(root, "devices").and_then(|devices| child(devices, "memballoon"));
        // Libvirt counts all memory devices in <memory>, and virtio-mem with the most that it can have.
        let with_devices = bytes(child(root, "memory").ok_or("its XML has no <memory>")?)?;
        let boot_bytes = with_devices.checked_sub(device_bytes(root, |_| true)?);
        let period = balloon.and_then(|balloon| child(balloon, "stats")?.attribute("period"));
        Ok(Self {
            name: text("name")?,
            uuid: text("uuid")?,
            boot_bytes: boot_bytes.ok_or("its XML has more memory in devices than in all")?,
            plugged_bytes: device_bytes(root, |model| model == "dimm")?,
            has_statistics: period.is_some_and(|period| period.parse().is_ok_and(is_often_enough)),
            held: held(root),
            unusable: unusable(root, balloon),
        })
    }

    /// Checks that this domain has a balloon whose size says what its guest has.
    pub(super) fn check(&self) -> Result<(), Unusable> {
        self.unusable.clone().map_or(Ok(()), Err)
    }
}

fn devices<'a, 'input>(root: Node<'a, 'input>) -> impl Iterator<Item = Node<'a, 'input>> {
    let devices = child(root, "devices").into_iter().flat_map(|devices| devices.children());
    devices.filter(Node::is_element)
}

/// Returns the memory devices with their models.
fn memory_devices<'a, 'input>(root: Node<'a, 'input>) -> impl Iterator<Item = (&'a str, Node<'a, 'input>)> {
    let memory = devices(root).filter(|device| device.has_tag_name("memory"));
    memory.map(|device| (device.attribute("model").unwrap_or_default(), device))
}

/// Returns the sum of the sizes of the memory devices whose model `counts`.
fn device_bytes(root: Node<'_, '_>, counts: impl Fn(&str) -> bool) -> Result<u64, String> {
    let mut sum = 0_u64;
    for (_, device) in memory_devices(root).filter(|(model, _)| counts(model)) {
        let size = child(device, "target").and_then(|target| child(target, "size"));
        let size = bytes(size.ok_or("its XML has a memory device without a size")?)?;
        sum = sum.checked_add(size).ok_or("its XML has memory devices without end")?;
    }
    Ok(sum)
}

fn unusable(root: Node<'_, '_>, balloon: Option<Node<'_, '_>>) -> Option<Unusable> {
    // Libvirt adds what the guest has of it to the sizes that it tells, and not to those that it is told.
    if memory_devices(root).any(|(model, _)| model == "virtio-mem") {
        return Some(Unusable::Advised(plugged_memory("virtio-mem")));
    }
    let has_balloon = balloon.and_then(|balloon| balloon.attribute("model")).is_some_and(|model| model != "none");
    (!has_balloon).then(Unusable::no_balloon)
}

fn held(root: Node<'_, '_>) -> Option<String> {
    let passed = devices(root).find_map(|device| {
        let kind = device.attribute("type").unwrap_or_default();
        match (device.tag_name().name(), kind) {
            // Others, such as those of USB, do not reach the guest's memory by themselves.
            (name @ "hostdev", "pci" | "mdev") | (name @ "interface", "hostdev" | "vdpa") => {
                Some(passed_device(&format!("{name} {kind}")))
            }
            _ => None,
        }
    });
    let has = |name: &str| child(root, "memoryBacking").is_some_and(|backing| child(backing, name).is_some());
    let has_dimm = memory_devices(root).any(|(model, _)| model == "dimm");
    let is_locked = || "its guest's memory is locked (<locked/>), so a balloon would give nothing back".to_owned();
    let passed = passed.or_else(|| has_dimm.then(|| plugged_memory("dimm")));
    passed.or_else(|| has("hugepages").then(huge_pages)).or_else(|| has("locked").then(is_locked))
}

fn child<'a, 'input>(node: Node<'a, 'input>, name: &str) -> Option<Node<'a, 'input>> {
    node.children().find(|child| child.has_tag_name(name))
}

/// Returns a size with its unit.
fn bytes(node: Node<'_, '_>) -> Result<u64, String> {
    let text = node.text().unwrap_or_default().trim();
    let unit = match node.attribute("unit").unwrap_or("KiB") {
        "b" | "bytes" => 1,
        "k" | "KiB" => 1 << 10,
        "M" | "MiB" => 1 << 20,
        "G" | "GiB" => 1 << 30,
        unit => return Err(format!("its memory is in the unknown unit {}", unit.escape_debug())),
    };
    let number: Option<u64> = text.parse().ok();
    number.and_then(|number| number.checked_mul(unit)).ok_or_else(|| "its memory is no number".into())
}

/// What changes by itself.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Said {
    pub is_running: bool,
    pub actual_bytes: u64,
    pub told: Told,
}

/// Reads what `virsh domstats --state --balloon` prints. Its sizes are in KiB.
pub(super) fn state_and_statistics(text: &str) -> Result<Said, String> {
    let number = |key: &str| -> Option<u64> {
        let mut lines = text.lines().filter_map(|line| line.trim().split_once('='));
        lines.find(|(name, _)| *name == key)?.1.parse().ok()
    };
    let bytes = |key: &str| number(key).and_then(|kib| kib.checked_mul(1 << 10));
    Ok(Said {
        is_running: number("state.state") == Some(RUNNING),
        actual_bytes: bytes("balloon.current").ok_or("`virsh domstats` does not tell the size of its balloon")?,
        told: Told {
            at_s: number("balloon.last-update").unwrap_or_default(),
            major_faults: number("balloon.major_fault"),
            swapped_in_pages: number("balloon.swap_in").map(|kib| kib / PAGE_KIB),
            available_bytes: bytes("balloon.usable"),
        },
    })
}

/// Reads what `virsh domjobinfo` prints. Returns what libvirt is at work on, or `None` if that is nothing.
pub(super) fn job(text: &str) -> Option<String> {
    let of = |key: &str| {
        let mut lines = text.lines().filter_map(|line| line.split_once(':'));
        lines.find(|(name, _)| *name == key).map(|(_, value)| value.trim())
    };
    let operation = of("Operation").unwrap_or("unknown");
    (of("Job type") != Some("None")).then(|| format!("libvirt is at work on its guest (operation: {operation})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIMM: &str = "<memory model='dimm'><target><size unit='MiB'>256</size><node>0</node></target></memory>";

    /// Returns a domain with these elements.
    fn domain(elements: &str, devices: &str) -> Result<Domain, String> {
        let balloon = if devices.contains("memballoon") { "" } else { "<memballoon model='virtio'/>" };
        Domain::parse(&format!(
            "<domain type='kvm' id='3'>\n  <name>web1</name>\n  <uuid>4f-a</uuid>\n  <memory unit='KiB'>1048576</memory>\n  \
             <currentMemory unit='KiB'>524288</currentMemory>{elements}\n  <devices>{devices}{balloon}</devices>\n</domain>"
        ))
    }

    #[test]
    fn a_domain_is_read() {
        let with_period = |period: &str| {
            domain("", &format!("<memballoon model='virtio'><stats period='{period}'/></memballoon>")).unwrap()
        };
        let found = with_period("2");
        assert_eq!((found.name.as_str(), found.uuid.as_str(), found.boot_bytes), ("web1", "4f-a", 1 << 30));
        assert!(found.has_statistics && found.check().is_ok() && with_period("10").has_statistics);
        for period in ["0", "11", "300", "-1", "x"] {
            assert!(!with_period(period).has_statistics, "{period}");
        }
        assert!(!domain("", "").unwrap().has_statistics);
        for broken in
            ["", "<domain>", "<domain/>", "<domain><name>a</name></domain>", "<!DOCTYPE a [<!ENTITY b 'c'>]><a/>"]
        {
            assert!(Domain::parse(broken).is_err(), "{broken}");
        }
        let unit = "<domain><name>a</name><uuid>b</uuid><memory unit='x'>1</memory></domain>";
        assert!(Domain::parse(unit).unwrap_err().contains("unknown unit x"));
        assert!(Domain::parse(&unit.replace("'x'", "'GiB'").replace(">1<", ">18446744073709551615<")).is_err());
    }

    #[test]
    fn what_forbids_a_balloon_is_found() {
        for (elements, devices, why) in [
            ("", "<hostdev mode='subsystem' type='pci' managed='yes'/>", "passed to its guest (hostdev pci)"),
            ("", "<hostdev mode='subsystem' type='mdev'/>", "passed to its guest (hostdev mdev)"),
            ("", "<interface type='hostdev'/>", "passed to its guest (interface hostdev)"),
            ("", "<interface type='vdpa'/>", "passed to its guest (interface vdpa)"),
            ("<memoryBacking><hugepages/></memoryBacking>", "", "huge pages"),
            ("<memoryBacking><locked/></memoryBacking>", "", "locked"),
            ("", DIMM, "(dimm)"),
        ] {
            let found = domain(elements, devices).unwrap();
            assert!(found.held.as_ref().is_some_and(|text| text.contains(why)), "{found:?}");
            assert!(found.check().is_ok(), "it can get memory: {found:?}");
        }
        let virtio_mem = DIMM.replace("dimm", "virtio-mem");
        let both = format!("{DIMM}{virtio_mem}");
        for (devices, why) in [
            ("<memballoon model='none'/>", "has no balloon"),
            (virtio_mem.as_str(), "(virtio-mem)"),
            (both.as_str(), "(virtio-mem)"),
        ] {
            match domain("", devices).unwrap().check() {
                Err(Unusable::Advised(text)) => assert!(text.contains(why), "{text}"),
                other => panic!("{devices}: {other:?}"),
            }
        }
        let nvdimm = DIMM.replace("dimm", "nvdimm");
        let usable = ["<hostdev mode='subsystem' type='usb'/>", "<interface type='network'/>", nvdimm.as_str()];
        for devices in usable {
            let found = domain("<memoryBacking><access mode='shared'/></memoryBacking>", devices).unwrap();
            assert!(found.check().is_ok() && found.held.is_none(), "{found:?}");
        }
    }

    /// Libvirt counts all of it in `<memory>`, and DIMMs in what its balloon leaves and is told to leave.
    #[test]
    fn memory_that_was_plugged_in_is_not_that_at_boot() {
        let sizes = |devices: &str| domain("", devices).map(|domain| (domain.boot_bytes, domain.plugged_bytes));
        let (mib, nvdimm) = (1 << 20, DIMM.replace("dimm", "nvdimm"));
        assert_eq!(sizes(""), Ok((1024 * mib, 0)));
        assert_eq!(sizes(DIMM), Ok((768 * mib, 256 * mib)));
        assert_eq!(sizes(&nvdimm), Ok((768 * mib, 0)));
        assert_eq!(sizes(&format!("{nvdimm}{DIMM}{DIMM}")), Ok((256 * mib, 512 * mib)));
        assert!(sizes(&DIMM.repeat(5)).unwrap_err().contains("more memory in devices"));
        assert!(sizes("<memory model='dimm'><target/></memory>").unwrap_err().contains("without a size"));
    }

    #[test]
    fn a_job_of_libvirt_is_found() {
        assert_eq!(job("Job type:         None        \n"), None);
        let migrates =
            "Job type:         Unbounded   \nOperation:        Outgoing migration\nTime elapsed:     12  ms\n";
        assert!(job(migrates).unwrap().ends_with("(operation: Outgoing migration)"));
        for text in ["", "Job type: Failed", "Operation: None", "nonsense"] {
            assert!(job(text).is_some(), "{text}");
        }
    }

    #[test]
    fn statistics_are_read() {
        let text = "Domain: 'web1'\n  state.state=1\n  state.reason=1\n  balloon.current=524288\n  balloon.maximum=1048576\n  \
                    balloon.swap_in=8\n  balloon.major_fault=7\n  balloon.usable=1024\n  balloon.last-update=99\n";
        let told = Told { at_s: 99, major_faults: Some(7), swapped_in_pages: Some(2), available_bytes: Some(1 << 20) };
        assert_eq!(state_and_statistics(text), Ok(Said { is_running: true, actual_bytes: 512 << 20, told }));
        let paused = state_and_statistics("state.state=3\nballoon.current=1\n").unwrap();
        assert_eq!(paused, Said { is_running: false, actual_bytes: 1 << 10, told: Told::default() });
        for text in ["", "state.state=1", "balloon.current=x", "balloon.current=18446744073709551615"] {
            assert!(state_and_statistics(text).is_err(), "{text}");
        }
    }
}
