//! Disks that come to a running process and go from it, while the guest of another one works on.

use super::ablation::binary;
use super::nbd::attach;
use super::support::hanging_fs::{HangingFs, may_mount};
use super::support::program::{
    Nbdkit, Program, REMOCA, Serve, command, expect_refusal, install, run, run_command, status,
};
use super::support::{PATIENCE, expect_rescanned, folder, wait_until};
use remoca_frontend::testing::{Command, Options, TestGuest};
use remoca_io::handover::VARIABLE;
use remoca_io::left_out::leave_out;
use remoca_protocol::control::Status;
use remoca_protocol::trace::{TracedOp, parse_trace};
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Instant;
use tempfile::TempDir;

const MIB: usize = 1 << 20;
const BLOCK: usize = 4096;
/// Number of blocks that are read to see whether a disk is warm.
const READS: u64 = 32;
/// Exit code for an image that cannot be used.
const NO_IMAGE: i32 = 66;

struct Vm {
    folder: TempDir,
    program: Program,
    guest: TestGuest,
}

impl Vm {
    /// Starts a process whose only disk, `root`, is in its file, and attaches a guest.
    fn start() -> Self {
        Self::start_with("", "")
    }

    /// Starts a process with more in its file: settings before the disk, and disks behind it.
    fn start_with(settings: &str, disks: &str) -> Self {
        Self::start_to_die("", settings, disks)
    }

