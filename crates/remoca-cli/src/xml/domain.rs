//! The elements of a domain, and what each version of libvirt and QEMU makes of them.

use crate::hypervisor::Version;
use crate::vm::Vm;
use anyhow::{Context, Result, bail};
use remoca_disk::start::{Address, PortOptions};
use remoca_io::address::Endpoint;
use remoca_protocol::port::PORT_SERIAL;
use std::fmt;

/// First libvirt with `<disk type='vhostuser'>`.
const VHOST_USER: Version = Version(7, 1);
/// First libvirt that passes `<reconnect delay>` of an NBD disk on.
const NBD_RECONNECT: Version = Version(9, 2);
/// First QEMU without `reconnect`, and first libvirt that is sure to say `reconnect-ms` instead.
const ONLY_MILLISECONDS: (Version, Version) = (Version(10, 2), Version(10, 10));

const MEMORY_BACKING: &str = "<memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>";

/// Programs of a host; `None` is taken for a current version.
#[derive(Clone, Copy, Debug)]
pub struct Host {
    pub libvirt: Option<Version>,
    pub qemu: Option<Version>,
}

impl Host {
    fn has(self, libvirt: Version) -> bool {
        self.libvirt.is_none_or(|version| version >= libvirt)
    }

    /// Returns whether a domain's vhost-user disk reconnects; else its QEMU would not start with such an option.
    fn reconnects(self) -> bool {
        let (qemu, libvirt) = ONLY_MILLISECONDS;
        self.qemu.is_none_or(|version| version < qemu) || self.has(libvirt)
    }
}

/// XML of all devices of one VM.
pub struct Listing {
    /// Element of `<domain>`, if any device needs the guest's memory.
    pub memory_backing: Option<&'static str>,
    /// Elements of `<devices>`, with their names.
    pub devices: Vec<(String, String)>,
    /// What the operator should know.
    pub warnings: Vec<String>,
}

impl fmt::Display for Listing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(element) = self.memory_backing {
            writeln!(f, "{element}")?;
        }
        self.devices.iter().try_for_each(|(_, device)| f.write_str(device))
    }
}

impl Listing {
    /// Returns the XML of a VM for this host, or of its disk `wanted` alone. The first disk is the `target`-th of the bus; so is `wanted`,
    /// which otherwise has the place that it has among all.
    ///
    /// # Errors
    /// If libvirt cannot express one of the disks.
    pub fn of(vm: &Vm, host: Host, wanted: Option<&str>, target: Option<u8>) -> Result<Self> {
        let mut listing = Self { memory_backing: None, devices: Vec::new(), warnings: Vec::new() };
        let names = names(vm);
        let is_wanted = |name: &str| wanted.is_none_or(|wanted| wanted == name);
        let target_of = |name: &str| {
            let is_given = wanted.is_some() && target.is_some();
            let before = if is_given { 0 } else { names.iter().take_while(|other| *other != name).count() };
            let number = (target.unwrap_or(0)..26).nth(before);
            number.map(target_name).context("too many disks for names from vda to vdz")
        };
        for (name, disk) in vm.disks().filter(|(name, _)| is_wanted(name)) {
            let device = match &disk.socket {
                Some(socket) => listing.vhost(&socket.display().to_string(), &target_of(&name)?, host)?,
                None => listing.nbd(vm, &name, disk.read_only, &target_of(&name)?, host)?,
            };
            listing.devices.push((name, device));
        }
        if is_wanted(PORT_SERIAL) {
            let target = || target_of(PORT_SERIAL);
            let port = match &vm.options.port {
                PortOptions::None => None,
                PortOptions::Socket(socket) => Some(listing.vhost(&socket.display().to_string(), &target()?, host)?),
                PortOptions::NbdExport => Some(listing.nbd(vm, PORT_SERIAL, false, &target()?, host)?),
            };
            listing.devices.extend(port.map(|port| (PORT_SERIAL.to_owned(), port)));
        }
        if host.libvirt.is_none() {
            listing.warn(
                "virsh was not found, so this is for libvirt 10.0 and later: name another version with --libvirt",
            );
        }
        Ok(listing)
    }

    /// Adds something that the operator should know.
    pub fn warn(&mut self, text: &str) {
        if !self.warnings.iter().any(|warning| warning == text) {
            self.warnings.push(text.to_owned());
        }
    }

