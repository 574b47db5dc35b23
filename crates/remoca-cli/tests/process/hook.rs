//! The package's hook for libvirt, run as libvirt runs it, with a real VM process and a `systemctl` of the test.

use super::configuration::Scene;
use super::migration::key;
use super::support::program::{REMOCA, Signal, command, install, run_command, status};
use super::support::wait_until;
use remoca_frontend::testing::{Options, TestGuest};
use remoca_io::control::left;
use std::fs::{self, File};
use std::time::{Duration, SystemTime};

const HOOK: &str = include_str!("../../../../packaging/libvirt-hook");

/// Takes the name after `--` for the control socket in `FOLDER`.
const PROGRAM: &str = r#"#!/bin/sh
words=
until [ "$1" = -- ]; do
    words="$words $1"
    shift
done
exec 'REMOCA' $words "FOLDER/$2.ctl"
"#;
/// The unit is in the state `state`, or `after` once something was asked, which ends with the exit code `result`.
const SYSTEMCTL: &str = r#"#!/bin/sh
cd 'FOLDER'
[ "$1" != is-active ] || exec cat state
echo "$*" >> asked
[ ! -e after ] || mv after state
exit "$(cat result)"
"#;

const JOURNALCTL: &str = "#!/bin/sh\necho \"what is logged: $*\"\n";

const DISK: &str = "<disk type='vhostuser' device='disk'>";
const CARD: &str = "<interface type='vhostuser'>";
const EXPORT: &str = "<source protocol='nbd' name='root' index='1'>";

const NOTHING: (Option<i32>, &str) = (Some(0), "");
const STARTED: (Option<i32>, &str) = (Some(0), "start remoca-disk@web1.service\n");
const RESTARTED: (Option<i32>, &str) = (Some(0), "restart remoca-disk@web1.service\n");

/// The hook of a host with the VM `web1`.
struct Hook {
    scene: Scene,
}

impl Hook {
    fn new() -> Self {
        let hook = Self { scene: Scene::new() };
        let folder = hook.scene.folder.path().display().to_string();
        let text = HOOK.replace("/etc/remoca", &folder).replace("/var/lib/libvirt", &folder);
        let text = text.replace("/run/remoca", &folder);
        hook.put("hook", &text);
        fs::create_dir(hook.scene.path("bin")).unwrap();
        for (name, text) in [("remoca", PROGRAM), ("systemctl", SYSTEMCTL), ("journalctl", JOURNALCTL)] {
            hook.put("program", &text.replace("REMOCA", REMOCA).replace("FOLDER", &folder));
            install(&hook.scene.path("program"), &hook.scene.path("bin").join(name));
        }
        hook.scene.configure("nbd-settle = 0");
        hook.unit("inactive", "", 0);
        hook
    }

    fn put(&self, name: &str, text: &str) {
        fs::write(self.scene.path(name), text).unwrap();
    }

    /// Says how `systemctl` answers: with the state of the unit, its state after a request (empty for the same), and the exit code
    /// of that.
    fn unit(&self, state: &str, after: &str, result: i32) {
        self.put("state", &format!("{state}\n"));
        self.put("result", &format!("{result}\n"));
        let _ = fs::remove_file(self.scene.path("after"));
        if !after.is_empty() {
            self.put("after", &format!("{after}\n"));
        }
    }

    /// Runs the hook. Returns its exit code, what it asked of systemd, and what it said.
    fn output(&self, arguments: &str, domain: &str, path: &str) -> (Option<i32>, String, String) {
        self.put("domain", &format!("<domain type='kvm'><devices>\n  {domain}\n</devices></domain>\n"));
        let _ = fs::remove_file(self.scene.path("asked"));
        let mut hook = command("/bin/sh");
        hook.arg(self.scene.path("hook")).args(arguments.split(' ')).env("PATH", path);
        let output = run_command(hook.stdin(File::open(self.scene.path("domain")).unwrap()));
        let asked = fs::read_to_string(self.scene.path("asked")).unwrap_or_default();
        (output.status.code(), asked, String::from_utf8_lossy(&output.stderr).into_owned())
    }

