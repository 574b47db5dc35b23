//! A guest of the laboratory as a domain of libvirt.

use std::{fs::File, os::unix::fs::symlink, path::Path, time::Instant};

use super::{Libvirt, Virsh, plug};
use crate::{
    accel::Accelerator,
    channel::Channel,
    console::Console,
    error::{Context, Error, Result},
    guest::{DiskSource, Guest, GuestConfig, Parts},
    lab::Lab,
    machine::Machine,
    migration, qemu,
};

/// Parts of the domain's XML that a test adds, as the documentation has them.
#[derive(Clone, Debug, Default)]
pub struct DomainXml {
    /// `<memoryBacking>`, if the guest's memory is shared.
    pub memory_backing: String,
    /// Elements of `<devices>`.
    pub devices: String,
    /// Whether DIMMs may be plugged in, for which libvirt wants slots and a NUMA node.
    pub has_slots: bool,
}

/// A domain that was started. Its name is that of the guest.
#[derive(Debug)]
pub(crate) struct Domain {
    virsh: Virsh,
    name: String,
}

impl Domain {
    pub(crate) fn has_ended(&self) -> Result<bool> {
        Ok(self.virsh.run(&["domstate", &self.name])?.trim() == "shut off")
    }

    pub(crate) fn kill(&self) -> Result<()> {
        if self.has_ended()? {
            return Ok(());
        }
        self.virsh.run(&["destroy", &self.name]).map(drop)
    }

    pub(crate) fn forget(&self) {
        let _ = self.kill();
        // The daemon ends with its test; this is for the next guest of the same name.
        let _ = self.virsh.run(&["undefine", "--managed-save", &self.name]);
    }
}

impl GuestConfig {
    /// Defines the guest as a domain of this libvirt, starts it, and waits until it accepts jobs. Its disks are those
    /// of `xml`; the configured ones are for guests without libvirt.
    pub fn boot_under(self, lab: &Lab, libvirt: &Libvirt, xml: &DomainXml) -> Result<Guest> {
        let (mut parts, folder, lock) = self.prepare(lab)?;
        parts.root = migration::own_root(&parts.image, &folder)?;
        let name = parts.config.name.clone();
        let log = libvirt.qemu_log(&name);
        symlink(&log, folder.join("qemu.log")).context_path("linking to", &log)?;
        // A path in a folder of the project may be too long for a socket.
        let sockets = ["console", "port"].map(|kind| libvirt.folder.path().join(format!("{name}-{kind}.sock")));
        let jobs_log = File::create(folder.join("jobs.log")).context_path("creating a log in", &folder)?;
        let console = Console::capture(plug::open(&sockets[0])?, &folder.join("console.log"))?;
        let channel = Channel::open(plug::open(&sockets[1])?, jobs_log).context("opening the guest's port")?;

        let started = Instant::now();
        libvirt.virsh_with(&["define"], &domain(&parts, &sockets[0], &sockets[1], xml)?, &[])?;
        let machine = Machine::Domain(Domain { virsh: libvirt.virsh.clone(), name: name.clone() });
        let boot_limit = parts.config.boot_limit;
        let guest = Guest {
            console,
            channel,
            monitor: None,
            relay: None,
            name,
            folder,
            machine,
            started,
            parts,
            qemu_count: 1,
            _lock: lock,
        };
        libvirt.virsh(&["start", &guest.name])?;
        guest.wait_for_boot(0, boot_limit)
    }
}

impl Guest {
    /// Makes the guest one of another libvirt, to which it has moved.
    pub fn moved_to(&mut self, libvirt: &Libvirt) {
        self.machine = Machine::Domain(Domain { virsh: libvirt.virsh.clone(), name: self.name.clone() });
    }
}

/// Returns the XML of the whole domain.
fn domain(parts: &Parts, console: &Path, port: &Path, xml: &DomainXml) -> Result<String> {
    let Parts { config, image, accelerator, root, payload } = parts;
    let DiskSource::Layer { path: root } = root else {
        return Err(Error::Invalid("a domain's root is a layer of its own".into()));
    };
    let (kind, cpu) = match accelerator {
        Accelerator::Kvm => ("kvm", "host-passthrough"),
        Accelerator::Tcg => ("qemu", "maximum"),
    };
    let command_line = qemu::kernel_command_line(config, *accelerator);
    let [root, payload, kernel, initramfs, console, port] =
        [root, payload, &image.kernel(), &image.initramfs(), console, port].map(|path| escaped(&path.display()));
    let DomainXml { memory_backing, devices, has_slots } = xml;
    let (memory_mib, smp) = (config.memory_mib, config.smp);
    let (most, numa) = match has_slots {
        false => Default::default(),
        true => (
            format!("<maxMemory slots='2' unit='MiB'>{}</maxMemory>", memory_mib + 1024),
            format!("<numa><cell id='0' cpus='0-{}' memory='{memory_mib}' unit='MiB'/></numa>", smp - 1),
        ),
    };
    let balloon = if config.balloon { "virtio" } else { "none" };
    let slots = "<controller type='pci' model='pcie-root-port'/>".repeat(12);
    Ok(format!(
        "<domain type='{kind}'>
  <name>{}</name>
  {most}
  <memory unit='MiB'>{memory_mib}</memory>
  <vcpu>{smp}</vcpu>
  {memory_backing}
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
    <kernel>{kernel}</kernel>
    <initrd>{initramfs}</initrd>
    <cmdline>{}</cmdline>
  </os>
  <features><acpi/></features>
  <cpu mode='{cpu}'>{numa}</cpu>
  <devices>
    <controller type='usb' model='none'/>
    <controller type='pci' index='0' model='pcie-root'/>{slots}
    <memballoon model='{balloon}'/>
    <serial type='unix'><source mode='connect' path='{console}'/></serial>
    <channel type='unix'><source mode='connect' path='{port}'/><target type='virtio' name='lab'/></channel>
    <disk type='file'>
      <driver name='qemu' type='qcow2'/><source file='{root}'/><target dev='vdy' bus='virtio'/><serial>lab-root</serial>
    </disk>
    <disk type='file'>
      <driver name='qemu' type='raw'/><source file='{payload}'/><target dev='vdz' bus='virtio'/><readonly/>
      <serial>lab-payload</serial>
    </disk>
    {devices}
  </devices>
</domain>",
        config.name,
        escaped(&command_line),
    ))
}

fn escaped(text: &dyn std::fmt::Display) -> String {
    text.to_string().replace('&', "&amp;").replace('<', "&lt;")
}
