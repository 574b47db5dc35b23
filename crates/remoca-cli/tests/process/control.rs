//! `remoca status` and `remoca set`, and what other clients send to a control socket.

use super::support::machine::{Machine, Setup};
use super::support::program::{
    Program, REMOCA, Serve, Signal, ask_raw, command, expect_refusal, expect_set, install, run, run_command, set,
    status,
};
use super::support::{PATIENCE, wait_until};
use remoca_io::left_out::is_root;
use remoca_protocol::control::{PATIENCE as SILENT_TIME_MAX, Status};
use remoca_protocol::trace::{TracedOp, TracedSource, parse_trace};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::Path;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

const USAGE: i32 = 2;
const FAILURE: i32 = 1;
const NOBODY: u32 = 65534;
/// Option of `prlimit`. The index of a cache of 4 TiB, 40 GB, has no room in so many addresses; this host may have as much memory.
const ADDRESSES: &str = "--as=34359738368";
/// Number of control clients that one process serves at a time.
pub const CLIENTS_MAX: usize = 16;

fn machine(seed: u64) -> (Serve, Machine) {
    Machine::start_with_server(tempfile::tempdir().unwrap(), Setup { seed, ..Setup::default() })
}

#[track_caller]
fn text(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn ask(machine: &Machine, command: &str, more: &[&str]) -> Output {
    run(&[&[command, machine.control().to_str().unwrap()], more].concat())
}

/// Replaces the memory server, so that its slowness is not held against it: an open breaker would add two words to
/// the table.
fn forget_slowness(machine: &Machine, server: &mut Serve) {
    server.program.kill();
    wait_until("the loss is noticed", || !machine.status().server.is_some_and(|server| server.connected));
    server.restart();
    wait_until("the new server gives what is wanted", || {
        let status = machine.status();
        status.server.is_some_and(|server| server.connected) && status.cache.granted_bytes == status.cache.wanted_bytes
    });
}

#[test]
fn the_status_as_a_table_in_full_and_as_json() {
    let (mut server, mut machine) = machine(51);
    machine.run_until_hits(200);
    forget_slowness(&machine, &mut server);
    let table = text(&ask(&machine, "status", &[]));
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines.len(), 2, "{table}");
    let [headings, values] = [0, 1].map(|line| lines[line].split_whitespace().collect::<Vec<_>>());
    assert_eq!(headings[..7], ["VM", "GUEST", "AGENT", "CACHE", "USED", "SERVER", "READS"]);
    // No agent reports; the test's own guest writes to the port.
    assert_eq!(values[..4], ["test", "yes", "no", "4M"]);
    assert_eq!(values[5], "connected");

    let json = text(&ask(&machine, "status", &["-o", "json"]));
    let all: Vec<Status> = serde_json::from_str(&json).unwrap();
    let [status] = &all[..] else { panic!("{json}") };
    assert_eq!((status.name.as_str(), status.pid), ("test", machine.program.pid()));
    assert_eq!(status.counters["reads"].to_string(), values[6]);
    let traffic = status.disks[0].traffic;
    assert_eq!((traffic.reads, traffic.writes), (status.counters["reads"], status.counters["writes"]));
    assert!(traffic.reads_from_cache > 0 && traffic.reads_from_cache < traffic.reads, "{traffic:?}");
    assert!(traffic.read_bytes >= 512 * traffic.reads && traffic.written_bytes > 0, "{traffic:?}");
    let figures = &serde_json::from_str::<serde_json::Value>(&json).unwrap()[0]["figures"];
    assert_eq!((&figures["since_start"], &figures["agent"]), (&true.into(), &"not-heard".into()));
    assert!(figures["saved_s"].is_f64(), "{figures}");
    assert_eq!(status.counters["evictions_reported"], machine.pages_sent);
    assert!(status.cache.hit_ratio.unwrap() > 0.0);
    assert!(status.disks[0].attached && status.disks[0].bytes == machine.disks[0].model.bytes.len() as u64);
    assert!(status.latency.read_from_cache.count > 0 && status.latency.read_from_disk.count > 0);

    let full = text(&ask(&machine, "status", &["-v"]));
    for word in [
        "server      unix:",
        " connected\n",
        "cache       on, 4M wanted, 4M granted",
        "disk0: ",
        "attached",
        "helps       the guest waited ",
        "reads needed no disk and took",
        "from the cache, ",
        "without the disk; writes ",
    ] {
        assert!(full.contains(word), "`{word}` is missing in: {full}");
    }
    for name in status.counters.keys() {
        assert!(full.contains(name), "`{name}` is missing in: {full}");
    }
    // Nobody reads the rest, as in `remoca status | head -1`.
    for more in [&[][..], &["-v"], &["-o", "json"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut status = command(REMOCA);
        status.arg("status").arg(machine.control()).args(more).stdout(writer).stderr(std::process::Stdio::piped());
        let output = status.spawn().unwrap().wait_with_output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    }
    let log = machine.program.log();
    for word in [
        "serves the disks of test; its control socket is",
        "disk0: ",
        " (8M) at ",
        "port: at ",
        "a hypervisor is connected",
    ] {
        assert!(log.contains(word), "`{word}` is missing in: {log}");
    }
    machine.finish();
}

#[test]
fn the_status_again_and_again() {
    let (mut server, mut machine) = machine(52);
    machine.run(20);
    forget_slowness(&machine, &mut server);
    let reads = machine.counter("reads");
    let table = text(&ask(&machine, "status", &["-i", "1", "-c", "2"]));
    let lines: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines.len(), 3, "one heading, two lines: {table}");
    assert_eq!(lines[0][..3], ["TIME", "OVER", "VM"]);
    assert!(lines[1..].iter().all(|line| line[0].ends_with('Z') && line[0].len() == 9), "{table}");
    assert_eq!((lines[0][8], lines[1][1]), ("READ/s", "start"), "the first since the start");
    assert_ne!(lines[1][8], "0");
    assert!(lines[2][1].ends_with('s'), "{table}");
    assert_eq!(lines[2][8], "0", "the second of the interval, in which nothing was read");
    let full = text(&ask(&machine, "status", &["-v", "-i", "1", "-c", "2"]));
    let (first, second) = full.split_once("figures of the last ").unwrap();
    let total = |reads: u64| format!("  {:<26} {reads:>12}\n", "reads");
    assert!(first.contains("Z figures since the start\n") && first.contains(&total(reads)), "{full}");
    assert!(second.contains(&total(0)) && second.contains("reads 0 (0/s), 0B (0B/s)"), "{full}");
    // A process that ends meanwhile does not end the watch.
    let control = machine.control().display().to_string();
    let mut watch = command(REMOCA);
    watch.args(["status", &control, "-i", "1"]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut watch = watch.spawn().unwrap();
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines();
    let mut errors = BufReader::new(watch.stderr.take().unwrap()).lines();
    assert!(lines.by_ref().take(2).all(|line| line.is_ok()), "heading and line");
    machine.program.kill();
    assert!(errors.any(|line| line.unwrap().contains("Z: ")), "it says that nobody answers");
    machine.restart();
    assert!(lines.next().is_some(), "it is shown again");
    watch.kill().unwrap();
    watch.wait().unwrap();
    machine.pages_sent = 0;
    forget_slowness(&machine, &mut server);
    let json = text(&ask(&machine, "status", &["-i", "1", "-c", "2", "-o", "json"]));
    assert_eq!(json.lines().count(), 2);
    for line in json.lines() {
        serde_json::from_str::<Vec<Status>>(line).unwrap();
    }
    for (arguments, word) in
        [(&["-i", "0"][..], "0"), (&["-c", "2"], "--interval"), (&["-o", "xml"], "xml"), (&["--sort", "size"], "hits")]
    {
        expect_refusal(&ask(&machine, "status", arguments), USAGE, &[word]);
    }
    machine.finish();
}

#[test]
fn a_size_that_is_set_reaches_the_server() {
    let (server, mut machine) = machine(53);
    machine.run_until_hits(100);
    for (arguments, said, pages) in [
        (&["--cache", "2M"][..], "test: cache 2M, all granted\n", 512),
        (&["--cache", "8M"], "test: cache 8M, all granted\n", 2048),
        (&["--off"], "test: cache off\n", 0),
        (&["--cache", "4M"], "test: cache off: the size is for the next `remoca set test --on`\n", 0),
        (&["--on"], "test: cache 4M, all granted\n", 1024),
        (&["--cache", "6M", "--on"], "test: cache 6M, all granted\n", 1536),
    ] {
        expect_set(&machine.control(), arguments, said);
        wait_until("the server gives or takes", || {
            server.pages_given() == pages && machine.status().cache.granted_bytes == pages * 4096
        });
        let pools = server.status()["pools"].clone();
        assert_eq!(pools[0]["npages"], pages);
        let cell = if pages == 0 { "off".to_owned() } else { format!("{}M", pages / 256) };
        let table = text(&ask(&machine, "status", &[]));
        assert!(table.lines().nth(1).unwrap().split_whitespace().nth(3) == Some(&cell), "{table}");
        if pages > 0 {
            machine.run_until_hits(100);
        }
    }
    machine.finish();
}

#[test]
fn an_unplugged_port_is_noticed_at_once() {
    let (_server, mut machine) = machine(62);
    machine.run(5);
    let mut page = vec![0; 4096];
    page[..8].copy_from_slice(b"REMOCAST");
    page[8..12].copy_from_slice(&1_u32.to_le_bytes());
    machine.send_to_port(0, &page);
    let agent = |machine: &Machine| {
        let table = text(&ask(machine, "status", &[]));
        table.lines().nth(1).unwrap().split_whitespace().nth(2).unwrap().to_owned()
    };
    assert_eq!(agent(&machine), "yes");
    machine.port.disconnect();
    wait_until("the port is seen to be gone", || agent(&machine) == "no");
    let full = text(&ask(&machine, "status", &["-v"]));
    assert!(full.contains("no guest, no report from an agent since the guest attached: 0 captured"), "{full}");
    assert!(machine.program.log().contains("port: its hypervisor has disconnected"), "{}", machine.program.log());
    // The disks notice nothing.
    let reads = machine.counter("reads");
    machine.requests(0);
    assert!(machine.counter("reads") > reads);
}

#[test]
fn the_answer_to_set_says_what_the_server_grants() {
    let (mut server, mut machine) = machine(59);
    machine.run_until_hits(50);
    // The server has 16 MiB, in pieces of 2 MiB.
    let wanted = format!("test: cache 64M, of which 16M are granted: {} has no more to give now\n", server.address);
    wait_until(&wanted, || {
        let (said, has_waited) = set(&machine.control(), &["--cache", "64M"]);
        assert!(has_waited, "less than all is granted: {said}");
        said == wanted
    });
    // It had to wait for a larger index.
    let log = machine.program.log();
    assert!(log.contains("is done: cache 64M, local tier 0B"), "{log}");
    server.program.kill();
    wait_until("the loss is noticed", || !machine.status().server.is_some_and(|server| server.connected));
    wait_until("it says when, and why not now", || {
        let (said, has_waited) = set(&machine.control(), &["--cache", "8M"]);
        assert!(has_waited, "nothing is granted: {said}");
        assert!(said.starts_with("test: cache 8M, granted when there is a connection to unix:"), "{said}");
        said.contains(" cannot be reached: Connection refused")
    });
    machine.finish();
}

#[test]
fn the_memory_server_says_who_has_its_memory() {
    let (server, mut machine) = machine(60);
    machine.run_until_hits(50);
    let socket = machine.folder.path().join("server.ctl");
    let option = format!("--server={}", socket.display());
    let status = |more: &[&str]| run(&[&["status", &option], more].concat());
    let said = text(&status(&[]));
    let lines: Vec<Vec<&str>> = said.lines().map(|line| line.split_whitespace().collect()).collect();
    assert!(said.contains(": 16M not locked, 12M free, at most 16M for one client; 1 client is connected; "), "{said}");
    assert_eq!(lines[1][..5], ["CLIENT", "POOL", "HERE", "SIZE", "USED"]);
    let client = lines[2].iter().position(|word| *word == "yes").unwrap();
    assert_eq!(lines[2][client + 1], "4M", "{said}");
    assert_eq!((lines[3][0], lines[3][1]), ("TOTAL", "4M"), "{said}");
    let gets = server.status()["totals"]["gets"].to_string();
    assert_eq!(lines[3][3], gets, "{said}");
    let rates = text(&status(&["-i", "1", "-c", "2"]));
    assert!(rates.contains("; per second since its start\n") && rates.contains("; per second in the last "), "{rates}");
    let json: serde_json::Value = serde_json::from_str(&text(&status(&["-o", "json"]))).unwrap();
    assert_eq!((&json["pages"], &json["totals"]["gets"].to_string()), (&4096.into(), &gets));
    machine.finish();
    expect_refusal(
        &run(&["status", "--server=/no/such"]),
        FAILURE,
        &["no memory server answers at /no/such", "needs --control PATH"],
    );
    // The control socket of a VM process is no memory server's.
    expect_refusal(&run(&["status", "--server", "vm"]), USAGE, &["cannot be used with"]);
}

/// What keeps an operator from a socket is said, with who may open it.
#[test]
fn another_user_is_told_who_may() {
    if !is_root("needs root to run programs as another user") {
        return;
    }
    let (_server, mut machine) = machine(61);
    machine.run(1);
    let folder = machine.folder.path();
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755)).unwrap();
    let program = folder.join("remoca");
    install(Path::new(REMOCA), &program);
    for arguments in [&["status"][..], &["set", "--off"], &["upgrade"]] {
        use std::os::unix::process::CommandExt;
        let mut command = command(&program);
        command.args(arguments).arg(machine.control()).uid(NOBODY).gid(NOBODY).env_remove("XDG_RUNTIME_DIR");
        let words = ["is not open to you: only root may reach it", "Run the command with sudo"];
        expect_refusal(&run_command(&mut command), FAILURE, &words[..]);
    }
    machine.finish();
}

