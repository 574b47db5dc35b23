//! A VM process by files: what is reloaded, what a broken file does, and what is never asked of an image again.

use super::control::CLIENTS_MAX;
use super::full_disk::Small;
use super::support::program::{
    Program, REMOCA, Serve, Signal, ask_raw, command, expect_refusal, run_command, status, until_answered, with_run,
};
use super::support::wait_until;
use remoca_frontend::testing::{Command, Options, TestGuest};
use remoca_io::control::left;
use remoca_io::left_out::leave_out;
use remoca_protocol::control::PATIENCE as SILENT_TIME_MAX;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Exit codes: of any failure, of an image that cannot be used, and of a configuration that cannot be.
const FAILURE: i32 = 1;
const NO_IMAGE: i32 = 66;
const CONFIGURATION: i32 = 78;

/// A VM `web1` with one image, and the folder of its configuration.
pub struct Scene {
    pub folder: TempDir,
}

impl Scene {
    pub fn new() -> Self {
        let scene = Self { folder: tempfile::tempdir().unwrap() };
        std::fs::create_dir(scene.path("vms")).unwrap();
        std::fs::write(scene.path("image"), vec![0; 1 << 20]).unwrap();
        scene
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    /// Writes the VM's file, with its disk behind `settings`.
    pub fn configure(&self, settings: &str) {
        let (image, socket) = (self.text("image"), self.text("socket"));
        let disk = format!("[[disk]]\nname = 'root'\nimage = '{image}'\nsocket = '{socket}'\nformat = 'raw'\n");
        std::fs::write(self.path("vms/web1.toml"), format!("version = 1\n{settings}\n{disk}")).unwrap();
    }

    fn command(&self, arguments: &[&str]) -> std::process::Command {
        let mut command = command(REMOCA);
        command.args(arguments).env("REMOCA_CONFIG", self.folder.path());
        command
    }

    fn disk(&self, arguments: &[&str]) -> std::process::Command {
        self.command(&[&["disk", "--name", "web1", "--control", &self.text("web1.ctl")], arguments].concat())
    }

    pub fn control(&self) -> PathBuf {
        self.path("web1.ctl")
    }

    /// Starts the process, and waits until it serves.
    pub fn start(&self, arguments: &[&str]) -> Program {
        let mut program = Program::start(&mut self.disk(arguments), &self.path("log"));
        wait_until("the process answers", || {
            assert!(program.is_running(), "{}", program.log());
            std::os::unix::net::UnixStream::connect(self.control()).is_ok()
        });
        // An answer comes only once it serves.
        status(&self.control());
        program
    }

    /// Runs `remoca COMMAND CONTROL ARGUMENTS`. Returns its output if it succeeds.
    pub fn ask(&self, command: &str, arguments: &[&str]) -> Output {
        run_command(&mut self.command(&[&[command, &self.text("web1.ctl")], arguments].concat()))
    }
}

#[track_caller]
pub fn said(output: &Output) -> String {
    let said = String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned();
    assert!(output.status.success(), "{said}");
    said
}

fn cache(control: &Path) -> (u64, Vec<String>) {
    let status = status(control);
    (status.cache.wanted_bytes >> 20, status.servers.into_iter().map(|server| server.endpoint).collect())
}

#[test]
fn files_configure_a_process_and_a_reload_says_what_changed() {
    let scene = Scene::new();
    let server = Serve::start(scene.folder.path(), "16M");
    let other = tempfile::tempdir().unwrap();
    let other = Serve::start(other.path(), "16M");
    let host =
        |cache| format!("version = 1\n[vms]\nserver = '{}'\ncache = '{cache}'\n[serve]\nmistake = 1\n", server.address);
    std::fs::write(scene.path("remoca.toml"), host("4M")).unwrap();
    scene.configure("buffers = '32M'");
    let mut program = scene.start(&[]);
    assert_eq!(cache(&scene.control()), (4, vec![server.address.clone()]));
    assert_eq!(status(&scene.control()).disks[0].name, "root");

    // Each setting stays as it was set until it changes in a file.
    said(&scene.ask("set", &["--cache", "2M"]));
    said(&scene.ask("set", &["--server", &other.address]));
    assert!(!said(&scene.ask("upgrade", &[])).contains("->"));
    assert_eq!(cache(&scene.control()), (2, vec![other.address.clone()]));
    program.kill();
    program = scene.start(&[]);
    assert_eq!(cache(&scene.control()), (2, vec![other.address.clone()]));
    std::fs::write(scene.path("remoca.toml"), host("5M")).unwrap();
    let reloaded = said(&scene.ask("upgrade", &[]));
    assert!(reloaded.contains(&format!("web1: cache: 4M -> 5M ({}:4)", scene.text("remoca.toml"))), "{reloaded}");
    assert_eq!(cache(&scene.control()), (5, vec![other.address.clone()]));
    program.kill();
    scene.configure(&format!("cache = '3M'\nserver = ['{}', '{}']", server.address, other.address));
    program = scene.start(&[]);
    assert_eq!(cache(&scene.control()), (3, vec![server.address.clone(), other.address.clone()]));
    assert!(program.log().contains("configuration: cache: 5M -> 3M"), "{}", program.log());

    // A disk may come. None becomes another one, whose guest it would be.
    let before = std::fs::read_to_string(scene.path("vms/web1.toml")).unwrap();
    let more = |name: &str| {
        let (image, socket) = (scene.text("more"), scene.text("more.sock"));
        format!("{before}[[disk]]\nname = '{name}'\nimage = '{image}'\nsocket = '{socket}'\nformat = 'raw'\n")
    };
    let refused = |text: String, words: &str| {
        std::fs::write(scene.path("vms/web1.toml"), text).unwrap();
        expect_refusal(&scene.ask("upgrade", &[]), FAILURE, &[words, "goes on as before"]);
    };
    refused(more("b"), "disk b cannot be added: ");
    std::fs::write(scene.path("more"), vec![0; 1 << 20]).unwrap();
    std::fs::write(scene.path("vms/web1.toml"), more("b")).unwrap();
    assert!(said(&scene.ask("upgrade", &[])).contains("web1: disk b: new"));
    refused(more("c"), "would have the name c");
    let image = scene.text("more");
    refused(more("b").replace(&image, &scene.text("other")), "disk b would be ");
    refused(before.replace("root", "new"), "would have the name new");
    assert_eq!(status(&scene.control()).upgrades, 1);
    program.terminate();
}

/// Returns the sizes of the cache and of its local tier in MiB, and whether they are on.
fn sizes(control: &Path) -> (u64, u64, bool) {
    let cache = status(control).cache;
    (cache.wanted_bytes >> 20, cache.local_wanted_bytes >> 20, cache.enabled)
}

#[test]
fn what_was_set_outlives_the_change_of_another_key() {
    let scene = Scene::new();
    let server = Serve::start(scene.folder.path(), "32M");
    let configure = |settings: &str| {
        let (server, local) = (&server.address, server.local_address());
        scene.configure(&format!("server = '{server}'\nlocal-server = '{local}'\n{settings}"));
    };
    let (control, set) = (scene.control(), |arguments: &[&str]| said(&scene.ask("set", arguments)));
    let reload = || said(&scene.ask("upgrade", &[]));
    configure("cache = '4M'\nlocal = '2M'");
    let mut program = scene.start(&[]);
    assert_eq!(sizes(&control), (4, 2, true));
    set(&["--cache", "3M"]);
    configure("cache = '4M'\nlocal = '1M'");
    reload();
    assert_eq!(sizes(&control), (3, 1, true));
    program.kill();
    program = scene.start(&[]);
    assert_eq!(sizes(&control), (3, 1, true));

    // Without a reload, by the next start.
    set(&["--local", "5M"]);
    program.kill();
    configure("cache = '2M'\nlocal = '1M'");
    program = scene.start(&[]);
    assert_eq!(sizes(&control), (2, 5, true));
    set(&["--off"]);
    configure("cache = '6M'\nlocal = '1M'");
    reload();
    assert_eq!(sizes(&control), (0, 0, false));
    program.kill();
    program = scene.start(&[]);
    assert_eq!(sizes(&control), (0, 0, false));
    set(&["--on"]);
    assert_eq!(sizes(&control), (6, 5, true));

    // A tier that goes from the file, and one that no file has.
    configure("cache = '6M'");
    reload();
    assert_eq!(sizes(&control), (6, 0, true));
    set(&["--local", "1M"]);
    configure("cache = '7M'");
    reload();
    assert_eq!(sizes(&control), (7, 1, true));
    program.terminate();
    program = scene.start(&[]);
    assert_eq!(sizes(&control), (7, 1, true));
    program.terminate();
}

#[test]
fn a_broken_file_stops_nothing_that_ran_before() {
    let scene = Scene::new();
    scene.configure("cahce = '3M'");
    let file = scene.text("vms/web1.toml");
    let words = format!("{file}:2: unknown key `cahce`: did you mean `cache`?");
    expect_refusal(&run_command(&mut scene.disk(&[])), CONFIGURATION, &[&words]);
    expect_refusal(&run_command(&mut scene.disk(&["--nbd-port", "--port", "/p"])), 2, &["cannot be used with"]);
    scene.configure("buffers = '32M'");
    let mut program = scene.start(&[]);
    assert_eq!(status(&scene.control()).notice, None);

    std::fs::write(scene.path("vms/web1.toml"), "version = 1\n[[disk\n").unwrap();
    let words = [format!("{file}:2: "), "goes on as before".into()];
    expect_refusal(&scene.ask("upgrade", &[]), FAILURE, &[&words[0], &words[1]]);
    program.kill();
    program = scene.start(&[]);
    let notice = status(&scene.control()).notice.unwrap();
    assert!(notice.contains("last good copy") && notice.contains(&format!("{file}:2: ")), "{notice}");
    assert!(program.log().contains(&format!("{file}:2: ")), "{}", program.log());
    assert!(said(&scene.ask("status", &[])).contains("last good copy"));
    // Other commands are about that copy too, and say so.
    let checked = until_answered(|| scene.ask("check", &[]));
    expect_refused_finding(&checked, &format!("failed   configuration: the configuration cannot be used: {file}:2: "));
    let xml = said(&scene.ask("xml", &["--libvirt", "10.0"]));
    assert!(xml.contains("by the last good copy") && xml.contains(&scene.text("socket")), "{xml}");
    // The copy outlives the process that started with it.
    program.kill();
    program = scene.start(&[]);
    assert!(status(&scene.control()).notice.is_some());
    // A file that is missing is a mistake as well.
    std::fs::remove_file(scene.path("vms/web1.toml")).unwrap();
    let missing = format!("no disk: there is no {file}: ");
    expect_refusal(&scene.ask("upgrade", &[]), FAILURE, &[&missing, "goes on as before"]);
    program.kill();
    program = scene.start(&[]);
    let notice = status(&scene.control()).notice.unwrap();
    assert!(notice.contains("last good copy") && notice.contains(&missing), "{notice}");
    scene.configure("buffers = '48M'");
    let pending = "warning  configuration: not in effect yet: buffers: 32M -> 48M";
    expect_refused_finding(&until_answered(|| scene.ask("check", &[])), pending);
    assert!(said(&scene.ask("upgrade", &[])).contains("web1: buffers: 32M -> 48M"));
    assert_eq!(status(&scene.control()).notice, None);
    program.terminate();
}

/// Returns the line of `remoca check` about the configuration, or an empty one if there is none.
fn checked_configuration(scene: &Scene) -> String {
    let found = until_answered(|| scene.ask("check", &[])).stdout;
    let found = String::from_utf8(found).unwrap();
    found.lines().find(|line| line.contains(" configuration: ")).unwrap_or_default().to_owned()
}

/// Nobody is sent to an upgrade that is refused. Without its file, the VM has no disks after a boot of the host.
#[test]
fn a_change_that_an_upgrade_would_refuse_is_said_to_be_one() {
    let scene = Scene::new();
    scene.configure("");
    let mut program = scene.start(&[]);
    let mut guest = TestGuest::new(Options::default());
    guest.connect(&scene.path("socket")).unwrap();
    assert_eq!(guest.run(0, Command::Read { sector: 0, length: 4096 }), 0);
    let file = scene.path("vms/web1.toml");
    let good = std::fs::read_to_string(&file).unwrap();
    let more =
        format!("[[disk]]\nname = 'b'\nformat = 'raw'\nimage = '/no/such/image'\nsocket = '{}'\n", scene.text("b"));
    let is_missing = format!("no disk: there is no {}: ", file.display());
    std::fs::write(scene.path("other"), vec![0; 1 << 20]).unwrap();
    for (text, level, words) in [
        (None, "failed", &*is_missing),
        (Some(format!("{good}{more}")), "failed", "disk b cannot be added: "),
        (Some(good.replace(&scene.text("image"), &scene.text("other"))), "warning", "disk root would be "),
        (Some(good.replace(&scene.text("socket"), &scene.text("else"))), "warning", "the socket of root would be "),
        (Some(good.replace("'root'", "'new'")), "warning", "would have the name new"),
        (Some(format!("{good}read-only = true\n")), "warning", "root would not offer flush"),
    ] {
        std::fs::remove_file(&file).unwrap_or_default();
        text.iter().for_each(|text| std::fs::write(&file, text).unwrap());
        let found = checked_configuration(&scene);
        assert!(found.starts_with(&format!("{level:<8} configuration: not in effect yet: ")), "{found}");
        assert!(found.contains(words) && !found.contains("takes it up under"), "{found}");
        let xml = said(&scene.ask("xml", &["--libvirt", "10.0"]));
        assert!(xml.contains("would be refused: ") && xml.contains(words), "{xml}");
        assert!(!scene.ask("upgrade", &[]).status.success());
        assert!(guest.is_connected() && !scene.path("b").exists());
    }
    // What a killed process left is there for its guest.
    drop(std::os::unix::net::UnixListener::bind(scene.path("b")).unwrap());
    std::fs::write(&file, format!("{good}{more}").replace("/no/such/image", &scene.text("other"))).unwrap();
    let found = checked_configuration(&scene);
    assert!(found.contains("takes it up under") && scene.path("b").exists(), "a check changes nothing: {found}");
    std::fs::write(&file, format!("{good}swap = true\n")).unwrap();
    let found = checked_configuration(&scene);
    assert!(found.starts_with("warning  configuration: not in effect yet: "), "{found}");
    assert!(found.ends_with("`remoca upgrade web1` takes it up under the running guest"), "{found}");
    said(&scene.ask("upgrade", &[]));
    assert_eq!(checked_configuration(&scene), "ok       configuration: is in effect");
    program.terminate();
}

/// Settings that are right one by one: a reload refuses them, and a process that was killed starts without them.
#[test]
fn files_with_which_no_process_could_start_stop_nothing_that_ran_before() {
    let scene = Scene::new();
    let port = |name: &str| format!("port = '{}'\n", scene.text(name));
    scene.configure(&port("port"));
    let mut program = scene.start(&[]);
    let good = std::fs::read_to_string(scene.path("vms/web1.toml")).unwrap();
    let more = |image: &str| format!("{good}[[disk]]\nname = 'more'\nformat = 'raw'\nimage = '{image}'\n");
    let with = |setting: &str| good.replace("port =", &format!("{setting}\nport ="));
    let server = "server = ['tcp:127.0.0.1:1', 'tcp:127.0.0.1:1']";
    let long = more(&scene.text("image")).replace("more", &"x".repeat(21)) + "socket = '/s'";
    let cases = [
        (with(server), "is given twice"),
        (with("incoming = 'tcp:127.0.0.1:1'"), "it has its disks"),
        (with("server = 'tcp:127.0.0.1:1'\ncache = '9T'"), "4 TiB is the limit"),
        (format!("{good}queues = 65"), "1 to 64"),
        (format!("{good}on-loss = 'fail'"), "are for NBD images"),
        (long, "is longer than 20 bytes"),
        (good.replace(&port("port"), &port("port2")), "the socket of the port would be"),
        (good.replace(&scene.text("socket"), &scene.text("socket2")), "the socket of root would be"),
        (with("nbd = 'unix:/no/such/nbd'") + &more(&scene.text("image"))[good.len()..], "/no/such/nbd"),
    ];
    for (text, words) in cases {
        std::fs::write(scene.path("vms/web1.toml"), text).unwrap();
        expect_refusal(&scene.ask("upgrade", &[]), FAILURE, &[words, "goes on as before"]);
    }
    assert!(program.is_running() && status(&scene.control()).upgrades == 0);
    std::fs::write(scene.path("vms/web1.toml"), good.replace(&port("port"), "")).unwrap();
    said(&scene.ask("upgrade", &[]));
    std::fs::write(scene.path("vms/web1.toml"), good.replace(&scene.text("port"), "/no/such/port")).unwrap();
    expect_refusal(&scene.ask("upgrade", &[]), FAILURE, &["/no/such/port", "goes on as before"]);
    let new_disk = more("/no/such/image") + &format!("socket = '{}'\n", scene.text("more"));
    let incoming = with("incoming = 'tcp:127.0.0.1:1'\nincoming-key = '/no/such/key'");
    for (text, words) in
        [(with(server), "is given twice"), (new_disk, "/no/such/image"), (incoming, "it had its disks")]
    {
        program.kill();
        std::fs::write(scene.path("vms/web1.toml"), text).unwrap();
        program = scene.start(&[]);
        let now = status(&scene.control());
        assert!(now.notice.as_ref().is_some_and(|notice| notice.contains(words)), "{:?}", now.notice);
        assert_eq!((now.disks.len(), now.disks[0].name.as_str()), (1, "root"));
    }
    program.terminate();
}

#[test]
fn a_terminal_obeys_no_name_of_a_file() {
    let scene = Scene::new();
    for name in ["one", "two"] {
        let disk = "version = 1\n[[disk]]\nimage = \"/i\\u001b[2J\"\nsocket = \"/s\\u001b[2J\"\n";
        std::fs::write(scene.path(&format!("vms/{name}.toml")), disk).unwrap();
    }
    std::fs::write(scene.path("vms/a\u{1b}[2J\nb.toml"), "version = 1\n").unwrap();
    let control = scene.text("c\u{1b}[2J.ctl");
    for arguments in [&["config", "check"][..], &["check"], &["status", &control], &["top", "--once", &control]] {
        let output = run_command(&mut scene.command(arguments));
        let said = [output.stdout, output.stderr].concat();
        assert!(
            !said.is_empty() && !said.contains(&0x1b),
            "{arguments:?}: {}",
            String::from_utf8_lossy(&said).escape_debug()
        );
    }
}

/// Each later start would fail, with the last good copy as well.
#[test]
fn a_state_file_that_is_open_to_others_is_refused_before_a_process_depends_on_it() {
    let scene = Scene::new();
    scene.configure("");
    let mut program = scene.start(&[]);
    let state = scene.path("other.state");
    std::fs::write(&state, "").unwrap();
    std::fs::set_permissions(&state, Permissions::from_mode(0o644)).unwrap();
    scene.configure(&format!("state = '{}'", state.display()));
    let advice = format!("chmod 600 {}", state.display());
    let check = || run_command(&mut scene.command(&["config", "check"]));
    let said_of_check = String::from_utf8(check().stdout).unwrap();
    assert!(said_of_check.contains("(mode 644)") && said_of_check.contains(&advice), "{said_of_check}");
    expect_refusal(&scene.ask("upgrade", &[]), FAILURE, &["(mode 644)", &advice, "goes on as before"]);
    assert!(program.is_running() && status(&scene.control()).upgrades == 0);
    program.terminate();
    std::fs::remove_file(scene.path("web1.config")).unwrap();
    expect_refusal(&run_command(&mut scene.disk(&[])), CONFIGURATION, &["(mode 644)", &advice]);
    std::fs::set_permissions(&state, Permissions::from_mode(0o600)).unwrap();
    said(&check());
    scene.start(&[]).terminate();
}

/// The guest may still run, and connect again by itself: to its own image, not to one that the file names since.
#[test]
fn a_killed_process_never_starts_with_another_image_for_its_guest() {
    let scene = Scene::new();
    scene.configure("");
    std::fs::write(scene.path("other"), vec![1; 1 << 20]).unwrap();
    let mut program = scene.start(&[]);
    let good = std::fs::read_to_string(scene.path("vms/web1.toml")).unwrap();
    let other = good.replace(&scene.text("image"), &scene.text("other"));
    std::fs::write(scene.path("vms/web1.toml"), &other).unwrap();
    expect_refusal(&scene.ask("upgrade", &[]), FAILURE, &["disk root would be ", "goes on as before"]);
    program.kill();
    program = scene.start(&[]);
    let now = status(&scene.control());
    let words = format!("disk root would be {} in place of {}", scene.text("other"), scene.text("image"));
    assert!(now.notice.as_ref().is_some_and(|notice| notice.contains(&words)), "{:?}", now.notice);
    assert_eq!(now.disks[0].image, scene.text("image"));
    // It would see another disk, or be disconnected for good.
    for (settings, words) in [
        ("sector = 4096", "root would not offer sectors of 512 bytes"),
        ("read-only = true", "root would not offer flush"),
        ("queues = 1", "root would not offer several queues"),
        ("socket = 'elsewhere'", "the socket of root would be elsewhere"),
    ] {
        let key = settings.split(' ').next().unwrap();
        let kept = good.lines().filter(|line| !line.starts_with(key)).collect::<Vec<_>>().join("\n");
        std::fs::write(scene.path("vms/web1.toml"), format!("{kept}\n{settings}\n")).unwrap();
        program.kill();
        program = scene.start(&[]);
        let notice = status(&scene.control()).notice.unwrap_or_default();
        assert!(notice.contains(words) && notice.contains("last good copy"), "{settings}: {notice}");
    }
    // An image that is no longer there was moved.
    program.kill();
    std::fs::rename(scene.path("image"), scene.path("moved")).unwrap();
    std::fs::write(scene.path("vms/web1.toml"), good.replace(&scene.text("image"), &scene.text("moved"))).unwrap();
    program = scene.start(&[]);
    assert_eq!(
        (status(&scene.control()).notice, status(&scene.control()).disks[0].image.clone()),
        (None, scene.text("moved"))
    );
    // One that is told to end under its guest leaves it as a kill does.
    let guest = UnixStream::connect(scene.path("socket")).unwrap();
    wait_until("it is attached", || status(&scene.control()).disks[0].attached);
    program.terminate();
    std::fs::write(scene.path("vms/web1.toml"), &other).unwrap();
    drop(guest);
    program = scene.start(&[]);
    let now = status(&scene.control());
    assert!(now.notice.as_ref().is_some_and(|notice| notice.contains("disk root would be ")), "{:?}", now.notice);
    assert_eq!(now.disks[0].image, scene.text("moved"));
    // The way to change an image.
    program.terminate();
    program = scene.start(&[]);
    assert_eq!(status(&scene.control()).disks[0].image, scene.text("other"));
    program.terminate();
}

/// Whoever listens first would get the other's guest when that connects again, with a disk that it may write to.
#[test]
fn an_address_that_two_vms_name_is_found_and_not_taken_while_a_guest_may_come_back() {
    let scene = Scene::new();
    std::fs::write(scene.path("image2"), vec![1; 1 << 20]).unwrap();
    let shared = scene.text("shared");
    for (name, image) in [("web1", "image"), ("web2", "image2")] {
        let disk = format!("[[disk]]\nname = 'root'\nimage = '{}'\nformat = 'raw'\n", scene.text(image));
        let file = format!("version = 1\nnbd = ['unix:{shared}']\n{disk}");
        std::fs::write(scene.path(&format!("vms/{name}.toml")), file).unwrap();
    }
    let [first, second] = ["web1", "web2"].map(|name| scene.text(&format!("vms/{name}.toml")));
    for (names, this, other) in [(&["web1"][..], &first, &second), (&["web2"], &second, &first), (&[], &second, &first)]
    {
        let checked = run_command(&mut scene.command(&[&["config", "check"], names].concat()));
        let found = format!("{this}:2: {shared} is also used by `nbd` at {other}:2\n");
        assert_eq!((String::from_utf8(checked.stdout).unwrap(), checked.status.code()), (found, Some(FAILURE)));
    }

    let control = scene.text("web2.ctl");
    let other = || scene.command(&["disk", "--name", "web2", "--control", &control]);
    let mut program = scene.start(&[]);
    let words = format!("unix:{shared} is where the guest of web1 connects");
    expect_refusal(&run_command(&mut other()), CONFIGURATION, &[&words, "remoca forget web1"]);
    program.kill();
    expect_refusal(&run_command(&mut other()), CONFIGURATION, &[&words]);
    program = scene.start(&[]);
    assert_eq!(status(&scene.control()).disks[0].image, scene.text("image"));
    program.terminate();
    // As if a guest had been attached.
    left::leave(&scene.control()).unwrap();
    expect_refusal(&run_command(&mut other()), CONFIGURATION, &[&words]);
    left::remove(&scene.control());
    let mut program = Program::start(&mut other(), &scene.path("log2"));
    wait_until("the process answers", || {
        assert!(program.is_running(), "{}", program.log());
        UnixStream::connect(&control).is_ok()
    });
    assert_eq!(status(Path::new(&control)).disks[0].image, scene.text("image2"));
    program.terminate();
}

/// Nor does a process that runs.
#[test]
fn an_upgrade_takes_no_address_where_the_guest_of_a_killed_process_connects_again() {
    let scene = Scene::new();
    let (shared, control) = (scene.text("shared"), scene.text("web2.ctl"));
    let [second, third] = ["image2", "image3"].map(|name| {
        std::fs::write(scene.path(name), vec![1; 1 << 20]).unwrap();
        format!("[[disk]]\nname = '{name}'\nimage = '{}'\nformat = 'raw'\nsocket = '{shared}'\n", scene.text(name))
    });
    std::fs::write(scene.path("vms/web2.toml"), format!("version = 1\n{second}")).unwrap();
    let mut other = scene.command(&["disk", "--name", "web2", "--control", &control]);
    let mut killed = Program::start(&mut other, &scene.path("log2"));
    wait_until("the process answers", || {
        assert!(killed.is_running(), "{}", killed.log());
        UnixStream::connect(&control).is_ok()
    });
    status(Path::new(&control));
    killed.kill();
    scene.configure("");
    let mut program = scene.start(&[]);
    let file = scene.path("vms/web1.toml");
    let good = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, format!("{good}{third}")).unwrap();
    let words = format!("unix:{shared} is where the guest of web2 connects");
    let found = checked_configuration(&scene);
    assert!(found.contains(&words), "{found}");
    expect_refusal(&scene.ask("upgrade", &[]), FAILURE, &[&words, "goes on as before"]);
    assert!(scene.path("shared").exists(), "it is the sign of a kill");
    program.terminate();
}

