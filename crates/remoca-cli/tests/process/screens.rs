//! `remoca top`, the page and its metrics show the same figures as `remoca status -o json`, and name each fault first.

use super::configuration::Scene;
use super::support::fake_server::{FakeServer, Lie};
use super::support::fake_vm::{FakeVm, Manner};
use super::support::machine::{Machine, Setup};
use super::support::model::BLOCK;
use super::support::page::Page;
use super::support::program::{
    REMOCA, Serve, Signal, command, expect_refusal, install, run, run_command, status, until_answered, with_run,
};
use super::support::{wait_at_most, wait_until};
use remoca_frontend::testing::{Options, TestGuest};
use remoca_io::control::left;
use remoca_io::left_out::leave_out;
use remoca_protocol::control::Status;
use remoca_view::testing::absurd_status;
use serde_json::Value;
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Output, Stdio};
use std::time::Duration;

fn machine(name: &str, setup: Setup) -> Machine {
    machine_in(tempfile::tempdir().unwrap(), name, setup)
}

fn machine_in(folder: tempfile::TempDir, name: &str, setup: Setup) -> Machine {
    let arguments = [vec!["--name".into(), name.into()], setup.arguments].concat();
    Machine::start_in(folder, Setup { named: false, hedges: true, arguments, ..setup })
}

/// One snapshot as every screen shows it.
struct Screens {
    status: Vec<Value>,
    overview: Value,
    metrics: String,
    top: String,
}

/// Long, because all screens must be read within the three seconds of a snapshot, which a busy machine seldom manages.
const SNAPSHOT_PATIENCE: Duration = Duration::from_secs(600);

/// Reads all screens until they show the same snapshot, with `count` VMs: one that does not answer within a second is left out.
#[track_caller]
fn read(page: &Page, count: usize) -> Screens {
    let mut screens = None;
    wait_at_most(SNAPSHOT_PATIENCE, "all screens show one snapshot", || {
        let number = page.json("/api/snapshot")["snapshot"].as_u64().unwrap();
        let status: Vec<Value> = serde_json::from_str(&page.shown_by(&["status", "-o", "json"])).unwrap();
        let metrics = page.get("/metrics");
        let top = page.shown_by(&["top", "--once"]);
        let overview = page.json("/api/overview");
        let is_one = status.iter().all(|vm| vm["snapshot"] == number)
            && metrics.contains(&format!("\nremoca_snapshot {number}\n"))
            && top.contains(&format!("snapshot {number} of "))
            && overview["snapshot"] == number;
        // The first one has no figures since another.
        let is_whole = status.len() == count && status.iter().all(|vm| vm["recent"].is_object());
        screens = (is_one && is_whole).then_some(Screens { status, overview, metrics, top });
        screens.is_some()
    });
    screens.unwrap()
}

/// Returns the figures of a VM that its row has to show, computed here from its status.
fn wanted(vm: &Value) -> HashMap<&'static str, Option<f64>> {
    let recent = &vm["recent"];
    let number = |value: &Value| value.as_f64().unwrap();
    let ratio = |part: f64, all: f64| (all > 0.0).then(|| part / all);
    let mean_us = |taken: &Value| ratio(number(&taken["sum_ns"]) / 1000.0, number(&taken["count"]));
    let each_second = |name: &str| Some(number(&recent[name]) / number(&recent["seconds"]));
    HashMap::from([
        ("cache", (vm["cache"]["enabled"] == true).then(|| number(&vm["cache"]["granted_bytes"]))),
        ("used", Some(number(&vm["cache"]["used_bytes"]))),
        ("hits", ratio(number(&recent["hit_blocks"]), number(&recent["read_blocks"]))),
        ("hit_us", mean_us(&recent["hits"])),
        ("disk_us", mean_us(&recent["disk_reads"])),
        ("saved", recent["saved_s"].as_f64()),
        ("reads", each_second("reads")),
        ("writes", each_second("writes")),
        ("evicted", each_second("evicted")),
    ])
}