/// Nobody is sent to an option that the command does not have.
#[test]
fn a_user_without_a_runtime_directory_is_told_what_the_command_has() {
    use std::os::unix::process::CommandExt;
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let program = folder.path().join("remoca");
    install(Path::new(REMOCA), &program);
    let (path, option) = ("give the path of the control socket in place of the name", "give --control PATH");
    for (arguments, instead) in [
        (&["check", "web1"][..], path),
        (&["set", "web1", "--off"], path),
        (&["upgrade", "web1"], path),
        (&["curve", "web1"], path),
        (&["support", "web1"], path),
        (&["status", "web1"], path),
        (&["xml", "web1"], path),
        (&["forget", "web1"], option),
        (&["disk", "--name", "web1", "--image", "/image", "--socket", "/socket"], option),
        (&["host", "status"], "give --sockets FOLDER"),
    ] {
        let mut command = command(&program);
        command.args(arguments).env_remove("XDG_RUNTIME_DIR");
        if rustix::process::geteuid().is_root() {
            command.uid(NOBODY).gid(NOBODY);
        }
        expect_refusal(&run_command(&mut command), FAILURE, &["$XDG_RUNTIME_DIR is not set", instead]);
    }
}

#[test]
fn a_cache_whose_index_has_no_memory_is_refused_once_and_exactly() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    std::fs::write(path("image"), vec![0; 4096]).unwrap();
    let [image, socket, control, server] = ["image", "socket", "control", "server"].map(path);
    let server = format!("unix:{server}");
    let disk =
        ["disk", "--image", &image, "--socket", &socket, "--control", &control, "--server", &server, "--cache", "4T"];
    for named in [&[][..], &["--name", "big"]] {
        let refused = run_command(command("prlimit").args([ADDRESSES, REMOCA]).args(disk).args(named));
        expect_refusal(&refused, FAILURE, &["there is no memory for the index of this cache: ", "smaller --cache"]);
        let said = String::from_utf8_lossy(&refused.stderr);
        assert_eq!(said.lines().count(), 1, "{said}");
    }
}

