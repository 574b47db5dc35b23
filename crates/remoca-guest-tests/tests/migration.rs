//! A working guest migrates from one host to another and back, between network namespaces with a memory server that
//! both reach. One migration is cancelled at the last moment. The disk and the cache move along. The guest sees no
//! error and no wrong byte.

use remoca_guest_tests::{LIMIT, Result, assert_kernel_is_content, remoca, start_agent};
use remoca_io::{control, key};
use remoca_lab::workload::journal::{After, Versions};
use remoca_lab::{Disk, Guest, GuestConfig, Incoming, Lab, Qmp, Service, program, store};
use remoca_protocol::control::{Command as Ask, Reply, Secret, Status};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const HANDOVER_PORT: u16 = 7100;
const QEMU_PORT: u16 = 7200;

/// Three namespaces in a triangle: two hosts of the VM, and the host of the memory server.
struct Network {
    names: [String; 3],
}

impl Network {
    fn new() -> Result<Self> {
        let names = ["a", "b", "m"].map(|name| format!("remoca-{}-{name}", std::process::id()));
        let network = Self { names };
        for name in &network.names {
            ip(&["netns", "add", name])?;
            ip(&["-n", name, "link", "set", "lo", "up"])?;
        }
        for (left, right, net) in [(0, 1, 1), (0, 2, 2), (1, 2, 3)] {
            let [left_name, right_name] = [&network.names[left], &network.names[right]];
            let [left_link, right_link] = [format!("to{right}"), format!("to{left}")];
            let peer = ["peer", "name", &right_link, "netns", right_name];
            ip(&[&["-n", left_name, "link", "add", &left_link, "type", "veth"][..], &peer].concat())?;
            for (name, link, host) in [(left_name, &left_link, 1), (right_name, &right_link, 2)] {
                ip(&["-n", name, "addr", "add", &format!("10.99.{net}.{host}/24"), "dev", link])?;
                ip(&["-n", name, "link", "set", link, "up"])?;
            }
        }
        // The memory server has the same address for both hosts.
        ip(&["-n", &network.names[2], "addr", "add", "10.99.9.9/32", "dev", "lo"])?;
        for (host, via) in [(0, "10.99.2.2"), (1, "10.99.3.2")] {
            ip(&["-n", &network.names[host], "route", "add", "10.99.9.9", "via", via])?;
        }
        Ok(network)
    }

    fn command(&self, at: usize, program: &Path) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.names[at]]).arg(program);
        command
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for name in &self.names {
            // Fails for a namespace that was not made, if the test failed early.
            let _ = ip(&["netns", "del", name]);
        }
    }
}

fn ip(arguments: &[&str]) -> Result<()> {
    let output = Command::new("ip").args(arguments).output()?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("ip {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr)).into()),
    }
}

/// A VM process on one of the two hosts.
struct Process {
    at: usize,
    folder: PathBuf,
    service: Service,
}

impl Process {
    fn start(stage: &Stage, at: usize, number: u32, incoming: bool) -> Result<Self> {
        let folder = stage.folder.path().join(number.to_string());
        std::fs::create_dir_all(&folder)?;
        let mut command = stage.network.command(at, &stage.program);
        let disk = format!("name=data,image={},socket={}", stage.image.display(), folder.join("data").display());
        command.args(["disk", "--name", "vm", "--cache", "256M", "--server", "tcp:10.99.9.9:7070", "--disk", &disk]);
        // A disk this fast would rightly be preferred to a memory server that is busy for a moment.
        command.arg("--no-hedge");
        command.arg("--port").arg(folder.join("port")).arg("--control").arg(folder.join("ctl"));
        if incoming {
            let key = stage.folder.path().join("key");
            if !key.exists() {
                key::write_new(&stage.key, &key)?;
            }
            command.arg("--incoming").arg(address(at, HANDOVER_PORT)).arg("--incoming-key").arg(&key);
        }
        let mut service = Service::start("remoca disk", command, &folder.join("log"))?;
        service.wait_for_file(&folder.join("ctl"), LIMIT)?;
        Ok(Self { at, folder, service })
    }

    fn disks(&self) -> Vec<Disk> {
        ["data", "port"].map(|name| Disk::vhost_user(name, &self.folder.join(name))).to_vec()
    }

    fn ask(&self, command: Ask) -> Result<Status> {
        match control::call(&self.folder.join("ctl"), command)? {
            Reply::Status(status) => Ok(*status),
            Reply::Curve(_) => Err("it is no status".into()),
            Reply::Error { error } => Err(error.into()),
        }
    }

    fn has_disks(&self) -> Result<bool> {
        Ok(self.ask(Ask::Status)?.migration.is_none_or(|migration| migration.has_disks))
    }