#[track_caller]
fn expect_row(screens: &Screens, vm: &Value) {
    let name = vm["name"].as_str().unwrap();
    let rows = screens.overview["rows"].as_array().unwrap();
    let row = rows.iter().find(|row| row["name"] == name).unwrap();
    let columns = screens.overview["columns"].as_array().unwrap();
    let mut wanted = wanted(vm);
    let figures = wanted.len();
    for (column, cell) in columns.iter().zip(row["cells"].as_array().unwrap()) {
        let Some(value) = wanted.remove(column["key"].as_str().unwrap()) else { continue };
        let is_same = match (cell["value"].as_f64(), value) {
            (Some(shown), Some(wanted)) => (shown - wanted).abs() <= wanted.abs() * 1e-12,
            (shown, wanted) => shown.is_none() && wanted.is_none(),
        };
        assert!(is_same, "{name} {column}: {cell}, and not {value:?}");
    }
    assert!(wanted.is_empty(), "{name}: no columns for {wanted:?}");
    // The terminal has the texts of the same cells.
    let line = screens.top.lines().find(|line| line.split(' ').next() == Some(name)).unwrap();
    let texts = row["cells"].as_array().unwrap().iter().map(|cell| cell["text"].as_str().unwrap());
    let words: Vec<&str> = std::iter::once(name).chain(texts.flat_map(str::split_whitespace)).collect();
    let shown: Vec<&str> = line.split_whitespace().collect();
    // A long address at the end may be cut.
    let count = shown.len() - 2;
    assert_eq!(shown[..count], words[..count], "{}", screens.top);
    assert!(count >= figures, "{}", screens.top);
}

#[track_caller]
fn expect_metrics(screens: &Screens, vm: &Value) {
    let name = vm["name"].as_str().unwrap();
    let shown = |metric: &str| {
        let start = format!("remoca_vm_{metric}{{vm=\"{name}\"}} ");
        let line = screens.metrics.lines().find_map(|line| line.strip_prefix(&start));
        line.map(|value| value.parse::<f64>().unwrap())
    };
    let (figures, counters) = (&vm["figures"], &vm["counters"]);
    let disks = |is_one: &dyn Fn(&Value) -> bool| {
        let count = vm["disks"].as_array().unwrap().iter().filter(|disk| is_one(disk)).count();
        Some(f64::from(u32::try_from(count).unwrap()))
    };
    let is_shared = vm["memory"]["guest_bytes"] != 0;
    for (metric, wanted) in [
        ("uptime_seconds", vm["uptime_s"].as_f64()),
        ("cache_wanted_bytes", vm["cache"]["wanted_bytes"].as_f64()),
        ("cache_granted_bytes", vm["cache"]["granted_bytes"].as_f64()),
        ("cache_used_bytes", vm["cache"]["used_bytes"].as_f64()),
        ("disks_unreachable", disks(&|disk| disk["store"] != "up")),
        ("disks_shrunk", disks(&|disk| !disk["shrunk_from_bytes"].is_null())),
        (
            "disks_without_memory",
            disks(&|disk| !is_shared && disk["attached"] == true && disk["nbd_clients"].is_null()),
        ),
        ("reads_total", figures["reads"].as_f64()),
        ("read_bytes_total", figures["read_bytes"].as_f64()),
        ("writes_total", figures["writes"].as_f64()),
        ("written_bytes_total", figures["written_bytes"].as_f64()),
        ("read_blocks_total", figures["read_blocks"].as_f64()),
        ("hit_blocks_total", figures["hit_blocks"].as_f64()),
        ("hits_total", figures["hits"]["count"].as_f64()),
        ("hits_seconds_total", figures["hits"]["sum_ns"].as_f64().map(|ns| ns / 1e9)),
        ("disk_reads_total", figures["disk_reads"]["count"].as_f64()),
        ("disk_reads_seconds_total", figures["disk_reads"]["sum_ns"].as_f64().map(|ns| ns / 1e9)),
        ("saved_seconds", figures["saved_s"].as_f64()),
        ("evicted_pages_total", figures["evicted"].as_f64()),
        ("known_pages_total", figures["known"].as_f64()),
        ("disk_errors_total", counters["disk_errors"].as_f64()),
        ("wrong_pages_total", counters["fetch_wrong"].as_f64()),
        ("missing_pages_total", counters["fetch_missing"].as_f64()),
        ("hedges_total", counters["hedges"].as_f64()),
        ("index_bytes", vm["memory"]["index_bytes"].as_f64()),
        ("up", Some(1.0)),
    ] {
        assert_eq!(shown(metric), wanted, "{name} {metric}");
    }
}

