//! Room in the queue of the device below a file, as sysfs reports it.
//!
//! A call for which that queue has no room makes its caller wait. Nothing is assumed of devices and layers that are not known here.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Most devices on the way from a file system to the hardware, such as a volume, an array and a disk.
const LAYERS_MAX: u32 = 8;
/// Beginnings of the names of disks whose queue is their own, even without a scheduler. Disks of SCSI share that of their host.
const OWN_QUEUE: [&str; 6] = ["vd", "xvd", "loop", "rbd", "nbd", "dm-"];
/// Levels of arrays that hand on what they get. The others have stripes of which there are only so many.
const PLAIN_LEVELS: [&str; 4] = ["linear", "raid0", "raid1", "raid10"];

/// Returns the number of requests that the queue of the device below `file` holds. Of a volume or an array, this is the least of
/// the disks below it. Returns `None` if it is not known, or others have a share of that queue. May block for as long as the file system does.
pub(super) fn requests(file: &File) -> Option<u32> {
    let kind = rustix::fs::fstatfs(file).ok()?.f_type;
    if kind != libc::EXT4_SUPER_MAGIC && (kind != libc::XFS_SUPER_MAGIC || is_realtime(file)?) {
        return None;
    }
    let device = file.metadata().ok()?.dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    of_folder(&PathBuf::from(format!("/sys/dev/block/{major}:{minor}")).canonicalize().ok()?, true, LAYERS_MAX)
}

/// Returns whether a file of XFS is on the device for realtime files, which is another one. Returns `None` if the system does not say.
fn is_realtime(file: &File) -> Option<bool> {
    /// `FS_IOC_FSGETXATTR` of `linux/fs.h`, and a flag of what it returns.
    const FS_IOC_FSGETXATTR: libc::Ioctl = 0x801c_581f;
    const FS_XFLAG_REALTIME: u32 = 1;
    let mut attributes = [0_u32; 7];
    // SAFETY: the call writes a structure of 28 bytes, which begins with the flags, to the pointer; the descriptor is open.
    let outcome = unsafe { libc::ioctl(file.as_raw_fd(), FS_IOC_FSGETXATTR, attributes.as_mut_ptr()) };
    (outcome == 0).then(|| attributes[0] & FS_XFLAG_REALTIME != 0)
}

/// Returns the same for the device of a folder of sysfs, below which there are at most `layers - 1` others. It may be a volume of LVM only if
/// `may_be_volume`: a volume on volumes is a snapshot or an array of its own.
fn of_folder(folder: &Path, may_be_volume: bool, layers: u32) -> Option<u32> {
    let layers = layers.checked_sub(1)?;
    // A partition has no queue of its own; its folder is in that of the disk.
    let disk = if folder.join("partition").exists() { folder.parent()? } else { folder };
    let text = |attribute: &str| std::fs::read_to_string(disk.join(attribute)).ok();
    // Only these queues make requests. The others hand on what they get, and the number that they have means nothing.
    if disk.join("mq").exists() {
        let requests = text("queue/nr_requests")?.trim().parse().ok();
        return requests.filter(|_| text("queue/scheduler").is_some_and(|text| has_own_queue(disk, &text)));
    }
    let is_plain_array = text("md/level").is_some_and(|level| PLAIN_LEVELS.contains(&level.trim()));
    let is_volume = may_be_volume && text("dm/uuid").is_some_and(|uuid| uuid.starts_with("LVM-"));
    if !is_plain_array && !is_volume {
        return None;
    }
    let parts = std::fs::read_dir(disk.join("slaves")).ok()?;
    let of_part = |part: PathBuf| of_folder(&part.canonicalize().ok()?, may_be_volume && !is_volume, layers);
    parts.map(|part| of_part(part.ok()?.path())).collect::<Option<Vec<_>>>()?.into_iter().min()
}