    /// Returns a disk or the port behind a vhost-user socket.
    fn vhost(&mut self, socket: &str, target: &str, host: Host) -> Result<String> {
        if !host.has(VHOST_USER) {
            bail!(
                "libvirt before {VHOST_USER} has no vhost-user disks: offer the disks over NBD (--nbd), or upgrade libvirt"
            );
        }
        self.memory_backing = Some(MEMORY_BACKING);
        let source = if host.reconnects() {
            format!("<source type='unix' path={}><reconnect enabled='yes' timeout='1'/></source>", quoted(socket))
        } else {
            self.warn(
                "this libvirt cannot make this QEMU reconnect to a vhost-user disk: after a kill of the VM process the guest \
                 hangs until `virsh reset`; an upgrade is safe. libvirt 10.10 and later can",
            );
            format!("<source type='unix' path={}/>", quoted(socket))
        };
        Ok(format!(
            "<disk type='vhostuser' device='disk'>\n  <driver name='qemu' type='raw'/>\n  {source}\n  \
             <target dev='{target}' bus='virtio'/>\n</disk>\n"
        ))
    }

    /// Returns a disk or the port that is an NBD export.
    fn nbd(&mut self, vm: &Vm, export: &str, read_only: bool, target: &str, host: Host) -> Result<String> {
        let address = vm.options.nbd.iter().find_map(|address| match address {
            Address::Endpoint(Endpoint::Unix(path)) => {
                Some(format!("<host transport='unix' socket={}/>", quoted(&path.display().to_string())))
            }
            Address::Endpoint(Endpoint::Tcp(address)) => {
                let (name, port) = address.rsplit_once(':')?;
                let name = name.trim_start_matches('[').trim_end_matches(']');
                Some(format!("<host name={} port='{port}'/>", quoted(name)))
            }
            Address::Endpoint(Endpoint::Local(_)) | Address::Systemd => None,
        });
        let Some(address) = address else {
            bail!(
                "the disk `{export}` is offered at sockets that systemd passes, whose addresses are in the .socket unit"
            );
        };
        let reconnect = if host.has(NBD_RECONNECT) {
            "<reconnect delay='60'/>"
        } else {
            self.warn(
                "libvirt before 9.2 does not let an NBD disk reconnect: a kill of the VM process gives the guest I/O errors; an \
                 upgrade is safe. Use vhost-user if the guest runs on this host",
            );
            ""
        };
        let is_port = export == PORT_SERIAL;
        let discard = if is_port || read_only { "" } else { " discard='unmap'" };
        let serial = if is_port { format!("  <serial>{PORT_SERIAL}</serial>\n") } else { String::new() };
        let read_only = if read_only { "  <readonly/>\n" } else { "" };
        Ok(format!(
            "<disk type='network' device='disk'>\n  <driver name='qemu' type='raw'{discard}/>\n  \
             <source protocol='nbd' name={}>\n    {address}{reconnect}\n  </source>\n  \
             <target dev='{target}' bus='virtio'/>\n{read_only}{serial}</disk>\n",
            quoted(export)
        ))
    }
}

/// Returns the names of the disks of a VM, and of its port if it has one.
pub fn names(vm: &Vm) -> Vec<String> {
    let has_port = !matches!(vm.options.port, PortOptions::None);
    vm.disks().map(|(name, _)| name).chain(has_port.then(|| PORT_SERIAL.to_owned())).collect()
}

/// Returns the number of a disk's name on the virtio bus, from 0 for `vda` to 25 for `vdz`.
pub fn parse_target(text: &str) -> Result<u8, String> {
    match text.strip_prefix("vd").map(str::as_bytes) {
        Some([letter @ b'a'..=b'z']) => Ok(letter - b'a'),
        _ => Err("a disk is one of vda to vdz".into()),
    }
}

fn target_name(number: u8) -> String {
    format!("vd{}", char::from(b'a' + number))
}

