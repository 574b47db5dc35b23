//! `remoca xml`: the disks of a VM as libvirt wants them.

mod domain;

use crate::hypervisor::{self, Version};
use crate::output::{output, say};
use crate::settings::Folder;
use crate::vm::{FilesState, Vm};
use anyhow::{Result, bail};
use clap::Args;
use domain::{Host, Listing};
use std::io::Write;

/// Print the XML with which libvirt gives a guest its disks and its eviction port.
///
/// It fits the libvirt and the QEMU that are installed: what they would drop or refuse is left out, and a warning says what
/// that means. The first line belongs into <domain>, the others into <devices>; with --device, only one device is printed, for
/// `virsh attach-device`. The VM's process is asked if it runs; else its configuration is read, or the last good copy of it.
#[derive(Args, Debug)]
pub struct XmlArgs {
    /// Name of the VM process, or the path of its control socket
    #[arg(value_name = "NAME")]
    name: String,

    /// Print only the disk of this name; the eviction port is `remoca-port`
    #[arg(long, value_name = "DISK")]
    device: Option<String>,

    /// Name that libvirt gives to the first of these disks, which the others follow, or to that of --device [default: vda; with --device
    /// the name that it has among all]
    #[arg(long, value_name = "DEV", value_parser = domain::parse_target)]
    target: Option<u8>,

    /// Version of libvirt [default: that of virsh]
    #[arg(long, value_name = "VERSION")]
    libvirt: Option<Version>,

    /// Version of QEMU [default: the one that is installed]
    #[arg(long, value_name = "VERSION")]
    qemu: Option<Version>,

    #[command(flatten)]
    folder: Folder,
}

/// Runs the subcommand.
///
/// # Errors
/// If there is no such VM or disk, or libvirt cannot express one of its disks.
pub fn run(args: &XmlArgs) -> Result<()> {
    let vm = Vm::find(&args.name, &args.folder.config)?;
    let host = Host { libvirt: args.libvirt.or_else(hypervisor::libvirt), qemu: args.qemu.or_else(hypervisor::qemu) };
    let wanted = args.device.as_deref();
    let mut listing = Listing::of(&vm, host, wanted, args.target)?;
    if let Some(wanted) = wanted {
        listing.memory_backing = None;
        if listing.devices.is_empty() {
            bail!("{} has no disk `{wanted}`: it has {}", args.name, domain::names(&vm).join(", "));
        }
    }
    match &vm.files {
        FilesState::None | FilesState::InEffect => {}
        FilesState::Pending { changes, refusal } => {
            let refused = refusal.as_ref().map(|why| format!(" would be refused: {why:#}")).unwrap_or_default();
            let (name, changes) = (&args.name, changes.join("; "));
            listing.warn(&format!("without what is not in effect yet (`remoca upgrade {name}`{refused}): {changes}"));
        }
        FilesState::Unusable(error) => {
            listing.warn(&format!("this is by the last good copy of the configuration, for {error}"));
        }
    }
    for warning in &listing.warnings {
        say(format_args!("warning: {warning}"));
    }
    Ok(write!(output(), "{listing}")?)
}
