//! Disks whose images are in the qcow2 format: `remoca qcow2` serves them, and the VM process is its client.

use anyhow::Result;
use remoca_disk::start::{DiskOptions, WrongOptions};
use remoca_io::socket::{PATH_BYTES_MAX, SocketError};
use remoca_store::OnLostConnection;
use std::path::{Path, PathBuf};

/// Returns the socket at which the qcow2 image of the VM `name` is served. `control` is the control socket of its process.
pub fn socket(control: &Path, name: &str) -> PathBuf {
    control.with_file_name(format!("{name}.qcow2.sock"))
}

/// Has the disk with a qcow2 image use what the unit remoca-qcow2@ serves.
///
/// # Errors
/// If there are several: the unit serves one. If its socket would have too long a path.
pub fn redirect(disks: &mut [DiskOptions], control: &Path, name: &str) -> Result<()> {
    let mut images = disks.iter_mut().filter(|disk| disk.is_qcow2);
    if let Some(disk) = images.next() {
        let path = socket(control, name);
        let length = path.as_os_str().len();
        if length > PATH_BYTES_MAX {
            let error = SocketError::PathTooLong { path, length };
            return Err(anyhow::Error::from(error)
                .context("the VM's name is too long for a qcow2 image")
                .context(WrongOptions));
        }
        disk.qcow2_image = Some(disk.image.clone());
        disk.image = format!("nbd+unix:///?socket={}", path.display());
        if !disk.write_through {
            // qemu-nbd has tables of the image in its memory until a flush.
            disk.on_loss = OnLostConnection::FailFlush;
        }
    }
    let Some(other) = images.next() else { return Ok(()) };
    let text = format!(
        "two disks have format = \"qcow2\", and remoca-qcow2@{name} serves one. Have another qemu-nbd serve {}, and give the disk its \
         NBD URI as image, with format = \"raw\"",
        other.image
    );
    Err(anyhow::Error::msg(text).context(WrongOptions))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Its control socket may be seven bytes shorter. No start of the unit would ever make this one.
    #[test]
    fn a_name_that_is_too_long_for_the_socket_of_its_image_is_refused() {
        let redirected = |length: usize| {
            let name = "x".repeat(length);
            let mut disks = [DiskOptions { is_qcow2: true, ..DiskOptions::new("/b.qcow2".into()) }];
            redirect(&mut disks, Path::new("/run/remoca/x.ctl"), &name)
        };
        redirected(84).unwrap();
        let error = format!("{:#}", redirected(85).unwrap_err());
        assert!(error.contains("name is too long for a qcow2 image") && error.contains("has 108 bytes"), "{error}");
    }

    #[test]
    fn one_qcow2_image_of_a_vm_is_served_by_the_unit() {
        let disk = |image: &str, is_qcow2| DiskOptions { is_qcow2, ..DiskOptions::new(image.into()) };
        let mut disks = [disk("/a.img", false), disk("/b.qcow2", true)];
        redirect(&mut disks, Path::new("/run/remoca/web1.ctl"), "web1").unwrap();
        assert_eq!(disks[0].image, "/a.img");
        assert_eq!(disks[1].image, "nbd+unix:///?socket=/run/remoca/web1.qcow2.sock");
        assert_eq!((disks[0].qcow2_image.as_deref(), disks[1].qcow2_image.as_deref()), (None, Some("/b.qcow2")));
        assert_eq!((disks[0].on_loss, disks[1].on_loss), (OnLostConnection::Continue, OnLostConnection::FailFlush));
        let mut disks = [disk("/a.qcow2", true), disk("/b.qcow2", true)];
        let error = redirect(&mut disks, Path::new("/run/remoca/web1.ctl"), "web1").unwrap_err();
        assert!(format!("{error:#}").contains("serve /b.qcow2"), "{error:#}");
    }
}
