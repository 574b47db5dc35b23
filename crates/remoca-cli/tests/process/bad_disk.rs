//! What `remoca disk` refuses, in which words, and what it accepts nevertheless: a missing memory server costs the
//! cache, never the disk.

use super::support::fake_server::{FakeServer, Lie};
use super::support::machine::{Machine, Setup};
use super::support::program::{
    PASSED, Program, REMOCA, Serve, command, expect_refusal, pass, run, run_command, status,
};
use super::support::wait_until;
use remoca_store::testing::hold_port;
use rustix::net;
use std::fs::{self, File, Permissions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use tempfile::TempDir;

/// Exit codes: of wrong usage, and of anything else.
const USAGE: i32 = 2;
const FAILURE: i32 = 1;
const NO_IMAGE: i32 = 66;
const NO_SOCKET: i32 = 73;
const CONFIGURATION: i32 = 78;

/// A folder with an image of 1 MiB whose content is known.
struct Scene {
    folder: TempDir,
    image: PathBuf,
    content: Vec<u8>,
}

impl Scene {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("image");
        let content: Vec<u8> = (0..1 << 20).map(|at: u32| (at % 251) as u8).collect();
        fs::write(&image, &content).unwrap();
        Self { folder, image, content }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns the arguments of `remoca disk` for the image, with sockets in the folder, and `more` arguments.
    fn arguments(&self, more: &[&str]) -> Vec<String> {
        let shown = |path: PathBuf| path.display().to_string();
        let mut arguments = vec!["disk".into()];
        if !more.contains(&"--control") {
            arguments.extend(["--control".into(), shown(self.path("control"))]);
        }
        if !more.contains(&"--image") && !more.contains(&"--disk") {
            arguments.extend(["--image".into(), shown(self.image.clone())]);
        }
        if !["--socket", "--fd", "--disk"].iter().any(|given| more.contains(given)) {
            arguments.extend(["--socket".into(), shown(self.path("socket"))]);
        }
        arguments.extend(more.iter().map(|&argument| argument.to_owned()));
        arguments
    }

    fn run(&self, more: &[&str]) -> Output {
        run(&self.arguments(more))
    }

    /// Starts the process, and waits until it answers.
    fn start(&self, more: &[&str]) -> Program {
        let mut program = Program::start(command(REMOCA).args(self.arguments(more)), &self.path("log"));
        wait_until("the VM process answers", || {
            assert!(program.is_running(), "{}", program.log());
            UnixStream::connect(self.path("control")).is_ok()
        });
        program
    }

    /// Expects that the process refuses, says why, and leaves everything as it was: the image is unchanged, and no
    /// socket is left.
    #[track_caller]
    fn expect(&self, more: &[&str], code: i32, words: &[&str]) {
        expect_refusal(&self.run(more), code, words);
        assert_eq!(fs::read(&self.image).unwrap(), self.content, "the image was changed");
        for name in ["socket", "control"] {
            let left = fs::symlink_metadata(self.path(name));
            assert!(left.is_err(), "{name} is left behind");
        }
    }
}

fn shown(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn images_that_are_none() {
    let scene = Scene::new();
    let missing = scene.path("no/such.img");
    scene.expect(&["--image", shown(&missing)], NO_IMAGE, &["no/such.img does not exist", "truncate -s"]);
    scene.expect(&["--image", shown(scene.folder.path())], NO_IMAGE, &["is a directory"]);
    scene.expect(&["--image", "/dev/null"], NO_IMAGE, &["/dev/null", "neither a regular file nor a block device"]);
    let file = scene.path("other");
    for (bytes, words) in [(0, "is empty"), (1000, "not a multiple of the 512-byte sector")] {
        File::create(&file).unwrap().set_len(bytes).unwrap();
        scene.expect(&["--image", shown(&file)], NO_IMAGE, &["other", words, "truncate -s"]);
        assert_eq!(fs::metadata(&file).unwrap().len(), bytes, "the image was changed");
    }
    File::create(&file).unwrap().set_len(512 * 9).unwrap();
    let disk = format!("image={},socket={},sector=4096", file.display(), scene.path("socket").display());
    scene.expect(
        &["--disk", &disk],
        CONFIGURATION,
        &["other", "4608 bytes", "sector of 4096", "leave out sector=4096"],
    );
    scene.expect(&["--image", ""], NO_IMAGE, &["does not exist"]);
}

#[test]
fn an_image_that_can_only_be_read() {
    let scene = Scene::new();
    fs::set_permissions(&scene.image, Permissions::from_mode(0o444)).unwrap();
    scene.expect(&[], NO_IMAGE, &["image for writing", "Use it read-only, or make it writable"]);
    // The advice helps.
    let mut program = scene.start(&["--read-only"]);
    assert!(status(&scene.path("control")).disks[0].read_only);
    program.terminate();
}

#[test]
fn an_image_in_use_by_another_remoca() {
    let scene = Scene::new();
    let mut first = scene.start(&[]);
    let [socket, control] = ["socket2", "control2"].map(|name| scene.path(name));
    let image = shown(&scene.image);
    let second = ["disk", "--image", image, "--socket", shown(&socket), "--control", shown(&control)];
    expect_refusal(&run(&second), FAILURE, &["image is in use by another process", "stop that one first", "fuser"]);
    assert!(!socket.exists() && !control.exists());
    assert!(first.is_running());
    first.terminate();
    // Nor may two disks of one VM have the same image.
    let disk = |name: &str| format!("image={image},socket={}", scene.path(name).display());
    let [a, b] = [disk("socket"), disk("socket2")];
    scene.expect(&["--disk", &a, "--disk", &b], CONFIGURATION, &["image is given twice", "disk0", "disk1"]);
    // Also not by two names, as a block device has below /dev/disk.
    let link = scene.path("link");
    std::os::unix::fs::symlink(&scene.image, &link).unwrap();
    let c = format!("image={},socket={}", link.display(), scene.path("socket2").display());
    scene.expect(&["--disk", &a, "--disk", &c], CONFIGURATION, &["image is given twice", "link)"]);
    // Several readers are allowed.
    let mut first = scene.start(&["--read-only"]);
    let mut reader = Program::start(command(REMOCA).args(second).arg("--read-only"), &scene.path("log2"));
    wait_until("the second reader answers", || UnixStream::connect(&control).is_ok());
    first.terminate();
    reader.terminate();
}

#[test]
fn an_image_in_use_by_qemu() {
    let scene = Scene::new();
    let mut qemu = command("qemu-io");
    qemu.args(["-f", "raw", shown(&scene.image)]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut qemu = qemu.spawn().expect("qemu-io of the package qemu-utils");
    // qemu-io holds the lock once it answers.
    writeln!(qemu.stdin.as_mut().unwrap(), "read 0 512").unwrap();
    let mut line = String::new();
    BufReader::new(qemu.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains("512"), "{line}");
    scene.expect(&[], FAILURE, &["image is in use by another process", "QEMU"]);
    drop(qemu.stdin.take());
    assert!(qemu.wait().unwrap().success());
    // And the other way round.
    let mut program = scene.start(&[]);
    let refused = run_command(command("qemu-io").args(["-f", "raw", "-c", "write 0 512", shown(&scene.image)]));
    assert!(!refused.status.success());
    assert!(String::from_utf8_lossy(&refused.stderr).contains("lock"), "{refused:?}");
    program.terminate();
    assert_eq!(fs::read(&scene.image).unwrap(), scene.content);
}

#[test]
fn sockets_that_cannot_be_had() {
    let scene = Scene::new();
    let long = scene.path(&"x".repeat(120));
    let missing = scene.path("no/such/socket");
    let file = scene.path("file");
    fs::write(&file, "precious").unwrap();
    let taken = scene.path("taken");
    let living = UnixListener::bind(&taken).unwrap();
    for option in ["--socket", "--port", "--control"] {
        let too_long = format!("has {} bytes, at most 107", long.as_os_str().len());
        scene.expect(&[option, shown(&long)], NO_SOCKET, &[&too_long, "use a shorter one"]);
        scene.expect(&[option, shown(&missing)], NO_SOCKET, &["no/such/socket", "No such file or directory"]);
        scene.expect(&[option, shown(&file)], NO_SOCKET, &["file exists and is not a socket"]);
        scene.expect(&[option, shown(&taken)], FAILURE, &["taken is in use by another process"]);
    }
    assert_eq!(fs::read(&file).unwrap(), b"precious");
    UnixStream::connect(&taken).expect("the other's socket is untouched");
    // Another test may fork a child that briefly holds a copy, so the socket is shut down, not only closed.
    net::shutdown(living, net::Shutdown::Both).unwrap();
    assert!(taken.exists(), "as after a kill");
    let mut program = scene.start(&["--socket", shown(&taken)]);
    program.terminate();
    assert!(!taken.exists());
}

#[test]
fn a_socket_given_twice() {
    let scene = Scene::new();
    let second = scene.path("second");
    fs::write(&second, vec![0; 4096]).unwrap();
    let socket = scene.path("socket");
    let [a, b] = [&scene.image, &second].map(|image| format!("image={},socket={}", image.display(), socket.display()));
    scene.expect(&["--disk", &a, "--disk", &b], CONFIGURATION, &["socket is given twice"]);
    scene.expect(&["--disk", &a, "--port", shown(&socket)], CONFIGURATION, &["socket is given twice"]);
    scene.expect(&["--port", shown(&scene.path("control"))], CONFIGURATION, &["control is given twice"]);
}

#[test]
fn descriptors_that_are_no_sockets() {
    let scene = Scene::new();
    scene.expect(&["--fd", "1000000"], FAILURE, &["--fd 1000000: there is no such descriptor"]);
    for number in ["0", "2", "-1"] {
        let argument = format!("--fd={number}");
        let mut arguments = scene.arguments(&["--fd"]);
        *arguments.last_mut().unwrap() = argument;
        expect_refusal(&run(&arguments), FAILURE, &["there is no such descriptor"]);
    }
    scene.expect(&["--fd", "three"], USAGE, &["three", "--fd"]);
    scene.expect(&["--fd", "9", "--socket", "x"], USAGE, &["--fd", "--socket", "cannot be used with"]);
    // A process that waits for its disks may open them twice.
    scene.expect(&["--fd", "9", "--incoming", "unix:x"], USAGE, &["--fd", "--incoming", "cannot be used with"]);
    let file = File::open("/dev/null").unwrap();
    let mut command = command(REMOCA);
    let refused = run_command(pass(&mut command, &file).args(scene.arguments(&["--fd", PASSED])));
    expect_refusal(&refused, FAILURE, &["not a stream socket of the Unix family"]);
}

/// Serves a hypervisor that passes a connected socket, and ends when the hypervisor ends.
#[test]
fn a_descriptor_that_is_one() {
    let scene = Scene::new();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut command = command(REMOCA);
    pass(&mut command, &theirs).args(scene.arguments(&["--fd", PASSED]));
    let mut program = Program::start(&mut command, &scene.path("log"));
    drop(theirs);
    wait_until("the front end is attached", || {
        assert!(program.is_running(), "{}", program.log());
        UnixStream::connect(scene.path("control")).is_ok() && status(&scene.path("control")).disks[0].attached
    });
    drop(ours);
    wait_until("it ends with its only front end", || !program.is_running());
}

#[test]
fn disks_described_wrongly() {
    let scene = Scene::new();
    let image = scene.image.display();
    let socket = scene.path("socket");
    let socket = socket.display();
    let good = format!("image={image},socket={socket}");
    let with = |more: &str| format!("{good},{more}");
    for (disk, words) in [
        (with("colour=red"), "unknown key `colour`: known are format, image"),
        (with("readonly"), "unknown key `readonly`: did you mean `read-only`?"),
        (with("read-only=perhaps"), "read-only: must be on or off"),
        (with("sector=1000"), "sector: must be 512 or 4096"),
        (with("queues=many"), "`many` is not a number of queues"),
        (with("queues=0"), "`0` is not a number of queues: 1 to 64"),
        (with("queues=65"), "1 to 64"),
        (format!("socket={socket}"), "a disk needs image=IMAGE"),
        (format!("image=,socket={socket}"), "image: must not be empty"),
        (with("socket=/another"), "socket is given twice: say it once"),
        (with("image=/another"), "image is given twice: say it once"),
    ] {
        scene.expect(&["--disk", &disk], USAGE, &[words]);
    }
    let long = with("name=a-name-that-is-longer-than-twenty-bytes");
    scene.expect(&["--disk", &long], CONFIGURATION, &["longer than 20 bytes"]);
    scene.expect(&["--disk", &good, "--image", shown(&scene.image)], USAGE, &["--disk", "--image"]);
    let control = scene.path("control");
    expect_refusal(
        &run(&["disk", "--control", shown(&control)]),
        CONFIGURATION,
        &["no disk", "--image IMAGE --socket PATH"],
    );
    let no_socket = ["disk", "--image", shown(&scene.image), "--control", shown(&control)];
    expect_refusal(&run(&no_socket), CONFIGURATION, &["Say --socket PATH"]);
    expect_refusal(&run(&["disk", "--socket", "x"]), USAGE, &["--image"]);
    expect_refusal(&run(&["disk", "--socket", "x", "--disk", &good]), USAGE, &["--disk", "--socket"]);
    scene.expect(&["--name", "a/b"], CONFIGURATION, &["invalid VM name `a/b`"]);
    scene.expect(&["--name", "a\nb"], CONFIGURATION, &["invalid VM name `a\\nb`"]);
    let long = scene.path(&"x".repeat(120));
    scene.expect(&["--name", "a", "--control", shown(&long)], NO_SOCKET, &["at most 107"]);
    assert!(!scene.path("a.state").exists(), "its state file is left behind");
    scene.expect(&["--trace", "/no/such/folder/trace"], CONFIGURATION, &["cannot make the trace file"]);
}

#[test]
fn sizes_of_the_cache() {
    let scene = Scene::new();
    let server = ["--server", "unix:/no/such/server"];
    let with = |size: &'static str| [&server[..], &["--cache", size]].concat();
    scene.expect(&with("0"), CONFIGURATION, &["a cache of 0 bytes", "multiple of 4096 above 0"]);
    scene.expect(&with("5000"), CONFIGURATION, &["a cache of 5000 bytes", "multiple of 4096", "such as 4K"]);
    scene.expect(&with("2GB"), CONFIGURATION, &["a cache of 2000000000 bytes", "such as 1953124K; K, M, G"]);
    scene.expect(&with("5T"), CONFIGURATION, &["4 TiB is the limit"]);
    for size in ["--cache=lots", "--cache=-1", "--cache=1.5G", "--cache="] {
        scene.expect(&[server[0], server[1], size], USAGE, &["--cache", "size"]);
    }
}

#[test]
fn server_addresses_that_are_none() {
    let scene = Scene::new();
    let long = format!("unix:{}", "x".repeat(108));
    for address in ["", "host:7", "tcp:host", "tcp::7", "tcp:host:0", "tcp:host:65536", "udp:host:7", "unix:", &long] {
        scene.expect(&["--server", address], USAGE, &["--server", "tcp:HOST:PORT, unix:PATH or local:PATH"]);
    }
}

/// Without its memory server, the VM process starts nevertheless, serves its disk, and reports what is wrong.
#[test]
fn servers_that_cannot_be_reached() {
    let folder = tempfile::tempdir().unwrap();
    let refusing = folder.path().join("refusing");
    // Another test may fork a child that briefly holds a copy, so the socket is shut down, not only closed.
    net::shutdown(UnixListener::bind(&refusing).unwrap(), net::Shutdown::Both).unwrap();
    let (_held, port) = hold_port();
    for (address, words) in [
        (format!("unix:{}", folder.path().join("missing").display()), "No such file or directory"),
        (format!("unix:{}", refusing.display()), "Connection refused"),
        (format!("tcp:127.0.0.1:{port}"), "Connection refused"),
        ("tcp:no.such.host.invalid:7070".into(), "cannot be reached"),
    ] {
        let mut machine = Machine::start(Setup { server: Some(address.clone()), ..Setup::default() });
        let error = |machine: &Machine| machine.status().server.unwrap().error;
        machine.run_until("the error is known", |machine| error(machine).is_some());
        machine.run(10);
        let said = error(&machine).unwrap();
        assert!(said.contains(&address) && said.contains(words) && said.contains("remoca serve"), "{said}");
        let shown = run(&["status", machine.control().to_str().unwrap(), "--verbose"]);
        let shown = String::from_utf8(shown.stdout).unwrap();
        assert!(shown.contains("not connected: ") && shown.contains(words), "{shown}");
        assert!(machine.program.log().contains("Reads go to the disk; trying again."), "{}", machine.program.log());
        machine.finish();
    }
}

#[test]
fn a_server_of_another_version_is_named_in_the_status() {
    let folder = tempfile::tempdir().unwrap();
    let server = FakeServer::start(&folder.path().join("server"), Lie::OtherVersion);
    let setup = Setup { server: Some(server.address.clone()), ..Setup::default() };
    let mut machine = Machine::start_in(folder, setup);
    let shown = |machine: &Machine| {
        let output = run(&["status", machine.control().to_str().unwrap(), "-v"]);
        String::from_utf8(output.stdout).unwrap()
    };
    let words = "not connected: the memory server at unix:";
    machine.run_until("the error is shown", |machine| shown(machine).contains(words));
    assert!(shown(&machine).contains("protocol versions 7 to 9, this program 1 to 1"), "{}", shown(&machine));
    machine.finish();
}

#[test]
fn a_cache_larger_than_the_memory_of_the_server() {
    let folder = tempfile::tempdir().unwrap();
    let server = Serve::start(folder.path(), "4M");
    let setup = Setup { server: Some(server.address.clone()), cache: "1G", ..Setup::default() };
    let mut machine = Machine::start_in(folder, setup);
    machine.run_until("the server gives what it has", |machine| machine.status().cache.granted_bytes == 4 << 20);
    assert_eq!(machine.status().cache.wanted_bytes, 1 << 30);
    assert_eq!(server.pages_given(), 1024);
    machine.run_until_hits(100);
    let shown = run(&["status", machine.control().to_str().unwrap(), "-v"]);
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.contains("1G wanted, 4M granted"), "{shown}");
    let log = machine.program.log();
    assert_eq!(log.matches("no room for the cache's size: they gave 4M of 1G").count(), 1, "{log}");
    machine.finish();
}

#[test]
fn without_a_server_it_is_a_disk_and_no_more() {
    let mut machine = Machine::start(Setup::default());
    machine.run(50);
    let status = machine.status();
    assert!(status.server.is_none() && !status.cache.enabled);
    assert_eq!(status.counters["hit_blocks"], 0);
    let refused = run(&["set", machine.control().to_str().unwrap(), "--cache", "1G"]);
    expect_refusal(&refused, FAILURE, &["this process has no memory server; start it with --server"]);
    machine.finish();
}

#[test]
fn capabilities_are_printed_and_nothing_else_is_done() {
    let output = run(&["disk", "--print-capabilities"]);
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    let said: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(said["type"], "block");
    assert_eq!(said["features"], serde_json::json!(["read-only", "blk-file"]));
}
