//! Guests that a real libvirtd starts, with the XML of docs/guests.md: disks over vhost-user and over NBD. Their data
//! is verified through what an operator does with `virsh`, and through kills and upgrades of the VM process.

use remoca_guest_tests::documents::domain_xml;
use remoca_guest_tests::hotplug::{change_disks, wait_for_size};
use remoca_guest_tests::{
    Host, Image, LIMIT, Result, assert_kernel_is_content, remoca, start_agent, stop_agent, unless_qemu_aborts,
    wait_for_disk, wait_in_guest,
};
use remoca_io::{control, key};
use remoca_lab::{DomainXml, Guest, Lab, Libvirt, store};
use remoca_protocol::control::{Command as Ask, Reply, Status};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

const IMAGE_BYTES: u64 = 512 << 20;

/// Returns a host with a memory server, and an image with an empty file system.
fn host() -> Result<(Host, PathBuf)> {
    let mut host = Host::new(remoca()?, "256M")?;
    host.without_port();
    let image = host.folder().join("web1.img");
    store::sparse_image(&image, IMAGE_BYTES)?;
    store::format_ext4(&image)?;
    host.start_server()?;
    Ok((host, image))
}

/// Starts the VM process as docs/guests.md does, for vhost-user.
fn start_vhost(host: &mut Host, image: &Path) -> Result<()> {
    let port = format!("--port={}", host.folder().join("web1-port.sock").display());
    // The image is in the page cache. With hedging, the disk would rightly be preferred.
    host.start_process(&[Image { name: "web1", path: image.into(), options: "" }], "128M", &[&port, "--no-hedge"])
}

/// Starts the VM process as docs/guests.md does, for NBD.
fn start_nbd(host: &mut Host, image: &Path) -> Result<()> {
    start_nbd_with(host, image, &[])
}

fn start_nbd_with(host: &mut Host, image: &Path, more: &[&str]) -> Result<()> {
    let disk = format!("--disk=image={},name=root", image.display());
    let socket = format!("--nbd=unix:{}", host.folder().join("web1.nbd").display());
    let options = [&disk, &socket, "--nbd-port", "--guest-memory=256M", "--no-hedge"];
    host.start_process(&[], "128M", &[&options, more].concat())
}

fn boot(host: &Host, lab: &Lab, libvirt: &Libvirt, heading: &str) -> Result<Guest> {
    let mut config = host.guest(lab, "web1")?;
    config.disks.clear();
    config.memory_mib = 192;
    let mut xml = domain_xml(heading)?;
    // The same folder, by the name that this host has for it too: `remoca check` looks for it in QEMU's command line.
    xml.devices = xml.devices.replace("/run/remoca", &host.folder().display().to_string());
    Ok(config.boot_under(lab, libvirt, &xml)?)
}

/// Returns the shell's expression for the disk of this size: over NBD disks have no serial number.
fn disk_of(bytes: u64) -> String {
    format!("/dev/$(grep -lx {} /sys/block/vd*/size | cut -d / -f 4)", bytes / 512)
}

/// Fills the disk with more than the guest's memory has room for, until the cache answers reads of it.
fn fill(guest: &mut Guest, host: &Host) -> Result<()> {
    guest.run(&format!("mount {} /mnt", disk_of(IMAGE_BYTES)), LIMIT)?;
    start_agent(guest)?;
    guest.run("remoca-workload create --dir /mnt/set --files 2 --file-size 80M --seed 3 && sync", LIMIT)?;
    host.wait_until("evicted pages bring hits", |status| {
        let _ = guest.run("cat /mnt/set/* > /dev/null", LIMIT);
        status.counters["evictions_admitted"] > 200 && status.counters["hit_blocks"] > 200
    })?;
    Ok(())
}

/// Starts a job that writes files until [`stop_work`].
fn start_work(guest: &mut Guest) -> Result<()> {
    let job = "until [ -e /tmp/stop ]; do rm -rf /mnt/more; \
               remoca-workload create --dir /mnt/more --files 8 --file-size 1M --seed 5 && sync || break; done; \
               [ -e /tmp/stop ]; echo $? > /tmp/work.status";
    guest.run(&format!("rm -f /tmp/stop /tmp/work.status; ( {job} ) > /tmp/work.log 2>&1 &"), LIMIT)?;
    Ok(())
}

