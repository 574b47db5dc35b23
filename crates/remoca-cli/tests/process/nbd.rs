//! Disks as NBD exports, to clients that others wrote (libnbd's tools, QEMU's, fio), to clients that break the protocol, and
//! to clients that come and go. The protocol itself has its tests in `remoca-frontend/src/nbd/tests.rs`.

use super::support::program::{Program, REMOCA, Serve, command, expect_refusal, run, run_command, run_within, status};
use super::support::random::Random;
use super::support::{PATIENCE, wait_at_most, wait_until};
use remoca_protocol::control::Status;
use remoca_store::testing::hold_port;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::Duration;
use tempfile::TempDir;

const MIB: usize = 1 << 20;
/// Time limit of one fio run.
const LOAD_PATIENCE: Duration = Duration::from_secs(600);

/// A `remoca disk` that offers `root` and the read-only `base` at a Unix socket and on TCP.
struct Host {
    folder: TempDir,
    server: Serve,
    program: Program,
    _held: OwnedFd,
    port: u16,
}

fn path(folder: &Path, name: &str) -> PathBuf {
    folder.join(name)
}

impl Host {
    fn start(root: &[u8]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(path(folder.path(), "root.img"), root).unwrap();
        std::fs::write(path(folder.path(), "base.img"), &root[..MIB]).unwrap();
        let server = Serve::start(folder.path(), "64M");
        let (held, port) = hold_port();
        let image = |name: &str| format!("image={},name={name}", path(folder.path(), &format!("{name}.img")).display());
        let mut command = command(REMOCA);
        command.args(["disk", "--disk", &image("root"), "--disk", &format!("{},read-only", image("base"))]);
        command.args(["--cache", "16M", "--server", &server.address, "--nbd", &format!("tcp:127.0.0.1:{port}")]);
        command.arg("--nbd").arg(format!("unix:{}", path(folder.path(), "nbd").display()));
        command.arg("--control").arg(path(folder.path(), "control"));
        let program = start(&mut command, folder.path());
        Self { folder, server, program, _held: held, port }
    }

    fn unix(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", path(self.folder.path(), "nbd").display())
    }

    fn tcp(&self, export: &str) -> String {
        format!("nbd://127.0.0.1:{}/{export}", self.port)
    }

    fn file(&self, name: &str) -> String {
        path(self.folder.path(), name).display().to_string()
    }

    fn status(&self) -> Status {
        status(&path(self.folder.path(), "control"))
    }

    fn counter(&self, name: &str) -> u64 {
        self.status().counters[name]
    }

    fn clients(&self) -> usize {
        self.status().disks.iter().filter_map(|disk| disk.nbd_clients).sum()
    }

    /// Ends the process in good order, and returns the content of the image.
    fn finish(mut self) -> Vec<u8> {
        self.program.terminate();
        assert!(!path(self.folder.path(), "nbd").exists(), "the socket is left behind");
        std::fs::read(path(self.folder.path(), "root.img")).unwrap()
    }
}

/// Starts the process, and waits until it accepts clients.
fn start(command: &mut std::process::Command, folder: &Path) -> Program {
    let mut program = Program::start(command, &path(folder, "disk.log"));
    wait_until("the VM process answers", || {
        assert!(program.is_running(), "{}", program.log());
        UnixStream::connect(path(folder, "control")).is_ok()
    });
    program
}