/// A former version let two VMs have one, and the other one is gone for good.
#[test]
fn a_killed_process_starts_again_at_its_address_though_another_vm_had_it() {
    let scene = Scene::new();
    scene.configure("");
    scene.start(&[]).kill();
    let kept = std::fs::read_to_string(scene.path("web1.config")).unwrap();
    std::fs::write(scene.path("gone.config"), kept.replace("web1.toml", "gone.toml")).unwrap();
    drop(std::os::unix::net::UnixListener::bind(scene.path("gone.ctl")).unwrap());
    let mut program = scene.start(&[]);
    program.terminate();
    let words = format!("unix:{} is where the guest of gone connects", scene.text("socket"));
    expect_refusal(&run_command(&mut scene.disk(&[])), CONFIGURATION, &[&words]);
}

/// What is not known of it is not taken for what the file says.
#[test]
fn a_process_that_does_not_say_which_disks_it_has_is_not_upgraded() {
    let scene = Scene::new();
    scene.configure("");
    std::fs::write(scene.path("other"), vec![1; 1 << 20]).unwrap();
    let mut program = scene.start(&[]);
    let mut guest = TestGuest::new(Options::default());
    guest.connect(&scene.path("socket")).unwrap();
    let good = std::fs::read_to_string(scene.path("vms/web1.toml")).unwrap();
    let other = good.replace(&scene.text("image"), &scene.text("other"));
    std::fs::write(scene.path("vms/web1.toml"), other).unwrap();
    let is_refused = || {
        let log = program.log();
        log.contains("cannot ask the running process which disks it has: 16 others are being served")
    };
    wait_until("the reload is refused", || {
        // They leave no place for the program that is asked, as long as the process waits for what they say.
        let _silent: Vec<_> = (0..CLIENTS_MAX).map(|_| UnixStream::connect(scene.control()).unwrap()).collect();
        program.signal(Signal::HUP);
        let until = Instant::now() + SILENT_TIME_MAX;
        while !is_refused() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        is_refused()
    });
    assert!(guest.is_connected());
    assert_eq!(guest.run(0, Command::Read { sector: 0, length: 4096 }), 0);
    // The process has a thread for each of them, which has to notice that it has gone.
    wait_until("there is a place again", || ask_raw(&scene.control(), b"{\"op\":\"status\"}\n").contains("\"pid\""));
    let now = status(&scene.control());
    assert_eq!((now.upgrades, now.disks[0].image.clone()), (0, scene.text("image")));
    program.terminate();
}

