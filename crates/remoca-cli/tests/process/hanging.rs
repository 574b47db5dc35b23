//! What hangs for ever, and what continues nevertheless: nothing on the I/O thread waits for it.

use super::support::hanging_fs::{GETATTR, HangingFs, READ, WRITE, may_mount};
use super::support::machine::{Machine, Setup};
use super::support::model::BLOCK;
use super::support::wait_until;
use remoca_frontend::testing::{Command, Ticket};
use remoca_io::control;
use remoca_io::left_out::is_root;
use remoca_protocol::control::{Command as Ask, Reply};

const SECTORS: u64 = (BLOCK / 512) as u64;

/// A machine whose first image is on a file system that can hang.
struct Scene {
    /// Dropped first: whatever waits for the file system ends with it.
    hanging: HangingFs,
    machine: Machine,
}

impl Scene {
    fn start(arguments: &[&str]) -> Self {
        let setup = Setup { sectors: vec![512, 512], ..Setup::default() };
        let hanging = HangingFs::mount(setup.blocks * BLOCK);
        let folder = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(hanging.file(), folder.path().join("image0")).unwrap();
        let arguments = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        Self { hanging, machine: Machine::start_in(folder, Setup { arguments, ..setup }) }
    }

    /// Writes to the first disk what it already holds, and submits more reads than a few kernel threads can wait for.
    /// Returns when they hang.
    fn hang(&mut self) -> Vec<Ticket> {
        self.hanging.hang();
        let disk = &mut self.machine.disks[0];
        let data = disk.model.block(0).to_vec();
        let mut tickets = vec![disk.guest.submit(0, Command::Write { sector: 0, data: &data })];
        let mut reads = 0;
        for queue in 0..2 {
            while disk.guest.has_free_slot(queue) {
                reads += 1;
                let read = Command::Read { sector: reads * SECTORS, length: BLOCK as u64 };
                tickets.push(disk.guest.submit(queue, read));
            }
        }
        disk.guest.queues.iter().for_each(|queue| queue.kick());
        wait_until("the file system has requests that it does not answer", || self.hanging.held(READ) > 0);
        tickets
    }

    fn upgrade(&self) -> Reply {
        control::call(&self.machine.control(), Ask::Upgrade { program: None }).unwrap()
    }

    #[track_caller]
    fn expect_life(&mut self) {
        expect_life(&mut self.machine);
    }
}

/// Expects that the second disk reads, writes and flushes, and that the process answers.
#[track_caller]
fn expect_life(machine: &mut Machine) {
    let disk = &mut machine.disks[1];
    for number in 0..4 {
        let block = disk.model.block(number).to_vec();
        let got = disk.read(&(number * BLOCK..(number + 1) * BLOCK));
        assert!(got == block, "block {number}");
        let write = Command::Write { sector: number as u64 * SECTORS, data: &block };
        assert_eq!(disk.guest.run(0, write), 0);
    }
    let sectors = SECTORS as u32;
    assert_eq!(disk.guest.run(0, Command::Flush), 0);
    assert_eq!(disk.guest.run(1, Command::Discard(&[(SECTORS * 2000, sectors, 0)])), 0);
    let zeroes = disk.read(&(2000 * BLOCK..2001 * BLOCK));
    disk.model.adopt(&(2000 * BLOCK..2001 * BLOCK), &zeroes);
    assert_eq!(machine.status().disks.len(), 2);
}

/// Kernel threads for blocking calls are shared by all images. Calls that hang must not occupy all of them.
#[test]
fn a_file_system_that_hangs_holds_up_its_own_disk_alone() {
    if !may_mount() {
        return;
    }
    let mut scene = Scene::start(&[]);
    scene.machine.run(20);
    let tickets = scene.hang();
    for _ in 0..3 {
        scene.expect_life();
        // The process looks at an image with writes in flight every 20 ms.
        std::thread::sleep(std::time::Duration::from_millis(25));
    }
    // Not even a new program can be asked: starting one closes copies of all files, and that file system is told of
    // each close.
    match scene.upgrade() {
        Reply::Error { error } => assert!(error.contains("within 12 seconds"), "{error}"),
        Reply::Status(_) | Reply::Curve(_) => panic!("it gave way with requests in flight"),
    }
    scene.expect_life();
    scene.hanging.go_on();
    for ticket in tickets {
        assert_eq!(scene.machine.disks[0].guest.wait(ticket), 0);
    }
    scene.machine.outlives = true;
    match scene.upgrade() {
        Reply::Status(status) => assert_eq!(status.upgrades, 1),
        Reply::Curve(_) => panic!("it is no status"),
        Reply::Error { error } => panic!("{error}"),
    }
    scene.machine.run(20);
    scene.machine.pages_sent = scene.machine.counter("evictions_reported");
    let Scene { hanging, machine } = scene;
    machine.finish();
    drop(hanging);
}