#[test]
fn changes_that_are_refused_change_nothing() {
    let (server, mut machine) = machine(54);
    machine.run_until_hits(100);
    let limited = run_command(command("prlimit").arg(format!("--pid={}", machine.program.pid())).arg(ADDRESSES));
    assert!(limited.status.success(), "{limited:?}");
    for (arguments, code, words) in [
        (
            &[][..],
            FAILURE,
            "nothing to change: give --cache SIZE, --local SIZE, --on, --off, --server ADDRESS, --clear-failed-flush DISK or --clear-removed-flushes",
        ),
        (&["--cache", "0"], FAILURE, "a cache of 0 bytes"),
        (&["--cache", "5000"], FAILURE, "a cache of 5000 bytes"),
        (&["--cache", "5T"], FAILURE, "4 TiB is the limit"),
        (&["--cache", "4T"], FAILURE, "there is no memory for an index of that size: "),
        (&["--cache", "much"], USAGE, "`much` is not a size"),
        (&["--on", "--off"], USAGE, "cannot be used with"),
    ] {
        expect_refusal(&ask(&machine, "set", arguments), code, &[words]);
    }
    assert_eq!(machine.status().cache.wanted_bytes, 4 << 20);
    assert_eq!(server.pages_given(), 1024);
    machine.run_until_hits(100);
    machine.finish();
}