/// Expects a line of `remoca check`, whatever else it finds.
#[track_caller]
fn expect_refused_finding(output: &Output, line: &str) {
    let found = String::from_utf8_lossy(&output.stdout);
    assert!(found.lines().any(|found| found.starts_with(line)), "`{line}` is missing in {found}");
}

/// Of a process that runs: by flags, as it was set, by its files, and by files that have changed since.
#[test]
fn the_settings_of_a_running_process_are_shown_with_their_origin() {
    let scene = Scene::new();
    std::fs::write(scene.path("remoca.toml"), "version = 1\n[vms]\nserver = 'unix:/s'\nno-hedge = true\n").unwrap();
    scene.configure("cache = '4M'\nguest-memory = '2G'");
    let mut program = scene.start(&["--buffers", "32M", "--no-hedge=false"]);
    let show = || said(&run_command(&mut scene.command(&["config", "show", &scene.text("web1.ctl"), "--origin"])));
    let [vm, host] = ["vms/web1.toml", "remoca.toml"].map(|name| scene.text(name));
    let expect = |lines: &[String]| {
        let shown = show();
        for line in lines {
            assert!(shown.lines().any(|shown| shown == line), "`{line}` is missing in {shown}");
        }
    };
    let from = |value: &str, origin: &str| format!("{value}    # {origin}");
    let lasting = [
        from("server = [\"unix:/s\"]", &format!("{host}:3")),
        from("buffers = \"32M\"", "flag"),
        from("no-hedge = false", "flag"),
        from("nbd-settle = 3", "default"),
        from("[[disk]]", &format!("{vm}:4")),
    ];
    expect(&lasting);
    expect(&[from("cache = \"4M\"", &format!("{vm}:2"))]);
    said(&scene.ask("set", &["--cache", "2M"]));
    let set = from("cache = \"2M\"", "`remoca set`");
    expect(std::slice::from_ref(&set));
    // The process goes on by what it has read.
    scene.configure("cache = '4M'\nguest-memory = '3G'");
    expect(&[set.clone(), "# not in effect yet: guest-memory: 2G -> 3G (".to_owned() + &vm + ":3)"]);
    expect(&[from("guest-memory = \"2G\"", &format!("{vm}:3"))]);
    std::fs::write(&vm, "version = 1\ncahce = 1\n").unwrap();
    expect(&[set]);
    let shown = show();
    assert!(shown.contains(&format!("# not in effect yet: the configuration cannot be used: {vm}:2: ")), "{shown}");
    expect(&lasting);
    program.terminate();
    let refused = run_command(&mut scene.command(&["config", "show", &scene.text("web1.ctl")]));
    expect_refusal(&refused, FAILURE, &["no VM process answers at"]);
    let shown = run_command(&mut scene.command(&["config", "show", "wbe1"]));
    let warning = String::from_utf8_lossy(&shown.stderr);
    assert!(shown.status.success() && warning.contains(&scene.text("vms/wbe1.toml")), "a mistyped name: {warning}");
}