#[test]
fn every_screen_has_the_figures_of_status_and_a_process_that_hangs_holds_up_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let server = Serve::start(folder.path(), "16M");
    let mut busy = machine("busy", Setup { server: Some(server.address.clone()), seed: 901, ..Setup::default() });
    let quiet = machine("quiet", Setup { seed: 902, ..Setup::default() });
    let stopped = machine("stopped", Setup { seed: 903, ..Setup::default() });
    busy.run_until_hits(200);
    let controls = [busy.control(), quiet.control(), stopped.control()];
    // Reading all screens starts two programs, which a slow machine never does within the time between more frequent snapshots.
    let page = Page::start_every(3, folder.path(), &controls);
    let screens = read(&page, 3);
    for vm in &screens.status {
        expect_row(&screens, vm);
        expect_metrics(&screens, vm);
    }
    // What a command asks for itself is the same, if nothing has happened in between.
    let control = quiet.control().display().to_string();
    let direct: Value = serde_json::from_slice(&run(&["status", "-o", "json", &control]).stdout).unwrap();
    let of_page = screens.status.iter().find(|vm| vm["name"] == "quiet").unwrap();
    for part in ["counters", "cache", "disks", "latency", "memory", "pid"] {
        assert_eq!(direct[0][part], of_page[part], "{part}");
    }
    assert_eq!(direct[0]["snapshot"], 1);

    stopped.program.signal(Signal::STOP);
    wait_until("the process that hangs is named first", || {
        page.causes().first().is_some_and(|cause| cause == "process-hangs")
    });
    busy.run(4);
    let screens = read(&page, 2);
    screens.status.iter().for_each(|vm| expect_row(&screens, vm));
    let second = screens.top.lines().nth(1).unwrap();
    assert!(second.starts_with("failed   stopped: process: it has not answered for "), "{}", screens.top);
    assert!(screens.metrics.contains("remoca_vm_up{vm=\"stopped\"} 0\n"));
    // Its queue of clients is not full of ours.
    let first = page.json("/api/snapshot")["snapshot"].as_u64().unwrap();
    wait_until("some more snapshots", || page.json("/api/snapshot")["snapshot"].as_u64().unwrap() > first + 3);
    stopped.program.signal(Signal::CONT);
    wait_until("it is back", || page.causes().iter().all(|cause| cause != "process-hangs"));
    read(&page, 3);
}

/// Runs until the first thing on all screens is this cause, with these words.
#[track_caller]
fn expect_first(page: &Page, machine: &mut Machine, cause: &str, words: &[&str]) {
    machine.run_until(cause, |_| page.causes().first().is_some_and(|first| first == cause));
    // A cause that is seen in what happened lately is gone when nothing happens.
    machine.run_until(&format!("the terminal names {cause}, and the metrics count it"), |_| {
        let top = page.shown_by(&["top", "--once"]);
        // It may be long, and then has two lines.
        let first: Vec<&str> = top.lines().skip(1).take(2).map(str::trim).collect();
        words.iter().all(|word| first.join(" ").contains(word))
            && !page.get("/metrics").contains("remoca_vm_problems{vm=\"ill\"} 0\n")
    });
}

fn page_of(machine: &Machine) -> Page {
    Page::start(machine.folder.path(), &[machine.control()])
}

