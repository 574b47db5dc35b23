//! Groups that may connect to the sockets of a VM process.

use super::configuration::{Scene, said};
use super::support::program::{Program, REMOCA, command, status};
use super::support::wait_until;
use remoca_io::left_out::is_root;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;

/// Configures a disk with a socket, one that is exported, and the port.
pub fn configure(scene: &Scene, group: &str) {
    let [nbd, exported, port] = ["nbd", "exported", "port"].map(|name| scene.text(name));
    let export = format!("nbd = 'unix:{nbd}'\n[[disk]]\nname = 'export'\nimage = '{exported}'\nformat = 'raw'");
    std::fs::write(scene.path("exported"), vec![0; 1 << 20]).unwrap();
    scene.configure(&format!("port = '{port}'\n{group}\n{export}"));
}

/// Returns group and mode of each socket.
fn groups(scene: &Scene) -> [(u32, u32); 3] {
    ["socket", "port", "nbd"].map(|name| {
        let metadata = scene.path(name).metadata().unwrap();
        (metadata.gid(), metadata.mode() & 0o777)
    })
}

/// Whoever connects reads and writes the disk.
#[test]
fn without_a_group_only_the_owner_may_connect_whatever_the_umask() {
    let scene = Scene::new();
    configure(&scene, "");
    let mut shell = command("sh");
    shell.args(["-c", "umask 0 && exec \"$@\"", "sh", REMOCA, "disk", "--name", "web1", "--control"]);
    shell.arg(scene.control()).env("REMOCA_CONFIG", scene.folder.path());
    let mut program = Program::start(&mut shell, &scene.path("log"));
    wait_until("the process answers", || {
        assert!(program.is_running(), "{}", program.log());
        UnixStream::connect(scene.control()).is_ok()
    });
    // An answer comes only once it serves.
    status(&scene.control());
    assert_eq!(groups(&scene).map(|(_, mode)| mode), [0o600; 3]);
    said(&scene.ask("upgrade", &[]));
    assert_eq!(groups(&scene).map(|(_, mode)| mode), [0o600; 3]);
    program.terminate();
}

/// The guests stay connected, so the sockets do too: their group changes where they are.
#[test]
fn a_reload_gives_the_sockets_to_another_group() {
    if !is_root("needs root to give files to other groups") {
        return;
    }
    let scene = Scene::new();
    configure(&scene, "");
    let mut program = scene.start(&[]);
    assert_eq!(groups(&scene), [(0, 0o600); 3]);
    for group in [7, 12] {
        configure(&scene, &format!("socket-group = '{group}'"));
        said(&scene.ask("upgrade", &[]));
        assert_eq!(groups(&scene), [(group, 0o660); 3]);
    }
    configure(&scene, "");
    said(&scene.ask("upgrade", &[]));
    assert_eq!(groups(&scene), [(0, 0o600); 3]);
    program.terminate();
}