/// A change time that does not show other hosts' writes is not asked for.
#[test]
fn an_image_on_a_file_system_that_is_not_local_is_not_looked_at() {
    if !may_mount() {
        return;
    }
    let mut scene = Scene::start(&[]);
    scene.machine.settle();
    let asked = scene.hanging.asked(GETATTR);
    for _ in 0..5 {
        scene.machine.run(5);
        scene.machine.settle();
    }
    assert_eq!(scene.hanging.asked(GETATTR), asked);
    let Scene { hanging, machine } = scene;
    machine.finish();
    drop(hanging);
}

/// Requests are served, the status reports what is missing, and neither an upgrade nor the end waits.
#[test]
fn a_trace_that_nobody_reads_holds_up_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("trace");
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    let arguments = vec!["--trace".into(), pipe.display().to_string()];
    let mut machine = Machine::start_in(folder, Setup { arguments, ..Setup::default() });
    for upgrades in 1..=2 {
        // Each status request passes the recorded requests to the thread that writes the trace.
        wait_until("records are lost", || {
            machine.run(1);
            machine.status().trace_lost > Some(0)
        });
        machine.outlives = true;
        match control::call(&machine.control(), Ask::Upgrade { program: None }).unwrap() {
            Reply::Status(status) => assert_eq!(status.upgrades, upgrades),
            Reply::Curve(_) => panic!("it is no status"),
            Reply::Error { error } => panic!("{error}"),
        }
        machine.run(20);
        machine.pages_sent = machine.counter("evictions_reported");
    }
    machine.finish();
}

/// The next program could not take over, because the kernel ends no thread that waits for such a file system.
#[test]
fn a_trace_on_a_file_system_that_hangs_keeps_the_program_and_the_disks() {
    if !may_mount() {
        return;
    }
    let hanging = HangingFs::mount(0);
    let arguments = vec!["--trace".into(), hanging.file().display().to_string()];
    let mut machine = Machine::start(Setup { arguments, ..Setup::default() });
    machine.run(20);
    hanging.hang();
    wait_until("the file system has a write that it does not answer", || {
        machine.run(1);
        machine.status();
        hanging.held(WRITE) > 0
    });
    machine.run(50);
    match control::call(&machine.control(), Ask::Upgrade { program: None }).unwrap() {
        Reply::Error { error } => assert!(error.contains("12 seconds") || error.contains("trace"), "{error}"),
        Reply::Status(_) | Reply::Curve(_) => panic!("it gave way with a thread that hangs"),
    }
    machine.run(50);
    hanging.go_on();
    machine.finish();
    drop(hanging);
}

/// An image on ext4 whose device stops answering while the file system commits its journal. Thawed when dropped.
struct FrozenExt4 {
    folder: tempfile::TempDir,
    loops: Vec<String>,
    mounted: Vec<std::path::PathBuf>,
}

impl FrozenExt4 {
    fn mount(image_bytes: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut this = Self { folder, loops: Vec::new(), mounted: Vec::new() };
        // The inner file system is the image's, the outer one is its device's.
        let outer = this.add("outer", this.folder.path().join("disk"), image_bytes as u64 + (160 << 20));
        let inner = this.add("inner", outer.join("disk"), image_bytes as u64 + (64 << 20));
        std::fs::File::create(inner.join("image")).unwrap().set_len(image_bytes as u64).unwrap();
        this
    }

