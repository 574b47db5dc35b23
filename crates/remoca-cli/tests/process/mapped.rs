//! Pools that `remoca serve` lends to processes of its host, which outlive it under a service manager.

use super::support::program::{Program, REMOCA, run, service};
use super::support::{PATIENCE, wait_until};
use remoca_io::fake_manager::FakeManager;
use remoca_io::passed::{MappedAnswer, receive_mapped_answer};
use remoca_protocol::{Frame, Hello, MAPPED_VERSIONS, PageCount, RequestId, Token, Welcome};
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::Path;

fn connect(path: &Path, epoch: u64) -> (UnixStream, Welcome, File) {
    let mut socket = UnixStream::connect(path).unwrap();
    let mut hello = Vec::new();
    Frame::Hello(Hello { versions: MAPPED_VERSIONS, token: Token([0xa1; 16]), epoch }).encode(&mut hello);
    socket.write_all(&hello).unwrap();
    match receive_mapped_answer(&socket, PATIENCE).unwrap() {
        MappedAnswer::Welcome { welcome, memory } => (socket, welcome, memory.into()),
        MappedAnswer::Refused(refusal) => panic!("{refusal:?}"),
    }
}

fn set_size(mut socket: &UnixStream, npages: u32) {
    let mut bytes = Vec::new();
    Frame::SetSize { request: RequestId(1), npages: PageCount(npages) }.encode(&mut bytes);
    socket.write_all(&bytes).unwrap();
    let mut answer = [0; 16];
    socket.read_exact(&mut answer).unwrap();
    assert_eq!(answer[0], 4, "SIZED");
}

fn blocks(memory: &File) -> u64 {
    memory.metadata().unwrap().blocks()
}

#[test]
fn a_mapped_pool_outlives_a_killed_server_and_is_taken_back_by_an_operator() {
    let manager = FakeManager::start();
    let folder = tempfile::tempdir().unwrap();
    let [path, control, log] = ["s", "control", "log"].map(|name| folder.path().join(name));
    let start = || {
        let listen = format!("unix:{}", path.display());
        let mut command = service(&manager, Path::new(REMOCA));
        command.args(["serve", "--listen", &listen, "--memory", "16M", "--control"]).arg(&control);
        let program = Program::start(&mut command, &log);
        wait_until("it listens", || UnixStream::connect(&path).is_ok());
        program
    };
    let server_option = control.to_str().unwrap();
    let status = || {
        let output = run(&["status", &format!("--server={server_option}")]);
        String::from_utf8(output.stdout).unwrap()
    };
    let take_back = |size| run(&["take-back", "a1a1a1a1", size, "--server", server_option]);
    let mut program = start();
    let (socket, first, memory) = connect(&path, 1);
    set_size(&socket, 1000);
    memory.write_all_at(b"kept", 999 * 4096).unwrap();
    wait_until("it is kept", || status().contains("mapped, at most 16M, outlives the server"));
    for epoch in 2..5 {
        program.kill();
        let mut found = [0; 4];
        memory.read_exact_at(&mut found, 999 * 4096).unwrap();
        assert_eq!(&found, b"kept", "there while there is no server");
        program = start();
        let (_socket, welcome, again) = connect(&path, epoch);
        assert_eq!((welcome.pool_generation, welcome.npages), (first.pool_generation, PageCount(1000)));
        assert_eq!(again.metadata().unwrap().ino(), memory.metadata().unwrap().ino());
    }
    assert_eq!(manager.names().len(), 2);
    let refused = take_back("lots");
    assert_eq!(refused.status.code(), Some(2));
    let said = String::from_utf8(take_back("4096").stdout).unwrap();
    assert!(said.contains("ended"), "{said}");
    assert_eq!(blocks(&memory), 0);
    let unknown = take_back("0");
    assert!(!unknown.status.success());
    assert!(String::from_utf8_lossy(&unknown.stderr).contains("there is no mapped pool"));
    wait_until("all is free", || status().contains("16M locked, 16M free"));
    program.terminate();
}