#[test]
fn what_a_guest_writes_does_not_change_what_its_image_is() {
    let scene = Scene::new();
    let image = scene.text("image");
    std::fs::write(&image, [&b"QFI\xfb\0\0\0\x03"[..], &[0; 65_528]].concat()).unwrap();
    let disk = format!("image={image},socket={}", scene.text("socket"));
    let words = ["looks like a qcow2 image", "qemu-img convert", "format=raw"];
    expect_refusal(&run_command(&mut scene.disk(&["--disk", &disk])), NO_IMAGE, &words);
    let mut program = scene.start(&["--disk", &format!("{disk},format=raw")]);
    program.terminate();
    std::fs::remove_file(scene.path("web1.config")).unwrap();
    std::fs::remove_file(scene.path("web1.state")).unwrap();

    std::fs::write(&image, [0; 65_536]).unwrap();
    program = scene.start(&["--disk", &disk]);
    let mut guest = TestGuest::new(Options::default());
    guest.connect(&scene.path("socket")).unwrap();
    let mut sector = [0; 512];
    sector[..4].copy_from_slice(b"QFI\xfb");
    assert_eq!(guest.run(0, Command::Write { sector: 0, data: &sector }), 0);
    assert!(said(&scene.ask("upgrade", &[])).contains("runs version"));
    // Killed and started again; with and without what the first process left beside its state.
    for left in ["web1.state", "web1.config"] {
        program.kill();
        std::fs::remove_file(scene.path(left)).unwrap();
        program = scene.start(&["--disk", &disk]);
    }
    program.terminate();
}