#[test]
fn a_donor_that_lies_is_named_first() {
    let folder = tempfile::tempdir().unwrap();
    let server = FakeServer::start(&folder.path().join("server"), Lie::None);
    let setup = Setup { server: Some(server.address.clone()), cache: "2M", seed: 911, ..Setup::default() };
    let mut machine = machine_in(folder, "ill", setup);
    machine.server_is_honest = false;
    let page = page_of(&machine);
    machine.run_until_hits(50);
    server.lie(Lie::WrongByte);
    expect_first(&page, &mut machine, "lying-server", &["warning  ill: server ", &server.address, "it lies: "]);
    // `remoca check` begins with it.
    let control = machine.control().display().to_string();
    let checked = until_answered(|| run(&["check", &control, "-o", "json", "--config", "/nonexistent"]));
    let findings: Vec<Value> = serde_json::from_slice(&checked.stdout).unwrap();
    assert!(findings[0]["found"].as_str().unwrap().starts_with("it lies: "), "{findings:#?}");
}

#[test]
fn a_donor_that_is_full_is_named_first() {
    let folder = tempfile::tempdir().unwrap();
    let server = Serve::start(folder.path(), "2M");
    let setup = Setup { server: Some(server.address.clone()), cache: "8M", seed: 912, ..Setup::default() };
    let mut machine = machine("ill", setup);
    let page = page_of(&machine);
    let words = ["full: 2M of the 8M wanted are granted", &format!("{} has at most 2M for it", server.address)];
    expect_first(&page, &mut machine, "full-server", &words);
}

#[test]
fn each_donor_that_is_away_is_named_whether_or_not_the_others_suffice() {
    let folder = tempfile::tempdir().unwrap();
    let server = Serve::start(folder.path(), "16M");
    let away = ["away1", "away2"].map(|name| format!("unix:{}", folder.path().join(name).display()));
    let arguments = away.iter().map(|address| format!("--server={address}")).collect();
    let setup = Setup { server: Some(server.address.clone()), arguments, seed: 918, ..Setup::default() };
    let machine = machine("ill", setup);
    let control = machine.control().display().to_string();
    let wait_until_named = |rest: &str| {
        wait_until("each is named", || {
            let said = String::from_utf8(run(&["top", "--once", &control]).stdout).unwrap();
            // Long lines are wrapped.
            let said = said.split_whitespace().collect::<Vec<_>>().join(" ");
            let is_named = |address: &String| said.contains(&format!("warning ill: server {address}: not connected: "));
            away.iter().all(is_named) && said.matches(rest).count() == away.len()
        });
    };
    wait_until_named("The others have granted all of the 4M wanted");
    machine.set("\"cache_bytes\":67108864");
    wait_until_named("The others have granted 16M of the 64M wanted");
}