    fn news(&self) -> Result<String> {
        Ok(self.ask(Ask::Status)?.migration.and_then(|migration| migration.news).unwrap_or_default())
    }

    fn counter(&self, name: &str) -> Result<u64> {
        Ok(self.ask(Ask::Status)?.counters[name])
    }

    /// Returns the share of blocks that the cache answered, among the blocks that the guest reads from now on.
    fn hit_ratio(&self) -> Result<f64> {
        const BLOCKS: u64 = 4000;
        let counts = || -> Result<(u64, u64)> {
            let counters = self.ask(Ask::Status)?.counters;
            Ok((counters["hit_blocks"] + counters["zero_blocks"], counters["read_blocks"]))
        };
        let before = counts()?;
        let deadline = Instant::now() + LIMIT;
        loop {
            let now = counts()?;
            if now.1 - before.1 >= BLOCKS {
                return Ok((now.0 - before.0) as f64 / (now.1 - before.1) as f64);
            }
            if Instant::now() > deadline {
                return Err(format!("the guest reads too little: {before:?} {now:?}").into());
            }
            sleep(Duration::from_millis(50));
        }
    }
}

/// Returns the address at which the processes of a host listen, as the other host reaches it.
fn address(at: usize, port: u16) -> String {
    format!("tcp:10.99.1.{}:{port}", at + 1)
}

struct Stage {
    network: Network,
    program: PathBuf,
    folder: TempDir,
    image: PathBuf,
    key: Secret,
}