/// Runs a tool of the distribution, which must succeed, and returns its output.
#[track_caller]
fn tool(arguments: &[&str]) -> String {
    let output = try_tool(arguments);
    let said = [&output.stdout[..], &output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    assert!(output.status.success(), "{arguments:?}: {said}");
    said
}

fn try_tool(arguments: &[&str]) -> Output {
    // The PATH excludes a Python installed elsewhere, which would not know libnbd.
    run_command(command(arguments[0]).args(&arguments[1..]).env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"))
}

fn random(seed: u64, length: usize) -> Vec<u8> {
    Random::new(seed).bytes(length)
}

#[test]
fn libnbd_sees_what_is_offered() {
    let host = Host::start(&random(1, 8 * MIB));
    let list: serde_json::Value =
        serde_json::from_str(&tool(&["nbdinfo", "--list", "--json", &host.unix("")])).unwrap();
    assert_eq!(list["protocol"], "newstyle-fixed");
    let exports = list["exports"].as_array().unwrap();
    let names: Vec<_> = exports.iter().map(|export| export["export-name"].as_str().unwrap()).collect();
    assert_eq!(names, ["root", "base"]);
    assert_eq!(exports[0]["export-size"], 8 * MIB);
    for (field, root, base) in [
        ("is_read_only", false, true),
        ("can_flush", true, true),
        ("can_fua", true, true),
        ("can_multi_conn", true, true),
        ("can_df", true, true),
        ("can_trim", true, false),
        ("can_zero", true, false),
        ("can_cache", false, false),
        ("can_fast_zero", false, false),
    ] {
        assert_eq!((&exports[0][field], &exports[1][field]), (&root.into(), &base.into()), "{field}");
    }
    let sizes = ["minimum", "preferred", "maximum"].map(|which| &exports[0][format!("block_size_{which}")]);
    assert_eq!(sizes, [512, 4096, 32 * MIB]);
    // Without a name, the server cannot know which of two exports is meant.
    for missing in ["nothing", ""] {
        assert!(!try_tool(&["nbdinfo", &host.tcp(missing)]).status.success());
    }
}

#[test]
fn libnbd_and_qemu_copy_and_compare() {
    let host = Host::start(&vec![0; 24 * MIB]);
    let content = random(2, 24 * MIB);
    std::fs::write(host.file("content"), &content).unwrap();
    let [given, back] = ["content", "back"].map(|name| host.file(name));
    // Copies over several connections, with one flush at the end on one of them.
    tool(&["nbdcopy", "--flush", "--connections=4", "--requests=32", &given, &host.unix("root")]);
    tool(&["nbdcopy", "--connections=3", &host.tcp("root"), &back]);
    assert!(std::fs::read(&back).unwrap() == content, "nbdcopy brings back something else");
    tool(&["qemu-img", "compare", "-f", "raw", "-F", "raw", &given, &host.unix("root")]);
    tool(&["qemu-img", "convert", "-f", "raw", "-O", "raw", &host.tcp("root"), &back]);
    assert!(std::fs::read(&back).unwrap() == content, "qemu-img brings back something else");
    wait_until("all of them leave", || host.clients() == 0);
    assert!(host.finish() == content, "the image holds something else");
}

#[test]
fn qemus_patterns() {
    let host = Host::start(&vec![9; 16 * MIB]);
    let orders = [
        "write -P 0x55 1M 3M",
        "read -P 0x55 1M 3M",
        "write -P 3 4096 512",
        "read -P 3 4096 512",
        "read -P 9 4608 3584",
        "write -f -P 4 8M 64k",
        "write -z 2M 64k",
        "read -P 0 2M 64k",
        "read -P 0x55 2112k 100k",
        "write -z -u 9M 1M",
        "read -P 0 9M 1M",
        "discard 12M 1M",
        "aio_write -P 7 5M 1M",
        "aio_write -P 8 6M 1M",
        "aio_flush",
        "flush",
        "read -P 7 5M 1M",
        "read -P 8 6M 1M",
    ];
    for uri in [host.unix("root"), host.tcp("root")] {
        let mut arguments = vec!["qemu-io", "-f", "raw"];
        orders.iter().for_each(|order| arguments.extend(["-c", order]));
        arguments.push(&uri);
        let said = tool(&arguments);
        assert!(!said.contains("verification failed") && !said.contains("error"), "{said}");
    }
    let refused = try_tool(&["qemu-io", "-f", "raw", "-c", "write 0 4k", &host.unix("base")]);
    assert!(!refused.status.success(), "a read-only disk was written");
    let image = host.finish();
    assert!(image[MIB..2 * MIB].iter().all(|byte| *byte == 0x55) && image[4096..4608].iter().all(|byte| *byte == 3));
}

/// Tests what tools do not do by themselves: both kinds of replies, the longest requests, flags, and errors.
#[test]
fn libnbd_finds_the_protocol_kept() {
    let host = Host::start(&random(3, 36 * MIB));
    let script = format!(
        r#"
import nbd, errno
content = open("{image}", "rb").read()
def connect(uri, simple=False):
    h = nbd.NBD()
    if simple:
        h.set_request_structured_replies(False)
    h.connect_uri(uri)
    h.set_strict_mode(0)
    return h
def fails(code, f, *arguments):
    try:
        f(*arguments)
    except nbd.Error as e:
        assert e.errno == code, (e.errno, code)
    else:
        assert False, "no error: %s" % code
for simple in (False, True):
    h = connect("{root}", simple)
    assert h.get_structured_replies_negotiated() != simple
    for offset, length in ((0, 512), (512, 4096), (3584, 1048576), (1536, 32 << 20), (4 << 20, 32 << 20)):
        assert h.pread(length, offset) == content[offset:offset + length], (simple, offset, length)
    fails("EINVAL", h.pread, 512, 36 << 20)
    fails("EINVAL", h.pread, 1, 0)
    fails("ENOSPC", h.pwrite, bytes(1024), (36 << 20) - 512)
    fails("EINVAL", h.pwrite, bytes(512), 1)
    fails("ENOSPC", h.zero, 512, 36 << 20)
    fails("EINVAL", h.trim, 512, 36 << 20)
    fails("EINVAL", h.cache, 512, 0)
    h.pwrite(content[:32 << 20], 0)
    h.pwrite(bytes(512), 0, nbd.CMD_FLAG_FUA)
    assert h.pread(1024, 0) == bytes(512) + content[512:1024]
    h.pwrite(content[:512], 0)
    h.trim(1 << 20, 35 << 20, nbd.CMD_FLAG_FUA)
    h.zero(1 << 20, 35 << 20, nbd.CMD_FLAG_NO_HOLE | nbd.CMD_FLAG_FUA)
    assert h.pread(1 << 20, 35 << 20) == bytes(1 << 20)
    h.pwrite(content[35 << 20:], 35 << 20)
    h.flush()
h = connect("{root}")
chunks = []
h.pread_structured(8 << 20, 512, lambda buf, offset, status, error: chunks.append((offset, len(buf))), nbd.CMD_FLAG_DF)
assert chunks == [(512, 8 << 20)], chunks
base = connect("{base}")
for f, arguments in ((base.pwrite, (bytes(512), 0)), (base.trim, (512, 0)), (base.zero, (512, 0))):
    fails("EPERM", f, *arguments)
assert base.pread(512, 512) == content[512:1024]
# What is written on one connection is there on another, however many requests are on their way.
other = connect("{tcp}")
written = [(i * 4096, nbd.Buffer.from_bytearray(bytearray([i]) * 4096)) for i in range(200)]
for cookie in [h.aio_pwrite(data, offset) for offset, data in written]:
    while not h.aio_command_completed(cookie):
        h.poll(-1)
other.flush()
assert all(other.pread(4096, i * 4096) == bytes([i]) * 4096 for i in range(200))
h.shutdown()
"#,
        image = host.file("root.img"),
        root = host.unix("root"),
        base = host.unix("base"),
        tcp = host.tcp("root"),
    );
    tool(&["nbdsh", "-c", &script]);
}

/// The cache answers reads, the memory server is killed and comes back, and fio finds every byte right.
#[test]
fn fio_verifies_what_the_cache_brings_while_the_memory_server_dies() {
    let mut host = Host::start(&vec![0; 32 * MIB]);
    let load = |uri: String, seed: &str| {
        let mut command = command("fio");
        command.args(["--name=load", "--ioengine=nbd", "--rw=randrw", "--rwmixread=60", "--iodepth=16", "--size=8M"]);
        command.args([
            "--bsrange=4k-64k",
            "--verify=crc32c",
            "--verify_backlog=64",
            "--loops=6",
            "--verify_state_save=0",
        ]);
        command.args([format!("--uri={uri}"), format!("--randseed={seed}")]);
        command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        command
    };
    let expect_success = |output: &Output| {
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("err= 0"), "{said}");
    };
    wait_at_most(LOAD_PATIENCE, "the cache is at work", || {
        expect_success(&run_within(LOAD_PATIENCE, &mut load(host.unix("root"), "1")));
        host.counter("hit_blocks") > 100
    });
    std::thread::scope(|scope| {
        let (uri, tcp) = (host.unix("root"), host.tcp("root"));
        let loads =
            scope.spawn(move || [load(uri, "2"), load(tcp, "3")].map(|mut load| run_within(LOAD_PATIENCE, &mut load)));
        let folder = host.folder.path().to_owned();
        let hits = || status(&path(&folder, "control")).counters["hit_blocks"];
        while !loads.is_finished() {
            host.server.program.kill();
            host.server.restart();
            let before = hits();
            let mut looks = 0;
            wait_at_most(LOAD_PATIENCE, "the cache hits again, or the load is over", || {
                looks += 1;
                loads.is_finished() || (hits() > before + 50 && looks > 5)
            });
        }
        loads.join().unwrap().iter().for_each(expect_success);
    });
    let compared =
        tool(&["qemu-img", "compare", "-f", "raw", "-F", "raw", "-U", &host.file("root.img"), &host.unix("root")]);
    assert!(compared.contains("identical"), "{compared}");
    assert!(host.program.is_running());
}

/// An image behind an nbdkit that logs the requests it receives.
struct Noted {
    folder: TempDir,
    _program: Program,
    _nbdkit: Program,
}

impl Noted {
    fn start(nbdkit_arguments: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let [store, log] = ["store", "nbdkit.log"].map(|name| path(folder.path(), name).display().to_string());
        let mut nbdkit = command("nbdkit");
        nbdkit.args(["-f", "-U", &store, "--filter=log"]).args(nbdkit_arguments).arg(format!("logfile={log}"));
        let nbdkit = Program::start(&mut nbdkit, &path(folder.path(), "nbdkit.out"));
        wait_until("nbdkit listens", || UnixStream::connect(&store).is_ok());
        let mut command = command(REMOCA);
        command.args(["disk", "--image", &format!("nbd+unix:///?socket={store}")]);
        command.arg("--nbd").arg(format!("unix:{}", path(folder.path(), "nbd").display()));
        command.arg("--control").arg(path(folder.path(), "control"));
        let program = start(&mut command, folder.path());
        Self { folder, _program: program, _nbdkit: nbdkit }
    }

    /// Returns the URI of the only disk, which needs no name.
    fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", path(self.folder.path(), "nbd").display())
    }
}