#[test]
fn processes_that_are_not_there() {
    let (_server, mut machine) = machine(55);
    machine.run(1);
    machine.program.kill();
    let control = machine.control();
    assert!(control.exists(), "a killed process leaves its socket");
    let words = [control.to_str().unwrap(), "no VM process answers", "is `remoca disk` running"];
    expect_refusal(&ask(&machine, "status", &[]), FAILURE, &words);
    expect_refusal(&ask(&machine, "set", &["--off"]), FAILURE, &words);
    expect_refusal(&run(&["status", "/no/such/socket"]), FAILURE, &["/no/such/socket", "no VM process answers"]);
    expect_refusal(&run(&["set", "no-such-vm", "--off"]), FAILURE, &["no-such-vm.ctl", "no VM process answers"]);
    // A listener that accepts commands and answers nonsense.
    let silent = std::os::unix::net::UnixListener::bind(machine.folder.path().join("silent")).unwrap();
    let answering = std::thread::spawn(move || {
        let (mut stream, _) = silent.accept().unwrap();
        let _ = stream.write_all(b"hello\n");
    });
    let path = machine.folder.path().join("silent");
    let words = ["the answer of the VM process at", "makes no sense"];
    expect_refusal(&run(&["status", path.to_str().unwrap()]), FAILURE, &words);
    answering.join().unwrap();
}