/// Passes bytes on between a client and the memory server at `target`; those of the server come late.
fn relay(at: &Path, target: &Path) {
    let (listener, target) = (UnixListener::bind(at).unwrap(), target.to_owned());
    let pass = |mut from: UnixStream, mut to: UnixStream, delay: Duration| {
        let mut bytes = vec![0; 1 << 16];
        while let Ok(count @ 1..) = from.read(&mut bytes) {
            std::thread::sleep(delay);
            if to.write_all(&bytes[..count]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(std::net::Shutdown::Both);
    };
    std::thread::spawn(move || {
        while let Ok((client, _)) = listener.accept() {
            let server = UnixStream::connect(&target).unwrap();
            let (to_client, to_server) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            std::thread::spawn(move || pass(client, to_server, Duration::ZERO));
            std::thread::spawn(move || pass(server, to_client, Duration::from_millis(40)));
        }
    });
}

#[test]
fn a_donor_that_is_slow_is_named_first() {
    let folder = tempfile::tempdir().unwrap();
    let _server = Serve::start(folder.path(), "16M");
    let slow = folder.path().join("slow");
    relay(&slow, &folder.path().join("server"));
    let address = format!("unix:{}", slow.display());
    let mut machine = machine("ill", Setup { server: Some(address.clone()), seed: 913, ..Setup::default() });
    let page = page_of(&machine);
    expect_first(&page, &mut machine, "slow-server", &["server ", &address, " slow: "]);
}

#[test]
fn a_disk_that_is_slow_is_named_first() {
    let folder = tempfile::tempdir().unwrap();
    let server = Serve::start(folder.path(), "16M");
    let server = Some(server.address.clone());
    let setup = Setup { server, nbd: true, nbd_delay: "70ms", seed: 914, ..Setup::default() };
    let mut machine = machine("ill", setup);
    let page = page_of(&machine);
    expect_first(&page, &mut machine, "slow-disk", &["warning  ill: disk: slow: a read of nbd+unix:///?socket="]);
}

#[test]
fn an_agent_that_is_gone_is_named_first() {
    let folder = tempfile::tempdir().unwrap();
    let server = Serve::start(folder.path(), "16M");
    let mut machine = machine("ill", Setup { server: Some(server.address.clone()), seed: 915, ..Setup::default() });
    let page = page_of(&machine);
    let mut report = vec![0; BLOCK];
    report[..8].copy_from_slice(b"REMOCAST");
    report[8] = 1;
    machine.send_to_port(0, &report);
    machine.run_until("the agent is heard", |_| !page.causes().iter().any(|cause| cause == "agent-gone"));
    // It does not report again. While the guest reads, a server that was left alone in a slow moment is asked again.
    machine.run_until("the agent is missed", |_| page.causes().first().is_some_and(|cause| cause == "agent-gone"));
    expect_first(
        &page,
        &mut machine,
        "agent-gone",
        &["agent: last heard ", "what the guest evicts does not reach the cache"],
    );
}

/// A page that takes a snapshot each three seconds is asked each second. Nothing happens between a snapshot and itself.
#[test]
fn a_snapshot_of_a_page_is_shown_once() {
    let machine = machine("seen", Setup { seed: 917, ..Setup::default() });
    let page = Page::start_every(3, machine.folder.path(), &[machine.control()]);
    let mut table = String::new();
    // On a busy machine it may not have answered in time for each of them.
    wait_until("a line of each of three snapshots", || {
        let output = run(&["status", "-i", "1", "-c", "3", "--from", &page.address]);
        table = String::from_utf8_lossy(&output.stdout).into_owned();
        output.status.success() && table.lines().count() == 4
    });
    let mut over = table.lines().skip(1).filter_map(|line| line.split_whitespace().nth(1));
    assert!(over.all(|over| over != "0s"), "{table}");
}

/// `script` gives it a terminal, and keeps what is written there.
#[test]
fn the_terminal_screen_shows_a_vm_and_a_key_ends_it() {
    let machine = machine("seen", Setup { seed: 916, ..Setup::default() });
    let written = machine.folder.path().join("terminal");
    let program = format!("stty rows 24 columns 100; exec {REMOCA} top -i 1 {}", machine.control().display());
    let mut script = command("script");
    script.args(["-q", "-f", "-e", "-c", &program]).arg(&written).env("TERM", "xterm");
    let mut script = script.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let shown = || String::from_utf8_lossy(&std::fs::read(&written).unwrap_or_default()).into_owned();
    let mut keys = script.stdin.take().unwrap();
    wait_until("the VM is on the screen", || shown().matches("seen").count() > 1);
    keys.write_all(b"q").unwrap();
    let mut ended = None;
    wait_until("the key ends it", || {
        ended = script.try_wait().unwrap();
        ended.is_some()
    });
    // The screen of before is back, with its cursor.
    assert!(ended.unwrap().success() && shown().contains("\u{1b}[?1049l"), "{}", shown());
}

#[test]
fn more_vms_than_files_that_may_be_open_are_asked_in_turn() {
    let folder = tempfile::tempdir().unwrap();
    let names: Vec<String> = (0..100).map(|number| format!("vm{number}")).collect();
    names.iter().for_each(|name| drop(FakeVm::start(folder.path(), name, Manner { mib: 4, ..Manner::default() })));
    // On a busy machine not all of them answer within a second, now and then.
    wait_until("all answer", || {
        let mut top = command("sh");
        top.args(["-c", "ulimit -n 64 && exec \"$@\"", "sh", REMOCA, "top", "--once"]);
        top.args(names.iter().map(|name| folder.path().join(format!("{name}.ctl"))));
        String::from_utf8_lossy(&run_command(&mut top).stdout).contains(" 100 of 100 VMs answer")
    });
}

#[test]
fn many_processes_that_hang_are_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let controls = ["vm1", "vm2", "vm3"].map(|name| folder.path().join(format!("{name}.ctl")));
    // Nobody accepts.
    let _listeners = controls.each_ref().map(|control| UnixListener::bind(control).unwrap());
    wait_until("they are named together", || {
        let output = run_command(command(REMOCA).args(["top", "--once"]).args(&controls));
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        said.contains("failed   vm1 and 2 more: process: it has not answered for ")
            && said.contains("remoca-disk@NAME`")
            && said.matches(": process: ").count() == 1
    });
}

/// Answers every client of a control socket with this line.
fn always_say(control: &Path, line: String) {
    let listener = UnixListener::bind(control).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = BufReader::new(stream.unwrap());
            stream.read_line(&mut String::new()).unwrap();
            // A client that takes no more is no matter.
            let _ = writeln!(stream.get_mut(), "{line}");
        }
    });
}

