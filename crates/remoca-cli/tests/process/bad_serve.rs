//! What `remoca serve` refuses, and in which words. The rules themselves are tested in `remoca-server`. These tests
//! check that refusals reach the command line with an exit code.

use super::support::program::{Program, REMOCA, Serve, command, expect_refusal, run, run_command};
use super::support::wait_until;
use std::fs;
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;

const USAGE: i32 = 2;
const FAILURE: i32 = 1;
const CONFIGURATION: i32 = 78;

#[track_caller]
fn expect(arguments: &[&str], code: i32, words: &[&str]) {
    expect_refusal(&run(&[&["serve"], arguments].concat()), code, words);
}

#[test]
fn sizes() {
    let folder = tempfile::tempdir().unwrap();
    let address = format!("unix:{}", folder.path().join("server").display());
    let with = |memory: &'static str| ["--listen", &address, "--memory", memory];
    expect(&with("0"), CONFIGURATION, &["the memory to serve is 0", "--memory 2G"]);
    expect(&with("3M"), CONFIGURATION, &["3145728 is not a multiple of 2 MiB"]);
    expect(&with("64"), CONFIGURATION, &["64 is not a multiple of 2 MiB"]);
    expect(&with("4T"), FAILURE, &["--memory 4 TiB", "available"]);
    for size in ["lots", "2.5G"] {
        expect(&with(size), USAGE, &["--memory"]);
    }
    expect(&with("-2M"), USAGE, &["unexpected argument '-2'"]);
    let quota = |quota: &'static str| [&with("4M")[..], &["--quota", quota]].concat();
    expect(&quota("0"), CONFIGURATION, &["--quota is 0"]);
    expect(&quota("8M"), CONFIGURATION, &["--quota 8 MiB is more than --memory 4 MiB"]);
    expect(&[&with("4M")[..], &["--threads", "0"]].concat(), CONFIGURATION, &["--threads 0"]);
    for clients in ["0", "18446744073709551615"] {
        expect(
            &[&with("4M")[..], &["--max-clients", clients]].concat(),
            CONFIGURATION,
            &["--max-clients", "1 to 65536"],
        );
    }
    expect(&[&with("4M")[..], &["--grace", "soon"]].concat(), USAGE, &["`soon` is not a time"]);
    expect(&["--memory", "4M"], CONFIGURATION, &["--listen"]);
    expect(&["--listen", &address], CONFIGURATION, &["--memory"]);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left behind");
}

#[test]
fn addresses() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let expect_at = |address: &str, code, words: &[&str]| expect(&["--memory", "2M", "--listen", address], code, words);
    for address in ["", "127.0.0.1:7", "tcp:7", "tcp::7", "tcp:host:99999", "unix:"] {
        expect_at(address, USAGE, &["--listen"]);
    }
    let port = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = format!("tcp:{}", port.local_addr().unwrap());
    expect_at(&taken, FAILURE, &[&taken, "another program has this port"]);
    expect_at("tcp:192.0.2.1:7070", FAILURE, &["this host has no such address"]);
    let unix = |name: &str| format!("unix:{}", path(name).display());
    expect_at(&unix(&"x".repeat(120)), CONFIGURATION, &["at most 107 bytes"]);
    expect_at(&unix("no/such/socket"), CONFIGURATION, &["the folder does not exist"]);
    fs::write(path("file"), "precious").unwrap();
    expect_at(&unix("file"), CONFIGURATION, &["not a socket"]);
    assert_eq!(fs::read(path("file")).unwrap(), b"precious");
    let _living = UnixListener::bind(path("taken")).unwrap();
    expect_at(&unix("taken"), FAILURE, &["another process listens there"]);
    let control = path("taken").display().to_string();
    expect(
        &["--memory", "2M", "--listen", &unix("server"), "--control", &control],
        FAILURE,
        &["taken", "another process listens there"],
    );
    assert!(!path("server").exists(), "nothing is left behind");
}

/// Drops the right to lock any amount of memory, which root has.
#[test]
fn memory_that_may_not_be_locked() {
    let folder = tempfile::tempdir().unwrap();
    let address = format!("unix:{}", folder.path().join("server").display());
    let limited = || {
        let mut command = command(REMOCA);
        command.args(["serve", "--memory", "8M", "--listen", &address]);
        // SAFETY: both are system calls, allowed between fork and exec; they read one structure of ours.
        unsafe {
            command.pre_exec(|| {
                let limit = libc::rlimit { rlim_cur: 1 << 20, rlim_max: 1 << 20 };
                let limited = libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit);
                // Fails for a process without capabilities, which does not matter.
                const CAP_IPC_LOCK: libc::c_ulong = 14;
                libc::prctl(libc::PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0);
                if limited == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
            });
        }
        command
    };
    let words = ["8 MiB", "RLIMIT_MEMLOCK", "is 1 MiB", "ulimit -l unlimited", "LimitMEMLOCK=infinity", "--no-lock"];
    expect_refusal(&run_command(&mut limited()), CONFIGURATION, &words);
    // With `--no-lock`, the server starts.
    let mut program = Program::start(limited().arg("--no-lock"), &folder.path().join("log"));
    wait_until("the server listens", || {
        assert!(program.is_running(), "{}", program.log());
        program.log().contains("listening on ")
    });
    program.terminate();
}

#[test]
fn a_server_ends_in_good_order() {
    let folder = tempfile::tempdir().unwrap();
    let mut server = Serve::start(folder.path(), "2M");
    assert!(folder.path().join("server").exists() && folder.path().join("server.ctl").exists());
    server.program.terminate();
    assert!(!folder.path().join("server").exists() && !folder.path().join("server.ctl").exists());
}
