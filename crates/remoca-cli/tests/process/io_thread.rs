//! The system calls of the I/O thread, compared with a list that says for each why it does not wait for others.

use super::support::machine::{Machine, Setup};
use super::support::program::{Program, REMOCA, Serve, command, run, run_command, status};
use super::support::syscalls::{self, Tracer};
use super::support::{folder, wait_until};
use remoca_io::control;
use remoca_protocol::control::{Command, Reply};
use std::collections::BTreeSet;
use std::os::unix::net::UnixStream;

/// Calls that the I/O thread may make, and why none of them waits for a file system, a device, a peer or another
/// program. Decision 0025 says the same by parts of the program.
const ALLOWED: &[(&str, &str)] = &[
    // The thread exists to wait for events. It looks at those of a device or of clients without waiting.
    ("epoll_pwait2 eventpoll", "waits for events, with the next deadline in a timer"),
    ("epoll_ctl eventpoll", "changes a table of the kernel"),
    ("timerfd_settime timerfd", "sets a timer"),
    // Peers: every socket is nonblocking, or the call says that it does not wait.
    ("read socket", "a nonblocking socket: a memory server, an NBD server or a client of an export"),
    ("readv socket", "the same, into several buffers"),
    ("write socket", "the same; what a peer does not take stays in a bounded queue"),
    ("writev socket", "the same, from several buffers"),
    ("sendmsg socket", "the same"),
    ("sendto socket", "the same: a few bytes, MSG_DONTWAIT or nonblocking"),
    ("accept4 socket", "a nonblocking listener that is ready"),
    ("fstat file memory", "the blocks of the guest's memory, for a status: a file in memory has them at hand"),
    ("socket", "makes a socket for an NBD server that is tried again"),
    ("connect socket", "of a nonblocking socket: what comes of it is an event"),
    ("setsockopt socket", "changes a socket of this process"),
    ("close socket", "without SO_LINGER nothing is waited for"),
    ("getsockopt socket", "what came of a `connect`"),
    // Signals between threads of this process, and to and from a guest's front end.
    ("read eventfd", "nonblocking, those of a front end too (`signal::received`)"),
    ("write eventfd", "nonblocking: a full counter is a signal already"),
    ("eventfd2", "makes one, for a new answer or queue"),
    ("close eventfd", "nobody waits for the last one to close it"),
    // Images: only by the ring, or by threads of the store.
    (
        "io_uring_enter io_uring",
        "submits reads and writes with RWF_NOWAIT: what would wait is refused, and made by a thread",
    ),
    // Memory of this process.
    ("brk", "memory of this process"),
    ("mmap nothing", "memory of this process: buffers, stacks of threads"),
    ("mprotect", "memory of this process: stacks of threads"),
    (
        "munmap",
        "memory of this process, or of a guest that has gone: who has it last waits until it is freed (decision 0025)",
    ),
    ("madvise", "memory of this process: buffers that are not used"),
    ("mremap", "memory of this process"),
    ("pread64 file of its times", "counters of the kernel (`/proc/thread-self/schedstat`), at most once in 10 ms"),
    // Threads: work that may wait is done there.
    ("clone3", "starts a thread that connects, says goodbye, makes an index or frees one"),
    ("rt_sigprocmask", "around the start of a thread"),
    ("futex", "wakes a thread of this process"),
    ("futex, waiting", "for a lock of this process, held for some instructions and never across a call that waits"),
    ("sched_yield", "gives way to a thread that holds such a lock"),
    ("recvfrom socket", "looks whether an NBD client that closes its side says goodbye"),
    ("getpid", "for the status"),
    ("readlink file /proc/self/exe", "for the status: the kernel has the name in memory"),
    ("getrandom", "names and jitter: the kernel's generator has long begun"),
    // The log and the state file.
    ("ppoll", "looks at once whether the log has room"),
    ("write file disk.log", "a log in a file is written as files are: the operator's choice (decision 0025)"),
    ("statx file test.state.new", "in a file system in memory: is the new state file still where it was made?"),
    ("rename file test.state.new", "in a file system in memory: the larger state file takes the place of the old one"),
    ("close file test.state", "the old one, whose memory another thread frees"),
    // The curves are kept in a file beside the state file at an upgrade, in a file system in memory.
    ("open file test.state.curves.new", "makes the file of the curves, at most 2 MB"),
    ("write file test.state.curves.new", "writes it"),
    ("fcntl F_GETFD file test.state.curves.new", "the same"),
    ("close file test.state.curves.new", "the same"),
    ("rename file test.state.curves.new", "takes the place of the former one"),
    ("unlink file test.state.curves.new", "removes one that was left half written"),
    ("open file vm.state.curves.new", "makes the file of the curves, at most 2 MB"),
    ("write file vm.state.curves.new", "writes it"),
    ("fcntl F_GETFD file vm.state.curves.new", "the same"),
    ("close file vm.state.curves.new", "the same"),
    ("rename file vm.state.curves.new", "takes the place of the former one"),
    ("unlink file vm.state.curves.new", "removes one that was left half written"),
    // An upgrade: descriptors are copied, and described in memory.
    ("fcntl F_DUPFD_CLOEXEC socket", "copies a descriptor"),
    ("fcntl F_DUPFD_CLOEXEC eventfd", "copies a descriptor"),
    ("fcntl F_DUPFD_CLOEXEC file image", "copies a descriptor"),
    ("fcntl F_DUPFD_CLOEXEC file test.state", "copies a descriptor"),
    ("fcntl F_DUPFD_CLOEXEC file vm.state", "copies a descriptor"),
    ("fcntl F_DUPFD_CLOEXEC file memory", "copies a descriptor"),
    ("fcntl F_SETFD socket", "lets the new program have the copy"),
    ("fcntl F_SETFD eventfd", "lets the new program have the copy"),
    ("fcntl F_SETFD file image", "lets the new program have the copy"),
    ("fcntl F_SETFD file test.state", "lets the new program have the copy"),
    ("fcntl F_SETFD file vm.state", "lets the new program have the copy"),
    ("fcntl F_SETFD file memory", "lets the new program have the copy"),
    ("fcntl F_GETFD socket", "looks at a flag of a descriptor"),
    ("fcntl F_GETFD eventfd", "looks at a flag of a descriptor"),
    ("fcntl F_GETFD file memory", "looks at a flag of a descriptor"),
    ("fcntl F_GETFD file test.state", "looks at a flag of a descriptor"),
    ("fcntl F_ADD_SEALS file memory", "the description of the upgrade, in memory"),
    ("memfd_create", "the same"),
    ("write file memory", "the same"),
    ("close file memory", "the same, or a part of a guest's memory"),
    (
        "execve file remoca",
        "becomes the new program; before it nothing of a store is in the kernel (`HandOver::is_still`)",
    ),
];

