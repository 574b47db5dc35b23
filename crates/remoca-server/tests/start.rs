//! Starting and stopping: what is refused, in which words, and what is left behind.

mod common;

use std::fs;
use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use common::{Client, config, start, token};
use remoca_server::{Config, ListenAddress, PageLocking, Server};

#[track_caller]
fn refusal(config: Config) -> String {
    Server::start(config).expect_err("this must be refused").to_string()
}

#[track_caller]
fn expect_words(refusal: &str, words: &[&str]) {
    for word in words {
        assert!(refusal.contains(word), "`{word}` is missing in: {refusal}");
    }
}

fn on_unix(path: &Path) -> Config {
    Config { listen: vec![ListenAddress::Unix(path.to_owned())], ..config() }
}

#[test]
fn sizes_that_make_no_sense() {
    let with = |change: fn(&mut Config)| {
        let mut config = config();
        change(&mut config);
        refusal(config)
    };
    expect_words(&with(|config| config.memory_bytes = 0), &["0", "--memory 2G"]);
    expect_words(&with(|config| config.memory_bytes = 1 << 20), &["1048576", "not a multiple of 2 MiB"]);
    expect_words(&with(|config| config.quota_bytes = Some(0)), &["--quota is 0"]);
    expect_words(&with(|config| config.quota_bytes = Some(5000)), &["5000", "not a multiple", "4096"]);
    expect_words(&with(|config| config.quota_bytes = Some(1 << 30)), &["--quota 1 GiB", "--memory 8 MiB"]);
    expect_words(&with(|config| config.threads = 0), &["--threads 0"]);
    expect_words(&with(|config| config.listen.clear()), &["--listen"]);
}

/// Returns a port that is free for both kinds of addresses.
fn free_port() -> u16 {
    TcpListener::bind("[::]:0").expect("a port").local_addr().expect("it has one").port()
}

#[test]
fn all_addresses_of_both_kinds_can_be_listed() {
    let port = free_port();
    let tcp = |host: &str| ListenAddress::Tcp { host: host.into(), port };
    for hosts in [["0.0.0.0", "::"], ["::", "127.0.0.1"]] {
        let listen = hosts.map(tcp).to_vec();
        let server = Server::start(Config { listen: listen.clone(), ..config() }).expect("each has its own");
        assert_eq!(server.local_addresses(), listen);
        for host in ["127.0.0.1", "::1"] {
            TcpStream::connect((host, port)).expect("it listens");
        }
    }
    // Alone, `[::]` has those of IPv4 as well.
    let _server = Server::start(Config { listen: vec![tcp("::")], ..config() }).expect("the port is free");
    TcpStream::connect(("127.0.0.1", port)).expect("it listens");
}

#[test]
fn addresses_that_are_one_are_not_said_to_be_another_programs() {
    let port = free_port();
    let tcp = |host: &str| ListenAddress::Tcp { host: host.into(), port };
    for (hosts, word) in [
        (
            ["0.0.0.0", "127.0.0.1"],
            format!("tcp:127.0.0.1:{port}: --listen tcp:0.0.0.0:{port} has that address already"),
        ),
        (["::1", "::"], format!("--listen tcp:[::1]:{port} has")),
        (["127.0.0.1", "127.0.0.1"], "is given twice".into()),
    ] {
        let error = Server::start(Config { listen: hosts.map(tcp).to_vec(), ..config() }).expect_err("they are one");
        assert!(error.is_lasting() && error.to_string().contains(&word), "{error}");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("s");
    let error = Server::check(&Config { control: Some(path.clone()), ..on_unix(&path) }).expect_err("they are one");
    assert!(error.is_lasting() && error.to_string().contains("--control"), "{error}");
}

#[test]
fn more_memory_than_the_host_has() {
    for locking in [PageLocking::Locked, PageLocking::Unlocked] {
        let refusal = refusal(Config { memory_bytes: 4 << 40, locking, ..config() });
        expect_words(&refusal, &["--memory 4 TiB"]);
        assert!(refusal.contains("MemAvailable") || refusal.contains("control group"), "{refusal}");
    }
}

#[test]
fn locking_says_how_far_it_is() {
    let mut told = Vec::new();
    let config = Config { memory_bytes: 40 << 20, locking: PageLocking::Locked, ..config() };
    let server = Server::start_telling(config.clone(), None, &mut |bytes| told.push(bytes >> 20)).expect("40 MiB");
    assert_eq!(told, [0, 16, 32, 40]);
    drop(server);
    let unlocked = Config { locking: PageLocking::Unlocked, ..config };
    Server::start_telling(unlocked, None, &mut |_| panic!("nothing is locked")).expect("40 MiB");
}

#[test]
fn locked_memory_is_locked() {
    let locked_kib = || {
        let status = fs::read_to_string("/proc/self/status").expect("Linux");
        let line = status.lines().find(|line| line.starts_with("VmLck:")).expect("VmLck");
        line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).expect("a number")
    };
    let server = start(Config { memory_bytes: 4 << 20, locking: PageLocking::Locked, ..config() });
    assert!(server.status().locked);
    assert!(server.status().backing == remoca_server::Backing::HugeTlb || locked_kib() >= 4096);
}