    fn path(&self) -> String {
        format!("{}:{}", self.scene.text("bin"), std::env::var("PATH").unwrap())
    }

    #[track_caller]
    fn expect_for(&self, arguments: &str, domain: &str, expected: (Option<i32>, &str)) {
        let (code, asked, said) = self.output(arguments, domain, &self.path());
        assert_eq!((code, &*asked), expected, "{arguments}, {domain}: {said}");
    }

    /// Runs the hook before `web1` starts, with a disk of ours.
    #[track_caller]
    fn expect(&self, expected: (Option<i32>, &str)) {
        self.expect_for("web1 prepare begin -", DISK, expected);
    }

    /// Expects that the start of the guest is refused with a reason, after these requests.
    #[track_caller]
    fn expect_refusal(&self, requests: &str) {
        let (code, asked, said) = self.output("web1 prepare begin -", DISK, &self.path());
        assert_eq!((code, &*asked), (Some(1), requests), "{said}");
        assert!(said.contains("the disks of web1 did not start: see `systemctl status remoca-disk@web1`"), "{said}");
    }
}

#[test]
fn the_hook_starts_the_disks_of_its_guests_alone() {
    let hook = Hook::new();
    for (arguments, domain) in [
        ("other prepare begin -", DISK),
        ("web1 release end -", DISK),
        ("web1 migrate begin -", DISK),
        ("web1 prepare begin -", "<disk type='file' device='disk'>"),
        ("web1 prepare begin -", CARD),
        ("web1 prepare begin -", EXPORT),
    ] {
        hook.expect_for(arguments, domain, NOTHING);
    }
    hook.expect(STARTED);
    hook.scene.configure("nbd = ['tcp:127.0.0.1:10809']");
    hook.expect_for("web1 prepare begin -", EXPORT, STARTED);

    hook.unit("inactive", "failed", 1);
    hook.expect_refusal("start remoca-disk@web1.service\nstop --no-block remoca-disk@web1.service\n");
    // Somebody else has started it, and it goes on trying.
    hook.unit("activating", "", 1);
    hook.expect_refusal("start remoca-disk@web1.service\n");

    // The package is gone, and so is its program.
    let left = hook.output("web1 prepare begin -", DISK, "/nonexistent");
    assert_eq!(left, (Some(0), String::new(), String::new()));
}

#[test]
fn a_guest_has_the_name_that_it_was_given() {
    let hook = Hook::new();
    for name in ["--help", r"a\b"] {
        fs::copy(hook.scene.path("vms/web1.toml"), hook.scene.path("vms").join(format!("{name}.toml"))).unwrap();
    }
    hook.expect_for("--help prepare begin -", DISK, (Some(0), "start remoca-disk@--help.service\n"));
    let (code, asked, said) = hook.output(r"a\b prepare begin -", DISK, &hook.path());
    assert_eq!((code, &*asked), (Some(1), ""), "{said}");
    assert!(said.starts_with(r"the disks of a\b are not started: "), "{said}");
}

