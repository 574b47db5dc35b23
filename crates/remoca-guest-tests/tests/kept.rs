//! A guest whose QEMU never connects again, as libvirt hot-plugs disks, and a VM process that is killed. A service manager,
//! which the test fakes, keeps the connections.

use remoca_guest_tests::{
    Host, Image, LIMIT, Result, assert_kernel_is_content, remoca, remoca_ablation, start_agent, wait_for_disk,
};
use remoca_lab::workload::pattern::Random;
use remoca_lab::{Guest, Lab, Qmp, Service, store};
use serde_json::json;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Moments of a message at which the process is killed, and whether a connection that is kept is lost then.
const PLACES: [(&str, bool); 3] = [("message-begun", true), ("message-answered", true), ("message-kept", false)];

/// What QEMU says while the process is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Talk {
    /// It stops the guest and lets it go on: it asks for the state of each queue, and then says everything again.
    Stop,
    /// It connects again, and then stops the guest and lets it go on.
    Connect,
}

const CACHE: &str = "128M";
const CREATE: &str = "remoca-workload create --dir /mnt/set --files 3 --file-size 64M --seed 3 && sync";
const MIX: &str = "( remoca-workload write-mix --dir /mnt/set --ratio 20 --record 64K --pattern zipf --journal /tmp/journal \
     --sync-every 50 --stop-file /tmp/stop --json > /tmp/mix 2>&1; echo $? > /tmp/mix.status ) > /dev/null 2>&1 &";
const END_MIX: &str = "touch /tmp/stop; for i in $(seq 2000); do [ -s /tmp/mix.status ] && break; sleep 0.1; done; \
     [ \"$(cat /tmp/mix.status)\" = 0 ] || { cat /tmp/mix; exit 1; }; rm /tmp/stop";
const VERIFY: &str = "echo 3 > /proc/sys/vm/drop_caches; remoca-workload verify --dir /mnt/set --journal /tmp/journal";

/// A guest with a disk and the port, which were attached while it ran, and the host that serves them.
struct Scene {
    host: Host,
    guest: Guest,
    qmp: Qmp,
    images: [Image; 1],
    random: Random,
}

impl Scene {
    /// Starts everything. The guest has a port too if `has_port`, and QEMU connects again by itself if `reconnects`.
    fn start(name: &str, program: PathBuf, has_port: bool, reconnects: bool) -> Result<Self> {
        let lab = Lab::open()?;
        let mut host = Host::new(program, "256M")?;
        host.keep_connections();
        if !has_port {
            host.without_port();
        }
        let path = host.folder().join("data.img");
        store::sparse_image(&path, 512 << 20)?;
        store::format_ext4(&path)?;
        host.start_server()?;
        // The image is in the page cache. With hedging, the disk would rightly be preferred.
        let images = [Image { name: "data", path, options: "" }];
        host.start_process(&images, CACHE, &["--no-hedge"])?;
        let mut config = host.guest(&lab, name)?;
        config.disks.clear();
        for slot in ["slot0,chassis=7", "slot1,chassis=8", "slot2,chassis=9", "slot3,chassis=10", "slot4,chassis=11"] {
            config.qemu_args.extend(["-device".to_owned(), format!("pcie-root-port,id={slot}")]);
        }
        let mut guest = config.boot(&lab)?;
        let qmp = guest.qmp()?;
        let mut scene = Self { host, guest, qmp, images, random: Random::new(12) };
        scene.plug("data", 0, reconnects)?;
        wait_for_disk(&mut scene.guest, "data", true)?;
        scene.guest.run("mount $(disk-by-serial data) /mnt", LIMIT)?;
        if has_port {
            scene.plug("port", 1, reconnects)?;
            wait_for_disk(&mut scene.guest, "remoca-port", true)?;
            start_agent(&mut scene.guest)?;
        }
        scene.guest.run(CREATE, LIMIT)?;
        scene.host.wait_until("the cache hits", |status| {
            let _ = scene.guest.run("cat /mnt/set/* > /dev/null", LIMIT);
            status.counters["hit_blocks"] > 1000
        })?;
        scene.wait_until_kept()?;
        Ok(scene)
    }