#[test]
fn a_process_that_does_not_answer() {
    let (_server, machine) = machine(58);
    machine.program.signal(Signal::STOP);
    expect_refusal(
        &ask(&machine, "status", &[]),
        FAILURE,
        &["in time: it hangs, or has too much to do", "it did not answer within 10 seconds"],
    );
    machine.program.signal(Signal::CONT);
    machine.finish();
}

/// A service manager is notified when hypervisors and clients can connect, and not before.
#[test]
fn readiness_is_announced() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    std::fs::write(path("image"), vec![0; 4096]).unwrap();
    let [image, socket, control] = ["image", "socket", "control"].map(path);
    let listen = format!("unix:{}", path("server"));
    let disk = ["disk", "--image", &image, "--socket", &socket, "--control", &control];
    let serve = ["serve", "--no-lock", "--memory", "2M", "--listen", &listen];
    for (arguments, socket) in [(&disk[..], path("socket")), (&serve, path("server"))] {
        let notices = UnixDatagram::bind(path("notices")).unwrap();
        notices.set_read_timeout(Some(PATIENCE)).unwrap();
        let log = folder.path().join("log");
        let mut command = command(REMOCA);
        let mut program = Program::start(command.args(arguments).env("NOTIFY_SOCKET", path("notices")), &log);
        let mut notice = [0; 64];
        let mut count = notices.recv(&mut notice).unwrap();
        if notice.starts_with(b"EXTEND_TIMEOUT_USEC=") {
            count = notices.recv(&mut notice).unwrap();
        }
        assert!(notice[..count].starts_with(b"READY=1"), "{:?}", &notice[..count]);
        UnixStream::connect(socket).unwrap();
        program.terminate();
        std::fs::remove_file(path("notices")).unwrap();
    }
}