/// Ends the job, and verifies everything that was written.
fn stop_work(guest: &mut Guest) -> Result<()> {
    let wait = "touch /tmp/stop; for i in $(seq 2000); do [ -s /tmp/work.status ] && break; sleep 0.1; done; \
                [ \"$(cat /tmp/work.status)\" = 0 ] || { cat /tmp/work.log; exit 1; }";
    guest.run(wait, LIMIT)?;
    guest.run("remoca-workload verify --dir /mnt/set && remoca-workload verify --dir /mnt/more", LIMIT)?;
    assert_kernel_is_content(guest)
}

fn end(mut guest: Guest, mut host: Host, image: &Path) -> Result<()> {
    stop_agent(&mut guest)?;
    guest.run("umount /mnt", LIMIT)?;
    guest.shut_down()?;
    host.stop_process()?;
    Ok(store::check_ext4(image)?)
}

/// Runs `remoca xml` for the VM that runs.
fn xml(host: &Host, more: &[&str]) -> Result<String> {
    let output = Command::new(remoca()?).arg("xml").arg(host.control()).args(more).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(String::from_utf8(output.stdout)?) } else { Err(said.into()) }
}

/// Returns what `remoca check` finds about the VM that runs, as `LEVEL WHAT`.
fn findings(host: &Host) -> Result<Vec<String>> {
    let output = Command::new(remoca()?).arg("check").arg(host.control()).args(["-o", "json"]).output()?;
    let findings: Vec<serde_json::Value> = serde_json::from_slice(&output.stdout)?;
    let text = |finding: &serde_json::Value, key: &str| finding[key].as_str().unwrap_or_default().to_owned();
    Ok(findings.iter().map(|finding| format!("{} {}", text(finding, "level"), text(finding, "what"))).collect())
}

/// Checks that `remoca xml` prints what docs/guests.md has, and that libvirt takes it.
fn check_xml(host: &Host, libvirt: &Libvirt, heading: &str) -> Result<()> {
    let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let documented = domain_xml(heading)?;
    let current = xml(host, &["--libvirt", "10.0", "--qemu", "9.0"])?
        .replace(&host.folder().display().to_string(), "/run/remoca");
    assert_eq!(words(&current), words(&format!("{}{}", documented.memory_backing, documented.devices)));

    let fitting = xml(host, &[])?;
    let (memory_backing, devices) = fitting.split_at(fitting.find("<disk").unwrap_or_default());
    let domain = format!(
        "<domain type='qemu'><name>xml</name><memory unit='MiB'>64</memory>{memory_backing}<os><type>hvm</type></os><features><acpi/></features>\
         <devices>{devices}</devices></domain>"
    );
    libvirt.virsh_with(&["define", "--validate"], &domain, &[])?;
    let kept = libvirt.virsh(&["dumpxml", "--inactive", "xml"])?.replace('"', "'");
    assert_eq!(kept.matches("<reconnect ").count(), fitting.matches("<reconnect ").count(), "{kept}");
    libvirt.virsh(&["undefine", "xml"])?;
    Ok(())
}

#[test]
fn a_domain_over_vhost_user_is_suspended_and_loses_its_process() -> Result<()> {
    unless_qemu_aborts("web1", host, |host, image, libvirt| suspend_over_vhost_user(host, &image, libvirt))
}

fn suspend_over_vhost_user(mut host: Host, image: &Path, libvirt: &Libvirt) -> Result<()> {
    let lab = Lab::open()?;
    start_vhost(&mut host, image)?;
    check_xml(&host, libvirt, "libvirt, vhost-user")?;
    let mut guest = boot(&host, &lab, libvirt, "libvirt, vhost-user")?;
    fill(&mut guest, &host)?;
    let found = findings(&host)?;
    for expected in ["guest", "guest memory", "reconnect web1", "reconnect remoca-port", "agent", "image web1"] {
        assert!(found.contains(&format!("ok {expected}")), "{expected}: {found:?}");
    }

    start_work(&mut guest)?;
    libvirt.virsh(&["suspend", "web1"])?;
    libvirt.virsh(&["resume", "web1"])?;
    host.kill_process()?;
    start_vhost(&mut host, image)?;
    host.wait_until("QEMU reconnects", |status| status.disks[0].attached)?;
    host.upgrade()?;
    stop_work(&mut guest)?;
    end(guest, host, image)
}