    /// Attaches a device of the VM process to the guest.
    fn plug(&mut self, device: &str, slot: u32, reconnects: bool) -> Result<()> {
        let (id, socket) = (format!("device{slot}"), format!("socket{slot}"));
        let address = json!({"type": "unix", "data": {"path": self.host.socket(device)}});
        // Since QEMU 9.2, and before.
        let options = if reconnects { json!([{"reconnect-ms": 100}, {"reconnect": 1}]) } else { json!([{}]) };
        let is_added = options.as_array().into_iter().flatten().any(|option| {
            let mut data = option.clone();
            (data["addr"], data["server"]) = (address.clone(), false.into());
            let backend = json!({"type": "socket", "data": data});
            self.qmp.execute("chardev-add", json!({"id": socket, "backend": backend})).is_ok()
        });
        assert!(is_added, "QEMU takes no socket");
        let bus = format!("slot{slot}");
        let device = json!({"driver": "vhost-user-blk-pci", "id": id, "chardev": socket, "bus": bus, "num-queues": 2});
        self.qmp.execute("device_add", device)?;
        Ok(())
    }

    fn wait_until_kept(&self) -> Result<()> {
        self.host.wait_until("the connections are kept", |status| {
            let port = status.port.as_ref();
            port.is_none_or(|port| port.outlives_crash) && status.disks.iter().all(|disk| disk.outlives_crash)
        })?;
        Ok(())
    }

    fn restart(&mut self, more: &[&str]) -> Result<()> {
        self.host.start_process(&self.images, CACHE, &[&["--no-hedge"], more].concat())
    }

    /// Lets the guest work, and kills the process at some moment of it, `kills` times.
    fn expect_no_reconnect(&mut self, kills: u32) -> Result<()> {
        self.guest.run(MIX, LIMIT)?;
        let mut longest = Duration::ZERO;
        for kill in 1..=kills {
            sleep(Duration::from_millis(self.random.below(800)));
            let started = Instant::now();
            self.host.kill_process()?;
            self.restart(&[])?;
            self.wait_until_kept()?;
            longest = longest.max(started.elapsed());
            assert_eq!(self.connects(), 2, "kill {kill}: {}", self.host.log());
        }
        self.guest.run(END_MIX, LIMIT)?;
        println!("{kills} kills: no reconnect; at most {} ms from the kill to the answer", longest.as_millis());
        Ok(())
    }

    /// Kills the process at the passage `passage` of a place, and expects that this costs one reconnect or none. Returns whether
    /// QEMU had said everything once before.
    fn expect_death(&mut self, talk: Talk, (place, is_lost): (&str, bool), passage: u32) -> Result<bool> {
        self.host.kill_process()?;
        let (connects, log_bytes) = (self.connects(), self.host.log().len());
        if talk == Talk::Connect {
            self.host.manager()?.forget();
        }
        let kill_at = format!("{place}:{passage}");
        let mut process = self.host.launch(&self.images, CACHE, &["--no-hedge", "--kill-at", &kill_at])?;
        let is_kept = |host: &Host| talk == Talk::Stop || host.log()[log_bytes..].contains("stays connected");
        while !is_kept(&self.host) && process.exit_status()?.is_none() {
            sleep(Duration::from_millis(5));
        }
        let (is_dead, qmp) = (AtomicBool::new(false), &mut self.qmp);
        let (rounds, was_kept) = std::thread::scope(|scope| -> Result<(u32, bool)> {
            let talks = scope.spawn(|| -> std::result::Result<u32, String> {
                let mut rounds = 0;
                while !is_dead.load(Ordering::SeqCst) {
                    qmp.pause().and_then(|()| qmp.resume()).map_err(|error| error.to_string())?;
                    rounds += 1;
                }
                Ok(rounds)
            });
            let died = process.wait(LIMIT);
            is_dead.store(true, Ordering::SeqCst);
            let died = died?;
            assert_eq!(died.signal(), Some(9), "{talk:?}, {kill_at}: {}", self.host.log());
            let was_kept = is_kept(&self.host);
            self.host.start_process(&self.images, CACHE, &["--no-hedge"])?;
            Ok((talks.join().expect("the thread does not panic")?, was_kept))
        })?;
        self.wait_until_kept()?;
        self.host.wait_until("the guest goes on", |status| status.disks[0].traffic.reads > 0)?;
        let cost = usize::from(is_lost || !was_kept);
        let reconnects = self.connects() - connects - usize::from(talk == Talk::Connect);
        assert_eq!(reconnects, cost, "{talk:?}, {kill_at}: {}", &self.host.log()[log_bytes..]);
        Ok(rounds > 1)
    }