/// Runs as the tracer if this program was started as one; otherwise passes at once.
#[test]
fn tracer_process() {
    syscalls::be_tracer();
}

#[track_caller]
fn expect_listed(seen: &BTreeSet<String>) {
    let is_listed = |call: &String| ALLOWED.iter().any(|(allowed, _)| allowed == call);
    let unlisted: Vec<_> = seen.iter().filter(|call| !is_listed(call)).collect();
    assert_eq!(unlisted, Vec::<&String>::new(), "system calls of the I/O thread that are not in the list");
    for call in ["epoll_pwait2 eventpoll", "read eventfd", "execve file remoca"] {
        assert!(seen.contains(call), "the tracer missed {call}");
    }
}

#[track_caller]
fn expect_only_allowed(setup: Setup) {
    let folder = folder();
    let mut server = Serve::start(folder.path(), "16M");
    let setup = Setup { server: Some(server.address.clone()), sectors: vec![512, 4096], ..setup };
    let is_nbd = setup.nbd;
    let mut machine = Machine::start_in(folder, setup);
    let tracer = Tracer::start(machine.program.pid(), machine.folder.path());
    machine.run_until_hits(50);
    for change in ["\"cache_bytes\":1048576", "\"cache_bytes\":33554432", "\"enabled\":false", "\"enabled\":true"] {
        machine.set(change);
        machine.run_until_hits(if change.contains("false") { 0 } else { 20 });
    }
    server.program.kill();
    machine.run_until("the loss is noticed", |machine| !machine.status().server.unwrap().connected);
    server.restart();
    machine.run_until_hits(20);
    machine.disks[0].guest.set_writeback(false).unwrap();
    machine.run(5);
    machine.settle();
    machine.disks[0].guest.disconnect();
    let socket = machine.disks[0].socket.clone();
    machine.disks[0].guest.connect(&socket).unwrap();
    machine.disks[0].guest.set_writeback(true).unwrap();
    if is_nbd {
        let nbd = machine.disks[0].nbd.as_mut().unwrap();
        nbd.program.kill();
        nbd.restart();
        machine.run(10);
    }
    machine.outlives = true;
    match control::call(&machine.control(), Command::Upgrade { program: None }).unwrap() {
        Reply::Status(status) => assert_eq!(status.upgrades, 1),
        Reply::Curve(_) => panic!("it is no status"),
        Reply::Error { error } => panic!("{error}"),
    }
    machine.run(20);
    machine.pages_sent = machine.counter("evictions_reported");
    machine.run_until_hits(20);
    let seen = tracer.end(|| drop(machine.status()));
    expect_listed(&seen);
    let is_counted = std::path::Path::new("/proc/thread-self/schedstat").exists();
    assert_eq!(
        seen.contains("pread64 file of its times"),
        is_counted,
        "it has to know whether its processor is crowded"
    );
    machine.finish();
}

