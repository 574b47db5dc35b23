//! `remoca check`: of a VM that is configured, and of one that runs.

use super::configuration::Scene;
use super::support::hanging_fs::{HangingFs, may_mount};
use super::support::machine::{Machine, Setup};
use super::support::program::{Program, REMOCA, Serve, Signal, command, expect_refusal, run, status, until_answered};
use super::support::wait_until;
use remoca_io::lock::{LockFailure, lock, probe};
use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Output, Stdio};

const FAILURE: i32 = 1;

fn run_check(name: &str, configuration: &Path) -> Output {
    run(&["check", name, "-o", "json", "--config", configuration.to_str().unwrap()])
}

/// Returns what is found as `LEVEL WHAT: FOUND`, with the exit code.
#[track_caller]
fn check(name: &str, configuration: &Path) -> (Vec<String>, Option<i32>) {
    found_in(&until_answered(|| run_check(name, configuration)))
}

#[track_caller]
fn found_in(output: &Output) -> (Vec<String>, Option<i32>) {
    let findings: Vec<serde_json::Value> =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
    let text = |finding: &serde_json::Value, key: &str| finding[key].as_str().unwrap().to_owned();
    let line = |finding| format!("{} {}: {}", text(finding, "level"), text(finding, "what"), text(finding, "found"));
    for finding in &findings {
        assert_eq!(finding["level"] == "ok", finding["advice"].is_null(), "only what is wrong has advice: {finding}");
    }
    (findings.iter().map(line).collect(), output.status.code())
}

#[track_caller]
fn expect(found: &[String], lines: &[&str]) {
    for line in lines {
        assert!(found.iter().any(|found| found.starts_with(line)), "`{line}` is missing in {found:#?}");
    }
}

#[test]
fn a_vm_that_is_configured_is_checked_before_it_starts() {
    let folder = tempfile::tempdir().unwrap();
    let server = Serve::start(folder.path(), "16M");
    // No process of this machine has this name.
    let name = "check-before-start";
    let image = folder.path().join("image");
    fs::create_dir(folder.path().join("vms")).unwrap();
    let write = |server: &str, cache: &str| {
        let text = format!(
            "version = 1\nserver = ['{server}']\ncache = '{cache}'\n[[disk]]\nname = 'root'\nformat = 'raw'\nimage = '{}'\n\
             socket = '/run/remoca/s'\n",
            image.display()
        );
        fs::write(folder.path().join("vms").join(format!("{name}.toml")), text).unwrap();
    };
    write(&server.address, "8M");
    let (found, code) = check(name, folder.path());
    expect(&found, &["warning process: does not run", "failed image root: ", "ok server "]);
    assert_eq!(code, Some(FAILURE));

    fs::write(&image, [0; 8192]).unwrap();
    let user = File::options().read(true).write(true).open(&image).unwrap();
    lock(&user, false).unwrap_or_else(|failure| panic!("{failure:?}"));
    let (found, _) = check(name, folder.path());
    let line = format!("failed image root: {}: another program uses it", image.display());
    expect(&found, &[&line]);
    drop(user);
    // A child that another test forks has a copy of the descriptor, lock included, until its `exec`.
    let image_again = File::options().read(true).write(true).open(&image).unwrap();
    wait_until("the lock is given up", || probe(&image_again, false).is_ok());
    let (found, _) = check(name, folder.path());
    expect(&found, &[&format!("ok image root: {}, 8K, used by nobody", image.display())]);

    write(&server.address, "1G");
    let (found, _) = check(name, folder.path());
    expect(&found, &[&format!("warning server {}: 16M free", server.address)]);
    let nobody = format!("unix:{}", folder.path().join("nobody").display());
    write(&nobody, "1G");
    let (found, code) = check(name, folder.path());
    expect(&found, &[&format!("warning server {nobody}: ")]);
    assert_eq!(code, Some(0), "a guest reads from its disk meanwhile: {found:#?}");
    // The option of before is the same, and is not shown beside the other.
    let json = |option: &[&str]| {
        let folder = folder.path().to_str().unwrap();
        let output = run(&[&["check", name, "--config", folder], option].concat());
        let mut findings: Vec<serde_json::Value> =
            serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
        // Other programs write to the file system between the two.
        for finding in findings.iter_mut().filter(|finding| finding["what"] == "room") {
            finding["found"] = serde_json::Value::Null;
        }
        findings
    };
    assert_eq!(json(&["--json"]), json(&["--output", "json"]));
    let help = String::from_utf8(run(&["check", "--help"]).stdout).unwrap();
    assert!(help.contains("--output") && !help.contains("--json"), "{help}");
}

