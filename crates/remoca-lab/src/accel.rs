//! How the guest's processors run: by KVM where it works, else by QEMU's software emulation (TCG).

use std::{
    fs::{self, File},
    process::Stdio,
    sync::OnceLock,
    time::Duration,
};

use crate::{
    console::{Console, Waited},
    error::{Context, Result},
    image::Image,
    lab::{Lab, progress},
    service,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accelerator {
    Kvm,
    Tcg,
}

impl Accelerator {
    /// Returns the accelerator that works on this machine. Tested once per boot of the machine.
    pub fn of_this_machine(lab: &Lab, image: &Image) -> Result<Accelerator> {
        static FOUND: OnceLock<Accelerator> = OnceLock::new();
        if let Some(&found) = FOUND.get() {
            return Ok(found);
        }
        let found = if kvm_works_remembered(lab, image)? { Accelerator::Kvm } else { Accelerator::Tcg };
        Ok(*FOUND.get_or_init(|| found))
    }

    pub fn qemu_args(self) -> [&'static str; 4] {
        match self {
            Accelerator::Kvm => ["-accel", "kvm", "-cpu", "host"],
            Accelerator::Tcg => ["-accel", "tcg", "-cpu", "max"],
        }
    }
}

fn kvm_works_remembered(lab: &Lab, image: &Image) -> Result<bool> {
    if File::options().read(true).write(true).open("/dev/kvm").is_err() {
        return Ok(false);
    }
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let path = lab.cache().join("kvm");
    let (yes, no) = (format!("{} works\n", boot.trim()), format!("{} does not work\n", boot.trim()));
    match fs::read_to_string(&path) {
        Ok(text) if text == yes => return Ok(true),
        Ok(text) if text == no => return Ok(false),
        _ => {}
    }
    let works = kvm_boots_a_kernel(lab, image)?;
    if !works {
        progress("/dev/kvm is here but cannot boot a guest; using software emulation");
    }
    fs::write(&path, if works { yes } else { no }).context_path("writing", &path)?;
    Ok(works)
}

/// Boots the kernel without a disk, and waits for its first program. Returns whether that succeeded.
///
/// No simpler test is reliable. On some machines, /dev/kvm opens, creates virtual machines and runs the firmware, but
/// then QEMU fails to set a register, or the kernel hangs on its way to protected mode.
fn kvm_boots_a_kernel(lab: &Lab, image: &Image) -> Result<bool> {
    let mut command = service::tool("qemu-system-x86_64");
    command
        .args(Accelerator::Kvm.qemu_args())
        .args(["-machine", "q35", "-smp", "2", "-m", "128", "-nodefaults", "-display", "none", "-no-reboot"])
        .args(["-serial", "stdio", "-append", "console=ttyS0 quiet panic=-1 lab.probe"])
        .arg("-kernel")
        .arg(image.kernel())
        .arg("-initrd")
        .arg(image.initramfs())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let mut child = service::spawn(command)?;
    let Some(stdout) = child.stdout.take() else { return Ok(false) };
    let console = Console::capture(stdout, &lab.cache().join("kvm-probe.log"))?;
    let waited = console.wait_for("lab: probe done", Duration::from_secs(10));
    // QEMU may have ended already.
    let _ = child.kill();
    child.wait().context("waiting for QEMU")?;
    Ok(matches!(waited, Waited::Found(_)))
}