#[test]
fn a_process_that_says_absurd_numbers_does_not_end_who_shows_them() {
    let folder = tempfile::tempdir().unwrap();
    let [one, other] = ["one", "other"].map(|name| {
        let control = folder.path().join(format!("{name}.ctl"));
        let status = Status { name: name.into(), ..absurd_status() };
        always_say(&control, serde_json::to_string(&status).unwrap());
        control.display().to_string()
    });
    for arguments in [
        &["status", &one][..],
        &["status", "--verbose", &one],
        &["status", "-o", "json", &one],
        &["top", "--once", &one, &other],
        &["check", &one],
    ] {
        let output = run_command(command(REMOCA).args(arguments));
        let is_check = arguments[0] == "check";
        // The checks of one VM also look at this host.
        assert!(output.status.success() || is_check && output.status.code() == Some(1), "{arguments:?}: {output:?}");
        assert!(String::from_utf8_lossy(&output.stdout).contains("one"), "{arguments:?}: {output:?}");
    }
}

#[test]
fn a_process_whose_answer_makes_no_sense_is_not_said_to_be_away() {
    let folder = tempfile::tempdir().unwrap();
    let control = folder.path().join("web1.ctl");
    always_say(&control, r#"{"name": "web1"}"#.into());
    let shown = control.display().to_string();
    for arguments in [&["status", &shown][..], &["check", &shown]] {
        let words = [
            "the answer of the VM process at",
            "Is it of another version? Ask with the program of that version, or restart it",
        ];
        expect_refusal(&run_command(command(REMOCA).args(arguments)), 1, &words);
    }
    wait_until("the list of VMs has it", || {
        let output = run_command(command(REMOCA).args(["top", "--once", &shown]));
        String::from_utf8_lossy(&output.stdout).contains("warning  web1: process: its answer makes no sense")
    });
}

#[test]
fn who_may_not_ask_is_told_so() {
    let folder = tempfile::tempdir().unwrap();
    let [program, host] = ["remoca", "run"].map(|name| folder.path().join(name));
    let mode = |path: &Path, mode| std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    std::fs::create_dir(&host).unwrap();
    install(Path::new(REMOCA), &program);
    mode(folder.path(), 0o755);
    if with_run(&host).is_none() {
        return leave_out("this user may not mount a file system in memory");
    }
    let look = |arguments: &[&str]| {
        let mut look = with_run(&host).unwrap();
        look.args(["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]).arg(&program).args(arguments);
        run_command(look.env("XDG_RUNTIME_DIR", "/run/user/65534"))
    };
    let (top, list) = (|| look(&["top", "--once"]), || look(&["status", "-o", "json"]));
    let none = top();
    assert!(String::from_utf8_lossy(&none.stdout).contains("No VM process runs here"), "{none:?}");
    assert_eq!(list().status.code(), Some(0));
    std::fs::write(host.join("web1.ctl"), "").unwrap();
    mode(&host.join("web1.ctl"), 0o600);
    let words = ["no VM process that you may ask", "/run/remoca has web1, which root may reach"];
    expect_refusal(&top(), 1, &[&words[..], &["say `sudo remoca top /run/remoca/web1.ctl`"]].concat());
    // A program would take the host for an empty one.
    let listed = list();
    assert_eq!(listed.status.code(), Some(1));
    assert!(
        String::from_utf8_lossy(&listed.stderr).contains("/run/remoca has web1, which root may reach"),
        "{listed:?}"
    );
    mode(&host, 0o700);
    expect_refusal(&top(), 1, &["no VM process that you may ask", "/run/remoca is not open to you", "with sudo"]);
}

/// Its guest hangs, as after a kill.
#[test]
fn a_vm_whose_process_was_told_to_end_under_its_guest_does_not_vanish() {
    let scene = Scene::new();
    if with_run(scene.folder.path()).is_none() {
        return leave_out("this user may not mount a file system in memory");
    }
    let look = |arguments: &[&str]| -> (String, Option<i32>) {
        let mut look = with_run(scene.folder.path()).unwrap();
        let look: Output = run_command(look.arg(REMOCA).args(arguments).env("REMOCA_CONFIG", scene.folder.path()));
        (String::from_utf8_lossy(&look.stdout).into_owned(), look.status.code())
    };
    let expect_named = || {
        for (arguments, line) in [
            (&["check"][..], "failed   web1: process: it does not run: it was told to end while a guest was attached"),
            (&["top", "--once"], "failed   web1: process: it does not run"),
            (&["check", "web1"], "failed   process: does not run: it was told to end while a guest was attached"),
        ] {
            let (shown, code) = look(arguments);
            assert!(shown.lines().any(|shown| shown.starts_with(line)), "`{line}` is missing in {shown}");
            assert_eq!(code, Some(i32::from(arguments[0] == "check")), "{shown}");
        }
    };
    scene.configure("");
    let mut program = scene.start(&[]);
    let mut guest = TestGuest::new(Options::default());
    guest.connect(&scene.path("socket")).unwrap();
    wait_until("the guest is attached", || status(&scene.control()).disks[0].attached);
    program.terminate();
    assert!(!scene.control().exists());
    expect_named();
    // Its successor does not serve.
    std::fs::rename(scene.path("image"), scene.path("moved")).unwrap();
    let mut start = command(REMOCA);
    start.args(["disk", "--name", "web1", "--control"]).arg(scene.control());
    let refused = run_command(start.env("REMOCA_CONFIG", scene.folder.path()));
    assert!(!refused.status.success());
    expect_named();

    std::fs::rename(scene.path("moved"), scene.path("image")).unwrap();
    std::fs::hard_link(left::beside(&scene.control()), scene.path("mark")).unwrap();
    program = scene.start(&[]);
    let (shown, _) = look(&["check"]);
    let is_named = shown.contains("does not run");
    assert!(!left::beside(&scene.control()).exists() && !shown.is_empty() && !is_named, "{shown}");
    // Its guest has not come again.
    program.terminate();
    assert!(!left::beside(&scene.control()).exists());
    // An older program would not have removed the mark.
    std::fs::rename(scene.path("mark"), left::beside(&scene.control())).unwrap();
    let (shown, _) = look(&["check"]);
    assert!(!shown.contains("it was told to end"), "{shown}");
    assert!(!look(&["top", "--once"]).0.contains("web1"));
}

#[test]
fn an_address_that_others_reach_has_to_be_asked_for() {
    expect_refusal(&run(&["web", "--listen", "0.0.0.0:0"]), 78, &["can be reached from other hosts", "--open"]);
    expect_refusal(&run(&["web", "--listen", "everywhere"]), 2, &["`everywhere` is no address", "127.0.0.1:9170"]);
    expect_refusal(&run(&["status", "--from", "127.0.0.1:1"]), 1, &["no page answers at 127.0.0.1:1"]);
    expect_refusal(
        &run(&["top", "--once", "--from", "unix:/nonexistent/page"]),
        1,
        &["no page answers at unix:/nonexistent/page"],
    );
}