    /// Returns how often a front end has connected so far.
    fn connects(&self) -> usize {
        self.host.log().matches("a hypervisor is connected").count()
    }

    /// Expects that every byte is right, and that almost all processes found the cache warm: a kill in a write that the
    /// kernel began late leaves it cold. Unmounts the disk.
    fn verify(&mut self) -> Result<()> {
        let log = self.host.log();
        let starts = ["the cache starts warm", "the cache starts cold"].map(|how| log.matches(how).count());
        println!("starts: {} warm, {} cold (the first one is)", starts[0], starts[1]);
        assert!(starts[0] > starts[1], "{log}");
        self.guest.run(VERIFY, LIMIT)?;
        assert_kernel_is_content(&mut self.guest)?;
        self.guest.run("umount /mnt", LIMIT)?;
        store::check_ext4(&self.images[0].path)?;
        Ok(())
    }

    /// Starts the VM process, and attaches the disk to the guest once more. The former connection is lost.
    fn begin_again(&mut self, slot: u32) -> Result<()> {
        self.restart(&[])?;
        // The serial number of a disk that hangs cannot be read.
        let count = "ls -d /sys/block/vd* | wc -l";
        let before: u32 = self.guest.run(count, LIMIT)?.trim().parse()?;
        self.plug("data", slot, false)?;
        let wait = format!("for i in $(seq 2000); do [ $({count}) -gt {before} ] && exit 0; sleep 0.1; done; exit 1");
        self.guest.run(&wait, LIMIT)?;
        self.host.wait_until("the connection is kept", |status| {
            status.disks[0].attached && status.disks[0].outlives_crash
        })?;
        Ok(())
    }

    /// Kills the VM process, has QEMU stop the guest, for which it waits for an answer of that process, and expects that the
    /// monitor answers after `deed`.
    fn expect_answer(&mut self, what: &str, deed: impl FnOnce(&Host, &[Image]) -> Result<()>) -> Result<()> {
        self.host.kill_process()?;
        let Self { host, qmp, images, .. } = self;
        let took = std::thread::scope(|scope| -> Result<Duration> {
            let started = Instant::now();
            let stop = scope.spawn(move || qmp.pause().map(|()| started.elapsed()).map_err(|error| error.to_string()));
            deed(host, images)?;
            Ok(stop.join().expect("the thread does not panic")?)
        })?;
        println!("{what}: the monitor answers after {} ms", took.as_millis());
        Ok(self.qmp.resume()?)
    }

