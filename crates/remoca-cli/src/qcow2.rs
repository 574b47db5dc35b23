//! `remoca qcow2`: becomes the qemu-nbd that serves a VM's qcow2 image to its VM process. The unit `remoca-qcow2@` starts it.

use crate::disk;
use crate::runtime;
use crate::settings::kept::Kept;
use crate::settings::{Files, Folder, vm_path};
use anyhow::{Context, Result};
use clap::Args;
use remoca_disk::start::WrongOptions;
use remoca_io::control::left;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Serve the qcow2 image of one VM to its VM process, by qemu-nbd. Used by the unit remoca-qcow2@NAME
///
/// The image is that of the disk with `format = "qcow2"` in vms/NAME.toml.
#[derive(Args, Debug)]
pub struct Qcow2Args {
    /// Name of the VM
    #[arg(value_name = "NAME")]
    name: String,

    /// Socket at which qemu-nbd listens [default: NAME.qcow2.sock beside the control socket]
    #[arg(long, value_name = "PATH", hide = true)]
    socket: Option<PathBuf>,

    #[command(flatten)]
    folder: Folder,
}

/// Runs the subcommand. Does not return if qemu-nbd can be started.
///
/// # Errors
/// If the configuration cannot be used or has no such disk, or there is no qemu-nbd.
pub fn run(args: &Qcow2Args) -> Result<()> {
    let Qcow2Args { name, folder, .. } = args;
    let control = match &args.socket {
        Some(socket) => runtime::socket_in(socket.parent().unwrap_or(Path::new(".")), name),
        None => runtime::socket_of(name, "give --socket PATH")?,
    };
    // While the VM's process runs, or was killed, its guest has the image that this process began with. One that ends in good
    // order removes its socket. Without a file of the VM, its process will have that image as well.
    let goes_on = control.exists() || left::is_there(&control) || !vm_path(&folder.config, name).exists();
    let kept = goes_on.then(|| Kept::read(&Kept::beside(&control))).flatten();
    let image = match kept.and_then(|kept| image_in(&kept.files, name).ok().flatten()) {
        Some(image) => image,
        None => {
            let files = Files::read(&folder.config, Some(name))?;
            image_in(&files, name)?.ok_or_else(|| no_image(&files, name, &vm_path(&folder.config, name)))?
        }
    };
    let socket = args.socket.clone().unwrap_or_else(|| disk::qcow2_socket(&control, name));
    // One client at a time: a new one is served when the requests of the former are done.
    let mut server = Command::new("qemu-nbd");
    server.args(["--persistent", "--format=qcow2", "--cache=none", "--discard=unmap"]).arg("--socket").arg(socket);
    let error = server.arg("--").arg(image).exec();
    Err(error).context("qemu-nbd cannot be started: install it (Debian: qemu-utils)")
}

/// Returns the error of files in which the VM `name` has no qcow2 image. `path` is that of the VM's file.
fn no_image(files: &Files, name: &str, path: &Path) -> anyhow::Error {
    let path = path.display();
    let text = match files.vm {
        Some(_) => format!("no disk of {name} has format = \"qcow2\" in {path}"),
        None => format!("there is no {path}: write that file, or correct the name or --config"),
    };
    anyhow::Error::msg(text).context(WrongOptions)
}

/// Returns the path of the VM's qcow2 image, or `None` if these files have none.
fn image_in(files: &Files, name: &str) -> Result<Option<String>> {
    let words = [OsString::from("--name"), name.into()];
    let disks = disk::configured(files, &words)?.disks();
    Ok(disks.into_iter().find(|disk| disk.is_qcow2).map(|disk| disk.image))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::file::Text;

    #[test]
    fn a_vm_without_a_file_is_not_one_without_a_qcow2_image() {
        let said = |files: &Files| format!("{:#}", no_image(files, "web1", Path::new("/etc/web1.toml")));
        assert!(said(&Files::default()).contains("there is no /etc/web1.toml"), "{}", said(&Files::default()));
        let vm = Some(Text { path: "/etc/web1.toml".into(), text: String::new() });
        let said = said(&Files { vm, host: None });
        assert!(said.contains("no disk of web1 has format = \"qcow2\" in /etc/web1.toml"), "{said}");
    }
}