#[test]
fn a_socket_without_a_folder_is_found_before_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let (name, sockets) = ("check-socket-folder", folder.path().join("sockets"));
    let [image, socket] = [folder.path().join("image"), sockets.join("s")].map(|path| path.display().to_string());
    fs::create_dir(folder.path().join("vms")).unwrap();
    fs::write(&image, [0; 8192]).unwrap();
    let disk = format!("[[disk]]\nname = 'root'\nformat = 'raw'\nimage = '{image}'\nsocket = '{socket}'\n");
    // The process makes this folder.
    let text = format!("version = 1\nport = '/run/remoca/p'\n{disk}");
    fs::write(folder.path().join("vms").join(format!("{name}.toml")), text).unwrap();
    let lacking = |found: &[String]| -> Vec<String> {
        found.iter().filter(|line| line.starts_with("failed socket ")).cloned().collect()
    };
    let (found, code) = check(name, folder.path());
    let expected = format!("failed socket root: {socket}: there is no folder {}", sockets.display());
    assert_eq!((lacking(&found), code), (vec![expected], Some(FAILURE)));
    fs::create_dir(&sockets).unwrap();
    assert_eq!(lacking(&check(name, folder.path()).0), [""; 0]);
}

#[test]
fn a_vm_that_runs_is_checked_by_its_control_socket() {
    let folder = tempfile::tempdir().unwrap();
    let server = Serve::start(folder.path(), "16M");
    let setup = Setup { server: Some(server.address.clone()), seed: 87, ..Setup::default() };
    let machine = Machine::start_in(folder, setup);
    wait_until("it has its cache", || {
        let status = machine.status();
        status.cache.granted_bytes == status.cache.wanted_bytes
    });
    let control = machine.control().display().to_string();
    let (found, _) = check(&control, Path::new("/nonexistent"));
    let disk = machine.status().disks[0].name.clone();
    expect(
        &found,
        &[
            "ok process: runs as ",
            &format!("ok image {disk}: "),
            &format!("ok server {}: ", server.address),
            "ok guest: has attached all disks",
            "ok guest memory: ",
            // The test's own guest is no QEMU.
            &format!("warning reconnect {disk}: no QEMU"),
            "warning agent: not heard",
        ],
    );
    assert!(found.iter().any(|line| line.contains(" open files: ")), "{found:#?}");
    // An operator restores a backup under a guest that runs.
    let image = machine.status().disks[0].image.clone();
    std::fs::copy(&image, format!("{image}.new")).unwrap();
    std::fs::rename(format!("{image}.new"), &image).unwrap();
    let (found, code) = check(&control, Path::new("/nonexistent"));
    let wrong = format!("failed image {disk}: {image}: not the file that this process serves");
    assert!(found.iter().any(|line| line.starts_with(&wrong)), "{found:#?}");
    assert_eq!(code, Some(FAILURE));
    std::fs::remove_file(&image).unwrap();
    let (found, _) = check(&control, Path::new("/nonexistent"));
    assert!(found.iter().any(|line| line.starts_with(&wrong)), "{found:#?}");
}

#[test]
fn a_socket_at_which_another_process_listens_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let (name, socket) = ("check-taken-socket", folder.path().join("socket"));
    fs::create_dir(folder.path().join("vms")).unwrap();
    fs::write(folder.path().join("image"), [0; 8192]).unwrap();
    let (image, path) = (folder.path().join("image").display().to_string(), socket.display().to_string());
    let disk = format!("[[disk]]\nname = 'root'\nformat = 'raw'\nimage = '{image}'\nsocket = '{path}'\n");
    fs::write(folder.path().join("vms").join(format!("{name}.toml")), format!("version = 1\n{disk}")).unwrap();
    let line = format!("failed socket root: {path}: a process listens there that is not this VM's");
    let is_found = || check(name, folder.path()).0.contains(&line);
    assert!(!is_found());
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    assert!(is_found());
    assert_eq!(check(name, folder.path()).1, Some(FAILURE));
}

/// A disk was removed, and its domain still has it.
#[test]
fn a_qemu_that_waits_for_a_socket_is_named_with_it() {
    let scene = Scene::new();
    scene.configure("");
    let _program = scene.start(&[]);
    let _hypervisor = UnixStream::connect(scene.path("socket")).unwrap();
    wait_until("it is attached", || status(&scene.control()).disks[0].attached);
    let control = scene.text("web1.ctl");
    let (found, _) = check(&control, Path::new("/nonexistent"));
    expect(&found, &["failed guest memory: none of it is shared"]);
    let device = |name: &str| format!("socket,id={name},path={},reconnect=1", scene.text(name));
    let mut qemu = command("/bin/sh");
    qemu.args(["-c", "read line", "-chardev", &device("socket"), "-chardev", &device("removed")]);
    let mut qemu = qemu.stdin(Stdio::piped()).spawn().unwrap();
    let (found, _) = check(&control, Path::new("/nonexistent"));
    let waits = format!("failed guest memory: its QEMU waits for {}, which no process serves", scene.text("removed"));
    expect(&found, &[&waits]);
    assert!(!found.iter().any(|line| line.contains("none of it is shared")), "{found:#?}");
    drop(qemu.stdin.take());
    qemu.wait().unwrap();
}

