//! A backup of a running VM as docs/backup.md has it: its guest's agent freezes the file systems, the image is copied by
//! reflink on XFS or its subvolume of btrfs is snapshotted, and the guest goes on.

use remoca_guest_tests::documents::domain_xml;
use remoca_guest_tests::{Host, Image, LIMIT, Result, assert_kernel_is_content, remoca, unless_qemu_aborts};
use remoca_lab::{Guest, Lab, Libvirt, Recipe, program, store};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

const CHANNEL: &str = "<channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>";
/// Starts the agent at its port, as udev and systemd do.
const START_AGENT: &str = "for port in /sys/class/virtio-ports/*; do \
    if [ \"$(cat $port/name)\" = org.qemu.guest_agent.0 ]; then \
    exec qemu-ga --daemonize --method=virtio-serial --path=/dev/$(basename $port) --statedir=/run; fi; done; exit 1";

/// A mounted file system. Unmounted when dropped.
struct Mount(PathBuf);

impl Mount {
    fn new(options: &str, device: &Path, folder: &Path) -> Result<Self> {
        std::fs::create_dir_all(folder)?;
        run(Command::new("mount").args(["-o", options]).args([device, folder]))?;
        Ok(Self(folder.into()))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // A failed test may still use it.
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output()?;
    let said = String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned();
    if output.status.success() { Ok(()) } else { Err(format!("{command:?}: {said}").into()) }
}

fn start(host: &mut Host, image: &Path) -> Result<()> {
    host.start_process(&[Image { name: "web1", path: image.into(), options: "" }], "64M", &["--no-hedge"])
}

/// A file system that can make a copy of an image in a moment.
struct Storage {
    mount: Mount,
    is_btrfs: bool,
}

impl Storage {
    /// Makes one in a file of the host. On btrfs the images are in a subvolume.
    fn new(host: &Host, is_btrfs: bool) -> Result<Self> {
        let device = host.folder().join("storage.img");
        store::sparse_image(&device, 1 << 30)?;
        match is_btrfs {
            true => run(Command::new("mkfs.btrfs").arg("-q").arg(&device))?,
            false => run(Command::new("mkfs.xfs").args(["-q", "-m", "reflink=1"]).arg(&device))?,
        }
        let storage = Self { mount: Mount::new("loop", &device, &host.folder().join("storage"))?, is_btrfs };
        match is_btrfs {
            true => run(Command::new("btrfs").args(["-q", "subvolume", "create"]).arg(storage.images()))?,
            false => std::fs::create_dir(storage.images())?,
        }
        Ok(storage)
    }

    fn images(&self) -> PathBuf {
        self.mount.0.join("images")
    }

    /// Makes a copy of the image `web1.img`, and returns its path.
    fn back_up(&self, name: &str) -> Result<PathBuf> {
        let copy = self.mount.0.join(name);
        if self.is_btrfs {
            run(Command::new("btrfs").args(["-q", "subvolume", "snapshot", "-r"]).args([&self.images(), &copy]))?;
            return Ok(copy.join("web1.img"));
        }
        run(Command::new("cp").arg("--reflink=always").args([&self.images().join("web1.img"), &copy]))?;
        Ok(copy)
    }