/// Tests NBD_FLAG_CAN_MULTI_CONN: a flush on one connection covers what was written on the others.
#[test]
fn a_flush_covers_what_other_connections_wrote() {
    let noted = Noted::start(&["memory", "16M"]);
    let uri = noted.uri();
    let script = format!(
        "
import nbd
handles = [nbd.NBD() for _ in range(4)]
for h in handles:
    h.connect_uri('{uri}')
    assert h.can_multi_conn()
for h in handles[1:]:
    h.pwrite(bytes([7]) * 4096, 8192)
handles[0].flush()
"
    );
    tool(&["nbdsh", "-c", &script]);
    let log = std::fs::read_to_string(path(noted.folder.path(), "nbdkit.log")).unwrap();
    let places = |word: &str| log.match_indices(word).map(|(at, _)| at).collect::<Vec<_>>();
    let (ends, flushes) = (places("...Write"), places(" Flush id="));
    assert_eq!((places(" Write id=").len(), ends.len()), (3, 3), "{log}");
    assert!(flushes.iter().any(|flush| *flush > ends[2]), "no flush after the writes: {log}");
}

#[test]
fn errors_of_the_disk_keep_their_number() {
    let rates = ["error-pread-rate=100%", "error-pwrite-rate=100%"];
    let noted = Noted::start(
        &[&["--filter=error", "memory", "16M", "error-pread=EIO", "error-pwrite=ENOSPC"], &rates[..]].concat(),
    );
    let script = format!(
        "
import nbd
h = nbd.NBD()
h.connect_uri('{uri}')
for f, argument, expected in ((h.pread, 4096, 'EIO'), (h.pwrite, bytes(4096), 'ENOSPC'), (h.pread, 4 << 20, 'EIO')):
    try:
        f(argument, 0)
    except nbd.Error as e:
        assert e.errno == expected, e.errno
    else:
        assert False, 'no error'
h.flush()
",
        uri = noted.uri()
    );
    tool(&["nbdsh", "-c", &script]);
}

