//! Monitors of real QEMUs and of a real libvirt, and a guest whose balloon gives memory to its local tier and gets it back.

use remoca_guest_tests::{Host, Image, LIMIT, Result, assert_kernel_is_content, remoca, unless_qemu_aborts};
use remoca_host::guest::{GuestMemory, Monitor, Qemu, Unusable, Virsh};
use remoca_lab::{DomainXml, Guest, GuestConfig, Lab, Service, store, workload::dataset};
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const TIER_BYTES: u64 = 8 * MIB;

/// Memory of a guest, as its monitor and its VM process tell.
#[derive(Debug)]
struct Seen {
    memory: GuestMemory,
    resident: u64,
}

impl Deref for Seen {
    type Target = GuestMemory;

    fn deref(&self) -> &GuestMemory {
        &self.memory
    }
}

/// Reads the guest's memory, as the daemon does, until `done`.
fn wait_for(monitor: &mut dyn Monitor, host: &Host, what: &str, mut done: impl FnMut(&Seen) -> bool) -> Result<Seen> {
    let deadline = Instant::now() + LIMIT;
    loop {
        let resident = || host.status().ok()?.memory.guest_resident_bytes;
        match monitor.read().map(|memory| Seen { memory, resident: resident().unwrap_or_default() }) {
            Ok(seen) if done(&seen) => return Ok(seen),
            // A guest that is emulated on a busy machine may be late; nothing else may be wrong.
            Err(Unusable::Advised(why)) => return Err(format!("{what}: {why}").into()),
            other if Instant::now() > deadline => return Err(format!("{what}: not in time; {other:?}").into()),
            _ => std::thread::sleep(Duration::from_millis(100)),
        }
    }
}

/// Reads the guest's memory, again if nothing answers in time: a QEMU that is emulated on a busy machine may be late.
fn answer(monitor: &mut dyn Monitor) -> Result<std::result::Result<GuestMemory, Unusable>> {
    let deadline = Instant::now() + LIMIT;
    loop {
        match monitor.read() {
            Err(Unusable::Silent(why)) if Instant::now() > deadline => return Err(format!("not in time; {why}").into()),
            Err(Unusable::Silent(_)) => std::thread::sleep(Duration::from_millis(100)),
            read => return Ok(read),
        }
    }
}

/// Starts QEMU without a guest system, with a monitor.
fn empty_qemu(folder: &Path, more: &[&str]) -> Result<(Service, Qemu)> {
    let socket = folder.join("qmp");
    let mut command = Command::new("qemu-system-x86_64");
    command.args(["-accel", "tcg", "-m", "64,slots=2,maxmem=1G", "-display", "none", "-nodefaults", "-no-user-config"]);
    command.arg("-qmp").arg(format!("unix:{},server=on,wait=off", socket.display())).args(more);
    let mut service = Service::start("QEMU", command, &folder.join("qemu.log"))?;
    service.wait_for_socket(&socket, LIMIT)?;
    Ok((service, Qemu::new(socket)))
}

#[test]
fn what_forbids_a_balloon_is_found_in_a_real_qemu() -> Result<()> {
    let balloon = ["-machine", "q35", "-device", "virtio-balloon-pci,id=balloon"];
    let virtio_mem = ["-object", "memory-backend-ram,id=plugged,size=128M", "-device", "virtio-mem-pci,memdev=plugged"];
    let dimm = ["-object", "memory-backend-ram,id=plugged,size=128M", "-device", "pc-dimm,memdev=plugged"];
    for (more, why) in [
        (vec!["-machine", "none"], "has no balloon"),
        (vec!["-machine", "q35"], "has no balloon"),
        ([&balloon[..], &["-S"]].concat(), "does not run"),
    ] {
        let folder = tempfile::tempdir()?;
        let (_service, mut monitor) = empty_qemu(folder.path(), &more)?;
        match answer(&mut monitor)? {
            Err(Unusable::Advised(text)) if text.contains(why) => {}
            other => return Err(format!("{more:?}: {other:?}").into()),
        }
    }
    for (more, why) in [(&virtio_mem, "virtio-mem"), (&dimm, "dimm")] {
        let folder = tempfile::tempdir()?;
        let (_service, mut monitor) = empty_qemu(folder.path(), &[&balloon[..], more].concat())?;
        match answer(&mut monitor)? {
            // What was plugged in is in neither size.
            Ok(GuestMemory { boot_bytes, actual_bytes, held: Some(text), .. })
                if text.contains(why) && (boot_bytes, actual_bytes) == (64 * MIB, 64 * MIB) => {}
            other => return Err(format!("{more:?}: {other:?}").into()),
        }
    }
    Ok(())
}