    /// Puts a copy in the place of the image, whose process must have ended.
    fn restore(&self, name: &str) -> Result<()> {
        let (copy, images) = (self.mount.0.join(name), self.images());
        if self.is_btrfs {
            std::fs::rename(&images, self.mount.0.join("broken"))?;
            return run(Command::new("btrfs").args(["-q", "subvolume", "snapshot"]).args([&copy, &images]));
        }
        run(Command::new("cp").arg("--reflink=always").args([copy, images.join("web1.img")]))
    }
}

#[test]
#[ignore = "long: cargo xtask test-long"]
fn a_backup_by_the_guests_agent_and_a_reflink_is_whole_while_the_guest_writes() -> Result<()> {
    unless_qemu_aborts("web1", || prepare(false), back_up_and_restore)
}

#[test]
#[ignore = "long: cargo xtask test-long"]
fn a_backup_by_the_guests_agent_and_a_snapshot_of_btrfs_is_whole_while_the_guest_writes() -> Result<()> {
    unless_qemu_aborts("web1", || prepare(true), back_up_and_restore)
}

/// Returns a host with an image on such a storage, and its running process.
fn prepare(is_btrfs: bool) -> Result<(Host, Storage)> {
    let mut host = Host::new(remoca()?, "128M")?;
    host.without_port();
    let storage = Storage::new(&host, is_btrfs)?;
    let image = storage.images().join("web1.img");
    store::sparse_image(&image, 256 << 20)?;
    store::format_ext4(&image)?;
    host.start_server()?;
    start(&mut host, &image)?;
    Ok((host, storage))
}

fn back_up_and_restore(mut host: Host, storage: Storage, libvirt: &Libvirt) -> Result<()> {
    let lab = Lab::open()?;
    let image = storage.images().join("web1.img");
    let mut guest = boot(&host, &lab, libvirt)?;
    let work = "( until [ -e /tmp/stop ]; do rm -rf /mnt/more; \
                remoca-workload create --dir /mnt/more --files 8 --file-size 1M --seed 5 || break; done; \
                [ -e /tmp/stop ]; echo $? > /tmp/work.status ) > /tmp/work.log 2>&1 &";
    guest.run(work, LIMIT)?;

    let verifier = program::build(&lab, "remoca-lab", "remoca-workload")?;
    for round in 0..3 {
        // In the guest's memory alone, until the freeze.
        guest.run(&format!("echo {round} > /mnt/round"), LIMIT)?;
        libvirt.virsh(&["domfsfreeze", "web1"])?;
        let copied = storage.back_up(&format!("backup-{round}"));
        libvirt.virsh(&["domfsthaw", "web1"])?;
        let copy = copied?;
        store::check_ext4(&copy)?;
        let backup = Mount::new("ro,loop,noload", &copy, &host.folder().join("backup"))?;
        assert_eq!(std::fs::read_to_string(backup.0.join("round"))?.trim(), round.to_string());
        run(Command::new(&verifier).args(["verify", "--dir"]).arg(backup.0.join("set")))?;
    }
    // What is shared with copies is written elsewhere: none of that is foreign to the process.
    host.kill_process()?;
    start(&mut host, &image)?;
    let status = host.wait_until("QEMU reconnects", |status| status.disks[0].attached)?;
    println!("after a kill, with the image shared with three copies, the cache is {}", status.started);
    let stop = "touch /tmp/stop; for i in $(seq 2000); do [ -s /tmp/work.status ] && break; sleep 0.1; done; \
                [ \"$(cat /tmp/work.status)\" = 0 ] || { cat /tmp/work.log; exit 1; }; sync; \
                echo 3 > /proc/sys/vm/drop_caches; \
                remoca-workload verify --dir /mnt/set && remoca-workload verify --dir /mnt/more && umount /mnt";
    guest.run(stop, LIMIT)?;
    assert_kernel_is_content(&mut guest)?;
    guest.shut_down()?;
    host.stop_process()?;
    store::check_ext4(&image)?;

    storage.restore("backup-1")?;
    start(&mut host, &image)?;
    assert_eq!(host.status()?.started, "cold", "the restored image is another one");
    host.stop_process()?;
    store::check_ext4(&image)?;
    let restored = Mount::new("ro,loop,noload", &image, &host.folder().join("restored"))?;
    assert_eq!(std::fs::read_to_string(restored.0.join("round"))?.trim(), "1");
    run(Command::new(&verifier).args(["verify", "--dir"]).arg(restored.0.join("set")))
}

/// Boots a guest with one disk and the agent of libvirt, and fills the disk.
fn boot(host: &Host, lab: &Lab, libvirt: &Libvirt) -> Result<Guest> {
    let mut xml = domain_xml("libvirt, vhost-user")?;
    // One disk, and no port.
    let end = xml.devices.find("</disk>").ok_or("no disk in docs/guests.md")? + "</disk>".len();
    xml.devices.truncate(end);
    xml.devices += CHANNEL;
    let mut config = host.guest(lab, "web1")?;
    config.disks.clear();
    config.recipe = Recipe::bookworm().with(&["qemu-guest-agent"]);
    let mut guest = config.boot_under(lab, libvirt, &xml)?;
    let made = "mount $(disk-by-serial web1) /mnt && \
                remoca-workload create --dir /mnt/set --files 4 --file-size 8M --seed 3 && sync";
    guest.run(made, LIMIT)?;
    guest.run(START_AGENT, LIMIT)?;
    let give_up_at = Instant::now() + LIMIT;
    while let Err(error) = libvirt.virsh(&["qemu-agent-command", "web1", r#"{"execute":"guest-ping"}"#]) {
        if Instant::now() > give_up_at {
            return Err(error.into());
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(guest)
}