/// A process that served an image goes on with it, whatever became of its size: empty, or no whole number of sectors.
#[test]
fn an_image_that_changed_its_size_stops_neither_an_upgrade_nor_a_restart() {
    let scene = Scene::new();
    scene.configure("");
    let file = std::fs::read_to_string(scene.path("vms/web1.toml")).unwrap() + "sector = 4096\n";
    std::fs::write(scene.path("vms/web1.toml"), file).unwrap();
    let mut program = scene.start(&[]);
    for bytes in [0, (1 << 20) + 612] {
        std::fs::File::options().write(true).open(scene.path("image")).unwrap().set_len(bytes).unwrap();
        said(&run_command(&mut scene.command(&["disk", "rescan", &scene.text("web1.ctl")])));
        said(&scene.ask("upgrade", &[]));
        program.kill();
        program = scene.start(&[]);
        assert_eq!(status(&scene.control()).disks[0].bytes, bytes - bytes % 512);
        let mut guest = TestGuest::new(Options::default());
        guest.connect(&scene.path("socket")).unwrap();
        assert_eq!(guest.capacity().unwrap(), bytes - bytes % 4096);
    }
    program.terminate();
    // One that nobody had before is refused.
    std::fs::remove_file(scene.path("web1.config")).unwrap();
    std::fs::remove_file(scene.path("web1.state")).unwrap();
    expect_refusal(&run_command(&mut scene.disk(&[])), NO_IMAGE, &["which is not a multiple of the 512-byte sector"]);
}