#[test]
fn with_a_ring() {
    expect_only_allowed(Setup { seed: 101, ..Setup::default() });
}

#[test]
fn with_threads() {
    expect_only_allowed(Setup { seed: 102, arguments: vec!["--no-io-uring".into()], ..Setup::default() });
}

#[test]
fn with_nbd_images() {
    let arguments = ["--nbd-settle", "0"].map(String::from).to_vec();
    expect_only_allowed(Setup { seed: 103, nbd: true, arguments, ..Setup::default() });
}

#[test]
fn with_nbd_clients() {
    let folder = folder();
    let path = |name: &str| folder.path().join(name);
    let server = Serve::start(folder.path(), "16M");
    std::fs::write(path("image"), vec![7; 1 << 20]).unwrap();
    let mut disk = command(REMOCA);
    disk.args(["disk", "--name", "vm", "--server", &server.address, "--disk"]);
    disk.arg(format!("name=root,image={}", path("image").display()));
    disk.arg("--nbd").arg(format!("unix:{}", path("nbd").display())).arg("--control").arg(path("control"));
    let mut program = Program::start(&mut disk, &path("disk.log"));
    wait_until("the VM process answers", || UnixStream::connect(path("control")).is_ok());
    wait_until("its server is there", || status(&path("control")).server.is_some_and(|server| server.connected));
    let tracer = Tracer::start(program.pid(), folder.path());
    let script = format!(
        "
for round in range(3):
    h = nbd.NBD()
    h.connect_uri('nbd+unix:///root?socket={socket}')
    for at in range(0, 1 << 20, 1 << 16):
        assert h.pread(1 << 16, at) == bytes([7]) * (1 << 16)
    h.pwrite(bytes([7]) * 4096, 0, nbd.CMD_FLAG_FUA)
    h.pwrite(bytes([7]) * 4096, 8192)
    h.flush()
    h.zero(4096, 4096)
    h.trim(4096, 4096)
    h.pwrite(bytes([7]) * 4096, 4096)
    if round == 1:
        h.shutdown()
",
        socket = path("nbd").display()
    );
    for _ in 0..2 {
        let client = run_command(command("nbdsh").args(["-c", &script]).env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"));
        assert!(client.status.success(), "{}", String::from_utf8_lossy(&client.stderr));
        let said = run(&["upgrade", path("control").to_str().unwrap()]);
        assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    }
    expect_listed(&tracer.end(|| drop(status(&path("control")))));
    program.terminate();
}