#[test]
#[ignore = "long: cargo xtask test-long"]
fn a_domain_over_nbd_is_suspended_and_upgraded() -> Result<()> {
    unless_qemu_aborts("web1", host, |host, image, libvirt| suspend_over_nbd(host, &image, libvirt))
}

fn suspend_over_nbd(mut host: Host, image: &Path, libvirt: &Libvirt) -> Result<()> {
    let lab = Lab::open()?;
    start_nbd(&mut host, image)?;
    check_xml(&host, libvirt, "NBD")?;
    let mut guest = boot(&host, &lab, libvirt, "NBD")?;
    fill(&mut guest, &host)?;
    let reconnects = libvirt.version()? >= (9, 2);
    let expected = format!("{} reconnect root", if reconnects { "ok" } else { "warning" });
    let found = findings(&host)?;
    assert!(found.contains(&expected), "{expected}: {found:?}");

    start_work(&mut guest)?;
    libvirt.virsh(&["suspend", "web1"])?;
    libvirt.virsh(&["resume", "web1"])?;
    host.upgrade()?;
    if reconnects {
        host.kill_process()?;
        start_nbd(&mut host, image)?;
    }
    stop_work(&mut guest)?;
    end(guest, host, image)
}

/// A `systemctl` that knows `remoca-disk@web1.service`, which is not active at first. It starts and restarts the process, unless the
/// file `refuse` is there.
const SYSTEMCTL: &str = r#"#!/bin/sh
cd /run/remoca
if [ "$*" = "is-active remoca-disk@web1.service" ]; then
    [ ! -e pid ] || { echo active; exit 0; }
    echo inactive
    exit 3
fi
echo "$*" >> asked
[ ! -e refuse ] || exit 1
case $* in
"start remoca-disk@web1.service") ;;
"restart remoca-disk@web1.service")
    kill "$(cat pid)"
    while [ -e "/proc/$(cat pid)/exe" ]; do sleep 0.1; done ;;
*) exit 1 ;;
esac
setsid remoca disk --name web1 --config /etc/remoca >> web1.log 2>&1 < /dev/null &
echo $! > pid
until remoca status web1 > /dev/null 2>&1; do sleep 0.1; done
"#;

/// Returns the status of the VM process at this control socket.
fn status_at(control: &Path) -> Result<Status> {
    match control::call(control, Ask::Status)? {
        Reply::Status(status) => Ok(*status),
        reply => Err(format!("no status: {reply:?}").into()),
    }
}