#[test]
fn a_vm_whose_process_hangs_is_checked_as_one_that_does_not_run() {
    let setup = Setup { seed: 88, ..Setup::default() };
    let (server, machine) = Machine::start_with_server(tempfile::tempdir().unwrap(), setup);
    let (image, control) = (machine.status().disks[0].image.clone(), machine.control());
    machine.program.signal(Signal::STOP);
    let (found, code) = found_in(&run_check(control.to_str().unwrap(), Path::new("/nonexistent")));
    expect(&found, &["failed process: it has not answered for "]);
    assert_eq!((found.len(), code), (1, Some(FAILURE)), "{found:#?}");

    let configuration = tempfile::tempdir().unwrap();
    fs::create_dir(configuration.path().join("vms")).unwrap();
    let disk = format!("[[disk]]\nname = 'root'\nformat = 'raw'\nimage = '{image}'\nsocket = '/run/remoca/s'\n");
    let text = format!("version = 1\nserver = ['{}']\ncache = '4M'\n{disk}", server.address);
    fs::write(configuration.path().join("vms/control.toml"), text).unwrap();
    let (found, code) = found_in(&run_check(control.to_str().unwrap(), configuration.path()));
    expect(
        &found,
        &[
            "failed process: it has not answered for ",
            "ok configuration: has no mistakes",
            &format!("ok image root: {image}: locked, "),
            &format!("ok server {}: ", server.address),
        ],
    );
    assert_eq!(code, Some(FAILURE));
}

/// As in `remoca check | head -1`, and in `remoca check 2>&1 | head -1`.
#[test]
fn what_is_found_decides_the_exit_code_also_if_nobody_reads_it() {
    let folder = tempfile::tempdir().unwrap();
    let name = "check-without-reader";
    fs::create_dir(folder.path().join("vms")).unwrap();
    let disk = "[[disk]]\nname = 'root'\nformat = 'raw'\nimage = '/nonexistent/image'\nsocket = '/run/remoca/s'\n";
    fs::write(folder.path().join("vms").join(format!("{name}.toml")), format!("version = 1\n{disk}")).unwrap();
    let closed = || std::io::pipe().unwrap().1;
    let check = || {
        let mut check = command(REMOCA);
        check.args(["check", name, "--config"]).arg(folder.path()).stdout(closed());
        check
    };
    let output = check().stderr(Stdio::piped()).spawn().unwrap().wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(FAILURE), "{said}");
    assert!(said.contains("checks failed") && !said.contains("pipe"), "{said}");
    assert_eq!(check().stderr(closed()).spawn().unwrap().wait().unwrap().code(), Some(FAILURE));
}

#[test]
fn a_vm_that_is_neither_there_nor_configured_is_refused() {
    for command in ["check", "xml"] {
        let output = run(&[command, "there-is-no-such-vm", "--config", "/nonexistent"]);
        expect_refusal(&output, FAILURE, &["no VM process answers at", "/nonexistent/vms/there-is-no-such-vm.toml"]);
    }
}

/// A process may start, or a hypervisor open the image, while it is looked at.
#[test]
fn who_looks_at_an_image_keeps_nobody_from_it() {
    let image = tempfile::NamedTempFile::new().unwrap();
    let [looks, uses] = [0; 2].map(|_| File::options().read(true).write(true).open(image.path()).unwrap());
    for read_only in [false, true] {
        assert!(probe(&looks, read_only).is_ok());
    }
    lock(&uses, false).unwrap();
    for read_only in [false, true] {
        assert!(matches!(probe(&looks, read_only), Err(LockFailure::InUse)));
    }
}

#[test]
fn an_image_whose_file_system_hangs_is_named_and_not_waited_for() {
    if !may_mount() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let hanging = HangingFs::mount(1 << 20);
    let (name, image) = ("check-hanging-image", hanging.file().display().to_string());
    fs::create_dir(folder.path().join("vms")).unwrap();
    let disk = format!("[[disk]]\nname = 'root'\nformat = 'raw'\nimage = '{image}'\nsocket = '/run/remoca/s'\n");
    fs::write(folder.path().join("vms").join(format!("{name}.toml")), format!("version = 1\n{disk}")).unwrap();
    hanging.hang();
    for (arguments, words) in [
        (&["check", name][..], format!("failed   image root: {image}: its file system does not answer")),
        (&["config", "check", name], "no mistakes".to_owned()),
    ] {
        let mut command = command(REMOCA);
        command.args(arguments).args(["--config", folder.path().to_str().unwrap()]);
        let mut program = Program::start(&mut command, &folder.path().join(format!("log of {}", arguments[0])));
        wait_until("it has said what is wrong", || program.log().contains(&words));
        // The kernel lets no program go that such a file system has a request of.
        hanging.go_on();
        wait_until("it ends", || !program.is_running());
        hanging.hang();
    }
}