#[test]
fn the_hook_restarts_a_process_of_the_unit_without_a_guest() {
    let hook = Hook::new();
    let scene = &hook.scene;
    let mut program = scene.start(&[]);
    // It was started by hand.
    hook.expect(NOTHING);
    hook.unit("active", "", 0);
    hook.expect(RESTARTED);
    hook.unit("active", "activating", 1);
    hook.expect_refusal("restart remoca-disk@web1.service\nstop --no-block remoca-disk@web1.service\n");
    // Its unit refuses to be stopped.
    hook.unit("active", "", 1);
    hook.expect(RESTARTED);
    hook.unit("active", "", 0);

    let attached = || status(&scene.control()).disks[0].attached;
    let mut guest = TestGuest::new(Options { queue_size: 16, data_bytes: 1 << 20, ..Options::default() });
    guest.connect(&scene.path("socket")).unwrap();
    wait_until("the guest is attached", attached);
    hook.expect(NOTHING);
    // libvirt refuses to restore it.
    hook.expect_for("web1 restore begin -", DISK, NOTHING);
    guest.disconnect();
    wait_until("the guest has gone", || !attached());
    hook.expect(RESTARTED);
    // It has its disks from another host, and started again it would wait for them.
    scene.configure("incoming = 'tcp:127.0.0.1:7100'");
    hook.expect(NOTHING);
    scene.configure("");
    hook.expect(RESTARTED);
    program.terminate();

    let (address, key) = (format!("unix:{}", scene.text("incoming")), key(scene.folder.path()).display().to_string());
    let _waiting = scene.start(&["--incoming", &address, "--incoming-key", &key]);
    assert!(status(&scene.control()).migration.is_some_and(|migration| !migration.has_disks));
    hook.expect(NOTHING);
}

/// Nobody waits for the disks any longer, so no screen is to say that they are missing.
#[test]
fn the_hook_removes_the_mark_of_a_process_that_ended_before_its_guest() {
    let hook = Hook::new();
    let control = hook.scene.control();
    left::leave(&control).unwrap();
    for (arguments, is_there) in
        [("other release end -", true), ("web1 migrate begin -", true), ("web1 release end -", false)]
    {
        hook.expect_for(arguments, DISK, NOTHING);
        assert_eq!(left::is_there(&control), is_there, "{arguments}");
    }
}

#[test]
fn a_guest_that_was_saved_goes_on_with_the_disks_that_it_had() {
    let hook = Hook::new();
    let scene = &hook.scene;
    let _program = scene.start(&[]);
    hook.unit("active", "", 0);
    fs::create_dir_all(scene.path("qemu/save")).unwrap();
    hook.put("qemu/save/web1.save", "");
    hook.expect(NOTHING);
    fs::remove_file(scene.path("qemu/save/web1.save")).unwrap();
    let restore = || hook.expect_for("web1 restore begin -", DISK, NOTHING);
    restore();
    hook.expect(NOTHING);
    hook.expect(RESTARTED);

    // It would write to a file without a name.
    restore();
    fs::rename(scene.path("image"), scene.path("image of before")).unwrap();
    fs::copy(scene.path("image of before"), scene.path("image")).unwrap();
    let (code, asked, said) = hook.output("web1 prepare begin -", DISK, &hook.path());
    assert_eq!((code, &*asked), (Some(1), ""), "{said}");
    let words = format!("{}: not the file that this process serves", scene.text("image"));
    assert!(said.starts_with("web1 goes on with the disks that it had") && said.contains(&words), "{said}");
    hook.expect(RESTARTED);
    fs::rename(scene.path("image of before"), scene.path("image")).unwrap();

    // What was to be restored was not.
    restore();
    let mark = File::options().write(true).open(scene.path("web1.restored")).unwrap();
    mark.set_modified(SystemTime::now() - Duration::from_secs(120)).unwrap();
    hook.expect(RESTARTED);
}

/// It is checked as one that does not run, and its image may be another file by now.
#[test]
fn a_guest_that_was_saved_does_not_go_on_with_disks_that_miss_the_second_of_a_check() {
    let hook = Hook::new();
    hook.unit("active", "", 0);
    fs::create_dir_all(hook.scene.path("qemu/save")).unwrap();
    hook.put("qemu/save/web1.save", "");
    let says = |process: &str| {
        let found = format!("{process}\nok       image root: /image, 1 MiB, used by nobody");
        hook.put("program", &format!("#!/bin/sh\n[ \"$1\" = status ] || echo '{found}'\n"));
        install(&hook.scene.path("program"), &hook.scene.path("bin/remoca"));
        hook.output("web1 prepare begin -", DISK, &hook.path())
    };
    let (code, asked, said) = says("failed   process: it has not answered for 1 s");
    assert_eq!((code, &*asked), (Some(1), ""), "{said}");
    assert!(said.starts_with("web1 goes on with the disks that it had when it was saved"), "{said}");
    assert_eq!(says("ok       process: runs").0, Some(0));
}