/// Connects and chooses the export in the old way, with simple replies.
pub fn attach(socket: &Path, export: &str) -> UnixStream {
    try_attach(socket, export).expect("the client is refused")
}

fn try_attach(socket: &Path, export: &str) -> Option<UnixStream> {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.read_exact(&mut [0; 18]).ok()?;
    let length = u32::try_from(export.len()).unwrap().to_be_bytes();
    let choice = [&3_u32.to_be_bytes()[..], b"IHAVEOPT\0\0\0\x01", &length, export.as_bytes()].concat();
    stream.write_all(&choice).ok()?;
    stream.read_exact(&mut [0; 10]).ok()?;
    Some(stream)
}

pub fn request(command: u16, cookie: u64, offset: u64, length: u32) -> Vec<u8> {
    let mut bytes = b"\x25\x60\x95\x13\0\0".to_vec();
    bytes.extend(command.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    bytes.extend(length.to_be_bytes());
    bytes
}

/// Whatever such a client does, others are served, and the process neither ends nor grows.
#[test]
fn clients_that_break_the_protocol_or_say_nothing() {
    let mut host = Host::start(&random(4, 16 * MIB));
    let socket = path(host.folder.path(), "nbd");
    let honest = |host: &Host| tool(&["qemu-io", "-f", "raw", "-c", "read 0 1M", &host.unix("root")]);
    for garbage in
        [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xFF; 4], &[0; 5000], b"\0\0\0\x03IHAVEOPT\0\0\0\x07\xFF\xFF\xFF\xFF"]
    {
        let mut stream = UnixStream::connect(&socket).unwrap();
        stream.write_all(garbage).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        // The client is disconnected. A write of ours that was not read is an error here.
        let _ = stream.read_to_end(&mut Vec::new());
    }
    for bad in [vec![0; 28], request(1, 1, 0, u32::MAX), request(2, 1, 0, 0)] {
        let mut stream = attach(&socket, "root");
        stream.write_all(&bad).unwrap();
        assert_eq!(stream.read(&mut [0; 64]).unwrap_or(0), 0, "it is sent away");
    }
    honest(&host);

    // Clients leave in the middle of a payload, and with reads in flight.
    let mut stream = attach(&socket, "root");
    stream.write_all(&[&request(1, 1, 0, 16 << 20)[..], &[5; 3 << 20]].concat()).unwrap();
    drop(stream);
    for _ in 0..20 {
        let mut stream = attach(&socket, "root");
        (0..100).for_each(|cookie| stream.write_all(&request(0, cookie, 0, 1 << 20)).unwrap());
    }
    honest(&host);

    // Silent clients make room for others: there are more of them than places.
    let silent: Vec<_> = (0..60).map(|_| UnixStream::connect(&socket).unwrap()).collect();
    honest(&host);
    drop(silent);

    // Clients that send requests but do not read keep their places, and take no more than that.
    wait_until("the others have left", || host.clients() == 0);
    let mut greedy = Vec::new();
    while let Some(mut stream) = try_attach(&socket, "root") {
        stream.set_nonblocking(true).unwrap();
        // Sends as many requests as the server accepts.
        let reads: Vec<u8> = (0..2000).flat_map(|cookie| request(0, cookie, 0, 4 << 20)).collect();
        let _ = stream.write(&reads);
        greedy.push(stream);
    }
    assert_eq!(greedy.len(), 32);
    assert!(!try_tool(&["nbdinfo", &host.unix("root")]).status.success(), "there is no place left");
    // 8 MiB of each client, what `--buffers` allows, and everything else.
    let most = (32 * 8 + 64 + 64) << 20;
    assert!(host.program.memory("VmHWM:") < most);
    greedy.pop();
    wait_until("a place is free", || try_tool(&["nbdinfo", &host.unix("root")]).status.success());
    drop(greedy);
    wait_until("all have left", || host.clients() == 0);
    honest(&host);
    wait_until("their memory is given back", || host.program.memory("VmRSS:") < 128 << 20);
    assert!(host.program.is_running());
    assert!(!host.program.log().contains("panicked"));
}