#[test]
fn a_real_qemu_is_read_between_other_clients_and_its_death_is_noticed() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let more = ["-machine", "q35", "-device", "virtio-balloon-pci"];
    let (mut service, mut monitor) = empty_qemu(folder.path(), &more)?;
    let all = GuestMemory { boot_bytes: 64 * MIB, actual_bytes: 64 * MIB, ..GuestMemory::default() };
    assert_eq!(answer(&mut monitor)?, Ok(all.clone()));
    let other = std::os::unix::net::UnixStream::connect(folder.path().join("qmp"))?;
    assert!(matches!(monitor.read(), Err(Unusable::Silent(why)) if why.contains("busy with another client")));
    drop(other);
    // No driver follows.
    monitor.set_bytes(32 * MIB)?;
    assert_eq!(answer(&mut monitor)?, Ok(all));
    assert!(monitor.set_bytes(0).unwrap_err().contains("balloon: "));
    service.kill()?;
    assert!(matches!(monitor.read(), Err(Unusable::Silent(why)) if why.contains("no QEMU listens there")));
    Ok(())
}

/// Starts a memory server for the local tier, and a VM process with a disk of 256 MiB of files.
fn host_with_tier() -> Result<(Host, Service)> {
    let mut host = Host::new(remoca()?, "256M")?;
    let (image, files) = (host.folder().join("data.img"), host.folder().join("files"));
    dataset::create(&files.join("set"), 4, 64 << 20, 6)?;
    store::ext4_of_folder(&image, 576 << 20, &files)?;
    let socket = host.folder().join("tier.sock");
    let address = format!("local:{}", socket.display());
    let mut command = Command::new(host.program());
    command.args(["serve", "--no-lock", "--memory", "256M", "--listen", &format!("unix:{}", socket.display())]);
    let mut tier = Service::start("remoca serve", command, &host.folder().join("tier.log"))?;
    tier.wait_for_socket(&socket, LIMIT)?;
    host.without_port();
    host.start_server()?;
    let size = TIER_BYTES.to_string();
    // The image is in the page cache. With hedging, the disk would rightly be preferred.
    let options = ["--no-hedge", "--local", &size, "--local-server", &address];
    host.start_process(&[Image { name: "data", path: image, options: "" }], "64M", &options)?;
    Ok((host, tier))
}

/// Boots a guest whose reads overwrite what it evicted, so that the VM process looks at its memory, and has it verify its files until
/// [`end_work`].
fn start_work(guest: &mut Guest) -> Result<()> {
    guest.run("modprobe virtio_balloon; mount -o noatime,noinit_itable $(disk-by-serial data) /mnt", LIMIT)?;
    let work = "until [ -e /tmp/stop ]; do remoca-workload verify --dir /mnt/set || break; echo . >> /tmp/rounds; done; \
                [ -e /tmp/stop ]; echo $? > /tmp/work.status";
    guest.run(&format!("({work}) > /tmp/work.log 2>&1 &"), LIMIT)?;
    rounds(guest, 1)
}

/// Waits until the files have been verified `count` more times.
fn rounds(guest: &mut Guest, count: u32) -> Result<()> {
    let wait = format!(
        "had=$(wc -l < /tmp/rounds || echo 0); for i in $(seq 3000); do [ -s /tmp/work.status ] && break; \
         [ $(wc -l < /tmp/rounds || echo 0) -ge $((had + {count})) ] && exit 0; sleep 0.1; done; cat /tmp/work.log; exit 1"
    );
    guest.run(&wait, 2 * LIMIT)?;
    Ok(())
}

fn end_work(guest: &mut Guest) -> Result<()> {
    let end = "touch /tmp/stop; for i in $(seq 3000); do [ -s /tmp/work.status ] && break; sleep 0.1; done; \
               [ \"$(cat /tmp/work.status)\" = 0 ] || { cat /tmp/work.log; exit 1; }";
    guest.run(end, 2 * LIMIT)?;
    assert_kernel_is_content(guest)
}

