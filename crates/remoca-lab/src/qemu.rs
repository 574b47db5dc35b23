//! QEMU's command line for a guest.

use std::{
    os::{
        fd::{AsRawFd, BorrowedFd},
        unix::{net::UnixStream, process::CommandExt},
    },
    path::Path,
    process::{Command, Stdio},
    sync::OnceLock,
};

use rustix::io::{FdFlags, fcntl_setfd};

use crate::{
    accel::Accelerator,
    clock,
    guest::{Disk, DiskSource, GuestConfig, Parts},
    service,
};

/// `tsc=reliable`: under emulation the kernel would distrust its clock without reason. `panic=-1`: the guest ends at a
/// panic.
const KERNEL_ARGS: &str = "console=ttyS0 quiet panic=-1 tsc=reliable";

const QEMU: &str = "qemu-system-x86_64";

/// Builds the command. QEMU inherits its ends of the two sockets. So there is no socket file that must be removed,
/// waited for, or given a short name.
pub(crate) fn command(parts: &Parts, port: &UnixStream, monitor: &UnixStream) -> Command {
    let Parts { config, image, accelerator, root, payload } = parts;
    let mut command = match &config.name_space {
        None => service::tool(QEMU),
        Some(name) => {
            let mut command = service::tool("ip");
            command.args(["netns", "exec", name, QEMU]);
            command
        }
    };
    let memory = config.memory_mib;
    command
        .args(accelerator.qemu_args())
        .args(["-nodefaults", "-display", "none", "-m", &memory.to_string(), "-smp", &config.smp.to_string()])
        // A vhost-user back end maps the guest's memory, so it is shared.
        .arg("-object")
        .arg(format!("memory-backend-memfd,id=mem,size={memory}M,share=on"))
        .args(["-machine", "q35,memory-backend=mem", "-serial", "stdio"])
        .arg("-kernel")
        .arg(image.kernel())
        .arg("-initrd")
        .arg(image.initramfs())
        .args(["-append", &kernel_command_line(config, *accelerator)])
        .arg("-chardev")
        .arg(format!("socket,id=port,fd={}", port.as_raw_fd()))
        .args(["-device", "virtio-serial-pci", "-device", "virtserialport,chardev=port,name=lab"])
        .arg("-chardev")
        .arg(format!("socket,id=monitor,fd={}", monitor.as_raw_fd()))
        .args(["-mon", "chardev=monitor,mode=control"]);
    if config.balloon {
        command.args(["-device", "virtio-balloon-pci"]);
    }
    if let Some(path) = &config.monitor {
        command.arg("-qmp").arg(format!("unix:{},server=on,wait=off", escaped(path)));
    }
    if config.count_instructions {
        command.args(["-icount", "shift=0,sleep=on"]);
    }
    if !config.may_reboot {
        command.arg("-no-reboot");
    }
    let payload = DiskSource::File { path: payload.clone(), read_only: true, snapshot: false };
    let own = [("lab-root", root.clone()), ("lab-payload", payload)];
    let own = own.map(|(serial, source)| Disk { serial: serial.to_owned(), source });
    for (index, disk) in own.iter().chain(&config.disks).enumerate() {
        command.args(disk_args(index, disk));
    }
    command.args(&config.qemu_args).stdin(Stdio::null()).stdout(Stdio::piped());
    inherit(&mut command, [port.as_raw_fd(), monitor.as_raw_fd()]);
    command
}

pub(crate) fn kernel_command_line(config: &GuestConfig, accelerator: Accelerator) -> String {
    let clock = match accelerator {
        Accelerator::Kvm => None,
        Accelerator::Tcg if config.count_instructions => Some(clock::INSTRUCTION_KHZ),
        Accelerator::Tcg => Some(clock::tick_khz()),
    };
    let clock = clock.map(|khz| format!("tsc_early_khz={khz}"));
    clock.iter().chain(&config.kernel_args).fold(KERNEL_ARGS.to_owned(), |line, argument| line + " " + argument)
}

/// Returns a disk whose changes are lost when its QEMU ends.
pub(crate) fn throw_away(path: &Path) -> DiskSource {
    DiskSource::File { path: path.to_owned(), read_only: false, snapshot: true }
}

fn disk_args(index: usize, disk: &Disk) -> Vec<String> {
    let serial = &disk.serial;
    match &disk.source {
        DiskSource::File { path, read_only, snapshot } => {
            let (read_only, snapshot) = (on_off(*read_only), on_off(*snapshot));
            let path = escaped(path);
            vec![
                "-drive".into(),
                format!(
                    "if=none,id=disk{index},file={path},format=raw,discard=unmap,snapshot={snapshot},readonly={read_only}"
                ),
                "-device".into(),
                format!("virtio-blk-pci,drive=disk{index},serial={serial}"),
            ]
        }
        DiskSource::Layer { path } => {
            let path = escaped(path);
            vec![
                "-drive".into(),
                format!("if=none,id=disk{index},file={path},format=qcow2"),
                "-device".into(),
                format!("virtio-blk-pci,drive=disk{index},serial={serial}"),
            ]
        }
        DiskSource::VhostUser { socket, queue_count, queue_size, reconnect } => {
            let reconnect = if *reconnect { reconnect_option() } else { "" };
            let socket = escaped(socket);
            vec![
                "-chardev".into(),
                format!("socket,id=char{index},path={socket}{reconnect}"),
                "-device".into(),
                format!("vhost-user-blk-pci,chardev=char{index},num-queues={queue_count},queue-size={queue_size}"),
            ]
        }
    }
}

/// Returns the option that sets how often QEMU tries to reconnect to a lost back end: every 100 ms, or every second
/// before QEMU 9.2.
fn reconnect_option() -> &'static str {
    static OPTION: OnceLock<&str> = OnceLock::new();
    OPTION.get_or_init(|| {
        let said = service::tool(QEMU).arg("--version").output().map(|output| output.stdout).unwrap_or_default();
        match version(&String::from_utf8_lossy(&said)) {
            Some(version) if version >= (9, 2) => ",reconnect-ms=100",
            _ => ",reconnect=1",
        }
    })
}

/// Parses the major and minor number from `QEMU emulator version 10.0.2 (...)`. Returns `None` if there are none.
fn version(said: &str) -> Option<(u32, u32)> {
    let mut numbers = said.split_once("version ")?.1.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// Doubles commas, as QEMU's options require.
fn escaped(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

fn on_off(value: bool) -> &'static str {
    if value { "on" } else { "off" }
}

/// Makes the child inherit these descriptors, under the same numbers.
fn inherit(command: &mut Command, descriptors: [i32; 2]) {
    let keep = move || {
        for descriptor in descriptors {
            // SAFETY: the caller holds both sockets open until the child has been started.
            let descriptor = unsafe { BorrowedFd::borrow_raw(descriptor) };
            fcntl_setfd(descriptor, FdFlags::empty())?;
        }
        Ok(())
    };
    // SAFETY: the closure runs between fork and exec and makes two system calls; it allocates nothing, takes no lock.
    unsafe { command.pre_exec(keep) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read() {
        assert_eq!(version("QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2)\nCopyright"), Some((10, 0)));
        assert_eq!(version("QEMU emulator version 7.2.19"), Some((7, 2)));
        assert_eq!(version("qemu: no such file"), None);
    }
}