/// A client that says goodbye, or closes its side, gets the answers that are due. Then the connection ends.
#[test]
fn answers_come_after_a_goodbye() {
    let data = random(8, 4 * MIB);
    let host = Host::start(&data);
    let socket = path(host.folder.path(), "nbd");
    for goodbye in [true, false] {
        let mut stream = attach(&socket, "root");
        let mut sent = [request(1, 1, 0, 4096), data[..4096].to_vec(), request(3, 2, 0, 0)].concat();
        (3..13).for_each(|cookie| sent.extend(request(0, cookie, 0, 1 << 20)));
        if goodbye {
            sent.extend(request(2, 13, 0, 0));
        }
        stream.write_all(&sent).unwrap();
        if !goodbye {
            stream.shutdown(std::net::Shutdown::Write).unwrap();
        }
        let mut answers = Vec::new();
        stream.read_to_end(&mut answers).unwrap();
        assert_eq!(answers.len(), 12 * 16 + 10 * MIB, "with a goodbye: {goodbye}");
    }
    wait_until("both have left", || host.clients() == 0);
    let log = host.program.log();
    assert!(log.contains(": its last NBD client has left: "), "{log}");
}

/// An option that is skipped because it is too long is answered, however its bytes arrive.
#[test]
fn a_long_option_is_answered() {
    let host = Host::start(&random(9, MIB));
    for length in [64 * 8192 - 16, 64 * 8192, 4_000_000] {
        let mut stream = UnixStream::connect(path(host.folder.path(), "nbd")).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.read_exact(&mut [0; 18]).unwrap();
        let header = [&3_u32.to_be_bytes()[..], b"IHAVEOPT\0\0\0\x07", &u32::try_from(length).unwrap().to_be_bytes()];
        stream.write_all(&[&header.concat()[..], &vec![1; length]].concat()).unwrap();
        let mut reply = [0; 20];
        stream.read_exact(&mut reply).unwrap();
        assert_eq!(reply[12..16], (1_u32 << 31 | 9).to_be_bytes(), "too big");
    }
}