#[test]
fn every_request_is_in_the_trace() {
    let folder = tempfile::tempdir().unwrap();
    let server = Serve::start(folder.path(), "16M");
    let trace = folder.path().join("trace");
    let arguments = vec!["--trace".into(), trace.display().to_string()];
    let server = Some(server.address.clone());
    let mut machine = Machine::start(Setup { server, hedges: true, arguments, ..Setup::default() });
    machine.run_until_hits(100);
    let status = machine.status();
    machine.finish();
    let records = parse_trace(&std::fs::read(&trace).unwrap()).unwrap().records;
    let (evictions, records): (Vec<_>, Vec<_>) = records.into_iter().partition(|record| record.op == TracedOp::Evicted);
    let known = ["admitted", "duplicate", "dropped", "passed_over"];
    let known: u64 = known.iter().map(|outcome| status.counters[&*format!("evictions_{outcome}")]).sum();
    // A page that is still cached may outlive its block, which was written since. Sent again, it is a duplicate without a block to record.
    let (recorded, duplicates) = (evictions.len() as u64, status.counters["evictions_duplicate"]);
    assert!(recorded <= known && recorded + duplicates >= known, "{recorded} of {known}, {duplicates} duplicates");
    let count = |op| records.iter().filter(|record| record.op == op).count() as u64;
    assert_eq!(count(TracedOp::Read), status.counters["reads"]);
    assert_eq!(count(TracedOp::Write), status.counters["writes"]);
    assert_eq!(count(TracedOp::Flush), status.counters["flushes"] + 1, "and the one at the end");
    assert_eq!(count(TracedOp::Discard) + count(TracedOp::WriteZeroes), status.counters["discards"]);
    let from_cache = records.iter().filter(|record| record.source == TracedSource::Cache).count() as u64;
    assert_eq!(from_cache, status.counters["reads_from_cache"]);
    assert!(
        records.windows(2).all(|pair| pair[0].issued_ns + pair[0].latency_ns <= pair[1].issued_ns + pair[1].latency_ns)
    );
}

/// A user's sockets are in the directory of the user's session. The socket of a dead process does not hide the
/// others.
#[test]
fn all_processes_of_a_user() {
    if !rustix::process::geteuid().is_root() {
        return all_processes_at(&mut || command(REMOCA));
    }
    // Runs as another user, who may have no access to the build directory. Root's directory belongs to the host, not
    // to tests.
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let program = folder.path().join("remoca");
    install(Path::new(REMOCA), &program);
    all_processes_at(&mut || {
        use std::os::unix::process::CommandExt;
        let mut command = command(&program);
        command.uid(NOBODY).gid(NOBODY);
        command
    });
}

