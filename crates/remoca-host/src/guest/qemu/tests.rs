//! Monitors that answer, refuse, hang, lie and die.

use super::*;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;
use tempfile::TempDir;

const GIB: u64 = 1 << 30;
/// Time for a QEMU that answers, however busy the machine is.
const LONG: Duration = Duration::from_secs(60);

/// A QEMU that answers commands from a table. Each connection begins with `greeting`; what is not in the table is refused.
struct Fake {
    folder: TempDir,
}

impl Fake {
    /// Starts one with these answers in place of those of a usable guest.
    fn start(changed: &[(&str, &str)]) -> Self {
        let mut answers: BTreeMap<String, String> = [
            ("qmp_capabilities", "{}"),
            ("qom-list /machine/peripheral", r#"[{"name":"type","type":"string"}]"#),
            ("qom-list /machine/peripheral-anon", r#"[{"name":"device[0]","type":"child<virtio-balloon-pci>"}]"#),
            ("query-memory-devices", "[]"),
            ("query-memdev", r#"[{"id":"mem"}]"#),
            ("qom-get /objects/mem hugetlb", "false"),
            ("query-status", r#"{"running":true,"status":"running"}"#),
            ("query-migrate", "{}"),
            ("query-memory-size-summary", r#"{"base-memory":1073741824,"plugged-memory":0}"#),
            ("query-balloon", r#"{"actual":805306368}"#),
            ("qom-get /machine/peripheral-anon/device[0] guest-stats-polling-interval", "2"),
            (
                "qom-get /machine/peripheral-anon/device[0] guest-stats",
                r#"{"stats":{"stat-major-faults":5,"stat-swap-in":8192,"stat-available-memory":18446744073709551615},"last-update":9}"#,
            ),
            ("balloon 1048576", "{}"),
        ]
        .map(|(command, answer)| (command.to_owned(), answer.to_owned()))
        .into();
        answers.extend(changed.iter().map(|(command, answer)| ((*command).to_owned(), (*answer).to_owned())));
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("qmp")).unwrap();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                serve(stream, &answers);
            }
        });
        Self { folder }
    }

    fn monitor(&self) -> Qemu {
        Qemu { patience: LONG, ..Qemu::new(self.folder.path().join("qmp")) }
    }

    fn read(&self) -> Result<GuestMemory, Unusable> {
        self.monitor().read()
    }
}

/// Answers the commands of one client. An answer that begins with `!` is sent as it is; `!` alone ends the connection.
fn serve(mut stream: UnixStream, answers: &BTreeMap<String, String>) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
    let mut say = move |text: String| stream.write_all(text.as_bytes()).is_ok();
    let mut is_on = say("{\"QMP\":{}}\n".into());
    while let Some(Ok(line)) = lines.next().filter(|_| is_on) {
        let asked: Value = serde_json::from_str(&line).unwrap();
        let arguments = &asked["arguments"];
        let words = [&asked["execute"], &arguments["path"], &arguments["property"], &arguments["value"]];
        let words = words
            .iter()
            .filter(|word| !word.is_null())
            .map(|word| word.as_str().map_or(word.to_string(), str::to_owned));
        let command = words.collect::<Vec<_>>().join(" ");
        let id = &asked["id"];
        is_on = match answers.get(&command).map(|answer| (answer, answer.strip_prefix('!'))) {
            Some((_, Some(""))) => return,
            Some((_, Some(raw))) => say(raw.replace("ID", &id.to_string())),
            Some((answer, None)) => say(format!("{{\"return\":{answer},\"id\":{id}}}\n")),
            None => {
                say(format!("{{\"error\":{{\"class\":\"GenericError\",\"desc\":\"no {command}\"}},\"id\":{id}}}\n"))
            }
        };
    }
}

fn advised(changed: &[(&str, &str)]) -> String {
    match Fake::start(changed).read() {
        Err(Unusable::Advised(why)) => why,
        other => panic!("{other:?}"),
    }
}

fn silent(changed: &[(&str, &str)]) -> String {
    match Fake::start(changed).read() {
        Err(Unusable::Silent(why)) => why,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_usable_guest_is_read_and_asked() {
    let qemu = Fake::start(&[]);
    let mut monitor = qemu.monitor();
    let memory = GuestMemory { boot_bytes: GIB, actual_bytes: GIB / 4 * 3, ..GuestMemory::default() };
    assert_eq!(monitor.read(), Ok(memory.clone()));
    assert_eq!(monitor.read(), Ok(memory), "the same message of the guest says nothing about its rates");
    assert_eq!(monitor.set_bytes(1 << 20), Ok(()));
    let refused = monitor.set_bytes(1 << 21).unwrap_err();
    assert!(refused.ends_with("balloon: no balloon 2097152"), "{refused}");
}

#[test]
fn statistics_are_begun_and_what_the_guest_does_not_tell_is_left_out() {
    let interval = "qom-get /machine/peripheral-anon/device[0] guest-stats-polling-interval";
    let begin = "qom-set /machine/peripheral-anon/device[0] guest-stats-polling-interval 2";
    for answers in
        [[(interval, "0"), (begin, "{}")], [(interval, "0"), ("unknown", "{}")], [(interval, "10"), (begin, "!")]]
    {
        let memory = Fake::start(&answers).read().unwrap();
        assert_eq!((memory.available_bytes, memory.pressure), (None, Default::default()), "{answers:?}");
    }
    // A period that suffices stays.
    for period in ["1", "5", "10"] {
        assert!(Fake::start(&[(interval, period), (begin, "!")]).read().is_ok(), "{period}");
    }
    // Another one is told.
    for period in ["0", "11", "300"] {
        let died = silent(&[(interval, period), (begin, "!")]);
        assert!(died.contains("closed the connection"), "{period}: {died}");
    }
}

#[test]
fn a_balloon_that_cannot_move_is_found() {
    let none = r#"!{"error":{"class":"DeviceNotActive","desc":"none"},"id":ID}"#.to_owned() + "\n";
    assert!(advised(&[("query-balloon", &none)]).contains("has no balloon"));
    assert!(advised(&[("query-status", r#"{"running":false}"#)]).contains("does not run"));
}

/// It can get back what was taken from it, so its numbers come along.
#[test]
fn what_forbids_to_take_from_a_guest_is_found() {
    let named = "qom-list /machine/peripheral";
    for (command, answer, why) in [
        (named, r#"[{"name":"gpu","type":"child<vfio-pci>"}]"#, "(vfio-pci gpu)"),
        (named, r#"[{"name":"net","type":"child<vhost-vdpa-device-pci>"}]"#, "(vhost-vdpa-device-pci net)"),
        (named, r#"[{"name":"m","type":"child<virtio-mem-pci>"}]"#, "(virtio-mem)"),
        ("query-memory-devices", r#"[{"type":"nvdimm"},{"type":"dimm","data":{"size":4096}}]"#, "(dimm)"),
        ("query-memory-devices", r#"[{"type":"virtio-mem"}]"#, "(virtio-mem)"),
        ("qom-get /objects/mem hugetlb", "true", "huge pages"),
        ("query-migrate", r#"{"status":"active"}"#, "is migrating"),
    ] {
        let found = Fake::start(&[(command, answer)]).read().unwrap();
        assert!(found.held.as_ref().is_some_and(|held| held.contains(why)), "{found:?}");
        assert_eq!(found.boot_bytes, GIB);
    }
}

#[test]
fn a_guest_that_leaves_this_host_is_told_from_one_that_has_come() {
    let read = |state: &str| {
        let found = Fake::start(&[("query-migrate", &format!("{{\"status\":\"{state}\"}}"))]).read().unwrap();
        (found.held.is_some(), found.leaves)
    };
    assert_eq!(["none", "completed", "failed", "cancelled"].map(read), [(false, false); 4]);
    assert_eq!(["setup", "wait-unplug", "active"].map(read), [(true, true); 3]);
    // It runs here already while the rest of it comes, or stays here.
    assert_eq!(["postcopy-active", "cancelling"].map(read), [(true, false); 2]);
}

/// QEMU counts DIMMs in what the balloon leaves, and in what it is asked to leave: without them a size to give back would take.
#[test]
fn memory_that_was_plugged_in_is_in_no_size() {
    let devices = r#"[{"type":"dimm","data":{"size":268435456}},{"type":"nvdimm","data":{"size":1}},{"type":"virtio-mem","data":{"size":1}}]"#;
    let qemu = Fake::start(&[
        ("query-memory-devices", devices),
        ("query-balloon", r#"{"actual":1073741824}"#),
        ("balloon 1073741824", "{}"),
    ]);
    let memory = qemu.read().unwrap();
    assert_eq!((memory.boot_bytes, memory.actual_bytes), (GIB, GIB / 4 * 3));
    assert_eq!(qemu.monitor().set_bytes(GIB / 4 * 3), Ok(()));
    assert!(qemu.monitor().set_bytes(1 << 20).unwrap_err().ends_with("no balloon 269484032"));
}

#[test]
fn nonsense_is_not_believed() {
    for (command, answer, why) in [
        ("query-balloon", r#"{"actual":1073741825}"#, "cannot be"),
        ("query-balloon", r#"{"actual":0}"#, "cannot be"),
        ("query-balloon", r#"{"actual":-1}"#, "tells no actual"),
        ("query-balloon", "[]", "tells no actual"),
        ("query-memory-size-summary", r#"{"base-memory":18446744073709551615}"#, "cannot be"),
        ("query-memdev", "{}", "returns no list"),
        ("query-memory-devices", "7", "returns no list"),
        ("query-memory-devices", r#"[{"type":"dimm","data":{}}]"#, "tells no size"),
        ("query-memory-devices", r#"[{"type":"dimm","data":{"size":18446744073709551615}}]"#, "cannot be"),
        ("query-status", "!", "closed the connection"),
        ("query-memdev", "!{\"return\":[]}\n", "does not speak QMP"),
        ("query-memdev", "!{]\n", "does not speak QMP"),
    ] {
        let found = silent(&[(command, answer)]);
        assert!(found.contains(why), "{found}");
    }
    let many = format!("[{}]", vec!["{}"; OBJECTS_MAX + 1].join(","));
    assert!(silent(&[("query-memdev", &many)]).contains("lists 1025 things"));
    let stats = r#"{"stats":[],"last-update":"never"}"#;
    assert!(Fake::start(&[("qom-get /machine/peripheral-anon/device[0] guest-stats", stats)]).read().is_ok());
}

#[test]
fn one_that_hangs_costs_its_time_and_one_that_is_gone_none() {
    let qemu = Fake::start(&[("query-memory-devices", "!{\"event\":\"RTC_CHANGE\"}\n")]);
    let begun = Instant::now();
    let mut hangs = Qemu { patience: PATIENCE, ..qemu.monitor() };
    let hangs = match hangs.read() {
        Err(Unusable::Silent(why)) => why,
        other => panic!("{other:?}"),
    };
    assert!(hangs.contains("did not answer in time") && begun.elapsed() >= PATIENCE, "{hangs}");
    let folder = tempfile::tempdir().unwrap();
    let mut gone = Qemu::new(folder.path().join("qmp"));
    assert!(matches!(gone.read(), Err(Unusable::Silent(why)) if why.contains("no QEMU listens there")));
    assert!(gone.set_bytes(GIB).unwrap_err().contains("no QEMU listens there"));
    let mut long = Qemu::new(folder.path().join("x".repeat(200)));
    assert!(matches!(long.read(), Err(Unusable::Silent(_))));
}

#[test]
fn the_innermost_mount_counts() {
    let mounts = "proc /proc proc rw 0 0\n/dev/sda / ext4 rw 0 0\nhuge /dev/hugepages hugetlbfs rw 0 0\nbroken\n\
                  tmpfs /dev/hugepages/not tmpfs rw 0 0\n";
    for (path, kind) in [
        ("/dev/hugepages/libvirt/a", "hugetlbfs"),
        ("/dev/hugepages/not/a", "tmpfs"),
        ("/dev/hugepages-not", "ext4"),
        ("/proc/1", "proc"),
    ] {
        assert_eq!(file_system_of(path, mounts), Some(kind), "{path}");
    }
    assert_eq!(file_system_of("relative", mounts), None);
}