#[test]
fn the_hook_of_the_package_starts_the_disks_before_their_guest() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let image = folder.path().join("web1.img");
    store::sparse_image(&image, 8 << 20)?;
    let configuration = format!(
        "version = 1\nport = '/run/remoca/web1-port.sock'\n[[disk]]\nname = 'root'\nformat = 'raw'\nimage = '{}'\n\
         socket = '/run/remoca/web1.sock'\n",
        image.display()
    );
    let program = format!("#!/bin/sh\nexec '{}' \"$@\"\n", remoca()?.display());
    let files = [
        ("libvirt/hooks/qemu.d/remoca", include_str!("../../../packaging/libvirt-hook")),
        ("remoca/vms/web1.toml", &configuration),
        ("remoca/vms/web 1.toml", &configuration),
        ("systemctl", SYSTEMCTL),
        ("remoca", &program),
    ];
    let libvirt = Libvirt::start(folder.path(), &files)?;
    let asked = || std::fs::read_to_string(folder.path().join("asked")).unwrap_or_default();
    let DomainXml { memory_backing, devices, .. } = domain_xml("libvirt, vhost-user")?;
    let define = |name: &str, devices: &str| {
        let domain = format!(
            "<domain type='qemu'><name>{name}</name><memory unit='MiB'>64</memory>{memory_backing}<os><type>hvm</type></os><features><acpi/></features>\
             <devices>{devices}</devices></domain>"
        );
        libvirt.virsh_with(&["define"], &domain, &[])
    };

    define("other", "")?;
    libvirt.virsh(&["start", "--paused", "other"])?;
    define("web1", "")?;
    libvirt.virsh(&["start", "--paused", "web1"])?;
    libvirt.virsh(&["destroy", "web1"])?;
    libvirt.virsh(&["undefine", "web1"])?;
    assert_eq!(asked(), "", "a guest without these disks is none of the hook's business");

    define("web 1", &devices)?;
    let error = libvirt.virsh(&["start", "web 1"]).map(drop).unwrap_err().to_string();
    assert!(error.contains("the disks of web 1 are not started: the name of a guest"), "{error}");
    libvirt.virsh(&["undefine", "web 1"])?;
    assert_eq!(asked(), "", "another name than that of its file");

    define("web9", &devices)?;
    let error = libvirt.virsh(&["start", "web9"]).map(drop).unwrap_err().to_string();
    assert!(error.contains("web9 names /run/remoca/web1.sock, which no process serves"), "{error}");
    libvirt.virsh(&["undefine", "web9"])?;

    define("web1", &devices)?;
    let refuse = folder.path().join("refuse");
    std::fs::write(&refuse, "")?;
    let error = libvirt.virsh(&["start", "web1"]).map(drop).unwrap_err().to_string();
    assert!(error.contains("the disks of web1 did not start: see"), "{error}");
    assert_eq!(asked(), "start remoca-disk@web1.service\nstop --no-block remoca-disk@web1.service\n");
    std::fs::remove_file(&refuse)?;
    libvirt.virsh(&["start", "--paused", "web1"])?;
    assert_eq!(asked().lines().count(), 3);
    // They go on without their guest. Before the next one they start again, with the image as it is by then.
    libvirt.virsh(&["destroy", "web1"])?;
    let control = folder.path().join("web1.ctl");
    let deadline = Instant::now() + LIMIT;
    let has_guest = |status: Status| status.disks[0].attached || status.port.is_some_and(|port| port.attached);
    while has_guest(status_at(&control)?) {
        if Instant::now() > deadline {
            return Err("its QEMU has ended, and its disks are still attached".into());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    std::fs::remove_file(&image)?;
    store::sparse_image(&image, 16 << 20)?;
    libvirt.virsh(&["start", "--paused", "web1"])?;
    assert_eq!(asked().lines().skip(3).collect::<Vec<_>>(), ["restart remoca-disk@web1.service"]);
    assert_eq!(status_at(&control)?.disks[0].bytes, 16 << 20);
    Ok(())
}

/// Starts the VM process with a second disk, which is not in the domain.
fn start_with_extra(host: &mut Host, image: &Path, extra: &Path) -> Result<()> {
    let port = format!("--port={}", host.folder().join("web1-port.sock").display());
    let images = [("web1", image), ("extra", extra)].map(|(name, path)| Image { name, path: path.into(), options: "" });
    host.start_process(&images, "128M", &[&port, "--no-hedge"])
}

#[test]
#[ignore = "long: cargo xtask test-long"]
fn a_domain_gets_a_disk_loses_it_and_is_saved_and_reset() -> Result<()> {
    unless_qemu_aborts("web1", host, |host, image, libvirt| change_over_vhost_user(host, &image, libvirt))
}

fn change_over_vhost_user(mut host: Host, image: &Path, libvirt: &Libvirt) -> Result<()> {
    let lab = Lab::open()?;
    let extra = host.folder().join("extra.img");
    store::sparse_image(&extra, 64 << 20)?;
    start_with_extra(&mut host, image, &extra)?;
    let mut guest = boot(&host, &lab, libvirt, "libvirt, vhost-user")?;
    fill(&mut guest, &host)?;

    let device = xml(&host, &["--device", "extra", "--target", "vdc"])?;
    libvirt.virsh_with(&["attach-device", "web1"], &device, &["--live"])?;
    wait_for_disk(&mut guest, "extra", true)?;
    let made = "mkdir -p /tmp/extra && mkfs.ext4 -q $(disk-by-serial extra) && mount $(disk-by-serial extra) /tmp/extra && \
                remoca-workload create --dir /tmp/extra/set --files 4 --file-size 4M --seed 9 && sync";
    guest.run(made, LIMIT)?;
    let expected = format!("{} reconnect extra", if libvirt.version()? >= (9, 10) { "ok" } else { "warning" });
    let found = findings(&host)?;
    assert!(found.contains(&expected), "{expected}: {found:?}");
    // A disk that would not reconnect stays connected.
    start_work(&mut guest)?;
    host.upgrade()?;
    stop_work(&mut guest)?;
    guest.run(
        "echo 3 > /proc/sys/vm/drop_caches; remoca-workload verify --dir /tmp/extra/set && umount /tmp/extra",
        LIMIT,
    )?;
    libvirt.virsh_with(&["detach-device", "web1"], &device, &["--live"])?;
    wait_for_disk(&mut guest, "extra", false)?;
    host.wait_until("the disk is detached", |status| !status.disks[1].attached)?;

    start_work(&mut guest)?;
    libvirt.virsh(&["managedsave", "web1"])?;
    host.wait_until("its QEMU has ended", |status| !status.disks[0].attached)?;
    host.kill_process()?;
    start_with_extra(&mut host, image, &extra)?;
    libvirt.virsh(&["start", "web1"])?;
    stop_work(&mut guest)?;

    guest.run("sync", LIMIT)?;
    let mut guest = guest.rebooted_by(|| libvirt.virsh(&["reset", "web1"]).map(drop), LIMIT)?;
    guest.run("mount $(disk-by-serial web1) /mnt && remoca-workload verify --dir /mnt/set", LIMIT)?;
    start_agent(&mut guest)?;
    store::check_ext4(&extra)?;
    end(guest, host, image)
}

#[test]
#[ignore = "long: cargo xtask test-long"]
fn a_domain_over_nbd_gets_a_disk_loses_it_and_is_saved_and_reset() -> Result<()> {
    unless_qemu_aborts("web1", host, |host, image, libvirt| change_over_nbd(host, &image, libvirt))
}

fn change_over_nbd(mut host: Host, image: &Path, libvirt: &Libvirt) -> Result<()> {
    const EXTRA_BYTES: u64 = 96 << 20;
    let lab = Lab::open()?;
    let extra = host.folder().join("extra.img");
    store::sparse_image(&extra, EXTRA_BYTES)?;
    let more = format!("--disk=image={},name=extra", extra.display());
    start_nbd_with(&mut host, image, &[&more])?;
    let mut guest = boot(&host, &lab, libvirt, "NBD")?;
    fill(&mut guest, &host)?;

    let device = xml(&host, &["--device", "extra", "--target", "vdc"])?;
    libvirt.virsh_with(&["attach-device", "web1"], &device, &["--live"])?;
    let (disk, size) = (disk_of(EXTRA_BYTES), EXTRA_BYTES / 512);
    wait_in_guest(&mut guest, &format!("grep -qx {size} /sys/block/vd*/size"))?;
    let made = format!(
        "mkdir -p /tmp/extra && mkfs.ext4 -q {disk} && mount {disk} /tmp/extra && \
         remoca-workload create --dir /tmp/extra/set --files 4 --file-size 4M --seed 9 && sync"
    );
    guest.run(&made, LIMIT)?;
    let expected = format!("{} reconnect extra", if libvirt.version()? >= (9, 2) { "ok" } else { "warning" });
    let found = findings(&host)?;
    assert!(found.contains(&expected), "{expected}: {found:?}");
    start_work(&mut guest)?;
    host.upgrade()?;
    stop_work(&mut guest)?;
    let verify = "echo 3 > /proc/sys/vm/drop_caches; remoca-workload verify --dir /tmp/extra/set && umount /tmp/extra";
    guest.run(verify, LIMIT)?;
    libvirt.virsh_with(&["detach-device", "web1"], &device, &["--live"])?;
    wait_in_guest(&mut guest, &format!("! grep -qx {size} /sys/block/vd*/size"))?;
    host.wait_until("the disk is detached", |status| status.disks[1].nbd_clients == Some(0))?;

    start_work(&mut guest)?;
    libvirt.virsh(&["managedsave", "web1"])?;
    host.wait_until("its QEMU has ended", |status| status.disks[0].nbd_clients == Some(0))?;
    host.kill_process()?;
    start_nbd_with(&mut host, image, &[&more])?;
    libvirt.virsh(&["start", "web1"])?;
    stop_work(&mut guest)?;

    guest.run("sync", LIMIT)?;
    let mut guest = guest.rebooted_by(|| libvirt.virsh(&["reset", "web1"]).map(drop), LIMIT)?;
    guest.run(&format!("mount {} /mnt && remoca-workload verify --dir /mnt/set", disk_of(IMAGE_BYTES)), LIMIT)?;
    start_agent(&mut guest)?;
    store::check_ext4(&extra)?;
    end(guest, host, image)
}

/// Starts the VM process with the disks of its file.
fn start_configured(host: &mut Host) -> Result<()> {
    let folder = host.folder().display().to_string();
    host.start_process(&[], "128M", &["--no-hedge", "--config", &folder])
}

/// libvirt makes no QEMU of a hot-plugged disk reconnect: the service manager keeps its connection.
#[test]
#[ignore = "long: cargo xtask test-long"]
fn a_disk_that_was_added_to_a_running_domain_outlives_kills_grows_and_goes() -> Result<()> {
    unless_qemu_aborts("web1", host, |host, image, libvirt| add_and_remove(host, &image, libvirt))
}

fn add_and_remove(mut host: Host, image: &Path, libvirt: &Libvirt) -> Result<()> {
    let lab = Lab::open()?;
    host.keep_connections();
    let folder = host.folder().display().to_string();
    std::fs::create_dir(host.folder().join("vms"))?;
    let file = host.folder().join("vms/vm.toml");
    let text = format!(
        "version = 1\nport = '{folder}/web1-port.sock'\n[[disk]]\nname = 'web1'\nformat = 'raw'\nimage = '{}'\n\
         socket = '{folder}/web1.sock'\n",
        image.display()
    );
    std::fs::write(&file, &text)?;
    start_configured(&mut host)?;
    let mut guest = boot(&host, &lab, libvirt, "libvirt, vhost-user")?;
    fill(&mut guest, &host)?;

    let extra = host.folder().join("extra.img");
    store::sparse_image(&extra, 64 << 20)?;
    let described = format!("name=extra,format=raw,image={},socket={folder}/extra.sock", extra.display());
    change_disks(&host, "add", &[&described])?;
    let device = xml(&host, &["--device", "extra", "--target", "vdc", "--config", &folder])?;
    libvirt.virsh_with(&["attach-device", "web1"], &device, &["--live"])?;
    wait_for_disk(&mut guest, "extra", true)?;
    let made = "mkdir -p /tmp/extra && mkfs.ext4 -q $(disk-by-serial extra) && mount $(disk-by-serial extra) /tmp/extra && \
                remoca-workload create --dir /tmp/extra/set --files 4 --file-size 4M --seed 9 && sync";
    guest.run(made, LIMIT)?;
    let verify = "echo 3 > /proc/sys/vm/drop_caches; remoca-workload verify --dir /tmp/extra/set";

    start_work(&mut guest)?;
    for _ in 0..3 {
        let is_kept = |status: &remoca_protocol::control::Status| {
            status.disks.iter().all(|disk| disk.attached && disk.outlives_crash)
                && status.port.as_ref().is_some_and(|port| port.outlives_crash)
        };
        host.wait_until("all connections are kept", is_kept)?;
        let output = Command::new(remoca()?).arg("check").arg(host.control()).args(["--config", &folder]).output()?;
        let found = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(found.contains("reconnect extra: not needed"), "{found}");
        host.kill_process()?;
        start_configured(&mut host)?;
        host.wait_until("all connections are back", is_kept)?;
        guest.run(verify, LIMIT)?;
    }

    std::fs::File::options().write(true).open(&extra)?.set_len(96 << 20)?;
    change_disks(&host, "rescan", &[])?;
    wait_for_size(&mut guest, "extra", 96 << 20)?;
    let grown = "resize2fs $(disk-by-serial extra) && [ $(df --output=size -k /tmp/extra | tail -1) -gt 70000 ]";
    guest.run(grown, LIMIT)?;
    guest.run(verify, LIMIT)?;

    let Err(refused) = change_disks(&host, "remove", &["extra"]) else {
        return Err("it is in use, and was removed".into());
    };
    assert!(refused.to_string().contains("virsh detach-disk"), "{refused}");
    guest.run("umount /tmp/extra", LIMIT)?;
    libvirt.virsh_with(&["detach-device", "web1"], &device, &["--live"])?;
    wait_for_disk(&mut guest, "extra", false)?;
    host.wait_until("the disk is detached", |status| !status.disks[1].attached)?;
    change_disks(&host, "remove", &["extra"])?;
    assert_eq!(host.status()?.disks.len(), 1);
    assert_eq!(std::fs::read_to_string(&file)?, text);
    stop_work(&mut guest)?;
    store::check_ext4(&extra)?;
    end(guest, host, image)
}

#[test]
#[ignore = "long: cargo xtask test-long"]
fn a_domain_migrates_to_another_libvirtd_with_its_disk() -> Result<()> {
    unless_qemu_aborts("web1", host, |host, image, libvirt| migrate(host, &image, libvirt))
}

fn migrate(mut host: Host, image: &Path, libvirt: &Libvirt) -> Result<()> {
    let lab = Lab::open()?;
    start_vhost(&mut host, image)?;
    let mut config = host.guest(&lab, "web1")?;
    config.disks.clear();
    config.memory_mib = 128;
    // Each libvirtd has a /run/remoca of its own.
    let mut guest = config.boot_under(&lab, libvirt, &domain_xml("libvirt, vhost-user")?)?;
    fill(&mut guest, &host)?;

    let mut other = Host::new(remoca()?, "256M")?;
    other.without_port();
    other.connect_to(&host.folder().join("memory.sock"));
    let secret = key::generate()?;
    let file = other.folder().join("key");
    key::write_new(&secret, &file)?;
    let incoming = format!("unix:{}", other.folder().join("incoming").display());
    let port = format!("--port={}", other.folder().join("web1-port.sock").display());
    let key = format!("--incoming-key={}", file.display());
    let more = [port.as_str(), "--no-hedge", "--incoming", &incoming, &key];
    other.start_process(&[Image { name: "web1", path: image.to_owned(), options: "" }], "128M", &more)?;
    let other_libvirt = Libvirt::start(other.folder(), &[])?;
    let offer = Ask::Migrate { to: incoming, key: secret };
    if let Reply::Error { error } = control::call(&host.control(), offer)? {
        return Err(error.into());
    }

    start_work(&mut guest)?;
    let uri = other_libvirt.uri();
    libvirt.virsh(&[
        "migrate",
        "--live",
        "--persistent",
        "--unsafe",
        "web1",
        uri,
        "--migrateuri",
        "tcp://127.0.0.1",
    ])?;
    guest.moved_to(&other_libvirt);
    let status = other.wait_until("the disk is there", |status| {
        status.migration.as_ref().is_none_or(|migration| migration.has_disks) && status.disks[0].attached
    })?;
    let news = status.migration.and_then(|migration| migration.news).unwrap_or_default();
    assert!(news.contains("has the disks, warm"), "{news}");
    assert!(!host.status()?.migration.is_none_or(|migration| migration.has_disks), "the source holds nothing");
    host.stop_process()?;
    stop_work(&mut guest)?;
    end(guest, other, image)
}