#[test]
fn ports_and_addresses_that_cannot_be_had() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = format!("tcp:{}", taken.local_addr().expect("bound"));
    let with = |address: &str| Config { listen: vec![address.parse().expect("an address")], ..config() };
    expect_words(&refusal(with(&address)), &[&address, "another program has this port", "ss -ltnp"]);
    expect_words(&refusal(with("tcp:192.0.2.1:7070")), &["tcp:192.0.2.1:7070", "no such address"]);
    expect_words(&refusal(with("tcp:no.such.host.invalid:7070")), &["no.such.host.invalid", "what host"]);
}

/// Memory takes long to lock, and a server that is started again and again would lock it each time.
#[test]
fn nothing_is_locked_for_addresses_that_cannot_be_had() {
    let folder = tempfile::tempdir().expect("a folder");
    let [path, used] = ["serve.sock", "used.sock"].map(|name| folder.path().join(name));
    let _living = UnixListener::bind(&used).expect("a socket");
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let at = |address: String| Config { listen: vec![address.parse().expect("an address")], ..config() };
    for config in [
        at(format!("tcp:{}", taken.local_addr().expect("bound"))),
        on_unix(&used),
        Config { control: Some(used.clone()), ..on_unix(&path) },
    ] {
        let config = Config { locking: PageLocking::Locked, ..config };
        let refused = Server::start_telling(config, None, &mut |_| panic!("memory is locked"));
        expect_words(&refused.expect_err("this must be refused").to_string(), &["another pro"]);
        assert!(!path.exists(), "nothing is left behind");
    }
}

#[test]
fn unix_paths_that_cannot_be_had() {
    let folder = tempfile::tempdir().expect("a folder");
    let long = folder.path().join("x".repeat(120));
    expect_words(&refusal(on_unix(&long)), &["at most 107 bytes", &long.as_os_str().len().to_string()]);
    expect_words(&refusal(on_unix(&folder.path().join("no/such.sock"))), &["folder does not exist"]);
    let file = folder.path().join("file");
    fs::write(&file, "precious").expect("a file");
    expect_words(&refusal(on_unix(&file)), &["not a socket"]);
    assert_eq!(fs::read(&file).expect("still there"), b"precious");
    expect_words(&refusal(on_unix(folder.path())), &["not a socket"]);
}

#[test]
fn a_living_socket_is_refused_and_a_dead_one_replaced() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("serve.sock");
    let living = UnixListener::bind(&path).expect("a socket");
    expect_words(&refusal(on_unix(&path)), &["another process listens there", "serve.sock"]);
    UnixStream::connect(&path).expect("the other's socket is untouched");
    drop(living);
    assert!(path.exists(), "its file stays, as after a kill");
    let server = start(on_unix(&path));
    Client::with_pages(&server, token(1), 1).barrier();
    let running = refusal(on_unix(&path));
    expect_words(&running, &["another process listens there"]);
    Client::with_pages(&server, token(2), 1).barrier();
}

#[test]
fn socket_files_are_for_owner_and_group_and_go_with_the_server() {
    let folder = tempfile::tempdir().expect("a folder");
    let [path, control] = ["serve.sock", "control.sock"].map(|name| folder.path().join(name));
    let server = start(Config { control: Some(control.clone()), ..on_unix(&path) });
    for path in [&path, &control] {
        let file = fs::symlink_metadata(path).expect("there");
        assert!(file.file_type().is_socket());
        assert_eq!(file.permissions().mode() & 0o777, 0o660);
    }
    server.shutdown();
    assert!(!path.exists() && !control.exists());
    // Another process's socket in its place is left alone.
    let server = start(on_unix(&path));
    fs::remove_file(&path).expect("there");
    let _other = UnixListener::bind(&path).expect("a socket");
    let inode = fs::symlink_metadata(&path).expect("there").ino();
    server.shutdown();
    assert_eq!(fs::symlink_metadata(&path).expect("still there").ino(), inode);
}

#[test]
fn a_start_that_fails_leaves_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("serve.sock");
    let mut config = on_unix(&path);
    config.listen.push(ListenAddress::Unix(PathBuf::from("/no/such/folder/serve.sock")));
    expect_words(&refusal(config), &["folder does not exist"]);
    assert!(!path.exists());
}

#[test]
fn stopping_ends_all_connections() {
    // An address at which no other test takes a port.
    let server = start(Config { listen: vec!["tcp:127.0.0.3:0".parse().expect("an address")], ..config() });
    let mut idle = Client::connect(&server);
    let mut client = Client::with_pages(&server, token(1), 100);
    let address = server.local_addresses()[0].clone();
    server.shutdown();
    idle.expect_closed();
    client.expect_closed();
    // The port is free again, for another server at once.
    let again = start(Config { listen: vec![address], ..config() });
    let (_, welcome) = Client::greeted(&again, token(1), 2);
    assert_eq!(welcome.npages.0, 0);
}

#[test]
fn the_control_socket_answers_with_json() {
    let folder = tempfile::tempdir().expect("a folder");
    let control = folder.path().join("control.sock");
    let server = start(Config { control: Some(control.clone()), ..config() });
    let mut client = Client::with_pages(&server, token(0x5a), 300);
    client.store(1, 1);
    client.expect_held(1, 1);
    for _ in 0..3 {
        let mut text = String::new();
        UnixStream::connect(&control).expect("there").read_to_string(&mut text).expect("an answer");
        let status: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(status["pages"], 2048);
        assert_eq!(status["pools"][0]["token"], "5a5a5a5a");
        assert_eq!(status["pools"][0]["npages"], 300);
        assert_eq!(status["totals"]["gets"], 1);
        assert!(!text.contains("5a5a5a5a5a"), "the rest of a token is nobody's business");
    }
}