    fn add(&mut self, name: &str, disk: std::path::PathBuf, bytes: u64) -> std::path::PathBuf {
        let place = self.folder.path().join(name);
        std::fs::create_dir(&place).unwrap();
        std::fs::File::create(&disk).unwrap().set_len(bytes).unwrap();
        let device = run("losetup", &["--find", "--show", disk.to_str().unwrap()]);
        self.loops.push(device.clone());
        run("mkfs.ext4", &["-q", &device]);
        run("mount", &[&device, place.to_str().unwrap()]);
        self.mounted.push(place.clone());
        place
    }

    fn image(&self) -> std::path::PathBuf {
        self.mounted[1].join("image")
    }

    /// Stops the device. Returns when a commit of the image's file system waits for it.
    fn freeze(&self) -> std::process::Child {
        run("fsfreeze", &["--freeze", self.mounted[0].to_str().unwrap()]);
        let mut commit = std::process::Command::new("sync");
        let commit = commit.arg("--file-system").arg(self.image()).spawn().unwrap();
        let stat = format!("/proc/{}/stat", commit.id());
        wait_until("the file system waits for its device", || {
            std::fs::read_to_string(&stat).unwrap().rsplit(')').next().unwrap().starts_with(" D")
        });
        commit
    }

    fn thaw(&self) {
        run("fsfreeze", &["--unfreeze", self.mounted[0].to_str().unwrap()]);
    }
}

impl Drop for FrozenExt4 {
    fn drop(&mut self) {
        if let Some(outer) = self.mounted.first() {
            let _ = std::process::Command::new("fsfreeze").arg("--unfreeze").arg(outer).output();
        }
        for place in self.mounted.iter().rev() {
            let _ = std::process::Command::new("umount").arg("--lazy").arg(place).output();
        }
        for device in self.loops.iter().rev() {
            let _ = std::process::Command::new("losetup").arg("--detach").arg(device).output();
        }
    }
}

fn run(program: &str, arguments: &[&str]) -> String {
    let output = std::process::Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).trim().into()
}

/// Ext4 makes a writer wait for the journal's commit to change the file's time, whatever flags the write has.
#[test]
fn a_device_that_hangs_below_a_journal_holds_up_its_own_disk_alone() {
    if !is_root("needs root for file systems on loop devices") {
        return;
    }
    let setup = Setup { sectors: vec![512, 512], ..Setup::default() };
    let frozen = FrozenExt4::mount(setup.blocks * BLOCK);
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(frozen.image(), folder.path().join("image0")).unwrap();
    let mut scene = Ext4Scene { machine: Machine::start_in(folder, setup), frozen, tickets: Vec::new() };
    scene.machine.run(20);
    let disk = &mut scene.machine.disks[0];
    let data = disk.model.block(0).to_vec();
    // The file's time is part of the commit that hangs.
    assert_eq!(disk.guest.run(0, Command::Write { sector: 0, data: &data }), 0);
    let mut commit = scene.frozen.freeze();
    // Only a disk that answered a moment ago is trusted.
    std::thread::sleep(std::time::Duration::from_millis(50));
    let disk = &mut scene.machine.disks[0];
    scene.tickets.push(disk.guest.submit(1, Command::Read { sector: SECTORS, length: BLOCK as u64 }));
    disk.guest.queues[1].kick();
    // The process looks at the image's change time meanwhile, and gets an answer.
    for block in 0..9 {
        let disk = &mut scene.machine.disks[0];
        let data = disk.model.block(block).to_vec();
        let write = Command::Write { sector: block as u64 * SECTORS, data: &data };
        scene.tickets.push(disk.guest.submit(0, write));
        disk.guest.queues[0].kick();
        expect_life(&mut scene.machine);
    }
    scene.frozen.thaw();
    commit.wait().unwrap();
    for ticket in std::mem::take(&mut scene.tickets) {
        assert_eq!(scene.machine.disks[0].guest.wait(ticket), 0);
    }
    scene.machine.run(20);
    let Ext4Scene { machine, frozen, .. } = scene;
    machine.finish();
    drop(frozen);
}

/// A machine on [`FrozenExt4`]. The device is thawed first: whatever waits for it ends with it.
struct Ext4Scene {
    frozen: FrozenExt4,
    machine: Machine,
    tickets: Vec<Ticket>,
}