/// Returns whether all requests that the queue of a disk holds are for that disk. A scheduler has requests of its own for each disk.
fn has_own_queue(disk: &Path, scheduler: &str) -> bool {
    let name = |path: &Path| path.file_name().map_or(String::new(), |name| name.to_string_lossy().into_owned());
    if scheduler.trim() != "none" && !scheduler.contains("[none]") {
        return true;
    }
    if !name(disk).starts_with("nvme") {
        return OWN_QUEUE.iter().any(|known| name(disk).starts_with(known));
    }
    // The namespaces of a controller share its queues.
    let siblings = disk.parent().and_then(|controller| std::fs::read_dir(controller).ok());
    siblings.is_some_and(|all| all.flatten().filter(|entry| name(&entry.path()).starts_with("nvme")).count() == 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{create_dir_all, write};
    use std::os::unix::fs::symlink;

    /// A tree like that of sysfs.
    struct Tree(tempfile::TempDir);

    impl Tree {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn put(&self, path: &str, text: &str) {
            let path = self.0.path().join(path);
            create_dir_all(path.parent().unwrap()).unwrap();
            write(path, text).unwrap();
        }

        fn disk(&self, name: &str, requests: &str, scheduler: &str) {
            self.put(&format!("{name}/mq/0/cpu_list"), "0\n");
            self.put(&format!("{name}/queue/nr_requests"), requests);
            self.put(&format!("{name}/queue/scheduler"), scheduler);
        }

        /// Makes the folder of a device on others. The number that it has itself means nothing.
        fn layer(&self, name: &str, attribute: &str, value: &str, parts: &[&str]) {
            self.put(&format!("{name}/{attribute}"), value);
            self.put(&format!("{name}/queue/nr_requests"), "128\n");
            create_dir_all(self.0.path().join(name).join("slaves")).unwrap();
            for (number, part) in parts.iter().enumerate() {
                symlink(self.0.path().join(part), self.0.path().join(name).join(format!("slaves/{number}"))).unwrap();
            }
        }

        fn volume(&self, name: &str, parts: &[&str]) {
            self.layer(name, "dm/uuid", "LVM-abc\n", parts);
        }

        fn array(&self, name: &str, level: &str, parts: &[&str]) {
            self.layer(name, "md/level", level, parts);
        }

        fn requests(&self, device: &str) -> Option<u32> {
            of_folder(&self.0.path().join(device), true, LAYERS_MAX)
        }
    }

    const DEADLINE: &str = "none [mq-deadline] kyber\n";
    const NONE: &str = "[none] mq-deadline\n";

    #[test]
    fn a_device_has_the_room_that_the_disks_below_it_have() {
        let tree = Tree::new();
        tree.disk("nvme0/nvme0n1", "1023\n", NONE);
        tree.disk("sda", "64\n", DEADLINE);
        tree.put("nvme0/nvme0n1/nvme0n1p1/partition", "1\n");
        tree.put("sda/sda3/partition", "3\n");
        tree.array("md0", "raid1\n", &["nvme0/nvme0n1/nvme0n1p1", "sda/sda3"]);
        tree.put("md0/md0p1/partition", "1\n");
        tree.volume("dm-0", &["md0/md0p1"]);
        let devices = ["nvme0/nvme0n1", "nvme0/nvme0n1/nvme0n1p1", "sda", "md0", "md0/md0p1", "dm-0"];
        assert_eq!(devices.map(|device| tree.requests(device)), [1023, 1023, 64, 64, 64, 64].map(Some));
    }

    #[test]
    fn eight_devices_may_be_on_the_way_to_the_disk() {
        let tree = Tree::new();
        tree.disk("vda", "256\n", NONE);
        let mut below = "vda".to_owned();
        for number in 1..=8 {
            let name = format!("md{number}");
            tree.array(&name, "raid1\n", &[&below]);
            assert_eq!(tree.requests(&name), (number < 8).then_some(256), "{number} arrays on a disk");
            below = name;
        }
    }

    #[test]
    fn a_queue_that_is_shared_says_nothing() {
        let tree = Tree::new();
        // Of a disk of SCSI with a scheduler, above, it is its own.
        tree.disk("sda", "128\n", NONE);
        tree.disk("sdb", "128\n", "none\n");
        tree.disk("nvme0/nvme0n1", "1023\n", NONE);
        tree.disk("nvme0/nvme0n2", "1023\n", NONE);
        for disk in ["sda", "sdb", "nvme0/nvme0n1", "nvme0/nvme0n2"] {
            assert_eq!(tree.requests(disk), None, "{disk}");
        }
        tree.disk("vda", "256\n", NONE);
        assert_eq!(tree.requests("vda"), Some(256), "each disk of virtio-blk has its own");
    }

    #[test]
    fn of_a_layer_that_is_not_known_to_hand_on_what_it_gets_nothing_is_known() {
        let tree = Tree::new();
        tree.disk("vda", "256\n", NONE);
        tree.disk("vdb", "many\n", NONE);
        tree.layer("dm-1", "dm/uuid", "CRYPT-LUKS2-abc\n", &["vda"]);
        tree.volume("dm-2", &["vda"]);
        tree.volume("dm-3", &["dm-2"]);
        tree.volume("dm-4", &["vda", "dm-1"]);
        tree.volume("dm-5", &[]);
        tree.array("md5", "raid5\n", &["vda"]);
        tree.array("md6", "raid1\n", &["md6"]);
        tree.layer("drbd0", "other", "\n", &["vda"]);
        assert_eq!(tree.requests("dm-2"), Some(256));
        for device in ["vdb", "dm-1", "dm-3", "dm-4", "dm-5", "md5", "md6", "drbd0", "away"] {
            assert_eq!(tree.requests(device), None, "{device}");
        }
    }

    /// Where a file of this machine is on a disk with a queue of its own, that queue is found.
    #[test]
    fn sysfs_is_as_described() {
        let file = File::open(env!("CARGO_MANIFEST_DIR")).unwrap();
        let device = file.metadata().unwrap().dev();
        let disk = format!("/sys/dev/block/{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
        let is_ext4 = rustix::fs::fstatfs(&file).unwrap().f_type == libc::EXT4_SUPER_MAGIC;
        let is_virtio = std::fs::canonicalize(&disk).is_ok_and(|disk| disk.to_string_lossy().contains("/block/vd"));
        if is_ext4 && is_virtio {
            let text = [".", ".."].map(|at| std::fs::read_to_string(format!("{disk}/{at}/queue/nr_requests")));
            let expected = text.into_iter().find_map(Result::ok).unwrap().trim().parse().ok();
            assert_eq!(requests(&file), expected);
        }
    }
}