fn all_processes_at(remoca: &mut dyn FnMut() -> std::process::Command) {
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let path = |name: &str| folder.path().join(name);
    let mut command = |arguments: &[&str]| {
        let mut command = remoca();
        command.env("XDG_RUNTIME_DIR", folder.path()).args(arguments);
        command
    };
    let said = run_command(&mut command(&["status"]));
    expect_refusal(&said, FAILURE, &["no VM process runs here"]);
    let empty = path("no-configuration").display().to_string();
    std::fs::create_dir(&empty).unwrap();
    // VMs of others, and what this user cannot see, are no empty host.
    let others = String::from_utf8_lossy(&said.stderr);
    if !others.contains(" may reach") && !others.contains("is not open to you") {
        assert_eq!(text(&run_command(&mut command(&["status", "-o", "json"]))), "[]\n");
        let upgraded = run_command(&mut command(&["upgrade", "--all"]));
        assert_eq!(text(&upgraded), "there is no VM on this host to upgrade\n");
        assert_eq!(text(&run_command(&mut command(&["check", "--config", &empty, "-o", "json"]))), "[]\n");
        let check = text(&run_command(&mut command(&["check", "--config", &empty])));
        assert_eq!(check, "ok       there is no VM on this host\n");
        std::fs::create_dir(path("no-configuration/vms")).unwrap();
        let file = "version = 1\n[[disk]]\nname = 'a'\nimage = '/a'\nsocket = '/s'\nformat = 'raw'\n";
        std::fs::write(path("no-configuration/vms/web9.toml"), file).unwrap();
        let check = run_command(&mut command(&["check", "--config", &empty]));
        expect_refusal(&check, FAILURE, &["these are configured: web9"]);
    }
    let text_of = |name: &str| path(name).display().to_string();
    let mut programs: Vec<_> = ["web", "mail"]
        .into_iter()
        .map(|name| {
            let [image, socket] = ["image", "socket"].map(|kind| path(&format!("{name}.{kind}")));
            std::fs::write(&image, vec![0; 4096]).unwrap();
            std::fs::set_permissions(&image, std::fs::Permissions::from_mode(0o666)).unwrap();
            let [image, socket] = [image.to_str().unwrap(), socket.to_str().unwrap()];
            let arguments = ["disk", "--name", name, "--image", image, "--socket", socket];
            Program::start(&mut command(&arguments), &path(&format!("{name}.log")))
        })
        .collect();
    let control = |name: &str| path("remoca").join(format!("{name}.ctl"));
    for (program, name) in programs.iter_mut().zip(["web", "mail"]) {
        wait_until("the VM process answers", || {
            assert!(program.is_running(), "{}", program.log());
            UnixStream::connect(control(name)).is_ok()
        });
    }
    let names = |output: &Output| {
        let table = text(output);
        table.lines().skip(1).map(|line| line.split_whitespace().next().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(names(&run_command(&mut command(&["status"]))), ["mail", "web", "TOTAL"]);
    assert_eq!(names(&run_command(&mut command(&["status", "--sort", "saved"]))), ["mail", "web", "TOTAL"]);
    assert_eq!(names(&run_command(&mut command(&["status", "web"]))), ["web"]);
    // One after the other; the first failure stops the rest.
    let said = text(&run_command(&mut command(&["upgrade", "--all"])));
    let [mail, web] = [1, 0].map(|number| format!("process {} runs version ", programs[number].pid()));
    assert!(said.starts_with(&format!("mail: {mail}")) && said.contains(&format!("\nweb: {web}")), "{said}");
    assert!(said.ends_with("\n2 of 2 upgraded: mail, web\n"), "{said}");
    let failed = run_command(&mut command(&["upgrade", "--all", "--program", "/bin/false"]));
    let words = ["the upgrade of mail failed. Done before it: none. Not begun: web", "goes on as before"];
    expect_refusal(&failed, FAILURE, &words);
    assert_eq!(["mail", "web"].map(|name| status(&control(name)).upgrades), [1, 1]);
    expect_refusal(&run_command(&mut command(&["upgrade", "--all", "web"])), USAGE, &["cannot be used with"]);
    // One that waits for its disks is not upgraded, and stops nothing.
    let key = path("key").display().to_string();
    assert!(run_command(&mut command(&["migrate", "--new-key", &key])).status.success());
    let (disk, incoming) =
        (format!("image={},socket={}", text_of("web.image"), text_of("new")), format!("unix:{}", text_of("in")));
    let arguments = ["disk", "--name", "new", "--disk", &disk, "--incoming", &incoming, "--incoming-key", &key];
    let mut waiting = Program::start(&mut command(&arguments), &path("new.log"));
    wait_until("the waiting process answers", || {
        assert!(waiting.is_running(), "{}", waiting.log());
        UnixStream::connect(control("new")).is_ok()
    });
    let said = text(&run_command(&mut command(&["upgrade", "--all"])));
    let passed = "\n2 of 3 upgraded: mail, web. Not upgraded, as their disks are not here: new (a restart upgrades one that waits for them)\n";
    assert!(said.ends_with(passed), "{said}");
    waiting.terminate();
    programs[0].kill();
    let said = text(&run_command(&mut command(&["upgrade", "--all"])));
    assert!(said.ends_with("\n1 of 2 upgraded: mail. No process answers for web\n"), "{said}");
    let shown = run_command(&mut command(&["status"]));
    assert_eq!(names(&shown), ["mail"]);
    assert!(String::from_utf8_lossy(&shown.stderr).contains("web.ctl"), "{shown:?}");
    programs[1].terminate();
    // A program that reads the list must not take this for a host without VMs.
    let silent = run_command(&mut command(&["status", "-o", "json"]));
    assert_eq!((silent.status.code(), &silent.stdout[..]), (Some(FAILURE), &b"[]\n"[..]), "{silent:?}");
    assert!(String::from_utf8_lossy(&silent.stderr).contains("the only VM process does not answer"), "{silent:?}");
    let none = run_command(&mut command(&["upgrade", "--all"]));
    expect_refusal(&none, FAILURE, &["no VM process runs here. No process answers for web"]);
}

#[test]
fn commands_that_are_none() {
    let (_server, mut machine) = machine(56);
    machine.run_until_hits(50);
    let control = machine.control();
    let huge = [&b"{\"op\":\"status\""[..], &[b' '; 100_000], b"}\n"].concat();
    let deep = [b'['; 4000];
    let bad: [&[u8]; 11] = [
        b"\n",
        b"hello\n",
        b"\xff\xfe\x00\n",
        b"{\"op\":\"explode\"}\n",
        b"{\"op\":\"set\",\"colour\":\"red\"}\n",
        b"{\"op\":\"set\",\"cache_bytes\":-1}\n",
        b"{\"op\":\"set\",\"cache_bytes\":1e30}\n",
        b"{\"op\":\"set\",\"cache_bytes\":\"much\"}\n",
        b"[{\"op\":\"status\"}]\n",
        &huge,
        &deep,
    ];
    for command in bad {
        // The end of the stream ends a line as well.
        let mut stream = UnixStream::connect(&control).unwrap();
        let _ = stream.write_all(command);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        let answer = String::from_utf8(answer).unwrap();
        assert!(answer.contains("\"error\"") && answer.ends_with('\n'), "{answer}");
        assert!(answer.contains("this is no command"), "{answer}");
    }
    assert_eq!(machine.status().cache.wanted_bytes, 4 << 20);
    let mode = std::fs::metadata(&control).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode, 0o600, "only the owner controls");
    machine.finish();
}

#[test]
fn clients_that_say_nothing_hold_up_nobody() {
    let (_server, mut machine) = machine(57);
    machine.run(5);
    let control = machine.control();
    let mut attempts = 0;
    let mut silent = loop {
        attempts += 1;
        let begun = Instant::now();
        let mut silent: Vec<UnixStream> = Vec::new();
        for number in 0..CLIENTS_MAX - 1 {
            let mut stream = UnixStream::connect(&control).unwrap();
            if number % 2 == 0 {
                stream.write_all(b"{\"op\":\"sta").unwrap();
            }
            silent.push(stream);
        }
        for _ in 0..10 {
            wait_until("a place is left", || ask_raw(&control, b"{\"op\":\"status\"}\n").contains("\"pid\""));
        }
        // All places are taken: the next client is told so at once, and the disk continues.
        silent.push(UnixStream::connect(&control).unwrap());
        let answer = ask_raw(&control, b"{\"op\":\"status\"}\n");
        let refused = run_command(command(REMOCA).arg("status").arg(&control));
        // This test may itself be so slow that the first ones have lost their places.
        if begun.elapsed() < SILENT_TIME_MAX {
            assert!(answer.contains("16 others are being served: try again"), "{answer}");
            expect_refusal(&refused, FAILURE, &["16 others are being served"]);
            break silent;
        }
        assert!(attempts < 10, "clients that say nothing hold up others: {answer}");
        drop(silent);
        // Until their places are free.
        std::thread::sleep(Duration::from_secs(1));
    };
    machine.run(20);
    // Places become free when clients leave, and also when clients stay silent for long.
    silent.pop();
    wait_until("a place is free", || ask_raw(&control, b"{\"op\":\"status\"}\n").contains("\"pid\""));
    silent.push(UnixStream::connect(&control).unwrap());
    wait_until("patience ends", || ask_raw(&control, b"{\"op\":\"status\"}\n").contains("\"pid\""));
    drop(silent);
    machine.finish();
}