/// A service that cannot start is not started again five times a second.
#[test]
fn what_is_missing_is_said_once_or_tried_slowly() {
    let scene = Scene::new();
    let notices = UnixDatagram::bind(scene.path("notices")).unwrap();
    let start = |arguments: &[&str]| run_command(scene.disk(arguments).env("NOTIFY_SOCKET", scene.path("notices")));
    let disk = format!("image={},socket=/no/such/folder/socket", scene.text("image"));
    let missing = format!("image=/no/such/image,socket={}", scene.text("socket"));
    expect_refusal(&start(&["--disk", &missing]), NO_IMAGE, &["/no/such/image", "this is not tried again"]);
    expect_refusal(&start(&["--disk", &disk]), 73, &["/no/such/folder/socket", "this is not tried again"]);
    expect_refusal(&start(&[]), CONFIGURATION, &["no disk: there is no ", "vms/web1.toml", "this is not tried again"]);
    // Each ends the unit, and none is tried five times a second.
    let [image, socket, long] = [scene.text("image"), scene.text("socket"), "x".repeat(5000)];
    let good = format!("image={image},socket={socket}");
    // Anyone can read it.
    let open_key = image.clone();
    for (arguments, code, word) in [
        (&["--disk", &good, "--trace", "/no/such/folder/trace"][..], CONFIGURATION, "trace"),
        (&["--disk", &good, "--incoming", "tcp:127.0.0.1:7100"], CONFIGURATION, "--incoming-key"),
        (
            &["--disk", &good, "--incoming", "tcp:127.0.0.1:7100", "--incoming-key", "/no/such/key"],
            CONFIGURATION,
            "key",
        ),
        (
            &["--disk", &good, "--incoming", "tcp:127.0.0.1:7100", "--incoming-key", &open_key],
            CONFIGURATION,
            "chmod 600",
        ),
        (
            &["--disk", &good, "--incoming", "tcp:127.0.0.1:7100", "--incoming-key", "credential:k"],
            CONFIGURATION,
            "CREDENTIALS_DIRECTORY",
        ),
        (&["--disk", &good, "--disk", &good], CONFIGURATION, "given twice"),
        (&["--disk", &good, "--nbd", "unix:/n"], CONFIGURATION, "nothing to offer"),
        (&["--image", &image, "--nbd", "systemd"], CONFIGURATION, "no socket was passed"),
        (&["--image", &image, "--nbd", "systemd", "--nbd", "systemd"], CONFIGURATION, "say it once"),
        (&["--disk", &format!("image={image},name={long}"), "--nbd", "systemd"], CONFIGURATION, "name"),
        (&["--disk", &good, "--server", "unix:/s", "--cache", "1K"], CONFIGURATION, "1024 bytes"),
        (&["--disk", &good, "--port", &socket], CONFIGURATION, "given twice"),
        (&["--disk", &format!("image=nbd://,socket={socket}")], CONFIGURATION, "nbd://"),
        (&["--disk", &format!("image=http://a,socket={socket}")], NO_IMAGE, "http://a"),
        (&["--disk", &format!("{good},sector=4096,write-through")], CONFIGURATION, "for NBD images"),
        (&["--disk", &format!("image={image},socket={}", scene.text(&long[..120]))], 73, "at most 107"),
    ] {
        expect_refusal(&start(arguments), code, &[word, "this is not tried again"]);
    }
    for (setting, word) in [
        ("nbd-port = true", "`nbd` is missing: `nbd-port` needs it"),
        ("port = '/p'\nnbd-port = true\nnbd = 'unix:/n'", "nbd-port"),
    ] {
        scene.configure(setting);
        expect_refusal(&start(&[]), CONFIGURATION, &[word, "this is not tried again"]);
    }
    let serve = |arguments: &[&str]| {
        let mut command =
            scene.command(&[&["serve", "--listen", "unix:/no/such/folder/s", "--no-lock"], arguments].concat());
        run_command(command.env("NOTIFY_SOCKET", scene.path("notices")))
    };
    for (arguments, word) in [
        (&["--memory", "2M"][..], "the folder does not exist"),
        (&["--memory", "3000K"], "multiple of 2 MiB"),
        (&["--memory", "2M", "--quota", "4M"], "--quota"),
        (&["--memory", "2M", "--threads", "0"], "--threads"),
        (&["--memory", "2M", "--listen", "unix:/no/such/folder/s"], "--listen unix:/no/such/folder/s is given twice"),
        (&[], "no memory to serve"),
    ] {
        expect_refusal(&serve(arguments), CONFIGURATION, &[word, "this is not tried again"]);
    }

    scene.configure("");
    let mut program = scene.start(&[]);
    program.kill();
    std::fs::rename(scene.path("image"), scene.path("moved")).unwrap();
    let refused = start(&[]);
    let words = ["is its storage mounted?", "a guest may wait for its disks", "every 5 seconds"];
    expect_refusal(&refused, FAILURE, &words);
    let text = String::from_utf8_lossy(&refused.stderr);
    assert!(!text.contains("truncate"), "an image of zeroes is no help: {text}");
    // The group may be unknown for a moment only, and then the last good copy is of no use either.
    scene.configure("socket-group = 'no-such-group'");
    let copy = std::fs::read_to_string(scene.path("web1.config")).unwrap();
    let copy = copy.replace("version = 1", "version = 1\\nsocket-group = 'no-such-group'");
    std::fs::write(scene.path("web1.config"), copy).unwrap();
    expect_refusal(&start(&[]), FAILURE, &["no-such-group", "cannot be used either", "every 5 seconds"]);
    drop(notices);
}

