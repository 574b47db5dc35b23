//! Tests of the laboratory itself, with real guests.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use remoca_lab::{Disk, Error, GuestConfig, Lab, Service, program, store, workload::journal::Versions};

/// Time limit for any single step on a busy machine.
const LIMIT: Duration = Duration::from_secs(240);

fn exists(pid: u32) -> bool {
    // A process that has ended but was not waited for yet counts as ended.
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

#[test]
fn a_data_set_made_in_a_guest_is_whole_on_the_host() {
    let lab = Lab::open().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("data.img");
    store::sparse_image(&image, 64 << 20).unwrap();
    store::format_ext4(&image).unwrap();
    let workload = program::build(&lab, "remoca-lab", "remoca-workload").unwrap();
    let mut config =
        GuestConfig::new("lab-test-data", 256).disk(Disk::file("data", &image)).payload("remoca-workload", &workload);
    config.may_reboot = true;
    let mut guest = config.boot(&lab).unwrap();

    let mount = "mount $(disk-by-serial data) /mnt";
    guest.run(mount, LIMIT).unwrap();
    guest.run("remoca-workload create --dir /mnt/set --files 4 --file-size 2M --seed 7", LIMIT).unwrap();
    let mix = "remoca-workload write-mix --dir /mnt/set --journal /tmp/journal --record 1536 --count 500 --json";
    let result = guest.run(mix, LIMIT).unwrap();
    let result: serde_json::Value = serde_json::from_str(result.lines().last().unwrap()).unwrap();
    assert_eq!((&result["io_errors"], &result["wrong_signatures"]), (&0.into(), &0.into()), "{result}");
    assert!(result["measured"]["writes"]["count"].as_u64().unwrap() > 0);
    let journal = folder.path().join("journal");
    fs::write(&journal, guest.fetch("/tmp/journal").unwrap()).unwrap();

    let mut guest = guest.reboot(LIMIT).unwrap();
    guest.run(mount, LIMIT).unwrap();
    guest.put("/tmp/journal", &fs::read(&journal).unwrap()).unwrap();
    guest.run("remoca-workload verify --dir /mnt/set --journal /tmp/journal --direct", LIMIT).unwrap();
    let stale = guest.try_run("remoca-workload verify --dir /mnt/set", LIMIT).unwrap();
    assert_eq!(stale.status, 1);
    assert!(stale.text().contains("was never written, must be 0 at most"), "{}", stale.text());
    guest.shut_down().unwrap();

    store::check_ext4(&image).unwrap();
    let versions = Versions::read(&journal, remoca_lab::workload::journal::After::Order).unwrap();
    let verified = store::verify_ext4(&image, "/set", &versions).unwrap();
    assert_eq!((verified.sectors, verified.faults), (16384, Default::default()));
}

#[test]
fn jobs_run_side_by_side_and_tell_how_they_ended() {
    let lab = Lab::open().unwrap();
    let mut guest = GuestConfig::new("lab-test-jobs", 192).boot(&lab).unwrap();

    let mut slow = guest.start("mkfifo /tmp/go; echo one; read line < /tmp/go; echo $line; exit 3").unwrap();
    let mut other = guest.start("echo there; sleep 1000").unwrap();
    assert_eq!(guest.next_line(&mut other, LIMIT).unwrap().as_deref(), Some("there"));
    assert_eq!(guest.next_line(&mut slow, LIMIT).unwrap().as_deref(), Some("one"));
    assert_eq!(guest.run("echo side", LIMIT).unwrap(), "side");
    let large: Vec<u8> = (0..3_000_000u32).map(|number| number.to_le_bytes()[1]).collect();
    guest.put("/tmp/large", &large).unwrap();
    assert!(guest.fetch("/tmp/large").unwrap() == large);
    guest.run("echo two > /tmp/go", LIMIT).unwrap();
    assert_eq!(guest.next_line(&mut slow, LIMIT).unwrap().as_deref(), Some("two"));
    assert_eq!(guest.wait(&slow, LIMIT).unwrap().status, 3);

    other.signal(15).unwrap();
    assert_eq!(guest.wait(&other, LIMIT).unwrap().status, -15);
    let background = guest.try_run("sleep 1000 & echo left", LIMIT).unwrap();
    assert_eq!((background.status, background.text().as_str()), (0, "left"));
    let error = guest.run("echo why >&2; exit 4", LIMIT).unwrap_err().to_string();
    assert!(error.contains("exit code 4") && error.contains("why"), "{error}");
    assert!(guest.fetch("/missing").unwrap_err().to_string().contains("No such file"));

    guest.run("echo @@marker > /dev/console", LIMIT).unwrap();
    guest.wait_for_console("@@marker", LIMIT).unwrap();
    let mut qmp = guest.qmp().unwrap();
    qmp.pause().unwrap();
    assert!(!qmp.is_running().unwrap());
    qmp.resume().unwrap();
    assert!(qmp.is_running().unwrap());
    assert_eq!(guest.run("echo on", LIMIT).unwrap(), "on");
    guest.shut_down().unwrap();
}

#[test]
fn a_guest_that_takes_too_long_is_killed_and_heard() {
    let lab = Lab::open().unwrap();
    let mut guest = GuestConfig::new("lab-test-hung", 192).boot(&lab).unwrap();
    let pid = guest.pid();
    guest.run("echo last words > /dev/console", LIMIT).unwrap();
    guest.wait_for_console("last words", LIMIT).unwrap();
    let error = guest.run("sleep 1000", Duration::from_secs(1)).unwrap_err();
    assert!(matches!(error, Error::GuestTimeout { .. }), "{error}");
    assert!(error.to_string().contains("last words"), "{error}");
    assert!(!exists(pid));

    let mut broken = GuestConfig::new("lab-test-broken", 192);
    broken.kernel_args.push("rdinit=/missing".into());
    let error = broken.boot(&lab).unwrap_err();
    assert!(matches!(error, Error::GuestEnded { .. }), "{error}");
    assert!(error.to_string().contains("Kernel panic"), "{error}");
}

#[test]
fn a_vhost_user_disk_is_found_by_its_serial_number() {
    let lab = Lab::open().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("data.img");
    store::sparse_image(&image, 8 << 20).unwrap();
    let socket = folder.path().join("vhost");
    let mut command = Command::new("qemu-storage-daemon");
    command.arg("--blockdev").arg(format!("file,node-name=disk,filename={}", image.display())).arg("--export").arg(
        format!(
            "vhost-user-blk,id=export,node-name=disk,writable=on,num-queues=2,addr.type=unix,addr.path={}",
            socket.display()
        ),
    );
    let mut daemon = Service::start("qemu-storage-daemon", command, &folder.path().join("log")).unwrap();
    daemon.wait_for_file(&socket, LIMIT).unwrap();
    let disk = Disk::vhost_user("vhost_user_blk", &socket);
    let mut guest = GuestConfig::new("lab-test-vhost", 192).disk(disk).boot(&lab).unwrap();
    let write = "printf 'from the guest' | dd of=$(disk-by-serial vhost_user_blk) bs=4096 seek=3 conv=fsync";
    guest.run(write, LIMIT).unwrap();
    guest.shut_down().unwrap();
    let content = fs::read(&image).unwrap();
    assert!(content[3 * 4096..].starts_with(b"from the guest"));
}

#[test]
fn nothing_is_left_when_the_laboratory_is_killed() {
    let mut runner = Command::new(env!("CARGO_BIN_EXE_remoca-lab"))
        .args(["run", "--", "sleep 1000"])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let started = Instant::now();
    let guest = loop {
        if let Some(pid) = qemu_child_of(runner.id()) {
            break pid;
        }
        assert!(started.elapsed() < 5 * LIMIT, "no guest was started");
        thread::sleep(Duration::from_millis(50));
    };
    runner.kill().unwrap();
    runner.wait().unwrap();
    while exists(guest) {
        assert!(started.elapsed() < 5 * LIMIT, "the guest outlived the laboratory");
        thread::sleep(Duration::from_millis(10));
    }
}

fn qemu_child_of(parent: u32) -> Option<u32> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).find(|pid| {
        let stat = fs::read_to_string(Path::new("/proc").join(u32::to_string(pid)).join("stat")).unwrap_or_default();
        // PID (NAME) STATE PARENT ...
        let (name, rest) = stat.rsplit_once(") ").unwrap_or_default();
        let parent_found = rest.split(' ').nth(1).and_then(|field| field.parse().ok());
        name.contains("qemu") && parent_found == Some(parent)
    })
}