/// Returns an attribute's value.
fn quoted(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('\'', "&apos;");
    format!("'{text}'")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk;
    use crate::settings::Files;
    use crate::vm::FilesState;
    use std::ffi::OsString;

    const CURRENT: Host = Host { libvirt: Some(Version(11, 3)), qemu: Some(Version(10, 2)) };

    fn listing(words: &str, host: Host) -> Result<Listing> {
        Listing::of(&vm(words)?, host, None, None)
    }

    fn vm(words: &str) -> Result<Vm> {
        let words: Vec<_> = words.split(' ').map(OsString::from).collect();
        Ok(Vm {
            options: disk::options_of(&Files::default(), &words, std::path::Path::new("/c"))?,
            running: None,
            files: FilesState::None,
        })
    }

    fn host(libvirt: Version, qemu: Version) -> Host {
        Host { libvirt: Some(libvirt), qemu: Some(qemu) }
    }

    const VHOST: &str = "--control /c --disk image=/a,socket=/it's<.sock,name=root --port /p";
    const NBD: &str = "--control /c --disk image=/a,name=root --disk image=/b,read-only --nbd unix:/n --nbd-port";

    #[test]
    fn what_a_version_would_drop_is_left_out_with_a_warning() {
        for (versions, reconnects, warns) in [
            (CURRENT, true, false),
            (host(Version(9, 0), Version(7, 2)), true, false),
            (host(Version(10, 0), Version(10, 2)), false, true),
            (Host { libvirt: None, qemu: None }, true, true),
        ] {
            let found = listing(VHOST, versions).unwrap();
            assert_eq!(
                found.to_string().matches("<reconnect enabled='yes' timeout='1'/>").count(),
                2 * usize::from(reconnects)
            );
            assert_eq!(found.warnings.len(), usize::from(warns), "{:?}", found.warnings);
        }
        for (libvirt, count) in [(Version(9, 0), 0), (Version(9, 2), 3)] {
            let found = listing(NBD, host(libvirt, Version(8, 0))).unwrap();
            assert_eq!(found.to_string().matches("<reconnect delay='60'/>").count(), count);
            assert_eq!(found.warnings.len(), usize::from(count == 0));
        }
        let error = listing(VHOST, host(Version(7, 0), Version(5, 2))).map(drop).unwrap_err();
        assert!(error.to_string().contains("over NBD"), "{error}");
    }

    #[test]
    fn names_are_quoted_and_disks_are_named_in_turn() {
        let text = listing(VHOST, CURRENT).unwrap().to_string();
        assert!(text.starts_with(MEMORY_BACKING) && text.contains("path='/it&apos;s&lt;.sock'"), "{text}");
        let text = listing(NBD, CURRENT).unwrap().to_string();
        assert!(!text.contains("memoryBacking"));
        for part in
            ["name='root'", "name='disk1'", "dev='vda'", "dev='vdb'", "dev='vdc'", "<readonly/>", "<serial>remoca-port"]
        {
            assert_eq!(text.matches(part).count(), 1, "{part} in {text}");
        }
        let tcp = listing("--control /c --disk image=/a --nbd tcp:[::1]:10809", CURRENT).unwrap().to_string();
        assert!(tcp.contains("<host name='::1' port='10809'/>"), "{tcp}");
        let error = listing("--control /c --disk image=/a --nbd systemd", CURRENT).map(drop).unwrap_err();
        assert!(error.to_string().contains(".socket unit"), "{error}");
    }

    #[test]
    fn a_disk_alone_has_the_wanted_name() {
        let vm = vm(NBD).unwrap();
        let targets = |wanted: Option<&str>, target: Option<u8>| -> Result<Vec<String>> {
            let text = Listing::of(&vm, CURRENT, wanted, target)?.to_string();
            let lines = text.lines().filter_map(|line| line.trim().strip_prefix("<target dev='"));
            Ok(lines.map(|rest| rest[..3].to_owned()).collect())
        };
        for name in ["root", "disk1", PORT_SERIAL] {
            assert_eq!(targets(Some(name), Some(25)).unwrap(), ["vdz"], "{name}");
        }
        assert_eq!(targets(Some("disk1"), None).unwrap(), ["vdb"]);
        assert_eq!(targets(Some("disk2"), None).unwrap(), [""; 0]);
        assert_eq!(targets(None, Some(3)).unwrap(), ["vdd", "vde", "vdf"]);
        let error = targets(None, Some(24)).unwrap_err();
        assert!(error.to_string().contains("too many disks"), "{error}");
    }

    #[test]
    fn the_first_disk_has_the_wanted_name() {
        assert_eq!((parse_target("vda"), parse_target("vdz")), (Ok(0), Ok(25)));
        assert!(["", "vd", "sda", "vdA", "vdab"].iter().all(|bad| parse_target(bad).is_err()));
    }
}
