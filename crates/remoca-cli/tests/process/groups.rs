//! Groups that may connect to the sockets of a VM process.

use super::configuration::{Scene, said};
use remoca_io::left_out::is_root;
use std::os::unix::fs::MetadataExt;

/// The guests stay connected, so the sockets do too: their group changes where they are.
#[test]
fn a_reload_gives_the_sockets_to_another_group() {
    if !is_root("needs root to give files to other groups") {
        return;
    }
    let scene = Scene::new();
    let export = format!(
        "nbd = 'unix:{}'\n[[disk]]\nname = 'export'\nimage = '{}'\nformat = 'raw'",
        scene.text("nbd"),
        scene.text("exported")
    );
    std::fs::write(scene.path("exported"), vec![0; 1 << 20]).unwrap();
    let configure = |group: &str| scene.configure(&format!("port = '{}'\n{group}\n{export}", scene.text("port")));
    let groups = || {
        ["socket", "port", "nbd"].map(|name| {
            let metadata = scene.path(name).metadata().unwrap();
            (metadata.gid(), metadata.mode() & 0o777)
        })
    };
    configure("");
    let mut program = scene.start(&[]);
    let ungrouped = groups();
    assert!(ungrouped.iter().all(|(group, mode)| *group == 0 && mode & 0o020 == 0), "{ungrouped:?}");
    for group in [7, 12] {
        configure(&format!("socket-group = '{group}'"));
        said(&scene.ask("upgrade", &[]));
        assert_eq!(groups(), [(group, 0o660); 3]);
    }
    configure("");
    said(&scene.ask("upgrade", &[]));
    assert_eq!(groups(), [(0, 0o600); 3]);
    program.terminate();
}