    /// Starts a process that dies at a place, if one is given.
    fn start_to_die(place: &str, settings: &str, disks: &str) -> Self {
        let folder = folder();
        std::fs::create_dir(folder.path().join("vms")).unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        for (image, byte) in [("data.img", 2), ("more.img", 3)] {
            std::fs::write(path(image), vec![byte; MIB]).unwrap();
        }
        for image in ["root", "first", "last", "other"] {
            let blocks: Vec<_> = (0..MIB / BLOCK).flat_map(|number| block(image, number)).collect();
            std::fs::write(path(&format!("{image}.img")), blocks).unwrap();
        }
        let (image, socket) = (path("root.img"), path("root"));
        let root = format!("[[disk]]\nname = 'root'\nformat = 'raw'\nimage = '{image}'\nsocket = '{socket}'\n");
        let text = format!("version = 1\n{settings}\n# The system.\n{root}{disks}").replace("HERE", &path(""));
        std::fs::write(path("vms/vm.toml"), text).unwrap();
        let program = match place {
            "" => spawn(folder.path()),
            place => spawn_by(binary(), &["--kill-at", &format!("{place}:1")], folder.path()),
        };
        let mut guest = TestGuest::new(Options::default());
        guest.connect(&folder.path().join("root")).unwrap();
        Self { folder, program, guest }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Starts a process with three disks, the guest's the second of them, all of them in the cache.
    fn start_warm(place: &str, server: &Serve) -> Self {
        let [first, last] = ["first", "last"].map(|name| {
            format!("[[disk]]\nname = '{name}'\nformat = 'raw'\nimage = 'HERE/{name}.img'\nsocket = 'HERE/{name}'\n")
        });
        let settings = format!("server = '{}'\ncache = '2M'\nno-hedge = true\n{first}", server.address);
        let mut vm = Self::start_to_die(place, &settings, &last);
        for disk in ["first", "root", "last"] {
            assert_eq!(vm.hits(disk, disk), 0, "{disk}");
            vm.warm_up(disk, disk);
        }
        vm
    }

    /// Returns the command `remoca disk CHANGE`.
    fn change(&self, change: &[&str]) -> std::process::Command {
        let mut said = command(REMOCA);
        said.args(["disk", change[0]])
            .arg(self.path("control"))
            .args(&change[1..])
            .current_dir(self.folder.path())
            .env("REMOCA_CONFIG", self.folder.path());
        said
    }

    /// Starts the process again, and the guest connects to it.
    fn restart(&mut self) {
        self.program = spawn(self.folder.path());
        self.guest.disconnect();
        self.guest.connect(&self.path("root")).unwrap();
    }

    /// Says `remoca disk CHANGE`, and checks that the guest goes on. Says it again if the new program, for which all guests wait, had
    /// no processor for so long that it left out the disk that comes.
    fn say(&mut self, change: &[&str]) -> Output {
        let (mut late, give_up_at) = (self.late_openings(), Instant::now() + 3 * PATIENCE);
        loop {
            let said = run_command(&mut self.change(change));
            assert!(self.guest.is_connected() && self.program.is_running(), "{}", self.program.log());
            assert_eq!(self.guest.run(0, Command::Read { sector: 8, length: 4096 }), 0);
            let before = std::mem::replace(&mut late, self.late_openings());
            let is_held_up = String::from_utf8_lossy(&said.stderr).contains("is still being opened");
            if said.status.success() || late == before && !is_held_up {
                return said;
            }
            let has_time = Instant::now() < give_up_at;
            assert!(late < 10 && has_time, "a disk is late again and again: {}", self.program.log());
        }
    }

    /// Returns how often a disk that came was left out because it was not opened in time.
    fn late_openings(&self) -> usize {
        self.program.log().matches("it could not be opened within").count()
    }

    /// Adds a disk whose paths are relative to the folder of the command.
    fn add(&mut self, name: &str, image: &str) -> Output {
        self.say(&["add", &format!("name={name},image={image},socket={name}")])
    }

    fn disks(&self) -> Vec<String> {
        status(&self.path("control")).disks.into_iter().map(|disk| disk.name).collect()
    }

    fn file(&self) -> String {
        std::fs::read_to_string(self.path("vms/vm.toml")).unwrap()
    }

    /// Checks that what is known of the disk that was always there was kept.
    fn expect_root_is_warm(&self) {
        let status = status(&self.path("control"));
        assert_eq!((&*status.started, &status.disks[0].cold_reason), ("warm", &None), "{}", self.program.log());
    }

    /// Reads a disk, which has the content of `image`, until it is in the cache. A page may be dropped on its way there.
    #[track_caller]
    fn warm_up(&mut self, disk: &str, image: &str) {
        wait_until("the disk is in the cache", || self.hits(disk, image) >= READS * 3 / 4);
    }

    /// Checks that a disk, which has the content of `image`, is in the cache. Reads may be late, and go to the disk.
    #[track_caller]
    fn expect_warm(&mut self, disk: &str, image: &str) {
        let hits = self.hits(disk, image);
        assert!(hits >= READS / 2, "{disk}: {hits} of {READS} blocks are in the cache");
    }

    /// Reads some blocks of a disk, which has the content of `image`. Returns how many of them were in the cache.
    #[track_caller]
    fn hits(&mut self, disk: &str, image: &str) -> u64 {
        let control = self.path("control");
        let mut other = TestGuest::new(Options::default());
        let guest = match disk {
            "root" => &mut self.guest,
            _ => {
                other.connect(&self.folder.path().join(disk)).unwrap();
                &mut other
            }
        };
        let hits = hits_of(guest, &control, image);
        if disk != "root" {
            other.disconnect();
            self.wait_until_detached(disk);
        }
        hits
    }

    fn wait_until_detached(&self, disk: &str) {
        let is_attached = |status: Status| status.disks.iter().any(|found| found.name == disk && found.attached);
        wait_until("the guest is gone", || !is_attached(status(&self.path("control"))));
    }

    /// Reads the first block of a disk as a guest that connects to it, and returns its first byte.
    #[track_caller]
    fn read(&self, name: &str) -> u8 {
        let mut guest = TestGuest::new(Options::default());
        guest.connect(&self.path(name)).unwrap();
        let ticket = guest.submit(0, Command::Read { sector: 0, length: 4096 });
        guest.queues[0].kick();
        assert_eq!(guest.wait(ticket), 0);
        let byte = guest.data(ticket, 4096)[0];
        guest.disconnect();
        self.wait_until_detached(name);
        byte
    }
}

/// Returns the content of a block of an image: no two are the same.
fn block(image: &str, number: usize) -> Vec<u8> {
    format!("{image} {number:>12} ").into_bytes().into_iter().cycle().take(BLOCK).collect()
}

fn spawn(folder: &Path) -> Program {
    spawn_by(Path::new(REMOCA), &[], folder)
}

fn spawn_by(binary: &Path, options: &[&str], folder: &Path) -> Program {
    let mut disk = command(binary);
    disk.args(["disk", "--name", "vm", "--control"]).arg(folder.join("control")).args(options);
    disk.env("REMOCA_CONFIG", folder);
    let program = Program::start(&mut disk, &folder.join("disk.log"));
    wait_until("the VM process answers", || UnixStream::connect(folder.join("control")).is_ok());
    program
}

#[track_caller]
fn succeeded(output: &Output) {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_disk_comes_and_goes_and_the_guest_of_another_one_does_not_notice() {
    let memory = tempfile::tempdir().unwrap();
    let server = Serve::start(memory.path(), "16M");
    let mut vm = Vm::start_with(&format!("server = '{}'\ncache = '4M'\n", server.address), "");
    let pid = status(&vm.path("control")).pid;
    succeeded(&vm.add("data", "data.img"));
    succeeded(&vm.add("more", "more.img"));
    assert_eq!(
        (vm.disks(), vm.read("data"), vm.read("more")),
        (vec!["root".into(), "data".into(), "more".into()], 2, 3)
    );
    // One between others goes; its name is free, for another image.
    succeeded(&vm.say(&["remove", "data"]));
    assert!(!vm.path("data").exists(), "its socket is gone");
    assert_eq!((vm.disks(), vm.read("more")), (vec!["root".into(), "more".into()], 3));
    let config = vm.folder.path().display().to_string();
    let mut remove = vm.change(&["remove", "more", "--config", &config]);
    succeeded(&run_command(remove.env_remove("REMOCA_CONFIG")));
    succeeded(&vm.add("data", "more.img"));
    assert_eq!((vm.read("data"), status(&vm.path("control")).pid), (3, pid));
    assert!(vm.file().contains("# The system."), "{}", vm.file());
    vm.expect_root_is_warm();
    // Killed between the change of the file and that of the process.
    vm.program.kill();
    let [image, socket] = ["data.img", "late"].map(|name| vm.path(name).display().to_string());
    let late = format!("[[disk]]\nname = 'late'\nformat = 'raw'\nimage = '{image}'\nsocket = '{socket}'\n");
    std::fs::write(vm.path("vms/vm.toml"), vm.file() + &late).unwrap();
    vm.program = spawn(vm.folder.path());
    assert_eq!((vm.disks(), vm.read("data")), (vec!["root".into(), "data".into(), "late".into()], 3));
    assert_eq!(vm.read("late"), 2);
    vm.expect_root_is_warm();
    vm.program.terminate();
}

/// An upgrade that was begun before a disk is added may read the file with it or without it.
#[test]
fn a_disk_is_added_after_an_upgrade_that_is_under_way() {
    let mut vm = Vm::start();
    let [asked, go] = ["asked", "go"].map(|name| vm.path(name));
    let script = format!(
        "#!/bin/sh\ncase $* in *--check-handover*) touch {}; until [ -e {} ]; do sleep 0.02; done;; esac\nexec {REMOCA} \"$@\"\n",
        asked.display(),
        go.display()
    );
    std::fs::write(vm.path("script"), script).unwrap();
    install(&vm.path("script"), &vm.path("program"));
    let mut upgrade = command(REMOCA);
    upgrade.arg("upgrade").arg(vm.path("control")).arg("--program").arg(vm.path("program"));
    let mut upgrade = Program::start(&mut upgrade, &vm.path("upgrade.log"));
    wait_until("the program is asked", || asked.exists());
    std::thread::scope(|scope| {
        let log = vm.path("disk.log");
        scope.spawn(move || {
            let is_refused = || std::fs::read_to_string(&log).unwrap().contains("another upgrade is under way");
            wait_until("the change is refused once", is_refused);
            std::fs::write(&go, "").unwrap();
        });
        succeeded(&vm.add("data", "data.img"));
    });
    wait_until("the upgrade has ended", || !upgrade.is_running());
    assert_eq!((vm.disks(), vm.read("data")), (vec!["root".into(), "data".into()], 2));
    assert!(vm.file().contains("data.img"), "{}", vm.file());
    vm.program.terminate();
}

#[test]
fn what_cannot_be_added_or_removed_changes_nothing() {
    let mut vm = Vm::start();
    succeeded(&vm.add("data", "data.img"));
    let before = vm.file();
    let refused = vm.add("data", "more.img");
    expect_refusal(&refused, 1, &["has a disk data already"]);
    let refused = vm.add("copy", "data.img");
    expect_refusal(&refused, 1, &["copy is not added, and nothing has changed", "data.img is given twice"]);
    assert!(!vm.path("copy").exists(), "its socket is left behind");
    let refused = vm.add("none", "none.img");
    expect_refusal(&refused, 1, &["nothing has changed", "none.img"]);
    let refused = vm.add("no/such/folder", "more.img");
    expect_refusal(&refused, 1, &["nothing has changed", "no/such/folder"]);
    // A socket that another disk has.
    let refused = vm.say(&["add", "name=more,image=more.img,socket=data"]);
    expect_refusal(&refused, 1, &["nothing has changed", "is given twice"]);
    let refused = vm.say(&["add", "name=more,image=more.img"]);
    expect_refusal(&refused, 1, &["nothing has changed", "where does the hypervisor connect"]);
    // It is looked at each time, as long as nobody says what it is.
    std::fs::write(vm.path("other.img"), [&b"QFI\xfb\0\0\0\x03"[..], &[0; 4088]].concat()).unwrap();
    for _ in 0..2 {
        expect_refusal(&vm.add("other", "other.img"), NO_IMAGE, &["looks like a qcow2 image"]);
    }
    let refused = vm.say(&["remove", "root"]);
    expect_refusal(&refused, 1, &["a guest is attached to root", "--force takes the disk away from it"]);
    let refused = vm.say(&["remove", "none"]);
    expect_refusal(&refused, 1, &["has no disk none"]);
    // By hand, a disk with a guest goes from the file no more than by command.
    let (start, _) = before.split_once("[[disk]]").unwrap();
    let (_, data) = before.rsplit_once("[[disk]]").unwrap();
    std::fs::write(vm.path("vms/vm.toml"), format!("{start}[[disk]]{data}")).unwrap();
    let refused = run(&["upgrade", vm.path("control").to_str().unwrap()]);
    expect_refusal(&refused, 1, &["it would not have root, to which a guest is attached"]);
    std::fs::write(vm.path("vms/vm.toml"), &before).unwrap();
    assert_eq!(status(&vm.path("control")).upgrades, 1, "whatever was refused was refused before the process changed");
    assert_eq!((vm.file(), vm.disks(), vm.read("data")), (before, vec!["root".into(), "data".into()], 2));
    vm.program.terminate();
}

/// Whatever its guest was doing, the guest of another disk does not notice.
#[test]
fn only_by_force_is_a_disk_removed_from_under_its_guest() {
    let export = "[[disk]]\nname = 'export'\nformat = 'raw'\nimage = 'HERE/more.img'\n";
    let mut vm = Vm::start_with("nbd = 'unix:HERE/nbd'\nnbd-port = true", export);
    succeeded(&vm.add("data", "data.img"));
    let mut guest = TestGuest::new(Options::default());
    guest.connect(&vm.path("data")).unwrap();
    let mut client = attach(&vm.path("nbd"), "export");
    wait_until("both are attached", || status(&vm.path("control")).disks.iter().all(|disk| disk.attached));
    let before = vm.file();
    for disk in ["data", "export"] {
        let refused = vm.say(&["remove", disk]);
        expect_refusal(&refused, 1, &[&format!("a guest is attached to {disk}")]);
    }
    assert!(vm.file() == before && guest.is_connected());
    // A request that nobody was told of stays where it is.
    let _ticket = guest.submit(0, Command::Read { sector: 0, length: 4096 });
    for disk in ["data", "export"] {
        let forced = vm.say(&["remove", disk, "--force"]);
        succeeded(&forced);
        let said = String::from_utf8_lossy(&forced.stderr).into_owned();
        assert!(said.contains(&format!("the guest that was attached to {disk} is disconnected")), "{said}");
        let warning = format!("{disk}: it is removed from under its guest");
        assert!(vm.program.log().contains(&warning), "{}", vm.program.log());
    }
    wait_until("the front end is disconnected", || !guest.is_connected());
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    assert_eq!(client.read(&mut [0]).unwrap(), 0, "the NBD client is connected");
    assert!(!vm.path("data").exists(), "its socket is left behind");
    assert_eq!(vm.disks(), ["root"]);
    // Its image is free, and so is its name.
    succeeded(&vm.add("data", "data.img"));
    assert_eq!(vm.read("data"), 2);
    vm.program.terminate();
}

/// Nothing waits for the server, and it may never come back.
#[test]
fn a_disk_whose_server_is_gone_is_removed() {
    let mut vm = Vm::start();
    let mut server = Nbdkit::start(&vm.path("nbd"), &vm.path("data.img"));
    succeeded(&vm.add("data", &server.uri()));
    assert_eq!(vm.read("data"), 2);
    server.program.kill();
    wait_until("the loss is noticed", || status(&vm.path("control")).disks[1].store == "waiting");
    // A program that keeps the disk needs the connection.
    let upgrade = run(&["upgrade", vm.path("control").to_str().unwrap()]);
    expect_refusal(&upgrade, 1, &["disk data: there is no connection to the NBD server", "goes on as before"]);
    succeeded(&vm.say(&["remove", "data"]));
    assert_eq!(vm.disks(), ["root"]);
    assert!(!vm.path("data").exists(), "its socket is left behind");
    vm.program.terminate();
}

/// Each disk has its own number, whatever the others do.
#[test]
fn the_other_disks_stay_warm_whichever_disk_comes_or_goes() {
    let memory = tempfile::tempdir().unwrap();
    let server = Serve::start(memory.path(), "16M");
    let mut vm = Vm::start_warm("", &server);
    succeeded(&vm.say(&["remove", "first"]));
    vm.expect_warm("last", "last");
    vm.expect_warm("root", "root");
    // Another one has its name, and not its cache.
    succeeded(&vm.add("first", "other.img"));
    assert_eq!(vm.hits("first", "other"), 0);
    vm.warm_up("first", "other");
    for (disk, image) in [("last", "last"), ("root", "root"), ("first", "other")] {
        vm.expect_warm(disk, image);
    }
    vm.program.kill();
    vm.restart();
    for (disk, image) in [("first", "other"), ("last", "last"), ("root", "root")] {
        vm.expect_warm(disk, image);
    }
    assert_eq!(vm.disks(), ["root", "last", "first"], "the order of the file");
    vm.program.terminate();
}

/// Positions change when a disk goes. A trace has the number of a disk that stays, for its requests and for its evictions.
#[test]
fn a_trace_has_one_number_for_a_disk() {
    let memory = tempfile::tempdir().unwrap();
    let server = Serve::start(memory.path(), "16M");
    let first = "[[disk]]\nname = 'first'\nformat = 'raw'\nimage = 'HERE/first.img'\nsocket = 'HERE/first'\n";
    let more = "cache = '2M'\nport = 'HERE/port'\ntrace = 'HERE/trace'\n";
    let mut vm = Vm::start_with(&format!("server = '{}'\n{more}{first}", server.address), "");
    succeeded(&vm.say(&["remove", "first"]));
    assert_eq!(vm.hits("root", "root"), 0);
    let mut port = TestGuest::new(Options::default());
    port.connect(&vm.path("port")).unwrap();
    assert_eq!(port.run(0, Command::Write { sector: 8, data: &block("root", 7) }), 0);
    port.disconnect();
    vm.program.terminate();
    let records = parse_trace(&std::fs::read(vm.path("trace")).unwrap()).unwrap().records;
    let evicted = records.iter().find(|record| record.op == TracedOp::Evicted).unwrap();
    assert_eq!((evicted.disk, evicted.block), (1, 7));
    assert!(records.iter().filter(|record| record.op == TracedOp::Read).all(|record| record.disk == 1), "{records:?}");
}

/// A process that dies is started again, as by systemd, while the command still waits for it. File, status, state file and
/// command agree, whenever that was.
#[test]
fn killed_between_two_steps_of_a_change() {
    let add = ["add", "name=other,image=other.img,socket=other"];
    let remove = ["remove", "first"];
    let always = ["handover-drained", "handover-described", "handover-received", "disk-numbered", "handover-opened"];
    let memory = tempfile::tempdir().unwrap();
    let server = Serve::start(memory.path(), "64M");
    let changes = always.into_iter().flat_map(|place| [(place, add), (place, remove)]);
    for (place, change) in changes.chain([("disk-forgotten", remove)]) {
        println!("{place}: {change:?}");
        let mut vm = Vm::start_warm(place, &server);
        let mut said = vm.change(&change).stderr(Stdio::piped()).spawn().unwrap();
        wait_until("the process dies", || !vm.program.is_running());
        vm.restart();
        let is_done = said.wait().unwrap().success();
        let mut names = vec!["first", "root", "last"];
        match (is_done, change[0]) {
            (true, "add") => names.push("other"),
            (true, _) => drop(names.remove(0)),
            (false, _) => {}
        }
        assert_eq!(vm.disks(), names, "the command succeeds: {is_done}");
        let file = vm.file();
        let in_file =
            file.lines().filter_map(|line| line.strip_prefix("name = ")).map(|name| name.trim_matches(['\'', '"']));
        assert_eq!(in_file.collect::<Vec<_>>(), names);
        vm.expect_warm("root", "root");
        vm.expect_warm("last", "last");
        if !is_done {
            succeeded(&vm.say(&change));
        }
        if change[0] == "remove" {
            // Its number may be used at once, its content never.
            succeeded(&vm.add("other", "other.img"));
        }
        assert_eq!(vm.hits("other", "other"), 0);
        vm.warm_up("other", "other");
        for disk in ["other", "last", "root"] {
            vm.expect_warm(disk, disk);
        }
        vm.program.terminate();
    }
}

/// What is found out only by the new program does not cost the other guests their disks.
#[test]
fn a_disk_that_the_new_program_cannot_have_is_left_out() {
    let export = "[[disk]]\nname = 'export'\nformat = 'raw'\nimage = 'HERE/data.img'\n";
    let mut vm = Vm::start_with("nbd = 'unix:HERE/nbd'", export);
    let before = vm.file();
    // Longer than the name of an export may be.
    let name = "x".repeat(300);
    let refused = vm.say(&["add", &format!("name={name},image=more.img")]);
    expect_refusal(&refused, 1, &["is not added, and nothing has changed", "its log says why"]);
    assert!(vm.program.log().contains("it cannot be added: "), "{}", vm.program.log());
    let refused = vm.say(&["remove", "export"]);
    expect_refusal(&refused, 1, &["nothing has changed", "--nbd has nothing to offer"]);
    assert_eq!((vm.file(), vm.disks()), (before, vec!["root".into(), "export".into()]));
    let kept = std::fs::read_to_string(vm.path("control.config")).unwrap();
    assert!(!kept.contains(&name), "it is in the last good copy");
    vm.program.terminate();
}

/// Its image was opened once before, while all guests were served. What hangs only then hangs for ever here, and not the
/// guests of the other disks.
#[test]
fn a_disk_whose_image_hangs_after_all_is_left_out() {
    if !may_mount() {
        return;
    }
    let mut vm = Vm::start();
    let hanging = HangingFs::mount(MIB);
    let gate = vm.path("gate");
    std::fs::write(&gate, "").unwrap();
    let hold = format!("handover-received:{}", gate.display());
    vm.program.terminate();
    vm.program = spawn_by(binary(), &["--hold-at", &hold], vm.folder.path());
    vm.guest.disconnect();
    vm.guest.connect(&vm.path("root")).unwrap();
    let before = vm.file();
    let described = format!("name=data,format=raw,image={},socket=data", hanging.file().display());
    let mut said = vm.change(&["add", &described]).stderr(Stdio::piped()).spawn().unwrap();
    let environment = format!("/proc/{}/environ", vm.program.pid());
    wait_until("the new program runs", || {
        std::fs::read_to_string(&environment).is_ok_and(|text| text.contains(VARIABLE))
    });
    hanging.hang();
    std::fs::remove_file(&gate).unwrap();
    wait_until("the command ends", || said.try_wait().unwrap().is_some());
    let output = said.wait_with_output().unwrap();
    expect_refusal(&output, 1, &["data is not added, and nothing has changed"]);
    assert!(vm.program.log().contains("data: it cannot be added: "), "{}", vm.program.log());
    assert_eq!(vm.guest.run(0, Command::Read { sector: 8, length: 4096 }), 0);
    assert!(vm.guest.is_connected());
    assert_eq!((vm.file(), vm.disks()), (before, vec!["root".to_owned()]));
    // The end of a program waits for all of its threads, and so do the guests.
    let upgrade = || run(&["upgrade", vm.path("control").to_str().unwrap()]);
    expect_refusal(&upgrade(), 1, &["is still being opened"]);
    hanging.go_on();
    wait_until("an upgrade is possible again", || upgrade().status.success());
    // What was opened in the end is closed again.
    succeeded(&vm.say(&["add", &described]));
    assert_eq!(vm.disks(), ["root", "data"]);
    vm.program.terminate();
}

/// A loop device over a file, detached with this value.
struct LoopDevice(String);

impl LoopDevice {
    /// Attaches one, or says why that is not permitted here.
    fn over(file: &Path) -> Result<Self, String> {
        let said = std::process::Command::new("losetup").args(["--find", "--show"]).arg(file).output();
        let said = said.map_err(|error| format!("losetup: {error}"))?;
        match said.status.success() {
            true => Ok(Self(String::from_utf8_lossy(&said.stdout).trim().into())),
            false => Err(String::from_utf8_lossy(&said.stderr).into_owned()),
        }
    }

    /// Makes the device as large as its file is.
    fn grow(&self) {
        let grown = std::process::Command::new("losetup").args(["--set-capacity", &self.0]).status().unwrap();
        assert!(grown.success());
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = std::process::Command::new("losetup").args(["--detach", &self.0]).output();
    }
}

/// Reads some blocks of a guest's disk, which has the content of `image`. Returns how many of them were in the cache.
#[track_caller]
fn hits_of(guest: &mut TestGuest, control: &Path, image: &str) -> u64 {
    wait_until("the memory server is there", || {
        let status = status(control);
        status.server.is_some_and(|server| server.connected) && status.cache.granted_bytes > 0
    });
    // A late answer of the server is one too many for a disk that is not busy. After some of them in a row the disk alone is asked.
    let counter = || {
        let counters = status(control).counters;
        ["hit_blocks", "covered_blocks", "hedges", "fetch_timeouts"].iter().map(|name| counters[*name]).sum::<u64>()
    };
    let before = counter();
    for number in 0..READS {
        let ticket = guest.submit(0, Command::Read { sector: number * 8, length: 4096 });
        guest.queues[0].kick();
        assert_eq!(guest.wait(ticket), 0);
        assert!(guest.data(ticket, BLOCK) == block(image, number as usize), "{image}: block {number}");
    }
    counter() - before
}

/// A file system reports a change of a file's size in its times. A device reports its size alone. Another host may write to it while
/// its guest is away.
#[test]
fn a_block_device_comes_and_grows_and_is_warm_as_long_as_its_guest_stays() {
    let memory = tempfile::tempdir().unwrap();
    let server = Serve::start(memory.path(), "16M");
    let settings = format!("server = '{}'\ncache = '2M'\nno-hedge = true\n", server.address);
    let mut vm = Vm::start_with(&settings, "");
    let file = vm.path("other.img");
    let device = match LoopDevice::over(&file) {
        Ok(device) => device,
        Err(why) => return leave_out(&format!("loop devices are not permitted here: {why}")),
    };
    let path = device.0.clone();
    succeeded(&vm.add("other", &path));
    let control = vm.path("control");
    let is_warm = |guest: &mut TestGuest| hits_of(guest, &control, "other") >= READS / 2;
    for (bytes, is_told) in [(2 * MIB, true), (3 * MIB, false)] {
        let mut guest = TestGuest::new(Options::default());
        guest.connect(&vm.path("other")).unwrap();
        assert_eq!(hits_of(&mut guest, &control, "other"), 0);
        wait_until("it is in the cache", || hits_of(&mut guest, &control, "other") >= READS * 3 / 4);
        guest.listen().unwrap();
        assert_eq!(guest.capacity().unwrap(), (bytes - MIB) as u64);
        std::fs::File::options().write(true).open(&file).unwrap().set_len(bytes as u64).unwrap();
        device.grow();
        if is_told {
            let said = run_command(&mut vm.change(&["rescan"]));
            succeeded(&said);
            let said = String::from_utf8_lossy(&said.stdout).into_owned();
            expect_rescanned(&said, "other", bytes, bytes - MIB, "");
        }
        guest.wait_for_change();
        assert_eq!(guest.capacity().unwrap(), bytes as u64);
        let last = (bytes - BLOCK) as u64 / 512;
        assert_eq!(guest.run(0, Command::Write { sector: last, data: &[5; BLOCK] }), 0);
        assert_eq!(guest.run(0, Command::Read { sector: last + 8, length: 4096 }), 1, "it is beyond the end");
        let ticket = guest.submit(0, Command::Read { sector: last, length: 4096 });
        guest.queues[0].kick();
        assert_eq!(guest.wait(ticket), 0);
        assert_eq!(guest.data(ticket, BLOCK), [5; BLOCK]);
        assert!(is_warm(&mut guest));
        guest.disconnect();
        vm.wait_until_detached("other");
    }
    succeeded(&vm.say(&["remove", "other"]));
    vm.program.terminate();
    let data = std::fs::read(&file).unwrap();
    assert!(data[..BLOCK] == block("other", 0) && data[3 * MIB - BLOCK..] == [5; BLOCK]);
}