/// Members of the group may connect, other users may not.
#[test]
fn sockets_belong_to_the_group_that_is_named() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    let folder = tempfile::tempdir().unwrap();
    let group = std::fs::metadata(folder.path()).unwrap().gid().to_string();
    let sockets = ["nbd", "vhost", "port"].map(|name| path(folder.path(), name));
    for name in ["a.img", "b.img"] {
        std::fs::write(path(folder.path(), name), random(10, MIB)).unwrap();
    }
    let mut disk = command(REMOCA);
    disk.args(["disk", "--socket-group", &group, "--disk"]);
    disk.arg(format!("image={}", path(folder.path(), "a.img").display()));
    disk.arg("--disk").arg(format!("image={},socket={}", path(folder.path(), "b.img").display(), sockets[1].display()));
    disk.arg("--nbd").arg(format!("unix:{}", sockets[0].display())).arg("--port").arg(&sockets[2]);
    disk.arg("--control").arg(path(folder.path(), "control"));
    let _program = start(&mut disk, folder.path());
    for socket in sockets {
        let metadata = socket.metadata().unwrap();
        assert_eq!((metadata.permissions().mode() & 0o777, metadata.gid().to_string()), (0o660, group.clone()));
    }
}

/// systemd passes a listening socket as descriptor 3.
#[test]
fn a_socket_that_systemd_passes() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(path(folder.path(), "root.img"), random(5, MIB)).unwrap();
    let socket = path(folder.path(), "passed");
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let mut shell = command("/bin/sh");
    let job = format!(
        "LISTEN_FDS=1 LISTEN_PID=$$ exec {REMOCA} disk --image {} --nbd systemd --control {} 3<&0",
        path(folder.path(), "root.img").display(),
        path(folder.path(), "control").display()
    );
    shell.args(["-c", &job]).stdin(std::os::fd::OwnedFd::from(listener));
    let mut program = start(&mut shell, folder.path());
    let uri = format!("nbd+unix:///disk0?socket={}", socket.display());
    assert!(tool(&["nbdinfo", "--size", &uri]).contains("1048576"));
    program.terminate();
    assert!(socket.exists(), "it is not ours to remove");
}