    /// Expects that the monitor answers, whatever keeps the VM process from serving.
    fn expect_answers(&mut self) -> Result<()> {
        self.expect_answer("the process is not started again", |host, _| {
            // As systemd does when the unit ends.
            host.manager()?.forget();
            Ok(())
        })?;
        let fails = |host: &Host, images: &[Image]| -> Result<bool> {
            Ok(!host.launch(images, CACHE, &[])?.wait(LIMIT)?.success())
        };
        self.begin_again(2)?;
        let (program, folder) = (remoca()?, TempDir::new()?);
        let mut other = None;
        self.expect_answer("its image is locked by another process", |host, images| {
            let mut process = Command::new(program);
            let control = folder.path().join("control");
            process.arg("disk").arg("--image").arg(&images[0].path).arg("--socket").arg(folder.path().join("socket"));
            process.arg("--control").arg(&control);
            let other = other.insert(Service::start("another process", process, &folder.path().join("log"))?);
            other.wait_for_socket(&control, LIMIT)?;
            assert!(fails(host, images)? && fails(host, images)?);
            Ok(())
        })?;
        drop(other.map(|mut other| other.kill()));
        self.begin_again(3)?;
        let configuration = folder.path().join("vms");
        std::fs::create_dir(&configuration)?;
        std::fs::write(configuration.join("vm.toml"), "version = 1\nnonsense\n")?;
        let options = ["--config", &folder.path().display().to_string()];
        self.expect_answer("its configuration is broken", |host, _| {
            for _ in 0..2 {
                assert!(!host.launch(&[], CACHE, &options)?.wait(LIMIT)?.success());
            }
            Ok(())
        })?;
        self.begin_again(4)?;
        let gate = folder.path().join("gate");
        std::fs::write(&gate, "")?;
        let mut held = None;
        self.host.use_program(remoca_ablation()?);
        self.expect_answer("its index is not ready", |host, images| {
            held = Some(host.launch(images, CACHE, &["--hold-at", &format!("index-found:{}", gate.display())])?);
            Ok(())
        })?;
        assert!(self.host.status().is_err(), "it does not serve yet");
        Ok(())
    }
}

#[test]
#[ignore = "long: cargo xtask test-long"]
fn a_qemu_that_never_connects_again_goes_on_after_kills_and_never_waits_for_long() -> Result<()> {
    let mut scene = Scene::start("kept", remoca()?, true, false)?;
    scene.expect_no_reconnect(4)?;
    scene.verify()?;
    scene.expect_answers()
}

#[test]
#[ignore = "long: cargo xtask test-long"]
fn a_qemu_that_never_connects_again_goes_on_after_a_hundred_kills() -> Result<()> {
    let mut scene = Scene::start("kept-long", remoca()?, true, false)?;
    scene.expect_no_reconnect(100)?;
    scene.verify()
}

/// Kills the process within messages of a QEMU that connects again, while the guest works.
fn expect_deaths(name: &str, kills: impl FnOnce(&mut Scene) -> Result<u32>) -> Result<()> {
    let mut scene = Scene::start(name, remoca_ablation()?, false, true)?;
    scene.guest.run(MIX, LIMIT)?;
    let started = Instant::now();
    let count = kills(&mut scene)?;
    println!("{count} kills within messages took {} s, {} connections", started.elapsed().as_secs(), scene.connects());
    scene.guest.run(END_MIX, LIMIT)?;
    scene.verify()
}

#[test]
#[ignore = "long: cargo xtask test-long"]
fn a_qemu_whose_message_is_half_done_connects_again_once() -> Result<()> {
    let [begun, answered, kept] = PLACES;
    let kills = [
        (Talk::Stop, begun, 1),
        (Talk::Stop, answered, 9),
        (Talk::Stop, kept, 2),
        (Talk::Stop, kept, 11),
        (Talk::Connect, begun, 4),
        (Talk::Connect, answered, 12),
        (Talk::Connect, kept, 20),
    ];
    expect_deaths("kept-steps", |scene| {
        kills.iter().try_fold(0, |count, (talk, place, passage)| {
            scene.expect_death(*talk, *place, *passage)?;
            Ok(count + 1)
        })
    })
}

#[test]
#[ignore = "long: cargo xtask test-long"]
fn a_qemu_connects_again_once_whatever_step_of_a_message_is_the_last() -> Result<()> {
    expect_deaths("kept-every-step", |scene| {
        let mut count = 0;
        for talk in [Talk::Stop, Talk::Connect] {
            for place in PLACES {
                let mut passage = 1;
                while !scene.expect_death(talk, place, passage)? {
                    passage += 1;
                }
                println!("{talk:?}, {}: {passage} messages", place.0);
                count += passage;
            }
        }
        Ok(count)
    })
}