/// A flag stays before the file, so a change there is none of the process: neither now nor after an upgrade.
#[test]
fn what_a_flag_displaces_is_announced_by_nobody() {
    let scene = Scene::new();
    scene.configure("cache = '3M'\nbuffers = '32M'");
    let mut program = scene.start(&["--cache", "2M"]);
    scene.configure("cache = '4M'\nbuffers = '32M'");
    let checked = until_answered(|| scene.ask("check", &[]));
    let checked = String::from_utf8_lossy(&checked.stdout);
    assert!(checked.contains("configuration: is in effect") && !checked.contains("3M -> 4M"), "{checked}");
    let shown = run_command(&mut scene.command(&["config", "show", &scene.text("web1.ctl")]));
    assert!(!said(&shown).contains("not in effect yet"), "{shown:?}");
    assert!(!said(&scene.ask("upgrade", &[])).contains("->"));
    program.kill();
    scene.configure("cache = '5M'\nbuffers = '48M'");
    program = scene.start(&["--cache", "2M"]);
    let log = program.log();
    assert!(log.contains("configuration: buffers: 32M -> 48M") && !log.contains("4M -> 5M"), "{log}");
    program.terminate();
}

/// Nothing takes room that nobody uses, where there is none.
#[test]
fn a_copy_for_which_there_is_no_room_leaves_nothing_behind() {
    let scene = Scene::new();
    let Some(run) = Small::mount(&scene.path("run"), "8K") else {
        return leave_out("this user may not mount a file system in memory");
    };
    scene.configure("");
    std::fs::write(run.0.join("other"), vec![0; 8192]).unwrap();
    let control = run.0.join("web1.ctl");
    let (control, state) = (control.to_str().unwrap(), scene.text("state"));
    let mut disk = scene.command(&["disk", "--name", "web1", "--control", control, "--state", &state]);
    let mut program = Program::start(&mut disk, &scene.path("log"));
    wait_until("it says so", || program.log().contains("has no copy of the configuration"));
    status(Path::new(control));
    let mut names: Vec<_> = std::fs::read_dir(&run.0).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["other", "web1.ctl"]);
    program.terminate();
}

