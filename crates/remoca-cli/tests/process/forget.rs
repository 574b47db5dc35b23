//! `remoca forget`: what is kept of a VM that is gone, on its host and at its memory servers.

use super::configuration::Scene;
use super::groups::configure;
use super::support::program::{Program, REMOCA, Serve, command, expect_refusal, run};
use super::support::wait_until;
use remoca_io::lock::lock_whole;
use std::fs::OpenOptions;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Output;

const FAILURE: i32 = 1;

/// Starts the process `vm` with a cache at `servers`, and waits until it has a pool at each.
fn start(folder: &Path, servers: &[(&Serve, String)]) -> Program {
    let image = folder.join("image");
    std::fs::write(&image, vec![0; 1 << 20]).unwrap();
    let mut disk = command(REMOCA);
    disk.args(["disk", "--name", "vm", "--cache", "8M", "--control"]).arg(folder.join("control"));
    disk.arg("--disk").arg(format!("image={0},socket={0}.socket", image.display()));
    disk.args(servers.iter().flat_map(|(_, address)| ["--server", address]));
    let mut program = Program::start(&mut disk, &folder.join("disk.log"));
    for (server, _) in servers {
        wait_until("it has a pool", || {
            assert!(program.is_running(), "{}", program.log());
            server.pages_given() > 0
        });
    }
    program
}

fn serve(folder: &Path, name: &str, memory: &str) -> Serve {
    let folder = folder.join(name);
    std::fs::create_dir(&folder).unwrap();
    Serve::start_with(&folder, memory, &["--grace", "3600s"])
}

fn forget(folder: &Path, options: &[&str]) -> Output {
    let control = folder.join("control");
    run(&[&["forget", "vm", "--control", control.to_str().unwrap()], options].concat())
}

#[track_caller]
fn said(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// Returns the names of the files in a folder that are a VM's.
fn kept(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = entries.filter(|name| name.starts_with("control") || name.starts_with("vm.")).collect();
    names.sort();
    names
}

#[test]
fn what_a_vm_leaves_is_removed_and_its_pools_are_given_back() {
    let folder = tempfile::tempdir().unwrap();
    // Neither has memory for all of the cache.
    let (local, far) = (serve(folder.path(), "local", "4M"), serve(folder.path(), "far", "4M"));
    let mut program = start(folder.path(), &[(&local, local.local_address()), (&far, far.address.clone())]);
    for options in [&["--dry-run"][..], &[]] {
        expect_refusal(&forget(folder.path(), options), FAILURE, &["vm is running: a process listens at"]);
    }
    program.kill();
    // A process that was killed while its VM was about to migrate leaves the one, and one that ended under its guest the other.
    for mark in ["control.gone.ready", "control.left"] {
        std::fs::write(folder.path().join(mark), "").unwrap();
    }
    let before = kept(folder.path());
    for name in ["control", "control.config", "control.gone.ready", "control.left", "vm.state"] {
        assert!(before.iter().any(|kept| kept == name), "{before:?}");
    }

    let dry = said(&forget(folder.path(), &["--dry-run"]));
    assert!(dry.contains("nothing is removed"), "{dry}");
    for server in [&local.local_address(), &far.address] {
        assert!(dry.contains(&format!("would give back what it has at {server}\n")), "{dry}");
    }
    let shown = before.iter().filter(|name| dry.contains(&format!("/{name} ("))).count();
    assert_eq!((kept(folder.path()), shown), (before.clone(), before.len()), "{dry}");
    assert_eq!([&local, &far].map(Serve::pages_given), [1024; 2]);

    let done = said(&forget(folder.path(), &[]));
    assert_eq!(kept(folder.path()), [""; 0], "{done}");
    assert!(done.contains(&format!("gave back 4M at {}\n", local.local_address())), "{done}");
    assert!(done.contains("are free on this host, and 8M at memory servers"), "{done}");
    for server in [&local, &far] {
        wait_until("the memory is free", || server.pages_given() == 0);
        assert_eq!(server.status()["totals"]["expired"], 0);
    }
    assert!(folder.path().join("image").exists());
    expect_refusal(&forget(folder.path(), &[]), FAILURE, &["nothing is kept of vm"]);
}

#[test]
fn a_server_that_is_gone_does_not_keep_the_files() {
    let folder = tempfile::tempdir().unwrap();
    let mut server = serve(folder.path(), "server", "16M");
    let mut program = start(folder.path(), &[(&server, server.address.clone())]);
    program.terminate();
    server.program.kill();
    let done = said(&forget(folder.path(), &[]));
    assert!(done.contains("cannot be reached") && done.contains("grace time"), "{done}");
    assert!(done.contains("and 0B at memory servers"), "{done}");
    assert_eq!(kept(folder.path()), [""; 0]);
}

#[test]
fn what_is_in_use_or_something_else_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let server = serve(folder.path(), "server", "16M");
    let mut program = start(folder.path(), &[(&server, server.address.clone())]);
    program.kill();
    let before = kept(folder.path());
    let state = folder.path().join("vm.state");
    let file = OpenOptions::new().read(true).write(true).open(&state).unwrap();
    lock_whole(&file).unwrap();
    expect_refusal(&forget(folder.path(), &[]), FAILURE, &["vm is running: a process uses", "vm.state"]);
    drop(file);
    let diary = folder.path().join("diary");
    std::fs::write(&diary, "Dear diary, today I have written more than eight bytes. And then some more of them.")
        .unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(&diary, mode).unwrap();
    let wrong = forget(folder.path(), &["--state", diary.to_str().unwrap()]);
    expect_refusal(&wrong, FAILURE, &["diary is no state file"]);
    expect_refusal(&run(&["forget", "/run/vm.ctl"]), FAILURE, &["is no name of a VM"]);
    assert!(diary.exists() && kept(folder.path()) == before);
    assert_eq!(server.pages_given(), 2048);
}

/// By a socket that is there, the next VM that has it would take itself for the successor of a killed process.
#[test]
fn sockets_that_a_killed_process_left_are_removed_unless_somebody_listens() {
    let scene = Scene::new();
    configure(&scene, "");
    scene.start(&[]).kill();
    let sockets = ["socket", "nbd", "port"].map(|name| scene.path(name));
    assert!(sockets.iter().all(|socket| socket.exists()));
    // Another VM has it by now.
    std::fs::remove_file(&sockets[2]).unwrap();
    let _other = UnixListener::bind(&sockets[2]).unwrap();
    let control = scene.text("web1.ctl");
    let forget = |options: &[&str]| said(&run(&[&["forget", "web1", "--control", &control], options].concat()));
    let dry = forget(&["--dry-run"]);
    for (socket, goes) in sockets.iter().zip([true, true, false]) {
        assert_eq!(dry.contains(&format!("would remove {} (", socket.display())), goes, "{dry}");
        assert!(socket.exists());
    }
    let done = forget(&[]);
    assert_eq!(sockets.each_ref().map(|socket| socket.exists()), [false, false, true], "{done}");
}