#[test]
fn addresses_and_names_that_cannot_be() {
    let folder = tempfile::tempdir().unwrap();
    let image = path(folder.path(), "root.img");
    std::fs::write(&image, random(6, MIB)).unwrap();
    let (image, control) = (image.display().to_string(), path(folder.path(), "control").display().to_string());
    let nbd = format!("unix:{}", path(folder.path(), "nbd").display());
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = format!("tcp:{}", taken.local_addr().unwrap());
    let other = path(folder.path(), "other.img").display().to_string();
    std::fs::write(&other, random(7, MIB)).unwrap();
    let (first, second) = (format!("image={image},name=a"), format!("image={other},name=a"));
    let port = format!("image={image},name=remoca-port");
    let vhost = format!("image={image},socket={}", path(folder.path(), "vhost").display());
    let shared = format!("unix:{}", path(folder.path(), "vhost").display());
    for (arguments, code, words) in [
        (vec!["--image", &image, "--nbd", "somewhere"], 2, "unix:PATH, tcp:HOST:PORT or systemd"),
        (vec!["--image", &image, "--nbd", "tcp:localhost"], 2, "no valid host and port"),
        (vec!["--image", &image, "--nbd", "unix:"], 2, "a socket path has 1 to 107 bytes"),
        (vec!["--image", &image, "--nbd", &taken], 1, "choose another address"),
        (vec!["--image", &image, "--nbd", "systemd"], 78, "no socket was passed"),
        (vec!["--image", &image, "--nbd", "systemd", "--nbd", "systemd"], 78, "say it once"),
        (vec!["--image", &image, "--fd", "9", "--nbd", "systemd"], 78, "--fd"),
        (vec!["--disk", &vhost, "--disk", &second, "--nbd", &shared], 78, "is given twice"),
        (vec!["--image", &image, "--nbd", &nbd, "--socket-group", "no-such-group"], 2, "there is no group"),
        (vec!["--image", &image, "--nbd-port"], 2, "--nbd"),
        (vec!["--disk", &first], 78, "or --nbd ADDRESS"),
        (vec!["--disk", &vhost, "--nbd", &nbd], 78, "--nbd has nothing to offer"),
        (vec!["--disk", &first, "--disk", &second, "--nbd", &nbd], 78, "the name a is given twice"),
        (vec!["--disk", &port, "--nbd", &nbd, "--nbd-port"], 78, "the name remoca-port is given twice"),
        (vec!["--disk", &first, "--nbd", &nbd, "--nbd-port", "--port", "x"], 2, "--port"),
    ] {
        let arguments = [&["disk", "--control", &control][..], &arguments].concat();
        expect_refusal(&run(&arguments), code, &[words]);
    }
}