/// What no process can have is a mistake, and what only a unit cannot have is none.
#[test]
fn names_of_files_that_no_process_can_have_are_mistakes() {
    let scene = Scene::new();
    scene.configure("");
    let text = std::fs::read_to_string(scene.path("vms/web1.toml")).unwrap();
    std::fs::remove_file(scene.path("vms/web1.toml")).unwrap();
    let long = "x".repeat(120);
    for (name, is_mistake, words) in [
        ("--help", true, "1: invalid VM name `--help`: the unit's command would"),
        ("a\nb", true, "1: invalid VM name `a\\nb`: "),
        (&*long, true, "1: a VM name of 120 bytes: at most "),
        ("my web", false, " note: no unit can have this name: a unit remoca-disk@NAME has letters"),
        ("wéb", false, " note: no unit can have this name: "),
        ("a.b:c_d-1", false, "no mistakes, files: 1"),
    ] {
        let file = scene.path("vms").join(format!("{name}.toml"));
        std::fs::write(&file, &text).unwrap();
        let mut check = scene.command(&["config", "check"]);
        let output = run_command(check.env("XDG_RUNTIME_DIR", "/run"));
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!((output.status.success(), said.contains(words)), (!is_mistake, true), "{name}: {said}");
        std::fs::remove_file(&file).unwrap();
    }
}

/// `remoca check` finds what `remoca check NAME` does, at the same level.
#[test]
fn mistakes_in_files_are_found_with_and_without_a_name() {
    let scene = Scene::new();
    scene.configure("");
    std::fs::create_dir(scene.path("remoca")).unwrap();
    let control = scene.text("remoca/web1.ctl");
    let mut disk = scene.command(&["disk", "--name", "web1", "--control", &control]);
    let mut program = Program::start(&mut disk, &scene.path("log"));
    wait_until("the process answers", || std::os::unix::net::UnixStream::connect(&control).is_ok());
    status(Path::new(&control));
    if with_run(&scene.path("remoca")).is_none() {
        return leave_out("this user may not mount a file system in memory");
    }
    let check = |name: Option<&str>| -> Vec<(String, String)> {
        let output = until_answered(|| {
            let mut command = with_run(&scene.path("remoca")).unwrap();
            command.args([REMOCA, "check", "-o", "json"]).args(name).env("REMOCA_CONFIG", scene.folder.path());
            run_command(&mut command)
        });
        let findings: Vec<serde_json::Value> =
            serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
        let is_failed = findings.iter().any(|finding| finding["level"] == "failed");
        assert_eq!(output.status.success(), !is_failed, "{findings:#?}");
        let findings = findings.iter().filter(|finding| finding["what"] == "configuration");
        let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
        findings.map(|finding| (text(&finding["level"]), text(&finding["found"]))).collect()
    };
    assert_eq!(check(None), []);
    assert_eq!(check(Some("web1")), [("ok".to_owned(), "is in effect".to_owned())]);
    scene.configure("buffers = '32M'");
    assert_eq!(
        check(None),
        [("warning".to_owned(), "not in effect yet: buffers: 32M (".to_owned() + &scene.text("vms/web1.toml") + ":2)")]
    );
    assert_eq!(check(None), check(Some("web1")));
    std::fs::remove_file(scene.path("vms/web1.toml")).unwrap();
    let found = check(None);
    assert!(found.len() == 1 && found[0].0 == "failed" && found[0].1.contains("no disk: there is no "), "{found:?}");
    assert_eq!(found, check(Some("web1")));
    scene.configure("cahce = '3M'");
    let found = check(None);
    assert!(found.len() == 1 && found[0].0 == "failed" && found[0].1.contains("web1.toml:2: unknown key"), "{found:?}");
    assert_eq!(found, check(Some("web1")));
    // Of a VM that does not run, and of the memory server.
    scene.configure("");
    std::fs::write(scene.path("vms/web2.toml"), "version = 1\nbufers = '32M'\n").unwrap();
    std::fs::write(scene.path("remoca.toml"), "version = 1\n[serve]\nmistake = 1\n").unwrap();
    let found = check(None);
    assert!(found.len() == 2 && found.iter().all(|(level, _)| level == "failed"), "{found:?}");
    assert!(found[0].1.contains("remoca.toml:3: ") && found[1].1.contains("web2.toml:2: "), "{found:?}");
    assert_eq!(check(Some("web1")), [("ok".to_owned(), "is in effect".to_owned())]);
    program.terminate();
}

/// A log without its errors hides what is wrong.
#[test]
fn a_log_level_that_is_none_is_named_and_hides_nothing() {
    let scene = Scene::new();
    scene.configure("");
    for (value, times) in [("", 0), ("debg", 1), ("remoca_io=error", 0)] {
        let log = scene.path(&format!("log of {value}"));
        let mut program = Program::start(scene.disk(&[]).env("REMOCA_LOG", value), &log);
        wait_until("it says what it serves", || program.log().contains("serves the disks of web1"));
        let log = program.log();
        assert_eq!(log.matches("is not understood").count(), times, "`{value}`: {log}");
        program.terminate();
    }
}
