//! A backup of a running VM as docs/backup.md has it: its guest's agent freezes the file systems, the image is copied by
//! reflink on XFS, and the guest goes on.

use remoca_guest_tests::documents::domain_xml;
use remoca_guest_tests::{Host, Image, LIMIT, Result, assert_kernel_is_content, remoca};
use remoca_lab::{Lab, Libvirt, Recipe, program, store};
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

#[test]
#[ignore = "long: cargo xtask test-long"]
fn a_backup_by_the_guests_agent_and_a_reflink_is_whole_while_the_guest_writes() -> Result<()> {
    let lab = Lab::open()?;
    let mut host = Host::new(remoca()?, "128M")?;
    host.without_port();
    let device = host.folder().join("storage.img");
    store::sparse_image(&device, 1 << 30)?;
    run(Command::new("mkfs.xfs").args(["-q", "-m", "reflink=1"]).arg(&device))?;
    let storage = Mount::new("loop", &device, &host.folder().join("storage"))?;
    let image = storage.0.join("web1.img");
    store::sparse_image(&image, 256 << 20)?;
    store::format_ext4(&image)?;
    host.start_server()?;
    start(&mut host, &image)?;
    let libvirt = Libvirt::start(host.folder(), &[])?;
    let mut xml = domain_xml("libvirt, vhost-user")?;
    // One disk, and no port.
    let end = xml.devices.find("</disk>").ok_or("no disk in docs/guests.md")? + "</disk>".len();
    xml.devices.truncate(end);
    xml.devices += CHANNEL;
    let mut config = host.guest(&lab, "web1")?;
    config.disks.clear();
    config.recipe = Recipe::bookworm().with(&["qemu-guest-agent"]);
    let mut guest = config.boot_under(&lab, &libvirt, &xml)?;

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
    let work = "( until [ -e /tmp/stop ]; do rm -rf /mnt/more; \
                remoca-workload create --dir /mnt/more --files 8 --file-size 1M --seed 5 || break; done; \
                [ -e /tmp/stop ]; echo $? > /tmp/work.status ) > /tmp/work.log 2>&1 &";
    guest.run(work, LIMIT)?;

    let verifier = program::build(&lab, "remoca-lab", "remoca-workload")?;
    for round in 0..3 {
        // In the guest's memory alone, until the freeze.
        guest.run(&format!("echo {round} > /mnt/round"), LIMIT)?;
        let copy = storage.0.join(format!("backup-{round}.img"));
        libvirt.virsh(&["domfsfreeze", "web1"])?;
        let copied = run(Command::new("cp").arg("--reflink=always").args([&image, &copy]));
        libvirt.virsh(&["domfsthaw", "web1"])?;
        copied?;
        store::check_ext4(&copy)?;
        let backup = Mount::new("ro,loop,noload", &copy, &host.folder().join("backup"))?;
        assert_eq!(std::fs::read_to_string(backup.0.join("round"))?.trim(), round.to_string());
        run(Command::new(&verifier).args(["verify", "--dir"]).arg(backup.0.join("set")))?;
    }
    // What is shared with copies is written elsewhere: none of that is foreign to the process.
    host.kill_process()?;
    start(&mut host, &image)?;
    host.wait_until("QEMU reconnects", |status| status.disks[0].attached)?;
    let stop = "touch /tmp/stop; for i in $(seq 1200); do [ -s /tmp/work.status ] && break; sleep 0.1; done; \
                [ \"$(cat /tmp/work.status)\" = 0 ] || { cat /tmp/work.log; exit 1; }; sync; \
                echo 3 > /proc/sys/vm/drop_caches; \
                remoca-workload verify --dir /mnt/set && remoca-workload verify --dir /mnt/more && umount /mnt";
    guest.run(stop, LIMIT)?;
    assert_kernel_is_content(&mut guest)?;
    guest.shut_down()?;
    host.stop_process()?;
    Ok(store::check_ext4(&image)?)
}