fn wait_until(what: &str, mut done: impl FnMut() -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + LIMIT;
    while !done()? {
        if Instant::now() > deadline {
            return Err(format!("not in time: {what}").into());
        }
        sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Waits until QEMU reports this state of the migration. Returns the report.
fn wait_for_migration(qmp: &mut Qmp, wanted: &str) -> Result<Value> {
    let mut seen = Value::Null;
    wait_until(wanted, || {
        seen = qmp.execute("query-migrate", json!({}))?;
        match seen["status"].as_str() {
            Some("failed") => Err(format!("QEMU gives the migration up: {seen}").into()),
            status => Ok(status == Some(wanted)),
        }
    })?;
    Ok(seen)
}

/// Starts the VM process and the QEMU that the guest is to move to.
fn prepare(stage: &Stage, guest: &mut Guest, from: &Process, number: u32) -> Result<(Process, Incoming)> {
    let to = Process::start(stage, 1 - from.at, number, true)?;
    from.ask(Ask::Migrate { to: address(to.at, HANDOVER_PORT), key: stage.key.clone() })?;
    let incoming = guest.incoming(&address(to.at, QEMU_PORT), |config| {
        config.disks = to.disks();
        config.name_space = Some(stage.network.names[to.at].clone());
    })?;
    Ok((to, incoming))
}

/// Migrates the guest as an operator would.
fn migrate(stage: &Stage, guest: &mut Guest, qmp: &mut Qmp, from: &mut Process, number: u32) -> Result<()> {
    let before = from.hit_ratio()?;
    let (to, incoming) = prepare(stage, guest, from, number)?;
    qmp.execute("migrate", json!({"uri": address(to.at, QEMU_PORT)}))?;
    let done = wait_for_migration(qmp, "completed")?;
    *qmp = guest.go_on(incoming)?;
    wait_until("the guest runs there", || Ok(qmp.is_running()?))?;
    wait_until("the disks are there", || to.has_disks())?;
    assert!(to.news()?.contains("has the disks, warm"), "{}", to.news()?);
    assert!(!from.has_disks()?, "the source holds nothing");
    let is_connected = |status: Status| status.server.is_some_and(|server| server.connected);
    wait_until("the memory server is found", || Ok(is_connected(to.ask(Ask::Status)?)))?;
    let after = to.hit_ratio()?;
    eprintln!(
        "migration {number}: hit ratio {before:.2} before, {after:.2} after; QEMU says {} ms of downtime; source: {}; target: {}",
        done["downtime"],
        from.news()?,
        to.news()?
    );
    assert!(after > before / 2.0, "hit ratio {before:.2} before, {after:.2} after");
    assert_eq!(to.counter("fetch_wrong")? + to.counter("foreign_writes")? + to.counter("disk_errors")?, 0);
    let status = from.service.terminate(LIMIT)?;
    assert!(status.success(), "{status}");
    *from = to;
    Ok(())
}

/// Cancels the migration when the guest has already stopped and its disks have moved.
fn call_off(stage: &Stage, guest: &mut Guest, qmp: &mut Qmp, from: &Process, number: u32) -> Result<()> {
    let (mut to, incoming) = prepare(stage, guest, from, number)?;
    let switch = |on: bool| json!({"capabilities": [{"capability": "pause-before-switchover", "state": on}]});
    qmp.execute("migrate-set-capabilities", switch(true))?;
    qmp.execute("migrate", json!({"uri": address(to.at, QEMU_PORT)}))?;
    wait_for_migration(qmp, "pre-switchover")?;
    wait_until("the disks are there", || to.has_disks())?;
    assert!(!from.has_disks()?);
    qmp.execute("migrate_cancel", json!({}))?;
    wait_for_migration(qmp, "cancelled")?;
    wait_until("the guest goes on", || Ok(qmp.is_running()?))?;
    wait_until("the disks are back", || from.has_disks())?;
    assert!(from.news()?.contains("has the disks, warm"), "{}", from.news()?);
    assert!(!to.has_disks()?);
    qmp.execute("migrate-set-capabilities", switch(false))?;
    drop(incoming);
    assert!(to.service.terminate(LIMIT)?.success());
    Ok(())
}

#[test]
fn a_guest_migrates_there_and_back_with_its_disk_and_its_cache() -> Result<()> {
    let lab = Lab::open()?;
    let folder = TempDir::new()?;
    let image = folder.path().join("data.img");
    let stage = Stage { network: Network::new()?, program: remoca()?, folder, image, key: key::generate()? };
    store::sparse_image(&stage.image, 1 << 30)?;
    store::format_ext4(&stage.image)?;
    let mut command = stage.network.command(2, &stage.program);
    command.args(["serve", "--no-lock", "--memory", "512M", "--listen", "tcp:10.99.9.9:7070", "--control"]);
    command.arg(stage.folder.path().join("serve.ctl"));
    let mut server = Service::start("remoca serve", command, &stage.folder.path().join("serve.log"))?;
    server.wait_for_file(&stage.folder.path().join("serve.ctl"), LIMIT)?;
    let mut process = Process::start(&stage, 0, 0, false)?;

    let mut config = GuestConfig::new("migration", 256);
    config.disks = process.disks();
    config.name_space = Some(stage.network.names[0].clone());
    (config.migratable, config.boot_limit) = (true, LIMIT);
    // A kernel that clears pages before a disk fills them would hide an unlogged write of the disk from QEMU's copy.
    config.kernel_args.push("init_on_alloc=0".into());
    for (package, program) in [("remoca-agent", "remoca-agent"), ("remoca-lab", "remoca-workload")] {
        config = config.payload(program, &program::build(&lab, package, program)?);
    }
    let mut guest = config.boot(&lab)?;
    let mut qmp = guest.qmp()?;
    guest.run("mount $(disk-by-serial data) /mnt", LIMIT)?;
    start_agent(&mut guest)?;
    guest.run("remoca-workload create --dir /mnt/set --files 12 --file-size 16M --seed 6", LIMIT)?;
    guest.run(
        "remoca-workload write-mix --dir /mnt/set --ratio 10 --record 96K --pattern zipf --journal /tmp/journal \
         --sync-every 20 --stop-file /tmp/stop --json > /tmp/work 2>&1 &",
        LIMIT,
    )?;
    wait_until("the cache hits", || Ok(process.counter("hit_blocks")? > 3000))?;

    migrate(&stage, &mut guest, &mut qmp, &mut process, 1)?;
    call_off(&stage, &mut guest, &mut qmp, &process, 2)?;
    migrate(&stage, &mut guest, &mut qmp, &mut process, 3)?;

    let said = guest
        .run("touch /tmp/stop; while pgrep remoca-workload > /dev/null; do sleep 0.1; done; cat /tmp/work", LIMIT)?;
    let report: Value = serde_json::from_str(said.lines().last().unwrap_or_default())?;
    assert_eq!((report["wrong_signatures"].as_u64(), report["io_errors"].as_u64()), (Some(0), Some(0)), "{report}");
    guest.run("sync; umount /mnt && mount $(disk-by-serial data) /mnt", LIMIT)?;
    guest.run("remoca-workload verify --dir /mnt/set --journal /tmp/journal", LIMIT)?;
    assert_kernel_is_content(&mut guest)?;
    let journal = guest.fetch("/tmp/journal")?;
    guest.shut_down()?;
    assert!(process.service.terminate(LIMIT)?.success());
    store::check_ext4(&stage.image)?;
    let path = stage.folder.path().join("journal");
    std::fs::write(&path, journal)?;
    let verified = store::verify_ext4(&stage.image, "/set", &Versions::read(&path, After::Order)?)?;
    assert!(verified.faults.is_empty(), "{:?}", verified.faults);
    Ok(())
}
