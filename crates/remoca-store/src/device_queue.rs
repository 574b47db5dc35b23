//! Room in the queue of the device below a file system, as sysfs reports it.

use std::path::{Path, PathBuf};

/// Most devices on the way from a file system to the hardware, such as a volume, an array and a disk.
const LAYERS_MAX: u32 = 8;

/// Returns the number of requests that the queue of a device holds. Of a device that is made of others, this is the least of
/// theirs. Returns `None` if the system does not say, as for file systems without a device of their own (Btrfs, NFS).
pub(super) fn requests(device: u64) -> Option<u32> {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    of_folder(&PathBuf::from(format!("/sys/dev/block/{major}:{minor}")).canonicalize().ok()?, LAYERS_MAX)
}

/// Returns the same for the device of a folder of sysfs, below which there are at most `layers - 1` others.
fn of_folder(folder: &Path, layers: u32) -> Option<u32> {
    let layers = layers.checked_sub(1)?;
    // A partition has no queue of its own; its folder is in that of the disk.
    let disk = if folder.join("partition").exists() { folder.parent()? } else { folder };
    // Only these queues make requests. The others hand on what they get, and the number that they have means nothing.
    if disk.join("mq").exists() {
        return std::fs::read_to_string(disk.join("queue/nr_requests")).ok()?.trim().parse().ok();
    }
    // A partition of an array is made of what the array is made of.
    let parts = std::fs::read_dir(disk.join("slaves")).ok()?;
    let parts = parts.map(|part| of_folder(&part.ok()?.path().canonicalize().ok()?, layers));
    parts.collect::<Option<Vec<_>>>()?.into_iter().min()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{create_dir_all, write};
    use std::os::unix::fs::symlink;

    /// Makes the folder of a device whose queue holds so many requests.
    fn disk(root: &Path, name: &str, requests: &str) {
        create_dir_all(root.join(name).join("mq/0")).unwrap();
        create_dir_all(root.join(name).join("slaves")).unwrap();
        create_dir_all(root.join(name).join("queue")).unwrap();
        write(root.join(name).join("queue/nr_requests"), requests).unwrap();
    }

    fn partition(root: &Path, path: &str) {
        create_dir_all(root.join(path)).unwrap();
        write(root.join(path).join("partition"), "1\n").unwrap();
    }

    /// Makes the folder of a volume on other devices. The number that it has itself means nothing.
    fn volume(root: &Path, name: &str, parts: &[&str]) {
        disk(root, name, "128\n");
        std::fs::remove_dir_all(root.join(name).join("mq")).unwrap();
        for (number, part) in parts.iter().enumerate() {
            symlink(root.join(part), root.join(name).join(format!("slaves/{number}"))).unwrap();
        }
    }

    #[test]
    fn a_device_has_the_room_that_the_disks_below_it_have() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        disk(root, "nvme", "1023\n");
        disk(root, "sata", "64\n");
        partition(root, "nvme/nvme1");
        volume(root, "array", &["nvme/nvme1", "sata"]);
        partition(root, "array/array1");
        volume(root, "volume", &["array/array1"]);
        let room = |device: &str| of_folder(&root.join(device), LAYERS_MAX);
        let devices = ["nvme", "sata", "nvme/nvme1", "array", "array/array1", "volume"];
        assert_eq!(devices.map(room), [1023, 64, 1023, 64, 64, 64].map(Some));
    }

    #[test]
    fn a_device_of_which_nothing_is_known_has_no_number() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        disk(root, "odd", "many\n");
        disk(root, "sata", "64\n");
        // Such as a network device, which has no parts on this host.
        volume(root, "alone", &[]);
        volume(root, "half", &["sata", "alone"]);
        volume(root, "circle", &["circle"]);
        for device in ["odd", "alone", "half", "circle", "away"] {
            assert_eq!(of_folder(&root.join(device), LAYERS_MAX), None, "{device}");
        }
    }

    /// The device of the file system with the sources, where it is a disk of this host.
    #[test]
    fn sysfs_is_as_described() {
        let device = rustix::fs::stat("/").unwrap().st_dev;
        if let Some(requests) = requests(device) {
            assert!((1..=1 << 16).contains(&requests), "{requests}");
        }
    }
}