#[test]
fn a_start_that_failed_for_no_known_reason_is_refused_with_what_was_logged_last() {
    let hook = Hook::new();
    hook.unit("inactive", "failed", 1);
    hook.put("program", "#!/bin/sh\n[ \"$1\" = check ]\n");
    install(&hook.scene.path("program"), &hook.scene.path("bin/remoca"));
    let (code, _, said) = hook.output("web1 prepare begin -", DISK, &hook.path());
    assert_eq!(code, Some(1), "{said}");
    let words = "The last line of its log: what is logged: -q -u remoca-disk@web1.service ";
    assert!(said.contains(words) && !said.contains("finds"), "{said}");
}

/// QEMU would wait for it without an end, and so would libvirtd.
#[test]
fn no_guest_starts_with_a_socket_that_nobody_serves() {
    let hook = Hook::new();
    let scene = &hook.scene;
    let mut program = scene.start(&[]);
    hook.unit("active", "", 0);
    let disk = |socket: &str| {
        format!(
            "{DISK}\n<source type='unix' path='{socket}'>\n<reconnect enabled='yes' timeout='1'/>\n</source>\n</disk>\n"
        )
    };
    let served = disk(&scene.text("socket"));
    let card = format!("{CARD}\n<source type='unix' path='/nowhere/card' mode='client'/>\n</interface>");
    hook.expect_for("web1 prepare begin -", &format!("{served}{card}"), RESTARTED);
    // Without a file only sockets in our folder are ours.
    for domain in [&served, &disk("/nowhere/other")] {
        hook.expect_for("web9 prepare begin -", domain, NOTHING);
    }
    for (guest, socket, requests) in [
        ("web1", scene.text("data.sock"), RESTARTED.1),
        ("web1", "/nowhere/it&apos;s".to_owned(), RESTARTED.1),
        ("web9", scene.text("data.sock"), ""),
    ] {
        let domain = format!("{served}{}", disk(&socket));
        let (code, asked, said) = hook.output(&format!("{guest} prepare begin -"), &domain, &hook.path());
        assert_eq!((code, &*asked), (Some(1), requests), "{said}");
        let socket = socket.replace("&apos;", "'");
        let expected = format!("{guest} names {socket}, which no process serves: compare `remoca xml {guest}`\n");
        assert_eq!(said, expected);
    }
    // What was started for it does not stay.
    program.terminate();
    hook.unit("inactive", "active", 0);
    let (code, asked, said) = hook.output("web1 prepare begin -", &disk("/nowhere/gone"), &hook.path());
    let requests = "start remoca-disk@web1.service\nstop --no-block remoca-disk@web1.service\n";
    assert_eq!((code, &*asked), (Some(1), requests), "{said}");
}

/// systemd takes such a process for started, so a guest would wait for it, or get an image that was replaced.
#[test]
fn no_guest_starts_with_disks_that_hang() {
    let hook = Hook::new();
    let mut program = hook.scene.start(&[]);
    hook.unit("active", "", 0);
    program.signal(Signal::STOP);
    let (code, asked, said) = hook.output("web1 prepare begin -", DISK, &hook.path());
    assert_eq!((code, &*asked), (Some(1), ""), "{said}");
    assert!(said.contains("the disks of web1 do not answer: see `systemctl status remoca-disk@web1`"), "{said}");
    program.signal(Signal::CONT);
    hook.expect(RESTARTED);
    program.terminate();
    // Its control socket is elsewhere.
    hook.expect(STARTED);
}