#[test]
fn a_balloon_gives_memory_to_the_local_tier_and_gets_it_back() -> Result<()> {
    const LENT: u64 = 96 * MIB;
    let lab = Lab::open()?;
    let (host, _tier) = host_with_tier()?;
    let socket = host.folder().join("qmp");
    let mut config: GuestConfig = host.guest(&lab, "balloon")?;
    (config.balloon, config.monitor) = (true, Some(socket.clone()));
    config.kernel_args.push("init_on_alloc=0".into());
    let mut guest = config.boot(&lab)?;
    start_work(&mut guest)?;
    let mut monitor = Qemu::new(socket);
    let boot = 256 * MIB;
    let before = wait_for(&mut monitor, &host, "the guest uses its memory", |memory| memory.resident > boot / 4 * 3)?;
    assert_eq!((before.boot_bytes, before.actual_bytes), (boot, boot));

    monitor.set_bytes(boot - LENT)?;
    let lent = wait_for(&mut monitor, &host, "the balloon is inflated, and the host has its memory", |memory| {
        memory.actual_bytes == boot - LENT && memory.resident + LENT / 10 * 9 <= before.resident
    })?;
    println!("resident: {} MiB, then {} MiB", before.resident / MIB, lent.resident / MIB);
    host.set_local(TIER_BYTES + LENT)?;
    host.wait_until("the tier grows", |status| status.cache.local_granted_bytes == TIER_BYTES + LENT)?;
    rounds(&mut guest, 2)?;
    let told = wait_for(&mut monitor, &host, "the guest tells of its memory", |memory| {
        memory.available_bytes.is_some() && memory.pressure.major_faults_per_s.is_some()
    })?;
    assert!(told.resident <= boot - LENT + LENT / 10, "nothing that was given is touched: {told:?}");
    assert!(host.counter("frames_looked_at")? > 1000, "the VM process looks at the guest's memory");

    host.set_local(TIER_BYTES)?;
    host.wait_until("the tier shrinks", |status| status.cache.local_granted_bytes == TIER_BYTES)?;
    monitor.set_bytes(boot)?;
    wait_for(&mut monitor, &host, "the balloon is deflated", |memory| memory.actual_bytes == boot)?;
    wait_for(&mut monitor, &host, "the guest uses its memory again", |memory| {
        memory.resident >= lent.resident + LENT / 10 * 8
    })?;
    rounds(&mut guest, 1)?;
    end_work(&mut guest)?;
    assert_eq!(host.counter("fetch_wrong")?, 0);
    guest.shut_down()?;
    Ok(())
}

fn idle_host() -> Result<(Host, PathBuf)> {
    let host = Host::new(remoca()?, "64M")?;
    let folder = host.folder().to_owned();
    Ok((host, folder))
}

const DIMM: &str = "<memory model='dimm'><target><size unit='MiB'>128</size><node>0</node></target></memory>";

#[test]
fn a_domain_of_libvirt_is_read_and_asked_by_virsh() -> Result<()> {
    unless_qemu_aborts("lends", idle_host, |host, _, libvirt| {
        let lab = Lab::open()?;
        let mut monitor = Virsh::new("lends".into()).at(libvirt.uri());
        assert!(matches!(monitor.read(), Err(Unusable::Silent(why)) if why.contains("virsh failed")));
        let mut config = GuestConfig::new("lends", 192);
        (config.balloon, config.boot_limit) = (true, LIMIT);
        let with_slots = DomainXml { has_slots: true, ..DomainXml::default() };
        let mut guest = config.boot_under(&lab, libvirt, &with_slots)?;
        guest.run("modprobe virtio_balloon", LIMIT)?;
        let boot = wait_for(&mut monitor, &host, "the domain is read", |memory| memory.actual_bytes == 192 * MIB)?;
        assert_eq!((boot.boot_bytes, &boot.held), (192 * MIB, &None));
        monitor.set_bytes(160 * MIB)?;
        wait_for(&mut monitor, &host, "the balloon is inflated", |memory| memory.actual_bytes == 160 * MIB)?;
        let told = |memory: &Seen| memory.available_bytes.is_some() && memory.pressure.swapped_in_per_s.is_some();
        wait_for(&mut monitor, &host, "the guest tells of its memory", told)?;
        // A DIMM is in no size, and what is lent still comes back.
        let dimm = host.folder().join("dimm.xml");
        std::fs::write(&dimm, DIMM)?;
        libvirt.virsh(&["attach-device", "lends", &dimm.display().to_string(), "--live"])?;
        let plugged = wait_for(&mut monitor, &host, "the DIMM is there", |memory| memory.held.is_some())?;
        assert_eq!((plugged.boot_bytes, plugged.actual_bytes), (192 * MIB, 160 * MIB));
        monitor.set_bytes(192 * MIB)?;
        wait_for(&mut monitor, &host, "the balloon is deflated", |memory| memory.actual_bytes == 192 * MIB)?;
        libvirt.virsh(&["suspend", "lends"])?;
        assert!(matches!(answer(&mut monitor)?, Err(Unusable::Advised(why)) if why.contains("does not run")));
        libvirt.virsh(&["resume", "lends"])?;
        guest.shut_down()?;
        assert!(matches!(monitor.read(), Err(Unusable::Silent(_) | Unusable::Advised(_))));
        Ok(())
    })
}
